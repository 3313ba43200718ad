"""Training on a second device type, late copies included, is bitwise what it is when each copy is made at once.

Losses of the free run are also compared with those of `torch.compile` there. It has other buckets, so its sums may have
another order.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import elixir_compile as elixir
from elixir_compile.ir import Update
from elixir_compile.runtime.gradients import GradientAccumulator
from elixir_compile.runtime.lanes import Accelerator
from elixir_compile.session import machine, planning
from tests.device import emulated
from tests.run.models import ShortStack, seeded, vectors
from tests.run.training import Run, assert_offloads, assert_same, by_elixir, by_torch, on_host, tight_bytes
from tests.run.updating import hybrid_run

DEVICE = torch.device(emulated.NAME, 0)
PLAIN = {"planner": "greedy", "plan_cache": False, "replan": False}


def model() -> nn.Module:
    return seeded(ShortStack).to(DEVICE)


def batches(num: int = 3) -> list[torch.Tensor]:
    return [batch.to(DEVICE) for batch in vectors(num)]


def trained(kind: int, seed: int = 0, **options: Any) -> Run:
    with emulated.policy(kind, seed):
        return by_elixir(model(), **{**PLAIN, **options}).train(batches())


def test_without_a_budget_it_trains_as_torch_does() -> None:
    expected = by_torch(model()).train(batches())
    got = trained(emulated.EARLY)
    torch.testing.assert_close(torch.stack(expected.losses), torch.stack(got.losses))
    assert not on_host(got)


@pytest.mark.parametrize(
    "activations", ["offload", *(pytest.param(each, marks=pytest.mark.slow) for each in ("keep", "recompute"))]
)
def test_under_a_tight_budget_late_copies_change_nothing(activations: str) -> None:
    options = {"activations": activations}
    options["device_memory"] = tight_bytes(model(), batches()[0], **PLAIN, **options)
    before = emulated.num_async_copies()
    expected = trained(emulated.EARLY, **options)
    assert_offloads(expected)
    assert emulated.num_async_copies() > before
    assert_same(expected, trained(emulated.LATE, **options))
    for seed in range(2):
        assert_same(expected, trained(emulated.RANDOM, seed, **options))


def test_a_budget_with_large_workspaces_is_tight_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, 64 MiB of a budget may be workspaces: 5 % of them are more than this model can offload."""
    monkeypatch.setattr(planning, "library_bytes", lambda device: 64 << 20)
    monkeypatch.setattr(machine, "library_bytes", lambda device: 64 << 20)
    budget = tight_bytes(model(), batches()[0], planned_by="large workspaces", **PLAIN)
    assert_offloads(trained(emulated.EARLY, device_memory=budget))


@dataclass
class Order:
    """Which stream waits for which, while compute is marked and waited for."""

    behind: dict[int, set[int]] = field(default_factory=dict)
    """By stream, the streams whose compute comes before its own."""
    marks: dict[int, set[int]] = field(default_factory=dict)
    """By event, the streams whose compute comes before it."""
    events: list[torch.Event] = field(default_factory=list)

    def mark(self, lanes: Accelerator) -> torch.Event:
        stream = torch.accelerator.current_stream(lanes.device)
        self.events.append(stream.record_event())
        self.marks[id(self.events[-1])] = {stream.stream_id} | self.behind.get(stream.stream_id, set())
        return self.events[-1]

    def wait(self, lanes: Accelerator, event: torch.Event | None) -> None:
        stream = torch.accelerator.current_stream(lanes.device)
        self.behind.setdefault(stream.stream_id, set()).update(self.marks.get(id(event), set()))


class Twice(nn.Module):
    """One layer, called in two graphs, each on a stream of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.streams = torch.Stream(DEVICE), torch.Stream(DEVICE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stream in self.streams:
            with stream:
                x = self.call(x)
        return x

    def call(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).relu()


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node.s stream does not match")  # two streams lead to one leaf
def test_the_end_of_a_backward_follows_the_streams_of_its_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd runs a backward on the stream of its forward, and orders only the gradients that it handles itself."""
    twice = elixir.prepare(seeded(Twice).to(DEVICE))
    torch._dynamo.reset()
    twice.call = torch.compile(twice.call, backend="elixir", options={"inner": "aot_eager", **PLAIN})
    order, ends = Order(), []
    monkeypatch.setattr(Accelerator, "mark_compute", lambda lanes: order.mark(lanes))
    monkeypatch.setattr(Accelerator, "compute_waits", lambda lanes, event: order.wait(lanes, event))
    publish = GradientAccumulator._publish

    def published(gradients: GradientAccumulator, *args: Any) -> None:
        ends.append(order.behind.get(torch.accelerator.current_stream(DEVICE).stream_id, set()))
        publish(gradients, *args)

    monkeypatch.setattr(GradientAccumulator, "_publish", published)
    twice(torch.ones(2, 8, device=DEVICE)).sum().backward()
    own = {stream.stream_id for stream in twice.streams}
    assert ends
    assert ends[-1] >= own
    first, second = (stream.stream_id for stream in twice.streams)
    assert second in order.behind[first], "the backward of the second call runs first"


MODES = [(home, update) for home in ("split", "host") for update in Update]
SHORT = ("host", Update.IN_BACKWARD)


@pytest.mark.parametrize(
    ("home", "update"), [pytest.param(*mode, marks=() if mode == SHORT else pytest.mark.slow) for mode in MODES]
)
def test_update_modes_under_late_copies_change_nothing(home: str, update: Update) -> None:
    runs = []
    for kind in (emulated.EARLY, emulated.LATE, emulated.RANDOM):
        # The default planner proves each of its six plans the best, which takes a minute.
        placed = hybrid_run(model(), batches()[0], home=home, update=update, planner="greedy")
        with emulated.policy(kind), placed as run:
            runs.append(run.train(batches()))
    for run in runs[1:]:
        assert_same(runs[0], run)


@pytest.mark.slow
def test_a_compute_that_does_not_wait_for_copies_reads_poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a missing wait of the runtime fails these tests."""
    options = {"device_memory": tight_bytes(model(), batches()[0], **PLAIN)}
    monkeypatch.setattr(Accelerator, "compute_waits", lambda lanes, event: None)
    assert trained(emulated.LATE, **options).losses[0].isnan()
