"""Count optimizer state that no plan places if the device is a CPU and parameters are on the host.

torch's own optimizers make their state on the device of the parameter. For a parameter on the host of a CUDA device,
that is host memory, as planned. If the device is a CPU, all memory but the slabs counts as device memory. Such state is
in no slab, so a step needs more device memory than its plan says.

```text
  step 0    forward backward step()   the optimizer makes its state: a hook adds it up, and says what it found
  step 1    forward                   planned again: the state is beside the graph, wherever the parameters are
```
"""

import functools
import logging
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from elixir_compile.base.process import Living
from elixir_compile.base.units import format_bytes
from elixir_compile.graph.ops.registry import num_slots, slot_of
from elixir_compile.optim.hybrid import Hybrid
from elixir_compile.runtime.bucket import is_slab_memory
from elixir_compile.session.model import ManagedModel

log = logging.getLogger("elixir_compile")


def count_plain_state(model: ManagedModel) -> None:
    """From now on, let plans of `model` count the state of plain optimizers, after the first step in which it exceeds
    the budget."""
    _plain_state().models.add(model)


@functools.cache
def _plain_state() -> "_PlainState":
    """Return the record of all models; the first call has it updated after each step of any optimizer."""
    record = _PlainState()
    hook: Any = torch.compiler.disable(record.inspect)
    register_optimizer_step_post_hook(hook)
    return record


class _PlainState:
    """Looks for unplaced optimizer state, and notes it in the executors of models."""

    def __init__(self) -> None:
        self.models: Living[ManagedModel] = Living()
        """The models whose plans count it."""
        self._seen: WeakKeyDictionary[Optimizer, tuple[object, ...]] = WeakKeyDictionary()
        """The form of each optimizer and of its models when it was inspected last: see `_form`."""
        self._models_of: WeakKeyDictionary[Optimizer, list[ref[ManagedModel]]] = WeakKeyDictionary()

    def inspect(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        """Count the unplaced state of `optimizer` after its step, if its state or the homes of parameters changed."""
        if isinstance(optimizer, Hybrid) and optimizer.places_state:
            return
        if self._seen.get(optimizer) == self._form(optimizer):
            return
        nbytes: dict[ManagedModel, dict[str, int]] = {}
        """By model and by the name of the parameter, the bytes of state that are in no slab."""
        model_of = {id(model.executor): model for model in self.models}
        with torch.DisableTorchFunctionSubclass():  # another optimizer may be updating a parameter
            for param, state in optimizer.state.items():
                slot = slot_of(param) if isinstance(param, torch.Tensor) else None
                model = None if slot is None else model_of.get(id(slot.sink))
                if slot is not None and model is not None:
                    nbytes.setdefault(model, {})[slot.name] = sum(
                        value.untyped_storage().nbytes()
                        for value in (state.values() if isinstance(state, dict) else ())
                        if isinstance(value, torch.Tensor)
                        and value.device.type == "cpu"
                        and not is_slab_memory(value.data_ptr())
                    )
        self._models_of[optimizer] = [ref(model) for model in nbytes]
        self._seen[optimizer] = self._form(optimizer)
        for model, own in nbytes.items():
            model.executor.plain_state.note(optimizer, own)
            if not model.executor.plain_state.is_counted:
                _count_if_over(type(optimizer).__name__, model)

    def _form(self, optimizer: Optimizer) -> tuple[object, ...]:
        """Return numbers that change if `optimizer` gets state or a parameter changes its home."""
        models = [reference() for reference in self._models_of.get(optimizer, ())]
        generations = [model.executor.buckets.generation for model in models if model is not None]
        return (len(optimizer.state), num_slots(), len(self.models), *generations)


def _count_if_over(name: str, model: ManagedModel) -> None:
    """Let plans of `model` count the state of plain optimizers, if a training step needs more than its budget with it;
    `name` is the class of the last optimizer."""
    executor = model.executor
    nbytes = executor.plain_state.all_by_name()
    on_host = {slot.name for bucket in executor.buckets if bucket.is_on_host for slot in bucket.slots}
    unplanned_bytes = sum(own for param, own in nbytes.items() if param in on_host)
    plans = [graph.active.plan for graph in model.graphs if not (graph.is_inference or graph.is_superseded)]
    over = [plan for plan in plans if plan.prediction.device_peak_bytes + unplanned_bytes > plan.budget_bytes]
    if not unplanned_bytes or not over:
        return
    executor.plain_state.is_counted = True
    plan = max(over, key=lambda each: each.prediction.device_peak_bytes)
    log.warning(
        "%s keeps its state for parameters of %s beside them: %s so far for parameters that plans keep on the host. "
        "On a CPU that is memory of the device: the next step is planned again beside it, as the budget is %s, and "
        "the plan needs %s without it. `elixir_compile.HybridAdamW`, or `elixir_compile.hybrid(cls)` for another "
        "class, keeps its state where the plan says",
        name,
        executor.name,
        format_bytes(unplanned_bytes),
        format_bytes(plan.budget_bytes),
        format_bytes(plan.prediction.device_peak_bytes),
    )
