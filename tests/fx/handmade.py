"""Plans made by hand for captured graphs, and graphs that run in micro-batches op by op."""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from elixir_compile.graph.capture.batch import walk
from elixir_compile.graph.capture.captured import State, States, Walked, states_in
from elixir_compile.ir import (
    Action,
    Activations,
    Batched,
    Bucket,
    BucketId,
    Kind,
    Op,
    Phase,
    Placement,
    Plan,
    Prediction,
    Region,
    RegionId,
    Saving,
    Schedule,
    Shards,
    StepGraph,
    Tier,
    Verb,
    fingerprint,
)
from elixir_compile.ir.schedule import BucketRef, GroupRef, RegionRef
from elixir_compile.search import Problem
from elixir_compile.step import Depth, Group, activation_groups, as_run, with_peaks
from elixir_compile.step.divide import laps
from elixir_compile.step.legality import verify

# ----------------------------------------------------------------------------------------------------------------------
# Plans made by hand: parameters stay on the device, and each group of activations is treated as a test says.


Choice = Callable[[Group], Saving | None]
"""What happens to a group; None leaves it out of the plan."""


def keep(group: Group) -> Saving | None:
    return None if group.is_input else Saving.KEEP


def to_depth(depth: Depth) -> Choice:
    """Recompute every layer to `depth`, from what it is handed where that must be saved for it."""

    def choose(group: Group) -> Saving | None:
        if group.is_input:
            return Saving.KEEP if depth is Depth.FIXED else None
        return Saving.RECOMPUTE if Depth.KEPT < group.depth <= depth else Saving.KEEP

    return choose


def offload(group: Group) -> Saving | None:
    return None if group.is_input else Saving.OFFLOAD


def from_host(group: Group) -> Saving | None:
    """Recompute all that can be, and keep on the host what it is made from."""
    return Saving.OFFLOAD if group.is_input or group.depth is Depth.KEPT else Saving.RECOMPUTE


def mix(group: Group) -> Saving | None:
    """One layer is offloaded, the next is recomputed without its attention, the next kept."""
    if group.is_input:
        return None
    number = sum(map(int, filter(str.isdecimal, group.layer.split("."))), start=0) % 3
    if number == 1:
        return Saving.RECOMPUTE if Depth.KEPT < group.depth <= Depth.MATMUL else Saving.KEEP
    return Saving.OFFLOAD if number == 0 else Saving.KEEP


CHOICES: dict[str, Choice] = {
    "pointwise": to_depth(Depth.POINTWISE),
    "matmul": to_depth(Depth.MATMUL),
    "attention": to_depth(Depth.ATTENTION),
    "fixed": to_depth(Depth.FIXED),
    "offload": offload,
    "from_host": from_host,
    "mix": mix,
}
"""Every way to treat activations that a plan by hand tries; what nothing happens to is `keep`."""


def activations(graph: StepGraph, choose: Choice) -> tuple[Activations, ...]:
    """Return the groups of `graph` with what `choose` says of each."""
    chosen = [(group, choose(group)) for group in activation_groups(graph)]
    return tuple(
        Activations(id=group.id, storages=group.storages, nbytes=group.nbytes, saving=saving)
        for group, saving in chosen
        if saving is not None
    )


def plan_by_hand(
    graph: StepGraph,
    choose: Choice,
    *,
    num_regions: int = 3,
    cluster: str = "1 x cpu",
    waits_late: bool = False,
    micro_batches: int = 1,
) -> Plan:
    """Return a plan of `num_regions` regions each way; with `waits_late` the backward waits for what leaves.

    With `micro_batches` the regions are the laps of the step."""
    chosen = activations(graph, choose)
    step = as_run(graph, chosen)
    bucket = _bucket(graph)
    regions = _regions(step, bucket, num_regions) if micro_batches == 1 else _laps(step, bucket, micro_batches)
    plan = Plan(
        name="by-hand",
        graph=fingerprint(graph),
        cluster=cluster,
        budget_bytes=1 << 40,
        buckets=(bucket,),
        placements=(Placement(bucket=bucket.id, param=Tier.DEVICE, optim=Tier.DEVICE, resident=True),),
        activations=chosen,
        regions=regions,
        schedules=(Schedule(rank=0, actions=tuple(_actions(step, chosen, regions, bucket, waits_late))),),
        decisions=(),
        prediction=_prediction(step),
    )
    plan = with_peaks(graph, plan)
    verify(graph, plan)
    return plan


def _prediction(step: StepGraph) -> Prediction:
    return Prediction(
        step_s=1.0, exposed_s=0.0, hidden_share=1.0, device_peak_bytes=0, device_peak_at=step.ops[0].id,
        host_peak_bytes=0,
    )  # fmt: skip


