"""Find who trains how many rows among ranks that differ, `elixir_compile.shares(model, sample, batch=64, mesh=mesh)`,
and plan and simulate all ranks together.
"""

import json
import logging
import math
import platform
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from operator import attrgetter
from typing import TYPE_CHECKING

import torch
from torch import nn

from elixir_compile import compat
from elixir_compile.base.errors import InvalidOption, InvalidPlan, NoFeasiblePlan, NoFeasibleShares, UnsupportedModel
from elixir_compile.base.options import Options, parse_options
from elixir_compile.ir import Kind, Plan
from elixir_compile.ir.hardware import (
    Cluster,
    Fleet,
    cluster_from_json,
    cluster_to_json,
    fleet_of,
    fleet_of_nodes,
    with_devices,
    with_like_seats,
)
from elixir_compile.ir.share import Share, Shares, shares_from_json, shares_to_json
from elixir_compile.runtime.distributed.control import Carried, ControlChannel, new_control_channel
from elixir_compile.runtime.distributed.errors import RanksDiffer
from elixir_compile.search import Problem
from elixir_compile.search.evaluator import deadline_in
from elixir_compile.search.joint.ranks import plan_classes
from elixir_compile.search.question import Question, question_of
from elixir_compile.search.shares.choose import LEAST_ROWS, Ask, Budget, Choice, ShareSearch, State
from elixir_compile.search.shares.refine import FoundChoice, SimulatedStep, by_formula, refined
from elixir_compile.session.cache import plan_for
from elixir_compile.session.machine import device_budget_bytes, host_budget_bytes, machine, named_fleet
from elixir_compile.session.planning import savings_of
from elixir_compile.step.batch_rows import graph_of_rows
from elixir_compile.tools.preview.capture import Capture, Inputs
from elixir_compile.tools.preview.few_layers import capture_model
from elixir_compile.tools.preview.models import find_described

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedConfig


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
            try:
                self._found[shares] = self._searched(shares)
            except (NoFeasiblePlan, InvalidPlan) as error:
                log.info("shares of %s rows have no plans: %s", [share.num_rows for share in shares], error)
                self._found[shares] = None
        return self._found[shares]

    def questions(self, shares: tuple[Share, ...]) -> tuple[Question, ...]:
        """Return what the plans of `shares` answer, in their order."""
        return tuple(question_of(*self._asked(shares, ranks[0])) for ranks in self._members(shares))

    def _members(self, shares: tuple[Share, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of each class."""
        pairs = zip(shares, self._budgets, strict=True)
        return self._fleet.classes([(share.num_rows, share.state, budget) for share, budget in pairs])

    def _searched(self, shares: tuple[Share, ...]) -> tuple[Plan, ...]:
        members = self._members(shares)
        asked = [self._asked(shares, ranks[0]) for ranks in members]
        options = {problem.rank: own for problem, own in asked}

        def each(work: Callable[[int], Plan]) -> list[Plan]:
            return [work(number) for number in range(len(asked))]

        problems = [problem for problem, _ in asked]
        return plan_classes(problems, members, lambda problem: self._plan_of(problem, options[problem.rank]), each)

    def _plan_of(self, problem: Problem, options: Options) -> Plan:
        """Return the plan for `problem`, that of a class of ranks; other choices may have asked for it already.

        It depends on the rows of the class and the dtypes of moments, and where parts of the state are unequal, on the
        parts of all ranks.
        """
        dtypes = tuple(sorted((name, param.state_dtype or "") for name, param in problem.params.items()))
        key = (problem.rank, problem.graph.batch, problem.state, problem.released, dtypes)
        if key not in self._by_class:
            try:
                self._by_class[key] = plan_for(problem, options)
            except NoFeasiblePlan as error:
                self._by_class[key] = error.renewed()
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
    fleet = _named(hardware)
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
        return ShareSearch(
            Ask(
                graph=graph,
                fleet=fleet,
                budgets=tuple(budgets),
                state=state,
                batch=batch,
                savings=savings_of(options),
            )
        )
    except InvalidPlan as error:
        raise UnsupportedModel(graph.name, str(error)) from error


def budgets_of(fleet: Fleet, capture: Capture, options: Options) -> tuple[Budget, ...]:
    """Return the memory of each rank of `fleet`: that of the profile less its reserve, or as `options` say.

    The ranks of a host share its memory equally.
    """
    found: list[Budget] = []
    for rank in range(fleet.num_ranks):
        seen = fleet.seen_by(rank)
        device_bytes = seen.device.memory_bytes - seen.device.reserve_bytes
        host_bytes = (seen.host.memory_bytes - seen.host.reserve_bytes) // seen.num_local_ranks
        device_bytes = device_bytes if options.device_memory is None else options.device_memory
        host_bytes = host_bytes if options.host_memory is None else options.host_memory
        found.append(Budget(device_bytes=device_bytes - capture.base_bytes, host_bytes=host_bytes))
    return tuple(found)


def _named(hardware: "Fleet | Cluster | str | None") -> Fleet | None:
    if hardware is None or isinstance(hardware, Fleet):
        return hardware
    if isinstance(hardware, Cluster):
        return fleet_of(hardware)
    fleet = named_fleet(hardware)
    if fleet is not None:
        return fleet

    return fleet_of(machine(torch.device("cpu"), hardware))


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
