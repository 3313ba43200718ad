"""Lanes of an imaginary device on which work happens at the worst legal moment.

Each lane is a queue of closures. A copy runs when its policy says so, or when something that waits for it forces it:

    early     copies at once, compute only when forced
    late      only when forced
    random    at random moments, the same for the same seed

A region computes at once, but its results hold NaN until compute gets its turn. Memory from `empty` and the targets of
copies hold 0xFF bytes, which are NaN in every float, until they are written. A copy reads its source when it runs, and
fails if the source is gone by then. A thread of ours that has not made the device its current one cannot use lanes.
"""

import ctypes
import itertools
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from elixir_compile.runtime.bucket import _mapped
from elixir_compile.runtime.lanes import TimedEvent, Waitable

POISON = 0xFF


@dataclass(frozen=True, slots=True)
class Moment:
    """The moment when the first `position` operations of `lane` are done."""

    lane: "Queue"
    position: int

    def query(self) -> bool:
        with self.lane.world.lock:
            is_past = self.lane.num_done >= self.position
            if not is_past:
                self.lane.force(self.lane.num_done + 1)  # a loop that asks comes to an end
            return is_past


@dataclass(slots=True)
class Operation:
    run: Callable[[], None]
    waits: list[Moment]
    places: tuple["Bytes", ...] = ()


@dataclass
class World:
    """All lanes of one device; `policy` is `early`, `late` or `random`."""

    policy: str
    seed: int = 0
    lock: Any = field(default_factory=threading.RLock)
    queues: list["Queue"] = field(default_factory=list)
    """Compute comes first."""
    thread: Any = field(default_factory=threading.local)

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)

    @property
    def current(self) -> "Queue":
        """The lane of the block of the calling thread; compute outside of a block."""
        return getattr(self.thread, "lane", None) or self.queues[0]

    @property
    def is_idle(self) -> bool:
        return all(queue.num_done == queue.num_issued for queue in self.queues)

    def follow(self, policy: str) -> None:
        """Work by `policy` from now on: `early`, `late` or `random` with a seed, as in `random 3`."""
        self.policy, _, seed = policy.partition(" ")
        self.dice.seed(int(seed or 0))

    def advance(self) -> None:
        """Let the device do what its policy wants to do now."""
        if self.policy == "early":
            for queue in self.queues[1:]:
                queue.force(queue.num_issued)
        elif self.policy == "random":
            for queue in self.dice.sample(self.queues, len(self.queues)):
                pending = queue.num_issued - queue.num_done
                if pending and self.dice.random() < 0.3:
                    queue.force(queue.num_done + self.dice.randint(1, pending))

    def require_device(self) -> None:
        if threading.current_thread().name.startswith("elixir") and not getattr(self.thread, "has_device", False):
            raise AssertionError("this thread uses lanes, and its current device is still device 0")


class Queue:
    """The operations of one lane, done in the order of issue."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.num_issued = self.num_done = 0
        self._pending: deque[Operation] = deque()
        self._waits: list[Moment] = []
        world.queues.append(self)

    def wait(self, moment: Moment | None) -> None:
        """Let later operations wait for `moment`."""
        if moment is not None:
            self._waits.append(moment)

    def issue(self, run: Callable[[], None], *places: "Bytes") -> Moment:
        with self.world.lock:
            self.world.require_device()
            waits, self._waits = self._waits, []
            self._pending.append(Operation(run, waits, places))
            self.num_issued += 1
            moment = Moment(self, self.num_issued)
            self.world.advance()
            return moment

    def force(self, position: int) -> None:
        """Do operations until the first `position` are done."""
        with self.world.lock:
            while self.num_done < position:
                operation = self._pending.popleft()
                for moment in operation.waits:
                    moment.lane.force(moment.position)
                operation.run()
                self.num_done += 1

    def hold(self, position: int) -> None:
        """Keep the memory of the first `position` operations: compute waits for them, and frees it after that wait."""
        with self.world.lock:
            for operation in itertools.islice(self._pending, max(position - self.num_done, 0)):
                for moment in operation.waits:
                    moment.lane.hold(moment.position)
                for place in operation.places:
                    place.hold()

    def settle(self) -> None:
        """Do all operations, and what later ones wait for."""
        with self.world.lock:
            self.force(self.num_issued)
            waits, self._waits = self._waits, []
            for moment in waits:
                moment.lane.force(moment.position)


class Bytes:
    """The memory of a tensor, without keeping it alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.address, self.nbytes = tensor.data_ptr(), tensor.nbytes
        self._slab = _mapped.at(self.address) if self.nbytes else None
        self._storage = weakref.ref(tensor.untyped_storage())
        self._held: object = None

    def hold(self) -> None:
        """Keep device memory, as an allocator does; host memory is unmapped at once, whoever copies to it."""
        self._held = self._storage() if self._slab is None else None

    def require(self, role: str) -> int:
        is_alive = self._storage() is not None if self._slab is None else _mapped.at(self.address) == self._slab
        if not is_alive:
            raise AssertionError(f"the {role} of a copy was freed before the copy ran")
        return self.address


def is_host(tensor: torch.Tensor) -> bool:
    return _mapped.at(tensor.data_ptr()) is not None


def poison(tensor: torch.Tensor) -> None:
    if tensor.nbytes:
        ctypes.memset(tensor.data_ptr(), POISON, tensor.nbytes)


