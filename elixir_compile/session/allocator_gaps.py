"""Hold what the allocator of the device has taken at the budget, not only what tensors ask for.

```text
  step n    follows new plans: the cache is freed before, because what compilation and earlier plans left is no need of
            a step, and the peak of the tensors is measured
  step n+1  begins: the allocator has taken more than the budget
            -> the cache is freed, and the rest of the budget taken as one segment, which the allocator cuts up
  step n+2  begins: it has taken more all the same, or step n+1 had to free its cache for room
            -> plans with the gaps in `base_bytes`: no tensor fits in them; or earlier plans that kept the budget
  step n+3  the same again, until plans keep the budget; at last those under which the allocator took least
  ...
  step n+9  the allocator took more than the budget although it did not in the three steps after its cache was freed
            -> the cache is freed, and taken as one segment again
```

The allocator rounds sizes up, keeps tensors of up to 1 MiB apart from others, and takes memory in segments: one for
each tensor of 10 MiB and more that finds no free one. Free segments beside each other serve no larger tensor. A GPT-2
whose layers have tensors of 16 and 32 MiB, and whose loss has four of 64, held 662 MiB in a step of 456: when it asked
for the first of the four, 176 were in tensors. Neighbouring parts of one segment serve larger tensors once they are
free: it held 568. What remains depends on the order of sizes in a step, so it is measured and not predicted: plans for
fewer bytes may have more gaps.
"""

import itertools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from elixir_compile.base.errors import NoFeasiblePlan, other_segments
from elixir_compile.base.units import MIB, format_bytes
from elixir_compile.compat.platforms import PeakRecord, platform_of
from elixir_compile.runtime.executor import Executor
from elixir_compile.search.joint.joint_budget import Planned
from elixir_compile.search.outer import Variants, answers
from elixir_compile.session.step_profiler import STEPS_SKIPPED, STEPS_TIMED

log = logging.getLogger("elixir_compile")

SEGMENT_BYTES = 22 * MIB
"""What the allocator holds if it has just begun a segment of each kind: 2 MiB for tensors of up to 1 MiB, and 20 MiB
for larger ones. It may hold so much more than the budget. Elixir allocates on one stream."""
_MOST_PLANS = 6
"""So many times a model is planned again because of gaps."""
_NUM_KEPT = 3
"""So many steps in a row, from a cache without memory on, must keep the budget before plans keep it. The first leaves
gaps, beside which the second may take more."""
_MOST_FREED = 3
"""So many times the cache is freed under plans that kept the budget before, until gaps count as the plans' own."""
_SHORT_DIVISOR = 16
"""If the allocator had to free its cache for room, nothing tells how much was missing: plans leave this part of the
budget more free, each time."""
MOST_ASKED = 3
"""So many plans are asked for in turn, each with less room beside it, until there is one: an error may name the bytes
of a plan that its search does not find."""
_ALIKE_BYTES = 2 * MIB
"""Gaps that differ by less, the smallest segment, give the same plans."""
_ASKED_DIVISOR = 64
"""Each has less room by this part of the budget, beside what the error says."""
_SPARE_DIVISOR = 4
"""The budget is taken as one segment only if the device has this part of it to spare: where memory is short, the
allocator frees whole segments for room, and this one has tensors in it at all times."""


class Held(NamedTuple):
    """What the allocator held when a step was to be planned again."""

    reserved_bytes: int
    peak_bytes: int
    """The most bytes that tensors asked for."""
    gap_bytes: int
    """Those for which plans are to leave room."""
    budget_bytes: int
    was_short: bool
    """Whether the allocator had to free its cache for room, which takes time in each step."""


@dataclass(slots=True)
class _Tried:
    """Plans, and what steps have shown of them."""

    planned: Sequence[Planned]
    gap_bytes: int
    """The gaps for which they leave room."""
    excess_bytes: int | None = None
    """The most by which the allocator held more than the budget after a step; 0 if it never did, None before a step."""

    def note(self, excess_bytes: int) -> None:
        """Note that the allocator held `excess_bytes` more than the budget after a step."""
        self.excess_bytes = max(self.excess_bytes or 0, excess_bytes)

    def rank(self) -> float:
        """Return less for plans under which the allocator held less: the bytes by which it exceeded the budget."""
        return math.inf if self.excess_bytes is None else self.excess_bytes

    def is_for(self, planned: Sequence[Planned]) -> bool:
        """Return whether the plans are for the same graphs, of the same sizes, as those in `planned`."""
        return [problem.graph for problem, _ in self.planned] == [problem.graph for problem, _ in planned]

    def is_of(self, planned: Sequence[Planned]) -> bool:
        """Return whether these are the plans in `planned`."""
        pairs = zip(self.planned, planned, strict=False)
        return len(self.planned) == len(planned) and all(own is other for (_, own), (_, other) in pairs)


