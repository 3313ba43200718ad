"""Plans with full and lean calls, made without a search, and chains whose activations are larger than parameters."""

from collections.abc import Sequence
from dataclasses import replace

from elixir_compile.ir import Calls, Kind, Op, OpId, Phase, Plan, StepGraph, StorageId
from elixir_compile.search import Problem, plan
from elixir_compile.search.evaluator import DraftPlan, Evaluator
from elixir_compile.search.lean_calls import paired
from elixir_compile.search.reasons import written
from elixir_compile.search.space.buckets import Level
from elixir_compile.search.space.facts import gather_facts
from elixir_compile.search.space.profiles import moves_at_use
from tests.pure.search.test_planner import problem_of
from tests.pure.strategies import DraftPlan as DraftGraph


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
