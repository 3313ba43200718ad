"""What torch's allocator holds keeps the budget too, on the genuine allocator over memory with a capacity."""

import gc
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import elixir_compile as elixir
from elixir_compile.base.units import MIB
from elixir_compile.compat.platforms import platform_of
from elixir_compile.session.allocator_gaps import SEGMENT_BYTES, AllocatorGaps
from elixir_compile.session.machine import library_bytes
from tests.cuda_standin import device as standin
from tests.cuda_standin.fragmentation import WORDS, layers_of_many_widths, llama
from tests.gpu.accelerator import gpt2
from tests.run.training import fused_adamw, hybrid_adamw

DEVICE = torch.device("cuda", 0)
OPTIONS: dict[str, Any] = {
    "inner": "aot_eager", "plan_cache": False, "report": False, "search_timeout": 1, "micro_batches": 1,
}  # fmt: skip
NUM_STEPS, NUM_FIRST = 16, 12
"""Steps of a run, and its first, in which plans change."""


def _texts(rows: int) -> Callable[[], Iterator[Any]]:
    def batches() -> Iterator[Any]:
        generator = torch.Generator().manual_seed(0)
        while True:
            ids = torch.randint(0, WORDS, (rows, 128), generator=generator).to(DEVICE)
            yield {"input_ids": ids, "labels": ids}

    return batches


def _rows() -> Iterator[Any]:
    generator = torch.Generator().manual_seed(0)
    while True:
        yield {"input": torch.randn(1 << 16, 24, generator=generator).to(DEVICE)}


MODELS: Mapping[str, tuple[Callable[[], nn.Module], Callable[[], Iterator[Any]]]] = {
    "GPT-2": (lambda: gpt2(3, 128, WORDS), _texts(32)),
    "GPT-2, 64 texts": (lambda: gpt2(3, 128, WORDS), _texts(64)),
    "Llama": (lambda: llama(3, 128), _texts(16)),
    "mixed": (layers_of_many_widths, _rows),
}


@dataclass
class Steps:
    """The losses of a run, the most bytes that the allocator held in each step, and how often it lacked room."""

    losses: list[float] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    retries: list[int] = field(default_factory=list)

    def train(self, compiled: Any, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        torch.cuda.reset_peak_memory_stats()
        result = compiled(**batch)
        loss = result.loss if hasattr(result, "loss") else result.square().mean()
        del result
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        self.losses.append(loss.item())
        self.held.append(torch.cuda.max_memory_reserved())
        self.retries.append(torch.cuda.memory_stats()["num_alloc_retries"])

    @property
    def later_bytes(self) -> int:
        """The most bytes that the allocator held behind the first steps."""
        return max(self.held[NUM_FIRST:])


def empty_device() -> None:
    torch.compiler.reset()
    gc.collect()
    platform_of(DEVICE).drop_workspaces()
    torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def _empty_device() -> None:
    empty_device()


def run(name: str, budget_bytes: int | None, *, num_steps: int = NUM_STEPS) -> tuple[nn.Module, Steps]:
    """Return the trained model, and what its steps showed."""
    make, batches = MODELS[name]
    model = elixir.prepare(make(), device="cuda")
    compiled = torch.compile(model, backend="elixir", options={**OPTIONS, "device_memory": budget_bytes})
    optimizer, found = hybrid_adamw(model.parameters()), Steps()
    for batch in itertools.islice(batches(), num_steps):
        found.train(compiled, optimizer, batch)
    return model, found


@cache
def losses_by_torch(name: str) -> tuple[float, ...]:
    make, batches = MODELS[name]
    model, found = make().to(DEVICE), Steps()
    compiled, optimizer = torch.compile(model, backend="aot_eager"), fused_adamw(model.parameters())
    for batch in itertools.islice(batches(), NUM_STEPS):
        found.train(compiled, optimizer, batch)
    return tuple(found.losses)


@cache
def full_bytes(name: str) -> int:
    """The peak of the plan that keeps everything."""
    model, _ = run(name, None, num_steps=1)
    return elixir.compilations(model)[-1].plan.prediction.device_peak_bytes


def budget_of(name: str, share: float) -> int:
    """Return the budget that is `share` of what the model takes beside the workspaces of libraries."""
    outside_bytes = library_bytes(DEVICE)
    found = outside_bytes + int(share * (full_bytes(name) - outside_bytes))
    empty_device()
    return found


CASES = [(name, share) for name in MODELS for share in (0.6, 0.7)]


@pytest.mark.parametrize(("name", "share"), CASES)
def test_what_the_allocator_holds_keeps_the_budget(name: str, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    budget_bytes, expected = budget_of(name, share), losses_by_torch(name)
    most_bytes = budget_bytes + SEGMENT_BYTES
    empty_device()
    _, found = run(name, budget_bytes)
    assert tuple(found.losses) == expected
    assert found.later_bytes <= most_bytes
    empty_device()
    monkeypatch.setattr(AllocatorGaps, "is_watching", False)
    _, without = run(name, budget_bytes)
    assert tuple(without.losses) == expected
    if (name, share) != ("Llama", 0.7):  # 178.0 of 178.8 MiB, or more, by where its search ends
        assert without.later_bytes > most_bytes, "no gaps to plan for"


def test_steps_for_which_the_allocator_frees_its_cache_are_planned_again(caplog: pytest.LogCaptureFixture) -> None:
    """The device has more memory than tensors need: gaps make the allocator free its cache in each step."""
    budget_bytes = budget_of("GPT-2", 0.7)
    with standin.capacity(budget_bytes + 48 * MIB):
        _, found = run("GPT-2", budget_bytes)
    before = found.retries[0]
    assert before < found.retries[1] < found.retries[2], "the device is not full"
    assert found.retries[NUM_FIRST - 1] == found.retries[-1]
    assert any("had to free memory in mid-step" in said and "for gaps" in said for said in caplog.messages)
    assert tuple(found.losses) == losses_by_torch("GPT-2")


def test_models_in_turn_keep_the_budget_together(caplog: pytest.LogCaptureFixture) -> None:
    budget_bytes = budget_of("mixed", 0.7)
    runs = []
    for name in ("mixed", "Llama"):
        make, batches = MODELS[name]
        model = elixir.prepare(make(), device="cuda")
        compiled = torch.compile(model, backend="elixir", options={**OPTIONS, "device_memory": budget_bytes})
        runs.append((name, compiled, hybrid_adamw(model.parameters()), batches(), Steps()))
    for _ in range(NUM_STEPS):
        for _, compiled, optimizer, batches, found in runs:
            found.train(compiled, optimizer, next(batches))
    del compiled, model
    assert any("for gaps" in said for said in caplog.messages)
    for name, *_, found in runs:
        assert tuple(found.losses) == losses_by_torch(name)
        assert found.later_bytes <= budget_bytes + SEGMENT_BYTES
