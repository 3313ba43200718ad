"""Cast the parameters of a model to 16 bits, shard them over several ranks, along a tensor axis too if there is one,
and create those on `meta` or map them from files.
"""

import functools
import importlib
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from elixir_compile import compat
from elixir_compile.base.errors import InvalidOption, PlanMismatch, UnsupportedModel, WrongDtype
from elixir_compile.base.options import ParamDtype
from elixir_compile.graph.capture.modules import unmanaged_reason
from elixir_compile.graph.ops.optimizers import REST_DTYPES, add_master, has_master, note_replaced
from elixir_compile.graph.ops.registry import Slot, aliases
from elixir_compile.graph.ops.shards import (
    Portion,
    TensorAxis,
    as_dtensor,
    is_dtensor,
    is_wrapped,
    new_portion,
    own_shard,
    parts_of,
)
from elixir_compile.ir import Plan
from elixir_compile.ir.share import largest_remainder, owners_by_size
from elixir_compile.optim.host.flat_step import split
from elixir_compile.runtime.bucket import Slab, flat, is_slab_memory
from elixir_compile.runtime.distributed.ranks import Ranks
from elixir_compile.search.space.buckets import is_worth_sharding

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


# ----------------------------------------------------------------------------------------------------------------------
# Find the tensor axis of a model, and check that its parameters can be sharded again.


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
        (placement,) = param.placements
        if not placement.is_shard() and not placement.is_replicate():
            raise UnsupportedModel(name, f"it is placed as {placement}; a parameter is placed as Shard or Replicate")
        dim = placement.dim if placement.is_shard() else None  # pyright: ignore[reportAttributeAccessIssue]
        if dim is not None and param.shape[dim] % mesh.size():
            raise UnsupportedModel(
                name,
                f"dimension {dim} of {tuple(param.shape)} is cut over {mesh.size()} ranks of the tensor axis in "
                "unequal parts, and then the ranks would have other plans. Choose a size that the ranks divide, or "
                "leave its module out of the plan of `parallelize_module`",
            )
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


