"""Find the layers at which a captured step can be cut into the stages of a pipeline, count the bytes of a stage and of
the rank that runs it, and play a step of all ranks.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from elixir_compile.base.errors import InvalidPlan
from elixir_compile.ir import Kind, Phase, Plan, StepGraph, StorageId, Tier, Verb
from elixir_compile.ir.graph import is_numbered, layer_of
from elixir_compile.ir.hardware import Link
from elixir_compile.ir.pipeline import PipelineAction, PipelineOrder
from elixir_compile.step.bucket_bytes import (
    CallKind,
    Ops,
    bytes_at,
    input_bytes,
    output_bytes,
    outputs_held,
    resting,
    sum_nbytes,
)
from elixir_compile.step.divide import tangents_of_step
from elixir_compile.step.liveness import liveness
from elixir_compile.step.plan_rows import Beside, Course, Half, PlanRows, TwoPrograms

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
    params = {storage.id for storage in graph.storages if storage.kind is Kind.PARAM}
    forward = (op for op in graph.ops if op.phase is Phase.FORWARD)
    with_params = {layer_of(op.module) for op in forward if not params.isdisjoint(op.reads)}.intersection(modules)
    # Each group has parameters; modules without a number stay together beside numbered layers.
    has_numbers = any(is_numbered(module) for module in with_params)
    groups: list[list[str]] = []
    for before, module in zip([None, *modules], modules, strict=False):
        joins = has_numbers and before is not None and not is_numbered(module) and not is_numbered(before)
        if groups and (joins or module not in with_params or with_params.isdisjoint(groups[-1])):
            groups[-1].append(module)
        else:
            groups.append([module])
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
    num_forward, lives = Ops.of(step).num_forward, liveness(step).lives
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


class _Step:
    """A running step of a stage."""

    def __init__(self, stage: "StageBytes") -> None:
        self._stage, self._course = stage, Course(stage.calls, stage.most_full)

    def run(self, run: Run) -> int:
        """Run one call, and return its most bytes."""
        return self._stage.run_bytes(*self._course.run(run.micro_batch, is_backward=run.phase is Phase.BACKWARD))

    def idle_bytes(self, *, is_over: bool = False) -> int:
        """Return the bytes between two runs."""
        course = self._course
        return self._stage.idle_bytes(Done(course.started, course.ended, course.num_lean), is_over=is_over)


class StageBytes:
    """The bytes of one stage under its plan, while it runs and between its runs."""

    def __init__(self, graph: StepGraph, plan: Plan) -> None:
        self.calls = plan.calls
        self.most_full = plan.most_full
        """The most full forwards that wait for their backward."""
        self._programs = TwoPrograms.of(graph, plan)
        self._held = _Held.of(self._programs.full.rows)
        self._buckets = _BucketBytes.of(self._programs.full.rows)

    def run_bytes(self, half: Half, beside: Beside) -> int:
        """Return the most bytes during `half`."""
        own_bytes, _ = (self._programs.lean if half.is_lean else self._programs.full).alone(half)
        return own_bytes + self._beside_bytes(beside, self.calls.input_grads - 1)

    @property
    def update_bytes(self) -> int:
        """The most bytes during the update."""
        num, ops = self.calls.num, self._programs.full.rows.axis.ops
        if ops.num_run == ops.num:
            return self.idle_bytes(Done(num, num), is_over=True)
        return self._programs.full.alone(Half(False, True, num == 1, True, num > 1))[1]

    def _beside_bytes(self, beside: Beside, most_input_grads: int) -> int:
        """Return the bytes of outstanding forwards, and of the outputs and gradients that the caller holds after the
        backward passes that are done."""
        calls, (num_full, num_lean, num_done) = self.calls, beside
        num_waiting = num_full + num_lean
        num_outputs = int(outputs_held(num_waiting, num_done, calls.num, calls))
        nbytes = num_full * self._programs.full.waiting_bytes + num_lean * self._programs.lean.waiting_bytes
        return nbytes + num_outputs * self._held.outputs + min(num_done, most_input_grads) * self._held.inputs

    def idle_bytes(self, done: Done, *, is_over: bool = False) -> int:
        """Return the bytes between two runs; `is_over` if the caller holds no gradients and no outputs of the step any
        more."""
        calls, buckets, (started, ended, num_lean) = self.calls, self._buckets, done
        nbytes = self._held.always + self._held.outside_grads * (ended > 0)
        if not is_over:
            given = calls.input_grads if calls.input_grads > 1 else 0
            nbytes += self._held.buffers + self._beside_bytes(
                Beside(started - ended - num_lean, num_lean, ended), given
            )
        if ended == calls.num:
            return nbytes + buckets.updated
        if calls.alternate:
            copies_bytes = buckets.copies_backward if started else 0
        elif ended:
            copies_bytes = buckets.copies_backward
        else:
            copies_bytes = buckets.copies_between if started == calls.num else buckets.copies_forward * (started > 0)
        return nbytes + buckets.resting + copies_bytes + buckets.sums * (ended > 0)


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
        tangents = tangents_of_step(step) if calls.output_grads > 1 else ()
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
        between, last = (
            rows.in_call(CallKind(is_first=False, is_last=is_last, alternate=plan.calls.alternate))
            for is_last in (False, True)
        )
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


# ----------------------------------------------------------------------------------------------------------------------
# Play a step of a pipeline: when each rank runs each stage on each micro-batch, its messages, and its bytes.
#
#   rank 0  0F0 0F1 .   .   0B0 .   0B1 update
#   link      >>  >>      <<      <<                a message begins when it is sent and the link is free
#   rank 1      . 1F0 1B0 1F1 1B1 update
#
# Each pair of ranks has a link in each direction, which sends one message at a time. A link that does not overlap
# compute takes the time of the sender. Not modelled: a message that waits for its receiver, as where a library sends
# large tensors only once a receive is posted; and ranks whose stages take different seconds from micro-batch to micro-
# batch.


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds:
    """The seconds of one stage on its rank, and the bytes of its messages."""

    forward_s: float
    """The forward of a micro-batch."""
    backward_s: float
    """The backward of a micro-batch, with the activations that it computes again."""
    gather_s: float = 0.0
    """Until the parameters are on the device, if they come there for the first forward and again for the first
    backward; they come while those run."""
    update_s: float = 0.0
    """The update behind the last backward of the rank."""
    sent_bytes: int = 0
    """Bytes of the message of a forward to the next stage; as many bytes of gradients come back. 0 for the last
    stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRun:
    """One forward or backward of a stage in the played step."""

    action: PipelineAction
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlayed:
    """One rank in the played step."""

    runs: tuple[StageRun, ...]
    busy_s: float
    """Seconds of its forwards, backwards and update."""
    end_s: float
    """When its update is over."""
    sent_bytes: int
    received_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePlayed:
    """A played step of all ranks."""

    step_s: float
    ranks: tuple[RankPlayed, ...]

    def bubble(self, rank: int) -> float:
        """Return the share of the step in which `rank` does nothing, 0 to 1."""
        return 1 - self.ranks[rank].busy_s / self.step_s if self.step_s else 0.0


