"""Updates that the host runs beside the step: one worker thread per process, in the order in which they were queued.

    line = UpdateLine()                      one per optimizer
    update = line.queue(work, "update b1")   the worker runs work()
    update.then(copy)                        the worker runs copy() right behind it
    update.wait()                            returns when both are done

When `work` raises, what is queued behind it on the same line is dropped, and whoever waits on the line next gets the
exception, with the worker's frames in its traceback. A process that ends first runs what is queued; a fork waits for
it, and the child starts a worker of its own.
"""

import atexit
import logging
import os
import queue
import sys
import threading
import weakref
from collections.abc import Callable

import torch

from elixir_compile.runtime.streams import wait_on_compute

log = logging.getLogger("elixir_compile")

_SWITCH_INTERVAL_S = 5e-4
"""While updates run. Each return from a kernel to Python waits for the interpreter at most this long: with Python's
5 ms, 191 short calls beside a busy thread took 1 s instead of 0.14 s."""

Work = Callable[[], "torch.cuda.Event | None"]
"""Updates one bucket; returns an event behind which the device has its results, None where there is nothing to wait
for."""


class QueuedUpdate:
    """One update on its way."""

    def __init__(self, work: Work, line: "UpdateLine", label: str) -> None:
        self.label = label
        self._work: Work | None = work
        self._line = line
        self._num_failures = line.num_failures
        self._num_threads = torch.get_num_threads()
        self._done = threading.Event()
        self._followers: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._event: torch.cuda.Event | None = None

    @property
    def is_done(self) -> bool:
        """Whether it ran, failed or was dropped."""
        return self._done.is_set()

    def then(self, follower: Callable[[], None]) -> bool:
        """Let the worker run `follower` behind the work, unless that fails, and be done only then; return False where
        the update is done already."""
        with self._lock:
            if self.is_done:
                return False
            self._followers.append(follower)
            return True

    def wait(self) -> None:
        """Return when the update is done, and compute issued from now on runs behind it; raises what failed on its
        line."""
        self._done.wait()
        self._line.check()
        if self._event is not None:
            wait_on_compute(self._event, self._event.device)

    def run(self) -> None:
        """Do the work, on the worker, unless an update before it on its line failed."""
        work, self._work = self._work, None
        try:
            if work is not None and not self._line.drops(self._num_failures):
                # OpenMP counts per thread, and threads to come count as the last one that was set: as this one does.
                if torch.get_num_threads() != self._num_threads:
                    torch.set_num_threads(self._num_threads)
                self._event = work()
                del work  # with its gradients, which followers need not keep
                while (follower := self._next_or_done()) is not None:
                    follower()
        except BaseException as error:  # whatever it is, the training thread gets it
            error.add_note(f"raised by the host's `{self.label}`; updates queued behind it were dropped")
            self._line.fail(error)
        finally:
            with self._lock:
                self._followers.clear()
                self._done.set()

    def _next_or_done(self) -> Callable[[], None] | None:
        with self._lock:
            if self._followers:
                return self._followers.pop(0)
            self._done.set()
            return None


class UpdateLine:
    """The updates of one optimizer."""

    def __init__(self) -> None:
        self._failure: BaseException | None = None
        self.num_failures = 0
        self._queued: list[QueuedUpdate] = []
        _lines.add(self)
        weakref.finalize(self, _let_worker_end).atexit = False

    def drops(self, num_failures: int) -> bool:
        """Whether an update failed that nobody was told of yet, or since one was queued when there were `num_failures`:
        what is behind a failure does not run, however soon somebody is told."""
        return self._failure is not None or self.num_failures != num_failures

    def queue(self, work: Work, label: str) -> QueuedUpdate:
        """Let the worker do `work` behind everything queued so far, with as many of torch's threads as the caller."""
        update = QueuedUpdate(work, self, label)
        self._queued = [*(other for other in self._queued if not other.is_done), update]
        _worker.put(update)
        return update

    def wait(self) -> None:
        """Return when everything queued on this line is done; raises what failed."""
        for update in tuple(self._queued):
            update.wait()
        self._queued = []
        self.check()

    def check(self) -> None:
        """Raise what failed, once."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def fail(self, error: BaseException) -> None:
        """Keep `error` for whoever waits next."""
        self._failure, self.num_failures = error, self.num_failures + 1


_lines: "weakref.WeakSet[UpdateLine]" = weakref.WeakSet()


def _let_worker_end() -> None:
    _worker.may_end()


class _Worker:
    """The thread, started when first needed; it ends when no line is left."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._updates: queue.SimpleQueue[QueuedUpdate | None] = queue.SimpleQueue()
        """What is queued; None wakes the thread to see whether any line is left."""
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
        """Let the thread see whether it is still needed; called from inside garbage collections, so without a lock."""
        if self._thread is not None:
            self._updates.put(None)

    def drain(self) -> None:
        """Return when nothing is queued."""
        with self._idle:
            self._idle.wait_for(lambda: self._num_open == 0)

    def _work(self) -> None:
        # Whatever runs here, a finalizer of something else too, must not wait for a queued update: see `pending`.
        with torch.no_grad(), torch.DisableTorchFunctionSubclass():
            while True:
                update = self._updates.get()
                if update is not None:
                    update.run()
                    del update  # an idle thread holds no tensors
                    self._end_one()
                elif self._has_ended():
                    return

    def _has_ended(self) -> bool:
        """Whether no line is left that could queue an update; the next one starts another thread."""
        with self.lock:
            # Not `len(_lines)`: it counts a line whose finalizers have not all run.
            is_needed = next(iter(_lines), None) is not None or not self._updates.empty()
            if not is_needed:
                self._thread = None
            return not is_needed

    def _end_one(self) -> None:
        with self._idle:
            self._num_open -= 1
            if self._num_open == 0:
                if sys.getswitchinterval() == _SWITCH_INTERVAL_S:  # else somebody set it meanwhile
                    sys.setswitchinterval(self._usual_interval_s)
                self._idle.notify_all()


_worker = _Worker()


def finish_updates() -> None:
    """Return when nothing is queued, of any optimizer; what failed is raised where it is waited for."""
    _worker.drain()


def _end() -> None:
    _worker.drain()
    for line in _lines:
        try:
            line.check()
        except BaseException:
            log.exception("an update of the last step failed")


def _before_fork() -> None:
    # A child has no worker: what is queued now would never run there, and its parameters would wait for ever.
    if not _worker.is_this_thread():
        _worker.drain()
    _worker.lock.acquire()


def _after_fork_in_child() -> None:
    global _worker
    _worker = _Worker()


atexit.register(_end)
os.register_at_fork(
    before=_before_fork, after_in_parent=lambda: _worker.lock.release(), after_in_child=_after_fork_in_child
)
