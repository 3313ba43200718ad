"""`hybrid(cls, state_dtype="bfloat16")`: statistics of any class in bf16, wherever and whenever it updates."""

import copy
import functools
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, RMSprop

import elixir_compile as elixir
from elixir_compile.ir import Update
from elixir_compile.optim.generic import class_rule
from tests.run import optimizers as users
from tests.run.optim.test_narrow_state import assert_same_run, rows, steps
from tests.run.training import Run
from tests.run.updating import buckets_of, eager_run, hybrid_run, nan_staging, small_pieces

pytestmark = pytest.mark.filterwarnings("ignore::elixir_compile.base.errors.NoGraphCaptured")
CLASSES = {
    "SGD": (SGD, {"lr": 0.1, "momentum": 0.9}),
    "Adam": (Adam, {"lr": 1e-2}),
    "RMSprop": (RMSprop, {"lr": 1e-2, "centered": True}),
    "Lion": (users.Lion, {}),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A parameter has several blocks, and state on disk and streamed state come in several pieces."""
    monkeypatch.setattr(class_rule, "_BLOCK", 1024)
    with small_pieces():
        yield


def narrow(params: Any, name: str = "SGD", **how: Any) -> torch.optim.Optimizer:
    cls, arguments = CLASSES[name]
    return elixir.hybrid(cls, "bfloat16", **how)(params, **arguments)


@pytest.mark.parametrize(
    ("home", "update", "share"),
    [("host", Update.ACROSS_STEPS, 0.5), ("host disk", Update.AFTER_BACKWARD, 0.0)],
)
@pytest.mark.parametrize(
    "name", ["SGD", "Adam", *(pytest.param(n, marks=pytest.mark.slow) for n in ("RMSprop", "Lion"))]
)
def test_the_place_of_an_update_changes_no_bit(
    name: str, home: str, update: Update, share: float, tmp_path: Path
) -> None:
    optimizer = functools.partial(narrow, name=name)
    expected = eager_run(steps(), optimizer).train(rows(5))
    entries = [value for state in expected.optimizer.state.values() for value in state.values()]
    kept = {value.dtype for value in entries if isinstance(value, torch.Tensor) and value.dim()}
    assert kept == {torch.bfloat16}
    disk = {"disk_path": tmp_path} if home.endswith("disk") else {}
    with (
        nan_staging(),
        hybrid_run(steps(), rows(1)[0], home=home, update=update, share=share, optimizer=optimizer, **disk) as run,
    ):
        run.train(rows(5))
        assert {bucket.spec.state_dtype for bucket in buckets_of(run)} == {"bfloat16"}
        assert_same_run(expected, run)


def apart_from_exact(run: Run, name: str) -> float:
    """Return how far `run` is from the exact class, over how far the class went."""
    cls, arguments = CLASSES[name]
    exact = eager_run(steps(), functools.partial(elixir.hybrid(cls), **arguments)).train(rows(20))
    start = steps().state_dict()
    moved = sum(float((exact.weights[key] - start[key]).abs().sum()) for key in start)
    return sum(float((exact.weights[key] - run.weights[key]).abs().sum()) for key in start) / moved


@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_training_stays_near_the_exact_class(name: str) -> None:
    run = eager_run(steps(), functools.partial(narrow, name=name)).train(rows(20))
    assert 0 < apart_from_exact(run, name) < 0.05


def test_state_dicts_copies_and_files_resume_bit_for_bit() -> None:
    first = eager_run(steps(), narrow).train(rows(3))
    file = io.BytesIO()
    torch.save(first.optimizer, file)
    file.seek(0)
    assert type(torch.load(file, weights_only=False)) is type(first.optimizer)
    other = eager_run(steps(), narrow).train(rows(1))
    other.model.load_state_dict(copy.deepcopy(first.model.state_dict()))
    other.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
    for run in (first, other):
        run.losses.clear()
        run.train(rows(5)[3:])
    assert_same_run(first, other)


def test_what_has_no_such_form_is_refused() -> None:
    with pytest.raises(ValueError, match="HybridAdamW has them"):
        elixir.hybrid(SGD, "int8")
    with pytest.raises(ValueError, match=r"use HybridAdamW\(..., state_dtype='bfloat16'\)"):
        elixir.hybrid(torch.optim.AdamW, "bfloat16")
    with pytest.raises(ValueError, match="state_dtype='half'"):
        elixir.hybrid(SGD, "half")
    assert elixir.hybrid(SGD) is elixir.hybrid(SGD)
