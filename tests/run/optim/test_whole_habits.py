"""What users do with classes that update whole tensors: param groups, schedulers, accumulation, clipping, loss scaling,
missing gradients, tied parameters, two optimizers for a model. The bits are those of the class alone each time."""

import functools
import importlib
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.optim import Adafactor, Muon, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

import elixir_compile as elixir
from elixir_compile import compat
from elixir_compile.base.errors import GradientsChanged
from elixir_compile.ir import Update
from elixir_compile.optim.generic.dry_step import ClassStep
from elixir_compile.optim.hybrid import Hybrid
from elixir_compile.optim.rule import ParamUpdate
from tests.covering import some_slow
from tests.run.models import seeded
from tests.run.optim.tensor_wise_classes import Lars, SharedScratch, Soap
from tests.run.optim.test_whole_updates import (
    LARGE_WIDTHS,
    WIDTHS,
    Tower,
    assert_same_run,
    batches,
    model_for,
    state_of,
)
from tests.run.training import Run, assert_same_tensors, by_elixir, by_torch, loss_of, planned_peak_bytes, same_losses
from tests.run.updating import Several, accumulate, placed, small_buckets

Groups = Callable[[list[nn.Parameter]], list[dict[str, Any]]]

# ----------------------------------------------------------------------------------------------------------------------
# One optimizer, used in some manner.


@dataclass(frozen=True, kw_only=True)
class Habit:
    """A way of training: which param groups the optimizer begins with, which model it trains, and how."""

    train: Callable[[Run, list[torch.Tensor]], object]
    groups: Groups = lambda params: [{"params": params}]
    model: Callable[[nn.Module], nn.Module] = lambda model: model
    may_update_in_backward: bool = True


def in_thirds(**options: list[Any]) -> Groups:
    """Return three groups that share the parameters in turn; each option has the value of each group."""

    def groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
        own = [{name: values[number] for name, values in options.items()} for number in range(3)]
        return [{"params": params[number::3], **each} for number, each in enumerate(own)]

    return groups


def scheduled(run: Run, each: list[torch.Tensor]) -> None:
    """Let one scheduler raise and lower the rates, and another change them after it."""
    has_momentum = "momentum" in run.optimizer.param_groups[0]
    schedulers = (
        OneCycleLR(run.optimizer, max_lr=0.1, total_steps=9, cycle_momentum=has_momentum),
        CosineAnnealingLR(run.optimizer, T_max=5),
    )
    for batch in each:
        run.train([batch])
        for scheduler in schedulers:
            scheduler.step()


def clipped(run: Run, each: list[torch.Tensor]) -> None:
    """Clip all gradients by torch."""

    def step(compiled: Any, optimizer: Optimizer, batch: torch.Tensor) -> torch.Tensor:
        loss = loss_of(compiled, batch)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1e-5)
        assert norm > 1e-5
        optimizer.step()
        optimizer.zero_grad()
        return loss

    run.train(each, step)


