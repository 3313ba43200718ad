"""Updates of whole tensors in plans: their bytes by every count, their seconds and bounds in random small problems, and
Muon for the matrices of a model of 7 billion parameters, from shapes."""

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elixir_compile.base.errors import InvalidPlan
from elixir_compile.ir import Bucket, BucketId, Kind, Plan, Saving, Shards, StorageId, Tier, Update, WholeUpdate
from elixir_compile.ir.cost import streamed_copies, update_s
from elixir_compile.ir.hardware import preset
from elixir_compile.search import Problem, plan
from elixir_compile.search.evaluator import Candidate, DraftPlan, Evaluator
from elixir_compile.search.formulation.milp import Milp
from elixir_compile.search.reasons import binding, write_out
from elixir_compile.search.space.buckets import Level
from elixir_compile.search.space.facts import gather_facts
from elixir_compile.search.space.profiles import moves_at_use
from elixir_compile.search.transfers import may_be_streamed
from elixir_compile.step import verify
from elixir_compile.step.timeline import plan_timeline
from elixir_compile.tools.report.explain import explain
from tests.pure.memory_walk import walk_memory
from tests.pure.plans import action_of, with_actions
from tests.pure.problems import needed_bytes, problem_of, state_of
from tests.pure.search.test_best import machine, random_answer, random_streams
from tests.pure.strategies import Layer, chain, examples

A100 = preset("a100-80g")
WIDTH, WIDE, NUM_LAYERS = 4096, 11008, 32
SHAPES = {**{f"attention{i}": (WIDTH, WIDTH) for i in range(4)}, **{f"mlp{i}": (WIDTH, WIDE) for i in range(3)}}


def muon(short: int, long: int) -> WholeUpdate:
    """Return what Muon's update of an fp32 matrix takes, as dry runs find it for 4096 x 11008."""
    nbytes = 4 * short * long
    return WholeUpdate(
        flops=(("bfloat16", 5 * (4 * short**2 * long + 2 * short**3)),),
        moved_bytes=32 * nbytes,
        num_kernels=36,
        most_nbytes=nbytes,
        most_state_nbytes=nbytes,
        work_nbytes=2 * nbytes + 4 * short**2,
    )


def muon_problem(machine: str) -> Problem:
    """Return the step of 6.5 billion parameters in fp32, in layers of seven matrices."""
    layers = [
        Layer(
            module=f"h.{number}",
            params=tuple((f"{name}.{number}", math.prod(shape)) for name, shape in SHAPES.items()),
            frozen=False,
            act_numel=1 << 20,
        )
        for number in range(NUM_LAYERS)
    ]
    graph = chain(layers)
    shapes = {
        storage.id: SHAPES[storage.id.partition(".")[0]] for storage in graph.storages if storage.kind is Kind.PARAM
    }
    return problem_of(
        graph,
        preset(machine),
        state_nbytes={name: 4 * math.prod(shape) for name, shape in shapes.items()},
        whole_update={name: muon(*shape) for name, shape in shapes.items()},
        bucket_min_bytes=32 << 20,
        bucket_max_bytes=128 << 20,
        budget_bytes=1 << 40,
        host_budget_bytes=1 << 40,
        update=Update.ACROSS_STEPS,
    )


def at_level(problem: Problem, level: Level, *, streams: bool) -> Plan:
    """Return the plan with all buckets at `level`, updated on the device through its rooms if it `streams`."""
    evaluator = Evaluator(gather_facts(problem))
    facts = evaluator.facts
    levels = (level,) * len(facts.buckets)
    moves = moves_at_use(facts, levels)._replace(streamed=frozenset(range(len(levels)) if streams else ()))
    step_s = evaluator.step_s(levels, moves)
    return write_out(evaluator, DraftPlan(levels=levels, modes=facts.modes, moves=moves, step_s=step_s))


