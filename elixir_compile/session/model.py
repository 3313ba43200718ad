"""A prepared model, whose parameters read as gathers: its captured graphs as a user reads them, the wrappers of other
libraries that it follows or refuses, and optimizer state that no plan places.
"""

import functools
import logging
import threading
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import distributed, fx, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from elixir_compile import compat
from elixir_compile.base.errors import InvalidOption, NotPrepared, RanksApart, UnsupportedModel, UnsupportedWrapper
from elixir_compile.base.options import Options
from elixir_compile.base.process import Living
from elixir_compile.base.units import format_bytes
from elixir_compile.graph.capture.modules import (
    Entry,
    executor_of,
    gathered_names,
    is_swapped,
    model_of,
    movable,
    swap,
    undo_swap,
    unmanaged_reason,
)
from elixir_compile.graph.capture.node_facts import leaves_of
from elixir_compile.graph.ops.gather import Gate
from elixir_compile.graph.ops.registry import Slot, aliases, moved_together, num_slots, slot_of
from elixir_compile.graph.ops.shards import TensorAxis, is_dtensor, is_wrapped, own_shard, parts_of
from elixir_compile.graph.rewrite.program import program_text
from elixir_compile.ir import Plan, StepGraph
from elixir_compile.optim.hybrid import Hybrid
from elixir_compile.runtime.bucket import is_slab_memory
from elixir_compile.runtime.distributed.control import Peers
from elixir_compile.runtime.distributed.ranks import Ranks
from elixir_compile.runtime.executor import Executor, executor_of_slot
from elixir_compile.runtime.lowering import RegionCompiler
from elixir_compile.runtime.placed import take_replaced
from elixir_compile.search.problem import Question, question_of
from elixir_compile.session.cast_and_shard import check_masters, check_reduces
from elixir_compile.session.graph_planner import ActivePlan
from elixir_compile.session.machine import RegionProfile
from elixir_compile.session.plan_files import disk_of, load_plan
from elixir_compile.session.planned_graph import PlannedGraph
from elixir_compile.session.together import StagesOfRank, Together
from elixir_compile.step import MemoryTimeline, plan_timeline
from elixir_compile.step.stages import Run

log = logging.getLogger("elixir_compile")

# ----------------------------------------------------------------------------------------------------------------------
# What a user reads of a captured graph: its plan, its programs, and the bytes and seconds planned.


class Compilation:
    """The record of a captured graph. The backend makes it; the user reads it."""

    def __init__(self, planned: PlannedGraph, loss_chunks: int | None, together: Together) -> None:
        self._planned, self._together = planned, together
        self.loss_chunks = loss_chunks
        """The number of chunks of the loss; None if no loss that could be chunked was found."""

    @property
    def name(self) -> str:
        """The name of the graph: the class of the model, and a number from the second graph on."""
        return self._planned.name

    @property
    def forward(self) -> fx.GraphModule | None:
        """The program of the next forward."""
        return self._planned.programs.forward

    @property
    def backward(self) -> fx.GraphModule | None:
        """The program of the backward; None before the first backward, and for inference."""
        return self._planned.programs.backward

    @property
    def active(self) -> ActivePlan:
        """The plan in use, with its capture and problem; exists once the graph was planned."""
        return self._planned.active

    @property
    def graph(self) -> StepGraph | None:
        """The captured step, torch-free; None before it was planned."""
        return self.active.graph if self._planned.is_planned else None

    @property
    def plan(self) -> Plan | None:
        """The plan of the graph; None before it was planned."""
        return self.active.plan if self._planned.is_planned else None

    @property
    def question(self) -> Question | None:
        """What the plan answers: the graph, the machine and the budgets; None before the graph was planned."""
        if not self._planned.is_planned:
            return None
        # A plan that the user gave was made for the budget that it names, whatever is free here.
        problem, plan = self.active.problem, self.active.plan
        asked = replace(problem, budget_bytes=plan.budget_bytes, base_bytes=plan.base_bytes)
        return question_of(asked, self._planned.planner.options)

    @property
    def timeline(self) -> MemoryTimeline:
        """Live bytes by kind at every op under the plan."""
        return plan_timeline(self.active.graph, self.active.plan)

    @property
    def rank_peak_bytes(self) -> int:
        """The planned peak of this rank: of all stages of a pipeline that it runs and that have a plan, together, in
        the order of their schedule. Without other stages it is the peak of the plan.

        Example:
            compilation = elixir.compilations(stage)[-1]
            print(compilation.rank_peak_bytes, "of", compilation.plan.budget_bytes)
        """
        active, stages = self.active, self._together.stages
        if stages is None or self.is_inference:
            return active.plan.prediction.device_peak_bytes
        return stages.peak_bytes(self._together, self._together.planned())

    @property
    def profile(self) -> RegionProfile | None:
        """Seconds and bytes of each region, measured before planning; None without the option `profile_regions`."""
        return self._planned.planner.profile

    @property
    def is_inference(self) -> bool:
        """Whether the graph has no backward."""
        return self._planned.is_inference

    @property
    def is_superseded(self) -> bool:
        """Whether a later capture of the same step took its place."""
        return self._planned.is_superseded

    def __str__(self) -> str:
        if not self._planned.is_planned:
            return f"{self.name}: not planned"
        return program_text(self.active.plan, self.timeline, self.active.graph, self.forward, self.backward)


