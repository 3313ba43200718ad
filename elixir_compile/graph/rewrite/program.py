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
from elixir_compile.graph.capture.node_facts import (
    TICKET,
    gradient,
    ints_of,
    is_number,
    key_of,
    outputs_of,
    parameter,
    source_of,
    ticket,
)
from elixir_compile.graph.rewrite.regions import Partition, RegionGraph, SlicedValues, name_of, split_regions
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
from elixir_compile.step.liveness import halves_of

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
    index = {op.id: position for position, op in enumerate(as_run(graph, plan.activations, laps_of(plan)).ops)}
    peaks = {
        name_of(region.id): int(max(timeline.live_bytes[index[region.first] : index[region.last] + 1]))
        for region in plan.regions
    }
    prediction = plan.prediction
    lines = [
        f"{plan.name}: planned peak {format_bytes(prediction.device_peak_bytes)} of {format_bytes(plan.budget_bytes)}"
        f" at {prediction.device_peak_at}"
    ]
    for phase, program in ((Phase.FORWARD, forward), (Phase.BACKWARD, backward)):
        if program is None:
            continue
        lines.append(f"{phase}(args):")
        for node in program.graph.nodes:
            text = _call_text(node)
            if text is None:
                continue
            note = ""
            if node.op == "call_module":
                note = f"{Lane.COMPUTE.value}  live {format_bytes(peaks[str(node.target)])}"
            elif node.op == "call_method" and str(node.target) in _LANES:
                note = _LANES[str(node.target)].value
            lines.append(f"  {text:<{_WIDTH}} # {note}" if note else f"  {text}")
    return "\n".join(lines)


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
# planned. The writer decides nothing: each action comes from the schedule of the plan.


def boxed(*values: object) -> list[object]:
    """Return `values` as a list. A region empties the list, to have the only references."""
    return list(values)


_LAYOUTS = "saved_layouts"
"""The attribute of a program with the layouts of the saved values in parts."""
Lower = Callable[[RegionGraph], torch.nn.Module]


