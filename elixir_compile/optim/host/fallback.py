"""Host passes without a compiler: torch's ops on blocks that stay in the CPU cache between cast, update and cast.

    a block of 512 K elements:  grad -> fp32,  fused AdamW on views of the master and the moments,  -> param

Takes 1.5 times as long as the kernel on a single thread; casts of whole tensors take 1.7 times as long. Runs on torch's
threads.
"""

from collections.abc import Iterator

import torch
from torch.optim.adamw import adamw

from elixir_compile.optim.host.flat import FlatStep, Rule

BLOCK = 1 << 19


@torch.no_grad()
def take_step(flat: FlatStep) -> None:
    """Run the AdamW step `flat` in place."""
    for block in _blocks(flat.weights.numel()):
        grad = _of(flat.grad, block).to(torch.float32, copy=True)
        if flat.total is not None:
            grad.add_(_of(flat.total, block))
        if flat.rule.grad_factor != 1.0:
            grad.mul_(flat.rule.grad_factor)
        weights = _of(flat.weights, block)
        high = _of(flat.param, block) if flat.is_split and flat.param is not None else None
        master = weights if high is None else joined(high, weights)
        most = [] if flat.max_exp_avg_sq is None else [_of(flat.max_exp_avg_sq, block)]
        _fused(flat.rule, (master, grad, _of(flat.exp_avg, block), _of(flat.exp_avg_sq, block)), most)
        if high is not None:
            split(master, high, weights)
        elif flat.param is not None:
            _of(flat.param, block).copy_(master)


def joined(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Return the fp32 master joined from its bf16 high half and its int16 low half."""
    bits = high.view(torch.int16).to(torch.int32)
    return bits.bitwise_left_shift_(16).add_(low).view(torch.float32)


def split(master: torch.Tensor, high: torch.Tensor, low: torch.Tensor) -> None:
    """Split `master` into `high`, the nearest bf16 (away from zero at a tie), and `low`, the signed difference."""
    bits = torch.where(master.isnan(), torch.nan, master).view(torch.int32)
    low.copy_(bits)  # the low 16 bits
    high.view(torch.int16).copy_((bits - low).bitwise_right_shift_(16))


@torch.no_grad()
def sum_of_squares(grad: torch.Tensor) -> float:
    """Return the sum of squares of `grad`, computed in double."""
    wide = (_of(grad, block).to(torch.float64) for block in _blocks(grad.numel()))
    return sum((float(torch.dot(block, block)) for block in wide), 0.0)


def _fused(rule: Rule, tensors: tuple[torch.Tensor, ...], most: list[torch.Tensor]) -> None:
    master, grad, exp_avg, exp_avg_sq = tensors
    adamw(
        [master],
        [grad],
        [exp_avg],
        [exp_avg_sq],
        most,
        [torch.tensor(rule.step - 1.0)],
        fused=True,
        amsgrad=bool(most),
        lr=rule.lr,
        beta1=rule.beta1,
        beta2=rule.beta2,
        weight_decay=rule.weight_decay,
        eps=rule.eps,
        maximize=False,
    )


def _blocks(numel: int) -> Iterator[slice]:
    return (slice(start, min(start + BLOCK, numel)) for start in range(0, numel, BLOCK))


def _of(tensor: torch.Tensor, block: slice) -> torch.Tensor:
    return tensor.detach().view(-1)[block]
