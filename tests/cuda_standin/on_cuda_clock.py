"""A step of a plan takes the seconds of its simulation, if each work takes its price and the order is the runtime's."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from elixir_compile.graph.capture.modules import executor_of, model_of
from elixir_compile.ir import plan_to_json
from elixir_compile.ir.hardware import preset
from elixir_compile.optim.update import BucketUpdate
from elixir_compile.runtime.gradients import GradientAccumulator
from elixir_compile.runtime.lanes import Event, StreamLane
from elixir_compile.step.seconds import simulate
from tests.cuda_standin.clock import clocked
from tests.cuda_standin.clocked_plans import CASES, DEVICE, Case, clocked_step
from tests.pure.plans import claim_peak

_QUICK = 3
_CLOSE = 0.02


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=str(case), marks=[] if number < _QUICK else pytest.mark.slow)
        for number, case in enumerate(CASES)
    ],
)
def test_a_step_takes_the_seconds_that_are_simulated(case: Case) -> None:
    with clocked_step(case) as found:
        assert found.step_s == pytest.approx(found.plan.prediction.step_s, rel=_CLOSE)


@pytest.mark.slow
def test_copies_take_the_link_while_the_program_waits_for_streamed_updates(tmp_path: Path) -> None:
    """Two of five buckets are streamed. Without the wait at their gathers the simulated step would be 6 % longer."""
    case = Case(machine="rtx4090-24g", model="Llama", factor=1.2, update="across_steps")
    with clocked_step(case) as found:
        active: Any = model_of(found.run.model).graphs[0].active
    problem, plan = active.problem, found.plan
    placements = tuple(replace(home, streamed=place in (1, 3)) for place, home in enumerate(plan.placements))
    plan = claim_peak(problem.graph, replace(plan, placements=placements))
    simulated_s = simulate(problem.graph, plan, problem.cluster).step_s
    path = tmp_path / "plan.json"
    path.write_text(plan_to_json(replace(plan, prediction=replace(plan.prediction, step_s=simulated_s))))
    with clocked_step(replace(case, factor=None, options={"plan": str(path)})) as streamed:
        assert [home.streamed for home in streamed.plan.placements] == [home.streamed for home in placements]
        assert streamed.step_s == pytest.approx(simulated_s, rel=0.005)


@contextmanager
def without_the_wait_for_gradients() -> Iterator[None]:
    """Let backward passes end at once: what updates on the host waits for the gradients itself."""
    end, work, synchronize = GradientAccumulator._end_backward, BucketUpdate.work, StreamLane.synchronize
    arrived: list[Event] = []
    ending: list[int] = []

    def ended(gradients: GradientAccumulator, number: int) -> None:
        ending.append(number)
        end(gradients, number)
        ending.clear()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            GradientAccumulator, "_wait_for_copies", lambda gradients: arrived.append(gradients._lanes.d2h.mark())
        )
        patch.setattr(GradientAccumulator, "_end_backward", ended)
        patch.setattr(BucketUpdate, "work", lambda update, event: work(update, event or arrived[-1]))
        patch.setattr(StreamLane, "synchronize", lambda lane: None if ending else synchronize(lane))
        yield
    assert arrived


@pytest.mark.slow
@pytest.mark.parametrize("case", [CASES[4], CASES[5], CASES[19]], ids=str)
def test_no_step_is_shorter_without_the_wait_at_the_end_of_the_backward(case: Case) -> None:
    """Compute works meanwhile; or an update on the device comes late, beside longer ones on the host."""
    with clocked_step(case) as found:
        assert max(found.clock.waits).seconds > 0.4 * found.step_s
        with without_the_wait_for_gradients():
            again_s = found.clock.period_s(found.step)
        assert again_s == pytest.approx(found.step_s, rel=1e-3)


def test_steps_take_longer_if_copies_do_not_run_beside_compute() -> None:
    with clocked_step(CASES[1]) as found:
        again_s = found.clock.period_s(found.step)
        assert again_s == pytest.approx(found.step_s, rel=1e-3)
        lanes = executor_of(found.run.model).lanes
        lanes.d2h._stream = torch.accelerator.current_stream(DEVICE)
        assert found.clock.period_s(found.step) > 1.1 * found.step_s
        lanes.h2d._stream = lanes.d2h._stream
        assert found.clock.period_s(found.step) > 1.2 * found.step_s


def test_streams_work_beside_each_other_and_events_and_waits_order_them() -> None:
    cluster = preset("a100-40g")
    source, target = torch.ones(1 << 20).pin_memory(), torch.empty(1 << 20, device=DEVICE)
    copied_s = cluster.h2d.latency_s + target.nbytes / cluster.h2d.bytes_per_s
    lane, compute = torch.cuda.Stream(), torch.cuda.current_stream()
    with clocked(cluster) as clock:
        before, beside, behind = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        before.record()
        with torch.cuda.stream(lane):
            target.copy_(source, non_blocking=True)
        clock.compute(5.0, "beside the copy")
        beside.record()
        compute.wait_stream(lane)
        with torch.cuda.stream(lane):
            clock.compute(7.0, "on the lane")
        compute.wait_stream(lane)
        behind.record()
        assert not beside.query()
        began_s = clock.turns.now_s()
        beside.synchronize()
        assert clock.turns.now_s() - began_s == pytest.approx(5.0)
        behind.synchronize()
        assert before.elapsed_time(beside) == pytest.approx(5e3)
        assert before.elapsed_time(behind) == pytest.approx(1e3 * (copied_s + 7.0))
        assert clock.turns.now_s() - began_s == pytest.approx(copied_s + 7.0)
