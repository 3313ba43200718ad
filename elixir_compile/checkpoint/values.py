"""Convert nested Python values to JSON and back without pickle and without rounding; tensors are kept apart by key.

```text
  {"lr": 0.1, "betas": (0.9, 0.95), "step": tensor(3.)}
  {"lr": 0.1, "betas": {"$": "tuple", "items": [0.9, 0.95]}, "step": {"$": "tensor", "key": "optimizer.step"}}
```

These types come back unchanged: None, bool, int, float with infinities and NaN, complex, str, bytes, list, tuple, dict
with keys of these types, Counter, torch.dtype and torch.device. An OrderedDict or a defaultdict comes back as a dict.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch

_KIND = "$"
"""The field of a JSON object that holds the type of its value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deferred:
    """A tensor that is read only when it is written; `like` has its shape and dtype, on `meta`."""

    like: torch.Tensor
    read: Callable[[], torch.Tensor]


Sources = MutableMapping[str, "torch.Tensor | Deferred"]
"""Tensors by key."""


class UnsupportedValue(Exception):  # noqa: N818 - never leaves this package
    """The value at `key` has an unsupported type; `save`, which knows the path, raises NotSavable instead."""

    def __init__(self, key: str, kind: str) -> None:
        super().__init__(key, kind)
        self.key = key
        self.kind = kind


def to_plain(value: Any, key: str, sources: Sources) -> Any:
    """Return `value` as JSON can hold it, and put its tensors in `sources`, by `key` and their path in the value.

    Raises UnsupportedValue for a value of an unsupported type.
    """
    if isinstance(value, torch.Tensor | Deferred):
        sources[key] = value
        return tensor_at(key)
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_KIND: "float", "text": repr(float(value))}
    return _object_to_plain(value, key, sources)


def _object_to_plain(value: Any, key: str, sources: Sources) -> Any:
    if isinstance(value, Counter):
        return {_KIND: "counter", "items": _items_to_plain(value, key, sources)}
    if isinstance(value, Mapping):
        if all(isinstance(name, str) for name in value) and _KIND not in value:
            return {name: to_plain(item, f"{key}.{name}", sources) for name, item in value.items()}
        return {_KIND: "dict", "items": _items_to_plain(value, key, sources)}
    if isinstance(value, tuple):
        return {_KIND: "tuple", "items": _list_to_plain(value, key, sources)}
    if isinstance(value, list):
        return _list_to_plain(value, key, sources)
    if isinstance(value, complex):
        return {_KIND: "complex", "parts": [repr(value.real), repr(value.imag)]}
    if isinstance(value, bytes):
        return {_KIND: "bytes", "hex": value.hex()}
    if isinstance(value, torch.dtype | torch.device):
        return {_KIND: "torch", "name": str(value)}
    raise UnsupportedValue(key, f"a {type(value).__module__}.{type(value).__qualname__}")


def tensor_at(key: str) -> Mapping[str, str]:
    """Return the JSON object that stands for the tensor under `key`."""
    return {_KIND: "tensor", "key": key}


def key_of(plain: Any) -> str | None:
    """Return the key of the tensor if `plain` stands for a tensor, else None."""
    return plain["key"] if isinstance(plain, Mapping) and plain.get(_KIND) == "tensor" else None


def tensor_keys(plain: Any) -> Iterator[str]:
    """Yield the keys of all tensors in `plain`, the result of `to_plain`."""
    key = key_of(plain)
    if key is not None:
        yield key
    elif isinstance(plain, list | Mapping):
        for item in plain.values() if isinstance(plain, Mapping) else plain:
            yield from tensor_keys(item)


def from_plain(plain: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the value of `plain`, as the inverse of `to_plain`. Raises KeyError if `tensors` lacks a key."""
    if isinstance(plain, list):
        return [from_plain(item, tensors) for item in plain]
    if not isinstance(plain, Mapping):
        return plain
    kind = plain.get(_KIND)
    if kind is None:
        return {name: from_plain(item, tensors) for name, item in plain.items()}
    return _READERS[kind](plain, tensors)


def _items_to_plain(value: Mapping[Any, Any], key: str, sources: Sources) -> list[Any]:
    return [
        [to_plain(name, f"{key}.{index}.key", sources), to_plain(item, f"{key}.{index}", sources)]
        for index, (name, item) in enumerate(value.items())
    ]


def _list_to_plain(value: Iterable[Any], key: str, sources: Sources) -> list[Any]:
    return [to_plain(item, f"{key}.{index}", sources) for index, item in enumerate(value)]


def _pairs(plain: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[Any, Any]:
    return {from_plain(name, tensors): from_plain(item, tensors) for name, item in plain["items"]}


def _from_torch(name: str) -> "torch.dtype | torch.device":
    found = getattr(torch, name.removeprefix("torch."), None) if name.startswith("torch.") else None
    return found if isinstance(found, torch.dtype) else torch.device(name)


_READERS: Mapping[str, Callable[[Mapping[str, Any], Mapping[str, torch.Tensor]], Any]] = {
    "tensor": lambda plain, tensors: tensors[plain["key"]],
    "float": lambda plain, tensors: float(plain["text"]),
    "complex": lambda plain, tensors: complex(*map(float, plain["parts"])),
    "bytes": lambda plain, tensors: bytes.fromhex(plain["hex"]),
    "torch": lambda plain, tensors: _from_torch(plain["name"]),
    "tuple": lambda plain, tensors: tuple(from_plain(item, tensors) for item in plain["items"]),
    "dict": _pairs,
    "counter": lambda plain, tensors: Counter(_pairs(plain, tensors)),
}
