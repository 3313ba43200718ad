"""Ranks whose graphs or whose memory differ train as one process does."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import elixir_compile
import elixir_compile as elixir
from elixir_compile.graph.capture.modules import executor_of, model_of
from elixir_compile.ir import Plan, Saving, Tier, Verb
from elixir_compile.runtime.distributed.control import new_control_channel
from elixir_compile.runtime.distributed.errors import RanksDiffer
from elixir_compile.search import Problem, plan
from elixir_compile.search.joint.ranks import IN_STEP, plan_classes
from elixir_compile.session import agreement as unequal
from elixir_compile.session.agreement import agreed_plan
from elixir_compile.session.machine import num_sharing_host
from elixir_compile.step.structure import collectives_of
from tests.run.distributed.test_agreement import greedy, outcome, question
from tests.run.processes import spawn
from tests.run.ranks_training import NUM_WORDS, Pair, batches, full, gpt2, pair_of, slower

# ----------------------------------------------------------------------------------------------------------------------
# `in_step`: ranks whose graphs differ train as one process does that runs the batches of all and takes the mean.


WIDTH = 96
"""A weight of 73 kB in fp64 is cut over the ranks, a bias is not."""
OPTIONS = {"inner": "aot_eager", "report": False, "plan_cache": False, "planner": "greedy"}
ROOM = {"device_memory": 2**30, "host_memory": 2**30}
SHORT = 450_000
"""With everything on the host a step takes 417 kB."""

SHORT_OF_ACTIVATIONS = 8_000_000
"""Too little for a step of GPT-2 with all activations kept."""


NEG = 3
"""No layer, but an op in the middle of each, of a kind that there is no other of: it changes no other op's name."""


class Branching(nn.Module):
    """Layers that run where `uses` names them, one that all batches go through, and one that none does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.extras = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.never = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, uses: tuple[int, ...]) -> torch.Tensor:
        for number in uses:
            if number != NEG:
                y = torch.tanh(self.extras[number](x))
                x = x + (-y if NEG in uses else y)
        return self.last(x).square().mean()


def batch(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, WIDTH, generator=generator, dtype=torch.float64)


Uses = Callable[[int, int], tuple[int, ...]]
"""What a rank uses in a step."""

USES: dict[str, Uses] = {
    "rank 0 only": lambda rank, step: (0,) if rank == 0 else (),
    "flips": lambda rank, step: (0,) if rank == 1 and step in (1, 3, 4) else (),
    "experts": lambda rank, step: (int(batch(rank, step).sum() > 0) + (rank + step) % 2,),
    "one op more": lambda rank, step: (0, NEG) if rank == 0 else (0,),
    "other ops": lambda rank, step: (0, 0) if rank == 0 else (0,),
}


def forwards(uses: Uses, rank: int, step: int, num_waiting: int) -> list[tuple[torch.Tensor, tuple[int, ...]]]:
    """The forwards of a step, all before their backwards."""
    return [(batch(rank, at), uses(rank, at)) for at in range(step, step + num_waiting)]


def reference(world_size: int, uses: Uses, num_steps: int, num_waiting: int) -> tuple[nn.Module, list[list[str]]]:
    """The model after all steps in one process, and the parameters that have a gradient in each."""
    model = Branching().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trained = []
    for step in range(num_steps):
        optimizer.zero_grad()
        for rank in range(world_size):
            for inputs in forwards(uses, rank, step, num_waiting):
                (model(*inputs) / world_size).backward()
        trained.append([name for name, param in model.named_parameters() if param.grad is not None])
        optimizer.step()
    return model, trained


def trains(
    rank: int,
    world_size: int,
    name: str,
    *,
    num_steps: int = 2,
    num_waiting: int = 1,
    hybrid: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """What one rank sees of the first steps of USES[name]."""
    torch._dynamo.reset()
    uses = USES[name]
    model = elixir_compile.prepare(Branching().double(), mesh=init_device_mesh("cpu", (world_size,)))
    executor = executor_of(model)
    control, said = executor.ranks.control, []
    exchange = control.exchange
    control.exchange = lambda text, what, *doing: (said.append(what), exchange(text, what, *doing))[1]
    kind = elixir_compile.HybridAdamW if hybrid else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=1e-2)
    compiled = torch.compile(model, backend="elixir", options={**OPTIONS, **ROOM, **options}, dynamic=False)
    trained, exchanges, planners = [], [], []
    for step in range(num_steps):
        said.clear()
        optimizer.zero_grad()
        torch.stack([compiled(*inputs) for inputs in forwards(uses, rank, step, num_waiting)]).sum().backward()
        exchanges.append(list(said))
        trained.append([own for own, param in model.named_parameters() if param.grad is not None])
        planners.append([record.plan.planner for record in model_of(model).compilations])
        optimizer.step()
    whole, expected = reference(world_size, uses, num_steps, num_waiting)
    there = {own: param.detach().full_tensor() for own, param in model.named_parameters()}
    return {
        "off": max(float((there[own] - param.detach()).abs().max()) for own, param in whole.named_parameters()),
        "trained": trained == expected,
        "exchanges": exchanges,
        "planners": planners,
        "because": model_of(model).compilations[-1].plan.decisions[0].because,
        "sharing": num_sharing_host(executor.peers),
        "homes": [home.param for record in model_of(model).compilations for home in record.plan.placements],
    }


def words(rank: int, step: int) -> torch.Tensor:
    """Words for GPT-2; those of rank 1 are fewer in the second step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(NUM_WORDS, (16, 15 if rank and step else 16), generator=generator)


