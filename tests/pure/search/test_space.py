"""What can be decided: buckets, layers, levels beside modes, and the seconds that a mode adds."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elixir_compile.base.errors import InvalidPlan, NoFeasiblePlan
from elixir_compile.base.options import Planner
from elixir_compile.base.units import GIB
from elixir_compile.ir import (
    Bucket,
    BucketId,
    Kind,
    Op,
    OpId,
    Phase,
    Placement,
    Plan,
    Shards,
    StepGraph,
    StorageId,
    Tier,
    Verb,
)
from elixir_compile.ir.hardware import profile_for
from elixir_compile.search import Problem, plan
from elixir_compile.search.evaluator import Evaluator
from elixir_compile.search.formulation import solver
from elixir_compile.search.formulation.milp import Milp
from elixir_compile.search.formulation.solver import Solution
from elixir_compile.search.greedy import RULES
from elixir_compile.search.space import profiles as profiles_module
from elixir_compile.search.space.buckets import Level, form_buckets
from elixir_compile.search.space.facts import gather_facts
from elixir_compile.search.space.layers import LayerSpan, equal_layers, layer_spans
from elixir_compile.search.space.profiles import _far_apart, _places, moves_at_use, profiles
from elixir_compile.step import verify
from tests.pure.problems import between, needed_bytes, problem_of
from tests.pure.search.test_best import assert_as_good_as_brute_force, machine, random_answer
from tests.pure.search.test_planner import assert_counts_agree
from tests.pure.steps import parse_graph
from tests.pure.strategies import DraftPlan, Layer, chain, examples, step_graphs, with_facts

# ----------------------------------------------------------------------------------------------------------------------
# `search.buckets`: what travels together.


CPU = profile_for("cpu", GIB, GIB, "cpu")


def problem(graph: StepGraph, min_bytes: int = 64, max_bytes: int = 512, **more: object) -> Problem:
    return Problem(
        name="t",
        graph=graph,
        cluster=CPU,
        budget_bytes=GIB,
        host_budget_bytes=GIB,
        bucket_min_bytes=min_bytes,
        bucket_max_bytes=max_bytes,
        **more,  # type: ignore[arg-type]
    )


def layers(*sizes: Sequence[int], frozen: Sequence[int] = ()) -> list[Layer]:
    """One layer per entry with parameters of these many float32 elements."""
    return [
        Layer(
            module=f"h.{number}",
            params=tuple((f"p{number}_{index}", numel) for index, numel in enumerate(numels)),
            frozen=number in frozen,
            act_numel=8,
        )
        for number, numels in enumerate(sizes)
    ]


def names(buckets: Sequence[Bucket]) -> list[str]:
    return [" ".join(bucket.params) for bucket in buckets]


def test_a_bucket_ends_with_a_layer_once_it_is_large_enough() -> None:
    """Layers of 40, 60, 2 x 80 and 400 bytes, at least 41 each: the first is too small alone."""
    graph = chain(layers([10], [15], [20, 20], [100]))
    made = form_buckets(problem(graph, min_bytes=41, max_bytes=512))
    assert names(made) == ["p0_0 p1_0", "p2_0 p2_1", "p3_0"]


def test_buckets_of_a_large_model_keep_the_size_limits() -> None:
    """Twenty layers of 100 bytes, at least 120 and at most 250: two layers each."""
    graph = chain(layers(*[[25]] * 20))
    made = form_buckets(problem(graph, min_bytes=120, max_bytes=250))
    assert [bucket.nbytes for bucket in made] == [200] * 10


def test_a_parameter_above_the_maximum_has_a_bucket_of_its_own() -> None:
    graph = chain(layers(*[[25]] * 10, [25, 250, 25], *[[25]] * 10))
    made = form_buckets(problem(graph, min_bytes=150, max_bytes=400))
    assert "p10_1" in names(made)


def test_a_tied_embedding_has_a_bucket_of_its_own() -> None:
    tied = Layer(module="embed", params=(("embed", 50), ("pos", 5)), frozen=False, act_numel=8)
    head = Layer(module="head", params=(("embed", 50),), frozen=False, act_numel=8)
    graph = chain([tied, *layers(*[[50]] * 12), head])
    made = form_buckets(problem(graph, min_bytes=150, max_bytes=2000))
    assert "embed" in names(made)


def test_small_models_still_have_choices() -> None:
    graph = chain(layers(*[[25]] * 8))
    assert len(form_buckets(problem(graph, min_bytes=16 << 20, max_bytes=128 << 20))) == 8


def test_buckets_in_force_are_kept_and_their_names_not_reused() -> None:
    graph = chain(layers([25], [25]))
    kept = Bucket(
        id=BucketId("b0"),
        params=(StorageId("p1_0"),),
        numel=25,
        nbytes=100,
        state_nbytes=0,
        dtype="float32",
        trainable=True,
        shard_numels=Shards.of((25,)),
    )
    home = Placement(bucket=kept.id, param=Tier.DEVICE, optim=Tier.DEVICE, resident=True)
    made = form_buckets(problem(graph, buckets=(kept,), placements=(home,)))
    assert made[0] is kept
    assert [(bucket.id, bucket.params) for bucket in made[1:]] == [("b1", ("p0_0",))]


def test_a_dtype_of_unknown_size_is_refused() -> None:
    graph = chain(layers([25]))
    object.__setattr__(graph.storages[1], "dtype", "float7")
    with pytest.raises(InvalidPlan, match="float7"):
        form_buckets(problem(graph))


def test_a_problem_that_contradicts_itself_is_refused() -> None:
    graph = chain(layers([25]))
    with pytest.raises(InvalidPlan, match="in this order"):
        problem(graph, min_bytes=10, max_bytes=5)
    with pytest.raises(InvalidPlan, match="base_bytes"):
        problem(graph, base_bytes=-1)
    with pytest.raises(InvalidPlan, match="one placement per bucket"):
        problem(graph, placements=(Placement(bucket=BucketId("b"), param=Tier.HOST, optim=Tier.HOST, resident=True),))


def test_a_bucket_ends_where_a_param_group_does() -> None:
    """Twenty weights of 100 bytes, at least 120 and at most 250: two each; twenty biases of 8 bytes: 15 and 5."""
    graph = chain(layers(*[[25, 2]] * 20))
    biases = {StorageId(f"p{number}_1"): 3 for number in range(20)}
    made = form_buckets(problem(graph, min_bytes=120, max_bytes=250, params=with_facts({}, group=biases)))
    assert [bucket.nbytes for bucket in made if bucket.group == 0] == [200] * 10
    assert [bucket.nbytes for bucket in made if bucket.group == 3] == [120, 40]
    assert {name for bucket in made if bucket.group == 3 for name in bucket.params} == biases.keys()


@given(step_graphs(), st.data())
@settings(max_examples=60)
def test_every_parameter_is_in_one_bucket_of_its_kind(graph: StepGraph, data: st.DataObject) -> None:
    ids = [storage.id for storage in graph.storages if storage.kind is Kind.PARAM]
    groups = {name: data.draw(st.integers(0, 2)) for name in ids}
    made = form_buckets(problem(graph, min_bytes=256, max_bytes=1024, params=with_facts({}, group=groups)))
    params = {storage.id: storage for storage in graph.storages if storage.kind is Kind.PARAM}
    trained = {storage.of for storage in graph.storages if storage.of is not None}
    assert sorted(name for bucket in made for name in bucket.params) == sorted(params)
    assert len({bucket.id for bucket in made}) == len(made)
    for bucket in made:
        members = [params[name] for name in bucket.params]
        assert {member.dtype for member in members} == {bucket.dtype}
        assert {member.id in trained for member in members} == {bucket.trainable}
        assert {groups[member.id] for member in members} == {bucket.group}
        assert bucket.nbytes == sum(member.nbytes for member in members)
    firsts = [
        next((i for i, op in enumerate(graph.ops) if made_first.params[0] in op.reads), 10**6) for made_first in made
    ]
    assert all(before <= after for before, after in pairwise(firsts))


# ----------------------------------------------------------------------------------------------------------------------
# Regions begin with layers where enough of them are equal, and what a plan moves waits for their edges.


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
    spans = layer_spans(ops, equal_layers(blocks(4), 4))
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
    made = plan(tight, planner, timeout_s=1.0)
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


# ----------------------------------------------------------------------------------------------------------------------
# Levels that differ only where a layer is recomputed: the cast of a weight, which the backward reads instead of it.


def cast_chain(numels: list[int], act_numel: int, has_cast: list[bool]) -> StepGraph:
    """Return the step of a chain of matrix products whose weights are cast first, as `torch.autocast` does.

    Layer i has a weight of `numels[i]` elements. If `has_cast[i]`, the forward casts it and saves the cast for the
    backward, which does not read the weight.
    """
    draft = DraftPlan(dtype="float32")
    flowing = draft.storage("x", Kind.INPUT, act_numel)
    used: list[tuple[StorageId, StorageId]] = []
    for i, numel in enumerate(numels):
        weight = draft.storage(f"p{i}", Kind.PARAM, numel)
        module = f"h.{i}"
        if has_cast[i]:
            cast = draft.storage(f"c{i}", Kind.SAVED, numel // 2)
            draft.op(Phase.FORWARD, "_to_copy", [weight], [cast], module)
            draft.ops[-1] = replace(draft.ops[-1], flops=0)
            weight = cast
        product = draft.storage(f"t{i}", Kind.TEMP, act_numel)
        out = draft.storage(f"s{i}", Kind.TEMP if i == len(numels) - 1 else Kind.SAVED, act_numel)
        draft.op(Phase.FORWARD, "mm", [flowing, weight], [product], module)
        draft.op(Phase.FORWARD, "relu", [product], [out], module)
        used.append((flowing, weight))
        flowing = out
    outputs = (flowing,)
    flowing = draft.storage("tangent", Kind.INPUT, act_numel)
    grads: list[StorageId] = []
    for i in reversed(range(len(numels))):
        activation, weight = used[i]
        grad = draft.storage(f"p{i}.grad", Kind.GRAD, numels[i], of=f"p{i}")
        grads += [StorageId(f"p{i}"), grad]
        draft.op(Phase.BACKWARD, "mm", [activation, flowing], [grad], f"h.{i}")
        passed = draft.storage(f"d{i}", Kind.TEMP, act_numel)
        draft.op(Phase.BACKWARD, "mm", [flowing, weight], [passed], f"h.{i}")
        flowing = passed
    draft.ops.append(Op(id=OpId("update"), target="update", phase=Phase.UPDATE, reads=tuple(grads), writes=()))
    return StepGraph(name="casts", ops=tuple(draft.ops), storages=tuple(draft.storages.values()), outputs=outputs)


def cast_problem(seed: int) -> Problem:
    """Return a random chain of two to six casts and matrix products on a random machine of one or two ranks."""
    draw = random.Random(seed)
    numels = [draw.randint(100, 600) for _ in range(draw.randint(2, 6))]
    graph = cast_chain(numels, draw.choice([16, 64, 256]), [draw.random() < 0.9 for _ in numels])
    return problem_of(graph, machine(draw, draw.choice([1, 1, 2])), hybrid=draw.random() < 0.7)


SEEDS = st.integers(0, 10_000)
SHARES = st.sampled_from([0.0, 0.05, 0.1, 0.1, 0.15, 0.2, 0.4, 0.7])
"""Of the way from the least budget to keep-everything; about 0.1 casts are made again and some weights stay."""


def test_a_cast_weight_may_stay_resident_if_its_cast_may_be_made_again() -> None:
    problem = problem_of(cast_chain([400, 400], 64, [True, False]))
    evaluator = Evaluator(gather_facts(problem))
    cast, plain = evaluator.facts.choices
    assert len(evaluator.facts.windows[0]) == 1
    assert Level.ALL_OFF in cast
    assert cast == plain
    recomputed = evaluator.at([len(layer.modes) - 1 for layer in evaluator.facts.layers])
    assert len(recomputed.facts.windows[0]) == 2
    assert recomputed.facts.choices == evaluator.facts.choices
    kept_only = Evaluator(gather_facts(replace(problem, savings=frozenset())))
    assert Level.ALL_OFF not in kept_only.facts.choices[0]


@given(SEEDS, SHARES)
@examples(12)
def test_every_planner_finds_a_plan_if_levels_depend_on_modes(seed: int, share: float) -> None:
    problem = between(cast_problem(seed), share)
    made = plan(problem, timeout_s=0.1)
    verify(problem.graph, made)
    assert made.prediction.device_peak_bytes <= problem.budget_bytes
    assert made.bound_s is None or made.bound_s <= made.prediction.step_s
    for planner in (*RULES, "greedy"):
        try:
            other = plan(problem, planner)
        except NoFeasiblePlan:
            assert planner in RULES
            continue
        verify(problem.graph, other)
        assert made.prediction.step_s <= other.prediction.step_s * (1 + 1e-9), planner


@given(SEEDS)
@examples(12)
def test_any_candidate_is_a_vector_of_the_milp_and_is_bounded_by_it(seed: int) -> None:
    evaluator = Evaluator(gather_facts(cast_problem(seed)))
    milp = Milp(evaluator, reference_s=1.0)
    draw = random.Random(seed)
    for _ in range(10):
        levels, modes = answer = random_answer(draw, evaluator)
        here = evaluator.at(modes)
        x = milp.vector(answer)
        assert milp.candidate(x) == answer
        step_s = here.step_s(levels, moves_at_use(here.facts, levels, draw.choice([0, 1, 8])))
        assert milp.lower_s(x) <= step_s * (1 + 1e-9)
        assert milp.peak_bytes(x) <= here.memory.peak_bytes(levels, 0)


@pytest.mark.parametrize("seed", range(3))
def test_it_equals_brute_force_if_levels_depend_on_modes(seed: int) -> None:
    draw = random.Random(seed)
    graph = cast_chain([draw.randint(100, 600) for _ in range(2)], 64, [True, seed != 1])
    problem = between(problem_of(graph, machine(draw, 1)), draw.choice([0.2, 0.5]))
    assert_as_good_as_brute_force(problem, f"seed {seed}")


def test_whole_solutions_that_do_not_fit_end_the_search_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the least budget the rows count a cast that is made again for too little: 150 solves, none of which fit."""
    num_solves = 0

    solve_integral = solver.solve_integral

    def counted(*arguments: Any, **named: Any) -> Solution | None:
        nonlocal num_solves
        num_solves += 1
        return solve_integral(*arguments, **named)

    monkeypatch.setattr(solver, "solve_integral", counted)
    made = plan(between(cast_problem(6), 0.0))
    assert made.bound_s is not None
    assert 24 <= num_solves < 40


