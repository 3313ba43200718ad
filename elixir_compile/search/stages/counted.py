"""Count the bytes of a chosen stage op by op: under the plan that its treatment and its homes make.

```text
  layers of the stage --tangents, update--> step --one level, one mode per layer--> plan --> bytes in the schedule
```
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate

from elixir_compile.ir import Calls, Kind, Op, OpId, Phase, Saving, StepGraph
from elixir_compile.ir.hardware import Cluster
from elixir_compile.ir.pipeline import PipelineOrder, TorchSchedule, outstanding_forwards
from elixir_compile.search.evaluator import DraftPlan
from elixir_compile.search.problem import Problem
from elixir_compile.search.space.facts import gather_facts
from elixir_compile.search.space.levels import Level
from elixir_compile.search.space.modes import Layer, Mode, deepest, depths_of, saving_of
from elixir_compile.search.space.residency import moves_at_use
from elixir_compile.search.stages.costs import StageFacts, TrainedBytes
from elixir_compile.search.writing import written
from elixir_compile.step.activations import Depth
from elixir_compile.step.rank_peak import Run, StageBytes, stage_peaks
from elixir_compile.step.stage_layers import LayeredStep

_ENDLESS = 1 << 60
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
    trained: TrainedBytes,
    cluster: Cluster,
    savings: frozenset[Saving],
) -> StageBytes:
    """Return the bytes of the stage `asked` in the schedule `order`; `savings` are those of its modes."""
    graph = _with_ends(step.stage_graph(asked.first, asked.end), trained)
    problem = Problem(
        name=graph.name,
        graph=graph,
        cluster=cluster.alone(),
        budget_bytes=_ENDLESS,
        host_budget_bytes=_ENDLESS,
        state_nbytes={
            storage.id: trained.state_bytes[storage.id]
            for storage in graph.storages
            if storage.kind is Kind.PARAM and storage.id in trained.state_bytes
        },
        hybrid=True,
        savings=savings,
        calls=calls_of_stage(order, asked.stage),
    )
    kept = gather_facts(problem)
    facts = gather_facts(problem, kept, asked.modes) if any(asked.modes) else kept
    levels = tuple(
        asked.level if asked.level in choices else _nearest(asked.level, choices) for choices in facts.choices
    )
    moves = moves_at_use(facts, levels)
    draft = DraftPlan(levels=levels, moves=moves, step_s=0.0, modes=facts.modes, decisions=())
    return StageBytes(graph, written(facts, draft))


def _nearest(level: Level, choices: Sequence[Level]) -> Level:
    """Return the level of `choices` with the homes of `level`, or else the furthest: a bucket without state has none of
    its own."""
    same = [own for own in choices if own.home is level.home and own.has_state_on_host is level.has_state_on_host]
    return same[-1] if same else choices[-1] if level.has_state_on_host else choices[0]


def _with_ends(graph: StepGraph, trained: TrainedBytes) -> StepGraph:
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
    grads = [own for own in storages if own.kind is Kind.GRAD and own.of in trained.grad_bytes]
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
    depth = max(depths_of(layers), default=Depth.KEPT)
    deepest_modes = [deepest(layer, depth, leaves=False) for layer in layers]
    freed = [_freed_bytes(layer, layer.modes[mode]) for layer, mode in zip(layers, deepest_modes, strict=True)]
    before = accumulate(freed, initial=0)
    target_bytes = share * sum(freed)
    return tuple(mode if done < target_bytes else 0 for mode, done in zip(deepest_modes, before, strict=False))


def _freed_bytes(layer: Layer, mode: Mode) -> int:
    return sum(group.nbytes for group in layer.groups if saving_of(group, mode) is Saving.RECOMPUTE)


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
