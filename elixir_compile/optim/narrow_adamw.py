"""The rule of AdamW with moments, and masters of bf16 parameters, in fewer bytes than fp32.

    float32 moments   the rule of `master_adamw`, bit for bit
    narrower ones     decode -> the same arithmetic in fp32 -> encode, in one pass over host memory, or block by block
                      in torch's ops on a device

Which form a parameter has is what the optimizer was asked for; if it was asked for fp32, it is what the plan chose for
the parameter's bucket.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from elixir_compile.ir.bucket import STATE_DTYPES
from elixir_compile.ops.masters import REST_NAMES, has_master
from elixir_compile.ops.registry import gathered_numel
from elixir_compile.ops.shards import own_part
from elixir_compile.optim.host.flat_step import joined, split
from elixir_compile.optim.host.passes import Extras, bf16_adamw, coalesce, mixed_adamw, split_adamw
from elixir_compile.optim.layout import StatisticLayout
from elixir_compile.optim.master_adamw import MixedAdamWRule, in_layout_of, master_rest_of, scalars_of
from elixir_compile.optim.moment_forms import (
    BLOCK,
    MomentForm,
    decode,
    encode,
    noise,
    noise_key,
    root_of,
    rounded_to_bfloat16,
    weight_noise,
)
from elixir_compile.optim.narrow_state import (
    StatePrecision,
    as_moments,
    as_stored,
    form_of,
    layouts_of,
    stored_moments,
    with_form,
)
from elixir_compile.optim.planned import planned_spec
from elixir_compile.optim.rule import GRAD_SCALE, AdamWRule, State
from elixir_compile.optim.step_counts import note_num_steps, num_steps
from elixir_compile.runtime.slab import flat

_Update = tuple[torch.Tensor, torch.Tensor, State]
"""A weight, its gradient and its state."""
_DEVICE_BLOCK = (1 << 20) // BLOCK * BLOCK
"""Elements that are widened at once on a device: its scratch tensors take 40 MiB then, beside the budget's bytes."""


