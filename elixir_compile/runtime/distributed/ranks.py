"""The ranks of a model: the shard of each rank, the collectives between ranks, over gloo by messages of our own, their
count in the ledger, and waits that notice a rank that died.
"""

import itertools
import logging
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from elixir_compile import compat
from elixir_compile.compat.platforms import platform_of
from elixir_compile.graph.ops.optimizers import has_master
from elixir_compile.graph.ops.shards import TensorAxis, is_over_data, numels_of_shards, shard_like, shard_numels
from elixir_compile.ir.bucket import Shards
from elixir_compile.ir.kinds import InnerVerb, Lane, Verb
from elixir_compile.ir.schedule import BucketRef, label
from elixir_compile.ir.share import Share, have_equal_shards
from elixir_compile.runtime.distributed.control import ControlChannel, OwnThread, Peers
from elixir_compile.runtime.distributed.errors import PeerFailed, RanksDiffer
from elixir_compile.runtime.lanes import CopyLane, Event
from elixir_compile.runtime.recording import Ledger

# ----------------------------------------------------------------------------------------------------------------------
# All-gather and reduce-scatter of rows over gloo's point-to-point messages, with one row for each rank.
#
# rank 0    gather   send own -> 1    receive row 1             reduce   send row 1 -> 1    receive into shard
# rank 1             send own -> 0    receive row 0                      send row 0 -> 0    receive into shard
#                                                                        own row + those received = own shard of the sum
#
# Gloo's own collectives hold and move more bytes: its reduce-scatter all-reduces a clone of all rows, and its all-
# gather receives into a second buffer. On 2 ranks of a CPU, 32 MB of rows took 125 ms and 36 ms by gloo's collectives,
# and 20 ms each by messages.
#
# Memory beside the rows: none for a gather. A reduce needs its shard, the size of a row, and with more than 2 ranks
# another row during the wait. If ranks have different weights in the mean, the receiver of a row multiplies it by the
# weight of its rank.


Rows = Sequence[torch.Tensor] | torch.Tensor
"""A matrix with a row for each rank, or a sequence of their rows, which may have different lengths. An empty row is not
sent."""
_NUM_TAGS = 2**20
"""Tags repeat after this many exchanges, far more than are ever in flight at once."""
_TAGS: "weakref.WeakKeyDictionary[distributed.ProcessGroup, Iterator[int]]" = weakref.WeakKeyDictionary()
"""The counter of exchanges of each group. Two models may use the same group, and no message of an exchange may be taken
for a message of another exchange."""


class Messenger:
    """Sends rows to the other ranks of `group` and receives rows from them.

    All ranks of `group` must start the same exchanges in the same order.
    """

    def __init__(self, group: "distributed.ProcessGroup") -> None:
        self._group = group
        self.rank = group.rank()
        num_ranks = group.size()
        self.others = [(self.rank - step) % num_ranks for step in range(1, num_ranks)]
        """The other ranks in descending order from this rank, so that no two ranks receive from the same rank first."""
        self._tags = _TAGS.setdefault(group, itertools.count())
        self.weights = (1.0,) * num_ranks
        """The weight of each rank's rows in a mean."""

    def new_tag(self) -> int:
        """Return the tag of the next exchange, by which gloo tells the messages of exchanges in flight apart."""
        return next(self._tags) % _NUM_TAGS

    def all_gather(self, rows: Rows, own: torch.Tensor) -> "Exchange":
        """Start filling row i of `rows` with the tensor `own` of rank i."""
        tag = self.new_tag()
        sends = [self.send(own, rank, tag) for rank in reversed(self.others) if own.numel()]
        receipts = [self.receive(rows[rank], rank, tag) for rank in self.others if rows[rank].numel()]
        rows[self.rank].copy_(own)
        return Exchange([*receipts, *sends])

    def reduce_scatter(self, shard: torch.Tensor, rows: Rows) -> "Reduction":
        """Start filling `shard` with the mean over ranks of this rank's row of `rows`, by the current weights."""
        return Reduction(self, shard, rows)

    def send(self, row: torch.Tensor, rank: int, tag: int) -> "distributed.Work":
        """Start sending `row` to `rank`."""
        return self._group.send([row], rank, tag)

    def receive(self, row: torch.Tensor, rank: int, tag: int) -> "distributed.Work":
        """Start receiving `row` from `rank`."""
        return self._group.recv([row], rank, tag)


