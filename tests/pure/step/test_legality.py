"""The verifier refuses broken schedules, of buckets and of activations, and says at which action and why."""

import dataclasses
import itertools
import re
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from elixir_compile.base.errors import IllegalSchedule, PlanMismatch
from elixir_compile.ir import (
    Action,
    Activations,
    Bucket,
    BucketId,
    GradientRef,
    GroupId,
    Kind,
    Plan,
    Saving,
    Schedule,
    Shards,
    StepGraph,
    StorageId,
    Tier,
    Verb,
    plan_from_json,
    plan_to_json,
)
from elixir_compile.ir.bucket import WholeUpdate
from elixir_compile.ir.schedule import BucketRef, GroupRef
from elixir_compile.step import legality, plan_timeline, verify, with_peaks
from elixir_compile.step.legality import Rules
from tests.pure.mixes import group
from tests.pure.plans import (
    Trip,
    action_of,
    bucket_of,
    claim_peak,
    make_plan,
    mixed_plans,
    planned_graphs,
    with_actions,
)
from tests.pure.steps import GELU, LAYERS
from tests.pure.strategies import Layer, chain

# ----------------------------------------------------------------------------------------------------------------------
# One good schedule, broken in each possible way: each break has its sentence and its line.


GRAPH = chain([Layer(module=f"l{n}", params=((f"w{n}", 10),), frozen=n == 3, act_numel=4) for n in range(4)])
BUCKETS = [bucket_of(GRAPH, f"b{n}", [s for s in GRAPH.storages if s.id == f"w{n}"]) for n in range(4)]
PLAN = make_plan(GRAPH, BUCKETS, ["host", "device", "resident", "host"])
SCHEDULE = (
    "gather b0; wait b0; run fwd.0; release b0; run fwd.1; gather b2; wait b2; run fwd.2; run fwd.3; gather b3; "
    "wait b3; run fwd.4; release b3; run fwd.5; gather b3; wait b3; run bwd.0; release b3; run bwd.1; reduce b2; "
    "offload b2.grad; run bwd.2; release b2; run bwd.3; reduce b1; reduce b0; wait b2.grad; offload b0.grad; "
    "gather b0; wait b0; run bwd.4; release b0; wait b0.grad; update b0; update b1; update b2"
)


def scheduled(text: str, plan: Plan = PLAN) -> Plan:
    """Return the plan with the actions of `text`, which are parted by semicolons."""
    groups = [group.id for group in plan.activations]
    return with_actions(plan, (action_of(line, groups) for line in text.split("; ")))


def marked(error: IllegalSchedule) -> list[str]:
    """Return the first two words of the line that is marked."""
    [line] = [line for line in error.excerpt.split("\n") if line.endswith("<-- here")]
    return line.split()[:2]


def test_the_good_schedule_is_the_one_that_is_broken_below() -> None:
    assert scheduled(SCHEDULE) == PLAN
    verify(GRAPH, PLAN)


