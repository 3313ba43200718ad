"""Compute the seconds and bytes of every stage that consecutive layers can make, and count the bytes of the chosen
stages op by op.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate

from elixir_compile.ir import Calls, Kind, Op, OpId, Param, Phase, Saving, StepGraph, StorageId
from elixir_compile.ir.cost import copy_s
from elixir_compile.ir.hardware import Cluster
from elixir_compile.ir.pipeline import PipelineOrder, TorchSchedule, outstanding_forwards
from elixir_compile.search.evaluator import draft_at_use
from elixir_compile.search.outline import Treatment, seconds_of_ops
from elixir_compile.search.problem import Problem
from elixir_compile.search.reasons import written
from elixir_compile.search.space.buckets import Level
from elixir_compile.search.space.facts import gather_facts
from elixir_compile.search.space.layers import Layer, modes_at_depth, saving_of
from elixir_compile.step.as_run import as_run
from elixir_compile.step.stages import LayeredStep, Run, StageBytes, stage_memory, stage_peaks

# ----------------------------------------------------------------------------------------------------------------------
# Price every stage that consecutive layers can make: seconds on each device, bytes, and the ways to run it.
#
#   seconds   n (forward + backward) + update + gathers that compute does not hide          of a step of n micro-batches
#   bytes     n (received + gradients received) + inputs + state       torch allocates the buffers of all micro-batches
#             + outstanding forwards x saved + the most of any layer that runs
#
# A sum over layers is exact for seconds. Of the bytes that a layer holds only while it runs, those of the layer with
# the most count. The stages that are chosen are counted again op by op. Offloaded activations are not offered: the plan
# of a stage may offload activations that this search keeps or recomputes.


LEVELS = (Level.ON_DEVICE, Level.STATE_OFF, Level.ALL_OFF_RELEASED)
"""The homes that are offered for the parameters and the state of a stage, all alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFacts:
    """The bytes of the layers from `first` up to `end` as a stage, whatever rank runs it."""

    numel: int
    """Trained elements."""
    param_bytes: int
    grad_bytes: int
    state_bytes: int
    largest_grad_bytes: int
    """The gradients of the layer with the most, which one backward makes before they are added to those of others."""
    input_bytes: int
    """Inputs of the model that it reads, and buffers, of one micro-batch."""
    received_bytes: int
    """Tensors from the stage before, of one micro-batch."""
    sent_bytes: int
    saved_bytes: tuple[int, ...]
    """Of an outstanding forward, in each treatment."""
    running_bytes: tuple[int, ...]
    """The most that a running layer holds besides, in each treatment."""

    def held_bytes(self, level: Level, micro_batches: int) -> int:
        """Return the bytes on the device during the whole step: buffers of all micro-batches, and the parameters,
        gradients and optimizer state that stay there at `level`."""
        buffers_bytes = micro_batches * (self.received_bytes + self.sent_bytes + self.input_bytes)
        kept_bytes = 0 if level.has_param_on_host else self.param_bytes + self.grad_bytes
        return buffers_bytes + kept_bytes + (0 if level.has_state_on_host else self.state_bytes)

    def gathered_bytes(self, level: Level) -> int:
        """Return the bytes that are on the device from the first to the last forward or backward."""
        return self.param_bytes + self.grad_bytes if level.has_param_on_host else 0

    def host_bytes(self, level: Level) -> int:
        """Return the bytes on the host."""
        params_bytes = self.param_bytes + self.grad_bytes if level.has_param_on_host else 0
        return params_bytes + (self.state_bytes if level.has_state_on_host else 0)

    def gather_s(self, level: Level, cluster: Cluster) -> float:
        """Return the seconds in which the parameters come to the device."""
        return copy_s(self.param_bytes, cluster.h2d) if level.has_param_on_host else 0.0

    def update_s(self, level: Level, cluster: Cluster) -> float:
        """Return the seconds of the update behind the last backward, with the copies that it needs."""
        if not self.numel:
            return 0.0
        if not level.has_state_on_host:
            return cluster.device.launch_s + self.numel / cluster.device.update_elements_per_s
        update_s = self.numel * cluster.num_local_ranks / cluster.host.update_elements_per_s
        update_s += copy_s(self.grad_bytes, cluster.d2h)
        return update_s if level.has_param_on_host else update_s + copy_s(self.param_bytes, cluster.h2d)


