"""Find the model and the example inputs that a command names, from the shapes of well-known models, and keep captures
on disk or derive them for other batches.
"""

import contextlib
import copy
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import nn

from elixir_compile.base.codec import Form, from_json, to_json
from elixir_compile.base.errors import InvalidOption, InvalidPlan, UnknownModel, UnsupportedModel
from elixir_compile.base.folders import cache_dir, drop_oldest, read_cached, write_cached
from elixir_compile.base.options import Options
from elixir_compile.base.version import __version__, source_digest
from elixir_compile.compat.platforms import accelerator_type
from elixir_compile.ir import Param, StepGraph, StorageId
from elixir_compile.search.joint.variants import Chunks, possible_chunks
from elixir_compile.session.backend import with_compiler
from elixir_compile.tools.preview.capture import Capture, Inputs

# ----------------------------------------------------------------------------------------------------------------------
# Shapes of well-known models by name. The functions below build the models.
#
# Each shape has the `model_type` of a Hugging Face configuration, and the fields in which the published configuration
# differs from the defaults. GPT-2 up to 1.5b is as published by OpenAI (24 layers of 1024 were called 345M then); from
# 4b on it is as in the benchmark of the paper (Elixir, arXiv 2212.05339). All others are as in the `config.json` of
#
#     llama-7b, 13b, 70b      meta-llama/Llama-2-*-hf          gpt-oss-20b    openai/gpt-oss-20b
#     llama-3-*, llama-3.2-1b meta-llama/Meta-Llama-3-*        mixtral-8x7b   mistralai/Mixtral-8x7B-v0.1
#     qwen3-*                 Qwen/Qwen3-*                     bert-large     google-bert/bert-large-uncased
#     mistral-7b              mistralai/Mistral-7B-v0.1        t5-3b          google-t5/t5-3b
#     gemma-3-*               google/gemma-3-*-pt, its text    vit-g          g/14 of "Scaling Vision Transformers"


