"""Plans: all decisions about a graph, as values, the JSON of graphs, plans and records, and a plan and a measured step
as the lines in the log of a run.
"""

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from elixir_compile.base.codec import LEFT_OUT, Form, from_json, to_json
from elixir_compile.base.errors import InvalidPlan, PlanFileError
from elixir_compile.base.units import format_bytes, format_s
from elixir_compile.ir import sizes
from elixir_compile.ir.bucket import Activations, Bucket, Placement, with_runs
from elixir_compile.ir.graph import MOST_BYTES, StepGraph
from elixir_compile.ir.hardware.cluster import MOST_RANKS
from elixir_compile.ir.hardware.table import PeakShare
from elixir_compile.ir.kinds import (
    Batched,
    BucketId,
    GroupId,
    Kind,
    Lane,
    OpId,
    Saving,
    StorageId,
    Tier,
    Update,
    Verb,
    commented,
    real,
    word,
    words,
)
from elixir_compile.ir.schedule import ONCE, BackwardOrder, Calls, Record, Region, Schedule
from elixir_compile.ir.share import Share

# ----------------------------------------------------------------------------------------------------------------------
# The calls of a step that save less: a second treatment of activations, beside that of the plan.
#
#   outstanding 4, num_full 2      F F f f B B b b        F keeps its activations, f computes them again
#
# A forward is full if fewer than `num_full` full forwards wait for their backward, and lean otherwise, in whatever
# order a schedule runs them: memory that is enough for some outstanding forwards to keep their activations is used by
# them. Storing the activations of some micro-batches, and computing those of the others again, is from Korthikanti et
# al., "Reducing Activation Recomputation in Large Transformer Models" (2022), appendix C.


@dataclass(frozen=True, slots=True, kw_only=True)
class LeanCalls:
    """How the lean calls of a step run. Their buckets, placements, gathers and reduces are those of the full calls."""

    num_full: int
    """The most full forwards that wait for their backward at once."""
    activations: tuple[Activations, ...]
    """Groups of activations with their treatment in lean calls."""
    regions: tuple[Region, ...]
    schedules: tuple[Schedule, ...]

    def __post_init__(self) -> None:
        if self.num_full < 1:
            raise InvalidPlan(f"{self.num_full} full forwards beside lean ones; expected 1 or more.")

    def __str__(self) -> str:
        lines = [f"lean calls beside {self.num_full} full"]
        lines += ["  activations", *(f"    {group}" for group in self.activations)] if self.activations else []
        lines += ["  regions", *(f"    {region}" for region in self.regions)]
        lines += [f"  {schedule}".replace("\n", "\n  ") for schedule in self.schedules]
        return "\n".join(lines)


def next_is_lean(num_waiting: int, most_full: int) -> bool:
    """Return whether the next forward is lean, while `num_waiting` full ones of at most `most_full` wait."""
    return num_waiting >= most_full


# ----------------------------------------------------------------------------------------------------------------------
# What the plans of ranks that differ say about each other: a line for each class of like ranks.


@dataclass(frozen=True, slots=True, kw_only=True)
class RankClass:
    """Ranks with like devices and memory, which follow plans with the same homes and activations."""

    ranks: tuple[int, ...]
    device: str
    """The name of the profile of their device."""
    budget_bytes: int
    device_peak_bytes: int
    host_peak_bytes: int
    busy_share: float
    """The share of the step in which their devices compute, 0 to 1, if all ranks are simulated together."""
    is_pressed: bool
    """Whether their plan keeps optimizer state off the device, or offloads or recomputes activations."""

    num_rows: int | None = field(default=None, metadata=LEFT_OUT)
    """Rows of the batch that each of them trains; None in a plan file of an earlier version."""
    micro_batches: int = field(default=1, metadata=LEFT_OUT)
    """Micro-batches in which they run their rows."""
    state: float | None = field(default=None, metadata=LEFT_OUT)
    """The shard of the training state that each of them owns, 0 to 1; None in a plan file of an earlier version."""

    def __post_init__(self) -> None:
        if not self.ranks or min(self.ranks) < 0:
            raise InvalidPlan(f"a class has the ranks {self.ranks}; expected at least one, each 0 or more.")
        if not (math.isfinite(self.busy_share) and 0 <= self.busy_share <= 1):
            raise InvalidPlan(
                f"ranks {spans_text(self.ranks)} are busy for {self.busy_share} of a step; expected 0 to 1."
            )
        if (self.num_rows or 0) < 0 or self.micro_batches < 1 or not 0 <= (self.state or 0) <= 1:
            raise InvalidPlan(
                f"ranks {spans_text(self.ranks)} have {self.num_rows} rows in {self.micro_batches} micro-batches, and "
                f"{self.state} of the state; expected 0 or more rows in 1 or more, and 0 to 1."
            )
        if min(self.budget_bytes, self.device_peak_bytes, self.host_peak_bytes) < 0:
            raise InvalidPlan(f"ranks {spans_text(self.ranks)} have negative bytes.")

    def __str__(self) -> str:
        line = f"{spans_text(self.ranks):<6}  {word(self.device)}  budget {self.budget_bytes}"
        line += f"  peak {self.device_peak_bytes}  host {self.host_peak_bytes}  busy {real(self.busy_share)}"
        line += "" if self.num_rows is None else f"  rows {self.num_rows}"
        line += f"  micro-batches {self.micro_batches}" if self.micro_batches > 1 else ""
        line += "" if self.state is None else f"  state {real(self.state)}"
        return f"{line}  pressed" if self.is_pressed else line