@pytest.mark.parametrize(
    ("machine", "products_s", "copies_s", "exposed_s"),
    [("a100-80g", 3.43, 1.04, 0.027), ("rtx4090-24g", 3.84, 1.05, 0.010)],
)
def test_the_copies_of_muons_state_pass_beside_its_products(
    machine: str, products_s: float, copies_s: float, exposed_s: float
) -> None:
    """Both ways, but for the first tensor there and the last one back, and on an A100, whose link back is slower, some
    copies of a large tensor beside the products of a small one. No state stays on the device, and the plan says that
    products bind the update."""
    problem = muon_problem(machine)
    kept = at_level(problem, Level.ON_DEVICE, streams=False)
    made = at_level(problem, Level.STATE_OFF, streams=True)
    assert made.prediction.hidden_share > 0.98
    assert made.prediction.step_s - kept.prediction.step_s == pytest.approx(exposed_s, abs=0.002)
    assert (
        made.prediction.device_peak_bytes < kept.prediction.device_peak_bytes * 0.7
    )  # params, gradients and two rooms
    (said,) = (each for each in made.decisions if each.subject == "updates of whole tensors")
    assert said.choice == "160 of 160 buckets on the device, 160 of them streamed"
    assert said.because == (
        f"compute-bound: {products_s} s of matrix products, beside {copies_s} s of copies each way; "
        "408.0 MiB of work space"
    )
    text = explain(made, "b0")
    assert "4.12 TFLOP in bfloat16, 4.0 GiB read and written, 192.0 MiB of work space" in text
    on_host = at_level(problem, Level.STATE_OFF, streams=False)
    (said,) = (each for each in on_host.decisions if each.subject == "updates of whole tensors")
    assert "160 of 160 buckets on the host, 0 of them streamed" in said.choice
    assert "compute-bound: 6844 s of matrix products; the device would take" in said.because
    rooms_bytes = 2 * 4 * WIDTH * WIDE
    updates_bytes = rooms_bytes + muon(WIDTH, WIDE).work_nbytes
    in_update = [plan_timeline(problem.graph, each).live_bytes[-1] for each in (made, on_host)]
    assert in_update[0] - in_update[1] == updates_bytes
    assert made.prediction.device_peak_bytes == in_update[0] > on_host.prediction.device_peak_bytes


SIZES = st.integers(1, 1 << 40)


@examples(200)
@given(st.tuples(SIZES, SIZES, SIZES), st.tuples(SIZES, SIZES, SIZES), st.integers(1, 9))
def test_more_bytes_or_flops_never_take_fewer_seconds(
    first: tuple[int, int, int], more: tuple[int, int, int], num: int
) -> None:
    """Of a streamed bucket of `num` tensors, from the first copy there to the last one back."""

    def passed_s(flops: int, moved_bytes: int, nbytes: int) -> float:
        each = replace(muon(64, 64), flops=(("bfloat16", flops),), moved_bytes=moved_bytes)
        whole = WholeUpdate.of_all([replace(each, most_nbytes=nbytes, most_state_nbytes=nbytes)] * num)
        bucket = Bucket(
            id=BucketId("b0"),
            params=tuple(StorageId(f"p{i}") for i in range(num)),
            numel=num * nbytes,
            nbytes=num * nbytes,
            state_nbytes=num * nbytes,
            dtype="float32",
            trainable=True,
            shard_numels=Shards.of((num * nbytes,)),
            whole_update=whole,
        )
        copies, own_s = streamed_copies(bucket, Tier.HOST, A100), update_s(bucket, Tier.DEVICE, A100)
        each_s = copies.first_s + own_s / copies.num_pieces + copies.last_s
        return each_s + (copies.num_pieces - 1) * copies.pace_s(own_s)

    larger = tuple(own + another for own, another in zip(first, more, strict=True))
    assert passed_s(*larger) >= passed_s(*first) * (1 - 1e-9)


# ----------------------------------------------------------------------------------------------------------------------
# Random small problems: some layers are updated whole, in two tensors, others element by element.


