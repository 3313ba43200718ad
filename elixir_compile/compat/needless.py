"""Skip work that torch does at the first capture although no capture needs it."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def no_names_of_lines() -> Iterator[None]:
    """Keep Dynamo from looking up the function of each source line, which it needs only to log its calls.

    The lookup reads source files of the model and of torch token by token: 0.19 CPU seconds of the first capture. With
    `TORCH_LOGS=trace_call` nothing is changed.

    `torch._dynamo.symbolic_convert.get_funcname`, which returns None for a line outside of functions: checked on torch
    2.13. Gone: nothing is changed.
    """
    from torch._dynamo import symbolic_convert
    from torch._logging import _internal

    usual = getattr(symbolic_convert, "get_funcname", None)
    if usual is None or _internal.log_state.is_artifact_enabled("trace_call"):
        yield
        return
    symbolic_convert.__dict__["get_funcname"] = lambda filename, lineno: None
    try:
        yield
    finally:
        symbolic_convert.__dict__["get_funcname"] = usual


@contextmanager
def templates_when_used() -> Iterator[None]:
    """Make modules of Inductor, if imported inside, compile each kernel template at its first use.

    A capture uses no template, and compiling all of them takes 0.15 CPU seconds.

    `KernelTemplate._template_from_string`, of whose result Inductor uses only `render`: checked on torch 2.13. Gone:
    nothing is changed.
    """
    if "torch._inductor.compile_fx" in sys.modules or importlib.util.find_spec("jinja2") is None:
        yield
        return
    from torch._inductor.codegen.common import KernelTemplate

    usual = getattr(KernelTemplate, "_template_from_string", None)
    if usual is None:
        yield
        return
    KernelTemplate._template_from_string = staticmethod(lambda source: _Template(usual, source))
    try:
        yield
    finally:
        KernelTemplate._template_from_string = staticmethod(usual)


class _Template:
    """A kernel template, compiled from its source at its first rendering."""

    def __init__(self, compiled: Callable[[str], Any], source: str) -> None:
        self._compiled = compiled
        self._source = source
        self._template: Any = None

    def render(self, *args: Any, **kwargs: Any) -> str:
        if self._template is None:
            self._template = self._compiled(self._source)
        return self._template.render(*args, **kwargs)
