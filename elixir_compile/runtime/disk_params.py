"""Parameters whose home is the disk: frozen ones in the file that they were loaded from, all others in a file of their
own."""

import bisect
import functools
import os
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from elixir_compile.base.errors import DiskFailed, FrozenChanged, InvalidOption
from elixir_compile.graph.ops.registry import version
from elixir_compile.graph.ops.shards import rehome
from elixir_compile.ir.cost import GATHER_STAGING_BYTES
from elixir_compile.runtime.bucket import ALIGN_BYTES, MappedByOthers, RunningBucket, Slab, cut_slab, flat, has_moved
from elixir_compile.runtime.disk_file import DISK_PAGE_BYTES, READ
from elixir_compile.runtime.disk_store import DiskRegion, Piece, open_file, staging_buffers, store_at

# ----------------------------------------------------------------------------------------------------------------------
# The bytes of parameters in files.
#
#     checkpoint   ..|--- weight ---|.|- bias -|..     frozen: the file that the parameter's memory maps
#     b3.param     |--- weight ---|- bias -|           else a file of the bucket, written when it is placed
#
# `param.data` maps the file in both cases. It takes no memory of its own, and state dicts, exports and eager code read
# the parameter as before. Gathers read the file by O_DIRECT, past the page cache, which would otherwise hold the model
# once more.
#
# The file of trained parameters is one more column of the files that hold their state (`optim.disk`): the same element
# is at the same place in all of them, so a piece of an update has a stretch of every column. A gather waits for the
# update, and reads what it has written.
#
# Of several ranks, each has files with its own shards, which a gather reads to the device and sends from there:
#
#     b3.param     |--- shard of weight ---| . |- of bias -|       each begins where its state does
#     flat copy    |--- shard of weight ---|- of bias -|           as in memory: see `distributed.sharded`


@dataclass(frozen=True, slots=True)
class FileRange:
    """Bytes of a file that are mapped to memory: `nbytes` from `start_bytes` on."""

    path: str
    start_bytes: int
    nbytes: int


class _Mapped(NamedTuple):
    """A range of addresses that maps a file."""

    start: int
    end: int
    path: str
    offset_bytes: int


def _mapped_files() -> list[_Mapped]:
    """Return the files that this process maps, by address; empty where the kernel does not say, as on macOS."""
    found: list[_Mapped] = []
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as lines:
            for line in lines:
                addresses, _, offset, _, inode, *path = line.split(maxsplit=5)
                if inode != "0" and path:
                    start, end = (int(address, 16) for address in addresses.split("-"))
                    found.append(_Mapped(start, end, path[0].rstrip("\n"), int(offset, 16)))
    except OSError:
        return []
    return found


def file_ranges(tensors: Iterable[torch.Tensor]) -> list[FileRange | None]:
    """Return for each of the dense `tensors` the range of the file that its memory maps, or None.

    A mapping is private as a rule, so the memory may differ from the file where it was written: compare them.
    """
    mapped = _mapped_files()
    starts = [own.start for own in mapped]
    found: list[FileRange | None] = []
    for tensor in tensors:
        address, nbytes = tensor.data_ptr(), tensor.numel() * tensor.element_size()
        before = bisect.bisect_right(starts, address) - 1
        own = mapped[before] if tensor.device.type == "cpu" and nbytes and before >= 0 else None
        is_inside = own is not None and address + nbytes <= own.end and os.path.isfile(own.path)
        found.append(FileRange(own.path, own.offset_bytes + address - own.start, nbytes) if own and is_inside else None)
    return found


class Stretch(NamedTuple):
    """Bytes of the flat copy of a bucket, from `to_bytes` on: `nbytes` of `region` from `start_bytes` on."""

    region: DiskRegion
    start_bytes: int
    nbytes: int
    to_bytes: int


