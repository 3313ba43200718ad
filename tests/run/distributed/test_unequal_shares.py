"""Ranks that own unequal parts, rows or speeds: trained as one process does, suggested, taken and measured."""

import os
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from elixir_compile.ir.hardware import cluster_from_json, fleet_from_json
from elixir_compile.tools.cli.main import app
from tests.run import shares_checks
from tests.run.processes import in_turn, spawn
from tests.run.shares_checks import STEPS, TAKEN_BATCH

# ----------------------------------------------------------------------------------------------------------------------
# Three ranks that own unequal parts of parameters and state train as one process does, and hold what they own.


LIMIT_S = 240.0


def all_of(state: list[float], folder: Path, *checks: list[Any]) -> list[list[Any]]:
    """Return what each of `checks` returns on each rank."""
    how = {"folder": folder, "limit_s": LIMIT_S, "timeout_s": LIMIT_S}
    return spawn(shares_checks.all_with_shards, len(state), state, checks, **how)


def test_parts_of_seven_two_and_one_rows_answer_as_the_whole_tensor(tmp_path: Path) -> None:
    spawn(shares_checks.answers_as_the_whole, 3, str(tmp_path / "dcp"), folder=tmp_path, limit_s=LIMIT_S)


def test_checkpoints_of_unequal_parts_load_on_one_rank_and_on_other_parts(tmp_path: Path) -> None:
    found = spawn(shares_checks.reshards, 3, str(tmp_path), folder=tmp_path, limit_s=LIMIT_S)
    assert found == [[0, 151, 150]] * 3


@pytest.mark.slow  # 40 s of CPU time
def test_unequal_parts_train_as_one_process(tmp_path: Path) -> None:
    checks = ["has_states"], ["keeps_habits"], ["clips_what_has_arrived"], ["weighs_uneven_batches"], ["recovers", 1.1]
    all_of([0.6, 0.3, 0.1], tmp_path, *checks)


@pytest.mark.slow  # 20 s of CPU time
def test_a_rank_without_a_part_trains_as_one_process(tmp_path: Path) -> None:
    by_host = {"tightness": 1.15}
    checks = ["trains", "odd", by_host], ["trains", "odd", {"optimizer": "adamw"}], ["averages_what_is_whole"]
    of_ranks = all_of([0.0, 0.5, 0.5], tmp_path, *checks)
    for found in of_ranks:
        for trained in found[:2]:
            assert max(trained[what] for what in ("loss", "norm", "weights")) < 1e-12
            assert trained["moved"] > 1e-4
    # Each rank has homes of its own: what has no part needs no host.
    assert [found[0]["optim"] for found in of_ranks] == [["device"], ["host"], ["host"]]


@pytest.mark.slow  # 10 s of CPU time
def test_padded_buffers_of_unequal_parts_train_as_one_process(tmp_path: Path) -> None:
    for (trained,) in all_of([0.3, 0.4, 0.3], tmp_path, ["trains", "odd", {"dtype": "float32", "optimizer": "adamw"}]):
        assert max(trained[what] for what in ("loss", "norm", "weights")) < 2e-6


# ----------------------------------------------------------------------------------------------------------------------
# Three real ranks with unequal rows train what one process trains on the whole batch.


def on_ranks(num: int, folder: Path, *checks: list[Any]) -> list[list[Any]]:
    """Return what each of `checks` returns on each of `num` ranks."""
    return spawn(in_turn, num, shares_checks.__name__, checks, folder=folder, limit_s=LIMIT_S, timeout_s=LIMIT_S)


