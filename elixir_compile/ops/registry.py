"""Which prepared parameter is meant: from a key in a captured graph, or from a `Parameter`, to its slot.

A slot ties one parameter of a prepared model to its executor. Both maps are weak: a slot lives as long as its
executor, and the executor as long as the modules it prepared.
"""

import itertools
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from elixir_compile import compat
from elixir_compile.errors import NotPrepared, OptimizerTooEarly, UnsupportedModel
from elixir_compile.ops.shards import full_tensor, is_dtensor, is_sharded, own_part, version


class GradientSink(Protocol):
    """Takes the gradients of the parameters of one executor."""

    sentinel: torch.Tensor
    """A leaf that each gate of the executor leads to, and no user has: autograd runs its accumulate node only in a
    backward that asks for the gradients of everything."""

    def accumulate(self, slot: "Slot", grad: torch.Tensor) -> None:
        """Add `grad` to the gradient of the slot's parameter, as far as this backward was asked for that."""
        ...

    def hand_over(self, slots: "Sequence[Slot | None]") -> "Sequence[torch.Tensor | None]":
        """Return the gradients, of those of `slots`, that the engine of autograd itself takes in this backward; None
        for each of the others."""
        ...


class SlotOwner(Protocol):
    """What a slot needs of its executor."""

    generation: int
    """Grows when parameters move."""

    @property
    def gradients(self) -> GradientSink:
        """Takes the gradients of the executor's parameters."""
        ...

    def check_same_op(self, slot: "Slot") -> None:
        """Return when every rank is about to gather the slot's parameter; RanksDiffer where one does something else."""
        ...

    def await_update(self, slot: "Slot") -> None:
        """Wait for a queued update of the slot's bucket, and let everybody read its parameters again."""
        ...


@dataclass(frozen=True, slots=True)
class ParamState:
    """What the optimizer of a parameter keeps for it."""

    group: int
    """The param group, counted over all optimizers."""
    nbytes: int


class StateOwner(Protocol):
    """What the planner and an executor need of the optimizer that keeps state where the plan says."""

    @property
    def places_state(self) -> bool:
        """Whether its state may live apart from the parameters."""
        ...

    def states_of(self, params: Sequence[torch.Tensor]) -> Sequence[ParamState]:
        """Return what it keeps, or will keep, for each of `params`; groups as it counts them."""
        ...

    def follow(self, params: Sequence[torch.Tensor]) -> None:
        """Move the state that `params` have to where the placements of their buckets say."""
        ...

    def landed(self, params: Sequence[torch.Tensor], arrived: "torch.cuda.Event | None") -> None:
        """Note that this backward has published the gradients of `params`, of one bucket that is updated in the
        backward; they are there once `arrived` is."""
        ...


class Slot:
    """One parameter of a prepared model: where autograd meets it and who runs it."""

    __slots__ = ("__weakref__", "_handles", "_made_as", "_node", "device", "key", "name", "param", "sink")

    def __init__(self, key: int, name: str, param: torch.nn.Parameter, device: torch.device, sink: SlotOwner) -> None:
        self.key = key
        self.name = name
        self.param = param
        self.device = device
        self.sink = sink
        self._handles: list[torch.Tensor] = []
        self._made_as = _form(param)
        self._node: compat.AccumulateNode | None = None

    def check_form(self) -> None:
        """Raise UnsupportedModel when the parameter is no longer what graphs were captured for: `model.half()`."""
        if _form(self.param) != self._made_as:
            raise UnsupportedModel(
                self.name,
                f"it was {_words(self._made_as)} when Elixir took charge of it and is {_words(_form(self.param))} now. "
                "Cast the model first, then prepare or compile it",
            )

    def fits(self, param: torch.nn.Parameter) -> bool:
        """Whether `param` has the form of the parameter that graphs were captured for."""
        return _form(param) == self._made_as

    def take(self, param: torch.nn.Parameter) -> None:
        """Read `param`, which has the same form, from now on in place of the parameter."""
        is_known = slot_of(self.param) is self
        forget(self)
        self.param = param
        if is_known:
            _BY_PARAM[id(param)] = self

    @property
    def nbytes(self) -> int:
        """Bytes of the parameter, whole."""
        return self.param.numel() * self.param.element_size()

    @property
    def own(self) -> torch.Tensor:
        """What this rank has of the parameter: a plain tensor, or the parameter itself where there is one rank."""
        return own_part(self.param)

    @property
    def own_nbytes(self) -> int:
        """Bytes that this rank has of the parameter."""
        return self.own.numel() * self.param.element_size()

    @property
    def is_dtensor(self) -> bool:
        """Whether several ranks have the parameter, each a part or each all of it."""
        return is_dtensor(self.param)

    @property
    def version(self) -> int:
        """A number that grows with every write to the parameter."""
        return version(self.param)

    def whole(self) -> torch.Tensor:
        """Return the parameter's values on the compute device, detached; an alias where all of it is there already.

        Every rank calls this at once where each has a part. Raises RanksDiffer where one does something else.
        """
        if is_sharded(self.param):
            self.sink.check_same_op(self)
        self.sink.await_update(self)
        return full_tensor(self.param, self.device)

    def handle(self) -> torch.Tensor:
        """Return a new one-element leaf that stands for the parameter in captured graphs."""
        requires_grad = self.param.requires_grad
        handle = torch.zeros(1, dtype=self.param.dtype, device=self.device, requires_grad=requires_grad)
        self._handles.append(handle)
        return handle

    def meet_node(self) -> None:
        """Look up the node that accumulates the gradient of the parameter, which requires one; torch makes another if
        the parameter moves to another device."""
        self.forget_node()  # it holds a reference to the node that the next one would count
        self._node = compat.AccumulateNode(self.param)

    def forget_node(self) -> None:
        """Let go of the node."""
        self._node = None

    @property
    def has_hooks(self) -> bool:
        """Whether somebody hooked the gradient of the parameter, or may have by its node, which they hold."""
        return compat.has_gradient_hooks(self.param) or self.has_node_holders

    @property
    def has_node_holders(self) -> bool:
        """Whether somebody else holds the node of the parameter, as whoever registers a hook on it must."""
        return self._node is not None and self._node.is_held_by_others

    @property
    def handles(self) -> Sequence[torch.Tensor]:
        """Every handle that was made, in order."""
        return self._handles

    def follow_thaw(self) -> bool:
        """Let the handles require a gradient where the parameter began to; say whether that changed any.

        Of a parameter that was frozen the gradient is still made, and dropped: nothing has to be captured again.
        """
        if not self.param.requires_grad:
            return False
        stale = [handle for handle in self._handles if not handle.requires_grad]
        for handle in stale:
            handle.requires_grad_()
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
"""By the id of the parameter, which the slot keeps alive: a third of the time of a dictionary with weak tensors as
keys, for every parameter in every step."""
_HYBRID = WeakTensorKeyDictionary()
_REPLACED = WeakTensorKeyDictionary()


