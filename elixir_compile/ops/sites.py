"""Find replaced parameters of a prepared model.

A graph reads parameters by key, so no guard of Dynamo fails after `module.weight = nn.Parameter(...)`. A site is an
entry of `module._parameters` with its slot in graphs; `Sites.moved` compares them before each forward.

    the new parameter has the form of the old         the slot takes it: graphs, buckets and plans stay as they are
    any other change                                  the graphs are outdated: the step is captured again
"""

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import cast

from torch import nn

from elixir_compile.errors import StaleParameters
from elixir_compile.ops.masters import has_master
from elixir_compile.ops.registry import Slot, slot_of
from elixir_compile.ops.shards import has_layout_of


@dataclass(frozen=True, slots=True)
class Site:
    """An entry of `_parameters` of a module, and its slot in graphs."""

    params: dict[str, nn.Parameter | None]
    """The dictionary `_parameters` of the module."""
    name: str
    slot: Slot
    module: "weakref.ref[nn.Module]"


@dataclass(slots=True)
class Sites:
    """The sites of an executor."""

    is_outdated: bool = False
    """Whether a module changed so much that graphs captured before must not run again."""
    _sites: list[Site] = field(default_factory=list)
    _num_of_slot: dict[int, int] = field(default_factory=dict)
    _replaced: str | None = None
    """The name of the last parameter that was replaced."""
    _replaced_before: int = 0
    """The number of the first forward after that replacement."""

    def add(self, module: nn.Module, name: str, slot: Slot) -> None:
        """Add the site of the parameter `name` of `module`, for which graphs read `slot`."""
        self._sites.append(Site(module._parameters, name, slot, weakref.ref(module)))
        self._num_of_slot[slot.key] = self._num_of_slot.get(slot.key, 0) + 1

    def clear(self) -> None:
        """Forget all sites."""
        self._sites.clear()
        self._num_of_slot.clear()

    def modules(self) -> list[nn.Module]:
        """Return the live modules, each once."""
        found = (site.module() for site in self._sites)
        return list({id(module): module for module in found if module is not None}.values())

    def moved(self) -> list[Site]:
        """Return the sites whose parameter is not the parameter of the slot. It takes 60 ns for each site."""
        return [site for site in self._sites if site.params.get(site.name) is not site.slot.param]

    def may_take(self, slot: Slot, param: object) -> bool:
        """Return whether `slot` can take `param` in place of its parameter without another capture."""
        if not isinstance(param, nn.Parameter) or slot_of(param) is not None or self._num_of_slot[slot.key] > 1:
            return False
        old = slot.param
        return slot.fits(param) and has_layout_of(param, old) and has_master(param) == has_master(old)

    def take(self, sites: Iterable[Site], next_forward: int) -> Iterator[Slot]:
        """Make the slots of `sites` take the present parameters of the sites, and yield the slots.

        `may_take` must be True for each site.
        """
        for site in sites:
            site.slot.take(cast("nn.Parameter", site.params[site.name]))  # `may_take` refuses None
            self._replaced, self._replaced_before = site.slot.name, next_forward
            yield site.slot

    def check_forward(self, number: int) -> None:
        """Raise StaleParameters if a parameter was replaced between forward `number` and its backward.

        The gradient would go to the new parameter.
        """
        if self._replaced is not None and number < self._replaced_before:
            raise StaleParameters(self._replaced)