def spans_text(ranks: Sequence[int]) -> str:
    """Return `ranks` as numbers and spans of them: `0-2,5`."""
    found = sorted(set(ranks))
    cuts = [place for place, (a, b) in enumerate(pairwise(found), start=1) if b != a + 1]
    runs = [found[start:end] for start, end in zip([0, *cuts], [*cuts, len(found)], strict=True)]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


# ----------------------------------------------------------------------------------------------------------------------
# The plan: all decisions about a graph, as a value between the planning and the acting half.


PLAN_FORMAT = 8
_MOST_CHUNKS = 1024
"""The most chunks of a loss. Each chunk is traced and compiled; the planner asks for at most 64."""
MOST_CALLS_WITH_LEAN = 4096
"""The most calls of a step with lean calls, which are counted one after another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A choice of the planner, with its reason, its cost in seconds and the rejected options."""

    subject: str
    choice: str
    because: str
    cost_s: float = 0.0
    saves_bytes: int = 0
    rejected: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not math.isfinite(self.cost_s):
            raise InvalidPlan(f"the decision on {self.subject} costs {self.cost_s} s; expected a finite number.")

    def __str__(self) -> str:
        lines = [f"{words(self.subject, self.choice)}  cost {real(self.cost_s)}  saves {self.saves_bytes}"]
        lines += [f"  because  {word(self.because)}", *(f"  rejected {word(other)}" for other in self.rejected)]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The expected times and peaks of a step in steady state."""

    step_s: float
    exposed_s: float
    """Seconds of transfers during which compute is idle."""
    hidden_share: float
    """Share of the transfer seconds beside compute, 0 to 1; 1 if nothing is transferred."""
    device_peak_bytes: int
    device_peak_at: OpId
    host_peak_bytes: int

    def __post_init__(self) -> None:
        for name, value in (
            ("step_s", self.step_s),
            ("exposed_s", self.exposed_s),
            ("hidden_share", self.hidden_share),
        ):
            if not (math.isfinite(value) and value >= 0):
                raise InvalidPlan(f"the prediction says {name} = {value}; expected a finite number of 0 or more.")
        if min(self.device_peak_bytes, self.host_peak_bytes) < 0:
            raise InvalidPlan("the prediction holds a negative peak.")


@dataclass(frozen=True, slots=True, kw_only=True)
class RingTraffic:
    """The collectives in the graph that a rank runs in all calls of a step, inside of their regions: those along the
    tensor axis, or the model's own along the data axes."""

    num_ranks: int
    """Ranks of a collective; the most of any."""
    num_collectives: int
    """Counted once for each micro-batch."""
    nbytes: int
    """Bytes of their whole tensors."""
    run_s: float
    """The seconds of their messages, which are a part of the seconds of compute."""

    def __str__(self) -> str:
        line = f"{self.num_ranks}  collectives {self.num_collectives}  bytes {self.nbytes}"
        return f"{line}  seconds {real(self.run_s)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The homes of all buckets and the schedule of each rank, for a graph, a machine and a budget.

    It has more than 15 fields, because a plan file must say by itself what was asked, decided and predicted. Asked: the
    graph, the machine, the ranks, `budget_bytes`, `base_bytes`, `calls` and `planner`. Decided: `placements` of
    `buckets`, `activations`, `lean` calls, `loss_chunks`, the time of `update`, and the order, which is `regions` and
    `schedules` of the actions between them; `decisions` are the reasons. Predicted: `prediction`, `tensor`,
    `own_collectives`, `formula`, the bounds `bound_s` and `gib_bound_s`, and what is `binding`.

    `search.reasons` makes it, `session.plan_files` writes it to a file for users, and `session.cache` for later runs.
    """

    name: str
    graph: str
    """Fingerprint of the `StepGraph`."""
    cluster: str
    """The name of the machine: `1 x cpu`."""
    num_copies: int = 1
    """Number of ranks that hold the same shard of a bucket: more than 1 for hybrid sharding."""
    rank: int = field(default=0, metadata=LEFT_OUT)
    """The rank whose homes, schedule and seconds these are; 0 in a plan that all ranks follow."""
    shares: tuple[Share, ...] = field(default=(), metadata=LEFT_OUT)
    """The rows and the shard of the state of each rank; empty if all ranks have equal shards."""
    classes: tuple[RankClass, ...] = field(default=(), metadata=LEFT_OUT)
    """The classes of ranks, each with a plan of its own; empty if all ranks follow this plan."""
    budget_bytes: int
    base_bytes: int = 0
    """External usage of the device in bytes at every op: counted in the peak, never moved."""
    buckets: tuple[Bucket, ...]
    placements: tuple[Placement, ...]
    """The placement of each bucket, in the order of `buckets`."""
    activations: tuple[Activations, ...] = ()
    """Groups of activations with their treatment; activations in no group are kept."""
    calls: Calls = field(default=ONCE, metadata=LEFT_OUT)
    """How often a step calls the graph, and how many of its forwards are outstanding at once."""
    lean: LeanCalls | None = field(default=None, metadata=LEFT_OUT)
    """The calls of the step that save less; None if all calls treat activations alike."""
    loss_chunks: int = 1
    """Number of chunks over tokens in which the graph computes its loss; 1 if the loss is not chunked."""
    update: Update = Update.AFTER_BACKWARD
    """The time at which buckets are updated."""
    regions: tuple[Region, ...]
    schedules: tuple[Schedule, ...]
    """The schedule of each rank, or a single one for all ranks."""
    decisions: tuple[Decision, ...]
    prediction: Prediction
    tensor: RingTraffic | None = field(default=None, metadata=LEFT_OUT)
    """What the step sends along the tensor axis; None if the model has no such axis."""
    own_collectives: RingTraffic | None = field(default=None, metadata=LEFT_OUT)
    """What collectives in the model itself send between ranks along the data axes; None if it has none."""
    planner: str = "greedy"
    """The planner that made the plan, as the option `planner` names it."""
    peak_share: PeakShare | None = field(default=None, metadata=LEFT_OUT)
    """The share of the data sheet's rate with which the seconds of most products were computed; None if rates were
    measured."""
    bound_s: float | None = None
    """Proved lower bound on the step seconds of every plan for the problem; None if the planner proves none."""
    binding: tuple[str, ...] = ()
    """The memories and lanes that limit the bound: they are full at its optimum."""
    gib_bound_s: float | None = None
    """Proved lower bound on the step seconds of every plan with one more GiB of device memory, and the loss in as many
    chunks as here; None if none is proved."""
    formula: str = ""
    """Device peak in bytes as a sympy expression of the graph's symbols; empty if no size is symbolic."""
    symbols: tuple[tuple[str, int], ...] = ()
    """Each symbol of the graph with the value for which the plan was made."""
    kernels: str = field(default="", metadata=LEFT_OUT)
    """The `kernels_digest` of the graph: the measured bytes of its kernels that the peaks of the plan include."""
    format: int = PLAN_FORMAT

    def __post_init__(self) -> None:
        if self.format != PLAN_FORMAT:
            raise InvalidPlan(f"plan {self.name} has format {self.format}; this version makes format {PLAN_FORMAT}.")
        if [placement.bucket for placement in self.placements] != [bucket.id for bucket in self.buckets]:
            raise InvalidPlan(f"plan {self.name} needs one placement per bucket, in the order of its buckets.")
        if min(self.budget_bytes, self.base_bytes) < 0:
            raise InvalidPlan(
                f"plan {self.name} has a budget of {self.budget_bytes} and a base of {self.base_bytes} bytes."
            )
        if self.loss_chunks > _MOST_CHUNKS or self.num_copies > MOST_RANKS:
            raise InvalidPlan(
                f"plan {self.name} has a loss of {self.loss_chunks} chunks and {self.num_copies} copies of its parts; "
                f"expected at most {_MOST_CHUNKS} chunks and {MOST_RANKS} copies."
            )
        most, calls = MOST_CALLS_WITH_LEAN, self.calls
        if self.lean is not None and not (self.lean.num_full < calls.outstanding and calls.num <= most):
            raise InvalidPlan(
                f"plan {self.name} has lean calls beside {self.lean.num_full} full ones in a step of {calls}; "
                f"expected fewer full ones than are outstanding, and at most {most} calls."
            )
        if self.lean is not None and len(self.lean.schedules) != len(self.schedules):
            have = f"{len(self.schedules)} schedules and {len(self.lean.schedules)} for lean calls"
            raise InvalidPlan(f"plan {self.name} has {have}; expected one for each rank.")
        total_bytes = self.base_bytes  # at most parameters, gradients, state and flat buffers of all ranks
        for bucket in self.buckets:
            total_bytes += bucket.flat_nbytes + 2 * bucket.flat_grad_nbytes + bucket.state_nbytes + bucket.sum_nbytes
        lean_groups = () if self.lean is None else self.lean.activations
        total_bytes += sum(group.nbytes for group in (*self.activations, *lean_groups))
        if total_bytes > MOST_BYTES:
            raise InvalidPlan(f"plan {self.name} counts {total_bytes} bytes; expected at most {MOST_BYTES}.")
        if len(dict(self.symbols)) != len(self.symbols) or any(value < 0 for _, value in self.symbols):
            raise InvalidPlan(f"plan {self.name} has the symbols {self.symbols}; expected each once, 0 or more.")
        if self.rank < 0:
            raise InvalidPlan(f"plan {self.name} is of rank {self.rank}; expected 0 or more.")
        if min(self.loss_chunks, self.num_copies) < 1:
            raise InvalidPlan(
                f"plan {self.name} has a loss of {self.loss_chunks} chunks and {self.num_copies} copies of its parts; "
                "expected 1 or more."
            )
        if self.bound_s is not None and not math.isfinite(self.bound_s):
            raise InvalidPlan(f"plan {self.name} has a bound of {self.bound_s} s; expected a finite number.")
        unknown = set(sizes.symbols_of(self.formula) if self.formula else ()).difference(dict(self.symbols))
        if unknown:
            raise InvalidPlan(f"plan {self.name} has a formula with the symbol {min(unknown)}, but no value of it.")

    @property
    def num_ranks(self) -> int:
        """Number of ranks over which each bucket is sharded: all ranks, or the ranks of a copy."""
        return len(self.buckets[0].shard_numels) if self.buckets else len(self.schedules)

    @property
    def counts_staying_gradients(self) -> bool:
        """Whether the plan counts gradients that stay from earlier backward passes, for every trainable bucket."""
        return all(bucket.sum_nbytes or not (bucket.trainable and bucket.nbytes) for bucket in self.buckets)

    def staying_gradient_bytes(self, home: Tier) -> int:
        """Return the bytes, on each rank, of the sums of gradients that stay in `home` through the step."""
        placed = zip(self.buckets, self.placements, strict=True)
        return sum(bucket.own_sum_nbytes for bucket, placement in placed if placement.param is home)

    @property
    def gap(self) -> float | None:
        """Largest share of the step seconds that any other plan could save; None if no bound is proved."""
        if self.bound_s is None or self.prediction.step_s == 0:
            return None
        return max(0.0, 1.0 - self.bound_s / self.prediction.step_s)

    @property
    def on_share(self) -> str:
        """The share of the data sheet on which seconds and bounds are, after a comma; empty if rates were measured."""
        return "" if self.peak_share is None else f", on {self.peak_share}"

    @property
    def gib_saves_s(self) -> float | None:
        """Seconds that one more GiB of device memory takes off the step at most; None if that is not proved."""
        return None if self.gib_bound_s is None else max(0.0, self.prediction.step_s - self.gib_bound_s)

    def __str__(self) -> str:
        lines = self._head()
        lines += ["symbols", *(f"  {word(name)} {value}" for name, value in self.symbols)] if self.symbols else []
        lines += ["shares", *(f"  {share_text(share)}" for share in self.shares)] if self.shares else []
        lines += ["ranks", *(f"  {line}" for line in self.classes)] if self.classes else []
        placed = zip(self.buckets, self.placements, strict=True)
        lines += ["buckets", *(f"  {bucket_text(bucket, placement)}" for bucket, placement in placed)]
        lines += ["activations", *(f"  {group}" for group in self.activations)] if self.activations else []
        lines += ["regions", *(f"  {region}" for region in self.regions)]
        lines += map(str, self.schedules)
        lines += [] if self.lean is None else [str(self.lean)]
        lines += ["decisions", *(f"  {decision}".replace("\n", "\n  ") for decision in self.decisions)]
        return "\n".join(lines)

    def _head(self) -> list[str]:
        """Return the lines of the name, the prediction and the planner: exact numbers, with rounded figures as
        comments."""
        made, budget = self.prediction, format_bytes(self.budget_bytes)
        seconds = (
            f"{format_s(made.step_s)}, {format_s(made.exposed_s)} exposed, {made.hidden_share:.1%} of transfers hidden"
        )
        base = f"  base {self.base_bytes}" if self.base_bytes else ""
        peak = f"{format_bytes(made.device_peak_bytes)} of {budget}, host {format_bytes(made.host_peak_bytes)}"
        bound = "" if self.bound_s is None else f"  bound {real(self.bound_s)}"
        gib = "" if self.gib_bound_s is None else f"  gib bound {real(self.gib_bound_s)}"
        parts = [] if self.gap is None else [f"gap {self.gap:.2%}"]
        parts += [] if self.gib_saves_s is None else [f"1 GiB more takes at most {format_s(self.gib_saves_s)} off"]
        lines = [
            f"plan {word(self.name)} on {word(self.cluster)}",
            commented(f"  format {self.format}  graph {word(self.graph)}  budget {self.budget_bytes}{base}", budget),
            commented(
                f"  step {real(made.step_s)}  exposed {real(made.exposed_s)}  hidden {real(made.hidden_share)}", seconds
            ),
            commented(
                f"  peak {made.device_peak_bytes} at {word(made.device_peak_at)}  host {made.host_peak_bytes}", peak
            ),
            commented(f"  planner {word(self.planner)}{bound}{gib}", ", ".join(parts)),
        ]
        lines += [f"  binding {word(row)}" for row in self.binding]
        lines += [f"  formula {word(self.formula)}"] if self.formula else []
        lines += [f"  loss {self.loss_chunks}"] if self.loss_chunks > 1 else []
        lines += [f"  {calls_text(self.calls)}"] if self.calls.num > 1 else []
        lines += [f"  copies {self.num_copies}"] if self.num_copies > 1 else []
        for name, sent in (("tensor", self.tensor), ("own", self.own_collectives)):
            lines += [] if sent is None else [commented(f"  {name} {sent}", format_s(sent.run_s))]
        lines += [f"  rank {self.rank}"] if self.rank or self.classes else []
        return [*lines, *([f"  update {self.update}"] if self.update is not Update.AFTER_BACKWARD else [])]

    @property
    def most_full(self) -> int:
        """The most full forwards that wait for their backward at once: all that are outstanding if no call is lean."""
        return self.calls.outstanding if self.lean is None else self.lean.num_full

    def of_lean_calls(self) -> "Plan":
        """Return this plan with the activations, regions and schedules of its lean calls in place of its own."""
        lean = self.lean
        assert lean is not None, "only a plan with lean calls has a treatment of theirs"
        return replace(self, activations=lean.activations, regions=lean.regions, schedules=lean.schedules, lean=None)

    def placement(self, bucket: BucketId) -> Placement:
        """Return the placement of `bucket`. Raises KeyError if the plan has no such bucket."""
        for placement in self.placements:
            if placement.bucket == bucket:
                return placement
        raise KeyError(bucket)

    def largest_batch(self, symbol: str | None = None, budget_bytes: int | None = None) -> int:
        """Return the largest value of `symbol` for which the peak of this plan is at most `budget_bytes`.

        `symbol` may be left out if the peak depends on a single symbol, `budget_bytes` for the budget of the plan. The
        other symbols keep their planned values. Returns 0 if 1 is too large already. Raises InvalidPlan if the peak
        does not depend on `symbol`, or on any symbol.
        """
        growing = list(sizes.symbols_of(self.formula)) if self.formula else []
        if not growing:
            raise InvalidPlan(
                f"no size in plan {self.name} depends on a symbol, so there is nothing to solve for. Capture the model "
                f"with torch.compile(..., dynamic=True), or mark the batch with torch._dynamo.mark_dynamic(x, 0)."
            )
        if symbol is None and len(growing) > 1:
            planned = ", ".join(f"{name} (planned for {value})" for name, value in self.symbols if name in growing)
            raise InvalidPlan(
                f"the peak of plan {self.name} depends on {planned}. Name one: largest_batch({growing[0]!r})."
            )
        symbol = growing[0] if symbol is None else symbol
        limit_bytes = self.budget_bytes if budget_bytes is None else budget_bytes
        found = sizes.largest(self.formula, symbol, dict(self.symbols), limit_bytes) if symbol in growing else None
        if found is None:
            raise InvalidPlan(
                f"the peak of plan {self.name} does not grow with {symbol}; it depends on {', '.join(growing)}."
            )
        return found


