"""The command line captures a model and batch once; a file that is damaged or out of date is never used."""

import json
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from elixir_compile.base.options import Options
from elixir_compile.ir.graph import LossRegion
from elixir_compile.search.joint.variants import Chunks
from elixir_compile.tools.cli import plan
from elixir_compile.tools.cli.plan import Request
from elixir_compile.tools.preview import models as capture_cache
from elixir_compile.tools.preview.capture import Capture
from elixir_compile.tools.preview.models import TextBatch, cached_capture, capture_key, store_capture

CONFIG = {
    "model_type": "llama", "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 64, "vocab_size": 64, "num_hidden_layers": 1,
}  # fmt: skip
CHUNKS = Chunks(
    region=LossRegion(
        name="loss", nodes=("linear", "loss"), num_tokens=8, num_classes=64, logits_bytes=2048, source="model.py:3"
    ),
    num_chunks=8,
)
TEXT = TextBatch(batch=2, seq=16)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of captures, which is empty."""
    monkeypatch.setenv("ELIXIR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    return tmp_path / "cache" / "captures"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return tmp_path


def asked(model: Path, batch: int = 2, **options: object) -> Request:
    options = {"inner": "aot_eager", **options}
    return Request(
        model=str(model), batch=batch, seq=16, dtype="float32", recompute=False, hardware=None, ranks=1, options=options
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Capture:
    """Return the capture of a model that a function makes."""
    file = tmp_path_factory.mktemp("model") / "net.py"
    text = "import torch\ndef make():\n    return torch.nn.Linear(8, 8), (torch.empty(2, 8),)\n"
    file.write_text(text, encoding="utf-8")
    return asked(Path(f"{file}:make")).capture()


def test_the_second_command_captures_nothing(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = asked(config).capture()

    def fail(*args: object, **kwargs: object) -> Capture:
        raise AssertionError("captured again")

    with monkeypatch.context() as patch:
        patch.setattr(plan, "find_model", fail)
        patch.setattr(plan, "capture_model", fail)
        second = asked(config, device_memory="1GiB", search_timeout=1.0).capture()
        assert second == first
        assert str(second.graph) == str(first.graph)
        assert list(second.numels) == list(first.numels)
        with pytest.raises(AssertionError, match="captured again"):
            asked(config, batch=3).capture()
    (config / "config.json").write_text(json.dumps(CONFIG | {"intermediate_size": 96}), encoding="utf-8")
    wider = asked(config).capture()
    assert wider.graph != first.graph


def test_a_model_that_a_function_makes_is_captured_each_time(made: Capture, folder: Path) -> None:
    assert capture_key("net.py:make", TEXT, Options(), dynamic=False, chunks=None) is None
    assert not folder.exists()


def test_a_cached_capture_is_the_one_that_was_made(made: Capture) -> None:
    whole = replace(made, chunks=CHUNKS, batch_symbol="s0", loss_chunks=4, masters=dict(reversed(made.numels.items())))
    store_capture("key", whole)
    cached = cached_capture("key")
    assert cached == whole
    assert cached is not None
    assert [list(getattr(cached, name)) for name in ("numels", "masters")] == [list(whole.numels), list(whole.masters)]


def key(**changes: Any) -> str | None:
    known = {"model": "llama-7b", "text": TEXT, "options": Options(), "dynamic": False, "chunks": None}
    return capture_key(**(known | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "gpt2-4b"},
        {"text": replace(TEXT, seq=32)},
        {"text": replace(TEXT, dtype=torch.bfloat16)},
        {"text": replace(TEXT, recompute=True)},
        {"options": Options(activations="keep")},
        {"options": Options(param_dtype="bfloat16")},
        {"options": Options(inner="aot_eager")},
        {"dynamic": True},
        {"chunks": CHUNKS},
    ],
)
def test_options_that_change_a_capture_change_its_key(changes: dict[str, Any]) -> None:
    assert key(**changes) != key()
    assert key(model="Llama-7B", options=Options(device_memory=1, search_timeout=1.0)) == key()


def other_torch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch, "__version__", "2.99")


def other_transformers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(capture_cache, "_transformers", lambda: ("9.9", None))


def other_source(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(capture_cache, "source_digest", lambda *patterns: "other")


def other_environment(patch: pytest.MonkeyPatch) -> None:
    patch.setenv("TORCHINDUCTOR_FREEZING", "1")


@pytest.mark.parametrize("change", [other_torch, other_transformers, other_source, other_environment])
def test_other_versions_of_the_software_change_the_key(
    change: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = key()
    assert key() == before
    change(monkeypatch)
    assert key() != before


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: b"\xff" + data,
        lambda data: data.replace(b'"base_bytes"', b'"bytes"'),
        lambda data: data.replace(b'"format": 1', b'"format": 0'),
        lambda data: data.replace(b'"kind": "param"', b'"kind": "other"'),
        lambda data: b"",
    ],
)
def test_a_damaged_file_is_removed_with_a_line_in_the_log(
    damage: Callable[[bytes], bytes], made: Capture, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store_capture("key", made)
    file = folder / "key.json"
    data = file.read_bytes()
    assert damage(data) != data
    file.write_bytes(damage(data))
    with caplog.at_level(logging.INFO, "elixir_compile"):
        assert cached_capture("key") is None
    assert f"the cached capture {file} cannot be read and is removed" in caplog.text
    assert not file.exists()
    assert cached_capture("key") is None


def test_the_oldest_of_too_many_captures_go(made: Capture, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_cache, "MOST_CAPTURES", 2)
    for age_s, name in enumerate(("a", "b")):
        store_capture(name, made)
        os.utime(folder / f"{name}.json", (age_s, age_s))
    assert cached_capture("a") is not None  # so it is used later than b
    store_capture("c", made)
    assert sorted(path.stem for path in folder.iterdir()) == ["a", "c"]


def test_a_folder_that_cannot_be_made_gets_a_line_in_the_log(
    made: Capture, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.parent.write_text("a file", encoding="utf-8")
    with caplog.at_level(logging.INFO, "elixir_compile"):
        store_capture("key", made)
        assert cached_capture("key") is None
    assert f"captures cannot be cached in {folder}" in caplog.text
