"""`elixir-compile plan`, `verify`, `explain`, `diff` and `plan --tune`: what they print and write, and how they
fail."""

import ast
import ctypes
import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from scipy.optimize import linprog
from transformers import GPT2Config
from typer.testing import CliRunner

import elixir_compile as elixir
from elixir_compile.base.errors import InvalidOption, UnknownModel, UnsupportedModel
from elixir_compile.base.options import Options
from elixir_compile.ir import Origin, Record, Tier, Update, plan_from_json, plan_to_json, record_to_json
from elixir_compile.search import plan
from elixir_compile.search.joint.tuning import Setting
from elixir_compile.search.problem import question_of
from elixir_compile.session.plan_files import load_question, question_path
from elixir_compile.step import verify
from elixir_compile.tools.cli.main import app
from elixir_compile.tools.cli.plan import Request
from elixir_compile.tools.cli.tune import States, TuneRequest, command_of, loop_of
from elixir_compile.tools.preview.models import TextBatch, load_model
from tests.pure.problems import chain_of, disk_staging, problem_of, tight_problem

# ----------------------------------------------------------------------------------------------------------------------
# `elixir-compile plan` and `verify`: what they print, what they write, and how they fail.


MODEL = '''
import torch
from torch import nn

class Net(nn.Module):
    """Two layers; returns the loss."""
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return self.down(self.up(x).relu()).square().mean()

def make():
    return Net(), (torch.empty(16, 64),)

def wide():
    return Net(), (torch.empty(4096, 64),)

def fail():
    raise RuntimeError("no such weights")

def number():
    return 5
'''
POSITIONS = '''
import torch
from torch import nn

class Net(nn.Module):
    """A model of text whose tokens are at one of 64 positions, the first of them at `first`."""
    def __init__(self, first):
        super().__init__()
        self.first, self.words, self.places = first, nn.Embedding(50, 16), nn.Embedding(64, 16)

    def forward(self, input_ids, labels):
        places = torch.arange(input_ids.shape[1], device=input_ids.device)[None] + self.first
        logits = (self.words(input_ids) + self.places(places)) @ self.words.weight.t()
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

def from_0():
    return Net(0)

def from_2():
    return Net(2)
'''
FAST = ("--planner", "greedy", "--dtype", "float32", "--hardware", "a100-40g")


@pytest.fixture
def net(tmp_path: Path) -> str:
    file = tmp_path / "net.py"
    file.write_text(MODEL, encoding="utf-8")
    return f"{file}:make"


def cli(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def test_a_plan_is_shown_and_saved(net: str, tmp_path: Path) -> None:
    done = cli("plan", net, *FAST, "-o", tmp_path / "plan.json")
    assert done.exit_code == 0, done.stderr
    made = plan_from_json((tmp_path / "plan.json").read_text(encoding="utf-8"))
    assert (made.cluster, made.name) == ("1 x a100-40g", "net")
    assert "net on 1 x a100-40g" in done.stdout
    assert "planned   peak" in done.stdout


def test_output_of_the_solver_is_not_in_the_json(
    net: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    asked: list[object] = []

    def noisy(*args: Any, **kwargs: Any) -> Any:
        asked.append(args)
        ctypes.CDLL(None).puts(b"tmpSolver.run();")
        return linprog(*args, **kwargs)

    monkeypatch.setattr("elixir_compile.search.formulation.solver.linprog", noisy)
    # The planner without a solver would print nothing, and neither would one with room for everything.
    tight = ("--dtype", "float32", "--hardware", "a100-40g", "--device-memory", "200KiB")
    assert cli("plan", net, *tight, "--json").exit_code == 0
    ctypes.CDLL(None).fflush(None)
    assert asked
    assert "tmpSolver" not in capfd.readouterr().out


def test_json_is_the_plan_and_nothing_else(net: str) -> None:
    done = cli("plan", net, *FAST, "--json")
    made = plan_from_json(done.stdout)
    assert json.loads(done.stdout)["prediction"]["step_s"] == made.prediction.step_s > 0


@pytest.mark.parametrize("name", ["muon", "torch.optim.Muon"])
def test_an_optimizer_class_trains_what_its_constructor_takes(net: str, name: str) -> None:
    """Muon the two matrices, which are updated whole, with a momentum; HybridAdamW the vectors, with two moments."""
    made = plan_from_json(cli("plan", net, *FAST, "--optimizer", name, "--json").stdout)
    whole = [bucket for bucket in made.buckets if bucket.whole_update is not None]
    rest = [bucket for bucket in made.buckets if bucket.whole_update is None]
    assert sum(bucket.state_nbytes for bucket in whole) == 4 * 2 * 64 * 256
    assert all(bucket.work_nbytes and not bucket.works_on_device for bucket in whole)
    assert sum(bucket.state_nbytes for bucket in rest) == 8 * (256 + 64)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("muom",), "a class of torch.optim, as muon"),
        (("no.such.Class",), "No module named 'no'"),
        (("lbfgs",), "a class whose state plans place"),
        (("torch.optim.Optimizer",), "a class that is made of parameters alone"),
        (("muon", "--state-bytes", 12), "no --state-bytes"),
        (("muon", "--ranks", 2), "`prepare(..., whole=...)` chooses their owners"),
    ],
)
def test_an_optimizer_that_cannot_be_planned_is_refused(net: str, words: tuple[object, ...], expected: str) -> None:
    done = cli("plan", net, *FAST, "--optimizer", *words)
    assert done.exit_code == 1
    assert expected in done.stderr


