"""Simulate pipelines: the seconds and the peaks of their stages, and what a plan predicts of its step."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from elixir_compile.base.errors import InvalidPlan
from elixir_compile.ir import Phase, Verb
from elixir_compile.ir.hardware import Link
from elixir_compile.ir.kinds import Lane, OpId
from elixir_compile.ir.pipeline import PipelineAction, PipelineOrder
from elixir_compile.ir.plan import Prediction
from elixir_compile.ir.record import Record, Span

# ----------------------------------------------------------------------------------------------------------------------
# Figures of a simulated step: exposed and hidden transfers, the critical path, and the prediction for a plan.


_TRANSFERS = frozenset({Lane.H2D, Lane.D2H, Lane.GATHER, Lane.REDUCE, Lane.P2P})


def exposed_s(record: Record) -> float:
    """Return the seconds of transfers during which the compute lane is idle; simultaneous transfers count each."""
    compute = sorted(
        (span for span in record.spans if span.lane is Lane.COMPUTE and span.end_s > span.start_s),
        key=lambda span: span.start_s,
    )
    starts_s = [span.start_s for span in compute]
    total_s = 0.0
    for span in record.spans:
        if span.lane in _TRANSFERS:
            total_s += span.end_s - span.start_s - _covered_s(span, compute, starts_s)
            if span.end_s > record.step_s:
                # The end of this span runs in the next step, beside compute as at the beginning of this step.
                total_s -= _covered_s(_before(span, record.step_s), compute, starts_s)
    return max(0.0, total_s)  # rounded, what covers a transfer may be longer than it


def exposed_by_lane(record: Record) -> dict[Lane, float]:
    """Return the seconds of each lane's transfers during which the compute lane is idle."""
    lanes = sorted({span.lane for span in record.spans} & _TRANSFERS)
    compute = tuple(span for span in record.spans if span.lane is Lane.COMPUTE)
    return {
        lane: exposed_s(replace(record, spans=(*compute, *(span for span in record.spans if span.lane is lane))))
        for lane in lanes
    }


def critical_path(record: Record) -> tuple[Span, ...]:
    """Return the spans of a simulated step that lead without a gap to its end.

    The step gets shorter only if a span among them gets shorter.
    """
    ends: dict[float, Span] = {}
    for span in record.spans:
        # If a span of compute ends together with another, it is on the path.
        is_first = span.end_s not in ends or span.lane is Lane.COMPUTE
        if span.end_s > span.start_s and is_first:
            ends[span.end_s] = span
    path: list[Span] = []
    at_s = max(ends, default=0.0)
    while at_s in ends:
        path.append(ends[at_s])
        at_s = path[-1].start_s
    return tuple(reversed(path))


def hidden_share(record: Record) -> float:
    """Return the share of transfer seconds beside compute, 0 to 1; 1 if nothing is transferred."""
    total_s = sum(span.end_s - span.start_s for span in record.spans if span.lane in _TRANSFERS)
    return 1.0 if total_s == 0 else min(1.0, max(0.0, 1.0 - exposed_s(record) / total_s))


def hidden_update_share(record: Record) -> float:
    """Return the share of the host's update seconds beside compute, 0 to 1; 1 if the host updates nothing."""
    updates = (replace(span, lane=Lane.H2D) for span in record.spans if span.lane is Lane.HOST)
    compute = (span for span in record.spans if span.lane is Lane.COMPUTE)
    return hidden_share(replace(record, spans=(*compute, *updates)))


def _before(span: Span, step_s: float) -> Span:
    """Return the part of `span` after the end of the step, with times of the next step."""
    return replace(span, start_s=max(span.start_s - step_s, 0.0), end_s=span.end_s - step_s)


def _covered_s(span: Span, compute: list[Span], starts_s: list[float]) -> float:
    """Return the seconds of `span` beside `compute`, which are sorted spans without overlap."""
    covered_s = 0.0
    i = max(bisect_right(starts_s, span.start_s) - 1, 0)
    while i < len(compute) and compute[i].start_s < span.end_s:
        covered_s += max(0.0, min(span.end_s, compute[i].end_s) - max(span.start_s, compute[i].start_s))
        i += 1
    return covered_s


