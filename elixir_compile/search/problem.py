"""The question to the planner: a graph, a machine, two budgets, and the buckets and placements already in force; and
the file beside a plan that holds it.
"""

import gzip
import math
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from elixir_compile.base.codec import LEFT_OUT, Form, from_json, to_json
from elixir_compile.base.errors import InvalidPlan, QuestionFileError
from elixir_compile.base.options import Fractions, Options, Planner
from elixir_compile.base.units import MIB
from elixir_compile.ir import (
    ONCE,
    Activations,
    Bucket,
    BucketId,
    Calls,
    Param,
    Placement,
    Plan,
    Saving,
    StepGraph,
    StorageId,
    Tier,
    Update,
)
from elixir_compile.ir.bucket import with_runs
from elixir_compile.ir.cost import Measured
from elixir_compile.ir.graph import MOST_BYTES
from elixir_compile.ir.hardware import Cluster
from elixir_compile.ir.share import Share, have_equal_shards
from elixir_compile.step.as_run import as_run, first_equal, laps_at
from elixir_compile.step.divide import Lap

# ----------------------------------------------------------------------------------------------------------------------
# The question to the planner: a graph, a machine, two budgets, and the buckets and placements already in force.


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A question to `plan`.

    It has more than 15 fields, because a plan depends on all of them: the plan cache compares problems field by field.
    """

    name: str
    graph: StepGraph
    cluster: Cluster
    """All machines, with a rank per device."""
    budget_bytes: int
    """The device budget of the step, `base_bytes` included."""
    host_budget_bytes: int
    """Host bytes for this graph; `host_base_bytes` are subtracted already."""
    params: Mapping[StorageId, Param] = field(default_factory=dict)
    """The facts about parameters of the graph; one without an entry is frozen, and cut evenly over the ranks."""
    narrower_dtype: str | None = field(default=None, metadata=LEFT_OUT)
    """The dtype of the moments that the planner may choose, if no plan with exact ones fits, for each parameter outside
    of the buckets in force that can have them (see `Param.narrower_nbytes`); None if it may not."""
    accumulates: bool = False
    """Whether gradients of earlier backward passes stay through the step: every trainable parameter has a sum then."""
    num_copies: int = 1
    """How many ranks own each shard: the cluster consists of so many groups of ranks, each group with all shards."""
    rank: int = field(default=0, metadata=LEFT_OUT)
    """The rank that asks: its shards of sharded parameters count. 0 if all ranks follow one plan."""
    shares: tuple[Share, ...] = field(default=(), metadata=LEFT_OUT)
    """The rows and the shard of the state of each rank; empty if no shares were chosen, which makes both equal."""
    hybrid: bool = False
    """Whether the hybrid optimizer owns the parameters, so that state may live apart from its parameter."""
    moves_what_fits: bool = False
    """Whether buckets and activations may move if everything fits where it is, for a step that is more than 1 %
    shorter. True for a machine given by name; False on the machine at hand."""
    disk: bool = False
    """Whether a folder is given for more state of the hybrid optimizer, and for more frozen parameters (see
    `may_go_to_disk`); what is in force on disk stays there in any case."""
    params_to_disk: bool = field(default=False, metadata=LEFT_OUT)
    """Whether trained parameters may go to disk with their state, because no plan without has room on the host."""
    fractions: Fractions | None = field(default=None, metadata=LEFT_OUT)
    """The placement that the user fixed; None if the planner may choose. Buckets in force that moved from the device
    already stay where they are."""
    update: Update | None = None
    """When the hybrid optimizer has to update; None if the planner may choose."""
    base_bytes: int = 0
    """External usage: device bytes held outside this graph during the whole step."""
    host_base_bytes: int = 0
    """Host bytes held outside this graph. Messages add them, to name the whole host budget."""
    between_bytes: int = 0
    """Device bytes needed by other graphs, beyond `base_bytes`, between the forward and the backward of this graph."""
    after_bytes: int = 0
    """Device bytes needed by other graphs, beyond `base_bytes`, while this graph holds only parameters, state and
    gradients."""
    measured: Measured = field(default_factory=Measured)
    """Seconds of ops measured on this machine."""
    savings: frozenset[Saving] = frozenset(Saving)
    """How activations may be saved; keeping them is always allowed."""
    least_alike: int | None = None
    """The number of equal layers from which on regions begin with each of them, so that a compiler sees few distinct
    regions. If None, regions begin only where the plan acts."""
    bucket_min_bytes: int = 16 * MIB
    bucket_max_bytes: int = 128 * MIB
    buckets: tuple[Bucket, ...] = ()
    """Buckets in force, which do not change; parameters of the graph outside of them get new buckets."""
    placements: tuple[Placement, ...] = ()
    """Placements in force, one per bucket in force; the planner moves them only further from the device."""
    released: frozenset[BucketId] | None = field(default=None, metadata=LEFT_OUT)
    """The sharded buckets that all ranks gather for each window and release after it, where the plans of ranks differ:
    every other sharded bucket stays gathered. None if the planner may choose."""
    params_stay: bool = field(default=False, metadata=LEFT_OUT)
    """Whether parameters stay in the memory where they are, because a DistributedDataParallel reduces gradients."""
    micro_batches: int = 1
    """The number of micro-batches in which the laps of the step run; 1 for the whole batch at once."""
    calls: Calls = field(default=ONCE, metadata=LEFT_OUT)
    """How often a step calls the graph, and how many of its forwards are outstanding at once."""
    may_have_lean_calls: bool = field(default=True, metadata=LEFT_OUT)
    """Whether some calls of a step may save less than others. False where the plans of ranks differ."""
    common_rows: int | None = None
    """The greatest common divisor of the batches of all ranks, in rows: a number of micro-batches that the search
    chooses divides it. 1 if the ranks cannot be divided alike. None on one rank: the batch of the graph."""

    start: Plan | None = field(default=None, metadata=LEFT_OUT)
    """A plan of another graph or machine, by the names of this graph, at whose homes and activations the search starts
    (see `search.follow`); None if there is none."""
    follows_start: bool = field(default=False, metadata=LEFT_OUT)
    """Whether the plan has to be `start`, with as few changes as make it fit, and nothing is searched."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "graph", first_equal(self.graph))
        if not 0 < self.bucket_min_bytes <= self.bucket_max_bytes:
            raise InvalidPlan(
                f"problem {self.name}: bucket_min_bytes {self.bucket_min_bytes} and bucket_max_bytes "
                f"{self.bucket_max_bytes} must be positive and in this order."
            )
        for name in ("base_bytes", "host_base_bytes", "between_bytes", "after_bytes"):
            if getattr(self, name) < 0:
                raise InvalidPlan(f"problem {self.name}: {name} must not be negative, got {getattr(self, name)}.")
        is_divisor = bool(self.graph.batch_size) or self.graph.batch % max(1, self.micro_batches) == 0
        if self.micro_batches < 1 or not is_divisor:
            raise InvalidPlan(
                f"problem {self.name}: a batch of {self.graph.batch} cannot run in {self.micro_batches} micro-batches; "
                "expected a number that divides it."
            )
        if self.num_copies < 1 or self.cluster.num_ranks % self.num_copies:
            raise InvalidPlan(
                f"problem {self.name}: {self.cluster.num_ranks} ranks cannot have {self.num_copies} copies of each "
                "part; expected a number that divides theirs."
            )
        if not 0 <= self.rank < self.cluster.num_ranks:
            raise InvalidPlan(
                f"problem {self.name}: rank {self.rank} of {self.cluster.num_ranks} ranks; expected 0 to one less."
            )
        if self.state and (len(self.state) != self.num_shards or self.num_copies > 1):
            raise InvalidPlan(
                f"problem {self.name}: {len(self.state)} shares for {self.num_shards} ranks with {self.num_copies} "
                "copies of each part; expected one per rank, without copies."
            )
        for name, param in self.params.items():
            numels = param.shard_numels
            is_right = not numels or len(numels) == self.num_shards
            if not is_right or (numels and numels.most != numels[0] and not (self.state or param.is_uneven)):
                raise InvalidPlan(
                    f"problem {self.name}: {name} is in {len(numels)} shards for {self.num_shards} ranks, the "
                    f"largest of {numels.most} elements; expected one per rank, the first the largest."
                )
        if [placement.bucket for placement in self.placements] != [bucket.id for bucket in self.buckets]:
            raise InvalidPlan(f"problem {self.name}: needs one placement per bucket in force, in the same order.")

    @property
    def trains(self) -> bool:
        """Whether any parameter is trained."""
        return any(param.is_trained for param in self.params.values())

    def laps(self, activations: tuple[Activations, ...]) -> tuple[Lap, ...]:
        """Return the laps that run in micro-batches in a plan with `activations`."""
        return laps_at(self.graph, activations, self.micro_batches)

    def as_run(self, activations: tuple[Activations, ...] = ()) -> StepGraph:
        """Return the step as a plan with `activations` runs it, in `micro_batches`."""
        return as_run(self.graph, activations, self.laps(activations))

    @property
    def state(self) -> tuple[float, ...]:
        """The shard of every sharded parameter that each rank owns, summing to 1; empty if ranks own equal shards."""
        return () if have_equal_shards(self.shares) else tuple(share.state for share in self.shares)

    @property
    def is_uneven(self) -> bool:
        """Whether ranks own unequal parts of some parameter, so that those of `rank` count."""
        return bool(self.state) or any(param.is_uneven for param in self.params.values())

    @property
    def fullest_rank(self) -> int:
        """The rank that owns the most; `rank` if all own alike."""
        if self.state:
            return self.state.index(max(self.state))
        owned = [param.shard_numels for param in self.params.values() if param.is_uneven]
        totals = [sum(numels) for numels in zip(*owned, strict=True)]
        return totals.index(max(totals)) if totals else self.rank

    @property
    def num_shards(self) -> int:
        """The number of shards of a parameter."""
        return self.cluster.num_ranks // self.num_copies

    def may_go_to_disk(self, bucket: Bucket) -> bool:
        """Return whether the state of `bucket`, or its parameters if they are frozen, may go to disk if the host has no
        room.

        State needs a folder, and the hybrid optimizer. Frozen parameters need a folder, or lie in files of their own.
        """
        if bucket.trainable:
            return self.disk and self.hybrid
        are_in_files = all(name in self.params and self.params[name].in_file for name in bucket.params)
        return self.disk or are_in_files

    @property
    def may_send_trained(self) -> bool:
        """Whether trained parameters could follow their state to disk."""
        return self.disk and self.hybrid

    def may_take_params(self, bucket: Bucket) -> bool:
        """Return whether the parameters of `bucket` may go to disk with its state: trained ones only if their elements
        are updated alone."""
        if not bucket.trainable:
            return self.may_go_to_disk(bucket)
        return self.params_to_disk and self.may_send_trained and bucket.whole_update is None and bucket.state_nbytes > 0

    @property
    def params_on_disk(self) -> frozenset[BucketId]:
        """Buckets in force whose parameters are on disk."""
        return frozenset(placement.bucket for placement in self.placements if placement.param is Tier.DISK)

    @property
    def on_disk(self) -> frozenset[BucketId]:
        """Buckets in force whose state, or frozen parameters, are on disk."""
        return frozenset(placement.bucket for placement in self.placements if placement.optim is Tier.DISK)


