"""What users do with ranks that own whole parameters, each beside the classes alone on the same gradients."""

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adafactor, AdamW, Muon, Optimizer

import elixir_compile as elixir
from elixir_compile import compat
from elixir_compile.graph.ops.shards import own_shard, owner_of
from elixir_compile.optim.generic.dry_step import ClassStep
from elixir_compile.optim.hybrid import Hybrid
from elixir_compile.optim.rule import ParamUpdate
from tests.run.optim.tensor_wise_classes import Came, Lamb, Lars, Shampoo, Soap
from tests.run.owners_checks import WITH_MASTERS, at_home, nearest
from tests.run.ranks_training import compiled_with, full, mesh_of

NUM_STEPS = 4
SIZES = (97, 89)
"""Rows that neither 2 nor 3 ranks share out evenly."""
CLASSES = {cls.__name__: cls for cls in (Muon, Adafactor, Soap, Shampoo, Came, Lars, Lamb)}


class Tower(nn.Module):
    """Wide and narrow matrices in turn; the last layer has a bias of its own, and `num_used` layers are used."""

    def __init__(self, num_layers: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = [SIZES[number % 2] for number in range(num_layers + 1)]
        self.layers = nn.ModuleList(nn.Linear(size, after, bias=False) for size, after in pairwise(sizes))
        self.bias = nn.Parameter(torch.zeros(sizes[-1]))
        self.num_used = num_layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.bias.dtype)
        for layer in self.layers[: self.num_used]:
            x = torch.tanh(layer(x))
        return (x + self.bias[: x.shape[-1]]).square().mean()


@dataclass(kw_only=True)
class Side:
    """A model that is trained: by all ranks, or by one process."""

    model: Any
    compiled: Callable[..., torch.Tensor]
    optimizers: list[Optimizer]
    scaler: Any = field(default_factory=lambda: torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100))
    norms: list[float] = field(default_factory=list)

    @property
    def params(self) -> list[nn.Parameter]:
        return list(self.model.parameters())


# ----------------------------------------------------------------------------------------------------------------------
# A habit is what happens in a step between the gradients and their use, and how the model and the optimizers are made.


Step = Callable[[Side, int], object]


@dataclass(frozen=True, kw_only=True)
class Habit:
    """A way of training; each function gets a side and the number of the step."""

    num_backwards: int = 1
    model: Callable[[], Tower] = Tower
    whole: Sequence[int] = range(8)
    """The layers whose matrices are owned whole; the class trains them, and AdamW the rest."""
    late: Sequence[int] = ()
    """The layers that come into the optimizer after two steps."""
    begins: Step = lambda side, number: None
    """Before the forward."""
    changes: Step = lambda side, number: None
    """After the last backward."""
    is_scaled: bool = False
    options: dict[str, Any] = field(default_factory=dict)


def tied() -> Tower:
    """Return a tower with one weight in its first and its third layer."""
    model = Tower()
    model.layers[2].weight = model.layers[0].weight
    return model


def drops(side: Side, number: int) -> None:
    """Drop the gradient of another matrix in each step, and once that of none."""
    if number != 1:
        side.params[number % 3].grad = None


def clips(side: Side, number: int) -> None:
    norm = nn.utils.clip_grad_norm_(side.params, 1e-5)
    side.norms.append(full(norm).item())


def clips_by_optimizer(side: Side, number: int) -> None:
    for each in side.optimizers:
        params = [param for group in each.param_groups for param in group["params"]]
        own = getattr(each, "clip_grad_norm_", None)
        norm = nn.utils.clip_grad_norm_(params, 1e-5) if own is None else own(1e-5)
        side.norms.append(full(norm).item())


def uses_fewer(side: Side, number: int) -> None:
    side.model.num_used = 4 if number % 2 == 0 else 2


