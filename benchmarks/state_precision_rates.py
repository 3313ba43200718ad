"""Measure the host pass with a split master and moments in fewer bytes against the pass with fp32 moments.

    python benchmarks/state_precision_rates.py [--numel 100000000] [--rounds 9] [--threads 1 2]

All variants run in turn in every round, on the same memory; a ratio is of rates from one round. Each pass is also held
against a loop that only reads and writes its bytes, and against itself on 32 K elements that stay in the cache: the
time of the arithmetic there is the other limit. So is that of one square root and one division for each element, which
every form needs for AdamW's bits. Exit code 1 if a goal is missed.
"""

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import quiet  # noqa: F401  before torch
import torch
from machine import RESULTS, save
from neighbours import QUIET_CORES, Neighbours
from optimizer_pass import MOST_WAIT_S, SCALARS, Times, limits, quartiles, quiet_values_of, ratio_of

from elixir_compile.optim.host import HostThreads, split_adamw
from elixir_compile.optim.host.build import build_command
from elixir_compile.optim.precision import MomentForm, num_scales

NAME = "state_precision_rates_cpu"
IN_CACHE = 1 << 15
ROOT_AND_QUOTIENT = "square root and division alone"
EXACT = "float32"
WANTED = {"bfloat16": 1.35, "int8": 1.6}
"""By form, the wanted rate over that of the pass with fp32 moments."""
SHARE = 0.85
"""The wanted share of the rate of a loop with the same bytes."""
LIMITS = {EXACT: "26 B", "bfloat16": "18 B", "int8": "14 B"}


