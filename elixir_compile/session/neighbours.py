"""Count the bytes outside of the graph of a problem: those of other graphs and of other models on the device, which are
planned together or moved to the host.
"""

import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch

from elixir_compile import compat
from elixir_compile.base.process import Living
from elixir_compile.graph.capture.captured import Captured
from elixir_compile.graph.ops.optimizers import has_state, planned_states
from elixir_compile.graph.ops.registry import Slot, held_by_others, slot_of
from elixir_compile.graph.ops.shards import own_shard
from elixir_compile.ir import Bucket, Kind, Param, Placement, Tier
from elixir_compile.optim.adamw_rule import AdamWRule
from elixir_compile.runtime.bucket import RunningBucket, is_slab_memory
from elixir_compile.runtime.distributed.ranks import Ranks
from elixir_compile.runtime.executor import Executor
from elixir_compile.step.bucket_bytes import bucket_host_bytes, kept_grad_bytes, resting

# ----------------------------------------------------------------------------------------------------------------------
# Count the bytes outside of the graph of a problem: parameters, state and gradients of other graphs, or of none.


def state_of_hybrid_adamw(param: torch.Tensor) -> Param:
    """Return the state that HybridAdamW with its default arguments would keep for `param`.

    Without a master: two moments in the dtype of the parameter, 8 bytes for each fp32 element. With a master: two
    moments in fp32, and the rest of the master, 10 bytes for bfloat16 and 12 bytes for float16.
    """
    return AdamWRule().param_state(param, {"amsgrad": False})


def grad_dtype_of(slot: Slot, ranks: Ranks | None) -> torch.dtype:
    """Return the dtype of the gradient of one parameter after its reduce."""
    return slot.param.dtype if ranks is None else ranks.reduced_dtype(slot.param)


def device_bytes(executor: Executor, leaving_out: Collection[str] = ()) -> int:
    """Return the bytes of parameters and of their planned optimizer state on the device.

    Parameters named in `leaving_out` do not count.
    """
    total = 0
    for slot in executor.slots.values():
        if slot.name in leaving_out:
            continue
        bucket = executor.buckets.of(slot)
        total += slot.own_nbytes if slot.own.device == executor.device and not (bucket and bucket.is_away) else 0
        if bucket is not None:
            total += _share(slot, bucket, _resting_bytes(bucket, Kind.MOMENT))
    return total


def state_bytes(executor: Executor, params: Iterable[torch.Tensor]) -> int:
    """Return the bytes of optimizer state on the device, as planned: of buckets, and of those of `params`, all of the
    model, that eager code trains, because no graph reads them or no plan can move them."""
    eagerly = executor.gradients.trained_eagerly
    total = 0
    for slot in executor.slots.values():
        bucket = executor.buckets.of(slot)
        if bucket is not None:
            total += _share(slot, bucket, _resting_bytes(bucket, Kind.MOMENT))
        elif slot.key in eagerly:
            total += _state_bytes(slot.param) * slot.own.numel() // max(slot.numel, 1)
    unmanaged = (param for param in params if param.requires_grad and slot_of(param) is None)
    return total + sum(map(_state_bytes, unmanaged))


def on_device_bytes(executor: Executor) -> int:
    """Return the bytes of parameters that are on the device now."""
    there = (slot for slot in executor.slots.values() if slot.own.device == executor.device)
    return sum(slot.own_nbytes for slot in there if not ((bucket := executor.buckets.of(slot)) and bucket.is_away))


def training_bytes(executor: Executor) -> int:
    """Return the bytes of all parameters, and of the gradients and the optimizer state of those that are trained."""
    slots = executor.slots.values()
    trained = sum(_trained_bytes(slot, executor.ranks) for slot in slots if slot.param.requires_grad)
    return trained + sum(slot.own_nbytes for slot in slots)


def _resting_bytes(bucket: RunningBucket, kind: Kind) -> int:
    """Return the bytes of `kind` that `bucket` holds on the device of rank 0 during the whole step."""
    return sum(nbytes for held, nbytes in resting(bucket.spec, bucket.placement) if held is kind)


def _share(slot: Slot, bucket: RunningBucket, nbytes: int) -> int:
    """Return the bytes of `slot` on this rank, if `bucket` holds `nbytes` on rank 0."""
    return nbytes * slot.own_nbytes // max(bucket.spec.shard_nbytes(), 1)


class Held(NamedTuple):
    """Device bytes that graphs or models hold while another one runs."""

    resident_bytes: int
    """Parameters, optimizer state and sums of gradients; and all that belongs to parameters trained eagerly."""
    grad_bytes: int
    """Gradients, made while the activations of outstanding forwards are freed."""


