"""Copy buckets from the host or the disk to the device, and count the calls of a step, of which the first gathers
them.
"""

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from elixir_compile.base.errors import (
    IncompleteStep,
    TooManyForwards,
)
from elixir_compile.base.process import Living
from elixir_compile.ir import BucketRef, Lane, Verb, label
from elixir_compile.ir.cost import GATHER_STAGING_BYTES, NUM_GATHER_STAGING
from elixir_compile.ir.schedule import ONCE, Calls
from elixir_compile.runtime.bucket import RunningBucket
from elixir_compile.runtime.disk_params import DiskBucket, ParamPiece
from elixir_compile.runtime.disk_store import ReadAhead
from elixir_compile.runtime.distributed.sharded import ShardedBucket, ShardedDiskBucket, ShardGather
from elixir_compile.runtime.lanes import Event, Lanes, Transfer
from elixir_compile.runtime.recording import Ledger

# ----------------------------------------------------------------------------------------------------------------------
# Copies of buckets from the host to the device.
#
# If the host is still updating the bucket, the copy starts when the update ends: the thread that runs host updates (the
# update worker, see `updates`) issues it. The thread of the step continues meanwhile:
#
#     gather b1    allocates device memory on the compute stream            worker: update b1 | copy b1 |
#     run h.0      does not read b1, so it runs at once
#     wait b1      returns once the copy is issued; raises the exception of the update if it failed
#
# All ranks gather a sharded bucket in the order of the program, no matter which rank ends its update first: the gather
# waits for this rank's update before it sends, and so does every other rank. A shard on disk is sent when it was read:
# before the next collective or at the wait, and the program goes on until then.


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class Gather(Transfer):
    """The copy of a bucket, or of this rank's shard of it, to the device, issued once: by the update worker or by the
    waiting thread."""

    bucket: RunningBucket
    flat: torch.Tensor
    lanes: Lanes
    ledger: Ledger
    allocated: Event | None
    """Past when the earlier uses of the memory of `flat` are done."""
    graph: str
    """The captured graph that gathers."""
    ahead: "GathersAhead | None" = None
    """Reads the pieces of a bucket whose home is the disk; None for one in memory."""
    is_shard: bool = False
    """Whether it is this rank's shard, which all ranks gather next."""
    is_called_off: bool = False
    reading: "Future[None] | None" = None
    """The call of `begin` on the thread that reads files; None if the home is memory."""
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
            if self.reading is not None:
                self.reading.result()
            with self._lock:
                # The worker made no copy: the update failed and raised elsewhere, or this gather was called off.
                if self._versions is None:
                    self._copy()
            if not self.is_shard:
                self.bucket.hold(self.values, self._versions or [])
            self._is_held = True
        return self.event

    def call_off(self) -> None:
        """Keep the worker from starting this copy; a copy that it has started is on its stream when this returns."""
        with self._lock:
            self.is_called_off = True

    def _copy(self) -> None:
        h2d = self.lanes.h2d
        nbytes = self.flat.nbytes if self.is_shard else self.bucket.spec.nbytes
        with (
            h2d.beside_compute(self.allocated),
            self.ledger.span(Lane.H2D, self.label, nbytes, times=not self.is_shard, graph=self.graph),
        ):
            self._copy_home()
        self.event, self._versions = h2d.mark(), self.bucket.versions()
        self.bucket.home_read = self.event

    def _copy_home(self) -> None:
        """Issue the copies from the home to the flat buffer; from the disk in pieces, of which those that follow are
        read beside the copy of a piece."""
        h2d = self.lanes.h2d
        if self.ahead is None or not isinstance(self.bucket, DiskBucket):
            h2d.copy(self.flat, self.bucket.flat_home())
            return
        reads = self.ahead.reads
        for piece in self.ahead.pieces_of(self.bucket):
            views = reads.take(piece)
            try:
                for target, own in piece.parts(views):
                    h2d.copy(self.flat[target], own)
                self.lanes.host_waits(h2d.mark())  # the next piece is read into another buffer meanwhile
            finally:
                reads.give_back(piece)


class _Guess(NamedTuple):
    """The pieces of a gather that was announced."""

    bucket: "weakref.ref[DiskBucket]"
    num_changes: int
    pieces: Sequence[ParamPiece]

    def is_right(self, bucket: DiskBucket) -> bool:
        """Return whether the pieces are those of `bucket`, which was neither placed nor updated since."""
        return self.bucket() is bucket and self.num_changes == bucket.file.num_changes