@pytest.mark.parametrize(
    ("old", "new", "sentence", "here"),
    [
        # parameters
        (
            "gather b0; wait b0; run fwd.0",
            "gather b0; run fwd.0",
            "fwd.0 reads b0 before its gather was waited",
            "run fwd.0",
        ),
        (
            "gather b0; wait b0; run fwd.0; release b0",
            "run fwd.0",
            "fwd.0 reads b0, which was not gathered",
            "run fwd.0",
        ),
        ("gather b0; wait b0", "gather b0; gather b0; wait b0", "b0 is gathered twice without a release", "gather b0"),
        ("gather b0; wait b0", "gather b0; wait b0; gather b0", "b0 is gathered twice without a release", "gather b0"),
        ("gather b0; wait b0", "wait b0", "b0 is waited for, but no gather of it is under way", "wait b0"),
        ("gather b0; wait b0; run bwd.4", "wait b0; run bwd.4", "b0 is waited for, but no gather of it", "wait b0"),
        ("gather b0; wait b0", "gather b0; wait b0; wait b0", "b0 is waited for twice", "wait b0"),
        ("gather b0; wait b0", "release b0; gather b0; wait b0", "b0 is released, but was not gathered", "release b0"),
        ("release b0; run fwd.1", "release b0; release b0; run fwd.1", "b0 is released twice", "release b0"),
        ("run fwd.0; release b0", "release b0; run fwd.0", "fwd.0 reads b0, which was released before", "run fwd.0"),
        (
            "wait b0; run fwd.0; release b0",
            "release b0; run fwd.0",
            "b0 is released before its gather was",
            "release b0",
        ),
        ("release b0; wait b0.grad", "wait b0.grad", "b0 is gathered and never released", "wait b0"),
        ("release b0; wait", "release b0; gather b0; wait", "The gather of b0 is never waited for", "gather b0"),
        (
            "run bwd.2; release b2",
            "run bwd.2; release b2; gather b2",
            "b2 is resident, but gathered a second",
            "gather b2",
        ),
        (
            "release b3; run fwd.5; gather b3; wait b3; run bwd.0",
            "run fwd.5; run bwd.0",
            "b3 is not resident, but its copy from the forward is kept for the backward",
            "run bwd.0",
        ),
        ("gather b2; wait", "gather b1; gather b2; wait", "b1 is gathered, but its parameters live on", "gather b1"),
        ("gather b2; wait", "wait b1; gather b2; wait", "b1 is waited for, but its parameters live on", "wait b1"),
        ("gather b2; wait", "release b1; gather b2; wait", "b1 is released, but its parameters live on", "release b1"),
        # gradients
        (
            "run bwd.1; reduce b2",
            "reduce b2; run bwd.1",
            "gradient of b2 is reduced before it is complete",
            "reduce b2",
        ),
        ("reduce b1; ", "reduce b1; reduce b1; ", "The gradient of b1 is reduced twice", "reduce b1"),
        ("reduce b1; reduce b0", "reduce b0", "b1 is updated before its gradient is reduced", "update b1"),
        ("update b1; ", "", "b1 is never updated", "reduce b1"),
        ("update b0; ", "", "b0 is never updated", "wait b0.grad"),
        ("update b1", "update b1; update b1", "b1 is updated twice", "update b1"),
        (
            "reduce b2; offload b2.grad",
            "offload b2.grad; reduce b2",
            "is offloaded before it is reduced",
            "offload b2.grad",
        ),
        ("reduce b2; offload b2.grad", "reduce b2", "gradient of b2 is waited for, but no offload", "wait b2.grad"),
        ("wait b0.grad; ", "", "updated before the offload of its gradient was waited for", "update b0"),
        ("wait b0.grad; update b0; ", "", "offload of the gradient of b0 is never waited for", "offload b0.grad"),
        (
            "offload b0.grad; gather b0; wait b0; run bwd.4; release b0; wait b0.grad; ",
            "gather b0; wait b0; run bwd.4; release b0; ",
            "b0 is updated before its gradient was offloaded",
            "update b0",
        ),
        (
            "offload b0.grad; gather b0; wait b0; run bwd.4; release b0; wait b0.grad; update b0; ",
            "gather b0; wait b0; run bwd.4; release b0; ",
            "The gradient of b0 is never offloaded",
            "reduce b0",
        ),
        (
            "reduce b0; wait b2.grad; offload b0.grad; gather b0; wait b0; run bwd.4; release b0; "
            "wait b0.grad; update b0; ",
            "wait b2.grad; gather b0; wait b0; run bwd.4; release b0; ",
            "The gradient of b0 is never reduced",
            "run bwd.3",
        ),
        ("wait b0.grad", "wait b0.grad; wait b0.grad", "The gradient of b0 is waited for twice", "wait b0.grad"),
        ("offload b0.grad", "offload b0.grad; offload b0.grad", "gradient of b0 is offloaded twice", "offload b0.grad"),
        ("update b0", "offload b1.grad; update b0", "offloaded, but it stays on the device", "offload b1.grad"),
        ("reduce b1; ", "reduce b1; reduce b3; ", "b3 has no gradient: it is frozen", "reduce b3"),
        ("update b2", "update b2; update b3", "b3 has no gradient: it is frozen", "update b3"),
        ("release b0; wait b0.grad", "release b0; update b0; wait b0.grad", "before the offload of its", "update b0"),
        (
            "gather b0; wait b0; run bwd.4",
            "update b1; gather b0; wait b0; run bwd.4",
            "updated before bwd.4 is",
            "update b1",
        ),
        # regions
        ("run fwd.2; run fwd.3", "run fwd.3; run fwd.2", "fwd.3 is run out of order; expected fwd.2", "run fwd.3"),
        ("run fwd.3; ", "", "fwd.4 is run out of order; expected fwd.3", "run fwd.4"),
        ("run fwd.3; ", "run fwd.3; run fwd.3; ", "fwd.3 is run twice", "run fwd.3"),
        ("update b2", "update b2; run bwd.4", "bwd.4 is run twice", "run bwd.4"),
        # names and verbs
        ("run fwd.3", "run fwd.9", "No region is called fwd.9", "run fwd.9"),
        ("gather b2", "gather b9", "No bucket is called b9", "gather b9"),
        ("reduce b1", "reduce b9", "No bucket is called b9", "reduce b9"),
        ("wait b2;", "wait b9;", "b9 is neither a bucket nor the gradient of one", "wait b9"),
        ("offload b2.grad", "offload s1", "s1 is neither a bucket nor the gradient of one", "offload s1"),
        ("gather b2", "prefetch b2", "`prefetch` is not part of a step on these placements", "prefetch b2"),
        ("gather b2", "send b2", "`send` is not part of a step on these placements", "send b2"),
    ],
)
def test_a_fault_in_the_schedule_is_named_and_marked(old: str, new: str, sentence: str, here: str) -> None:
    assert old in SCHEDULE
    with pytest.raises(IllegalSchedule) as caught:
        verify(GRAPH, scheduled(SCHEDULE.replace(old, new, 1)))
    assert sentence in caught.value.sentence
    assert marked(caught.value) == here.split()


