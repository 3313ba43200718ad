"""`memory_schedule` and its pytest plugin: values that agree with a measured step, goldens, and failures with
facts."""

import importlib
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import elixir_compile as elixir
from elixir_compile.ir import Kind, Saving, Tier
from elixir_compile.ir.hardware import preset
from elixir_compile.step import plan_timeline
from elixir_compile.tools.testing import MemorySchedule, MemorySchedules
from elixir_compile.tools.testing.step_memory import is_named
from tests.run.models import Stack, small_gpt2, tokens, vectors

# ----------------------------------------------------------------------------------------------------------------------
# `memory_schedule`: the value agrees with the plan, the timeline and a measured step; assertions fail with facts.


GREEDY: Any = {"planner": "greedy", "inner": "aot_eager", "hardware": "a100-40g", "micro_batches": 1}
BATCH = torch.empty(256, 64, device="meta")
BUDGET_BYTES = 2_300_000
"""Half of what a step of `Stack` on `BATCH` holds with everything on the device."""


@pytest.fixture(scope="module")
def tight() -> MemorySchedule:
    plans = MemorySchedules(test_file=Path(__file__))
    return plans(Stack, BATCH, device_memory=BUDGET_BYTES, **GREEDY)


@pytest.fixture(scope="module")
def kept() -> MemorySchedule:
    return MemorySchedules(test_file=Path(__file__))(Stack, BATCH, **{**GREEDY, "planner": "keep_all"})


def test_the_value_says_what_plan_and_timeline_say(tight: MemorySchedule, memory_schedule: MemorySchedules) -> None:
    options = {name: value for name, value in GREEDY.items() if name != "hardware"}
    budget = {"device_memory": BUDGET_BYTES, "plan_cache": False}
    made = elixir.plan(Stack, (BATCH,), hardware="a100-40g", options={**options, **budget})
    assert tight.plan == made
    assert tight.timeline == plan_timeline(tight.graph, made)
    assert tight.peak_bytes == made.prediction.device_peak_bytes <= BUDGET_BYTES
    assert tight.host_peak_bytes == made.prediction.host_peak_bytes > 0
    assert sum(tight.peak_by_kind.values()) == tight.peak_bytes
    assert tight.counts["gather"] == sum(str(action).startswith("gather") for action in made.schedules[0].actions)
    assert tight.placements.keys() == dict(Stack().named_parameters()).keys()
    on_host = [name for name, own in tight.placements.items() if own.optim == "host"]
    assert sum(row.state_bytes["host"] for row in tight.layers.values()) == 8 * sum(
        param.numel() for name, param in Stack().named_parameters() if name in on_host
    )
    assert tight.simulated.step_s == pytest.approx(made.prediction.step_s)


def test_layers_hold_what_their_modules_hold(kept: MemorySchedule) -> None:
    assert kept.peak_bytes > 2 * BUDGET_BYTES
    held = kept.layer_bytes()
    assert sum(nbytes for own in held.values() for nbytes in own.values()) == kept.peak_bytes
    block_bytes = 4 * sum(param.numel() for param in Stack().blocks[0].parameters())
    for number in range(4):
        assert (held[f"blocks.{number}"][Kind.PARAM], held[f"blocks.{number}"][Kind.MOMENT]) == (
            block_bytes,
            2 * block_bytes,
        )
    assert held["head"][Kind.PARAM] == 4 * (64 * 64 + 64)
    assert held["inputs"] == {Kind.INPUT: 4 * BATCH.numel()}
    end = kept.layer_bytes(kept.timeline.ops[-1])
    assert {kind for own in end.values() for kind in own} <= {*Kind} - {Kind.SAVED}


def test_assertions_pass_for_what_is_so_and_fail_with_layers_and_reasons(tight: MemorySchedule) -> None:
    tight.assert_peak_below(BUDGET_BYTES)
    tight.assert_host_peak_below("1GiB")
    treated = {layer: {saving for saving in Saving if row.saved_bytes[saving]} for layer, row in tight.layers.items()}
    recomputed = [layer for layer, own in treated.items() if Saving.RECOMPUTE in own]
    assert recomputed
    assert Saving.RECOMPUTE not in treated["head"]
    tight.assert_recomputed("blocks.*", at_least=len(recomputed))
    for layer in recomputed:
        tight.assert_recomputed(layer)
        with pytest.raises(AssertionError, match=r"expected activations of .* to be kept(?s:.)*recomputed .*KiB"):
            tight.assert_kept(layer)
    with pytest.raises(AssertionError, match=f"{len(recomputed) + 1} of 4 layers 'blocks.\\*' to be recomputed"):
        tight.assert_recomputed("blocks.*", at_least=len(recomputed) + 1)
    with pytest.raises(AssertionError, match=r"activations of 1 of 1 layers 'head' to be recomputed(?s:.)*head .*kept"):
        tight.assert_recomputed("head")
    homes = {layer: {tier for tier in Tier if row.state_bytes[tier]} for layer, row in tight.layers.items()}
    assert {Tier.HOST} in homes.values()
    for layer, tiers in homes.items():
        (tier,) = tiers
        tight.assert_placed(layer, optim=tier)
        other = Tier.DEVICE if tier is Tier.HOST else Tier.HOST
        with pytest.raises(AssertionError, match=f"expected the optimizer state of '{layer}' on {other}(?s:.)*{tier}"):
            tight.assert_placed(layer, optim=other)


