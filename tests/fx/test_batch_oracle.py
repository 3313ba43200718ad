"""DTensor's sharding rules as oracle for `graph.capture.batch_rules`: micro-batches are ranks in time.

A slice per micro-batch is a shard, what is equal for all is replicated, and a sum is a partial value. Each op of a
captured step runs on DTensors over a fake group, with its inputs in the states that `graph.capture.batch` found.
"""

import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import distributed, fx, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from elixir_compile.graph.capture.batch import Walked, step_states
from elixir_compile.graph.capture.batch_call import State, states_in
from elixir_compile.graph.capture.markers import MARKERS
from elixir_compile.ir import Batched
from tests.fx.captures import record_of
from tests.fx.test_batch_states import LENGTH, ROWS, language_model

RANKS = 4
NO_RULE = {"aten.arange.start", "aten.arange.default", "aten.scalar_tensor.default", "aten.full.default"}
"""Ops that make tensors of nothing, which DTensor leaves to each rank."""


@contextmanager
def fake_mesh() -> Iterator[DeviceMesh]:
    """Yield a mesh of ranks that exist in name only."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    try:
        yield init_device_mesh("cpu", (RANKS,))
    finally:
        distributed.destroy_process_group()


def placement_of(state: State) -> Placement:
    by_kind = {Batched.EACH: Shard(state.dim), Batched.SAME: Replicate(), Batched.SUM: Partial()}
    return by_kind[state.batched]


def sharded(value: object, state: State, mesh: DeviceMesh) -> object:
    """Return a DTensor in the shape of `value`, placed as `state` says."""
    if not isinstance(value, torch.Tensor):
        return value
    local = torch.zeros(value.shape, dtype=value.dtype)
    if state.is_each:
        local = local.narrow(state.dim, 0, value.shape[state.dim] // RANKS).contiguous()
    return DTensor.from_local(local, mesh, [placement_of(state)], run_check=False)


def results_of(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def compare(graph: fx.Graph, walked: Walked, mesh: DeviceMesh) -> tuple[int, dict[str, str]]:
    """Return how many ops DTensor places as `walked` says, and the names of the others, each with its target."""
    values: dict[fx.Node, Any] = {}
    num_alike, others = 0, {}
    for node in graph.nodes:
        if node not in walked.states:
            continue
        if node.target is operator.getitem:
            values[node] = values[node.args[0]][node.args[1]]
            continue
        states = states_in(walked.states[node])
        wanted = results_of(node.meta["val"])
        if node.op == "call_function" and node.target not in MARKERS:
            found = placed_by_dtensor(node, values)
            if found == tuple(map(placement_of, states)):
                num_alike += 1
            elif found:
                others[node.name] = str(node.target)
        made = tuple(sharded(value, state, mesh) for value, state in zip(wanted, states, strict=True))
        values[node] = made if isinstance(node.meta["val"], (tuple, list)) else made[0]
    return num_alike, others


def placed_by_dtensor(node: fx.Node, values: Mapping[fx.Node, Any]) -> tuple[object, ...]:
    """Return the placements of the results of `node`; none if DTensor has no rule for it."""
    if str(node.target) in NO_RULE:
        return ()
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
    with CommDebugMode() as communicated:
        results = results_of(node.target(*args, **kwargs))
    if communicated.get_total_counts():
        return ("communicates",)
    return tuple(result.placements[0] for result in results if isinstance(result, DTensor))


class Loss(nn.Module):
    """A language model that returns its loss alone."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.model = language_model(kind)
        self.model.config.use_cache = False  # DTensor has no rule for the copy of an empty cache

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, labels=labels).loss


@pytest.mark.filterwarnings("ignore:DTensor random operators")
@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_dtensor_places_the_values_of_a_step_as_the_rules_say(kind: str) -> None:
    """Two differences: the rule refuses the mean of the losses, for which DTensor has parts that are no sum; and what
    all rows read in slices is here never whole, but DTensor makes it on every rank. With torch 2.11, BERT has another
    mask that is made so, and the DTensor of 2.11 gathers slices to pad them."""
    ids = torch.zeros(ROWS, LENGTH, dtype=torch.long)
    captured = record_of(Loss(kind), ids, ids.clone()).active.captured
    states = step_states(captured)
    with fake_mesh() as mesh:
        num_forward, forward = compare(captured.forward.graph, states.forward, mesh)
        num_backward, backward = compare(captured.backward_module.graph, states.backward, mesh)
    shared = {"gpt2": "aten.where.self", "bert": "aten.embedding.default"}[kind]
    older = {"gpt2": "aten.constant_pad_nd.default", "bert": "aten.where.self"}[kind]
    others = [shared, older] if torch.__version__ < (2, 12) else [shared]
    assert sorted(forward.values()) == sorted(["aten.nll_loss_forward.default", *others])
    assert backward == {}
    assert min(num_forward, num_backward) > 50
