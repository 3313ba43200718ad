"""`diff`: everything that is compared and nothing else, for two plans and for a plan beside a record."""

import json
from collections import Counter
from dataclasses import asdict, replace

from hypothesis import given

from elixir_compile.ir import (
    Activations,
    GroupId,
    Origin,
    Plan,
    Record,
    Saving,
    StepGraph,
    StorageId,
    Tier,
    Update,
    plan_from_json,
    plan_to_json,
)
from elixir_compile.search import plan
from elixir_compile.tools.report.diff import Change, diff, plan_diff, run_diff
from tests.pure.plans import planned_graphs
from tests.pure.problems import tight_problem
from tests.pure.search.test_planner import chain_of, problem_of

TIGHT = plan(tight_problem(0.3), "greedy")
WIDE = plan(problem_of(chain_of(6)), "greedy")


def record_of(made: Plan) -> Record:
    """Return a record of a step that went exactly as planned."""
    return Record(
        origin=Origin.MEASURED,
        step_s=made.prediction.step_s,
        device_peak_bytes=made.prediction.device_peak_bytes,
        host_peak_bytes=made.prediction.host_peak_bytes,
        counts=dict(Counter(action.verb.value for action in made.schedules[0].actions)),
    )


@given(planned_graphs())
def test_equal_plans_say_so(planned: tuple[StepGraph, Plan]) -> None:
    _, made = planned
    found = plan_diff(made, replace(made))
    assert (found.is_equal, found.header, found.buckets, found.activations, found.counts) == (True, (), (), (), ())
    assert diff(made, replace(made)) == "the plans are equal"


def test_a_plan_under_another_budget_lists_other_moves() -> None:
    found = plan_diff(TIGHT, WIDE)
    told = {change.what: (change.first, change.second) for change in (*found.header, *found.buckets, *found.counts)}
    assert told["budget_bytes"] == (TIGHT.budget_bytes, WIDE.budget_bytes)
    assert told["gather"] == (Counter(action.verb for action in TIGHT.schedules[0].actions)["gather"], 0)
    assert "machine" not in told
    assert not found.is_equal
    moved = {p.bucket for p in TIGHT.placements if p.param is Tier.HOST}
    assert moved == {what.removesuffix(" param") for what in told if what.endswith(" param")}
    assert moved


def test_the_table_has_units_and_a_row_per_change() -> None:
    lines = diff(TIGHT, replace(TIGHT, budget_bytes=TIGHT.budget_bytes + 2048, bound_s=0.5)).splitlines()
    assert lines[0] == "the plans differ"
    rows = [line.split() for line in lines[3:]]
    assert [row[0] for row in rows] == ["budget_bytes", "bound_s"]
    assert rows[0][2] == "KiB"
    assert rows[1] == ["bound_s", "none", "500", "ms"]


def test_missing_buckets_and_other_parameters_are_listed() -> None:
    fewer = replace(TIGHT, buckets=TIGHT.buckets[:-1], placements=TIGHT.placements[:-1])
    (change,) = plan_diff(TIGHT, fewer).buckets
    assert change == Change(what=TIGHT.buckets[-1].id, first="present", second="absent")
    renamed = replace(TIGHT.buckets[0], params=("other",))
    found = plan_diff(TIGHT, replace(TIGHT, buckets=(renamed, *TIGHT.buckets[1:])))
    assert found.buckets == (Change(what="b0 params", first=" ".join(TIGHT.buckets[0].params), second="other"),)


def of_groups(*savings: Saving) -> Plan:
    """Return a plan with a group per saving, of 1, 2, ... bytes."""
    groups = (
        Activations(id=GroupId(f"h.{n}.matmul"), storages=(StorageId(f"s{n}"),), nbytes=n + 1, saving=saving)
        for n, saving in enumerate(savings)
    )
    return replace(TIGHT, activations=tuple(groups))


