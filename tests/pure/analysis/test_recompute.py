"""The step with repeated ops: worked out by hand, and the same values by symbolic evaluation."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elixir_compile.base.errors import InvalidPlan
from elixir_compile.ir import Activations, Kind, Phase, Saving, StepGraph, Storage, StorageId
from elixir_compile.step import as_run, fused, repeats
from elixir_compile.step.as_run import with_repeats
from tests.pure.graph_text import parse_graph
from tests.pure.mixes import activations_of, group, layers_of, mixed_graphs
from tests.pure.steps import GELU, LAYERS

NAMES = [op.id for op in GELU.ops]


def again(graph: StepGraph, *storages: str) -> tuple[Activations, ...]:
    return (group(graph, "again", Saving.RECOMPUTE, *storages),)


def test_an_activation_is_recomputed_right_before_its_reader() -> None:
    """`bwd.mm_1` reads g first. `bwd.re_gelu` makes it from h, which is kept; g itself goes after the forward."""
    assert [(repeat.op, repeat.before) for repeat in repeats(GELU, again(GELU, "g"))] == [("fwd.gelu", "bwd.mm_1")]
    step = as_run(GELU, again(GELU, "g"))
    assert [op.id for op in step.ops] == [*NAMES[:3], "bwd.re_gelu", *NAMES[3:]]
    assert (step.ops[3].reads, step.ops[3].writes) == (("h",), ("bwd.re_g",))
    assert step.ops[4].reads == ("bwd.re_g", "tangent")
    kinds = {storage.id: storage.kind for storage in step.storages}
    assert (kinds["g"], kinds["bwd.re_g"], kinds["h"]) == (Kind.TEMP, Kind.TEMP, Kind.SAVED)


def test_inputs_of_a_repeated_op_are_recomputed_once_before_it() -> None:
    """Both are dropped: `bwd.mm_1` needs g and so h, which `bwd.gelu_1` then finds."""
    found = repeats(GELU, again(GELU, "g", "h"))
    assert [(repeat.op, repeat.before) for repeat in found] == [("fwd.mm", "bwd.mm_1"), ("fwd.gelu", "bwd.mm_1")]
    step = as_run(GELU, again(GELU, "g", "h"))
    assert [op.id for op in step.ops] == [*NAMES[:3], "bwd.re_mm", "bwd.re_gelu", *NAMES[3:]]
    assert [op.reads for op in step.ops if op.id in ("bwd.re_mm", "bwd.re_gelu", "bwd.gelu_1")] == [
        ("x", "w0"),
        ("bwd.re_h",),
        ("bwd.re_h", "d"),
    ]


def test_extra_saved_activations_are_read_directly() -> None:
    """`n0` is not saved. Once a plan keeps it, r0 is made from it, and `n0` is no longer a passing value."""
    kept = group(LAYERS, "h.1.input", Saving.KEEP, "n0")
    step = as_run(LAYERS, (kept, *again(LAYERS, "r0")))
    assert next(storage.kind for storage in step.storages if storage.id == "n0") is Kind.SAVED
    assert [op.id for op in step.ops if op.id.startswith("bwd.re_")] == ["bwd.re_add_0"]
    without = [repeat.op for repeat in repeats(LAYERS, again(LAYERS, "r0"))]
    assert without == ["fwd.norm_0", "fwd.add_0"]


def test_nothing_dropped_changes_nothing() -> None:
    kept = (group(GELU, "all", Saving.KEEP, "h", "g"),)
    assert as_run(GELU, kept) == as_run(GELU) == as_run(as_run(GELU))


def test_ops_that_must_run_once_are_not_repeated() -> None:
    with pytest.raises(InvalidPlan, match=r"m1 is to be recomputed, but fwd\.drop_1 must not run twice"):
        as_run(LAYERS, again(LAYERS, "m1"))


TWO = parse_graph("""
graph two
storages
  x  input  float32  8
  stats  buffer  float32  4
  k  saved  float32  4
  s  saved  float32  4
  e  saved  float32  4
  d  temp  float32  4
  f  temp  float32  4
outputs
aliases
ops
  fwd.split  aten.split forward  reads x  writes k s
  fwd.exp  aten.exp forward  reads k  writes e
  bwd.mm  aten.mm backward  reads e  writes d
  bwd.mm_1  aten.mm backward  reads k s d  writes f