class GathersAhead:
    """The pieces of the next gathers from the disk, announced to `reads` before the device has memory for them.

    A step gathers as the step before, forward and backward, so two gathers in a row say which one follows, and whether
    the bucket is updated before: then it is announced behind its update. It is a guess: if it is wrong, bytes were read
    that nobody takes. Its methods run on the thread that reads files.
    """

    def __init__(self, reads: ReadAhead, ledger: Ledger) -> None:
        self.reads = reads
        self._ledger = ledger
        self._next: weakref.WeakValueDictionary[tuple[int, int], DiskBucket] = weakref.WeakValueDictionary()
        """The bucket that came behind two others, by their ids."""
        self._behind_update: set[tuple[int, int]] = set()
        """Two others, by their ids, if the bucket behind them was updated since its gather before."""
        self._gathered: weakref.WeakKeyDictionary[DiskBucket, int] = weakref.WeakKeyDictionary()
        """How often the values of each bucket had changed when it was gathered last."""
        self._last = (0, 0)
        self._announced: deque[_Guess] = deque()

    def pieces_of(self, bucket: DiskBucket) -> Sequence[ParamPiece]:
        """Return the pieces of `bucket`, whose gather begins, and announce those of gathers behind it."""
        self._next[self._last] = bucket
        if self._gathered.get(bucket) in (None, bucket.file.num_changes):
            self._behind_update.discard(self._last)
        else:
            self._behind_update.add(self._last)
        self._gathered[bucket] = bucket.file.num_changes
        self._last = self._last[1], id(bucket)
        guess = self._announced.popleft() if self._announced else None
        if guess is None or not guess.is_right(bucket):
            self._announced.clear()
            guess = self._announce(bucket)
        last = self._last
        for later in self._announced:
            last = last[1], id(later.bucket())
        # Behind as many pieces as there are buffers, no more are read before the first is taken.
        while sum(len(later.pieces) for later in self._announced) < NUM_GATHER_STAGING:
            following = self._next.get(last)
            if following is None or not following.queued.is_empty:
                break
            has_changed = self._gathered.get(following) != following.file.num_changes
            if last in self._behind_update and not has_changed:  # it is updated before it is gathered
                break
            self._announced.append(self._announce(following))
            last = last[1], id(following)
        return guess.pieces

    def _announce(self, bucket: DiskBucket) -> _Guess:
        num_changes, pieces = bucket.file.num_changes, bucket.pieces()
        for number, piece in enumerate(pieces):
            piece.time_in(self._ledger, BucketRef(bucket.spec.id), piece.nbytes, number)
        self.reads.announce(pieces)
        return _Guess(weakref.ref(bucket), num_changes, pieces)


