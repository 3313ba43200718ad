"""Count the facts that answers about a plan share: its moves, its recomputed ops, the state and the bytes of each
layer, and its work beside the measured work; and format tables, titled entries, curves and memory timelines as text.
"""

import functools
import itertools
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from elixir_compile.base.errors import UnknownSubject
from elixir_compile.base.units import format_bytes
from elixir_compile.ir.bucket import Activations, Bucket
from elixir_compile.ir.graph import StepGraph, is_numbered, layer_of
from elixir_compile.ir.kinds import GroupId, Kind, Lane, OpId, RegionId, Saving, StorageId, Tier, Verb
from elixir_compile.ir.plan import Decision, Plan, layer_of_group
from elixir_compile.ir.schedule import (
    Action,
    BucketRef,
    GroupRef,
    Record,
    Region,
    RegionRef,
    Tally,
    Target,
    label,
    tallies,
    verb_of,
)
from elixir_compile.step.as_run import as_run, repeated_op, repeats, saved_storages
from elixir_compile.step.bucket_bytes import Held
from elixir_compile.step.divide import laps_of
from elixir_compile.step.plan_rows import PlanRows
from elixir_compile.step.timeline import MemoryTimeline, timeline_of

# ----------------------------------------------------------------------------------------------------------------------
# Find the buckets, activations or region of a plan under a name that a user asks about, and their moves.


_COPIES = (Verb.GATHER, Verb.OFFLOAD, Verb.PREFETCH)
_BROUGHT = (Verb.GATHER, Verb.PREFETCH)


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """An action on a bucket, its gradient or a group of activations, and its place in the step."""

    verb: Verb
    region: str
    """For a gather or a prefetch the next region after its wait, else the last region before; empty if there is
    none."""
    num_ahead: int = 0
    """Number of regions between the start of a copy and its wait."""


def actions_of(plan: Plan) -> tuple[Action, ...]:
    """Return the actions of the first rank; all ranks have the same."""
    return plan.schedules[0].actions if plan.schedules else ()


class PlanMoves:
    """The moves of a plan by their target, collected in one pass over its actions."""

    def __init__(self, plan: Plan) -> None:
        self._of: dict[Target, list[tuple[int, Move]]] = {}
        self._groups: dict[tuple[Verb, str], set[GroupId]] = {}
        actions = actions_of(plan)
        ends, following = _ahead(actions)
        num_run = [0, *itertools.accumulate(action.verb is Verb.RUN for action in actions)]
        last = ""
        for at, action in enumerate(actions):
            verb, target, end = action.verb, action.target, ends[at]
            if isinstance(target, RegionRef):
                last = target.region
            elif verb is not Verb.WAIT:
                region = following[end] if verb in _BROUGHT else last
                move = Move(verb=verb, region=region, num_ahead=num_run[end] - num_run[at])
                self._of.setdefault(target, []).append((at, move))
                if isinstance(target, GroupRef):
                    self._groups.setdefault((verb, region), set()).add(target.group)

    def of(self, *targets: Target) -> tuple[Move, ...]:
        """Return the actions on `targets`, in order. A wait counts to its copy and is not listed."""
        found = [place for target in targets for place in self._of.get(target, ())]
        return tuple(move for _, move in sorted(found, key=lambda place: place[0]))

    def groups_at(self, region: str, verb: Verb) -> Collection[GroupId]:
        """Return the groups of activations with a move of `verb` at `region`."""
        return self._groups.get((verb, region), ())


def _ahead(actions: Sequence[Action]) -> tuple[list[int], list[str]]:
    """Return for each action the index of the wait for its copy, else its own, and the region that runs next."""
    ends, following = list(range(len(actions))), [""] * len(actions)
    waits: dict[Target, int] = {}
    region = ""
    for at in reversed(range(len(actions))):
        action = actions[at]
        if isinstance(action.target, RegionRef):
            region = action.target.region
        elif action.verb is Verb.WAIT:
            waits[action.target] = at
        elif action.verb in _COPIES:
            ends[at] = waits.get(action.target, at)
        following[at] = region
    return ends, following


