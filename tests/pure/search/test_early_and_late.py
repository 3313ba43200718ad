"""The bytes of an earlier gather, of a later wait and of the MILP's columns z are those of the whole count."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from elixir_compile.ir import Kind, StorageId
from elixir_compile.search import Problem
from elixir_compile.search.evaluator import Candidate, Evaluator
from elixir_compile.search.formulation.milp import SCALE, Milp
from elixir_compile.search.reasons import write_out
from elixir_compile.search.space.buckets import Level, placement_of
from elixir_compile.search.space.facts import gather_facts
from elixir_compile.step import plan_timeline
from elixir_compile.step.bucket_bytes import kept_copy_bytes, kept_grad_bytes, resting
from tests.pure.search.test_planner import problem_of
from tests.pure.search.test_shards import drawn, ranks, shared_problems
from tests.pure.strategies import Layer, chain


@given(shared_problems(), st.integers(0, 2**32))
@settings(max_examples=25)
def test_an_earlier_gather_adds_the_same_bytes_up_to_its_wait(problem: Problem, seed: int) -> None:
    evaluator, draft = drawn(problem, seed, is_spread=False)
    memory, facts, moves = evaluator.memory, evaluator.facts, draft.moves
    before = memory.live_bytes(draft.levels, moves)
    for place, residency in enumerate(moves.residencies):
        gather = facts.phase_start(residency.first)
        earlier = list(moves.residencies)
        earlier[place] = residency._replace(gather=gather)
        more_bytes = memory.live_bytes(draft.levels, moves._replace(residencies=tuple(earlier))) - before
        wanted = np.zeros_like(more_bytes)
        wanted[memory.segment_of(gather) : memory.segment_of(residency.gather)] = memory.early_bytes(
            residency, draft.levels
        )
        assert more_bytes.tolist() == wanted.tolist()


@given(shared_problems(), st.integers(0, 2**32))
@settings(max_examples=25)
def test_a_later_wait_adds_the_same_bytes_to_each_op(problem: Problem, seed: int) -> None:
    evaluator, draft = drawn(problem, seed, is_spread=False)
    memory, moves, last = evaluator.memory, draft.moves, evaluator.facts.num_run - 1
    before = memory.live_bytes(draft.levels, moves)
    for bucket, end in moves.grad_ends.items():
        later = moves._replace(grad_ends={**moves.grad_ends, bucket: last})
        more_bytes = memory.live_bytes(draft.levels, later) - before
        first, until = memory.segment_behind(end), memory.segment_behind(last)
        assert (more_bytes[first:until] == memory.late_bytes(bucket, draft.levels[bucket])).all()
        # The wait right after the op that completes the gradients frees bytes at that op if it comes later.
        assert (np.delete(more_bytes, np.s_[first:until]) <= 0).all()


def row_bytes(milp: Milp, candidate: Candidate) -> Iterator[float]:
    """Yield the device bytes of `candidate` by each row of `add_leaving`, with columns z as small as their rows allow.

    The device budget must be 1 byte.
    """
    num_before = len(milp.rows)
    milp.add_leaving(candidate)
    x = np.concatenate([milp.vector(candidate), np.zeros(len(milp.phases) + milp.num_extra)])
    for row in milp.rows[num_before:]:
        if row.is_memory:
            yield 1 + float(row.values @ x[row.columns] - row.limit) / SCALE
        else:
            x[row.columns[-1]] = max(0.0, float(row.values[:-1] @ x[row.columns[:-1]]))


def fullest_bytes(evaluator: Evaluator, milp: Milp, levels: tuple[Level, ...]) -> list[int]:
    """Return the bytes of the four fullest segments, the fullest first."""
    return sorted(milp.memory.live_bytes(levels, evaluator.at_use(levels)).tolist(), reverse=True)[:4]


def evaluator_and_milp(problem: Problem) -> tuple[Evaluator, Milp]:
    """Return the evaluator and the MILP of `problem` under a device budget of 1 byte."""
    evaluator = Evaluator(gather_facts(replace(problem, budget_bytes=1)))
    return evaluator, Milp(evaluator, reference_s=1.0)


def mixed_bias() -> Problem:
    """Return a layer whose weight is sharded over two ranks and packed, and whose bias is whole on each of them."""
    graph = chain([Layer(module="h", params=(("w", 12), ("b", 6)), frozen=False, act_numel=1)], dtype="bfloat16")
    wide = {StorageId("w"): "float32", StorageId("b"): "float32"}
    return problem_of(graph, ranks(2), shards={StorageId("b"): (6, 6)}, reduce_dtypes=wide)


def test_the_rows_of_leaving_gradients_are_exact_beside_a_bucket_that_stays() -> None:
    """The flat buffer of the weight's reduce stays until the backward ends, because the bias does not leave."""
    evaluator, milp = evaluator_and_milp(mixed_bias())
    levels = (Level.ON_DEVICE,) * 2
    wanted = fullest_bytes(evaluator, milp, levels)
    assert list(row_bytes(milp, Candidate(levels, evaluator.facts.modes))) == pytest.approx(wanted)


@given(shared_problems(), st.integers(0, 2**32))
@settings(max_examples=25)
def test_the_rows_of_leaving_gradients_exclude_no_candidate_that_fits(problem: Problem, seed: int) -> None:
    assume(any(storage.kind is Kind.PARAM for storage in problem.graph.storages))
    evaluator, milp = evaluator_and_milp(problem)
    levels = drawn(problem, seed, is_spread=False)[1].levels
    wanted = fullest_bytes(evaluator, milp, levels)
    found = list(row_bytes(milp, Candidate(levels, evaluator.facts.modes)))
    assert all(nbytes <= exact + 1e-3 for nbytes, exact in zip(found, wanted, strict=True))
    if not any(level.has_param_on_host for level in levels) or problem.cluster.num_ranks == 1:
        assert found == pytest.approx(wanted)


@pytest.mark.parametrize("level", Level)
def test_the_gradients_that_a_backward_leaves_are_those_of_the_timeline(level: Level) -> None:
    problem = mixed_bias()
    evaluator = Evaluator(gather_facts(problem))
    levels = (level,) * 2
    draft = drawn(problem, 0, is_spread=False)[1]
    moves = evaluator.at_use(levels)
    made = write_out(evaluator, replace(draft, levels=levels, moves=moves, modes=evaluator.facts.modes))
    live = plan_timeline(problem.graph, made).live_bytes_by_kind
    homes = [(bucket, placement_of(bucket, level)) for bucket in made.buckets]
    left_bytes = sum(kept_grad_bytes(bucket, home) for bucket, home in homes)
    sums_bytes = sum(nbytes for home in homes for kind, nbytes in resting(*home) if kind is Kind.GRAD)
    assert live.get(Kind.GRAD, (0,))[-1] == left_bytes + sums_bytes
    between = evaluator.facts.num_forward
    # Copies of resident buckets are gathered before and waited for, so nothing but the flat buffers is there.
    copies_bytes = sum(kept_copy_bytes(*home) for home in homes)
    assert copies_bytes == (live[Kind.GATHERED][between] if not level.is_released and copies_bytes else 0)
