"""`torch.compile(model, backend="elixir")`: the entry point that Dynamo calls once per captured graph.

prepared model   the graph gathers its parameters: compile it
plain model      the parameters are inputs of the graph: find their models, rewire the graph to gathers, compile it, and
                 prepare the models; later captures of these models have gathers
no parameters    compile the graph as torch does, with a warning
"""

import copy
import logging
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from elixir_compile import compat
from elixir_compile.api.prepare import has_unplaced, new_executor, prepare_again, swap_modules
from elixir_compile.capture.loss import chunk_loss, find_loss
from elixir_compile.capture.markers import gather_keys
from elixir_compile.capture.modules import executor_of, find_roots
from elixir_compile.capture.rewire import gathers_to_inputs, handle_inputs, read_functionally, rewire, split_gathers
from elixir_compile.capture.tracing import collector_off, with_deep_calls
from elixir_compile.capture.written import gathered_among, written_parameters
from elixir_compile.errors import ElixirError, ElixirWarning, InvalidOption, NoFeasiblePlan, ParameterReplaced
from elixir_compile.ir import Plan
from elixir_compile.managed.compilation import Compilation
from elixir_compile.managed.front_end import FrontEnd
from elixir_compile.managed.lifetime import for_compiled_code
from elixir_compile.managed.masters import check_masters, check_reduces
from elixir_compile.managed.plain_state import warn_of_plain_state
from elixir_compile.managed.saved import load_plan
from elixir_compile.managed.unmanaged import compile_unmanaged, stop_managing
from elixir_compile.ops.gather import Gate
from elixir_compile.ops.registry import follow_all_thaws, slot_by_key
from elixir_compile.options import Options, parse_options
from elixir_compile.runtime.executor import Executor, executor_of_slot
from elixir_compile.search.joint.loss import LossAttempt, decided_chunks, possible_chunks, with_chosen_loss

log = logging.getLogger("elixir_compile")

# This must run before Dynamo traces the first frame, so that a model of Hugging Face and its loss are one graph. The
# module is imported when a user names the backend.
compat.trace_past_logging()


