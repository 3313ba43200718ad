"""`elixir-compile plan MODEL --stages 4 --schedule looped-bfs --micro-batches 16`: the stages of a pipeline."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from elixir_compile.base.errors import ElixirError, InvalidOption
from elixir_compile.base.units import format_bytes, format_s
from elixir_compile.ir.pipeline import SPLIT_BACKWARD, TorchSchedule, parse_schedule, pipeline_order
from elixir_compile.ir.pipeline_plan import PipelinePlan, ScheduleOutlook, layers_text, pipeline_to_json
from elixir_compile.tools.cli.plan import Request
from elixir_compile.tools.cli.reports import fail
from elixir_compile.tools.stages import fleet_of_ranks, stage_search

_LEAST_WIDTH = 140
"""Columns of the tables: in fewer, the names of layers would be cut."""
_ROWS = 8
"""Rows of a micro-batch if no batch is given: as of a forward without stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagesRequest:
    """The arguments of a command line with `--stages`, as typed."""

    plan: Request
    """All other arguments; its `batch` counts only if it was typed."""
    stages: int
    schedule: str | None
    batch: int | None
    ranks: int | None
    """Whether typed or not, unlike `plan.ranks`."""
    state_bytes: int | None = None

    def micro_batches(self) -> int:
        """Return the micro-batches of a step. Raises InvalidOption unless they are a number."""
        given = self.plan.options.get("micro_batches")
        if not isinstance(given, int):
            raise InvalidOption("micro_batches", given, "a number beside --stages, such as --micro-batches 8")
        return given

    def rows(self, micro_batches: int) -> int:
        """Return the rows of a step. Raises InvalidOption unless `micro_batches` divide them."""
        rows = _ROWS * micro_batches if self.batch is None else self.batch
        if micro_batches < 1 or rows % micro_batches:
            fitting = max((number for number in range(1, micro_batches) if rows % number == 0), default=1)
            expected = f"a number that divides the batch of {rows} rows, such as {fitting}"
            raise InvalidOption("micro_batches", micro_batches, expected)
        return rows

    def of_torch(self) -> TorchSchedule:
        """Return the schedule: by default 1F1B with a stage per rank, else breadth-first.

        Raises UnknownSchedule, and the errors of `fleet_of_ranks`.
        """
        if self.schedule is not None:
            return parse_schedule(self.schedule)
        fleet = fleet_of_ranks(self.plan.hardware, self.stages, TorchSchedule.ONE_F_ONE_B, self.ranks)
        is_single = fleet.num_ranks == self.stages
        return TorchSchedule.ONE_F_ONE_B if is_single else TorchSchedule.LOOPED_BFS


def run_stages(asked: StagesRequest, *, output: Path | None, as_json: bool) -> int:
    """Search the stages that are `asked` for, print them and every schedule beside them, and write them to `output`;
    return the exit code: 2 if no stages fit, 1 on errors.

    If `as_json`, stdout gets the JSON of the stages and nothing else.
    """
    try:
        made = _made(asked)
    except ElixirError as error:
        return fail(error, as_json=as_json)
    notes = Console(stderr=True, highlight=False, soft_wrap=True)
    text = pipeline_to_json(made)
    try:
        if output is not None:
            output.write_text(text + "\n", encoding="utf-8")
            notes.print(f"written: {output}", markup=False)
    except OSError as error:
        notes.print(f"error: cannot write {output}: {error.strerror}", markup=False)
        return 1
    if as_json:
        sys.stdout.write(text + "\n")
        return 0
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, _LEAST_WIDTH)
    console.print(stages_table(made))
    console.print(ranks_table(made))
    for name, value in stage_lines(made):
        console.print(f"{name:<17} {value}", markup=False)
    return 0


def _made(asked: StagesRequest) -> PipelinePlan:
    schedule, micro_batches = asked.of_torch(), asked.micro_batches()
    rows = asked.rows(micro_batches)
    # A micro-batch of a pipeline is a forward of its own: the options of the search for a plan have none.
    rest = replace(asked.plan, options={**asked.plan.options, "micro_batches": None})
    options = rest.parsed_options()
    fleet = fleet_of_ranks(asked.plan.hardware, asked.stages, schedule, asked.ranks)
    pipeline_order(
        schedule, asked.stages, fleet.num_ranks, micro_batches
    )  # raises for numbers that torch refuses, before the capture
    capture = replace(rest, batch=rows // micro_batches).capture()
    search = stage_search(capture, fleet, options, rows, micro_batches, asked.state_bytes)
    made = search.best(schedule, asked.stages)
    return replace(made, compared=search.compared(asked.stages))


def stages_table(made: PipelinePlan) -> Table:
    """Return a table with a row for each stage."""
    rows = f"{made.rows} rows in {made.micro_batches} micro-batches"
    title = f"{made.name}, {len(made.stages)} stages on {made.hardware} under {made.schedule}, {rows}"
    table = Table(title=title, title_justify="left")
    for name in ("stage", "rank", "layers", "activations", "homes"):
        table.add_column(name)
    for name in ("forward", "backward", "sent", "outstanding"):
        table.add_column(name, justify="right")
    for stage in made.stages:
        table.add_row(
            str(stage.stage),
            str(stage.rank),
            layers_text(stage.layers),
            stage.treatment,
            stage.homes,
            format_s(stage.forward_s),
            format_s(stage.backward_s),
            format_bytes(stage.sent_bytes),
            f"{stage.outstanding} x {format_bytes(stage.saved_bytes)}",
        )
    return table


def ranks_table(made: PipelinePlan) -> Table:
    """Return a table with a row for each rank."""
    table = Table(title="ranks, in a step", title_justify="left")
    for name in ("rank", "device", "stages"):
        table.add_column(name)
    for name in ("busy", "bubble", "peak", "budget", "host", "sent", "received"):
        table.add_column(name, justify="right")
    for rank in made.ranks:
        own = [str(stage.stage) for stage in made.stages if stage.rank == rank.rank]
        sizes = (rank.peak_bytes, rank.budget_bytes, rank.host_bytes, rank.sent_bytes, rank.received_bytes)
        table.add_row(
            str(rank.rank), rank.device, ", ".join(own), format_s(rank.busy_s), f"{rank.bubble:.1%}",
            *map(format_bytes, sizes),
        )  # fmt: skip
    return table


def stage_lines(made: PipelinePlan) -> list[tuple[str, str]]:
    """Return (name, text) of the step, of the split points, and of a step under every schedule of torch."""
    lines = [("step", f"{format_s(made.step_s)}, simulated"), ("split points", ", ".join(made.split_points) or "none")]
    copies = [(stage.stage, name) for stage in made.stages for name in stage.copies]
    lines += [("copy", f"stage {stage} has a copy of {name}: add up its gradients") for stage, name in copies]
    lines += [(str(other.schedule), _outlook_text(other, made)) for other in made.compared]
    lines.append(("not compared", ", ".join(SPLIT_BACKWARD) + ": compiled stages have one backward"))
    return lines


def _outlook_text(other: ScheduleOutlook, made: PipelinePlan) -> str:
    stages = f"{other.num_stages} stages"
    if other.because:
        return f"{stages}: {other.because}"
    times = other.step_s / made.step_s if made.step_s else 1.0
    same = other.schedule is made.schedule and other.num_stages == len(made.stages)
    beside = "these stages" if same else f"{times:.2f} times as long"
    return (
        f"{stages}: {format_s(other.step_s)}, {beside}, bubble {other.bubble:.1%}, peak "
        f"{format_bytes(other.peak_bytes)}, sent {format_bytes(other.sent_bytes)}"
    )
