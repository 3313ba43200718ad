"""Two gloo ranks of which one is three times slower: shares beside equal rows. The slow rank is **emulated**.

    python benchmarks/emulated_skew.py [--rounds 9] [-o emulated_skew_cpu]

The slow rank runs each region three times, with one thread, and uses the last result; nothing else is slower there.
`elixir.shares` gets the profile of this machine from the first rank and one with a third of its rates from the second.
Both models train in one process per rank, a step of each in turn. Beside wall time, the CPU seconds of the rank with
the most of them are kept: other processes on the cores do not change them.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional

import elixir_compile as elixir
from elixir_compile.ir.hardware import Cluster
from elixir_compile.ir.share import equal_shares
from elixir_compile.runtime.lowering import PlacedRegion
from elixir_compile.tools import plan as planning

TIMES = 3
"""How often the slow rank runs each region."""
BATCH, LENGTH, WIDTH, LAYERS = 16, 64, 256, 4


class Blocks(nn.Module):
    """Blocks of two wide layers; the loss is a mean over rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.ModuleList(nn.Linear(WIDTH, 8 * WIDTH) for _ in range(LAYERS))
        self.down = nn.ModuleList(nn.Linear(8 * WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(functional.gelu(up(x)))
        return x.square().mean()


def slower(cluster: Cluster) -> Cluster:
    """Return `cluster` with a device that computes with a third of its rates."""
    node = cluster.nodes[0]
    device = node.device
    rates = {dtype: rate / TIMES for dtype, rate in device.flops_per_s.items()}
    slow = replace(
        device,
        flops_per_s=rates,
        memory_bytes_per_s=device.memory_bytes_per_s / TIMES,
        launch_s=TIMES * device.launch_s,
    )
    return replace(cluster, nodes=(replace(node, device=slow),) * len(cluster.nodes))


@contextmanager
def emulated(is_slow: bool) -> Iterator[None]:
    """During the block, let this rank run each region `TIMES` times if it `is_slow`, and say so in its profile."""
    run, machine = PlacedRegion.forward, planning.machine

    def repeated(region: PlacedRegion, box: list[Any]) -> Any:
        for _ in range(TIMES - 1):
            region.compiled.run([*box])
        return run(region, box)

    if is_slow:
        PlacedRegion.forward = repeated  # pyright: ignore[reportAttributeAccessIssue]  emulated, until the block ends
        planning.machine = lambda *given: slower(machine(*given))  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        PlacedRegion.forward, planning.machine = run, machine


class Run:
    """A model that trains with given shares."""

    def __init__(self, mesh: DeviceMesh, shares: Sequence[elixir.Share], data: torch.Tensor) -> None:
        self._model = elixir.prepare(Blocks(), mesh=mesh, shares=shares)
        options = {"inner": "aot_eager", "report": False, "plan_cache": False, "replan": False, "search_timeout": 2.0}
        self._compiled = torch.compile(self._model, backend="elixir", options=options)
        self._optimizer = elixir.HybridAdamW(self._model.parameters(), lr=1e-3)
        self._data, self._shares = data, shares

    def step(self) -> tuple[float, float, float]:
        """Train a step; return its seconds, the most CPU seconds of a rank, and the loss of the whole batch."""
        rank = distributed.get_rank()
        first = sum(share.num_rows for share in self._shares[:rank])
        own = self._data[first : first + self._shares[rank].num_rows]
        distributed.barrier()
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        loss = self._compiled(own)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        cpu_s = torch.tensor(time.process_time() - began_cpu_s)
        distributed.barrier()
        wall_s = time.perf_counter() - began_s
        distributed.all_reduce(cpu_s, distributed.ReduceOp.MAX)
        return wall_s, cpu_s.item(), elixir.mean_loss(self._model, loss).item()


def compared(rounds: int) -> dict[str, Any]:
    """Return the rows that `shares` chooses, and the seconds and losses of `rounds` steps of both, in turn.

    Both ranks of the default group call this.
    """
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2,))
    data = torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))
    with emulated(is_slow=distributed.get_rank() == 1):
        shares = elixir.shares(Blocks(), [data], batch=BATCH, mesh=mesh)
        runs = {"equal rows": Run(mesh, equal_shares(2, BATCH), data), "shares": Run(mesh, shares, data)}
        found: dict[str, Any] = {name: {"wall_s": [], "cpu_s": [], "losses": []} for name in runs}
        for number in range(2 + rounds):
            for name, run in runs.items():
                wall_s, cpu_s, loss = run.step()
                found[name]["losses"].append(loss)
                if number >= 2:  # the first step plans, and the second may plan again
                    found[name]["wall_s"].append(wall_s)
                    found[name]["cpu_s"].append(cpu_s)
    return {
        "emulated": f"rank 1 runs each region {TIMES} times",
        "rows": [share.num_rows for share in shares],
        "throughput_ratio": ratio(found, "wall_s"),
        "cpu_ratio": ratio(found, "cpu_s"),
        "runs": found,
    }


def ratio(found: dict[str, Any], what: str) -> float:
    """Return the median over rounds of the seconds with equal rows over those with shares."""
    pairs = zip(found["equal rows"][what], found["shares"][what], strict=True)
    return statistics.median(equal_s / own_s for equal_s, own_s in pairs)


def main() -> None:
    """Start two ranks of this script, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("-o", "--output", default="emulated_skew_cpu")
    parser.add_argument("--figures", type=Path, help="the file for the figures of the first rank, set for each rank")
    args = parser.parse_args()
    if args.figures is None:
        start(args.rounds, args.output)
        return
    distributed.init_process_group("gloo")
    try:
        found = compared(args.rounds)
        if distributed.get_rank() == 0:
            args.figures.write_text(json.dumps(found), encoding="utf-8")
    finally:
        distributed.destroy_process_group()


def start(rounds: int, output: str) -> None:
    """Run both ranks, and save their figures."""
    from machine import save

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
        threads = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        subprocess.run([*command, "--rounds", str(rounds), "--figures", str(file)], check=True, env=threads)
        figures = json.loads(file.read_text(encoding="utf-8"))
    wall, cpu = figures["throughput_ratio"], figures["cpu_ratio"]
    print(f"{figures['rows']} rows, {wall:.2f} times the throughput of equal rows, {cpu:.2f} times by CPU seconds")
    print(f"wrote {save(output, figures)}")


if __name__ == "__main__":
    main()
