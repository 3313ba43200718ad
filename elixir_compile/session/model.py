"""A prepared model: its parameters read as gathers, so that a plan may place them in any memory.

Who owns whom:

```text
  modules --> ManagedModel --> Executor: slots, buckets, slabs, outstanding activations
                   |
                   +--> PlannedGraph, one for each captured graph --> programs, plans
                   +--> gates, between autograd and the graphs

  parameter --> slot --> Executor                 gathers it and takes its gradient; `ops` and `runtime` need no more
  slot --> modules that read it --> ManagedModel  finds the model for a captured graph
  compiled code ..> Gate, PlannedGraph            weak: Dynamo may keep it until `torch._dynamo.reset()`
  autograd --> ticket --> PlannedGraph            an outstanding forward keeps the programs of its backward
```
"""

import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from elixir_compile.base.errors import InvalidOption, NotPrepared, UnsupportedModel
from elixir_compile.base.options import Options
from elixir_compile.graph.capture.modules import (
    gathered_names,
    is_swapped,
    model_of,
    swap,
    undo_swap,
    unmanaged_reason,
)
from elixir_compile.graph.ops.aliases import aliases, moved_together
from elixir_compile.graph.ops.gather import Gate
from elixir_compile.graph.ops.registry import Slot
from elixir_compile.graph.ops.shards import is_dtensor
from elixir_compile.graph.ops.tensor_axis import TensorAxis
from elixir_compile.runtime.distributed.peers import Peers
from elixir_compile.runtime.distributed.ranks import Ranks
from elixir_compile.runtime.executor import Executor, executor_of_slot
from elixir_compile.runtime.lowering import RegionCompiler
from elixir_compile.runtime.placed import take_replaced
from elixir_compile.session.cast_and_shard import check_masters, check_reduces
from elixir_compile.session.compilation import Compilation
from elixir_compile.session.outstanding import OutstandingForwards
from elixir_compile.session.planned_graph import PlannedGraph
from elixir_compile.session.saved import disk_of, load_plan
from elixir_compile.session.stages import StagesOfRank
from elixir_compile.session.wrappers import check_for_ddp, follow_ddp, warn_if_apart
from elixir_compile.step.rank_peak import Run

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
        self._outstanding = OutstandingForwards(self.executor, self.graphs, self._unplaced)
        self._outstanding.watch.tensors = self._tensors
        self._gates: list[Gate] = []
        self._regions: dict[str, RegionCompiler] = {}
        self._roots = tuple(weakref.ref(root) for root in roots)
        for name, param, reason in _with_reasons(roots, originals):
            if reason is None:
                self.executor.add_slot(name, param)
            else:
                self.note_unmanaged(name, param, reason)

    def note_unmanaged(self, name: str, param: torch.Tensor, reason: str) -> None:
        """Note that no plan can move `param`, for the given `reason`."""
        self.unmanaged_because[name] = reason
        if param.requires_grad:
            self.executor.gradients.unmanaged[name] = param

    def _unplaced(self) -> Iterable[torch.Tensor]:
        """Yield the buffers of the models, and all parameters without a slot."""
        for root in self.roots:
            yield from root.buffers()
            params = (param for module in root.modules() for param in module._parameters.values())
            yield from (param for param in params if param is not None and self.executor.slot_for(param) is None)

    def join_stages(self, schedule: object, place: int, others: "Sequence[ManagedModel]", runs: Sequence[Run]) -> None:
        """Plan this stage, at `place` of the stages that `schedule` runs on this rank, beside the `others`; `runs` is
        the order in which the schedule runs them."""
        joined = (other._outstanding.stages for other in others)
        known = next((stages for stages in joined if stages is not None and stages.is_of(schedule)), None)
        (known or StagesOfRank(schedule, runs)).join(place, self._outstanding)

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
        """Let all modules read the parameters with a slot as gathers; no tensor moves."""
        for root in self.roots:
            for module in root.modules():
                if is_swapped(module):
                    continue
                readable = (name for name in module._parameters if unmanaged_reason(module, name) is None)
                found = {
                    name: self.executor.slot_for(param)
                    for name in readable
                    if (param := module._parameters[name]) is not None
                }
                slots = {name: slot for name, slot in found.items() if slot is not None}
                if slots:
                    swap(module, slots, self)

    def move_rest(self) -> None:
        """Move the buffers of the models, and all parameters that do not read as gathers, to the device."""
        roots = self.roots
        rest = [
            param
            for root in roots
            for module in root.modules()
            for name, param in module._parameters.items()
            if param is not None and name not in gathered_names(module)
        ]
        with torch.no_grad():
            buffers = (buffer for root in roots for buffer in root.buffers())
            moved_together((*rest, *buffers), self.executor.device)

    def is_outdated(self, params: Iterable[nn.Parameter]) -> bool:
        """Return whether a graph that reads `params` needs the models prepared again, because parameters were replaced
        or added.

        Raises UnsupportedModel if a parameter was added and there are several ranks: each would train its own copy.
        """
        if self.executor.sites.is_outdated:
            return True
        wanted = {id(param) for param in params if self.executor.slot_for(param) is None}
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
            check_masters(executor.slots.values(), options.param_dtype)
        executor.gradients.stay |= bool(options.accumulate)
        executor.gradients.sums_in_fp32 |= options.reduce_dtype == "float32"
        if executor.ranks is not None:
            executor.ranks.reduces_in_fp32 = executor.gradients.sums_in_fp32
            if options.plan is not None:
                check_reduces(load_plan(options.plan), executor.slots, executor.ranks)
        executor.buckets.disk = disk_of(options) or executor.buckets.disk

    def regions_for(self, inner: str) -> RegionCompiler:
        """Return the compiler of this model's regions for the inner backend `inner`."""
        return self._regions.setdefault(inner, RegionCompiler(inner))

    def new_graph(self, options: Options, graph_break: tuple[str, int, str] | None) -> PlannedGraph:
        """Return a graph to capture; `add` makes it one of the model's once it is compiled.

        `graph_break` has file, line and reason of the graph break at which it ends.
        """
        self._outstanding.has_breaks |= graph_break is not None
        name, number = self.executor.name, len(self.graphs)
        return PlannedGraph(
            f"{name}.{number}" if number else name,
            self.executor,
            self.regions_for(options.inner),
            options,
            graphs=self.graphs,
            outstanding=self._outstanding,
            graph_break=graph_break,
        )

    def add(self, graph: PlannedGraph, gate: Gate, loss_chunks: int | None) -> None:
        """Add the compiled `graph`, through whose `gate` autograd reaches the parameters.

        `loss_chunks` is the number of chunks of its loss; None if no loss that could be chunked was found.
        """
        if not (self.graphs or graph.is_inference):
            warn_if_apart(self.executor)
        self.graphs.append(graph)
        self.compilations.append(Compilation(graph, loss_chunks, self._outstanding))
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
        self._outstanding.trial.check(graph.planner.given_budget_bytes)
        self._adopt_replaced()
        watch = self._outstanding.watch
        watch.step_may_begin()
        if graph.is_inference:
            for other in self.graphs:
                other.profiler.restart()  # Inference runs the same buckets, and regions of the same labels.
        else:
            for other in self.graphs:
                if other is graph or other.is_inference:
                    continue
                if self._outstanding.share_step(graph, other):
                    graph.profiler.share_step()
                    other.profiler.share_step()
                else:
                    other.profiler.stop()  # The steps of two graphs alternate.
            graph.learn_from_steps(args)
        self._outstanding.begin(graph, args)
        graph.keep_current(args)
        self._outstanding.make_room(graph)
        graph.programs.drop_old()
        watch.forward_begins(args, is_training=not graph.is_inference)
        self.executor.begin()

    def _adopt_replaced(self) -> None:
        """Make graphs read parameters that users replaced since the last forward, and move these to their homes."""
        replaced = take_replaced(self.executor.sites, self.executor.saved.next_number)
        if replaced:
            for gate in self._gates:
                gate.disconnect()
            self.executor.buckets.place_replaced(replaced)


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
        new.executor.calls.spec = before.calls.spec
        if old._outstanding.stages is not None:
            old._outstanding.stages.replace(old._outstanding, new._outstanding)
        new._outstanding.neighbours.replace(old._outstanding.neighbours)
        new.executor.plain_state = before.plain_state
        new.executor.gradients.stay = before.gradients.stay
        new.executor.gradients.sums_in_fp32 = before.gradients.sums_in_fp32
        new.swap_modules()
        new.move_rest()