@dataclass(slots=True)
class _Writer:
    """Writes the program of one half."""

    halves: Partition
    plan: Plan
    phase: Phase
    keys: Mapping[str, int]
    """The key of each parameter, by its name."""
    sliced: SlicedValues
    graph: fx.Graph = field(default_factory=fx.Graph)
    executor: fx.Node = field(init=False)
    values: dict[str, fx.Node] = field(default_factory=dict)
    """The node of the program for each value of the captured graph, by the name of the value."""
    bucket_values: dict[BucketId, fx.Node] = field(default_factory=dict)
    transfers: dict[Target, fx.Node] = field(default_factory=dict)

    def call(self, verb: str, *args: Argument, name: str | None = None) -> fx.Node:
        """Call the method `verb` of the executor."""
        return self.graph.create_node("call_method", verb, (self.executor, *args), name=name)

    def take(self, found: fx.Node, index: int, node: fx.Node) -> None:
        """Read entry `index` of `found`, the value of `node` of the captured graph."""
        value = self.graph.create_node("call_function", operator.getitem, (found, index), name=node.name)
        value.meta = dict(node.meta)
        self.values[node.name] = value

    def take_saved(self, found: fx.Node, names: Sequence[str]) -> None:
        """Read the saved values `names` from the tuple `found`, in this order."""
        placeholders = self.halves.captured.backward_module.graph.find_nodes(op="placeholder")
        by_target = {str(node.target): node for node in placeholders}
        for index, name in enumerate(names):
            self.take(found, index, by_target[name])

    def begin(self, source: fx.Graph) -> None:
        """Write the reads of the inputs, of which `source` has the placeholders, and of the executor."""
        args, is_backward = self.graph.placeholder("args"), self.phase is Phase.BACKWARD
        away = self.halves.away_names if is_backward else ()
        parts = tuple(self.sliced.saved_in_parts) if is_backward else ()
        stand_ins: dict[str, fx.Node] = {}
        for index, node in enumerate(source.find_nodes(op="placeholder")):
            is_read = node.users or node.target == TICKET or is_number(node)
            if node.target in away or not is_read:
                continue
            if node.target in parts:
                get = operator.getitem
                stand_ins[str(node.target)] = self.graph.create_node(
                    "call_function", get, (args, index), name=node.name
                )
            else:
                self.take(args, index, node)
        self.graph.call_method("clear", (args,))
        self.executor = self.graph.get_attr("executor")
        if is_backward:
            stamp = self.halves.captured.forward.graph.find_nodes(op="call_function", target=ticket)[0]
            self.call("check", self.values[TICKET], self.ticket_names(stamp))
        if parts:
            saved = [stand_ins[name] for name in parts]
            layouts = self.graph.get_attr(_LAYOUTS)
            self.take_saved(self.call("kept_parts", self.values[TICKET], saved, layouts), parts)

    def ticket_names(self, stamp: fx.Node) -> tuple[str, ...]:
        """Return the names of the parameters whose versions the ticket `stamp` has."""
        return tuple(self.halves.captured.param_names[key] for key in ints_of(stamp, 0))

    def act(self, action: Action, regions: Mapping[str, RegionGraph]) -> None:
        """Write `action`."""
        match action.verb, action.target:
            case Verb.RUN, RegionRef(region):
                self.run(regions[region])
            case Verb.GATHER, BucketRef(bucket) as target:
                self.transfers[target] = self.call("gather", bucket, name=f"{bucket}_gather")
            case Verb.WAIT, BucketRef(bucket) as target:
                self.bucket_values[bucket] = self.call("wait", self.transfers.pop(target), name=bucket)
            case Verb.RELEASE, BucketRef(bucket):
                self.bucket_values.pop(bucket, None)
                self.call("release", bucket)
            case Verb.REDUCE, BucketRef(bucket):
                self.reduce(bucket)
            case Verb.OFFLOAD, GradientRef(bucket) as target:
                self.transfers[target] = self.call("offload", bucket, name=f"{bucket}_offload")
            case Verb.WAIT, GradientRef() as target:
                self.call("wait", self.transfers.pop(target))
            case Verb.OFFLOAD, GroupRef(group) as target:
                saved = [self.values[name] for name in self.halves.away[group]]
                self.transfers[target] = self.call("offload_saved", group, saved, name=f"{group}_offload")
            case Verb.PREFETCH, GroupRef(group) as target:
                slices = tuple(self.sliced.arriving.get(name) for name in self.halves.away[group])
                args = (self.values[TICKET], group, *((slices,) if any(slices) else ()))
                self.transfers[target] = self.call("prefetch", *args, name=f"{group}_prefetch")
            case Verb.WAIT, GroupRef(group):
                # For the prefetch of activations, or for their offload, which the forward may have started.
                transfer = self.transfers.pop(GroupRef(group), None)
                if transfer is None:
                    transfer = self.call("leaving", self.values[TICKET], group, name=f"{group}_offload")
                if transfer.target != Verb.PREFETCH:
                    self.call("wait", transfer)
                else:
                    self.take_saved(self.call("wait", transfer, name=group), self.halves.away[group])
            case _:
                raise AssertionError(f"a verified schedule has no `{action}` in a {self.phase} program")

    def run(self, region: RegionGraph) -> None:
        """Call `region`. Raises IllegalSchedule if a value that it reads is not in memory."""
        arguments: list[fx.Node] = []
        for source in region.inputs:
            if source.target is parameter:
                arguments.append(self.param_value(key_of(source)))
                continue
            if source.name not in self.values:
                offloaded = next((group for group, names in self.halves.away.items() if source.target in names), None)
                where = "" if offloaded is None else f": it is in {offloaded}, which is offloaded and not back yet"
                raise IllegalSchedule(
                    f"{region.id} reads {source.name}, which is not in memory{where}.", f"  run {region.id}    <-- here"
                )
            arguments.append(self.values[source.name])
        results = self.graph.call_module(region.name, (self.graph.call_function(boxed, tuple(arguments)),))
        for index, node in enumerate(region.outputs):
            self.take(results, index, node)

    def param_value(self, key: int) -> fx.Node:
        """Return the gathered parameter with `key`, from the copy of its bucket."""
        name = self.halves.captured.param_names[key]
        bucket = next(b for b in self.plan.buckets if name in b.params)
        if bucket.id not in self.bucket_values:
            self.bucket_values[bucket.id] = self.call("whole", bucket.id, name=bucket.id)
        place = bucket.params.index(name)
        return self.graph.call_function(operator.getitem, (self.bucket_values[bucket.id], place))

    def reduce(self, bucket_id: BucketId) -> None:
        """Reduce the gradients of a bucket, which may hold parameters that only other graphs read."""
        bucket = next(b for b in self.plan.buckets if b.id == bucket_id)
        members = {self.keys[name]: position for position, name in enumerate(bucket.params) if name in self.keys}
        markers = self.halves.captured.backward_module.graph.find_nodes(op="call_function", target=gradient)
        found = [(members[key_of(node)], source_of(node)) for node in markers if key_of(node) in members]
        positions, made = tuple(position for position, _ in found), [self.values[grad.name] for _, grad in found]
        # If sharded, the reduce frees the full gradients once they are copied, before the mean is complete.
        grads = self.graph.call_function(boxed, tuple(made)) if bucket.is_sharded else made
        reduced = self.call("reduce", bucket_id, positions, grads)
        if bucket.is_sharded:
            self.transfers[GradientRef(bucket_id)] = reduced

    def end(self, source: fx.Graph) -> None:
        """Return the outputs of `source`; an empty tensor for a saved value that is away."""
        outputs, is_forward = outputs_of(source), self.phase is Phase.FORWARD
        num_given = self.halves.captured.num_outputs if is_forward else len(outputs)
        away, in_parts = self.halves.away_names, tuple(self.sliced.saved_in_parts)
        saved = [None if isinstance(node, fx.Node) and node.name in away else node for node in outputs[num_given:]]
        nothing = None
        kept: dict[str, fx.Node] = {}
        if None in saved:
            nothing = self.graph.create_node("call_function", getattr, (self.executor, "nothing"), name="nothing")
        if in_parts and is_forward:
            found = self.call("keep_parts", [self.values[name] for name in in_parts])
            kept = {
                name: self.graph.call_function(operator.getitem, (found, place)) for place, name in enumerate(in_parts)
            }

        def value(node: Argument) -> Argument:
            if not isinstance(node, fx.Node):
                return node
            if node.target is ticket:
                return self.call("ticket", self.ticket_names(node))
            if node.target is parameter:
                return self.param_value(key_of(node))
            return kept.get(node.name) or self.values[node.name]

        given = [value(node) for node in outputs[:num_given]]
        self.graph.output([*given, *(nothing if node is None else value(node) for node in saved)])


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
    writer, actions = _Writer(halves, plan, phase, keys, sliced), actions_of(plan, phase)
    writer.begin(source.graph)
    if phase is Phase.BACKWARD:
        # Get the sharded buckets left gathered by the forward. If another backward released one, this call gathers it
        # again. All ranks must gather together, so the call is there even if this graph does not read the bucket.
        gathered = {action.target for action in actions if action.verb is Verb.GATHER}
        released = {action.target for action in actions if action.verb is Verb.RELEASE}
        for bucket in plan.buckets:
            if bucket.is_sharded and BucketRef(bucket.id) in released - gathered:
                writer.bucket_values[bucket.id] = writer.call("whole", bucket.id, name=bucket.id)
    for action in actions:
        writer.act(action, regions)
    writer.end(source.graph)
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


