"""Run a plan without tensors: when does every lane do what, and how long does the step take.

Each lane runs one thing at a time, in the order of the program. Compute walks through the actions: `run` takes its
seconds, `gather`, `reduce`, `offload` and `prefetch` are issued where they stand and start when their lane is free,
`wait` blocks compute until they end, `release` costs nothing.

    compute   run fwd.0 |    run fwd.1   |  run bwd.0 ...
    h2d       b1 ====| b2 ====|       h.1.matmul ===|        one rank's share, or activations, come from the host
    d2h                  h.1.matmul ===|                     activations or gradients leave
    gather            b1 ==|   b2 ==|                        several ranks: and then, or only, an all-gather

Where a link does not overlap compute, its copies run on the compute lane, and so do host updates when neither direction
overlaps: device and host are then the same cores. Parameters on the device whose optimizer state is on the host travel
there and back, unless the two are one memory. A bucket whose state is streamed takes compute for its copies too, one
bucket after another. When updates run (see `Update`):

    after the backward   every lane is drained when the next step begins, and one step is the whole cycle
    across steps         the step counts from where `optimizer.step()` of the step before was called: its updates, the
                         forward beside those of the host, the backward. Whatever reads a bucket waits for its update,
                         so all of them are done when the backward is, and this cycle repeats from the first one on
    in the backward      where nothing reads the bucket any more and its gradient has landed. What is left runs beside
                         the next forward: the step is played until what it leaves and what it finds are the same

Host memory carries what updates of the host and copies read and write (see `cost.host_memory`): a step is never shorter
than that takes at the memory's full rate. Not modelled: which of them is slower while there is too little for all; two
collectives on one link; that an update in the backward, by the device, begins where a gradient is waited for that
ranks share, not where its reduce is issued.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

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
from elixir_compile.simulate.lanes import Lanes
from elixir_compile.simulate.prices import Prices, prices

_NOT_MEASURED = Measured()
_MOST_CYCLES = 16
_ROUNDING_S = 1e-12

_Program = Sequence[tuple[Verb, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycle:
    """What one step leaves to the next: when updates run, and what waits for them."""

    update: Update = Update.AFTER_BACKWARD
    reads: Mapping[RegionId, Sequence[BucketId]] = field(default_factory=dict)
    """By region, the buckets that it reads; those that are gathered may be left out."""
    closing: Mapping[BucketId, Verb] = field(default_factory=dict)
    """Behind what of the backward each bucket may be updated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """One step of many."""

    step_s: float
    stalled_s: float
    """Seconds of it in which compute waits for updates that the host runs beside it."""


_ONE_STEP = Cycle()


def simulate(graph: StepGraph, plan: Plan, cluster: Cluster, measured: Measured = _NOT_MEASURED) -> Record:
    """Return what rank 0 does in one step of `plan`: spans, counts, step seconds and peaks in bytes."""
    index = {op.id: i for i, op in enumerate(as_run(graph, plan.activations).ops)}
    price = prices(graph, plan.buckets, cluster, measured, plan.activations, plan.num_copies)
    run_s = {region.id: price.run_s(index[region.first], index[region.last]) for region in plan.regions}
    placements = {placement.bucket: placement for placement in plan.placements}
    actions = plan.schedules[0].actions
    cycle = Cycle(
        update=plan.update,
        reads={region.id: region.buckets for region in plan.regions},
        closing=closing_verbs(plan) if plan.update is Update.IN_BACKWARD else {},
    )
    spans: list[Span] = []
    program = ((action.verb, action.what) for action in actions)
    played = play(program, run_s, placements, price, spans, cycle)
    timeline = plan_timeline(graph, plan)
    return Record(
        origin=Origin.SIMULATED,
        step_s=played.step_s,
        device_peak_bytes=timeline.peak.nbytes,
        host_peak_bytes=timeline.host_bytes,
        spans=tuple(spans),
        counts=dict(sorted(Counter(action.verb.value for action in actions).items())),
    )


def play(
    program: Iterable[tuple[Verb, str]],
    run_s: Mapping[RegionId, float],
    placements: Mapping[BucketId, Placement],
    price: Prices,
    spans: list[Span] | None = None,
    cycle: Cycle = _ONE_STEP,
) -> Played:
    """Return the seconds of one of many steps of `program`, (verb, what) pairs; append what each lane did in it to
    `spans`, if given.

    `run_s` holds the seconds of each region by its id.
    """
    lanes = Lanes(price=price, spans=spans)
    player = _Player(lanes, run_s, placements, cycle)
    if cycle.update is Update.IN_BACKWARD:
        return _play_steadily(player, tuple(program))
    if cycle.update is Update.AFTER_BACKWARD:
        player.run(program)
    else:
        actions = tuple(program)
        player.update_across([what for verb, what in actions if verb is Verb.UPDATE])
        player.run(action for action in actions if action[0] is not Verb.UPDATE)
    lanes.await_all_updates()
    return _played(max(lanes.free_s.values()), lanes.memory_s, lanes.stalled_s)


def _played(step_s: float, memory_s: float, stalled_s: float) -> Played:
    """One step of `step_s`, or of as long as the host's memory needs for it; that too is waiting for updates."""
    short_s = max(memory_s - step_s, 0.0)
    return Played(step_s=step_s + short_s, stalled_s=stalled_s + short_s)


