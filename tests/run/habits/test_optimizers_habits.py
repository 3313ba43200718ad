"""What people do with optimizers, between and around steps, with torch's own and with hybrid ones."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

import elixir_compile as elixir
from tests.run.habits.habit import habit
from tests.run.habits.stories import compiled, eager
from tests.run.models import seeded
from tests.run.optimizers import Lion
from tests.run.training import Run, assert_same, assert_same_tensors
from tests.run.updating import WIDTH, flat_state, ladder, rows

Loop = Callable[[Run, list[torch.Tensor]], None]
"""Trains a run on batches."""

OFFLOAD = {"planner": "zero3_offload"}
SETUPS: dict[str, dict[str, object]] = {
    "free": {},
    "offload": OFFLOAD,
    "after_backward": {**OFFLOAD, "update": "after_backward"},
    "across_steps": {**OFFLOAD, "update": "across_steps"},
    "in_backward": {**OFFLOAD, "update": "in_backward"},
}
"""Options by name: the first two with torch's optimizer, the others with its hybrid, updated at that time."""


def setups(*names: str) -> Any:
    return pytest.mark.parametrize("setup", names)


EACH = setups("offload", "across_steps")


class Pair(nn.Module):
    """Two odd linear layers, one of them without a bias; returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.steps:
            x = torch.tanh(layer(x))
        return x.square().mean()


def both(setup: str, cls: Any = AdamW, **options: Any) -> tuple[Any, Any]:
    """Return what makes the optimizer of torch, and what makes the one of `setup`."""
    torchs = {"fused": True, **options} if cls is AdamW else options
    own = cls if setup in ("free", "offload") else elixir.hybrid(cls)
    own_options = torchs if own is cls else options
    return (lambda params: cls(params, **torchs)), (lambda params: own(params, **own_options))


def assert_same_loop(
    loop: Loop,
    setup: str,
    makes: Any = None,
    *,
    make: Callable[[], nn.Module] = Pair,
    cls: Any = AdamW,
    state: bool = True,
    **options: Any,
) -> tuple[Run, Run]:
    """Fail unless `loop` gives the same bits in eager PyTorch as under `setup`: losses, weights and state."""
    model = seeded(make)
    plain, own = makes or both(setup, cls, **{"lr": 1e-2, **options})
    runs = eager(model, plain), compiled(model, SETUPS[setup], own)
    for run in runs:
        torch.manual_seed(0)
        loop(run, rows(6))
    assert_same(*runs)
    if state:
        assert_same_tensors(flat_state(runs[0].optimizer), flat_state(runs[1].optimizer))
    return runs


def backward(run: Run, batch: torch.Tensor) -> torch.Tensor:
    loss = run.compiled(batch)
    loss.backward()
    run.losses.append(loss.detach().clone())
    return run.losses[-1]


def step(run: Run, batch: torch.Tensor, optimizer: Any = None) -> torch.Tensor:
    optimizer = optimizer or run.optimizer
    loss = backward(run, batch)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def layers(run: Run) -> list[list[nn.Parameter]]:
    return [list(layer.parameters()) for layer in run.model.steps]


@habit(
    "`add_param_group` for layers that are thawed one by one",
    area="Optimizers",
    note="after each thaw, call the compiled model once under `torch.no_grad()`; a warning asks for it",
)
@pytest.mark.filterwarnings("ignore:.*began to require a gradient")
@setups("free", "across_steps")
def test_layers_are_thawed_and_added_as_groups(setup: str) -> None:
    plain, own = both(setup, lr=1e-2)

    def last(make: Any) -> Any:
        return lambda params: make(list(params)[-2:])

    def loop(run: Run, batches: list[torch.Tensor]) -> None:
        for param in itertools.chain(*layers(run)[:-1]):
            param.requires_grad_(False)
        for number, batch in enumerate(batches):
            if number in (2, 4):
                thawed = layers(run)[3 - number // 2]
                for param in thawed:
                    param.requires_grad_(True)
                run.optimizer.add_param_group({"params": thawed, "lr": 1e-3, "weight_decay": 0.0})
                with torch.no_grad():
                    run.compiled(batch)
            step(run, batch)

    assert_same_loop(loop, setup, (last(plain), last(own)), make=ladder)


@habit("Setting `group['lr']` and `group['betas']` by hand before each step", area="Optimizers")
@setups("free", "across_steps", "in_backward")
def test_hyperparameters_by_hand(setup: str) -> None:
    def loop(run: Run, batches: list[torch.Tensor]) -> None:
        for number, batch in enumerate(batches):
            for group in run.optimizer.param_groups:
                group["lr"], group["betas"] = 1e-2 / (number + 1), (0.9 - number / 10, 0.99)
            step(run, batch)

    assert_same_loop(loop, setup)


@habit("`OneCycleLR`, including its cycle of the momentum", area="Optimizers")
@pytest.mark.parametrize(
    ("setup", "cls", "options"), [("offload", SGD, {"momentum": 0.9}), ("across_steps", AdamW, {})]
)
def test_one_cycle(setup: str, cls: Any, options: dict[str, Any]) -> None:
    def loop(run: Run, batches: list[torch.Tensor]) -> None:
        scheduler = OneCycleLR(run.optimizer, max_lr=0.1, total_steps=len(batches))
        for batch in batches:
            step(run, batch)
            scheduler.step()

    assert_same_loop(loop, setup, cls=cls, **options)


@habit("`ReduceLROnPlateau`", area="Optimizers")
@setups("offload", "in_backward")
def test_plateau(setup: str) -> None:
    def loop(run: Run, batches: list[torch.Tensor]) -> None:
        scheduler = ReduceLROnPlateau(run.optimizer, factor=0.1, patience=0, threshold=0.5)
        for batch in batches:
            scheduler.step(step(run, batch))
        assert run.optimizer.param_groups[0]["lr"] < 1e-3

    assert_same_loop(loop, setup)


@habit("`lr` as a tensor, written in place after a step", area="Optimizers")
@pytest.mark.parametrize(("setup", "cls"), [("offload", Adam), ("across_steps", AdamW), ("across_steps", Adam)])
def test_a_tensor_as_learning_rate(setup: str, cls: Any) -> None:
    def loop(run: Run, batches: list[torch.Tensor]) -> None:
        for group in run.optimizer.param_groups:
            group["lr"] = torch.tensor(0.01)
        for batch in batches:
            step(run, batch)
            run.optimizer.param_groups[0]["lr"].mul_(0.5)

    assert_same_loop(loop, setup, cls=cls)


@habit("A new optimizer in a later stage of training", area="Optimizers")
@EACH
def test_an_optimizer_for_each_phase(setup: str) -> None:
    makes = [both(setup, lr=1e-2), both(setup, SGD, lr=0.1, momentum=0.9), both(setup, lr=1e-3)]

    def loop(run: Run, batches: list[torch.Tensor]) -> None:
        is_own = run.compiled is not run.model
        for number, batch in enumerate(batches):
            if number in (2, 4):
                run.optimizer = makes[number // 2][is_own](run.model.parameters())
            step(run, batch)

    assert_same_loop(loop, setup, makes[0])


@habit("Two optimizers for different parameters; the second steps less often", area="Optimizers")
@EACH
def test_two_optimizers_for_different_parameters(setup: str) -> None:
    first, second = both(setup, lr=1e-2), both(setup, SGD, lr=0.1, momentum=0.9)

    def loop(run: Run, batches: list[torch.Tensor]) -> None:
        is_own = run.compiled is not run.model
        one, two = layers(run)[:1], layers(run)[1:]
        often = first[is_own](itertools.chain(*one))
        seldom = second[is_own](itertools.chain(*two))
        for number, batch in enumerate(batches):
            backward(run, batch)
            often.step()
            often.zero_grad()
            if number % 2:
                seldom.step()
                seldom.zero_grad()

    assert_same_loop(loop, setup, state=False)


@habit("Two optimizers that update the same parameters, in alternating steps", area="Optimizers")
@EACH
def test_two_optimizers_in_turn(setup: str) -> None:
    second = both(setup, SGD, lr=0.1, momentum=0.9)

    def loop(run: Run, batches: list[torch.Tensor]) -> None:
        other = second[run.compiled is not run.model](run.model.parameters())
        for number, batch in enumerate(batches):
            step(run, batch, other if number % 2 else run.optimizer)

    assert_same_loop(loop, setup)


@habit("`step(closure)` of `LBFGS`", area="Optimizers")
@setups("free", "offload")
def test_lbfgs(setup: str) -> None:
    def loop(run: Run, batches: list[torch.Tensor]) -> None:
        for batch in batches[:2]:

            def closure(batch: torch.Tensor = batch) -> torch.Tensor:
                run.optimizer.zero_grad()
                return backward(run, batch)

            run.optimizer.step(closure)

    assert_same_loop(loop, setup, cls=torch.optim.LBFGS, lr=0.1, max_iter=4, line_search_fn="strong_wolfe", state=False)


class SAM(Optimizer):
    """Sharpness-aware minimisation as its well-known implementation has it: it writes parameters and reads gradients
    around a second backward, and then lets another optimizer update."""

    def __init__(self, params: Any, base: Callable[[Any], Optimizer], rho: float = 0.05) -> None:
        super().__init__(params, {"rho": rho})
        self.base = base(self.param_groups[0]["params"])

    @torch.no_grad()
    def climb(self) -> None:
        params = self.param_groups[0]["params"]
        norm = torch.stack([param.grad.norm() for param in params]).norm()
        for param in params:
            self.state[param]["old"] = param.data.clone()
            param.add_(param.grad * (self.param_groups[0]["rho"] / (norm + 1e-12)))
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            param.data = self.state[param]["old"]
        self.base.step()


@habit("SAM: parameters are moved for a second backward, then restored", area="Optimizers",
       note="a warning names parameters whose old device memory stays in use by other tensors after they "
       "move to the host")  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*move to the host, and other tensors hold")
@setups("free", "offload", "across_steps")
def test_sam(setup: str) -> None:
    plain, own = both(setup, lr=1e-2)

    def loop(run: Run, batches: list[torch.Tensor]) -> None:
        for batch in batches:
            backward(run, batch)
            run.optimizer.climb()
            step(run, batch)

    makes = (lambda params: SAM(params, plain)), (lambda params: SAM(params, own))
    runs = assert_same_loop(loop, setup, makes, state=False)
    assert_same_tensors(*(flat_state(run.optimizer.base) for run in runs))


class Lookahead:
    """Every third step the weights go half of the way from where they were."""

    def __init__(self, base: Optimizer) -> None:
        self.base = base
        self.slow = [param.data.clone() for param in base.param_groups[0]["params"]]
        self.num_steps = 0

    def step(self) -> None:
        self.base.step()
        self.num_steps += 1
        if self.num_steps % 3 == 0:
            for param, slow in zip(self.base.param_groups[0]["params"], self.slow, strict=True):
                slow.add_(param.data - slow, alpha=0.5)
                param.data.copy_(slow)

    def zero_grad(self) -> None:
        self.base.zero_grad()


@habit("Lookahead: a wrapper that reads and writes `param.data` between steps", area="Optimizers")
@EACH
def test_lookahead(setup: str) -> None:
    def loop(run: Run, batches: list[torch.Tensor]) -> None:
        optimizer = Lookahead(run.optimizer)
        for batch in batches:
            step(run, batch, optimizer)

    assert_same_loop(loop, setup)


@habit("`optimizer.step()` twice with the same gradients", area="Optimizers")
@setups("across_steps", "in_backward")
def test_two_steps_with_the_same_gradients(setup: str) -> None:
    def loop(run: Run, batches: list[torch.Tensor]) -> None:
        for batch in batches:
            backward(run, batch)
            run.optimizer.step()
            run.optimizer.step()
            run.optimizer.zero_grad()

    assert_same_loop(loop, setup)


@habit("`zero_grad()` before the forward, before the backward, or with `set_to_none=False`", area="Optimizers")
@setups("offload", "across_steps", "in_backward")
def test_gradients_are_dropped_at_another_time(setup: str) -> None:
    def loop(run: Run, batches: list[torch.Tensor]) -> None:
        for number, batch in enumerate(batches):
            if number < 2:
                run.optimizer.zero_grad()
            loss = run.compiled(batch)
            if number >= 2:
                run.optimizer.zero_grad(set_to_none=number < 4)
            loss.backward()
            run.optimizer.step()
            run.losses.append(loss.detach().clone())

    assert_same_loop(loop, setup)


@habit("Hooks on steps and state dicts of an optimizer", area="Optimizers")
@setups("offload", "across_steps")
def test_hooks(setup: str) -> None:
    seen: list[list[Any]] = []

    def loop(run: Run, batches: list[torch.Tensor]) -> None:
        seen.append(said := [])

        def before(optimizer: Any, args: Any, kwargs: Any) -> None:
            for group in optimizer.param_groups:
                for param in group["params"]:
                    param.grad.mul_(0.5)

        def after(optimizer: Any, args: Any, kwargs: Any) -> None:
            said.append(float(sum(param.detach().double().sum() for param in optimizer.param_groups[0]["params"])))

        def saved(optimizer: Any, state: Any) -> Any:
            return {**state, "note": 1}

        run.optimizer.register_step_pre_hook(before)
        run.optimizer.register_step_post_hook(after)
        run.optimizer.register_state_dict_pre_hook(lambda optimizer: said.append("saving"))
        run.optimizer.register_state_dict_post_hook(saved)
        run.optimizer.register_load_state_dict_pre_hook(lambda optimizer, state: said.append(state["note"]))
        run.optimizer.register_load_state_dict_post_hook(lambda optimizer: said.append("loaded"))
        for batch in batches[:3]:
            step(run, batch)
        run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
        for batch in batches[3:]:
            step(run, batch)

    assert_same_loop(loop, setup)
    assert seen[0] == seen[1]


@habit("An optimizer for each parameter that steps in `register_post_accumulate_grad_hook`", area="Optimizers")
@setups("offload", "after_backward", "across_steps")
def test_the_tutorial_on_steps_in_the_backward(setup: str) -> None:
    def loop(run: Run, batches: list[torch.Tensor]) -> None:
        make = both(setup, lr=1e-2)[run.compiled is not run.model]
        optimizers = {param: make([param]) for param in run.model.parameters()}

        def hook(param: nn.Parameter) -> None:
            optimizers[param].step()
            optimizers[param].zero_grad()

        for param in run.model.parameters():
            param.register_post_accumulate_grad_hook(hook)
        for batch in batches:
            backward(run, batch)

    assert_same_loop(loop, setup, state=False)


@habit("`foreach`, `maximize`, `amsgrad`, `decoupled_weight_decay`", area="Optimizers")
@pytest.mark.parametrize(
    ("setup", "options"),
    [
        ("offload", {"foreach": True, "amsgrad": True}),
        ("across_steps", {"maximize": True, "decoupled_weight_decay": True, "weight_decay": 0.1, "foreach": True}),
    ],
)
def test_flags(setup: str, options: dict[str, Any]) -> None:
    def loop(run: Run, batches: list[torch.Tensor]) -> None:
        for batch in batches:
            step(run, batch)

    assert_same_loop(loop, setup, cls=Adam, **options)


@habit("`AveragedModel`, as a mean and as an EMA, with `SWALR`", area="Optimizers")
@EACH
def test_averaged_models(setup: str) -> None:
    averages: list[list[dict[str, torch.Tensor]]] = []

    def loop(run: Run, batches: list[torch.Tensor]) -> None:
        mean = AveragedModel(run.model)
        ema = AveragedModel(run.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        scheduler = SWALR(run.optimizer, swa_lr=0.05, anneal_epochs=3)
        for batch in batches:
            step(run, batch)
            ema.update_parameters(run.model)
            mean.update_parameters(run.model)
            scheduler.step()
        averages.append([dict(mean.state_dict()), dict(ema.state_dict())])

    assert_same_loop(loop, setup)
    for of_eager, own in zip(*averages, strict=True):
        assert_same_tensors(of_eager, own)


@habit("An EMA of the weights between steps, swapped in for evaluation and out again", area="Optimizers")
@EACH
def test_an_ema_by_hand(setup: str) -> None:
    def loop(run: Run, batches: list[torch.Tensor]) -> None:
        ema = {name: param.detach().clone() for name, param in run.model.named_parameters()}
        for batch in batches:
            step(run, batch)
            with torch.no_grad():
                for name, param in run.model.named_parameters():
                    ema[name].lerp_(param, 0.1)
        usual = {name: param.detach().clone() for name, param in run.model.named_parameters()}
        for weights in (ema, usual):
            with torch.no_grad():
                for name, param in run.model.named_parameters():
                    param.copy_(weights[name])
                run.losses.append(run.compiled(batches[0]).clone())
        step(run, batches[0])

    assert_same_loop(loop, setup)


@habit("`clip_grad_value_`, noise added to gradients, gradients replaced", area="Optimizers")
@setups("free", "offload", "across_steps")
def test_gradients_are_changed_before_the_step(setup: str) -> None:
    def loop(run: Run, batches: list[torch.Tensor]) -> None:
        for batch in batches:
            backward(run, batch)
            nn.utils.clip_grad_value_(run.model.parameters(), 1e-3)
            for number, param in enumerate(run.model.parameters()):
                if number % 2:
                    param.grad.add_(torch.randn_like(param), alpha=1e-3)
                else:
                    param.grad = param.grad.sign()
            run.optimizer.step()
            run.optimizer.zero_grad()

    assert_same_loop(loop, setup)


@habit(
    "Changing gradients between the backward and the step, with `update='in_backward'`",
    area="Optimizers",
    refused=elixir.GradientsChanged,
    says='Use the option update="after_backward"',
)
def test_gradients_are_changed_behind_their_update() -> None:
    run = compiled(seeded(Pair), SETUPS["in_backward"], both("in_backward", lr=1e-2)[1])
    backward(run, rows(1)[0])
    nn.utils.clip_grad_value_(run.model.parameters(), 1e-3)
    run.optimizer.step()


@habit("No weight decay for biases and norms, by param groups of `named_parameters()`", area="Optimizers")
@EACH
def test_weight_decay_of_matrices_only(setup: str) -> None:
    def grouped(make: Any) -> Any:
        def made(params: Any) -> Any:
            params = list(params)
            matrices = [param for param in params if param.dim() > 1]
            return make(
                [
                    {"params": matrices, "weight_decay": 0.1},
                    {"params": [param for param in params if param.dim() < 2], "weight_decay": 0.0, "lr": 0.1},
                ]
            )

        return made

    def loop(run: Run, batches: list[torch.Tensor]) -> None:
        for batch in batches:
            step(run, batch)

    plain, own = both(setup, lr=1e-2)
    assert_same_loop(loop, setup, (grouped(plain), grouped(own)))


@habit("No step if the loss is not finite", area="Optimizers")
@EACH
def test_steps_are_skipped(setup: str) -> None:
    def loop(run: Run, batches: list[torch.Tensor]) -> None:
        for number, batch in enumerate(batches):
            loss = run.compiled(batch * float("inf") if number in (1, 4) else batch)
            loss.backward()
            if torch.isfinite(loss):
                run.optimizer.step()
                run.losses.append(loss.detach().clone())
            run.optimizer.zero_grad()

    assert_same_loop(loop, setup)


@habit(
    "Resetting moments by hand: `optimizer.state[p]['exp_avg'].zero_()`, `optimizer.state.clear()`", area="Optimizers"
)
@EACH
def test_moments_are_reset(setup: str) -> None:
    def loop(run: Run, batches: list[torch.Tensor]) -> None:
        for number, batch in enumerate(batches):
            step(run, batch)
            if number == 1:
                for param in run.model.parameters():
                    run.optimizer.state[param]["exp_avg"].zero_()
            if number == 3:
                run.optimizer.state.clear()

    assert_same_loop(loop, setup)


@habit("A custom optimizer class: Lion", area="Optimizers")
@EACH
def test_a_class_of_ones_own(setup: str) -> None:
    def loop(run: Run, batches: list[torch.Tensor]) -> None:
        for batch in batches:
            step(run, batch)

    assert_same_loop(loop, setup, cls=Lion)


@habit("`Muon` for matrices and `AdamW` for the rest", area="Optimizers")
@setups("offload")
def test_muon(setup: str) -> None:
    def loop(run: Run, batches: list[torch.Tensor]) -> None:
        params = list(run.model.parameters())
        muon = torch.optim.Muon([param for param in params if param.dim() == 2], lr=0.01)
        rest = AdamW([param for param in params if param.dim() < 2], lr=0.01)
        for batch in batches:
            backward(run, batch)
            for optimizer in (muon, rest):
                optimizer.step()
                optimizer.zero_grad()

    assert_same_loop(loop, setup, state=False)


@habit("`torch.compile(optimizer.step)`", area="Optimizers")
@setups("offload", "across_steps")
def test_a_compiled_step(setup: str) -> None:
    def loop(run: Run, batches: list[torch.Tensor]) -> None:
        update = torch.compile(run.optimizer.step, backend="aot_eager")
        for batch in batches:
            backward(run, batch)
            update()
            run.optimizer.zero_grad()

    assert_same_loop(loop, setup)


@habit("Updating by hand under `no_grad`, without an optimizer", area="Optimizers")
@setups("offload")
def test_updates_by_hand(setup: str) -> None:
    def loop(run: Run, batches: list[torch.Tensor]) -> None:
        for batch in batches:
            backward(run, batch)
            with torch.no_grad():
                for param in run.model.parameters():
                    param -= 0.1 * param.grad
                    param.grad = None

    assert_same_loop(loop, setup, state=False)


@habit("A rollback to copies of weights and optimizer state in memory", area="Optimizers")
@setups("across_steps", "in_backward")
def test_a_rollback(setup: str) -> None:
    def loop(run: Run, batches: list[torch.Tensor]) -> None:
        for number, batch in enumerate(batches):
            if number == 1:
                weights, state = copy.deepcopy(run.model.state_dict()), copy.deepcopy(run.optimizer.state_dict())
            if number == 3:
                run.model.load_state_dict(weights)
                run.optimizer.load_state_dict(state)
            step(run, batch)

    assert_same_loop(loop, setup)


@habit("`torch.optim.AdamW` continues from the state of `HybridAdamW`, and the other way round", area="Optimizers")
@setups("across_steps")
def test_classes_in_turn(setup: str) -> None:
    plain, own = both(setup, lr=1e-2)

    def loop(run: Run, batches: list[torch.Tensor]) -> None:
        for number, batch in enumerate(batches):
            if number in (2, 4):
                make = plain if number == 2 or run.compiled is run.model else own
                other = make(run.model.parameters())
                other.load_state_dict(run.optimizer.state_dict())
                run.optimizer = other
            step(run, batch)

    assert_same_loop(loop, setup)


@habit("Taking a parameter out of its group, and its state out of the optimizer", area="Optimizers")
@setups("offload", "across_steps")
def test_a_parameter_leaves(setup: str) -> None:
    def loop(run: Run, batches: list[torch.Tensor]) -> None:
        for number, batch in enumerate(batches):
            params = run.optimizer.param_groups[0]["params"]
            if number == 2:
                params.pop().requires_grad_(False)
            if number == 4:
                run.optimizer.state.pop(params[0])
            step(run, batch)

    assert_same_loop(loop, setup, state=False)


@torch.compile(backend="eager")
def signed_step(param: torch.Tensor, grad: torch.Tensor, mean: torch.Tensor, lr: float) -> None:
    mean.lerp_(grad, 0.1)
    param.sub_(mean.sign() * lr)


class Signed(Optimizer):
    """Its step calls a compiled function."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    mean = state.setdefault("mean", torch.zeros_like(param))
                    signed_step(param, param.grad, mean, group["lr"])


