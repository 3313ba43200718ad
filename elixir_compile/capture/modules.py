"""Modules whose parameters read as gathers.

`swap` gives a module that directly owns parameters a subclass whose property `weight` is
`elixir::gather(handle, size, stride, key)` to a compiler, and to eager code the parameter itself where it is on the
compute device. The parameter stays in `_parameters`, so `state_dict`, `parameters()` and optimizers see what they
always see. A copy or a pickle of a swapped module is a plain module again.
"""

import copyreg
import weakref
from collections.abc import Mapping

import torch
from torch import nn

from elixir_compile import compat
from elixir_compile.ops.registry import Slot
from elixir_compile.ops.schema import GATHER
from elixir_compile.ops.shards import is_shared, own_part

_HANDLE = "_elixir_handle_"
_EXECUTOR = "_elixir_executor"

# Modules that read their parameters behind the attribute's back: flat weights, containers that index `_parameters`.
_READS_DIRECTLY = (nn.RNNBase, nn.ParameterList, nn.ParameterDict)


def whole_reason(module: nn.Module, name: str) -> str | None:
    """Say why parameter `name` of `module` cannot become a gather and stays whole on the device, or None when it
    can."""
    param = module._parameters[name]
    if isinstance(module, _READS_DIRECTLY):
        return f"{type(module).__name__} reads its parameters directly"
    if not (param.is_floating_point() or param.is_complex()):
        return f"{param.dtype} parameters carry no gradient"
    if type(param.data) is not torch.Tensor and not is_shared(param):
        return f"{type(param.data).__name__} is a tensor subclass"
    if param.numel() == 0 or not torch.ops.aten.is_non_overlapping_and_dense(own_part(param)):
        return "its elements are not dense in memory"
    if isinstance(getattr(type(module), name, None), property):
        return f"{type(module).__name__}.{name} is a property already"
    return None


def swap(module: nn.Module, slots: Mapping[str, Slot], executor: object) -> None:
    """Make the parameters of `module` named in `slots` read as gathers; the module keeps `executor` alive."""
    base = type(module)
    namespace: dict[str, object] = {name: _gathered(name, slot) for name, slot in slots.items()}
    namespace["__reduce_ex__"] = _reduce_as(base)
    namespace["__module__"] = base.__module__
    namespace["__doc__"] = base.__doc__
    for name, slot in slots.items():
        module.__dict__[_HANDLE + name] = slot.handle()
    module.__dict__[_EXECUTOR] = executor
    module.__class__ = type(base.__name__, (base,), namespace)


def is_swapped(module: nn.Module) -> bool:
    """Whether `swap` was applied to `module`."""
    return _EXECUTOR in module.__dict__


def executor_of(model: nn.Module) -> object | None:
    """Return the executor that prepared `model` or a part of it, or None."""
    for module in model.modules():
        if is_swapped(module):
            return module.__dict__[_EXECUTOR]
    return None


def _gathered(name: str, slot: Slot) -> property:
    attribute, key = _HANDLE + name, slot.key
    size, stride = list(slot.param.shape), list(slot.param.stride())
    # The graphs of compiled code name the classes of modules, and outlive the modules, which keep the executor and so
    # the slot.
    slot_while_alive = weakref.ref(slot)

    def read(module: nn.Module) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            slot = slot_while_alive()
            slot.follow_thaw()
            param = module._parameters[name]
            if param.device == slot.device and not slot.is_shared:
                return param  # eager code finds what it always finds, `.grad` included
        return GATHER(getattr(module, attribute), size, stride, key)

    # Called from code that Dynamo does not compile, it would become a graph of one gather, and the key a symbol.
    compat.never_compile_alone(read)
    return property(read)


def _reduce_as(base: type[nn.Module]):
    def reduce_ex(module: nn.Module, protocol: int):
        state = {k: v for k, v in module.__dict__.items() if not k.startswith(_HANDLE) and k != _EXECUTOR}
        # Not `copyreg.__newobj__`: pickle wants its class to be that of the object.
        return copyreg._reconstructor, (base, object, None), state

    return reduce_ex
