"""Measure the seconds to capture models by name as `elixir-compile plan` does: from all layers, and from few layers.

    python benchmarks/capture.py                  every case
    python benchmarks/capture.py llama-7b         a single case

Each capture runs in a process of its own, on one thread. The two captures of a case follow each other, and their steps
must be equal. The capture from few layers uses a second process if a core is idle.
Results go to benchmarks/results/capture_cpu.{json,md}; cases that are not run keep their rows.
"""

import hashlib
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

import quiet  # noqa: F401  before torch
from machine import RESULTS, save

CASES = {"gpt2-4b": (4, 1024), "llama-7b": (4, 2048), "llama-70b": (1, 4096)}
"""Batch and length of the sequences."""


def main() -> None:
    """Run the cases from the command line, and save each row as soon as it is there."""
    if sys.argv[1:2] == ["--run"]:
        print(json.dumps(captured(sys.argv[2], sys.argv[3] == "few")))
        return
    path = RESULTS / "capture_cpu.json"
    rows = json.loads(path.read_text())["cases"] if path.exists() else {}
    for name in sys.argv[1:] or CASES:
        whole, few = in_process(name, "whole"), in_process(name, "few")
        if whole.pop("step") != few.pop("step"):
            raise SystemExit(f"{name}: the step written from few layers is not the captured one")
        rows[name] = {"whole": whole, "few": few, "load": os.getloadavg()[0]}
        print(name, rows[name], file=sys.stderr)
        save(path.stem, {"cases": rows})
        path.with_suffix(".md").write_text(table(rows))


def in_process(name: str, how: str) -> dict[str, Any]:
    """Return the result of `captured` in a new process; `how` is `few` or `whole`."""
    made = subprocess.run(
        [sys.executable, __file__, "--run", name, how], check=True, capture_output=True, text=True
    ).stdout
    return json.loads(made.splitlines()[-1])


def captured(name: str, is_few: bool) -> dict[str, Any]:
    """Return the seconds of a capture, of this process and its children, and the digest of the step."""
    import torch

    from elixir_compile.tools.preview.few_layers import LEAST_LAYERS, capture_model
    from elixir_compile.tools.preview.models import TextBatch, find_model

    batch, seq = CASES[name]
    began_s, before_s = time.perf_counter(), cpu_s()
    model, inputs = find_model(name, TextBatch(batch=batch, seq=seq, dtype=torch.bfloat16))
    capture = capture_model(model, inputs, least_layers=LEAST_LAYERS if is_few else 10**6, may_fork=True)
    return {
        "wall_s": round(time.perf_counter() - began_s, 2),
        "cpu_s": [round(after - before, 2) for after, before in zip(cpu_s(), before_s, strict=True)],
        "ops": len(capture.graph.ops),
        "step": hashlib.sha256(str(capture.graph).encode()).hexdigest(),
    }


def cpu_s() -> tuple[float, float]:
    """Return the CPU seconds of this process and of its children."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    own_s, children_s = (usage.ru_utime + usage.ru_stime for usage in usages)
    return own_s, children_s


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the rows as a table in Markdown."""
    lines = [
        "# Seconds to capture a model by name\n",
        "| model | ops | all layers: CPU s | few: CPU s (own + child) | ratio of CPU s | wall s: all, few | load |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        whole_s, (own_s, child_s) = sum(row["whole"]["cpu_s"]), row["few"]["cpu_s"]
        lines.append(
            f"| {name} | {row['few']['ops']} | {whole_s:.1f} | {own_s:.1f} + {child_s:.1f} "
            f"| {(own_s + child_s) / whole_s:.2f} | {row['whole']['wall_s']:.1f}, {row['few']['wall_s']:.1f} "
            f"| {row['load']:.0f} |"
        )
    lines.append(
        "\nThe load is the number of processes that wanted one of two cores: seconds compare within a row only."
    )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