class AllocatorGaps:
    """Compares what the allocator holds with the budget of a model before each of its steps."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._platform = platform_of(executor.device)
        self.nbytes = 0
        """Bytes of gaps for which plans leave room."""
        self._tried: list[_Tried] = []
        """Plans that steps have followed, those in force last."""
        self._num_steps = 0
        self._retries = 0
        """How often the allocator had freed its cache for room before the last step."""
        self._num_freed = 0
        """How often its cache was freed here under the plans in force, after steps that kept the budget."""
        self._one_bytes = 0
        """What is taken as one segment when the cache is freed; 0 until the allocator held more."""
        self._num_since = 0
        """Steps since that, or since the plans came into force."""
        self._num_plans = 0
        self._is_over = False
        """Whether nothing more can be done, which was said."""
        self._peak: PeakRecord | None = None
        """Of the tensors in the first steps since the cache was freed."""

    @property
    def is_watching(self) -> bool:
        """Whether there may be gaps to leave room for: the device has an allocator, and not all was tried."""
        return self._platform.has_own_memory and not self._is_over

    def begin(self, planned: Sequence[Planned], *, frees: bool = True) -> None:
        """Note that steps follow the plans of `planned` from now on; the cache is freed first if this `frees` it, and
        the step is measured."""
        found = next((tried for tried in self._tried if tried.is_of(planned)), _Tried(planned, self.nbytes))
        others = [tried for tried in self._tried if tried is not found and tried.is_for(planned)]
        self._tried = [*others, found]
        self._num_freed = self._num_since = 0
        if frees:
            self._free()
        else:
            self._peak_of_tensors()

    def _free(self) -> None:
        """Free the cache, take the budget as one segment if it was exceeded, and measure the peak of the tensors from
        now on."""
        self._peak_of_tensors()
        self._platform.empty_cache()
        if self._one_bytes:
            spare_bytes = self._one_bytes // _SPARE_DIVISOR
            self._platform.hold(self._executor.device, self._one_bytes, spare_bytes=spare_bytes)
        self._peak, self._num_since = PeakRecord(self._platform, self._executor.device), 0

    def _peak_of_tensors(self) -> int | None:
        """Return the most bytes of tensors since the cache was freed, and measure no more; None if it is not known."""
        record, self._peak = self._peak, None
        return None if record is None else record.stop()

    def found(
        self, planned: Sequence[Planned], foreign: Callable[[], int], *, given_bytes: int | None, why_fixed: str = ""
    ) -> Held | None:
        """Return what the allocator held in the step before if the plans of `planned`, which it followed, are to leave
        more room for gaps; None if they need not.

        `given_bytes` is the budget that the user chose. One that is measured, None, is all free memory, and the
        allocator frees its cache where it is too little: then only the first steps are watched. `foreign` returns the
        bytes of tensors that are in no plan. `why_fixed` says why the plans must stay; empty if they need not.
        """
        if not self.is_watching:
            return None
        self._num_steps += 1
        before, self._retries = self._retries, self._platform.alloc_retries(self._executor.device) or 0
        was_short = self._num_steps > 1 and self._retries > before
        if given_bytes is None and self._num_steps > STEPS_SKIPPED + STEPS_TIMED:
            self._peak_of_tensors()
            return None
        if not self._tried or not self._tried[-1].is_of(planned):
            # What the first step compiles is freed behind it.
            self.begin(planned, frees=given_bytes is not None and bool(self._tried))
            return None
        self._num_since += 1
        excess_bytes = 0
        if given_bytes is not None:
            excess_bytes = self._platform.reserved_bytes(self._executor.device) - given_bytes - SEGMENT_BYTES
            excess_bytes = max(0, excess_bytes - foreign()) if excess_bytes > 0 else 0
        if not (excess_bytes or was_short):
            if self._num_since == _NUM_KEPT:
                self._tried[-1].note(0)
                self._peak_of_tensors()
            return None
        held = self._exceeded(max(excess_bytes, int(was_short)), given_bytes, foreign(), was_short=was_short)
        if held is None or not why_fixed:
            return held
        self._is_over = True
        self._warn(held, f"It is not planned again, because {why_fixed}")
        return None

    def _exceeded(self, excess_bytes: int, given_bytes: int | None, foreign: int, *, was_short: bool) -> Held | None:
        """Return what the allocator held in a step that took `excess_bytes` too many, without `foreign` bytes of
        tensors in no plan; None if the cache was freed instead, or if there are no more gaps than plans leave room
        for."""
        is_first = not (was_short or self._one_bytes)
        # What is short of memory needs whole segments that can be given back.
        self._one_bytes = 0 if was_short or given_bytes is None else given_bytes + foreign
        if is_first or (self._peak is None and self._num_freed < _MOST_FREED):
            self._num_freed += 1
            self._free()
            return None
        self._tried[-1].note(excess_bytes)
        plans = [plan for _, plan in self._tried[-1].planned]
        measured_bytes = self._peak_of_tensors()
        own_bytes = max(plan.prediction.device_peak_bytes for plan in plans) - self.nbytes
        own_bytes = own_bytes if measured_bytes is None else measured_bytes - foreign
        held_bytes = self._platform.reserved_bytes(self._executor.device) - foreign
        budget_bytes = min(plan.budget_bytes for plan in plans) if given_bytes is None else given_bytes
        gap_bytes = held_bytes - own_bytes
        if was_short:  # what was freed for room is not held any more
            gap_bytes = max(gap_bytes, self.nbytes + budget_bytes // _SHORT_DIVISOR)
        elif gap_bytes <= max(self.nbytes, SEGMENT_BYTES):
            return None  # tensors took more than planned, which `over_budget` sees
        return Held(held_bytes, own_bytes, gap_bytes, budget_bytes, was_short)

    def answer(self, held: Held, make: Callable[[], Sequence[Planned]]) -> Sequence[Planned] | None:
        """Return the plans to follow because of `held`, None if those in force stay; say it.

        They are earlier ones that kept the budget, or new ones, which `make` plans beside `nbytes`. If there are none,
        they are those of all tried under which the allocator held least.
        """
        now, best = self._tried[-1], min(self._tried, key=_Tried.rank)
        what = "It goes back to earlier plans, which kept the budget"
        if best.excess_bytes:
            planned, what = self._with_room(held, make)
            if planned is not None:
                self._warn(held, what)
                return planned
            self._is_over = True
            what += ", so the plans stay" if best is now else ", so it goes back to plans under which it held less"
        self._warn(held, what)
        self.nbytes = best.gap_bytes
        return None if best is now else best.planned

    def _with_room(self, held: Held, make: Callable[[], Sequence[Planned]]) -> tuple[Sequence[Planned] | None, str]:
        """Return plans with room for the gaps of `held`, or for as much of them as there are plans for, or if none
        leave more than those in force, for other gaps than those tried; None without any. And in words what is done."""
        if self._num_plans == _MOST_PLANS:
            return None, f"It was planned again {_MOST_PLANS} times"
        before_bytes, needed = self.nbytes, ""

        def gaps() -> Variants[int, Sequence[Planned] | NoFeasiblePlan]:
            gap_bytes = held.gap_bytes
            for _ in range(MOST_ASKED):
                tried = sorted({own.gap_bytes for own in self._tried})
                if gap_bytes <= before_bytes or any(abs(gap_bytes - own) < _ALIKE_BYTES for own in tried):
                    # Other plans than those tried have other gaps, be they more or less: the middle of the widest
                    # distance, if there is a wide one.
                    apart_bytes, least_bytes = max(((b - a, a) for a, b in itertools.pairwise(tried)), default=(0, 0))
                    is_wide = apart_bytes > held.budget_bytes // _ASKED_DIVISOR
                    gap_bytes = least_bytes + apart_bytes // 2 if is_wide else 0
                found = (yield gap_bytes) if gap_bytes else ()
                if not isinstance(found, NoFeasiblePlan):
                    return
                gap_bytes -= missing_bytes(found, held.budget_bytes) if found.memory == "device" else gap_bytes

        def plan_with(gap_bytes: int) -> Sequence[Planned]:
            self.nbytes = gap_bytes
            return make()

        for gap_bytes, found in answers(gaps(), plan_with):
            if not isinstance(found, NoFeasiblePlan):
                self._num_plans += 1
                return found, f"It is planned again with {format_bytes(gap_bytes)} for gaps"
            needed = f": it needs {format_bytes(found.needed_bytes)} of {found.memory} memory"
        self.nbytes = before_bytes
        return None, f"No plan leaves {format_bytes(held.gap_bytes)} for gaps{needed}"

    def _warn(self, held: Held, what: str) -> None:
        log.warning(
            "torch's allocator holds %s for %s of tensors of %s, whose budget is %s%s. %s; %s",
            format_bytes(held.reserved_bytes),
            format_bytes(held.peak_bytes),
            self._executor.name,
            format_bytes(held.budget_bytes),
            ", and had to free memory in mid-step to make room" if held.was_short else "",
            what,
            fix(held.reserved_bytes),
        )

    def follow(self, other: "AllocatorGaps") -> None:
        """Leave room for what `other` found, the gaps of a model that runs in turn."""
        self.nbytes, self._is_over = other.nbytes, other._is_over


def missing_bytes(error: NoFeasiblePlan, budget_bytes: int) -> int:
    """Return by how many bytes less room is asked for beside the next plan after `error`, under `budget_bytes`."""
    return error.needed_bytes - error.budget_bytes + budget_bytes // _ASKED_DIVISOR


def fix(held_bytes: int) -> str:
    """Return how a user gets by with `held_bytes`, which the allocator holds, or with fewer gaps."""
    return f"device_memory={held_bytes} is enough for what it holds{other_segments('; or try ')}"
