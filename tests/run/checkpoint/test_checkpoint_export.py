"""A checkpoint as one safetensors file, written a tensor at a time, and read by the libraries that others use."""

import json
import weakref
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner, Result

import elixir_compile as elixir
from elixir_compile.checkpoint.dcp import Reader
from elixir_compile.tools.cli.main import app
from tests.run.checkpointing import other
from tests.run.models import small_gpt2
from tests.run.training import assert_same_tensors

safetensors = pytest.importorskip("safetensors.torch")


def run(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def test_hugging_face_loads_an_exported_file(tmp_path: Path) -> None:
    model = small_gpt2()
    elixir.save(tmp_path / "run", model, torch.optim.AdamW(model.parameters()))
    done = run("export", tmp_path / "run", tmp_path / "hf" / "model.safetensors")
    assert done.exit_code == 1, "there is no folder"
    (tmp_path / "hf").mkdir()
    done = run("export", tmp_path / "run", tmp_path / "hf" / "model.safetensors")
    assert done.exit_code == 0, done.output
    assert "lm_head.weight is tied to transformer.wte.weight" in done.stdout

    state = safetensors.load_file(tmp_path / "hf" / "model.safetensors")
    assert_same_tensors({name: model.state_dict()[name] for name in state}, state)
    loaded = other(model)
    assert loaded.load_state_dict(state, strict=False) == (["lm_head.weight"], [])
    assert_same_tensors(model.state_dict(), loaded.state_dict())
    model.config.save_pretrained(tmp_path / "hf")
    assert_same_tensors(model.state_dict(), type(model).from_pretrained(tmp_path / "hf").state_dict())
    assert [file.name for file in (tmp_path / "hf").iterdir() if file.name.startswith(".")] == []


def every_dtype() -> nn.Module:
    module = nn.Module()
    torch.manual_seed(3)
    for number, dtype in enumerate(
        (*(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64), *(torch.int8, torch.bool))
    ):
        values = (torch.randn(3, 5) * 4).to(dtype)
        module.register_buffer(f"b{number}", values if number % 2 else values.t())
    module.register_buffer("scalar", torch.tensor(3.0))
    module.register_buffer("nothing", torch.empty(0, 2))
    return module


def test_every_dtype_is_exported_one_tensor_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, alive, most = every_dtype(), [], []
    elixir.save(tmp_path / "run", module)
    usual = Reader.fresh

    def fresh(reader: Reader, keys: Iterable[str]) -> dict[str, torch.Tensor]:
        found = usual(reader, keys)
        alive.extend(weakref.ref(tensor) for tensor in found.values())
        most.append(sum(tensor() is not None for tensor in alive))
        return found

    monkeypatch.setattr(Reader, "fresh", fresh)
    done = run("export", tmp_path / "run", tmp_path / "out.safetensors", "--json")
    assert json.loads(done.stdout)["num_tensors"] == len(module.state_dict())
    # The one that was just written is let go when the next has been read.
    assert max(most) <= 2
    state = safetensors.load_file(tmp_path / "out.safetensors")
    assert_same_tensors(dict(sorted(module.state_dict().items())), dict(sorted(state.items())))


def test_an_unknown_dtype_and_a_missing_checkpoint_are_not_exported(tmp_path: Path) -> None:
    module = nn.Module()
    module.register_buffer("phase", torch.ones(2, dtype=torch.complex128))
    elixir.save(tmp_path / "run", module)
    for checkpoint, said in (("run", "phase cannot be saved"), ("nowhere", "there is nothing")):
        done = run("export", tmp_path / checkpoint, tmp_path / "out.safetensors")
        assert done.exit_code == 1
        assert said in done.stderr
    assert not (tmp_path / "out.safetensors").exists()


def test_full_state_dict_is_the_state_dict(tmp_path: Path) -> None:
    model = elixir.prepare(small_gpt2())
    state = elixir.full_state_dict(torch.compile(model, backend="elixir"))
    assert_same_tensors(small_gpt2().state_dict(), state)
    assert state["lm_head.weight"] is state["transformer.wte.weight"]
    assert all(tensor.device.type == "cpu" and type(tensor) is torch.Tensor for tensor in state.values())
    fresh = other(small_gpt2())
    fresh.load_state_dict(state)
    assert_same_tensors(state, fresh.state_dict())
