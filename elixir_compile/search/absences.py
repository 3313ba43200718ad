"""When offloaded activations leave the device and when they come back, as op indices of the step as it is run."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from elixir_compile.analysis.liveness import Liveness
from elixir_compile.ir import Activations, GroupId, Phase, Saving, StepGraph


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadInterval:
    """One group of activations that goes to the host and comes back."""

    group: GroupId
    nbytes: int
    num_copies: int
    """Storages, each a copy of its own."""
    leave: int
    """The last op of the forward that touches any of them: they leave after it."""
    first: int
    """The first op of the backward that reads any of them."""
    births: tuple[tuple[int, int], ...]
    """(op index, bytes) of each allocation in the forward."""
    lasts: tuple[tuple[int, int], ...]
    """(op index, bytes) of the last use of each in the backward."""


def offload_intervals(
    step: StepGraph, lives: Liveness, activations: Iterable[Activations]
) -> tuple[OffloadInterval, ...]:
    """Return the absences under `activations`, in the order in which they begin."""
    away = [group for group in activations if group.saving is Saving.OFFLOAD]
    owner = {name: i for i, group in enumerate(away) for name in group.storages}
    leave, first = [0] * len(away), [len(step.ops)] * len(away)
    for i, op in enumerate(step.ops):
        for name in (*op.reads, *op.writes):
            number = owner.get(name)
            if number is None:
                continue
            if op.phase is Phase.FORWARD:
                leave[number] = i
            else:
                first[number] = min(first[number], i)
    nbytes = {storage.id: storage.nbytes for storage in step.storages}
    found = [
        _offload_interval(group, lives, nbytes, leave[number], first[number])
        for number, group in enumerate(away)
        if first[number] < len(step.ops)
    ]
    return tuple(sorted(found, key=lambda absence: (absence.leave, absence.group)))


def leave_ends(found: Sequence[OffloadInterval], num_forward: int, lag: int) -> dict[int, int]:
    """Return, per absence, the last op at which it is still on the device: its own `leave`, or, with a `lag`, that of
    so many later ones; all are gone when the forward ends."""
    ends = [absence.leave for absence in found[lag:]] + [num_forward - 1] * min(lag, len(found))
    return dict(enumerate(ends))


def _offload_interval(group: Activations, lives: Liveness, nbytes: dict, leave: int, first: int) -> OffloadInterval:
    own = [(lives.lives[name], nbytes[name]) for name in group.storages if name in lives.lives]
    return OffloadInterval(
        group=group.id,
        nbytes=sum(size for _, size in own),
        num_copies=len(own),
        leave=leave,
        first=first,
        births=tuple((life.first, size) for life, size in own),
        lasts=tuple((life.last, size) for life, size in own),
    )
