"""From the argument MODEL of a command to a model or its configuration, and to example inputs."""

import contextlib
import copy
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from elixir_compile.base.errors import InvalidOption, UnknownModel, UnsupportedModel
from elixir_compile.tools.preview.capture import Inputs
from elixir_compile.tools.preview.shapes import Head, ModelShape, model_named, model_names

_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")
"""Fields of configurations with a number of layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Configured:
    """A model given by its configuration, without weights."""

    name: str
    config: Any
    """A `transformers.PretrainedConfig`, never changed."""
    class_name: str
    """The class of transformers that makes the model from `config`, such as `AutoModelForCausalLM`."""
    dtype: torch.dtype
    """The dtype of parameters and compute."""
    recompute: bool = False
    """Whether each layer computes its activations again in the backward."""

    @property
    def num_layers(self) -> int | None:
        """The number of layers of each stack of the model; None if stacks differ or it is not known."""
        counts = set(self._layer_fields().values())
        return counts.pop() if len(counts) == 1 else None

    def model(self, num_layers: int | None = None, *, device: str = "meta") -> nn.Module:
        """Return the model on `device`, in training mode, with `num_layers` layers, or with all if it is None.

        On a device other than `meta` it has random weights.

        Raises UnsupportedModel if transformers has no such model, or if the model cannot have `num_layers` layers, as
        when its configuration makes layers differ.
        """
        import transformers

        if num_layers is not None:
            try:
                return replace(self, config=self._of_fewer(num_layers)).model(device=device)
            except Exception as error:  # from the model's code, which may not expect this number
                raise UnsupportedModel(self.name, f"it has no form with {num_layers} layers: {error}") from error
        config = copy.deepcopy(self.config)
        config.use_cache = False  # training does not use keys and values of earlier tokens
        with torch.device(device):
            try:
                model = getattr(transformers, self.class_name).from_config(config, dtype=self.dtype)
            except ValueError as error:
                reason = f"transformers has no causal language model for it. {str(error).splitlines()[0]}"
                raise UnsupportedModel(self.name, reason) from error
        return trained(model, recompute=self.recompute)

    def _layer_fields(self) -> Mapping[str, int]:
        fields = vars(self.config)
        return {name: fields[name] for name in _LAYERS if type(fields.get(name)) is int}

    def _of_fewer(self, num_layers: int) -> Any:
        """Return the configuration for `num_layers` layers.

        Raises UnsupportedModel if a list of the configuration has different entries for different layers.
        """
        config = copy.deepcopy(self.config)
        for name in self._layer_fields():
            setattr(config, name, num_layers)
        for name, value in vars(self.config).items():
            if isinstance(value, list) and value and len(value) == self.num_layers:
                if any(entry != value[0] for entry in value):
                    raise UnsupportedModel(self.name, f"its layers differ: {name} has several values")
                setattr(config, name, value[:num_layers])
        return config


def trained(model: nn.Module, *, recompute: bool) -> nn.Module:
    """Return `model` in training mode; if `recompute`, with activation checkpointing of its layers.

    Raises UnsupportedModel if the model has no activation checkpointing.
    """
    model.train()
    if recompute:
        # The first name is of transformers 5, the second of earlier versions.
        names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
        enable = next((getattr(model, name) for name in names if callable(getattr(model, name, None))), None)
        if enable is None:
            raise UnsupportedModel(type(model).__name__, f"it has no `{names[0]}`, so it cannot be told to recompute")
        enable({"use_reentrant": False})
    return model


@dataclass(frozen=True, slots=True, kw_only=True)
class TextBatch:
    """The settings of training that the model does not fix."""

    batch: int
    """Samples."""
    seq: int
    """Tokens of each sample."""
    dtype: torch.dtype = torch.float32
    """The dtype of parameters and compute."""
    recompute: bool = False
    """Whether each layer computes its activations again in the backward."""


def load_model(name: str, text: TextBatch, *, device: str = "meta") -> tuple[nn.Module, Inputs]:
    """Return the model called `name` on `device`, and example inputs for it on `meta`.

    On a device other than `meta` it has random weights. Raises the errors of `find_model`.
    """
    model, inputs = find_model(name, text, device=device)
    return model.model(device=device) if isinstance(model, Configured) else model, inputs


def require_model(name: str) -> None:
    """Raise UnknownModel if `name` is neither that of a shape nor a path at which there is a file or a folder."""
    path, _, _function = name.rpartition(":")
    if path.endswith(".py"):
        if not Path(path).is_file():
            raise UnknownModel(name, model_names(), f"there is no file {path}")
    elif name.lower() not in model_names() and not Path(name).exists():
        looks_like_path = Path(name).suffix == ".json" or len(Path(name).parts) > 1
        raise UnknownModel(name, model_names(), "there is no such file or folder" if looks_like_path else "")


def find_model(name: str, text: TextBatch, *, device: str = "meta") -> tuple[nn.Module | Configured, Inputs]:
    """Return the model called `name`, or its configuration, and example inputs for it.

    `name` is the name of a shape, the path of a configuration or of its folder, or `FILE.py:FUNCTION`, whose model is
    made on `device`. Raises UnknownModel if there is nothing of this name, and UnsupportedModel if no model can be made
    from it.
    """
    require_model(name)
    path, _, function = name.rpartition(":")
    if path.endswith(".py"):
        return _from_function(name, Path(path), function, text, device)
    if name.lower() in model_names():
        shape = model_named(name)
        return _hugging_face(name, lambda: _config_of(shape, text), text, shape.head)
    return _hugging_face(name, lambda: _config_from(Path(name)), text)


def find_described(model: Any, example_inputs: Inputs) -> Any:
    """Return the model that the configuration or the name `model` describes, for batches like `example_inputs`.

    Any other `model` is returned as it is. Raises the errors of `find_model`.
    """
    transformers = sys.modules.get("transformers")  # a configuration exists only if transformers was imported
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


def description_of(name: str) -> str | None:
    """Return a text that identifies the model called `name`: the name of a shape, or the text of a configuration.

    Returns None for a function, and if there is nothing of this name.
    """
    if name.rpartition(":")[0].endswith(".py"):
        return None
    if name.lower() in model_names():
        return name.lower()
    try:
        return _config_file(Path(name)).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None


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
"""The class that makes a model from a configuration, by the last part of the name of the architecture."""


def _hugging_face(
    name: str, configure: Callable[[], Any], text: TextBatch, head: Head = Head.NEXT_TOKEN
) -> tuple[Configured, Inputs]:
    try:
        import transformers  # noqa: F401 - `configure` needs it
    except ImportError as error:
        reason = "it needs the package transformers: `pip install 'elixir-compile[hf]'`"
        raise UnsupportedModel(name, reason) from error
    config = configure()
    model = Configured(name=name, config=config, class_name=_CLASSES[head], dtype=text.dtype, recompute=text.recompute)
    return model, _images(config, text) if head is Head.IMAGE_CLASS else _tokens(text)


def _images(config: Any, text: TextBatch) -> Mapping[str, torch.Tensor]:
    """Return images and their classes. The image size is of the configuration; `text.seq` is not used."""
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


def _config_file(path: Path) -> Path:
    return path / "config.json" if path.is_dir() else path


def _config_from(path: Path) -> Any:
    import transformers

    file = _config_file(path)
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnknownModel(str(path), model_names(), f"{file} is no JSON file that can be read: {error}") from error
    kind = fields.pop("model_type", None) if isinstance(fields, dict) else None
    if kind is None:
        raise UnknownModel(str(path), model_names(), f"{file} has no field model_type")
    try:
        # `for_model` reads values only; no code in the folder is imported or run.
        return transformers.AutoConfig.for_model(kind, **fields)
    except ValueError as error:
        reason = f"transformers cannot read its configuration. {str(error).splitlines()[0]}"
        raise UnsupportedModel(str(path), reason) from error


def _from_function(name: str, path: Path, function: str, text: TextBatch, device: str) -> tuple[nn.Module, Inputs]:
    make = getattr(_module_at(name, path), function, None)
    if not callable(make):
        raise UnknownModel(name, model_names(), f"{path} has no function {function!r}")
    with torch.device(device), _blaming(name):
        made = make()
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, _tokens(text))
    if not isinstance(model, nn.Module):
        raise InvalidOption(f"model {name}", type(model).__name__, "a function that returns a torch.nn.Module")
    return trained(model.to(text.dtype), recompute=text.recompute), inputs


def _module_at(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # dataclasses look up their module here
    sys.path.insert(0, str(path.parent))
    try:
        with _blaming(name):
            spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module


@contextlib.contextmanager
def _blaming(name: str) -> Iterator[None]:
    """Convert an exception in the user's code to UnsupportedModel for the model `name`."""
    try:
        yield
    except Exception as error:
        raise UnsupportedModel(name, f"its code raised {type(error).__name__}: {error}") from error
