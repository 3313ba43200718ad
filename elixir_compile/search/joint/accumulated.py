"""Simulate an optimizer step of several forwards: the last with its update, the others without.

The module also proves a bound on the seconds of a forward and backward without an update, and says which lanes and
memories limit a step.
"""

from dataclasses import replace

from elixir_compile.ir import Lane, Plan, Record, Update, Verb
from elixir_compile.ir.hardware import Cluster, Node
from elixir_compile.search.best import relaxed_bound_s
from elixir_compile.search.clock import Deadline
from elixir_compile.search.evaluator import Evaluator
from elixir_compile.search.problem import Problem
from elixir_compile.search.space.buckets import with_larger_buckets
from elixir_compile.search.space.facts import gather_facts
from elixir_compile.step.prediction import critical_path
from elixir_compile.step.seconds import simulate

_LEAST_SHARE = 0.05
"""Share of the critical path from which on a lane limits a step."""
_INSTANT = 1e29
"""Elements that are updated per second where updates must take no time."""


def again_record(problem: Problem, plan: Plan) -> Record:
    """Return the simulated record of a forward and backward under `plan` without an update, as between the forwards of
    a step. `problem` is the problem of the plan."""
    schedules = tuple(
        replace(own, actions=tuple(action for action in own.actions if action.verb is not Verb.UPDATE))
        for own in plan.schedules
    )
    without = replace(plan, update=Update.AFTER_BACKWARD, schedules=schedules)
    return simulate(problem.graph, without, problem.cluster, problem.measured)


def limits_of(problem: Problem, plan: Plan, again: Record | None, num_more: int) -> tuple[str, ...]:
    """Return the lanes on the critical path of an optimizer step with their shares, and the memories that are full.

    The step has a forward with the update and `num_more` forwards as recorded in `again`. Lanes with less than
    `_LEAST_SHARE` are left out.
    """
    step = simulate(problem.graph, plan, problem.cluster, problem.measured)
    seconds: dict[Lane, float] = {}
    for record, times in ((step, 1), (again, num_more)):
        for span in critical_path(record) if record is not None else ():
            seconds[span.lane] = seconds.get(span.lane, 0.0) + times * (span.end_s - span.start_s)
    total_s = sum(seconds.values())
    longest = sorted(seconds, key=lambda lane: -seconds[lane])
    lanes = [f"{lane} {seconds[lane] / total_s:.0%}" for lane in longest if seconds[lane] > total_s * _LEAST_SHARE]
    full = [name for name in ("device memory", "host memory") if any(row.startswith(name) for row in plan.binding)]
    return (*lanes, *full)


def again_bound_s(problem: Problem, deadline: Deadline) -> float:
    """Return a bound on the seconds of `again_record` for every plan of `problem`; 0 if the deadline came first.

    It is the relaxed optimum of the step without optimizer state, with updates that take no time.
    """
    free = replace(
        problem, cluster=_with_instant_updates(problem.cluster), state_nbytes={}, hybrid=False, update=None, disk=False
    )
    evaluator = evaluator_of(free)
    bound_s = relaxed_bound_s(evaluator, max(sum(evaluator.prices.before_s[-1:]), 1e-12), deadline)
    if bound_s is None:
        return 0.0
    # An update that takes no time is still launched once for each bucket.
    return max(0.0, bound_s - len(evaluator.facts.buckets) * problem.cluster.device.launch_s)


def _with_instant_updates(cluster: Cluster) -> Cluster:
    def instant(node: Node) -> Node:
        device = replace(node.device, update_elements_per_s=_INSTANT)
        host = replace(node.host, update_elements_per_s=_INSTANT, busy_update_elements_per_s=None)
        return replace(node, device=device, host=host)

    return replace(cluster, nodes=tuple(map(instant, cluster.nodes)))


def evaluator_of(problem: Problem) -> Evaluator:
    """Return the evaluator with which a search for a plan of `problem` begins."""
    return Evaluator(gather_facts(with_larger_buckets(problem) or problem))
