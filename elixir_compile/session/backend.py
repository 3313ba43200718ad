"""The entry point of `torch.compile(model, backend="elixir")`: find the models of a captured graph, prepare them, and
compile the graph by callbacks of AOTAutograd.
"""

import logging
import pkgutil
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import fx, nn

from elixir_compile import compat
from elixir_compile.base.errors import (
    ElixirError,
    ElixirWarning,
    InvalidOption,
    NoFeasiblePlan,
    NotPrepared,
    ParameterReplaced,
    UnsupportedModel,
    UnsupportedWrapper,
)
from elixir_compile.base.options import Options, parse_options
from elixir_compile.base.process import collector_off, for_compiled_code
from elixir_compile.graph.capture.batch import mark_inputs_of_modules
from elixir_compile.graph.capture.joint import (
    added_sizes,
    partition_hidden,
    reads_parameters,
    show_in_inference,
    sizes_in,
)
from elixir_compile.graph.capture.loss import chunk_loss, find_loss
from elixir_compile.graph.capture.modules import find_roots, is_swapped, is_swapped_for, read_plainly, reads_any
from elixir_compile.graph.capture.node_facts import gather_keys, outputs_of
from elixir_compile.graph.capture.rewire import (
    ParameterInputs,
    fake_parameter,
    gathered_among,
    gathers_to_inputs,
    handle_inputs,
    pass_unmanaged,
    read_functionally,
    rewire,
    split_gathers,
    with_handles,
    written_parameters,
)
from elixir_compile.graph.capture.tracing import inline_regions, with_deep_calls
from elixir_compile.graph.ops.gather import Gate
from elixir_compile.graph.ops.registry import Slot, follow_all_thaws, forget, slot_by_key, slot_of
from elixir_compile.graph.ops.shards import is_dtensor, is_wrapped, rehome
from elixir_compile.optim.guard import note_captured, watch_plain_optimizers
from elixir_compile.optim.hybrid import Hybrid
from elixir_compile.runtime.bucket import on_device
from elixir_compile.search.joint.variants import LossAttempt, decided_chunks, possible_chunks, with_chosen_loss
from elixir_compile.session.model import (
    ManagedModel,
    count_plain_state,
    managed_model,
    managed_model_of_slot,
    prepare_again,
    refuse_wrappers,
)
from elixir_compile.session.plan_files import load_plan
from elixir_compile.session.planned_graph import PlannedGraph

# ----------------------------------------------------------------------------------------------------------------------
# Make parameters unmanaged if a captured graph uses them in a way that a gather does not allow.
#
# plain model      the parameters get no slot, and their modules no property
# prepared model   their gathers become inputs of the graph, and the executor drops their slots. If another graph
#                  gathers them, their modules read them plainly again, and Dynamo captures that graph again


Compile = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


def stop_managing(model: ManagedModel, unmanaged: Iterable[tuple[Slot, str]]) -> list[Slot]:
    """Make the parameters of slots of `model` unmanaged, each with a reason; return the slots that another graph
    gathers.

    Raises UnsupportedModel if a parameter is sharded, or if the backward of an outstanding forward may read it.
    """
    executor = model.executor
    graphs = [graph for graph in model.graphs if not graph.is_superseded]
    gathered: list[Slot] = []
    for slot, reason in unmanaged:
        if slot.is_dtensor:
            raise UnsupportedModel(slot.name, f"{reason}, and several ranks share it. Do that outside of the forward")
        readers = [graph for graph in graphs if slot.name in graph.param_names]
        if readers and executor.saved.outstanding_owners():
            raise UnsupportedModel(
                slot.name,
                f"{reason}, and another graph, which waits for its backward, gathers it. Call the compiled model once "
                "under `torch.no_grad()` before it is trained",
            )
        for graph in readers:
            graph.is_superseded = True
        if readers or executor.buckets.of(slot) is not None:
            gathered.append(slot)
            executor.buckets.drop([slot])
        model.note_unmanaged(slot.name, slot.param, reason)
        del executor.slots[slot.name]
        forget(slot)
    return gathered


