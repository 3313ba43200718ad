"""The budget of the first steps: less than the user's until they are measured, and more if they exceed it.

A step that exceeds its budget is planned again, or refused with a budget that is enough for the whole step.

```text
  step 0    A.fwd does not fit: it runs in the fewest bytes that it can, over the budget    B.fwd  B.bwd  A.bwd
  step 1    A and B follow plans for the smallest budget that has plans for both            measured
  step 2    ... with room for code between them, as measured                                measured again
  step 4    the last steps have kept the budget of the user: go on; or a larger one: NoFeasiblePlan names it
```

When the first graph of a step is planned, neither the later graphs are known nor the bytes of the code between them,
which runs op by op. A refusal with what the first graph needs would be followed by one with what the second needs.

Plans that fill the budget leave no room for what is not known. If it may need more than they leave, the first steps are
lean: each graph follows its smallest plan, for a budget below the user's, until a step is measured.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

from elixir_compile.base.errors import NoFeasiblePlan
from elixir_compile.base.units import format_bytes
from elixir_compile.session.over_budget import TOLERATED_BYTES

log = logging.getLogger("elixir_compile")

_NUM_KEPT = 2
"""So many measured runs of each graph must keep a budget before it is enough."""
_MOST_PLANS = 8
"""So many times the graphs of a model are planned together in a trial."""
_MOST_KEPT = 3
"""After so many measured steps that kept a budget, it is enough: graphs that did not run in them, as for inputs of
other sizes, are not waited for."""
_MOST_UNMEASURED = 16
"""So many forwards in turn may begin without a measured step before them: accumulated gradients take several a step."""
_MOST_LEAN = 16
"""So many forwards in turn may be lean without a measured step: somebody else may hold torch.profiler."""
_EASE_DIVISOR = 8
"""A budget below the user's, for which no plan is found, grows by this part of it."""
_MARGIN_DIVISOR = 64
"""A budget that is tried is more than the smallest by this part of it."""


@dataclass(slots=True)
class _Tried:
    """What the steps have shown of the plans in force."""

    graphs: frozenset[object] = frozenset()
    """The graphs that were planned together; empty if they were planned one by one."""
    num_kept: dict[object, int] = field(default_factory=dict)
    """Measured steps of each graph that kept the budget."""
    num_measured: int = 0
    num_unmeasured: int = 0
    peak_bytes: int = 0
    """The most bytes of a measured step."""


def with_margin(least_bytes: int) -> int:
    """Return the budget to try if there are plans for `least_bytes`, and for no less."""
    return least_bytes + least_bytes // _MARGIN_DIVISOR + TOLERATED_BYTES