class Gathers:
    """Starts the copies of an executor's buckets from the host or the disk to the device."""

    def __init__(self, lanes: Lanes, ledger: Ledger) -> None:
        self._lanes, self._ledger = lanes, ledger
        self._late: Living[Gather] = Living()
        self._ahead: GathersAhead | None = None
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="elixir gathers")
        """The thread that reads files; it starts with the first gather from the disk."""

    def begin(self, bucket: RunningBucket) -> Transfer:
        """Start copying `bucket` to the device; if an update of it is queued, the copy starts when the update ends."""
        name = label(Verb.GATHER, BucketRef(bucket.spec.id))
        if isinstance(bucket, ShardedBucket):
            bucket.queued.wait()
            copy = bucket.current_copy()
            if copy is not None:
                return Transfer(name, None, copy)
            read = None
            if isinstance(bucket, ShardedDiskBucket):
                dtype = bucket.slots[0].param.dtype
                nbytes = bucket.own_numel * dtype.itemsize
                read = self._gather(bucket, name, nbytes, lambda flat: (flat.view(dtype),), is_shard=True)
                self._read(read, bucket)
            return ShardGather(bucket, self._lanes, self._ledger, read)
        if not bucket.is_away:
            bucket.queued.wait()
        copy = bucket.current_copy() if bucket.queued.is_empty else None
        if copy is not None:
            return Transfer(name, None, copy)
        gather = self._gather(bucket, name, bucket.flat_bytes, bucket.cut)
        if isinstance(bucket, DiskBucket):
            self._read(gather, bucket)
        elif bucket.queued.follow(gather.begin):
            self._late.add(gather)
        else:
            gather.ensure_issued()
        return gather

    def _gather(
        self,
        bucket: RunningBucket,
        name: str,
        nbytes: int,
        cut: Callable[[torch.Tensor], tuple[torch.Tensor, ...]],
        *,
        is_shard: bool = False,
    ) -> Gather:
        """Return a copy of `bucket`, or of this rank's shard, to `nbytes` on the device, which has not begun. `cut`
        returns its values in these bytes."""
        # Compute uses and frees them. The program waits for the copy before both.
        flat = self._lanes.empty(nbytes)
        self._ledger.takes(name, (flat,))
        with torch.DisableTorchFunctionSubclass():  # `cut` reads shapes only, not the values of a queued update
            values = cut(flat)
        return Gather(
            name,
            None,
            values,
            bucket=bucket,
            flat=flat,
            lanes=self._lanes,
            ledger=self._ledger,
            allocated=self._lanes.mark_compute(),
            graph=self._ledger.graph,
            is_shard=is_shard,
        )

    def _read(self, gather: Gather, bucket: DiskBucket) -> None:
        """Start reading `bucket` from the disk, behind its queued update and earlier gathers; then those that came next
        before."""
        bucket.check_unchanged()
        if self._ahead is None:
            reads = ReadAhead(NUM_GATHER_STAGING, GATHER_STAGING_BYTES, pin=self._lanes.pins)
            self._ahead = GathersAhead(reads, self._ledger)
        gather.ahead = self._ahead
        self._late.add(gather)
        hand_over = self._lanes.hand_over()

        def read_on() -> None:
            hand_over()
            bucket.settle()
            gather.begin()

        gather.reading = self._reader.submit(read_on)

    def call_off(self) -> None:
        """Keep the worker from starting any copy; called after an exception, when nothing waits for the copies."""
        for gather in self._late:
            gather.call_off()


# ----------------------------------------------------------------------------------------------------------------------
# Which call of a step runs: the first gathers buckets, the last releases them and reduces the gradients of all.
#
#   forward    number 1 2 3 4           = backward passes that have ended + forwards that wait + 1
#   backward   number 1 2 3 4           = backward passes that have ended + 1
#
# The numbers follow from the forwards that wait and the backward passes that have ended, so a forward whose result is
# dropped, or whose backward asks for gradients of inputs alone, is no call of the step. torch's pipelines run such a
# forward to learn the shapes of tensors.


@dataclass(slots=True)
class _Progress:
    """The calls of the running step of a graph."""

    num_done: int = 0
    """Backward passes that have ended."""
    waiting: set[int] = field(default_factory=set)
    """The numbers of the forwards whose backward has not begun; a forward that was dropped may still be among them."""
    full: set[int] = field(default_factory=set)
    """The numbers of full forwards (see `ir.plan`), of which some may wait no longer."""


