"""Make the errors of `verify`, with the lines of the printed plan around the fault."""

from collections.abc import Iterable, Sequence

from elixir_compile.errors import IllegalSchedule
from elixir_compile.ir.plan import Plan, bucket_text

_NUM_AROUND = 3


def illegal(sentence: str, title: str, lines: Sequence[str], at: int) -> IllegalSchedule:
    """Return an error with `sentence` and the lines around number `at`, which is marked `<-- here`."""
    lines = lines or ["(none)"]
    first, last = max(0, at - _NUM_AROUND), min(len(lines), at + _NUM_AROUND + 1)
    shown = [f"  {line}" for line in lines[first:last]]
    shown[at - first] += "  <-- here"
    above = ["  ..."] if first > 0 else []
    below = ["  ..."] if last < len(lines) else []
    return IllegalSchedule(sentence, "\n".join([title, *above, *shown, *below]))


def illegal_bucket(sentence: str, plan: Plan, at: int) -> IllegalSchedule:
    """Return an error about bucket number `at` of the plan, or about its placement."""
    placed = zip(plan.buckets, plan.placements, strict=True)
    return illegal(sentence, "buckets", [bucket_text(bucket, placement) for bucket, placement in placed], at)


def illegal_activations(sentence: str, plan: Plan, at: int) -> IllegalSchedule:
    """Return an error about group number `at` of the plan's activations."""
    return illegal(sentence, "activations", _texts(plan.activations), at)


def illegal_region(sentence: str, plan: Plan, at: int) -> IllegalSchedule:
    """Return an error about region number `at` of the plan."""
    return illegal(sentence, "regions", _texts(plan.regions), at)


def illegal_action(sentence: str, plan: Plan, rank_index: int, at: int) -> IllegalSchedule:
    """Return an error about action number `at` of schedule number `rank_index`."""
    schedule = plan.schedules[rank_index]
    return illegal(sentence, f"schedule rank {schedule.rank}", _texts(schedule.actions), at)


def illegal_claim(sentence: str, plan: Plan, at: int) -> IllegalSchedule:
    """Return an error about line number `at` below the plan's title: 0 for its budget, 2 for its peaks."""
    title, *claims = str(plan).split("\n")[:4]
    return illegal(sentence, title, [claim.strip() for claim in claims], at)


def _texts(values: Iterable[object]) -> list[str]:
    return [str(value) for value in values]
