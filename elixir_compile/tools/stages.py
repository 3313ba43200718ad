"""`elixir_compile.plan_stages(model, batch, stages=4, ...)`: which layers each rank of a pipeline trains.

Nothing is trained here, and no process group is needed: torch's `SplitPoint` or the user's own modules make the stages,
and torch's schedule runs them.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from elixir_compile.base.errors import InvalidOption, InvalidPlan, UnsupportedModel
from elixir_compile.base.options import Options, parse_options
from elixir_compile.ir import StepGraph
from elixir_compile.ir.hardware import Cluster, Fleet, fleet_of, preset_of_ranks, with_devices
from elixir_compile.ir.pipeline import PipelinePlan, TorchSchedule, parse_schedule, pipeline_order
from elixir_compile.search.shares.choose import Budget
from elixir_compile.search.stages.choose import StageAsk, StageSearch
from elixir_compile.session.machine import machine, named_fleet
from elixir_compile.session.planning import savings_of
from elixir_compile.step.batch_rows import graph_of_rows
from elixir_compile.tools.preview.capture import Capture, Inputs
from elixir_compile.tools.preview.few_layers import capture_model
from elixir_compile.tools.preview.models import find_described
from elixir_compile.tools.shares import budgets_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

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
    for name, number in (
        ("stages", stages),
        ("micro_batches", micro_batches),
        ("ranks", 1 if ranks is None else ranks),
    ):
        if type(number) is not int or number < 1:
            raise InvalidOption(name, number, "a number of 1 or more")
    fleet = fleet_of_ranks(hardware or chosen.hardware, stages, order, ranks)
    pipeline_order(
        order, stages, fleet.num_ranks, micro_batches
    )  # raises for numbers that torch refuses, before the capture
    capture = capture_model(find_described(model, example_inputs), example_inputs, options=chosen)
    rows = capture.graph.batch
    own = replace(capture, graph=of_micro_batch(capture.graph, micro_batches))
    search = stage_search(own, fleet, chosen, rows, micro_batches, state_bytes_per_element)
    made = search.best(order, stages)
    return replace(made, compared=search.compared(stages))


def of_micro_batch(graph: StepGraph, micro_batches: int) -> StepGraph:
    """Return `graph` with the rows of a single micro-batch. Raises InvalidOption if `micro_batches` do not divide its
    rows, and UnsupportedModel if the graph does not say which bytes and operations belong to its rows."""
    if graph.batch % micro_batches:
        fitting = max(number for number in range(1, micro_batches) if graph.batch % number == 0)
        expected = f"a number that divides the batch of {graph.batch} rows, such as {fitting}"
        raise InvalidOption("micro_batches", micro_batches, expected)
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
        graph=capture.graph,
        rows=rows,
        micro_batches=micro_batches,
        fleet=fleet,
        budgets=tuple(budgets),
        base_bytes=capture.base_bytes,
        trained=capture.trained(options, state_bytes_per_element),
        savings=savings_of(options),
    )
    return StageSearch(ask)