def mixed_problem(draw: random.Random, update: Update = Update.ACROSS_STEPS, *, is_cpu: bool = False) -> Problem:
    """Return three to five layers on one rank or two, of which some are updated whole."""
    layers = [
        Layer(
            module=f"h.{i}",
            params=tuple((f"p{i}.{j}", draw.randint(50, 300)) for j in range(2)),
            frozen=draw.random() < 0.1,
            act_numel=draw.choice([16, 64, 400]),
        )
        for i in range(draw.randint(3, 5))
    ]
    graph = chain(layers)
    whole: dict[StorageId, WholeUpdate] = {}
    states = state_of(graph)
    for storage in graph.storages:
        if storage.id in states and draw.random() < 0.7:
            states[storage.id] = draw.choice([storage.nbytes, 100])
            whole[storage.id] = WholeUpdate(
                flops=(("float32", draw.randint(0, 10**4)),),
                moved_bytes=draw.randint(0, 10**5),
                num_kernels=draw.randint(1, 9),
                most_nbytes=storage.nbytes,
                most_state_nbytes=states[storage.id],
                work_nbytes=draw.choice([0, 300, 3000]),
                works_on_device=is_cpu,
            )
    cluster = machine(draw, draw.choice([1, 1, 2]))
    host = replace(cluster.host, flops_per_s={"float32": 10 ** draw.uniform(3, 5)})
    return problem_of(
        graph,
        replace(cluster, nodes=(replace(cluster.nodes[0], host=host),)),
        update=update,
        state_nbytes=states,
        whole_update=whole,
        bucket_min_bytes=draw.choice([1, 900]),
        savings=frozenset({Saving.KEEP, Saving.RECOMPUTE}),
    )


@given(st.integers(0, 2**32), st.sampled_from(list(Update)), st.booleans())
@settings(max_examples=60)
def test_all_counts_of_bytes_agree_for_any_homes_of_whole_tensors(seed: int, update: Update, is_cpu: bool) -> None:
    """The rows of a plan, a walk through its step, and the model of the search, with the work space of updates: on the
    device for those that run there, on the host for the others, and on the device for all if it is a CPU."""
    draw = random.Random(seed)
    problem = mixed_problem(draw, update, is_cpu=is_cpu)
    evaluator = Evaluator(gather_facts(problem))
    levels, modes = random_answer(draw, evaluator)
    evaluator = evaluator.at(modes)
    moves = moves_at_use(evaluator.facts, levels)._replace(streamed=random_streams(draw, evaluator, levels, 0.5))
    made = write_out(evaluator, DraftPlan(levels=levels, moves=moves, step_s=0.0, modes=modes, decisions=()))
    walk, timeline = walk_memory(problem.graph, made), plan_timeline(problem.graph, made)
    assert walk.live_bytes == timeline.live_bytes
    assert walk.host_bytes == timeline.host_bytes <= evaluator.host_bytes(levels)
    most_bytes = int(evaluator.memory.live_bytes(levels, moves).max())
    assert most_bytes == timeline.peak.nbytes or (update is Update.IN_BACKWARD and most_bytes > timeline.peak.nbytes)
    verify(problem.graph, replace(made, budget_bytes=walk.peak_bytes))
    with pytest.raises(InvalidPlan):
        verify(problem.graph, replace(made, budget_bytes=walk.peak_bytes - 1))


@pytest.mark.parametrize("update", list(Update))
def test_no_bound_is_above_a_step_with_whole_tensors(update: Update) -> None:
    """Of random homes, modes and streamed updates, with gathers at their use or early."""
    num_streamed = 0
    for seed in range(12):
        draw = random.Random(seed)
        evaluator = Evaluator(gather_facts(mixed_problem(draw, update)))
        milp = Milp(evaluator, reference_s=1.0)
        for _ in range(6):
            levels, modes = answer = random_answer(draw, evaluator)
            here, streamed = evaluator.at(modes), random_streams(draw, evaluator, levels, 0.5)
            x = milp.vector(answer, streamed)
            for ahead in (0, 2):
                moves = moves_at_use(here.facts, levels, ahead)._replace(streamed=streamed)
                assert milp.lower_s(x) <= here.played(levels, moves).step_s * (1 + 1e-9), f"seed {seed}"
                in_turn = [turn @ x for turn in milp._turns.values()]
                assert milp.peak_bytes(x) <= here.memory.live_bytes(levels, moves).max(), f"seed {seed}"
                in_update = here.memory.segment_of(here.facts.num_run)
                updating_bytes = milp.live_bytes(x)[-1] + max(in_turn, default=0)
                assert updating_bytes <= here.memory.live_bytes(levels, moves)[in_update:].max(), f"seed {seed}"
            num_streamed += any(here.facts.buckets[i].whole_update is not None for i in streamed)
    assert num_streamed > 10 or update is not Update.ACROSS_STEPS


