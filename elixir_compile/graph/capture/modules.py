"""Where modules read parameters: make parameters read as gathers, undo it, find the models of parameters, replaced
parameters, and lost writes of eager code.
"""

import copyreg
import gc
import operator
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
from elixir_compile.graph.ops.shards import (
    DTensor,
    has_layout_of,
    is_dtensor,
    is_wrapped,
    own_shard,
    parts_of,
    rehome,
)

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
class Entry:
    """What graphs gather for an entry of `_parameters` or `_buffers` of a module: itself, or the tensors inside of it.

    A tensor with others inside, such as codes and scales, has one slot for each of them. The module gets one like it,
    made of what was gathered.
    """

    slots: tuple[Slot, ...]
    wrapping: compat.Wrapping | None
    """How the entry is made of the tensors of `slots`; None if it is the tensor of its only slot."""

    @classmethod
    def of(cls, tensor: torch.Tensor, slots: Sequence[Slot]) -> "Entry":
        """Return the entry for `tensor`, whose parts have `slots`."""
        return cls(tuple(slots), compat.Wrapping.of(tensor) if is_wrapped(tensor) else None)

    def parts(self, tensor: object) -> Sequence[torch.Tensor]:
        """Return the tensors inside of `tensor` in the order of the slots, or itself; none if it is not made like the
        entry."""
        if not isinstance(tensor, torch.Tensor):
            return []
        is_alike = not is_wrapped(tensor) if self.wrapping is None else self.wrapping.makes(tensor)
        return list(parts_of(tensor).values()) if is_alike else []

    def is_in(self, tensor: torch.Tensor) -> bool:
        """Return whether the slots have the tensors inside of `tensor`, or `tensor` itself."""
        if self.wrapping is None:
            return tensor is self.slots[0].param
        found = self.parts(tensor)
        return bool(found) and all(map(operator.is_, found, (slot.param for slot in self.slots)))


@dataclass(slots=True)
class Site:
    """An entry of `_parameters` or `_buffers` of a module, and one of its slots in graphs."""

    tensors: dict[str, torch.Tensor | None]
    """The dictionary of the module that has the entry."""
    name: str
    entry: Entry
    place: int
    """The place of the slot in the entry."""
    outer: torch.Tensor | None
    """The tensor that was there when the slot took the part in it; None if the entry has no parts."""
    part_of: Callable[[Any], object]
    """Returns the part of a tensor made like `outer`; `AttributeError` from others."""
    module: "weakref.ref[nn.Module]"

    @property
    def slot(self) -> Slot:
        """The slot that graphs read here, of the whole tensor or of one tensor inside of it."""
        return self.entry.slots[self.place]

    def found(self) -> torch.Tensor | None:
        """Return the tensor that is there for the slot now; None if the entry is gone or made in another way.

        Raises UnsupportedModel if a part is inside of a tensor that is trained now: no gradient reaches the part.
        """
        value = self.tensors.get(self.name)
        if self.outer is None or value is None:
            return value
        if value.requires_grad:
            because = (
                f"it is inside of a {type(value).__name__} that requires a gradient since the model was prepared, and "
                "its gathers have none. Call `requires_grad_()` before the model is prepared or compiled, then the "
                f"{type(value).__name__} stays on the device; or leave that frozen and train an adapter beside it"
            )
            raise UnsupportedModel(self.slot.name, because)
        if value is self.outer:  # as before each forward: 1 us, and 40 us or more to take all of it apart
            own = self.entry.slots[self.place].param
            try:
                if self.part_of(value) is own:
                    return own
            except AttributeError:  # `torch.utils.swap_tensors` made it a tensor of another class
                pass
        parts = self.entry.parts(value)
        return parts[self.place] if parts else None