def update_time(problem: Problem, placements: Iterable[Placement]) -> Update:
    """Return when buckets at `placements` are updated.

    It is `problem.update` if given, else across steps if the host updates any bucket, else after the backward. An
    optimizer other than the hybrid one always updates after the backward.
    """
    asked = asked_time(problem)
    if asked is not Update.ACROSS_STEPS or problem.update is not None:
        return asked
    is_any_on_host = any(placement.update is Tier.HOST for placement in placements)
    return Update.ACROSS_STEPS if is_any_on_host else Update.AFTER_BACKWARD


def asked_time(problem: Problem) -> Update:
    """Return when the host updates its buckets, if it has any."""
    if not problem.hybrid:
        return Update.AFTER_BACKWARD
    return Update.ACROSS_STEPS if problem.update is None else problem.update


def may_stream(problem: Problem, bucket: Bucket) -> bool:
    """Return whether the planner may stream the update of `bucket`.

    It may if device and host have separate memories, and if the host updates other buckets across steps meanwhile.
    """
    has_memory_apart = problem.cluster.h2d.overlaps_compute and problem.cluster.d2h.overlaps_compute
    is_across = asked_time(problem) is Update.ACROSS_STEPS
    return is_across and has_memory_apart and bucket.trainable and bucket.state_nbytes > 0


