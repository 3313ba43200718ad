"""Problems for the planner, tight ones and pairs of full and lean programs among them, and the best plan by brute
force."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import strategies as st

from elixir_compile.base.errors import NoFeasiblePlan
from elixir_compile.base.options import Planner
from elixir_compile.base.units import GIB
from elixir_compile.ir import Calls, Kind, Op, OpId, Phase, Plan, StepGraph, StorageId, cost
from elixir_compile.ir.hardware import Cluster, profile_for
from elixir_compile.search import Problem, plan
from elixir_compile.search.evaluator import DraftPlan, Evaluator
from elixir_compile.search.greedy import MAX_PLACEMENTS, num_placements, place_exhaustively
from elixir_compile.search.lean_calls import paired
from elixir_compile.search.reasons import write_out, written
from elixir_compile.search.space.buckets import Level
from elixir_compile.search.space.facts import gather_facts
from elixir_compile.search.space.profiles import moves_at_use
from elixir_compile.step import verify
from tests.pure import memory_walk
from tests.pure.strategies import FACTS, Layer, chain, step_graphs, with_facts
from tests.pure.strategies import DraftPlan as DraftGraph

# ----------------------------------------------------------------------------------------------------------------------
# The best of all placements of a small problem, each of them tried: what planners are compared with.


def best_of_all(problem: Problem) -> Plan | None:
    """Return the verified plan with the shortest step of all levels of each bucket with all modes of each layer; None
    if none of them fits. Fails for a problem with more than `MAX_PLACEMENTS` of them."""
    evaluator = Evaluator(gather_facts(problem))
    assert num_placements(evaluator) <= MAX_PLACEMENTS
    draft = place_exhaustively(evaluator)
    if draft is None:
        return None
    made = write_out(evaluator, draft)
    verify(problem.graph, made)
    return made


# ----------------------------------------------------------------------------------------------------------------------
# Problems of small machines, and the budgets between the least and everything.


CLUSTERS = {name: profile_for(name, GIB, GIB, name) for name in ("cpu", "cuda")}


PEER = replace(CLUSTERS["cuda"].h2d, bytes_per_s=1e11)


CLUSTERS["2 x cuda"] = Cluster(nodes=(replace(CLUSTERS["cuda"].nodes[0], num_devices=2, peer=PEER),))


def state_of(graph: StepGraph) -> dict[StorageId, int]:
    """Adam's two moments for every parameter with a gradient."""
    return {s.of: 2 * s.nbytes for s in graph.storages if s.kind is Kind.GRAD and s.of is not None}


def problem_of(graph: StepGraph, cluster: Cluster = CLUSTERS["cuda"], hybrid: bool = True, **more: object) -> Problem:
    """Sizes of the strategy's graphs: buckets from 256 bytes to 2 KiB. `more` are fields of the problem, and of its
    parameters by their names."""
    facts: dict[str, Any] = {"state_nbytes": state_of(graph)} | {name: more.pop(name) for name in FACTS & more.keys()}
    fields: dict[str, Any] = {"budget_bytes": GIB, "host_budget_bytes": GIB, "hybrid": hybrid}
    fields |= {"bucket_min_bytes": 256, "bucket_max_bytes": 2048, "params": with_facts({}, **facts)}
    return Problem(**{"name": "t", "graph": graph, "cluster": cluster, **fields, **more})


