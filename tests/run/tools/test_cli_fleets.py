"""`elixir-compile plan` for ranks that differ and for stages of a pipeline."""

import functools
import json
import re
from dataclasses import replace
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest
import torch
from click.testing import Result
from torch import nn
from typer.testing import CliRunner

import elixir_compile as elixir
from elixir_compile.base.errors import InvalidOption, NoFeasibleStages, UnknownSchedule
from elixir_compile.base.options import parse_options
from elixir_compile.base.units import MIB
from elixir_compile.ir.hardware import Fleet, parse_fleet
from elixir_compile.ir.pipeline import PipelinePlan, TorchSchedule
from elixir_compile.ir.share import shares_from_json
from elixir_compile.session.plan_files import load_answered
from elixir_compile.step import verify
from elixir_compile.tools.cli.main import app
from elixir_compile.tools.plan import fleet_of_ranks, of_micro_batch, stage_search
from elixir_compile.tools.preview.capture import Capture
from elixir_compile.tools.preview.few_layers import capture_model
from elixir_compile.tools.preview.models import find_described

# ----------------------------------------------------------------------------------------------------------------------
# `elixir-compile plan --hardware FLEET`: rows, bytes and busy shares of ranks that differ, beside those of rules.


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


# ----------------------------------------------------------------------------------------------------------------------
# `elixir-compile plan --stages` and `plan_stages`: stages of equal seconds within each budget, and clear errors.


EIGHT_LAYERS = '''
import torch
from torch import nn

class Net(nn.Module):
    """Eight equal layers; returns the loss."""
    def __init__(self):
        super().__init__()
        layers = [nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(8)]
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()

def make():
    return Net(), (torch.empty(16, 512, 256),)
'''
TWO = "2 x a100-40g"
GPIPE = TorchSchedule.GPIPE


