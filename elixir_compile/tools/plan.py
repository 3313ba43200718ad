"""Plan without training: the plan of a step, who trains how many rows among ranks that differ, and which layers each
rank of a pipeline trains.
"""

import functools
import json
import logging
import math
import platform
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from elixir_compile import compat
from elixir_compile.base.errors import InvalidOption, InvalidPlan, NoFeasiblePlan, NoFeasibleShares, UnsupportedModel
from elixir_compile.base.options import Options, parse_options
from elixir_compile.ir import Kind, Plan, StepGraph
from elixir_compile.ir.hardware import (
    Cluster,
    Fleet,
    cluster_from_json,
    cluster_to_json,
    fleet_of,
    fleet_of_nodes,
    preset_of_ranks,
    with_devices,
    with_like_seats,
)
from elixir_compile.ir.pipeline import PipelinePlan, TorchSchedule, parse_schedule, pipeline_order
from elixir_compile.ir.schedule import LEAST_ROWS
from elixir_compile.ir.share import Share, Shares, shares_from_json, shares_to_json
from elixir_compile.runtime.distributed.control import Carried, ControlChannel, new_control_channel
from elixir_compile.runtime.distributed.errors import RanksDiffer
from elixir_compile.search import Problem
from elixir_compile.search.evaluator import deadline_in
from elixir_compile.search.joint.ranks import plan_classes
from elixir_compile.search.joint.variants import Chunks, LossAttempt, with_chosen_loss
from elixir_compile.search.outer import answer
from elixir_compile.search.problem import Question, question_of
from elixir_compile.search.shares.choose import (
    Ask,
    Budget,
    Choice,
    FoundChoice,
    ShareSearch,
    SimulatedStep,
    State,
    by_formula,
    refined,
)
from elixir_compile.search.stages.choose import StageAsk, StageSearch
from elixir_compile.session.cache import plan_for
from elixir_compile.session.machine import device_budget_bytes, host_budget_bytes, machine, named_fleet
from elixir_compile.session.plan_files import save_plan
from elixir_compile.session.planning import savings_of
from elixir_compile.step.as_run import graph_of_rows
from elixir_compile.tools.preview.capture import Capture, Inputs, PlannedClass, budgets_bytes
from elixir_compile.tools.preview.few_layers import capture_model
from elixir_compile.tools.preview.models import find_described

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer
    from transformers import PreTrainedConfig

# ----------------------------------------------------------------------------------------------------------------------
# `elixir_compile.plan(model, example_inputs)`: the plan of a training step, without training.


def plan(
    model: "nn.Module | Callable[[], nn.Module] | PreTrainedConfig | str",
    example_inputs: Inputs,
    *,
    hardware: "Cluster | str | None" = None,
    options: "Mapping[str, object] | Options | None" = None,
    optimizer: "type[Optimizer] | None" = None,
    state_bytes_per_element: int | None = None,
    dynamic: bool = False,
    save: "str | Path | None" = None,
) -> Plan:
    """Return the plan for training `model` on batches like `example_inputs`.

    No weights are allocated, no GPU is needed, nothing is compiled or run, and `model` stays as it is.

    `model` may be a module, with weights or on `meta`, or a function that returns a module; a configuration of Hugging
    Face, trained in its dtype; or a model of the command line (`"llama-7b"`, a config file or folder), trained in
    bfloat16. For a configuration or a name, equal layers are captured only a few times. `example_inputs` are positional
    or by name, on any device; only their shapes and dtypes count. The backward starts from every output that requires a
    gradient, as in training.

    `hardware` is a `Cluster`, a name such as `"4 x a100-40g"`, or the path of a profile; None is this machine with its
    free memory. The step is always captured on the device of the model; if the model has none, on the GPU if there is
    one, else on `cpu`. So a plan for another machine counts the kernels of this machine.

    The optimizer is `hybrid(optimizer)`, for parameters that this class refuses HybridAdamW, by default for all.
    `state_bytes_per_element` are instead the bytes of optimizer state for each element of a trained parameter; 12
    stands for fp32 master weights and moments. If `dynamic`, the batch, the first dimension of every
    input, is symbolic. `save` is a file for the plan, to be written with its question beside it, see `save_plan`.

    Raises NoFeasiblePlan with the missing bytes, UnsupportedModel, UnknownModel, and UnknownHardware.

    Example:
        plan = elixir.plan(model, [batch], hardware="a100-40g", options={"device_memory": "1GiB"})
        print(plan.prediction.step_s, plan.prediction.device_peak_bytes, plan.bound_s)
    """
    chosen = options if isinstance(options, Options) else parse_options(options)
    made, problem = plan_and_problem(
        model,
        example_inputs,
        hardware=hardware,
        options=chosen,
        optimizer=optimizer,
        state_bytes_per_element=state_bytes_per_element,
        dynamic=dynamic,
    )
    if save is not None:
        save_plan(made, save, question_of(problem, chosen))
    return made


