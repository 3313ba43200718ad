"""Kernels that Inductor times at their first run are timed in the memory that the plan leaves free.

Inductor writes a buffer as large as the device's cache between two runs of a kernel: with an H100's 50 MiB, the first
step of a GPT-2 took 159 MiB in a budget of 112.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor.runtime import benchmarking

import elixir_compile as elixir
from elixir_compile import compat
from elixir_compile.compat import compilers
from elixir_compile.runtime.lowering import CompiledRegion, RegionCompiler
from tests.run.models import Stack, seeded, vectors
from tests.run.training import by_elixir, tight_bytes

CACHE_BYTES = 50 << 20


@pytest.fixture
def benchmarker(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Inductor's benchmarker of a GPU, as far as its cache goes."""
    made = SimpleNamespace(L2_cache_size=CACHE_BYTES)
    monkeypatch.setattr(benchmarking, "benchmarker", made)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return made


@pytest.mark.parametrize(("room_bytes", "expected_bytes"), [(0, 0), (1 << 20, 1 << 20), (1 << 30, CACHE_BYTES)])
def test_the_cache_is_emptied_by_a_buffer_in_the_room(
    room_bytes: int, expected_bytes: int, benchmarker: SimpleNamespace
) -> None:
    def fail_within() -> None:
        with compat.timed_within(room_bytes):
            with compat.timed_within(CACHE_BYTES * 2):
                assert benchmarker.L2_cache_size == expected_bytes
            assert benchmarker.L2_cache_size == expected_bytes
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fail_within()
    assert benchmarker.L2_cache_size == CACHE_BYTES


def test_a_benchmarker_without_a_buffer_is_left_alone(benchmarker: SimpleNamespace) -> None:
    del benchmarker.L2_cache_size
    with compat.timed_within(0):
        assert not vars(benchmarker)


def test_a_region_is_timed_in_its_first_run_that_succeeds(benchmarker: SimpleNamespace) -> None:
    seen: list[int] = []

    def run(box: list[Any]) -> int:
        seen.append(benchmarker.L2_cache_size)
        return box.pop()

    region = CompiledRegion(run, 1, (), ())
    region.room_bytes = 7
    with pytest.raises(IndexError):
        region.run([])
    assert [region.run([1]), region.run([2])] == [1, 2]
    assert seen == [7, 7, CACHE_BYTES]


def test_a_capture_times_kernels_without_a_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor times padded products then, and no plan has left room."""
    limits: list[int] = []
    seen: list[tuple[int, ...]] = []

    @contextmanager
    def noted(nbytes: int) -> Iterator[None]:
        limits.append(nbytes)
        yield
        limits.pop()

    def lower(graph: torch.fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
        seen.append(tuple(limits))
        return graph

    monkeypatch.setattr(compilers, "timed_within", noted)
    compat.compile_with_inductor(torch.fx.symbolic_trace(torch.nn.ReLU()), [torch.ones(2)], lower, lower)
    assert (seen, limits) == ([(0,)], [])


def test_the_room_is_what_the_plan_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    rooms: set[int | None] = set()
    lower = RegionCompiler.lower

    def noted(self: RegionCompiler, *args: Any, room_bytes: int | None = None, **options: Any) -> CompiledRegion:
        rooms.add(room_bytes)
        return lower(self, *args, room_bytes=room_bytes, **options)

    monkeypatch.setattr(RegionCompiler, "lower", noted)
    budget = tight_bytes(seeded(Stack), vectors(1)[0])
    run = by_elixir(seeded(Stack), device_memory=budget, replan=False).train(vectors(1))
    plan = elixir.compilations(run.model)[0].plan
    assert plan is not None
    assert rooms == {budget - plan.prediction.device_peak_bytes}