class Net(nn.Module):
    """Eight equal layers; returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(8)]
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


@functools.cache
def captured() -> Capture:
    with torch.device("meta"):
        model = Net()
    return capture_model(find_described(model, INPUTS), INPUTS, options=parse_options({}))


INPUTS = [torch.empty(16, 512, 256, device="meta")]


def planned(
    micro_batches: int = 4,
    *,
    schedule: TorchSchedule = TorchSchedule.ONE_F_ONE_B,
    stages: int = 2,
    hardware: "str | Fleet" = TWO,
    ranks: int | None = None,
    **options: object,
) -> PipelinePlan:
    """Return what `plan_stages` does for `Net`, which is captured once."""
    chosen, fleet = parse_options(options), fleet_of_ranks(hardware, stages, schedule, ranks)
    own = replace(captured(), graph=of_micro_batch(captured().graph, micro_batches))
    return stage_search(own, fleet, chosen, 16, micro_batches).best(schedule, stages)


def plan_cli(*words: object) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, words)])


@pytest.fixture
def eight_layers(tmp_path: Path) -> str:
    file = tmp_path / "net.py"
    file.write_text(EIGHT_LAYERS, encoding="utf-8")
    return f"{file}:make"


def test_equal_layers_make_equal_stages_with_the_figures_of_hand() -> None:
    """A message is 4 rows of 512 x 256 fp32; a layer has 525,568 parameters in fp32, with gradient and moments."""
    made = planned()
    assert [len(stage.layers) for stage in made.stages] == [4, 4]
    assert made.split_points == ("layers.4",)
    assert [stage.outstanding for stage in made.stages] == [2, 1]
    assert [stage.sent_bytes for stage in made.stages] == [4 * 512 * 256 * 4, 0]
    assert [rank.sent_bytes for rank in made.ranks] == [4 * 4 * 512 * 256 * 4] * 2
    state_bytes = 4 * (256 * 1024 * 2 + 1024 + 256) * 16
    assert state_bytes < made.ranks[1].peak_bytes < state_bytes + 100 * MIB
    assert {stage.treatment for stage in made.stages} == {"kept"}
    assert made.stages[0].modules == tuple(f"layers.{number}" for number in range(4))


def test_looped_stages_go_round_the_ranks_and_the_bubble_is_smaller() -> None:
    made = elixir.plan_stages(Net(), INPUTS, stages=4, schedule="ScheduleLoopedBFS", micro_batches=4, hardware=TWO)
    assert [stage.rank for stage in made.stages] == [0, 1, 0, 1]
    assert [len(stage.layers) for stage in made.stages] == [2, 2, 2, 2]
    outlook = {str(other.schedule): other for other in made.compared}
    assert outlook.keys() == {"gpipe", "1f1b", "interleaved-1f1b", "looped-bfs"}
    assert outlook["looped-bfs"].step_s == made.step_s
    assert outlook["1f1b"].peak_bytes < outlook["gpipe"].peak_bytes


def test_less_memory_recomputes_then_moves_state_to_the_host_and_is_never_faster() -> None:
    free = planned(8, schedule=GPIPE)
    most_bytes = max(rank.peak_bytes for rank in free.ranks)
    previous_s = free.step_s
    seen: set[str] = set()
    with pytest.raises(NoFeasibleStages) as failed:
        planned(8, schedule=GPIPE, device_memory=8 * MIB)
    for budget in (int(0.9 * most_bytes), most_bytes // 2, failed.value.needed_bytes):
        made = planned(8, schedule=GPIPE, device_memory=budget)
        assert all(rank.peak_bytes <= budget for rank in made.ranks)
        assert made.step_s >= previous_s
        previous_s = made.step_s
        seen |= {stage.treatment for stage in made.stages} | {stage.homes for stage in made.stages}
    assert any(text.startswith("recomputed") for text in seen)
    assert any("optim host" in text for text in seen)


def test_a_slower_rank_gets_fewer_layers() -> None:
    made = planned(hardware=parse_fleet("1 x a100-40g | 1 x p40-24g"))
    assert len(made.stages[0].layers) > len(made.stages[1].layers)
    assert [rank.device for rank in made.ranks] == ["a100-40g", "p40-24g"]


def test_what_does_not_fit_names_the_bytes_that_do() -> None:
    with pytest.raises(NoFeasibleStages, match=r"layers\.\d .. layers\.\d needs .* budget 8.0 MiB") as failed:
        planned(device_memory=8 * MIB)
    enough = failed.value.needed_bytes
    made = planned(device_memory=enough)
    assert all(rank.peak_bytes <= enough for rank in made.ranks)


def test_a_host_that_is_too_small_is_named_with_the_bytes_that_are_enough() -> None:
    with pytest.raises(NoFeasibleStages) as failed:
        planned(device_memory=8 * MIB)
    lean: dict[str, object] = {"device_memory": failed.value.needed_bytes}
    with pytest.raises(NoFeasibleStages, match=r"of host memory with . outstanding forwards?, budget 1\.0 MiB") as host:
        planned(**lean, host_memory=MIB)  # pyright: ignore[reportArgumentType]
    made = planned(**lean, host_memory=host.value.needed_bytes)  # pyright: ignore[reportArgumentType]
    assert all(rank.host_bytes <= host.value.needed_bytes for rank in made.ranks)


def test_a_budget_below_what_libraries_take_is_refused_too() -> None:
    with pytest.raises(NoFeasibleStages, match=r"budget 1 B, short by"):
        planned(device_memory=1)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"stages": 16, "schedule": GPIPE, "hardware": "a100-40g", "ranks": 16}, "got 16, expected at most 8"),
        ({"stages": 3, "schedule": TorchSchedule.LOOPED_BFS}, "a multiple of the 2 ranks, such as 4"),
        ({"stages": 4, "schedule": GPIPE}, "a stage per rank under gpipe"),
        ({"micro_batches": 3}, "divides the batch of 16 rows, such as 2"),
        ({"ranks": 3}, "2, as 2 x a100-40g has devices"),
        ({"planner": "greedy"}, "option planner: got 'greedy', expected nothing beside stages"),
    ],
)
def test_numbers_that_do_not_go_together_are_refused_with_a_number_that_does(
    asked: dict[str, object], expected: str
) -> None:
    with pytest.raises(InvalidOption, match=expected):
        planned(**asked)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("wrong", [{"stages": 2.0}, {"stages": 0}, {"micro_batches": True}, {"ranks": -1}])
def test_what_is_no_number_of_one_or_more_is_refused_before_the_capture(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption, match=r"expected a number of 1 or more"):
        elixir.plan_stages(Net(), INPUTS, **{"stages": 2, "schedule": "gpipe", "micro_batches": 4} | wrong)


def test_a_schedule_of_another_name_is_refused_before_the_capture() -> None:
    with pytest.raises(UnknownSchedule, match="Did you mean 'gpipe'"):
        elixir.plan_stages(Net(), INPUTS, stages=2, schedule="gpip", micro_batches=4)


def test_the_command_prints_stages_ranks_and_every_schedule(eight_layers: str, tmp_path: Path) -> None:
    file = tmp_path / "stages.json"
    asked = ("--stages", 4, "--schedule", "looped-bfs", "--micro-batches", 4, "--batch", 16, "--dtype", "float32")
    done = plan_cli(eight_layers, *asked, "--hardware", TWO, "-o", file)
    assert done.exit_code == 0, done.output
    for text in ("layers.0 .. layers.1", "split points", "layers.2, layers.4, layers.6", "interleaved-1f1b  4 stages"):
        assert text in done.output
    saved = json.loads(file.read_text(encoding="utf-8"))
    assert (saved["rows"], saved["micro_batches"], len(saved["stages"])) == (16, 4, 4)


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (["--stages", 4], 1, "a number beside --stages, such as --micro-batches 8"),
        (["--schedule", "gpipe"], 1, "--stages beside it"),
        (["--stages", 2, "--micro-batches", 4, "--tune"], 1, "no --tune and no --largest-batch beside --stages"),
        (["--stages", 2, "--micro-batches", 3, "--batch", 16], 1, "divides the batch of 16 rows, such as 2"),
        (
            ["--stages", 2, "--micro-batches", 2, "--batch", 16, "--device-memory", "8MiB"],
            2,
            "no stages fit under 1f1b",
        ),
    ],
)
def test_arguments_that_do_not_go_together_exit_with_an_error(
    eight_layers: str, words: list[object], code: int, expected: str
) -> None:
    done = plan_cli(eight_layers, *words, "--hardware", TWO, "--dtype", "float32", "--json")
    assert done.exit_code == code, done.output
    assert expected in json.loads(done.output)["error"]
