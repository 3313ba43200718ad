"""Measure the parameters per second of the update of `HybridAdamW`, a fused call over the tensors of a bucket.

A bucket has the tensors of one transformer layer. Several buckets take turns, so that none is in a cache.
"""

from collections.abc import Callable, Sequence
from itertools import cycle

import torch

from elixir_compile import compat
from elixir_compile.measure.machine.clock import beside, median_s
from elixir_compile.measure.machine.copies import COPY_BYTES, copies_of
from elixir_compile.runtime.slab import Slab, aligned_bytes

# 7 and 28 million elements, 28 and 113 MB in float32: the sizes of buckets. On an accelerator the launch would take
# most of the time of the smaller bucket.
_WIDTHS = {"cpu": 768, "cuda": 1536}
_NUM_BUCKETS = 3
_COPIES = 4
"""Parameters, gradients and two moments."""

Allocate = Callable[[Sequence[tuple[int, ...]]], list[torch.Tensor]]


def measure_updates(device: torch.device, at_most_s: float) -> dict[str, float]:
    """Return elements/s as `update.device`, `update.host`, and `update.busy_host` during copies in both directions."""
    share_s = at_most_s / 3
    width = _WIDTHS[device.type]

    def on_device(shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
        return [torch.full(shape, 0.01, device=device) for shape in shapes]

    def on_host(shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
        return _slab_tensors(shapes, pin=device.type == "cuda")

    device_s = median_s(_update(on_device, width, device), device, share_s)
    host = torch.device("cpu")
    update = _update(on_host, width, host)
    host_s = median_s(update, host, share_s)
    copies = copies_of(device, COPY_BYTES)
    with beside(copies.h2d), beside(copies.d2h):
        busy_s = median_s(update, host, share_s)
    numel = _numel(_layer_shapes(width))
    return {"update.device": numel / device_s, "update.host": numel / host_s, "update.busy_host": numel / busy_s}


def _update(allocate: Allocate, width: int, device: torch.device) -> Callable[[], None]:
    """Return a function that updates the next of several buckets at each call."""
    shapes = _layer_shapes(width)
    buckets = [
        (
            *(allocate(shapes) for _ in range(_COPIES)),
            [torch.ones((), device=device) for _ in shapes],
        )
        for _ in range(_NUM_BUCKETS)
    ]
    turns = cycle(buckets)

    def update() -> None:
        params, grads, means, squares, steps = next(turns)
        compat.fused_adamw_(
            params,
            grads,
            means,
            squares,
            [],
            steps,
            amsgrad=False,
            lr=1e-3,
            beta1=0.9,
            beta2=0.999,
            weight_decay=1e-2,
            eps=1e-8,
            maximize=False,
        )

    return update


def _layer_shapes(width: int) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of a GPT-2 layer: two norms, attention in and out, the two halves of the MLP."""
    matrices = ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width))
    return (*((width,) for _ in range(4)), *matrices, *((shape[1],) for shape in matrices))


def _numel(shapes: Sequence[tuple[int, ...]]) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes)


def _slab_tensors(shapes: Sequence[tuple[int, ...]], *, pin: bool) -> list[torch.Tensor]:
    sizes_bytes = [aligned_bytes(torch.Size(shape).numel() * torch.float32.itemsize) for shape in shapes]
    slab = Slab(sum(sizes_bytes), pin=pin)
    offsets_bytes = [sum(sizes_bytes[:place]) for place in range(len(sizes_bytes))]
    return [
        slab.tensor(torch.float32, shape, offset).fill_(0.01)
        for shape, offset in zip(shapes, offsets_bytes, strict=True)
    ]