def changes_length(rank: int, world_size: int) -> dict[str, Any]:
    """Dynamo gives rank 1 a graph with a dynamic length in the second step."""
    torch._dynamo.reset()
    model = elixir_compile.prepare(gpt2().double(), mesh=init_device_mesh("cpu", (world_size,)))
    whole = gpt2().double()
    options = {**OPTIONS, **ROOM, "device_memory": SHORT_OF_ACTIVATIONS}
    compiled = torch.compile(model, backend="elixir", options=options, dynamic=None)
    optimizers = [elixir_compile.HybridAdamW(model.parameters(), lr=1e-2), torch.optim.AdamW(whole.parameters(), 1e-2)]
    for step in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        compiled(words(rank, step)).backward()
        for other in range(world_size):
            (whole(words(other, step)) / world_size).backward()
        for optimizer in optimizers:
            optimizer.step()
    there = {name: param.detach().full_tensor() for name, param in model.named_parameters()}
    plan = model_of(model).compilations[-1].plan
    return {
        "off": max(float((there[name] - param.detach()).abs().max()) for name, param in whole.named_parameters()),
        "planners": [record.plan.planner for record in model_of(model).compilations],
        "savings": sorted({group.saving for group in plan.activations}),
        "needed_bytes": plan.prediction.device_peak_bytes,
    }


