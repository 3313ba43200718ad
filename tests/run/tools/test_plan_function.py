"""`elixir_compile.plan` says what training would do; curves over budgets, and captures, of three batches and kept."""

import functools
import gc
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import elixir_compile as elixir
from elixir_compile.base.errors import NoFeasiblePlan
from elixir_compile.base.options import Options
from elixir_compile.base.units import GIB
from elixir_compile.graph.capture.modules import executor_of
from elixir_compile.graph.ops.registry import num_slots
from elixir_compile.ir import Kind, StepGraph, Tier, fingerprint
from elixir_compile.ir.graph import LossRegion
from elixir_compile.ir.hardware import preset
from elixir_compile.search import plan
from elixir_compile.search.joint.variants import Chunks
from elixir_compile.search.problem import question_of
from elixir_compile.session.plan_files import load_question
from elixir_compile.step import verify
from elixir_compile.tools.cli import plan as plan_command
from elixir_compile.tools.cli.plan import Request
from elixir_compile.tools.cli.report import budget_curve
from elixir_compile.tools.preview import models as capture_cache
from elixir_compile.tools.preview.capture import Capture, capture_step
from elixir_compile.tools.preview.models import BatchCaptures, TextBatch, cached_capture, capture_key, store_capture
from tests.pure.problems import needed_bytes, tight_problem
from tests.run.models import ShortStack, Tied, hf_batches, seeded, small_gpt2, tokens, vectors
from tests.run.training import by_elixir, by_elixir_unprepared

# ----------------------------------------------------------------------------------------------------------------------
# `elixir_compile.plan` says without training what training would do, and training takes it.


PLANNER = {"planner": "greedy", "inner": "aot_eager", "plan_cache": False}


def tight_plan(model: nn.Module, inputs: Any, save: Path | None = None, **options: object) -> elixir.Plan:
    """Return a plan that has to move most of `model` off the device, written to the file `save` if there is one."""
    with pytest.raises(elixir.NoFeasiblePlan) as raised:
        elixir.plan(model, inputs, options={**PLANNER, **options, "device_memory": 1, "micro_batches": 1})
    budget = int(1.05 * raised.value.needed_bytes)
    return elixir.plan(model, inputs, options={**PLANNER, **options, "device_memory": budget}, save=save)


