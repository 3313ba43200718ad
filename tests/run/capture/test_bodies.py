"""Functions of torch that run graphs, as `cond` and `scan`: their bytes by the allocator, and their work in plans."""

import gc
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from torch._higher_order_ops.associative_scan import associative_scan_op
from torch.fx.experimental.proxy_tensor import make_fx

import elixir_compile as elixir
from elixir_compile.ir import StepGraph
from elixir_compile.ir.graph import graph_at
from tests.run.calling_models import (
    ROWS,
    WIDE,
    WIDTH,
    batch,
    branch,
    branch_in_scan,
    branch_of_two_sizes,
    each_row,
    loop_without_gradients,
    scan_of_weights,
    seeded,
)
from tests.run.processes import apart
from tests.run.training import by_elixir, by_elixir_unprepared, plain_step, planned_peak_bytes

SMALL_BYTES = 16 << 10
"""Numbers, masks and buffers inside of kernels, which no plan counts: at most 14 KB here, of 400 KB and more."""
CALLS: dict[str, Callable[..., torch.Tensor]] = {
    call.__name__: call for call in (branch, branch_of_two_sizes, each_row, scan_of_weights, loop_without_gradients)
}


def least(call: Callable[..., torch.Tensor]) -> int:
    """Return the bytes that the graph needs, which the error names at once if nothing may be planned again."""
    with pytest.raises(elixir.NoFeasiblePlan) as raised:
        by_elixir_unprepared(seeded(call), device_memory=1, micro_batches=1, replan=False).compiled(batch())
    return raised.value.needed_bytes


def measured(calls: Sequence[Callable[..., torch.Tensor]]) -> list[tuple[int, int, int]]:
    """Return the smallest budget of a model of each of `calls`, and the planned and the measured peak under it."""
    found: list[tuple[int, int, int]] = []
    for call in calls:
        budget_bytes = least(call)
        gc.collect()  # all tensors of the process count, also those of other models
        run = by_elixir_unprepared(seeded(call), device_memory=budget_bytes, micro_batches=1)
        run.train([batch(), batch()])
        record = elixir.measure_step(lambda run=run: plain_step(run.compiled, run.optimizer, batch()))
        found.append((budget_bytes, planned_peak_bytes(run), record.device_peak_bytes))
    return found


@pytest.fixture(scope="module")
def peaks() -> Mapping[str, tuple[int, int, int]]:
    return dict(zip(CALLS, apart(measured, [*CALLS.values()]), strict=True))


@pytest.mark.parametrize("name", CALLS)
def test_the_smallest_budget_is_enough(name: str, peaks: Mapping[str, tuple[int, int, int]]) -> None:
    """Planned bytes are the allocator's: the bodies were not counted, and steps took up to 3.7 times the budget."""
    check_peak(*peaks[name], is_sure=name != "branch_of_two_sizes")


@pytest.mark.slow
def test_bodies_in_bodies_are_counted() -> None:
    ((budget_bytes, planned_bytes, measured_bytes),) = apart(measured, [branch_in_scan])
    check_peak(budget_bytes, planned_bytes, measured_bytes, is_sure=True)


def check_peak(budget_bytes: int, planned_bytes: int, measured_bytes: int, *, is_sure: bool) -> None:
    """If the plan `is_sure` which branch runs, the measured peak is the planned one, else it may be less."""
    assert measured_bytes <= budget_bytes + SMALL_BYTES
    assert measured_bytes >= planned_bytes - SMALL_BYTES or not is_sure


def graph_of(call: Callable[..., torch.Tensor]) -> StepGraph:
    run = by_elixir(seeded(call))
    run.compiled(batch())
    return elixir.compilations(run.model)[0].graph


def test_the_work_of_bodies_counts_once_for_each_turn() -> None:
    """In each row or turn: `f`, two products of 32 or 192 rows, and in a scan a product with a weight before them."""
    pair_flops = 2 * 2 * 32 * WIDTH * WIDE
    mapped, scanned, branched = map(graph_of, (each_row, scan_of_weights, branch_of_two_sizes))
    (over_rows,) = [op for op in mapped.ops if op.id == "fwd.map_impl"]
    assert over_rows.flops == ROWS * pair_flops
    assert over_rows.launches >= ROWS * 3
    (over_weights,) = [op for op in scanned.ops if op.id == "fwd.scan"]
    assert over_weights.flops == 3 * ROWS * (pair_flops + 2 * 32 * WIDTH * WIDTH)
    (larger,) = [op for op in branched.ops if op.id == "fwd.cond"]
    assert larger.flops == ROWS * pair_flops
    touched_bytes = sum(s.nbytes for s in branched.storages if s.id in {*larger.reads, *larger.writes})
    assert larger.moved_bytes > touched_bytes + ROWS * 32 * WIDE * 4


def test_sizes_of_bodies_follow_the_batch() -> None:
    """A graph of dynamic shapes at another number of rows has the bytes of a graph captured for those rows."""
    torch._dynamo.reset()
    model = elixir.prepare(seeded(branch))
    compiled = torch.compile(model, backend="elixir", dynamic=True, options={"inner": "aot_eager", "report": False})
    compiled(batch()[:4])
    graph = elixir.compilations(model)[0].graph
    (rows,) = [name for name, value in graph.symbols if value == 4]
    exact = graph_of(branch)
    assert workspaces(graph_at(graph, {rows: ROWS})) == workspaces(exact)
    flops, exact_flops = (sum(op.flops for op in g.ops) for g in (graph_at(graph, {rows: ROWS}), exact))
    assert flops == exact_flops


def workspaces(graph: StepGraph) -> dict[str, int]:
    found = {str(s.id): s.nbytes for s in graph.storages if s.id.endswith(".workspace")}
    assert len(found) == 2, "the forward and the backward run a branch each"
    return found


def test_an_associative_scan_takes_less_than_three_times_its_results() -> None:
    """The bound that `graph.capture.convert` has for it, checked on its loop: captured graphs have it on accelerators
    only."""
    given = torch.rand(1024, 64)
    body = make_fx(lambda a, b: (a * b,))(given[:1], given[:1])
    peak_bytes = elixir.measure_step(lambda: associative_scan_op(body, [given], ()), device="cpu").device_peak_bytes
    around_bytes = elixir.measure_step(lambda: None, device="cpu").device_peak_bytes
    assert 2 * given.nbytes < peak_bytes - around_bytes <= 3 * given.nbytes
