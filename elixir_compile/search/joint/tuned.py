"""The settings of an optimizer step with what a search found out about them: their plans, or why they have none."""

import math
from dataclasses import dataclass
from enum import IntEnum

from elixir_compile.base.errors import NoFeasiblePlan
from elixir_compile.ir import Plan
from elixir_compile.search.joint.settings import Setting
from elixir_compile.search.problem import Problem


class Stage(IntEnum):
    """What is known of a setting."""

    MORE_ROWS = 0
    """The bound of a forward and backward with more rows."""
    COMPUTE = 1
    """The bound of its own forward and backward in unlimited memory."""
    FITS = 2
    """That it fits, and, unless it is the first, the bound in the memory that is there."""
    SEARCHED = 3
    """Its plan."""
    TOO_LARGE = 4
    """That no plan fits."""
    NOT_BETTER = 5
    """That its bound shows no gain worth a search."""
    NOT_SEARCHED = 6
    """That the time was over before it was searched."""


@dataclass(slots=True, kw_only=True)
class Trial:
    """A setting with all that the search has found out about it."""

    setting: Setting
    bound_s: float = 0.0
    """No plan of the setting takes fewer seconds for the tokens of a step."""
    stage: Stage = Stage.MORE_ROWS
    """The last fact found out."""
    plan: Plan | None = None
    problem: Problem | None = None
    """What `plan` answers."""
    step_s: float = math.inf
    """Seconds of the optimizer step under `plan`: of all its forwards, backwards and its update."""
    limits: tuple[str, ...] = ()
    """The lanes on the critical path of the step under `plan`, with their shares, and the full memories."""
    needed: NoFeasiblePlan | int | None = None
    """If nothing fits: the error of the search, or the smallest peak in bytes of device memory."""

    @property
    def tokens_per_s(self) -> float:
        return self.setting.tokens / self.step_s

    @property
    def needed_bytes(self) -> int:
        """If nothing fits, the smallest peak that was found, or 0 if it is not known."""
        return self.needed.needed_bytes if isinstance(self.needed, NoFeasiblePlan) else self.needed or 0

    @property
    def most_tokens_per_s(self) -> float:
        """A limit on the tokens per second of the setting under any plan; 0 if no plan fits."""
        return 0.0 if self.stage is Stage.TOO_LARGE else self.setting.tokens / max(self.bound_s, 1e-12)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """The trials of a search over settings."""

    trials: tuple[Trial, ...]
    """The trials that have a plan, fastest first, then the other trials by their bounds."""

    @property
    def is_complete(self) -> bool:
        """Whether every trial was searched, or shown to be no faster or too large, before the time was over."""
        return all(trial.stage is not Stage.NOT_SEARCHED for trial in self.trials)

    @property
    def best(self) -> Trial:
        return self.trials[0]

    @property
    def gap(self) -> float:
        """The most by which the tokens per second of any trial could exceed those of the best trial, as a share of the
        best trial's."""
        most = max(trial.most_tokens_per_s for trial in self.trials)
        return max(0.0, most / self.best.tokens_per_s - 1.0)

    def of_state(self, state_bytes: int | None) -> "Tuned | None":
        """Return the trials with `state_bytes` alone; None if none of them has a plan."""
        trials = tuple(trial for trial in self.trials if trial.setting.state_bytes == state_bytes)
        return Tuned(trials=trials) if trials and trials[0].plan is not None else None


def order(trial: Trial) -> tuple[bool, float, bool, float]:
    """Return a key that sorts trials with a plan first, the fastest first, then other trials by their bounds."""
    is_fit = trial.stage is not Stage.TOO_LARGE
    return trial.plan is None, trial.step_s / trial.setting.tokens, not is_fit, trial.bound_s / trial.setting.tokens