def test_a_region_that_is_never_run_is_refused() -> None:
    """The last region alone can be missing without another being out of order."""
    text = SCHEDULE.replace("gather b0; wait b0; run bwd.4; release b0; ", "")
    with pytest.raises(IllegalSchedule, match=r"b0 is updated before bwd\.4 is run"):
        verify(GRAPH, scheduled(text))
    with pytest.raises(IllegalSchedule, match=r"bwd\.4 is never run"):
        verify(GRAPH, scheduled(text[: text.index("; update b0")]))


def test_the_error_shows_the_schedule_around_the_fault() -> None:
    with pytest.raises(IllegalSchedule) as caught:
        verify(GRAPH, scheduled(SCHEDULE.replace("wait b2; run", "run")))
    assert str(caught.value).split("\n") == [
        "fwd.2 reads b2 before its gather was waited for.",
        "schedule rank 0",
        "  ...",
        "  release   b0",
        "  run       fwd.1               @0",
        "  gather    b2",
        "  run       fwd.2               @0  <-- here",
        "  run       fwd.3               @0",
        "  gather    b3",
        "  wait      b3",
        "  ...",
    ]


def with_bucket(at: int, **changes: Any) -> Plan:
    buckets: list[Bucket] = list(PLAN.buckets)
    buckets[at] = dataclasses.replace(buckets[at], **changes)
    return dataclasses.replace(PLAN, buckets=tuple(buckets))


def with_placement(at: int, **changes: Any) -> Plan:
    placements = list(PLAN.placements)
    placements[at] = dataclasses.replace(placements[at], **changes)
    return dataclasses.replace(PLAN, placements=tuple(placements))


def with_region(at: int, **changes: Any) -> Plan:
    regions = list(PLAN.regions)
    regions[at] = dataclasses.replace(regions[at], **changes)
    return dataclasses.replace(PLAN, regions=tuple(regions))


def without_region(at: int) -> Plan:
    return dataclasses.replace(PLAN, regions=PLAN.regions[:at] + PLAN.regions[at + 1 :])


def without_bucket(at: int) -> Plan:
    buckets, placements = PLAN.buckets, PLAN.placements
    return dataclasses.replace(
        PLAN, buckets=buckets[:at] + buckets[at + 1 :], placements=placements[:at] + placements[at + 1 :]
    )


def with_gradient_name() -> Plan:
    """Return the plan with bucket 1 called what actions call the gradient of bucket 0."""
    name = str(GradientRef(PLAN.buckets[0].id))
    buckets, placements = list(PLAN.buckets), list(PLAN.placements)
    buckets[1] = dataclasses.replace(buckets[1], id=BucketId(name))
    placements[1] = dataclasses.replace(placements[1], bucket=BucketId(name))
    return dataclasses.replace(PLAN, buckets=tuple(buckets), placements=tuple(placements))


def with_bucket_twice() -> Plan:
    return dataclasses.replace(
        PLAN, buckets=(*PLAN.buckets, PLAN.buckets[0]), placements=(*PLAN.placements, PLAN.placements[0])
    )


def with_prediction(**changes: Any) -> Plan:
    return dataclasses.replace(PLAN, prediction=dataclasses.replace(PLAN.prediction, **changes))


