"""Exchange facts about the problem of each rank before a leader plans, keep the shares of ranks equal on all of them,
and plan for each class of ranks that differ.
"""

import hashlib
import math
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from elixir_compile.base.codec import Form, from_json, to_json
from elixir_compile.base.errors import ElixirWarning, InvalidOption, PlanFileError, UnsupportedModel
from elixir_compile.ir import Kind, Plan, StepGraph
from elixir_compile.ir.share import STATE_TOLERANCE, Share, batch_of, check_shares, equal_shares, shares_to_json
from elixir_compile.runtime.distributed.errors import RanksDiffer
from elixir_compile.runtime.distributed.ranks import Ranks, require_alike
from elixir_compile.runtime.executor import Executor
from elixir_compile.search import Problem
from elixir_compile.search.schedule import skeleton_of

# ----------------------------------------------------------------------------------------------------------------------
# Facts about the problem of each rank, exchanged before the leader plans: a digest of shared lines, and sizes.
#
#   problem of every rank -> shared lines, their digest; sizes -> leader, problem for all ranks
#
# Sizes may differ because batches may. The rank with the most bytes of storages plans, with the smallest budgets and
# the largest external usage of all ranks. If memory or devices differ by more than a tenth, each class of like ranks
# has a plan of its own: see below.
#
# A number of micro-batches must divide the batch of every rank. The search chooses one only if all ranks can divide the
# same ops.
#
# Ops may differ too: torch traces a batch of 1 without some of the copies it makes for larger batches (110 of 800
# lines of GPT-2 differ). Ranks whose buckets move in the same order never wait for each other in vain, so each rank may
# follow a plan that is legal for its own graph. If the plan is not legal for a rank, the lines of ops show the reason.


_NUM_DIGITS = 32
"""Digits of a digest: with brackets around it, it fits into one short text of the control channel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """Facts about the problem of a rank; a field with the name of a field of `Problem` has its value.

    It has more than 15 fields, one for each number or digest that ranks compare.
    """

    digest: str
    """Digest of the shared lines."""
    ops_digest: str
    """Digest of the lines of ops."""
    division_digest: str
    """Digest of the facts that decide which ops can run in micro-batches."""
    batch: int
    """Rows of the batch; 1 if it cannot be divided because sizes are dynamic."""
    storage_bytes: int
    """Bytes of all storages of the graph."""
    state_bytes: int
    """Bytes of optimizer state and of sums of gradients, over all ranks."""
    device: str
    """The name of the profile of this rank's device."""
    flops_per_s: float
    """The highest rate of the device."""
    homes_digest: str
    """Digest of the placements in force."""
    share: str
    """The rows and the shard of the state of this rank, and what it owns whole; empty if all ranks own alike."""
    budget_bytes: int
    host_budget_bytes: int
    base_bytes: int
    host_base_bytes: int
    between_bytes: int
    after_bytes: int


_FACTS = Form(what="facts", version=1, error=PlanFileError)


def facts_of(problem: Problem, lines: Sequence[str], ops: Sequence[str], place: int = 0) -> RankFacts:
    """Return the facts about `problem`, that of the rank at `place`.

    Its `lines` must be equal on all ranks, and its lines of `ops` need not.
    """
    device, graph = problem.cluster.device, problem.graph
    share = _share_text(problem.shares[place]) if problem.shares else ""
    params = sorted((name, param.shard_numels) for name, param in problem.params.items() if param.is_uneven)
    whole = [(name, numels) for name, numels in params if numels.most == numels.total]
    if whole:
        share += f" with {digest_of(name for name, numels in whole if numels[place])}"
    states = (f"{storage.id} {storage.batched}" for storage in graph.storages if storage.kind is not Kind.PARAM)
    mixing = (f"{op.id} mixes" for op in graph.ops if op.mixes)
    return RankFacts(
        digest=digest_of(lines),
        ops_digest=digest_of(ops),
        division_digest=digest_of((*ops, *states, *mixing)),
        batch=1 if graph.symbols else graph.batch,
        storage_bytes=sum(storage.nbytes for storage in graph.storages),
        state_bytes=sum(param.state_nbytes + param.sum_nbytes for param in problem.params.values()),
        device=device.name,
        flops_per_s=max(device.flops_per_s.values(), default=0.0),
        homes_digest=digest_of(homes_of(problem)),
        share=share,
        budget_bytes=problem.budget_bytes,
        host_budget_bytes=problem.host_budget_bytes,
        base_bytes=problem.base_bytes,
        host_base_bytes=problem.host_base_bytes,
        between_bytes=problem.between_bytes,
        after_bytes=problem.after_bytes,
    )


