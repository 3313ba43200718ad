"""Two plans, or a plan and what a step took -> what is different.

```text
plans differ
                  first    second
budget         36.0 GiB  30.0 GiB
step             212 ms    230 ms
b3 optim         device      host
h.2.matmul         keep   offload
gather               12        16
```
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from elixir_compile.ir.kinds import Saving
from elixir_compile.ir.plan import Plan
from elixir_compile.ir.record import Record
from elixir_compile.report.activations import SAID, saving_answers
from elixir_compile.report.text import table_text
from elixir_compile.units import format_bytes, format_s

TOLERANCE = 0.1
"""Share by which seconds and bytes may differ from the plan before they are flagged; counts must be equal."""

Figure = str | int | float | bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One thing that two plans say differently."""

    what: str
    first: Figure
    second: Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDiff:
    """What differs between two plans, nothing else."""

    is_equal: bool
    """Whether the plans are equal in every field, also those that are not compared one by one."""
    header: tuple[Change, ...]
    buckets: tuple[Change, ...]
    activations: tuple[Change, ...]
    """Bytes by what happens to them, then groups that are treated differently."""
    counts: tuple[Change, ...]
    """Actions of one rank by verb."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One figure, planned and measured."""

    what: str
    planned: int | float
    measured: int | float
    ratio: float | None
    """Measured over planned; None where nothing was planned."""
    is_off: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDiff:
    """A plan beside the record of a step."""

    origin: str
    comparisons: tuple[Comparison, ...]


def diff(first: Plan, second: Plan | Record) -> str:
    """Return what differs between two plans, or a plan beside what a step took, as a table."""
    return diff_text(difference(first, second))


def difference(first: Plan, second: Plan | Record) -> PlanDiff | RunDiff:
    """Return what `diff` says, as a value."""
    return run_diff(first, second) if isinstance(second, Record) else plan_diff(first, second)


def diff_text(found: PlanDiff | RunDiff) -> str:
    """Return the difference as a table."""
    return _run_diff_text(found) if isinstance(found, RunDiff) else _plan_diff_text(found)


def plan_diff(first: Plan, second: Plan) -> PlanDiff:
    """Return what differs: the header, buckets by parameters and placement, what happens to activations,
    and how often each verb is used."""
    header = [Change(what=what, first=of(first), second=of(second)) for what, of in _HEADER.items()]
    planned, other = _counts(first), _counts(second)
    counts = [
        Change(what=verb, first=planned.get(verb, 0), second=other.get(verb, 0)) for verb in sorted({*planned, *other})
    ]
    return PlanDiff(
        is_equal=first == second,
        header=_changed(header),
        buckets=_changed(_bucket_changes(first, second)),
        activations=_changed(_activation_changes(first, second)),
        counts=_changed(counts),
    )


def run_diff(plan: Plan, record: Record) -> RunDiff:
    """Return the plan's figures beside those of `record`; what is off by more than `TOLERANCE` is flagged."""
    made = plan.prediction
    pairs = (
        ("step_s", made.step_s, record.step_s),
        ("device_peak_bytes", made.device_peak_bytes, record.device_peak_bytes),
        ("host_peak_bytes", made.host_peak_bytes, record.host_peak_bytes),
    )
    planned = _counts(plan)
    counts = [(verb, planned.get(verb, 0), record.counts.get(verb, 0)) for verb in _MOVED]
    comparisons = [_comparison(*pair, tolerance=TOLERANCE) for pair in pairs]
    comparisons += [_comparison(*pair, tolerance=0.0) for pair in counts if any(pair[1:])]
    return RunDiff(origin=record.origin, comparisons=tuple(comparisons))


def _plan_diff_text(found: PlanDiff) -> str:
    """Return the differences as a table; equal plans in one line."""
    rows = [
        (change.what, _figure_text(change.what, change.first), _figure_text(change.what, change.second))
        for change in (*found.header, *found.buckets, *found.activations, *found.counts)
    ]
    if found.is_equal:
        return "the plans are equal"
    if not rows:
        return "the plans place and count the same; regions, the order of actions, or decisions differ"
    return "the plans differ\n" + table_text(("", "first", "second"), rows)


def _run_diff_text(found: RunDiff) -> str:
    """Return planned and measured figures as a table, flagged where they are off."""
    rows = [
        (
            one.what,
            _figure_text(one.what, one.planned),
            _figure_text(one.what, one.measured),
            "" if one.ratio is None else f"{one.ratio:.2f}",
            "<-- off" if one.is_off else "",
        )
        for one in found.comparisons
    ]
    num_off = sum(one.is_off for one in found.comparisons)
    verdict = f"{num_off} of {len(rows)} figures are off" if num_off else "as planned"
    return f"{verdict}\n" + table_text(("", "planned", found.origin, "ratio", ""), rows)


