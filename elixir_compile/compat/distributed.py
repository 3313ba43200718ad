"""Collectives, the local tensors of DTensors, and the records of distributed checkpoints."""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement


def flat_collectives() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return all-gather and reduce-scatter of one tensor, each called with (output, input, group=...).

    `all_gather_single` and `reduce_scatter_single` on torch 2.13, `all_gather_into_tensor` and `reduce_scatter_tensor`
    on torch 2.11 and 2.12: torch 2.13 deprecates the earlier names. Gone: AttributeError when collectives are measured.
    """
    if hasattr(torch.distributed, "all_gather_single"):
        return torch.distributed.all_gather_single, torch.distributed.reduce_scatter_single
    return torch.distributed.all_gather_into_tensor, torch.distributed.reduce_scatter_tensor


def scaled_sum(factor: float) -> Any:
    """Return the NCCL reduction that multiplies each rank's tensor by the `factor` of the rank before the sum.

    `torch.distributed._make_nccl_premul_sum`: torch 2.11 to 2.13. Gone: AttributeError when ranks weigh gradients.
    """
    return torch.distributed._make_nccl_premul_sum(factor)  # pyright: ignore[reportPrivateImportUsage]


def refuses_redistribution() -> AbstractContextManager[object]:
    """Return a context in which an op of DTensors raises RuntimeError if it would send parts between ranks.

    `torch.distributed.tensor._utils.ExplicitRedistributionContext`: torch 2.11 to 2.13. Gone: ImportError at the first
    op of a tensor in parts of unequal sizes.
    """
    from torch.distributed.tensor._utils import ExplicitRedistributionContext

    return ExplicitRedistributionContext()


def set_local_tensor(sharded: torch.Tensor, local: torch.Tensor) -> None:
    """Replace the local tensor of the DTensor `sharded` by `local`; its version counter stays.

    `local` must have the shape, dtype and values of the local tensor before.

    The member descriptor `_local_tensor`, which FSDP2 sets too: torch 2.11 to 2.13. Gone: KeyError when a parameter is
    moved.
    """
    from torch._C import _autograd

    _autograd._unsafe_set_version_counter((local,), (local_tensor(sharded)._version,))
    _local_tensor_descriptor().__set__(sharded, local)


def local_tensor(sharded: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of the DTensor `sharded` itself; `to_local()` would return a view of it.

    The member descriptor `_local_tensor`: torch 2.11 to 2.13. Gone: KeyError when a model is prepared for several
    ranks.
    """
    # By the descriptor: in a subclass with `awaited_local_tensor`, `sharded._local_tensor` waits for an update.
    return _local_tensor_descriptor().__get__(sharded)


def dtensor_like(local: torch.Tensor, like: "DTensor") -> "DTensor":
    """Return a DTensor with `local` as its local tensor and the layout of the DTensor `like`; a row of `local` may have
    another shape than a row of `like` if no axis cuts the rows.

    `DTensor.from_local` is not used because it copies to the device of the mesh.

    `_spec`, as in FSDP2: torch 2.11 to 2.13. Gone: AttributeError in `prepare` on several ranks.
    """
    from torch.distributed.tensor import DTensor

    spec = like._spec
    if spec.tensor_meta is None:
        raise TypeError("a DTensor without shape and dtype has no layout to take over")
    form = spec.tensor_meta._replace(dtype=local.dtype)
    if local.shape[1:] != local_tensor(like).shape[1:]:
        row = torch.empty((form.shape[0], *local.shape[1:]), device="meta")
        form = form._replace(shape=row.shape, stride=row.stride())
    return DTensor(local, type(spec)(spec.mesh, spec.placements, tensor_meta=form), requires_grad=False)


def dtensor_of(
    local: torch.Tensor,
    mesh: "DeviceMesh",
    placements: "Sequence[Placement]",
    shape: Sequence[int],
    stride: Sequence[int],
) -> "DTensor":
    """Return the DTensor of the full `shape` and `stride` with `local`, on whatever device, as its local tensor.

    `torch.distributed.tensor._dtensor_spec`, as in FSDP2: torch 2.11 to 2.13. Gone: ImportError in `prepare` of a
    tensor-parallel model.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    form = TensorMeta(torch.Size(shape), tuple(stride), local.dtype)
    return DTensor(local, DTensorSpec(mesh, tuple(placements), tensor_meta=form), requires_grad=False)


def joined_mesh(outer: "DeviceMesh", inner: "DeviceMesh") -> "DeviceMesh":
    """Return the mesh with the axes of `outer` followed by the axes of `inner`; both meshes are slices of one mesh.

    `DeviceMesh._concatenate`, as in FSDP2: checked on torch 2.11 and 2.13. Gone: AttributeError in `prepare` of a
    tensor-parallel model over a data axis.
    """
    return type(outer)._concatenate([outer, inner])


def strided_shard(dim: int, num_parts: int) -> "Placement":
    """Return the placement that cuts each of `num_parts` parts along `dim`, which an inner axis of the mesh makes.

    `torch.distributed.tensor.placement_types._StridedShard`, as in FSDP2: torch 2.11 to 2.13. Gone: ImportError in
    `prepare` of a tensor-parallel model over a data axis.
    """
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=num_parts)


def awaited_local_tensor(wait: Callable[[torch.Tensor], None]) -> dict[str, property]:
    """Return the members of a subclass of DTensor in which `wait` runs before torch reads the local tensor.

    A property is needed because `to_local()`, `full_tensor()` and checkpoints read the local tensor without a call of
    `__torch_function__`.

    `_local_tensor`: torch 2.11 to 2.13. Gone: a local tensor is read while the host updates it, and tests fail.
    """

    def read(sharded: torch.Tensor) -> torch.Tensor:
        wait(sharded)
        return local_tensor(sharded)

    return {"_local_tensor": property(read)}


@functools.cache
def _local_tensor_descriptor() -> Any:
    from torch.distributed.tensor import DTensor

    return vars(DTensor)["_local_tensor"]


def group_size(group: Any) -> int:
    """Return the number of ranks of the process group that a collective in a graph names.

    `torch.distributed.distributed_c10d._resolve_process_group`, which finds a group by its name: torch 2.11 to 2.13.
    Gone: KeyError at the first capture of a tensor-parallel model.
    """
    import torch.distributed.distributed_c10d as found

    named: Any = vars(found)["_resolve_process_group"]
    return (named(group) if isinstance(group, str) else group).size()


def default_timeout() -> timedelta:
    """Return the timeout of the default process group.

    `ProcessGroup._get_backend`, `._device_types`, `.options._timeout`: torch 2.11 to 2.13. Gone: AttributeError when
    the control channel opens.
    """
    world = torch.distributed.group.WORLD
    if world is None:
        raise RuntimeError("torch.distributed is not initialised")
    return world._get_backend(world._device_types[0]).options._timeout


def storage_info(file: str, offset_bytes: int, stored_bytes: int) -> Any:
    """Return the record of a distributed checkpoint that a tensor is `stored_bytes` at `offset_bytes` of `file`.

    `torch.distributed.checkpoint.filesystem._StorageInfo`, which `.metadata` files contain: torch 2.11 to 2.13. Gone:
    ImportError when a checkpoint is saved.
    """
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(file, offset_bytes, stored_bytes)
