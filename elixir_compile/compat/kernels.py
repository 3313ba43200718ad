"""Several C++ kernels of Inductor in one translation unit.

Inductor gives each kernel a g++ run of its own: 0.8 to 1.2 CPU seconds, of which 0.66 are the same for an empty
function, for reading the precompiled header and for the link. A step that is cut into regions has many small kernels.
"""

import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any

log = logging.getLogger("elixir_compile")

KERNELS_PER_UNIT = 4
"""Four take about 1.3 seconds together. More in one unit would leave cores idle that could compile a second unit."""
_INCLUDE = re.compile(r"^[ \t]*#include[^\n]*\n", re.MULTILINE)


@dataclass(slots=True)
class _Kernel:
    """A kernel that is yet to be compiled; called nevertheless, it is compiled alone."""

    argtypes: Sequence[str]
    source: str
    compiled: Callable[..., Any] | None = field(default=None, compare=False)

    def __call__(self, *args: Any) -> Any:
        if self.compiled is None:
            self.compiled = _alone(self)
        return self.compiled(*args)

    @property
    def includes(self) -> list[str]:
        return _INCLUDE.findall(self.source)


@contextmanager
def kernels_together() -> Iterator[None]:
    """Compile the C++ kernels of each graph that Inductor compiles meanwhile in few translation units.

    Which kernels share a unit depends on the graph alone, so the unit is found again in Inductor's cache of code, by
    its text. A kernel that includes more than Inductor's own header has a unit of its own, and so has each kernel of a
    unit that the compiler refuses. Another thread that compiles meanwhile gets the same kernels.

    `AsyncCompile.cpp_pybinding`, `.wait`, `.submit`, `get_compile_threads`; `CppPythonBindingsCodeCache.load_async`,
    `.suffix_template`, `.call_entry_function`, `.load_pybinding`; `CppCompileError`: torch 2.13. Gone:
    ImportError or AttributeError at the first region.
    """
    from torch._inductor.async_compile import AsyncCompile, get_compile_threads

    usual_binding, usual_wait = AsyncCompile.cpp_pybinding, AsyncCompile.wait

    def bind(compiler: Any, argtypes: Sequence[str], source_code: str) -> _Kernel:
        return _Kernel(argtypes, source_code)

    def wait(compiler: Any, scope: dict[str, Any]) -> None:
        kernels = {name: value for name, value in scope.items() if isinstance(value, _Kernel)}
        num_threads = get_compile_threads()
        scope.update(_compiled(kernels, num_threads, compiler.submit if num_threads > 1 else None))
        usual_wait(compiler, scope)

    AsyncCompile.cpp_pybinding, AsyncCompile.wait = bind, wait
    try:
        yield
    finally:
        AsyncCompile.cpp_pybinding, AsyncCompile.wait = usual_binding, usual_wait


def _compiled(
    kernels: Mapping[str, _Kernel], num_threads: int, submit: Callable[..., Any] | None
) -> dict[str, Callable[..., Any]]:
    """Return the compiled form of `kernels`, by name."""
    plain = [name for name, kernel in kernels.items() if len(kernel.includes) == 1]
    num_units = min(num_threads, -(-len(plain) // KERNELS_PER_UNIT))
    dealt = [plain[index::num_units] for index in range(num_units)]
    units = [[kernels[name] for name in names] for names in dealt]
    loading = [_begin(unit, submit) for unit in units]
    found = {name: _alone(kernel) for name, kernel in kernels.items() if name not in plain}
    for names, unit, load in zip(dealt, units, loading, strict=True):
        found |= zip(names, _loaded(unit, load), strict=True)
    return found


def _begin(unit: Sequence[_Kernel], submit: Callable[..., Any] | None) -> Callable[[], Any]:
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    return CppPythonBindingsCodeCache.load_async(_text_of(unit), "cpu", submit_fn=submit)


def _loaded(unit: Sequence[_Kernel], load: Callable[[], Any]) -> list[Callable[..., Any]]:
    from torch._inductor.exc import CppCompileError

    try:
        first = load()
    except CppCompileError as error:
        log.debug("%d kernels do not compile in one unit, so each is compiled alone: %s", len(unit), error)
        return [_alone(kernel) for kernel in unit]
    return [first.kernel, *(_function(first.__file__, first.key, index) for index in range(1, len(unit)))]


def _function(path: str, key: str, index: int) -> Callable[..., Any]:
    """Return the binding of the kernel `index` of the library at `path`, a Python module of its own in there."""
    entry = _entry(index)
    name = f"{key}.{entry}"
    if name not in sys.modules:
        spec = spec_from_file_location(name, path)
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[name] = module
    return getattr(sys.modules[name], entry)


def _alone(kernel: _Kernel) -> Callable[..., Any]:
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    return CppPythonBindingsCodeCache.load_pybinding(kernel.argtypes, kernel.source)


def _text_of(unit: Sequence[_Kernel]) -> str:
    """Return one C++ source with all kernels of `unit`, each with its binding in a namespace of its own.

    Two kernels may define helpers of one name. What they include comes first, the precompiled header before all.
    """
    bodies = [f"{kernel.source}\n{_binding_of(kernel, index)}" for index, kernel in enumerate(unit)]
    includes = dict.fromkeys(line.strip() for body in bodies for line in _INCLUDE.findall(body))
    spaces = [
        # A C name would be the same function in every namespace.
        f"namespace elixir_{index} {{\n{_INCLUDE.sub('', body).replace(_C_KERNEL, 'static', 1)}\n}}"
        for index, body in enumerate(bodies)
    ]
    return "\n".join([*includes, *spaces, ""])


_C_KERNEL = 'extern "C"'


def _binding_of(kernel: _Kernel, index: int) -> str:
    """Return Inductor's own binding of `kernel`, as the Python module `_entry(index)`."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache as Bindings

    types = enumerate(kernel.argtypes)
    values = ", ".join(f"parse_arg<{argtype.replace('const ', '')}>(args, {n})" for n, argtype in types)
    return Bindings.suffix_template.format(
        arg_len=len(kernel.argtypes),
        call_entry_func=Bindings.call_entry_function.format(values),
        entry_func=_entry(index),
        extra_parse_arg="",
    )


def _entry(index: int) -> str:
    """Return the name of the Python module of a kernel, and of its function; Inductor loads `kernel` of a library."""
    return f"kernel_{index}" if index else "kernel"