def calls_text(calls: Calls) -> str:
    """Return the printed line of the calls of a step."""
    numbers = f"calls {calls.num}  outstanding {calls.outstanding}  outputs {calls.more_outputs}"
    sums = ("  loss" if calls.has_loss else "") + ("  scaled" if calls.is_scaled else "")
    sums += "  sums float32" if calls.sums_in_fp32 else ""
    sums += ("  sums stay" if calls.sums_stay else "") + (f"  shared {words(*calls.shared)}" if calls.shared else "")
    sums += "" if calls.backward_order is BackwardOrder.ANY else f"  backward {calls.backward_order}"
    return f"{numbers}  output grads {calls.output_grads}  input grads {calls.input_grads}{sums}"


def share_text(share: Share) -> str:
    """Return the printed line of a share."""
    return f"{share.rank:<6}  rows {share.num_rows}  micro-batches {share.micro_batches}  state {real(share.state)}"


def bucket_text(bucket: Bucket, placement: Placement) -> str:
    """Return the printed line of a bucket and its placement."""
    parts = [
        f"{word(bucket.id):<6}  {word(bucket.dtype)}",
        f"numel {bucket.numel}  bytes {bucket.nbytes}  state {bucket.state_nbytes}",
        "trainable" if bucket.trainable else "frozen",
        *([f"group {bucket.group}"] if bucket.group else []),
        *([f"sums {bucket.sum_nbytes}"] if bucket.sum_nbytes else []),
        *([] if bucket.reduce_dtype is None else [f"reduce {word(bucket.reduce_dtype)}"]),
        *([] if bucket.state_dtype is None else [f"moments {word(bucket.state_dtype)}"]),
        f"param {placement.param}  optim {placement.optim}",
    ]
    parts += ["whole"] if bucket.whole_update is not None else []
    parts += ["streamed"] if placement.streamed else []
    parts += ["resident"] if placement.resident else []
    parts += [f"shards {bucket.shards_text}", f"params {words(*bucket.params)}"]
    return commented("  ".join(parts).rstrip(), format_bytes(bucket.nbytes))