@pytest.mark.parametrize(
    ("plan", "sentence", "here"),
    [
        (with_bucket_twice(), "b0 is listed twice", "b0"),
        (with_bucket(1, params=("w0",)), "w0 is in two buckets, b0 and b1", "b1"),
        (with_bucket(1, params=("w9",)), "b1 holds w9, which is not a parameter of the graph", "b1"),
        (with_bucket(1, params=("s0",)), "b1 holds s0, which is not a parameter of the graph", "b1"),
        (with_bucket(1, dtype="bfloat16"), "b1 mixes dtypes: w1 is float32, the bucket bfloat16", "b1"),
        (with_bucket(1, nbytes=41), "b1 claims 41 bytes, but its parameters have 40", "b1"),
        (with_bucket(1, shard_numels=Shards.of((5, 5))), r"b1 has 10 elements in shards of 5 5 for 1 ranks", "b1"),
        (with_bucket(1, shard_numels=Shards.of((9,))), r"b1 has 10 elements in shards of 9 for 1 ranks", "b1"),
        (with_bucket(1, shard_numels=Shards.of((11,))), r"b1 has 10 elements in shards of 11 for 1 ranks", "b1"),
        (
            with_bucket(1, numel=9, shard_numels=Shards.of((9,))),
            "b1 claims 9 elements, but 40 bytes of float32 hold",
            "b1",
        ),
        (without_bucket(3), r"a parameter of the graph, is in no bucket", "b2"),
        (with_gradient_name(), "b0.grad has the name of another bucket's gradient in actions", "b0.grad"),
        (with_bucket(1, trainable=False, state_nbytes=0), "b1 is frozen, but the graph writes a gradient", "b1"),
        (with_placement(0, optim=Tier.DEVICE), "parameters on the host and optimizer state on the device", "b0"),
        (with_placement(0, optim=Tier.DISK, streamed=True), "b0 streams its optimizer state from the disk", "b0"),
        (with_placement(3, streamed=True), "b3 streams its optimizer state, but has none", "b3"),
        (with_placement(0, param=Tier.DISK), "parameters on the disk and optimizer state on the host", "b0"),
        (with_placement(1, resident=False), "b1 lives on the device, but is not resident", "b1"),
        (
            with_placement(3, param=Tier.DEVICE, resident=True),
            "b3 is frozen, but has its parameters on the device",
            "b3",
        ),
        (without_region(3), r"fwd\.4 begins with fwd\.mm_6; expected fwd\.relu_5", "fwd.4"),
        (without_region(10), "No region runs bwd.mm_14 and the ops after it: the regions cover 14 of 15 ops", "bwd.3"),
        (with_region(3, id="fwd.2"), r"fwd\.2 is listed twice", "fwd.2"),
        (with_region(3, first="fwd.mm_4"), r"fwd\.3 begins with fwd\.mm_4; expected fwd\.relu_5", "fwd.3"),
        (with_region(3, last="fwd.mm_4"), r"fwd\.3 ends with fwd\.mm_4, before it begins", "fwd.3"),
        (
            with_region(5, last="bwd.mm_8"),
            "fwd.5 is a region of the forward, but holds ops of the backward and the forward",
            "fwd.5",
        ),
        (with_region(3, last="bwd.mm_99"), r"fwd\.3 names the op bwd\.mm_99, which no region", "fwd.3"),
        (with_region(10, last="update"), r"bwd\.4 names the op update, which no region", "bwd.4"),
        (with_region(0, buckets=()), r"fwd\.0 claims to read nothing; its ops read b0", "fwd.0"),
        (with_region(3, buckets=("b1",)), r"fwd\.3 claims to read b1; its ops read nothing", "fwd.3"),
        (dataclasses.replace(PLAN, budget_bytes=303), "is 304 bytes, 1 B above the budget of 303", "format"),
        (with_prediction(device_peak_bytes=303), "claims a peak of 303 bytes at bwd.mm_14; it is 304", "peak"),
        (with_prediction(host_peak_bytes=1), "claims 1 bytes on the host; it needs ", "peak"),
        (
            dataclasses.replace(PLAN, formula="300*s0", symbols=(("s0", 1),)),
            "claims a peak of 304 bytes, but its formula has 300",
            "peak",
        ),
        (with_prediction(device_peak_at="fwd.mm_0"), "claims a peak of 304 bytes at fwd.mm_0; it is 304 at", "peak"),
        (with_prediction(device_peak_at="nowhere"), "claims a peak of 304 bytes at nowhere; it is 304 at", "peak"),
    ],
)
def test_a_structural_fault_is_named_and_marked(plan: Plan, sentence: str, here: str) -> None:
    with pytest.raises(IllegalSchedule, match=sentence) as caught:
        verify(GRAPH, plan)
    assert marked(caught.value)[0] == here


def test_ranks_are_counted_from_zero() -> None:
    for ranks in ([], [1], [0, 0]):
        schedules = tuple(dataclasses.replace(PLAN.schedules[0], rank=rank) for rank in ranks)
        with pytest.raises(IllegalSchedule, match="expected 0, 1"):
            verify(GRAPH, dataclasses.replace(PLAN, schedules=schedules))


def test_every_rank_is_checked() -> None:
    whole = make_plan(GRAPH, BUCKETS, ["host"] * len(BUCKETS))
    good = whole.schedules[0].actions
    buckets = tuple(dataclasses.replace(bucket, shard_numels=Shards.of((5, 5))) for bucket in whole.buckets)
    for actions in (good, good[1:]):
        schedules = (whole.schedules[0], Schedule(rank=1, actions=actions))
        plan = dataclasses.replace(whole, buckets=buckets, schedules=(schedules[0],))
        peak = plan_timeline(GRAPH, plan).peak
        claim = dataclasses.replace(
            plan.prediction,
            device_peak_bytes=peak.nbytes,
            device_peak_at=peak.op,
            host_peak_bytes=plan_timeline(GRAPH, plan).host_bytes,
        )
        plan = dataclasses.replace(plan, schedules=schedules, prediction=claim, budget_bytes=peak.nbytes)
        if actions == good:
            verify(GRAPH, plan)
        else:
            with pytest.raises(IllegalSchedule, match=r"(?s)b0 is waited for.*schedule rank 1"):
                verify(GRAPH, plan)


def test_no_action_may_be_of_another_micro_batch() -> None:
    """Nothing runs micro-batches: `run fwd.0 @3` would run as `@0`."""
    good = PLAN.schedules[0].actions
    for at, action in enumerate(good):
        plan = with_actions(PLAN, (*good[:at], dataclasses.replace(action, micro_batch=3), *good[at + 1 :]))
        with pytest.raises(IllegalSchedule, match="is of micro-batch 3; a step has one micro-batch, @0") as caught:
            verify(GRAPH, plan_from_json(plan_to_json(plan)))
        assert marked(caught.value) == [action.verb, str(action.target)]
        assert re.search("@3.*<-- here", caught.value.excerpt)