HABITS = {
    "some matrices": Habit(whole=(0, 2)),
    "more ranks than matrices": Habit(whole=(1,)),
    "added group": Habit(late=(1, 2)),
    "tied": Habit(model=tied),
    "dropped gradients": Habit(changes=drops),
    "unused layers": Habit(begins=uses_fewer),
    "clipping": Habit(changes=clips),
    "clipping by the optimizer": Habit(changes=clips_by_optimizer),
    "several backwards": Habit(num_backwards=3),
    "micro-batches": Habit(options={"micro_batches": 2}),
    "scaler": Habit(is_scaled=True, whole=(1,)),
}
CHANGES_GRADIENTS = frozenset({"dropped gradients", "clipping", "clipping by the optimizer", "scaler"})
"""Habits that no update in the backward allows."""


def matrices(model: nn.Module, layers: Sequence[int]) -> list[str]:
    """Return the names of the matrices of `layers`, a tied one once."""
    names = [f"layers.{number}.weight" for number in layers]
    return [name for name, _ in model.named_parameters() if name in names]


def optimizers_of(habit: Habit, model: Tower, cls: type[Optimizer], *, is_hybrid: bool) -> list[Optimizer]:
    """Return the optimizer of whole matrices, and that of all other parameters."""
    params = dict(model.named_parameters())
    whole = matrices(model, habit.whole)
    first = [params[name] for name in whole if name not in matrices(model, habit.late)]
    rest = [param for name, param in params.items() if name not in whole]
    if is_hybrid:
        return [elixir.hybrid(cls)(first, lr=0.02), elixir.HybridAdamW(rest)]
    return [cls(first, lr=0.02), AdamW(rest, fused=True)]


def owned_side(
    habit: Habit, cls: type[Optimizer], num_ranks: int, param_dtype: str | None = None, **options: Any
) -> Side:
    """Return a model of which the ranks own some matrices whole."""
    model = habit.model()
    whole = matrices(model, habit.whole)
    elixir.prepare(model, mesh=mesh_of([num_ranks]), whole=whole, param_dtype=param_dtype)
    assert {name for name, param in model.named_parameters() if owner_of(param) is not None} == set(whole)
    compiled = compiled_with(model, **habit.options, **options)
    return Side(model=model, compiled=compiled, optimizers=optimizers_of(habit, model, cls, is_hybrid=True))


def single_side(habit: Habit, cls: type[Optimizer]) -> Side:
    model = habit.model()
    return Side(model=model, compiled=model, optimizers=optimizers_of(habit, model, cls, is_hybrid=False))


def backwards(side: Side, batches: Sequence[torch.Tensor], habit: Habit) -> None:
    """Run all backwards of a step."""
    for number, batch in enumerate(batches):
        with ExitStack() as stack:
            for each in side.optimizers if number < len(batches) - 1 else ():
                if isinstance(each, Hybrid):
                    stack.enter_context(each.accumulating())
            loss = side.compiled(batch) / len(batches)
            (side.scaler.scale(loss) if habit.is_scaled else loss).backward()


def takes_step(side: Side, habit: Habit) -> None:
    for each in side.optimizers:
        if habit.is_scaled:
            side.scaler.step(each)
        else:
            each.step()
    if habit.is_scaled:
        side.scaler.update()
    side.model.zero_grad()
    for each in side.optimizers:
        each.zero_grad()


def grad_of(param: nn.Parameter) -> torch.Tensor:
    """Return the gradient of all ranks."""
    assert param.grad is not None
    return full(param.grad)


def steps(num_rows: int, habit: Habit) -> Iterator[list[torch.Tensor]]:
    """Yield the batches of each step."""
    generator = torch.Generator().manual_seed(3)
    for number in range(NUM_STEPS):
        each = [torch.randn(num_rows, SIZES[0], generator=generator) for _ in range(habit.num_backwards)]
        if habit.is_scaled and number == 2:
            each[0][-1] = float("nan")  # a row of the last rank
        yield each


