"""What was compiled for a model."""

import warnings

from torch import nn

from elixir_compile import compat
from elixir_compile.capture.modules import executor_of
from elixir_compile.errors import NoGraphCaptured
from elixir_compile.managed.compilation import Compilation


def compilations(model: nn.Module, *, inference: bool = False) -> list[Compilation]:
    """Return one record per captured training graph of `model` (the module or its compiled form), in order of capture.

    With `inference` the graphs without a backward are listed as well. Warns NoGraphCaptured when nothing was
    captured: the model never ran compiled, or Dynamo found no graph in it.
    """
    executor = executor_of(compat.undo_compile(model))
    captured = [] if executor is None else [record for record in executor.compilations if not record.is_superseded]
    if not captured:
        name = type(compat.undo_compile(model)).__name__
        warnings.warn(
            NoGraphCaptured(
                f"no graph of {name} was captured: call `torch.compile(model, backend='elixir')` and run a step first."
            ),
            stacklevel=2,
        )
    return [record for record in captured if inference or not record.is_inference]
