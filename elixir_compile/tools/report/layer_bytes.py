"""Share the live bytes of a plan at one op out to the layers that hold them, by kind.

```text
  op bwd.blocks.3.up.mm                 layer        kind    bytes
    bucket b1, of blocks.0 and .1  -->  blocks.0     param   its share of b1, by the bytes of its parameters
    storage s17, of blocks.2            blocks.2     saved   the bytes of s17
    rows that buckets hold in turns     (several)    moment  of the largest of them
```

The bytes of all layers add up to the live bytes at the op. An activation belongs to the layer of the op that writes it,
a storage that no op writes to the layer of the first op that reads it, and an input of the step to no layer.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from elixir_compile.ir.bucket import Bucket
from elixir_compile.ir.graph import StepGraph, is_numbered, layer_of
from elixir_compile.ir.kinds import Kind, OpId, StorageId
from elixir_compile.step.bucket_bytes import Held
from elixir_compile.tools.report.held import Holdings
from elixir_compile.tools.report.layers_table import OTHER, layer_of_param

INPUTS = "inputs"
"""The name under which the tensors of the caller count: a batch, or a tangent."""
SEVERAL = "several layers"
"""The name under which bytes count that the buckets of several layers hold in turns."""


def layer_bytes(held: Holdings, op: OpId) -> Mapping[str, Mapping[Kind, int]]:
    """Return the live bytes at `op` by layer and kind, without zeros, in the order of the first ops of the layers."""
    at, rows = held.position(op), held.rows
    layers = _layers_of_storages(rows.step)
    found: dict[str, Counter[Kind]] = {layer: Counter() for layer in dict.fromkeys(layers.values())}
    nbytes = {storage.id: storage.nbytes for storage in rows.step.storages}

    def add(layer: str, kind: Kind, count: int) -> None:
        found.setdefault(layer, Counter())[kind] += count

    for bucket in rows.plan.buckets:
        shares = _shares(bucket, nbytes)
        for row in _live(rows.of_bucket(bucket), at):
            for layer, share in split(row.nbytes, shares).items():
                add(layer, row.kind, share)
    for name, own in rows.storages.items():
        for row in _live(own, at):
            add(layers.get(name, OTHER), row.kind, row.nbytes)
    for row in _live(rows.joint(rows.plan.buckets), at):
        add(SEVERAL, row.kind, row.nbytes)
    if rows.plan.base_bytes:
        add(OTHER, Kind.BUFFER, rows.plan.base_bytes)
    by_layer = {layer: {kind: own[kind] for kind in Kind if own[kind]} for layer, own in found.items()}
    return {layer: own for layer, own in by_layer.items() if own}


def _live(rows: Iterable[Held], at: int) -> Iterable[Held]:
    return (row for row in rows if row.first <= at <= row.last)


def _layers_of_storages(step: StepGraph) -> Mapping[StorageId, str]:
    """Return the layer of each storage that an op touches, in the order of the first ops."""
    inputs = {storage.id for storage in step.storages if storage.kind is Kind.INPUT}
    layers: dict[StorageId, str] = {}
    written: set[StorageId] = set()
    for op in step.ops:
        layer = layer_of_op(op.module)
        for name in op.reads:
            layers.setdefault(name, INPUTS if name in inputs else layer)
        for name in op.writes:
            if name not in written and name not in inputs:
                written.add(name)
                layers.setdefault(name, layer)
    return layers


def layer_of_op(module: str) -> str:
    """Return the layer of an op of `module`; outside of all layers the module itself, or `OTHER` for the model."""
    layer = layer_of(module)
    return layer if is_numbered(layer) else module or OTHER


def _shares(bucket: Bucket, nbytes: Mapping[StorageId, int]) -> Mapping[str, int]:
    """Return the bytes of the parameters of `bucket` by layer."""
    shares: Counter[str] = Counter()
    for name in bucket.params:
        shares[layer_of_param(name)] += nbytes.get(name, 0)
    return shares


def split(total: int, shares: Mapping[str, int]) -> Mapping[str, int]:
    """Return `total` cut in proportion to `shares`; what rounding leaves goes to the first."""
    whole = sum(shares.values())
    parts = {layer: total * share // whole if whole else 0 for layer, share in shares.items()}
    first = next(iter(shares), OTHER)
    parts[first] = parts.get(first, 0) + total - sum(parts.values())
    return parts
