"""Find tensors with shared memory, which must not be moved one by one, as after `head.weight.data = embed.weight.data`.

Views of one storage that do not overlap may move, unless another object holds the storage: the flat buffer of apex, or
`vector = parameters_to_vector(...)`. A parameter of another model may share the memory too:
`student.load_state_dict(teacher.state_dict(), assign=True)`.
"""

import contextlib
import gc
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import nn

from elixir_compile import compat
from elixir_compile.graph.ops.shards import is_dtensor

Named = tuple[str, torch.Tensor]


def aliases(named: Iterable[Named]) -> dict[str, str]:
    """Return the names of tensors that must move together, each with the name of a tensor in the same memory.

    Tensors on `meta` and DTensors are left out.
    """
    with torch.DisableTorchFunctionSubclass():  # reads no value, so it need not wait for a queued update
        groups = _by_storage(named)
        found: dict[str, str] = {}
        for group in groups.values():
            if len(group) > 1:
                found |= _bound_together(group)
        held = {key: {id(tensor) for _, tensor in group} for key, group in groups.items() if _has_other_holders(group)}
        for key in _storages_of_other_parameters(held):
            found |= {name: "a parameter of another model" for name, _ in groups[key]}
    return found


def held_by_others(named: Iterable[Named]) -> list[str]:
    """Return the names of the tensors that share memory with a tensor outside of `named`."""
    with torch.DisableTorchFunctionSubclass():
        groups = _by_storage(named).values()
        return [name for group in groups if _has_other_holders(group) for name, _ in group]


def _by_storage(named: Iterable[Named]) -> dict[int, list[Named]]:
    """Return the tensors by the key of their storage, each tensor once."""
    groups: dict[int, dict[int, Named]] = {}
    for name, tensor in named:
        if not (tensor.is_meta or is_dtensor(tensor)) and tensor.numel():
            groups.setdefault(compat.storage_key(tensor), {})[id(tensor)] = (name, tensor)
    return {key: list(group.values()) for key, group in groups.items()}


def _has_other_holders(group: Sequence[Named]) -> bool:
    return compat.num_holders(group[0][1].untyped_storage()) > len(group)


def _storages_of_other_parameters(held: Mapping[int, Collection[int]]) -> set[int]:
    """Return the keys of the storages in `held` that another parameter of the process uses.

    `held` has the ids of the known tensors of each storage.
    """

    def found() -> set[int]:
        keys: set[int] = set()
        for other in gc.get_objects():
            if issubclass(type(other), nn.Parameter) and not (other.is_meta or is_dtensor(other)):
                with contextlib.suppress(RuntimeError):  # a tensor subclass without memory of its own
                    key = compat.storage_key(other)
                    if key in held and id(other) not in held[key]:
                        keys.add(key)
        return keys

    if not held or not found():
        return set()
    gc.collect()  # the parameter may belong to a deleted model, not collected yet
    return found()


def _bound_together(group: Sequence[Named]) -> dict[str, str]:
    """Return the tensors of `group`, all in one storage, that must move together, in the form of `aliases`."""
    if _has_other_holders(group):
        return {name: next(other for other, _ in group if other != name) for name, _ in group}
    spans = sorted((*_span(tensor), name) for name, tensor in group)
    found: dict[str, str] = {}
    furthest, last = -1, ""
    for start, end, name in spans:
        if start < furthest:
            found.setdefault(last, name)
            found[name] = last
        if end > furthest:
            furthest, last = end, name
    return found


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the offsets in the storage of the first byte of `tensor` and of the first byte behind it."""
    start = int(tensor.storage_offset())
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start * tensor.element_size(), (start + last + 1) * tensor.element_size()


def moved_together(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Move `tensors` to `device` in place. Tensors that share a storage share a storage on `device` too."""
    storages: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        if tensor.device == device:
            continue
        if type(tensor.data) is not torch.Tensor or tensor.is_meta or tensor.numel() == 0:
            tensor.data = tensor.data.to(device)
            continue
        key = compat.storage_key(tensor)
        if key not in storages:
            storages[key] = compat.bytes_of(tensor.untyped_storage()).to(device)
        tensor.data = compat.MemoryView.of(tensor).over(storages[key].untyped_storage())