@pytest.mark.slow  # searches of problems whose last gap takes long to close
@pytest.mark.parametrize("seed", range(4))
def test_more_memory_takes_no_longer_with_whole_tensors(seed: int) -> None:
    """Plans that are searched, each legal, within its budget, and no shorter than its bound."""
    problem = replace(mixed_problem(random.Random(seed)), moves_what_fits=True)
    low, high = needed_bytes(problem), plan(problem, "keep_all").prediction.device_peak_bytes
    steps_s: list[float] = []
    for share in (0.1, 0.5, 1.0):
        made = plan(replace(problem, budget_bytes=low + int((high - low) * share)), timeout_s=60.0)
        verify(problem.graph, made)
        assert made.bound_s is not None
        assert made.bound_s <= made.prediction.step_s * (1 + 1e-9)
        steps_s.append(made.prediction.step_s)
    assert steps_s[1] <= steps_s[0] * 1.01
    assert steps_s[2] <= steps_s[1] * 1.01


@given(st.integers(0, 2**32))
@settings(max_examples=40)
def test_any_of_the_updates_that_may_be_streamed_fit_together(seed: int) -> None:
    """The rooms of one bucket beside the work space of another."""
    draw = random.Random(seed)
    evaluator = Evaluator(gather_facts(mixed_problem(draw)))
    levels, modes = random_answer(draw, evaluator)
    evaluator = evaluator.at(modes)
    moves = moves_at_use(evaluator.facts, levels)
    budget_bytes = int(evaluator.memory.live_bytes(levels, moves).max()) + draw.randrange(0, 9000)
    tight = Evaluator(gather_facts(replace(evaluator.facts.problem, budget_bytes=budget_bytes))).at(modes)
    streamed = frozenset(may_be_streamed(tight, levels, moves))
    assert tight.memory.live_bytes(levels, moves._replace(streamed=streamed)).max() <= budget_bytes


def test_a_plan_that_leaves_an_update_of_whole_tensors_out_or_does_it_early_is_refused() -> None:
    problem = muon_problem("a100-80g")
    made = at_level(problem, Level.ALL_OFF_RELEASED, streams=True)
    verify(problem.graph, made)
    actions = list(made.schedules[0].actions)
    at = actions.index(action_of("update b7"))
    without = [*actions[:at], *actions[at + 1 :]]
    for broken in (without, [actions[at], *without]):
        with pytest.raises(InvalidPlan):
            verify(problem.graph, with_actions(made, broken))


def test_matrix_products_bind_the_step_where_they_take_most_of_it() -> None:
    problem = mixed_problem(random.Random(0))
    found: list[tuple[str, ...]] = []
    for flops in (10**9, 1):
        params = {
            name: replace(param, whole_update=replace(param.whole_update, flops=(("float32", flops),)))
            if param.whole_update is not None
            else param
            for name, param in problem.params.items()
        }
        evaluator = Evaluator(gather_facts(replace(problem, params=params)))
        milp = Milp(evaluator, reference_s=1.0)
        found.append(binding(milp, milp.vector(Candidate(evaluator.facts.start_levels, evaluator.facts.modes))))
    (said,) = (line for line in found[0] if line.startswith("updates of whole tensors: compute-bound, "))
    assert said.endswith(" of matrix products")
    assert not any("whole tensors" in line for line in found[1])
