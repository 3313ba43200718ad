"""Plan a step in several forms and take the best: with its loss whole or in chunks, in micro-batches, and with
optimizer state in fewer bytes.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

from elixir_compile.base.errors import NoFeasiblePlan
from elixir_compile.base.options import Options
from elixir_compile.base.units import MIB, format_bytes
from elixir_compile.ir import Decision, Plan, Saving, StorageId, Tier
from elixir_compile.ir.graph import LossRegion
from elixir_compile.ir.schedule import LEAST_ROWS
from elixir_compile.search.best import relaxed_bound_s, with_gib_bound_of
from elixir_compile.search.evaluator import Clock, Deadline, Evaluator, leanest
from elixir_compile.search.greedy import RULES
from elixir_compile.search.outer import (
    Lack,
    Made,
    NotTaken,
    Refusal,
    Variants,
    answer,
    answers,
    decision,
    first_of,
    in_words,
    is_worth,
    leaner,
    lowest,
    shortfall,
)
from elixir_compile.search.planner import plan
from elixir_compile.search.problem import Problem
from elixir_compile.search.space.facts import gather_facts
from elixir_compile.step.divide import micro_batches_of

# ----------------------------------------------------------------------------------------------------------------------
# Decide whether the loss of a captured graph is computed in chunks over its tokens, without all logits at once.
#
# The step is first planned with its loss whole. If this plan keeps everything on the device, chunks gain nothing. If it
# moves or drops something, or if nothing fits, the step with a chunked loss is captured and planned too, and the plan
# with the shorter step is taken. Computing the logits a second time in the backward costs a matrix product, and saves
# their bytes two or three times.
#
# `with_chosen_loss` takes the decision; `session.backend` compiles the forms of the loss that it asks for, and
# `tools.plan` plans them.


_LEAST_BYTES = 16 * MIB
"""Logits with fewer bytes are not chunked: they are not the peak of any step."""
_CHUNK_BYTES = 64 * MIB
"""Bytes of the logits of a chunk: a matrix product with so many results is as fast as a larger product."""
_MIN_CHUNKS, _MAX_CHUNKS = 8, 64
_SHARED_CHUNKS, _LEAST_CLASSES = 16, 1024
"""Chunks, and the fewest classes, on several ranks. Batches, and so logits, may differ in size between ranks, so the
number of classes decides: logits of fewer classes are rarely the peak."""
LOSS = "loss"
"""The subject of the decision about chunks."""
Unchunked = Plan | NoFeasiblePlan
"""The plan of the step with its loss as the model computes it, or the error if nothing fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """The loss region of a graph, and the number of chunks into which it could be split."""

    region: LossRegion
    num_chunks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LossAttempt:
    """A form of the loss, with which the caller captures and plans the step."""

    chunks: Chunks | None = None
    """The loss region and its number of chunks, 1 for a whole loss; None if the graph has no loss to chunk."""
    review: Callable[[Plan], Plan] | None = None
    """Given the first plan, returns the plan to use, or raises NotTaken; None if any plan is used as it is."""
    instead_of: Unchunked | None = None
    """The plan with the loss whole that a plan in chunks would replace, or the error if nothing fits."""
    is_last: bool = False
    """Whether no other attempt follows, so that the captured graph may be changed."""
    keeps_whole: bool = False
    """Whether the batch may not be divided into micro-batches under the option micro_batches="fit"."""

    @property
    def num_chunks(self) -> int | None:
        """The number of chunks, 1 for a whole loss; None if the graph has no loss to chunk."""
        return None if self.chunks is None else self.chunks.num_chunks

    def options_of(self, options: Options) -> Options:
        """Return `options` with `keeps_whole` applied."""
        return replace(options, micro_batches=1) if self.keeps_whole else options

    @property
    def cut(self) -> Chunks | None:
        """The chunks into which the loss has to be cut; None if it stays whole."""
        return self.chunks if self.chunks is not None and self.chunks.num_chunks > 1 else None