def new_slot(name: str, param: torch.nn.Parameter, device: torch.device, sink: SlotOwner) -> Slot:
    """Make the slot of `param` and enter it in the registry."""
    slot = Slot(next(_KEYS), name, param, device, sink)
    _BY_KEY[slot.key] = slot
    _BY_PARAM[id(param)] = slot
    return slot


def num_slots() -> int:
    """Return how many parameters of prepared models there are."""
    return len(_BY_KEY)


def slot_by_key(key: int) -> Slot:
    """Return the slot with `key`; NotPrepared when its model is gone."""
    slot = _BY_KEY.get(key)
    if slot is None:
        raise NotPrepared(f"parameter {key} belongs to a model that no longer exists; compile the model again")
    return slot


def slot_of(param: torch.Tensor) -> Slot | None:
    """Return the slot of `param`, or None when no prepared model owns it."""
    slot = _BY_PARAM.get(id(param))
    return slot if slot is not None and slot.param is param else None


def forget(slot: Slot) -> None:
    """Let the parameter of `slot` have none from now on; what was captured before still finds it by its key."""
    slot.forget_node()
    if slot_of(slot.param) is slot:
        del _BY_PARAM[id(slot.param)]


def follow_all_thaws() -> None:
    """Before a capture: let it see that parameters, of whatever model, began to require a gradient."""
    for slot in list(_BY_KEY.values()):
        slot.follow_thaw()


def claim_for_hybrid(param: torch.Tensor, owner: StateOwner) -> None:
    """Note that the hybrid optimizer `owner` updates `param`, so its state may live apart from it."""
    _HYBRID[param] = weakref.ref(owner)


def planned_states(params: Sequence[torch.Tensor]) -> Mapping[int, ParamState]:
    """Return what hybrid optimizers keep, by the id of the parameter; nothing for parameters of others."""
    found: dict[int, ParamState] = {}
    first_group = 0
    for owner, own in _owned(params).items():
        states = [replace(state, group=first_group + state.group) for state in owner.states_of(own)]
        found.update(zip(map(id, own), states, strict=True))
        first_group = 1 + max(state.group for state in states)
    return found


def let_state_follow(params: Sequence[torch.Tensor]) -> None:
    """Have the hybrid optimizers move the state of `params` to where the placements say: it is as large as the
    parameters twice over, so a step under a new plan must not begin with it in the old place."""
    for owner, own in _owned(params).items():
        owner.follow(own)


def let_update(params: Sequence[torch.Tensor], arrived: "torch.cuda.Event | None") -> None:
    """Tell the hybrid optimizers that the gradients of `params` have landed; see `StateOwner.landed`."""
    for owner, own in _owned(params).items():
        owner.landed(own, arrived)


def _owned(params: Sequence[torch.Tensor]) -> dict[StateOwner, list[torch.Tensor]]:
    owned: dict[StateOwner, list[torch.Tensor]] = {}
    for param in params:
        reference = _HYBRID.get(param)
        owner = None if reference is None else reference()
        if owner is not None:
            owned.setdefault(owner, []).append(param)
    return {owner: own for owner, own in owned.items() if owner.places_state}


def _note_update(optimizer: Optimizer, args: object, kwargs: object) -> None:
    """Count a step of any optimizer as a change: fused kernels leave the version, which tells stale copies, alone."""
    with torch.DisableTorchFunctionSubclass():  # an update may be queued, and nobody reads here
        params = [param for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
    torch.autograd.graph.increment_version([param for param in params if slot_of(param) is not None])


def note_replaced(param: torch.Tensor) -> None:
    """Note that `param` is no parameter of its model any more: several ranks have parts of another in its place."""
    _REPLACED[param] = True


def _require_present(optimizer: Optimizer, args: object, kwargs: object) -> None:
    """Before a step: OptimizerTooEarly where `optimizer` was made before its model was prepared for several ranks, and
    would never update its parameters."""
    if len(_REPLACED):
        params = (param for group in optimizer.param_groups for param in group["params"])
        with torch.DisableTorchFunctionSubclass():  # an update may be queued, and leaves gradients as they are
            # One that has a gradient is still in use, as where it was tied into a module beside the model.
            is_early = any(param in _REPLACED and param.grad is None for param in params)
        if is_early:
            raise OptimizerTooEarly(type(optimizer).__name__)


register_optimizer_step_pre_hook(_require_present)
register_optimizer_step_post_hook(_note_update)