def play_pipeline(
    order: PipelineOrder, stages: Sequence[StageSeconds], link: Callable[[int, int], Link | None]
) -> PipelinePlayed:
    """Return a step of `order` with the seconds of `stages`.

    `link` returns the link from one rank to another; None for messages that take no time. Raises InvalidPlan if a rank
    waits for a message that no rank sends.
    """
    if len(stages) != order.num_stages:
        raise InvalidPlan(f"{len(stages)} stages are played in an order of {order.num_stages}.")
    player = _Player(order, stages, link)
    waiting = list(range(order.num_ranks))
    while waiting:
        before = player.num_done
        waiting = [rank for rank in waiting if player.advance(rank)]
        if waiting and player.num_done == before:
            raise InvalidPlan(f"the order of {order.schedule} waits for a message that is never sent.")
    return player.played()


@dataclass(slots=True)
class _Rank:
    """Where one rank is."""

    now_s: float = 0.0
    place: int = 0
    busy_s: float = 0.0
    sent_bytes: int = 0
    received_bytes: int = 0


class _Player:
    """The state of a played step."""

    def __init__(
        self, order: PipelineOrder, stages: Sequence[StageSeconds], link: Callable[[int, int], Link | None]
    ) -> None:
        self._order, self._stages, self._link = order, stages, link
        self._ranks = [_Rank() for _ in range(order.num_ranks)]
        self._runs: list[list[StageRun]] = [[] for _ in self._ranks]
        self._arrivals: dict[PipelineAction, float] = {}
        """When the message of each run that was sent is there, by its `send`."""
        self._free_s: dict[tuple[int, int], float] = {}
        self._started: set[tuple[int, Phase]] = set()
        self.num_done = 0

    def advance(self, number: int) -> bool:
        """Play the actions of rank `number` until it waits for a message not yet sent; return whether any are left."""
        rank, actions = self._ranks[number], self._order.actions[number]
        while rank.place < len(actions):
            action = actions[rank.place]
            if action.verb is Verb.RECV:
                maker = action.stage - (1 if action.phase is Phase.FORWARD else -1)
                sent = PipelineAction(Verb.SEND, maker, action.phase, action.micro_batch)
                if sent not in self._arrivals:
                    return True
                rank.now_s = max(rank.now_s, self._arrivals[sent])
                rank.received_bytes += self._message_bytes(sent)
            elif action.verb is Verb.RUN:
                stage = self._stages[action.stage]
                run_s = stage.forward_s if action.phase is Phase.FORWARD else stage.backward_s
                ready_s = rank.now_s + run_s
                if (action.stage, action.phase) not in self._started:
                    self._started.add((action.stage, action.phase))
                    ready_s = max(ready_s, rank.now_s + stage.gather_s)
                self._runs[number].append(StageRun(action=action, start_s=rank.now_s, end_s=ready_s))
                rank.busy_s += run_s
                rank.now_s = ready_s
            elif action.verb is Verb.SEND:
                reader = action.stage + (1 if action.phase is Phase.FORWARD else -1)
                other = reader % self._order.num_ranks
                nbytes, link = self._message_bytes(action), self._link(number, other)
                rank.sent_bytes += nbytes
                begin_s = max(rank.now_s, self._free_s.get((number, other), 0.0))
                end_s = begin_s if link is None else begin_s + link.latency_s + nbytes / link.bytes_per_s
                self._free_s[number, other] = self._arrivals[action] = end_s
                if link is not None and not link.overlaps_compute:
                    rank.now_s = end_s
            else:
                sent = PipelineAction(Verb.SEND, action.stage, action.phase, action.micro_batch)
                rank.now_s = max(rank.now_s, self._arrivals[sent])
            rank.place += 1
            self.num_done += 1
        return False

    def _message_bytes(self, action: PipelineAction) -> int:
        """Return the bytes of the `send` of a stage: of the cut behind it, or in the backward before it."""
        return self._stages[action.stage if action.phase is Phase.FORWARD else action.stage - 1].sent_bytes

    def played(self) -> PipelinePlayed:
        found: list[RankPlayed] = []
        for number, rank in enumerate(self._ranks):
            update_s = sum(stage.update_s for stage in self._stages[number :: self._order.num_ranks])
            found.append(
                RankPlayed(
                    runs=tuple(self._runs[number]),
                    busy_s=rank.busy_s + update_s,
                    end_s=rank.now_s + update_s,
                    sent_bytes=rank.sent_bytes,
                    received_bytes=rank.received_bytes,
                )
            )
        return PipelinePlayed(step_s=max(rank.end_s for rank in found), ranks=tuple(found))
