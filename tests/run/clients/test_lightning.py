"""Lightning trains a module whose model is compiled as it trains an eager one, with accumulation and clipping.

It needs the extra `clients`; `make test-clients` installs it and runs this.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.run.clients.client_runs import (
    assert_equal,
    assert_moved,
    compiled,
    eager_adamw,
    hybrid_adamw,
    own_copy,
    rows,
    weights,
)
from tests.run.models import small_gpt2

lightning = pytest.importorskip("lightning", reason="needs Lightning: `pip install elixir-compile[clients]`")

pytestmark = [
    pytest.mark.slow,
    # Lightning uses what torch and transformers call deprecated. Warnings of this package stay errors.
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch.optim.lr_scheduler"),
]


class Module(lightning.LightningModule):
    """A language model; the inner model is compiled, not this module."""

    def __init__(self, model: nn.Module, *, ours: bool) -> None:
        super().__init__()
        self.model, self.ours = model, ours
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.ours and self.model._compiled_call_impl is None:
            compiled(self.model)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return hybrid_adamw(self.model) if self.ours else eager_adamw(self.model)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = self.model(**batch).loss
        self.log("loss", loss)
        self.losses.append(loss.item())
        return loss


def fit(model: nn.Module, folder: Path, *, ours: bool, resume_from: Path | None = None, **settings: Any) -> Module:
    """Train a copy of `model` on two micro-batches a step, and save it."""
    torch.manual_seed(0)
    module = Module(own_copy(model), ours=ours)
    trainer = lightning.Trainer(
        accelerator="cpu",
        accumulate_grad_batches=2,
        gradient_clip_val=0.1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=str(folder),
        **{"max_steps": 4, **settings},
    )
    loader = DataLoader(rows(), batch_size=2)
    trainer.fit(module, loader, ckpt_path=None if resume_from is None else str(resume_from))
    trainer.save_checkpoint(folder / "last.ckpt")
    return module


def test_accumulation_and_clipping_are_those_of_eager_training(tmp_path: Path) -> None:
    model = small_gpt2(num_layers=2)
    expected = fit(model, tmp_path, ours=False)
    got = fit(model, tmp_path, ours=True)
    assert got.losses == expected.losses != []
    assert_equal(weights(expected.model), weights(got.model))
    assert_moved(got.model)


def test_a_run_that_is_saved_and_resumed_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    model = small_gpt2(num_layers=2)
    expected = fit(model, tmp_path, ours=False, max_epochs=2, max_steps=-1)
    fit(model, tmp_path, ours=True, max_epochs=1, max_steps=-1)
    got = fit(model, tmp_path, ours=True, max_epochs=2, max_steps=-1, resume_from=tmp_path / "last.ckpt")
    assert got.losses == expected.losses[len(expected.losses) // 2 :]
    assert_equal(weights(expected.model), weights(got.model))
    assert_moved(got.model)


def test_a_callback_logs_the_figures_of_each_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from elixir_compile.tools.integrations.lightning import ElixirCallback

    model = small_gpt2(num_layers=2)
    expected = fit(model, tmp_path, ours=False)
    callback = ElixirCallback()
    got = fit(model, tmp_path, ours=True, callbacks=[callback])
    assert got.losses == expected.losses
    assert_equal(weights(expected.model), weights(got.model))
    figures = got.trainer.callback_metrics
    assert figures["elixir/period_s"] > 0
    assert figures["elixir/forward_s"] > 0
    assert figures["elixir/backward_s"] > 0
    assert callback.study is not None
    assert str(callback.study) in capsys.readouterr().out
