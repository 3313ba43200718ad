"""One bucket of an executor without a model, and when the thread of the updates does a queued update."""

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import pytest
import torch
from torch import nn

from elixir_compile.ir import Bucket, BucketId, Placement, Shards, StorageId, Tier, Update, Verb
from elixir_compile.optim.adamw_rule import AdamWRule
from elixir_compile.optim.update import Updater
from elixir_compile.runtime.bucket import RunningBucket
from elixir_compile.runtime.executor import Executor
from elixir_compile.runtime.updates import QueuedUpdate, UpdateLine

# ----------------------------------------------------------------------------------------------------------------------
# One bucket of an executor without a model, and what programs and updates do with it.


CPU = torch.device("cpu")
B0 = BucketId("b0")
LONG_S = 5.0


class Home(nn.Module):
    """One bucket of two parameters, and updates that wait for `gate` and add one to each element."""

    def __init__(self, tier: Tier = Tier.HOST, *, for_training: bool = True, device: torch.device = CPU) -> None:
        super().__init__()
        self.executor = Executor(device, "home")
        self.own = nn.ParameterList(torch.full((size,), 1.0, device=device) for size in (3, 5))
        for index, param in enumerate(self.own):
            self.executor.add_slot(f"p{index}", param)
        self.adopt(tier, for_training=for_training)
        self.updater = Updater(AdamWRule())
        self.line = self.updater.line
        self.gate = threading.Event()

    def adopt(self, tier: Tier = Tier.HOST, *, for_training: bool) -> None:
        spec = Bucket(
            id=B0, params=(StorageId("p0"), StorageId("p1")), numel=8, nbytes=32, state_nbytes=0, dtype="float32",
            trainable=True, shard_numels=Shards.of((8,)),
        )  # fmt: skip
        placement = Placement(bucket=B0, param=tier, optim=Tier.HOST, resident=False)
        self.executor.buckets.adopt([spec], [placement], for_training=for_training)

    def move_away(self) -> None:
        """Move a parameter as user code does, and let the next forward bring it home."""
        with torch.DisableTorchFunctionSubclass():
            self.own[0].data = self.own[0].data.clone()
            self.executor.buckets.return_drifted()

    @property
    def lanes(self) -> Any:
        return self.executor.lanes

    @property
    def bucket(self) -> Any:
        return self.executor.buckets[B0]

    @property
    def slots(self) -> list[Any]:
        return [self.executor.slots[f"p{index}"] for index in range(2)]

    @property
    def values(self) -> list[torch.Tensor]:
        with torch.DisableTorchFunctionSubclass():
            return [param.detach() for param in self.own]

    def queue(self, grads: Sequence[torch.Tensor] = (), *, fails: bool = False) -> QueuedUpdate:
        """Queue an update that reads `grads`."""
        weights, lanes, read = self.values, self.lanes, self.bucket.home_read

        def work() -> None:
            assert self.gate.wait(LONG_S)
            lanes.host_waits(read)
            lanes.touches(grads, weights)
            for weight in weights:
                weight.add_(1)
            if fails:
                raise ArithmeticError("the kernel fell over")

        update = self.line.queue(work, "update b0", lanes)
        self.bucket.queued.add(update, self.own)
        return update

    def race_free(self) -> None:
        """Raise a race that a free has shown."""
        self.lanes.touches((self.lanes.empty(8),))

    def backward(self, num_graphs: int = 1, *, waits: bool, reads: bool = True, has_gate: bool = False) -> None:
        """Run a backward of so many graphs, each of which makes a gradient of ones and offloads it.

        `waits`: whether the program of a graph waits for the copy, or leaves that to the end of the backward.
        `reads`: whether it reads the parameters. `has_gate`: whether autograd asks for the gradients behind the graphs.
        """
        in_backward(self.executor, _Program(self, num_graphs, waits, reads, has_gate).run)

    def graph(self, *, waits: bool, reads: bool) -> None:
        """Do what the program of a graph does with the gradients."""
        lanes, device = self.lanes, self.executor.device
        grads = [torch.ones(param.shape, device=device) for param in self.own]
        lanes.touches((), grads)
        self.executor.reduce(B0, [0, 1], grads)
        grads.clear()
        transfer = self.executor.offload(B0)
        if waits:
            self.executor.wait(transfer)
        del transfer
        if reads:  # as for another layer that reads the bucket
            self.executor.wait(self.executor.gather(B0))
            self.executor.release(B0)

    def accumulate(self) -> None:
        """Add the gradients that are handed over to those of the parameters, as autograd does, which looks at no
        `__torch_function__`."""
        handed = self.executor.gradients.hand_over(self.slots)
        with torch.DisableTorchFunctionSubclass(), torch.no_grad():
            for param, grad in zip(self.own, handed, strict=True):
                if grad is not None:
                    assert param.grad is not None, "an earlier backward has made a gradient"
                    self.lanes.touches((grad,), (param.grad,))
                    param.grad.add_(grad)

    def close_after(self, update: Update, verb: Verb | None) -> None:
        """Let gradients be final after `verb`, for updates at this moment."""
        self.bucket.update, self.bucket.closes = update, verb


@dataclass(frozen=True, slots=True)
class _Program:
    """What a backward does; see `Home.backward`."""

    home: Home
    num_graphs: int
    waits: bool
    reads: bool
    has_gate: bool

    def run(self) -> None:
        for _ in range(self.num_graphs):
            self.home.graph(waits=self.waits, reads=self.reads)
        if self.has_gate:
            self.home.accumulate()


def in_backward(executor: Executor, run: Callable[[], None]) -> None:
    """Call `run` in a backward of autograd for all leaves, as the backward of a graph of `executor`."""
    _Graphs.apply(executor.gradients.sentinel, run).backward()


def write_behind(executor: Executor, bucket: RunningBucket) -> None:
    """Let the worker write the parts as an update does, which knows of no wait for the gather but its own."""
    read, lanes, line = bucket.home_read, executor.lanes, UpdateLine()

    def work() -> None:
        lanes.host_waits(read)
        lanes.touches((), [slot.own for slot in bucket.slots])

    line.queue(work, "update", lanes).wait()


class _Graphs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sentinel: torch.Tensor, run: Callable[[], None]) -> torch.Tensor:
        ctx.run = run
        return sentinel.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor, None]:
        ctx.run()
        return grads[0].reshape(1), None


# ----------------------------------------------------------------------------------------------------------------------
# Choose when the thread of the updates does a queued update, so that tests do not depend on how busy the machine is.
#
# ```text
#   early    the update is done when the call that queues it returns
#   late     the thread begins it when another thread waits for it, or for an update behind it
# ```
#
# Of all moments at which a run may do an update, these are the first and the last.


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
