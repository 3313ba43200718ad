"""Call into Dynamo: its graphs, its guards, its settings and the wrappers around compiled modules, and make captures
skip work that they do not need.
"""

import ast
import copy
import functools
import importlib.util
import inspect
import logging
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.metadata import EntryPoint
from types import SimpleNamespace
from typing import Any, NoReturn, TypeGuard, cast

import torch
from torch import fx

# ----------------------------------------------------------------------------------------------------------------------
# Change what torch does while it captures graphs: skip work without use, and ask each thread whether it captures.
#
# The first capture runs code of torch that no capture needs. And torch has one flag for the process that a graph is
# being captured, which becomes a flag of each thread.


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


def nothing_compiles() -> AbstractContextManager[object]:
    """Return a context in which functions that `torch.compile` returned run as they were written, on this thread.

    A compiled function that is called under a dispatch mode is never compiled again, wherever it is called later.
    Dynamo calls the function itself if a capture on this thread is inside of a kernel.

    `torch._guards.tracing`, `TracingContext.fake_mode.in_kernel_invocation`: checked on torch 2.11 and 2.13. Gone:
    ImportError when the step of an optimizer class is run at real shapes; without the attribute, compiled parts of the
    class's step stay eager.
    """
    from torch._guards import TracingContext, tracing

    inside_kernel: Any = SimpleNamespace(in_kernel_invocation=True, shape_env=None)
    return tracing(TracingContext(inside_kernel))


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


# ----------------------------------------------------------------------------------------------------------------------
# Dynamo: its graphs, its guards, its settings, and the wrappers around compiled modules.


class _PastLogging(set[Callable[..., Any]]):
    """The functions whose calls Dynamo drops, with `logging.Logger.warning_once` as soon as the method exists.

    transformers adds the method to the class on import, which may be after the import of the backend.
    """

    def __init__(self, functions: Collection[Callable[..., Any]]) -> None:
        super().__init__(functions)
        self._added: set[Callable[..., Any]] = set()

    def _add_warning_once(self) -> None:
        once = getattr(logging.Logger, "warning_once", None)
        if once is not None:
            self.add(once)
            self._added.add(once)

    def __deepcopy__(self, memo: object) -> set[Callable[..., Any]]:
        # After each compilation, Dynamo writes a deep copy of its settings as JSON, which has no form for functions.
        # torch 2.13 leaves this setting out; torch 2.11 keeps it and prints a traceback.
        return set(super().__iter__()) - self._added

    def __contains__(self, function: object) -> bool:
        self._add_warning_once()
        return super().__contains__(function)

    def __iter__(self) -> Iterator[Callable[..., Any]]:
        self._add_warning_once()
        return super().__iter__()


def trace_past_logging() -> None:
    """Make Dynamo drop calls of `logger.warning_once(...)`, which would break the graphs of Hugging Face's models.

    It works too if transformers is imported later. Compiled code does not log the message.

    `torch._dynamo.config.ignore_logging_functions`, which Dynamo reads by `in` and by a loop: torch 2.11 to 2.13. Gone:
    AttributeError at the first `torch.compile`.
    """
    config = torch._dynamo.config
    if not isinstance(config.ignore_logging_functions, _PastLogging):
        config.ignore_logging_functions = _PastLogging(config.ignore_logging_functions)


def trace_again(reason: str) -> NoReturn:
    """Make Dynamo drop the graph that it is compiling, and trace the frame again on the modules as they are now.

    Called by the backend.

    `torch._dynamo.exc.TensorifyScalarRestartAnalysis`, `.UnspecializeRestartAnalysis`: checked on torch 2.11 and 2.13.
    Gone: AttributeError when the parameters of a compiled model are replaced.
    """
    from torch._dynamo import exc

    # Of all restarts, Dynamo lets only the first class pass out of a backend. For the second class it forgets the
    # values that the last trace met, which differ now.
    class TraceAgain(exc.TensorifyScalarRestartAnalysis, exc.UnspecializeRestartAnalysis):
        pass

    raise TraceAgain(restart_reason=reason)


@contextmanager
def shapes_apart() -> Iterator[None]:
    """Make Dynamo forget, inside, the shapes from outside, and the reverse.

    Dynamo makes a size symbolic if it changed between two calls of the same forward, and the shapes of a plan without
    training would count as calls. `torch._dynamo.reset()` would drop the user's compiled code too.

    `torch._dynamo.pgo._CODE_STATE`: torch 2.11 to 2.13. Gone: AttributeError at the first plan without training.
    """
    from torch._dynamo import pgo

    remembered = pgo._CODE_STATE
    pgo._CODE_STATE = defaultdict(pgo.CodeState)
    try:
        yield
    finally:
        pgo._CODE_STATE = remembered


