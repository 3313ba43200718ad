"""Find the tensor axis of a model, and check that its parameters can be sharded again."""

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from elixir_compile.base.errors import UnsupportedModel
from elixir_compile.graph.ops.shards import is_dtensor
from elixir_compile.graph.ops.tensor_axis import TensorAxis

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def tensor_axis_of(model: nn.Module, data: "DeviceMesh | None") -> TensorAxis | None:
    """Return the tensor axis of `model`, beside the data axes `data`; None if no parameter is cut along one.

    Raises UnsupportedModel with a fix if parameters are cut in a way that no plan can hold, or if `data` is no mesh of
    other axes.
    """
    cut = [(name, param) for name, param in model.named_parameters() if isinstance(param, DTensor)]
    if not cut or (data is not None and all(param.device_mesh == data for _, param in cut)):
        return None  # `data` itself cuts them: a copy of a prepared model
    meshes = list(dict.fromkeys(param.device_mesh for _, param in cut))
    if len(meshes) > 1 or meshes[0].ndim > 1:
        axes = ", ".join(str(mesh.mesh_dim_names or f"{mesh.ndim} without names") for mesh in meshes)
        raise UnsupportedModel(
            "the model",
            f"its parameters are cut along the axes {axes}; one tensor axis is supported. Give `parallelize_module` "
            "the same axis of one mesh each time, as in `mesh['tensor']`, and prepare a model once",
        )
    (mesh,) = meshes
    for name, param in cut:
        _check_placement(name, param)
    for name, buffer in model.named_buffers():
        if is_dtensor(buffer):
            raise UnsupportedModel(
                f"buffer {name}",
                f"it is a DTensor of shape {tuple(buffer.shape)}, and only parameters may be. Leave its module out of "
                "the plan of `parallelize_module`",
            )
    if data is not None:
        _check_axes(data, mesh)
    return TensorAxis(mesh, data if data is not None and data.size() > 1 else None)


def _check_placement(name: str, param: DTensor) -> None:
    (placement,) = param.placements
    num_ranks = param.device_mesh.size()
    if not placement.is_shard() and not placement.is_replicate():
        raise UnsupportedModel(name, f"it is placed as {placement}; a parameter is placed as Shard or Replicate")
    if placement.is_shard() and param.shape[placement.dim] % num_ranks:  # pyright: ignore[reportAttributeAccessIssue]
        dim = placement.dim  # pyright: ignore[reportAttributeAccessIssue]  only shards have it
        raise UnsupportedModel(
            name,
            f"dimension {dim} of {tuple(param.shape)} is cut over {num_ranks} ranks of the tensor axis in unequal "
            "parts, and then the ranks would have other plans. Choose a size that the ranks divide, or leave its "
            "module out of the plan of `parallelize_module`",
        )


def _check_axes(data: "DeviceMesh", tensor: "DeviceMesh") -> None:
    """Raise UnsupportedModel unless `data` and `tensor` are axes of one mesh, by their names."""
    if data.mesh_dim_names is None or tensor.mesh_dim_names is None:
        raise UnsupportedModel(
            "the mesh",
            "its axes have no names, by which the data axis and the tensor axis are joined. Name them: "
            "`init_device_mesh(kind, shape, mesh_dim_names=('data', 'tensor'))`",
        )
    both = set(data.mesh_dim_names) & set(tensor.mesh_dim_names)
    if both:
        rest = [name for name in data.mesh_dim_names if name not in both] or ["data"]
        asked = repr(rest[0]) if len(rest) == 1 else repr(tuple(rest))
        raise UnsupportedModel(
            "the mesh",
            f"it has the axis {both.pop()!r}, along which parameters are cut already. Give `prepare` the other axes "
            f"alone: `mesh=mesh[{asked}]`",
        )
    here, there = set(data.mesh.flatten().tolist()), set(tensor.mesh.flatten().tolist())
    if len(here & there) != 1:
        raise UnsupportedModel(
            "the mesh",
            f"its ranks {sorted(here)} and those of the tensor axis, {sorted(there)}, are not two axes of one mesh. "
            "Make one mesh, and give an axis of it to `parallelize_module` and another to `prepare`",
        )


def part_along(axis: TensorAxis, value: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
    """Return the part of `value` that this rank has along the tensor axis, as a plain tensor in the memory of `value`.

    `original` is the parameter before: a DTensor along the axis, or a plain tensor, of which the first rank of the axis
    has the values. `value` is that parameter itself, or a plain tensor in its place.
    """
    value = value.detach()
    if isinstance(value, DTensor):
        return value.to_local().contiguous()
    placements = original.placements if isinstance(original, DTensor) else None
    part = distribute_tensor(value, axis.mesh, placements).to_local()  # replicated, if no placements are given
    return part.to(value.device).contiguous()