def _share_text(share: Share) -> str:
    return f"{share.num_rows} rows, {share.state} of the state"


def facts_to_text(facts: RankFacts) -> str:
    """Return `facts` as JSON."""
    return to_json(_FACTS, facts)


def facts_from_text(text: str) -> RankFacts:
    """Return the facts in the JSON `text`. Raises PlanFileError with the name of the wrong field."""
    return from_json(_FACTS, RankFacts, text)


def lines_of(problem: Problem, settings: Mapping[str, str]) -> tuple[str, ...]:
    """Return the shared lines, equal on all ranks: `settings`, parameters and buckets in force."""
    savings = " ".join(sorted(problem.savings))
    own = {"update": str(problem.update or "auto"), "activations": savings, "hybrid optimizer": str(problem.hybrid)}
    own |= {
        "disk": str(problem.disk),
        "placement policy": f"static, {problem.fractions}" if problem.fractions else "auto",
        "number of ranks": str(problem.cluster.num_ranks),
        "copies": str(problem.num_copies),
        "micro-batches": str(problem.micro_batches),
        "calls of a step": str(problem.calls),
    }
    groups = {name: param.group for name, param in problem.params.items() if param.is_trained}
    params = [storage for storage in problem.graph.storages if storage.kind is Kind.PARAM]
    # In a graph, parameters are in the order of their uses, which may differ between ranks.
    params.sort(key=lambda storage: storage.id)
    placed = zip(problem.buckets, problem.placements, strict=True)
    return (
        *(f"{name} = {value}" for name, value in (*settings.items(), *own.items())),
        *(
            f"parameter {storage.id}, {storage.dtype}, {storage.nbytes} bytes, "
            + (f"trained in group {groups[storage.id]}" if storage.id in groups else "not trained")
            for storage in params
        ),
        *(f"share of rank {share.rank}, {_share_text(share)}" for share in problem.shares),
        *(
            f"bucket {bucket.id} of {' '.join(bucket.params)}"
            + ("" if bucket.reduce_dtype is None else f", reduced in {bucket.reduce_dtype}")
            + (", resident" if placement.resident and bucket.is_sharded else "")
            for bucket, placement in placed
        ),
    )


def homes_of(problem: Problem) -> tuple[str, ...]:
    """Return a line for the homes of each bucket in force; they are equal on all ranks that follow one plan.

    A bucket of which each rank has all elements is copied to the device by each rank alone: whether it stays there is
    a home too.
    """
    return tuple(
        f"bucket {placement.bucket}, param {placement.param}, optim {placement.optim}"
        + (", streamed" if placement.streamed else "")
        + (", resident" if placement.resident else "")
        for placement in problem.placements
    )


def ops_of(graph: StepGraph) -> tuple[str, ...]:
    """Return a line for each op of `graph`, and for each storage except parameters, without sizes."""
    others = [storage for storage in graph.storages if storage.kind is not Kind.PARAM]
    return (
        *(f"op {op.id}, {op.target}, {op.phase}, {' '.join(op.reads)} -> {' '.join(op.writes)}" for op in graph.ops),
        *(f"storage {storage.id}, {storage.kind}, {storage.dtype}, of {storage.of or 'none'}" for storage in others),
    )


