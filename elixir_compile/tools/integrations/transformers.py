"""A callback that observes what `transformers.Trainer` trains."""

from pathlib import Path
from typing import Any, Self

from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from elixir_compile.tools.observe import Study, observe


class ElixirCallback(TrainerCallback):
    """Observe the training of a `Trainer`, add the figures of each step to its logs, and print the table at the end.

    The trainer calls callbacks in their order, and those of loggers such as W&B come before yours. So that they get the
    figures too, put this one first: `ElixirCallback("run/trace").attach(trainer)`. In the list `callbacks=[...]` of the
    trainer, only its own history has the figures.
    """

    def __init__(self, folder: "str | Path | None" = None, **options: Any) -> None:
        """`folder` and `options` are those of `elixir_compile.observe`."""
        self._folder = folder
        self._options = options
        self.study: Study | None = None
        """The study of the last training; None before it began."""

    def attach(self, trainer: Trainer) -> Self:
        """Become the first callback of `trainer`."""
        trainer.callback_handler.callbacks.insert(0, self)
        return self

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **_: Any,
    ) -> None:
        """Begin to observe the model of the trainer."""
        if self.study is not None:
            self.study.stop()  # an exception ended the training before
        assert model is not None, "the trainer passes its model to callbacks"
        self.study = observe(model, self._folder, **self._options)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Add the figures of the latest step to what is logged."""
        if self.study is not None and logs is not None and "loss" in logs:
            self.study.note(loss=logs["loss"])
            logs.update(self.study.scalars())

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """End the observation, and print its table on the first rank."""
        if self.study is not None:
            self.study.stop()
            if state.is_world_process_zero:
                print(self.study)