def waiting_regions(plan: Plan) -> Mapping[str, tuple[str, ...]]:
    """Return, by the label of a copy, the label of the region that runs next after the wait for it, for each time that
    the plan makes the copy, in order. A copy without a wait, or with no region behind it, is left out."""
    actions = actions_of(plan)
    ends, following = _ahead(actions)
    found: dict[str, list[str]] = {}
    for at, action in enumerate(actions):
        if action.verb in _COPIES and ends[at] != at and following[ends[at]]:
            region = RegionRef(region=RegionId(following[ends[at]]))
            found.setdefault(label(action.verb, action.target), []).append(label(Verb.RUN, region))
    return {name: tuple(regions) for name, regions in found.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The buckets, activations or region under a name in a plan."""

    name: str
    buckets: tuple[Bucket, ...] = ()
    params: frozenset[StorageId] = frozenset()
    """The parameters under the name, if it is the name of a parameter or a module."""
    groups: tuple[Activations, ...] = ()
    lean_groups: tuple[Activations, ...] = ()
    """Groups of lean calls."""
    region: Region | None = None


def find_subject(plan: Plan, name: str) -> Subject:
    """Return the bucket or the region `name`, or the parameters and activations with `name` in their paths.

    `layers.3` finds `model.layers.3.mlp.weight` and the activations `model.layers.3.matmul`, but not
    `model.layers.30.mlp.weight`. Raises UnknownSubject if nothing is found.
    """
    for bucket in plan.buckets:
        if bucket.id == name:
            return Subject(name=name, buckets=(bucket,))
    for region in plan.regions:
        if region.id == name:
            return Subject(name=name, region=region)
    found = frozenset(param for bucket in plan.buckets for param in bucket.params if _has_parts(param, name))
    lean = () if plan.lean is None else plan.lean.activations
    groups, lean_groups = (
        tuple(own for own in activations if _has_parts(own.id, name)) for activations in (plan.activations, lean)
    )
    if not found and not groups and not lean_groups:
        # Every name that would be found: ids, and paths of parameters and activations with their parts.
        names = dict.fromkeys([*(bucket.id for bucket in plan.buckets), *(region.id for region in plan.regions)])
        params = [param for bucket in plan.buckets for param in bucket.params]
        for path in (*params, *(group.id for group in (*plan.activations, *lean))):
            parts = path.split(".")
            for start in range(len(parts)):
                names |= dict.fromkeys(".".join(parts[start:end]) for end in range(start + 1, len(parts) + 1))
        raise UnknownSubject(name, list(names))
    buckets = tuple(bucket for bucket in plan.buckets if not found.isdisjoint(bucket.params))
    return Subject(name=name, buckets=buckets, params=found, groups=groups, lean_groups=lean_groups)


def _has_parts(path: str, name: str) -> bool:
    return f".{name}." in f".{path}."


# ----------------------------------------------------------------------------------------------------------------------
# Count the forward ops that a plan runs again, by the region in which they run and the group that they recompute.


@dataclass(frozen=True, slots=True, kw_only=True)
class Again:
    """Number of forward ops that run again in a region to recompute a group."""

    group: GroupId
    region: RegionId
    num_ops: int


def recomputed(plan: Plan, graph: StepGraph) -> tuple[Again, ...]:
    """Return the number of ops that run again in each region, by the group that they recompute.

    An op without a result in any group counts for the group of the next op with one. An op with results in several
    groups counts for the first.
    """
    index = {op.id: number for number, op in enumerate(as_run(graph, plan.activations, laps_of(plan)).ops)}
    firsts = [index[region.first] for region in plan.regions]
    dropped = [group for group in plan.activations if group.saving is Saving.RECOMPUTE]
    group_of = {name: group.id for group in dropped for name in group.storages}
    writes = {op.id: op.writes for op in graph.ops}
    counts: Counter[tuple[RegionId, GroupId]] = Counter()
    waiting: list[RegionId] = []
    for repeat in repeats(graph, plan.activations):
        waiting.append(plan.regions[bisect_right(firsts, index[repeated_op(repeat.op)]) - 1].id)
        owner = next((group_of[name] for name in writes[repeat.op] if name in group_of), None)
        if owner is not None:
            counts.update((region, owner) for region in waiting)
            waiting.clear()
    return tuple(Again(group=group, region=region, num_ops=count) for (region, group), count in counts.items())


# ----------------------------------------------------------------------------------------------------------------------
# Count once the facts that all answers about a plan share: moves, recomputed ops, bytes of each bucket at each op.


class Holdings:
    """The device bytes of a plan at each op, for its graph."""

    def __init__(self, graph: StepGraph, plan: Plan) -> None:
        self._graph, self._plan = graph, plan
        self.rows = PlanRows(graph, plan)
        self.timeline: MemoryTimeline = timeline_of(self.rows)
        self._index = {op: at for at, op in enumerate(self.timeline.ops)}
        self._in_turns = tuple(self.rows.joint(plan.buckets))

    @functools.cached_property
    def again(self) -> tuple[Again, ...]:
        """The forward ops that run again, by region and group."""
        return recomputed(self._plan, self._graph)

    @functools.cached_property
    def saved(self) -> frozenset[StorageId]:
        """The storages that the capture saves for the backward."""
        return saved_storages(self._graph)

    def position(self, op: OpId) -> int:
        """Return the fullest position of `op` on the axis of the rows."""
        return self.timeline.positions[self._index[op]]

    def ops_of(self, region: Region) -> range:
        """Return the indices of the ops of `region`."""
        return range(self._index[region.first], self._index[region.last] + 1)

    def most_bytes(self, region: Region) -> int:
        """Return the most live bytes while `region` runs."""
        ops = self.ops_of(region)
        return max(self.timeline.live_bytes[ops.start : ops.stop])

    def largest(self, op: OpId, most: int = 10) -> tuple[tuple[str, Kind, int], ...]:
        """Return the buckets and activations that hold the most bytes at `op`: name, kind, bytes."""
        at, rows = self.position(op), self.rows
        held: Counter[tuple[str, Kind]] = Counter()
        for bucket in self._plan.buckets:
            for row in rows.of_bucket(bucket):
                held[bucket.id, row.kind] += _bytes_at(row, at)
        for name, own in rows.storages.items():
            for row in own:
                held[name, row.kind] += _bytes_at(row, at)
        return tuple((name, kind, nbytes) for (name, kind), nbytes in held.most_common(most) if nbytes)

    def of_bucket(self, bucket: Bucket, op: OpId) -> Mapping[Kind, int]:
        """Return the bytes at `op`, by kind, that the step would not hold if the parameters and the optimizer state of
        `bucket` were empty."""
        at, rows = self.position(op), self.rows
        empty = replace(bucket, nbytes=0, state_nbytes=0)
        others = [empty if other.id == bucket.id else other for other in self._plan.buckets]
        unwritten = [(birth, 0) for birth, _ in rows.births(bucket.id)]
        held: Counter[Kind] = Counter()
        for row in (*rows.of_bucket(bucket), *self._in_turns):
            held[row.kind] += _bytes_at(row, at)
        for row in (*rows.of_bucket(empty, unwritten), *(rows.joint(others) if self._in_turns else ())):
            held[row.kind] -= _bytes_at(row, at)
        return {kind: held[kind] for kind in Kind if held[kind]}


def _bytes_at(row: Held, at: int) -> int:
    return row.nbytes if row.first <= at <= row.last else 0


class Survey:
    """The facts that answers about a plan share; `held` is None if the graph is not given."""

    def __init__(self, plan: Plan, graph: StepGraph | None = None) -> None:
        self.plan, self._graph = plan, graph
        self.moves = PlanMoves(plan)
        self.held = None if graph is None else Holdings(graph, plan)

    def of_lean_calls(self) -> "Survey":
        """Return the survey of the plan's lean calls, which it must have."""
        return Survey(self.plan.of_lean_calls(), self._graph)


# ----------------------------------------------------------------------------------------------------------------------
# Tell for each layer of a model where its training state is, what its activations become, and why.
#
# A layer is the part of the model under one number in its module path; a module outside of all layers has a row of its
# own. Bytes of optimizer state are those of a bucket, shared out to its parameters by their bytes.


OTHER = "other ops"
"""The row of ops that are of no layer and of no module with parameters, as a loss."""


@dataclass(slots=True, kw_only=True)
class LayerRow:
    """One layer, or a module outside of all layers."""

    layer: str
    param_bytes: Counter[Tier] = field(default_factory=Counter)
    """Bytes of parameters by their home."""
    state_bytes: Counter[Tier] = field(default_factory=Counter)
    """Bytes of optimizer state by its home."""
    saved_bytes: Counter[Saving] = field(default_factory=Counter)
    """Bytes of saved activations by treatment."""
    num_gathers: int = 0
    """Gathers in a step of the buckets that hold parameters of the layer."""
    compute_s: float = 0.0
    """Seconds of the ops of the layer: forward, backward and what runs again."""
    decisions: tuple[Decision, ...] = ()
    """The decisions about the layer and about its buckets."""

    @property
    def cost_s(self) -> float:
        """Seconds by which the step is longer than without the decisions."""
        return sum(decision.cost_s for decision in self.decisions)

    @property
    def saves_bytes(self) -> int:
        """Bytes by which the decisions lower the peak."""
        return sum(decision.saves_bytes for decision in self.decisions)


def layer_of_param(name: str) -> str:
    """Return the layer of a parameter: `h.3` for `h.3.mlp.weight`, and `head` for `head.weight` outside of layers."""
    layer = layer_of(name)
    return layer if is_numbered(layer) else name.rpartition(".")[0] or name


def layer_rows(survey: Survey, op_seconds: Sequence[float]) -> tuple[LayerRow, ...]:
    """Return a row for each layer in the order of the forward.

    `op_seconds` are the seconds of the ops that the plan runs. Raises ValueError if `survey` is without a graph.
    """
    plan, held = survey.plan, survey.held
    if held is None:
        raise ValueError("the layers of a plan are those of its graph")
    step = held.rows.step
    rows: dict[str, LayerRow] = {}

    def row(layer: str) -> LayerRow:
        return rows.setdefault(layer, LayerRow(layer=layer))

    placed = [*zip(plan.buckets, plan.placements, strict=True)]
    params = {name for bucket in plan.buckets for name in bucket.params}
    nbytes = {storage.id: storage.nbytes for storage in step.storages if storage.kind is Kind.PARAM}
    for op in step.ops:
        for name in op.reads:
            if name in params:
                row(layer_of_param(name))
    for op, seconds in zip(step.ops, op_seconds, strict=True):
        layer = layer_of(op.module)
        own = layer if is_numbered(layer) else op.module if op.module in rows else OTHER
        if seconds:
            row(own).compute_s += seconds
    for bucket, placement in placed:
        state_per_byte = bucket.state_nbytes / bucket.nbytes if bucket.nbytes else 0.0
        for name in bucket.params:
            own = row(layer_of_param(name))
            own.param_bytes[placement.param] += nbytes.get(name, 0)
            own.state_bytes[placement.optim] += int(nbytes.get(name, 0) * state_per_byte)
    for group in plan.activations:
        row(layer_of_group(group.id)).saved_bytes[group.saving] += group.nbytes
    by_subject: dict[str, list[Decision]] = {}
    for decision in plan.decisions:
        by_subject.setdefault(decision.subject, []).append(decision)
    for layer, own in rows.items():
        own.decisions += tuple(by_subject.get(layer, ()))
    for bucket in plan.buckets:
        num_gathers = sum(move.verb is Verb.GATHER for move in survey.moves.of(BucketRef(bucket.id)))
        for layer in dict.fromkeys(layer_of_param(name) for name in bucket.params):
            rows[layer].num_gathers += num_gathers
            rows[layer].decisions += tuple(by_subject.get(bucket.id, ()))
    return tuple(rows.values())


# ----------------------------------------------------------------------------------------------------------------------
# Share the live bytes of a plan at one op out to the layers that hold them, by kind.
#
#   op bwd.blocks.3.up.mm                 layer        kind    bytes
#     bucket b1, of blocks.0 and .1  -->  blocks.0     param   its share of b1, by the bytes of its parameters
#     storage s17, of blocks.2            blocks.2     saved   the bytes of s17
#     rows that buckets hold in turns     (several)    moment  of the largest of them
#
# The bytes of all layers add up to the live bytes at the op. An activation belongs to the layer of the op that writes
# it, a storage that no op writes to the layer of the first op that reads it, and an input of the step to no layer.


INPUTS = "inputs"
"""The name under which the tensors of the caller count: a batch, or a tangent."""
SEVERAL = "several layers"
"""The name under which bytes count that the buckets of several layers hold in turns."""


def layer_bytes(held: Holdings, op: OpId) -> Mapping[str, Mapping[Kind, int]]:
    """Return the live bytes at `op` by layer and kind, without zeros, in the order of the first ops of the layers."""
    at, rows = held.position(op), held.rows
    nbytes = {storage.id: storage.nbytes for storage in rows.step.storages}
    inputs = {storage.id for storage in rows.step.storages if storage.kind is Kind.INPUT}
    layers: dict[StorageId, str] = {}  # of each storage that an op touches, in the order of the first ops
    written: set[StorageId] = set()
    for own in rows.step.ops:
        layer = layer_of_op(own.module)
        for name in own.reads:
            layers.setdefault(name, INPUTS if name in inputs else layer)
        for name in own.writes:
            if name not in written and name not in inputs:
                written.add(name)
                layers.setdefault(name, layer)
    found: dict[str, Counter[Kind]] = {layer: Counter() for layer in dict.fromkeys(layers.values())}

    def add(layer: str, kind: Kind, count: int) -> None:
        found.setdefault(layer, Counter())[kind] += count

    for bucket in rows.plan.buckets:
        shares: Counter[str] = Counter()  # the bytes of the parameters of the bucket by layer
        for name in bucket.params:
            shares[layer_of_param(name)] += nbytes.get(name, 0)
        for row in _live(rows.of_bucket(bucket), at):
            for layer, share in split(row.nbytes, shares).items():
                add(layer, row.kind, share)
    for name, own in rows.storages.items():
        for row in _live(own, at):
            add(layers.get(name, OTHER), row.kind, row.nbytes)
    for row in _live(rows.joint(rows.plan.buckets), at):
        add(SEVERAL, row.kind, row.nbytes)
    if rows.plan.base_bytes:
        add(OTHER, Kind.BUFFER, rows.plan.base_bytes)
    by_layer = {layer: {kind: own[kind] for kind in Kind if own[kind]} for layer, own in found.items()}
    return {layer: own for layer, own in by_layer.items() if own}


def _live(rows: Iterable[Held], at: int) -> Iterable[Held]:
    return (row for row in rows if row.first <= at <= row.last)


def layer_of_op(module: str) -> str:
    """Return the layer of an op of `module`; outside of all layers the module itself, or `OTHER` for the model."""
    layer = layer_of(module)
    return layer if is_numbered(layer) else module or OTHER


def split(total: int, shares: Mapping[str, int]) -> Mapping[str, int]:
    """Return `total` cut in proportion to `shares`; the rest by rounding goes to the first."""
    whole = sum(shares.values())
    parts = {layer: total * share // whole if whole else 0 for layer, share in shares.items()}
    first = next(iter(shares), OTHER)
    parts[first] = parts.get(first, 0) + total - sum(parts.values())
    return parts


# ----------------------------------------------------------------------------------------------------------------------
# Compare the work of a simulated and a measured step on each lane: how often, how many bytes, for how many seconds.
#
# lane  verb       planned  measured     bytes  measured  seconds  measured
# h2d   gather          12        12   1.2 GiB   1.2 GiB   52 ms     61 ms


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkRow:
    """The work of a verb on a lane."""

    lane: Lane
    verb: str
    planned: Tally
    measured: Tally
    planned_s: float
    measured_s: float

    @property
    def is_off(self) -> bool:
        """Whether the step did this another number of times, or with other bytes, than planned."""
        return self.planned != self.measured


def work_rows(planned: Record, measured: Record) -> tuple[WorkRow, ...]:
    """Return the work of two records of a step by lane and verb, in the order of the lanes.

    What the calling thread waits for is left out: no plan says it.
    """
    nothing = (Tally(0, 0), 0.0)

    def by_verb(record: Record) -> dict[tuple[Lane, str], tuple[Tally, float]]:
        works: dict[tuple[Lane, str], tuple[Tally, float]] = {}
        for (lane, name), tally in tallies(record.spans).items():
            before, _ = works.get((lane, verb_of(name)), nothing)
            works[lane, verb_of(name)] = Tally(before.times + tally.times, before.nbytes + tally.nbytes), 0.0
        for span in record.spans:
            work = span.lane, verb_of(span.label)
            if work in works:
                works[work] = works[work][0], works[work][1] + (span.end_s - span.start_s)
        return works

    sides = by_verb(planned), by_verb(measured)
    found: list[WorkRow] = []
    for lane, verb in sorted({*sides[0], *sides[1]}, key=lambda work: (list(Lane).index(work[0]), work[1])):
        (own, own_s), (other, other_s) = (side.get((lane, verb), nothing) for side in sides)
        found.append(WorkRow(lane=lane, verb=verb, planned=own, measured=other, planned_s=own_s, measured_s=other_s))
    return tuple(found)


# ----------------------------------------------------------------------------------------------------------------------
# Format parts of a report as text: tables, titled entries, curves and memory timelines.


def table_text(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table with the first column flush left and the others flush right.

    Raises ValueError if a row has another number of cells than `headers`.
    """
    for row in rows:
        if len(row) != len(headers):
            raise ValueError(f"row {list(row)} has {len(row)} cells, the table has {len(headers)} columns")
    widths = [max(len(line[column]) for line in (headers, *rows)) for column in range(len(headers))]
    rule = ["-" * width for width in widths]
    lines = (
        [cells[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))]
        for cells in (headers, rule, *rows)
    )
    return "\n".join("  ".join(cells).rstrip() for cells in lines)


def entry_text(title: str, fields: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Return `title` with a row for each line of each field below; fields without lines are left out."""
    shown = [(name, lines) for name, lines in fields if lines]
    width = max((len(name) for name, _ in shown), default=0)
    rows = [
        f"  {name if first else '':<{width}}  {line}".rstrip()
        for name, lines in shown
        for first, line in ((at == 0, line) for at, line in enumerate(lines))
    ]
    return "\n".join((title, *rows))


_BLOCKS = "▁▂▃▄▅▆▇█"


def curve_text(values: Sequence[float], low: float | None = None, high: float | None = None) -> str:
    """Return a block character for each value, scaled from `low` to `high` (default: the extremes of `values`).

    Values outside the scale are cut to it. NaN and infinity print as `!`.
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return "!" * len(values)
    bottom = min(finite) if low is None else low
    top = max(finite) if high is None else high
    blocks: list[str] = []
    for value in values:
        cut = min(max(value, bottom), top)
        height = (cut - bottom) / (top - bottom) if top > bottom else 0.0
        # If the range is too small or too large to divide by, the curve is flat.
        at = min(int(height * len(_BLOCKS)), len(_BLOCKS) - 1) if math.isfinite(height) else 0
        blocks.append(_BLOCKS[at] if math.isfinite(value) else "!")
    return "".join(blocks)


def timeline_text(timeline: MemoryTimeline, width: int = 72) -> str:
    """Return the live bytes over the step as a row of blocks, and a table of the bytes by kind at the peak."""
    columns, values = min(width, len(timeline.ops)), timeline.live_bytes
    edges = [len(values) * column // columns for column in range(columns + 1)]
    # The largest value of each stretch, which keeps every peak.
    drawn = curve_text([float(max(values[first:last])) for first, last in itertools.pairwise(edges)], low=0.0)
    peak = timeline.peak
    largest = sorted(peak.by_kind.items(), key=lambda item: -item[1])
    rows = [(str(kind), format_bytes(nbytes), f"{nbytes / peak.nbytes:.0%}") for kind, nbytes in largest]
    rows.append(("all", format_bytes(peak.nbytes), "100%"))
    title = f"live bytes over {len(timeline.ops)} ops, peak {format_bytes(peak.nbytes)} at {peak.op}"
    return f"{title}\n{drawn}\n\n{table_text(('at the peak', 'bytes', 'share'), rows)}"
