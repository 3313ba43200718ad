"""Run the step of an optimizer class on chosen tensors, and find out by such steps which state the class keeps and
whether it is element-wise.
"""

import inspect
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from elixir_compile import compat
from elixir_compile.optim.rule import ParamUpdate, State

# ----------------------------------------------------------------------------------------------------------------------
# Run the step of an optimizer class on chosen tensors, for an update.
#
# A transient optimizer is an instance of the user's class that holds the tensors of a bucket during a single update.


_NOT_COPIED = frozenset(
    {"state", "param_groups", "step", "_updater", "_early", "_overflow"}
    | {"_is_accumulating", "_has_stepped", "_has_warned"}
)
"""Attributes not to copy: params, state, a `step` that a scheduler wrapped, and the attributes of `Hybrid`."""


def attributes_of(optimizer: Optimizer) -> Mapping[str, Any]:
    """Return the attributes of `optimizer` for its class's step to read."""
    return {name: value for name, value in vars(optimizer).items() if name not in _NOT_COPIED}


def transient_optimizer(cls: type[Optimizer], attributes: Mapping[str, Any], group: dict[str, Any]) -> Optimizer:
    """Return an instance of `cls` with `attributes` whose only param group is `group`, without hooks or state."""
    optimizer = cls.__new__(cls)
    hooks = {name: OrderedDict() for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")}
    vars(optimizer).update(attributes, **hooks, param_groups=[group], state=defaultdict(dict))
    return optimizer


def plain_step(cls: type[Optimizer]) -> Callable[..., Any]:
    """Return the `step` of `cls` without torch's wrapper, which calls the hooks of a user."""
    step = cls.step
    return inspect.unwrap(step, stop=lambda inner: not getattr(inner, "hooked", False))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassStep:
    """The step of `cls` for a param group, with the attributes of the user's optimizer."""

    cls: type[Optimizer]
    attributes: Mapping[str, Any]
    group: Mapping[str, Any]

    def take(self, updates: Sequence[ParamUpdate]) -> None:
        """Update weights in place, and the entries of states in place or by new values, as the class does."""
        params = [nn.Parameter(one.weight) for one in updates]
        optimizer = self._transient(params, updates[0].weight)
        for param, one in zip(params, updates, strict=True):
            param.grad = one.grad.data  # `detach()` would share the version, which GradientGuard checks
            if one.state:
                optimizer.state[param] = dict(one.state)
        self._step(optimizer)
        for param, one in zip(params, updates, strict=True):
            if param.data_ptr() != one.weight.data_ptr():  # the class assigned `param.data = ...`
                one.weight.copy_(param.detach())
            if param in optimizer.state:
                one.state.update({name: _unaliased(value, one.grad) for name, value in optimizer.state[param].items()})

    def take_dry(self, one: ParamUpdate) -> tuple[torch.Tensor, State]:
        """Run the step on meta tensors as if they were on the host; return the weight and the state after the step."""
        param = nn.Parameter(one.weight)
        optimizer = self._transient([param], torch.empty(0, device="cpu"))
        if "foreach" in self.group:  # the bits are the same, and `ClassPasses` compares them
            optimizer.param_groups[0]["foreach"] = False
        param.grad = one.grad
        if one.state:
            optimizer.state[param] = dict(one.state)
        self._step(optimizer)
        return param.data, optimizer.state[param]

    def _step(self, optimizer: Optimizer) -> None:
        with compat.outside_captures():  # the training thread may capture a graph meanwhile
            plain_step(self.cls)(optimizer)

    def _transient(self, params: Sequence[nn.Parameter], beside: torch.Tensor) -> Optimizer:
        """Return an optimizer on the device of `beside`: on the host, tensors of the group are copied there and
        `capturable` is False."""
        group = dict(self.group)
        if beside.device.type == "cpu":
            for name, value in self.group.items():
                group[name] = value.to(beside.device) if isinstance(value, torch.Tensor) else value
            group |= {"capturable": False} if group.get("capturable") else {}
        return transient_optimizer(self.cls, self.attributes, {**group, "params": list(params)})


def _unaliased(value: Any, grad: torch.Tensor) -> Any:
    """Return `value`, an entry of a state; a copy if the class stored the user's gradient tensor itself."""
    if not isinstance(value, torch.Tensor) or {value.layout, grad.layout} != {torch.strided}:
        return value
    return value.clone() if value.dim() and value.data_ptr() == grad.data_ptr() else value


# ----------------------------------------------------------------------------------------------------------------------
# Find out by dry steps which state an optimizer class keeps, and whether it is element-wise.
#
#     a tensor of 16 x 8  --three steps-->  weights, state
#     its flat halves     --three steps-->  the same bits, or the class is not element-wise
#
# The gradients of the halves differ in magnitude, so norms, means, ranks and random draws change the result. The same
# is done for a number, for tensors of 1 and of 3 to 5 dimensions, and for a large matrix: updates of state on disk, and
# streamed updates, give a class flat parts of large tensors, so a class that looks at `param.dim()`, `param.shape` or
# `param.numel()` is not element-wise either. A class that counts steps in the optimizer or in its param group, instead
# of in the state of a parameter, also counts as not element-wise: its step may not run bucket by bucket.


_SHAPE = (16, 8)
_OTHER_SHAPES = ((), (128,), (8, 4, 4), (4, 4, 4, 2), (4, 4, 2, 2, 2), (127, 256))
"""Cut, as (16, 8), at multiples of 64 elements: kernels may round the rest of a vector in another way. The last is
large, but has fewer than the 32,768 elements from which torch divides an op among threads, wherever a vector ends."""
_SMALL_PART = 256
"""Elements of the second part of the large tensor, so that a class with other arithmetic for large tensors shows it."""
_SCALES = (1e-2, 1.0, 1e2)
"""Factor of the gradients in each step: large enough that code behind a threshold also runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSchema:
    """The state of an optimizer class for a parameter."""

    dtypes: Mapping[str, torch.dtype]
    """The dtype of each statistic by name; statistics have the shape of the parameter."""
    is_stateless: bool = False
    """Whether the class keeps no state at all."""
    counts_steps: bool = False
    """Whether the entry `step` of the state is the number of steps and nothing else."""
    because: str = ""
    """Why the class is not element-wise; empty if it is."""


def group_key(group: Mapping[str, Any]) -> tuple[object, ...]:
    """Return a cache key: the hyperparameters that may change the set of statistics, with numbers as zero or not."""
    return tuple(
        (name, _value_key(value)) for name, value in sorted(group.items()) if name not in ("params", "param_names")
    )


def dry_step(
    cls: type[Optimizer], attributes: Mapping[str, Any], group: Mapping[str, Any], dtype: torch.dtype
) -> StateSchema:
    """Return the state schema of `cls` for parameters in `dtype` with the hyperparameters of `group`.

    Runs steps of small tensors on the host. The global random state, gradient mode and warnings are left as they were.
    """
    # This may be called during a capture.
    with (
        compat.real_tensors(),
        compat.outside_captures(),
        torch.random.fork_rng(devices=[]),
        torch.enable_grad(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        on_host = {
            name: value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
            for name, value in group.items()
            if name not in ("params", "param_names")
        }
        if on_host.get("capturable"):
            on_host["capturable"] = False
        failures: list[str] = []
        for make in (_Transient(cls, attributes, on_host), _Built(cls, on_host)):
            try:
                return _compare(make, dtype)
            except Exception as error:
                failures.append(f"{type(error).__name__}: {error}")
        return StateSchema(dtypes={}, because=f"a step of one tensor, or of a part of one, fails with {failures[0]}")


@dataclass(frozen=True, slots=True)
class _Transient:
    """Makes a transient optimizer, as updates do."""

    cls: type[Optimizer]
    attributes: Mapping[str, Any]
    group: Mapping[str, Any]

    def __call__(self, param: nn.Parameter) -> Optimizer:
        return transient_optimizer(self.cls, self.attributes, {**self.group, "params": [param]})


@dataclass(frozen=True, slots=True)
class _Built:
    """Makes an optimizer by its constructor, for classes such as Adagrad, which create state there."""

    cls: type[Optimizer]
    group: Mapping[str, Any]

    def __call__(self, param: nn.Parameter) -> Optimizer:
        known = inspect.signature(self.cls).parameters
        return self.cls([param], **{name: value for name, value in self.group.items() if name in known})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trained:
    """The weight and state of a tensor after the dry steps."""

    weight: torch.Tensor
    state: Mapping[str, Any]
    counted: str
    """Which attributes of the optimizer or its group later steps changed, as text; empty if none."""


def _compare(make: "_Transient | _Built", dtype: torch.dtype) -> StateSchema:
    whole = _train(make, *_samples(_SHAPE, dtype))
    statistics = {name: value for name, value in whole.state.items() if _shape(value) == _SHAPE}
    because = whole.counted or _difference(_SHAPE, whole, _train_parts(make, _SHAPE, dtype), statistics)
    for shape in () if because else _OTHER_SHAPES:
        try:
            other = _train(make, *_samples(shape, dtype))
        except Exception:  # no parameter of such a shape can be trained, in parts or not
            continue
        because = because or _difference(shape, other, _train_parts(make, shape, dtype), statistics)
    return StateSchema(
        dtypes={name: value.dtype for name, value in statistics.items()},
        is_stateless=not whole.state,
        counts_steps=_counts_steps(make, dtype),
        because=because,
    )


def _samples(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return a weight of `shape` and the gradients of its steps, those of the first part larger than the others."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(shape, generator=generator, device="cpu").to(dtype)
    grads = [(torch.randn(shape, generator=generator, device="cpu") * scale).to(dtype) for scale in _SCALES]
    for grad in grads:
        grad.view(-1)[: _sizes(grad.numel())[0]] *= 7
    return start, grads


def _sizes(numel: int) -> list[int]:
    """Return the sizes of the parts into which a tensor of `numel` elements is cut."""
    small = _SMALL_PART if numel > 2 * _SMALL_PART else numel // 2
    return [numel - small, small] if small else [numel]


def _train_parts(make: "_Transient | _Built", shape: tuple[int, ...], dtype: torch.dtype) -> "list[_Trained]":
    start, grads = _samples(shape, dtype)
    parts = zip(*(tensor.flatten().split(_sizes(start.numel())) for tensor in (start, *grads)), strict=True)
    return [_train(make, own, own_grads) for own, *own_grads in parts]


def _counts_steps(make: "_Transient | _Built", dtype: torch.dtype) -> bool:
    """Return whether a step adds 1 to `step`, a tensor of its own in the state, whatever its value is."""
    param = nn.Parameter(torch.ones(_SHAPE, dtype=dtype, device="cpu"))
    optimizer = make(param)
    for before in (0.0, 1.0, 7.0, 1e5):
        param.grad = torch.ones_like(param)
        if before > 1:
            optimizer.state[param]["step"].fill_(before)
        with torch.no_grad():
            plain_step(type(optimizer))(optimizer)
        step = optimizer.state[param].get("step")
        if not isinstance(step, torch.Tensor) or step.dim() or float(step) != before + 1:
            return False
    return True


def _train(make: "_Transient | _Built", start: torch.Tensor, grads: Sequence[torch.Tensor]) -> _Trained:
    param = nn.Parameter(start.clone())
    optimizer = make(param)
    facts: list[Mapping[str, Any]] = []
    for grad in grads:
        param.grad = grad.clone()
        with torch.no_grad():
            plain_step(type(optimizer))(optimizer)
        facts.append({**attributes_of(optimizer), **optimizer.param_groups[0]})
    changed = [name for name, value in facts[-1].items() if not _is_same(value, facts[0].get(name))]
    state = dict(optimizer.state[param]) if param in optimizer.state else {}
    counted = f"a step changes {', '.join(changed)} of the optimizer" if changed else ""
    return _Trained(weight=param.detach(), state=state, counted=counted)


def _difference(shape: tuple[int, ...], whole: _Trained, parts: Sequence[_Trained], statistics: Container[str]) -> str:
    """Return as text how the results for a tensor of `shape` and its flat parts differ; empty if they are equal."""
    who = f"the flat parts of a tensor of shape {shape}"
    if not _is_same(whole.weight.flatten(), torch.cat([part.weight for part in parts])):
        return f"{who} get other weights than the tensor"
    if any(part.state.keys() != whole.state.keys() for part in parts):
        return f"{who} keep another state than the tensor"
    for name, value in whole.state.items():
        expected, found = value, [part.state[name] for part in parts]
        if name in statistics:
            if any(
                _shape(own) != _shape(part.weight) for own, part in zip([value, *found], [whole, *parts], strict=True)
            ):
                return f"{who} keep {name} in another shape than their own"
            expected, found = value.flatten(), [torch.cat(found)]
        elif _shape(value):
            return f"it keeps {name} of shape {_shape(value)} for a tensor of shape {shape}"
        if not all(_is_same(expected, part) for part in found):
            return f"{who} keep another {name} than the tensor"
    return ""


def _is_same(first: object, second: object) -> bool:
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        if first is second or first.shape != second.shape or first.dtype != second.dtype:
            return first is second
        return bool(torch.equal(first.reshape(-1).view(torch.uint8), second.reshape(-1).view(torch.uint8)))
    return first is second or bool(first == second)


def _shape(value: object) -> tuple[int, ...]:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def _value_key(value: object) -> object:
    if isinstance(value, bool | str | type(None)):
        return value
    if isinstance(value, int | float):
        return (type(value).__name__, value != 0)
    if isinstance(value, list | tuple):
        return tuple(_value_key(each) for each in value)
    return type(value).__name__
