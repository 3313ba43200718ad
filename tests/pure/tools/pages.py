"""Plans for tests of pages: of six layers that move, and of layers with names that would break out of HTML."""

from dataclasses import replace

from elixir_compile.ir import Kind, Plan, StepGraph
from elixir_compile.search import Problem, plan
from elixir_compile.tools.report.page import PlanSheet, plan_sheet
from tests.pure.problems import problem_of, tight_problem
from tests.pure.strategies import Layer, chain

EVIL = '</script><img src=x onerror="document.title=1">&'


def tight() -> tuple[Plan, Problem]:
    """Return a plan that moves buckets, and its problem."""
    problem = tight_problem()
    return plan(problem, "greedy"), problem


def evil_graph() -> StepGraph:
    """Return a step whose modules and parameters have names that are HTML."""
    layers = [
        Layer(module=f"{EVIL}.{n}", params=((f"{EVIL}.{n}.w", 400),), frozen=False, act_numel=64) for n in range(4)
    ]
    return chain(layers)


def evil() -> tuple[Plan, Problem]:
    """Return a plan of `evil_graph` that moves buckets, and its problem."""
    problem = problem_of(evil_graph())
    kept = plan(problem, "keep_all").prediction.device_peak_bytes
    problem = replace(problem, name=EVIL, budget_bytes=int(0.5 * kept))
    return plan(problem, "greedy"), problem


def sheet_of(made: Plan, problem: Problem) -> PlanSheet:
    """Return what a page shows of the plan of a problem."""
    return plan_sheet(made, problem.graph, problem.cluster, problem.measured)


def param_bytes(graph: StepGraph) -> int:
    """Return the bytes of all parameters."""
    return sum(storage.nbytes for storage in graph.storages if storage.kind is Kind.PARAM)