def elixir(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, object] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile one captured graph for the memory budget in `options` (see `elixir_compile.options.Options`).

    An error of the plan or of the options is raised when the compiled function is called, so that Dynamo does not wrap
    it.
    """

    def compile_it() -> Callable[..., Any]:
        if mode is not None:
            raise InvalidOption("mode", mode, "None: Elixir has no modes, see its options")
        with collector_off():
            return with_deep_calls(lambda: _compile(gm, example_inputs, with_compiler(parse_options(options))))

    return _or_raiser(compile_it)


def _compile(gm: fx.GraphModule, inputs: Sequence[Any], options: Options) -> Callable[..., Any]:
    _log_graph_break(gm)
    functional = read_functionally(gm)
    if functional is not None:
        raise ParameterReplaced(functional.name, "a plain tensor is in its place", is_temporary=True)
    _follow_changes([executor_of_slot(slot_by_key(key)) for key in gather_keys(gm.graph)], inputs)
    written = written_parameters(gm, inputs)
    unmanaged = gathered_among(gm, written)
    if unmanaged:

        def compile_graph(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            return _or_raiser(lambda: _compile_graph(gm, inputs, options))

        return compile_unmanaged(gm, inputs, unmanaged, compile_graph)
    return _compile_graph(gm, inputs, options, written)


def _compile_graph(
    gm: fx.GraphModule, inputs: Sequence[Any], options: Options, unmanaged: Sequence[tuple[nn.Parameter, str]] = ()
) -> Callable[..., Any]:
    """Compile a graph; its inputs `unmanaged`, each with a reason, cannot become gathers."""
    keys = split_gathers(gm)
    if keys:
        return _compile_gathers(gm, inputs, options, executor_of_slot(slot_by_key(keys[0])))
    params = _parameters(inputs)
    roots = find_roots(params)
    prepared: list[Executor] = [executor for root in roots if (executor := executor_of(root)) is not None]
    if prepared:
        _follow_changes(prepared, inputs)
        # All of these are unmanaged parameters of prepared models.
        return compat.compile_plainly(gm, inputs, options.inner)
    executor = new_executor(roots, params[0].device) if roots else None
    if executor is not None:
        stop_managing(
            executor, ((slot, reason) for param, reason in unmanaged if (slot := executor.slot_for(param)) is not None)
        )
    if executor is None or not any(executor.slot_for(param) for param in params):
        _warn_nothing_to_place(inputs, options)
        return compat.compile_plainly(gm, inputs, options.inner)
    return _compile_first(gm, inputs, options, roots, executor)


def _follow_changes(executors: Iterable[Executor], inputs: Sequence[Any]) -> None:
    """If parameters of a model of `executors` were replaced or added, prepare it again and let Dynamo trace the frame
    again."""
    for executor in dict.fromkeys(executors):
        if executor.sites.is_outdated or has_unplaced(executor, _parameters(inputs)):
            prepare_again(executor)
            compat.trace_again("parameters of the model were replaced, or came to it")


def _parameters(inputs: Sequence[Any]) -> list[nn.Parameter]:
    return [value for value in inputs if isinstance(value, nn.Parameter) and value.is_floating_point()]


def _compile_gathers(
    gm: fx.GraphModule, inputs: Sequence[Any], options: Options, executor: Executor
) -> Callable[..., Any]:
    """Compile a graph with gathers, and its loss in chunks if their plan is better."""
    if options.param_dtype is not None:
        check_masters(executor.slots.values(), options.param_dtype)
    executor.gradients.sums_in_fp32 |= options.reduce_dtype == "float32"
    if executor.ranks is not None:
        executor.ranks.reduces_in_fp32 = executor.gradients.sums_in_fp32
        if options.plan is not None:
            check_reduces(load_plan(options.plan), executor.slots, executor.ranks)
    chunks = possible_chunks(find_loss(gm), options, is_shared=executor.ranks is not None)

    def compile_with(attempt: LossAttempt) -> Callable[..., Any]:
        return _compile_attempt(gm, inputs, options, executor, attempt)

    decided = None if chunks is None else _decided_chunks(options, executor)
    return with_chosen_loss(chunks, compile_with, decided=decided, is_training=torch.is_grad_enabled())


def _decided_chunks(options: Options, executor: Executor) -> int | None:
    """Return the number of chunks of the loss if the plan of the user or an earlier graph decides it, else None."""
    is_inference = not torch.is_grad_enabled()
    others = executor.compilations if executor.ranks is not None else ()
    alike = (other.loss_chunks for other in others if other.is_inference is is_inference)
    return decided_chunks(None if options.plan is None else load_plan(options.plan), alike)


def _compile_attempt(
    gm: fx.GraphModule, inputs: Sequence[Any], options: Options, executor: Executor, attempt: LossAttempt
) -> Callable[..., Any]:
    """Compile the graph with the loss of `attempt`; `gm` is changed only if no other attempt follows."""
    own = gm if attempt.is_last else compat.copy_of(gm)
    if attempt.cut is not None:
        chunk_loss(own, attempt.cut.region, attempt.cut.num_chunks)
    compiled = _compile_as(own, inputs, options, executor, attempt.review, attempt.num_chunks)
    if attempt.instead_of is not None:
        for other in executor.compilations:
            # The chunked step replaces an earlier capture of the step with its unchunked loss.
            other.is_superseded |= other.plan is attempt.instead_of
    return compiled


def _compile_as(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    options: Options,
    executor: Executor,
    review: Callable[[Plan], Plan] | None = None,
    num_chunks: int | None = None,
) -> Callable[..., Any]:
    """Compile the graph without further changes; its loss is in `num_chunks`.

    `review` is called with its first plan and returns the plan to use.
    """
    name = executor.name if not executor.compilations else f"{executor.name}.{len(executor.compilations)}"
    positions = handle_inputs(gm)
    gate = Gate([slot_by_key(key) for key in positions.values()])
    op_by_op = None if all(slot.param.requires_grad for slot in gate.slots) else compat.copy_of(gm)
    compilation = Compilation(executor, executor.regions_for(options.inner), options, name, review)
    compilation.loss_chunks = num_chunks
    compilation.outstanding.ended_at = compat.graph_break_of(gm)
    if executor.device.type == "cpu":
        warn_of_plain_state()
    front_end = compat.compile_with_inductor if options.inner == "inductor" else compat.compile_with_aot_eager
    given = gathers_to_inputs(gm, inputs)
    repeated = given.repeated  # `run` must not keep `given`, which holds the first batch
    calls = FrontEnd(compilation, executor.regions_for(options.inner), gate, given.keys)
    compiled = front_end(given.module, given.example_inputs, calls.partition, calls.lower)
    executor.compilations.append(compilation)
    executor.gates.append(gate)
    call = for_compiled_code(gate.call)

    def run_with_repeated(*args: Any) -> Any:
        return compiled(*args, *(args[position] for position in repeated))

    def run(*args: Any) -> Any:
        return call(run_with_repeated if repeated else compiled, op_by_op, tuple(positions), args)

    return run


def _compile_first(
    gm: fx.GraphModule, inputs: Sequence[Any], options: Options, roots: Sequence[nn.Module], executor: Executor
) -> Callable[..., Any]:
    """Compile the graph of a plain model as if the model were prepared, and prepare it.

    Dynamo builds its guards after this has returned, so they are guards of prepared modules. The graph need not be
    captured again unless it reads attributes of the classes that change. If no plan fits, the model stays plain.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    rewired = rewire(gm, inputs)
    handles = rewired.handles  # `run` must not keep `rewired`, which holds the first batch
    try:
        compiled = _compile_gathers(gm, rewired.example_inputs, options, executor)
    except NoFeasiblePlan as error:
        raise NoFeasiblePlan(*error.args[:-1], is_prepared=False) from None
    swap_modules(roots, executor)
    if compat.checks_class_of([placeholders[index] for index in handles]):
        # A guard of `Block.scale` has its position among the bases of the module's class, and that class is new.
        executor.compilations.clear()
        compat.trace_again("modules got classes that read parameters as gathers")
    compat.guard_by_identity({placeholders[index]: inputs[index] for index in handles})
    compat.before_each_capture(follow_all_thaws)

    def run(*args: Any) -> Any:
        values = list(args)
        for index, handle in handles.items():
            values[index] = handle
        return compiled(*values)

    return run


