"""`search.shares.refine`: rows move by what a simulation sees; the outcome says how the shares were found."""

import pickle
from dataclasses import replace

import pytest

from elixir_compile.base.errors import PlanFileError
from elixir_compile.ir import Activations, GroupId, Saving, StorageId
from elixir_compile.ir.share import Outcome, Share, Shares, shares_from_json, shares_to_json
from elixir_compile.search.evaluator import deadline_in
from elixir_compile.search.shares import choose as offers
from elixir_compile.search.shares.choose import RULES, Choice, ShareSearch, Treatment
from elixir_compile.search.shares.refine import SimulatedStep, refined
from tests.pure.search.test_choose_shares import search


class Simulated:
    """Steps in which rank i computes for `row_s[i]` seconds for each of its rows; keeps the choices it is asked for."""

    def __init__(self, row_s: tuple[float, ...]) -> None:
        self.row_s = row_s
        self.asked: list[tuple[int, ...]] = []

    def step(self, choice: Choice) -> SimulatedStep | None:
        self.asked.append(choice.rows)
        busy_s = tuple(each_s * rows for each_s, rows in zip(self.row_s, choice.rows, strict=True))
        return SimulatedStep(step_s=max(busy_s), busy_s=busy_s)


def seconds_of(found: ShareSearch, choice: Choice) -> tuple[float, ...]:
    """The seconds of a row on each rank that make the formula right."""
    return tuple(rank.busy_s / max(rows, 1) for rank, rows in zip(choice.ranks, choice.rows, strict=True))


def test_rows_move_by_the_simulation_and_no_rule_is_better() -> None:
    own = search()
    right = seconds_of(own, own.best())
    # In the simulation rank 2 is twice as slow as the formula has it.
    simulated = Simulated((right[0], right[1], 2 * right[2], right[3]))
    found = refined(own, simulated.step)
    assert found.choice.rows[2] < own.best().rows[2]
    assert sum(found.choice.rows) == 64
    assert found.outcome.is_complete
    assert found.outcome.num_simulated == len(simulated.asked) == len(set(simulated.asked))
    for rule in RULES:
        other = own.of_rule(rule)
        assert other is not None
        step = simulated.step(other)
        assert step is not None
        assert found.outcome.step_s <= step.step_s
    assert str(found.outcome).startswith(f"the shortest of {found.outcome.num_simulated} choices in the simulation")


def test_a_rule_is_left_out_only_if_the_compute_of_one_rank_is_longer() -> None:
    own = search()
    quick, slow = (Simulated(tuple(factor * each for each in seconds_of(own, own.best()))) for factor in (1e-3, 1e3))
    even = own.even()
    assert even is not None
    assert even.rows != own.best().rows
    refined(own, quick.step)
    assert even.rows not in quick.asked  # even alone computes a thousand times as long as the simulated best
    refined(own, slow.step)
    assert even.rows in slow.asked


def test_without_time_the_outcome_says_what_was_not_simulated() -> None:
    own = search()
    simulated = Simulated(seconds_of(own, own.best()))
    none = refined(own, simulated.step, deadline_in(-1.0))
    assert (none.choice, none.outcome.num_simulated, none.outcome.is_complete) == (own.best(), 0, False)
    assert str(none.outcome) == "the shortest by the formula of the search; nothing was simulated"
    unplanned = refined(own, lambda _: None)
    assert (unplanned.choice, unplanned.outcome.is_complete) == (own.best(), True)
    assert "the ranks have no plans" in str(unplanned.outcome)


def test_each_way_is_priced_once_for_each_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ways that treat some layers are sums of those that treat all or none."""
    priced: list[object] = []
    price = offers._figures

    def counted(*given):
        priced.append(given)
        return price(*given)

    monkeypatch.setattr(offers, "_figures", counted)
    own = search()
    kept = own.ways[0].kept
    group = Activations(id=GroupId("h.0.matmul"), storages=(StorageId("h"),), nbytes=1, saving=Saving.RECOMPUTE)
    treated = replace(kept, treatment=Treatment(text="recomputed", activations=(group,)))
    ways = offers.mixed_ways((kept, treated))
    priced.clear()
    offers.offers_of(ways, [0, 2, 4], own.ask.fleet.seen_by(0), own.ask.budgets[0], own.ask.state, 4)
    assert (len(ways), len(priced)) == (9, 2)


def test_shares_keep_their_outcome_in_json_and_copies() -> None:
    plain = tuple(Share(rank=rank, num_rows=2, state=0.5) for rank in range(2))
    made = Shares(plain, Outcome(step_s=0.5, num_simulated=1, is_complete=False))
    assert made == plain
    for copy in (shares_from_json(shares_to_json(made)), pickle.loads(pickle.dumps(made))):
        assert isinstance(copy, Shares)
        assert (copy, copy.outcome) == (made, made.outcome)
    assert str(made.outcome).endswith("of 1 choice in the simulation of all ranks; there was no time for others")
    assert not isinstance(shares_from_json(shares_to_json(plain)), Shares)
    with pytest.raises(PlanFileError, match="outcome"):
        shares_from_json(shares_to_json(made).replace('"step_s"', '"steps"'))