@dataclass(slots=True)
class Sites:
    """The sites of an executor."""

    is_outdated: bool = False
    """Whether a module changed so much that graphs captured before must not run again."""
    _sites: list[Site] = field(default_factory=list)
    _inside: list[Site] = field(default_factory=list)
    """The sites whose slots are of tensors inside of others."""
    _num_of_slot: dict[int, int] = field(default_factory=dict)
    _replaced: str | None = None
    """The name of the last parameter that was replaced."""
    _replaced_before: int = 0
    """The number of the first forward after that replacement."""

    def add(self, module: nn.Module, name: str, entry: Entry) -> None:
        """Add the sites of the parameter or buffer `name` of `module`, for which graphs read the slots of `entry`."""
        tensors, reference = holder_of(module, name), weakref.ref(module)
        outer = None if entry.wrapping is None else tensors[name]
        paths = [""] if outer is None else list(parts_of(outer))
        for place, (slot, path) in enumerate(zip(entry.slots, paths, strict=True)):
            part_of = operator.attrgetter(path) if path else lambda outer: outer
            site = Site(tensors, name, entry, place, outer, part_of, reference)
            (self._sites if outer is None else self._inside).append(site)
            self._num_of_slot[slot.key] = self._num_of_slot.get(slot.key, 0) + 1

    def clear(self) -> None:
        """Forget all sites."""
        self._sites.clear()
        self._inside.clear()
        self._num_of_slot.clear()

    def modules(self) -> list[nn.Module]:
        """Return the live modules, each once."""
        found = (site.module() for site in (*self._sites, *self._inside))
        return list({id(module): module for module in found if module is not None}.values())

    def moved(self) -> list[Site]:
        """Return the sites whose parameter is not the parameter of the slot; raises UnsupportedModel as `Site.found`.

        It takes 60 ns for each site that is not inside of another tensor.
        """
        moved = [site for site in self._sites if site.tensors.get(site.name) is not site.entry.slots[0].param]
        with torch.DisableTorchFunctionSubclass():
            return moved + [site for site in self._inside if site.found() is not site.slot.param]

    def may_take(self, slot: Slot, param: object) -> bool:
        """Return whether `slot` can take `param` in place of its parameter without another capture."""
        old = slot.param
        if param is old:  # inside of a new tensor
            return True
        if not isinstance(param, torch.Tensor) or isinstance(param, nn.Parameter) is not isinstance(old, nn.Parameter):
            return False
        if type(param.data) is not type(old.data) or slot_of(param) is not None or self._num_of_slot[slot.key] > 1:
            return False
        return slot.fits(param) and has_layout_of(param, old) and has_master(param) == has_master(old)

    def may_replace(self, entry: Entry | None, tensor: object) -> bool:
        """Return whether the slots of `entry` can take `tensor` in place of it without another capture."""
        parts = () if entry is None else entry.parts(tensor)
        if entry is None or not parts or (entry.wrapping is not None and cast("torch.Tensor", tensor).requires_grad):
            return False
        return all(map(self.may_take, entry.slots, parts))

    def take(self, sites: Iterable[Site], next_forward: int) -> Iterator[Slot]:
        """Make the slots of `sites` take the present parameters of the sites, and yield the slots.

        `may_take` must be True for each site.
        """
        for site in sites:
            site.slot.take(cast("torch.Tensor", site.found()))  # `may_take` refuses None
            site.outer = None if site.outer is None else site.tensors[site.name]
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
    """Return the outermost modules in the process with any of `params`, parameters or buffers, or tensors inside.

    A DistributedDataParallel counts as its module, so that parameters have the same names inside of it.
    """
    modules = [
        thing
        for thing in gc.get_objects()
        if issubclass(type(thing), nn.Module) and compat.undo_compile(thing) is thing
    ]
    children = {id(child) for module in modules for child in module.children()}
    wanted = {id(part) for param in params for part in parts_of(param).values()}
    outermost = [module for module in modules if id(module) not in children]
    roots = [module.module if isinstance(module, DistributedDataParallel) else module for module in outermost]
    return [root for root in roots if any(reads_any(module, wanted) for module in root.modules())]


def reads_any(module: nn.Module, wanted: Collection[int]) -> list[str]:
    """Return the names of the parameters and buffers of `module` itself whose ids, or those of tensors inside, are
    `wanted`."""
    own = [*module._parameters.items(), *module._buffers.items()]
    return [
        name
        for name, tensor in own
        if tensor is not None and any(id(part) in wanted for part in parts_of(tensor).values())
    ]