def _with_reasons(
    roots: Sequence[nn.Module], originals: Sequence[nn.Module] = ()
) -> Iterable[tuple[str, nn.Parameter, str | None]]:
    """Yield the name and each parameter of `roots`, with the reason why it cannot become a gather, or None if it can.

    `originals` are models of the same structure that show which parameters share memory; by default `roots` themselves.
    """
    named = list(_named_parameters(roots))
    owners = originals or roots
    buffers = {f"buffer {name}": buffer for root in owners for name, buffer in root.named_buffers()}
    shared = aliases([*((name, param) for name, param, _, _ in _named_parameters(owners)), *buffers.items()])
    for name, param, module, local in named:
        reason = unmanaged_reason(module, local)
        if reason is None and name in shared:
            reason = f"it shares memory with {shared[name]}"
        yield name, param, reason


def _named_parameters(roots: Iterable[nn.Module]) -> Iterable[tuple[str, nn.Parameter, nn.Module, str]]:
    """Yield each parameter of `roots` once: its name, itself, its module, and its name in the module."""
    seen: set[int] = set()
    for index, root in enumerate(roots):
        prefix = "" if index == 0 else f"{type(root).__name__}{index}."
        for path, module in root.named_modules():
            for local, param in module._parameters.items():
                if param is not None and id(param) not in seen:
                    seen.add(id(param))
                    yield f"{prefix}{path}.{local}" if path else f"{prefix}{local}", param, module, local
