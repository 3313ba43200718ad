"""Lives of storages, windows of buckets, groups of saved activations, and where the backward may update a bucket."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given

from elixir_compile.ir import (
    Action,
    Activations,
    Bucket,
    BucketRef,
    GradientRef,
    Kind,
    Op,
    OpId,
    Phase,
    Plan,
    RegionRef,
    StepGraph,
    Storage,
    StorageId,
    Tier,
    Verb,
)
from elixir_compile.step import Depth, activation_groups, as_run, liveness, use_windows
from elixir_compile.step.as_run import given_storages, saved_storages
from elixir_compile.step.liveness import closing_verbs
from tests.pure.mixes import layers_of, mixed_graphs
from tests.pure.plans import action_of, bucket_of, make_plan, planned_graphs, with_actions
from tests.pure.steps import GELU, LAYERS
from tests.pure.strategies import Layer, chain, step_graphs

# ----------------------------------------------------------------------------------------------------------------------
# Lives of the storages of graphs small enough to read.


def lives_of(graph: StepGraph) -> dict[str, tuple[int, int]]:
    return {name: (life.first, life.last) for name, life in liveness(graph).lives.items()}


def test_a_two_layer_step() -> None:
    """Forward: 0 mm(x w0)->t0, 1 relu(t0)->s0, 2 mm(s0 w1)->t1, 3 relu(t1)->out. Backward: 4 mm(s0 tangent)->w1.grad,
    5 mm(tangent w1)->d1, 6 mm(x d1)->w0.grad, 7 mm(d1 w0)->d0, 8 update. The last forward op writes the output."""
    graph = chain([Layer(module=f"l{n}", params=((f"w{n}", 10),), frozen=False, act_numel=4) for n in range(2)])
    assert lives_of(graph) == {
        "x": (0, 8),
        "w0": (0, 8),
        "t0": (0, 1),
        "s0": (1, 4),
        "w1": (0, 8),
        "t1": (2, 3),
        "out": (3, 3),
        "tangent": (0, 8),
        "w1.grad": (4, 8),
        "d1": (5, 7),
        "w0.grad": (6, 8),
        "d0": (7, 7),
    }


def test_outputs_live_through_the_forward_untouched_storages_never() -> None:
    """`early` is written at op 0 and handed to the caller, so it lives until op 2, the last of the forward; `late` is
    written twice; `idle` is touched by nothing; a buffer lives throughout."""
    names = {"early": Kind.TEMP, "late": Kind.TEMP, "idle": Kind.TEMP, "buffer": Kind.BUFFER}
    storages = tuple(Storage(id=StorageId(n), nbytes=1, kind=k, dtype="float32") for n, k in names.items())
    touched = [("early", Phase.FORWARD), ("late", Phase.FORWARD), ("late", Phase.FORWARD), ("buffer", Phase.BACKWARD)]
    ops = tuple(
        Op(id=OpId(f"op{n}"), target="aten.mm", phase=phase, reads=(), writes=(StorageId(name),))
        for n, (name, phase) in enumerate(touched)
    )
    graph = StepGraph(name="g", ops=ops, storages=storages, outputs=(StorageId("early"), StorageId("idle")))
    assert lives_of(graph) == {"early": (0, 2), "late": (1, 2), "buffer": (0, 3)}


@given(step_graphs())
def test_every_op_finds_its_storages_live(graph: StepGraph) -> None:
    lives = liveness(graph).lives
    for index, op in enumerate(graph.ops):
        assert all(lives[name].first <= index <= lives[name].last for name in (*op.reads, *op.writes))


# ----------------------------------------------------------------------------------------------------------------------
# Windows in which buckets are used, on graphs small enough to read.


def buckets_of(graph: StepGraph, *groups: str) -> list[Bucket]:
    """One bucket per group of parameter names."""
    params = {storage.id: storage for storage in graph.storages if storage.kind is Kind.PARAM}
    return [bucket_of(graph, name, [params[n] for n in params if n in name.split("+")]) for name in groups]


def spans(graph: StepGraph, buckets: list[Bucket]) -> dict[str, list[tuple[str, int, int]]]:
    found = use_windows(graph, buckets)
    return {name: [(str(w.phase), w.first, w.last) for w in windows] for name, windows in found.items()}


def stack(*names: str, sizes: dict[str, int] | None = None) -> StepGraph:
    sizes = sizes or {}
    layers = [Layer(module=n, params=((n, sizes.get(n, 10)),), frozen=False, act_numel=1) for n in names]
    return chain(layers)


def test_a_tied_embedding_has_two_windows() -> None:
    """Forward: embed at 0, a at 2, embed at 4. Backward: gradients at 6, 8, 10, uses of parameters at 7, 9, 11."""
    graph = stack("embed", "a", "embed")
    assert spans(graph, buckets_of(graph, "embed", "a")) == {
        "embed": [("forward", 0, 0), ("forward", 4, 4), ("backward", 7, 7), ("backward", 11, 11)],
        "a": [("forward", 2, 2), ("backward", 9, 9)],
    }


def test_uses_with_no_other_bucket_between_are_one_window() -> None:
    """`a` is used at ops 2 and 4 with only a relu between, in the backward at 11 and 13."""
    graph = stack("embed", "a", "a", "b")
    assert spans(graph, buckets_of(graph, "embed", "a", "b"))["a"] == [("forward", 2, 4), ("backward", 11, 13)]


def test_parameters_of_one_bucket_share_its_windows() -> None:
    graph = stack("a", "b", "c")
    assert spans(graph, buckets_of(graph, "a+b", "c"))["a+b"] == [("forward", 0, 2), ("backward", 9, 11)]


@pytest.mark.parametrize(("small", "num_windows"), [(9, 1), (10, 2)])
def test_uses_of_a_bucket_under_a_sixteenth_do_not_end_windows(small: int, num_windows: int) -> None:
    """160 elements against 9 (less than 160 / 16) and against 10 (not less)."""
    graph = stack("big", "small", "big", sizes={"big": 160, "small": small})
    found = use_windows(graph, buckets_of(graph, "big", "small"))
    windows = next(windows for name, windows in found.items() if name == "big")
    assert [sum(w.phase is phase for w in windows) for phase in (Phase.FORWARD, Phase.BACKWARD)] == [num_windows] * 2


def test_an_unused_bucket_has_no_windows() -> None:
    graph = chain([Layer(module="a", params=(("a", 1),), frozen=False, act_numel=1)], unused_numel=3)
    assert spans(graph, buckets_of(graph, "unused", "a"))["unused"] == []


@given(planned_graphs())
def test_windows_cover_every_use_and_are_apart(planned: tuple[StepGraph, Plan]) -> None:
    graph, plan = planned
    found = use_windows(graph, plan.buckets)
    for bucket in plan.buckets:
        uses = [
            index
            for index, op in enumerate(graph.ops)
            if op.phase is not Phase.UPDATE and set(op.reads) & set(bucket.params)
        ]
        windows = found[bucket.id]
        assert [at for at in uses if any(w.first <= at <= w.last for w in windows)] == uses
        assert {w.first for w in windows} | {w.last for w in windows} <= set(uses)
        assert all(graph.ops[w.first].phase is w.phase is graph.ops[w.last].phase for w in windows)
        others = [other for other in plan.buckets if other is not bucket and other.nbytes * 16 >= bucket.nbytes]
        for one, two in itertools.pairwise(windows):
            between = graph.ops[one.last + 1 : two.first]
            parted = any(set(op.reads) & set(other.params) for op in between for other in others)
            assert parted or one.phase is not two.phase


# ----------------------------------------------------------------------------------------------------------------------
# Where each bucket may be updated inside the backward, on schedules small enough to read.


GRAPH = chain([Layer(module=f"l{n}", params=((f"w{n}", 10),), frozen=False, act_numel=4) for n in range(2)])
BUCKETS = [
    bucket_of(GRAPH, f"b{n}", [s for s in GRAPH.storages if s.kind is Kind.PARAM and s.id == f"w{n}"]) for n in (0, 1)
]


def plan_of(home: str, text: str) -> Plan:
    """Return a plan with the actions in `text`; regions are those of a legal one."""
    return with_actions(make_plan(GRAPH, BUCKETS, [home, home]), map(action_of, text.strip().split("\n")))


def reader_of(bucket: str, home: str) -> str:
    """Return a region of the backward that reads `bucket`."""
    regions = plan_of(home, "update b0").regions
    return next(region.id for region in reversed(regions) if bucket in region.buckets)


@pytest.mark.parametrize(
    ("home", "text", "verb"),
    [
        ("device", "run READER\nreduce b1", Verb.REDUCE),
        ("device", "reduce b1\nrun READER", None),
        ("host", "gather b1\nwait b1\nrun READER\nrelease b1\nreduce b1\noffload b1.grad", Verb.OFFLOAD),
        ("host", "reduce b1\noffload b1.grad\ngather b1\nwait b1\nrun READER\nrelease b1", Verb.RELEASE),
        ("host", "reduce b1\noffload b1.grad\nrun READER\nrelease b1\nrun READER\nrelease b1", None),
        ("host", "reduce b1\noffload b1.grad\nrun READER", None),
        ("host", "reduce b1\nrun READER\nrelease b1", None),
        ("host", "reduce b1\nrelease b1\noffload b1.grad", None),
    ],
)
def test_a_bucket_closes_with_its_last_action(home: str, text: str, verb: Verb | None) -> None:
    plan = plan_of(home, text.replace("READER", reader_of("b1", home)))
    assert closing_verbs(plan).get(BUCKETS[1].id) is verb


@given(planned_graphs(training=True))
def test_nothing_reads_a_bucket_behind_its_closing(planned: tuple[StepGraph, Plan]) -> None:
    _, plan = planned
    actions = plan.schedules[0].actions
    regions = {region.id: region.buckets for region in plan.regions}
    for bucket, verb in closing_verbs(plan).items():
        target = GradientRef(bucket) if verb is Verb.OFFLOAD else BucketRef(bucket)
        behind = actions[max(i for i, action in enumerate(actions) if action == Action(verb=verb, target=target)) + 1 :]
        assert not any(
            isinstance(action.target, RegionRef) and bucket in regions[action.target.region] for action in behind
        )
        assert Action(verb=Verb.GATHER, target=BucketRef(bucket)) not in behind
        assert (verb is Verb.REDUCE) == (plan.placement(bucket).param is Tier.DEVICE)


# ----------------------------------------------------------------------------------------------------------------------
# Groups of saved activations, worked out for two small layers, and what every step's groups have in common.


def test_classes_of_two_layers() -> None:
    """h.0: a0 is a matrix product of the input, g0 pointwise from a0. h.1: a1 is a matrix product of r0, which the
    backward of h.1 reads first; g1 is pointwise, t1 an attention kernel, m1 random. r0 is made of h.0's g0, and with
    all of h.0 gone from n0 (8 bytes for 16), so that n0 is what to keep where h.1 is recomputed whole."""
    found = {group.id: group for group in activation_groups(LAYERS)}
    assert [(group.id, group.storages, group.nbytes) for group in found.values()] == [
        ("h.0.matmul", ("a0",), 64),
        ("h.0.pointwise", ("g0",), 32),
        ("h.1.input", ("n0",), 8),
        ("h.1.fixed", ("r0",), 16),
        ("h.1.matmul", ("a1",), 64),
        ("h.1.pointwise", ("g1",), 32),
        ("h.1.attention", ("t1",), 16),
        ("h.1.kept", ("m1",), 4),
    ]
    assert [group.depth for group in found.values()] == [
        Depth.MATMUL,
        Depth.POINTWISE,
        Depth.KEPT,
        Depth.FIXED,
        Depth.MATMUL,
        Depth.POINTWISE,
        Depth.ATTENTION,
        Depth.KEPT,
    ]
    assert [group.layer for group in found.values()] == ["h.0"] * 2 + ["h.1"] * 6
    assert [group.id for group in found.values() if group.is_input] == ["h.1.input"]


def test_inputs_as_large_as_the_activations_are_no_group() -> None:
    """n0 as large as r0: to keep the one for the other saves no bytes, so r0 is never made again."""
    storages = tuple(replace(s, nbytes=16) if s.id == "n0" else s for s in LAYERS.storages)
    found = {group.id: group for group in activation_groups(replace(LAYERS, storages=storages))}
    assert "h.1.input" not in found
    assert "h.1.fixed" not in found
    assert set(found["h.1.kept"].storages) == {"r0", "m1"}


def test_a_buffer_overwritten_by_a_layer_is_not_an_input_group() -> None:
    """h.0 counts in `b`, 4 bytes that are there during the whole step, and r0 is made of n0 and `b`: n0 is what to
    keep where h.1 is recomputed whole."""
    counter = Storage(id=StorageId("b"), nbytes=4, kind=Kind.BUFFER, dtype="float32")
    count = Op(
        id=OpId("fwd.count_0"), target="aten.add_", phase=Phase.FORWARD, reads=(counter.id,), writes=(counter.id,),
        module="h.0", once=True,
    )  # fmt: skip
    ops = [replace(op, reads=(*op.reads, counter.id)) if op.id == "fwd.add_0" else op for op in LAYERS.ops]
    graph = replace(LAYERS, ops=(count, *ops), storages=(*LAYERS.storages, counter))
    assert [group.storages for group in activation_groups(graph) if group.is_input] == [("n0",)]


def test_a_model_without_layers_is_a_single_layer() -> None:
    assert [(group.id, group.storages) for group in activation_groups(GELU)] == [
        ("step.matmul", ("h",)),
        ("step.pointwise", ("g",)),
    ]


@given(mixed_graphs())
def test_every_saved_storage_is_in_a_single_group(graph: StepGraph) -> None:
    groups = activation_groups(graph)
    listed = [name for group in groups if not group.is_input for name in group.storages]
    assert len(listed) == len(set(listed))
    assert set(listed) == saved_storages(graph) - set(graph.outputs)
    assert len({group.id for group in groups}) == len(groups)
    extra = {name for group in groups if group.is_input for name in group.storages}
    made = {name for op in graph.ops if op.phase is Phase.FORWARD for name in op.writes}
    assert extra <= made - saved_storages(graph) - given_storages(graph) - set(graph.outputs)


@given(mixed_graphs().flatmap(lambda graph: layers_of(graph).map(lambda found: (graph, found))))
def test_every_layer_can_be_recomputed_to_every_depth(found: tuple[StepGraph, tuple[Activations, ...]]) -> None:
    graph, activations = found
    assert len(as_run(graph, activations).ops) >= len(graph.ops)
