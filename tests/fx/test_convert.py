"""The capture of a step: storages and aliases, gathers in the joint graph, deep calls, and what it costs."""

import dataclasses
import gc
import resource
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import fx, nn

import elixir_compile as elixir
from elixir_compile import compat
from elixir_compile.base.process import collector_off
from elixir_compile.compat import dynamo
from elixir_compile.graph.capture import convert, joint
from elixir_compile.graph.capture.additions import trained_keys, with_absent
from elixir_compile.graph.capture.captured import Captured
from elixir_compile.graph.capture.convert import ops_of, step_graph
from elixir_compile.graph.capture.node_facts import TICKET, gradient, key_of, parameter, source_line, source_of, ticket
from elixir_compile.graph.capture.tracing import trace_step, with_deep_calls
from elixir_compile.graph.ops.gather import GATHER, REDUCE
from elixir_compile.graph.ops.registry import Slot, slot_by_key
from elixir_compile.ir import Kind, Phase, StepGraph
from elixir_compile.session.planning import attention_bytes
from elixir_compile.tools.preview.capture import capture_step
from tests.fx.captures import Pair, Shared, halves_of_torch, record_of
from tests.run.models import Stack, vectors

# ----------------------------------------------------------------------------------------------------------------------
# `graph.capture.convert`: storages, aliases and kinds of a captured step, worked out by hand.


FLOAT = 4


def bytes_of(graph: StepGraph, kind: Kind) -> int:
    return sum(storage.nbytes for storage in graph.storages if storage.kind is kind)


def test_storages_of_a_pair_of_linear_layers() -> None:
    """x 3x4, up 8x4 + 8, down 4x8 + 4: gradients are as large as parameters, and `relu` saves its result."""
    graph = record_of(Pair(), torch.randn(3, 4)).graph
    params_bytes = (8 * 4 + 8 + 4 * 8 + 4) * FLOAT
    assert bytes_of(graph, Kind.PARAM) == params_bytes
    assert bytes_of(graph, Kind.GRAD) == params_bytes
    assert bytes_of(graph, Kind.INPUT) == 3 * 4 * FLOAT
    assert bytes_of(graph, Kind.SAVED) == 3 * 8 * FLOAT
    assert [op.phase for op in graph.ops].count(Phase.UPDATE) == 1


def test_views_share_the_storage_of_their_base_and_are_no_ops() -> None:
    graph = record_of(Pair(), torch.randn(3, 4)).graph
    assert not any(op.target in ("aten.t.default", "aten.view.default") for op in graph.ops)
    assert ("fwd.t", "up.weight") in graph.aliases
    products = [op for op in graph.ops if op.target == "aten.addmm.default"]
    assert [set(op.reads) & {"up.weight", "down.weight"} for op in products] == [{"up.weight"}, {"down.weight"}]


def test_a_tied_weight_is_one_storage() -> None:
    graph = record_of(Shared(), torch.randint(0, 6, (2, 3))).graph
    assert [storage.id for storage in graph.storages if storage.kind is Kind.PARAM] == ["embed.weight"]
    gradients = [storage for storage in graph.storages if storage.kind is Kind.GRAD]
    assert [storage.of for storage in gradients] == ["embed.weight"] * 2


class Normalised(nn.Module):
    """BatchNorm changes its buffers in place; the second output is the input itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.out = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(x)).sum()


def test_an_op_in_place_writes_the_storage_it_was_given() -> None:
    graph = record_of(Normalised().train(), torch.randn(5, 4)).graph
    inputs = {storage.id for storage in graph.storages if storage.kind is Kind.INPUT}
    written = {name for op in graph.ops if op.target == "aten.copy_.default" for name in op.writes}
    assert written
    assert written <= inputs


class Echo(nn.Module):
    """Returns a view of what it was given beside the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.out(x).sum(), x.view(-1)


def test_an_output_that_aliases_an_input_adds_no_storage() -> None:
    compiled = torch.compile(elixir.prepare(Echo()), backend="elixir", options={"inner": "aot_eager", "report": False})
    loss, echo = compiled(torch.randn(3, 4))
    loss.backward()
    (record,) = elixir.compilations(compiled)
    assert echo.shape == (12,)
    loss_bytes = FLOAT
    assert sum(s.nbytes for s in record.graph.storages if s.id in record.graph.outputs) == loss_bytes


