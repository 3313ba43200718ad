"""The public optimizers: `HybridAdamW`, and `hybrid(cls)` for any other optimizer class.

hybrid(torch.optim.SGD)   class HybridSGD, a subclass of SGD: its constructor, param groups, hooks, state dicts
"""

import functools
import inspect
from collections.abc import Iterable
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch.optim import Optimizer

from elixir_compile.base.errors import UnsupportedModel
from elixir_compile.graph.ops.registry import slot_of
from elixir_compile.optim.adamw_rule import AdamWRule, amsgrad_refused, may_be_narrow
from elixir_compile.optim.generic.class_rule import ClassRule
from elixir_compile.optim.hybrid import Hybrid
from elixir_compile.optim.precision import EXACT, MomentForm, StatePrecision, form_of, state_precision
from elixir_compile.optim.rule import UpdateRule
from elixir_compile.optim.state import decoded_entry

C = TypeVar("C", bound=Optimizer)


class HybridAdamW(Hybrid, torch.optim.AdamW):  # pyright: ignore[reportIncompatibleVariableOverride]  `state`
    """`torch.optim.AdamW` with its state on the device, on the host or on disk, as planned.

    Arguments, `param_groups`, hooks and `state_dict()` are the same as in `torch.optim.AdamW`; state dicts load in both
    directions. `foreach` and `fused` are accepted and change nothing: the update is fused, bitwise equal to
    `torch.optim.AdamW(fused=True)` on the same device. Parameters of models that Elixir did not compile are updated in
    place.

    If the plan updates across steps, `step()` returns before the host has finished. Reading a parameter, its gradient
    or `state` waits for the updates it depends on; `wait()` waits for all updates. An exception of an update is raised
    by the next call that waits for the update.

    `state_dtype` stores the moments in fewer bytes: `"bfloat16"`, or `"int8"` with a scale for each 128 values. The
    arithmetic stays in fp32; moments are rounded stochastically as they are stored, repeatable for the same
    `state_seed`. `master_dtype="bfloat16"` makes bf16 parameters their own masters, rounded stochastically. All of it
    changes the result: see docs/state-precision.md.

    Raises ValueError if one of these has another value, or if AMSGrad is to have narrower moments; UnsupportedModel if
    `state_dtype` is not `"float32"` and a parameter has neither fp32 values nor an fp32 master.

    Example:
        optimizer = elixir.HybridAdamW(model.parameters(), lr=3e-4)
        compiled(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    """

    updates_as = torch.optim.AdamW
    precision = EXACT
    """How the state is stored: from the arguments of the constructor."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: "float | torch.Tensor" = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        state_dtype: str = "float32",
        master_dtype: str = "float32",
        state_seed: int = 0,
    ) -> None:
        self.precision = state_precision(state_dtype, master_dtype, state_seed)
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, fused=True)

    def _new_rule(self) -> UpdateRule:
        return AdamWRule(self.precision)

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies and pickles of the optimizer hold."""
        return {**super().__getstate__(), "precision": self.precision}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.precision = state.get("precision", self.precision)
        super().__setstate__(state)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group as in `torch.optim.Optimizer`.

        Raises UnsupportedModel, and adds nothing, if a parameter of the group is complex or has no state of the asked
        precision; ValueError if the group has AMSGrad and this optimizer has narrower moments.
        """
        params = param_group["params"]
        if isinstance(params, torch.Tensor):
            params = [params]
        elif not isinstance(params, set):  # torch refuses sets, because their order is random
            params = param_group["params"] = list(params)  # as torch does; `params` may be a generator
        if not self.precision.is_exact and param_group.get("amsgrad", self.defaults["amsgrad"]):
            raise ValueError(amsgrad_refused(self.precision.moments.value))
        _refuse(params, self.precision)
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or of `torch.optim.AdamW`, and move the state to where the plan wants it.

        Narrower moments are converted to the form that this optimizer stores, rounded to the nearest. Raises
        ValueError, and loads nothing, if a param group has AMSGrad and this optimizer has narrower moments, or if the
        moments are in no form that this version has.
        """
        for entry in state_dict["state"].values():
            form_of(entry)
        if not self.precision.is_exact and any(group.get("amsgrad") for group in state_dict["param_groups"]):
            raise ValueError(amsgrad_refused(self.precision.moments.value))
        super().load_state_dict(state_dict)

    def state_dict(self, *, as_float32: bool = False) -> dict[str, Any]:
        """Return the state dict as in `torch.optim.AdamW`, after all queued updates; state on disk is read into memory.

        Moments are as they are stored. If `as_float32`, narrower ones are decoded, so that `torch.optim.AdamW` can load
        them. `load_state_dict` takes both.
        """
        found = super().state_dict()
        if not as_float32:
            return found
        params = [param for group in self.param_groups for param in group["params"]]
        return {**found, "state": {key: decoded_entry(entry, params[key]) for key, entry in found["state"].items()}}


