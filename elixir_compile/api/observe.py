"""Observe a model in training: `with elixir.observe(model) as study:`."""

import math
import weakref
from collections import deque
from types import TracebackType
from typing import Self, SupportsFloat

import torch
from torch import nn

from elixir_compile import compat
from elixir_compile.errors import NestedMeasurement
from elixir_compile.ir.observed import Interval, StepSummary
from elixir_compile.managed.model import managed_model
from elixir_compile.managed.saved import PlanKeys
from elixir_compile.measure.observation import Observation
from elixir_compile.measure.summaries import Summaries
from elixir_compile.report.observed_text import observed_text

_MOST_KEPT = 1000
"""The most summaries that a study keeps in memory: the last ones."""
_observed: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


class Study:
    """What is known of an observed run so far; made by `observe`. As text, a table of phases and bytes."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._keys = PlanKeys()
        self._kept: deque[StepSummary] = deque(maxlen=_MOST_KEPT)
        sink = Summaries(_rank(), self._plan_keys, self._take)
        self._observation = Observation(model, sink)
        self._observation.start()

    @property
    def latest(self) -> StepSummary | None:
        """The summary of the last step that is known; None before the second step. On a device with a clock it may be
        two steps old."""
        return self._kept[-1] if self._kept else None

    @property
    def summaries(self) -> tuple[StepSummary, ...]:
        """The summaries of the last 1,000 steps, in order."""
        return tuple(self._kept)

    def scalars(self) -> dict[str, float]:
        """Return the finite figures of the latest step under names for loggers; empty before a step is known."""
        return {} if self.latest is None else self.latest.scalars()

    def note(self, **figures: SupportsFloat) -> None:
        """Add figures of your own, such as `loss=loss.item()`, to the step that is running.

        A figure that is not finite is left out.
        """
        values = {name: float(value) for name, value in figures.items()}
        self._observation.note({name: value for name, value in values.items() if math.isfinite(value)})

    def step(self) -> None:
        """Say that the parameters were updated: the next training forward begins a step.

        Only for loops that update without an optimizer of `torch.optim`.
        """
        self._observation.update_done()

    def stop(self) -> None:
        """End the observation. A step whose update was done is kept. A second call does nothing."""
        self._observation.stop()
        model = self._model()
        if model is not None:
            _observed.discard(model)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def __str__(self) -> str:
        return observed_text(self.summaries)

    def _plan_keys(self) -> tuple[str, ...]:
        model = self._model()
        managed = None if model is None else managed_model(model)
        if managed is None:
            return ()
        plans = [made.plan for made in managed.compilations if not (made.is_inference or made.is_superseded)]
        return tuple(self._keys.of(plan) for plan in plans if plan is not None)

    def _take(self, summary: StepSummary, intervals: tuple[Interval, ...]) -> None:
        self._kept.append(summary)


def observe(model: nn.Module) -> Study:
    """Observe the training of `model` until `stop` of the study that is returned, or to the end of a `with` block.

    Each step gets a summary: its period from the first forward to that of the next step, and the seconds of forward,
    backward, update and your own code, which add up to it; bytes moved on each lane; memory. `model` is the module or
    its compiled form, and may be compiled later.

    Raises NestedMeasurement if the model is observed already.

    Example:
        with elixir.observe(compiled) as study:
            for _ in range(3):
                compiled(batch).backward()
                optimizer.step()
                optimizer.zero_grad()
        print(study)
    """
    plain = compat.undo_compile(model)
    if plain in _observed:
        raise NestedMeasurement(type(plain).__name__)
    _observed.add(plain)
    return Study(plain)


def _rank() -> int:
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
