"""Two graphs in one step, of a graph break or of two models: figures of a step are told for each graph."""

import logging
from dataclasses import replace

import pytest
import torch
from torch import nn

import elixir_compile as elixir
from elixir_compile.graph.capture.modules import model_of
from elixir_compile.ir import tallies
from elixir_compile.session.step_profiler import STEPS_SKIPPED, STEPS_TIMED
from elixir_compile.step.seconds import simulate
from elixir_compile.tools.report.diff import run_diff
from tests.run.models import seeded

OPTIONS = {"inner": "aot_eager", "planner": "zero3_offload", "plan_cache": False, "update": "after_backward"}
NUM_STEPS = STEPS_SKIPPED + STEPS_TIMED + 1


class Broken(nn.Module):
    """Two halves of different sizes, with a graph break between them."""

    def __init__(self, *, is_broken: bool = True) -> None:
        super().__init__()
        self.small = nn.Linear(16, 16)
        self.large = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
        self.is_broken = is_broken

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.small(x)
        if self.is_broken:
            torch._dynamo.graph_break()
        return self.large(x).square().mean()


def lines_of(caplog: pytest.LogCaptureFixture, word: str) -> list[str]:
    return [message for message in caplog.messages if message.startswith(word)]


def test_each_graph_of_a_step_has_its_own_spans_and_its_own_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="elixir_compile")
    model = seeded(Broken)
    compiled = torch.compile(model, backend="elixir", options=OPTIONS)
    optimizer = elixir.HybridAdamW(model.parameters(), lr=1e-3)
    with elixir.observe(compiled, full=(NUM_STEPS - 2,), counters_hz=0) as study:
        for _ in range(NUM_STEPS):
            compiled(torch.ones(4, 16)).backward()
            optimizer.step()
            optimizer.zero_grad()
    (full,) = study.full_steps
    made = elixir.compilations(model)
    assert full.record.graphs == ("Broken", "Broken.1")
    assert len(full.summary.plans) == 2
    assert sum(full.summary.seconds_s.values()) == pytest.approx(full.summary.period_s, abs=1e-9)
    parts = [full.record.of_graph(each.name, [bucket.id for bucket in each.active.plan.buckets]) for each in made]
    for part, each in zip(parts, made, strict=True):
        active = each.active
        planned = simulate(active.graph, active.plan, active.problem.cluster)
        assert dict(tallies(part.spans)) == dict(tallies(planned.spans))
        # Seconds and peaks of a step are those of both graphs, so only counts are compared with the plan of one.
        found = run_diff(active.plan, full.record).comparisons
        assert {one.what for one in found} == {"gather", "release", "reduce", "offload"}
        assert not any(one.is_off for one in found)
        assert part.counts["gather"] == planned.counts["gather"] < full.record.counts["gather"]
    moved = sum(span.nbytes for part in parts for span in part.spans)
    assert moved == sum(full.summary.lane_bytes(lane) for lane in full.summary.moved_bytes)
    assert all(one.counts == full.record.counts for one in (full.record.of_graph("other"), replace(full.record)))
    # The profiler times each graph within the step that both share, and neither plan is made anew.
    lines = lines_of(caplog, "measured  peak")
    assert [line.split()[-1] for line in lines] == ["Broken", "Broken.1"]
    assert all("of it in this graph" in line for line in lines)
    assert not lines_of(caplog, "replanned")


def test_graphs_that_take_turns_have_no_step_of_their_own(caplog: pytest.LogCaptureFixture) -> None:
    """A period from one forward to the next of the same graph would hold a step of the other graph."""
    caplog.set_level(logging.INFO, logger="elixir_compile")
    model = seeded(Broken, is_broken=False)
    compiled = torch.compile(model, backend="elixir", options=OPTIONS, dynamic=False)
    optimizer = elixir.HybridAdamW(model.parameters(), lr=1e-3)
    for number in range(2 * NUM_STEPS):
        compiled(torch.ones(4 + number % 2, 16)).backward()
        optimizer.step()
    assert len(elixir.compilations(model)) == 2
    assert lines_of(caplog, "measured  peak") == []


def test_two_forwards_before_a_backward_are_one_step() -> None:
    """A siamese model: its second forward begins no step, which is half as long as it would seem."""
    model = seeded(Broken, is_broken=False)
    compiled = torch.compile(model, backend="elixir", options=OPTIONS)
    for number in range(3):
        loss = compiled(torch.ones(4, 16)) + compiled(torch.zeros(4, 16))
        loss.backward()
        (graph,) = model_of(model).graphs
        assert len(graph.profiler._began_s) == number + 1


def test_two_models_in_a_step_have_figures_of_their_own(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="elixir_compile")
    first, second = seeded(Broken, is_broken=False), nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 16))
    forwards = [torch.compile(model, backend="elixir", options=OPTIONS) for model in (second, first)]
    optimizers = [elixir.HybridAdamW(model.parameters(), lr=1e-3) for model in (second, first)]
    studies = [elixir.observe(model, full=(NUM_STEPS - 2,), counters_hz=0) for model in (second, first)]
    for _ in range(NUM_STEPS):
        forwards[1](forwards[0](torch.ones(4, 16))).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for study, model in zip(studies, (second, first), strict=True):
        study.stop()
        (made,) = elixir.compilations(model)
        (full,) = study.full_steps
        active = made.active
        assert [each.step for each in study.summaries] == list(range(NUM_STEPS))
        planned = simulate(active.graph, active.plan, active.problem.cluster)
        assert dict(tallies(full.record.spans)) == dict(tallies(planned.spans))
        assert sum(full.summary.lane_bytes(lane) for lane in full.summary.moved_bytes) == sum(
            span.nbytes for span in full.record.spans
        )
        counts = {one.what: one.is_off for one in run_diff(active.plan, full.record).comparisons}
        assert not any(counts[verb] for verb in ("gather", "release", "reduce", "offload"))
    assert len(lines_of(caplog, "measured  peak")) == 2