class StageCosts:
    """The layers of a step on one micro-batch, and the seconds and bytes of every stage that they can make."""

    def __init__(
        self,
        step: LayeredStep,
        treatments: Sequence[Treatment],
        trained: Mapping[StorageId, Param],
        clusters: Sequence[Cluster],
    ) -> None:
        """Count each layer in each of `treatments`, the first of which keeps all activations, on the device of each of
        `clusters`, the classes of ranks."""
        self.step, self.treatments, self.trained = step, tuple(treatments), trained
        self.clusters = tuple(clusters)
        kinds = {storage.id: storage.kind for storage in step.graph.storages}
        self._params: list[set[StorageId]] = [set() for _ in step.layers]
        """The parameters that each layer reads."""
        self._inputs: list[set[StorageId]] = [set() for _ in step.layers]
        """The inputs of the model and the buffers that the forward of each layer reads."""
        for op in step.graph.ops:
            at = step.numbers.get(op.id)
            if at is not None:
                self._params[at].update(name for name in op.reads if kinds[name] is Kind.PARAM)
                if op.phase is Phase.FORWARD:
                    self._inputs[at].update(name for name in op.reads if kinds[name] in (Kind.INPUT, Kind.BUFFER))
        self._steps = [step.run_as(as_run(step.graph, each.activations)) for each in self.treatments]
        """The step as it runs in each treatment."""
        self._saved: list[list[set[StorageId]]] = []
        """The activations of the forward that the backward of each layer reads, by treatment and layer."""
        self._running: list[list[int]] = []
        """The most bytes that each layer holds beside its saved activations, by treatment and layer."""
        for own in self._steps:
            kinds = {storage.id: storage.kind for storage in own.graph.storages}
            made: set[StorageId] = set()
            read: list[set[StorageId]] = [set() for _ in own.layers]
            for op in own.graph.ops:
                if op.phase is Phase.FORWARD:
                    made.update(name for name in op.writes if kinds[name] in (Kind.TEMP, Kind.SAVED))
                elif op.phase is Phase.BACKWARD:
                    read[own.numbers[op.id]].update(made.intersection(op.reads))
            self._saved.append(read)
            memories = [stage_memory(own.stage_graph(at, at + 1)) for at in range(len(own.layers))]
            self._running.append([max(each.forward_bytes, each.backward_bytes) - each.saved_bytes for each in memories])
        self._rows: dict[int, tuple[StageFacts, ...]] = {}
        self._seconds: dict[tuple[int, int], tuple[tuple[float, ...], tuple[float, ...]]] = {}

    def shared_with_earlier(self, first: int, end: int) -> tuple[StorageId, ...]:
        """Return the parameters of the layers from `first` up to `end` that an earlier layer reads too."""
        earlier, own = set[StorageId]().union(*self._params[:first]), set[StorageId]().union(*self._params[first:end])
        return tuple(sorted(own & earlier))

    def facts(self, first: int, end: int) -> StageFacts:
        """Return the bytes of the layers from `first` up to, not including, `end`."""
        if first in self._rows:
            return self._rows[first][end - first - 1]
        nbytes, crossings, trained = self.step.nbytes, (*self.step.crossings, ()), self.trained
        params: set[StorageId] = set()
        inputs: set[StorageId] = set()
        saved: list[set[StorageId]] = [set() for _ in self.treatments]
        running, largest_grad_bytes = [0] * len(saved), 0
        received = set(crossings[first])
        found: list[StageFacts] = []
        for at in range(first, len(self.step.layers)):
            own = self._params[at]
            params |= own
            inputs |= self._inputs[at]
            grads_bytes = sum(trained[name].grad_nbytes for name in own if name in trained)
            largest_grad_bytes = max(largest_grad_bytes, grads_bytes)
            own_params = [trained[name] for name in params if name in trained]
            for number, kept in enumerate(saved):
                kept |= self._saved[number][at] - received
                running[number] = max(running[number], self._running[number][at])
            sent = set(crossings[at + 1])
            found.append(
                StageFacts(
                    numel=sum(param.numel for param in own_params),
                    param_bytes=sum(nbytes[name] for name in params),
                    grad_bytes=sum(param.grad_nbytes for param in own_params),
                    state_bytes=sum(param.state_nbytes for param in own_params),
                    largest_grad_bytes=largest_grad_bytes,
                    input_bytes=sum(nbytes[name] for name in inputs),
                    received_bytes=sum(nbytes[name] for name in received),
                    sent_bytes=sum(nbytes[name] for name in sent),
                    saved_bytes=tuple(sum(nbytes[name] for name in kept | (sent - received)) for kept in saved),
                    running_bytes=tuple(running),
                )
            )
        self._rows[first] = tuple(found)
        return found[end - first - 1]

    def stage_s(self, rank_class: int, treatment: int, first: int, end: int) -> tuple[float, float]:
        """Return the seconds of a forward and of a backward of the layers from `first` up to `end` on one
        micro-batch."""
        key = (rank_class, treatment)
        if key not in self._seconds:
            step = self._steps[treatment]
            layer_s = {phase: [0.0] * len(step.layers) for phase in (Phase.FORWARD, Phase.BACKWARD)}
            for op, op_s in seconds_of_ops(step.graph, self.clusters[rank_class]):
                if op.id in step.numbers:
                    layer_s[op.phase][step.numbers[op.id]] += op_s
            # The seconds of all layers before each layer.
            before = [tuple(accumulate(own, initial=0.0)) for own in layer_s.values()]
            self._seconds[key] = before[0], before[1]
        forward, backward = self._seconds[key]
        return forward[end] - forward[first], backward[end] - backward[first]


