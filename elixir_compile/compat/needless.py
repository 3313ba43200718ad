"""Work that torch does when it captures for the first time and that no capture needs."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def no_names_of_lines() -> Iterator[None]:
    """Let Dynamo not look up which function each line belongs to, which only the log of its calls prints.

    For that it reads whole files of the model and of torch token by token: 0.19 CPU seconds of the first capture. With
    `TORCH_LOGS=trace_call` nothing is changed. `torch._dynamo.symbolic_convert.get_funcname`, of which None stands for
    a line of no function, checked on torch 2.13; without it nothing is changed.
    """
    from torch._dynamo import symbolic_convert

    usual = getattr(symbolic_convert, "get_funcname", None)
    if usual is None or torch._logging._internal.log_state.is_artifact_enabled("trace_call"):
        yield
        return
    symbolic_convert.get_funcname = lambda filename, lineno: None
    try:
        yield
    finally:
        symbolic_convert.get_funcname = usual


@contextmanager
def templates_when_used() -> Iterator[None]:
    """Let modules of Inductor that are imported inside compile their templates of kernels when one is first used.

    A capture uses none, and compiling all takes 0.15 CPU seconds. `KernelTemplate._template_from_string`, whose result
    is asked for `render` alone, checked on torch 2.13; without it nothing is changed.
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
    """A template of a kernel, compiled from its source when it is first rendered."""

    def __init__(self, compiled: Callable[[str], Any], source: str) -> None:
        self._compiled = compiled
        self._source = source
        self._template: Any = None

    def render(self, *args: Any, **kwargs: Any) -> str:
        if self._template is None:
            self._template = self._compiled(self._source)
        return self._template.render(*args, **kwargs)
