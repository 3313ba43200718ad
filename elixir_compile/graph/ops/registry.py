"""Find the slot of a parameter, by its key in captured graphs or by the `Parameter` itself, and the parameters whose
memory other tensors share.
"""

import contextlib
import gc
import itertools
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import nn

from elixir_compile import compat
from elixir_compile.base.errors import NotPrepared, UnsupportedModel
from elixir_compile.base.process import Living
from elixir_compile.graph.ops.shards import (
    TensorAxis,
    TensorShard,
    full_tensor,
    is_dtensor,
    is_over_data,
    is_sharded,
    own_shard,
    version,
)

# ----------------------------------------------------------------------------------------------------------------------
# Find the slot of a parameter, by its key in captured graphs or by the `Parameter` itself.
#
# A slot connects a parameter of a prepared model with its executor. The maps hold slots weakly: a slot lives as long as
# its executor, and the executor as long as its prepared modules.


class GradientSink(Protocol):
    """The receiver of the gradients of an executor's parameters."""

    sentinel: torch.Tensor
    """A leaf to which all gates of the executor lead, and which the user never has.

    Autograd runs its accumulate node only in a backward for the gradients of all leaves."""

    def accumulate(self, slot: "Slot", grad: torch.Tensor) -> None:
        """Add `grad` to the gradient of the slot's parameter if this backward computes it."""
        ...

    def reach(self, slot: "Slot") -> None:
        """Note that a backward has reached the parameter of `slot` in eager code, with or without a gradient for it."""
        ...

    def hand_over(self, slots: "Sequence[Slot | None]") -> "Sequence[torch.Tensor | None]":
        """Return for each of `slots` the gradient that autograd itself takes in this backward, or None."""
        ...


class SlotBuckets(Protocol):
    """The interface of the buckets in force for slots."""

    generation: int
    """A number that grows if parameters move."""

    def await_update(self, slot: "Slot") -> None:
        """Wait for a queued update of the slot's bucket; then its parameters can be read."""
        ...


class SlotOwner(Protocol):
    """The interface of an executor for slots: it gathers their parameters, and takes their gradients.

    The prepared model that owns the executor is unknown here; it is found from the modules that read the parameter.
    """

    @property
    def buckets(self) -> SlotBuckets:
        """The buckets in force, with the homes of the executor's parameters."""
        ...

    @property
    def gradients(self) -> GradientSink:
        """Takes the gradients of the executor's parameters."""
        ...

    @property
    def tensor_axis(self) -> TensorAxis | None:
        """The tensor axis of the model; None if no parameter is cut along one."""
        ...

    def require_whole_step(self) -> None:
        """Raise IncompleteStep if the model is called several times in each step, and the last backward is not done."""
        ...

    def check_same_op(self, slot: "Slot") -> None:
        """Wait until all ranks are about to gather the slot's parameter. Raises RanksDiffer if a rank is not."""
        ...


