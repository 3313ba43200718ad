"""Compare the host pass with other updates of 16-bit parameters on a host; `optimizer.py` runs it."""

import ctypes
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import quiet  # noqa: F401  before torch
import torch
from neighbours import QUIET_CORES, Neighbours
from torch.optim.adamw import adamw

from elixir_compile.optim.host import HostThreads, flat_step, mixed_adamw, split_adamw, sum_of_squares
from elixir_compile.optim.host.build import build_command
from elixir_compile.optim.host.flat_step import FlatStep, Rule

SCALARS = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
WINDOW_S = 0.2
MOST_WAIT_S = 0.4

PAIRS = {
    "mixed: C": (
        "read and write 28 B",
        "cast, torch fused, cast",
        "DeepSpeed: scale, adam, cast",
        "mixed: torch in blocks",
    ),
    "split: C": ("read and write 26 B", "cast, torch fused, cast", "DeepSpeed: scale, adam, cast", "mixed: C"),
    "fp32: fused op": ("fp32: torch.optim.AdamW(fused=True)",),
}
"""By variant, the other variants for comparison of rates within a round."""
WANTED = {
    ("mixed: C", "cast, torch fused, cast"): 1.5,
    ("mixed: C", "DeepSpeed: scale, adam, cast"): 1.5,
    ("mixed: C", "read and write 28 B"): 0.92,
    ("split: C", "cast, torch fused, cast"): 1.5,
    ("split: C", "DeepSpeed: scale, adam, cast"): 1.5,
    ("split: C", "read and write 26 B"): 0.92,
    ("fp32: fused op", "fp32: torch.optim.AdamW(fused=True)"): 0.97,
}
"""The smallest allowed median of a ratio of rates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrays:
    """The tensors shared by all variants; 22 bytes per parameter."""

    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    grad: torch.Tensor
    """In bf16."""
    wide_grad: torch.Tensor
    """The same gradient in fp32."""
    param: torch.Tensor
    low: torch.Tensor

    @classmethod
    def of(cls, numel: int) -> "Arrays":
        """Return arrays of `numel` elements, every page touched."""
        torch.manual_seed(0)
        wide_grad = torch.randn(numel).mul_(0.01)
        master = torch.randn(numel).mul_(0.05)
        param, low = torch.empty(numel, dtype=torch.bfloat16), torch.empty(numel, dtype=torch.int16)
        for start in range(0, numel, 1 << 20):
            block = slice(start, start + (1 << 20))
            flat_step.split(master[block], param[block], low[block])
        return cls(
            master=master,
            exp_avg=torch.zeros(numel),
            exp_avg_sq=torch.zeros(numel),
            grad=wide_grad.bfloat16(),
            wide_grad=wide_grad,
            param=param,
            low=low,
        )


def limits() -> ctypes.CDLL:
    """Return the library with the loops of `optimizer_rmw.c`, built by the command that builds the host kernel."""
    source = Path(__file__).with_name("optimizer_rmw.c")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rmw.so"
        subprocess.run([*build_command(), "-o", str(path), str(source)], check=True)
        return ctypes.CDLL(str(path))


def limit(name: str, arrays: Arrays, threads: HostThreads) -> Callable[[], object]:
    """Return a call of the loop `name`: it reads and writes the arrays of the host pass, without its arithmetic."""
    loop = getattr(limits(), name)
    loop.argtypes = [*[ctypes.c_void_p] * 5, ctypes.c_size_t, ctypes.c_float, ctypes.c_uint16]
    weights = arrays.low if name == "rmw_split" else arrays.master
    tensors = (weights, arrays.exp_avg, arrays.exp_avg_sq, arrays.grad, arrays.param)

    def part(start: int, stop: int) -> None:
        loop(*(tensor.data_ptr() + start * tensor.element_size() for tensor in tensors), stop - start, 1.0, 0)

    return lambda: threads.run(len(weights), part)


def optimizer_step(kind: Callable[..., Any], arrays: Arrays, step: object) -> Callable[[], object]:
    """Return the step of an optimizer of type `kind` on the fp32 arrays; its count starts at `step`."""
    weight = torch.nn.Parameter(arrays.master)
    optimizer = kind([weight], lr=1e-3, weight_decay=0.01)
    weight.grad = arrays.wide_grad
    optimizer.state[weight] = {"step": step, "exp_avg": arrays.exp_avg, "exp_avg_sq": arrays.exp_avg_sq}
    return optimizer.step


def torch_fused(params: Sequence[torch.Tensor], **options: Any) -> torch.optim.Optimizer:
    """Return torch's fused AdamW."""
    return torch.optim.AdamW(params, fused=True, **options)


