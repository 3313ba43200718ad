"""The words of graphs and plans: their enumerations (purposes of bytes, phases, memories, verbs, lanes), the types of
names, and how names and numbers are printed.
"""

import json
from enum import StrEnum
from typing import NewType

# ----------------------------------------------------------------------------------------------------------------------
# The enumerations of graphs and plans: purposes of bytes, phases, memories, verbs and lanes; and the types of
# names.


StorageId = NewType("StorageId", str)
OpId = NewType("OpId", str)
RegionId = NewType("RegionId", str)
BucketId = NewType("BucketId", str)
GroupId = NewType("GroupId", str)
"""The name of a group of activations, which are kept, recomputed or offloaded together."""


class Kind(StrEnum):
    """The purpose of an allocation."""

    PARAM = "param"
    """A parameter in its home."""
    GRAD = "grad"
    """The gradient of a parameter."""
    MASTER = "master"
    """The fp32 value of a parameter that is trained in 16 bits."""
    MOMENT = "moment"
    """Statistics of the optimizer."""
    SAVED = "saved"
    """Written by the forward, read by the backward."""
    TEMP = "temp"
    """Written and read within one phase."""
    WORKSPACE = "workspace"
    """Allocated by one op for itself, and freed before it returns. No captured graph shows it: it is measured."""
    INPUT = "input"
    """A tensor from the caller: a batch, or a tangent."""
    BUFFER = "buffer"
    """A buffer of an `nn.Module`."""
    GATHERED = "gathered"
    """The whole parameter on the device, copied there from its home."""


class Phase(StrEnum):
    """The part of a training step to which an op belongs."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


class Tier(StrEnum):
    """A memory in which parameters or optimizer state can stay between steps."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class Update(StrEnum):
    """The time at which buckets are updated."""

    IN_BACKWARD = "in_backward"
    """Each bucket is updated as soon as its gradient is complete."""
    AFTER_BACKWARD = "after_backward"
    """`optimizer.step()` updates every bucket before it returns."""
    ACROSS_STEPS = "across_steps"
    """`optimizer.step()` queues the updates of the host. Each reader of a bucket waits for the update of that
    bucket."""


class Kernel(StrEnum):
    """How far a compiler can fuse an op: whether its inputs and results must be in memory."""

    OPAQUE = "opaque"
    """Inputs and results must be in memory, as of a matrix product."""
    REDUCTION = "reduction"
    """Results must be in memory. A pointwise input can be computed while it is read."""
    POINTWISE = "pointwise"
    """Neither must be: the result can also be computed again by each reader."""


class Batched(StrEnum):
    """How the value of a captured step is made of its values in micro-batches, slices of the batch of equal size."""

    EACH = "each"
    """One slice per micro-batch, along one dimension. The whole value is the slices, one behind another."""
    SAME = "same"
    """Equal in every micro-batch: a parameter, a constant, or a value of the whole batch."""
    SUM = "sum"
    """The sum over the micro-batches: the gradient of a weight, the sum of the losses of all tokens."""


class Saving(StrEnum):
    """The treatment of an activation that the backward reads."""

    KEEP = "keep"
    """It stays on the device."""
    RECOMPUTE = "recompute"
    """It is freed, and computed again before its first use in the backward."""
    OFFLOAD = "offload"
    """It is copied to the host, and back before its first use in the backward."""


class Verb(StrEnum):
    """The kind of an action in a schedule."""

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


class InnerVerb(StrEnum):
    """The verb of work that no action of a schedule names: it is done inside of another action, or beside the step."""

    AVERAGE = "average"
    """The all-reduce over the copies of a shard, behind its reduce."""
    ADD = "add"
    """The sum of the gradients of several backward passes."""
    READ = "read"
    """State, or parameters, come from the disk."""
    WRITE = "write"
    """State goes to the disk, and trained parameters that are there."""


class Lane(StrEnum):
    """A resource that does one action at a time."""

    COMPUTE = "compute"
    GATHER = "gather"
    REDUCE = "reduce"
    H2D = "h2d"
    D2H = "d2h"
    HOST = "host"
    P2P = "p2p"
    DISK = "disk"
    """The files of optimizer state and of parameters. Several pieces can be on their way at once."""
    CALLER = "caller"
    """The thread that runs the step, while it is blocked in a wait of ours. No plan has work on it."""


ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "complex128": 16, "complex64": 8, "complex32": 4,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1, "bool": 1,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
}  # fmt: skip
"""Bytes of an element by dtype, named as torch prints it without `torch.`."""


# ----------------------------------------------------------------------------------------------------------------------
# How names and numbers are written on a line of a printed graph or plan.
#
#   op "my op"  aten.mm.default  forward  reads p0 s1     # what follows `#` explains the line
#      \_quoted  \_bare
#
# A name is quoted as in JSON if it is empty or holds a space, `#`, `"` or an unprintable character. The printed form is
# for people; JSON (`ir.plan`) is the form that is read back.


def word(text: str) -> str:
    """Return `text` as a word of a printed line, quoted if it is empty or would look like several words."""
    if not text.isprintable():
        return json.dumps(text)
    if not text or any(character in text for character in ' #"'):
        return json.dumps(text, ensure_ascii=False)
    return text


def words(*texts: str) -> str:
    """Return several words with a space between them."""
    return " ".join(word(text) for text in texts)


def real(value: float) -> str:
    """Return the shortest decimal that equals `value` exactly."""
    # float() first: numpy's floats print as `np.float64(1.0)`.
    return repr(float(value))


def commented(line: str, comment: str, column: int = 64) -> str:
    """Return `line`, padded to `column` characters, with `comment` behind a `#`."""
    return f"{line:<{column}}  # {comment}"
