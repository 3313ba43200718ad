"""Layers of bitsandbytes in 4 bits train bit for bit as by torch, with their codes and scales on the host."""

from typing import Any

import pytest
import torch
from torch import nn

import elixir_compile as elixir
from elixir_compile.graph.capture.modules import executor_of, unmanaged_reason
from tests.run.frozen_checks import WIDTH, InNF4, batches, frozen_spans, squares, stack
from tests.run.training import Run, by_elixir, by_elixir_unprepared, by_torch

bitsandbytes = pytest.importorskip("bitsandbytes")


class In4Bits(InNF4):
    """QLoRA: a layer of bitsandbytes, and a trained adapter of low rank beside it."""

    is_nested = False

    def __init__(self) -> None:
        super().__init__()
        values = nn.Linear(WIDTH, WIDTH, bias=False).state_dict()
        made: Any = bitsandbytes.nn.Linear4bit(
            WIDTH, WIDTH, bias=False, compute_dtype=torch.float32, compress_statistics=self.is_nested, quant_type="nf4"
        )
        made.load_state_dict(values)
        self.base = made.to("cpu")  # which quantises it


class InNested4Bits(In4Bits):
    """The scales are quantised too."""

    is_nested = True


def trained(run: Run) -> Run:
    torch.manual_seed(2)
    return run.train(batches(), squares)


@pytest.mark.slow
# Dynamo of torch 2.13 makes an object of the autograd function of a matrix in 4 bits.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("kind", [In4Bits, InNested4Bits])
@pytest.mark.parametrize("start", [by_elixir, by_elixir_unprepared])
def test_layers_in_4_bits_train_from_the_host(start: Any, kind: type[nn.Module]) -> None:
    wanted = trained(by_torch(stack(kind), backend="aot_eager"))
    found = trained(start(stack(kind), plan_cache=False, planner="zero3_offload"))
    weight = found.model.get_submodule("0.base")._parameters["weight"]
    assert type(weight).__name__ == "Params4bit"
    assert {"0.base.weight", "0.base.weight.quant_state.absmax"} <= executor_of(found.model).slots.keys()
    assert all(bucket.is_away for bucket in executor_of(found.model).buckets)
    record = elixir.measure_step(lambda: squares(found.compiled, found.optimizer, batches(1)[0]))
    spans = frozen_spans(record, [bucket.spec for bucket in executor_of(found.model).buckets])
    assert {str(span.lane) for span in spans if span.nbytes} == {"h2d"}
    squares(wanted.compiled, wanted.optimizer, batches(1)[0])
    for run in (wanted, found):  # as peft does when it merges an adapter
        torch.manual_seed(3)
        run.model.get_submodule("1.base").weight = kind().get_parameter("base.weight")
        trained(run)
    assert all(map(torch.equal, found.losses, wanted.losses))
    assert all(torch.equal(value, wanted.weights[name]) for name, value in found.weights.items())


class In8Bits(InNF4):
    """The weight of the layer is an `Int8Params`, which no plan moves: the forward reads the codes in `layer.state`."""

    def __init__(self) -> None:
        super().__init__()
        values = nn.Linear(WIDTH, WIDTH, bias=False).state_dict()
        made: Any = bitsandbytes.nn.Linear8bitLt(WIDTH, WIDTH, bias=False, has_fp16_weights=False)
        made.load_state_dict(values)
        self.base = made.to("cpu")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_layers_in_8_bits_stay_on_the_device_and_train() -> None:
    wanted = trained(by_torch(stack(In8Bits), backend="aot_eager"))
    found = trained(by_elixir(stack(In8Bits), plan_cache=False, planner="zero3_offload"))
    assert all(map(torch.equal, found.losses, wanted.losses))
    assert not any("base" in name for name in executor_of(found.model).slots)
    layer: Any = found.model.get_submodule("0.base")
    assert layer.state.CB.data_ptr() == layer.weight.data_ptr()
    assert "Int8Params" in str(unmanaged_reason(layer, "weight"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*may get different generations due to rounding:UserWarning")
def test_an_adapter_is_merged_into_layers_in_4_bits_and_taken_out() -> None:
    pytest.importorskip("peft")
    from tests.run.clients.test_peft import merged_and_trained

    merged_and_trained(lambda: In4Bits().base, is_loaded_in_4bit=True)
