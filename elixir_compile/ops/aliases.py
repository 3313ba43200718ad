"""Tensors over one memory, which would come apart if one of them moved: `head.weight.data = embed.weight.data`.

Views of one storage that do not overlap come apart only for somebody else who holds the storage, as the flat buffer of
apex or `vector = parameters_to_vector(...)` does; without one they may move.
"""

from collections.abc import Iterable, Sequence

import torch

from elixir_compile import compat
from elixir_compile.ops.shards import is_shared

Named = tuple[str, torch.Tensor]


def aliases(named: Iterable[Named]) -> dict[str, str]:
    """Return the tensors that must not move one by one, by name, each with the name of one whose memory it shares.

    Tensors on `meta` and those of several ranks have no memory to share.
    """
    groups: dict[int, dict[int, Named]] = {}
    with torch.DisableTorchFunctionSubclass():  # an update may be queued, and nobody reads here
        for name, tensor in named:
            if not (tensor.is_meta or is_shared(tensor)) and tensor.numel():
                groups.setdefault(compat.storage_key(tensor), {})[id(tensor)] = (name, tensor)
        found: dict[str, str] = {}
        for group in groups.values():
            if len(group) > 1:
                found |= _bound_together(list(group.values()))
    return found


def _bound_together(group: Sequence[Named]) -> dict[str, str]:
    """Return those of `group`, all of one storage, that must not move one by one."""
    if compat.num_holders(group[0][1].untyped_storage()) > len(group):
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
    """Return the first byte of `tensor` in its storage, and the first behind it."""
    start = tensor.storage_offset()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start * tensor.element_size(), (start + last + 1) * tensor.element_size()


def moved_together(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Move each of `tensors` to `device` in place; those of one storage still share one there."""
    storages: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        if tensor.device == device:
            continue
        if type(tensor.data) is not torch.Tensor or tensor.is_meta or tensor.numel() == 0:
            tensor.data = tensor.data.to(device)
            continue
        key = compat.storage_key(tensor)
        if key not in storages:
            before = tensor.untyped_storage()
            storages[key] = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(before).to(device)
        after = torch.empty(0, dtype=tensor.dtype, device=device)
        place = tensor.storage_offset(), tensor.shape, tensor.stride()
        tensor.data = after.set_(storages[key].untyped_storage(), *place)
