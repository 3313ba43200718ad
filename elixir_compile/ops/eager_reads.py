"""Copies of parameters that eager code has read, between the graphs of a model that breaks or in an evaluation.

Eager code reads a parameter that lives on the host, or of which several ranks have parts, as a copy on the device. What
it writes to such a copy in place would be lost; eager PyTorch writes to the parameter. `EagerReads` finds the write.
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
    """Shares the version counter of the copy and not its memory, so it tells of writes when the copy is gone."""
    version: int


@dataclass(slots=True)
class EagerReads:
    """The copies that eager code read since the last check."""

    _reads: list[_Read] = field(default_factory=list)

    @torch.no_grad()
    def note(self, slot: Slot, copy: torch.Tensor) -> None:
        """Note that eager code gets `copy` as the parameter of `slot`. Raises UnsupportedModel if an earlier copy was
        written."""
        if compat.storage_key(copy) == compat.storage_key(slot.own):
            return
        self.check()
        twin = copy.detach()
        twin.data = torch.empty(0, dtype=copy.dtype, device=copy.device)
        self._reads.append(_Read(slot.name, weakref.ref(copy), twin, twin._version))

    def check(self) -> None:
        """Raise UnsupportedModel if a copy was written in place; forget those that nobody has any more."""
        written = next((read for read in self._reads if read.twin._version != read.version), None)
        if written is not None:
            self._reads.clear()
            raise UnsupportedModel(
                written.name,
                "eager code, outside of the compiled graphs, wrote in place to what it read, a copy of the parameter "
                "on the device, so that write is lost. Write to the parameter between two steps, by "
                f"`dict(model.named_parameters())[{written.name!r}]`",
            )
        self._reads = [read for read in self._reads if read.copy() is not None]