def test_the_arguments_reach_the_plan(net: str) -> None:
    done = cli("plan", net, *FAST, "--ranks", 2, "--device-memory", "1GiB", "--state-bytes", 12, "--json")
    made = plan_from_json(done.stdout)
    numel = sum(bucket.numel for bucket in made.buckets)
    assert (made.cluster, made.budget_bytes) == ("2 x a100-40g", 1 << 30)
    assert sum(bucket.state_nbytes for bucket in made.buckets) == 12 * numel


def test_a_thousand_ranks_are_planned_for_as_quickly_as_one(net: str) -> None:
    done = cli("plan", net, *FAST, "--ranks", 1024, "--json")
    made = plan_from_json(done.stdout)
    assert (made.cluster, made.num_ranks) == ("128 x 8 x a100-40g", 1024)
    assert all(bucket.shard_nbytes() * 1024 >= bucket.nbytes for bucket in made.buckets)
    assert max(len(line) for line in str(made).split("\n")) < 300
    counted = cli("plan", net, *FAST[:-1], "2 x 8 x a100-40g", "--ranks", 16, "--json")
    assert plan_from_json(counted.stdout).cluster == "2 x 8 x a100-40g"


def test_gradients_that_stay_are_counted_if_the_command_says_so(net: str) -> None:
    plans = [plan_from_json(cli("plan", net, *FAST, *more, "--json").stdout) for more in ((), ("--accumulate",))]
    assert [made.counts_staying_gradients for made in plans] == [False, True]


def test_fractions_reach_the_plan(net: str) -> None:
    words = ("--placement-policy", "static", "--offload-optim-frac", 1.0, "--offload-param-frac", 1.0)
    made = plan_from_json(cli("plan", net, *FAST, *words, "--json").stdout)
    assert {(placement.param, placement.optim) for placement in made.placements} == {(Tier.HOST, Tier.HOST)}
    assert "by placement_policy static" in made.decisions[1].because


def test_the_arguments_about_the_optimizer_reach_the_plan(net: str, tmp_path: Path) -> None:
    """In 16 bits with masters, half the state on disk: 10 bytes per element of state, 4 of parameters and gradients."""
    words = (*FAST, "--param-dtype", "bfloat16", "--update", "after_backward", "--activations", "keep")
    kept = plan_from_json(cli("plan", net, *words, "--json").stdout)
    numel = sum(bucket.numel for bucket in kept.buckets)
    assert {bucket.dtype for bucket in kept.buckets} == {"bfloat16"}
    assert sum(bucket.state_nbytes for bucket in kept.buckets) == 10 * numel
    tight = (*words, "--device-memory", 9 * numel, "--host-memory", 7 * numel)
    assert "disk_path" not in cli("plan", net, *tight).stderr  # a disk alone would not do
    saved = tmp_path / "plan.json"
    assert cli("plan", net, *tight, "--disk-path", tmp_path).exit_code == 2  # no room for what is read
    with disk_staging(0):
        assert "disk_path=<folder>" in cli("plan", net, *tight).stderr
        done = cli("plan", net, *tight, "--disk-path", tmp_path, "-o", saved)
    assert done.exit_code == 0, done.stderr
    made = plan_from_json(saved.read_text(encoding="utf-8"))
    assert Tier.DISK in {placement.optim for placement in made.placements}
    assert made.update is Update.AFTER_BACKWARD
    assert "after_backward" in done.stdout
    assert re.search(r"disk +\d+ buckets?, it is busy for .*s of each step", done.stdout)
    same = ("--model", net, "--dtype", "float32", "--param-dtype", "bfloat16")
    with disk_staging(0):
        assert "file and graph hold" in cli("verify", saved, *same).stdout
    wrong = cli("verify", saved, *same)
    assert (wrong.exit_code, "bytes on the host; it needs" in wrong.stderr) == (1, True)


