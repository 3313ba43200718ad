"""Record the arithmetic of an optimizer class's step for a single element, while it runs on tensors without values.

    param.add_(grad, alpha=-lr)    ->    add: value 0, value 1, number 0          numbers: (-lr,)

The Python code of the step runs in each step, so its arithmetic and branches on plain numbers need no recording.
Numbers are inputs of the tape: steps with different learning rates have the same form.
"""

from collections.abc import Iterator, Mapping, Sequence
from ctypes import c_float
from dataclasses import dataclass
from typing import Any

import torch

from elixir_compile import compat
from elixir_compile.optim.generic.formula import FORMULAS

Operand = tuple[str, int]
"""("v", index) for a value, ("s", index) for a number."""


class TapeError(Exception):
    """A step cannot run as a host pass; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The recorded ops of a step without its numbers, such as the learning rate: equal for steps with other numbers.

    Values have indices: the inputs come first, then the result of each op.
    """

    num_inputs: int
    ops: tuple[tuple[str, tuple[Operand, ...]], ...]
    """The ops in order: the name in `FORMULAS`, and the operands."""
    outputs: tuple[tuple[int, int], ...]
    """Pairs of an input and the value that the step writes to it; inputs that the step does not change are absent."""

    @property
    def num_numbers(self) -> int:
        """Return how many numbers the ops take."""
        return sum(kind == "s" for _, operands in self.ops for kind, _ in operands)


_ONE_OPERAND = ("neg", "abs", "sqrt", "rsqrt", "reciprocal", "sign")
_TWO_OPERANDS = ("mul", "maximum", "minimum", "clamp_min", "clamp_max", "gt", "ge", "lt", "le", "eq", "ne")
_MASKS = {
    "logical_not": "not",
    "bitwise_not": "not",
    "logical_and": "and",
    "bitwise_and": "and",
    "logical_or": "or",
    "bitwise_or": "or",
}
_VIEWS = ("detach", "alias", "view", "_unsafe_view", "view_as", "lift_fresh")