class Slot:
    """The place of a parameter of a prepared model, or of a large buffer of it that no graph writes, which is a frozen
    parameter to all that follows, with its handles, its autograd node and its executor.

    It has more than 20 methods: each is a question about the parameter, asked by another room.
    """

    __slots__ = (
        "__weakref__",
        "_handles",
        "_made_as",
        "_node",
        "_reducers",
        "device",
        "is_updated_in_file",
        "key",
        "name",
        "param",
        "shard",
        "sink",
    )

    def __init__(self, key: int, name: str, param: torch.Tensor, device: torch.device, sink: SlotOwner) -> None:
        self.key = key
        self.name = name
        self.param = param
        self.device = device
        self.sink = sink
        self.shard: TensorShard | None = None if sink.tensor_axis is None else sink.tensor_axis.shard_along(param)
        """The shard of the parameter along the tensor axis, which a gather returns; None if it has no such axis."""
        self.is_updated_in_file = False
        """Whether the home of the parameter, which is trained, is a file: hybrid updates write it there."""
        self._handles: list[torch.Tensor] = []
        self._made_as = _form(param)
        self._node: compat.AccumulateNode | None = None
        self._reducers: Living[object] | None = None
        """The DistributedDataParallel modules that reduce the gradient; None if there never was one."""

    def check_form(self) -> None:
        """Raise UnsupportedModel if dtype, shape or strides of the parameter changed, as by `model.half()`."""
        if _form(self.param) != self._made_as:
            raise UnsupportedModel(
                self.name,
                f"it was {_words(self._made_as)} when Elixir took charge of it and is {_words(_form(self.param))} now. "
                "Cast or resize the model first, then prepare or compile it",
            )

    def fits(self, param: torch.Tensor) -> bool:
        """Return whether `param` has the dtype, shape and strides for which graphs were captured."""
        return _form(param) == self._made_as

    def take(self, param: torch.Tensor) -> None:
        """Replace the parameter of the slot by `param`, of the same dtype, shape and strides."""
        is_known = slot_of(self.param) is self
        forget(self)
        self.param = param
        if is_known:
            _BY_PARAM[id(param)] = self

    @property
    def shape(self) -> torch.Size:
        """The shape of the gathered parameter: of its shard along the tensor axis, or of the full parameter."""
        return self.param.shape if self.shard is None else self.shard.shape

    @property
    def stride(self) -> tuple[int, ...]:
        """The strides of the gathered parameter."""
        return self.param.stride() if self.shard is None else self.shard.stride

    @property
    def numel(self) -> int:
        """The number of elements of the gathered parameter."""
        return self.shape.numel()

    @property
    def nbytes(self) -> int:
        """Bytes of the gathered parameter."""
        return self.numel * self.param.element_size()

    @property
    def own(self) -> torch.Tensor:
        """The shard of this rank as a plain tensor, or the parameter itself if it is no DTensor."""
        return own_shard(self.param)

    @property
    def own_nbytes(self) -> int:
        """Bytes of the shard of this rank."""
        return self.own.numel() * self.param.element_size()

    @property
    def is_dtensor(self) -> bool:
        """Whether the parameter is a DTensor, sharded or replicated."""
        return is_dtensor(self.param)

    @property
    def version(self) -> int:
        """A number that grows with each write to the parameter."""
        return version(self.param)

    def gather(self) -> torch.Tensor:
        """Return the gathered parameter on the compute device, detached.

        The result is an alias of a parameter on the device if it is not sharded. If it is sharded, all ranks must call
        this together. Raises RanksDiffer if a rank does another op.
        """
        if is_sharded(self.param) if self.shard is None else is_over_data(self.param):
            self.sink.check_same_op(self)
        self.sink.buckets.await_update(self)
        if self.shard is not None and self.sink.tensor_axis is not None:
            return self.sink.tensor_axis.gathered(self.param, self.shard, self.device)
        # Autograd makes the result a node of its graph; a model whose local tensor is such a node cannot be copied.
        return full_tensor(self.param, self.device).detach()

    def handle(self) -> torch.Tensor:
        """Make a handle: a leaf with a single element, in place of the parameter in captured graphs."""
        requires_grad = self.param.requires_grad
        handle = torch.zeros(1, dtype=self.param.dtype, device=self.device, requires_grad=requires_grad)
        self._handles.append(handle)
        if requires_grad:
            self._watch(handle)
        return handle

    def _watch(self, handle: torch.Tensor) -> None:
        """Let the sink know of each backward that has a gradient for `handle`, after all gathers that read it.

        Compiled graphs read handles of a gate in its place. Only functions of torch that run graphs, as `cond` does in
        eager code, and graphs of other backends read it. For the parameters of a branch that was not taken torch makes
        zeros, but no gradient for those whose results a graph does not use.
        """
        reference = weakref.ref(self)

        def reached(grad: torch.Tensor | None) -> None:
            slot = reference()
            if slot is not None and grad is not None:
                slot.sink.gradients.reach(slot)

        handle.register_hook(torch.utils.hooks.unserializable_hook(reached))

    def find_node(self) -> None:
        """Look up the node that accumulates the gradient of the parameter. It must require a gradient.

        torch makes a new node if the parameter moves to another device.
        """
        self.forget_node()  # the old `AccumulateNode` holds a reference, which the new `AccumulateNode` would count
        self._node = compat.AccumulateNode(self.param)

    def forget_node(self) -> None:
        """Drop the reference to the autograd node."""
        self._node = None

    @property
    def has_hooks(self) -> bool:
        """Whether the user registered a hook on the gradient of the parameter, or may have on its autograd node."""
        return compat.has_gradient_hooks(self.param) or self.has_node_holders

    @property
    def is_reduced(self) -> bool:
        """Whether a DistributedDataParallel reduces the gradient: its hook on the autograd node is unseen by Python.

        With the module the hook goes.
        """
        return self._reducers is not None and bool(self._reducers)

    def note_reducer(self, ddp: object) -> None:
        """Note that the DistributedDataParallel `ddp` reduces the gradient."""
        if self._reducers is None:
            self._reducers = Living()
        self._reducers.add(ddp)

    @property
    def has_node_holders(self) -> bool:
        """Whether other code holds the autograd node of the parameter, which a hook on the node requires."""
        return self.is_reduced or (self._node is not None and self._node.is_held_by_others)

    @property
    def handles(self) -> Sequence[torch.Tensor]:
        """All handles of the parameter, in the order in which they were made."""
        return self._handles

    def follow_thaw(self) -> bool:
        """If the parameter requires a gradient, set `requires_grad` of all handles; return whether any handle changed.

        If a parameter was frozen instead, graphs still compute its gradient, which is dropped, so nothing changes.
        """
        if not self.param.requires_grad:
            return False
        stale = [handle for handle in self._handles if not handle.requires_grad]
        for handle in stale:
            self._watch(handle.requires_grad_())
        return bool(stale)


