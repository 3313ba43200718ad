"""Regions begin with layers where enough of them are equal, and what a plan moves waits for their edges."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elixir_compile.base.options import Planner
from elixir_compile.ir import Phase, Plan, StepGraph, Verb
from elixir_compile.search import Problem, plan
from elixir_compile.search.space.layers import LayerSpan, layer_spans, layers_alike
from elixir_compile.step import verify
from tests.pure.graph_text import parse_graph
from tests.pure.search.test_planner import assert_counts_agree, needed_bytes, problem_of

FORWARD = """\
  fwd.norm_{i}  aten.norm forward  reads {x} b{i}  writes n{i}  moved 96  module h.{i}  kernel reduction
  fwd.up_{i}  aten.mm forward  reads n{i} u{i}  writes a{i}  flops 4000  moved 500  module h.{i}.mlp
  fwd.gelu_{i}  aten.gelu forward  reads a{i}  writes g{i}  moved 256  module h.{i}.mlp  kernel pointwise
  fwd.down_{i}  aten.mm forward  reads g{i} d{i}  writes m{i}  flops 4000  moved 500  module h.{i}.mlp
  fwd.add_{i}  aten.add forward  reads m{i} {x}  writes x{i}  moved 96  module h.{i}  kernel pointwise
"""
BACKWARD = """\
  bwd.down_w_{i}  aten.mm backward  reads g{i} {e}  writes d{i}.grad  flops 4000  moved 500  module h.{i}.mlp
  bwd.down_{i}  aten.mm backward  reads {e} d{i}  writes eg{i}  flops 4000  moved 500  module h.{i}.mlp
  bwd.gelu_{i}  aten.gelu_backward backward  reads a{i} eg{i}  writes ea{i}  moved 384  module h.{i}  kernel pointwise
  bwd.up_w_{i}  aten.mm backward  reads n{i} ea{i}  writes u{i}.grad  flops 4000  moved 500  module h.{i}.mlp
  bwd.up_{i}  aten.mm backward  reads ea{i} u{i}  writes en{i}  flops 4000  moved 500  module h.{i}.mlp
  bwd.norm_{i}  aten.norm_backward backward  reads en{i} n{i} b{i}  writes eb{i} b{i}.grad  moved 96  module h.{i}
  bwd.add_{i}  aten.add backward  reads eb{i} {e}  writes e{i}  moved 96  kernel pointwise
"""
STORAGES = """\
  b{i}  param  float32  32
  u{i}  param  float32  400
  d{i}  param  float32  400
  n{i}  saved  float32  32
  a{i}  saved  float32  128
  g{i}  saved  float32  128
  m{i}  saved  float32  32
  x{i}  saved  float32  32
  b{i}.grad  grad  float32  32  of b{i}
  u{i}.grad  grad  float32  400  of u{i}
  d{i}.grad  grad  float32  400  of d{i}
  eg{i}  temp  float32  128
  ea{i}  temp  float32  128
  en{i}  temp  float32  32
  eb{i}  temp  float32  32
  e{i}  temp  float32  32
"""


def blocks(num_layers: int, target: str = "aten.mm") -> StepGraph:
    """Return the step of residual blocks, each a norm and two matrix products by `target`, with a head behind them."""
    order = range(num_layers)
    forward = [FORWARD.format(i=i, x=f"x{i - 1}" if i else "x") for i in order]
    backward = [BACKWARD.format(i=i, e=f"e{i + 1}" if i + 1 < num_layers else "tangent") for i in reversed(order)]
    params = " ".join(f"{kind}{i}" for kind in "bud" for i in order)
    grads = " ".join(f"{kind}{i}.grad" for kind in "bud" for i in order)
    text = [
        "graph blocks", "storages", "  x  input  float32  32", "  tangent  input  float32  32",
        "  y  temp  float32  32", *(STORAGES.format(i=i).rstrip() for i in order), "outputs", "  y", "aliases", "ops",
        *(part.rstrip() for part in forward),
        f"  fwd.head  aten.mm forward  reads x{num_layers - 1}  writes y  flops 100  moved 64  module head",
        *(part.rstrip() for part in backward), f"  update  update update  reads {params} {grads}",
    ]  # fmt: skip
    return parse_graph("\n".join(text).replace("aten.mm", target) + "\n")


def starts_of(made: Plan, phase: Phase) -> list[str]:
    """Return the first op of each region of `phase`."""
    return [str(region.first) for region in made.regions if region.phase is phase]


def asked(num_layers: int = 5, least: int | None = 4, **more: object) -> Problem:
    return replace(problem_of(blocks(num_layers)), least_alike=least, **more)


def test_spans_go_from_the_first_op_of_a_layer_to_its_last() -> None:
    ops = blocks(4).ops
    spans = layer_spans(ops, layers_alike(blocks(4), 4))
    assert spans[:2] == (LayerSpan(0, 1, 3, 4), LayerSpan(5, 6, 8, 9))
    # What follows the last layer, then the backward, whose sums of gradients are of no module.
    assert spans[4:6] == (LayerSpan(20, 20, 20, 19), LayerSpan(21, 21, 25, 27))


@pytest.mark.parametrize("least", [None, 6])
def test_too_few_equal_layers_are_one_region(least: int | None) -> None:
    assert len(plan(asked(least=least)).regions) == 2


def test_convolutions_are_not_cut_by_layer() -> None:
    assert len(plan(replace(problem_of(blocks(5, "aten.convolution")), least_alike=4)).regions) == 2


def test_a_plan_that_moves_nothing_cuts_layers_at_their_first_product() -> None:
    problem = asked()
    made = plan(problem)
    verify(problem.graph, made)
    assert not {action.verb for action in made.schedules[0].actions} - {Verb.RUN, Verb.REDUCE, Verb.UPDATE}
    ups = [f"fwd.up_{i}" for i in range(1, 5)]
    assert starts_of(made, Phase.FORWARD) == ["fwd.norm_0", *ups, "fwd.head"]
    assert starts_of(made, Phase.BACKWARD) == [f"bwd.down_w_{i}" for i in reversed(range(5))]


@pytest.mark.parametrize("planner", ["greedy", "milp", "zero3_offload"])
def test_a_plan_that_moves_parameters_cuts_layers_at_their_first_op(planner: Planner) -> None:
    problem = asked()
    tight = replace(problem, budget_bytes=needed_bytes(problem, planner) + 600)
    made = plan(tight, planner)
    verify(problem.graph, made)
    # Each layer is a bucket, which is there from its norm on, and goes with its last op. A plan of `milp` may also let
    # activations leave in the middle of a layer.
    starts = starts_of(made, Phase.FORWARD)
    layers = [*(f"fwd.norm_{i}" for i in range(5)), "fwd.head"]
    assert [start for start in starts if planner != "milp" or start in layers] == layers


def test_the_edges_of_layers_take_little_memory() -> None:
    plain, by_layer = needed_bytes(asked(least=None)), needed_bytes(asked())
    assert plain <= by_layer <= 1.1 * plain


@given(st.lists(st.integers(0, 5), min_size=20, max_size=20), st.integers(0, 2))
@settings(max_examples=40)
def test_the_search_and_the_timeline_count_the_same_bytes(picks: Sequence[int], ahead: int) -> None:
    assert_counts_agree(asked(), picks, ahead)
