"""Write an observed run to a folder, while it runs."""

import platform
from pathlib import Path
from typing import TextIO

import torch
from torch import nn

from elixir_compile.base.folders import write_whole
from elixir_compile.base.version import __version__
from elixir_compile.ir import Plan, plan_to_json
from elixir_compile.search.question import Question, question_to_bytes
from elixir_compile.session.saved import question_path
from elixir_compile.tools.study.observed import FullStep, StepSummary, summary_to_json
from elixir_compile.tools.study.trace_files import (
    TraceMeta,
    own_files,
    plan_path,
    steps_path,
    write_full_step,
    write_meta,
)


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
        """Write what is observed, once: the device is known when the first step is."""
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
