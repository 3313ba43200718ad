"""`elixir-compile plan --tune`: the table, the command and the loop of the best row, and the errors."""

import ast
import json
import shlex
from pathlib import Path

import pytest
from click.testing import Result
from transformers import GPT2Config
from typer.testing import CliRunner

from elixir_compile.base.options import Options
from elixir_compile.ir import plan_from_json
from elixir_compile.search.joint.tuning import Setting
from elixir_compile.session.saved import load_question
from elixir_compile.step import verify
from elixir_compile.tools.cli.main import app
from elixir_compile.tools.cli.plan import Request
from elixir_compile.tools.cli.tune import TuneRequest, command_of, loop_of
from elixir_compile.tools.tune import States
from tests.run.cli.test_cli_plan import MODEL, cli

SEQ = 64


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the configuration of a GPT-2 with two layers."""
    folder = tmp_path_factory.mktemp("gpt2")
    config = GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=512, n_positions=SEQ)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    (folder / "config.json").write_text(json.dumps(config.to_dict()), encoding="utf-8")
    return folder


def tune(*words: object) -> Result:
    return cli("plan", *words, "--tune", "--seq", SEQ, "--hardware", "a100-40g")


def test_the_best_row_is_the_plan_that_its_command_makes(gpt2: Path, tmp_path: Path) -> None:
    saved = tmp_path / "plan.json"
    words = (gpt2, "--tokens-per-step", 4 * SEQ, "--device-memory", "2MB", "--state-bytes", 12, "--search-timeout", 3)
    done = tune(*words, "--json", "-o", saved)
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    best = found["settings"][0]
    assert best["tokens"] == 4 * SEQ == best["rows"] * best["forwards"] * SEQ
    assert best["tokens_per_s"] == max(row["tokens_per_s"] or 0 for row in found["settings"])
    assert {(row["rows"], row["forwards"]) for row in found["settings"]} == {(4, 1), (2, 2), (1, 4)}
    assert all(
        row["most_tokens_per_s"] <= best["tokens_per_s"] * (1 + found["gap"]) * (1 + 1e-9) for row in found["settings"]
    )
    made = plan_from_json(saved.read_text(encoding="utf-8"))
    assert plan_from_json(json.dumps(found["plan"])) == made
    asked = load_question(saved, made)
    assert asked is not None
    assert asked.problem.micro_batches == best["micro_batches"]
    verify(asked.problem.graph, made)
    command = shlex.split(found["command"])
    assert command[:3] == ["elixir-compile", "plan", str(gpt2)]
    alone = CliRunner().invoke(app, [*command[1:], "--json"])
    assert plan_from_json(alone.stdout) == made


def test_the_table_the_command_and_a_loop_with_accumulation_are_printed(gpt2: Path) -> None:
    done = tune(gpt2, "--tokens-per-step", 4 * SEQ, "--batch", 2, "--state-bytes", 4, "--state-bytes", 10)
    assert done.exit_code == 0, done.stderr
    table, command, loop = done.stdout.split("\n\n", 2)
    assert "256 tokens per step" in table
    assert "no setting and no plan is more than" in table
    assert "best with 10 bytes of state per element, fp32 masters and moments" in table
    assert command.endswith("--batch 2 --seq 64 --accumulate")
    ast.parse(loop)
    assert 'options={"accumulate": True}' in loop
    assert "(compiled(**batch).loss / 2).backward()\n    if number % 2 == 0:\n        optimizer.step()" in loop


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--tokens-per-step", "3x"), "option tokens_per_step: got '3x', expected a number such as 524288"),
        (("--tokens-per-step", SEQ // 2), "expected 64: a multiple of 64, the tokens of a row on each rank"),
        (("--tokens-per-step", 2 * SEQ + 30), "expected 128 or 192: a multiple of 64"),
        (("--tokens-per-step", 8 * SEQ, "--micro-batches", 3), "expected 384 or 576: a multiple of 192"),
        (("--tokens-per-step", 8 * SEQ, "--largest-batch"), "no --largest-batch beside --tune"),
    ],
)
def test_tokens_that_cannot_be_divided_are_refused_before_anything_is_captured(
    gpt2: Path, words: tuple[object, ...], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elixir_compile.tools.cli.plan.capture_model", None)
    done = tune(gpt2, *words)
    assert (done.exit_code, done.stdout) == (1, "")
    assert says in done.stderr
    assert says in json.loads(tune(gpt2, *words, "--json").stdout)["error"]


def test_what_belongs_to_tune_is_refused_without_it(gpt2: Path) -> None:
    assert "expected --tune beside it" in cli("plan", gpt2, "--tokens-per-step", "64k").stderr
    assert "several need --tune" in cli("plan", gpt2, "--state-bytes", 4, "--state-bytes", 8).stderr


def test_a_model_with_inputs_of_its_own_batch_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text(MODEL, encoding="utf-8")  # its inputs have 16 rows
    done = tune(f"{file}:make", "--tokens-per-step", 8 * SEQ, "--dtype", "float32")
    assert done.exit_code == 1
    assert "does not have the 8 rows asked for" in done.stderr


@pytest.mark.parametrize(
    ("state_bytes", "prepares", "remarks"), [(None, False, False), (10, True, False), (12, False, True)]
)
def test_the_loop_says_how_to_get_the_state_and_the_micro_batches(
    state_bytes: int | None, prepares: bool, remarks: bool
) -> None:
    given = {"micro_batches": "auto", "device_memory": "4GiB", "search_timeout": 60.0}
    plan = Request(
        model="gpt2-124m", batch=8, seq=SEQ, dtype="bfloat16", recompute=False, hardware=None, ranks=1, options=given
    )
    request = TuneRequest(plan=plan, batch=None, tokens=None, states=())
    states = States.of("bfloat16", Options(), ())
    assert states.choices == (None, 10)
    for number in (1, 2):
        setting = Setting(rows=8, forwards=1, micro_batches=number, state_bytes=state_bytes, tokens=8 * SEQ)
        loop = loop_of(setting, states, request)
        ast.parse(loop)
        assert ('elixir.prepare(model, param_dtype="bfloat16")' in loop) == ('"param_dtype": "bfloat16"' in loop)
        assert ("elixir.prepare" in loop) == prepares
        assert ("another optimizer" in loop) == remarks
        assert ('"micro_batches": 2' in loop) == (number == 2)
        assert "auto" not in loop + command_of(setting, request)
        assert "timeout" not in loop


def test_without_tokens_per_step_the_tokens_are_those_of_the_batch_on_all_ranks(gpt2: Path) -> None:
    words = ("--batch", 2, "--planner", "greedy", "--state-bytes", 4, "--micro-batches", 1, "--json")
    found = json.loads(cli("plan", gpt2, "--tune", "--seq", SEQ, "--hardware", "2 x a100-40g", *words).stdout)
    assert [(row["rows"], row["forwards"], row["micro_batches"]) for row in found["settings"]] == [(2, 1, 1)]
    assert found["tokens_per_step"] == 4 * SEQ


def test_if_nothing_fits_the_error_names_the_smallest_need(gpt2: Path) -> None:
    words = ("--tokens-per-step", 4 * SEQ, "--device-memory", 1000, "--planner", "greedy", "--state-bytes", 4)
    done = tune(gpt2, *words, "--json")
    assert done.exit_code == 2
    needed_bytes = json.loads(done.stdout)["needed_bytes"]
    # The smallest batch needs the least of all settings.
    alone = cli("plan", gpt2, "--seq", SEQ, "--hardware", "a100-40g", "--batch", 1, *words[2:], "--json")
    assert json.loads(alone.stdout)["needed_bytes"] >= needed_bytes
