"""Which vector instructions Inductor writes C++ for, found without trying those that it would not choose."""

import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def best_instructions_only() -> Iterator[None]:
    """Let Inductor try instruction sets, the widest first, until one works, and not the others behind it.

    It takes the first that works, but compiles and loads a small library for each that the processor knows before: on a
    machine with AVX-512 and empty caches, six g++ runs of 9 CPU seconds where three of 3 find the same set. What the
    user asks for, by `ATEN_CPU_CAPABILITY` or `config.cpp.simdlen`, is found as usual.

    `cpu_vec_isa.valid_vec_isa_list`, which `pick_vec_isa` alone reads, `.supported_vec_isa_list`, `.x86_isa_checker`:
    torch 2.13. Gone: AttributeError at the first region.
    """
    from torch._inductor import config, cpu_vec_isa

    is_asked_for = config.cpp.simdlen is not None or os.getenv("ATEN_CPU_CAPABILITY")
    if is_asked_for or sys.platform != "linux" or platform.machine() != "x86_64":
        yield
        return
    usual = cpu_vec_isa.valid_vec_isa_list
    cpu_vec_isa.valid_vec_isa_list = _first_valid
    try:
        yield
    finally:
        cpu_vec_isa.valid_vec_isa_list = usual


def _first_valid() -> list[Any]:
    """Return the first instruction set that `valid_vec_isa_list` would, alone; each remembers whether it works."""
    from torch._inductor import cpu_vec_isa

    known = cpu_vec_isa.x86_isa_checker()
    candidates = (isa for isa in cpu_vec_isa.supported_vec_isa_list if all(flag in known for flag in str(isa).split()))
    return next(([isa] for isa in candidates if isa), [])
