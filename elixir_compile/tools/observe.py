"""Observe a model in training, `with elixir.observe(model, "run/trace") as study:`, and write its figures to a folder
while it runs.
"""

import logging
import math
import platform
import weakref
from collections import deque
from collections.abc import Callable, Collection
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, SupportsFloat, TextIO

import torch
from torch import nn

from elixir_compile import compat
from elixir_compile.base.errors import InvalidOption, NestedMeasurement
from elixir_compile.base.folders import write_whole
from elixir_compile.base.version import __version__
from elixir_compile.ir import Plan, plan_to_json
from elixir_compile.search.problem import Question, question_to_bytes
from elixir_compile.session.model import managed_model
from elixir_compile.session.plan_files import PlanKeys, question_path
from elixir_compile.tools.measure.observation import CounterThread, FullSteps, Observation, Summaries
from elixir_compile.tools.observed import (
    FullStep,
    StepSummary,
    TraceMeta,
    own_files,
    plan_path,
    steps_path,
    summary_to_json,
    write_full_step,
    write_meta,
)
from elixir_compile.tools.report.runs import observed_text

# ----------------------------------------------------------------------------------------------------------------------
# Write an observed run to a folder, while it runs.


class TraceWriter:
    """The files of one rank in the folder of an observed run; the folder is made, and files of an earlier run go."""

    def __init__(self, folder: "str | Path", model: nn.Module, rank: int) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in [*own_files(self.folder, rank)]:
            path.unlink()
        self._rank = rank
        self._model = type(model).__name__
        self._steps: TextIO | None = None
        self._has_meta = False

    def begin(self, device: torch.device, num_ranks: int) -> None:
        """Write the facts about the observation, once: the device is known when the first step is."""
        if self._rank == 0 and not self._has_meta:
            self._has_meta = True
            versions = {
                "elixir_compile": __version__,
                "python": platform.python_version(),
                "torch": str(torch.__version__),
            }
            meta = TraceMeta(model=self._model, num_ranks=num_ranks, device=device.type, versions=versions)
            write_meta(self.folder, meta)

    def plan(self, key: str, plan: Plan, question: Question | None) -> None:
        """Write `plan` and the question that it answers, under `key`."""
        path = plan_path(self.folder, key)
        write_whole(path, plan_to_json(plan).encode())
        if question is not None:
            write_whole(question_path(path), question_to_bytes(question))

    def summary(self, summary: StepSummary) -> None:
        """Append the line of a step, which is on disk when this returns."""
        if self._steps is None:
            self._steps = steps_path(self.folder, self._rank).open("w", encoding="utf-8")
        self._steps.write(summary_to_json(summary) + "\n")
        self._steps.flush()

    def full_step(self, full: FullStep) -> None:
        """Write all that was recorded of a step."""
        write_full_step(self.folder, full)

    def files(self) -> str:
        """Return the folder and the names of the files of this rank in it, and of plans, as text."""
        own = [*own_files(self.folder, self._rank), *self.folder.glob("plan-*.json")]
        names = ", ".join(sorted(path.name for path in own))
        return f"{self.folder} ({names})" if names else ""

    def close(self) -> None:
        """Close the files."""
        if self._steps is not None:
            self._steps.close()
            self._steps = None


# ----------------------------------------------------------------------------------------------------------------------
# Observe a model in training: `with elixir.observe(model, "run/trace") as study:`.
#
#   off        nothing
#   summary    every step: phases, bytes by lane, memory              study.latest, steps-r0.jsonl
#   full       chosen steps: every span of every lane, in addition    record-r0-8.json.gz


log = logging.getLogger("elixir_compile")

AUTO_FULL = (8, 9, 10)
"""The steps that `full="auto"` records: behind those that compile and those that the planner times."""
_MOST_KEPT = 1000
"""The most summaries that a study keeps in memory: the last ones."""
_observed: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


