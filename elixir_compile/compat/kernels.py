"""Compile the C++ kernels of Inductor: each different kernel once, several in one translation unit, in parallel.

Inductor runs g++ once for each kernel: 0.8 to 1.2 CPU seconds. Of these, 0.66 are spent on an empty function too, to
read the precompiled header and to link. A step in regions has many small kernels, and different regions have equal
kernels.
"""

import logging
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from elixir_compile.compat.libraries import (
    Place,
    best_instructions_only,
    command_line,
    function_at,
    known_place,
    note_place,
    source_key,
)

log = logging.getLogger("elixir_compile")

KERNELS_PER_UNIT = 4
"""Four take about 1.3 seconds together. With more kernels in one unit, cores that could compile a second would idle."""
_INCLUDE = re.compile(r"^[ \t]*#include[^\n]*\n", re.MULTILINE)
_C_KERNEL = 'extern "C"'


class Kernel:
    """A C++ kernel, compiled or not. A call waits until it is compiled."""

    def __init__(self, owner: "Kernels", argtypes: Sequence[str], source: str) -> None:
        self.argtypes = tuple(argtypes)
        self.source = source
        self.key = ""
        """The name of the kernel in the cache of code; empty until `Kernels.start`."""
        self.unit: _Unit | None = None
        self._owner = owner
        self._function: Callable[..., Any] | None = None
        self._places: list[tuple[dict[str, Any], str]] = []

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)

    @property
    def function(self) -> Callable[..., Any]:
        """The compiled kernel with Inductor's own binding."""
        if self._function is None and self.unit is None:
            self._owner.start()
        if self._function is None and self.unit is not None:
            self.unit.finish()
        if self._function is None:
            raise AssertionError(
                "every kernel that is not found in the cache is in a unit, which installs its function"
            )
        return self._function

    @property
    def includes(self) -> list[str]:
        return _INCLUDE.findall(self.source)

    def put(self, scope: dict[str, Any], name: str) -> None:
        """Set `scope[name]` to the compiled function as soon as it exists: a call then costs as much as Inductor's."""
        if self._function is None:
            self._places.append((scope, name))
        scope[name] = self._function or self

    def install(self, function: Callable[..., Any]) -> None:
        """Take `function` as the compiled form."""
        self._function = function
        for scope, name in self._places:
            scope[name] = function
        self._places.clear()