@pytest.mark.parametrize("cut", [0, 1])
def test_ranks_with_different_actions_are_refused(cut: int) -> None:
    """All ranks run the schedule of rank 0, so one that says something else would not be obeyed."""
    whole = make_plan(GRAPH, BUCKETS, ["device"] * len(BUCKETS))
    good = whole.schedules[0].actions
    assert [action.verb for action in good[-2:]] == [Verb.UPDATE, Verb.UPDATE]
    other = (*good[:-2], good[-1], good[-2]) if cut == 0 else good[:1]
    buckets = tuple(dataclasses.replace(bucket, shard_numels=Shards.equal(bucket.numel, 2)) for bucket in whole.buckets)
    schedules = (whole.schedules[0], Schedule(rank=1, actions=other))
    plan = claim_peak(GRAPH, dataclasses.replace(whole, buckets=buckets, schedules=schedules))
    sentence = "Rank 1 has another action than rank 0" if cut == 0 else "is never run"
    with pytest.raises(IllegalSchedule, match=sentence):
        verify(GRAPH, plan)


def test_a_plan_of_another_graph_is_a_mismatch() -> None:
    with pytest.raises(PlanMismatch, match="another graph: it was made for elsewhere"):
        verify(GRAPH, dataclasses.replace(PLAN, graph="elsewhere"))


def test_a_bucket_without_gradient_is_updated_but_not_reduced() -> None:
    """`unused` is never read, so no op writes its gradient; as a trainable bucket it still has its update."""
    graph = chain([Layer(module="l", params=(("w", 10),), frozen=False, act_numel=4)], unused_numel=3)
    params = {storage.id: storage for storage in graph.storages if storage.kind is Kind.PARAM}
    buckets = [bucket_of(graph, name, [param]) for name, param in params.items()]
    buckets[1] = dataclasses.replace(buckets[1], trainable=True, state_nbytes=24)
    plan = make_plan(graph, buckets, ["device", "host"])
    verify(graph, plan)
    actions = plan.schedules[0].actions
    for extra, sentence in ((Verb.REDUCE, "is reduced, but no op writes it"), (None, "is never updated")):
        changed = actions[:-1] if extra is None else (*actions[:-1], action_of(f"{extra} unused"), actions[-1])
        with pytest.raises(IllegalSchedule, match=sentence):
            verify(graph, with_actions(plan, changed))


@given(planned_graphs() | mixed_plans())
@settings(max_examples=200)
def test_schedules_of_the_contract_are_legal(planned: tuple[StepGraph, Plan]) -> None:
    verify(*planned)


@given(planned_graphs() | mixed_plans(), st.data())
@settings(max_examples=200)
def test_no_action_can_be_left_out_or_done_twice(planned: tuple[StepGraph, Plan], data: st.DataObject) -> None:
    """A second gather with its wait and release may be legal; a single action never is."""
    graph, plan = planned
    actions = plan.schedules[0].actions
    at = data.draw(st.integers(0, len(actions) - 1))
    later = data.draw(st.integers(at, len(actions) - 1))
    for broken in (actions[:at] + actions[at + 1 :], (*actions[: later + 1], actions[at], *actions[later + 1 :])):
        with pytest.raises(IllegalSchedule, match="<-- here"):
            verify(graph, with_actions(plan, broken))


def depends(first: Action, second: Action) -> bool:
    """Whether `second` needs `first`: a wait its gather or offload, a run its wait, a release its run, an offload its
    reduce."""
    verbs = (first.verb, second.verb)
    return (
        (verbs == (Verb.GATHER, Verb.WAIT) and first.target == second.target)
        or (verbs == (Verb.WAIT, Verb.RUN) and isinstance(first.target, BucketRef))
        or verbs == (Verb.RUN, Verb.RELEASE)
        or (verbs == (Verb.REDUCE, Verb.OFFLOAD) and str(second.target) == f"{first.target}.grad")
        or (verbs == (Verb.OFFLOAD, Verb.WAIT) and first.target == second.target)
    )


@given(planned_graphs(training=True), st.data())
def test_no_action_can_precede_its_requirements(planned: tuple[StepGraph, Plan], data: st.DataObject) -> None:
    graph, plan = planned
    actions = list(plan.schedules[0].actions)
    pairs = [at for at, two in enumerate(itertools.pairwise(actions)) if depends(*two)]
    assume(pairs)
    at = data.draw(st.sampled_from(pairs))
    actions[at], actions[at + 1] = actions[at + 1], actions[at]
    with pytest.raises(IllegalSchedule, match="<-- here"):
        verify(graph, with_actions(plan, actions))


@given(planned_graphs())
def test_a_smaller_budget_than_the_peak_is_refused(planned: tuple[StepGraph, Plan]) -> None:
    graph, plan = planned
    assert claim_peak(graph, plan) == plan
    with pytest.raises(IllegalSchedule, match="above the budget"):
        verify(graph, dataclasses.replace(plan, budget_bytes=plan.budget_bytes - 1))


@pytest.mark.parametrize("number", [0, 1])
def test_state_on_disk_is_legal_wherever_the_parameters_are(number: int) -> None:
    """b0 lives on the host, b1 on the device."""
    plan = with_peaks(GRAPH, with_placement(number, optim=Tier.DISK))
    verify(GRAPH, plan)
    assert plan_from_json(plan_to_json(plan)) == plan