def deepspeed_path(arrays: Arrays) -> Callable[[], None] | None:
    """Return DeepSpeed's host update of ZeRO-3 with offload; None if DeepSpeed is not installed."""
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
    except ImportError:
        return None
    step = optimizer_step(DeepSpeedCPUAdam, arrays, 9)

    def run() -> None:
        arrays.wide_grad.mul_(1.0)
        step()
        arrays.param.copy_(arrays.master)

    return run


def variants(arrays: Arrays, threads: HostThreads) -> dict[str, Callable[[], object]]:
    """Return, by variant, a call that updates all parameters once; compared variants are next to each other."""
    a = arrays
    moments = (a.exp_avg, a.exp_avg_sq)
    rule = Rule(step=10, **SCALARS)
    blocks = FlatStep(
        weights=a.master, exp_avg=a.exp_avg, exp_avg_sq=a.exp_avg_sq, grad=a.grad, param=a.param, rule=rule
    )
    fused_step = optimizer_step(torch_fused, a, torch.tensor(9.0))
    counts = [torch.tensor(9.0)]
    scalars = {**SCALARS, "amsgrad": False, "maximize": False}

    def cast_around() -> None:
        a.wide_grad.copy_(a.grad)
        fused_step()
        a.param.copy_(a.master)

    found: dict[str, Callable[[], object] | None] = {
        "read and write 28 B": limit("rmw_mixed", a, threads),
        "mixed: C": lambda: mixed_adamw(a.master, *moments, a.grad, a.param, 10, threads=threads, **SCALARS),
        "DeepSpeed: scale, adam, cast": deepspeed_path(a),
        "split: C": lambda: split_adamw(a.low, *moments, a.grad, a.param, 10, threads=threads, **SCALARS),
        "read and write 26 B": limit("rmw_split", a, threads),
        "cast, torch fused, cast": cast_around,
        "mixed: torch in blocks": lambda: flat_step.take_step(blocks),
        "fp32: fused op": lambda: adamw(
            [a.master], [a.wide_grad], [a.exp_avg], [a.exp_avg_sq], [], counts, fused=True, **scalars
        ),
        "fp32: torch.optim.AdamW(fused=True)": fused_step,
        "sum of squares bf16: C": lambda: sum_of_squares(a.grad, threads),
    }
    return {name: call for name, call in found.items() if call is not None}


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """Return the median and the quartiles of at least two values."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"q25": low, "median": middle, "q75": high}


Times = list[tuple[float, bool]]
"""Seconds by round, and whether other processes were quiet."""


def quiet_values_of(times: Times) -> list[float]:
    """Return the values of quiet rounds, or of all rounds if fewer than three were quiet."""
    quiet_values = [value for value, is_quiet in times if is_quiet]
    return quiet_values if len(quiet_values) >= 3 else [value for value, _ in times]


def ratio_of(name: str, other: str, times: dict[str, Times]) -> dict[str, Any]:
    """Return the quartiles of the rate of `name` over the rate of `other`, each from the same round."""
    rounds = zip(times[name], times[other], strict=True)
    ratios = [(other_s / own_s, is_quiet and other_quiet) for (own_s, is_quiet), (other_s, other_quiet) in rounds]
    return {
        "pass": name,
        "of": other,
        "num_quiet": sum(flag for _, flag in ratios),
        **quartiles(quiet_values_of(ratios)),
    }


def measured(numel: int, num_threads: int, num_rounds: int) -> dict[str, Any]:
    """Run each variant once a round, in turn; return seconds, ratios of rates, and kept rates of the main thread."""
    torch.set_num_threads(num_threads)
    arrays = Arrays.of(numel)
    calls = variants(arrays, HostThreads(num_threads))
    times: dict[str, Times] = {name: [] for name in calls}
    neighbours = Neighbours()
    for index in range(num_rounds + 1):
        for name in list(calls)[:: 1 if index % 2 else -1]:
            neighbours.wait(MOST_WAIT_S)
            began_s = time.perf_counter()
            calls[name]()
            seconds = time.perf_counter() - began_s
            if index:  # the first round warms up
                times[name].append((seconds, neighbours.busy_cores() < QUIET_CORES))
    return {
        "num_threads": num_threads,
        "numel": numel,
        "num_rounds": num_rounds,
        "seconds": {name: quartiles(quiet_values_of(values)) for name, values in times.items()},
        "ratios": [
            ratio_of(name, other, times) for name, others in PAIRS.items() for other in others if other in times
        ],
        "kept_rate": {name: kept_rate(calls[name]) for name in KEEPS if name in calls} if num_threads == 1 else {},
        # In KiB on Linux, in bytes on macOS.
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        * (1 if sys.platform == "darwin" else 1024),
    }


KEEPS = ("mixed: C", "split: C", "fp32: fused op", "DeepSpeed: scale, adam, cast")


def kept_rate(update: Callable[[], object], num_rounds: int = 9) -> dict[str, float]:
    """Return the main thread's rate of small ops while `update` runs in another thread, over its rate without."""
    stop, go = threading.Event(), threading.Event()
    small = torch.zeros(64)

    def passes() -> None:
        while not stop.is_set():
            if go.wait(0.01):
                update()

    def rate_per_s() -> float:
        began_s, num = time.perf_counter(), 0
        while time.perf_counter() - began_s < WINDOW_S:
            small.add_(1.0)
            num += 1
        return num / (time.perf_counter() - began_s)

    worker = threading.Thread(target=passes)
    worker.start()
    shares: Times = []
    neighbours = Neighbours()
    for _ in range(num_rounds):
        go.clear()
        time.sleep(WINDOW_S)  # until the pass in progress has ended
        neighbours.wait(MOST_WAIT_S)
        alone = rate_per_s()
        go.set()
        time.sleep(0.02)
        shares.append((rate_per_s() / alone, neighbours.busy_cores() < QUIET_CORES))
    stop.set()
    go.set()
    worker.join()
    return quartiles(quiet_values_of(shares))


