"""A second device with less memory than planned, the bytes and labels of its steps, and their observation."""

import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import nn

import elixir_compile as elixir
from elixir_compile import compat
from elixir_compile.base.options import parse_options
from elixir_compile.base.units import GIB, parse_bytes
from elixir_compile.compat.platforms import PeakRecord, platform_of
from elixir_compile.compat.platforms import platform as blocks
from elixir_compile.compat.platforms.platform import AcceleratorPlatform
from elixir_compile.graph.capture.modules import model_of
from elixir_compile.ir import Lane, Tally, Update, tallies
from elixir_compile.optim import adamw_rule
from elixir_compile.runtime.executor import Executor
from elixir_compile.search import Problem
from elixir_compile.session import allocator_gaps, machine
from elixir_compile.session.machine import library_bytes
from elixir_compile.session.step_profiler import STEPS_SKIPPED, STEPS_TIMED, StepProfiler, foreign_bytes
from elixir_compile.step.seconds import simulate
from tests.covering import some_slow
from tests.device import emulated
from tests.gpu import test_accelerator
from tests.run.models import ShortStack, Stack, seeded
from tests.run.training import by_elixir, plain_step, planned_peak_bytes, scaled_bytes, tight_bytes
from tests.run.updating import hybrid_run, ladder, rows

# ----------------------------------------------------------------------------------------------------------------------
# A device with less memory than the plan counts on: training goes on under a plan for less.


DEVICE = torch.device(emulated.NAME, 0)
PLAIN = {"planner": "greedy", "plan_cache": False}


@pytest.fixture
def no_workspaces() -> None:
    """Start without what libraries keep from earlier tests: a plan counts the workspaces of its step."""
    drop_workspaces()


def drop_workspaces() -> None:
    gc.collect()
    platform_of(DEVICE).drop_workspaces()
    platform_of(DEVICE).empty_cache()


