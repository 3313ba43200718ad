"""Read the module, the source line and the fake tensors of an FX node from its meta."""

import functools
import re
from collections.abc import Mapping

import torch
from torch import fx

from elixir_compile import compat

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_STEP = re.compile(r"\['?([^'\]]+)'?\]|\.?(\w+)")
_DROPPED = {"L", "G", "self", "_modules", "_parameters", "_buffers", "_orig_mod"}


@functools.lru_cache(maxsize=4096)
def dotted(path: str) -> str:
    """Return Dynamo's `L['self']._modules['h'][0].attn` as `h.0.attn`."""
    names = [quoted or plain for quoted, plain in _STEP.findall(path)]
    return ".".join(name for name in names if name not in _DROPPED)


def module_path(node: fx.Node) -> str:
    """Return the dotted path of the innermost module whose forward made `node`, empty if tracing kept no module."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path, _ = list(stack.values())[-1]
    return dotted(path)


def source_line(node: fx.Node) -> str:
    """Return `file.py:line` of the innermost frame of the user's code, empty if tracing kept no stack."""
    trace = node.meta.get("stack_trace") or ""
    end = len(trace)
    while (begin := trace.rfind('File "', 0, end)) >= 0:  # the innermost frame is the last of dozens
        if frame := _FRAME.match(trace, begin):
            return f"{frame[1].rsplit('/', 1)[-1]}:{frame[2]}"
        end = begin
    return ""


def example_of(node: fx.Node) -> object:
    """Return Dynamo's example value of `node`, with fake tensors for tensors; None if it has none."""
    return node.meta.get("example_value")


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    """Return the dense tensors in the value of `node`."""
    leaves = leaves_of(example_of(node))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided]


def storages_of(node: fx.Node) -> set[int]:
    """Return the keys of the storages of the dense tensors in the value of `node`."""
    return {compat.storage_key(leaf) for leaf in tensors_of(node)}


def leaves_of(value: object) -> list[object]:
    """Return the leaves of nested lists, tuples and dictionaries `value`, or `[value]` if it is itself a leaf."""
    if isinstance(value, Mapping):
        value = list(value.values())
    return [leaf for item in value for leaf in leaves_of(item)] if isinstance(value, (list, tuple)) else [value]
