"""Where a prepared model keeps its parameters, and which of them were replaced since.

A graph reads parameters by key, so no guard of Dynamo's notices `module.weight = nn.Parameter(...)`. A site is one
entry of `module._parameters` with the slot that graphs read for it; `Sites.moved` compares them before every forward.

    the new parameter has the form of the old one     the slot takes it in: graphs, buckets and plans stay as they are
    anything else                                      the graphs are outdated: the step is captured again
"""

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from torch import nn

from elixir_compile.errors import StaleParameters
from elixir_compile.ops.masters import has_master
from elixir_compile.ops.registry import Slot, slot_of
from elixir_compile.ops.shards import has_layout_of


@dataclass(frozen=True, slots=True)
class Site:
    """One entry of `_parameters` that graphs read."""

    params: dict[str, nn.Parameter | None]
    """`_parameters` of the module."""
    name: str
    slot: Slot
    module: "weakref.ref[nn.Module]"


@dataclass(slots=True)
class Sites:
    """The sites of one executor."""

    is_outdated: bool = False
    """Whether a module changed so that the graphs captured before must not run again."""
    _sites: list[Site] = field(default_factory=list)
    _num_of_slot: dict[int, int] = field(default_factory=dict)
    _replaced: str | None = None
    """The parameter that was taken in last."""
    _replaced_before: int = 0
    """The first forward after that."""

    def add(self, module: nn.Module, name: str, slot: Slot) -> None:
        """Note that graphs read `slot` for the parameter `name` of `module`."""
        self._sites.append(Site(module._parameters, name, slot, weakref.ref(module)))
        self._num_of_slot[slot.key] = self._num_of_slot.get(slot.key, 0) + 1

    def clear(self) -> None:
        """Forget all sites."""
        self._sites.clear()
        self._num_of_slot.clear()

    def modules(self) -> list[nn.Module]:
        """Return the modules that are still alive, each once."""
        found = (site.module() for site in self._sites)
        return list({id(module): module for module in found if module is not None}.values())

    def moved(self) -> list[Site]:
        """Return the sites whose parameter is not that of their slot; some 60 ns each."""
        return [site for site in self._sites if site.params.get(site.name) is not site.slot.param]

    def may_take(self, slot: Slot, param: object) -> bool:
        """Whether `slot` can read `param` in place of its parameter without another capture."""
        if not isinstance(param, nn.Parameter) or slot_of(param) is not None or self._num_of_slot[slot.key] > 1:
            return False
        old = slot.param
        return slot.fits(param) and has_layout_of(param, old) and has_master(param) == has_master(old)

    def take(self, sites: Iterable[Site], next_forward: int) -> Iterator[Slot]:
        """Let the slots of `sites`, for which `may_take` holds, read the parameters that are there now; yield them."""
        for site in sites:
            site.slot.take(site.params[site.name])
            self._replaced, self._replaced_before = site.slot.name, next_forward
            yield site.slot

    def check_forward(self, number: int) -> None:
        """Before the backward of forward `number`: StaleParameters where a parameter was replaced after that forward:
        its gradient would go to the new one."""
        if self._replaced is not None and number < self._replaced_before:
            raise StaleParameters(self._replaced)
