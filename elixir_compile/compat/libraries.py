"""Find the libraries of C++ kernels from earlier processes, and the vector instructions to use."""

import json
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, NamedTuple

from elixir_compile.base.folders import write_cached


@contextmanager
def best_instructions_only() -> Iterator[None]:
    """Make Inductor stop at the first instruction set that works, the widest first.

    Inductor uses the same set, but compiles and loads a small library for each set of the processor before: on a
    machine with AVX-512 and empty caches, six g++ runs of 9 CPU seconds, while three runs of 3 CPU seconds find the
    same set. If the user names a set by `ATEN_CPU_CAPABILITY` or `config.cpp.simdlen`, nothing is changed.

    `cpu_vec_isa.valid_vec_isa_list`, which only `pick_vec_isa` reads, `.supported_vec_isa_list`, `.x86_isa_checker`:
    checked on torch 2.11 and 2.13. Gone: AttributeError at the first region.
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
    """Return the first entry of `valid_vec_isa_list` in a list. Each set remembers whether it works."""
    from torch._inductor import cpu_vec_isa

    known = cpu_vec_isa.x86_isa_checker()
    candidates = (isa for isa in cpu_vec_isa.supported_vec_isa_list if all(flag in known for flag in str(isa).split()))
    return next(([isa] for isa in candidates if isa), [])


class Place(NamedTuple):
    """The library of a compiled kernel, and its function there."""

    path: str
    """The path of the library."""
    key: str
    """Inductor's name of the library."""
    entry: str
    """The name of the Python module in the library, and of the function in that module."""


def source_key(argtypes: Sequence[str], source: str, command_line: str) -> str:
    """Return a key of the kernel and its `command_line`.

    `torch._inductor.codecache.get_hash`: checked on torch 2.11 and 2.13. Gone: ImportError at the first program.
    """
    from torch._inductor.codecache import get_hash

    return get_hash(source, extra=f"{list(argtypes)} {command_line}")


def command_line() -> str:
    """Return the g++ command line of a kernel, with `i` and `o` for the input and output files.

    `CppBuilder.get_command_line`, `CppTorchDeviceOptions`, `pick_vec_isa`, `cpp_compile_command_flags`: checked on
    torch 2.11 and 2.13. Gone: ImportError, TypeError or AttributeError at the first program.
    """
    from torch._inductor.codecache import CppPythonBindingsCodeCache
    from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    flags = CppPythonBindingsCodeCache.cpp_compile_command_flags
    option = CppTorchDeviceOptions(vec_isa=pick_vec_isa(), device_type="cpu", **flags)
    return CppBuilder(name="o", sources="i", BuildOption=option).get_command_line()


def known_place(key: str) -> Place | None:
    """Return the place where an earlier process left the kernel `key`, None if there is no such library."""
    try:
        fields = json.loads(_path(key).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    is_place = isinstance(fields, list) and len(fields) == 3 and all(isinstance(field, str) for field in fields)
    return Place(*fields) if is_place and os.path.exists(fields[0]) else None


def note_place(key: str, place: Place) -> None:
    """Record the place of the kernel `key` for later processes."""
    with suppress(OSError):  # in a read-only folder nothing is recorded, and later processes compile the kernel again
        write_cached(_path(key), json.dumps(place))


def _path(key: str) -> Path:
    """Return the file with the place of the kernel `key`, in the same cache folder as the libraries.

    `torch._inductor.runtime.cache_dir_utils.cache_dir`: checked on torch 2.11 and 2.13. Gone: ImportError at the first
    program.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir()) / "elixir_kernels" / key[1:3] / key


def function_at(place: Place) -> Callable[..., Any]:
    """Return the function at `place`.

    `CppPythonBindingsCodeCache._load_library`, which sets up the library for its bindings: checked on torch 2.11 and
    2.13. Gone: AttributeError at the first call of a kernel.
    """
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    name = f"{place.key}.{place.entry}"
    if name not in sys.modules:
        CppPythonBindingsCodeCache._load_library(place.path, place.key)
    if name not in sys.modules:
        spec = spec_from_file_location(name, place.path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{place.path} is no library of Python", name=name, path=place.path)
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[name] = module
    return getattr(sys.modules[name], place.entry)
