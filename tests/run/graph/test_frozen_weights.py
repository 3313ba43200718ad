"""Frozen weights in few bits: planned like other parameters, and what is made of them is made again in the backward."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import elixir_compile as elixir
from elixir_compile.graph.capture.modules import executor_of
from elixir_compile.graph.ops.shards import parts_of
from elixir_compile.ir import MIXED_DTYPE, Kind, Tier
from elixir_compile.session.cast_and_shard import scales_of
from tests.run import frozen_checks
from tests.run.frozen_checks import (
    CODE_BYTES,
    LARGE_WIDTH,
    LAYERS,
    NF4,
    ROWS,
    WIDTH,
    Adapted,
    ByOp,
    Checkpointed,
    CheckpointedNF4,
    Dropped,
    InBuffers,
    InHalves,
    InNF4,
    Moving,
    Normed,
    Trained,
    batches,
    frozen_spans,
    nf4,
    squares,
    stack,
)
from tests.run.processes import in_turn, spawn
from tests.run.random_runs import SLACK_BYTES
from tests.run.training import (
    Run,
    assert_same_tensors,
    by_elixir,
    by_elixir_unprepared,
    by_torch,
    least_bytes,
    same_losses,
    scaled_bytes,
)

AS_TENSORS_AND_INSIDE = [InNF4, pytest.param(Adapted, marks=pytest.mark.slow)]
"""Codes and scales inside of a tensor of a class of its own, and as parameters of a module."""


def trained(found: Run, width: int = WIDTH) -> Run:
    torch.manual_seed(2)
    return found.train(batches(width=width), squares)


def compare(kind: type[nn.Module], **options: Any) -> tuple[Any, Run]:
    """Train a stack of `kind` and one compiled by torch's `aot_eager`, compare all bits, and return plan and run."""
    wanted = trained(by_torch(stack(kind), backend="aot_eager"))
    found = trained(by_elixir(stack(kind), plan_cache=False, replan=False, **options))
    assert same_losses(map(float, wanted.losses), map(float, found.losses))
    assert_same_tensors(wanted.weights, found.weights)
    plan = elixir.compilations(found.model)[-1].plan
    assert plan is not None
    return plan, found


def saved_bytes(run: Run) -> int:
    """Return the bytes of the largest value that the forward saves for the backward."""
    graph = elixir.compilations(run.model)[-1].graph
    assert graph is not None
    return max((storage.nbytes for storage in graph.storages if storage.kind is Kind.SAVED), default=0)


@pytest.mark.parametrize(
    "kind",
    [InNF4, *(pytest.param(kind, marks=pytest.mark.slow) for kind in (Adapted, ByOp, InHalves, Normed, Checkpointed))],
)
def test_a_matrix_made_of_codes_is_made_again_instead_of_saved(kind: type[nn.Module]) -> None:
    _, run = compare(kind, device_memory="256MiB")
    # DoRA saves the sum of matrix and adapter, which is trained.
    assert saved_bytes(run) <= 4 * ROWS * WIDTH or kind is Normed


@pytest.mark.parametrize("kind", AS_TENSORS_AND_INSIDE)
def test_codes_on_the_host_are_copied_in_twice_a_step_and_never_back(kind: type[nn.Module]) -> None:
    plan, run = compare(kind, planner="zero3_offload")
    frozen = [bucket for bucket in plan.buckets if not bucket.trainable]
    homes = {placement.bucket: placement.param for placement in plan.placements}
    assert all(homes[bucket.id] is Tier.HOST for bucket in frozen)
    assert any(bucket.dtype == MIXED_DTYPE for bucket in frozen)  # codes and scales of a layer
    own = (param for param in run.model.parameters() if not param.requires_grad)
    assert sum(bucket.nbytes for bucket in frozen) == sum(
        part.nbytes for param in own for part in parts_of(param).values()
    )
    (batch,) = batches(1)
    record = elixir.measure_step(lambda: squares(run.compiled, run.optimizer, batch))
    copies = frozen_spans(record, plan.buckets)
    assert {(str(span.lane), span.label.split()[0]) for span in copies if span.nbytes} == {("h2d", "gather")}
    nbytes = {bucket.id: bucket.nbytes for bucket in frozen}
    moved = {name: sum(span.nbytes for span in copies if name in span.label.split()) for name in nbytes}
    assert all(nbytes[name] <= moved[name] <= 2 * nbytes[name] for name in nbytes)
    assert record.device_peak_bytes <= plan.prediction.device_peak_bytes * 1.01


