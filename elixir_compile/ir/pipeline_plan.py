"""The stages of a pipeline, the ranks that run them, and the predicted seconds and bytes of a step, as a value.

```text
  stage   rank   layers
  0       0      transformer.wte .. transformer.h.4
  1       1      transformer.h.5 .. transformer.h.8        a stage begins at `transformer.h.5`
  2       0      transformer.h.9 .. lm_head
```
"""

from collections.abc import Sequence
from dataclasses import dataclass

from elixir_compile.base.codec import Form, from_json, to_json
from elixir_compile.base.errors import PlanFileError
from elixir_compile.ir.pipeline import TorchSchedule


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOutlook:
    """A stage of a pipeline with its predicted seconds and bytes."""

    stage: int
    rank: int
    layers: tuple[str, ...]
    """Where its layers begin: paths of modules."""
    modules: tuple[str, ...]
    """The paths of all its modules, in the order of the forward."""
    forward_s: float
    """Seconds of the forward of a micro-batch."""
    backward_s: float
    """Seconds of the backward of a micro-batch, what it computes again included."""
    update_s: float
    sent_bytes: int
    """What the forward of a micro-batch sends to the next stage; as many bytes of gradients come back."""
    outstanding: int
    """The most forwards whose backward has not ended."""
    saved_bytes: int
    """Activations of each of them."""
    peak_bytes: int
    """The most bytes of this stage alone on the device: the least budget for its plan."""
    treatment: str
    """What is done with activations: `kept`, `recomputed`, or `recomputed in 1/4 of the layers`."""
    homes: str
    """Where parameters and optimizer state stay."""
    copies: tuple[str, ...] = ()
    """Parameters that an earlier stage reads too, as tied embeddings. Each stage has a copy, and a training loop has to
    add up their gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOutlook:
    """A rank of a pipeline with its predicted seconds and bytes."""

    rank: int
    device: str
    busy_s: float
    """Seconds of a step in which it computes or updates."""
    bubble: float
    """Share of the step in which it does neither, 0 to 1."""
    peak_bytes: int
    budget_bytes: int
    host_bytes: int
    sent_bytes: int
    """Bytes of activations and gradients that it sends in a step."""
    received_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleOutlook:
    """A step under one schedule of torch, with the best stages for it."""

    schedule: TorchSchedule
    num_stages: int
    step_s: float = 0.0
    bubble: float = 0.0
    """Mean over ranks."""
    peak_bytes: int = 0
    """Of the rank with the most."""
    sent_bytes: int = 0
    """Of all ranks together."""
    because: str = ""
    """Why it cannot run; then the figures are 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePlan:
    """The stages of a model on the ranks of a pipeline, and every schedule of torch beside each other.

    Example:
        made = elixir.plan_stages(model, batch, stages=2, schedule="1f1b", micro_batches=2, hardware="2 x a100-40g")
        print(made.split_points, made.step_s, [rank.bubble for rank in made.ranks])
    """

    name: str
    """The model."""
    hardware: str
    schedule: TorchSchedule
    rows: int
    """Rows of the batch of a step."""
    micro_batches: int
    step_s: float
    stages: tuple[StageOutlook, ...]
    ranks: tuple[RankOutlook, ...]
    compared: tuple[ScheduleOutlook, ...] = ()

    @property
    def split_points(self) -> tuple[str, ...]:
        """The modules at which the stages after the first begin: the keys of torch's `split_spec`."""
        return tuple(stage.layers[0] for stage in self.stages[1:])


def layers_text(layers: Sequence[str]) -> str:
    """Return the first and the last of `layers`: `transformer.h.0 .. transformer.h.3`."""
    return layers[0] if len(layers) == 1 else f"{layers[0]} .. {layers[-1]}"


PIPELINE_FORMAT = 1

_PIPELINE = Form(what="pipeline", version=PIPELINE_FORMAT, error=PlanFileError)


def pipeline_to_json(plan: PipelinePlan) -> str:
    """Return `plan` as JSON; equal plans have equal text."""
    return to_json(_PIPELINE, plan)


def pipeline_from_json(text: str) -> PipelinePlan:
    """Return the pipeline in `text`. Raises PlanFileError with the wrong field, as `stages[0].rank`."""
    return from_json(_PIPELINE, PipelinePlan, text)