def test_rows_of_five_two_and_one_are_eight_rows(tmp_path: Path) -> None:
    trains = ["trains", [5, 2, 1], "float64", 1e-12]
    exact = ["is_exact_in_whole_numbers", [5, 2, 1]]
    weights, other = ["needs_its_weights", [5, 2, 1]], ["refuses_other_shares"]
    of_ranks = on_ranks(3, tmp_path, trains, exact, weights, other, ["warns_of_other_rows"])
    for rank, (_, _, off, refused, warned) in enumerate(of_ranks):
        assert off > 1e-2
        given, others, few, much, axes = refused
        assert given.startswith("RanksDiffer")
        assert "rank 0 prepares its model with no shares" in given
        assert "rank 1 does not do what the others do" in others
        assert few.startswith("InvalidOption: option shares: got [0, 1], expected one per rank of the mesh, 3")
        assert "state that sums to 1" in much
        assert axes.startswith("UnsupportedModel: the mesh")
        assert "shares are for one axis" in axes
        rows = [re.match(r"a batch of (\d+) rows on rank 0, whose share is 2 of 6\.", text)[1] for text in warned]
        assert rows == (["3", "5", "9"] if rank == 0 else [])


def test_ranks_that_a_collective_of_the_model_joins_weigh_their_rows_alike(tmp_path: Path) -> None:
    """Their plans are equal although their budgets differ, because they must run as many collectives."""
    for ((planned, said),) in on_ranks(2, tmp_path, ["trains_with_a_collective_of_its_own"]):
        assert planned["budget"] == 60_000
        assert planned["tensor"] is None
        assert (planned["own"]["num_ranks"], planned["own"]["num_collectives"]) == (2, 2)  # one for each direction
        assert planned["own"]["run_s"] > 0
        assert "own collectives" in planned["text"], planned
        for error in said:
            assert "rank 1 weighs its batch by 4 samples" in error
            assert "Give every rank as many rows" in error


def test_questions_that_no_shares_answer_are_named(tmp_path: Path) -> None:
    for [(axes, few, mixed, row, other, prime, half, room)] in on_ranks(3, tmp_path, ["refuses_other_questions"]):
        assert axes.startswith("UnsupportedModel")
        assert "shares are for one axis" in axes
        assert "expected a fleet of 3 devices" in few
        assert "expected a fleet of 3 devices" in mixed
        assert "option batch: got 1, expected a whole number of rows, 2 or more" in row
        assert other.startswith("RanksDiffer")
        assert re.search("rank 1 asks for shares of 10 rows on ", other)
        assert "option batch: got 4099, expected a multiple of a number of rows that ranks can share out" in prime
        assert "option batch: got 7.5, expected a whole number of rows, 2 or more" in half
        assert re.match(r"NoFeasibleShares: no shares of 1048576 rows fit the ranks, beside a state of", room)


@pytest.mark.slow
def test_a_rank_without_rows_tokens_and_single_precision(tmp_path: Path) -> None:
    """12 s of CPU time."""
    on_ranks(
        3,
        tmp_path,
        ["trains", [6, 2, 0], "float64", 1e-12],
        ["trains", [5, 2, 1], "float32", 1e-6],
        ["weighs_tokens", [5, 2, 1]],
        ["is_exact_in_whole_numbers", [4, 2, 2]],
    )


# ----------------------------------------------------------------------------------------------------------------------
# The rows that are suggested after seven steps, applied in the same run: log line, `take`, shorter steps.


def test_the_suggested_rows_are_taken_and_steps_are_shorter(tmp_path: Path) -> None:
    """Emulated: the clock of rank 1 jumps three times as far as that of rank 0 for each row."""
    checks = [["takes", [8, 8], True], ["refuses_to_take"]]
    ranks = spawn(in_turn, 2, shares_checks.__name__, checks, folder=tmp_path, limit_s=LIMIT_S, timeout_s=LIMIT_S)
    (first, refused), (second, _) = ranks
    at, rows = first["taken"]
    assert [at, rows] == second["taken"]
    assert 7 <= at <= 9
    assert sum(rows) == TAKEN_BATCH
    assert rows[0] >= 11
    assert f"shares would be {rows[0]}/{rows[1]}: " in first["line"][0]
    assert second["line"] == []  # one rank writes
    for rank, found in enumerate((first, second)):
        assert found["rows"] == [8] * at + [rows[rank]] * (STEPS - at)
        assert found["grads"] < 1e-12
        assert found["losses"] < 1e-12
    # A step takes as long as that of the slowest rank, for which the others wait.
    # The first two with each number of rows compile. Other processes make a step longer, never shorter.
    steps_s = list(map(max, first["step_s"], second["step_s"]))
    before, after = steps_s[2:at], steps_s[at + 2 :]
    assert min(before) >= 1.5 * min(after), (before, after)
    differ, batch, parts, few, when = refused
    assert differ.startswith("RanksDiffer")
    assert "rank 1 takes shares" in differ
    assert "option shares: got 10, expected rows of the batch of 8 in all" in batch
    assert "expected the parts of the state that the ranks own, [0.5, 0.5]: only rows change" in parts
    assert few.startswith("InvalidOption: option shares: got")
    assert "from batch 1 of epoch 0 on" in when
    assert "from batch 2 of epoch 0 on" in when


