"""Which prepared parameter is meant: from a key in a captured graph, or from a `Parameter`, to its slot.

A slot ties one parameter of a prepared model to its executor. Both maps are weak: a slot lives as long as its
executor, and the executor as long as the modules it prepared.
"""

import itertools
import weakref
from typing import Protocol

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from elixir_compile.errors import NotPrepared


class GradientSink(Protocol):
    """What a slot needs of its executor."""

    def accumulate(self, slot: "Slot", grad: torch.Tensor) -> None:
        """Add `grad` to the gradient of the slot's parameter; it is published when the backward ends."""
        ...


class Slot:
    """One parameter of a prepared model: where autograd meets it and who runs it."""

    __slots__ = ("__weakref__", "device", "key", "name", "param", "sink")

    def __init__(
        self, key: int, name: str, param: torch.nn.Parameter, device: torch.device, sink: GradientSink
    ) -> None:
        self.key = key
        self.name = name
        self.param = param
        self.device = device
        self.sink = sink

    @property
    def nbytes(self) -> int:
        """Bytes of the parameter."""
        return self.param.numel() * self.param.element_size()

    def whole(self) -> torch.Tensor:
        """Return the parameter's values on the compute device, detached; an alias where it already is there."""
        return self.param.detach().to(self.device)

    def handle(self) -> torch.Tensor:
        """Return a new one-element leaf that stands for the parameter in autograd."""
        return torch.zeros(1, dtype=self.param.dtype, device=self.device, requires_grad=self.param.requires_grad)


_KEYS = itertools.count()
_BY_KEY: "weakref.WeakValueDictionary[int, Slot]" = weakref.WeakValueDictionary()
_BY_PARAM = WeakTensorKeyDictionary()
_HYBRID = WeakTensorKeyDictionary()


def new_slot(name: str, param: torch.nn.Parameter, device: torch.device, sink: GradientSink) -> Slot:
    """Make the slot of `param` and enter it in the registry."""
    slot = Slot(next(_KEYS), name, param, device, sink)
    _BY_KEY[slot.key] = slot
    _BY_PARAM[param] = weakref.ref(slot)
    return slot


def slot_by_key(key: int) -> Slot:
    """Return the slot with `key`; NotPrepared when its model is gone."""
    slot = _BY_KEY.get(key)
    if slot is None:
        raise NotPrepared(f"parameter {key} belongs to a model that no longer exists; compile the model again")
    return slot


def slot_of(param: torch.Tensor) -> Slot | None:
    """Return the slot of `param`, or None when no prepared model owns it."""
    reference = _BY_PARAM.get(param)
    return None if reference is None else reference()


def claim_for_hybrid(param: torch.Tensor) -> None:
    """Note that a hybrid optimizer updates `param`, so its state may live apart from it."""
    _HYBRID[param] = True


def is_hybrid(param: torch.Tensor) -> bool:
    """Whether a hybrid optimizer updates `param`."""
    return param in _HYBRID
