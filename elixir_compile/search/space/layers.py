"""Where equal layers begin and end, so that the regions of equal layers are equal, and each different one is compiled
once.

```text
  op       add  norm | mm  gelu  mm  add  norm | mm  gelu  mm  add  norm | mm
  module   h.0   h.1   h.1  h.1  h.1 h.1   h.2   h.2  h.2  h.2 h.2  ln_f   head
                 ^     ^ product of h.1    ^ first of h.2
```

Where a plan moves nothing, a layer's region begins at its first matrix product: the sum that ends one layer and the
norm that begins the next stay one kernel, and nothing is in memory that would not be there without the cut. Where it
moves something, regions begin at the layer's first op, and what the plan does before a layer's first or behind its last
matrix product it does at the layer's edge: a copy is there a few pointwise ops sooner, and goes a few later.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from elixir_compile.analysis.windows import Window
from elixir_compile.ir import Op, Phase, StepGraph
from elixir_compile.ir.graph import is_numbered, layer_of

_MIN_PRODUCTS = 2
"""A layer of one matrix product in the forward is no block: compiling it takes little, and running it apart much."""
_LAYOUTS_OF_ITS_OWN = "aten.convolution"
"""A compiler chooses the layout of convolutions and of all between them once per region."""


class LayerSpan(NamedTuple):
    """The ops of one layer in one phase, as op indices, both included."""

    first: int
    product: int
    """Its first matrix product."""
    last_product: int
    last: int
    """Before `first` for what follows the last layer."""


def layers_alike(graph: StepGraph, least: int | None) -> frozenset[str]:
    """Return the layers whose forward ops are those of at least `least` layers, itself one of them; none for None."""
    if least is None:
        return frozenset()
    ops: dict[str, list[Op]] = {}
    for op in graph.ops:
        if op.phase is Phase.FORWARD and is_numbered(layer := layer_of(op.module)):
            ops.setdefault(layer, []).append(op)
    forms = {
        layer: tuple((op.target, op.flops, op.moved_bytes) for op in own)
        for layer, own in ops.items()
        if sum(op.flops > 0 for op in own) >= _MIN_PRODUCTS
        and not any(op.target.startswith(_LAYOUTS_OF_ITS_OWN) for op in own)
    }
    count = Counter(forms.values())
    return frozenset(layer for layer, form in forms.items() if count[form] >= least)


def layer_spans(ops: Sequence[Op], alike: frozenset[str]) -> tuple[LayerSpan, ...]:
    """Return the spans of the layers `alike` among `ops`, in order, and one of no ops where what follows the last layer
    of a phase begins.

    A layer without a matrix product in a phase has no span there.
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
        own = sorted(places for (of, _), places in products.items() if of is phase)
        firsts = [_run_start(ops, layers, places[0]) for places in own]
        lasts = [*(first - 1 for first in firsts[1:]), end]
        found += [
            LayerSpan(first, places[0], min(places[-1], last), last)
            for first, places, last in zip(firsts, own, lasts, strict=True)
        ]
        behind = next((i for i in range(end + 1, len(ops)) if ops[i].phase is not phase or ops[i].flops), len(ops))
        if behind < len(ops) and ops[behind].phase is phase:
            found.append(LayerSpan(end + 1, behind, behind, end))
    return tuple(sorted(found))


def _run_start(ops: Sequence[Op], layers: Sequence[str], product: int) -> int:
    """Return the first of the ops of one layer that stand together up to its op `product`."""
    first = product
    while first > 0 and layers[first - 1] == layers[product] and ops[first - 1].phase is ops[product].phase:
        first -= 1
    return first


def begin_of(spans: Sequence[LayerSpan], op: int) -> int:
    """Return the first op of a layer for one up to its first product; `op` itself for any other."""
    span = _span_of(spans, op)
    return op if span is None or op > span.product else span.first


def end_of(spans: Sequence[LayerSpan], op: int) -> int:
    """Return the last op of a layer for one from its last product on; `op` itself for any other."""
    span = _span_of(spans, op)
    return op if span is None or op < span.last_product else span.last


def _span_of(spans: Sequence[LayerSpan], op: int) -> LayerSpan | None:
    at = bisect_right(spans, op, key=lambda span: span.first) - 1
    return spans[at] if at >= 0 and op <= spans[at].last else None


def windows_by_layer(spans: Sequence[LayerSpan], windows: Sequence[Window]) -> tuple[Window, ...]:
    """Return `windows`, of one bucket in order, each from and to the edge of a layer where it is near one; those that
    then overlap or touch are one."""
    found: list[Window] = []
    for window in windows:
        wide = replace(window, first=begin_of(spans, window.first), last=end_of(spans, window.last))
        if spans and found and found[-1].phase is wide.phase and wide.first <= found[-1].last + 1:
            found[-1] = replace(found[-1], last=max(found[-1].last, wide.last))
        else:
            found.append(wide)
    return tuple(found)
