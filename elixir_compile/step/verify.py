"""Check that a plan is legal for a graph: its parts, the order of its actions, and its claims of memory. If it is the
plan of another model, say in which the two differ.
"""

from collections.abc import Iterator, Mapping

from elixir_compile.base.errors import PlanMismatch
from elixir_compile.base.units import format_bytes
from elixir_compile.ir import (
    Bucket,
    Kind,
    Phase,
    Plan,
    StepGraph,
    Storage,
    StorageId,
    fingerprint,
)
from elixir_compile.step.as_run import as_run, repeated_op
from elixir_compile.step.divide import laps_of
from elixir_compile.step.lane_order import check_order, region_touches
from elixir_compile.step.lifecycles import check_moves
from elixir_compile.step.structure import (
    check_activations,
    check_buckets,
    check_claims,
    check_lean_moves,
    check_peak,
    check_ranks,
    check_regions,
    check_schedules,
)

# ----------------------------------------------------------------------------------------------------------------------
# Compare a plan with the graph of a model, and say in which the model of the plan differs.
#
# A plan has only the fingerprint of its graph, so the differences are told by the names and bytes that it has:
# parameters in buckets, groups of activations, and the first and last ops of regions.


_MOST_NAMES = 3


_ELSEWHERE = (
    "The plan was made for `{}` by that name, which can be done without the device, and kernels of another device, "
    "above all those of attention, keep other tensors: a plan that `elixir-compile plan` makes on this machine fits"
)


def require_same_graph(plan: Plan, graph: StepGraph, *, may_be_from_elsewhere: bool = False) -> None:
    """Raise PlanMismatch, with the first difference that the plan shows, if `plan` was made for another graph.

    `may_be_from_elsewhere` says whether the step of the plan may have been captured on another device.
    """
    here = fingerprint(graph)
    if plan.graph == here:
        return
    planned_bytes = sum(bucket.nbytes for bucket in plan.buckets)
    planned = _model_text(plan.name, [name for bucket in plan.buckets for name in bucket.params], planned_bytes)
    params = _params_of(graph)
    inputs_bytes = sum(storage.nbytes for storage in graph.storages if storage.kind is Kind.INPUT)
    present = _model_text(graph.name, list(params), sum(param.nbytes for param in params.values()))
    present += f", inputs with {format_bytes(inputs_bytes)}"
    difference = next(_differences(plan, graph))
    if may_be_from_elsewhere:
        difference += ". " + _ELSEWHERE.format(plan.cluster)
    raise PlanMismatch("graph", plan.graph, here, planned, present, difference)


def _model_text(name: str, params: list[StorageId], nbytes: int) -> str:
    return f"model {name}, {len(params)} parameters with {format_bytes(nbytes)}"


def _params_of(graph: StepGraph) -> Mapping[StorageId, Storage]:
    return {storage.id: storage for storage in graph.storages if storage.kind is Kind.PARAM}


def _differences(plan: Plan, graph: StepGraph) -> Iterator[str]:
    """Yield a sentence for each difference of `graph` from the graph of `plan`, of which only the first is used.

    The last sentence says what may differ without a trace in the plan.
    """
    has_backward = any(op.phase is Phase.BACKWARD for op in graph.ops)
    if has_backward is not any(region.phase is Phase.BACKWARD for region in plan.regions):
        both = ("no backward", "a backward")
        yield f"The step of the plan has {both[not has_backward]}, and this step has {both[has_backward]}"
    params = _params_of(graph)
    planned = {name for bucket in plan.buckets for name in bucket.params}
    yield from (f"The plan has no parameter {name}, which this model reads" for name in params if name not in planned)
    yield from (f"This model reads no parameter {name}, which the plan has" for name in sorted(planned - params.keys()))
    for bucket in plan.buckets:
        yield from _differences_of_bucket(bucket, graph, params)
    if dict(plan.symbols).keys() != dict(graph.symbols).keys():
        yield f"The plan has {_symbols_text(plan.symbols)}, and this graph has {_symbols_text(graph.symbols)}"
    yield from _differences_of_activations(plan, graph)
    known = {op.id for op in graph.ops}
    known |= {repeated_op(op) for op in known}
    lean = () if plan.lean is None else plan.lean.regions
    for region in (*plan.regions, *lean):
        for op in (region.first, region.last):
            if op not in known:
                yield f"This model has no op {op}, which the plan has"
    yield "The parameters and ops that the plan names are all here, so the shape of the batch or the code differs"


