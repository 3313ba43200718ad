"""The calls of a step that save less: a second treatment of activations, beside that of the plan.

```text
  outstanding 4, num_full 2      F F f f B B b b        F keeps its activations, f computes them again
```

A forward is full if fewer than `num_full` full forwards wait for their backward, and lean otherwise, in whatever order
a schedule runs them: memory that is enough for some outstanding forwards to keep their activations is used by them.
Storing the activations of some micro-batches, and computing those of the others again, is from Korthikanti et al.,
"Reducing Activation Recomputation in Large Transformer Models" (2022), appendix C.
"""

from dataclasses import dataclass

from elixir_compile.base.errors import InvalidPlan
from elixir_compile.ir.bucket import Activations
from elixir_compile.ir.schedule import Region, Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class LeanCalls:
    """How the lean calls of a step run. Their buckets, placements, gathers and reduces are those of the full calls."""

    num_full: int
    """The most full forwards that wait for their backward at once."""
    activations: tuple[Activations, ...]
    """Groups of activations with their treatment in lean calls."""
    regions: tuple[Region, ...]
    schedules: tuple[Schedule, ...]

    def __post_init__(self) -> None:
        if self.num_full < 1:
            raise InvalidPlan(f"{self.num_full} full forwards beside lean ones; expected 1 or more.")

    def __str__(self) -> str:
        lines = [f"lean calls beside {self.num_full} full"]
        lines += ["  activations", *(f"    {group}" for group in self.activations)] if self.activations else []
        lines += ["  regions", *(f"    {region}" for region in self.regions)]
        lines += [f"  {schedule}".replace("\n", "\n  ") for schedule in self.schedules]
        return "\n".join(lines)
