"""Which arguments of `elixir-compile plan` go together."""

from elixir_compile.errors import InvalidOption


def wrong_beside_plan(
    tokens_per_step: str | None,
    states: tuple[int, ...],
    stages: int | None,
    schedule: str | None,
    *,
    is_tuned: bool,
    is_largest: bool,
) -> InvalidOption | None:
    """Return the error if an argument of `plan` needs another, or cannot be given with it; else None."""
    if is_tuned and is_largest:
        return InvalidOption("largest_batch", True, "no --largest-batch beside --tune, which finds the fastest batch")
    if tokens_per_step is not None and not is_tuned:
        return InvalidOption("tokens_per_step", tokens_per_step, "--tune beside it; without, --batch and --seq count")
    if len(states) > 1 and not is_tuned:
        return InvalidOption("state_bytes", states, "a single number; several need --tune")
    if schedule is not None and stages is None:
        return InvalidOption("schedule", schedule, "--stages beside it, such as --stages 4")
    if stages is not None and (is_tuned or is_largest):
        return InvalidOption("stages", stages, "no --tune and no --largest-batch beside --stages")
    return None