def test_a_step_that_keeps_everything_recomputes_and_offloads_nothing(kept: MemorySchedule) -> None:
    kept.assert_kept("*")
    kept.assert_placed("*", param="device", optim="device")
    for refuse in (kept.assert_recomputed, kept.assert_offloaded):
        with pytest.raises(AssertionError, match=r"blocks.3"):
            refuse("blocks.*")


def test_a_peak_above_the_limit_names_what_is_largest(kept: MemorySchedule) -> None:
    with pytest.raises(AssertionError, match=rf"device 4.5 MiB \({kept.peak_bytes} B\) is 1 B above 4.5 MiB"):
        kept.assert_peak_below(kept.peak_bytes - 1)
    kept.assert_peak_below(kept.peak_bytes)
    with pytest.raises(AssertionError, match=r"blocks.\d +moment"):
        kept.assert_peak_below("1MiB")
    with pytest.raises(elixir.InvalidOption, match="limit"):
        kept.assert_peak_below("much")


def test_names_that_do_not_exist_are_refused_with_those_that_do(kept: MemorySchedule) -> None:
    with pytest.raises(elixir.UnknownSubject, match=r"Did you mean 'blocks.3'"):
        kept.assert_kept("block.*")
    with pytest.raises(elixir.InvalidOption, match="'device', 'host', 'disk'"):
        kept.assert_placed("*", param="gpu")


@pytest.mark.parametrize(
    ("path", "pattern", "is_so"),
    [
        ("model.layers.3", "layers.*", True),
        ("model.layers.3", "layers.[12]", False),
        ("model.layers.3", "model.*.3", True),
        ("model.layers.3", "layers", True),
        ("model.layers.3", "layer", False),
        ("lm_head", "head", False),
        ("lm_head", "*head", True),
        ("lm_head", "lm_head.*", False),
    ],
)
def test_patterns_name_parts_of_a_path(path: str, pattern: str, is_so: bool) -> None:
    assert is_named(path, pattern) is is_so


def test_a_measured_step_is_compared_with_its_plan(memory_schedule: MemorySchedules) -> None:
    model, batch = Stack(), vectors(1, rows=256)[0]
    options = {**GREEDY, "hardware": preset("a100-40g"), "device_memory": BUDGET_BYTES}
    found = memory_schedule(model, batch, run=True, **options)
    found.assert_runs_as_planned(tolerance=0.01)
    found.assert_peak_below(BUDGET_BYTES)
    assert found.measured is not None
    assert found.measured.counts["gather"] == found.counts["gather"] > 0
    assert all(param.grad is None and not param.is_meta for param in model.parameters())
    wrong = MemorySchedule(
        plan=found.plan,
        graph=found.graph,
        simulated=found.simulated,
        measured=elixir.Record(
            origin=found.measured.origin, step_s=1.0, device_peak_bytes=4 << 20, host_peak_bytes=1 << 40
        ),
        test_file=Path(__file__),
    )
    with pytest.raises(AssertionError, match=r"gather +\d+ +0"):
        wrong.assert_runs_as_planned()
    with pytest.raises(AssertionError, match=r"measured peak on the device 4.0 MiB"):
        wrong.assert_peak_below(BUDGET_BYTES)
    with pytest.raises(AssertionError, match=r"measured peak on the host 1.0 TiB"):
        wrong.assert_host_peak_below("1GiB")


def test_a_step_runs_only_with_weights_and_is_compared_only_if_it_ran(
    memory_schedule: MemorySchedules, kept: MemorySchedule
) -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    for given in (model, Stack, "llama-7b"):
        with pytest.raises(elixir.UnsupportedModel, match="needs a module with weights"):
            memory_schedule(given, torch.empty(2, 4), run=True)
    with pytest.raises(elixir.InvalidOption, match="run"):
        kept.assert_runs_as_planned()


def test_a_golden_needs_a_machine_by_name(memory_schedule: MemorySchedules, kept: MemorySchedule) -> None:
    here = memory_schedule(Stack, BATCH, planner="keep_all", inner="aot_eager")
    with pytest.raises(elixir.InvalidOption, match="hardware"):
        here.assert_matches_golden("here")
    with pytest.raises(AssertionError, match="there is no golden"):
        kept.assert_matches_golden("none")


@pytest.mark.slow
def test_a_model_of_hugging_face_by_name_and_by_keyword_runs(memory_schedule: MemorySchedules) -> None:
    """A minute on two busy cores."""
    pytest.importorskip("transformers")
    ids = torch.empty(1, 128, dtype=torch.int64, device="meta")
    large = memory_schedule("gpt2-124m", {"input_ids": ids, "labels": ids}, hardware="4 x a100-40g", planner="greedy")
    assert len([layer for layer in large.layers if is_named(layer, "h.*")]) == 12
    (batch, *_) = tokens()
    small = memory_schedule(small_gpt2(), {"input_ids": batch, "labels": batch}, run=True, inner="aot_eager")
    small.assert_runs_as_planned()


