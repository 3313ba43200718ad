"""The norm of gradients, of which those that the backward has read on their way to the host are not read again.

squares_of   the host sums in double, a device in fp32; of a float64 gradient both in float64
norm_of      bitwise what `torch.nn.utils.clip_grad_norm_` computes of one gradient
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from elixir_compile.ops.registry import slot_of
from elixir_compile.ops.shards import is_sharded, own_grad, sum_over_parts
from elixir_compile.optim.host import sum_of_squares
from elixir_compile.runtime.grad_norms import Squares, SquaresOf
from elixir_compile.runtime.slab import flat

_HELD_BY_FP32 = (2.0**-30, 2.0**60)
"""A norm between these was computed in fp32 of squares that it can hold; of others a gradient on the host is read."""


def squares_of(grad: torch.Tensor) -> Squares:
    """Return the sum of the squares of `grad` where it is on the host; else its norm, as a tensor of its device."""
    is_double = grad.dtype == torch.float64
    if grad.device.type == "cpu" and not is_double and grad.is_contiguous():
        return sum_of_squares(flat(grad)) if grad.numel() else 0.0
    norm = torch.linalg.vector_norm(grad, dtype=torch.float64 if is_double else torch.float32)
    return float(norm) ** 2 if grad.device.type == "cpu" else norm


def norm_of(grad: torch.Tensor) -> torch.Tensor:
    """Return the norm of `grad` in its dtype, on its device."""
    return torch._foreach_norm([grad], 2.0)[0]


def known_squares(params: Iterable[nn.Parameter], squares: SquaresOf) -> Mapping[int, Squares]:
    """Return `squares` of the gradients that the backward has read, by the id of the parameter, and let it read those
    of `params` in the steps to come."""
    slots = {id(param): slot for param in params if (slot := slot_of(param)) is not None}
    found: dict[int, Squares] = {}
    for executor in dict.fromkeys(slot.sink for slot in slots.values()):
        own = {key: slot for key, slot in slots.items() if slot.sink is executor}
        known = executor.gradients.norm_cache.known(squares)
        found |= {key: known[slot.key] for key, slot in own.items() if slot.key in known}
        executor.gradients.norm_cache.ask(own.values(), squares)
    return found


def sum_of_all_squares(params: Sequence[nn.Parameter], known: Mapping[int, Squares]) -> float:
    """Return the sum of the squares of the gradients of `params`, over all ranks that have parts of them; those on a
    device cost one wait together."""
    cut = [param for param in params if is_sharded(param)]
    squares = _own_squares([param for param in params if not is_sharded(param)], known)
    return squares + sum_over_parts(_own_squares(cut, known), cut[0]) if cut else squares


def _own_squares(params: Iterable[nn.Parameter], known: Mapping[int, Squares]) -> float:
    """Return the sum of the squares of what this rank has of the gradients."""
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
    """Do as `torch.nn.utils.clip_grad_norm_` with the norms that are `known`; the bits differ only where gradients are
    of several devices or dtypes, or were read on another device."""
    if not known:
        return torch.nn.utils.clip_grad_norm_(params, max_norm)
    left: dict[tuple[torch.device, torch.dtype], list[nn.Parameter]] = {}
    for param in params:
        if id(param) not in known:
            left.setdefault((param.grad.device, param.grad.dtype), []).append(param)
    norms = dict(known)
    for own in left.values():
        norms |= zip(map(id, own), torch._foreach_norm([param.grad for param in own], 2.0), strict=True)
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for param in params:
        by_device.setdefault(norms[id(param)].device, []).append(norms[id(param)])
    first = params[0].grad.device
    total = torch.linalg.vector_norm(torch.cat([torch.stack(own).to(first) for own in by_device.values()]), 2.0)
    if not torch.isfinite(total):  # in fp32 a device may overflow where the host does not
        return torch.nn.utils.clip_grad_norm_(params, max_norm)
    if max_norm / (total + 1e-6) < 1.0:  # torch multiplies by 1 too, which changes no finite number
        torch.nn.utils.clip_grads_with_norm_(params, max_norm, total)
    return total
