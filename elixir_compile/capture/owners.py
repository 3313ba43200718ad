"""From parameters to the models that own them.

The plain path hands the backend a graph whose inputs are parameters, and no module. The garbage collector knows every
module.
"""

import gc
from collections.abc import Sequence

from torch import nn

from elixir_compile import compat


def find_roots(params: Sequence[nn.Parameter]) -> list[nn.Module]:
    """Return the outermost modules that hold any of `params`; a parameter outside every module is in none of them."""
    modules = [
        thing
        for thing in gc.get_objects()
        if issubclass(type(thing), nn.Module) and compat.undo_compile(thing) is thing
    ]
    children = {id(child) for module in modules for child in module.children()}
    wanted = {id(param) for param in params}
    roots = [module for module in modules if id(module) not in children]
    return [root for root in roots if wanted & {id(param) for param in root.parameters()}]
