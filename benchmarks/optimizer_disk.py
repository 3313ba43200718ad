"""Compare GPT-2 124M with all optimizer state on disk and with all of it in memory; `optimizer.py` runs it."""

import ctypes
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psutil
import quiet  # noqa: F401  before torch
import torch

import elixir_compile as elixir

LENGTH = 128
STEPS, WARM_UP = 8, 2
CASES = [
    f"{where} {update}" for update in ("after_backward", "across_steps", "in_backward") for where in ("ram", "disk")
]
_STAGING_BYTES = 50 << 20
"""Bytes for the buffers between disk and host memory."""
MIN_SHARE = 0.8
"""Resident memory must fall by at least this share of the state's bytes."""


def measured(case: str, disk_path: str | None) -> dict[str, Any]:
    """Train a few steps of `case`, an item of `CASES`; return losses, seconds and bytes."""
    from transformers import GPT2Config, GPT2LMHeadModel

    where, update = case.split()
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)).train()
    parameter_bytes = sum(param.nbytes for param in model.parameters())
    with tempfile.TemporaryDirectory(dir=disk_path) as folder:
        options: dict[str, Any] = {"planner": "zero_offload", "update": update, "inner": "aot_eager", "replan": False}
        options |= {"report": False, "plan_cache": False, "host_memory": 5 * parameter_bytes}
        if where == "disk":
            # Enough for gradients, parameters and the staging buffers of the plan, and too little for any state.
            options |= {"disk_path": folder, "host_memory": 2 * parameter_bytes + _STAGING_BYTES}
        compiled = torch.compile(model, backend="elixir", options=options)
        optimizer = elixir.HybridAdamW(model.parameters(), lr=3e-4)
        losses, seconds, resident = _train(compiled, optimizer)
        plan = elixir.compilations(model)[0].plan
        states = optimizer.state_dict()["state"].values()
        return {
            "case": case,
            "losses": losses,
            "step_s": statistics.median(seconds[WARM_UP:]),
            "resident_bytes": resident[0],
            "most_resident_bytes": resident[1],
            "state_bytes": sum(value.nbytes for state in states for value in state.values() if value.dim()),
            "planned_on_disk_bytes": sum(
                bucket.state_nbytes
                for bucket, placement in zip(plan.buckets, plan.placements, strict=True)
                if placement.optim == "disk"
            ),
            "planned_step_s": plan.prediction.step_s,
        }


def _train(compiled: Any, optimizer: torch.optim.Optimizer) -> tuple[list[float], list[float], tuple[int, int]]:
    """Return the loss and the seconds of each step, and resident bytes: after the last step, and at most in a step."""
    losses: list[float] = []
    seconds: list[float] = []
    most_bytes = [0]
    for number in range(STEPS):
        tokens = torch.randint(0, 50257, (1, LENGTH), generator=torch.Generator().manual_seed(number))
        with _watched(most_bytes if number >= WARM_UP else [0]):
            began_s = time.perf_counter()
            loss = compiled(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.perf_counter() - began_s)
        losses.append(loss.item())
        del loss
    optimizer.wait()  # pyright: ignore[reportAttributeAccessIssue]
    return losses, seconds, (_resident_bytes(), most_bytes[0])


def _resident_bytes() -> int:
    """Return the resident bytes of this process after the C library returned its free memory to the system."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
    return psutil.Process().memory_info().rss


@contextmanager
def _watched(most_bytes: list[int]) -> Iterator[None]:
    """Raise `most_bytes[0]` to the resident bytes of this process, every 10 ms during the `with` block."""
    is_over, process = threading.Event(), psutil.Process()

    def watch() -> None:
        while not is_over.wait(0.01):
            most_bytes[0] = max(most_bytes[0], process.memory_info().rss)

    thread = threading.Thread(target=watch)
    thread.start()
    yield
    is_over.set()
    thread.join()


def missed(figures: Sequence[dict[str, Any]]) -> list[str]:
    """Return a sentence for each missed target."""
    found: list[str] = []
    for ram, disk in _pairs(figures):
        if disk["losses"] != ram["losses"]:
            found.append(f"{disk['case']}: its losses are not those in memory")
        if disk["planned_on_disk_bytes"] != disk["state_bytes"]:
            found.append(f"{disk['case']}: not all state is on disk")
        if _share(ram, disk) < MIN_SHARE:
            found.append(f"{disk['case']}: resident memory falls by {_share(ram, disk):.1%} of the state's bytes")
    return found


def table(figures: Sequence[dict[str, Any]]) -> str:
    """Return the figures as a table in Markdown."""
    lines = [
        f"GPT-2 124M, fp32, 1 x {LENGTH} tokens, op by op: all optimizer state in memory, and all of it on disk. "
        f"Medians of {STEPS - WARM_UP} steps.",
        "",
        "| update | step, memory | step, disk | resident, memory | resident, disk | less by, of the state's bytes "
        "| most, memory | most, disk | losses |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for ram, disk in _pairs(figures):
        columns = [
            disk["case"].split()[1],
            *(f"{case['step_s']:.2f} s" for case in (ram, disk)),
            *(f"{case['resident_bytes'] / 1e6:.0f} MB" for case in (ram, disk)),
            f"{_share(ram, disk):.1%} of {ram['state_bytes'] / 1e6:.0f} MB",
            *(f"{case['most_resident_bytes'] / 1e6:.0f} MB" for case in (ram, disk)),
            "equal" if ram["losses"] == disk["losses"] else "different",
        ]
        lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(lines) + "\n"


def _pairs(figures: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    by_case = {figure["case"]: figure for figure in figures}
    return [(by_case[case.replace("disk", "ram")], by_case[case]) for case in by_case if case.startswith("disk")]


def _share(ram: dict[str, Any], disk: dict[str, Any]) -> float:
    """Return by how much resident memory falls with state on disk, as a share of the state's bytes."""
    return (ram["resident_bytes"] - disk["resident_bytes"]) / ram["state_bytes"]
