"""`ir.pipeline`: the order of runs and messages is that of torch's own schedules."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules

from elixir_compile.ir import Verb
from elixir_compile.ir.pipeline import TorchSchedule, pipeline_order

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