def _log_graph_break(gm: fx.GraphModule) -> None:
    found = compat.graph_break_of(gm)
    if found is not None:
        log.info("graph break at %s:%d: what follows is planned as a graph of its own. %s", *found)


def _warn_nothing_to_place(inputs: Sequence[Any], options: Options) -> None:
    message = (
        "the captured graph reads no floating-point parameter of a module, so there is nothing to place: "
        f"it runs as with backend={options.inner!r}, without a memory budget."
    )
    takes_activations = any(isinstance(value, torch.Tensor) and value.requires_grad for value in inputs)
    if takes_activations or not torch.is_grad_enabled():  # a part of a model after a graph break, such as a loss
        log.debug("%s", message)
    else:
        warnings.warn(message, ElixirWarning, stacklevel=4)


def _or_raiser(compile_it: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """Return the result of `compile_it`, or if it raises an ElixirError, a function that raises this error."""
    try:
        return compile_it()
    except ElixirError as error:
        fresh = copy.copy(error)  # without the traceback, whose frames hold the model

    def run(*args: Any) -> Any:
        raise copy.copy(fresh)

    return run


def with_compiler(options: Options) -> Options:
    """Return `options`; if there is no C++ compiler, with `inner="aot_eager"` and a warning."""
    if options.inner == "inductor" and not compat.has_cpp_compiler():
        warnings.warn(
            "no C++ compiler was found, so regions run op by op (inner='aot_eager'). "
            "Install g++ or clang++ for compiled regions.",
            ElixirWarning,
            stacklevel=2,
        )
        return replace(options, inner="aot_eager")
    return options
