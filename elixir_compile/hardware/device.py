"""What computes: a device with its own memory, and the host beside it."""

from collections.abc import Mapping
from dataclasses import dataclass

from elixir_compile.errors import InvalidPlan


def require_positive(what: str, **numbers: float) -> None:
    """Raise `InvalidPlan` naming the first number not above zero; a rate of zero would make a price infinite."""
    for name, number in numbers.items():
        if not number > 0:
            raise InvalidPlan(f"{what}: {name} must be positive, got {number!r}.")


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
        if "float32" not in self.flops_per_s:
            raise InvalidPlan(f"device {self.name}: flops_per_s has no entry for float32.")
        require_positive(f"device {self.name}", memory_bytes=self.memory_bytes, **self.flops_per_s)
        require_positive(
            f"device {self.name}",
            memory_bytes_per_s=self.memory_bytes_per_s,
            update_elements_per_s=self.update_elements_per_s,
        )
        if self.launch_s < 0 or not 0 <= self.reserve_bytes < self.memory_bytes:
            raise InvalidPlan(f"device {self.name}: launch_s is negative, or the reserve is no part of the memory.")


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

    def __post_init__(self) -> None:
        if self.busy_update_elements_per_s is not None:
            require_positive("host", busy_update_elements_per_s=self.busy_update_elements_per_s)
        require_positive(
            "host",
            memory_bytes=self.memory_bytes,
            cores=self.cores,
            memory_bytes_per_s=self.memory_bytes_per_s,
            update_elements_per_s=self.update_elements_per_s,
        )
