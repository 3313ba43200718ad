"""Run updates on the host beside the step, in a worker thread, and keep the memory of results that are still being
copied to the host.
"""

import atexit
import logging
import os
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from elixir_compile.base.process import Living
from elixir_compile.runtime.lanes import Event, Lanes

# ----------------------------------------------------------------------------------------------------------------------
# Updates whose results are on their way to the host, and the memory that their copies use until then.
#
#     landing = LandingUpdate(landed, ...)   `line` keeps the memory, whatever becomes of model and optimizer
#     landing.wait()                         host_waits(landed); the line lets go of the memory
#     the line ends                          its finalizer waits for all that has not landed, and lets go of it
#
# A copy to the host writes until `landed`, without a reference to its target. If the target is freed before, a slab
# is unlocked and unmapped under the copy.


@dataclass(frozen=True, slots=True, eq=False)
class _Landing:
    """Copies that use `memory` until `landed`."""

    landed: Event | None
    lanes: Lanes
    memory: Sequence[torch.Tensor]


class Landings:
    """The memory in use by copies to the host, for the updates of a line; thread-safe."""

    def __init__(self) -> None:
        self._open: dict[_Landing, None] = {}

    @property
    def memory(self) -> list[torch.Tensor]:
        """What copies may still use."""
        return [tensor for landing in tuple(self._open) for tensor in landing.memory]

    def keep(self, landed: Event | None, lanes: Lanes, memory: Sequence[torch.Tensor]) -> _Landing:
        """Keep `memory` until `land` or `land_all`, which wait for `landed`."""
        landing = _Landing(landed, lanes, memory)
        self._open[landing] = None
        return landing

    def land(self, landing: _Landing) -> None:
        """Wait for the copies of `landing`, and let go of their memory."""
        landing.lanes.host_waits(landing.landed)
        self._open.pop(landing, None)

    def land_all(self) -> None:
        """Wait for all copies, and let go of their memory."""
        for landing in tuple(self._open):
            self.land(landing)


class Line(Protocol):
    """The updates of an optimizer."""

    landings: Landings

    def check(self) -> None:
        """Raise the exception of a failed update; only once for each failure."""
        ...

    def fail(self, error: BaseException) -> None:
        """Keep `error` for the next `check`."""
        ...


class LandingUpdate:
    """An update whose results are on their way to the host; the worker thread has no part in it.

    The first reader that waits for it calls `finish`, which may raise an exception. Its maker adds it to a line.
    """

    let_compute_wait: Callable[[], None] | None = None

    def __init__(
        self,
        landed: Event | None,
        finish: Callable[[], None],
        line: Line,
        label: str,
        lanes: Lanes,
        memory: Sequence[torch.Tensor] = (),
    ) -> None:
        """`landed` is past when the results are on the host; None if they are there. Until then copies use `memory`."""
        self.label = label
        self._finish, self._line = finish, line
        self._landing: _Landing | None = line.landings.keep(landed, lanes, memory)
        # Re-entrant: a signal handler or a finalizer that runs while this thread waits may wait for the update too.
        self._lock = threading.RLock()

    @property
    def is_done(self) -> bool:
        """Whether a reader has waited."""
        return self._landing is None

    def then(self, follower: Callable[[], None]) -> bool:
        """Return False: the worker has nothing to do with this update."""
        return False

    def join(self) -> None:
        """Return: the worker has nothing to do with this update."""

    def wait(self) -> None:
        """Wait until the results have landed. Raises the exception of an update on the same line that failed."""
        with self._lock:
            if self._landing is not None:
                self._line.landings.land(self._landing)
            finish, self._finish = self._finish, lambda: None  # also done if a signal handler waited meanwhile
            try:
                finish()
            except BaseException as error:  # of any class: the line raises it
                self._line.fail(error)
            self._landing = None  # holds no tensors any more
        self._line.check()


# ----------------------------------------------------------------------------------------------------------------------
# Updates on the host beside the step: a worker thread for the whole process runs them in the order of queueing.
#
#     line = UpdateLine()                      each optimizer has one
#     update = line.queue(work, "update b1")   the worker runs work()
#     update.then(copy)                        the worker runs copy() right after work()
#     update.wait()                            returns when both are done
#
# If `work` raises an exception, the later updates of the same line are dropped, and the next wait on the line raises
# the exception, with the worker's frames in its traceback. When the process ends, queued updates run first. A fork
# waits for queued updates, and the child starts a worker thread of its own.