@pytest.mark.usefixtures("no_workspaces")
def test_a_forward_that_does_not_fit_is_planned_again_for_less() -> None:
    num_rows = 2048 if emulated.NAME == "fakegpu" else 8192  # CUDA's allocator takes 20 MiB at a time
    model, batches = seeded(Stack).to(DEVICE), [torch.randn(num_rows, 64).to(DEVICE) for _ in range(3)]
    free = by_elixir(model, **PLAIN).train(batches)
    losses, library_bytes = [loss.item() for loss in free.losses], machine.library_bytes(DEVICE)
    peak_bytes = planned_peak_bytes(free) - library_bytes
    weights = {name: value.cpu() for name, value in free.model.state_dict().items()}
    plain = elixir.compilations(free.model)[0].plan
    del free
    gc.collect()
    run = by_elixir(model, device_memory=library_bytes + 2 * peak_bytes, micro_batches=1, **PLAIN)
    held_bytes = torch.accelerator.memory_allocated(DEVICE)
    with emulated.capacity(held_bytes + peak_bytes // 2):
        run.train(batches)
    (record,) = elixir.compilations(run.model)
    assert record.plan.base_bytes > plain.base_bytes + peak_bytes // 2
    assert [loss.item() for loss in run.losses] == losses
    assert all(torch.equal(weights[name], value.cpu()) for name, value in run.model.state_dict().items())


@pytest.mark.usefixtures("no_workspaces")
def test_measuring_keeps_the_peak_that_the_user_reads() -> None:
    most_bytes = machine.library_bytes(DEVICE) + (32 << 20)
    before = torch.empty(most_bytes, dtype=torch.uint8, device=DEVICE)
    del before
    peak_bytes = torch.accelerator.max_memory_allocated(DEVICE)
    assert peak_bytes >= most_bytes
    model, batches = seeded(ShortStack).to(DEVICE), [torch.randn(8, 64).to(DEVICE) for _ in range(9)]
    run = by_elixir(model, profile_regions=True, report=True, planner="greedy", plan_cache=False).train(batches)
    assert torch.accelerator.max_memory_allocated(DEVICE) == peak_bytes
    record = elixir.measure_step(lambda: run.compiled(batches[0]).backward(), device=emulated.NAME)
    assert record.device_peak_bytes < most_bytes
    assert torch.accelerator.max_memory_allocated(DEVICE) == peak_bytes


@pytest.mark.usefixtures("no_workspaces")
def test_measuring_resets_no_statistics_and_ends_its_history(monkeypatch: pytest.MonkeyPatch) -> None:
    def reset(device: object = None) -> None:
        raise AssertionError("the statistics are the user's")

    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", reset)
    monkeypatch.setattr(getattr(torch, emulated.NAME), "reset_peak_memory_stats", reset)
    model, batches = seeded(ShortStack).to(DEVICE), [torch.randn(8, 64).to(DEVICE) for _ in range(9)]
    run = by_elixir(model, profile_regions=True, report=True, planner="greedy", plan_cache=False).train(batches[:5])
    assert blocks._running[emulated.NAME] == 1, "the third to the seventh step are measured"
    run.train(batches[5:])
    elixir.measure_step(lambda: run.compiled(batches[0]).backward(), device=emulated.NAME)
    assert not blocks._running[emulated.NAME]


def held_on_the_device() -> int:
    """Return the bytes of tensors on the device, without the garbage of earlier tests, which a measurement frees."""
    gc.collect()
    return torch.accelerator.memory_stats(DEVICE)["requested_bytes.all.current"]


@pytest.mark.usefixtures("no_workspaces")
def test_a_peak_that_was_higher_before_is_measured_exactly_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    held_bytes = held_on_the_device()

    def step() -> torch.Tensor:
        return torch.empty(4 << 20, dtype=torch.uint8, device=DEVICE)

    torch.empty(32 << 20, dtype=torch.uint8, device=DEVICE)
    assert elixir.measure_step(step, device=emulated.NAME).device_peak_bytes == held_bytes + (4 << 20)
    monkeypatch.setattr(compat, "start_allocator_history", lambda device_type, most_entries: False)
    assert elixir.measure_step(step, device=emulated.NAME).device_peak_bytes >= 32 << 20
    with PeakRecord(platform_of(DEVICE), DEVICE) as record:
        step()
    assert record.peak_bytes is None


@pytest.mark.usefixtures("no_workspaces")
def test_the_peak_of_a_step_has_no_garbage_from_before() -> None:
    """As the frames of a compilation are, which hold what the first call returned."""
    held_bytes = held_on_the_device()

    def made(nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=DEVICE)

    gc.disable()
    try:
        cycle: list[object] = [made(2 << 20)]
        cycle.append(cycle)
        del cycle
        record = elixir.measure_step(lambda: made(4 << 20), device=emulated.NAME)
    finally:
        gc.enable()
    assert record.device_peak_bytes == held_bytes + (4 << 20)


def foreign_bytes_in_steps() -> int:
    profiler = StepProfiler(Executor(DEVICE, "model"), "model", parse_options({}), records=False)
    problem = cast(Problem, SimpleNamespace(budget_bytes=GIB))
    seen = [profiler.forward_begins(problem) for _ in range(STEPS_SKIPPED + STEPS_TIMED + 1)]
    assert seen[-1] is not None
    return seen[-1].foreign_bytes


def foreign_bytes_at_a_shortage() -> int:
    return foreign_bytes(Executor(DEVICE, "model"))


@pytest.mark.usefixtures("no_workspaces")
@pytest.mark.parametrize("of_others", [foreign_bytes_in_steps, foreign_bytes_at_a_shortage])
def test_tensors_of_others_count_as_the_bytes_that_they_asked_for(of_others: Callable[[], int]) -> None:
    """As the tensors of a plan do: rounded up, a hundred scalars of the model would look like tensors of others."""
    gc.collect()
    workspaces = torch.empty(machine.library_bytes(DEVICE), dtype=torch.uint8, device=DEVICE)  # as in a step
    before_bytes = of_others()
    held = [torch.empty(1, dtype=torch.uint8, device=DEVICE) for _ in range(100)]
    assert of_others() == before_bytes + len(held)
    del workspaces


GAPS = {
    # by name: bytes that the allocator holds above the budget, retries per step, whether it is said, and planned for;
    # what no plan leaves free ends no training
    "more than the budget": (1 << 19, 0, True, True),
    "more than any plan leaves": (1 << 30, 0, True, None),
    "a cache freed for room": (-(1 << 13), 1, True, True),
    "less than the budget": (-(1 << 21), 0, False, False),
}


QUICK_GAPS = {"more than the budget", "less than the budget"}


@pytest.mark.usefixtures("no_workspaces")
@pytest.mark.parametrize("kind", some_slow([(kind,) for kind in GAPS], lambda kind: kind in QUICK_GAPS))
def test_gaps_between_tensors_are_planned_for(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    above_bytes, retries, is_said, is_planned_for = GAPS[kind]
    model, batches = seeded(ShortStack).to(DEVICE), [torch.randn(1024, 64).to(DEVICE) for _ in range(11)]
    budget_bytes = scaled_bytes(model, tight_bytes(model, batches[0], **PLAIN), 1.5)
    drop_workspaces()  # of the capture that found the budget
    held_bytes, num_asked = torch.accelerator.memory_stats(DEVICE)["requested_bytes.all.current"], []

    def reserved_bytes(platform: AcceleratorPlatform, device: torch.device) -> int:
        return budget_bytes + held_bytes + above_bytes

    def alloc_retries(platform: AcceleratorPlatform, device: torch.device) -> int:
        num_asked.append(device)
        return retries * len(num_asked)

    monkeypatch.setattr(AcceleratorPlatform, "reserved_bytes", reserved_bytes)
    monkeypatch.setattr(AcceleratorPlatform, "alloc_retries", alloc_retries)
    monkeypatch.setattr(allocator_gaps, "SEGMENT_BYTES", 0)
    monkeypatch.setattr(allocator_gaps, "_ALIKE_BYTES", 1)
    caplog.set_level("INFO", logger="elixir_compile")
    run = by_elixir(model, device_memory=budget_bytes, report=True, **PLAIN).train(batches[:1])
    before = elixir.compilations(run.model)[0].plan
    followed = []
    for batch in batches[1:]:
        run.train([batch])
        followed.append(elixir.compilations(run.model)[0].plan)
    said = [line for line in caplog.messages if line.startswith("torch's allocator holds")]
    assert bool(said) == is_said
    # What the allocator holds here does not depend on plans, so in the end those made first are gone back to.
    most_base_bytes = max(plan.base_bytes for plan in followed)
    assert is_planned_for is None or (most_base_bytes > before.base_bytes) == is_planned_for
    assert most_base_bytes < budget_bytes
    assert all(plan.prediction.device_peak_bytes <= budget_bytes for plan in followed)


@pytest.mark.usefixtures("no_workspaces")
@pytest.mark.slow
def test_measured_peaks_are_the_bytes_of_tensors_without_roundings(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="elixir_compile")
    model, batches = seeded(ShortStack).to(DEVICE), [torch.randn(8, 64).to(DEVICE) for _ in range(9)]
    foreign_bytes = torch.accelerator.memory_stats(DEVICE)["requested_bytes.all.current"]
    run = by_elixir(model, report=True, planner="greedy", plan_cache=False).train(batches)
    (record,) = elixir.compilations(run.model)
    (line,) = [line for line in caplog.messages if line.startswith("measured  peak")]
    assert "reserved" in line
    measured = elixir.measure_step(lambda: plain_step(run.compiled, run.optimizer, batches[0]), device=emulated.NAME)
    stats = torch.accelerator.memory_stats(DEVICE)
    rounded_bytes = stats["allocated_bytes.all.current"] - stats["requested_bytes.all.current"]
    over_bytes = measured.device_peak_bytes - foreign_bytes - record.plan.prediction.device_peak_bytes
    unused_bytes = min(machine.library_bytes(DEVICE), 1 << 20)  # no product of the backward adds a bias
    assert abs(over_bytes + unused_bytes) < rounded_bytes / 4


@pytest.mark.usefixtures("no_workspaces")
@pytest.mark.slow
def test_timing_regions_reseeds_no_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    def seeded_again(seed: int) -> None:
        raise AssertionError("torch.manual_seed changes the generators of all devices")

    model, batch = seeded(ShortStack).to(DEVICE), torch.randn(8, 64).to(DEVICE)
    run = by_elixir(model, profile_regions=True, planner="greedy", plan_cache=False)
    before = torch.get_rng_state()
    monkeypatch.setattr(torch, "manual_seed", seeded_again)
    run.train([batch])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.usefixtures("no_workspaces")
def test_masters_on_the_device_are_updated_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw_rule, "BLOCK", 1 << 12)
    model = elixir.prepare(nn.Linear(256, 256, bias=False).to(DEVICE), param_dtype="bfloat16")
    optimizer = elixir.HybridAdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        model(torch.randn(4, 256, device=DEVICE, dtype=torch.bfloat16)).sum().backward()
        before = torch.accelerator.memory_allocated(DEVICE)
        torch.accelerator.reset_peak_memory_stats(DEVICE)
        optimizer.step()
        optimizer.zero_grad()
    # Gradients are 128 KiB; the temporaries of a whole parameter would be 256 KiB each. Blocks have two and a mask.
    assert torch.accelerator.max_memory_allocated(DEVICE) - before < 2.5 * 4 * (1 << 12) + 4096


# ----------------------------------------------------------------------------------------------------------------------
# The labels and bytes of a measured step on a second device, where updates by the host copy what they read.


@pytest.mark.parametrize(
    ("home", "update", "share"),
    [
        ("split", Update.ACROSS_STEPS, 0.0),
        pytest.param("split", Update.AFTER_BACKWARD, 0.5, marks=pytest.mark.slow),
        pytest.param("split", Update.IN_BACKWARD, 0.0, marks=pytest.mark.slow),
        pytest.param("host", Update.ACROSS_STEPS, 0.5, marks=pytest.mark.slow),
        pytest.param("device", Update.AFTER_BACKWARD, 0.0, marks=pytest.mark.slow),
    ],
)
def test_a_measured_step_has_the_labels_and_the_bytes_of_its_plan(home: str, update: Update, share: float) -> None:
    model, batches = ladder().to(DEVICE), [batch.to(DEVICE) for batch in rows(4)]
    with hybrid_run(model, batches[0], home=home, update=update, share=share) as run:
        run.train(batches[:3])
        measured = elixir.measure_step(lambda: plain_step(run.compiled, run.optimizer, batches[3]))
        active = model_of(run.model).graphs[-1].active
    found, wanted = tallies(measured.spans), tallies(simulate(active.graph, active.plan, active.problem.cluster).spans)
    assert dict(found) == dict(wanted)
    if (home, share) == ("split", 0.0):
        bucket = active.plan.buckets[0]
        both = Tally(1, bucket.nbytes)
        assert found[Lane.D2H, f"offload {bucket.id}"] == found[Lane.D2H, f"offload {bucket.id}.grad"] == both
        assert found[Lane.H2D, f"gather {bucket.id}"] == both
    assert {span.lane for span in measured.spans if span.issued_s is not None} >= {Lane.COMPUTE}


# ----------------------------------------------------------------------------------------------------------------------
# Observation on a second device: bytes by kind from the allocator's history, and the peak of a step of two graphs.


class Broken(nn.Module):
    """Two layers with a graph break between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x).square().mean()


def test_kinds_add_up_to_the_allocators_peak_and_are_those_of_the_plan() -> None:
    test_accelerator.test_kinds_add_up_to_the_allocators_peak_and_are_those_of_the_plan("zero3_offload")


def test_the_first_graph_of_a_step_reads_its_peak(caplog: pytest.LogCaptureFixture) -> None:
    library_bytes(DEVICE)  # takes the workspaces of libraries
    most_bytes = torch.accelerator.memory_allocated(DEVICE) + (32 << 20)
    before = torch.empty(32 << 20, dtype=torch.uint8, device=DEVICE)
    del before
    peak_bytes = torch.accelerator.max_memory_allocated(DEVICE)
    caplog.set_level("INFO", logger="elixir_compile")
    run = by_elixir(Broken().to(DEVICE), report=True, planner="greedy", plan_cache=False)
    for _ in range(9):
        plain_step(run.compiled, run.optimizer, torch.ones(8, 64, device=DEVICE))
    first, second = [line for line in caplog.messages if line.startswith("measured  peak")]
    assert (first.split()[-1], second.split()[-1]) == ("Broken", "Broken.1")
    assert parse_bytes("".join(first.split()[2:4])) < most_bytes
    assert "peak: see elixir_compile.measure_step" in second
    assert torch.accelerator.max_memory_allocated(DEVICE) == peak_bytes
