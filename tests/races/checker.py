"""Follow the order of the work of one executor, and judge every access to memory by it: see `happens_before`."""

import inspect
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch

from elixir_compile import compat
from elixir_compile.base.errors import ElixirError
from elixir_compile.base.units import format_bytes
from elixir_compile.runtime import lanes
from elixir_compile.runtime.bucket import _mapped
from tests.races.happens_before import Access, Actor, Cell, Clock, Source, shown

_HISTORY = 200
"""The actions that are kept for the text of an error."""
_HIDDEN = (__file__.rpartition("/")[0], str(lanes.__file__), "<")
"""Where no access comes from: this folder, the file of lanes, and code without a file."""


class Race(ElixirError, RuntimeError):  # noqa: N818 - named for the event, as errors of the package are
    """`first` and `second` access the same `nbytes` in no certain order; `schedule` shows the actions around them."""

    first: str
    second: str
    nbytes: int
    schedule: str

    def __str__(self) -> str:
        return (
            f"two accesses to the same {format_bytes(self.nbytes)} have no order, so results depend on timing.\n"
            f"  {self.first}\n  {self.second}\n{self.schedule}\n"
            "This is a bug of Elixir, unless code of yours wrote that memory: please report it with this text."
        )


def has_memory(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` has memory at an address.

    A sparse gradient, which stays where it was made, and a gradient of many at once under `vmap` have none.
    """
    return tensor.layout is torch.strided and not compat.is_batched(tensor)


class _Here(threading.local):
    """The actor of the calling thread, and its present work."""

    actor: Actor | None = None
    """None for the threads of the program, which follow each other: the user's, and autograd's."""
    lane: Actor | None = None
    """The lane of the block; None outside of a block, where work is compute."""
    action = "the program"
    moment = 0


class Checker:
    """The clocks of the actors of one executor, and the cells of the memory that they use."""

    def __init__(self, device: torch.device) -> None:
        self._is_cpu = device.type == "cpu"
        # Re-entrant, because a garbage collection inside a locked section may free a cell. Sections that read tensors
        # disable `__torch_function__`: a parameter whose update is queued would wait for the update, and the thread of
        # the updates for this lock.
        self._lock = threading.RLock()
        self._program = Actor("the program")
        self._threads: dict[str, Actor] = {}
        self._cells: dict[object, Cell] = {}
        self._alive: dict[int, weakref.ref[Any]] = {}
        """By address, the storages whose end is awaited."""
        self._found: list[Race] = []
        """Races that were found by a destructor, which cannot raise them."""
        self._numbers = itertools.count(1)
        self._history: deque[tuple[int, str]] = deque(maxlen=_HISTORY)
        self.compute = Actor("compute")
        self.here = _Here()

    @property
    def thread(self) -> Actor:
        """The actor of the calling thread."""
        return self.here.actor or self._program

    @property
    def current(self) -> Actor:
        """The lane on which the calling thread issues work now."""
        return self.here.lane or self.compute

    def note(self, action: str) -> int:
        """Add `action` to the history, and return its position."""
        moment = next(self._numbers)
        self._history.append((moment, action))
        return moment

    def issue(self, lane: Actor, reads: Iterable[torch.Tensor], writes: Iterable[torch.Tensor]) -> None:
        """Note that the calling thread issues work on `lane`. Raises Race if it is not ordered with earlier work."""
        with torch.DisableTorchFunctionSubclass(), self._lock:
            lane.learn(self.thread.clock)
            for verb, tensors in (("reads", reads), ("writes", writes)):
                for tensor in tensors:
                    self._access(lane, verb, tensor)
            self._raise_found()

    def touch(self, reads: Iterable[torch.Tensor], writes: Iterable[torch.Tensor]) -> None:
        """Note accesses by the thread to host memory, and by the present lane to device memory. Raises Race."""
        with torch.DisableTorchFunctionSubclass(), self._lock:
            for verb, tensors in (("reads", reads), ("writes", writes)):
                for tensor in tensors:
                    actor = self.thread
                    if not has_memory(tensor):
                        continue
                    if not self._is_on_host(tensor):
                        # Only then, because a thread that works on the host gives the lane nothing to wait for.
                        actor = self.current
                        actor.learn(self.thread.clock)
                    self._access(actor, verb, tensor)
            self._raise_found()

    def learn(self, actor: Actor, clock: Clock) -> None:
        """Let `actor` learn `clock`."""
        with self._lock:
            actor.learn(clock)

    def clock_of(self, actor: Actor) -> Clock:
        """Return the clock of all works that `actor` was given so far, those of the calling thread included."""
        with self._lock:
            return self._behind(actor).clock

    def _behind(self, actor: Actor) -> Actor:
        """Return the actor of the next work that the calling thread would issue on `actor`."""
        found = Actor(actor.name)
        found.learn(actor.clock)
        found.learn(self.thread.clock)
        return found

    def other_thread(self, name: str) -> Actor:
        """Return the actor of a thread of ours. A thread with the name of an earlier one begins after its end."""
        with self._lock:
            return self._threads.setdefault(name, Actor(f"the thread {name!r}"))

    def _is_on_host(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu" and (not self._is_cpu or _mapped.at(tensor.data_ptr()) is not None)

    def _access(self, actor: Actor, verb: str, tensor: torch.Tensor) -> None:
        if not has_memory(tensor):
            return
        address, nbytes = tensor.data_ptr(), _extent_bytes(tensor)
        if not nbytes:
            return
        slab = _mapped.at(address) if tensor.device.type == "cpu" else None
        start = self._watched(tensor) if slab is None else slab[0]
        cell = self._cells.get(start if slab is None else slab)
        if cell is None:
            cell = self._cells[start if slab is None else slab] = Cell()
        self._judge(cell.add(actor, verb, (address - start, address - start + nbytes), self._source()))

    def _watched(self, tensor: torch.Tensor) -> int:
        """Return the address of the storage of `tensor`, whose end counts as a write from now on."""
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in self._alive:
            self._alive[address] = weakref.ref(storage, lambda _: self._freed(address))
        return address

    def _freed(self, address: int) -> None:
        with self._lock:
            self._alive.pop(address, None)
            cell = self._cells.pop(address, None)
            if cell is None:
                return
            # The next owner gets the memory in the order of compute, from a thread that knows of the free.
            race = cell.free(self._behind(self.compute), self._source())
            if race is not None:
                self._found.append(self._race(*race))

    def _judge(self, race: tuple[Access, Access] | None) -> None:
        if race is not None:
            raise self._race(*race)

    def _raise_found(self) -> None:
        if self._found:
            raise self._found.pop(0)

    def _race(self, first: Access, second: Access) -> Race:
        lines = [
            f"{access.source.action}, on {access.actor}, {access.verb} the memory in "
            f"{access.source.file}:{access.source.line}"
            for access in (first, second)
        ]
        nbytes = min(first.end, second.end) - max(first.start, second.start)
        return Race(lines[0], lines[1], nbytes, shown(tuple(self._history), (first, second)))

    def _source(self) -> Source:
        frame = inspect.currentframe()
        while frame is not None and frame.f_code.co_filename.startswith(_HIDDEN):
            frame = frame.f_back
        assert frame is not None, "every access comes from other code"
        return Source(self.here.action, self.here.moment, frame.f_code.co_filename, frame.f_lineno)


def _extent_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes from the first element of `tensor` to the end of its last."""
    if tensor.numel() == 0 or tensor.is_meta:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
