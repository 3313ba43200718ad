"""The bytes of activations of one stage on one micro-batch: while its forward and its backward run, and in between.

```text
  forward    | inputs elsewhere | makes ...... saved . temp |     most: `forward_bytes`
  waits      | saved, and the tensors that it has sent      |     `saved_bytes`, once for each outstanding forward
  backward   | saved . gradients of activations ...........  |    most: `backward_bytes`
```

A tensor that a stage sends stays until its backward, because torch's stages keep it for autograd. Received tensors and
gradients are in buffers of the stage, which torch allocates for every micro-batch, so they are not counted here.
"""

from dataclasses import dataclass

from elixir_compile.ir import Kind, Phase, StepGraph
from elixir_compile.step.liveness import liveness


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Bytes of activations of a stage on a micro-batch, without parameters, gradients of parameters and inputs."""

    saved_bytes: int
    """Activations of a forward until its backward has ended."""
    forward_bytes: int
    """The most that a running forward holds."""
    backward_bytes: int
    """The most that a running backward holds."""


def stage_memory(step: StepGraph) -> StageMemory:
    """Return the bytes of `step`, which is the step of a stage as a plan runs it."""
    num_forward = sum(op.phase is Phase.FORWARD for op in step.ops)
    lives = liveness(step).lives
    changes = [0] * (len(step.ops) + 1)
    saved_bytes = 0
    sent = set(step.outputs)
    for storage in step.storages:
        life = lives.get(storage.id)
        if life is None or storage.kind not in (Kind.TEMP, Kind.WORKSPACE, Kind.SAVED):
            continue
        last = len(step.ops) - 1 if storage.id in sent else life.last
        if life.first < num_forward and (last >= num_forward or storage.id in sent):
            saved_bytes += storage.nbytes
        changes[life.first] += storage.nbytes
        changes[last + 1] -= storage.nbytes
    most = [0, 0]
    live_bytes = 0
    for at, change in enumerate(changes[:-1]):
        live_bytes += change
        is_backward = at >= num_forward
        most[is_backward] = max(most[is_backward], live_bytes)
    forward_bytes, backward_bytes = most
    return StageMemory(
        saved_bytes=saved_bytes,
        forward_bytes=max(forward_bytes, saved_bytes),
        backward_bytes=max(backward_bytes, saved_bytes),
    )
