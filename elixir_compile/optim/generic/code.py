"""Record the step of an optimizer class for a single element, and compile it to C code that gives the same bits as
torch.
"""

import ctypes
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from ctypes import c_float
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from elixir_compile import compat
from elixir_compile.optim.generic.dry_step import ClassStep, StateSchema
from elixir_compile.optim.host import HostThreads, host_threads_for
from elixir_compile.optim.host.build import BuildError, loaded
from elixir_compile.optim.host.passes import coalesce
from elixir_compile.optim.rule import ParamUpdate, in_order_of

log = logging.getLogger("elixir_compile")

# ----------------------------------------------------------------------------------------------------------------------
# C expressions for the element-wise fp32 ops of optimizers, bitwise equal to torch's CPU kernels.
#
#     torch.add(a, b, alpha=s)     fmaf(s, b, a)    or    a + s * b
#
# torch's rounding depends on its build and on the processor, so `code` compiles each expression and compares it with
# torch once. Steps with other ops, such as exp or a norm, or with an op that no expression reproduces, are not
# compiled.


BY_MKL = "vmsSqrt"
"""Stands for a call of MKL's vector square root, up to 0.75 ulp off, which torch uses if it is built with MKL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Formula:
    """An element-wise op as C text; `{0}`, `{1}` and so on are its operands."""

    expressions: tuple[str, ...]
    """The expressions torch may use; they differ only in rounding."""
    is_mask: bool = False
    """Whether the result is a mask: true or false."""
    takes_masks: bool = False
    """Whether all operands may be masks."""
    eager: Callable[..., torch.Tensor] | None = None
    """torch's op, called with tensors and then numbers; None if there is only a single expression."""
    num_tensors: int = 0
    numbers: tuple[tuple[float, ...], ...] = ()
    """The numbers with which `eager` is compared, a tuple for each call."""


def _plain(expression: str) -> Formula:
    return Formula(expressions=(expression,))


def _mask(expression: str, *, takes_masks: bool = False) -> Formula:
    return Formula(expressions=(expression,), is_mask=True, takes_masks=takes_masks)


def _root(eager: Callable[..., torch.Tensor]) -> Formula:
    return Formula(expressions=("sqrtf({0})", BY_MKL), eager=eager, num_tensors=1, numbers=((),))


_FACTORS = ((-0.1,), (0.001000000000001,), (3.7,))
_LARGER = "({0} != {0} ? {0} : {1} != {1} ? {1} : {0} > {1} ? {0} : {1})"