class Broken(nn.Module):
    """A layer whose forward no graph can hold as one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return self.layer(x)


@pytest.mark.parametrize(
    ("make", "options", "error"),
    [
        (lambda: nn.Linear(4, 4), {}, None),
        (lambda: nn.Linear(4, 4), {"device_memory": 1}, elixir.NoFeasiblePlan),
        (lambda: nn.Linear(4, 4).requires_grad_(False), {}, elixir.UnsupportedModel),
        (Broken, {}, elixir.UnsupportedModel),
    ],
    ids=["planned", "no plan", "frozen", "broken"],
)
def test_nothing_of_a_model_stays_behind(
    make: Callable[[], nn.Module], options: Mapping[str, object], error: type[Exception] | None
) -> None:
    """torch never frees a backend that has raised an exception, and a capture ends with one."""
    gc.collect()
    before = num_slots()
    with nullcontext() if error is None else pytest.raises(error):
        elixir.plan(make(), [torch.ones(2, 4)], options={**PLANNER, **options})
    gc.collect()
    assert num_slots() == before


@pytest.mark.parametrize("run", [by_elixir, by_elixir_unprepared])
def test_plan_equals_the_plan_of_training_for_an_mlp(tmp_path: Path, run: Callable[..., Any]) -> None:
    model, (batch, *_) = seeded(ShortStack), vectors()
    made = tight_plan(model, (batch,), save=tmp_path / "plan.json")
    assert elixir.load_plan(tmp_path / "plan.json") == made
    asked = load_question(tmp_path / "plan.json", made)
    assert asked is not None
    assert asked.planner == PLANNER["planner"]
    verify(asked.problem.graph, made)
    trained = run(model, plan=tmp_path / "plan.json").train([batch, batch])
    (record,) = elixir.compilations(trained.compiled)
    assert record.plan.graph == made.graph
    assert record.plan.placements == made.placements
    assert any(placement.param is Tier.HOST for placement in made.placements)


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_plan_equals_the_plan_of_training_for_a_gpt2(tmp_path: Path, inner: str) -> None:
    pytest.importorskip("transformers")
    model, (batch, *_) = small_gpt2(num_layers=1), hf_batches()
    made = tight_plan(model, batch, inner=inner)
    elixir.save_plan(made, tmp_path / "plan.json")
    trained = by_elixir(model, inner=inner, plan=tmp_path / "plan.json").train([batch, batch])
    (record,) = elixir.compilations(trained.compiled)
    assert (record.plan.graph, record.plan.placements) == (made.graph, made.placements)


def test_plan_does_not_change_the_model() -> None:
    model = seeded(Tied)
    before = {name: (id(param), param._version, param.clone()) for name, param in model.named_parameters()}
    types = [type(module) for module in model.modules()]
    elixir.plan(model, tokens()[0], options=PLANNER)
    assert [type(module) for module in model.modules()] == types
    assert executor_of(model) is None
    for name, param in model.named_parameters():
        made, version, values = before[name]
        assert (id(param), param._version, param.grad) == (made, version, None)
        assert torch.equal(param, values)


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


@functools.cache
def graph_of_a_stack() -> StepGraph:
    return capture_step(ShortStack(), vectors()[:1]).graph


@pytest.mark.parametrize(
    "given",
    [
        ShortStack,
        lambda: on_meta(ShortStack),
        lambda: elixir.prepare(ShortStack()),
        lambda: torch.compile(ShortStack()),
    ],
)
def test_real_meta_prepared_and_compiled_models_have_equal_graphs(given: Callable[[], nn.Module]) -> None:
    assert capture_step(given(), vectors()[:1]).graph == graph_of_a_stack()


def test_a_function_for_the_model_and_inputs_on_meta_give_the_same_graph() -> None:
    expected = elixir.plan(Tied(), tokens()[:1], options=PLANNER)
    ids = torch.empty(2, 16, dtype=torch.int64, device="meta")
    assert elixir.plan(Tied, (ids,), options=PLANNER).graph == expected.graph
    assert elixir.plan(Tied, {"ids": ids}, options=PLANNER).graph == expected.graph


def test_a_model_far_larger_than_this_machine_is_captured() -> None:
    """32 layers of 65536 x 65536 in float32 are 512 GiB."""

    def make() -> nn.Module:
        return nn.Sequential(*(nn.Linear(65536, 65536, bias=False) for _ in range(32)))

    capture = capture_step(make, (torch.empty(1, 65536, device="meta"),))
    assert sum(storage.nbytes for storage in capture.graph.storages if storage.kind is Kind.PARAM) == 32 << 34


@pytest.mark.slow
def test_llama_7b_is_planned_in_3_gib() -> None:
    pytest.importorskip("transformers")
    command = ["plan", "llama-7b", "--hardware", "a100-40g", "--batch", "1", "--seq", "2048", "--state-bytes", "12"]
    code = (
        "import resource, sys; from elixir_compile.tools.cli.main import app\n"
        f"try: app({command})\n"
        "except SystemExit: print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "planned   peak" in done.stdout
    assert int(done.stdout.split()[-1]) * 1024 < 3 << 30


def test_capturing_another_batch_leaves_training_static() -> None:
    """Dynamo makes symbolic what changed between two calls of one forward, in whichever module."""
    model = seeded(ShortStack)
    for rows in (8, 12, 16):
        elixir.plan(model, vectors(rows=rows)[:1], options=PLANNER)
    trained = by_elixir_unprepared(model)
    trained.train(vectors(1, rows=20))
    (record,) = elixir.compilations(trained.compiled)
    assert record.graph.symbols == ()


def test_a_dynamic_capture_serves_many_batches() -> None:
    capture = capture_step(ShortStack(), vectors(rows=6)[:1], dynamic=True)
    for rows in (3, 24):
        sizes = [s.nbytes for s in capture.at_batch(rows).graph.storages if s.kind is Kind.SAVED]
        static = capture_step(ShortStack(), vectors(rows=rows)[:1]).graph
        assert sorted(sizes) == sorted(s.nbytes for s in static.storages if s.kind is Kind.SAVED)
        assert fingerprint(capture.at_batch(rows).graph) == fingerprint(capture.graph)
    with pytest.raises(elixir.UnsupportedModel, match="fixes the batch"):
        capture_step(ShortStack(), vectors()[:1]).at_batch(3)


def test_state_bytes_are_those_of_hybrid_adamw_or_the_given_bytes_per_element() -> None:
    capture = capture_step(lambda: ShortStack().to(torch.bfloat16), [torch.empty(8, 64, dtype=torch.bfloat16)])
    numel = sum(param.numel() for param in ShortStack().parameters())
    for per_element, nbytes in ((None, 2 * 2), (12, 12)):
        params = capture.trained(Options(), per_element).values()
        assert sum(param.state_nbytes for param in params) == nbytes * numel


def test_frozen_parameters_have_no_state() -> None:
    model = ShortStack()
    model.head.requires_grad_(False)
    assert not any(name.startswith("head") for name in capture_step(model, vectors()[:1]).params)


def test_parameters_that_the_step_does_not_read_stay_on_the_device() -> None:
    model = ShortStack()
    model.unread = nn.Linear(8, 4)
    num_params = len(list(model.parameters()))
    scalar_bytes = 12 * num_params + 8 * (1 + num_params)  # of each, two handles and the count of steps; the ticket
    assert capture_step(model, vectors()[:1]).base_bytes == 4 * (8 * 4 + 4) + scalar_bytes


def test_budgets_of_a_profile_leave_the_reserve_and_share_the_host() -> None:
    capture = capture_step(ShortStack(), vectors()[:1])
    cluster = preset("a100-40g", num_devices=4)
    problem = capture.problem(cluster, Options())
    assert problem.budget_bytes == cluster.device.memory_bytes - cluster.device.reserve_bytes
    assert problem.host_budget_bytes == (cluster.host.memory_bytes - cluster.host.reserve_bytes) // 4
    assert elixir.plan(ShortStack(), vectors()[:1], hardware=cluster, options=PLANNER).cluster == "4 x a100-40g"


@pytest.mark.slow
def test_a_deep_chain_hits_no_recursion_limit() -> None:
    """Three times Python's limit of 1,000 frames in ops, forward and backward together."""

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(600):
                x = (x * self.scale).sin()
            return x.sum()

    graph = capture_step(Chain, [torch.empty(4, 8)], options=Options(inner="aot_eager")).graph
    assert len(graph.ops) > 3000


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            print("a graph break")
        return (x * self.weight).sum()


