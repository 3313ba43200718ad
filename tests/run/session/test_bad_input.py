"""Bad input: a clear error or warning, and the user's model and optimizer as they were."""

import copy
import gc
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import elixir_compile as elixir
from elixir_compile.base.units import format_bytes
from elixir_compile.compat.platforms import host_memory_bytes
from elixir_compile.graph.capture.modules import is_swapped
from elixir_compile.optim import guard as unplanned
from tests.run.models import Stack
from tests.run.training import hybrid_adamw, plain_step


class Untouched:
    """A model and its optimizer as they were before, to compare with after."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        trains = any(param.is_floating_point() for param in model.parameters())
        self.optimizer = hybrid_adamw(model.parameters()) if trains else None
        self.classes = [type(module) for module in model.modules()]
        self.pointers = [param.data_ptr() for param in model.parameters()]
        self.state = copy.deepcopy(model.state_dict())

    def check(self) -> None:
        assert [type(module) for module in self.model.modules()] == self.classes
        assert not any(is_swapped(module) for module in self.model.modules())
        assert [param.data_ptr() for param in self.model.parameters()] == self.pointers
        assert all(param.grad is None for param in self.model.parameters())
        assert all(torch.equal(value, self.state[name]) for name, value in self.model.state_dict().items())
        assert self.optimizer is None or not self.optimizer.state


def compile_with(model: nn.Module, **options: object) -> Callable[..., torch.Tensor]:
    return torch.compile(model, backend="elixir", options={"inner": "aot_eager", "report": False, **options})


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"device_memroy": "1GiB"}, elixir.UnknownOption, "Did you mean 'device_memory'"),
        ({"device_memory": "a lot"}, elixir.InvalidOption, "20GiB"),
        ({"device_memory": -1}, elixir.InvalidOption, "device_memory"),
        ({"device_memory": 0}, elixir.InvalidOption, "device_memory"),
        ({"planner": "greddy"}, elixir.InvalidOption, "'greedy'"),
        ({"search_timeout": 0}, elixir.InvalidOption, "positive number of seconds"),
        ({"hardware": "a100-40gb"}, elixir.UnknownHardware, "Did you mean 'a100-40g'"),
        ({"hardware": "4 x a100-40g"}, elixir.InvalidOption, "a machine with one device"),
        ({"inner": "nvcc"}, elixir.InvalidOption, "'aot_eager'"),
    ],
)
def test_an_invalid_option_raises_its_error(options: dict, error: type[Exception], sentence: str) -> None:
    before = Untouched(Stack())
    compiled = compile_with(before.model, **options)
    for _ in range(2):  # the error stays what it is
        with pytest.raises(error, match=sentence):
            compiled(torch.randn(4, 64))
    before.check()


def test_a_compile_mode_raises_invalid_option() -> None:
    compiled = torch.compile(Stack(), backend="elixir", mode="max-autotune")
    with pytest.raises(elixir.InvalidOption, match="mode"):
        compiled(torch.randn(4, 64))


def test_a_budget_below_the_minimum_raises_with_the_smallest_sufficient_budget() -> None:
    before, batch = Untouched(Stack()), torch.randn(4, 64)
    compiled = compile_with(before.model, device_memory="1KiB")
    with pytest.raises(elixir.NoFeasiblePlan, match="prepare") as caught:
        compiled(batch)
    error = caught.value
    before.check()
    assert error.op
    assert sum(error.by_kind.values()) == error.needed_bytes
    assert str(error.needed_bytes) in str(error)
    torch._dynamo.reset()
    with pytest.raises(elixir.NoFeasiblePlan):
        compile_with(before.model, device_memory=error.needed_bytes - 1)(batch)
    before.check()
    torch._dynamo.reset()
    plain_step(compile_with(before.model, device_memory=error.needed_bytes), before.optimizer, batch)


def saved_plan(path: Path) -> Path:
    compiled = compile_with(Stack(num_blocks=2))
    compiled(torch.randn(4, 64)).backward()
    (record,) = elixir.compilations(compiled)
    elixir.save_plan(record.plan, path)
    torch._dynamo.reset()
    return path


def test_training_follows_the_saved_plan_of_an_earlier_run(tmp_path: Path) -> None:
    path = saved_plan(tmp_path / "plan.json")
    compiled = compile_with(Stack(num_blocks=2), plan=str(path))
    compiled(torch.randn(4, 64)).backward()
    (record,) = elixir.compilations(compiled)
    assert record.plan == elixir.load_plan(path)


def test_a_plan_for_another_graph_raises_with_both_models_and_their_first_difference(tmp_path: Path) -> None:
    path = saved_plan(tmp_path / "plan.json")
    before = Untouched(Stack(num_blocks=3))
    with pytest.raises(elixir.PlanMismatch, match="another graph") as caught:
        compile_with(before.model, plan=str(path))(torch.randn(4, 64))
    assert elixir.load_plan(path).graph in str(caught.value)
    assert caught.value.expected != caught.value.got
    assert f"{caught.value.expected} (model Stack, 14 parameters with " in str(caught.value)
    assert f"{caught.value.got} (model Stack, 20 parameters with " in str(caught.value)
    assert "The plan has no parameter blocks.2." in str(caught.value)
    before.check()


def test_a_truncated_and_a_missing_plan_file_raise_plan_file_error(tmp_path: Path) -> None:
    path = saved_plan(tmp_path / "plan.json")
    path.write_text(path.read_text()[: path.stat().st_size // 2])
    before = Untouched(Stack(num_blocks=2))
    with pytest.raises(elixir.PlanFileError):
        compile_with(before.model, plan=str(path))(torch.randn(4, 64))
    torch._dynamo.reset()
    with pytest.raises(elixir.PlanFileError, match="nowhere"):
        compile_with(before.model, plan=str(tmp_path / "nowhere.json"))(torch.randn(4, 64))
    before.check()


class Integers(nn.Module):
    """A table of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.arange(8), requires_grad=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table[ids] * 2


