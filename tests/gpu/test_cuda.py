"""What only a CUDA device can show: streams, pinned copies, two memories, the allocator, and a measured machine."""

import copy
import gc
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

import elixir_compile as elixir
from elixir_compile.compat.platforms import cores_beside, memory_sizes_bytes
from elixir_compile.graph.capture.modules import executor_of
from elixir_compile.ir.hardware import cluster_from_json, cluster_to_json
from elixir_compile.ir.schedule import Record
from elixir_compile.runtime.bucket import Slab, _pin
from elixir_compile.session.machine import library_bytes
from elixir_compile.session.step_profiler import own_bytes
from elixir_compile.tools.measure.machine import measure_machine
from tests.gpu.accelerator import (
    LOSS_RTOL,
    STARTED_RATE,
    WIDTH,
    Attention,
    assert_close,
    assert_same_gradients,
    gpt2,
    inputs,
    stack,
    started,
    texts,
)
from tests.run.models import Stack, seeded, vectors
from tests.run.training import (
    Run,
    assert_offloads,
    by_elixir,
    by_torch,
    fused_adamw,
    loss_of,
    on_host,
    plain_step,
    planned_peak_bytes,
    tight_bytes,
)

pytestmark = [pytest.mark.gpu, pytest.mark.cuda]


# ----------------------------------------------------------------------------------------------------------------------
# What only a CUDA device can show: streams, pinned copies, two memories, the allocator's own figures.
#
# Updates on the host and on the device are different kernels, so weights are compared within a tolerance: 1e-4 of the
# loss, far above float32's rounding and far below one missing or stale gradient. Gradients of the first step come from
# the same kernels, so they are bitwise equal.


@pytest.mark.parametrize("share", [1.0, 0.7, None])
def test_gpt2_trains_as_torch_does_under_every_budget(share: float | None) -> None:
    model, batches = gpt2(4, 256, 1024).cuda(), texts(4, 1024)
    expected = by_torch(model)
    full = planned_peak_bytes(by_elixir(model).train(batches[:1]))
    budget = tight_bytes(model, batches[0]) if share is None else int(share * full)
    got = by_elixir(model, device_memory=budget)
    assert_same_gradients(expected, got, lambda run: loss_of(run.compiled, batches[0]).backward())
    expected.train(batches)
    got.train(batches)
    assert_close(expected, got)
    if share != 1.0:
        assert_offloads(got)
        homes = {name: param.device.type for name, param in got.model.named_parameters()}
        assert {homes[name] for name in on_host(got)} == {"cpu"}


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_sixty_percent_of_gpt2_124m_is_kept_and_copies_hide(inner: str) -> None:
    model, batches = gpt2(12, 768, 50257), texts(6, 50257, rows=16, length=256)

    def measured(own: Run) -> Record:
        own.train(batches[:4])
        return elixir.measure_step(lambda: own.train(batches[4:5]), device="cuda")

    free_record = measured(free := Run(**started(copy.deepcopy(model), inner, None)))
    assert free_record.counts.get("gather", 0) == 0
    losses = torch.stack(free.losses)
    del free
    torch._dynamo.reset()
    gc.collect()
    budget = int(0.6 * free_record.device_peak_bytes)
    record = measured(own := Run(**started(model, inner, budget)))
    assert record.device_peak_bytes <= budget
    (captured,) = elixir.compilations(own.model)
    planned = Counter(action.verb.value for action in captured.plan.schedules[0].actions)
    assert {verb: planned[verb] for verb in record.counts} == dict(record.counts)
    assert record.counts["gather"] > 0
    torch.testing.assert_close(torch.stack(own.losses), losses, rtol=LOSS_RTOL, atol=0.0)
    copies, kernels, hidden = copy_times(lambda: own.train(batches[5:6]))
    assert hidden > 0.3 * min(copies, kernels)