def plan_and_problem(
    model: "nn.Module | Callable[[], nn.Module] | PreTrainedConfig | str",
    example_inputs: Inputs,
    *,
    options: Options,
    hardware: "Cluster | str | None" = None,
    optimizer: "type[Optimizer] | None" = None,
    state_bytes_per_element: int | None = None,
    dynamic: bool = False,
) -> tuple[Plan, Problem]:
    """Return the plan that `plan` returns for the same arguments, and the problem that it solves.

    Raises the errors of `plan`.
    """
    if options.plan is not None:
        raise InvalidOption("plan", str(options.plan), "None: a new plan is made here")
    # Before the capture, which takes seconds.
    cluster = named_cluster(hardware or options.hardware, options.host_memory)
    described = find_described(model, example_inputs)
    planned = None if optimizer is None else PlannedClass(optimizer)

    def ask(capture: Capture, options: Options) -> tuple[Problem, Options]:
        return question(capture, options, cluster, state_bytes_per_element=state_bytes_per_element)

    def capture_with(chunks: Chunks | None) -> Capture:
        return capture_model(
            described, example_inputs, options=options, dynamic=dynamic, chunks=chunks, optimizer=planned
        )

    return plan_with_loss(capture_with, ask, plan_for, options)


def plan_with_loss(
    capture_with: Callable[[Chunks | None], Capture],
    ask: Callable[[Capture, Options], tuple[Problem, Options]],
    search: Callable[[Problem, Options], Plan],
    options: Options,
) -> tuple[Plan, Problem]:
    """Return the plan of the captured step, or of the step with its loss in chunks if its plan is better; and its
    problem.

    `ask` makes the arguments of `search` from a capture. Raises NoFeasiblePlan if neither step fits.
    """
    capture = capture_with(None)
    problems: dict[str, Problem] = {}

    def plan_of(capture: Capture, options: Options) -> Plan:
        problem, own = ask(capture, options)
        made = search(problem, own)
        problems[made.graph] = problem
        return made

    whole = functools.cache(lambda options: plan_of(capture, options))

    def plan_attempt(attempt: LossAttempt) -> Plan:
        own = attempt.options_of(options)
        found = whole(own) if attempt.cut is None else plan_of(capture_with(attempt.cut), own)
        return found if attempt.review is None else attempt.review(found)

    made = with_chosen_loss(capture.chunks, plan_attempt, is_whole_first=options.micro_batches == "fit")
    return made, problems[made.graph]


def named_cluster(hardware: "Cluster | str | None", host_bytes: int | None = None) -> Cluster | None:
    """Return the machine called `hardware` for a budget of `host_bytes`, or None for this machine. Raises the errors of
    `machine`."""
    return machine(torch.device("cpu"), hardware, host_bytes) if isinstance(hardware, str) else hardware


