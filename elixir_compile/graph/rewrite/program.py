"""Write the program of a half of a capture under a plan, an FX graph of calls of regions and of the executor, compare
it with the plan, and print it.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx
from torch.fx.node import Argument

from elixir_compile.base.errors import IllegalSchedule
from elixir_compile.base.units import format_bytes
from elixir_compile.graph.capture.markers import TICKET, gradient, key_of, parameter, ticket
from elixir_compile.graph.capture.node_facts import ints_of, is_number, outputs_of, source_of
from elixir_compile.graph.rewrite.micro_batches import SlicedValues
from elixir_compile.graph.rewrite.regions import Partition, RegionGraph, name_of, split_regions
from elixir_compile.ir import (
    Action,
    BucketId,
    BucketRef,
    GradientRef,
    GroupId,
    GroupRef,
    Lane,
    Phase,
    Plan,
    RegionRef,
    StepGraph,
    Target,
    Verb,
)
from elixir_compile.step import MemoryTimeline
from elixir_compile.step.as_run import as_run
from elixir_compile.step.divide import laps_of
from elixir_compile.step.works import halves_of

# ----------------------------------------------------------------------------------------------------------------------
# Format the programs of a step as text: one line for each node, with its lane and live bytes.


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


# ----------------------------------------------------------------------------------------------------------------------
# Write the program of a half of a capture under a plan: an FX graph of calls of regions and of the executor.
#
#     def forward(self, args):                      # a list; emptied, as the program must have the only references
#         primals_1 = args[0]; ...; args.clear()
#         executor = self.executor
#         b1_gather = executor.gather('b1')
#         b1 = executor.wait(b1_gather)
#         fwd_0 = self.fwd_0(boxed(primals_1, b1[0]))
#         executor.release('b1')
#         h_0_matmul_offload = executor.offload_saved('h.0.matmul', [gelu])
#         ...
#         return [loss, ticket, executor.nothing, ...]      # an empty tensor for a value not kept
#
# Saved values that stay in parts are no tensors. The executor keeps them, and autograd saves other tensors for them:
#
#         keep_parts = executor.keep_parts([add_3, ...])
#         kept_parts = executor.kept_parts(ticket, [add_3, ...], saved_layouts)    # in the backward
#
# The nodes are in the order of the schedule, and FX drops each value after its last use, so order and memory are as
# planned. The functions here decide nothing: each action comes from the schedule of the plan.


def boxed(*values: object) -> list[object]:
    """Return `values` as a list. A region empties the list, to have the only references."""
    return list(values)


_LAYOUTS = "saved_layouts"
"""The attribute of a program with the layouts of the saved values in parts."""
Lower = Callable[[RegionGraph], torch.nn.Module]


@dataclass(slots=True)
class _Writer:
    """The state of the program during writing."""

    halves: Partition
    plan: Plan
    phase: Phase
    keys: Mapping[str, int]
    """The key of each parameter, by its name."""
    graph: fx.Graph
    executor: fx.Node
    slices: Mapping[str, tuple[int, int]]
    """The dimension and the number of the slices of each saved value that the backward reads in slices, by its name."""
    in_parts: Sequence[str]
    """The names of the saved values that stay in parts."""
    values: dict[str, fx.Node] = field(default_factory=dict)
    """The node of the program for each value of the captured graph, by the name of the value."""
    bucket_values: dict[BucketId, fx.Node] = field(default_factory=dict)
    transfers: dict[Target, fx.Node] = field(default_factory=dict)


def write_program(
    halves: Partition,
    plan: Plan,
    phase: Phase,
    keys: Mapping[str, int],
    lower: Lower,
    executor: object,
    sliced: SlicedValues,
) -> fx.GraphModule:
    """Return the program of `phase`. Its `forward` takes a list of inputs, which it empties, and returns a list.

    `halves` were made for the activations of `plan`, `keys` maps parameter names to registry keys, `lower` compiles a
    region, and the program calls `executor`. `sliced` has the saved values that the backward reads in slices, and those
    that stay in parts.
    """
    source = halves.captured.forward if phase is Phase.FORWARD else halves.captured.backward_module
    regions = split_regions(source, plan.regions, phase, halves.inline)
    root = torch.nn.Module()
    vars(root)["executor"] = executor
    vars(root)[_LAYOUTS] = tuple(sliced.saved_in_parts.values())
    writer = _write_inputs(halves, plan, phase, keys, source.graph, sliced)
    actions = actions_of(plan, phase)
    if phase is Phase.BACKWARD:
        _write_copies(writer, actions)
    for action in actions:
        _write_action(writer, action, regions)
    _write_output(writer, source.graph)
    for region in regions.values():
        setattr(root, region.name, lower(region))
    module = fx.GraphModule(root, writer.graph, class_name=f"{phase.value.capitalize()}Program")
    module.graph.lint()
    return module


def actions_of(plan: Plan, phase: Phase) -> Sequence[Action]:
    """Return the actions of `phase` in the schedule of this rank, without updates, which the optimizer does.

    The forward ends behind its last `run` and the releases and offloads of activations directly after it. Raises
    IllegalSchedule if activations are offloaded later, because only the forward has them.
    """
    forward, behind = halves_of(plan)
    for action in behind:
        if action.verb is Verb.OFFLOAD and isinstance(action.target, GroupRef):
            raise IllegalSchedule(f"{action.target} is offloaded behind the forward.", f"  {action}    <-- here")
    return [action for action in (forward if phase is Phase.FORWARD else behind) if action.verb is not Verb.UPDATE]


def _write_inputs(
    halves: Partition,
    plan: Plan,
    phase: Phase,
    keys: Mapping[str, int],
    source: fx.Graph,
    sliced: SlicedValues,
) -> _Writer:
    """Begin the program with the reads of its inputs and of its executor."""
    graph = fx.Graph()
    args = graph.placeholder("args")
    away = halves.away_names if phase is Phase.BACKWARD else ()
    parts = tuple(sliced.saved_in_parts) if phase is Phase.BACKWARD else ()
    stand_ins: dict[str, fx.Node] = {}
    values: dict[str, fx.Node] = {}
    for index, node in enumerate(source.find_nodes(op="placeholder")):
        if node.target in away:
            continue
        if node.users or node.target == TICKET or is_number(node):
            value = graph.create_node("call_function", operator.getitem, (args, index), name=node.name)
            if node.target in parts:
                stand_ins[str(node.target)] = value
                continue
            value.meta = dict(node.meta)
            values[node.name] = value
    graph.call_method("clear", (args,))
    executor = graph.get_attr("executor")
    writer = _Writer(halves, plan, phase, keys, graph, executor, sliced.arriving, tuple(sliced.saved_in_parts), values)
    if phase is Phase.BACKWARD:
        stamp = halves.captured.forward.graph.find_nodes(op="call_function", target=ticket)[0]
        graph.call_method("check", (writer.executor, values[TICKET], _ticket_names(writer, stamp)))
        if parts:
            saved = [stand_ins[name] for name in parts]
            kept = graph.call_method("kept_parts", (writer.executor, values[TICKET], saved, graph.get_attr(_LAYOUTS)))
            _write_saved(writer, kept, parts)
    return writer


def _ticket_names(writer: _Writer, stamp: fx.Node) -> tuple[str, ...]:
    """Return the names of the parameters whose versions the ticket `stamp` has."""
    return tuple(writer.halves.captured.param_names[key] for key in ints_of(stamp, 0))


def _write_copies(writer: _Writer, actions: Sequence[Action]) -> None:
    """Get the sharded buckets left gathered by the forward, at the start of the backward.

    If another backward released a bucket, this call gathers it again. All ranks must gather together, so the call is
    there even if the graph of this rank does not read the bucket.
    """
    gathered = {action.target for action in actions if action.verb is Verb.GATHER}
    released = {action.target for action in actions if action.verb is Verb.RELEASE}
    for bucket in writer.plan.buckets:
        if bucket.is_sharded and BucketRef(bucket.id) in released - gathered:
            writer.bucket_values[bucket.id] = _call(writer, "whole", bucket.id, bucket.id)


def _write_action(writer: _Writer, action: Action, regions: Mapping[str, RegionGraph]) -> None:
    match action.verb, action.target:
        case Verb.RUN, RegionRef(region):
            _write_run(writer, regions[region])
        case Verb.GATHER, BucketRef(bucket) as target:
            writer.transfers[target] = _call(writer, "gather", bucket, f"{bucket}_gather")
        case Verb.WAIT, BucketRef(bucket) as target:
            writer.bucket_values[bucket] = _call(writer, "wait", writer.transfers.pop(target), bucket)
        case Verb.RELEASE, BucketRef(bucket):
            writer.bucket_values.pop(bucket, None)
            _call(writer, "release", bucket)
        case Verb.REDUCE, BucketRef(bucket):
            _write_reduce(writer, bucket)
        case Verb.OFFLOAD, GradientRef(bucket) as target:
            writer.transfers[target] = _call(writer, "offload", bucket, f"{bucket}_offload")
        case Verb.WAIT, GradientRef() as target:
            _call(writer, "wait", writer.transfers.pop(target))
        case Verb.OFFLOAD, GroupRef(group) as target:
            args = (writer.executor, group, [writer.values[name] for name in writer.halves.away[group]])
            name = f"{group}_offload"
            writer.transfers[target] = writer.graph.create_node("call_method", "offload_saved", args, name=name)
        case Verb.PREFETCH, GroupRef(group) as target:
            writer.transfers[target] = _write_prefetch(writer, group)
        case Verb.WAIT, GroupRef(group):
            _write_wait(writer, group)
        case _:
            raise AssertionError(f"a verified schedule has no `{action}` in a {writer.phase} program")


def _call(writer: _Writer, verb: str, argument: "str | fx.Node", name: str | None = None) -> fx.Node:
    return writer.graph.create_node("call_method", verb, (writer.executor, argument), name=name)


def _call_for_forward(writer: _Writer, verb: str, group: GroupId, name: str) -> fx.Node:
    """Call a method of the executor for the activations of a forward, given by the ticket."""
    args = (writer.executor, writer.values[TICKET], group)
    return writer.graph.create_node("call_method", verb, args, name=name)


def _write_prefetch(writer: _Writer, group: GroupId) -> fx.Node:
    call = _call_for_forward(writer, "prefetch", group, f"{group}_prefetch")
    slices = tuple(writer.slices.get(name) for name in writer.halves.away[group])
    if any(slices):
        call.args = (*call.args, slices)
    return call


def _write_wait(writer: _Writer, group: GroupId) -> None:
    """Wait for the offload of activations, which the forward may have started, or for their prefetch."""
    transfer = writer.transfers.pop(GroupRef(group), None)
    if transfer is None:
        transfer = _call_for_forward(writer, "leaving", group, f"{group}_offload")
    if transfer.target != Verb.PREFETCH:
        _call(writer, "wait", transfer)
        return
    _write_saved(writer, _call(writer, "wait", transfer, group), writer.halves.away[group])


def _write_saved(writer: _Writer, found: fx.Node, names: Sequence[str]) -> None:
    """Read the saved values `names` from the tuple `found`, in this order."""
    placeholders = writer.halves.captured.backward_module.graph.find_nodes(op="placeholder")
    by_target = {str(node.target): node for node in placeholders}
    for index, name in enumerate(names):
        node = by_target[name]
        value = writer.graph.create_node("call_function", operator.getitem, (found, index), name=node.name)
        value.meta = dict(node.meta)
        writer.values[node.name] = value


def _write_run(writer: _Writer, region: RegionGraph) -> None:
    graph = writer.graph
    arguments = [
        _param_value(writer, key_of(source)) if source.target is parameter else _value(writer, region, source)
        for source in region.inputs
    ]
    box = graph.call_function(boxed, tuple(arguments))
    results = graph.call_module(region.name, (box,))
    for index, node in enumerate(region.outputs):
        value = graph.create_node("call_function", operator.getitem, (results, index), name=node.name)
        value.meta = dict(node.meta)
        writer.values[node.name] = value


def _value(writer: _Writer, region: RegionGraph, source: fx.Node) -> fx.Node:
    """Return the value of `source`, which `region` reads. Raises IllegalSchedule if it is not in memory."""
    if source.name not in writer.values:
        offloaded = next((group for group, names in writer.halves.away.items() if source.target in names), None)
        where = "" if offloaded is None else f": it is in {offloaded}, which is offloaded and not back yet"
        raise IllegalSchedule(
            f"{region.id} reads {source.name}, which is not in memory{where}.", f"  run {region.id}    <-- here"
        )
    return writer.values[source.name]


def _param_value(writer: _Writer, key: int) -> fx.Node:
    name = writer.halves.captured.param_names[key]
    bucket = next(b for b in writer.plan.buckets if name in b.params)
    held = writer.bucket_values.get(bucket.id)
    if held is None:
        held = _call(writer, "whole", bucket.id, bucket.id)
        writer.bucket_values[bucket.id] = held
    return writer.graph.call_function(operator.getitem, (held, bucket.params.index(name)))


def _write_reduce(writer: _Writer, bucket_id: BucketId) -> None:
    bucket = next(b for b in writer.plan.buckets if b.id == bucket_id)
    # A bucket may hold parameters that only other graphs read.
    members = {writer.keys[name]: position for position, name in enumerate(bucket.params) if name in writer.keys}
    markers = writer.halves.captured.backward_module.graph.find_nodes(op="call_function", target=gradient)
    found = [(members[key_of(node)], source_of(node)) for node in markers if key_of(node) in members]
    positions, made = tuple(position for position, _ in found), [writer.values[grad.name] for _, grad in found]
    # If sharded, the reduce frees the full gradients once they are copied, before the mean is complete.
    grads = writer.graph.call_function(boxed, tuple(made)) if bucket.is_sharded else made
    reduced = writer.graph.call_method("reduce", (writer.executor, bucket_id, positions, grads))
    if bucket.is_sharded:
        writer.transfers[GradientRef(bucket_id)] = reduced


def _write_output(writer: _Writer, source: fx.Graph) -> None:
    outputs = outputs_of(source)
    num_given = writer.halves.captured.num_outputs if writer.phase is Phase.FORWARD else len(outputs)
    away, in_parts = writer.halves.away_names, writer.in_parts
    saved = [None if isinstance(node, fx.Node) and node.name in away else node for node in outputs[num_given:]]
    nothing = None
    kept: dict[str, fx.Node] = {}
    if None in saved:
        args = (writer.executor, "nothing")
        nothing = writer.graph.create_node("call_function", getattr, args, name="nothing")
    if in_parts and writer.phase is Phase.FORWARD:
        args = (writer.executor, [writer.values[name] for name in in_parts])
        found = writer.graph.call_method("keep_parts", args)
        kept = {
            name: writer.graph.call_function(operator.getitem, (found, place)) for place, name in enumerate(in_parts)
        }

    def value(node: Argument) -> Argument:
        if not isinstance(node, fx.Node):
            return node
        if node.target is ticket:
            return writer.graph.call_method("ticket", (writer.executor, _ticket_names(writer, node)))
        if node.target is parameter:
            return _param_value(writer, key_of(node))
        return kept.get(node.name) or writer.values[node.name]

    given = [value(node) for node in outputs[:num_given]]
    writer.graph.output([*given, *(nothing if node is None else value(node) for node in saved)])


# ----------------------------------------------------------------------------------------------------------------------
# Compare a program with its plan: its actions, its waits, and its reads of released buckets.


_ACTIONS = frozenset({"gather", "wait", "release", "reduce", "offload", "offload_saved", "prefetch"})
"""The methods of the executor that are actions of a schedule."""


def check(program: fx.GraphModule, plan: Plan, phase: Phase) -> None:
    """Raise IllegalSchedule if `program` does not obey `plan`.

    It must do the actions of `phase` in order, wait once for each transfer, and read no bucket after its release.
    """
    _check_order(program, plan, phase)
    _check_waits(program)
    _check_releases(program)


def _check_order(program: fx.GraphModule, plan: Plan, phase: Phase) -> None:
    actions = [(action.verb, action.target) for action in actions_of(plan, phase)]
    regions = {name_of(region.id): RegionRef(region.id) for region in plan.regions}
    written = [found for node in program.graph.nodes if (found := _action(node, regions)) is not None]
    for position, (wanted, found) in enumerate(zip(actions, written, strict=False)):
        if wanted != found:
            does, has = f"{found[0]} {found[1]}", f"{wanted[0]} {wanted[1]}"
            raise _fault(actions, position, f"the {phase} program does `{does}` where the schedule has `{has}`")
    if len(actions) != len(written):
        position = min(len(actions), len(written))
        raise _fault(
            actions, position, f"the {phase} program does {len(written)} actions, the schedule has {len(actions)}"
        )


def _action(node: fx.Node, regions: Mapping[str, RegionRef]) -> tuple[Verb, Target] | None:
    """Return the action that `node` does, or None if it does none. `regions` holds the regions by attribute name."""
    if node.op == "call_module":
        return Verb.RUN, regions[str(node.target)]
    if node.op != "call_method" or node.target not in _ACTIONS:
        return None
    if node.target == Verb.WAIT:
        waited = source_of(node, 1)
        return Verb.WAIT, GradientRef(_bucket(waited)) if waited.target == Verb.REDUCE else _target(waited)
    return Verb.OFFLOAD if node.target == "offload_saved" else Verb(str(node.target)), _target(node)


def _target(call: fx.Node) -> Target:
    """Return the target of a call of the executor."""
    match call.target:
        case Verb.OFFLOAD:
            return GradientRef(_bucket(call))
        case "offload_saved":
            return GroupRef(GroupId(str(call.args[1])))
        case Verb.PREFETCH | "leaving":
            return GroupRef(GroupId(str(call.args[2])))
        case _:
            return BucketRef(_bucket(call))


def _bucket(call: fx.Node) -> BucketId:
    """Return the bucket of a call of the executor."""
    return BucketId(str(call.args[1]))


def _check_waits(program: fx.GraphModule) -> None:
    for node in program.graph.nodes:
        if node.op == "call_method" and node.target in (Verb.GATHER, Verb.OFFLOAD, Verb.PREFETCH, "offload_saved"):
            num_waits = sum(user.target == Verb.WAIT for user in node.users)
            # The backward may wait for an offload of the forward, by the ticket.
            is_left_to_backward = node.target == "offload_saved" and not node.users
            if not is_left_to_backward and (num_waits != 1 or len(node.users) != 1):
                raise IllegalSchedule(
                    f"the handle of `{node.target} {_target(node)}` is waited for {num_waits} times, needs exactly once"
                )


def _check_releases(program: fx.GraphModule) -> None:
    position = {node: index for index, node in enumerate(program.graph.nodes)}
    held: dict[BucketId, fx.Node] = {}
    for node in program.graph.nodes:
        if node.op != "call_method":
            continue
        if node.target == Verb.WAIT and source_of(node, 1).target == Verb.GATHER:
            held[_bucket(source_of(node, 1))] = node
        elif node.target == "whole":
            held[_bucket(node)] = node
        elif node.target == Verb.RELEASE and _bucket(node) in held:
            reader = _last_reader(held.pop(_bucket(node)), position)
            if position[reader] > position[node]:
                raise IllegalSchedule(f"`{reader.name}` reads bucket {node.args[1]} after `release {node.args[1]}`")


def _last_reader(bucket: fx.Node, position: dict[fx.Node, int]) -> fx.Node:
    """Return the last reader of the bucket's tensors, which is the box of a region."""
    readers = [user for view in bucket.users for user in view.users]
    return max((bucket, *readers), key=position.__getitem__)


def _fault(actions: Sequence[tuple[Verb, Target]], position: int, sentence: str) -> IllegalSchedule:
    lines = [
        f"  {verb} {target}{'    <-- here' if index == position else ''}"
        for index, (verb, target) in enumerate(actions)
    ]
    return IllegalSchedule(sentence, "\n".join(lines[max(position - 3, 0) : position + 4]))
