"""`elixir_compile.plan` says without training what training would do, and training takes it."""

import gc
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import elixir_compile as elixir
from elixir_compile.base.options import Options
from elixir_compile.graph.capture.modules import executor_of
from elixir_compile.graph.ops.registry import num_slots
from elixir_compile.ir import Kind, Tier, fingerprint
from elixir_compile.ir.hardware import preset
from elixir_compile.session.saved import load_question
from elixir_compile.step import verify
from elixir_compile.tools.preview.capture import capture_step
from tests.run.models import Stack, Tied, hf_batches, seeded, small_gpt2, tokens, vectors
from tests.run.training import by_elixir, by_elixir_unprepared

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
    model, (batch, *_) = seeded(Stack), vectors()
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
    model, (batch, *_) = small_gpt2(), hf_batches()
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


@pytest.mark.parametrize(
    "given", [Stack, lambda: on_meta(Stack), lambda: elixir.prepare(Stack()), lambda: torch.compile(Stack())]
)
def test_real_meta_prepared_and_compiled_models_have_equal_graphs(given: Callable[[], nn.Module]) -> None:
    expected = capture_step(Stack(), vectors()[:1]).graph
    assert capture_step(given(), vectors()[:1]).graph == expected


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
    model = seeded(Stack)
    for rows in (8, 12, 16):
        elixir.plan(model, vectors(rows=rows)[:1], options=PLANNER)
    trained = by_elixir_unprepared(model)
    trained.train(vectors(1, rows=20))
    (record,) = elixir.compilations(trained.compiled)
    assert record.graph.symbols == ()


def test_a_dynamic_capture_serves_many_batches() -> None:
    capture = capture_step(Stack(), vectors(rows=6)[:1], dynamic=True)
    for rows in (3, 24):
        sizes = [s.nbytes for s in capture.at_batch(rows).graph.storages if s.kind is Kind.SAVED]
        static = capture_step(Stack(), vectors(rows=rows)[:1]).graph
        assert sorted(sizes) == sorted(s.nbytes for s in static.storages if s.kind is Kind.SAVED)
        assert fingerprint(capture.at_batch(rows).graph) == fingerprint(capture.graph)
    with pytest.raises(elixir.UnsupportedModel, match="fixes the batch"):
        capture_step(Stack(), vectors()[:1]).at_batch(3)


def test_state_bytes_are_those_of_hybrid_adamw_or_the_given_bytes_per_element() -> None:
    capture = capture_step(lambda: Stack().to(torch.bfloat16), [torch.empty(8, 64, dtype=torch.bfloat16)])
    numel = sum(param.numel() for param in Stack().parameters())
    assert sum(capture.state_nbytes().values()) == 2 * 2 * numel
    assert sum(capture.state_nbytes(12).values()) == 12 * numel


def test_frozen_parameters_have_no_state() -> None:
    model = Stack()
    model.head.requires_grad_(False)
    assert not any(name.startswith("head") for name in capture_step(model, vectors()[:1]).numels)


def test_parameters_that_the_step_does_not_read_stay_on_the_device() -> None:
    model = Stack()
    model.unread = nn.Linear(8, 4)
    num_params = len(list(model.parameters()))
    scalar_bytes = 12 * num_params + 8 * (1 + num_params)  # of each, two handles and the count of steps; the ticket
    assert capture_step(model, vectors()[:1]).base_bytes == 4 * (8 * 4 + 4) + scalar_bytes


def test_budgets_of_a_profile_leave_the_reserve_and_share_the_host() -> None:
    capture = capture_step(Stack(), vectors()[:1])
    cluster = preset("a100-40g", num_devices=4)
    problem = capture.problem(cluster, Options())
    assert problem.budget_bytes == cluster.device.memory_bytes - cluster.device.reserve_bytes
    assert problem.host_budget_bytes == (cluster.host.memory_bytes - cluster.host.reserve_bytes) // 4
    assert elixir.plan(Stack(), vectors()[:1], hardware=cluster, options=PLANNER).cluster == "4 x a100-40g"


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