def scaled(run: Run, each: list[torch.Tensor]) -> None:
    """Scale the loss, and let the gradients of the third step overflow, which skips it."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)

    def step(compiled: Any, optimizer: Optimizer, batch: torch.Tensor) -> torch.Tensor:
        loss = loss_of(compiled, batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss

    run.train(each[:2], step)
    before = run.weights
    run.train([each[2] * float("nan")], step)
    assert run.losses.pop().isnan()
    assert_same_tensors(before, run.weights)
    run.train(each[3:], step)
    assert scaler.get_scale() == 2.0**9


def extended(run: Run, each: list[torch.Tensor]) -> None:
    """Add the other half of the parameters, with a rate of their own, after two steps."""
    run.train(each[:2])
    rest = list(run.model.parameters())[1::2]
    for param in rest:
        param.grad = None
    run.optimizer.add_param_group({"params": rest, "lr": 0.05})
    run.train(each[2:])


def without_some(run: Run, each: list[torch.Tensor]) -> None:
    """Drop the gradients of two parameters before some steps, from the first one on."""
    for number, batch in enumerate(each):
        loss_of(run.compiled, batch).backward()
        for param in list(run.model.parameters())[number % 2 : 4 : 2]:
            param.grad = None
        run.optimizer.step()
        run.optimizer.zero_grad()


class Shortened(Tower):
    """Leaves its two last layers out if `is_short`, so that they have no gradients in this step."""

    is_short = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:-2] if self.is_short else self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def shortened(model: nn.Module) -> nn.Module:
    model.__class__ = Shortened
    return model


def in_turn(run: Run, each: list[torch.Tensor]) -> None:
    """Train the whole model and the short one in turn: two graphs."""
    for number, batch in enumerate(each):
        run.model.is_short = number % 3 == 1  # pyright: ignore[reportAttributeAccessIssue]
        run.train([batch])


def tied(model: nn.Module) -> nn.Module:
    """Return `model` with one weight in its first and its fifth layer, and another in its second and its last."""
    layers: Any = model.layers
    layers[4].weight, layers[7].weight = layers[0].weight, layers[1].weight
    return model


HABITS = {
    "groups": Habit(train=Run.train, groups=in_thirds(lr=[0.05, 0.01, 0.002], weight_decay=[0.0, 0.3, 0.1])),
    "schedulers": Habit(train=scheduled),
    "accumulation": Habit(train=lambda run, each: accumulate(run, each, 3)),
    "clipping": Habit(train=clipped, may_update_in_backward=False),
    "scaler": Habit(train=scaled, may_update_in_backward=False),
    "added group": Habit(train=extended, groups=lambda params: [{"params": params[::2]}]),
    "dropped gradients": Habit(train=without_some, may_update_in_backward=False),
    "unused layers": Habit(train=in_turn, model=shortened),
    "tied parameters": Habit(train=Run.train, model=tied),
    "groups of Muon": Habit(
        train=Run.train,
        groups=in_thirds(
            momentum=[0.8, 0.95, 0.9], nesterov=[True, False, True], ns_steps=[5, 3, 4], weight_decay=[0.1, 0.0, 0.2]
        ),
    ),
    "rates in tensors": Habit(
        train=scheduled, groups=lambda params: [{"params": params, "lr": torch.tensor(0.01, dtype=torch.float32)}]
    ),
}
OF_SOME = {"groups of Muon": (Muon,), "rates in tensors": (Muon, Adafactor), "groups": (Muon, Adafactor)}
USED = [
    (name, cls, home, share, update)
    for name, habit in HABITS.items()
    for cls in OF_SOME.get(name, (Muon, Adafactor, Soap))
    for home, share in (("split", 0.0), ("host", 0.0), ("host", 0.5))
    for update in Update
    if not (update is Update.IN_BACKWARD and (share or not habit.may_update_in_backward))
]
QUICK = {
    ("groups of Muon", Muon, "host", 0.5, Update.ACROSS_STEPS),
    ("accumulation", Soap, "host", 0.0, Update.IN_BACKWARD),
    ("scaler", Muon, "host", 0.5, Update.ACROSS_STEPS),
}


@functools.cache
def model_of(name: str, cls: type[Optimizer]) -> nn.Module:
    """Return the model that is trained in the manner `name`."""
    return HABITS[name].model(model_for(cls))


@functools.cache
def expected_of(name: str, cls: type[Optimizer]) -> Run:
    """Return a run of the class itself in the manner `name`, trained eagerly."""
    run = by_torch(model_of(name, cls), optimizer=lambda params: cls(HABITS[name].groups(list(params))))
    HABITS[name].train(run, batches())
    return run


@pytest.mark.parametrize(("name", "cls", "home", "share", "update"), some_slow(USED, lambda *each: each in QUICK))
def test_the_bits_of_the_class_in_the_hands_of_users(
    name: str, cls: type[Optimizer], home: str, share: float, update: Update
) -> None:
    habit, expected = HABITS[name], expected_of(name, cls)
    options: dict[str, Any] = {"update": update.value, "replan": False}
    if home == "host":
        options |= {"placement_policy": "static", "offload_param_frac": 1.0, "offload_optim_frac": 1.0}
    with small_buckets(lambda plan: placed(plan, home, share, update)):
        run = by_elixir(
            model_of(name, cls), optimizer=lambda params: elixir.hybrid(cls)(habit.groups(list(params))), **options
        )
        habit.train(run, batches())
    assert any(bucket.whole_update for record in elixir.compilations(run.model) for bucket in record.plan.buckets)
    assert_same_run(expected, run)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["clipping", "scaler"])
def test_gradients_that_change_after_their_update_in_the_backward_are_refused(name: str) -> None:
    run = by_elixir(model_for(Muon), optimizer=elixir.hybrid(Muon), update="in_backward", replan=False)
    weights = run.weights
    with pytest.raises(GradientsChanged, match=r"layers\.\d.*update=\"after_backward\""):
        HABITS[name].train(run, batches())
    assert_same_tensors(weights, run.weights)


# ----------------------------------------------------------------------------------------------------------------------
# Two optimizers for a model, and caches in attributes, under budgets.


class Mixed(nn.Module):
    """Matrices for Muon, and biases, scales and an embedding for AdamW; returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(64, LARGE_WIDTHS[0])
        self.tower = Tower(LARGE_WIDTHS, bias=True)
        self.norm = nn.LayerNorm(LARGE_WIDTHS[0])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.tower(self.norm(self.words(tokens)))