_Form = tuple[torch.dtype, torch.Size, tuple[int, ...]]


def _form(param: torch.Tensor) -> _Form:
    return param.dtype, param.shape, param.stride()


def _words(form: _Form) -> str:
    dtype, shape, stride = form
    return f"{dtype} of shape {tuple(shape)} and strides {stride}"


_KEYS = itertools.count()
_BY_KEY: "weakref.WeakValueDictionary[int, Slot]" = weakref.WeakValueDictionary()
_BY_PARAM: "weakref.WeakValueDictionary[int, Slot]" = weakref.WeakValueDictionary()
"""Slots by the id of the parameter, which the slot keeps alive. Each step looks up all parameters, in a third of the
time of a `WeakTensorKeyDictionary`."""


def new_slot(name: str, param: torch.Tensor, device: torch.device, sink: SlotOwner) -> Slot:
    """Make the slot of `param` and add it to the registry."""
    slot = Slot(next(_KEYS), name, param, device, sink)
    _BY_KEY[slot.key] = slot
    _BY_PARAM[id(param)] = slot
    return slot


def num_slots() -> int:
    """Return the number of slots in the process."""
    return len(_BY_KEY)


def slot_by_key(key: int) -> Slot:
    """Return the slot with `key`. Raises NotPrepared if its model was freed."""
    slot = _BY_KEY.get(key)
    if slot is None:
        raise NotPrepared(f"parameter {key} belongs to a model that no longer exists; compile the model again")
    return slot


def slot_of(param: torch.Tensor) -> Slot | None:
    """Return the slot of `param`, None if no prepared model has the parameter."""
    slot = _BY_PARAM.get(id(param))
    return slot if slot is not None and slot.param is param else None


def gathered_numel(param: torch.Tensor) -> int:
    """Return the number of elements of `param` that a gather returns: of its shard along a tensor axis, if it has one,
    or all."""
    slot = slot_of(param)
    return param.numel() if slot is None else slot.numel


def forget(slot: Slot) -> None:
    """Remove the slot of its parameter. Graphs captured before still find `slot` by its key."""
    slot.forget_node()
    if slot_of(slot.param) is slot:
        del _BY_PARAM[id(slot.param)]


def follow_all_thaws() -> None:
    """Call `follow_thaw` on all slots of the process. Runs before each capture."""
    for slot in list(_BY_KEY.values()):
        slot.follow_thaw()