# ----------------------------------------------------------------------------------------------------------------------
# The seconds that a layer adds alone, counted for several layers in one step.


def test_layers_far_apart_in_one_step_add_what_each_adds_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    num_steps = 0
    added_alone = profiles_module._RecomputedStep._added_alone

    def counted(self: profiles_module._RecomputedStep, *arguments: object) -> object:
        nonlocal num_steps
        num_steps += 1
        return added_alone(self, *arguments)  # pyright: ignore[reportArgumentType] (handed on)

    monkeypatch.setattr(profiles_module._RecomputedStep, "_added_alone", counted)
    num_shared = 0
    for seed in range(4):
        draw = random.Random(seed)
        numels = draw.sample(range(100, 600), 12)  # no two layers add the same
        problem = problem_of(cast_chain(numels, 64, [True] * 12), machine(draw, 1))
        layers = gather_facts(problem).layers
        before = num_steps
        together = profiles(problem, layers)
        num_together, before = num_steps - before, num_steps
        with monkeypatch.context() as patch:
            patch.setattr(profiles_module, "_CLOSE", len(layers))
            one_by_one = profiles(problem, layers)
        num_shared += num_steps - before > num_together
        for own, other in zip(together, one_by_one, strict=True):
            for mode, same in zip(own, other, strict=True):
                assert dict(mode.added_s) == pytest.approx(dict(same.added_s), rel=1e-9)
    assert num_shared, "no two layers were looked at in one step"


