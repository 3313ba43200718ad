"""Parameters of several ranks: DTensors, sharded in dimension 0, or replicated if they are small.

own_part(param)       the local tensor of this rank, or the parameter itself if it is no DTensor
as_dtensor(own, p)    a DTensor with the local tensor `own` and the layout of `p`, in the same memory
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import distributed

from elixir_compile import compat
from elixir_compile.graph.ops.portion import Portion, rows_of, with_rows

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

if TYPE_CHECKING or distributed.is_available():
    from torch.distributed.tensor import DTensor
else:  # a build of torch without it has no DTensors

    class DTensor(torch.Tensor): ...


AnyTensor = TypeVar("AnyTensor", bound=torch.Tensor)


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is a DTensor, sharded or replicated."""
    return isinstance(tensor, DTensor)


def is_sharded(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is a sharded DTensor."""
    return isinstance(tensor, DTensor) and any(map(cuts, tensor.placements))


def cuts(placement: "Placement") -> bool:
    """Return whether `placement` cuts a tensor. `is_shard()` is False for parts that an inner axis has cut before."""
    return not (placement.is_replicate() or placement.is_partial())


def has_layout_of(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether `tensor` and `other` are DTensors of the same layout, or both plain tensors."""
    if not (isinstance(tensor, DTensor) and isinstance(other, DTensor)):
        # `other` has a slot, so it is a plain tensor or a DTensor. Its `data` would wait for a queued update.
        return not isinstance(other, DTensor) and type(tensor.data) is torch.Tensor and not tensor.is_meta
    is_alike = tensor.device_mesh == other.device_mesh and tuple(tensor.placements) == tuple(other.placements)
    return is_alike and rows_of(tensor) == rows_of(other)


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of `tensor`, in the same memory, or `tensor` itself if it is no DTensor."""
    return compat.local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def version(tensor: torch.Tensor) -> int:
    """Return a number that grows with each write to `tensor` or to its local tensor."""
    # In-place loads of checkpoints write to the result of `to_local()`, which does not change the DTensor's version.
    return tensor._version + compat.local_tensor(tensor)._version if isinstance(tensor, DTensor) else tensor._version


def own_grad(param: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of the gradient of `param`, or the gradient itself if it is no DTensor.

    Raises TypeError if `param` has no gradient.
    """
    if param.grad is None:
        raise TypeError("the parameter has no gradient")
    return own_part(param.grad)


def part_like(value: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Return the shard of `value`, a DTensor or a full tensor, for this rank's shard of `param`.

    A `value` of another shape than `param`, with values for each of its rows, is not cut along an axis that cuts the
    rows. A shard of a full tensor is a copy, in order not to keep the full tensor alive. If `value` is a DTensor whose
    shards have other rows than those of `param`, all ranks must call this together.
    """
    if isinstance(value, DTensor):
        is_other = rows_of(value) != rows_of(param) and is_sharded(value) and _has_rows_of(value, param)
        if not is_other:
            return own_part(value)
        value = full(value.detach())
    if not isinstance(param, DTensor) or not is_sharded(param) or not _has_rows_of(value, param):
        return value
    if isinstance(param, Portion):
        return value[param.own_rows].clone()
    is_whole = value.shape == param.shape
    return _cut(value, param, lambda each: cuts(each) and (is_whole or not _cuts_rows(each))).clone()


def part_of_rows(rows: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of `rows`, as a view; `rows` are its rows of `param` with all of their elements."""
    return _cut(rows, param, _cuts_rows) if isinstance(param, DTensor) else rows


def _cut(value: torch.Tensor, param: DTensor, along: "Callable[[Placement], bool]") -> torch.Tensor:
    """Return the part of `value` for this rank, as `along` the placements of `param` the rule of `torch.chunk` cuts."""
    mesh = param.device_mesh
    # The last axis first: a tensor axis cuts before the data axis does. See `graph.ops.tensor_axis`.
    for axis, placement in reversed(list(enumerate(param.placements))):
        if along(placement):
            dim, num_parts = placement.dim, mesh.size(axis)  # pyright: ignore[reportAttributeAccessIssue]  it is a cut
            length = -(-value.shape[dim] // num_parts)
            value = value.tensor_split([length * part for part in range(1, num_parts)], dim)[mesh.get_local_rank(axis)]
    return value


def _cuts_rows(placement: Any) -> bool:
    return cuts(placement) and placement.dim != 0


def has_cut_rows(tensor: torch.Tensor) -> bool:
    """Return whether an axis cuts the rows of `tensor`, its elements at the same first index."""
    return isinstance(tensor, DTensor) and any(map(_cuts_rows, tensor.placements))


def _has_rows_of(value: torch.Tensor, param: torch.Tensor) -> bool:
    """Return whether `value` has the shape of `param`, or values for each of its rows."""
    return value.ndim > 0 and value.shape[:1] == param.shape[:1]


def part_numels(param: torch.Tensor, num_shards: int) -> tuple[int, ...]:
    """Return the number of elements in each of `num_shards` shards of `param`; in each copy if it is replicated."""
    rows = rows_of(param)
    if is_sharded(param) and rows is not None:
        return tuple(math.prod(param.shape[1:]) * own for own in rows)
    return shard_numels(param.shape, num_shards) if is_sharded(param) else (param.numel(),) * num_shards


def shard_numels(shape: torch.Size, num_shards: int) -> tuple[int, ...]:
    """Return the number of elements in each of the `num_shards` shards of a tensor of `shape`, by the rule of
    `torch.chunk`."""
    num_rows = -(-shape[0] // num_shards)
    starts = range(0, num_rows * num_shards, num_rows)
    return tuple(math.prod(shape[1:]) * min(max(shape[0] - start, 0), num_rows) for start in starts)


def rehome_grad(param: torch.nn.Parameter, data: torch.Tensor) -> None:
    """Replace the data of the gradient of `param`, or its local tensor, by `data`, which has its values.

    On the same device the gradient stays the same tensor, as a user may hold it.
    """
    grad = param.grad
    assert grad is not None
    if own_part(grad).device != data.device:
        param.grad = as_dtensor(data, param)
    elif isinstance(grad, DTensor):
        compat.set_local_tensor(grad, data)
    else:
        grad.data = data


def as_dtensor(own: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the DTensor with local tensor `own` and the layout of `like`, or `own` if `like` is no DTensor."""
    if not isinstance(like, DTensor):
        return own
    made, rows = compat.dtensor_like(own, like), rows_of(like)
    return made if rows is None else with_rows(made, rows)


def as_rows(own: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the DTensor with local tensor `own`, values for each of this rank's rows of the DTensor `like`.

    It is replicated along an axis that cuts the rows of `like`.
    """
    if not isinstance(like, DTensor) or not has_cut_rows(like):
        return as_dtensor(own, like)
    from torch.distributed.tensor import Replicate

    placements = [Replicate() if _cuts_rows(each) else each for each in like.placements]
    form = torch.empty((like.shape[0], *own.shape[1:]), device="meta")
    return compat.dtensor_of(own, like.device_mesh, placements, form.shape, form.stride())


@torch.no_grad()
def full_tensor(param: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the full values of `param` on `device`, detached. If it is sharded, all ranks must call this together."""
    if not isinstance(param, DTensor):
        return param.detach().to(device)
    own = own_part(param).to(device)
    return full(as_dtensor(own, param)) if is_sharded(param) else own


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` as a plain tensor. For a DTensor, all ranks must call this together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def cut_axes(param: torch.Tensor) -> tuple[int, ...]:
    """Return the axes of the mesh of `param` along which it is sharded; empty if it is no DTensor."""
    if not isinstance(param, DTensor):
        return ()
    return tuple(axis for axis, placement in enumerate(param.placements) if cuts(placement))


def by_mesh(params: Iterable[AnyTensor]) -> list[list[AnyTensor]]:
    """Return the sharded ones of `params`, those of each mesh in a list of their own.

    An axis is a number within its mesh, so the ranks along axis 0 of two meshes may differ. Ranks get the lists in one
    order if their meshes differ in names or sizes, else in the order of `params`.
    """
    found: dict[DeviceMesh, list[AnyTensor]] = {}
    for param in params:
        if isinstance(param, DTensor) and cut_axes(param):
            found.setdefault(param.device_mesh, []).append(param)
    meshes = sorted(found, key=lambda mesh: (mesh.ndim, mesh.mesh_dim_names or (), tuple(mesh.shape)))
    return [found[mesh] for mesh in meshes]


def sum_over_parts(number: float, param: torch.Tensor, axes: Sequence[int]) -> float:
    """Return the sum of `number` over the ranks along `axes` of the mesh of `param`, which all call this together.

    Raises TypeError if `param` is no DTensor.
    """
    if not isinstance(param, DTensor):
        raise TypeError("the parameter is no DTensor")
    total = torch.tensor(number, dtype=torch.float64, device=param.device_mesh.device_type)
    for axis in axes:
        distributed.all_reduce(total, group=param.device_mesh.get_group(axis))
    return float(total)


def rehome(param: torch.nn.Parameter, data: torch.Tensor) -> None:
    """Replace the data of `param`, or its local tensor, by `data`, and move the gradient to the device of `data`.

    torch requires a parameter and its gradient to be on one device, also a gradient that a backward adds later.
    """
    grad = param.grad
    if data.device != own_part(param).device:
        compat.let_gradients_follow(param)
    param.grad = None
    if isinstance(param, DTensor):
        if data.device != param.device:
            # torch compares the device of the DTensor, not of its local tensor, with the device of a gradient.
            param.data = as_dtensor(data, param)
        compat.set_local_tensor(param, data)
    else:
        param.data = data
    if grad is not None:
        # A user may hold the gradient itself, so it is another tensor only on another device.
        is_there = own_part(grad).device == data.device
        param.grad = grad if is_there else as_dtensor(own_part(grad).to(data.device), param)