class Trial:
    """The budget that is tried in the first steps of a model, at least that of its user."""

    def __init__(self, name: str) -> None:
        """`name` is the name of the model."""
        self._name = name
        self.given_bytes = 0
        """The budget of the user; 0 without a trial."""
        self.budget_bytes = 0
        """The budget under which plans are made meanwhile: less than the user's in lean steps."""
        self.is_new = True
        """Whether no step has been measured, and no budget tried."""
        self._enough_bytes = 0
        """The budget that is enough, once the step is refused; 0 before."""
        self._uncounted = ""
        """What is not in the budget that is enough."""
        self._tried = _Tried()
        self._num_plans = 0

    def is_of(self, given_bytes: int | None) -> bool:
        """Return whether the budget `given_bytes` is tried."""
        return self.given_bytes == given_bytes

    def budget_for(self, given_bytes: int) -> int:
        """Return the budget to plan for, if the user's is `given_bytes`."""
        return self.budget_bytes if given_bytes == self.given_bytes else given_bytes

    def begin(self, given_bytes: int) -> None:
        """Begin to try `given_bytes`, the budget of the user, unless it is tried already."""
        if given_bytes != self.given_bytes:
            self._end()
            self.given_bytes = self.budget_bytes = given_bytes

    @property
    def is_lean(self) -> bool:
        """Whether plans are made for less than the budget of the user, until a step is measured."""
        return self.budget_bytes < self.given_bytes

    def begin_lean(self, given_bytes: int) -> None:
        """Begin with lean steps; `given_bytes` is the budget of the user."""
        self.begin(given_bytes)
        self.budget_bytes = 1
        log.info(
            "the first steps of %s take as little device memory as they can, until what is held beside its graphs is "
            "measured",
            self._name,
        )

    def ease(self, needed_bytes: int) -> bool:
        """Plan for at least `needed_bytes`, or for the budget of the user if that is less; return whether plans were
        made for less."""
        was_lean = self.is_lean
        if was_lean:
            least_bytes = self.budget_bytes + self.budget_bytes // _EASE_DIVISOR
            self.budget_bytes = min(self.given_bytes, max(needed_bytes, least_bytes))
        return was_lean

    def end_lean(self) -> None:
        """Plan for the budget of the user from now on."""
        self.budget_bytes, self._tried = self.given_bytes, _Tried()

    def waits(self) -> bool:
        """Return whether lean steps go on, although a forward begins before which none was measured."""
        self._tried.num_unmeasured += 1
        return self._tried.num_unmeasured <= _MOST_LEAN

    def lift(self, needed_bytes: int, beside: str) -> None:
        """Plan for at least `needed_bytes` from now on; `beside` names what else the step may need."""
        if self.budget_bytes <= self.given_bytes:
            log.warning(
                "%s needs %s of device memory, budget %s. Its first steps run over the budget, and show what is enough "
                "for %s too. An error with this number follows if it is more than the budget",
                self._name,
                format_bytes(needed_bytes),
                format_bytes(self.given_bytes),
                beside,
            )
        # More than before in any case: an error may name the bytes of a plan that its search does not find.
        least_bytes = self.budget_bytes + self.budget_bytes // _MARGIN_DIVISOR
        self.budget_bytes, self._tried = max(needed_bytes, least_bytes), _Tried()

    def check(self, given_bytes: int | None) -> None:
        """Raise NoFeasiblePlan if the step was refused under the budget `given_bytes`.

        Under another budget the step is tried anew.
        """
        if self._enough_bytes and given_bytes != self.given_bytes:
            self._end()
        if self._enough_bytes:
            raise NoFeasiblePlan("", "", self.given_bytes, self._enough_bytes, {}, uncounted=self._uncounted)

    def follows(self, graphs: Iterable[object]) -> bool:
        """Return whether `graphs` were planned together for the budget."""
        return self._tried.graphs == frozenset(graphs)

    def measures(self, graph: object) -> bool:
        """Return whether `graph` follows a plan for another budget than the user's until its step is measured, whatever
        is held beside it: with another plan, the measurement would end."""
        return self.budget_bytes != self.given_bytes and graph in self._tried.graphs

    def may_plan(self) -> bool:
        """Return whether the graphs may be planned together once more; if not, the trial ends.

        Raises NoFeasiblePlan if their plans are for more than the budget of the user.
        """
        if self._num_plans < _MOST_PLANS:
            return True
        self.conclude("what its steps take beyond their plans, which was more in each")
        return False

    def planned(self, graphs: Iterable[object], budget_bytes: int) -> None:
        """Note that `graphs` follow plans for `budget_bytes` together."""
        self.budget_bytes, self._tried = budget_bytes, _Tried(frozenset(graphs))
        self._num_plans += 1

    def kept(self, peak_bytes: int | None, measured: Iterable[object]) -> None:
        """Note that a step, in which the graphs `measured` took at most `peak_bytes`, has kept the budget; None if it
        was not measured. The trial ends once enough is known.

        Raises NoFeasiblePlan if the budget of the user is too small.
        """
        tried = self._tried
        tried.num_measured += peak_bytes is not None
        tried.num_unmeasured = tried.num_unmeasured + 1 if peak_bytes is None else 0
        tried.peak_bytes = max(tried.peak_bytes, peak_bytes or 0)
        for graph in measured:
            tried.num_kept[graph] = tried.num_kept.get(graph, 0) + 1
        is_kept_by_all = all(tried.num_kept.get(graph, 0) >= _NUM_KEPT for graph in tried.graphs)
        if is_kept_by_all or tried.num_measured >= _MOST_KEPT:
            self.conclude()
        elif tried.num_unmeasured > _MOST_UNMEASURED:
            self.conclude("" if tried.num_measured else "code between its graphs, which was not measured")

    def refuse(self, enough_bytes: int, uncounted: str) -> None:
        """Raise NoFeasiblePlan: at least `enough_bytes` are needed, and more for what is `uncounted`."""
        self._enough_bytes, self._uncounted = enough_bytes, uncounted
        self.check(self.given_bytes)

    def conclude(self, uncounted: str = "") -> None:
        """End the trial with what the steps have shown, which lacks what is `uncounted`.

        Raises NoFeasiblePlan if the budget of the user is too small.
        """
        tried = self._tried
        has_kept = tried.num_measured > 0 and tried.peak_bytes <= self.given_bytes + TOLERATED_BYTES
        if self.budget_bytes <= self.given_bytes or (has_kept and not uncounted):
            self._end()
            return
        self.refuse(max(self.budget_bytes, tried.peak_bytes), uncounted)

    def _end(self) -> None:
        self.given_bytes = self.budget_bytes = self._enough_bytes = self._num_plans = 0
        self._tried, self._uncounted, self.is_new = _Tried(), "", False
