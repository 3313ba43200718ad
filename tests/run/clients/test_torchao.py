"""Layers whose weights torchao has quantised train bit for bit as by torch, with codes and scales on the host."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import elixir_compile as elixir
from elixir_compile.graph.capture.modules import executor_of
from tests.run.clients.test_peft import merged_and_trained
from tests.run.frozen_checks import WIDTH, InNF4, batches, frozen_spans, squares, stack
from tests.run.training import by_elixir, by_elixir_unprepared, by_torch

quantization = pytest.importorskip("torchao.quantization")


def in_8_bits() -> Any:
    return quantization.Int8WeightOnlyConfig(version=2)


def in_4_bits() -> Any:
    return quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4)


def quantised(config: Callable[[], Any]) -> nn.Linear:
    layer = nn.Linear(WIDTH, WIDTH, bias=False)
    quantization.quantize_(layer, config())
    return layer


class In8Bits(InNF4):
    """QLoRA: a layer of torchao, and a trained adapter of low rank beside it."""

    config = staticmethod(in_8_bits)

    def __init__(self) -> None:
        super().__init__()
        self.base = quantised(self.config)


class In4Bits(In8Bits):
    """Whole numbers of 4 bits, each in a byte."""

    config = staticmethod(in_4_bits)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [In8Bits, In4Bits])
@pytest.mark.parametrize("start", [by_elixir, by_elixir_unprepared])
def test_quantised_layers_train_from_the_host(start: Any, kind: type[In8Bits]) -> None:
    wanted = by_torch(stack(kind), backend="aot_eager").train(batches(), squares)
    found = start(stack(kind), plan_cache=False, planner="zero3_offload").train(batches(), squares)
    weight = found.model.get_submodule("0.base").weight
    names, _ = weight.__tensor_flatten__()
    assert {f"0.base.weight.{name}" for name in names} <= executor_of(found.model).slots.keys()
    assert all(bucket.is_away for bucket in executor_of(found.model).buckets)
    record = elixir.measure_step(lambda: squares(found.compiled, found.optimizer, batches(1)[0]))
    spans = frozen_spans(record, [bucket.spec for bucket in executor_of(found.model).buckets])
    assert {str(span.lane) for span in spans if span.nbytes} == {"h2d"}
    squares(wanted.compiled, wanted.optimizer, batches(1)[0])
    found.model.to("cpu")  # as trainers do; torch refuses it for a compiled model whose weights are such tensors
    for run in (wanted, found):
        run.train(batches(), squares)
    assert all(map(torch.equal, found.losses, wanted.losses))
    assert type(found.model.get_submodule("0.base").weight) is type(weight)
    with pytest.raises(elixir.UnsupportedModel, match=r"qdata .* Cast the model first"):
        found.model.half()


@pytest.mark.slow
def test_an_adapter_is_merged_into_quantised_layers_and_taken_out() -> None:
    how = SimpleNamespace(quantization_config=SimpleNamespace(get_apply_tensor_subclass=in_8_bits))
    merged_and_trained(lambda: quantised(in_8_bits), hf_quantizer=how)
