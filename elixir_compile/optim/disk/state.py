"""Optimizer state on disk: a file per bucket and statistic, with reads and writes by parameter.

    b1.exp_avg      |--- weight ---|- bias -|        the bucket's parameters in a row, at the same elements as in a slab
    b1.exp_avg_sq   |--- weight ---|- bias -|

Each file has the layout of its statistic, so the same element is at different bytes in different files.

`state[p]` is then a `DiskState`. Reading a statistic returns a new tensor, and assigning a statistic writes it; changes
of the returned tensor are not written. Other entries, such as the step count, are in memory.

If a write fails, or an update ends before its last piece, the state of the bucket is partly old and partly new. It
becomes invalid: every access raises DiskFailed until a checkpoint is loaded.
"""

import copy
import threading
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Set
from typing import Any

import torch
from torch import nn

from elixir_compile.base.errors import DiskFailed
from elixir_compile.graph.ops.shards import own_part
from elixir_compile.optim.layout import StatisticLayout
from elixir_compile.runtime.disk import disk_file
from elixir_compile.runtime.disk.disk_store import DiskRegion, DiskStore
from elixir_compile.runtime.disk.read_ahead import Piece
from elixir_compile.runtime.slab import ALIGN_BYTES, Slab

Kind = tuple[str, StatisticLayout]
"""The name and layout of a statistic; parameters of a bucket may keep it in different layouts."""
_ALIGN_NUMEL = 128
"""Parameters begin at multiples of so many elements in their files, which no block of a statistic crosses."""


class Extent:
    """A parameter's range of elements in each file of its bucket, and a meta tensor with its shape and strides."""

    def __init__(self, param: torch.Tensor, start: int) -> None:
        # Dense strides in the memory order of `param`, as in a slab.
        self.like = torch.empty_like(param, device="meta", memory_format=torch.preserve_format)
        self.start = start
        self.end = start + param.numel()

    def nbytes_in(self, piece: Piece, layouts: Iterable[StatisticLayout]) -> int:
        """Return the bytes of the parameter's statistics of `layouts` in `piece`."""
        numel = min(self.end, piece.end) - max(self.start, piece.start)
        return sum(layout.nbytes(max(numel, 0)) for layout in layouts)


