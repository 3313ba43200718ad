"""Run a plan without tensors: when does every lane do what, and how long does the step take.

Each lane runs one thing at a time, in the order of the program. Compute walks through the actions: `run` takes its
seconds, `gather`, `reduce`, `offload` and `prefetch` are issued where they stand and start when their lane is free,
`wait` blocks compute until they end, `release` costs nothing.

    compute   run fwd.0 |    run fwd.1   |  run bwd.0 ...
    h2d       b1 ====| b2 ====|       h.1.matmul ===|        one rank's share, or activations, come from the host
    d2h                  h.1.matmul ===|                     activations or gradients leave
    gather            b1 ==|   b2 ==|                        several ranks: and then, or only, an all-gather

Where a link does not overlap compute, its copies run on the compute lane, and so do host updates when neither direction
overlaps: device and host are then the same cores. Host updates start when the backward has ended; parameters on the
device whose optimizer state is on the host travel there and back, unless the two are one memory. `optimizer.step()`
returns when all is done, so every lane is drained when the next step begins, and one step is the whole cycle. Not
modelled: contention for host memory, and of two collectives for one link.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from elixir_compile.analysis.recompute import as_run
from elixir_compile.cost import Measured
from elixir_compile.hardware import Cluster
from elixir_compile.ir.bucket import Placement
from elixir_compile.ir.graph import StepGraph
from elixir_compile.ir.kinds import BucketId, Lane, RegionId, Tier, Verb
from elixir_compile.ir.plan import Plan
from elixir_compile.ir.record import Origin, Record, Span
from elixir_compile.simulate.memory import walk_memory
from elixir_compile.simulate.prices import Prices, prices

_NOT_MEASURED = Measured()


def simulate(graph: StepGraph, plan: Plan, cluster: Cluster, measured: Measured = _NOT_MEASURED) -> Record:
    """Return what rank 0 does in one step of `plan`: spans, counts, step seconds and peaks in bytes."""
    index = {op.id: i for i, op in enumerate(as_run(graph, plan.activations).ops)}
    price = prices(graph, plan.buckets, cluster, measured, plan.activations)
    run_s = {region.id: price.run_s(index[region.first], index[region.last]) for region in plan.regions}
    placements = {placement.bucket: placement for placement in plan.placements}
    actions = plan.schedules[0].actions
    spans: list[Span] = []
    step_s = play(((action.verb, action.what) for action in actions), run_s, placements, price, spans)
    memory = walk_memory(graph, plan)
    return Record(
        origin=Origin.SIMULATED,
        step_s=step_s,
        device_peak_bytes=memory.peak_bytes,
        host_peak_bytes=memory.host_bytes,
        spans=tuple(spans),
        counts=dict(sorted(Counter(action.verb.value for action in actions).items())),
    )


def play(
    program: Iterable[tuple[Verb, str]],
    run_s: Mapping[RegionId, float],
    placements: Mapping[BucketId, Placement],
    price: Prices,
    spans: list[Span] | None = None,
) -> float:
    """Return the seconds of one step of `program`, (verb, what) pairs; append what each lane did to `spans`, if given.

    `run_s` holds the seconds of each region by its id.
    """
    lanes = _Lanes(price=price, spans=spans)
    for verb, what in program:
        if verb is Verb.RUN:
            lanes.occupy(Lane.COMPUTE, what, 0.0, run_s[RegionId(what)])
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
            lanes.update(what, placements[BucketId(what)])
    return max(lanes.free_s.values())


@dataclass(slots=True, kw_only=True)
class _Lanes:
    """When each lane is next free, and when each transfer under way ends."""

    price: Prices
    spans: list[Span] | None
    free_s: dict[Lane, float] = field(default_factory=lambda: dict.fromkeys(Lane, 0.0))
    ready_s: dict[str, float] = field(default_factory=dict)
    backward_end_s: float | None = None

    def occupy(self, lane: Lane, label: str, after_s: float, seconds: float) -> float:
        """Take the lane for `seconds`, not before `after_s`; return when it ends."""
        resource = self.price.lane_of[lane]
        start_s = max(self.free_s[resource], after_s)
        end_s = start_s + seconds
        self.free_s[resource] = end_s
        if self.spans is not None:
            self.spans.append(Span(lane=lane, label=label, start_s=start_s, end_s=end_s))
        return end_s

    def gather(self, bucket: str, placement: Placement) -> None:
        """From the host where it lives there, then from the other ranks where there are any."""
        ready_s = self.free_s[Lane.COMPUTE]
        if placement.param is not Tier.DEVICE:
            ready_s = self.occupy(Lane.H2D, f"gather {bucket}", ready_s, self.price.h2d_s[bucket])
        if self.price.collective_s[bucket]:
            ready_s = self.occupy(Lane.GATHER, f"gather {bucket}", ready_s, self.price.collective_s[bucket])
        self.ready_s[bucket] = ready_s

    def reduce(self, bucket: str) -> None:
        """Nothing to do on one rank."""
        if self.price.collective_s[bucket]:
            after_s, seconds = self.free_s[Lane.COMPUTE], self.price.collective_s[bucket]
            self.ready_s[f"{bucket}.grad"] = self.occupy(Lane.REDUCE, f"reduce {bucket}", after_s, seconds)

    def offload(self, what: str) -> None:
        """A gradient goes once it is shared out, activations at once."""
        after_s = max(self.free_s[Lane.COMPUTE], self.ready_s.get(what, 0.0))
        owner = what if what in self.price.d2h_s else what.removesuffix(".grad")
        self.ready_s[what] = self.occupy(Lane.D2H, f"offload {what}", after_s, self.price.d2h_s[owner])

    def prefetch(self, group: str) -> None:
        """Activations come back from where their offload has put them."""
        after_s = max(self.free_s[Lane.COMPUTE], self.ready_s.get(group, 0.0))
        self.ready_s[group] = self.occupy(Lane.H2D, f"prefetch {group}", after_s, self.price.h2d_s[group])

    def wait(self, what: str) -> None:
        self.free_s[Lane.COMPUTE] = max(self.free_s[Lane.COMPUTE], self.ready_s.pop(what, 0.0))

    def update(self, bucket: str, placement: Placement) -> None:
        """Update one bucket where its state lives; device updates do not hold up those of the host."""
        if self.backward_end_s is None:
            self.backward_end_s = self.free_s[Lane.COMPUTE]
        label, after_s = f"update {bucket}", self.backward_end_s
        if placement.optim is Tier.DEVICE:
            self.occupy(Lane.COMPUTE, label, after_s, self.price.device_update_s[bucket])
            return
        is_staged = placement.param is Tier.DEVICE and not self.price.is_one_memory
        if is_staged:
            after_s = self.occupy(Lane.D2H, f"offload {bucket}.grad", after_s, self.price.d2h_s[bucket])
        after_s = self.occupy(Lane.HOST, label, after_s, self.price.off_device_update_s(bucket, placement.optim))
        if is_staged:
            self.occupy(Lane.H2D, f"gather {bucket}", after_s, self.price.h2d_s[bucket])