class Recorder:
    """Handles every torch op while the step runs, through `compat.ops_seen_by`, and records the ops."""

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        self._shape, self._stride = inputs[0].shape, inputs[0].stride()
        self._values: dict[int, int | None] = {compat.storage_key(tensor): index for index, tensor in enumerate(inputs)}
        """The value in each storage; None if nothing was written to the storage."""
        self._inputs = list(inputs)
        self._made: list[torch.Tensor] = []  # kept alive, so that no storage key is reused
        self._ops: list[tuple[str, tuple[Operand, ...]]] = []
        self.numbers: list[float] = []

    def see(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Record `op` and return its result if it has an operand on the tape, else run `op`."""
        if not any(self.holds(tensor) for tensor in _tensors([*args, *kwargs.values()])):
            return op(*args, **kwargs)
        name = str(op).split(".")[1]
        if name in _VIEWS:
            seen = op(*args, **kwargs)
            self._check_shape(seen)
            return seen
        base = name.removesuffix("_")
        if base == "empty_like":
            return self._new(None, torch.float32)
        formula, operands = self._formula_of(base, args, kwargs)
        value, is_mask = self._add(formula, operands)
        target = kwargs.get("out", args[0] if name != base else None)
        if target is None:
            return self._new(value, torch.bool if is_mask else torch.float32)
        self._check_shape(target)
        if not self.holds(target) or (target.dtype == torch.bool) != is_mask:
            raise TapeError(f"{op} writes a tensor of another kind")
        self._values[compat.storage_key(target)] = value
        return target

    def holds(self, tensor: object) -> bool:
        """Return whether `tensor` is on the tape."""
        return isinstance(tensor, torch.Tensor) and compat.storage_key(tensor) in self._values

    def form(self, ends: Sequence[torch.Tensor]) -> Form:
        """Return the recorded ops; `ends` are the tensors that hold the new values of the inputs, in their order."""
        values = [self._value(end) for end in ends]
        masks = [self._is_mask_value(value) for value in values]
        if any(masks):
            raise TapeError("it ends with a tensor of booleans")
        outputs = tuple((index, value) for index, value in enumerate(values) if index != value)
        return Form(num_inputs=len(self._inputs), ops=tuple(self._ops), outputs=outputs)

    def _formula_of(self, base: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, Sequence[Any]]:
        """Return the name of an op in `FORMULAS`, and its operands."""
        if base in _ONE_OPERAND or base in _TWO_OPERANDS:
            return base, args
        if base in _MASKS:
            return _MASKS[base], args
        if base in ("add", "sub", "rsub"):
            first, second = (args[1], args[0]) if base == "rsub" else args[:2]
            alpha = kwargs.get("alpha", args[2] if len(args) > 2 else 1)
            return "add", (first, second, alpha if base == "add" else -alpha)
        if base == "div" and kwargs.get("rounding_mode") is None:
            return ("div" if self.holds(args[1]) else "div by a number"), args
        if base in ("addcmul", "addcdiv"):
            value = kwargs.get("value", 1)
            return ("addcmul of 1", args) if base == "addcmul" and _in_fp32(value) == 1 else (base, (*args, value))
        if base == "lerp" and not self.holds(args[2]):
            return ("lerp below half" if abs(_in_fp32(args[2])) < 0.5 else "lerp"), args
        if base == "pow" and isinstance(args[1], int | float) and f"pow {args[1]:g}" in FORMULAS:
            return f"pow {args[1]:g}", args[:1]
        return self._copying_formula_of(base, args, kwargs)

    def _copying_formula_of(
        self, base: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[str, Sequence[Any]]:
        """Return the formula name and the operands of an op that fills, copies, bounds or selects elements."""
        if base in ("zero", "zeros_like"):
            return "value", (0.0,)
        if base == "ones_like":
            return "value", (1.0,)
        if base in ("fill", "full_like"):
            return "value", args[1:2]
        if base == "clamp":
            least, most = (*args[1:], None, None)[:2]
            if most is None:
                return "clamp_min", (args[0], least)
            return "clamp_max", (args[0] if least is None else self._intermediate("clamp_min", args[0], least), most)
        if base == "where" and len(args) == 3:
            return "where", args
        if base == "masked_fill":
            return "where", (args[1], args[2], args[0])
        if base == "index_put" and len(args[1]) == 1 and len(args) == 3 and _is_mask(args[1][0]):
            return "where", (args[1][0], args[2], args[0])
        if base in ("copy", "clone", "_to_copy"):
            source = args[1] if base == "copy" else args[0]
            wanted = args[0].dtype if base == "copy" else kwargs.get("dtype") or source.dtype
            if wanted in (torch.float32, source.dtype):
                return ("value" if not _is_mask(source) else "mask" if wanted == torch.bool else "number"), (source,)
        raise TapeError(f"it calls {base}, which has no formula")

    def _intermediate(self, formula: str, *operands: Any) -> torch.Tensor:
        return self._new(self._add(formula, operands)[0], torch.float32)

    def _add(self, formula: str, operands: Sequence[Any]) -> tuple[int, bool]:
        """Append an op to the tape; return the index of its value, and whether the value is a mask."""
        known = FORMULAS[formula]
        are_masks = [_is_mask(operand) for operand in operands if self.holds(operand)]
        if formula == "where":
            are_masks = are_masks[1:] or [False]
        if are_masks and all(are_masks) and not known.takes_masks:
            raise TapeError("it does arithmetic on tensors of booleans")
        self._ops.append((formula, tuple(map(self._operand, operands))))
        return len(self._inputs) + len(self._ops) - 1, known.is_mask

    def _operand(self, given: Any) -> Operand:
        if self.holds(given):
            self._check_shape(given)
            return "v", self._value(given)
        is_number = isinstance(given, int | float) or (
            isinstance(given, torch.Tensor) and not given.dim() and given.device.type == "cpu"
        )
        if not is_number:
            raise TapeError("it computes with a value that is neither a number nor a tensor shaped like the parameter")
        self.numbers.append(float(given))
        return "s", len(self.numbers) - 1

    def _value(self, tensor: torch.Tensor) -> int:
        value = self._values.get(compat.storage_key(tensor))
        if value is None:
            raise TapeError("it reads memory that it has not written")
        return value

    def _is_mask_value(self, value: int) -> bool:
        op = value - len(self._inputs)
        return op >= 0 and FORMULAS[self._ops[op][0]].is_mask

    def _check_shape(self, tensor: torch.Tensor) -> None:
        if (tensor.shape, tensor.stride()) != (self._shape, self._stride):
            raise TapeError(
                f"it uses a tensor of shape {tuple(tensor.shape)} for a parameter of shape {tuple(self._shape)}"
            )

    def _new(self, value: int | None, dtype: torch.dtype) -> torch.Tensor:
        made = torch.empty(self._shape, dtype=dtype, device="meta")
        self._made.append(made)
        self._values[compat.storage_key(made)] = value
        return made


def _tensors(given: Sequence[Any]) -> Iterator[torch.Tensor]:
    for value in given:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _in_fp32(number: Any) -> float:
    """Return `number` rounded to fp32, by which torch's kernels choose their formula."""
    return c_float(float(number)).value


def _is_mask(given: object) -> bool:
    return isinstance(given, torch.Tensor) and given.dtype == torch.bool
