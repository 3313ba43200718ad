"""Stages of torch.distributed.pipelining: the orders of torch's schedules, training within budgets, planned and
emulated."""

import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage, schedules

import elixir_compile as elixir
from elixir_compile.ir import Verb
from elixir_compile.ir.kinds import Phase
from elixir_compile.ir.pipeline import TorchSchedule, parse_schedule, pipeline_order
from tests.run.pipeline_checks import (
    DEFAULTS,
    NUM_MICRO_BATCHES,
    NUM_STEPS,
    Block,
    each_schedule,
    measure_pipeline,
    train_grid,
    train_sharded,
    train_sharded_with_lean_calls,
    train_streamed,
)
from tests.run.processes import spawn

# ----------------------------------------------------------------------------------------------------------------------
# Stages of torch.distributed.pipelining on real ranks train as one process does, within the budget of their plans.


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


# ----------------------------------------------------------------------------------------------------------------------
# `ir.pipeline`: the order of runs and messages is that of torch's own schedules.


LOOPED = {
    TorchSchedule.INTERLEAVED: schedules.ScheduleInterleaved1F1B,
    TorchSchedule.LOOPED_BFS: schedules.ScheduleLoopedBFS,
}
SINGLE = {TorchSchedule.GPIPE: schedules.ScheduleGPipe, TorchSchedule.ONE_F_ONE_B: schedules.Schedule1F1B}
SIZES = [(2, 1, 4), (2, 2, 4), (2, 3, 2), (3, 2, 6), (4, 1, 4), (4, 2, 8), (4, 2, 10), (4, 4, 3)]
"""Ranks, stages per rank, micro-batches."""


def stage_stub(index: int, num_ranks: int, num_stages: int) -> Any:
    return SimpleNamespace(
        stage_index=index,
        num_stages=num_stages,
        group_size=num_ranks,
        group_rank=index % num_ranks,
        is_first=index == 0,
        is_last=index == num_stages - 1,
        has_backward=True,
    )


def runs_and_sends_of_torch(schedule: TorchSchedule, num_ranks: int, loops: int, num: int) -> list[list[str]]:
    """Return what each rank does, as `run 2F1` and `send 2F1`; torch prints the latter as `2SEND_F1`."""
    num_stages = num_ranks * loops
    stages = [stage_stub(stage, num_ranks, num_stages) for stage in range(0, num_stages, num_ranks)]
    made = LOOPED[schedule](stages, num, loss_fn=lambda *_: None)
    printed = [list(map(str, made.pipeline_order_with_comms[rank])) for rank in range(num_ranks)]
    found = [[re.fullmatch(r"(\d+)(SEND_)?([FB]\d+)", action) for action in actions] for actions in printed]
    return [[f"{'send' if m[2] else 'run'} {m[1]}{m[3]}" for m in matches if m] for matches in found]


@pytest.mark.parametrize("schedule", LOOPED)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_stages_of_looped_schedules_run_and_send_in_the_order_of_torch(
    schedule: TorchSchedule, sizes: tuple[int, int, int]
) -> None:
    num_ranks, loops, num = sizes
    order = pipeline_order(schedule, num_ranks * loops, num_ranks, num)
    own = [[str(action) for action in actions if action.verb is not Verb.RECV] for actions in order.actions]
    assert own == runs_and_sends_of_torch(schedule, num_ranks, loops, num)


