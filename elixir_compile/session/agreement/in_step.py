"""Plan for ranks whose graphs differ, for instance by a branch of the forward that depends on data.

```text
  uses       every rank: which parameters its graph reads and trains
  capture    every rank: parameters of other ranks' graphs are added to its graph by `graph.capture.additions`
  facts      as for any plan, see `agreement`
  buckets    the leader forms buckets of the parameters of all ranks
  homes      every rank: under which placements its own step fits; the first placements that fit on all ranks are taken
```

Ranks that use the same parameters first try one plan for all: ops may differ a little, see `rank_facts`.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from elixir_compile.base.codec import Form, from_json, to_json
from elixir_compile.base.errors import NoFeasiblePlan, PlanFileError
from elixir_compile.base.options import Options
from elixir_compile.graph.capture.additions import trained_keys, with_absent
from elixir_compile.graph.capture.convert import Captured
from elixir_compile.ir import Bucket, Plan
from elixir_compile.runtime.distributed.control import ControlChannel
from elixir_compile.runtime.distributed.errors import RanksDiffer, ranks_text
from elixir_compile.runtime.executor import Executor
from elixir_compile.search import Problem
from elixir_compile.search.joint.ranks import Homes, homes_in_step, plan_in_step
from elixir_compile.search.space.buckets import form_buckets
from elixir_compile.session.agreement.agreement import (
    agreed_facts,
    agreed_plan,
    asked_by_all,
    ranks_at,
    run_on_all_ranks,
    settings_of,
)
from elixir_compile.session.agreement.rank_facts import Divide, RankFacts, digest_of, leader_of
from elixir_compile.session.planning import ExternalUsage, graph_of, problem_of
from elixir_compile.step.collectives import collectives_of

log = logging.getLogger("elixir_compile")

_MOST_NAMED = 3
"""Parameters that the reason of a decision names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Buckets:
    """The buckets of all ranks, as a value with a JSON form."""

    buckets: tuple[Bucket, ...]


_BUCKETS = Form(what="buckets", version=1, error=PlanFileError)


def planned_in_step(
    executor: Executor,
    captured: Captured,
    options: Options,
    sizes: Mapping[str, int],
    search: Callable[[Problem], Plan],
) -> tuple[Captured, Problem, Plan]:
    """Return `captured` with the parameters of other ranks' graphs added, its problem, and its plan.

    `sizes` are the values of its symbols. `search` is called if all ranks use the same parameters. All ranks of
    `executor` must call this.

    Raises RanksDiffer if models or settings differ, or if some ranks train and others do not, and NoFeasiblePlan on all
    ranks if the step of any rank does not fit.
    """
    assert executor.peers is not None
    control = executor.peers.control
    uses = _uses_of_all(control, executor, captured)

    def ask() -> tuple[Captured, Problem]:
        joint = _joined(executor, captured, uses)
        external = ExternalUsage(outstanding_bytes=executor.saved.held_bytes())
        return joint, problem_of(joint, graph_of(joint, executor, sizes), executor, options, external)

    joint, problem = asked_by_all(executor, ask)
    if all(use == uses[0] for use in uses):
        try:
            return joint, problem, agreed_plan(control, problem, search, settings=settings_of(options))
        except RanksDiffer as error:
            log.debug("%s: %s", captured.name, error)
    _, facts = agreed_facts(control, problem, settings_of(options))
    buckets = _buckets_of_all(control, problem, leader_of(facts))
    because = _because(control, uses, facts) + ("" if options.plan is None else "; the plan asked for is not followed")
    log.log(logging.INFO if options.plan is None else logging.WARNING, "%s: %s", captured.name, because)
    return joint, problem, _fitting(control, problem, buckets, because)


def _uses_of_all(control: ControlChannel, executor: Executor, captured: Captured) -> list[Mapping[str, list[str]]]:
    """Return the names of the parameters read and trained by the graph of each rank."""
    trained = trained_keys(captured)
    slots = executor.slots.values()
    model = digest_of(f"{slot.name} {slot.param.dtype} {tuple(slot.param.shape)}" for slot in slots)
    own = {
        "kind": "inference" if captured.backward is None else "training",
        "model": model,
        "reads": sorted(captured.param_names.values()),
        "trains": sorted(slot.name for slot in slots if slot.key in trained),
    }
    said = [json.loads(text) for text in control.exchange(json.dumps(own), "parameters in use")]
    for name, sentence in (("model", "{} another model than {}"), ("kind", "{} a graph of {odd}, {} one of {usual}")):
        divide = Divide.of([use[name] for use in said])
        if divide.odd:
            odd = ranks_at(control, divide.odd)
            have = f"{ranks_text(odd)} {'has' if len(odd) == 1 else 'have'}"
            usual, kinds = ranks_text(ranks_at(control, [divide.usual])), {"odd": said[divide.odd[0]][name]}
            raise RanksDiffer(odd, [sentence.format(have, usual, **kinds, usual=said[divide.usual][name])])
    return [{name: use[name] for name in ("reads", "trains")} for use in said]


