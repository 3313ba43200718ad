"""Every access to a private or version-dependent torch name: the versions it was checked on, what happens without it.

Nothing else in the package touches `torch._*`, except for public re-exports that torch documents under such a path.
"""

import copy
import functools
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
from torch import fx
from torch._C._profiler import _EventType
from torch._dynamo import OptimizedModule, pgo
from torch._dynamo.eval_frame import skip_code
from torch._functorch import config as functorch_config
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes


def trace_past_logging() -> None:
    """Let Dynamo trace past `logger.warning_once(...)`, which would break the graphs of Hugging Face's models.

    In compiled code the message is dropped. `torch._dynamo.config.ignore_logging_functions`, torch 2.11 to 2.13. Gone:
    AttributeError at the first `torch.compile`.
    """
    once = getattr(logging.Logger, "warning_once", None)  # transformers adds it to the class when it is imported
    if once is not None:
        torch._dynamo.config.ignore_logging_functions.add(once)


@contextmanager
def shapes_apart() -> Iterator[None]:
    """Keep the shapes that Dynamo sees inside from those it remembers of training: a size that changed between two
    calls of one forward becomes symbolic in the second.

    `torch._dynamo.pgo._CODE_STATE`, torch 2.11 to 2.13; `torch._dynamo.reset()` would forget the user's compiled code
    too. Gone: AttributeError at the first plan without training.
    """
    remembered = pgo._CODE_STATE
    pgo._CODE_STATE = defaultdict(pgo.CodeState)
    try:
        yield
    finally:
        pgo._CODE_STATE = remembered


def undo_compile(model: torch.nn.Module) -> torch.nn.Module:
    """Return the module that `torch.compile` wrapped, or `model` itself.

    `OptimizedModule._orig_mod`, torch 2.11 to 2.13. Gone: AttributeError for a compiled module.
    """
    return model._orig_mod if isinstance(model, OptimizedModule) else model


def uncompiled_name(name: str) -> str:
    """Return the name that a parameter has where no module around it was compiled on its own.

    `OptimizedModule._orig_mod` is a part of such names, torch 2.11 to 2.13. Gone: names keep what takes its place.
    """
    return name.replace("_orig_mod.", "")


def storage_key(tensor: torch.Tensor) -> int:
    """Return what identifies the storage of `tensor`, fake ones too: views share it.

    `UntypedStorage._cdata`, torch 2.11 to 2.13. Gone: AttributeError at the first capture.
    """
    return tensor.untyped_storage()._cdata


def evaluate_size(size: "int | torch.SymInt", values: Mapping[str, int]) -> int:
    """Return `size` with its symbols replaced by `values`, or by the hints of the capture, without adding a guard.

    `SymNode.expr` and `SymNode.hint`, torch 2.11 to 2.13. Gone: AttributeError at the first dynamic capture.
    """
    if isinstance(size, int):
        return size
    node = size.node
    at = {symbol: values[symbol.name] for symbol in node.expr.free_symbols if symbol.name in values}
    expression = node.expr.subs(at)
    return int(expression) if expression.is_number else int(node.hint)


def expression_of(size: "int | torch.SymInt") -> tuple[str, Mapping[str, int]]:
    """Return `size` as an expression, "" when it is a number, and its symbols by name with their values in the capture.

    `SymNode.expr`; `ShapeEnv.backed_var_to_val`, which older torch calls `var_to_val`. Gone: AttributeError as above.
    """
    if isinstance(size, int) or size.node.expr.is_number:
        return "", {}
    expression, env = size.node.expr, size.node.shape_env
    known = env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val
    symbols = sorted(expression.free_symbols, key=lambda symbol: symbol.name)
    return str(expression), {symbol.name: int(known[symbol]) for symbol in symbols if symbol in known}


def min_cut_partition(joint: fx.GraphModule, joint_inputs: Sequence[object], **options: Any):
    """Return torch's own forward and backward for `joint`.

    `torch._functorch.partitioners.min_cut_rematerialization_partition`, torch 2.11 to 2.13. Gone: ImportError at the
    first capture.
    """
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    return min_cut_rematerialization_partition(joint, joint_inputs, **options)