class Head(Enum):
    """The output that a model is trained for, which also decides its inputs."""

    NEXT_TOKEN = "the next token"
    MASKED_TOKEN = "masked tokens"
    OTHER_TEXT = "another text"
    IMAGE_CLASS = "the class of an image"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The numbers of one transformer."""

    name: str
    model_type: str
    """The type of the Hugging Face configuration."""
    fields: Mapping[str, object]
    """Fields of the configuration."""
    num_parameters: int
    """As published with the weights, or as in the paper."""
    head: Head = Head.NEXT_TOKEN
    longest: str = "max_position_embeddings"
    """The field with the longest sequence, raised if training has longer sequences; empty if there is no such field."""
    layer_fields: tuple[str, ...] = field(default=("num_hidden_layers",))
    """The fields with the number of layers."""


def model_named(name: str) -> ModelShape:
    """Return the shape called `name`. Raises UnknownModel, with the nearest name, if there is none."""
    shape = _SHAPES.get(name.lower())
    if shape is None:
        raise UnknownModel(name, model_names())
    return shape


def model_names() -> tuple[str, ...]:
    """Return the names that `model_named` knows, small to large by family."""
    return tuple(_SHAPES)


def _gpt2(name: str, hidden: int, layers: int, heads: int, num_parameters: int) -> ModelShape:
    fields = {
        "n_embd": hidden, "n_layer": layers, "n_head": heads, "vocab_size": 50257, "n_positions": 1024,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    }  # fmt: skip
    return ModelShape(
        name=name, model_type="gpt2", fields=fields, num_parameters=num_parameters,
        longest="n_positions", layer_fields=("n_layer",),
    )  # fmt: skip


def _decoder(name: str, model_type: str, sizes: tuple[int, ...], num_parameters: int, **more: object) -> ModelShape:
    """Return the shape of a decoder; `sizes` are hidden, layers, heads, key-value heads, intermediate, vocabulary."""
    names = (
        "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
        "vocab_size",
    )  # fmt: skip
    fields = {"max_position_embeddings": 4096, **dict(zip(names, sizes, strict=True)), **more}
    return ModelShape(name=name, model_type=model_type, fields=fields, num_parameters=num_parameters)


def _qwen3(
    name: str, hidden: int, layers: int, heads: int, intermediate: int, num_parameters: int, *, is_tied: bool = False
) -> ModelShape:
    sizes = (hidden, layers, heads, 8, intermediate, 151936)
    return _decoder(name, "qwen3", sizes, num_parameters, head_dim=128, tie_word_embeddings=is_tied)


def _gemma3(name: str, sizes: tuple[int, ...], num_parameters: int, *, head_dim: int, scalar: int) -> ModelShape:
    return _decoder(
        name, "gemma3_text", (*sizes, 262208), num_parameters,
        head_dim=head_dim, query_pre_attn_scalar=scalar, sliding_window=1024,
    )  # fmt: skip


_LLAMA_3 = {"tie_word_embeddings": False, "rms_norm_eps": 1e-5}

_SHAPES: Mapping[str, ModelShape] = {
    shape.name: shape
    for shape in (
        _gpt2("gpt2-124m", 768, 12, 12, 124_439_808),
        _gpt2("gpt2-350m", 1024, 24, 16, 354_823_168),
        _gpt2("gpt2-774m", 1280, 36, 20, 774_030_080),
        _gpt2("gpt2-1.5b", 1600, 48, 25, 1_557_611_200),
        _gpt2("gpt2-4b", 3072, 32, 16, 3_784_000_000),
        _gpt2("gpt2-10b", 4096, 48, 16, 9_877_000_000),
        _gpt2("gpt2-15b", 8192, 18, 16, 14_920_000_000),
        _gpt2("gpt2-20b", 8192, 24, 16, 19_750_000_000),
        _decoder("llama-7b", "llama", (4096, 32, 32, 32, 11008, 32000), 6_738_415_616),
        _decoder("llama-13b", "llama", (5120, 40, 40, 40, 13824, 32000), 13_015_864_320),
        _decoder("llama-70b", "llama", (8192, 80, 64, 8, 28672, 32000), 68_976_648_192),
        _decoder(
            "llama-3.2-1b", "llama", (2048, 16, 32, 8, 8192, 128256), 1_235_814_400, head_dim=64,
            **(_LLAMA_3 | {"tie_word_embeddings": True}),
        ),
        _decoder("llama-3-8b", "llama", (4096, 32, 32, 8, 14336, 128256), 8_030_261_248, **_LLAMA_3),
        _decoder("llama-3-70b", "llama", (8192, 80, 64, 8, 28672, 128256), 70_553_706_496, **_LLAMA_3),
        _decoder("llama-3-405b", "llama", (16384, 126, 128, 8, 53248, 128256), 405_853_388_800, **_LLAMA_3),
        _qwen3("qwen3-0.6b", 1024, 28, 16, 3072, 596_049_920, is_tied=True),
        _qwen3("qwen3-1.7b", 2048, 28, 16, 6144, 1_720_574_976, is_tied=True),
        _qwen3("qwen3-4b", 2560, 36, 32, 9728, 4_022_468_096, is_tied=True),
        _qwen3("qwen3-8b", 4096, 36, 32, 12288, 8_190_735_360),
        _qwen3("qwen3-14b", 5120, 40, 40, 17408, 14_768_307_200),
        _qwen3("qwen3-32b", 5120, 64, 64, 25600, 32_762_123_264),
        _decoder("mistral-7b", "mistral", (4096, 32, 32, 8, 14336, 32000), 7_241_732_096, sliding_window=4096),
        _gemma3("gemma-3-4b", (2560, 34, 8, 4, 10240), 3_880_263_168, head_dim=256, scalar=256),
        _gemma3("gemma-3-12b", (3840, 48, 16, 8, 15360), 11_766_034_176, head_dim=256, scalar=256),
        _gemma3("gemma-3-27b", (5376, 62, 32, 16, 21504), 27_009_346_304, head_dim=128, scalar=168),
        _decoder(
            "gpt-oss-20b", "gpt_oss", (2880, 24, 64, 8, 2880, 201088), 20_914_757_184,
            head_dim=64, num_local_experts=32, num_experts_per_tok=4, sliding_window=128,
        ),
        _decoder(
            "mixtral-8x7b", "mixtral", (4096, 32, 32, 8, 14336, 32000), 46_702_792_704,
            num_local_experts=8, num_experts_per_tok=2,
        ),
        ModelShape(
            name="bert-large", model_type="bert", num_parameters=336_226_108, head=Head.MASKED_TOKEN,
            fields={
                "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096,
                "vocab_size": 30522, "max_position_embeddings": 512,
            },
        ),
        ModelShape(
            name="t5-3b", model_type="t5", num_parameters=2_851_598_336, head=Head.OTHER_TEXT, longest="",
            layer_fields=("num_layers", "num_decoder_layers"),
            fields={
                "d_model": 1024, "d_ff": 16384, "d_kv": 128, "num_heads": 32, "num_layers": 24,
                "num_decoder_layers": 24, "vocab_size": 32128, "decoder_start_token_id": 0, "pad_token_id": 0,
            },
        ),
        ModelShape(
            name="vit-g", model_type="vit", num_parameters=1_011_000_000, head=Head.IMAGE_CLASS, longest="",
            fields={
                "hidden_size": 1408, "num_hidden_layers": 40, "num_attention_heads": 16, "intermediate_size": 6144,
                "image_size": 224, "patch_size": 14, "num_labels": 1000,
            },
        ),
    )
}  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------------
# Derive the captures of a model for many batches from the captures for three of them.
#
# All numbers in the captured step of a batch are `a + b * rows`: bytes and flops. The smallest batch above one row and
# the largest are captured, and the law between them is proved on a third. If a number does not follow the law, each
# batch is captured. A batch of one row is always captured, because torch treats sizes of 1 as constants.


log = logging.getLogger("elixir_compile")
_FEWEST = 4
"""So many batches above one row are worth a law; fewer are captured."""


_GROWN = frozenset({"flops", "moved_bytes", "nbytes", "batch", "base_bytes", "num_tokens", "logits_bytes"})
"""The fields of a capture, its graph and its loss that grow with the rows; all others are equal for all batches."""


def _at_rows(rows: int, near_rows: int, near: Capture, far_rows: int, far: Capture, options: Options) -> Capture | None:
    """Return the capture for `rows` on the line from `near`, of `near_rows`, to `far`; None if the captures differ in
    more than numbers, or a number is no whole number there."""

    def on_line(near: Any, far: Any) -> Any:
        if near == far:
            return far
        if isinstance(near, tuple) and isinstance(far, tuple) and len(near) == len(far):
            return tuple(map(on_line, near, far))
        if type(near) is not type(far) or not is_dataclass(far):
            raise _NotLinearError
        changes: dict[str, Any] = {}
        for name in (entry.name for entry in fields(far)):
            first, last = getattr(near, name), getattr(far, name)
            if name in _GROWN:
                grown, rest = divmod((last - first) * (rows - near_rows), far_rows - near_rows)
                if rest or first + grown < 0:
                    raise _NotLinearError
                changes[name] = first + grown
            elif first != last:
                changes[name] = on_line(first, last)
        return replace(far, **changes)  # pyright: ignore[reportArgumentType]  it is a value, no class

    chunks = near.chunks or far.chunks
    try:
        if near.chunks is not None and far.chunks is not None:
            chunks = possible_chunks(on_line(near.chunks.region, far.chunks.region), options)
        elif chunks is not None:
            return None  # the loss of the smaller batch has too few logits
        return replace(on_line(replace(near, chunks=None), replace(far, chunks=None)), chunks=chunks)
    except _NotLinearError:
        return None


class _NotLinearError(Exception):
    """Two captures differ in more than numbers, or a number is no whole number at the rows in between."""


@dataclass(slots=True, kw_only=True)
class BatchCaptures:
    """The captures of a model for several batches, each made or derived when it is first asked for."""

    capture: Callable[[int], Capture]
    """Captures the step of a batch of so many rows."""
    rows: Sequence[int]
    """All batches that may be asked for."""
    options: Options
    _made: dict[int, Capture] = field(default_factory=dict)
    _derived: dict[int, Capture] = field(default_factory=dict)
    _law: Callable[[int], Capture | None] | None = None
    _is_tried: bool = False

    def at(self, rows: int) -> Capture:
        """Return the capture for `rows`, which are made or derived."""
        if rows not in self._made and rows not in self._derived:
            law = self._proved() if rows > 1 else None
            derived = None if law is None else law(rows)
            if derived is None:
                return self.made(rows)
            self._derived[rows] = derived
        return self._made.get(rows) or self._derived[rows]

    def made(self, rows: int) -> Capture:
        """Return the capture for `rows`, which is not derived."""
        if rows not in self._made:
            self._made[rows] = self.capture(rows)
        return self._made[rows]

    def is_as_derived(self, rows: int) -> bool:
        """Return whether the capture of `rows` is the derived one, or was never derived; if not, drop all that are
        derived."""
        if rows not in self._derived or self.made(rows) == self._derived[rows]:
            return True
        log.info("the capture of %d rows is not as derived from other batches", rows)
        self._law, self._derived = None, {}
        return False

    def _proved(self) -> Callable[[int], Capture | None] | None:
        """Return the law of the batches above one row, or None if there is none or they are few."""
        if self._is_tried:
            return self._law
        self._is_tried = True
        above = sorted(rows for rows in self.rows if rows > 1)
        if len(above) < _FEWEST:
            return None
        near_rows, middle_rows, far_rows = above[0], above[len(above) // 2], above[-1]
        near, far, options = self.made(near_rows), self.made(far_rows), self.options

        def law(rows: int) -> Capture | None:
            return _at_rows(rows, near_rows, near, far_rows, far, options)

        if law(middle_rows) == self.made(middle_rows):
            self._law = law
        else:
            log.info("the step is not linear in the rows of the batch")
        return self._law


# ----------------------------------------------------------------------------------------------------------------------
# From the argument MODEL of a command to a model or its configuration, and to example inputs.


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
                fewer = copy.deepcopy(self.config)
                for name in self._layer_fields():
                    setattr(fewer, name, num_layers)
                for name, value in vars(self.config).items():
                    if isinstance(value, list) and value and len(value) == self.num_layers:
                        if any(entry != value[0] for entry in value):
                            raise UnsupportedModel(self.name, f"its layers differ: {name} has several values")
                        setattr(fewer, name, value[:num_layers])
                return replace(self, config=fewer).model(device=device)
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
        fields = dict(shape.fields)
        if shape.longest:
            fields[shape.longest] = max(int(str(fields[shape.longest])), text.seq)
        return _hugging_face(name, lambda: _configuration(shape.model_type, fields), text, shape.head)
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
    if head is not Head.IMAGE_CLASS:
        return model, _tokens(text)
    # Images and their classes. The image size is of the configuration; `text.seq` is not used.
    size = (text.batch, config.num_channels, config.image_size, config.image_size)
    images = torch.empty(size, dtype=text.dtype, device="meta")
    return model, {"pixel_values": images, "labels": torch.empty(text.batch, dtype=torch.int64, device="meta")}


def _tokens(text: TextBatch) -> Mapping[str, torch.Tensor]:
    ids = torch.empty(text.batch, text.seq, dtype=torch.int64, device="meta")
    return {"input_ids": ids, "labels": ids}


def _configuration(model_type: str, fields: Mapping[str, object]) -> Any:
    import transformers

    return transformers.AutoConfig.for_model(model_type, **fields)


def _config_file(path: Path) -> Path:
    return path / "config.json" if path.is_dir() else path


def _config_from(path: Path) -> Any:
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
        return _configuration(kind, fields)
    except ValueError as error:
        reason = f"transformers cannot read its configuration. {str(error).splitlines()[0]}"
        raise UnsupportedModel(str(path), reason) from error


def _from_function(name: str, path: Path, function: str, text: TextBatch, device: str) -> tuple[nn.Module, Inputs]:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # dataclasses look up their module here
    sys.path.insert(0, str(path.parent))
    try:
        with _blaming(name):
            # Not `exec_module`: it runs an older form of a file that was written again within a second.
            exec(compile(path.read_bytes(), str(path), "exec"), vars(module))
    finally:
        sys.path.remove(str(path.parent))
    make = getattr(module, function, None)
    if not callable(make):
        raise UnknownModel(name, model_names(), f"{path} has no function {function!r}")
    with torch.device(device), _blaming(name):
        made = make()
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, _tokens(text))
    if not isinstance(model, nn.Module):
        raise InvalidOption(f"model {name}", type(model).__name__, "a function that returns a torch.nn.Module")
    return trained(model.to(text.dtype), recompute=text.recompute), inputs


@contextlib.contextmanager
def _blaming(name: str) -> Iterator[None]:
    """Convert an exception in the user's code to UnsupportedModel for the model `name`."""
    try:
        yield
    except Exception as error:
        raise UnsupportedModel(name, f"its code raised {type(error).__name__}: {error}") from error


