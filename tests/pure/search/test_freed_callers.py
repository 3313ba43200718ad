"""A search that finds no plan frees its callers at once: their frames hold the tensors of a training step."""

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import pytest

from elixir_compile.base.errors import NoFeasiblePlan
from elixir_compile.base.options import parse_options
from elixir_compile.search import Problem
from elixir_compile.search.joint.joint_budget import GraphRequest, plan_jointly
from elixir_compile.search.joint.variants import plan_as_asked
from tests.pure.problems import tight_problem


class Activation:
    """What the frame of a caller holds."""


def jointly(problem: Problem) -> object:
    requests = [GraphRequest(problem=problem, beside=()), GraphRequest(problem=problem, beside=(0,))]
    return plan_jointly(requests, lambda each: plan_as_asked(each, parse_options({})))


SEARCHES: Mapping[str, Callable[[Problem], object]] = {
    "milp": lambda problem: plan_as_asked(problem, parse_options({})),
    "short of host memory": lambda problem: plan_as_asked(problem, parse_options({})),
    "greedy": lambda problem: plan_as_asked(problem, parse_options({"planner": "greedy"})),
    "fixed rules": lambda problem: plan_as_asked(problem, parse_options({"planner": "zero_offload"})),
    "micro-batches": lambda problem: plan_as_asked(problem, parse_options({"micro_batches": "auto"})),
    "whole batch": lambda problem: plan_as_asked(problem, parse_options({"micro_batches": 1})),
    "jointly": jointly,
}
"""Searches that find no plan, by name."""


@pytest.fixture
def no_collection() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.disable()
    yield
    if was_on:
        gc.enable()


@pytest.mark.parametrize("name", SEARCHES)
@pytest.mark.usefixtures("no_collection")
def test_what_callers_hold_is_freed_without_a_collection(name: str) -> None:
    problem = replace(tight_problem(0.2), budget_bytes=1)
    if name == "short of host memory":
        problem = replace(tight_problem(0.2), host_budget_bytes=1)

    def step() -> weakref.ref[Activation]:
        held = Activation()
        with pytest.raises(NoFeasiblePlan) as raised:
            SEARCHES[name](problem)
        del raised
        return weakref.ref(held)

    assert step()() is None
