"""The table of rules: for each op, how its result is made of its results in micro-batches.

An op without an entry, which is not pointwise, mixes the batch: it runs once, on whole tensors. Ops have the names that
torch prints, so an op that this version of torch lacks is an entry that is never used.
"""

from typing import Any

import torch
from torch import fx

from elixir_compile import compat
from elixir_compile.graph.capture import batch_families as families
from elixir_compile.graph.capture import batch_shapes as shapes
from elixir_compile.graph.capture.batch_call import SAME, SUM, Call, Mixes, State, States, each, operands_of
from elixir_compile.graph.capture.batch_shapes import Rule
from elixir_compile.graph.capture.node_facts import as_node
from elixir_compile.ir import Batched


def _names(names: str, library: str = "aten") -> list[str]:
    """Return the full name of each overload in `names`; a name without an overload is that of `default`."""
    return [f"{library}.{name}" if "." in name else f"{library}.{name}.default" for name in names.split()]


def _entries(rule: Rule, names: str, library: str = "aten") -> dict[str, Rule]:
    """Return `rule` for each op in `names`."""
    return dict.fromkeys(_names(names, library), rule)


def _mixing(why: str) -> Rule:
    def rule(call: Call) -> States:
        raise Mixes(why)

    return rule


RULES: dict[str, Rule] = {
    **_entries(
        shapes.pointwise,
        "alias detach copy _to_copy lift_fresh_copy expand native_dropout where.self _conj _neg_view complex",
    ),
    **_entries(
        shapes.pointwise,
        "native_dropout_backward softplus_backward hardtanh_backward leaky_relu_backward elu_backward "
        "hardswish_backward log_sigmoid_forward log_sigmoid_backward _prelu_kernel _prelu_kernel_backward "
        "masked_fill.Tensor floor_divide floor_divide.Scalar fill.Scalar fill.Tensor bernoulli bernoulli.p polar "
        "hardsigmoid_backward hardshrink_backward mish_backward softshrink_backward clone",
    ),
    **_entries(shapes.pointwise, "convert_element_type device_put fma", library="prims"),
    **_entries(shapes.pointwise, "all_reduce wait_tensor", library="_c10d_functional"),
    **_entries(shapes.like, "full_like zeros_like ones_like empty_like rand_like randn_like randint_like"),
    **_entries(shapes.new, "new_zeros new_ones new_full new_empty"),
    # Views, and ops that work along some dimensions.
    **_entries(shapes.reshaped, "view _unsafe_view reshape"),
    **_entries(shapes.moved(shapes.permuted), "permute"),
    **_entries(shapes.moved(shapes.transposed), "transpose.int"),
    **_entries(shapes.moved(lambda _, dim: dim), "view_as_real view_as_complex"),
    **_entries(shapes.moved(lambda call, dim: 1 - dim), "t"),
    **_entries(shapes.moved(shapes.squeezed), "squeeze squeeze.dim squeeze.dims"),
    **_entries(shapes.moved(shapes.unsqueezed), "unsqueeze"),
    **_entries(shapes.moved(shapes.selected), "select.int unbind.int"),
    **_entries(shapes.moved(shapes.unselected), "select_backward"),
    **_entries(shapes.moved(shapes.repeated), "repeat"),
    **_entries(shapes.along("a slice", shapes.dims_sliced), "slice.Tensor slice_backward"),
    **_entries(shapes.along("a slice", shapes.dim_of), "slice_scatter"),
    **_entries(shapes.select_scattered, "select_scatter"),
    **_entries(shapes.along("a split", shapes.dim_of), "split.Tensor split_with_sizes"),
    **_entries(shapes.along("a concatenation", shapes.dim_joined), "cat"),
    **_entries(shapes.along("padding", shapes.dims_padded), "constant_pad_nd"),
    **_entries(shapes.along("a reversal", shapes.dim_of), "flip"),
    **_entries(shapes.along("a shift", shapes.dim_of), "roll"),
    **_entries(shapes.along("a triangle", shapes.last_two), "tril triu"),
    **_entries(shapes.along("a sum of all rows before", shapes.dim_of), "cumsum cumprod logcumsumexp"),
    **_entries(shapes.along("a softmax", shapes.dim_of), "_softmax _safe_softmax _log_softmax"),
    **_entries(shapes.along("a softmax", shapes.dim_of), "_softmax_backward_data _log_softmax_backward_data"),
    **_entries(shapes.along("an order", shapes.dim_of), "sort sort.stable topk"),
    # Chosen places.
    **_entries(shapes.gathered, "gather"),
    **_entries(shapes.index_selected, "index_select"),
    **_entries(shapes.scattered, "scatter.src scatter.value scatter_add"),
    **_entries(shapes.indexed, "index.Tensor _unsafe_index.Tensor _unsafe_masked_index"),
    **_entries(shapes.index_put, "index_put _unsafe_index_put _unsafe_masked_index_put_accumulate"),
    **_entries(families.embedding, "embedding"),
    **_entries(families.embedding_backward, "embedding_dense_backward"),
    # Reductions and products.
    **_entries(families.reduction("a sum", SUM), "sum sum.dim_IntList count_nonzero count_nonzero.dim_IntList"),
    **_entries(families.reduction("a mean"), "mean mean.dim"),
    **_entries(families.reduction("a maximum"), "amax max max.dim argmax"),
    **_entries(families.reduction("a minimum"), "amin min min.dim argmin"),
    **_entries(families.reduction("a logical reduction"), "any any.dim any.dims all all.dim all.dims"),
    **_entries(families.reduction("a variance"), "var.correction var_mean.correction std.correction"),
    **_entries(families.reduction("a product"), "prod prod.dim_int"),
    **_entries(families.reduction("a norm"), "linalg_vector_norm"),
    **_entries(families.reduction("a logarithm of a sum"), "logsumexp"),
    **_entries(families.product("mk,kn->mn"), "mm addmm"),
    **_entries(families.product("bmk,bkn->bmn"), "bmm baddbmm"),
    **_entries(families.product("mk,k->m"), "mv addmv"),
    **_entries(families.product("k,k->"), "dot"),
    # Each row of the batch by itself.
    **_entries(families.norm, "native_layer_norm _fused_rms_norm"),
    **_entries(families.norm_backward, "native_layer_norm_backward _fused_rms_norm_backward"),
    **_entries(families.by_row("weight", "bias"), "native_group_norm"),
    **_entries(families.by_row("weight", results=(each(0), SUM, SUM)), "native_group_norm_backward"),
    **_entries(
        families.by_row("weight", "bias", "running_mean", "running_var", results=(each(0), SAME, SAME)),
        "_native_batch_norm_legit_no_training",
    ),
    **_entries(
        _mixing("statistics over the batch"),
        "native_batch_norm native_batch_norm_backward _native_batch_norm_legit _native_batch_norm_legit_functional "
        "_batch_norm_with_update _batch_norm_with_update_functional batch_norm_backward cudnn_batch_norm "
        "cudnn_batch_norm_backward",
    ),
    **_entries(families.attention(2, "attn_mask"), "_scaled_dot_product_flash_attention_for_cpu"),
    **_entries(families.attention(3, "attn_mask"), "_scaled_dot_product_flash_attention_for_cpu_backward"),
    **_entries(families.attention(2), "_scaled_dot_product_flash_attention"),
    **_entries(families.attention(3), "_scaled_dot_product_flash_attention_backward"),
    **_entries(
        families.attention(2, "attn_bias"),
        "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention",
    ),
    **_entries(
        families.attention(3, "attn_bias"),
        "_scaled_dot_product_efficient_attention_backward _scaled_dot_product_cudnn_attention_backward",
    ),
    **_entries(families.by_row("weight", "bias"), "convolution"),
    **_entries(families.by_row("weight", results=(each(0), SUM, SUM)), "convolution_backward"),
    **_entries(
        families.by_row(),
        "max_pool2d_with_indices max_pool2d_with_indices_backward max_pool3d_with_indices avg_pool1d avg_pool2d "
        "avg_pool2d_backward avg_pool3d avg_pool3d_backward _adaptive_avg_pool2d _adaptive_avg_pool2d_backward "
        "adaptive_max_pool2d adaptive_max_pool2d_backward upsample_nearest2d upsample_nearest2d.vec "
        "upsample_bilinear2d upsample_bilinear2d.vec upsample_bicubic2d upsample_bicubic2d.vec grid_sampler_2d",
    ),
    **_entries(
        families.by_row(), "_low_memory_max_pool_with_offsets _low_memory_max_pool_offsets_to_indices", library="prims"
    ),
    # Losses, which Inductor takes apart.
    **_entries(families.nll_loss, "nll_loss_forward nll_loss2d_forward"),
    **_entries(families.nll_loss_backward, "nll_loss_backward nll_loss2d_backward"),
    **_entries(
        families.pointwise_loss,
        "mse_loss mse_loss_backward smooth_l1_loss smooth_l1_loss_backward huber_loss huber_loss_backward "
        "binary_cross_entropy binary_cross_entropy_backward binary_cross_entropy_with_logits soft_margin_loss "
        "soft_margin_loss_backward",
    ),
}
"""The rule of each op, by the name of its overload."""

