"""The models of the process whose parameters are on one device share its memory: who they are, and what they hold.

```text
  in turn   ran since this model ran last, or has an outstanding forward      its bytes are in the plan of this model
  idle      ran, and has not run since this model began to                    moves to the host if this model needs room
  new       was prepared, or has an optimizer, and never ran                  its bytes stay free if a plan fits beside
```

A generator and a discriminator, a student and its teacher, an actor and a critic run in turn, and so does a model that
came back from the host with those for which it left. Their graphs are planned together: see `outstanding`.
"""

import gc
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch

from elixir_compile import compat
from elixir_compile.analysis.bucket_bytes import bucket_host_bytes
from elixir_compile.ir import Bucket, Placement, Tier
from elixir_compile.ops.aliases import held_by_others
from elixir_compile.ops.optimizers import claimed_params
from elixir_compile.ops.registry import slot_of
from elixir_compile.problem.outside import Held, held_outside, present_bytes, training_bytes_of
from elixir_compile.runtime.executor import Executor


class Neighbour(Protocol):
    """A model on the device: its `OutstandingForwards`."""

    neighbours: "Neighbours[Any]"
    stages: Any
    """The stages of a pipeline on this rank, of which the model is one; they count each other."""

    @property
    def executor(self) -> Executor: ...

    @property
    def may_leave(self) -> bool:
        """Whether the buckets of the model may move to the host now, and back."""
        ...


Model = TypeVar("Model", bound=Neighbour)


class _Models:
    """The models of the process, and the number of turns that they have taken."""

    def __init__(self) -> None:
        self.alive: weakref.WeakSet[Any] = weakref.WeakSet()
        self.turns = 0


_models = _Models()