@st.composite
def problems(draw: st.DrawFn, training: bool | None = None, clusters: Sequence[str] = tuple(CLUSTERS)) -> Problem:
    graph, cluster = draw(step_graphs(training=training)), CLUSTERS[draw(st.sampled_from(clusters))]
    sums = draw(st.sampled_from([0, 1, 2]))
    return problem_of(
        graph,
        cluster,
        hybrid=draw(st.booleans()),
        sum_nbytes={name: nbytes * sums // 2 for name, nbytes in state_of(graph).items() if sums},
        base_bytes=draw(st.sampled_from([0, 300])),
    )


def needed_bytes(problem: Problem, planner: Planner = "greedy") -> int:
    """The smallest budget that would do, as the error names it."""
    with pytest.raises(NoFeasiblePlan) as caught:
        plan(replace(problem, budget_bytes=0), planner)
    return caught.value.needed_bytes


def between(problem: Problem, share: float) -> Problem:
    """The problem with a budget that is `share` of the way from the smallest that would do to keep-everything."""
    low, high = needed_bytes(problem), plan(problem).prediction.device_peak_bytes
    return replace(problem, budget_bytes=low + int((high - low) * share))


def chain_of(num_layers: int) -> StepGraph:
    layer = [Layer(module=f"h.{i}", params=((f"p{i}", 400),), frozen=False, act_numel=64) for i in range(num_layers)]
    return chain(layer)


# ----------------------------------------------------------------------------------------------------------------------
# Problems whose answer moves buckets, whatever planner is asked.


def tight_problem(share: float = 0.45) -> Problem:
    """Return a chain of six layers under `share` of the bytes that it takes with everything on the device."""
    problem = problem_of(chain_of(6))
    kept = plan(problem, "keep_all")
    return replace(problem, budget_bytes=int(share * kept.prediction.device_peak_bytes))


@contextmanager
def disk_staging(nbytes: int) -> Iterator[None]:
    """Inside, the buffers through which state on disk passes take `nbytes`: those that there are are larger than all
    of these problems."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (cost, memory_walk):
            patch.setattr(module, "disk_staging_bytes", lambda buckets, with_params=(): nbytes if list(buckets) else 0)
        yield


# ----------------------------------------------------------------------------------------------------------------------
# Plans with full and lean calls, made without a search, and chains whose activations are larger than parameters.


def mlp_chain(num_layers: int, numel: int = 512) -> StepGraph:
    """Return the step of layers with two matrix products round an elementwise op; the wider activations, of four times
    `numel` elements, can be recomputed."""
    draft = DraftGraph(dtype="float32")
    flowing = draft.storage("x", Kind.INPUT, numel)
    used: list[tuple[StorageId, ...]] = []
    for i in range(num_layers):
        module, is_last = f"h.{i}", i == num_layers - 1
        up, down = (draft.storage(f"{name}{i}", Kind.PARAM, 100) for name in ("up", "down"))
        wide, act = (draft.storage(f"{name}{i}", Kind.SAVED, 4 * numel) for name in ("u", "g"))
        out = draft.storage("out" if is_last else f"s{i}", Kind.TEMP if is_last else Kind.SAVED, numel)
        draft.op(Phase.FORWARD, "mm", [flowing, up], [wide], module)
        draft.op(Phase.FORWARD, "gelu", [wide], [act], module)
        draft.op(Phase.FORWARD, "mm", [act, down], [out], module)
        used.append((flowing, up, wide, act, down))
        flowing = out
    outputs, trained = (flowing,), list[StorageId]()
    flowing = draft.storage("tangent", Kind.INPUT, numel)
    for i, (before, up, wide, act, down) in reversed(list(enumerate(used))):
        module = f"h.{i}"
        up_grad, down_grad = (draft.storage(f"{name}.grad", Kind.GRAD, 100, of=name) for name in (up, down))
        wide_grad = draft.storage(f"dg{i}", Kind.TEMP, 4 * numel)
        act_grad = draft.storage(f"du{i}", Kind.TEMP, 4 * numel)
        passed = draft.storage(f"d{i}", Kind.TEMP, numel)
        draft.op(Phase.BACKWARD, "mm", [act, flowing], [down_grad], module)
        draft.op(Phase.BACKWARD, "mm", [flowing, down], [wide_grad], module)
        draft.op(Phase.BACKWARD, "gelu_backward", [wide, wide_grad], [act_grad], module)
        draft.op(Phase.BACKWARD, "mm", [before, act_grad], [up_grad], module)
        draft.op(Phase.BACKWARD, "mm", [act_grad, up], [passed], module)
        trained += [up, up_grad, down, down_grad]
        flowing = passed
    draft.ops.append(Op(id=OpId("update"), target="update", phase=Phase.UPDATE, reads=tuple(trained), writes=()))
    storages = tuple(draft.storages.values())
    return StepGraph(name="mlp", ops=tuple(draft.ops), storages=storages, outputs=outputs, aliases=())


def problem_of_mlps(calls: Calls, num_layers: int = 4, share: float = 1.0) -> Problem:
    """Return a problem of `mlp_chain` in steps of `calls`, under `share` of what it takes with everything kept."""
    problem = problem_of(mlp_chain(num_layers), calls=calls)
    return replace(problem, budget_bytes=int(share * kept(problem).prediction.device_peak_bytes))


def kept(problem: Problem) -> Plan:
    """Return the plan that keeps everything on the device, without a limit."""
    return plan(replace(problem, budget_bytes=1 << 40), "keep_all")


def plan_at(problem: Problem, levels: Sequence[Level], modes: Sequence[int]) -> Plan:
    """Return the plan of these levels and modes, each transfer at its use."""
    facts = gather_facts(problem, None if not any(modes) else gather_facts(problem), modes)
    moves = moves_at_use(facts, levels)
    draft = DraftPlan(levels=tuple(levels), modes=tuple(modes), moves=moves, step_s=0.0, decisions=())
    return written(facts, draft)


def pair_of(
    problem: Problem, full: Sequence[int], lean: Sequence[int], num_full: int, levels: Sequence[Level] = ()
) -> Plan:
    """Return the plan with full calls of the modes `full`, lean ones of the modes `lean`, and a budget of its peak."""
    levels = levels or Evaluator(gather_facts(problem)).facts.start_levels
    made = paired(problem, plan_at(problem, levels, full), plan_at(problem, levels, lean), num_full)
    return replace(made, budget_bytes=made.prediction.device_peak_bytes)
