"""Updates of whole tensors in the simulation: Muon for the matrices of a model of 7 billion parameters, from shapes."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elixir_compile.ir import Bucket, BucketId, Kind, Plan, StorageId, Tier, Update, WholeUpdate
from elixir_compile.ir.cost import streamed_copies, update_s
from elixir_compile.ir.hardware import preset
from elixir_compile.search import Problem
from elixir_compile.search.evaluator import DraftPlan, Evaluator
from elixir_compile.search.reasons import write_out
from elixir_compile.search.space.buckets import Level
from elixir_compile.search.space.facts import gather_facts
from elixir_compile.search.space.profiles import moves_at_use
from elixir_compile.tools.report.explain import explain
from tests.pure.problems import problem_of
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


@pytest.mark.parametrize(("machine", "products_s", "copies_s"), [("a100-80g", 4.39, 1.04), ("rtx4090-24g", 8.29, 1.03)])
def test_the_copies_of_muons_state_pass_beside_its_products(machine: str, products_s: float, copies_s: float) -> None:
    """Both ways, but for the first tensor there and the last one back. No state stays on the device, and the plan says
    that products bind the update."""
    problem = muon_problem(machine)
    kept = at_level(problem, Level.ON_DEVICE, streams=False)
    made = at_level(problem, Level.STATE_OFF, streams=True)
    assert made.prediction.hidden_share > 0.99
    assert made.prediction.step_s - kept.prediction.step_s == pytest.approx(0.01, abs=0.005)
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
            shard_numels=(num * nbytes,),
            whole_update=whole,
        )
        copies, own_s = streamed_copies(bucket, Tier.HOST, A100), update_s(bucket, Tier.DEVICE, A100)
        each_s = copies.first_s + own_s / copies.num_pieces + copies.last_s
        return each_s + (copies.num_pieces - 1) * copies.pace_s(own_s)

    larger = tuple(own + another for own, another in zip(first, more, strict=True))
    assert passed_s(*larger) >= passed_s(*first) * (1 - 1e-9)