class Classes(nn.Module):
    """A projection to many classes and its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 1024)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(torch.tanh(self.body(x))), labels)


def has_few_tokens(rank: int, world_size: int) -> dict[str, Any]:
    """Logits of rank 0 are small, those of rank 1 do not fit whole; rank 0 compiles again for more in the second
    step."""
    torch._dynamo.reset()
    model = elixir_compile.prepare(Classes(), mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = elixir_compile.HybridAdamW(model.parameters(), lr=1e-2)
    options = {**OPTIONS, **ROOM, "device_memory": 16_000_000}
    compiled = torch.compile(model, backend="elixir", options=options, dynamic=False)
    losses = []
    for step in range(2):
        num_tokens = 2048 if rank else 8 + 8 * step
        optimizer.zero_grad()
        loss = compiled(torch.ones(num_tokens, WIDTH), torch.zeros(num_tokens, dtype=torch.int64))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return {"losses": losses, "chunks": [record.loss_chunks for record in model_of(model).compilations]}


def plans_beside_state(rank: int, world_size: int) -> list[int]:
    """How often each of four steps is planned, if from the third on an optimizer has state that no plan places."""
    torch._dynamo.reset()
    model = elixir_compile.prepare(Branching().double(), mesh=init_device_mesh("cpu", (world_size,)))
    executor = executor_of(model)
    control, said = executor.ranks.control, []
    exchange = control.exchange
    control.exchange = lambda text, what, *doing: (said.append(what), exchange(text, what, *doing))[1]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    compiled = torch.compile(model, backend="elixir", options={**OPTIONS, **ROOM}, dynamic=False)
    found = []
    for step in range(4):
        if step == 2:
            executor.plain_state.note(optimizer, {"last.weight": 1000})
            executor.plain_state.is_counted = True
        said.clear()
        optimizer.zero_grad()
        compiled(batch(rank, step), USES["one op more"](rank, step)).backward()
        found.append(said.count("parameters in use"))
    return found


def fails(rank: int, world_size: int, **options: Any) -> list[str]:
    with pytest.raises(elixir_compile.ElixirError) as caught:
        trains(rank, world_size, "rank 0 only", **options)
    return [type(caught.value).__name__, str(caught.value)]


def on_two(rank: int, world_size: int) -> dict[str, Any]:
    return {
        "flips": trains(rank, world_size, "flips", num_steps=5),
        "two wait": trains(rank, world_size, "flips", num_waiting=2),
        "one op more": trains(rank, world_size, "one op more"),
        "other ops": trains(rank, world_size, "other ops", hybrid=False),
        "little memory": trains(rank, world_size, "rank 0 only", device_memory=SHORT),
        "lengths": changes_length(rank, world_size),
        "tokens": has_few_tokens(rank, world_size),
        "state": plans_beside_state(rank, world_size),
        "none fits": fails(rank, world_size, device_memory=10_000),
        "other settings": fails(
            rank, world_size, activations="keep" if rank else "any", planner="elixir" if rank else "greedy"
        ),
    }


def on_three(rank: int, world_size: int) -> dict[str, Any]:
    return {"experts": trains(rank, world_size, "experts", num_steps=3)}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return spawn(on_two, 2, folder=tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return spawn(on_three, 3, folder=tmp_path_factory.mktemp("three"))


@pytest.mark.parametrize("name", ["flips", "two wait", "one op more", "other ops", "little memory", "lengths"])
def test_weights_are_those_of_one_process(two: list[dict[str, Any]], name: str) -> None:
    assert max(rank[name]["off"] for rank in two) < 1e-12
    # What no rank uses has no gradient, what one uses has one on all.
    assert all(rank[name].get("trained", True) for rank in two)


def test_state_that_no_plan_places_is_planned_once(two: list[dict[str, Any]]) -> None:
    assert [rank["state"] for rank in two] == [[1, 0, 1, 0]] * 2


def test_each_of_three_ranks_takes_an_expert(three: list[dict[str, Any]]) -> None:
    assert max(rank["experts"]["off"] for rank in three) < 1e-12
    assert all(rank["experts"]["trained"] for rank in three)
    last = [rank["experts"]["planners"][-1] for rank in three]
    assert {planner for planners in last for planner in planners} == {IN_STEP}


def test_a_changing_branch_is_planned_once_for_each_way(two: list[dict[str, Any]]) -> None:
    first, second, *others = two[0]["flips"]["exchanges"]
    assert "the plan" in first
    assert "plans in step" in second
    call = "graphs to run"  # of which each counts, the two before included
    assert others == [[call, call, "backward of 7"], [call, call, "backward of 9"], [call, "backward of 10"]]
    assert two[0]["flips"]["planners"] == [["greedy"], [IN_STEP], ["greedy"], [IN_STEP], [IN_STEP]]


def test_ranks_with_equal_graphs_try_a_common_plan_first(two: list[dict[str, Any]]) -> None:
    """An op in the middle of a region is no matter; one at its end is."""
    assert [rank["one op more"]["planners"] for rank in two] == [[["greedy"], ["greedy"]]] * 2
    assert [rank["other ops"]["planners"] for rank in two] == [[[IN_STEP], [IN_STEP]]] * 2


def test_ranks_know_how_many_share_a_host_without_a_launcher(two: list[dict[str, Any]]) -> None:
    assert "names of hosts" in two[0]["flips"]["exchanges"][0]
    assert [rank["flips"]["sharing"] for rank in two] == [2, 2]


def test_the_plan_says_whose_graphs_differ(two: list[dict[str, Any]]) -> None:
    for rank in two:
        assert rank["flips"]["because"].startswith("rank 1 and rank 0 run different graphs, not all read extras.0.bias")


def test_a_rank_short_of_memory_moves_everything_to_the_host(two: list[dict[str, Any]]) -> None:
    assert {home for rank in two for home in rank["little memory"]["homes"]} == {Tier.HOST}
    assert {home for rank in two for home in rank["flips"]["homes"]} == {Tier.DEVICE}


def test_ranks_with_different_lengths_recompute_activations(two: list[dict[str, Any]]) -> None:
    found = [rank["lengths"] for rank in two]
    assert [rank["planners"] for rank in found] == [[IN_STEP], ["greedy", IN_STEP]]
    assert all(Saving.RECOMPUTE in rank["savings"] for rank in found)
    assert max(rank["needed_bytes"] for rank in found) <= SHORT_OF_ACTIVATIONS


def test_all_ranks_chunk_the_loss_if_one_rank_must(two: list[dict[str, Any]]) -> None:
    first, second = (rank["tokens"] for rank in two)
    assert (first["chunks"], second["chunks"]) == ([16, 16], [16])
    # Every token of either rank is the same.
    assert first["losses"] == pytest.approx(second["losses"], rel=1e-4)
    assert first["losses"][1] < first["losses"][0]


def test_no_feasible_plan_and_other_options_fail_on_all_ranks(two: list[dict[str, Any]]) -> None:
    assert [rank["none fits"][0] for rank in two] == ["NoFeasiblePlan"] * 2
    assert two[0]["none fits"] == two[1]["none fits"]
    assert "run different graphs, not all read" in two[0]["none fits"][1]
    name, text = two[0]["other settings"]
    assert name == RanksDiffer.__name__
    assert "activations = keep: only on rank 1" in text
    assert "planner = elixir: only on rank 1" in text
    assert two[1]["other settings"] == [name, text]


# ----------------------------------------------------------------------------------------------------------------------
# Two ranks of which one has less memory: each has homes and activations of its own, and the weights are those of ranks
# that keep everything, bit by bit.


def trained(pair: Pair, steps: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights after `steps`."""
    for batch in steps:
        pair.own_backward(batch)
        pair.optimizer.step()
        pair.optimizer.zero_grad()
    return {name: full(value).clone() for name, value in pair.model.state_dict().items()}


