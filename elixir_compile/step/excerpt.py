"""Make the errors of `verify`, with the lines of the printed plan around the fault."""

from collections.abc import Collection, Iterable, Sequence

from elixir_compile.base.errors import IllegalSchedule
from elixir_compile.ir.plan import Plan, bucket_text

_NUM_AROUND = 3


def illegal(sentence: str, title: str, lines: Sequence[str], *places: int) -> IllegalSchedule:
    """Return an error with `sentence` and the lines around the numbers `places`, which are marked `<-- here`."""
    lines = lines or ["(none)"]
    shown = [title]
    last = -1
    for at, line in enumerate(lines):
        if all(abs(at - place) > _NUM_AROUND for place in places):
            continue
        if at > last + 1:
            shown.append("  ...")
        shown.append(f"  {line}  <-- here" if at in places else f"  {line}")
        last = at
    if last < len(lines) - 1:
        shown.append("  ...")
    return IllegalSchedule(sentence, "\n".join(shown))


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


def illegal_actions(sentence: str, plan: Plan, rank_index: int, places: Collection[int]) -> IllegalSchedule:
    """Return an error about the actions number `places` of schedule number `rank_index`: each is marked."""
    schedule = plan.schedules[rank_index]
    return illegal(sentence, f"schedule rank {schedule.rank}", _texts(schedule.actions), *places)


def illegal_claim(sentence: str, plan: Plan, at: int) -> IllegalSchedule:
    """Return an error about line number `at` below the plan's title: 0 for its budget, 2 for its peaks."""
    title, *claims = str(plan).split("\n")[:4]
    return illegal(sentence, title, [claim.strip() for claim in claims], at)


def _texts(values: Iterable[object]) -> list[str]:
    return [str(value) for value in values]
