"""`step.stages` and `step.stages`: layers, what crosses a cut, and the bytes of one stage."""

import pytest

from elixir_compile.ir import Kind
from elixir_compile.step.stages import LayeredStep, StageMemory, layered, stage_memory
from tests.pure.graph_text import parse_graph

TIED = parse_graph("""
graph tied
storages
  ids  input  int64  8
  wte  param  float32  400
  w0  param  float32  40
  w1  param  float32  40
  mask  temp  bool  4
  e  saved  float32  16
  a0  saved  float32  64
  d0  temp  float32  2
  h0  saved  float32  16
  a1  saved  float32  32
  h1  saved  float32  16
  logits  saved  float32  100
  loss  temp  float32  4
  g  temp  float32  16
  g1  temp  float32  32
  g0  temp  float32  16
  wte.grad  grad  float32  400  of wte
  w1.grad  grad  float32  40  of w1
  w0.grad  grad  float32  40  of w0
outputs
  loss
aliases
ops
  fwd.embed  aten.embedding forward  reads ids wte  writes e  module wte
  fwd.mask  aten.mask forward  reads ids  writes mask
  fwd.mm_0  aten.mm forward  reads e w0  writes a0  flops 100  module h.0
  fwd.drop_0  aten.drop forward  reads a0  writes d0  module h.0
  fwd.add_0  aten.add forward  reads a0 d0 e mask  writes h0  module h.0
  fwd.mm_1  aten.mm forward  reads h0 w1  writes a1  flops 100  module h.1
  fwd.add_1  aten.add forward  reads a1 h0 mask  writes h1  module h.1
  fwd.head  aten.mm forward  reads h1 wte  writes logits  flops 100  module head
  fwd.loss  aten.loss forward  reads logits  writes loss
  bwd.loss  aten.loss backward  reads logits h1 wte  writes g wte.grad  module head
  bwd.mm_1  aten.mm backward  reads g a1 h0 w1  writes g1 w1.grad  module h.1
  bwd.mm_0  aten.mm backward  reads g1 a0 e w0  writes g0 w0.grad  module h.0
  bwd.embed  aten.embedding backward  reads g0 ids  writes wte.grad  module wte
  update  update update  reads wte w0 w1 wte.grad w1.grad w0.grad
""")


@pytest.fixture(scope="module")
def step() -> LayeredStep:
    return layered(TIED)


def test_layers_are_what_precedes_the_first_number_the_numbers_and_what_follows_the_last(step: LayeredStep) -> None:
    assert [layer.modules for layer in step.layers] == [("wte",), ("h.0",), ("h.1",), ("head",)]


def test_an_op_without_a_layer_of_its_own_belongs_to_the_layer_of_the_op_before(step: LayeredStep) -> None:
    assert (step.numbers["fwd.mask"], step.numbers["fwd.loss"], step.numbers["bwd.embed"]) == (0, 3, 0)
    assert "update" not in step.numbers


def test_only_what_depends_on_parameters_crosses_a_cut(step: LayeredStep) -> None:
    """Between the layers of numbers, `h0` crosses, and the mask does not."""
    assert step.crossings == ((), ("e",), ("h0",), ("h1",))
    assert step.crossing_bytes == (0, 16, 16, 16)


def test_a_module_without_parameters_joins_the_layer_before_it() -> None:
    text = """
graph list
storages
  x  input  float32  8
  w0  param  float32  40
  w1  param  float32  40
  a  temp  float32  8
  b  temp  float32  8
  c  temp  float32  8
outputs
  c
aliases
ops
  fwd.mm_0  aten.mm forward  reads x w0  writes a  flops 100  module 0
  fwd.gelu  aten.gelu forward  reads a  writes b  module 1
  fwd.mm_1  aten.mm forward  reads b w1  writes c  flops 100  module 2
"""
    assert [layer.modules for layer in layered(parse_graph(text)).layers] == [("0", "1"), ("2",)]


def test_without_numbers_each_module_with_parameters_may_begin_a_stage() -> None:
    text = """
graph plain
storages
  x  input  float32  8
  w0  param  float32  40
  w1  param  float32  40
  a  temp  float32  8
  b  temp  float32  8
outputs
  b
aliases
ops
  fwd.mm_0  aten.mm forward  reads x w0  writes a  flops 100  module up
  fwd.mm_1  aten.mm forward  reads a w1  writes b  flops 100  module down
"""
    assert [layer.modules for layer in layered(parse_graph(text)).layers] == [("up",), ("down",)]


def test_the_step_of_a_stage_has_the_work_of_others_as_inputs(step: LayeredStep) -> None:
    own = step.stage_graph(1, 3)
    assert [op.id for op in own.ops] == [
        "fwd.mm_0",
        "fwd.drop_0",
        "fwd.add_0",
        "fwd.mm_1",
        "fwd.add_1",
        "bwd.mm_1",
        "bwd.mm_0",
    ]
    kinds = {storage.id: storage.kind for storage in own.storages}
    assert {name for name, kind in kinds.items() if kind is Kind.INPUT} == {"e", "mask", "g"}
    assert own.outputs == ("h1",)


def test_the_bytes_of_a_stage_are_those_worked_out_by_hand(step: LayeredStep) -> None:
    """Layers h.0 and h.1. A forward leaves a0, h0, a1 and its output h1: 64 + 16 + 32 + 16 = 128. It holds the most at
    its end, as d0 is gone, and a backward at its first op with g1 of 32, and at the second with g1 and g0 without a1
    and h0."""
    assert stage_memory(step.stage_graph(1, 3)) == StageMemory(saved_bytes=128, forward_bytes=128, backward_bytes=160)


def test_a_whole_model_as_one_stage_sends_nothing_and_keeps_what_its_backward_reads(step: LayeredStep) -> None:
    """e, a0, h0, a1, h1 and the logits, with the loss that torch keeps: 16 + 64 + 16 + 32 + 16 + 100 + 4."""
    assert stage_memory(step.stage_graph(0, 4)).saved_bytes == 248
