"""Find the layers at which a captured step can be cut into the stages of a pipeline, and count the bytes of a stage and
of the rank that runs it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from elixir_compile.ir import Kind, Phase, Plan, StepGraph, StorageId, Tier
from elixir_compile.ir.graph import is_numbered, layer_of
from elixir_compile.step.bucket_bytes import bytes_at, resting
from elixir_compile.step.call_bytes import CallKind, input_bytes, output_bytes, sum_nbytes, tangents_of
from elixir_compile.step.liveness import liveness
from elixir_compile.step.plan_rows import PlanRows

# ----------------------------------------------------------------------------------------------------------------------
# The layers of a captured step at which it can be cut into the stages of a pipeline, and the step of one stage.
#
#   module   wte wpe | h.0 | h.1 | h.2 | ln_f lm_head      `|` a stage may begin here
#   cut 2            sends the tensors that h.0 or an earlier layer makes and h.1 or a later one reads
#
# The modules before the first numbered layer are a layer too, and so are those after the last; a model without numbered
# layers may be cut before each of its modules. A layer without parameters belongs to the layer before it, because no
# stage may be without parameters. An op belongs to the layer of its module, wherever it is; an op of a module that
# contains layers belongs to the layer of the op before it.


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLayer:
    """Modules that stay together in one stage."""

    modules: tuple[str, ...]
    """Their paths, in the order of their first op: `transformer.wte`, `transformer.wpe`."""

    @property
    def name(self) -> str:
        """The path at which a stage that begins with this layer begins."""
        return self.modules[0]


@dataclass(frozen=True, kw_only=True, eq=False)
class LayeredStep:
    """A captured step, its layers, and the layer of each op."""

    graph: StepGraph
    layers: tuple[StageLayer, ...]
    numbers: Mapping[str, int]
    """The index of the layer of each op of the forward and the backward, by the name of the op."""

    @cached_property
    def crossings(self) -> tuple[tuple[StorageId, ...], ...]:
        """The tensors that cross each cut, by the index of the layer behind it: earlier layers make them of parameters,
        and later layers read them in the forward. Tensors that depend on no parameter, such as positions and masks, are
        not sent: each stage makes them of its own inputs. Nothing crosses the cut before the first layer."""
        made: dict[StorageId, int] = {}
        learned = {storage.id for storage in self.graph.storages if storage.kind is Kind.PARAM}
        last_read: dict[StorageId, int] = {}
        for op in self.graph.ops:
            if op.phase is not Phase.FORWARD:
                continue
            at = self.numbers[op.id]
            for name in op.reads:
                last_read[name] = max(at, last_read.get(name, 0))
            if not learned.isdisjoint(op.reads):
                learned.update(op.writes)
            for name in op.writes:
                made[name] = min(at, made.get(name, at))
        params = {storage.id for storage in self.graph.storages if storage.kind in (Kind.PARAM, Kind.BUFFER)}
        return tuple(
            tuple(
                name
                for name, at in made.items()
                if name in learned and name not in params and at < cut <= last_read.get(name, -1)
            )
            for cut in range(len(self.layers))
        )

    @cached_property
    def nbytes(self) -> Mapping[StorageId, int]:
        return {storage.id: storage.nbytes for storage in self.graph.storages}

    @cached_property
    def crossing_bytes(self) -> tuple[int, ...]:
        """The bytes that cross each cut in the forward; as many gradients come back."""
        return tuple(sum(self.nbytes[name] for name in names) for names in self.crossings)

    def run_as(self, step: StepGraph) -> "LayeredStep":
        """Return the layers of `step`, which is this step with fused or repeated ops."""
        return LayeredStep(graph=step, layers=self.layers, numbers=_numbers(step, self.layers))

    def stage_graph(self, first: int, end: int) -> StepGraph:
        """Return the step of a stage of the layers from `first` up to, not including, `end`.

        Tensors that other stages make are its inputs. It has no update.
        """
        ops = tuple(op for op in self.graph.ops if first <= self.numbers.get(op.id, -1) < end)
        own = {name for op in ops for name in (*op.reads, *op.writes)}
        writes: set[StorageId] = set().union(*(op.writes for op in ops))
        storages = tuple(
            replace(storage, kind=Kind.INPUT)
            if storage.id not in writes and storage.kind in (Kind.SAVED, Kind.TEMP)
            else replace(storage, of=storage.of if storage.of in own else None)
            for storage in self.graph.storages
            if storage.id in own
        )
        sent = self.crossings[end] if end < len(self.layers) else self.graph.outputs
        aliases = tuple((value, name) for value, name in self.graph.aliases if name in own)
        return replace(
            self.graph,
            name=f"{self.graph.name} {self.layers[first].name}",
            ops=ops,
            storages=storages,
            outputs=tuple(name for name in sent if name in own),
            aliases=aliases,
        )


def layered(graph: StepGraph) -> LayeredStep:
    """Return `graph` with its layers."""
    labels = dict.fromkeys(layer_of(op.module) for op in graph.ops if op.phase is Phase.FORWARD)
    prefixes = {label[:dot] for label in labels for dot in (0, *(i for i, c in enumerate(label) if c == "."))}
    modules = [label for label in labels if label not in prefixes] or list(labels)
    groups = _grouped(modules, _with_parameters(graph, modules))
    layers = tuple(StageLayer(modules=tuple(group)) for group in groups)
    return LayeredStep(graph=graph, layers=layers, numbers=_numbers(graph, layers))


def _numbers(graph: StepGraph, layers: Sequence[StageLayer]) -> Mapping[str, int]:
    of_module = {module: at for at, layer in enumerate(layers) for module in layer.modules}
    numbers: dict[str, int] = {}
    at, phase = 0, Phase.FORWARD
    for op in graph.ops:
        if op.phase is Phase.UPDATE:
            continue
        if op.phase is not phase:
            at, phase = len(layers) - 1, op.phase
        at = of_module.get(layer_of(op.module), at)
        numbers[op.id] = at
    return numbers


def _with_parameters(graph: StepGraph, modules: Sequence[str]) -> frozenset[str]:
    params = {storage.id for storage in graph.storages if storage.kind is Kind.PARAM}
    reading = {layer_of(op.module) for op in graph.ops if op.phase is Phase.FORWARD and not params.isdisjoint(op.reads)}
    return frozenset(modules) & reading


def _grouped(modules: Sequence[str], with_parameters: frozenset[str]) -> list[list[str]]:
    """Return `modules` in groups that may be stages: each has parameters; modules without a number stay together
    beside numbered layers."""
    has_numbers = any(is_numbered(module) and module in with_parameters for module in modules)
    groups: list[list[str]] = []
    for before, module in zip([None, *modules], modules, strict=False):
        joins = has_numbers and before is not None and not is_numbered(module) and not is_numbered(before)
        if groups and (joins or module not in with_parameters or with_parameters.isdisjoint(groups[-1])):
            groups[-1].append(module)
        else:
            groups.append([module])
    return groups


# ----------------------------------------------------------------------------------------------------------------------
# The bytes of activations of one stage on one micro-batch: while its forward and its backward run, and in between.
#
#   forward    | inputs elsewhere | makes ...... saved . temp |     most: `forward_bytes`
#   waits      | saved, and the tensors that it has sent      |     `saved_bytes`, once for each outstanding forward
#   backward   | saved . gradients of activations ...........  |    most: `backward_bytes`
#
# A tensor that a stage sends stays until its backward, because torch's stages keep it for autograd. Received tensors
# and gradients are in buffers of the stage, which torch allocates for every micro-batch, so they are not counted here.


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Bytes of activations of a stage on a micro-batch, without parameters, gradients of parameters and inputs."""

    saved_bytes: int
    """Activations of a forward until its backward has ended."""
    forward_bytes: int
    """The most that a running forward holds."""
    backward_bytes: int
    """The most that a running backward holds."""


