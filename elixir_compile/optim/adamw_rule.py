"""The rule of AdamW, whatever the precision of its state.

    exact, without a master    torch's fused AdamW, bitwise equal to `torch.optim.AdamW(fused=True)`
    other state, on the host   one pass over host memory: decode, the same arithmetic in fp32, encode (`host.passes`,
                               in C `host/kernel.c`)
    other state, on a device   the same in torch's ops, for many parameters at once in scratch tensors of bounded size

These three define the bits of an update. An update in pieces has the bits of the whole (`streaming`).

A 16-bit parameter holds a part of its fp32 master; state holds the rest: see `masters`. On a device fused AdamW runs on
batches of masters; exact moments are read and written in place, others are decoded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.adamw import adamw

from elixir_compile.graph.ops.optimizers import REST_NAMES, has_master, updated_dtype
from elixir_compile.graph.ops.shards import own_shard
from elixir_compile.ir.bucket import STATE_DTYPES, Param
from elixir_compile.optim.host import HostThreads, bf16_adamw, host_threads_for, mixed_adamw, split_adamw
from elixir_compile.optim.host.passes import Extras, coalesce, kernel
from elixir_compile.optim.masters import (
    BLOCK,
    NOISY_BLOCK,
    Batch,
    Wide,
    batches,
    grad_scale,
    rest_layouts,
    rest_name_of,
)
from elixir_compile.optim.precision import (
    EXACT,
    MomentForm,
    Moments,
    StatePrecision,
    decode,
    form_of,
    layouts_of,
    noise_key,
    rounded_weights,
    store,
    with_form,
)
from elixir_compile.optim.rule import (
    ParamUpdate,
    State,
    StatisticLayout,
    UpdateRule,
    flat_order,
    in_order_of,
    note_num_steps,
    num_steps,
    state_nbytes,
)
from elixir_compile.optim.state import planned_spec
from elixir_compile.runtime.bucket import flat


class AdamWRule(UpdateRule):
    """The rule of AdamW whose state has the precision `precision`; if that is exact, a plan may choose another."""

    def __init__(self, precision: StatePrecision = EXACT) -> None:
        self.precision = precision
        self._threads: HostThreads | None = None

    def statistics(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of the exact moments, each shaped like its parameter."""
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group["amsgrad"] else ("exp_avg", "exp_avg_sq")

    def form(self, param: torch.Tensor, group: Mapping[str, Any]) -> MomentForm:
        """Return the form of the moments of `param`."""
        if not may_be_narrow(param):
            return MomentForm.FLOAT32
        if not self.precision.is_exact:
            return self.precision.moments
        if group["amsgrad"]:  # the plan may be older than the optimizer
            return MomentForm.FLOAT32
        spec = planned_spec(param)
        return MomentForm.FLOAT32 if spec is None or spec.state_dtype is None else MomentForm(spec.state_dtype)

    def state_layouts(self, param: torch.Tensor, group: Mapping[str, Any]) -> Mapping[str, StatisticLayout]:
        """Return the layout of each moment of `param`, and of the rest of its master if `param` has an exact one."""
        return self._layouts(param, group, self.form(param, group))

    def _layouts(
        self, param: torch.Tensor, group: Mapping[str, Any], form: MomentForm
    ) -> Mapping[str, StatisticLayout]:
        found: Mapping[str, StatisticLayout] = layouts_of(form)
        if form is MomentForm.FLOAT32:  # or in the dtype of a parameter without a master
            found = dict.fromkeys(self.statistics(group), StatisticLayout(updated_dtype(param)))
        return found if self.precision.masters is torch.bfloat16 else {**found, **rest_layouts(param)}

    def param_state(self, param: torch.Tensor, group: Mapping[str, Any]) -> Param:
        """Return the bytes of the state of `param`, and those with the narrower moments that a plan may choose."""
        form = self.form(param, group)
        may_choose = self.precision.is_exact and not group["amsgrad"] and may_be_narrow(param)
        return Param(
            is_trained=True,
            state_nbytes=state_nbytes(param, self._layouts(param, group, form)),
            state_dtype=None if form is MomentForm.FLOAT32 else form.value,
            narrower_nbytes=tuple(
                (dtype, state_nbytes(param, self._layouts(param, group, MomentForm(dtype))))
                for dtype in (STATE_DTYPES if may_choose else ())
            ),
        )

    def start(self, param: torch.Tensor, state: State, device: torch.device) -> None:
        """Build the kernel and choose the host threads for `device`, once: else the worker's first update would inspect
        the machine and wait for the compiler.
        """
        if self._threads is None and (has_master(param) or form_of(state) is not MomentForm.FLOAT32):
            kernel()
            self._threads = host_threads_for(device)

    def as_planned(self, param: torch.Tensor, state: State, group: Mapping[str, Any]) -> State:
        """Return `state` with moments in the form of `param`, rounded to the nearest if they were in another.

        The rest of the master is left out if `param` is its own master: `param` has the value nearest to the master.
        """
        if not may_be_narrow(param):
            return state
        if has_master(param) and self.precision.masters is torch.bfloat16 and rest_name_of(state) is not None:
            state = {name: value for name, value in state.items() if name not in REST_NAMES.values()}
        form = self.form(param, group)
        return state if form_of(state) is form else with_form(state, form, own_shard(param).detach())

    def update(self, updates: Sequence[ParamUpdate], group: Mapping[str, Any]) -> None:
        """Update weights and states in place. Raises ValueError if AMSGrad was asked of narrower moments."""
        plain: dict[tuple[torch.device, torch.dtype], list[ParamUpdate]] = {}
        on_host: list[ParamUpdate] = []
        on_device: list[ParamUpdate] = []
        for each in updates:
            weight, state = each.weight, each.state
            rest, form = rest_name_of(state), form_of(state)
            is_exact = form is MomentForm.FLOAT32 or weight.dtype != torch.float32
            is_own_master = self.precision.masters is torch.bfloat16 and weight.dtype == torch.bfloat16
            if rest is None and is_exact and not is_own_master:
                plain.setdefault((weight.device, weight.dtype), []).append(each)
                continue
            if group["amsgrad"] and (rest is None or form is not MomentForm.FLOAT32):
                raise ValueError(amsgrad_refused(form.value))
            (on_host if weight.device.type == "cpu" else on_device).append(each)
        for members in plain.values():
            self._fused(members, group)
        self._on_device(on_device, group)
        self._on_host(on_host, group)

    def _fused(self, updates: Sequence[ParamUpdate], group: Mapping[str, Any]) -> None:
        """Run torch's fused AdamW on tensors of one device and dtype; it adds 1 to the step of each state."""
        states, lr, device = [each.state for each in updates], group["lr"], updates[0].weight.device
        # Kernels of every device read numbers and tensors on the host, and none of another accelerator.
        if isinstance(lr, torch.Tensor) and lr.device.type != "cpu" and lr.device != device:
            lr = lr.to(device)
        adamw(
            [each.weight for each in updates],
            [each.grad for each in updates],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [state["max_exp_avg_sq"] for state in states] if group["amsgrad"] else [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=group["amsgrad"],
            lr=lr,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )

    # On the host.

    def _on_host(self, updates: Sequence[ParamUpdate], group: Mapping[str, Any]) -> None:
        kinds: dict[tuple[torch.dtype, MomentForm, str | None], list[ParamUpdate]] = {}
        for each in updates:
            if each.weight.numel():  # else the shard of this rank is empty, but all ranks count steps
                kinds.setdefault((each.weight.dtype, form_of(each.state), rest_name_of(each.state)), []).append(each)
        for (_, form, rest), members in kinds.items():
            steps = [int(one.state["step"]) + 1 for one in members]
            names = [*([] if rest is None else [rest]), *layouts_of(form), *self.statistics(group)[2:]]
            passes = [
                [one.weight, in_order_of(one.grad, one.weight), *(one.state[name] for name in names)] for one in members
            ]
            for indices, operands in coalesce(passes, steps):
                self._pass(operands, form, steps[indices[0]], group)
                if len(indices) > 1:
                    # The pass wrote through other tensors over the same memory. It reads gradients only.
                    written = [tensor for index in indices for tensor in (passes[index][0], *passes[index][2:])]
                    torch.autograd.graph.increment_version(written)
        for each in updates:
            each.state["step"].add_(1)

    def _pass(self, operands: Sequence[torch.Tensor], form: MomentForm, step: int, group: Mapping[str, Any]) -> None:
        """Run step number `step` on joined operands of `_on_host`."""
        num_moments = len(layouts_of(form)) + len(self.statistics(group)[2:])
        weight, grad, *others = operands
        rest = others.pop(0) if len(others) > num_moments else None
        first, second, *more = others
        extras: Extras = {
            "lr": float(group["lr"]),
            "beta1": float(group["betas"][0]),
            "beta2": float(group["betas"][1]),
            "eps": group["eps"],
            "weight_decay": group["weight_decay"],
            "grad_scale": grad_scale(weight, group),
            "maximize": group["maximize"],
            "threads": self._threads,
            "form": form,
            "seed": self.precision.seed,
        }
        if form.has_scales:
            extras["exp_avg_scale"], extras["exp_avg_sq_scale"] = more
        elif more:
            extras["max_exp_avg_sq"] = more[0]
        if rest is not None:
            run = split_adamw if rest.dtype == torch.int16 else mixed_adamw
            run(rest, first, second, grad, weight, step, **extras)
        elif weight.dtype == torch.bfloat16:
            bf16_adamw(weight, first, second, grad, step, **extras)
        else:
            mixed_adamw(weight, first, second, grad, None, step, **extras)

    # On a device.

    def _on_device(self, updates: Sequence[ParamUpdate], group: Mapping[str, Any]) -> None:
        kinds: dict[tuple[object, ...], list[_Param]] = {}
        for each in updates:
            weight, grad, state = each.weight, each.grad, each.state
            rest, form = rest_name_of(state), form_of(state)
            is_exact = rest is not None and form is MomentForm.FLOAT32
            param = _Param(
                weight=flat(weight),
                grad=flat_order(grad, weight),
                rest=None if rest is None else flat(state[rest]),
                form=form,
                moments=Moments(*(flat(state[name]) for name in layouts_of(form))),
                most=flat(state["max_exp_avg_sq"]) if group["amsgrad"] else None,
                step=state["step"],
                number=None if is_exact else num_steps(state["step"]) + 1,
            )
            kinds.setdefault((weight.device, weight.dtype, form, rest), []).append(param)
        for params in kinds.values():
            for batch in batches(params, min(BLOCK if params[0].number is None else NOISY_BLOCK, BLOCK)):
                self._update_batch(batch, group)
            for param in params:
                param.step.add_(1)
                if param.number is not None:
                    note_num_steps(param.step, param.number)

    def _update_batch(self, batch: "Batch[_Param]", group: Mapping[str, Any]) -> None:
        pieces, masters = batch.pieces, batch.joined()
        grads = batch.grads(grad_scale(pieces[0].param.weight, group))
        stored = [piece.param.moments.part(piece.start, piece.stop) for piece in pieces]
        moments = [decode(each, piece.param.form) for piece, each in zip(pieces, stored, strict=True)]
        updates: list[ParamUpdate] = []
        for piece, master, grad, (first, second) in zip(pieces, masters, grads, moments, strict=True):
            # A copy of the step, because the update of each piece adds 1.
            state: State = {"exp_avg": first, "exp_avg_sq": second, "step": piece.param.step.clone()}
            if piece.param.most is not None:
                state["max_exp_avg_sq"] = piece.cut(piece.param.most)
            updates.append(ParamUpdate(master, grad, state))
        self._fused(updates, group)
        for piece, master, own, (first, second) in zip(pieces, masters, stored, moments, strict=True):
            param = piece.param
            key = 0 if param.number is None else noise_key(self.precision.seed, param.number)
            store(own, first, second, param.form, key)
            if param.rest is None and param.weight.dtype == torch.bfloat16:
                piece.cut(param.weight).copy_(rounded_weights(master, first, second, param.form, key))
        batch.split()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Param(Wide):
    """The flat tensors of a parameter, all in the same order of elements."""

    form: MomentForm
    moments: Moments
    most: torch.Tensor | None
    """The largest second moment so far, with AMSGrad."""
    step: torch.Tensor
    number: int | None
    """The number of this step, which the noise depends on; None if moments and master are exact."""


def may_be_narrow(param: torch.Tensor) -> bool:
    """Return whether the state of `param` may have moments narrower than fp32: if it has moments in fp32."""
    return param.dtype == torch.float32 or has_master(param)


def amsgrad_refused(state_dtype: str) -> str:
    """Return the message of the error of AMSGrad with moments in `state_dtype`."""
    return (
        f"amsgrad=True with moments in {state_dtype}: the largest second moment so far is stored in fp32 only. Use "
        "state_dtype='float32' and master_dtype='float32', or amsgrad=False"
    )