class StepCalls:
    """The calls of the steps of an executor, counted for each of its graphs."""

    def __init__(self, name: str) -> None:
        """`name` is the name of the model in messages."""
        self.spec: Calls = ONCE
        """How often each step calls the model."""
        self.is_last = True
        """Whether the program that runs now is the last of its half in the step."""
        self.trains = True
        """Whether the backward that runs now asks for gradients of parameters; else none is summed or reduced."""
        self.num_steps = 0
        """Steps of several calls that have ended."""
        self._running = self._ended_at = 0
        """The number of the last call that ran, and of the one in which an exception ended the step before, or 0."""
        self._name = name
        self._last: _Progress | None = None
        """The calls to which the forward that ran last belongs."""
        self._progress: weakref.WeakKeyDictionary[object, _Progress] = weakref.WeakKeyDictionary()

    @property
    def is_under_way(self) -> bool:
        """Whether a step has had its first backward, and not its last."""
        return any(progress.num_done for progress in list(self._progress.values()))

    def has_begun(self, graph: object, alive: Collection[int]) -> bool:
        """Return whether a step of `graph` has begun and not ended; `alive` are the numbers of outstanding forwards."""
        progress = self._progress.get(graph)
        return progress is not None and (progress.num_done > 0 or not progress.waiting.isdisjoint(alive))

    def require_whole_step(self, alive: Collection[int]) -> None:
        """Raise IncompleteStep if a step of any graph has begun and not ended: not all its gradients are summed up."""
        for graph, progress in list(self._progress.items()):
            if progress.num_done and self.has_begun(graph, alive):
                num_waiting = len(progress.waiting.intersection(alive))
                raise IncompleteStep(self._name, progress.num_done, num_waiting, self.spec.num)

    def number_of_forward(self, graph: object | None, alive: Collection[int]) -> int:
        """Return the number in its step of the forward of `graph` that is about to run.

        0 if no calls are counted: a step has one, or `graph` is None because it does not train. `alive` are the numbers
        of outstanding forwards.
        """
        if graph is None or self.spec.num == 1:
            return 0
        progress = self._progress.get(graph, _Progress())
        return progress.num_done + len(progress.waiting.intersection(alive)) + 1

    def number_of_backward(self, graph: object, number: int) -> int:
        """Return the number in its step of the backward of the forward `number` of `graph`.

        0 if it is none of the step: that forward had its backward, or an exception ended its step.
        """
        progress = self._progress.get(graph)
        return progress.num_done + 1 if progress is not None and number in progress.waiting else 0

    def words(self, number: int) -> str:
        """Return the call `number` in words for a message that begins with the name of the model; empty for 0."""
        if number == 0:
            return ""
        ended = f"; an exception in call {self._ended_at} ended the step before" if self._ended_at else ""
        return f" (call {number} of {self.spec.num}{ended})"

    @contextlib.contextmanager
    def forward(self, graph: object, alive: Collection[int]) -> Iterator[None]:
        """Run the program of a forward of `graph`.

        `alive` are the numbers of outstanding forwards. Raises TooManyForwards if more of them wait than `prepare` was
        told.
        """
        progress = self._progress.setdefault(graph, _Progress())
        progress.waiting &= set(alive)
        progress.full &= progress.waiting
        number = self._running = self.number_of_forward(graph, alive)
        if number > self.spec.num or len(progress.waiting) >= self.spec.outstanding:
            numbers = (len(progress.waiting), progress.num_done, self.spec.num, self.spec.outstanding)
            raise TooManyForwards(self._name, *numbers)
        with self._as(is_last=number == self.spec.num, trains=True):
            yield
        self._last = progress

    def waits(self, graph: object, number: int) -> bool:
        """Return whether the forward `number` of `graph` waits for its backward."""
        progress = self._progress.get(graph)
        return progress is not None and number in progress.waiting

    def num_full(self, graph: object | None, alive: Collection[int]) -> int:
        """Return how many full forwards of `graph` wait for their backward; `alive` are the numbers of outstanding
        forwards, and `graph` is None for inference."""
        progress = None if graph is None else self._progress.get(graph)
        return 0 if progress is None else len((progress.waiting & progress.full).intersection(alive))

    def note_forward(self, number: int, *, is_lean: bool) -> None:
        """Note that the forward that ran last, number `number` of all, waits for its backward, and whether it is a
        lean one."""
        if self._last is not None:
            self._last.waiting.add(number)
            if not is_lean:
                self._last.full.add(number)

    @contextlib.contextmanager
    def backward(self, graph: object, number: int, *, trains: bool) -> Iterator[None]:
        """Run the program of the backward of the forward `number` of `graph`.

        If it does not train, because it asks for no gradient of a parameter, it is no call of the step.
        """
        progress = self._progress.setdefault(graph, _Progress())
        is_call = trains and number in progress.waiting
        progress.waiting.discard(number)
        self._running = progress.num_done + is_call
        is_alone = not is_call and not progress.num_done and not progress.waiting
        with self._as(is_last=is_alone or (is_call and progress.num_done + 1 == self.spec.num), trains=trains):
            yield
        if is_call:
            progress.num_done += 1
        if progress.num_done == self.spec.num:
            progress.num_done = 0
            self.num_steps += 1
            self._ended_at = 0

    def abandon(self) -> None:
        """Begin a new step with the next forward; called after an exception."""
        if self._progress:
            self._ended_at = self._running
        self._progress.clear()
        self._last = None

    @contextlib.contextmanager
    def _as(self, *, is_last: bool, trains: bool) -> Iterator[None]:
        before = self.is_last, self.trains
        self.is_last, self.trains = is_last, trains
        try:
            yield
        finally:
            self.is_last, self.trains = before
