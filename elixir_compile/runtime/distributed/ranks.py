"""The ranks that train one model together: who has which part, and the collectives between them.

    mesh of n            each rank has one of n parts of every parameter
    mesh of m x n        m groups of n; rank (i, j) has part j, as every other rank (., j) has

A gradient is the mean over all ranks, computed in fp32 for parameters with a master where the reduce dtype says so.
"""

import logging
import math
import platform
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import NamedTuple

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from elixir_compile import compat
from elixir_compile.ir.kinds import Lane
from elixir_compile.ops.masters import has_master
from elixir_compile.ops.shards import is_sharded, part_like
from elixir_compile.runtime.distributed.control import ControlChannel, apart, new_control_channel
from elixir_compile.runtime.distributed.errors import PeerFailed
from elixir_compile.runtime.distributed.exchange import Exchange, messenger_of, weigh_in
from elixir_compile.runtime.ledger import Ledger
from elixir_compile.runtime.streams import CopyStream

log = logging.getLogger("elixir_compile")

_PREMULTIPLIED = (torch.float32, torch.float64)
"""What NCCL scales on the way: the factor has the dtype of the gradient, and in 16 bits it would be off by 0.2 %."""

SMALL_BYTES = 64 * 1024
"""A tensor whose copies on all ranks take no more is not cut: a part of it would be a few elements."""


class _Counted(NamedTuple):
    """Where collectives are counted, and under which name."""

    ledger: Ledger
    name: str

    def span(self, verb: str, nbytes: int) -> AbstractContextManager[object]:
        """Count a collective of `nbytes`."""
        return self.ledger.span(Lane.REDUCE, f"{verb} {self.name}", nbytes)


class Collective:
    """A collective of `ranks` on its way, which brings `what`."""

    def __init__(self, work: "distributed.Work | Exchange | _MeanOfCopies", what: str, ranks: "Ranks") -> None:
        self.work, self.what, self._ranks = work, what, ranks
        ranks.under_way[self] = None

    def wait(self) -> None:
        """Let what is issued from now on run behind it; PeerFailed where a rank is dead or silent."""
        self._ranks.under_way.pop(self, None)
        with self._ranks.control.raising_peer_failed(self.what):
            self.work.wait()


class _MeanOfCopies:
    """The mean over the ranks of `group` of what `reduced` brings to `own`: on CUDA behind it, on a stream of its own,
    elsewhere when it is waited for."""

    def __init__(
        self,
        reduced: "distributed.Work | Exchange | _MeanOfCopies",
        own: torch.Tensor,
        group: "distributed.ProcessGroup",
        stream: CopyStream,
    ) -> None:
        self._reduced, self._own, self._group = reduced, own, group
        self._mean: distributed.Work | None = None
        if stream.is_asynchronous:
            with stream.beside_compute():
                reduced.wait()
                self._mean = distributed.all_reduce(own, distributed.ReduceOp.AVG, group, async_op=True)

    def wait(self) -> None:
        """Let what is issued from now on run behind it; RuntimeError where a rank is dead or silent."""
        if self._mean is not None:
            self._mean.wait()
            return
        self._reduced.wait()
        apart(lambda: distributed.all_reduce(self._own, distributed.ReduceOp.AVG, self._group))


def device_of(mesh: DeviceMesh) -> torch.device:
    """Return the device of this rank in `mesh`."""
    kind = mesh.device_type
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


