"""The roll call before each forward: all ranks run the same graphs, plan anew together, or raise together."""

from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum

import torch

from elixir_compile.base.errors import ElixirError
from elixir_compile.runtime.distributed.control import ControlChannel
from elixir_compile.runtime.distributed.errors import PeerFailed, RanksDiffer
from elixir_compile.runtime.executor import Executor
from elixir_compile.runtime.saved import number_of
from elixir_compile.session.agreement.rank_facts import digest_of

_FAULT = "!"
"""First character of the text of a rank that failed; roll calls begin with a letter."""
_ROLL = "graphs to run"
_DIGITS = 24
"""Digits of each digest in a roll call: a letter, two digests and a number fit into one short text of the control
channel."""
_ALIKE = "-"
"""Sent in place of a digest if the graphs of all ranks are equal."""
_FIX = (
    "Catch an exception in the middle of a step on all ranks, or on none. The calls so far are dropped on all of them, "
    "and the next forward begins a new step: call `optimizer.zero_grad()` before it."
)


class Step(StrEnum):
    """The next step of all ranks."""

    RUN = "run"
    PLAN = "plan"
    JOIN = "join"
    """Look up the plan for these graphs, and call again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RollCall:
    """The result of a roll call, equal on all ranks."""

    step: Step
    graph_set_digest: str
    """A digest of the graphs that all ranks are about to run; empty if these are equal."""
    is_measured: bool = False
    """Whether every rank knows its seconds of a step, which can be exchanged now."""


def roll_call(
    control: ControlChannel,
    key: str,
    graph_set_digest: str,
    *,
    wants_plan: bool,
    is_measured: bool = False,
    number: int = 0,
    doing: str = "",
) -> RollCall:
    """Return the next step of all ranks of `control` before the graph `key` can run; all ranks must call this.

    `graph_set_digest` names the graphs for which this rank has a plan at hand. If the graphs are others, the step is
    JOIN. Else it is PLAN if a rank `wants_plan`, and RUN if none does. `is_measured` says that this rank knows its
    seconds of a step. `number` is the number of the forward in a step of several calls, else 0. Takes one collective of
    96 bytes per rank.

    Raises RanksDiffer if a rank calls something else or has another `number`, with the text `doing` of each rank, and
    PeerFailed if a rank failed.
    """
    here = graph_set_digest or _ALIKE
    letter = "p" if wants_plan else "m" if is_measured else "r"
    texts = control.exchange(f"{letter}{digest_of([key])[:_DIGITS]}{here} {number}", _ROLL, doing)
    failed = [place for place, text in enumerate(texts) if text.startswith(_FAULT)]
    if failed:
        raise PeerFailed([control.ranks[place] for place in failed], _ROLL, texts[failed[0]].removeprefix(_FAULT))
    calls, numbers = zip(*(text.split(" ") for text in texts), strict=True)
    control.require_same(numbers, doing, _FIX)
    keys = [call[1 : 1 + _DIGITS] for call in calls]
    found = "" if len(set(keys)) == 1 else digest_of(keys)[:_DIGITS]
    if any(call[1 + _DIGITS :] != (found or _ALIKE) for call in calls):
        return RollCall(step=Step.JOIN, graph_set_digest=found)
    plans = any(call.startswith("p") for call in calls)
    step = Step.PLAN if plans else Step.RUN
    return RollCall(step=step, graph_set_digest=found, is_measured=all(call.startswith("m") for call in calls))


def call_the_roll(
    executor: Executor,
    key: str,
    graph_set_digest: str,
    *,
    wants_plan: bool,
    is_measured: bool,
    number: int,
    doing: str,
) -> RollCall:
    """Return the next step of all ranks of `executor` before this rank runs the graph `key`: see `roll_call`.

    If a queued update of this rank failed, its error is raised here, and PeerFailed on the other ranks. If ranks
    differ, all of them drop the calls of the running step.
    """
    if executor.peers is None:
        return RollCall(step=Step.PLAN if wants_plan else Step.RUN, graph_set_digest=graph_set_digest)
    control = executor.peers.control
    try:
        executor.buckets.check_updates()
    except Exception as error:
        with suppress(ElixirError):  # this rank's own error says more than an error about a lost peer
            control.exchange(f"{_FAULT}{type(error).__name__}: {error}", _ROLL, doing)
        raise
    asked = {"wants_plan": wants_plan, "is_measured": is_measured, "number": number, "doing": doing}
    try:
        found = roll_call(control, key, graph_set_digest, **asked)
    except RanksDiffer:
        executor.abandon()
        raise
    executor.saved.num_calls += 1
    return found


def meet_in_backward(executor: Executor, graph: object, name: str, ticket: torch.Tensor) -> None:
    """Wait until all ranks of `executor` are about to run the backward of the same call.

    This rank runs the backward of the graph `name`, for the forward of `ticket`; the calls of a step are counted for
    `graph`. Raises RanksDiffer if a rank is about to run the backward of another call, or a forward, as after a graph
    break that no other rank has.
    """
    if executor.peers is None:
        return
    control, number = executor.peers.control, executor.calls.number_of_backward(graph, number_of(ticket))
    doing = f"begins the backward of {name}{executor.calls.words(number)}"
    numbers = control.exchange(str(number), f"backward of {executor.saved.call_of(ticket)}", doing)
    control.require_same(numbers, doing, _FIX)