def _joined(executor: Executor, captured: Captured, uses: Sequence[Mapping[str, list[str]]]) -> Captured:
    """Return `captured` with the parameters of all ranks."""
    read, trained = ({name for use in uses for name in use[kind]} for kind in ("reads", "trains"))
    slots = executor.slots.values()
    return with_absent(
        captured, [slot for slot in slots if slot.name in read], [slot for slot in slots if slot.name in trained]
    )


def _buckets_of_all(control: ControlChannel, problem: Problem, leader: int) -> tuple[Bucket, ...]:
    """Return the buckets of the leader: each rank may use the parameters in another order."""

    def own_buckets() -> str:
        return to_json(_BUCKETS, _Buckets(buckets=form_buckets(problem))) if control.ranks[leader] == own_rank else ""

    own_rank = control.ranks[control.rank]
    _, texts = run_on_all_ranks(control, "buckets", own_buckets, str)
    return tuple(bucket.seen_by(problem.rank) for bucket in from_json(_BUCKETS, _Buckets, texts[leader]).buckets)


def _fitting(control: ControlChannel, problem: Problem, buckets: Sequence[Bucket], because: str) -> Plan:
    """Return the plan of this rank under the first placements at which the steps of all ranks fit."""

    def attempt(homes: Homes) -> Plan | NoFeasiblePlan:
        try:
            return plan_in_step(problem, buckets, homes, because)
        except NoFeasiblePlan as error:
            return error.renewed()

    def attempts() -> list[Plan | NoFeasiblePlan]:
        return [attempt(homes) for homes in homes_in_step(problem, buckets)]

    def fits(found: Sequence[Plan | NoFeasiblePlan]) -> str:
        return "".join("-" if isinstance(made, NoFeasiblePlan) else "+" for made in found)

    found, said = run_on_all_ranks(control, "placements that fit", attempts, fits)
    tried = zip(found, zip(*said, strict=True), strict=True)
    fitting = [made for made, all_fit in tried if isinstance(made, Plan) and "-" not in all_fit]
    if not fitting:
        raise _most_short(control, found[-1])
    _, digests = run_on_all_ranks(control, "plans in step", lambda: fitting[0], _digest)
    divide = Divide.of(digests)
    if divide.odd:
        odd = ranks_at(control, divide.odd)
        raise RanksDiffer(odd, [f"{ranks_text(odd)} would move other buckets than were planned"])
    return fitting[0]


def _most_short(control: ControlChannel, made: Plan | NoFeasiblePlan) -> NoFeasiblePlan:
    """Return the error of the rank with the largest shortage of device memory, or if there is none, of host memory.

    `made` is the result of this rank for the last placements.
    """
    own = made.args if isinstance(made, NoFeasiblePlan) else None
    said = [json.loads(text) for text in control.exchange(json.dumps(own, default=int), "room of ranks")]
    errors = [NoFeasiblePlan(*facts) for facts in said if facts is not None]
    return max(errors, key=lambda error: (error.memory == "device", error.needed_bytes - error.budget_bytes))


def _digest(plan: Plan) -> str:
    """Return the digest of buckets and collectives of `plan`: its regions, and perhaps its homes, differ between
    ranks."""
    return digest_of([*map(repr, plan.buckets), *map(str, collectives_of(plan))])


def _because(control: ControlChannel, uses: Sequence[Mapping[str, list[str]]], facts: Sequence[RankFacts]) -> str:
    """Return in words which ranks have another graph than most, and the parameters that not all ranks use."""
    divide = Divide.of([fact.ops_digest for fact in facts])
    odd = ranks_at(control, divide.odd)
    everywhere = set.intersection(*(set(use["reads"]) for use in uses))
    apart = sorted({name for use in uses for name in use["reads"]} - everywhere)
    more = f" and {len(apart) - _MOST_NAMED} more" if len(apart) > _MOST_NAMED else ""
    named = f", not all read {', '.join(apart[:_MOST_NAMED])}{more}" if apart else ""
    usual = ranks_text([control.ranks[divide.usual]])
    return f"{ranks_text(odd)} and {usual} run different graphs{named}; nothing is searched and no transfer hides"