class DiskHome:
    """A bucket's files in `store`, which hold the state of `params`."""

    def __init__(self, store: DiskStore, label: str, params: Iterable[torch.Tensor]) -> None:
        self.label = label
        self._store = store
        self._extents: dict[int, Extent] = {}
        self._numel = 0
        for param in params:
            # Aligned as in a slab, so that `coalesce` can join neighbours here too.
            step = max(ALIGN_BYTES // param.element_size(), _ALIGN_NUMEL)
            extent = Extent(own_part(param).detach(), -(-self._numel // step) * step)
            self._extents[id(param)], self._numel = extent, extent.end
        self._regions: dict[Kind, DiskRegion] = {}
        self._written: set[tuple[int, Kind]] = set()
        self._inside: set[int] = set()
        self.is_free = False
        """Whether the disk space was freed."""
        self._failure: BaseException | None = None
        self._lock = threading.Lock()

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Return the statistics on disk."""
        return tuple(self._regions)

    def require(self, kinds: Iterable[Kind]) -> None:
        """Allocate a file for each statistic in `kinds` that has none. Raises DiskFull if the disk is full."""
        for name, layout in kinds:
            if (name, layout) not in self._regions:
                region = self._store.allocate(f"{self.label}.{name}", layout.nbytes(self._numel))
                self._regions[name, layout] = region

    def fail(self, error: BaseException) -> None:
        """Mark the state as invalid because of `error`."""
        with self._lock:
            self._failure = self._failure or error

    def check(self, operation: str) -> None:
        """Raise DiskFailed if the state is invalid; `operation` names the operation in the error."""
        if self._failure is not None:
            because = (
                f"the optimizer state of {self.label} is partly old and partly new after an update that failed "
                f"({self._failure}). Checkpoints are not affected: load one"
            )
            raise DiskFailed(self._store.path, operation, because) from self._failure

    def extent(self, param: int) -> Extent:
        """Return the extent of the parameter with the id `param`."""
        return self._extents[param]

    def read(self, kind: Kind, param: int) -> torch.Tensor:
        """Read the statistic `kind` of the parameter with the id `param` into a new tensor."""
        self.check("read")
        extent, (_, layout) = self._extents[param], kind
        blocks, own, start_bytes = self._around(extent, layout)
        self._regions[kind].read_into(blocks, start_bytes).wait()
        found = layout.shaped(own, extent.like)
        return torch.empty_strided(found.shape, found.stride(), dtype=found.dtype, device="cpu").copy_(found)

    def write(self, kind: Kind, param: int, value: torch.Tensor) -> None:
        """Write `value` as the statistic `kind` of the parameter with the id `param`."""
        self.check("write")
        extent, region = self._extents[param], self._regions[kind]
        blocks, own, start_bytes = self._around(extent, kind[1])
        if blocks.nbytes > own.nbytes:
            region.read_into(blocks, start_bytes).wait()  # the first and last block may hold other parameters
        kind[1].shaped(own, extent.like).copy_(value)
        self._written.add((param, kind))
        try:
            region.write_from(blocks, start_bytes).wait()
        except BaseException as error:
            self.fail(error)
            raise

    def clear(self, kind: Kind, param: int) -> None:
        """Set the statistic `kind` of the parameter with the id `param` to zeros; no write if it was never written."""
        if (param, kind) in self._written:
            self.write(kind, param, torch.zeros((), dtype=kind[1].dtype, device="cpu"))

    @property
    def least_bytes(self) -> int:
        """Return the bytes in memory of the smallest possible piece."""
        return sum(layout.nbytes(self._unit) for _, layout in self._regions)

    def pieces(self, params: Iterable[int], nbytes: int) -> tuple[Piece, ...]:
        """Return the pieces that hold any of the parameters with the ids `params`, in file order.

        A piece takes at most `nbytes` of memory, but at least `least_bytes`.
        """
        stride = max(nbytes // max(self.least_bytes, 1), 1) * self._unit
        columns = [(region, layout.dtype.itemsize, layout.block) for (_, layout), region in self._regions.items()]
        extents = [self._extents[param] for param in params]
        found: list[Piece] = []
        for start in range(0, self._numel, stride):
            end = min(start + stride, self._numel)
            if any(extent.start < end and start < extent.end for extent in extents):
                found.append(Piece(columns, start, end, stride))
        return tuple(found)

    def note_update(self, params: Iterable[int]) -> None:
        """Record the statistics of `params` as written: `clear` must then write zeros."""
        self._written.update((param, kind) for param in params for kind in self._regions)

    def enter(self, param: int) -> None:
        """Record the state of the parameter with the id `param` as on disk."""
        self._inside.add(param)

    def leave(self, param: int) -> None:
        """Record the state of a parameter as removed from disk; free the files after the last parameter.

        No read or write of these files may be running.
        """
        self._inside.discard(param)
        if not self._inside:
            regions, self._regions, self.is_free = self._regions, {}, True
            for region in regions.values():
                self._store.free(region)

    @property
    def _unit(self) -> int:
        """Return the smallest number of elements that fills whole disk blocks in each file; sizes are powers of two."""
        blocks = [disk_file.DISK_BLOCK_BYTES * layout.block // layout.dtype.itemsize for _, layout in self._regions]
        return max(blocks, default=disk_file.DISK_BLOCK_BYTES)

    def _around(self, extent: Extent, layout: StatisticLayout) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Return memory for the disk blocks that hold `extent` in a file of `layout`, and a view of the extent in it.

        The third result is the byte of the file at which the blocks start.
        """
        block_bytes = disk_file.DISK_BLOCK_BYTES
        first_bytes = layout.nbytes(extent.start)
        last_bytes = first_bytes + layout.nbytes(extent.end - extent.start)
        start_bytes = first_bytes // block_bytes * block_bytes
        end_bytes = min(-(-last_bytes // block_bytes) * block_bytes, layout.nbytes(self._numel))
        nbytes = max(end_bytes - start_bytes, 0)
        slab = Slab(nbytes, pin=False)
        slab.keep_from_children()
        blocks = slab.tensor(torch.uint8, (nbytes,), 0)
        return blocks, blocks[first_bytes - start_bytes : last_bytes - start_bytes].view(layout.dtype), start_bytes


class DiskState(MutableMapping[str, Any]):
    """The state of a parameter: statistics on disk, other entries in memory."""

    def __init__(
        self, home: DiskHome, param: nn.Parameter, kinds: Mapping[str, StatisticLayout], in_memory: Mapping[str, Any]
    ) -> None:
        self.home = home
        self.param = id(param)
        self.kinds = dict(kinds)
        """The statistics with a file, and their layouts. Other parameters of the bucket may have more."""
        self.made: set[str] = set()
        """The existing statistics; an optimizer class may create a statistic at the first update, or later."""
        self.in_memory = dict(in_memory)
        """The entries in memory."""
        home.enter(self.param)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the existing statistics, in the order of `kinds`."""
        return tuple(name for name in self.kinds if name in self.made)

    def begin(self, name: str) -> None:
        """Create the statistic `name` as zeros."""
        self.home.clear((name, self.kinds[name]), self.param)
        self.made.add(name)

    def note_made(self, made: Set[str]) -> None:
        """Record that the statistics `made` exist after an update."""
        self.made |= made
        for name in made & self.in_memory.keys():
            del self.in_memory[name]

    def __getitem__(self, name: str) -> Any:
        return self.home.read((name, self.kinds[name]), self.param) if name in self.made else self.in_memory[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self.kinds and isinstance(value, torch.Tensor):
            self.home.write((name, self.kinds[name]), self.param, value)
            self.made.add(name)
            self.in_memory.pop(name, None)
        else:
            self.in_memory[name] = value
            self.made.discard(name)

    def __delitem__(self, name: str) -> None:
        if name in self.made:
            raise TypeError(f"{name} is on disk, where the plan wants it: it can be written, not deleted")
        del self.in_memory[name]

    def __contains__(self, name: object) -> bool:
        return name in self.made or name in self.in_memory

    def __iter__(self) -> Iterator[str]:
        yield from (*self.names, *self.in_memory)

    def __len__(self) -> int:
        return len(self.made) + len(self.in_memory)

    def __repr__(self) -> str:
        return f"DiskState({self.home.label}: {', '.join(self.names)} on disk, {self.in_memory})"

    # Copies and pickles are ordinary dicts in memory, because files belong to a single process.

    def __copy__(self) -> dict[str, Any]:
        return dict(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(dict(self), memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)