def missed(figures: Sequence[dict[str, Any]]) -> list[str]:
    """Return a sentence for each missed target."""
    found = []
    for figure in figures:
        for ratio in figure["ratios"]:
            wanted = WANTED.get((ratio["pass"], ratio["of"]))
            if wanted is not None and ratio["median"] < wanted:
                found.append(
                    f"{figure['num_threads']} threads: {ratio['pass']} at {ratio['median']:.2f} of the rate of "
                    f"{ratio['of']}, wanted {wanted}"
                )
        for name in ("mixed: C", "split: C"):
            share = figure["kept_rate"].get(name)
            if share is not None and share["median"] < 0.5:
                found.append(f"the main thread keeps {share['median']:.2f} of its rate beside {name}, wanted 0.5")
    return found


def table(figures: Sequence[dict[str, Any]]) -> str:
    """Return the figures as Markdown."""

    def cell(values: dict[str, float], scale: float = 1.0, digits: int = 2) -> str:
        low, middle, high = (f"{values[name] * scale:.{digits}f}" for name in ("q25", "median", "q75"))
        return f"{middle} [{low}-{high}]"

    lines = [
        f"One update of {figures[0]['numel'] / 1e6:.0f} M parameters on the host: median [quartiles] over the rounds "
        "of one run, variants in turn. A ratio is of rates, both from one round. Rounds in which other processes "
        f"took more than {QUIET_CORES} of a core are left out where three others remain.",
        "",
        "| variant | " + " | ".join(f"{figure['num_threads']} threads, ms" for figure in figures) + " |",
        "|---|" + "---|" * len(figures),
    ]
    for name in figures[0]["seconds"]:
        lines.append(f"| {name} | " + " | ".join(cell(figure["seconds"][name], 1e3, 1) for figure in figures) + " |")
    lines += ["", "| pass | rate of | threads | ratio | wanted |", "|---|---|---|---|---|"]
    for figure in figures:
        for ratio in figure["ratios"]:
            wanted, num_threads = WANTED.get((ratio["pass"], ratio["of"])), figure["num_threads"]
            lines.append(f"| {ratio['pass']} | {ratio['of']} | {num_threads} | {cell(ratio)} | {wanted or ''} |")
    lines += ["", "| runs in another thread | rate of small torch ops that the main thread keeps |", "|---|---|"]
    for figure in figures:
        lines += [f"| {name} | {cell(share)} |" for name, share in figure["kept_rate"].items()]
    return "\n".join(lines) + "\n"