def test_only_parameters_that_are_not_updated_whole_are_on_disk() -> None:
    """b0 is trained, b3 is frozen; each rank of two has files of its own."""
    there = {"param": Tier.DISK, "optim": Tier.DISK}
    of_two = tuple(dataclasses.replace(bucket, shard_numels=Shards.equal(bucket.numel, 2)) for bucket in PLAN.buckets)
    for number, buckets in itertools.product((0, 3), (PLAN.buckets, of_two)):
        placed = dataclasses.replace(with_placement(number, **there), buckets=buckets, budget_bytes=10**6)
        plan = with_peaks(GRAPH, placed)
        verify(GRAPH, plan)
        assert plan_from_json(plan_to_json(plan)) == plan
    whole = WholeUpdate(flops=(), moved_bytes=0, num_kernels=1, most_nbytes=1, most_state_nbytes=1)
    buckets = (dataclasses.replace(PLAN.buckets[0], whole_update=whole), *PLAN.buckets[1:])
    with pytest.raises(IllegalSchedule, match="b0 has its parameters on the disk, which is not supported: they are"):
        verify(GRAPH, dataclasses.replace(with_placement(0, **there), buckets=buckets))
    with pytest.raises(IllegalSchedule, match="b3 is frozen, but has its parameters on the host"):
        verify(GRAPH, with_placement(3, optim=Tier.DISK))


# ----------------------------------------------------------------------------------------------------------------------
# One good schedule with offloaded activations, broken in each possible way; and groups that no program can be made
# for.


H, G = group(GELU, "acts.h", Saving.OFFLOAD, "h"), group(GELU, "acts.g", Saving.OFFLOAD, "g")
GELU_BUCKETS = [bucket_of(GELU, "b0", [s for s in GELU.storages if s.kind is Kind.PARAM])]
GELU_PLAN = make_plan(GELU, GELU_BUCKETS, ["device"], (H, G), {H.id: Trip(leave=2, gone=3, back=4, need=5)})
GELU_SCHEDULE = (
    "run fwd.0; offload acts.h; run fwd.1; offload acts.g; wait acts.h; wait acts.g; prefetch acts.g; wait acts.g; "
    "run bwd.0; prefetch acts.h; run bwd.1; wait acts.h; run bwd.2; reduce b0; update b0"
)


def test_the_good_schedule_of_activations_is_the_one_that_is_broken_below() -> None:
    assert scheduled(GELU_SCHEDULE, GELU_PLAN) == GELU_PLAN
    verify(GELU, GELU_PLAN)


@pytest.mark.parametrize(
    ("old", "new", "sentence", "here"),
    [
        (
            "run fwd.0; offload acts.h",
            "offload acts.h; run fwd.0",
            "acts.h is offloaded before the forward is done with it",
            "offload acts.h",
        ),
        (
            "run fwd.1; offload acts.g",
            "offload acts.g; run fwd.1",
            "acts.g is offloaded before the forward is done with it",
            "offload acts.g",
        ),
        (
            "offload acts.h; run fwd.1",
            "offload acts.h; offload acts.h; run fwd.1",
            "acts.h is offloaded twice",
            "offload acts.h",
        ),
        ("update b0", "offload acts.h; update b0", "acts.h is offloaded twice", "offload acts.h"),
        (
            "offload acts.g; wait acts.h; wait acts.g; prefetch acts.g; wait acts.g",
            "wait acts.h",
            "The plan offloads acts.g, but bwd.0 reads it before that",
            "run bwd.0",
        ),
        (
            "offload acts.g; wait acts.h",
            "wait acts.h",
            "acts.g is waited for, but neither an offload nor a prefetch of it is under way",
            "wait acts.g",
        ),
        (
            "wait acts.g; prefetch acts.g",
            "wait acts.g; wait acts.g; prefetch acts.g",
            "The offload of acts.g is waited for twice",
            "wait acts.g",
        ),
        (
            "wait acts.g; run bwd.0",
            "wait acts.g; wait acts.g; run bwd.0",
            "The prefetch of acts.g is waited for twice",
            "wait acts.g",
        ),
        (
            "wait acts.g; prefetch acts.g",
            "prefetch acts.g; wait acts.g",
            "acts.g is prefetched before its offload was waited for",
            "prefetch acts.g",
        ),
        ("prefetch acts.g", "prefetch acts.g; prefetch acts.g", "acts.g is prefetched twice", "prefetch acts.g"),
        ("update b0", "prefetch acts.g; update b0", "acts.g is prefetched twice", "prefetch acts.g"),
        (
            "offload acts.g; wait acts.h; wait acts.g; prefetch acts.g",
            "wait acts.h; prefetch acts.g; offload acts.g; wait acts.g",
            "acts.g is prefetched, but was not offloaded",
            "prefetch acts.g",
        ),
        (
            "wait acts.g; prefetch acts.g; wait acts.g; run bwd.0",
            "run bwd.0",
            "bwd.0 reads acts.g, which is on its way to the host",
            "run bwd.0",
        ),
        ("prefetch acts.g; wait acts.g; ", "", "bwd.0 reads acts.g, which is on the host", "run bwd.0"),
        (
            "wait acts.g; run bwd.0",
            "run bwd.0",
            "bwd.0 reads acts.g before its prefetch was waited for",
            "run bwd.0",
        ),
        (
            "offload acts.h; run fwd.1; offload acts.g; wait acts.h; wait acts.g; prefetch acts.g; wait acts.g; "
            "run bwd.0; prefetch acts.h",
            "run fwd.1; offload acts.g; wait acts.g; prefetch acts.g; wait acts.g; run bwd.0; offload acts.h",
            "acts.h is offloaded in the backward, after bwd.0",
            "offload acts.h",
        ),
        (
            "offload acts.h; run fwd.1; offload acts.g; wait acts.h; wait acts.g",
            "offload acts.h; wait acts.h; prefetch acts.h; run fwd.1; offload acts.g; wait acts.g",
            "acts.h is prefetched in the forward, before fwd.1 is run",
            "prefetch acts.h",
        ),
        ("offload acts.h", "offload acts.x", "acts.x is neither a bucket nor the gradient of one", "offload acts.x"),
        ("prefetch acts.h", "prefetch acts.x", "`prefetch` is not part of a step on", "prefetch acts.x"),
    ],
)
def test_a_fault_in_the_schedule_of_activations_is_named_and_marked(
    old: str, new: str, sentence: str, here: str
) -> None:
    assert old in GELU_SCHEDULE
    with pytest.raises(IllegalSchedule) as caught:
        verify(GELU, scheduled(GELU_SCHEDULE.replace(old, new, 1), GELU_PLAN))
    assert sentence in caught.value.sentence
    assert marked(caught.value) == here.split()