# ----------------------------------------------------------------------------------------------------------------------
# Find tensors with shared memory, which must not be moved one by one, as after `head.weight.data = embed.weight.data`.
#
# Views of one storage that do not overlap may move, unless another object holds the storage: the flat buffer of apex,
# or `vector = parameters_to_vector(...)`. A parameter of another model may share the memory too:
# `student.load_state_dict(teacher.state_dict(), assign=True)`.


Named = tuple[str, torch.Tensor]


def aliases(named: Iterable[Named]) -> dict[str, str]:
    """Return the names of tensors that must move together, each with the name of a tensor in the same memory.

    Tensors on `meta` and DTensors are left out.
    """
    with torch.DisableTorchFunctionSubclass():  # reads no value, so it need not wait for a queued update
        groups = _by_storage(named)
        found: dict[str, str] = {}
        for group in groups.values():
            if len(group) > 1:
                found |= _bound_together(group)
        held = {key: {id(tensor) for _, tensor in group} for key, group in groups.items() if _has_other_holders(group)}
        for key in _storages_of_other_parameters(held):
            found |= {name: "a parameter of another model" for name, _ in groups[key]}
    return found


def held_by_others(named: Iterable[Named]) -> list[str]:
    """Return the names of the tensors that share memory with a tensor outside of `named`."""
    with torch.DisableTorchFunctionSubclass():
        groups = _by_storage(named).values()
        return [name for group in groups if _has_other_holders(group) for name, _ in group]


def _by_storage(named: Iterable[Named]) -> dict[int, list[Named]]:
    """Return the tensors by the key of their storage, each tensor once."""
    groups: dict[int, dict[int, Named]] = {}
    for name, tensor in named:
        if not (tensor.is_meta or is_dtensor(tensor)) and tensor.numel():
            groups.setdefault(compat.storage_key(tensor), {})[id(tensor)] = (name, tensor)
    return {key: list(group.values()) for key, group in groups.items()}


def _has_other_holders(group: Sequence[Named]) -> bool:
    return compat.num_holders(group[0][1].untyped_storage()) > len(group)


def _storages_of_other_parameters(held: Mapping[int, Collection[int]]) -> set[int]:
    """Return the keys of the storages in `held` that another parameter of the process uses.

    `held` has the ids of the known tensors of each storage.
    """

    def found() -> set[int]:
        keys: set[int] = set()
        for other in gc.get_objects():
            if issubclass(type(other), nn.Parameter) and not (other.is_meta or is_dtensor(other)):
                with contextlib.suppress(RuntimeError):  # a tensor subclass without memory of its own
                    key = compat.storage_key(other)
                    if key in held and id(other) not in held[key]:
                        keys.add(key)
        return keys

    if not held or not found():
        return set()
    gc.collect()  # the parameter may belong to a deleted model, not collected yet
    return found()


def _bound_together(group: Sequence[Named]) -> dict[str, str]:
    """Return the tensors of `group`, all in one storage, that must move together, in the form of `aliases`."""
    if _has_other_holders(group):
        return {name: next(other for other, _ in group if other != name) for name, _ in group}
    # The offsets in the storage of the first byte of each tensor and of the first byte behind it.
    spans: list[tuple[int, int, str]] = []
    for name, tensor in group:
        start, size = int(tensor.storage_offset()), tensor.element_size()
        reach = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
        spans.append((start * size, (start + reach + 1) * size, name))
    found: dict[str, str] = {}
    furthest, last = -1, ""
    for start, end, name in sorted(spans):
        if start < furthest:
            found.setdefault(last, name)
            found[name] = last
        if end > furthest:
            furthest, last = end, name
    return found


def moved_together(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Move `tensors` to `device` in place. Tensors that share a storage share a storage on `device` too."""
    storages: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        if tensor.device == device:
            continue
        if type(tensor.data) is not torch.Tensor or tensor.is_meta or tensor.numel() == 0:
            tensor.data = tensor.data.to(device)
            continue
        key = compat.storage_key(tensor)
        if key not in storages:
            storages[key] = compat.bytes_of(tensor.untyped_storage()).to(device)
        tensor.data = compat.MemoryView.of(tensor).over(storages[key].untyped_storage())
