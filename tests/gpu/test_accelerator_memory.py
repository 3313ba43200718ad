"""The bytes of a step by kind on an accelerator: their sum is the allocator's figure, the kinds are the plan's."""

import pytest
import torch

import elixir_compile as elixir
from elixir_compile import compat
from elixir_compile.compat.platforms import platform as blocks
from elixir_compile.compat.platforms import platform_of
from elixir_compile.ir import Kind
from elixir_compile.tools.observed import FullStep
from tests.gpu.accelerator import DEVICE, INNER, inputs, stack
from tests.run.training import Run, by_elixir, plain_step

pytestmark = pytest.mark.gpu
KINDS = (Kind.PARAM, Kind.GRAD, Kind.MOMENT, Kind.SAVED, Kind.GATHERED)
MOST_APART_BYTES = 512
"""Scalars that plans leave out: the step counts of the optimizer, the loss, numbers of random generators."""
NUM_STEPS = 6


def observed(planner: str) -> tuple[Run, FullStep, int]:
    """Return a run, its last step but one with its memory, and the allocator's peak in that step."""
    batches = inputs(NUM_STEPS)
    options = {"planner": planner, "update": "after_backward", "replan": False, "plan_cache": False}
    run = by_elixir(stack(), inner=INNER, **options)
    platform, peak_bytes = platform_of(DEVICE), 0
    with elixir.observe(run.compiled, full=(NUM_STEPS - 2,), memory_events=True, counters_hz=0) as study:
        for number, batch in enumerate(batches):
            if number == NUM_STEPS - 2:
                torch.accelerator.synchronize(DEVICE)
                torch.accelerator.reset_peak_memory_stats(DEVICE)
            plain_step(run.compiled, run.optimizer, batch)
            if number == NUM_STEPS - 2:
                peak_bytes = platform.peak_bytes(DEVICE)
    (full,) = study.full_steps
    return run, full, peak_bytes


@pytest.mark.parametrize("planner", ["keep_all", "zero_offload", "zero3_offload"])
def test_kinds_add_up_to_the_allocators_peak_and_are_those_of_the_plan(planner: str) -> None:
    run, full, peak_bytes = observed(planner)
    live = full.live
    assert live is not None
    assert full.record.device_peak_bytes == live.peak_bytes == peak_bytes
    planned = elixir.compilations(run.model)[0].timeline.live_bytes_by_kind
    for kind in KINDS:
        most_bytes = max(live.by_kind.get(kind, (0,)))
        assert most_bytes == pytest.approx(max(planned.get(kind, (0,))), abs=MOST_APART_BYTES), kind
    gathered = [at_s for at_s, nbytes in zip(live.at_s, live.by_kind.get(Kind.GATHERED, ()), strict=False) if nbytes]
    assert bool(gathered) == (planner == "zero3_offload")
    # Times are those of the device: within the step, and in the order of the allocator.
    assert list(live.at_s) == sorted(live.at_s)
    assert live.at_s[-1] <= full.record.step_s
    assert not blocks._running[DEVICE.type], "the history of the allocator is still on"


@pytest.mark.cuda  # torch tells of no other device type whether its history is on
def test_a_history_that_somebody_else_reads_is_left_alone() -> None:
    assert compat.start_allocator_history(DEVICE.type, 1000)
    try:
        assert observed("keep_all")[1].live is None
        torch.empty(1, device=DEVICE)
        assert any(entry["action"] == "alloc" for entry in compat.allocator_snapshot(DEVICE.type)["device_traces"][0])
    finally:
        compat.stop_allocator_history(DEVICE.type)
