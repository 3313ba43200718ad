"""Functions that compiled code calls: they do not keep the model alive that they serve."""

import weakref
from collections.abc import Callable
from typing import Any

from elixir_compile.base.errors import NotPrepared


def for_compiled_code(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls the bound method `method` without keeping its object alive.

    Compiled code outlives its model, as Dynamo keeps it, so it must hold no reference to the model. The function raises
    NotPrepared once the object is gone.
    """
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        alive = reference()
        if alive is None:
            raise NotPrepared("the model of this graph no longer exists; compile the model again")
        return alive(*args)

    return call
