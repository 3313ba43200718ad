"""`torchrun ... elixir-compile measure`: ranks that differ are a fleet, in which later commands plan."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from elixir_compile.ir.hardware import cluster_from_json, fleet_from_json
from elixir_compile.tools.cli.main import app

ROOT = Path(__file__).parents[3]
SCRIPT = """
import os, sys
from elixir_compile.tools.measure.machine import cluster
from elixir_compile.tools.cli.main import app

measured = cluster.measure_rates
if os.environ["RANK"] == "1":
    def slower(*given):
        return {name: rate / 4 if "flops" in name else rate for name, rate in measured(*given).items()}
    cluster.measure_rates = slower
app(["measure", "--seconds", "2", "-o", sys.argv[1]])
"""
"""The second rank says that it computes with a quarter of its rates: it is emulated."""
MODEL = """
import torch
from torch import nn

def make():
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))
    return Loss(model), (torch.empty(8, 256, 256),)

class Loss(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x).square().mean()
"""


@pytest.mark.slow  # 25 s of CPU time
def test_ranks_that_measure_other_rates_are_two_classes_and_get_other_rows(tmp_path: Path) -> None:
    script, file, net = tmp_path / "measure.py", tmp_path / "fleet.json", tmp_path / "net.py"
    script.write_text(SCRIPT, encoding="utf-8")
    net.write_text(MODEL, encoding="utf-8")
    started = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    paths = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ELIXIR_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [*started, str(script), str(file)],
        env={**os.environ, **paths},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the ranks differ: ") == 1  # the first rank writes
    fleet = fleet_from_json(file.read_text(encoding="utf-8"))
    assert fleet.classes() == ((0,), (1,))
    first, second = (fleet.seats[rank].cluster.device.flops_per_s["float32"] for rank in (0, 1))
    assert 1.5 < first / second < 12  # 4, but the ranks share the cores with whatever else runs
    # Both devices have one name, and each rank keeps what it measured in a file of its own.
    kept = sorted((tmp_path / "cache" / "machines").iterdir())
    assert [path.name.split(".")[1:] for path in kept] == [["0", "json"], ["1", "json"]]
    for rank, path in enumerate(kept):
        assert cluster_from_json(path.read_text(encoding="utf-8")) == fleet.seen_by(rank)
    assert fleet.collective is not None
    assert fleet.collective.bytes_per_s > 1e6
    asked = ["plan", f"{net}:make", "--batch", "32", "--dtype", "float32", "--hardware", str(file), "--json"]
    planned = CliRunner().invoke(app, asked)
    assert planned.exit_code == 0, planned.output
    rows = [int(line.split(":")[1].strip(" ,")) for line in planned.stdout.splitlines() if '"num_rows"' in line]
    assert sum(rows) == 32
    assert rows[0] > rows[1]
