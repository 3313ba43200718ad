"""Ranks agree on one plan, and what one does alone, by mistake, exception or graph break, is an error on all."""

import os
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import elixir_compile as elixir
from elixir_compile.base.errors import NoFeasiblePlan, NotPrepared
from elixir_compile.ir import OpId, Plan, Saving, StepGraph, fingerprint
from elixir_compile.ir.hardware import Cluster
from elixir_compile.runtime.distributed.control import ControlChannel, new_control_channel
from elixir_compile.runtime.distributed.errors import PeerFailed, RanksDiffer
from elixir_compile.search import Problem, plan
from elixir_compile.session.agreement import RollCall, Step, agreed_facts, agreed_plan, roll_call
from elixir_compile.session.rank_facts import plan_digest
from elixir_compile.step import plan_timeline, verify
from tests.pure.problems import CLUSTERS, needed_bytes, problem_of
from tests.pure.strategies import Layer, chain
from tests.run.pipeline_checks import DEFAULTS, WIDTH, Stage, loss_of
from tests.run.processes import spawn
from tests.run.ranks_training import adamw, compiled_with, hybrid

# ----------------------------------------------------------------------------------------------------------------------
# `agreement`: one plan on all ranks, for the smallest budgets of all; what goes wrong on one is raised on all.


NUM_LAYERS = 4


def graph_of(act_numel: int = 64, extra: str = "") -> StepGraph:
    """A chain of layers with one parameter each; `extra` is one more layer."""
    names = [*(f"p{number}" for number in range(NUM_LAYERS)), *([extra] if extra else [])]
    return chain([Layer(module=name, params=((name, 400),), frozen=False, act_numel=act_numel) for name in names])


def uneven_graph(first: int, others: int) -> StepGraph:
    sizes = [first, *([others] * (NUM_LAYERS - 1))]
    return chain(
        [Layer(module=f"p{i}", params=((f"p{i}", 400),), frozen=False, act_numel=size) for i, size in enumerate(sizes)]
    )


def with_own_peak(made: Plan) -> Plan:
    """A plan with no room for more than its leader needs."""
    return replace(made, budget_bytes=made.prediction.device_peak_bytes)


def with_plain_layers() -> StepGraph:
    """Layers with parameters and layers with none, so that regions have more than two ops."""
    params = [((f"p{number}", 400),) if number % 2 else () for number in range(2 * NUM_LAYERS)]
    return chain([Layer(module=f"h{i}", params=own, frozen=False, act_numel=64) for i, own in enumerate(params)])


def with_op_renamed(graph: StepGraph, number: int) -> StepGraph:
    """The graph with another name for one op, as another trace of the model may have."""
    ops = list(graph.ops)
    ops[number] = replace(ops[number], id=OpId("fwd.renamed"))
    return replace(graph, ops=tuple(ops))


def num_inside(made: Plan, graph: StepGraph) -> int:
    """The number of an op that no region begins or ends with."""
    ends = {name for region in made.regions for name in (region.first, region.last)}
    return next(number for number, op in enumerate(graph.ops) if op.id not in ends)


def cluster_of(num_ranks: int) -> Cluster:
    node = CLUSTERS["2 x cuda"].nodes[0] if num_ranks > 1 else CLUSTERS["cuda"].nodes[0]
    return Cluster(nodes=(replace(node, num_devices=num_ranks),))


def question(num_ranks: int, graph: StepGraph | None = None, **more: object) -> Problem:
    return problem_of(graph or graph_of(), cluster_of(num_ranks), **more)


def greedy(problem: Problem) -> Plan:
    return plan(problem, "greedy")


def outcome(call: Callable[[], Plan]) -> dict[str, Any]:
    """What all ranks are asked about a plan or an error."""
    try:
        made = call()
    except Exception as error:
        ranks = list(error.ranks) if isinstance(error, PeerFailed | RanksDiffer) else None
        return {"error": type(error).__name__, "text": str(error), "args": repr(error.args), "ranks": ranks}
    return {
        "digest": plan_digest(made),
        "graph": made.graph,
        "budget_bytes": made.budget_bytes,
        "base_bytes": made.base_bytes,
        "peak_bytes": made.prediction.device_peak_bytes,
        "num_ranks": made.num_ranks,
        "num_left": sum(group.saving is not Saving.KEEP for group in made.activations),
    }