def held_outside(executor: Executor, read: Collection[str]) -> Held:
    """Return the device bytes outside of the training graphs that read the parameters `read`, as planned.

    Sums of gradients over several backward passes are there always.
    """
    grads_bytes = sums_bytes = eager_bytes = 0
    for slot in executor.slots.values():
        bucket = executor.buckets.of(slot)
        if slot.name in read or not slot.param.requires_grad:
            continue
        if bucket is not None:
            sums_bytes += _share(slot, bucket, _resting_bytes(bucket, Kind.GRAD))
            if bucket.spec.trainable:
                grads_bytes += _share(slot, bucket, kept_grad_bytes(bucket.spec, bucket.placement))
        elif slot.key in executor.gradients.trained_eagerly:
            eager_bytes += _trained_bytes(slot, executor.ranks)
    held_bytes = device_bytes(executor, leaving_out=read) + sums_bytes + unmanaged_state_bytes(executor)
    return Held(held_bytes + eager_bytes, grads_bytes)


def outside_bytes(executor: Executor, read: Collection[str], outstanding_bytes: int = 0) -> int:
    """Return the device bytes outside of the training graphs that read the parameters `read`.

    Includes the larger of `outstanding_bytes` and the gradients of other graphs: these gradients are made while the
    activations of outstanding forwards are freed.
    """
    held = held_outside(executor, read)
    return held.resident_bytes + max(outstanding_bytes, held.grad_bytes)


def present_bytes(executor: Executor) -> int:
    """Return the device bytes of parameters, gradients, optimizer state and outstanding forwards that are there now.

    State that a plan places on the device is there from the first update on.
    """
    total = on_device_bytes(executor) + executor.saved.held_bytes()
    for slot in executor.slots.values():
        grad = slot.param.grad
        if grad is not None and grad.device == executor.device and not is_slab_memory(own_shard(grad).data_ptr()):
            total += own_shard(grad).nbytes
        bucket = executor.buckets.of(slot)
        if bucket is not None and has_state(slot.param):
            total += _share(slot, bucket, _resting_bytes(bucket, Kind.MOMENT))
    return total


def unplanned_bytes(executor: Executor) -> int:
    """Return the device bytes beside the parameters that no plan can place: state of plain optimizers that plans count,
    and the buckets of DistributedDataParallel."""
    return sum(executor.plain_state.by_name().values()) + executor.reducers.bucket_bytes(executor.device)


def unmanaged_state_bytes(executor: Executor) -> int:
    """Return the bytes of optimizer state of trained parameters that no plan can move, as those of an RNN.

    The parameters themselves are inputs of the graphs that read them, and their gradients are results.
    """
    return sum(map(_state_bytes, executor.gradients.unmanaged.values()))


def unread_bytes(captured: Captured, executor: Executor, read: Collection[str]) -> int:
    """Return the bytes of state and gradients of trained parameters that neither `captured`, which reads the parameters
    `read`, nor an earlier graph reads."""
    if captured.backward is None:
        return 0
    slots = [slot for slot in executor.slots.values() if slot.param.requires_grad and slot.name not in read]
    return sum(_trained_bytes(slot, executor.ranks) for slot in slots if executor.buckets.of(slot) is None)


def _trained_bytes(slot: Slot, ranks: Ranks | None) -> int:
    """Return the bytes of the gradient and the optimizer state of one parameter."""
    numel = slot.own.numel()
    return grad_dtype_of(slot, ranks).itemsize * numel + _state_bytes(slot.param) * numel // max(slot.numel, 1)


def _state_bytes(param: torch.Tensor) -> int:
    """Return the bytes of the optimizer state of one parameter without a bucket, over all ranks."""
    return (planned_states([param]).get(id(param)) or state_of_hybrid_adamw(param)).state_nbytes


def outside_host_bytes(in_force: Collection[tuple[Bucket, Placement]], read: Collection[str]) -> int:
    """Return the host bytes of the buckets without any of the parameters `read`."""
    others = [(bucket, placement) for bucket, placement in in_force if set(read).isdisjoint(bucket.params)]
    return sum(bucket_host_bytes(bucket, placement) for bucket, placement in others)


# ----------------------------------------------------------------------------------------------------------------------
# The models of the process whose users chose a budget of one device share it: who they are, and what they hold.
#
#   in turn   ran since this model ran last       what it holds is in the plan of this model; both are planned together
#   idle      ran before this model began to      is in no plan, and moves to the host if this model needs room
#
# A generator and a discriminator, a student and its teacher, an actor and a critic run in turn, and so does a model
# that came back from the host with those for which it left. Their graphs are planned together: see `outstanding`.
#
# A model counts from its first forward on. One whose budget is the free memory counts in no plan: its own plans see the
# others as used memory. Models of other threads do not count either, because nobody may move what runs meanwhile.