# ----------------------------------------------------------------------------------------------------------------------
# Turn graphs, plans and records into JSON and back, and compute the fingerprint of a graph.


GRAPH_FORMAT = 3
RECORD_FORMAT = 2

_PLAN = Form(what="plan", version=PLAN_FORMAT, error=PlanFileError, upgrades={7: with_runs})
_GRAPH = Form(what="graph", version=GRAPH_FORMAT, error=PlanFileError)


_REGION, _GRADIENT = re.compile(r"\S+"), re.compile(r"offload b\d+")
_FORMER_VERBS = {"all-gather": "gather", "all-reduce": "reduce"}


def _relabel(record: dict[str, Any]) -> None:
    """Give the spans of a record of format 1 the labels of format 2.

    Simulated regions had no verb, collectives had words of their own, and the gradient of a bucket that left the device
    was called after the bucket alone.
    """
    spans = record.get("spans")
    for span in spans if isinstance(spans, list) else ():
        before = span.get("label") if isinstance(span, dict) else None
        if isinstance(before, str):
            verb, space, what = before.partition(" ")
            after = f"{_FORMER_VERBS.get(verb, verb)}{space}{what}"
            if span.get("lane") == Lane.COMPUTE and _REGION.fullmatch(after):
                after = f"{Verb.RUN} {after}"
            elif span.get("lane") == Lane.D2H and _GRADIENT.fullmatch(after):
                after = f"{after}.grad"
            span["label"] = after


