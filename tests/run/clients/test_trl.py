"""The trainers of TRL, for supervised fine-tuning and for direct preferences, train a compiled model as an eager one.

They need the extra `clients`; `make test-clients` installs it and runs them.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import elixir_compile as elixir
from tests.run.clients.client_runs import (
    WORDS,
    assert_equal,
    assert_moved,
    compiled,
    eager_adamw,
    hybrid_adamw,
    losses,
    own_copy,
    tokenizer,
    weights,
)
from tests.run.models import small_gpt2

trl = pytest.importorskip("trl", reason="needs TRL: `pip install elixir-compile[clients]`")
datasets = pytest.importorskip("datasets", reason="needs datasets: `pip install elixir-compile[clients]`")

pytestmark = [
    pytest.mark.slow,
    # TRL uses what torch and transformers call deprecated. Warnings of this package stay errors.
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def settings(folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "max_steps": 3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "seed": 5,
        "max_length": 16,
    }


def texts(num_words: int, shift: int) -> str:
    return " ".join(WORDS[(shift + at) % len(WORDS)] for at in range(num_words))


def optimizers(model: nn.Module, *, ours: bool) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = hybrid_adamw(compiled(model)) if ours else eager_adamw(model)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))


def supervised(model: nn.Module, folder: Path, *, ours: bool) -> Any:
    """Return a trainer on sentences of different lengths."""
    data = datasets.Dataset.from_list([{"text": texts(6 + at % 5, at)} for at in range(12)])
    own = own_copy(model)
    return trl.SFTTrainer(
        model=own,
        args=trl.SFTConfig(**settings(folder)),
        train_dataset=data,
        processing_class=tokenizer(),
        optimizers=optimizers(own, ours=ours),
    )


def preferences(model: nn.Module, folder: Path, *, ours: bool) -> Any:
    """Return a trainer on pairs of answers, with a frozen copy of the model as reference."""
    pairs = [{"prompt": texts(4, at), "chosen": texts(5, at + 4), "rejected": texts(5, at + 7)} for at in range(12)]
    own = own_copy(model)
    return trl.DPOTrainer(
        model=own,
        ref_model=own_copy(model),
        args=trl.DPOConfig(**settings(folder)),
        train_dataset=datasets.Dataset.from_list(pairs),
        processing_class=tokenizer(),
        optimizers=optimizers(own, ours=ours),
    )


@pytest.mark.parametrize("trainer_of", [supervised, preferences])
def test_training_is_bitwise_that_of_eager_code(trainer_of: Any, tmp_path: Path) -> None:
    model = small_gpt2(num_layers=2)
    expected = trainer_of(model, tmp_path / "eager", ours=False)
    expected.train()
    got = trainer_of(model, tmp_path / "ours", ours=True)
    got.train()
    assert len(losses(got.state.log_history)) == 3
    assert losses(got.state.log_history) == losses(expected.state.log_history)
    assert_equal(weights(expected.model), weights(got.model))
    assert_moved(got.model, len(elixir.compilations(got.model)))
