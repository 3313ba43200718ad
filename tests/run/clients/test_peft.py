"""LoRA adapters of peft train bit for bit as in eager code, and the frozen model stays on the host."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import elixir_compile as elixir
from elixir_compile.graph.capture.modules import executor_of
from tests.run.clients.client_runs import (
    assert_equal,
    assert_moved,
    compiled,
    eager_adamw,
    hybrid_adamw,
    own_copy,
    rows,
    weights,
)
from tests.run.frozen_checks import NF4, WIDTH, batches, nf4
from tests.run.models import small_gpt2

peft = pytest.importorskip("peft")


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    found = []
    for row in rows(3):
        loss = model(input_ids=row["input_ids"][None], labels=row["labels"][None]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.slow
# peft 0.21 asks for a name that transformers 5.23 calls deprecated.
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_lora_adapters_train_as_in_eager_code() -> None:
    config = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["c_attn"], fan_in_fan_out=True)
    model = peft.get_peft_model(small_gpt2(num_layers=2), config)
    frozen = {name for name, param in model.named_parameters() if not param.requires_grad}
    expected, got = own_copy(model), own_copy(model)
    expected_losses = train(expected, eager_adamw(expected))
    got_losses = train(compiled(got), hybrid_adamw(got))
    assert got_losses == expected_losses
    assert_equal(weights(expected), weights(got))
    assert_moved(got)
    (made,) = elixir.compilations(got)
    for bucket in made.plan.buckets:
        assert bucket.trainable == frozen.isdisjoint(bucket.params)
        assert bucket.trainable == (bucket.state_nbytes > 0)
    assert {bucket.trainable for bucket in made.plan.buckets} == {True, False}


def coded() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)]
    for layer in layers:
        layer.weight = nn.Parameter(nf4(), requires_grad=False)
    return nn.Sequential(*layers)


@pytest.mark.slow
@pytest.mark.parametrize("use_dora", [False, True])
def test_adapters_beside_weights_in_4_bits_train_and_are_switched(use_dora: bool) -> None:
    def run(compile_it: Any) -> tuple[list[float], dict[str, torch.Tensor], nn.Module]:
        config = peft.LoraConfig(r=4, target_modules=["0", "1", "2"], use_dora=use_dora, init_lora_weights=False)
        model = peft.get_peft_model(coded(), config, adapter_name="first")
        model.add_adapter("second", config)
        torch._dynamo.reset()
        called, losses = compile_it(model), []
        for name in ("first", "second", "first"):
            model.set_adapter(name)
            optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], fused=True)
            for batch in batches(2):
                loss = called(batch).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        saved = {f"{name} {key}": value for name in ("first", "second") for key, value in adapter(model, name).items()}
        return losses, {key: value.clone() for key, value in saved.items()}, model

    def adapter(model: nn.Module, name: str) -> dict[str, torch.Tensor]:
        return peft.get_peft_model_state_dict(model, adapter_name=name)

    expected, expected_adapters, _ = run(lambda model: torch.compile(model, backend="aot_eager"))
    got, got_adapters, model = run(lambda model: compiled(model, planner="zero3_offload"))
    assert got == expected
    assert_equal(expected_adapters, got_adapters)
    assert executor_of(model).ledger.counts["gather"] > 0
    base = model.unload()
    assert all(type(layer.weight) is NF4 for layer in base)
    (batch,) = batches(1)
    assert torch.equal(base(batch), coded()(batch))


def merged_and_trained(layer: Callable[[], nn.Module], **loaded: Any) -> None:
    """Train an adapter beside three of `layer`, merge it, take it out again and train on, by torch and by Elixir; the
    results are bitwise equal. `loaded` are the attributes by which transformers notes how a model was quantised."""

    def run(compile_it: Any) -> tuple[list[torch.Tensor], nn.Module]:
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules=["0", "1", "2"], init_lora_weights=False)
        base = nn.Sequential(layer(), layer(), layer())
        vars(base).update(loaded)
        model = peft.get_peft_model(base, config)
        torch._dynamo.reset()
        called, found = compile_it(model), []
        optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], fused=True)
        for change in ("", "merge_adapter", "unmerge_adapter"):
            if change:
                getattr(model, change)()
            if change == "merge_adapter":
                with torch.no_grad():
                    found += [called(batch).clone() for batch in batches(2)]
                continue
            for batch in batches(2):
                loss = called(batch).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.detach().clone())
        return found, model

    expected, _ = run(lambda model: torch.compile(model, backend="aot_eager"))
    got, model = run(lambda model: compiled(model, planner="zero3_offload"))
    assert all(map(torch.equal, got, expected))
    assert executor_of(model).ledger.counts["gather"] > 0
