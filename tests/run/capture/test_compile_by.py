"""A step whose regions begin with layers computes what a step of two regions computes, and compiles few of them."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from elixir_compile.graph.capture.modules import model_of
from elixir_compile.ir import Plan
from elixir_compile.runtime.lowering import RegionCompiler
from tests.run.models import Stack, seeded, vectors
from tests.run.training import Run, assert_offloads, assert_same, by_elixir, by_torch, tight_bytes


def plan_of(run: Run) -> Plan:
    return model_of(run.model).compilations[0].plan


def num_compiled(run: Run) -> int:
    """Return how many different regions were compiled for `run`."""
    regions = model_of(run.model)._regions.values()
    return sum(len(compiler._compiled) for compiler in regions)


def test_compiling_by_layer_keeps_bits_and_compiles_equal_layers_once() -> None:
    model, batches = seeded(Stack, num_blocks=6), vectors(3)
    expected = by_torch(model).train(batches)
    whole = by_elixir(model).train(batches)
    assert_same(expected, whole)
    assert len(plan_of(whole).regions) == 2
    apart = by_elixir(model, compile_by="layer").train(batches)
    assert_same(expected, apart)
    assert len(plan_of(apart).regions) == 14
    assert num_compiled(apart) <= 7


def test_compiling_by_layer_under_a_budget_keeps_bits() -> None:
    model, batches = seeded(Stack, num_blocks=6), vectors(3)
    options = {"activations": "keep", "compile_by": "layer"}
    expected = by_torch(model).train(batches)
    got = by_elixir(model, device_memory=tight_bytes(model, batches[0], **options), **options).train(batches)
    assert_same(expected, got)
    assert_offloads(got)
    by_plan = by_elixir(model, device_memory=tight_bytes(model, batches[0], **options), activations="keep")
    assert num_compiled(got) < num_compiled(by_plan.train(batches[:1]))


@pytest.fixture
def regions(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Return a list that grows by the id of each region that Inductor compiles."""
    seen: list[str] = []
    usual = RegionCompiler._compile

    def compile_it(self: RegionCompiler, region: object, *args: object) -> object:
        seen.append(region.id)
        return usual(self, region, *args)

    monkeypatch.setattr(RegionCompiler, "_compile", compile_it)
    return seen


@pytest.mark.slow
def test_inductor_compiles_no_more_regions_for_more_layers(regions: list[str]) -> None:
    counts = []
    batches = vectors(2)
    for num_blocks in (6, 8):
        regions.clear()
        model = seeded(Stack, num_blocks=num_blocks)
        apart = by_elixir(model, inner="inductor").train(batches)
        counts.append(len(regions))
        assert len(plan_of(apart).regions) > num_blocks
    # The sums between blocks are written every few layers, so that the ends of six and of eight differ by one.
    assert max(counts) <= 10
    whole = by_elixir(model, inner="inductor", compile_by="plan").train(batches)
    for one, other in zip(apart.losses, whole.losses, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    for name, weight in whole.weights.items():
        torch.testing.assert_close(apart.weights[name], weight, rtol=1e-4, atol=1e-5, msg=name)


class Convolved(nn.Module):
    """Five residual blocks of convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(*(nn.Conv2d(4, 4, 3, padding=1) for _ in range(2))) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x).relu()
        return x.square().mean()


def test_convolutions_are_compiled_as_a_whole() -> None:
    run = by_elixir(seeded(Convolved), compile_by="layer").train([torch.randn(2, 4, 8, 8)])
    assert len(plan_of(run).regions) == 2
