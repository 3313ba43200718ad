"""Explain a plan, or a part of it by name: homes of buckets, treatment of activations, decisions, rejected choices.

```text
b3  11 parameters, 7087872 elements of float32
  size      27.0 MiB of parameters, 54.1 MiB of optimizer state
  lives     parameters, gradients and optimizer state on the host
  copy      gathered for each use, then released
  why       param host  optim host: device short by 3.1 GiB at bwd.mm_2; costs 0 s, saves 81.1 MiB
  rejected  b2 param host  optim host (saves 81.1 MiB, costs 1.2 ms)
  schedule  gather for fwd.3, 2 regions ahead
            release after fwd.3

h.3  activations of 3 groups, 54.0 MiB
  pointwise  36.0 MiB recomputed: 14 ops in bwd.2
  matmul     12.0 MiB offloaded: offload after fwd.3, waited for 1 region later; prefetch for bwd.2, 1 region ahead
  fixed      6.0 MiB kept
  why        recompute pointwise, offload matmul, keep fixed: the peak would be 40.0 MiB higher with keep pointwise
             and matmul and fixed; costs 1.2 ms, saves 40.0 MiB
```
"""

from collections.abc import Sequence

from elixir_compile.base.units import format_bytes, format_s
from elixir_compile.ir.bucket import Activations
from elixir_compile.ir.graph import StepGraph
from elixir_compile.ir.kinds import Saving, Tier, Verb
from elixir_compile.ir.plan import Decision, Plan, TensorTraffic
from elixir_compile.ir.rank_class import RankClass, spans_text
from elixir_compile.session.line import SAID
from elixir_compile.step.mismatch import require_same_graph
from elixir_compile.tools.report.activations import GroupAnswer, LayerAnswer, layer_answers
from elixir_compile.tools.report.answer import (
    Answer,
    BucketAnswer,
    PlanAnswer,
    RegionAnswer,
    bucket_answer,
    home_text,
    plan_answer,
    region_answer,
)
from elixir_compile.tools.report.held import Survey
from elixir_compile.tools.report.subject import Move, find_subject
from elixir_compile.tools.report.text import entry_text

_MOST_NAMES = 6


def explain(plan: Plan, subject: str = "", graph: StepGraph | None = None) -> str:
    """Return a text with the homes, moves and bytes of `subject`, the decisions about it, and rejected choices.

    `subject` is a bucket (`b3`), a region (`fwd.2`), a parameter, a group of activations (`layers.3.matmul`), or a part
    of module paths (`layers.3`); without it the text is about the whole plan. With the `graph` of the plan the text
    also has the bytes at the peak, and the regions in which activations are recomputed. Raises UnknownSubject with the
    nearest names if nothing is found, and PlanMismatch if `graph` is another graph.

    Example:
        plan = elixir.compilations(compiled)[-1].plan
        print(elixir.explain(plan))
        print(elixir.explain(plan, "layers.1"))
    """
    return answer_text(answer(plan, subject, graph), plan.prediction.device_peak_at)


def answer(plan: Plan, subject: str = "", graph: StepGraph | None = None) -> Answer:
    """Return the result of `explain` as a value."""
    if graph is not None:
        require_same_graph(plan, graph)
    if not subject:
        return Answer(subject=subject, plan=plan_answer(plan))
    return answer_of(Survey(plan, graph), subject)


def answer_of(survey: Survey, subject: str) -> Answer:
    """Return the answer about a part of a plan; `survey` serves all answers about the plan."""
    found = find_subject(survey.plan, subject)
    if found.region is not None:
        return Answer(subject=subject, region=region_answer(survey, found.region))
    buckets = tuple(bucket_answer(survey, bucket, found) for bucket in found.buckets)
    layers = layer_answers(survey, found.groups)
    if found.lean_groups:
        layers += layer_answers(survey.of_lean_calls(), found.lean_groups, is_lean=True)
    return Answer(subject=subject, buckets=buckets, layers=layers)


def answer_text(found: Answer, peak_at: str) -> str:
    """Return the answer as text; `peak_at` is the op at the peak of the step."""
    entries = [] if found.plan is None else [_plan_text(found.plan)]
    entries += [] if found.region is None else [_region_text(found.region, peak_at)]
    entries += [_bucket_text(bucket, peak_at) for bucket in found.buckets]
    entries += [_layer_text(layer) for layer in found.layers]
    return "\n\n".join(entries)


