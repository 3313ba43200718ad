"""The closed vocabularies of a plan: what bytes are for, where they live, what a program may do, and on what."""

from enum import StrEnum
from typing import NewType

StorageId = NewType("StorageId", str)
OpId = NewType("OpId", str)
RegionId = NewType("RegionId", str)
BucketId = NewType("BucketId", str)
GroupId = NewType("GroupId", str)
"""Activations that are treated alike."""


class Kind(StrEnum):
    """What an allocation is for."""

    PARAM = "param"
    """A parameter in its home."""
    GRAD = "grad"
    """The gradient of a parameter."""
    MASTER = "master"
    """A wide copy of a parameter that the optimizer updates."""
    MOMENT = "moment"
    """Optimizer statistics."""
    SAVED = "saved"
    """Written by the forward, read by the backward."""
    TEMP = "temp"
    """Written and read within one phase."""
    INPUT = "input"
    """Handed in by the caller: a batch, a tangent."""
    BUFFER = "buffer"
    """A buffer of an `nn.Module`."""
    GATHERED = "gathered"
    """The whole parameter on the device, copied there from its home."""


class Phase(StrEnum):
    """Which part of a training step an op belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


class Tier(StrEnum):
    """Where training state lives."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class Update(StrEnum):
    """When a step updates its parameters."""

    IN_BACKWARD = "in_backward"
    """Each bucket as soon as its gradient has landed."""
    AFTER_BACKWARD = "after_backward"
    """`optimizer.step()` returns when every bucket is updated."""
    ACROSS_STEPS = "across_steps"
    """`optimizer.step()` queues what the host updates; whatever reads a bucket waits for the update of that bucket."""


class Kernel(StrEnum):
    """Whether the values of an op have to be in memory."""

    OPAQUE = "opaque"
    """Reads its inputs from memory and writes its results there: a matrix product."""
    REDUCTION = "reduction"
    """Writes its results to memory; computes a pointwise input while it reads."""
    POINTWISE = "pointwise"
    """The same, and its result can be computed again wherever it is read."""


class Saving(StrEnum):
    """What happens to an activation that the backward reads."""

    KEEP = "keep"
    """It stays on the device."""
    RECOMPUTE = "recompute"
    """It is dropped, and computed again where the backward first reads it."""
    OFFLOAD = "offload"
    """It goes to the host, and comes back before the backward reads it."""


class Verb(StrEnum):
    """What one action of a schedule does."""

    RUN = "run"
    GATHER = "gather"
    WAIT = "wait"
    RELEASE = "release"
    REDUCE = "reduce"
    OFFLOAD = "offload"
    PREFETCH = "prefetch"
    UPDATE = "update"
    SEND = "send"
    RECV = "recv"


class Lane(StrEnum):
    """A resource that runs one thing at a time."""

    COMPUTE = "compute"
    GATHER = "gather"
    REDUCE = "reduce"
    H2D = "h2d"
    D2H = "d2h"
    HOST = "host"
    P2P = "p2p"


ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "complex128": 16, "complex64": 8, "complex32": 4,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1, "bool": 1,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
}  # fmt: skip
"""Bytes of an element, by dtype as torch prints it without the prefix."""