def keeps_its_bits(
    rank: int, world_size: int, name: str, cls: str, home: str, update: str, folder: str
) -> list[list[int]]:
    """Train in the manner `name`, and beside it the class alone on the same gradients; all weights are equal bit by
    bit, and gradients and norms are those of one process. Return the shapes that this rank owns."""
    habit = HABITS[name]
    with at_home(home, update, folder) as options:
        own, other = owned_side(habit, CLASSES[cls], world_size, **options), single_side(habit, CLASSES[cls])
        for number, each in enumerate(steps(4 * world_size, habit)):
            for side, batches in ((own, [batch.chunk(world_size)[rank] for batch in each]), (other, each)):
                if number == 2 and habit.late:
                    params = dict(side.model.named_parameters())
                    late = [params[name] for name in matrices(side.model, habit.late)]
                    side.optimizers[0].add_param_group({"params": late, "lr": 0.05})
                habit.begins(side, number)
                backwards(side, batches, habit)
                habit.changes(side, number)
            for param, theirs in zip(other.params, own.params, strict=True):
                assert (param.grad is None) is (theirs.grad is None)
                if param.grad is None or theirs.grad is None:
                    continue
                grad = full(theirs.grad).clone()  # a scaler writes it in place
                if not grad.isnan().any():
                    assert (param.grad - grad).abs().max() <= 1e-5 * grad.abs().max()
                param.grad = grad
            takes_step(own, habit)
            takes_step(other, habit)
            for param, theirs in zip(other.params, own.params, strict=True):
                weight = full(theirs.detach())
                if owner_of(theirs) is not None:
                    assert torch.equal(param, weight)
                # torch's fused AdamW rounds elements behind the last whole vector otherwise, and each rank has such.
                assert torch.allclose(param, weight, rtol=1e-6, atol=1e-8)
    assert own.norms == pytest.approx(other.norms, rel=1e-5)
    assert own.scaler.get_scale() == other.scaler.get_scale()
    assert any(bucket.owned_updates for record in elixir.compilations(own.model) for bucket in record.plan.buckets)
    return [list(own_shard(param).shape) for param in own.params if owner_of(param) == rank]


# ----------------------------------------------------------------------------------------------------------------------
# Budgets, in percent of a step that keeps all on the device, and each time of the updates.


PERCENTS = (60, 40, 25)
UPDATES = ("after_backward", "across_steps", "in_backward")


def under_budgets(rank: int, world_size: int, name: str) -> dict[str, Any]:
    """Return by budget and update what `under_budget` does for the class called `name`, perhaps with masters."""
    cls = CLASSES[name.removesuffix(WITH_MASTERS)]
    param_dtype = "bfloat16" if name.endswith(WITH_MASTERS) else None
    most = torch.tensor(keep_all_bytes(world_size, cls, param_dtype))
    torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
    found: dict[str, Any] = {}
    for percent, update in product(PERCENTS, UPDATES):
        gc.collect()  # a model that is alive takes a part of the budget
        own = owned_side(
            OF_EIGHT, cls, world_size, param_dtype, device_memory=int(most) * percent // 100, update=update
        )
        found[f"{percent} {update}"] = under_budget(rank, world_size, own, cls, int(most))
    return found


OF_EIGHT = Habit(model=lambda: Tower(8))


def keep_all_bytes(num_ranks: int, cls: type[Optimizer], param_dtype: str | None) -> int:
    """Return the bytes of a step of this rank without a budget, as planned."""
    kept = owned_side(OF_EIGHT, cls, num_ranks, param_dtype)
    backwards(kept, [torch.ones(4, SIZES[0])], OF_EIGHT)
    (record,) = elixir.compilations(kept.model)
    takes_step(kept, OF_EIGHT)
    return record.plan.prediction.device_peak_bytes


def under_budget(rank: int, num_ranks: int, own: Side, cls: type[Optimizer], most_bytes: int) -> dict[str, Any]:
    """Train `own`, and beside it the class alone on the same gradients. Return whether all weights are equal, bit by
    bit, the homes of the state, and the peak in percent of `most_bytes`; or the least budget in percent if no plan fits
    that of `own`."""
    other, are_equal = single_side(OF_EIGHT, cls), True
    try:
        for each in steps(4 * num_ranks, OF_EIGHT):
            backwards(own, [batch.chunk(num_ranks)[rank] for batch in each], OF_EIGHT)
            for param, theirs in zip(other.params, own.params, strict=True):
                param.grad = grad_of(theirs).float()
            takes_step(own, OF_EIGHT)
            takes_step(other, OF_EIGHT)
            weights = [full(param.detach()) for param in own.params]
            theirs = [
                nearest(param.detach(), weight.dtype) for param, weight in zip(other.params, weights, strict=True)
            ]
            are_equal &= all(map(torch.equal, theirs, weights))
    except elixir.NoFeasiblePlan as error:
        return {"needs": round(100 * error.needed_bytes / most_bytes, 1), "at": error.op, "holds": error.by_kind}
    plans = [record.plan for record in elixir.compilations(own.model)]
    peak_bytes = max(plan.prediction.device_peak_bytes for plan in plans)
    homes = sorted({str(home.optim) for plan in plans for home in plan.placements})
    return {"is equal": are_equal, "takes": round(100 * peak_bytes / most_bytes, 1), "homes": homes}


