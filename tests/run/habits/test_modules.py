"""Modules that are replaced, wrapped, copied, averaged or pruned between steps, and that read attributes of
classes."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import elixir_compile as elixir
from elixir_compile.graph.capture.modules import executor_of, is_swapped
from tests.run.habits.habit import habit
from tests.run.habits.stories import (
    BATCHES,
    BUDGETS,
    WIDTH,
    Layers,
    assert_same_story,
    compiled,
    eager,
    layers,
    new_optimizer,
    values,
)
from tests.run.training import Run, assert_same, on_host

# ----------------------------------------------------------------------------------------------------------------------
# Modules that are replaced, wrapped, copied, averaged, parametrized or pruned between two steps.


each_budget = pytest.mark.parametrize("budget", BUDGETS)


# Replaced, added, skipped


@habit("Another head between two phases: `model.head = nn.Linear(...)`, also of another shape", area="Modules")
@each_budget
def test_another_head(budget: str) -> None:
    def story(run: Run) -> None:
        run.train(BATCHES[:2])
        for width, batches in ((WIDTH, BATCHES[2:4]), (2, BATCHES[4:])):
            torch.manual_seed(3)
            run.model.head = nn.Linear(WIDTH, width)
            new_optimizer(run)
            run.train(batches)

    got = assert_same_story(story, budget=budget)
    assert is_swapped(got.model.head)
    assert budget == "free" or "head.weight" in on_host(got)


class Adapter(nn.Module):
    """A linear layer with a trained correction of rank two."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)

    @property
    def correction(self) -> torch.Tensor:
        return self.up.weight.detach() @ self.down.weight.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


@habit("LoRA by hand: added after a step, trained, merged for evaluation, unmerged and trained on", area="Modules")
@each_budget
def test_low_rank_adapters(budget: str) -> None:
    def story(run: Run) -> None:
        run.train(BATCHES[:2])
        run.model.requires_grad_(False)
        adapter = run.model.middle = Adapter(run.model.middle)
        new_optimizer(run)
        run.train(BATCHES[2:4])
        merged = adapter.correction
        adapter.base.weight.data += merged
        run.model.middle = adapter.base
        with torch.no_grad():
            run.losses.append(run.compiled(BATCHES[4]))
        adapter.base.weight.data -= merged
        run.model.middle = adapter
        run.train(BATCHES[4:])

    assert_same_story(story, budget=budget)


class Skipping(Layers):
    """Layers whose middle one is dropped at times."""

    drops = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        x = x if self.drops else torch.tanh(self.middle(x))
        return self.head(x).square().mean()


@habit("Layer drop: a layer is skipped in some steps", area="Modules")
def test_layer_drop() -> None:
    def story(run: Run) -> None:
        for step, batch in enumerate(BATCHES[:5]):
            run.model.drops = step % 2 == 1
            run.train([batch])

    torch.manual_seed(0)
    assert_same_story(story, budget="offload", model=Skipping())


@habit("A lazy module, `nn.LazyLinear`, and one made by `torch.nn.utils.skip_init`", area="Modules")
def test_modules_that_start_late() -> None:
    model = layers()
    model.middle = nn.LazyLinear(WIDTH)
    model.head = torch.nn.utils.skip_init(nn.Linear, WIDTH, WIDTH)
    model.middle.initialize_parameters(torch.zeros(1, WIDTH))
    for param in (*model.middle.parameters(), *model.head.parameters()):
        param.data = values(*param.shape)
    assert_same_story(lambda run: run.train(BATCHES[:3]) and None, budget="offload", model=model)


# Copied, averaged


