"""Choose the shares of all ranks of a fleet for one captured step, from the seconds and bytes of the step for any
number of rows on any machine.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

import numpy as np
import numpy.typing as npt

from elixir_compile.base.errors import InvalidOption, NoFeasibleShares
from elixir_compile.base.process import collector_off
from elixir_compile.base.units import format_bytes
from elixir_compile.ir import Activations, Batched, Kind, Phase, Saving, StepGraph, StorageId
from elixir_compile.ir.cost import collective_s
from elixir_compile.ir.hardware import Cluster, Fleet
from elixir_compile.ir.share import Share
from elixir_compile.search.shares import assign as rules
from elixir_compile.search.shares.assign import Assignment, Offers, assign, assign_fixed, fixed_share, most_room
from elixir_compile.search.space.layers import activations_of, deepest, depths_of, layers_of
from elixir_compile.step.as_run import as_run, laps_at
from elixir_compile.step.batch_rows import counted_by_rows, graph_of_rows, moved_shares, require_rows
from elixir_compile.step.divide import arrived_name, laps, leaving_name
from elixir_compile.step.liveness import liveness

# ----------------------------------------------------------------------------------------------------------------------
# Price a step for any number of rows on any machine: seconds of each lap, and bytes.
#
# One capture says everything. The ops and the live bytes of a step in n micro-batches are affine in the rows of the
# batch: `step.batch_rows` has the rule. So each way to run the step (the number of micro-batches and the treatment of
# activations) is a few arrays with an entry per op, from which the seconds and bytes of all numbers of rows follow:
#
#   op      launches l + max(flops / rate, moved bytes / rate)        flops and bytes are  same + rows x each
#   lap k   F_k, B_k    sum of its ops;  AG_k, RS_k   collectives of its parameters and gradients
#
# The sums of a step are made of these arrays.


_Numbers = npt.NDArray[np.float64]
MICRO_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""The numbers of micro-batches that are offered, if they divide the rows."""
LEAST_ROWS = 2
"""The fewest rows that a rank runs: torch traces a batch of one row in another way, so its graph would differ from the
graphs of the other ranks. A rank without rows runs as many, and they count 0."""
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
    if not layers:
        return tuple(found)
    depth = max(depths_of(layers))
    names = {Saving.RECOMPUTE: "recomputed", Saving.OFFLOAD: "offloaded"}
    for leaves in (False, True):
        activations = activations_of(layers, [deepest(layer, depth, leaves=leaves) for layer in layers])
        used = {group.saving for group in activations}
        text = ", ".join(name for saving, name in names.items() if saving in used)
        if activations and all(activations != other.activations for other in found):
            found.append(Treatment(text=text, activations=activations))
    return tuple(found)


@dataclass(frozen=True, kw_only=True, eq=False)
class Way:
    """One way to run the step, as arrays: with an entry per op, or per lap.

    It has more than 15 fields, because figures that are proportional to the rows and constant figures are in arrays of
    their own.
    """

    micro_batches: int
    treatment: Treatment
    launches: _Numbers
    flops_same: _Numbers
    flops_each: _Numbers
    moved_same: _Numbers
    moved_each: _Numbers
    dtypes: tuple[str, ...]
    """The dtype of each op, whose rate it has."""
    live_same: _Numbers
    live_each: _Numbers
    """Bytes of inputs and activations that are live at each op, those of one row apart."""
    starts: tuple[int, ...]
    """The index of the first op of each lap."""
    is_backward: npt.NDArray[np.bool_]
    gathered_bytes: _Numbers
    """Bytes of the parameters of each lap."""
    reduced_bytes: _Numbers
    """Bytes of the gradients of each lap."""
    moves_each: _Numbers
    """Bytes of one row that each lap offloads or brings back."""
    away_each: float
    """Bytes of one row that are on the host between forward and backward."""

    @cached_property
    def in_flight_bytes(self) -> float:
        """Bytes of gathered parameters and of gradients that are on the device beside activations and state."""
        return float(_IN_FLIGHT * self.gathered_bytes.max(initial=0) + self.reduced_bytes.max(initial=0))

    def lap_s(self, rows: Sequence[int], cluster: Cluster) -> _Numbers:
        """Return the seconds of compute of each lap (columns) with each number of `rows` on the device of `cluster`."""
        device = cluster.device
        rates = device.flops_per_s
        flops_per_s = np.array([rates.get(dtype, rates["float32"]) for dtype in self.dtypes])
        counts = np.asarray(rows, dtype=float)[:, None]
        flops_s = (self.flops_same + counts * self.flops_each) / flops_per_s
        moved_s = (self.moved_same + counts * self.moved_each) / device.memory_bytes_per_s
        op_s = self.launches * device.launch_s + np.maximum(flops_s, moved_s)
        return np.add.reduceat(op_s, np.array(self.starts), axis=1)

    def peak_bytes(self, rows: Sequence[int]) -> _Numbers:
        """Return the most live bytes of inputs and activations with each number of `rows`."""
        counts = np.asarray(rows, dtype=float)[:, None]
        return (self.live_same + counts * self.live_each).max(axis=1, initial=0)