class _Recorded:
    """A stage of a schedule with one stage per rank, which notes what the schedule does with it."""

    def __init__(self, index: int, num_stages: int) -> None:
        self.done: list[str] = []
        self.stage_index, self.num_stages = index, num_stages

    def _ops(self, verb: str, phase: str, number: int, towards: int) -> list[str]:
        exists = 0 <= self.stage_index + towards < self.num_stages
        return [f"{verb} {self.stage_index}{phase}{number}"] if exists else []

    def get_fwd_recv_ops(self, number: int) -> list[str]:
        return self._ops("recv", "F", number, -1)

    def get_fwd_send_ops(self, number: int) -> list[str]:
        return self._ops("send", "F", number, 1)

    def get_bwd_recv_ops(self, number: int) -> list[str]:
        return self._ops("recv", "B", number, 1)

    def get_bwd_send_ops(self, number: int) -> list[str]:
        return self._ops("send", "B", number, -1)

    def forward_one_chunk(self, number: int, *_: object, **__: object) -> None:
        self.done.append(f"run {self.stage_index}F{number}")

    def backward_one_chunk(self, number: int, **_: object) -> None:
        self.done.append(f"run {self.stage_index}B{number}")

    def perform_reduce_grad(self, *_: object) -> None:
        pass

    def batch(self, ops: list[str], **_: object) -> list[str]:
        """Begin sends; a receive counts when it is waited for."""
        self.done += [op for op in ops if op.startswith("send")]
        return [op.replace("send", "wait") for op in ops]

    def wait(self, works: list[str]) -> None:
        self.done += sorted(works)  # receives before the waits for sends: either order takes the same seconds


