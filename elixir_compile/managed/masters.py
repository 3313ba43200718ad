"""Cast the parameters of a model to 16 bits without losing a bit: the other bits are kept for the optimizer.

    fp32 weight -> bfloat16 parameter + int16 low half      4 bytes as before
                -> float16 parameter  + fp32 master         6 bytes

The low half and the master are in host memory. For a frozen parameter neither is kept: if it is thawed later, its
master starts from the 16-bit value.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from elixir_compile.errors import PlanMismatch, WrongDtype
from elixir_compile.ir import Plan
from elixir_compile.ops.masters import REST_DTYPES, add_master, has_master
from elixir_compile.ops.registry import Slot
from elixir_compile.ops.shards import is_dtensor, own_part
from elixir_compile.optim.host.flat_step import split
from elixir_compile.options import ParamDtype
from elixir_compile.runtime.distributed.ranks import Ranks
from elixir_compile.runtime.slab import Slab, flat, is_slab_memory

_BLOCK = 1 << 22
"""Elements that are split at once; the temporaries take 20 bytes each."""


def torch_dtype(name: ParamDtype) -> torch.dtype:
    """Return torch's dtype called `name`."""
    return {"bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def gets_master(param: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether a cast to `dtype` gives `param` a master: it is in fp32 or in `dtype`, and no tensor subclass."""
    return type(own_part(param.data)) is torch.Tensor and param.dtype in (torch.float32, dtype)


@torch.no_grad()
def cast(model: nn.Module, name: ParamDtype) -> None:
    """Cast every fp32 parameter of `model` to the dtype called `name`, and give it a master.

    DTensors are left alone: `shard_parameters` has cast them.
    """
    dtype = torch_dtype(name)
    for param in model.parameters():
        if not gets_master(param, dtype) or has_master(param) or is_dtensor(param):
            continue
        if param.dtype == dtype or param.numel() == 0:
            param.data = param.data.to(dtype)
            add_master(param, None)
        else:
            _cast(param, dtype)


def check_masters(slots: Iterable[Slot], name: ParamDtype) -> None:
    """Raise WrongDtype if a parameter of `slots` has no master, although `cast` to the dtype `name` would add one."""
    for slot in slots:
        if gets_master(slot.param, torch_dtype(name)) and not has_master(slot.param):
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


def _cast(param: nn.Parameter, dtype: torch.dtype) -> None:
    grad = param.grad
    high, rest = narrowed(param.detach(), dtype, keeps_rest=param.requires_grad)
    param.grad = None
    param.data = high
    param.grad = None if grad is None else grad.to(dtype)
    add_master(param, rest)


def narrowed(master: torch.Tensor, dtype: torch.dtype, *, keeps_rest: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the fp32 tensor `master` rounded to `dtype`, and the rest from which the optimizer restores `master`.

    The rest is the low half for bfloat16 and `master` itself for float16; None unless `keeps_rest`.
    """
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
