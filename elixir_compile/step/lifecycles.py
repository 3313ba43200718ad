"""Tables of the legal states and moves of a bucket's parameters, its gradient and activations, with error sentences.

```text
  parameters  SHARDED --gather--> GATHERING --wait--> GATHERED --release--> RELEASED --gather--> GATHERING ...
  gradient    EMPTY --run--> FILLING --run--> FULL --reduce--> REDUCED --update--> UPDATED     parameters on the device
              ... FULL --reduce--> REDUCING --wait--> REDUCED --update--> UPDATED              the same, in shards
              ... REDUCED --offload--> LEAVING --wait--> ON_HOST --update--> UPDATED           parameters on the host
  activations EMPTY --run--> FILLING --run--> FULL --offload--> LEAVING --wait--> ON_HOST      offloaded
              ... ON_HOST --prefetch--> ARRIVING --wait--> ON_DEVICE --run--> ON_DEVICE
```

A pair of state and event without a move is a fault. Its sentence has the fields `{bucket}`, `{group}` (of activations)
and `{region}` (the running one).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """The state of a bucket's parameters, its gradient, or a group of activations."""

    ON_DEVICE = "on device"
    SHARDED = "sharded"
    GATHERING = "gathering"
    GATHERED = "gathered"
    RELEASED = "released"
    ABSENT = "absent"
    """A gradient that no op of the graph writes, or recomputed activations."""
    FROZEN = "frozen"
    EMPTY = "empty"
    FILLING = "filling"
    FULL = "full"
    REDUCING = "reducing"
    REDUCED = "reduced"
    LEAVING = "leaving"
    ON_HOST = "on host"
    ARRIVING = "arriving"
    UPDATED = "updated"


class Event(StrEnum):
    """The effect of an action on a bucket's parameters, its gradient, or a group of activations."""

    RUN = "run"
    """A region reads the parameters, or touches the gradient or activations without completing them."""
    COMPLETE = "complete"
    """A region writes the gradient, or the forward touches the activations, for the last time."""
    GATHER = "gather"
    WAIT = "wait"
    RELEASE = "release"
    REDUCE = "reduce"
    OFFLOAD = "offload"
    PREFETCH = "prefetch"
    UPDATE = "update"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifecycle:
    """A table: the first state, the legal moves, and a sentence for every other event or last state."""

    start: State
    moves: Mapping[tuple[State, Event], State]
    faults: Mapping[tuple[State, Event], str]
    """Sentences for an event in a certain state; sentences for any state are in `always`."""
    always: Mapping[Event, str]
    unfinished: Mapping[State, str]
    """Sentences for states in which the step may not end."""

    def fault(self, state: State, event: Event) -> str:
        """Return the sentence for an event without a move."""
        return self.faults.get((state, event)) or self.always[event]


S, E = State, Event

_PARAM_MOVES = {
    (S.SHARDED, E.GATHER): S.GATHERING,
    (S.GATHERING, E.WAIT): S.GATHERED,
    (S.GATHERED, E.RUN): S.GATHERED,
    (S.GATHERED, E.RELEASE): S.RELEASED,
}
_PARAM_FAULTS = {
    (S.SHARDED, E.RUN): "{region} reads {bucket}, which was not gathered.",
    (S.SHARDED, E.WAIT): "{bucket} is waited for, but no gather of it is under way.",
    (S.SHARDED, E.RELEASE): "{bucket} is released, but was not gathered.",
    (S.GATHERING, E.RUN): "{region} reads {bucket} before its gather was waited for.",
    (S.GATHERING, E.GATHER): "{bucket} is gathered twice without a release in between.",
    (S.GATHERING, E.RELEASE): "{bucket} is released before its gather was waited for.",
    (S.GATHERED, E.GATHER): "{bucket} is gathered twice without a release in between.",
    (S.GATHERED, E.WAIT): "{bucket} is waited for twice.",
    (S.RELEASED, E.RUN): "{region} reads {bucket}, which was released before.",
    (S.RELEASED, E.WAIT): "{bucket} is waited for, but no gather of it is under way.",
    (S.RELEASED, E.RELEASE): "{bucket} is released twice.",
    (S.RELEASED, E.GATHER): "{bucket} is resident, but gathered a second time.",
}
_PARAM_UNFINISHED = {
    S.GATHERING: "The gather of {bucket} is never waited for.",
    S.GATHERED: "{bucket} is gathered and never released.",
}

