"""The layer of a module: the path up to its first number."""

import functools


@functools.cache
def layer_of(module: str) -> str:
    """Return `transformer.h.3` for `transformer.h.3.attn.c_proj`, and a path without a number as it is."""
    parts = module.split(".")
    for i, part in enumerate(parts):
        if part.isdecimal():
            return ".".join(parts[: i + 1])
    return module


def is_numbered(layer: str) -> bool:
    """Return whether `layer` is one of several alike."""
    return layer.rpartition(".")[2].isdecimal()
