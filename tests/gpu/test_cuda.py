"""What only a CUDA device can show: streams, pinned copies, two memories, the allocator's own figures.

Updates on the host and on the device are different kernels, so weights are compared within a tolerance: 1e-4 of the
loss, far above float32's rounding and far below one missing or stale gradient. Gradients of the first step come from
the same kernels, so they are bitwise equal.
"""

import copy
import gc
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import elixir_compile as elixir
from elixir_compile.capture.modules import executor_of
from elixir_compile.ir import Plan, Tier
from elixir_compile.ir.record import Record
from elixir_compile.managed import graph_planner
from elixir_compile.managed.step_profiler import own_bytes
from elixir_compile.options import Options
from elixir_compile.platforms import cores_beside
from elixir_compile.runtime.executor import Executor
from elixir_compile.runtime.slab import Slab, _pin, is_slab_memory
from elixir_compile.search import Problem, plan
from tests.run.models import Stack, seeded, vectors
from tests.run.training import (
    Run,
    assert_offloads,
    by_elixir,
    by_torch,
    loss_of,
    on_host,
    plain_step,
    planned_peak_bytes,
    tight_bytes,
)

pytestmark = pytest.mark.gpu

WIDTH = 512
LOSS_RTOL = 1e-4


@pytest.fixture(autouse=True)
def fresh_device() -> Iterator[None]:
    """Start with an empty compiler and nothing of an earlier test on the device."""
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    yield
    torch._dynamo.reset()


def stack() -> nn.Module:
    return seeded(Stack, WIDTH).cuda()


def inputs(num_batches: int = 3) -> list[torch.Tensor]:
    return [batch.cuda() for batch in vectors(num_batches, width=WIDTH)]


def gpt2(num_layers: int, width: int, num_words: int) -> nn.Module:
    """Return a GPT-2 without dropout; its attention is of plain products, whose backward is deterministic."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=num_layers, n_embd=width, n_head=8, vocab_size=num_words, n_positions=256, attn_implementation="eager",
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return seeded(GPT2LMHeadModel, config).train()


def texts(num_batches: int, num_words: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    ids = [torch.randint(0, num_words, (4, 128), generator=generator).cuda() for _ in range(num_batches)]
    return [{"input_ids": each, "labels": each} for each in ids]


def assert_close(expected: Run, got: Run, rtol: float = LOSS_RTOL) -> None:
    torch.testing.assert_close(torch.stack(got.losses), torch.stack(expected.losses), rtol=rtol, atol=0.0)


def gradients(run: Run, backward: Callable[[Run], None]) -> dict[str, torch.Tensor]:
    """Return the gradients that `backward` leaves, on the host, and drop them."""
    backward(run)
    found = {name: p.grad.cpu() for name, p in run.model.named_parameters() if p.grad is not None}
    run.optimizer.zero_grad()
    return found


def assert_same_gradients(expected: Run, got: Run, backward: Callable[[Run], None]) -> None:
    theirs, ours = gradients(expected, backward), gradients(got, backward)
    assert list(theirs) == list(ours)
    different = [name for name in theirs if not torch.equal(theirs[name], ours[name])]
    assert not different


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
    model, batches = gpt2(12, 768, 50257), texts(6, 50257)

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
    copies, hidden = copy_times(lambda: own.train(batches[5:6]))
    assert hidden > 0.3 * copies


def started(model: nn.Module, inner: str, budget: int | None) -> dict[str, Any]:
    """Prepare `model`, which is on the host, for the device, compile it and make its optimizer."""
    elixir.prepare(model, device="cuda")
    compiled = torch.compile(
        model, backend="elixir", options={"inner": inner, "device_memory": budget, "report": False}
    )
    return {"model": model, "compiled": compiled, "optimizer": elixir.HybridAdamW(model.parameters(), lr=1e-2)}


def copy_times(step: Callable[[], object]) -> tuple[float, float]:
    """Return the time of copies between pinned memory and the device in `step`, and how much of it kernels ran."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
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
    return total, hidden