_HANDLE = "_elixir_handle_"
_MODEL = "_elixir_model"
_ENTRIES = "_elixir_entries"
"""The attribute of a swapped module with the entries of its parameters, by name.

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
    if isinstance(getattr(type(module), name, None), property):
        return f"{type(module).__name__}.{name} is a property already"
    if is_wrapped(param):
        return _reason_inside(param)
    is_plain = type(param) in (torch.Tensor, nn.Parameter) or is_dtensor(param)
    if not (is_plain or param.is_floating_point() or param.is_complex()):
        return f"code reads attributes of a {type(param).__name__}, which a gathered copy of its values has not"
    if type(param.data) is not torch.Tensor and not is_dtensor(param):
        return f"{type(param.data).__name__} is a tensor subclass without `__tensor_flatten__`"
    return _NOT_DENSE if _has_gaps(param) else None


_NOT_DENSE = "its elements are not dense in memory"


def _has_gaps(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is empty or its elements have gaps; a rank may own none of them."""
    return tensor.numel() == 0 or not torch.ops.aten.is_non_overlapping_and_dense(own_shard(tensor))


def _reason_inside(param: torch.Tensor) -> str | None:
    """Return why the tensors inside of `param` cannot become gathers; None if they can, and make a tensor like it."""
    kind = type(param).__name__
    if param.requires_grad:
        return f"a {kind} that is trained would need a gradient of its own class"
    wrapping, parts = compat.Wrapping.of(param), list(parts_of(param).values())
    if any((type(part) is not torch.Tensor and part is not param) or part.is_meta or _has_gaps(part) for part in parts):
        return f"a tensor inside of a {kind} is not plain and dense in memory"
    if any(part is not again for part, again in zip(parts, parts_of(param).values(), strict=True)):
        return f"a {kind} makes new tensors whenever it is taken apart"
    with torch.no_grad():
        made = param if wrapping is None else wrapping.around(iter(parts))
    keeps_memory = [*map(compat.storage_key, parts)] == [*map(compat.storage_key, parts_of(made).values())]
    if wrapping is None or not (wrapping.makes(made) and keeps_memory):
        return f"a {kind} that is taken apart and made again is another one"
    return None


def swap(module: nn.Module, entries: Mapping[str, Entry], model: OwningModel) -> None:
    """Make the parameters of `module` in `entries`, by name, read as gathers. The module keeps `model` alive."""
    base = type(module)
    namespace: dict[str, object] = {name: _gathered(module, name, entry) for name, entry in entries.items()}
    namespace |= _methods_over(base, keeps=any(map(_keeps_itself, entries.values())))
    namespace["__module__"] = base.__module__
    namespace["__doc__"] = base.__doc__
    namespace[_SWAPPED] = True
    for name, entry in entries.items():
        for attribute, slot in zip(_handle_names(name, entry), entry.slots, strict=True):
            module.__dict__[attribute] = slot.handle()
        model.executor.sites.add(module, name, entry)
    module.__dict__[_MODEL] = model
    module.__dict__[_ENTRIES] = dict(entries)
    module.__class__ = _subclass((base,), namespace)


def _handle_names(name: str, entry: Entry) -> list[str]:
    """Return the attributes of the module for the handles of its entry `name`."""
    return [f"{_HANDLE}{place}_{name}" if place else _HANDLE + name for place in range(len(entry.slots))]


def read_plainly(module: nn.Module, names: Collection[str]) -> None:
    """Make the parameters `names` of a swapped module read as plain parameters again.

    The module gets a new class, so Dynamo captures its graphs again.
    """
    base = type(module).__bases__[0]
    namespace = {name: value for name, value in vars(type(module)).items() if name not in names}
    for name in names:
        entry = module.__dict__[_ENTRIES].pop(name, None)
        for attribute in () if entry is None else _handle_names(name, entry):
            module.__dict__.pop(attribute, None)
    module.__class__ = _subclass((base,), namespace)


def _subclass(bases: tuple[type, ...], namespace: dict[str, object]) -> type[nn.Module]:
    """Return a class with `bases`, of which the first is a class of modules, the name of the first, and `namespace`."""
    return cast("type[nn.Module]", type(bases[0].__name__, bases, namespace))


def is_swapped(module: nn.Module) -> bool:
    """Return whether `swap` was applied to `module`."""
    return _MODEL in module.__dict__


