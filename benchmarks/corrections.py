"""What do re-planning and `profile_regions` gain if the machine's profile is wrong? Simulated steps, as ratios.

    python benchmarks/corrections.py                      # half an hour on one core; saves the table
    python benchmarks/corrections.py --models gpt2-4b --seeds 1     # prints only

A machine from the presets is the truth, and each of its regions takes its price times a factor of its own, equal for
equal regions. The planner sees a profile whose rates are off by another factor each:

    good     5 %      measured on this machine
    old     25 %      measured with other versions, or on another machine of the kind
    rough  a factor of 2      nobody measured it

Each plan's step is simulated with the true rates and seconds, and divided by the step of the plan that the truth
itself leads to. `replan` is what a run does after its first steps: `correct` from the spans of those steps, then
`replan`. `profile_regions` plans with the true seconds of all regions but the profile's rates of links and updates.
Counts and seconds are simulated, so the table is the same on every machine.
"""

import argparse
import json
import math
import random
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace

import quiet  # noqa: F401  before torch
from machine import RESULTS, save
from planner_full import Case, captured, problem_from

from elixir_compile.ir import Lane, Plan, Span, Tier
from elixir_compile.ir.cost import Measured, Stretch
from elixir_compile.ir.hardware import Cluster, Link
from elixir_compile.search import Problem, plan
from elixir_compile.search.joint.replan import StepStats, correct, replan
from elixir_compile.search.schedule import cut_regions, regions
from elixir_compile.search.space.facts import gather_facts
from elixir_compile.search.space.profiles import moves_at_use
from elixir_compile.step.as_run import as_run
from elixir_compile.step.prices import prices
from elixir_compile.step.seconds import simulate

CASES = {
    "gpt2-4b": Case(model="gpt2-4b", batch=4, machine="a100-40g", ranks=1, state=12),
    "llama-7b": Case(model="llama-7b", batch=4, machine="rtx4090-24g", ranks=1, state=12),
}
PROFILES = {"good": 0.05, "old": 0.25, "rough": math.log(2)}
"""By quality of a profile, the standard deviation of the logarithm of each rate's error."""
REGION_ERROR = 0.2
"""The same for the seconds of a region: what the roofline does not know of kernels."""
WAYS = ("as planned", "replan", "profile_regions", "both")
TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One wrong profile of one machine: the step of each way over the step of the plan that the truth leads to."""

    model: str
    profile: str
    seed: int
    best_s: float
    ratios: Mapping[str, float]


def with_errors(cluster: Cluster, error: float, rng: random.Random) -> Cluster:
    """Return `cluster` with every rate off by a log-normal factor of its own."""

    def factor() -> float:
        return math.exp(rng.gauss(0.0, error))

    def off(link: Link, by: float) -> Link:
        busy = None if link.busy_bytes_per_s is None else link.busy_bytes_per_s * by
        return replace(link, bytes_per_s=link.bytes_per_s * by, busy_bytes_per_s=busy)

    (node,) = cluster.nodes
    compute, memory, update, host, h2d, d2h = (factor() for _ in range(6))
    busy = node.host.busy_update_elements_per_s
    device = replace(
        node.device,
        flops_per_s={dtype: rate * compute for dtype, rate in node.device.flops_per_s.items()},
        memory_bytes_per_s=node.device.memory_bytes_per_s * memory,
        update_elements_per_s=node.device.update_elements_per_s * update,
    )
    own = replace(
        node.host,
        update_elements_per_s=node.host.update_elements_per_s * host,
        busy_update_elements_per_s=None if busy is None else busy * host,
    )
    return replace(
        cluster, nodes=(replace(node, device=device, host=own, h2d=off(node.h2d, h2d), d2h=off(node.d2h, d2h)),)
    )


def true_seconds(problem: Problem, rng: random.Random) -> Measured:
    """Return the seconds of the finest regions of `problem`: their price times a factor, equal for equal regions."""
    facts = gather_facts(problem)
    levels = facts.furthest_levels
    step, factors = as_run(problem.graph), dict[tuple[object, ...], float]()
    index = {op.id: i for i, op in enumerate(step.ops)}
    price = prices(problem.graph, (), problem.cluster)
    stretches: list[Stretch] = []
    for region in regions(facts, cut_regions(facts, levels, moves_at_use(facts, levels))):
        first, last = index[region.first], index[region.last]
        kind = tuple((op.target, op.flops, op.moved_bytes) for op in step.ops[first : last + 1])
        factor = factors.setdefault(kind, math.exp(rng.gauss(0.0, REGION_ERROR)))
        stretches.append(Stretch(first=region.first, last=region.last, run_s=price.run_s(first, last) * factor))
    return Measured(stretches=tuple(stretches))


def stats_of(truth: Problem, found: Plan) -> StepStats:
    """Return what the recorded steps of `found` show on the true machine, each action alone."""
    price = prices(truth.graph, found.buckets, truth.cluster, truth.measured, found.activations)
    index = {op.id: i for i, op in enumerate(as_run(truth.graph, found.activations).ops)}
    groups = {group.id for group in found.activations}
    seconds = {f"run {r.id}": (Lane.COMPUTE, price.run_s(index[r.first], index[r.last])) for r in found.regions}
    for name, own_s in price.h2d_s.items():
        seconds[f"{'prefetch' if name in groups else 'gather'} {name}"] = (Lane.H2D, own_s)
    for name, own_s in price.d2h_s.items():
        seconds[f"offload {name}" if name in groups else f"offload {name}.grad"] = (Lane.D2H, own_s)
    for bucket, home in zip(found.buckets, found.placements, strict=True):
        if home.optim is Tier.DEVICE:
            seconds[f"update {bucket.id}"] = (Lane.COMPUTE, price.device_update_s[bucket.id])
        else:
            seconds[f"update {bucket.id}"] = (Lane.HOST, price.host_update_s[bucket.id])
    spans = (Span(lane=lane, label=label, start_s=0.0, end_s=own_s) for label, (lane, own_s) in seconds.items())
    return StepStats(period_s=1.0, spans=tuple(spans))


def searched(problem: Problem) -> Plan:
    """Return the default planner's answer."""
    return plan(problem, "milp", TIMEOUT_S)