def stage_memory(step: StepGraph) -> StageMemory:
    """Return the bytes of `step`, which is the step of a stage as a plan runs it."""
    num_forward = sum(op.phase is Phase.FORWARD for op in step.ops)
    lives = liveness(step).lives
    changes = [0] * (len(step.ops) + 1)
    saved_bytes = 0
    sent = set(step.outputs)
    for storage in step.storages:
        life = lives.get(storage.id)
        if life is None or storage.kind not in (Kind.TEMP, Kind.WORKSPACE, Kind.SAVED):
            continue
        last = len(step.ops) - 1 if storage.id in sent else life.last
        if life.first < num_forward and (last >= num_forward or storage.id in sent):
            saved_bytes += storage.nbytes
        changes[life.first] += storage.nbytes
        changes[last + 1] -= storage.nbytes
    most = [0, 0]
    live_bytes = 0
    for at, change in enumerate(changes[:-1]):
        live_bytes += change
        is_backward = at >= num_forward
        most[is_backward] = max(most[is_backward], live_bytes)
    forward_bytes, backward_bytes = most
    return StageMemory(
        saved_bytes=saved_bytes,
        forward_bytes=max(forward_bytes, saved_bytes),
        backward_bytes=max(backward_bytes, saved_bytes),
    )


# ----------------------------------------------------------------------------------------------------------------------
# The bytes of all stages of a pipeline that one rank runs, in the order in which its schedule runs them.
#
#   stage 0   F F . . B . B .     while a stage runs, the others hold all that outlasts their calls: training state,
#   stage 2   . . F F . B . B     outstanding activations, gathered copies, sums of gradients, and what the caller holds
#
# A run of a stage has the bytes of its call, as `timeline` counts them, beside as many other calls as there are then.


