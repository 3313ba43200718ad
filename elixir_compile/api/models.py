"""What a command line calls MODEL -> a function that makes the model, and its example inputs, all on `meta`.

gpt2-4b               a named shape, see `shapes`
train.py:make         a function that returns the model, or (model, example_inputs)
folder, config.json   a Hugging Face configuration of a causal language model
"""

import contextlib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from elixir_compile.api.capture import Inputs
from elixir_compile.api.shapes import ModelShape, model_named, model_names
from elixir_compile.errors import InvalidOption, UnknownModel, UnsupportedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class TextBatch:
    """How the model is to be trained: the numbers that the model itself does not fix."""

    batch: int
    seq: int
    dtype: torch.dtype = torch.float32
    """Of parameters and compute."""
    recompute: bool = False
    """Whether each layer computes its activations again in the backward, where the model knows how."""


def load_model(name: str, text: TextBatch) -> tuple[nn.Module, Inputs]:
    """Return the model that `name` says and example inputs for it, without weights.

    Raises UnknownModel for a name that leads nowhere, and UnsupportedModel for what lies there but makes no model.
    """
    path, _, function = name.rpartition(":")
    if path.endswith(".py"):
        return _from_function(name, Path(path), function, text)
    if name.lower() in model_names():
        return _hugging_face(name, lambda: _config_of(model_named(name), text), text)
    found = Path(name)
    if found.exists():
        return _hugging_face(name, lambda: _config_from(found), text)
    looks_like_path = found.suffix == ".json" or len(found.parts) > 1
    raise UnknownModel(name, model_names(), "there is no such file or folder" if looks_like_path else "")


def _hugging_face(name: str, configure: Callable[[], Any], text: TextBatch) -> tuple[nn.Module, Inputs]:
    try:
        import transformers
    except ImportError as error:
        reason = "it needs the package transformers: `pip install elixir-compile[hf]`"
        raise UnsupportedModel(name, reason) from error
    config = configure()
    config.use_cache = False  # keys and values of earlier tokens are of no use in training
    with torch.device("meta"):
        try:
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=text.dtype)
        except ValueError as error:
            reason = f"transformers has no causal language model for it. {str(error).splitlines()[0]}"
            raise UnsupportedModel(name, reason) from error
    return _trained(model, text), _tokens(text)


def _trained(model: nn.Module, text: TextBatch) -> nn.Module:
    model.train()
    if text.recompute:
        # Called so since transformers 5, and `gradient_checkpointing_enable` before.
        names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
        enable = next((getattr(model, name) for name in names if callable(getattr(model, name, None))), None)
        if enable is None:
            raise UnsupportedModel(type(model).__name__, f"it has no `{names[0]}`, so it cannot be told to recompute")
        enable({"use_reentrant": False})
    return model


def _tokens(text: TextBatch) -> Mapping[str, torch.Tensor]:
    ids = torch.empty(text.batch, text.seq, dtype=torch.int64, device="meta")
    return {"input_ids": ids, "labels": ids}


def _config_of(shape: ModelShape, text: TextBatch) -> Any:
    import transformers

    if shape.family == "gpt2":
        return transformers.GPT2Config(
            n_embd=shape.hidden, n_layer=shape.layers, n_head=shape.heads, vocab_size=shape.vocabulary,
            n_positions=max(1024, text.seq), resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
    return transformers.LlamaConfig(
        hidden_size=shape.hidden, num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads, intermediate_size=shape.intermediate,
        vocab_size=shape.vocabulary, max_position_embeddings=max(4096, text.seq),
    )  # fmt: skip


def _config_from(path: Path) -> Any:
    import transformers

    file = path / "config.json" if path.is_dir() else path
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnknownModel(str(path), model_names(), f"{file} is no JSON file that can be read: {error}") from error
    kind = fields.pop("model_type", None) if isinstance(fields, dict) else None
    if kind is None:
        raise UnknownModel(str(path), model_names(), f"{file} has no field model_type")
    try:
        # `for_model` takes numbers only; nothing of the folder is imported or run.
        return transformers.AutoConfig.for_model(kind, **fields)
    except ValueError as error:
        reason = f"transformers cannot read its configuration. {str(error).splitlines()[0]}"
        raise UnsupportedModel(str(path), reason) from error


def _from_function(name: str, path: Path, function: str, text: TextBatch) -> tuple[nn.Module, Inputs]:
    make = getattr(_module_at(name, path), function, None)
    if not callable(make):
        raise UnknownModel(name, model_names(), f"{path} has no function {function!r}")
    with torch.device("meta"), _blaming(name):
        made = make()
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, _tokens(text))
    if not isinstance(model, nn.Module):
        raise InvalidOption(f"model {name}", type(model).__name__, "a function that returns a torch.nn.Module")
    return _trained(model.to(text.dtype), text), inputs


def _module_at(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise UnknownModel(name, model_names(), f"there is no file {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # where dataclasses look for the module they are in
    sys.path.insert(0, str(path.parent))
    try:
        with _blaming(name):
            spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module


@contextlib.contextmanager
def _blaming(name: str) -> Iterator[None]:
    """Turn what the user's code raises into an error that says so."""
    try:
        yield
    except Exception as error:
        raise UnsupportedModel(name, f"its code raised {type(error).__name__}: {error}") from error
