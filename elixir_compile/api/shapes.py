"""Models by name: the shapes that papers and users train, as numbers. No torch: building one is `models`'s.

GPT-2 to 1.5b as OpenAI published them (24 layers of 1024 were called 345M then), from 4b on those of the paper's
benchmark (Elixir, arXiv 2212.05339). Llama 7b, 13b and 70b as in the `config.json` of meta-llama/Llama-2-*-hf.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from elixir_compile.errors import UnknownModel


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The numbers of one transformer with a causal language-model head."""

    name: str
    family: Literal["gpt2", "llama"]
    hidden: int
    layers: int
    heads: int
    key_value_heads: int
    """Fewer than `heads` where several heads share keys and values."""
    intermediate: int
    """Width between the two projections of a feed-forward layer."""
    vocabulary: int


def model_named(name: str) -> ModelShape:
    """Return the shape called `name`; UnknownModel with the nearest name when there is none."""
    shape = _SHAPES.get(name.lower())
    if shape is None:
        raise UnknownModel(name, model_names())
    return shape


def model_names() -> tuple[str, ...]:
    """Return the names that `model_named` knows, small to large by family."""
    return tuple(_SHAPES)


def _gpt2(name: str, hidden: int, layers: int, heads: int = 16) -> ModelShape:
    return ModelShape(
        name=name, family="gpt2", hidden=hidden, layers=layers, heads=heads, key_value_heads=heads,
        intermediate=4 * hidden, vocabulary=50257,
    )  # fmt: skip


def _llama(
    name: str, hidden: int, layers: int, heads: int, intermediate: int, key_value_heads: int | None = None
) -> ModelShape:
    return ModelShape(
        name=name, family="llama", hidden=hidden, layers=layers, heads=heads, key_value_heads=key_value_heads or heads,
        intermediate=intermediate, vocabulary=32000,
    )  # fmt: skip


_SHAPES: Mapping[str, ModelShape] = {
    shape.name: shape
    for shape in (
        _gpt2("gpt2-124m", 768, 12, 12),
        _gpt2("gpt2-350m", 1024, 24, 16),
        _gpt2("gpt2-774m", 1280, 36, 20),
        _gpt2("gpt2-1.5b", 1600, 48, 25),
        _gpt2("gpt2-4b", 3072, 32),
        _gpt2("gpt2-10b", 4096, 48),
        _gpt2("gpt2-15b", 8192, 18),
        _gpt2("gpt2-20b", 8192, 24),
        _llama("llama-7b", 4096, 32, 32, 11008),
        _llama("llama-13b", 5120, 40, 40, 13824),
        _llama("llama-70b", 8192, 80, 64, 28672, key_value_heads=8),
    )
}