def _plan_text(found: PlanAnswer) -> str:
    made = found.prediction
    share = f" ({made.device_peak_bytes / found.budget_bytes:.0%})" if found.budget_bytes else ""
    base = f", of which {format_bytes(found.base_bytes)} are external usage" if found.base_bytes else ""
    bound = "not proved" if found.bound_s is None else f"{format_s(found.bound_s)} for every plan"
    gap = "" if found.gap is None else f", so another plan saves {found.gap:.2%} at most"
    subjects = [_count_text(found.num_moved, "bucket")] if found.num_moved else []
    subjects += [_count_text(found.num_layers, "layer")] if found.num_layers else []
    moved = f"{' and '.join(subjects)} have decisions of their own; ask for any by its name"
    return entry_text(
        f"plan {found.name} on {found.cluster}, chosen by {found.planner}",
        [
            ("budget", [format_bytes(found.budget_bytes) + base]),
            ("peak", [f"{format_bytes(made.device_peak_bytes)}{share} at {made.device_peak_at}"]),
            ("host", [format_bytes(made.host_peak_bytes)]),
            ("disk", [f"{format_bytes(found.disk_bytes)} of optimizer state"] if found.disk_bytes else []),
            ("calls", [str(found.calls)] if found.calls.num > 1 else []),
            ("lean calls", [found.lean] if found.lean else []),
            ("accumulates", [_kept_text(found)] if found.staying_gradient_bytes else []),
            ("step", [f"{format_s(made.step_s)}, {format_s(made.exposed_s)} of it exposed transfers"]),
            ("ranks", [_class_text(line, found.rank) for line in found.classes]),
            ("tensor axis", [] if found.tensor is None else [_tensor_text(found.tensor)]),
            ("update", [_update_text(found)] if Verb.UPDATE in found.counts else []),
            ("bound", [bound + gap]),
            ("binding", found.binding),
            ("one more GiB", [found.gib_saves] if found.gib_saves else []),
            ("peak formula", [found.formula] if found.formula else []),
            ("buckets", [f"{count}: {home}" for home, count in sorted(found.num_buckets.items())]),
            (
                "activations",
                [
                    f"{format_bytes(kind.nbytes)} {SAID[kind.saving]}, in {_count_text(kind.num_layers, 'layer')}"
                    for kind in found.activations
                    if kind.num_layers
                ],
            ),
            ("schedule", [", ".join(f"{verb} {count}" for verb, count in sorted(found.counts.items()))]),
            ("why", [_decision_text(decision, decision.subject) for decision in found.decisions]),
            ("moved", [moved] if subjects else []),
        ],
    )


def _kept_text(found: PlanAnswer) -> str:
    kept = [f"{format_bytes(nbytes)} on the {home}" for home, nbytes in found.staying_gradient_bytes.items()]
    return f"gradients of earlier backward passes stay: {' and '.join(kept)}"


def _tensor_text(found: TensorTraffic) -> str:
    return (
        f"{found.num_ranks} ranks: {_count_text(found.num_collectives, 'collective')} of {format_bytes(found.nbytes)} "
        f"in all, {format_s(found.run_s)} of compute"
    )


def _class_text(line: RankClass, rank: int) -> str:
    """Return what the plan of a class of ranks comes to, as a line of the plan of `rank`."""
    who = f"{spans_text(line.ranks)}, this plan" if rank in line.ranks else spans_text(line.ranks)
    parts = [] if line.num_rows is None else [_count_text(line.num_rows, "row")]
    parts += [f"{line.micro_batches} micro-batches"] if line.micro_batches > 1 else []
    parts += [] if line.state is None else [f"{line.state:.1%} of the state"]
    parts.append(f"peak {format_bytes(line.device_peak_bytes)} of {format_bytes(line.budget_bytes)}")
    parts += [f"host {format_bytes(line.host_peak_bytes)}", f"busy {line.busy_share:.0%}"]
    return f"{who} on {line.device}: {', '.join(parts)}"


def _update_text(found: PlanAnswer) -> str:
    streamed = (
        f", {_count_text(found.num_streamed, 'bucket')} streamed through the device" if found.num_streamed else ""
    )
    return f"{found.update}{streamed}"


def _region_text(found: RegionAnswer, peak_at: str) -> str:
    region = found.region
    num_ops = "" if found.num_ops is None else f", {found.num_ops} ops"
    live = f"the step's peak is at {peak_at}"
    if found.peak_bytes is not None:
        live = f"{format_bytes(found.peak_bytes)} live at most; {live}"
    return entry_text(
        f"{region.id}  region of the {region.phase}, {region.first} to {region.last}{num_ops}",
        [
            (
                "reads",
                [f"{_names_text(region.buckets)}; {found.on_host} of them from the host"] if region.buckets else [],
            ),
            ("before", [", ".join(found.before)] if found.before else []),
            ("after", [", ".join(found.after)] if found.after else []),
            ("offloads", [_groups_text(found.leaving)] if found.leaving else []),
            ("prefetched", [_groups_text(found.returning)] if found.returning else []),
            ("recomputes", [f"{part.group}: {_count_text(part.num_ops, 'op')}" for part in found.again or ()]),
            ("memory", [live]),
        ],
    )


def _groups_text(groups: Sequence[Activations]) -> str:
    return _names_text([f"{group.id} ({format_bytes(group.nbytes)})" for group in groups])


