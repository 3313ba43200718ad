"""The peak as a formula: equal to the timeline at the planned sizes and at any other."""

import dataclasses
import time
from dataclasses import replace

import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

from elixir_compile.base.errors import IllegalSchedule, InvalidPlan
from elixir_compile.ir import Activations, Kind, OpId, Plan, Saving, StepGraph, graph_at, sizes
from elixir_compile.step import peak_formula, plan_at, plan_timeline, resized, verify
from tests.pure.mixes import activations_of, group, mixed_graphs
from tests.pure.plans import bucket_of, make_plan, plans_of
from tests.pure.steps import GELU
from tests.pure.strategies import PATTERNS, Layer, chain, symbolic, symbolic_graphs

GRAPH = symbolic(
    chain([Layer(module=f"l{n}", params=((f"w{n}", 10),), frozen=False, act_numel=1) for n in range(2)]),
    pattern="{numel}*s0*s1",
    values=(("s0", 1), ("s1", 1)),
)
BUCKETS = [bucket_of(GRAPH, f"b{n}", [s for s in GRAPH.storages if s.id == f"w{n}"]) for n in range(2)]
KEPT = make_plan(GRAPH, BUCKETS, ["device", "device"])


def test_a_formula_worked_out_by_hand() -> None:
    """As in `test_timeline.test_everything_kept`: 80 of parameters, 160 of state, and per element of activation 8 of
    input and tangent, with 12 of s0, t1 and out at op 3, or 8 of d1 and d0 beside 80 of gradients at op 7."""
    assert peak_formula(GRAPH, KEPT) == "Max(16*s0*s1 + 320, 20*s0*s1 + 240)"


def test_a_single_row_needs_no_max_and_constant_sizes_no_formula() -> None:
    """Inference: 40 of parameters, and the input with two values at once."""
    constant = chain([Layer(module="l", params=(("w", 10),), frozen=False, act_numel=1)], training=False)
    bucket = bucket_of(constant, "b0", [s for s in constant.storages if s.kind is Kind.PARAM])
    plan = make_plan(constant, [bucket], ["device"])
    assert peak_formula(constant, plan) == ""
    assert peak_formula(symbolic(constant), plan) == "12*s0 + 40"


def test_offloaded_activations_are_in_no_row_while_away() -> None:
    """Per s0: 8 of input always. At op 2, `h` and `g` of 16 and the output of 100, with 240 of parameters and state; at
    op 5, `h`, `d` and `e` of 16, with 40 of gradient more; at op 6, `e` and 80 of gradients. Offloaded after op 1, `h`
    is not there at op 2. Made again, it is there at op 5 as `bwd.re_h`."""
    storages = (replace(storage, nbytes=100) if storage.id == "out" else storage for storage in GELU.storages)
    graph = symbolic(replace(GELU, storages=tuple(storages)))
    bucket = bucket_of(graph, "b0", [storage for storage in graph.storages if storage.kind is Kind.PARAM])

    def formula(*activations: Activations) -> str:
        return peak_formula(graph, make_plan(graph, [bucket], ["device"], activations))

    kept = "Max(24*s0 + 320, 56*s0 + 280, 140*s0 + 240)"
    away = "Max(24*s0 + 320, 56*s0 + 280, 124*s0 + 240)"
    assert formula() == formula(group(graph, "acts", Saving.KEEP, "h")) == kept
    assert formula(group(graph, "acts", Saving.RECOMPUTE, "g", "h")) == away
    assert formula(group(graph, "acts", Saving.OFFLOAD, "h")) == away


@st.composite
def planned(draw: st.DrawFn) -> tuple[StepGraph, Plan]:
    if draw(st.booleans()):
        return draw(plans_of(draw(symbolic_graphs())))
    values = (("s0", draw(st.integers(1, 9))), ("s1", draw(st.integers(1, 9))))
    graph = symbolic(draw(mixed_graphs()), draw(st.sampled_from(PATTERNS)), values)
    return draw(plans_of(graph, draw(activations_of(graph))))


@given(planned(), st.integers(1, 40), st.integers(1, 40))
def test_the_formula_gives_the_peak_of_the_timeline(found: tuple[StepGraph, Plan], batch: int, length: int) -> None:
    graph, plan = found
    formula = peak_formula(graph, plan)
    assert sizes.evaluate(formula, dict(graph.symbols)) == plan_timeline(graph, plan).peak.nbytes
    elsewhere = {"s0": batch, "s1": length}
    assert sizes.evaluate(formula, elsewhere) == plan_timeline(graph_at(graph, elsewhere), plan).peak.nbytes


