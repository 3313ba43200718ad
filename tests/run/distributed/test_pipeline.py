"""Stages of torch.distributed.pipelining on real ranks train as one process does, within the budget of their plans."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from elixir_compile.ir.kinds import Phase
from elixir_compile.ir.pipeline import parse_schedule, pipeline_order
from tests.run.pipeline_checks import (
    NUM_MICRO_BATCHES,
    NUM_STEPS,
    each_schedule,
    measure_pipeline,
    train_grid,
    train_sharded,
    train_sharded_with_lean_calls,
    train_streamed,
)
from tests.run.processes import spawn

SCHEDULES = ("ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleLoopedBFS")
TIGHT = {"device_memory": "275KiB"}
"""GPipe and breadth-first loops offload and recompute activations of the first stage of a rank within it, in full or
lean calls; two stages of a rank share twice as much."""
OUTSTANDING = {
    "ScheduleGPipe": [["8 calls, 8 outstanding"]] * 2,
    "Schedule1F1B": [["8 calls, 2 outstanding"], ["8 calls, 1 outstanding"]],
    "ScheduleInterleaved1F1B": [
        ["8 calls, 4 outstanding", "8 calls, 2 outstanding"],
        ["8 calls, 3 outstanding", "8 calls, 1 outstanding"],
    ],
    "ScheduleLoopedBFS": [["8 calls, 8 outstanding"] * 2] * 2,
}
"""By rank, what the plans of its stages say of the calls of a step."""


def check(found: dict[str, Any], *, within: float) -> None:
    """Check the result of `train_pipeline` on one rank: weights, one reduce per bucket and step, offloads per call."""
    assert found["apart"] <= within
    assert all(planned <= budget for planned, budget in found["peaks"])
    for planned, each, executed in zip(found["planned"], found["in_all_calls"], found["executed"], strict=True):
        assert executed["reduce"] == NUM_STEPS * planned["reduce"]
        assert executed["update"] == NUM_STEPS * planned["update"]
        for verb in ("offload", "prefetch"):
            # One more call learns the shapes of tensors before the first step, on the first stage without a backward.
            more = executed.get(verb, 0) - NUM_STEPS * each.get(verb, 0)
            assert more in (0, planned.get(verb, 0))


def messages_of(name: str, rank: int, num_ranks: int) -> dict[str, int]:
    """Return the sends and the receives of `rank` in a step, by the order of the schedule."""
    schedule = parse_schedule(name)
    num_stages = num_ranks * (2 if schedule.is_looped else 1)
    order = pipeline_order(schedule, num_stages, num_ranks, NUM_MICRO_BATCHES)
    runs = list(order.runs(rank))
    first, last = 0, num_stages - 1
    received = [run for run in runs if run.stage != (first if run.phase is Phase.FORWARD else last)]
    counts = Counter(action.verb.value for action in order.actions[rank])
    assert counts["recv"] == len(received)
    return {"send": counts["send"], "recv": counts["recv"]}


def test_each_schedule_trains_stages_as_one_process_does(tmp_path: Path) -> None:
    for rank, found in enumerate(spawn(each_schedule, 2, SCHEDULES, TIGHT, "float64", folder=tmp_path, limit_s=240)):
        for name in SCHEDULES:
            check(found[name], within=1e-12)
            assert found[name]["plans"] == OUTSTANDING[name][rank]
            assert found[name]["messages"] == messages_of(name, rank, 2)
        for name in ("ScheduleGPipe", "ScheduleLoopedBFS"):
            assert {"offload", "recompute"} <= set(found[name]["saved"][0])
            assert 1 <= found[name]["num_full"][0] < NUM_MICRO_BATCHES


@pytest.mark.parametrize(
    ("order", "options", "num_gathers"),
    [
        ("FFBFBFBB", {"device_memory": "2300KiB"}, 1),
        # Every bucket is released after the forward.
        ("FFFFBBBB", {"placement_policy": "static", "shard_param_frac": 1.0}, 2),
    ],
    ids=["alternate", "forwards first"],
)
def test_a_stage_shared_by_ranks_is_gathered_at_most_twice_and_reduced_once(
    tmp_path: Path, order: str, options: dict[str, Any], num_gathers: int
) -> None:
    for found in spawn(train_sharded, 2, order, options, folder=tmp_path, limit_s=120):
        assert found["apart"] <= 1e-12
        assert found["calls"] == f"4 calls, {2 if num_gathers == 1 else 4} outstanding"
        assert found["executed"]["gather"] == num_gathers * found["num_sharded"]
        assert found["planned"]["gather"] == found["executed"]["gather"] == found["executed"]["release"]
        assert found["planned"]["reduce"] == found["executed"]["reduce"]


@pytest.mark.slow
@pytest.mark.parametrize("order", ["FFFBFBBB", "FFFFBBBB"], ids=["alternate", "forwards first"])
@pytest.mark.parametrize("lean", ["recompute", "offload"])
def test_ranks_that_share_a_stage_run_full_and_lean_calls(tmp_path: Path, order: str, lean: str) -> None:
    for found in spawn(train_sharded_with_lean_calls, 2, order, lean, folder=tmp_path, limit_s=120):
        assert found["apart"] <= 1e-12
        assert found["num_full"] == 2
        assert found["planned"]["gather"] == found["executed"]["gather"] == found["executed"]["release"]
        assert found["planned"]["reduce"] == found["executed"]["reduce"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("saved", ["keep", "recompute", "offload"])
def test_sums_of_gradients_in_fp32_are_bitwise_those_of_one_process(tmp_path: Path, saved: str) -> None:
    """The micro-batches have their backward in the same order. The optimizers may round otherwise."""
    budget = {} if saved == "keep" else {"device_memory": "155KiB"}
    options = {"activations": saved, **budget}
    for found in spawn(each_schedule, 2, SCHEDULES, options, "float32", folder=tmp_path, limit_s=240):
        for name in SCHEDULES:
            check(found[name], within=1e-7)
            assert found[name]["grads_apart"] == 0.0
        if saved != "keep":
            assert saved in found["ScheduleGPipe"]["saved"][0]


@pytest.mark.slow
def test_stages_on_the_host_with_streamed_updates_train_as_one_process_does(tmp_path: Path) -> None:
    for found in spawn(train_streamed, 2, SCHEDULES, folder=tmp_path, limit_s=240):
        for name in SCHEDULES:
            assert found[name]["apart"] <= 1e-12
            assert found[name]["homes"] == [[["host", False], ["host", True]]] * len(found[name]["plans"])
            for planned, executed in zip(found[name]["planned"], found[name]["executed"], strict=True):
                for verb in ("reduce", "offload", "update"):  # gradients leave once per step, not once per call
                    assert executed[verb] == NUM_STEPS * planned[verb] > 0


@pytest.mark.slow
def test_four_ranks_train_as_one_process_does(tmp_path: Path) -> None:
    ranks = spawn(each_schedule, 4, SCHEDULES, TIGHT, "float64", folder=tmp_path, limit_s=400, timeout_s=120)
    for rank, found in enumerate(ranks):
        for name in SCHEDULES:
            check(found[name], within=1e-12)
            assert found[name]["messages"] == messages_of(name, rank, 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"device_memory": "1320KiB"},
        {"device_memory": "1700KiB", "activations": "recompute"},
        {"device_memory": "1700KiB", "activations": "offload"},
    ],
    ids=["free", "tight", "recompute", "offload"],
)
def test_the_peak_of_each_rank_is_planned_within_one_percent(
    tmp_path: Path, name: str, world_size: int, options: dict[str, Any]
) -> None:
    for found in spawn(measure_pipeline, world_size, name, options, folder=tmp_path, limit_s=200, timeout_s=100):
        assert abs(found["measured"] / found["planned"] - 1) <= 0.01
        assert found["measured"] <= found["budget"]
        assert found["reduced"] == found["reduces"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ScheduleGPipe", "ScheduleInterleaved1F1B"])
def test_the_peak_of_stages_that_inductor_compiles_is_planned_within_one_percent(tmp_path: Path, name: str) -> None:
    options = {"inner": "inductor", "device_memory": "1500KiB"}
    for found in spawn(measure_pipeline, 2, name, options, folder=tmp_path, limit_s=200, timeout_s=200):
        assert abs(found["measured"] / found["planned"] - 1) <= 0.01
        assert found["measured"] <= found["budget"]
        assert found["saved"][0] != []


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_stages_on_a_mesh_of_two_axes_gather_and_reduce_once(tmp_path: Path, name: str) -> None:
    for found in spawn(train_grid, 4, name, {"device_memory": "2500KiB"}, folder=tmp_path, limit_s=300, timeout_s=120):
        assert found["apart"] <= 1e-12
        assert found["gathered"] == [planned["gather"] for planned in found["planned"]]
        assert found["reduced"] == [planned["reduce"] for planned in found["planned"]]
        pairs = zip(found["gathered"], found["num_buckets"], strict=True)
        assert all(gathered <= 2 * num_buckets for gathered, num_buckets in pairs)
        assert found["peak"] <= found["budget"]
