"""Warn of optimizer state outside of the plan if the device is a CPU and parameters are on the host.

torch's own optimizers make their state on the device of the parameter. For a parameter on the host of a CUDA device,
that is host memory, as planned. If the device is a CPU, all memory but the slabs counts as device memory. Such state is
in no slab, so a step needs more device memory than its plan says.
"""

import functools
import warnings
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from elixir_compile.errors import ElixirWarning
from elixir_compile.living import Living
from elixir_compile.managed.model import ManagedModel
from elixir_compile.ops.registry import num_slots, slot_of
from elixir_compile.optim.hybrid import Hybrid
from elixir_compile.runtime.slab import is_slab_memory
from elixir_compile.units import format_bytes


def warn_of_plain_state(model: ManagedModel) -> None:
    """From now on, warn once for `model` after the first step of an optimizer whose state exceeds the budget."""
    _plain_state().models.add(model)


@functools.cache
def _plain_state() -> "_PlainState":
    """Return the record of all models; the first call has it updated after each step of any optimizer."""
    record = _PlainState()
    hook: Any = torch.compiler.disable(record.inspect)
    register_optimizer_step_post_hook(hook)
    return record


class _PlainState:
    """Bytes of unplaced optimizer state for parameters on the host, by model and optimizer."""

    def __init__(self) -> None:
        self.models: Living[ManagedModel] = Living()
        """The models to warn of."""
        self._seen: WeakKeyDictionary[Optimizer, tuple[object, ...]] = WeakKeyDictionary()
        """The form of each optimizer and of its models when it was inspected last: see `_form`."""
        self._models_of: WeakKeyDictionary[Optimizer, list[ref[ManagedModel]]] = WeakKeyDictionary()
        self._nbytes: WeakKeyDictionary[ManagedModel, WeakKeyDictionary[Optimizer, int]] = WeakKeyDictionary()
        self._warned: WeakSet[ManagedModel] = WeakSet()

    def inspect(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        """Count the unplaced state of `optimizer` after its step, if its state or the homes of parameters changed."""
        if isinstance(optimizer, Hybrid) and optimizer.places_state:
            return
        if self._seen.get(optimizer) == self._form(optimizer):
            return
        with torch.DisableTorchFunctionSubclass():  # another optimizer may be updating a parameter
            nbytes = self._bytes_of(optimizer)
        self._models_of[optimizer] = [ref(model) for model in nbytes]
        self._seen[optimizer] = self._form(optimizer)
        for model, own in nbytes.items():
            of_model = self._nbytes.setdefault(model, WeakKeyDictionary())
            of_model[optimizer] = own
            if model not in self._warned and _warn(optimizer, model, sum(of_model.values())):
                self._warned.add(model)

    def _form(self, optimizer: Optimizer) -> tuple[object, ...]:
        """Return numbers that change if `optimizer` gets state or a parameter changes its home."""
        models = [reference() for reference in self._models_of.get(optimizer, ())]
        generations = [model.executor.buckets.generation for model in models if model is not None]
        return (len(optimizer.state), num_slots(), len(self.models), *generations)

    def _bytes_of(self, optimizer: Optimizer) -> dict[ManagedModel, int]:
        """Return, by model, the bytes of state that count as device memory although the parameters are on the host."""
        found: dict[ManagedModel, int] = {}
        model_of = {id(model.executor): model for model in self.models}
        for param, state in optimizer.state.items():
            slot = slot_of(param) if isinstance(param, torch.Tensor) else None
            model = None if slot is None else model_of.get(id(slot.sink))
            if slot is None or model is None:
                continue
            bucket = model.executor.buckets.of(slot)
            is_on_host = bucket is not None and bucket.is_on_host
            nbytes = sum(_plain_bytes(state)) if is_on_host else 0
            found[model] = found.get(model, 0) + nbytes
        return found


def _plain_bytes(state: Any) -> Iterator[int]:
    for value in state.values() if isinstance(state, dict) else ():
        if isinstance(value, torch.Tensor) and value.device.type == "cpu" and not is_slab_memory(value.data_ptr()):
            yield value.untyped_storage().nbytes()


def _warn(optimizer: Optimizer, model: ManagedModel, nbytes: int) -> bool:
    """Warn if a training step of `model` needs more than its budget with `nbytes` of unplaced state; return whether
    it does."""
    plans = [graph.active.plan for graph in model.graphs if not (graph.is_inference or graph.is_superseded)]
    over = [plan for plan in plans if plan.prediction.device_peak_bytes + nbytes > plan.budget_bytes]
    if not nbytes or not over:
        return False
    plan = max(over, key=lambda each: each.prediction.device_peak_bytes)
    name, planned = type(optimizer).__name__, plan.prediction.device_peak_bytes
    warnings.warn(
        ElixirWarning(
            f"{name} keeps {format_bytes(nbytes)} of state for parameters of {model.executor.name} that the plan keeps "
            f"on the host. On a CPU that is memory of the device: a step takes {format_bytes(planned + nbytes)} "
            f"of a budget of {format_bytes(plan.budget_bytes)}, not the planned {format_bytes(planned)}. "
            "`elixir_compile.HybridAdamW`, or `elixir_compile.hybrid(cls)` for another class, keeps its state where "
            "the plan says."
        ),
        stacklevel=6,
    )
    return True
