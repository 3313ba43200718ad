"""Turn recorded steps into C code, compile it with the system's compiler and keep it in the cache."""

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from elixir_compile.optim.generic.formula import BY_MKL, FORMULAS, Formula, is_same, samples
from elixir_compile.optim.generic.tape import Form, Operand, TapeError
from elixir_compile.optim.host.build import BuildError, loaded

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
        self._writes = {index: self._written_in(index, value) for index, value in form.outputs}
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

    def _written_in(self, index: int, value: int) -> int:
        """Return the stage that writes `value` to the input `index`: not before any stage that reads the input."""
        readers = [other for other in self._ops if index in self._read(other)]
        return max(self._stage[reader] for reader in (value, *readers))


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
    text = (
        function_text(key, _form_of(name, formula), {name: expression})
        for key, (name, formula, expression) in tried.items()
    )
    passes = _loaded("".join(text), list(tried))
    for key, (name, formula, expression) in tried.items():
        if name not in expressions and all(_is_torchs(passes[key], formula, numbers) for numbers in formula.numbers):
            expressions[name] = expression
    return expressions


def _form_of(name: str, formula: Formula) -> Form:
    operands: list[Operand] = [("v", index) for index in range(formula.num_tensors)]
    operands += [("s", index) for index in range(len(formula.numbers[0]))]
    return Form(num_inputs=formula.num_tensors, ops=((name, tuple(operands)),), outputs=((0, formula.num_tensors),))


def _is_torchs(run: Pass, formula: Formula, numbers: Sequence[float]) -> bool:
    assert formula.eager is not None
    tensors = samples(formula.num_tensors, _COMPARED)
    wanted = formula.eager(*tensors, *numbers)
    run([tensor.data_ptr() for tensor in tensors], numbers, _COMPARED)
    return is_same(tensors[0], wanted)


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
