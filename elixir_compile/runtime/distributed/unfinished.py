"""Collectives for which only a stream waits, polled before the host waits for the device.

`Work.wait` of NCCL makes the current stream wait and returns. If a rank dies, a host that then waits for the device
hangs until NCCL's watchdog ends the process, without an exception of Python. `settle` looks at each collective instead,
and raises PeerFailed as soon as NCCL knows of an error, or after the timeout of the process group.
"""

import time
from collections import deque
from datetime import timedelta

from torch import distributed

from elixir_compile import compat
from elixir_compile.runtime.distributed.control import ControlChannel

_POLL_S = 5e-5
"""Between two looks at a collective."""


class UnfinishedCollectives:
    """The collectives for which streams wait, in the order of their waits."""

    def __init__(self, control: ControlChannel, timeout: timedelta | None = None) -> None:
        """`control` says which ranks are meant in errors; `timeout` None: the timeout of the default process group."""
        self._control = control
        self._timeout = timeout
        self._works: deque[tuple[distributed.Work, str]] = deque()

    def add(self, work: object, what: str) -> None:
        """Note `work` on the tensors `what`, if it is a collective of torch that is not finished."""
        if isinstance(work, distributed.Work) and not work.is_completed():
            self._works.append((work, what))

    def settle(self) -> None:
        """Block the calling thread until all collectives are finished.

        Raises PeerFailed if one fails, or if it is not finished within the timeout.
        """
        if not self._works:
            return
        timeout = compat.default_timeout() if self._timeout is None else self._timeout
        ends_s = time.monotonic() + timeout.total_seconds()
        while self._works:
            work, what = self._works.popleft()
            with self._control.raising_peer_failed(what):
                while not work.is_completed():
                    if time.monotonic() > ends_s:
                        raise RuntimeError(f"timeout: not finished after {timeout.total_seconds():.0f} s")
                    time.sleep(_POLL_S)
                error = work.exception()
                if error is not None:
                    raise RuntimeError(f"connection: {error}")

    def clear(self) -> None:
        """Forget all collectives: a rank is gone."""
        self._works.clear()
