"""One good schedule with offloaded activations, broken in each possible way; and groups that no program can be made
for."""

import dataclasses
import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from elixir_compile.base.errors import IllegalSchedule
from elixir_compile.ir import Action, Activations, GroupId, Kind, Plan, Saving, Schedule, StepGraph, StorageId, Verb
from elixir_compile.ir.schedule import GroupRef
from elixir_compile.step import verify
from tests.pure.mixes import group
from tests.pure.plans import Trip, action_of, bucket_of, make_plan, mixed_plans
from tests.pure.steps import GELU, LAYERS

H, G = group(GELU, "acts.h", Saving.OFFLOAD, "h"), group(GELU, "acts.g", Saving.OFFLOAD, "g")
BUCKETS = [bucket_of(GELU, "b0", [s for s in GELU.storages if s.kind is Kind.PARAM])]
PLAN = make_plan(GELU, BUCKETS, ["device"], (H, G), {H.id: Trip(leave=2, gone=3, back=4, need=5)})
SCHEDULE = (
    "run fwd.0; offload acts.h; run fwd.1; offload acts.g; wait acts.h; wait acts.g; prefetch acts.g; wait acts.g; "
    "run bwd.0; prefetch acts.h; run bwd.1; wait acts.h; run bwd.2; reduce b0; update b0"
)


def scheduled(text: str, plan: Plan = PLAN) -> Plan:
    """Return the plan with the actions of `text`, which are parted by semicolons."""
    actions = tuple(action_of(line, [group.id for group in plan.activations]) for line in text.split("; "))
    return dataclasses.replace(plan, schedules=(Schedule(rank=0, actions=actions),))


def test_the_good_schedule_is_the_one_that_is_broken_below() -> None:
    assert scheduled(SCHEDULE) == PLAN
    verify(GELU, PLAN)


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
def test_a_fault_in_the_schedule_is_named_and_marked(old: str, new: str, sentence: str, here: str) -> None:
    assert old in SCHEDULE
    with pytest.raises(IllegalSchedule) as caught:
        verify(GELU, scheduled(SCHEDULE.replace(old, new, 1)))
    assert sentence in caught.value.sentence
    assert marked(caught.value) == here.split()


def marked(error: IllegalSchedule) -> list[str]:
    """Return the first two words of the line that is marked."""
    [line] = [line for line in error.excerpt.split("\n") if line.endswith("<-- here")]
    return line.split()[:2]


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
        verify(LAYERS, dataclasses.replace(plan, schedules=(Schedule(rank=0, actions=actions),)))
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
    plan = make_plan(GELU, BUCKETS, ["device"], (H, dataclasses.replace(G, saving=saving)))
    verify(GELU, plan)
    actions = (*plan.schedules[0].actions, Action(verb=verb, target=GroupRef(G.id)))
    with pytest.raises(IllegalSchedule, match=sentence) as caught:
        verify(GELU, dataclasses.replace(plan, schedules=(Schedule(rank=0, actions=actions),)))
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
    kept = make_plan(GELU, BUCKETS, ["device"])
    again = dataclasses.replace(kept, activations=(dataclasses.replace(G, saving=AGAIN),))
    with pytest.raises(IllegalSchedule, match=r"bwd\.0 begins with bwd\.mm_1; expected bwd\.re_gelu"):
        verify(GELU, again)


@given(mixed_plans())
def test_schedules_of_the_contract_are_legal(planned: tuple[StepGraph, Plan]) -> None:
    verify(*planned)


@given(mixed_plans(), st.data())
def test_no_action_can_be_left_out_or_done_twice(planned: tuple[StepGraph, Plan], data: st.DataObject) -> None:
    graph, plan = planned
    actions = plan.schedules[0].actions
    at = data.draw(st.integers(0, len(actions) - 1))
    later = data.draw(st.integers(at, len(actions) - 1))
    for broken in (actions[:at] + actions[at + 1 :], (*actions[: later + 1], actions[at], *actions[later + 1 :])):
        with pytest.raises(IllegalSchedule, match="<-- here"):
            verify(graph, dataclasses.replace(plan, schedules=(Schedule(rank=0, actions=broken),)))


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
        verify(graph, dataclasses.replace(plan, schedules=(Schedule(rank=0, actions=tuple(actions)),)))


def test_a_group_without_storages_or_with_repeats_is_refused() -> None:
    for storages in ((), ("a0", "a0")):
        with pytest.raises(ValueError, match="must list storages, each once"):
            Activations(id=GroupId("a"), storages=tuple(map(StorageId, storages)), nbytes=0, saving=KEEP)
    with pytest.raises(ValueError, match="have -1 bytes"):
        Activations(id=GroupId("a"), storages=(StorageId("a0"),), nbytes=-1, saving=KEEP)
