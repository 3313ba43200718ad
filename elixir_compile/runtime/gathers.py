"""Copies of buckets from the host to the device.

If the host is still updating the bucket, the copy starts when the update ends: the thread that runs host updates (the
update worker, see `updates`) issues it. The thread of the step continues meanwhile:

    gather b1    allocates device memory on the compute stream            worker: update b1 | copy b1 |
    run h.0      does not read b1, so it runs at once
    wait b1      returns once the copy is issued; raises the exception of the update if it failed

All ranks gather a sharded bucket in the order of the program, no matter which rank ends its update first: the gather
waits for this rank's update before it sends, and so does every other rank.
"""

import threading
from dataclasses import dataclass, field

import torch

from elixir_compile.base.living import Living
from elixir_compile.ir import BucketRef, Lane, Verb, label
from elixir_compile.runtime.bucket import RunningBucket
from elixir_compile.runtime.distributed.sharded import ShardedBucket, ShardGather
from elixir_compile.runtime.lanes import Event, Lanes, Transfer
from elixir_compile.runtime.ledger import Ledger


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class Gather(Transfer):
    """The copy of a bucket to the device, issued once: by the update worker or by the waiting thread."""

    bucket: RunningBucket
    flat: torch.Tensor
    lanes: Lanes
    ledger: Ledger
    allocated: Event | None
    """Past when the earlier uses of the memory of `flat` are done."""
    graph: str
    """The captured graph that gathers."""
    is_called_off: bool = False
    _versions: list[int] | None = None
    """Versions of the parameters that were copied; None before the copy."""
    _is_held: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self) -> None:
        """Start the copy, unless it was called off; runs on the update worker."""
        with self._lock:
            if not self.is_called_off:
                self._copy()

    def ensure_issued(self) -> Event | None:
        """Issue the copy if the worker has not, and return its event. Raises the update's exception if it failed."""
        if not self._is_held:
            self.bucket.queued.wait()
            with self._lock:
                # The worker made no copy: the update failed and raised elsewhere, or this gather was called off.
                if self._versions is None:
                    self._copy()
            self.bucket.hold(self.values, self._versions or [])
            self._is_held = True
        return self.event

    def call_off(self) -> None:
        """Keep the worker from starting this copy; a copy that it has started is on its stream when this returns."""
        with self._lock:
            self.is_called_off = True

    def _copy(self) -> None:
        h2d = self.lanes.h2d
        nbytes = self.bucket.spec.nbytes
        with (
            h2d.beside_compute(self.allocated),
            self.ledger.span(Lane.H2D, self.label, nbytes, graph=self.graph),
        ):
            h2d.copy(self.flat, self.bucket.flat_home())
        self.event, self._versions = h2d.mark(), self.bucket.versions()
        self.bucket.home_read = self.event


class Gathers:
    """Starts the copies of an executor's buckets from the host to the device."""

    def __init__(self, lanes: Lanes, ledger: Ledger) -> None:
        self._lanes, self._ledger = lanes, ledger
        self._late: Living[Gather] = Living()

    def begin(self, bucket: RunningBucket) -> Transfer:
        """Start copying `bucket` to the device; if an update of it is queued, the copy starts when the update ends."""
        name = label(Verb.GATHER, BucketRef(bucket.spec.id))
        if isinstance(bucket, ShardedBucket):
            bucket.queued.wait()
            copy = bucket.current_copy()
            return Transfer(name, None, copy) if copy is not None else ShardGather(bucket, self._lanes, self._ledger)
        if not bucket.is_on_host:
            bucket.queued.wait()
        copy = bucket.current_copy() if bucket.queued.is_empty else None
        if copy is not None:
            return Transfer(name, None, copy)
        # Compute uses and frees it. The program waits for the copy before both.
        flat = self._lanes.empty(bucket.flat_home().numel())
        self._ledger.takes(name, (flat,))
        with torch.DisableTorchFunctionSubclass():  # `cut` reads shapes only, not the values of a queued update
            values = bucket.cut(flat)
        allocated = self._lanes.mark_compute()
        gather = Gather(
            name,
            None,
            values,
            bucket=bucket,
            flat=flat,
            lanes=self._lanes,
            ledger=self._ledger,
            allocated=allocated,
            graph=self._ledger.graph,
        )
        if bucket.queued.follow(gather.begin):
            self._late.add(gather)
        else:
            gather.ensure_issued()
        return gather

    def call_off(self) -> None:
        """Keep the worker from starting any copy; called after an exception, when nothing waits for the copies."""
        for gather in self._late:
            gather.call_off()