def compile_unmanaged(
    gm: fx.GraphModule, inputs: Sequence[Any], unmanaged: Mapping[Slot, str], compile_graph: Compile
) -> Callable[..., Any]:
    """Compile `gm` by `compile_graph`, with the parameters of the slots `unmanaged` as inputs instead of gathers.

    `unmanaged` has the reason for each slot.
    """
    passed = pass_unmanaged(gm, inputs, unmanaged)
    gathered: list[Slot] = []
    for slot, reason in unmanaged.items():
        if slot_of(slot.param) is slot:
            gathered += stop_managing(managed_model_of_slot(slot), [(slot, reason)])
    compiled = compile_graph(gm, passed.example_inputs)
    keys = [slot.key for slot in unmanaged]
    passed_keys = passed.keys  # `run` must not keep `passed`, which holds the first batch
    lock, is_first = threading.Lock(), True

    def run(*args: Any) -> Any:
        nonlocal is_first
        values = list(args)
        for place, key in passed_keys.items():
            values[place] = slot_by_key(key).param
        with lock:
            if is_first:  # no earlier: Dynamo compares devices and classes again when the backend returns
                is_first = False
                with torch.no_grad():
                    for slot in map(slot_by_key, keys):  # to the compute device, into memory of its own
                        rehome(slot.param, on_device(slot.own.detach(), slot.device))
                # Modules read plainly what other graphs gather, so that the guards of these graphs fail.
                wanted = {id(slot.param) for slot in gathered}
                for root in find_roots([slot.param for slot in gathered]) if gathered else ():
                    for module in root.modules():
                        names = reads_any(module, wanted)
                        if names and is_swapped(module):
                            read_plainly(module, names)
                gathered.clear()
        return compiled(*values)

    return run


def trace_unmanaged(gm: fx.GraphModule, inputs: Sequence[Any], model: ManagedModel) -> Sequence[Any]:
    """Replace gathers by inputs of `gm` for parameters that cannot be gathers, and return all inputs for its trace.

    `gm` is a graph of a stand-in, which belongs to `model` and which nobody runs.
    """
    unmanaged = gathered_among(gm, written_parameters(gm, inputs))
    passed = pass_unmanaged(gm, inputs, unmanaged)
    stop_managing(model, unmanaged.items())
    # All parameters of a stand-in are views of one memory, so a write to a parameter would be a write to all of them.
    return [
        fake_parameter(gm, value, model.executor.device) if isinstance(value, torch.nn.Parameter) else value
        for value in passed.example_inputs
    ]


# ----------------------------------------------------------------------------------------------------------------------
# Callbacks of AOTAutograd for a graph: called once to partition it, and once to compile each half.