class Constant(Broken):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


@pytest.mark.parametrize(
    ("model", "inputs", "sentence"),
    [
        (Broken, [torch.ones(4)], "Broken is not supported: its forward cannot be traced as one graph"),
        (Constant, [torch.ones(4)], "depends on a parameter that requires a gradient"),
        (nn.Linear(4, 4).requires_grad_(False), [torch.ones(4)], "depends on a parameter that requires a gradient"),
        (lambda: nn.ReLU(), [torch.ones(4)], "ReLU is not supported: it has no parameters"),
        (lambda: nn.Linear(4, 4), [torch.ones(3)], "Linear is not supported: its forward cannot be traced"),
        (lambda: nn.LazyLinear(4), [torch.ones(3)], "weight is not supported: it has no shape yet"),
        (3, [torch.ones(3)], "model: got 3"),
        (lambda: 3, [torch.ones(3)], "model: got 3"),
        (nn.Linear(4, 4), 5, "example_inputs: got 5"),
    ],
)
def test_a_model_that_cannot_be_planned_raises_with_the_reason(model: Any, inputs: Any, sentence: str) -> None:
    with pytest.raises(elixir.ElixirError, match=sentence):
        elixir.plan(model, inputs, options=PLANNER)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"hardware": "a100-40gb"}, "Did you mean 'a100-40g'"),
        ({"hardware": "nowhere.json"}, "nowhere.json"),
        ({"options": {"plan": "plan.json"}}, "option plan"),
        ({"options": {"device_memori": 1}}, "Did you mean 'device_memory'"),
    ],
)
def test_an_unknown_name_raises_before_the_capture(arguments: Mapping[str, Any], sentence: str) -> None:
    def never() -> nn.Module:
        raise AssertionError("the model was made")

    with pytest.raises(elixir.ElixirError, match=sentence):
        elixir.plan(never, (), **arguments)


