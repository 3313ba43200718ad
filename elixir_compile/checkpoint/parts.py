"""Which rank writes what: of a tensor that is cut over ranks each its part, and every other tensor one rank.

```text
  cut over 2 ranks       rank 0: rows 0-49    rank 1: rows 50-99
  the same on a 2 x 2    ranks 0, 1 the first such tensor, ranks 2, 3 the next: copies share the work
  a copy on each rank    rank 0 the first, rank 1 the next
  no DTensor             rank 0
```
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from elixir_compile.checkpoint.values import Deferred, Sources
from elixir_compile.ops.shards import is_dtensor, own_part


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a part lies in its tensor."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    """Of the whole tensor."""


def keep_own(sources: Sources, *, is_first: bool) -> Mapping[str, Place]:
    """Leave in `sources` what this rank writes of them, plain tensors; return the places of those that are parts.

    Every rank has the same keys in the same order.
    """
    places: dict[str, Place] = {}
    num_shared = 0
    for key, source in list(sources.items()):
        like = source.like if isinstance(source, Deferred) else source
        if not is_dtensor(like):
            if not is_first:
                del sources[key]
            continue
        if _writes(like, num_shared):
            (chunk,) = like.__create_chunk_list__()
            places[key] = Place(offsets=tuple(chunk.offsets), shape=tuple(like.shape))
            sources[key] = _own(source)
        else:
            del sources[key]
        num_shared += 1
    return places


def _writes(like: torch.Tensor, number: int) -> bool:
    """Return whether this rank writes its part of `like`, the `number`-th tensor that ranks share."""
    mesh = like.device_mesh
    coordinate = mesh.get_coordinate()
    if not like.numel():
        return not any(coordinate)
    axes = zip(like.placements, coordinate, mesh.shape, strict=True)
    is_turn = all(place == number % size for placement, place, size in axes if placement.is_replicate())
    return is_turn and own_part(like).numel() > 0


def _own(source: "torch.Tensor | Deferred") -> "torch.Tensor | Deferred":
    if isinstance(source, Deferred):
        return Deferred(like=own_part(source.like), read=source.read)
    return own_part(source)