def both(muon: Callable[..., Optimizer], adamw: Callable[..., Optimizer]) -> Callable[[Iterable[nn.Parameter]], Any]:
    """Return what makes one optimizer for the matrices of `Mixed`, and one for the rest."""

    def optimizers(params: Iterable[nn.Parameter]) -> Several:
        first, *rest = params
        matrices = [param for param in rest if param.dim() == 2]
        others = [first, *(param for param in rest if param.dim() != 2)]
        return Several([muon(matrices, lr=0.02), adamw(others, lr=1e-2)])

    return optimizers


@functools.cache
def expected_of_both() -> Run:
    fused = functools.partial(torch.optim.AdamW, fused=True)
    return by_torch(seeded(Mixed), optimizer=both(Muon, fused)).train(of_words())


def of_words() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(64, (4, 6), generator=generator) for _ in range(6)]


@functools.cache
def peak_bytes(make: Callable[[], nn.Module], optimizer: Any) -> int:
    """Return the bytes of a step without a budget, as planned."""
    run = by_elixir(seeded(make), optimizer=optimizer)
    return planned_peak_bytes(run.train(of_words()[:1] if make is Mixed else batches(1, LARGE_WIDTHS[0])))


HYBRIDS = both(elixir.hybrid(Muon), elixir.HybridAdamW)
SHARES = [(percent, update) for percent in (60, 40) for update in Update]


@pytest.mark.parametrize(("percent", "update"), some_slow(SHARES, lambda *each: each == (40, Update.ACROSS_STEPS)))
def test_muon_for_matrices_beside_adamw_for_the_rest_under_budgets(percent: int, update: Update) -> None:
    budget_bytes = math.ceil(peak_bytes(Mixed, HYBRIDS) * percent / 100)
    run = by_elixir(seeded(Mixed), optimizer=HYBRIDS, device_memory=budget_bytes, update=update.value)
    run.train(of_words())
    assert planned_peak_bytes(run) <= budget_bytes
    plan = elixir.compilations(run.model)[-1].plan
    assert {bucket.whole_update is None for bucket in plan.buckets} == {True, False}
    assert same_losses(*([loss.item() for loss in each.losses] for each in (expected_of_both(), run)))
    expected, found = expected_of_both(), run
    assert_same_tensors(expected.weights, found.weights)
    for known, own in zip(expected.optimizer.each, found.optimizer.each, strict=True):  # pyright: ignore[reportAttributeAccessIssue]
        assert_same_states(known, own)


def assert_same_states(expected: Optimizer, found: Optimizer) -> None:
    """Fail unless the state dicts have equal states, bit by bit."""
    assert_same_tensors(state_of(expected), state_of(found))