class Neighbours(Generic[Model]):
    """The other models on the device of one model.

    It has more than 20 methods, a few lines each: 4 say who they are, 8 what they hold, and 6 move those that are idle.
    """

    def __init__(self, own: Model, unplaced: Callable[[], Iterable[torch.Tensor]]) -> None:
        """`unplaced` returns the tensors of the model that no plan places: buffers and unmanaged parameters."""
        self._own: weakref.ref[Model] = weakref.ref(own)
        self._executor = own.executor
        self._unplaced = unplaced
        self._turn = 0
        """The number of the last turn of the model: greater than those of all models that ran before; 0 if it never
        ran."""
        self._in_turn: weakref.WeakSet[Model] = weakref.WeakSet()
        self._known: tuple[object, Held] | None = None
        self._news: object = None
        self._left: list[tuple[Bucket, Placement]] = []
        """The buckets that left for the host because another model needed the room, with the homes that they had."""

    # Who they are.

    def join(self) -> None:
        """Let the model be a neighbour of the others on its device."""
        own = self._own()
        if own is not None:
            _models.alive.add(own)

    def replace(self, before: "Neighbours[Model]") -> None:
        """Take the place of `before`, because another executor takes over the parameters."""
        self._turn, self._in_turn = before._turn, before._in_turn
        for other in self.in_turn():
            self._pair(other)
        self.join()

    def begin(self) -> None:
        """Note that a forward of the model begins, and which models run in turn with it."""
        self.join()
        if len(_models.alive) > 1:
            for other in self._others():
                has_run = other.neighbours._turn > self._turn > 0
                if has_run or (other not in self._in_turn and other.executor.saved.outstanding_owners()):
                    self._pair(other)
        _models.turns += 1
        self._turn = _models.turns

    def in_turn(self) -> list[Model]:
        """Return the models that run in turn with this one."""
        return [other for other in self._others() if other in self._in_turn] if self._in_turn else []

    @property
    def is_away(self) -> bool:
        """Whether buckets of the model left for the host because another model needed the room."""
        return bool(self._left)

    def _others(self) -> list[Model]:
        own, device = self._own(), self._executor.device
        assert own is not None, "the model owns this"
        others = [other for other in list(_models.alive) if other is not own and other.executor.device == device]
        return [other for other in others if other.stages is None or other.stages is not own.stages]

    def _pair(self, other: Model) -> None:
        own = self._own()
        assert own is not None, "the model owns this"
        self._in_turn.add(other)
        other.neighbours._in_turn.add(own)

    # What they hold.

    def held(self) -> Held:
        """Return the device bytes that this model holds while others run, as its plans say."""
        executor = self._executor
        gradients = executor.gradients
        key = (executor.buckets.generation, len(executor.slots), gradients.stay, len(gradients.trained_eagerly))
        if self._known is None or self._known[0] != key:
            with compat.real_tensors():  # a graph may be being traced
                found = held_outside(executor, ())
            grad_bytes = found.grad_bytes + sum(param.nbytes for param in gradients.unmanaged.values())
            self._known = key, Held(found.resident_bytes + self.unplaced_bytes(), grad_bytes)
        return self._known[1]

    def unplaced_bytes(self) -> int:
        """Return the device bytes of the model that no plan places."""
        if not self._executor.slots:  # another model has taken over
            return 0
        there = {id(tensor): tensor for tensor in self._unplaced() if tensor.device == self._executor.device}
        return sum(tensor.nbytes for tensor in there.values()) + sum(self._executor.plain_state.values())

    def bytes_in_turn(self, *, leaving_out: Sequence[Model] = (), is_free: bool = False) -> int:
        """Return the device bytes that the models in turn hold while this one runs, without those in `leaving_out`.

        If `is_free`, the budget of this model is the free memory, which leaves out what is there already.
        """
        total = 0
        for other in self.in_turn():
            if other not in leaving_out:
                held, executor = other.neighbours.held(), other.executor
                nbytes = held.resident_bytes + max(executor.saved.held_bytes(), held.grad_bytes)
                total += max(0, nbytes - other.neighbours.present_bytes()) if is_free else nbytes
        return total

    def present_bytes(self) -> int:
        """Return the device bytes that the model holds now."""
        with compat.real_tensors():  # a graph may be being traced
            return present_bytes(self._executor) + self.unplaced_bytes()

    def present_in_turn(self) -> int:
        """Return the device bytes that the models in turn hold now."""
        return sum(other.neighbours.present_bytes() for other in self.in_turn())

    def host_bytes_in_turn(self) -> int:
        """Return the host bytes of the buckets of models in turn."""
        pairs = [pair for other in self.in_turn() for pair in other.executor.buckets.in_force(for_training=False)]
        return sum(bucket_host_bytes(bucket, home) for bucket, home in pairs)

    def new_bytes(self, *, is_free: bool) -> list[int]:
        """Return the device bytes of models that never ran: with the state and the gradients that they will have, and
        those that are there now; only those that are not 0.

        `is_free` is as in `bytes_in_turn`.
        """
        if self._executor.peers is not None:
            return []
        with compat.real_tensors():  # a graph may be being traced
            claimed = [param for param in claimed_params() if param.device == self._executor.device]
            without_slot = [param for param in claimed if slot_of(param) is None]
            new = [other.executor for other in self._others() if not other.neighbours._turn]
            now_bytes = sum(map(present_bytes, new)) + sum(param.nbytes for param in without_slot)
            later_bytes = training_bytes_of(claimed, new, without_slot)
        now_bytes, later_bytes = (0, later_bytes) if is_free else (now_bytes, now_bytes + later_bytes)
        return [nbytes for nbytes in dict.fromkeys((later_bytes, now_bytes)) if nbytes]

    # Idle models make room.

    def are_news_for(self, plan: object) -> bool:
        """Return whether idle models ran or moved, or came, since this was asked for `plan` last."""
        if len(_models.alive) < 2 or self._executor.peers is not None:
            return False
        turns = [(id(other), other.neighbours._turn, other.executor.buckets.generation) for other in self._idle()]
        news = (id(plan), *turns)
        before, self._news = self._news, news
        return before != news

    def _idle(self) -> list[Model]:
        return [other for other in self._others() if other.neighbours._turn and other not in self._in_turn]

    def idle_bytes(self) -> int:
        """Return the device bytes that idle models of this process alone hold now."""
        return sum(other.neighbours.present_bytes() for other in self._idle() if other.executor.peers is None)

    def make_room(self, excess_bytes: int) -> int:
        """Free at least `excess_bytes` by moving idle models to the host, those that ran first first; return the bytes
        that were freed."""
        before_bytes = self.idle_bytes()
        gc.collect()  # a deleted model is there until it is collected
        freed_bytes = before_bytes - self.idle_bytes()
        for other in sorted(self._idle(), key=lambda other: other.neighbours._turn):
            if freed_bytes >= excess_bytes or other.executor.peers is not None:
                continue
            freed_bytes += other.neighbours.leave()
        return freed_bytes

    def leave(self) -> int:
        """Move the buckets of this model to the host, except those whose memory other tensors hold too; return the
        device bytes that this frees."""
        own, buckets = self._own(), self._executor.buckets
        if own is None or not own.may_leave:
            return 0
        held = _held_by_others(self._executor)
        homes = [
            (bucket, home)
            for bucket, home in buckets.in_force(for_training=False)
            if held.isdisjoint(bucket.params) and Tier.DEVICE in (home.param, home.optim)
        ]
        before_bytes = self.present_bytes()
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
        self._left = homes
        return before_bytes - self.present_bytes()

    def come_back(self) -> None:
        """Move the buckets that left to the homes that they had."""
        self._executor.buckets.move([bucket for bucket, _ in self._left], [home for _, home in self._left])
        self.stay()

    def stay(self) -> None:
        """Forget the homes of buckets that left: a plan for where they are now, or for other homes, is in force."""
        self._left = []


def _held_by_others(executor: Executor) -> set[str]:
    """Return the names of the parameters of `executor` that share memory with a tensor that is not its own."""
    named = [(slot.name, slot.param) for slot in executor.slots.values()]
    for bucket in executor.buckets:
        named += [(slot.name, copy) for slot, copy in zip(bucket.slots, bucket.gathered or (), strict=False)]
    return set(held_by_others(named))
