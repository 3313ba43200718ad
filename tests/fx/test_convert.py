"""`graph.capture.convert`: storages, aliases and kinds of a captured step, worked out by hand."""

import dataclasses

import pytest
import torch
from torch import nn

import elixir_compile as elixir
from elixir_compile import compat
from elixir_compile.graph.capture.convert import step_graph
from elixir_compile.graph.capture.markers import gradient, key_of
from elixir_compile.graph.capture.node_facts import source_of
from elixir_compile.graph.capture.tracing import trace_step
from elixir_compile.ir import Kind, Phase, StepGraph
from tests.fx.captures import Pair, Shared, record_of

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
