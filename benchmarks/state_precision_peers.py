"""Compare a step with 8-bit moments on the host with torchao's and bitsandbytes' 8-bit classes on a CPU.

    pip install torchao==0.18.0 bitsandbytes==0.50.2
    python benchmarks/state_precision_peers.py [--numel 16000000] [--rounds 7] [--threads 1 2]

One bf16 parameter with bf16 gradients; all variants step in turn in every round, and a ratio is of times from one
round. The peers keep no fp32 master: torchao's class and ours without a master round the weights stochastically,
bitsandbytes rounds them to the nearest. A peer that is not installed is left out. Exit code 1 if a peer is faster.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import quiet  # noqa: F401  before torch
import torch
from machine import RESULTS, save
from neighbours import QUIET_CORES, Neighbours
from optimizer_pass import MOST_WAIT_S, SCALARS, Times, quartiles, quiet_values_of, ratio_of
from state_precision_rates import Arrays, timed

from elixir_compile.optim.host import HostThreads, bf16_adamw, split_adamw
from elixir_compile.optim.precision import MomentForm

NAME = "state_precision_peers_cpu"
OWN = ("elixir int8, split fp32 master", "elixir int8")
LIBRARIES = ("torchao", "bitsandbytes")
NUM_WARM_UP = 2


def own_steps(arrays: Arrays, threads: HostThreads) -> dict[str, Callable[[], object]]:
    """Return by variant a call that updates all elements once, with moments of its own."""

    def step(form: MomentForm, *, has_master: bool) -> Callable[[], object]:
        own = Arrays(arrays.numel)
        extras: dict[str, Any] = {
            "form": form, "threads": threads, "exp_avg_scale": own.scales[0],
            "exp_avg_sq_scale": own.scales[1], **SCALARS,
        }  # fmt: skip
        moments = own.moments(form)
        if has_master:
            return lambda: split_adamw(own.low, *moments, own.grad, own.param, 10, **extras)
        return lambda: bf16_adamw(own.param, *moments, own.grad, 10, **extras)

    return {
        OWN[0]: step(MomentForm.INT8, has_master=True),
        OWN[1]: step(MomentForm.INT8, has_master=False),
    }


def peer_steps(arrays: Arrays) -> dict[str, Callable[[], object]]:
    """Return by variant the step of each peer that is installed."""
    found: dict[str, Callable[[], object]] = {}
    arguments = {"lr": SCALARS["lr"], "eps": SCALARS["eps"], "weight_decay": SCALARS["weight_decay"]}

    def parameter() -> torch.nn.Parameter:
        param = torch.nn.Parameter(arrays.param.clone().view(-1, 1000))
        param.grad = arrays.grad.clone().view(-1, 1000)
        return param

    if importlib.util.find_spec("torchao") is not None:
        import torchao.optim

        for name in ("AdamW8bit", "AdamWFp8"):
            optimizer = getattr(torchao.optim, name)([parameter()], bf16_stochastic_round=True, **arguments)
            found[f"torchao {name}"] = optimizer.step
    if importlib.util.find_spec("bitsandbytes") is not None:
        import bitsandbytes

        found["bitsandbytes AdamW8bit"] = bitsandbytes.optim.AdamW8bit([parameter()], **arguments).step
    return found


def measured(numel: int, num_threads: int, num_rounds: int) -> dict[str, Any]:
    """Run each variant once a round, in turn; return seconds, and the rate of ours over that of each peer."""
    torch.set_num_threads(num_threads)
    arrays = Arrays(numel)
    calls = own_steps(arrays, HostThreads(num_threads)) | peer_steps(arrays)
    times: dict[str, Times] = {name: [] for name in calls}
    neighbours = Neighbours()
    for index in range(NUM_WARM_UP + num_rounds):
        for name in list(calls)[:: 1 if index % 2 else -1]:
            neighbours.wait(MOST_WAIT_S)
            seconds = timed(calls[name])
            if index >= NUM_WARM_UP:  # torchao compiles its step in the first
                times[name].append((seconds, neighbours.busy_cores() < QUIET_CORES))
    peers = [name for name in calls if name not in OWN]
    return {
        "num_threads": num_threads,
        "numel": numel,
        "num_rounds": num_rounds,
        "seconds": {name: quartiles(quiet_values_of(values)) for name, values in times.items()},
        "ratios": [ratio_of(own, peer, times) for own in OWN for peer in peers],
    }


def table(figures: list[dict[str, Any]], versions: dict[str, str]) -> str:
    """Return the figures as Markdown."""
    names = ", ".join(f"{name} {version}" for name, version in versions.items()) or "no peer"
    header = " | ".join(f"{figure['num_threads']} threads, ns per parameter" for figure in figures)
    lines = [
        f"One step of a bf16 parameter of {figures[0]['numel'] / 1e6:.0f} M elements with 8-bit moments on a CPU, "
        f"beside {names}: median [quartiles] over the rounds of one run, variants in turn. Only the first has an "
        "fp32 master.",
        "",
        f"| step | {header} |",
        "|---|" + "---|" * len(figures),
    ]
    for name in figures[0]["seconds"]:
        cells = []
        for figure in figures:
            low, middle, high = (
                figure["seconds"][name][key] / figure["numel"] * 1e9 for key in ("q25", "median", "q75")
            )
            cells.append(f"{middle:.2f} [{low:.2f}-{high:.2f}]")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    least = [min(ratio["median"] for ratio in figure["ratios"]) for figure in figures if figure["ratios"]]
    if least:
        lines += ["", f"The slowest of ours is {min(least):.0f} times as fast as the fastest peer."]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run from the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=16_000_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--measure", type=int, metavar="THREADS", help="only measure, in this process")
    given = parser.parse_args()
    if given.measure:
        print(json.dumps(measured(given.numel, given.measure, given.rounds)))
        return 0
    figures = []
    for num_threads in given.threads:
        sizes = ["--numel", str(given.numel), "--rounds", str(given.rounds), "--measure", str(num_threads)]
        env = {**os.environ, "OMP_NUM_THREADS": str(num_threads)}
        done = subprocess.run(
            [sys.executable, __file__, *sizes], env=env, stdout=subprocess.PIPE, text=True, check=True
        )
        figures.append(json.loads(done.stdout.splitlines()[-1]))
    versions = {name: importlib.metadata.version(name) for name in LIBRARIES if importlib.util.find_spec(name)}
    text = f"{table(figures, versions)}\nLoad average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores.\n"
    print(text)
    save(NAME, {"versions": versions, "load_average": os.getloadavg(), "figures": figures})
    (RESULTS / f"{NAME}.md").write_text(text, encoding="utf-8")
    return int(any(ratio["median"] < 1 for figure in figures for ratio in figure["ratios"]))


if __name__ == "__main__":
    raise SystemExit(main())
