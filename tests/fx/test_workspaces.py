"""The workspace of attention's backward, by the formula of FlashAttention-2."""

import pytest
import torch

from elixir_compile.session.planning import attention_bytes

BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward.default


def backward(queries: tuple[int, ...], keys: tuple[int, ...]) -> torch.fx.Node:
    """Return a node of the backward with queries, keys and values of these shapes."""
    graph = torch.fx.Graph()
    inputs = [graph.placeholder(name) for name in ("grad", "query", "key", "value")]
    for node, shape in zip(inputs, (queries, queries, keys, keys), strict=True):
        node.meta["val"] = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    return graph.call_function(BACKWARD, tuple(inputs))


@pytest.mark.parametrize(
    ("queries", "keys", "expected_bytes"),
    [
        ((2, 4, 256, 64), (2, 4, 256, 64), 2 * 4 * 256 * (64 + 1) * 4),
        ((2, 4, 200, 80), (2, 4, 200, 80), 2 * 4 * 256 * (96 + 1) * 4),
        ((1, 8, 128, 64), (1, 2, 128, 64), 8 * 128 * (64 + 1) * 4 + 2 * 8 * 128 * 64 * 2),
    ],
)
def test_the_workspace_of_the_backward_of_attention(
    queries: tuple[int, ...], keys: tuple[int, ...], expected_bytes: int
) -> None:
    assert attention_bytes(backward(queries, keys), {}) == expected_bytes