def plan_of(pair: Pair) -> Plan:
    (compilation,) = elixir.compilations(pair.model)
    assert compilation.plan is not None
    return compilation.plan


def trains_in_less_memory(rank: int, world_size: int, name: str, share: float) -> dict[str, Any]:
    """Train three steps with room for everything, and again with `share` of it on rank 1."""
    steps = batches(3)
    roomy = pair_of(name, [world_size], dtype=torch.float32)
    expected = trained(roomy, steps)
    kept_bytes = plan_of(roomy).prediction.device_peak_bytes
    budget = int((1.0, share)[rank] * kept_bytes) + 4096
    # Smaller micro-batches would round differently.
    pair = pair_of(name, [world_size], dtype=torch.float32, device_memory=budget, micro_batches=1)
    found = trained(pair, steps[:1])
    ledger = executor_of(pair.model).ledger
    before = Counter(ledger.times)
    found = trained(pair, steps[1:])
    plan = plan_of(pair)
    return {
        "equal": all(torch.equal(found[name], value) for name, value in expected.items()),
        "rank": plan.rank,
        "collectives": list(map(str, collectives_of(plan))),
        "ran": dict((Counter(ledger.times) - before).items()),
        "homes": sorted({placement.optim.value for placement in plan.placements}),
        "savings": sorted({group.saving.value for group in plan.activations}),
    }


