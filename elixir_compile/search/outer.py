"""Ask for a plan in several variants of a question: the loop around searches.

A variant is a changed question, most often a changed `Problem`: in micro-batches, with its loss in chunks, with
narrower moments, with less room beside the plan. Who knows the variants yields one after the other, and is sent the
answer to each: the plan, or the error with the bytes that it needs. The next variant may depend on them.

```text
  exact moments          -> needs 24.3 GiB, budget 22 GiB: 2.3 GiB too many
  2.3 GiB of them less   -> 1.2 s
```

A variant that computes the same is taken instead of the question as it was asked if its step is shorter by `GAIN`: the
loss in chunks, another number of micro-batches, a setting of `tuning`. A variant that gives something up is asked only
if nothing else fits: narrower moments, less room beside the plan, micro-batches under "fit".

Other loops around searches choose in another way: the fewest bytes for which a search has a plan are bisected
(`planner.with_min_host_bytes`, `joint_budget.plan_in_least`), the classes of ranks search again until they agree on
what is released (`ranks`), the settings of an optimizer step are searched in the order of their bounds (`tuning`), and
state on disk is compared with state on the host by their steps alone (`planner.plan_with_disk`).

Every `Decision` of a plan is worded by `decision`, whoever decides: it says in the same words what the options that are
not taken lack, be they answers to variants or other homes of a bucket. The homes and actions themselves are in a plan
by `search.reasons`.
"""

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import TypeVar

from elixir_compile.base.errors import NoFeasiblePlan
from elixir_compile.base.units import format_bytes, format_s
from elixir_compile.ir import Decision, Plan

Asked = TypeVar("Asked")
Made = TypeVar("Made")
Variants = Generator[Asked, Made, None]
"""Yields variants of a question, and is sent the answer to each."""
GAIN = 0.01
"""Share of the step that a variant must save to be taken: no prediction is as exact."""


class NotTaken(BaseException):
    """Ends a compilation with a plan that is not used; no `Exception`, as the compiler would wrap it."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan

    def renewed(self) -> "NotTaken":
        """Return the same without the traceback."""
        return NotTaken(self.plan)


Refusal = NoFeasiblePlan | NotTaken


def answers(
    variants: Variants[Asked, Made | NoFeasiblePlan], search: Callable[[Asked], Made]
) -> list[tuple[Asked, Made | NoFeasiblePlan]]:
    """Return each of `variants` with its answer."""
    found: list[tuple[Asked, Made | NoFeasiblePlan]] = []
    asked = next(variants, None)
    while asked is not None:
        found.append((asked, answer(search, asked)))
        try:
            asked = variants.send(found[-1][1])
        except StopIteration:
            break
    return found


def answer(search: Callable[[Asked], Made], asked: Asked) -> Made | NoFeasiblePlan:
    """Return what `search` finds for `asked`, or its error, without the traceback: its frames hold a failed capture."""
    try:
        return search(asked)
    except NoFeasiblePlan as error:
        return error.renewed()


def first_of(variants: Variants[Asked, Refusal], search: Callable[[Asked], Made]) -> Made:
    """Return what `search` finds for the first of `variants` that has a plan which is taken.

    `variants` are sent errors, and plans that are not taken. Raises the last error if no variant is left.
    """
    asked = next(variants)
    while True:
        try:
            return search(asked)
        except (NoFeasiblePlan, NotTaken) as refused:
            found = refused.renewed()
        try:
            asked = variants.send(found)
        except StopIteration:
            break
    raise found.renewed()


def leaner(one: NoFeasiblePlan, other: NoFeasiblePlan) -> NoFeasiblePlan:
    """Return the error `other` if it names fewer bytes of the same memory than `one`; else `one`."""
    return other if other.memory == one.memory and other.needed_bytes < one.needed_bytes else one


def is_worth(step_s: float, before_s: float) -> bool:
    """Return whether a variant with a step of `step_s` is taken instead of a plan with a step of `before_s`."""
    return step_s < before_s * (1 - GAIN)


def lowest(bounds: Iterable[float | None]) -> float | None:
    """Return the bound that holds for every plan of several variants, given those of each; None if one is not known."""
    known = list(bounds)
    return None if None in known else min((bound for bound in known if bound is not None), default=None)


# ----------------------------------------------------------------------------------------------------------------------
# Decisions: what is taken, why, and what each of the other options lacks.


@dataclass(frozen=True, slots=True)
class Over:
    """So many bytes over a limit, of an option that does not fit."""

    nbytes: int
    limit: str = "the budget"


Lack = NoFeasiblePlan | Over | float | str
"""What an option lacks that is not taken: the bytes of the error or over a limit, the seconds by which its step is
longer, or other words; empty if the name of the option says it already."""


def shortfall(found: Plan | NoFeasiblePlan, taken: Plan) -> NoFeasiblePlan | float:
    """Return what `found` lacks, the answer to a variant in whose place `taken` is taken."""
    return found if isinstance(found, NoFeasiblePlan) else found.prediction.step_s - taken.prediction.step_s


def in_words(lack: Lack) -> str:
    """Return `lack` as a decision says it."""
    if isinstance(lack, NoFeasiblePlan):
        return f"needs {format_bytes(lack.needed_bytes)}"
    if isinstance(lack, Over):
        return f"{format_bytes(lack.nbytes)} over {lack.limit}"
    return lack if isinstance(lack, str) else f"{format_s(lack)} longer"


def decision(
    subject: str,
    choice: str,
    *because: str,
    others: Iterable[tuple[str, Lack]] = (),
    cost_s: float = 0.0,
    saves_bytes: int = 0,
) -> Decision:
    """Return the decision to take `choice`, with its reasons, and the names of the `others` with what each lacks.

    `cost_s` counts as 0 if it is less: a choice that makes the step shorter costs nothing.
    """
    return Decision(
        subject=subject,
        choice=choice,
        because="; ".join(because),
        cost_s=max(0.0, cost_s),
        saves_bytes=saves_bytes,
        rejected=tuple(f"{name}: {text}" if (text := in_words(lack)) else name for name, lack in others),
    )


def fitting(made: Plan) -> str:
    """Return the reason of a choice with which the plan `made` fits its budget."""
    return f"the peak of {format_bytes(made.prediction.device_peak_bytes)} fits {format_bytes(made.budget_bytes)}"