UNREAD = group(LAYERS, "acts.n0", Saving.OFFLOAD, "n0")
UNREAD_BUCKETS = [bucket_of(LAYERS, "b0", [s for s in LAYERS.storages if s.kind is Kind.PARAM])]


@pytest.mark.parametrize(
    ("num_left_out", "sentence"),
    [
        (4, "The plan offloads acts.n0, but the schedule never does."),
        (3, "The offload of acts.n0 is never waited for."),
        (2, "acts.n0 is offloaded and never comes back."),
        (1, "The prefetch of acts.n0 is never waited for."),
    ],
)
def test_unfinished_offloads_are_refused(num_left_out: int, sentence: str) -> None:
    """Nothing reads `n0` in the backward, so that no region can be the first at fault."""
    plan = make_plan(LAYERS, UNREAD_BUCKETS, ["device"], (UNREAD,))
    verify(LAYERS, plan)
    own = [at for at, action in enumerate(plan.schedules[0].actions) if action.target == GroupRef(UNREAD.id)]
    gone = set(own[len(own) - num_left_out :])
    actions = tuple(action for at, action in enumerate(plan.schedules[0].actions) if at not in gone)
    with pytest.raises(IllegalSchedule) as caught:
        verify(LAYERS, with_actions(plan, actions))
    assert caught.value.sentence == sentence


@pytest.mark.parametrize(
    ("saving", "sentence"),
    [
        (Saving.KEEP, "acts.g is not to be moved: the plan keeps it on the device"),
        (Saving.RECOMPUTE, "acts.g is not to be moved: the plan recomputes it"),
    ],
)
@pytest.mark.parametrize("verb", [Verb.OFFLOAD, Verb.WAIT, Verb.PREFETCH])
def test_kept_and_recomputed_groups_are_not_moved(saving: Saving, sentence: str, verb: Verb) -> None:
    plan = make_plan(GELU, GELU_BUCKETS, ["device"], (H, dataclasses.replace(G, saving=saving)))
    verify(GELU, plan)
    actions = (*plan.schedules[0].actions, Action(verb=verb, target=GroupRef(G.id)))
    with pytest.raises(IllegalSchedule, match=sentence) as caught:
        verify(GELU, with_actions(plan, actions))
    assert marked(caught.value) == [verb, "acts.g"]


def of(name: str, saving: Saving, *storages: str, nbytes: int | None = None) -> Activations:
    found = group(LAYERS, name, saving, *storages)
    return found if nbytes is None else dataclasses.replace(found, nbytes=nbytes)


KEEP, AGAIN, AWAY = Saving.KEEP, Saving.RECOMPUTE, Saving.OFFLOAD


