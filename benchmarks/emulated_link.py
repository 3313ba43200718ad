"""Emulated links: a copy takes its bytes / rate seconds on a lane of its own, beside compute, as on a real link.

The bytes are copied when the copy is issued, in the memory of this machine. Whoever waits for the copy sleeps until
the link would have delivered it. Copies of one direction follow each other, and the two directions are independent:

    compute   issue a | run .. | wait a ~~~~ sleep | run ..
    link      [ a: bytes / rate              ][ b ..

    to_device, to_host = emulate_host_link(2e8)     copies between host and device, before a model is prepared
    lane = emulate_network(2e8)                     collectives of Elixir on gloo ranks
    lane = emulate_network_of(model, 2e8)           collectives of a model under `fully_shard`
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed
from torch.distributed.fsdp import FSDPModule

from elixir_compile import compat
from elixir_compile.runtime import executor
from elixir_compile.runtime.distributed.ranks import Messenger
from elixir_compile.runtime.lanes import Plain, PlainLane


class Lane:
    """A direction of a link, which delivers one copy after another; without a rate, at once."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0
        self._lock = threading.Lock()
        self.num_sent = 0
        self.nbytes = 0
        """All bytes so far."""

    def send(self, nbytes: int, issued_s: float) -> "Arrival":
        """Return the arrival of `nbytes` whose copy was issued at `issued_s`, in seconds of `time.perf_counter`."""
        with self._lock:
            self.num_sent += 1
            self.nbytes += nbytes
            if self._bytes_per_s is not None:
                self._free_s = max(self._free_s, issued_s) + nbytes / self._bytes_per_s
            return Arrival(self._free_s)

    def last(self) -> "Arrival":
        """Return the arrival of all copies so far."""
        return Arrival(self._free_s)


class Arrival:
    """The time at which copies have arrived. It stands for a CUDA event."""

    def __init__(self, at_s: float) -> None:
        self.at_s = at_s

    def synchronize(self) -> None:
        """Sleep until the copies have arrived."""
        left_s = self.at_s - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)


class EmulatedLane(PlainLane):
    """Copies in one direction between host and device over a `Lane`."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._issued = threading.local()

    @contextmanager
    def behind_compute(self, after: Arrival | None = None) -> Iterator[None]:
        self._issued.at_s = max(time.perf_counter(), 0.0 if after is None else after.at_s)
        yield

    beside_compute = behind_compute

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        super().copy(target, source)
        self._lane.send(target.nbytes, self._issued.at_s)

    def mark(self) -> Arrival:
        return self._lane.last()

    def synchronize(self) -> None:
        self._lane.last().synchronize()


class EmulatedLanes(Plain):
    """The lanes of a CPU, whose copies go over `to_device` and `to_host`."""

    def __init__(self, device: torch.device, to_device: Lane, to_host: Lane) -> None:
        super().__init__(device)
        self.h2d, self.d2h = EmulatedLane(to_device), EmulatedLane(to_host)

    def compute_waits(self, event: Arrival | None) -> None:
        if event is not None:
            event.synchronize()

    host_waits = compute_waits


def emulate_host_link(bytes_per_s: float | None) -> tuple[Lane, Lane]:
    """Let executors made from now on copy over two lanes, to the device and to the host; return the lanes.

    If `bytes_per_s` is None, the lanes only count bytes.
    """
    lanes = Lane(bytes_per_s), Lane(bytes_per_s)
    executor.lanes_for = lambda device: EmulatedLanes(device, *lanes)
    return lanes


class DelayedWork(distributed.Work):
    """A collective that is done when `inner` is and `arrival` is past."""

    def __init__(self, inner: Any, arrival: Arrival) -> None:
        super().__init__()
        self._inner, self._arrival = inner, arrival

    def wait(self, timeout: object = None) -> bool:
        if self._inner is not None:
            self._inner.wait()
        self._arrival.synchronize()
        return True


def emulate_network(bytes_per_s: float | None) -> Lane:
    """Delay Elixir's all-gathers and reduce-scatters over gloo from now on, on one lane; return the lane.

    The lane counts the bytes that this rank receives. If `bytes_per_s` is None, it only counts.
    """
    lane = Lane(bytes_per_s)

    def delayed(start: Callable) -> Callable:
        def exchange(self: Messenger, to: torch.Tensor, source: torch.Tensor) -> DelayedWork:
            arrival = _sent(lane, to, source)
            return DelayedWork(start(self, to, source), arrival)

        return exchange

    Messenger.all_gather = delayed(Messenger.all_gather)
    Messenger.reduce_scatter = delayed(Messenger.reduce_scatter)
    return lane


def emulate_network_of(model: torch.nn.Module, bytes_per_s: float | None) -> Lane:
    """Delay the collectives of `model`, which is under `fully_shard`, on one lane as in `emulate_network`.

    As on a GPU, all-gathers run beside compute, and a reduce-scatter is waited for at the end of the backward: the
    caller waits for `Lane.last` before the optimizer.
    """
    lane = Lane(bytes_per_s)
    gather, reduce = compat.flat_collectives()

    class Collective:
        """A collective as `fully_shard` calls it."""

        def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            return torch.empty(*size, dtype=dtype, device=device)

    class Gather(Collective):
        def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False):
            arrival = _sent(lane, output_tensor, input_tensor)
            return DelayedWork(gather(output_tensor, input_tensor, group=group, async_op=True), arrival)

    class Reduce(Collective):
        def __call__(
            self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
        ) -> None:
            _sent(lane, output_tensor, input_tensor)
            reduce(output_tensor, input_tensor, group=group, op=op)

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(Gather())
            module.set_custom_reduce_scatter(Reduce())
    return lane


def _sent(lane: Lane, *rows: torch.Tensor) -> Arrival:
    """Return the arrival of a collective: of all rows, the larger of `rows`, a rank receives all but its own."""
    num_ranks = distributed.get_world_size()
    return lane.send(max(each.nbytes for each in rows) * (num_ranks - 1) // num_ranks, time.perf_counter())