class Run(NamedTuple):
    """A forward or a backward of a stage."""

    stage: int
    """The place of the stage among those of the rank."""
    phase: Phase
    micro_batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePeak:
    """The bytes of the stages of a rank, in the run of one of them with the most bytes together."""

    own_bytes: int
    """The running stage."""
    beside_bytes: int
    """The others."""

    @property
    def nbytes(self) -> int:
        """All of them."""
        return self.own_bytes + self.beside_bytes


def stage_peaks(stages: "Sequence[Sequence[StageBytes]]", runs: Iterable[Run]) -> tuple[StagePeak, ...]:
    """Return for each of the `stages` of a rank the run in which all of them together hold the most.

    A stage has the bytes of its graphs, which are counted as if they ran at once. `runs` are the forwards and backward
    passes of a step in order; the updates follow, one after another.
    """
    most = [StagePeak(own_bytes=0, beside_bytes=0)] * len(stages)
    steps = [[_Step(graph) for graph in graphs] for graphs in stages]

    def note(number: int, own_bytes: int, *, is_over: bool = False) -> None:
        others = (step for place, graphs in enumerate(steps) for step in graphs if place != number)
        beside_bytes = sum(step.idle_bytes(is_over=is_over) for step in others)
        found = StagePeak(own_bytes=own_bytes, beside_bytes=beside_bytes)
        most[number] = max(most[number], found, key=lambda peak: peak.nbytes)

    for run in runs:
        note(run.stage, sum(step.run(run) for step in steps[run.stage]))
    for number, graphs in enumerate(stages):
        note(number, sum(graph.update_bytes for graph in graphs), is_over=True)
    return tuple(most)


def most_beside(stage: "Sequence[StageBytes]", number: int, other: int, runs: Iterable[Run]) -> int:
    """Return the most bytes that `stage`, at place `number` of the rank, holds while the stage at place `other` runs or
    is updated."""
    steps, most = [_Step(graph) for graph in stage], 0
    for run in runs:
        if run.stage == other:
            most = max(most, sum(step.idle_bytes() for step in steps))
        elif run.stage == number:
            for step in steps:
                step.run(run)
    return max(most, sum(step.idle_bytes(is_over=True) for step in steps))


class Done(NamedTuple):
    """How far a step of a stage is."""

    started: int = 0
    """Forwards that have run."""
    ended: int = 0
    """Backward passes that have run."""
    num_lean: int = 0
    """Lean calls among the outstanding forwards."""


