"""When a search ends."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from elixir_compile.search.evaluator import Candidate, DraftPlan, deadline_in
from elixir_compile.search.space.profiles import Moves
from elixir_compile.search.tries import Tries


def tries_of(num_played: int, tolerance: float = 1e-3, *, is_large: bool) -> Tries:
    """Return what a search has found whose best step takes 1 s."""
    moves = Moves((), {}, {})
    best = DraftPlan(levels=(), modes=(), moves=moves, step_s=1.0, decisions=())
    return Tries(
        evaluator=cast(Any, None),
        milp=cast(Any, SimpleNamespace(is_large=is_large)),
        deadline=deadline_in(1.0),
        best=best,
        tolerance=tolerance,
        found={Candidate((), (number,)): best for number in range(num_played)},
    )


@pytest.mark.parametrize(
    ("num_played", "share"), [(1, 1e-3), (8, 1e-3), (9, 5e-3), (13, 5e-3), (14, 1e-2), (1000, 1e-2)]
)
def test_the_tolerance_of_a_large_milp_grows_with_the_simulated_candidates(num_played: int, share: float) -> None:
    tries = tries_of(num_played, is_large=True)
    assert tries.is_good(1.0 / (1 + share * 0.99))
    assert not tries.is_good(1.0 / (1 + share * 1.01))


@pytest.mark.parametrize("tolerance", [0.0, 1e-3])
def test_a_small_milp_is_searched_to_its_tolerance_after_any_number_of_candidates(tolerance: float) -> None:
    tries = tries_of(1000, tolerance, is_large=False)
    assert tries.is_good(1.0 / (1 + tolerance))
    assert not tries.is_good(1.0 / (1 + tolerance + 1e-6))
