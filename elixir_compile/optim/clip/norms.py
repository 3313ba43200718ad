"""Compute gradient norms, without reading gradients again whose norm the backward has already computed.

The backward computes the norm of a gradient on its way to the host: see `runtime.published.GradNormCache`.

squares_of   sum of squares, in double on the host, in fp32 on a device; float64 gradients in float64 on both
norm_of      bitwise equal to the norm that `torch.nn.utils.clip_grad_norm_` computes for a single gradient
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from elixir_compile.ops.registry import slot_of
from elixir_compile.ops.shards import is_sharded, own_grad, sum_over_parts
from elixir_compile.optim.host import sum_of_squares
from elixir_compile.runtime.executor import executor_of_slot
from elixir_compile.runtime.published import Squares, SquaresOf
from elixir_compile.runtime.slab import flat

_HELD_BY_FP32 = (2.0**-30, 2.0**60)
"""Between these norms, fp32 squares neither overflow nor vanish. Outside, a gradient on the host is summed again."""


def squares_of(grad: torch.Tensor) -> Squares:
    """Return the sum of squares of `grad` as a float if `grad` is on the host, else its norm as a device tensor."""
    is_double = grad.dtype == torch.float64
    if grad.device.type == "cpu" and not is_double and grad.is_contiguous():
        return sum_of_squares(flat(grad)) if grad.numel() else 0.0
    norm = torch.linalg.vector_norm(grad, dtype=torch.float64 if is_double else torch.float32)
    return float(norm) ** 2 if grad.device.type == "cpu" else norm


def norm_of(grad: torch.Tensor) -> torch.Tensor:
    """Return the 2-norm of `grad`, with its dtype, on its device."""
    return _foreach_norm([grad])[0]


def known_squares(params: Iterable[nn.Parameter], squares: SquaresOf) -> Mapping[int, Squares]:
    """Return the results of `squares` that the backward has cached, by the id of the parameter.

    Also ask the backwards of later steps to cache `squares` for all of `params`.
    """
    slots = {id(param): slot for param in params if (slot := slot_of(param)) is not None}
    found: dict[int, Squares] = {}
    for executor in dict.fromkeys(map(executor_of_slot, slots.values())):
        selected = {key: slot for key, slot in slots.items() if slot.sink is executor}
        known = executor.gradients.norm_cache.known(squares)
        found |= {key: known[slot.key] for key, slot in selected.items() if slot.key in known}
        executor.gradients.norm_cache.ask(selected.values(), squares)
    return found


def sum_of_all_squares(params: Sequence[nn.Parameter], known: Mapping[int, Squares]) -> float:
    """Return the sum of the squares of all gradients of `params`, summed over ranks if a parameter is sharded.

    Gradients on a device cost a single synchronisation in all.
    """
    sharded = [param for param in params if is_sharded(param)]
    squares = _own_squares([param for param in params if not is_sharded(param)], known)
    return squares + sum_over_parts(_own_squares(sharded, known), sharded[0]) if sharded else squares


def _own_squares(params: Iterable[nn.Parameter], known: Mapping[int, Squares]) -> float:
    """Return the sum of squares over this rank's gradients of `params`, which may be shards."""
    total, computing = 0.0, []
    for param in params:
        squares = known[id(param)] if id(param) in known else squares_of(own_grad(param))
        if isinstance(squares, float):
            total += squares
        else:
            computing.append((param, squares))
    if not computing:
        return total
    for (param, _), norm in zip(computing, torch.stack([norm for _, norm in computing]).tolist(), strict=True):
        is_held = _HELD_BY_FP32[0] < norm < _HELD_BY_FP32[1] or own_grad(param).device.type != "cpu"
        total += norm**2 if is_held else float(squares_of(own_grad(param)))
    return total


def clip_as_torch(params: Sequence[nn.Parameter], max_norm: float, known: Mapping[int, Squares]) -> torch.Tensor:
    """Clip as `torch.nn.utils.clip_grad_norm_` does, but take cached norms from `known`; return the total norm.

    The bits can differ from torch only if gradients have several devices or dtypes, or if a cached norm was computed on
    another device than the gradient's.
    """
    if not known:
        return torch.nn.utils.clip_grad_norm_(params, max_norm)
    grads = {id(param): param.grad for param in params if param.grad is not None}
    norms = {key: norm for key, norm in known.items() if isinstance(norm, torch.Tensor)}
    unknown: dict[tuple[torch.device, torch.dtype], dict[int, torch.Tensor]] = {}
    for key, grad in grads.items():
        if key not in norms:
            unknown.setdefault((grad.device, grad.dtype), {})[key] = grad
    for group in unknown.values():
        norms |= zip(group, _foreach_norm(list(group.values())), strict=True)
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for key in grads:
        by_device.setdefault(norms[key].device, []).append(norms[key])
    first = next(iter(grads.values())).device
    total = torch.linalg.vector_norm(torch.cat([torch.stack(group).to(first) for group in by_device.values()]), 2.0)
    if not torch.isfinite(total):  # a device norm in fp32 may overflow although torch's norm on the host does not
        return torch.nn.utils.clip_grad_norm_(params, max_norm)
    if max_norm / (total + 1e-6) < 1.0:  # torch also multiplies by a factor of 1, which changes no finite number
        torch.nn.utils.clip_grads_with_norm_(params, max_norm, total)
    return total


def _foreach_norm(grads: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return the 2-norm of each gradient, by the operator that `torch.nn.utils.clip_grad_norm_` calls."""
    return torch._foreach_norm(list(grads), 2.0)  # pyright: ignore[reportPrivateImportUsage]