# ----------------------------------------------------------------------------------------------------------------------
# Wrappers of torch and of other libraries that train a model on several devices: followed, or refused by name.
#
# DistributedDataParallel              followed: its reducer takes the gradients (see `runtime.gradients`)
# DataParallel on several devices      refused: each forward runs copies, without parameters, in threads
# fully_shard, FullyShardedDataParallel, the engine of DeepSpeed
#                                      refused: they place parameters and gradients themselves
# none, several ranks                  a warning: nothing averages the gradients


def refuse_wrappers(gm: fx.GraphModule, roots: Sequence[nn.Module]) -> None:
    """Raise UnsupportedWrapper if another library places the parameters of the captured graph `gm`, which it reads from
    the modules `roots` and those in them."""
    if compat.is_in_data_parallel():
        because = "on several devices each forward runs copies of it, which have no parameters, in threads"
        raise UnsupportedWrapper(_name(roots), "DataParallel", because, _ONE_PROCESS_EACH)
    modules = [module for root in roots for module in root.modules()]
    if compat.reads_fully_sharded(gm) or any(map(compat.is_fully_sharded, modules)):
        because = "both would place its parameters and reduce its gradients"
        raise UnsupportedWrapper(_name(roots), "FSDP (fully_shard or FullyShardedDataParallel)", because)
    kinds = {kind for module in modules for kind in type(module).__mro__}
    if any(kind.__module__.startswith("deepspeed.") for kind in kinds):  # which need not be installed
        because = "both would place its parameters, gradients and optimizer state"
        raise UnsupportedWrapper(_name(roots), "the engine of DeepSpeed", because)


_ONE_PROCESS_EACH = (
    "Start one process for each device, as `torchrun --nproc-per-node <devices>` does; then DistributedDataParallel, "
    "which Trainer, Accelerate and Lightning use by themselves, can take its place"
)


def follow_ddp(executor: Executor) -> None:
    """If a DistributedDataParallel runs this forward, have it take the gradients of its parameters in `executor`.

    Raises UnsupportedWrapper if the ranks share the model already, or the wrapper casts parameters.
    """
    ddp = compat.active_ddp()
    if ddp is None or ddp in executor.reducers:
        return
    _refuse_sharing_twice(executor)
    if ddp.mixed_precision is not None:
        because = f"{ddp.mixed_precision} replaces parameters in each forward"
        instead = "Leave `mixed_precision` out, and use `torch.autocast` or the option `param_dtype`"
        raise UnsupportedWrapper(_name([ddp.module]), "DistributedDataParallel", because, instead)
    executor.reducers.add(ddp, executor.slots.values())


def _refuse_wrapping(module: nn.Module, name: str, child: nn.Module | None) -> None:
    """Raise UnsupportedWrapper if `module` is a DistributedDataParallel that gets a shared model as its `child`.

    Called when a module gets a child: the wrapper would fail later, at a broadcast of DTensors.
    """
    if isinstance(module, DistributedDataParallel) and child is not None:
        executor = executor_of(child)
        if executor is not None:
            _refuse_sharing_twice(executor)


