"""The demo says when it fails, and its text is what it says."""

import itertools
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from elixir_compile.base.errors import InvalidOption
from elixir_compile.ir.plan import Plan, Prediction
from elixir_compile.ir.record import Origin, Record
from elixir_compile.tools.cli.demo import LOSS_RTOL, Run, batches, find_faults, read_text

PREDICTION = Prediction(
    step_s=0.1, exposed_s=0.0, hidden_share=1.0, device_peak_bytes=100, device_peak_at="op", host_peak_bytes=0
)
PLAN = Plan(
    name="tiny",
    graph="0" * 12,
    cluster="1 x cpu",
    budget_bytes=100,
    buckets=(),
    placements=(),
    regions=(),
    schedules=(),
    decisions=(),
    prediction=PREDICTION,
)
RECORD = Record(origin=Origin.MEASURED, step_s=0.1, device_peak_bytes=100, host_peak_bytes=0)
FREE = Run(losses=(4.0, 2.0), plan=PLAN, record=RECORD)


def test_equal_losses_within_the_budget_pass() -> None:
    assert find_faults(FREE, FREE, budget_bytes=100) == []


@pytest.mark.parametrize("loss", [2.0 * (1 + 2 * LOSS_RTOL), 2.0 * (1 - 2 * LOSS_RTOL), float("nan"), float("inf")])
def test_different_losses_fail(loss: float) -> None:
    (fault,) = find_faults(FREE, replace(FREE, losses=(4.0, loss)), budget_bytes=100)
    assert "losses differ" in fault


def test_one_byte_above_the_budget_fails() -> None:
    (fault,) = find_faults(FREE, replace(FREE, record=replace(RECORD, device_peak_bytes=101)), budget_bytes=100)
    assert "1 bytes too many" in fault


def test_batches_are_bytes_and_the_bytes_that_follow() -> None:
    text = bytes(range(200))
    source = batches(text, size=3, context=8, seed=0, device="cpu")
    for one, following in itertools.islice(source, 5):
        assert one.shape == following.shape == (3, 8)
        assert torch.equal(one + 1, following)
    again = batches(text, size=3, context=8, seed=0, device="cpu")
    assert torch.equal(next(again)[0], next(batches(text, size=3, context=8, seed=0, device="cpu"))[0])


def test_the_default_text_is_the_standard_library(tmp_path: Path) -> None:
    assert len(read_text(None)) > 1_000_000
    file = tmp_path / "a.txt"
    file.write_bytes(b"abc")
    assert read_text(file) == b"abc"


def test_no_text_and_too_little_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="not empty"):
        read_text(tmp_path)
    with pytest.raises(InvalidOption, match="more than 9 bytes"):
        next(batches(b"abc", size=1, context=8, seed=0, device="cpu"))


def test_the_version_is_printed_without_loading_torch() -> None:
    code = "import sys; from elixir_compile.tools.cli.main import app; sys.modules['torch'] = None; app(['--version'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "elixir-compile 0.1.0"


@pytest.mark.slow
def test_the_demo_keeps_its_promise() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from elixir_compile.tools.cli.main import main; main()", "demo"], check=False
    )
    assert done.returncode == 0