def _bucket(graph: StepGraph) -> Bucket:
    trained = {storage.of for storage in graph.storages if storage.kind is Kind.GRAD}
    params = [storage for storage in graph.storages if storage.kind is Kind.PARAM]
    assert all(param.id in trained for param in params), "a plan by hand is for models without frozen parameters"
    nbytes = sum(param.nbytes for param in params)
    return Bucket(
        id=BucketId("b0"), params=tuple(param.id for param in params), numel=nbytes // 4, nbytes=nbytes,
        state_nbytes=2 * nbytes, dtype="float32", trainable=True, shard_numels=Shards.of((nbytes // 4,)),
    )  # fmt: skip


def _regions(step: StepGraph, bucket: Bucket, num_regions: int) -> tuple[Region, ...]:
    found: list[Region] = []
    for phase, prefix in ((Phase.FORWARD, "fwd"), (Phase.BACKWARD, "bwd")):
        ops = [op for op in step.ops if op.phase is phase]
        size = -(-len(ops) // num_regions)
        for number, at in enumerate(range(0, len(ops), size)):
            found.append(_region(f"{prefix}.{number}", phase, ops[at : at + size], bucket))
    return tuple(found)


def _laps(step: StepGraph, bucket: Bucket, micro_batches: int) -> tuple[Region, ...]:
    index = {op.id: i for i, op in enumerate(step.ops)}
    found: list[Region] = []
    for number, lap in enumerate(laps(step, micro_batches)):
        ops = step.ops[index[lap.first] : index[lap.last] + 1]
        region = _region(f"{ops[0].phase.value[:3]}.{number}", ops[0].phase, ops, bucket)
        found.append(replace(region, micro_batches=lap.micro_batches))
    return tuple(found)


def _region(name: str, phase: Phase, ops: Sequence[Op], bucket: Bucket) -> Region:
    reads = {storage for op in ops for storage in op.reads}
    buckets = () if reads.isdisjoint(bucket.params) else (bucket.id,)
    return Region(id=RegionId(name), phase=phase, first=ops[0].id, last=ops[-1].id, buckets=buckets)


def _actions(
    step: StepGraph, chosen: Sequence[Activations], regions: Sequence[Region], bucket: Bucket, waits_late: bool
) -> Iterator[Action]:
    leaves, returns = _turns(step, chosen, regions)
    last_forward = max(at for at, region in enumerate(regions) if region.phase is Phase.FORWARD)
    waiting: list[str] = []
    for at, region in enumerate(regions):
        before = [Action(verb=Verb.PREFETCH, target=GroupRef(name)) for name, turn in returns.items() if turn == at]
        if before and waiting:
            yield from (Action(verb=Verb.WAIT, target=GroupRef(name)) for name in waiting)
            waiting = []
        yield from before
        yield from (Action(verb=Verb.WAIT, target=action.target) for action in before)
        yield Action(verb=Verb.RUN, target=RegionRef(region.id))
        if not waits_late:
            yield from (Action(verb=Verb.WAIT, target=GroupRef(name)) for name in waiting)
            waiting = []
        left = [name for name, turn in leaves.items() if turn == at]
        yield from (Action(verb=Verb.OFFLOAD, target=GroupRef(name)) for name in left)
        waiting += left
        if at == last_forward and not waits_late:
            yield from (Action(verb=Verb.WAIT, target=GroupRef(name)) for name in waiting)
            waiting = []
    yield Action(verb=Verb.REDUCE, target=BucketRef(bucket.id))
    yield Action(verb=Verb.UPDATE, target=BucketRef(bucket.id))


def _turns(
    step: StepGraph, chosen: Sequence[Activations], regions: Sequence[Region]
) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """The region behind which each group leaves, and the one before which it must be there again."""
    index = {op.id: at for at, op in enumerate(step.ops)}
    leaves: dict[str, int] = {}
    returns: dict[str, int] = {}
    for group in chosen:
        if group.saving is not Saving.OFFLOAD:
            continue
        names = set(group.storages)
        for at, region in enumerate(regions):
            ops = step.ops[index[region.first] : index[region.last] + 1]
            touches = any(not names.isdisjoint((*op.reads, *op.writes)) for op in ops)
            if touches and region.phase is Phase.FORWARD:
                leaves[group.id] = at
            elif touches:
                returns.setdefault(group.id, at)
    return leaves, {name: returns[name] for name in leaves if name in returns}


@contextmanager
def planned(monkeypatch: pytest.MonkeyPatch, choose: Choice, **options: Any) -> Iterator[list[Plan]]:
    """Let every training graph be planned by hand inside; yields the plans that were made."""
    made: list[Plan] = []

    def plan_for(problem: Problem, _: object) -> Plan:
        plan = plan_by_hand(
            problem.graph, choose, cluster=problem.cluster.name, **{"micro_batches": problem.micro_batches, **options}
        )
        if problem.accumulates:
            plan = replace(plan, buckets=tuple(replace(bucket, sum_nbytes=bucket.nbytes) for bucket in plan.buckets))
            plan = with_peaks(problem.graph, plan)
        made.append(plan)
        return plan

    with monkeypatch.context() as patch:
        patch.setattr("elixir_compile.session.graph_planner.plan_for", plan_for)
        # The plans that are made must not depend on the accumulation of earlier tests.
        patch.setattr("elixir_compile.session.graph_planner.remembers_accumulation", lambda *_: False)
        yield made


def layers_by_saving(plan: Plan) -> Mapping[Saving, list[str]]:
    """Return the ids of the plan's groups by what happens to them."""
    ordered = sorted(plan.activations, key=lambda group: (group.saving, group.id))
    return {saving: [group.id for group in groups] for saving, groups in groupby(ordered, key=lambda g: g.saving)}


# ----------------------------------------------------------------------------------------------------------------------
# Run a graph in micro-batches op by op, by the states that `graph.capture.batch` found, and put the results
# together.


_aten = torch.ops.aten
SIZES: Mapping[Any, int] = {
    _aten.view.default: 1,
    _aten._unsafe_view.default: 1,
    _aten.reshape.default: 1,
    _aten.expand.default: 1,
    _aten.new_zeros.default: 1,
    _aten.slice_backward.default: 1,
    _aten.select_backward.default: 1,
    _aten.full.default: 0,
    _aten.zeros.default: 0,
    _aten.ones.default: 0,
}
"""The place of the argument that is the shape of the result."""
_ROWS = {_aten.native_group_norm.default: 3, _aten.native_group_norm_backward.default: 5}
"""The place of the argument that is the number of rows."""


def traced(function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> fx.Graph:
    """Return the ATen ops of `function` of copies of its inputs, with fake tensors as the values of its nodes.

    A view of an input, but not of a copy, is taken of the whole input.
    """

    def of_copies(*inputs: torch.Tensor) -> Any:
        return function(*map(torch.clone, inputs))

    return make_fx(of_copies, tracing_mode="fake")(*inputs).graph


def walked(graph: fx.Graph, states: Sequence[State], batch: int) -> Walked:
    """Return the states of `graph` if its inputs have `states`."""
    return walk(graph, dict(zip(graph.find_nodes(op="placeholder"), states, strict=True)), batch)


def mixing(found: Walked) -> dict[str, str]:
    """Return why ops mix the batch, by op."""
    return {str(node.target): why for node, why in found.mixes.items()}


def run_in_micro_batches(
    graph: fx.Graph, found: Walked, inputs: Sequence[torch.Tensor], micro_batches: int
) -> list[torch.Tensor]:
    """Return the outputs of `graph` if each of its ops runs once per micro-batch."""
    parts = [_run_part(graph, found, inputs, micro_batches, at) for at in range(micro_batches)]
    outputs = _leaves(graph.output_node().args[0])
    return [_whole(found.states[node], [part[node] for part in parts]) for node in outputs]


def _leaves(value: Any) -> list[fx.Node]:
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value] if isinstance(value, fx.Node) else []


def _whole(state: States, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    assert isinstance(state, State)
    assert not state.is_total
    if state.is_each:
        return torch.cat(list(parts), dim=state.dim)
    if state.batched is Batched.SUM:
        return torch.stack(list(parts)).sum(0)
    assert all(torch.equal(part, parts[0]) for part in parts)
    return parts[0]


def _run_part(graph: fx.Graph, found: Walked, inputs: Sequence[torch.Tensor], num: int, at: int) -> dict[fx.Node, Any]:
    values: dict[fx.Node, Any] = {}
    left = list(inputs)
    for node in graph.nodes:
        if node.op == "placeholder":
            state = found.states[node]
            values[node] = _slice(left.pop(0), state.dim, num, at) if state.is_each else left.pop(0)
        elif node.target is operator.getitem:
            values[node] = values[node.args[0]][node.args[1]]
        elif node.op == "call_function":

            def read(source: fx.Node, node: fx.Node = node) -> Any:
                dim = found.narrowed.get((node, source))
                return values[source] if dim is None else _slice(values[source], dim, num, at)

            args, kwargs = fx.map_arg((_local_args(node, found, num), dict(node.kwargs)), read)
            values[node] = node.target(*args, **kwargs)
    return values


def _slice(value: torch.Tensor, dim: int, num: int, at: int) -> torch.Tensor:
    size = value.shape[dim] // num
    return value.narrow(dim, at * size, size)


def _local_args(node: fx.Node, found: Walked, num: int) -> tuple[Any, ...]:
    """Return the arguments of `node` with the sizes of one micro-batch."""
    args, state = list(node.args), found.states[node]
    if node.target in SIZES and isinstance(state, State) and state.is_each:
        shape = list(node.meta["val"].shape)
        shape[state.dim] //= num
        args[SIZES[node.target]] = shape
    elif node.target in _ROWS and any(part.is_each for part in states_in(state)):
        args[_ROWS[node.target]] = args[_ROWS[node.target]] // num
    return tuple(args)
