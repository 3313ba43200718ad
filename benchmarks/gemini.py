"""The rule of Colossal-AI's Gemini, to compare with: equal chunks of parameters, and which stay on the device.

    python benchmarks/gemini.py          # simulates GPT-2 4B on an A100 of 40 GB: the table of docs/composing.md

    size        of sizes from 32 Mi elements up, the one that leaves the fewest elements of chunks unused
    chunks      parameters in the order of first use, each in the current chunk or, if it has no room, in the next
    static      the first chunks, until the fractions of the user are met
    auto        optimizer state on the host, and every chunk comes from the host. If the device is full, the chunk that
                is used furthest ahead leaves (Belady's rule)

    memory for 2 of 4 chunks      forward  0  1  2  3   backward  3  2  1  0      6 loads, 2 of 4 chunks stay
                                  leaves         0  1                3  2

Chunks are buckets of this size here. There are three differences: a chunk of Gemini takes its whole size, and a bucket
only the elements that are used, so a decision tells how many are unused; a bucket that leaves between two of its uses
is gathered for each of them; and a gradient does not take the memory of its parameter.

Source: `colossalai/zero/gemini` at commit 4f9953b, read for its rules.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from elixir_compile.base.errors import NoFeasiblePlan
from elixir_compile.base.options import Fractions, Options
from elixir_compile.base.units import format_s
from elixir_compile.ir import Bucket, Decision, Placement, Plan, Shards, Tier
from elixir_compile.search import Problem, plan
from elixir_compile.search.evaluator import Evaluator
from elixir_compile.search.reasons import write_out
from elixir_compile.search.space.buckets import Level, form_buckets, level_text
from elixir_compile.search.space.facts import gather_facts
from elixir_compile.search.space.profiles import moves_at_use
from elixir_compile.search.transfers import best_draft
from elixir_compile.step import verify

MIN_NUMEL = SEARCH_SPAN = 32 << 20
"""The smallest chunk, and the span of sizes that are tried, in elements: Gemini's `min_chunk_size_m` and
`search_range_m`. A model with fewer elements is a single chunk that stays on the device."""
_INTERVAL = 1024
"""Elements between sizes that are tried. Gemini takes the hidden size of the model if the user names it."""
_OUTLIER = 3.0
"""Parameters larger than the mean by more than so many standard deviations do not count in the search of a size."""
_STEADY_CAP = 0.9
"""The share of the device that Gemini fills after its first step, `steady_cuda_cap_ratio`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSize:
    """The size of all chunks, in elements."""

    numel: int
    unused: int
    """Elements of all chunks that hold no parameter, as Gemini counts them: without parameters larger than others."""
    first: int
    last: int
    """The smallest and the largest of the sizes tried."""
    num_tried: int


