"""A measured step does what the simulated step of the same plan does, in the same order."""

from collections.abc import Iterable
from dataclasses import replace

import pytest

import elixir_compile as elixir
from elixir_compile.base.units import GIB
from elixir_compile.ir import Lane, Span, Update, Verb
from elixir_compile.ir.hardware import Cluster, profile_for
from elixir_compile.ir.plan import Plan
from elixir_compile.step.seconds import simulate
from tests.run.training import plain_step
from tests.run.updating import controlled_worker, hybrid_run, ladder, rows

SLOW_S = 0.03
"""One update of the worker, hundreds of times what else there is to do."""


def slow_host(plan: Plan) -> Cluster:
    """A machine whose links and host work beside compute, on which an update takes as long against the rest."""
    cluster = profile_for("cuda", GIB, GIB, "cuda")
    node = cluster.nodes[0]
    numel = min(bucket.numel for bucket in plan.buckets)
    return Cluster(nodes=(replace(node, host=replace(node.host, update_elements_per_s=numel / SLOW_S)),))


def order_of(spans: Iterable[Span], plan: Plan) -> list[str]:
    """Where updates of the host end and gathers and regions of the forward begin, in the order of time, until the last
    region does.

    Of two at once, what ends is first: the other one waited for it.
    """
    regions = [f"run {region.id}" for region in plan.regions if region.phase == "forward"]
    issued = [f"gather {action.target}" for action in plan.schedules[0].actions if action.verb is Verb.GATHER]
    found = [(span.end_s, 0, f"{span.label} ends") for span in spans if span.lane is Lane.HOST]
    found += [(span.start_s, 1, span.label) for span in spans if span.label in (*regions, *issued)]
    in_order = [label for _, _, label in sorted(found, key=lambda one: one[:2])]
    return in_order[: in_order.index(regions[-1]) + 1]


@pytest.mark.parametrize("home", ["host", "split"])
def test_measured_order_equals_the_simulated_order(home: str) -> None:
    model, batches = ladder(), rows(4)
    with (
        hybrid_run(model, batches[0], home=home, update=Update.ACROSS_STEPS) as run,
        controlled_worker() as worker,
    ):
        run.train(batches[:2])
        compiled = next(found for found in elixir.compilations(run.model) if found.plan.update is Update.ACROSS_STEPS)
        graph, plan = compiled.graph, compiled.plan
        worker.delay_s = lambda: SLOW_S

        def two_steps() -> None:
            for batch in batches[2:]:
                plain_step(run.compiled, run.optimizer, batch)

        measured = elixir.measure_step(two_steps)
    # Updates that the first step queued, and the forward of the second.
    begun_s = next(span.start_s for span in measured.spans if span.lane is Lane.HOST)
    got = order_of([span for span in measured.spans if span.start_s >= begun_s], plan)
    assert got == order_of(simulate(graph, plan, slow_host(plan)).spans, plan)
    waited = {
        span.label for span in measured.spans if span.lane is Lane.CALLER and span.end_s - span.start_s > SLOW_S / 2
    }
    assert waited & {f"wait {bucket.id}" for bucket in plan.buckets}
    ends = [label.endswith("ends") for label in got]
    assert ends.count(True) == len(plan.buckets)
    # Parameters on the device are read by one region, which waits for all; gathers wait one by one.
    assert (ends == sorted(ends, reverse=True)) == (home == "split")
