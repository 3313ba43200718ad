"""Shapes of well-known models by name. No torch here: `models` builds the models.

Each shape has the `model_type` of a Hugging Face configuration, and the fields in which the published configuration
differs from the defaults. GPT-2 up to 1.5b is as published by OpenAI (24 layers of 1024 were called 345M then); from 4b
on it is as in the benchmark of the paper (Elixir, arXiv 2212.05339). All others are as in the `config.json` of

    llama-7b, 13b, 70b      meta-llama/Llama-2-*-hf          gpt-oss-20b    openai/gpt-oss-20b
    llama-3-*, llama-3.2-1b meta-llama/Meta-Llama-3-*        mixtral-8x7b   mistralai/Mixtral-8x7B-v0.1
    qwen3-*                 Qwen/Qwen3-*                     bert-large     google-bert/bert-large-uncased
    mistral-7b              mistralai/Mistral-7B-v0.1        t5-3b          google-t5/t5-3b
    gemma-3-*               google/gemma-3-*-pt, its text    vit-g          g/14 of "Scaling Vision Transformers"
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from elixir_compile.base.errors import UnknownModel


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
        name=name,
        model_type="gpt2",
        fields=fields,
        num_parameters=num_parameters,
        longest="n_positions",
        layer_fields=("n_layer",),
    )


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
