"""With dynamic sizes, the backward takes the sizes of saved tensors as numbers: the tensors may be away."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import elixir_compile as elixir
from elixir_compile.ir import Saving
from tests.fx.handmade import CHOICES, layers_by_saving, planned
from tests.run.models import seeded, small_gpt2, small_llama, tokens
from tests.run.runtime.test_activations import two_forwards
from tests.run.training import Run, assert_same, by_elixir, by_torch, plain_step

LENGTHS = (9, 12, 5)


class Folded(nn.Module):
    """Products of matrices with batch and length as one dimension, as in GPT-2: the gradients get that dimension."""

    def __init__(self, num_layers: int = 3) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(8, 8) / 3) for _ in range(num_layers))
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            folded = functional.gelu(x).view(-1, x.shape[-1])
            x = x + torch.addmm(self.bias, folded, weight).view(*x.shape[:-1], 8)
        return x.square().mean()


class Strided(nn.Module):
    """Convolutions with strides: sizes of results that the forward does not compute as numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(8, 8, 3, stride=2), nn.Conv1d(8, 8, 2, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.gelu(self.first(x.transpose(1, 2)))
        x = functional.gelu(self.second(functional.pad(x, (1, 2))))
        return torch.cat([x, x.flip(-1)], -1).unfold(-1, 2, 1).softmax(-1).square().mean()


class Attending(nn.Module):
    """Attention over the length, with a mask made of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.outputs = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            batch, length, width = x.shape
            query, key, value = self.inputs(x).view(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
            mask = torch.ones(length, length, dtype=torch.bool).tril()
            mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
            x = x + self.outputs(mixed.transpose(1, 2).reshape(batch, length, width))
        return x.square().mean()


def vectors_of(lengths: Sequence[int] = LENGTHS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, length, 8, generator=generator) for length in lengths]


def words_of(lengths: Sequence[int] = LENGTHS) -> list[Mapping[str, torch.Tensor]]:
    found = [tokens(1, rows=4, length=length)[0] for length in lengths]
    return [{"input_ids": ids, "labels": ids} for ids in found]


CASES: Mapping[str, tuple[Callable[[], nn.Module], Callable[[], Sequence[Any]]]] = {
    "folded": (Folded, vectors_of),
    "strided": (Strided, vectors_of),
    "attending": (Attending, vectors_of),
    "gpt2": (functools.partial(small_gpt2, use_cache=False), words_of),
    "llama": (functools.partial(small_llama, tied=False), words_of),
}
SLOW = [
    (name, choice)
    for name in CASES
    for choice in CHOICES
    if (name, choice) not in {("folded", "offload"), ("folded", "mix"), ("strided", "offload")}
    and (name, choice) != ("attending", "pointwise")  # no op of it is pointwise and saved
]


def trained(name: str, **options: Any) -> tuple[Run, Run]:
    """Return the runs of a case by torch and by Elixir, with dynamic sizes."""
    make, batches = CASES[name]
    expected = by_torch(seeded(make)).train(batches())
    return expected, by_elixir(seeded(make), dynamic=True, **options).train(batches())


@pytest.mark.parametrize(
    ("name", "choice"),
    [
        ("folded", "offload"),
        ("folded", "mix"),
        ("strided", "offload"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
    ],
)
def test_training_at_several_lengths_is_that_of_torch(name: str, choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with planned(monkeypatch, CHOICES[choice]) as plans:
        expected, got = trained(name)
    assert_same(expected, got)
    assert set(layers_by_saving(plans[-1])) != {Saving.KEEP}


@pytest.mark.parametrize("options", [{"num_regions": 1}, {"waits_late": True}, {"num_regions": 6}], ids=str)
@pytest.mark.slow
def test_training_in_other_regions_is_that_of_torch(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with planned(monkeypatch, CHOICES["offload"], **options):
        expected, got = trained("folded")
    assert_same(expected, got)


@pytest.mark.slow
def test_two_forwards_before_their_backwards_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = vectors_of()
    expected = by_torch(seeded(Folded)).train(batches, two_forwards)
    with planned(monkeypatch, CHOICES["offload"]):
        got = by_elixir(seeded(Folded), dynamic=True).train(batches, two_forwards)
    assert_same(expected, got)


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [2, 4])
def test_micro_batches_at_several_lengths_are_within_rounding(
    micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with planned(monkeypatch, CHOICES["offload"]):
        expected, got = trained("folded", micro_batches=micro_batches)
    torch.testing.assert_close(got.losses, expected.losses)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_compiled_training_at_several_lengths_is_that_of_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with planned(monkeypatch, CHOICES["offload"]):
        expected, got = trained(name, inner="inductor")
    torch.testing.assert_close(got.losses, expected.losses)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.6, 0.8])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_shorter_steps_keep_the_budget(name: str, share: float) -> None:
    make, _ = CASES[name]
    free = by_elixir(seeded(make), dynamic=True, planner="keep_all").train(words_of((64,)))
    budget_bytes = int(share * max(r.plan.prediction.device_peak_bytes for r in elixir.compilations(free.model)))
    del free
    batches = words_of((64, 40, 56, 17))
    expected = by_torch(seeded(make)).train(batches)
    weights, losses = expected.weights, expected.losses
    del expected
    got = by_elixir(seeded(make), dynamic=True, device_memory=budget_bytes, plan_cache=False)
    for batch in batches:
        got.train([batch], plain_step)
        assert all(r.plan.prediction.device_peak_bytes <= budget_bytes for r in elixir.compilations(got.model))
    assert [float(loss) for loss in got.losses] == [float(loss) for loss in losses]
    assert all(torch.equal(weights[name], weight) for name, weight in got.weights.items())
