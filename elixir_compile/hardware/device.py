"""Profiles of a device, of a host, and of the links between them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from elixir_compile.errors import InvalidProfile

_LEAST_RATE, _MOST_RATE = 1e-9, 1e30
"""Limits of rates per second. Between them, seconds of at most 2**63 bytes are finite numbers."""
_MOST_LATENCY_S = 1e9


def require_positive(what: str, **numbers: float | None) -> None:
    """Raise InvalidProfile for the first number that is not positive and finite; None is allowed.

    A rate of zero would make seconds infinite.
    """
    for name, number in numbers.items():
        if number is None:
            continue
        if not 0 < number < math.inf:
            raise InvalidProfile(what, name, "a positive finite number", number)
        if not _LEAST_RATE <= number <= _MOST_RATE:
            raise InvalidProfile(what, name, f"a number from {_LEAST_RATE} to {_MOST_RATE}", number)


def require_not_negative(what: str, **numbers: float) -> None:
    """Raise InvalidProfile for the first number that is negative or not finite."""
    for name, number in numbers.items():
        if not 0 <= number < math.inf:
            raise InvalidProfile(what, name, "a finite number of 0 or more", number)
        if number > _MOST_LATENCY_S and name.endswith("_s"):
            raise InvalidProfile(what, name, f"at most {_MOST_LATENCY_S} seconds", number)


def require_part(what: str, name: str, part_bytes: int, of_bytes: int) -> None:
    """Raise InvalidProfile if `part_bytes`, called `name`, is negative or takes all of the memory of `of_bytes`."""
    if not 0 <= part_bytes < of_bytes:
        raise InvalidProfile(what, name, f"0 or more and less than memory_bytes = {of_bytes}", part_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """A device as the planner sees it: its memory and its rates."""

    name: str
    memory_bytes: int
    reserve_bytes: int
    """Bytes that no plan may use: for the context, libraries and fragmentation."""
    flops_per_s: Mapping[str, float]
    """Rates by dtype as torch prints it. Must hold `float32`, which is used for every missing dtype."""
    memory_bytes_per_s: float
    launch_s: float
    """Fixed seconds of each op."""
    update_elements_per_s: float
    """Elements that the optimizer updates per second with parameter, gradient and state on the device."""
    source: str
    """The origin of the numbers: a data sheet, a paper, a measurement."""

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
    """The host, which can hold training state and update it."""

    memory_bytes: int
    pinned_bytes: int
    """The most bytes that may be page-locked."""
    reserve_bytes: int
    cores: int
    memory_bytes_per_s: float
    update_elements_per_s: float
    """Elements that the optimizer updates per second with parameter, gradient and state on the host."""
    source: str
    busy_update_elements_per_s: float | None = None
    """Elements updated per second while copies use the host's memory too; None if not measured."""
    disk_read_bytes_per_s: float | None = None
    """Rate of reads of large blocks from the disk for optimizer state; None if not measured."""
    disk_write_bytes_per_s: float | None = None
    """Rate of writes of large blocks; None if not measured."""

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
    """A connection in a single direction: seconds = latency_s + bytes / bytes_per_s."""

    bytes_per_s: float
    latency_s: float
    overlaps_compute: bool
    """True if the device computes while the link copies; False if the same cores do both."""
    source: str
    busy_bytes_per_s: float | None = None
    """Rate while the other direction copies too; None if not measured."""

    def __post_init__(self) -> None:
        require_positive("link", bytes_per_s=self.bytes_per_s, busy_bytes_per_s=self.busy_bytes_per_s)
        require_not_negative("link", latency_s=self.latency_s)
