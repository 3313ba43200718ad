"""Cut the parameters of a model over several ranks, one parameter at a time.

    nn.Linear.weight, whole on each rank -> nn.Parameter(DTensor), of which this rank keeps rows

The values are those of the mesh's first rank, wherever they came from, so a model that is built without a seed is one
model. A module on `meta` is created on the host, cut and dropped before the next: a rank holds its parts and one
module.
"""

import functools
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
from elixir_compile.problem.meta import materialize_module
from elixir_compile.runtime.distributed.ranks import Ranks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def ranks_of(mesh: "DeviceMesh | None") -> Ranks | None:
    """Return the ranks of `mesh`, None where there is one or none."""
    if mesh is None or mesh.size() == 1:
        return None
    if mesh.ndim > 2:
        raise UnsupportedModel("the mesh", f"it has {mesh.ndim} axes; one cuts parameters and one more copies them")
    return Ranks(mesh)


def weigh(model: nn.Module, num_samples: int) -> None:
    """Let the gradients of this rank count as those of `num_samples` samples, from the next backward on, where ranks
    have batches of other sizes; every rank calls this at once, before each backward whose sizes are new.

    The gradient of a parameter is then the sum over ranks of num_samples * gradient, over all samples: with a loss that
    is a mean over samples, that of one process with the whole batch. On one rank this changes nothing.

    Raises NotPrepared for a model that is not prepared, ValueError where all ranks have none, PeerFailed where one does
    not call this.
    """
    executor = executor_of(compat.undo_compile(model))
    if executor is None:
        raise NotPrepared("`weigh` is for a model that `elixir_compile.prepare(model, mesh=...)` was given first.")
    if executor.ranks is not None:
        executor.ranks.set_gradient_weight(num_samples)


@torch.no_grad()
def shard_parameters(model: nn.Module, ranks: Ranks, dtype: torch.dtype | None) -> None:
    """Make the parameters of `model` DTensors over `ranks`, in `dtype` and with masters where one is named; those that
    cannot be cut are averaged as they are.

    Every rank calls this at once. Raises UnsupportedModel for a module on `meta` that cannot start by itself.
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
        before = {name: param for name, param in module._parameters.items() if id(param) in owners}
        finished = {name: param for name, param in module._parameters.items() if id(param) in done}
        if any(tensor.is_meta for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
            # The module initialises all that it has, and may not touch those that are tied and are there already.
            module._parameters.update({name: _stand_in(param) for name, param in finished.items()})
        materialize_module(module, path, initialize, {})
        module._parameters.update(finished)
        for name, param in before.items():
            if id(param) not in done:
                now = _shared(module, name, f"{path}.{name}" if path else name, ranks, dtype)
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


def _shared(module: nn.Module, local: str, name: str, ranks: Ranks, dtype: torch.dtype | None) -> nn.Parameter:
    param = module._parameters[local]
    if unmanaged_reason(module, local) is not None:
        _from_first(param.data, ranks)
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(functools.partial(_average, name=name, ranks=ranks))
        return param
    whole = param.detach().contiguous()
    cut = distribute_tensor(whole, ranks.mesh, ranks.placements_of(whole))
    if own_part(cut).device != whole.device:  # of the mesh, where the plan may not want it
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
    """Let the gradient of `param` be its mean over all ranks; RanksDiffer where one has that of another."""
    ranks.control.check_same_op(name, "a gradient")
    (mean,) = ranks.means([param.grad], param.grad.dtype)
    param.grad.copy_(mean)


def _from_first(tensor: torch.Tensor, ranks: Ranks) -> None:
    """Let `tensor` be what the first rank has."""
    tensor.copy_(distribute_tensor(tensor, ranks.mesh, [Replicate()] * ranks.mesh.ndim).to_local())
