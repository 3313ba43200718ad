"""One captured training step: its ops in execution order and the storages they touch.

A `StepGraph` joins the forward and the backward of one captured graph, followed by one `update` op per step
that reads every gradient. Memory is counted by storage, never by tensor: views share the storage of their base.
The order of `ops` is the order of execution.

A graph that was captured with dynamic shapes holds sizes twice: as bytes at the values that `symbols` lists, and as
text, `4*s0*s1*768`, from which `graph_at` evaluates the graph at other values.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from elixir_compile.errors import InvalidPlan
from elixir_compile.ir import sizes
from elixir_compile.ir.kinds import Kernel, Kind, OpId, Phase, StorageId
from elixir_compile.ir.words import commented, word, words
from elixir_compile.units import format_bytes

MOST_BYTES = 1 << 55
"""Of all storages of a graph, and of all that a plan counts: 32 PiB. Bytes are added up in 64 bits, some of them many
times."""
UPDATE_OP = OpId("update")
"""The one op of `Phase.UPDATE` of a training graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """One allocation of `nbytes` bytes."""

    id: StorageId
    nbytes: int
    kind: Kind
    dtype: str
    """As torch prints it, without the prefix: `float32`."""
    of: StorageId | None = None
    """For a GRAD storage: the PARAM storage it is the gradient of."""
    size: str = ""
    """`nbytes` as an expression of the graph's symbols (see `sizes`); empty for a size that is constant."""

    def __post_init__(self) -> None:
        if self.nbytes < 0:
            raise InvalidPlan(f"storage {self.id} has {self.nbytes} bytes; expected 0 or more.")
        if self.of is not None and self.kind is not Kind.GRAD:
            raise InvalidPlan(f"storage {self.id} is of kind {self.kind}; only a gradient is `of` a parameter.")

    def __str__(self) -> str:
        size = f"  size {word(self.size)}" if self.size else ""
        of = "" if self.of is None else f"  of {word(self.of)}"
        line = f"{word(self.id)}  {self.kind}  {word(self.dtype)}  {self.nbytes}{size}{of}"
        return commented(line, format_bytes(self.nbytes), column=44)


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One node of the captured graph."""

    id: OpId
    """Unique in the graph: `fwd.addmm_3`."""
    target: str
    """`aten.addmm.default`."""
    phase: Phase
    reads: tuple[StorageId, ...]
    writes: tuple[StorageId, ...]
    """Storages this op allocates or changes; a storage is allocated by the first op that writes it."""
    flops: int = 0
    moved_bytes: int = 0
    """Bytes read plus bytes written."""
    module: str = ""
    """Path of the module the op came from: `transformer.h.0.attn`."""
    source: str = ""
    """`file.py:line` of the user's code, where known."""
    flops_size: str = ""
    """`flops` as an expression of the graph's symbols; empty for a number that is constant."""
    kernel: Kernel = Kernel.OPAQUE
    """What of it a compiler can fuse; `analysis.fused` says what is then never written."""
    once: bool = False
    """Whether it must not run a second time: it draws random numbers, has an effect, or the user wants its result
    saved."""

    def __post_init__(self) -> None:
        if self.flops < 0 or self.moved_bytes < 0:
            raise InvalidPlan(
                f"op {self.id} has {self.flops} flops and {self.moved_bytes} moved bytes; expected 0 or more."
            )

    def __str__(self) -> str:
        parts = [f"{words(self.id, self.target)} {self.phase}"]
        parts += [f"reads {words(*self.reads)}"] if self.reads else []
        parts += [f"writes {words(*self.writes)}"] if self.writes else []
        parts += [f"flops {self.flops}"] if self.flops else []
        parts += [f"moved {self.moved_bytes}"] if self.moved_bytes else []
        parts += [f"module {word(self.module)}"] if self.module else []
        parts += [f"source {word(self.source)}"] if self.source else []
        parts += [f"size {word(self.flops_size)}"] if self.flops_size else []
        parts += [f"kernel {self.kernel}"] if self.kernel is not Kernel.OPAQUE else []
        parts += ["once"] if self.once else []
        return "  ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGraph:
    """Forward and backward of one captured graph, joined, in execution order."""

    name: str
    ops: tuple[Op, ...]
    storages: tuple[Storage, ...]
    outputs: tuple[StorageId, ...] = ()
    """Storages handed to the caller by the forward; they live at least until the forward ends."""
    aliases: tuple[tuple[str, StorageId], ...] = ()
    """(value name, storage) for every captured value that is not the first name of its storage: views, in-place
    results, outputs that alias inputs."""
    symbols: tuple[tuple[str, int], ...] = ()
    """Each symbol of the sizes with the value at which bytes and flops are given, in the order of the inputs."""

    def __hash__(self) -> int:
        """Of a few fields: what is remembered by graph is looked up hundreds of times in a search, and hashing every op
        of 3,000 takes 4 ms."""
        return hash((self.name, len(self.ops), len(self.storages), self.outputs))

    def __post_init__(self) -> None:
        ids = {storage.id for storage in self.storages}
        if len(ids) != len(self.storages):
            raise InvalidPlan(
                f"graph {self.name} has two storages of one name: {_repeated([s.id for s in self.storages])}."
            )
        if len({op.id for op in self.ops}) != len(self.ops):
            raise InvalidPlan(f"graph {self.name} has two ops of one name: {_repeated([op.id for op in self.ops])}.")
        for op in self.ops:
            if not ids.issuperset(op.reads) or not ids.issuperset(op.writes):
                unknown = next(name for name in (*op.reads, *op.writes) if name not in ids)
                raise InvalidPlan(f"op {op.id} names the storage {unknown}, which graph {self.name} does not have.")
        _check_phases(self)
        _check_total(self)
        _check_sizes(self)
        named = [*self.outputs, *(name for _, name in self.aliases), *(s.of for s in self.storages if s.of is not None)]
        for name in named:
            if name not in ids:
                raise InvalidPlan(
                    f"an output, alias or gradient names the storage {name}, which graph {self.name} does not have."
                )

    def __str__(self) -> str:
        lines = [commented(f"graph {word(self.name)}", f"{len(self.ops)} ops, {len(self.storages)} storages")]
        lines += ["symbols", *(f"  {word(name)} {value}" for name, value in self.symbols)] if self.symbols else []
        lines += ["storages", *(f"  {storage}" for storage in self.storages)]
        lines += ["outputs", *(f"  {word(name)}" for name in self.outputs)]
        lines += ["aliases", *(f"  {words(value, name)}" for value, name in self.aliases)]
        lines += ["ops", *(f"  {op}" for op in self.ops)]
        return "\n".join(lines)