# ----------------------------------------------------------------------------------------------------------------------
# Count the bytes of a chosen stage op by op: under the plan that its treatment and its homes make.
#
#   layers of the stage --tangents, update--> step --one level, one mode per layer--> plan --> bytes in the schedule


ENDLESS_BYTES = 1 << 60
"""More bytes than any memory has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageQuestion:
    """A stage whose bytes are counted, and how it runs."""

    stage: int
    first: int
    end: int
    """Its layers are those from `first` up to, not including, `end`."""
    level: Level
    """The homes of its parameters and its state."""
    modes: tuple[int, ...]
    """How each of its layers saves activations."""


def stage_bytes(
    asked: StageQuestion,
    step: LayeredStep,
    order: PipelineOrder,
    trained: Mapping[StorageId, Param],
    cluster: Cluster,
    savings: frozenset[Saving],
) -> StageBytes:
    """Return the bytes of the stage `asked` in the schedule `order`; `savings` are those of its modes."""
    graph = _with_ends(step.stage_graph(asked.first, asked.end), trained)
    problem = Problem(
        name=graph.name,
        graph=graph,
        cluster=cluster.alone(),
        budget_bytes=ENDLESS_BYTES,
        host_budget_bytes=ENDLESS_BYTES,
        params={
            storage.id: Param(is_trained=True, state_nbytes=trained[storage.id].state_nbytes)
            for storage in graph.storages
            if storage.kind is Kind.PARAM and storage.id in trained
        },
        hybrid=True,
        savings=savings,
        calls=calls_of_stage(order, asked.stage),
    )
    kept = gather_facts(problem)
    facts = gather_facts(problem, kept, asked.modes) if any(asked.modes) else kept

    def nearest(choices: Sequence[Level]) -> Level:
        """Return the level with the homes of the stage, or else the furthest: a bucket without state has none of its
        own."""
        away = asked.level.has_state_on_host
        same = [own for own in choices if own.home is asked.level.home and own.has_state_on_host is away]
        return same[-1] if same else choices[-1] if away else choices[0]

    levels = tuple(asked.level if asked.level in choices else nearest(choices) for choices in facts.choices)
    return StageBytes(graph, written(facts, draft_at_use(facts, levels)))


def _with_ends(graph: StepGraph, trained: Mapping[StorageId, Param]) -> StepGraph:
    """Return the step of a stage as a capture of the stage has it: the first op of the backward gets the gradients that
    the next stage sends, and an update ends it."""
    ops = list(graph.ops)
    begin = next((at for at, op in enumerate(ops) if op.phase is Phase.BACKWARD), len(ops))
    read = {name for op in ops[:begin] for name in op.reads}
    given = {storage.id for storage in graph.storages if storage.kind is Kind.INPUT and storage.id not in read}
    if begin < len(ops):
        first, names = ops[begin], tuple(sorted(given))
        reads, writes = (tuple(dict.fromkeys((*names, *own))) for own in (first.reads, first.writes))
        ops[begin] = replace(first, reads=reads, writes=writes)
    storages = tuple(replace(own, kind=Kind.TEMP) if own.id in given else own for own in graph.storages)
    grads = [own for own in storages if own.kind is Kind.GRAD and own.of in trained]
    reads = tuple(dict.fromkeys(name for own in grads for name in (own.of, own.id) if name is not None))
    if reads:
        ops.append(Op(id=OpId("update"), target="elixir.update", phase=Phase.UPDATE, reads=reads, writes=()))
    return replace(graph, ops=tuple(ops), storages=storages)


def calls_of_stage(order: PipelineOrder, stage: int) -> Calls:
    """Return the calls of `stage` in a step, with the tensors that torch's schedule holds for it meanwhile."""
    number, is_first, is_last = order.num_micro_batches, stage == 0, stage == order.num_stages - 1
    num_sent = 1 if order.schedule is TorchSchedule.ONE_F_ONE_B else number
    outstanding = outstanding_forwards(order, stage)
    return Calls.of_stage(number, outstanding, is_first=is_first, is_last=is_last, num_sent=num_sent)