def test_distances_between_layers_are_those_in_the_model() -> None:
    """The last of eight layers is numbered second, as in a Llama: it is far from the first, and close to the sixth."""
    names = [f"h.{i}" for i in (0, 7, 1, 2, 3, 4, 5, 6)]
    layers = [Layer(module=f"h.{i}", params=((f"p{i}", 100),), frozen=False, act_numel=16) for i in range(8)]
    places = _places(chain(layers), {name: number for number, name in enumerate(names)})
    assert places == [0, 7, 1, 2, 3, 4, 5, 6]
    assert _far_apart([0, 1, 6], places) == [[0, 1], [6]]


def test_seconds_do_not_depend_on_the_order_in_which_layers_are_numbered() -> None:
    """Layers are numbered by their first group, so neighbours in the model may have numbers far apart."""
    for seed in range(4):
        draw = random.Random(seed)
        problem = problem_of(cast_chain(draw.sample(range(100, 600), 12), 64, [True] * 12), machine(draw, 1))
        layers = gather_facts(problem).layers
        order = draw.sample(range(len(layers)), len(layers))
        in_order, shuffled = profiles(problem, layers), profiles(problem, [layers[i] for i in order])
        for number, i in enumerate(order):
            for mode, same in zip(shuffled[number], in_order[i], strict=True):
                assert dict(mode.added_s) == pytest.approx(dict(same.added_s), rel=1e-9)
