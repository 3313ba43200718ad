"""Compare two plans, or a plan with the record of a step, and write the differences as a table.

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

from elixir_compile.base.units import format_bytes, format_s
from elixir_compile.ir.kinds import Saving
from elixir_compile.ir.plan import SAID, Plan, lean_text, saving_answers
from elixir_compile.ir.schedule import Record
from elixir_compile.tools.report.tables import actions_of, table_text

TOLERANCE = 0.1
"""Seconds and bytes of a step are flagged if they differ from the plan by more than this share; counts, if they differ
at all."""

Figure = str | int | float | bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A figure that differs between two plans."""

    what: str
    first: Figure
    second: Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDiff:
    """The differences between two plans."""

    is_equal: bool
    """True if the plans are equal in all fields, also in fields that have no change listed here."""
    header: tuple[Change, ...]
    buckets: tuple[Change, ...]
    activations: tuple[Change, ...]
    """Bytes of activations by treatment, then the groups with different treatment."""
    counts: tuple[Change, ...]
    """Number of actions of a rank by verb."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A figure, planned and measured."""

    what: str
    planned: int | float
    measured: int | float
    ratio: float | None
    """Measured over planned; None if the planned figure is 0."""
    is_off: bool
    """True if the figures differ by more than the tolerance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDiff:
    """The comparison of a plan with the record of a step, simulated or measured (`origin`)."""

    origin: str
    comparisons: tuple[Comparison, ...]


def diff(first: Plan, second: Plan | Record) -> str:
    """Return a table of the differences between two plans, or of planned and measured figures.

    `first` is a plan. `second` is a plan, or the record of a step.

    Example:
        plan = elixir.compilations(compiled)[-1].plan
        record = elixir.measure_step(lambda: compiled(batch).backward())
        print(elixir.diff(plan, record))
    """
    return diff_text(difference(first, second))


def difference(first: Plan, second: Plan | Record) -> PlanDiff | RunDiff:
    """Return the result of `diff` as a value."""
    return run_diff(first, second) if isinstance(second, Record) else plan_diff(first, second)


def diff_text(found: PlanDiff | RunDiff) -> str:
    """Return `found` as a table with a mark on measured figures that are off, or as a sentence if plans are equal."""
    if isinstance(found, RunDiff):
        rows = [
            (
                pair.what,
                _figure_text(pair.what, pair.planned),
                _figure_text(pair.what, pair.measured),
                "" if pair.ratio is None else f"{pair.ratio:.2f}",
                "<-- off" if pair.is_off else "",
            )
            for pair in found.comparisons
        ]
        num_off = sum(pair.is_off for pair in found.comparisons)
        verdict = f"{num_off} of {len(rows)} figures are off" if num_off else "as planned"
        return f"{verdict}\n" + table_text(("", "planned", found.origin, "ratio", ""), rows)
    if found.is_equal:
        return "the plans are equal"
    changes = change_rows(found)
    if not changes:
        return "the plans have the same placements and counts; their regions, the order of actions, or decisions differ"
    return "the plans differ\n" + table_text(("", "first", "second"), changes)


def plan_diff(first: Plan, second: Plan) -> PlanDiff:
    """Return the differences in the head, the buckets and placements, the activations, and the number of actions."""
    header = [Change(what=what, first=of(first), second=of(second)) for what, of in _HEADER.items()]
    before, after = _bucket_figures(first), _bucket_figures(second)
    buckets: list[Change] = []
    for bucket in dict.fromkeys((*before, *after)):
        if bucket not in before or bucket not in after:
            in_first, in_second = ("present" if bucket in side else "absent" for side in (before, after))
            buckets.append(Change(what=bucket, first=in_first, second=in_second))
            continue
        own = before[bucket].items()
        buckets += [Change(what=f"{bucket} {what}", first=value, second=after[bucket][what]) for what, value in own]
    kept, other = _saved_figures(first), _saved_figures(second)
    activations = [Change(what=what, first=kept[what], second=other[what]) for what in _SAVED_BYTES.values()]
    savings = [{group.id: group.saving for group in made.activations} for made in (first, second)]
    for group in dict.fromkeys((*savings[0], *savings[1])):
        pair = [saving_of.get(group) for saving_of in savings]
        if len({saving or Saving.KEEP for saving in pair}) > 1:  # a plan keeps a group that it does not list
            in_first, in_second = (_NOT_LISTED if saving is None else saving.value for saving in pair)
            activations.append(Change(what=group, first=in_first, second=in_second))
    counts, others = _counts(first), _counts(second)
    verbs = sorted({*counts, *others})
    return PlanDiff(
        is_equal=first == second,
        header=_changed(header),
        buckets=_changed(buckets),
        activations=_changed(activations),
        counts=_changed([Change(what=verb, first=counts.get(verb, 0), second=others.get(verb, 0)) for verb in verbs]),
    )


def run_diff(plan: Plan, record: Record) -> RunDiff:
    """Return the figures of `plan` and of `record`; differences of more than `TOLERANCE` are flagged.

    If other graphs ran in the step too, only the counts are compared, of the plan's own graph: the seconds and the
    peaks of the step are those of all its graphs, and the plan is of one.
    """
    made = plan.prediction
    is_shared = plan.name in record.graphs and len(record.graphs) > 1
    record = record.of_graph(plan.name, [bucket.id for bucket in plan.buckets])
    pairs = (
        ()
        if is_shared
        else (
            ("step_s", made.step_s, record.step_s),
            ("device_peak_bytes", made.device_peak_bytes, record.device_peak_bytes),
            ("host_peak_bytes", made.host_peak_bytes, record.host_peak_bytes),
        )
    )
    planned = _counts(plan)
    counts = [(verb, planned.get(verb, 0), record.counts.get(verb, 0)) for verb in _MOVED]
    comparisons = [_comparison(*pair, tolerance=TOLERANCE) for pair in pairs]
    comparisons += [_comparison(*pair, tolerance=0.0) for pair in counts if any(pair[1:])]
    return RunDiff(origin=record.origin, comparisons=tuple(comparisons))


def change_rows(found: PlanDiff) -> list[tuple[str, str, str]]:
    """Return each difference as text: the figure, in the first plan, in the second."""
    return [
        (change.what, _figure_text(change.what, change.first), _figure_text(change.what, change.second))
        for change in (*found.header, *found.buckets, *found.activations, *found.counts)
    ]


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
    "lean": lean_text,
}
_SECONDS = frozenset({"step_s", "exposed_s", "bound_s"})
_SAVED_BYTES: Mapping[Saving, str] = {saving: f"activations_{said}_bytes" for saving, said in SAID.items()}
_BYTES = frozenset({"budget_bytes", "base_bytes", "device_peak_bytes", "host_peak_bytes", *_SAVED_BYTES.values()})
_NOT_LISTED = "not listed"
_WIDTH = 40
_MOVED = ("gather", "release", "reduce", "offload", "prefetch")


def _counts(plan: Plan) -> Mapping[str, int]:
    return Counter(action.verb.value for action in actions_of(plan))


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


def _saved_figures(plan: Plan) -> Mapping[str, Figure]:
    """Return bytes of activations by treatment. A plan that keeps all does not list their bytes."""
    if not plan.activations:
        return {_SAVED_BYTES[saving]: "all" if saving is Saving.KEEP else 0 for saving in Saving}
    return {_SAVED_BYTES[found.saving]: found.nbytes for found in saving_answers(plan)}


def _figure_text(what: str, figure: Figure) -> str:
    if figure is None:
        return "none"
    if isinstance(figure, bool):
        return "yes" if figure else "no"
    if isinstance(figure, str):
        # The table shows the begin and the end of a long text; the value holds all of it.
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