class Ranks:
    """The ranks of `mesh`: parts along its last axis, copies of them along the one before, if there is one."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.num_shards = mesh.size(-1)
        self.num_ranks = mesh.size()
        self.num_copies = self.num_ranks // self.num_shards
        self._shard_group = mesh.get_group(mesh.ndim - 1)
        self._copy_group = mesh.get_group(0) if mesh.ndim > 1 else None
        self._copy_stream = CopyStream(device_of(mesh))
        self._all_gather, self._reduce_scatter = compat.flat_collectives()
        self._messenger = messenger_of(self._shard_group, torch.device(mesh.device_type))
        self.control = new_control_channel(mesh.mesh.flatten().tolist())
        """How the ranks agree."""
        self.weight = 1.0
        """How often the gradients of this rank count in the mean."""
        self._is_weighed = False
        self.reduces_in_fp32 = False
        """Whether gradients of parameters with a master are averaged in fp32, and stay in it."""
        self.under_way: dict[Collective, None] = {}
        """The collectives that nobody has waited for, in their order."""

    @cached_property
    def checkpoint_control(self) -> ControlChannel:
        """How the ranks agree about checkpoints, apart from training, which goes on beside a save.

        All of them must ask for it at once the first time.
        """
        return new_control_channel(self.mesh.mesh.flatten().tolist())

    @cached_property
    def num_local(self) -> int:
        """The most ranks that share a host, by its name. All of them must ask for it at once the first time."""
        return max(
            Counter(
                self.control.exchange(platform.node(), "names of hosts", "is about to run its first graph")
            ).values()
        )

    def placements_of(self, param: torch.Tensor) -> tuple[Placement, ...]:
        """Return how `param`, whole, is laid out over the mesh."""
        is_small = param.dim() == 0 or param.numel() * param.element_size() * self.num_shards <= SMALL_BYTES
        return (*[Replicate()] * (self.mesh.ndim - 1), Replicate() if is_small else Shard(0))

    def parts_of(self, param: torch.Tensor) -> tuple[int, ...]:
        """Return how many elements of `param` each part has; all of them where each rank has it whole."""
        if not is_sharded(param):
            return (param.numel(),) * self.num_shards
        row_numel = math.prod(param.shape[1:])
        num_rows = -(-param.shape[0] // self.num_shards)
        starts = range(0, num_rows * self.num_shards, num_rows)
        return tuple(row_numel * min(max(param.shape[0] - start, 0), num_rows) for start in starts)

    def reduced_dtype(self, param: torch.Tensor) -> torch.dtype:
        """Return what the gradient of `param` is averaged in."""
        return torch.float32 if self.reduces_in_fp32 and has_master(param) else param.dtype

    def all_gather(self, whole: torch.Tensor, own: torch.Tensor, what: str) -> Collective:
        """Start filling `whole` with the `own` of every part, a row each, in their order."""
        with self.control.raising_peer_failed(what):
            if self._messenger is not None:
                work = self._messenger.all_gather(whole, own)
            else:
                work = self._all_gather(whole.view(-1), own, group=self._shard_group, async_op=True)
        return Collective(work, what, self)

    def set_gradient_weight(self, num_samples: int) -> None:
        """Count the gradients of this rank as those of `num_samples` samples: the mean is over samples from now on.

        Every rank calls this at once. Raises PeerFailed where one does not, ValueError where there are no samples.
        """
        said = [int(text) for text in self.control.exchange(str(num_samples), "samples of a batch", "weighs its batch")]
        if min(said) < 0 or sum(said) == 0:
            raise ValueError(f"the ranks have {said} samples: needs 0 or more each, and one at least")
        weights = {rank: own * len(said) / sum(said) for rank, own in zip(self.control.ranks, said, strict=True)}
        self.weight, self._is_weighed = weights[self.control.ranks[self.control.rank]], set(weights.values()) != {1.0}
        if self._messenger is not None:
            members = distributed.get_process_group_ranks(self._shard_group)
            self._messenger.weights = tuple(weights[rank] for rank in members)

    def weighs(self, dtype: torch.dtype) -> bool:
        """Whether a reduce-scatter of `dtype` itself counts this rank's gradients as often as it should."""
        is_premultiplied = dtype in _PREMULTIPLIED and self.weight != 0.0
        return self._messenger is not None or is_premultiplied or not self._is_weighed

    def drain(self) -> None:
        """Wait, after an exception, for what was begun: messages that nobody takes would be taken for later ones.

        Another error is logged, and ends this: it is not what the user must see.
        """
        while self.under_way:
            collective = next(iter(self.under_way))
            try:
                collective.wait()
            except PeerFailed as error:
                log.warning("After an exception, %s did not arrive: %s", collective.what, error)
                self.under_way.clear()

    def reduce_scatter(self, own: torch.Tensor, whole: torch.Tensor, what: str) -> Collective:
        """Start filling `own` with this rank's row of the mean of `whole` over the ranks of the last axis; see
        `weighs`."""
        with self.control.raising_peer_failed(what):
            if self._messenger is not None:
                work = self._messenger.reduce_scatter(own, whole)
            else:
                mean = distributed.ReduceOp.AVG
                if self._is_weighed and own.dtype in _PREMULTIPLIED:
                    mean = compat.scaled_sum(self.weight / self.num_shards)
                work = self._reduce_scatter(own, whole.view(-1), op=mean, group=self._shard_group, async_op=True)
        return Collective(work, what, self)

    def average_copies(self, own: torch.Tensor, reduced: Collective) -> Collective:
        """Start letting `own`, which `reduced` brings, be its mean over the ranks that have the same part; what is
        returned is waited for in place of `reduced`."""
        self.under_way.pop(reduced, None)
        with self.control.raising_peer_failed(reduced.what):
            work = _MeanOfCopies(reduced.work, own, self._copy_group, self._copy_stream)
        return Collective(work, reduced.what, self)

    def means(
        self, tensors: Sequence[torch.Tensor], dtype: torch.dtype, counted: "_Counted | None" = None
    ) -> Sequence[torch.Tensor]:
        """Return the means of the gradients `tensors` over all ranks in `dtype`, the same bits on each, by one
        collective over the parts and one over the copies.

        They are new tensors: the backward may go on with a gradient that it handed out, as that of a sum's other term.
        """
        numels = [tensor.numel() for tensor in tensors]
        flat = torch.empty(sum(numels), dtype=dtype, device=tensors[0].device)
        pieces = flat.split(numels)
        for piece, tensor in zip(pieces, tensors, strict=True):
            piece.copy_(tensor.reshape(-1))
        weigh_in(flat, self.weight)
        axes = (("all-reduce", self._shard_group, self.num_shards), ("average", self._copy_group, self.num_copies))
        for verb, group, num_ranks in axes:
            if num_ranks > 1:
                with nullcontext() if counted is None else counted.span(verb, flat.nbytes):
                    self._all_reduce(flat, group)
        return [mean.view(tensor.shape) for tensor, mean in zip(tensors, pieces, strict=True)]

    def _all_reduce(self, tensor: torch.Tensor, group: "distributed.ProcessGroup") -> None:
        def reduce() -> None:
            distributed.all_reduce(tensor, op=distributed.ReduceOp.AVG, group=group)

        with self.control.raising_peer_failed("gradients"):
            reduce() if tensor.device.type != "cpu" else apart(reduce)

    def mean_sums(
        self,
        positions: Sequence[int],
        grads: Sequence[torch.Tensor],
        dtype: torch.dtype,
        ledger: Ledger,
        name: str,
    ) -> tuple[Sequence[int], Sequence[torch.Tensor]]:
        """Return `positions` in their order, each once, and for each the mean over all ranks of the sum of its `grads`,
        in `dtype`: ranks whose graphs differ have them in another order and number. `ledger` counts the collectives of
        `name`."""
        sums: dict[int, torch.Tensor] = {}
        for position, grad in sorted(zip(positions, grads, strict=True), key=lambda pair: pair[0]):
            sums[position] = sums[position] + grad if position in sums else grad
        return list(sums), self.means(list(sums.values()), dtype, _Counted(ledger, name))

    def mean_part(self, grad: torch.Tensor, param: torch.Tensor, name: str) -> torch.Tensor:
        """Return what this rank has of the mean of `grad`, the whole gradient of `param`, over all ranks.

        Raises RanksDiffer where another rank has the gradient of another parameter than that called `name`.
        """
        self.control.check_same_op(name, "a gradient")
        (mean,) = self.means([grad], self.reduced_dtype(param))
        return part_like(mean, param)
