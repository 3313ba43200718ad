"""Prepare a model: its parameters read as gathers, so that a plan may place them in any memory."""

from typing import TYPE_CHECKING

import torch
from torch import nn

from elixir_compile import compat
from elixir_compile.capture.modules import executor_of
from elixir_compile.errors import NotPrepared, UnsupportedModel
from elixir_compile.managed.masters import cast, gets_master, torch_dtype
from elixir_compile.managed.model import ManagedModel, prepare_lock
from elixir_compile.managed.share import ranks_of, shard_parameters
from elixir_compile.ops.masters import has_master
from elixir_compile.options import ParamDtype, parse_options
from elixir_compile.problem.meta import materialize
from elixir_compile.runtime.distributed.ranks import device_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def prepare(
    model: nn.Module,
    device: "torch.device | str | None" = None,
    *,
    param_dtype: ParamDtype | None = None,
    mesh: "DeviceMesh | None" = None,
) -> nn.Module:
    """Make every parameter of `model` readable on `device`, whatever memory it is in, and return `model`.

    The parameters keep their identity and stay in their memory; a parameter on `meta` is created on the host. So a
    model larger than the device is never on it as a whole. Buffers move to `device`. Its default is the device of the
    first parameter that is not on `meta`. `state_dict()` keys do not change. Preparing again changes nothing.

    `param_dtype` casts fp32 parameters, not buffers, to `"bfloat16"` or `"float16"`. HybridAdamW then updates an fp32
    master, which starts with every bit of the present weights. Parameters already of `param_dtype` get a master too.

    With a `mesh` of several ranks, each rank must call this together. Parameters become DTensors, sharded along
    dimension 0 over the last axis of the mesh; ranks along an axis before it hold copies. Small tensors are complete on
    each rank. All ranks get the values of the first rank. Make the optimizer after this call.

    Raises UnsupportedModel if the model has no parameters, or was prepared for another device or `param_dtype`, and
    InvalidOption if `param_dtype` is unknown.

    Example:
        layer = elixir.prepare(torch.nn.Linear(4, 4, device="meta"), "cpu")
        compiled = torch.compile(layer, backend="elixir")
    """
    param_dtype = parse_options({"param_dtype": param_dtype}).param_dtype
    model = compat.undo_compile(model)
    ranks = ranks_of(mesh)
    with prepare_lock:
        target = _target_device(model, device if mesh is None else device or device_of(mesh))
        prepared = executor_of(model)
        if prepared is not None:
            if prepared.device != target and device is not None:
                raise UnsupportedModel(
                    type(model).__name__, f"it was prepared for {prepared.device} and cannot move to {target}"
                )
            if param_dtype is not None:
                _require_masters(model, param_dtype)
            return model
        if ranks is None:
            materialize(model)
        else:
            shard_parameters(model, ranks, None if param_dtype is None else torch_dtype(param_dtype))
        if param_dtype is not None:
            cast(model, param_dtype)
        managed = ManagedModel([model], target, ranks)
        managed.swap_modules()
        managed.move_rest()
    return model


def _require_masters(model: nn.Module, param_dtype: ParamDtype) -> None:
    for name, param in model.named_parameters():
        if gets_master(param, torch_dtype(param_dtype)) and not has_master(param):
            because = f"it was prepared as {param.dtype} and cannot become {param_dtype}. Name `param_dtype` in the "
            raise UnsupportedModel(name, because + "first call of `prepare`, before the model is compiled and run")


def _target_device(model: nn.Module, device: "torch.device | str | None") -> torch.device:
    if device is not None:
        target = torch.device(device)
        return (
            torch.device("cuda", torch.cuda.current_device())
            if target.type == "cuda" and target.index is None
            else target
        )
    for param in model.parameters():
        if param.device.type != "meta":
            return param.device
    if next(iter(model.parameters()), None) is None:
        raise UnsupportedModel(type(model).__name__, "it has no parameters, so there is nothing to place")
    raise NotPrepared(
        "every parameter is on `meta`, so the device must be named: `elixir_compile.prepare(model, device=...)`."
    )