register_module_module_registration_hook(_refuse_wrapping)


def _refuse_sharing_twice(executor: Executor) -> None:
    if executor.peers is not None:
        because = "`prepare(model, mesh=...)` has the ranks share it already, and average its gradients"
        raise UnsupportedWrapper(executor.name, "DistributedDataParallel", because, _LEAVE_OUT_ONE)


_LEAVE_OUT_ONE = (
    "Leave the wrapper out: for Accelerate, `accelerator.prepare_model(model, evaluation_mode=True)`. Or leave out "
    "`prepare`, as for the Trainer and Lightning, which wrap each model: then each rank holds all of it"
)


def check_for_ddp(executor: Executor, options: Options) -> None:
    """Raise InvalidOption if an option does not go with the DistributedDataParallel that reduces gradients."""
    if not executor.reducers:
        return
    for name, value in (("update", "in_backward"), ("reduce_dtype", "float32")):
        if getattr(options, name) == value:
            because = (
                "a DistributedDataParallel reduces gradients when the backward ends, in the dtype of the parameter"
            )
            raise InvalidOption(
                name, value, f"another value, as {because}; or `prepare(model, mesh=...)` instead of it"
            )


def warn_if_apart(executor: Executor) -> None:
    """Warn if several ranks run, and nothing shares the model of `executor` among them, nor makes it a stage of a
    pipeline, another one on each rank."""
    is_shared = executor.peers is not None or bool(executor.reducers) or compat.is_in_pipeline()
    if is_shared or not (distributed.is_available() and distributed.is_initialized()):
        return
    if distributed.get_world_size() > 1:
        warnings.warn(RanksApart(executor.name, distributed.get_world_size()), stacklevel=2)


def _name(roots: Iterable[nn.Module]) -> str:
    return next((type(root).__name__ for root in roots), "the model")


# ----------------------------------------------------------------------------------------------------------------------
# A prepared model: its parameters read as gathers, so that a plan may place them in any memory.
#
# Who owns whom:
#
#   modules --> ManagedModel --> Executor: slots, buckets, slabs, outstanding activations
#                    |
#                    +--> PlannedGraph, one for each captured graph --> programs, plans
#                    +--> gates, between autograd and the graphs
#
#   parameter --> slot --> Executor                 gathers it and takes its gradient; `ops` and `runtime` need no more
#   slot --> modules that read it --> ManagedModel  finds the model for a captured graph
#   compiled code ..> Gate, PlannedGraph            weak: Dynamo may keep it until `torch._dynamo.reset()`
#   autograd --> ticket --> PlannedGraph            an outstanding forward keeps the programs of its backward


prepare_lock = threading.RLock()