class WatchedScratch(SharedScratch):
    """Notes which threads write each tensor of its scratch."""

    writers: ClassVar[dict[int, set[str]]] = {}
    held: ClassVar[list[torch.Tensor]] = []

    def update_one(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        super().update_one(param, group)
        scratch = self.scratch[param.shape]
        if not compat.is_fake(scratch):
            self.held.append(scratch)  # so that no other takes its place in memory
            self.writers.setdefault(scratch.data_ptr(), set()).add(threading.current_thread().name)


@functools.cache
def expected_by_scratch() -> Run:
    return by_torch(seeded(Tower, LARGE_WIDTHS), optimizer=SharedScratch).train(batches(width=LARGE_WIDTHS[0]))


def test_updates_on_the_host_have_a_scratch_of_their_own() -> None:
    """A class keeps one for each shape in an attribute, and the worker updates beside the training thread."""
    with small_buckets(lambda plan: placed(plan, "split", 0.5, Update.ACROSS_STEPS)):
        run = by_elixir(seeded(Tower), optimizer=elixir.hybrid(WatchedScratch), replan=False).train(batches())
    assert_same_run(by_torch(seeded(Tower), optimizer=SharedScratch).train(batches()), run)
    writers = WatchedScratch.writers.values()
    assert {"elixir updates"} in writers
    assert not [names for names in writers if len(names) > 1]


@pytest.mark.slow
@pytest.mark.parametrize(("percent", "update"), SHARES)
def test_classes_with_caches_in_attributes_under_budgets(percent: int, update: Update) -> None:
    hybrid = elixir.hybrid(SharedScratch)
    budget_bytes = math.ceil(peak_bytes(wide_tower, hybrid) * percent / 100)
    run = by_elixir(seeded(wide_tower), optimizer=hybrid, device_memory=budget_bytes, update=update.value)
    assert_same_run(expected_by_scratch(), run.train(batches(width=LARGE_WIDTHS[0])))


def wide_tower() -> nn.Module:
    return Tower(LARGE_WIDTHS)


# ----------------------------------------------------------------------------------------------------------------------
# Three faults of other engines that nothing says: each is put into ours, and seen.
#
#     another class ran        torch's Newton-Schulz runs once for each matrix and step, and the weights are not SGD's
#     micro-batches            the class steps once for all micro-batches, so the momentum decays once
#     flattened parameters     the class sees each parameter in its shape


LEAST_NUMEL = 1000
"""The tensors of the watch, which take each step before the parameters do, are smaller; the matrices of `Tower` are
larger."""


@functools.cache
def small_plan(update: Update) -> Any:
    return lambda plan: placed(plan, "split", 0.0 if update is Update.IN_BACKWARD else 0.5, update)


def count_newton_schulz(patch: pytest.MonkeyPatch) -> Counter[tuple[int, ...]]:
    """Return a counter of the matrices of parameters that torch orthogonalises from now on, by shape."""
    muon, seen = importlib.import_module("torch.optim._muon"), Counter()
    usual = muon._zeropower_via_newtonschulz

    def counted(grad: torch.Tensor, *args: Any) -> torch.Tensor:
        if grad.numel() > LEAST_NUMEL and not compat.is_fake(grad):
            seen[tuple(grad.shape)] += 1
        return usual(grad, *args)

    patch.setattr(muon, "_zeropower_via_newtonschulz", counted)
    return seen


def by_muon(update: Update, train: Callable[[Run], object]) -> Run:
    with small_buckets(small_plan(update)):
        run = by_elixir(seeded(Tower), optimizer=elixir.hybrid(Muon), update=update.value, replan=False)
        train(run)
        run.optimizer.wait()  # pyright: ignore[reportAttributeAccessIssue]
    return run


take = ClassStep.take


def sgd_instead(self: ClassStep, updates: list[ParamUpdate]) -> None:
    for one in updates:
        if one.weight.numel() < LEAST_NUMEL:  # dry steps
            take(self, [one])
            continue
        one.state.setdefault("momentum_buffer", torch.zeros_like(one.weight)).mul_(0.95).add_(one.grad)
        one.weight.sub_(one.state["momentum_buffer"], alpha=self.group["lr"])


def flattened(self: ClassStep, updates: list[ParamUpdate]) -> None:
    for one in updates:
        flat = {name: value.flatten() for name, value in one.state.items()}
        take(self, [ParamUpdate(one.weight.view(-1), one.grad.flatten(), flat)])
        one.state.update({name: value.view_as(one.weight) for name, value in flat.items()})


def test_muon_is_muon(monkeypatch: pytest.MonkeyPatch) -> None:
    by_sgd = by_torch(seeded(Tower), optimizer=lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.95))
    by_sgd.train(batches())

    def check() -> None:
        with pytest.MonkeyPatch.context() as patch:
            seen = count_newton_schulz(patch)
            run = by_muon(Update.ACROSS_STEPS, lambda run: run.train(batches()))
        assert seen == {WIDTHS: 4 * 6, WIDTHS[::-1]: 4 * 6}
        for name, weight in run.weights.items():
            assert not torch.allclose(weight, by_sgd.weights[name], atol=1e-4), name

    check()
    monkeypatch.setattr(ClassStep, "take", sgd_instead)
    with pytest.raises(AssertionError, match="Counter"):
        check()