# ----------------------------------------------------------------------------------------------------------------------
# `budget_curve`: more memory never makes a step longer, and no bound is above the plan that it bounds.


PROBLEM = tight_problem()
OPTIONS = Options(search_timeout=0.3, plan_cache=False)


def test_the_curve_falls_from_the_least_budget_to_everything_on_the_device() -> None:
    lines: list[str] = []
    points = budget_curve(question_of(PROBLEM, OPTIONS), 3, lines.append)
    assert points[0].budget_bytes == needed_bytes(PROBLEM)
    assert points[-1].budget_bytes == plan(replace(PROBLEM, budget_bytes=GIB), "keep_all").prediction.device_peak_bytes
    assert [point.budget_bytes for point in points] == sorted({point.budget_bytes for point in points})
    assert [point.budget_bytes for point in points if point.is_own] == [PROBLEM.budget_bytes]
    assert len(points) == len(lines) == 4
    steps = [point.step_s for point in points]
    assert steps == sorted(steps, reverse=True)
    assert steps[-1] < steps[0]
    bounds = [point.bound_s for point in points]
    assert None not in bounds
    assert bounds == sorted(bounds, reverse=True)  # pyright: ignore[reportArgumentType]
    for point in points:
        assert point.bound_s is not None
        assert point.bound_s <= point.step_s * (1 + 1e-9)
        assert point.step_s <= point.planned_s


def test_the_plan_of_a_rule_at_a_point_is_that_of_its_budget() -> None:
    """Plans of a search are compared with those of smaller budgets, those of a fixed rule are not."""
    asked = question_of(PROBLEM, replace(OPTIONS, planner="elixir"))
    for point in budget_curve(asked, 3):
        made = plan(replace(PROBLEM, budget_bytes=point.budget_bytes), "elixir")
        assert point.planned_s == made.prediction.step_s
        assert point.bound_s == made.bound_s


def test_budgets_for_which_the_host_is_too_small_have_no_point() -> None:
    whole = plan(replace(PROBLEM, budget_bytes=GIB), "greedy").prediction.host_peak_bytes
    roomy = replace(PROBLEM, budget_bytes=GIB, host_budget_bytes=whole)
    points = budget_curve(question_of(roomy, replace(OPTIONS, planner="greedy")), 3)
    assert points
    assert all(point.budget_bytes >= PROBLEM.budget_bytes for point in points)


def test_a_rule_that_fits_nowhere_is_told() -> None:
    tiny = replace(PROBLEM, host_budget_bytes=0, base_bytes=PROBLEM.budget_bytes)
    with pytest.raises(NoFeasiblePlan):
        budget_curve(question_of(replace(tiny, budget_bytes=1), replace(OPTIONS, planner="zero_offload")), 2)


# ----------------------------------------------------------------------------------------------------------------------
# `tools.preview.models`: captures of many batches from three of them.


CAPTURE_OPTIONS = Options(inner="aot_eager")