class ManagedModel:
    """The models `roots`, which share an executor, with their captured graphs and outstanding forwards."""

    def __init__(
        self,
        roots: Sequence[nn.Module],
        device: torch.device,
        ranks: Ranks | None = None,
        tensor_axis: TensorAxis | None = None,
        *,
        peers: Peers | None = None,
        originals: Sequence[nn.Module] = (),
    ) -> None:
        """Make a slot for every parameter of `roots` that can become a gather. The modules are not changed yet.

        If `roots` are stand-ins, `originals` are their models: they show which parameters share memory.
        """
        name = type(roots[0]).__name__
        self.executor = Executor(device, name, ranks, tensor_axis=tensor_axis, peers=peers)
        self.graphs: list[PlannedGraph] = []
        """The captured graphs, in order of capture."""
        self.compilations: list[Compilation] = []
        """The records of `graphs`, in the same order."""
        self.unmanaged_because: dict[str, str] = {}
        """The reason why no plan can move a parameter, by the name of the unmanaged parameter."""
        self._together = Together(self.executor, self.graphs, self._unplaced)
        self._together.first_steps.watch.tensors = self._tensors
        self._gates: list[Gate] = []
        self._regions: dict[str, RegionCompiler] = {}
        self._roots = tuple(weakref.ref(root) for root in roots)
        # A buffer is complete on each rank, and DistributedDataParallel writes it before each forward.
        is_alone = peers is None and ranks is None and tensor_axis is None
        moves_buffers = is_alone and compat.active_ddp() is None
        for name, param, reason in _with_reasons(roots, originals):
            if not (moves_buffers or isinstance(param, nn.Parameter)):
                continue
            if reason is None and is_wrapped(param) and not is_alone:
                reason = f"several ranks share the model, and a {type(param).__name__} is complete on each of them"
            if reason is not None:
                self.note_unmanaged(name, param, reason)
                continue
            for part_name, part in parts_of(param, name).items():
                self.executor.add_slot(part_name, part)

    def note_unmanaged(self, name: str, param: torch.Tensor, reason: str) -> None:
        """Note that no plan can move `param`, for the given `reason`."""
        self.unmanaged_because[name] = reason
        if param.requires_grad:
            self.executor.gradients.unmanaged[name] = param

    def _unplaced(self) -> Iterable[torch.Tensor]:
        """Yield the buffers and the parameters of the models that have no slot."""
        for root in self.roots:
            for module in root.modules():
                own = (*module._buffers.values(), *module._parameters.values())
                yield from (each for each in own if each is not None and not self.executor.slots_for(each))

    def join_stages(self, schedule: object, place: int, others: "Sequence[ManagedModel]", runs: Sequence[Run]) -> None:
        """Plan this stage, at `place` of the stages that `schedule` runs on this rank, beside the `others`; `runs` is
        the order in which the schedule runs them."""
        joined = (other._together.stages for other in others)
        known = next((stages for stages in joined if stages is not None and stages.is_of(schedule)), None)
        (known or StagesOfRank(schedule, runs)).join(place, self._together)

    # Modules.

    @property
    def roots(self) -> list[nn.Module]:
        """The live models that the parameters belong to."""
        return [root for reference in self._roots if (root := reference()) is not None]

    def _tensors(self) -> Iterator[torch.Tensor]:
        """Yield the parameters and the buffers of the models."""
        for root in self.roots:
            yield from root.parameters()
            yield from root.buffers()

    def swap_modules(self) -> None:
        """Let all modules read the parameters and buffers with a slot as gathers; no tensor moves."""
        for root in self.roots:
            for module in root.modules():
                if is_swapped(module):
                    continue
                entries = {
                    name: Entry.of(tensor, slots)
                    for name, tensor in movable(module)
                    if unmanaged_reason(module, name) is None and (slots := self.executor.slots_for(tensor))
                }
                if entries:
                    swap(module, entries, self)

    def move_rest(self) -> None:
        """Move all parameters and buffers of the models that do not read as gathers to the device."""
        rest = [
            tensor
            for root in self.roots
            for module in root.modules()
            for name, tensor in (*module._parameters.items(), *module._buffers.items())
            if tensor is not None and name not in gathered_names(module)
        ]
        with torch.no_grad():
            moved_together(rest, self.executor.device)

    def is_outdated(self, params: Iterable[nn.Parameter]) -> bool:
        """Return whether a graph that reads `params` needs the models prepared again, because parameters were replaced
        or added.

        Raises UnsupportedModel if a parameter was added and there are several ranks: each would train its own copy.
        """
        if self.executor.sites.is_outdated:
            return True
        wanted = {id(param) for param in params if not self.executor.slots_for(param)}
        found = _with_reasons(self.roots) if wanted else ()
        known = self.unmanaged_because
        new = [name for name, param, reason in found if id(param) in wanted and reason is None and name not in known]
        if new and self.executor.peers is not None:
            because = (
                "it came after `prepare(model, mesh=...)`, and is not shared. Change the model before it is prepared"
            )
            raise UnsupportedModel(new[0], because)
        return bool(new)

    # Graphs.

    def use(self, options: Options) -> None:
        """Apply the `options` that hold for all graphs of the model.

        Raises WrongDtype if a parameter was prepared without the master that the options ask for, PlanMismatch if the
        user's plan reduces gradients in another dtype, and InvalidOption if a schedule changes gradients after updates,
        or a DistributedDataParallel does. Raises UnsupportedWrapper for one that cannot train the model.
        """
        executor = self.executor
        follow_ddp(executor)
        check_for_ddp(executor, options)
        if options.update == "in_backward" and executor.calls.spec.is_scaled:
            expected = '"across_steps" or "after_backward", or a schedule made with `scale_grads=False`'
            raise InvalidOption("update", options.update, expected)
        if options.param_dtype is not None:
            modules = (module for root in self.roots for module in root.modules())
            check_masters(executor.slots.values(), modules, options.param_dtype)
        executor.gradients.stay |= bool(options.accumulate)
        executor.gradients.sums_in_fp32 |= options.reduce_dtype == "float32"
        if executor.ranks is not None:
            executor.ranks.reduces_in_fp32 = executor.gradients.sums_in_fp32
            if options.plan is not None:
                check_reduces(load_plan(options.plan), executor.slots, executor.ranks)
        executor.buckets.disk = disk_of(options) or executor.buckets.disk
        executor.buckets.reads_loaded_files &= options.frozen_files

    def regions_for(self, inner: str) -> RegionCompiler:
        """Return the compiler of this model's regions for the inner backend `inner`."""
        return self._regions.setdefault(inner, RegionCompiler(inner))

    def new_graph(self, options: Options, graph_break: tuple[str, int, str] | None) -> PlannedGraph:
        """Return a graph to capture; `add` makes it one of the model's once it is compiled.

        `graph_break` has file, line and reason of the graph break at which it ends.
        """
        self._together.has_breaks |= graph_break is not None
        name, number = self.executor.name, len(self.graphs)
        return PlannedGraph(
            f"{name}.{number}" if number else name,
            self.executor,
            self.regions_for(options.inner),
            options,
            graphs=self.graphs,
            together=self._together,
            graph_break=graph_break,
        )

    def add(self, graph: PlannedGraph, gate: Gate, loss_chunks: int | None) -> None:
        """Add the compiled `graph`, through whose `gate` autograd reaches the parameters.

        `loss_chunks` is the number of chunks of its loss; None if no loss that could be chunked was found.
        """
        if not (self.graphs or graph.is_inference):
            warn_if_apart(self.executor)
        self.graphs.append(graph)
        self.compilations.append(Compilation(graph, loss_chunks, self._together))
        self._gates.append(gate)

    def forget_graphs(self) -> None:
        """Forget all graphs, because Dynamo captures them again."""
        self.graphs.clear()
        self.compilations.clear()

    def forget_parameters(self) -> None:
        """Forget the parameters and their homes, because another model takes them over; no graph runs here again."""
        self.executor.forget_parameters()
        self._gates.clear()

    def begin_forward(self, graph: PlannedGraph, args: Sequence[Any]) -> None:
        """Before each forward of `graph`: adopt replaced parameters, plan again if it is due, and move parameters to
        the homes of the plan.

        Raises ParameterReplaced if the graphs cannot read a new parameter, UnsupportedWrapper if a
        DistributedDataParallel that came after the capture cannot train the model, and NoFeasiblePlan if the budget is
        too small for the step.
        """
        follow_ddp(self.executor)
        self._together.first_steps.trial.check(graph.planner.given_budget_bytes)
        replaced = take_replaced(self.executor.sites, self.executor.saved.next_number)
        if replaced:  # graphs read what users replaced since the last forward, in the homes of the plan
            for gate in self._gates:
                gate.disconnect()
            self.executor.buckets.place_replaced(replaced)
        watch = self._together.first_steps.watch
        watch.step_may_begin()
        if graph.is_inference:
            for other in self.graphs:
                other.profiler.restart()  # Inference runs the same buckets, and regions of the same labels.
        else:
            for other in self.graphs:
                if other is graph or other.is_inference:
                    continue
                if self._together.share_step(graph, other):
                    graph.profiler.share_step()
                    other.profiler.share_step()
                else:
                    other.profiler.stop()  # The steps of two graphs alternate.
            graph.learn_from_steps(args)
        self._together.begin(graph, args)
        graph.keep_current(args)
        self._together.make_room(graph)
        graph.programs.drop_old()
        watch.forward_begins(args, is_training=not graph.is_inference)
        self.executor.begin()