def messenger_of(group: "distributed.ProcessGroup", device: torch.device) -> Messenger | None:
    """Return a messenger for rows on `device` in `group`, or None if the collectives of `group` are to be used."""
    is_gloo = device.type == "cpu" and "cpu:gloo" in distributed.get_backend_config(group)
    return Messenger(group) if is_gloo else None


class Exchange:
    """The messages of an all-gather in flight."""

    def __init__(self, messages: "list[distributed.Work]") -> None:
        self._messages = messages

    def wait(self) -> None:
        """Wait until all messages have arrived. Raises RuntimeError if a rank is dead or silent."""
        for message in self._messages:
            message.wait()
        self._messages = []


class Reduction(Exchange):
    """A reduce-scatter in flight: receives the rows of the other ranks one after another into its shard."""

    def __init__(self, messenger: Messenger, shard: torch.Tensor, rows: Rows) -> None:
        self._messenger, self._shard, self._own = messenger, shard, rows[messenger.rank]
        self._weights = messenger.weights
        self._tag = messenger.new_tag()
        sent = [rank for rank in reversed(messenger.others) if rows[rank].numel()]
        super().__init__([messenger.send(rows[rank], rank, self._tag) for rank in sent])
        self._receipt = messenger.receive(shard, messenger.others[0], self._tag) if shard.numel() else None

    def wait(self) -> None:
        """Wait until the shard is the mean. Raises RuntimeError if a rank is dead or silent."""
        self.complete()
        super().wait()

    def complete(self) -> None:
        """Make the shard the mean, if it is not yet: until then other ranks wait for this rank to receive their rows.

        Raises RuntimeError if a rank is dead or silent.
        """
        receipt, self._receipt = self._receipt, None
        if receipt is None:  # complete, or this rank has no shard of the sum
            return
        receipt.wait()
        first, *later = self._messenger.others
        scale_by_weight(self._shard, self._weights[first])
        total: torch.Tensor | None = None
        for rank in later:
            # Not in place, because other code may still read `rows` as a gradient.
            total = self._own_added(torch.empty_like(self._shard)) if total is None else total.add_(self._shard)
            self._messenger.receive(self._shard, rank, self._tag).wait()
            scale_by_weight(self._shard, self._weights[rank])
        if total is None:
            self._own_added(self._shard)
        else:
            self._shard.add_(total)
        self._shard.div_(len(self._weights))

    def _own_added(self, out: torch.Tensor) -> torch.Tensor:
        """Write the shard plus this rank's weighted row to `out`, and return `out`."""
        weight = self._weights[self._messenger.rank]
        if weight == 0.0:  # not multiplied, because the row may hold infinities or NaNs
            return out if out is self._shard else out.copy_(self._shard)
        return torch.add(self._shard, self._own, alpha=weight, out=out)


def scale_by_weight(grads: torch.Tensor, weight: float) -> None:
    """Multiply `grads` by `weight` in place; a weight of 0 also zeroes infinities and NaNs."""
    if weight == 0.0:
        grads.zero_()
    elif weight != 1.0:
        grads.mul_(weight)


# ----------------------------------------------------------------------------------------------------------------------
# The ranks of a model: the shard of each rank, the collectives between ranks, their count in the ledger, and waits
# that notice a rank that died.


# ----------------------------------------------------------------------------------------------------------------------
# The ledger in which a collective counts, with the bucket that it is for.


class Counted(NamedTuple):
    """The ledger for the counts of collectives, and the bucket in their labels."""

    ledger: Ledger
    bucket: BucketRef

    def span(self, verb: Verb | InnerVerb, nbytes: int) -> AbstractContextManager[object]:
        """Count a collective of `nbytes`; its `reduce` is counted with the sum on compute."""
        return self.ledger.span(Lane.REDUCE, label(verb, self.bucket), nbytes, times=int(verb is not Verb.REDUCE))


# ----------------------------------------------------------------------------------------------------------------------
# Collectives for which only a stream waits, polled while the host waits for copies of the device.
#
# `Work.wait` of NCCL makes the current stream wait and returns. If a rank dies, a host that then waits for the device
# hangs until NCCL's watchdog ends the process, without an exception of Python. `wait_for` looks at the collectives
# while it waits, and raises PeerFailed as soon as NCCL knows of an error, or after the timeout of the process group.


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
            timeout = compat.default_timeout() if self._timeout is None else self._timeout
            if time.monotonic() - began_s > timeout.total_seconds():
                for what in [*(what for _, what in self._newest.values()), *([] if behind is None else [behind])]:
                    with self._control.raising_peer_failed(what):
                        raise RuntimeError(f"timeout: not finished after {timeout.total_seconds():.0f} s")
            time.sleep(_POLL_S)
        self.raise_if_failed()

    def clear(self) -> None:
        """Forget all collectives, and let go of their outputs."""
        self._newest.clear()


