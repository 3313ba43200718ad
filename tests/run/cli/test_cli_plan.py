"""`elixir-compile plan` and `verify`: what they print, what they write, and how they fail."""

import ctypes
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from scipy.optimize import linprog
from typer.testing import CliRunner

from elixir_compile.base.errors import UnknownModel, UnsupportedModel
from elixir_compile.ir import Tier, Update, plan_from_json, plan_to_json
from elixir_compile.tools.cli.main import app
from elixir_compile.tools.preview.models import TextBatch, load_model
from tests.pure.problems import disk_staging

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
    same = ("--model", net, "--dtype", "float32", "--param-dtype", "bfloat16")
    with disk_staging(0):
        assert "file and graph hold" in cli("verify", saved, *same).stdout
    wrong = cli("verify", saved, *same)
    assert (wrong.exit_code, "bytes on the host; it needs" in wrong.stderr) == (1, True)


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