# ----------------------------------------------------------------------------------------------------------------------
# Compare a program with its plan: its actions, its waits, and its reads of released buckets.


_ACTIONS = frozenset({"gather", "release", "reduce", "offload", "offload_saved", "prefetch"})
"""The methods of the executor that are actions of a schedule, beside `wait`."""


def check(program: fx.GraphModule, plan: Plan, phase: Phase) -> None:
    """Raise IllegalSchedule if `program` does not obey `plan`.

    It must do the actions of `phase` in order, wait once for each transfer, and read no bucket after its release.
    """
    _check_order(program, plan, phase)
    position = {node: index for index, node in enumerate(program.graph.nodes)}
    held: dict[BucketId, fx.Node] = {}
    calls = [node for node in program.graph.nodes if node.op == "call_method"]
    for node in calls:
        if node.target in (Verb.GATHER, Verb.OFFLOAD, Verb.PREFETCH, "offload_saved"):
            num_waits = sum(user.target == Verb.WAIT for user in node.users)
            # The backward may wait for an offload of the forward, by the ticket.
            is_left_to_backward = node.target == "offload_saved" and not node.users
            if not is_left_to_backward and (num_waits != 1 or len(node.users) != 1):
                raise IllegalSchedule(
                    f"the handle of `{node.target} {_target(node)}` is waited for {num_waits} times, needs exactly once"
                )
    for node in calls:
        if node.target == Verb.WAIT and source_of(node, 1).target == Verb.GATHER:
            held[_bucket(source_of(node, 1))] = node
        elif node.target == "whole":
            held[_bucket(node)] = node
        elif node.target == Verb.RELEASE and _bucket(node) in held:
            bucket = held.pop(_bucket(node))
            # The readers of the bucket's tensors are the boxes of regions.
            readers = [user for view in bucket.users for user in view.users]
            last = max((bucket, *readers), key=position.__getitem__)
            if position[last] > position[node]:
                raise IllegalSchedule(f"`{last.name}` reads bucket {node.args[1]} after `release {node.args[1]}`")


def _check_order(program: fx.GraphModule, plan: Plan, phase: Phase) -> None:
    actions = [(action.verb, action.target) for action in actions_of(plan, phase)]
    regions = {name_of(region.id): RegionRef(region.id) for region in plan.regions}
    written: list[tuple[Verb, Target]] = []
    for node in program.graph.nodes:
        if node.op == "call_module":
            written.append((Verb.RUN, regions[str(node.target)]))
        elif node.op == "call_method" and node.target == Verb.WAIT:
            waited = source_of(node, 1)
            is_reduced = waited.target == Verb.REDUCE
            written.append((Verb.WAIT, GradientRef(_bucket(waited)) if is_reduced else _target(waited)))
        elif node.op == "call_method" and node.target in _ACTIONS:
            verb = Verb.OFFLOAD if node.target == "offload_saved" else Verb(str(node.target))
            written.append((verb, _target(node)))

    def fault(position: int, sentence: str) -> IllegalSchedule:
        lines = [
            f"  {verb} {target}{'    <-- here' if index == position else ''}"
            for index, (verb, target) in enumerate(actions)
        ]
        return IllegalSchedule(sentence, "\n".join(lines[max(position - 3, 0) : position + 4]))

    for position, (wanted, found) in enumerate(zip(actions, written, strict=False)):
        if wanted != found:
            does, has = f"{found[0]} {found[1]}", f"{wanted[0]} {wanted[1]}"
            raise fault(position, f"the {phase} program does `{does}` where the schedule has `{has}`")
    if len(actions) != len(written):
        text = f"the {phase} program does {len(written)} actions, the schedule has {len(actions)}"
        raise fault(min(len(actions), len(written)), text)


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
