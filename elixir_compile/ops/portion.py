"""Parts of any sizes: a DTensor of which each rank owns a number of rows of its own.

```text
  rows = 7, 2, 1      rank 0: rows 0 to 6      rank 1: rows 7 and 8      rank 2: row 9
```

The placement stays `Shard(0)`, whose parts are those of `torch.chunk`: 4, 4 and 2 rows. Pointwise ops, foreach
optimizers, norms and `clip_grad_norm_` read this rank's part only, so they are right with any sizes. Answered anew are
the reads that compute where a part lies: `full_tensor`, `redistribute`, and the three methods by which distributed
checkpoints find a part. Ops of DTensor itself that exchange parts of the dimension that is cut, such as `param[2:5]`,
are not: use `full_tensor()`.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

if TYPE_CHECKING or distributed.is_available():
    from torch.distributed.tensor import DTensor, Shard
else:  # a build of torch without it has no DTensors

    class DTensor(torch.Tensor): ...


if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement


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
            given[1] = _with_parts_of(given[0], given[1])
        with torch.DisableTorchFunctionSubclass():
            if func in _VIEWS_AS and given[0].shape == given[1].shape:
                func, given = torch.ops.aten.alias.default, given[:1]  # DTensor's view expects the rows of equal parts
            rows = _common_rows(_tensors_in((*given, *(kwargs or {}).values())))
            return _as_portions(func(*given, **(kwargs or {})), rows)

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
    for index, part in enumerate(whole.split(portion.rows)):
        if index == mesh.get_local_rank(mesh.ndim - 1):
            part.copy_(own)
        if part.numel():
            works.append(distributed.broadcast(part, group=group, group_src=index, async_op=True))
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


_Layout = tuple[torch.Size, tuple[Any, ...]]
"""The shape and the placements of a DTensor."""


def _layout(tensor: DTensor) -> _Layout:
    return tensor.shape, tuple(tensor.placements)


def _common_rows(tensors: Iterable[DTensor]) -> dict[_Layout, tuple[int, ...]]:
    """Return the rows of each rank for the layouts of the Portions in `tensors`.

    Raises ValueError if two of `tensors` have the same layout and other rows: an op would pair rows that do not belong
    together.
    """
    found: dict[_Layout, tuple[int, ...] | None] = {}
    for tensor in tensors:
        rows = rows_of(tensor)
        if found.setdefault(_layout(tensor), rows) != rows:
            texts = (
                "equal parts" if own is None else "-".join(map(str, own)) for own in (found[_layout(tensor)], rows)
            )
            raise ValueError(
                f"the ranks own {' rows of one tensor and '.join(texts)} of another: `full_tensor()` returns the rows "
                "of all ranks, and `copy_` converts the parts of one tensor to those of the other."
            )
    return {layout: rows for layout, rows in found.items() if rows is not None}


def _as_portions(found: Any, rows: Mapping[_Layout, tuple[int, ...]]) -> Any:
    """Return `found` with every DTensor in it whose layout is in `rows` as a Portion with these rows."""
    if type(found) in (list, tuple):
        return type(found)(_as_portions(each, rows) for each in found)
    if type(found) is DTensor and _layout(found) in rows:
        return with_rows(found, rows[_layout(found)])
    return found


def _tensors_in(values: Iterable[Any]) -> Iterator[DTensor]:
    for value in values:
        if isinstance(value, DTensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors_in(value)


def _with_parts_of(target: Any, source: DTensor) -> DTensor:
    """Return `source` with the parts of `target`; all ranks call this together if their parts differ."""
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