def _bucket_text(found: BucketAnswer, peak_at: str) -> str:
    bucket = found.bucket
    state = f", {format_bytes(bucket.state_nbytes)} of optimizer state" if bucket.state_nbytes else ""
    state += f" with moments in {bucket.state_dtype}" if bucket.state_dtype else ""
    state += f", param group {bucket.group}" if bucket.group else ""
    each = (
        f"; each of {len(bucket.shard_numels)} ranks owns {format_bytes(bucket.shard_nbytes())}"
        if bucket.is_sharded
        else ""
    )
    why = [
        _decision_text(decision, "" if decision.subject == bucket.id else decision.subject)
        for decision in found.decisions
    ]
    return entry_text(
        f"{bucket.id}  {_count_text(len(bucket.params), 'parameter')}, {bucket.numel} elements of {bucket.dtype}",
        [
            ("asked for", [_names_text(found.asked)] if found.asked else []),
            ("holds", [] if len(found.asked) == len(bucket.params) else [_names_text(bucket.params)]),
            ("size", [f"{format_bytes(bucket.nbytes)} of parameters{state}{each}"]),
            ("lives", [home_text(bucket, found.placement)]),
            ("copy", [_copy_text(found)]),
            ("why", why or [_undecided_text(found)]),
            ("rejected", [other for decision in found.decisions for other in decision.rejected]),
            ("passed over", found.passed_over),
            ("schedule", [_move_text(move, found) for move in found.moves] or ["nothing moves"]),
            ("at the peak", [_peak_text(found, peak_at)]),
        ],
    )


def _layer_text(found: LayerAnswer) -> str:
    groups = [answer.group for answer in found.groups]
    nbytes = format_bytes(sum(group.nbytes for group in groups))
    num_groups = _count_text(found.num_groups, "group")
    asked = num_groups if len(groups) == found.num_groups else f"{len(groups)} of {num_groups}"
    why = [_decision_text(decision) for decision in found.decisions]
    is_kept = all(group.saving is Saving.KEEP for group in groups)
    undecided = "they fit on the device: no decision moved them" if is_kept else "no decision of this plan names them"
    return entry_text(
        f"{found.layer}  activations of {asked}, {nbytes}{', in lean calls' if found.is_lean else ''}",
        [
            *((answer.group.id.removeprefix(f"{found.layer}."), [_group_text(answer)]) for answer in found.groups),
            ("why", why or [undecided]),
            ("rejected", [other for decision in found.decisions for other in decision.rejected]),
        ],
    )


def _group_text(found: GroupAnswer) -> str:
    group = found.group
    how = f"{format_bytes(group.nbytes)} {SAID[group.saving]}"
    if group.saving is Saving.RECOMPUTE:
        again = [f"{_count_text(part.num_ops, 'op')} in {part.region}" for part in found.again or ()]
        how += f": {', '.join(again)}" if again else ""
    elif found.moves:
        how += f": {'; '.join(map(_trip_text, found.moves))}"
    return how if found.is_saved in (True, None) else f"{how}; saved for the ops that run again"


def _trip_text(move: Move) -> str:
    regions = _count_text(move.num_ahead, "region")
    if move.verb is Verb.OFFLOAD:
        return f"offload after {move.region}, " + (f"waited for {regions} later" if move.num_ahead else "waited for")
    where = f"for {move.region}" if move.region else "after the last region"
    return f"prefetch {where}, " + (f"{regions} ahead" if move.num_ahead else "right before it")


def _count_text(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _names_text(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _decision_text(decision: Decision, subject: str = "") -> str:
    effect = []
    if decision.cost_s or decision.saves_bytes:
        effect = [f"; costs {format_s(decision.cost_s)}, saves {format_bytes(decision.saves_bytes)}"]
    return "".join([f"{subject}: " if subject else "", f"{decision.choice}: {decision.because}", *effect])


def _undecided_text(found: BucketAnswer) -> str:
    if found.placement.param is Tier.DEVICE and found.placement.optim is Tier.DEVICE:
        return "it fits on the device: no decision moved it"
    return "no decision of this plan: its home is that of an earlier plan"


def _copy_text(found: BucketAnswer) -> str:
    if found.placement.param is Tier.DEVICE and not found.bucket.is_sharded:
        return "none is needed: the parameters are on the device"
    if not found.copy_bytes:
        return "never gathered: no region reads it"
    return (
        "gathered once, kept until the backward" if found.placement.resident else "gathered for each use, then released"
    )


def _move_text(move: Move, found: BucketAnswer) -> str:
    regions = _count_text(move.num_ahead, "region")
    if move.verb is Verb.GATHER:
        return f"gather for {move.region}, " + (f"{regions} ahead" if move.num_ahead else "right before it")
    if move.verb is Verb.OFFLOAD:
        return f"offload the gradient after {move.region}, waited for {regions} later"
    if move.verb is Verb.UPDATE:
        how = ", with its state streamed both ways" if found.placement.streamed else ""
        return f"update on the {found.placement.update}{how}"
    return f"{move.verb} after {move.region}"


def _peak_text(found: BucketAnswer, peak_at: str) -> str:
    if found.peak_bytes is not None:
        kinds = ", ".join(f"{kind} {format_bytes(nbytes)}" for kind, nbytes in found.peak_bytes.items())
        return f"{peak_at}: it holds {kinds or 'nothing'} on the device"
    copy = f", {format_bytes(found.copy_bytes)} more while it is gathered" if found.copy_bytes else ""
    return f"{peak_at}: it holds {format_bytes(found.always_bytes)} on the device at every op{copy}"
