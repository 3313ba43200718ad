"""Rules for ops that compute: reductions, products, lookups, normalisation, attention, convolution and losses.

They are called as the rules in `batch_shapes`. The gradient of what all rows share, such as a weight, is SUM.
"""

from collections.abc import Sequence

from elixir_compile.graph.capture.batch_call import (
    SAME,
    SUM,
    Call,
    Conflict,
    Mixes,
    State,
    States,
    all_results,
    each,
    normal_dims,
    operands_of,
    shape_of,
)
from elixir_compile.graph.capture.batch_shapes import Rule, aligned, pointwise, slices_if_there
from elixir_compile.graph.capture.node_facts import tensor_of, value_of

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
        states = [each(0) if place < num_rows else SAME for place in range(len(_results(call)))]
        if any(name == "grad_input_mask" for name, _ in call.parameters):
            states[-1] = _of_mask_gradient(given)
        return tuple(states)

    return rule


def _of_mask_gradient(mask: object) -> State:
    shape = shape_of(mask)
    return each(0) if len(shape) == 4 and shape[0] != 1 else SUM


def _results(call: Call) -> Sequence[object]:
    value = value_of(call.node)
    return value if isinstance(value, (tuple, list)) else (value,)


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