def _play_steadily(player: "_Player", program: _Program) -> Played:
    """Play until a step leaves what it has found."""
    lanes = player.lanes
    spans, step_s, memory_s = lanes.spans, 0.0, 0.0
    for _ in range(_MOST_CYCLES):
        lanes.stalled_s, lanes.spans = 0.0, None if spans is None else []
        found = _rounded(lanes)
        player.updated.clear()
        player.run(program)
        memory_s = lanes.memory_s
        step_s = lanes.begin_again()
        if found == _rounded(lanes):
            break
    if spans is not None:
        spans += [_wrapped(span, step_s) for span in lanes.spans or ()]
    return _played(step_s, memory_s, lanes.stalled_s)


def _rounded(lanes: Lanes) -> tuple[object, ...]:
    """What a step finds, comparable."""

    def rounded(seconds: float) -> int:
        return round(seconds / _ROUNDING_S)

    return (
        tuple(rounded(free_s) for free_s in lanes.free_s.values()),
        tuple((name, rounded(end_s)) for name, end_s in lanes.updating_s.items()),
        tuple((arrival.bucket, rounded(arrival.since_s)) for arrival in lanes.arriving),
    )


def _wrapped(span: Span, step_s: float) -> Span:
    """`span`, or, where it begins in the next step, the same of the step before."""
    if span.start_s < step_s:
        return span
    return replace(span, start_s=span.start_s - step_s, end_s=span.end_s - step_s)


class _Player:
    """Carries out the actions of a program on lanes."""

    def __init__(
        self,
        lanes: Lanes,
        run_s: Mapping[RegionId, float],
        placements: Mapping[BucketId, Placement],
        cycle: Cycle,
    ) -> None:
        self.lanes, self._run_s, self._placements, self._cycle = lanes, run_s, placements, cycle
        self.updated: set[str] = set()
        """Buckets of this step."""
        self._backward_end_s: float | None = None

    def run(self, program: Iterable[tuple[Verb, str]]) -> None:
        lanes, placements = self.lanes, self._placements
        for verb, what in program:
            if verb is Verb.RUN:
                self._run_region(what)
            elif verb is Verb.WAIT:
                lanes.wait(what)
            elif verb is Verb.GATHER:
                lanes.gather(what, placements[BucketId(what)])
            elif verb is Verb.REDUCE:
                lanes.reduce(what)
            elif verb is Verb.OFFLOAD:
                lanes.offload(what)
            elif verb is Verb.PREFETCH:
                lanes.prefetch(what)
            elif verb is Verb.UPDATE:
                self._update(what, placements[BucketId(what)])
            if self._cycle.closing:
                self._close(verb, what)

    def update_across(self, buckets: Sequence[str]) -> None:
        """What `optimizer.step()` does: device updates, the host's queued, then what is streamed; see `HybridAdamW`.

        The forward begins when gradients that are on the device have left.
        """
        lanes = self.lanes
        homes = [(name, self._placements[BucketId(name)]) for name in buckets]
        for name, placement in homes:
            if placement.optim is Tier.DEVICE:
                lanes.update_on_device(name)
        queued_s = lanes.free_s[Lane.COMPUTE]
        for name, placement in homes:
            if placement.update is not Tier.DEVICE:
                lanes.update_on_host(name, placement, queued_s if lanes.is_staged(placement) else 0.0)
        left_s = lanes.free_s[Lane.D2H]
        for name, placement in homes:
            if placement.streamed:
                lanes.stream(name, placement)
        lanes.free_s[Lane.COMPUTE] = max(lanes.free_s[Lane.COMPUTE], left_s)

    def _run_region(self, region: str) -> None:
        lanes = self.lanes
        if lanes.updating_s or lanes.arriving:
            for bucket in self._cycle.reads.get(RegionId(region), ()):
                lanes.await_update(bucket)
        lanes.occupy(Lane.COMPUTE, region, 0.0, self._run_s[RegionId(region)])

    def _update(self, bucket: str, placement: Placement) -> None:
        """Behind the backward; device updates do not hold up those of the host."""
        lanes = self.lanes
        if bucket in self.updated:
            return
        if self._cycle.update is Update.IN_BACKWARD:
            self._update_early(bucket, placement, 0.0)
            return
        if self._backward_end_s is None:
            self._backward_end_s = lanes.free_s[Lane.COMPUTE]
        if placement.streamed:
            # `step()` returns from each update of the host before it begins to stream.
            lanes.await_all_updates()
        self._update_where_placed(bucket, placement, self._backward_end_s)

    def _close(self, verb: Verb, what: str) -> None:
        bucket = BucketId(what.removesuffix(".grad") if verb is Verb.OFFLOAD else what)
        if self._cycle.closing.get(bucket) is verb and bucket not in self.updated:
            landed_s = self.lanes.ready_s.get(f"{bucket}.grad", 0.0)
            self._update_early(bucket, self._placements[bucket], landed_s)

    def _update_early(self, bucket: str, placement: Placement, landed_s: float) -> None:
        lanes = self.lanes
        self.updated.add(bucket)
        lanes.await_update(bucket)
        self._update_where_placed(bucket, placement, max(landed_s, lanes.free_s[Lane.COMPUTE]))

    def _update_where_placed(self, bucket: str, placement: Placement, landed_s: float) -> None:
        """The device begins when compute is free, the host when it has the gradient, at `landed_s`."""
        if placement.streamed:
            self.lanes.stream(bucket, placement)
        elif placement.update is Tier.DEVICE:
            self.lanes.update_on_device(bucket)
        else:
            self.lanes.update_on_host(bucket, placement, landed_s)
