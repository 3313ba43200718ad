"""Prepare a model: its parameters read as gathers, so that a plan may place them in any memory."""

import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from elixir_compile import compat
from elixir_compile.capture.modules import executor_of, is_swapped, swap, undo_swap, unmanaged_reason
from elixir_compile.errors import NotPrepared, UnsupportedModel
from elixir_compile.managed.masters import cast, gets_master, torch_dtype
from elixir_compile.managed.share import materialize, ranks_of, shard_parameters
from elixir_compile.ops.aliases import aliases, moved_together
from elixir_compile.ops.masters import has_master
from elixir_compile.ops.registry import Slot
from elixir_compile.ops.shards import is_dtensor
from elixir_compile.options import ParamDtype, parse_options
from elixir_compile.runtime.distributed.ranks import Ranks, device_of
from elixir_compile.runtime.executor import Executor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_lock = threading.RLock()


def prepare(
    model: nn.Module,
    device: "torch.device | str | None" = None,
    *,
    param_dtype: ParamDtype | None = None,
    mesh: "DeviceMesh | None" = None,
) -> nn.Module:
    """Make every parameter of `model` readable on `device`, whatever memory it is in, and return `model`.

    The parameters keep their identity and stay in their memory; a parameter on `meta` is created on the host. So a
    model larger than the device is never on it as a whole. Buffers move to `device`. Its default is the device of the
    first parameter that is not on `meta`. `state_dict()` keys do not change. Preparing again changes nothing.

    `param_dtype` casts fp32 parameters, not buffers, to `"bfloat16"` or `"float16"`. HybridAdamW then updates an fp32
    master, which starts with every bit of the present weights. Parameters already of `param_dtype` get a master too.

    With a `mesh` of several ranks, each rank must call this together. Parameters become DTensors, sharded along
    dimension 0 over the last axis of the mesh; ranks along an axis before it hold copies. Small tensors are complete on
    each rank. All ranks get the values of the first rank. Make the optimizer after this call.

    Raises UnsupportedModel if the model has no parameters, or was prepared for another device or `param_dtype`, and
    InvalidOption if `param_dtype` is unknown.

    Example:
        layer = elixir.prepare(torch.nn.Linear(4, 4, device="meta"), "cpu")
        compiled = torch.compile(layer, backend="elixir")
    """
    param_dtype = parse_options({"param_dtype": param_dtype}).param_dtype
    model = compat.undo_compile(model)
    ranks = ranks_of(mesh)
    with _lock:
        target = _target_device(model, device if mesh is None else device or device_of(mesh))
        prepared = executor_of(model)
        if prepared is not None:
            if prepared.device != target and device is not None:
                raise UnsupportedModel(
                    type(model).__name__, f"it was prepared for {prepared.device} and cannot move to {target}"
                )
            if param_dtype is not None:
                _require_masters(model, param_dtype)
            return model
        if ranks is None:
            materialize(model)
        else:
            shard_parameters(model, ranks, None if param_dtype is None else torch_dtype(param_dtype))
        if param_dtype is not None:
            cast(model, param_dtype)
        executor = new_executor([model], target, ranks)
        swap_modules([model], executor)
        move_rest([model], executor)
    return model


def new_executor(
    roots: Sequence[nn.Module],
    device: torch.device,
    ranks: Ranks | None = None,
    *,
    originals: Sequence[nn.Module] = (),
) -> Executor:
    """Return an executor with a slot for every parameter of `roots` that can become a gather.

    The modules are not changed yet. If `roots` are stand-ins, `originals` are their models: they show which parameters
    share memory.
    """
    executor = Executor(device, type(roots[0]).__name__, ranks)
    for name, param, reason in _with_reasons(roots, originals):
        if reason is None:
            executor.add_slot(name, param)
        else:
            executor.unmanaged_because[name] = reason
    return executor


def has_unplaced(executor: Executor, params: Iterable[nn.Parameter]) -> bool:
    """Return whether some of `params` were added to the models of `executor` after it was made, and could be placed.

    Raises UnsupportedModel if there are several ranks: each rank would train its own copy of the parameter.
    """
    wanted = {id(param) for param in params if executor.slot_for(param) is None}
    found = _with_reasons(_roots(executor)) if wanted else ()
    known = executor.unmanaged_because
    new = [name for name, param, reason in found if id(param) in wanted and reason is None and name not in known]
    if new and executor.ranks is not None:
        because = "it came after `prepare(model, mesh=...)`, and is not shared. Change the model before it is prepared"
        raise UnsupportedModel(new[0], because)
    return bool(new)


