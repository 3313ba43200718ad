"""Dynamic captures: sizes as expressions, evaluated elsewhere, and the same ops as a static capture has."""

import operator
from dataclasses import replace

import pytest
import torch
from torch import fx, nn

from elixir_compile.graph.capture.captured import as_traced
from elixir_compile.graph.capture.convert import step_graph
from elixir_compile.graph.capture.joint import SIZES, _Hidden, _rebuild_view, _view_chain
from elixir_compile.graph.capture.node_facts import kernel_of, parameter
from elixir_compile.graph.capture.rewire import is_view, view_chain, viewed
from elixir_compile.graph.capture.tracing import _renamed
from elixir_compile.ir import Kernel, Kind, StepGraph, fingerprint, graph_at, graph_from_json, graph_to_json, sizes
from elixir_compile.session.model import Compilation
from elixir_compile.step import keep_everything_timeline, peak_formula, plan_at, plan_timeline, verify
from tests.fx.captures import Pair, halves_of_torch, record_of, tight


class Folded(nn.Module):
    """Batch and length are one dimension for the layers between; a table of positions is cut to the length."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 16)
        self.positions = nn.Parameter(torch.zeros(32, 16))
        self.down = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        hidden = (self.up(x) * self.positions[:length]).view(batch * length, 16).relu()
        return self.down(hidden.view(batch, length, 16)).square().sum()


def dynamic(*shape: int, dims: int = 1) -> torch.Tensor:
    """Return a tensor whose first `dims` dimensions are symbols."""
    x = torch.randn(*shape)
    for dim in range(dims):
        torch._dynamo.mark_dynamic(x, dim)  # documented under this name
    return x


def sizes_of(graph: StepGraph, kind: Kind) -> list[str]:
    return sorted({storage.size for storage in graph.storages if storage.kind is kind})


def test_dynamic_sizes_equal_sizes_computed_by_hand() -> None:
    """x is n x 4, `relu` saves n x 8, the last layer takes 2 * n * 8 * 4 operations, each product as many."""
    graph = record_of(Pair(), dynamic(3, 4)).graph
    ((symbol, value),) = graph.symbols
    assert value == 3
    assert sizes_of(graph, Kind.INPUT) == [f"16*{symbol}"]
    assert sizes_of(graph, Kind.SAVED) == [f"32*{symbol}"]
    assert sizes_of(graph, Kind.PARAM) == sizes_of(graph, Kind.GRAD) == [""]
    products = [op for op in graph.ops if op.target in ("aten.addmm.default", "aten.mm.default")]
    assert {op.flops_size for op in products} == {f"64*{symbol}"}
    assert {op.flops for op in products} == {192}


def static_and_dynamic(
    model: type[nn.Module], small: torch.Tensor, large: torch.Tensor
) -> tuple[Compilation, StepGraph]:
    """Return the dynamic record of a step on `small`, and the static graph of one on `large`."""
    record = record_of(model(), small)
    torch.compiler.reset()
    return record, record_of(model(), large).graph


def test_a_dynamic_graph_at_other_sizes_equals_a_static_capture() -> None:
    record, static = static_and_dynamic(Folded, dynamic(2, 3, 4, dims=2), torch.randn(5, 7, 4))
    captured = replace(record.active.captured, kernels=as_traced)  # what kernels allocate has no formula
    graph = step_graph(captured, {})
    there = {name: {2: 5, 3: 7}[value] for name, value in graph.symbols}
    grown = graph_at(graph, there)
    assert grown == step_graph(captured, there)
    assert graph_at(grown, dict(graph.symbols)) == graph
    one = {graph.symbols[0][0]: 9}
    assert step_graph(captured, one) == graph_at(graph, one)
    targets = [op.target for op in grown.ops if not op.target.startswith("_operator.")]
    assert targets == [op.target for op in static.ops]
    assert sum(op.flops for op in grown.ops) == sum(op.flops for op in static.ops)
    assert keep_everything_timeline(grown, {}).peak.nbytes == keep_everything_timeline(static, {}).peak.nbytes


def test_names_of_ops_are_the_same_in_each_process() -> None:
    graph = record_of(Folded(), dynamic(2, 3, 4, dims=2)).graph
    assert any(op.target == "_operator.mul" for op in graph.ops)
    assert not any("0x" in op.target or "<" in op.target for op in graph.ops)


def test_the_fingerprint_is_the_same_at_another_batch() -> None:
    """The static graphs of two batches are different graphs."""
    record, static = static_and_dynamic(Pair, dynamic(3, 4), torch.randn(6, 4))
    torch.compiler.reset()
    other = record_of(Pair(), dynamic(6, 4)).graph
    assert fingerprint(other) == fingerprint(record.graph)
    assert fingerprint(static) != fingerprint(record.graph)


def test_a_dynamic_graph_reads_back() -> None:
    graph = record_of(Folded(), dynamic(2, 3, 4, dims=2)).graph
    assert graph_from_json(graph_to_json(graph)) == graph


def test_a_plan_for_another_batch_claims_the_peak_it_has_here() -> None:
    record = tight(Folded, dynamic(2, 3, 4, dims=2))
    smaller = graph_at(record.graph, {record.graph.symbols[0][0]: 1})
    moved = plan_at(smaller, record.plan)
    assert moved.prediction.device_peak_bytes < record.plan.prediction.device_peak_bytes
    verify(smaller, moved)
    formula = peak_formula(record.graph, record.plan)
    assert moved.prediction.device_peak_bytes == sizes.evaluate(formula, dict(smaller.symbols))


def test_the_largest_batch_of_a_captured_plan() -> None:
    """The smallest budget for batch 2 holds no batch of 3; twice the budget holds more."""
    record = tight(Folded, dynamic(2, 3, 4, dims=2))
    graph, budget_bytes = record.graph, record.plan.budget_bytes
    plan = replace(record.plan, formula=peak_formula(graph, record.plan), symbols=graph.symbols)
    batch = next(name for name, value in graph.symbols if value == 2)
    assert plan.largest_batch(batch) == 2
    most = plan.largest_batch(batch, budget_bytes=2 * budget_bytes)
    at = [plan_timeline(graph_at(graph, {batch: most + more}), plan).peak.nbytes for more in (0, 1)]
    assert at[0] <= 2 * budget_bytes < at[1]


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_size_that_regions_share_is_known_in_each(inner: str) -> None:
    """Under the smallest budget every layer is a region of its own; `batch * length` is made in the first."""
    record = tight(Folded, dynamic(2, 3, 4, dims=2), inner=inner)
    assert len(record.plan.regions) > 4
    makers = [op.id for op in record.graph.ops if op.target == "_operator.mul"]
    assert makers[0] not in [region.first for region in record.plan.regions[1:]]


def call(graph: fx.Graph, target: object, args: tuple, value: object) -> fx.Node:
    node = graph.call_function(target, args)
    node.meta["val"] = value
    return node


def test_a_view_with_dynamic_sizes_has_one_base() -> None:
    length = symbolic_length()
    graph = fx.Graph()
    x, size = graph.placeholder("x"), graph.placeholder("size")
    x.meta["val"], size.meta["val"] = torch.empty(4), length
    doubled = call(graph, operator.mul, (size, 2), length * 2)
    relu = call(graph, torch.ops.aten.relu.default, (x,), torch.empty(4))
    view = call(graph, torch.ops.aten.view.default, (relu, [size, doubled]), torch.empty(4))
    first = call(
        graph,
        operator.getitem,
        (call(graph, torch.ops.aten.split.Tensor, (x, size), [x.meta["val"]]), 0),
        x.meta["val"],
    )
    out = call(graph, torch.ops.aten.add.Tensor, (view, first), torch.empty(4))
    graph.output((out,))
    assert viewed(view) is relu
    assert is_view(first)
    assert not any(is_view(node) for node in (x, doubled, relu, out))
    assert kernel_of(relu) is Kernel.POINTWISE


def symbolic_length() -> torch.SymInt:
    """Return the length of a dynamic input, as a capture sees it."""
    record = record_of(Pair(), dynamic(3, 4))
    placeholders = record.active.captured.forward.graph.find_nodes(op="placeholder")
    return next(node.meta["val"] for node in placeholders if isinstance(node.meta["val"], torch.SymInt))


def test_a_saved_view_is_rebuilt_only_if_its_sizes_are_saved() -> None:
    """Saved, it would keep the gathered copy alive, which the plan counts as released."""
    length = symbolic_length()
    graph = fx.Graph()
    table, size = graph.placeholder("table"), graph.placeholder("size")
    table.meta["val"], size.meta["val"] = torch.empty(8, 4), length
    cut = call(graph, torch.ops.aten.slice.Tensor, (table, 0, 0, size), torch.empty(3, 4))
    turned = call(graph, torch.ops.aten.t.default, (cut,), torch.empty(4, 3))
    assert _view_chain(turned, {"table"}, [turned, size]) == [table, cut, turned]
    assert _view_chain(turned, {"table"}, [turned]) is None
    assert _view_chain(turned, set(), [turned, size]) is None
    backward = fx.Graph()
    saved, known = backward.placeholder("t"), backward.placeholder("size")
    known.meta["val"] = length
    used = call(backward, torch.ops.aten.relu.default, (saved,), torch.empty(4, 3))
    backward.output((used,))
    hidden = _Hidden(keys={"table": 5}, saved_views={"t": [table, cut, turned]})
    _rebuild_view(backward, saved, hidden, used, {"size": known})
    (again,) = backward.find_nodes(op="call_function", target=torch.ops.aten.slice.Tensor)
    assert again.args[0].target is parameter
    assert again.args[3] is known
    assert not saved.users


def test_inputs_can_swap_names_and_new_nodes_do_not_reuse_them() -> None:
    graph = fx.Graph()
    inputs = [graph.placeholder(f"primals_{i}") for i in (1, 2, 3)]
    graph.output(inputs[2])
    renamed = _renamed(graph, {"primals_1": "size_1", "primals_2": "primals_1", "primals_3": "primals_2"})
    renamed.lint()
    inputs = renamed.find_nodes(op="placeholder")
    assert [(node.name, node.target) for node in inputs] == [(n, n) for n in ("size_1", "primals_1", "primals_2")]
    assert renamed.output_node().args == (inputs[2],)
    with renamed.inserting_before(inputs[0]):
        assert renamed.placeholder("size_1").name not in {node.name for node in inputs}


class Padded(nn.Module):
    """The backward cuts the gradient of a padded, saved tensor: the forward needs no number for its size."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Conv1d(4, 4, 2, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(x.transpose(1, 2)).sigmoid()
        return torch.cat([x, x], -1).unfold(-1, 2, 1).square().mean()