class Garbled(ControlChannel):
    """What `source` says of the plan that it took over arrives as something else, on all ranks."""

    def __init__(self, control: ControlChannel, source: int) -> None:
        super().__init__(control._group, control.ranks, control.rank)
        self._source = source

    def exchange(self, text: str, what: str, doing: str = "") -> tuple[str, ...]:
        said = list(super().exchange(text, what, doing))
        if what == "plans taken over":
            said[self._source] = '["00000000000000000000000000000000"]'
        return tuple(said)


def fails_with(error: Exception) -> Callable[[Problem], Plan]:
    def search(problem: Problem) -> Plan:
        raise error

    return search


def small_search(problem: Problem) -> Plan:
    """A search under a budget that nothing fits."""
    return greedy(replace(problem, budget_bytes=1))


def calls(control: ControlChannel, last: bool) -> dict[str, list[str]]:
    """Roll calls of ranks that run equal graphs, or other ones, with the plan for them at hand or not."""
    own = "é" * 40 + ("b" if last else "a")
    other = roll_call(control, own, "", wants_plan=False)
    found = {
        "equal": roll_call(control, "forward 1", "", wants_plan=False),
        "one plans": roll_call(control, "forward 1" * 20, "", wants_plan=last),
        "other": other,
        "other and planned": roll_call(control, own, other.graph_set_digest, wants_plan=False),
        "other and one plans": roll_call(control, own, other.graph_set_digest, wants_plan=last),
        "equal again": roll_call(control, "forward 1", "" if last else other.graph_set_digest, wants_plan=False),
    }
    return {name: [call.step, call.graph_set_digest] for name, call in found.items()}


