"""How far off the device one bucket is: each level holds fewer device bytes than the one before, on one rank.

KEPT                parameters and optimizer state on the device
KEPT_RELEASED       the same; several ranks gather it for each window of uses and release it after
STATE_OFF           optimizer state on the host, parameters on the device; only where the hybrid optimizer owns them
STATE_OFF_RELEASED  the same; several ranks gather it for each window of uses and release it after
RESIDENT            both on the host; one gathered copy from the first use in the forward to the last in the backward
STREAMED            both on the host; gathered for each window of uses, released after it

On several ranks each owns a shard, and a bucket is gathered at every level; one rank gathers what is on the host.
"""

from enum import IntEnum

from elixir_compile.analysis.staging import sum_host_bytes
from elixir_compile.ir import Bucket, Placement, Tier


class Level(IntEnum):
    KEPT = 0
    KEPT_RELEASED = 1
    STATE_OFF = 2
    STATE_OFF_RELEASED = 3
    RESIDENT = 4
    STREAMED = 5

    @property
    def has_state_on_host(self) -> bool:
        return self >= Level.STATE_OFF

    @property
    def has_param_on_host(self) -> bool:
        return self >= Level.RESIDENT

    @property
    def home(self) -> Tier:
        """Where parameters and gradients live."""
        return Tier.HOST if self.has_param_on_host else Tier.DEVICE

    @property
    def is_released(self) -> bool:
        """Whether a gathered copy goes after each window of uses."""
        return self in (Level.KEPT_RELEASED, Level.STATE_OFF_RELEASED, Level.STREAMED)


def is_gathered(bucket: Bucket, level: Level) -> bool:
    """Return whether `bucket` has a gathered copy at `level`."""
    return bucket.is_sharded or level.has_param_on_host


def placement_of(bucket: Bucket, level: Level, *, streamed: bool = False) -> Placement:
    """Return the placement that puts `bucket` at `level`, its update `streamed` or where its state lives."""
    optim = Tier.HOST if level.has_state_on_host else Tier.DEVICE
    return Placement(bucket=bucket.id, param=level.home, optim=optim, resident=not level.is_released, streamed=streamed)


def level_of(placement: Placement) -> Level:
    """Return the level that `placement` is, streamed or not."""
    if placement.param is not Tier.DEVICE:
        return Level.RESIDENT if placement.resident else Level.STREAMED
    if placement.optim is Tier.DEVICE:
        return Level.KEPT if placement.resident else Level.KEPT_RELEASED
    return Level.STATE_OFF if placement.resident else Level.STATE_OFF_RELEASED


def levels_from(start: Level, bucket: Bucket, *, hybrid: bool, num_windows: int) -> tuple[Level, ...]:
    """Return `start` and every level further off that differs from the ones before, in order."""
    splits_state = hybrid and bucket.trainable and bucket.state_nbytes > 0
    # With one window there is nothing to stay resident between.
    has_gap = num_windows > 1
    differs = {
        Level.KEPT_RELEASED: bucket.is_sharded and has_gap,
        Level.STATE_OFF: splits_state,
        Level.STATE_OFF_RELEASED: splits_state and bucket.is_sharded and has_gap,
        Level.RESIDENT: has_gap,
        Level.STREAMED: True,
    }
    return (start, *(level for level, is_other in differs.items() if level > start and is_other))


def host_bytes_of(bucket: Bucket, level: Level) -> int:
    """Return the host bytes of one rank: state, and parameters and gradients or their staging."""
    if not level.has_state_on_host:
        return 0
    grad_nbytes = bucket.shard_grad_nbytes() if bucket.trainable else 0
    sums_bytes = sum_host_bytes(bucket, level.home, Tier.HOST)
    return bucket.shard_nbytes() + grad_nbytes + bucket.shard_state_nbytes() + sums_bytes


def host_bytes_without_state(bucket: Bucket, level: Level) -> int:
    """Return `host_bytes_of` less the optimizer state, which may be on disk instead."""
    total_bytes = host_bytes_of(bucket, level)
    return total_bytes - bucket.shard_state_nbytes() if level.has_state_on_host else 0


def level_text(level: Level) -> str:
    """Return `level` as a plan says it."""
    return {
        Level.KEPT: "param device, optim device",
        Level.KEPT_RELEASED: "param device, optim device, released after each use",
        Level.STATE_OFF: "param device, optim host",
        Level.STATE_OFF_RELEASED: "param device, optim host, released after each use",
        Level.RESIDENT: "param host, optim host, resident",
        Level.STREAMED: "param host, optim host, released after each use",
    }[level]
