"""The process of a row of a study: which phase each part of a step counts in, also of a row without plans of ours."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from elixir_compile.ir.kinds import Phase
from elixir_compile.tools.cli import study_worker
from elixir_compile.tools.cli.study_worker import PLACEMENTS
from elixir_compile.tools.observed import StudyRow

MODEL = """
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
NUM_STEPS = study_worker.SETTLING + NUM_TIMED


def row_of(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **changes: object) -> StudyRow:
    """Return the row `name` of a small model; a row of Inductor runs eagerly, which compiles nothing."""
    (tmp_path / "net.py").write_text(MODEL)
    placement = replace(PLACEMENTS[name], **changes)  # pyright: ignore[reportArgumentType]
    monkeypatch.setitem(study_worker.PLACEMENTS, name, placement)  # pyright: ignore[reportArgumentType]
    case = study_worker.Case(
        name=name,
        placement=name,
        model=f"{tmp_path / 'net.py'}:Net",
        batch=2,
        seq=8,
        dtype="float32",
        num_timed=NUM_TIMED,
    )
    return study_worker.run_case(case)


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
