"""`elixir-compile study`: rows that are trained here or simulated, side by side, and the process of a row."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from typer.testing import CliRunner, Result

from elixir_compile.ir.kinds import Phase
from elixir_compile.tools.cli import study as cli_study
from elixir_compile.tools.cli.main import app
from elixir_compile.tools.cli.study import PLACEMENTS, Case
from elixir_compile.tools.observed import Study, StudyRow, study_from_json, study_to_json
from elixir_compile.tools.report import figures as charts
from elixir_compile.tools.report.findings import WHOLE, phase_figures
from elixir_compile.tools.report.page import study_page

# ----------------------------------------------------------------------------------------------------------------------
# `elixir-compile study`: rows that are trained here or simulated for another machine, side by side.


MODEL = """
import torch
from torch import nn
from torch.nn import functional


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 64)
        self.drop = nn.Dropout(0.5)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4))
        self.head = nn.Linear(64, 64)

    def forward(self, input_ids, labels):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = self.drop(x + layer(x))
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "net.py").write_text(MODEL)
    return f"{tmp_path / 'net.py'}:Net"


def run(*args: object) -> Result:
    return CliRunner().invoke(app, ["study", *map(str, args)])


def read(folder: Path) -> Study:
    return study_from_json((folder / "study.json").read_text(encoding="utf-8"))


def test_rows_for_a_machine_that_is_not_here_are_simulated(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(charts, "can_draw", lambda: False)
    done = run(model, "--hardware", "a100-40g", "--budgets", "100%,90%,1MiB", "--seq", 512, "-o", tmp_path / "out")
    assert done.exit_code == 0, done.output
    study = read(tmp_path / "out")
    rows = {row.name: row for row in study.rows}
    assert list(rows) == [
        *("device", "after_backward", "across_steps", "in_backward", "disk"),
        *("plan 100%", "plan 90%", "plan 1MiB", "inductor"),
    ]
    assert all(row.is_simulated for row in study.rows)
    assert rows["inductor"].reason.startswith("not simulated")
    assert rows["plan 1MiB"].full is None
    assert "short by" in rows["plan 1MiB"].reason
    device, tight = rows["device"], rows["plan 90%"]
    assert device.peak_bytes is not None
    assert tight.peak_bytes is not None
    assert tight.peak_bytes <= tight.budget_bytes == int(0.9 * device.peak_bytes)
    for row in (device, rows["across_steps"]):
        assert_phases_add_up(row, study)
    text = (tmp_path / "out" / "study.html").read_text(encoding="utf-8")
    assert "planned" in text
    assert study_from_json(study_to_json(study)) == study
    assert "plan 90%, planned: the plan of a search within the budget" in done.stdout


def assert_phases_add_up(row: StudyRow, study: Study) -> None:
    """The phases of a row cover its step, and its peak is that of the highest phase."""
    figures = phase_figures(row, study.cluster)
    *phases, whole = figures
    assert whole.phase == WHOLE
    assert sum(each.seconds_s for each in phases) == pytest.approx(whole.seconds_s)
    assert sum(each.compute_s for each in phases) == pytest.approx(whole.compute_s)
    assert max(each.most_bytes or 0 for each in phases) == whole.most_bytes


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--placements", "device,moon"], "got 'moon'"),
        (["--placements", "plan"], "no row `device` has run before"),
        (["--budgets", "60%,many"], "got 'many'"),
        (["--budgets", "2000%"], "got '2000%'"),
        (["--hardware", "moon"], "moon"),
    ],
)
def test_a_mistake_is_one_line_on_stderr(args: list[str], said: str, model: str, tmp_path: Path) -> None:
    done = run(model, *args, "-o", tmp_path / "out")
    assert done.exit_code == 1
    assert "error: " in done.stderr
    assert said in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_model_that_is_not_there_starts_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_study, "_apart", lambda case: pytest.fail(f"row {case.name} was started"))
    for name in ("gpt2-124", f"{tmp_path}/net.py:Net", f"{tmp_path}/config.json"):
        done = run(name, "-o", tmp_path / "out")
        assert done.exit_code == 1
        assert done.stderr.startswith(f"error: unknown model '{name}'")


