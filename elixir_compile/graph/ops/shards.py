"""Describe the shard of a parameter that one rank owns: DTensors cut in dimension 0, in shards of equal or of any
sizes, also along a tensor axis.
"""

import copy
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import distributed
from torch.utils.weak import WeakTensorKeyDictionary

from elixir_compile import compat
from elixir_compile.compat.distributed import refuses_redistribution
from elixir_compile.ir.bucket import Shards

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement


# ----------------------------------------------------------------------------------------------------------------------
# Shards of any sizes: a DTensor of which each rank owns a number of rows of its own.
#
#   rows = 7, 2, 1      rank 0: rows 0 to 6      rank 1: rows 7 and 8      rank 2: row 9
#
# The placement stays `Shard(0)`, whose shards are those of `torch.chunk`: 4, 4 and 2 rows. Pointwise ops, foreach
# optimizers, norms and `clip_grad_norm_` read this rank's shard only, so they are right with any sizes. Answered anew
# are the reads that compute where a shard lies: `full_tensor`, `redistribute`, and the three methods by which
# distributed checkpoints find a shard. Ops that would send shards between ranks by the rule of `torch.chunk`, such as
# `param[2:5]`, or whose result is cut in another dimension, such as `param.t()`, raise NotImplementedError: use
# `full_tensor()`.


if TYPE_CHECKING or distributed.is_available():
    from torch.distributed.tensor import DTensor, Shard
else:  # a build of torch without it has no DTensors

    class DTensor(torch.Tensor): ...


