"""Compute the cross-entropy of a projection in chunks over tokens, so that no [tokens, classes] tensor exists.

    forward    for chunk c:   x = h[c] @ w.T + b;   lse[c] = log(sum(exp(x)));   loss[c] = lse[c] - x[target]
               saved: h, w, b, targets, lse
    backward   for chunk c:   x = w @ h[c].T + b;   d = (exp(x - lse[c]) - onehot) * g
                              dh[c] = d.T @ w;   dw = dw + d @ h[c];   db = db + sum(d)

torch traces the function into plain ATen ops, unrolled over the chunks. In the forward and in the backward, the logits
of a chunk are dead before the logits of the next chunk are computed.

[Note: One chunk after the other]
The formulas do not order the chunks of the backward, and Inductor fused their softmaxes into one kernel, for which the
logits of all chunks existed at once. So the dh of a chunk is written over its h, and the next chunk reads its h from
the result. Only the logits of the first chunk do not depend on the incoming gradient. The partitioner might save them
for the backward if both halves had the same `mm`, so the forward computes `h @ w.T` and the backward `w @ h.T`. After
`w @ h.T`, `d @ h` needs no transposed copy either.

[Note: Tolerance]
The arithmetic for one token is the same as in torch: the same dtypes, and the same roundings to a 16-bit dtype. Two
things differ: `x - lse` replaces `x - max - log(sum)`, and the sums of dw and db run over the tokens of a chunk, then
over chunks. Against the unchunked step, errors relative to the largest element were at most 3e-7 in fp32, for the loss
and every gradient. If the projection is bf16, dw and db are rounded to bf16 after each chunk instead of once: for 4
chunks the error was 6e-3, the spacing of bf16. A bf16 loss may differ by one spacing, as the losses of the tokens are
added in fp32.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch


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
            losses, sums = _losses(hidden, weight, bias, targets, form)
            loss = losses.sum()
            if form.is_mean:
                loss = loss / _counts(targets, form).sum()
        ctx.save_for_backward(hidden, weight, bias, targets, sums)
        ctx.form = form
        return loss.to(form.loss_dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  the decorator hides the names of arguments
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, targets, sums = ctx.saved_tensors
        form = ctx.form
        wanted = ctx.needs_input_grad[:3]
        with torch.autocast(hidden.device.type, enabled=False):
            per_token = grad.to(sums.dtype)
            counts = _counts(targets, form)
            if form.is_mean:
                per_token = per_token / counts.sum()
            # Zero for an ignored target, even if all targets are ignored and the mean divides by zero.
            per_token = torch.where(counts, per_token, 0.0)
            grads = _gradients((hidden, weight, bias), (targets, sums, per_token), wanted, form)
        return *grads, None, None


def _losses(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor, form: LossForm
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss and the log-sum-exp of each token."""
    hidden, weight, bias = _cast((hidden, weight, bias), form.logits_dtype)
    counts = _counts(targets, form)
    indices = torch.where(counts, targets, 0).to(torch.int64)
    losses, sums = [], []
    for start, length in _chunks(hidden.shape[0], form.num_chunks):
        rows, columns = hidden.narrow(0, start, length), weight.t()
        logits = rows @ columns if bias is None else torch.addmm(bias, rows, columns)
        logits = _widened(logits, form)
        at_target = logits.gather(1, indices.narrow(0, start, length).unsqueeze(1))
        average = logits.mean(1, keepdim=True) if form.label_smoothing else None
        top = logits.amax(1, keepdim=True)
        lse = (logits - top).exp().sum(1, keepdim=True).log() + top
        loss = _rounded(lse - at_target, form)
        if average is not None:
            loss = (1 - form.label_smoothing) * loss + form.label_smoothing * (lse - average)
        losses.append(loss.squeeze(1))
        sums.append(lse.squeeze(1))
    return torch.where(counts, torch.cat(losses), 0.0), torch.cat(sums)


def _gradients(
    operands: Sequence[torch.Tensor | None],
    tokens: Sequence[torch.Tensor],
    wanted: Sequence[bool],
    form: LossForm,
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of hidden, weight and bias; None for a gradient that is not `wanted`."""
    hidden, weight, bias = _cast(operands, form.logits_dtype)
    states, weight_grad, bias_grad = hidden, None, None
    for start, length in _chunks(hidden.shape[0], form.num_chunks):
        rows = states.narrow(0, start, length)
        logits = weight @ rows.t() if bias is None else torch.addmm(bias.unsqueeze(1), weight, rows.t())
        grad = _logits_gradient(logits, [token.narrow(0, start, length) for token in tokens], form)
        del logits
        if wanted[1]:
            # `addmm` adds to the sum without a second tensor of the weight's size.
            weight_grad = grad @ rows if weight_grad is None else torch.addmm(weight_grad, grad, rows)
        if wanted[2]:
            bias_grad = grad.sum(1) if bias_grad is None else bias_grad + grad.sum(1)
        # Even if dh is not wanted: see [Note: One chunk after the other].
        states = states.slice_scatter(grad.t() @ weight, 0, start, start + length)
        del grad
    found = (states if wanted[0] else None, weight_grad, bias_grad)
    return tuple(
        None if grad is None or operand is None else grad.to(operand.dtype)
        for grad, operand in zip(found, operands, strict=True)
    )


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
