"""What one step of an optimizer class does to a tensor of a given shape: the state that it keeps, its FLOPs, the bytes
that it moves, its kernels, and the memory that it takes besides.

    a tensor of the real shape, without memory  --some steps of the class, each op seen-->  a `TensorStep`

Plans count with it the state and the work space of classes that are not element-wise, whose state has any shape. An op
on tensors without memory takes some 0.1 ms whatever their shape: two steps of Muon for 4096 x 11008 take 0.1 s.

A class that counts its steps may do more in some of them, such as SOAP, which turns its basis in every tenth:

    steps        1  2 | 3 ... 12 | 99  100  101       100 is an integer among the hyperparameters
    work space   the most of all of them
    FLOPs        the mean of 3 to 12, and what 100 has beyond each of them over 100
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.flop_counter import flop_registry

from elixir_compile import compat
from elixir_compile.base.errors import OptimizerNotTensorWise
from elixir_compile.graph.capture.node_facts import leaves_of
from elixir_compile.graph.ops.optimizers import updated_dtype
from elixir_compile.optim.generic.dry_step import (
    ClassStep,
    beside_captures,
    constructed,
    copied,
    cut,
    plain_step,
    text_of,
    transient_optimizer,
    with_foreach,
    without_traces,
)
from elixir_compile.optim.generic.owners import Owners
from elixir_compile.optim.rule import ParamUpdate, order_of, paths_of

_MOST_ELEMENTS = 1 << 16
"""The most elements of a tensor with memory, on which a class runs that fails on tensors without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTensor:
    """A tensor in the state of a parameter."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    order: tuple[int, ...] = ()
    """The order of its dimensions in memory: see `StatisticLayout`."""

    @property
    def nbytes(self) -> int:
        """The bytes of its elements."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorStep:
    """The state of an optimizer class for one tensor after two steps, and what a step does on average."""

    state: Mapping[str, StateTensor] | None
    """The tensors of the state by path: `momentum_buffer`; `GG.0`, the first of a list. Numbers are left out. None if
    the state is not known either."""
    entries: Mapping[str, Any] = field(default_factory=dict)
    """The entries of the state that are lists, tuples or mappings, with the path of each leaf in its place."""
    state_bytes: int = 0
    """Bytes of their memory, which two of them may share."""
    flops: Mapping[str, int] = field(default_factory=dict)
    """Floating-point operations of products and factorisations of matrices, by the dtype of their tensors."""
    moved_bytes: int = 0
    """Bytes that all ops read and write; views move none."""
    num_kernels: int = 0
    """Ops that compute something; one for an op on a list of tensors."""
    work_bytes: int = 0
    """Work space: the most bytes of new memory at once, beside weight, gradient and state, in any step."""
    more_work_bytes: int = 0
    """Bytes by which the work space grows with each further tensor of the step: 0 if the class updates one after
    another, up to `work_bytes` if it runs ops on lists of tensors."""
    left_work_bytes: int = 0
    """Bytes that the tensor before leaves in the variables of a loop, until they have new values."""
    unknown: str = ""
    """Why FLOPs, moved bytes, kernels and work space are not known, and 0; empty if they are."""


def work_bytes_of(steps: Iterable[TensorStep]) -> int:
    """Return the work space of a step of the class that updates the tensors of `steps` in a single call."""
    steps = list(steps)
    alone_bytes = max((step.work_bytes - step.more_work_bytes for step in steps), default=0)
    left_bytes = max((step.left_work_bytes for step in steps), default=0) if len(steps) > 1 else 0
    return sum(step.more_work_bytes for step in steps) + alone_bytes + left_bytes