def gathered_names(module: nn.Module) -> Collection[str]:
    """Return the names of the parameters of `module` itself that read as gathers."""
    return module.__dict__.get(_ENTRIES, {}).keys()


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
    for name, entry in module.__dict__.pop(_ENTRIES).items():
        for attribute in _handle_names(name, entry):
            del module.__dict__[attribute]
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
    slots = [slot for entry in module.__dict__[_ENTRIES].values() for slot in entry.slots]
    undo_swap(module)
    for slot in slots:
        slot.sink.buckets.await_update(slot)
        if slot.own.device != executor.device:
            rehome(slot.param, slot.own.detach().to(executor.device))
    retire(executor.sites)


def _swapped_class(module: nn.Module) -> type:
    return next(kind for kind in type(module).__mro__ if _SWAPPED in vars(kind))


def _gathered(module: nn.Module, name: str, entry: Entry) -> property:
    """Return the property that reads the entry `name` of `module` as gathers.

    It holds no slot and no tensor, because compiled code keeps the class alive.
    """
    reads = [
        (attribute, list(slot.shape), list(slot.stride), slot.key)
        for attribute, slot in zip(_handle_names(name, entry), entry.slots, strict=True)
    ]
    as_entry = _maker(holder_of(module, name)[name], entry)

    def read(module: nn.Module) -> torch.Tensor | None:
        if not torch.compiler.is_compiling():
            tensors = holder_of(module, name)
            if name not in tensors:
                raise AttributeError(name)  # then `nn.Module.__getattr__` looks for the name, and its error says so
            entry: Entry = module.__dict__[_ENTRIES][name]
            param = tensors[name]
            if param is None:  # set by the user
                return None
            slots = entry.slots
            if not entry.is_in(param):  # replaced by the user, or by `torch.func.functional_call`
                return param if param.device == slots[0].device else param.to(slots[0].device)
            for slot in slots:
                slot.follow_thaw()
            if not slots[0].is_dtensor and all(slot.param.device == slot.device for slot in slots):
                return param  # eager code reads the parameter itself, `.grad` included
            owner: Owner = module.__dict__[_MODEL].executor
            return _copy_for_eager_code(owner, slots, as_entry)  # pyright: ignore[reportCallIssue]  `disable`
        gathered = [GATHER(getattr(module, attribute), size, stride, key) for attribute, size, stride, key in reads]
        return gathered[0] if as_entry is None else as_entry(*gathered)

    def write(module: nn.Module, value: object) -> None:
        _give_back(module)
        setattr(module, name, value)

    # Called from code outside of Dynamo, `read` would be compiled to a graph of one gather, with a symbol as key.
    compat.never_compile_alone(read)
    return property(read, write)


def _maker(tensor: torch.Tensor, entry: Entry) -> Callable[..., torch.Tensor] | None:
    """Return the function that makes a tensor like `tensor` of what was gathered for the slots of its `entry`; None if
    that is the tensor."""
    slot, wrapping = entry.slots[0], entry.wrapping
    axis = slot.sink.tensor_axis
    if wrapping is not None:

        def wrapped(*parts: torch.Tensor) -> torch.Tensor:
            return wrapping.around(iter(parts))

        if compat.is_in_4_bits(tensor):
            context = wrapping.context

            def read_in_a_trace(*parts: torch.Tensor) -> Any:
                return compat.In4Bits(context, *parts) if torch.compiler.is_compiling() else wrapped(*parts)

            return read_in_a_trace
        # Not traced by Dynamo, which leaves constructors of some classes out of its graph. AOTAutograd traces it.
        made: Any = torch.compiler.allow_in_graph(wrapped)
        return made
    if axis is None or slot.shard is None or slot.shard.is_plain:
        return None
    # Dynamo traces `from_local` with these.
    mesh, placements, shape, stride = axis.mesh, (slot.shard.placement,), tensor.shape, tensor.stride()
    return lambda own: DTensor.from_local(own, mesh, placements, run_check=False, shape=shape, stride=stride)


