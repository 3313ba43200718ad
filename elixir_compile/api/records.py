"""`elixir_compile.compilations(model)`: the compilations of a model."""

import warnings

from torch import nn

from elixir_compile import compat
from elixir_compile.errors import NoGraphCaptured
from elixir_compile.managed.compilation import Compilation
from elixir_compile.managed.model import managed_model


def compilations(model: nn.Module, *, inference: bool = False) -> list[Compilation]:
    """Return a compilation for each captured training graph of `model`, in order of capture.

    `model` is the module or its compiled form. With `inference`, graphs without a backward are included. Warns
    NoGraphCaptured if nothing was captured: the model never ran compiled, or Dynamo found no graph in it.

    Example:
        compilation = elixir.compilations(compiled)[-1]
        print(compilation.plan.prediction.device_peak_bytes, "of", compilation.plan.budget_bytes)
    """
    managed = managed_model(compat.undo_compile(model))
    captured = [] if managed is None else [made for made in managed.compilations if not made.is_superseded]
    if not captured:
        name = type(compat.undo_compile(model)).__name__
        warnings.warn(
            NoGraphCaptured(
                f"no graph of {name} was captured: call `torch.compile(model, backend='elixir')` and run a step first."
            ),
            stacklevel=2,
        )
    return [made for made in captured if inference or not made.is_inference]
