"""Where modules read parameters: make parameters read as gathers, undo it, find the models of parameters, replaced
parameters, and lost writes of eager code.
"""

import copyreg
import gc
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.nn.modules.module import register_module_buffer_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

from elixir_compile import compat
from elixir_compile.base.errors import StaleParameters, UnsupportedModel
from elixir_compile.graph.ops.gather import GATHER, Gate
from elixir_compile.graph.ops.optimizers import has_master
from elixir_compile.graph.ops.registry import Slot, slot_of
from elixir_compile.graph.ops.shards import DTensor, has_layout_of, is_dtensor, own_shard, rehome

# ----------------------------------------------------------------------------------------------------------------------
# Where modules read parameters: find replaced parameters of a prepared model, and lost writes of eager code.
#
# A graph reads parameters by key, so no guard of Dynamo fails after `module.weight = nn.Parameter(...)`. A site is an
# entry of `module._parameters` with its slot in graphs; `Sites.moved` compares them before each forward.
#
#     the new parameter has the form of the old         the slot takes it: graphs, buckets and plans stay as they are
#     any other change                                  the graphs are outdated: the step is captured again
#
# Eager code runs between the graphs of a model with graph breaks, and in evaluations. If the home of a parameter is the
# host, or if the parameter is sharded, eager code reads a copy of it on the device. An in-place write to the copy would
# be lost, while eager PyTorch would change the parameter.


@dataclass(frozen=True, slots=True)
class Site:
    """An entry of `_parameters` or `_buffers` of a module, and its slot in graphs."""

    tensors: dict[str, torch.Tensor | None]
    """The dictionary of the module that has the entry."""
    name: str
    slot: Slot
    module: "weakref.ref[nn.Module]"


@dataclass(slots=True)
class Sites:
    """The sites of an executor."""

    is_outdated: bool = False
    """Whether a module changed so much that graphs captured before must not run again."""
    _sites: list[Site] = field(default_factory=list)
    _num_of_slot: dict[int, int] = field(default_factory=dict)
    _replaced: str | None = None
    """The name of the last parameter that was replaced."""
    _replaced_before: int = 0
    """The number of the first forward after that replacement."""

    def add(self, module: nn.Module, name: str, slot: Slot) -> None:
        """Add the site of the parameter or buffer `name` of `module`, for which graphs read `slot`."""
        self._sites.append(Site(holder_of(module, name), name, slot, weakref.ref(module)))
        self._num_of_slot[slot.key] = self._num_of_slot.get(slot.key, 0) + 1

    def clear(self) -> None:
        """Forget all sites."""
        self._sites.clear()
        self._num_of_slot.clear()

    def modules(self) -> list[nn.Module]:
        """Return the live modules, each once."""
        found = (site.module() for site in self._sites)
        return list({id(module): module for module in found if module is not None}.values())

    def moved(self) -> list[Site]:
        """Return the sites whose parameter is not the parameter of the slot. It takes 60 ns for each site."""
        return [site for site in self._sites if site.tensors.get(site.name) is not site.slot.param]

    def may_take(self, slot: Slot, param: object) -> bool:
        """Return whether `slot` can take `param` in place of its parameter without another capture."""
        old = slot.param
        if not isinstance(param, torch.Tensor) or isinstance(param, nn.Parameter) is not isinstance(old, nn.Parameter):
            return False
        if type(param.data) is not type(old.data) or slot_of(param) is not None or self._num_of_slot[slot.key] > 1:
            return False
        return slot.fits(param) and has_layout_of(param, old) and has_master(param) == has_master(old)

    def take(self, sites: Iterable[Site], next_forward: int) -> Iterator[Slot]:
        """Make the slots of `sites` take the present parameters of the sites, and yield the slots.

        `may_take` must be True for each site.
        """
        for site in sites:
            site.slot.take(cast("torch.Tensor", site.tensors[site.name]))  # `may_take` refuses None
            self._replaced, self._replaced_before = site.slot.name, next_forward
            yield site.slot

    def check_forward(self, number: int) -> None:
        """Raise StaleParameters if a parameter was replaced between forward `number` and its backward.

        The gradient would go to the new parameter.
        """
        if self._replaced is not None and number < self._replaced_before:
            raise StaleParameters(self._replaced)