class Kernels:
    """All C++ kernels of a model. Equal kernels are a single object."""

    def __init__(self) -> None:
        self._known: dict[tuple[tuple[str, ...], str], Kernel] = {}
        self._waiting: list[Kernel] = []
        self._start_lock = threading.Lock()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Collect the C++ kernels that Inductor makes inside; each is compiled by `start`, or at its first call.

        Kernels of other threads are collected too.

        `AsyncCompile.cpp_pybinding`, `.wait`: checked on torch 2.11 and 2.13. Gone: AttributeError at the first region.
        """
        from torch._inductor.async_compile import AsyncCompile

        usual_binding, usual_wait = AsyncCompile.cpp_pybinding, AsyncCompile.wait

        def bind(compiler: Any, argtypes: Sequence[str], source_code: str) -> Kernel:
            return self._kernel(argtypes, source_code)

        def wait(compiler: Any, scope: dict[str, Any]) -> None:
            for name, value in list(scope.items()):
                if isinstance(value, Kernel):
                    value.put(scope, name)
            usual_wait(compiler, scope)

        AsyncCompile.cpp_pybinding = bind  # pyright: ignore[reportAttributeAccessIssue]  it returns no function
        AsyncCompile.wait = wait  # pyright: ignore[reportAttributeAccessIssue]  the argument has another name
        try:
            yield
        finally:
            AsyncCompile.cpp_pybinding, AsyncCompile.wait = usual_binding, usual_wait

    def _kernel(self, argtypes: Sequence[str], source: str) -> Kernel:
        form = (tuple(argtypes), source)
        if form not in self._known:
            self._known[form] = Kernel(self, argtypes, source)
            self._waiting.append(self._known[form])
        return self._known[form]

    def start(self) -> None:
        """Begin to compile the collected kernels in as few translation units as keep the cores busy; do not wait.

        A kernel that an earlier process compiled is loaded from Inductor's cache of code, even if other kernels are in
        the same library. A kernel that includes more than Inductor's own header has a unit of its own.
        """
        # A kernel that another thread calls meanwhile is in a unit, or has its function, once the lock is free.
        with self._start_lock:
            waiting = list(self._waiting)
            if waiting:
                _begin(waiting)
            del self._waiting[: len(waiting)]  # not before: without g++, each call raises the error of the first call


def _begin(waiting: Sequence[Kernel]) -> None:
    """Load the kernels `waiting` from the cache of code, and begin to compile the others in units.

    `AsyncCompile.submit`, `get_compile_threads`: checked on torch 2.11 and 2.13. Gone: ImportError or AttributeError at
    the first program.
    """
    from torch._inductor.async_compile import AsyncCompile, get_compile_threads

    num_threads = get_compile_threads()
    submit = AsyncCompile.submit if num_threads > 1 else None
    with best_instructions_only():
        how = command_line()
        for kernel in waiting:
            kernel.key = source_key(kernel.argtypes, kernel.source, how)
        new = [kernel for kernel in waiting if not _is_found(kernel)]
        plain = [kernel for kernel in new if len(kernel.includes) == 1]
        num_units = min(num_threads, -(-len(plain) // KERNELS_PER_UNIT))
        units = [plain[index::num_units] for index in range(num_units)]
        for unit in [*units, *([kernel] for kernel in new if len(kernel.includes) != 1)]:
            _Unit(unit, submit)


def _is_found(kernel: Kernel) -> bool:
    """Return whether an earlier process has compiled `kernel`; if so, install its function."""
    place = known_place(kernel.key)
    if place is None:
        return False
    try:
        kernel.install(function_at(place))
    except (ImportError, OSError, AttributeError) as error:
        log.debug("a kernel is compiled again, because %s cannot be loaded: %s", place.path, error)
        return False
    return True


class _Unit:
    """The kernels of a translation unit, compiled by a single run of g++."""

    def __init__(self, kernels: Sequence[Kernel], submit: Callable[..., Any] | None) -> None:
        """Begin to compile `kernels` by `submit`, which runs a function in another thread; at a first call if None.

        `CppPythonBindingsCodeCache.load_async`: checked on torch 2.11 and 2.13. Gone: ImportError or TypeError at the
        first program.
        """
        from torch._inductor.codecache import CppPythonBindingsCodeCache

        self._kernels = list(kernels)
        self._lock = threading.Lock()
        self._load = CppPythonBindingsCodeCache.load_async(_text_of(kernels), "cpu", submit_fn=submit)
        for kernel in kernels:
            kernel.unit = self

    def finish(self) -> None:
        """Wait until the kernels are compiled, and install them.

        `CppCompileError`: checked on torch 2.11 and 2.13. Gone: ImportError at the first call.
        """
        with self._lock:
            if not self._kernels:
                return
            self._install(self._kernels)
            self._kernels = []  # not before: each call of a kernel that does not compile raises the compiler's error

    def _install(self, kernels: Sequence[Kernel]) -> None:
        """Wait for the library of `kernels`, and give each kernel its function.

        If they do not compile together, each is compiled alone.

        `CppCompileError`: checked on torch 2.11 and 2.13. Gone: ImportError at the first call.
        """
        from torch._inductor.exc import CppCompileError

        try:
            library = self._load()
        except CppCompileError as error:
            log.debug("%d kernels do not compile in one unit, so each is compiled alone: %s", len(kernels), error)
            for kernel in kernels:
                kernel.install(_alone(kernel))
            return
        for index, kernel in enumerate(kernels):
            place = Place(library.__file__, library.key, entry_of(index))
            kernel.install(function_at(place))
            note_place(kernel.key, place)


def _alone(kernel: Kernel) -> Callable[..., Any]:
    """Return the function of `kernel`, compiled in a unit of its own, as Inductor does.

    `CppPythonBindingsCodeCache.load_pybinding`: checked on torch 2.11 and 2.13. Gone: AttributeError if kernels do not
    compile in one unit.
    """
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    return CppPythonBindingsCodeCache.load_pybinding(kernel.argtypes, kernel.source)


def _text_of(unit: Sequence[Kernel]) -> str:
    """Return one C++ source with all kernels of `unit`, each with its binding in a namespace of its own.

    The namespaces allow two kernels to define helpers of the same name. The includes of all kernels come first, and
    the precompiled header before the others.
    """
    bodies = [f"{kernel.source}\n{_binding_of(kernel, index)}" for index, kernel in enumerate(unit)]
    includes = dict.fromkeys(line.strip() for body in bodies for line in _INCLUDE.findall(body))
    spaces = [
        # `static` for `extern "C"`: a C name is the same function in every namespace.
        f"namespace elixir_{index} {{\n{_INCLUDE.sub('', body).replace(_C_KERNEL, 'static', 1)}\n}}"
        for index, body in enumerate(bodies)
    ]
    return "\n".join([*includes, *spaces, ""])


def _binding_of(kernel: Kernel, index: int) -> str:
    """Return Inductor's own binding of `kernel`, as the Python module `entry_of(index)`.

    `CppPythonBindingsCodeCache.suffix_template`, `.call_entry_function`: checked on torch 2.11 and 2.13. Gone:
    AttributeError at the first program.
    """
    from torch._inductor.codecache import CppPythonBindingsCodeCache as Bindings

    types = enumerate(kernel.argtypes)
    values = ", ".join(f"parse_arg<{argtype.replace('const ', '')}>(args, {n})" for n, argtype in types)
    return Bindings.suffix_template.format(
        arg_len=len(kernel.argtypes),
        call_entry_func=Bindings.call_entry_function.format(values),
        entry_func=entry_of(index),
        extra_parse_arg="",
    )


def entry_of(index: int) -> str:
    """Return the name of a kernel's Python module and function. Inductor itself loads `kernel` of each library."""
    return f"kernel_{index}" if index else "kernel"
