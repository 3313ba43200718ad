"""Simulate a step of a plan without tensors: the spans of each lane, and the seconds of the step.

Each lane does one action at a time, in the order of the schedule. Compute walks through the actions. `run` occupies it;
`gather`, `reduce`, `offload` and `prefetch` are issued at their place and start when their lane is free; `wait` blocks
compute until they end; `release` costs nothing. `lanes` says when the host issues them.

    compute   run fwd.0 |    run fwd.1   |  run bwd.0 ...
    h2d       b1 ====| b2 ====|       h.1.matmul ===|        shards of parameters, or activations, from the host
    d2h                  h.1.matmul ===|                     activations or gradients to the host
    gather            b1 ==|   b2 ==|                        sharded buckets: an all-gather, perhaps after a copy

Slices of activations that pass the link while a lap runs (see `analysis.slices`) start with the lap and hold up its
last micro-batch; the `offload` or `prefetch` of their group copies the rest.

If a link does not overlap compute, its copies run on the compute lane. If neither direction overlaps, device and host
are the same cores, and updates by the host run there too. If parameters are on the device and their state is on the
host, gradients and updated parameters are copied, unless the two are the same memory. A streamed update blocks compute
during its copies, bucket by bucket. Updates run at these times (see `Update`):

    after the backward   every lane is idle when the next step begins, so a single step is simulated
    across steps         the step counts from the end of compute in the backward before: the updates, the forward beside
                         updates by the host, the backward. Each reader of a bucket waits for its update
    in the backward      each bucket is updated after its last use, with its complete gradient. Remaining updates run
                         beside the next forward

In the two latter cases steps are simulated until two leave the lanes in the same state.

If gradients of several backward passes are summed, the gradients of the step are added to the sums when its backward
ends, by the processor beside which the sums live. The thread that trains adds and updates on the host as soon as the
last gradient has arrived there, while compute may still be in the backward.

Updates by the host and copies share host memory: a step takes at least the seconds of their bytes at the memory's full
rate (see `cost.host_memory_s`). Not modelled: which of them becomes slower under contention; two collectives on the
same link; the start of an early update by the device on several ranks, which is at the wait for the gradient and not,
as here, at the issue of its reduce.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from elixir_compile.analysis.laps import laps_of
from elixir_compile.analysis.recompute import as_run
from elixir_compile.analysis.timeline import plan_timeline
from elixir_compile.analysis.windows import closing_verbs
from elixir_compile.cost import Measured
from elixir_compile.hardware import Cluster
from elixir_compile.ir.bucket import Placement
from elixir_compile.ir.graph import StepGraph
from elixir_compile.ir.kinds import BucketId, Lane, RegionId, Tier, Update, Verb
from elixir_compile.ir.plan import Plan
from elixir_compile.ir.record import Origin, Record, Span
from elixir_compile.ir.schedule import BucketRef, GradientRef, GroupRef, RegionRef, Target
from elixir_compile.simulate.drawing import Drawing
from elixir_compile.simulate.lanes import AT_ONCE_S, Lanes
from elixir_compile.simulate.prices import LapCopies, Prices, prices
from elixir_compile.simulate.traffic import traffic

_NOT_MEASURED = Measured()
_MOST_CYCLES = 16

_Actions = Sequence[tuple[Verb, Target]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycle:
    """The updates of a step: when they run, and which regions wait for them."""

    update: Update = Update.AFTER_BACKWARD
    reads: Mapping[RegionId, Sequence[BucketId]] = field(default_factory=dict)
    """The buckets that each region reads; buckets that are gathered may be left out."""
    closing: Mapping[BucketId, Verb] = field(default_factory=dict)
    """The verb of the action after which each bucket may be updated in the backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """The result for a step in steady state."""

    step_s: float
    stalled_s: float
    """Seconds of the step in which compute waits for updates by the host."""


_ONE_STEP = Cycle()


def simulate(graph: StepGraph, plan: Plan, cluster: Cluster, measured: Measured = _NOT_MEASURED) -> Record:
    """Return the record of rank 0 in a step of `plan`: spans, counts, seconds, and the peaks of its timeline.

    All other ranks are taken to be as this one; `simulate.ranks` simulates ranks that differ.
    """
    player = player_of(graph, plan, cluster, measured)
    return record_of(graph, plan, player, play_with(player, actions_of(plan)).step_s)


def actions_of(plan: Plan) -> _Actions:
    """Return the actions of `plan` as pairs of verb and target."""
    return tuple((action.verb, action.target) for action in plan.schedules[0].actions)


