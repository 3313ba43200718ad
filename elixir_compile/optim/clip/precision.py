"""What an optimizer whose parameters may have fp32 masters does besides updating: state dicts, clipping, loss scaling.

    state_dict()            moments and masters in fp32, joined: `torch.optim.AdamW` loads it and does not mind the key
    clip_grad_norm_(norm)   the coefficient waits for the update, which multiplies as it reads
    GradScaler.step(self)   of float16 with masters: so does 1 / loss scale; on overflow nothing is touched

Gradients of parameters without a master are multiplied at once, by torch's own ops, so that they stay what torch makes
of them.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from elixir_compile.ops.masters import claim_master, has_master
from elixir_compile.ops.shards import is_dtensor, own_grad
from elixir_compile.optim.clip.guard import KeptGradients
from elixir_compile.optim.clip.norms import clip_as_torch, known_squares, norm_of, squares_of, sum_of_all_squares
from elixir_compile.optim.hybrid import Hybrid
from elixir_compile.optim.master_adamw import MixedAdamWRule, with_whole_master
from elixir_compile.optim.rule import UpdateRule


class KeepsMasters(Hybrid):
    """The part of an optimizer that knows of masters."""

    grad_scale: "torch.Tensor | float" = 1.0
    """The loss scale, which `GradScaler` sets around `step()`."""
    found_inf: "torch.Tensor | float" = 0.0
    """How many gradients overflowed, which it sets too."""
    _clip_factor: float = 1.0
    _clipped = KeptGradients()
    """The gradients that it belongs to."""

    def _new_rule(self) -> UpdateRule:
        return MixedAdamWRule()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as every torch optimizer does."""
        super().add_param_group(param_group)
        for param in self.param_groups[-1]["params"]:
            claim_master(param, self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for param in group["params"]:
                claim_master(param, self)

    def _takes_loss_scale(self) -> bool:
        """`GradScaler` refuses to unscale float16 itself."""
        params = (param for group in self.param_groups for param in group["params"])
        return any(param.dtype == torch.float16 and has_master(param) for param in params)

    def _saved_entry(self, entry: Mapping[str, Any], param: nn.Parameter) -> Mapping[str, Any]:
        """Return what torch's optimizers save, with a `master` in fp32 where the parameter has one."""
        return with_whole_master(entry, param)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, and what was to happen to them."""
        self._clip_factor = 1.0
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, *, grad_scale: float = 1.0) -> torch.Tensor:
        """Let the next step see gradients whose global norm is at most `max_norm`; return the norm that they have.

        Gradients of parameters with a master are read, in fp32 or wider, and not written: the update multiplies. The
        others are scaled at once. `grad_scale` is what the loss was multiplied by, `scaler.get_scale()`; the norm is
        that of the gradients without it.
        """
        mixed, plain = self._by_master()
        kinds = {is_dtensor(param) for param in plain}
        is_as_torch = not mixed and grad_scale == 1.0 and kinds == {False}
        known = known_squares([*mixed, *plain], norm_of if is_as_torch else squares_of)
        if is_as_torch:
            return clip_as_torch(plain, max_norm, known)
        # One way for gradients that ranks share: what is known of them, one rank may not know.
        clip_factor = self._take_clip_factor()
        squares = clip_factor**2 * sum_of_all_squares(mixed, known) + sum_of_all_squares(plain, known)
        is_double = any(param.dtype == torch.float64 for param in plain)
        norm = torch.tensor(squares**0.5 / grad_scale, dtype=torch.float64 if is_double else torch.float32)
        # As torch does: without a branch, and not finite where the norm is not.
        factor = float(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        self._clip_factor, self._clipped = clip_factor * factor, KeptGradients(_grads(mixed))
        if factor != 1.0:
            _multiply_grads(plain, factor)
        return norm

    def _take_factor(self) -> float | None:
        """Return what the update multiplies gradients by, once; None where a gradient overflowed."""
        clip_factor = self._take_clip_factor()
        if float(self.found_inf):
            return None
        inverse_scale = 1.0 / float(self.grad_scale)
        if inverse_scale != 1.0:  # else nothing is read here: updates of this step may be on their way already
            _multiply_grads(self._by_master()[1], inverse_scale)
        return clip_factor * inverse_scale

    def _take_clip_factor(self) -> float:
        """Return what clipping left for the update, once; 1 where every gradient that was clipped is gone: a step that
        was skipped must not reach the next one."""
        factor, self._clip_factor = self._clip_factor, 1.0
        if factor == 1.0:
            return factor
        with torch.DisableTorchFunctionSubclass():  # whether they are the same, and nothing that is in them
            params = [param for group in self.param_groups for param in group["params"]]
            return factor if self._clipped.is_among(_grads(params)) else 1.0

    def _by_master(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Return the parameters that have gradients: those with a master, and the rest."""
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        mixed = [param for param in params if has_master(param)]
        return mixed, [param for param in params if not has_master(param)]


def _multiply_grads(params: Sequence[nn.Parameter], factor: float) -> None:
    if params:
        torch._foreach_mul_(list(map(own_grad, params)), factor)
        torch.autograd.graph.increment_version([param.grad for param in params if is_dtensor(param)])


def _grads(params: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    return [param.grad for param in params if param.grad is not None]