def test_groups_with_other_treatment_are_listed_with_bytes() -> None:
    first = of_groups(Saving.KEEP, Saving.RECOMPUTE, Saving.OFFLOAD, Saving.KEEP)
    second = of_groups(Saving.KEEP, Saving.OFFLOAD, Saving.OFFLOAD, Saving.RECOMPUTE, Saving.RECOMPUTE, Saving.KEEP)
    assert plan_diff(first, second).activations == (
        Change(what="activations_kept_bytes", first=5, second=7),
        Change(what="activations_recomputed_bytes", first=2, second=9),
        Change(what="activations_offloaded_bytes", first=3, second=5),
        Change(what="h.1.matmul", first="recompute", second="offload"),
        Change(what="h.3.matmul", first="keep", second="recompute"),
        Change(what="h.4.matmul", first="not listed", second="recompute"),
    )
    rows = [line.split() for line in diff(first, second).splitlines()[3:]]
    assert ["activations_kept_bytes", "5", "B", "7", "B"] in rows
    assert ["h.1.matmul", "recompute", "offload"] in rows


def test_a_plan_that_keeps_all_activations_is_compared_with_others() -> None:
    """What is kept in both is no difference, although only one of the plans lists it."""
    assert plan_diff(TIGHT, of_groups(Saving.KEEP, Saving.OFFLOAD)).activations == (
        Change(what="activations_kept_bytes", first="all", second=1),
        Change(what="activations_offloaded_bytes", first=0, second=2),
        Change(what="h.1.matmul", first="not listed", second="offload"),
    )


def test_plans_with_only_unlisted_differences_are_not_called_equal() -> None:
    other = replace(TIGHT, decisions=())
    assert not plan_diff(TIGHT, other).is_equal
    assert "have the same placements and counts" in diff(TIGHT, other)


def test_a_step_that_went_as_planned_has_nothing_flagged() -> None:
    found = run_diff(TIGHT, record_of(TIGHT))
    assert [one.what for one in found.comparisons][:3] == ["step_s", "device_peak_bytes", "host_peak_bytes"]
    assert {"gather", "release", "reduce", "offload"} <= {one.what for one in found.comparisons}
    assert not any(one.is_off for one in found.comparisons)
    assert all(one.ratio == 1.0 for one in found.comparisons)
    assert diff(TIGHT, record_of(TIGHT)).startswith("as planned\n")


def test_figures_off_by_a_tenth_and_all_other_counts_are_flagged() -> None:
    went = record_of(TIGHT)
    went = replace(
        went,
        step_s=1.11 * went.step_s,
        device_peak_bytes=int(1.09 * went.device_peak_bytes),
        host_peak_bytes=int(0.85 * went.host_peak_bytes),
        counts={**went.counts, "gather": went.counts["gather"] + 1, "prefetch": 2},
    )
    found = {one.what: one for one in run_diff(TIGHT, went).comparisons}
    assert {what for what, one in found.items() if one.is_off} == {"step_s", "host_peak_bytes", "gather", "prefetch"}
    assert found["prefetch"].ratio is None
    text = diff(TIGHT, went)
    assert text.startswith("4 of 8 figures are off\n")
    assert text.count("<-- off") == 4
    assert "measured" in text


def test_a_verb_that_was_planned_and_never_ran_is_flagged() -> None:
    found = {one.what: one for one in run_diff(TIGHT, replace(record_of(TIGHT), counts={})).comparisons}
    assert found["gather"].measured == 0
    assert found["gather"].is_off


def test_differences_are_json() -> None:
    assert json.loads(json.dumps(asdict(plan_diff(TIGHT, WIDE)), allow_nan=False))["is_equal"] is False
    assert json.loads(json.dumps(asdict(run_diff(TIGHT, record_of(WIDE))), allow_nan=False))["origin"] == "measured"


def test_differences_of_updates_are_listed() -> None:
    first = next(placement for placement in TIGHT.placements if placement.optim is Tier.HOST)
    streamed = tuple(replace(home, streamed=True) if home == first else home for home in TIGHT.placements)
    others = tuple(replace(one, group=3, state_nbytes=0) if one.id == first.bucket else one for one in TIGHT.buckets)
    other = replace(TIGHT, placements=streamed, buckets=others, update=Update.IN_BACKWARD, loss_chunks=4)
    found = plan_diff(TIGHT, other)
    told = {change.what: (change.first, change.second) for change in (*found.header, *found.buckets)}
    state_bytes = next(bucket.state_nbytes for bucket in TIGHT.buckets if bucket.id == first.bucket)
    assert told == {
        "update": ("across_steps", "in_backward"),
        "loss_chunks": (1, 4),
        f"{first.bucket} streamed": (False, True),
        f"{first.bucket} group": (0, 3),
        f"{first.bucket} state_bytes": (state_bytes, 0),
    }
    assert plan_from_json(plan_to_json(other)) == other
