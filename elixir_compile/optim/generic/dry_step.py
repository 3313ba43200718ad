"""Run the step of an optimizer class on chosen tensors, and find out by such steps which state the class keeps, and how
much of the parameters the update of one of them reads: its elements one by one, the whole tensor, or other parameters.
"""

import copy
import inspect
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from elixir_compile import compat
from elixir_compile.base.errors import OptimizerNotTensorWise
from elixir_compile.graph.ops.optimizers import updated_dtype
from elixir_compile.optim.generic.owners import Owners
from elixir_compile.optim.rule import GRAD_SCALE, ParamUpdate, State, StatesInPlace, forms_of

# ----------------------------------------------------------------------------------------------------------------------
# Run the step of an optimizer class on chosen tensors, for an update.
#
# A transient optimizer is an instance of the user's class that holds the tensors of a bucket during a single update.


_NOT_COPIED = frozenset(
    {"state", "param_groups", "step", "_updater", "_early", "_overflow", "_clip_factor", "_clipped", "grad_scale"}
    | {"_is_accumulating", "_has_stepped", "_has_warned", "_is_checked", "_counts", "found_inf"}
)
"""Attributes not to copy: params, state, a `step` that a scheduler wrapped, and what `Hybrid` and GradScaler set."""


def attributes_of(optimizer: Optimizer) -> Mapping[str, Any]:
    """Return the attributes of `optimizer` for its class's step to read."""
    return {name: value for name, value in vars(optimizer).items() if name not in _NOT_COPIED}