@dataclass(frozen=True, slots=True)
class _Read:
    name: str
    copy: "weakref.ref[torch.Tensor]"
    twin: torch.Tensor
    """An empty tensor that shares the version counter of the copy: it counts writes also after the copy is freed."""
    version: int


@dataclass(slots=True)
class EagerReads:
    """The copies of parameters that eager code may still write."""

    _reads: list[_Read] = field(default_factory=list)

    @torch.no_grad()
    def note(self, slot: Slot, copy: torch.Tensor) -> None:
        """Record that eager code reads `copy` for the parameter of `slot`.

        Raises UnsupportedModel if an earlier copy was written in place.
        """
        if compat.storage_key(copy) == compat.storage_key(slot.own):
            return
        self.check()
        twin = copy.detach()
        twin.data = torch.empty(0, dtype=copy.dtype, device=copy.device)
        self._reads.append(_Read(slot.name, weakref.ref(copy), twin, twin._version))

    def check(self) -> None:
        """Raise UnsupportedModel if a copy was written in place; forget freed copies."""
        written = next((read for read in self._reads if read.twin._version != read.version), None)
        if written is not None:
            self._reads.clear()
            raise UnsupportedModel(
                written.name,
                "eager code, outside of the compiled graphs, wrote in place to a copy of the parameter on the device, "
                "so the write is lost. Write to the parameter between two steps, by "
                f"`dict(model.named_parameters())[{written.name!r}]`",
            )
        self._reads = [read for read in self._reads if read.copy() is not None]


# ----------------------------------------------------------------------------------------------------------------------
# Make the parameters of modules read as gathers, undo it, and find the models of parameters.


def find_roots(params: Sequence[torch.Tensor]) -> list[nn.Module]:
    """Return the outermost modules in the process with any of `params`, parameters or buffers.

    A DistributedDataParallel counts as its module, so that parameters have the same names inside of it.
    """
    modules = [
        thing
        for thing in gc.get_objects()
        if issubclass(type(thing), nn.Module) and compat.undo_compile(thing) is thing
    ]
    children = {id(child) for module in modules for child in module.children()}
    wanted = {id(param) for param in params}
    outermost = [module for module in modules if id(module) not in children]
    roots = [module.module if isinstance(module, DistributedDataParallel) else module for module in outermost]
    return [root for root in roots if wanted & set(map(id, (*root.parameters(), *root.buffers())))]


_HANDLE = "_elixir_handle_"
_MODEL = "_elixir_model"
_SLOTS = "_elixir_slots"
"""The attribute of a swapped module with the slots of its parameters, by name.

The class does not hold the slots, because compiled code keeps the class alive."""
_SWAPPED = "_elixir_swapped"
"""The attribute of a class that `swap` made."""

# Modules that read parameters other than by attribute: from a list of flat weights, or by an index of `_parameters`.
_READS_DIRECTLY = (nn.RNNBase, nn.ParameterList, nn.ParameterDict)


class Owner(Protocol):
    """The interface of an executor for swapped modules."""

    device: torch.device
    sites: Sites
    eager_reads: EagerReads


class OwningModel(Protocol):
    """The interface of a managed model for its swapped modules."""

    @property
    def executor(self) -> Owner: ...


_LEAST_BUFFER_BYTES = 64 * 1024
"""Smaller buffers stay on the device: statistics, masks, tables of positions. Weights as buffers, such as those of GPTQ
and AWQ, are larger."""


def holder_of(module: nn.Module, name: str) -> dict[str, Any]:
    """Return the dictionary of `module` that has its parameter or buffer `name`: `_parameters` or `_buffers`."""
    return module._parameters if name in module._parameters else module._buffers