def possible_chunks(region: LossRegion | None, options: Options, *, is_shared: bool = False) -> Chunks | None:
    """Return how `region`, the loss of a graph, could be chunked; None if chunks would save little.

    If parameters are sharded over several ranks (`is_shared`), the answer is the same for all graphs that differ in
    sizes alone.
    """
    if region is None or options.activations not in ("any", "recompute"):
        return None
    if is_shared:
        is_large = region.num_classes >= _LEAST_CLASSES
        return Chunks(region=region, num_chunks=_SHARED_CHUNKS) if is_large else None
    if region.logits_bytes < _LEAST_BYTES:
        return None
    wanted = max(_MIN_CHUNKS, -(-region.logits_bytes // _CHUNK_BYTES))
    num_chunks = min(1 << (wanted - 1).bit_length(), _MAX_CHUNKS, region.num_tokens)
    return Chunks(region=region, num_chunks=num_chunks) if num_chunks > 1 else None


def decided_chunks(asked: Plan | None, alike: Iterable[int | None]) -> int | None:
    """Return the number of chunks of the loss if it is decided already, else None.

    It is the number of `asked`, the plan given by the user, or else the first number in `alike`: the numbers of earlier
    graphs of several ranks, as the other ranks may not compile again.
    """
    if asked is not None:
        return asked.loss_chunks
    return next((count for count in alike if count is not None), None)


def with_chosen_loss(
    chunks: Chunks | None,
    make: Callable[[LossAttempt], Made],
    *,
    decided: int | None = None,
    is_training: bool = True,
    is_whole_first: bool = False,
    may_put_off: bool = False,
) -> Made:
    """Return the result of `make` with the loss whole, or with its loss in `chunks` if that plan is better.

    `make` captures and plans the step with the loss of an attempt, and calls the `review` of the attempt with the plan.
    `decided` is the number of chunks if it is decided already. If the whole batch comes first (`is_whole_first`), it
    is divided into micro-batches only if it fits with neither form of the loss. If nothing fits, and what the step
    needs is not known in full, `make` may put off the refusal of the last attempt (`may_put_off`): that is in chunks.
    Raises NoFeasiblePlan if nothing fits.
    """

    def attempts() -> Variants[LossAttempt, Refusal]:
        if chunks is None:
            yield LossAttempt(is_last=True)
            return
        in_chunks = LossAttempt(chunks=chunks, review=partial(replace, loss_chunks=chunks.num_chunks), is_last=True)
        if decided is not None:
            own = replace(chunks, num_chunks=decided)
            yield replace(in_chunks, chunks=own, review=partial(replace, loss_chunks=decided))
            return
        try:
            if is_whole_first and is_training:
                try:
                    yield from _forms(chunks, keeps_whole=True)
                except NoFeasiblePlan as error:
                    if error.because or error.memory != "device":
                        raise
            yield from _forms(chunks, is_training=is_training)
        except NoFeasiblePlan as error:
            if may_put_off and error.uncounted:
                yield in_chunks
            raise

    return first_of(attempts(), make)


def _forms(chunks: Chunks, *, is_training: bool = True, keeps_whole: bool = False) -> Variants[LossAttempt, Refusal]:
    """Yield the step with its loss whole, with its loss in `chunks`, and whole again if that is taken. Raises
    NoFeasiblePlan if nothing fits."""
    whole = replace(chunks, num_chunks=1)

    def if_unpressed(plan: Plan) -> Plan:
        if is_pressed(plan):
            raise NotTaken(plan)
        return plan

    # Without a backward, chunks never make the step shorter; they are tried only if the step does not fit.
    first = LossAttempt(chunks=whole, review=if_unpressed if is_training else None, keeps_whole=keeps_whole)
    found = yield first
    if isinstance(found, NoFeasiblePlan) and found.because:  # other ranks run other graphs, and do not try chunks
        raise found.renewed()
    unchunked: Unchunked = found.plan if isinstance(found, NotTaken) else found

    def review(plan: Plan) -> Plan:
        taken = if_better(chunks, plan, unchunked)
        if taken is None:
            raise NotTaken(plan)
        return taken

    chunked = yield LossAttempt(chunks=chunks, review=review, instead_of=unchunked, keeps_whole=keeps_whole)
    if isinstance(unchunked, NoFeasiblePlan):
        raise (leaner(unchunked, chunked) if isinstance(chunked, NoFeasiblePlan) else unchunked).renewed()
    yield LossAttempt(chunks=whole, is_last=not keeps_whole, keeps_whole=keeps_whole)


def is_pressed(plan: Plan) -> bool:
    """Return whether `plan`, or that of a rank with another, keeps optimizer state off the device, or offloads or
    recomputes activations. So all ranks answer alike."""
    if any(line.is_pressed for line in plan.classes):
        return True
    is_moved = any(home.optim is not Tier.DEVICE for home in plan.placements)
    return is_moved or any(group.saving is not Saving.KEEP for group in plan.activations)


def if_better(chunks: Chunks, chunked: Plan, unchunked: Unchunked) -> Plan | None:
    """Return the plan `chunked` with the decision for it if its step is shorter than `unchunked`; else None."""
    if chunked.loss_chunks > 1:
        return chunked  # in force since an earlier capture of the same step
    if isinstance(unchunked, Plan) and not is_worth(chunked.prediction.step_s, unchunked.prediction.step_s):
        return None
    at = f" at {chunks.region.source}" if chunks.region.source else ""
    because = f"the {format_bytes(chunks.region.logits_bytes)} of logits{at} never exist whole"
    whole = [("whole", shortfall(unchunked, chunked))]
    cut = decision(LOSS, f"{chunks.num_chunks} chunks over tokens", because, others=whole)
    return replace(chunked, decisions=(*chunked.decisions, cut), loss_chunks=chunks.num_chunks)


def as_decided(plan: Plan, before: Plan) -> Plan:
    """Return `plan`, a later plan of the graph of `before`, with the decision of `before` about the loss."""
    if before.loss_chunks == 1 or plan.loss_chunks > 1:
        return plan
    decided = tuple(own for own in before.decisions if own.subject == LOSS)
    return replace(plan, decisions=(*plan.decisions, *decided), loss_chunks=before.loss_chunks)


# ----------------------------------------------------------------------------------------------------------------------
# Plan with exact moments if any plan of them fits; else choose narrower moments for the fewest bytes of parameters.
#
#     exact      needs 24.3 GiB of host memory, budget 22 GiB: 2.3 GiB too many
#     narrower   bfloat16 saves 4 bytes for each parameter: the largest parameters that save 2.3 GiB together
#
# Disk, recomputation, micro-batches and every other way to fit come first: they change no bit of the result.


SearchOfAll = Callable[[Sequence[Problem]], Sequence[Plan]]
"""Plans the problem of a rank of each class of ranks. Raises NoFeasiblePlan if a class has no plan."""
_MOST_SEARCHES = 5
"""Searches with the narrower moments of some parameters, before all of them get narrower moments."""
_SPARE = 1.02
"""The bytes to be saved, over those that were missing: buckets are padded, and the planner has other buckets then."""


def plans_with_fewest_narrower(problems: Sequence[Problem], search: SearchOfAll) -> Sequence[Plan]:
    """Return the plans of `search` for `problems`, with narrower moments for as few bytes of parameters as fit.

    `problems` are those of the classes of ranks of a step, one if all ranks follow one plan. All classes have the same
    moments. Raises NoFeasiblePlan if no plan fits even if all moments are narrower; the error names the bytes of that
    plan.
    """
    exact = answer(search, problems)
    if not isinstance(exact, NoFeasiblePlan):
        return exact
    first = problems[0]
    # A parameter in a bucket in force keeps its moments.
    fixed = {param for bucket in first.buckets for param in bucket.params}
    saved_bytes = {
        name: param.state_nbytes - nbytes
        for name, param in first.params.items()
        for dtype, nbytes in param.narrower_nbytes
        if dtype == first.narrower_dtype and param.state_dtype is None and name not in fixed
        if param.state_nbytes > nbytes
    }
    if not saved_bytes:
        raise exact.renewed()
    order = sorted(saved_bytes, key=lambda param: (-saved_bytes[param], param))
    saved_before = list(accumulate((saved_bytes[param] for param in order), initial=0))
    # The shard of all state that a rank has; of a rank without state, that of an equal shard.
    share = min((own.state[own.rank] if own.state else 0.0) or 1 / own.num_shards for own in problems)

    def variants() -> Variants[Sequence[Problem], Refusal]:
        wanted_bytes, missing = 0, exact
        for _ in range(_MOST_SEARCHES):
            assert isinstance(missing, NoFeasiblePlan)
            wanted_bytes += int(_SPARE / share * (missing.needed_bytes - missing.budget_bytes))
            chosen = order[: bisect_left(saved_before, wanted_bytes)]
            if len(chosen) == len(order):
                break
            missing = yield [with_narrower(problem, chosen) for problem in problems]
        yield [with_narrower(problem, order) for problem in problems]

    plans = first_of(variants(), search)
    return [_with_decisions(problem, plan, exact) for problem, plan in zip(problems, plans, strict=True)]


def with_narrower(problem: Problem, params: Collection[StorageId]) -> Problem:
    """Return `problem` with narrower moments for `params`, and no further choice."""
    dtype = problem.narrower_dtype
    assert dtype is not None, "only a problem with a choice has narrower moments"
    narrower = {
        name: replace(param, state_nbytes=dict(param.narrower_nbytes)[dtype], state_dtype=dtype)
        for name, param in problem.params.items()
        if name in params
    }
    return replace(problem, params={**problem.params, **narrower}, narrower_dtype=None)


def _with_decisions(problem: Problem, made: Plan, exact: NoFeasiblePlan) -> Plan:
    """Return `made` with a decision for each bucket with narrower moments; `exact` says why exact ones do not fit."""
    needed, budget = format_bytes(exact.needed_bytes), format_bytes(exact.budget_bytes)
    why = f"with exact moments the step needs {needed} of {exact.memory} memory, budget {budget}"
    decisions: list[Decision] = []
    for bucket in made.buckets:
        if bucket.state_dtype is None or any(bucket.id == old.id for old in problem.buckets):
            continue
        exact_bytes = sum(problem.params[name].state_nbytes for name in bucket.params)
        takes = f"its state takes {format_bytes(bucket.state_nbytes)} instead of {format_bytes(exact_bytes)}"
        saves_bytes = exact_bytes - bucket.state_nbytes
        decisions.append(decision(bucket.id, f"moments {bucket.state_dtype}", why, takes, saves_bytes=saves_bytes))
    # With more memory fewer moments are narrower, and the bound was proved for the narrower ones.
    return replace(made, decisions=(*made.decisions, *decisions), gib_bound_s=None)


# ----------------------------------------------------------------------------------------------------------------------
# Choose the number of micro-batches of a step together with its plan.
#
# The step is first planned on the whole batch. If this plan keeps everything on the device, micro-batches gain nothing.
# If it moves or drops something, or if nothing fits, numbers that divide the batch are searched: the two smallest that
# fit, then larger ones as long as the step gets shorter. Micro-batches have to save 1 % of the step to be taken. Under
# the option micro_batches="fit", numbers are searched only if nothing fits.
#
# The bound of the result holds for every plan in any of the numbers: it is the lowest of the bounds of all numbers that
# fit, and of those that were not searched, the relaxed optimum counts.


MICRO_BATCHES = "micro_batches"
"""The subject of the decision about the number of micro-batches."""
_ASKED = "the option micro_batches says so"
"""The reason of a number that the user asks for."""
_MOST = 64
"""The largest number of micro-batches that is tried."""
_NUM_FIRST = 2
"""So many numbers that fit are searched in any case."""
Search = Callable[[Problem, float], Plan]
"""Plans a problem within so many seconds. Raises NoFeasiblePlan."""


def plan_as_asked(problem: Problem, options: Options) -> Plan:
    """Return the plan for `problem` by the planner of `options`, which also say in how many micro-batches.

    If no plan fits, and the problem allows narrower moments, some have them: see `plans_with_fewest_narrower`. Raises
    the errors of `plan`.
    """

    def search(variant: Problem, timeout_s: float) -> Plan:
        return plan(variant, options.planner, timeout_s)

    def plan_exact(problem: Problem) -> Plan:
        # The fixed rules are there for comparison, so they change nothing that they do not name.
        is_last_resort = options.micro_batches == "fit" and options.planner not in RULES
        if problem.micro_batches == 1 and (is_last_resort or options.micro_batches == "auto"):
            return plan_divided(problem, search, options.search_timeout, is_last_resort=is_last_resort)
        made = search(problem, options.search_timeout)
        if problem.micro_batches == 1:
            return made
        is_asked = options.micro_batches == problem.micro_batches
        return _with_decision(made, problem, _ASKED if is_asked else "the plan before it has as many")

    [made] = plans_with_fewest_narrower([problem], lambda variants: [plan_exact(each) for each in variants])
    return made


def _with_decision(made: Plan, problem: Problem, because: str, others: Iterable[tuple[str, Lack]] = ()) -> Plan:
    """Return `made`, a plan in micro-batches, with the decision for their number."""
    number = micro_batches_of(made)
    graph = problem.graph
    choice = f"{number} of {graph.batch // number} rows"
    if graph.batch_size:
        choice = f"at most {number} for {graph.batch} rows"
    return replace(made, decisions=(*made.decisions, decision(MICRO_BATCHES, choice, because, others=others)))


def chosen_number(plan: Plan) -> Decision | None:
    """Return the decision about the number of micro-batches of `plan`; None if it is 1, or the number of the option."""
    if micro_batches_of(plan) == 1:
        return None
    found = (own for own in plan.decisions if own.subject == MICRO_BATCHES)
    return next((own for own in found if own.because != _ASKED), None)


def plan_divided(problem: Problem, search: Search, timeout_s: float, *, is_last_resort: bool = False) -> Plan:
    """Return the plan of `search` for `problem` on the whole batch, or in micro-batches if their plan is better.

    If micro-batches are only the last resort (`is_last_resort`), any plan on the whole batch is better. All searches
    together end after about `timeout_s` seconds. Raises the NoFeasiblePlan of the number that needs the fewest bytes if
    nothing fits.
    """
    clock = Clock()
    evaluators: dict[int, Evaluator] = {}
    floors: dict[int, int] = {}
    """By number: the smallest peak."""

    def divided(number: int) -> Problem:
        return replace(problem, micro_batches=number)

    def variants() -> Variants[int, Plan | NoFeasiblePlan]:
        whole = yield 1
        if isinstance(whole, Plan) and (is_last_resort or not is_pressed(whole)):
            return
        if isinstance(whole, NoFeasiblePlan) and whole.memory != "device":
            return
        evaluators.update({number: Evaluator(gather_facts(divided(number))) for number in numbers_to_try(problem)})
        floors.update({number: leanest(own).floor_bytes for number, own in evaluators.items()})
        steps_s: list[float] = []
        for number in evaluators:
            if floors[number] > problem.budget_bytes:
                continue
            is_shorter = len(steps_s) < _NUM_FIRST or steps_s[-1] == min(steps_s)
            if not is_shorter or (steps_s and clock.spent_s > timeout_s):
                return
            found = yield number
            steps_s += [found.prediction.step_s] if isinstance(found, Plan) else []

    def search_divided(number: int) -> Plan:
        return search(divided(number), timeout_s if number == 1 else max(1.0, timeout_s - clock.spent_s))

    found = dict(answers(variants(), search_divided))
    whole = found.pop(1)
    plans = {number: own for number, own in found.items() if isinstance(own, Plan)}
    if plans:
        return _best_number(problem, whole, plans, evaluators, floors, lambda more_s: clock.until(timeout_s + more_s))
    if isinstance(whole, Plan):
        return whole
    # The number that needs the fewest bytes says so, if they are fewer than those of the whole batch.
    number = min(floors, key=lambda key: floors[key], default=1)
    if floors.get(number, whole.needed_bytes) >= whole.needed_bytes:
        raise whole.renewed()
    error = answer(lambda number: search(divided(number), 1.0), number)
    assert isinstance(error, NoFeasiblePlan), f"{number} micro-batches need {floors[number]} bytes, and fit in fewer"
    raise error.renewed()


def _best_number(
    problem: Problem,
    whole: Plan | NoFeasiblePlan,
    plans: Mapping[int, Plan],
    evaluators: Mapping[int, Evaluator],
    floors: Mapping[int, int],
    within: Callable[[float], Deadline],
) -> Plan:
    """Return the best of `plans`, by their numbers of micro-batches, or `whole` if none is worth it, with the decision
    and with bounds over all numbers that fit: `floors` are the smallest peaks of all numbers. `within` returns the
    deadline so many seconds after that of the search.
    """
    chosen = min(plans, key=lambda number: plans[number].prediction.step_s)
    best = plans[chosen]
    searched = [*plans.values(), *([whole] if isinstance(whole, Plan) else [])]
    deadline = within(1.0)
    unsearched = (
        relaxed_bound_s(own, best.prediction.step_s, deadline)
        for number, own in evaluators.items()
        if number not in plans and floors[number] <= problem.budget_bytes
    )
    bound_s = lowest([*(plan.bound_s for plan in searched), *unsearched])
    gib_bound_s = lowest(plan.gib_bound_s for plan in searched)
    if isinstance(whole, Plan) and not is_worth(best.prediction.step_s, whole.prediction.step_s):
        made = whole
    else:

        def lack(number: int) -> str:
            if floors[number] > problem.budget_bytes:
                return f"needs {format_bytes(floors[number])}"
            if number not in plans:
                return "not searched, as smaller numbers were faster"
            return f"{plans[number].prediction.step_s / best.prediction.step_s - 1:.1%} longer"

        takes = "" if isinstance(whole, NoFeasiblePlan) else "takes "
        because = f"the whole batch at once {takes}{in_words(shortfall(whole, best))}"
        others = [(str(number), lack(number)) for number in floors if number != chosen]
        made = _with_decision(best, problem, because, others)
    made = replace(made, bound_s=None if made.bound_s is None else bound_s, gib_bound_s=gib_bound_s)
    # With more memory other numbers fit, and the whole batch at once.
    others = [evaluator for number, evaluator in evaluators.items() if number not in plans]
    others += [] if isinstance(whole, Plan) else [Evaluator(gather_facts(problem))]
    return with_gib_bound_of(made, others, within(2.0))


def numbers_to_try(problem: Problem) -> list[int]:
    """Return the numbers of micro-batches to try: of the divisors of the batch from 2 to 64, one in each doubling, a
    power of two if there is one. On several ranks they divide the batch of each. A dynamic number of rows needs no
    divisor. Empty if nothing can be divided, or if several ranks have a dynamic number of rows each."""
    graph = problem.graph
    if not graph.is_training or (graph.batch_size and problem.cluster.num_ranks > 1):
        return []
    rows = graph.batch if problem.common_rows is None else problem.common_rows
    found: list[int] = []
    for power in (2, 4, 8, 16, 32, 64):
        if graph.batch_size:
            found += [power] if power * LEAST_ROWS <= graph.batch else []
            continue
        divisors = [number for number in range(power, 2 * power) if rows % number == 0 and number <= _MOST]
        found += divisors[:1]
    return [number for number in found if replace(problem, micro_batches=number).laps(())]