def checks(rank: int, world_size: int) -> dict[str, Any]:
    """Every way in which ranks agree or not, one after another with one control."""
    control = new_control_channel(range(world_size))
    same = question(world_size)
    plain = question(world_size, with_plain_layers())
    kept_bytes = greedy(same).prediction.device_peak_bytes
    batches = question(world_size, graph_of(64 + 8 * rank))
    leader = world_size - 1
    last = rank == world_size - 1

    def agreed(problem: Problem, search: Callable[[Problem], Plan] = greedy, **more: Any) -> dict[str, Any]:
        return outcome(lambda: agreed_plan(control, problem, search, **more))

    def renamed(number: int) -> Problem:
        return replace(plain, graph=with_op_renamed(plain.graph, number)) if last else plain

    def with_batches(budget_bytes: int) -> dict[str, Any]:
        made = agreed_plan(control, replace(batches, budget_bytes=budget_bytes), greedy)
        verify(batches.graph, made)
        assert made.graph == fingerprint(batches.graph)
        assert made.prediction.device_peak_bytes == plan_timeline(batches.graph, made).peak.nbytes
        return outcome(lambda: made)

    uneven = replace(same, graph=uneven_graph(3000, 8) if last else uneven_graph(1000, 1000))
    own_error = NotPrepared("Its parameters are on meta.")
    mixed = replace(same, graph=graph_of(extra="only" if last else ""))
    return {
        "same": agreed(same),
        "budgets": agreed(
            replace(same, budget_bytes=kept_bytes - 400 * rank + 100, base_bytes=100 * rank, host_budget_bytes=10**6)
        ),
        "batches": with_batches(batches.budget_bytes),
        "batches at little memory": with_batches(needed_bytes(question(world_size, graph_of(64 + 8 * leader)))),
        "leader fails": agreed(batches, fails_with(ValueError("no idea")) if rank == leader else greedy),
        "nothing fits": agreed(batches, small_search if rank == leader else greedy),
        "one fails before": outcome(lambda: agreed_facts(control, None, failure=own_error)) if last else agreed(same),
        "no room on one": agreed(uneven, lambda problem: with_own_peak(greedy(problem))),
        "long regions": agreed(plain),
        "another op inside": agreed(renamed(num_inside(greedy(plain), plain.graph))),
        "another first op": agreed(renamed(0)),
        "parameters": agreed(mixed),
        "options": agreed(same, settings={"planner": "milp" if last else "greedy"}),
        "garbled": outcome(lambda: agreed_plan(Garbled(control, leader), same, greedy)),
        "calls": calls(control, last),
        "again": agreed(same),
    }


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank saw."""
    return spawn(checks, request.param, folder=tmp_path_factory.mktemp("ranks"))


def test_all_ranks_have_the_same_plan_as_one_rank(ranks: list[dict[str, Any]]) -> None:
    alone = outcome(lambda: greedy(question(len(ranks))))
    assert [found["same"] for found in ranks] == [alone] * len(ranks)
    assert alone["num_ranks"] == len(ranks)


def test_the_plan_is_for_the_smallest_budget_and_the_largest_floor(ranks: list[dict[str, Any]]) -> None:
    last = len(ranks) - 1
    kept = greedy(question(len(ranks)))
    budget_bytes = kept.prediction.device_peak_bytes - 400 * last + 100
    tight = question(len(ranks), budget_bytes=budget_bytes, base_bytes=100 * last, host_budget_bytes=10**6)
    assert [rank["budgets"] for rank in ranks] == [outcome(lambda: greedy(tight))] * len(ranks)
    assert plan_digest(kept) != plan_digest(greedy(tight))


@pytest.mark.parametrize(("name", "is_tight"), [("batches", False), ("batches at little memory", True)])
def test_ranks_with_other_batches_follow_one_plan_with_peaks_of_their_own(
    ranks: list[dict[str, Any]], name: str, is_tight: bool
) -> None:
    found = [rank[name] for rank in ranks]
    assert bool(found[0]["num_left"]) is is_tight
    assert len({rank["digest"] for rank in found}) == 1
    assert len({rank["graph"] for rank in found}) == len(ranks)
    peaks = [rank["peak_bytes"] for rank in found]
    assert peaks == sorted(set(peaks))


def test_an_error_of_the_leader_is_raised_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    *others, leader = [rank["leader fails"] for rank in ranks]
    assert leader["error"] == "ValueError"
    for other in others:
        assert other["error"] == "PeerFailed"
        assert other["ranks"] == [len(ranks) - 1]
        assert "failed during the exchange of the plan: ValueError: no idea. All" in other["text"]


def test_no_feasible_plan_is_the_same_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    found = [rank["nothing fits"] for rank in ranks]
    assert found == [found[0]] * len(ranks)
    assert found[0]["error"] == "NoFeasiblePlan"
    with pytest.raises(NoFeasiblePlan) as caught:
        small_search(question(len(ranks), graph_of(64 + 8 * (len(ranks) - 1))))
    assert repr(caught.value.args) == found[0]["args"]


def test_a_rank_that_fails_before_stops_all(ranks: list[dict[str, Any]]) -> None:
    *others, last = [rank["one fails before"] for rank in ranks]
    assert last["error"] == "NotPrepared"
    assert {other["error"] for other in others} == {"PeerFailed"}
    assert all(other["ranks"] == [len(ranks) - 1] for other in others)
    assert all("NotPrepared: Its parameters are on meta" in other["text"] for other in others)


def test_a_rank_that_the_plan_does_not_fit_stops_all(ranks: list[dict[str, Any]]) -> None:
    *others, last = [rank["no room on one"] for rank in ranks]
    assert last["error"] == "IllegalSchedule"
    assert "above the budget" in last["text"]
    assert {other["error"] for other in others} == {"PeerFailed"}
    assert all(other["ranks"] == [len(ranks) - 1] for other in others)
    assert all("during the exchange of plans taken over: IllegalSchedule: The peak at" in o["text"] for o in others)


def test_a_rank_with_other_ops_follows_a_plan_that_is_legal_for_them(ranks: list[dict[str, Any]]) -> None:
    assert [rank["another op inside"] for rank in ranks] == [rank["long regions"] for rank in ranks]


def test_ops_that_prevent_a_shared_plan_are_named_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    found = [rank["another first op"] for rank in ranks]
    assert found == [found[0]] * len(ranks)
    last = len(ranks) - 1
    assert (found[0]["error"], found[0]["ranks"]) == ("RanksDiffer", [last])
    fault, ours, theirs = found[0]["text"].splitlines()[1:4]
    assert fault.startswith(f"  rank {last} cannot follow the plan: fwd.0 names the op ")
    assert ours.endswith(": only on rank 0")
    assert theirs.startswith("  op fwd.renamed, ")
    assert theirs.endswith(f": only on rank {last}")


def test_a_parameter_of_one_rank_only_is_named_on_all(ranks: list[dict[str, Any]]) -> None:
    found = [rank["parameters"] for rank in ranks]
    assert found == [found[0]] * len(ranks)
    last = len(ranks) - 1
    assert (found[0]["error"], found[0]["ranks"]) == ("RanksDiffer", [last])
    assert f"\n  parameter only, float32, 1600 bytes, not trained: only on rank {last}\n" in found[0]["text"]


def test_an_option_that_differs_is_named_on_all(ranks: list[dict[str, Any]]) -> None:
    found = [rank["options"] for rank in ranks]
    assert found == [found[0]] * len(ranks)
    last = len(ranks) - 1
    assert (found[0]["error"], found[0]["ranks"]) == ("RanksDiffer", [last])
    lines = ["planner = greedy: only on rank 0", f"planner = milp: only on rank {last}"]
    assert found[0]["text"].splitlines()[1:3] == [f"  {line}" for line in lines]


def test_a_plan_that_differs_on_one_rank_is_found(ranks: list[dict[str, Any]]) -> None:
    found = [rank["garbled"] for rank in ranks]
    assert found == [found[0]] * len(ranks)
    assert (found[0]["error"], found[0]["ranks"]) == ("RanksDiffer", [len(ranks) - 1])
    assert "took over other buckets, placements or actions" in found[0]["text"]


def test_a_roll_call_returns_the_next_step_of_all_ranks(ranks: list[dict[str, Any]]) -> None:
    found = ranks[0]["calls"]
    assert [rank["calls"] for rank in ranks] == [found] * len(ranks)
    graph_set_digest = found["other"][1]
    assert graph_set_digest
    assert found == {
        "equal": [Step.RUN, ""],
        "one plans": [Step.PLAN, ""],
        "other": [Step.JOIN, graph_set_digest],
        "other and planned": [Step.RUN, graph_set_digest],
        "other and one plans": [Step.PLAN, graph_set_digest],
        "equal again": [Step.JOIN, ""],
    }


def test_ranks_agree_again_after_errors(ranks: list[dict[str, Any]]) -> None:
    assert [rank["again"] for rank in ranks] == [rank["same"] for rank in ranks]


def dies_searching(rank: int, world_size: int) -> list[Any]:
    control = new_control_channel(range(world_size))
    with pytest.raises(PeerFailed) as caught:
        agreed_plan(control, question(world_size), lambda problem: os._exit(1))
    return [caught.value.during, caught.value.waited_s]


def test_a_leader_that_dies_stops_all(tmp_path: Path) -> None:
    found = spawn(dies_searching, 3, folder=tmp_path, lost=[0], timeout_s=5.0)
    assert [during for during, _ in found[1:]] == ["the plan"] * 2
    assert all(waited_s < 5.0 for _, waited_s in found[1:])


@pytest.mark.parametrize("rank", [0, 700])
def test_any_number_of_ranks_agrees_without_a_cluster(rank: int) -> None:
    distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=1024)
    try:
        control = new_control_channel(range(1024))
        problem = question(1024)
        made = agreed_plan(control, problem, greedy)
        assert made == greedy(problem)
        assert made.num_ranks == 1024
        assert roll_call(control, "forward", "", wants_plan=True) == RollCall(step=Step.PLAN, graph_set_digest="")
        with pytest.raises(NoFeasiblePlan):
            agreed_plan(control, problem, small_search)
    finally:
        distributed.destroy_process_group()


# ----------------------------------------------------------------------------------------------------------------------
# What one rank does alone by mistake is an error on all of them that names what each rank does.


ROWS = torch.ones(4, 160)


@torch.no_grad()
def evaluates(run: Callable[[torch.Tensor], torch.Tensor]) -> None:
    run(ROWS)


def mistakes(rank: int, world_size: int, folder: str) -> dict[str, str]:
    """Return what each mistake of the first rank ends in on this one, while the others begin a step."""
    mesh, found = init_device_mesh("cpu", (world_size,)), {}
    for name, mistake in {
        "evaluates eagerly": lambda model, compiled, optimizer: evaluates(model),
        "evaluates": lambda model, compiled, optimizer: evaluates(compiled),
        "saves": lambda model, compiled, optimizer: elixir.save(f"{folder}/saved", model, optimizer, step=1),
        "gathers all": lambda model, compiled, optimizer: elixir.full_state_dict(model),
        "weighs": lambda model, compiled, optimizer: elixir.weigh(model, 4),
    }.items():
        model = elixir.prepare(nn.Sequential(nn.Linear(160, 160), nn.Linear(160, 8)), mesh=mesh)
        compiled, optimizer = compiled_with(model), hybrid(model.parameters())
        with pytest.raises(elixir.RanksDiffer) as caught:
            mistake(model, compiled, optimizer) if rank == 0 else compiled(ROWS)
        found[name] = str(caught.value)
    assert not Path(f"{folder}/saved").exists()
    for make in (hybrid, adamw):
        model = nn.Linear(160, 160)
        optimizer = make(model.parameters())
        elixir.prepare(model, mesh=mesh)
        with pytest.raises(elixir.NotPrepared, match="Make the optimizer after `prepare`"):
            optimizer.step()
    return found


def forgets_the_mesh(rank: int, world_size: int) -> str:
    mesh = init_device_mesh("cpu", (world_size,))
    try:
        elixir.prepare(nn.Linear(160, 160), mesh=None if rank else mesh)
    except elixir.PeerFailed as error:
        return str(error)
    return ""


def test_an_action_of_one_rank_alone_raises_on_all_ranks_with_its_name(tmp_path: Path) -> None:
    first, second = spawn(mistakes, 2, str(tmp_path), folder=tmp_path)
    assert first == second
    assert "rank 0 exchanges a parameter, 0.weight, in eager code" in first["evaluates eagerly"]
    assert "rank 1 has a graph of training, rank 0 one of inference" in first["evaluates"]
    assert "rank 0 saves a checkpoint" in first["saves"]
    assert "rank 0 gathers the full state dict" in first["gathers all"]
    assert "rank 0 weighs its batch" in first["weighs"]
    assert all("rank 1 is about to run its first graph" in said for name, said in first.items() if name != "evaluates")
    assert all("call the model, its backward, the optimizer and saves" in said for said in first.values())


def test_prepare_with_a_mesh_on_one_rank_alone_raises_on_this_rank(tmp_path: Path) -> None:
    said, other = spawn(forgets_the_mesh, 2, folder=tmp_path, timeout_s=3.0)
    assert "no answer from rank 1" in said
    assert "prepared on all of them, with the same mesh" in said
    assert other == ""


# ----------------------------------------------------------------------------------------------------------------------
# Steps of several calls on ranks of which one leaves a step by an exception: all ranks learn of it at once.


NUM_ROWS, NUM_CALLS = 4, 4
TIMEOUT_S = 60.0


def leaves_alone(rank: int, world_size: int, outstanding: int) -> dict[str, Any]:
    """Train a step; in the second, rank 0 catches an exception of a backward and goes on; then train a third step.

    Returns what each rank got in the second step and after how long, and how far the weights are from those of one
    process that trains the first and the third step.
    """
    torch.manual_seed(0)
    module, double = Stage(2).double(), Stage(2).double()
    double.load_state_dict(module.state_dict())
    elixir.prepare(module, mesh=init_device_mesh("cpu", (world_size,)), outstanding=outstanding, calls=NUM_CALLS)
    compiled = torch.compile(module, backend="elixir", options=DEFAULTS)
    optimizer = elixir.HybridAdamW(module.parameters(), lr=1e-3)
    double_optimizer = torch.optim.AdamW(double.parameters(), lr=1e-3)
    rows = torch.randn(NUM_CALLS, world_size, NUM_ROWS, WIDTH, dtype=torch.float64)
    waiting: list[torch.Tensor] = []

    def forward(number: int) -> None:
        waiting.append(loss_of(compiled(rows[number, rank]), rows[number, rank].flip(0)) / NUM_CALLS)

    def step() -> None:
        waiting.clear()
        for number in range(NUM_CALLS):
            forward(number)
            if number + 1 >= outstanding:
                waiting.pop(0).backward()
        while waiting:
            waiting.pop(0).backward()
        optimizer.step()
        optimizer.zero_grad()
        for part in rows.flatten(0, 1):
            (loss_of(double(part), part.flip(0)) / NUM_CALLS / world_size).backward()
        double_optimizer.step()
        double_optimizer.zero_grad()

    step()
    for number in range(outstanding):
        forward(number)
    waiting.pop(0).backward()
    if outstanding == 1:
        forward(1)
    if rank == 0:
        with torch.no_grad():
            module.h[0].down.weight.add_(0.0)
        with pytest.raises(elixir.StaleParameters):
            waiting.pop(0).backward()
    else:
        waiting.pop(0).backward()
    began_s = time.monotonic()
    with pytest.raises(elixir.RanksDiffer) as caught:
        waiting.pop(0).backward() if waiting else forward(2)
    took_s = time.monotonic() - began_s
    optimizer.zero_grad()
    step()
    weights = [param.full_tensor() for param in module.parameters()]
    apart = max((p - q).abs().max().item() for p, q in zip(weights, double.parameters(), strict=True))
    return {"said": str(caught.value), "took_s": took_s, "apart": apart}


@pytest.mark.parametrize("outstanding", [1, 3])
def test_a_rank_that_leaves_a_step_alone_is_an_error_on_all_ranks_at_once(tmp_path: Path, outstanding: int) -> None:
    for found in spawn(leaves_alone, 2, outstanding, folder=tmp_path, timeout_s=TIMEOUT_S):
        assert found["took_s"] < 5
        if outstanding == 1:
            assert (
                "rank 0 is about to run Stage (call 1 of 4; an exception in call 2 ended the step before)"
                in (found["said"])
            )
            assert "rank 1 is about to run Stage (call 3 of 4)" in found["said"]
        else:
            assert "rank 1 begins the backward of Stage (call 3 of 4)" in found["said"]
        assert "Catch an exception in the middle of a step on all ranks, or on none." in found["said"]
        assert found["apart"] <= 1e-12


# ----------------------------------------------------------------------------------------------------------------------
# A rank that runs more graphs per forward, or more forwards, than the others is found where it does, with its graphs
# named.


GRAPHS_TIMEOUT_S = 30.0
NUM_STEPS = 3


class Layers(nn.Module):
    """Two layers, and what may be between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(160, 160), nn.Linear(160, 160)
        self.breaks = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        if self.breaks:
            torch._dynamo.graph_break()
        return self.second(x).square().mean()


