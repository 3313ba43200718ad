"""The rules for ops in micro-batches: for each op, how its result is made of its results in micro-batches, or that the
op mixes the batch.
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from elixir_compile import compat
from elixir_compile.graph.capture.batch_call import (
    Call,
    Conflict,
    Mixes,
    all_results,
    normal_dims,
    operands_of,
    shape_of,
)
from elixir_compile.graph.capture.captured import SAME, SUM, State, States, each
from elixir_compile.graph.capture.node_facts import as_node, tensor_of, value_of
from elixir_compile.ir import Batched

# ----------------------------------------------------------------------------------------------------------------------
# Rules for ops that change shapes or choose places: the slices move along, or the op mixes the batch.
#
# A rule is called for a call that reads at least one EACH value and no sum over micro-batches. It returns the state of
# the result (of each result, if there are several), or raises `Mixes`. If the op reads a SAME value in slices, the rule
# says so with `Call.slices_at`. The table from ops to rules is at the end.


Rule = Callable[[Call], States]
ZEROS = "elixir_zeros"
"""The key in `node.meta` that marks zeros into which an op adds. If a later region does, they are an input of it."""
_FEWER = "it reads or writes fewer rows than the batch has"


def aligned(call: Call, operands: Iterable[tuple[object, int]]) -> int:
    """Return the dimension of the slices in a broadcast of `operands`, each with the number of dimensions to which it
    is broadcast.

    SAME operands that have the dimension are then read in slices.
    """
    operands = list(operands)
    places = {
        (state.dim + ndim - len(shape_of(operand)), shape_of(operand)[state.dim])
        for operand, ndim in operands
        if (state := call.state(operand)).is_each
    }
    if len(places) != 1:
        call.different_dims()
    ((dim, size),) = places
    for operand, ndim in operands:
        shape = shape_of(operand)
        place = dim - (ndim - len(shape))
        if call.state(operand).is_each or (0 <= place < len(shape) and shape[place] != 1):
            if shape[place] != size:
                raise Mixes(_FEWER)
            call.slices_at(operand, place)
    return dim


def ndim_of(call: Call) -> int:
    """Return the number of dimensions of the first result."""
    value = value_of(call.node)
    first = value[0] if isinstance(value, (tuple, list)) else value
    return first.ndim if isinstance(first, torch.Tensor) else 0


def pointwise(call: Call) -> States:
    """Rule of ops that compute each element of the result from the same element of the inputs, after broadcasting."""
    ndim = ndim_of(call)
    return all_results(call.node, each(aligned(call, ((operand, ndim) for operand in operands_of(call.node)))))


def reshaped(call: Call) -> States:
    """Rule of reshapes: they keep the slices if as many elements are in front of the dimension before and after."""
    dim = call.state(call.node.args[0]).dim
    old, new = shape_of(call.node.args[0]), shape_of(call.node)
    in_front, passed = math.prod(old[:dim]), 1
    for place, size in enumerate(new):
        if passed == in_front and size != 1:
            if size % call.batch == 0:
                return each(place)
            break
        passed *= size
    before, after = (", ".join(map(str, tensor_of(own).shape)) for own in (as_node(call.node.args[0]), call.node))
    raise Mixes(f"a reshape of [{before}] to [{after}] takes the slices along dimension {dim} apart")


def moved(place: Callable[[Call, int], int]) -> Rule:
    """Return the rule of a view that has the dimension `d` of its input as dimension `place(call, d)`."""
    return lambda call: all_results(call.node, each(place(call, call.state(call.node.args[0]).dim)))


def transposed(call: Call, dim: int) -> int:
    """Return the place of dimension `dim` in a transposition."""
    ndim = len(shape_of(call.node.args[0]))
    one, other = call["dim0"] % ndim, call["dim1"] % ndim
    return {one: other, other: one}.get(dim, dim)


def permuted(call: Call, dim: int) -> int:
    """Return the place of dimension `dim` in a permutation."""
    ndim = len(shape_of(call.node.args[0]))
    return [place % ndim for place in call["dims"]].index(dim)


def squeezed(call: Call, dim: int) -> int:
    """Return the place of dimension `dim` after dimensions of size 1 are dropped.

    A micro-batch may have one row, so an op that drops whatever dimension has the size 1 cannot be divided.
    """
    shape = shape_of(call.node.args[0])
    dropped = normal_dims(call.node.args[1], len(shape)) if len(call.node.args) > 1 else set(range(len(shape)))
    if dim in dropped:
        raise Mixes("it would drop the dimension of a micro-batch of one row")
    return dim - sum(place < dim and shape[place] == 1 for place in dropped)


def unsqueezed(call: Call, dim: int) -> int:
    """Return the place of dimension `dim` after a dimension of size 1 is added."""
    return dim + (call["dim"] % (len(shape_of(call.node.args[0])) + 1) <= dim)


def selected(call: Call, dim: int) -> int:
    """Return the place of dimension `dim` after one entry, or each, of another dimension is selected."""
    (chosen,) = dim_of(call)
    if chosen == dim:
        raise Mixes("it selects one row of the batch")
    return dim - (chosen < dim)


def unselected(call: Call, dim: int) -> int:
    """Return the place of dimension `dim` of the gradient of a selection in the gradient of its input."""
    return dim + (call["dim"] % len(call["input_sizes"]) <= dim)


def repeated(call: Call, dim: int) -> int:
    """Return the place of dimension `dim` after a repetition along other dimensions."""
    place = dim + len(call["repeats"]) - len(shape_of(call.node.args[0]))
    if call["repeats"][place] != 1:
        raise Mixes("a repetition along the batch")
    return place


def along(noun: str, dims: Callable[[Call], Collection[int]]) -> Rule:
    """Return the rule of an op that works along `dims` and treats all entries of other dimensions alike.

    Its operands and results have the same number of dimensions. `noun` names the op.
    """

    def rule(call: Call) -> States:
        ndim, worked, operands = ndim_of(call), dims(call), operands_of(call.node)
        if ndim > 1:  # `cat` leaves out an empty tensor of one dimension, as an empty cache
            operands = [operand for operand in operands if list(shape_of(operand)) != [0]]
        if any(state.is_each and state.dim in worked for state in map(call.state, operands)):
            raise Mixes(f"{noun} along the batch")
        return all_results(call.node, each(aligned(call, ((operand, ndim) for operand in operands))))

    return rule


def dim_joined(call: Call) -> set[int]:
    """Return the dimension along which `cat` joins its operands."""
    return normal_dims(call["dim"], ndim_of(call))


def dim_of(call: Call) -> set[int]:
    """Return the argument `dim` or `dims` as numbers from 0 on."""
    name = "dims" if any(known == "dims" for known, _ in call.parameters) else "dim"
    return normal_dims(call[name], len(shape_of(operands_of(call.node)[0])))


def dims_sliced(call: Call) -> set[int]:
    """Return the dimension along which a slice, or the gradient of a slice, is a part; none if it is all."""
    return set() if shape_of(call.node) == shape_of(call.node.args[0]) else dim_of(call)


def dims_padded(call: Call) -> set[int]:
    """Return the dimensions that `aten.constant_pad_nd` pads."""
    last = len(shape_of(call.node.args[0])) - 1
    return {last - place // 2 for place, size in enumerate(call["pad"]) if size}


def last_two(call: Call) -> set[int]:
    """Return the last two dimensions."""
    ndim = len(shape_of(call.node.args[0]))
    return {ndim - 2, ndim - 1}


def gathered(call: Call) -> States:
    """Rule of `gather`: slices of source and index, or of the index alone if it is sliced along `dim`."""
    source, index, (dim,) = call["self"], call["index"], dim_of(call)
    if call.state(source).is_each and call.state(source).dim == dim:
        raise Mixes("a gather along the batch")
    if call.state(index).is_each and call.state(index).dim == dim:
        if call.state(source).is_each:
            call.different_dims()
        return each(dim)
    ndim = len(shape_of(source))
    return each(aligned(call, [(source, ndim), (index, ndim)]))


def index_selected(call: Call) -> States:
    """Rule of `index_select`, whose index has one dimension."""
    source, index, (dim,) = call["self"], call["index"], dim_of(call)
    if not call.state(index).is_each and call.state(source).dim != dim:
        return each(call.state(source).dim)
    if call.state(source).is_each:
        raise Mixes("an index chooses among rows of the batch")
    return each(dim)


def select_scattered(call: Call) -> States:
    """Rule of `select_scatter`, whose `src` has all dimensions of the result but `dim`."""
    base, source, (dim,) = call["self"], call["src"], dim_of(call)
    state = call.state(base)
    slices = state.dim if state.is_each else (own := call.state(source).dim) + (dim <= own)
    if slices == dim:
        raise Mixes("it selects one row of the batch")
    call.slices_at(base, slices)
    call.slices_at(source, slices - (dim < slices))
    return each(slices)


def scattered(call: Call) -> States:
    """Rule of `scatter` and `scatter_add`: EACH along other dimensions than `dim`; along `dim` a sum into zeros."""
    base, index, (dim,) = call["self"], call["index"], dim_of(call)
    ndim = len(shape_of(base))
    chosen = [(operand, ndim) for operand in operands_of(call.node) if operand is not base]
    dims = {state.dim for state in map(call.state, operands_of(call.node)) if state.is_each}
    if dims != {dim}:
        return each(aligned(call, [(base, ndim), *chosen]))
    if call.state(base).is_each or call.state(index).dim != dim:
        raise Mixes("it writes into rows of the batch")
    aligned(call, chosen)
    return _sum_into(base, is_sum=str(call.node.target) == "aten.scatter_add.default")


def _sum_into(base: object, *, is_sum: bool) -> States:
    """Return SUM for an op that adds EACH values into `base`, which must be zeros."""
    if not is_sum:
        raise Mixes("it writes rows of the batch into places that other rows may write too")
    if not starts_at_zeros(base):
        raise Mixes("it adds rows of the batch to a value other than zeros")
    return SUM


def starts_at_zeros(base: object) -> bool:
    """Return whether `base`, to which an op adds a part per micro-batch, is zeros; if so, mark it for later regions."""
    if not (isinstance(base, fx.Node) and is_zeros(base)):
        return False
    base.meta[ZEROS] = True
    return True


_ZEROS = ("aten.zeros.default", "aten.new_zeros.default", "aten.zeros_like.default")
_FILLS = {
    "aten.full.default": 1,
    "aten.full_like.default": 1,
    "aten.new_full.default": 2,
    "aten.scalar_tensor.default": 0,
}
"""Ops that make a tensor of one value, with the place of the value among the arguments."""


def is_zeros(node: fx.Node) -> bool:
    """Return whether `node` makes a tensor of zeros, or is an input that an earlier region made so."""
    target = str(node.target)
    return (
        node.meta.get(ZEROS, False)
        or target in _ZEROS
        or (target in _FILLS and node.args[_FILLS[target]] in (0, 0.0, False))
    )


def indexed(call: Call) -> States:
    """Rule of indexing. EACH indices choose in a SAME source; SAME indices choose along other dimensions than the
    slices of the source."""
    source, mask = call["self"], call["mask"] if any(name == "mask" for name, _ in call.parameters) else None
    shape, indices = shape_of(source), _indices(call)
    places = [place for place, index in enumerate(call["indices"]) if index is not None]
    ndim = max(len(shape_of(index)) for index in indices)
    if places != list(range(places[0], places[-1] + 1)):
        raise Mixes("an index of dimensions that are apart")
    if call.state(source).is_each:
        dim = call.state(source).dim
        if dim in places or any(call.state(index).is_each for index in indices):
            raise Mixes("an index chooses among rows of the batch")
        found = dim if dim < places[0] else dim - len(places) + ndim
    elif places[0] != 0 and any(call.state(index).is_each for index in indices):
        raise Mixes("an index behind a dimension that is the same for all micro-batches")
    else:
        behind = len(shape) - len(places)
        chosen = [(index, ndim) for index in indices]
        return each(aligned(call, [*chosen, (mask, ndim + behind)] if mask is not None else chosen))
    if mask is not None:
        slices_if_there(call, mask, found - (ndim_of(call) - len(shape_of(mask))))
    return each(found)


def slices_if_there(call: Call, operand: object, place: int) -> None:
    """Require that `operand`, which is broadcast, is read in slices along its dimension `place` if it has one that is
    not broadcast."""
    if call.state(operand).is_each or (place >= 0 and shape_of(operand)[place] != 1):
        call.slices_at(operand, place)


def _indices(call: Call) -> Sequence[fx.Node]:
    indices = [index for index in call["indices"] if isinstance(index, fx.Node)]
    if any(tensor_of(index).dtype in (torch.bool, torch.uint8) for index in indices):
        raise Mixes("the number of its results depends on the rows of the batch")
    return indices


def index_put(call: Call) -> States:
    """Rule of `index_put` and its relatives: each micro-batch adds its values into zeros, which makes a sum.

    Values have the dimensions of the indices, then those of the base that are not indexed.
    """
    base, values, indices = call["self"], call["values"], _indices(call)
    is_masked = any(name == "mask" for name, _ in call.parameters)
    if call.state(base).is_each or len(indices) != len(call["indices"]):
        raise Mixes("it writes into rows of the batch")
    ndim = max(len(shape_of(index)) for index in indices)
    whole = ndim + len(shape_of(base)) - len(indices)
    masks = [(call["mask"], whole)] if is_masked else []
    if aligned(call, [*((index, ndim) for index in indices), *masks, (values, whole)]) >= ndim:
        raise Mixes("its values have slices along a dimension that is not indexed")
    return _sum_into(base, is_sum=is_masked or call["accumulate"])


def like(call: Call) -> States:
    """Rule of tensors in the shape of another: random or of one value."""
    return each(call.state(call.node.args[0]).dim)


def new(call: Call) -> States:
    """Rule of tensors of a stated size, which take only dtype and device from a value with slices."""
    return SAME


# ----------------------------------------------------------------------------------------------------------------------
# Rules for ops that compute: reductions, products, lookups, normalisation, attention, convolution and losses.
#
# They are called as the rules above. The gradient of what all rows share, such as a weight, is SUM.


MEAN, SUM_OF_LOSSES = 1, 2
"""Values of the argument `reduction` of losses; 0 is no reduction."""
_OWN_WEIGHTS = "each micro-batch has weights of its own"


def reduction(noun: str, result: State | None = None) -> Rule:
    """Return the rule of a reduction over the argument `dim`; over the batch its result is `result`, or it mixes."""

    def rule(call: Call) -> States:
        dim, ndim = call.state(call.node.args[0]).dim, len(shape_of(call.node.args[0]))
        names = [name for name, _ in call.parameters]
        over = normal_dims(call["dim"] if "dim" in names else None, ndim)
        if dim in over:
            if result is None:
                raise Mixes(f"{noun} over the batch")
            return all_results(call.node, result)
        is_kept = "keepdim" in names and call["keepdim"]
        return all_results(call.node, each(dim if is_kept else dim - sum(place < dim for place in over)))

    return rule


def product(labels: str) -> Rule:
    """Return the rule of a product whose dimensions have the names `labels`, as in `einsum`: `mk,kn->mn`.

    An operand in front of the two factors is added to the product.
    """
    factors, result = labels.split("->")
    names = factors.split(",")

    def rule(call: Call) -> States:
        *added, left, right = operands_of(call.node)
        pairs = ((left, names[0]), (right, names[1]))
        found = {name[state.dim] for operand, name in pairs if (state := call.state(operand)).is_each}
        if len(found) != 1:
            raise Conflict("a product of rows of the batch with other rows" if found else "rows are added to a product")
        (label,) = found
        for operand, name in pairs:
            if label in name:
                call.slices_at(operand, name.index(label))
        if label in result:
            dim = result.index(label)
            for operand in added:
                slices_if_there(call, operand, dim - (len(result) - len(shape_of(operand))))
            return each(dim)
        if added:
            raise Mixes("a value is added to a sum over the batch")
        return SUM

    return rule


def embedding(call: Call) -> States:
    """Rule of `embedding`: each index reads its row of the table by itself."""
    if call.state(call["weight"]).is_each:
        raise Conflict(_OWN_WEIGHTS)
    return each(call.state(call["indices"]).dim)


def embedding_backward(call: Call) -> States:
    """Rule of the gradient of the table of an embedding, which is a sum over the indices."""
    grad, indices = call["grad_output"], call["indices"]
    ndim = len(shape_of(indices))
    if call["scale_grad_by_freq"]:
        raise Mixes("it counts how often the batch has an index")
    if len(shape_of(grad)) != ndim + 1:
        raise Mixes("indices and gradients of other shapes")
    if call.state(grad).is_each and call.state(grad).dim == ndim and not call.state(indices).is_each:
        return each(1)
    if aligned(call, [(grad, ndim + 1), (indices, ndim)]) == ndim:
        call.different_dims()
    return SUM


def norm(call: Call) -> States:
    """Rule of layer norm and RMS norm: statistics of each row by itself."""
    source = call.node.args[0]
    dim = call.state(source).dim
    if any(call.state(operand).is_each for operand in operands_of(call.node) if operand is not source):
        raise Conflict(_OWN_WEIGHTS)
    if dim >= len(shape_of(source)) - len(call["normalized_shape"]):
        raise Mixes("statistics over the batch")
    return all_results(call.node, each(dim))


def norm_backward(call: Call) -> States:
    """Rule of layer norm and RMS norm backwards, whose results are the gradients of the input, weight and bias.

    The kernel of torch 2.13 for CPUs reads mean and deviation as if their rows were next to each other in memory, which
    they are not in slices along a later dimension.
    """
    has_bias = any(name == "bias" for name, _ in call.parameters)
    weights = [call["weight"], call["bias"] if has_bias else None]
    rows = [operand for operand in operands_of(call.node) if not any(operand is weight for weight in weights)]
    ndim = len(shape_of(rows[0]))
    if any(call.state(weight).is_each for weight in weights):
        raise Conflict(_OWN_WEIGHTS)
    dim = aligned(call, ((operand, ndim) for operand in rows))
    if dim >= ndim - len(call["normalized_shape"]):
        raise Mixes("statistics over the batch")
    if any(size != 1 for size in shape_of(rows[0])[:dim]):
        raise Mixes("its statistics would be apart in memory")
    return (each(dim), *(SUM for _ in call["output_mask"][1:]))


def by_row(*shared: str, results: tuple[State, ...] = ()) -> Rule:
    """Return the rule of an op that treats each entry of dimension 0 alike, such as convolution and pooling.

    The arguments called `shared` have no such dimension. The results are EACH, or as `results` says, one for each.
    """

    def rule(call: Call) -> States:
        weights = [call[name] for name in shared]
        if any(call.state(weight).is_each for weight in weights):
            raise Conflict(_OWN_WEIGHTS)
        for operand in operands_of(call.node):
            if not any(operand is weight for weight in weights):
                call.slices_at(operand, 0)
        return results or all_results(call.node, each(0))

    return rule


def attention(num_rows: int, mask: str = "") -> Rule:
    """Return the rule of an attention kernel, whose first `num_rows` results have a row for each row of the batch.

    The argument called `mask` has, if it has four dimensions, a row for each row of the batch, or one for all.
    """

    def rule(call: Call) -> States:
        if call["dropout_p"]:
            raise Mixes("a kernel that draws the dropout of all rows")
        given = call[mask] if mask else None
        for operand in operands_of(call.node):
            shape = shape_of(operand)
            has_rows = (len(shape) == 4 and shape[0] != 1) if operand is given else len(shape) > 2
            if has_rows:
                call.slices_at(operand, 0)
            elif call.state(operand).is_each:
                call.different_dims()
        value = value_of(call.node)
        num_results = len(value) if isinstance(value, (tuple, list)) else 1
        states = [each(0) if place < num_rows else SAME for place in range(num_results)]
        if any(name == "grad_input_mask" for name, _ in call.parameters):
            shape = shape_of(given)
            states[-1] = each(0) if len(shape) == 4 and shape[0] != 1 else SUM
        return tuple(states)

    return rule


def nll_loss(call: Call) -> States:
    """Rule of the negative log likelihood, and of the weight of all targets."""
    if call["reduction"] == MEAN:
        raise Mixes("a mean over the batch")
    call.slices_at(call["self"], 0)
    call.slices_at(call["target"], 0)
    return (SUM, SUM) if call["reduction"] == SUM_OF_LOSSES else (each(0), SAME)


def nll_loss_backward(call: Call) -> States:
    """Rule of the gradient of the negative log likelihood: a mean divides by the weight of the whole batch, which the
    op is given."""
    call.slices_at(call["self"], 0)
    call.slices_at(call["target"], 0)
    if len(shape_of(call["grad_output"])):
        call.slices_at(call["grad_output"], 0)
    return each(0)


def pointwise_loss(call: Call) -> States:
    """Rule of losses of each element by itself, such as `mse_loss`, and of their gradients."""
    if call["reduction"] == MEAN:
        raise Mixes("a mean over the batch")
    if len(tensor_of(call.node).shape):
        return pointwise(call)
    operands = operands_of(call.node)
    ndim = max(len(shape_of(operand)) for operand in operands)
    aligned(call, ((operand, ndim) for operand in operands))
    return SUM


# ----------------------------------------------------------------------------------------------------------------------
# The table of rules: for each op, how its result is made of its results in micro-batches.
#
# An op without an entry, which is not pointwise, mixes the batch: it runs once, on whole tensors. Ops have the names
# that torch prints, so an op that this version of torch lacks is an entry that is never used.


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
        pointwise,
        "alias detach copy _to_copy lift_fresh_copy expand native_dropout where.self _conj _neg_view complex",
    ),
    **_entries(
        pointwise,
        "native_dropout_backward softplus_backward hardtanh_backward leaky_relu_backward elu_backward "
        "hardswish_backward log_sigmoid_forward log_sigmoid_backward _prelu_kernel _prelu_kernel_backward "
        "masked_fill.Tensor floor_divide floor_divide.Scalar fill.Scalar fill.Tensor bernoulli bernoulli.p polar "
        "hardsigmoid_backward hardshrink_backward mish_backward softshrink_backward clone",
    ),
    **_entries(pointwise, "convert_element_type device_put fma", library="prims"),
    **_entries(pointwise, "all_reduce wait_tensor", library="_c10d_functional"),
    **_entries(like, "full_like zeros_like ones_like empty_like rand_like randn_like randint_like"),
    **_entries(new, "new_zeros new_ones new_full new_empty"),
    # Views, and ops that work along some dimensions.
    **_entries(reshaped, "view _unsafe_view reshape"),
    **_entries(moved(permuted), "permute"),
    **_entries(moved(transposed), "transpose.int"),
    **_entries(moved(lambda _, dim: dim), "view_as_real view_as_complex"),
    **_entries(moved(lambda call, dim: 1 - dim), "t"),
    **_entries(moved(squeezed), "squeeze squeeze.dim squeeze.dims"),
    **_entries(moved(unsqueezed), "unsqueeze"),
    **_entries(moved(selected), "select.int unbind.int"),
    **_entries(moved(unselected), "select_backward"),
    **_entries(moved(repeated), "repeat"),
    **_entries(along("a slice", dims_sliced), "slice.Tensor slice_backward"),
    **_entries(along("a slice", dim_of), "slice_scatter"),
    **_entries(select_scattered, "select_scatter"),
    **_entries(along("a split", dim_of), "split.Tensor split_with_sizes"),
    **_entries(along("a concatenation", dim_joined), "cat"),
    **_entries(along("padding", dims_padded), "constant_pad_nd"),
    **_entries(along("a reversal", dim_of), "flip"),
    **_entries(along("a shift", dim_of), "roll"),
    **_entries(along("a triangle", last_two), "tril triu"),
    **_entries(along("a sum of all rows before", dim_of), "cumsum cumprod logcumsumexp"),
    **_entries(along("a softmax", dim_of), "_softmax _safe_softmax _log_softmax"),
    **_entries(along("a softmax", dim_of), "_softmax_backward_data _log_softmax_backward_data"),
    **_entries(along("an order", dim_of), "sort sort.stable topk"),
    # Chosen places.
    **_entries(gathered, "gather"),
    **_entries(index_selected, "index_select"),
    **_entries(scattered, "scatter.src scatter.value scatter_add"),
    **_entries(indexed, "index.Tensor _unsafe_index.Tensor _unsafe_masked_index"),
    **_entries(index_put, "index_put _unsafe_index_put _unsafe_masked_index_put_accumulate"),
    **_entries(embedding, "embedding"),
    **_entries(embedding_backward, "embedding_dense_backward"),
    # Reductions and products.
    **_entries(reduction("a sum", SUM), "sum sum.dim_IntList count_nonzero count_nonzero.dim_IntList"),
    **_entries(reduction("a mean"), "mean mean.dim"),
    **_entries(reduction("a maximum"), "amax max max.dim argmax"),
    **_entries(reduction("a minimum"), "amin min min.dim argmin"),
    **_entries(reduction("a logical reduction"), "any any.dim any.dims all all.dim all.dims"),
    **_entries(reduction("a variance"), "var.correction var_mean.correction std.correction"),
    **_entries(reduction("a product"), "prod prod.dim_int"),
    **_entries(reduction("a norm"), "linalg_vector_norm"),
    **_entries(reduction("a logarithm of a sum"), "logsumexp"),
    **_entries(product("mk,kn->mn"), "mm addmm"),
    **_entries(product("bmk,bkn->bmn"), "bmm baddbmm"),
    **_entries(product("mk,k->m"), "mv addmv"),
    **_entries(product("k,k->"), "dot"),
    # Each row of the batch by itself.
    **_entries(norm, "native_layer_norm _fused_rms_norm"),
    **_entries(norm_backward, "native_layer_norm_backward _fused_rms_norm_backward"),
    **_entries(by_row("weight", "bias"), "native_group_norm"),
    **_entries(by_row("weight", results=(each(0), SUM, SUM)), "native_group_norm_backward"),
    **_entries(
        by_row("weight", "bias", "running_mean", "running_var", results=(each(0), SAME, SAME)),
        "_native_batch_norm_legit_no_training",
    ),
    **_entries(
        _mixing("statistics over the batch"),
        "native_batch_norm native_batch_norm_backward _native_batch_norm_legit _native_batch_norm_legit_functional "
        "_batch_norm_with_update _batch_norm_with_update_functional batch_norm_backward cudnn_batch_norm "
        "cudnn_batch_norm_backward",
    ),
    **_entries(attention(2, "attn_mask"), "_scaled_dot_product_flash_attention_for_cpu"),
    **_entries(attention(3, "attn_mask"), "_scaled_dot_product_flash_attention_for_cpu_backward"),
    **_entries(attention(2), "_scaled_dot_product_flash_attention"),
    **_entries(attention(3), "_scaled_dot_product_flash_attention_backward"),
    **_entries(
        attention(2, "attn_bias"),
        "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention",
    ),
    **_entries(
        attention(3, "attn_bias"),
        "_scaled_dot_product_efficient_attention_backward _scaled_dot_product_cudnn_attention_backward",
    ),
    **_entries(by_row("weight", "bias"), "convolution"),
    **_entries(by_row("weight", results=(each(0), SUM, SUM)), "convolution_backward"),
    **_entries(
        by_row(),
        "max_pool2d_with_indices max_pool2d_with_indices_backward max_pool3d_with_indices avg_pool1d avg_pool2d "
        "avg_pool2d_backward avg_pool3d avg_pool3d_backward _adaptive_avg_pool2d _adaptive_avg_pool2d_backward "
        "adaptive_max_pool2d adaptive_max_pool2d_backward upsample_nearest2d upsample_nearest2d.vec "
        "upsample_bilinear2d upsample_bilinear2d.vec upsample_bicubic2d upsample_bicubic2d.vec grid_sampler_2d",
    ),
    **_entries(by_row(), "_low_memory_max_pool_with_offsets _low_memory_max_pool_offsets_to_indices", library="prims"),
    # Losses, which Inductor takes apart.
    **_entries(nll_loss, "nll_loss_forward nll_loss2d_forward"),
    **_entries(nll_loss_backward, "nll_loss_backward nll_loss2d_backward"),
    **_entries(
        pointwise_loss,
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
    return pointwise if rule is None and is_pointwise(target) else rule


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
        return is_of_values and (target not in _INTO_BASE or starts_at_zeros(node.args[0]))
    if target == "aten.where.self":  # so torch 2.11 drops the gradients of padding before `index_put`
        others = [operand for operand, is_sum in zip(operands, sums, strict=True) if not is_sum]
        return len(others) == 2 and others[0] is node.args[0] and is_zeros(others[1])
    if target in _SCALES:
        return sum(sums) == 1
    return target == "aten.div.Tensor" and sums[0] and sum(sums) == 1 and operands[0] is node.args[0]