@pytest.mark.parametrize("kind", AS_TENSORS_AND_INSIDE)
def test_an_unprepared_model_trains_in_fewer_bytes(kind: type[nn.Module]) -> None:
    keep = compare(kind, device_memory="256MiB")[0].prediction.device_peak_bytes
    wanted = trained(by_torch(stack(kind), backend="aot_eager")).losses
    budget_bytes = scaled_bytes(stack(kind), keep, 0.8)
    run = trained(by_elixir_unprepared(stack(kind), plan_cache=False, device_memory=budget_bytes))
    assert same_losses(map(float, wanted), map(float, run.losses))
    (batch,) = batches(1)
    record = elixir.measure_step(lambda: squares(run.compiled, run.optimizer, batch))
    assert record.device_peak_bytes <= budget_bytes + SLACK_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Trained, Dropped])
def test_a_matrix_that_depends_on_more_than_frozen_weights_is_saved_as_by_torch(kind: type[nn.Module]) -> None:
    _, run = compare(kind, device_memory="256MiB")
    assert saved_bytes(run) >= 2 * CODE_BYTES or kind is Trained


def test_a_code_changed_between_steps_is_the_code_of_the_next_step() -> None:
    wanted, found = by_torch(stack(Adapted)), by_elixir(stack(Adapted), planner="zero3_offload")
    for run in (wanted, found):
        trained(run)
        with torch.no_grad():
            dict(run.model.named_parameters())["0.codes"].neg_()
        trained(run)
    assert same_losses(map(float, wanted.losses), map(float, found.losses))


def test_a_tensor_made_of_codes_stays_what_it_is_for_its_user(tmp_path: Path) -> None:
    wanted, found = by_torch(stack(InNF4)), by_elixir(stack(InNF4), planner="zero3_offload")
    for run in (wanted, found):
        trained(run)
        assert type(run.model.get_submodule("0.base").weight) is type(run.model.state_dict()["0.base.weight"]) is NF4
        torch.manual_seed(3)
        first, second, third = (run.model.get_submodule(f"{place}.base") for place in range(3))
        first.load_state_dict({"weight": nf4()})
        second.weight = nn.Parameter(nf4(), requires_grad=False)
        with torch.no_grad():
            third.weight.codes.bitwise_xor_(255)
        if run is found:  # as trainers do; torch refuses it for its own, to which something refers weakly
            run.model.to("cpu")
        trained(run)
    assert same_losses(map(float, wanted.losses), map(float, found.losses))
    assert all(bucket.is_away for bucket in executor_of(found.model).buckets)
    copied = copy.deepcopy(found.model)
    elixir.save(tmp_path / "run", found.model)
    trained(found)
    loaded = by_elixir(stack(InNF4), planner="zero3_offload")
    elixir.load(tmp_path / "run", loaded.model)
    for model in (copied, loaded.model):
        (batch,) = batches(1)
        assert torch.equal(model(batch), wanted.model(batch))
    with pytest.raises(elixir.UnsupportedModel, match=r"0\.base\.weight\.codes .* cannot change any more"):
        found.model.half()
    weight = found.model.get_submodule("3.base").weight.requires_grad_()
    with pytest.raises(elixir.UnsupportedModel, match=r"3\.base\.weight\.codes .* stays on the device"):
        trained(found)
    weight.requires_grad_(False)
    trained(found)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [InNF4, CheckpointedNF4])