def roll_key(graph: StepGraph) -> str:
    """Return the key of `graph` in roll calls, which is equal on all ranks whose graphs differ in sizes alone."""
    lines = [f"{op.id} {' '.join(op.reads)} -> {' '.join(op.writes)}" for op in graph.ops]
    return f"{len(graph.ops)} ops {digest_of(lines)}"


def digest_of(lines: Iterable[str]) -> str:
    """Return 32 hex digits of the SHA-256 of `lines`."""
    return hashlib.sha256("\n".join(lines).encode(errors="surrogatepass")).hexdigest()[:_NUM_DIGITS]


def skeleton_digest(plan: Plan) -> str:
    """Return the digest of the skeleton of `plan`, which is equal on all ranks whose plans differ."""
    return digest_of([repr(skeleton_of(plan))])


def plan_digest(plan: Plan) -> str:
    """Return the digest of the shared parts of `plan`, equal on all ranks: buckets, placements, activations,
    regions and actions.

    Bytes of activations and predictions may differ, as batches may.
    """
    programs = (plan,) if plan.lean is None else (plan, plan.of_lean_calls())
    activations = ((group.id, group.saving, group.storages) for own in programs for group in own.activations)
    parts = (plan.buckets, plan.placements, plan.update, plan.loss_chunks, plan.lean and plan.lean.num_full)
    parts += tuple(part for own in programs for part in (own.regions, own.schedules))
    return digest_of([*map(repr, parts), *map(repr, activations)])


def leader_of(facts: Sequence[RankFacts]) -> int:
    """Return the place of the leader: the first rank with the most bytes of storages."""
    sizes = [fact.storage_bytes for fact in facts]
    return sizes.index(max(sizes))


_ALIKE = 0.9
"""Ranks are alike if the smaller of two numbers is at least this share of the larger: equal devices that are measured
in turn are apart by less."""


def classes_of(facts: Sequence[RankFacts]) -> tuple[tuple[int, ...], ...]:
    """Return the places of the ranks of each class: of like devices, with like or ample memory, equal homes in force
    and equal shares.

    There is one class of all ranks if their ops differ.
    """
    classes: list[list[int]] = []
    is_one = len({fact.ops_digest for fact in facts}) > 1
    for place, fact in enumerate(facts):
        own = next((members for members in classes if is_one or _are_alike(facts[members[0]], fact)), None)
        if own is None:
            classes.append([place])
        else:
            own.append(place)
    return tuple(map(tuple, classes))


_AMPLE = 2
"""A memory of this many times the bytes of all storages and of all optimizer state is as good as a larger one. Free
memory that is measured on each rank in turn would make classes of equal ranks otherwise."""


def _are_alike(first: RankFacts, other: RankFacts) -> bool:
    ample_bytes = _AMPLE * max(fact.storage_bytes + fact.state_bytes for fact in (first, other))
    pairs: list[tuple[float, float]] = [(first.flops_per_s, other.flops_per_s)]
    for a, b in (
        (first.budget_bytes - first.base_bytes, other.budget_bytes - other.base_bytes),
        (first.host_budget_bytes, other.host_budget_bytes),
    ):
        pairs.append((min(a, ample_bytes), min(b, ample_bytes)))
    named = [(fact.device, fact.homes_digest, fact.share) for fact in (first, other)]
    return named[0] == named[1] and all(a == b or min(a, b) >= _ALIKE * max(a, b) > 0 for a, b in pairs)


