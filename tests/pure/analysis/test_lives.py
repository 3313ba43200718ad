"""Every state that a life can reach has a move or a sentence for every event that can meet it."""

import pytest

from elixir_compile.step import lifecycles
from elixir_compile.step.lifecycles import Event, Lifecycle, State

PARAMS = {Event.RUN, Event.GATHER, Event.WAIT, Event.RELEASE}
CARRIED = {Event.OFFLOAD, Event.WAIT, Event.PREFETCH}
GRADS = {Event.RUN, Event.COMPLETE, Event.REDUCE, Event.OFFLOAD, Event.WAIT, Event.UPDATE}
TABLES = {
    "gathered params": (lifecycles.GATHERED_PARAMS, PARAMS),
    "resident params": (lifecycles.RESIDENT_PARAMS, PARAMS),
    "device params": (lifecycles.DEVICE_PARAMS, PARAMS),
    "host gradient": (lifecycles.HOST_GRAD, GRADS),
    "device gradient": (lifecycles.DEVICE_GRAD, GRADS),
    "sharded gradient": (lifecycles.SHARDED_GRAD, GRADS),
    "absent gradient": (lifecycles.ABSENT_GRAD, GRADS - {Event.COMPLETE}),
    "frozen gradient": (lifecycles.FROZEN_GRAD, GRADS),
    "offloaded activations": (lifecycles.OFFLOADED_ACTIVATIONS, CARRIED | {Event.RUN}),
    "kept activations": (lifecycles.KEPT_ACTIVATIONS, CARRIED),
    "recomputed activations": (lifecycles.RECOMPUTED_ACTIVATIONS, CARRIED),
}


def reachable(table: Lifecycle) -> set[State]:
    found = {table.start}
    while more := {after for (before, _), after in table.moves.items() if before in found} - found:
        found |= more
    return found


@pytest.mark.parametrize("name", TABLES)
def test_every_event_has_a_move_or_a_sentence(name: str) -> None:
    table, events = TABLES[name]
    for state in reachable(table):
        for event in events:
            if (state, event) not in table.moves and not (
                state is State.UPDATED and event in (Event.RUN, Event.COMPLETE)
            ):
                subject = "{group}" if name.endswith("activations") else "{bucket}"
                assert subject in table.fault(state, event)


@pytest.mark.parametrize("name", TABLES)
def test_a_life_can_end(name: str) -> None:
    table, _ = TABLES[name]
    assert reachable(table) - set(table.unfinished)
    assert set(table.unfinished) <= reachable(table)