def no_collection_at_end() -> AbstractContextManager[None]:
    """Keep Dynamo from running the garbage collector after a trace: 0.2 s of a capture of 3 s.

    The collection would free little, as the plan keeps the captured graph.

    `torch._dynamo.config.run_gc_after_compile`: checked on torch 2.11 and 2.13. Gone: nothing is changed.
    """
    config = torch._dynamo.config
    return config.patch(run_gc_after_compile=False) if hasattr(config, "run_gc_after_compile") else nullcontext()


def undo_compile(model: torch.nn.Module) -> torch.nn.Module:
    """Return the module that `torch.compile` wrapped, or `model` itself.

    `OptimizedModule._orig_mod`: torch 2.11 to 2.13. Gone: ImportError or AttributeError for a compiled module.
    """
    from torch._dynamo import OptimizedModule

    return model._orig_mod if isinstance(model, OptimizedModule) else model


def name_backend(backend: Callable[..., Any]) -> None:
    """Make torch find `backend`, a function of a module, by its name, if no installed package has registered the name.

    A source tree on the path of Python has no entry points. Dynamo collects those of packages at the first name that it
    does not know; equal names are then replaced by theirs.

    `torch._dynamo.backends.registry._BACKENDS`: torch 2.11 to 2.13. Gone: packages must be installed, as before.
    """
    from torch._dynamo.backends import registry

    known = getattr(registry, "_BACKENDS", None)
    if known is not None:
        name = backend.__name__
        known.setdefault(name, EntryPoint(name, f"{backend.__module__}:{name}", "torch_dynamo_backends"))


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """Add `text()` as the artifact `name` to torch's structured trace, which tlparse reads, if the trace is on.

    `torch._logging._internal.trace_structured`: torch 2.11 to 2.13. Gone: ImportError when a step is planned.
    """
    from torch._logging._internal import trace_structured

    trace_structured("artifact", lambda: {"name": name, "encoding": "string"}, payload_fn=text, expect_trace_id=False)


def uncompiled_name(name: str) -> str:
    """Return the parameter name `name` without the parts added by compiled modules.

    `OptimizedModule._orig_mod`, the part: torch 2.11 to 2.13. Gone: names keep the part under its new name.
    """
    return name.replace("_orig_mod.", "")


def graph_break_of(gm: fx.GraphModule) -> tuple[str, int, str] | None:
    """Return file, line and reason of the graph break that ended Dynamo's graph `gm`, None if no break ended it.

    `gm.compile_subgraph_reason`: torch 2.11 to 2.13. Gone: graph breaks are not logged.
    """
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break or not reason.user_stack:
        return None
    frame = reason.user_stack[-1]
    return frame.filename, frame.lineno or 0, reason.reason.strip().partition("\n")[0]


def never_compile_alone(fn: Callable) -> None:
    """Keep Dynamo from compiling `fn` as a frame of its own. If a compiled frame calls `fn`, Dynamo traces it as usual.

    `torch._dynamo.eval_frame.skip_code`: torch 2.11 to 2.13. Gone: ImportError in `prepare`.
    """
    from torch._dynamo.eval_frame import skip_code

    skip_code(fn.__code__)


def guard_by_identity(inputs: Mapping[fx.Node, torch.Tensor]) -> None:
    """Make Dynamo guard the tensors of `inputs` by identity, on whatever device they are.

    `inputs` maps placeholders of Dynamo's graph to the tensors passed for them. Called while Dynamo waits for
    the compiled form of that graph. The guard `TENSOR_MATCH` of such a tensor is dropped, because it fails once the
    tensor is on another device. If gradients are on and a tensor requires none, its `requires_grad` is guarded too,
    because the graph computes no gradient of it. Outside of Dynamo, or for a placeholder without a source, no guard
    changes.

    `TracingContext.guards_context.dynamo_guards`, a set that Dynamo turns into checks after its backend returns;
    `node._dynamo_source`, `GuardBuilder`, `AttrSource`: torch 2.11 to 2.13. Gone: ImportError or AttributeError at the
    first capture; without `_dynamo_source` Dynamo's own guards stay.
    """
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.source import AttrSource
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    found = [(getattr(node, "_dynamo_source", None), tensor) for node, tensor in inputs.items()]
    by_source = {source: tensor for source, tensor in found if source is not None}
    if context is None or not by_source:
        return
    usual = context.guards_context.dynamo_guards
    guards = [guard for guard in usual if guard.originating_source not in by_source]
    for source, tensor in by_source.items():
        guards.append(source.make_guard(GuardBuilder.ID_MATCH))
        if torch.is_grad_enabled() and not tensor.requires_grad:
            guards.append(AttrSource(source, "requires_grad").make_guard(GuardBuilder.CONSTANT_MATCH))
    context.guards_context.dynamo_guards = type(usual)(type(usual.inner)(guards))