RANDOM = frozenset([*_names("rand randn"), *_names("inductor_random inductor_randint", library="prims")])
"""Ops that draw random numbers of a stated size: each micro-batch draws its own. Whether they do depends on the size
alone, so an op that repeats the draw of the forward in the backward draws the same numbers."""
CREATES = frozenset(_names("full zeros ones empty.memory_format new_zeros new_ones new_full new_empty"))
"""Ops that make a tensor of one value in a stated size."""
LOOKUPS = frozenset(_names("embedding"))
"""Ops that read a row of a table for each index. The table is the first argument, the indices are the second."""
_LINEAR = frozenset(
    _names(
        "neg clone alias detach expand view _unsafe_view reshape permute transpose.int t squeeze squeeze.dim "
        "squeeze.dims unsqueeze select.int slice.Tensor split.Tensor split_with_sizes cat sum sum.dim_IntList "
        "mul.Scalar div.Scalar slice_backward select_backward"
    )
)
"""Ops that map sums to sums if all that they read is SUM."""
_ADDS = ("aten.add.Tensor", "aten.sub.Tensor")
_SCATTERS = {
    "aten.embedding_dense_backward.default": 0,
    "aten.index_put.default": 2,
    "aten._unsafe_index_put.default": 2,
    "aten._unsafe_masked_index_put_accumulate.default": 3,
}
"""Ops that put values at places which all micro-batches share, with the place of the values among the arguments."""
_INTO_BASE = frozenset(_SCATTERS) - {"aten.embedding_dense_backward.default"}
"""Those of them that write the values into a copy of their first argument, which must be zeros."""
_SCALES = ("aten.mul.Tensor", "aten.mm.default", "aten.bmm.default")


