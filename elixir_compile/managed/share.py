"""Create the parameters of a model built on `meta`, and shard parameters over several ranks, one by one.

    nn.Linear.weight, complete on each rank -> nn.Parameter(DTensor), of which each rank keeps some rows

Every rank gets the values of the mesh's first rank, so a model built without a seed is the same on all ranks. A module
on `meta` is created on the host, sharded and dropped before the next module. So a rank never holds more than its shards
and a single module.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import Replicate, distribute_tensor

from elixir_compile import compat
from elixir_compile.capture.modules import executor_of, unmanaged_reason
from elixir_compile.errors import NotPrepared, UnsupportedModel
from elixir_compile.managed.masters import gets_master, narrowed
from elixir_compile.ops.aliases import aliases
from elixir_compile.ops.masters import add_master
from elixir_compile.ops.registry import note_replaced
from elixir_compile.ops.shards import as_dtensor, own_part
from elixir_compile.runtime.distributed.ranks import Ranks
from elixir_compile.runtime.slab import Slab
from elixir_compile.search.space.buckets import is_worth_sharding

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def ranks_of(mesh: "DeviceMesh | None") -> Ranks | None:
    """Return the ranks of `mesh`; None if there is no mesh or it has one rank.

    Raises UnsupportedModel for a mesh of more than two axes.
    """
    if mesh is None or mesh.size() == 1:
        return None
    if mesh.ndim > 2:
        raise UnsupportedModel("the mesh", f"it has {mesh.ndim} axes; one cuts parameters and one more copies them")
    return Ranks(mesh)


def weigh(model: nn.Module, num_samples: int) -> None:
    """Weight the gradients of this rank by `num_samples` from the next backward on, if ranks have batches of different
    sizes. Every rank must call this together, before each backward with new sizes.

    The gradient of a parameter is then sum(num_samples * gradient) / sum(num_samples), both sums over the ranks. If the
    loss is a mean over samples, that is the gradient of a single process with the complete batch. On one rank, this
    changes nothing.

    Raises NotPrepared for a model that is not prepared, ValueError if the samples of all ranks are 0, and PeerFailed if
    a rank does not call this.

    Example:
        elixir.weigh(model, num_samples=len(batch))
        compiled(batch).backward()
    """
    executor = executor_of(compat.undo_compile(model))
    if executor is None:
        raise NotPrepared("`weigh` is for a model that `elixir_compile.prepare(model, mesh=...)` was given first.")
    if executor.ranks is not None:
        executor.ranks.set_gradient_weight(num_samples)


@torch.no_grad()
def shard_parameters(model: nn.Module, ranks: Ranks, dtype: torch.dtype | None) -> None:
    """Make the parameters of `model` DTensors over `ranks`. Every rank must call this together.

    If `dtype` is given, parameters are cast to it and get masters. A parameter that cannot become a gather stays
    complete on each rank, and its gradient is averaged over the ranks.

    Raises UnsupportedModel if parameters share memory, or if a module on `meta` cannot initialise itself.
    """
    for name, other in aliases(model.named_parameters()).items():
        because = f"it shares memory with {other}, and cutting them over ranks would part them. Tie the modules instead"
        raise UnsupportedModel(name, because)
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                owners.setdefault(id(param), []).append((module, name))
    initialize = getattr(model, "_init_weights", None)
    done: set[int] = set()
    for path, module in model.named_modules():
        own = {name: param for name, param in module._parameters.items() if param is not None}
        before = {name: param for name, param in own.items() if id(param) in owners}
        finished = {name: param for name, param in own.items() if id(param) in done}
        if any(tensor.is_meta for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
            # The module initialises all of its parameters. Tied parameters with values must be out of its reach.
            module._parameters.update({name: _stand_in(param) for name, param in finished.items()})
        _materialize_module(module, path, initialize, {})
        module._parameters.update(finished)
        for name, param in before.items():
            if id(param) not in done:
                now = _sharded(module, name, f"{path}.{name}" if path else name, ranks, dtype)
                if now is not param:
                    note_replaced(param)
                for owner, local in owners[id(param)]:
                    owner._parameters[local] = now
                done.add(id(param))
                done.add(id(now))
        for buffer in module.buffers(recurse=False):
            _from_first(buffer, ranks)


def _stand_in(param: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(torch.empty(param.shape, dtype=param.dtype), requires_grad=param.requires_grad)


def _sharded(module: nn.Module, local: str, name: str, ranks: Ranks, dtype: torch.dtype | None) -> nn.Parameter:
    """Return the parameter called `local` in `module`, and `name` in the model, as a DTensor over `ranks`.

    Returns the parameter itself, with the values of the first rank, if it cannot become a gather.
    """
    param = module._parameters[local]
    assert param is not None
    if unmanaged_reason(module, local) is not None:
        _from_first(param.data, ranks)
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(functools.partial(_average, name=name, ranks=ranks))
        return param
    whole = param.detach().contiguous()
    is_sharded = is_worth_sharding(whole.nbytes, whole.dim(), ranks.num_shards)
    cut = distribute_tensor(whole, ranks.mesh, ranks.placements(is_sharded=is_sharded))
    if own_part(cut).device != whole.device:  # it is on the mesh's device, and the plan may want it on the host
        cut = as_dtensor(own_part(cut).to(whole.device), cut)
    if dtype is None or not gets_master(param, dtype):
        return nn.Parameter(cut, requires_grad=param.requires_grad)
    if param.dtype == dtype:
        high, rest = cut, None
    else:
        own, rest = narrowed(own_part(cut), dtype, keeps_rest=param.requires_grad)
        high = as_dtensor(own, cut)
    now = nn.Parameter(high, requires_grad=param.requires_grad)
    add_master(now, rest)
    return now


def _average(param: torch.Tensor, *, name: str, ranks: Ranks) -> None:
    """Replace the gradient of `param`, called `name`, by its mean over all ranks.

    Raises RanksDiffer if another rank averages the gradient of another parameter at this moment.
    """
    ranks.control.check_same_op(name, "a gradient")
    grad = param.grad
    assert grad is not None
    (mean,) = ranks.means([grad], grad.dtype)
    grad.copy_(mean)


def _from_first(tensor: torch.Tensor, ranks: Ranks) -> None:
    """Fill `tensor` with the values of the first rank."""
    tensor.copy_(distribute_tensor(tensor, ranks.mesh, [Replicate()] * ranks.mesh.ndim).to_local())


def materialize(model: nn.Module) -> None:
    """Allocate every parameter and buffer of `model` that is on `meta` on the host, and let its module initialise it.

    A module initialises itself by `reset_parameters()`, or by the `_init_weights` of a Hugging Face model. Raises
    UnsupportedModel for a module with neither; use `torch.nn.Module.to_empty` and `load_state_dict` for such a model.
    """
    initialize = getattr(model, "_init_weights", None)
    tied: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules():
        _materialize_module(module, path, initialize, tied)


def _materialize_module(
    module: nn.Module, path: str, initialize: Callable[[nn.Module], None] | None, tied: dict[int, nn.Parameter]
) -> None:
    """Allocate and initialise the parameters and buffers of `module` itself, without its children; see `materialize`.

    `path` is its name in the model, for errors. `initialize` is the model's `_init_weights`. `tied` has the parameters
    created so far, by the id of their parameter on `meta`; it is updated.
    """
    local = [*module._parameters.values(), *module._buffers.values()]
    if not any(tensor is not None and tensor.is_meta for tensor in local):
        return
    is_known = all(param is None or id(param) in tied for param in module._parameters.values()) and not module._buffers
    _allocate(module, tied)
    if is_known:
        return
    reset = getattr(module, "reset_parameters", None)
    if reset is None and initialize is None:
        raise UnsupportedModel(
            path or type(module).__name__, "it is on `meta` and has no `reset_parameters()` to start from"
        )
    with torch.no_grad():
        if reset is not None:
            reset()
        if initialize is not None:
            initialize(module)


def _allocate(module: nn.Module, tied: dict[int, nn.Parameter]) -> None:
    for name, param in module._parameters.items():
        if param is not None and param.is_meta:
            if id(param) not in tied:
                tied[id(param)] = nn.Parameter(_on_host(param), requires_grad=param.requires_grad)
            module._parameters[name] = tied[id(param)]
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[name] = torch.empty_like(buffer, device="cpu")


def _on_host(param: torch.Tensor) -> torch.Tensor:
    """Return an uninitialised tensor for `param` in a slab: on a CPU-only machine only slabs count as host memory."""
    return Slab(param.numel() * param.element_size(), pin=False).tensor(param.dtype, param.shape, 0)