class Head(nn.Module):
    """A layer, and a projection to so many classes that the loss of each batch can be chunked."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(8, 8), nn.Linear(8, 1 << 16)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.up(x).relu()).flatten(0, 1), labels.flatten())


def captured(rows: int) -> Capture:
    inputs = torch.empty(rows, 64, 8, device="meta"), torch.empty(rows, 64, dtype=torch.int64, device="meta")
    return capture_step(Head, inputs, device="cpu", options=CAPTURE_OPTIONS)


class Counted:
    """A capture function that remembers for which rows it was called."""

    def __init__(self, offset_at: int = 0) -> None:
        self.rows: list[int] = []
        self.offset_at = offset_at

    def __call__(self, rows: int) -> Capture:
        self.rows.append(rows)
        made = captured(rows)
        return replace(made, base_bytes=made.base_bytes + 1) if rows == self.offset_at else made


def test_a_derived_capture_equals_the_capture_of_its_batch() -> None:
    capture = Counted()
    captures = BatchCaptures(capture=capture, rows=(1, 2, 4, 8, 16), options=CAPTURE_OPTIONS)
    derived = {rows: captures.at(rows) for rows in (1, 2, 4, 8, 16)}
    assert sorted(capture.rows) == [1, 2, 8, 16]
    assert derived[4].graph.batch == 4
    assert derived[4].chunks is not None
    assert derived[4] == captured(4)
    assert captures.is_as_derived(4)
    assert captures.is_as_derived(16)


def test_if_a_number_is_on_no_straight_line_each_batch_is_captured() -> None:
    capture = Counted(offset_at=8)
    captures = BatchCaptures(capture=capture, rows=(2, 4, 8, 16), options=CAPTURE_OPTIONS)
    assert [captures.at(rows).graph.batch for rows in (2, 4, 8, 16)] == [2, 4, 8, 16]
    assert sorted(capture.rows) == [2, 4, 8, 16]


def test_a_capture_that_is_not_as_derived_drops_all_that_are_derived() -> None:
    capture = Counted(offset_at=4)
    captures = BatchCaptures(capture=capture, rows=(2, 4, 8, 16), options=CAPTURE_OPTIONS)
    before = captures.at(4)
    assert 4 not in capture.rows
    assert not captures.is_as_derived(4)
    assert captures.at(4).base_bytes == before.base_bytes + 1
    assert captures.is_as_derived(4)


# ----------------------------------------------------------------------------------------------------------------------
# The command line captures a model and batch once; a file that is damaged or out of date is never used.


CONFIG = {
    "model_type": "llama", "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 64, "vocab_size": 64, "num_hidden_layers": 1,
}  # fmt: skip
CHUNKS = Chunks(
    region=LossRegion(
        name="loss", nodes=("linear", "loss"), num_tokens=8, num_classes=64, logits_bytes=2048, source="model.py:3"
    ),
    num_chunks=8,
)
TEXT = TextBatch(batch=2, seq=16)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of captures, which is empty."""
    monkeypatch.setenv("ELIXIR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    return tmp_path / "cache" / "captures"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return tmp_path


def asked(model: Path, batch: int = 2, **options: object) -> Request:
    options = {"inner": "aot_eager", **options}
    return Request(
        model=str(model), batch=batch, seq=16, dtype="float32", recompute=False, hardware=None, ranks=1, options=options
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Capture:
    """Return the capture of a model that a function makes."""
    file = tmp_path_factory.mktemp("model") / "net.py"
    text = "import torch\ndef make():\n    return torch.nn.Linear(8, 8), (torch.empty(2, 8),)\n"
    file.write_text(text, encoding="utf-8")
    return asked(Path(f"{file}:make")).capture()


@pytest.mark.usefixtures("folder")
def test_the_second_command_captures_nothing(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = asked(config).capture()

    def fail(*args: object, **kwargs: object) -> Capture:
        raise AssertionError("captured again")

    with monkeypatch.context() as patch:
        patch.setattr(plan_command, "find_model", fail)
        patch.setattr(plan_command, "capture_model", fail)
        second = asked(config, device_memory="1GiB", search_timeout=1.0).capture()
        assert second == first
        assert str(second.graph) == str(first.graph)
        assert list(second.params) == list(first.params)
        with pytest.raises(AssertionError, match="captured again"):
            asked(config, batch=3).capture()
    (config / "config.json").write_text(json.dumps(CONFIG | {"intermediate_size": 96}), encoding="utf-8")
    wider = asked(config).capture()
    assert wider.graph != first.graph


@pytest.mark.usefixtures("folder")
def test_a_model_that_a_function_makes_is_captured_each_time(made: Capture, folder: Path) -> None:
    assert capture_key("net.py:make", TEXT, Options(), dynamic=False, chunks=None) is None
    assert not folder.exists()


@pytest.mark.usefixtures("folder")
def test_a_cached_capture_is_the_one_that_was_made(made: Capture) -> None:
    whole = replace(made, chunks=CHUNKS, batch_symbol="s0", loss_chunks=4, params=dict(reversed(made.params.items())))
    store_capture("key", whole)
    cached = cached_capture("key")
    assert cached == whole
    assert cached is not None
    assert list(cached.params) == list(whole.params)


def key(**changes: Any) -> str | None:
    known = {"model": "llama-7b", "text": TEXT, "options": Options(), "dynamic": False, "chunks": None}
    return capture_key(**(known | changes))


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    "changes",
    [
        {"model": "gpt2-4b"},
        {"text": replace(TEXT, seq=32)},
        {"text": replace(TEXT, dtype=torch.bfloat16)},
        {"text": replace(TEXT, recompute=True)},
        {"options": Options(activations="keep")},
        {"options": Options(param_dtype="bfloat16")},
        {"options": Options(inner="aot_eager")},
        {"dynamic": True},
        {"chunks": CHUNKS},
    ],
)
def test_options_that_change_a_capture_change_its_key(changes: dict[str, Any]) -> None:
    assert key(**changes) != key()
    assert key(model="Llama-7B", options=Options(device_memory=1, search_timeout=1.0)) == key()


def other_torch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch, "__version__", "2.99")


def other_transformers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(capture_cache, "_transformers", lambda: ("9.9", None))


def other_source(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(capture_cache, "source_digest", lambda *patterns: "other")


def other_environment(patch: pytest.MonkeyPatch) -> None:
    patch.setenv("TORCHINDUCTOR_FREEZING", "1")


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("change", [other_torch, other_transformers, other_source, other_environment])
def test_other_versions_of_the_software_change_the_key(
    change: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = key()
    assert key() == before
    change(monkeypatch)
    assert key() != before


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: b"\xff" + data,
        lambda data: data.replace(b'"base_bytes"', b'"bytes"'),
        lambda data: data.replace(b'"format": 1', b'"format": 0'),
        lambda data: data.replace(b'"kind": "param"', b'"kind": "other"'),
        lambda data: b"",
    ],
)
def test_a_damaged_file_is_removed_with_a_line_in_the_log(
    damage: Callable[[bytes], bytes], made: Capture, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store_capture("key", made)
    file = folder / "key.json"
    data = file.read_bytes()
    assert damage(data) != data
    file.write_bytes(damage(data))
    with caplog.at_level(logging.INFO, "elixir_compile"):
        assert cached_capture("key") is None
    assert f"the cached capture {file} cannot be read and is removed" in caplog.text
    assert not file.exists()
    assert cached_capture("key") is None


@pytest.mark.usefixtures("folder")
def test_the_oldest_of_too_many_captures_go(made: Capture, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_cache, "MOST_CAPTURES", 2)
    for age_s, name in enumerate(("a", "b")):
        store_capture(name, made)
        os.utime(folder / f"{name}.json", (age_s, age_s))
    assert cached_capture("a") is not None  # so it is used later than b
    store_capture("c", made)
    assert sorted(path.stem for path in folder.iterdir()) == ["a", "c"]


@pytest.mark.usefixtures("folder")
def test_a_folder_that_cannot_be_made_gets_a_line_in_the_log(
    made: Capture, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.parent.write_text("a file", encoding="utf-8")
    with caplog.at_level(logging.INFO, "elixir_compile"):
        store_capture("key", made)
        assert cached_capture("key") is None
    assert f"captures cannot be cached in {folder}" in caplog.text
