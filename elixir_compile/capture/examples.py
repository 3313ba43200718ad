"""The fake tensors that Dynamo left at the nodes of its graph: what a node gives, and whose memory it is."""

from collections.abc import Mapping

import torch
from torch import fx

from elixir_compile import compat


def example_of(node: fx.Node) -> object:
    """Return an example of the value of `node`, fake tensors where it has tensors; None if Dynamo left none."""
    return node.meta.get("example_value")


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    """Return the dense tensors in the value of `node`."""
    leaves = leaves_of(example_of(node))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided]


def storages_of(node: fx.Node) -> set[int]:
    """Return what identifies the memory of the dense tensors in the value of `node`."""
    return {compat.storage_key(leaf) for leaf in tensors_of(node)}


def leaves_of(value: object) -> list[object]:
    """Return what is in `value`, itself or, however deep, in the lists, tuples and dictionaries that it is made of."""
    if isinstance(value, Mapping):
        value = list(value.values())
    return [leaf for item in value for leaf in leaves_of(item)] if isinstance(value, (list, tuple)) else [value]
