"""Measure the speed of the hybrid optimizer.

    python benchmarks/optimizer.py [--parts pass classes modes clip disk] [--rounds 11] [--threads 1 2]

pass    the host update, against torch's, DeepSpeed's, and a loop that only reads and writes the bytes
classes the host update of a class: its own step, a single pass with the same bits, Inductor's (half the parameters)
modes   GPT-2 124M updated after the backward, across steps and in the backward: step time, hidden share
clip    GPT-2 124M with gradient norms computed in the backward, and in `clip_grad_norm_`
disk    GPT-2 124M with all optimizer state on disk: losses, resident memory, step time (`--disk-path FOLDER`)

Each case has a process of its own, because OpenMP's threads and resident memory depend on earlier work of a process.
Exit code 1 if a target is missed. DeepSpeed is optional:
`DS_BUILD_CPU_ADAM=1 pip install --no-build-isolation '.[bench]'`.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import optimizer_classes
import optimizer_clip
import optimizer_disk
import optimizer_modes
import optimizer_pass
from machine import RESULTS, save


def pass_part(arguments: argparse.Namespace) -> list[str]:
    """Measure the host pass; return a sentence for each missed target."""
    sizes = ["--numel", str(arguments.numel), "--rounds", str(arguments.rounds)]
    figures = [_alone([*sizes, "--measure-pass", str(threads)], num_threads=threads) for threads in arguments.threads]
    return _published("optimizer_pass_cpu", figures, optimizer_pass.missed(figures), optimizer_pass.table(figures))


def classes_part(arguments: argparse.Namespace) -> list[str]:
    """Measure the passes of `hybrid(cls)`; return a sentence for each missed target."""
    sizes = ["--numel", str(arguments.numel // 2), "--rounds", str(arguments.rounds)]
    figures = _alone([*sizes, "--measure-classes"], num_threads=1)
    wrong, table = optimizer_classes.missed(figures), optimizer_classes.table(figures)
    return _published("optimizer_classes_cpu", figures, wrong, table)


def modes_part(arguments: argparse.Namespace) -> list[str]:
    """Train in the three update modes; return a sentence for each claim that does not hold."""
    figures = _alone(["--rounds", str(arguments.rounds), "--measure-modes"], num_threads=1)
    return _published("optimizer_modes_cpu", figures, optimizer_modes.missed(figures), optimizer_modes.table(figures))


def clip_part(arguments: argparse.Namespace) -> list[str]:
    """Clip gradients with norms from the backward and without; return a sentence for each claim that does not hold."""
    figures = _alone(["--rounds", str(arguments.rounds), "--measure-clip"], num_threads=1)
    return _published("optimizer_clip_cpu", figures, optimizer_clip.missed(figures), optimizer_clip.table(figures))


def disk_part(arguments: argparse.Namespace) -> list[str]:
    """Train with state in memory and on disk; return a sentence for each missed target."""
    where = [] if arguments.disk_path is None else ["--disk-path", arguments.disk_path]
    figures = [_alone(["--measure-disk", case, *where]) for case in optimizer_disk.CASES]
    return _published("optimizer_disk_cpu", figures, optimizer_disk.missed(figures), optimizer_disk.table(figures))


PARTS: dict[str, Callable[[argparse.Namespace], list[str]]] = {
    "pass": pass_part,
    "classes": classes_part,
    "modes": modes_part,
    "clip": clip_part,
    "disk": disk_part,
}


def _alone(command: list[str], num_threads: int | None = None) -> Any:
    """Run this file with the arguments `command` in a new process; return the figures from its last line."""
    threads = {} if num_threads is None else {"OMP_NUM_THREADS": str(num_threads)}
    done = subprocess.run(
        [sys.executable, __file__, *command],
        env={**os.environ, **threads},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def _published(name: str, figures: Any, wrong: list[str], table: str) -> list[str]:
    """Print and save the figures and the table of a part; return `wrong`, its missed targets."""
    load = f"Load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    text = f"{table}\n{load}: seconds compare only if the load comes from the measurement alone.\n"
    print(text)
    path = save(name, {"missed": wrong, "load_average": os.getloadavg(), "figures": figures})
    (RESULTS / f"{name}.md").write_text(text, encoding="utf-8")
    print(f"saved {path}")
    return wrong


def main() -> int:
    """Run the parts from the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--numel", type=int, default=100_000_000)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--disk-path", help="folder on the disk to measure; by default that of temporary files")
    parser.add_argument("--measure-pass", type=int, metavar="THREADS", help="only measure, in this process")
    parser.add_argument("--measure-classes", action="store_true", help="only measure, in this process")
    parser.add_argument("--measure-modes", action="store_true", help="only measure, in this process")
    parser.add_argument("--measure-clip", action="store_true", help="only measure, in this process")
    parser.add_argument("--measure-disk", metavar="CASE", help="only measure, in this process")
    arguments = parser.parse_args()
    if arguments.measure_pass:
        print(json.dumps(optimizer_pass.measured(arguments.numel, arguments.measure_pass, arguments.rounds)))
        return 0
    if arguments.measure_classes:
        print(json.dumps(optimizer_classes.measured(arguments.numel, arguments.rounds)))
        return 0
    if arguments.measure_modes:
        print(json.dumps(optimizer_modes.measured(arguments.rounds)))
        return 0
    if arguments.measure_clip:
        print(json.dumps(optimizer_clip.measured(arguments.rounds)))
        return 0
    if arguments.measure_disk:
        print(json.dumps(optimizer_disk.measured(arguments.measure_disk, arguments.disk_path)))
        return 0
    wrong = [sentence for part in arguments.parts for sentence in PARTS[part](arguments)]
    for sentence in wrong:
        print(f"MISSED  {sentence}")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
