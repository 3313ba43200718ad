"""Format the programs of a step as text: one line for each node, with its lane and live bytes."""

import operator

from torch import fx

from elixir_compile.base.units import format_bytes
from elixir_compile.graph.capture.node_facts import outputs_of, source_of
from elixir_compile.graph.rewrite.regions import name_of
from elixir_compile.ir import Lane, Phase, Plan, StepGraph
from elixir_compile.step import MemoryTimeline
from elixir_compile.step.laps import laps_of
from elixir_compile.step.recompute import as_run

_LANES = {"gather": Lane.H2D, "prefetch": Lane.H2D, "offload": Lane.D2H, "offload_saved": Lane.D2H}
_WIDTH = 72


def program_text(
    plan: Plan,
    timeline: MemoryTimeline,
    graph: StepGraph,
    forward: fx.GraphModule | None,
    backward: fx.GraphModule | None,
) -> str:
    """Return the planned peak and both programs as text.

    A line has the lane of its node and, for a region, the most live bytes during the region.
    """
    peaks = _region_peaks(plan, timeline, graph)
    prediction = plan.prediction
    lines = [
        f"{plan.name}: planned peak {format_bytes(prediction.device_peak_bytes)} of {format_bytes(plan.budget_bytes)}"
        f" at {prediction.device_peak_at}"
    ]
    for phase, program in ((Phase.FORWARD, forward), (Phase.BACKWARD, backward)):
        if program is None:
            continue
        lines.append(f"{phase}(args):")
        lines.extend(_node_lines(program, peaks))
    return "\n".join(lines)


def _region_peaks(plan: Plan, timeline: MemoryTimeline, graph: StepGraph) -> dict[str, int]:
    index = {op.id: position for position, op in enumerate(as_run(graph, plan.activations, laps_of(plan)).ops)}
    return {
        name_of(region.id): int(max(timeline.live_bytes[index[region.first] : index[region.last] + 1]))
        for region in plan.regions
    }


def _node_lines(program: fx.GraphModule, peaks: dict[str, int]) -> list[str]:
    lines = []
    for node in program.graph.nodes:
        text = _call_text(node)
        if text is None:
            continue
        notes = []
        if node.op == "call_module":
            notes = [Lane.COMPUTE.value, f"live {format_bytes(peaks[str(node.target)])}"]
        elif node.op == "call_method" and str(node.target) in _LANES:
            notes = [_LANES[str(node.target)].value]
        lines.append(f"  {text:<{_WIDTH}} # {'  '.join(notes)}" if notes else f"  {text}")
    return lines


def _call_text(node: fx.Node) -> str | None:
    """Return `node` as a line of Python, None if it only unpacks values."""
    if node.op == "call_module":
        made = [user.name for user in node.users]
        inputs = [_value_text(value) for value in source_of(node).args]
        return f"{_short(made)} = {node.target}({_short(inputs)})"
    if node.op == "call_method" and node.target != "clear":
        args = ", ".join(_value_text(value) for value in node.args[1:])
        call = f"{node.target}({args})"
        return f"{node.name} = {call}" if node.users else call
    if node.op == "output":
        return f"return {_short([_value_text(value) for value in outputs_of(node.graph)])}"
    return None


def _value_text(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{_short([_value_text(v) for v in value])}]"
    if isinstance(value, fx.Node) and value.target is operator.getitem and source_of(value).op == "call_method":
        return f"{source_of(value).name}[{value.args[1]}]"
    return value.name if isinstance(value, fx.Node) else repr(value)


def _short(names: list[str], most: int = 6) -> str:
    if len(names) <= most:
        return ", ".join(names)
    return f"{', '.join(names[: most - 1])}, ... {len(names) - most + 1} more"
