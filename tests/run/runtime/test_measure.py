"""Measured steps and regions: bytes that are known, and equal regions that are timed once."""

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses import FakeTensorMode

import elixir_compile as elixir
from elixir_compile import compat
from elixir_compile.base import folders
from elixir_compile.base.errors import NestedMeasurement
from elixir_compile.graph.capture.node_facts import reads_seed_on_host
from elixir_compile.ir import Kind, Op, OpId, Phase, Region, RegionId, StepGraph, Storage, StorageId
from elixir_compile.ir.kinds import Lane
from elixir_compile.ir.schedule import Origin, Record
from elixir_compile.runtime import measure as step_bytes
from elixir_compile.runtime.bucket import Slab
from elixir_compile.runtime.lanes import lanes_for
from elixir_compile.runtime.measure import RegionTime, Resident, measure_step, peak_bytes
from elixir_compile.runtime.recording import Ledger
from elixir_compile.session import machine as profiling
from elixir_compile.session.machine import made_bytes
from elixir_compile.session.model import Compilation
from tests.run.models import ShortStack, Stack, seeded, tokens, vectors
from tests.run.training import assert_same, by_elixir, least_bytes

# ----------------------------------------------------------------------------------------------------------------------
# measure_step against tensors whose bytes are known, and the arithmetic under it.


MB = 1_000_000


def measured_beyond_base(fn: object) -> int:
    """Peak of `fn` less what a step that does nothing holds."""
    base_bytes = measure_step(lambda: None, device="cpu").device_peak_bytes
    return measure_step(fn, device="cpu").device_peak_bytes - base_bytes  # type: ignore[arg-type]


def ones(megabytes: int) -> torch.Tensor:
    return torch.ones(megabytes * MB, dtype=torch.uint8)


def test_the_peak_of_slabs_is_measured() -> None:
    def step() -> None:
        first = ones(40)
        second = first + 1
        del first
        third = second * 2
        del second, third
        ones(70)

    assert measured_beyond_base(step) == pytest.approx(80 * MB, rel=0.01)


def test_memory_allocated_before_the_measurement_counts() -> None:
    empty_bytes = measure_step(lambda: None, device="cpu").device_peak_bytes
    held = ones(50)
    views = (held[:10], held.view(2, -1), held.view(torch.int8))
    record = measure_step(lambda: ones(20), device="cpu")
    assert record.device_peak_bytes - empty_bytes == pytest.approx(70 * MB, rel=0.01)
    assert len(views) == 3


def test_memory_held_before_and_freed_in_the_step_is_subtracted() -> None:
    """30 die, then 40 are allocated: 40, not 70. A view keeps 20 alive while 5 are allocated: 60 + 5."""
    held = {"first": ones(30), "second": ones(20)}

    def replace() -> None:
        del held["first"]
        held["first"] = ones(40)

    def replace_with_a_view_left() -> None:
        view = held.pop("second")[:7]
        ones(5)
        del view
        held["second"] = ones(20)

    assert measured_beyond_base(replace) == pytest.approx(10 * MB, rel=0.01)
    assert measured_beyond_base(replace_with_a_view_left) == pytest.approx(5 * MB, rel=0.01)


def test_an_earlier_measurements_block_is_freed_only_once() -> None:
    held: list[torch.Tensor] = []
    measure_step(lambda: held.append(ones(30)), device="cpu")

    def replace() -> None:
        held.clear()
        held.append(ones(20))
        ones(25)

    assert measured_beyond_base(replace) == pytest.approx(15 * MB, rel=0.01)


def test_gradients_held_only_by_parameters_count_in_the_peak() -> None:
    weight = torch.nn.Parameter(torch.ones(5 * MB))
    bare_bytes = Resident().nbytes
    weight.sum().backward()
    assert Resident().nbytes - bare_bytes == 20 * MB


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(factor)
        result = torch.empty_like(x)
        result[..., :2], result[..., 2:] = x[..., :2] * factor, x[..., 2:]
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (factor,) = ctx.saved_tensors
        return torch.cat([grads[0][..., :2] * factor, grads[0][..., 2:]], -1), None


