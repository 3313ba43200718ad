"""Compare a program with its plan: its actions, its waits, and its reads of released buckets."""

from collections.abc import Mapping, Sequence

from torch import fx

from elixir_compile.base.errors import IllegalSchedule
from elixir_compile.graph.capture.node_facts import source_of
from elixir_compile.graph.rewrite.program import actions_of
from elixir_compile.graph.rewrite.regions import name_of
from elixir_compile.ir import BucketId, BucketRef, GradientRef, GroupId, GroupRef, Phase, Plan, RegionRef, Target, Verb

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
