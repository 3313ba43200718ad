"""A callback for the `Trainer` of Lightning: it observes the training, and logs the figures of each step."""

import importlib
from pathlib import Path
from typing import Any

from elixir_compile.tools.observe import Study, observe

_lightning: Any = importlib.import_module("lightning.pytorch")


class ElixirCallback(_lightning.Callback):
    """Observe the training of a `lightning.Trainer`, log the figures of each step, and print the table at the end."""

    def __init__(self, folder: "str | Path | None" = None, **options: Any) -> None:
        """`folder` and `options` are those of `elixir_compile.observe`."""
        super().__init__()
        self._folder = folder
        self._options = options
        self.study: Study | None = None
        """The study of the last training; None before it began."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to observe the module, whose model may be compiled already or later."""
        self._stop()
        self.study = observe(pl_module, self._folder, **self._options)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Log the figures of the latest step."""
        if self.study is not None and (scalars := self.study.scalars()):
            pl_module.log_dict(scalars)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """End the observation, and print its table on the first rank."""
        self._stop()
        if trainer.is_global_zero:
            print(self.study)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End the observation."""
        self._stop()

    def _stop(self) -> None:
        if self.study is not None:
            self.study.stop()
