"""What the arguments of `elixir-compile plan` ask for: a plan, the shares of ranks, stages, or the fastest setting."""

from collections.abc import Mapping
from typing import Any

from elixir_compile.base.errors import InvalidOption
from elixir_compile.tools.cli.plan import Request
from elixir_compile.tools.cli.report import fail
from elixir_compile.tools.cli.shares import StagesRequest, plan_or_share, run_stages
from elixir_compile.tools.cli.tune import TuneRequest, run_tune


def run_asked(request: Request, typed: Mapping[str, Any]) -> int:
    """Answer `request`, whose command line has the arguments `typed`, and return the exit code."""
    states, output, as_json = tuple(typed["state_bytes"] or ()), typed["output"], typed["as_json"]
    wrong = wrong_beside_plan(typed, states)
    if wrong is not None:
        return fail(wrong, as_json=as_json)
    if typed["tune"]:
        tuned = TuneRequest(plan=request, batch=typed["batch"], tokens=typed["tokens_per_step"], states=states)
        return run_tune(tuned, output=output, as_json=as_json)
    state_bytes = next(iter(states), None)
    if typed["stages"] is None:
        is_largest = typed["largest_batch"]
        return plan_or_share(request, state_bytes=state_bytes, is_largest=is_largest, output=output, as_json=as_json)
    asked = StagesRequest(
        plan=request,
        stages=typed["stages"],
        schedule=typed["schedule"],
        batch=typed["batch"],
        ranks=typed["ranks"] if typed["ranks"] > 1 else None,
        state_bytes=state_bytes,
    )
    return run_stages(asked, output=output, as_json=as_json)


def wrong_beside_plan(typed: Mapping[str, Any], states: tuple[int, ...]) -> InvalidOption | None:
    """Return the error if an argument of `plan` needs another, or cannot be given with it; else None."""
    is_tuned, is_largest, stages = typed["tune"], typed["largest_batch"], typed["stages"]
    tokens, schedule = typed["tokens_per_step"], typed["schedule"]
    if is_tuned and is_largest:
        return InvalidOption("largest_batch", True, "no --largest-batch beside --tune, which finds the fastest batch")
    if tokens is not None and not is_tuned:
        return InvalidOption("tokens_per_step", tokens, "--tune beside it; without, --batch and --seq count")
    if len(states) > 1 and not is_tuned:
        return InvalidOption("state_bytes", states, "a single number; several need --tune")
    if schedule is not None and stages is None:
        return InvalidOption("schedule", schedule, "--stages beside it, such as --stages 4")
    if stages is not None and (is_tuned or is_largest):
        return InvalidOption("stages", stages, "no --tune and no --largest-batch beside --stages")
    return None
