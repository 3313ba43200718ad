"""What carries bytes between two memories, in one direction."""

from dataclasses import dataclass

from elixir_compile.hardware.device import require_not_negative, require_positive


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