def compile_with_inductor(gm: fx.GraphModule, inputs: Sequence[Any], partition: Callable, lower: Callable) -> Callable:
    """Compile `gm` with Inductor's front passes; `partition` splits the joint graph, `lower` lowers each half.

    `compile_fx(inner_compile=..., config_patches={"custom_partitioner_fn": ...})`, torch 2.11 to 2.13;
    `donated_buffer` is off so that `retain_graph=True` works, the AOTAutograd cache is off because a hit would skip
    both callbacks. Gone: ImportError or TypeError.
    """
    import torch._inductor.config as inductor_config
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    # Inductor's code cache keys on its configuration; with a partitioner that it cannot name it would cache nothing,
    # neither of a half nor of the regions that are compiled while the step is planned, to time them.
    class Partitioner(CustomPartitionerFn):
        def __call__(self, joint: fx.GraphModule, joint_inputs: Sequence[object], **options: Any):
            with inductor_config.patch(custom_partitioner_fn=None):
                return partition(joint, joint_inputs, **options)

        def uuid(self) -> None:
            return None

    def lower_without_partitioner(graph: fx.GraphModule, examples: Sequence[Any], **options: Any) -> Callable:
        with inductor_config.patch(custom_partitioner_fn=None):
            return lower(graph, examples, **options)

    with functorch_config.patch(enable_autograd_cache=False, donated_buffer=False):
        return compile_fx(
            gm,
            list(inputs),
            inner_compile=lower_without_partitioner,
            config_patches={"custom_partitioner_fn": Partitioner()},
        )


def compile_with_aot_eager(gm: fx.GraphModule, inputs: Sequence[Any], partition: Callable, lower: Callable) -> Callable:
    """Compile `gm` without decompositions or kernels of our own, as torch's `aot_eager` does.

    `torch._dynamo.backends.common.aot_autograd`, torch 2.11 to 2.13. Gone: ImportError at the first capture.
    """
    from torch._dynamo.backends.common import aot_autograd

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

    `torch._dynamo.lookup_backend`, torch 2.11 to 2.13. Gone: AttributeError at a graph without parameters.
    """
    return torch._dynamo.lookup_backend(inner)(gm, list(inputs))


def inductor_random_ops() -> frozenset[Any]:
    """Return the ops by which Inductor draws random numbers inside the kernels that use them.

    `torch._inductor.inductor_prims`, which registers them when imported, torch 2.11 to 2.13. Gone: ImportError at the
    first capture.
    """
    from torch._inductor import inductor_prims  # noqa: F401

    return frozenset((torch.ops.prims.inductor_lookup_seed.default, torch.ops.prims.inductor_random.default))


Strides = tuple[int, ...] | None


def lower_with_inductor(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    visible: Sequence[int],
    *,
    repeated: Collection[str] = (),
    **options: Any,
) -> tuple[Callable, list[Strides]]:
    """Return the compiled form of `gm`, which takes one list of inputs and empties it, and the strides of its outputs.

    Outputs at the positions `visible` keep the strides of the graph; Inductor chooses those of the others. Nodes named
    in `repeated` share a kernel only with what reads their results. `compile_fx_inner`, `BoxedBool`, both options,
    `TracingContext.output_strides`, torch 2.11 to 2.13. Gone: ImportError or AttributeError at the first region.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.utils import BoxedBool

    gm.graph.output_node().meta["user_visible_output_idxs"] = list(visible)
    context = TracingContext(fake_mode_of(inputs))
    context.output_strides = []
    apart = _kernels_apart(frozenset(repeated)) if repeated else nullcontext()
    # A whole backward of GPT-2 124M holds 66 MB more in Inductor's order than in that of the plan. Memory that waits
    # for a later value of its size is in no plan, and how much of it would do no harm is not seen from one region.
    with tracing(context), config.patch(reorder_for_peak_memory=False, allow_buffer_reuse=False), _calls_apart(), apart:
        # No CUDA graphs: they want fixed addresses.
        compiled = compile_fx_inner(gm, list(inputs), cudagraphs=BoxedBool(False), **options)
    return compiled, context.output_strides