""")


def test_tangents_arrive_with_the_first_op_of_the_backward() -> None:
    """`bwd.mm` writes what a capture calls by its name, and before that the tangent, which autograd hands in first."""
    own = {StorageId("d"): StorageId("bwd.mm")}
    storages = tuple(replace(s, id=own.get(s.id, s.id)) for s in TWO.storages)
    tangent = Storage(id=StorageId("tangent"), nbytes=4, kind=Kind.TEMP, dtype="float32")
    first = replace(TWO.ops[2], reads=("e", tangent.id), writes=(tangent.id, "bwd.mm"))  # pyright: ignore
    last = replace(TWO.ops[3], reads=("k", "s", "bwd.mm"))  # pyright: ignore
    graph = replace(TWO, ops=(*TWO.ops[:2], first, last), storages=(*storages, tangent))
    step = as_run(graph, again(graph, "e"))
    assert [(op.id, op.writes) for op in step.ops[2:4]] == [
        ("bwd.re_exp", ("tangent", "bwd.re_e")),
        ("bwd.mm", ("bwd.mm",)),
    ]


def test_a_kept_result_is_read_although_its_op_is_repeated_later() -> None:
    """`e` is made again from the kept `k`. Later `split` runs again for `s` and makes `k` too, too late for `e`."""
    step = as_run(TWO, again(TWO, "s", "e"))
    assert [(op.id, op.reads) for op in step.ops[2:]] == [
        ("bwd.re_exp", ("k",)),
        ("bwd.mm", ("bwd.re_e",)),
        ("bwd.re_split", ("x",)),
        ("bwd.mm_1", ("k", "bwd.re_s", "d")),
    ]


def test_an_overwritten_storage_cannot_be_read_by_a_repeat() -> None:
    """`exp` reads the buffer before `fwd.copy` updates it: a second run would read what the next step should."""
    copy = replace(TWO.ops[0], id="fwd.copy", reads=("stats", "k"), writes=("stats",), once=True)  # pyright: ignore
    exp = replace(TWO.ops[1], reads=("k", "stats"))  # pyright: ignore
    graph = replace(TWO, ops=(TWO.ops[0], exp, copy, *TWO.ops[2:]))
    with pytest.raises(InvalidPlan, match=r"stats is to be recomputed, but fwd\.copy must not run twice"):
        as_run(graph, again(graph, "e"))
    after = replace(graph, ops=(TWO.ops[0], copy, exp, *TWO.ops[2:]))
    assert "bwd.re_exp" in [op.id for op in as_run(after, again(after, "e")).ops]


def test_a_storage_of_two_writers_is_not_recomputed_by_the_first() -> None:
    """`split` runs again for `k`. It writes `s` too, but `fwd.add` has changed that since."""
    add = replace(TWO.ops[1], id="fwd.add", reads=("s",), writes=("s",), once=True)  # pyright: ignore
    graph = replace(TWO, ops=(*TWO.ops[:2], add, *TWO.ops[2:]))
    assert "bwd.re_split" in [op.id for op in as_run(graph, again(graph, "k")).ops]
    with pytest.raises(InvalidPlan, match=r"s is to be recomputed, but no single op computes it"):
        as_run(graph, again(graph, "k", "s"))


def values(graph: StepGraph) -> dict[str, int]:
    """What every storage holds in the end: each op is a pure hash of its target and of what it reads; an op that must
    run once never gives the same twice."""
    held: dict[str, int] = {storage.id: hash(storage.id) for storage in graph.storages}
    for op in graph.ops:
        if op.phase is Phase.UPDATE:
            continue
        made = hash((op.id if op.once else op.target, *(held[name] for name in op.reads)))
        held |= {name: hash((made, place)) for place, name in enumerate(op.writes)}
    return held


@st.composite
def saving_steps(draw: st.DrawFn) -> tuple[StepGraph, Sequence[Activations]]:
    graph = draw(mixed_graphs())
    return graph, draw(activations_of(graph) if draw(st.booleans()) else layers_of(graph))


@given(saving_steps())
def test_a_step_with_repeats_computes_the_same_results(found: tuple[StepGraph, tuple[Activations, ...]]) -> None:
    """Outputs, gradients and all else that the backward writes, except what it overwrites of the forward."""
    graph, activations = found
    before, after = values(graph), values(with_repeats(graph, activations))
    kinds = {storage.id: storage.kind for storage in graph.storages}
    made = {name for op in graph.ops if op.phase is Phase.BACKWARD for name in op.writes}
    dropped = {name for group in activations if group.saving is Saving.RECOMPUTE for name in group.storages}
    checked = (made | set(graph.outputs)) - dropped
    assert {name for name, kind in kinds.items() if kind is Kind.GRAD} <= checked
    assert {name: before[name] for name in checked} == {name: after[name] for name in checked}


@given(saving_steps())
def test_the_backward_reads_no_dropped_activation(found: tuple[StepGraph, tuple[Activations, ...]]) -> None:
    graph, activations = found
    step = as_run(graph, activations)
    dropped = {name for group in activations if group.saving is Saving.RECOMPUTE for name in group.storages}
    stored = {name for group in activations if group.saving is not Saving.RECOMPUTE for name in group.storages}
    saved = {s.id for s in graph.storages if s.kind is Kind.SAVED}
    made = {name for op in step.ops if op.phase is Phase.FORWARD for name in op.writes} - {"buffer"}
    for op in step.ops:
        if op.phase is Phase.BACKWARD:
            assert dropped.isdisjoint((*op.reads, *op.writes))
            # What the forward makes reaches the backward only where it is saved or stored.
            assert made.intersection(op.reads) <= saved | stored


@given(saving_steps())
def test_fused_ops_used_again_from_another_step_equal_new_ones(
    found: tuple[StepGraph, tuple[Activations, ...]],
) -> None:
    """`as_run` takes them from the step without recomputation, `fused` alone makes each op anew."""
    graph, activations = found
    assert as_run(graph, activations) == fused(with_repeats(graph, activations))


@given(saving_steps())
def test_the_ops_of_the_graph_stay_in_their_order(found: tuple[StepGraph, tuple[Activations, ...]]) -> None:
    graph, activations = found
    step = as_run(graph, activations)
    names = {op.id for op in graph.ops}
    assert [op.id for op in step.ops if op.id in names] == [op.id for op in graph.ops]
    again = [op.id for op in step.ops if op.id not in names]
    assert again == [f"bwd.re_{repeat.op.removeprefix('fwd.')}" for repeat in repeats(graph, activations)]
