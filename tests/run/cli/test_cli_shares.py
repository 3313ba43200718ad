"""`elixir-compile plan --hardware FLEET`: rows, bytes and busy shares of ranks that differ, beside those of rules."""

import json
import re
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

import elixir_compile as elixir
from elixir_compile.ir.share import shares_from_json
from elixir_compile.session.saved import load_answered
from elixir_compile.step import verify
from elixir_compile.tools.cli.main import app

MODEL = '''
import torch
from torch import nn

class Net(nn.Module):
    """Two layers over 1,024 tokens of each row; returns the loss."""
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(512, 2048), nn.Linear(2048, 512)

    def forward(self, x):
        return self.down(self.up(x).relu()).square().mean()

def make():
    return Net(), (torch.empty(16, 1024, 512),)
'''
FLEET = "2 x l4-24g + 1 x a6000-48g + 1 x p40-24g"


@pytest.fixture
def net(tmp_path: Path) -> str:
    file = tmp_path / "net.py"
    file.write_text(MODEL, encoding="utf-8")
    return f"{file}:make"


def cli(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def seconds(text: str, name: str) -> float:
    """The seconds in the line of `text` that begins with `name`."""
    found = re.search(rf"^{name} +([\d.]+) (us|ms|s)\b", text, re.MULTILINE)
    assert found is not None, text
    return float(found[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[found[2]]


def test_a_fleet_gets_shares_that_are_never_longer_than_those_of_rules(net: str, tmp_path: Path) -> None:
    file = tmp_path / "shares.json"
    asked = ("plan", net, "--batch", 64, "--dtype", "float32", "--hardware", FLEET)
    done = cli(*asked, "-o", file)
    assert done.exit_code == 0, done.output
    own_s = seconds(done.output, "step")
    assert "all ranks simulated together" in done.output
    others = {name: seconds(done.output, name) for name in ("equal rows", "by speed", "Cephalo's")}
    assert all(own_s <= other_s for other_s in others.values())
    assert others["equal rows"] > 1.3 * own_s
    shares = shares_from_json(file.read_text(encoding="utf-8"))
    # The function finds the same by the same path, as it has time for all of it; without time, it says so.
    model, inputs = run_path(str(tmp_path / "net.py"))["make"]()
    asked_of_python: dict[str, Any] = {"batch": 64, "hardware": FLEET}
    found = elixir.shares(model, inputs, **asked_of_python)
    assert isinstance(shares, elixir.Shares)
    assert (found, str(found.outcome)) == (shares, str(shares.outcome))
    assert found.outcome.num_simulated >= 2
    assert str(found.outcome) in done.output
    assert found.outcome.step_s == pytest.approx(own_s, rel=0.01)
    quick = elixir.shares(model, inputs, simulate_s=0, **asked_of_python)
    assert quick.outcome.num_simulated == 0
    assert "by the formula of the search" in str(quick.outcome)
    with pytest.raises(elixir.InvalidOption, match=r"option simulate_s: got -1, expected seconds, 0 or more"):
        elixir.shares(model, inputs, simulate_s=-1, **asked_of_python)
    assert sum(share.num_rows for share in shares) == 64
    assert shares[2].num_rows > shares[0].num_rows > 2
    # A plan of each class, which answers its own question: `explain`, `verify` and `report` need no model.
    plans = [load_answered(tmp_path / f"shares.{rank}.json") for rank in (0, 2, 3)]
    for made, asked_for in plans:
        assert asked_for is not None
        assert asked_for.problem.graph.batch == shares[made.rank].num_rows
        verify(asked_for.problem.graph, made)
        assert made.prediction.step_s == pytest.approx(own_s, rel=0.01)

    cephalo = cli(*asked, "--planner", "cephalo")
    assert cephalo.exit_code == 0, cephalo.output
    assert seconds(cephalo.output, "step") == seconds(cephalo.output, "Cephalo's") == others["Cephalo's"]


def test_a_fleet_without_room_is_exit_code_2(net: str) -> None:
    words = ("plan", net, "--batch", 64, "--dtype", "float32", "--hardware", FLEET, "--device-memory", "1MiB")
    for more in ((), ("--planner", "cephalo")):
        done = cli(*words, *more, "--json")
        assert done.exit_code == 2
        assert "no shares of 64 rows fit the ranks" in json.loads(done.stdout)["error"]


def test_a_rule_for_shares_is_for_fleets(net: str) -> None:
    done = cli("plan", net, "--hardware", "a100-40g", "--planner", "cephalo")
    assert done.exit_code == 1
    assert "option planner: got 'cephalo'" in done.output
