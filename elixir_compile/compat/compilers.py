"""Partition and compile a captured graph by calls into torch, by Inductor or op by op.

AOTAutograd, which both ways use, describes the inputs and outputs of its graphs by the positions of inputs in the graph
it was given.
"""

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import fx

from elixir_compile.compat.capturing import templates_when_used
from elixir_compile.compat.dynamo import fake_mode_of
from elixir_compile.compat.kernels import Kernels
from elixir_compile.compat.libraries import best_instructions_only


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
