"""Whose masters are whose: what happens to them when optimizers, dtypes and gradients come and go."""

import gc

import pytest
import torch
from torch import nn

import elixir_compile as elixir
from elixir_compile import HybridAdamW
from elixir_compile.graph.ops.optimizers import has_master
from elixir_compile.ir import Update
from elixir_compile.optim.adamw_rule import AdamWRule
from elixir_compile.optim.hybrid import Hybrid
from elixir_compile.optim.rule import ParamUpdate
from tests.run.training import assert_same_tensors
from tests.run.updating import WIDTH, ladder, placed, rows, small_buckets


class Wide(nn.Module):
    """One linear layer, which Elixir prepares and nobody compiles."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)).square().mean()


def wide(dtype: str | None = "bfloat16") -> nn.Module:
    torch.manual_seed(2)
    return elixir.prepare(Wide(), param_dtype=dtype)


def backward(model: nn.Module, scale: float = 1.0) -> None:
    """Give every parameter a gradient."""
    (scale * model(rows(1)[0].to(next(model.parameters()).dtype))).backward()


def copies(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def masters(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {str(key): entry["master"] for key, entry in optimizer.state_dict()["state"].items()}


def test_the_clip_of_a_skipped_step_does_not_reach_the_next() -> None:
    found = []
    for skips in (False, True):
        model = wide()
        optimizer = HybridAdamW(model.parameters(), lr=1e-2)
        if skips:
            backward(model, float("inf"))
            assert not torch.isfinite(optimizer.clip_grad_norm_(1e-3))
            model.zero_grad()  # the loop drops the gradients, and the optimizer is not told
        backward(model)
        norm = optimizer.clip_grad_norm_(1e-3)
        optimizer.step()
        found.append(copies(model) | masters(optimizer) | {"norm": norm})
    assert_same_tensors(*found)


def test_two_clips_of_one_gradient_both_count() -> None:
    model = wide()
    optimizer = HybridAdamW(model.parameters(), lr=1e-2)
    backward(model)
    first, second = optimizer.clip_grad_norm_(1e-2), optimizer.clip_grad_norm_(1e-3)
    assert first > 1e-2
    assert float(second) == pytest.approx(1e-2, rel=1e-4)
    optimizer.step()
    assert not torch.equal(masters(optimizer)["0"], wide().linear.weight.detach().float())


@pytest.mark.parametrize("update", list(Update))
def test_a_hybrid_class_without_masters_is_refused_each_time(update: Update) -> None:
    model = elixir.prepare(ladder(), param_dtype="bfloat16")
    before, batch = copies(model), rows(1)[0].bfloat16()
    optimizer = elixir.hybrid(torch.optim.SGD)(model.parameters(), lr=0.1, momentum=0.9)
    with small_buckets(lambda plan: placed(plan, "split", 0.0, update)):
        compiled = torch.compile(model, backend="elixir", options={"inner": "aot_eager", "report": False})
        for _ in range(2):
            compiled(batch).backward()
            with pytest.raises(elixir.MasterIgnored, match=r"steps\.0.* HybridSGD does not"):
                optimizer.step()
            optimizer.zero_grad()
    assert_same_tensors(before, copies(model))
    assert isinstance(optimizer, Hybrid)
    assert not optimizer.state


def test_the_newest_living_optimizer_keeps_the_masters() -> None:
    model = wide()
    first = HybridAdamW(model.parameters())
    last = HybridAdamW(model.parameters())
    before = copies(model)
    backward(model)
    with pytest.raises(elixir.MasterIgnored, match="which another optimizer keeps, made after this HybridAdamW"):
        first.step()
    assert_same_tensors(before, copies(model))
    del last
    gc.collect()
    first.step()
    assert not torch.equal(before["linear.weight"], model.linear.weight)


def test_a_parameter_that_is_cast_back_has_no_master() -> None:
    model, plain = wide(), wide(None)
    optimizer = HybridAdamW(model.parameters())
    model.float()
    plain.load_state_dict(model.state_dict())
    assert not any(map(has_master, model.parameters()))
    expected = torch.optim.AdamW(plain.parameters(), lr=1e-3, fused=True)
    for each, own in ((model, optimizer), (plain, expected)):
        backward(each)
        own.step()
    assert_same_tensors(copies(plain), copies(model))


def test_state_made_before_the_cast_gets_the_master() -> None:
    model = Wide()
    optimizer = HybridAdamW(model.parameters())
    backward(model)
    with pytest.warns(elixir.NoGraphCaptured):
        optimizer.step()
    optimizer.zero_grad()
    weights = copies(model)
    elixir.prepare(model, param_dtype="bfloat16")
    optimizer.param_groups[0]["lr"] = 0.0
    backward(model)
    optimizer.step()
    assert_same_tensors(weights, dict(zip(weights, masters(optimizer).values(), strict=True)))
    assert [entry["step"].item() for entry in optimizer.state.values()] == [2, 2]


def test_a_rank_with_an_empty_shard_counts_steps() -> None:
    empty = torch.empty(0, 4, dtype=torch.bfloat16)
    state = {"step": torch.tensor(0.0), "exp_avg": empty.float(), "exp_avg_sq": empty.float()}
    state["master_low"] = torch.empty(0, 4, dtype=torch.int16)
    group = HybridAdamW([nn.Parameter(torch.ones(1))]).param_groups[0]
    AdamWRule().update([ParamUpdate(empty, empty.clone(), state)], group)
    assert state["step"] == 1.0
