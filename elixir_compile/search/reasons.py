"""Turn the draft plan that a search has chosen into a `Plan`, with its placements, its schedule and its prediction, and
say why it decides as it does.

`write_out` makes the plan: each bucket gets the placement of its level, and `search.schedule` lists the actions.
`decisions` are reasons in words; what runs obeys the placements and the schedule.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
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
    Tier,
    WholeUpdate,
    fingerprint,
    kernels_digest,
)
from elixir_compile.ir.cost import streamed_copies, update_s, whole_update_s
from elixir_compile.ir.hardware import Cluster
from elixir_compile.ir.hardware.table import PeakShare
from elixir_compile.search.evaluator import Deadline, DraftPlan, Evaluator
from elixir_compile.search.formulation.cross_step_updates import HOST_MEMORY
from elixir_compile.search.formulation.flow_shop import longest_s
from elixir_compile.search.formulation.milp import Milp, Vector
from elixir_compile.search.outer import Lack, Over, decision, fitting
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
from elixir_compile.search.space.facts import Change, Facts
from elixir_compile.search.space.profiles import num_ahead
from elixir_compile.search.transfers import update_decisions
from elixir_compile.step.plan_rows import calls_by_program
from elixir_compile.step.seconds import further_call, hidden_update_share, prediction_of, simulate
from elixir_compile.step.timeline import peak_formula, plan_timeline, with_ring_traffic

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
    found = {own.subject: own for own in draft.decisions}
    for i, bucket in enumerate(facts.buckets):
        name = str(bucket.id)
        before = None if facts.quotas else found.get(name)
        because = f"by {SUBJECT} static: {_reason(facts, draft.levels, i)}"
        own = decision(name, level_text(draft.levels[i]), because, *([] if before is None else [before.because]))
        found[name] = own if before is None else replace(before, choice=own.choice, because=own.because)
    because = f"the options fix it; in whole buckets: {', '.join(_totals(facts, draft.levels))}"
    return (decision(SUBJECT, f"static, {fractions}", because), *found.values())


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
    products_s, moved_s = _whole_updates_s(milp, x)
    if products_s >= moved_s and products_s > milp.lower_s(x) / 2:
        labels.append(f"updates of whole tensors: compute-bound, {format_s(products_s)} of matrix products")
    fullest = int(live_bytes.argmax())
    if live_bytes[fullest] >= facts.problem.budget_bytes * _FULL:
        op = facts.graph.ops[milp.memory.highest_op(fullest)]
        labels.append(f"device memory is full at {op.id}")
    host = milp.host_constraint
    if host.values @ x[host.columns] >= host.limit * _FULL:
        labels.append("host memory is full")
    return tuple(dict.fromkeys(labels))


def _whole_updates_s(milp: Milp, x: Vector) -> tuple[float, float]:
    """Return the seconds of matrix products, and the seconds of memory traffic, of the updates of whole tensors that
    run on the device at x."""
    facts, products_s, moved_s = milp.evaluator.facts, 0.0, 0.0
    for i, bucket in enumerate(facts.buckets):
        if bucket.own_update is not None:
            here = [(i, level) for level in facts.choices[i] if not level.has_state_on_host]
            here += [choice for (streamed, _), choice in milp.streams.items() if streamed == i]
            share = x[[milp.choices[choice] for choice in here]].sum()
            own_s = whole_update_s(bucket.own_update, Tier.DEVICE, facts.problem.cluster)
            products_s, moved_s = products_s + share * own_s[0], moved_s + share * own_s[1]
    return products_s, moved_s


_NUM_REJECTED = 6
"""Rejected options that a decision names: those that add the fewest seconds, then those least over a budget. A bucket
has no more options."""
_MAX_PRICED = 600
"""Rejected options of all decisions together whose seconds are computed; computing one takes a millisecond or more."""
_DECIDED_AT_ONCE = 64
"""Decisions whose seconds are computed together."""


def decisions(milp: Milp, draft: DraftPlan, deadline: Deadline | None = None) -> tuple[Decision, ...]:
    """Return a decision on every bucket of `draft` that moves, and on every layer that recomputes or offloads.

    Decisions made after the `deadline` have no cost and no rejected options.
    """
    facts = milp.evaluator.facts
    changes = list(facts.changes(draft.candidate.options))
    if not changes:
        return ()
    x = milp.vector(draft.candidate, draft.moves.streamed)
    num_priced = max(1, min(_NUM_REJECTED, _MAX_PRICED // len(changes)))
    chosen = _Chosen(milp, x, milp.live_bytes(x), milp.host_bytes(x), milp.lower_s(x))
    found: list[Decision] = []
    for at in range(0, len(changes), _DECIDED_AT_ONCE):
        part = [(change, *_alternatives(chosen, change, num_priced)) for change in changes[at : at + _DECIDED_AT_ONCE]]
        is_over = deadline is not None and deadline.is_over
        asked = (
            []
            if is_over
            else [other.x for _, at_start, within, _ in part for other in (at_start, *(own for own, _ in within))]
        )
        added_s = iter((milp.lower_each_s(asked) - chosen.step_s).tolist())
        for change, at_start, within, over in part:
            before = facts.text_of(change.i, change.before)
            saves_bytes = at_start.peak_bytes - chosen.peak_bytes
            because = f"the peak would be {format_bytes(saves_bytes)} higher with {before}"
            if saves_bytes <= 0:
                more = format_bytes(int(at_start.more_bytes.max()))
                because = f"the peak would be no higher with {before}, but elsewhere up to {more} less would be free"
            cost_s, others = 0.0, list[tuple[str, Lack]]()
            if not is_over:
                cost_s = -next(added_s)
                priced = sorted(((max(0.0, next(added_s)), text) for _, text in within), key=lambda own: own[0])
                others = [
                    (text, own_s or "no shorter once the times of transfers are simulated") for own_s, text in priced
                ]
                others += over
            found.append(
                decision(
                    facts.subject_of(change.i),
                    facts.text_of(change.i, change.now),
                    because,
                    others=others[:_NUM_REJECTED],
                    cost_s=cost_s,
                    saves_bytes=saves_bytes,
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

    def with_option(self, change: Change, option: int) -> "_Other":
        """Return the candidate with another `option` for the bucket or layer of `change`."""
        choices = self.milp.choices
        return _Other(self, choices[change.i, change.now], choices[change.i, option])


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
    def x(self) -> Vector:
        x = self.chosen.x.copy()
        x[self.now], x[self.column] = 0.0, 1.0
        return x


def _alternatives(
    chosen: _Chosen, change: Change, num_priced: int
) -> tuple["_Other", list[tuple["_Other", str]], list[tuple[str, Lack]]]:
    """Return the option that `change` replaces, and every other one: those that fit with their names, and those over a
    budget with the bytes over it, the fewest first.

    Of the options that fit, only the `num_priced` with the highest peak are returned.
    """
    facts = chosen.milp.evaluator.facts
    within: list[tuple[_Other, str]] = []
    over: list[tuple[int, int, str, Lack]] = []
    for option in facts.options[change.i]:
        if option == change.now:
            continue
        other, text = chosen.with_option(change, option), facts.text_of(change.i, option)
        over_bytes = other.peak_bytes - facts.problem.budget_bytes
        host_over_bytes = other.host_bytes - facts.problem.host_budget_bytes
        if over_bytes > 0:
            over.append((1, over_bytes, text, Over(over_bytes)))
        elif host_over_bytes > 0:
            over.append((2, host_over_bytes, text, Over(host_over_bytes, "the host's memory")))
        else:
            within.append((other, text))
    within.sort(key=lambda entry: -entry[0].peak_bytes)
    over.sort(key=lambda entry: entry[:2])
    return chosen.with_option(change, change.before), within[:num_priced], [(text, lack) for _, _, text, lack in over]


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
    made = replace(unpredicted, prediction=prediction, formula=peak_formula(problem.graph, unpredicted))
    said = list(draft.decisions) or [decision("every bucket", "stays where it is", fitting(made))]
    if draft.moves.residencies:
        distances, number = Counter(num_ahead(draft.moves.residencies)), len(draft.moves.residencies)
        ahead = sorted(distances.items(), reverse=True)
        choice = ", ".join(f"{count} of {number} copies {windows} windows early" for windows, count in ahead)
        said.append(decision("prefetch", choice, "as far as memory allows"))
    said += unused_memory(made)
    said += update_decisions(evaluator, draft.levels, draft.moves, hidden_update_share(record))
    said += whole_update_decisions(problem.cluster, made)
    return replace(made, decisions=tuple(said))


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


def whole_update_decisions(cluster: Cluster, made: Plan) -> tuple[Decision, ...]:
    """Return a decision on the updates of whole tensors by the device, and one on those by the host, with what binds
    them: matrix products, or memory."""
    found: list[Decision] = []
    for tier, where in ((Tier.DEVICE, "on the device"), (Tier.HOST, "on the host")):
        each = [
            bucket
            for bucket in made.buckets
            if bucket.whole_update is not None and made.placement(bucket.id).update is tier
        ]
        if not each:
            continue
        whole = WholeUpdate.of_all([own.own_update for own in each if own.own_update is not None])
        products_s, moved_s = whole_update_s(whole, tier, cluster)
        because = f"memory-bound: {format_s(moved_s)} of reads and writes"
        if products_s >= moved_s:
            because = f"compute-bound: {format_s(products_s)} of matrix products"
        num_streamed = sum(made.placement(bucket.id).streamed for bucket in each)
        if num_streamed:
            homes = [(bucket, made.placement(bucket.id)) for bucket in each]
            copies = [streamed_copies(own, at.param, cluster) for own, at in homes if at.streamed]
            because += f", beside {format_s(sum(own.there_s for own in copies))} of copies each way"
        if tier is Tier.HOST:
            because += f"; the device would take {format_s(sum(update_s(own, Tier.DEVICE, cluster) for own in each))}"
        because += f"; {format_bytes(whole.work_nbytes)} of work space"
        choice = f"{len(each)} of {len(made.buckets)} buckets {where}, {num_streamed} of them streamed"
        found.append(decision("updates of whole tensors", choice, because))
    return tuple(found)


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
        peak_share=_peak_share(problem),
        symbols=problem.graph.symbols,
        kernels=kernels_digest(problem.graph),
    )
    return with_ring_traffic(problem.graph, made, problem.cluster)


def _peak_share(problem: Problem) -> PeakShare | None:
    """Return the share that the rates of the dtype with the most FLOPs of `problem` are of a data sheet."""
    dtypes = {storage.id: storage.dtype for storage in problem.graph.storages}
    flops: Counter[str] = Counter()
    for op in problem.graph.ops:
        flops[dtypes[op.writes[0]] if op.writes else "float32"] += op.flops
    shares = problem.cluster.device.shares or {}
    return shares.get(max(flops, key=flops.__getitem__, default="float32"), shares.get("float32"))


_MAX_GAP, _MAX_EXPOSED = 0.01, 0.01
"""If a search ends with a larger gap, and a larger share of the step exposed, the unused memory is reported."""


def unused_memory(made: Plan) -> tuple[Decision, ...]:
    """Return a decision that reports unused memory, if transfers are exposed and the search ended with a gap.

    Return none if the gap is small, if few seconds are exposed, or if the largest bucket is larger than the free bytes.
    """
    prediction = made.prediction
    if made.bound_s is None or not made.buckets:
        return ()
    free_bytes = made.budget_bytes - prediction.device_peak_bytes
    gap = 1.0 - made.bound_s / prediction.step_s if prediction.step_s else 0.0
    is_exposed = prediction.exposed_s > _MAX_EXPOSED * prediction.step_s
    if gap <= _MAX_GAP or not is_exposed or free_bytes < max(bucket.flat_nbytes for bucket in made.buckets):
        return ()
    exposed = f"{format_s(prediction.exposed_s)} of transfers are exposed"
    choice = f"{format_bytes(free_bytes)} of {format_bytes(made.budget_bytes)} are unused while {exposed}"
    return (decision("memory", choice, f"the search ended with a gap of {gap:.1%} before it found a use for them"),)