def movable(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return the parameters of `module` itself, and its buffers that are large enough for plans to move them, each with
    its name."""
    params = [(name, param) for name, param in module._parameters.items() if param is not None]
    buffers = [(name, buffer) for name, buffer in module._buffers.items() if buffer is not None]
    return [*params, *(found for found in buffers if found[1].nbytes >= _LEAST_BUFFER_BYTES)]


def unmanaged_reason(module: nn.Module, name: str) -> str | None:
    """Return why parameter or buffer `name` of `module` cannot become a gather and stays unmanaged; None if it can."""
    param = holder_of(module, name).get(name)
    if param is None:
        return "it is None"
    if isinstance(module, _READS_DIRECTLY):
        return f"{type(module).__name__} reads its parameters directly"
    if parametrize.is_parametrized(module):
        return f"{type(module).__name__} gets another class when its parametrization is removed"
    is_plain = type(param) in (torch.Tensor, nn.Parameter) or is_dtensor(param)
    if not (is_plain or param.is_floating_point() or param.is_complex()):
        return f"code reads attributes of a {type(param).__name__}, which a gathered copy of its values has not"
    if type(param.data) is not torch.Tensor and not is_dtensor(param):
        return f"{type(param.data).__name__} is a tensor subclass"
    if param.numel() == 0 or not torch.ops.aten.is_non_overlapping_and_dense(own_shard(param)):
        return "its elements are not dense in memory"
    if isinstance(getattr(type(module), name, None), property):
        return f"{type(module).__name__}.{name} is a property already"
    return None


def swap(module: nn.Module, slots: Mapping[str, Slot], model: OwningModel) -> None:
    """Make the parameters of `module` in `slots`, by name, read as gathers. The module keeps `model` alive."""
    base = type(module)
    namespace: dict[str, object] = {name: _gathered(name, slot) for name, slot in slots.items()}
    namespace |= _methods_over(base, has_dtensors=any(slot.is_dtensor for slot in slots.values()))
    namespace["__module__"] = base.__module__
    namespace["__doc__"] = base.__doc__
    namespace[_SWAPPED] = True
    for name, slot in slots.items():
        module.__dict__[_HANDLE + name] = slot.handle()
        model.executor.sites.add(module, name, slot)
    module.__dict__[_MODEL] = model
    module.__dict__[_SLOTS] = dict(slots)
    module.__class__ = _subclass((base,), namespace)


def read_plainly(module: nn.Module, names: Collection[str]) -> None:
    """Make the parameters `names` of a swapped module read as plain parameters again.

    The module gets a new class, so Dynamo captures its graphs again.
    """
    base = type(module).__bases__[0]
    namespace = {name: value for name, value in vars(type(module)).items() if name not in names}
    for name in names:
        module.__dict__.pop(_HANDLE + name, None)
        module.__dict__[_SLOTS].pop(name, None)
    module.__class__ = _subclass((base,), namespace)


def _subclass(bases: tuple[type, ...], namespace: dict[str, object]) -> type[nn.Module]:
    """Return a class with `bases`, of which the first is a class of modules, the name of the first, and `namespace`."""
    return cast("type[nn.Module]", type(bases[0].__name__, bases, namespace))


def is_swapped(module: nn.Module) -> bool:
    """Return whether `swap` was applied to `module`."""
    return _MODEL in module.__dict__


def gathered_names(module: nn.Module) -> Collection[str]:
    """Return the names of the parameters of `module` itself that read as gathers."""
    return module.__dict__.get(_SLOTS, {}).keys()


def is_swapped_for(module: nn.Module, model: OwningModel) -> bool:
    """Return whether the parameters of `module` itself read as gathers of `model`."""
    return module.__dict__.get(_MODEL) is model


def model_of(model: nn.Module) -> Any:
    """Return the managed model of `model` or of a prepared module in it; None if no module of it is prepared."""
    return next((module.__dict__[_MODEL] for module in model.modules() if is_swapped(module)), None)


def executor_of(model: nn.Module) -> Any:
    """Return the executor of `model` or of a prepared module in it; None if no module of it is prepared."""
    found = model_of(model)
    return None if found is None else found.executor


def undo_swap(module: nn.Module) -> None:
    """Give `module` its class from before `swap`. Its parameters stay on their devices."""
    swapped = _swapped_class(module)
    (base,) = swapped.__bases__
    if type(module) is swapped:
        module.__class__ = base
    else:  # a later class for this module alone, as the parametrization of a buffer makes
        child = next(kind for kind in type(module).__mro__ if swapped in kind.__bases__)
        child.__bases__ = tuple(base if kind is swapped else kind for kind in child.__bases__)
    for name in module.__dict__.pop(_SLOTS):
        del module.__dict__[_HANDLE + name]
    del module.__dict__[_MODEL]


def retire(sites: Sites) -> None:
    """Mark `sites` outdated: Dynamo captures each graph with them again before its next forward."""
    if sites.is_outdated:
        return
    sites.is_outdated = True
    for module in sites.modules():
        if is_swapped(module) and type(module) is _swapped_class(module):
            kind = type(module)
            module.__class__ = _subclass(kind.__bases__, dict(vars(kind)))


@torch.no_grad()
def _give_back(module: nn.Module) -> None:
    """Undo `swap` of `module`, move its parameters to the device, and have its graphs captured again."""
    executor: Owner = module.__dict__[_MODEL].executor
    slots: list[Slot] = list(module.__dict__[_SLOTS].values())
    undo_swap(module)
    for slot in slots:
        slot.sink.buckets.await_update(slot)
        if slot.own.device != executor.device:
            rehome(slot.param, slot.own.detach().to(executor.device))
    retire(executor.sites)


def _swapped_class(module: nn.Module) -> type:
    return next(kind for kind in type(module).__mro__ if _SWAPPED in vars(kind))


def _gathered(name: str, slot: Slot) -> property:
    attribute, key = _HANDLE + name, slot.key
    size, stride = list(slot.shape), list(slot.stride)
    axis = slot.sink.tensor_axis
    is_cut = axis is not None and slot.shard is not None and not slot.shard.is_plain
    # Dynamo traces `from_local` with these.
    mesh, placements = (
        (axis.mesh, (slot.shard.placement,)) if axis is not None and slot.shard is not None else (None, ())
    )
    whole, whole_stride = slot.param.shape, slot.param.stride()

    def read(module: nn.Module) -> torch.Tensor | None:
        if not torch.compiler.is_compiling():
            tensors = holder_of(module, name)
            if name not in tensors:
                raise AttributeError(name)  # then `nn.Module.__getattr__` looks for the name, and its error says so
            slot: Slot = module.__dict__[_SLOTS][name]
            param = tensors[name]
            if param is None:  # set by the user
                return None
            if param is not slot.param:  # replaced by the user, or by `torch.func.functional_call`
                return param if param.device == slot.device else param.to(slot.device)
            slot.follow_thaw()
            if param.device == slot.device and not slot.is_dtensor:
                return param  # eager code reads the parameter itself, `.grad` included
            owner: Owner = module.__dict__[_MODEL].executor
            gathered = _copy_for_eager_code(owner, slot, size, stride)  # pyright: ignore[reportCallIssue]  `disable`
        else:
            gathered = GATHER(getattr(module, attribute), size, stride, key)
        if not is_cut:
            return gathered
        return DTensor.from_local(gathered, mesh, placements, run_check=False, shape=whole, stride=whole_stride)

    def write(module: nn.Module, value: object) -> None:
        _give_back(module)
        setattr(module, name, value)

    # Called from code outside of Dynamo, `read` would be compiled to a graph of one gather, with a symbol as key.
    compat.never_compile_alone(read)
    return property(read, write)


@torch.compiler.disable  # between the graphs of a model with graph breaks, Dynamo would compile the gate
def _copy_for_eager_code(executor: Owner, slot: Slot, size: list[int], stride: list[int]) -> torch.Tensor:
    """Return a copy of the slot's parameter on the device, of `size` and `stride`.

    If gradients are on, autograd leads the gradient of the copy to the parameter. Within `torch.func.grad` or `vmap`
    the copy is what the parameter would be: a tensor from outside. Raises UnsupportedModel if eager code wrote to an
    earlier copy.
    """
    with compat.outside_transforms():
        if torch.is_grad_enabled() and slot.param.requires_grad:
            copy = GATHER(*Gate([slot]).handles(), size, stride, slot.key)
        else:
            with torch.inference_mode(False), torch.no_grad():  # a tensor of inference mode does not count writes
                copy = GATHER(slot.handles[0], size, stride, slot.key)
        executor.eager_reads.note(slot, copy)
    return copy


def _methods_over(base: type[nn.Module], *, has_dtensors: bool) -> dict[str, object]:
    """Return the methods of a swapped module in place of those of its class `base`, by name."""

    def register_parameter(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        """Register `param` as `nn.Module` does. If the captured graphs cannot read it, they are captured again."""
        if is_swapped(module):
            slot = module.__dict__[_SLOTS].get(name)
            if slot is None or not module.__dict__[_MODEL].executor.sites.may_take(slot, param):
                _give_back(module)
        base.register_parameter(module, name, param)

    def register_buffer(module: nn.Module, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None:
        """Register `tensor` as `nn.Module` does. If the captured graphs cannot read it, they are captured again."""
        if is_swapped(module):
            slot = module.__dict__[_SLOTS].get(name)
            if slot is not None and not module.__dict__[_MODEL].executor.sites.may_take(slot, tensor):
                _give_back(module)
        base.register_buffer(module, name, tensor, persistent)

    def move(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        """Apply `fn` as `nn.Module` does, as for `model.to(device)`, but not to a shard of a parameter whose dtype it
        keeps.

        The shard has a home. torch would swap the DTensor for another, which it refuses if an optimizer has it.
        """
        kept: dict[str, Any] = {}
        slots: dict[str, Slot] = module.__dict__.get(_SLOTS, {})
        for name, slot in slots.items():
            is_own = slot.is_dtensor and module._parameters.get(name) is slot.param
            if is_own and fn(slot.own.new_empty(0)).dtype == slot.param.dtype:
                kept[name], module._parameters[name] = slot.param, None
        try:
            return compat.apply_to_tensors(base, module, fn, recurse)
        finally:
            module._parameters.update(kept)

    def delete(module: nn.Module, name: str) -> None:
        if is_swapped(module) and name in module.__dict__[_SLOTS]:
            _give_back(module)
        base.__delattr__(module, name)

    def reduce_ex(module: nn.Module, protocol: int):
        own = (_MODEL, _SLOTS)
        state = {k: v for k, v in module.__dict__.items() if not k.startswith(_HANDLE) and k not in own}
        # Not `copyreg.__newobj__`: pickle requires that its class is the class of the object.
        return copyreg._reconstructor, (base, object, None), state  # pyright: ignore[reportAttributeAccessIssue]  (stubs)

    found: dict[str, object] = {
        "__reduce_ex__": reduce_ex, "register_buffer": register_buffer, "register_parameter": register_parameter
    }  # fmt: skip
    return {**found, "__delattr__": delete, **({"_apply": move} if has_dtensors else {})}


def _refuse_values(module: nn.Module, name: str, buffer: torch.Tensor | None) -> None:
    """Raise UnsupportedModel if `buffer` is a gathered copy of a parameter whose home is the host.

    Called when a module registers a buffer. `torch.nn.utils.parametrize` registers the value of `module.weight` as a
    buffer if it is no `Parameter`, and the parameter would not be trained any more.
    """
    if buffer is not None and buffer.grad_fn is not None and "elixir_gather" in buffer.grad_fn.name():
        because = "it would hold the values of a parameter that lives on the host, and the parameter would not be "
        raise UnsupportedModel(
            f"buffer {name} of {type(module).__name__}",
            because + "trained. Parametrize the model, or undo that, before it is prepared or compiled",
        )


register_module_buffer_registration_hook(_refuse_values)