def player_of(graph: StepGraph, plan: Plan, cluster: Cluster, measured: Measured = _NOT_MEASURED) -> "Player":
    """Return a player of the actions of `plan`, a plan of `graph`, on lanes that are drawn."""
    index = {op.id: i for i, op in enumerate(as_run(graph, plan.activations, laps_of(plan)).ops)}
    price = prices(graph, plan.buckets, cluster, measured, plan.activations, plan.num_copies, laps_of(plan))
    copies = {region.id: price.lap_copies.get(index[region.first]) for region in plan.regions}
    run_s = {region.id: price.run_s(index[region.first], index[region.last]) for region in plan.regions}
    placements = {placement.bucket: placement for placement in plan.placements}
    cycle = Cycle(
        update=plan.update,
        reads={region.id: region.buckets for region in plan.regions},
        closing=closing_verbs(plan) if plan.update is Update.IN_BACKWARD else {},
    )
    drawing = Drawing(graph=plan.name, nbytes=traffic(graph, plan))
    return Player(Lanes(price=price, drawing=drawing), run_s, placements, cycle, copies)


def record_of(graph: StepGraph, plan: Plan, player: "Player", step_s: float) -> Record:
    """Return the record of a step of `plan`, a plan of `graph`, that `player` has played and that took `step_s`."""
    timeline = plan_timeline(graph, plan)
    drawing = player.lanes.drawing
    return Record(
        origin=Origin.SIMULATED,
        step_s=step_s,
        device_peak_bytes=timeline.peak.nbytes,
        host_peak_bytes=timeline.host_bytes,
        spans=() if drawing is None else tuple(drawing.spans),
        counts=dict(sorted(Counter(action.verb.value for action in plan.schedules[0].actions).items())),
    )


def play(
    actions: Iterable[tuple[Verb, Target]],
    run_s: Mapping[RegionId, float],
    placements: Mapping[BucketId, Placement],
    price: Prices,
    drawing: Drawing | None = None,
    cycle: Cycle = _ONE_STEP,
    copies: Mapping[RegionId, LapCopies | None] = MappingProxyType({}),
) -> Played:
    """Return the seconds of a step of `actions`, pairs of verb and target, in steady state.

    `run_s` holds the seconds of each region, and `copies` the copies of activations that run beside it. `drawing`
    takes the spans of all lanes.
    """
    lanes = Lanes(price=price, drawing=drawing)
    return play_with(Player(lanes, run_s, placements, cycle, copies), actions)


def play_with(player: "Player", actions: Iterable[tuple[Verb, Target]]) -> Played:
    """Return the seconds of a step of `actions` in steady state, simulated by `player`."""
    if player.cycle.update is not Update.AFTER_BACKWARD:
        return _play_steadily(player, tuple(actions))
    player.run(actions)
    return played_once(player)


def played_once(player: "Player") -> Played:
    """Return the seconds of the step that `player` has simulated alone, with its updates after the backward."""
    lanes = player.lanes
    return _played(lanes.over_s, lanes.memory_s, lanes.stalled_s)


def _played(step_s: float, memory_s: float, stalled_s: float) -> Played:
    """Return a step of `step_s`, or of `memory_s` if host memory needs longer; the difference counts as stalled."""
    short_s = max(memory_s - step_s, 0.0)
    return Played(step_s=step_s + short_s, stalled_s=stalled_s + short_s)


def _play_steadily(player: "Player", actions: _Actions) -> Played:
    """Simulate steps until the lanes are in the same state after a step as before it."""
    lanes = player.lanes
    before, step_s, memory_s = [] if lanes.drawing is None else lanes.drawing.spans, 0.0, 0.0
    for _ in range(_MOST_CYCLES):
        found = player.begin()
        player.run(actions)
        memory_s = lanes.memory_s
        step_s = lanes.begin_again()
        if found == lanes.rounded():
            break
    if lanes.drawing is not None:
        lanes.drawing.spans = [*before, *(_wrapped(span, step_s) for span in lanes.drawing.spans)]
    return _played(step_s, memory_s, lanes.stalled_s)


def _wrapped(span: Span, step_s: float) -> Span:
    """Return `span`; if it begins in the step before or in the next one, as its like that begins in this step."""
    later_s = step_s if span.start_s < 0 else -step_s if span.start_s >= step_s else 0.0
    return replace(span, start_s=span.start_s + later_s, end_s=span.end_s + later_s) if later_s else span


