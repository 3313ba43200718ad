"""Convert the forward and backward FX graphs of one capture to a torch-free `StepGraph`, and count what loops and
branches in them allocate and compute.
"""

import inspect
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from elixir_compile import compat
from elixir_compile.base.errors import InvalidPlan, UnsupportedModel
from elixir_compile.graph.capture.batch import scattered, step_states
from elixir_compile.graph.capture.captured import (
    NEGLIGIBLE_BYTES,
    SAME,
    UNDIVIDED,
    Captured,
    KernelBytes,
    KernelCall,
    Kernels,
    State,
    StepStates,
    as_traced,
    may_differ,
)
from elixir_compile.graph.capture.node_facts import (
    MARKERS,
    OF_MODULE,
    bodies_of,
    dense_tensors_of,
    flops_of,
    gradient,
    is_number,
    kernel_of,
    key_of,
    may_return_input,
    module_path,
    outputs_of,
    overwritten_input,
    parameter,
    ring_of,
    runs_once,
    size_of,
    source_line,
    source_of,
    storage_keys_of,
    tensor_of,
    written_by,
)
from elixir_compile.graph.capture.rewire import ops_of, viewed
from elixir_compile.graph.ops.registry import Slot
from elixir_compile.ir import Batched, Kernel, Kind, Op, OpId, Phase, StepGraph, Storage, StorageId, sizes
from elixir_compile.ir.cost import is_free
from elixir_compile.ir.graph import UPDATE_OP
from elixir_compile.step.as_run import fused
from elixir_compile.step.liveness import liveness

# ----------------------------------------------------------------------------------------------------------------------
# Count what a function of torch that runs graphs, its bodies, allocates beside its results, and what it computes.
#
# A run of a body has a peak of p bytes, and results of r bytes. With n rows, and w bytes of results of the function:
#
#     cond              p                           of the larger branch
#     while_loop        r + p                       the values of a turn are there while the next one runs
#     map               (n-1) r + p, or n r + w     the results of all rows are kept, then stacked
#     scan              w + the results of two turns and their indices + p
#     associative_scan  less than 3 w               at the last level w/2 four times, then w too
#
# These are the loops of `torch._higher_order_ops`, which call the bodies op by op. A turn of a `while_loop` counts
# once, because nobody knows how many there are.


_INDEX_BYTES = 8
"""Of an index by which `scan` writes an element of its results."""


@dataclass(frozen=True, slots=True)
class Size:
    """A number of bytes or flops, and the number as an expression of the graph's symbols; empty if it is constant."""

    number: int
    text: str = ""

    def __add__(self, other: "Size") -> "Size":
        return Size(self.number + other.number, self._joined(other, "+"))

    def __sub__(self, other: "Size") -> "Size":
        return Size(self.number - other.number, self._joined(other, "-"))

    def __mul__(self, other: "Size") -> "Size":
        return Size(self.number * other.number, self._joined(other, "*"))

    def _joined(self, other: "Size", sign: str) -> str:
        return f"({self}) {sign} ({other})" if self.text or other.text else ""

    def __str__(self) -> str:
        return self.text or str(self.number)

    def or_more(self, other: "Size") -> "Size":
        """Return the larger of both."""
        text = f"Max({self}, {other})" if self.text or other.text else ""
        return Size(max(self.number, other.number), text)

    def simplified(self) -> "Size":
        """Return an equal size with a short text, or a constant one if the text is too long to be a size."""
        try:
            return Size(self.number, sizes.canonical(self.text) if self.text else "")
        except InvalidPlan:
            return Size(self.number)


NOTHING = Size(0)
Count = Callable[[Any], Size]
"""From a size of the capture, a number or symbolic, to a `Size`."""


def total(parts: Iterable[Size]) -> Size:
    """Return the sum of `parts`."""
    found = NOTHING
    for part in parts:
        found = found + part if part.number or part.text else found
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Inside:
    """What the bodies of a node add to its own reads and writes."""

    workspace: Size
    """Bytes that are live at once in the node, beside its inputs and results."""
    flops: Size
    moved_bytes: int
    launches: int
    """Kernels that the node launches."""


