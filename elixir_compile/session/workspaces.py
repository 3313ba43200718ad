"""Bytes that the kernels of attention allocate for themselves, by a formula.

The backward of flash attention adds up the gradient of the queries in fp32, and keeps a sum for each row:

    rows of the queries, rounded up to 128  x  heads  x  (head size, rounded up to 32, + 1)  x  4 bytes

FlashAttention-2, `mha_bwd`: `dq_accum` and `softmax_d`. If keys have fewer heads than queries, their gradients are made
for each head of the queries first (`dk_expanded`, `dv_expanded`).

Kernels without a formula, whose library chooses the workspace, are run once: see `known_kernels`.
"""

from collections.abc import Mapping

import torch
from torch import fx

from elixir_compile import compat
from elixir_compile.graph.capture.convert import Captured
from elixir_compile.graph.capture.node_facts import tensor_of
from elixir_compile.session.profile import RegionProfile

_FP32_BYTES = 4
_ROWS_TOGETHER = 128
_HEAD_SIZES_TOGETHER = 32
_BACKWARDS = {
    torch.ops.aten._scaled_dot_product_flash_attention_backward.default,
    torch.ops.aten._scaled_dot_product_efficient_attention_backward.default,
}
"""Queries and keys are their second and third arguments, [batch, heads, rows, head size]."""


def workspace_bytes(captured: Captured, sizes: Mapping[str, int], profile: RegionProfile | None) -> int:
    """Return the most bytes that one region of `captured` allocates beside its tensors.

    They are the largest measured difference of `profile`, or the formula for attention if that is more. `sizes` are the
    values of the symbols of `captured`.
    """
    measured_bytes = 0 if profile is None else profile.workspace_bytes
    if captured.backward is None:
        return measured_bytes
    nodes = captured.backward.graph.nodes
    return max([measured_bytes, *(attention_bytes(node, sizes) for node in nodes if node.target in _BACKWARDS)])


def attention_bytes(node: fx.Node, sizes: Mapping[str, int]) -> int:
    """Return the bytes of the workspace of `node`, the backward of an attention kernel for accelerators."""
    queries, keys = (tensor_of(source) for source in node.args[1:3] if isinstance(source, fx.Node))
    batch, heads, rows, head_size = (compat.evaluate_size(size, sizes) for size in queries.shape)
    _, key_heads, key_rows, _ = (compat.evaluate_size(size, sizes) for size in keys.shape)
    numel = batch * heads * _rounded(rows, _ROWS_TOGETHER) * (_rounded(head_size, _HEAD_SIZES_TOGETHER) + 1)
    expanded_bytes = 0 if key_heads == heads else 2 * batch * heads * key_rows * head_size * keys.element_size()
    return _FP32_BYTES * numel + expanded_bytes


def _rounded(size: int, unit: int) -> int:
    return -(-size // unit) * unit