def test_a_share_of_a_row_that_did_not_run_leaves_the_other_rows(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def row(case: Case) -> StudyRow:
        return StudyRow(name=case.name, what="", budget_bytes=case.budget_bytes, reason="out of memory")

    monkeypatch.setattr(cli_study, "_apart", row)
    monkeypatch.setattr(charts, "can_draw", lambda: False)
    run(model, "--placements", "device,plan", "--budgets", "60%,1MiB", "-o", tmp_path / "out")
    reasons = {row.name: row.reason for row in read(tmp_path / "out").rows}
    assert reasons == {
        "device": "out of memory",
        "plan 60%": "60% of the peak of the row `device`, which did not run",
        "plan 1MiB": "out of memory",
    }


@pytest.mark.slow
def test_rows_that_are_trained_have_equal_losses_and_the_peak_of_the_allocator(model: str, tmp_path: Path) -> None:
    args = ("--placements", "device,across_steps,in_backward,disk,plan,inductor", "--steps", 2, "--seq", 64)
    done = run(model, *args, "--disk-path", tmp_path, "-o", tmp_path / "out", "--json")
    assert done.exit_code == 0, done.output
    study = read(tmp_path / "out")
    assert json.loads(done.stdout)["rows"][0]["name"] == "device"
    assert [row.reason for row in study.rows] == [""] * 6
    equal = study.equal_losses()
    # Gradients that are not clipped give other losses, from the first step that a clipped update has changed.
    assert {name for name, at in equal.items() if at is not None} <= {"in_backward", "inductor"}
    for row in study.rows:
        assert len(row.losses) >= 9 + 2
        assert len(row.timed) == 2
        assert row.peak_bytes
        if row.name != "inductor":
            assert_phases_add_up(row, study)
            assert row.memory is not None
            assert row.memory.live is not None
            assert row.memory.live.peak_bytes == row.peak_bytes
    tight = study.rows[4]
    assert tight.peak_bytes is not None
    assert tight.budget_bytes is not None
    assert tight.peak_bytes <= tight.budget_bytes
    if charts.can_draw():
        assert study_page(study).count("<svg") >= 2 * 5 + 2


# ----------------------------------------------------------------------------------------------------------------------
# The process of a row of a study: which phase each part of a step counts in, also of a row without plans of ours.


TINY_MODEL = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16)

    def forward(self, input_ids, labels):
        return nn.functional.cross_entropy(self.head(self.embed(input_ids)).flatten(0, 1), labels.flatten())
"""
NAP_S = 0.02
NUM_TIMED = 2
NUM_STEPS = cli_study.SETTLING + NUM_TIMED


def row_of(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **changes: object) -> StudyRow:
    """Return the row `name` of a small model; a row of Inductor runs eagerly, which compiles nothing."""
    (tmp_path / "net.py").write_text(TINY_MODEL)
    placement = replace(PLACEMENTS[name], **changes)  # pyright: ignore[reportArgumentType]
    monkeypatch.setitem(cli_study.PLACEMENTS, name, placement)  # pyright: ignore[reportArgumentType]
    case = cli_study.Case(
        name=name,
        placement=name,
        model=f"{tmp_path / 'net.py'}:Net",
        batch=2,
        seq=8,
        dtype="float32",
        num_timed=NUM_TIMED,
    )
    return cli_study.run_case(case)


@pytest.mark.parametrize("clips", [True, False])
def test_clipping_is_the_callers_in_the_row_of_inductor(
    clips: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, norms = torch.nn.utils.clip_grad_norm_, []

    def slow(parameters: list[torch.nn.Parameter], max_norm: float) -> torch.Tensor:
        time.sleep(NAP_S)
        norms.append(max_norm)
        return usual(parameters, max_norm)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", slow)
    row = row_of("inductor", tmp_path, monkeypatch, backend="eager", clips=clips)
    assert row.reason == ""
    assert row.full is not None
    assert norms == ([1.0] * (NUM_STEPS + 1) if clips else [])  # the last step is measured
    assert len(row.timed) == NUM_TIMED
    for each in row.timed:
        assert (each.seconds_s["caller"] >= NAP_S) == clips
        assert all(each.seconds_s[phase] < NAP_S for phase in ("forward", "backward", "update"))
        assert sum(each.seconds_s.values()) == pytest.approx(each.period_s)
    order = [interval.phase for interval in row.full.intervals]
    assert [phase for phase in order if phase is not None] == [Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE]
    clipping = row.full.intervals[order.index(Phase.BACKWARD) + 1]
    assert clipping.phase is None
    assert (clipping.end_s - clipping.start_s >= NAP_S) == clips


def test_the_row_of_inductor_trains_with_clipped_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its losses are those of a loop by hand that clips by the same norm."""
    row = row_of("inductor", tmp_path, monkeypatch, backend="eager")

    def by_hand(max_norm: float) -> list[float]:
        torch.manual_seed(0)
        embed, head = torch.nn.Embedding(16, 8), torch.nn.Linear(8, 16)
        params = [*embed.parameters(), *head.parameters()]
        optimizer = torch.optim.AdamW(params, lr=3e-4, fused=True)
        losses = []
        for number in range(NUM_STEPS + 1):
            random = torch.Generator().manual_seed(number)
            tokens = torch.randint(0, 16, (2, 8), generator=random)
            loss = functional.cross_entropy(head(embed(tokens)).flatten(0, 1), tokens.flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(params, max_norm)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    assert [*row.losses] == by_hand(1.0)
