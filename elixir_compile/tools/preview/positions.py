"""Refuse samples with more tokens than a model has positions for.

On `meta` and under tracing a table of positions is never read, so a batch that is too long would get a plan, and the
first real step would fail. Two rules find such batches. Computed positions, such as rotary ones, have no limit:

    configuration   a sample of `input_ids` is longer than the number of positions in the configuration of a Hugging
                    Face model, and the model has a table with a row for each (some tables have two rows more)
    graph           a table is read at the positions 0, 1, ..., n - 1, and has fewer than n rows
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import fx, nn

from elixir_compile.base.errors import InvalidOption
from elixir_compile.graph.capture.convert import Captured
from elixir_compile.graph.capture.markers import key_of, parameter
from elixir_compile.graph.capture.node_facts import source_of, value_of

_FIELDS = ("max_position_embeddings", "n_positions")
"""Fields of Hugging Face configurations with the number of positions."""
_EXTRA_ROWS = (0, 2)
"""Rows of a table beyond the number of positions; the tables of OPT and BART begin with two unused rows."""
_ATEN = torch.ops.aten
_SAME_VALUES = frozenset(
    {
        _ATEN.unsqueeze.default,
        _ATEN.expand.default,
        _ATEN.view.default,
        _ATEN.reshape.default,
        _ATEN.repeat.default,
        _ATEN.clone.default,
        _ATEN.alias.default,
        torch.ops.prims.convert_element_type.default,
    }
)
"""Ops whose result has the values of their first argument."""


def require_positions_of_config(model: nn.Module, inputs: Mapping[str, Any]) -> None:
    """Raise InvalidOption if `input_ids` in `inputs` is longer than the table of positions of a Hugging Face model."""
    config, tokens = getattr(model, "config", None), inputs.get("input_ids")
    limits = [limit for name in _FIELDS if type(limit := getattr(config, name, None)) is int]
    if not limits or not isinstance(tokens, torch.Tensor) or tokens.dim() < 2 or tokens.shape[1] <= limits[0]:
        return
    get_words = getattr(model, "get_input_embeddings", None)
    words = get_words() if callable(get_words) else None
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding) or module is words:
            continue
        if module.num_embeddings - limits[0] in _EXTRA_ROWS:
            raise _too_long(tokens.shape[1], limits[0], f"{name}.weight")


def require_positions_of_graph(captured: Captured) -> None:
    """Raise InvalidOption if the forward of `captured` reads a table at positions that it does not have."""
    for node in captured.forward.graph.nodes:
        if node.target is _ATEN.embedding.default:
            _require_rows(captured, source_of(node), node.args[1], 0)
        elif node.target is _ATEN.index.Tensor:
            for dim, index in enumerate(cast("Sequence[object]", node.args[1])):
                _require_rows(captured, source_of(node), index, dim)


def _require_rows(captured: Captured, table: fx.Node, index: object, dim: int) -> None:
    value, found = value_of(table), _positions(index)
    if found is None or not isinstance(value, torch.Tensor):
        return
    num_tokens, highest = found
    num_missing = highest + 1 - int(value.shape[dim])
    if num_missing > 0:
        name = captured.param_names[key_of(table)] if table.target is parameter else "a table"
        raise _too_long(num_tokens, num_tokens - num_missing, name)


def _positions(index: object) -> tuple[int, int] | None:
    """Return the number of positions in `index` and the highest; None if it is not made of 0, 1, ..., n - 1."""
    if not isinstance(index, fx.Node):
        return None
    if index.target is torch.ops.prims.iota.default:
        length, start = index.args[0], index.kwargs["start"]
        if isinstance(length, int) and isinstance(start, int) and index.kwargs["step"] == 1:
            return length, start + length - 1
        return None
    if index.target in _SAME_VALUES:
        return _positions(index.args[0])
    if index.target is _ATEN.add.Tensor and isinstance(index.args[1], int):
        found = _positions(index.args[0])
        return None if found is None else (found[0], found[1] + index.args[1])
    return None


def _too_long(num_tokens: int, limit: int, table: str) -> InvalidOption:
    expected = f"at most {limit} tokens in a sample, as {table} has no more positions: pass `--seq {limit}`"
    return InvalidOption("seq", num_tokens, f"{expected}, or shorter example inputs")