def checks_class_of(is_meant: Callable[[object], bool]) -> bool:
    """Return whether Dynamo guards its graph by the class of an object for which `is_meant` returns True.

    Called while Dynamo waits for the compiled form of the graph. A guard whose object cannot be found counts as one of
    them.

    The names in `TracingContext.guards_context.dynamo_guards`, which are Python expressions over `L` and `G`: torch
    2.11 to 2.13. Gone: a guard by a class that is changed meanwhile fails with a KeyError at the first call.
    """
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    if context is None:
        return False
    names = {guard.name for guard in context.guards_context.dynamo_guards}
    classified = {text for name in names if "type(" in name for text in _arguments_of_type(name)}
    scope = _scope_of_frame() if classified else {}
    return any(_is_meant(text, scope, is_meant) for text in classified)


def _arguments_of_type(name: str) -> Iterator[str]:
    """Yield each `x` of the calls `type(x)` in the guard called `name`; the name itself if it is no expression."""
    try:
        tree = ast.parse(name, mode="eval")
    except (SyntaxError, ValueError, RecursionError):
        yield name
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "type":
            yield ast.unparse(node.args[0] if node.args else node)


def _is_meant(text: str, scope: dict[str, Any], is_meant: Callable[[object], bool]) -> bool:
    try:
        found = eval(text, scope)
    except Exception:  # the text uses a function of Dynamo, or passes through an object that changed
        return True
    return is_meant(found)


def _scope_of_frame() -> dict[str, Any]:
    """Return the locals `L` and the globals `G` of the frame that Dynamo compiles, empty if it compiles none.

    `OutputGraph.local_scope`, `.global_scope` of the object whose method calls the backend: read on torch 2.13. Gone:
    AttributeError at the first capture of a model whose forward uses a property, a default or a constant of its class.
    """
    from torch._dynamo.output_graph import OutputGraph

    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, OutputGraph):
            return {"L": caller.local_scope, "G": caller.global_scope}
        frame = frame.f_back
    return {}


def belongs_to_module(node: fx.Node) -> bool:
    """Return whether the input `node` of Dynamo's graph is a tensor of an `nn.Module`, such as a buffer.

    `node._dynamo_source`, `Source.guard_source`: torch 2.11 to 2.13. Gone: False.
    """
    found = getattr(getattr(node, "_dynamo_source", None), "guard_source", None)
    return "MODULE" in getattr(found, "name", "")


def before_each_capture(call: Callable[[], None]) -> None:
    """Call `call` each time before Dynamo traces a frame, until `torch._dynamo.reset()`.

    A second registration of the same function changes nothing.

    `torch._dynamo.callback.callback_handler.start_callbacks`: torch 2.11 to 2.13. Gone: ImportError at the first
    capture.
    """
    from torch._dynamo.callback import callback_handler

    callbacks = callback_handler.start_callbacks
    if not any(getattr(callback, "call", None) is call for callback in callbacks):
        callbacks.append(_Callback(call))