def test_the_folder_of_a_disk_exists_where_this_machine_is_planned_for(tmp_path: Path) -> None:
    elsewhere = tmp_path / "none"
    request = Request(
        model="gpt2",
        batch=1,
        seq=8,
        dtype="float32",
        recompute=False,
        hardware="rtx4090-24g",
        ranks=1,
        options={"disk_path": elsewhere},
    )
    assert request.parsed_options().disk_path == elsewhere
    with pytest.raises(InvalidOption, match="a folder that exists"):
        replace(request, hardware=None).parsed_options()


def test_a_budget_without_a_plan_exits_with_2(net: str) -> None:
    done = cli("plan", net, *FAST, "--device-memory", "50KB")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("error: needs ")
    told = json.loads(cli("plan", net, *FAST, "--device-memory", "50KB", "--json").stdout)
    assert told["budget_bytes"] == 50_000 < told["needed_bytes"]


def test_the_largest_batch_fits_and_the_next_does_not(net: str, tmp_path: Path) -> None:
    budget = ("--device-memory", "1MiB")
    done = cli("plan", net, *FAST, *budget, "--largest-batch", "-o", tmp_path / "plan.json")
    batch = int(re.findall(r"largest batch +(\d+)", done.stdout)[0])
    made = plan_from_json((tmp_path / "plan.json").read_text(encoding="utf-8"))
    assert batch > 16
    assert made.prediction.device_peak_bytes <= 1 << 20
    assert made.largest_batch() >= batch
    assert "file and graph hold" in cli("verify", tmp_path / "plan.json", "--model", net, "--dtype", "float32").stdout
    larger = Path(net.rpartition(":")[0])
    for rows, code in ((batch, 0), (batch + 1, 2)):
        larger.write_text(MODEL.replace("torch.empty(16, 64)", f"torch.empty({rows}, 64)"), encoding="utf-8")
        assert cli("plan", net, *FAST, *budget, "--micro-batches", 1).exit_code == code


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("gpt2-124",), "Did you mean 'gpt2-124m'"),
        (("gpt2-124m", "--hardware", "a100-40gb"), "Did you mean 'a100-40g'"),
        (("gpt2-124m", "--hardware", "nowhere.json"), "nowhere.json"),
        (("gpt2-124m", "--device-memory", "lots"), "option device_memory"),
        (("gpt2-124m", "--planner", "best"), "option planner"),
        (("gpt2-124m", "--dtype", "int7"), "option dtype"),
        (("gpt2-124m", "--offload-optim-frac", "0.5"), 'expected placement_policy="static" beside it'),
        (("gpt2-124m", "--placement-policy", "static", "--offload-param-frac", "1"), "Set both to 1.0"),
        (("gpt2-124m", "--ranks", "2"), "option ranks"),
        (("gpt2-124m", "--hardware", "a100-40g", "--ranks", "12"), "1 to 8, or whole nodes of 8: 8 or 16"),
        (("gpt2-124m", "--hardware", "2 x a100-40g", "--ranks", "3"), "expected 2, as 2 x a100-40g has devices"),
        (("nowhere.py:make",), "there is no file nowhere.py"),
        (("folder/config.json",), "there is no such file or folder"),
        (("{net}:fail",), "its code raised RuntimeError: no such weights"),
        (("{net}:none",), "has no function 'none'"),
        (("{net}:number",), "a function that returns a torch.nn.Module"),
        (("{half}:make",), "its code raised SyntaxError"),
        (("{config}",), "is no JSON file"),
    ],
)
def test_a_mistake_is_one_line_without_a_traceback(words: tuple[str, ...], sentence: str, tmp_path: Path) -> None:
    files = {"net": tmp_path / "net.py", "half": tmp_path / "half.py", "config": tmp_path / "config.json"}
    for name, text in (("net", MODEL), ("half", "def make("), ("config", '{"model_type": ')):
        files[name].write_text(text, encoding="utf-8")
    done = cli("plan", *(word.format(**files) for word in words))
    assert (done.exit_code, done.stdout) == (1, "")
    assert sentence in done.stderr
    assert isinstance(done.exception, SystemExit)
    assert done.stderr.startswith("error: ")


