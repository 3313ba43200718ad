"""Change what torch does while it captures graphs: skip work without use, and ask each thread whether it captures.

The first capture runs code of torch that no capture needs. And torch has one flag for the process that a graph is being
captured, which becomes a flag of each thread.
"""

import functools
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class _Thread(threading.local):
    """The state of one thread."""

    is_outside_captures = False


_thread = _Thread()


@contextmanager
def outside_captures() -> Iterator[None]:
    """Make `torch.compiler.is_compiling()` False on this thread inside, even if another thread captures a graph.

    If it is True, torch's optimizers compute with tensors instead of Python numbers, which rounds differently. The
    function reads `torch.compiler._is_compiling_flag`, a flag of the whole process: `torch.export` sets it, in torch
    2.13 `torch.compile` does too. So the first use of this context replaces the code of the function. The function
    object stays the same, because Dynamo recognises it by identity. A lock instead could deadlock a capture with an
    update that needs Dynamo.

    `torch.compiler._is_compiling_flag`: checked on torch 2.11 and 2.13. Gone: AttributeError at the first step of
    `hybrid(cls)`.
    """
    _let_threads_differ()
    before, _thread.is_outside_captures = _thread.is_outside_captures, True
    try:
        yield
    finally:
        _thread.is_outside_captures = before


@functools.cache
def _let_threads_differ() -> None:
    torch.compiler.__dict__["_elixir_thread"] = _thread  # `_is_compiling` runs with the globals of that module
    torch.compiler.is_compiling.__code__ = _is_compiling.__code__


def _is_compiling() -> bool:
    # The same text as in torch but for the last line: TorchScript reads it too, and compiles only the first branch.
    if torch.jit.is_scripting():  # pyright: ignore[reportPrivateImportUsage]
        return False
    else:  # noqa: RET505
        is_outside = torch.compiler._elixir_thread.is_outside_captures  # pyright: ignore[reportAttributeAccessIssue]
        return torch.compiler._is_compiling_flag and not is_outside


@contextmanager
def no_names_of_lines() -> Iterator[None]:
    """Keep Dynamo from looking up the function of each source line, which it needs only to log its calls.

    The lookup reads source files of the model and of torch token by token: 0.19 CPU seconds of the first capture. With
    `TORCH_LOGS=trace_call` nothing is changed.

    `torch._dynamo.symbolic_convert.get_funcname`, which returns None for a line outside of functions: checked on torch
    2.11 and 2.13. Gone: nothing is changed.
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

    `KernelTemplate._template_from_string`, of whose result Inductor uses only `render`: checked on torch 2.11 and 2.13.
    Gone: nothing is changed.
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


def check_requires_grad() -> None:
    """Make Dynamo notice that a frozen parameter of a module was thawed, which torch 2.11 does not.

    torch 2.11 skips the guards of a module's tensors while its dict of parameters is the same, those on `requires_grad`
    too. Each backend that differentiates, `aot_eager` too, then silently computes no gradient of the thawed parameter.
    The setting holds for the whole process.

    `torch._dynamo.config.skip_tensor_guards_with_matching_dict_tags`: checked on torch 2.11, where it is changed, and
    2.13, which checks `requires_grad` under either value. Gone: nothing happens, and a forward after a thaw runs op by
    op (see `Gate.call`).
    """
    name = "skip_tensor_guards_with_matching_dict_tags"
    if torch.__version__ < "2.13" and hasattr(torch._dynamo.config, name):
        setattr(torch._dynamo.config, name, False)
