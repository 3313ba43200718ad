"""What Dynamo captures: graphs, their breaks, the wrappers around compiled modules."""

import copy
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn

import torch
from torch import fx
from torch._dynamo import OptimizedModule, exc, pgo
from torch._dynamo.eval_frame import skip_code
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.source import AttrSource
from torch._guards import TracingContext, detect_fake_mode
from torch.fx._lazy_graph_module import _LazyGraphModule


class _PastLogging(set[Callable[..., Any]]):
    """The functions that Dynamo traces past, with `logging.Logger.warning_once` from when somebody adds that method.

    transformers adds it to the class when it is imported, which may be after the backend was.
    """

    def _look(self) -> None:
        once = getattr(logging.Logger, "warning_once", None)
        if once is not None:
            self.add(once)

    def __contains__(self, function: object) -> bool:
        self._look()
        return super().__contains__(function)

    def __iter__(self) -> Iterator[Callable[..., Any]]:
        self._look()
        return super().__iter__()


def trace_past_logging() -> None:
    """Let Dynamo trace past `logger.warning_once(...)`, which would break the graphs of Hugging Face's models, also
    where transformers is imported later.

    In compiled code the message is dropped. `torch._dynamo.config.ignore_logging_functions`, which Dynamo asks by `in`
    and by a loop, torch 2.11 to 2.13. Gone: AttributeError at the first `torch.compile`.
    """
    config = torch._dynamo.config
    if not isinstance(config.ignore_logging_functions, _PastLogging):
        config.ignore_logging_functions = _PastLogging(config.ignore_logging_functions)


class _Again(exc.TensorifyScalarRestartAnalysis, exc.UnspecializeRestartAnalysis):
    """The first class is the restart that Dynamo passes on from backends; with the second it forgets what the trace
    before met, which is something else now."""


def trace_again(reason: str) -> NoReturn:
    """From within a backend: let Dynamo drop the graph at hand and trace the frame once more, as modules are now.

    `torch._dynamo.exc`, checked on torch 2.13. Gone: AttributeError at the first import.
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


def no_collection_at_end() -> AbstractContextManager[None]:
    """Let Dynamo not run the garbage collector when it has traced a frame: 0.2 s of a capture of 3 s, and a plan holds
    what is captured anyway.

    `torch._dynamo.config.run_gc_after_compile`, checked on torch 2.13; without it nothing is changed.
    """
    config = torch._dynamo.config
    return config.patch(run_gc_after_compile=False) if hasattr(config, "run_gc_after_compile") else nullcontext()


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


def guard_by_identity(inputs: Mapping[fx.Node, torch.Tensor]) -> None:
    """Let Dynamo check tensors that its graph takes by identity, whatever device they are on.

    `inputs` maps placeholders of a graph of Dynamo to the tensors in their place. To be called while Dynamo waits for
    the compiled form of that graph. `TENSOR_MATCH` of such a tensor goes, because it fails once the tensor is on
    another device. For a tensor that requires no gradient `requires_grad` is checked, because the graph computes no
    gradient of it; where gradients are off no graph does, and nothing is checked.

    `TracingContext.guards_context.dynamo_guards`, a set that Dynamo turns into checks when its backend has returned;
    `node._dynamo_source`, `GuardBuilder`, `AttrSource`: torch 2.11 to 2.13. Gone: ImportError at the first import, or
    AttributeError at the first capture. Outside of Dynamo, or without a source, nothing is checked.
    """
    context = TracingContext.try_get()
    by_source = {getattr(node, "_dynamo_source", None): tensor for node, tensor in inputs.items()}
    by_source.pop(None, None)
    if context is None or not by_source:
        return
    usual = context.guards_context.dynamo_guards
    kept = [guard for guard in usual if guard.originating_source not in by_source]
    for source, tensor in by_source.items():
        kept.append(source.make_guard(GuardBuilder.ID_MATCH))
        if torch.is_grad_enabled() and not tensor.requires_grad:
            kept.append(AttrSource(source, "requires_grad").make_guard(GuardBuilder.CONSTANT_MATCH))
    context.guards_context.dynamo_guards = type(usual)(type(usual.inner)(kept))


def checks_class_of(inputs: Iterable[fx.Node]) -> bool:
    """While Dynamo waits for the compiled form of its graph: whether it is going to check attributes of the classes of
    modules whose parameters are `inputs`, placeholders of the graph.

    The names of `TracingContext.guards_context.dynamo_guards`, `node._dynamo_source`, checked on torch 2.13; older
    versions have methods in place of some properties. Gone: such a check fails with a KeyError at the first call.
    """
    context = TracingContext.try_get()
    if context is None:
        return False
    names = [_name_of(node._dynamo_source) for node in inputs if getattr(node, "_dynamo_source", None) is not None]
    modules = {name.partition("._parameters[")[0] for name in names}
    return any(_names_class_of(_name_of(guard), modules) for guard in context.guards_context.dynamo_guards)


def _names_class_of(name: str, modules: Collection[str]) -> bool:
    """Return whether `name`, of a guard, says `type(module).` of one of `modules`; hundreds of modules have thousands
    of guards, so the guard is not compared with each module."""
    _, *behind = name.split("type(")
    ends = ((rest, at) for rest in behind for at in range(len(rest)) if rest.startswith(").", at))
    return any(rest[:at] in modules for rest, at in ends)


def _name_of(named: Any) -> str:
    return named.name() if callable(named.name) else named.name


def before_each_capture(call: Callable[[], None]) -> None:
    """Call `call` each time before Dynamo begins to trace a frame, until `torch._dynamo.reset()`; once, if named twice.

    `torch._dynamo.callback_handler.start_callbacks`, torch 2.11 to 2.13. Gone: AttributeError at the first capture.
    """
    callbacks = torch._dynamo.callback_handler.start_callbacks
    if not any(getattr(callback, "call", None) is call for callback in callbacks):
        callbacks.append(_Callback(call))


class _Callback:
    """What Dynamo calls, with facts about the compilation that nobody here needs."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.call = call

    def __call__(self, facts: object) -> None:
        self.call()


