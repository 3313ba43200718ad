"""State dicts, clipping and loss scaling for optimizers whose parameters may have fp32 masters.

    state_dict()            holds moments and joined masters in fp32; `torch.optim.AdamW` loads it and ignores `master`
    clip_grad_norm_(norm)   stores the clip coefficient; the update multiplies gradients by it as it reads them
    GradScaler.step(self)   stores 1 / loss scale in the same way for float16 masters; on overflow nothing is changed

Gradients of parameters without a master are multiplied at once by torch's own ops, so they are bitwise as in torch.
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
from elixir_compile.optim.master_adamw import MixedAdamWRule, with_joined_master
from elixir_compile.optim.rule import UpdateRule


class KeepsMasters(Hybrid):
    """A hybrid optimizer that keeps fp32 masters in its state."""

    grad_scale: "torch.Tensor | float" = 1.0
    """The loss scale; `GradScaler` sets it around `step()`."""
    found_inf: "torch.Tensor | float" = 0.0
    """The number of gradients that overflowed; `GradScaler` sets it around `step()`."""
    _clip_factor: float = 1.0
    """The clip coefficient for the next update."""
    _clipped = KeptGradients()
    """The gradients to which `_clip_factor` applies."""

    def _new_rule(self) -> UpdateRule:
        return MixedAdamWRule()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group as in `torch.optim.Optimizer`."""
        super().add_param_group(param_group)
        for param in self.param_groups[-1]["params"]:
            claim_master(param, self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for param in group["params"]:
                claim_master(param, self)

    def _takes_loss_scale(self) -> bool:
        """Return whether a float16 parameter has a master: `GradScaler` refuses to unscale float16 gradients itself."""
        params = (param for group in self.param_groups for param in group["params"])
        return any(param.dtype == torch.float16 and has_master(param) for param in params)

    def _saved_entry(self, entry: Mapping[str, Any], param: nn.Parameter) -> Mapping[str, Any]:
        """Return `entry` as torch saves it, with the fp32 `master` of `param` if it has a master."""
        return with_joined_master(entry, param)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, and the clip coefficient that was stored for them."""
        self._clip_factor = 1.0
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, *, grad_scale: float = 1.0) -> torch.Tensor:
        """Clip gradients for the next step to the global norm `max_norm`; return their norm before clipping.

        Gradients of parameters with a master are read in fp32 or wider but not written: the update multiplies them.
        Other gradients are scaled at once. `grad_scale` is the present loss scale, `scaler.get_scale()`; the returned
        norm is the norm of the unscaled gradients.
        """
        mixed, plain = self._by_master()
        kinds = {is_dtensor(param) for param in plain}
        is_as_torch = not mixed and grad_scale == 1.0 and kinds == {False}
        known = known_squares([*mixed, *plain], norm_of if is_as_torch else squares_of)
        if is_as_torch:
            return clip_as_torch(plain, max_norm, known)
        # Ranks take this branch together if gradients are DTensors: their caches of norms may differ.
        clip_factor = self._take_clip_factor()
        squares = clip_factor**2 * sum_of_all_squares(mixed, known) + sum_of_all_squares(plain, known)
        is_double = any(param.dtype == torch.float64 for param in plain)
        norm = torch.tensor(squares**0.5 / grad_scale, dtype=torch.float64 if is_double else torch.float32)
        # As torch does: without a branch, and not finite if the norm is not.
        factor = float(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        self._clip_factor, self._clipped = clip_factor * factor, KeptGradients(mixed)
        if factor != 1.0:
            _multiply_grads(plain, factor)
        return norm

    def _take_factor(self) -> float | None:
        """Return clip coefficient / loss scale, and reset the coefficient; None if a gradient overflowed."""
        clip_factor = self._take_clip_factor()
        if float(self.found_inf):
            return None
        inverse_scale = 1.0 / float(self.grad_scale)
        if inverse_scale != 1.0:  # else do not touch gradients: updates of this step may be queued already
            _multiply_grads(self._by_master()[1], inverse_scale)
        return clip_factor * inverse_scale

    def _take_clip_factor(self) -> float:
        """Return the stored clip coefficient, and reset it to 1.

        Returns 1 if all gradients that were clipped are gone: the coefficient of a skipped step must not apply to the
        next step.
        """
        factor, self._clip_factor = self._clip_factor, 1.0
        if factor == 1.0:
            return factor
        with torch.DisableTorchFunctionSubclass():  # compares identities, so no queued update is waited for
            return factor if self._clipped.any_remains() else 1.0

    def _by_master(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Return the parameters with gradients in two lists: with a master, and without."""
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        mixed = [param for param in params if has_master(param)]
        return mixed, [param for param in params if not has_master(param)]


def _multiply_grads(params: Sequence[nn.Parameter], factor: float) -> None:
    if params:
        torch._foreach_mul_(list(map(own_grad, params)), factor)  # pyright: ignore[reportPrivateImportUsage]
        torch.autograd.graph.increment_version(_grads(filter(is_dtensor, params)))


def _grads(params: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    return [param.grad for param in params if param.grad is not None]