def rule_for(target: Any) -> Rule | None:
    """Return the rule of the op `target`, None if it has none."""
    rule = RULES.get(str(target))
    return shapes.pointwise if rule is None and is_pointwise(target) else rule


def is_pointwise(target: Any) -> bool:
    """Return whether the op `target` computes each element by itself."""
    return compat.is_op_overload(target) and torch.Tag.pointwise in target.tags


def is_linear_in_sum(node: fx.Node, states: dict[fx.Node, State]) -> bool:
    """Return whether the result of `node`, which reads sums over the micro-batches and nothing EACH, is again a sum.

    A rounding to 16 bits is not linear: the sum is rounded once, behind the last micro-batch.
    """
    operands, target = operands_of(node), str(node.target)
    sums = [states[operand].batched is Batched.SUM for operand in operands]
    if any(states[operand].is_total for operand in operands):
        return False
    if target in _LINEAR:
        return all(sums)
    if target in _ADDS:
        return all(sums) and len(sums) == 2
    if target in _SCATTERS:
        is_of_values = sum(sums) == 1 and sums[operands.index(as_node(node.args[_SCATTERS[target]]))]
        return is_of_values and (target not in _INTO_BASE or shapes.starts_at_zeros(node.args[0]))
    if target == "aten.where.self":  # so torch 2.11 drops the gradients of padding before `index_put`
        others = [operand for operand, is_sum in zip(operands, sums, strict=True) if not is_sum]
        return len(others) == 2 and others[0] is node.args[0] and shapes.is_zeros(others[1])
    if target in _SCALES:
        return sum(sums) == 1
    return target == "aten.div.Tensor" and sums[0] and sum(sums) == 1 and operands[0] is node.args[0]