# ----------------------------------------------------------------------------------------------------------------------
# The ranks of a model: the shard of each rank, and the collectives between the ranks.
#
#     mesh of n            n shards of every parameter; rank i has shard i
#     mesh of m x n        n shards of every parameter, m copies of each; rank (i, j) has shard j
#
# A gradient is the mean over all ranks. It is computed in fp32 for parameters with a master if the reduce dtype is
# fp32.


log = logging.getLogger("elixir_compile")

_PREMULTIPLIED = (torch.float32, torch.float64)
"""Dtypes that NCCL may multiply by a weight during the reduce. The weight has the dtype of the gradient, and rounding
it to 16 bits would be off by 0.2 %."""


class Collective:
    """A collective of `ranks` in flight; `what` names its tensors in errors."""

    def __init__(
        self,
        work: "distributed.Work | Exchange | _MeanOfCopies",
        what: str,
        ranks: "Ranks",
        reduces_in: "distributed.ProcessGroup | None" = None,
    ) -> None:
        """`reduces_in` is the process group of a reduce; None for a gather.

        A gather is not noted as unfinished, because its `Work` would keep the gathered parameters alive after their
        release. If it fails, a later reduce of the same process group fails too.
        """
        self.work, self.what, self._ranks, self._reduces_in = work, what, ranks, reduces_in
        ranks.under_way[self] = None

    def wait(self) -> None:
        """Make work that is issued from now on wait for it. Raises PeerFailed if a rank is dead or silent."""
        self._ranks.complete_until(self)
        self._ranks.under_way.pop(self, None)
        with self._ranks.control.raising_peer_failed(self.what):
            self.work.wait()
        if self._reduces_in is not None:
            last = self.work.mean if isinstance(self.work, _MeanOfCopies) else self.work
            self._ranks.unfinished.add(last, self.what, self._reduces_in)

    def complete(self) -> None:
        """Do what other ranks wait for, if that takes a call of this rank. Raises PeerFailed as `wait`."""
        if isinstance(self.work, Reduction | _MeanOfCopies):
            with self._ranks.control.raising_peer_failed(self.what):
                self.work.complete()

    def hold_stream(self) -> None:
        """Make work issued from now on on the current stream wait for it, which `wait` must still do for compute."""
        work = self.work.mean if isinstance(self.work, _MeanOfCopies) else self.work
        if isinstance(work, distributed.Work):
            work.wait()


class _MeanOfCopies:
    """An all-reduce of `own` over the ranks of `group`, after the reduce-scatter `reduced` has filled `own`.

    It starts at once, on `lane`, if the lane is asynchronous; else it runs in the wait.
    """

    def __init__(
        self,
        reduced: "distributed.Work | Exchange | _MeanOfCopies",
        own: torch.Tensor,
        group: "distributed.ProcessGroup",
        lane: CopyLane,
        thread: OwnThread,
    ) -> None:
        """`thread` does the all-reduce if the lane is not asynchronous."""
        self._reduced, self._own, self._group, self._thread = reduced, own, group, thread
        self._is_complete = lane.is_asynchronous
        self.mean: distributed.Work | None = None
        if lane.is_asynchronous:
            with lane.beside_compute():
                reduced.wait()
                self.mean = distributed.all_reduce(own, distributed.ReduceOp.AVG, group, async_op=True)

    def wait(self) -> None:
        """Make work that is issued from now on wait for it. Raises RuntimeError if a rank is dead or silent."""
        if self.mean is not None:
            self.mean.wait()
            return
        self.complete()
        if isinstance(self._reduced, Reduction):
            self._reduced.wait()

    def complete(self) -> None:
        """Run the all-reduce if it has neither run nor started. Raises RuntimeError as `wait`."""
        if self._is_complete:
            return
        self._is_complete = True
        if isinstance(self._reduced, Reduction):
            self._reduced.complete()
        else:
            self._reduced.wait()
        self._thread.run(lambda: distributed.all_reduce(self._own, distributed.ReduceOp.AVG, self._group))


def device_of(mesh: DeviceMesh) -> torch.device:
    """Return the device of this rank in `mesh`."""
    return platform_of(torch.device(mesh.device_type)).current()


