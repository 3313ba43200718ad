"""Compare a program with its plan: its actions, its waits, and its reads of released buckets."""

from torch import fx

from elixir_compile.capture.node_facts import source_of
from elixir_compile.errors import IllegalSchedule
from elixir_compile.ir import BucketId, Phase, Plan, Verb, grad_of
from elixir_compile.rewrite.program import actions_of

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
    planned = [f"{action.verb} {action.what}" for action in actions_of(plan, phase)]
    written = [text for node in program.graph.nodes if (text := _action_text(node)) is not None]
    for position, (wanted, found) in enumerate(zip(planned, written, strict=False)):
        if wanted != found:
            raise _fault(planned, position, f"the {phase} program does `{found}` where the schedule has `{wanted}`")
    if len(planned) != len(written):
        position = min(len(planned), len(written))
        raise _fault(
            planned, position, f"the {phase} program does {len(written)} actions, the schedule has {len(planned)}"
        )


def _action_text(node: fx.Node) -> str | None:
    if node.op == "call_module":
        return f"{Verb.RUN} {str(node.target).replace('_', '.', 1)}"
    if node.op != "call_method" or node.target not in _ACTIONS:
        return None
    if node.target == Verb.WAIT:
        waited = source_of(node, 1)
        return f"{Verb.WAIT} {grad_of(_bucket(waited)) if waited.target == Verb.REDUCE else _subject(waited)}"
    verb = Verb.OFFLOAD if node.target == "offload_saved" else str(node.target)
    return f"{verb} {_subject(node)}"


def _subject(call: fx.Node) -> str:
    """Return the target of a call of the executor, in the words of a schedule."""
    if call.target == Verb.OFFLOAD:
        return grad_of(_bucket(call))
    return str(call.args[2] if call.target in (Verb.PREFETCH, "leaving") else call.args[1])


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
                    f"the handle of `{node.target} {_subject(node)}` is waited for {num_waits} times, "
                    "needs exactly once"
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


def _fault(planned: list[str], position: int, sentence: str) -> IllegalSchedule:
    lines = [f"  {line}{'    <-- here' if index == position else ''}" for index, line in enumerate(planned)]
    return IllegalSchedule(sentence, "\n".join(lines[max(position - 3, 0) : position + 4]))