@contextmanager
def _calls_apart() -> Iterator[None]:
    """Call the C++ kernels of a CPU one by one where values die between them, as those of a GPU are.

    Inductor writes pointwise kernels that follow each other into one C++ function, and frees what any of them was the
    last to read when the function returns: 4 layers of width 256 held up to 3.7 % more than planned, now 1 KB.
    `CppScheduling.ready_to_flush`, `Scheduler.buffer_names_to_free`, torch 2.11 to 2.13. Gone: AttributeError at the
    first region. Inductor's cache keys on `unsafe_marked_cacheable_functions`, so code with longer functions is not
    taken from there.
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
    """Keep Inductor from computing nodes named in `repeated` and others in one kernel because both read one value.

    It would make a repeated activation and the gradient of its op at once, and both would be there before either is
    used: 4 layers of width 256 held 6.7 % more than planned. `InductorChoices.can_fuse_horizontal`,
    `V.set_choices_handler`, torch 2.11 to 2.13. Gone: AttributeError at the first region that recomputes.
    """
    from torch._inductor.virtualized import V

    usual = type(V.choices)

    def results(kernel: Any) -> set[bool]:
        """Whether what the kernel writes is repeated, not repeated, or some of both."""
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


def lower_plainly_with_inductor(gm: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable:
    """Return `gm` compiled in the contexts that the front end has set, as `torch.compile` does.

    `compile_fx_inner`, torch 2.11 to 2.13. Gone: ImportError at the first graph without parameters.
    """
    from torch._inductor.compile_fx import compile_fx_inner

    return compile_fx_inner(gm, list(inputs), **options)


def graph_break_of(gm: fx.GraphModule) -> tuple[str, int, str] | None:
    """Return file, line and reason of the graph break that ended `gm`, a graph of Dynamo; None when none did.

    `gm.compile_subgraph_reason`, torch 2.11 to 2.13. Gone: graph breaks are not logged.
    """
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break or not reason.user_stack:
        return None
    frame = reason.user_stack[-1]
    return frame.filename, frame.lineno or 0, reason.reason.strip().partition("\n")[0]


def never_compile_alone(fn: Callable) -> None:
    """Keep Dynamo from compiling `fn` as a frame of its own; in a frame that is compiled it is traced as usual.

    `torch._dynamo.eval_frame.skip_code`, torch 2.11 to 2.13. Gone: ImportError at the first import.
    """
    skip_code(fn.__code__)


def boxed(run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Mark `run` as taking one list of inputs that it empties, AOTAutograd's boxed convention.

    The attribute `_boxed_call`, torch 2.11 to 2.13. Gone: inputs live until the call returns.
    """

    def call(args: list[Any]) -> Any:
        return run(args)

    call._boxed_call = True
    return call


def report_forward(strides: Sequence[Strides]) -> None:
    """Tell AOTAutograd that the backward donates no buffer, and the strides of the forward's outputs, if they changed.

    `TracingContext.output_strides`, `.fw_metadata.bw_donated_idxs` (None would be some), torch 2.11 to 2.13. Gone: the
    backward asserts on strides that Inductor changed, or on `retain_graph=True`.
    """
    if (context := TracingContext.try_get()) is not None:
        if context.output_strides is not None:
            context.output_strides.extend(strides)
        context.fw_metadata.bw_donated_idxs = []


def fake_mode_of(values: Iterable[object]) -> Any:
    """Return the fake tensor mode of the first fake tensor among `values`.

    `torch._guards.detect_fake_mode`, torch 2.11 to 2.13. Gone: ImportError at the first import.
    """
    return detect_fake_mode(list(values))


def backward_pass_id() -> int:
    """Return the number of the backward pass that runs on this thread, -1 outside of one.

    `torch._C._current_graph_task_id`, torch 2.11 to 2.13. Gone: AttributeError at the first backward.
    """
    return torch._C._current_graph_task_id()


