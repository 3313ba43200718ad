"""Measure the rates of compute: matrix products by dtype, pointwise kernels, the launch of an op, and host DRAM."""

from collections.abc import Callable

import torch
from torch.nn import functional

from elixir_compile.measure.machine.clock import median_s

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Tokens and width of the MLP of a transformer layer: a small layer, and a large layer that fills an accelerator.
_LAYERS = {"cpu": (512, 768), "cuda": (4096, 4096)}
_GROWTH = 8
"""Twice the tokens and twice the width make 2 * 2 * 2 times the arithmetic."""
_POINTWISE_ROWS = {"cpu": 6144, "cuda": 262144}
"""Rows of 256 floats: 6 MiB, an activation of a small transformer; 256 MiB, more than an accelerator's cache holds."""
_DRAM_NUMEL = 16 * 2**20
_NUM_LAUNCHES = 200


def measure_kernels(device: torch.device, at_most_s: float) -> dict[str, float]:
    """Return `pointwise_bytes_per_s`, `launch_s` and the host's `dram_bytes_per_s`."""
    share_s = at_most_s / 3
    return {
        "pointwise_bytes_per_s": _pointwise_bytes_per_s(device, share_s),
        "launch_s": _launch_s(device, share_s),
        "dram_bytes_per_s": _dram_bytes_per_s(share_s),
    }


def measure_products(device: torch.device, at_most_s: float) -> dict[str, float]:
    """Return the floating-point operations per second of matrix products by dtype, as `flops_per_s.float32`.

    Timed are the three products of a linear layer in a training step.
    """
    share_s = at_most_s / len(_DTYPES)
    return {
        f"flops_per_s.{str(dtype).removeprefix('torch.')}": _flops_per_s(device, dtype, share_s) for dtype in _DTYPES
    }


def _flops_per_s(device: torch.device, dtype: torch.dtype, at_most_s: float) -> float:
    """Return the rate of `dtype` at the size in `_LAYERS`, or at a smaller size if that would take too long.

    A dtype may be emulated: float16 on a CPU without instructions for it is 40 times slower than float32.
    """
    tokens, width = (size // 8 for size in _LAYERS[device.type])
    while True:
        products, flops = _products(device, dtype, tokens, width)
        first_s = median_s(products, device, 0.0)
        is_last = width >= _LAYERS[device.type][1] or _GROWTH * first_s * 4 > at_most_s
        if is_last:
            return flops / median_s(products, device, at_most_s / 2)
        tokens, width = 2 * tokens, 2 * width


def _products(device: torch.device, dtype: torch.dtype, tokens: int, width: int) -> tuple[Callable[[], None], int]:
    x = torch.full((tokens, width), 0.5, dtype=dtype, device=device)
    weight = torch.full((4 * width, width), 0.01, dtype=dtype, device=device)
    gradient = torch.full((tokens, 4 * width), 0.01, dtype=dtype, device=device)

    def products() -> None:
        torch.matmul(x, weight.T)
        torch.matmul(gradient, weight)
        torch.matmul(gradient.T, x)

    return products, 3 * 2 * tokens * width * 4 * width


def _pointwise_bytes_per_s(device: torch.device, at_most_s: float) -> float:
    """Return the bytes that pointwise kernels read and write per second: an addition, a gelu and a softmax."""
    x = torch.linspace(-3, 3, _POINTWISE_ROWS[device.type] * 256, device=device).view(-1, 256)
    y = torch.ones_like(x)

    def kernels() -> None:
        functional.gelu(x)
        torch.add(x, y)
        torch.softmax(x, dim=-1)

    num_passes = 2 + 3 + 2  # each reads its inputs and writes one result
    return num_passes * x.nbytes / median_s(kernels, device, at_most_s)


def _launch_s(device: torch.device, at_most_s: float) -> float:
    """Return the seconds of an op on 16 elements, which is the cost of its launch."""
    one = torch.ones(16, device=device)

    def ops() -> None:
        for _ in range(_NUM_LAUNCHES):
            torch.add(one, one)

    return median_s(ops, device, at_most_s) / _NUM_LAUNCHES


def _dram_bytes_per_s(at_most_s: float) -> float:
    """Return the bytes that the host's memory moves per second, reads and writes together, in a copy and a sum."""
    host = torch.device("cpu")
    x, y, out = (torch.ones(_DRAM_NUMEL) for _ in range(3))
    copy_s = median_s(lambda: out.copy_(x), host, at_most_s / 2)
    sum_s = median_s(lambda: torch.add(x, y, out=out), host, at_most_s / 2)
    return 5 * x.nbytes / (copy_s + sum_s)
