"""The DistributedDataParallel modules that reduce the gradients of an executor's parameters.

Such a module has a reducer in C++, which hangs a hook on the autograd node of each parameter. The hooks copy gradients
into flat buckets, and sum the buckets over all ranks while the backward runs. So three things hold for its parameters:

    gradients    go through autograd, which calls the hooks (see `runtime.gradients`), and not to `.grad` directly
    updates      never run in the backward, whose gradients are summed only when it ends
    parameters   stay on their device: on another one they would get another node, without the hook
"""

from collections.abc import Iterable

import torch
from torch.nn.parallel import DistributedDataParallel

from elixir_compile import compat
from elixir_compile.base.living import Living
from elixir_compile.graph.ops.registry import Slot

_COUNTS_BYTES = 8
"""Of each parameter: how often it was used on this rank, and on all, in 4 bytes each."""


class Reducers:
    """The DistributedDataParallel modules in whose forwards graphs of an executor have run."""

    def __init__(self) -> None:
        self._found: Living[DistributedDataParallel] = Living()

    def __bool__(self) -> bool:
        """Whether any such module exists."""
        return bool(self._found)

    def __contains__(self, ddp: DistributedDataParallel) -> bool:
        return ddp in self._found

    def add(self, ddp: DistributedDataParallel, slots: Iterable[Slot]) -> None:
        """Note that `ddp` reduces the gradients of those `slots` whose parameters it has."""
        reduced = {id(param) for param in compat.reduced_by(ddp)}
        for slot in slots:
            if id(slot.param) in reduced:
                slot.note_reducer(ddp)
        self._found.add(ddp)

    def bucket_bytes(self, device: torch.device) -> int:
        """Return the bytes of the buckets on `device`: as many as the gradients have.

        The same again counts for the copies that a communication hook makes, whatever it is.
        """
        total = 0
        for ddp in self._found:
            params = [param for param in compat.reduced_by(ddp) if param.device == device]
            copies = 2 if compat.has_communication_hook(ddp) else 1
            total += sum(copies * param.nbytes + _COUNTS_BYTES for param in params)
        return total
