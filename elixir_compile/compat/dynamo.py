"""What Dynamo captures: graphs, their breaks, the wrappers around compiled modules."""

import copy
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import fx
from torch._dynamo import OptimizedModule, exc, pgo
from torch._dynamo.eval_frame import skip_code
from torch._guards import detect_fake_mode


def trace_past_logging() -> None:
    """Let Dynamo trace past `logger.warning_once(...)`, which would break the graphs of Hugging Face's models.

    In compiled code the message is dropped. `torch._dynamo.config.ignore_logging_functions`, torch 2.11 to 2.13. Gone:
    AttributeError at the first `torch.compile`.
    """
    once = getattr(logging.Logger, "warning_once", None)  # transformers adds it to the class when it is imported
    if once is not None:
        torch._dynamo.config.ignore_logging_functions.add(once)


class _Again(exc.TensorifyScalarRestartAnalysis, exc.UnspecializeRestartAnalysis):
    """The first class is the restart that Dynamo passes on from backends; with the second it forgets what the trace
    before met, which is something else now."""


def trace_again(reason: str) -> NoReturn:
    """From within a backend: let Dynamo drop the graph at hand and trace the frame once more, as modules are now.

    `torch._dynamo.exc`, torch 2.11 to 2.13. Gone: AttributeError at the first import.
    """
    raise _Again(restart_reason=reason)


@contextmanager
def shapes_apart() -> Iterator[None]:
    """Keep the shapes that Dynamo sees inside from those it remembers of training: a size that changed between two
    calls of one forward becomes symbolic in the second.

    `torch._dynamo.pgo._CODE_STATE`, torch 2.11 to 2.13; `torch._dynamo.reset()` would forget the user's compiled code
    too. Gone: AttributeError at the first plan without training.
    """
    remembered = pgo._CODE_STATE
    pgo._CODE_STATE = defaultdict(pgo.CodeState)
    try:
        yield
    finally:
        pgo._CODE_STATE = remembered


def undo_compile(model: torch.nn.Module) -> torch.nn.Module:
    """Return the module that `torch.compile` wrapped, or `model` itself.

    `OptimizedModule._orig_mod`, torch 2.11 to 2.13. Gone: AttributeError for a compiled module.
    """
    return model._orig_mod if isinstance(model, OptimizedModule) else model


def uncompiled_name(name: str) -> str:
    """Return the name that a parameter has where no module around it was compiled on its own.

    `OptimizedModule._orig_mod` is a part of such names, torch 2.11 to 2.13. Gone: names keep what takes its place.
    """
    return name.replace("_orig_mod.", "")


def graph_break_of(gm: fx.GraphModule) -> tuple[str, int, str] | None:
    """Return file, line and reason of the graph break that ended `gm`, a graph of Dynamo; None when none did.

    `gm.compile_subgraph_reason`, torch 2.11 to 2.13. Gone: graph breaks are not logged.
    """
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break or not reason.user_stack:
        return None
    frame = reason.user_stack[-1]
    return frame.filename, frame.lineno or 0, reason.reason.strip().partition("\n")[0]


def never_compile_alone(fn: Callable) -> None:
    """Keep Dynamo from compiling `fn` as a frame of its own; in a frame that is compiled it is traced as usual.

    `torch._dynamo.eval_frame.skip_code`, torch 2.11 to 2.13. Gone: ImportError at the first import.
    """
    skip_code(fn.__code__)


def fake_mode_of(values: Iterable[object]) -> Any:
    """Return the fake tensor mode of the first fake tensor among `values`.

    `torch._guards.detect_fake_mode`, torch 2.11 to 2.13. Gone: ImportError at the first import.
    """
    return detect_fake_mode(list(values))


def copy_of(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of `gm`, a graph of Dynamo, that reads the same constants and can be edited and compiled.

    `node._dynamo_source`, which a copy of a graph lacks, torch 2.11 to 2.13. Gone: AOTAutograd does not ask for it.
    """
    copied = fx.GraphModule(gm, copy.deepcopy(gm.graph))
    copied.meta, copied.compile_subgraph_reason = dict(gm.meta), getattr(gm, "compile_subgraph_reason", None)
    for node, twin in zip(gm.graph.nodes, copied.graph.nodes, strict=True):
        if hasattr(node, "_dynamo_source"):
            twin._dynamo_source = node._dynamo_source
    return copied
