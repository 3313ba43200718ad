"""Count the bytes and the launches of a step whose laps run in micro-batches.

The result is a step with the same ops, so all that counts a step (liveness, windows, timelines, simulation, search)
counts a divided step too. For a lap in n micro-batches:

```text
  slices inside of the lap            the bytes of one micro-batch
  slices read from outside            whole; live until the lap ends
  slices made here, read outside      whole, live from the first op of the lap on; and the part of one micro-batch
  slices that stay in parts           all parts, from the op that makes them on; before it, all parts but one (see
                                      `step.parts`)
  slices that leave in slices         the slice that leaves, live from the first op of the lap on; and the part of one
                                      micro-batch (see `step.slices`)
  slices that arrive in slices        the slice that is read; and the next slice, live during the whole lap
  equal for all, made and read here   live from the first to the last op of the lap
  a sum made here                     live from the first op on, in fp32 if the sum has 16 bits; and the part of one
                                      micro-batch
  parameters                          read by the first and the last op of the lap
```

An op of the lap launches n times. It moves the slices once, and all else n times. The last op of the lap also moves
what fills whole tensors with slices and adds up parts.

A batch with a dynamic number of rows runs in at most n micro-batches. A slice then has the bytes of the largest
micro-batch of any batch of at most as many rows (`ir.rows`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from elixir_compile.ir import Activations, Batched, Kind, Op, Phase, StepGraph, Storage, StorageId, sizes
from elixir_compile.ir.rows import rows_of_micro_batches
from elixir_compile.step.laps import Lap
from elixir_compile.step.parts import earlier_name, parts_of, tangents_of_step
from elixir_compile.step.slices import Slices, arrived_name, leaving_name, next_name, slices_of

PART, TOTAL = ".part", ".total"
"""Suffixes of the storages that a lap adds: the part of one micro-batch, and the fp32 sum of 16-bit parts."""
_SHORT = ("bfloat16", "float16")
_MADE = (Kind.TEMP, Kind.WORKSPACE, Kind.SAVED, Kind.GRAD)


def divided(step: StepGraph, laps: Sequence[Lap], activations: Sequence[Activations] = ()) -> StepGraph:
    """Return `step`, ops as they run with `activations`, with each of `laps` run in its micro-batches.

    A lap that names no ops of `step` changes nothing: `check_regions` refuses its region.
    """
    index = {op.id: number for number, op in enumerate(step.ops)}
    touched = _touched(step)
    tangents = tangents_of_step(step)
    outputs = frozenset(step.outputs)
    storages = {storage.id: storage for storage in step.storages}
    symbols = dict(step.symbols)
    slices = slices_of(step, laps, activations)
    parts = parts_of(step, laps, activations, slices)
    ops = list(step.ops)
    for lap in laps:
        first, last = index.get(lap.first, len(ops)), index.get(lap.last, -1)
        if lap.micro_batches == 1 or last < first:
            continue
        num = len(rows_of_micro_batches(step.batch, lap.micro_batches)) if step.batch_size else lap.micro_batches
        cut = _Cut(num, lap.micro_batches, step.batch_size, symbols)
        lap_ops = step.ops[first : last + 1]
        writer = _LapWriter(lap_ops, num, cut, storages, touched, first, outputs, tangents, slices, parts)
        ops[first : last + 1] = writer.written()
    return replace(step, ops=tuple(ops), storages=tuple(storages.values()))


def _touched(step: StepGraph) -> Mapping[StorageId, tuple[int, int, int]]:
    """Return for each storage the indices of the first op that writes it, and of the first and last op that touch it.

    A storage that no op writes has the number of ops as its first write.
    """
    found: dict[StorageId, tuple[int, int, int]] = {}
    for i, op in enumerate(step.ops):
        for name in (*op.reads, *op.writes):
            made, first, _ = found.get(name, (len(step.ops), i, i))
            found[name] = (min(made, i) if name in op.writes else made, first, i)
    return found


@dataclass(frozen=True, slots=True)
class _Cut:
    """How the slices of a lap are cut."""

    num: int
    """The number of micro-batches."""
    most: int
    """The number of micro-batches that the plan states, an upper limit if the number of rows is dynamic."""
    rows: str
    """The symbol of the number of rows; empty if it is constant."""
    symbols: Mapping[str, int]

    def slice_of(self, storage: Storage) -> Storage:
        """Return `storage` with the bytes of one micro-batch."""
        if not storage.size:
            return replace(storage, nbytes=-(-storage.nbytes // self.num))
        if self.rows:
            size = sizes.of_micro_batch(storage.size, self.rows, self.most)
        else:
            size = sizes.divided(storage.size, self.num)
        return replace(storage, nbytes=sizes.evaluate(size, self.symbols), size=size)


@dataclass(slots=True)
class _LapWriter:
    """Writes the ops of one lap as they run in micro-batches; adds its storages to `storages`, or changes them."""

    ops: Sequence[Op]
    num: int
    """The number of micro-batches."""
    cut: _Cut
    storages: dict[StorageId, Storage]
    touched: Mapping[StorageId, tuple[int, int, int]]
    start: int
    """The index of the first op of the lap in its step."""
    outputs: frozenset[StorageId]
    """Storages that the forward returns to the caller."""
    tangents: frozenset[StorageId]
    """Storages written by the first op of the backward that come from the caller."""
    slices: Slices
    """Storages that leave the device or arrive on it in slices."""
    parts: frozenset[StorageId]
    """Storages that stay in parts if other laps read them."""
    reads: list[list[StorageId]] = field(default_factory=list)
    writes: list[list[StorageId]] = field(default_factory=list)
    filled_bytes: int = 0
    """Bytes that fill whole tensors and add up parts."""

    def written(self) -> list[Op]:
        """Return the ops of the lap, with more reads and writes, and with the bytes that they move in the step."""
        moved = [self._moved(op) for op in self.ops]
        self.reads, self.writes = [list(op.reads) for op in self.ops], [list(op.writes) for op in self.ops]
        names = dict.fromkeys(name for op in self.ops for name in (*op.reads, *op.writes))
        for name in names:
            self._place(self.storages[name])
        moved[-1] = (moved[-1][0] + self.filled_bytes, moved[-1][1])
        rows = zip(self.ops, self.reads, self.writes, moved, strict=True)
        return [_as_cut(op, reads, writes, nbytes, times) for op, reads, writes, (nbytes, times) in rows]

    def _moved(self, op: Op) -> tuple[int, int]:
        """Return the bytes that `op` moves in a step, and how many times it runs."""
        touched = [self.storages[name] for name in dict.fromkeys((*op.reads, *op.writes))]
        if not is_repeated(op, self.storages):
            return op.moved_bytes, 1
        if op.flops == 0 and op.moved_bytes == 0:
            return 0, self.num
        again_bytes = sum(storage.nbytes for storage in touched if storage.batched is not Batched.EACH)
        return op.moved_bytes + (self.num - 1) * again_bytes, self.num

    def _place(self, storage: Storage) -> None:
        if storage.id in self.slices.leaving and self.ops[0].phase is Phase.FORWARD:
            self._place_leaving(storage)
            return
        if storage.id in self.slices.arriving and self.ops[0].phase is Phase.BACKWARD:
            self._place_arriving(storage)
            return
        made, first, last = self.touched[storage.id]
        end = self.start + len(self.ops)
        is_made = storage.kind in _MADE and self.start <= made < end and first >= self.start
        is_made = is_made and storage.id not in self.tangents
        is_inside = is_made and last < end and storage.id not in self.outputs and storage.kind is not Kind.GRAD
        if not is_made:
            self._read_until_end(storage.id)
            if storage.kind is Kind.PARAM:
                self.reads[0].append(storage.id)
        elif storage.batched is Batched.EACH:
            self._place_slices(storage, made - self.start, is_inside=is_inside)
        elif storage.batched is Batched.SUM:
            self._place_sum(storage, made - self.start)
        elif not is_inside or any(storage.id in op.reads and is_repeated(op, self.storages) for op in self.ops):
            # Computed before the first micro-batch, and read by all of them.
            self.writes[0].append(storage.id)
            self._read_until_end(storage.id)

    def _place_slices(self, storage: Storage, maker: int, *, is_inside: bool) -> None:
        part = self.cut.slice_of(storage)
        if is_inside:
            self.storages[storage.id] = part
            return
        self._read_until_end(storage.id)
        if storage.id in self.parts:
            self._place_parts(storage, storage.nbytes - part.nbytes, maker)
            return
        self.filled_bytes += 2 * storage.nbytes
        self.writes[0].append(storage.id)
        self._add(part, PART, maker)

    def _place_parts(self, storage: Storage, earlier_bytes: int, maker: int) -> None:
        """Place the parts of `storage` that are there, in the last micro-batch, before the op `maker` makes its part:
        `earlier_bytes` together."""
        if maker > 0:
            name = earlier_name(storage.id)
            self.storages[name] = replace(storage, id=name, nbytes=earlier_bytes, size="", kind=Kind.TEMP)
            self.writes[0].append(name)
            self.reads[maker - 1].append(name)

    def _place_leaving(self, storage: Storage) -> None:
        """Place the slice of `storage`, made in this lap, that is on its way to the host while the next is made."""
        name, part = leaving_name(storage.id), self.cut.slice_of(storage)
        maker = next(i for i, op in enumerate(self.ops) if storage.id in op.writes)
        self._rename(storage.id, name)
        self.storages[name] = replace(part, id=name, kind=Kind.TEMP)
        self.filled_bytes += 2 * storage.nbytes
        self.writes[0].append(name)
        self._read_until_end(name)
        self._add(part, PART, maker)

    def _place_arriving(self, storage: Storage) -> None:
        """Place the slice of `storage` that this lap reads, and the slice that arrives meanwhile."""
        part = self.cut.slice_of(storage)
        self._rename(storage.id, arrived_name(storage.id))
        for name in (arrived_name(storage.id), next_name(storage.id)):
            self.storages[name] = replace(part, id=name, kind=Kind.TEMP)
        self.writes[0].append(next_name(storage.id))
        self._read_until_end(next_name(storage.id))

    def _rename(self, name: StorageId, new: StorageId) -> None:
        """Let the ops of the lap read and write `new` instead of `name`."""
        for names in (*self.reads, *self.writes):
            names[:] = [new if other == name else other for other in names]

    def _place_sum(self, storage: Storage, maker: int) -> None:
        self.filled_bytes += 3 * (self.num - 1) * storage.nbytes
        self._add(storage, PART, maker)
        self._read_until_end(storage.id)
        if storage.dtype not in _SHORT:
            self.writes[0].append(storage.id)
            return
        # The sum in 16 bits is rounded from the fp32 sum after the last micro-batch.
        self.writes[maker].remove(storage.id)
        self.writes[-1].append(storage.id)
        for reads in self.reads[:-1]:
            while storage.id in reads:
                reads.remove(storage.id)
        size = sizes.times(storage.size, 2) if storage.size else ""
        self._add(replace(storage, nbytes=2 * storage.nbytes, size=size), TOTAL, 0)

    def _add(self, like: Storage, suffix: str, maker: int) -> None:
        """Add a temporary storage of the bytes of `like` that lives from the op `maker` of the lap to its end."""
        name = StorageId(f"{like.id}{suffix}")
        self.storages[name] = replace(like, id=name, kind=Kind.TEMP, of=None)
        self.writes[maker].append(name)
        self._read_until_end(name)

    def _read_until_end(self, name: StorageId) -> None:
        self.reads[-1].append(name)


def _as_cut(op: Op, reads: Sequence[StorageId], writes: Sequence[StorageId], moved_bytes: int, times: int) -> Op:
    # Not `replace`, which takes twice as long: to price a step in 12 numbers of micro-batches makes 130,000 ops.
    return Op(
        id=op.id,
        target=op.target,
        phase=op.phase,
        reads=tuple(dict.fromkeys(reads)),
        writes=tuple(dict.fromkeys(writes)),
        flops=op.flops,
        moved_bytes=moved_bytes,
        module=op.module,
        source=op.source,
        flops_size=op.flops_size,
        kernel=op.kernel,
        once=op.once,
        mixes=op.mixes,
        ring=op.ring,
        launches=op.launches,
        times=times,
    )


def is_repeated(op: Op, storages: Mapping[StorageId, Storage]) -> bool:
    """Return whether `op`, of a divided lap, runs once per micro-batch.

    An op that reads only values equal for all micro-batches runs once, before the first of them. An op that makes such
    a value of sums runs once, behind the last.
    """
    if any(storages[name].batched is not Batched.SAME for name in op.writes):
        return True
    return not op.writes or any(storages[name].batched is Batched.EACH for name in op.reads)