# ----------------------------------------------------------------------------------------------------------------------
# Three faults of other engines that nothing says: each is put into ours, and seen on each rank.


USUAL = ClassStep.take
LEAST_NUMEL = 1000
"""The tensors of dry steps and watches are smaller."""


def sgd_instead(step: ClassStep, updates: list[ParamUpdate]) -> None:
    for one in updates:
        if one.weight.numel() < LEAST_NUMEL:
            USUAL(step, [one])
        else:
            one.state.setdefault("momentum_buffer", torch.zeros_like(one.weight)).mul_(0.95).add_(one.grad)
            one.weight.sub_(one.state["momentum_buffer"], alpha=step.group["lr"])


def flattened(step: ClassStep, updates: list[ParamUpdate]) -> None:
    for one in updates:
        if one.weight.numel() < LEAST_NUMEL:
            USUAL(step, [one])
            continue
        state = {key: value.view(1, -1) for key, value in one.state.items()}
        USUAL(step, [ParamUpdate(one.weight.view(1, -1), one.grad.view(1, -1), state)])
        one.state.update({key: value.view_as(one.weight) for key, value in state.items()})


def updates_each_micro_batch(self: Any, params: Any, arrived: Any) -> None:
    with torch.no_grad(), torch.DisableTorchFunctionSubclass():
        self._updater.update([*params], self.param_groups, self.__dict__["state"], arrived)


FAULTS: dict[str, tuple[Any, str, Any]] = {
    "none": (ClassStep, "take", USUAL),
    "another class": (ClassStep, "take", sgd_instead),
    "flat tensors": (ClassStep, "take", flattened),
    "each micro-batch": (Hybrid, "update_in_backward", updates_each_micro_batch),
}


@contextmanager
def counted() -> Iterator[Counter[tuple[int, ...]]]:
    """Yield a counter of the shapes of the gradients of parameters that Muon orthogonalises inside."""
    seen: Counter[tuple[int, ...]] = Counter()
    module = torch.optim._muon
    usual = module._zeropower_via_newtonschulz

    def noted(grad: torch.Tensor, *args: Any) -> torch.Tensor:
        if not compat.is_fake(grad) and grad.numel() > LEAST_NUMEL:
            seen[tuple(grad.shape)] += 1
        return usual(grad, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_zeropower_via_newtonschulz", noted)
        yield seen


def is_muon(rank: int, world_size: int, fault: str) -> list[bool]:
    """Train two backwards a step with a `fault` in this package. Return whether torch's Newton-Schulz ran once for each
    matrix of this rank and step in its shape, and whether the weights of all ranks are those of Muon."""
    habit = Habit(num_backwards=2)
    with pytest.MonkeyPatch.context() as patch, counted() as seen:
        patch.setattr(*FAULTS[fault])
        own = owned_side(habit, Muon, world_size, update="in_backward")
        each_step = list(steps(4 * world_size, habit))
        grads: list[list[torch.Tensor]] = []
        for each in each_step:
            backwards(own, [batch.chunk(world_size)[rank] for batch in each], habit)
            grads.append([grad_of(param) for param in own.params])
            takes_step(own, habit)
        weights = [full(param.detach()) for param in own.params]
        shapes = Counter(tuple(param.shape) for param in own.params if owner_of(param) == rank)
        are_counted = seen == {shape: NUM_STEPS * count for shape, count in shapes.items()}
    other = single_side(habit, Muon)
    for each in grads:
        for param, grad in zip(other.params, each, strict=True):
            param.grad = grad
        takes_step(other, habit)
    return [are_counted, all(map(torch.equal, other.params, weights))]