@habit("A custom optimizer class whose step calls a `torch.compile`d function", area="Optimizers")
@setups("offload", "across_steps")
def test_a_class_with_a_compiled_function(setup: str) -> None:
    def loop(run: Run, batches: list[torch.Tensor]) -> None:
        for batch in batches:
            step(run, batch)

    assert_same_loop(loop, setup, cls=Signed)


class Filtered(nn.Module):
    """A complex filter between Fourier transforms; returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(13, 16)
        self.filter = nn.Parameter(torch.randn(16, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.ifft(torch.fft.fft(torch.tanh(self.into(x))) * self.filter).real.square().mean()


@habit("Complex parameters with an optimizer of torch, or with `hybrid(torch.optim.Adam)`", area="Optimizers")
@setups("offload", "across_steps")
def test_complex_parameters(setup: str) -> None:
    def loop(run: Run, batches: list[torch.Tensor]) -> None:
        for batch in batches:
            step(run, batch)

    options = {"decoupled_weight_decay": True, "weight_decay": 0.1}
    assert_same_loop(loop, setup, make=Filtered, cls=Adam, **options)


@habit(
    "Complex parameters with `HybridAdamW`",
    area="Optimizers",
    refused=elixir.UnsupportedModel,
    says="HybridAdamW updates by torch's fused AdamW, which has no complex kernel",
)
def test_complex_parameters_of_hybrid_adamw() -> None:
    elixir.HybridAdamW(Filtered().parameters())


def test_a_complex_parameter_is_refused_in_a_later_group_and_by_its_name() -> None:
    model = Filtered()
    optimizer = elixir.HybridAdamW(model.into.parameters())
    for given in (model.filter, [model.filter], iter([model.filter])):
        with pytest.raises(elixir.UnsupportedModel, match=r"parameter of shape \(16,\)"):
            optimizer.add_param_group({"params": given})
    with pytest.raises(elixir.UnsupportedModel, match=r"^filter is not supported"):
        elixir.HybridAdamW(model.named_parameters())
    assert len(optimizer.param_groups) == 1
