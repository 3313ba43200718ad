"""No row that goes through update and forward is longer than a step that is played."""

import random
from collections.abc import Sequence

from elixir_compile.ir import Saving, Update
from elixir_compile.search import Problem
from elixir_compile.search.evaluator import Evaluator
from elixir_compile.search.formulation.flow_shop import longest_s
from elixir_compile.search.formulation.milp import Milp
from elixir_compile.search.space.facts import gather_facts
from elixir_compile.search.space.profiles import moves_at_use
from tests.pure.search.test_best import machine, random_answer
from tests.pure.search.test_planner import problem_of
from tests.pure.strategies import Layer, chain

NUM_PROBLEMS, NUM_ANSWERS = 75, 12


def mixed_layers(draw: random.Random) -> Sequence[Layer]:
    """Three to six layers, some of them frozen, some with the parameters of an earlier one."""
    layers: list[Layer] = []
    for i in range(draw.randint(3, 6)):
        earlier = layers[draw.randrange(i)] if i and draw.random() < 0.25 else None
        params = earlier.params if earlier else ((f"p{i}", draw.choice([50, 200, 500])),)
        frozen = earlier.frozen if earlier else draw.random() < 0.25
        layers.append(Layer(module=f"h.{i}", params=params, frozen=frozen, act_numel=draw.choice([16, 64, 400])))
    return layers


def mixed_problem(draw: random.Random) -> Problem:
    """On one or two ranks, on a machine whose links may or may not overlap compute, updated across steps."""
    graph = chain(list(mixed_layers(draw)))
    cluster = machine(draw, draw.choice([1, 1, 2]), draw.choice([0.8, 1.0]))
    return problem_of(graph, cluster, update=Update.ACROSS_STEPS, bucket_min_bytes=1, bucket_max_bytes=800)


def test_no_row_is_longer_than_a_step_with_frozen_shared_and_streamed_buckets() -> None:
    """With gathers at their use and as early as eight windows: those of frozen buckets do not wait for the host, and
    second ones come when they like. Streamed updates behind leaving gradients, and copies behind streamed
    updates, are the longest of their phase at some answers."""
    num_late, num_behind = 0, [0, 0]
    for seed in range(NUM_PROBLEMS):
        draw = random.Random(seed)
        evaluator = Evaluator(gather_facts(mixed_problem(draw)))
        milp = Milp(evaluator, reference_s=1.0)
        for _ in range(NUM_ANSWERS):
            levels, modes = answer = random_answer(draw, evaluator)
            here = evaluator.at(modes)
            may_stream = [i for i in sorted(here.facts.streamable) if levels[i].has_state_on_host]
            streamed = frozenset(i for i in may_stream if draw.random() < 0.25)
            x = milp.vector(answer, streamed)
            lower_s = milp.lower_s(x)
            for number, shops in enumerate((milp.phases[0], milp.across)):
                if shops and len(milp.streams) and longest_s(shops[-1], x) > max(longest_s(s, x) for s in shops[:-1]):
                    num_behind[number] += 1
            for ahead in (0, 1, 8):
                moves = moves_at_use(here.facts, levels, ahead)._replace(streamed=streamed)
                played = here.played(levels, moves)
                num_late += played.stalled_s > 0
                assert lower_s <= played.step_s * (1 + 1e-9), f"seed {seed}"
    assert num_late > NUM_PROBLEMS
    assert min(num_behind) > 5


def test_copies_of_activations_bound_a_step_on_several_ranks() -> None:
    """Paths without collectives, with what leaves and comes back: no longer than a step, and often the longest."""
    num_longest = 0
    for seed in range(20):
        draw = random.Random(seed)
        layers = [
            Layer(module=f"h.{i}", params=((f"p{i}", draw.randint(100, 600)),), frozen=False, act_numel=1024)
            for i in range(6)
        ]
        savings = frozenset({Saving.KEEP, Saving.OFFLOAD})
        problem = problem_of(chain(layers), machine(draw, draw.choice([2, 3])), savings=savings)
        evaluator = Evaluator(gather_facts(problem))
        milp = Milp(evaluator, reference_s=1.0)
        for _ in range(10):
            levels, modes = answer = random_answer(draw, evaluator)
            here, x = evaluator.at(modes), milp.vector(answer)
            played_s = [here.step_s(levels, moves_at_use(here.facts, levels, ahead)) for ahead in (0, 1, 8)]
            assert milp.lower_s(x) <= min(played_s) * (1 + 1e-9), f"seed {seed}"
            run = [side for side in milp.phases if len(side) > 1 and side[0].name in ("forward", "backward")]
            num_longest += any(longest_s(copied, x) > longest_s(phase, x) for phase, copied in run)
    assert num_longest > 20