class FrontEnd:
    """The callbacks for one captured graph of a model."""

    def __init__(
        self,
        model: ManagedModel,
        graph: PlannedGraph,
        gate: Gate,
        given: ParameterInputs,
        options: Options,
        attempt: LossAttempt,
    ) -> None:
        """`gate` passes the handles to the graph. `given` has the positions of the parameters among its inputs.

        `attempt` has the form of the loss, and the review of the first plan.
        """
        # AOTAutograd keeps these callbacks with the compiled code, which outlives the model.
        self._model = weakref.proxy(model)
        self._graph = weakref.ref(graph)
        self._gate = weakref.proxy(gate)
        self._regions = model.regions_for(options.inner)
        self._keys = given.keys  # `given` holds the first batch
        self._of_modules = given.of_modules
        self._attempt = attempt
        self._is_captured = False

    @property
    def _planned(self) -> PlannedGraph:
        graph = self._graph()
        assert graph is not None, "the gate, which is called first, has the same lifetime"
        return graph

    def partition(
        self, joint: fx.GraphModule, joint_inputs: Sequence[object], **options: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Return the forward and the backward graph, partitioned as torch does it, and plan the step."""
        if not reads_parameters(joint.graph, self._keys):
            return compat.min_cut_partition(joint, joint_inputs, **options)
        num_outputs = options["num_fwd_outputs"]
        mark_inputs_of_modules(joint.graph, self._of_modules)
        forward, backward = partition_hidden(joint, joint_inputs, compat.min_cut_partition, self._keys, **options)
        self._capture(forward, backward, num_outputs)
        return forward, backward

    def lower(
        self,
        gm: fx.GraphModule,
        examples: Sequence[Any],
        *,
        is_backward: bool = False,
        is_inference: bool = False,
        **options: Any,
    ) -> Callable[[list[Any]], Any]:
        """Return the function to run the forward or the backward graph `gm`.

        Raises UnsupportedModel if a parameter cannot be read as a gather.
        """
        for position in (
            sorted(compat.inputs_that_must_be_real(gm.graph) & self._keys.keys()) if not is_backward else ()
        ):
            # Compiled code would read or write a parameter whose input is only a handle.
            because = (
                "an output of the graph is a view of it, or the graph writes it, in a way that its capture did not show"
            )
            raise UnsupportedModel(slot_by_key(self._keys[position]).name, because)
        if not self._is_captured and reads_parameters(gm.graph, self._keys):
            show_in_inference(gm, self._keys)
            self._capture(gm, None, len(outputs_of(gm.graph)))
        if self._is_captured:
            run = with_deep_calls(partial(self._planned.runner, is_backward=is_backward))
            return run if is_backward else compat.boxed(partial(self._run_forward, run, added_sizes(gm.graph)))
        given = with_handles(gm, examples, self._keys)
        return self._regions.lower_plain(gm, given, is_backward=is_backward, is_inference=is_inference, **options)

    def _run_forward(self, run: Callable[[list[Any]], Any], added: Sequence[tuple[int, int]], args: list[Any]) -> Any:
        args += sizes_in(args, added)
        with self._model.executor.phases.forward(is_training=not self._planned.is_inference):
            self._gate.begin(partial(self._model.begin_forward, self._planned, args))
            return run(args)

    def _capture(self, forward: fx.GraphModule, backward: fx.GraphModule | None, num_outputs: int) -> None:
        attempt, self._attempt = self._attempt, LossAttempt()  # compiled code must not keep it
        self._planned.capture(forward, backward, num_outputs, attempt)
        self._is_captured = True


# ----------------------------------------------------------------------------------------------------------------------
# `torch.compile(model, backend="elixir")`: the entry point that Dynamo calls once per captured graph.
#
# prepared model   the graph gathers its parameters: compile it
# plain model      the parameters are inputs of the graph: find their models, rewire the graph to gathers, compile it,
#                  and prepare the models; later captures of these models have gathers
# no parameters    compile the graph as torch does, with a warning


log = logging.getLogger("elixir_compile")

# This must run before Dynamo traces the first frame, so that a model of Hugging Face and its loss are one graph. The
# module is imported when a user names the backend.
compat.trace_past_logging()
compat.check_requires_grad()


def elixir(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, object] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile one captured graph for the memory budget in `options` (see `elixir_compile.base.options.Options`).

    An error of the plan or of the options is raised when the compiled function is called, so that Dynamo does not wrap
    it.
    """

    def compile_it() -> Callable[..., Any]:
        if mode is not None:
            raise InvalidOption("mode", mode, "None: Elixir has no modes, see its options")
        note_captured(example_inputs)
        with collector_off():
            return with_deep_calls(lambda: _compile(gm, example_inputs, with_compiler(parse_options(options))))

    return _or_raiser(compile_it)


watch_plain_optimizers(elixir, Hybrid)


def _compile(gm: fx.GraphModule, inputs: Sequence[Any], options: Options) -> Callable[..., Any]:
    if compat.is_cut_by_ddp(gm):
        _capture_whole()
    found = compat.graph_break_of(gm)
    if found is not None:
        log.info(
            "graph break at %s:%d: the code behind it runs op by op up to the next graph; under the option "
            "`device_memory` its memory is measured in the first steps. %s",
            *found,
        )
    inline_regions(gm)
    functional = read_functionally(gm)
    if functional is not None:
        raise ParameterReplaced(functional.name, "a plain tensor is in its place", is_temporary=True)
    _follow_changes(_models_of(gather_keys(gm.graph)), inputs)
    written = written_parameters(gm, inputs)
    unmanaged = gathered_among(gm, written)
    if unmanaged:

        def compile_graph(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            return _or_raiser(lambda: _compile_graph(gm, inputs, options))

        return compile_unmanaged(gm, inputs, unmanaged, compile_graph)
    return _compile_graph(gm, inputs, options, written)


def _capture_whole() -> NoReturn:
    """Have Dynamo capture its graph again in one piece, which it has cut at the buckets of a DistributedDataParallel.

    A plan is made for the whole step, and the inputs of a part are fake. Dynamo counts the bytes of the parameters that
    the graph reads to find the places, so the models of the parameters are prepared: handles have few bytes.

    Raises UnsupportedWrapper if the models are prepared already, as parameters that no gather reads are too large.
    """
    ddp = compat.active_ddp()
    roots = [] if ddp is None else find_roots(compat.reduced_by(ddp))
    params = [param for root in roots for param in root.parameters()]
    if not roots or any(managed_model(root) is not None for root in roots):
        because = "Dynamo cuts the captured graph at the buckets of gradients, where no plan can see the whole step"
        instead = "Set `torch._dynamo.config.optimize_ddp = False` before the first step"
        raise UnsupportedWrapper("the model", "DistributedDataParallel", because, instead)
    ManagedModel(roots, params[0].device).swap_modules()
    compat.before_each_capture(follow_all_thaws)
    compat.trace_again("the graph was cut at the buckets of a DistributedDataParallel, and is planned as a whole")


def _compile_graph(
    gm: fx.GraphModule, inputs: Sequence[Any], options: Options, unmanaged: Sequence[tuple[torch.Tensor, str]] = ()
) -> Callable[..., Any]:
    """Compile a graph; its inputs `unmanaged`, each with a reason, cannot become gathers."""
    keys = split_gathers(gm)
    if keys:
        model = _models_of(keys[:1])[0]
        refuse_wrappers(gm, model.roots)
        return _compile_rewired(gm, inputs, options, model)
    params = _parameters(inputs)
    if any(map(is_dtensor, params)):
        raise NotPrepared(
            "parameters of the model are DTensors, as `parallelize_module` makes them: call "
            "`elixir_compile.prepare(model)`, or `elixir_compile.prepare(model, mesh=mesh['data'])`, before the model "
            "is compiled."
        )
    roots = find_roots(params)
    refuse_wrappers(gm, roots)
    prepared = [model for root in roots if (model := managed_model(root)) is not None]
    if prepared:
        _follow_changes(prepared, inputs)
        # All of these are unmanaged parameters of prepared models.
        return compat.compile_plainly(gm, inputs, options.inner)
    model = ManagedModel(roots, params[0].device) if roots else None
    if model is not None:
        slot_for = model.executor.slot_for
        stop_managing(model, ((slot, reason) for param, reason in unmanaged if (slot := slot_for(param)) is not None))
        if any(is_wrapped(param) and model.executor.slots_for(param) for param in params):
            # The graph has one input for all tensors inside of a parameter; swapped modules gather each of them.
            model.swap_modules()
            compat.before_each_capture(follow_all_thaws)
            compat.trace_again("parameters are made of tensors that plans move one by one")
    if model is None or not any(model.executor.slot_for(param) for param in params):
        message = (
            "the captured graph reads no parameter of a module that a plan can move, so there is nothing to place: "
            f"it runs as with backend={options.inner!r}, without a memory budget."
        )
        takes_activations = any(isinstance(value, torch.Tensor) and value.requires_grad for value in inputs)
        if takes_activations or not torch.is_grad_enabled():  # a part of a model after a graph break, such as a loss
            log.debug("%s", message)
        else:
            warnings.warn(message, ElixirWarning, stacklevel=3)
        return compat.compile_plainly(gm, inputs, options.inner)
    return _compile_first(gm, inputs, options, model)


def _models_of(keys: Iterable[int]) -> list[ManagedModel]:
    """Return the models of the slots with `keys`, each once."""
    slots = {slot.sink: slot for slot in map(slot_by_key, keys)}
    return [managed_model_of_slot(slot) for slot in slots.values()]


def _follow_changes(models: Iterable[ManagedModel], inputs: Sequence[Any]) -> None:
    """If parameters of any of `models` were replaced or added, prepare it again and let Dynamo trace the frame
    again."""
    for model in dict.fromkeys(models):
        if model.is_outdated(_parameters(inputs)):
            prepare_again(model)
            compat.trace_again("parameters of the model were replaced, or came to it")


def _parameters(inputs: Sequence[Any]) -> list[nn.Parameter]:
    return [value for value in inputs if isinstance(value, nn.Parameter)]


def _compile_gathers(
    gm: fx.GraphModule, inputs: Sequence[Any], options: Options, model: ManagedModel
) -> Callable[..., Any]:
    """Compile a graph with gathers, and its loss in chunks if their plan is better."""
    model.use(options)
    is_shared, is_training = model.executor.peers is not None, torch.is_grad_enabled()
    chunks = possible_chunks(find_loss(gm), options, is_shared=is_shared)
    decided = None
    if chunks is not None:  # by the plan of the user, or by an earlier graph
        others = model.compilations if is_shared else ()
        alike = (other.loss_chunks for other in others if other.is_inference is not is_training)
        decided = decided_chunks(None if options.plan is None else load_plan(options.plan), alike)

    def compile_with(attempt: LossAttempt) -> Callable[..., Any]:
        own = gm if attempt.is_last else compat.copy_of(gm)
        if attempt.cut is not None:
            chunk_loss(own, attempt.cut.region, attempt.cut.num_chunks)
        compiled = _compile_as(own, inputs, options, model, attempt)
        if attempt.instead_of is not None:
            for other in model.graphs:
                # The chunked step replaces an earlier capture of the step with its unchunked loss.
                other.is_superseded |= other.is_planned and other.active.plan is attempt.instead_of
        return compiled

    return with_chosen_loss(
        chunks,
        compile_with,
        decided=decided,
        is_training=is_training,
        is_whole_first=options.micro_batches == "fit",
        may_put_off=options.device_memory is not None,
    )


def _compile_as(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    options: Options,
    model: ManagedModel,
    attempt: LossAttempt,
) -> Callable[..., Any]:
    """Compile the graph, whose loss has the form of `attempt`, without further changes."""
    positions = handle_inputs(gm)
    slots = {position: slot_by_key(key) for position, key in positions.items()}
    untracked = [slot for position, slot in slots.items() if not inputs[position].requires_grad]
    gate = Gate(tuple(slots.values()), untracked)
    op_by_op = compat.copy_of(gm) if untracked else None
    graph = model.new_graph(options, compat.graph_break_of(gm))
    if model.executor.device.type == "cpu":
        count_plain_state(model)
    front_end = compat.compile_with_inductor if options.inner == "inductor" else compat.compile_with_aot_eager
    given = gathers_to_inputs(gm, inputs)
    repeated = given.repeated  # `run` must not keep `given`, which holds the first batch
    calls = FrontEnd(model, graph, gate, given, options, attempt)
    compiled = front_end(given.module, given.example_inputs, calls.partition, calls.lower)
    model.add(graph, gate, attempt.num_chunks)
    if options.trace is not None:
        # By name: of the tools, which stand above the engine, this one alone is asked for by an option.
        pkgutil.resolve_name("elixir_compile.tools.observe:observe_for_option")(model.roots[0], options.trace)
    call = for_compiled_code(gate.call)

    def run_with_repeated(*args: Any) -> Any:
        return compiled(*args, *(args[position] for position in repeated))

    def run(*args: Any) -> Any:
        return call(run_with_repeated if repeated else compiled, op_by_op, tuple(positions), args)

    return run


def _compile_first(
    gm: fx.GraphModule, inputs: Sequence[Any], options: Options, model: ManagedModel
) -> Callable[..., Any]:
    """Compile the graph of a plain model as if the model were prepared, and prepare it.

    Dynamo builds its guards after this has returned, so they are guards of prepared modules. The graph need not be
    captured again unless it reads attributes of the classes that change. If no plan fits, the model stays plain.
    """
    try:
        compiled = _compile_rewired(gm, inputs, options, model)
    except NoFeasiblePlan as error:
        through = "a model larger than the device goes through elixir_compile.prepare(model, device=...) first"
        raise NoFeasiblePlan(*error.args[:-1], beyond=error.beyond or through) from None
    model.swap_modules()
    if compat.checks_class_of(lambda found: isinstance(found, nn.Module) and is_swapped_for(found, model)):
        # A guard of `Block.scale` has its position among the bases of the module's class, and that class is new. So is
        # the class of a module whose parameters the graph does not read.
        model.forget_graphs()
        compat.trace_again("modules got classes that read parameters as gathers")
    compat.before_each_capture(follow_all_thaws)
    return compiled


def _compile_rewired(
    gm: fx.GraphModule, inputs: Sequence[Any], options: Options, model: ManagedModel
) -> Callable[..., Any]:
    """Compile a graph whose `inputs` may be parameters of `model`: they become handles and gathers."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    rewired = rewire(gm, inputs, model.executor)
    handles = rewired.handles  # `run` must not keep `rewired`, which holds the first batch
    compiled = _compile_gathers(gm, rewired.example_inputs, options, model)
    if not handles:
        return compiled
    compat.guard_by_identity({placeholders[index]: inputs[index] for index in handles})

    def run(*args: Any) -> Any:
        values = list(args)
        for index, handle in handles.items():
            values[index] = handle
        return compiled(*values)

    return run


def _or_raiser(compile_it: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """Return the result of `compile_it`, or if it raises an ElixirError, a function that raises this error."""
    try:
        return compile_it()
    except ElixirError as error:
        fresh = error.renewed()  # without the traceback, whose frames hold the model

    def run(*args: Any) -> Any:
        raise fresh.renewed()

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
