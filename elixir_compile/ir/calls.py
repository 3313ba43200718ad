"""How often each step calls a model, and how many of its forwards wait for their backward at once.

```text
  calls 4, outstanding 4     F F F F B B B B          all forwards first: GPipe, breadth-first loops
  calls 4, outstanding 2     F F B F B F B B          one forward, one backward: 1F1B
```

A plain step calls its model once. A stage of a pipeline is called once per micro-batch of the pipeline. In such a step
a bucket is gathered in the first forward and released in the last one, and so in the backward; the gradients of all
calls are summed before they are reduced, in the last backward.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from elixir_compile.base.codec import LEFT_OUT
from elixir_compile.base.errors import InvalidPlan
from elixir_compile.ir.kinds import StorageId


class BackwardOrder(StrEnum):
    """Of which outstanding forward the next backward is. Plans of steps in a known order count no other order."""

    ANY = "any"
    FIRST_FIRST = "first-first"
    """The earliest. After `outstanding` forwards, a backward and a forward take turns."""
    LAST_FIRST = "last-first"
    """The latest. After `outstanding` forwards, a backward and a forward take turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """The calls of a step, and the tensors of earlier and later calls that the caller holds meanwhile."""

    num: int = 1
    """Forwards of a step; as many backward passes follow."""
    outstanding: int = 1
    """The most forwards that wait for their backward at once."""
    more_outputs: int = 0
    """The most outputs that the caller still holds after the backward of their call."""
    output_grads: int = 1
    """The most gradients of outputs, inputs of the backward, that the caller holds at once."""
    input_grads: int = 1
    """The most gradients of inputs, outputs of the backward, that the caller holds at once."""
    has_loss: bool = False
    """Whether the caller computes a loss of the outputs, which keeps as many bytes as them until the backward."""
    is_scaled: bool = False
    """Whether the caller divides the gradients after the last backward."""
    sums_in_fp32: bool = False
    """Whether the gradients of the calls are summed in fp32 where parameters are narrower."""

    sums_stay: bool = False
    """Whether gradients of earlier steps stay beside the sums over the calls of a step."""

    shared: tuple[StorageId, ...] = ()
    """Inputs that are parts of one tensor in all calls, which counts once."""
    backward_order: BackwardOrder = field(default=BackwardOrder.ANY, metadata=LEFT_OUT)
    """Of which outstanding forward the next backward is."""

    @classmethod
    def of_stage(cls, num: int, outstanding: int, *, is_first: bool, is_last: bool, num_sent: int) -> "Calls":
        """Return the calls of a stage of a pipeline, with the tensors that a schedule of torch holds for it.

        `is_first` and `is_last` say that the stage is the first or the last of the pipeline. Of sent outputs, and of
        sent gradients of inputs, the schedule holds `num_sent`; for gradients of outputs it has a buffer per call.
        """
        return cls(
            num=num,
            outstanding=outstanding,
            more_outputs=num - 1 if is_last else min(num_sent, num - 1),
            output_grads=1 if is_last else num,
            input_grads=1 if is_first else min(num_sent + 1, num),
        )

    def __post_init__(self) -> None:
        if not 1 <= self.outstanding <= self.num:
            raise InvalidPlan(
                f"{self.outstanding} outstanding forwards in a step of {self.num} calls; expected 1 to {self.num}."
            )
        if min(self.output_grads, self.input_grads) < 1 or self.more_outputs < 0:
            raise InvalidPlan(f"the caller of {self} holds less than one tensor of a call.")

    @property
    def alternate(self) -> bool:
        """Whether a backward runs before the last forward: buckets then stay gathered from the first forward to the
        last backward."""
        return self.outstanding < self.num

    def __str__(self) -> str:
        return f"{self.num} call{'' if self.num == 1 else 's'}, {self.outstanding} outstanding"


ONCE = Calls()
"""The calls of a plain step."""