def prepare_again(old: Executor) -> None:
    """Prepare the models of `old` with a new executor for their present parameters.

    Raises UnsupportedModel if there are several ranks and a parameter is not sharded.
    """
    with _lock:
        roots = _roots(old)
        if not roots:
            raise NotPrepared("the model whose step was captured no longer exists.")
        for name, param, reason in _with_reasons(roots):
            if old.ranks is not None and reason is None and not is_dtensor(param):
                because = "it was replaced after `prepare(model, mesh=...)`. Change the model before it is prepared"
                raise UnsupportedModel(name, because)
        for slot in old.slots.values():
            old.await_update(slot)
        for module in (*old.sites.modules(), *(module for root in roots for module in root.modules())):
            if is_swapped(module):
                undo_swap(module)
        if not old.saved.outstanding_owners():
            old.forget_parameters()
        new = new_executor(roots, old.device, old.ranks)
        new.generation, new.disk = old.generation + 1, old.disk
        new.gradients.sums_in_fp32 = old.gradients.sums_in_fp32
        swap_modules(roots, new)
        move_rest(roots, new)


def _roots(executor: Executor) -> list[nn.Module]:
    return [root for reference in executor.roots if (root := reference()) is not None]


def _with_reasons(
    roots: Sequence[nn.Module], originals: Sequence[nn.Module] = ()
) -> Iterable[tuple[str, nn.Parameter, str | None]]:
    """Yield the name and each parameter of `roots`, with the reason why it cannot become a gather, or None if it can.

    `originals` are models of the same structure that show which parameters share memory; by default `roots` themselves.
    """
    named = list(_named_parameters(roots))
    owners = originals or roots
    buffers = {f"buffer {name}": buffer for root in owners for name, buffer in root.named_buffers()}
    shared = aliases([*((name, param) for name, param, _, _ in _named_parameters(owners)), *buffers.items()])
    for name, param, module, local in named:
        reason = unmanaged_reason(module, local)
        if reason is None and name in shared:
            reason = f"it shares memory with {shared[name]}"
        yield name, param, reason


def swap_modules(roots: Sequence[nn.Module], executor: Executor) -> None:
    """Let the modules of `roots` read all parameters with a slot in `executor` as gathers; no tensor moves."""
    executor.roots = tuple(weakref.ref(root) for root in roots)
    for root in roots:
        for module in root.modules():
            slots = {name: slot for name, _, slot in _slots_of(module, executor) if slot is not None}
            if slots and not is_swapped(module):
                swap(module, slots, executor)


def move_rest(roots: Sequence[nn.Module], executor: Executor) -> None:
    """Move the buffers of `roots`, and all parameters that do not read as gathers, to the device of `executor`."""
    modules = [module for root in roots for module in root.modules()]
    rest = [param for module in modules for _, param, slot in _slots_of(module, executor) if slot is None]
    with torch.no_grad():
        moved_together((*rest, *(buffer for root in roots for buffer in root.buffers())), executor.device)


def _slots_of(module: nn.Module, executor: Executor) -> Iterable[tuple[str, nn.Parameter, Slot | None]]:
    """Yield the name, the parameter and the slot of each parameter of `module` itself, without its children.

    The slot is None if the module cannot read the parameter as a gather.
    """
    for name, param in module._parameters.items():
        if param is not None:
            yield name, param, executor.slot_for(param) if unmanaged_reason(module, name) is None else None


def _named_parameters(roots: Iterable[nn.Module]) -> Iterable[tuple[str, nn.Parameter, nn.Module, str]]:
    """Yield each parameter of `roots` once: its name, itself, its module, and its name in the module."""
    seen: set[int] = set()
    for index, root in enumerate(roots):
        prefix = "" if index == 0 else f"{type(root).__name__}{index}."
        for path, module in root.named_modules():
            for local, param in module._parameters.items():
                if param is not None and id(param) not in seen:
                    seen.add(id(param))
                    yield f"{prefix}{path}.{local}" if path else f"{prefix}{local}", param, module, local


def _require_masters(model: nn.Module, param_dtype: ParamDtype) -> None:
    for name, param in model.named_parameters():
        if gets_master(param, torch_dtype(param_dtype)) and not has_master(param):
            because = f"it was prepared as {param.dtype} and cannot become {param_dtype}. Name `param_dtype` in the "
            raise UnsupportedModel(name, because + "first call of `prepare`, before the model is compiled and run")


def _target_device(model: nn.Module, device: "torch.device | str | None") -> torch.device:
    if device is not None:
        target = torch.device(device)
        return (
            torch.device("cuda", torch.cuda.current_device())
            if target.type == "cuda" and target.index is None
            else target
        )
    for param in model.parameters():
        if param.device.type != "meta":
            return param.device
    if next(iter(model.parameters()), None) is None:
        raise UnsupportedModel(type(model).__name__, "it has no parameters, so there is nothing to place")
    raise NotPrepared(
        "every parameter is on `meta`, so the device must be named: `elixir_compile.prepare(model, device=...)`."
    )