def question(
    capture: Capture, options: Options, cluster: Cluster | None, *, state_bytes_per_element: int | None = None
) -> tuple[Problem, Options]:
    """Return the arguments of `plan_for`: the problem of `capture` and the options for it.

    The problem is on `cluster`, or if it is None, on this machine with its free memory.
    """
    here = machine(capture.device) if cluster is None else cluster
    problem = capture.problem(here, options, state_bytes_per_element=state_bytes_per_element)
    if cluster is not None:
        # The memory of a profile does not change from run to run, so it counts as a budget given by the user.
        return problem, replace(
            options, device_memory=problem.budget_bytes, host_memory=problem.host_budget_bytes, hardware=None
        )
    budget_bytes = device_budget_bytes(options, here, capture.device, capture.held_bytes)
    host_bytes = host_budget_bytes(options)
    problem = replace(problem, budget_bytes=budget_bytes, host_budget_bytes=host_bytes, moves_what_fits=False)
    return problem, options


# ----------------------------------------------------------------------------------------------------------------------
# The plans of the ranks of a fleet for given shares, searched and simulated together, without any rank.
#
#   capture, share of each rank --rows of each class--> problems --search, one order of collectives--> plans


log = logging.getLogger("elixir_compile")


def found_choice(search: ShareSearch, plans: "SharePlans", simulate_s: float = math.inf) -> FoundChoice:
    """Return the shares that `search` finds: the shortest in the simulation of all ranks with `plans`.

    No simulation begins after `simulate_s` seconds; if that is 0, the shares have the shortest step by the formula of
    the search. Raises NoFeasibleShares if nothing fits.
    """
    if not simulate_s:
        return by_formula(search.best())
    return refined(search, plans.simulated, None if math.isinf(simulate_s) else deadline_in(simulate_s))


def simulated_step(plans: Sequence[Plan]) -> SimulatedStep:
    """Return the step of all ranks that follow `plans`, one for each class, as the plans predict it together."""
    step_s = plans[0].prediction.step_s
    busy_s = {rank: line.busy_share * step_s for line in plans[0].classes for rank in line.ranks}
    return SimulatedStep(step_s=step_s, busy_s=tuple(busy_s[rank] for rank in sorted(busy_s)))


