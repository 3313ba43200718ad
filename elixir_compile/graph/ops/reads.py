"""Where modules read parameters: find replaced parameters of a prepared model, and lost writes of eager code.

A graph reads parameters by key, so no guard of Dynamo fails after `module.weight = nn.Parameter(...)`. A site is an
entry of `module._parameters` with its slot in graphs; `Sites.moved` compares them before each forward.

    the new parameter has the form of the old         the slot takes it: graphs, buckets and plans stay as they are
    any other change                                  the graphs are outdated: the step is captured again

Eager code runs between the graphs of a model with graph breaks, and in evaluations. If the home of a parameter is the
host, or if the parameter is sharded, eager code reads a copy of it on the device. An in-place write to the copy would
be lost, while eager PyTorch would change the parameter.
"""

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import nn

from elixir_compile import compat
from elixir_compile.base.errors import StaleParameters, UnsupportedModel
from elixir_compile.graph.ops.optimizers import has_master
from elixir_compile.graph.ops.registry import Slot, slot_of
from elixir_compile.graph.ops.shards import has_layout_of


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


@dataclass(frozen=True, slots=True)
class _Read:
    name: str
    copy: "weakref.ref[torch.Tensor]"
    twin: torch.Tensor
    """An empty tensor that shares the version counter of the copy: it counts writes also after the copy is freed."""
    version: int


@dataclass(slots=True)
class EagerReads:
    """The copies of parameters that eager code may still write."""

    _reads: list[_Read] = field(default_factory=list)

    @torch.no_grad()
    def note(self, slot: Slot, copy: torch.Tensor) -> None:
        """Record that eager code reads `copy` for the parameter of `slot`.

        Raises UnsupportedModel if an earlier copy was written in place.
        """
        if compat.storage_key(copy) == compat.storage_key(slot.own):
            return
        self.check()
        twin = copy.detach()
        twin.data = torch.empty(0, dtype=copy.dtype, device=copy.device)
        self._reads.append(_Read(slot.name, weakref.ref(copy), twin, twin._version))

    def check(self) -> None:
        """Raise UnsupportedModel if a copy was written in place; forget freed copies."""
        written = next((read for read in self._reads if read.twin._version != read.version), None)
        if written is not None:
            self._reads.clear()
            raise UnsupportedModel(
                written.name,
                "eager code, outside of the compiled graphs, wrote in place to a copy of the parameter on the device, "
                "so the write is lost. Write to the parameter between two steps, by "
                f"`dict(model.named_parameters())[{written.name!r}]`",
            )
        self._reads = [read for read in self._reads if read.copy() is not None]
