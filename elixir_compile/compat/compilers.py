"""Partition and compile a captured graph by calls into torch, by Inductor or op by op, and compile Inductor's C++
kernels once each, in parallel.
"""

import json
import logging
import os
import platform
import re
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import fx

from elixir_compile.base.folders import write_cached
from elixir_compile.compat.dynamo import fake_mode_of, templates_when_used

# ----------------------------------------------------------------------------------------------------------------------
# Find the libraries of C++ kernels from earlier processes, and the vector instructions to use.


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

    def first_valid() -> list[Any]:
        known = cpu_vec_isa.x86_isa_checker()
        sets = (isa for isa in cpu_vec_isa.supported_vec_isa_list if all(flag in known for flag in str(isa).split()))
        return next(([isa] for isa in sets if isa), [])  # each set remembers whether it works

    usual = cpu_vec_isa.valid_vec_isa_list
    cpu_vec_isa.valid_vec_isa_list = first_valid
    try:
        yield
    finally:
        cpu_vec_isa.valid_vec_isa_list = usual


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


# ----------------------------------------------------------------------------------------------------------------------
# Compile the C++ kernels of Inductor: each different kernel once, several in one translation unit, in parallel.
#
# Inductor runs g++ once for each kernel: 0.8 to 1.2 CPU seconds. Of these, 0.66 are spent on an empty function too, to
# read the precompiled header and to link. A step in regions has many small kernels, and different regions have equal
# kernels.


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
            form = (tuple(argtypes), source_code)
            if form not in self._known:
                self._known[form] = Kernel(self, argtypes, source_code)
                self._waiting.append(self._known[form])
            return self._known[form]

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

    def start(self) -> None:
        """Begin to compile the collected kernels in as few translation units as keep the cores busy; do not wait.

        A kernel that an earlier process compiled is loaded from Inductor's cache of code, even if other kernels are in
        the same library. A kernel that includes more than Inductor's own header has a unit of its own.

        `AsyncCompile.submit`, `get_compile_threads`: checked on torch 2.11 and 2.13. Gone: ImportError or
        AttributeError at the first program.
        """
        # A kernel that another thread calls meanwhile is in a unit, or has its function, once the lock is free.
        with self._start_lock:
            waiting = list(self._waiting)
            if not waiting:
                return
            from torch._inductor.async_compile import AsyncCompile, get_compile_threads

            num_threads = get_compile_threads()
            submit = AsyncCompile.submit if num_threads > 1 else None
            with best_instructions_only():
                how, new = command_line(), []
                for kernel in waiting:
                    kernel.key = source_key(kernel.argtypes, kernel.source, how)
                    place = known_place(kernel.key)
                    try:
                        if place is not None:
                            kernel.install(function_at(place))
                            continue
                    except (ImportError, OSError, AttributeError) as error:
                        log.debug(
                            "a kernel is compiled again, because %s cannot be loaded: %s", place and place.path, error
                        )
                    new.append(kernel)
                plain = [kernel for kernel in new if len(kernel.includes) == 1]
                num_units = min(num_threads, -(-len(plain) // KERNELS_PER_UNIT))
                units = [plain[index::num_units] for index in range(num_units)]
                for unit in [*units, *([kernel] for kernel in new if len(kernel.includes) != 1)]:
                    _Unit(unit, submit)
            del self._waiting[: len(waiting)]  # not before: without g++, each call raises the error of the first call


class _Unit:
    """The kernels of a translation unit, compiled by a single run of g++."""

    def __init__(self, kernels: Sequence[Kernel], submit: Callable[..., Any] | None) -> None:
        """Begin to compile `kernels` by `submit`, which runs a function in another thread; at a first call if None.

        In their C++ source, each kernel and its binding have a namespace of their own, which allows two kernels to
        define helpers of the same name. The includes of all kernels come first, and the precompiled header before the
        others.

        `CppPythonBindingsCodeCache.load_async`: checked on torch 2.11 and 2.13. Gone: ImportError or TypeError at the
        first program.
        """
        from torch._inductor.codecache import CppPythonBindingsCodeCache

        bodies = [f"{kernel.source}\n{_binding_of(kernel, index)}" for index, kernel in enumerate(kernels)]
        includes = dict.fromkeys(line.strip() for body in bodies for line in _INCLUDE.findall(body))
        spaces = [
            # `static` for `extern "C"`: a C name is the same function in every namespace.
            f"namespace elixir_{index} {{\n{_INCLUDE.sub('', body).replace(_C_KERNEL, 'static', 1)}\n}}"
            for index, body in enumerate(bodies)
        ]
        source = "\n".join([*includes, *spaces, ""])
        self._kernels = list(kernels)
        self._lock = threading.Lock()
        self._load = CppPythonBindingsCodeCache.load_async(source, "cpu", submit_fn=submit)
        for kernel in kernels:
            kernel.unit = self

    def finish(self) -> None:
        """Wait until the kernels are compiled, and install them. If they do not compile together, each is compiled
        alone, as Inductor does.

        `CppCompileError`, `CppPythonBindingsCodeCache.load_pybinding`: checked on torch 2.11 and 2.13. Gone:
        ImportError at the first call, and AttributeError if kernels do not compile in one unit.
        """
        from torch._inductor.codecache import CppPythonBindingsCodeCache
        from torch._inductor.exc import CppCompileError

        with self._lock:
            if not self._kernels:
                return
            try:
                library = self._load()
            except CppCompileError as error:
                num = len(self._kernels)
                log.debug("%d kernels do not compile in one unit, so each is compiled alone: %s", num, error)
                for kernel in self._kernels:
                    kernel.install(CppPythonBindingsCodeCache.load_pybinding(kernel.argtypes, kernel.source))
            else:
                for index, kernel in enumerate(self._kernels):
                    place = Place(library.__file__, library.key, entry_of(index))
                    kernel.install(function_at(place))
                    note_place(kernel.key, place)
            self._kernels = []  # not before: each call of a kernel that does not compile raises the compiler's error


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


# ----------------------------------------------------------------------------------------------------------------------
# Partition and compile a captured graph by calls into torch, by Inductor or op by op.
#
# AOTAutograd, which both ways use, describes the inputs and outputs of its graphs by the positions of inputs in the
# graph it was given.


def min_cut_partition(joint: fx.GraphModule, joint_inputs: Sequence[object], **options: Any):
    """Return the forward and the backward into which torch's own partitioner splits `joint`.

    `torch._functorch.partitioners.min_cut_rematerialization_partition`: torch 2.11 to 2.13. Gone: ImportError at the
    first capture.
    """
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    return min_cut_rematerialization_partition(joint, joint_inputs, **options)


def compile_with_inductor(gm: fx.GraphModule, inputs: Sequence[Any], partition: Callable, lower: Callable) -> Callable:
    """Compile `gm` with Inductor's front passes; `partition` splits the joint graph, `lower` lowers each half.

    `donated_buffer` is off so that `retain_graph=True` works. The AOTAutograd cache is off because a hit would skip
    both callbacks.

    `compile_fx(inner_compile=..., config_patches={"custom_partitioner_fn": ...})`: torch 2.11 to 2.13. Gone:
    ImportError or TypeError at the first capture.
    """
    import torch._inductor.config as inductor_config
    from torch._functorch import config as functorch_config

    with templates_when_used():
        from torch._inductor.compile_fx import compile_fx
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    # Inductor's code cache keys on its configuration. With a partitioner that it cannot name it would cache nothing:
    # no half, and no region that is compiled for its time while the step is planned.
    class Partitioner(CustomPartitionerFn):
        def __call__(self, joint: fx.GraphModule, joint_inputs: Sequence[object], **options: Any):
            with inductor_config.patch(custom_partitioner_fn=None):
                return partition(joint, joint_inputs, **options)

        def uuid(self) -> None:
            return None

    def lower_without_partitioner(graph: fx.GraphModule, examples: Sequence[Any], **options: Any) -> Callable:
        with inductor_config.patch(custom_partitioner_fn=None):
            return lower(graph, examples, **options)

    # Inductor times whether products are faster with padding, before there is a plan that could leave room for it.
    timed = timed_within(0)
    with functorch_config.patch(enable_autograd_cache=False, donated_buffer=False), best_instructions_only(), timed:
        compiled = compile_fx(
            gm,
            list(inputs),
            inner_compile=lower_without_partitioner,  # pyright: ignore[reportArgumentType]  it is only called
            config_patches={"custom_partitioner_fn": Partitioner()},
        )
    return cast("Callable[..., Any]", compiled)  # of a graph for one process; another mode returns its source


def compile_with_aot_eager(gm: fx.GraphModule, inputs: Sequence[Any], partition: Callable, lower: Callable) -> Callable:
    """Compile `gm` to single ATen ops, without decompositions, as torch's `aot_eager` does.

    `torch._dynamo.backends.common.aot_autograd`: torch 2.11 to 2.13. Gone: ImportError at the first capture.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch import config as functorch_config

    with functorch_config.patch(enable_autograd_cache=False, donated_buffer=False):
        return aot_autograd(
            fw_compiler=lambda graph, examples: lower(graph, examples),
            bw_compiler=lambda graph, examples: lower(graph, examples, is_backward=True),
            inference_compiler=lambda graph, examples: lower(graph, examples, is_inference=True),
            partition_fn=partition,
            keep_inference_input_mutations=True,
        )(gm, list(inputs))


def compile_plainly(gm: fx.GraphModule, inputs: Sequence[Any], inner: str) -> Callable:
    """Compile `gm` with torch's own backend `inner`, `inductor` or `aot_eager`.

    `torch._dynamo.lookup_backend`: torch 2.11 to 2.13. Gone: AttributeError at the first graph without parameters.
    """
    return torch._dynamo.lookup_backend(inner)(gm, list(inputs))


def inductor_random_ops() -> frozenset[Any]:
    """Return the ops by which Inductor draws random numbers inside a kernel.

    `torch._inductor.inductor_prims`, which registers the ops on import: torch 2.11 to 2.13. Gone: ImportError at the
    first capture.
    """
    from torch._inductor import inductor_prims  # noqa: F401

    return frozenset((torch.ops.prims.inductor_lookup_seed.default, torch.ops.prims.inductor_random.default))


Strides = tuple[int, ...] | None


def lower_with_inductor(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    visible: Sequence[int],
    kernels: Kernels,
    *,
    repeated: Collection[str] = (),
    **options: Any,
) -> tuple[Callable, list[Strides]]:
    """Return the compiled form of `gm`, which takes one list of inputs and empties it, and the strides of its outputs.

    Outputs at the positions `visible` keep the strides of the graph; Inductor chooses the strides of the others.
    `kernels` takes the C++ kernels and compiles them when it starts, or at their first call. Nodes named in `repeated`
    share a kernel only with readers of their results.

    `compile_fx_inner`, `BoxedBool`, the options `reorder_for_peak_memory` and `allow_buffer_reuse`,
    `TracingContext.output_strides`: torch 2.11 to 2.13. Gone: ImportError or AttributeError at the first region.
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.utils import BoxedBool

    gm.graph.output_node().meta["user_visible_output_idxs"] = list(visible)
    context = TracingContext(fake_mode_of(inputs))
    context.output_strides = []
    apart = _kernels_apart(frozenset(repeated)) if repeated else nullcontext()
    # The backward of GPT-2 124M in one region holds 66 MB more in Inductor's order than in the order of the plan.
    # With buffer reuse, memory stays allocated until a later value of its size takes it, and plans do not count it.
    order = config.patch(reorder_for_peak_memory=False, allow_buffer_reuse=False)
    with tracing(context), order, _calls_apart(), kernels.gathered(), best_instructions_only(), apart:
        # No CUDA graphs: they need inputs at fixed addresses.
        compiled = compile_fx_inner(gm, list(inputs), cudagraphs=BoxedBool(False), **options)
    return compiled, context.output_strides


@contextmanager
def _calls_apart() -> Iterator[None]:
    """Make Inductor end a C++ function on the CPU if a value dies between two kernels, as on a GPU.

    Inductor writes successive pointwise kernels into one C++ function, and frees a value that one of the kernels reads
    last only when the function returns: 4 layers of width 256 held up to 3.7 % more than planned, now 1 KB more. The
    entry in `unsafe_marked_cacheable_functions` is part of Inductor's cache key, so code that was compiled without
    this context is not taken from the cache.

    `CppScheduling.ready_to_flush`, `Scheduler.buffer_names_to_free`: torch 2.11 to 2.13. Gone: AttributeError at the
    first region.
    """
    from torch._inductor import config
    from torch._inductor.codegen.cpp import CppScheduling
    from torch._inductor.virtualized import V

    usual = CppScheduling.ready_to_flush

    def ready_to_flush(self: Any) -> bool:
        dying = self.scheduler.buffer_names_to_free - V.graph.removed_buffers
        return bool(dying) or usual(self)

    keys = {**config.unsafe_marked_cacheable_functions, "elixir_compile.calls_apart": "1"}
    CppScheduling.ready_to_flush = ready_to_flush
    try:
        with config.patch(unsafe_marked_cacheable_functions=keys):
            yield
    finally:
        CppScheduling.ready_to_flush = usual


def _kernels_apart(repeated: frozenset[str]) -> AbstractContextManager[Any]:
    """Keep Inductor from fusing nodes named in `repeated` with other nodes only because both read the same value.

    Inductor would compute a recomputed activation and the gradient of its op in one kernel, and both would be live
    before either is read: 4 layers of width 256 held 6.7 % more than planned.

    `InductorChoices.can_fuse_horizontal`, `V.set_choices_handler`: torch 2.11 to 2.13. Gone: AttributeError at the
    first region that recomputes.
    """
    from torch._inductor.virtualized import V

    usual = type(V.choices)

    def results(kernel: Any) -> set[bool]:
        """Return {True} if all results of the kernel are repeated, {False} if none is, both if some are."""
        buffers = (node.node for node in kernel.get_nodes())
        nodes = (None if buffer is None else buffer.get_origin_node() for buffer in buffers)
        return {node is not None and node.name in repeated for node in nodes}

    class Apart(usual):
        @staticmethod
        def can_fuse_horizontal(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
            first, second = results(node1), results(node2)
            mixes = first != second and {True} in (first, second)
            return not mixes and usual.can_fuse_horizontal(scheduler, node1, node2, shared_data_score)

    return V.set_choices_handler(Apart())


_timing = threading.RLock()  # of one benchmarker for all threads


@contextmanager
def timed_within(nbytes: int) -> Iterator[None]:
    """Let Inductor allocate at most `nbytes` to time kernels that it chooses among, as it does at their first run.

    It writes a buffer as large as the device's second-level cache before each run, so that inputs come from memory: 50
    MiB on an H100, 72 on an RTX 4090, which a plan that fills its budget has not. With a smaller buffer the inputs of
    small kernels may be in the cache for all choices alike.

    `benchmarking.benchmarker`, whose attribute `L2_cache_size` holds the bytes once they were asked for: torch 2.11 to
    2.13. Gone: kernels are timed with a full buffer.
    """
    from torch._inductor.runtime import benchmarking

    benchmarker = getattr(benchmarking, "benchmarker", None)
    usual_bytes = getattr(benchmarker, "L2_cache_size", None) if torch.cuda.is_available() else None
    if benchmarker is None or usual_bytes is None:
        yield
        return
    with _timing:
        benchmarker.__dict__["L2_cache_size"] = min(usual_bytes, nbytes)
        try:
            yield
        finally:
            benchmarker.__dict__["L2_cache_size"] = usual_bytes


def lower_plainly_with_inductor(gm: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable:
    """Return `gm` compiled in the contexts of the front end, as `torch.compile` does.

    `compile_fx_inner`: torch 2.11 to 2.13. Gone: ImportError at the first graph without parameters.
    """
    from torch._inductor.compile_fx import compile_fx_inner

    return compile_fx_inner(gm, list(inputs), **options)


def boxed(run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Mark `run` as a function of one list of inputs that it empties, AOTAutograd's boxed convention.

    The attribute `_boxed_call`: torch 2.11 to 2.13. Gone: inputs live until the call returns.
    """

    def call(args: list[Any]) -> Any:
        return run(args)

    call.__dict__["_boxed_call"] = True
    return call


def report_forward(strides: Sequence[Strides]) -> None:
    """Tell AOTAutograd that the backward donates no buffer, and the `strides` of the forward's outputs.

    `strides` is empty if the strides are those of the graph.

    `TracingContext.output_strides`, `.fw_metadata.bw_donated_idxs` (with None the backward may donate buffers): torch
    2.11 to 2.13. Gone: the backward asserts on strides that Inductor changed, or on `retain_graph=True`.
    """
    from torch._guards import TracingContext

    if (context := TracingContext.try_get()) is not None:
        if context.output_strides is not None:
            context.output_strides.extend(strides)
        if context.fw_metadata is not None:
            context.fw_metadata.bw_donated_idxs = []


def has_cpp_compiler() -> bool:
    """Return whether Inductor finds a C++ compiler.

    `torch._inductor.cpp_builder.get_cpp_compiler`: torch 2.11 to 2.13. Gone: ImportError at the first capture.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return False
    return True


def inputs_at(graph: fx.Graph, positions: Collection[int]) -> dict[fx.Node, int]:
    """Return the inputs of AOTAutograd's `graph` with one of `positions` in the graph it was made from.

    Each input comes with its position. Inputs of a backward graph have no position.

    `node.meta["desc"]`, `PlainAOTInput.idx`: checked on torch 2.11 and 2.13. Gone: ImportError at the first capture.
    """
    from torch._functorch._aot_autograd.descriptors import PlainAOTInput

    found = {node: node.meta.get("desc") for node in (graph.find_nodes(op="placeholder") if positions else ())}
    return {
        node: description.idx
        for node, description in found.items()
        if isinstance(description, PlainAOTInput) and description.idx in positions
    }


def gradients_at(graph: fx.Graph, positions: Collection[int]) -> dict[int, int]:
    """Return the indices of gradients of the inputs at `positions` among the outputs of joint `graph`.

    Each index comes with the position of the input.

    `node.meta["desc"]` of the output, `GradAOTOutput.grad_of`: checked on torch 2.11 and 2.13. Gone: ImportError or
    KeyError at the first capture.
    """
    from torch._functorch._aot_autograd.descriptors import GradAOTOutput, PlainAOTInput

    described: list[Any] = list(graph.output_node().meta["desc"]) if positions else []
    return {
        place: description.grad_of.idx
        for place, description in enumerate(described)
        if isinstance(description, GradAOTOutput)
        and isinstance(description.grad_of, PlainAOTInput)
        and description.grad_of.idx in positions
    }


def gradients_in_subclasses_at(graph: fx.Graph, positions: Collection[int]) -> set[int]:
    """Return those of `positions` at which an input has a tensor subclass for its gradient.

    Joint `graph` returns the tensors inside.

    `node.meta["desc"]` of the output, `SubclassGetAttrAOTOutput.base`, `GradAOTOutput.grad_of`: checked on torch 2.11
    and 2.13. Gone: ImportError or KeyError at the first capture.
    """
    from torch._functorch._aot_autograd.descriptors import GradAOTOutput, PlainAOTInput, SubclassGetAttrAOTOutput

    found: set[int] = set()
    for description in graph.output_node().meta["desc"] if positions else ():
        outer = description
        while isinstance(outer, SubclassGetAttrAOTOutput):
            outer = outer.base
        if outer is not description and isinstance(outer, GradAOTOutput) and isinstance(outer.grad_of, PlainAOTInput):
            found.add(outer.grad_of.idx)
    return found & set(positions)


def returned_writes(graph: fx.Graph) -> set[object]:
    """Return the descriptions of the inputs whose new values joint `graph` returns, to be written to them afterwards.

    `node.meta["desc"]`, `InputMutationAOTOutput.mutated_input`: checked on torch 2.11 and 2.13. Gone: ImportError or
    KeyError at the first capture.
    """
    from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput

    described: list[Any] = graph.output_node().meta["desc"]
    return {one.mutated_input for one in described if isinstance(one, InputMutationAOTOutput)}


def inputs_that_must_be_real(graph: fx.Graph) -> set[int]:
    """Return the positions of the inputs that AOTAutograd's forward `graph` writes, or of which it returns views.

    The compiled code reads these inputs themselves, so the caller cannot pass other tensors in their place. Called
    while AOTAutograd compiles `graph`. The positions are those in the graph from which it was made: a tensor subclass
    before an input moves the input, because the tensors inside are inputs each.

    `TracingContext.fw_metadata.input_info`, `.output_info`, `OutputType`, `PlainAOTInput.idx`: checked on torch 2.11
    and 2.13. Gone: ImportError or AttributeError at the first capture.
    """
    from torch._functorch._aot_autograd.descriptors import PlainAOTInput
    from torch._functorch._aot_autograd.schemas import OutputType
    from torch._guards import TracingContext

    metadata: Any = TracingContext.get().fw_metadata
    written = {
        position for position, info in enumerate(metadata.input_info) if info.mutates_data or info.mutates_metadata
    }
    views = (OutputType.alias_of_input, OutputType.is_input)
    real = written | {info.base_idx for info in metadata.output_info if info.output_type in views}
    given = [node.meta.get("desc") for node in graph.find_nodes(op="placeholder")]
    return {given[place].idx for place in real if isinstance(given[place], PlainAOTInput)}
