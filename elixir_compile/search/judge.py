"""What the planners ask: how many bytes and how many seconds would these levels need?"""

from collections.abc import Sequence

from elixir_compile.search.facts import Facts, gather_facts
from elixir_compile.search.levels import Level, host_bytes_of, host_bytes_without_state, placement_of
from elixir_compile.search.memory import MemoryModel
from elixir_compile.search.schedule import cut_regions, program
from elixir_compile.search.stays import Moves, moves_at_use
from elixir_compile.simulate import play, prices

MAX_AHEAD = 2
"""Two windows ahead already equals unlimited where layers are alike and a transfer is shorter than a layer."""


class Judge:
    """Answers for one problem at one choice of modes, seconds remembered; `at` gives the judge of another choice."""

    def __init__(self, facts: Facts, others: "dict[tuple[int, ...], Judge] | None" = None) -> None:
        problem = facts.problem
        self._others: dict[tuple[int, ...], Judge] = {} if others is None else others
        self._others[facts.modes] = self
        self.facts = facts
        self.memory = MemoryModel(facts)
        self.prices = prices(
            problem.graph,
            facts.buckets,
            problem.cluster,
            problem.measured,
            facts.activations,
        )
        self._away_bytes = sum(absence.nbytes for absence in facts.absences)
        self._placements = [{level: placement_of(bucket, level) for level in Level} for bucket in facts.buckets]
        # Where state may go to disk, that it takes no memory of the host is a relaxation: see `search.disk`.
        host = host_bytes_without_state if problem.disk else host_bytes_of
        self._host_bytes = [{level: host(bucket, level) for level in Level} for bucket in facts.buckets]
        self._step_s: dict[tuple[Level, ...], float] = {}

    def at(self, modes: Sequence[int]) -> "Judge":
        """Return the judge of the same problem at `modes`, one per layer."""
        key = tuple(modes)
        if key not in self._others:
            Judge(gather_facts(self.facts.problem, self.facts, key), self._others)  # which puts itself there
        return self._others[key]

    def fits(self, levels: Sequence[Level], ahead: int) -> bool:
        """Whether the levels fit both budgets, every gather `ahead` windows early."""
        problem = self.facts.problem
        return (
            self.host_bytes(levels) <= problem.host_budget_bytes
            and self.memory.peak_bytes(levels, ahead) <= problem.budget_bytes
        )

    def host_bytes(self, levels: Sequence[Level]) -> int:
        """Return the bytes that the host holds during the whole step."""
        return self._away_bytes + sum(own[level] for own, level in zip(self._host_bytes, levels, strict=True))

    def host_bytes_of(self, bucket: int, level: Level) -> int:
        """Return the bytes that the host holds for one bucket at `level`."""
        return self._host_bytes[bucket][level]

    def at_use(self, levels: Sequence[Level]) -> Moves:
        """Return the moves with every gather right before its use."""
        return moves_at_use(self.facts, levels)

    def added_host_bytes(self, bucket: int, before: Level, after: Level) -> int:
        """Return how many more bytes the host holds once one bucket has moved."""
        return self._host_bytes[bucket][after] - self._host_bytes[bucket][before]

    def step_s(self, levels: Sequence[Level], moves: Moves | None = None) -> float:
        """Return the simulated seconds of a step; without moves, as if memory allowed gathers two windows early."""
        if moves is not None:
            return self._play(levels, moves)
        key = tuple(levels)
        if key not in self._step_s:
            self._step_s[key] = self._play(levels, moves_at_use(self.facts, levels, MAX_AHEAD))
        return self._step_s[key]

    def _play(self, levels: Sequence[Level], moves: Moves) -> float:
        cuts = cut_regions(self.facts, levels, moves)
        run_s = {cut.id: self.prices.run_s(cut.first, cut.last) for cut in cuts}
        placements = {own[level].bucket: own[level] for own, level in zip(self._placements, levels, strict=True)}
        return play(program(self.facts, levels, moves, cuts), run_s, placements, self.prices)