NOTHING_INSIDE = Inside(workspace=NOTHING, flops=NOTHING, moved_bytes=0, launches=1)
"""Of a node that runs no graph: it launches its own kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """One run of a graph that a node runs."""

    peak: Size
    """The most bytes of results that are live at once, results of the graph included."""
    results: tuple[Size, ...]
    """The bytes of each result of the graph."""
    indices: tuple[Size, ...]
    """The bytes of an index for each element of each result."""
    flops: Size
    moved_bytes: int
    launches: int


def body_of(graph: fx.Graph, step: StepGraph, count: Count, *, is_fused: bool) -> Body:
    """Return one run of `graph`, whose ops and storages are those of `step`. If `is_fused`, a compiler fuses its ops.

    The text of the peak is that of the op with the most bytes at the sizes of the capture.
    """
    step = fused(step) if is_fused else step
    bytes_of = {s.id: Size(s.nbytes, s.size) for s in step.storages if s.kind in (Kind.TEMP, Kind.WORKSPACE)}
    lives = {name: life for name, life in liveness(step).lives.items() if name in bytes_of}
    live = [
        [bytes_of[name] for name, life in lives.items() if life.first <= at <= life.last] for at in range(len(step.ops))
    ]
    tensors = [dense_tensors_of(node) if isinstance(node, fx.Node) else [] for node in outputs_of(graph)]
    ops = [op for op in step.ops if not is_free(op)]
    return Body(
        peak=max(map(total, live), key=lambda size: size.number, default=NOTHING),
        results=tuple(total(count(value.untyped_storage().nbytes()) for value in values) for values in tensors),
        indices=tuple(total(count(_INDEX_BYTES * value.numel()) for value in values) for values in tensors),
        flops=total(Size(op.flops, op.flops_size) for op in ops),
        moved_bytes=sum(op.moved_bytes for op in ops),
        launches=sum(op.launches for op in ops),
    )


def inside_of(node: fx.Node, bodies: Sequence[Body], count: Count) -> Inside:
    """Return what `bodies`, in the order in which `node` names them, add to `node`."""
    results = total(count(value.untyped_storage().nbytes()) for value in dense_tensors_of(node))
    peak, turns = largest(body.peak for body in bodies), Size(1)  # of a `cond`; results included
    body, target = bodies[-1], str(node.target)
    # Over the rows of the first of these tensors a node loops.
    given: Any = {"map_impl": 1, "scan": 2}.get(target)
    if given is not None and (tensors := node.args[given]):
        turns = count(tensor_of(tensors[0]).shape[0])  # pyright: ignore[reportArgumentType, reportIndexIssue]
    match target:
        case "while_loop":
            peak = total(body.results) + peak
        case "map_impl":
            row = total(body.results)
            peak = ((turns - Size(1)) * row + body.peak).or_more(turns * row + results)
        case "scan":
            init: Any = node.args[1]
            carried, made = total(body.results[: len(init)]), total(body.results[len(init) :])
            indices = body.indices[len(init) :]
            # All rows of the results and their indices, the first row and the one before, and the carried values.
            peak = turns * made + total(indices) + made + made + carried + body.peak.or_more(largest(indices))
        case "associative_scan":
            # The pairs of neighbours, their scan, the values between, these with the first one, and both interleaved.
            # A level above has half of the rows, so all together have twice those of the last.
            peak, turns = results * Size(3), Size(2)
    return Inside(
        workspace=(peak - results).or_more(NOTHING).simplified(),
        flops=(turns * largest(body.flops for body in bodies)).simplified(),
        moved_bytes=turns.number * max(body.moved_bytes for body in bodies),
        launches=max(1, turns.number * max(body.launches for body in bodies)),
    )


def largest(parts: Iterable[Size]) -> Size:
    """Return the largest of `parts`, 0 if there are none."""
    found = NOTHING
    for part in parts:
        found = found.or_more(part)
    return found


# ----------------------------------------------------------------------------------------------------------------------
# Convert the forward and backward FX graphs of one capture to a torch-free `StepGraph`.
#
# Each call except markers becomes an `Op`, in node order. Storages are found through the fake tensors that tracing left
# in `node.meta["val"]`: if two values share a storage, they are views of each other. Storages of the two graphs are
# kept apart, because a recomputed node carries the fake tensor of the node it repeats; only the placeholders of the
# backward are joined with the values that the forward saved.
#
# A kernel that was seen to allocate other bytes than tracing stated counts with its own: its results have them, and its
# workspace is a storage that no other op touches.


_PREFIX = {Phase.FORWARD: "fwd.", Phase.BACKWARD: "bwd."}
_DATA_DEPENDENT = (
    "the shape of a value in its forward depends on the elements of a tensor, as the shape of `nonzero` does, so its "
    "bytes cannot be planned. Without fullgraph=True it is planned in several graphs, which begin behind such values"
)


def op_id(phase: Phase, node: fx.Node) -> OpId:
    """Return the id of `node` in the `StepGraph`."""
    return OpId(_PREFIX[phase] + node.name)


def step_graph(captured: Captured, values: Mapping[str, int]) -> StepGraph:
    """Return the `StepGraph` of `captured` at the sizes `values`, by the symbols of dynamic shapes.

    A symbol outside of `values` has its value at the capture.
    """
    return _Builder(captured, values, step_states(captured), captured.kernels).build()


def with_siblings(step: StepGraph, siblings: Sequence[Slot]) -> StepGraph:
    """Return `step` with the parameters `siblings`, which no op reads but whose bucket is gathered."""
    unread = [
        Storage(id=StorageId(slot.name), nbytes=slot.nbytes, kind=Kind.PARAM, dtype=_dtype(slot.param))
        for slot in siblings
    ]
    return replace(step, storages=(*unread, *step.storages)) if unread else step


def with_update_workspace(step: StepGraph, nbytes: int) -> StepGraph:
    """Return `step`, which trains, with a work space of `nbytes` in its update."""
    if nbytes <= NEGLIGIBLE_BYTES:
        return step
    own = Storage(id=StorageId(f"{UPDATE_OP}.workspace"), nbytes=nbytes, kind=Kind.WORKSPACE, dtype="uint8")
    *ops, update = step.ops
    ops.append(replace(update, writes=(*update.writes, own.id)))
    return replace(step, ops=tuple(ops), storages=(*step.storages, own))


def storages_behind(captured: Captured, phase: Phase = Phase.FORWARD) -> Mapping[fx.Node, tuple[StorageId, ...]]:
    """Return the storages of each node of a half of `captured`, by the ids of its `StepGraph`."""
    builder = _Builder(captured, {})
    forward = builder._walk(captured.forward.graph, Phase.FORWARD, {})
    if phase is Phase.FORWARD:
        return forward
    graph = captured.backward_module.graph
    return builder._walk(graph, phase, builder._saved(graph, forward))


@dataclass(slots=True)
class _Draft:
    """A storage that may still change while the graph is walked: its fields are those of `Storage`."""

    id: StorageId
    nbytes: int
    kind: Kind
    dtype: str
    of: StorageId | None = None
    size: str = ""
    batched: Batched = Batched.SAME
    traced: str = ""

    def freeze(self, scattered: Collection[StorageId]) -> Storage:
        """Return the storage; the slices of those in `scattered` do not follow each other in memory."""
        known = {name: getattr(self, name) for name in _Draft.__slots__}
        return Storage(**known, consecutive=self.batched is Batched.EACH and self.id not in scattered)


@dataclass(slots=True)
class _Builder:
    captured: Captured
    values: Mapping[str, int]
    batch: StepStates = UNDIVIDED
    kernels: Kernels = as_traced
    symbols: dict[str, int] = field(default_factory=dict)
    """The values of the sizes among the inputs, by symbol, in the order of the inputs."""
    drafts: dict[StorageId, _Draft] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)
    aliases: list[tuple[str, StorageId]] = field(default_factory=list)
    scattered: set[StorageId] = field(default_factory=set)
    """Storages of which a slice of a micro-batch cannot be alone in memory."""
    saved: frozenset[StorageId] = frozenset()
    """The storages of the saved values, while the backward is walked."""

    def build(self) -> StepGraph:
        for node in filter(is_number, self.captured.forward.graph.find_nodes(op="placeholder")):
            self.symbols |= compat.expression_of(size_of(node))[1]
        self.symbols |= {name: self.values[name] for name in self.symbols if name in self.values}
        forward = self._walk(self.captured.forward.graph, Phase.FORWARD, {})
        given = outputs_of(self.captured.forward.graph)[: self.captured.num_outputs]
        outputs = [forward[node] for node in given if isinstance(node, fx.Node) and node in forward]
        if self.captured.backward is not None:
            self._join_backward(self.captured.backward.graph, forward)
        flat = dict.fromkeys(s for storages in outputs for s in storages)
        drafts = self.drafts.values()
        texts = {text for draft in drafts for text in (draft.size, draft.traced)} | {op.flops_size for op in self.ops}
        used = {symbol for text in texts if text for symbol in sizes.symbols_of(text)}
        batch, batch_size = self._count(self.batch.batch)
        used.add(batch_size)
        return StepGraph(
            name=self.captured.name,
            ops=tuple(self.ops),
            storages=tuple(draft.freeze(self.scattered) for draft in self.drafts.values()),
            outputs=tuple(s for s in flat if self.drafts[s].kind not in (Kind.PARAM, Kind.INPUT, Kind.BUFFER)),
            aliases=tuple(self.aliases),
            symbols=tuple((name, value) for name, value in self.symbols.items() if name in used),
            batch=batch,
            batch_size=batch_size,
            undivided=self.batch.undivided,
        )

    def _count(self, size: "int | torch.SymInt") -> tuple[int, str]:
        """Return `size` as a number and as an expression of `symbols`, which is empty if the size is constant.

        A size counts as constant too if its expression has a function that `sizes` does not know, or a symbol that is
        no input: the state of a random generator has such a symbol for its size.
        """
        if isinstance(size, int):
            return size, ""
        if free_unbacked_symbols(size):
            raise UnsupportedModel(self.captured.name, _DATA_DEPENDENT)
        text, here = compat.expression_of(size)
        at = {name: self.values.get(name, value) for name, value in here.items()}
        number = compat.evaluate_size(size, at)
        if not text or not at.keys() <= self.symbols.keys():
            return number, ""
        try:
            text = sizes.canonical(text)
            is_same = sizes.evaluate(text, at) == number
        except InvalidPlan:
            return number, ""
        return number, text if is_same else ""

    def _join_backward(self, graph: fx.Graph, forward: dict[fx.Node, tuple[StorageId, ...]]) -> None:
        """Add the backward `graph` and the update; `forward` has the storages of the nodes of the forward.

        Raises UnsupportedModel if no op of the backward writes a gradient into memory of its own: nothing would add it
        to the parameter's `.grad`.
        """
        known = self._saved(graph, forward)
        self.saved = frozenset(name for names in known.values() for name in names)
        for storage in self.saved:
            if self.drafts[storage].kind is Kind.TEMP:
                self.drafts[storage].kind = Kind.SAVED
        first = len(self.ops)
        storages = self._walk(graph, Phase.BACKWARD, known)
        # The tangents, inputs of the backward alone, are results of its first op. Autograd makes them then, and frees
        # them after their last use, or after the backward under torch 2.11.
        inputs = (draft.id for draft in self.drafts.values() if draft.kind is Kind.INPUT)
        tangents = [name for name in inputs if name.startswith(_PREFIX[Phase.BACKWARD])]
        if first < len(self.ops):
            self.ops[first] = replace(self.ops[first], writes=(*tangents, *self.ops[first].writes))
            if compat.keeps_tangents():
                self.ops[-1] = replace(self.ops[-1], reads=tuple(dict.fromkeys((*self.ops[-1].reads, *tangents))))
            for name in tangents:
                self.drafts[name].kind = Kind.TEMP
        # If a parameter has several gradients, they stay several storages.
        written = {storage for op in self.ops if op.phase is Phase.BACKWARD for storage in op.writes}
        for node in graph.find_nodes(op="call_function", target=gradient):
            name = self.captured.param_names[key_of(node)]
            drafts = [self.drafts[storage] for storage in storages.get(source_of(node), ())]
            if not drafts or not all(draft.kind is Kind.TEMP and draft.id in written for draft in drafts):
                raise UnsupportedModel(name, _no_writer(source_of(node), drafts))
            for draft in drafts:
                draft.kind, draft.of = Kind.GRAD, StorageId(name)
        gradients = [draft for draft in self.drafts.values() if draft.kind is Kind.GRAD]
        trained = [draft.of for draft in gradients if draft.of is not None]
        # The gradients that the backward returns for parameters among its inputs, as those of an RNN, stay until the
        # update too.
        pairs = zip(self.captured.forward.graph.find_nodes(op="placeholder"), outputs_of(graph), strict=False)
        made = [own for source, own in pairs if isinstance(own, fx.Node) and source.meta.get(OF_MODULE, False)]
        unmanaged = [name for own in made for name in storages.get(own, ()) if self.drafts[name].kind is Kind.TEMP]
        reads = tuple(dict.fromkeys([*trained, *(draft.id for draft in gradients), *unmanaged]))
        if reads:
            self.ops.append(Op(id=UPDATE_OP, target="elixir.update", phase=Phase.UPDATE, reads=reads, writes=()))

    def _saved(
        self, graph: fx.Graph, forward: Mapping[fx.Node, tuple[StorageId, ...]]
    ) -> dict[fx.Node, tuple[StorageId, ...]]:
        """Return the storages of the saved values that the backward `graph` reads."""
        saved = {node.name: node for node in self.captured.saved if isinstance(node, fx.Node)}
        # An extra saved value has no readers.
        found = {node: saved.get(str(node.target)) for node in graph.find_nodes(op="placeholder") if node.users}
        return {node: forward[source] for node, source in found.items() if source is not None and source in forward}

    def _walk(
        self, graph: fx.Graph, phase: Phase, known: dict[fx.Node, tuple[StorageId, ...]]
    ) -> dict[fx.Node, tuple[StorageId, ...]]:
        """Add the ops of `graph` and their storages; return the storages of each node."""
        storages = dict(known)
        module = self.captured.forward if phase is Phase.FORWARD else self.captured.backward_module
        given = _by_key(known, storages)
        ops = set(ops_of(graph))
        for node in graph.nodes:
            if node.op == "placeholder" and node not in known and node.users:
                storages[node] = self._enter(node, Kind.INPUT, given, phase)
            elif node.op == "get_attr":
                storages[node] = self._enter(node, Kind.BUFFER, given, phase)
            elif node.op == "call_function" and node.target is parameter:
                value, storage = tensor_of(node), StorageId(self.captured.param_names[key_of(node)])
                nbytes = value.numel() * value.element_size()
                self.drafts.setdefault(storage, _Draft(storage, nbytes, Kind.PARAM, _dtype(value)))
                storages[node] = (storage,)
            elif node.op == "call_function" and node.target not in MARKERS:
                op = self._enter_call(node, phase, storages, self._inside(module, node))
                if node in ops:
                    self.ops.append(op)
        if self.batch.half(phase).states:
            self.scattered |= scattered(graph, phase, storages, self.batch.half(phase))
        return storages

    def _enter(
        self,
        node: fx.Node,
        kind: Kind,
        by_key: dict[int, StorageId],
        phase: Phase,
        seen: KernelBytes | None = None,
    ) -> tuple[StorageId, ...]:
        """Return the storages of the tensors of `node`: those in `by_key`, by the keys of fake storages, or new ones.

        New storages are added to `by_key` too, with the bytes that the kernel was `seen` to allocate.
        """
        found: list[StorageId] = []
        for index, value in enumerate(dense_tensors_of(node)):
            key = compat.storage_key(value)
            if key not in by_key:
                suffix = "" if index == 0 else f".{index}"
                storage = StorageId(f"{op_id(phase, node)}{suffix}")
                nbytes, size = self._count(value.untyped_storage().nbytes())
                batched = self.batch.half(phase).batched(node, index)
                self.drafts[storage] = _Draft(storage, nbytes, kind, _dtype(value), size=size, batched=batched)
                own_bytes = None if seen is None else seen.results_bytes[index]
                if own_bytes is not None and own_bytes != nbytes:
                    self.drafts[storage].traced = size or str(nbytes)
                    self.drafts[storage].nbytes = own_bytes
                    self.drafts[storage].size = self._scaled(node, own_bytes)
                by_key[key] = storage
            else:
                self.aliases.append((op_id(phase, node), by_key[key]))
            found.append(by_key[key])
        return tuple(found)

    def _enter_call(
        self,
        node: fx.Node,
        phase: Phase,
        storages: dict[fx.Node, tuple[StorageId, ...]],
        inside: Inside,
    ) -> Op:
        name, walked = op_id(phase, node), self.batch.half(phase)
        inputs = dict.fromkeys(s for source in node.all_input_nodes for s in storages.get(source, ()))
        overwritten = overwritten_input(node) if self.captured.fused else None
        base = overwritten if node.target is operator.getitem else viewed(node) or overwritten
        shared = _by_key(node.all_input_nodes if may_return_input(node) else (), storages)
        if base is not None and base in storages and len(storages[base]) == 1:
            # By structure, not by fake storage: several gathers of one parameter have different fake storages.
            shared.update((key, storages[base][0]) for key in storage_keys_of(node))
        num_before = len(self.drafts)
        call = self._kernel_call(node, phase, storages) if may_differ(node, fused=self.captured.fused) else None
        seen = None if call is None else self.kernels(call)
        storages[node] = self._enter(node, Kind.TEMP, shared, phase, seen)
        made = [*islice(reversed(self.drafts), len(self.drafts) - num_before)][::-1]
        given = [value for value in written_by(node.target, node.args, node.kwargs) if isinstance(value, fx.Node)]
        mutated = [storage for value in given for storage in storages.get(value, ())]
        for storage in () if overwritten is None else storages[overwritten]:
            mutated.append(storage)
            self.drafts[storage].batched = walked.batched(node, 0)  # zeros, into which each micro-batch adds
        # An op that makes no tensor, as one that returns a size, needs what it reads where that may be on the host.
        reads = tuple(name for name in inputs if made or mutated or name in self.saved)
        writes = tuple(dict.fromkeys([*made, *mutated]))
        flops = (Size(*self._count(flops_of(node))) + inside.flops).simplified()
        moved = sum(self.drafts[s].nbytes for s in (*reads, *writes)) if made or mutated else 0
        if inside.workspace.number:
            own = StorageId(f"{name}.workspace")
            size = inside.workspace
            self.drafts[own] = _Draft(own, size.number, Kind.WORKSPACE, "uint8", size=size.text)
            writes = (*writes, own)
        if call is not None and seen is not None and seen.workspace_bytes > NEGLIGIBLE_BYTES:
            writes = (*writes, *self._enter_workspaces(call, phase, seen.workspace_bytes, (*inputs, *writes)))
        return Op(
            id=name,
            # Of a function its name, as Python's `str` has its address.
            target=f"{node.target.__module__}.{node.target.__name__}"
            if inspect.isroutine(node.target)
            else str(node.target),
            phase=phase,
            reads=reads,
            writes=writes,
            flops=flops.number,
            moved_bytes=moved + inside.moved_bytes,
            module=module_path(node),
            source=source_line(node),
            flops_size=flops.text,
            kernel=kernel_of(node) if self.captured.fused else Kernel.OPAQUE,
            once=bool(mutated) or runs_once(node),
            mixes=walked.mixes.get(node, ""),
            ring=ring_of(node, self._count),
            launches=inside.launches,
        )

    def _kernel_call(self, node: fx.Node, phase: Phase, storages: Mapping[fx.Node, Sequence[StorageId]]) -> KernelCall:
        """Return the call of `node` on the whole batch; `storages` are those of its inputs."""
        walked = self.batch.half(phase)
        behind = {source: [self.drafts[name] for name in storages.get(source, ())] for source in node.all_input_nodes}
        states = {source: walked.states.get(source, SAME) for source in (*behind, node)}
        dims = {source: own.dim for source, own in states.items() if isinstance(own, State) and own.is_each}
        dims |= {source: dim for (reader, source), dim in walked.narrowed.items() if reader is node}
        return KernelCall(
            node=node,
            sizes=self.values,
            unlike={source: own[0].nbytes for source, own in behind.items() if len(own) == 1 and own[0].traced},
            slices={source: dim for source, dim in dims.items() if source is not node},
            result_dim=dims.get(node),
        )

    def _enter_workspaces(
        self, call: KernelCall, phase: Phase, nbytes: int, touched: Sequence[StorageId]
    ) -> list[StorageId]:
        """Add the workspace of the op of `call`, `nbytes` on the whole batch, and return it.

        `touched` are the storages that the op reads and writes. If it can run once for each micro-batch, the bytes that
        follow the rows are a storage of their own: a kernel may copy its weights, and its slices.
        """
        fixed_bytes, rows = nbytes, self.batch.batch
        if any(self.drafts[name].batched is not Batched.SAME for name in touched):
            # A call on one row shows how many bytes do not depend on the rows; none if it does not run.
            fixed_bytes = 0
            if isinstance(rows, int) and rows != 1 and (one := self.kernels(replace(call, parts=rows))) is not None:
                row_bytes = max(0, nbytes - one.workspace_bytes) // (rows - 1)
                fixed_bytes = min(nbytes, max(0, one.workspace_bytes - row_bytes))
        found: list[StorageId] = []
        parts = ((Batched.SAME, fixed_bytes, ""), (Batched.EACH, nbytes - fixed_bytes, ".rows"))
        for batched, own_bytes, suffix in parts:
            if own_bytes:
                storage = StorageId(f"{op_id(phase, call.node)}.workspace{suffix}")
                size = self._scaled(call.node, own_bytes)
                self.drafts[storage] = _Draft(storage, own_bytes, Kind.WORKSPACE, "uint8", size=size, batched=batched)
                self.scattered.add(storage)
                found.append(storage)
        return found

    def _scaled(self, node: fx.Node, nbytes: int) -> str:
        """Return `nbytes`, seen at the present sizes, as an expression that is proportional to the largest tensor that
        the op of `node` reads or writes; empty if none is of dynamic size."""
        found = [tensor for source in (node, *node.all_input_nodes) for tensor in dense_tensors_of(source)]
        counted = [self._count(tensor.numel()) for tensor in found]
        largest, text = max((own for own in counted if own[1]), default=(0, ""))
        if not text or not largest:
            return ""
        factor, rest = divmod(nbytes, largest)
        return sizes.canonical(f"FloorDiv({nbytes}*({text}), {largest})" if rest else f"{factor}*({text})")

    def _inside(self, module: fx.GraphModule, node: fx.Node) -> Inside:
        """Return what the graphs that `node` of `module` runs add to it."""
        bodies = bodies_of(module, node)
        if not bodies:
            return NOTHING_INSIDE

        def count(size: "int | torch.SymInt") -> Size:
            return Size(*self._count(size))

        fused, found = self.captured.fused, []
        for body in bodies:
            num_outputs = len(outputs_of(body.graph))
            captured = replace(self.captured, forward=body, backward=None, num_outputs=num_outputs)
            step = _Builder(captured, self.values, kernels=self.kernels, symbols=dict(self.symbols)).build()
            found.append(body_of(body.graph, step, count, is_fused=fused))
        return inside_of(node, found, count)


def _by_key(nodes: Iterable[fx.Node], storages: Mapping[fx.Node, tuple[StorageId, ...]]) -> dict[int, StorageId]:
    """Return the storages of `nodes` by the keys of their fake storages.

    A result can share memory only with an input of its op. All other values are left out, because two ops that share
    nothing may have the same fake results: tracing keeps those of a graph that several nodes run.
    """
    return {
        key: storage
        for node in nodes
        for key, storage in zip(storage_keys_of(node), storages.get(node, ()), strict=False)
    }


def _no_writer(source: fx.Node, drafts: Sequence[_Draft]) -> str:
    """Return why the gradient `source`, in the storages `drafts`, cannot be told from other values."""
    found = ", ".join(f"{draft.id} ({draft.kind}{f' of {draft.of}' if draft.of else ''})" for draft in drafts) or "none"
    where = f" ({source_line(source)})" if source_line(source) else ""
    return (
        f"no op of the captured backward writes its gradient {source.name}{where} into memory of its own; its storages "
        f"are: {found}. It would not be trained. Compute it by other ops, or freeze the parameter"
    )


def _dtype(value: torch.Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")
