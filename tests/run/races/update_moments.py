"""Choose when the thread of the updates does a queued update, so that tests do not depend on how busy the machine is.

```text
  early    the update is done when the call that queues it returns
  late     the thread begins it when another thread waits for it, or for an update behind it
```

Of all moments at which a run may do an update, these are the first and the last.
"""

import itertools
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

import pytest

from elixir_compile.runtime.updates import QueuedUpdate, UpdateLine

_LONG_S = 60.0


class Moment(StrEnum):
    EARLY = "early"
    LATE = "late"


@contextmanager
def updates_at(moment: Moment) -> Iterator[None]:
    """Do the updates that are queued inside at their first or at their last `moment`; wait for them inside too."""
    with pytest.MonkeyPatch.context() as patch:
        (_do_early if moment is Moment.EARLY else _do_late)(patch)
        yield


def _do_early(patch: pytest.MonkeyPatch) -> None:
    queue = UpdateLine.queue

    def queue_and_let_run(self: UpdateLine, *args: Any) -> QueuedUpdate:
        update = queue(self, *args)
        until_s = time.monotonic() + _LONG_S
        while not update.is_done:  # not `update.wait`, because then the program would be behind the update
            assert time.monotonic() < until_s, "the thread of the updates does nothing"
            time.sleep(1e-4)
        return update

    patch.setattr(UpdateLine, "queue", queue_and_let_run)


def _do_late(patch: pytest.MonkeyPatch) -> None:
    create, run, wait = QueuedUpdate.__init__, QueuedUpdate.run, QueuedUpdate.wait
    numbers: weakref.WeakKeyDictionary[QueuedUpdate, int] = weakref.WeakKeyDictionary()
    """By update, how many were queued before it; the thread does them in this order."""
    counted = itertools.count()
    wanted = -1
    """The greatest number of an update for which a thread waits."""
    changed = threading.Condition()

    def create_numbered(self: QueuedUpdate, *args: Any) -> None:
        create(self, *args)
        numbers[self] = next(counted)

    def run_if_wanted(self: QueuedUpdate) -> None:
        with changed:
            assert changed.wait_for(lambda: wanted >= numbers[self], _LONG_S), "nobody waits for the update"
        run(self)

    def want_and_wait(self: QueuedUpdate) -> None:
        nonlocal wanted
        with changed:
            wanted = max(wanted, numbers.get(self, -1))
            changed.notify_all()
        wait(self)

    for name, method in (("__init__", create_numbered), ("run", run_if_wanted), ("wait", want_and_wait)):
        patch.setattr(QueuedUpdate, name, method)
