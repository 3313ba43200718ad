"""From what was there and what the allocator did to the most that was there at once."""

import heapq
from collections.abc import Iterable, Mapping


def peak_bytes(
    resident: Mapping[int, int], freed: Iterable[tuple[int, int]], allocations: Iterable[tuple[int, int, int]]
) -> int:
    """Return the most bytes live at once, in a step that began with `resident` bytes by address.

    `freed` are (time, address) of resident blocks that died; `allocations` are (time, address, bytes; below 0 when
    freed) in order, on the same clock. A block is known by its address: torch reports the end of a block from before
    the step in some cases (it was allocated under an earlier profiler) and not in others, and for an address it
    remembers from an earlier profiler it may report a stale size.
    """
    before, during = dict(resident), dict[int, int]()
    live = most = sum(before.values())
    deaths = sorted((at, address, 0) for at, address in freed)
    for _, address, nbytes in heapq.merge(deaths, allocations, key=lambda event: event[0]):
        if nbytes > 0:
            # Whatever was at this address is gone, told or not.
            live += nbytes - during.pop(address, 0) - before.pop(address, 0)
            during[address] = nbytes
            most = max(most, live)
        elif nbytes < 0 and address in during:
            live -= during.pop(address)
        else:
            live -= before.pop(address, 0)
    return most