def after_backward(callback: Callable[[], None]) -> None:
    """Run `callback` when the current backward pass ends without an exception.

    `Variable._execution_engine.queue_callback`, as FSDP2 uses it, torch 2.11 to 2.13. Gone: AttributeError at the
    first backward.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def has_gradient_hooks(param: torch.Tensor) -> bool:
    """Whether the user hooked the gradient of leaf `param`.

    `Tensor._backward_hooks` and `Tensor._post_accumulate_grad_hooks`, torch 2.11 to 2.13. Gone: AttributeError at the
    first backward.
    """
    return bool(param._backward_hooks) or bool(param._post_accumulate_grad_hooks)


def copy_of(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of `gm`, a graph of Dynamo, that reads the same constants and can be edited and compiled.

    `node._dynamo_source`, which a copy of a graph lacks, torch 2.11 to 2.13. Gone: AOTAutograd does not ask for it.
    """
    copied = fx.GraphModule(gm, copy.deepcopy(gm.graph))
    copied.meta, copied.compile_subgraph_reason = dict(gm.meta), getattr(gm, "compile_subgraph_reason", None)
    for node, twin in zip(gm.graph.nodes, copied.graph.nodes, strict=True):
        if hasattr(node, "_dynamo_source"):
            twin._dynamo_source = node._dynamo_source
    return copied


def has_cpp_compiler() -> bool:
    """Whether Inductor would find a C++ compiler.

    `torch._inductor.cpp_builder.get_cpp_compiler`, torch 2.11 to 2.13. Gone: ImportError at the first capture.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return False
    return True


def real_tensors() -> AbstractContextManager[object]:
    """Return a context in which tensors are real while torch captures a graph around it.

    `torch.utils._python_dispatch._disable_current_modes`, torch 2.11 to 2.13. Gone: ImportError at the first import.
    """
    return _disable_current_modes()


def ops_seen_by(see: Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]) -> AbstractContextManager[object]:
    """Return a context in which `see(op, args, kwargs)` takes the place of each op of torch on this thread.

    `torch.utils._python_dispatch.TorchDispatchMode`, torch 2.11 to 2.13. Gone: ImportError at the first import.
    """

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return see(func, args, kwargs or {})

    return Seen()


def is_profiling() -> bool:
    """Whether torch.profiler is on; it cannot be started twice.

    `torch.autograd._profiler_enabled`, torch 2.11 to 2.13. Gone: AttributeError with `profile_regions` on a CPU.
    """
    return torch.autograd._profiler_enabled()


def cpu_allocations(profiler: torch.profiler.profile) -> list[tuple[int, int, int]]:
    """Return (time, address, bytes) for all that the CPU allocator did under `profiler`, in order.

    Times are ns on the clock of `time.time_ns`; bytes are below 0 where a block was freed. Only threads that
    inherited the profiler are seen: the caller's and autograd's. `profiler.kineto_results` and `_EventType`, torch
    2.11 to 2.13. Gone: AttributeError in `measure_step` on a CPU, ImportError at the first import.
    """
    found: list[tuple[int, int, int]] = []
    pending = list(profiler.profiler.kineto_results.experimental_event_tree())
    while pending:
        event = pending.pop()
        pending.extend(event.children)
        if event.tag == _EventType.Allocation and event.extra_fields.device.type == "cpu":
            found.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    return sorted(found, key=lambda allocation: allocation[0])


def drop_cublas_workspaces() -> None:
    """Free the workspaces that cuBLAS keeps; the next matrix product of each thread allocates its own again.

    `torch._C._cuda_clearCublasWorkspaces`, torch 2.11 to 2.13. Gone: AttributeError at the first capture on CUDA.
    """
    torch._C._cuda_clearCublasWorkspaces()


def fused_adamw_(
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    exp_avgs: list[torch.Tensor],
    exp_avg_sqs: list[torch.Tensor],
    max_exp_avg_sqs: list[torch.Tensor],
    steps: list[torch.Tensor],
    **hyperparameters: Any,
) -> None:
    """Count one more in `steps`, then update `params` and the statistics in place by torch's fused AdamW kernel.

    `torch._foreach_add_`, `torch._fused_adamw_`, as in torch's fused AdamW, torch 2.11 to 2.13. Gone: AttributeError.
    """
    torch._foreach_add_(steps, 1)
    torch._fused_adamw_(
        params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps, grad_scale=None, found_inf=None, **hyperparameters
    )


def flat_collectives() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return all-gather and reduce-scatter of one tensor, each called with (output, input, group=...).

    `all_gather_single` and `reduce_scatter_single` from torch 2.13 on, which deprecates `all_gather_into_tensor` and
    `reduce_scatter_tensor`, the names before. Gone: AttributeError when collectives are measured.
    """
    if hasattr(torch.distributed, "all_gather_single"):
        return torch.distributed.all_gather_single, torch.distributed.reduce_scatter_single
    return torch.distributed.all_gather_into_tensor, torch.distributed.reduce_scatter_tensor