def test_memory_does_not_grow() -> None:
    model, batches = stack(), inputs(13)
    got = by_elixir(model, device_memory=tight_bytes(model, batches[0])).train(batches[:3])
    assert_offloads(got)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for batch in batches[3:]:
        plain_step(got.compiled, got.optimizer, batch)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


def test_a_model_larger_than_the_device_trains_from_the_host() -> None:
    width, batches = 1024, [batch.cuda() for batch in vectors(3, width=1024)]
    model = seeded(Stack, width, 24)
    param_bytes = sum(param.numel() * param.element_size() for param in model.parameters())
    limit_bytes = 512 * 2**20
    assert param_bytes > 1.5 * limit_bytes
    expected = by_torch(model.cuda()).train(batches).losses
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


def test_bfloat16_autocast() -> None:
    model, batches = stack(), inputs()

    def step(compiled: Any, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            loss = loss_of(compiled, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    expected = by_torch(model).train(batches, step)
    # Casts of the weights come on top of what a step in float32 needs.
    got = by_elixir(model, device_memory=int(1.5 * tight_bytes(model, batches[0]))).train(batches, step)
    assert_offloads(got)
    assert torch.equal(expected.losses[0], got.losses[0])
    assert_close(expected, got, rtol=2e-2)  # bfloat16 keeps eight bits


@pytest.fixture
def state_on_host(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    """Return what starts a run with parameters and gradients on the device and all state on the host."""

    def decide(problem: Problem, options: Options) -> Plan:
        kept = plan(problem, planner=options.planner)
        return replace(kept, placements=tuple(replace(placement, optim=Tier.HOST) for placement in kept.placements))

    def start(model: nn.Module, batch: torch.Tensor) -> Run:
        monkeypatch.setattr(graph_planner, "plan_for", decide)
        got = by_elixir(model).train([batch])
        assert not on_host(got)
        return got

    return start


def test_state_on_the_host_updates_parameters_on_the_device(state_on_host: Callable[..., Run]) -> None:
    model, batches = stack(), inputs(5)
    expected = by_torch(model).train(batches)
    got = state_on_host(model, batches[0]).train(batches[1:])
    assert_close(expected, got)
    assert {param.device.type for param in got.model.parameters()} == {"cuda"}
    entries = got.optimizer.state.values()
    assert all(is_slab_memory(entry["exp_avg"].data_ptr()) and entry["exp_avg"].is_pinned() for entry in entries)
    assert all(entry["step"].device.type == "cpu" for entry in entries)


def test_loading_state_does_not_pass_through_the_device(state_on_host: Callable[..., Run]) -> None:
    model, batches = stack(), inputs(3)
    got = state_on_host(model, batches[0])
    saved = got.optimizer.state_dict()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    got.optimizer.load_state_dict(saved)
    # One step counter of 512 bytes per parameter may be there for a moment.
    assert torch.cuda.max_memory_allocated() - before <= 512 * len(got.optimizer.state)
    got.train(batches[1:])
    assert_close(by_torch(model).train(batches), got)


def test_a_learning_rate_on_the_device_serves_both_sides() -> None:
    model, batches = stack(), inputs()
    expected = by_torch(model).train(batches)
    budget = tight_bytes(model, batches[0])

    def hybrid(params: Any) -> torch.optim.Optimizer:
        return elixir.HybridAdamW(params, lr=torch.tensor(1e-2, device="cuda"))

    got = by_elixir(model, optimizer=hybrid, device_memory=budget).train(batches)
    assert_offloads(got)
    assert_close(expected, got)


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


def test_clipping_counts_gradients_on_both_sides() -> None:
    model, batches = stack(), inputs(1)
    full = planned_peak_bytes(by_elixir(model).train(batches))
    got = by_elixir(model, device_memory=int(0.5 * full))
    expected = by_torch(model)
    for run in (expected, got):
        loss_of(run.compiled, batches[0]).backward()
    assert_offloads(got)
    assert {param.grad.device.type for param in got.model.parameters()} == {"cpu", "cuda"}
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
    budget = 2 * tight_bytes(model, batches[0])
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
            torch.cuda.synchronize()
            torch.cuda._sleep(20_000_000)  # the device lags behind
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
    got.model.cuda()
    got.train(batches[1:])
    params = dict(got.model.named_parameters())
    assert {params[name].device.type for name in offloaded} == {"cpu"}
    assert_close(by_torch(model).train(batches), got)


def test_the_forward_may_run_on_a_stream_of_the_users() -> None:
    model, batches = stack(), inputs(4)
    got = by_elixir(model, device_memory=tight_bytes(model, batches[0]))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        got.train(batches)
    torch.cuda.current_stream().wait_stream(side)
    assert_offloads(got)
    assert_close(by_torch(model).train(batches), got)


def test_the_device_need_not_be_the_current_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    model = seeded(Stack, WIDTH).to("cuda:1")
    batches = [batch.to("cuda:1") for batch in inputs()]
    got = by_elixir(model, device_memory=tight_bytes(model, batches[0])).train(batches)
    assert_offloads(got)
    assert executor_of(got.model).device == torch.device("cuda", 1)
    assert_close(by_torch(model).train(batches), got)


def test_a_refused_pin_warns_and_breaks_nothing() -> None:
    slab = Slab(1 << 20, pin=True)
    assert slab.is_pinned
    with pytest.warns(elixir.ElixirWarning, match="refused to pin"):
        assert _pin(slab.tensor(torch.uint8, (1,), 0).data_ptr(), slab.nbytes) is None
    assert torch.ones(8, device="cuda").sum().item() == 8


def test_attention_with_dropout_keeps_its_seed_on_the_host() -> None:
    """fp32 attention with dropout is memory-efficient attention, whose backward reads its seed on the host."""
    model = seeded(Attention).cuda().train()
    batches = [torch.randn(2, 64, 128, device="cuda") for _ in range(3)]
    options = {"activations": "offload", "planner": "greedy"}
    got = by_elixir(model, device_memory=tight_bytes(model, batches[0], **options), **options)
    got.train(batches)
    assert_offloads(got)
    by_elixir(model, profile_regions=True, planner="greedy").train(batches)


class Attention(nn.Module):
    """Two layers of attention with dropout, each with an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"qkv": nn.Linear(128, 384), "out": nn.Linear(128, 128)}) for _ in "ab"
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            heads = layer["qkv"](x).unflatten(-1, (3, 4, 32)).permute(2, 0, 3, 1, 4)
            seen = nn.functional.scaled_dot_product_attention(*heads, dropout_p=0.1)
            x = x + layer["out"](seen.transpose(1, 2).flatten(2))
        return x.square().mean()


def test_a_forward_that_does_not_fit_is_planned_again_for_less() -> None:
    model, batches = stack(), [torch.randn(1 << 14, WIDTH, device="cuda") for _ in range(3)]
    expected = by_torch(model).train(batches)
    torch.cuda.empty_cache()
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    peak_bytes = planned_peak_bytes(by_elixir(model).train(batches[:1]))
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
    lines = Path("/proc/self/numa_maps").read_text(encoding="ascii").splitlines()
    nodes = [line for line in lines if line.startswith(f"{start:x} ")]
    if beside and nodes:
        placed = [word.partition("=")[0] for word in nodes[0].split() if word.startswith("N")]
        assert len(placed) == 1


def test_a_parameter_at_an_odd_address_is_copied_to_an_aligned_one() -> None:
    model = stack()
    memory = torch.zeros(model.head.weight.numel() + 1, device="cuda")
    model.head.weight = nn.Parameter(memory[1:].view_as(model.head.weight).copy_(model.head.weight.detach()))
    assert model.head.weight.data_ptr() % 16 == 4
    expected = by_torch(model).train(inputs(1))
    compiled = torch.compile(elixir.prepare(model), backend="elixir")
    loss = loss_of(compiled, inputs(1)[0])
    loss.backward()
    assert model.head.weight.data_ptr() % 16 == 0
    torch.testing.assert_close(loss, expected.losses[0], rtol=LOSS_RTOL, atol=0.0)