@dataclass(slots=True)
class _Step:
    """A running step of a stage: a forward is lean if as many full ones wait as the plan has at most."""

    stage: "StageBytes"
    done: Done = field(default_factory=Done)
    waiting: dict[int, bool] = field(default_factory=dict)
    """Whether the forward of each outstanding micro-batch is lean."""

    def run(self, run: Run) -> int:
        """Run one call, and return its most bytes."""
        started, ended, num_lean = self.done
        is_forward = run.phase is Phase.FORWARD
        num_full = started - ended - num_lean
        is_lean = num_full >= self.stage.most_full if is_forward else self.waiting.pop(run.micro_batch)
        nbytes = self.stage.run_bytes(run.phase, self.done, is_lean=is_lean)
        if is_forward:
            self.waiting[run.micro_batch] = is_lean
        self.done = Done(
            started + is_forward, ended + (not is_forward), num_lean + (is_lean if is_forward else -is_lean)
        )
        return nbytes

    def idle_bytes(self, *, is_over: bool = False) -> int:
        """Return the bytes between two runs."""
        return self.stage.idle_bytes(self.done, is_over=is_over)


class StageBytes:
    """The bytes of one stage under its plan, while it runs and between its runs."""

    def __init__(self, graph: StepGraph, plan: Plan) -> None:
        self.calls = calls = plan.calls
        self.most_full = calls.outstanding if plan.lean is None else plan.lean.num_full
        """The most full forwards that wait for their backward."""
        # Outputs that are held after their backward are counted by how many backward passes have ended.
        plan = replace(plan, calls=replace(calls, more_outputs=0))
        full = PlanRows(graph, replace(plan, lean=None))
        lean = full if plan.lean is None else PlanRows(graph, plan.of_lean_calls())
        self._rows = {False: full, True: lean}
        """Of a full and of a lean call."""
        self._by_place: dict[tuple[bool, bool, bool], NDArray[np.int64]] = {}
        self._waiting_bytes, self._lean_bytes = (sum(rows.waiting_bytes.values()) for rows in (full, lean))
        self._held = _Held.of(full)
        self._buckets = _BucketBytes.of(full)

    def run_bytes(self, phase: Phase, done: Done, *, is_lean: bool = False) -> int:
        """Return the most bytes during the next forward or backward, a lean one if `is_lean`."""
        is_backward = phase is Phase.BACKWARD
        number = done.ended if is_backward else done.started
        own, ops = self._alone(number == 0, number >= self.calls.num - 1, is_lean), self._rows[is_lean].axis.ops
        own = own[ops.num_forward : ops.num_run] if is_backward else own[: ops.num_forward]
        num_waiting = done.started - done.ended - is_backward
        num_lean = done.num_lean - (is_backward and is_lean)
        return int(own.max()) + self._beside_bytes(num_waiting, num_lean, done.ended, self.calls.input_grads - 1)

    @property
    def update_bytes(self) -> int:
        """The most bytes during the update."""
        own, num_run = self._alone(self.calls.num == 1, True, False), self._rows[False].axis.ops.num_run
        over = Done(self.calls.num, self.calls.num)
        return int(own[num_run:].max()) if num_run < len(own) else self.idle_bytes(over, is_over=True)

    def _alone(self, is_first: bool, is_last: bool, is_lean: bool) -> NDArray[np.int64]:
        """Return the bytes of a call by position, if no other forward waits and no backward has ended."""
        place = is_first, is_last, is_lean
        if place not in self._by_place:
            self._by_place[place] = _in_call(self._rows[is_lean], is_first=is_first, is_last=is_last).nbytes
        return self._by_place[place]

    def _beside_bytes(self, num_waiting: int, num_lean: int, ended: int, most_input_grads: int) -> int:
        """Return the bytes of `num_waiting` outstanding forwards, `num_lean` of them lean, and of the outputs
        and gradients that the caller holds after `ended` backward passes."""
        calls = self.calls
        num_outputs = min(num_waiting + min(ended, calls.more_outputs), calls.num) + num_waiting * calls.has_loss
        nbytes = (num_waiting - num_lean) * self._waiting_bytes + num_lean * self._lean_bytes
        return nbytes + num_outputs * self._held.outputs + min(ended, most_input_grads) * self._held.inputs

    def idle_bytes(self, done: Done, *, is_over: bool = False) -> int:
        """Return the bytes between two runs; `is_over` if the caller holds no gradients and no outputs of the step any
        more."""
        calls, buckets, (started, ended, num_lean) = self.calls, self._buckets, done
        nbytes = self._held.always + self._held.outside_grads * (ended > 0)
        if not is_over:
            given = calls.input_grads if calls.input_grads > 1 else 0
            nbytes += self._held.buffers + self._beside_bytes(started - ended, num_lean, ended, given)
        if ended == calls.num:
            return nbytes + buckets.updated
        if calls.alternate:
            copies_bytes = buckets.copies_backward if started else 0
        elif ended:
            copies_bytes = buckets.copies_backward
        else:
            copies_bytes = buckets.copies_between if started == calls.num else buckets.copies_forward * (started > 0)
        return nbytes + buckets.resting + copies_bytes + buckets.sums * (ended > 0)