log = logging.getLogger("elixir_compile")

_SWITCH_INTERVAL_S = 5e-4
"""The interpreter's switch interval while updates run. Each return from a kernel to Python waits at most this long for
the interpreter. With Python's 5 ms, 191 short calls beside a busy thread took 1 s instead of 0.14 s."""

Job = Callable[[], Event | None]
"""Updates one bucket. Returns an event that is past when the results are on the device, or None if no device has to
wait."""


class PendingUpdate(Protocol):
    """An update of a bucket for whose results readers wait."""

    label: str
    let_compute_wait: Callable[[], None] | None
    """Makes compute of another thread wait for the results, after a `wait`; None if it need not."""

    @property
    def is_done(self) -> bool:
        """Whether no reader has to wait any more."""
        ...

    def then(self, follower: Callable[[], None]) -> bool:
        """Make the worker call `follower` right after the update; return False, without a call, if it will not."""
        ...

    def join(self) -> None:
        """Wait until the worker is done with the update."""
        ...

    def wait(self) -> None:
        """Wait until the update is done, and make compute of the calling thread wait for its results on the device.

        Raises the exception of an update on the same line that failed.
        """
        ...


class QueuedUpdate:
    """An update of a bucket, queued, running or done; made by `UpdateLine.queue`."""

    def __init__(self, work: Job, line: "UpdateLine", label: str, lanes: Lanes | None) -> None:
        self.label = label
        self._lanes = lanes
        self._go_on = None if lanes is None else lanes.hand_over()
        self._work: Job | None = work
        self._line = line
        self._num_failures = line.num_failures
        self._num_threads = torch.get_num_threads()
        self._done = threading.Event()
        self._followers: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self.let_compute_wait: Callable[[], None] | None = None
        """Makes compute of the calling thread wait for the results, after the work ran; None if it need not."""

    @property
    def is_done(self) -> bool:
        """Whether the update ran, failed or was dropped."""
        return self._done.is_set()

    def then(self, follower: Callable[[], None]) -> bool:
        """Make the worker call `follower` right after the work, as a part of the update; not called if the work fails.

        Return False, without calling `follower`, if the update is done already.
        """
        with self._lock:
            if self.is_done:
                return False
            self._followers.append(follower)
            return True

    def join(self) -> None:
        """Wait until the update is done or was dropped."""
        self._done.wait()

    def wait(self) -> None:
        """Wait until the update is done, and make compute of this thread wait for its results on the device.

        Raises the exception of an update on the same line that failed.
        """
        self.join()
        self._line.check()
        if self.let_compute_wait is not None:
            self.let_compute_wait()

    def run(self) -> None:
        """Do the work and the followers, unless an earlier update of the line failed; called on the worker."""
        work, self._work = self._work, None
        try:
            if work is not None and not self._line.drops(self._num_failures):
                # OpenMP's number of threads is a setting of each thread, and the worker started with the number that
                # was set last in any thread.
                if torch.get_num_threads() != self._num_threads:
                    torch.set_num_threads(self._num_threads)
                if self._go_on is not None:
                    self._go_on()
                self._hand_back(work())
                del work  # frees its gradients before the followers run
                while not self.is_done:
                    follower = None
                    with self._lock:  # a follower comes before the end, or is refused
                        if self._followers:
                            follower = self._followers.pop(0)
                        else:
                            self._done.set()
                    if follower is not None:
                        follower()
        except BaseException as error:  # of any class: the training thread raises it
            self._hand_back(None)
            error.add_note(f"raised by the host's `{self.label}`; updates queued after it were dropped")
            self._line.fail(error)
        finally:
            with self._lock:
                self._followers.clear()
                self._done.set()

    def _hand_back(self, event: Event | None) -> None:
        if self._lanes is not None:
            self.let_compute_wait = self._lanes.hand_back(event)