def prediction_of(record: Record, device_peak_bytes: int, device_peak_at: OpId) -> Prediction:
    """Return the prediction of `record`, with the device peak and its op from the timeline."""
    return Prediction(
        step_s=record.step_s,
        exposed_s=exposed_s(record),
        hidden_share=hidden_share(record),
        device_peak_bytes=device_peak_bytes,
        device_peak_at=device_peak_at,
        host_peak_bytes=record.host_peak_bytes,
    )


# ----------------------------------------------------------------------------------------------------------------------
# Play a step of a pipeline: when each rank runs each stage on each micro-batch, its messages, and its bytes.
#
#   rank 0  0F0 0F1 .   .   0B0 .   0B1 update
#   link      >>  >>      <<      <<                a message begins when it is sent and the link is free
#   rank 1      . 1F0 1B0 1F1 1B1 update
#
# Each pair of ranks has a link in each direction, which sends one message at a time. A link that does not overlap
# compute takes the time of the sender. Not modelled: a message that waits for its receiver, as where a library sends
# large tensors only once a receive is posted; and ranks whose stages take different seconds from micro-batch to micro-
# batch.


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds:
    """The seconds of one stage on its rank, and the bytes of its messages."""

    forward_s: float
    """The forward of a micro-batch."""
    backward_s: float
    """The backward of a micro-batch, with the activations that it computes again."""
    gather_s: float = 0.0
    """Until the parameters are on the device, if they come there for the first forward and again for the first
    backward; they come while those run."""
    update_s: float = 0.0
    """The update behind the last backward of the rank."""
    sent_bytes: int = 0
    """Bytes of the message of a forward to the next stage; as many bytes of gradients come back. 0 for the last
    stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRun:
    """One forward or backward of a stage in the played step."""

    action: PipelineAction
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlayed:
    """One rank in the played step."""

    runs: tuple[StageRun, ...]
    busy_s: float
    """Seconds of its forwards, backwards and update."""
    end_s: float
    """When its update is over."""
    sent_bytes: int
    received_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePlayed:
    """A played step of all ranks."""

    step_s: float
    ranks: tuple[RankPlayed, ...]

    def bubble(self, rank: int) -> float:
        """Return the share of the step in which `rank` does nothing, 0 to 1."""
        return 1 - self.ranks[rank].busy_s / self.step_s if self.step_s else 0.0

    @property
    def mean_bubble(self) -> float:
        """The share of the step in which a rank does nothing, on average over ranks."""
        return sum(map(self.bubble, range(len(self.ranks)))) / len(self.ranks)


def play_pipeline(
    order: PipelineOrder, stages: Sequence[StageSeconds], link: Callable[[int, int], Link | None]
) -> PipelinePlayed:
    """Return a step of `order` with the seconds of `stages`.

    `link` returns the link from one rank to another; None for messages that take no time. Raises InvalidPlan if a rank
    waits for a message that no rank sends.
    """
    if len(stages) != order.num_stages:
        raise InvalidPlan(f"{len(stages)} stages are played in an order of {order.num_stages}.")
    player = _Player(order, stages, link)
    waiting = list(range(order.num_ranks))
    while waiting:
        before = player.num_done
        waiting = [rank for rank in waiting if player.advance(rank)]
        if waiting and player.num_done == before:
            raise InvalidPlan(f"the order of {order.schedule} waits for a message that is never sent.")
    return player.played()


@dataclass(slots=True)
class _Rank:
    """Where one rank is."""

    now_s: float = 0.0
    place: int = 0
    busy_s: float = 0.0
    sent_bytes: int = 0
    received_bytes: int = 0


class _Player:
    """The state of a played step."""

    def __init__(
        self, order: PipelineOrder, stages: Sequence[StageSeconds], link: Callable[[int, int], Link | None]
    ) -> None:
        self._order, self._stages, self._link = order, stages, link
        self._ranks = [_Rank() for _ in range(order.num_ranks)]
        self._runs: list[list[StageRun]] = [[] for _ in self._ranks]
        self._arrivals: dict[PipelineAction, float] = {}
        """When the message of each run that was sent is there, by its `send`."""
        self._free_s: dict[tuple[int, int], float] = {}
        self._started: set[tuple[int, Phase]] = set()
        self.num_done = 0

    def advance(self, number: int) -> bool:
        """Play the actions of rank `number` until it waits for a message not yet sent; return whether any are left."""
        rank, actions = self._ranks[number], self._order.actions[number]
        while rank.place < len(actions):
            action = actions[rank.place]
            if action.verb is Verb.RECV:
                sent = _sent_for(action)
                if sent not in self._arrivals:
                    return True
                rank.now_s = max(rank.now_s, self._arrivals[sent])
                rank.received_bytes += self._message_bytes(sent)
            elif action.verb is Verb.RUN:
                self._run(number, rank, action)
            elif action.verb is Verb.SEND:
                self._send(number, rank, action)
            else:
                sent = PipelineAction(Verb.SEND, action.stage, action.phase, action.micro_batch)
                rank.now_s = max(rank.now_s, self._arrivals[sent])
            rank.place += 1
            self.num_done += 1
        return False

    def _run(self, number: int, rank: _Rank, action: PipelineAction) -> None:
        stage = self._stages[action.stage]
        run_s = stage.forward_s if action.phase is Phase.FORWARD else stage.backward_s
        ready_s = rank.now_s + run_s
        if (action.stage, action.phase) not in self._started:
            self._started.add((action.stage, action.phase))
            ready_s = max(ready_s, rank.now_s + stage.gather_s)
        self._runs[number].append(StageRun(action=action, start_s=rank.now_s, end_s=ready_s))
        rank.busy_s += run_s
        rank.now_s = ready_s

    def _send(self, number: int, rank: _Rank, action: PipelineAction) -> None:
        other = _receiver(action) % self._order.num_ranks
        nbytes, link = self._message_bytes(action), self._link(number, other)
        rank.sent_bytes += nbytes
        begin_s = max(rank.now_s, self._free_s.get((number, other), 0.0))
        end_s = begin_s if link is None else begin_s + link.latency_s + nbytes / link.bytes_per_s
        self._free_s[number, other] = self._arrivals[action] = end_s
        if link is not None and not link.overlaps_compute:
            rank.now_s = end_s

    def _message_bytes(self, action: PipelineAction) -> int:
        """Return the bytes of the `send` of a stage: of the cut behind it, or in the backward before it."""
        return self._stages[action.stage if action.phase is Phase.FORWARD else action.stage - 1].sent_bytes

    def played(self) -> PipelinePlayed:
        found: list[RankPlayed] = []
        for number, rank in enumerate(self._ranks):
            update_s = sum(stage.update_s for stage in self._stages[number :: self._order.num_ranks])
            found.append(
                RankPlayed(
                    runs=tuple(self._runs[number]),
                    busy_s=rank.busy_s + update_s,
                    end_s=rank.now_s + update_s,
                    sent_bytes=rank.sent_bytes,
                    received_bytes=rank.received_bytes,
                )
            )
        return PipelinePlayed(step_s=max(rank.end_s for rank in found), ranks=tuple(found))


def _receiver(action: PipelineAction) -> int:
    """Return the stage that reads the result of `action`."""
    return action.stage + (1 if action.phase is Phase.FORWARD else -1)


def _sent_for(action: PipelineAction) -> PipelineAction:
    """Return the `send` whose message the `recv` `action` waits for."""
    maker = action.stage - (1 if action.phase is Phase.FORWARD else -1)
    return PipelineAction(Verb.SEND, maker, action.phase, action.micro_batch)
