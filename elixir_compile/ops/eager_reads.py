"""Detect in-place writes of eager code to copies of parameters.

Eager code runs between the graphs of a model with graph breaks, and in evaluations. If the home of a parameter is the
host, or if the parameter is sharded, eager code reads a copy of it on the device. An in-place write to the copy would
be lost, while eager PyTorch would change the parameter.
"""

import weakref
from dataclasses import dataclass, field

import torch

from elixir_compile import compat
from elixir_compile.errors import UnsupportedModel
from elixir_compile.ops.registry import Slot


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
