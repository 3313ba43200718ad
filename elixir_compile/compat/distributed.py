"""Collectives and the local tensors of DTensors."""

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch


def flat_collectives() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return all-gather and reduce-scatter of one tensor, each called with (output, input, group=...).

    `all_gather_single` and `reduce_scatter_single` from torch 2.13 on, which deprecates `all_gather_into_tensor` and
    `reduce_scatter_tensor`, the names before. Gone: AttributeError when collectives are measured.
    """
    if hasattr(torch.distributed, "all_gather_single"):
        return torch.distributed.all_gather_single, torch.distributed.reduce_scatter_single
    return torch.distributed.all_gather_into_tensor, torch.distributed.reduce_scatter_tensor


def scaled_sum(factor: float) -> Any:
    """Return NCCL's sum of what each rank has times the `factor` of that rank.

    `torch.distributed._make_nccl_premul_sum`, torch 2.11 to 2.13. Gone: AttributeError where ranks weigh gradients.
    """
    return torch.distributed._make_nccl_premul_sum(factor)


def set_local_tensor(sharded: torch.Tensor, local: torch.Tensor) -> None:
    """Let the DTensor `sharded` hold `local`, of the shape, dtype and values of what it held, at the same version.

    The slot `_local_tensor`, torch 2.11 to 2.13, which FSDP2 sets too. Gone: KeyError when a parameter is moved.
    """
    torch._C._autograd._unsafe_set_version_counter((local,), (local_tensor(sharded)._version,))
    _local_slot().__set__(sharded, local)


def local_tensor(sharded: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of the DTensor `sharded`: the tensor itself, where `to_local()` makes a view.

    `_local_tensor`, a slot of torch 2.11 to 2.13. Gone: KeyError when a model is prepared for several ranks.
    """
    # Not by its name, which waits for an update where a subclass has `awaited_local_tensor`.
    return _local_slot().__get__(sharded)


def dtensor_like(local: torch.Tensor, like: Any) -> torch.Tensor:
    """Return the DTensor of which this rank holds `local`, laid out as the DTensor `like`.

    `_spec`, torch 2.11 to 2.13, as in FSDP2: `from_local` copies to the mesh's device. Gone: AttributeError in
    `prepare` on several ranks.
    """
    from torch.distributed.tensor import DTensor

    spec = like._spec
    form = spec.tensor_meta._replace(dtype=local.dtype)
    return DTensor(local, type(spec)(spec.mesh, spec.placements, tensor_meta=form), requires_grad=False)


def awaited_local_tensor(wait: Callable[[torch.Tensor], None]) -> dict[str, property]:
    """Return what a subclass of DTensor has so that `wait` runs before torch reads what this rank holds: `to_local()`,
    `full_tensor()` and checkpoints read it past `__torch_function__`.

    `_local_tensor`, torch 2.11 to 2.13. Gone: a part is read while the host updates it, which tests would see.
    """

    def read(sharded: torch.Tensor) -> torch.Tensor:
        wait(sharded)
        return local_tensor(sharded)

    return {"_local_tensor": property(read)}


@functools.cache
def _local_slot() -> Any:
    from torch.distributed.tensor import DTensor

    return vars(DTensor)["_local_tensor"]


def default_timeout() -> timedelta:
    """Return how long the default process group waits for a rank.

    `ProcessGroup._get_backend`, `._device_types`, `.options._timeout`, torch 2.11 to 2.13. Gone: AttributeError there.
    """
    world = torch.distributed.group.WORLD
    return world._get_backend(world._device_types[0]).options._timeout
