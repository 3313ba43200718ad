"""Why a plan decides as it does: the decisions of a policy in words, and the writing of a plan with them."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from elixir_compile.base.units import format_bytes, format_s
from elixir_compile.ir import (
    Activations,
    Bucket,
    Decision,
    OpId,
    Placement,
    Plan,
    Prediction,
    Record,
    Region,
    Schedule,
    fingerprint,
    kernels_digest,
)
from elixir_compile.search.evaluator import Deadline, DraftPlan, Evaluator
from elixir_compile.search.formulation.cross_step_updates import HOST_MEMORY
from elixir_compile.search.formulation.flow_shop import longest_s
from elixir_compile.search.formulation.milp import Milp, Vector
from elixir_compile.search.problem import Problem, update_time
from elixir_compile.search.schedule import cut_regions, regions, schedule, step_actions
from elixir_compile.search.space.buckets import (
    OPTIM,
    OPTIONS,
    PARAM,
    SHARD,
    Level,
    counts,
    fraction_of,
    level_text,
    meets,
    placement_of,
)
from elixir_compile.search.space.facts import Facts
from elixir_compile.search.space.layers import mode_text
from elixir_compile.search.space.profiles import num_ahead
from elixir_compile.search.transfers import update_decisions
from elixir_compile.step.plan_rows import calls_by_program
from elixir_compile.step.seconds import further_call, hidden_update_share, prediction_of, simulate
from elixir_compile.step.timeline import peak_formula, plan_timeline, tensor_traffic

# ----------------------------------------------------------------------------------------------------------------------
# Decisions of a plan whose user fixed fractions: the fractions that place each bucket, and how exactly they fit.


SUBJECT = "placement_policy"
_DONE = {SHARD: "released after each use", OPTIM: "with their state on the host", PARAM: "on the host"}


def policy_decisions(facts: Facts, draft: DraftPlan) -> tuple[Decision, ...]:
    """Return the decisions of `draft`, and why each bucket is where it is, if the user fixed fractions.

    The reasons, costs and rejected options that the search found for a bucket stay, unless there is a quota: they
    compare a move of the bucket alone, which a quota seldom allows.
    """
    fractions = facts.problem.fractions
    if fractions is None:
        return draft.decisions
    found = {decision.subject: decision for decision in draft.decisions}
    for i, bucket in enumerate(facts.buckets):
        name = str(bucket.id)
        before = None if facts.quotas else found.get(name)
        because = f"by {SUBJECT} static: {_reason(facts, draft.levels, i)}"
        found[name] = Decision(
            subject=name,
            choice=level_text(draft.levels[i]),
            because=because if before is None else f"{because}; {before.because}",
            cost_s=0.0 if before is None else before.cost_s,
            saves_bytes=0 if before is None else before.saves_bytes,
            rejected=() if before is None else before.rejected,
        )
    because = f"the options fix it; in whole buckets: {', '.join(_totals(facts, draft.levels))}"
    return (Decision(subject=SUBJECT, choice=f"static, {fractions}", because=because), *found.values())


def _totals(facts: Facts, levels: Sequence[Level]) -> Iterator[str]:
    """Yield, for each option that counts any element, how many of them meet it at `levels`."""
    for option in OPTIONS:
        counted = [i for i, bucket in enumerate(facts.buckets) if counts(option, bucket)]
        total = sum(facts.buckets[i].numel for i in counted)
        met = sum(facts.buckets[i].numel for i in counted if meets(option, levels[i]))
        if total:
            yield f"{met / total:.1%} of {total} elements {_DONE[option]}"


def _reason(facts: Facts, levels: Sequence[Level], i: int) -> str:
    """Return how each option bears on bucket number i: the option fixes it, or chose it, or did not choose it."""
    fractions = facts.problem.fractions
    assert fractions is not None, "only plans with fractions have these decisions"
    quotas = {quota.option: quota for quota in facts.quotas}
    parts: list[str] = []
    for option in OPTIONS:
        if not counts(option, facts.buckets[i]):
            continue
        text = f"{option} {fraction_of(fractions, option)}"
        quota = quotas.get(option)
        if quota is not None:
            num_counted = sum(numel > 0 for numel in quota.numels)
            num_met = sum(numel > 0 and meets(option, level) for numel, level in zip(quota.numels, levels, strict=True))
            which = "one" if meets(option, levels[i]) else "not one"
            text += f" ({which} of the {num_met} of {num_counted} buckets {_DONE[option]})"
        parts.append(text)
    return ", ".join(parts)


# ----------------------------------------------------------------------------------------------------------------------
# Explain a draft plan: decisions with their reasons, and the limits that the relaxed optimum reaches.


_FULL = 1 - 1e-3


def binding(milp: Milp, x: Vector) -> tuple[str, ...]:
    """Return the limits reached at the relaxed optimum x: for each phase how its longest path divides over lanes, and
    full memories. A longer path that crosses several phases replaces the labels of these phases."""
    facts, live_bytes = milp.evaluator.facts, milp.live_bytes(x)
    sides = [max((phase.longest(x) for phase in side), key=lambda path: path.seconds) for side in milp.phases]
    across = max((phase.longest(x) for phase in milp.across), key=lambda path: path.seconds, default=None)
    labels = [side.label for side in sides]
    whole = next((shop for shop in milp.whole_step if longest_s(shop, x) >= milp.lower_s(x)), None)
    if whole is not None:
        labels = ["step: host memory is busy" if whole.name == HOST_MEMORY else whole.longest(x).label]
    elif across is not None and across.seconds > sum(sides[number].seconds for number in milp.spanned):
        names = " and ".join(side[0].name for number, side in enumerate(milp.phases) if number in milp.spanned)
        rest = [side.label for number, side in enumerate(sides) if number not in milp.spanned]
        labels = [f"{names}: {across.label.partition(': ')[2]}", *rest]
    fullest = int(live_bytes.argmax())
    if live_bytes[fullest] >= facts.problem.budget_bytes * _FULL:
        op = facts.graph.ops[milp.memory.highest_op(fullest)]
        labels.append(f"device memory is full at {op.id}")
    host = milp.host_constraint
    if host.values @ x[host.columns] >= host.limit * _FULL:
        labels.append("host memory is full")
    return tuple(dict.fromkeys(labels))


_NUM_REJECTED = 6
"""Rejected options that a decision names: those that add the fewest seconds, then those least over a budget. A bucket
has no more options."""
_MAX_PRICED = 600
"""Rejected options of all decisions together whose seconds are computed; computing one takes a millisecond or more."""


def decisions(milp: Milp, draft: DraftPlan, deadline: Deadline | None = None) -> tuple[Decision, ...]:
    """Return a decision on every bucket of `draft` that moves, and on every layer that recomputes or offloads.

    Decisions made after the `deadline` have no cost and no rejected options.
    """
    facts = milp.evaluator.facts
    changes: list[tuple[str, _Change]] = []
    for i, (bucket, level, start) in enumerate(zip(facts.buckets, draft.levels, facts.start_levels, strict=True)):
        if level is not start:
            texts = {int(other): level_text(other) for other in facts.choices[i]}
            changes.append((bucket.id, _Change(i, level, start, texts)))
    for i, (layer, mode) in enumerate(zip(facts.layers, draft.modes, strict=True), start=len(facts.buckets)):
        if mode:
            texts = {other: mode_text(layer, layer.modes[other]) for other in range(len(layer.modes))}
            changes.append((layer.name or "step", _Change(i, mode, 0, texts)))
    if not changes:
        return ()
    x = milp.vector(draft.candidate, draft.moves.streamed)
    num_priced = max(1, min(_NUM_REJECTED, _MAX_PRICED // len(changes)))
    chosen = _Chosen(milp, x, milp.live_bytes(x), milp.host_bytes(x), milp.lower_s(x))
    found: list[Decision] = []
    for subject, change in changes:
        at_start, before = chosen.with_option(change, change.before), change.texts[change.before]
        saves_bytes = at_start.peak_bytes - chosen.peak_bytes
        because = f"the peak would be {format_bytes(saves_bytes)} higher with {before}"
        if saves_bytes <= 0:
            more = format_bytes(int(at_start.more_bytes.max()))
            because = f"the peak would be no higher with {before}, but elsewhere up to {more} less would be free"
        is_over = deadline is not None and deadline.is_over
        others = [] if is_over else sorted(_alternatives(chosen, change, num_priced), key=lambda other: other.rank)
        found.append(
            Decision(
                subject=subject,
                choice=change.texts[change.now],
                because=because,
                cost_s=0.0 if is_over else max(0.0, chosen.step_s - at_start.step_s),
                saves_bytes=saves_bytes,
                rejected=tuple(other.text for other in others[:_NUM_REJECTED]),
            )
        )
    return tuple(found)


class _Chosen(NamedTuple):
    """The candidate to explain, as a vector of the MILP, with its bytes and its lower bound in seconds."""

    milp: Milp
    x: Vector
    live_bytes: Vector
    host_bytes: int
    step_s: float

    @property
    def peak_bytes(self) -> int:
        return int(self.live_bytes.max())

    def with_option(self, change: "_Change", option: int) -> "_Other":
        """Return the candidate with another `option` for the bucket or layer of `change`."""
        choices = self.milp.choices
        return _Other(self, choices[change.i, change.now], choices[change.i, option])


class _Change(NamedTuple):
    """Bucket or layer number i has option `now` instead of option `before`; `texts` describe all its options."""

    i: int
    now: int
    before: int
    texts: Mapping[int, str]


class _Other(NamedTuple):
    """The chosen candidate with another option for a bucket or layer: column `column` of the MILP for `now`."""

    chosen: _Chosen
    now: int
    column: int

    @property
    def more_bytes(self) -> Vector:
        bytes_of = self.chosen.milp.bytes_of
        return bytes_of[:, self.column] - bytes_of[:, self.now]

    @property
    def peak_bytes(self) -> int:
        return int((self.chosen.live_bytes + self.more_bytes).max())

    @property
    def host_bytes(self) -> int:
        x = np.zeros(len(self.chosen.x))
        x[self.column], x[self.now] = 1.0, -1.0
        return self.chosen.host_bytes + self.chosen.milp.host_bytes(x)

    @property
    def step_s(self) -> float:
        x = self.chosen.x.copy()
        x[self.now], x[self.column] = 0.0, 1.0
        return self.chosen.milp.lower_s(x)


class _Alternative(NamedTuple):
    rank: tuple[int, float]
    """Fitting options first, by added seconds; then options over a budget, by bytes over it."""
    text: str


def _alternatives(chosen: _Chosen, change: _Change, num_priced: int) -> list[_Alternative]:
    """Return every other option of `change` with its effect.

    Of the options that fit, only the `num_priced` with the highest peak get seconds; the rest are left out.
    """
    problem, found = chosen.milp.evaluator.facts.problem, []
    fitting: list[tuple[int, _Other, str]] = []
    for option, text in change.texts.items():
        if option == change.now:
            continue
        other = chosen.with_option(change, option)
        peak_bytes = other.peak_bytes
        over_bytes = peak_bytes - problem.budget_bytes
        host_over_bytes = other.host_bytes - problem.host_budget_bytes
        if over_bytes > 0:
            found.append(_Alternative((1, over_bytes), f"{text}: {format_bytes(over_bytes)} over the budget"))
        elif host_over_bytes > 0:
            over = format_bytes(host_over_bytes)
            found.append(_Alternative((2, host_over_bytes), f"{text}: {over} over the host's memory"))
        else:
            fitting.append((peak_bytes, other, text))
    for _, other, text in sorted(fitting, key=lambda entry: -entry[0])[:num_priced]:
        added_s = max(0.0, other.step_s - chosen.step_s)
        longer = f"{format_s(added_s)} longer" if added_s else "no shorter once the times of transfers are simulated"
        found.append(_Alternative((0, added_s), f"{text}: {longer}"))
    return found


# ----------------------------------------------------------------------------------------------------------------------
# Write a draft plan out as a plan: its regions, its schedule, its simulated prediction and its decisions.


def write_out(evaluator: Evaluator, draft: DraftPlan) -> Plan:
    """Return `draft` as a plan."""
    evaluator = evaluator.at(draft.modes)
    draft = replace(draft, decisions=policy_decisions(evaluator.facts, draft))
    facts, problem = evaluator.facts, evaluator.facts.problem
    # The search counts more bytes than several calls hold at once, so its bound is none for the plans of such a step.
    proved = draft.certificate if problem.calls.num == 1 else None
    unpredicted = written(facts, draft)
    if proved is not None:
        unpredicted = replace(
            unpredicted, bound_s=proved.bound_s, binding=proved.binding, gib_bound_s=proved.gib_bound_s
        )
    prediction, record = predicted(problem, unpredicted)
    said = list(draft.decisions)
    if not said:
        fit = f"the peak of {format_bytes(prediction.device_peak_bytes)} fits {format_bytes(unpredicted.budget_bytes)}"
        said.append(Decision(subject="every bucket", choice="stays where it is", because=fit))
    if draft.moves.residencies:
        distances, number = Counter(num_ahead(draft.moves.residencies)), len(draft.moves.residencies)
        ahead = sorted(distances.items(), reverse=True)
        choice = ", ".join(f"{count} of {number} copies {windows} windows early" for windows, count in ahead)
        said.append(Decision(subject="prefetch", choice=choice, because="as far as memory allows"))
    return replace(
        unpredicted,
        prediction=prediction,
        decisions=(
            *said,
            *unused_memory(unpredicted, prediction),
            *update_decisions(evaluator, draft.levels, draft.moves, hidden_update_share(record)),
        ),
        formula=peak_formula(problem.graph, unpredicted),
    )


def written(facts: Facts, draft: DraftPlan) -> Plan:
    """Return `draft`, whose modes are those of `facts`, as a plan without a prediction."""
    cuts = cut_regions(facts, draft.levels, draft.moves)
    actions = step_actions(facts, draft.levels, draft.moves, cuts)
    buckets = enumerate(zip(facts.buckets, draft.levels, strict=True))
    streamed = draft.moves.streamed
    placements = tuple(placement_of(bucket, level, streamed=i in streamed) for i, (bucket, level) in buckets)
    made = regions(facts, cuts)
    return unpredicted_plan(
        facts.problem, facts.buckets, placements, facts.activations, made, schedule(actions), draft.planner
    )


def predicted(problem: Problem, plan: Plan) -> tuple[Prediction, Record]:
    """Return the prediction of a step of `plan`, which answers `problem`, and the record of one call of a step.

    The record has the gathers, reduces and updates of the step. Each further call takes the seconds of its regions
    and of its waits for activations.
    """
    graph = problem.graph
    peak = plan_timeline(graph, plan).peak
    record = simulate(graph, plan, problem.cluster, problem.measured)
    prediction = prediction_of(record, peak.nbytes, peak.op)
    if plan.calls.num == 1:
        return prediction, record
    step_s, exposed_s = prediction.step_s, prediction.exposed_s
    for num, own in calls_by_program(plan):
        call = further_call(graph, own, problem.cluster, problem.measured)
        further = num - (own is plan)  # the record has one full call
        step_s += further * call.step_s
        exposed_s += further * call.exposed_s
    return replace(prediction, step_s=step_s, exposed_s=exposed_s), record


_NOTHING = Prediction(
    step_s=0.0, exposed_s=0.0, hidden_share=1.0, device_peak_bytes=0, device_peak_at=OpId(""), host_peak_bytes=0
)


def unpredicted_plan(
    problem: Problem,
    buckets: Sequence[Bucket],
    placements: tuple[Placement, ...],
    activations: tuple[Activations, ...],
    regions: tuple[Region, ...],
    schedule: Schedule,
    planner: str,
) -> Plan:
    """Return the plan of `planner` for `problem`, with an empty prediction and without decisions."""
    made = Plan(
        name=problem.name,
        graph=fingerprint(problem.graph),
        cluster=problem.cluster.name,
        num_copies=problem.num_copies,
        rank=problem.rank,
        shares=problem.shares,
        budget_bytes=problem.budget_bytes,
        base_bytes=problem.base_bytes,
        buckets=tuple(buckets),
        placements=placements,
        activations=activations,
        calls=problem.calls,
        update=update_time(problem, placements),
        regions=regions,
        schedules=(schedule,),
        decisions=(),
        prediction=_NOTHING,
        planner=planner,
        symbols=problem.graph.symbols,
        kernels=kernels_digest(problem.graph),
    )
    return replace(made, tensor=tensor_traffic(problem.graph, made, problem.cluster))


_MAX_GAP, _MAX_EXPOSED = 0.01, 0.01
"""If a search ends with a larger gap, and a larger share of the step exposed, the unused memory is reported."""


def unused_memory(made: Plan, prediction: Prediction) -> tuple[Decision, ...]:
    """Return a decision that reports unused memory, if transfers are exposed and the search ended with a gap.

    Return none if the gap is small, if few seconds are exposed, or if the largest bucket is larger than the free bytes.
    """
    if made.bound_s is None or not made.buckets:
        return ()
    free_bytes = made.budget_bytes - prediction.device_peak_bytes
    gap = 1.0 - made.bound_s / prediction.step_s if prediction.step_s else 0.0
    is_exposed = prediction.exposed_s > _MAX_EXPOSED * prediction.step_s
    if gap <= _MAX_GAP or not is_exposed or free_bytes < max(bucket.flat_nbytes for bucket in made.buckets):
        return ()
    exposed = f"{format_s(prediction.exposed_s)} of transfers are exposed"
    return (
        Decision(
            subject="memory",
            choice=f"{format_bytes(free_bytes)} of {format_bytes(made.budget_bytes)} are unused while {exposed}",
            because=f"the search ended with a gap of {gap:.1%} before it found a use for them",
        ),
    )
