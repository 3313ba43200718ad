"""Outline a captured step: its seconds and bytes if all of its layers are treated alike, without a plan.

```text
  treatment    kept, recomputed, or recomputed with the rest on the host        of the activations of all layers
  way          a treatment in so many micro-batches: arrays with an entry per op or lap, affine in the rows of the batch
  mixed way    a share of the layers is treated, the others are kept: figures between those of two ways
```

One capture says everything. The ops and the live bytes of a step in n micro-batches are affine in the rows of the
batch: `step.as_run.graph_of_rows` has the rule. So the seconds and bytes for any rows follow from a few arrays:

```text
  op      launches l + max(flops / rate, moved bytes / rate)        flops and bytes are  same + rows x each
  lap k   F_k, B_k    sum of its ops;  AG_k, RS_k   collectives of its parameters and gradients
```

Searches for many answers at once read outlines: who trains how many rows (`shares`), and where a pipeline is cut
(`stages`). What a plan holds and takes is counted in `step`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from elixir_compile.ir import Activations, Batched, Kind, Op, Phase, Saving, StepGraph, StorageId
from elixir_compile.ir.cost import op_s
from elixir_compile.ir.hardware import Cluster
from elixir_compile.search.space.layers import activations_of, layers_of, modes_at_depth
from elixir_compile.step.as_run import as_run, counted_by_rows, laps_at, moved_shares, require_rows
from elixir_compile.step.divide import arrived_name, laps, leaving_name
from elixir_compile.step.liveness import liveness

Numbers = npt.NDArray[np.float64]
MICRO_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""The numbers of micro-batches that are offered, if they divide the rows."""
_IN_FLIGHT = 2
"""Gathered parameters and gradients of so many laps are on the device at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Treatment:
    """One treatment of the activations of all layers: kept, recomputed or offloaded."""

    text: str
    """Such as `kept`."""
    activations: tuple[Activations, ...]


def treatments_of(graph: StepGraph, savings: frozenset[Saving] = frozenset(Saving)) -> tuple[Treatment, ...]:
    """Return how the activations of `graph` may be saved under `savings`, alike in all layers: kept, recomputed, and
    recomputed with the rest on the host."""
    found = [Treatment(text="kept", activations=())]
    layers = layers_of(graph, savings)
    names = {Saving.RECOMPUTE: "recomputed", Saving.OFFLOAD: "offloaded"}
    for leaves in (False, True):
        activations = activations_of(layers, modes_at_depth(layers, leaves=leaves))
        used = {group.saving for group in activations}
        text = ", ".join(name for saving, name in names.items() if saving in used)
        if activations and all(activations != other.activations for other in found):
            found.append(Treatment(text=text, activations=activations))
    return tuple(found)


_Figure = TypeVar("_Figure", float, Numbers)


def mixed(share: Fraction, kept: _Figure, treated: _Figure) -> _Figure:
    """Return a figure if a `share` of the layers is treated, given those of all layers `kept` and all `treated`."""
    return (1 - float(share)) * kept + float(share) * treated


def seconds_of_ops(step: StepGraph, cluster: Cluster) -> Iterator[tuple[Op, float]]:
    """Yield each op of the forward and the backward of `step` with its seconds on a device of `cluster`, whose rate is
    that of the dtype that the op writes."""
    dtypes = {storage.id: storage.dtype for storage in step.storages}
    for op in step.ops:
        if op.phase is not Phase.UPDATE:
            yield op, op_s(op, cluster, dtypes[op.writes[0]] if op.writes else "float32")


@dataclass(frozen=True, kw_only=True, eq=False)
class Way:
    """One way to run the step, as arrays: with an entry per op, or per lap.

    It has more than 15 fields, because figures that are proportional to the rows and constant figures are in arrays of
    their own.
    """

    micro_batches: int
    treatment: Treatment
    launches: Numbers
    flops_same: Numbers
    flops_each: Numbers
    moved_same: Numbers
    moved_each: Numbers
    dtypes: tuple[str, ...]
    """The dtype of each op, whose rate it has."""
    live_same: Numbers
    live_each: Numbers
    """Bytes of inputs and activations that are live at each op, those of one row apart."""
    starts: tuple[int, ...]
    """The index of the first op of each lap."""
    is_backward: npt.NDArray[np.bool_]
    gathered_bytes: Numbers
    """Bytes of the parameters of each lap."""
    reduced_bytes: Numbers
    """Bytes of the gradients of each lap."""
    moves_each: Numbers
    """Bytes of one row that each lap offloads or brings back."""
    away_each: float
    """Bytes of one row that are on the host between forward and backward."""

    @cached_property
    def in_flight_bytes(self) -> float:
        """Bytes of gathered parameters and of gradients that are on the device beside activations and state."""
        return float(_IN_FLIGHT * self.gathered_bytes.max(initial=0) + self.reduced_bytes.max(initial=0))

    def lap_s(self, rows: Sequence[int], cluster: Cluster) -> Numbers:
        """Return the seconds of compute of each lap (columns) with each number of `rows` on the device of `cluster`."""
        device = cluster.device
        rates = device.flops_per_s
        flops_per_s = np.array([rates.get(dtype, rates["float32"]) for dtype in self.dtypes])
        counts = np.asarray(rows, dtype=float)[:, None]
        flops_s = (self.flops_same + counts * self.flops_each) / flops_per_s
        moved_s = (self.moved_same + counts * self.moved_each) / device.memory_bytes_per_s
        op_s = self.launches * device.launch_s + np.maximum(flops_s, moved_s)
        return np.add.reduceat(op_s, np.array(self.starts), axis=1)

    def peak_bytes(self, rows: Sequence[int]) -> Numbers:
        """Return the most live bytes of inputs and activations with each number of `rows`."""
        counts = np.asarray(rows, dtype=float)[:, None]
        return (self.live_same + counts * self.live_each).max(axis=1, initial=0)


def ways_of(graph: StepGraph, treatments: Sequence[Treatment], most: int) -> tuple[Way, ...]:
    """Return the ways to run `graph`: each treatment in each of `MICRO_BATCHES` up to `most`.

    Raises InvalidPlan if the graph does not say which bytes and operations belong to the rows of its batch.
    """
    require_rows(graph)
    # With constant sizes: a dynamic number of rows would be cut into micro-batches of unequal sizes.
    storages = tuple(replace(storage, size="") for storage in graph.storages)
    ops = tuple(replace(op, flops_size="") for op in graph.ops)
    if graph.symbols:
        graph = replace(graph, ops=ops, storages=storages, symbols=(), batch_size="")
    return tuple(
        way_of(graph, treatment, number)
        for treatment in treatments
        for number in MICRO_BATCHES
        if number == 1 or (number <= most and laps_at(graph, treatment.activations, number))
    )


def way_of(graph: StepGraph, treatment: Treatment, micro_batches: int) -> Way:
    """Return the way to run `graph`, which has constant sizes, with `treatment` in so many `micro_batches`."""
    cut = laps_at(graph, treatment.activations, micro_batches)
    step = as_run(graph, treatment.activations, cut)
    ops = [op for op in step.ops if op.phase is not Phase.UPDATE]
    index = {op.id: place for place, op in enumerate(ops)}
    starts = tuple(index[lap.first] for lap in laps(as_run(graph, treatment.activations), 1) if lap.first in index)
    storages = {storage.id: storage for storage in step.storages}
    counted, moved = counted_by_rows(step), moved_shares(step)
    batch = graph.batch
    flops = np.array([float(op.flops) for op in ops])
    flops_each = np.where([op.id in counted for op in ops], flops, 0.0)
    bytes_moved = np.array([float(op.moved_bytes) for op in ops])
    bytes_each = bytes_moved * np.array([moved[op.id] for op in ops])
    offloaded = {name for group in treatment.activations if group.saving is Saving.OFFLOAD for name in group.storages}
    live_same, live_each = _live(step, len(ops), offloaded)
    gathered, reduced, moves = _by_lap(step, starts, offloaded)
    whole_bytes = {storage.id: storage.nbytes for storage in graph.storages}
    return Way(
        micro_batches=micro_batches,
        treatment=treatment,
        launches=np.array([float(op.times * op.launches) if op.flops or op.moved_bytes else 0.0 for op in ops]),
        flops_same=flops - flops_each,
        flops_each=flops_each / batch,
        moved_same=bytes_moved - bytes_each,
        moved_each=bytes_each / batch,
        dtypes=tuple(storages[op.writes[0]].dtype if op.writes else "float32" for op in ops),
        live_same=live_same,
        live_each=live_each / batch,
        starts=starts,
        is_backward=np.array([ops[start].phase is Phase.BACKWARD for start in starts]),
        gathered_bytes=gathered,
        reduced_bytes=reduced,
        moves_each=moves / batch,
        away_each=sum(whole_bytes[name] for name in offloaded) / batch,
    )


def _live(step: StepGraph, num_ops: int, offloaded: set[StorageId]) -> tuple[Numbers, Numbers]:
    """Return the live bytes of inputs, buffers and activations at each op: those equal for any rows, and the others."""
    lives = liveness(step).lives
    changes = {Batched.EACH: np.zeros(num_ops + 1), Batched.SAME: np.zeros(num_ops + 1)}
    for storage in step.storages:
        life = lives.get(storage.id)
        if life is None or storage.kind in (Kind.PARAM, Kind.GRAD, Kind.BUFFER):
            continue
        own = changes[Batched.EACH if storage.batched is Batched.EACH else Batched.SAME]
        spans = [(life.first, life.last)]
        if storage.id in offloaded:
            touches = [place for place, op in enumerate(step.ops) if storage.id in op.reads or storage.id in op.writes]
            forward = [place for place in touches if step.ops[place].phase is Phase.FORWARD]
            backward = [place for place in touches if step.ops[place].phase is Phase.BACKWARD]
            spans = [(places[0], places[-1]) for places in (forward, backward) if places]
        for first, last in spans:
            own[min(first, num_ops)] += storage.nbytes
            own[min(last + 1, num_ops)] -= storage.nbytes
    same, each = (np.cumsum(changes[batched])[:num_ops] for batched in (Batched.SAME, Batched.EACH))
    return same, each


def _by_lap(step: StepGraph, starts: Sequence[int], offloaded: set[StorageId]) -> tuple[Numbers, Numbers, Numbers]:
    """Return for each lap the bytes of its parameters, of the gradients that it makes, and of the activations that it
    offloads, or brings back in the backward."""
    storages = {storage.id: storage for storage in step.storages}
    # In micro-batches, slices of an offloaded storage have names of their own.
    whole = {name: name for name in offloaded}
    whole |= {new(name): name for name in offloaded for new in (leaving_name, arrived_name)}
    ops = [op for op in step.ops if op.phase is not Phase.UPDATE]
    found = [np.zeros(len(starts)) for _ in range(3)]
    seen: set[tuple[StorageId, Phase]] = set()
    for number, (start, end) in enumerate(zip(starts, [*starts[1:], len(ops)], strict=True)):
        params = {name for op in ops[start:end] for name in op.reads if storages[name].kind is Kind.PARAM}
        found[0][number] = sum(storages[name].nbytes for name in params)
        for op in ops[start:end]:
            for own in (*op.reads, *op.writes):
                name, storage = whole.get(own, own), storages[own]
                key = (name, op.phase)
                if key in seen:
                    continue
                if storage.kind is Kind.GRAD and name in op.writes:
                    seen.add(key)
                    found[1][number] += storage.nbytes
                elif name in offloaded:
                    seen.add(key)
                    found[2][number] += storages[name].nbytes
    return found[0], found[1], found[2]


_SHARES = tuple(Fraction(eighths, 8) for eighths in range(1, 9))
"""The shares of layers whose activations are not kept that are offered."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MixedWay:
    """A way to run the step in which the activations of a share of the layers are not kept."""

    kept: Way
    treated: Way
    """The way that treats all layers, in as many micro-batches; `kept` itself if the share is 0."""
    share: Fraction = Fraction(0)

    @property
    def micro_batches(self) -> int:
        return self.kept.micro_batches

    @property
    def text(self) -> str:
        """The treatment of activations in words, such as `recomputed in 3/8`."""
        text = self.treated.treatment.text
        return text if self.share in (0, 1) else f"{text} in {self.share}"

    @property
    def in_flight_bytes(self) -> float:
        """Bytes of gathered parameters and of gradients on the device beside activations and state."""
        return max(self.kept.in_flight_bytes, self.treated.in_flight_bytes)

    @property
    def away_each(self) -> float:
        """Bytes of one row that are on the host between forward and backward."""
        return float(self.share) * self.treated.away_each

    def peak_bytes(self, rows: Sequence[int]) -> Numbers:
        """Return the most live bytes of inputs and activations with each number of `rows`: never too few, as the peaks
        of both ways may be at other ops."""
        return self.mixed(self.kept.peak_bytes(rows), self.treated.peak_bytes(rows))

    def mixed(self, kept: Numbers, treated: Numbers) -> Numbers:
        """Return the figures of this way between those of both ways."""
        return mixed(self.share, kept, treated)


def mixed_ways(ways: Sequence[Way]) -> tuple[MixedWay, ...]:
    """Return `ways`, first those that keep all activations, and mixed ways between them: each treatment of some layers,
    beside layers whose activations are kept."""
    kept = {way.micro_batches: way for way in ways if not way.treatment.activations}
    found: list[MixedWay] = []
    for way in ways:
        base = kept[way.micro_batches]
        if way is base:
            found.append(MixedWay(kept=base, treated=base))
        else:
            found += [MixedWay(kept=base, treated=way, share=share) for share in _SHARES]
    return tuple(found)
