"""Parts of any sizes: a DTensor of which each rank owns a number of rows of its own.

```text
  rows = 7, 2, 1      rank 0: rows 0 to 6      rank 1: rows 7 and 8      rank 2: row 9
```

The placement stays `Shard(0)`, whose parts are those of `torch.chunk`: 4, 4 and 2 rows. Pointwise ops, foreach
optimizers, norms and `clip_grad_norm_` read this rank's part only, so they are right with any sizes. Answered anew are
the reads that compute where a part lies: `full_tensor`, `redistribute`, and the three methods by which distributed
checkpoints find a part. Ops that would send parts between ranks by the rule of `torch.chunk`, such as `param[2:5]`, or
whose result is cut in another dimension, such as `param.t()`, raise NotImplementedError: use `full_tensor()`.
"""

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from elixir_compile.compat.distributed import refuses_redistribution

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
            tensors = list(_tensors_in((*given, *(kwargs or {}).values())))
            rows = _common_rows(tensors)
            _require_same_rows([each for each in given if isinstance(each, DTensor)])
            if rows:
                given = [_summed_up(each) for each in given]
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
            raise _other_rows(found[_layout(tensor)], rows)
    return {layout: rows for layout, rows in found.items() if rows is not None}


def _require_same_rows(operands: Sequence[DTensor]) -> None:
    """Raise ValueError if two of the `operands` of an op have equal lengths in dimension 0 and other parts of it."""
    cut = [each for each in operands if any(placement.is_shard() for placement in each.placements)]
    for first, second in itertools.combinations(cut, 2):
        is_paired = first.shape[:1] == second.shape[:1] and first.placements == second.placements
        if is_paired and rows_of(first) != rows_of(second):
            raise _other_rows(rows_of(first), rows_of(second))


def _summed_up(value: Any) -> Any:
    """Return `value` on every rank, if it is a DTensor of which ranks hold terms of a sum, such as a norm."""
    if not isinstance(value, DTensor) or not all(placement.is_partial() for placement in value.placements):
        return value
    from torch.distributed.tensor import Replicate

    return value.redistribute(placements=[Replicate()] * len(value.placements))


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
    parts lie is not known.
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
    """Return the error of the op `func`, which would take parts of `rows` for equal parts."""
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