def chunk_size(
    numels: Sequence[int],
    num_ranks: int = 1,
    *,
    min_numel: int = MIN_NUMEL,
    span: int = SEARCH_SPAN,
    interval: int = _INTERVAL,
) -> ChunkSize:
    """Return the size of chunks for parameters of `numels` elements, in the order in which they are used.

    The smallest of several sizes with the fewest unused elements is taken, and rounded up to a multiple of `num_ranks`.
    """
    total = sum(numels)
    if total < min_numel:
        return ChunkSize(numel=max(total, 1), unused=0, first=total, last=total, num_tried=1)
    limit = float(np.mean(numels) + _OUTLIER * np.std(numels))
    usual = [numel for numel in numels if numel <= limit]
    first = -(-max(min_numel, *usual) // interval) * interval
    sizes = np.arange(first, first + span + 1, interval, dtype=np.int64)
    unused = _unused(usual, sizes)
    best = int(unused.argmin())
    numel = -(-int(sizes[best]) // num_ranks) * num_ranks
    return ChunkSize(numel=numel, unused=int(unused[best]), first=first, last=int(sizes[-1]), num_tried=len(sizes))


def _unused(numels: Sequence[int], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return, for each of `sizes`, the unused elements of chunks of this size filled with `numels` in order."""
    unused, left = np.zeros_like(sizes), np.zeros_like(sizes)
    for numel in numels:
        is_full = left < numel
        unused += np.where(is_full, left, 0)
        left = np.where(is_full, sizes, left) - numel
    return unused + left


def one_each(problem: Problem) -> tuple[Bucket, ...]:
    """Return a bucket for each parameter of `problem`, in the order of first use."""
    return form_buckets(replace(problem, bucket_min_bytes=1, bucket_max_bytes=1))


def chunks(buckets: Sequence[Bucket], numel: int) -> tuple[Bucket, ...]:
    """Return `buckets` of one parameter each, joined to chunks of `numel` elements; a larger one is a chunk.

    Only parameters of one dtype, group and kind are in a chunk together.
    """
    filled: list[list[Bucket]] = []
    open_chunks: dict[tuple[object, ...], list[Bucket]] = {}
    for own in buckets:
        kind = own.dtype, own.reduce_dtype, own.state_dtype, own.trainable, own.group, own.is_sharded
        chunk = open_chunks.get(kind)
        if chunk is None or sum(other.numel for other in chunk) + own.numel > numel:
            chunk = open_chunks[kind] = []
            filled.append(chunk)
        chunk.append(own)
    return tuple(map(_joined, filled))


def _joined(chunk: Sequence[Bucket]) -> Bucket:
    sizes = ("numel", "nbytes", "state_nbytes", "sum_nbytes")
    return replace(
        chunk[0],
        params=tuple(chain.from_iterable(own.params for own in chunk)),
        shard_numels=Shards.added(own.shard_numels for own in chunk),
        **{name: sum(getattr(own, name) for own in chunk) for name in sizes},
    )


def with_chunks(problem: Problem) -> Problem:
    """Return `problem` with Gemini's chunks as its buckets, all of them on the device."""
    alone = one_each(problem)
    made = chunks(alone, chunk_size([own.numel for own in alone], problem.num_shards).numel)
    there = (Placement(bucket=own.id, param=Tier.DEVICE, optim=Tier.DEVICE, resident=True) for own in made)
    return replace(problem, buckets=made, placements=tuple(there))


def plan_by_gemini(problem: Problem) -> Plan | None:
    """Return the verified plan of the rule for `problem`, which has no buckets in force; None if it does not fit."""
    evaluator = Evaluator(gather_facts(with_chunks(problem)))
    levels = place_by_gemini(evaluator)
    if not evaluator.fits(levels, ahead=0):
        return None
    moved = (
        Decision(subject=bucket.id, choice=level_text(level), because="the rule of Gemini puts it there")
        for bucket, level in zip(evaluator.facts.buckets, levels, strict=True)
        if level is not Level.ON_DEVICE
    )
    decisions = (*gemini_decisions(evaluator, levels), *moved)
    made = write_out(evaluator, replace(best_draft(evaluator, levels), decisions=decisions, planner="gemini"))
    verify(problem.graph, made)
    return made


def place_by_gemini(evaluator: Evaluator) -> tuple[Level, ...]:
    """Return the levels by the rule: static if the user fixed fractions, else auto."""
    facts = evaluator.facts
    if facts.problem.fractions is not None or _stays_gathered(evaluator):
        return facts.start_levels
    levels = _with_copies(evaluator, _never_evicted(evaluator))
    while not evaluator.fits(levels, ahead=0):
        copies = [i for i, level in enumerate(levels) if level is Level.ALL_OFF]
        if not copies:
            break
        longest = min(copies, key=lambda i: facts.windows[i][0].first)
        levels = _with_copies(evaluator, [i for i in copies if i != longest])
    return levels


def _stays_gathered(evaluator: Evaluator) -> bool:
    """Return whether Gemini keeps all parameters and their state on the device because they are few."""
    return sum(bucket.numel for bucket in evaluator.facts.buckets) < MIN_NUMEL


def _with_copies(evaluator: Evaluator, kept: Sequence[int]) -> tuple[Level, ...]:
    """Return the levels with all buckets on the host, and the copies of the buckets `kept` kept until the backward."""
    facts = evaluator.facts
    return tuple(
        Level.ALL_OFF if i in kept and Level.ALL_OFF in choices else choices[-1]
        for i, choices in enumerate(facts.choices)
    )


def _never_evicted(evaluator: Evaluator) -> list[int]:
    """Return the buckets whose copies stay from their first use to their last, by Belady's rule."""
    facts, memory = evaluator.facts, evaluator.memory
    levels = _with_copies(evaluator, ())
    free_bytes = int(_STEADY_CAP * facts.problem.budget_bytes) - memory.live_bytes(levels, moves_at_use(facts, levels))
    uses = sorted((window.first, i) for i, windows in enumerate(facts.windows) for window in windows)
    held: set[int] = set()
    evicted: set[int] = set()
    for number, (op, bucket) in enumerate(uses):
        # Gemini makes room before a chunk is used, for this use and the ops up to the next.
        until = uses[number + 1][0] if number + 1 < len(uses) else facts.num_run
        segments = slice(memory.segment_of(op), max(memory.segment_of(until), memory.segment_of(op) + 1))
        room_bytes = int(free_bytes[segments].min())
        ahead = {i: place for place, (_, i) in reversed(list(enumerate(uses[number + 1 :])))}
        held.discard(bucket)
        while held and sum(facts.buckets[i].flat_nbytes for i in held) > room_bytes:
            furthest = max(held, key=lambda i: (ahead.get(i, len(uses)), i))
            held.remove(furthest)
            if furthest in ahead:
                evicted.add(furthest)
        held.add(bucket)
    return [i for i, windows in enumerate(facts.windows) if windows and i not in evicted]


def gemini_decisions(evaluator: Evaluator, levels: Sequence[Level]) -> Iterator[Decision]:
    """Yield the decisions about the size of chunks, and about those that leave the device."""
    facts = evaluator.facts
    problem = facts.problem
    total = sum(bucket.numel for bucket in facts.buckets)
    alone = one_each(replace(problem, buckets=(), placements=()))
    size = chunk_size([own.numel for own in alone], problem.num_shards)
    tried = f"of {size.num_tried} sizes from {size.first} to {size.last} elements it leaves the fewest unused"
    yield Decision(
        subject="chunks",
        choice=f"{len(facts.buckets)} of at most {size.numel} elements",
        because=f"{tried}: {size.unused} beside {total}, which Gemini allocates and this plan does not",
    )
    if problem.fractions is not None:
        return
    if _stays_gathered(evaluator):
        because = f"{total} elements are fewer than {MIN_NUMEL}, the smallest chunk"
        yield Decision(subject="evictions", choice="none: all buckets stay on the device", because=because)
        return
    kept = sum(level is Level.ALL_OFF for level in levels)
    num_loads = sum(
        len(windows) if level.is_released else min(1, len(windows))
        for windows, level in zip(facts.windows, levels, strict=True)
    )
    yield Decision(
        subject="evictions",
        choice=f"{kept} of {len(levels)} buckets stay on the device from their first use to their last",
        because=f"the bucket used furthest ahead leaves if more than {_STEADY_CAP:.0%} of the budget would be full; "
        f"{num_loads} loads per step",
    )


def _row(name: str, problem: Problem) -> str:
    """Return the line of the table for `problem`."""
    try:
        ours = format_s(plan(problem).prediction.step_s)
    except NoFeasiblePlan:
        ours = "does not fit"
    theirs = plan_by_gemini(problem)
    return f"| {name} | {ours} | {'does not fit' if theirs is None else format_s(theirs.prediction.step_s)} |"


def main() -> None:
    """Print the steps of GPT-2 4B by our search and by the rule."""
    import torch  # not before: the rule itself needs none

    from elixir_compile.ir.hardware import preset
    from elixir_compile.tools.preview.few_layers import capture_model
    from elixir_compile.tools.preview.models import TextBatch, find_model

    model, inputs = find_model("gpt2-4b", TextBatch(batch=8, seq=1024, dtype=torch.bfloat16, recompute=True))
    captured = capture_model(model, inputs, options=Options())
    problem = captured.problem(preset("a100-40g"), Options(), state_bytes_per_element=12)
    print("| placement | step of our search | step of Gemini's rule |\n|---|---|---|")
    print(_row("`auto`", problem), flush=True)
    for optim, param in ((0.0, 0.0), (0.5, 0.0), (1.0, 0.0), (1.0, 0.5), (1.0, 1.0)):
        name = f"static, state {optim}" + (f", parameters {param}" if param else "")
        print(_row(name, replace(problem, fractions=Fractions(offload_optim=optim, offload_param=param))), flush=True)


if __name__ == "__main__":
    main()
