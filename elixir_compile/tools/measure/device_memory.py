"""Tell the kinds of the blocks of an accelerator's allocator in a step, and draw them on the clock of the device.

```text
  host      asks for fwd.0   allocates   asks for fwd.1                the order of the allocator, the phases of kinds
                 |               |            |
  device         |   starts fwd.0    ... starts fwd.1                  the axis of the spans
```

The allocator gives a block when the host asks, long before the device writes to it. So kinds are told on the clock of
the host: its phases, and the moments at which it asked for the work. A block is drawn between the starts on the device
of what was asked for before it and after it, in the order of the allocator, which is exact.
"""

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import replace

from elixir_compile.compat.platforms import BlockRecord
from elixir_compile.ir.kinds import Lane
from elixir_compile.ir.record import Span
from elixir_compile.runtime.recording import Taken, anchor
from elixir_compile.tools.measure.lifetimes import live_by_kind
from elixir_compile.tools.measure.phases import StepTimes
from elixir_compile.tools.measure.step_memory import AllocatorClock
from elixir_compile.tools.study.observed import OTHER, Live


class DeviceMemory:
    """The blocks of an accelerator's allocator from `start` to `stop`: a `StepMemory`."""

    def __init__(self, blocks: BlockRecord, kinds: dict[int, str]) -> None:
        """`kinds` are the kinds of blocks that are there before the step, by address. `blocks` are recorded already."""
        self._blocks = blocks
        self._resident = {address: (nbytes, kinds.get(address, OTHER)) for address, nbytes in blocks.nbytes_at.items()}
        self._began = anchor()
        self._events: Sequence[tuple[int, int, int]] | None = None

    def start(self) -> None:
        """Do nothing: the allocator records already."""

    def stop(self) -> None:
        """End the recording."""
        self._events = self._blocks.stop()

    def live(
        self,
        times: StepTimes,
        spans: Sequence[Span],
        taken: Iterable[Taken],
    ) -> Live | None:
        """See `StepMemory`."""
        if self._events is None:
            return None

        clock = AllocatorClock(self._began, times.began_s)
        live = live_by_kind(
            self._resident,
            [(clock.at_s(at_ns), address, nbytes) for at_ns, address, nbytes in self._events],
            times.asked,
            [_asked(span) for span in spans],
            [(clock.at_s(block.at_ns), block.address, block.label) for block in taken],
        )
        return drawn_by_device(live, times, spans)


def _asked(span: Span) -> Span:
    """Return `span` at the moment at which the host asked for its work; nobody knows how long the asking took."""
    return span if span.issued_s is None else replace(span, start_s=span.issued_s, end_s=span.issued_s)


def drawn_by_device(live: Live, times: StepTimes, spans: Iterable[Span]) -> Live:
    """Return `live`, whose times are those of the host, at times of the device, in the same order.

    Between two moments that are known on both clocks, times are in proportion.
    """
    known = [*times.moments]
    known += [
        (span.issued_s, span.start_s) for span in spans if span.issued_s is not None and span.lane is Lane.COMPUTE
    ]
    asked_s, device_s = [0.0], [0.0]
    for asked, device in sorted(known):
        if asked > asked_s[-1]:
            asked_s.append(asked)
            device_s.append(max(device, device_s[-1]))
    return replace(live, at_s=tuple(_between(asked_s, device_s, at_s) for at_s in live.at_s))


def _between(from_s: Sequence[float], to_s: Sequence[float], at_s: float) -> float:
    """Return the value at `at_s` of the line through the points (`from_s`, `to_s`); the nearest end outside of it."""
    after = bisect.bisect_right(from_s, at_s)
    if after in (0, len(from_s)):
        return to_s[min(after, len(to_s) - 1)]
    share = (at_s - from_s[after - 1]) / (from_s[after] - from_s[after - 1])
    return to_s[after - 1] + share * (to_s[after] - to_s[after - 1])