log = logging.getLogger("elixir_compile")


class Neighbour(Protocol):
    """A model on the device: its `Together`."""

    neighbours: "Neighbours[Any]"

    @property
    def executor(self) -> Executor: ...

    @property
    def may_leave(self) -> bool:
        """Whether the buckets of the model may move to the host now, and back."""
        ...


Model = TypeVar("Model", bound=Neighbour)


class _Models:
    """The models of the process that share budgets, and the number of turns that they have taken."""

    def __init__(self) -> None:
        self.alive: Living[Any] = Living()
        self.turns = itertools.count(1)

    def others(self, own: Neighbour) -> list[Any]:
        """Return the models on the device of `own`, without it."""
        return [each for each in self.alive if each is not own and each.executor.device == own.executor.device]


_models = _Models()


class Neighbours(Generic[Model]):
    """The other models on the device of one model."""

    def __init__(self, own: Model, unplaced: Callable[[], Iterable[torch.Tensor]]) -> None:
        """`unplaced` returns the tensors of the model that no plan places: buffers and unmanaged parameters."""
        self._own: weakref.ref[Model] = weakref.ref(own)
        self._executor = own.executor
        self._unplaced = unplaced
        self._turn = 0
        """The number of the last turn of the model: greater than those of all models that ran before; 0 if it never
        ran."""
        self._thread = 0
        """The thread of this turn."""
        self._warned_of_threads = False
        self._in_turn: Living[Model] = Living()
        self._news: tuple[object, ...] = ()
        self._known_held: tuple[object, Held] = (None, Held(0, 0))
        self._known_unplaced: tuple[object, int] = (None, 0)
        self._left: list[tuple[Bucket, Placement]] = []
        """The buckets that left for the host because another model needed the room, with the homes that they had."""

    # Who they are.

    def replace(self, before: "Neighbours[Model]") -> None:
        """Take the place of `before`, because another executor takes over the parameters."""
        self._turn, self._thread, self._in_turn = before._turn, before._thread, before._in_turn
        for other in self._in_turn:
            other.neighbours._in_turn.add(self._model)

    def begin(self, *, is_sharing: bool) -> None:
        """Note that a forward of the model begins, and which models run in turn with it; `is_sharing` says whether the
        model shares its budget with others."""
        own = self._model
        if not is_sharing:
            _models.alive.discard(own)
            return
        if compat.backward_pass_id() >= 0:
            return  # activations are computed again in the backward of another forward
        _models.alive.add(own)
        self._thread = threading.get_ident()
        for other in _models.others(own):
            if not other.neighbours._turn > self._turn > 0:
                continue
            if other.neighbours._thread == self._thread:
                self._in_turn.add(other)
                other.neighbours._in_turn.add(own)
            elif not self._warned_of_threads:
                self._warned_of_threads = True
                log.warning(
                    "%s and %s train in different threads: each keeps its budget of the device alone, not both "
                    "together",
                    self._executor.name,
                    other.executor.name,
                )
        self._turn = next(_models.turns)

    def in_turn(self) -> list[Model]:
        """Return the models that run in turn with this one."""
        return [other for other in self.others() if other in self._in_turn] if self._in_turn else []

    @property
    def is_away(self) -> bool:
        """Whether buckets of the model left for the host because another model needed the room."""
        return bool(self._left)

    @property
    def _model(self) -> Model:
        own = self._own()
        assert own is not None, "the model owns this"
        return own

    def others(self) -> list[Model]:
        """Return the other models of this thread, in the order of their turns."""
        own = self._model
        if own not in _models.alive:
            return []
        found = [each for each in _models.others(own) if each.neighbours._thread == self._thread]
        return sorted(found, key=lambda each: each.neighbours._turn)

    # What they hold.

    def held(self) -> Held:
        """Return the device bytes that this model holds while others run, as its plans say."""
        if not self._executor.slots:  # another model has taken over
            return Held(0, 0)
        gradients = self._executor.gradients
        key = (self._executor.buckets.generation, gradients.stay, len(gradients.trained_eagerly))
        if self._known_held[0] != key:
            with compat.real_tensors():  # a graph may be being traced
                found = held_outside(self._executor, ())
            grad_bytes = found.grad_bytes + sum(param.nbytes for param in gradients.unmanaged.values())
            self._known_held = key, Held(found.resident_bytes, grad_bytes)
        resident_bytes, grad_bytes = self._known_held[1]
        return Held(resident_bytes + self.unplaced_bytes(), grad_bytes)

    def unplaced_bytes(self) -> int:
        """Return the device bytes of the model that no plan places."""
        if self._known_unplaced[0] != self._turn:
            there = {id(tensor): tensor for tensor in self._unplaced() if tensor.device == self._executor.device}
            self._known_unplaced = self._turn, sum(tensor.nbytes for tensor in there.values())
        return self._known_unplaced[1] + unplanned_bytes(self._executor)

    def bytes_in_turn(self, *, leaving_out: Sequence[Model] = ()) -> int:
        """Return the device bytes that the models in turn hold while this one runs, without those in `leaving_out`."""
        total = 0
        for other in self.in_turn():
            if other not in leaving_out:
                held = other.neighbours.held()
                total += held.resident_bytes + max(other.executor.saved.held_bytes(), held.grad_bytes)
        return total

    def present_bytes(self) -> int:
        """Return the device bytes that the model holds now."""
        if not self._executor.slots:  # another model has taken over
            return 0
        with compat.real_tensors():  # a graph may be being traced
            return present_bytes(self._executor) + self.unplaced_bytes()

    def host_bytes_in_turn(self) -> int:
        """Return the host bytes of the buckets of models in turn."""
        pairs = [pair for other in self.in_turn() for pair in other.executor.buckets.in_force(for_training=False)]
        return sum(bucket_host_bytes(bucket, home) for bucket, home in pairs)

    def idle_bytes(self) -> int:
        """Return the device bytes that idle models hold now."""
        return sum(other.neighbours.present_bytes() for other in self.others() if other not in self._in_turn)

    def holders(self) -> dict[str, int]:
        """Return the device bytes that other models hold now, by their names; without those that hold nothing."""
        found: dict[str, int] = {}
        for other in self.others():
            name, nbytes = other.executor.name, other.neighbours.present_bytes()
            found[name] = found.get(name, 0) + nbytes
        return {name: nbytes for name, nbytes in found.items() if nbytes}

    # They make room.

    def are_news_for(self, plan: object) -> bool:
        """Return whether other models ran, moved or came since this was asked for `plan` last."""
        others = [(id(each), each.neighbours._turn, each.executor.buckets.generation) for each in self.others()]
        before, self._news = self._news, (id(plan), *others)
        return bool(others) and before != self._news

    def make_room(self, excess_bytes: int) -> int:
        """Free at least `excess_bytes` of other models, those that ran first first; return the bytes that were freed.

        A model moves to the host. Of one with outstanding forwards, only their activations do.
        """
        freed_bytes = 0
        for other in self.others():
            if freed_bytes < excess_bytes:
                freed_bytes += other.neighbours.leave()
        return freed_bytes

    def leave(self) -> int:
        """Move the buckets of this model to the host, except those whose memory other tensors hold too; return the
        device bytes that this frees."""
        before_bytes, buckets = self.present_bytes(), self._executor.buckets
        if self._executor.saved.outstanding_owners():
            self._executor.saved.offload_outstanding()
        elif self._model.may_leave:
            held = _held_by_others(self._executor)
            homes = [
                (bucket, home)
                for bucket, home in buckets.in_force(for_training=False)
                if held.isdisjoint(bucket.params) and Tier.DEVICE in (home.param, home.optim)
            ]
            away = [
                Placement(
                    bucket=home.bucket,
                    param=Tier.HOST,
                    optim=Tier.HOST if home.optim is Tier.DEVICE else home.optim,
                    resident=False,
                )
                for _, home in homes
            ]
            with compat.real_tensors():
                buckets.move([bucket for bucket, _ in homes], away)
            self._left = self._left or homes
        return before_bytes - self.present_bytes()

    def come_back(self) -> None:
        """Move the buckets that left to the homes that they had."""
        self._executor.buckets.move([bucket for bucket, _ in self._left], [home for _, home in self._left])
        self.stay()

    def stay(self) -> None:
        """Forget the homes of buckets that left: a plan for where they are now, or for other homes, is in force."""
        self._left = []


def _held_by_others(executor: Executor) -> set[str]:
    """Return the names of the parameters of `executor` that share memory with a tensor that is not its own.

    A function, so that the tensors among its local variables are gone when the memory is to be freed.
    """
    named = [(slot.name, slot.param) for slot in executor.slots.values()]
    for bucket in executor.buckets:
        named += [(slot.name, copy) for slot, copy in zip(bucket.slots, bucket.gathered or (), strict=False)]
    return set(held_by_others(named))