class Study:
    """The figures of an observed run so far; made by `observe`. As text, a table of phases and bytes."""

    def __init__(
        self,
        model: nn.Module,
        folder: "str | Path | None",
        wants: Callable[[int], bool],
        counters_hz: float,
        *,
        memory_events: bool,
    ) -> None:
        self._model = weakref.ref(model)
        self._keys = PlanKeys()
        self._kept: deque[StepSummary] = deque(maxlen=_MOST_KEPT)
        self._full: dict[int, FullStep] = {}
        self._writer = None if folder is None else TraceWriter(folder, model, _rank())
        self._sink: Summaries | None = None
        self._counters = (
            CounterThread(counters_hz, lambda: None if self._sink is None else self._sink.uuid())
            if counters_hz
            else None
        )
        full_steps = FullSteps(
            model,
            wants,
            self._take_full,
            memory_events=memory_events,
            optimizers=lambda: self._observation.optimizers(),
        )
        self._sink = Summaries(_rank(), self._plan_keys, self._take, full_steps, self._counters)
        files = str if self._writer is None else self._writer.files
        self._observation = Observation(model, self._sink, files)
        self._observation.start()

    @property
    def latest(self) -> StepSummary | None:
        """The summary of the last step that is known; None before the second step.

        On a device with a clock it may be two steps old.
        """
        return self._kept[-1] if self._kept else None

    @property
    def summaries(self) -> tuple[StepSummary, ...]:
        """The summaries of the last 1,000 steps, in order."""
        return tuple(self._kept)

    @property
    def full_steps(self) -> tuple[FullStep, ...]:
        """The steps that were recorded in full, in order; without those that only the folder keeps, beyond 16."""
        return tuple(self._full[number] for number in sorted(self._full))

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
        if self._counters is not None:
            self._counters.stop()
        self._observation.stop()
        if self._writer is not None:
            self._writer.close()
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
        """Return the keys of the plans in force, and write those that the folder does not have yet."""
        model = self._model()
        managed = None if model is None else managed_model(model)
        keys: list[str] = []
        for made in () if managed is None else managed.compilations:
            plan = None if made.is_inference or made.is_superseded else made.plan
            if plan is not None:
                is_new = not self._keys.knows(plan)
                keys.append(self._keys.of(plan))
                if is_new and self._writer is not None:
                    self._writer.plan(keys[-1], plan, made.question)
        return tuple(keys)

    def _take(self, summary: StepSummary) -> None:
        self._kept.append(summary)
        if self._writer is not None:
            if self._sink is not None and self._sink.device is not None:
                num_ranks = torch.distributed.get_world_size() if _has_ranks() else 1
                self._writer.begin(self._sink.device, num_ranks)
            self._writer.summary(summary)

    def _take_full(self, full: FullStep) -> None:
        self._full[full.summary.step] = full
        if len(self._full) > _MOST_FULL:
            del self._full[min(self._full)]
        if self._writer is not None:
            self._writer.full_step(full)


_MOST_FULL = 16
"""The most steps in full that a study keeps in memory, about 100 KB each: the last ones."""


def observe(
    model: nn.Module,
    folder: "str | Path | None" = None,
    *,
    full: 'Literal["auto"] | Collection[int]' = "auto",
    full_every: int = 0,
    memory_events: bool = False,
    counters_hz: float = 5.0,
) -> Study:
    """Observe the training of `model` until `stop` of the study that is returned, or to the end of a `with` block.

    Each step gets a summary: its period from the first forward to that of the next step, and the seconds of forward,
    backward, update and your own code, which add up to it; bytes moved on each lane; memory. `model` is the module or
    its compiled form, and may be compiled later. With a `folder`, the figures are written there while the run goes on;
    files of an earlier run in it are replaced.

    `full` are the numbers of the steps to record span by span, "auto" for 8, 9 and 10, and `full_every` adds each
    step whose number it divides. With `memory_events`, these steps also get the bytes on the device by kind over time.
    On a CPU they then take up to twice as long, and of steps in a row, every other one has them. `counters_hz` is how
    often per second the counters of the machine are read; 0 for never.

    Raises NestedMeasurement if the model is observed already, and InvalidOption for a wrong number.

    Example:
        with elixir.observe(compiled) as study:
            for _ in range(3):
                compiled(batch).backward()
                optimizer.step()
                optimizer.zero_grad()
        print(study)
    """
    if not (0 <= counters_hz <= 100):
        raise InvalidOption("counters_hz", counters_hz, "a number from 0 to 100")
    wants = _chooser(full, full_every)
    plain = compat.undo_compile(model)
    if plain in _observed:
        raise NestedMeasurement(type(plain).__name__)
    _observed.add(plain)
    try:
        return Study(plain, folder, wants, counters_hz, memory_events=memory_events)
    except BaseException:
        _observed.discard(plain)
        raise


def observe_for_option(model: nn.Module, folder: Path) -> None:
    """Observe `model` to the end of the process, as the option `trace` asks, unless it is observed already."""
    if model not in _observed:
        study = observe(model, folder)
        log.info("the steps of %s are observed in %s", type(model).__name__, folder)
        weakref.finalize(model, study.stop)


def _chooser(full: 'Literal["auto"] | Collection[int]', full_every: int) -> Callable[[int], bool]:
    """Return the function that says whether the step with a number is recorded in full."""
    chosen = frozenset(AUTO_FULL if full == "auto" else full)
    if (isinstance(full, str) and full != "auto") or not all(isinstance(step, int) and step >= 0 for step in chosen):
        raise InvalidOption("full", full, '"auto" or numbers of steps such as (8, 9, 10)')
    if isinstance(full_every, bool) or not isinstance(full_every, int) or full_every < 0:
        raise InvalidOption("full_every", full_every, "a number of steps, 0 for none")
    return lambda step: step in chosen or bool(full_every and step and step % full_every == 0)


def _rank() -> int:
    return torch.distributed.get_rank() if _has_ranks() else 0


def _has_ranks() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