class Bare(nn.Module):
    """No parameter at all."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin() * 2


@pytest.mark.parametrize(("model", "batch"), [(Integers(), torch.arange(4)), (Bare(), torch.ones(3))])
def test_a_model_without_parameters_runs_with_a_warning(model: nn.Module, batch: torch.Tensor) -> None:
    before = Untouched(model)
    expected = model(batch)
    with pytest.warns(elixir.ElixirWarning, match="nothing to place"):
        got = compile_with(model)(batch)
    assert torch.equal(got, expected)
    before.check()


def test_prepare_raises_without_parameters() -> None:
    with pytest.raises(elixir.UnsupportedModel, match="no parameters"):
        elixir.prepare(Bare())


def test_prepare_swaps_a_frozen_table_of_integers_and_its_model_computes_the_same_values() -> None:
    model, ids = Integers(), torch.tensor([3, 5])
    expected = model(ids)
    elixir.prepare(model)
    assert is_swapped(model)
    assert torch.equal(model(ids), expected)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("is_called", [False, True], ids=["raw model", "compiled model"])
def test_an_optimizer_of_torch_warns_once_if_nothing_of_its_model_was_captured(kind: Any, is_called: bool) -> None:
    model, other = Stack(), Stack()
    compiled = torch.compile(model, backend="elixir", options={"inner": "aot_eager", "report": False})
    optimizer, elsewhere = kind(model.parameters(), lr=1e-3), kind(other.parameters(), lr=1e-3)
    own = compiled if is_called else model
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            (own(torch.randn(4, 64)).sum() + other(torch.randn(4, 64)).sum()).backward()
            optimizer.step()
            elsewhere.step()  # of a model that nobody compiled
    texts = [str(one.message) for one in seen if isinstance(one.message, elixir.NoGraphCaptured)]
    assert len(texts) == (0 if is_called else 1)
    assert all(f"this {kind.__name__}" in text and "compile" in text for text in texts)


def test_objects_of_the_process_are_looked_through_once_for_all_optimizers_of_a_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It takes as long as a step, and a model may have an optimizer for each parameter."""
    looked, real = [], gc.get_objects
    monkeypatch.setattr(unplanned, "gc", SimpleNamespace(get_objects=lambda: looked.append(True) or real()))
    torch.compile(Stack(), backend="eager")(torch.randn(4, 64))
    for _ in range(2):
        model = Stack()
        model(torch.randn(4, 64)).backward()
        for param in model.parameters():
            torch.optim.SGD([param], lr=0.1).step()
    assert len(looked) == 2


def test_compilations_of_a_model_that_never_ran_warn() -> None:
    model = Stack()
    optimizer = hybrid_adamw(model.parameters())
    with pytest.warns(elixir.NoGraphCaptured, match="Stack"):
        assert elixir.compilations(model) == []
    model(torch.randn(4, 64)).backward()
    with pytest.warns(elixir.NoGraphCaptured, match="torch.compile"):
        optimizer.step()


def plans(model: nn.Module, x: torch.Tensor, options: dict[str, object]) -> None:
    elixir.plan(model, x, options=options)


def trains(model: nn.Module, x: torch.Tensor, options: dict[str, object]) -> None:
    compile_with(model, **options)(x).sum().backward()


def trains_at_other_prices(model: nn.Module, x: torch.Tensor, options: dict[str, object]) -> None:
    trains(model, x, {**options, "hardware": "a100-80g"})


@pytest.mark.parametrize(("name", "place"), [("device_memory", "cpu"), ("host_memory", "this host")])
@pytest.mark.parametrize("use", [plans, trains, trains_at_other_prices])
def test_a_budget_of_more_than_the_machine_has_is_said_with_both_numbers(
    name: str, place: str, use: Callable[..., None]
) -> None:
    total_bytes = host_memory_bytes()
    options = {"plan_cache": False, name: total_bytes + (1 << 30)}
    has = f"the option {name} is {format_bytes(total_bytes + (1 << 30))}, and {place} has {format_bytes(total_bytes)}"
    with pytest.warns(elixir.ElixirWarning, match=has):
        use(nn.Linear(8, 8), torch.ones(2, 8), options)


def test_a_budget_of_all_that_the_machine_has_is_accepted_and_a_plan_for_another_machine_may_have_more() -> None:
    model, x = nn.Linear(8, 8), torch.ones(2, 8)
    total_bytes = host_memory_bytes()
    elixir.plan(model, x, options={"device_memory": total_bytes, "host_memory": total_bytes})
    elixir.plan(model, x, options={"device_memory": "400TiB", "host_memory": "400TiB"}, hardware="a100-80g")