def transient_optimizer(cls: type[Optimizer], attributes: Mapping[str, Any], group: dict[str, Any]) -> Optimizer:
    """Return an instance of `cls` with `attributes` whose only param group is `group`, without hooks or state."""
    optimizer = cls.__new__(cls)
    hooks = {name: OrderedDict() for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")}
    vars(optimizer).update(attributes, **hooks, param_groups=[group], state=defaultdict(dict))
    return optimizer


def constructed(cls: type[Optimizer], group: Mapping[str, Any], params: Sequence[nn.Parameter]) -> Optimizer:
    """Return a new instance of `cls` for `params`, with those hyperparameters of `group` that its constructor takes."""
    known = inspect.signature(cls).parameters
    return cls(list(params), **{name: value for name, value in group.items() if name in known})


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

    def take(self, updates: Sequence[ParamUpdate]) -> Mapping[str, Any]:
        """Update weights in place, entries of states in place or by new values; return the group that the step left."""
        params = [nn.Parameter(one.weight) for one in updates]
        optimizer = self.transient(params, updates[0].weight)
        optimizer.state = StatesInPlace({id(param): one.places for param, one in zip(params, updates, strict=True)})
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
        return optimizer.param_groups[0]

    def take_dry(self, one: ParamUpdate) -> tuple[torch.Tensor, State]:
        """Run the step on meta tensors as if they were on the host; return the weight and the state after the step."""
        param = nn.Parameter(one.weight)
        optimizer = self.transient([param], torch.empty(0, device="cpu"))
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

    def transient(self, params: Sequence[nn.Parameter], beside: torch.Tensor) -> Optimizer:
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
# of in the state of a parameter, also counts as not element-wise.


_SHAPE = (16, 8)
_OTHER_SHAPES = ((), (128,), (8, 4, 4), (4, 4, 4, 2), (4, 4, 2, 2, 2), (127, 256))
"""Cut, as (16, 8), at multiples of 64 elements: kernels may round the rest of a vector in another way. The last is
large, but has fewer than the 32,768 elements from which torch divides an op among threads, wherever a vector ends."""
_SMALL_PART = 256
"""Elements of the second part of the large tensor, so that a class with other arithmetic for large tensors shows it."""
_SCALES = (1e-2, 1.0, 1e2)
"""Factor of the gradients in each step: large enough that code behind a threshold also runs."""


class UpdateKind(StrEnum):
    """What the update of an element of a parameter reads."""

    ELEMENT = "element"
    """The element's own values: AdamW, SGD, Lion."""
    TENSOR = "tensor"
    """Values of its parameter: Muon, Adafactor, LAMB."""
    GLOBAL = "global"
    """Values of other parameters, or what happens in their updates: LBFGS, LAMB with a global norm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSchema:
    """The state of an optimizer class for a parameter."""

    dtypes: Mapping[str, torch.dtype]
    """The dtype of each statistic by name; statistics have the shape of the parameter."""
    is_stateless: bool = False
    """Whether the class keeps no state at all."""
    counts_steps: bool = False
    """Whether the entry `step` of the state is the number of steps and nothing else."""
    kind: UpdateKind = UpdateKind.ELEMENT
    because: str = ""
    """Why the class is not element-wise, empty if it is. If its kind is `GLOBAL`, what makes it so: the op that joins
    two parameters, or the attribute that steps change."""
    per_param: tuple[str, ...] = ()
    """The hyperparameters of its group that are lists with an entry for each parameter, `param_names` among them; empty
    if the class is element-wise. `cut` takes the entries of some parameters."""


NO_HYPERPARAMETERS = frozenset({"params", "param_names", GRAD_SCALE})
"""The entries of a param group that are no hyperparameters of the class."""


@contextmanager
def beside_captures() -> Iterator[None]:
    """Return a context for steps that train nothing: during a capture too, its tensors are real, no op of it is
    captured, and nothing is compiled."""
    with compat.real_tensors(), compat.outside_captures(), compat.nothing_compiles():
        yield


@contextmanager
def without_traces() -> Iterator[None]:
    """Return `beside_captures` that leaves the global random state, gradient mode and warnings as they were."""
    with beside_captures(), torch.random.fork_rng(devices=[]), torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def dry_step(
    cls: type[Optimizer], attributes: Mapping[str, Any], group: Mapping[str, Any], dtype: torch.dtype
) -> StateSchema:
    """Return the state schema of `cls` for parameters in `dtype` with the hyperparameters of `group`.

    Runs steps of small tensors on the host. The global random state, gradient mode and warnings are left as they were.
    """
    with without_traces():
        on_host = _on_host({name: group[name] for name in group.keys() - NO_HYPERPARAMETERS})
        own = copied(attributes)
        makers = [_Maker(cls, own, on_host), _Maker(cls, own, on_host, by_constructor=True)]
        failures: list[str] = []
        for make in makers:
            try:
                schema = _compare(make, dtype)
                break
            except Exception as error:
                failures.append(f"{type(error).__name__}: {error}")
        else:
            because = f"a step of one tensor, or of a part of one, fails with {failures[0]}"
            schema = StateSchema(dtypes={}, because=because)
        return _with_kind(schema, makers, group, dtype)


def _on_host(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return `group` for steps on the host: with copies of its tensors there, and not `capturable`."""
    found = {
        name: value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
        for name, value in group.items()
    }
    return found | ({"capturable": False} if found.get("capturable") else {})


def _with_kind(
    schema: StateSchema, makers: "Sequence[_Maker]", group: Mapping[str, Any], dtype: torch.dtype
) -> StateSchema:
    """Return `schema` of a class with its kind.

    Lists of `group` that are as long as `params` have an entry for each parameter if the class treats each tensor alone
    with the entries of its own, and does not with all of them.
    """
    params = group.get("params", ())
    lists = {
        name: value
        for name, value in group.items()
        if name != "params" and isinstance(value, list) and len(value) == len(params)
    }
    if not schema.because and not lists.keys() - {"param_names"}:
        return schema
    dims = {param.dim() for param in params}
    joined = _why_global(makers, dtype, dims)
    if joined and lists and not _why_global([replace(make, lists=lists) for make in makers], dtype, dims):
        because = schema.because or f"its param group has {', '.join(lists)} by parameter"
        return replace(schema, kind=UpdateKind.TENSOR, because=because, per_param=tuple(lists))
    if not schema.because:
        return schema
    return replace(schema, kind=UpdateKind.GLOBAL if joined else UpdateKind.TENSOR, because=joined or schema.because)


def cut(group: Mapping[str, Any], names: Iterable[str], places: Sequence[int]) -> dict[str, Any]:
    """Return `group` with the entries at `places` of each list in `names`, for the parameters at these places."""
    return {**group, **{name: [group[name][place % len(group[name])] for place in places] for name in names}}


@dataclass(frozen=True, slots=True)
class _Maker:
    """Makes optimizers of a class for the tensors of dry steps."""

    cls: type[Optimizer]
    attributes: Mapping[str, Any]
    group: Mapping[str, Any]
    by_constructor: bool = False
    """Whether the constructor makes them, for classes such as Adagrad, which create state there; else the optimizers
    are transient, as those of updates are."""
    lists: Mapping[str, list[Any]] = field(default_factory=dict)
    """The hyperparameters with an entry for each parameter of the user; tensor number i gets entry number i."""

    def __call__(self, params: Sequence[nn.Parameter], places: Sequence[int] = (0,)) -> Optimizer:
        group = cut({**self.group, **self.lists}, self.lists, places)
        if self.by_constructor:
            return constructed(self.cls, group, params)
        return transient_optimizer(self.cls, self.attributes, {**group, "params": list(params)})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trained:
    """The weight and state of a tensor after the dry steps."""

    weight: torch.Tensor
    state: Mapping[str, Any]
    counted: str
    """Which attributes of the optimizer or its group later steps changed, as text; empty if none that may not."""
    counts: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """By name, the numbers of the group that later steps changed, after each step."""


_Sample = tuple[torch.Tensor, list[torch.Tensor]]
"""A weight, and its gradients by step."""


def _compare(make: _Maker, dtype: torch.dtype) -> StateSchema:
    whole = _train(make, *_samples(_SHAPE, dtype))
    statistics = {name: value for name, value in whole.state.items() if _shape(value) == _SHAPE}
    because = whole.counted or _difference(_SHAPE, whole, _train_parts(make, _SHAPE, dtype), statistics)
    because = because or _kept_elsewhere(make, [_samples(_SHAPE, dtype)] * 2, [whole])
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


def _samples(shape: tuple[int, ...], dtype: torch.dtype) -> _Sample:
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


def _train_parts(make: _Maker, shape: tuple[int, ...], dtype: torch.dtype) -> "list[_Trained]":
    start, grads = _samples(shape, dtype)
    parts = zip(*(tensor.flatten().split(_sizes(start.numel())) for tensor in (start, *grads)), strict=True)
    return [_train(make, own, own_grads) for own, *own_grads in parts]


def _counts_steps(make: _Maker, dtype: torch.dtype) -> bool:
    """Return whether a step adds 1 to `step`, a tensor of its own in the state, whatever its value is."""
    param = nn.Parameter(torch.ones(_SHAPE, dtype=dtype, device="cpu"))
    optimizer = make([param])
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


def _train(make: _Maker, start: torch.Tensor, grads: Sequence[torch.Tensor]) -> _Trained:
    param = nn.Parameter(start.clone())
    optimizer = make([param])
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


def _kept_elsewhere(make: _Maker, samples: Sequence[_Sample], expected: Sequence[_Trained]) -> str:
    """Return whether tensors are updated otherwise if the class sees of the steps before nothing but their state, as in
    updates, which hand it other parameter objects each time; empty if they become what is `expected` of the first."""
    params = [nn.Parameter(start.clone()) for start, _ in samples]
    optimizer = replace(make, attributes=copied(make.attributes))(params, range(len(params)))
    group = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    step = ClassStep(cls=type(optimizer), attributes=attributes_of(optimizer), group=group)
    states = [dict(optimizer.state.get(param, {})) for param in params]
    try:
        with torch.no_grad():
            for number in range(len(samples[0][1])):
                left: Mapping[str, Any] = {}
                for place, (param, (_, grads), state) in enumerate(zip(params, samples, states, strict=True)):
                    one = ParamUpdate(param.detach(), grads[number].clone(), state)
                    left = replace(step, group=cut(group, make.lists, [place])).take([one])
                group |= {name: left[name] for name in expected[0].counts}
    except Exception as error:
        return f"a step of a parameter by its state alone fails with {text_of(error)}"
    for param, state, known in zip(params, states, expected, strict=False):
        if not (_is_same(param.detach(), known.weight) and _are_same(state, known.state)):
            return "the optimizer keeps more of a parameter from step to step than its state, such as in an attribute"
    return ""


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


# ----------------------------------------------------------------------------------------------------------------------
# Find out whether a class that is not element-wise treats each tensor alone: a dozen steps of small tensors.
#
#     alone = together       a tensor alone, among others and in another order gets the same bits
#     owners                 no op joins values of two parameters, whatever comes out: see `owners`
#     bent values            another gradient of one parameter changes no other one, nor does another number that the
#                            step reads of it on the host, where values go through Python
#     counts                 the numbers of the group that steps change are the same whichever tensors take the step
#
# All are fooled by code that runs rarely, or for large tensors only: see `Watch` and `tensor_step.joined_at_shapes`.


_NUM_STEPS, _NUM_BENT_STEPS = 12, 6
_NUM_MAGNITUDES = 3
"""Of gradients, in steps that follow each other."""
_SHAPES: Mapping[int, tuple[tuple[int, ...], ...]] = {
    2: ((24, 16), (16, 24), (24, 16), (8, 8)),
    1: ((16,), (6,)),
    0: ((), ()),
    3: ((4, 3, 2), (2, 3, 4)),
    4: ((4, 3, 2, 2), (3, 4, 1, 1)),
}
"""By number of dimensions; two matrices are alike, because classes keep scratch and batches by shape."""
_NUM_BENT = 4
_MOST_OPS = 6000
"""The most ops of a tensor in a run. A class with more takes fewer steps, but one for each of `_READ_FACTORS`, which
then share a run: the steps of a solver with a hundred iterations would take minutes. Muon has 23 ops in a step."""
_MOST_COPIED = 1 << 16
"""Elements of the largest tensor among the attributes of an optimizer that dry steps copy."""
_GRADIENT_FACTORS = (1e-9, 1e9)
_READ_FACTORS = (1e-9, 2.0, 1e9, -1e9)
"""As many as gradients have magnitudes, or more."""


def _why_global(makers: Sequence[_Maker], dtype: torch.dtype, dims: set[int]) -> str:
    """Return what in the steps of a class is not of one tensor alone; empty if nothing is.

    `dims` are the numbers of dimensions of the user's parameters, which the class must be seen to train.
    """
    failures: dict[int, str] = {}
    for make in makers:
        trials = _Trials(
            make, dtype, [shape for dim in (*_SHAPES, *dims - _SHAPES.keys()) for shape in _shapes_of(dim)]
        )
        alone = trials.alone(failures)
        if len(alone) < 2 or not {len(trials.shapes[place]) for place in alone} >= dims:
            continue
        why = trials.why_joined(alone)
        if not why and make.group.get("foreach", False) is None:  # what torch chooses depends on the device
            by_lists = _Trials(replace(make, group={**make.group, "foreach": True}), dtype, trials.shapes)
            alone = by_lists.alone({})
            return by_lists.why_joined(alone) if len(alone) > 1 else ""
        return why
    return next((failures[dim] for dim in dims if dim in failures), "") or next(iter(failures.values()))


def _shapes_of(dim: int) -> tuple[tuple[int, ...], ...]:
    return _SHAPES.get(dim, ((2,) * dim, (3,) + (2,) * (dim - 1)))


def text_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


class _Trials:
    """Runs of a dozen steps of tensors of `shapes`, each with the same start and the same gradients in every run."""

    def __init__(self, make: _Maker, dtype: torch.dtype, shapes: Sequence[tuple[int, ...]]) -> None:
        self._make, self.shapes, self._num_steps = make, shapes, _NUM_STEPS
        self._samples = [_small(place, shape, dtype, _NUM_STEPS) for place, shape in enumerate(shapes)]

    def run(
        self,
        places: Sequence[int],
        owners: Owners | None = None,
        factors: Mapping[int, float] | None = None,
        num_steps: int = 0,
    ) -> list[_Trained]:
        """Train the tensors at `places`, in this order, for all steps or `num_steps`; return what became of each.

        Gradients are multiplied by the factors in `factors`. If there are `owners`, they follow each op.
        """
        params = [nn.Parameter(self._samples[place][0].clone()) for place in places]
        optimizer = replace(self._make, attributes=copied(self._make.attributes))(params, places)
        facts: list[Mapping[str, Any]] = []
        for number in range(num_steps or self._num_steps):
            for param, place in zip(params, places, strict=True):
                factor = (factors or {}).get(place, 1.0)
                param.grad = self._samples[place][1][number] * factor
                if owners is not None:
                    owners.own([param, param.grad, optimizer.state.get(param)], place)
            _take_small(optimizer, owners)
            group = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
            known = {**attributes_of(optimizer), **group}
            facts.append({name: _plain_values(value, owners) for name, value in known.items()})
        last = facts[-1]
        changed = [name for name in last if any(not _are_same(last[name], each.get(name)) for each in facts)]
        own = optimizer.param_groups[0]
        counts = {name: [each.get(name) for each in facts] for name in changed if type(own.get(name)) in (int, float)}
        changed = [name for name in changed if name not in counts]
        return [
            _Trained(
                weight=param.detach(),
                state=dict(optimizer.state.get(param, {})),
                counted=f"a step changes {', '.join(changed)} of the optimizer" if changed else "",
                counts=counts,
            )
            for param in params
        ]

    def alone(self, failures: dict[int, str]) -> dict[int, _Trained]:
        """Return what becomes of each tensor that the class trains, alone; say by number of dimensions in `failures`
        why the class does not train other tensors. The ops of two steps of the first say how many steps runs have."""
        found: dict[int, _Trained] = {}
        for place, shape in enumerate(self.shapes):
            try:
                if not found:
                    ops: list[Any] = []
                    with compat.ops_seen_by(lambda op, args, kwargs, ops=ops: (ops.append(op), op(*args, **kwargs))[1]):
                        self.run([place], num_steps=2)
                    self._num_steps = min(_NUM_STEPS, max(len(_READ_FACTORS), 2 * _MOST_OPS // max(1, len(ops))))
                (found[place],) = self.run([place])
            except Exception as error:
                failures.setdefault(len(shape), f"a step of a tensor of shape {shape} fails with {text_of(error)}")
        return found

    def why_joined(self, alone: Mapping[int, _Trained]) -> str:
        """Return by which op or number parameters reach each other; `alone` is what becomes of each on its own."""
        if counted := next((one.counted for one in alone.values() if one.counted), ""):
            return counted
        places, owners = list(alone), Owners()
        for order, own in ((places, owners), (places[::-1], None)):
            found, failure = [], ""
            try:
                found = self.run(order, own)
            except Exception as error:
                failure = f"a step of {len(order)} tensors fails with {text_of(error)}"
            why = owners.refused or failure or next((one.counted for one in found if one.counted), "")
            if why:
                return why
            for place, trained in zip(order, found, strict=True):
                if not _is_same_result(trained, alone[place]):
                    return f"a tensor of shape {self.shapes[place]} is updated otherwise beside others than alone"
        places = places[:_NUM_BENT]
        num_steps = min(self._num_steps, _NUM_BENT_STEPS)
        read_factors = (_READ_FACTORS,) if self._num_steps < _NUM_STEPS else [(factor,) for factor in _READ_FACTORS]
        try:
            usual = self.run(places, num_steps=num_steps)
        except Exception as error:  # of a class that looks things up by ids, which a tensor that is gone had before
            return f"a step of {len(places)} tensors fails with {text_of(error)}"
        for bent in (places[::3], places[1:3]):  # neighbours and tensors of one shape are apart
            for factor in _GRADIENT_FACTORS:
                if self._reaches(places, bent, usual, factors=dict.fromkeys(bent, factor)):
                    return "the gradient of a parameter changes another one"
            for factors in read_factors if owners.readers.intersection(bent) else ():
                if self._reaches(places, bent, usual, owners=Owners(bent, factors)):
                    return "a number that the step reads of a parameter changes another one"
        samples = [(start, grads[:num_steps]) for start, grads in (self._samples[place] for place in places)]
        return _kept_elsewhere(self._make, samples, usual)

    def _reaches(self, places: Sequence[int], bent: Sequence[int], usual: Sequence[_Trained], **changed: Any) -> bool:
        try:
            found = self.run(places, num_steps=min(self._num_steps, _NUM_BENT_STEPS), **changed)
        except Exception:  # such a value may have no root or no inverse
            return False
        rows = zip(places, found, usual, strict=True)
        return any(place not in bent and not _is_same_result(one, other) for place, one, other in rows)


def _small(place: int, shape: tuple[int, ...], dtype: torch.dtype, count: int) -> _Sample:
    """Return the start of small tensor number `place`, and `count` gradients of several magnitudes."""
    generator = torch.Generator().manual_seed(place)
    values = [torch.randn(shape, generator=generator, device="cpu") for _ in range(1 + count)]
    grads = [value * 10.0 ** (number % _NUM_MAGNITUDES - 1) * (1 + place) for number, value in enumerate(values[1:])]
    return values[0].to(dtype), [grad.to(dtype) for grad in grads]


def _take_small(optimizer: Optimizer, owners: Owners | None) -> None:
    """Take a step of small tensors; `owners` follow its ops, and forget those of tensors that it let go of."""
    step = plain_step(type(optimizer))
    with torch.no_grad():
        if owners is None:
            step(optimizer)
            return
        with compat.ops_seen_by(owners.see):
            step(optimizer)
    owners.forget()


def _copied_if_small(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone() if tensor.numel() <= _MOST_COPIED else tensor


def copied(value: Any, tensor: Callable[[torch.Tensor], torch.Tensor] = _copied_if_small) -> Any:
    """Return a copy of the random generators, dictionaries, lists and tensors in `value`; other objects as they are,
    among them the parameters of the user. `tensor` makes the copy of a tensor."""
    if isinstance(value, torch.Tensor):
        return value if isinstance(value, nn.Parameter) else tensor(value)
    if isinstance(value, torch.Generator):
        return value.clone_state()
    if isinstance(value, dict):
        own = copy.copy(value)  # a `defaultdict` keeps its factory
        own.update({key: copied(each, tensor) for key, each in value.items()})
        return own
    return type(value)(copied(each, tensor) for each in value) if type(value) in (list, tuple, set) else value


def _plain_values(value: Any, owners: Owners | None) -> Any:
    """Return the plain values in nested `value`, and if `owners` are known, the tensors that belong to no parameter."""
    if isinstance(value, torch.Tensor):
        is_unowned = owners is not None and value.numel() <= _MOST_COPIED and not owners.of(value)
        return value.detach().clone() if is_unowned else None
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, list | tuple | set):
        return tuple(_plain_values(each, owners) for each in value)
    return value if isinstance(value, bool | int | float | complex | str) else None


def _are_same(first: Any, second: Any) -> bool:
    """Return whether two nested values have the same tensors, bit by bit, and equal numbers."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(_are_same(value, second[name]) for name, value in first.items())
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(_are_same, first, second))
    is_value = isinstance(first, torch.Tensor | bool | int | float | complex | str)
    return _is_same(first, second) if is_value else type(first) is type(second)


def _is_same_result(first: _Trained, second: _Trained) -> bool:
    return all(_are_same(getattr(first, name), getattr(second, name)) for name in ("weight", "state", "counts"))


# ----------------------------------------------------------------------------------------------------------------------
# Watch training for steps that join two parameters after all, before they do.


class Watch:
    """Small tensors that take each step of training before the parameters of a group do, followed by `Owners`.

    A watch belongs to one param group of a class whose kind is `TENSOR`. It has the present hyperparameters of the
    group and numbers of the optimizer, and the counters in the states of parameters, so it branches as their step will.
    Make a new one when a state dict is loaded.
    """

    def __init__(self, schema: StateSchema) -> None:
        self._per_param = schema.per_param
        self._optimizer: Optimizer | None = None
        self._samples: list[_Sample] = []
        self._num_steps = 0
        self.owners = Owners()

    def check(
        self, step: ClassStep, params: Sequence[torch.Tensor], states: Mapping[Any, Mapping[str, Any]], number: int
    ) -> None:
        """Take step number `number` of training, which will take `step` of all `params` of a group, with small tensors.

        Reads dimensions and dtypes of `params`, and in `states`, by parameter, counters on the host; never waits for a
        device. Raises OptimizerNotTensorWise if the step joins two parameters, or fails for small tensors.
        """
        does = ""
        for _ in range(2):
            optimizer = self._optimizer or self._begin(step, params)
            try:
                known = (states.get(params[place % len(params)], {}) for place in range(len(self._samples)))
                self._take(optimizer, step, [*map(forms_of, known)])
                break
            except Exception as error:
                if self.owners.refused:
                    break
                # Sums over many steps may have no inverse any more, for example: once more from the start.
                self._optimizer = None
                does = f"its step fails for small tensors with {text_of(error)}"
        else:
            raise OptimizerNotTensorWise(number, does, step.cls.__name__)
        if self.owners.refused:
            raise OptimizerNotTensorWise(number, self.owners.refused, step.cls.__name__)

    def counts(self, group: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the numbers of `group` that the step, which was checked last, will change."""
        own = {} if self._optimizer is None else self._optimizer.param_groups[0]
        return {name: value for name, value in own.items() if type(value) in (int, float) and value != group.get(name)}

    def _begin(self, step: ClassStep, params: Sequence[torch.Tensor]) -> Optimizer:
        """Make four small tensors, of the dimensions and dtypes of `params` in turn, or three if all have the same."""
        kinds = list(dict.fromkeys((param.dim(), updated_dtype(param)) for param in params))
        self._samples = []
        for place in range(_NUM_BENT if len(kinds) > 1 else _NUM_BENT - 1):
            dim, dtype = kinds[place % len(kinds)]
            shapes = _shapes_of(dim)
            shape = shapes[place // len(kinds) % len(shapes)]
            self._samples.append(_small(place, shape, dtype, count=_NUM_MAGNITUDES))
        small = [nn.Parameter(start.clone()) for start, _ in self._samples]
        group = cut(_on_host(step.group), self._per_param, range(len(small)))
        group = {**with_foreach(group, params[0]), "params": small}
        self.owners = Owners()
        self._optimizer = transient_optimizer(step.cls, copied(step.attributes), group)
        return self._optimizer

    def _take(self, optimizer: Optimizer, step: ClassStep, known: Sequence[Mapping[str, Any]]) -> None:
        group = optimizer.param_groups[0]
        kept = (*self._per_param, "foreach", "capturable")
        group.update({name: value for name, value in step.group.items() if _is_plain(value) and name not in kept})
        vars(optimizer).update({name: value for name, value in step.attributes.items() if _is_plain(value)})
        params = group["params"]
        with beside_captures():
            is_younger = any(known) and not optimizer.state  # training was resumed, or the constructor made the state
            if is_younger:
                self._step(optimizer, params)
                group.update({name: value for name, value in step.group.items() if type(value) in (int, float)})
            for param, state in zip(params, known, strict=True):
                own = optimizer.state.get(param, {})
                for name, value in list(state.items()):  # a copy: a queued update may add entries
                    if _is_counter(value) and _is_counter(own.get(name)) and (is_younger or value > own[name]):
                        own[name] = own[name].fill_(value) if isinstance(own[name], torch.Tensor) else value
            self._step(optimizer, params)

    def _step(self, optimizer: Optimizer, params: Sequence[nn.Parameter]) -> None:
        self._num_steps = (self._num_steps + 1) % _NUM_MAGNITUDES
        for place, (param, (start, grads)) in enumerate(zip(params, self._samples, strict=True)):
            param.data.copy_(start)  # so that they never diverge
            param.grad = grads[self._num_steps].clone()
            self.owners.own([param, param.grad, optimizer.state.get(param)], place)
        _take_small(optimizer, self.owners)


def _is_plain(value: Any) -> bool:
    """Return whether `value` is a number, text or None, or a list or tuple of such."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, bool | int | float | str | type(None))


def _is_counter(value: Any) -> bool:
    """Return whether `value` may be one: a number, or a tensor of one on the host."""
    if isinstance(value, torch.Tensor):
        return not value.dim() and value.device.type == "cpu"
    return isinstance(value, int | float)


def with_foreach(group: Mapping[str, Any], like: torch.Tensor) -> Mapping[str, Any]:
    """Return `group` with the `foreach` that torch chooses for parameters on the device of `like`, if nobody chose."""
    is_open = group.get("foreach", False) is None and not (group.get("fused") or group.get("differentiable"))
    return {**group, "foreach": compat.uses_foreach(like.device)} if is_open else group