def require_alike(samples: Mapping[int, int], fix: str) -> None:
    """Raise RanksDiffer with the advice `fix` unless all ranks weigh their batches by one number of `samples`."""
    first = next(iter(samples.values()))
    odd = [rank for rank, num in samples.items() if num != first]
    if odd:
        said = [f"rank {rank} weighs its batch by {num} samples" for rank, num in samples.items()]
        raise RanksDiffer(odd, said, fix)


class Ranks:
    """The ranks of `mesh`: shards along its last axis, and copies of each shard along the first axis of two.

    It has more than 15 attributes: the mesh and its groups, what sends messages over them, and the weights of ranks.
    """

    def __init__(self, mesh: DeviceMesh, tensor_axis: TensorAxis | None = None) -> None:
        """`tensor_axis` cuts parameters before these ranks do; None if nothing does."""
        self.mesh = mesh
        self.tensor_axis = tensor_axis
        self.num_shards = mesh.size(-1)
        self.num_ranks = mesh.size()
        self._shard_group = mesh.get_group(mesh.ndim - 1)
        self._copy_group = mesh.get_group(0) if mesh.ndim > 1 else None
        self._all_gather, self._reduce_scatter = compat.flat_collectives()
        self._messenger = messenger_of(self._shard_group, torch.device(mesh.device_type))
        self.peers = Peers(mesh.mesh.flatten().tolist() if tensor_axis is None else tensor_axis.ranks)
        """All ranks of the model: these, and those with other shards along the tensor axis."""
        self.control = self.peers.control
        """The control channel for training."""
        self._thread = OwnThread()
        """The thread for reduces of gloo; not that of the control channel, beside whose exchanges they may run."""
        self.weight = 1.0
        """The weight of this rank's gradients in the mean."""
        self._samples: tuple[int, ...] = ()
        """The number by which each rank weights its gradients, in the order of the mesh; empty if none does."""
        self._is_weighed = False
        """Whether these numbers differ."""
        self._own_collective = ""
        """A collective of the model itself between these ranks, in words; empty if its graphs have none."""
        self.shares: tuple[Share, ...] = ()
        """The share of each rank, if the model has shares, in the order of the mesh."""
        self.suggested_rows: tuple[int, ...] = ()
        """The rows of each rank with which the measured steps would have been shorter; empty if none are known."""
        self.warned_rows: set[int] = set()
        """The numbers of rows that a batch of this rank had against its share, of which it was warned."""
        self.reduces_in_fp32 = False
        """Whether gradients of parameters with a master are averaged in fp32, and stay in it."""
        self.unfinished = UnfinishedCollectives(self.control)
        """The reduces for which only a stream waits."""
        self.under_way: dict[Collective, None] = {}
        """The collectives that were started and not waited for, in order."""
        self._put_off: dict[object, Callable[[], None]] = {}
        """What starts each gather that was put off, by whoever waits for it, in order."""

    @property
    def num_copies(self) -> int:
        """The number of copies of each shard."""
        return self.num_ranks // self.num_shards

    @property
    def state(self) -> tuple[float, ...]:
        """The shard of every sharded parameter that each rank owns; empty if the ranks own equal shards."""
        return () if have_equal_shards(self.shares) else tuple(share.state for share in self.shares)

    def placements(self, *, is_sharded: bool) -> tuple[Placement, ...]:
        """Return the DTensor placements on the mesh of a parameter that is sharded, or else replicated."""
        return (*[Replicate()] * (self.mesh.ndim - 1), Shard(0) if is_sharded else Replicate())

    def shard_numels_of(self, param: torch.Tensor) -> Shards:
        """Return the number of elements in each shard of `param`; in each copy if `param` is replicated."""
        shard = None if self.tensor_axis is None else self.tensor_axis.shard_along(param)
        if shard is None:
            return numels_of_shards(param, self.num_shards)
        return (
            shard_numels(shard.shape, self.num_shards)
            if is_over_data(param)
            else Shards.equal(shard.shape.numel(), self.num_shards)
        )

    def reduced_dtype(self, param: torch.Tensor) -> torch.dtype:
        """Return the dtype in which the gradient of `param` is averaged."""
        return torch.float32 if self.reduces_in_fp32 and has_master(param) else param.dtype

    def put_off(self, of: object, start: Callable[[], None]) -> None:
        """Let `start`, which starts a gather, run later: before any other collective starts, so that all ranks start
        theirs in one order, or when `start_late` is called with `of`."""
        self._put_off[of] = start

    def start_late(self, last: object | None = None) -> None:
        """Start the gathers that were put off, in order: until that of `last`, if it is among them, or all."""
        while self._put_off and (last is None or last in self._put_off):
            self._put_off.pop(next(iter(self._put_off)))()

    def all_gather(self, rows: Sequence[torch.Tensor] | torch.Tensor, own: torch.Tensor, what: str) -> Collective:
        """Start filling row i of `rows` with shard i; `own` is the shard of this rank.

        `rows` is a matrix, or a sequence of tensors of different lengths.
        """
        with self.control.raising_peer_failed(what):
            if self._messenger is not None:
                work = self._messenger.all_gather(rows, own)
            elif not isinstance(rows, torch.Tensor):
                # NCCL sends tensors of different lengths in grouped broadcasts.
                work = distributed.all_gather(list(rows), own, group=self._shard_group, async_op=True)
                assert work is not None, "this process is in the group"
            else:
                work = self._all_gather(rows.view(-1), own, group=self._shard_group, async_op=True)
        return Collective(work, what, self)

    def weigh_by(self, samples: Sequence[int]) -> None:
        """Weight the gradients of each rank by its number in `samples`, in the order of the mesh, from now on.

        Nothing is exchanged: all ranks must give the same numbers. Raises ValueError if no rank has samples, and
        RanksDiffer if their numbers differ and the model itself has collectives between them.
        """
        if min(samples) < 0 or sum(samples) == 0:
            raise ValueError(f"the ranks have {samples} samples: needs 0 or more each, and one at least")
        self._require_alike(samples, self._own_collective)
        self._samples, self._is_weighed = tuple(samples), len(set(samples)) > 1
        weights = {
            rank: num * len(samples) / sum(samples) for rank, num in zip(self.control.ranks, samples, strict=True)
        }
        self.weight = weights[self.control.ranks[self.control.rank]]
        if self._messenger is not None:
            members = distributed.get_process_group_ranks(self._shard_group)
            self._messenger.weights = tuple(weights[rank] for rank in members)

    def note_own_collective(self, collective: str) -> None:
        """Record that a graph of the model has the `collective`, in words, between these ranks. Raises RanksDiffer if
        they weight their gradients by different numbers, now or later."""
        self._require_alike(self._samples, collective)
        self._own_collective = collective

    def _require_alike(self, samples: Sequence[int], collective: str) -> None:
        if collective and samples:
            fix = (
                f"The model itself has {collective}: the loss of a rank reaches parameters through other ranks, so its "
                "gradients are added up with the weights of those. Give every rank as many rows, without `weigh` or "
                "with the same number."
            )
            require_alike(dict(zip(self.control.ranks, samples, strict=True)), fix)

    def applies_weight(self, dtype: torch.dtype) -> bool:
        """Whether `reduce_scatter` itself applies the rank's weight to gradients of `dtype`."""
        is_premultiplied = dtype in _PREMULTIPLIED and self.weight != 0.0
        return self._messenger is not None or is_premultiplied or not self._is_weighed

    def complete_until(self, collective: Collective | None = None) -> None:
        """Complete what was started before `collective`, or all that is under way, in its order.

        Ranks start collectives in one order, but plans of their own let them wait at other places. A rank that blocked
        in a later collective, while another one waited for it to receive the rows of an earlier reduce, would block
        both for good: gloo's messages need the receiver's call.
        """
        for earlier in tuple(self.under_way):
            if earlier is collective:
                return
            earlier.complete()

    def drain(self) -> None:
        """Wait for the collectives in flight; called after an exception.

        Otherwise later collectives would receive their messages. If a wait fails, the error is logged and not raised,
        because the user must see the first exception. Gathers that were put off are dropped.
        """
        self._put_off.clear()
        for collective in tuple(self.under_way):
            try:
                collective.wait()
            except PeerFailed as error:
                log.warning("After an exception, %s did not arrive: %s", collective.what, error)
                self.under_way.clear()
                self.unfinished.clear()
                return

    def reduce_scatter(self, own: torch.Tensor, rows: Sequence[torch.Tensor] | torch.Tensor, what: str) -> Collective:
        """Start filling `own` with this rank's row of the mean of `rows` over the ranks of the mesh's last axis.

        `rows` is as in `all_gather`. The caller must apply the weight to `rows` first unless `applies_weight`.
        """
        self.start_late()
        with self.control.raising_peer_failed(what):
            if self._messenger is not None:
                work = self._messenger.reduce_scatter(own, rows)
            else:
                mean = distributed.ReduceOp.AVG
                if self._is_weighed and own.dtype in _PREMULTIPLIED:
                    mean = compat.scaled_sum(self.weight / self.num_shards)
                if isinstance(rows, torch.Tensor):
                    work = self._reduce_scatter(own, rows.view(-1), op=mean, group=self._shard_group, async_op=True)
                else:  # grouped reduces
                    work = distributed.reduce_scatter(own, list(rows), mean, self._shard_group, async_op=True)
                    assert work is not None, "this process is in the group"
        return Collective(work, what, self, self._shard_group)

    def average_copies(self, own: torch.Tensor, reduced: Collective, lane: CopyLane) -> Collective:
        """Start averaging `own`, which `reduced` fills, over the ranks with the same shard, on `lane`.

        The caller waits for the returned collective instead of `reduced`.
        """
        assert self._copy_group is not None, "a mesh with one axis has no copies of shards"
        self.under_way.pop(reduced, None)
        with self.control.raising_peer_failed(reduced.what):
            work = _MeanOfCopies(reduced.work, own, self._copy_group, lane, self._thread)
        averaged = Collective(work, reduced.what, self, self._copy_group)
        if lane.is_asynchronous:
            self.unfinished.add(reduced.work, reduced.what, self._shard_group)
        return averaged

    def means(
        self, tensors: Sequence[torch.Tensor], dtype: torch.dtype, counted: "Counted | None" = None
    ) -> list[torch.Tensor]:
        """Return the means of the gradients `tensors` over all ranks in `dtype`, with the same bits on each rank.

        This takes an all-reduce along each axis of the mesh, counted by `counted`. The means are new tensors, because
        the backward may still read a gradient that it handed out, such as the gradient of another term of a sum.
        """
        self.start_late()
        self.complete_until()
        numels = [tensor.numel() for tensor in tensors]
        flat = torch.empty(sum(numels), dtype=dtype, device=tensors[0].device)
        pieces = flat.split(numels)
        for piece, tensor in zip(pieces, tensors, strict=True):
            piece.copy_(tensor.reshape(-1))
        scale_by_weight(flat, self.weight)
        axes = (
            (Verb.REDUCE, self._shard_group, self.num_shards),
            (InnerVerb.AVERAGE, self._copy_group, self.num_copies),
        )
        for verb, group, num_ranks in axes:
            if group is not None and num_ranks > 1:
                reduce = partial(distributed.all_reduce, flat, op=distributed.ReduceOp.AVG, group=group)
                with (
                    nullcontext() if counted is None else counted.span(verb, flat.nbytes),
                    self.control.raising_peer_failed("gradients"),
                ):
                    reduce() if flat.device.type != "cpu" else self._thread.run(reduce)
        return [mean.view(tensor.shape) for tensor, mean in zip(tensors, pieces, strict=True)]

    def mean_sums(
        self,
        positions: Sequence[int],
        grads: Sequence[torch.Tensor],
        dtype: torch.dtype,
        ledger: Ledger,
        bucket: BucketRef,
    ) -> tuple[list[int], list[torch.Tensor]]:
        """Return the distinct `positions` in ascending order, and for each the mean over all ranks of its gradient sum.

        Gradient i of `grads` belongs to the parameter at `positions[i]` of a bucket. Sums are made and sorted first,
        because ranks with different graphs have the gradients in another order and number. The means have `dtype`;
        `ledger` counts the collectives as those of `bucket`.
        """
        sums: dict[int, torch.Tensor] = {}
        for position, grad in sorted(zip(positions, grads, strict=True), key=lambda pair: pair[0]):
            sums[position] = sums[position] + grad if position in sums else grad
        return list(sums), self.means(list(sums.values()), dtype, Counted(ledger, bucket))

    def mean_shard(self, grad: torch.Tensor, param: torch.Tensor, name: str) -> torch.Tensor:
        """Return this rank's shard of the mean of `grad`, the full gradient of `param`, over all ranks.

        Raises RanksDiffer if another rank has the gradient of a parameter with another name than `name`.
        """
        self.complete_until()
        self.control.check_same_op(name, "a gradient")
        (mean,) = self.means([grad], self.reduced_dtype(param))
        axis = self.tensor_axis
        is_along = axis is not None and axis.shard_along(param) is not None
        return axis.shard_of(mean, param) if axis is not None and is_along else shard_like(mean, param)