FORMULAS: Mapping[str, Formula] = {
    "value": Formula(expressions=("{0}",)),
    "mask": _mask("{0}", takes_masks=True),
    "number": Formula(expressions=("(float){0}",), takes_masks=True),
    "mul": _plain("{0} * {1}"),
    "div": _plain("{0} / {1}"),
    "neg": _plain("-{0}"),
    "abs": _plain("fabsf({0})"),
    "sqrt": _root(torch.sqrt),
    "rsqrt": _plain("1.0f / sqrtf({0})"),
    "reciprocal": _plain("1.0f / {0}"),
    "sign": _plain("(float)(({0} > 0.0f) - ({0} < 0.0f))"),
    "pow 2": _plain("{0} * {0}"),
    "pow 3": _plain("{0} * {0} * {0}"),
    "pow 0.5": _root(lambda a: torch.pow(a, 0.5)),
    "pow -0.5": _plain("1.0f / sqrtf({0})"),
    "pow -1": _plain("1.0f / {0}"),
    "maximum": _plain(_LARGER),
    "minimum": _plain(_LARGER.replace(">", "<")),
    "clamp_min": _plain("({0} < {1} ? {1} : {0})"),
    "clamp_max": _plain("({0} > {1} ? {1} : {0})"),
    "gt": _mask("{0} > {1}"),
    "ge": _mask("{0} >= {1}"),
    "lt": _mask("{0} < {1}"),
    "le": _mask("{0} <= {1}"),
    "eq": _mask("{0} == {1}"),
    "ne": _mask("{0} != {1}"),
    "not": _mask("!{0}", takes_masks=True),
    "and": _mask("{0} & {1}", takes_masks=True),
    "or": _mask("{0} | {1}", takes_masks=True),
    "where": _plain("({0} ? {1} : {2})"),
    "add": Formula(
        expressions=("fmaf({2}, {1}, {0})", "{0} + {2} * {1}"),
        eager=lambda a, b, s: torch.add(a, b, alpha=s),
        num_tensors=2,
        numbers=_FACTORS,
    ),
    "div by a number": Formula(
        expressions=("{0} / {1}", "{0} * (1.0f / {1})"), eager=torch.div, num_tensors=1, numbers=_FACTORS
    ),
    "addcmul": Formula(
        expressions=(
            "{0} + {3} * {1} * {2}",
            "fmaf({3} * {1}, {2}, {0})",
            "fmaf({3}, {1} * {2}, {0})",
            "{0} + {3} * ({1} * {2})",
        ),
        eager=lambda a, b, c, s: torch.addcmul(a, b, c, value=s),
        num_tensors=3,
        numbers=_FACTORS,
    ),
    "addcmul of 1": Formula(  # some versions of torch round only once here
        expressions=("{0} + {1} * {2}", "fmaf({1}, {2}, {0})"), eager=torch.addcmul, num_tensors=3, numbers=((),)
    ),
    "addcdiv": Formula(
        expressions=("{0} + {3} * {1} / {2}", "{0} + {3} * ({1} / {2})", "fmaf({3}, {1} / {2}, {0})"),
        eager=lambda a, b, c, s: torch.addcdiv(a, b, c, value=s),
        num_tensors=3,
        numbers=_FACTORS,
    ),
    "lerp below half": Formula(
        expressions=("fmaf({2}, {1} - {0}, {0})", "{0} + {2} * ({1} - {0})"),
        eager=torch.lerp,
        num_tensors=2,
        numbers=((0.09999999999999998,), (0.49,), (-0.2,)),
    ),
    "lerp": Formula(
        expressions=(
            "fmaf({0} - {1}, 1.0f - {2}, {1})",
            "fmaf({1} - {0}, {2} - 1.0f, {1})",
            "{1} - ({1} - {0}) * (1.0f - {2})",
        ),
        eager=torch.lerp,
        num_tensors=2,
        numbers=((0.9,), (0.5,), (1.3,)),
    ),
}