# ----------------------------------------------------------------------------------------------------------------------
# The question file beside a saved plan: what the plan answers, as gzipped JSON.
#
#   plan.json                 the decisions, and the fingerprint of the graph
#   plan.question.json.gz     the graph with its sizes, the machine, the budgets, measured seconds, the planner
#
# With both files a plan is explained, verified and drawn without its model, and the question can be asked again under
# another budget. The file is never a pickle, and reading it unpacks a limited number of bytes: a file of 100 KB can
# unpack to 100 MB.


QUESTION_FORMAT = 3
MOST_UNPACKED_BYTES = 1 << 25
"""The most bytes of JSON in a question file, 32 MiB. A Llama of 32 layers has about 3 MB, and JSON takes up to 25 times
its bytes when it is read."""
_GZIP = 16 + zlib.MAX_WBITS
"""The value of `wbits` for data with a header of gzip."""
_CHOICES = ("", "fit", "auto")


_OF_PARAMS = {
    "state_nbytes": "state_nbytes",
    "state_dtypes": "state_dtype",
    "sum_nbytes": "sum_nbytes",
    "shards": "shard_numels",
    "reduce_dtypes": "reduce_dtype",
    "groups": "group",
}
"""The mappings of format 1 from the names of parameters, each with the field of `Param` that has its values."""


