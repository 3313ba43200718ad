"""Work beside Python's program order: streams, events, and the copies and collectives that they order.

interface      `Lanes`, the calls of the runtime, and the promise of each call
plain          lanes without streams: a CPU
accelerator    a stream for each lane: CUDA, and every other device for which torch has streams
transfer       a copy in flight, from its start to its wait

The runtime has the same code for all implementations, which `lanes_for` chooses once per executor. Tests have one more,
which finds accesses without an order: `tests/races/checked.py`.
"""

from elixir_compile.runtime.lanes.choice import lanes_for
from elixir_compile.runtime.lanes.interface import Announced, CopyLane, Event, Lanes, TimedEvent, Waitable
from elixir_compile.runtime.lanes.transfer import LateTransfer, Transfer

__all__ = ["Announced", "CopyLane", "Event", "Lanes", "LateTransfer", "TimedEvent", "Transfer", "Waitable", "lanes_for"]