@pytest.mark.slow  # 30 s of CPU time
@pytest.mark.parametrize(("rows", "has_shares"), [([4, 8, 4], True), ([8, 8], False)])
def test_rows_change_beside_a_rank_whose_rows_stay_and_without_earlier_shares(
    tmp_path: Path, rows: list[int], has_shares: bool
) -> None:
    checks = [["takes", rows, has_shares]]
    for [found] in spawn(
        in_turn, len(rows), shares_checks.__name__, checks, folder=tmp_path, limit_s=LIMIT_S, timeout_s=LIMIT_S
    ):
        _, taken = found["taken"]
        assert sum(taken) == TAKEN_BATCH
        assert taken[1] < 8
        assert found["grads"] < 1e-12


# ----------------------------------------------------------------------------------------------------------------------
# A rank that is three times slower, **emulated**: shares find it in the profiles, and train faster than equal rows.


BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def compared(rank: int, world_size: int, rounds: int) -> dict[str, Any]:
    sys.path.insert(0, str(BENCHMARKS))
    import emulated_skew

    return emulated_skew.compared(rounds)


@pytest.mark.slow  # 25 s of CPU time
def test_shares_are_three_to_one_and_at_least_one_and_a_half_times_as_fast(tmp_path: Path) -> None:
    """1.5 times the throughput of equal rows, by the CPU seconds of the rank with the most of them in each case.

    By wall time it is asked only if both ranks had cores of their own, which a median step with shares tells: it takes
    less than 1.2 times its CPU seconds. With shares both ranks compute at once and need two cores; with equal rows the
    quick rank waits two thirds of the step, so a machine with other work slows the step with shares alone.
    """
    found, other = spawn(compared, 2, 7, folder=tmp_path, limit_s=400, timeout_s=300)
    assert found["rows"] == other["rows"] == [12, 4]
    equal, shared = found["runs"]["equal rows"], found["runs"]["shares"]
    for loss, expected in zip(shared["losses"], equal["losses"], strict=True):
        assert loss == pytest.approx(expected, rel=1e-5)
    assert found["cpu_ratio"] >= 1.5, (equal["cpu_s"], shared["cpu_s"])
    # With shares both ranks compute at once, so on a machine with other work they wait for cores, equal rows do not.
    has_its_cores = statistics.median(shared["wall_s"]) < 1.2 * statistics.median(shared["cpu_s"])
    assert found["throughput_ratio"] >= 1.5 or not has_its_cores, (equal["wall_s"], shared["wall_s"])


# ----------------------------------------------------------------------------------------------------------------------
# `torchrun ... elixir-compile measure`: ranks that differ are a fleet, in which later commands plan.


ROOT = Path(__file__).parents[3]
SCRIPT = """
import os, sys
from elixir_compile.tools.measure import machine
from elixir_compile.tools.cli.main import app

measured = machine.measure_rates
if os.environ["RANK"] == "1":
    def slower(*given):
        return {name: rate / 4 if "flops" in name else rate for name, rate in measured(*given).items()}
    machine.measure_rates = slower
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
