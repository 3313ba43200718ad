"""Where each bucket may be updated inside the backward, on schedules small enough to read."""

import dataclasses

import pytest
from hypothesis import given

from elixir_compile.ir import Action, BucketRef, GradientRef, Plan, RegionRef, Schedule, StepGraph, Tier, Verb
from elixir_compile.ir.kinds import Kind
from elixir_compile.step.liveness import closing_verbs
from tests.pure.plans import action_of, bucket_of, make_plan, planned_graphs
from tests.pure.strategies import Layer, chain

GRAPH = chain([Layer(module=f"l{n}", params=((f"w{n}", 10),), frozen=False, act_numel=4) for n in range(2)])
BUCKETS = [
    bucket_of(GRAPH, f"b{n}", [s for s in GRAPH.storages if s.kind is Kind.PARAM and s.id == f"w{n}"]) for n in (0, 1)
]


def plan_of(home: str, text: str) -> Plan:
    """Return a plan with the actions in `text`; regions are those of a legal one."""
    plan = make_plan(GRAPH, BUCKETS, [home, home])
    actions = tuple(action_of(line) for line in text.strip().split("\n"))
    return dataclasses.replace(plan, schedules=(Schedule(rank=0, actions=actions),))


def reader_of(bucket: str, home: str) -> str:
    """Return a region of the backward that reads `bucket`."""
    regions = plan_of(home, "update b0").regions
    return next(region.id for region in reversed(regions) if bucket in region.buckets)


@pytest.mark.parametrize(
    ("home", "text", "verb"),
    [
        ("device", "run READER\nreduce b1", Verb.REDUCE),
        ("device", "reduce b1\nrun READER", None),
        ("host", "gather b1\nwait b1\nrun READER\nrelease b1\nreduce b1\noffload b1.grad", Verb.OFFLOAD),
        ("host", "reduce b1\noffload b1.grad\ngather b1\nwait b1\nrun READER\nrelease b1", Verb.RELEASE),
        ("host", "reduce b1\noffload b1.grad\nrun READER\nrelease b1\nrun READER\nrelease b1", None),
        ("host", "reduce b1\noffload b1.grad\nrun READER", None),
        ("host", "reduce b1\nrun READER\nrelease b1", None),
        ("host", "reduce b1\nrelease b1\noffload b1.grad", None),
    ],
)
def test_a_bucket_closes_with_its_last_action(home: str, text: str, verb: Verb | None) -> None:
    plan = plan_of(home, text.replace("READER", reader_of("b1", home)))
    assert closing_verbs(plan).get(BUCKETS[1].id) is verb


@given(planned_graphs(training=True))
def test_nothing_reads_a_bucket_behind_its_closing(planned: tuple[StepGraph, Plan]) -> None:
    _, plan = planned
    actions = plan.schedules[0].actions
    regions = {region.id: region.buckets for region in plan.regions}
    for bucket, verb in closing_verbs(plan).items():
        target = GradientRef(bucket) if verb is Verb.OFFLOAD else BucketRef(bucket)
        behind = actions[max(i for i, action in enumerate(actions) if action == Action(verb=verb, target=target)) + 1 :]
        assert not any(
            isinstance(action.target, RegionRef) and bucket in regions[action.target.region] for action in behind
        )
        assert Action(verb=Verb.GATHER, target=BucketRef(bucket)) not in behind
        assert (verb is Verb.REDUCE) == (plan.placement(bucket).param is Tier.DEVICE)