def managed_model(model: nn.Module) -> ManagedModel | None:
    """Return the managed model of `model`, or of a prepared module in it; None if no module of it is prepared."""
    found = model_of(model)
    assert found is None or isinstance(found, ManagedModel)
    return found


def managed_model_of_slot(slot: Slot) -> ManagedModel:
    """Return the model whose executor has `slot`, found from the modules that read the slot's parameter.

    Raises NotPrepared if these modules no longer exist, or belong to another managed model by now.
    """
    executor = executor_of_slot(slot)
    for module in executor.sites.modules():
        model = managed_model(module)
        if model is not None and model.executor is executor:
            return model
    raise NotPrepared(f"parameter {slot.name} belongs to a model that no longer exists; compile the model again")


def prepare_again(old: ManagedModel) -> None:
    """Prepare the models of `old` with a new executor for their present parameters.

    Raises UnsupportedModel if there are several ranks and a parameter is not sharded.
    """
    with prepare_lock:
        roots, before = old.roots, old.executor
        if not roots:
            raise NotPrepared("the model whose step was captured no longer exists.")
        for name, param, reason in _with_reasons(roots):
            if before.ranks is not None and reason is None and not is_dtensor(param):
                because = "it was replaced after `prepare(model, mesh=...)`. Change the model before it is prepared"
                raise UnsupportedModel(name, because)
        for slot in before.slots.values():
            before.buckets.await_update(slot)
        for module in (*before.sites.modules(), *(module for root in roots for module in root.modules())):
            if is_swapped(module):
                undo_swap(module)
        if not before.saved.outstanding_owners():
            old.forget_parameters()
        new = ManagedModel(roots, before.device, before.ranks, tensor_axis=before.tensor_axis, peers=before.peers)
        new.executor.buckets.generation = before.buckets.generation + 1
        new.executor.buckets.disk = before.buckets.disk
        new.executor.buckets.reads_loaded_files = before.buckets.reads_loaded_files
        new.executor.calls.spec = before.calls.spec
        if old._together.stages is not None:
            old._together.stages.replace(old._together, new._together)
        new._together.neighbours.replace(old._together.neighbours)
        new.executor.plain_state = before.plain_state
        new.executor.gradients.stay = before.gradients.stay
        new.executor.gradients.sums_in_fp32 = before.gradients.sums_in_fp32
        new.swap_modules()
        new.move_rest()