def copy_times(step: Callable[[], object]) -> tuple[float, float, float]:
    """Return the time of copies between pinned memory and the device in `step`, the time of its kernels, and the time
    in which both ran."""
    # Without `acc_events` torch 2.11 warns of events that are dropped between cycles.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profiler:
        step()
        torch.cuda.synchronize()
    events = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    spans = [(event.name, event.time_range.start, event.time_range.end) for event in events]
    copies = [(start, end) for name, start, end in spans if name.startswith("Memcpy") and "Pinned" in name]
    kernels = sorted((start, end) for name, start, end in spans if not name.startswith(("Memcpy", "Memset")))
    covered: list[tuple[float, float]] = []
    for start, end in kernels:
        begin = max(start, covered[-1][1]) if covered else start
        if end > begin:
            covered.append((begin, end))
    total = sum(end - start for start, end in copies)
    hidden = sum(max(0.0, min(end, stop) - max(start, begin)) for start, end in copies for begin, stop in covered)
    return total, sum(stop - begin for begin, stop in covered), hidden


def test_a_model_larger_than_the_device_trains_from_the_host() -> None:
    width, batches = 1024, [batch.cuda() for batch in vectors(3, width=1024)]
    model = seeded(Stack, width, 24)
    param_bytes = sum(param.numel() * param.element_size() for param in model.parameters())
    limit_bytes = 512 * 2**20
    assert param_bytes > 1.5 * limit_bytes
    expected = by_torch(model.cuda(), optimizer=partial(fused_adamw, lr=STARTED_RATE)).train(batches).losses
    model.cpu()
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((limit_bytes + torch.cuda.memory_reserved()) / total_bytes)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(param_bytes, dtype=torch.uint8, device="cuda")
        got = Run(**started(model, "aot_eager", int(0.8 * limit_bytes))).train(batches)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    torch.testing.assert_close(torch.stack(got.losses), torch.stack(expected), rtol=LOSS_RTOL, atol=0.0)


def test_the_default_budget_respects_the_memory_fraction() -> None:
    model, batches = seeded(Stack, 1024, 24), [batch.cuda() for batch in vectors(2, width=1024)]
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    limit_bytes = 2 * 2**30  # the reserve is 1 GiB of it
    torch.cuda.set_per_process_memory_fraction((limit_bytes + torch.cuda.memory_reserved()) / total_bytes)
    try:
        got = Run(**started(model, "aot_eager", None)).train(batches)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert elixir.compilations(got.model)[0].plan.budget_bytes < limit_bytes
    assert_offloads(got)


