"""Where a node came from: the module's path and the line of the user's code."""

import re

from torch import fx

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_STEP = re.compile(r"\['?([^'\]]+)'?\]|\.?(\w+)")
_DROPPED = {"L", "G", "self", "_modules", "_parameters", "_buffers", "_orig_mod"}


def dotted(path: str) -> str:
    """Return Dynamo's `L['self']._modules['h'][0].attn` as `h.0.attn`."""
    names = [quoted or plain for quoted, plain in _STEP.findall(path)]
    return ".".join(name for name in names if name not in _DROPPED)


def module_path(node: fx.Node) -> str:
    """Return the dotted path of the innermost module that `node` came from, empty where tracing kept none."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path, _ = list(stack.values())[-1]
    return dotted(path)


def source_line(node: fx.Node) -> str:
    """Return `file.py:line` of the innermost frame of the user's code, empty where tracing kept none."""
    trace = node.meta.get("stack_trace") or ""
    end = len(trace)
    while (begin := trace.rfind('File "', 0, end)) >= 0:  # the innermost frame is the last of dozens
        if frame := _FRAME.match(trace, begin):
            return f"{frame[1].rsplit('/', 1)[-1]}:{frame[2]}"
        end = begin
    return ""