def test_fused_regions_have_fewer_storages_and_the_same_parameters() -> None:
    record = record_of(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 1), nn.Flatten(0)), torch.randn(1, 4))
    captured = record.active.captured
    fused = step_graph(dataclasses.replace(captured, fused=True), {})
    assert len(fused.ops) == len(record.graph.ops)
    assert bytes_of(fused, Kind.TEMP) <= bytes_of(record.graph, Kind.TEMP)
    assert bytes_of(fused, Kind.PARAM) == bytes_of(record.graph, Kind.PARAM)


def test_modules_of_a_container_of_torch_have_the_names_of_their_parameters() -> None:
    """Dynamo calls such a model through a function of its own."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.GELU(), nn.Linear(4, 1)), nn.Flatten(0))
    graph = record_of(model, torch.randn(1, 4)).graph
    assert {"0", "1.0", "1.1"} <= {op.module for op in graph.ops} <= {name for name, _ in model.named_modules()}


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_tangent_is_live_to_the_end_of_the_backward_if_torch_holds_it(
    is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "keeps_tangents", lambda: is_kept)
    graph = record_of(Pair(), torch.randn(3, 4)).graph
    backward = [op for op in graph.ops if op.phase is Phase.BACKWARD]
    assert len(backward) > 3
    tangent = backward[0].writes[0]
    assert "tangent" in tangent
    assert (tangent in backward[-1].reads) is is_kept


def test_a_gradient_that_no_op_writes_is_an_error() -> None:
    """Two gradients with one fake storage, as a graph that several nodes run would leave them, and a saved value."""
    captured = trace_step(
        elixir.prepare(Pair()), (torch.randn(3, 4),), {}, name="pair", inner="aot_eager", edit=lambda _, inputs: inputs
    )
    backward = captured.backward_module.graph
    markers = backward.find_nodes(op="call_function", target=gradient)
    saved = next(node for node in backward.find_nodes(op="placeholder") if node.meta["val"].dim() == 2)
    for other in (source_of(markers[0]), saved):
        marker = markers[1]
        own, marker.args = marker.args, (other, marker.args[1])
        with pytest.raises(elixir.UnsupportedModel, match="would not be trained") as failed:
            step_graph(captured, {})
        assert failed.value.what == captured.param_names[key_of(marker)]
        marker.args = own
    assert {s.of for s in step_graph(captured, {}).storages if s.kind is Kind.GRAD} == {*captured.param_names.values()}


# ----------------------------------------------------------------------------------------------------------------------
# `graph.capture.joint`: gathers leave the joint graph before it is partitioned, and come back as markers.


def targets(half: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in ops_of(half.graph)]


def markers(half: fx.GraphModule, marker: object) -> list[fx.Node]:
    return half.graph.find_nodes(op="call_function", target=marker)


def test_forward_and_backward_equal_torch_op_for_op() -> None:
    x = torch.randn(3, 4)
    forward, backward = halves_of_torch(Pair(), x)
    torch.compiler.reset()
    captured = record_of(Pair(), x).active.captured
    assert targets(captured.forward) == targets(forward)
    assert targets(captured.backward) == targets(backward)


def test_no_gather_and_no_reduce_is_left() -> None:
    captured = record_of(Pair(), torch.randn(3, 4)).active.captured
    for half in (captured.forward, captured.backward):
        assert not markers(half, GATHER)
        assert not markers(half, REDUCE)
    assert len(markers(captured.forward, parameter)) == 4
    assert len(markers(captured.backward, gradient)) == 4


def test_no_parameter_and_no_view_of_one_is_saved() -> None:
    captured = record_of(Pair(), torch.randn(3, 4)).active.captured
    saved = captured.forward.graph.output_node().args[0][captured.num_outputs :]
    sources = {id(source) for node in markers(captured.forward, parameter) for source in (node, *node.users)}
    views = [node for node in saved if id(node) in sources and getattr(node.target, "is_view", False)]
    assert views == []
    assert not any(node.target is parameter for node in saved)


def test_the_ticket_is_saved_first_and_names_the_backward_parameters() -> None:
    captured = record_of(Pair(), torch.randn(3, 4)).active.captured
    stamp = captured.forward.graph.output_node().args[0][captured.num_outputs]
    assert stamp.target is ticket
    names = [captured.param_names[key] for key in stamp.args[0]]
    assert names == ["down.weight"]  # the gradient of the input needs it; that of `up` needs only activations
    assert TICKET in [node.target for node in captured.backward.graph.find_nodes(op="placeholder")]


def test_a_tied_weight_is_one_parameter_with_a_gradient_from_each_use() -> None:
    captured = record_of(Shared(), torch.randint(0, 6, (2, 3))).active.captured
    assert list(captured.param_names.values()) == ["embed.weight"]
    assert len(markers(captured.forward, parameter)) == 1
    assert [node.args[1] for node in markers(captured.backward, gradient)] == list(captured.param_names) * 2


class TwoBiases(nn.Module):
    """The gradient of both parameters is one and the same tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(3))
        self.b = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.a + self.b).sin().sum()


