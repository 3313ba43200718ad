"""Find the earlier captures of a step: of the first call of a plain model, or of a compilation under other options."""

from collections.abc import Sequence
from typing import Protocol, TypeVar

from elixir_compile.ir import StepGraph
from elixir_compile.runtime.executor import Executor
from elixir_compile.session.graph_planner import GraphPlanner
from elixir_compile.session.planning import ExternalUsage
from elixir_compile.session.staying_gradients import StayingGradients
from elixir_compile.session.variants import ActivePlan

_MOST_RETURNS = 4
"""So many times a graph takes the homes of buckets back from the same step under other options. Without a limit, two
compilations of a step that run in turn would move the parameters before each of their steps."""


class CapturedStep(Protocol):
    """A captured graph with its planner: a `PlannedGraph`."""

    planner: GraphPlanner
    is_superseded: bool

    @property
    def is_planned(self) -> bool: ...

    @property
    def is_inference(self) -> bool: ...

    @property
    def active(self) -> ActivePlan: ...


_Captured = TypeVar("_Captured", bound=CapturedStep)


class EarlierCaptures:
    """Finds the captures of the same step that a graph takes over or replaces."""

    def __init__(self, executor: Executor, staying: StayingGradients) -> None:
        """`staying` are the gradients that stay in the graph."""
        self._executor = executor
        self._staying = staying
        self._num_returns = 0
        """Times that the graph was superseded and took the homes of buckets back."""

    def in_force(
        self, own: _Captured, graphs: Sequence[_Captured], step: StepGraph, external: ExternalUsage
    ) -> _Captured | None:
        """Return the first capture of `step`, the step of `own`, among `graphs` whose plan is in force and serves `own`
        beside the outstanding forwards and the models in turn of `external`; None if there is none."""
        for other in self._of(own, graphs, step):
            plan = other.active.plan
            is_same = own.planner.plans_like(other.planner)
            is_same = is_same and other.active.beside_bytes >= external.outstanding_bytes
            is_same = is_same and other.active.neighbour_bytes >= external.neighbour_bytes
            is_same = is_same and not self._staying.is_missing_in(plan)
            if is_same and self._executor.buckets.agree(plan.buckets, plan.placements, may_adopt=False):
                return other
        return None

    def outdated(self, own: _Captured, graphs: Sequence[_Captured], step: StepGraph) -> _Captured | None:
        """Return the newest capture of `step` among `graphs` that `own` replaces; None if it replaces none.

        `own` replaces a capture with other options if `own` has no plan yet, or if `own` itself was replaced and the
        user returned to its options, at most `_MOST_RETURNS` times. The plan of `own` may then move the buckets.
        """
        is_back = own.is_superseded and self._num_returns < _MOST_RETURNS
        if own.is_inference or not (is_back or not own.is_planned):
            return None
        newest = next((other for other in reversed(self._of(own, graphs, step)) if not other.is_superseded), None)
        return None if newest is None or own.planner.plans_like(newest.planner) else newest

    def replaced_by(self, own: CapturedStep) -> None:
        """Note that `own` has a plan that replaces the capture found by `outdated`."""
        self._num_returns += own.is_superseded
        own.is_superseded = False

    def _of(self, own: _Captured, graphs: Sequence[_Captured], step: StepGraph) -> list[_Captured]:
        if self._executor.peers is not None:  # another rank may have no such capture, and would wait for this rank
            return []
        return [other for other in graphs if other is not own and other.is_planned and other.active.is_of(step)]
