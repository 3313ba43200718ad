"""What ranks tell each other before one of them plans: what must be the same on all of them, and sizes, which need not.

```text
  problem of every rank -> lines that must be equal, their digest; sizes -> leader, one problem that holds for all
```

Sizes may differ because batches may. The rank with the most bytes of storages plans, with the smallest budgets and the
largest floors of all.

Ops need not be equal: torch traces a batch of 1 without some of the copies that it makes of others (110 of 800 lines of
GPT-2 differ). Ranks whose buckets move alike never wait for each other in vain, so any rank may follow a plan that is
legal for its own graph; only where it is not, the ops say why.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from elixir_compile.codec import Form, from_json, to_json
from elixir_compile.errors import PlanFileError
from elixir_compile.ir import Kind, Plan, StepGraph
from elixir_compile.search import Problem

_NUM_DIGITS = 32
"""With the brackets around it a digest still fits into one short text of `runtime.control`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """What one rank says of its problem; the bytes are those of `Problem`."""

    digest: str
    """Of the lines that must be equal."""
    ops_digest: str
    """Of its ops."""
    storage_bytes: int
    """Of all storages of its graph."""
    budget_bytes: int
    host_budget_bytes: int
    base_bytes: int
    host_base_bytes: int
    between_bytes: int
    after_bytes: int


_FACTS = Form(what="facts", version=1, error=PlanFileError)


def facts_of(problem: Problem, lines: Sequence[str], ops: Sequence[str]) -> RankFacts:
    """Return what this rank says of `problem`, of which `lines` must be equal on all ranks, and of its `ops`."""
    return RankFacts(
        digest=digest_of(lines),
        ops_digest=digest_of(ops),
        storage_bytes=sum(storage.nbytes for storage in problem.graph.storages),
        budget_bytes=problem.budget_bytes,
        host_budget_bytes=problem.host_budget_bytes,
        base_bytes=problem.base_bytes,
        host_base_bytes=problem.host_base_bytes,
        between_bytes=problem.between_bytes,
        after_bytes=problem.after_bytes,
    )


def facts_to_text(facts: RankFacts) -> str:
    """Return `facts` as JSON."""
    return to_json(_FACTS, facts)


def facts_from_text(text: str) -> RankFacts:
    """Return the facts in `text`; PlanFileError names the field that is not right."""
    return from_json(_FACTS, RankFacts, text)


def lines_of(problem: Problem, settings: Mapping[str, str]) -> tuple[str, ...]:
    """Return what must be equal on all ranks, line by line: `settings`, parameters and buckets in force."""
    savings = " ".join(sorted(problem.savings))
    own = {"update": str(problem.update or "auto"), "activations": savings, "hybrid optimizer": str(problem.hybrid)}
    own |= {
        "disk": str(problem.disk),
        "number of ranks": str(problem.cluster.num_ranks),
        "copies": str(problem.num_copies),
    }
    trained, groups = problem.state_nbytes, problem.groups
    params = [storage for storage in problem.graph.storages if storage.kind is Kind.PARAM]
    # A graph has them in the order of their uses, which may be another on each rank.
    params.sort(key=lambda storage: storage.id)
    placed = zip(problem.buckets, problem.placements, strict=True)
    return (
        *(f"{name} = {value}" for name, value in (*settings.items(), *own.items())),
        *(
            f"parameter {storage.id}, {storage.dtype}, {storage.nbytes} bytes, "
            + (f"trained in group {groups.get(storage.id, 0)}" if storage.id in trained else "not trained")
            for storage in params
        ),
        *(
            f"bucket {bucket.id} of {' '.join(bucket.params)}, param {placement.param}, optim {placement.optim}"
            + ("" if bucket.reduce_dtype is None else f", reduced in {bucket.reduce_dtype}")
            + (", streamed" if placement.streamed else "")
            + (", resident" if placement.resident else "")
            for bucket, placement in placed
        ),
    )


def ops_of(graph: StepGraph) -> tuple[str, ...]:
    """Return the ops of `graph`, line by line, and its storages but for parameters, without sizes."""
    others = [storage for storage in graph.storages if storage.kind is not Kind.PARAM]
    return (
        *(f"op {op.id}, {op.target}, {op.phase}, {' '.join(op.reads)} -> {' '.join(op.writes)}" for op in graph.ops),
        *(f"storage {storage.id}, {storage.kind}, {storage.dtype}, of {storage.of or 'none'}" for storage in others),
    )


def roll_key(graph: StepGraph) -> str:
    """Return what a roll call says of `graph`: equal on all ranks whose graphs differ in sizes alone."""
    lines = [f"{op.id} {' '.join(op.reads)} -> {' '.join(op.writes)}" for op in graph.ops]
    return f"{len(graph.ops)} ops {digest_of(lines)}"


def digest_of(lines: Iterable[str]) -> str:
    """Return 32 hex digits of the SHA-256 of `lines`."""
    return hashlib.sha256("\n".join(lines).encode(errors="surrogatepass")).hexdigest()[:_NUM_DIGITS]


def plan_digest(plan: Plan) -> str:
    """Return the digest of what must be equal on all ranks: buckets, placements, activations, regions and actions.

    Bytes of activations and what is predicted may differ, as batches may.
    """
    activations = ((group.id, group.saving, group.storages) for group in plan.activations)
    parts = (plan.buckets, plan.placements, plan.regions, plan.schedules, plan.update, plan.loss_chunks)
    return digest_of([*map(repr, parts), *map(repr, activations)])


def leader_of(facts: Sequence[RankFacts]) -> int:
    """Return the place of the rank that plans: the one with the most bytes of storages, the first of several."""
    sizes = [fact.storage_bytes for fact in facts]
    return sizes.index(max(sizes))


def for_all(problem: Problem, facts: Sequence[RankFacts]) -> Problem:
    """Return `problem` with the smallest budgets and the largest floors of all ranks."""
    return replace(
        problem,
        budget_bytes=min(fact.budget_bytes for fact in facts),
        host_budget_bytes=min(fact.host_budget_bytes for fact in facts),
        base_bytes=max(fact.base_bytes for fact in facts),
        host_base_bytes=max(fact.host_base_bytes for fact in facts),
        between_bytes=max(fact.between_bytes for fact in facts),
        after_bytes=max(fact.after_bytes for fact in facts),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Divide:
    """Ranks that do not say what most of them say."""

    odd: tuple[int, ...]
    """Their places."""
    usual: int
    """The place of the first of the others."""

    @classmethod
    def of(cls, said: Sequence[str]) -> "Divide":
        """Return who said something else than most; of two halves, the one with the first rank counts as most."""
        counts = Counter(said)
        usual = max(said, key=lambda text: (counts[text], -said.index(text)))
        return cls(odd=tuple(place for place, text in enumerate(said) if text != usual), usual=said.index(usual))


def differences(first: Sequence[str], second: Sequence[str], first_name: str, second_name: str) -> list[str]:
    """Return how the lines of two ranks differ, in their order: what only one of them has, else what comes when."""
    in_first, in_second = frozenset(first), frozenset(second)
    only = [(at, f"{line}: only on {first_name}") for at, line in enumerate(first) if line not in in_second]
    only += [(at, f"{line}: only on {second_name}") for at, line in enumerate(second) if line not in in_first]
    if only:
        return [text for _, text in sorted(only, key=lambda item: item[0])]
    pairs = zip(first, second, strict=False)
    return [f"{a} on {first_name}, where {second_name} has {b}" for a, b in pairs if a != b][:1]