_RECORD = Form(what="record", version=RECORD_FORMAT, error=PlanFileError, upgrades={1: _relabel})


def plan_to_json(plan: Plan) -> str:
    """Return `plan` as JSON."""
    return to_json(_PLAN, plan)


def plan_from_json(text: str) -> Plan:
    """Return the plan in `text`. Raises PlanFileError with the wrong field if the text is not a plan."""
    return from_json(_PLAN, Plan, text)


def graph_to_json(graph: StepGraph) -> str:
    """Return `graph` as JSON."""
    return to_json(_GRAPH, graph)


def graph_from_json(text: str) -> StepGraph:
    """Return the graph in `text`. Raises PlanFileError with the wrong field if the text is not a graph."""
    return from_json(_GRAPH, StepGraph, text)


def record_to_json(record: Record) -> str:
    """Return `record` as JSON."""
    return to_json(_RECORD, record)


def record_from_json(text: str) -> Record:
    """Return the record in `text`, of this format or an earlier one.

    Raises PlanFileError with the wrong field if the text is not a record, or is one of a later format.
    """
    return from_json(_RECORD, Record, text)


_NUM_DIGITS = 12


def fingerprint(graph: StepGraph) -> str:
    """Return 12 hex digits of the SHA-256 of `graph`, without the names of its ops, activations and symbols.

    Of the reason why an op mixes the batch, only its existence counts. Bytes count as tracing stated them, so the same
    step has the same fingerprint on machines whose kernels allocate other bytes.
    """
    workspaces = {storage.id for storage in graph.storages if storage.kind is Kind.WORKSPACE}
    numbers: dict[StorageId, int] = {}
    for op in graph.ops:
        for name in (*op.reads, *op.writes):
            if name not in workspaces:
                numbers.setdefault(name, len(numbers))
    ops = [
        [
            op.target,
            op.phase,
            [numbers[name] for name in op.reads],
            [numbers[name] for name in op.writes if name not in workspaces],
            op.module,
            op.kernel,
            op.once,
            *(["mixes"] if op.mixes else []),
            *([] if op.ring is None else ["ring", op.ring.num_ranks, op.ring.passes]),
            *(["launches", op.launches] if op.launches > 1 else []),
        ]
        for op in graph.ops
    ]
    symbols = {name: f"v{number}" for number, (name, _) in enumerate(graph.symbols)}
    texts = {storage.traced or storage.size for storage in graph.storages} - {""}
    expressions = {text: int(text) if text.isdecimal() else sizes.canonical(text, symbols) for text in texts}
    touched: list[tuple[int, list[object]]] = []
    untouched: list[list[object]] = []
    for storage in graph.storages:
        if storage.id in workspaces:
            continue
        name = storage.id if storage.kind is Kind.PARAM else ""
        of = "" if storage.of is None else storage.of
        size = expressions.get(storage.traced or storage.size, storage.nbytes)
        line: list[object] = [storage.kind, size, storage.dtype, name, of]
        line += [] if storage.batched is Batched.SAME else [storage.batched]
        line += ["consecutive"] if storage.consecutive else []
        if storage.id in numbers:
            touched.append((numbers[storage.id], line))
        else:
            untouched.append(line)
    outputs = [numbers.get(name, -1) for name in graph.outputs]
    canonical = [
        ops,
        [line for _, line in sorted(touched, key=lambda item: item[0])],
        sorted(untouched, key=str),
        outputs,
        *([symbols.get(graph.batch_size, graph.batch)] if graph.batch_size or graph.batch > 1 else []),
    ]
    return _digest(canonical)