@pytest.mark.parametrize("start", [by_elixir, by_elixir_unprepared])
def test_tensors_made_of_codes_train_under_every_budget(start: Callable[..., Run], kind: type[nn.Module]) -> None:
    wanted = trained(by_torch(stack(kind), backend="aot_eager")).losses
    (batch,) = batches(1)
    least = least_bytes(stack(kind), batch, plan_cache=False)
    keep = compare(kind, device_memory="256MiB")[0].prediction.device_peak_bytes
    for budget_bytes in range(least, keep, (keep - least) // 3):
        found = trained(start(stack(kind), plan_cache=False, replan=False, device_memory=budget_bytes))
        assert same_losses(map(float, wanted), map(float, found.losses))
        record = elixir.measure_step(lambda found=found: squares(found.compiled, found.optimizer, batch))
        assert record.device_peak_bytes <= budget_bytes * 1.01
        del found


def test_param_dtype_rounds_no_scale_of_codes() -> None:
    model = elixir.prepare(stack(Adapted), param_dtype="bfloat16")
    dtypes = {name.split(".")[-1]: param.dtype for name, param in model.named_parameters()}
    assert dtypes == {
        "codes": torch.int8, "scale": torch.float32, "down": torch.bfloat16, "up": torch.bfloat16
    }  # fmt: skip


def test_scales_are_frozen_and_beside_as_many_codes() -> None:
    norm = nn.BatchNorm1d(4).requires_grad_(False)  # its counter of batches is an integer
    layer, learned = Adapted(), Trained()
    assert scales_of([norm]) == scales_of([learned]) - {id(learned.codes)} == frozenset()
    assert scales_of([layer]) == {id(layer.codes), id(layer.scale)}


@pytest.mark.parametrize("start", [by_elixir, pytest.param(by_elixir_unprepared, marks=pytest.mark.slow)])
def test_large_buffers_that_nobody_writes_live_where_the_plan_says(start: Callable[..., Run]) -> None:
    wanted = trained(by_torch(stack(InBuffers), backend="aot_eager"), LARGE_WIDTH)
    found = trained(start(stack(InBuffers), plan_cache=False, planner="zero3_offload"), LARGE_WIDTH)
    assert same_losses(map(float, wanted.losses), map(float, found.losses))
    plan = elixir.compilations(found.model)[-1].plan
    assert plan is not None
    codes = [bucket.id for bucket in plan.buckets if not bucket.trainable]
    assert sum(bucket.nbytes for bucket in plan.buckets if bucket.id in codes) == LAYERS * LARGE_WIDTH**2
    assert all(placement.param is Tier.HOST for placement in plan.placements if placement.bucket in codes)
    # What users do with buffers between steps: read, write, load, replace.
    for run in (wanted, found):
        for number, name in enumerate(("0.codes", "1.codes", "2.codes")):
            module = run.model.get_submodule(name[0])
            value = module.state_dict()["codes"].neg()
            if number == 0:
                module.codes.copy_(value)
            elif number == 1:
                module.load_state_dict({"codes": value}, strict=False)
            else:
                module.codes = value.clone()
        trained(run, LARGE_WIDTH)
    assert same_losses(map(float, wanted.losses), map(float, found.losses))
    assert_same_tensors(wanted.weights, found.weights)


def test_a_large_buffer_that_the_forward_writes_stays_on_the_device() -> None:
    wanted = trained(by_torch(stack(Moving), backend="aot_eager"), LARGE_WIDTH)
    found = trained(by_elixir(stack(Moving), plan_cache=False, planner="zero3_offload"), LARGE_WIDTH)
    assert same_losses(map(float, wanted.losses), map(float, found.losses))
    assert_same_tensors(wanted.weights, found.weights)
    plan = elixir.compilations(found.model)[-1].plan
    assert plan is not None
    assert all(bucket.trainable for bucket in plan.buckets)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_share_codes_as_other_parameters(num_ranks: int, tmp_path: Path) -> None:
    checks = [["losses_and_codes"], ["losses_beside_nf4"]]
    of_ranks = spawn(in_turn, num_ranks, frozen_checks.__name__, checks, folder=tmp_path, limit_s=240.0)
    losses, nbytes, _ = frozen_checks.losses_and_codes(0, 1)
    most_rows = -(-LARGE_WIDTH // num_ranks)
    assert nbytes == []  # on one rank codes and scales share buckets of bytes
    beside_nf4, _ = frozen_checks.losses_beside_nf4(0, 1)
    for (found, shards, back), (found_beside, reasons) in of_ranks:
        assert found_beside == (beside_nf4 if num_ranks == 2 else pytest.approx(beside_nf4, rel=1e-5))
        (reason,) = reasons
        assert "several ranks share the model" in reason
        assert found == (losses if num_ranks == 2 else pytest.approx(losses, rel=1e-5))  # (g + g + g) / 3 rounds
        assert sum(shards) // (LAYERS * LARGE_WIDTH) in (most_rows, LARGE_WIDTH - (num_ranks - 1) * most_rows)
        assert back == []