# ----------------------------------------------------------------------------------------------------------------------
# The pytest plugin in test runs of its own: the page of the docs, goldens, and what it loads.


ROOT = Path(__file__).parents[3]
PLUGIN = "elixir_compile.testing.plugin"

GOLDEN_TEST = """
import torch
from torch import nn

def make():
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, n), nn.GELU(), nn.Linear(n, 16)) for n in WIDTHS))

def test_memory(memory_schedule):
    batch = torch.empty(8, 16)
    schedule = memory_schedule(make, batch, hardware="a100-40g", planner="keep_all", inner="aot_eager")
    schedule.assert_matches_golden("tiny")
"""


@pytest.fixture(scope="module")
def loaded() -> None:
    """Load all modules that a plan needs: pytester forgets those that its runs import, and torch registers once."""
    plans = MemorySchedules(test_file=Path(__file__), writes_goldens=False)
    plans(torch.nn.Linear(4, 4), torch.empty(2, 4), hardware="a100-40g", planner="keep_all", inner="aot_eager")


def run_pytest(pytester: pytest.Pytester, *args: str) -> pytest.RunResult:
    return pytester.runpytest_inprocess("-p", PLUGIN, "-p", "no:cacheprovider", *args)


def write_test(pytester: pytest.Pytester, widths: str) -> None:
    pytester.makepyfile(test_of_a_user=f"WIDTHS = {widths}\n{GOLDEN_TEST}")


@pytest.mark.usefixtures("loaded")
def test_the_block_of_the_page_is_a_test_file_that_passes(pytester: pytest.Pytester) -> None:
    page = (ROOT / "docs" / "testing-memory.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    pytester.makepyfile(test_of_the_page=block)
    run_pytest(pytester).assert_outcomes(passed=1)


@pytest.mark.usefixtures("loaded")
def test_a_golden_is_written_on_request_and_says_which_layer_grew(pytester: pytest.Pytester) -> None:
    write_test(pytester, "(32, 32)")
    run_pytest(pytester).stdout.fnmatch_lines(["*there is no golden *test_of_a_user.tiny.txt*--elixir-update*"])
    run_pytest(pytester, "--elixir-update").assert_outcomes(passed=1)
    golden = pytester.path / "goldens" / "test_of_a_user.tiny.txt"
    assert "  0 saved 2048\n" in golden.read_text(encoding="utf-8")
    run_pytest(pytester).assert_outcomes(passed=1)

    write_test(pytester, "(32, 48)")
    failed = run_pytest(pytester)
    failed.assert_outcomes(failed=1)
    # Under `CI` pytest repeats the whole message in its summary; lines that begin with `E` are the failure's own.
    (grown,) = [line for line in failed.outlines if line.startswith("E ") and " grew by " in line]
    # 16 more columns: weights of 16 x 16 in and out and 16 biases, as parameter, gradient and two moments.
    assert re.search(r"E +1 grew by .* at the peak \(.*moment \+4.1 KiB", grown)
    assert not any(re.search(r"E +0 (grew|shrank)", line) for line in failed.outlines)
    assert "def assert_matches_golden" not in failed.stdout.str(), "the traceback ends in the test"


@pytest.mark.usefixtures("loaded")
def test_a_test_run_that_does_not_use_the_fixture_loads_neither_torch_nor_numpy(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        f"""
        import sys

        def test_plain():
            assert "{PLUGIN}" in sys.modules
            assert not {{"torch", "numpy", "scipy", "sympy", "transformers"}} & set(sys.modules)
        """
    )
    pytester.runpytest_subprocess("-p", PLUGIN, "-p", "no:cacheprovider").assert_outcomes(passed=1)


@pytest.mark.usefixtures("loaded")
def test_the_entry_point_names_the_plugin() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    points = settings["project"]["entry-points"]["pytest11"]
    # `-p` of the same name then loads it once, whether or not the entry point is installed.
    assert points == {PLUGIN: PLUGIN}
    assert importlib.import_module(PLUGIN).memory_schedule


@pytest.mark.usefixtures("loaded")
@pytest.mark.slow
def test_workers_of_xdist_plan_and_write_goldens(pytester: pytest.Pytester) -> None:
    """30 s to two minutes: two workers load torch, twice."""
    for number in range(2):
        pytester.makepyfile(**{f"test_{number}": f"WIDTHS = (32, {16 + number})\n{GOLDEN_TEST}"})
    args = ("-p", PLUGIN, "-n", "2", "--dist", "loadfile")
    pytester.runpytest_subprocess(*args, "--elixir-update").assert_outcomes(passed=2)
    assert sorted(path.name for path in (pytester.path / "goldens").iterdir()) == [
        f"test_{number}.tiny.txt" for number in range(2)
    ]
    pytester.runpytest_subprocess(*args).assert_outcomes(passed=2)