def updates_each_micro_batch(self: Any, params: Any, arrived: Any) -> None:
    with torch.no_grad(), torch.DisableTorchFunctionSubclass():
        self._updater.update([*params], self.param_groups, self.__dict__["state"], arrived)


@pytest.mark.parametrize("update", [Update.IN_BACKWARD, pytest.param(Update.ACROSS_STEPS, marks=pytest.mark.slow)])
def test_micro_batches_are_one_step_of_the_class(update: Update, monkeypatch: pytest.MonkeyPatch) -> None:
    each = batches()
    expected = accumulate(by_torch(seeded(Tower), optimizer=Muon), each, 3)

    def check() -> None:
        with pytest.MonkeyPatch.context() as patch:
            seen = count_newton_schulz(patch)
            run = by_muon(update, lambda run: accumulate(run, each, 3))
        assert seen == {WIDTHS: 4 * 2, WIDTHS[::-1]: 4 * 2}
        assert_same_run(expected, run)

    check()
    if update is Update.IN_BACKWARD:
        monkeypatch.setattr(Hybrid, "update_in_backward", updates_each_micro_batch)
        with pytest.raises(AssertionError, match="Counter"):
            check()


class Summed(Tower):
    """Returns the sum over the rows of a batch, so that micro-batches may be added."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().sum()


@pytest.mark.slow
def test_the_micro_batches_of_a_plan_are_one_step_of_the_class() -> None:
    def by_halves(compiled: Any, optimizer: Optimizer, batch: torch.Tensor) -> torch.Tensor:
        losses = [compiled(half) for half in batch.chunk(2)]
        for loss in losses:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).sum()

    expected = by_torch(seeded(Summed), optimizer=Muon).train(batches(), by_halves)
    with pytest.MonkeyPatch.context() as patch:
        seen = count_newton_schulz(patch)
        run = by_elixir(seeded(Summed), optimizer=elixir.hybrid(Muon), micro_batches=2, update="in_backward")
        run.train(batches())
    assert seen == {WIDTHS: 4 * 6, WIDTHS[::-1]: 4 * 6}
    assert_same_run(expected, run)


class Shapes(Lars):
    """Notes the shapes of the parameters that it sees."""

    seen: ClassVar[Counter[tuple[int, ...]]] = Counter()

    def update(self, params: Any, group: dict[str, Any]) -> None:
        for param in params:
            if param.numel() > LEAST_NUMEL and not compat.is_fake(param):
                self.seen[tuple(param.shape)] += 1
        super().update(params, group)


def test_the_class_sees_each_parameter_in_its_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    def check() -> None:
        with small_buckets(small_plan(Update.ACROSS_STEPS)):
            run = by_elixir(seeded(Tower), optimizer=elixir.hybrid(Shapes), replan=False)
            run.train(batches(1))  # finds out about the class
            run.optimizer.wait()  # pyright: ignore[reportAttributeAccessIssue]
            Shapes.seen.clear()
            run.train(batches()[1:])
            run.optimizer.wait()  # pyright: ignore[reportAttributeAccessIssue]
        assert Shapes.seen == {WIDTHS: 4 * 5, WIDTHS[::-1]: 4 * 5}

    check()
    monkeypatch.setattr(ClassStep, "take", flattened)
    with pytest.raises(AssertionError, match="Counter"):
        check()