class Partition(Layers):
    """Two losses, each of a graph of its own."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = self.first(x).square().mean()
        torch._dynamo.graph_break()
        return first, self.second(x).square().mean()


def trains_other_halves(rank: int, world_size: int) -> str:
    """Train both halves, then another one on each rank, and return what that says."""
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
    model = elixir.prepare(Partition(), mesh=init_device_mesh("cpu", (world_size,)))
    compiled = torch.compile(model, backend="elixir", options={"inner": "aot_eager", "report": False})
    sum(compiled(torch.ones(4, 160))).backward()
    with pytest.raises(elixir.RanksDiffer) as caught:
        compiled(torch.ones(4, 160))[rank].backward()
    return str(caught.value)


def test_gradients_of_different_graphs_are_not_mixed(tmp_path: Path) -> None:
    for said in spawn(trains_other_halves, 2, folder=tmp_path, timeout_s=GRAPHS_TIMEOUT_S):
        assert "rank 0 begins the backward of Partition" in said
        assert "rank 1 begins the backward of Partition.1" in said


def differs(rank: int, world_size: int, how: str, first: int) -> list[object]:
    """Train, the last rank otherwise than the others from the step `first` on, and return what it ended with."""
    torch._dynamo.reset()
    # Dynamo looks at the gradient of what goes on behind a break.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
    is_odd = rank == world_size - 1
    model = elixir.prepare(Layers(), mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = elixir.HybridAdamW(model.parameters())
    compiled = torch.compile(model, backend="elixir", options={"inner": "aot_eager", "report": False})
    for step in range(NUM_STEPS):
        began_s = time.monotonic()
        is_other = step >= first and (is_odd or how == "all break")
        model.breaks = is_other and how.endswith("break")
        try:
            loss = compiled(torch.ones(4, 160))
            if is_other and how == "two forwards":
                loss = loss + compiled(torch.ones(4, 160))
            loss.backward()
        except elixir.RanksDiffer as error:
            return [step, list(error.ranks), str(error), time.monotonic() - began_s]
        optimizer.step()
        optimizer.zero_grad()
    return [NUM_STEPS, [], "", 0.0]


@pytest.mark.parametrize(("how", "first"), [("break", 0), ("break", 1), ("two forwards", 1)])
def test_a_call_on_one_rank_alone_is_named_at_once(how: str, first: int, tmp_path: Path) -> None:
    for step, odd, said, waited_s in spawn(differs, 2, how, first, folder=tmp_path, timeout_s=GRAPHS_TIMEOUT_S):
        assert (step, odd) == (first, [1])
        assert "rank 0 begins the backward of Layers" in said
        if how == "break":
            assert "rank 1 is about to run Layers." in said
            assert f"(up to the graph break at {__file__}:" in said
        else:
            assert "rank 1 is about to run Layers behind Layers, whose backward is still to come" in said
        assert "call the model" in said
        assert waited_s < GRAPHS_TIMEOUT_S / 2


def test_a_graph_break_on_all_ranks_raises_no_error(tmp_path: Path) -> None:
    assert spawn(differs, 2, "all break", 1, folder=tmp_path) == [[NUM_STEPS, [], "", 0.0]] * 2
