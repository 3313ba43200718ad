"""What an accelerator shows: streams, pinned copies, two memories, bytes by kind, and all options."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import elixir_compile as elixir
from elixir_compile import compat
from elixir_compile.compat.platforms import platform as blocks
from elixir_compile.compat.platforms import platform_of
from elixir_compile.graph.capture.modules import executor_of
from elixir_compile.ir import Kind, Tier, Update
from elixir_compile.runtime.bucket import is_slab_memory
from elixir_compile.runtime.executor import Executor
from elixir_compile.tools.observed import FullStep
from tests.gpu.accelerator import (
    DEVICE,
    INNER,
    IS_CUDA,
    LOSS_RTOL,
    WIDTH,
    Attention,
    assert_close,
    gradients,
    inputs,
    lag,
    stack,
)
from tests.run.models import Stack, seeded
from tests.run.training import (
    Run,
    assert_offloads,
    by_elixir,
    by_torch,
    hybrid_adamw,
    loss_of,
    on_host,
    plain_step,
    planned_peak_bytes,
    scaled_bytes,
    tight_bytes,
)
from tests.run.updating import buckets_of, hybrid_run

pytestmark = pytest.mark.gpu


# ----------------------------------------------------------------------------------------------------------------------
# What an accelerator shows: streams, pinned copies, two memories, the allocator's own figures.
#
# Updates on the host and on the device are different kernels, so weights are compared within a tolerance: 1e-4 of the
# loss, far above float32's rounding and far below one missing or stale gradient. Gradients of the first step come from
# the same kernels, so they are bitwise equal.


def test_memory_does_not_grow() -> None:
    model, batches = stack(), inputs(13)
    # Another plan after the first steps would have other buckets.
    got = by_elixir(model, device_memory=tight_bytes(model, batches[0]), replan=False).train(batches[:3])
    assert_offloads(got)
    torch.accelerator.synchronize(DEVICE)
    before = torch.accelerator.memory_allocated(DEVICE)
    for batch in batches[3:]:
        plain_step(got.compiled, got.optimizer, batch)
    torch.accelerator.synchronize(DEVICE)
    assert torch.accelerator.memory_allocated(DEVICE) == before


@pytest.mark.cuda  # the second device type has no kernels for autocast
def test_bfloat16_autocast() -> None:
    model, batches = stack(), inputs()

    def step(compiled: Any, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = loss_of(compiled, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    expected = by_torch(model).train(batches, step)
    # Casts of the weights come on top of what a step in float32 needs.
    got = by_elixir(model, device_memory=scaled_bytes(model, tight_bytes(model, batches[0]), 1.5)).train(batches, step)
    assert_offloads(got)
    assert torch.equal(expected.losses[0], got.losses[0])
    assert_close(expected, got, rtol=2e-2)  # bfloat16 keeps eight bits


def test_state_on_the_host_updates_parameters_on_the_device(state_on_host: Callable[..., Run]) -> None:
    model, batches = stack(), inputs(5)
    expected = by_torch(model).train(batches)
    got = state_on_host(model, batches[0]).train(batches[1:])
    assert_close(expected, got)
    assert {param.device.type for param in got.model.parameters()} == {DEVICE.type}
    entries = got.optimizer.state.values()
    assert all(is_slab_memory(entry["exp_avg"].data_ptr()) for entry in entries)
    # torch cannot tell it of a mapping that the second device type has pinned.
    assert all(entry["exp_avg"].is_pinned() for entry in entries) or not IS_CUDA
    assert all(entry["step"].device.type == "cpu" for entry in entries)


def test_loading_state_does_not_pass_through_the_device(state_on_host: Callable[..., Run]) -> None:
    model, batches = stack(), inputs(3)
    got = state_on_host(model, batches[0])
    saved = got.optimizer.state_dict()
    before = torch.accelerator.memory_allocated(DEVICE)
    torch.accelerator.reset_peak_memory_stats(DEVICE)
    got.optimizer.load_state_dict(saved)
    # One step counter of 512 bytes per parameter may be there for a moment.
    assert torch.accelerator.max_memory_allocated(DEVICE) - before <= 512 * len(got.optimizer.state)
    got.train(batches[1:])
    assert_close(by_torch(model).train(batches), got)


def test_a_learning_rate_on_the_device_serves_both_sides() -> None:
    model, batches = stack(), inputs()
    expected = by_torch(model).train(batches)
    budget = tight_bytes(model, batches[0])

    def hybrid(params: Any) -> torch.optim.Optimizer:
        return elixir.HybridAdamW(params, lr=torch.tensor(1e-2, device=DEVICE))

    got = by_elixir(model, optimizer=hybrid, device_memory=budget).train(batches)
    assert_offloads(got)
    assert_close(expected, got)


def test_clipping_counts_gradients_on_both_sides() -> None:
    model, batches = stack(), inputs(1)
    full = planned_peak_bytes(by_elixir(model).train(batches))
    got = by_elixir(model, device_memory=scaled_bytes(model, full, 0.5))
    expected = by_torch(model)
    for run in (expected, got):
        loss_of(run.compiled, batches[0]).backward()
    assert_offloads(got)
    assert {param.grad.device.type for param in got.model.parameters()} == {"cpu", DEVICE.type}
    norms = [torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1e-3).item() for run in (expected, got)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def two_graphs(run: Run) -> None:
    first, second = inputs(2)
    (loss_of(run.compiled, first) + 3 * loss_of(run.compiled, second)).backward()


def compiled_and_eager(run: Run) -> None:
    first, second = inputs(2)
    (loss_of(run.compiled, first) + 3 * run.model(second)).backward()


@pytest.mark.parametrize("backward", [two_graphs, compiled_and_eager])
def test_gradients_of_two_graphs_meet(backward: Callable[[Run], None]) -> None:
    """The first graph's gradients are on the host, or on the way, when the second graph makes its own."""
    model, batches = stack(), inputs(1)
    budget = scaled_bytes(model, tight_bytes(model, batches[0]), 2.0)
    expected, got = by_torch(model), by_elixir(model, device_memory=budget)
    for run in (expected, got):
        run.train(batches)
    assert_offloads(got)
    theirs, ours = gradients(expected, backward), gradients(got, backward)
    for name, grad in theirs.items():
        torch.testing.assert_close(ours[name], grad, rtol=1e-3, atol=1e-6, msg=name)


