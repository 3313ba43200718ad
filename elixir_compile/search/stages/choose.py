"""Choose the stages of a pipeline for a captured step: cut its layers so that the slowest stage is as fast as memory
allows, and compare the schedules of torch.
"""

import itertools
import math
import operator
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from typing import NamedTuple

from elixir_compile.base.errors import InvalidOption, NoFeasibleStages
from elixir_compile.ir import Param, Phase, Saving, StepGraph, StorageId
from elixir_compile.ir.hardware import Cluster, Fleet, Link
from elixir_compile.ir.pipeline import (
    PipelineOrder,
    PipelinePlan,
    RankOutlook,
    ScheduleOutlook,
    StageOutlook,
    TorchSchedule,
    layers_text,
    outstanding_forwards,
    pipeline_order,
)
from elixir_compile.search.outline import mixed, seconds_of_ops, treatments_of
from elixir_compile.search.shares.choose import Budget
from elixir_compile.search.space.buckets import Level, level_text
from elixir_compile.search.space.layers import activations_of, layers_of
from elixir_compile.search.stages.costs import (
    ENDLESS_BYTES,
    LEVELS,
    StageCosts,
    StageQuestion,
    alone_peak,
    most_sent_bytes,
    rank_peaks,
    recomputed_modes,
    stage_bytes,
)
from elixir_compile.step.as_run import as_run
from elixir_compile.step.stages import StageBytes, StageSeconds, layered, play_pipeline, stage_memory

# ----------------------------------------------------------------------------------------------------------------------
# Cut layers into stages so that the slowest stage is as fast as possible within the memory of every rank.
#
#   layers   0 1 2 | 3 4 | 5 6 7 | 8 9        stage s is on rank s mod P; each stage has options: seconds and bytes
#   T        the least seconds such that stages of at most T each cover all layers and fit
#   cuts     of all with no stage above T, those with the least sum of squares of seconds
#
# For a given T the stages are placed one after another, a dynamic program over (stage, layers done). If ranks have
# several stages, the state also has the bytes left on each rank, and of two states with equal layers a state that is no
# better in anything is dropped. Of very many states only the fastest and the leanest are kept, and T is searched in
# `_MOST_COVERS` halvings; so with many stages per rank and little memory a better cut may be missed. With one stage per
# rank no state is dropped that could be better.


