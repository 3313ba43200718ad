"""Time the steps of a plan on the CUDA stand-in, in seconds that the plan's own cost model gives to each work.

```text
  with clocked(cluster) as clock:        copies take their bytes over the links of the machine, from now on
      run = by_elixir(model, ...)        ...
      clock.follow(run)                  regions, updates and sums take what the cost model says, in the plan of `run`
      clock.period_s(step)               seconds from one step to the next
```

What is genuine is the order: which stream works, which waits, by which event, and when the thread that trains and the
thread of the updates issue it. Both have a time of their own (see clock.cpp): a wait moves it to the end of what was
waited for, an update on the host by its price, and nothing else does. The thread whose time is less goes on, the other
stands still, so that nothing depends on seconds of a wall clock.
"""

import ctypes
import functools
import threading
import time as wall
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from elixir_compile.graph.capture.modules import model_of
from elixir_compile.ir import Lane, Placement, Verb
from elixir_compile.ir.cost import stream_bytes
from elixir_compile.ir.hardware import Cluster
from elixir_compile.ir.kinds import InnerVerb
from elixir_compile.ir.schedule import what_of
from elixir_compile.runtime import lanes as accelerator
from elixir_compile.runtime import recording, updates
from elixir_compile.runtime.lanes import Accelerator, StreamLane
from elixir_compile.runtime.lowering import DividedRegion
from elixir_compile.runtime.recording import Ledger
from elixir_compile.step.prices import Prices
from elixir_compile.step.seconds import player_of
from tests.cuda_standin import device as standin
from tests.run.training import Run

TRAINS, UPDATES = range(2)
"""The threads of time: the one that trains, of the caller and of autograd, and the one of the updates."""
_PATIENCE_S = 60.0


def _library() -> ctypes.CDLL:
    found = standin.start()
    for name, arguments, result in (
        ("standin_start_clock", [ctypes.c_double] * 4, None),
        ("standin_stop_clock", [], None),
        ("standin_be_thread", [ctypes.c_int], None),
        ("standin_now_s", [ctypes.c_int], ctypes.c_double),
        ("standin_wait_until", [ctypes.c_double], None),
        ("standin_spend", [ctypes.c_void_p, ctypes.c_double], None),
        ("standin_moments", [ctypes.c_void_p, *[ctypes.POINTER(ctypes.c_double)] * 3], None),
    ):
        getattr(found, name).argtypes, getattr(found, name).restype = arguments, result
    return found


class Turns:
    """Lets the thread of time go on that is earliest."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._changed = threading.Condition()
        self._since: dict[int, Callable[[], float | None]] = {UPDATES: lambda: None}
        """By thread that waits for another: returns since when it could go on, None while it cannot."""
        self.is_over = False
        """Whether no thread has to wait for its turn any more."""

    def now_s(self, thread: int | None = None) -> float:
        """Return the time of `thread`, of the calling one if it is None."""
        return self._library.standin_now_s(own_thread() if thread is None else thread)

    def wait_until(self, at_s: float) -> None:
        """Move the time of the calling thread to `at_s` if it is earlier, and let earlier threads go on first."""
        self._library.standin_wait_until(at_s)
        self.pause()

    def pause(self) -> None:
        """Return when the calling thread is the earliest."""
        with self._changed:
            self._changed.notify_all()
            self._await_turn(own_thread())

    def wait_for(self, since: Callable[[], float | None]) -> None:
        """Wait until `since` returns a time, let the calling thread go on at it, and when it is the earliest."""
        me = own_thread()
        self._library.standin_be_thread(me)
        with self._changed:
            self._since[me] = since
            self._changed.notify_all()
            self._await_turn(me)
            del self._since[me]
            at_s = since()
            assert at_s is not None or self.is_over, "only this thread takes what it waited for"
            self._library.standin_wait_until(at_s or 0.0)

    def _await_turn(self, me: int) -> None:
        began_s = wall.monotonic()
        while not self._is_turn_of(me):
            assert self._changed.wait(_PATIENCE_S), (
                f"no thread goes on: {self._ready_s(TRAINS)}, {self._ready_s(UPDATES)}"
            )
            assert wall.monotonic() - began_s < 10 * _PATIENCE_S, "a thread never gets its turn"

    def end(self) -> None:
        """Let every thread go on."""
        with self._changed:
            self.is_over = True
            self._changed.notify_all()

    def _is_turn_of(self, me: int) -> bool:
        if self.is_over:
            return True
        mine = self._ready_s(me)
        others = (self._ready_s(other) for other in (TRAINS, UPDATES) if other != me)
        return mine is not None and all(other is None or (mine, me) <= (other, 1 - me) for other in others)

    def _ready_s(self, thread: int) -> float | None:
        since = self._since.get(thread)
        if since is None:
            return self.now_s(thread)
        at_s = since()
        return None if at_s is None else max(at_s, self.now_s(thread))


def own_thread() -> int:
    """Return the thread of time to which the calling thread belongs."""
    return UPDATES if threading.current_thread().name == "elixir updates" else TRAINS


class _Queue:
    """What `queue.SimpleQueue` is to the thread of the updates, in clocked time."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._items: list[tuple[float, Any]] = []

    def put(self, item: Any) -> None:
        self._items.append((self._turns.now_s(), item))

    def get(self) -> Any:
        self._turns.wait_for(lambda: self._items[0][0] if self._items else None)
        return self._items.pop(0)[1] if self._items else None

    def empty(self) -> bool:
        return not self._items


