"""Compute the cross-entropy of a captured projection in chunks over tokens, and add values to a capture that later
plans or other ranks need.
"""

import inspect
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.nn import functional

from elixir_compile import compat
from elixir_compile.graph.capture.node_facts import source_line, source_of
from elixir_compile.ir.graph import LossRegion

# ----------------------------------------------------------------------------------------------------------------------
# Compute the cross-entropy of a projection in chunks over tokens, so that no [tokens, classes] tensor exists.
#
#     forward    for chunk c:   x = h[c] @ w.T + b;   lse[c] = log(sum(exp(x)));   loss[c] = lse[c] - x[target]
#                saved: h, w, b, targets, lse
#     backward   for chunk c:   x = w @ h[c].T + b;   d = (exp(x - lse[c]) - onehot) * g
#                               dh[c] = d.T @ w;   dw = dw + d @ h[c];   db = db + sum(d)
#
# torch traces the function into plain ATen ops, unrolled over the chunks. In the forward and in the backward, the
# logits of a chunk are dead before the logits of the next chunk are computed.
#
# [Note: One chunk after the other] The formulas do not order the chunks of the backward, and Inductor fused their
# softmaxes into one kernel, for which the logits of all chunks existed at once. So the dh of a chunk is written over
# its h, and the next chunk reads its h from the result. Only the logits of the first chunk do not depend on the
# incoming gradient. The partitioner might save them for the backward if both halves had the same `mm`, so the forward
# computes `h @ w.T` and the backward `w @ h.T`. After `w @ h.T`, `d @ h` needs no transposed copy either.
#
# [Note: Tolerance] The arithmetic for one token is the same as in torch: the same dtypes, and the same roundings to a
# 16-bit dtype. Two things differ: `x - lse` replaces `x - max - log(sum)`, and the sums of dw and db run over the
# tokens of a chunk, then over chunks. Against the unchunked step, errors relative to the largest element were at most
# 3e-7 in fp32, for the loss and every gradient. If the projection is bf16, dw and db are rounded to bf16 after each
# chunk instead of once: for 4 chunks the error was 6e-3, the spacing of bf16. A bf16 loss may differ by one spacing, as
# the losses of the tokens are added in fp32.


class LossForm(NamedTuple):
    """The constants of a chunked cross-entropy: a named tuple, which fx can print as an argument of a node."""

    num_chunks: int
    is_mean: bool
    """If True, the loss is divided by the number of tokens that count; if False, it is the sum."""
    ignore_index: int
    label_smoothing: float
    logits_dtype: torch.dtype
    """Dtype of the result of the projection, which under autocast differs from the dtype of its operands."""
    loss_dtype: torch.dtype
    """Dtype of the logits that the cross-entropy reads."""