@given(planned(), st.integers(1, 40), st.integers(1, 40))
def test_a_plan_resized_for_another_graph_is_legal(found: tuple[StepGraph, Plan], batch: int, length: int) -> None:
    graph, plan = found
    plan = dataclasses.replace(plan, symbols=graph.symbols, formula=peak_formula(graph, plan))
    there = graph_at(graph, {"s0": batch, "s1": length})
    moved = plan_at(there, plan)
    timeline = plan_timeline(there, moved)
    assert (moved.prediction.device_peak_bytes, moved.prediction.device_peak_at) == (
        timeline.peak.nbytes,
        timeline.peak.op,
    )
    assert moved.prediction.host_peak_bytes == timeline.host_bytes
    verify(there, dataclasses.replace(moved, budget_bytes=timeline.peak.nbytes))


def test_resizing_to_a_graph_without_symbols_sets_its_bytes() -> None:
    large = graph_at(GRAPH, {"s0": 3, "s1": 2})
    there = replace(
        large,
        symbols=(),
        storages=tuple(replace(storage, size="") for storage in large.storages),
        ops=tuple(replace(op, flops_size="") for op in large.ops),
    )
    moved = resized(there, KEPT)
    assert moved.prediction.device_peak_bytes == plan_timeline(there, KEPT).peak.nbytes
    assert moved.prediction.device_peak_bytes > KEPT.prediction.device_peak_bytes
    assert (moved.formula, moved.symbols) == ("", ())


def test_a_graph_without_an_op_of_the_plan_is_refused() -> None:
    first = replace(GRAPH.ops[0], id=OpId("fwd.other"))
    with pytest.raises(IllegalSchedule, match=r"fwd.0 names the op .*, which no region of this graph can run"):
        resized(replace(GRAPH, ops=(first, *GRAPH.ops[1:])), KEPT)


def test_sympy_parses_the_formula() -> None:
    formula = sympy.sympify(peak_formula(GRAPH, KEPT))
    assert formula.subs({"s0": 9, "s1": 7}) == 1500


def with_formula(budget_bytes: int) -> Plan:
    return dataclasses.replace(
        KEPT, formula=peak_formula(GRAPH, KEPT), symbols=GRAPH.symbols, budget_bytes=budget_bytes
    )


def test_the_largest_batch_of_a_plan() -> None:
    """16*9*7 + 320 = 1328 and 20*9*7 + 240 = 1500: the first row binds from 20 elements on."""
    plan = with_formula(budget_bytes=1500)
    planned_at_7 = dataclasses.replace(plan, symbols=(("s0", 1), ("s1", 7)))
    assert planned_at_7.largest_batch("s0") == 9
    assert planned_at_7.largest_batch("s0", budget_bytes=1499) == 8
    assert planned_at_7.largest_batch("s0", budget_bytes=300) == 0
    assert plan.largest_batch("s1") == 63


@pytest.mark.parametrize(
    ("plan", "symbol", "message"),
    [
        (KEPT, None, r"no size in plan chain depends on a symbol.*dynamic=True"),
        (with_formula(1500), None, r"depends on s0 \(planned for 1\), s1 \(planned for 1\). Name one"),
        (with_formula(1500), "s7", r"does not grow with s7; it depends on s0, s1"),
    ],
)
def test_a_question_without_an_answer(plan: Plan, symbol: str | None, message: str) -> None:
    with pytest.raises(InvalidPlan, match=message):
        plan.largest_batch(symbol)


def test_a_large_step_has_its_formula_quickly() -> None:
    """5,000 ops whose peaks differ: a second, where a slow machine gets tenfold of the 0.1 s."""
    layers = [Layer(module=f"l{n}", params=((f"w{n}", n + 1),), frozen=False, act_numel=n + 1) for n in range(1250)]
    graph = symbolic(chain(layers), pattern="{numel}*s0 + s0 + 8")
    params = [storage for storage in graph.storages if storage.kind is Kind.PARAM]
    buckets = [bucket_of(graph, f"b{n}", params[n : n + 4]) for n in range(0, 1250, 4)]
    plan = make_plan(graph, buckets, ["host"] * len(buckets))
    start_s = time.process_time()
    assert peak_formula(graph, plan)
    assert time.process_time() - start_s < 1.0
