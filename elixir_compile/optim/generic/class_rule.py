"""The update rule of any optimizer class: run the class's own `step` on the tensors of a bucket.

    weights, grads, states  ->  a transient optimizer: an instance of the class with these tensors  ->  its `step()`

The parameters of the transient optimizer share memory with the weights and gradients. So no formula is written a second
time, and the result is bitwise equal to the class with the same flags on the same device. The class creates the state
of a parameter at the first step.

Later steps on the host run as a single host pass: the class's own step reads and writes memory once for each of its
ops, a host pass does so once in all.

    the step on tensors without values  ->  a tape  ->  C, compiled once per form  ->  weights, gradients, statistics

Of a 16-bit parameter with an fp32 master the class sees the master and the gradient in fp32, in scratch tensors (see
`masters`), and keeps the state of an fp32 parameter. Statistics that an element-wise class keeps in fp32 may be stored
in bf16. Dry steps have found that it gives flat parts of a tensor the bits of the whole, so a block is a tensor of its
own to it; a class that updates whole tensors gets them whole:

    halves, gradient  ->  fp32, a block of a parameter  ->  the class's own step  ->  halves, split
    bf16 statistics   ->  fp32                          ->                        ->  bf16, rounded stochastically

Each form is compared with the class on small tensors before its first use. If a step cannot be recorded, uses an op
without a formula or gives other bits, the class's own step runs, and a log line says why once. The Python code of the
step runs again in each step, so a new learning rate or step count is an input of the same pass.
"""

import copy
import logging
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from elixir_compile.graph.capture.node_facts import leaves_of
from elixir_compile.graph.ops.optimizers import REST_NAMES, has_master, updated_dtype
from elixir_compile.graph.ops.registry import gathered_numel
from elixir_compile.graph.ops.shards import is_whole, own_shard
from elixir_compile.ir import BlockUpdate, Param, WholeUpdate
from elixir_compile.ir.cost import MASTER_BYTES_PER_ELEMENT
from elixir_compile.optim.generic.code import ClassPasses
from elixir_compile.optim.generic.dry_step import (
    NO_HYPERPARAMETERS,
    ClassStep,
    StateSchema,
    UpdateKind,
    Watch,
    attributes_of,
    copied,
    cut,
    dry_step,
)
from elixir_compile.optim.generic.tensor_step import (
    TensorStep,
    flat_state,
    joined_at_shapes,
    nested_state,
    tensor_step,
    work_bytes_of,
)
from elixir_compile.optim.host import host_threads_for
from elixir_compile.optim.masters import Wide, batches, rest_layouts, scratch_nbytes
from elixir_compile.optim.precision import EXACT, StatePrecision, noise_key, rounded_to_bfloat16, weight_noise
from elixir_compile.optim.rule import (
    GRAD_SCALE,
    ParamUpdate,
    State,
    StatisticLayout,
    UpdateRule,
    flat_order,
    forms_of,
    note_num_steps,
    num_steps,
    state_nbytes,
    store_made,
)
from elixir_compile.optim.streaming import CUT_NUMEL, MemoryParam, Segment, update
from elixir_compile.runtime.bucket import flat

log = logging.getLogger("elixir_compile")

_BF16 = StatisticLayout(torch.bfloat16)
_MASTER_KERNELS = 10
"""Ops that join a master and split it again: see `masters`."""
_BLOCK = 1 << 20
"""Elements in fp32 at a time: 4 MiB for each statistic."""
_LEAST_FIRST_BLOCK = 1 << 14
"""The fewest elements at a time in the first step of a large tensor, and `_BLOCK` are the most."""
_NUM_UPDATES = "num_updates"
"""The entry of a state that counts updates if the class does not, as SGD and Lion. The noise of each update must be its
own: with the same noise in every update, a statistic that decays slowly is rounded back to its value each time."""


def group_key(group: Mapping[str, Any]) -> tuple[object, ...]:
    """Return a cache key: the hyperparameters that may change the set of statistics, with numbers as zero or not."""
    return tuple((name, _value_key(value)) for name, value in sorted(group.items()) if name not in NO_HYPERPARAMETERS)


def _value_key(value: object) -> object:
    if isinstance(value, bool | str | type(None)):
        return value
    if isinstance(value, int | float):
        return (type(value).__name__, value != 0)
    if isinstance(value, list | tuple):
        return tuple(_value_key(each) for each in value)
    return type(value).__name__


