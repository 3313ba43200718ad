"""How far off the device one bucket is: four levels, each holding fewer device bytes than the one before.

KEPT        parameters and optimizer state on the device
STATE_OFF   optimizer state on the host, parameters on the device; only where the hybrid optimizer owns them
RESIDENT    both on the host; one gathered copy from the first use in the forward to the last in the backward
STREAMED    both on the host; gathered for each window of uses, released after it
"""

from enum import IntEnum

from elixir_compile.ir import Bucket, Placement, Tier


class Level(IntEnum):
    KEPT = 0
    STATE_OFF = 1
    RESIDENT = 2
    STREAMED = 3


def placement_of(bucket: Bucket, level: Level) -> Placement:
    """Return the placement that puts `bucket` at `level`."""
    param = Tier.DEVICE if level <= Level.STATE_OFF else Tier.HOST
    optim = Tier.DEVICE if level is Level.KEPT else Tier.HOST
    return Placement(bucket=bucket.id, param=param, optim=optim, resident=level is not Level.STREAMED)


def level_of(placement: Placement) -> Level:
    """Return the level that `placement` is."""
    if placement.param is Tier.DEVICE:
        return Level.KEPT if placement.optim is Tier.DEVICE else Level.STATE_OFF
    return Level.RESIDENT if placement.resident else Level.STREAMED


def levels_from(start: Level, bucket: Bucket, *, hybrid: bool, num_windows: int) -> tuple[Level, ...]:
    """Return `start` and every level further off that differs from the ones before, in order."""
    found = [start]
    for level in Level:
        has_state = bucket.trainable and bucket.state_nbytes > 0
        is_useless = (level is Level.STATE_OFF and not (hybrid and has_state)) or (
            # With one window there is nothing to stay resident between.
            level is Level.RESIDENT and num_windows < 2
        )
        if level > start and not is_useless:
            found.append(level)
    return tuple(found)


def host_bytes_of(bucket: Bucket, level: Level) -> int:
    """Return the host bytes of `bucket` at `level`: its state, and its parameters and gradients or their staging."""
    if level is Level.KEPT:
        return 0
    return bucket.nbytes * (2 if bucket.trainable else 1) + bucket.state_nbytes


def level_text(level: Level) -> str:
    """Return `level` as a plan says it."""
    return (
        "param device, optim device",
        "param device, optim host",
        "param host, optim host, resident",
        "param host, optim host, released after each use",
    )[level]