def test_a_plan_verifies_for_its_model_and_for_no_other(net: str, tmp_path: Path) -> None:
    saved = tmp_path / "plan.json"
    assert cli("plan", net, *FAST, "-o", saved).exit_code == 0
    assert "file, question and graph hold" in cli("verify", saved).stdout
    assert "at the peak" in cli("explain", saved, "b0").stdout
    same = ("--dtype", "float32", "--hardware", "a100-40g")
    assert "file and graph hold" in cli("verify", saved, "--model", net, *same).stdout
    other = cli("verify", saved, "--model", net, "--dtype", "float64")
    assert other.exit_code == 1
    assert "another graph" in other.stderr
    elsewhere = cli("verify", saved, "--model", net, "--dtype", "float32", "--hardware", "h100-80g")
    assert elsewhere.exit_code == 1
    assert "another machine" in elsewhere.stderr


def test_half_a_plan_does_not_verify(net: str, tmp_path: Path) -> None:
    saved = tmp_path / "plan.json"
    cli("plan", net, *FAST, "-o", saved)
    text = saved.read_text(encoding="utf-8")
    saved.write_text(text[: len(text) // 2], encoding="utf-8")
    done = cli("verify", saved)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("error: plan file")
    assert "error" in json.loads(cli("verify", tmp_path / "none.json", "--json").stdout)


def test_a_plan_over_its_own_budget_does_not_verify(net: str, tmp_path: Path) -> None:
    made = plan_from_json(cli("plan", net, *FAST, "--json").stdout)
    object.__setattr__(made, "budget_bytes", made.prediction.device_peak_bytes - 1)
    saved = tmp_path / "plan.json"
    saved.write_text(plan_to_json(made), encoding="utf-8")
    assert "over its budget" in cli("verify", saved).stderr


def test_a_hugging_face_folder_makes_its_model(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    fields = {"model_type": "gpt2", "n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    for name in (tmp_path, tmp_path / "config.json"):
        model, _ = load_model(str(name), TextBatch(batch=1, seq=8))
        assert model.config.n_embd == 32
    (tmp_path / "config.json").write_text('{"model_type": "vit"}', encoding="utf-8")
    with pytest.raises(UnsupportedModel, match="no causal language model"):
        load_model(str(tmp_path), TextBatch(batch=1, seq=8))
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(UnknownModel, match="no field model_type"):
        load_model(str(tmp_path), TextBatch(batch=1, seq=8))


@pytest.mark.parametrize(("function", "limit"), [("from_0", 64), ("from_2", 62)])
def test_more_tokens_than_the_model_has_positions_are_refused(function: str, limit: int, tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text(POSITIONS, encoding="utf-8")
    done = cli("plan", f"{file}:{function}", *FAST)
    assert done.exit_code == 1
    assert f"option seq: got 1024, expected at most {limit} tokens in a sample, as places.weight has" in done.stderr
    assert f"`--seq {limit}`" in done.stderr
    assert cli("plan", f"{file}:{function}", *FAST, "--seq", limit).exit_code == 0
    assert f"`--seq {limit}`" in cli("plan", f"{file}:{function}", *FAST, "--seq", limit + 1).stderr


@pytest.mark.parametrize(
    ("fields", "table"),
    [
        ({"model_type": "gpt2", "n_layer": 1, "n_embd": 32, "n_head": 2, "n_positions": 64}, "transformer.wpe.weight"),
        (
            {"model_type": "opt", "num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "ffn_dim": 64,
             "word_embed_proj_dim": 32, "max_position_embeddings": 64},
            "model.decoder.embed_positions.weight",
        ),
        (
            {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2,
             "intermediate_size": 64, "max_position_embeddings": 64},
            None,
        ),
    ],
    ids=["gpt2", "opt", "llama"],
)  # fmt: skip
def test_a_configuration_limits_the_tokens_only_by_a_table(
    fields: dict[str, object], table: str | None, tmp_path: Path
) -> None:
    """The positions of Llama are computed, so its longest sample is up to the user."""
    pytest.importorskip("transformers")
    fields |= {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    (tmp_path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    done = cli("plan", tmp_path, *FAST, "--batch", 1, "--seq", 65)
    expected = f"error: option seq: got 65, expected at most 64 tokens in a sample, as {table} has no more positions"
    assert done.exit_code == (0 if table is None else 1)
    assert done.stderr.startswith("" if table is None else expected)


def test_without_transformers_a_named_model_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    done = cli("plan", "gpt2-124m", *FAST)
    assert done.exit_code == 1
    assert "pip install 'elixir-compile[hf]'" in done.stderr


@pytest.mark.slow  # two captures of a GPT-2: 7 s
def test_recompute_saves_less(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    fields = {"model_type": "gpt2", "n_layer": 3, "n_embd": 32, "n_head": 2, "vocab_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(fields | {"bos_token_id": 0, "eos_token_id": 0}), encoding="utf-8")
    sizes = [
        plan_from_json(cli("plan", tmp_path, *FAST, "--batch", 4, "--seq", 64, flag, "--json").stdout)
        for flag in ("--recompute", "--no-recompute")
    ]
    assert sizes[0].prediction.device_peak_bytes < sizes[1].prediction.device_peak_bytes


def test_recompute_of_a_model_that_cannot_is_refused(net: str) -> None:
    assert "cannot be told to recompute" in cli("plan", net, *FAST, "--recompute").stderr


def test_a_batch_that_does_not_fit_is_planned_in_micro_batches_unless_the_option_forbids_it(net: str) -> None:
    wide = net.replace(":make", ":wide")
    refused = cli("plan", wide, *FAST, "--device-memory", "1KiB", "--micro-batches", 1, "--json")
    assert refused.exit_code == 2
    budget_bytes = json.loads(refused.stdout)["needed_bytes"] - 1
    made = cli("plan", wide, *FAST, "--device-memory", budget_bytes, "--json")
    assert made.exit_code == 0, made.stderr
    regions = plan_from_json(made.stdout).regions
    assert max(region.micro_batches for region in regions) > 1
    told = cli("plan", wide, *FAST, "--device-memory", budget_bytes)
    assert re.search(r"micro-batches +\d+ of \d+ rows, as the whole batch at once needs \d", told.stdout)
    assert cli("plan", wide, *FAST, "--device-memory", budget_bytes, "--micro-batches", "1").exit_code == 2


# ----------------------------------------------------------------------------------------------------------------------
# `elixir-compile explain` and `diff`: text or JSON on stdout, a mistake as one line on stderr.


PROBLEM = tight_problem()
PLAN = plan(PROBLEM, "greedy")
WIDE = plan(problem_of(chain_of(6)), "greedy")


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Return a folder with two plans, a record, half a plan and something else."""
    elixir.save_plan(PLAN, tmp_path / "plan.json")
    elixir.save_plan(WIDE, tmp_path / "wide.json")
    record = Record(origin=Origin.MEASURED, step_s=1.0, device_peak_bytes=1, host_peak_bytes=1)
    (tmp_path / "record.json").write_text(record_to_json(record))
    text = (tmp_path / "plan.json").read_text()
    (tmp_path / "half.json").write_text(text[: len(text) // 2])
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    elixir.save_plan(PLAN, tmp_path / "torn.json", question_of(PROBLEM, Options()))
    beside = question_path(tmp_path / "torn.json")
    beside.write_bytes(beside.read_bytes()[:100])
    return tmp_path


def run(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def test_help_does_not_load_torch() -> None:
    code = """
import sys
from elixir_compile.tools.cli import main
try:
    main.app(["--help"])
finally:
    assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "export" in done.stdout


def test_explain_prints_the_text_of_the_function(files: Path) -> None:
    assert run("explain", files / "plan.json").stdout == elixir.explain(PLAN) + "\n"
    assert run("explain", files / "plan.json", "p2").stdout == elixir.explain(PLAN, "p2") + "\n"
    found = json.loads(run("explain", files / "plan.json", "b2", "--json").stdout)
    assert found["buckets"][0]["bucket"]["id"] == "b2"


def test_with_its_question_a_plan_is_explained_and_verified_as_with_its_graph(files: Path) -> None:
    elixir.save_plan(PLAN, files / "asked.json", question_of(PROBLEM, Options()))
    for subject in ("b2", PLAN.regions[-1].id, "p2"):
        said = elixir.explain(PLAN, subject, PROBLEM.graph)
        assert said != elixir.explain(PLAN, subject)
        assert run("explain", files / "asked.json", subject).stdout == said + "\n"
    verified = run("verify", files / "asked.json")
    assert (verified.exit_code, "file, question and graph hold" in verified.stdout) == (0, True)
    assert json.loads(run("verify", files / "asked.json", "--json").stdout)["checked"] == "file, question and graph"
    assert "Add --model" in run("verify", files / "plan.json").stdout


def test_a_plan_beside_the_question_of_another_plan_is_refused(files: Path) -> None:
    elixir.save_plan(PLAN, files / "asked.json", question_of(replace(PROBLEM, graph=chain_of(2)), Options()))
    for command in ("explain", "verify"):
        done = run(command, files / "asked.json")
        assert (done.exit_code, done.stdout) == (1, "")
        assert f"expected the question about graph {PLAN.graph}, which asked.json answers" in done.stderr
        assert "got 'graph " in done.stderr


def test_an_illegal_plan_does_not_verify_for_its_question(files: Path) -> None:
    schedule = replace(PLAN.schedules[0], actions=PLAN.schedules[0].actions[:-1])
    elixir.save_plan(replace(PLAN, schedules=(schedule,)), files / "short.json", question_of(PROBLEM, Options()))
    for command in ("verify", "explain"):
        done = run(command, files / "short.json")
        assert (done.exit_code, "<-- here" in done.stderr) == (1, True)
    question_path(files / "short.json").unlink()
    assert run("verify", files / "short.json").exit_code == 0


def test_diff_takes_plans_and_records(files: Path) -> None:
    assert run("diff", files / "plan.json", files / "wide.json").stdout == elixir.diff(PLAN, WIDE) + "\n"
    assert run("diff", files / "plan.json", files / "plan.json").stdout == "the plans are equal\n"
    assert "measured" in run("diff", files / "plan.json", files / "record.json").stdout
    found = json.loads(run("diff", files / "plan.json", files / "record.json", "--json").stdout)
    assert found["comparisons"][0]["what"] == "step_s"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["explain", "plan.json", "b77"], "no bucket, region, parameter, module or activations 'b77'"),
        (["explain", "half.json"], "plan file"),
        (["explain", "binary.json"], "a text file"),
        (["explain", "nowhere.json"], "a file that can be read"),
        (["explain", "record.json"], "expected 'plan'"),
        (["explain", "torn.json"], "question file"),
        (["verify", "torn.json"], "question file"),
        (["diff", "plan.json", "half.json"], "plan file"),
        (["diff", "record.json", "plan.json"], "expected 'plan'"),
        (["diff", "plan.json", "binary.json"], "a text file"),
    ],
)
def test_a_mistake_is_one_line_on_stderr(files: Path, args: list[str], said: str) -> None:
    done = run(args[0], *[files / arg if arg.endswith(".json") else arg for arg in args[1:]])
    assert done.exit_code == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", [["explain", "half.json"], ["diff", "plan.json", "half.json"]])
def test_a_mistake_is_a_json_object_with_json(files: Path, command: list[str]) -> None:
    done = run(command[0], *[files / arg for arg in command[1:]], "--json")
    assert done.exit_code == 1
    assert "plan file" in json.loads(done.stdout)["error"]


# ----------------------------------------------------------------------------------------------------------------------
# `elixir-compile plan --tune`: the table, the command and the loop of the best row, and the errors.


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