def scaled_sum(factor: float) -> Any:
    """Return NCCL's sum of what each rank has times the `factor` of that rank.

    `torch.distributed._make_nccl_premul_sum`, torch 2.11 to 2.13. Gone: AttributeError where ranks weigh gradients.
    """
    return torch.distributed._make_nccl_premul_sum(factor)


def set_local_tensor(sharded: torch.Tensor, local: torch.Tensor) -> None:
    """Let the DTensor `sharded` hold `local`, of the shape, dtype and values of what it held, at the same version.

    The slot `_local_tensor`, torch 2.11 to 2.13, which FSDP2 sets too. Gone: KeyError when a parameter is moved.
    """
    torch._C._autograd._unsafe_set_version_counter((local,), (local_tensor(sharded)._version,))
    _local_slot().__set__(sharded, local)


def local_tensor(sharded: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of the DTensor `sharded`: the tensor itself, where `to_local()` makes a view.

    `_local_tensor`, a slot of torch 2.11 to 2.13. Gone: KeyError when a model is prepared for several ranks.
    """
    # Not by its name, which waits for an update where a subclass has `awaited_local_tensor`.
    return _local_slot().__get__(sharded)


def dtensor_like(local: torch.Tensor, like: Any) -> torch.Tensor:
    """Return the DTensor of which this rank holds `local`, laid out as the DTensor `like`.

    `_spec`, torch 2.11 to 2.13, as in FSDP2: `from_local` copies to the mesh's device. Gone: AttributeError in
    `prepare` on several ranks.
    """
    from torch.distributed.tensor import DTensor

    spec = like._spec
    form = spec.tensor_meta._replace(dtype=local.dtype)
    return DTensor(local, type(spec)(spec.mesh, spec.placements, tensor_meta=form), requires_grad=False)


def awaited_local_tensor(wait: Callable[[torch.Tensor], None]) -> dict[str, property]:
    """Return what a subclass of DTensor has so that `wait` runs before torch reads what this rank holds: `to_local()`,
    `full_tensor()` and checkpoints read it past `__torch_function__`.

    `_local_tensor`, torch 2.11 to 2.13. Gone: a part is read while the host updates it, which tests would see.
    """

    def read(sharded: torch.Tensor) -> torch.Tensor:
        wait(sharded)
        return local_tensor(sharded)

    return {"_local_tensor": property(read)}


def foreach_writes() -> frozenset[Any]:
    """Return torch's functions that write to each tensor of a list, their first argument.

    `torch._foreach_*_`, torch 2.11 to 2.13. Gone: on several ranks, clipping after an update in the backward passes.
    """
    return frozenset(getattr(torch, name) for name in dir(torch) if name.startswith("_foreach_") and name[-1] == "_")


@functools.cache
def _local_slot() -> Any:
    from torch.distributed.tensor import DTensor

    return vars(DTensor)["_local_tensor"]


def default_timeout() -> timedelta:
    """Return how long the default process group waits for a rank.

    `ProcessGroup._get_backend`, `._device_types`, `.options._timeout`, torch 2.11 to 2.13. Gone: AttributeError there.
    """
    world = torch.distributed.group.WORLD
    return world._get_backend(world._device_types[0]).options._timeout
