"""Models by name have the sizes that were published, and read what they are trained on."""

from dataclasses import replace

import pytest
import torch

from elixir_compile.base.errors import UnknownModel
from elixir_compile.tools.preview import models
from elixir_compile.tools.preview import models as shapes
from elixir_compile.tools.preview.capture import capture_step
from elixir_compile.tools.preview.models import ModelShape, TextBatch, load_model, model_named, model_names

pytest.importorskip("transformers")

PAPER = {"gpt2-4b", "gpt2-10b", "gpt2-15b", "gpt2-20b"}
"""Their sources give hidden sizes and layers, and no totals: those in `shapes` are what they add up to."""


def with_layers(shape: ModelShape, count: int) -> ModelShape:
    """Return the shape with so many layers, of each kind that it has."""
    return replace(shape, fields={**shape.fields, **dict.fromkeys(shape.layer_fields, count)})


def num_parameters(shape: ModelShape, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the parameters of a model made for `shape`, shared ones once."""
    monkeypatch.setattr(models, "model_named", lambda name: shape)
    model, _ = load_model(shape.name, TextBatch(batch=2, seq=8, dtype=torch.bfloat16))
    assert {param.device.type for param in model.parameters()} == {"meta"}
    return sum(param.numel() for param in model.parameters())


@pytest.mark.parametrize("name", model_names())
def test_a_named_shape_has_the_published_number_of_parameters(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are alike: models of one and of two say what one of all layers has, which would take seconds to make."""
    shape = model_named(name)
    one, two = (num_parameters(with_layers(shape, count), monkeypatch) for count in (1, 2))
    count = shape.fields[shape.layer_fields[0]]
    assert isinstance(count, int)
    total = one + (count - 1) * (two - one)
    assert total == pytest.approx(shape.num_parameters, rel=1e-3 if name in PAPER else 0.01)


def test_names_ignore_case_and_unknown_names_suggest_the_nearest() -> None:
    assert {model_named(name.upper()).name for name in model_names()} == set(model_names())
    for wrong, right in {"qwen3-8": "qwen3-8b", "gemma3-27b": "gemma-3-27b", "mixtral-8x7": "mixtral-8x7b"}.items():
        with pytest.raises(UnknownModel, match=f"Did you mean '?{right}"):
            model_named(wrong)


@pytest.mark.parametrize("name", ["qwen3-0.6b", "gemma-3-4b", "bert-large", "t5-3b", "vit-g"])
def test_a_step_of_each_kind_of_model_is_captured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = with_layers(shapes.model_named(name), 1)
    monkeypatch.setattr(models, "model_named", lambda name: shape)
    capture = capture_step(*load_model(name, TextBatch(batch=2, seq=16, dtype=torch.bfloat16)))
    assert any(op.phase.value == "backward" for op in capture.graph.ops)
