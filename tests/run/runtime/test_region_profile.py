"""Regions are timed before the plan is made: equal ones once, a second start not at all, and training is the same."""

import logging
from pathlib import Path

import pytest
import torch
from models import Stack, seeded, tokens, vectors
from torch import nn
from training import assert_same, by_elixir, least_bytes

import elixir_compile as elixir
from elixir_compile.base import folders
from elixir_compile.graph.capture.node_facts import reads_seed_on_host
from elixir_compile.ir import Kind, Op, OpId, Phase, Region, RegionId, StepGraph, Storage, StorageId
from elixir_compile.runtime.measure import RegionTime
from elixir_compile.session import machine as profiling
from elixir_compile.session.machine import made_bytes
from elixir_compile.session.model import Compilation

PLAIN = {"planner": "greedy", "plan_cache": False}


@pytest.fixture(autouse=True)
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


def test_equal_regions_are_run_once_and_share_their_figures(clock: list[str]) -> None:
    profile = profiled(seeded(Stack), vectors(1)[0]).profile
    keys = [region.key for region in profile.regions]
    assert len(keys) == profile.num_regions > len(set(keys)) == len(clock) == profile.num_run
    assert len({(region.key, region.run_s, region.peak_bytes) for region in profile.regions}) == len(clock)
    assert max(map(keys.count, keys)) >= 4, "four equal blocks"


def test_the_stretches_cover_the_step_and_are_its_price(clock: list[str]) -> None:
    record = profiled(seeded(Stack), vectors(1)[0])
    index = {op.id: i for i, op in enumerate(record.graph.ops)}
    stretches = record.profile.measured.stretches
    covered = [i for piece in stretches for i in range(index[piece.first], index[piece.last] + 1)]
    assert covered == [i for i, op in enumerate(record.graph.ops) if op.phase is not Phase.UPDATE]
    compute_s = sum(piece.run_s for piece in stretches)
    assert compute_s <= record.plan.prediction.step_s <= 1.5 * compute_s


def test_the_bytes_of_a_region_are_those_of_the_graph(clock: list[str]) -> None:
    for region in profiled(seeded(Stack), vectors(1)[0]).profile.regions:
        # The allocator rounds each tensor up to 16 or 64 bytes; eager kernels take nothing else for themselves.
        assert region.live_bytes <= region.peak_bytes <= region.live_bytes + 4096


def test_a_region_that_reads_a_seed_on_the_host_is_not_run(clock: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    everything = profiled(seeded(Stack), vectors(1)[0]).profile
    monkeypatch.setenv("ELIXIR_CACHE_DIR", str(Path(folders.cache_dir()) / "again"))
    clock.clear()
    gelu = torch.ops.aten.gelu_backward.default
    monkeypatch.setattr(profiling, "reads_seed_on_host", lambda node: node.target is gelu)
    rest = profiled(seeded(Stack), vectors(1)[0]).profile
    assert rest.num_regions == everything.num_regions
    assert 0 < len(rest.regions) < len(everything.regions)
    assert not any("gelu_backward" in region.first for region in rest.regions)
    assert everything.num_skipped == 0
    assert rest.num_skipped == len(everything.regions) - len(rest.regions)
    assert f", {rest.num_skipped} not run, as their dropout in attention reads its seed on the host" in str(rest)
    assert "not run" not in str(everything)


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


def test_what_a_region_allocates_beside_its_tensors_is_not_free_for_plans(
    clock: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = profiled(seeded(Stack), vectors(1)[0]).plan.base_bytes
    torch._dynamo.reset()
    measure = profiling.measure_region

    def with_workspace(region, compiled, device, sizes) -> RegionTime:
        took = measure(region, compiled, device, sizes)
        return RegionTime(run_s=took.run_s, peak_bytes=took.peak_bytes + (3 << 20 if compiled.num_ops > 3 else 1 << 20))

    monkeypatch.setattr(profiling, "measure_region", with_workspace)
    monkeypatch.setenv("ELIXIR_CACHE_DIR", str(Path(folders.cache_dir()) / "again"))
    record = profiled(seeded(Stack), vectors(1)[0])
    assert 3 << 20 <= record.profile.workspace_bytes < (3 << 20) + 4096
    assert record.plan.base_bytes - before == record.profile.workspace_bytes


def test_a_second_start_measures_nothing(clock: list[str], caplog: pytest.LogCaptureFixture, empty_cache: Path) -> None:
    caplog.set_level(logging.INFO, logger="elixir_compile")
    first = profiled(seeded(Stack), vectors(1)[0], report=True)
    num_run = len(clock)
    assert len(list(empty_cache.iterdir())) == num_run
    again = profiled(seeded(Stack), vectors(1)[0])
    assert len(clock) == num_run
    assert again.profile.regions == first.profile.regions
    assert again.plan.prediction == first.plan.prediction
    (line,) = [line for line in caplog.messages if line.startswith("profiled ")]
    assert line.startswith(f"profiled {num_run} distinct regions of {first.profile.num_regions} in ")
    assert f"{num_run} of them in an earlier run" in str(again.profile)


def test_a_broken_file_is_measured_again(clock: list[str], empty_cache: Path) -> None:
    first = profiled(seeded(Stack), vectors(1)[0])
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
        again = profiled(seeded(Stack), vectors(1)[0])
        assert len(clock) == before + len(spoilt)
        assert again.profile.regions == first.profile.regions
    assert len(clock) == num_run + len(texts)


def test_behind_the_time_limit_the_rest_keeps_its_price(clock: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "LIMIT_S", 0.0)
    record = profiled(seeded(Stack), vectors(1)[0])
    assert clock == []
    assert record.profile.measured.stretches == ()
    assert record.plan.prediction.step_s > 0


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


def test_regions_of_inductor_are_timed() -> None:
    profile = profiled(seeded(Head), vectors(1, width=32)[0], inner="inductor").profile
    assert profile.num_run > 0
    assert all(region.run_s > 0 and region.peak_bytes > 0 for region in profile.regions)


def test_bytes_are_unknown_while_somebody_profiles(monkeypatch: pytest.MonkeyPatch) -> None:
    real = profiling.measure_region

    def measure(*args) -> RegionTime:  # a profile of the whole capture takes 7 s to end
        # Without `acc_events` torch 2.11 warns of events that are dropped between cycles.
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True):
            return real(*args)

    monkeypatch.setattr(profiling, "measure_region", measure)
    profile = profiled(seeded(Head), vectors(1, width=32)[0]).profile
    assert all(region.run_s > 0 and region.peak_bytes is None for region in profile.regions)


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
