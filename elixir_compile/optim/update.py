"""Update parameters bucket by bucket, with their tensors and hyperparameters at the time of the request.

`Updater` says when each bucket is updated, `BucketUpdate` where:

    update DEVICE, state DEVICE     in place, on the device
    update HOST                     in place, on the host; if the parameter is on the device, its value and gradient are
                                    copied to the host, and the new value is copied back
    update DEVICE, state elsewhere  streamed: tensors on the host are copied to the device, updated there, copied back

State travels in streamed updates, whose copies `streaming` has, and from and to the disk (`disk`); otherwise it stays
where it is. The rule has the arithmetic, and so the bits: see `adamw_rule` and `generic.class_rule`. If the compute
device is the CPU, device and host share a memory, and only streamed updates copy anything.
"""

import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from elixir_compile.compat.platforms.host import at_least_threads
from elixir_compile.graph.ops.optimizers import has_master
from elixir_compile.ir import BucketRef, GradientRef, Kept, Lane, Tier, Update, Verb, label
from elixir_compile.optim.adamw_rule import AdamWRule
from elixir_compile.optim.disk import DiskUpdate
from elixir_compile.optim.guard import GradientGuard, watch
from elixir_compile.optim.host.kernel import host_threads_for, on_host_threads
from elixir_compile.optim.rule import GroupSlice, UpdateRule, group_slice_of, on_host, require_dense
from elixir_compile.optim.state import StateBuffers, StatePlacer, States, group_by_bucket
from elixir_compile.optim.streaming import Stream, Streamed
from elixir_compile.runtime.bucket import RunningBucket
from elixir_compile.runtime.executor import Executor
from elixir_compile.runtime.lanes import Event
from elixir_compile.runtime.updates import Job, LandingUpdate, UpdateLine