def ways_of(graph: StepGraph, treatments: Sequence[Treatment], most: int) -> tuple[Way, ...]:
    """Return the ways to run `graph`: each treatment in each of `MICRO_BATCHES` up to `most`.

    Raises InvalidPlan if the graph does not say which bytes and operations belong to the rows of its batch.
    """
    require_rows(graph)
    graph = _constant(graph)
    found: list[Way] = []
    for treatment in treatments:
        for number in MICRO_BATCHES:
            if number == 1 or (number <= most and laps_at(graph, treatment.activations, number)):
                found.append(_way(graph, treatment, number))
    return tuple(found)


def _constant(graph: StepGraph) -> StepGraph:
    """Return `graph` with constant sizes: a dynamic number of rows would be cut into micro-batches of unequal sizes."""
    if not graph.symbols:
        return graph
    storages = tuple(replace(storage, size="") for storage in graph.storages)
    ops = tuple(replace(op, flops_size="") for op in graph.ops)
    return replace(graph, ops=ops, storages=storages, symbols=(), batch_size="")


def _way(graph: StepGraph, treatment: Treatment, micro_batches: int) -> Way:
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


def _live(step: StepGraph, num_ops: int, offloaded: set[StorageId]) -> tuple[_Numbers, _Numbers]:
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


def _by_lap(step: StepGraph, starts: Sequence[int], offloaded: set[StorageId]) -> tuple[_Numbers, _Numbers, _Numbers]:
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


# ----------------------------------------------------------------------------------------------------------------------
# The seconds of a step and the room for state of each rank, for any number of rows in any way to run them.
#
#   step    sum_k max(AG_k, F_k, offloads_k) + sum_k max(AG_k + RS_k, B_k, prefetches_k) + update
#   room    device - activations - gathered parameters + host
#
#           F_k, B_k     seconds of lap k of the forward and of the backward
#           AG_k, RS_k   seconds of the collectives of its parameters and gradients
#
# The maximum over ranks of these sums is a lower bound of the step in which ranks wait for each other lap by lap. A
# plan treats some layers in one way and others in another: between two ways, seconds and bytes are interpolated.


_SHARES = tuple(Fraction(eighths, 8) for eighths in range(1, 9))
"""The shares of layers whose activations are not kept that are offered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The memory of one rank for the step."""

    device_bytes: int
    """Bytes of the device, less what is used outside of the step."""
    host_bytes: int
    """Bytes of the host that this rank may use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The training state of all ranks together."""

    num_elements: int
    """Elements of the trained parameters."""
    nbytes: int
    """Bytes of parameters, gradients and optimizer state."""


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

    def peak_bytes(self, rows: Sequence[int]) -> _Numbers:
        """Return the most live bytes of inputs and activations with each number of `rows`: never too few, as the peaks
        of both ways may be at other ops."""
        return self.mixed(self.kept.peak_bytes(rows), self.treated.peak_bytes(rows))

    def mixed(self, kept: _Numbers, treated: _Numbers) -> _Numbers:
        """Return the figures of this way between those of both ways."""
        return (1 - float(self.share)) * kept + float(self.share) * treated


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