def replanned(truth: Problem, guess: Problem, found: Plan) -> Plan:
    """Return the plan with which a run goes on after the first steps of `found`, the answer to `guess`."""
    correction = correct(guess, found, stats_of(truth, found))
    outcome = None if correction is None else replan(guess, found, correction, searched)
    return found if outcome is None else outcome.plan


def rows(arguments: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each model, quality of profile and seed."""
    for model in arguments.models:
        case = CASES[model]
        problem = problem_from(case, captured(case.model, case.batch))
        for seed in range(arguments.seeds):
            truth = replace(problem, measured=true_seconds(problem, random.Random(seed)))
            best_s = searched(truth).prediction.step_s
            for profile, error in PROFILES.items():
                guess = replace(
                    problem, cluster=with_errors(problem.cluster, error, random.Random(f"{profile} {seed}"))
                )
                profiled = replace(guess, measured=truth.measured)
                plain, regional = searched(guess), searched(profiled)
                plans = (plain, replanned(truth, guess, plain), regional, replanned(truth, profiled, regional))
                steps_s = [simulate(truth.graph, one, truth.cluster, truth.measured).step_s for one in plans]
                ratios = {way: step_s / best_s for way, step_s in zip(WAYS, steps_s, strict=True)}
                yield Row(model=model, profile=profile, seed=seed, best_s=best_s, ratios=ratios)


def table(found: list[Row]) -> list[str]:
    """Return the medians and the worst of each way, in Markdown."""
    lines = [f"| model | profile | {' | '.join(WAYS)} |", "|---|---|" + "---|" * len(WAYS)]
    for model in dict.fromkeys(row.model for row in found):
        for profile in PROFILES:
            own = [row.ratios for row in found if (row.model, row.profile) == (model, profile)]
            cells = [
                f"{statistics.median(r[way] for r in own):.3f} (worst {max(r[way] for r in own):.3f})" for way in WAYS
            ]
            lines.append(f"| {model} | {profile} | {' | '.join(cells)} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    found: list[Row] = []
    for row in rows(arguments):
        found.append(row)
        print(json.dumps(asdict(row)), flush=True)
    text = "\n".join(table(found))
    print(text)
    if arguments.models == list(CASES) and arguments.seeds == parser.get_default("seeds"):
        save("corrections", {"rows": [asdict(row) for row in found]})
        (RESULTS / "corrections.md").write_text(
            "# What re-planning and `profile_regions` gain over a wrong profile\n\n"
            "Step over the step of the plan that the true machine leads to: median and worst of 3 machines, simulated\n"
            f"(`benchmarks/corrections.py`, whose first lines say how).\n\n{text}\n",
            encoding="utf-8",
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