def _with_params(data: dict[str, Any]) -> None:
    """Turn `data` of format 1, with a mapping for each fact about parameters, into that of format 2, which has `Param`.

    A mapping that is none stays where it is, so that the reader refuses it.
    """
    problem = data.get("problem")
    if not isinstance(problem, dict):
        return
    params: dict[str, dict[str, Any]] = {}
    for former, name in _OF_PARAMS.items():
        if isinstance(problem.get(former), dict):
            for param, value in problem.pop(former).items():
                params.setdefault(param, {})[name] = value
    narrower = problem.get("narrower")
    if isinstance(narrower, dict) and isinstance(narrower.get("nbytes"), dict):
        problem["narrower_dtype"] = problem.pop("narrower").get("dtype")
        for param, nbytes in narrower["nbytes"].items():
            params.setdefault(param, {})["narrower_nbytes"] = [[problem["narrower_dtype"], nbytes]]
    problem["params"] = {name: {"is_trained": "state_nbytes" in facts, **facts} for name, facts in params.items()}


_UPGRADES = {1: _with_params, 2: with_runs}
_FORM = Form(what="question", version=QUESTION_FORMAT, error=QuestionFileError, upgrades=_UPGRADES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A problem with the options of its search."""

    problem: Problem
    planner: str
    """The planner that was asked, as the option `planner` names it."""
    search_timeout_s: float
    micro_batches: str
    """How the search chooses the number of micro-batches: the option `micro_batches` if it is a word, else empty,
    because the problem has the number."""

    def __post_init__(self) -> None:
        problem = self.problem
        if self.planner not in get_args(Planner):
            raise InvalidPlan(f"planner {self.planner!r}: expected one of {', '.join(get_args(Planner))}.")
        if not (math.isfinite(self.search_timeout_s) and self.search_timeout_s > 0):
            raise InvalidPlan(f"a search of {self.search_timeout_s} s; expected a positive number of seconds.")
        if self.micro_batches not in _CHOICES:
            raise InvalidPlan(f"micro_batches {self.micro_batches!r}: expected 'fit', 'auto' or nothing.")
        params = problem.params.values()
        counts = {
            f"problem.params.{name}": min([getattr(param, name) for param in params], default=0)
            for name in ("state_nbytes", "sum_nbytes", "group")
        }
        for name, least in {**counts, "problem.least_alike": problem.least_alike or 0}.items():
            if least < 0:
                raise InvalidPlan(f"{name} holds {least}; expected numbers of 0 or more.")
        rows = (problem.measured.micro_batches, 1 if problem.common_rows is None else problem.common_rows)
        if min(rows) < 1:
            raise InvalidPlan(f"a question about {min(rows)} micro-batches or rows; expected 1 or more.")
        total_bytes = sum(param.state_nbytes + param.sum_nbytes for param in params)
        total_bytes += problem.base_bytes + problem.host_base_bytes + problem.between_bytes + problem.after_bytes
        if total_bytes > MOST_BYTES:
            raise InvalidPlan(f"a question counts {total_bytes} bytes; expected at most {MOST_BYTES}.")

    @property
    def options(self) -> Options:
        """The options that a search of the problem reads, without those that are in the problem already."""
        asked = self.micro_batches or self.problem.micro_batches
        options = Options(planner=self.planner, search_timeout=self.search_timeout_s)  # pyright: ignore[reportArgumentType]
        return replace(options, micro_batches=asked)


def question_of(problem: Problem, options: Options) -> Question:
    """Return `problem` as it is asked under `options`.

    A number of micro-batches that a search chose for `problem` is left open again.
    """
    chooses = options.micro_batches if isinstance(options.micro_batches, str) else ""
    return Question(
        problem=replace(problem, micro_batches=1) if chooses else problem,
        planner=options.planner,
        search_timeout_s=options.search_timeout,
        micro_batches=chooses,
    )


def question_to_bytes(question: Question) -> bytes:
    """Return the content of a question file; equal questions have equal bytes."""
    return gzip.compress(to_json(_FORM, question, indent=None).encode(), compresslevel=6, mtime=0)


def question_from_bytes(content: bytes) -> Question:
    """Return the question in the content of a file.

    Raises QuestionFileError if it is not gzipped JSON of at most `MOST_UNPACKED_BYTES`, and with the wrong field if the
    JSON is not a question.
    """
    unpacker = zlib.decompressobj(_GZIP)
    try:
        text = unpacker.decompress(content, MOST_UNPACKED_BYTES)
    except zlib.error as error:
        raise QuestionFileError("the whole file", "a gzip file", str(error)) from error
    if unpacker.unconsumed_tail:
        raise QuestionFileError("the whole file", f"at most {MOST_UNPACKED_BYTES} bytes of JSON", "more")
    if not unpacker.eof or unpacker.unused_data:
        got = f"{len(unpacker.unused_data)} bytes behind its end" if unpacker.eof else "a part of it"
        raise QuestionFileError("the whole file", "a whole gzip file and nothing else", got)
    try:
        json_text = text.decode()
    except UnicodeDecodeError as error:
        raise QuestionFileError("the whole file", "text in UTF-8", f"byte {error.start} that is no UTF-8") from error
    return from_json(_FORM, Question, json_text)