_MANY_STATES, _MOST_KEPT = 64, 8
"""Of more states than the first with equal layers, so many of the fastest and so many of the leanest are kept."""
_MOST_COVERS = 8
"""Halvings of the times that the slowest stage can take: exact for up to 256 of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way to run a stage: its seconds, and its bytes on its rank."""

    seconds: float
    added_bytes: int
    """Device bytes that add up over the stages of a rank."""
    passing_bytes: int
    """Device bytes that only one stage of a rank holds at a time."""
    host_bytes: int
    way: int = 0
    """The number of the way in the list of the caller."""

    def is_no_better_than(self, other: "Option") -> bool:
        """Return whether `other` is as good in everything."""
        mine = (self.seconds, self.added_bytes, self.passing_bytes, self.host_bytes)
        its = (other.seconds, other.added_bytes, other.passing_bytes, other.host_bytes)
        return all(map(operator.ge, mine, its))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A stage: its layers from `first` up to, not including, `end`, and how it runs."""

    first: int
    end: int
    option: Option


Options = Callable[[int, int, int], Sequence[Option]]
"""The options of a stage by its number, its first layer, and the end of its layers. More layers take more seconds."""

_Used = tuple[int, int, int]
"""Added, passing and host bytes of a rank."""
_NOTHING: _Used = (0, 0, 0)


@dataclass(frozen=True, slots=True)
class _State:
    """Stages that are placed."""

    cost: float
    used: tuple[_Used, ...]
    """Of each rank that has stages still to come; nothing for others, whose stages fit."""
    cut: Cut | None = None
    before: "_State | None" = None

    def cuts(self) -> tuple[Cut, ...]:
        return () if self.cut is None or self.before is None else (*self.before.cuts(), self.cut)

    def is_no_better_than(self, other: "_State") -> bool:
        if self.cost < other.cost:
            return False
        return all(map(operator.ge, itertools.chain(*self.used), itertools.chain(*other.used)))


def best_split(num_layers: int, num_stages: int, rooms: Sequence[Budget], options: Options) -> tuple[Cut, ...] | None:
    """Return the cuts of the fastest stages that fit `rooms`, one per rank; None if nothing fits.

    There must be as many layers as stages.
    """
    splitter = _Splitter(num_layers, num_stages, rooms, cache(options))
    limit_s, most_s = splitter.least_s(), splitter.most_s()
    found = splitter.cover(limit_s)
    growth = 1.05
    while found is None and limit_s < most_s:
        limit_s, growth = min(limit_s * growth, most_s), 1 + 1.5 * (growth - 1)
        found = splitter.cover(limit_s)
    if found is None:
        return None
    times = splitter.times(slowest_s(found))
    low, high = 0, len(times)  # the times from `high` on have a cut, those before `low` have none
    for _ in range(_MOST_COVERS):
        if low >= high:
            break
        middle = (low + high) // 2
        better = splitter.cover(times[middle])
        if better is None:
            low = middle + 1
        else:
            found, high = better, bisect_left(times, slowest_s(better))
    return splitter.cover(slowest_s(found)) or found


def slowest_s(cuts: Iterable[Cut]) -> float:
    """Return the seconds of the slowest stage."""
    return max(cut.option.seconds for cut in cuts)


class _Splitter:
    """The layers, stages and ranks of one question."""

    def __init__(self, num_layers: int, num_stages: int, rooms: Sequence[Budget], options: Options) -> None:
        self._num_layers, self._num_stages, self._rooms = num_layers, num_stages, rooms
        self._options = options

    def _ends(self, stage: int, first: int) -> range:
        """Return where `stage` may end, so that every later stage has a layer and the last one ends last."""
        behind = self._num_stages - stage - 1
        return range(self._num_layers if not behind else first + 1, self._num_layers - behind + 1)

    def _begins(self) -> Iterator[tuple[int, int]]:
        """Yield each stage with each layer at which it may begin."""
        most = self._num_layers - self._num_stages
        for stage in range(self._num_stages):
            yield from ((stage, first) for first in (range(stage, stage + most + 1) if stage else (0,)))

    def least_s(self) -> float:
        """Return the seconds of the slowest stage if everything fits."""
        best = {0: 0.0}
        for stage in range(self._num_stages):
            reached: dict[int, float] = {}
            for first, before_s in best.items():
                for end in self._ends(stage, first):
                    slower_s = max(before_s, min(option.seconds for option in self._options(stage, first, end)))
                    reached[end] = min(reached.get(end, math.inf), slower_s)
            best = reached
        return best[self._num_layers]

    def most_s(self) -> float:
        """Return the seconds of the slowest option of any stage."""
        longest = ((stage, first, self._ends(stage, first)[-1]) for stage, first in self._begins())
        return max(option.seconds for stage, first, end in longest for option in self._options(stage, first, end))

    def times(self, limit_s: float) -> list[float]:
        """Return the seconds, from the least to `limit_s`, that the slowest stage can take."""
        least_s, found = self.least_s(), set[float]()
        for stage, first in self._begins():
            for end in self._ends(stage, first):
                seconds = [option.seconds for option in self._options(stage, first, end)]
                found.update(own_s for own_s in seconds if least_s <= own_s <= limit_s)
                if min(seconds) > limit_s:
                    break
        return sorted(found)

    def cover(self, limit_s: float) -> tuple[Cut, ...] | None:
        """Return the cuts with the least sum of squares whose stages take at most `limit_s` each and fit; or None."""
        num_ranks = len(self._rooms)
        states = {0: [_State(0.0, (_NOTHING,) * num_ranks)]}
        for stage in range(self._num_stages):
            rank, is_last = stage % num_ranks, stage + num_ranks >= self._num_stages
            room = self._rooms[rank]
            reached: dict[int, list[_State]] = {}
            for first, before in states.items():
                for end in self._ends(stage, first):
                    options = [option for option in self._options(stage, first, end) if option.seconds <= limit_s]
                    if not options:
                        break
                    cuts = [Cut(first=first, end=end, option=option) for option in options]
                    found = reached.setdefault(end, [])
                    for state, cut in itertools.product(before, cuts):
                        (added, passing, host), own = state.used[rank], cut.option
                        now = (added + own.added_bytes, max(passing, own.passing_bytes), host + own.host_bytes)
                        if now[0] + now[1] <= room.device_bytes and now[2] <= room.host_bytes:
                            used = (*state.used[:rank], _NOTHING if is_last else now, *state.used[rank + 1 :])
                            found.append(_State(state.cost + own.seconds**2, used, cut, state))
            states = {end: _undominated(found) for end, found in reached.items() if found}
        found = states.get(self._num_layers)
        return min(found, key=lambda state: state.cost).cuts() if found else None


def _undominated(states: list[_State]) -> list[_State]:
    """Return the states that no other is better than in everything; of many, the fastest and the leanest."""
    by_cost = sorted(states, key=lambda state: (state.cost, state.used))
    if len(states) <= _MANY_STATES:
        return _first_undominated(by_cost, _MANY_STATES)
    by_bytes = sorted(by_cost, key=lambda state: sum(added + passing + host for added, passing, host in state.used))
    return _first_undominated(
        [*_first_undominated(by_cost, _MOST_KEPT), *_first_undominated(by_bytes, _MOST_KEPT)], _MANY_STATES
    )


def _first_undominated(states: Iterable[_State], most: int) -> list[_State]:
    """Return the first `most` of `states` that none before them is better than in everything."""
    kept: list[_State] = []
    for state in states:
        if not any(state.is_no_better_than(other) for other in kept):
            kept.append(state)
            if len(kept) == most:
                break
    return kept


# ----------------------------------------------------------------------------------------------------------------------
# Choose the stages of a pipeline for a captured step, and compare the schedules of torch.
#
#   layers --costs--> options of each stage --split--> cuts --op by op--> seconds and bytes --simulate--> step, bubbles


_MOST_TRIES = 4
_SAVINGS = frozenset({Saving.KEEP, Saving.RECOMPUTE})
_SHARES = tuple(Fraction(quarters, 4) for quarters in range(5))
"""The shares of the layers of a stage whose activations are computed again that are offered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageAsk:
    """The question to answer: which layers of `graph` does each rank of `fleet` train?"""

    graph: StepGraph
    """The captured step on one micro-batch."""
    rows: int
    """Rows of the batch of a step."""
    micro_batches: int
    fleet: Fleet
    budgets: tuple[Budget, ...]
    """The memory of each rank."""
    base_bytes: int = 0
    """Device bytes of each rank outside of its stages, as of libraries."""
    trained: Mapping[StorageId, Param]
    savings: frozenset[Saving] = frozenset(Saving)