def sets_gradients(node: fx.Node, is_on: bool) -> bool:
    """Return whether gradients are on behind `node` of a graph of Dynamo, if they are before it as `is_on` says.

    `torch._C._set_grad_enabled`, torch 2.11 to 2.13. Gone: AttributeError at the first capture.
    """
    return bool(node.args[0]) if node.target is torch._C._set_grad_enabled else is_on


def is_operator(target: object) -> bool:
    """Whether `target` is an operator that has a schema, or all overloads of one.

    `torch._ops.OpOverload`, `OpOverloadPacket`, torch 2.11 to 2.13. Gone: AttributeError at the first capture.
    """
    return isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))


def is_higher_order(target: object) -> bool:
    """Whether `target` is an operator of torch that takes functions, or a kernel of the user's.

    `torch._ops.HigherOrderOperator`, torch 2.11 to 2.13. Gone: AttributeError at the first capture.
    """
    return isinstance(target, torch._ops.HigherOrderOperator)


def fake_mode_of(values: Iterable[object]) -> Any:
    """Return the fake tensor mode of the first fake tensor among `values`.

    `torch._guards.detect_fake_mode`, torch 2.11 to 2.13. Gone: ImportError at the first import.
    """
    return detect_fake_mode(list(values))


def own_fake_mode(value: torch.Tensor) -> Any:
    """Return the fake tensor mode of `value`, a fake tensor of Dynamo's graph: a backend works under another one.

    `FakeTensor.fake_mode`, torch 2.11 to 2.13. Gone: AttributeError at the first capture.
    """
    return value.fake_mode


def graph_module(root: torch.nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """Return `graph` over the attributes of `root`, whose Python is written when somebody runs or prints it.

    Nobody runs the halves of a step, which are rewritten several times. `torch.fx._lazy_graph_module._LazyGraphModule`,
    as Dynamo and Inductor use it, torch 2.11 to 2.13. Gone: ImportError at the first import.
    """
    return _LazyGraphModule(root, graph)


def copy_of(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of `gm`, a graph of Dynamo, that reads the same constants and can be edited and compiled.

    `node._dynamo_source`, which a copy of a graph lacks, torch 2.11 to 2.13. Gone: AOTAutograd does not ask for it.
    """
    copied = graph_module(gm, copy.deepcopy(gm.graph))
    copied.meta, copied.compile_subgraph_reason = dict(gm.meta), getattr(gm, "compile_subgraph_reason", None)
    for node, twin in zip(gm.graph.nodes, copied.graph.nodes, strict=True):
        if hasattr(node, "_dynamo_source"):
            twin._dynamo_source = node._dynamo_source
    return copied


def new_input(graph: fx.Graph, name: str, after: fx.Node) -> fx.Node:
    """Return a new input of `graph`, of Dynamo, behind the input `after`; no variable of the user's program is its
    source.

    `node._dynamo_source`, torch 2.11 to 2.13. Gone: AOTAutograd does not ask for it.
    """
    with graph.inserting_after(after):
        made = graph.placeholder(name)
    made._dynamo_source = None
    return made