def steps_of_torch(
    schedule: TorchSchedule, rank: int, num_ranks: int, num: int, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    stage = _Recorded(rank, num_ranks)
    made: Any = SINGLE[schedule](stage, num, loss_fn=lambda *_: None)  # pyright: ignore[reportArgumentType]
    for name, function in {
        "_check_inputs": lambda *_: ([()] * num, [{}] * num),
        "_initialize_stage": lambda *_: None,
        "_maybe_compute_loss": lambda *_: None,
        "_maybe_get_loss": lambda *_: None,
        "_update_losses": lambda *_: None,
    }.items():
        monkeypatch.setattr(made, name, function)
    monkeypatch.setattr(schedules, "_batch_p2p", stage.batch)
    monkeypatch.setattr(schedules, "_sorted_batch_p2p", lambda ops, **_: {0: stage.batch(ops)})
    monkeypatch.setattr(schedules, "_wait_batch_p2p", stage.wait)
    made._step_microbatches([()] * num)
    return stage.done


@pytest.mark.parametrize("schedule", SINGLE)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_single_stage_does_what_torch_does_in_its_order(
    schedule: TorchSchedule, num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for num in (num_ranks, 7):
        order = pipeline_order(schedule, num_ranks, num_ranks, num)
        for rank in range(num_ranks):
            done = steps_of_torch(schedule, rank, num_ranks, num, monkeypatch)
            own = [str(action) for action in order.actions[rank]]
            if schedule is TorchSchedule.GPIPE:  # waits between the phases and at the end, when all has arrived
                done = [line for line in done if not line.startswith("wait")]
            while done[-1].startswith("wait"):
                done.pop()
            assert own == done


# ----------------------------------------------------------------------------------------------------------------------
# The peak that `plan_stages` counts for a rank is that of the plans that its stages get, and the measured one.


WIDTH, ROWS = 64, 256
OPTIONS = {"inner": "aot_eager", "activations": "keep", "device_memory": "1GiB"}


class Layers(nn.Module):
    """Some layers of the model; the last returns the loss."""

    def __init__(self, layers: Sequence[Block], *, has_loss: bool = True) -> None:
        super().__init__()
        self.h, self.has_loss = nn.ModuleList(layers), has_loss

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.h:
            x = layer(x)
        return x.square().mean().reshape(1) if self.has_loss else x


def peaks(rank: int, world_size: int, name: str) -> dict[str, Any]:
    """Run the stages that `plan_stages` chose by the schedule `name`, and return the peaks of this rank."""
    num_stages = world_size * (2 if parse_schedule(name).is_looped else 1)
    with torch.device("meta"):
        whole, x = Layers([Block(WIDTH) for _ in range(8)]), torch.empty(ROWS, WIDTH)
    made = elixir.plan_stages(
        whole,
        (x,),
        stages=num_stages,
        schedule=name,
        micro_batches=NUM_MICRO_BATCHES,
        ranks=world_size,
        options=OPTIONS,
    )
    own = [stage for stage in made.stages if stage.rank == rank]
    modules = [
        Layers([Block(WIDTH) for name in stage.layers if name.startswith("h.")], has_loss=stage is made.stages[-1])
        for stage in own
    ]
    compiled = [torch.compile(elixir.prepare(m), backend="elixir", options={**DEFAULTS, **OPTIONS}) for m in modules]
    stages = [
        PipelineStage(module, stage.stage, num_stages, torch.device("cpu"))
        for module, stage in zip(compiled, own, strict=True)
    ]
    kind = getattr(pipelining, name)
    schedule = kind(stages if num_stages > world_size else stages[0], NUM_MICRO_BATCHES, loss_fn=lambda out, _: out)
    for module in modules:
        elixir.prepare(module, outstanding=schedule)
    optimizers = [elixir.HybridAdamW(module.parameters()) for module in modules]
    inputs = [torch.randn(ROWS, WIDTH)] if rank == 0 else []
    targets = {"target": torch.zeros(ROWS)} if rank == world_size - 1 else {}

    def step() -> None:
        schedule.step(*inputs, **targets)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    step()
    step()
    record = elixir.measure_step(step, device="cpu")
    return {
        "stages": made.ranks[rank].peak_bytes,
        "plans": elixir.compilations(modules[0])[-1].rank_peak_bytes,
        "measured": record.device_peak_bytes - sum(target.nbytes for target in targets.values()),
    }


@pytest.mark.slow  # 10 s each
@pytest.mark.parametrize("name", ["ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleLoopedBFS"])
def test_the_peak_of_each_rank_is_that_of_its_stages_when_they_run(tmp_path: Path, name: str) -> None:
    for found in spawn(peaks, 2, name, folder=tmp_path, limit_s=120):
        print(found)
        assert found["stages"] == pytest.approx(found["plans"], rel=0.01)
        assert found["stages"] == pytest.approx(found["measured"], rel=0.01)


# ----------------------------------------------------------------------------------------------------------------------
# Steps and bubbles of torch's pipeline schedules, over an **emulated** link, are as the simulation says.


BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
CORE_SHARE = 0.9
"""CPU seconds over seconds of stages from which on a machine counts as free of other work."""


def compared(rank: int, world_size: int, kind: str, rounds: int) -> dict[str, Any]:
    sys.path.insert(0, str(BENCHMARKS))
    import pipeline

    return pipeline.compared(kind, rounds)


@pytest.mark.slow  # a minute of sleep
def test_stages_that_sleep_take_the_simulated_step_and_have_its_bubble(tmp_path: Path) -> None:
    """The seconds of stages in the second fastest step predict the fastest: other processes delay the rest."""
    found, _ = spawn(compared, 2, "sleep", 7, folder=tmp_path, limit_s=500, timeout_s=400)
    assert found.keys() == {"gpipe", "1f1b", "interleaved-1f1b", "looped-bfs"}
    for schedule, own in found.items():
        assert own["fastest_step_ratio"] == pytest.approx(1, abs=0.15), (schedule, own["step_s"])
        assert own["fastest_bubble_ratio"] == pytest.approx(1, abs=0.15), (schedule, own["bubble"])


@pytest.mark.slow  # 30 s of CPU time
@pytest.mark.parametrize("kind", ["eager", "elixir"])
def test_stages_that_compute_do_too_if_each_rank_has_a_core(kind: str, tmp_path: Path) -> None:
    """The seconds of stages in a step predict the next, by medians. Without a core for each rank they change from step
    to step, and ranks wait for cores too."""
    found, _ = spawn(compared, 2, kind, 9, folder=tmp_path, limit_s=500, timeout_s=400)
    share = min(own["core_share"] for own in found.values())
    if share < CORE_SHARE:
        pytest.skip(f"other processes had the cores: stages had one for {share:.0%} of their seconds")
    for schedule, own in found.items():
        assert own["step_ratio"] == pytest.approx(1, abs=0.15), (schedule, own["step_s"])
        assert own["bubble_ratio"] == pytest.approx(1, abs=0.15), (schedule, own["bubble"])