class Transposed(nn.Module):
    """The backward reads the sizes of both factors of a product, which it saves; the forward multiplies two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Conv1d(4, 4, 2, stride=2)
        self.down = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x.transpose(1, 2)).transpose(1, 2).sigmoid()).square().mean()


def sizes_read_off_saved(backward: fx.Graph) -> list[fx.Node]:
    found = [node for node in backward.nodes if node.target in SIZES]
    return [node for node in found if view_chain(node.all_input_nodes[0])[-1].op == "placeholder"]


@pytest.mark.parametrize("model", [Transposed, Padded])
def test_the_backward_takes_sizes_of_saved_tensors_as_numbers(model: type[nn.Module]) -> None:
    torch.compiler.reset()
    x = dynamic(2, 6, 4, dims=2)
    assert any(map(sizes_read_off_saved, (half.graph for half in halves_of_torch(model(), x)))), "this shows nothing"
    torch.compiler.reset()
    captured = record_of(model(), x).active.captured
    assert not sizes_read_off_saved(captured.backward_module.graph)


def test_a_size_that_stays_in_the_backward_counts_as_a_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elixir_compile.graph.capture.joint.save_sizes", lambda *_: None)
    torch.compiler.reset()
    record = record_of(Transposed(), dynamic(2, 6, 4, dims=2))
    backward = record.active.captured.backward_module.graph
    read = {f"bwd.{node.name}" for node in sizes_read_off_saved(backward)}
    assert read
    assert all(op.reads for op in record.graph.ops if op.id in read)
    bytes_moved = {op.moved_bytes for op in record.graph.ops if op.id in read}
    assert bytes_moved == {0}