def for_all(problem: Problem, facts: Sequence[RankFacts]) -> Problem:
    """Return `problem` with the smallest budgets, the largest external usage, the common rows and the largest shard of
    the state of all ranks."""
    are_alike = len({fact.division_digest for fact in facts}) == 1
    return replace(
        problem,
        rank=problem.fullest_rank,
        common_rows=math.gcd(*(fact.batch for fact in facts)) if are_alike else 1,
        budget_bytes=min(fact.budget_bytes for fact in facts),
        host_budget_bytes=min(fact.host_budget_bytes for fact in facts),
        base_bytes=max(fact.base_bytes for fact in facts),
        host_base_bytes=max(fact.host_base_bytes for fact in facts),
        between_bytes=max(fact.between_bytes for fact in facts),
        after_bytes=max(fact.after_bytes for fact in facts),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Divide:
    """The ranks whose text differs from the text of most ranks."""

    odd: tuple[int, ...]
    """Places of these ranks."""
    usual: int
    """Place of the first rank with the text of most ranks."""

    @classmethod
    def of(cls, said: Sequence[str]) -> "Divide":
        """Return the ranks whose text in `said` differs from most; of two halves, the first rank's half is most."""
        counts = Counter(said)
        usual = max(said, key=lambda text: (counts[text], -said.index(text)))
        return cls(odd=tuple(place for place, text in enumerate(said) if text != usual), usual=said.index(usual))


def differences(first: Sequence[str], second: Sequence[str], first_name: str, second_name: str) -> list[str]:
    """Return how the lines of two ranks differ: lines of only a single rank, else the first line in another place."""
    in_first, in_second = frozenset(first), frozenset(second)
    only = [(at, f"{line}: only on {first_name}") for at, line in enumerate(first) if line not in in_second]
    only += [(at, f"{line}: only on {second_name}") for at, line in enumerate(second) if line not in in_first]
    if only:
        return [text for _, text in sorted(only, key=lambda item: item[0])]
    pairs = zip(first, second, strict=False)
    return [f"{a} on {first_name}, where {second_name} has {b}" for a, b in pairs if a != b][:1]


# ----------------------------------------------------------------------------------------------------------------------
# The shares of all ranks at `prepare` and later: every rank must have the same ones; gradients count by their rows.


_NONE = "none"
_SAME_BATCH = (
    "Ranks along a tensor axis have the same rows. Give each of them the same batch, by the rank along the data axis "
    "alone, and call `weigh` with its number of samples."
)


def share_out(ranks: Ranks, shares: Sequence[Share], whole: Collection[str] = ()) -> None:
    """Let `ranks` have `shares`, and weight the gradients of each by its rows; nothing changes if all have none.

    `whole` are the names of the parameters that are not cut. Raises RanksDiffer if ranks have different shares or
    other names, InvalidOption if the shares do not fit the ranks, and
    UnsupportedModel for a mesh of two axes.
    """
    own = _digest(shares) if shares else _NONE
    own += f", and {len(set(whole))} whole parameters {digest_of(sorted(set(whole)))}" if whole else ""
    _require_same(ranks, own, "prepares its model with")
    if not shares:
        return
    check_shares(shares, ranks.num_ranks)
    _require_one_axis(ranks)
    ranks.shares = tuple(shares)
    ranks.weigh_by([share.num_rows for share in shares])


def require_same_shares(ranks: Ranks, shares: Sequence[Share], when: str) -> None:
    """Raise RanksDiffer on all ranks unless all of `ranks` are about to take `shares`, and `when`, in words, is equal.
    Every rank must call this together."""
    _require_same(ranks, f"{_digest(shares)} {when}", "takes")


def take_rows(ranks: Ranks, shares: Sequence[Share]) -> None:
    """Let `ranks` have the rows of `shares` from the next step on, and weight the gradients of each by them.

    All ranks must have been found to take the same. Raises InvalidOption if the shares do not fit the ranks, or have
    other shards of the state than the ranks own, and UnsupportedModel for a mesh of two axes.
    """
    check_shares(shares, ranks.num_ranks)
    own = ranks.state or (1 / ranks.num_ranks,) * ranks.num_ranks
    if any(abs(share.state - part) > STATE_TOLERANCE for share, part in zip(shares, own, strict=True)):
        expected = f"the parts of the state that the ranks own, {list(own)}: only rows change while a model trains"
        raise InvalidOption("shares", [share.state for share in shares], expected)
    _require_one_axis(ranks)
    ranks.shares, ranks.suggested_rows = tuple(shares), ()
    ranks.warned_rows.clear()
    ranks.weigh_by([share.num_rows for share in shares])


def weigh_batches(executor: Executor, num_samples: int) -> None:
    """Weight the gradients of this rank by `num_samples`, so that means over ranks are means over samples from now on.

    Every rank must call this at the same point. Raises PeerFailed if a rank does not, ValueError if no rank has
    samples, and RanksDiffer if ranks along a tensor axis, which have the same batch, give different numbers.
    """
    if executor.peers is None:
        return
    control = executor.peers.control
    samples = [int(text) for text in control.exchange(str(num_samples), "samples of a batch", "weighs its batch")]
    if executor.tensor_axis is not None:
        of_rank = dict(zip(control.ranks, samples, strict=True))
        for ranks in executor.tensor_axis.rank_groups:
            require_alike({rank: of_rank[rank] for rank in ranks}, _SAME_BATCH)
    if executor.ranks is not None:
        executor.ranks.weigh_by(samples)


def suggested_shares(ranks: Ranks) -> tuple[Share, ...]:
    """Return the shares of `ranks` with the rows that were suggested; empty if none were."""
    rows = ranks.suggested_rows
    own = ranks.shares or equal_shares(ranks.num_ranks, sum(rows)) if rows else ()
    return tuple(
        replace(share, num_rows=count, micro_batches=share.micro_batches if count % share.micro_batches == 0 else 1)
        for share, count in zip(own, rows, strict=True)
    )


def _require_one_axis(ranks: Ranks) -> None:
    if ranks.num_copies > 1:
        raise UnsupportedModel("the mesh", "shares are for one axis; a mesh with copies of each part has two")
    if ranks.tensor_axis is not None:
        because = (
            f"shares are for one axis, and a tensor axis of {ranks.tensor_axis.num_ranks} ranks is beside it. Give "
        )
        raise UnsupportedModel("the mesh", f"{because}all ranks along the data axis as many rows, and no `shares`")


def _digest(shares: Sequence[Share]) -> str:
    return hashlib.sha256(shares_to_json(tuple(shares)).encode()).hexdigest()[:16]


def _require_same(ranks: Ranks, own: str, doing: str) -> None:
    """Raise RanksDiffer unless `own` is equal on all ranks; `doing` says what this rank does with its shares."""
    said = ranks.control.exchange(own, "shares of the ranks", f"{doing} shares")
    if len(set(said)) > 1:
        usual, _ = Counter(said).most_common(1)[0]
        others = [rank for rank, text in zip(ranks.control.ranks, said, strict=True) if text != usual]
        names = {
            text: f"no shares{text.removeprefix(_NONE)}" if text.startswith(_NONE) else f"shares {text}"
            for text in said
        }
        pairs = zip(ranks.control.ranks, said, strict=True)
        raise RanksDiffer(others, [f"rank {rank} {doing} {names[text]}" for rank, text in pairs])


def warn_of_other_rows(ranks: Ranks, num_rows: int) -> None:
    """Warn, once for each number, if a step of this rank has `num_rows` rows, and its share has another number; a share
    of no rows may have any, because they count 0.

    The gradients count by the rows of the share until `weigh` is called.
    """
    share = ranks.shares[ranks.control.rank]
    if num_rows <= 1 or share.num_rows in (0, num_rows) or num_rows in ranks.warned_rows:
        return
    ranks.warned_rows.add(num_rows)
    warnings.warn(
        f"a batch of {num_rows} rows on rank {share.rank}, whose share is {share.num_rows} of "
        f"{batch_of(ranks.shares)}. Its gradients count as those of {share.num_rows} rows: call "
        f"`elixir_compile.weigh(model, {num_rows})` on every rank, each with its rows, before such a backward.",
        ElixirWarning,
        stacklevel=2,
    )