_HEADER: Mapping[str, Callable[[Plan], Figure]] = {
    "name": lambda plan: plan.name,
    "graph": lambda plan: plan.graph,
    "machine": lambda plan: plan.cluster,
    "copies": lambda plan: plan.num_copies,
    "symbols": lambda plan: " ".join(f"{name}={size}" for name, size in plan.symbols),
    "planner": lambda plan: plan.planner,
    "update": lambda plan: plan.update.value,
    "loss_chunks": lambda plan: plan.loss_chunks,
    "budget_bytes": lambda plan: plan.budget_bytes,
    "base_bytes": lambda plan: plan.base_bytes,
    "step_s": lambda plan: plan.prediction.step_s,
    "exposed_s": lambda plan: plan.prediction.exposed_s,
    "bound_s": lambda plan: plan.bound_s,
    "device_peak_bytes": lambda plan: plan.prediction.device_peak_bytes,
    "device_peak_at": lambda plan: plan.prediction.device_peak_at,
    "host_peak_bytes": lambda plan: plan.prediction.host_peak_bytes,
    "regions": lambda plan: len(plan.regions),
}
_SECONDS = frozenset({"step_s", "exposed_s", "bound_s"})
_SAVED_BYTES: Mapping[Saving, str] = {saving: f"activations_{said}_bytes" for saving, said in SAID.items()}
_BYTES = frozenset({"budget_bytes", "base_bytes", "device_peak_bytes", "host_peak_bytes", *_SAVED_BYTES.values()})
_NOT_LISTED = "not listed"
_WIDTH = 40
_MOVED = ("gather", "release", "reduce", "offload", "prefetch")


def _counts(plan: Plan) -> Mapping[str, int]:
    actions = plan.schedules[0].actions if plan.schedules else ()
    return Counter(action.verb.value for action in actions)


def _bucket_changes(first: Plan, second: Plan) -> list[Change]:
    before, after = _bucket_figures(first), _bucket_figures(second)
    changes: list[Change] = []
    for bucket in dict.fromkeys((*before, *after)):
        if bucket not in before or bucket not in after:
            here, there = ("there" if bucket in side else "not there" for side in (before, after))
            changes.append(Change(what=bucket, first=here, second=there))
            continue
        changes += [
            Change(what=f"{bucket} {what}", first=figure, second=after[bucket][what])
            for what, figure in before[bucket].items()
        ]
    return changes


def _bucket_figures(plan: Plan) -> Mapping[str, Mapping[str, Figure]]:
    return {
        bucket.id: {
            "params": " ".join(bucket.params),
            "shards": bucket.shards_text,
            "group": bucket.group,
            "state_bytes": bucket.state_nbytes,
            "sum_bytes": bucket.sum_nbytes,
            "param": placement.param.value,
            "optim": placement.optim.value,
            "streamed": placement.streamed,
            "resident": placement.resident,
        }
        for bucket, placement in zip(plan.buckets, plan.placements, strict=True)
    }


def _activation_changes(first: Plan, second: Plan) -> list[Change]:
    """A group that a plan does not list is kept there, so it differs only from one that is not."""
    before, after = _saved_figures(first), _saved_figures(second)
    changes = [Change(what=what, first=before[what], second=after[what]) for what in _SAVED_BYTES.values()]
    ways = [{group.id: group.saving for group in made.activations} for made in (first, second)]
    for group in dict.fromkeys((*ways[0], *ways[1])):
        here, there = (own.get(group) for own in ways)
        if (here or Saving.KEEP) is not (there or Saving.KEEP):
            told = [_NOT_LISTED if saving is None else saving.value for saving in (here, there)]
            changes.append(Change(what=group, first=told[0], second=told[1]))
    return changes


def _saved_figures(plan: Plan) -> Mapping[str, Figure]:
    """Bytes by what happens to them; a plan that keeps everything does not know how much that is."""
    if not plan.activations:
        return {_SAVED_BYTES[saving]: "all" if saving is Saving.KEEP else 0 for saving in Saving}
    return {_SAVED_BYTES[one.saving]: one.nbytes for one in saving_answers(plan)}


def _figure_text(what: str, figure: Figure) -> str:
    if figure is None:
        return "none"
    if isinstance(figure, bool):
        return "yes" if figure else "no"
    if isinstance(figure, str):
        # The whole text is in the value; a table shows where a long one begins and ends.
        return figure if len(figure) <= _WIDTH else f"{figure[: _WIDTH // 2]} ... {figure[-_WIDTH // 2 :]}"
    if what in _SECONDS:
        return format_s(figure)
    is_bytes = what in _BYTES or what.endswith(" state_bytes")
    return format_bytes(int(figure)) if is_bytes else str(figure)


def _changed(changes: list[Change]) -> tuple[Change, ...]:
    return tuple(change for change in changes if change.first != change.second)


def _comparison(what: str, planned: float, measured: float, tolerance: float) -> Comparison:
    ratio = measured / planned if planned else None
    is_off = measured != planned if ratio is None else abs(ratio - 1) > tolerance
    return Comparison(what=what, planned=planned, measured=measured, ratio=ratio, is_off=is_off)