def functional() -> object:
    return torch._to_functional_tensor(torch.ones(MB))


def batched() -> object:
    kept: list[torch.Tensor] = []
    torch.vmap(lambda row: kept.append(row) or row.sum())(torch.ones(2, MB // 8))
    return kept


def fake() -> object:
    with FakeTensorMode():
        return torch.ones(MB), torch.nn.Parameter(torch.ones(MB))


def failed() -> object:
    def refuse(_: Any, __: Any) -> Any:
        raise RuntimeError("no")

    step = torch.compile(lambda x: x.sin() * 2, backend=aot_autograd(fw_compiler=refuse))
    with pytest.raises(Exception, match="no") as kept:
        step(torch.randn(4, 4, requires_grad=True))
    return kept


def custom() -> object:
    layer = torch.nn.Linear(4, 4)
    step = torch.compile(lambda x, factor: Doubled.apply(layer(x), factor).sum(), backend="aot_eager")
    step(torch.randn(3, 4), torch.ones(3, 2)).backward()
    return step, layer


@pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated")  # Dynamo does
@pytest.mark.parametrize("make", [functional, batched, fake, failed, custom], ids=lambda make: make.__name__)
def test_tensors_without_memory_that_a_capture_leaves_count_nothing(make: Callable[[], object]) -> None:
    torch._dynamo.reset()
    kept = make()
    assert measured_beyond_base(lambda: ones(20)) == pytest.approx(20 * MB, rel=0.01)
    del kept


def test_slabs_are_host_memory() -> None:
    slab = Slab(8 * MB, pin=False)
    tensor = slab.tensor(torch.uint8, (8 * MB,), 0)
    record = measure_step(lambda: Slab(4 * MB, pin=False), device="cpu")
    with_bytes = record.device_peak_bytes
    slab_bytes = slab.nbytes
    del slab, tensor
    without = measure_step(lambda: None, device="cpu")
    assert with_bytes == pytest.approx(without.device_peak_bytes, abs=0.1 * MB)
    assert record.host_peak_bytes - without.host_peak_bytes == pytest.approx(slab_bytes + 4 * MB, abs=8192)


def test_buffers_of_inductor_count() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return (x @ x).relu() @ x

    x = torch.ones(1024, 1024)
    compiled = torch.compile(forward)
    compiled(x)
    assert measured_beyond_base(lambda: compiled(x)) == pytest.approx(2 * 4 * 1024 * 1024, rel=0.01)


def test_a_training_step_counts_gradients_and_state() -> None:
    """Weights 4 MB; the first step adds gradients 4 MB and two moments 8 MB; the update in place."""
    weight = torch.nn.Parameter(torch.ones(1 * MB))
    optimizer = torch.optim.AdamW([weight], fused=True)

    def step() -> None:
        weight.sum().backward()
        optimizer.step()

    assert measured_beyond_base(step) == pytest.approx(12 * MB, rel=0.01)


def test_an_exception_passes_and_everything_is_restored() -> None:
    ledger = Ledger(lanes_for(torch.device("cpu")))

    def fail() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        measure_step(fail, device="cpu")
    assert not ledger._recordings
    assert measured_beyond_base(lambda: ones(10)) == pytest.approx(10 * MB, rel=0.01)


def test_a_measurement_inside_a_measurement_is_refused() -> None:
    with pytest.raises(NestedMeasurement, match="one step at a time"):
        measure_step(lambda: measure_step(lambda: None, device="cpu"), device="cpu")
    assert isinstance(measure_step(lambda: None, device="cpu"), Record)


def test_counts_are_those_of_the_step() -> None:
    old = Ledger(lanes_for(torch.device("cpu")))
    made: list[Ledger] = []

    def act(ledger: Ledger, label: str) -> None:
        with ledger.span(Lane.H2D, label):
            pass

    def step() -> None:
        act(old, "gather b0")
        act(old, "release b0")
        made.append(Ledger(lanes_for(torch.device("cpu"))))
        act(made[0], "gather b1")

    act(old, "gather b0")
    act(old, "offload b0.grad")
    record = measure_step(step, device="cpu")
    assert record.counts == {"gather": 2, "release": 1}
    assert [span.label for span in record.spans] == ["gather b0", "release b0"]
    assert all(0 <= span.start_s <= span.end_s for span in record.spans)
    assert record.origin is Origin.MEASURED


def test_two_threads_cannot_measure_at_once() -> None:
    refused: list[BaseException] = []

    def other() -> None:
        try:
            measure_step(lambda: None, device="cpu")
        except NestedMeasurement as error:
            refused.append(error)

    def step() -> None:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    measure_step(step, device="cpu")
    assert len(refused) == 1


@pytest.mark.parametrize(
    ("freed", "allocations", "expected_bytes"),
    [
        ([], [(1, 7, 30), (2, 7, -30), (3, 8, 40)], 140),
        ([(2, 1)], [(3, 7, 30)], 100),  # dies first: 100 - 100 + 30
        ([(4, 1)], [(3, 7, 30)], 130),  # dies after
        ([(2, 1)], [(1, 1, -100), (3, 7, 30)], 100),  # told twice, given back once
        ([], [(1, 1, -999), (3, 7, 130)], 130),  # stale size of an earlier profiler
        ([], [(1, 99, -50), (3, 7, 30)], 130),  # a block nobody knew
        ([(5, 1)], [(3, 1, 60), (4, 2, 50)], 110),  # its address was handed out again before its death was told
    ],
)
def test_peak_bytes(freed: list[tuple[int, int]], allocations: list[tuple[int, int, int]], expected_bytes: int) -> None:
    """One block of 100 bytes at address 1 is there before."""
    assert peak_bytes({1: 100}, freed, allocations) == expected_bytes


@pytest.mark.gpu
@pytest.mark.cuda
def test_cuda_peak_is_the_allocators() -> None:
    held = torch.ones(10 * MB, device="cuda")

    def step() -> None:
        first = torch.ones(20 * MB, device="cuda")
        del first
        torch.ones(5 * MB, device="cuda")

    record = measure_step(step)
    base_bytes = torch.cuda.memory_allocated()
    assert record.device_peak_bytes - base_bytes == pytest.approx(80 * MB, rel=0.05)
    assert held.numel() == 10 * MB


def test_a_measured_step_that_another_thread_ends_leaves_no_profiler_on() -> None:
    """A model, and with it the measurement of its step, may end wherever the garbage collector runs."""
    step_bytes.drop_running_step_bytes()  # of a model of another test
    running = step_bytes.start_step_bytes(torch.device("cpu"), (), 0)
    assert running is not None
    found: list[object] = []

    def other_thread() -> None:
        found.append(running.stop())
        found.append(step_bytes.drop_running_step_bytes())
        found.append(step_bytes.start_step_bytes(torch.device("cpu"), (), 0))
        with pytest.raises(NestedMeasurement, match="another thread"):
            measure_step(lambda: None, device="cpu")

    thread = threading.Thread(target=other_thread)
    thread.start()
    thread.join()
    assert found == [{}, False, None]
    assert measured_beyond_base(lambda: ones(20)) == pytest.approx(20 * MB, rel=0.01)


def test_a_measured_step_that_ends_in_a_backward_pass_leaves_no_profiler_on() -> None:
    step_bytes.drop_running_step_bytes()  # of a model of another test
    running = step_bytes.start_step_bytes(torch.device("cpu"), (), 0)
    assert running is not None
    param = torch.ones(3, requires_grad=True)
    found: list[object] = []
    param.register_post_accumulate_grad_hook(
        lambda _: found.extend((running.stop(), step_bytes.start_step_bytes(torch.device("cpu"), (), 0)))
    )
    param.sum().backward()
    assert found == [{}, None]
    assert compat.is_profiling()
    step_bytes.end_idle_profiler()
    assert not compat.is_profiling()
    assert measured_beyond_base(lambda: ones(20)) == pytest.approx(20 * MB, rel=0.01)


def test_a_measured_step_ends_with_the_thread_that_began_it() -> None:
    step_bytes.drop_running_step_bytes()  # of a model of another test
    thread = threading.Thread(target=step_bytes.start_step_bytes, args=(torch.device("cpu"), (), 0))
    thread.start()
    thread.join()
    assert measured_beyond_base(lambda: ones(20)) == pytest.approx(20 * MB, rel=0.01)


# ----------------------------------------------------------------------------------------------------------------------
# Regions are timed before the plan is made: equal ones once, a second start not at all, and training is the same.


PLAIN = {"planner": "greedy", "plan_cache": False}


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ELIXIR_CACHE_DIR", str(tmp_path))
    return tmp_path / "profiles"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let a region take a millisecond per op; return the names of those that were run."""
    run: list[str] = []
    real = profiling.measure_region

    def measure(region, compiled, device, sizes) -> RegionTime:
        run.append(region.id)
        took = real(region, compiled, device, sizes)
        return RegionTime(run_s=1e-3 * compiled.num_ops, peak_bytes=took.peak_bytes)

    monkeypatch.setattr(profiling, "measure_region", measure)
    return run


def profiled(model: nn.Module, batch: object, **options: object) -> Compilation:
    run = by_elixir(model, profile_regions=True, **{**PLAIN, **options}).train([batch])
    (record,) = elixir.compilations(run.model)
    return record


@pytest.mark.usefixtures("empty_cache")
def test_equal_regions_are_run_once_and_share_their_figures(clock: list[str]) -> None:
    profile = profiled(seeded(Stack), vectors(1)[0]).profile
    keys = [region.key for region in profile.regions]
    assert len(keys) == profile.num_regions > len(set(keys)) == len(clock) == profile.num_run
    assert len({(region.key, region.run_s, region.peak_bytes) for region in profile.regions}) == len(clock)
    assert max(map(keys.count, keys)) >= 4, "four equal blocks"


@pytest.mark.usefixtures("empty_cache")
def test_the_stretches_cover_the_step_and_are_its_price(clock: list[str]) -> None:
    record = profiled(seeded(ShortStack), vectors(1)[0])
    index = {op.id: i for i, op in enumerate(record.graph.ops)}
    stretches = record.profile.measured.stretches
    covered = [i for piece in stretches for i in range(index[piece.first], index[piece.last] + 1)]
    assert covered == [i for i, op in enumerate(record.graph.ops) if op.phase is not Phase.UPDATE]
    compute_s = sum(piece.run_s for piece in stretches)
    assert compute_s <= record.plan.prediction.step_s <= 1.5 * compute_s


@pytest.mark.usefixtures("empty_cache")
def test_the_bytes_of_a_region_are_those_of_the_graph(clock: list[str]) -> None:
    for region in profiled(seeded(ShortStack), vectors(1)[0]).profile.regions:
        # The allocator rounds each tensor up to 16 or 64 bytes; eager kernels take nothing else for themselves.
        assert region.live_bytes <= region.peak_bytes <= region.live_bytes + 4096


@pytest.mark.usefixtures("empty_cache")
def test_a_region_that_reads_a_seed_on_the_host_is_not_run(clock: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    everything = profiled(seeded(ShortStack), vectors(1)[0]).profile
    monkeypatch.setenv("ELIXIR_CACHE_DIR", str(Path(folders.cache_dir()) / "again"))
    clock.clear()
    gelu = torch.ops.aten.gelu_backward.default
    monkeypatch.setattr(profiling, "reads_seed_on_host", lambda node: node.target is gelu)
    rest = profiled(seeded(ShortStack), vectors(1)[0]).profile
    assert rest.num_regions == everything.num_regions
    assert 0 < len(rest.regions) < len(everything.regions)
    assert not any("gelu_backward" in region.first for region in rest.regions)
    assert everything.num_skipped == 0
    assert rest.num_skipped == len(everything.regions) - len(rest.regions)
    assert f", {rest.num_skipped} not run, as their dropout in attention reads its seed on the host" in str(rest)
    assert "not run" not in str(everything)


@pytest.mark.usefixtures("empty_cache")
def test_attention_with_dropout_reads_its_seed_on_the_host_and_without_it_does_not() -> None:
    graph = torch.fx.Graph()
    inputs = [graph.placeholder(f"input_{n}") for n in range(9)]
    attention = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
    mask = [True, True, True, False]
    with_dropout = graph.call_function(attention, (*inputs, 0.1, mask))
    without = graph.call_function(attention, (*inputs, 0.0, mask))
    assert reads_seed_on_host(with_dropout)
    assert not reads_seed_on_host(without)
    assert not reads_seed_on_host(inputs[0])


@pytest.mark.usefixtures("empty_cache")
def test_what_a_region_allocates_beside_its_tensors_is_not_free_for_plans(
    clock: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = profiled(seeded(ShortStack), vectors(1)[0]).plan.base_bytes
    torch._dynamo.reset()
    measure = profiling.measure_region

    def with_workspace(region, compiled, device, sizes) -> RegionTime:
        took = measure(region, compiled, device, sizes)
        return RegionTime(run_s=took.run_s, peak_bytes=took.peak_bytes + (3 << 20 if compiled.num_ops > 3 else 1 << 20))

    monkeypatch.setattr(profiling, "measure_region", with_workspace)
    monkeypatch.setenv("ELIXIR_CACHE_DIR", str(Path(folders.cache_dir()) / "again"))
    record = profiled(seeded(ShortStack), vectors(1)[0])
    assert 3 << 20 <= record.profile.workspace_bytes < (3 << 20) + 4096
    assert record.plan.base_bytes - before == record.profile.workspace_bytes


@pytest.mark.usefixtures("empty_cache")
def test_a_second_start_measures_nothing(clock: list[str], caplog: pytest.LogCaptureFixture, empty_cache: Path) -> None:
    caplog.set_level(logging.INFO, logger="elixir_compile")
    first = profiled(seeded(ShortStack), vectors(1)[0], report=True)
    num_run = len(clock)
    assert len(list(empty_cache.iterdir())) == num_run
    again = profiled(seeded(ShortStack), vectors(1)[0])
    assert len(clock) == num_run
    assert again.profile.regions == first.profile.regions
    assert again.plan.prediction == first.plan.prediction
    (line,) = [line for line in caplog.messages if line.startswith("profiled ")]
    assert line.startswith(f"profiled {num_run} distinct regions of {first.profile.num_regions} in ")
    assert f"{num_run} of them in an earlier run" in str(again.profile)


@pytest.mark.usefixtures("empty_cache")
def test_a_broken_file_is_measured_again(clock: list[str], empty_cache: Path) -> None:
    first = profiled(seeded(ShortStack), vectors(1)[0])
    num_run = len(clock)
    texts = [
        '{"run_s": 0.1',
        '{"seconds": 1}',
        "[" * 100_000,
        '{"run_s": 1e400, "peak_bytes": null}',
        f'{{"run_s": {10**400}, "peak_bytes": 1}}',
        '{"run_s": true, "peak_bytes": null}',
        f'{{"run_s": 0.1, "peak_bytes": {10**400}}}',
        '{"run_s": 0.1, "peak_bytes": "1"}',
    ]
    # What is no whole text of a region, and what no region takes; a few at a time, as the model has few regions.
    files = sorted(empty_cache.iterdir())
    for start in range(0, len(texts), len(files)):
        spoilt = list(zip(files, texts[start:], strict=False))
        for path, text in spoilt:
            path.write_text(text)
        before = len(clock)
        again = profiled(seeded(ShortStack), vectors(1)[0])
        assert len(clock) == before + len(spoilt)
        assert again.profile.regions == first.profile.regions
    assert len(clock) == num_run + len(texts)


@pytest.mark.usefixtures("empty_cache")
def test_behind_the_time_limit_the_rest_keeps_its_price(clock: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "LIMIT_S", 0.0)
    record = profiled(seeded(ShortStack), vectors(1)[0])
    assert clock == []
    assert record.profile.measured.stretches == ()
    assert record.plan.prediction.step_s > 0


@pytest.mark.usefixtures("empty_cache")
def test_training_is_the_same_with_a_profile() -> None:
    model, batches = seeded(WithDropout), tokens(3)
    tight = int(1.05 * least_bytes(model, batches[0], **PLAIN))
    with_profile = by_elixir(model, profile_regions=True, device_memory=tight, **PLAIN)
    without = by_elixir(model, device_memory=tight, **PLAIN)
    torch.manual_seed(3)
    with_profile.train(batches)
    torch.manual_seed(3)
    assert_same(without.train(batches), with_profile)


class WithDropout(nn.Module):
    """Indices, random numbers, and a buffer that is written."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, 32)
        self.norm = nn.BatchNorm1d(32)
        self.head = nn.Linear(32, 128)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embed(ids).flatten(0, 1))
        return self.head(nn.functional.dropout(x, 0.5)).square().mean()


class Head(nn.Module):
    """One layer: two or three regions."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x).square().mean()


@pytest.mark.usefixtures("empty_cache")
def test_regions_of_inductor_are_timed() -> None:
    profile = profiled(seeded(Head), vectors(1, width=32)[0], inner="inductor").profile
    assert profile.num_run > 0
    assert all(region.run_s > 0 and region.peak_bytes > 0 for region in profile.regions)


@pytest.mark.usefixtures("empty_cache")
def test_bytes_are_unknown_while_somebody_profiles(monkeypatch: pytest.MonkeyPatch) -> None:
    real = profiling.measure_region

    def measure(*args) -> RegionTime:  # a profile of the whole capture takes 7 s to end
        # Without `acc_events` torch 2.11 warns of events that are dropped between cycles.
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True):
            return real(*args)

    monkeypatch.setattr(profiling, "measure_region", measure)
    profile = profiled(seeded(Head), vectors(1, width=32)[0]).profile
    assert all(region.run_s > 0 and region.peak_bytes is None for region in profile.regions)


@pytest.mark.usefixtures("empty_cache")
def test_bytes_made_in_a_region_by_hand() -> None:
    """a (10 bytes) is made by op 0 and read by op 2; b (7) lives in op 1, c (5) from op 2 on; p is a parameter.

    ops 0..1 make a and b at once: 17. ops 1..2 make b (7), then c (5): 7. op 2 makes c: 5.
    """

    def storage(name: str, nbytes: int, kind: Kind = Kind.TEMP) -> Storage:
        return Storage(id=StorageId(name), nbytes=nbytes, kind=kind, dtype="float32")

    def op(name: str, reads: str, writes: str) -> Op:
        return Op(
            id=OpId(name),
            target="t",
            phase=Phase.FORWARD,
            reads=tuple(map(StorageId, reads.split())),
            writes=tuple(map(StorageId, writes.split())),
        )

    graph = StepGraph(
        name="g",
        ops=(op("0", "p", "a"), op("1", "a", "b"), op("2", "a p", "c")),
        storages=(storage("p", 100, Kind.PARAM), storage("a", 10), storage("b", 7), storage("c", 5)),
    )

    def made(first: str, last: str) -> int:
        span = Region(id=RegionId("r"), phase=Phase.FORWARD, first=OpId(first), last=OpId(last), buckets=())
        return made_bytes(graph, span)

    assert [made("0", "1"), made("1", "2"), made("2", "2")] == [17, 7, 5]