def recomputed_modes(layers: Sequence[Layer], share: Fraction) -> tuple[int, ...]:
    """Return the mode of each of `layers` if so many of them, from the first on, are computed again that at least a
    `share` of the bytes is free that all of them would free."""
    deepest_modes = modes_at_depth(layers)
    freed = [
        sum(group.nbytes for group in layer.groups if saving_of(group, layer.modes[mode]) is Saving.RECOMPUTE)
        for layer, mode in zip(layers, deepest_modes, strict=True)
    ]
    before = accumulate(freed, initial=0)
    target_bytes = share * sum(freed)
    return tuple(mode if done < target_bytes else 0 for mode, done in zip(deepest_modes, before, strict=False))


def most_sent_bytes(order: PipelineOrder, stage: int, facts: StageFacts) -> int:
    """Return the most bytes of outputs that `stage` holds after their backward, and of gradients that it has sent."""
    calls = calls_of_stage(order, stage)
    num_outputs = min(calls.more_outputs, calls.num - calls.outstanding)
    return num_outputs * facts.sent_bytes + (calls.input_grads if stage else 0) * facts.received_bytes


def rank_peaks(order: PipelineOrder, stages: Sequence[StageBytes]) -> tuple[int, ...]:
    """Return the most bytes on the device of each rank in a step of `order`."""
    found: list[int] = []
    for rank in range(order.num_ranks):
        runs = [Run(run.stage // order.num_ranks, run.phase, run.micro_batch) for run in order.runs(rank)]
        peaks = stage_peaks([[own] for own in stages[rank :: order.num_ranks]], runs)
        found.append(max(peak.nbytes for peak in peaks))
    return tuple(found)


def alone_peak(order: PipelineOrder, stage: int, nbytes: StageBytes) -> int:
    """Return the most bytes of `stage` alone in a step of `order`."""
    runs = order.runs(stage % order.num_ranks)
    own = [Run(0, run.phase, run.micro_batch) for run in runs if run.stage == stage]
    return stage_peaks([[nbytes]], own)[0].own_bytes
