"""Tapes as functions: their C compiled by the system's compiler, from the cache or into it, and loaded.

Inductor would take the same ops, and does not get them; see [Note: No Inductor here].
"""

# [Note: No Inductor here] `torch.compile` of the step of a class, with `cpp_wrapper` and `simdlen=256`, gives other
# bits than the class: ATen rounds `a + s * b` once where Inductor's C++ rounds twice, and users compare bits.

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from elixir_compile.optim.host.build import BuildError, loaded
from elixir_compile.optim.host.emit import HEAD, function_text
from elixir_compile.optim.host.formula import BY_MKL, FORMULAS, Formula, is_same, samples
from elixir_compile.optim.host.tape import Form, Operand, TapeError

_COMPARED = 3001
"""Elements on which ways are compared: blocks of every vector width and a rest that torch computes one by one."""

Pass = Callable[[Sequence[int], Sequence[float], int], None]
"""Called with the address of each input, the numbers, and how many elements; releases the GIL."""


@cache
def compiled(form: Form) -> Pass:
    """Return the pass of a tape.

    Raises TapeError where an op has no way that is torch's, or where there is no compiler.
    """
    ways = _ways()
    unknown = sorted({name for name, _ in form.ops if name not in ways})
    if unknown:
        raise TapeError(f"no formula reproduces torch's {', '.join(unknown)} on this processor")
    return _loaded(function_text("update", form, ways), ["update"])["update"]


@cache
def _ways() -> Mapping[str, str]:
    """Return by op the expression that gives torch's bits."""
    ways = {name: formula.ways[0] for name, formula in FORMULAS.items() if formula.eager is None}
    choices = [(name, formula, way) for name, formula in FORMULAS.items() if formula.eager for way in formula.ways]
    tried = {f"way_{index}": choice for index, choice in enumerate(choices) if choice[2] != BY_MKL or _mkl_root()}
    text = (function_text(key, _form_of(name, formula), {name: way}) for key, (name, formula, way) in tried.items())
    passes = _loaded("".join(text), list(tried))
    for key, (name, formula, way) in tried.items():
        if name not in ways and all(_is_torchs(passes[key], formula, numbers) for numbers in formula.numbers):
            ways[name] = way
    return ways


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
    """Return the address of the square root of the MKL that torch was built with; None where it was not."""
    try:
        # A public function of MKL, which torch's library exports; gone, roots are C's, or have no way.
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
