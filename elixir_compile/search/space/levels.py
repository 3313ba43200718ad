"""Levels: how far from the device a bucket is. On one rank each level needs fewer device bytes than the level before.

ON_DEVICE           parameters and optimizer state on the device
ON_DEVICE_RELEASED  like ON_DEVICE; several ranks gather the bucket for each window and release it after the window
STATE_OFF           optimizer state on the host, parameters on the device; only if the hybrid optimizer owns them
STATE_OFF_RELEASED  like STATE_OFF; several ranks gather the bucket for each window and release it after the window
ALL_OFF             both on the host; one gathered copy from the first use in the forward to the last in the backward
ALL_OFF_RELEASED    both on the host; gathered for each window, released after it

On several ranks each rank owns a shard, and a bucket is gathered at every level. On one rank only buckets with
parameters on the host are gathered.
"""

from collections.abc import Sequence
from dataclasses import replace
from enum import IntEnum

from elixir_compile.ir import Bucket, Placement, Tier
from elixir_compile.step.bucket_bytes import bucket_host_bytes


class Level(IntEnum):
    ON_DEVICE = 0
    ON_DEVICE_RELEASED = 1
    STATE_OFF = 2
    STATE_OFF_RELEASED = 3
    ALL_OFF = 4
    ALL_OFF_RELEASED = 5

    @property
    def has_state_on_host(self) -> bool:
        return self >= Level.STATE_OFF

    @property
    def has_param_on_host(self) -> bool:
        return self >= Level.ALL_OFF

    @property
    def home(self) -> Tier:
        """The memory of parameters and gradients."""
        return Tier.HOST if self.has_param_on_host else Tier.DEVICE

    @property
    def is_released(self) -> bool:
        """Whether a gathered copy is released after each window."""
        return self in (Level.ON_DEVICE_RELEASED, Level.STATE_OFF_RELEASED, Level.ALL_OFF_RELEASED)


def is_gathered(bucket: Bucket, level: Level) -> bool:
    """Return whether `bucket` has a gathered copy at `level`."""
    return bucket.is_sharded or level.has_param_on_host


def placement_of(bucket: Bucket, level: Level, *, streamed: bool = False) -> Placement:
    """Return the placement of `bucket` at `level`, with its update `streamed` or in the memory of its state."""
    optim = Tier.HOST if level.has_state_on_host else Tier.DEVICE
    return Placement(bucket=bucket.id, param=level.home, optim=optim, resident=not level.is_released, streamed=streamed)


def level_of(placement: Placement) -> Level:
    """Return the level of `placement`, which does not depend on `placement.streamed`."""
    if placement.param is not Tier.DEVICE:
        return Level.ALL_OFF if placement.resident else Level.ALL_OFF_RELEASED
    if placement.optim is Tier.DEVICE:
        return Level.ON_DEVICE if placement.resident else Level.ON_DEVICE_RELEASED
    return Level.STATE_OFF if placement.resident else Level.STATE_OFF_RELEASED


def levels_from(start: Level, bucket: Bucket, *, hybrid: bool, num_windows: int) -> tuple[Level, ...]:
    """Return `start` and every level further from the device that differs from the levels before it, in order."""
    splits_state = hybrid and bucket.trainable and bucket.state_nbytes > 0
    # With one window, a resident copy is a released copy.
    has_gap = num_windows > 1
    differs = {
        Level.ON_DEVICE_RELEASED: bucket.is_sharded and has_gap,
        Level.STATE_OFF: splits_state,
        Level.STATE_OFF_RELEASED: splits_state and bucket.is_sharded and has_gap,
        Level.ALL_OFF: has_gap,
        Level.ALL_OFF_RELEASED: True,
    }
    return (start, *(level for level, is_distinct in differs.items() if level > start and is_distinct))


def gathered_as(levels: Sequence[Level], *, is_released: bool) -> tuple[Level, ...]:
    """Return those of the `levels` of a sharded bucket that gather it for each window, or, if not `is_released`, those
    that gather it once; all of them if the bucket has one window, as both are the same then."""
    found = tuple(level for level in levels if level.is_released is is_released)
    has_choice = Level.ON_DEVICE_RELEASED in levels or Level.ALL_OFF in levels or levels[0].is_released
    return found if found and has_choice else tuple(levels)


def staying(levels: Sequence[Level]) -> tuple[Level, ...]:
    """Return those of the `levels` of a bucket that have its parameters in the same memory as the first."""
    return tuple(level for level in levels if level.home is levels[0].home)


def host_bytes_of(bucket: Bucket, level: Level, *, on_disk: bool = False) -> int:
    """Return the host bytes of `bucket` on one rank; `on_disk` if its state is or may be on disk instead."""
    placement = placement_of(bucket, level)
    if on_disk and level.has_state_on_host:
        placement = replace(placement, optim=Tier.DISK)
    return bucket_host_bytes(bucket, placement)


def level_text(level: Level) -> str:
    """Return `level` in the words of a decision."""
    return {
        Level.ON_DEVICE: "param device, optim device",
        Level.ON_DEVICE_RELEASED: "param device, optim device, released after each use",
        Level.STATE_OFF: "param device, optim host",
        Level.STATE_OFF_RELEASED: "param device, optim host, released after each use",
        Level.ALL_OFF: "param host, optim host, resident",
        Level.ALL_OFF_RELEASED: "param host, optim host, released after each use",
    }[level]