def offers_of(
    ways: Sequence[MixedWay], rows: Sequence[int], cluster: Cluster, budget: Budget, state: State, num_ranks: int
) -> Offers:
    """Return the offers of a rank that sees `cluster`, for each number of `rows` in each of `ways`.

    The update is priced for an equal part of the state: the part on the device as far as there is room, the rest on
    the host.
    """
    counts = [count or LEAST_ROWS for count in rows]
    shape = (len(rows), len(ways))
    step_s, busy_s = np.full(shape, np.inf), np.full(shape, np.inf)
    room_bytes = np.full(shape, -1, dtype=np.int64)
    pure = {id(way): way for mixed in ways for way in (mixed.kept, mixed.treated)}
    figures = {name: _figures(way, counts, cluster) for name, way in pure.items()}
    for column, way in enumerate(ways):
        kept, treated = figures[id(way.kept)], figures[id(way.treated)]
        lap_s, laps_s, peak_bytes = (way.mixed(*pair) for pair in zip(kept, treated, strict=True))
        on_device = budget.device_bytes - way.in_flight_bytes - peak_bytes
        on_host = budget.host_bytes - np.asarray(counts, dtype=float) * way.away_each
        update = _update_s(on_device, cluster, state, num_ranks)
        is_offered = np.array([count % way.micro_batches == 0 and count >= LEAST_ROWS for count in counts])
        fits = (on_device >= 0) & (on_host >= 0)
        room = np.where(fits, on_device + on_host, np.minimum(on_device, on_host).clip(max=-1))
        step_s[:, column] = np.where(is_offered, laps_s + update, np.inf)
        busy_s[:, column] = np.where(is_offered, lap_s + update, np.inf)
        room_bytes[:, column] = np.where(is_offered, room, -1).astype(np.int64)
    return Offers(step_s=step_s, busy_s=busy_s, room_bytes=room_bytes)


def _figures(way: Way, counts: Sequence[int], cluster: Cluster) -> tuple[_Numbers, _Numbers, _Numbers]:
    """Return for each number of rows the seconds of compute of all laps, the same with the transfers that a lap waits
    for, and the most bytes of activations."""
    lap_s = way.lap_s(counts, cluster)
    gather_s = np.array([collective_s(int(nbytes), cluster) for nbytes in way.gathered_bytes])
    reduce_s = np.array([collective_s(int(nbytes), cluster) for nbytes in way.reduced_bytes])
    moves = np.asarray(counts, dtype=float)[:, None] * way.moves_each
    link_s = moves / np.where(way.is_backward, cluster.h2d.bytes_per_s, cluster.d2h.bytes_per_s)
    others_s = np.maximum(np.where(way.is_backward, gather_s + reduce_s, gather_s), link_s)
    return lap_s.sum(axis=1), np.maximum(lap_s, others_s).sum(axis=1), way.peak_bytes(counts)


def _update_s(on_device: _Numbers, cluster: Cluster, state: State, num_ranks: int) -> _Numbers:
    """Return the seconds of the update of an equal part of the state, if `on_device` bytes of it fit the device."""
    part_bytes = state.nbytes / num_ranks
    share = np.clip(on_device / part_bytes, 0.0, 1.0) if part_bytes else np.ones_like(on_device)
    elements = state.num_elements / num_ranks
    host_per_s = cluster.host.update_elements_per_s / cluster.num_local_ranks
    return elements * (share / cluster.device.update_elements_per_s + (1 - share) / host_per_s)


# ----------------------------------------------------------------------------------------------------------------------
# Choose the shares of all ranks of a fleet for one captured step: rows, micro-batches, and parts of the state.


_MOST_QUANTA = 256
"""Rows are shared out in so many pieces at most, so that the search of 64 ranks takes less than a second."""

RULES = ("even", "by_speed", "cephalo")
"""The rules to compare with, by the names that the command line takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOutlook:
    """The expected seconds and bytes of one rank under the choice."""

    treatment: str
    """The treatment of its activations: `kept`, `recomputed`, `recomputed, offloaded`, or in a share of the layers
    alone, `recomputed in 3/8`."""
    busy_s: float
    """Seconds of its own compute and update."""
    peak_bytes: int
    """Most bytes on the device, state included."""
    host_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The shares of all ranks with the seconds of a step by the formula of the search."""

    shares: tuple[Share, ...]
    step_s: float
    ranks: tuple[RankOutlook, ...]

    @property
    def rows(self) -> tuple[int, ...]:
        return tuple(share.num_rows for share in self.shares)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """The question: who of `fleet` trains how many of `batch` rows of `graph`."""

    graph: StepGraph
    """The captured step, with any number of rows from 2 on."""
    fleet: Fleet
    budgets: tuple[Budget, ...]
    """The memory of each rank."""
    state: State
    batch: int
    savings: frozenset[Saving] = frozenset(Saving)