def test_float16_scaler_skips_an_overflow_whole(state_on_host: Callable[..., Run]) -> None:
    model, batches = stack(), inputs(4)
    got = state_on_host(model, batches[0])
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)

    def step(compiled: Any, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.float16):
            loss = loss_of(compiled, batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(got.model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss

    before = got.weights
    got.train([torch.full_like(batches[1], 1e6)], step)
    assert all(torch.equal(before[name], value) for name, value in got.weights.items())
    assert scaler.get_scale() == 2.0**9
    got.train(batches[1:], step)
    assert not any(torch.equal(before[name], value) for name, value in got.weights.items() if value.dim() > 1)


def test_a_refused_pin_warns_and_breaks_nothing() -> None:
    slab = Slab(1 << 20, pin=True)
    assert slab.is_pinned
    with pytest.warns(elixir.ElixirWarning, match="refused to pin"):
        assert _pin(slab.tensor(torch.uint8, (1,), 0).data_ptr(), slab.nbytes) is None
    assert torch.ones(8, device="cuda").sum().item() == 8


def test_a_forward_that_does_not_fit_is_planned_again_for_less() -> None:
    model, batches = stack(), [torch.randn(1 << 14, WIDTH, device="cuda") for _ in range(3)]
    expected = by_torch(model).train(batches)
    torch.cuda.empty_cache()
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    peak_bytes = planned_peak_bytes(by_elixir(model).train(batches[:1]))
    gc.collect()
    torch.cuda.empty_cache()  # what the allocator keeps of that run would be beside what it is allowed
    allowed_bytes = torch.cuda.memory_allocated() + peak_bytes // 2
    run = by_elixir(model, device_memory=4 * peak_bytes)
    torch.cuda.set_per_process_memory_fraction(allowed_bytes / total_bytes)
    try:
        run.train(batches)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert_close(expected, run)


def test_measuring_keeps_the_peak_that_the_user_reads() -> None:
    before = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    del before
    peak_bytes = torch.cuda.max_memory_allocated()
    assert peak_bytes >= 1 << 30
    run = by_elixir(stack(), profile_regions=True, report=True).train(inputs(9))
    elixir.measure_step(lambda: run.compiled(inputs(1)[0]).backward())
    assert torch.cuda.max_memory_allocated() == peak_bytes


class Words(nn.Module):
    """The mean of squares of what two layers with biases make of words."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(4096, 256), nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 64))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.layers(words).square().mean()


def test_the_parts_of_shared_reductions_are_within_the_planned_peak() -> None:
    """Many blocks of threads share the sum of a column, of the gradient of a bias, and of a row of a table."""
    model = seeded(Words).cuda()
    batches = [torch.randint(4096, (16, 256), device="cuda") for _ in range(3)]
    run = by_elixir(model, inner="aot_eager", planner="greedy", activations="recompute").train(batches)
    beside_bytes = torch.cuda.memory_stats()["requested_bytes.all.current"] - own_bytes(executor_of(run.model))
    record = elixir.measure_step(lambda: plain_step(run.compiled, run.optimizer, batches[0]))
    assert record.device_peak_bytes - beside_bytes <= planned_peak_bytes(run) + (1 << 16)


def test_workspaces_of_attention_are_within_the_planned_peak() -> None:
    model = seeded(Attention).cuda().bfloat16().eval()
    batches = [torch.randn(4, 512, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    run = by_elixir(model, profile_regions=True, planner="greedy").train(batches)
    beside_bytes = torch.cuda.memory_stats()["requested_bytes.all.current"] - own_bytes(executor_of(run.model))
    record = elixir.measure_step(lambda: plain_step(run.compiled, run.optimizer, batches[0]))
    assert record.device_peak_bytes - beside_bytes <= planned_peak_bytes(run) + (1 << 16)


def test_pinned_pages_are_on_the_node_of_the_device_and_no_fork_copies_them() -> None:
    beside = cores_beside(torch.device("cuda", torch.cuda.current_device()))
    slab = Slab(1 << 24, pin=True)
    start = slab.tensor(torch.uint8, (1,), 0).data_ptr()
    maps = Path("/proc/self/numa_maps")  # a kernel without NUMA has none
    lines = maps.read_text(encoding="ascii").splitlines() if maps.exists() else []
    nodes = [line for line in lines if line.startswith(f"{start:x} ")]
    if beside and nodes:
        placed = [word.partition("=")[0] for word in nodes[0].split() if word.startswith("N")]
        assert len(placed) == 1


# ----------------------------------------------------------------------------------------------------------------------
# A measured CUDA machine: copies run beside compute, and every rate is one that a device has.


def test_a_measured_device_is_one_that_could_be() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    cluster = measure_machine(device, seconds=4.0)
    assert cluster_from_json(cluster_to_json(cluster)) == cluster
    assert (cluster.device.memory_bytes, cluster.host.memory_bytes) == memory_sizes_bytes(device)
    assert cluster.device.name == torch.cuda.get_device_name(device)
    for link in (cluster.h2d, cluster.d2h):
        assert link.overlaps_compute
        assert 5e8 < link.bytes_per_s < 1e12
        assert 1e-7 < link.latency_s < 1e-3
    assert cluster.device.flops_per_s["float16"] > cluster.device.flops_per_s["float64"]
    assert cluster.device.memory_bytes_per_s > cluster.h2d.bytes_per_s
    # States on the device are updated faster than on its host: that the planner may choose is the point.
    assert cluster.device.update_elements_per_s > cluster.host.update_elements_per_s
    assert cluster.host.pinned_bytes <= cluster.host.memory_bytes


def test_workspaces_are_the_same_inside_a_capture() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    outside_bytes = library_bytes.__wrapped__(device)
    with FakeTensorMode():
        assert library_bytes.__wrapped__(device) == outside_bytes > 0