class UpdateLine:
    """The queued updates of an optimizer, and the exception of its last failed update."""

    def __init__(self) -> None:
        self._failure: BaseException | None = None
        self.num_failures = 0
        self._queued: list[PendingUpdate] = []
        self.landings = Landings()
        _lines.add(self)
        weakref.finalize(self, lambda: _worker.may_end()).atexit = False
        weakref.finalize(self, self.landings.land_all).atexit = False

    def drops(self, num_failures: int) -> bool:
        """Whether to drop an update that was queued when the line had `num_failures` failures.

        An update is dropped if an earlier update failed, even if a wait has raised that exception since.
        """
        return self._failure is not None or self.num_failures != num_failures

    def queue(self, work: Job, label: str, lanes: Lanes | None = None) -> QueuedUpdate:
        """Queue `work`, which uses `lanes`, after all queued updates; it runs with the caller's number of torch
        threads."""
        update = QueuedUpdate(work, self, label, lanes)
        self.add(update)
        _worker.put(update)
        return update

    def add(self, update: PendingUpdate) -> None:
        """Let `wait` wait for `update` too."""
        self._queued = [*(other for other in self._queued if not other.is_done), update]

    def wait(self) -> None:
        """Wait until all updates of this line are done. Raises the exception of a failed update."""
        for update in tuple(self._queued):
            update.wait()
        self._queued = []
        self.check()

    def check(self) -> None:
        """Raise the exception of a failed update; only once for each failure."""
        failure, self._failure = self._failure, None
        if failure is not None:
            try:
                raise failure
            finally:
                del failure  # see `ElixirError.renewed`

    def fail(self, error: BaseException) -> None:
        """Keep `error` for the next `check` or wait on this line."""
        self._failure, self.num_failures = error, self.num_failures + 1


_lines: "Living[UpdateLine]" = Living()


class _Worker:
    """The worker thread of the process: started by the first update, ended when no `UpdateLine` is left."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._updates: queue.SimpleQueue[QueuedUpdate | None] = queue.SimpleQueue()
        """Queued updates; None wakes the thread to check whether any line is left."""
        self._thread: threading.Thread | None = None
        self._num_open = 0
        self._idle = threading.Condition(threading.Lock())
        self._usual_interval_s = 0.0

    def is_this_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def put(self, update: QueuedUpdate) -> None:
        with self.lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="elixir updates", daemon=True)
                self._thread.start()
            with self._idle:
                self._num_open += 1
                if self._num_open == 1:
                    self._usual_interval_s = sys.getswitchinterval()
                    sys.setswitchinterval(_SWITCH_INTERVAL_S)
            self._updates.put(update)

    def may_end(self) -> None:
        """Make the thread check whether it is still needed; takes no lock, because garbage collections call it."""
        if self._thread is not None:
            self._updates.put(None)

    def drain(self) -> None:
        """Wait until no update is queued or running."""
        with self._idle:
            self._idle.wait_for(lambda: self._num_open == 0)

    def _work(self) -> None:
        # No code on this thread, finalizers included, may wait for a queued update, so reads of parameters must not go
        # through `__torch_function__`: see `awaited`.
        with torch.no_grad(), torch.DisableTorchFunctionSubclass():
            while True:
                update = self._updates.get()
                if update is not None:
                    update.run()
                    del update  # an idle thread holds no tensors
                    with self._idle:
                        self._num_open -= 1
                        if self._num_open == 0:
                            if sys.getswitchinterval() == _SWITCH_INTERVAL_S:  # else user code changed it meanwhile
                                sys.setswitchinterval(self._usual_interval_s)
                            self._idle.notify_all()
                    continue
                with self.lock:
                    # No line may be left, so that this thread can end; the first update of a new line starts a new
                    # thread. Not `len(_lines)`, which counts a line whose finalizers have not all run.
                    if next(iter(_lines), None) is None and self._updates.empty():
                        self._thread = None
                        return


_worker = _Worker()


def finish_updates() -> None:
    """Wait until no update of any optimizer is queued. Failures are raised later, by the waits of their optimizer."""
    _worker.drain()


@atexit.register
def _end() -> None:
    _worker.drain()
    for line in _lines:
        try:
            line.landings.land_all()
            line.check()
        except BaseException:
            log.exception("an update of the last step failed")


def _before_fork() -> None:
    # The child has no worker thread. An update queued now would never run there, and reads of its parameters would wait
    # forever.
    if not _worker.is_this_thread():
        _worker.drain()
    _worker.lock.acquire()


def _after_fork_in_child() -> None:
    global _worker
    _worker = _Worker()


os.register_at_fork(
    before=_before_fork, after_in_parent=lambda: _worker.lock.release(), after_in_child=_after_fork_in_child
)