class DryRuns:
    """What dry runs find out about the optimizer class `cls`, each run once; all snapshots of a rule share them."""

    def __init__(self, cls: type[Optimizer], optimizer: Optimizer) -> None:
        self._cls = cls
        self._optimizer = weakref.ref(optimizer)
        self._attributes: Mapping[str, Any] = {}
        self._schemas: dict[tuple[object, ...], StateSchema] = {}
        self._steps: dict[object, TensorStep] = {}
        self._said: set[str] = set()
        self._counts: set[str] = set()
        """The names of the numbers that steps change in param groups, such as a count of steps."""
        self._num_steps = 0
        self._watches: dict[int, Watch] = {}
        """By index of the param group."""
        self._tried: set[int] = set()
        """The ids of the parameters at whose sizes a step was tried."""

    def attributes(self) -> Mapping[str, Any]:
        """Return the attributes of the optimizer, as they were last if it is gone."""
        optimizer = self._optimizer()
        if optimizer is not None:
            self._attributes = attributes_of(optimizer)
        return self._attributes

    def schema(self, group: Mapping[str, Any], dtype: torch.dtype) -> StateSchema:
        """Return the state schema for parameters in `dtype` with the hyperparameters of `group`, from a dry step."""
        key = (dtype, *group_key(self._begun(group)))
        if key not in self._schemas:
            self._schemas[key] = dry_step(self._cls, self.attributes(), self._begun(group), dtype)
        return self._schemas[key]

    def _begun(self, group: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return `group` as before its first step: its counts as the optimizer begins with, or without them."""
        begun = {name: value for name, value in group.items() if name not in self._counts}
        defaults: Mapping[str, Any] = self.attributes().get("defaults", {}) if self._counts else {}
        return begun | {name: defaults[name] for name in self._counts if name in defaults}

    def are_whole(self, group: Mapping[str, Any], dtype: torch.dtype) -> bool:
        """Return whether an update in `dtype` reads a whole tensor, and no other one."""
        return self.schema(group, dtype).kind is UpdateKind.TENSOR

    def why_not_alone(self, param: torch.Tensor, group: Mapping[str, Any]) -> str:
        """Return why no plan may have the state of `param`; empty if elements, or the tensor, are updated alone."""
        schema = self.schema(group, updated_dtype(param))
        if schema.kind is not UpdateKind.TENSOR:
            return schema.because or _why_reserved(param, schema.dtypes)
        step = self.tensor_step(param, group)
        why = step.unknown
        if not is_whole(param):
            why = (
                f"ranks have parts of a parameter of shape {tuple(param.shape)}: `prepare(..., whole=[names])` gives "
                "each named parameter to one rank"
            )
        elif lists := set(schema.per_param) - {"param_names"}:
            why = f"its param group has {', '.join(sorted(lists))} by parameter"
        elif not why and sum(one.nbytes for one in (step.state or {}).values()) != step.state_bytes:
            why = "tensors of its state share memory"
        why = why or _why_reserved(param, step.state or {})
        return f"{schema.because}; and {why}" if why else ""

    def tensor_step(self, param: torch.Tensor, group: Mapping[str, Any]) -> TensorStep:
        """Return what a step of the class does to `param`, or to its master, from a dry run at its shape."""
        dtype = updated_dtype(param)
        per_param, group = self.schema(group, dtype).per_param, self._begun(group)
        if per_param:
            place = next((at for at, each in enumerate(group["params"]) if each is param), 0)
            group = cut(group, per_param, [place])
        values = [value for name, value in sorted(group.items()) if name not in ("params", "param_names")]
        numbers = [value for value in leaves_of(values) if isinstance(value, int)]
        key = (tuple(param.shape), dtype, param.device.type, *numbers, *group_key(group))
        if key not in self._steps:
            found = tensor_step(self._cls, self.attributes(), group, param, dtype, per_param)
            self._steps[key] = found
            if found.unknown and found.unknown not in self._said:
                self._said.add(found.unknown)
                log.warning(
                    "plans do not count all that %s takes for its step: it cannot be run without memory: %s",
                    self._cls.__name__,
                    found.unknown,
                )
        return self._steps[key]

    def entries(self, param: torch.Tensor, group: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the nested entries of the state of `param` as `TensorStep.entries`; none if elements are updated."""
        return self.tensor_step(param, group).entries if self.are_whole(group, updated_dtype(param)) else {}

    def watch(
        self, groups: Sequence[Mapping[str, Any]], states: Mapping[Any, Mapping[str, Any]]
    ) -> Sequence[Mapping[str, Any]]:
        """Raise OptimizerNotTensorWise if the next step joins two parameters; return the counts of each group after it.

        Small tensors take it first, see `Watch`. Before the first step of a parameter, tensors of the sizes of all in
        its group take it without memory.
        """
        self._num_steps += 1
        counts: list[Mapping[str, Any]] = [{} for _ in groups]
        for index, group in enumerate(groups):
            # A class may count the steps of a group without gradients too.
            params = [param for param in group["params"] if param.grad is not None] or group["params"]
            if not params or not self.are_whole(group, updated_dtype(params[0])):
                continue
            step = ClassStep(cls=self._cls, attributes=self.attributes(), group=group)
            watch = self._watches.setdefault(index, Watch(self.schema(group, updated_dtype(params[0]))))
            watch.check(step, params, states, self._num_steps)
            counts[index] = watch.counts(group)
            self._counts.update(counts[index])
            params = [param for param in params if param.grad is not None]
            if self._tried.issuperset(map(id, params)):
                continue
            updates = [
                ParamUpdate(param, param.grad, nested_state(own, self.entries(param, group)))
                for param in params
                for own in [without(forms_of(states.get(param, {})), rest_layouts(param))]
            ]
            if because := joined_at_shapes(step, updates, self._num_steps):
                log.info("%s was not tried at the sizes of its parameters: %s", self._cls.__name__, because)
            self._tried.update(map(id, params))
        return counts


class HostAttributes:
    """The attributes of an optimizer for updates on the host, which may run beside those on the device.

    Plain values are the present ones. Tensors, and what the class keeps in lists and dictionaries, are copied when the
    optimizer has other ones, and stay between updates: caches and scratch."""

    def __init__(self) -> None:
        self._copies: dict[str, tuple[object, Any, object]] = {}
        """By name what an attribute was copied from, the copy, and the origins, so that no other takes their id."""

    def of(self, attributes: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return `attributes` for the host. Waits for devices with tensors in them."""
        found: dict[str, Any] = {}
        for name, value in attributes.items():
            found[name] = value
            if isinstance(value, torch.Tensor | torch.Generator | dict | list | set):
                origin = _origin_of(value)
                if name not in self._copies or self._copies[name][0] != origin:
                    self._copies[name] = (
                        origin,
                        copied(value, lambda tensor: tensor.detach().to("cpu", copy=True)),
                        leaves_of(value),
                    )
                found[name] = self._copies[name][1]
        return found


def _origin_of(value: Any) -> object:
    """Return what differs for two values if they have other tensors, such as were written since, or other numbers."""
    if isinstance(value, torch.Tensor):
        return id(value), 0 if isinstance(value, nn.Parameter) else value._version
    if isinstance(value, Mapping):
        return id(value), *((key if isinstance(key, str) else id(key), _origin_of(own)) for key, own in value.items())
    if isinstance(value, list | tuple | set):
        return id(value), *map(_origin_of, value)
    return value if isinstance(value, bool | int | float | str) else id(value)


class ClassRule(UpdateRule):
    """The update rule of `cls`, with the attributes of its instance `optimizer`, and state of `precision`.

    It has more than 20 methods, because it answers plans and runs updates at once, as each rule does.
    """

    makes_state = True

    def __init__(self, cls: type[Optimizer], optimizer: Optimizer, precision: StatePrecision = EXACT) -> None:
        self._cls = cls
        self._precision = precision
        self.known = DryRuns(cls, optimizer)
        """What dry runs found out about the class."""
        self._attributes: Mapping[str, Any] = {}
        self._host_attributes = HostAttributes()
        self._passes = ClassPasses()
        self._num_first_blocks = 16
        """The parts of a large tensor on the host in its first step; 1 if it is a part."""
        self._reasons: dict[int, tuple[object, str]] = {}
        """By index of a param group why it is not placed, and for which parameters: a cache, read at each bucket."""

    def snapshots(self) -> "tuple[ClassRule, ClassRule]":
        """Return the rule with the present attributes of the optimizer, for updates that run later on the device, and
        with attributes of their own on the host: scratch that the other side writes meanwhile would mix two."""
        present = self.known.attributes()
        rule, on_host = copy.copy(self), copy.copy(self)
        rule._attributes, on_host._attributes = present, self._host_attributes.of(present)
        return rule, on_host

    def why_not_placed(self, groups: Sequence[Mapping[str, Any]]) -> str:
        """Return why the class may not be updated bucket by bucket for some param group; empty if it may for all.

        Each element must be updated by itself, or each tensor of a single rank with exact state.
        """
        for index, group in enumerate(groups):
            key = (len(group["params"]), group_key(group))
            if self._reasons.get(index, ((), ""))[0] != key:
                because = next(filter(None, (self._why_not_alone(param, group) for param in group["params"])), "")
                self._reasons[index] = (key, because)
            if because := self._reasons[index][1]:
                return because
        return ""

    def _why_not_alone(self, param: torch.Tensor, group: Mapping[str, Any]) -> str:
        because = self.known.why_not_alone(param, group)
        if not because and self.updates_whole(param, group) and not self._precision.is_exact:
            because = self.known.schema(group, updated_dtype(param)).because
            because += "; and its state is to be stored narrower, which is done element by element"
        return because

    def updates_whole(self, param: torch.Tensor, group: Mapping[str, Any]) -> bool:
        """Return whether the update of `param` reads the whole tensor, and no other one."""
        return self.known.are_whole(group, updated_dtype(param))

    def check_step(
        self, groups: Sequence[Mapping[str, Any]], states: Mapping[Any, Mapping[str, Any]]
    ) -> Sequence[Mapping[str, Any]]:
        """Raise OptimizerNotTensorWise if the next step joins two parameters; return the counts of each group after
        it."""
        return self.known.watch(groups, states)

    def as_class(self, param: torch.Tensor, state: Mapping[str, Any], group: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return `state` as the optimizer class keeps it: its statistics may be in lists."""
        return nested_state(state, self.known.entries(param, group))

    def from_class(self, param: torch.Tensor, state: Mapping[str, Any], group: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return `state`, which the optimizer class keeps, with each statistic as an entry of its own."""
        return flat_state(state, self.known.entries(param, group))

    def statistics(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of the statistics, each shaped like its parameter unless parameters are updated whole."""
        own = [param for param in group.get("params", ()) if self.updates_whole(param, group)]
        whole = [name for param in own for name in self.state_layouts(param, group)]
        return tuple(dict.fromkeys([*whole, *self.known.schema(group, torch.float32).dtypes]))

    def moves_with_update(self, name: str, group: Mapping[str, Any]) -> bool:
        """Return whether the entry `name` of a state must be on the device that updates the parameter.

        Statistics must. Counters stay on the host unless the class is `fused` or `capturable`.
        """
        return name in self.known.schema(group, torch.float32).dtypes or bool(
            group.get("fused") or group.get("capturable")
        )

    def counts_steps(self, group: Mapping[str, Any]) -> bool:
        """Return whether the class wants `step` beside the weight, and only counts with it, as dry steps have found."""
        return self.moves_with_update("step", group) and self.known.schema(group, torch.float32).counts_steps

    def state_layouts(self, param: torch.Tensor, group: Mapping[str, Any]) -> Mapping[str, StatisticLayout]:
        """Return the layout of each statistic of `param` by name, and of the rest of its master if it has one."""
        if self.updates_whole(param, group):
            shape, found = tuple(param.shape), self.known.tensor_step(param, group).state or {}
            own = {
                name: StatisticLayout(one.dtype, shape=one.shape, order=one.order)
                if one.order or one.shape != shape
                else StatisticLayout(one.dtype)
                for name, one in found.items()
                if one.shape
            }
        else:
            own = self._layouts(group, updated_dtype(param))
        return {**own, **rest_layouts(param)}

    def _layouts(self, group: Mapping[str, Any], dtype: torch.dtype) -> dict[str, StatisticLayout]:
        """Return the layouts of the statistics of elements in `dtype`."""
        narrow = self._narrow(group, dtype)
        dtypes = self.known.schema(group, dtype).dtypes
        return {name: StatisticLayout(torch.bfloat16 if name in narrow else own) for name, own in dtypes.items()}

    def _narrow(self, group: Mapping[str, Any], dtype: torch.dtype) -> frozenset[str]:
        """Return the names of the statistics of a parameter in `dtype` that the class has in fp32, and bf16 stores."""
        if self._precision.is_exact:
            return frozenset()
        dtypes = self.known.schema(group, dtype).dtypes
        return frozenset(name for name, own in dtypes.items() if own == torch.float32)

    def param_state(self, param: torch.Tensor, group: Mapping[str, Any]) -> Param:
        """Return the bytes of the state of `param`: if the class is not element-wise, those that a dry run at its shape
        found, and if no dry run can, those of two statistics."""
        if self.updates_whole(param, group) and not self._why_not_alone(param, group):
            step, state_bytes = (
                self.known.tensor_step(param, group),
                state_nbytes(param, self.state_layouts(param, group)),
            )
            copied_bytes = MASTER_BYTES_PER_ELEMENT[str(param.dtype).removeprefix("torch.")] if has_master(param) else 0
            whole = WholeUpdate(
                flops=tuple(sorted(step.flops.items())),
                moved_bytes=step.moved_bytes + copied_bytes * gathered_numel(param),
                num_kernels=step.num_kernels + (_MASTER_KERNELS if has_master(param) else 0),
                most_nbytes=param.nbytes,
                most_state_nbytes=state_bytes,
                work_nbytes=self.work_bytes([param], group),
            )
            return Param(is_trained=True, state_nbytes=state_bytes, whole_update=whole)
        if self.known.schema(group, updated_dtype(param)).because:
            step = self.known.tensor_step(param, group)
            state_bytes = step.state_bytes if step.state is not None else 2 * gathered_numel(param) * param.itemsize
            return Param(is_trained=True, state_nbytes=state_bytes)
        found = super().param_state(param, group)
        if narrow := bool(self._narrow(group, updated_dtype(param))):
            found = replace(found, state_dtype="bfloat16")
        if narrow or has_master(param):
            numel = min(_BLOCK, gathered_numel(param))
            work_bytes = scratch_nbytes(param.dtype, numel) if has_master(param) else 0
            found = replace(found, block_update=BlockUpdate(work_nbytes=work_bytes))
        return found

    def work_bytes(self, params: Sequence[torch.Tensor], group: Mapping[str, Any]) -> int:
        """Return the most bytes that one step of all of `params`, none of which is updated by elements, holds at once
        beside weights, gradients and state."""
        steps = (each for each in params if self.known.schema(group, updated_dtype(each)).because)
        own_bytes = work_bytes_of(self.known.tensor_step(each, group) for each in steps)
        wide = (scratch_nbytes(param.dtype, gathered_numel(param), own_bytes) for param in filter(has_master, params))
        return max(own_bytes, *wide, 0)

    def as_planned(self, param: torch.Tensor, state: State, group: Mapping[str, Any]) -> State:
        """Return `state` with the statistics that are narrowed in bf16, rounded to the nearest; those of a parameter
        that is updated whole with their elements in the order in which the class keeps them; those of a parameter with
        a master in the dtypes of an fp32 parameter."""
        layouts: Mapping[str, StatisticLayout] = dict.fromkeys(self._narrow(group, updated_dtype(param)), _BF16)
        layouts = self.state_layouts(param, group) if has_master(param) else layouts
        moved = {
            name: value.to(layouts[name].dtype)
            for name, value in state.items()
            if name in layouts and isinstance(value, torch.Tensor) and value.dtype != layouts[name].dtype
        }
        state = {**state, **moved} if moved else state
        if self.updates_whole(param, group):
            like, layouts = own_shard(param).detach(), self.state_layouts(param, group)
            shapes = {name: own.shape or tuple(like.shape) for name, own in layouts.items()}
            return {
                name: layouts[name].in_order(value, like)
                if isinstance(value, torch.Tensor) and shapes.get(name) == tuple(value.shape)
                else value
                for name, value in state.items()
            }
        return state

    def start(self, param: torch.Tensor, state: State, device: torch.device) -> None:
        """Choose the host threads for `device`; the class creates the state at its first step."""
        self._passes.threads = host_threads_for(device)

    def update(self, updates: Sequence[ParamUpdate], group: Mapping[str, Any]) -> None:
        """Update weights in place and the entries of states in place or by new values, as the class does."""
        factor = group.get(GRAD_SCALE, 1.0)
        group = {name: value for name, value in group.items() if name != GRAD_SCALE}
        with_master = [each for each in updates if rest_of(each) is not None]
        exact = [each for each in updates if rest_of(each) is None]
        if with_master and self.known.are_whole(group, torch.float32):
            for each in with_master:
                self._take_wide(each, group, factor)
        elif with_master:
            self._in_blocks(with_master, group, factor)
        if exact and self.updates_whole(exact[0].weight, group):
            self._take_whole(exact, group)
            return
        if self._narrow(group, torch.float32):
            self._in_blocks([each for each in exact if each.weight.dtype == torch.float32], group, 1.0)
            exact = [each for each in exact if each.weight.dtype != torch.float32]
        if not exact:
            return
        step = ClassStep(cls=self._cls, attributes=self._attributes, group=group)
        if not group.get("fused"):  # torch's fused steps are single passes already
            exact = self._passes.update(step, exact, self.known.schema(group, exact[0].weight.dtype))
        exact = [one for one in exact if not self._begin_in_blocks(one, group)]
        if exact:
            step.take(exact)
        for one in exact:
            store_made(one)

    def _begin_in_blocks(self, one: ParamUpdate, group: Mapping[str, Any]) -> bool:
        """Take the first step of `one`, whose elements are updated alone, block by block if it is a large tensor on the
        host; return whether it is. The step of the class takes memory for each of its ops, which no plan counts; later
        steps are single passes over memory."""
        has_state = one.state or self.known.schema(group, one.weight.dtype).is_stateless
        is_small = self._num_first_blocks == 1 or one.weight.numel() <= _LEAST_FIRST_BLOCK
        is_dense = one.weight.is_contiguous() and one.grad.layout == torch.strided
        if has_state or is_small or not is_dense or one.weight.device.type != "cpu":
            return False
        layouts = self._layouts(group, one.weight.dtype)
        param = MemoryParam(one._replace(places=_places(one, layouts)), layouts)
        size = -(-param.numel // (CUT_NUMEL * self._num_first_blocks)) * CUT_NUMEL
        size = min(max(size, _LEAST_FIRST_BLOCK), _BLOCK)
        of_block = copy.copy(self)
        of_block._num_first_blocks = 1
        for start in range(0, param.numel, size):
            stop = min(start + size, param.numel)
            homes = {name: param.home_of(name, start, stop) for name in layouts}
            update([Segment(param, start, stop).put(homes)], of_block, group, one.weight.device)
        return True

    def _take_whole(self, updates: Sequence[ParamUpdate], group: Mapping[str, Any]) -> None:
        """Update one tensor after another, so that there is work space for a single tensor at a time."""
        step = ClassStep(cls=self._cls, attributes=self._attributes, group=group)
        for one in updates:
            own = one._replace(state=dict(self.as_class(one.weight, one.state, group)))
            step.take([own])
            found = self.from_class(one.weight, own.state, group)
            for name in one.state.keys() - found.keys():
                del one.state[name]
            one.state.update(found)
            store_made(one)

    def _take_wide(self, one: ParamUpdate, group: Mapping[str, Any], factor: float) -> None:
        """Update the whole tensor of the master of `one`; its gradient is multiplied by `factor`."""
        like, rest = one.weight, rest_of(one)
        entries = without(one.state, REST_NAMES.values())
        wide = Wide(weight=flat(like), grad=flat_order(one.grad, like), rest=None if rest is None else flat(rest))
        for batch in batches([wide], max(like.numel(), 1)):
            tensors = (*batch.joined(), *batch.grads(factor))
            master, grad = (each.as_strided(like.shape, like.stride()) for each in tensors)
            self._take_whole([ParamUpdate(master, grad, entries, one.places)], group)
            batch.split()
        _note_results(one, entries)

    def _in_blocks(self, updates: Sequence[ParamUpdate], group: Mapping[str, Any], factor: float) -> None:
        """Update elements block by block in fp32: those of masters, and those whose statistics are in bf16."""
        exact = copy.copy(self)
        exact._precision = EXACT
        layouts, narrow = self._layouts(group, torch.float32), self._narrow(group, torch.float32)
        kinds: dict[tuple[object, ...], list[_InBlocks]] = {}
        for one in updates:
            own = _InBlocks.of_update(one, layouts, narrow)
            kinds.setdefault((one.weight.device, one.weight.dtype, own.rest is None), []).append(own)
        for params in kinds.values():
            for batch in batches(params, max(1, *(min(_BLOCK, each.weight.numel()) for each in params))):
                tensors = zip(batch.pieces, batch.joined(), batch.grads(factor), strict=True)
                blocks = [one.param.block(one.start, one.stop, master, grad) for one, master, grad in tensors]
                update(blocks, exact, group, batch.wide.device)
                for piece, block in zip(batch.pieces, blocks, strict=True):
                    piece.param.store(block, self._precision.seed)
                batch.split()
            for each in params:
                if not each.weight.numel():  # the shard of this rank is empty, but all ranks count steps
                    update([each.block(0, 0, each.weight.float(), each.grad.float())], exact, group, each.weight.device)
                each.finish(counts=self.counts_steps(group))


def rest_of(one: ParamUpdate) -> torch.Tensor | None:
    """Return the rest of the master of the updated parameter; None if the parameter has no master."""
    return one.state.get(REST_NAMES.get(one.weight.dtype, ""))


def _places(one: ParamUpdate, layouts: Mapping[str, StatisticLayout]) -> Mapping[str, torch.Tensor]:
    """Return memory for the statistics in `layouts` that `one` has not yet."""
    missing = ((name, layout) for name, layout in layouts.items() if name not in one.state)
    return {name: one.places[name] if name in one.places else layout.zeros(one.weight) for name, layout in missing}


def without(state: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return `state` without the entries `names`."""
    return {name: value for name, value in state.items() if name not in names}


def _why_reserved(param: torch.Tensor, names: Collection[str]) -> str:
    """Return why a state with entries `names` cannot be told from one with a master of `param`; empty if it can."""
    reserved = REST_NAMES.values() if has_master(param) else [REST_NAMES.get(param.dtype)]
    name = next((name for name in reserved if name in names), None)
    return f"its state has {name!r}, a name of fp32 masters" if name else ""


def _note_results(one: ParamUpdate, entries: Mapping[str, Any]) -> None:
    """Put `entries` into the state of `one` in place of all but the rest of its master; its weight was written."""
    for name in without(one.state, (*REST_NAMES.values(), *entries)):
        del one.state[name]
    one.state.update(entries)
    torch.autograd.graph.increment_version(one.weight)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _InBlocks(Wide):
    """A parameter that is updated block by block."""

    of: ParamUpdate
    own: MemoryParam
    """Its statistics in their homes, without the rest of its master."""
    narrow: frozenset[str]
    """The names of the statistics that are in bf16 there."""
    number: int
    """The number of this step, which the noise depends on; 0 if nothing is narrow."""

    @classmethod
    def of_update(cls, one: ParamUpdate, layouts: Mapping[str, StatisticLayout], narrow: frozenset[str]) -> "_InBlocks":
        state, rest = one.state, rest_of(one)
        entries = without(state, (*REST_NAMES.values(), _NUM_UPDATES))
        own = MemoryParam(one._replace(state=entries, places=_places(one, layouts)), layouts)
        number = num_steps(state.get("step", state.get(_NUM_UPDATES, 0))) + 1 if narrow else 0
        flats = {"weight": own.weight, "grad": own.grad, "rest": None if rest is None else flat(rest)}
        return cls(**flats, of=one, own=own, narrow=narrow, number=number)

    def block(self, start: int, stop: int, master: torch.Tensor, grad: torch.Tensor) -> Segment[MemoryParam]:
        """Return the elements `start` to `stop`, with their `master` and `grad` in fp32, and all statistics as the
        class has them."""
        homes = {name: self.own.home_of(name, start, stop) for name in self.own.layouts}
        wide = {name: home.float() if name in self.narrow else home for name, home in homes.items()}
        return Segment(self.own, start, stop).put(wide, master, grad)

    def store(self, block: Segment[MemoryParam], seed: int) -> None:
        """Round the statistics of `block` that are narrow into their homes, with the noise of this step and `seed`."""
        for name in block.made & self.narrow:
            values = flat(block.statistics[name])
            # The key as the int32 with its bits: the noise is a function of the value, the step and the seed.
            key = torch.full((), noise_key(seed, self.number), dtype=torch.int64, device=values.device)
            home = self.own.home_of(name, block.start, block.stop)
            home.copy_(rounded_to_bfloat16(values, weight_noise(key.to(torch.int32), values)))

    def finish(self, *, counts: bool) -> None:
        """Put the results into the state; `counts` says that `step` counts steps, and nothing else."""
        state = self.of.state
        _note_results(self.of, self.own.entries)
        if self.narrow and "step" not in state:
            state[_NUM_UPDATES] = self.number
        elif self.narrow and counts:
            note_num_steps(state["step"], self.number)
