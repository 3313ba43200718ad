"""The Trainer of transformers trains a compiled model bit for bit as it trains an eager one.

Gradient accumulation, clipping, autocast to bfloat16, activation checkpointing, saving and resuming are the Trainer's
own.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.run.clients.client_runs import (
    assert_equal,
    assert_moved,
    compiled,
    eager_adamw,
    hybrid_adamw,
    losses,
    own_copy,
    rows,
    weights,
)
from tests.run.models import small_gpt2

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="the Trainer needs accelerate")


def trainer_of(model: nn.Module, folder: Path, *, elixir: bool, **settings: Any) -> Any:
    """Return a Trainer of a copy of `model`, eager or compiled."""
    own = own_copy(model)
    optimizer = hybrid_adamw(compiled(own)) if elixir else eager_adamw(own)
    chosen = {
        "per_device_train_batch_size": 2,
        "max_steps": 4,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 5,
        **settings,
    }
    args = transformers.TrainingArguments(output_dir=str(folder), **chosen)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    return transformers.Trainer(model=own, args=args, train_dataset=rows(), optimizers=(optimizer, schedule))


def assert_trains_as_eager(folder: Path, model: nn.Module | None = None, **settings: Any) -> Any:
    """Fail unless losses and weights are equal; return the Trainer of the compiled model."""
    model = small_gpt2(num_layers=2) if model is None else model
    expected = trainer_of(model, folder, elixir=False, **settings)
    expected.train()
    got = trainer_of(model, folder, elixir=True, **settings)
    got.train()
    assert losses(got.state.log_history) == losses(expected.state.log_history) != []
    assert_equal(weights(expected.model), weights(got.model))
    assert_moved(got.model)
    return got


def test_accumulation_and_clipping(tmp_path: Path) -> None:
    got = assert_trains_as_eager(tmp_path, max_steps=2, gradient_accumulation_steps=2, max_grad_norm=0.1)
    norms = [entry["grad_norm"] for entry in got.state.log_history if "grad_norm" in entry]
    assert min(norms) > 0.1, "every step was clipped"


@pytest.mark.slow
def test_autocast_to_bfloat16(tmp_path: Path) -> None:
    assert_trains_as_eager(tmp_path, bf16=True)


@pytest.mark.slow
def test_gradient_checkpointing(tmp_path: Path) -> None:
    names = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    name = next(name for name in ("activation_checkpointing", "gradient_checkpointing") if name in names)
    got = assert_trains_as_eager(tmp_path, **{name: True, f"{name}_kwargs": {"use_reentrant": False}})
    assert any(
        module.gradient_checkpointing for module in got.model.modules() if hasattr(module, "gradient_checkpointing")
    )


@pytest.mark.slow
def test_a_run_that_is_saved_and_resumed_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    model = small_gpt2(num_layers=2)
    whole = trainer_of(model, tmp_path / "whole", elixir=False)
    whole.train()
    saved = {"save_strategy": "steps", "save_steps": 2}
    trainer_of(model, tmp_path / "half", elixir=True, **saved).train()
    resumed = trainer_of(model, tmp_path / "half", elixir=True, **saved)
    resumed.train(resume_from_checkpoint=str(tmp_path / "half" / "checkpoint-2"))
    assert resumed.state.global_step == 4
    assert_equal(weights(whole.model), weights(resumed.model))
    assert_moved(resumed.model)


def test_the_trainers_own_option_for_a_backend_refuses_ours_by_name(tmp_path: Path) -> None:
    """`docs/troubleshooting.md` has this error; if it is gone, the page can say that the option works."""
    with pytest.raises(ValueError, match="'ELIXIR' is not a valid DynamoBackend"):
        trainer_of(small_gpt2(num_layers=1), tmp_path, elixir=False, torch_compile=True, torch_compile_backend="elixir")