class _Callback:
    """A callback of Dynamo without use for the facts about the compilation."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.call = call

    def __call__(self, facts: object) -> None:
        self.call()


def sets_gradients(node: fx.Node, is_on: bool) -> bool:
    """Return whether gradients are on after `node` of Dynamo's graph, if before it they are on as `is_on` says.

    `torch._C._set_grad_enabled`: torch 2.11 to 2.13. Gone: AttributeError at the first capture.
    """
    return bool(node.args[0]) if node.target is torch._C._set_grad_enabled else is_on


def is_operator(target: object) -> bool:
    """Return whether `target` is an operator with a schema, or the packet of all its overloads.

    `torch._ops.OpOverload`, `OpOverloadPacket`: torch 2.11 to 2.13. Gone: AttributeError at the first capture.
    """
    return isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))


def is_op_overload(target: object) -> "TypeGuard[torch._ops.OpOverload]":
    """Return whether `target` is one overload of an operator, such as `aten.add.Tensor`.

    `torch._ops.OpOverload`: torch 2.11 to 2.13. Gone: AttributeError at the first capture.
    """
    return isinstance(target, torch._ops.OpOverload)


def is_higher_order(target: object) -> bool:
    """Return whether `target` is an operator that takes functions, as `checkpoint` and the user's Triton kernels are.

    `torch._ops.HigherOrderOperator`: torch 2.11 to 2.13. Gone: AttributeError at the first capture.
    """
    return isinstance(target, torch._ops.HigherOrderOperator)


def fake_mode_of(values: Iterable[object]) -> Any:
    """Return the fake tensor mode of the first fake tensor among `values`.

    `torch._guards.detect_fake_mode`: torch 2.11 to 2.13. Gone: ImportError at the first capture.
    """
    from torch._guards import detect_fake_mode

    return detect_fake_mode(list(values))


def own_fake_mode(value: torch.Tensor) -> Any:
    """Return the fake tensor mode of the fake tensor `value`. The mode under which a backend runs is another.

    `FakeTensor.fake_mode`: torch 2.11 to 2.13. Gone: AttributeError at the first capture.
    """
    return cast(Any, value).fake_mode  # only fake tensors have it


def graph_module(root: torch.nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """Return `graph` as a module over the attributes of `root` that writes its Python code when it is run or printed.

    The halves of a step are rewritten several times and never run, so their code is never needed.

    `torch.fx._lazy_graph_module._LazyGraphModule`, as Dynamo and Inductor use it: torch 2.11 to 2.13. Gone: ImportError
    at the first capture.
    """
    from torch.fx._lazy_graph_module import _LazyGraphModule

    return _LazyGraphModule(root, graph)


def copy_of(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of Dynamo's graph `gm` that reads the same constants and can be edited and compiled.

    `node._dynamo_source`, which fx does not copy: torch 2.11 to 2.13. Renamed: AssertionError in AOTAutograd at the
    first capture. Gone: no effect.
    """
    copied = graph_module(gm, copy.deepcopy(gm.graph))
    copied.meta = dict(gm.meta)
    vars(copied)["compile_subgraph_reason"] = getattr(gm, "compile_subgraph_reason", None)
    for node, twin in zip(gm.graph.nodes, copied.graph.nodes, strict=True):
        if hasattr(node, "_dynamo_source"):
            twin._dynamo_source = node._dynamo_source
    return copied


def mark_dynamic(tensor: torch.Tensor, dim: int) -> None:
    """Make Dynamo treat the size of `tensor` in dimension `dim` as dynamic.

    `torch._dynamo.mark_dynamic`, documented under this name only: torch 2.11 to 2.13. Gone: AttributeError when a plan
    for dynamic batches is made without training.
    """
    torch._dynamo.mark_dynamic(tensor, dim)


def new_input(graph: fx.Graph, name: str, after: fx.Node) -> fx.Node:
    """Add an input to Dynamo's `graph` behind the input `after`, and return it. It has no source in the user's code.

    `node._dynamo_source`: torch 2.11 to 2.13. Renamed: AssertionError in AOTAutograd at the first capture. Gone: no
    effect.
    """
    with graph.inserting_after(after):
        made = graph.placeholder(name)
    made._dynamo_source = None
    return made


def trace_each_region() -> None:
    """Make Dynamo trace each function under `nested_compile_region` anew at each call, in the capture that runs.

    Otherwise it lets a later call run the graph of an earlier one if their inputs look alike, or if the user's
    `reuse_hash_fn` says so, and raises RuntimeError after eight calls that do not. Outside of a capture, nothing
    changes.

    `TracingContext.hop_dispatch_set_cache.hop_cache_map`, whose graphs Dynamo looks for with `get_cache`, which may
    return None: checked on torch 2.13. Gone: a prepared model with more than eight such layers raises that error.
    """
    from torch._guards import TracingContext

    caches = getattr(TracingContext.try_get(), "hop_dispatch_set_cache", None)
    getattr(caches, "hop_cache_map", {}).pop(torch.ops.higher_order.invoke_subgraph, None)


def backend_of(module: torch.nn.Module) -> Callable[..., Any] | None:
    """Return the backend by which `module` is compiled: if `torch.compile` made it around another module, or it is
    compiled in place, by `module.compile`. None if it is not compiled.

    `torch._dynamo.eval_frame.innermost_backend`, `OptimizedModule.dynamo_ctx`, `_TorchCompileWrapper.compiler_fn`,
    `nn.Module._compiled_call_impl`, whose closure has a `_TorchDynamoContext`: checked on torch 2.11 and 2.13. Gone:
    ImportError or AttributeError after the first step of an optimizer of torch.
    """
    from torch._dynamo import OptimizedModule
    from torch._dynamo.eval_frame import _TorchDynamoContext, innermost_backend

    if issubclass(type(module), OptimizedModule):
        contexts = [cast(Any, module).dynamo_ctx]
    else:
        cells = getattr(module.__dict__.get("_compiled_call_impl"), "__closure__", None) or ()
        contexts = [cell.cell_contents for cell in cells if isinstance(cell.cell_contents, _TorchDynamoContext)]
    callbacks: list[Any] = [context.callback for context in contexts if callable(context.callback)]
    return getattr(innermost_backend(callbacks[0]), "compiler_fn", None) if callbacks else None