def _with_reasons(
    roots: Sequence[nn.Module], originals: Sequence[nn.Module] = ()
) -> Iterable[tuple[str, torch.Tensor, str | None]]:
    """Yield the name and each parameter and large buffer of `roots`, with the reason why it cannot become a gather, or
    None if it can.

    `originals` are models of the same structure that show which parameters share memory; by default `roots` themselves.
    """
    named = list(_named_parameters(roots))
    owners = originals or roots
    moved = [found for name, tensor, _, _ in _named_parameters(owners) for found in parts_of(tensor, name).items()]
    known = {id(tensor) for _, tensor in moved}
    buffers = ((f"buffer {name}", buffer) for root in owners for name, buffer in root.named_buffers())
    shared = aliases([*moved, *(found for found in buffers if id(found[1]) not in known)])
    for name, param, module, local in named:
        reason = unmanaged_reason(module, local)
        other = next((shared[part] for part in parts_of(param, name) if part in shared), None)
        if reason is None and other is not None:
            reason = f"it shares memory with {other}"
        yield name, param, reason


def _named_parameters(roots: Iterable[nn.Module]) -> Iterable[tuple[str, torch.Tensor, nn.Module, str]]:
    """Yield each parameter and large buffer of `roots` once: its name, itself, its module, and its name in that."""
    seen: set[int] = set()
    for index, root in enumerate(roots):
        prefix = "" if index == 0 else f"{type(root).__name__}{index}."
        for path, module in root.named_modules():
            for local, param in movable(module):
                if id(param) not in seen:
                    seen.add(id(param))
                    yield f"{prefix}{path}.{local}" if path else f"{prefix}{local}", param, module, local


# ----------------------------------------------------------------------------------------------------------------------
# Count optimizer state that no plan places if the device is a CPU and parameters are on the host.
#
# torch's own optimizers make their state on the device of the parameter. For a parameter on the host of a CUDA device,
# that is host memory, as planned. If the device is a CPU, all memory but the slabs counts as device memory. Such state
# is in no slab, so a step needs more device memory than its plan says.
#
#   step 0    forward backward step()   the optimizer makes its state: a hook adds it up, and says what it found
#   step 1    forward                   planned again: the state is beside the graph, wherever the parameters are


