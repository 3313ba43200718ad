"""Find the ops at which each storage of a graph is live if nothing is moved.

```text
  op        0    1    2    3    4    5 (update)
  param     ------------------------------      the whole step; input, buffer and optimizer state too
  saved          ----------------               first write to last use
  temp           -----                          an output of the forward: at least to the forward's last op. A loss
                                                with the storage of its inputs: to the backward's last op
  grad                     ---------------      first write to the end of the step
```

A storage is live at every op from its first to its last touch, both included. If a plan moves it, `plan_timeline`
shortens its life.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from elixir_compile.ir import Kind, OpId, Phase, StepGraph, StorageId

_WHILE_NEEDED = (Kind.TEMP, Kind.WORKSPACE, Kind.SAVED, Kind.GRAD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """Op indices between which a storage is live, both included."""

    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Liveness:
    """The life of every storage of a graph, if it has one."""

    ops: tuple[OpId, ...]
    lives: Mapping[StorageId, Life]
    """Temporary, saved and gradient storages untouched by any op are never allocated, and are not listed."""


def liveness(graph: StepGraph) -> Liveness:
    """Return the life of every storage of `graph`."""
    firsts, lasts = _touches(graph)
    end = len(graph.ops) - 1
    forward_end = max((index for index, op in enumerate(graph.ops) if op.phase is Phase.FORWARD), default=-1)
    run_end = max((index for index, op in enumerate(graph.ops) if op.phase is not Phase.UPDATE), default=-1)
    outputs = frozenset(graph.outputs)
    lives: dict[StorageId, Life] = {}
    for storage in graph.storages:
        name = storage.id
        if storage.kind not in _WHILE_NEEDED:
            lives[name] = Life(first=0, last=end)
        elif name in firsts:
            last = end if storage.kind is Kind.GRAD else lasts[name]
            if name in outputs:
                # The caller of `backward` holds the loss. No plan counts its 4 bytes, but kernels may give it more.
                last = max(last, run_end if storage.traced else forward_end)
            lives[name] = Life(first=firsts[name], last=last)
    return Liveness(ops=tuple(op.id for op in graph.ops), lives=lives)


def _touches(graph: StepGraph) -> tuple[dict[StorageId, int], dict[StorageId, int]]:
    """Return the index of the first and of the last op touching each storage. The first op allocates it."""
    firsts: dict[StorageId, int] = {}
    lasts: dict[StorageId, int] = {}
    for index, op in enumerate(graph.ops):
        for name in (*op.reads, *op.writes):
            firsts.setdefault(name, index)
            lasts[name] = index
    return firsts, lasts
