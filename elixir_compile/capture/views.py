"""Which nodes only look at memory that another node made: views, and single results of an op that has several."""

import operator

import torch
from torch import fx

_LOOKS = (operator.getitem, torch.ops.aten._unsafe_view.default)
"""What looks at memory of another node though its schema does not say so."""


def viewed(node: fx.Node) -> fx.Node | None:
    """Return the node whose memory `node` looks at, or None when `node` makes its own value.

    With dynamic shapes a view has the sizes that it takes as inputs too: `view(x, [s0, 64])`.
    """
    if node.target not in _LOOKS and not getattr(node.target, "is_view", False):
        return None
    bases = [source for source in node.all_input_nodes if not is_number(source)]
    return bases[0] if len(bases) == 1 else None


def is_number(node: fx.Node) -> bool:
    """Whether the value of `node` is a number made of dynamic sizes, no tensor."""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))


def view_chain(node: fx.Node) -> list[fx.Node]:
    """Return `node`, what it looks at, what that looks at, and so on."""
    found = [node]
    while (base := viewed(found[-1])) is not None:
        found.append(base)
    return found


def is_view(node: fx.Node) -> bool:
    """Whether `node` is another look at memory: a view, or one of several results."""
    return viewed(node) is not None