class SharePlans:
    """The plans of the ranks of a fleet for any shares of one captured step; each question is searched once."""

    def __init__(self, capture: Capture, fleet: Fleet, budgets: Sequence[Budget], options: Options) -> None:
        """`budgets` are the memory of each rank."""
        self._capture, self._fleet, self._options = capture, fleet, options
        self._budgets = tuple(budgets)
        self._found: dict[tuple[Share, ...], tuple[Plan, ...] | None] = {}
        self._by_class: dict[Hashable, Plan | NoFeasiblePlan] = {}

    def simulated(self, choice: Choice) -> SimulatedStep | None:
        """Return the step of all ranks with the shares of `choice`, or None if they have no plans."""
        plans = self.of(choice.shares)
        return None if plans is None else simulated_step(plans)

    def of(self, shares: tuple[Share, ...]) -> tuple[Plan, ...] | None:
        """Return the plan of each class of like ranks, or None if a class has none, or if the plans cannot follow one
        sequence of collectives.

        These are the plans that the ranks would agree on; their prediction is that of all ranks together. A rank
        without rows runs two. The field `classes` of each plan says which ranks follow which.
        """
        if shares not in self._found:
            members = self._members(shares)
            asked = [self._asked(shares, ranks[0]) for ranks in members]
            options = {problem.rank: own for problem, own in asked}

            def each(work: Callable[[int], Plan]) -> list[Plan]:
                return [work(number) for number in range(len(asked))]

            problems = [problem for problem, _ in asked]
            try:
                self._found[shares] = plan_classes(
                    problems, members, lambda problem: self._plan_of(problem, options[problem.rank]), each
                )
            except (NoFeasiblePlan, InvalidPlan) as error:
                log.info("shares of %s rows have no plans: %s", [share.num_rows for share in shares], error)
                self._found[shares] = None
        return self._found[shares]

    def questions(self, shares: tuple[Share, ...]) -> tuple[Question, ...]:
        """Return the questions that the plans of `shares` answer, in their order."""
        return tuple(question_of(*self._asked(shares, ranks[0])) for ranks in self._members(shares))

    def _members(self, shares: tuple[Share, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of each class."""
        pairs = zip(shares, self._budgets, strict=True)
        return self._fleet.classes([(share.num_rows, share.state, budget) for share, budget in pairs])

    def _plan_of(self, problem: Problem, options: Options) -> Plan:
        """Return the plan for `problem`, that of a class of ranks; other choices may have asked for it already.

        It depends on the rows of the class and the dtypes of moments, and where shards of the state are unequal, on the
        shards of all ranks.
        """
        dtypes = tuple(sorted((name, param.state_dtype or "") for name, param in problem.params.items()))
        key = (problem.rank, problem.graph.batch, problem.state, problem.released, dtypes)
        if key not in self._by_class:
            self._by_class[key] = answer(lambda asked: plan_for(asked, options), problem)
        found = self._by_class[key]
        if isinstance(found, NoFeasiblePlan):
            raise found.renewed()
        return replace(found, shares=problem.shares)

    def _asked(self, shares: tuple[Share, ...], rank: int) -> tuple[Problem, Options]:
        """Return the problem of `rank` with the rows of its share, and the options with its memory."""
        rows = shares[rank].num_rows or LEAST_ROWS
        own = replace(self._capture, graph=graph_of_rows(self._capture.graph, rows))
        problem = replace(own.problem(self._fleet.seen_by(rank), self._options), rank=rank, shares=shares)
        budget = self._budgets[rank]
        memory = {"device_memory": budget.device_bytes + self._capture.base_bytes, "host_memory": budget.host_bytes}
        own_budgets = {"budget_bytes": memory["device_memory"], "host_budget_bytes": budget.host_bytes}
        return replace(problem, **own_budgets), replace(self._options, **memory, hardware=None)


# ----------------------------------------------------------------------------------------------------------------------
# `elixir_compile.shares(model, sample, batch=64, mesh=mesh)`: who trains how many rows, among ranks that differ.
#
#   sample --capture, on every rank--> graph, of any number of rows
#   machine and memory of every rank --exchange--> fleet, budgets
#   graph, fleet, budgets --search, simulation of all ranks together, on the first rank--> shares, sent to all


_CARRIED: Carried = dict.fromkeys((InvalidOption, NoFeasibleShares, UnsupportedModel), attrgetter("args"))
"""The errors of the search that all ranks raise."""
_MOST_WAIT_S, _LAST_S = 3600.0, 600.0
"""The most seconds of search for which ranks wait, and those of the last simulation."""


def shares(
    model: "nn.Module | Callable[[], nn.Module] | PreTrainedConfig | str",
    sample: Inputs,
    *,
    batch: int,
    mesh: "DeviceMesh | None" = None,
    hardware: "Fleet | Cluster | str | None" = None,
    options: "Mapping[str, object] | Options | None" = None,
    simulate_s: float = 60.0,
) -> Shares:
    """Return the share of each rank of `mesh` in training `model` on batches of `batch` rows in all.

    Every rank must call this together, before `prepare`; each gets the same shares. The step takes as long as its
    slowest rank, so rows go to ranks by their speed within their memory. A formula finds rows for which the slowest
    rank computes for the fewest seconds. Then the plans of the ranks are searched and simulated together: for these
    rows, for rows moved to even out the simulated seconds, for equal rows, for rows by speed, and for the rows of
    Cephalo's program. The shortest is the result. The plans of a model of 1.5 billion parameters take 20 s for each
    choice of rows, so no simulation begins after `simulate_s` seconds; 0 takes the rows of the formula. `outcome` of
    the result says how it was found. The first rank searches, and the others wait for it.

    `sample` is a batch of any number of rows from 2 on; only its shapes count, and nothing is run. `model` and
    `sample` are as for `elixir_compile.plan`, and `options` as for the backend: `device_memory` and `host_memory` are
    budgets of each rank.

    `hardware` is the fleet of all ranks: its name, such as `"2 x l4-24g + 1 x a6000-48g"`, the file of `torchrun ...
    elixir-compile measure`, or a value. Without it, each rank describes its own machine, as measured earlier or roughly
    known, with its free memory. `mesh` may be left out if `hardware` is given: then nothing is exchanged.

    Raises InvalidOption for a batch of fewer than 2 rows, for negative seconds, and for a fleet of another size than
    the mesh; UnsupportedModel for a mesh of two axes, and for a model whose batch cannot be divided; NoFeasibleShares
    if no shares fit the memory of the ranks; and RanksDiffer if ranks ask for other batches or fleets.

    Example:
        fleet = "2 x l4-24g + 1 x a6000-48g"
        shares = elixir.shares(model, batch, batch=64, hardware=fleet, simulate_s=0)
        print(shares.outcome)
        for share in shares:
            print(share.num_rows, "rows in", share.micro_batches, "micro-batches")
    """
    if not simulate_s >= 0:
        raise InvalidOption("simulate_s", simulate_s, "seconds, 0 or more")
    chosen = options if isinstance(options, Options) else parse_options(options)
    fleet = _fleet_asked(hardware or chosen.hardware, mesh)
    capture = capture_model(find_described(model, sample), sample, options=chosen)
    control = None if mesh is None else _channel(mesh, simulate_s)
    if fleet is None:
        assert control is not None
        fleet, budgets = _present(control, capture, chosen)
    else:
        budgets = budgets_of(fleet, capture, chosen)

    def found() -> Shares:
        search = search_of(capture, fleet, budgets, batch, chosen)
        return found_choice(search, SharePlans(capture, fleet, budgets, chosen), simulate_s).shares

    question = f"{batch} rows on {fleet.name}"
    made = found() if control is None else _of_first_rank(control, question, found)
    log.info("shares    %s rows: %s", "/".join(str(share.num_rows) for share in made), made.outcome)
    return made


def _fleet_asked(hardware: "Fleet | Cluster | str | None", mesh: "DeviceMesh | None") -> Fleet | None:
    """Return the fleet called `hardware`, with a device for each rank of `mesh`; None if each rank describes itself."""
    fleet = named_fleet(hardware) if isinstance(hardware, str) else hardware
    if isinstance(fleet, Cluster) or (fleet is None and hardware is not None):
        fleet = fleet_of(fleet or machine(torch.device("cpu"), str(hardware)))
    if mesh is None and fleet is None:
        raise InvalidOption("mesh", None, "a mesh of the ranks, or the argument hardware")
    if mesh is not None and mesh.ndim > 1:
        raise UnsupportedModel("the mesh", "shares are for one axis; a mesh with copies of each part has two")
    if mesh is not None and fleet is not None and fleet.num_ranks != mesh.size():
        raise InvalidOption("hardware", fleet.name, f"a fleet of {mesh.size()} devices")
    return fleet


def _channel(mesh: "DeviceMesh", simulate_s: float) -> ControlChannel:
    """Return a control channel on which ranks wait for the first to search: on a busy machine, four times as long as
    its CPU seconds, and until the simulation that has begun is completed."""
    search_s = 4 * min(simulate_s, _MOST_WAIT_S) + _LAST_S
    return new_control_channel(mesh.mesh.flatten().tolist(), compat.default_timeout() + timedelta(seconds=search_s))


def _of_first_rank(control: ControlChannel, question: str, found: Callable[[], Shares]) -> Shares:
    """Return the shares `found` on the first rank of `control`, on every rank. All ranks raise its error.

    Searches that are limited by seconds may differ between ranks. Raises RanksDiffer if ranks have another `question`.
    """
    asked = control.exchange(question, "questions for shares", "asks for shares")
    if len(set(asked)) > 1:
        others = [rank for rank, own in zip(control.ranks, asked, strict=True) if own != asked[0]]
        lines = [f"rank {rank} asks for shares of {own}" for rank, own in zip(control.ranks, asked, strict=True)]
        raise RanksDiffer(others, lines)
    is_first = control.is_echo or control.rank == 0
    _, texts = control.run_on_all_ranks(
        "shares of the ranks", lambda: shares_to_json(found()) if is_first else "", str, _CARRIED
    )
    made = shares_from_json(texts[0])
    assert isinstance(made, Shares), "`found` returns shares with their outcome"
    return made


def search_of(capture: Capture, fleet: Fleet, budgets: Sequence[Budget], batch: int, options: Options) -> ShareSearch:
    """Return the search for the shares of `fleet` in training the step of `capture` on `batch` rows.

    Raises InvalidOption for a batch of fewer than 2 rows, and UnsupportedModel if the graph does not say which bytes
    and operations belong to the rows of its batch.
    """
    graph = capture.graph
    trained = capture.trained(options).values()
    params = sum(storage.nbytes for storage in graph.storages if storage.kind is Kind.PARAM)
    state = State(
        num_elements=sum(param.numel for param in trained),
        nbytes=params + sum(param.grad_nbytes + param.state_nbytes for param in trained),
    )
    try:
        savings = savings_of(options)
        return ShareSearch(
            Ask(graph=graph, fleet=fleet, budgets=tuple(budgets), state=state, batch=batch, savings=savings)
        )
    except InvalidPlan as error:
        raise UnsupportedModel(graph.name, str(error)) from error


def budgets_of(fleet: Fleet, capture: Capture, options: Options) -> tuple[Budget, ...]:
    """Return the memory of each rank of `fleet` for what it trains, by `budgets_bytes`."""
    each = [budgets_bytes(fleet.seen_by(rank), options) for rank in range(fleet.num_ranks)]
    return tuple(Budget(device_bytes=device - capture.base_bytes, host_bytes=host) for device, host in each)


def _present(control: ControlChannel, capture: Capture, options: Options) -> tuple[Fleet, tuple[Budget, ...]]:
    """Return the fleet that the ranks of `control` are, and the memory of each; every rank says its own."""
    cluster = machine(capture.device)
    hosts = control.exchange(platform.node(), "names of hosts", "asks for shares")
    num_here = hosts.count(hosts[control.rank])
    device_bytes = device_budget_bytes(options, cluster, capture.device, capture.held_bytes)
    host_bytes = host_budget_bytes(options)
    if options.host_memory is None:
        host_bytes //= num_here
    num_nodes = len(set(hosts))
    links = with_devices(cluster.alone(), num_here, num_nodes) if cluster.num_ranks != len(hosts) else cluster
    said = control.exchange(
        json.dumps([cluster_to_json(links), device_bytes - capture.base_bytes, host_bytes]),
        "machines of the ranks",
        "asks for shares",
    )
    clusters = [cluster_from_json(text) for text, _, _ in map(json.loads, said)]
    found = [link for each in clusters if (link := each.collective) is not None]
    slowest = min(found, key=lambda link: link.bytes_per_s, default=None)
    numbers = [sorted(set(hosts), key=hosts.index).index(host) for host in hosts]
    fleet = with_like_seats(fleet_of_nodes([each.nodes[0] for each in clusters], numbers, slowest))
    own = [Budget(device_bytes=device, host_bytes=host) for _, device, host in map(json.loads, said)]
    # Free memory differs a little between equal ranks: a class has that of its rank with the least.
    for ranks in fleet.classes():
        least = Budget(
            device_bytes=min(own[rank].device_bytes for rank in ranks),
            host_bytes=min(own[rank].host_bytes for rank in ranks),
        )
        for rank in ranks:
            own[rank] = least if own[rank].device_bytes <= 1.1 * least.device_bytes else own[rank]
    return fleet, tuple(own)


# ----------------------------------------------------------------------------------------------------------------------
# `elixir_compile.plan_stages(model, batch, stages=4, ...)`: which layers each rank of a pipeline trains.
#
# Nothing is trained here, and no process group is needed: torch's `SplitPoint` or the user's own modules make the
# stages, and torch's schedule runs them.


_UNUSED = (
    "planner", "search_timeout", "update", "disk_path", "accumulate", "plan", "micro_batches", "state_dtype",
    "placement_policy", "shard_param_frac", "offload_optim_frac", "offload_param_frac",
)  # fmt: skip
"""Options of the search for a plan, which the search for stages does not have."""


def plan_stages(
    model: "nn.Module | object | PreTrainedConfig | str",
    example_inputs: Inputs,
    *,
    stages: int,
    schedule: str,
    micro_batches: int,
    ranks: int | None = None,
    hardware: "Fleet | Cluster | str | None" = None,
    options: "Mapping[str, object] | Options | None" = None,
    state_bytes_per_element: int | None = None,
) -> PipelinePlan:
    """Return the `stages` of `model` on the ranks of a pipeline that runs `schedule` of `torch.distributed.pipelining`.

    The stages take equal seconds as far as layers and the memory of each rank allow. `schedule` is `gpipe`, `1f1b`,
    `interleaved-1f1b` or `looped-bfs`, or as torch writes it. `example_inputs` are the batch of a step, which
    `micro_batches` divide; as for `plan`, only its shapes count and nothing is run. Rank r runs the stages r,
    r + ranks, r + 2 x ranks, ...

    `hardware` names the devices of all ranks, as `"4 x a100-40g"` or `"2 x l4-24g + 1 x a6000-48g"`; None stands for
    as many devices like that of this machine as there are `ranks`: a rank for each stage, or under `interleaved-1f1b`
    and `looped-bfs` for every two. `options` are those of the backend; `device_memory` and `host_memory` are budgets of
    each rank.

    `split_points` of the result are keys for the `split_spec` of `torch.distributed.pipelining.pipeline`, and `modules`
    of each stage are the paths from which a stage module can be made by hand.

    Raises UnknownSchedule, NoFeasibleStages if no stages fit the ranks, and InvalidOption for more stages than layers,
    stages that are no multiple of the ranks, and micro-batches that do not divide the rows.

    Example:
        from torch.distributed.pipelining import SplitPoint

        made = elixir.plan_stages(model, batch, stages=2, schedule="1f1b", micro_batches=2, hardware="2 x a100-40g")
        spec = {name: SplitPoint.BEGINNING for name in made.split_points}
    """
    chosen = options if isinstance(options, Options) else parse_options(options)
    order = parse_schedule(schedule)
    numbers = {"stages": stages, "micro_batches": micro_batches, "ranks": 1 if ranks is None else ranks}
    for name, number in numbers.items():
        if type(number) is not int or number < 1:
            raise InvalidOption(name, number, "a number of 1 or more")
    fleet = fleet_of_ranks(hardware or chosen.hardware, stages, order, ranks)

    def captured() -> tuple[Capture, int]:
        whole = capture_model(find_described(model, example_inputs), example_inputs, options=chosen)
        return replace(whole, graph=of_micro_batch(whole.graph, micro_batches)), whole.graph.batch

    return found_stages(captured, order, stages, fleet, chosen, micro_batches, state_bytes_per_element)


def found_stages(
    captured: Callable[[], tuple[Capture, int]],
    schedule: TorchSchedule,
    stages: int,
    fleet: Fleet,
    options: Options,
    micro_batches: int,
    state_bytes_per_element: int | None = None,
) -> PipelinePlan:
    """Return the best stages on `fleet` beside those under every other schedule. `captured` returns the step of one
    micro-batch, and the rows of all. Raises the errors of `plan_stages`."""
    # Raises for numbers that torch refuses, before the capture.
    pipeline_order(schedule, stages, fleet.num_ranks, micro_batches)
    capture, rows = captured()
    search = stage_search(capture, fleet, options, rows, micro_batches, state_bytes_per_element)
    made = search.best(schedule, stages)
    return replace(made, compared=search.compared(stages))


def require_divides(micro_batches: int, rows: int) -> None:
    """Raise InvalidOption unless `micro_batches`, of any number, divide the `rows` of a step."""
    if micro_batches < 1 or rows % micro_batches:
        fitting = max((number for number in range(1, micro_batches) if rows % number == 0), default=1)
        expected = f"a number that divides the batch of {rows} rows, such as {fitting}"
        raise InvalidOption("micro_batches", micro_batches, expected)


def of_micro_batch(graph: StepGraph, micro_batches: int) -> StepGraph:
    """Return `graph` with the rows of a single micro-batch. Raises InvalidOption if `micro_batches` do not divide its
    rows, and UnsupportedModel if the graph does not say which bytes and operations belong to its rows."""
    require_divides(micro_batches, graph.batch)
    if micro_batches == 1:
        return graph
    try:
        return graph_of_rows(graph, graph.batch // micro_batches)
    except InvalidPlan as error:
        raise UnsupportedModel(graph.name, str(error)) from error


def fleet_of_ranks(
    hardware: "Fleet | Cluster | str | None", num_stages: int, schedule: TorchSchedule, ranks: int | None
) -> Fleet:
    """Return the fleet called `hardware`, of `ranks` ranks if they are given.

    A single device stands for as many as there are ranks, by default one for each stage or, under looped schedules,
    for every two. Raises InvalidOption if `ranks` contradicts the devices.
    """
    cluster: Cluster | None = None
    if isinstance(hardware, Fleet):
        fleet = hardware
    elif isinstance(hardware, str) and (named := named_fleet(hardware)) is not None:
        fleet = named
    else:
        cluster = hardware if isinstance(hardware, Cluster) else machine(torch.device("cpu"), hardware)
        fleet = fleet_of(cluster)
    if fleet.num_ranks > 1 or cluster is None:
        if ranks not in (None, fleet.num_ranks):
            raise InvalidOption("ranks", ranks, f"{fleet.num_ranks}, as {fleet.name} has devices")
        return fleet
    has_two = schedule.is_looped and num_stages > 2 and num_stages % 2 == 0
    num_ranks = (num_stages // 2 if has_two else num_stages) if ranks is None else ranks
    if isinstance(hardware, str) and not (hardware.lstrip()[:1].isdecimal() or hardware.endswith(".json")):
        return fleet_of(preset_of_ranks(hardware, num_ranks))
    return fleet_of(with_devices(cluster.alone(), num_ranks))


def stage_search(
    capture: Capture,
    fleet: Fleet,
    options: Options,
    rows: int,
    micro_batches: int,
    state_bytes_per_element: int | None = None,
) -> StageSearch:
    """Return the search for stages on `fleet`; `capture` is the step of one micro-batch.

    Raises InvalidOption for an option that the search for stages does not have.
    """
    default = Options()
    for name in _UNUSED:
        if getattr(options, name) != getattr(default, name):
            raise InvalidOption(name, getattr(options, name), "nothing beside stages: the plan of each stage has it")
    budgets: list[Budget] = []
    for rank, budget in enumerate(budgets_of(fleet, capture, options)):
        seen, device_bytes = fleet.seen_by(rank), budget.device_bytes + capture.base_bytes
        # On a CPU the ranks of a host share one memory.
        shares_memory = options.device_memory is None and not seen.h2d.overlaps_compute
        device_bytes = device_bytes // seen.num_local_ranks if shares_memory else device_bytes
        budgets.append(replace(budget, device_bytes=device_bytes))
    ask = StageAsk(
        graph=capture.graph, rows=rows, micro_batches=micro_batches, fleet=fleet, budgets=tuple(budgets),
        base_bytes=capture.base_bytes, trained=capture.trained(options, state_bytes_per_element),
        savings=savings_of(options),
    )  # fmt: skip
    return StageSearch(ask)