def graph_at(graph: StepGraph, values: Mapping[str, int]) -> StepGraph:
    """Return `graph` with its bytes and flops at other `values` of its symbols; those not named keep theirs.

    Raises InvalidPlan for a symbol that the graph does not have.
    """
    here = dict(graph.symbols)
    unknown = [name for name in values if name not in here]
    if unknown:
        known = ", ".join(here) or "none"
        raise InvalidPlan(f"graph {graph.name} has no symbol {unknown[0]}; its symbols are: {known}.")
    there = {**here, **values}
    texts = {storage.size for storage in graph.storages} | {op.flops_size for op in graph.ops}
    at = {text: sizes.evaluate(text, there) for text in texts if text}
    grown = {storage.id: at[storage.size] - storage.nbytes for storage in graph.storages if storage.size}

    def moved(op: Op) -> int:
        return max(0, op.moved_bytes + sum(grown.get(name, 0) for name in (*op.reads, *op.writes)))

    return replace(
        graph,
        ops=tuple(replace(op, flops=at.get(op.flops_size, op.flops), moved_bytes=moved(op)) for op in graph.ops),
        storages=tuple(replace(storage, nbytes=at.get(storage.size, storage.nbytes)) for storage in graph.storages),
        symbols=tuple(there.items()),
    )


def _repeated(names: Sequence[str]) -> str:
    return next(name for number, name in enumerate(names) if name in names[:number])


def _check_total(graph: StepGraph) -> None:
    total_bytes = sum(storage.nbytes for storage in graph.storages)
    if total_bytes > MOST_BYTES:
        raise InvalidPlan(f"graph {graph.name} has storages of {total_bytes} bytes; expected at most {MOST_BYTES}.")


def _check_sizes(graph: StepGraph) -> None:
    """Texts and numbers must agree at the values of `symbols`."""
    values = dict(graph.symbols)
    if len(values) != len(graph.symbols) or any(value < 0 for value in values.values()):
        raise InvalidPlan(f"graph {graph.name} has the symbols {graph.symbols}: each once, with 0 or more.")
    stated = {(storage.size, storage.nbytes) for storage in graph.storages if storage.size}
    stated |= {(op.flops_size, op.flops) for op in graph.ops if op.flops_size}
    for text, number in sorted(stated):
        sizes.check_text(text)
        if sizes.evaluate(text, values) != number:
            raise InvalidPlan(
                f"graph {graph.name} says that {text} is {number} at {values}; it is {sizes.evaluate(text, values)}."
            )


def _check_phases(graph: StepGraph) -> None:
    order = [Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE]
    previous = 0
    for op in graph.ops:
        current = order.index(op.phase)
        if current < previous:
            raise InvalidPlan(f"op {op.id} of the {op.phase} comes after the {order[previous]} began.")
        previous = current
    updates = [op.id for op in graph.ops if op.phase is Phase.UPDATE]
    if updates not in ([], [UPDATE_OP]):
        raise InvalidPlan(
            f"graph {graph.name} has the update ops {updates}; expected at most one, named `{UPDATE_OP}`."
        )


@functools.cache
def layer_of(module: str) -> str:
    """Return `transformer.h.3` for `transformer.h.3.attn.c_proj`, and a path without a number as it is."""
    parts = module.split(".")
    for i, part in enumerate(parts):
        if part.isdecimal():
            return ".".join(parts[: i + 1])
    return module


def is_numbered(layer: str) -> bool:
    """Return whether `layer` is one of several alike."""
    return layer.rpartition(".")[2].isdecimal()