class SimulatedLane:
    is_asynchronous = True

    def __init__(self, world: World, compute: Queue) -> None:
        self.queue, self._compute = Queue(world), compute

    @contextmanager
    def behind_compute(self, after: Moment | None = None) -> Iterator[None]:
        self.queue.wait(self._compute.issue(lambda: None))
        with self.beside_compute(after):
            yield

    @contextmanager
    def beside_compute(self, after: Moment | None = None) -> Iterator[None]:
        self.queue.wait(after)
        here = self.queue.world.thread
        before, here.lane = getattr(here, "lane", None), self.queue
        try:
            yield
        finally:
            here.lane = before

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if not (target.is_contiguous() and source.is_contiguous() and target.dtype == source.dtype):

            def convert() -> None:
                target.copy_(source)

            self.queue.issue(convert)
            return
        to, origin = Bytes(target), Bytes(source)
        with self.queue.world.lock:
            if self.queue.world.is_idle:  # else an earlier operation may still read the target
                poison(target)

        def move() -> None:
            if to.nbytes:
                ctypes.memmove(to.require("target"), origin.require("source"), to.nbytes)

        torch.autograd.graph.increment_version(target)
        self.queue.issue(move, to, origin)

    def mark(self) -> Moment:
        return self.queue.issue(lambda: None)

    def synchronize(self) -> None:
        """Do all copies, and all compute: after such a wait the program hands tensors to code that reads them."""
        self.queue.settle()
        self._compute.settle()


class LateCollective:
    """A collective of real ranks, which works on copies: `source` is read at the first moment when it may be, and
    `target` is written when the device has its turn."""

    def __init__(
        self, begin: Callable[[torch.Tensor, torch.Tensor], Waitable], target: torch.Tensor, source: torch.Tensor
    ) -> None:
        self._result, self._given = torch.empty_like(target), source.clone()
        self._work = begin(self._result, self._given)
        self.target, self.source = Bytes(target), Bytes(source)
        poison(target)

    def finish(self) -> None:
        """Finish. Fails if the source was freed or written since, because a real collective may read it until now."""
        self._work.wait()
        given = ctypes.string_at(self._given.data_ptr(), self.source.nbytes)
        if given != ctypes.string_at(self.source.require("source"), self.source.nbytes):
            raise AssertionError("the source of a collective was written before the collective was done")
        ctypes.memmove(self.target.require("target"), self._result.data_ptr(), self.target.nbytes)


class _Arrival:
    def __init__(self, lanes: "Simulated", moment: Moment) -> None:
        self._lanes, self._moment = lanes, moment

    def wait(self) -> None:
        self._lanes.current_waits(self._moment)


class Simulated:
    """The lanes of an imaginary device in the memory of the CPU."""

    pins = has_clock = False

    def __init__(self, device: torch.device, policy: str, seed: int = 0) -> None:
        self.device = device
        self.world = World(policy, seed)
        self._compute = Queue(self.world)
        self.h2d = SimulatedLane(self.world, self._compute)
        self.d2h = SimulatedLane(self.world, self._compute)
        self.collectives = SimulatedLane(self.world, self._compute)
        self._exchanges = Queue(self.world)
        self.num_hidden = 0

    def hand_over(self) -> Callable[[], None]:
        return lambda: setattr(self.world.thread, "has_device", True)

    def hand_back(self, event: Moment | None) -> Callable[[], None] | None:
        return None if event is None else lambda: self.compute_waits(event)

    def empty(self, nbytes: int) -> torch.Tensor:
        memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        poison(memory)
        return memory

    def computes(self, run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        def late(box: list[Any]) -> Any:
            self._compute.settle()
            known = {value.untyped_storage().data_ptr() for value in box if isinstance(value, torch.Tensor)}
            made = run(box)
            self._hide(made if isinstance(made, tuple | list) else (made,), known)
            return made

        return late

    def _hide(self, outputs: Iterable[Any], known: set[int]) -> None:
        """Put NaN into new storages until compute has its turn."""
        tensors = (value for value in outputs if isinstance(value, torch.Tensor))
        storages = {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
        for address, storage in storages.items():
            if address in known or not storage.nbytes():
                continue
            values, gone = ctypes.string_at(address, storage.nbytes()), weakref.ref(storage)
            ctypes.memset(address, POISON, len(values))
            self.num_hidden += 1

            def show(address: int = address, values: bytes = values, gone: Any = gone) -> None:
                if gone() is not None:
                    ctypes.memmove(address, values, len(values))

            self._compute.issue(show)

    def touches(self, reads: Iterable[torch.Tensor], writes: Iterable[torch.Tensor] = ()) -> None:
        if not all(is_host(tensor) for tensor in (*reads, *writes)):
            self.world.current.settle()

    def collective(self, work: Any, reads: Iterable[torch.Tensor], writes: Iterable[torch.Tensor]) -> Waitable:
        if not isinstance(work, LateCollective):
            return work
        self._exchanges.wait(self.world.current.issue(lambda: None))
        return _Arrival(self, self._exchanges.issue(work.finish, work.target, work.source))

    @property
    def num_late(self) -> int:
        """How many collectives were late and are done."""
        return self._exchanges.num_done

    def current_waits(self, event: Moment) -> None:
        """Let later work of the lane of the block wait for `event`."""
        event.lane.hold(event.position)
        self.world.current.wait(event)

    def mark_compute(self) -> Moment:
        return self._compute.issue(lambda: None)

    def compute_waits(self, event: Moment | None) -> None:
        if event is not None:
            event.lane.hold(event.position)
            self._compute.wait(event)

    def host_waits(self, event: Moment | None) -> None:
        if event is not None:
            event.lane.force(event.position)

    def synchronize(self) -> None:
        for queue in self.world.queues:
            queue.settle()

    def timed_event(self) -> TimedEvent:
        raise AssertionError("the clock of the host serves")