GATHERED_PARAMS = Lifecycle(
    start=S.SHARDED,
    moves=_PARAM_MOVES | {(S.RELEASED, E.GATHER): S.GATHERING},
    faults=_PARAM_FAULTS,
    always={},
    unfinished=_PARAM_UNFINISHED,
)
RESIDENT_PARAMS = Lifecycle(
    start=S.SHARDED, moves=_PARAM_MOVES, faults=_PARAM_FAULTS, always={}, unfinished=_PARAM_UNFINISHED
)
DEVICE_PARAMS = Lifecycle(
    start=S.ON_DEVICE,
    moves={(S.ON_DEVICE, E.RUN): S.ON_DEVICE},
    faults={},
    always={
        E.GATHER: "{bucket} is gathered, but its parameters live on the device.",
        E.WAIT: "{bucket} is waited for, but its parameters live on the device.",
        E.RELEASE: "{bucket} is released, but its parameters live on the device.",
    },
    unfinished={},
)

_FILL = {
    (S.EMPTY, E.RUN): S.FILLING,
    (S.EMPTY, E.COMPLETE): S.FULL,
    (S.FILLING, E.RUN): S.FILLING,
    (S.FILLING, E.COMPLETE): S.FULL,
}
_GRAD_FILL = _FILL | {(S.FULL, E.RUN): S.FULL}
_EARLY = (S.EMPTY, S.FILLING, S.FULL)
_GRAD_FAULTS = {
    (S.EMPTY, E.REDUCE): "The gradient of {bucket} is reduced before it is complete.",
    (S.FILLING, E.REDUCE): "The gradient of {bucket} is reduced before it is complete.",
    (S.LEAVING, E.OFFLOAD): "The gradient of {bucket} is offloaded twice.",
    (S.ON_HOST, E.OFFLOAD): "The gradient of {bucket} is offloaded twice.",
    (S.UPDATED, E.OFFLOAD): "The gradient of {bucket} is offloaded twice.",
    (S.ON_HOST, E.WAIT): "The gradient of {bucket} is waited for twice.",
    (S.UPDATED, E.WAIT): "The gradient of {bucket} is waited for twice.",
    (S.REDUCED, E.UPDATE): "{bucket} is updated before its gradient was offloaded.",
    (S.LEAVING, E.UPDATE): "{bucket} is updated before the offload of its gradient was waited for.",
    (S.UPDATED, E.UPDATE): "{bucket} is updated twice.",
    **{(state, E.OFFLOAD): "The gradient of {bucket} is offloaded before it is reduced." for state in _EARLY},
    **{(state, E.UPDATE): "{bucket} is updated before its gradient is reduced." for state in _EARLY},
}
_GRAD_ALWAYS = {
    E.RUN: "{region} touches the gradient of {bucket} after it was reduced.",
    E.COMPLETE: "{region} touches the gradient of {bucket} after it was reduced.",
    E.REDUCE: "The gradient of {bucket} is reduced twice.",
    E.WAIT: "The gradient of {bucket} is waited for, but no offload of it is under way.",
}
_NEVER_REDUCED = dict.fromkeys(_EARLY, "The gradient of {bucket} is never reduced.")
_NEVER_UPDATED = "{bucket} is never updated."

