"""Find the first and the last op of each layer that equals other layers, so that their regions are equal too.

A compiler then compiles each distinct region once.

```text
  op       add  norm | mm  gelu  mm  add  norm | mm  gelu  mm  add  norm | mm
  module   h.0   h.1   h.1  h.1  h.1 h.1   h.2   h.2  h.2  h.2 h.2  ln_f   head
                 ^     ^ product of h.1    ^ first of h.2
```

If a plan moves nothing, the region of a layer begins at its first matrix product. The addition at the end of a layer
and the norm at the start of the next layer then stay in one kernel, and the cut keeps no additional tensor alive.

If a plan moves something, the region of a layer begins at its first op. Actions before the first matrix product of a
layer move to its first op, and actions after its last matrix product move to its last op: a copy arrives a few
pointwise ops sooner and is released a few later.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from elixir_compile.ir import Op, Phase, StepGraph
from elixir_compile.ir.graph import is_numbered, layer_of
from elixir_compile.step.laps import Lap
from elixir_compile.step.windows import Window

_MIN_PRODUCTS = 2
"""A layer with fewer matrix products in the forward gets no region of its own: it saves little compile time, and costs
much run time."""
_CONVOLUTION = "aten.convolution"
"""Layers with convolutions get no regions of their own, because a compiler chooses the layout of convolutions and of
the ops between them once per region."""


class LayerSpan(NamedTuple):
    """The ops of a layer in a phase, as op indices, both included."""

    first: int
    product: int
    """The first matrix product of the layer."""
    last_product: int
    last: int
    """`first - 1` in the empty span behind the last layer of a phase."""


def layers_alike(graph: StepGraph, least: int | None) -> frozenset[str]:
    """Return the layers that are among at least `least` layers with equal forward ops; no layer if `least` is None.

    Ops are equal if their target, flops and moved bytes are.
    """
    if least is None:
        return frozenset()
    ops: dict[str, list[Op]] = {}
    for op in graph.ops:
        if op.phase is Phase.FORWARD and is_numbered(layer := layer_of(op.module)):
            ops.setdefault(layer, []).append(op)
    forms = {
        layer: tuple((op.target, op.flops, op.moved_bytes) for op in layer_ops)
        for layer, layer_ops in ops.items()
        if sum(op.flops > 0 for op in layer_ops) >= _MIN_PRODUCTS
        and not any(op.target.startswith(_CONVOLUTION) for op in layer_ops)
    }
    count = Counter(forms.values())
    return frozenset(layer for layer, form in forms.items() if count[form] >= least)


def layer_spans(ops: Sequence[Op], alike: frozenset[str]) -> tuple[LayerSpan, ...]:
    """Return the spans of the layers `alike`, as `layers_alike` returns them, in each phase, in order.

    A layer without a matrix product in a phase has no span in the phase. If a matrix product of the same phase comes
    after the last such layer, an empty span (`last` is `first - 1`) marks where that layer ends.
    """
    if not alike:
        return ()
    layers = [layer_of(op.module) for op in ops]
    products: dict[tuple[Phase, str], list[int]] = {}
    last: dict[Phase, int] = {}
    for i, op in enumerate(ops):
        if op.phase is not Phase.UPDATE and layers[i] in alike:
            last[op.phase] = i
            if op.flops:
                products.setdefault((op.phase, layers[i]), []).append(i)
    found: list[LayerSpan] = []
    for phase, end in last.items():
        by_layer = sorted(indices for (of, _), indices in products.items() if of is phase)
        firsts = [_run_start(ops, layers, indices[0]) for indices in by_layer]
        lasts = [*(first - 1 for first in firsts[1:]), end]
        found += [
            LayerSpan(first, indices[0], min(indices[-1], last), last)
            for first, indices, last in zip(firsts, by_layer, lasts, strict=True)
        ]
        behind = next((i for i in range(end + 1, len(ops)) if ops[i].phase is not phase or ops[i].flops), len(ops))
        if behind < len(ops) and ops[behind].phase is phase:
            found.append(LayerSpan(end + 1, behind, behind, end))
    return tuple(sorted(found))


def lap_spans(ops: Sequence[Op], laps: Sequence[Lap]) -> tuple[LayerSpan, ...]:
    """Return the spans of the divided `laps`, within which a plan cannot act: every op of a lap counts as before the
    first matrix product and as behind the last."""
    index = {op.id: i for i, op in enumerate(ops)}
    return tuple(LayerSpan(index[lap.first], index[lap.last], index[lap.first], index[lap.last]) for lap in laps)


def _run_start(ops: Sequence[Op], layers: Sequence[str], product: int) -> int:
    """Return the first of the consecutive ops of the same layer and phase that end with op `product`."""
    first = product
    while first > 0 and layers[first - 1] == layers[product] and ops[first - 1].phase is ops[product].phase:
        first -= 1
    return first


def begin_of(spans: Sequence[LayerSpan], op: int) -> int:
    """Return the first op of the layer of `op` if `op` is not behind its first matrix product, else `op`."""
    span = _span_of(spans, op)
    return op if span is None or op > span.product else span.first


def end_of(spans: Sequence[LayerSpan], op: int) -> int:
    """Return the last op of the layer of `op` if `op` is not before its last matrix product, else `op`."""
    span = _span_of(spans, op)
    return op if span is None or op < span.last_product else span.last


def _span_of(spans: Sequence[LayerSpan], op: int) -> LayerSpan | None:
    at = bisect_right(spans, op, key=lambda span: span.first) - 1
    return spans[at] if at >= 0 and op <= spans[at].last else None


def windows_by_layer(spans: Sequence[LayerSpan], windows: Sequence[Window]) -> tuple[Window, ...]:
    """Return the `windows` of a bucket, in order, extended to the edges of layers by `begin_of` and `end_of`.

    Windows of a phase that then overlap or touch are merged.
    """
    found: list[Window] = []
    for window in windows:
        wide = replace(window, first=begin_of(spans, window.first), last=end_of(spans, window.last))
        if spans and found and found[-1].phase is wide.phase and wide.first <= found[-1].last + 1:
            found[-1] = replace(found[-1], last=max(found[-1].last, wide.last))
        else:
            found.append(wide)
    return tuple(found)
