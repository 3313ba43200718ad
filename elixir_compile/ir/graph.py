"""Graphs of captured training steps: ops in execution order, and the storages they touch.

A `StepGraph` joins the forward and the backward of a captured graph, followed by an `update` op that reads every
gradient. Memory is counted by storage, not by tensor: views share the storage of their base.

A graph with dynamic shapes holds each size twice: as bytes at the values in `symbols`, and as text such as
`4*s0*s1*768`, from which `graph_at` computes the graph at other values.
"""

import functools
import itertools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from elixir_compile.base.codec import LEFT_OUT
from elixir_compile.base.errors import InvalidPlan
from elixir_compile.base.units import format_bytes
from elixir_compile.ir import sizes
from elixir_compile.ir.kinds import Batched, Kernel, Kind, OpId, Phase, StorageId, commented, word, words

MOST_BYTES = 1 << 55
"""The most bytes of all storages of a graph, and of everything a plan counts: 32 PiB. Bytes are added up in 64 bits,
some of them many times."""
UPDATE_OP = OpId("update")
"""The only op of `Phase.UPDATE` in a training graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """An allocation of `nbytes` bytes."""

    id: StorageId
    nbytes: int
    kind: Kind
    dtype: str
    """As torch prints it, without the prefix: `float32`."""
    of: StorageId | None = None
    """For a GRAD storage: the PARAM storage of its parameter."""
    size: str = ""
    """`nbytes` as an expression of the graph's symbols (see `sizes`); empty if the size is constant."""
    batched: Batched = field(default=Batched.SAME, metadata=LEFT_OUT)
    """How the values in this storage are made of those of the micro-batches. Two views of a storage may have their
    slices along different dimensions, so a dimension belongs to a node of a capture: see `graph.capture.batch`."""
    consecutive: bool = field(default=False, metadata=LEFT_OUT)
    """Whether the slices of the micro-batches are consecutive pieces of the storage, of equal size, in all its views.
    Only then can a slice be alone in memory."""
    traced: str = field(default="", metadata=LEFT_OUT)
    """The bytes that tracing stated, a number or an expression of the graph's symbols, if the kernel was seen to
    allocate others; else empty. `nbytes` are those of the kernel."""

    def __post_init__(self) -> None:
        if self.nbytes < 0:
            raise InvalidPlan(f"storage {self.id} has {self.nbytes} bytes; expected 0 or more.")
        if self.of is not None and self.kind is not Kind.GRAD:
            raise InvalidPlan(f"storage {self.id} is of kind {self.kind}; only a gradient is `of` a parameter.")

    def __str__(self) -> str:
        size = f"  size {word(self.size)}" if self.size else ""
        of = "" if self.of is None else f"  of {word(self.of)}"
        batched = "" if self.batched is Batched.SAME else f"  batched {self.batched}"
        batched += "  slices consecutive" if self.consecutive else ""
        traced = f"  traced {word(self.traced)}" if self.traced else ""
        line = f"{word(self.id)}  {self.kind}  {word(self.dtype)}  {self.nbytes}{size}{of}{batched}{traced}"
        return commented(line, format_bytes(self.nbytes), column=44)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """The messages of a collective in the graph itself, between the ranks of a tensor axis."""

    num_ranks: int
    nbytes: int
    """Bytes of the whole tensor: of the sum of an all-reduce, of the result of an all-gather, of the input of a
    reduce-scatter."""
    passes: int
    """How often the tensor goes round the ring, a part of `num_ranks` at a time: twice for an all-reduce."""
    size: str = ""
    """`nbytes` as an expression of the graph's symbols; empty if it is constant."""

    def __post_init__(self) -> None:
        if min(self.num_ranks, self.passes) < 1 or self.nbytes < 0:
            raise InvalidPlan(
                f"a collective of {self.nbytes} bytes goes {self.passes} times round {self.num_ranks} ranks; expected "
                "0 bytes or more, and 1 or more of both."
            )

    def __str__(self) -> str:
        size = f" {word(self.size)}" if self.size else ""
        return f"{self.nbytes}{size} x {self.passes} round {self.num_ranks} ranks"


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """A node of the captured graph.

    It has more than 15 fields, because every fact about a node that a plan depends on is one of its fields.
    """

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
    """Path of the module that the op came from: `transformer.h.0.attn`."""
    source: str = ""
    """`file.py:line` of the user's code, or empty if unknown."""
    flops_size: str = ""
    """`flops` as an expression of the graph's symbols; empty if the number is constant."""
    kernel: Kernel = Kernel.OPAQUE
    """How far a compiler can fuse the op; `step.as_run.fused` finds the storages that are then never written."""
    once: bool = False
    """If True, the op must not be recomputed: it draws random numbers, has a side effect, or the user marked its result
    to be saved."""
    mixes: str = field(default="", metadata=LEFT_OUT)
    """Why the op needs the whole batch, as in `a mean over the batch`; empty if it can run once per micro-batch."""
    times: int = field(default=1, metadata=LEFT_OUT)
    """How many times the op runs in a step. More than 1 only in a graph that `step.as_run.as_run` has divided
    into micro-batches."""
    ring: Ring | None = field(default=None, metadata=LEFT_OUT)
    """What a collective over the tensor axis sends; None for every other op."""
    launches: int = field(default=1, metadata=LEFT_OUT)
    """How many kernels a run of the op launches: more than 1 if it runs graphs, as a loop does."""

    def __post_init__(self) -> None:
        if min(self.times, self.launches) < 1:
            raise InvalidPlan(f"op {self.id} launches {self.launches} kernels {self.times} times; expected 1 or more.")
        if self.flops < 0 or self.moved_bytes < 0:
            raise InvalidPlan(
                f"op {self.id} has {self.flops} flops and {self.moved_bytes} moved bytes; expected 0 or more."
            )

    def touching(
        self,
        reads: tuple[StorageId, ...],
        writes: tuple[StorageId, ...],
        moved_bytes: int | None = None,
        *,
        new_id: OpId | None = None,
        phase: Phase | None = None,
        times: int = 1,
    ) -> "Op":
        """Return the op with other `reads` and `writes` that runs `times` times in a step.

        Its other facts are those of this op unless they are given. Not by `dataclasses.replace`, which takes twice as
        long: to price a step in 12 numbers of micro-batches makes 130,000 ops.
        """
        return Op(
            id=self.id if new_id is None else new_id,
            target=self.target,
            phase=self.phase if phase is None else phase,
            reads=reads,
            writes=writes,
            flops=self.flops,
            moved_bytes=self.moved_bytes if moved_bytes is None else moved_bytes,
            module=self.module,
            source=self.source,
            flops_size=self.flops_size,
            kernel=self.kernel,
            once=self.once,
            mixes=self.mixes,
            times=times,
            ring=self.ring,
            launches=self.launches,
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
        parts += [f"mixes {word(self.mixes)}"] if self.mixes else []
        parts += [f"times {self.times}"] if self.times > 1 else []
        parts += [f"sends {self.ring}"] if self.ring is not None else []
        parts += [f"launches {self.launches}"] if self.launches > 1 else []
        return "  ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGraph:
    """The ops of a captured forward and backward in execution order, and their storages."""

    name: str
    ops: tuple[Op, ...]
    storages: tuple[Storage, ...]
    outputs: tuple[StorageId, ...] = ()
    """Storages that the forward returns to the caller; they are live until the forward ends or longer."""
    aliases: tuple[tuple[str, StorageId], ...] = ()
    """Pairs of value name and storage for each captured value that shares a storage named for another value: views,
    in-place results, outputs that alias inputs."""
    symbols: tuple[tuple[str, int], ...] = ()
    """Each symbol of the sizes with the value at which bytes and flops are given, in the order of the graph's
    inputs."""
    batch: int = field(default=1, metadata=LEFT_OUT)
    """The rows of the batch, which micro-batches divide; 1 if the graph has no batch that can be divided."""
    batch_size: str = field(default="", metadata=LEFT_OUT)
    """The symbol whose value is `batch`; empty if the number of rows is constant."""
    undivided: str = field(default="", metadata=LEFT_OUT)
    """Why the batch cannot be divided, as in `its sizes depend on the elements of a tensor`; empty if it can be, or if
    the inputs share no batch."""

    def __hash__(self) -> int:
        """Return a hash of a few fields. Caches look graphs up hundreds of times in a search, and hashing all ops of a
        graph of 3,000 takes 4 ms."""
        return hash((self.name, len(self.ops), len(self.storages), self.outputs))

    def __post_init__(self) -> None:
        ids = {storage.id for storage in self.storages}
        if len(ids) != len(self.storages):
            raise InvalidPlan(
                f"graph {self.name} has two storages of the same name: {_repeated([s.id for s in self.storages])}."
            )
        if len({op.id for op in self.ops}) != len(self.ops):
            raise InvalidPlan(
                f"graph {self.name} has two ops of the same name: {_repeated([op.id for op in self.ops])}."
            )
        # All names at once: a search makes graphs of 8,000 ops by the dozen.
        touched = set().union(*(op.reads for op in self.ops), *(op.writes for op in self.ops))
        if not touched <= ids:
            op, unknown = next((op, name) for op in self.ops for name in (*op.reads, *op.writes) if name not in ids)
            raise InvalidPlan(f"op {op.id} names the storage {unknown}, which graph {self.name} does not have.")
        if self.batch < 1:
            raise InvalidPlan(f"graph {self.name} has a batch of {self.batch} rows; expected 1 or more.")
        if self.batch_size and dict(self.symbols).get(self.batch_size) != self.batch:
            raise InvalidPlan(f"graph {self.name} has a batch of {self.batch} rows; expected {self.batch_size}.")
        order = [Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE]
        previous = 0
        for phase, ops in itertools.groupby(self.ops, key=operator.attrgetter("phase")):
            current = order.index(phase)
            if current < previous:
                raise InvalidPlan(f"op {next(ops).id} of the {phase} comes after the {order[previous]} began.")
            previous = current
        updates = [op.id for op in self.ops if op.phase is Phase.UPDATE]
        if updates not in ([], [UPDATE_OP]):
            raise InvalidPlan(
                f"graph {self.name} has the update ops {updates}; expected at most one, named `{UPDATE_OP}`."
            )
        total_bytes = sum(storage.nbytes for storage in self.storages)
        if total_bytes > MOST_BYTES:
            raise InvalidPlan(f"graph {self.name} has storages of {total_bytes} bytes; expected at most {MOST_BYTES}.")
        _check_sizes(self)
        named = [*self.outputs, *(name for _, name in self.aliases), *(s.of for s in self.storages if s.of is not None)]
        if not ids.issuperset(named):
            unknown = next(name for name in named if name not in ids)
            raise InvalidPlan(
                f"an output, alias or gradient names the storage {unknown}, which graph {self.name} does not have."
            )

    @property
    def is_training(self) -> bool:
        """Whether the step has an update, which is its last op then."""
        return bool(self.ops) and self.ops[-1].phase is Phase.UPDATE

    @property
    def has_backward(self) -> bool:
        """Whether the step has a backward."""
        return any(op.phase is Phase.BACKWARD for op in self.ops)

    def __str__(self) -> str:
        lines = [commented(f"graph {word(self.name)}", f"{len(self.ops)} ops, {len(self.storages)} storages")]
        batch = f"batch {words(str(self.batch), self.batch_size)}" if self.batch_size else f"batch {self.batch}"
        lines += [batch] if self.batch_size or self.batch > 1 else []
        lines += ["symbols", *(f"  {word(name)} {value}" for name, value in self.symbols)] if self.symbols else []
        lines += ["storages", *(f"  {storage}" for storage in self.storages)]
        lines += ["outputs", *(f"  {word(name)}" for name in self.outputs)]
        lines += ["aliases", *(f"  {words(value, name)}" for value, name in self.aliases)]
        lines += ["ops", *(f"  {op}" for op in self.ops)]
        return "\n".join(lines)


def graph_at(graph: StepGraph, values: Mapping[str, int]) -> StepGraph:
    """Return `graph` with bytes and flops at other `values` of its symbols; symbols not in `values` keep their value.

    Raises InvalidPlan if the graph has no such symbol.
    """
    old_values = dict(graph.symbols)
    unknown = [name for name in values if name not in old_values]
    if unknown:
        known = ", ".join(old_values) or "none"
        raise InvalidPlan(f"graph {graph.name} has no symbol {unknown[0]}; its symbols are: {known}.")
    new_values = {**old_values, **values}
    texts = {storage.size for storage in graph.storages} | {op.flops_size for op in graph.ops}
    texts |= {op.ring.size for op in graph.ops if op.ring is not None}
    value_of = {text: sizes.evaluate(text, new_values) for text in texts if text}
    grown = {storage.id: value_of[storage.size] - storage.nbytes for storage in graph.storages if storage.size}

    def moved(op: Op) -> int:
        return max(0, op.moved_bytes + sum(grown.get(name, 0) for name in (*op.reads, *op.writes)))

    def ring(op: Op) -> Ring | None:
        own = op.ring
        return own if own is None or not own.size else replace(own, nbytes=value_of[own.size])

    return replace(
        graph,
        ops=tuple(
            replace(op, flops=value_of.get(op.flops_size, op.flops), moved_bytes=moved(op), ring=ring(op))
            for op in graph.ops
        ),
        storages=tuple(
            replace(storage, nbytes=value_of.get(storage.size, storage.nbytes)) for storage in graph.storages
        ),
        symbols=tuple(new_values.items()),
        batch=new_values.get(graph.batch_size, graph.batch),
    )


def _repeated(names: Sequence[str]) -> str:
    return next(name for number, name in enumerate(names) if name in names[:number])


def _check_sizes(graph: StepGraph) -> None:
    """Raise InvalidPlan if a size as text differs from its number at the values of `symbols`."""
    values = dict(graph.symbols)
    if len(values) != len(graph.symbols) or any(value < 0 for value in values.values()):
        raise InvalidPlan(f"graph {graph.name} has the symbols {graph.symbols}; expected each once, 0 or more.")
    stated = {(storage.size, storage.nbytes) for storage in graph.storages if storage.size}
    stated |= {(op.flops_size, op.flops) for op in graph.ops if op.flops_size}
    stated |= {(op.ring.size, op.ring.nbytes) for op in graph.ops if op.ring is not None and op.ring.size}
    for text, number in sorted(stated):
        sizes.check_text(text)
        if sizes.evaluate(text, values) != number:
            raise InvalidPlan(
                f"graph {graph.name} says that {text} is {number} at {values}; it is {sizes.evaluate(text, values)}."
            )


@functools.cache
def layer_of(module: str) -> str:
    """Return the layer of a module path: `transformer.h.3` for `transformer.h.3.attn`, or the path if it has no
    number."""
    parts = module.split(".")
    for i, part in enumerate(parts):
        if part.isdecimal():
            return ".".join(parts[: i + 1])
    return module


def is_numbered(layer: str) -> bool:
    """Return whether `layer` ends in a number, as in a list of layers."""
    return layer.rpartition(".")[2].isdecimal()


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRegion:
    """A projection and its cross-entropy, which can be computed in chunks.

    A dynamic size counts with its value at the capture. Nodes are given by name, so the region of a graph is also the
    region of each copy of the graph.
    """

    name: str
    """The name of the node of the cross-entropy."""
    nodes: tuple[str, ...]
    """The names of all nodes that are replaced if the loss is chunked, from the projection to the cross-entropy."""
    num_tokens: int
    """Rows of the logits that the cross-entropy reads."""
    num_classes: int
    logits_bytes: int
    """Bytes of the largest tensor of logits. It may be an upcast copy, or have tokens that the loss does not read."""
    source: str
    """`file.py:line` of the cross-entropy, empty if tracing kept no stack."""