@pytest.mark.parametrize(
    ("groups", "sentence", "here"),
    [
        ([of("a", KEEP, "s9")], "a holds s9, which is not a storage of the graph", "a"),
        ([of("a", KEEP, "a0"), of("b", AWAY, "g0", "a0")], "a0 is in two groups, a and b", "b"),
        ([of("a", KEEP, "a0", nbytes=63)], "a claims 63 bytes, but its storages have 64", "a"),
        ([of("a", KEEP, "r1")], "a holds r1, which the forward returns to the caller", "a"),
        ([of("a", AGAIN, "n0")], "a holds n0, which the forward does not save", "a"),
        ([of("a", KEEP, "d")], "a holds d, which the forward does not compute", "a"),
        ([of("a", AWAY, "w0")], "a holds w0, which the forward does not compute", "a"),
        ([of("a", KEEP, "a0"), of("a", KEEP, "g0")], "The activations a have the name of another group", "a"),
        ([of("b0", KEEP, "a0")], "The activations b0 have the name of another group", "b0"),
        ([of("b0.grad", KEEP, "a0")], "The activations b0.grad have the name of another group", "b0.grad"),
        (
            [of("a", AGAIN, "a0"), of("b", AGAIN, "g0", "m1"), of("c", AGAIN, "t1")],
            "b: the storage m1 is to be recomputed, but fwd.drop_1 must not run twice",
            "b",
        ),
    ],
)
def test_groups_that_contradict_the_graph_are_refused(groups: list[Activations], sentence: str, here: str) -> None:
    plan = make_plan(LAYERS, UNREAD_BUCKETS, ["device"])
    with pytest.raises(IllegalSchedule) as caught:
        verify(LAYERS, dataclasses.replace(plan, activations=tuple(groups)))
    assert sentence in caught.value.sentence
    assert caught.value.excerpt.startswith("activations\n")
    assert marked(caught.value)[0] == here


def test_regions_cover_repeated_ops() -> None:
    """A plan that recomputes has one op more than one that keeps."""
    kept = make_plan(GELU, GELU_BUCKETS, ["device"])
    again = dataclasses.replace(kept, activations=(dataclasses.replace(G, saving=AGAIN),))
    with pytest.raises(IllegalSchedule, match=r"bwd\.0 begins with bwd\.mm_1; expected bwd\.re_gelu"):
        verify(GELU, again)


@given(mixed_plans(), st.data())
def test_activations_move_in_a_fixed_order(planned: tuple[StepGraph, Plan], data: st.DataObject) -> None:
    graph, plan = planned
    actions = list(plan.schedules[0].actions)
    own = [
        [at for at, action in enumerate(actions) if action.target == GroupRef(group.id)]
        for group in plan.activations
        if group.saving is AWAY
    ]
    assume(own)
    first, second = data.draw(st.sampled_from([two for places in own for two in itertools.pairwise(places)]))
    actions[first], actions[second] = actions[second], actions[first]
    with pytest.raises(IllegalSchedule, match="<-- here"):
        verify(graph, with_actions(plan, actions))


def test_a_group_without_storages_or_with_repeats_is_refused() -> None:
    for storages in ((), ("a0", "a0")):
        with pytest.raises(ValueError, match="must list storages, each once"):
            Activations(id=GroupId("a"), storages=tuple(map(StorageId, storages)), nbytes=0, saving=KEEP)
    with pytest.raises(ValueError, match="have -1 bytes"):
        Activations(id=GroupId("a"), storages=(StorageId("a0"),), nbytes=-1, saving=KEEP)


# ----------------------------------------------------------------------------------------------------------------------
# Every state that can be reached by rules has a move or a sentence for every event that can meet it.


PARAMS = {Verb.RUN, Verb.GATHER, Verb.WAIT, Verb.RELEASE}
CARRIED = {Verb.OFFLOAD, Verb.WAIT, Verb.PREFETCH}
GRADS = {Verb.RUN, Verb.REDUCE, Verb.OFFLOAD, Verb.WAIT, Verb.UPDATE}
RULES = {
    "gathered params": (legality._GATHERED_PARAMS, PARAMS),
    "resident params": (legality._RESIDENT_PARAMS, PARAMS),
    "device params": (legality._DEVICE_PARAMS, PARAMS),
    "host gradient": (legality._HOST_GRADIENT, GRADS),
    "device gradient": (legality._DEVICE_GRADIENT, GRADS),
    "sharded gradient": (legality._SHARDED_GRADIENT, GRADS),
    "absent gradient": (legality._ABSENT_GRADIENT, GRADS),
    "frozen gradient": (legality._FROZEN_GRADIENT, GRADS),
    "offloaded activations": (legality._ACTIVATIONS[Saving.OFFLOAD], CARRIED | {Verb.RUN}),
    "kept activations": (legality._ACTIVATIONS[Saving.KEEP], CARRIED),
    "recomputed activations": (legality._ACTIVATIONS[Saving.RECOMPUTE], CARRIED),
}


def reachable(rules: Rules) -> set[str]:
    found = {rules.start, "full"} if rules.start == "empty" else {rules.start}  # the last region fills it
    while more := {after for own in rules.moves.values() for at, after in own.items() if at in found} - found:
        found |= more
    return found


@pytest.mark.parametrize("name", RULES)
def test_every_verb_has_a_move_or_a_sentence(name: str) -> None:
    rules, verbs = RULES[name]
    for state in reachable(rules):
        for verb in verbs:
            if state not in rules.moves.get(verb, {}) and not (state == "updated" and verb is Verb.RUN):
                subject = "{group}" if name.endswith("activations") else "{bucket}"
                assert subject in rules.fault(state, verb)


@pytest.mark.parametrize("name", RULES)
def test_a_step_can_end_by_all_rules(name: str) -> None:
    rules, _ = RULES[name]
    assert reachable(rules) - set(rules.ends)
    assert set(rules.ends) <= reachable(rules)
