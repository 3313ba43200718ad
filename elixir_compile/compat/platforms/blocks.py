"""The blocks of an accelerator's allocator while a step runs, from the history that torch keeps of it.

```text
  snapshot["segments"]        the blocks that are there                      nbytes_at
  entry "snapshot"            the moment of that snapshot, or of another's   entries before it are in nbytes_at
  entry "alloc"               a tensor asked for a block                     (time, address, bytes)
  entry "free_requested"      its last tensor is gone                        nothing: a stream may still use the memory
  entry "free_completed"      the block is free                              (time, address, -bytes)
```

Bytes are those that tensors asked for, which is what `Platform.peak_bytes` counts. Several records may run at a time,
over one history.
"""

import threading
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from elixir_compile import compat

MOST_ENTRIES = 200_000
"""The most entries of a history: a step of Llama 7B has about 20,000. If there are more, the first are lost."""


_lock = threading.RLock()  # the collector may end a record while this thread begins another
_running: Counter[str] = Counter()
"""The number of records that run, by device type: the first starts the history, the last ends it."""


class BlockRecord:
    """The blocks of the allocator of a device from the creation of the record to `stop`."""

    def __init__(self, device: torch.device) -> None:
        """The history of the allocator must be on. Raises AttributeError if torch has none for the type."""
        self._device = device
        self._index = device.index or 0
        snapshot = compat.allocator_snapshot(device.type)
        self.nbytes_at = live_blocks(snapshot, self._index)
        """Bytes of the blocks at the creation, by address."""
        entries = snapshot["device_traces"][self._index]
        is_marked = bool(entries) and entries[-1]["action"] == "snapshot"
        self._mark = sum(entry["action"] == "snapshot" for entry in entries) - is_marked
        """The number of snapshots in the history before that of the creation."""
        self._end = weakref.finalize(self, _end, device.type)  # its owner may be gone before it stops the record
        self._end.atexit = False

    def stop(self) -> Sequence[tuple[int, int, int]] | None:
        """End the record; return (time, address, bytes) of each block that came or went, in order.

        Times are ns on the clock of `time.time_ns`, in steps of a microsecond. Bytes are negative if the block was
        freed. None if there were more entries than the allocator keeps, or somebody else began a new history.
        """
        with _lock:
            snapshot = compat.allocator_snapshot(self._device.type)
            if self._end.detach() is not None:
                _end(self._device.type, snapshot)
        return block_events(snapshot, self._index, MOST_ENTRIES, self._mark)


def record_blocks(device: torch.device) -> BlockRecord | None:
    """Return a record of the blocks of `device` that runs; None if torch keeps no history, or keeps one for others."""
    with _lock:
        if not _running[device.type] and not compat.start_allocator_history(device.type, MOST_ENTRIES):
            return None
        _running[device.type] += 1
        try:
            return BlockRecord(device)
        except BaseException:
            _end(device.type)
            raise


def _end(device_type: str, snapshot: Mapping[str, Any] | None = None) -> None:
    """End one record of devices of the type, and the history with the last, unless somebody else began it anew.

    `snapshot` is one of now; None if there is none yet.
    """
    with _lock:
        _running[device_type] -= 1
        if not _running[device_type] and not _is_of_others(snapshot or compat.allocator_snapshot(device_type)):
            compat.stop_allocator_history(device_type)


def _is_of_others(snapshot: Mapping[str, Any]) -> bool:
    """Return whether the history in `snapshot` has stacks, as that of torch's own functions by default: this package
    records none. A history that somebody else began just now, or without stacks, is not told apart."""
    return any(entry.get("frames") for entries in snapshot["device_traces"] for entry in entries)


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


def block_events(
    snapshot: Mapping[str, Any], index: int, most_entries: int, mark: int = 0
) -> list[tuple[int, int, int]] | None:
    """Return (time in ns, address, bytes) of the blocks that came or went on the device with `index`, in order.

    Entries up to the snapshot with the number `mark` in the history are left out. Bytes are negative if the block was
    freed. None if the history has `most_entries`, so that its first may be lost, or if it began after that snapshot.
    """
    entries = snapshot["device_traces"][index]
    marks = [place for place, entry in enumerate(entries) if entry["action"] == "snapshot"]
    if len(entries) >= most_entries or mark > len(marks):
        return None
    return [
        (entry["time_us"] * 1000, entry["addr"], entry["size"] if entry["action"] == "alloc" else -entry["size"])
        for entry in entries[marks[mark] + 1 if mark < len(marks) else 0 :]
        if entry["action"] in ("alloc", "free_completed")
    ]