def _refuse(params: Iterable[Any], precision: StatePrecision) -> None:
    """Raise UnsupportedModel if `params`, tensors or pairs of a name and a tensor, have one that cannot be updated."""
    for each in params:
        name, param = each if isinstance(each, tuple) else ("", each)
        if not isinstance(param, torch.Tensor):
            continue
        if param.is_complex():
            because = (
                f"it is {param.dtype}, and HybridAdamW updates by torch's fused AdamW, which has no complex kernel. "
                "Update it with a `torch.optim.AdamW` of its own, or all parameters with `hybrid(torch.optim.Adam)` "
                "and decoupled_weight_decay=True"
            )
        elif precision.is_exact:
            continue
        elif not may_be_narrow(param):
            because = (
                f"it is {param.dtype} without an fp32 master, so its moments are not in fp32 but in its own dtype. Use "
                "state_dtype='float32', or `elixir_compile.prepare(model, param_dtype='bfloat16')` for masters"
            )
        elif precision.masters is torch.bfloat16 and param.dtype == torch.float16:
            because = "it is torch.float16, and master_dtype='bfloat16' is for bf16 parameters. Leave it out"
        else:
            continue
        slot = slot_of(param)
        where = name or (slot.name if slot is not None else f"a parameter of shape {tuple(param.shape)}")
        raise UnsupportedModel(where, because)


class _HybridOfClass(Hybrid):
    """The first base of every class that `hybrid` makes."""

    precision: ClassVar[StatePrecision]

    def _new_rule(self) -> UpdateRule:
        return ClassRule(self.updates_as, self, self.precision)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # pickle cannot import a class that `hybrid` makes; it can import a user's subclass of such a class.
        if type(self) is _hybrid_of(self.updates_as, self.precision):
            return _restored, (self.updates_as, self.precision), self.__getstate__()
        return super().__reduce_ex__(protocol)


def _restored(cls: type[Optimizer], precision: StatePrecision) -> Optimizer:
    made = _hybrid_of(cls, precision)
    return made.__new__(made)


def hybrid(cls: type[C], state_dtype: str = "float32", *, state_seed: int = 0) -> type[C]:
    """Return a subclass of the optimizer class `cls` that keeps its state and runs its updates as the plan says.

    An update runs the step of `cls` on the tensors of a bucket, so the result is bitwise equal to `cls` with the same
    flags on the same device. On the host, the step runs as a host pass if its ops can be recorded: see `ClassPasses`.
    Dry steps on small tensors measure which state `cls` keeps, and whether an update reads elements, whole tensors, as
    that of Muon, or other parameters, as that of LBFGS. In the last case the step of `cls` runs for all parameters, its
    state stays beside the parameters, and an ElixirWarning says so. `hybrid(torch.optim.AdamW)` is `HybridAdamW`.

    Of a 16-bit parameter with an fp32 master, `cls` sees the master and the gradient in fp32. So the result is bitwise
    that of `cls` on fp32 parameters with these gradients, and the parameter is the value nearest to its master. A `cls`
    that updates all parameters at once raises MasterIgnored in its step.

    With `state_dtype="bfloat16"`, statistics that `cls` keeps in fp32 are stored in bf16, rounded stochastically; `cls`
    computes in fp32. `int8` stores a signed first moment and the root of a second one, which only `HybridAdamW` is
    known to have.

    Raises TypeError if `cls` is not a subclass of `torch.optim.Optimizer`, ValueError for another `state_dtype`.

    Example:
        optimizer = elixir.hybrid(torch.optim.SGD)(model.parameters(), lr=0.1, momentum=0.9)
        assert isinstance(optimizer, torch.optim.SGD)
        compiled(batch).backward()
        optimizer.step()
    """
    if not (inspect.isclass(cls) and issubclass(cls, Optimizer)) or cls is Optimizer:
        raise TypeError(f"hybrid needs a subclass of torch.optim.Optimizer, such as torch.optim.SGD, not {cls!r}")
    precision = state_precision(state_dtype, "float32", state_seed)
    if not precision.is_exact and (issubclass(cls, Hybrid) or cls is torch.optim.AdamW):
        raise ValueError(f"hybrid({cls.__name__}, {state_dtype!r}): use HybridAdamW(..., state_dtype={state_dtype!r})")
    if precision.moments not in (MomentForm.FLOAT32, MomentForm.BFLOAT16):
        raise ValueError(
            f"hybrid({cls.__name__}, {state_dtype!r}): expected 'float32' or 'bfloat16'. {state_dtype} stores a signed "
            f"first moment and the root of a second one, which {cls.__name__} may not have; HybridAdamW has them"
        )
    if issubclass(cls, Hybrid):
        return cls
    if cls is torch.optim.AdamW:
        return cast("type[C]", HybridAdamW)
    return _hybrid_of(cls, precision)


@functools.cache
def _hybrid_of(cls: type[C], precision: StatePrecision) -> type[C]:
    """Return the one hybrid subclass of `cls` with `precision`."""
    doc = f"`{cls.__module__}.{cls.__qualname__}` with its state on the device, on the host or on disk, as planned."
    attributes = {
        "updates_as": cls,
        "precision": precision,
        "__doc__": doc,
        "__module__": cls.__module__,
        "__signature__": inspect.signature(cls),
    }
    return cast("type[C]", type(f"Hybrid{cls.__name__}", (_HybridOfClass, cls), attributes))
