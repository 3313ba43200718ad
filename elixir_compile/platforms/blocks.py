"""The blocks of an accelerator's allocator while a step runs, from the history that torch keeps of it.

```text
  snapshot["segments"]        the blocks that are there                      nbytes_at
  entry "snapshot"            the moment of that snapshot                    entries before it are in nbytes_at
  entry "alloc"               a tensor asked for a block                     (time, address, bytes)
  entry "free_requested"      its last tensor is gone                        nothing: a stream may still use the memory
  entry "free_completed"      the block is free                              (time, address, -bytes)
```

Bytes are those that tensors asked for, which is what `Platform.peak_bytes` counts.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from elixir_compile import compat

MOST_ENTRIES = 200_000
"""The most entries of a history: a step of Llama 7B has about 20,000. If there are more, the first are lost."""


class BlockRecord:
    """The blocks of the allocator of a device from the creation of the record to `stop`."""

    def __init__(self, device: torch.device) -> None:
        """The history of the allocator must be on. Raises AttributeError if torch has none for the type."""
        self._device = device
        self.nbytes_at = live_blocks(compat.allocator_snapshot(device.type), device.index or 0)
        """Bytes of the blocks at the creation, by address."""

    def stop(self) -> Sequence[tuple[int, int, int]] | None:
        """End the record; return (time, address, bytes) of each block that came or went, in order.

        Times are ns on the clock of `time.time_ns`, in steps of a microsecond. Bytes are negative if the block was
        freed. None if there were more entries than the allocator keeps.
        """
        snapshot = compat.allocator_snapshot(self._device.type)
        compat.stop_allocator_history(self._device.type)
        return block_events(snapshot, self._device.index or 0, MOST_ENTRIES)


def record_blocks(device: torch.device) -> BlockRecord | None:
    """Return a record of the blocks of `device` that runs; None if torch keeps no history, or keeps one for others."""
    return BlockRecord(device) if compat.start_allocator_history(device.type, MOST_ENTRIES) else None


def live_blocks(snapshot: Mapping[str, Any], index: int) -> dict[int, int]:
    """Return the bytes that were asked for of each block in use on the device with `index`, by address.

    A block that a stream still uses after its last tensor is gone is in use.
    """
    return {
        block["address"]: block["requested_size"]
        for segment in snapshot["segments"]
        if segment["device"] == index
        for block in segment["blocks"]
        if block["state"] != "inactive"
    }


def block_events(snapshot: Mapping[str, Any], index: int, most_entries: int) -> list[tuple[int, int, int]] | None:
    """Return (time in ns, address, bytes) of the blocks that came or went on the device with `index`, in order.

    Entries up to the first snapshot of the history are left out. Bytes are negative if the block was freed. None if the
    history has `most_entries`, so that its first may be lost.
    """
    entries = snapshot["device_traces"][index]
    if len(entries) >= most_entries:
        return None
    marks = [place for place, entry in enumerate(entries) if entry["action"] == "snapshot"]
    return [
        (entry["time_us"] * 1000, entry["addr"], entry["size"] if entry["action"] == "alloc" else -entry["size"])
        for entry in entries[marks[0] + 1 if marks else 0 :]
        if entry["action"] in ("alloc", "free_completed")
    ]