def test_gradients_never_share_memory() -> None:
    model = TwoBiases()
    captured = record_of(model, torch.randn(3)).active.captured
    values = [node.args[0] for node in markers(captured.backward, gradient)]
    assert len(values) == len(set(values)) == 2
    assert torch.equal(model.a.grad, model.b.grad)
    assert model.a.grad.data_ptr() != model.b.grad.data_ptr()


# ----------------------------------------------------------------------------------------------------------------------
# `absent`: a parameter of other ranks is in the step as if this one read it, with a gradient of zeros.


class WithUnused(Pair):
    """A pair of layers, and two that its forward leaves alone."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Linear(4, 2)
        self.unread = nn.Linear(3, 2)


def captured_and_slots() -> tuple[Captured, dict[str, Slot]]:
    captured = record_of(WithUnused(), torch.randn(3, 4)).active.captured
    executor = slot_by_key(next(iter(captured.param_names))).sink
    return captured, executor.slots


def joined() -> tuple[Captured, Captured, StepGraph, StepGraph]:
    """The capture before and after `read` was put in, its weight trained, and the steps of both."""
    captured, slots = captured_and_slots()
    read, trained = [slots["read.weight"], slots["read.bias"], slots["up.weight"]], [slots["read.weight"]]
    joint = with_absent(captured, read, trained)
    return captured, joint, step_graph(captured, {}), step_graph(joint, {})


def nodes_of(half: fx.GraphModule) -> list[str]:
    return [node.format_node() for node in half.graph.nodes]


def test_parameters_of_other_ranks_are_in_the_step() -> None:
    _, _, before, after = joined()
    params = {storage.id: storage.nbytes for storage in after.storages if storage.kind is Kind.PARAM}
    own = {storage.id: storage.nbytes for storage in before.storages if storage.kind is Kind.PARAM}
    assert params == {**own, "read.weight": 32, "read.bias": 8}


def test_zero_gradients_are_added_behind_all_other_ops() -> None:
    _, _, before, after = joined()
    forward, backward = ([op.id for op in before.ops if op.phase is phase] for phase in (Phase.FORWARD, Phase.BACKWARD))
    assert [op.id for op in after.ops if op.phase is Phase.FORWARD] == forward
    *others, zeros = [op for op in after.ops if op.phase is Phase.BACKWARD]
    assert [op.id for op in others] == backward
    assert (zeros.reads, len(zeros.writes)) == ((), 1)
    made = next(storage for storage in after.storages if storage.id == zeros.writes[0])
    assert (made.kind, made.of, made.nbytes) == (Kind.GRAD, "read.weight", 32)


def test_zero_gradients_have_the_full_shape_of_the_parameter() -> None:
    _, joint, _, _ = joined()
    (node,) = joint.backward.graph.find_nodes(op="call_function", target=torch.ops.aten.full.default)[-1:]
    made = node.target(*node.args, **node.kwargs)
    assert torch.equal(made, torch.zeros(2, 4))
    assert (node.meta["val"].shape, node.meta["val"].dtype) == (made.shape, made.dtype)


def test_the_capture_stays_as_it_was() -> None:
    captured, slots = captured_and_slots()
    before = [nodes_of(captured.forward), nodes_of(captured.backward), dict(captured.param_names)]
    joint = with_absent(captured, [slots["read.weight"]], [slots["read.weight"], slots["up.weight"]])
    assert [nodes_of(captured.forward), nodes_of(captured.backward), dict(captured.param_names)] == before
    assert trained_keys(joint) - trained_keys(captured) == {slots["read.weight"].key}


def test_a_capture_without_absent_parameters_is_unchanged() -> None:
    captured, slots = captured_and_slots()
    own = [slots[name] for name in captured.param_names.values()]
    joint = with_absent(captured, own, own)
    assert nodes_of(joint.forward) == nodes_of(captured.forward)
    assert nodes_of(joint.backward) == nodes_of(captured.backward)
    assert joint.param_names == captured.param_names


# ----------------------------------------------------------------------------------------------------------------------
# Calls inside `with_deep_calls` find room for their frames, however deep they are.


NUM_CALLS = 1000


def leaf(first: int = 1, second: int = 2, third: int = 3) -> int:
    return first + second + third


def faults_of_calls_at(depth: int) -> int:
    """Return the page faults of a thousand calls of `leaf` below so many others."""
    if depth:
        return faults_of_calls_at(depth - 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(NUM_CALLS):
        leaf()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def most_faults() -> int:
    """Return the page faults at the depth that has most: of so many, some are at the end of a chunk of frames."""
    return max(faults_of_calls_at(depth) for depth in range(200))


@pytest.mark.skipif(sys.version_info >= (3, 14) or sys.platform != "linux", reason="seen in CPython 3.11 to 3.13")
def test_calls_across_the_end_of_a_frame_chunk_map_no_memory() -> None:
    assert most_faults() >= NUM_CALLS  # what is to be avoided does happen
    assert with_deep_calls(most_faults) < NUM_CALLS / 10


def test_deep_calls_pass_results_and_exceptions_through() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    assert with_deep_calls(lambda: "result") == "result"
    with pytest.raises(ZeroDivisionError):
        with_deep_calls(fail)


# ----------------------------------------------------------------------------------------------------------------------
# The workspace of attention's backward, by the formula of FlashAttention-2.


BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward.default


def backward(queries: tuple[int, ...], keys: tuple[int, ...]) -> torch.fx.Node:
    """Return a node of the backward with queries, keys and values of these shapes."""
    graph = torch.fx.Graph()
    inputs = [graph.placeholder(name) for name in ("grad", "query", "key", "value")]
    for node, shape in zip(inputs, (queries, queries, keys, keys), strict=True):
        node.meta["val"] = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    return graph.call_function(BACKWARD, tuple(inputs))


@pytest.mark.parametrize(
    ("queries", "keys", "expected_bytes"),
    [
        ((2, 4, 256, 64), (2, 4, 256, 64), 2 * 4 * 256 * (64 + 1) * 4),
        ((2, 4, 200, 80), (2, 4, 200, 80), 2 * 4 * 256 * (96 + 1) * 4),
        ((1, 8, 128, 64), (1, 2, 128, 64), 8 * 128 * (64 + 1) * 4 + 2 * 8 * 128 * 64 * 2),
    ],
)
def test_the_workspace_of_the_backward_of_attention(
    queries: tuple[int, ...], keys: tuple[int, ...], expected_bytes: int
) -> None:
    assert attention_bytes(backward(queries, keys), {}) == expected_bytes


# ----------------------------------------------------------------------------------------------------------------------
# What the capture of a step costs grows as its ops do, and nothing else runs in between.


def captured_with(num_blocks: int) -> int:
    """Capture a step of so many blocks; return the number of its ops."""
    torch._dynamo.reset()
    capture = capture_step(Stack(num_blocks=num_blocks), vectors(1), options=None)
    return len(capture.graph.ops)


class Counted(dict):
    """A dictionary that counts how many of its keys were looked at one after the other."""

    num_seen = 0

    def __iter__(self) -> Iterator[object]:
        for key in super().__iter__():
            Counted.num_seen += 1
            yield key

    def __reversed__(self) -> Iterator[object]:
        for key in super().__reversed__():
            Counted.num_seen += 1
            yield key


def test_known_storages_are_not_visited_for_each_op(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = convert._Builder.__init__

    def begin(builder: object, *args: object, **kwargs: object) -> None:
        usual(builder, *args, **kwargs)
        builder.drafts = Counted(builder.drafts)

    monkeypatch.setattr(convert._Builder, "__init__", begin)
    per_op: list[float] = []
    for num_blocks in (2, 8):
        Counted.num_seen = 0
        num_ops = captured_with(num_blocks)
        per_op.append(Counted.num_seen / num_ops)
    assert 0 < per_op[1] <= 1.1 * per_op[0]


def test_inputs_are_not_listed_for_each_saved_view(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    first_op = joint.first_op
    find_nodes = fx.Graph.find_nodes

    def count_finding(graph: fx.Graph, **wanted: object) -> list[fx.Node]:
        counts[-1] += 1
        return find_nodes(graph, **wanted)

    def count_first(graph: fx.Graph) -> fx.Node:
        counts[-1] += 1
        return first_op(graph)

    def show(*args: object, **options: object) -> object:
        with monkeypatch.context() as patch:
            patch.setattr(fx.Graph, "find_nodes", count_finding)
            patch.setattr(joint, "first_op", count_first)
            return show_in_backward(*args, **options)

    show_in_backward = joint._show_in_backward
    monkeypatch.setattr(joint, "_show_in_backward", show)
    for num_blocks in (2, 8):
        counts.append(0)
        captured_with(num_blocks)
    assert 0 < counts[1] == counts[0]


def test_the_step_of_a_capture_is_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    num_built = 0
    build = convert._Builder.build

    def count(builder: convert._Builder) -> StepGraph:
        nonlocal num_built
        num_built += 1
        return build(builder)

    monkeypatch.setattr(convert._Builder, "build", count)
    options = {"inner": "aot_eager", "report": False}
    compiled = torch.compile(Stack(num_blocks=2), backend="elixir", options=options)
    compiled(vectors(1)[0])
    assert num_built == 1
    (record,) = elixir.compilations(compiled)
    assert record.graph == convert.step_graph(record.active.captured, {})


def test_the_collector_is_off_only_while_a_step_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    during: list[bool] = []
    partition = joint.partition_hidden

    def look(*args: object, **options: object) -> object:
        during.append(gc.isenabled())
        return partition(*args, **options)

    monkeypatch.setattr("elixir_compile.session.backend.partition_hidden", look)
    options = {"inner": "aot_eager", "report": False}
    torch.compile(Stack(num_blocks=1), backend="elixir", options=options)(vectors(1)[0])
    torch._dynamo.reset()
    with pytest.raises(elixir.NoFeasiblePlan):
        torch.compile(Stack(num_blocks=1), backend="elixir", options={**options, "device_memory": 1})(vectors(1)[0])
    assert during == [False, False]
    assert gc.isenabled()


def test_pauses_of_the_collector_nest_and_end_with_an_exception() -> None:
    def fail() -> None:
        with collector_off():
            with collector_off():
                assert not gc.isenabled()
            assert not gc.isenabled()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert gc.isenabled()
    gc.disable()
    try:
        with collector_off():
            pass
        assert not gc.isenabled()  # it was off before
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("trace", "line"),
    [
        (
            '  File "/a/model.py", line 3, in forward\n    x = f(x)\n  File "/a/layer.py", line 9, in f\n    y',
            "layer.py:9",
        ),
        ('  File "/a/model.py", line 3, in forward\n    open(\'File "x\')', "model.py:3"),
        ("", ""),
        ("no frame", ""),
    ],
)
def test_an_op_has_the_source_line_of_its_innermost_frame(trace: str, line: str) -> None:
    node = fx.symbolic_trace(nn.Identity()).graph.output_node()
    node.meta["stack_trace"] = trace
    assert source_line(node) == line


class Tabled(nn.Module):
    """A block whose forward reads a table of its class, which Dynamo guards."""

    table = {"factor": 2.0}  # noqa: RUF012  (a constant of the class, as users write it)

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))
        self.unread = nn.Parameter(torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale * self.table["factor"]


@pytest.mark.parametrize("name", ["_arguments_of_type", "_is_meant"])
def test_guards_of_dynamo_are_not_read_for_each_parameter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    own = getattr(dynamo, name)

    def count(*args: object) -> object:
        counts[-1] += 1
        return own(*args)

    monkeypatch.setattr(dynamo, name, count)
    for num_blocks in (2, 8):
        counts.append(0)
        torch._dynamo.reset()
        options = {"inner": "aot_eager", "report": False}
        model = nn.Sequential(*(Tabled() for _ in range(num_blocks)))
        torch.compile(lambda x, model=model: model(x).sum(), backend="elixir", options=options)(vectors(1)[0])
    assert 0 < counts[1] <= 4 * counts[0]
