"""`ElixirCallback` with a real `transformers.Trainer`: the figures of a run add up, and reach its logs."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import elixir_compile as elixir
from elixir_compile.tools.observed import read_trace
from tests.run.models import Stack, hf_batches, seeded, small_gpt2, vectors

transformers = pytest.importorskip("transformers")


class Batches(torch.utils.data.Dataset):
    """Samples of the batches of a test."""

    def __init__(self, num_samples: int) -> None:
        batches = hf_batches(num_samples)
        self.samples = [{name: value[0] for name, value in batch.items()} for batch in batches]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


class Logged(transformers.TrainerCallback):
    """A logger, as that of W&B: it keeps what it is given."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.logs.append(dict(logs))


def trained(folder: Path, callback: Any, **arguments: Any) -> Any:
    model = small_gpt2(num_layers=1)
    model.compile(backend="elixir", options={"inner": "aot_eager", "report": False, "planner": "keep_all"})
    optimizer = elixir.HybridAdamW(model.parameters(), lr=1e-3)
    args = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=2, max_steps=4, logging_steps=1, report_to=[],
        save_strategy="no", use_cpu=True, disable_tqdm=True, max_grad_norm=1.0, **arguments,
    )  # fmt: skip
    trainer = transformers.Trainer(
        model=model, args=args, train_dataset=Batches(16), optimizers=(optimizer, None), callbacks=[Logged()]
    )
    if callback is not None:
        callback.attach(trainer)
    trainer.train()
    return trainer


def test_the_callback_observes_from_the_begin_of_a_training_to_its_end_and_adds_figures_to_logs_with_a_loss(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from elixir_compile.tools.integrations.transformers import ElixirCallback

    model = seeded(Stack, 8, 1)
    compiled: Any = torch.compile(
        model, backend="elixir", options={"inner": "aot_eager", "report": False, "planner": "keep_all"}
    )
    optimizer = elixir.HybridAdamW(model.parameters(), lr=1e-3)
    callback: Any = ElixirCallback()
    state, logged = SimpleNamespace(is_world_process_zero=True), []
    callback.on_train_begin(None, state, None, model=model)
    for batch in vectors(3, width=8):
        compiled(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        logs = {"loss": 2.0}
        callback.on_log(None, state, None, logs=logs)
        logged.append(logs)
    evaluated = {"eval_runtime": 1.0}
    callback.on_log(None, state, None, logs=evaluated)
    callback.on_train_end(None, state, None)
    assert logged[0] == {"loss": 2.0}, "at the first log no step has ended"
    assert [logs["elixir/of_step"] for logs in logged[1:]] == [0, 1]
    assert evaluated == {"eval_runtime": 1.0}
    assert [dict(each.notes) for each in callback.study.summaries] == [{"loss": 2.0}] * 3
    assert "forward" in capsys.readouterr().out


@pytest.mark.slow  # a training: 6 s
def test_the_figures_of_a_trainer_add_up_and_reach_its_loggers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from elixir_compile.tools.integrations.transformers import ElixirCallback

    callback = ElixirCallback(tmp_path / "trace", full=(2,))
    trainer = trained(tmp_path, callback, gradient_accumulation_steps=2)
    study = callback.study
    assert study is not None
    assert [each.step for each in study.summaries] == [0, 1, 2, 3]
    for each in study.summaries:
        assert sum(each.seconds_s.values()) == pytest.approx(each.period_s, abs=1e-9)
        assert each.seconds_s["forward"] > 0
        assert each.seconds_s["backward"] > 0
        assert each.seconds_s["update"] > 0
    assert read_trace(tmp_path / "trace").steps[0] == study.summaries
    # Two forwards and two backwards are one step.
    (full,) = study.full_steps
    assert [str(each.phase) for each in full.intervals if each.phase is not None] == [
        "forward", "backward", "forward", "backward", "update",
    ]  # fmt: skip
    assert sum(span.label == "run fwd.0" for span in full.record.spans) == 2

    (logger,) = [other for other in trainer.callback_handler.callbacks if isinstance(other, Logged)]
    steps = [logs["elixir/of_step"] for logs in logger.logs if "elixir/of_step" in logs]
    assert steps == [0, 1, 2], "at the first log no step has ended"
    assert "forward" in capsys.readouterr().out
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 4


@pytest.mark.slow  # two trainings: 6 s
def test_the_losses_of_a_trainer_are_those_without_observation(tmp_path: Path) -> None:
    from elixir_compile.tools.integrations.transformers import ElixirCallback

    losses = [
        [entry["loss"] for entry in trained(tmp_path, callback).state.log_history if "loss" in entry]
        for callback in (None, ElixirCallback())
    ]
    assert losses[0] == losses[1]
