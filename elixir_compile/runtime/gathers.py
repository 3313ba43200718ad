"""Copies of buckets from the host to the device. Where the host is still updating the bucket, the copy begins when that
ends, and the thread that runs the step goes on meanwhile:

    gather b1    memory is taken, behind what the device computes now;    worker: update b1 | copy b1 |
    run h.0      needs no b1, and runs
    wait b1      returns when the copy was issued; raises what failed in the update

A bucket that several ranks share is gathered by all of them in the order of the program, whichever has updated first:
the gather itself waits for this rank's update, and those of other ranks do before they send.
"""

import threading
import weakref
from dataclasses import dataclass, field

import torch

from elixir_compile.ir import Lane
from elixir_compile.runtime.bucket import RunningBucket
from elixir_compile.runtime.distributed.sharded import ShardedBucket, ShardGather
from elixir_compile.runtime.ledger import Ledger
from elixir_compile.runtime.streams import CopyStream, Transfer, mark_compute


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class Gather(Transfer):
    """The copy of one bucket, issued once, by the worker or by who waits."""

    bucket: RunningBucket
    flat: torch.Tensor
    lanes: "Gathers"
    allocated: "torch.cuda.Event | None"
    """Behind this, what used the memory of `flat` before is done."""
    is_called_off: bool = False
    _versions: list[int] | None = None
    """Of what was copied; None before."""
    _is_held: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self) -> None:
        """Start copying, unless nobody will wait for it."""
        with self._lock:
            if not self.is_called_off:
                self._copy()

    def ensure_issued(self) -> "torch.cuda.Event | None":
        """Return the event of the copy once it was issued; raises what failed in the update."""
        if not self._is_held:
            self.bucket.await_update()
            with self._lock:
                if self._versions is None:  # The update failed, which was raised elsewhere, or this was called off.
                    self._copy()
            self.bucket.hold(self.values, self._versions or [])
            self._is_held = True
        return self.event

    def call_off(self) -> None:
        """Let the worker never begin; a copy that it began is on its stream when this returns."""
        with self._lock:
            self.is_called_off = True

    def _copy(self) -> None:
        lanes = self.lanes
        with lanes.h2d.beside_compute(self.allocated), lanes.ledger.span(Lane.H2D, self.label):
            self.flat.copy_(self.bucket.flat_home(), non_blocking=True)
        self.event, self._versions = lanes.h2d.mark(), self.bucket.versions()


class Gathers:
    """The gathers of one executor on `device`."""

    def __init__(self, device: torch.device, h2d: CopyStream, ledger: Ledger) -> None:
        self.h2d, self.ledger = h2d, ledger
        self._device = device
        self._late: weakref.WeakSet[Gather] = weakref.WeakSet()

    def begin(self, bucket: RunningBucket) -> Transfer:
        """Start copying `bucket` to the device, or let the end of its update do so."""
        label = f"gather {bucket.spec.id}"
        if isinstance(bucket, ShardedBucket):
            bucket.await_update()
            if bucket.is_whole():
                return Transfer(label, None, bucket.whole)
            return ShardGather(bucket, self.h2d, self.ledger)
        if not bucket.is_on_host:
            bucket.await_update()
        if not bucket.is_updating and bucket.is_whole():
            return Transfer(label, None, bucket.whole)
        # Allocated on the compute stream, where it is used and freed; the copy only borrows it and is waited for before
        # either.
        flat = torch.empty(bucket.flat_home().numel(), dtype=torch.uint8, device=self._device)
        with torch.DisableTorchFunctionSubclass():  # nothing here reads what a queued update writes
            values = bucket.cut(flat)
        allocated = mark_compute(self._device)
        gather = Gather(label, None, values, bucket=bucket, flat=flat, lanes=self, allocated=allocated)
        if bucket.follow(gather.begin):
            self._late.add(gather)
        else:
            gather.ensure_issued()
        return gather

    def call_off(self) -> None:
        """Let the worker begin nothing more: nobody will wait for it."""
        for gather in tuple(self._late):
            gather.call_off()