class Portion(DTensor):
    """A DTensor sharded in dimension 0 along the last axis of its mesh, with `rows[i]` rows on rank i of the axis."""

    rows: tuple[int, ...]

    @classmethod
    @torch.compiler.disable
    def __torch_function__(  # pyright: ignore[reportIncompatibleMethodOverride] - of the decorator's result
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given: list[Any] = list(args)
        if func is torch.Tensor.copy_ and len(given) > 1 and isinstance(given[1], DTensor):
            given[1] = _with_shards_of(given[0], given[1])
        with torch.DisableTorchFunctionSubclass():
            if func in _VIEWS_AS and given[0].shape == given[1].shape:
                func, given = torch.ops.aten.alias.default, given[:1]  # DTensor's view expects the rows of equal shards
            tensors = list(_tensors_in((*given, *(kwargs or {}).values())))
            rows = _common_rows(tensors, [each for each in given if isinstance(each, DTensor)])
            if rows:
                # Each rank gets the sum if ranks hold terms of it, such as of a norm.
                from torch.distributed.tensor import Replicate

                for place, each in enumerate(given):
                    if isinstance(each, DTensor) and all(own.is_partial() for own in each.placements):
                        given[place] = each.redistribute(placements=[Replicate()] * len(each.placements))
            try:
                with refuses_redistribution():
                    found = func(*given, **(kwargs or {}))
            except RuntimeError as error:
                if "Implicit redistribution" not in str(error):
                    raise
                raise _unsupported(func, rows) from error
            return _as_portions(found, rows, func, frozenset(map(_layout, tensors)))

    @property
    def own_rows(self) -> slice:
        """The rows of the full tensor that this rank owns."""
        index = self.device_mesh.get_local_rank(self.device_mesh.ndim - 1)
        start = sum(self.rows[:index])
        return slice(start, start + self.rows[index])

    def full_tensor(self, *, grad_placements: "Sequence[Placement] | None" = None) -> torch.Tensor:
        """Return the full tensor, gathered from all ranks, which must call this together.

        `grad_placements` is for DTensor's interface, and must be None. Raises NotImplementedError otherwise.
        """
        if grad_placements is not None:
            raise NotImplementedError("`full_tensor` of parts of unequal sizes takes no `grad_placements`")
        return _Whole.apply(self) if self.requires_grad and torch.is_grad_enabled() else _gathered(self)

    def redistribute(
        self,
        device_mesh: "DeviceMesh | None" = None,
        placements: "Sequence[Placement] | None" = None,
        **options: Any,
    ) -> DTensor:
        """Return the tensor replicated on its mesh, if `placements` say so, or itself if they are its own.

        `options` of DTensor's method change nothing. Raises NotImplementedError for other placements or another mesh.
        """
        mesh, asked = self.device_mesh, tuple(placements or ())
        if device_mesh in (None, mesh) and asked == tuple(self.placements):
            return self
        if device_mesh in (None, mesh) and asked and all(placement.is_replicate() for placement in asked):
            return DTensor.from_local(self.full_tensor(), mesh, asked, run_check=False)
        raise NotImplementedError(
            f"a tensor of which the ranks own {'-'.join(map(str, self.rows))} rows cannot become {asked}. It can "
            "become Replicate, and `full_tensor()` returns it as a plain tensor, for `distribute_tensor`."
        )

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        own, rest = self.own_rows, self.shape[1:]
        offsets = torch.Size([own.start, *[0] * len(rest)])
        return [ChunkStorageMetadata(offsets=offsets, sizes=torch.Size([own.stop - own.start, *rest]))]

    def __create_write_items__(self, fqn: str, tensor: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        (chunk,) = self.__create_chunk_list__()
        if not chunk.sizes.numel():
            return []
        properties = TensorProperties(dtype=self.dtype, requires_grad=self.requires_grad)
        data = TensorWriteData(chunk=chunk, properties=properties, size=self.shape)
        return [WriteItem(index=MetadataIndex(fqn, chunk.offsets), type=WriteItemType.SHARD, tensor_data=data)]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        with torch.no_grad():
            return self.to_local()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # torch copies a wrapper of tensors by `clone`, below `__torch_function__`, and compares the classes.
        kept: Any = type(self)
        own: Any = self
        own.__class__ = DTensor
        try:
            copied = copy.deepcopy(own, memo)
        finally:
            own.__class__ = kept
        copied.__class__ = kept
        return copied


_VIEWS_AS = frozenset({torch.Tensor.view_as, torch.Tensor.expand_as, torch.Tensor.reshape_as})


class _Whole(torch.autograd.Function):
    """The full tensor of a Portion, whose gradient is this rank's rows of the gradient of the full tensor."""

    @staticmethod
    def forward(ctx: Any, portion: Portion) -> torch.Tensor:
        ctx.portion = portion.detach()
        return _gathered(portion)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        like = ctx.portion
        return new_portion(grads[0][like.own_rows].contiguous(), like.rows, like.device_mesh, like.shape)


@torch.no_grad()
def _gathered(portion: Portion) -> torch.Tensor:
    mesh, own = portion.device_mesh, portion.to_local()
    whole = torch.empty(portion.shape, dtype=own.dtype, device=own.device)
    group = mesh.get_group(mesh.ndim - 1)
    works = []
    for index, shard in enumerate(whole.split(portion.rows)):
        if index == mesh.get_local_rank(mesh.ndim - 1):
            shard.copy_(own)
        if shard.numel():
            works.append(distributed.broadcast(shard, group=group, group_src=index, async_op=True))
    for work in works:
        work.wait()
    return whole


def new_portion(own: torch.Tensor, rows: Sequence[int], mesh: "DeviceMesh", shape: Sequence[int]) -> Portion:
    """Return the Portion on `mesh` with this rank's rows `own`, of a contiguous full tensor of `shape`.

    `rows` are the rows of each rank along the last axis of `mesh`, whose device `own` moves to.
    """
    stride = torch.empty(tuple(shape), device="meta").stride()
    placements = mesh_placements(mesh)
    made = DTensor.from_local(own, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)
    return with_rows(made, rows)


def mesh_placements(mesh: "DeviceMesh") -> "tuple[Placement, ...]":
    """Return the placements of a Portion on `mesh`: copies along all axes but the last, which cuts dimension 0."""
    from torch.distributed.tensor import Replicate

    return (*[Replicate()] * (mesh.ndim - 1), Shard(0))


def with_rows(made: DTensor, rows: Sequence[int]) -> Portion:
    """Make the DTensor `made` a Portion with `rows` on each rank, and return it."""
    portion: Any = made
    portion.__class__ = Portion
    portion.rows = tuple(rows)
    return portion


def rows_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the rows of each rank if `tensor` is a Portion, else None."""
    return tensor.rows if isinstance(tensor, Portion) else None


def owner_of(tensor: torch.Tensor) -> int | None:
    """Return the rank along the last axis of its mesh that has all rows of `tensor`; None if it is no Portion, or
    several ranks have some."""
    owners = [rank for rank, count in enumerate(rows_of(tensor) or ()) if count]
    return owners[0] if len(owners) == 1 else None


def is_whole(tensor: torch.Tensor) -> bool:
    """Return whether no rank has only a part of `tensor`: each has all of it, or one rank has. The same on all
    ranks."""
    return not is_sharded(tensor) or owner_of(tensor) is not None


_Layout = tuple[torch.Size, tuple[Any, ...]]
"""The shape and the placements of a DTensor."""


def _layout(tensor: DTensor) -> _Layout:
    return tensor.shape, tuple(tensor.placements)


def _common_rows(tensors: Iterable[DTensor], operands: Sequence[DTensor]) -> dict[_Layout, tuple[int, ...]]:
    """Return the rows of each rank for the layouts of the Portions in `tensors`, all that an op reads.

    Raises ValueError if two of `tensors` have the same layout and other rows, or two of its `operands` equal lengths in
    dimension 0 and other shards of it: an op would pair rows that do not belong together.
    """
    found: dict[_Layout, tuple[int, ...] | None] = {}
    for tensor in tensors:
        rows = rows_of(tensor)
        if found.setdefault(_layout(tensor), rows) != rows:
            raise _other_rows(found[_layout(tensor)], rows)
    cut = [each for each in operands if any(placement.is_shard() for placement in each.placements)]
    for first, second in itertools.combinations(cut, 2):
        is_paired = first.shape[:1] == second.shape[:1] and first.placements == second.placements
        if is_paired and rows_of(first) != rows_of(second):
            raise _other_rows(rows_of(first), rows_of(second))
    return {layout: rows for layout, rows in found.items() if rows is not None}


def _other_rows(first: tuple[int, ...] | None, second: tuple[int, ...] | None) -> ValueError:
    texts = ("equal parts" if own is None else "-".join(map(str, own)) for own in (first, second))
    return ValueError(
        f"the ranks own {' rows of one tensor and '.join(texts)} of another: `full_tensor()` returns the rows "
        "of all ranks, and `copy_` converts the parts of one tensor to those of the other."
    )


def _as_portions(
    found: Any, rows: Mapping[_Layout, tuple[int, ...]], func: Callable[..., Any], given: frozenset[_Layout]
) -> Any:
    """Return `found`, the result of `func`, with every DTensor in it that is cut as a Portion of `rows` as a Portion.

    Raises NotImplementedError if a DTensor is cut otherwise and has none of the layouts `given` to `func`: where its
    shards lie is not known.
    """
    if type(found) in (list, tuple):
        return type(found)(_as_portions(each, rows, func, given) for each in found)
    if type(found) is not DTensor or not any(placement.is_shard() for placement in found.placements):
        return found
    layout = _layout(found)
    if layout in rows:
        return with_rows(found, rows[layout])
    if not rows or layout in given:
        return found
    # A result with other columns, such as a sum over dimension 1, has the same rows on each rank.
    for (shape, placements), counts in rows.items():
        index = found.device_mesh.get_local_rank(found.device_mesh.ndim - 1)
        if placements == layout[1] and shape[:1] == layout[0][:1] and found.to_local().shape[0] == counts[index]:
            return with_rows(found, counts)
    raise _unsupported(func, rows)


def _unsupported(func: Callable[..., Any], rows: Mapping[_Layout, tuple[int, ...]]) -> NotImplementedError:
    """Return the error of the op `func`, which would take shards of `rows` for equal shards."""
    texts = " and ".join("-".join(map(str, own)) for own in rows.values())
    name = getattr(func, "__name__", str(func))
    return NotImplementedError(
        f"`{name}` would send parts of a tensor of which the ranks own {texts} rows, or cut it in another dimension. "
        "`full_tensor()` returns it as a plain tensor."
    )


def _tensors_in(values: Iterable[Any]) -> Iterator[DTensor]:
    for value in values:
        if isinstance(value, DTensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors_in(value)


def _with_shards_of(target: Any, source: DTensor) -> DTensor:
    """Return `source` with the shards of `target`; all ranks call this together if their shards differ."""
    if not isinstance(target, DTensor) or target.shape != source.shape or rows_of(target) == rows_of(source):
        return source
    if not any(placement.is_shard() for placement in source.placements):
        return source
    detached: Any = source.detach()
    full = detached.full_tensor()
    if isinstance(target, Portion):
        return new_portion(full[target.own_rows].contiguous(), target.rows, target.device_mesh, target.shape)
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(full, target.device_mesh, target.placements)


# ----------------------------------------------------------------------------------------------------------------------
# Parameters of several ranks: DTensors, sharded in dimension 0, or replicated if they are small.
#
# own_shard(param)       the local tensor of this rank, or the parameter itself if it is no DTensor
# as_dtensor(own, p)    a DTensor with the local tensor `own` and the layout of `p`, in the same memory


AnyTensor = TypeVar("AnyTensor", bound=torch.Tensor)


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is a DTensor, sharded or replicated."""
    return isinstance(tensor, DTensor)


def is_wrapped(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is made of tensors inside of it, such as codes and scales, and is no DTensor."""
    return (compat.is_wrapper(tensor) and not is_dtensor(tensor)) or compat.is_in_4_bits(tensor)


def parts_of(tensor: torch.Tensor, name: str = "") -> dict[str, torch.Tensor]:
    """Return the tensors that plans and checkpoints know for the parameter or buffer `tensor`, called `name`: those of
    which it is made, by names such as `weight.codes`, or itself by its own."""
    if not is_wrapped(tensor):
        return {name: tensor}
    return {".".join(filter(None, (name, path))): part for path, part in compat.plain_inside(tensor).items()}


def is_sharded(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is a sharded DTensor."""
    return isinstance(tensor, DTensor) and any(map(cuts, tensor.placements))


def cuts(placement: "Placement") -> bool:
    """Return whether `placement` cuts a tensor. `is_shard()` is False for shards that an inner axis has cut before."""
    return not (placement.is_replicate() or placement.is_partial())


def has_layout_of(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether `tensor` and `other` are DTensors of the same layout, or both plain tensors."""
    if not (isinstance(tensor, DTensor) and isinstance(other, DTensor)):
        # `other` has a slot, so it is a plain tensor or a DTensor. Its `data` would wait for a queued update.
        return not isinstance(other, DTensor) and type(tensor.data) is torch.Tensor and not tensor.is_meta
    is_alike = tensor.device_mesh == other.device_mesh and tuple(tensor.placements) == tuple(other.placements)
    return is_alike and rows_of(tensor) == rows_of(other)


def own_shard(tensor: torch.Tensor) -> torch.Tensor:
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
    return own_shard(param.grad)


def shard_like(value: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Return the shard of `value`, a DTensor or a full tensor, for this rank's shard of `param`.

    A `value` of another shape than `param`, with values for each of its rows, is not cut along an axis that cuts the
    rows. A shard of a full tensor is a copy, in order not to keep the full tensor alive. If `value` is a DTensor whose
    shards have other rows than those of `param`, all ranks must call this together.
    """
    if isinstance(value, DTensor):
        is_other = rows_of(value) != rows_of(param) and is_sharded(value) and _has_rows_of(value, param)
        if not is_other:
            return own_shard(value)
        value = full(value.detach())
    if not isinstance(param, DTensor) or not is_sharded(param) or not _has_rows_of(value, param):
        return value
    if isinstance(param, Portion):
        return value[param.own_rows].clone()
    is_whole = value.shape == param.shape
    return _cut(value, param, lambda each: cuts(each) and (is_whole or not _cuts_rows(each))).clone()


def shard_of_rows(rows: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of `rows`, as a view; `rows` are its rows of `param` with all of their elements."""
    return _cut(rows, param, _cuts_rows) if isinstance(param, DTensor) else rows


def _cut(value: torch.Tensor, param: DTensor, along: "Callable[[Placement], bool]") -> torch.Tensor:
    """Return the shard of `value` for this rank: the rule of `torch.chunk` cuts it `along` placements of `param`."""
    mesh = param.device_mesh
    # The last axis first: a tensor axis cuts before the data axis does. See `graph.ops.shards`.
    for axis, placement in reversed(list(enumerate(param.placements))):
        if along(placement):
            dim, num_shards = placement.dim, mesh.size(axis)  # pyright: ignore[reportAttributeAccessIssue]  it is a cut
            length = -(-value.shape[dim] // num_shards)
            value = value.tensor_split([length * shard for shard in range(1, num_shards)], dim)[
                mesh.get_local_rank(axis)
            ]
    return value


def _cuts_rows(placement: Any) -> bool:
    return cuts(placement) and placement.dim != 0


def has_cut_rows(tensor: torch.Tensor) -> bool:
    """Return whether an axis cuts the rows of `tensor`, its elements at the same first index."""
    return isinstance(tensor, DTensor) and any(map(_cuts_rows, tensor.placements))


def _has_rows_of(value: torch.Tensor, param: torch.Tensor) -> bool:
    """Return whether `value` has the shape of `param`, or values for each of its rows."""
    return value.ndim > 0 and value.shape[:1] == param.shape[:1]


def numels_of_shards(param: torch.Tensor, num_shards: int) -> Shards:
    """Return the number of elements in each of `num_shards` shards of `param`; in each copy if it is replicated."""
    rows = rows_of(param)
    if is_sharded(param) and rows is not None:
        return Shards.of(math.prod(param.shape[1:]) * own for own in rows)
    return shard_numels(param.shape, num_shards) if is_sharded(param) else Shards.equal(param.numel(), num_shards)


def shard_numels(shape: torch.Size, num_shards: int) -> Shards:
    """Return the number of elements in each of the `num_shards` shards of a tensor of `shape`, by the rule of
    `torch.chunk`."""
    num_rows = -(-shape[0] // num_shards)
    starts = range(0, num_rows * num_shards, num_rows)
    return Shards.of(math.prod(shape[1:]) * min(max(shape[0] - start, 0), num_rows) for start in starts)


def rehome_grad(param: torch.Tensor, data: torch.Tensor) -> None:
    """Replace the data of the gradient of `param`, or its local tensor, by `data`, which has its values.

    On the same device the gradient stays the same tensor, as a user may hold it.
    """
    grad = param.grad
    assert grad is not None
    if own_shard(grad).device != data.device:
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
    own = own_shard(param).to(device)
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


def sum_over_shards(number: float, param: torch.Tensor, axes: Sequence[int]) -> float:
    """Return the sum of `number` over the ranks along `axes` of the mesh of `param`, which all call this together.

    Raises TypeError if `param` is no DTensor.
    """
    if not isinstance(param, DTensor):
        raise TypeError("the parameter is no DTensor")
    total = torch.tensor(number, dtype=torch.float64, device=param.device_mesh.device_type)
    for axis in axes:
        distributed.all_reduce(total, group=param.device_mesh.get_group(axis))
    return float(total)


def rehome(param: torch.Tensor, data: torch.Tensor) -> None:
    """Replace the data of `param`, or its local tensor, by `data`, and move the gradient to the device of `data`.

    torch requires a parameter and its gradient to be on one device, also a gradient that a backward adds later.
    """
    grad = param.grad
    if data.device != own_shard(param).device:
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
        is_there = own_shard(grad).device == data.device
        param.grad = grad if is_there else as_dtensor(own_shard(grad).to(data.device), param)


# ----------------------------------------------------------------------------------------------------------------------
# The tensor axis: the axis of a mesh along which `torch.distributed.tensor.parallel` has cut parameters.
#
#   8 rows, Shard(0) along a tensor axis of 2, then sharded over 2 ranks of a data axis
#
#                     tensor 0        tensor 1
#          data 0     rows 0 1        rows 4 5        the rows that each rank owns
#          data 1     rows 2 3        rows 6 7
#     a gather gives  rows 0-3        rows 4-7        the shard of the rank along the tensor axis
#
# Everything below a module's attribute holds such shards: homes, gathered copies, gradients, optimizer state. Only the
# attribute turns a gathered shard into a DTensor again, with the tensor axis alone as its mesh, because the hooks and
# the modules of torch expect such a DTensor. A parameter that was a plain tensor when the model was prepared is read as
# one.


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorShard:
    """The shard of a parameter that this rank has along the tensor axis."""

    placement: "Placement"
    """How the axis cuts the parameter: `Shard(dim)` or `Replicate()`."""
    shape: torch.Size
    stride: tuple[int, ...]
    """Of the shard, gathered over the data axis."""
    is_plain: bool
    """Whether modules read the shard as a plain tensor, and not as a DTensor."""


class TensorAxis:
    """The tensor axis `mesh`, which has one axis, and the data axes `data`, over which its shards are sharded again.

    `data` is None if nothing is sharded again.
    """

    def __init__(self, mesh: "DeviceMesh", data: "DeviceMesh | None") -> None:
        self.mesh, self.data = mesh, data
        self.joined = mesh if data is None else compat.joined_mesh(data, mesh)
        """The mesh of all parameters of the model: the data axes, then the tensor axis."""
        self._plain = WeakTensorKeyDictionary()

    @property
    def num_ranks(self) -> int:
        """The number of ranks along the axis."""
        return self.mesh.size()

    @property
    def ranks(self) -> list[int]:
        """All ranks of the data axes and the tensor axis, as the default process group numbers them."""
        return self.joined.mesh.flatten().tolist()

    @property
    def rank_groups(self) -> list[list[int]]:
        """The ranks along the axis, a list for each rank of the data axes."""
        return self.joined.mesh.view(-1, self.num_ranks).tolist()

    def note_plain(self, param: torch.Tensor) -> None:
        """Record that modules read `param` as a plain tensor."""
        self._plain[param] = True

    def shard_along(self, param: torch.Tensor) -> TensorShard | None:
        """Return the shard of `param` along the axis; None if `param` does not have the axis in its mesh."""
        if not isinstance(param, DTensor) or param.device_mesh.ndim != self.joined.ndim:
            return None
        *over_data, placement = param.placements
        shape = list(param.shape)
        if placement.is_shard():
            shape[placement.dim] //= self.num_ranks  # pyright: ignore[reportAttributeAccessIssue]  only shards have it
        is_cut = any(map(cuts, over_data))
        size = torch.Size(shape)
        stride = torch.empty(size, device="meta").stride() if is_cut else own_shard(param).stride()
        return TensorShard(placement=placement, shape=size, stride=stride, is_plain=param in self._plain)

    def with_axis(self, own: torch.Tensor, over_data: Sequence["Placement"], placement: "Placement", like: Any) -> Any:
        """Return the DTensor of which this rank owns `own`, with the full shape and strides of `like`.

        `placement` cuts it along this axis, and then `over_data` along the data axes.
        """
        placements = (*over_data, placement)
        if placement.is_shard() and placement.dim == 0:  # pyright: ignore[reportAttributeAccessIssue]  as above
            strided = compat.strided_shard(0, self.num_ranks)
            placements = (*(strided if each.is_shard() else each for each in over_data), placement)
        return compat.dtensor_of(own, self.joined, placements, like.shape, like.stride())

    def gathered(self, param: torch.Tensor, shard: TensorShard, device: torch.device) -> torch.Tensor:
        """Return the `shard` of `param` on `device`, as a plain tensor, detached.

        If it is sharded over the data axes, all of their ranks must call this together.
        """
        assert isinstance(param, DTensor)
        own = own_shard(param).detach().to(device)
        if not is_over_data(param):
            return own
        assert self.data is not None, "without data axes no shard is sharded again"
        from torch.distributed.tensor import Shard

        placements = tuple(Shard(0) if cuts(each) else each for each in param.placements[:-1])
        return compat.dtensor_of(own, self.data, placements, shard.shape, shard.stride).full_tensor()

    def shard_of(self, gathered: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
        """Return the rows of `gathered` that this rank owns; `gathered` has values for the shard of `param` along this
        axis."""
        if not is_over_data(param):
            return gathered
        assert self.data is not None, "without data axes no shard is sharded again"
        num_rows = -(-gathered.shape[0] // self.data.size(-1))
        start = num_rows * self.data.get_local_rank(self.data.ndim - 1)
        return gathered[start : start + num_rows].clone()


def is_over_data(param: torch.Tensor) -> bool:
    """Return whether `param`, which has the tensor axis in its mesh, is sharded over the data axes too."""
    assert isinstance(param, DTensor)
    return any(map(cuts, param.placements[:-1]))
