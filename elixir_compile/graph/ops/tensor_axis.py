"""The tensor axis: the axis of a mesh along which `torch.distributed.tensor.parallel` has cut parameters.

```text
  8 rows, Shard(0) along a tensor axis of 2, then sharded over 2 ranks of a data axis

                    tensor 0        tensor 1
         data 0     rows 0 1        rows 4 5        the rows that each rank owns
         data 1     rows 2 3        rows 6 7
    a gather gives  rows 0-3        rows 4-7        the part of the rank along the tensor axis
```

Everything below a module's attribute holds such parts: homes, gathered copies, gradients, optimizer state. Only the
attribute turns a gathered part into a DTensor again, with the tensor axis alone as its mesh, because the hooks and the
modules of torch expect such a DTensor. A parameter that was a plain tensor when the model was prepared is read as one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from elixir_compile import compat
from elixir_compile.graph.ops.shards import DTensor, cuts, own_part

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPart:
    """The part of a parameter that this rank has along the tensor axis."""

    placement: "Placement"
    """How the axis cuts the parameter: `Shard(dim)` or `Replicate()`."""
    shape: torch.Size
    stride: tuple[int, ...]
    """Of the part, gathered over the data axis."""
    is_plain: bool
    """Whether modules read the part as a plain tensor, and not as a DTensor."""


class TensorAxis:
    """The tensor axis `mesh`, which has one axis, and the data axes `data`, over which its parts are sharded again.

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

    def part_of(self, param: torch.Tensor) -> TensorPart | None:
        """Return the part of `param` along the axis; None if `param` does not have the axis in its mesh."""
        if not isinstance(param, DTensor) or param.device_mesh.ndim != self.joined.ndim:
            return None
        *over_data, placement = param.placements
        shape = list(param.shape)
        if placement.is_shard():
            shape[placement.dim] //= self.num_ranks  # pyright: ignore[reportAttributeAccessIssue]  only shards have it
        is_cut = any(map(cuts, over_data))
        size = torch.Size(shape)
        stride = _contiguous(size) if is_cut else own_part(param).stride()
        return TensorPart(placement=placement, shape=size, stride=stride, is_plain=param in self._plain)

    def with_axis(self, own: torch.Tensor, over_data: Sequence["Placement"], placement: "Placement", like: Any) -> Any:
        """Return the DTensor of which this rank owns `own`, with the full shape and strides of `like`.

        `placement` cuts it along this axis, and then `over_data` along the data axes.
        """
        placements = (*over_data, placement)
        if placement.is_shard() and placement.dim == 0:  # pyright: ignore[reportAttributeAccessIssue]  as above
            strided = compat.strided_shard(0, self.num_ranks)
            placements = (*(strided if each.is_shard() else each for each in over_data), placement)
        return compat.dtensor_of(own, self.joined, placements, like.shape, like.stride())

    def gathered(self, param: torch.Tensor, part: TensorPart, device: torch.device) -> torch.Tensor:
        """Return the `part` of `param` on `device`, as a plain tensor, detached.

        If it is sharded over the data axes, all of their ranks must call this together.
        """
        assert isinstance(param, DTensor)
        own = own_part(param).detach().to(device)
        if not is_over_data(param):
            return own
        assert self.data is not None, "without data axes no part is sharded again"
        from torch.distributed.tensor import Shard

        placements = tuple(Shard(0) if cuts(each) else each for each in param.placements[:-1])
        return compat.dtensor_of(own, self.data, placements, part.shape, part.stride).full_tensor()

    def shard_of(self, gathered: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
        """Return the rows of `gathered` that this rank owns; `gathered` has values for the part of `param` along this
        axis."""
        if not is_over_data(param):
            return gathered
        assert self.data is not None, "without data axes no part is sharded again"
        num_rows = -(-gathered.shape[0] // self.data.size(-1))
        start = num_rows * self.data.get_local_rank(self.data.ndim - 1)
        return gathered[start : start + num_rows].clone()


def is_over_data(param: torch.Tensor) -> bool:
    """Return whether `param`, which has the tensor axis in its mesh, is sharded over the data axes too."""
    assert isinstance(param, DTensor)
    return any(map(cuts, param.placements[:-1]))


def _contiguous(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()