def test_gradients_accumulate_over_micro_batches() -> None:
    model, batches = stack(), inputs(3)
    budget = tight_bytes(model, batches[0])
    expected, got = by_torch(model), by_elixir(model, device_memory=budget)

    def backward(run: Run) -> None:
        for batch in batches:
            loss_of(run.compiled, batch).backward()

    theirs, ours = gradients(expected, backward), gradients(got, backward)
    assert_offloads(got)
    for name, grad in theirs.items():
        torch.testing.assert_close(ours[name], grad, rtol=1e-5, atol=1e-7, msg=name)


def test_the_host_may_write_parameters_as_soon_as_a_forward_returned() -> None:
    """A copy still in flight would carry the new values into the forward of the old ones."""
    model, batches = stack(), inputs(1)
    got = by_elixir(model, device_memory=tight_bytes(model, batches[0])).train(batches)
    assert_offloads(got)
    with torch.no_grad():
        for _ in range(20):
            reference = got.compiled(batches[0])
            torch.accelerator.synchronize(DEVICE)
            lag()
            loss = got.compiled(batches[0])
            params = dict(got.model.named_parameters())
            held = {name: param.clone() for name, param in params.items()}
            for name in on_host(got):
                params[name].zero_()
            assert torch.equal(loss, reference)
            for name, param in params.items():
                param.copy_(held[name])