def _differences_of_bucket(bucket: Bucket, graph: StepGraph, params: Mapping[StorageId, Storage]) -> Iterator[str]:
    for name in bucket.params:
        if params[name].dtype != bucket.dtype:
            yield f"Parameter {name} was {bucket.dtype} and is {params[name].dtype} here"
    nbytes = sum(params[name].nbytes for name in bucket.params)
    if nbytes != bucket.nbytes:
        more = f" and {len(bucket.params) - _MOST_NAMES} more" if len(bucket.params) > _MOST_NAMES else ""
        names = ", ".join(bucket.params[:_MOST_NAMES]) + more
        if len(bucket.params) == 1:
            yield f"Parameter {names} had {format_bytes(bucket.nbytes)} and has {format_bytes(nbytes)} here"
        yield f"The parameters {names} had {format_bytes(bucket.nbytes)} and have {format_bytes(nbytes)} here"
    is_trained = not {storage.of for storage in graph.storages if storage.kind is Kind.GRAD}.isdisjoint(bucket.params)
    if is_trained is not bucket.trainable:
        words = ("frozen", "trained")
        yield f"Parameter {bucket.params[0]} was {words[bucket.trainable]} and is {words[is_trained]} here"


def _differences_of_activations(plan: Plan, graph: StepGraph) -> Iterator[str]:
    sizes = {storage.id: storage.nbytes for storage in graph.storages}
    lean = () if plan.lean is None else plan.lean.activations
    for group in (*plan.activations, *lean):
        missing = next((name for name in group.storages if name not in sizes), None)
        if missing is not None:
            yield f"This model has no activation {missing}, which the plan has in {group.id}"
            continue
        nbytes = sum(sizes[name] for name in group.storages)
        if nbytes != group.nbytes:
            yield (
                f"The activations {group.id} had {format_bytes(group.nbytes)} and have {format_bytes(nbytes)} here, "
                "so the shape or the dtype of the batch differs"
            )


def _symbols_text(symbols: tuple[tuple[str, int], ...]) -> str:
    return "the symbols " + ", ".join(f"{name} = {value}" for name, value in symbols) if symbols else "no symbols"


# ----------------------------------------------------------------------------------------------------------------------
# Check that a plan is legal for a graph: its parts, the order of its actions, and its claims of memory.
#
# `lifecycles` checks what the actions of each rank say; then `lane_order` looks at the order in time: two accesses to
# the same memory that no wait orders are a fault of both.


def verify(graph: StepGraph, plan: Plan) -> None:
    """Check that `plan` is legal for `graph`.

    Raises PlanMismatch if the plan is for another graph, and IllegalSchedule, which shows the wrong line, if it is not
    legal.
    """
    require_same_graph(plan, graph)
    check_ranks(plan)
    check_buckets(graph, plan)
    _verify_calls(graph, plan)
    if plan.lean is not None:
        _verify_calls(graph, plan.of_lean_calls())
        check_lean_moves(plan)
    check_peak(graph, plan)
    check_claims(plan)


def _verify_calls(graph: StepGraph, plan: Plan) -> None:
    """Check the activations, the regions and the schedules of calls that run alike."""
    check_activations(graph, plan)
    step = as_run(graph, plan.activations, laps_of(plan))
    check_regions(step, plan)
    touches = region_touches(step, plan)
    for rank_index in range(len(plan.schedules)):
        check_moves(step, plan, touches, rank_index)
    check_schedules(plan)
    check_order(plan, touches)