class _Event:
    """What `threading.Event` is to an update, in clocked time."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._set_s: float | None = None

    def set(self) -> None:
        if self._set_s is None:
            self._set_s = self._turns.now_s()

    def is_set(self) -> bool:
        return self._set_s is not None

    def wait(self) -> None:
        self._turns.wait_for(lambda: self._set_s)


class Idle(NamedTuple):
    """Seconds in which the device had nothing to do before the work `before`."""

    seconds: float
    before: str
    is_host: bool
    """Whether the host had not issued the work; else it waited for a copy."""


class Wait(NamedTuple):
    """Seconds for which a thread of the host waited for `label`."""

    seconds: float
    label: str


@dataclass(slots=True, kw_only=True)
class PlanPrices:
    """What the works of a plan take."""

    price: Prices
    run_s: Mapping[str, float]
    placements: Mapping[str, Placement]
    divided: frozenset[str]
    """The regions that run in micro-batches."""
    num_params: Mapping[str, int]
    stream_bytes: Mapping[str, int]
    """By bucket, what a streamed update copies to the device."""

    @classmethod
    def of(cls, run: Run) -> "PlanPrices":
        """Return the prices of the plan in force of `run`."""
        active: Any = model_of(run.model).graphs[0].active
        plan, player = active.plan, player_of(active.problem.graph, active.plan, active.problem.cluster)
        placements = {str(each.bucket): each for each in plan.placements}
        return cls(
            price=player.price,
            run_s={str(region): seconds for region, seconds in player.run_s.items()},
            placements=placements,
            divided=frozenset(str(region.id) for region in plan.regions if region.micro_batches > 1),
            num_params={str(bucket.id): len(bucket.params) for bucket in plan.buckets},
            stream_bytes={str(b.id): stream_bytes(b, placements[str(b.id)].param)[0] for b in plan.buckets},
        )

    def added_s(self, bucket: str) -> float:
        """Return the seconds of adding the gradient of one parameter of `bucket` to its sum."""
        seconds = self.price.add_s.get((bucket, self.placements[bucket].param), 0.0)
        return seconds / self.num_params[bucket]


@dataclass(slots=True, kw_only=True)
class Clock:
    """The time of the devices and of the threads of this process, and what takes how much of it."""

    library: ctypes.CDLL
    turns: Turns
    prices: PlanPrices | None = None
    idle: list[Idle] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    arrived_bytes: dict[str, int] = field(default_factory=dict)
    """By bucket, the bytes of the piece of a streamed update that was copied last to the device."""

    def follow(self, run: Run) -> None:
        """Let works take what they take in the plan in force of `run`, from now on."""
        self.prices = PlanPrices.of(run)

    def period_s(self, step: Callable[[], object], *, warm_up: int = 3, num_steps: int = 3) -> float:
        """Return the seconds from one step to the next, in the mean of `num_steps` after `warm_up`."""
        for _ in range(warm_up):
            step()
        self.idle.clear()
        self.waits.clear()
        began_s = self._moments()[0]
        for _ in range(num_steps):
            step()
        return (self._moments()[0] - began_s) / num_steps

    def _moments(self) -> tuple[float, float, float]:
        """Return when a work could begin that is issued now, the time of this thread, and the end of the last work."""
        found = [ctypes.c_double() for _ in range(3)]
        self.library.standin_moments(torch.cuda.current_stream().cuda_stream, *map(ctypes.byref, found))
        free_s, now_s, worked_until_s = (each.value for each in found)
        return max(free_s, now_s), now_s, worked_until_s

    def compute(self, seconds: float, what: str) -> None:
        """Let the current stream work for `seconds`."""
        begins_s, now_s, worked_until_s = self._moments()
        if begins_s > worked_until_s:
            self.idle.append(Idle(begins_s - worked_until_s, what, now_s >= begins_s))
        self.library.standin_spend(torch.cuda.current_stream().cuda_stream, seconds)

    def pay(self, lane: Lane, label: str, nbytes: int) -> None:
        """Let what has just been issued under `label` take its time."""
        prices, (verb, what) = self.prices, (label.partition(" ")[0], what_of(label))
        if prices is None:
            return
        if lane is Lane.H2D and verb == Verb.GATHER and what.endswith(".state"):
            self.arrived_bytes[what.removesuffix(".state")] = nbytes
        elif lane is Lane.COMPUTE and verb == Verb.RUN and what not in prices.divided:
            self.compute(prices.run_s[what], label)
        elif lane is Lane.COMPUTE and verb == Verb.UPDATE:
            is_streamed = prices.placements[what].streamed
            share = self.arrived_bytes[what] / prices.stream_bytes[what] if is_streamed else 1.0
            self.compute(share * prices.price.device_update_s[what], label)
        elif lane is Lane.COMPUTE and verb == InnerVerb.ADD:
            self.compute(prices.added_s(what.removesuffix(".grad")), label)
        elif lane is Lane.HOST and verb == Verb.UPDATE:
            seconds = prices.price.off_device_update_s(what, prices.placements[what].optim)
            self.turns.wait_until(self.turns.now_s() + seconds)
        elif lane is Lane.HOST and verb == InnerVerb.ADD:
            self.turns.wait_until(self.turns.now_s() + prices.added_s(what.removesuffix(".grad")))


@contextmanager
def clocked(cluster: Cluster) -> Iterator[Clock]:
    """Let time pass in the block as on `cluster`; models and optimizers are made in the block."""
    library = _library()
    turns = Turns(library)
    clock = Clock(library=library, turns=turns)
    with pytest.MonkeyPatch.context() as patch:
        _let_threads_take_turns(patch, turns)
        _let_works_take_time(patch, clock)
        links = (cluster.h2d, cluster.d2h)
        library.standin_start_clock(*(number for each in links for number in (each.latency_s, 1 / each.bytes_per_s)))
        try:
            yield clock
            updates.finish_updates()
        finally:
            library.standin_stop_clock()
            turns.end()


def _let_threads_take_turns(patch: pytest.MonkeyPatch, turns: Turns) -> None:
    shim = {name: getattr(threading, name) for name in ("Thread", "Lock", "Condition", "current_thread")}
    patch.setattr(updates, "threading", SimpleNamespace(**shim, Event=functools.partial(_Event, turns)))
    patch.setattr(updates, "queue", SimpleNamespace(SimpleQueue=functools.partial(_Queue, turns)))
    worker = updates._Worker()
    worker.drain = lambda: turns.wait_for(lambda: None if worker._num_open else turns.now_s(UPDATES))
    worker._has_ended = lambda: turns.is_over
    patch.setattr(updates, "_worker", worker)
    now = SimpleNamespace(perf_counter=turns.now_s, time_ns=lambda: int(1e9 * turns.now_s()))
    patch.setattr(recording, "time", now)
    patch.setattr(accelerator, "time", SimpleNamespace(sleep=lambda s: turns.wait_until(turns.now_s() + s)))
    for of, name in ((StreamLane, "synchronize"), (Accelerator, "synchronize")):
        patch.setattr(of, name, _pausing(getattr(of, name), turns))


def _pausing(wait: Callable[..., None], turns: Turns) -> Callable[..., None]:
    def waited(lane: object) -> None:
        wait(lane)
        turns.pause()

    return waited


def _let_works_take_time(patch: pytest.MonkeyPatch, clock: Clock) -> None:
    span, waits, init = Ledger.span, Ledger.waits, DividedRegion.__init__

    @contextmanager
    def paid(ledger: Ledger, lane: Lane, label: str, nbytes: int = 0, **options: Any) -> Iterator[object]:
        with span(ledger, lane, label, nbytes, **options) as found:
            yield found
            clock.pay(lane, label, nbytes)

    @contextmanager
    def noted(ledger: Ledger, label: str) -> Iterator[object]:
        began_s = clock.turns.now_s()
        with waits(ledger, label) as found:
            yield found
        clock.waits.append(Wait(clock.turns.now_s() - began_s, label))

    def divided(region: DividedRegion, *args: Any, **options: Any) -> None:
        init(region, *args, **options)
        body = region._body

        def paid_body(inputs: list[Any]) -> Any:
            results = body(inputs)
            if clock.prices is not None:
                seconds = clock.prices.run_s[what_of(region._label)] / region._divided.micro_batches
                clock.compute(seconds, region._label)
            return results

        region._body = paid_body

    patch.setattr(Ledger, "span", paid)
    patch.setattr(Ledger, "waits", noted)
    patch.setattr(DividedRegion, "__init__", divided)