def chunked_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor, form: LossForm
) -> torch.Tensor:
    """Return the cross-entropy of `hidden @ weight.T + bias` against `targets`, a scalar of `form.loss_dtype`.

    Shapes: hidden [tokens, width], weight [classes, width], bias [classes], targets [tokens] of an integer dtype. The
    sizes of chunks differ by at most one token. The backward cannot be differentiated. See [Note: Tolerance].
    """
    return _ChunkedCrossEntropy.apply(hidden, weight, bias, targets, form)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        form: LossForm,
    ) -> torch.Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            states, columns, added = _cast((hidden, weight, bias), form.logits_dtype)
            counts = _counts(targets, form)
            indices = torch.where(counts, targets, 0).to(torch.int64)
            losses, sums = [], []  # the loss and the log-sum-exp of each token
            for start, length in _chunks(hidden.shape[0], form.num_chunks):
                rows, classes = states.narrow(0, start, length), columns.t()
                logits = rows @ classes if added is None else torch.addmm(added, rows, classes)
                logits = _widened(logits, form)
                at_target = logits.gather(1, indices.narrow(0, start, length).unsqueeze(1))
                average = logits.mean(1, keepdim=True) if form.label_smoothing else None
                top = logits.amax(1, keepdim=True)
                lse = (logits - top).exp().sum(1, keepdim=True).log() + top
                own = _rounded(lse - at_target, form)
                if average is not None:
                    own = (1 - form.label_smoothing) * own + form.label_smoothing * (lse - average)
                losses.append(own.squeeze(1))
                sums.append(lse.squeeze(1))
            per_token, all_sums = torch.where(counts, torch.cat(losses), 0.0), torch.cat(sums)
            loss = per_token.sum()
            if form.is_mean:
                loss = loss / _counts(targets, form).sum()
        ctx.save_for_backward(hidden, weight, bias, targets, all_sums)
        ctx.form = form
        return loss.to(form.loss_dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  the decorator hides the names of arguments
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        *operands, targets, sums = ctx.saved_tensors
        form, wanted = ctx.form, ctx.needs_input_grad[:3]
        with torch.autocast(operands[0].device.type, enabled=False):
            per_token = grad.to(sums.dtype)
            counts = _counts(targets, form)
            if form.is_mean:
                per_token = per_token / counts.sum()
            # Zero for an ignored target, even if all targets are ignored and the mean divides by zero.
            per_token = torch.where(counts, per_token, 0.0)
            states, weight, bias = _cast(operands, form.logits_dtype)
            weight_grad, bias_grad = None, None
            for start, length in _chunks(states.shape[0], form.num_chunks):
                rows = states.narrow(0, start, length)
                logits = weight @ rows.t() if bias is None else torch.addmm(bias.unsqueeze(1), weight, rows.t())
                tokens = [token.narrow(0, start, length) for token in (targets, sums, per_token)]
                own = _logits_gradient(logits, tokens, form)
                del logits
                if wanted[1]:
                    # `addmm` adds to the sum without a second tensor of the weight's size.
                    weight_grad = own @ rows if weight_grad is None else torch.addmm(weight_grad, own, rows)
                if wanted[2]:
                    bias_grad = own.sum(1) if bias_grad is None else bias_grad + own.sum(1)
                # Even if dh is not wanted: see [Note: One chunk after the other].
                states = states.slice_scatter(own.t() @ weight, 0, start, start + length)
                del own
            found = (states if wanted[0] else None, weight_grad, bias_grad)
            grads = [
                None if own is None or operand is None else own.to(operand.dtype)
                for own, operand in zip(found, operands, strict=True)
            ]
        return *grads, None, None


def _logits_gradient(logits: torch.Tensor, tokens: Sequence[torch.Tensor], form: LossForm) -> torch.Tensor:
    """Return the gradient of `logits` [classes, tokens], in their dtype."""
    targets, sums, per_token = tokens
    indices = torch.where(_counts(targets, form), targets, 0).to(torch.int64).unsqueeze(0)
    at_target = _probabilities(logits.gather(0, indices), sums, form) - (1 - form.label_smoothing)
    probabilities = _probabilities(logits, sums, form)
    if form.label_smoothing:
        share = form.label_smoothing / logits.shape[0]
        at_target, probabilities = at_target - share, probabilities - share
    grad = (probabilities * per_token).to(logits.dtype)
    return grad.scatter(0, indices, (at_target * per_token).to(logits.dtype))


def _probabilities(logits: torch.Tensor, sums: torch.Tensor, form: LossForm) -> torch.Tensor:
    return _rounded(_widened(logits, form) - sums, form).exp()


def _widened(logits: torch.Tensor, form: LossForm) -> torch.Tensor:
    """Return `logits` in the dtype of the sums: torch adds 16-bit logits in fp32."""
    return logits.to(form.loss_dtype).to(torch.promote_types(form.loss_dtype, torch.float32))


def _rounded(values: torch.Tensor, form: LossForm) -> torch.Tensor:
    """Return `values` rounded to `form.loss_dtype`, as torch rounds log-probabilities."""
    return values.to(form.loss_dtype).to(values.dtype)


def _counts(targets: torch.Tensor, form: LossForm) -> torch.Tensor:
    """Return a mask, [tokens], that is False for the ignored targets."""
    return targets != form.ignore_index


def _cast(tensors: Sequence[torch.Tensor | None], dtype: torch.dtype) -> list[Any]:
    return [None if tensor is None else tensor.to(dtype) for tensor in tensors]


def _chunks(num_tokens: int, num_chunks: int) -> Iterator[tuple[int, int]]:
    """Yield start and length of each chunk; skip chunks without tokens if `num_tokens` is a constant above 0.

    While torch traces a dynamic number of tokens, all of them are a `SymInt`.
    """
    bounds = [index * num_tokens // num_chunks for index in range(num_chunks + 1)]
    for start, stop in pairwise(bounds):
        if isinstance(num_tokens, int) and start == stop and num_tokens:
            continue
        yield start, stop - start


# ----------------------------------------------------------------------------------------------------------------------
# Find the projection and cross-entropy of a Dynamo graph, and replace them by a cross-entropy in chunks.
#
#     before   linear(h, w, b) -> float, slices of tokens, view, ... -> cross_entropy(., targets)
#     after    slices of tokens of h, reshape -> chunked_cross_entropy(h, w, b, targets, form)
#
# The projection is `linear`, or a matrix product with a 2-D right operand. Between projection and loss there may be
# view, reshape, flatten, contiguous, upcasts and slices of tokens. The loss is `cross_entropy` with reduction mean or
# sum and one integer target for each token.
#
# A loss is left alone if the result in chunks would differ or is not known to be equal: if the logits have another user
# or are an output, and for class weights, probabilities as targets, reduction none, classes in another dimension than
# the last of two, scaled or clipped logits, and any write in place between projection and loss.


_PRODUCTS = {operator.matmul, torch.matmul, torch.mm, "matmul", "mm"}
_VIEWS = {torch.reshape, "view", "reshape"}
_FLATTENS = {torch.flatten, "flatten"}
_COPIES = {"contiguous", "float", "double", "to"}
_WRITES = {
    operator.setitem,
    *(getattr(operator, f"i{name}") for name in ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow")),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """The nodes of a loss region: its inputs, and the nodes from the projection to the loss."""

    hidden: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    is_product: bool
    """If True, `weight` is [width, classes], the right operand of a matrix product."""
    projection: fx.Node
    between: tuple[fx.Node, ...]
    loss: fx.Node
    arguments: dict[str, Any]
    """The arguments of the cross-entropy, by name."""


def find_loss(gm: fx.GraphModule) -> LossRegion | None:
    """Return the loss region of `gm` with the most bytes of logits, None if it has no region; do not change `gm`."""
    regions: list[LossRegion] = []
    for loss in gm.graph.find_nodes(op="call_function", target=functional.cross_entropy):
        found = _match(loss)
        if found is not None:
            nodes = (found.projection, *found.between)
            logits = list(map(_value, nodes))
            region = LossRegion(
                name=loss.name,
                nodes=(*(node.name for node in nodes), loss.name),
                num_tokens=compat.evaluate_size(logits[-1].shape[0], {}),
                num_classes=logits[-1].shape[1],
                logits_bytes=max(compat.evaluate_size(value.numel(), {}) * value.element_size() for value in logits),
                source=source_line(loss),
            )
            regions.append(region)
    return max(regions, key=lambda region: region.logits_bytes, default=None)


def chunk_loss(gm: fx.GraphModule, region: LossRegion, num_chunks: int) -> None:
    """Replace `region` of `gm` in place by a cross-entropy in `num_chunks` chunks.

    `region` was found in `gm` or in the graph of which `gm` is a copy. Loss and gradients are equal up to rounding, see
    [Note: Tolerance] in `graph.capture.loss`. A dynamic number of tokens is split when the graph runs. Raises
    ValueError if `gm` has no such region.
    """
    graph = gm.graph
    loss = next((node for node in graph.nodes if node.name == region.name), None)
    found = None if loss is None else _match(loss)
    if found is None or num_chunks < 1:
        raise ValueError(f"cannot split {region.name!r} of this graph into {num_chunks} chunks")
    arguments = found.arguments
    form = LossForm(
        num_chunks=num_chunks,
        is_mean=arguments["reduction"] == "mean",
        ignore_index=arguments["ignore_index"],
        label_smoothing=float(arguments["label_smoothing"]),
        logits_dtype=_value(found.projection).dtype,
        loss_dtype=_value(found.loss).dtype,
    )
    with graph.inserting_before(found.loss):
        # The nodes between projection and loss, applied to the hidden states, give [tokens of the loss, width].
        hidden, width = found.hidden, _value(found.weight).shape[0 if found.is_product else 1]
        for node in found.between:
            if node.target in _VIEWS:
                hidden = graph.call_function(torch.reshape, (hidden, (*_sizes(node)[:-1], width)))
            elif node.target not in _COPIES:
                new = {source_of(node): hidden}
                hidden = graph.node_copy(node, lambda source, new=new: new.get(source, source))
        weight = graph.call_function(torch.t, (found.weight,)) if found.is_product else found.weight
        chunked = graph.call_function(chunked_cross_entropy, (hidden, weight, found.bias, arguments["target"], form))
    chunked.meta = dict(found.loss.meta)
    found.loss.replace_all_uses_with(chunked)
    for node in (found.loss, *reversed(found.between), found.projection):
        graph.erase_node(node)
    graph.lint()
    gm.recompile()


def _match(loss: fx.Node) -> _Found | None:
    """Return the region that ends at `loss`, None if it cannot be split into chunks with the same result."""
    arguments = _loss_arguments(loss)
    if arguments is None:
        return None
    between: list[fx.Node] = []
    node, user = arguments["input"], loss
    while isinstance(node, fx.Node) and set(node.users) == {user} and _value(node) is not None:
        operands = _operands(node)
        if operands is not None:
            hidden, weight, bias, is_product = operands
            found = _Found(
                hidden=hidden,
                weight=weight,
                bias=bias,
                is_product=is_product,
                projection=node,
                between=tuple(reversed(between)),
                loss=loss,
                arguments=arguments,
            )
            return found if _is_undisturbed(found) else None
        if not _keeps_rows(node):
            return None
        between.append(node)
        node, user = node.args[0], node
    return None


def _loss_arguments(loss: fx.Node) -> dict[str, Any] | None:
    """Return the arguments of the cross-entropy `loss` by name, None if its arguments do not allow chunks."""
    if loss.target is not functional.cross_entropy or _value(loss) is None:
        return None
    bound = inspect.signature(functional.cross_entropy).bind(*loss.args, **loss.kwargs)
    bound.apply_defaults()
    given = bound.arguments
    logits, targets = _value(given["input"]), _value(given["target"])
    is_plain = (
        logits is not None
        and logits.ndim == 2
        and targets is not None
        and targets.ndim == 1
        and not targets.dtype.is_floating_point
        and given["reduction"] in ("mean", "sum")
        and all(given[name] is None for name in ("weight", "size_average", "reduce"))
        and type(given["ignore_index"]) is int
        and type(given["label_smoothing"]) in (int, float)
    )
    return dict(given) if is_plain else None


def _operands(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None, bool] | None:
    """Return hidden, weight, bias and whether the weight is a right operand; None if `node` is no projection."""
    is_product = node.target in _PRODUCTS
    if is_product and len(node.args) == 2 and not node.kwargs:
        hidden, weight, bias = *node.args, None
    elif node.target is functional.linear:
        given = dict(zip(("input", "weight", "bias"), node.args, strict=False)) | node.kwargs
        hidden, weight, bias = given.get("input"), given.get("weight"), given.get("bias")
    else:
        return None
    given_hidden, given_weight = _value(hidden), _value(weight)
    if (
        isinstance(hidden, fx.Node)
        and isinstance(weight, fx.Node)
        and (bias is None or isinstance(bias, fx.Node))
        and given_hidden is not None
        and given_weight is not None
        and given_hidden.ndim >= 2
        and given_weight.ndim == 2
        and all(isinstance(size, int) for size in given_weight.shape)
        and _value(node).dtype.is_floating_point
    ):
        return hidden, weight, bias, is_product
    return None


def _keeps_rows(node: fx.Node) -> bool:
    """Return whether the result of `node` is rows of its first argument, unchanged and in order."""
    base = _value(node.args[0]) if node.args else None
    value = _value(node)
    if base is None or value.ndim < 2 or value.shape[-1] != base.shape[-1] or value.device != base.device:
        return False
    if node.target in _COPIES:
        return torch.promote_types(base.dtype, value.dtype) == value.dtype
    if value.dtype != base.dtype:
        return False
    if node.target in _VIEWS:
        return not node.kwargs and all(isinstance(size, int | fx.Node) for size in _sizes(node))
    if node.target is not operator.getitem:
        return node.target in _FLATTENS
    # Slices with constant bounds that take all of the last dimension.
    index: Any = node.args[1]
    entries = index if isinstance(index, tuple) else (index,)
    bounds = [
        (entry.start, entry.stop, entry.step) if isinstance(entry, slice) else ("",)
        for entry in entries
        if entry is not Ellipsis
    ]
    is_sliced = all(type(end) in (int, type(None)) for ends in bounds for end in ends)
    reaches_last = len(entries) == base.ndim or Ellipsis in entries
    return is_sliced and (not reaches_last or entries[-1] in (Ellipsis, slice(None)))


def _is_undisturbed(found: _Found) -> bool:
    """Return whether the projection can be computed at the place of the loss with the same gradient."""
    inputs = [node for node in (found.hidden, found.weight, found.bias) if node is not None]
    is_trained = torch.is_grad_enabled() and any(_value(node).requires_grad for node in inputs)
    if any(_value(node).requires_grad != is_trained for node in (found.projection, found.loss)):
        return False
    node = found.projection.next
    while node is not found.loss:
        if _writes(node):
            return False
        node = node.next
    return True


def _writes(node: fx.Node) -> bool:
    """Return whether `node` may write an argument: `x.relu_()`, `torch.relu_(x)`, `relu(x, inplace=True)`, `out=`."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    schema = compat.schema_of(node.target)
    if (
        (name.endswith("_") and not name.endswith("__"))
        or (schema is not None and schema.is_mutable)
        or node.target in _WRITES
        or node.kwargs.get("out") is not None
        or node.kwargs.get("inplace", False)
    ):
        return True
    if isinstance(node.target, str):
        return False
    try:
        names = list(inspect.signature(node.target).parameters)
    except (TypeError, ValueError):  # a builtin of torch that writes ends in `_`
        return False
    return "inplace" in names[: len(node.args)] and bool(node.args[names.index("inplace")])


def _sizes(view: fx.Node) -> tuple[Any, ...]:
    sizes = view.args[1:]
    return tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], tuple | list) else tuple(sizes)


def _value(node: object) -> Any:
    """Return the example value of `node`, None if it is no tensor."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None
