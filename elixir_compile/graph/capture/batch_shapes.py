"""Rules for ops that change shapes or choose places: the slices move along, or the op mixes the batch.

A rule is called for a call that reads at least one EACH value and no sum over micro-batches. It returns the state of
the result (of each result, if there are several), or raises `Mixes`. If the op reads a SAME value in slices, the rule
says so with `Call.slices_at`. `batch_rules` has the table from ops to rules.
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence

import torch
from torch import fx

from elixir_compile.graph.capture.batch_call import (
    SAME,
    SUM,
    Call,
    Mixes,
    States,
    all_results,
    each,
    normal_dims,
    operands_of,
    shape_of,
)
from elixir_compile.graph.capture.node_facts import as_node, tensor_of, value_of

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
        ndim, worked = ndim_of(call), dims(call)
        operands = [operand for operand in operands_of(call.node) if not _is_left_out(operand, ndim)]
        if any(state.is_each and state.dim in worked for state in map(call.state, operands)):
            raise Mixes(f"{noun} along the batch")
        return all_results(call.node, each(aligned(call, ((operand, ndim) for operand in operands))))

    return rule


def _is_left_out(operand: fx.Node, ndim: int) -> bool:
    """Return whether `operand` is an empty tensor of one dimension, which `cat` leaves out, as an empty cache."""
    return ndim > 1 and list(shape_of(operand)) == [0]


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
