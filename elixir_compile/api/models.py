"""What a command line calls MODEL -> a function that makes the model, and its example inputs, all on `meta`.

gpt2-4b               a named shape, see `shapes`: most predict the next token; bert-large masked tokens, t5-3b another
                      text of the same length, vit-g the class of an image
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
from elixir_compile.api.configured import Configured, trained
from elixir_compile.api.shapes import Head, ModelShape, model_named, model_names
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

    Raises what `find_model` raises.
    """
    model, inputs = find_model(name, text)
    return model.model() if isinstance(model, Configured) else model, inputs


def find_model(name: str, text: TextBatch) -> tuple[nn.Module | Configured, Inputs]:
    """Return the model that `name` says, or the configuration that says what it is, and example inputs for it.

    Raises UnknownModel for a name that leads nowhere, and UnsupportedModel for what lies there but makes no model.
    """
    path, _, function = name.rpartition(":")
    if path.endswith(".py"):
        return _from_function(name, Path(path), function, text)
    if name.lower() in model_names():
        shape = model_named(name)
        return _hugging_face(name, lambda: _config_of(shape, text), text, shape.head)
    found = Path(name)
    if found.exists():
        return _hugging_face(name, lambda: _config_from(found), text)
    looks_like_path = found.suffix == ".json" or len(found.parts) > 1
    raise UnknownModel(name, model_names(), "there is no such file or folder" if looks_like_path else "")


def find_described(model: Any, example_inputs: Inputs) -> Any:
    """Return what the configuration or the name `model` describes, trained on batches like `example_inputs`; any other
    `model` as it is.

    Raises what `find_model` raises.
    """
    transformers = sys.modules.get("transformers")  # without which nobody has a configuration
    if transformers is not None and isinstance(model, transformers.PretrainedConfig):
        default = "ForConditionalGeneration" if model.is_encoder_decoder else "ForCausalLM"
        names = (*(model.architectures or ()), default)
        class_name = next((made for name in names for end, made in _ENDINGS.items() if name.endswith(end)))
        return Configured(
            name=model.model_type, config=model, class_name=class_name, dtype=model.dtype or torch.float32
        )
    if not isinstance(model, str):
        return model
    values = example_inputs.values() if isinstance(example_inputs, Mapping) else example_inputs
    tokens = [value for value in values if isinstance(value, torch.Tensor) and value.dim() == 2]
    batch, seq = tokens[0].shape if tokens else (1, 1)
    return find_model(model, TextBatch(batch=batch, seq=seq, dtype=torch.bfloat16))[0]


_CLASSES: Mapping[Head, str] = {
    Head.NEXT_TOKEN: "AutoModelForCausalLM",
    Head.MASKED_TOKEN: "AutoModelForMaskedLM",
    Head.OTHER_TEXT: "AutoModelForSeq2SeqLM",
    Head.IMAGE_CLASS: "AutoModelForImageClassification",
}
_ENDINGS: Mapping[str, str] = {
    "ForCausalLM": "AutoModelForCausalLM",
    "LMHeadModel": "AutoModelForCausalLM",
    "ForMaskedLM": "AutoModelForMaskedLM",
    "ForConditionalGeneration": "AutoModelForSeq2SeqLM",
    "ForImageClassification": "AutoModelForImageClassification",
}
"""The class that makes a model of a configuration, by how the name of the architecture ends that it was made for."""


def _hugging_face(
    name: str, configure: Callable[[], Any], text: TextBatch, head: Head = Head.NEXT_TOKEN
) -> tuple[Configured, Inputs]:
    try:
        import transformers  # noqa: F401 - `configure` needs it
    except ImportError as error:
        reason = "it needs the package transformers: `pip install elixir-compile[hf]`"
        raise UnsupportedModel(name, reason) from error
    config = configure()
    model = Configured(name=name, config=config, class_name=_CLASSES[head], dtype=text.dtype, recompute=text.recompute)
    return model, _images(config, text) if head is Head.IMAGE_CLASS else _tokens(text)


def _images(config: Any, text: TextBatch) -> Mapping[str, torch.Tensor]:
    """Images and their classes; an image has as many patches as it has, whatever the length of a sequence."""
    size = (text.batch, config.num_channels, config.image_size, config.image_size)
    return {
        "pixel_values": torch.empty(size, dtype=text.dtype, device="meta"),
        "labels": torch.empty(text.batch, dtype=torch.int64, device="meta"),
    }


def _tokens(text: TextBatch) -> Mapping[str, torch.Tensor]:
    ids = torch.empty(text.batch, text.seq, dtype=torch.int64, device="meta")
    return {"input_ids": ids, "labels": ids}


def _config_of(shape: ModelShape, text: TextBatch) -> Any:
    import transformers

    fields = dict(shape.fields)
    if shape.longest:
        fields[shape.longest] = max(int(str(fields[shape.longest])), text.seq)
    return transformers.AutoConfig.for_model(shape.model_type, **fields)


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
    return trained(model.to(text.dtype), recompute=text.recompute), inputs


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
    """GraphRequest what the user's code raises into an error that says so."""
    try:
        yield
    except Exception as error:
        raise UnsupportedModel(name, f"its code raised {type(error).__name__}: {error}") from error