def _in_call(rows: PlanRows, *, is_first: bool, is_last: bool) -> PlanRows:
    return rows.in_call(CallKind(is_first=is_first, is_last=is_last, alternate=rows.plan.calls.alternate), {})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """The bytes outside of buckets that a stage, or the caller for it, holds between two runs."""

    always: int
    """External usage, buffers, parameters outside of buckets, and the inputs of all calls."""
    outside_grads: int
    """Gradients of parameters outside of buckets."""
    buffers: int
    """Buffers that receive the gradients of outputs, of all calls."""
    inputs: int
    """The inputs of one call that are no parts of a larger tensor; a gradient of them has as many bytes."""
    outputs: int
    """The outputs of one call."""

    @classmethod
    def of(cls, rows: PlanRows) -> "_Held":
        step, calls = rows.step, rows.plan.calls
        own_bytes = input_bytes(step, calls)
        tangents = tangents_of(step) if calls.output_grads > 1 else ()
        outside = [own[0] for own in rows.storages.values()]
        kinds = (Kind.PARAM, Kind.BUFFER, Kind.INPUT)
        always_bytes = sum(row.nbytes for row in outside if row.kind in kinds)
        return cls(
            always=rows.plan.base_bytes + always_bytes + (calls.num - 1) * own_bytes,
            outside_grads=sum(row.nbytes for row in outside if row.kind is Kind.GRAD),
            buffers=calls.output_grads * sum(s.nbytes for s in step.storages if s.id in tangents),
            inputs=own_bytes,
            outputs=output_bytes(step),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _BucketBytes:
    """The bytes of all buckets of a stage between two runs."""

    resting: int
    sums: int
    """Of the gradients of several calls."""
    copies_forward: int
    """Gathered copies between two forwards."""
    copies_between: int
    """Between the last forward and the first backward, if all forwards come first."""
    copies_backward: int
    """Between two backward passes, and if they alternate with forwards, between any two calls."""
    updated: int
    """Between the last backward and the update."""

    @classmethod
    def of(cls, rows: PlanRows) -> "_BucketBytes":
        """Count the rows of a call that is neither first nor last, and those of the last call."""
        plan, ops = rows.plan, rows.axis.ops
        homes = {placement.bucket: placement for placement in plan.placements}
        between, last = (_in_call(rows, is_first=False, is_last=is_last) for is_last in (False, True))
        copies = [row for bucket in plan.buckets for row in between.of_bucket(bucket) if row.kind is Kind.GATHERED]
        ending = [row for bucket in plan.buckets for row in last.of_bucket(bucket)]
        is_away = {name: home.param is not Tier.DEVICE for name, home in homes.items()}
        staying = (row for row in ending if row.kind is Kind.GATHERED and row.first < ops.num_forward <= row.last)
        return cls(
            resting=sum(nbytes for bucket in plan.buckets for _, nbytes in resting(bucket, homes[bucket.id])),
            sums=sum(
                sum_nbytes(bucket, rows.births(bucket.id), plan.calls, is_away=is_away[bucket.id])
                for bucket in plan.buckets
            ),
            copies_forward=bytes_at(ops.num_forward - 1, copies),
            copies_between=sum(row.nbytes for row in staying),
            copies_backward=bytes_at(ops.num_run - 1, copies),
            updated=bytes_at(min(ops.num_run, ops.num - 1), ending),
        )