def tensor_step(
    cls: type[Optimizer],
    attributes: Mapping[str, Any],
    group: Mapping[str, Any],
    like: torch.Tensor,
    dtype: torch.dtype | None = None,
    per_param: Iterable[str] = (),
) -> TensorStep:
    """Return what a step of `cls` does to a tensor with the shape and device of `like`, of all ranks together.

    `attributes` are those of an instance, `group` has the hyperparameters; of those named in `per_param`, which are
    lists, the first entry is that of the tensor. Tensor and gradient have `dtype`, by default the dtype of `like`. The
    steps run on tensors without memory, and each value that the class reads on the host is 1. A class that fails on
    those runs on small tensors with memory, on the host: the state follows from their sizes, or is unknown too, and the
    rest is unknown.

    May be called during a capture. The random state, the gradient mode and warnings are left as they were, and nothing
    is compiled.
    """
    with without_traces():
        asked = _Asked(
            cls=cls,
            attributes=copied(attributes),
            group=copied({name: group[name] for name in group.keys() - ({"params", "param_names"} - {*per_param})}),
            per_param=tuple(per_param),
            dtype=dtype or like.dtype,
            device=like.device,
        )
        try:
            with compat.fake_tensors():
                # Alone and beside others of the same shape, which shows how the work space grows.
                shape, numbers = tuple(like.shape), _later_steps(asked)
                alone = _trained(asked, [shape], like.device, numbers)
                most = max(alone.steps, key=lambda step: step.work_bytes).number
                two, three = (_trained(asked, [shape] * count, like.device, (most,)) for count in (2, 3))
        except Exception as error:  # a user's class may raise anything for tensors without memory
            because = f"{type(error).__name__} on tensors without memory: {error}".partition("\n")[0]
            return _by_small_tensors(asked, tuple(like.shape), because)
    more_bytes, average = min(max(0, three.work_bytes - two.work_bytes), alone.work_bytes), _average(alone.steps)
    return TensorStep(
        state=alone.state,
        entries=alone.entries,
        state_bytes=alone.state_bytes,
        flops={name: count for name, count in average.items() if name not in (_MOVED, _KERNELS)},
        moved_bytes=average[_MOVED],
        num_kernels=average[_KERNELS],
        work_bytes=alone.work_bytes,
        more_work_bytes=more_bytes,
        left_work_bytes=max(0, two.work_bytes - alone.work_bytes - more_bytes),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """The class to run, with its hyperparameters and the kind of its tensors."""

    cls: type[Optimizer]
    attributes: Mapping[str, Any]
    group: Mapping[str, Any]
    per_param: tuple[str, ...]
    dtype: torch.dtype
    device: torch.device

    def optimizer(self, params: Sequence[nn.Parameter], *, by_constructor: bool) -> Optimizer:
        """Return an optimizer for `params`, made by its constructor, or without it, as updates make it."""
        group = dict(with_foreach(cut(self.group, self.per_param, [0] * len(params)), params[0]))
        if params[0].device.type == "cpu" and group.get("capturable"):
            group["capturable"] = False
        if by_constructor:
            return constructed(self.cls, group, params)
        return transient_optimizer(self.cls, self.attributes, {**group, "params": list(params)})


_NUM_STEPS = 12
"""The steps that a class which counts them takes in a row."""
_MOST_STEPS = 1_000_000
"""The largest integer that may be the number of steps between those with more work."""


def _later_steps(asked: _Asked) -> list[int]:
    """Return the numbers of the steps behind the second in which a class that counts them may do other things: some in
    a row, and those around each integer among its hyperparameters and attributes."""
    values = [*asked.attributes.values(), *leaves_of(list(asked.group.values()))]
    periods = {value for value in values if type(value) is int and _NUM_STEPS <= value <= _MOST_STEPS}
    around = {period + more for period in periods for more in (-1, 0, 1)}
    return sorted({*range(3, _NUM_STEPS + 1), *around})


def _average(steps: "Sequence[_Seen]") -> Counter[str]:
    """Return the mean FLOPs, bytes moved and kernels of `steps` of one tensor. Work that only a step behind
    `_NUM_STEPS` does counts once in as many steps as the number of that step."""
    usual = [step for step in steps if 2 < step.number <= _NUM_STEPS] or steps[-1:]
    total: Counter[str] = Counter()
    for step in usual:
        total.update(step.counted())
    found = Counter({name: round(count / len(usual)) for name, count in total.items()})
    most, periods = max(usual, key=lambda step: step.moved_bytes), list[int]()
    for step in sorted(steps, key=lambda step: step.number):
        period = step.number
        if period > _NUM_STEPS and step.moved_bytes > most.moved_bytes and all(period % own > 1 for own in periods):
            periods.append(period)
            more = step.counted()
            more.subtract(most.counted())
            found.update({name: max(0, count) // period for name, count in more.items()})
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trained:
    """What two steps left of the first tensor, and what they and later ones did."""

    state: Mapping[str, StateTensor]
    entries: Mapping[str, Any]
    state_bytes: int
    steps: "Sequence[_Seen]"

    @property
    def work_bytes(self) -> int:
        return max(step.work_bytes for step in self.steps)


def _trained(
    asked: _Asked, shapes: Sequence[tuple[int, ...]], device: torch.device, later: Iterable[int] = ()
) -> _Trained:
    """Run two steps of tensors of `shapes` on `device`, and of a class that counts them those with the numbers `later`.
    Raises what the class raises."""
    try:
        return _steps(asked, shapes, device, later)
    except Exception:  # a user's class may raise anything, and some create state in the constructor
        return _steps(asked, shapes, device, later, by_constructor=True)


def _steps(
    asked: _Asked,
    shapes: Sequence[tuple[int, ...]],
    device: torch.device,
    later: Iterable[int],
    *,
    by_constructor: bool = False,
) -> _Trained:
    params = [nn.Parameter(torch.ones(shape, dtype=asked.dtype, device=device)) for shape in shapes]
    optimizer = asked.optimizer(params, by_constructor=by_constructor)
    steps = [_step(asked, optimizer, params, 1)]
    before = {(id(holder), name): value for holder, name, value in _numbers(optimizer, params)}
    steps.append(_step(asked, optimizer, params, 2))
    counters = [each for each in _numbers(optimizer, params) if before.get((id(each[0]), each[1])) == each[2] - 1]
    whole = dict(optimizer.state.get(params[0], {}))
    state = {path: leaf for path, leaf in paths_of(whole) if isinstance(leaf, torch.Tensor)}
    nested = {name: value for name, value in whole.items() if isinstance(value, Mapping | list | tuple)}
    found = _Trained(
        entries={name: _with_paths(value, str(name)) for name, value in nested.items()},
        state={
            path: StateTensor(shape=tuple(leaf.shape), dtype=leaf.dtype, order=order_of(leaf))
            for path, leaf in state.items()
        },
        state_bytes=_state_bytes(optimizer, params[:1]),
        steps=steps,
    )
    counts = bool(counters) or any(not leaf.dim() for leaf in state.values())
    for number in later if counts else ():
        if number > 2:
            for holder, name, value in counters:
                holder[name] = value + number - 3
            try:
                steps.append(_step(asked, optimizer, params, number))
            except Exception:  # for such a count; a user's class may raise anything
                break
    return found


def _step(asked: _Asked, optimizer: Optimizer, params: Sequence[nn.Parameter], number: int) -> "_Seen":
    for param in params:
        param.grad = torch.ones(param.shape, dtype=asked.dtype, device=param.device)
    given = [*params, *(param.grad for param in params if param.grad is not None)]
    before_bytes, seen = _state_bytes(optimizer, params), _Seen(given, partial(_state_of, optimizer, params), number)
    del given
    with torch.no_grad(), compat.ops_seen_by(seen.see):
        plain_step(asked.cls)(optimizer)
    seen.state.clear()
    seen.work_bytes = seen.most_bytes - (_state_bytes(optimizer, params) - before_bytes)
    return seen


def _numbers(optimizer: Optimizer, params: Sequence[nn.Parameter]) -> list[tuple[dict[str, Any], str, Any]]:
    """Return each number of `optimizer`, of its group and of the states of `params` with the dictionary and the name
    where it is."""
    states = [optimizer.state[param] for param in params if param in optimizer.state]
    return [
        (holder, name, value)
        for holder in (vars(optimizer), optimizer.param_groups[0], *states)
        for name, value in holder.items()
        if type(value) in (int, float)
    ]


def _state_bytes(optimizer: Optimizer, params: Sequence[nn.Parameter]) -> int:
    """Return the bytes of memory in which `params` have their state, without the parameters themselves."""
    found = {compat.storage_key(each): each.untyped_storage().nbytes() for each in _state_of(optimizer, params)}
    return sum(nbytes for key, nbytes in found.items() if key not in set(map(compat.storage_key, params)))


def _state_of(optimizer: Optimizer, params: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    entries = (leaf for param in params for _, leaf in paths_of(optimizer.state.get(param, {})))
    return [leaf for leaf in entries if isinstance(leaf, torch.Tensor)]


def _with_paths(value: Any, path: str) -> Any:
    """Return nested `value` with the path of each leaf in its place."""
    if isinstance(value, Mapping):
        return {key: _with_paths(entry, f"{path}.{key}") for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_with_paths(entry, f"{path}.{index}") for index, entry in enumerate(value))
    return path


def flat_state(state: Mapping[str, Any], entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return `state`, as a class keeps it, with the leaves of its nested `entries` by path; see `nested_state`."""
    found: dict[str, Any] = {}
    for name, value in state.items():
        found.update(
            paths_of(value, name) if name in entries and _with_paths(value, name) == entries[name] else [(name, value)]
        )
    return found


def nested_state(state: Mapping[str, Any], entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return `state`, of which `flat_state` made the leaves of `entries` plain entries, as the class keeps it."""
    leaves = {path: name for name, entry in entries.items() for _, path in paths_of(entry)}
    state, found = dict(state), dict[str, Any]()  # each statistic on disk is read once
    for name, value in state.items():
        if name not in leaves:
            found[name] = value
        elif leaves[name] not in found:
            found[leaves[name]] = _with_leaves(entries[leaves[name]], state)
    return found


def _with_leaves(entry: Any, state: Mapping[str, Any]) -> Any:
    if isinstance(entry, Mapping):
        return {key: _with_leaves(own, state) for key, own in entry.items()}
    if isinstance(entry, list | tuple):
        return type(entry)(_with_leaves(own, state) for own in entry)
    return state[entry]


class _Seen:
    """Counts what the ops of a step do; `see` runs each."""

    def __init__(self, given: Iterable[torch.Tensor], state: Callable[[], Iterable[torch.Tensor]], number: int) -> None:
        """`given` are the weights and gradients, `state` returns the tensors of the state, `number` is that of the
        step."""
        self.number = number
        self.flops: Counter[str] = Counter()
        self.moved_bytes = self.num_kernels = 0
        self.work_bytes = self.most_bytes = 0
        """The most bytes of memory that was made in the step, at once."""
        self._more_bytes = 0
        self._state_now = state
        self.state = {compat.storage_key(each): each for each in state()}
        """What was ever in the state. What a class replaces there is not free before the end of its update, because it
        is in memory that the plan has for it."""
        self._known = {*map(compat.storage_key, given), *self.state}

    def see(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run `op`, and count it. A value read from a tensor without memory is 1, of a number in the state, which may
        count steps, the number of the step."""
        self.state |= {compat.storage_key(each): each for each in self._state_now()}
        given = [each for each in leaves_of([args, kwargs]) if isinstance(each, torch.Tensor)]
        if str(op) == "aten._local_scalar_dense.default" and compat.is_fake(given[0]):
            count = self.number if compat.storage_key(given[0]) in self.state and not given[0].dim() else 1
            return True if given[0].dtype == torch.bool else float(count) if given[0].is_floating_point() else count
        result = op(*args, **kwargs)
        made, scratch_bytes = [each for each in leaves_of([result]) if isinstance(each, torch.Tensor)], 0
        new = [each for each in made if compat.storage_key(each) not in set(map(compat.storage_key, given))]
        schema = compat.schema_of(op)
        if (new or schema.is_mutable) and op.overloadpacket not in _MAKES_NOTHING:
            pairs = zip(schema.arguments, args, strict=False)
            changed = leaves_of([each for own, each in pairs if own.alias_info is not None and own.alias_info.is_write])
            moved = [*given, *(made or (each for each in changed if isinstance(each, torch.Tensor)))]
            self.num_kernels += 1
            # A tensor that was expanded is in fewer bytes of memory than it has.
            self.moved_bytes += sum(min(each.nbytes, each.untyped_storage().nbytes()) for each in moved)
            formula, factorise = flop_registry.get(op.overloadpacket), _FACTORISATIONS.get(str(op.overloadpacket))
            flops = 0 if formula is None else formula(*args, **kwargs, out_val=result)
            if formula is None and factorise is not None:
                *batch, rows, columns = args[0].shape
                own_flops, scratch = factorise(max(rows, columns), min(rows, columns))
                flops, scratch_bytes = prod(batch) * own_flops, scratch * given[0].itemsize
            if flops:
                self.flops[str(given[-1].dtype).removeprefix("torch.")] += flops
        for each in new:
            if compat.storage_key(each) not in self._known:
                self._more_bytes += each.untyped_storage().nbytes()
                self._follow(each)
        self.most_bytes = max(self.most_bytes, self._more_bytes + scratch_bytes)
        return result

    def counted(self) -> Counter[str]:
        """Return the FLOPs by dtype, the bytes moved and the kernels."""
        return Counter({**self.flops, _MOVED: self.moved_bytes, _KERNELS: self.num_kernels})

    def _follow(self, tensor: torch.Tensor) -> None:
        """Subtract the bytes of the memory of `tensor` once it is freed."""
        storage, key = tensor.untyped_storage(), compat.storage_key(tensor)
        self._known.add(key)
        weakref.finalize(storage, self._forget, key, storage.nbytes()).atexit = False

    def _forget(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self._more_bytes -= nbytes


_MOVED, _KERNELS = "bytes moved", "kernels"
_aten = torch.ops.aten
_MAKES_NOTHING = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided}
"""Ops that allocate memory and neither read nor write it."""


_FACTORISATIONS: Mapping[str, Callable[[int, int], tuple[int, int]]] = {
    "aten.linalg_qr": lambda long, short: (4 * long * short**2 - 4 * short**3 // 3, 66 * short),
    "aten._linalg_eigh": lambda long, short: (9 * short**3, 2 * short**2 + 11 * short),
    "aten._linalg_svd": lambda long, short: (6 * long * short**2 + 20 * short**3, long * short + 14 * short),
    "aten.linalg_inv_ex": lambda long, short: (2 * short**3, short**2 + short),
    "aten.linalg_cholesky_ex": lambda long, short: (short**3 // 3, 0),
}
"""By the longer and the shorter side, floating-point operations with vectors: Golub and Van Loan, Matrix Computations,
4th edition, 5.2, 8.3, 8.6, 3.2 and 4.2, of which torch has none; and the elements of the scratch that LAPACK asks for
inside of the op: `syevd` says 2 n^2 + 6 n + 1 and 5 n integers, the others were measured on a CPU at 256 to 1024."""


# ----------------------------------------------------------------------------------------------------------------------
# The state of a class that fails on tensors without memory, from the sizes of its state for two small tensors.
#
#     tensors of    240 x 232    120 x 116     then for 4096 x 11008
#     row_var       (240, 1)     (120, 1)      (4096, 1)                the size of dimension 0
#     absmax        (870,)       (217,)        (704512,)                an element for each 64
#     table         (256,)       (256,)        (256,)                   the same


def _by_small_tensors(asked: _Asked, shape: tuple[int, ...], because: str) -> TensorStep:
    """Return the state for a tensor of `shape`, without the rest, which is unknown `because`."""
    group = {
        name: value.detach().cpu() if isinstance(value, torch.Tensor) else value for name, value in asked.group.items()
    }
    on_host = replace(asked, group=group)
    longest = int(_MOST_ELEMENTS ** (1 / max(1, len(shape)))) // 8 * 8
    shapes = [
        tuple(min(size, max(1, (longest - 8 * at) // divisor)) for at, size in enumerate(shape)) for divisor in (1, 2)
    ]
    try:
        first, second = (_trained(on_host, [each], torch.device("cpu")) for each in shapes)
    except Exception as error:  # a user's class may raise anything
        return TensorStep(state=None, unknown=f"it fails with {because}, and with {type(error).__name__}: {error}")
    state: dict[str, StateTensor] = {}
    for path, one in first.state.items():
        other = second.state.get(path)
        sizes = None if other is None else _sizes_at(shape, shapes, (one.shape, other.shape))
        if sizes is None:
            because = f"it fails with {because}, and the shape of {path} does not follow from that of small tensors"
            return TensorStep(state=None, unknown=because)
        state[path] = StateTensor(shape=sizes, dtype=one.dtype, order=one.order)
    state_bytes = sum(each.nbytes for each in state.values())
    return TensorStep(state=state, state_bytes=state_bytes, unknown=f"it fails with {because}")


def _sizes_at(
    shape: tuple[int, ...], shapes: Sequence[tuple[int, ...]], found: tuple[tuple[int, ...], tuple[int, ...]]
) -> tuple[int, ...] | None:
    """Return the shape of a tensor of the state for a parameter of `shape`; its shapes are `found` for those of
    `shapes`. None if neither a dimension, nor the number of elements, nor a constant explains a size."""
    if len(found[0]) != len(found[1]):
        return None
    sizes: list[int] = []
    for own in zip(*found, strict=True):
        candidates = [*zip(*shapes, shape, strict=True), (own[0], own[0], own[0])]
        numels = [prod(each) for each in (*shapes, shape)]
        blocks = [block for block in {1, *(1 << bits for bits in range(4, 13))} if -(-numels[0] // block) == own[0]]
        candidates += [tuple(-(-numel // block) for numel in numels) for block in blocks]
        size = next((at for one, other, at in candidates if (one, other) == own), None)
        if size is None:
            return None
        sizes.append(size)
    return tuple(sizes)


# ----------------------------------------------------------------------------------------------------------------------
# Whether a step joins two tensors of given shapes.


def joined_at_shapes(step: ClassStep, updates: Sequence[ParamUpdate], number: int) -> str:
    """Take `step` twice for tensors like those of `updates` but without memory, and see whether it joins two of them.

    Called once before step number `number`, the first that updates these tensors: small tensors do not run code behind
    `numel > N`. Values that the step reads on the host are 1. Returns why the class takes no such step, empty if it
    does. Raises OptimizerNotTensorWise if the step joins two parameters.
    """
    owners = Owners(pretends=True)
    try:
        with beside_captures(), compat.fake_tensors(), torch.no_grad():
            own = replace(step, attributes=copied(step.attributes), group=with_foreach(step.group, updates[0].weight))
            params = [nn.Parameter(_without_values(one.weight, dtype=updated_dtype(one.weight))) for one in updates]
            optimizer = own.transient(params, updates[0].weight)
            for param, one in zip(params, updates, strict=True):
                if one.state:
                    optimizer.state[param] = _without_values(dict(one.state), one.weight.device)
            for _ in range(2):
                for place, (param, one) in enumerate(zip(params, updates, strict=True)):
                    param.grad = _without_values(one.grad, dtype=param.dtype)
                    owners.own([param, param.grad, optimizer.state.get(param)], place)
                with compat.ops_seen_by(owners.see):
                    plain_step(step.cls)(optimizer)
                owners.forget()
    except Exception as error:
        if not owners.refused:
            return text_of(error)
    if owners.refused:
        raise OptimizerNotTensorWise(number, owners.refused, step.cls.__name__)
    return ""


def _without_values(value: Any, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Any:
    """Return `value` with a new tensor for each in it, of its shape, under `compat.fake_tensors`.

    A tensor has its own dtype and device if none is given; counters are where they are.
    """
    if isinstance(value, torch.Tensor):
        there = device if value.dim() and device is not None else value.device
        return torch.empty_strided(value.shape, value.stride(), dtype=dtype or value.dtype, device=there)
    if isinstance(value, dict):
        return {name: _without_values(own, device) for name, own in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_without_values(own, device) for own in value)
    return value
