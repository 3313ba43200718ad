"""What dry steps find out about an optimizer class."""

import math
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import elixir_compile as elixir
from elixir_compile.optim.hybrid import Hybrid
from tests.run import optimizers as users


def made(cls: type[torch.optim.Optimizer], **options: Any) -> Hybrid:
    optimizer = elixir.hybrid(cls)([torch.nn.Parameter(torch.ones(5, 3))], **options)
    assert isinstance(optimizer, Hybrid)
    return optimizer


@pytest.mark.parametrize(
    ("cls", "options", "statistics"),
    [
        (torch.optim.SGD, {}, []),
        (torch.optim.SGD, {"momentum": 0.9}, ["momentum_buffer"]),
        (torch.optim.SGD, {"momentum": 0.9, "fused": True}, ["momentum_buffer"]),
        (torch.optim.Adam, {}, ["exp_avg", "exp_avg_sq"]),
        (torch.optim.Adam, {"amsgrad": True, "foreach": True}, ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]),
        (torch.optim.Adam, {"lr": torch.tensor(0.1), "capturable": True}, ["exp_avg", "exp_avg_sq"]),
        (torch.optim.AdamW, {"amsgrad": True}, ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]),
        (torch.optim.RMSprop, {"centered": True}, ["square_avg", "grad_avg"]),
        (torch.optim.Adagrad, {"initial_accumulator_value": 0.5}, ["sum"]),
        (torch.optim.ASGD, {}, ["ax"]),
        (torch.optim.Rprop, {}, ["prev", "step_size"]),
        (users.Lion, {}, ["average"]),
    ],
)
def test_statistics_and_their_bytes(
    cls: type[torch.optim.Optimizer], options: dict[str, Any], statistics: list[str]
) -> None:
    optimizer = made(cls, **options)
    assert optimizer.places_state
    group = optimizer.param_groups[0]
    assert list(optimizer._updater.rule.statistics(group)) == statistics
    states = optimizer.states_of(group["params"])
    assert [(state.group, state.nbytes) for state in states] == [(0, 15 * 4 * len(statistics))]


def test_hyperparameters_that_change_the_statistics() -> None:
    optimizer = made(torch.optim.SGD)
    (param,) = optimizer.param_groups[0]["params"]
    assert optimizer.states_of([param])[0].nbytes == 0
    optimizer.param_groups[0]["momentum"] = 0.5
    assert optimizer.states_of([param])[0].nbytes == 60


@pytest.mark.parametrize(
    ("cls", "because"),
    [
        (torch.optim.LBFGS, "closure"),
        (torch.optim.Adafactor, "parts"),
        (torch.optim.Muon, "2D"),
        (users.Scaled, "other weights"),
        (users.RowScaled, "other weights"),
        (users.Clipped, "other weights"),
        (users.Noisy, "other weights"),
        (users.Factored, r"keeps rows of shape \(16,\)"),
        (users.Centered, r"shape \(4, 4, 4, 2\) get other weights"),
        (users.FastNumbers, r"shape \(\) get other weights"),
        (users.SlowGiants, r"shape \(127, 256\) get other weights"),
        (users.CountsInGroup, "a step changes count"),
        (users.CountsInItself, "a step changes count"),
    ],
)
def test_classes_that_are_not_elementwise_warn_once_with_reason(cls: type[torch.optim.Optimizer], because: str) -> None:
    optimizer = made(cls)
    with pytest.warns(elixir.ElixirWarning, match=f"Hybrid{cls.__name__} is not element-wise: .*{because}"):
        assert not optimizer.places_state
    assert not optimizer.places_state


@pytest.mark.parametrize(
    ("cls", "options", "counts"),
    [
        (torch.optim.Adam, {"fused": True}, True),
        (torch.optim.Adam, {}, False),  # its counter stays on the host
        (torch.optim.SGD, {"fused": True}, False),
        (users.Lion, {}, False),
    ],
)
def test_classes_whose_steps_the_host_counts(
    cls: type[torch.optim.Optimizer], options: dict[str, Any], counts: bool
) -> None:
    optimizer = made(cls, **options)
    assert optimizer._updater.rule.counts_steps(optimizer.param_groups[0]) is counts


def test_an_entry_called_step_need_not_be_a_counter() -> None:
    optimizer = made(users.StepsByTwo)
    optimizer.param_groups[0]["fused"] = True  # so that all of its state is beside the weight
    assert not optimizer._updater.rule.counts_steps(optimizer.param_groups[0])


def test_dry_steps_leave_the_random_state_unchanged() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    optimizer = made(users.Noisy)
    with pytest.warns(elixir.ElixirWarning):
        assert not optimizer.places_state
    assert torch.equal(torch.rand(3), expected)


def test_optimizer_hooks_see_each_step_once_and_no_dry_step() -> None:
    seen: list[str] = []
    optimizer = made(torch.optim.SGD, lr=1.0)
    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])  # from now on torch has wrapped the step of SGD
    optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
    handle = register_optimizer_step_post_hook(lambda *_: seen.append("post"))
    (param,) = optimizer.param_groups[0]["params"]
    param.grad = torch.ones_like(param)
    with pytest.warns(elixir.NoGraphCaptured, match="this HybridSGD"):
        optimizer.step()
    handle.remove()
    assert seen == ["pre", "post"]
    assert torch.equal(param, torch.zeros(5, 3))


def test_hybrid_returns_the_same_subclass_each_time() -> None:
    cls = elixir.hybrid(torch.optim.SGD)
    assert issubclass(cls, torch.optim.SGD)
    assert cls is not torch.optim.SGD
    assert elixir.hybrid(torch.optim.SGD) is cls
    assert elixir.hybrid(cls) is cls
    assert elixir.hybrid(torch.optim.AdamW) is elixir.HybridAdamW
    with pytest.raises(ValueError, match="learning rate"):
        cls([torch.nn.Parameter(torch.ones(1))], lr=-1.0)


@pytest.mark.parametrize("wrong", [torch.nn.Linear, torch.optim.Optimizer, "SGD", math.pi])
def test_hybrid_refuses_classes_that_are_not_optimizers(wrong: Any) -> None:
    with pytest.raises(TypeError, match="subclass of torch"):
        elixir.hybrid(wrong)