@torch.compiler.disable  # between the graphs of a model with graph breaks, Dynamo would compile the gate
def _copy_for_eager_code(
    executor: Owner, slots: Sequence[Slot], as_entry: Callable[..., torch.Tensor] | None
) -> torch.Tensor:
    """Return a copy of the parameter of `slots` on the device, made by `as_entry` if it is not that of the only slot.

    If gradients are on, autograd leads the gradient of the copy to the parameter. Within `torch.func.grad` or `vmap`
    the copy is what the parameter would be: a tensor from outside. Raises UnsupportedModel if eager code wrote to an
    earlier copy.
    """
    copies: list[torch.Tensor] = []
    for slot in slots:
        size, stride = list(slot.shape), list(slot.stride)
        with compat.outside_transforms():
            if torch.is_grad_enabled() and slot.param.requires_grad:
                copy = GATHER(*Gate([slot]).handles(), size, stride, slot.key)
            else:
                with torch.inference_mode(False), torch.no_grad():  # a tensor of inference mode does not count writes
                    copy = GATHER(slot.handles[0], size, stride, slot.key)
            executor.eager_reads.note(slot, copy)
        copies.append(copy)
    return copies[0] if as_entry is None else as_entry(*copies)


def _keeps_itself(entry: Entry) -> bool:
    """Return whether `model.to` leaves `entry` as it is: a DTensor, or a tensor with others inside.

    Its parts have homes. torch would swap it for another tensor, which torch refuses if an optimizer or a compiled
    graph has it.
    """
    return entry.wrapping is not None or entry.slots[0].is_dtensor


def _methods_over(base: type[nn.Module], *, keeps: bool) -> dict[str, object]:
    """Return the methods of a swapped module in place of those of its class `base`, by name; `keeps` if any of its
    entries keeps itself."""

    def register_parameter(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        """Register `param` as `nn.Module` does. If the captured graphs cannot read it, they are captured again."""
        if is_swapped(module):
            entry = module.__dict__[_ENTRIES].get(name)
            if not module.__dict__[_MODEL].executor.sites.may_replace(entry, param):
                _give_back(module)
        base.register_parameter(module, name, param)

    def register_buffer(module: nn.Module, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None:
        """Register `tensor` as `nn.Module` does. If the captured graphs cannot read it, they are captured again."""
        if is_swapped(module):
            entry = module.__dict__[_ENTRIES].get(name)
            if entry is not None and not module.__dict__[_MODEL].executor.sites.may_replace(entry, tensor):
                _give_back(module)
        base.register_buffer(module, name, tensor, persistent)

    def move(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        """Apply `fn` as `nn.Module` does, as for `model.to(device)`, but not to what keeps itself, if its dtype stays.

        Raises UnsupportedModel if a tensor with others inside would get another dtype.
        """
        kept: dict[str, Any] = {}
        entries: dict[str, Entry] = module.__dict__.get(_ENTRIES, {})
        for name, entry in entries.items():
            there, slot = module._parameters.get(name), entry.slots[0]
            if there is None or not (_keeps_itself(entry) and entry.is_in(there)):
                continue
            if fn(torch.empty(0, dtype=there.dtype, device=slot.own.device)).dtype == there.dtype:
                kept[name] = there
            elif entry.wrapping is not None:
                because = f"it is inside of a {type(there).__name__} whose dtype, {there.dtype}, cannot change any more"
                raise UnsupportedModel(slot.name, f"{because}. Cast the model first, then prepare or compile it")
        try:
            module._parameters.update(dict.fromkeys(kept))
            return compat.apply_to_tensors(base, module, fn, recurse)
        finally:
            module._parameters.update(kept)

    def delete(module: nn.Module, name: str) -> None:
        if is_swapped(module) and name in module.__dict__[_ENTRIES]:
            _give_back(module)
        base.__delattr__(module, name)

    def reduce_ex(module: nn.Module, protocol: int):
        own = (_MODEL, _ENTRIES)
        state = {k: v for k, v in module.__dict__.items() if not k.startswith(_HANDLE) and k not in own}
        # Not `copyreg.__newobj__`: pickle requires that its class is the class of the object.
        return copyreg._reconstructor, (base, object, None), state  # pyright: ignore[reportAttributeAccessIssue]  (stubs)

    found: dict[str, object] = {
        "__reduce_ex__": reduce_ex, "register_buffer": register_buffer, "register_parameter": register_parameter
    }  # fmt: skip
    return {**found, "__delattr__": delete, **({"_apply": move} if keeps else {})}


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