@pytest.mark.parametrize("verb", ["gather", "reduce", "offload", "release"])
def test_an_exception_between_copies_leaves_a_usable_model(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = stack(), inputs()
    got = by_elixir(model, device_memory=tight_bytes(model, batches[0]))
    got.train(batches[:1])
    assert_offloads(got)
    act, calls = getattr(Executor, verb), []

    def fail_once(executor: Executor, *args: Any) -> Any:
        calls.append(verb)
        if len(calls) == 3:
            raise RuntimeError("third call")
        return act(executor, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Executor, verb, fail_once)
        with pytest.raises(RuntimeError, match="third call"):
            loss_of(got.compiled, batches[1]).backward()
    got.optimizer.zero_grad()
    got.train(batches[1:])
    assert_close(by_torch(model).train(batches), got)


def test_an_offloaded_model_runs_and_trains_uncompiled() -> None:
    model, batches = stack(), inputs(2)
    expected = by_torch(model).train(batches[:1])
    got = by_elixir(model, device_memory=tight_bytes(model, batches[0])).train(batches[:1])
    assert_offloads(got)
    theirs = gradients(expected, lambda run: run.model(batches[1]).backward())
    ours = gradients(got, lambda run: run.model(batches[1]).backward())
    for name, grad in theirs.items():
        torch.testing.assert_close(ours[name], grad, rtol=1e-3, atol=1e-6, msg=name)


def test_a_model_moved_to_the_device_goes_back_home() -> None:
    model, batches = stack(), inputs()
    got = by_elixir(model, device_memory=tight_bytes(model, batches[0])).train(batches[:1])
    offloaded = on_host(got)
    got.model.to(DEVICE)
    got.train(batches[1:])
    params = dict(got.model.named_parameters())
    assert {params[name].device.type for name in offloaded} == {"cpu"}
    assert_close(by_torch(model).train(batches), got)


def test_the_forward_may_run_on_a_stream_of_the_users() -> None:
    model, batches = stack(), inputs(4)
    got = by_elixir(model, device_memory=tight_bytes(model, batches[0]))
    side, usual = torch.Stream(DEVICE), torch.accelerator.current_stream(DEVICE)
    side.wait_stream(usual)
    with side:
        got.train(batches)
    usual.wait_stream(side)
    assert_offloads(got)
    assert_close(by_torch(model).train(batches), got)


def test_the_device_need_not_be_the_current_one() -> None:
    if torch.accelerator.device_count() < 2:
        pytest.skip("needs two devices")
    other = torch.device(DEVICE.type, 1)
    model = seeded(Stack, WIDTH).to(other)
    batches = [batch.to(other) for batch in inputs()]
    got = by_elixir(model, device_memory=tight_bytes(model, batches[0])).train(batches)
    assert_offloads(got)
    assert executor_of(got.model).device == other
    assert_close(by_torch(model).train(batches), got)


def test_preparing_a_model_on_the_host_moves_none_of_its_parameters() -> None:
    """A model larger than the device is prepared on the host; the plan moves what has its home on the device."""
    model = seeded(Stack, WIDTH)
    model.register_buffer("scale", torch.ones(1))
    elixir.prepare(model, device=DEVICE)
    assert {param.device.type for param in model.parameters()} == {"cpu"}
    assert model.scale.device == DEVICE


def test_attention_with_dropout_keeps_its_seed_on_the_host() -> None:
    """fp32 attention with dropout is memory-efficient attention, whose backward reads its seed on the host."""
    model = seeded(Attention).to(DEVICE).train()
    batches = [torch.randn(2, 64, 128, device=DEVICE) for _ in range(3)]
    options = {"activations": "offload", "planner": "greedy"}
    got = by_elixir(model, device_memory=tight_bytes(model, batches[0], **options), **options)
    got.train(batches)
    assert_offloads(got)
    by_elixir(model, profile_regions=True, planner="greedy").train(batches)


def test_a_parameter_at_an_odd_address_is_copied_to_an_aligned_one() -> None:
    model = stack()
    memory = torch.zeros(model.head.weight.numel() + 1, device=DEVICE)
    model.head.weight = nn.Parameter(memory[1:].view_as(model.head.weight).copy_(model.head.weight.detach()))
    assert model.head.weight.data_ptr() % 16 == 4
    expected = by_torch(model).train(inputs(1))
    compiled = torch.compile(elixir.prepare(model), backend="elixir", options={"inner": INNER})
    loss = loss_of(compiled, inputs(1)[0])
    loss.backward()
    assert model.head.weight.data_ptr() % 16 == 0
    torch.testing.assert_close(loss, expected.losses[0], rtol=LOSS_RTOL, atol=0.0)


# ----------------------------------------------------------------------------------------------------------------------
# The bytes of a step by kind on an accelerator: their sum is the allocator's figure, the kinds are the plan's.


KINDS = (Kind.PARAM, Kind.GRAD, Kind.MOMENT, Kind.SAVED, Kind.GATHERED)
MOST_APART_BYTES = 512
"""Scalars that plans leave out: the step counts of the optimizer, the loss, numbers of random generators."""
NUM_STEPS = 6


def observed(planner: str) -> tuple[Run, FullStep, int]:
    """Return a run, its last step but one with its memory, and the allocator's peak in that step."""
    batches = inputs(NUM_STEPS)
    options = {"planner": planner, "update": "after_backward", "replan": False, "plan_cache": False}
    run = by_elixir(stack(), inner=INNER, **options)
    platform, peak_bytes = platform_of(DEVICE), 0
    with elixir.observe(run.compiled, full=(NUM_STEPS - 2,), memory_events=True, counters_hz=0) as study:
        for number, batch in enumerate(batches):
            if number == NUM_STEPS - 2:
                torch.accelerator.synchronize(DEVICE)
                torch.accelerator.reset_peak_memory_stats(DEVICE)
            plain_step(run.compiled, run.optimizer, batch)
            if number == NUM_STEPS - 2:
                peak_bytes = platform.peak_bytes(DEVICE)
    (full,) = study.full_steps
    return run, full, peak_bytes


@pytest.mark.parametrize("planner", ["keep_all", "zero_offload", "zero3_offload"])
def test_kinds_add_up_to_the_allocators_peak_and_are_those_of_the_plan(planner: str) -> None:
    run, full, peak_bytes = observed(planner)
    live = full.live
    assert live is not None
    assert full.record.device_peak_bytes == live.peak_bytes == peak_bytes
    planned = elixir.compilations(run.model)[0].timeline.live_bytes_by_kind
    for kind in KINDS:
        most_bytes = max(live.by_kind.get(kind, (0,)))
        assert most_bytes == pytest.approx(max(planned.get(kind, (0,))), abs=MOST_APART_BYTES), kind
    gathered = [at_s for at_s, nbytes in zip(live.at_s, live.by_kind.get(Kind.GATHERED, ()), strict=False) if nbytes]
    assert bool(gathered) == (planner == "zero3_offload")
    # Times are those of the device: within the step, and in the order of the allocator.
    assert list(live.at_s) == sorted(live.at_s)
    assert live.at_s[-1] <= full.record.step_s
    assert not blocks._running[DEVICE.type], "the history of the allocator is still on"


@pytest.mark.cuda  # torch tells of no other device type whether its history is on
def test_a_history_that_somebody_else_reads_is_left_alone() -> None:
    assert compat.start_allocator_history(DEVICE.type, 1000)
    try:
        assert observed("keep_all")[1].live is None
        torch.empty(1, device=DEVICE)
        assert any(entry["action"] == "alloc" for entry in compat.allocator_snapshot(DEVICE.type)["device_traces"][0])
    finally:
        compat.stop_allocator_history(DEVICE.type)


# ----------------------------------------------------------------------------------------------------------------------
# Options on an accelerator: update modes, masters, disk, activations, profiles, and more than seven steps.
#
# Seven steps are measured before a plan is corrected, so longer runs go on under a plan that knows the device.


MANY_STEPS = 9
BF16_RTOL = 2e-2
"""Eight bits of a 16-bit parameter, which the kernels of host and device may round to neighbours."""


@pytest.mark.parametrize("update", [mode.value for mode in Update])
def test_update_modes_by_name_train_as_torch_does(update: Any) -> None:
    """In float64, because nine steps of this model multiply the rounding of float32 updates, which differs between the
    kernels of host and device, by a thousand (measured on an H200: losses 1.8e-3 apart)."""
    model, batches = stack().double(), [batch.double() for batch in inputs(MANY_STEPS)]
    expected = by_torch(model).train(batches)
    options: dict[str, Any] = {"update": update, "planner": "greedy"}
    got = by_elixir(model, device_memory=tight_bytes(model, batches[0], **options), **options).train(batches)
    assert_offloads(got)
    assert elixir.compilations(got.model)[0].plan.update.value == update
    assert_close(expected, got, rtol=1e-9)


@pytest.mark.parametrize(
    ("home", "update", "share"),
    [
        ("split", Update.AFTER_BACKWARD, 0.0),
        ("split", Update.ACROSS_STEPS, 1.0),
        ("host", Update.IN_BACKWARD, 0.5),
        ("host", Update.ACROSS_STEPS, 1.0),
    ],
)
def test_placed_and_streamed_updates_train_as_torch_does(home: str, update: Update, share: float) -> None:
    model, batches = stack(), inputs(4)
    expected = by_torch(model).train(batches)
    with hybrid_run(model, batches[0], home=home, update=update, share=share) as got:
        assert_close(expected, got.train(batches))
        assert any(bucket.placement.streamed for bucket in buckets_of(got)) == bool(share)


@pytest.mark.parametrize("home", ["split disk", "host disk"])
@pytest.mark.parametrize("update", [Update.AFTER_BACKWARD, Update.ACROSS_STEPS])
def test_state_on_disk_trains_as_torch_does(home: str, update: Update, tmp_path: Path) -> None:
    model, batches = stack(), inputs(4)
    expected = by_torch(model).train(batches)
    with hybrid_run(model, batches[0], home=home, update=update, disk_path=tmp_path, disk_check=True) as got:
        assert_close(expected, got.train(batches))
        assert {bucket.placement.optim for bucket in buckets_of(got)} >= {Tier.DISK}


def in_bfloat16(step: Callable[[Run], Run], **options: Any) -> Run:
    """Return a run of a stack of bf16 parameters with masters."""
    model = elixir.prepare(stack(), param_dtype="bfloat16")
    compiled = torch.compile(model, backend="elixir", options={"inner": "aot_eager", "report": False, **options})
    return step(Run(model=model, compiled=compiled, optimizer=hybrid_adamw(model.parameters())))


def test_masters_on_the_host_train_as_masters_on_the_device() -> None:
    batches = [batch.bfloat16() for batch in inputs(4)]

    def train(run: Run) -> Run:
        return run.train(batches)

    expected = in_bfloat16(train)
    peak_bytes = elixir.compilations(expected.model)[0].plan.prediction.device_peak_bytes
    torch._dynamo.reset()
    got = in_bfloat16(train, device_memory=scaled_bytes(expected.model, peak_bytes, 0.6))
    assert_offloads(got)
    assert_close(expected, got, rtol=BF16_RTOL)
    entries = [entry for entry in got.optimizer.state.values() if "master_low" in entry]
    assert {entry["master_low"].device.type for entry in entries} >= {"cpu"}


@pytest.mark.parametrize("activations", ["keep", "recompute", "offload", "any"])
def test_every_treatment_of_activations_trains_as_torch_does(activations: str) -> None:
    model, batches = stack(), inputs(3)
    expected = by_torch(model).train(batches)
    options: dict[str, Any] = {"activations": activations, "planner": "greedy"}
    got = by_elixir(model, device_memory=tight_bytes(model, batches[0], **options), **options).train(batches)
    assert_offloads(got)
    assert_close(expected, got)


def test_profiled_regions_change_no_loss_over_many_steps() -> None:
    model, batches = stack(), inputs(MANY_STEPS)
    expected = by_torch(model).train(batches)
    got = by_elixir(model, profile_regions=True, planner="greedy").train(batches)
    assert_close(expected, got)


def test_attention_with_dropout_is_profiled_and_offloaded() -> None:
    """The seed of its kernel may be on the host."""
    model = seeded(Attention).to(DEVICE).train()
    batches = [torch.randn(2, 64, 128).to(DEVICE) for _ in range(3)]
    options: dict[str, Any] = {"activations": "offload", "planner": "greedy"}
    got = by_elixir(model, device_memory=tight_bytes(model, batches[0], **options), **options).train(batches)
    assert_offloads(got)


def test_a_measured_step_has_spans_of_every_lane_that_works() -> None:
    model, batches = stack(), inputs(MANY_STEPS)
    options: dict[str, Any] = {"planner": "greedy"}
    got = by_elixir(model, device_memory=tight_bytes(model, batches[0], **options), **options).train(batches)
    record = elixir.measure_step(lambda: plain_step(got.compiled, got.optimizer, batches[0]), device=DEVICE)
    lanes = {span.lane.value for span in record.spans}
    assert lanes >= {"compute", "h2d", "d2h"}
    assert all(span.end_s >= span.start_s >= 0 for span in record.spans)