HOST_GRAD = Lifecycle(
    start=S.EMPTY,
    moves=_GRAD_FILL
    | {
        (S.FULL, E.REDUCE): S.REDUCED,
        (S.REDUCED, E.OFFLOAD): S.LEAVING,
        (S.LEAVING, E.WAIT): S.ON_HOST,
        (S.ON_HOST, E.UPDATE): S.UPDATED,
    },
    faults=_GRAD_FAULTS,
    always=_GRAD_ALWAYS,
    unfinished=_NEVER_REDUCED
    | {
        S.REDUCED: "The gradient of {bucket} is never offloaded.",
        S.LEAVING: "The offload of the gradient of {bucket} is never waited for.",
        S.ON_HOST: _NEVER_UPDATED,
    },
)
DEVICE_GRAD = Lifecycle(
    start=S.EMPTY,
    moves=_GRAD_FILL | {(S.FULL, E.REDUCE): S.REDUCED, (S.REDUCED, E.UPDATE): S.UPDATED},
    faults={key: sentence for key, sentence in _GRAD_FAULTS.items() if key[1] is not E.OFFLOAD},
    always=_GRAD_ALWAYS
    | {E.OFFLOAD: "The gradient of {bucket} is offloaded, but it stays on the device with its parameters."},
    unfinished=_NEVER_REDUCED | {S.REDUCED: _NEVER_UPDATED},
)
SHARDED_GRAD = Lifecycle(
    start=S.EMPTY,
    moves=_GRAD_FILL
    | {
        (S.FULL, E.REDUCE): S.REDUCING,
        (S.REDUCING, E.WAIT): S.REDUCED,
        (S.REDUCED, E.UPDATE): S.UPDATED,
    },
    faults={
        **DEVICE_GRAD.faults,
        (S.REDUCING, E.UPDATE): "{bucket} is updated before the reduce of its gradient was waited for.",
        (S.REDUCED, E.WAIT): "The gradient of {bucket} is waited for twice.",
    },
    always={**DEVICE_GRAD.always, E.WAIT: "The gradient of {bucket} is waited for, but no reduce of it is under way."},
    unfinished=_NEVER_REDUCED
    | {S.REDUCING: "The reduce of the gradient of {bucket} is never waited for.", S.REDUCED: _NEVER_UPDATED},
)
ABSENT_GRAD = Lifecycle(
    start=S.ABSENT,
    moves={(S.ABSENT, E.RUN): S.ABSENT, (S.ABSENT, E.UPDATE): S.UPDATED},
    faults={},
    always={
        E.REDUCE: "The gradient of {bucket} is reduced, but no op writes it.",
        E.OFFLOAD: "The gradient of {bucket} is offloaded, but no op writes it.",
        E.WAIT: "The gradient of {bucket} is waited for, but no op writes it.",
        E.UPDATE: "{bucket} is updated twice.",
    },
    unfinished={S.ABSENT: _NEVER_UPDATED},
)
FROZEN_GRAD = Lifecycle(
    start=S.FROZEN,
    moves={(S.FROZEN, E.RUN): S.FROZEN, (S.FROZEN, E.COMPLETE): S.FROZEN},
    faults={},
    always=dict.fromkeys(
        (E.REDUCE, E.OFFLOAD, E.WAIT, E.UPDATE),
        "{bucket} has no gradient: it is frozen, or the graph has no update.",
    ),
    unfinished={},
)

_ACTIVATION_FAULTS = {
    **{
        (state, E.OFFLOAD): "{group} is offloaded before the forward is done with it." for state in (S.EMPTY, S.FILLING)
    },
    (S.FULL, E.RUN): "The plan offloads {group}, but {region} reads it before that.",
    (S.LEAVING, E.RUN): "{region} reads {group}, which is on its way to the host.",
    (S.ON_HOST, E.RUN): "{region} reads {group}, which is on the host.",
    (S.ARRIVING, E.RUN): "{region} reads {group} before its prefetch was waited for.",
    (S.ON_HOST, E.WAIT): "The offload of {group} is waited for twice.",
    (S.ON_DEVICE, E.WAIT): "The prefetch of {group} is waited for twice.",
    (S.LEAVING, E.PREFETCH): "{group} is prefetched before its offload was waited for.",
    **{(state, E.PREFETCH): "{group} is prefetched twice." for state in (S.ARRIVING, S.ON_DEVICE)},
}
OFFLOADED_ACTIVATIONS = Lifecycle(
    start=S.EMPTY,
    moves=_FILL
    | {
        (S.FULL, E.OFFLOAD): S.LEAVING,
        (S.LEAVING, E.WAIT): S.ON_HOST,
        (S.ON_HOST, E.PREFETCH): S.ARRIVING,
        (S.ARRIVING, E.WAIT): S.ON_DEVICE,
        (S.ON_DEVICE, E.RUN): S.ON_DEVICE,
    },
    faults=_ACTIVATION_FAULTS,
    always={
        E.OFFLOAD: "{group} is offloaded twice.",
        E.WAIT: "{group} is waited for, but neither an offload nor a prefetch of it is under way.",
        E.PREFETCH: "{group} is prefetched, but was not offloaded.",
    },
    unfinished={
        S.FULL: "The plan offloads {group}, but the schedule never does.",
        S.LEAVING: "The offload of {group} is never waited for.",
        S.ON_HOST: "{group} is offloaded and never comes back.",
        S.ARRIVING: "The prefetch of {group} is never waited for.",
    },
)
KEPT_ACTIVATIONS = Lifecycle(
    start=S.ON_DEVICE,
    moves={},
    faults={},
    always=dict.fromkeys(
        (E.OFFLOAD, E.WAIT, E.PREFETCH), "{group} is not to be moved: the plan keeps it on the device."
    ),
    unfinished={},
)
RECOMPUTED_ACTIVATIONS = Lifecycle(
    start=S.ABSENT,
    moves={},
    faults={},
    always=dict.fromkeys((E.OFFLOAD, E.WAIT, E.PREFETCH), "{group} is not to be moved: the plan recomputes it."),
    unfinished={},
)
