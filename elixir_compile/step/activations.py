"""Group saved activations by the layer whose backward reads them first, and by the ops needed to recompute them.

```text
  h.3.pointwise   needs elementwise ops and reductions of other saved activations
  h.3.matmul      needs matrix products or convolutions too
  h.3.attention   needs attention kernels too
  h.3.fixed       needs activations of another layer
  h.3.kept        cannot be recomputed: random, with a side effect, a sum over the batch, or marked by the user to be
                  saved
  h.3.input       not saved by the capture: inputs of the layer, from which all of it, `fixed` too, can be recomputed
```

Each class is recomputed from other saved activations and the classes before it. So a layer has few sensible choices
(`Depth`): to recompute nothing, the first class, the first two, and so on. A storage counts once, however many of its
views are saved.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from elixir_compile.ir import Batched, GroupId, Op, Phase, StepGraph, StorageId
from elixir_compile.ir.graph import is_numbered, layer_of
from elixir_compile.step.recompute import given_storages, makers, saved_storages, stale_reads


class Depth(IntEnum):
    """The class of ops needed to recompute an activation. A layer is recomputed to a depth: this class and those
    before."""

    KEPT = 0
    POINTWISE = 1
    MATMUL = 2
    ATTENTION = 3
    FIXED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Activations of the same layer and class."""

    id: GroupId
    layer: str
    depth: Depth
    """The depth from which on these are recomputed; KEPT if they never are."""
    is_input: bool = False
    """True for inputs of the layer, saved only if the layer is recomputed to the depth FIXED."""
    storages: tuple[StorageId, ...]
    nbytes: int


def activation_groups(graph: StepGraph) -> tuple[Group, ...]:
    """Return the groups of saved activations of `graph`, in the order in which the forward computes them.

    Outputs of the forward are in no group: they live as long as the caller keeps them.
    """
    scan = _Scan(graph)
    classes: dict[tuple[str, Depth, bool], list[StorageId]] = {}
    for storage in graph.storages:
        if storage.id in scan.saved and storage.id not in scan.outputs and storage.nbytes:
            classes.setdefault((scan.layer(storage.id), scan.depth(storage.id), False), []).append(storage.id)
    for layer in dict.fromkeys(layer for layer, _, _ in classes):
        fixed = classes.get((layer, Depth.FIXED, False), [])
        inputs = scan.inputs(layer, fixed)
        if inputs is None:
            classes[layer, Depth.KEPT, False] = [*classes.get((layer, Depth.KEPT, False), ()), *fixed]
            classes.pop((layer, Depth.FIXED, False), None)
        elif inputs:
            classes[layer, Depth.KEPT, True] = inputs
    order = {op.id: i for i, op in enumerate(graph.ops)}
    groups = [scan.group(*key, storages) for key, storages in classes.items() if storages]
    first = {group.id: min(order[scan.maker(name).id] for name in group.storages) for group in groups}
    return tuple(sorted(groups, key=lambda group: (first[group.id], group.id)))