class StageSearch:
    """The search for the stages of one captured step, under any schedule."""

    def __init__(self, ask: StageAsk) -> None:
        self.ask = ask
        classes = ask.fleet.classes()
        self._class_of = {rank: number for number, ranks in enumerate(classes) for rank in ranks}
        clusters = [ask.fleet.seen_by(ranks[0]) for ranks in classes]
        step = layered(ask.graph)
        treatments = treatments_of(ask.graph, ask.savings & _SAVINGS)
        self._costs = StageCosts(step, treatments, ask.trained, clusters)
        self.num_layers = len(step.layers)

    def best(self, schedule: TorchSchedule, num_stages: int) -> PipelinePlan:
        """Return the stages with the fastest slowest stage under `schedule`.

        Raises InvalidOption for numbers that torch does not take and for more stages than layers, and NoFeasibleStages
        if no stages fit the ranks.
        """
        ask, fleet = self.ask, self.ask.fleet
        order = pipeline_order(schedule, num_stages, fleet.num_ranks, ask.micro_batches)
        if num_stages > self.num_layers:
            expected = f"at most {self.num_layers}, as many as {ask.graph.name} has layers at which it can be cut"
            raise InvalidOption("stages", num_stages, expected)
        return _Chosen(ask, self._costs, order, self._class_of).plan()

    def compared(self, num_stages: int) -> tuple[ScheduleOutlook, ...]:
        """Return the step of each schedule of torch with stages of its own: one for each rank if the schedule takes no
        more, else `num_stages`, or two for each rank if those are as many as the ranks."""
        num_ranks = self.ask.fleet.num_ranks
        looped = num_stages if num_stages > num_ranks else 2 * num_ranks

        def outlook(schedule: TorchSchedule) -> ScheduleOutlook:
            number = looped if schedule.is_looped else num_ranks
            try:
                made = self.best(schedule, number)
            except NoFeasibleStages:
                because = "does not fit"
            except InvalidOption as error:
                because = f"{error.name} {error.got}: expected {error.expected}"
            else:
                return ScheduleOutlook(
                    schedule=schedule,
                    num_stages=number,
                    step_s=made.step_s,
                    bubble=sum(rank.bubble for rank in made.ranks) / len(made.ranks),
                    peak_bytes=max(rank.peak_bytes for rank in made.ranks),
                    sent_bytes=sum(rank.sent_bytes for rank in made.ranks),
                )
            return ScheduleOutlook(schedule=schedule, num_stages=number, because=because)

        return tuple(map(outlook, TorchSchedule))