class ShareSearch:
    """The search for the shares of one question, and for the shares of other rules."""

    def __init__(self, ask: Ask) -> None:
        """Price the step in all ways for all classes of ranks. Raises InvalidOption for a batch of less than 2 rows,
        and InvalidPlan if the graph does not say which storages and ops belong to the rows of its batch."""
        self.ask = ask
        self.quantum = quantum_of(ask.batch)
        classes = ask.fleet.classes(ask.budgets)
        self.class_of = [0] * ask.fleet.num_ranks
        for number, ranks in enumerate(classes):
            for rank in ranks:
                self.class_of[rank] = number
        self._firsts = [ranks[0] for ranks in classes]
        with collector_off():
            self.ways = mixed_ways(ways_of(ask.graph, treatments_of(ask.graph, ask.savings), ask.batch))
        self.offers = [self._with_zero_apart(offers) for offers in self._offers(self._rows())]

    def best(self) -> Choice:
        """Return the shares with the shortest step: equal parts of the state if they fit, else parts of any size.

        Raises NoFeasibleShares with the room of all classes if nothing fits.
        """
        found: Assignment | None = None
        for equal_parts in (True, False):
            if found is None:
                found = assign(self.offers, self.class_of, self.ask.state.nbytes, equal_parts=equal_parts)
        made = None
        if found is not None:
            made = self._choice(found, self.offers, [self.quantum * count for count in found.quanta])
        # Equal rows need not be whole quanta.
        choices = [choice for choice in (made, self.even()) if choice is not None]
        if not choices:
            raise self.no_room()
        return min(choices, key=lambda choice: choice.step_s)

    def even(self) -> Choice | None:
        """Return equal shares; None if they do not fit some rank."""
        return self.of_rows(rules.even(len(self.class_of), self.ask.batch))

    def greedy(self) -> Choice | None:
        """Return shares in proportion to the speed of each rank; None if they do not fit."""
        return self.of_rows([self.quantum * count for count in rules.greedy(self.offers, self.class_of)])

    def cephalo(self) -> Choice | None:
        """Return the shares that Cephalo's dynamic program chooses; None if it finds none, or they do not fit."""
        number_of = [way.micro_batches for way in self.ways]
        found = rules.cephalo(self.offers, self.class_of, number_of, self.ask.state.nbytes)
        return None if found is None else self.of_rows([self.quantum * count for count in found])

    def of_rule(self, name: str) -> Choice | None:
        """Return the shares of the rule called `name`, one of `RULES`; None if they do not fit."""
        return {"even": self.even, "by_speed": self.greedy, "cephalo": self.cephalo}[name]()

    def of_rows(self, rows: Sequence[int]) -> Choice | None:
        """Return the fastest way for each rank to run its `rows`, beside an equal part of the state if that fits each
        rank, else beside parts of any size; None if nothing fits, or a rank has a single row."""
        kinds = sorted(set(rows))
        if 1 in kinds:
            return None
        offers = self._offers(kinds)
        counts = [kinds.index(count) for count in rows]
        own = [offers[number] for number in self.class_of]
        found = assign_fixed(own, counts, self.ask.state.nbytes, equal_parts=True)
        found = found or assign_fixed(own, counts, self.ask.state.nbytes, equal_parts=False)
        return None if found is None else self._choice(found, offers, rows)

    def fixed_shares(self, choice: Choice) -> tuple[float, ...]:
        """Return the share of the seconds of each rank that does not depend on its rows."""
        fleet, graph = self.ask.fleet, self.ask.graph
        return tuple(
            fixed_share(graph_of_rows(graph, max(rows, LEAST_ROWS)), fleet.seen_by(rank).device)
            for rank, rows in enumerate(choice.rows)
        )

    def least_s(self, rows: Sequence[int]) -> float:
        """Return the seconds in which the slowest rank computes its `rows` on the whole batch, in the fastest of the
        ways that treat all layers alike, with memory for any of them."""
        ways = {id(way.treated): way.treated for way in self.ways if way.micro_batches == 1}.values()
        return max(
            min(
                float(way.lap_s([count or LEAST_ROWS], self.ask.fleet.seen_by(self._firsts[number])).sum())
                for way in ways
            )
            for number, count in set(zip(self.class_of, rows, strict=True))
        )

    def _rows(self) -> list[int]:
        return list(range(0, self.ask.batch + 1, self.quantum))

    def _offers(self, rows: Sequence[int]) -> list[Offers]:
        """Return the offers of each class of ranks for each number of `rows`."""
        ask = self.ask
        return [
            offers_of(self.ways, rows, ask.fleet.seen_by(rank), ask.budgets[rank], ask.state, ask.fleet.num_ranks)
            for rank in self._firsts
        ]

    def _with_zero_apart(self, offers: Offers) -> Offers:
        """Return `offers` without those of no rows, if every rank can have some.

        A rank without rows takes as long as one with the fewest rows, and its work is lost.
        """
        if self.quantum <= LEAST_ROWS <= self.ask.batch // len(self.class_of):
            offers.room_bytes[0] = -1
        return offers

    def _choice(self, found: Assignment, offers: Sequence[Offers], rows: Sequence[int]) -> Choice:
        shares: list[Share] = []
        ranks: list[RankOutlook] = []
        for rank, (number, count, place) in enumerate(zip(self.class_of, found.quanta, found.ways, strict=True)):
            way = self.ways[place]
            shares.append(
                Share(rank=rank, num_rows=rows[rank], micro_batches=way.micro_batches, state=found.parts[rank])
            )
            ranks.append(self._outlook(rank, way, rows[rank], found.parts[rank], offers[number].busy_s[count, place]))
        return Choice(shares=tuple(shares), step_s=found.step_s, ranks=tuple(ranks))

    def _outlook(self, rank: int, way: MixedWay, rows: int, part: float, busy_s: float) -> RankOutlook:
        count = max(rows, LEAST_ROWS)
        budget = self.ask.budgets[rank]
        working_bytes = int(way.peak_bytes([count])[0] + way.in_flight_bytes)
        state_bytes = round(part * self.ask.state.nbytes)
        on_device = max(0, min(state_bytes, budget.device_bytes - working_bytes))
        return RankOutlook(
            treatment=way.text,
            busy_s=float(busy_s),
            peak_bytes=working_bytes + on_device,
            host_bytes=state_bytes - on_device + round(count * way.away_each),
        )

    def no_room(self) -> NoFeasibleShares:
        """Return the error with the room of each class, each with the rows that leave the most room in all."""
        batch, state_bytes = self.ask.batch, self.ask.state.nbytes
        rooms = most_room(self.offers, self.class_of)
        if rooms is None:
            return NoFeasibleShares(batch, state_bytes, 0, "")
        names = [seat.cluster.device.name for seat in self.ask.fleet.seats]
        texts = [
            f"{names[ranks[0]]} {len(ranks)} x {format_bytes(min(rooms[rank] for rank in ranks))}"
            for ranks in self.ask.fleet.classes(self.ask.budgets)
        ]
        return NoFeasibleShares(batch, state_bytes, sum(rooms), ", ".join(texts))


def quantum_of(batch: int) -> int:
    """Return the rows in which a batch is shared out: the smallest power of two that gives at most 256 quanta, or the
    smallest divisor of the batch that does; so a row for a batch of at most 256.

    Raises InvalidOption if `batch` is no whole number, less than 2, or has no such divisor.
    """
    if not isinstance(batch, int) or batch < LEAST_ROWS:
        raise InvalidOption("batch", batch, f"a whole number of rows, {LEAST_ROWS} or more")
    quantum = 1
    while batch > quantum * _MOST_QUANTA:
        quantum *= 2
    if batch % quantum == 0:
        return quantum
    found = next(number for number in range(1, batch + 1) if batch % number == 0 and batch // number <= _MOST_QUANTA)
    if batch // found < 2:
        raise InvalidOption("batch", batch, "a multiple of a number of rows that ranks can share out, such as of 8")
    return found
