"""Parameters that several ranks share: DTensors, each rank with a part of dimension 0, or, of a small one, with all.

own_part(param)      what this rank has, a plain tensor; the parameter itself where there is one rank
as_dtensor(own, p)    such a part as a DTensor laid out as `p`, in the same memory
"""

import torch
from torch import distributed

from elixir_compile import compat

if distributed.is_available():
    from torch.distributed.tensor import DTensor
else:  # a build of torch without it has no DTensors

    class DTensor(torch.Tensor): ...


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether several ranks have `tensor`, each a part or each all of it."""
    return isinstance(tensor, DTensor)


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether each of several ranks has a part of `tensor`."""
    return isinstance(tensor, DTensor) and any(placement.is_shard() for placement in tensor.placements)


def has_layout_of(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether several ranks have `tensor` in the parts in which they have `other`, or one rank alone has both."""
    if not (isinstance(tensor, DTensor) and isinstance(other, DTensor)):
        # `data` of a queued update's parameter would wait for that; a parameter with a slot is of no other class.
        return not isinstance(other, DTensor) and type(tensor.data) is torch.Tensor and not tensor.is_meta
    return tensor.device_mesh == other.device_mesh and tuple(tensor.placements) == tuple(other.placements)


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank has of `tensor`, in the same memory; `tensor` itself where that is no DTensor."""
    return compat.local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def version(tensor: torch.Tensor) -> int:
    """Return a number that grows with every write to `tensor`, also to what this rank has of it."""
    # Writes to what `to_local()` gives, as in-place loads of checkpoints do, leave the version of the DTensor alone.
    return tensor._version + compat.local_tensor(tensor)._version if isinstance(tensor, DTensor) else tensor._version


def own_grad(param: torch.Tensor) -> torch.Tensor:
    """Return what this rank has of the gradient of `param`, which has one; the gradient itself where there is one
    rank."""
    grad = param.grad
    return compat.local_tensor(grad) if isinstance(grad, DTensor) else grad


def part_like(value: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Return what this rank has of `value`, a DTensor or a whole tensor, cut as `param` is; a part that is cut here is
    a copy, which does not keep the whole alive."""
    if isinstance(value, DTensor):
        return own_part(value)
    if not is_sharded(param) or value.shape != param.shape:
        return value
    mesh = param.device_mesh
    parts, index = value.chunk(mesh.size(-1)), mesh.get_local_rank(mesh.ndim - 1)
    return (parts[index] if index < len(parts) else value[:0]).clone()


def as_dtensor(own: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the DTensor of which this rank has `own`, laid out as `like`; `own` itself where that is no DTensor."""
    return compat.dtensor_like(own, like) if isinstance(like, DTensor) else own


@torch.no_grad()
def full_tensor(param: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the values of `param` on `device`, detached; every rank calls this at once where each has a part."""
    if not isinstance(param, DTensor):
        return param.detach().to(device)
    own = own_part(param).to(device)
    return as_dtensor(own, param).full_tensor() if is_sharded(param) else own


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` as a plain one; every rank calls this at once for a DTensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sum_over_parts(number: float, param: torch.Tensor) -> float:
    """Return the sum of `number` over the ranks that have the parts of `param`; each of them calls this at once."""
    mesh = param.device_mesh
    total = torch.tensor(number, dtype=torch.float64, device=mesh.device_type)
    distributed.all_reduce(total, group=mesh.get_group(mesh.ndim - 1))
    return float(total)


def rehome(param: torch.nn.Parameter, data: torch.Tensor) -> None:
    """Let `param`, or this rank's part of it, be `data`; the gradient moves along, because torch wants both on one
    device."""
    grad = param.grad
    param.grad = None
    if isinstance(param, DTensor):
        if data.device != param.device:
            # The DTensor itself has a device too, and torch compares that with the one of a gradient.
            param.data = as_dtensor(data, param)
        compat.set_local_tensor(param, data)
    else:
        param.data = data
    if grad is not None:
        param.grad = as_dtensor(own_part(grad).to(data.device), param)
