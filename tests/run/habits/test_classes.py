"""Forwards that read attributes of classes, in modules with parameters that no graph reads.

Such a module gets a class that reads these parameters as gathers while Dynamo waits for the compiled graph, and Dynamo
then builds guards by the attributes that its trace read in the module's class.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import elixir_compile as elixir
from tests.run.habits.habit import habit
from tests.run.habits.stories import BATCHES, WIDTH, Layers, assert_same_story, values
from tests.run.training import Run


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