@habit("EMA of the weights, `AveragedModel(compiled or model)`: updated each step, then evaluated", area="Modules")
@each_budget
def test_averaged_weights(budget: str) -> None:
    def story(run: Run) -> None:
        run.train(BATCHES[:1])
        average = AveragedModel(run.model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        for batch in BATCHES[1:4]:
            run.train([batch])
            average.update_parameters(run.model)
        with torch.no_grad():
            run.losses.append(average(BATCHES[4]))
        run.train(BATCHES[4:5])
        assert executor_of(average) is None

    assert_same_story(story, budget=budget)


class Normed(nn.Module):
    """A linear layer and a batch norm; returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.first(x)).square().mean()


@habit("`swa_utils.update_bn` of the averaged and of the compiled model", area="Modules")
def test_statistics_of_batch_norm() -> None:
    def story(run: Run) -> None:
        run.train(BATCHES[:2])
        average = AveragedModel(run.model)
        average.update_parameters(run.model)
        update_bn(BATCHES[:3], average)
        run.losses.append(average.module.norm.running_var.sum())
        update_bn(BATCHES[:3], run.compiled)
        run.train(BATCHES[2:3])

    torch.manual_seed(0)
    assert_same_story(story, budget="offload", model=Normed())


@habit("`copy.deepcopy(model)` after some steps as a frozen teacher; `copy.copy` of a layer", area="Modules")
def test_a_copy_as_teacher() -> None:
    def story(run: Run) -> None:
        run.train(BATCHES[:2])
        teacher = copy.deepcopy(run.model).requires_grad_(False)
        layer = copy.copy(run.model.first)
        assert layer.weight is run.model.first.weight
        for batch in BATCHES[2:4]:
            loss = (run.compiled(batch) - teacher(0.5 * batch)).square() + layer(batch).mean()
            loss.backward()
            run.losses.append(loss.detach())
            run.optimizer.step()
            run.optimizer.zero_grad()

    assert_same_story(story, budget="offload")


# Hooks and fake quantization


@habit("A forward pre-hook that reads the weight of its module", area="Modules")
def test_a_hook_that_reads_weights() -> None:
    def story(run: Run) -> None:
        # After the first step it would not be noticed, as with any backend: Dynamo does not check hooks of modules.
        run.model.middle.register_forward_pre_hook(lambda module, args: (args[0] * module.weight.norm(),))
        run.train(BATCHES[:3])

    assert_same_story(story, budget="offload")


class Scaled(nn.Linear):
    """A linear layer that reads an attribute of its class."""

    factor = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.factor * super().forward(x)


@habit("A forward that reads an attribute of the module's class", area="Modules")
def test_attributes_of_classes() -> None:
    torch.manual_seed(0)
    model = layers()
    model.middle = Scaled(WIDTH, WIDTH)
    got = assert_same_story(lambda run: run.train(BATCHES[:3]) and None, budget="offload", model=model)
    assert len(elixir.compilations(got.model)) == 1


class Quantized(nn.Linear):
    """A linear layer whose weight is rounded in the forward, with the gradient of a weight that is not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = float(2**-6)
        weight = torch.fake_quantize_per_tensor_affine(self.weight, scale, 0, -128, 127)
        return functional.linear(x, weight, self.bias)


@habit("Quantization-aware training: `fake_quantize_per_tensor_affine` of the weight in the forward", area="Modules")
def test_quantization_aware_training() -> None:
    def story(run: Run) -> None:
        run.train(BATCHES[:3])

    torch.manual_seed(0)
    model = layers()
    model.middle = Quantized(WIDTH, WIDTH)
    assert_same_story(story, budget="offload", model=model)


# Parametrizations, pruning


class Symmetric(nn.Module):
    """A matrix that is its own transpose."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).mT


@habit("`parametrize.register_parametrization` after the first step, and its removal", area="Modules")
@each_budget
def test_parametrizing_between_steps(budget: str) -> None:
    def story(run: Run) -> None:
        run.train(BATCHES[:2])
        parametrize.register_parametrization(run.model.middle, "weight", Symmetric())
        new_optimizer(run)
        run.train(BATCHES[2:4])
        parametrize.remove_parametrizations(run.model.middle, "weight")
        run.train(BATCHES[4:])

    got = assert_same_story(story, budget=budget)
    assert type(copy.deepcopy(got.model.middle)) is nn.Linear


@habit("A parametrization from before the first step is removed later", area="Modules")
def test_removing_a_parametrization() -> None:
    def story(run: Run) -> None:
        parametrize.register_parametrization(run.model.middle, "weight", Symmetric())
        new_optimizer(run)
        run.train(BATCHES[:2])
        parametrize.remove_parametrizations(run.model.middle, "weight", leave_parametrized=False)
        run.train(BATCHES[2:4])

    assert_same_story(story, budget="offload")


def test_parametrizing_between_prepare_and_the_first_step_and_a_buffer_of_a_prepared_module() -> None:
    torch.manual_seed(0)
    model = Normed()
    runs = [eager(model), compiled(model, BUDGETS["offload"])]
    elixir.prepare(runs[1].model)
    for run in runs:
        parametrize.register_parametrization(run.model.first, "weight", Symmetric())
        parametrize.register_parametrization(run.model.norm, "running_mean", nn.Identity())
        new_optimizer(run)
        run.train(BATCHES[:2])
        run.model.norm.weight = nn.Parameter(values(1, WIDTH)[0], requires_grad=False)
        run.model.norm.bias = None
        parametrize.remove_parametrizations(run.model.norm, "running_mean")
        new_optimizer(run)
        run.train(BATCHES[2:3])
    assert_same(*runs)


@habit("`parametrizations.weight_norm`, `orthogonal`, `spectral_norm` after the first step", area="Modules")
@pytest.mark.parametrize("apply", ["weight_norm", "orthogonal", "spectral_norm"])
def test_known_parametrizations_between_steps(apply: str) -> None:
    def story(run: Run) -> None:
        run.train(BATCHES[:1])
        torch.manual_seed(2)
        getattr(parametrizations, apply)(run.model.middle)
        new_optimizer(run)
        run.train(BATCHES[1:3])

    assert_same_story(story, budget="offload")


@habit("`nn.utils.weight_norm`, `nn.utils.spectral_norm` after the first step, and their removal", area="Modules",
       note="a warning names parameters whose old device memory stays in use by other tensors after they "
       "move to the host")  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
@pytest.mark.filterwarnings("ignore:.*weight_orig move to the host, and other tensors hold")
@pytest.mark.parametrize(
    ("apply", "remove"),
    [
        (nn.utils.weight_norm, nn.utils.remove_weight_norm),
        (nn.utils.spectral_norm, nn.utils.remove_spectral_norm),
    ],
)
def test_norms_by_hooks_between_steps(
    apply: Callable[[nn.Module], object], remove: Callable[[nn.Module], object]
) -> None:
    def story(run: Run) -> None:
        run.train(BATCHES[:1])
        torch.manual_seed(2)
        apply(run.model.middle)
        new_optimizer(run)
        run.train(BATCHES[1:3])
        remove(run.model.middle)
        new_optimizer(run)
        run.train(BATCHES[3:4])

    assert_same_story(story, budget="offload")


@habit("`prune.l1_unstructured` after the first step, again, and `prune.remove`", area="Modules")
@each_budget
def test_pruning_between_steps(budget: str) -> None:
    def story(run: Run) -> None:
        run.train(BATCHES[:1])
        prune.l1_unstructured(run.model.middle, "weight", 0.3)
        new_optimizer(run)
        run.train(BATCHES[1:3])
        prune.l1_unstructured(run.model.middle, "weight", 0.3)
        run.train(BATCHES[3:4])
        prune.remove(run.model.middle, "weight")
        run.train(BATCHES[4:])

    assert_same_story(story, budget=budget)


@habit("Pruned before the first step, `prune.remove` after some", area="Modules")
def test_pruning_before() -> None:
    def story(run: Run) -> None:
        prune.l1_unstructured(run.model.middle, "weight", 0.3)
        new_optimizer(run)
        run.train(BATCHES[:2])
        prune.remove(run.model.middle, "weight")
        run.train(BATCHES[2:4])

    assert_same_story(story, budget="offload")


# ----------------------------------------------------------------------------------------------------------------------
# Forwards that read attributes of classes, in modules with parameters that no graph reads.
#
# Such a module gets a class that reads these parameters as gathers while Dynamo waits for the compiled graph, and
# Dynamo then builds guards by the attributes that its trace read in the module's class.


def doubled(method: Callable[[Any, torch.Tensor], torch.Tensor]) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    """Return `method` with its result times two, by a factor that a closure holds."""
    factor = [2.0]

    @functools.wraps(method)
    def inner(module: Any, x: torch.Tensor) -> torch.Tensor:
        return method(module, x) * factor[0]

    return inner


class Constant:
    """A descriptor with one value."""

    def __get__(self, instance: object, owner: object = None) -> float:
        return 3.0


class Idle(nn.Module):
    """A module with a trained and a frozen parameter that its forward does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.unread = nn.Parameter(values(WIDTH))
        self.frozen = nn.Parameter(values(WIDTH), requires_grad=False)

    def scaled(self, x: torch.Tensor, factors: tuple[float, float] = (2.0, 3.0)) -> torch.Tensor:
        return x * factors[1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(x)


class ByProperty(Idle):
    @property
    def factor(self) -> float:
        return 2.0 if self.training else 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class ByTable(Idle):
    table = {"factor": 3.0}  # noqa: RUF012  (a constant of the class, as users write it)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.table["factor"]


class ByTypeTable(ByTable):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * type(self).table["factor"] * self.__class__.table["factor"] * len(type(self).__name__)


class ByDecorator(Idle):
    @doubled
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin()


class ByAutocast(Idle):
    @torch.autocast("cpu", enabled=False)
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin()


class ByNoGrad(Idle):
    @torch.no_grad()
    def offset(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - self.offset(x)


class ByStatic(Idle):
    act = staticmethod(functional.gelu)

    @staticmethod
    @doubled
    def twice(module: Idle, x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.twice(self, x))


class ByClassMethod(Idle):
    factor = 2.0

    @classmethod
    def times(cls, x: torch.Tensor, bias: tuple[float, ...] = (1.0,)) -> torch.Tensor:
        return x * cls.factor + bias[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.times(x)


class ByKeyword(Idle):
    def shifted(self, x: torch.Tensor, *, bias: dict[str, float] = {"by": 2.0}) -> torch.Tensor:  # noqa: B006
        return x + bias["by"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shifted(x)


class BySuper(Idle):
    def scaled(self, x: torch.Tensor, factors: tuple[float, float] = (4.0, 5.0)) -> torch.Tensor:
        return super().scaled(x) * factors[0]


class ByDescriptor(Idle):
    factor = Constant()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class ByFallback(Idle):
    def __getattr__(self, name: str) -> Any:
        return 2.0 if name == "factor" else super().__getattr__(name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class ByFunctionAttribute(Idle):
    def __init__(self) -> None:
        super().__init__()
        type(self).scaled.factor = 2.0

    def scaled(self, x: torch.Tensor, factors: tuple[float, float] = (2.0, 3.0)) -> torch.Tensor:
        return x * self.scaled.factor * factors[0]


READERS = [Idle, *Idle.__subclasses__(), ByTypeTable]


@habit(
    "A forward that reads a property, a default, a table, a decorated, static or class method of its class, in a "
    "module with parameters that the step does not read",
    area="Modules",
)
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
def test_classes_of_modules_whose_parameters_are_not_read(reader: type[Idle]) -> None:
    torch.manual_seed(0)
    model = Layers()
    model.middle = reader()
    got = assert_same_story(lambda run: run.train(BATCHES[:2]) and None, budget="offload", model=model)
    assert len(elixir.compilations(got.model)) == 1


class Around(ByProperty, Layers):
    """Layers that own parameters that no graph reads."""

    def __init__(self) -> None:
        super().__init__()
        Layers.__init__(self)
        self.unread = nn.Parameter(values(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Layers.forward(self, x) * self.factor


class Listed(Layers):
    """Layers of which one module is in a list of modules, and one in a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Identity()
        self.listed = nn.ModuleList([ByTable(), ByStatic()])
        self.named = nn.ModuleDict({"a": ByKeyword()})
        self.plain = [self.listed[1], self.named["a"]]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in (*self.listed, *self.plain):
            x = module(x)
        return super().forward(x)


class Branching(Layers):
    """Layers with a module whose parameters are read in evaluation alone."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = Gated()


class Gated(ByDecorator):
    """A module that reads its parameter in evaluation alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if self.training else x * self.unread)


@habit(
    "Such a module as the whole model, in a list, in a dict, and one whose parameters evaluation reads", area="Modules"
)
@pytest.mark.parametrize("kind", [Around, Listed, Branching], ids=lambda kind: kind.__name__)
def test_places_of_modules_whose_parameters_are_not_read(kind: type[nn.Module]) -> None:
    def story(run: Run) -> None:
        run.train(BATCHES[:2])
        run.model.eval()
        with torch.no_grad():
            run.losses.append(run.compiled(BATCHES[2]))
        run.model.train()
        run.train(BATCHES[3:4])

    torch.manual_seed(0)
    assert_same_story(story, budget="offload", model=kind())