class Updater:
    """The updates and the state of an optimizer: each bucket is updated at the time and place chosen by the plan."""

    def __init__(self, rule: UpdateRule) -> None:
        self.rule = rule
        self.line = UpdateLine()
        self.placer = StatePlacer(rule, self.line.fail)
        self._landing: weakref.WeakKeyDictionary[RunningBucket, LandingUpdate] = weakref.WeakKeyDictionary()
        """By bucket, the last streamed update for which nobody has waited."""

    def wait(self) -> None:
        """Wait for all queued updates and disk writes. Raises the exception of a failed update or write."""
        self.line.wait()
        self.placer.disk.wait_for_writes()
        self.line.check()

    def follow(self, params: Iterable[torch.Tensor], groups: Iterable[Mapping[str, Any]], states: States) -> None:
        """Move the state of `params`, parameters of `groups`, to where the active plan wants it."""
        moved = {id(param) for param in params}
        for group in groups:
            own = [param for param in group["params"] if id(param) in moved]
            self.placer.reserve(group, group_by_bucket(own)[0])
            own = [param for param in own if states.get(param)]
            self.placer.place(states, group, group_by_bucket(own)[0])

    def update(
        self,
        params: Iterable[nn.Parameter],
        groups: Iterable[Mapping[str, Any]],
        states: States,
        arrived: Event | None = None,
    ) -> None:
        """Update the parameters in `params` that have gradients, or queue their updates.

        `groups` are the param groups and `states` the state of the optimizer. `arrived` is the event after which the
        gradients are in memory; None if they are there. Device updates are launched first, so that an accelerator and
        the host work at once. Raises UnsupportedModel if a gradient is sparse and the rule is that of AdamW.
        """
        updates = self._prepared({id(param) for param in params if param.grad is not None}, groups, states)
        for update in updates:
            if update.is_on_device and not update.bucket.placement.streamed:
                update.run()
        on_host = [update for update in updates if not update.is_on_device]
        for update in on_host:
            if update.bucket.update is not Update.AFTER_BACKWARD:
                for param in update.params:
                    if param.grad is not None:
                        watch(param.grad)
                work = on_host_threads(update.work(arrived), host_threads_for(update.executor.device))
                queued = self.line.queue(work, update.label, update.executor.lanes)
                update.bucket.queued.add(queued, update.params)
                update.executor.keep_until_gone(grad for grad in update.grads if grad.device.type != "cpu")
        now = [update for update in on_host if update.bucket.update is Update.AFTER_BACKWARD]
        works = [update.work(None) for update in now]  # first, so that copies from the device run beside the updates
        for update, work in zip(now, works, strict=True):
            with at_least_threads(host_threads_for(update.executor.device).num_threads):
                update.executor.lanes.compute_waits(work())
        # Last, because they may wait for their copies, beside which queued host updates run.
        self._stream([update for update in updates if update.bucket.placement.streamed], arrived)

    def _prepared(
        self, wanted: Collection[int], groups: Iterable[Mapping[str, Any]], states: States
    ) -> "list[BucketUpdate]":
        """Return the updates of the parameters with the ids `wanted`, in the order in which forwards use the buckets.

        Their state is in its place. Parameters without a bucket are updated already.
        """
        rule, host_rule = self.rule.snapshots()
        parts: dict[RunningBucket, list[GroupSlice]] = {}
        executors: dict[RunningBucket, Executor] = {}
        unplanned_by_group: list[tuple[list[nn.Parameter], Mapping[str, Any]]] = []
        for group in groups:
            here = (param for param in group["params"] if id(param) in wanted and rule.keeps(param, group))
            buckets, unplanned, found = group_by_bucket(here)
            executors |= found
            for bucket in buckets:
                bucket.queued.wait()
                if (landing := self._landing.pop(bucket, None)) is not None:
                    with found[bucket].ledger.waits(label(Verb.WAIT, BucketRef(bucket.spec.id))):
                        landing.wait()
            require_dense(param for param in unplanned if isinstance(rule, AdamWRule) or has_master(param))
            unplanned_by_group.append((unplanned, group))
            self.placer.place(states, group, buckets)
            for bucket, members in buckets.items():
                places = self.placer.places_of(bucket, members, group)
                parts.setdefault(bucket, []).append(group_slice_of(members, states, group, places))
        for unplanned, group in unplanned_by_group:  # after the checks above for failed updates and a full disk
            for param in unplanned:
                self.placer.place_beside(states, param, group)
            if unplanned:
                part = group_slice_of(unplanned, states, group)
                rule.update(part.updates, part.group)
        return [
            BucketUpdate(
                bucket=bucket,
                executor=executors[bucket],
                rule=rule if bucket.placement.update is Tier.DEVICE else host_rule,
                buffers=self.placer.buffers,
                parts=tuple(parts[bucket]),
                disk=self.placer.disk.prepare(
                    bucket, (each.state for part in parts[bucket] for each in part.updates), executor.ledger
                ),
            )
            for executor in dict.fromkeys(executors.values())
            for bucket in executor.buckets.in_use_order(b for b in parts if executors[b] is executor)
        ]

    def _stream(self, updates: "Sequence[BucketUpdate]", arrived: Event | None) -> None:
        """Issue streamed updates; the host waits for them now, or later if the plan updates beside other work."""
        for executor in dict.fromkeys(update.executor for update in updates):
            own = [update for update in updates if update.executor is executor]
            landed, on_host = Stream(executor.lanes, executor.ledger).issue([each.streamed() for each in own], arrived)
            if any(update.bucket.update is Update.AFTER_BACKWARD for update in own):
                with executor.ledger.waits(label(Verb.WAIT, Kept.UPDATES)):
                    executor.lanes.host_waits(landed)
            elif landed is not None:
                # Readers of what updates write on the host wait until it is there; copies use `memory` until then.
                for update, memory in zip(own, on_host, strict=True):
                    bucket = update.bucket
                    params, grads = (update.params, update.grads) if bucket.is_away else ([], [])
                    for param in params:
                        if param.grad is not None:
                            watch(param.grad)
                    guard = GradientGuard(params, grads)
                    memory = [*memory, *grads]  # the guard sees writes to gradients that are alive
                    landing = LandingUpdate(landed, guard.check, self.line, update.label, executor.lanes, memory)
                    self.line.add(landing)
                    if bucket.is_away:
                        bucket.queued.add(landing, params)
                    self._landing[bucket] = landing


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketUpdate:
    """An optimizer's update of a bucket."""

    bucket: RunningBucket
    executor: Executor
    rule: UpdateRule
    buffers: StateBuffers
    parts: tuple[GroupSlice, ...]
    disk: DiskUpdate | None = None
    """Reads the state from disk and writes it back; None if the state is in memory."""

    @property
    def is_on_device(self) -> bool:
        """Return whether the update runs on the device."""
        return self.bucket.placement.update is Tier.DEVICE

    @property
    def params(self) -> list[nn.Parameter]:
        """Return the parameters of all group slices."""
        return [param for part in self.parts for param in part.params]

    @property
    def grads(self) -> list[torch.Tensor]:
        """Return the gradients of all group slices."""
        return [grad for part in self.parts for grad in part.grads]

    @property
    def label(self) -> str:
        """Return the name of the update in ledgers and errors."""
        return label(Verb.UPDATE, BucketRef(self.bucket.spec.id))

    def run(self) -> None:
        """Run the update on the device, whose kernels may still run when this returns."""
        with self.executor.ledger.span(Lane.COMPUTE, self.label, graph=""):
            for part in self.parts:
                self.executor.lanes.touches(part.grads, (*part.weights, *part.memory))
                self.rule.update(part.updates, part.group)

    def streamed(self) -> Streamed:
        """Return the update as one that passes through the device."""
        return Streamed(
            bucket=self.bucket.spec.id,
            rule=self.rule,
            parts=self.parts,
            is_away=self.bucket.is_away,
            # A param group may have been added since the bucket was formed.
            is_whole=any(self.rule.updates_whole(part.params[0], part.group) for part in self.parts),
        )

    def work(self, arrived: Event | None) -> Job:
        """Return a function that updates the bucket on the host after the event `arrived`.

        Copies of tensors from the device to the host start before this returns.
        """
        parts = [self._on_host(part, number) for number, part in enumerate(self.parts)]
        copied_back = [
            (home, updated)
            for part, host_part in zip(self.parts, parts, strict=True)
            for home, updated in zip(part.weights, host_part.weights, strict=True)
            if home is not updated
        ]
        lanes = self.executor.lanes
        landed = lanes.d2h.mark() if copied_back else arrived
        # `work` must refer neither to `self` nor to the bucket: a queued update would keep the gradients on the device
        # alive, and the executor of a model that is gone. The next gather of the bucket waits for this update.
        last_read = self.bucket.home_read
        rule, disk, ledger, name = self.rule, self.disk, self.executor.ledger, self.label
        back, back_bytes = (
            label(Verb.GATHER, BucketRef(self.bucket.spec.id)),
            sum(home.nbytes for home, _ in copied_back),
        )
        guard = GradientGuard(self.params, self.grads)
        num_elements = sum(weight.numel() for part in parts for weight in part.weights)

        def work() -> Event | None:
            lanes.host_waits(landed)
            lanes.host_waits(last_read)
            guard.check()
            with ledger.span(Lane.HOST, name, graph=""):
                if disk is not None:
                    for part in parts:
                        lanes.touches(part.grads, part.weights)
                    disk.run(rule, parts)
                for part in parts if disk is None else ():
                    lanes.touches(part.grads, (*part.weights, *part.memory))
                    rule.update(part.updates, part.group)
            ledger.count_updated(num_elements)
            guard.check()
            if not copied_back:
                return None
            with lanes.h2d.beside_compute(), ledger.span(Lane.H2D, back, back_bytes, times=0, graph=""):
                for home, updated in copied_back:
                    lanes.h2d.copy(home, updated)
            return lanes.h2d.mark()

        return work

    def _on_host(self, part: GroupSlice, number: int) -> GroupSlice:
        """Return `part`, number `number` of the bucket, with weights and gradients on the host; copies from the device
        start before this returns."""
        part = replace(part, group={name: on_host(value) for name, value in part.group.items()})
        if part.updates[0].weight.device.type == "cpu":
            return part
        of = self.bucket.spec.id
        weights = self._landing("landed param", part.params, part.weights, label(Verb.OFFLOAD, BucketRef(of)), number)
        grads = self._landing("landed grad", part.params, part.grads, label(Verb.OFFLOAD, GradientRef(of)), number)
        landed = zip(weights, grads, part.updates, strict=True)
        return replace(part, updates=tuple(each._replace(weight=weight, grad=grad) for weight, grad, each in landed))

    def _landing(
        self, kind: str, params: Sequence[nn.Parameter], values: Sequence[torch.Tensor], name: str, number: int
    ) -> list[torch.Tensor]:
        """Start copies of `values`, one for each of `params`, to the host, as piece `number` of the span `name`."""
        d2h, nbytes = self.executor.lanes.d2h, sum(value.nbytes for value in values)
        ledger = self.executor.ledger
        with d2h.behind_compute(), ledger.span(Lane.D2H, name, nbytes, times=0, piece=number, graph=""):
            return self.buffers.copies(self.bucket, kind, dict(zip(params, values, strict=True)), d2h)