class Arrays:
    """The tensors of all variants: 8 bytes of moments per element, of which each form uses as many as it needs."""

    def __init__(self, numel: int) -> None:
        torch.manual_seed(0)
        small = torch.randn(min(numel, 1 << 20))
        times = -(-numel // small.numel())
        self.numel = numel
        self.param = small.mul(0.05).bfloat16().repeat(times)[:numel]
        self.grad = small.flip(0).mul(0.01).bfloat16().repeat(times)[:numel]
        self.low = torch.zeros(numel, dtype=torch.int16)
        self.exp_avg, self.exp_avg_sq = torch.zeros(numel), torch.zeros(numel)
        self.scales = [torch.zeros(num_scales(numel)) for _ in range(2)]

    def moments(self, form: MomentForm) -> list[torch.Tensor]:
        """Return the moments of `form`, which begin as zeros if nothing else was written."""
        pairs = zip((self.exp_avg, self.exp_avg_sq), form.dtypes, strict=True)
        return [tensor.view(dtype)[: self.numel] for tensor, dtype in pairs]


def step_of(arrays: Arrays, form: MomentForm, threads: HostThreads) -> Callable[[], object]:
    """Return a call that updates all elements once, in the steady state of its form."""
    extras: dict[str, Any] = {"form": form, "threads": threads, **SCALARS}
    if form.has_scales:
        extras |= {"exp_avg_scale": arrays.scales[0], "exp_avg_sq_scale": arrays.scales[1]}
    moments = arrays.moments(form)
    return lambda: split_adamw(arrays.low, *moments, arrays.grad, arrays.param, 10, **extras)


def loop_of(arrays: Arrays, form: MomentForm, threads: HostThreads) -> Callable[[], object]:
    """Return a call of the loop that reads and writes the bytes of `form`."""
    if form is MomentForm.FLOAT32:
        loop, scalars = limits().rmw_split, (1.0, 0)
        loop.argtypes = [*[ctypes.c_void_p] * 5, ctypes.c_size_t, ctypes.c_float, ctypes.c_uint16]
    else:
        library = own_limits()
        loop, scalars = (library.rmw_bfloat16 if form is MomentForm.BFLOAT16 else library.rmw_8bit), (0,)
        loop.argtypes = [*[ctypes.c_void_p] * 5, ctypes.c_size_t, ctypes.c_uint16]
    tensors = (arrays.low, *arrays.moments(form), arrays.grad, arrays.param)

    def part(start: int, stop: int) -> None:
        loop(*(tensor.data_ptr() + start * tensor.element_size() for tensor in tensors), stop - start, *scalars)

    return lambda: threads.run(arrays.numel, part)


def own_limits() -> ctypes.CDLL:
    """Return the library with the loops of `state_precision_rmw.c`."""
    source = Path(__file__).with_name("state_precision_rmw.c")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rmw.so"
        subprocess.run([*build_command(), "-o", str(path), str(source)], check=True)
        return ctypes.CDLL(str(path))


def timed(call: Callable[[], object]) -> float:
    """Return the seconds of `call`."""
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s


def in_cache_s(numel: int) -> dict[str, float]:
    """Return by variant the seconds per element on one thread, with all data in the cache.

    They are those of `numel` elements beyond half as many, because a call takes 30 us whatever its size.
    """
    threads = HostThreads(1)
    calls: dict[str, Callable[[int], Callable[[], object]]] = {
        form.value: lambda size, form=form: step_of(Arrays(size), form, threads) for form in MomentForm
    }
    calls[ROOT_AND_QUOTIENT] = root_and_quotient_of
    found = {}
    for name, call_of in calls.items():
        half, whole = (_least_s(call_of(size)) for size in (numel // 2, numel))
        found[name] = (whole - half) / (numel - numel // 2)
    return found


def root_and_quotient_of(numel: int) -> Callable[[], object]:
    """Return a call that does only the square root and the division of a step, for `numel` elements."""
    loop = own_limits().root_and_quotient
    loop.argtypes = [*[ctypes.c_void_p] * 3, ctypes.c_size_t]
    to, first, second = torch.zeros(numel), torch.randn(numel), torch.rand(numel)
    return lambda: loop(to.data_ptr(), first.data_ptr(), second.data_ptr(), numel)


def _least_s(call: Callable[[], object]) -> float:
    """Return the seconds of the fastest of 2,000 calls."""
    return min(timed(call) for _ in range(2000))


def measured(numel: int, num_threads: int, num_rounds: int) -> dict[str, Any]:
    """Run each variant once a round, in turn; return seconds and ratios of rates."""
    torch.set_num_threads(num_threads)
    arrays, threads = Arrays(numel), HostThreads(num_threads)
    calls: dict[str, tuple[MomentForm, Callable[[], object]]] = {}
    for form in MomentForm:
        calls[form.value] = form, step_of(arrays, form, threads)
        if form is not MomentForm.INT8:
            calls[f"read and write {LIMITS[form.value]}"] = form, loop_of(arrays, form, threads)
    times: dict[str, Times] = {name: [] for name in calls}
    neighbours = Neighbours()
    for index in range(num_rounds + 1):
        for name in list(calls)[:: 1 if index % 2 else -1]:
            form, call = calls[name]
            for tensor in (*arrays.moments(form), *arrays.scales):
                tensor.view(torch.uint8).zero_()  # the bytes of another form are no moments
            call()
            neighbours.wait(MOST_WAIT_S)
            seconds = timed(call)
            if index:  # the first round warms up
                times[name].append((seconds, neighbours.busy_cores() < QUIET_CORES))
    names = [name for name in calls if not name.startswith("read")]
    return {
        "num_threads": num_threads,
        "numel": numel,
        "num_rounds": num_rounds,
        "seconds": {name: quartiles(quiet_values_of(values)) for name, values in times.items()},
        "ratios": [ratio_of(name, EXACT, times) for name in names if name != EXACT],
        "shares": [ratio_of(name, f"read and write {LIMITS[name]}", times) for name in names],
        "in_cache_s_per_element": in_cache_s(IN_CACHE) if num_threads == 1 else {},
    }


def missed(figures: Sequence[dict[str, Any]]) -> list[str]:
    """Return a sentence for each goal that is missed."""
    found = []
    for figure in figures:
        for kind, wanted_of in (("ratios", WANTED.get), ("shares", lambda name: SHARE if name in WANTED else None)):
            for ratio in figure[kind]:
                wanted = wanted_of(ratio["pass"])
                if wanted is not None and ratio["median"] < wanted:
                    found.append(
                        f"{figure['num_threads']} threads: {ratio['pass']} at {ratio['median']:.2f} of the rate of "
                        f"{ratio['of']}, wanted {wanted}"
                    )
    return found


def table(figures: Sequence[dict[str, Any]]) -> str:
    """Return the figures as Markdown."""

    def cell(values: dict[str, float], scale: float = 1.0, digits: int = 2) -> str:
        low, middle, high = (f"{values[name] * scale:.{digits}f}" for name in ("q25", "median", "q75"))
        return f"{middle} [{low}-{high}]"

    numel = figures[0]["numel"]
    lines = [
        f"One AdamW step of {numel / 1e6:.0f} M bf16 parameters with a split master on the host: median [quartiles] "
        "over the rounds of one run, variants in turn.",
        "",
        "| moments | " + " | ".join(f"{figure['num_threads']} threads, ms" for figure in figures) + " | in cache, ms |",
        "|---|" + "---|" * (len(figures) + 1),
    ]
    in_cache = figures[0]["in_cache_s_per_element"]
    for name in figures[0]["seconds"]:
        seconds = " | ".join(cell(figure["seconds"][name], 1e3, 1) for figure in figures)
        lines.append(
            f"| {name} | {seconds} | {in_cache[name] * numel * 1e3:.1f} |"
            if name in in_cache
            else f"| {name} | {seconds} | |"
        )
    if ROOT_AND_QUOTIENT in in_cache:
        empty = " |" * len(figures)
        lines.append(f"| {ROOT_AND_QUOTIENT} |{empty} {in_cache[ROOT_AND_QUOTIENT] * numel * 1e3:.1f} |")
    lines += ["", "| moments | rate of | threads | ratio | wanted |", "|---|---|---|---|---|"]
    for figure in figures:
        for kind in ("ratios", "shares"):
            for ratio in figure[kind]:
                name = ratio["pass"]
                wanted = "" if name not in WANTED else WANTED[name] if kind == "ratios" else SHARE
                lines.append(f"| {name} | {ratio['of']} | {figure['num_threads']} | {cell(ratio)} | {wanted} |")
    said = (
        "In cache: as many elements at the rate of one thread on 32 K of them, whose bytes stay in the cache, without "
    )
    said += "the time of the call."
    return "\n".join([*lines, "", said]) + "\n"


def main() -> int:
    """Run from the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=100_000_000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--measure", type=int, metavar="THREADS", help="only measure, in this process")
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measured(arguments.numel, arguments.measure, arguments.rounds)))
        return 0
    sizes = ["--numel", str(arguments.numel), "--rounds", str(arguments.rounds)]
    figures = []
    for num_threads in arguments.threads:
        command = [sys.executable, __file__, *sizes, "--measure", str(num_threads)]
        env = {**os.environ, "OMP_NUM_THREADS": str(num_threads)}
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
        figures.append(json.loads(done.stdout.splitlines()[-1]))
    wrong = missed(figures)
    load = f"Load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores."
    text = f"{table(figures)}\n{load}\n"
    print(text)
    save(NAME, {"missed": wrong, "load_average": os.getloadavg(), "figures": figures})
    (RESULTS / f"{NAME}.md").write_text(text, encoding="utf-8")
    for sentence in wrong:
        print(f"MISSED  {sentence}")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
