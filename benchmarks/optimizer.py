"""How fast is the hybrid optimizer?

    python benchmarks/optimizer.py [--parts pass disk] [--numel 100000000] [--rounds 11] [--threads 1 2]

pass    one update on the host, against torch's and DeepSpeed's and against a loop that only moves the bytes
disk    GPT-2 124M with all optimizer state on disk: losses, resident memory, step time (`--disk-path FOLDER`)

Each number of threads has a process of its own: what OpenMP takes is settled when it starts. Exit code 1 when a target
is missed. DeepSpeed is optional: `DS_BUILD_CPU_ADAM=1 pip install --no-build-isolation '.[bench]'`.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import optimizer_disk
from machine import RESULTS, save
from optimizer_pass import measured, missed, table


def pass_part(arguments: argparse.Namespace) -> list[str]:
    """Measure the host pass, print and save it; return the targets that it misses."""
    figures: list[dict[str, Any]] = []
    for num_threads in arguments.threads:
        command = [sys.executable, __file__, "--numel", str(arguments.numel), "--rounds", str(arguments.rounds)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(num_threads)}
        done = subprocess.run(
            [*command, "--measure-pass", str(num_threads)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        figures.append(json.loads(done.stdout.splitlines()[-1]))
    wrong = missed(figures)
    text = table(figures)
    print(text)
    path = save("optimizer_pass_cpu", {"missed": wrong, "load_average": os.getloadavg(), "figures": figures})
    (RESULTS / "optimizer_pass_cpu.md").write_text(text, encoding="utf-8")
    print(f"saved {path}")
    return wrong


def disk_part(arguments: argparse.Namespace) -> list[str]:
    """Train with state in memory and on disk, each in a process of its own; return the targets that are missed."""
    figures: list[dict[str, Any]] = []
    where = [] if arguments.disk_path is None else ["--disk-path", arguments.disk_path]
    for case in optimizer_disk.CASES:
        command = [sys.executable, __file__, "--measure-disk", case, *where]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        figures.append(json.loads(done.stdout.splitlines()[-1]))
    wrong = optimizer_disk.missed(figures)
    load = f"Load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    text = f"{optimizer_disk.table(figures)}\n{load}: seconds compare only where it is about 1.\n"
    print(text)
    path = save("optimizer_disk_cpu", {"missed": wrong, "load_average": os.getloadavg(), "figures": figures})
    (RESULTS / "optimizer_disk_cpu.md").write_text(text, encoding="utf-8")
    print(f"saved {path}")
    return wrong


PARTS: dict[str, Callable[[argparse.Namespace], list[str]]] = {"pass": pass_part, "disk": disk_part}


def main() -> int:
    """Run the parts asked for; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--numel", type=int, default=100_000_000)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--measure-pass", type=int, metavar="THREADS", help="only measure, in this process")
    parser.add_argument("--disk-path", help="folder on the disk to measure; by default that of temporary files")
    parser.add_argument("--measure-disk", metavar="CASE", help="only measure, in this process")
    arguments = parser.parse_args()
    if arguments.measure_pass:
        print(json.dumps(measured(arguments.numel, arguments.measure_pass, arguments.rounds)))
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
