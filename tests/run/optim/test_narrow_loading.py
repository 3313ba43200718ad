"""State dicts of HybridAdamW with moments in fewer bytes, and of optimizers with masters beside them: what is loaded
goes on bit for bit, is converted, or is refused before anything has changed."""

import copy
import functools
from typing import Any

import pytest
import torch
from torch.optim import SGD

import elixir_compile as elixir
from elixir_compile.graph.ops.optimizers import REST_NAMES
from elixir_compile.optim.generic.class_rule import ClassRule
from elixir_compile.optim.precision import MomentForm, form_of
from tests.run.optim.test_narrow_state import NARROW, assert_same_run, rows, steps
from tests.run.training import Run
from tests.run.updating import eager_run

pytestmark = pytest.mark.filterwarnings("ignore::elixir_compile.base.errors.NoGraphCaptured")
BF16 = torch.bfloat16


def adamw(params: Any, **arguments: Any) -> elixir.HybridAdamW:
    return elixir.HybridAdamW(params, lr=1e-2, **arguments)


def with_masters(num_steps: int, **arguments: Any) -> Run:
    """Train a model with bf16 parameters, which have masters."""
    model = elixir.prepare(steps(), param_dtype="bfloat16")
    own = Run(model=model, compiled=model, optimizer=adamw(model.parameters(), **arguments))
    return own.train(rows(num_steps, BF16))


def go_on(run: Run, of: Run) -> Run:
    """Load the model and the optimizer of `of` into `run`, and train both two steps more."""
    run.model.load_state_dict(copy.deepcopy(of.model.state_dict()))
    run.optimizer.load_state_dict(copy.deepcopy(of.optimizer.state_dict()))
    for each in (run, of):
        each.losses.clear()
        each.train(rows(5, BF16)[3:])
    return run


@pytest.mark.parametrize("master_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("state_dtype", ["float32", *NARROW])
def test_a_state_dict_with_masters_resumes_bit_for_bit(state_dtype: str, master_dtype: str) -> None:
    how = {"state_dtype": state_dtype, "master_dtype": master_dtype}
    first = with_masters(3, **how)
    other = go_on(with_masters(1, **how), first)
    assert_same_run(first, other)
    for state in other.optimizer.state.values():
        assert form_of(state) is MomentForm(state_dtype)
        assert (REST_NAMES[BF16] in state) == (master_dtype == "float32")


def test_a_master_that_is_loaded_by_an_optimizer_without_masters_is_rounded_to_its_parameter() -> None:
    exact = with_masters(3)
    own = with_masters(1, master_dtype="bfloat16")
    own.optimizer.load_state_dict(copy.deepcopy(exact.optimizer.state_dict()))
    assert not any(set(REST_NAMES.values()) & state.keys() for state in own.optimizer.state.values())
    masters = [entry["master"] for entry in exact.optimizer.state_dict()["state"].values()]
    for param, master in zip(own.model.parameters(), masters, strict=True):
        assert torch.equal(param.detach(), master.to(BF16))


@pytest.mark.parametrize("how", [{"state_dtype": "int8"}, {"master_dtype": "bfloat16"}])
def test_amsgrad_is_refused_before_a_state_dict_changes_anything(how: dict[str, str]) -> None:
    saved = eager_run(steps(), functools.partial(torch.optim.AdamW, amsgrad=True)).train(rows(2))
    own = eager_run(steps(), adamw, state_dtype="int8") if "state_dtype" in how else with_masters(0, **how)
    own.train(rows(1, next(own.model.parameters()).dtype))
    before = copy.deepcopy(own.optimizer.state_dict())
    with pytest.raises(ValueError, match=r"amsgrad=True with moments in \w+: .* stored in fp32 only"):
        own.optimizer.load_state_dict(saved.optimizer.state_dict())
    torch.testing.assert_close(own.optimizer.state_dict(), before, rtol=0, atol=0)


def test_amsgrad_that_is_set_in_a_group_is_refused_by_the_next_update() -> None:
    own = eager_run(steps(), adamw, state_dtype="int8").train(rows(1))
    weights = own.weights
    own.optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(ValueError, match="amsgrad=True with moments in int8"):
        own.train(rows(1))
    assert all(torch.equal(own.weights[name], weights[name]) for name in weights)


def test_amsgrad_has_exact_moments_whatever_the_plan_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan may be older than its optimizer, and is made for AdamW without AMSGrad then."""
    own = eager_run(steps(), adamw, amsgrad=True)
    rule = own.optimizer._updater.rule  # pyright: ignore[reportAttributeAccessIssue]
    param, group = next(own.model.parameters()), own.optimizer.param_groups[0]
    planned = type("Planned", (), {"state_dtype": "int8"})()
    monkeypatch.setattr("elixir_compile.optim.adamw_rule.planned_spec", lambda param: planned)
    assert rule.form(param, group) is MomentForm.FLOAT32
    assert rule.form(param, {**group, "amsgrad": False}) is MomentForm.INT8
    own.train(rows(2))
    assert {value.dtype for state in own.optimizer.state.values() for value in state.values()} == {torch.float32}


def test_the_first_update_finds_its_kernel_built_and_its_threads_chosen() -> None:
    """Else the thread of updates would wait for the compiler in the middle of a step."""
    own = eager_run(steps(), adamw, state_dtype="int8")
    rule = own.optimizer._updater.rule  # pyright: ignore[reportAttributeAccessIssue]
    assert rule._threads is None
    own.train(rows(1))
    assert rule._threads is not None


# -- classes ----------------------------------------------------------------------------------------------------------


def test_a_class_without_statistics_has_no_moments_to_narrow() -> None:
    narrow = elixir.hybrid(SGD, "bfloat16")
    own = eager_run(steps(), narrow, lr=0.1).train(rows(3))
    exact = eager_run(steps(), elixir.hybrid(SGD), lr=0.1).train(rows(3))
    assert all(torch.equal(own.weights[name], exact.weights[name]) for name in own.weights)
    params = list(own.model.parameters())
    assert {found.dtype for found in own.optimizer.states_of(params)} == {None}  # pyright: ignore


def test_the_noise_of_a_class_that_counts_no_steps_is_another_in_each_update() -> None:
    """A momentum that decays by 1/1000 in each step: with the same noise each time it would stay where it rounds to."""
    param = torch.nn.Parameter(torch.zeros(4096))
    optimizer = elixir.hybrid(SGD, "bfloat16")([param], lr=0.0, momentum=0.999)
    param.grad = begin = torch.linspace(1.0, 2.0, 4096)  # equal values would get equal noise
    optimizer.step()
    param.grad = torch.zeros(4096)
    for _ in range(100):
        optimizer.step()
    left = optimizer.state[param]["momentum_buffer"].float().mean() / begin.mean()
    assert float(left) == pytest.approx(0.999**100, abs=0.002)
    assert optimizer.state[param]["num_updates"] == 101


def test_a_rule_of_a_class_needs_fp32_statistics_to_narrow_them() -> None:
    param = torch.nn.Parameter(torch.zeros(8, dtype=torch.float64))
    optimizer = elixir.hybrid(SGD, "bfloat16")([param], lr=0.1, momentum=0.9)
    rule = ClassRule(SGD, optimizer, optimizer.precision)  # pyright: ignore[reportAttributeAccessIssue]
    assert rule.param_state(param, optimizer.param_groups[0]).dtype is None
