"""Lifetimes of compiled graphs: compiled code outlives its model, so it holds no reference to the model.

```text
  modules --> executor --> compilations --> programs, plans
     ^            |             :
     +-- parameters, slabs      : weak
                           compiled code, which Dynamo may keep until `torch._dynamo.reset()`
  autograd --> ticket --> compilation       an outstanding forward keeps the programs of its backward
```
"""

import weakref
from collections.abc import Callable
from typing import Any

from elixir_compile.errors import NotPrepared


def for_compiled_code(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls the bound method `method` without keeping its object alive.

    The function raises NotPrepared once the object is gone.
    """
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        alive = reference()
        if alive is None:
            raise NotPrepared("the model of this graph no longer exists; compile the model again")
        return alive(*args)

    return call
