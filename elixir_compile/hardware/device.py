"""One device with its own memory, the host beside it, and the links between them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from elixir_compile.errors import InvalidProfile

_LEAST_RATE, _MOST_RATE = 1e-9, 1e30
"""Per second; seconds and bytes of a plan, at most 2**63, stay finite numbers at any rate between these."""
_MOST_LATENCY_S = 1e9


def require_positive(what: str, **numbers: float | None) -> None:
    """Raise `InvalidProfile` naming the first number that is not above zero and finite; None is not looked at.

    A rate of zero would make a price infinite.
    """
    for name, number in numbers.items():
        if number is None:
            continue
        if not 0 < number < math.inf:
            raise InvalidProfile(what, name, "a positive finite number", number)
        if not _LEAST_RATE <= number <= _MOST_RATE:
            raise InvalidProfile(what, name, f"a number from {_LEAST_RATE} to {_MOST_RATE}", number)


def require_not_negative(what: str, **numbers: float) -> None:
    """Raise `InvalidProfile` naming the first number that is below zero or not finite."""
    for name, number in numbers.items():
        if not 0 <= number < math.inf:
            raise InvalidProfile(what, name, "a finite number of 0 or more", number)
        if number > _MOST_LATENCY_S and name.endswith("_s"):
            raise InvalidProfile(what, name, f"at most {_MOST_LATENCY_S} seconds", number)


def require_part(what: str, name: str, part_bytes: int, of_bytes: int) -> None:
    """Raise `InvalidProfile` where the bytes called `name` are negative or leave nothing of the memory they are in."""
    if not 0 <= part_bytes < of_bytes:
        raise InvalidProfile(what, name, f"0 or more and less than memory_bytes = {of_bytes}", part_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """One device as the planner sees it: its memory and how fast it computes."""

    name: str
    memory_bytes: int
    reserve_bytes: int
    """Bytes never planned for: the context, libraries, fragmentation."""
    flops_per_s: Mapping[str, float]
    """By dtype as torch prints it; must hold `float32`, which stands for every dtype that is missing."""
    memory_bytes_per_s: float
    launch_s: float
    """Fixed seconds of one op."""
    update_elements_per_s: float
    """Parameters that the optimizer updates per second where state, gradient and parameter are all on the device."""
    source: str
    """Where the numbers come from."""

    def __post_init__(self) -> None:
        what = f"device {self.name}"
        if "float32" not in self.flops_per_s:
            raise InvalidProfile(what, "flops_per_s", "an entry for float32", dict(self.flops_per_s))
        require_positive(
            what,
            memory_bytes=self.memory_bytes,
            memory_bytes_per_s=self.memory_bytes_per_s,
            update_elements_per_s=self.update_elements_per_s,
            **{f"flops_per_s.{dtype}": rate for dtype, rate in self.flops_per_s.items()},
        )
        require_not_negative(what, launch_s=self.launch_s)
        require_part(what, "reserve_bytes", self.reserve_bytes, self.memory_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostProfile:
    """The host as a place for training state, and as the optimizer's second processor."""

    memory_bytes: int
    pinned_bytes: int
    """Largest total that may be page-locked."""
    reserve_bytes: int
    cores: int
    memory_bytes_per_s: float
    update_elements_per_s: float
    """Parameters that the optimizer updates per second where state, gradient and parameter are all on the host."""
    source: str
    busy_update_elements_per_s: float | None = None
    """The same while copies run, which share the host's memory; None where that was not measured."""
    disk_read_bytes_per_s: float | None = None
    """From the disk for optimizer state, in large blocks; None where that was not measured."""
    disk_write_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        require_positive(
            "host",
            disk_read_bytes_per_s=self.disk_read_bytes_per_s,
            disk_write_bytes_per_s=self.disk_write_bytes_per_s,
            memory_bytes=self.memory_bytes,
            cores=self.cores,
            memory_bytes_per_s=self.memory_bytes_per_s,
            update_elements_per_s=self.update_elements_per_s,
            busy_update_elements_per_s=self.busy_update_elements_per_s,
        )
        require_not_negative("host", pinned_bytes=self.pinned_bytes)
        require_part("host", "reserve_bytes", self.reserve_bytes, self.memory_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One direction of a connection: seconds = latency_s + bytes / bytes_per_s."""

    bytes_per_s: float
    latency_s: float
    overlaps_compute: bool
    """Whether the device computes while the link copies; False where both are work for the same cores."""
    source: str
    busy_bytes_per_s: float | None = None
    """The rate while the other direction copies too; None where that was not measured."""

    def __post_init__(self) -> None:
        require_positive("link", bytes_per_s=self.bytes_per_s, busy_bytes_per_s=self.busy_bytes_per_s)
        require_not_negative("link", latency_s=self.latency_s)
