"""Pipelines: the order in which the schedules of torch run stages, and the plan of the stages with predicted seconds
and bytes, as values without torch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from elixir_compile.base.codec import Form, to_json
from elixir_compile.base.errors import InvalidOption, PlanFileError, UnknownSchedule
from elixir_compile.ir.kinds import Phase, Verb

# ----------------------------------------------------------------------------------------------------------------------
# The order in which the schedules of `torch.distributed.pipelining` run stages, as a value that needs no torch.
#
#   looped-bfs, 4 stages on 2 ranks, 2 micro-batches; 2F1: the forward of stage 2 on micro-batch 1
#   rank 0   0F0 0F1 2F0 2F1                 2B1 2B0         0B1 0B0
#   rank 1       1F0 1F1 3F0 3F1 3B1 3B0         1B1 1B0
#
# Nothing here is executed: torch's own schedules run the stages, and plans only need to know in which order. A test
# compares every order with the order of torch's objects. Rank r has the stages r, r + ranks, r + 2 x ranks, ...


class TorchSchedule(StrEnum):
    """The schedules of torch whose backward passes are whole, as compiled stages need them."""

    GPIPE = "gpipe"
    """All forwards, then all backwards: `ScheduleGPipe`; a stage per rank."""
    ONE_F_ONE_B = "1f1b"
    """A backward as early as possible, then forward and backward in turn: `Schedule1F1B`; a stage per rank."""
    INTERLEAVED = "interleaved-1f1b"
    """1F1B with several stages per rank, the earlier micro-batch first (arXiv 2104.04473, section 2.2):
    `ScheduleInterleaved1F1B`."""
    LOOPED_BFS = "looped-bfs"
    """All micro-batches of a stage before the next stage of the rank (arXiv 2211.05953): `ScheduleLoopedBFS`."""

    @property
    def is_looped(self) -> bool:
        """Whether ranks may have several stages."""
        return self in (TorchSchedule.INTERLEAVED, TorchSchedule.LOOPED_BFS)


SPLIT_BACKWARD = ("interleaved-zero-bubble", "zbv-zero-bubble", "dual-pipe-v")
"""Schedules of torch that run the gradients of inputs and of weights apart, which compiled stages refuse."""


def parse_schedule(name: str) -> TorchSchedule:
    """Return the schedule called `name`: `looped-bfs`, or as torch writes it, `LoopedBFS` or `ScheduleLoopedBFS`.

    Raises UnknownSchedule with the nearest name.
    """
    plain = _plain(name)
    for schedule in TorchSchedule:
        if plain == _plain(schedule):
            return schedule
    splits = any(plain == _plain(other) for other in SPLIT_BACKWARD)
    raise UnknownSchedule(name, list(map(str, TorchSchedule)), splits_backward=splits)


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower().removeprefix("schedule") if letter.isalnum())


@dataclass(frozen=True, slots=True)
class PipelineAction:
    """One step of a rank.

    `run` computes the forward or backward of a stage on a micro-batch, behind the `recv` of its input if another rank
    sends it. `send` begins to send its result, and `wait` waits until that has arrived.
    """

    verb: Verb
    stage: int
    phase: Phase
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.verb} {self.stage}{self.phase[0].upper()}{self.micro_batch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOrder:
    """The actions of every rank of a pipeline in a step, in order."""

    schedule: TorchSchedule
    num_stages: int
    num_ranks: int
    num_micro_batches: int
    actions: tuple[tuple[PipelineAction, ...], ...]
    """By rank."""

    def runs(self, rank: int) -> Iterator[PipelineAction]:
        """Yield the forwards and backwards of `rank`, in order."""
        return (action for action in self.actions[rank] if action.verb is Verb.RUN)


def outstanding_forwards(order: PipelineOrder, stage: int) -> int:
    """Return the most forwards of `stage` whose backward has not ended, at any time of the step."""
    most = waiting = 0
    for action in order.runs(stage % order.num_ranks):
        if action.stage == stage:
            waiting += 1 if action.phase is Phase.FORWARD else -1
            most = max(most, waiting)
    return most


def pipeline_order(schedule: TorchSchedule, num_stages: int, num_ranks: int, num_micro_batches: int) -> PipelineOrder:
    """Return the actions of each rank in a step of `schedule`.

    Raises InvalidOption for numbers that torch's schedule does not take: stages that are no multiple of the ranks, or
    several on a rank where the schedule has one, and too few or indivisible micro-batches.
    """
    if num_ranks < 1 or num_stages < 1 or num_stages % num_ranks:
        above = num_ranks * -(-num_stages // num_ranks) if min(num_ranks, num_stages) > 0 else num_ranks
        expected = f"a multiple of the {num_ranks} ranks, such as {above}: each rank has as many stages"
        raise InvalidOption("stages", num_stages, expected)
    if num_stages != num_ranks and not schedule.is_looped:
        expected = f"{num_ranks}, a stage per rank under {schedule}; {TorchSchedule.INTERLEAVED} and "
        raise InvalidOption("stages", num_stages, expected + f"{TorchSchedule.LOOPED_BFS} take several")
    if num_micro_batches < 1:
        raise InvalidOption("micro_batches", num_micro_batches, "1 or more")
    if schedule is TorchSchedule.ONE_F_ONE_B and num_micro_batches < num_stages:
        raise InvalidOption("micro_batches", num_micro_batches, f"{num_stages} or more under 1f1b, one per stage")
    rounds = max(1, num_micro_batches // num_ranks)
    if schedule is TorchSchedule.INTERLEAVED and num_micro_batches % rounds:
        below, above = (
            num_micro_batches - num_micro_batches % num_ranks,
            num_ranks * (num_micro_batches // num_ranks + 1),
        )
        expected = f"a multiple of the {num_ranks} ranks under {schedule}, such as {below} or {above}"
        raise InvalidOption("micro_batches", num_micro_batches, expected)
    runs = {
        TorchSchedule.GPIPE: _gpipe,
        TorchSchedule.ONE_F_ONE_B: _one_f_one_b,
        TorchSchedule.INTERLEAVED: _interleaved,
        TorchSchedule.LOOPED_BFS: _looped_bfs,
    }[schedule]
    found: list[tuple[PipelineAction, ...]] = []
    for rank in range(num_ranks):
        own = [_Run(*run) for run in runs(rank, num_stages, num_ranks, num_micro_batches)]
        messages = _Messages(num_stages, num_ranks)
        waits = schedule is TorchSchedule.ONE_F_ONE_B
        found.append(tuple(messages.in_turn(own) if waits else messages.beside(own)))
    return PipelineOrder(
        schedule=schedule,
        num_stages=num_stages,
        num_ranks=num_ranks,
        num_micro_batches=num_micro_batches,
        actions=tuple(found),
    )


_Step = tuple[int, Phase, int]
"""A stage, the phase, and the micro-batch."""


def _gpipe(rank: int, num_stages: int, num_ranks: int, num_micro_batches: int) -> Iterator[_Step]:
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        yield from ((rank, phase, number) for number in range(num_micro_batches))


def _one_f_one_b(rank: int, num_stages: int, num_ranks: int, num_micro_batches: int) -> Iterator[_Step]:
    ahead = min(num_micro_batches, num_stages - rank)
    yield from ((rank, Phase.FORWARD, number) for number in range(ahead))
    for number in range(num_micro_batches):
        yield rank, Phase.BACKWARD, number
        if number + ahead < num_micro_batches:
            yield rank, Phase.FORWARD, number + ahead


def _looped_bfs(rank: int, num_stages: int, num_ranks: int, num_micro_batches: int) -> Iterator[_Step]:
    stages = range(rank, num_stages, num_ranks)
    yield from ((stage, Phase.FORWARD, number) for stage in stages for number in range(num_micro_batches))
    backward = ((stage, number) for stage in reversed(stages) for number in reversed(range(num_micro_batches)))
    yield from ((stage, Phase.BACKWARD, number) for stage, number in backward)


def _interleaved(rank: int, num_stages: int, num_ranks: int, num_micro_batches: int) -> Iterator[_Step]:
    """Yield a round of micro-batches through each stage of the rank in turn; the first backward follows the forwards
    that all ranks behind need for it."""
    loops = num_stages // num_ranks
    each = num_micro_batches // max(1, num_micro_batches // num_ranks)
    total = loops * num_micro_batches

    def step(at: int, phase: Phase) -> _Step:
        turn, within = divmod(at, each)
        loop = turn % loops
        place = loop if phase is Phase.FORWARD else loops - 1 - loop
        return place * num_ranks + rank, phase, turn // loops * each + within

    ahead = min((loops - 1) * each + 2 * (num_ranks - 1 - rank), total)
    yield from (step(at, Phase.FORWARD) for at in range(ahead))
    for at in range(total):
        if at + ahead < total:
            yield step(at + ahead, Phase.FORWARD)
        yield step(at, Phase.BACKWARD)


@dataclass(frozen=True, slots=True)
class _Run:
    stage: int
    phase: Phase
    micro_batch: int

    def __call__(self, verb: Verb) -> PipelineAction:
        return PipelineAction(verb, self.stage, self.phase, self.micro_batch)


@dataclass(frozen=True, slots=True)
class _Messages:
    """Adds the messages of a rank to its runs."""

    num_stages: int
    num_ranks: int

    def _is_elsewhere(self, run: _Run, towards: int) -> bool:
        """Return whether the stage behind `run` (`towards` 1), or before it (-1), exists and is on another rank."""
        other = run.stage + (towards if run.phase is Phase.FORWARD else -towards)
        return 0 <= other < self.num_stages and self.num_ranks > 1

    def beside(self, runs: list[_Run]) -> Iterator[PipelineAction]:
        """Yield `runs` that go on while their results are sent. torch waits for all sends at the end of the step, and
        all have arrived then, as other ranks needed them."""
        for run in runs:
            if self._is_elsewhere(run, -1):
                yield run(Verb.RECV)
            yield run(Verb.RUN)
            if self._is_elsewhere(run, 1):
                yield run(Verb.SEND)

    def in_turn(self, runs: list[_Run]) -> Iterator[PipelineAction]:
        """Yield `runs` as `Schedule1F1B` does: a send is over before the next begins; where forwards and backwards
        take turns, it is over before the next run."""
        sending: _Run | None = None
        for run in runs:
            if self._is_elsewhere(run, -1):
                yield run(Verb.RECV)
            if sending is not None and sending.phase is not run.phase:
                yield sending(Verb.WAIT)
                sending = None
            yield run(Verb.RUN)
            if sending is not None:
                yield sending(Verb.WAIT)
                sending = None
            if self._is_elsewhere(run, 1):
                yield run(Verb.SEND)
                sending = run


# ----------------------------------------------------------------------------------------------------------------------
# The stages of a pipeline, the ranks that run them, and the predicted seconds and bytes of a step, as a value.
#
#   stage   rank   layers
#   0       0      transformer.wte .. transformer.h.4
#   1       1      transformer.h.5 .. transformer.h.8        a stage begins at `transformer.h.5`
#   2       0      transformer.h.9 .. lm_head


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOutlook:
    """A stage of a pipeline with its predicted seconds and bytes."""

    stage: int
    rank: int
    layers: tuple[str, ...]
    """Where its layers begin: paths of modules."""
    modules: tuple[str, ...]
    """The paths of all its modules, in the order of the forward."""
    forward_s: float
    """Seconds of the forward of a micro-batch."""
    backward_s: float
    """Seconds of the backward of a micro-batch, what it computes again included."""
    update_s: float
    sent_bytes: int
    """What the forward of a micro-batch sends to the next stage; as many bytes of gradients come back."""
    outstanding: int
    """The most forwards whose backward has not ended."""
    saved_bytes: int
    """Activations of each of them."""
    peak_bytes: int
    """The most bytes of this stage alone on the device: the least budget for its plan."""
    treatment: str
    """What is done with activations: `kept`, `recomputed`, or `recomputed in 1/4 of the layers`."""
    homes: str
    """Where parameters and optimizer state stay."""
    copies: tuple[str, ...] = ()
    """Parameters that an earlier stage reads too, as tied embeddings. Each stage has a copy, and a training loop has to
    add up their gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOutlook:
    """A rank of a pipeline with its predicted seconds and bytes."""

    rank: int
    device: str
    busy_s: float
    """Seconds of a step in which it computes or updates."""
    bubble: float
    """Share of the step in which it does neither, 0 to 1."""
    peak_bytes: int
    budget_bytes: int
    host_bytes: int
    sent_bytes: int
    """Bytes of activations and gradients that it sends in a step."""
    received_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleOutlook:
    """A step under one schedule of torch, with the best stages for it."""

    schedule: TorchSchedule
    num_stages: int
    step_s: float = 0.0
    bubble: float = 0.0
    """Mean over ranks."""
    peak_bytes: int = 0
    """Of the rank with the most."""
    sent_bytes: int = 0
    """Of all ranks together."""
    because: str = ""
    """Why it cannot run; then the figures are 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePlan:
    """The stages of a model on the ranks of a pipeline, and every schedule of torch beside each other.

    Example:
        made = elixir.plan_stages(model, batch, stages=2, schedule="1f1b", micro_batches=2, hardware="2 x a100-40g")
        print(made.split_points, made.step_s, [rank.bubble for rank in made.ranks])
    """

    name: str
    """The model."""
    hardware: str
    schedule: TorchSchedule
    rows: int
    """Rows of the batch of a step."""
    micro_batches: int
    step_s: float
    stages: tuple[StageOutlook, ...]
    ranks: tuple[RankOutlook, ...]
    compared: tuple[ScheduleOutlook, ...] = ()

    @property
    def split_points(self) -> tuple[str, ...]:
        """The modules at which the stages after the first begin: the keys of torch's `split_spec`."""
        return tuple(stage.layers[0] for stage in self.stages[1:])


def layers_text(layers: Sequence[str]) -> str:
    """Return the first and the last of `layers`: `transformer.h.0 .. transformer.h.3`."""
    return layers[0] if len(layers) == 1 else f"{layers[0]} .. {layers[-1]}"


PIPELINE_FORMAT = 1

_PIPELINE = Form(what="pipeline", version=PIPELINE_FORMAT, error=PlanFileError)


def pipeline_to_json(plan: PipelinePlan) -> str:
    """Return `plan` as JSON; equal plans have equal text."""
    return to_json(_PIPELINE, plan)