class Lines(logging.Handler):
    """The lines that were logged."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def suggests(rank: int, world_size: int) -> list[str]:
    """Train nine steps in which each region of rank 1 takes a while, and return the lines about uneven ranks."""
    lines = Lines()
    logging.getLogger("elixir_compile").addHandler(lines)
    logging.getLogger("elixir_compile").setLevel(logging.INFO)
    pair = pair_of("odd", [world_size], report=True)
    with slower(lambda: 5.0 * rank):
        trained(pair, batches(9))
    return [line for line in lines.said if line.startswith("uneven")]


def test_other_rows_are_suggested_once_if_a_rank_is_slower(tmp_path: Path) -> None:
    """Emulated: the clock of rank 1 jumps in each region."""
    first, second = spawn(suggests, 2, folder=tmp_path, limit_s=400)
    assert second == []  # one rank writes
    (line,) = first
    rows = [int(number) for number in line.partition("shares would be ")[2].partition(":")[0].split("/")]
    assert rows[0] > rows[1] >= 2


def swapped(made: Plan) -> Plan:
    """The plan with its first two gathers in the other order."""
    actions = list(made.schedules[0].actions)
    first, second = [at for at, action in enumerate(actions) if action.verb is Verb.GATHER][:2]
    actions[first], actions[second] = actions[second], actions[first]
    return replace(made, schedules=(replace(made.schedules[0], actions=tuple(actions)),))


def agrees(rank: int, world_size: int) -> dict[str, Any]:
    """What comes of plans that cannot be followed together, of a rank without room, and of a rank that fails."""
    control = new_control_channel(range(world_size))
    kept = plan(question(world_size), "keep_all").prediction.device_peak_bytes
    roomy, small = question(world_size, budget_bytes=2 * kept), question(world_size, budget_bytes=int(0.6 * kept))

    def asked(least: Problem, search: Callable[[Problem], Plan] = greedy) -> dict[str, Any]:
        return outcome(lambda: agreed_plan(control, least if rank else roomy, search, may_differ=True))

    def fails(problem: Problem) -> Plan:
        if rank:
            raise ValueError("no search today")
        return greedy(problem)

    found = {"fit": asked(small), "short": asked(replace(small, budget_bytes=10)), "failed": asked(small, fails)}
    found["equal"] = outcome(
        lambda: agreed_plan(control, small, lambda problem: searched_by(0, rank, problem), may_differ=True)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unequal, "plan_classes", lambda *args: hand_made(plan_classes(*args), rank))
        found["swapped"] = asked(small)
    return found


def searched_by(leader: int, rank: int, problem: Problem) -> Plan:
    assert rank == leader, "equal ranks are searched once"
    assert problem.released is None
    return greedy(problem)


def hand_made(plans: Sequence[Plan], rank: int) -> Sequence[Plan]:
    return [swapped(made) if rank else made for made in plans]


def test_ranks_that_differ_agree_or_all_raise(tmp_path: Path) -> None:
    rich, poor = spawn(agrees, 2, folder=tmp_path, limit_s=400)
    assert rich["fit"]["budget_bytes"] > poor["fit"]["budget_bytes"]
    assert rich["equal"]["digest"] == poor["equal"]["digest"]
    assert rich["short"] == poor["short"]
    assert rich["short"]["error"] == "NoFeasiblePlan"
    assert [own["swapped"]["error"] for own in (rich, poor)] == ["RanksDiffer"] * 2
    assert "gather and reduce in another order" in rich["swapped"]["text"]
    assert (rich["failed"]["error"], poor["failed"]["error"]) == ("PeerFailed", "ValueError")
    assert "no search today" in rich["failed"]["text"]


def test_a_rank_with_less_memory_has_homes_of_its_own(tmp_path: Path) -> None:
    rich, poor = spawn(trains_in_less_memory, 2, "gpt2", 0.6, folder=tmp_path, limit_s=400)
    assert (rich["rank"], poor["rank"]) == (0, 1)
    assert rich["equal"]
    assert poor["equal"]
    assert rich["collectives"] == poor["collectives"]
    for name in rich["collectives"]:
        assert rich["ran"][name] == poor["ran"][name] == 2 * rich["collectives"].count(name)
    assert (rich["homes"], rich["savings"]) == (["device"], [])
    assert not any(name.startswith(("offload", "prefetch")) for name in rich["ran"])
    assert "host" in poor["homes"]
    assert any(name.startswith("offload") for name in poor["ran"])