class Player:
    """Simulates the actions of a schedule on lanes."""

    def __init__(
        self,
        lanes: Lanes,
        run_s: Mapping[RegionId, float],
        placements: Mapping[BucketId, Placement],
        cycle: Cycle,
        copies: Mapping[RegionId, LapCopies | None],
    ) -> None:
        self.lanes, self._placements, self.cycle = lanes, placements, cycle
        self.run_s = run_s
        """The seconds of each region."""
        self._copies = copies
        self.updated: set[BucketId] = set()
        """Buckets that are updated in this step."""
        self._reduced: list[BucketId] = []
        """Buckets whose gradients are to be added to their sums at the end of the backward."""

    def begin(self) -> tuple[object, ...]:
        """Begin a step of several, and return the state of the lanes in which it begins, rounded for comparison."""
        self.updated.clear()
        self.lanes.stalled_s = 0.0
        if self.lanes.drawing is not None:
            self.lanes.drawing.spans = []
        return self.lanes.rounded()

    def run(self, actions: Iterable[tuple[Verb, Target]]) -> None:
        """Simulate `actions`, which no other rank holds up."""
        for _ in self.acting(actions):
            pass

    def acting(self, actions: Iterable[tuple[Verb, Target]]) -> Iterator[tuple[Verb, BucketId]]:
        """Simulate `actions`, and yield each gather and each reduce when it is issued, with its bucket.

        Across steps, the updates of the step before come first.
        """
        lanes, placements, is_closing = self.lanes, self._placements, bool(self.cycle.closing)
        left: list[BucketId] = []
        if self.cycle.update is Update.ACROSS_STEPS:
            actions = tuple(actions)
            updated = (target for verb, target in actions if verb is Verb.UPDATE and isinstance(target, BucketRef))
            self.update([target.bucket for target in updated])
            actions = tuple(action for action in actions if action[0] is not Verb.UPDATE)
        for verb, target in actions:
            if isinstance(target, RegionRef):
                self._run_region(target.region)
                continue
            if verb is Verb.WAIT:
                lanes.wait(target)
            elif isinstance(target, GroupRef):
                (lanes.offload_group if verb is Verb.OFFLOAD else lanes.prefetch)(target.group)
            elif isinstance(target, GradientRef):
                lanes.offload_gradient(target.bucket)
            elif verb is Verb.GATHER:
                lanes.gather(target.bucket, placements[target.bucket])
                yield verb, target.bucket
            elif verb is Verb.RELEASE:
                lanes.mark(verb, target.bucket)
            elif verb is Verb.REDUCE:
                lanes.reduce(target.bucket)
                yield verb, target.bucket
                self._reduced.append(target.bucket)
            elif verb is Verb.UPDATE:
                left.append(target.bucket)
            if is_closing and not isinstance(target, GroupRef):
                self._close(verb, target.bucket)
        self._end_backward()
        self.update([bucket for bucket in left if bucket not in self.updated])

    def _end_backward(self) -> None:
        """End the backward: wait for all copies, and add the gradients of this step to their sums, if there are any."""
        self.lanes.end_backward()
        for bucket in self._reduced if self.lanes.price.add_s else ():
            self.lanes.add_gradient(bucket, self._placements[bucket])
        self._reduced.clear()

    def update(self, buckets: Sequence[BucketId]) -> None:
        """Simulate `optimizer.step()`, see `Updater.update`: updates on the device, updates on the host, streams.

        After the backward it returns when all updates on the host and all streams are done. Otherwise the host's are
        queued, and the forward begins when gradients for the host have left the device.
        """
        lanes, is_waiting = self.lanes, self.cycle.update is Update.AFTER_BACKWARD
        homes = [(name, self._placements[name]) for name in buckets]
        for name, _ in homes:
            lanes.await_update(name)
        for name, placement in homes:
            if placement.update is Tier.DEVICE and not placement.streamed:
                lanes.update_on_device(name)
        on_host = [(name, placement) for name, placement in homes if placement.update is not Tier.DEVICE]
        behind_s = lanes.free_s[Lane.COMPUTE]
        for name, placement in on_host:
            lanes.update_on_host(name, placement, behind_s if lanes.is_staged(placement) else AT_ONCE_S)
        if is_waiting:
            lanes.await_all_updates()
        for name, placement in homes:
            if placement.streamed:
                lanes.stream(name, placement)
        if is_waiting or any(lanes.is_staged(placement) for _, placement in on_host):
            lanes.leave()

    def _run_region(self, region: RegionId) -> None:
        lanes = self.lanes
        if lanes.updating_s or lanes.arriving or lanes.returned_s:
            for bucket in self.cycle.reads.get(region, ()):
                lanes.await_update(bucket)
        lanes.run(region, self.run_s[region], self._copies.get(region))

    def _close(self, verb: Verb, bucket: BucketId) -> None:
        """Update `bucket` if its updates begin after an action with this verb, on its parameters or its gradient."""
        if self.cycle.closing.get(bucket) is verb and bucket not in self.updated:
            landed_s = self.lanes.gradient_s.get(bucket, 0.0)
            self._update_early(bucket, self._placements[bucket], landed_s)

    def _update_early(self, bucket: BucketId, placement: Placement, landed_s: float) -> None:
        """Update a bucket: on the device when compute is free, on the host from `landed_s` on, when it has the
        gradient."""
        self.updated.add(bucket)
        self.lanes.await_update(bucket)
        landed_s = max(landed_s, self.lanes.free_s[Lane.COMPUTE])
        if placement.streamed:
            self.lanes.stream(bucket, placement)
        elif placement.update is Tier.DEVICE:
            self.lanes.update_on_device(bucket)
        else:
            self.lanes.update_on_host(bucket, placement, landed_s)