def shard_along(axis: TensorAxis, value: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
    """Return the shard of `value` that this rank has along the tensor axis, as a plain tensor in the memory of `value`.

    `original` is the parameter before: a DTensor along the axis, or a plain tensor, of which the first rank of the axis
    has the values. `value` is that parameter itself, or a plain tensor in its place.
    """
    value = value.detach()
    if isinstance(value, DTensor):
        return value.to_local().contiguous()
    placements = original.placements if isinstance(original, DTensor) else None
    shard = distribute_tensor(value, axis.mesh, placements).to_local()  # replicated, if no placements are given
    return shard.to(value.device).contiguous()


# ----------------------------------------------------------------------------------------------------------------------
# Cast the parameters of a model to 16 bits, shard them over several ranks, and create those on `meta`.
#
# **Cast** without losing a bit: the other bits are kept for the optimizer.
#
#     fp32 weight -> bfloat16 parameter + int16 low half      4 bytes as before
#                 -> float16 parameter  + fp32 master         6 bytes
#
# The low half and the master are in host memory. For a frozen parameter neither is kept: if it is thawed later, its
# master starts from the 16-bit value.
#
# **Shard**, parameter by parameter:
#
#     nn.Linear.weight, complete on each rank -> nn.Parameter(DTensor), of which each rank keeps some rows
#
# Every rank gets the values of the mesh's first rank, so a model built without a seed is the same on all ranks. A
# module on `meta` is created on the host, sharded and dropped before the next module. So a rank never holds more than
# its shards and a single module.


_BLOCK = 1 << 22
"""Elements that are split at once; the temporaries take 20 bytes each."""


def torch_dtype(name: ParamDtype) -> torch.dtype:
    """Return torch's dtype called `name`."""
    return {"bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def gets_master(param: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether a cast to `dtype` gives `param`, which is no scale, a master: it is in fp32 or in `dtype`, and no
    tensor subclass."""
    return type(own_shard(param.data)) is torch.Tensor and param.dtype in (torch.float32, dtype)


def scales_of(modules: Iterable[nn.Module]) -> frozenset[int]:
    """Return the ids of the parameters of `modules` that no cast rounds: the scales of quantised weights.

    A scale is a frozen parameter beside a tensor of integers, the codes, with as many elements or more: its module
    multiplies both in each forward, so that all weights of the layer would get the error of a rounded scale.
    """
    found: set[int] = set()
    for module in modules:
        own = [tensor for tensor in (*module._parameters.values(), *module._buffers.values()) if tensor is not None]
        codes = [each.numel() for each in own if not (each.is_floating_point() or each.is_complex() or each.is_meta)]
        most = max(codes, default=0)
        found |= {id(each) for each in own if not each.requires_grad and most > 1 and each.numel() <= most}
    return frozenset(found)


@torch.no_grad()
def cast(model: nn.Module, name: ParamDtype) -> None:
    """Cast every fp32 parameter of `model` but the scales of quantised weights to the dtype called `name`, and give it
    a master.

    DTensors are left alone: `shard_parameters` has cast them.
    """
    dtype, scales = torch_dtype(name), scales_of(model.modules())
    for param in model.parameters():
        if id(param) in scales or not gets_master(param, dtype) or has_master(param) or is_dtensor(param):
            continue
        if param.dtype == dtype or param.numel() == 0:
            param.data = param.data.to(dtype)
            add_master(param, None)
        else:
            grad, (high, rest) = param.grad, narrowed(param.detach(), dtype, keeps_rest=param.requires_grad)
            param.grad = None
            param.data = high
            param.grad = None if grad is None else grad.to(dtype)
            add_master(param, rest)


def check_masters(slots: Iterable[Slot], modules: Iterable[nn.Module], name: ParamDtype) -> None:
    """Raise WrongDtype if a parameter of `slots`, all parameters of `modules`, has no master, although `cast` to the
    dtype `name` would add one."""
    scales = scales_of(modules)
    for slot in slots:
        is_cast = isinstance(slot.param, nn.Parameter) and gets_master(slot.param, torch_dtype(name))
        if is_cast and id(slot.param) not in scales and not has_master(slot.param):
            raise WrongDtype(slot.name, str(slot.param.dtype), name)


def check_reduces(plan: Plan, slots: Mapping[str, Slot], ranks: Ranks) -> None:
    """Raise PlanMismatch if `plan` reduces gradients in a dtype other than the dtype in which `ranks` reduce them."""
    for bucket in plan.buckets:
        params = (slots[name].param for name in bucket.params if name in slots)
        for param in params if bucket.trainable else ():
            here = ranks.reduced_dtype(param)
            planned = param.dtype if bucket.reduce_dtype is None else getattr(torch, bucket.reduce_dtype)
            if planned != here:
                raise PlanMismatch("reduce dtype", *(str(dtype).removeprefix("torch.") for dtype in (planned, here)))


def narrowed(master: torch.Tensor, dtype: torch.dtype, *, keeps_rest: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the fp32 tensor `master` rounded to `dtype`, and the rest from which the optimizer restores `master`.

    The rest is the low half for bfloat16 and `master` itself for float16; None unless `keeps_rest`.
    """
    master = compat.settled(master)
    if not torch.ops.aten.is_non_overlapping_and_dense(master):
        master = master.contiguous()
    is_in_slab = master.device.type == "cpu" and is_slab_memory(master.data_ptr())
    high = _on_host(master, dtype) if is_in_slab else torch.empty_like(master, dtype=dtype)
    rest = _on_host(master, REST_DTYPES[dtype]) if keeps_rest else None
    for block in range(0, master.numel(), _BLOCK):
        piece = slice(block, block + _BLOCK)
        whole, part = flat(master)[piece], flat(high)[piece]
        if dtype == torch.bfloat16:
            low = torch.empty_like(whole, dtype=torch.int16)
            split(whole, part, low)
        else:
            low = whole
            part.copy_(whole)
        if rest is not None:
            flat(rest)[piece].copy_(low)
    return high, rest


def _on_host(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialised tensor in a slab of the host, with the shape and the strides of `like`.

    On a CPU-only machine only slabs count as host memory; memory that torch allocates counts for the device.
    """
    elements = Slab(like.numel() * dtype.itemsize, pin=False).tensor(dtype, (like.numel(),), 0)
    return elements.as_strided(like.shape, like.stride())


def ranks_of(mesh: "DeviceMesh | None", tensor_axis: TensorAxis | None = None) -> Ranks | None:
    """Return the ranks of `mesh`, beside the `tensor_axis`; None if there is no mesh or it has one rank.

    Raises UnsupportedModel for a mesh of more than two axes.
    """
    if mesh is None or mesh.size() == 1:
        return None
    if mesh.ndim > 2:
        raise UnsupportedModel("the mesh", f"it has {mesh.ndim} axes; one cuts parameters and one more copies them")
    return Ranks(mesh, tensor_axis)


def whole_owners(
    model: nn.Module, names: Collection[str], ranks: Ranks | None, axis: TensorAxis | None
) -> Mapping[int, int]:
    """Return by the id of each parameter of `model` in `names` the rank that owns all of it; empty without `ranks`.

    The bytes are shared out as the `state` of the ranks says, by `owners_by_size`: what an update costs is not known
    before there is an optimizer, and grows with them. A parameter that is too small to be sharded has no owner.

    Raises InvalidOption for a name that the model does not have, and UnsupportedModel for ranks of two axes, such as
    those along the tensor `axis`.
    """
    known = dict(model.named_parameters(remove_duplicate=False))
    unknown = [name for name in names if name not in known]
    if unknown:
        raise InvalidOption("whole", unknown[0], f"names of parameters of the {type(model).__name__}, as {min(known)}")
    if names and (axis is not None or (ranks is not None and ranks.num_copies > 1)):
        beside = "copies of each part" if axis is None else "tensors in parts"
        because = f"parameters stay whole over the ranks of one axis, and beside it there is one of {beside}"
        raise UnsupportedModel("the mesh", f"{because}. Leave `whole` out")
    if ranks is None:
        return {}
    # In the order of the model, which is the same on all ranks; the order of `names` may differ.
    params = {id(param): param for name, param in known.items() if name in set(names)}
    owned = [param for param in params.values() if is_worth_sharding(param.nbytes, param.dim(), ranks.num_shards)]
    sizes = [param.nbytes for param in owned]
    owners = owners_by_size(sizes, ranks.state or (1.0,) * ranks.num_shards)
    return {id(param): owner for param, owner in zip(owned, owners, strict=True)}


@torch.no_grad()
def shard_parameters(
    model: nn.Module,
    ranks: Ranks | None,
    dtype: torch.dtype | None,
    axis: TensorAxis | None = None,
    whole: Mapping[int, int] | None = None,
) -> None:
    """Make the parameters of `model` DTensors over `ranks` and the tensor `axis`. All ranks must call this together.

    If `dtype` is given, parameters are cast to it and get masters. A parameter that cannot become a gather is complete
    on each rank, its gradient averaged over them; `whole` has by the id of a parameter the rank that gets all rows.
    Without `ranks`, parameters along the `axis` alone are replaced, if they were on `meta` or are cast. Raises
    UnsupportedModel if parameters share memory, or if a module on `meta` cannot initialise itself.
    """
    for name, other in aliases(model.named_parameters() if ranks is not None else ()).items():
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
        own = {name: param for name, param in module._parameters.items() if param is not None}
        before = {name: param for name, param in own.items() if id(param) in owners}
        finished = {name: param for name, param in own.items() if id(param) in done}
        if any(tensor.is_meta for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
            # The module initialises all of its parameters. Tied parameters with values must be out of its reach.
            module._parameters.update(
                {
                    name: nn.Parameter(
                        torch.empty(param.shape, dtype=param.dtype, device="cpu"), requires_grad=param.requires_grad
                    )
                    for name, param in finished.items()
                }
            )
        _materialize_module(module, path, initialize, {})
        module._parameters.update(finished)
        for name, param in before.items():
            if id(param) not in done:
                now = _sharded(
                    module,
                    name,
                    f"{path}.{name}" if path else name,
                    ranks,
                    dtype,
                    axis,
                    param,
                    (whole or {}).get(id(param)),
                )
                if now is not param:
                    note_replaced(param)
                for owner, local in owners[id(param)]:
                    owner._parameters[local] = now
                done.add(id(param))
                done.add(id(now))
        for buffer in module.buffers(recurse=False):
            _from_first(buffer, ranks, axis)


def _sharded(
    module: nn.Module,
    local: str,
    name: str,
    ranks: Ranks | None,
    dtype: torch.dtype | None,
    axis: TensorAxis | None,
    original: nn.Parameter,
    owner: int | None,
) -> nn.Parameter:
    """Return the parameter called `local` in `module`, and `name` in the model, as a DTensor over `ranks` and `axis`.

    `original` is the parameter before its module had values. The rank `owner` gets all rows, if there is one. Returns
    the parameter itself, with the values of the first rank, if it cannot become a gather, or if nothing is to be
    changed.
    """
    param = module._parameters[local]
    assert param is not None
    if is_wrapped(param) or unmanaged_reason(module, local) is not None:
        if is_dtensor(original):
            assert axis is not None
            because = f"{unmanaged_reason(module, local)}, and it is cut along a tensor axis of {axis.num_ranks} ranks"
            raise UnsupportedModel(name, f"{because}. Leave its module out of the plan of `parallelize_module`")
        for part in parts_of(param).values():
            _from_first(part.data, ranks, axis)
        if param.requires_grad and ranks is not None:
            param.register_post_accumulate_grad_hook(functools.partial(_average, name=name, ranks=ranks))
        return param
    is_cast = dtype is not None and gets_master(param, dtype) and id(param) not in scales_of([module])
    if ranks is None and not is_dtensor(original):  # `cast` casts it
        _from_first(param.data, ranks, axis)
        return param
    if ranks is None and param is original and not is_cast:
        return param
    cut = _cut(param, original, ranks, axis, owner)
    rest = None
    if dtype is not None and is_cast and param.dtype != dtype:
        own, rest = narrowed(own_shard(cut), dtype, keeps_rest=param.requires_grad)
        cut = as_dtensor(own, cut)
    now = nn.Parameter(cut, requires_grad=param.requires_grad)
    if is_cast:
        add_master(now, rest)
    if axis is not None and not is_dtensor(original):
        axis.note_plain(now)
    return now


def _cut(
    param: nn.Parameter, original: nn.Parameter, ranks: Ranks | None, axis: TensorAxis | None, owner: int | None
) -> torch.Tensor:
    """Return the values of `param`, with those of the first rank, as a DTensor over `ranks` and `axis`; all of its rows
    are on the rank `owner` if there is one."""
    whole = compat.settled(param.detach().contiguous()) if axis is None else shard_along(axis, param, original)
    if ranks is None:
        assert axis is not None
        assert isinstance(original, DTensor)
        return axis.with_axis(whole, (), original.placements[0], original)
    is_sharded = is_worth_sharding(whole.nbytes, whole.dim(), ranks.num_shards)
    over_data = ranks.placements(is_sharded=is_sharded)
    if is_sharded and owner is not None:
        cut = _portion(whole, [whole.shape[0] if rank == owner else 0 for rank in range(ranks.num_shards)], ranks)
    elif is_sharded and ranks.state:
        cut = _portion(whole, largest_remainder(whole.shape[0], ranks.state), ranks)
    else:
        cut = distribute_tensor(whole, ranks.mesh, over_data)
    if axis is not None:
        placement = original.placements[0] if isinstance(original, DTensor) else Replicate()
        return axis.with_axis(own_shard(cut).to(whole.device), over_data, placement, original)
    if own_shard(cut).device != whole.device:  # it is on the mesh's device, and the plan may want it on the host
        cut = as_dtensor(own_shard(cut).to(whole.device), cut)
    return cut


def _portion(whole: torch.Tensor, rows: Sequence[int], ranks: Ranks) -> Portion:
    """Return the values of `whole` on the first rank as a Portion over `ranks`, each with its number of `rows`."""
    values = distribute_tensor(whole, ranks.mesh, ranks.placements(is_sharded=False)).to_local()
    own = values.split(list(rows))[ranks.mesh.get_local_rank(ranks.mesh.ndim - 1)].clone()
    return new_portion(own, rows, ranks.mesh, whole.shape)


def _average(param: torch.Tensor, *, name: str, ranks: Ranks) -> None:
    """Replace the gradient of `param`, called `name`, by its mean over all ranks.

    Raises RanksDiffer if another rank averages the gradient of another parameter at this moment.
    """
    ranks.control.check_same_op(name, "a gradient")
    grad = param.grad
    assert grad is not None
    (mean,) = ranks.means([grad], grad.dtype)
    grad.copy_(mean)


def _from_first(tensor: torch.Tensor, ranks: Ranks | None, axis: TensorAxis | None) -> None:
    """Fill `tensor` with the values of the first rank."""
    for mesh in (None if axis is None else axis.mesh, None if ranks is None else ranks.mesh):
        if mesh is not None:
            tensor.copy_(distribute_tensor(compat.settled(tensor), mesh, [Replicate()] * mesh.ndim).to_local())


def load_weights(model: nn.Module, weights: "str | os.PathLike[str]") -> None:
    """Give the parameters and buffers of `model` that are on `meta` their values in the safetensors file or folder
    `weights`, by the keys of `state_dict()`.

    A parameter in the dtype of the file becomes a view of the mapped file, which takes no memory of the process; others
    are converted one by one. A buffer that no file has is left on `meta` for `materialize`.

    Raises InvalidOption if there are no such files or no parameter is on `meta`, and UnsupportedModel for parameters
    that no file has or that have another shape or kind of number there, and for a buffer that no file has beside
    parameters; the model is then as before.
    """
    where = _safetensors_in(Path(weights))
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if param.is_meta:
            names.setdefault(id(param), []).append(name)
    if not names:
        raise InvalidOption("weights", str(weights), "None for a model of which no parameter is on `meta`")
    missing = [own[0] for own in names.values() if where.keys().isdisjoint(own)]
    if missing:
        because = f"{len(missing)} of {len(names)} parameters on `meta` are not in {weights}, the first {missing[0]}"
        raise UnsupportedModel(type(model).__name__, f"{because}. Its keys must be those of `state_dict()`")
    tensors = dict(chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)))
    values = {name: where[name](name) for name, own in tensors.items() if own.is_meta and name in where}
    for name, value in values.items():
        own = tensors[name]
        if own.shape != value.shape or own.is_floating_point() != value.is_floating_point():
            because = f"it is {own.dtype} {[*own.shape]}, and {value.dtype} {[*value.shape]} in {weights}"
            raise UnsupportedModel(name, because)
    for name, own in tensors.items():
        path, _, local = name.rpartition(".")
        module = model.get_submodule(path)
        is_left = own.is_meta and id(own) not in names and name not in values
        if is_left and any(param is not None for param in module._parameters.values()):
            because = (
                f"its buffer {local} is on `meta` and not in {weights}, so only `reset_parameters()` could make it"
            )
            raise UnsupportedModel(path or type(module).__name__, f"{because}. Create the buffer with its values")
    given = dict[int, nn.Parameter]()
    for key, same in names.items():
        name = next(name for name in same if name in values)
        value, param = values[name], tensors[name]
        if value.dtype != param.dtype:
            value = _on_host(value, param.dtype).copy_(value)
        given[key] = nn.Parameter(value, requires_grad=param.requires_grad)
    for name, own in tensors.items():
        path, _, local = name.rpartition(".")
        if id(own) in given:
            model.get_submodule(path)._parameters[local] = given[id(own)]
        elif name in values:
            model.get_submodule(path)._buffers[local] = values[name].to(own.dtype, copy=True)


def _safetensors_in(weights: Path) -> dict[str, Callable[[str], torch.Tensor]]:
    """Return by the key of each tensor in the file or folder `weights` a function of the key that maps the tensor."""
    files = sorted(weights.glob("*.safetensors")) if weights.is_dir() else [weights] if weights.is_file() else []
    if not files:
        raise InvalidOption("weights", str(weights), "the path of a safetensors file, or of a folder with such files")
    try:
        library: Any = importlib.import_module("safetensors")
    except ImportError:
        raise InvalidOption("weights", str(weights), "None without safetensors: `pip install safetensors`") from None
    opened: list[Any] = [library.safe_open(file, framework="pt", device="cpu") for file in files]
    return {key: file.get_tensor for file in opened for key in file.keys()}  # noqa: SIM118 - no mapping


def materialize(model: nn.Module) -> None:
    """Allocate every parameter and buffer of `model` that is on `meta` on the host, and let its module initialise it.

    A module initialises itself by `reset_parameters()`, or by the `_init_weights` of a Hugging Face model. Raises
    UnsupportedModel for a module with neither; use `torch.nn.Module.to_empty` and `load_state_dict` for such a model.
    """
    initialize = getattr(model, "_init_weights", None)
    tied: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules():
        _materialize_module(module, path, initialize, tied)


def _materialize_module(
    module: nn.Module, path: str, initialize: Callable[[nn.Module], None] | None, tied: dict[int, nn.Parameter]
) -> None:
    """Allocate and initialise the parameters and buffers of `module` itself, without its children; see `materialize`.

    `path` is its name in the model, for errors. `initialize` is the model's `_init_weights`. `tied` has the parameters
    created so far, by the id of their parameter on `meta`; it is updated.
    """
    local = [*module._parameters.values(), *module._buffers.values()]
    if not any(tensor is not None and tensor.is_meta for tensor in local):
        return
    is_known = all(param is None or id(param) in tied for param in module._parameters.values()) and not module._buffers
    for name, param in module._parameters.items():
        if param is not None and param.is_meta:
            if id(param) not in tied:
                # In a slab, because on a CPU-only machine only slabs count as host memory.
                slab = Slab(param.numel() * param.element_size(), pin=False)
                on_host = slab.tensor(param.dtype, param.shape, 0)
                tied[id(param)] = nn.Parameter(on_host, requires_grad=param.requires_grad)
            module._parameters[name] = tied[id(param)]
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[name] = torch.empty_like(buffer, device="cpu")
    if is_known:
        return
    reset = getattr(module, "reset_parameters", None)
    if reset is None and initialize is None:
        raise UnsupportedModel(
            path or type(module).__name__, "it is on `meta` and has no `reset_parameters()` to start from"
        )
    with torch.no_grad():
        if reset is not None:
            reset()
        if initialize is not None:
            initialize(module)
