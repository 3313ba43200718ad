"""A model on `meta` whose weights are in safetensors files is loaded without a copy of it in memory."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import elixir_compile as elixir
from elixir_compile.runtime.disk_params import file_ranges
from tests.run.models import ShortStack, Tied, seeded, tokens, vectors
from tests.run.processes import apart
from tests.run.runtime.test_params_on_disk import give_back_what_is_freed, present_anonymous_bytes
from tests.run.training import assert_same, assert_same_tensors, by_elixir, by_torch, tight_bytes

pytest.importorskip("safetensors")
from safetensors.torch import save_file


def on_meta(make: Any, *args: Any) -> nn.Module:
    with torch.device("meta"):
        return make(*args)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the weights of `seeded(ShortStack)` in two files."""
    values = [*seeded(ShortStack).state_dict().items()]
    save_file(dict(values[::2]), tmp_path / "model-00001-of-00002.safetensors")
    save_file(dict(values[1::2]), tmp_path / "model-00002-of-00002.safetensors")
    return tmp_path


def test_a_model_of_files_maps_them_and_trains_bitwise_as_one_in_memory(folder: Path) -> None:
    model, batches = elixir.prepare(on_meta(ShortStack), "cpu", weights=folder), vectors()
    assert None not in file_ranges([param.data for param in model.parameters()])
    got = by_elixir(model, device_memory=tight_bytes(seeded(ShortStack), batches[0]))
    assert_same(by_torch(seeded(ShortStack)).train(batches), got.train(batches))


def test_tied_weights_are_one_parameter_under_the_name_that_was_saved(tmp_path: Path) -> None:
    expected = seeded(Tied)
    values = {name: value for name, value in expected.state_dict().items() if name != "embed.weight"}
    save_file(values, tmp_path / "model.safetensors")
    model = elixir.prepare(on_meta(Tied), "cpu", weights=tmp_path)
    assert model.get_submodule("head")._parameters["weight"] is model.get_submodule("embed")._parameters["weight"]
    assert torch.equal(model(tokens()[0]), expected(tokens()[0]))


def test_another_dtype_is_converted_and_buffers_have_the_values_of_the_file(tmp_path: Path) -> None:
    expected = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).double()
    expected(torch.randn(16, 8).double())
    save_file(expected.state_dict(), tmp_path / "model.safetensors")
    model = on_meta(lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
    elixir.prepare(model, "cpu", weights=tmp_path / "model.safetensors")
    assert_same_tensors(expected.float().state_dict(), model.state_dict())


NUM_LAYERS, WIDE = 16, 2048
LAYER_BYTES = 4 * WIDE**2


def layers() -> nn.Sequential:
    """Frozen layers of 256 MiB in all, and a small one that trains."""
    frozen = nn.Sequential(*(nn.Linear(WIDE, WIDE, bias=False) for _ in range(NUM_LAYERS)))
    return frozen.requires_grad_(False).append(nn.Linear(WIDE, 1))


def loaded_and_trained(folder: str, host_memory: str) -> tuple[int, int, int]:
    """Load the layers in `folder` and train two steps; return the bytes of memory that is no file's by which loading
    grew, the most such bytes until the end, and the planned bytes of the host."""
    give_back_what_is_freed()
    before_bytes = present_anonymous_bytes()
    model = elixir.prepare(on_meta(layers), "cpu", weights=folder)
    loaded_bytes = present_anonymous_bytes() - before_bytes
    found, is_done = [0], threading.Event()

    def watch() -> None:
        while not is_done.wait(0.01):
            found.append(present_anonymous_bytes())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    options = {"inner": "aot_eager", "device_memory": 3 * LAYER_BYTES, "host_memory": host_memory, "plan_cache": False}
    compiled = torch.compile(model, backend="elixir", options=options)
    optimizer = elixir.HybridAdamW([param for param in model.parameters() if param.requires_grad], lr=1e-3)
    for _ in range(2):
        compiled(torch.randn(8, WIDE)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    is_done.set()
    watcher.join()
    (record,) = elixir.compilations(model)
    assert record.plan is not None
    return loaded_bytes, max(found), record.plan.prediction.host_peak_bytes


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs the figures of Linux's kernel")
def test_a_model_larger_than_the_host_is_never_in_memory_as_a_whole(tmp_path: Path) -> None:
    save_file(layers().state_dict(), tmp_path / "model.safetensors")
    loaded_bytes, least_bytes, planned_bytes = apart(loaded_and_trained, str(tmp_path), "72MiB")
    assert loaded_bytes < LAYER_BYTES
    assert planned_bytes < 72 << 20
    _, most_bytes, planned_whole_bytes = apart(loaded_and_trained, str(tmp_path), "1GiB")
    assert most_bytes - least_bytes > planned_whole_bytes - planned_bytes - LAYER_BYTES


class Masked(nn.Module):
    """A parameter, beside a buffer that no checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("mask", torch.ones(4), persistent=False)


WRONG = {
    "no file": (lambda: on_meta(ShortStack), {}, elixir.InvalidOption, "a folder with such files"),
    "a model with values": (
        *(lambda: ShortStack(), {"head.bias": torch.ones(1)}, elixir.InvalidOption),
        "no parameter is on `meta`",
    ),
    "a parameter that is in no file": (
        *(lambda: on_meta(ShortStack), {"head.bias": torch.ones(1)}, elixir.UnsupportedModel),
        r"\d+ of \d+ parameters on `meta` are not in",
    ),
    "another shape": (
        *(lambda: on_meta(nn.Linear, 4, 2), {"weight": torch.ones(2, 3), "bias": torch.ones(2)}),
        *(
            elixir.UnsupportedModel,
            r"weight is not supported: it is torch.float32 \[2, 4\], and torch.float32 \[2, 3\] in",
        ),
    ),
    "whole numbers for fractions": (
        *(lambda: on_meta(nn.Linear, 4, 2), {"weight": torch.ones(2, 4, dtype=torch.int8), "bias": torch.ones(2)}),
        *(elixir.UnsupportedModel, "and torch.int8 "),
    ),
    "a buffer without values": (
        *(lambda: on_meta(Masked), {"weight": torch.ones(4)}, elixir.UnsupportedModel),
        "its buffer mask is on `meta` and not in",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_files_that_do_not_fit_are_named_and_the_model_is_as_before(name: str, tmp_path: Path) -> None:
    make, values, error, text = WRONG[name]
    if values:
        save_file(values, tmp_path / "model.safetensors")
    model = make()
    before = [(param, param.is_meta) for param in model.parameters()]
    with pytest.raises(error, match=text):
        elixir.prepare(model, "cpu", weights=tmp_path)
    assert all(
        param is own and param.is_meta == was for param, (own, was) in zip(model.parameters(), before, strict=True)
    )
