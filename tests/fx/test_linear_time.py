"""What the capture of a step costs grows as its ops do, and nothing else runs in between."""

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import fx, nn

import elixir_compile as elixir
from elixir_compile.base.process import collector_off
from elixir_compile.compat import dynamo
from elixir_compile.graph.capture import convert, joint
from elixir_compile.graph.capture.node_facts import source_line
from elixir_compile.ir import StepGraph
from elixir_compile.tools.preview.capture import capture_step
from tests.run.models import Stack, vectors


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