@dataclass(frozen=True, slots=True)
class _Way:
    """How a stage runs: the treatment of its activations, and its homes."""

    share: Fraction
    """The share of its layers whose activations are computed again."""
    level: Level


class _Counted(NamedTuple):
    """A chosen stage, op by op."""

    seconds: StageSeconds
    outlook: StageOutlook
    nbytes: StageBytes


class _Chosen:
    """The stages of one schedule."""

    def __init__(self, ask: StageAsk, costs: StageCosts, order: PipelineOrder, class_of: dict[int, int]) -> None:
        self._ask, self._costs, self._order, self._class_of = ask, costs, order, class_of
        self._outstanding = [outstanding_forwards(order, stage) for stage in range(order.num_stages)]
        shares = _SHARES if len(costs.treatments) > 1 else _SHARES[:1]
        self._ways = [_Way(share, level) for share in shares for level in LEVELS]
        self._found: dict[tuple[int, int, int, int], tuple[Option, ...]] = {}
        """Options by what they depend on: the class of the rank, outstanding forwards, and layers."""
        self._rooms = [replace(each, device_bytes=each.device_bytes - ask.base_bytes) for each in ask.budgets]

    def _cluster(self, stage: int) -> Cluster:
        return self._costs.clusters[self._class_of[stage % self._order.num_ranks]]

    def _options(self, stage: int, first: int, end: int) -> tuple[Option, ...]:
        """Return the ways to run a stage of these layers of which no other is both faster and leaner."""
        key = (self._class_of[stage % self._order.num_ranks], self._outstanding[stage], first, end)
        if key not in self._found:
            facts, cluster, num = self._costs.facts(first, end), self._cluster(stage), self._order.num_micro_batches
            treated = len(self._costs.treatments) - 1
            pairs = [self._costs.stage_s(key[0], each, first, end) for each in (0, treated)]
            # Only breadth-first order is through with a stage before the next one of the rank begins.
            is_alone = self._order.schedule is TorchSchedule.LOOPED_BFS
            sent_bytes = most_sent_bytes(self._order, stage, facts)
            running_bytes = max(facts.running_bytes[0], facts.running_bytes[treated]) + facts.largest_grad_bytes
            found: list[Option] = []
            for number, way in enumerate(self._ways):
                forward_s, backward_s = (mixed(way.share, *pair) for pair in zip(*pairs, strict=True))
                gather_s = facts.gather_s(way.level, cluster)
                exposed_s = max(0.0, gather_s - forward_s) + max(0.0, gather_s - backward_s)
                saved_bytes = math.ceil(mixed(way.share, facts.saved_bytes[0], facts.saved_bytes[treated]))
                gathered_bytes = facts.gathered_bytes(way.level)
                added_bytes = facts.held_bytes(way.level, num) + sent_bytes + self._outstanding[stage] * saved_bytes
                own = Option(
                    seconds=num * (forward_s + backward_s) + exposed_s + facts.update_s(way.level, cluster),
                    added_bytes=added_bytes + (0 if is_alone else gathered_bytes),
                    passing_bytes=running_bytes + (gathered_bytes if is_alone else 0),
                    host_bytes=facts.host_bytes(way.level),
                    way=number,
                )
                # Of options that are nowhere worse than each other, the earliest stays.
                if not any(map(own.is_no_better_than, found)):
                    found = [*(other for other in found if not other.is_no_better_than(own)), own]
            self._found[key] = tuple(found)
        return self._found[key]

    def plan(self) -> PipelinePlan:
        """Return the stages, within the budgets of the ranks op by op.

        If the sums of layers had too few bytes, the room of a rank shrinks by as many. Raises NoFeasibleStages.
        """
        ask, order, rooms = self._ask, self._order, list(self._rooms)
        for _ in range(_MOST_TRIES):
            cuts = best_split(len(self._costs.step.layers), order.num_stages, rooms, self._options)
            if cuts is None:
                raise self._no_room()
            counted = [self._counted(stage, cut) for stage, cut in enumerate(cuts)]
            peaks = rank_peaks(order, [each.nbytes for each in counted])
            excess = [peak - room.device_bytes for peak, room in zip(peaks, self._rooms, strict=True)]
            if max(excess) <= 0:
                break
            rooms = [
                replace(room, device_bytes=room.device_bytes - max(0, over))
                for room, over in zip(rooms, excess, strict=True)
            ]
        else:
            raise self._no_room()
        seconds = [each.seconds for each in counted]
        played = play_pipeline(order, seconds, lambda one, other: link_between(ask.fleet, one, other))
        ranks = tuple(
            RankOutlook(
                rank=rank,
                device=ask.fleet.seats[rank].cluster.device.name,
                busy_s=own.busy_s,
                bubble=played.bubble(rank),
                peak_bytes=peaks[rank] + ask.base_bytes,
                budget_bytes=ask.budgets[rank].device_bytes,
                host_bytes=sum(cut.option.host_bytes for cut in cuts[rank :: order.num_ranks]),
                sent_bytes=own.sent_bytes,
                received_bytes=own.received_bytes,
            )
            for rank, own in enumerate(played.ranks)
        )
        return PipelinePlan(
            name=ask.graph.name,
            hardware=ask.fleet.name,
            schedule=order.schedule,
            rows=ask.rows,
            micro_batches=order.num_micro_batches,
            step_s=played.step_s,
            stages=tuple(each.outlook for each in counted),
            ranks=ranks,
        )

    def _counted(self, stage: int, cut: Cut) -> "_Counted":
        """Return `stage` with its seconds and bytes as a step of its own, op by op."""
        way, cluster = self._ways[cut.option.way], self._cluster(stage)
        facts, savings = self._costs.facts(cut.first, cut.end), self._ask.savings & _SAVINGS
        graph = self._costs.step.stage_graph(cut.first, cut.end)
        layers = layers_of(graph, savings)
        modes = recomputed_modes(layers, way.share)
        step = as_run(graph, activations_of(layers, modes))
        phase_s = {Phase.FORWARD: 0.0, Phase.BACKWARD: 0.0}
        for op, op_s in seconds_of_ops(step, cluster):
            phase_s[op.phase] += op_s
        seconds = StageSeconds(
            forward_s=phase_s[Phase.FORWARD],
            backward_s=phase_s[Phase.BACKWARD],
            gather_s=facts.gather_s(way.level, cluster),
            update_s=facts.update_s(way.level, cluster),
            sent_bytes=facts.sent_bytes,
        )
        asked = StageQuestion(stage=stage, first=cut.first, end=cut.end, level=way.level, modes=modes)
        nbytes = stage_bytes(asked, self._costs.step, self._order, self._ask.trained, cluster, savings)
        own = self._costs.step.layers[cut.first : cut.end]
        treatment = {Fraction(0): "kept", Fraction(1): "recomputed"}
        outlook = StageOutlook(
            stage=stage,
            rank=stage % self._order.num_ranks,
            layers=tuple(layer.name for layer in own),
            modules=tuple(module for layer in own for module in layer.modules),
            forward_s=seconds.forward_s,
            backward_s=seconds.backward_s,
            update_s=seconds.update_s,
            sent_bytes=seconds.sent_bytes,
            outstanding=self._outstanding[stage],
            saved_bytes=stage_memory(step).saved_bytes,
            peak_bytes=alone_peak(self._order, stage, nbytes),
            treatment=treatment.get(way.share, f"recomputed in {way.share} of the layers"),
            homes=level_text(way.level),
            copies=self._costs.shared_with_earlier(cut.first, cut.end),
        )
        return _Counted(seconds, outlook, nbytes)

    def _no_room(self) -> NoFeasibleStages:
        """Return the error with the rank that is short of the most bytes, if each stage is as lean as it can be."""
        order, num_layers = self._order, len(self._costs.step.layers)
        rooms = [replace(room, host_bytes=ENDLESS_BYTES) for room in self._rooms]
        is_short_of_host = best_split(num_layers, order.num_stages, rooms, self._options) is not None

        def by_bytes(stage: int, first: int, end: int) -> list[Option]:
            """Return the options with bytes, and one more, in place of seconds, which are more than 0."""
            found = self._options(stage, first, end)
            if is_short_of_host:
                return [replace(option, seconds=1.0 + option.host_bytes) for option in found]
            least_bytes = min(option.added_bytes + option.passing_bytes for option in found)
            return [Option(seconds=1.0 + least_bytes, added_bytes=0, passing_bytes=0, host_bytes=0)]

        if not is_short_of_host:
            rooms = [Budget(device_bytes=ENDLESS_BYTES, host_bytes=ENDLESS_BYTES)] * order.num_ranks
        cuts = best_split(num_layers, order.num_stages, rooms, by_bytes)
        assert cuts is not None, "these options fit any room, or were found to fit just before"
        ranks = range(order.num_ranks)
        needed = [sum(int(cut.option.seconds) - 1 for cut in cuts[rank :: order.num_ranks]) for rank in ranks]
        rooms = [room.host_bytes if is_short_of_host else room.device_bytes for room in self._rooms]
        rank = max(ranks, key=lambda rank: needed[rank] - rooms[rank])
        stage = max(range(rank, order.num_stages, order.num_ranks), key=lambda stage: cuts[stage].option.seconds)
        layers = self._costs.step.layers[cuts[stage].first : cuts[stage].end]
        base_bytes = 0 if is_short_of_host else self._ask.base_bytes
        return NoFeasibleStages(
            order.schedule,
            layers_text([layer.name for layer in layers]),
            max(needed[rank], rooms[rank] + 1) + base_bytes,
            rooms[rank] + base_bytes,
            "host" if is_short_of_host else "device",
            self._outstanding[stage],
        )


def link_between(fleet: Fleet, rank: int, other: int) -> Link | None:
    """Return the link from `rank` to `other`: of their host, or the slowest of the ring over all ranks."""
    one, two = fleet.seats[rank], fleet.seats[other]
    peer = one.cluster.nodes[0].peer if one.host == two.host else None
    return peer or fleet.collective