def pieces_of(stretches: Sequence[Stretch]) -> "Iterator[ParamPiece]":
    """Yield the pieces in which `stretches`, which follow each other in a region, are read: each in whole pages and
    small enough for a staging buffer."""
    first = stretches[0].start_bytes // DISK_PAGE_BYTES * DISK_PAGE_BYTES
    for start in range(first, stretches[-1].start_bytes + stretches[-1].nbytes, GATHER_STAGING_BYTES):
        yield ParamPiece(stretches, start)


class ParamPiece(Piece):
    """Some pages of a region that hold bytes of `stretches`."""

    def __init__(self, stretches: Sequence[Stretch], start_bytes: int) -> None:
        region, last_bytes = stretches[0].region, stretches[-1].start_bytes + stretches[-1].nbytes
        needed_end = min(start_bytes + GATHER_STAGING_BYTES, last_bytes)
        end = min(-(-needed_end // region.unit_bytes) * region.unit_bytes, region.nbytes)
        super().__init__([(region, 1, 1)], start_bytes, end, GATHER_STAGING_BYTES)
        self._moves = [
            (slice(to_bytes + begin - first, to_bytes + end - first), slice(begin - start_bytes, end - start_bytes))
            for _, first, nbytes, to_bytes in stretches
            if (begin := max(first, start_bytes)) < (end := min(first + nbytes, needed_end))
        ]

    @property
    def nbytes(self) -> int:
        """The bytes that are read, in whole pages."""
        return self.end - self.start

    def parts(self, views: Sequence[torch.Tensor]) -> "Iterator[tuple[slice, torch.Tensor]]":
        """Yield where bytes of parameters are in the flat copy, and these bytes in `views`, of `ReadAhead.take`."""
        return ((target, views[0][own]) for target, own in self._moves)


ALIGN_NUMEL = 128
"""Trained parameters begin at multiples of so many elements in their files, which no block of a statistic crosses."""


def extents(tensors: Iterable[torch.Tensor]) -> Iterator[tuple[int, int]]:
    """Yield for each of `tensors`, the parameters of a bucket, its first element in the files of the bucket, and the
    one past its last."""
    end = 0
    for tensor in tensors:
        # Aligned as in a slab, so that `optim.adamw_rule.coalesce` can join neighbours here too.
        step = max(ALIGN_BYTES // tensor.element_size(), ALIGN_NUMEL)
        start = -(-end // step) * step
        end = start + tensor.numel()
        yield start, end


class ParamFile:
    """What is known of the values of a bucket in files; an update on another thread holds it in place of the bucket."""

    def __init__(self, label: str) -> None:
        self.region: DiskRegion | None = None
        """The bucket's own file; None if the parameters are in the files that they were loaded from."""
        self.num_changes = 0
        """How often the values were placed or updated: pieces that were read before hold earlier values."""
        self.failure: BaseException | None = None
        """Why the values are partly old and partly new; None if they are not."""
        self._label = label
        self._versions: dict[int, int] = {}

    def note(self, params: Iterable[torch.Tensor]) -> None:
        """Note that the file has the present values of `params`."""
        self._versions |= {id(param): version(param) for param in params}

    def has(self, param: torch.Tensor) -> bool:
        """Return whether `param` was not written since `note`; True for one that was never noted."""
        return self._versions.get(id(param)) in (None, version(param))

    def check(self) -> None:
        """Raise DiskFailed if the values are partly old and partly new."""
        if self.failure is not None and self.region is not None:
            because = (
                f"the parameters of {self._label} are partly old and partly new after an update that failed "
                f"({self.failure}). Checkpoints are not affected: load one"
            )
            raise DiskFailed(self.region.path, "read", because) from self.failure

    def begin_update(self) -> None:
        """Note that the values change from now on."""
        self.num_changes += 1

    def end_update(self, params: Sequence[torch.Tensor], *, in_file: bool) -> None:
        """Let readers see the new values of `params`; they were written to the file if `in_file`, else to its
        mapping."""
        torch.autograd.graph.increment_version(params)
        if in_file:
            self.note(params)
        self.num_changes += 1


class DiskBucket(RunningBucket):
    """A bucket of parameters whose home is the disk. Each of several ranks has its own shards there."""

    _stretches: tuple[tuple[Stretch, ...], ...] = ()
    """Where the parameters are, in groups that are read together."""
    _addresses: tuple[int, ...] = ()
    _own_file: Slab | None = None
    """The mapping of the bucket's own file; None if the parameters are in the files that they were loaded from."""
    _loaded: MappedByOthers | None = None
    """The mappings of the files that the parameters were loaded from."""

    @functools.cached_property
    def file(self) -> ParamFile:
        """What is known of the values in files."""
        return ParamFile(str(self.spec.id))

    def move_home(self, device: torch.device) -> None:
        """Find frozen parameters in the files that they were loaded from, or write all to a file of their own.

        Raises InvalidOption if a file is needed and the option `disk_path` is not set, DiskFull if the disk is full,
        UnsupportedModel if a parameter was cast after its slot was made, and DiskFailed if an update has failed and
        not all parameters were written since, as by loading a checkpoint.
        """
        for slot in self.slots:
            slot.check_form()
        if self.file.failure is not None and any(self._are_kept()):
            self.file.check()
        self.gathered = None
        has_bytes = any(slot.own_nbytes for slot in self.slots)  # else all are other ranks'
        reads_loaded = self.reads_loaded_files and not self.spec.trainable
        stretches = () if not has_bytes else self._loaded_from() if reads_loaded else None
        if stretches is None:
            stretches = self._written()
        else:
            self._own_file = self.file.region = None
        self._stretches = stretches
        self.file.num_changes += 1
        self.file.failure = None
        self._addresses = tuple(slot.own.data_ptr() for slot in self.slots)
        self._loaded = None  # before others of the same addresses are noted
        if self._own_file is None:
            sizes = (slot.own_nbytes for slot in self.slots)
            self._loaded = MappedByOthers(zip(self._addresses, sizes, strict=True))
        self.file.note(slot.param for slot in self.slots)
        self.move_gradients(device)

    def has_drifted(self) -> bool:
        """Whether a new file follows: user code replaced the data of a parameter or wrote to a frozen one, or an update
        failed and all parameters were written since. A write to a trained one is settled before the next read."""
        if self.file.failure is not None:
            return not any(self._are_kept())
        if self.spec.trainable:
            pairs = zip(self.slots, self._addresses, strict=True)
            return any(has_moved(slot.own, address) for slot, address in pairs)
        return not all(self._are_kept())

    def _are_kept(self) -> Iterator[bool]:
        """Yield for each parameter whether its value is that of the file."""
        for slot, address in zip(self.slots, self._addresses, strict=True):
            yield self.file.has(slot.param) and not has_moved(slot.own, address)

    def check_unchanged(self) -> None:
        """Raise FrozenChanged if a frozen parameter was written in this step, and FrozenFileChanged if somebody else
        wrote to the file that the parameters were loaded from."""
        if self.spec.trainable:
            return
        for slot in self.slots if self._stretches else ():
            if not self.file.has(slot.param):
                raise FrozenChanged(slot.name, self._stretches[0][0].region.path)
        for file in {stretch.region.file for own in self._stretches for stretch in own}:
            file.check_unchanged()

    def settle(self) -> None:
        """Wait for the queued update, and let the file follow what users have written to trained parameters.

        Raises DiskFailed if an update has left the parameters partly old and partly new. A failed update is raised by
        the thread that trains.
        """
        if not self.spec.trainable:
            return
        self.queued.join()
        self.file.check()
        params = [slot.param for slot in self.slots]
        if self.file.region is not None and not all(map(self.file.has, params)):
            self.file.region.file.check_whole(READ)
            self._fill(self.file.region)
            self.file.note(params)
            self.file.num_changes += 1

    def pieces(self) -> list[ParamPiece]:
        """Return the pieces of a gather, in file order."""
        return [piece for stretches in self._stretches for piece in pieces_of(stretches)]

    def _loaded_from(self) -> tuple[tuple[Stretch, ...], ...] | None:
        """Return where the parameters are in the files that their memory maps; None unless all of them have the same
        bytes there."""
        kept = [(slot, at) for slot, at in zip(self.slots, self._offsets_bytes, strict=True) if slot.own_nbytes]
        tensors = [slot.own.detach() for slot, _ in kept]
        own_path = None if self._own_file is None else self._stretches[0][0].region.path
        ranges = [own for own in file_ranges(tensors) if own is not None and own.path != own_path]
        if len(ranges) < len(tensors):
            return None
        regions = {path: open_file(path) for path in dict.fromkeys(own.path for own in ranges)}
        found = [
            Stretch(regions[own.path], own.start_bytes, own.nbytes, to_bytes)
            for own, (_, to_bytes) in zip(ranges, kept, strict=True)
        ]
        (buffer,) = staging_buffers(1, GATHER_STAGING_BYTES)
        for stretch, tensor in zip(found, tensors, strict=True):
            memory = flat(tensor).view(torch.uint8)
            for piece in pieces_of([stretch]):
                ((region, view, start_bytes),) = piece.transfers(buffer)
                region.read_into(view, start_bytes).wait()
                for target, own in piece.parts([view]):
                    if not torch.equal(own, memory[target.start - stretch.to_bytes : target.stop - stretch.to_bytes]):
                        return None
        return tuple((stretch,) for stretch in found)

    def _written(self) -> tuple[tuple[Stretch, ...], ...]:
        """Write the parameters to a file of the bucket, which their memory maps from now on."""
        if self.disk is None:
            because = "and not all of them are in files that they were loaded from, with the same values"
            wanted = f"a folder, as the plan keeps the parameters of {self.spec.id} on disk, {because}"
            raise InvalidOption("disk_path", None, wanted)
        path, check = self.disk
        store = store_at(path, check=check)
        starts_bytes, nbytes = self._places()
        region = store.allocate(f"{self.spec.id}.param", nbytes)
        weakref.finalize(region, store.free, region.file).atexit = False
        self._fill(region)
        self._own_file, self.file.region = region.file.map(), region
        for slot, home in zip(self.slots, cut_slab(self._own_file, self.slots, starts_bytes), strict=True):
            rehome(slot.param, home)
        if not self.spec.is_sharded:
            return ((Stretch(region, 0, nbytes, 0),),)
        placed = zip(self.slots, starts_bytes, self._offsets_bytes, strict=True)
        return (tuple(Stretch(region, start, slot.own_nbytes, at) for slot, start, at in placed if slot.own_nbytes),)

    def _fill(self, region: DiskRegion) -> None:
        """Write the parameters to `region`, a file of the bucket."""
        sources = [flat(slot.own).view(torch.uint8) for slot in self.slots]
        (buffer,) = staging_buffers(1, GATHER_STAGING_BYTES)
        for piece in pieces_of([Stretch(region, 0, region.nbytes, 0)]):
            ((_, view, start_bytes),) = piece.transfers(buffer)
            for source, offset in zip(sources, self._places()[0], strict=True):
                begin, end = max(start_bytes, offset), min(start_bytes + len(view), offset + len(source))
                if begin < end:
                    view[begin - start_bytes : end - start_bytes].copy_(source[begin - offset : end - offset])
            region.write_from(view, start_bytes).wait()

    def _layout(self) -> tuple[tuple[int, ...], int]:
        return super()._layout() if self.spec.is_sharded else self._places()

    def _places(self) -> tuple[tuple[int, ...], int]:
        """Return the offset of each parameter in a file of the bucket, and the size of the file, all in bytes: where
        its state is in other files, and as in a slab if all ranks have the whole frozen parameters, of any dtypes."""
        if not self.spec.trainable and not self.spec.is_sharded:
            return super()._layout()
        places = list(extents(slot.own for slot in self.slots))
        size_bytes = self.slots[0].param.element_size()
        return tuple(start * size_bytes for start, _ in places), places[-1][1] * size_bytes