class NarrowAdamWRule(MixedAdamWRule):
    """The rule of AdamW whose state has the precision `precision`."""

    def __init__(self, precision: StatePrecision) -> None:
        super().__init__()
        self.precision = precision

    def form(self, param: torch.Tensor, group: Mapping[str, Any]) -> MomentForm:
        """Return the form of the moments of `param`."""
        if not may_be_narrow(param):
            return MomentForm.FLOAT32
        if not self.precision.is_exact:
            return self.precision.moments
        if group["amsgrad"]:  # the plan may be older than the optimizer
            return MomentForm.FLOAT32
        spec = planned_spec(param)
        planned = None if spec is None else spec.state_dtype
        return MomentForm.FLOAT32 if planned is None else MomentForm(planned)

    def state_layouts(self, param: torch.Tensor, group: Mapping[str, Any]) -> Mapping[str, StatisticLayout]:
        """Return the layout of each moment of `param`, and of the rest of the master if `param` has an exact master."""
        return self._layouts(param, group, self.form(param, group))

    def _layouts(
        self, param: torch.Tensor, group: Mapping[str, Any], form: MomentForm
    ) -> Mapping[str, StatisticLayout]:
        own = super().state_layouts(param, group)
        if form is MomentForm.FLOAT32 and self._is_own_master(param):
            return {name: layout for name, layout in own.items() if name not in REST_NAMES.values()}
        if form is MomentForm.FLOAT32:
            return own
        rest = {} if self._is_own_master(param) else {n: own[n] for n in REST_NAMES.values() if n in own}
        return {**layouts_of(form), **rest}

    def _is_own_master(self, param: torch.Tensor) -> bool:
        return self.precision.masters is torch.bfloat16 and has_master(param)

    def narrow_dtype(self, param: torch.Tensor, group: Mapping[str, Any]) -> str | None:
        """Return the dtype of the moments of `param` if they are narrower than fp32."""
        form = self.form(param, group)
        return None if form is MomentForm.FLOAT32 else form.value

    def narrower_nbytes(self, param: torch.Tensor, group: Mapping[str, Any]) -> Mapping[str, int]:
        """Return the bytes of the state of `param` by the dtype of narrower moments that a plan may choose."""
        if not self.precision.is_exact or group["amsgrad"] or not may_be_narrow(param):
            return {}
        of = {dtype: self._layouts(param, group, MomentForm(dtype)).values() for dtype in STATE_DTYPES}
        return {dtype: sum(layout.nbytes(gathered_numel(param)) for layout in layouts) for dtype, layouts in of.items()}

    def start(self, param: torch.Tensor, state: State, device: torch.device, *, is_fresh: bool) -> None:
        """Write the rest of the master of `param` to fresh `state`, unless `param` is its own master."""
        if form_of(state) is not MomentForm.FLOAT32:  # updated by a host pass, also if `param` is in fp32
            self._prepare_passes(device)
        super().start(param, state, device, is_fresh=is_fresh and not self._is_own_master(param))

    def as_planned(self, param: torch.Tensor, state: State, group: Mapping[str, Any]) -> State:
        """Return `state` with moments in the form of `param`, rounded to the nearest if they were in another.

        The rest of the master is left out if `param` is its own master: `param` has the value nearest to the master.
        """
        if not may_be_narrow(param):
            return state
        if self._is_own_master(param) and master_rest_of(state) is not None:
            state = {name: value for name, value in state.items() if name not in REST_NAMES.values()}
        form = self.form(param, group)
        return state if form_of(state) is form else with_form(state, form, own_part(param).detach())

    def update(
        self,
        weights: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        states: Sequence[State],
        group: Mapping[str, Any],
    ) -> None:
        """Update `weights` and `states` in place. Raises ValueError if AMSGrad was asked of narrower moments."""
        exact, on_host, on_device = [], [], []
        for each in zip(weights, grads, states, strict=True):
            weight, _, state = each
            if not self._is_narrow(weight, state):
                exact.append(each)
            elif not weight.numel():  # The shard of this rank is empty, but all ranks count steps.
                state["step"].add_(1)
            else:
                (on_host if weight.device.type == "cpu" else on_device).append(each)
        if (on_host or on_device) and group["amsgrad"]:
            raise ValueError(amsgrad_refused(form_of((on_host or on_device)[0][2]).value))
        if exact:
            exact_weights, exact_grads, exact_states = zip(*exact, strict=True)
            super().update(exact_weights, exact_grads, exact_states, group)
        if on_host:
            self._narrow_on_host(on_host, group)
        for weight, grad, state in on_device:
            self._narrow_on_device(weight, grad, state, group)

    def _is_narrow(self, weight: torch.Tensor, state: State) -> bool:
        """Return whether a weight with such a state has narrow moments, or is a bf16 parameter and its own master."""
        if weight.dtype != torch.float32 and master_rest_of(state) is None:
            return self.precision.masters is torch.bfloat16 and weight.dtype == torch.bfloat16
        return form_of(state) is not MomentForm.FLOAT32

    def _narrow_on_host(self, updates: Sequence[_Update], group: Mapping[str, Any]) -> None:
        kinds: dict[tuple[object, ...], list[_Update]] = {}
        for weight, grad, state in updates:
            rest = master_rest_of(state)
            key = (weight.dtype, form_of(state), None if rest is None else rest.dtype)
            kinds.setdefault(key, []).append((weight, grad, state))
        for (_, form, _), members in kinds.items():
            steps = [int(state["step"]) + 1 for *_, state in members]
            rows = [_row(*member) for member in members]
            for indices, row in coalesce(rows, steps):
                self._pass(row, MomentForm(form), steps[indices[0]], group)
                if len(indices) > 1:
                    # The pass wrote through other tensors over the same memory. It only reads gradients, `row[1]`.
                    written = [tensor for index in indices for tensor in (rows[index][0], *rows[index][2:])]
                    torch.autograd.graph.increment_version(written)
        for *_, state in updates:
            state["step"].add_(1)

    def _pass(self, row: Sequence[torch.Tensor], form: MomentForm, step: int, group: Mapping[str, Any]) -> None:
        """Run step number `step` on a joined row of `_row`, whose moments are in `form`."""
        num_stored = len(layouts_of(form))
        (weight, grad, *rests), moments = row[:-num_stored], row[-num_stored:]
        first, second = moments[0], moments[num_stored // 2]
        extras: Extras = {
            **scalars_of(group),
            "threads": self._threads,
            "form": form,
            "exp_avg_scale": moments[1] if num_stored == 4 else None,
            "exp_avg_sq_scale": moments[3] if num_stored == 4 else None,
            "seed": self.precision.seed,
        }
        if weight.dtype == torch.float32:
            extras["grad_scale"] = 1.0  # gradients of parameters without a master are scaled before the update
            mixed_adamw(weight, first, second, grad, None, step, **extras)
        elif not rests:
            bf16_adamw(weight, first, second, grad, step, **extras)
        else:
            run = split_adamw if rests[0].dtype == torch.int16 else mixed_adamw
            run(rests[0], first, second, grad, weight, step, **extras)

    def _narrow_on_device(
        self, weight: torch.Tensor, grad: torch.Tensor, state: State, group: Mapping[str, Any]
    ) -> None:
        """Update a weight on a device, `_DEVICE_BLOCK` elements at a time."""
        scale = group.get(GRAD_SCALE, 1.0) if weight.dtype != torch.float32 else 1.0
        rest, form = master_rest_of(state), form_of(state)
        high, slope = flat(weight), flat(in_layout_of(grad, weight))
        stored, layouts = [flat(tensor) for tensor in stored_moments(state)], layouts_of(form).values()
        number = num_steps(state["step"]) + 1
        key = noise_key(self.precision.seed, number)
        for start in range(0, weight.numel(), _DEVICE_BLOCK):
            stop = min(start + _DEVICE_BLOCK, weight.numel())
            block = slice(start, stop)
            own = [tensor[layout.span(start, stop)] for tensor, layout in zip(stored, layouts, strict=True)]
            master = _master(high[block], None if rest is None else flat(rest)[block])
            first, second = decode(as_moments(own), form)
            # The same arithmetic as exact moments; a copy of the step, because the update of each block adds 1.
            moments: State = {"exp_avg": first, "exp_avg_sq": second, "step": state["step"].clone()}
            wide = slope[block].to(torch.float32)
            AdamWRule.update(self, [master], [wide if scale == 1.0 else wide * scale], [moments], group)
            encoded = encode(first, second, form, key=key)
            for here, value in zip(own, as_stored(encoded), strict=True):
                here.copy_(value)
            bits = weight_noise(noise(first, root_of(second) if form.has_scales else second, key), master)
            _store(master, high[block], None if rest is None else flat(rest)[block], bits)
        state["step"].add_(1)
        note_num_steps(state["step"], number)


def may_be_narrow(param: torch.Tensor) -> bool:
    """Return whether the state of `param` may have moments narrower than fp32: if it has moments in fp32."""
    return param.dtype == torch.float32 or has_master(param)


def amsgrad_refused(state_dtype: str) -> str:
    """Return the message of the error of AMSGrad with moments in `state_dtype`."""
    return (
        f"amsgrad=True with moments in {state_dtype}: the largest second moment so far is stored in fp32 only. Use "
        "state_dtype='float32' and master_dtype='float32', or amsgrad=False"
    )


def _row(weight: torch.Tensor, grad: torch.Tensor, state: State) -> list[torch.Tensor]:
    """Return the tensors of a host pass: the weight, its gradient, the rest of its master if there is one, moments."""
    rest = master_rest_of(state)
    return [weight, in_layout_of(grad, weight), *([] if rest is None else [rest]), *stored_moments(state)]


def _master(high: torch.Tensor, rest: torch.Tensor | None) -> torch.Tensor:
    """Return the fp32 master of the flat weight `high`: in its own memory if it is there in fp32."""
    if rest is None:
        return high.to(torch.float32)
    return rest if rest.dtype == torch.float32 else joined(high, rest)


def _store(master: torch.Tensor, high: torch.Tensor, rest: torch.Tensor | None, bits: torch.Tensor) -> None:
    """Write `master` back to the weight `high` and to the rest of its master; without a rest, round it with `bits`."""
    if rest is not None and rest.dtype == torch.int16:
        split(master, high, rest)
    elif rest is None and high.dtype == torch.bfloat16:
        high.copy_(rounded_to_bfloat16(master, bits))
    elif high is not master:
        high.copy_(master)
