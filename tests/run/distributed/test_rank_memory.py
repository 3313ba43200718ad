"""Several ranks hold no more than planned; gradients in 16 bits, of chosen tensors, and forwards that wait."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import elixir_compile as elixir
from elixir_compile.graph.capture.modules import executor_of
from elixir_compile.runtime.measure import Resident
from tests.run import ranks_updates
from tests.run.habits.stories import Net, gradients
from tests.run.habits.stories import batches as same_batches
from tests.run.models import seeded
from tests.run.processes import in_turn, spawn
from tests.run.ranks_training import batches, compiled_with, hybrid, least_bytes, mesh_of, own_rows, pair_of

# ----------------------------------------------------------------------------------------------------------------------
# Several ranks hold no more at once than their plan says, whatever their gradients count.


WIDTH = 1024


def own_peaks(rank: int, world_size: int, batches: list[list[int]]) -> list[dict[str, int]]:
    """Train one matrix, which is a bucket by itself, and small tensors; return bytes of a step for each of `batches`,
    the samples that ranks say they have."""
    gc.collect()
    with Resident() as resident:
        before_bytes = resident.nbytes
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.LayerNorm(WIDTH))
    model = elixir.prepare(model, mesh=mesh_of([world_size]))
    compiled, optimizer = compiled_with(model), hybrid(model.parameters())
    batch = torch.ones(2, WIDTH)

    def step() -> None:
        compiled(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    plan = elixir.compilations(model)[-1].plan
    assert min(len(bucket.params) for bucket in plan.buckets) == 1
    found = []
    for sizes in batches:
        elixir.weigh(model, sizes[rank])
        texts_bytes = sum(text.nbytes for text in executor_of(model).ranks.control._held)
        measured_bytes = elixir.measure_step(step, device="cpu").device_peak_bytes - before_bytes - texts_bytes
        found.append({"measured": measured_bytes, "planned": plan.prediction.device_peak_bytes})
    return found


def test_two_ranks_that_weigh_their_batches_stay_within_the_plan(tmp_path: Path) -> None:
    for own in spawn(own_peaks, 2, [[2, 2], [1, 3], [0, 2]], folder=tmp_path):
        for found in own:
            assert found["measured"] <= found["planned"]
            # A packed copy of the matrix's gradient would not fit in between.
            assert found["planned"] - found["measured"] < 4 * WIDTH * WIDTH


# ----------------------------------------------------------------------------------------------------------------------
# Several ranks whose forwards wait for their backward: what waits makes room on all of them, and nothing is lost.


def crowds(rank: int, world_size: int) -> dict[str, Any]:
    """Train steps of two forwards before their backwards, where the device has room for one."""
    steps = [batch.chunk(2) for batch in batches(3)]
    options: dict[str, Any] = {"activations": "keep"}
    options["device_memory"] = int(1.05 * least_bytes("odd", steps[0][0], [world_size], **options))
    pair = pair_of("odd", [world_size], **options)
    saved, made = executor_of(pair.model).saved, []
    offload_outstanding = saved.offload_outstanding
    saved.offload_outstanding = lambda: (made.append(offload_outstanding()), made[-1])[1]
    rooms, waiting = [], []
    for halves in steps:
        made.clear()
        losses = [pair.compiled(own_rows(half)) for half in halves]
        waiting.append(saved.num_outstanding)
        torch.stack(losses).mean().backward()
        for half in halves:
            rows = half.chunk(world_size)
            (torch.stack([pair.double(own) for own in rows]).mean() / len(halves)).backward()
        for optimizer in (pair.optimizer, pair.double_optimizer):
            optimizer.step()
            optimizer.zero_grad()
        rooms.append(sum(made))
    return {"apart": pair.apart(), "rooms": rooms, "waiting": waiting}


def test_outstanding_forwards_are_offloaded_on_all_ranks(tmp_path: Path) -> None:
    found = spawn(crowds, 2, folder=tmp_path, limit_s=120)
    assert max(own["apart"] for own in found) < 1e-12
    for own in found:
        assert own["waiting"] == [2, 2, 2]
        assert min(own["rooms"]) > 0


# ----------------------------------------------------------------------------------------------------------------------
# Gradients of chosen tensors, where several ranks share the parameters.


def asks_for_chosen_tensors(rank: int, world_size: int) -> bool:
    """Ask for gradients in several ways; every rank has the same batch, so the mean is what one alone has."""
    alone, model = seeded(Net), elixir.prepare(seeded(Net), mesh=init_device_mesh("cpu", (world_size,)))
    options = {"inner": "aot_eager", "report": False, "planner": "zero3_offload"}
    compiled = torch.compile(model, backend="elixir", options=options)
    x = same_batches(1)[0].requires_grad_()

    expected = torch.autograd.grad(alone(x).square().mean(), [x, *alone.parameters()])
    found = torch.autograd.grad(compiled(x).square().mean(), [x, *model.parameters()])
    assert all(isinstance(grad, DTensor) for grad in found[1:])
    wholes = [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in found]
    for theirs, ours in zip(expected, wholes, strict=True):
        assert torch.equal(theirs, ours)
    assert gradients(model) == [None] * len(found[1:])

    compiled(x).square().mean().backward(inputs=[x])
    assert torch.equal(x.grad, expected[0])
    assert gradients(model) == [None] * len(found[1:])

    head = [param for name, param in model.named_parameters() if name.startswith("head")]
    hook = head[0].register_hook(lambda grad: 2 * grad)
    compiled(x).square().mean().backward(inputs=head)
    hook.remove()
    for name, param in model.named_parameters():
        assert (param.grad is not None) == name.startswith("head")
    assert torch.equal(head[0].grad.full_tensor(), 2 * expected[-2])
    assert torch.equal(head[1].grad.full_tensor(), expected[-1])
    return True


def test_gradients_of_chosen_tensors_on_two_ranks(tmp_path: Path) -> None:
    assert spawn(asks_for_chosen_tensors, 2, folder=tmp_path) == [True, True]


# ----------------------------------------------------------------------------------------------------------------------
# Several ranks, in real processes, reduce 16-bit gradients in fp32, and skip together what overflows on one.


LIMIT_S = 120.0


def all_of(world_size: int, folder: Path, *checks: list[Any]) -> list[list[Any]]:
    """Return what each of `checks` returns, by rank."""
    found = spawn(
        in_turn, world_size, ranks_updates.__name__, checks, folder=folder, limit_s=LIMIT_S, timeout_s=LIMIT_S
    )
    print(found)
    return found


def test_two_ranks_average_and_add_up_in_fp32_as_planned(tmp_path: Path) -> None:
    checks = [
        [name, [2], is_tight] for name in ("holds_what_is_planned", "reduces_in_fp32") for is_tight in (False, True)
    ]
    checks += [["sums_calls_in_fp32", "FFBFBFBB"], ["refuses_other_plans", str(tmp_path)]]
    for held_loose, held_tight, loose, tight, calls, _ in all_of(2, tmp_path, *checks):
        assert calls["apart"] < 1e-6 < calls["narrow"]
        assert loose["is_cut"] == tight["is_cut"] == [False, True]
        assert held_loose["param"] == loose["param"] == ["device"]
        assert "host" in held_tight["param"]
        assert "host" in tight["param"]
        for found in (held_loose, held_tight):
            own_bytes = found["measured"] - found["scratch"]  # the product at the peak may allocate less than the most
            assert 0 < own_bytes <= found["planned"] <= 1.01 * found["measured"]


@pytest.mark.parametrize(
    ("hardware", "reduced"), [pytest.param("2 x a100-40g", "float32", marks=pytest.mark.slow), ("a100-40g", None)]
)
def test_a_plan_without_ranks_counts_them(hardware: str, reduced: str | None) -> None:
    options = {"param_dtype": "bfloat16", "reduce_dtype": "float32", "inner": "aot_eager"}
    (batch,) = ranks_updates.rows(1)
    found = elixir.plan(ranks_updates.Small(), (batch.bfloat16(),), hardware=hardware, options=options)
    assert {bucket.reduce_dtype for bucket in found.buckets} == {reduced}
    plain = elixir.plan(
        ranks_updates.Small(), (batch.bfloat16(),), hardware=hardware, options={**options, "reduce_dtype": None}
    )
    added_bytes = found.prediction.device_peak_bytes - plain.prediction.device_peak_bytes
    assert added_bytes > 0  # on one rank the sums of micro-batches, on several what is reduced


def test_copies_of_parts_are_averaged_in_fp32(tmp_path: Path) -> None:
    for (found,) in all_of(4, tmp_path, ["reduces_in_fp32", [2, 2], True]):
        assert found["is_cut"] == [False, True]
    for (found,) in all_of(2, tmp_path, ["reduces_in_fp32", [2, 1], False]):
        assert found["is_cut"] == [False]


def test_an_overflow_on_one_rank_skips_the_step_on_all(tmp_path: Path) -> None:
    checks = [["skips_together", None, True], ["skips_together", "float32", False], ["skips_in_fp32"]]
    for tight, wide, _ in all_of(2, tmp_path, *checks):
        assert "host" in tight["param"]
        for found in (tight, wide):
            assert found["steps"] == [4]
            assert found["scale"] == ranks_updates.SCALE / 2
            assert found["apart"] < 0.02 * found["moved"]