def samples(num_tensors: int, numel: int) -> list[torch.Tensor]:
    """Return `num_tensors` flat fp32 tensors of all magnitudes seen in training, with zeros, infinities and NaNs."""
    made: list[Any] = []
    generator = torch.Generator().manual_seed(7)
    special = torch.tensor([0.0, -0.0, 1.0, -1.0, 1e-40, 3e38, float("inf"), float("nan")], device="cpu")
    for index in range(num_tensors):
        size = torch.rand(numel, generator=generator, device="cpu") * 8 - 6
        values = torch.randn(numel, generator=generator, device="cpu") * 10.0**size
        # With another stride in each tensor, so that special values meet each other and ordinary values.
        places = slice(index, None, 5 + 2 * index)
        count = len(values[places])
        values[places] = torch.where(
            torch.rand(count, generator=generator, device="cpu") < 0.3,
            special.repeat(count // 8 + 1)[:count],
            values[places],
        )
        made.append(values)
    return made


def is_same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two fp32 tensors have the same bits; all NaNs count as equal.

    torch's own kernels give NaNs with different bits from element to element.
    """
    return bool(torch.all((first.view(torch.int32) == second.view(torch.int32)) | (first.isnan() & second.isnan())))


# ----------------------------------------------------------------------------------------------------------------------
# Record the arithmetic of an optimizer class's step for a single element, while it runs on tensors without values.
#
#     param.add_(grad, alpha=-lr)    ->    add: value 0, value 1, number 0          numbers: (-lr,)
#
# The Python code of the step runs in each step, so its arithmetic and branches on plain numbers need no recording.
# Numbers are inputs of the tape: steps with different learning rates have the same form.


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
        ops = [self._ops[value - len(self._inputs)] for value in values if value >= len(self._inputs)]
        if any(FORMULAS[name].is_mask for name, _ in ops):
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
        power: Any = args[1] if base == "pow" else None
        if isinstance(power, int | float) and f"pow {power:g}" in FORMULAS:
            return f"pow {power:g}", args[:1]
        # Ops that fill, copy, bound or select elements.
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
            value = args[0]
            if least is not None:
                value = self._new(self._add("clamp_min", (value, least))[0], torch.float32)
            return "clamp_max", (value, most)
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


# ----------------------------------------------------------------------------------------------------------------------
# Turn recorded steps into C code, compile it with the system's compiler and keep it in the cache.


BLOCK = 512

HEAD = f"""#include <math.h>
#include <stddef.h>
typedef void (*Root)(int, const float *, float *, long long);
enum {{ BLOCK = {BLOCK} }};
"""
_MODE = 0x140102
"""The mode with which torch calls MKL: VML_HA, VML_FTZDAZ_OFF, VML_ERRMODE_IGNORE."""


def function_text(name: str, form: Form, expressions: Mapping[str, str]) -> str:
    """Return the text of a C function that updates the inputs of `form` in place; `expressions` are its ops in C."""
    stages = _Stages(form, expressions)
    lines = [f"void {name}(float *const *at, const float *numbers, size_t count, Root root) {{"]
    lines += [f"    float *restrict const t{index} = at[{index}];" for index in range(form.num_inputs)]
    lines += [f"    const float s{index} = numbers[{index}];" for index in range(form.num_numbers)]
    lines += [f"    {stages.kind(value)} b{value}[BLOCK];" for value in sorted(stages.in_arrays)]
    lines.append("    for (size_t from = 0; from < count; from += BLOCK) {")
    lines.append("        const int num = count - from < BLOCK ? (int)(count - from) : BLOCK;")
    for stage in range(stages.num_stages):
        lines.append("        for (int i = 0; i < num; i++) {")
        lines += [f"            {line}" for line in stages.body(stage)]
        lines += ["        }", *(f"        {call}" for call in stages.calls(stage))]
    return "\n".join([*lines, "    }", "}", ""])


class _Stages:
    """The ops of a form as a sequence of loops over a block, with MKL's square roots between the loops.

    A stage is a loop. A value is named by its index: inputs first, then the result of each op.
    """

    def __init__(self, form: Form, expressions: Mapping[str, str]) -> None:
        self._form, self._torch_expressions = form, expressions
        self._ops = dict(enumerate(form.ops, start=form.num_inputs))
        self._stage = dict.fromkeys(range(form.num_inputs), 0)
        """By value, the stage that computes it; for a root by MKL, the first stage after it."""
        for value, (formula, _) in self._ops.items():
            before = max((self._stage[operand] for operand in self._read(value)), default=0)
            self._stage[value] = before + 1 if expressions[formula] == BY_MKL else before
        # An input is not written before any stage that reads it.
        readers = {index: [own for own in self._ops if index in self._read(own)] for index, _ in form.outputs}
        self._writes = {
            index: max(self._stage[own] for own in (value, *readers[index])) for index, value in form.outputs
        }
        self.num_stages = 1 + max((*self._stage.values(), *self._writes.values()))
        reads = [(operand, self._stage[value]) for value in self._ops for operand in self._read(value)]
        reads += [(value, self._writes[index]) for index, value in form.outputs]
        later = {value for value, stage in reads if value in self._ops and stage > self._stage[value]}
        self.in_arrays = later | {value for value in self._ops if self._is_root(value)}
        """The values stored in arrays, because a later stage or MKL reads them."""

    def kind(self, value: int) -> str:
        """Return the C type of a value."""
        return "int" if value in self._ops and FORMULAS[self._ops[value][0]].is_mask else "float"

    def body(self, stage: int) -> Iterator[str]:
        """Yield the C statements of a stage for element `i`."""
        computed = [value for value in self._ops if self._stage[value] == stage and not self._is_root(value)]
        writes = [(index, value) for index, value in self._form.outputs if self._writes[index] == stage]
        wanted = {operand for value in computed for operand in self._read(value)} | {value for _, value in writes}
        for value in sorted(wanted - set(computed)):
            place = f"b{value}[i]" if value in self._ops else f"t{value}[from + i]"
            yield f"const {self.kind(value)} v{value} = {place};"
        for value in computed:
            formula, operands = self._ops[value]
            expression = self._torch_expressions[formula].format(*(f"{letter}{index}" for letter, index in operands))
            yield f"const {self.kind(value)} v{value} = {expression};"
            if value in self.in_arrays:
                yield f"b{value}[i] = v{value};"
        for index, value in writes:
            yield f"t{index}[from + i] = v{value};"

    def calls(self, stage: int) -> Iterator[str]:
        """Yield the calls of MKL after a stage."""
        for value in self._ops:
            if self._is_root(value) and self._stage[value] == stage + 1:
                (of,) = self._read(value)
                yield f"root(num, {f'b{of}' if of in self._ops else f't{of} + from'}, b{value}, {_MODE:#x});"

    def _read(self, value: int) -> list[int]:
        return [index for letter, index in self._ops[value][1] if letter == "v"]

    def _is_root(self, value: int) -> bool:
        return self._torch_expressions[self._ops[value][0]] == BY_MKL


# Inductor is not used here: `torch.compile` of a class's step, with `cpp_wrapper` and `simdlen=256`, gives other bits
# than the class. ATen rounds `a + s * b` once, Inductor's C++ rounds it twice, and users compare bits.


_COMPARED = 3001
"""Elements on which C expressions are compared with torch: full vectors, and a remainder of single elements."""

Pass = Callable[[Sequence[int], Sequence[float], int], None]
"""A compiled step: called with the address of each input, the numbers and the element count; releases the GIL."""


@cache
def compiled(form: Form) -> Pass:
    """Return the compiled pass of `form`.

    Raises TapeError if no C expression of an op gives torch's bits, or if there is no working compiler.
    """
    expressions = _torch_expressions()
    unknown = sorted({name for name, _ in form.ops if name not in expressions})
    if unknown:
        raise TapeError(f"no formula reproduces torch's {', '.join(unknown)} on this processor")
    return _loaded(function_text("update", form, expressions), ["update"])["update"]


@cache
def _torch_expressions() -> Mapping[str, str]:
    """Return the C expression of each op that gives torch's bits on this processor; found by comparison, once."""
    expressions = {name: formula.expressions[0] for name, formula in FORMULAS.items() if formula.eager is None}
    choices = [
        (name, formula, expression)
        for name, formula in FORMULAS.items()
        if formula.eager
        for expression in formula.expressions
    ]
    tried = {f"way_{index}": choice for index, choice in enumerate(choices) if choice[2] != BY_MKL or _mkl_root()}
    text = ""
    for key, (name, formula, expression) in tried.items():
        count = formula.num_tensors
        operands: list[Operand] = [("v", index) for index in range(count)]
        operands += [("s", index) for index in range(len(formula.numbers[0]))]
        form = Form(num_inputs=count, ops=((name, tuple(operands)),), outputs=((0, count),))
        text += function_text(key, form, {name: expression})
    passes = _loaded(text, list(tried))

    def is_torchs(run: Pass, formula: Formula, numbers: Sequence[float]) -> bool:
        assert formula.eager is not None
        tensors = samples(formula.num_tensors, _COMPARED)
        wanted = formula.eager(*tensors, *numbers)
        run([tensor.data_ptr() for tensor in tensors], numbers, _COMPARED)
        return is_same(tensors[0], wanted)

    for key, (name, formula, expression) in tried.items():
        if name not in expressions and all(is_torchs(passes[key], formula, numbers) for numbers in formula.numbers):
            expressions[name] = expression
    return expressions


@cache
def _mkl_root() -> int | None:
    """Return the address of MKL's square root in torch's library; None if torch was built without MKL."""
    try:
        # torch's library exports this public function of MKL. Without it, only C's sqrtf is compared with torch.
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return ctypes.cast(getattr(library, BY_MKL), ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None


def _loaded(functions: str, names: Sequence[str]) -> Mapping[str, Pass]:
    try:
        library = loaded(HEAD + functions)
    except BuildError as error:
        raise TapeError(f"there is no compiled pass: {error}") from None
    return {name: _typed(library[name]) for name in names}


def _typed(function: Any) -> Pass:
    addresses, numbers = ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_float)
    function.argtypes, function.restype = (addresses, numbers, ctypes.c_size_t, ctypes.c_void_p), None

    def run(at: Sequence[int], given: Sequence[float], count: int) -> None:
        function((ctypes.c_void_p * len(at))(*at), (ctypes.c_float * len(given))(*given), count, _mkl_root())

    return run


# ----------------------------------------------------------------------------------------------------------------------
# Run the steps of an optimizer class as compiled passes, each compared with the class before its first use.


_COMPARED = 4099
"""Elements on which a pass is compared with its class: a prime, so that every vector width has a remainder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """The recorded step of a parameter."""

    form: Form
    numbers: tuple[float, ...]
    counts: Mapping[str, Any]
    """The entries of the state after the step that are not statistics, such as `step`."""


class ClassPasses:
    """The host passes of an optimizer, compiled when a form is first seen."""

    def __init__(self) -> None:
        self.threads: HostThreads | None = None
        """The threads for the passes; None for the threads of the process without a device."""
        self._lock = threading.Lock()
        self._passes: dict[Form, Pass | None] = {}
        """The pass of each form; None if the form cannot run as a pass."""
        self._said: set[str] = set()

    def update(self, step: ClassStep, updates: Sequence[ParamUpdate], schema: StateSchema) -> list[ParamUpdate]:
        """Run the updates for which a pass exists; return the remaining updates unchanged, for the class's own step."""
        names = tuple(schema.dtypes)
        found: dict[object, Recorded | None] = {}
        ready: dict[tuple[Form, tuple[float, ...]], list[tuple[ParamUpdate, Recorded]]] = {}
        left: list[ParamUpdate] = []
        for one in updates:
            is_begun = bool(one.state) or schema.is_stateless  # else the class's own step creates the state
            key = _key_of(one, names) if is_begun else None
            if key is not None and key not in found:
                found[key] = self._recorded(step, one, names)
            recorded = None if key is None else found[key]
            if recorded is None:
                left.append(one)
            else:
                ready.setdefault((recorded.form, recorded.numbers), []).append((one, recorded))
        for (form, numbers), members in ready.items():
            run = self._passes[form]
            assert run is not None
            places = [place for place, _ in form.outputs]
            tensors = [_tensors_of(one, names) for one, _ in members]
            for indices, joined in coalesce(tensors, [0] * len(tensors)):  # once for what follows each other in memory

                def part(start: int, stop: int, given: Any = (run, numbers, joined)) -> None:
                    run, numbers, joined = given
                    run([each.data_ptr() + start * each.element_size() for each in joined], numbers, stop - start)

                (self.threads or host_threads_for()).run(joined[0].numel(), part)
                # Autograd must see the writes, but not to gradients: the class's own step does not show these either.
                written = [tensors[index][place] for index in indices for place in places if place != 1]
                torch.autograd.graph.increment_version(written)
            for (one, recorded), (_, grad, *_) in zip(members, tensors, strict=True):
                if grad is not one.grad and 1 in places:
                    one.grad.data.copy_(grad)
                for name, value in recorded.counts.items():
                    before = one.state[name]
                    is_tensor = isinstance(value, torch.Tensor) and isinstance(before, torch.Tensor)
                    if is_tensor and before.dtype == value.dtype:
                        before.copy_(value)
                    else:
                        one.state[name] = _copy_of(value)
        return left

    def _recorded(self, step: ClassStep, one: ParamUpdate, names: Sequence[str]) -> Recorded | None:
        try:
            recorded = _record(step, one, names)
            with self._lock:  # unplanned parameters are updated on the training thread beside the update thread
                if recorded.form not in self._passes:
                    self._passes[recorded.form] = None
                    run = compiled(recorded.form)
                    _compare(run, recorded.form, step, one, names)
                    self._passes[recorded.form] = run
                return recorded if self._passes[recorded.form] is not None else None
        except TapeError as error:
            because = str(error)
            if because not in self._said:
                self._said.add(because)
                log.warning(
                    "%s updates on the host by its own step, in a pass over memory for each of its ops: %s",
                    step.cls.__name__,
                    because,
                )
            return None


def _key_of(one: ParamUpdate, names: Sequence[str]) -> object:
    """Return a key that is equal for updates with the same recorded step; None if the update cannot run as a pass.

    An update can run as a pass if all tensors are fp32, dense, on the host, of equal shape and in separate memory, and
    all other state is plain numbers.
    """
    tensors = [one.weight, *(one.state.get(name) for name in names)]
    shape = one.weight.shape
    is_plain = bool(shape) and all(
        isinstance(tensor, torch.Tensor)
        and (tensor.dtype, tensor.device.type, tensor.shape) == (torch.float32, "cpu", shape)
        and tensor.is_contiguous()
        and not compat.is_lazy(tensor)
        for tensor in tensors
    )
    is_dense = one.grad.dtype == torch.float32 and one.grad.layout == torch.strided
    if not (is_plain and is_dense and one.weight.numel()):
        return None
    if len({tensor.data_ptr() for tensor in (one.grad, *tensors)}) <= len(tensors):  # two share memory
        return None
    counts = tuple((name, _comparable(value)) for name, value in one.state.items() if name not in names)
    return None if any(value is None for _, value in counts) else (shape, counts)


def _comparable(value: object) -> object:
    """Return a hashable value for a plain number, text or 0-dimensional host tensor; None for anything else."""
    if isinstance(value, torch.Tensor):
        return (value.dtype, value.item()) if not value.dim() and value.device.type == "cpu" else None
    return (type(value), value) if isinstance(value, int | float | bool | str) else None


def _record(step: ClassStep, one: ParamUpdate, names: Sequence[str]) -> Recorded:
    """Record `step` for `one` on tensors without values; `one` is not changed. Raises TapeError if that fails."""
    empty = [torch.empty(one.weight.shape, dtype=torch.float32, device="meta") for _ in range(2 + len(names))]
    recorder = Recorder(empty)
    state = {name: _copy_of(value) for name, value in one.state.items() if name not in names}
    state.update(zip(names, empty[2:], strict=True))
    dry = ParamUpdate(weight=empty[0], grad=empty[1], state=state)
    try:
        with torch.no_grad(), compat.nothing_compiles(), compat.ops_seen_by(recorder.see):
            weight, after = step.take_dry(dry)
    except TapeError:
        raise
    except Exception as error:  # a user's class may raise anything for tensors without values
        raise TapeError(f"it fails on tensors without values: {type(error).__name__}: {error}") from None
    if after.keys() != state.keys() or any(recorder.holds(after[name]) != (name in names) for name in after):
        raise TapeError("a step adds or removes entries of its state")
    counts = {name: value for name, value in after.items() if name not in names}
    form = recorder.form([weight, empty[1], *(after[name] for name in names)])
    return Recorded(form=form, numbers=tuple(recorder.numbers), counts=counts)


def _compare(run: Pass, form: Form, step: ClassStep, one: ParamUpdate, names: Sequence[str]) -> None:
    """Raise TapeError unless `run` and the class's own step give the same bits for small tensors."""
    weight, grad, *statistics = samples(2 + len(names), _COMPARED)
    statistics = [statistic.abs() for statistic in statistics]  # steps take the root of some statistics

    def small() -> ParamUpdate:
        state = {name: _copy_of(value) for name, value in one.state.items() if name not in names}
        state |= {name: statistic.clone() for name, statistic in zip(names, statistics, strict=True)}
        return ParamUpdate(weight=weight.clone(), grad=grad.clone(), state={name: state[name] for name in one.state})

    expected, actual = small(), small()
    step.take([expected])
    tensors = _tensors_of(actual, names)
    recorded = _record(step, actual, names)  # numbers of the step may depend on the shape
    if recorded.form != form:
        raise TapeError(f"its ops depend on the shape of a parameter, such as {tuple(one.weight.shape)}")
    run([tensor.data_ptr() for tensor in tensors], recorded.numbers, _COMPARED)
    if not all(map(is_same, tensors, _tensors_of(expected, names))):
        raise TapeError("its compiled pass rounds differently")


def _tensors_of(one: ParamUpdate, names: Sequence[str]) -> list[torch.Tensor]:
    return [one.weight, in_order_of(one.grad, one.weight), *(one.state[name] for name in names)]


def _copy_of(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
