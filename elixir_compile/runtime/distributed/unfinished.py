"""Collectives for which only a stream waits, polled while the host waits for copies of the device.

`Work.wait` of NCCL makes the current stream wait and returns. If a rank dies, a host that then waits for the device
hangs until NCCL's watchdog ends the process, without an exception of Python. `wait_for` looks at the collectives while
it waits, and raises PeerFailed as soon as NCCL knows of an error, or after the timeout of the process group.
"""

import time
from datetime import timedelta

from torch import distributed

from elixir_compile import compat
from elixir_compile.runtime.distributed.control import ControlChannel
from elixir_compile.runtime.lanes import Event

_POLL_S = 5e-5
"""Between two looks at an event."""


class UnfinishedCollectives:
    """The newest collective of each process group, until it is finished.

    A process group does its collectives in the order of issue, so an earlier one is finished, or has failed, if the
    newest is. Earlier ones are not kept, because a `Work` of NCCL keeps its output alive.
    """

    def __init__(self, control: ControlChannel, timeout: timedelta | None = None) -> None:
        """`control` says which ranks are meant in errors; `timeout` None: the timeout of the default process group."""
        self._control = control
        self._timeout = timeout
        self._newest: dict[distributed.ProcessGroup, tuple[distributed.Work, str]] = {}

    def add(self, work: object, what: str, group: "distributed.ProcessGroup") -> None:
        """Note that `work` on the tensors `what` is the newest collective of `group`; an exchange of ours is finished.

        Raises PeerFailed if an earlier collective has failed.
        """
        self.raise_if_failed()
        if isinstance(work, distributed.Work):
            self._newest[group] = work, what

    def raise_if_failed(self) -> None:
        """Forget the collectives that are finished. Raises PeerFailed if one has failed."""
        for group, (work, what) in tuple(self._newest.items()):
            if work.is_completed():
                del self._newest[group]
                with self._control.raising_peer_failed(what):
                    work.wait()  # of a finished collective: returns at once, or raises the error

    def wait_for(self, event: Event | None, behind: str | None = None) -> None:
        """Block the calling thread until `event` is past; it does not wait for collectives that `event` is not after.

        `behind` says on which tensors collectives work that are not noted and that `event` may be after, as gathers in
        a forward; None if there are none.

        Raises PeerFailed if a collective fails meanwhile, or is not finished within the timeout.
        """
        began_s = time.monotonic()
        while event is not None and not event.query():
            self.raise_if_failed()
            self._raise_if_late(time.monotonic() - began_s, behind)
            time.sleep(_POLL_S)
        self.raise_if_failed()

    def _raise_if_late(self, waited_s: float, behind: str | None) -> None:
        timeout = compat.default_timeout() if self._timeout is None else self._timeout
        if waited_s <= timeout.total_seconds():
            return
        for what in [*(what for _, what in self._newest.values()), *([] if behind is None else [behind])]:
            with self._control.raising_peer_failed(what):
                raise RuntimeError(f"timeout: not finished after {timeout.total_seconds():.0f} s")

    def clear(self) -> None:
        """Forget all collectives, and let go of their outputs."""
        self._newest.clear()
