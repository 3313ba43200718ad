"""Streamed updates in pieces: the bits of whole tensors, in no more memory than the plan counts, on three lanes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, NAdam, Optimizer

import elixir_compile as elixir
from elixir_compile.base.units import MIB
from elixir_compile.ir import Update
from elixir_compile.ir.bucket import streamed_bytes
from elixir_compile.ir.cost import MOST_STREAMED_ROOM_BYTES, streamed_rooms
from elixir_compile.optim import streaming
from elixir_compile.optim import streaming as pieces
from elixir_compile.runtime.lanes import Plain
from tests.run import optimizers as users
from tests.run.optim.test_mixed_precision import BF16, FP16
from tests.run.optim.test_streamed_masters import trained
from tests.run.training import assert_same_tensors
from tests.run.updating import (
    assert_equal,
    buckets_of,
    eager_run,
    hybrid_run,
    ladder,
    nan_staging,
    rows,
    small_pieces,
)


def use_small_rooms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut buckets of a few hundred elements into pieces: three rooms of 496 bytes, cuts at each 16 elements."""
    monkeypatch.setattr(streaming, "streamed_rooms", lambda nbytes: (3, min(nbytes, 496)))
    monkeypatch.setattr(streaming, "CUT_NUMEL", 16)
    monkeypatch.setattr(pieces, "CUT_NUMEL", 16)


ADAMW = {"fused": True, "amsgrad": True, "lr": 0.01}
CASES: list[Any] = [
    (torch.optim.AdamW, ADAMW, "host"),
    (SGD, {"lr": 0.1, "momentum": 0.9}, "split"),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            (torch.optim.AdamW, ADAMW, "split"),
            (SGD, {"lr": 0.1, "momentum": 0.9}, "host"),
            (Adam, {"fused": True}, "host"),
            (NAdam, {}, "split"),
            (users.Lion, {}, "host"),
        )
    ),
]


@pytest.mark.parametrize(("cls", "options", "home"), CASES)
def test_pieces_give_the_bits_of_whole_tensors(
    cls: type[Optimizer], options: dict[str, Any], home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_small_rooms(monkeypatch)
    num_pieces: list[int] = []
    pass_ = streaming.Stream._pass

    def counted(self: streaming.Stream, segments: Any, *args: Any, **kwargs: Any) -> None:
        num_pieces.append(len(segments))
        pass_(self, segments, *args, **kwargs)

    monkeypatch.setattr(streaming.Stream, "_pass", counted)
    model, batches = ladder(), rows(4)
    expected = eager_run(model, lambda params: cls(params, **options)).train(batches)
    plan = {"home": home, "update": Update.ACROSS_STEPS, "share": 1.0}
    hybrid: Any = elixir.hybrid(cls)
    with nan_staging(), hybrid_run(model, batches[0], optimizer=lambda p: hybrid(p, **options), **plan) as run:
        assert_equal(expected, run.train(batches))
    assert len(num_pieces) >= 2 * 4 * 3, "several pieces for each bucket with a bias in 4 steps"


def trained_equally(cls: type[Optimizer], home: str, num_steps: int, **options: Any) -> None:
    model, batches = ladder(), rows(num_steps)
    expected = eager_run(model, lambda params: cls(params, **options)).train(batches)
    hybrid: Any = elixir.hybrid(cls)
    plan = {"home": home, "update": Update.ACROSS_STEPS, "share": 1.0}
    with nan_staging(), hybrid_run(model, batches[0], optimizer=lambda p: hybrid(p, **options), **plan) as run:
        assert_equal(expected, run.train(batches))


def test_a_statistic_that_begins_late_begins_in_every_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_rooms(monkeypatch)
    trained_equally(users.LateAverage, "host", 6)


class Noted(users.Lion):
    """Keeps entries that are no tensors, one of them nothing and one that a step changes in place."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        super().update(param, group)
        state = self.state[param]
        state["nothing"] = None
        state["steps"] = [*state.get("steps", ()), 1]
        state["steps"].append(2)


@pytest.mark.parametrize(("home", "share"), [("host", 1.0), ("host disk", 0.0)])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_entries_that_are_no_tensors_change_once_in_a_step(
    state_dtype: str, home: str, share: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use_small_rooms(monkeypatch)
    plan = {"home": home, "update": Update.ACROSS_STEPS, "share": share, "optimizer": elixir.hybrid(Noted, state_dtype)}
    disk = {} if share else {"disk_path": tmp_path}
    with small_pieces():  # which change the size of the ladder and its rows
        batches = rows(3)
        with hybrid_run(ladder(), batches[0], **plan, **disk) as run:
            run.train(batches)
            states = [dict(state) for state in run.optimizer.state.values()]
    assert all(state["nothing"] is None and state["steps"] == [1, 2] * 3 for state in states)


@pytest.mark.parametrize("home", ["split", pytest.param("host", marks=pytest.mark.slow)])
def test_a_parameter_that_passes_whole_has_its_shape(home: str) -> None:
    trained_equally(users.FastSquares, home, 3)


def test_the_host_counts_the_steps_of_a_fused_class(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[str] = []
    keep = pieces.Row.keep_other

    def noted(row: pieces.Row, name: str, value: Any) -> None:
        copied.append(name)
        keep(row, name, value)

    monkeypatch.setattr(pieces.Row, "keep_other", noted)
    use_small_rooms(monkeypatch)
    trained_equally(Adam, "host", 3, fused=True)
    assert copied == ["step"] * 7, "the counters of the first step, which the class makes"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_pieces_of_masters_give_the_bits_of_whole_tensors(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trained(dtype)
    use_small_rooms(monkeypatch)
    assert_same_tensors(expected, trained(dtype, 4, home="host", update=Update.ACROSS_STEPS))


@pytest.mark.parametrize("home", ["host", pytest.param("split", marks=pytest.mark.slow)])
def test_the_rooms_take_no_more_than_the_plan_counts(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    empty = Plain.empty

    def counted(lanes: Plain, nbytes: int) -> torch.Tensor:
        taken.append(nbytes)
        return empty(lanes, nbytes)

    model, batches = ladder(), rows(2)
    with hybrid_run(model, batches[0], home=home, update=Update.AFTER_BACKWARD, share=1.0) as run:
        run.train(batches[:1])
        monkeypatch.setattr(Plain, "empty", counted)
        step: Any = streaming.Stream._allocate
        in_update: list[int] = []

        def allocating(self: streaming.Stream, rows: Any) -> None:
            before = len(taken)
            step(self, rows)
            in_update.extend(taken[before:])

        monkeypatch.setattr(streaming.Stream, "_allocate", allocating)
        run.train(batches[1:])
        planned = max(streamed_bytes(bucket.spec, bucket.placement.param) for bucket in buckets_of(run))
        num_tensors = 2 * 4
        assert len(in_update) == 1
        assert 0 < in_update[0] <= planned + num_tensors * pieces.ALIGN_BYTES


@pytest.mark.parametrize(
    ("nbytes", "num_rooms"), [(0, 1), (1000, 1), (2 * MIB - 1, 1), (2 * MIB, 2), (5 * MIB, 4), (1 << 33, 4)]
)
def test_rooms_share_the_bytes_of_the_largest_bucket(nbytes: int, num_rooms: int) -> None:
    found, room_bytes = streamed_rooms(nbytes)
    assert found == num_rooms
    assert found * room_bytes <= nbytes
    assert room_bytes <= MOST_STREAMED_ROOM_BYTES
    assert room_bytes >= min(nbytes, MIB - 256)