def kernels_digest(graph: StepGraph) -> str:
    """Return 12 hex digits of the SHA-256 of the bytes that the kernels of `graph` allocate beyond its fingerprint:
    workspaces, and results of other bytes than tracing stated. Empty if there are none."""
    seen = [(own.id, own.nbytes) for own in graph.storages if own.traced or own.kind is Kind.WORKSPACE]
    return _digest(seen) if seen else ""


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:_NUM_DIGITS]


# ----------------------------------------------------------------------------------------------------------------------
# Write a plan and a measured step as a line each: the two lines in the log of a run.


SAID: Mapping[Saving, str] = {
    Saving.KEEP: "kept",
    Saving.RECOMPUTE: "recomputed",
    Saving.OFFLOAD: "offloaded",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SavingAnswer:
    """The sum of all activations with the same treatment."""

    saving: Saving
    nbytes: int
    num_layers: int
    """Number of layers with such activations."""


def plan_line(plan: Plan) -> str:
    """Return the line of a plan: peak, budget, host bytes, step seconds, hidden share of transfers, and bytes of
    activations by treatment unless all are kept; and for each dtype of moments that is narrower than fp32, its share of
    the trained parameters."""
    expected = plan.prediction
    moves = (action.verb in ("gather", "offload", "prefetch") for own in plan.schedules for action in own.actions)
    hidden = f"{expected.hidden_share:.0%} of transfers hidden, {format_s(expected.exposed_s)} exposed"
    parts = [
        f"planned   peak {format_bytes(expected.device_peak_bytes)} of {format_bytes(plan.budget_bytes)}",
        f"host {format_bytes(expected.host_peak_bytes)}",
        f"step {format_s(expected.step_s)}",
        hidden if any(moves) else "nothing to move",
        *([str(plan.calls)] if plan.calls.num > 1 else []),
    ]
    parts += [f"activations {savings_text(plan)}"] if plan.activations else []
    parts += [f"lean {lean_text(plan)}"] if plan.lean is not None else []
    trained = [bucket for bucket in plan.buckets if bucket.trainable]
    total = sum(bucket.numel for bucket in trained)
    narrower: Counter[str] = Counter()
    for bucket in trained:
        if bucket.state_dtype is not None:
            narrower[bucket.state_dtype] += bucket.numel
    parts += [f"moments of {numel / total:.0%} in {dtype}" for dtype, numel in narrower.items()]
    return "   ".join(parts)


def measured_line(record: Record, plan: Plan | None = None) -> str:
    """Return the line of a measured step: peak, host bytes, seconds, executed actions; with the budget of `plan` if
    given."""
    peak = f"measured  peak {format_bytes(record.device_peak_bytes)}"
    if plan is not None:
        peak += f" of {format_bytes(plan.budget_bytes)}"
    parts = [peak, f"host {format_bytes(record.host_peak_bytes)}", f"step {format_s(record.step_s)}"]
    moved = [
        f"{verb} {record.counts[verb]}"
        for verb in ("gather", "release", "reduce", "offload", "prefetch")
        if record.counts.get(verb)
    ]
    return "   ".join((*parts, ", ".join(moved) or "nothing moved"))


def layer_of_group(group: GroupId) -> str:
    """Return the layer of a group: `transformer.h.3` for `transformer.h.3.matmul`. Without a dot it is the whole
    name."""
    return group.rpartition(".")[0] or group


def saving_answers(plan: Plan) -> tuple[SavingAnswer, ...]:
    """Return bytes and layers of activations by treatment; empty for a plan that keeps all."""
    found: list[SavingAnswer] = []
    for saving in Saving if plan.activations else ():
        own = [group for group in plan.activations if group.saving is saving]
        nbytes = sum(group.nbytes for group in own)
        num_layers = len({layer_of_group(group.id) for group in own})
        found.append(SavingAnswer(saving=saving, nbytes=nbytes, num_layers=num_layers))
    return tuple(found)


def savings_text(plan: Plan) -> str:
    """Return the bytes by treatment, as `210 MiB kept, 400 MiB recomputed`; empty for a plan that keeps all."""
    return ", ".join(
        f"{format_bytes(found.nbytes)} {SAID[found.saving]}" for found in saving_answers(plan) if found.nbytes
    )


def lean_text(plan: Plan) -> str:
    """Return how many outstanding forwards are lean, and their bytes by treatment; empty if none is."""
    if plan.lean is None:
        return ""
    number = f"{plan.calls.outstanding - plan.lean.num_full} of {plan.calls.outstanding} outstanding forwards"
    return f"{number}: {savings_text(plan.of_lean_calls()) or 'all kept'}"