# ----------------------------------------------------------------------------------------------------------------------
# Cache captures on disk: the step of a model and batch is captured once, and later commands read it.
#
#     key = SHA-256 of the model's name or configuration, its batch, the options that a capture reads, the versions of
#           torch and transformers, the processor, and this package's source
#     <cache folder>/captures/<key>.json
#
# A capture depends on neither the machine nor the budget of a plan, so a file serves all machines and budgets. Only the
# command line uses these files, because in its process no user code has changed the behaviour of torch. The files may
# be deleted at any time.


MOST_CAPTURES = 20
"""The most files in the folder; a capture of a Llama with 32 layers has 2 MB."""
_READ_BY_A_CAPTURE = ("activations", "inner", "param_dtype")
"""The options of the backend that a capture reads."""
_READ_BY_TORCH = ("TORCH", "PYTORCH", "TRANSFORMERS")
"""Prefixes of the environment variables that change the behaviour of torch and transformers."""
_FORM = Form(
    what="capture",
    version=1,
    error=lambda field, expected, got: InvalidPlan(f"{field}: expected {expected}, got {got!r:.80}"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _CaptureFile:
    """A `Capture` with fields for JSON. Parameters are a tuple of pairs, which keeps their order."""

    graph: StepGraph
    device: str
    params: tuple[tuple[StorageId, Param], ...]
    held_bytes: int
    base_bytes: int
    chunks: Chunks | None
    loss_chunks: int
    batch_symbol: str | None


def capture_key(
    model: str,
    text: TextBatch,
    options: Options,
    *,
    dynamic: bool,
    chunks: Chunks | None,
    optimizer: str | None = None,
) -> str | None:
    """Return 32 hex digits that differ if anything differs on which the capture of the named `model` depends.

    Returns None if the capture is not cached. A model made by a function of the user is not, as the function may do
    anything, nor is one for an `optimizer` outside of torch. On a machine with a GPU no capture is cached: the name of
    the GPU would be part of the key, and to ask for it initialises CUDA, after which no process can be forked.
    """
    description = description_of(model)
    if description is None or not options.plan_cache or accelerator_type() is not None or "." in (optimizer or ""):
        return None
    options = with_compiler(options)
    parts = [
        ("model", description, text, dynamic, chunks, optimizer),
        ("options", [(name, getattr(options, name)) for name in _READ_BY_A_CAPTURE]),
        ("source", __version__, source_digest("**/*.py")),
        ("torch", torch.__version__),  # a public name
        ("libraries", platform.python_version(), _transformers()),
        ("processor", torch.backends.cpu.get_cpu_capability()),
        ("environment", sorted(item for item in os.environ.items() if item[0].startswith(_READ_BY_TORCH))),
    ]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def cached_capture(key: str) -> Capture | None:
    """Return the capture that an earlier command stored as `key`; None if there is no readable file.

    A file that cannot be read is removed, with a line in the log.
    """
    path = _path(key)

    def drop(path: Path, error: Exception) -> None:
        log.info("the cached capture %s cannot be read and is removed: %s", path, error)
        with suppress(OSError):  # it stays if the folder is read-only
            path.unlink(missing_ok=True)

    cached = read_cached(path, lambda text: from_json(_FORM, _CaptureFile, text), drop)
    if cached is None:
        return None
    with suppress(OSError):  # in a read-only folder files do not age
        os.utime(path)
    values: dict[str, Any] = {field.name: getattr(cached, field.name) for field in fields(cached)}
    return Capture(**values | {"params": dict(cached.params), "device": torch.device(cached.device)})


def store_capture(key: str, capture: Capture) -> None:
    """Store `capture` as `key` for later commands, and drop the oldest captures if there are too many.

    If the folder cannot be written, the log gets a line.
    """
    values: dict[str, Any] = {field.name: getattr(capture, field.name) for field in fields(capture)}
    cached = _CaptureFile(**values | {"params": tuple(capture.params.items()), "device": str(capture.device)})
    path = _path(key)
    try:
        write_cached(path, to_json(_FORM, cached, indent=None))
        drop_oldest(path.parent, MOST_CAPTURES)
    except OSError as error:
        log.info("captures cannot be cached in %s: %s", path.parent, error.strerror)


def _path(key: str) -> Path:
    return cache_dir() / "captures" / f"{key}.json"


def _transformers() -> tuple[str, str | None] | None:
    """Return the version and the path of transformers, without the import, which takes 0.7 s."""
    found = importlib.util.find_spec("transformers")
    return None if found is None else (importlib.metadata.version("transformers"), found.origin)