class _Scan:
    """Facts about a graph, computed once for all groups."""

    def __init__(self, graph: StepGraph) -> None:
        self.outputs = frozenset(graph.outputs)
        self.saved = saved_storages(graph)
        self._makers = makers(graph)
        self._given = given_storages(graph)
        # Without buffers overwritten by a layer: they exist in any case, and a plan cannot save them.
        self._made_in = {
            name: layer
            for name, op in self._makers.items()
            if op is not None and name not in self._given and is_numbered(layer := layer_of(op.module))
        }
        self._stale = stale_reads(graph)
        self._first_maker = {name: op for op in reversed(graph.ops) for name in op.writes}
        self._nbytes = {storage.id: storage.nbytes for storage in graph.storages}
        # A sum over the batch, such as the number of targets of a loss, is complete behind its lap. Recomputed in the
        # lap of the backward that divides rows by it, it would have to be complete before the first micro-batch.
        self._sums = frozenset(storage.id for storage in graph.storages if storage.batched is Batched.SUM)
        self._from_inputs = self._made_from_inputs(graph)
        self._readers: Mapping[StorageId, Op] = {
            name: op for op in reversed(graph.ops) if op.phase is Phase.BACKWARD for name in op.reads
        }

    def maker(self, name: StorageId) -> Op:
        """Return the first op writing the storage."""
        return self._first_maker[name]

    def layer(self, name: StorageId) -> str:
        """Return the layer whose backward reads the storage first; if that is no layer, the layer that computes it."""
        reader = layer_of(self._readers[name].module)
        return reader if is_numbered(reader) else layer_of(self.maker(name).module)

    def depth(self, name: StorageId) -> Depth:
        """Return the depth at which storage `name` can be recomputed from all other saved activations."""
        ops, leaves = self._chain([name], self.saved - {name})
        if ops is None:
            return Depth.KEPT
        if self._crosses(ops, leaves, self.layer(name)):
            return Depth.FIXED
        if any("attention" in op.target for op in ops):
            return Depth.ATTENTION
        return Depth.MATMUL if any(op.flops for op in ops) else Depth.POINTWISE

    def inputs(self, layer: str, fixed: Sequence[StorageId]) -> list[StorageId] | None:
        """Return results of other layers from which `fixed` can be recomputed; None if keeping them saves no bytes."""
        if not fixed:
            return []
        elsewhere = {name for name, own in self._made_in.items() if own != layer}
        ops, leaves = self._chain(fixed, (self.saved - set(fixed)) | elsewhere)
        if ops is None:
            return None
        found = [name for name in leaves if name in elsewhere and name not in self.saved]
        is_worth_it = sum(map(self._nbytes.__getitem__, found)) < sum(map(self._nbytes.__getitem__, fixed))
        return found if is_worth_it and self.outputs.isdisjoint(found) else None

    def group(self, layer: str, depth: Depth, is_input: bool, storages: Sequence[StorageId]) -> Group:
        kind = "input" if is_input else depth.name.lower()
        return Group(
            id=GroupId(f"{layer or 'step'}.{kind}"),
            layer=layer,
            depth=depth,
            is_input=is_input,
            storages=tuple(storages),
            nbytes=sum(self._nbytes[name] for name in storages),
        )

    def _made_from_inputs(self, graph: StepGraph) -> set[StorageId]:
        """Return storages computed from inputs and parameters without a matrix product: masks and positions."""
        found: set[StorageId] = set()
        for op in graph.ops:
            is_plain = op.phase is Phase.FORWARD and not op.once and not op.flops
            if is_plain and all(read in self._given or read in found for read in op.reads):
                found.update(op.writes)
        return found

    def _chain(
        self, targets: Iterable[StorageId], available: "frozenset[StorageId] | set[StorageId]"
    ) -> tuple[list[Op] | None, list[StorageId]]:
        """Return the ops to compute `targets` from `available` and given storages, and the storages of `available` they
        read.

        The ops are None if one of them must not run again.
        """
        ops: dict[str, Op] = {}
        leaves: dict[StorageId, None] = {}
        pending = list(targets)
        while pending:
            op = self._makers.get(pending.pop())
            if op is None or op.once or not self._sums.isdisjoint(op.writes):
                return None, []
            if op.id in ops:
                continue
            ops[op.id] = op
            for read in op.reads:
                if (op.id, read) in self._stale or (read not in available and read not in self._given):
                    pending.append(read)
                elif read in available:
                    leaves[read] = None
        return list(ops.values()), list(leaves)

    def _crosses(self, ops: Sequence[Op], leaves: Sequence[StorageId], layer: str) -> bool:
        """Return whether `ops` start from activations of another layer, or repeat its matrix products."""
        reads_elsewhere = any(name not in self._from_inputs and _is_another(self.layer(name), layer) for name in leaves)
        return reads_elsewhere or any(op.flops and _is_another(layer_of(op.module), layer) for op in ops)


def _is_another(layer: str, than: str) -> bool:
    return layer != than and is_numbered(layer)