def count_plain_state(model: ManagedModel) -> None:
    """From now on, let plans of `model` count the state of plain optimizers, after the first step in which it exceeds
    the budget."""
    _plain_state().models.add(model)


@functools.cache
def _plain_state() -> "_PlainState":
    """Return the record of all models; the first call has it updated after each step of any optimizer."""
    record = _PlainState()
    hook: Any = torch.compiler.disable(record.inspect)
    register_optimizer_step_post_hook(hook)
    return record


class _PlainState:
    """Looks for unplaced optimizer state, and notes it in the executors of models."""

    def __init__(self) -> None:
        self.models: Living[ManagedModel] = Living()
        """The models whose plans count it."""
        self._seen: WeakKeyDictionary[Optimizer, tuple[object, ...]] = WeakKeyDictionary()
        """The form of each optimizer and of its models when it was inspected last: see `_form`."""
        self._models_of: WeakKeyDictionary[Optimizer, list[ref[ManagedModel]]] = WeakKeyDictionary()

    def inspect(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        """Count the unplaced state of `optimizer` after its step, if its state or the homes of parameters changed."""
        if isinstance(optimizer, Hybrid) and optimizer.places_state:
            return
        if self._seen.get(optimizer) == self._form(optimizer):
            return
        nbytes: dict[ManagedModel, dict[str, int]] = {}
        """By model and by the name of the parameter, the bytes of state that are in no slab."""
        model_of = {id(model.executor): model for model in self.models}
        with torch.DisableTorchFunctionSubclass():  # another optimizer may be updating a parameter
            for param, state in optimizer.state.items():
                slot = slot_of(param) if isinstance(param, torch.Tensor) else None
                model = None if slot is None else model_of.get(id(slot.sink))
                if slot is not None and model is not None:
                    kept = [own_shard(value) for value in leaves_of(state) if isinstance(value, torch.Tensor)]
                    storages = {
                        compat.storage_key(value): value.untyped_storage().nbytes()
                        for value in kept
                        if value is not param and value.device.type == "cpu" and not is_slab_memory(value.data_ptr())
                    }
                    nbytes.setdefault(model, {})[slot.name] = sum(storages.values())
        self._models_of[optimizer] = [ref(model) for model in nbytes]
        self._seen[optimizer] = self._form(optimizer)
        for model, own in nbytes.items():
            model.executor.plain_state.note(optimizer, own)
            if not model.executor.plain_state.is_counted:
                _count_if_over(type(optimizer).__name__, model)

    def _form(self, optimizer: Optimizer) -> tuple[object, ...]:
        """Return numbers that change if `optimizer` gets state or a parameter changes its home."""
        models = [reference() for reference in self._models_of.get(optimizer, ())]
        generations = [model.executor.buckets.generation for model in models if model is not None]
        return (len(optimizer.state), num_slots(), len(self.models), *generations)


def _count_if_over(name: str, model: ManagedModel) -> None:
    """Let plans of `model` count the state of plain optimizers, if a training step needs more than its budget with it;
    `name` is the class of the last optimizer."""
    executor = model.executor
    nbytes = executor.plain_state.all_by_name()
    on_host = {slot.name for bucket in executor.buckets if bucket.is_away for slot in bucket.slots}
    unplanned_bytes = sum(own for param, own in nbytes.items() if param in on_host)
    plans = [graph.active.plan for graph in model.graphs if not (graph.is_inference or graph.is_superseded)]
    over = [plan for plan in plans if plan.prediction.device_peak_bytes + unplanned_bytes > plan.budget_bytes]
    if not unplanned_bytes or not over:
        return
    executor.plain_state.is_counted = True
    plan = max(over, key=lambda each: each.prediction.device_peak_bytes)
    log.warning(
        "%s keeps its state for parameters of %s beside them: %s so far for parameters that plans keep on the host. "
        "On a CPU that is memory of the device: the next step is planned again beside it, as the budget is %s, and "
        "the plan needs %s without it. `elixir_compile.HybridAdamW`, or `elixir_compile.hybrid(cls)` for another "
        "class, keeps its state where the plan says",
        name,
        executor.name,
        format_bytes(unplanned_bytes),
        format_bytes(plan.budget_bytes),
        format_bytes(plan.prediction.device_peak_bytes),
    )
