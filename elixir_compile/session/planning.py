"""Make a problem for the planner from a captured step, its machine and its options, with its calls, its micro-batches
and the bytes of attention kernels.
"""

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx
from torch.optim import Optimizer

from elixir_compile import compat
from elixir_compile.base.errors import ElixirWarning, InvalidOption
from elixir_compile.base.options import Options
from elixir_compile.graph.capture.captured import Captured
from elixir_compile.graph.capture.convert import step_graph, storages_behind, with_siblings, with_update_workspace
from elixir_compile.graph.capture.node_facts import tensor_of
from elixir_compile.graph.ops.optimizers import (
    has_master,
    owners_of,
    place_state,
    planned_states,
    update_work_bytes,
)
from elixir_compile.graph.ops.registry import Slot
from elixir_compile.graph.ops.shards import rows_of
from elixir_compile.ir import ONCE, Bucket, Calls, Param, Placement, Saving, StepGraph, StorageId, Update
from elixir_compile.ir.cost import is_along_data
from elixir_compile.ir.hardware import Cluster, along_data, with_devices
from elixir_compile.ir.share import Share
from elixir_compile.runtime.disk_params import file_ranges
from elixir_compile.runtime.distributed.control import Peers
from elixir_compile.runtime.distributed.ranks import Ranks
from elixir_compile.runtime.executor import Executor
from elixir_compile.search import Problem
from elixir_compile.session.machine import (
    RegionProfile,
    device_budget_bytes,
    host_budget_bytes,
    library_bytes,
    machine,
    num_sharing_host,
    scalar_bytes,
)
from elixir_compile.session.neighbours import (
    device_bytes,
    grad_dtype_of,
    outside_bytes,
    outside_host_bytes,
    state_of_hybrid_adamw,
    unplanned_bytes,
)
from elixir_compile.step.as_run import laps_at

# ----------------------------------------------------------------------------------------------------------------------
# From the option `micro_batches` and a captured step to the number of micro-batches of a problem.


def micro_batches_asked(graph: StepGraph, options: Options) -> int:
    """Return the number of micro-batches in which the laps of `graph` run; 1 if the search has to choose, as
    `search.joint.variants.plan_divided` does.

    Raises InvalidOption if the rows of the batch are not divided by the number that the user asks for. Warns
    ElixirWarning if no lap of a training step can be divided.
    """
    asked = options.micro_batches
    if isinstance(asked, str) or asked == 1 or not graph.is_training:
        return 1
    if graph.batch == 1 and not graph.batch_size:
        _warn_undivided(graph, asked, graph.undivided or "no inputs share a batch of more than one row")
        return 1
    if not graph.batch_size and graph.batch % asked:
        divisors = [str(number) for number in range(1, graph.batch + 1) if graph.batch % number == 0]
        expected = f"a divisor of the batch of {graph.batch}: {', '.join(divisors)}"
        raise InvalidOption("micro_batches", asked, expected)
    if not laps_at(graph, (), asked):
        mixing = next((op for op in graph.ops if op.mixes), None)
        found = "no op reads the batch" if mixing is None else f"{mixing.id} mixes the batch: {mixing.mixes}"
        _warn_undivided(graph, asked, found + (f" ({mixing.source})" if mixing is not None and mixing.source else ""))
        return 1
    return asked


def _warn_undivided(graph: StepGraph, asked: int, why: str) -> None:
    warnings.warn(
        f"{graph.name} runs on the whole batch instead of in {asked} micro-batches: {why}.", ElixirWarning, stacklevel=2
    )


# ----------------------------------------------------------------------------------------------------------------------
# From the calls of a step that `prepare` was given, and the captured inputs, to the calls of a problem.


def calls_of(executor: Executor, captured: Captured, *, stay: bool) -> Calls:
    """Return the calls of a step that trains `captured`; `stay` if gradients of earlier steps stay."""
    spec = executor.calls.spec
    if spec.num == 1:
        return spec
    # Inputs that are parts of larger tensors, as a batch cut into micro-batches makes them: those of other calls are
    # parts of the same tensors.
    shared: list[StorageId] = []
    for node, names in storages_behind(captured).items():
        value = node.meta.get("val")
        if node.op == "placeholder" and isinstance(value, torch.Tensor) and value.layout is torch.strided:
            nbytes, memory_bytes = value.numel() * value.element_size(), value.untyped_storage().nbytes()
            if compat.evaluate_size(nbytes, {}) < compat.evaluate_size(memory_bytes, {}):
                shared += names
    in_fp32 = executor.gradients.sums_in_fp32
    return replace(spec, sums_in_fp32=in_fp32, sums_stay=stay, shared=tuple(dict.fromkeys(shared)))


# ----------------------------------------------------------------------------------------------------------------------
# Bytes that the kernels of attention allocate for themselves, by a formula.
#
# The backward of flash attention adds up the gradient of the queries in fp32, and keeps a sum for each row:
#
#     rows of the queries, rounded up to 128  x  heads  x  (head size, rounded up to 32, + 1)  x  4 bytes
#
# FlashAttention-2, `mha_bwd`: `dq_accum` and `softmax_d`. If keys have fewer heads than queries, their gradients are
# made for each head of the queries first (`dk_expanded`, `dv_expanded`).
#
# Kernels without a formula, whose library chooses the workspace, are run once: see `cache.KnownKernels`.


_FP32_BYTES = 4
_ROWS_TOGETHER = 128
_HEAD_SIZES_TOGETHER = 32
_BACKWARDS = {
    torch.ops.aten._scaled_dot_product_flash_attention_backward.default,
    torch.ops.aten._scaled_dot_product_efficient_attention_backward.default,
}
"""Queries and keys are their second and third arguments, [batch, heads, rows, head size]."""


def workspace_bytes(captured: Captured, sizes: Mapping[str, int], profile: RegionProfile | None) -> int:
    """Return the most bytes that one region of `captured` allocates beside its tensors.

    They are the largest measured difference of `profile`, or the formula for attention if that is more. `sizes` are the
    values of the symbols of `captured`.
    """
    measured_bytes = 0 if profile is None else profile.workspace_bytes
    if captured.backward is None:
        return measured_bytes
    nodes = captured.backward.graph.nodes
    return max([measured_bytes, *(attention_bytes(node, sizes) for node in nodes if node.target in _BACKWARDS)])


def attention_bytes(node: fx.Node, sizes: Mapping[str, int]) -> int:
    """Return the bytes of the workspace of `node`, the backward of an attention kernel for accelerators."""
    queries, keys = (tensor_of(source) for source in node.args[1:3] if isinstance(source, fx.Node))
    batch, heads, rows, head_size = (compat.evaluate_size(size, sizes) for size in queries.shape)
    _, key_heads, key_rows, _ = (compat.evaluate_size(size, sizes) for size in keys.shape)
    numel = batch * heads * _rounded(rows, _ROWS_TOGETHER) * (_rounded(head_size, _HEAD_SIZES_TOGETHER) + 1)
    expanded_bytes = 0 if key_heads == heads else 2 * batch * heads * key_rows * head_size * keys.element_size()
    return _FP32_BYTES * numel + expanded_bytes


def _rounded(size: int, unit: int) -> int:
    return -(-size // unit) * unit


# ----------------------------------------------------------------------------------------------------------------------
# From a captured step, its machine and its options to a problem for the planner.
#
# `build_problem` makes every problem: of the step of a model that trains, by `problem_of`, and of a step captured
# without training, by `tools.preview`.


def cluster_of(cluster: Cluster, peers: Peers | None, options: Options) -> Cluster:
    """Return `cluster` with one device for each of `peers`.

    Raises InvalidOption if the user named a machine with another number of devices.
    """
    num_ranks = 1 if peers is None else peers.num_ranks
    if options.hardware is not None and cluster.num_ranks not in (1, num_ranks):
        expected = "a machine with one device" if num_ranks == 1 else f"a machine with {num_ranks} devices"
        raise InvalidOption("hardware", options.hardware, expected)
    if cluster.num_ranks == num_ranks:
        return cluster
    # A profile measured under torchrun has several devices.
    alone = cluster.alone()
    if num_ranks == 1:
        return alone
    num_local = num_sharing_host(peers)
    num_nodes = num_ranks // num_local if num_ranks > num_local and num_ranks % num_local == 0 else 1
    return with_devices(alone, num_ranks // num_nodes, num_nodes)


_LEAST_ALIKE = 4
"""Fewest equal layers for which regions are cut at layers. Of three layers, two would be compiled anyway: the first and
the last have neighbours of another kind."""


def graph_of(
    captured: Captured,
    executor: Executor,
    sizes: Mapping[str, int],
    step: StepGraph | None = None,
) -> StepGraph:
    """Return the step of `captured` with the symbols of dynamic shapes at `sizes`.

    It includes the siblings: parameters that the step does not read, but that are in a bucket in force with a parameter
    that it reads. `step` is the step of `captured` at the sizes of the capture, without siblings, if it is known:
    converting the nodes again takes as long as the search of a small plan.
    """
    read = set(captured.param_names.values())
    siblings = [executor.slots[name] for name in param_names_of(captured, executor) if name not in read]
    found = with_siblings(step_graph(captured, sizes) if step is None or sizes else step, siblings)
    if not found.is_training:
        return found
    trained = [executor.slots[name].param for name in read if executor.slots[name].param.requires_grad]
    work_bytes = update_work_bytes(trained, executor.device)
    return with_update_workspace(found, work_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalUsage:
    """Device bytes in use besides a graph and the parameters on the device."""

    outstanding_bytes: int = 0
    """Activations and inputs of outstanding forwards."""
    reserved_bytes: int = 0
    """Bytes left free for the state and gradients of parameters that no graph has read yet."""
    neighbour_bytes: int = 0
    """What models that run in turn with that of the graph hold (see `session.neighbours`)."""
    neighbour_host_bytes: int = 0
    """Host bytes of the buckets of these models."""
    gap_bytes: int = 0
    """What the allocator holds between tensors (see `session.allocator_gaps`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The budgets of a step, and the bytes held outside of its graph, which each budget includes."""

    budget_bytes: int
    base_bytes: int
    host_budget_bytes: int
    host_base_bytes: int = 0


def with_sums(
    params: Mapping[StorageId, Param], options: Options, *, is_alone: bool, accumulates: bool
) -> Mapping[StorageId, Param]:
    """Return `params` with the bytes of the sums of gradients over several backward passes.

    If a rank `is_alone`, sums are in fp32 for parameters with a master under the option `reduce_dtype`. Other sums are
    in the dtype of the gradients, and are counted only if the step `accumulates`.
    """
    found: dict[StorageId, Param] = {}
    for name, param in params.items():
        is_wide = is_alone and options.reduce_dtype is not None and param.has_master
        sum_nbytes = torch.float32.itemsize * param.numel if is_wide else param.grad_nbytes if accumulates else 0
        found[name] = replace(param, sum_nbytes=sum_nbytes, reduce_dtype=None if is_alone else param.reduce_dtype)
    return found


def build_problem(
    graph: StepGraph,
    cluster: Cluster,
    options: Options,
    *,
    params: Mapping[StorageId, Param],
    hybrid: bool,
    memory: Memory,
    disk: bool,
    accumulates: bool,
    moves_what_fits: bool = False,
    shares: tuple[Share, ...] = (),
    rank: int = 0,
    num_copies: int = 1,
    params_stay: bool = False,
    in_force: Collection[tuple[Bucket, Placement]] = (),
    calls: Calls = ONCE,
) -> Problem:
    """Return the problem of `graph` on `cluster`.

    `params` are as captured, without sums of gradients. `hybrid` says whether the hybrid optimizer owns all trained
    ones. `shares` are those of all ranks, if they were chosen, and `rank` is the rank that asks. If `disk`, state may
    go to disk. If the step `accumulates`, gradients of earlier steps stay. `in_force` are all buckets in force of the
    model with their placements. See `Problem` for the other arguments.
    """
    known = with_sums(params, options, is_alone=cluster.num_ranks == 1, accumulates=accumulates)
    buckets: list[Bucket] = []
    for bucket, _ in in_force:
        sums_nbytes = sum(known[name].sum_nbytes for name in bucket.params if name in known)
        # Gradients of a bucket that is in force may stay since.
        is_more = accumulates and bucket.trainable and sums_nbytes > bucket.sum_nbytes
        buckets.append(replace(bucket, sum_nbytes=sums_nbytes) if is_more else bucket)
    is_by_layer = options.compile_by == "layer" or (options.compile_by == "auto" and options.inner == "inductor")
    return Problem(
        name=graph.name,
        graph=graph,
        cluster=cluster,
        num_copies=num_copies,
        params_stay=params_stay,
        shares=shares,
        rank=rank,
        budget_bytes=memory.budget_bytes,
        host_budget_bytes=memory.host_budget_bytes - memory.host_base_bytes,
        host_base_bytes=memory.host_base_bytes,
        params=known,
        narrower_dtype=None if options.state_dtype is None else options.state_dtype.removeprefix("auto:"),
        accumulates=accumulates,
        savings=savings_of(options),
        fractions=options.fractions,
        hybrid=hybrid,
        moves_what_fits=moves_what_fits,
        disk=disk,
        update=None if options.update == "auto" else Update(options.update),
        least_alike=_LEAST_ALIKE if is_by_layer else None,
        micro_batches=micro_batches_asked(graph, options),
        base_bytes=memory.base_bytes,
        calls=calls,
        buckets=tuple(buckets),
        placements=tuple(placement for _, placement in in_force),
    )


def problem_of(
    captured: Captured, graph: StepGraph, executor: Executor, options: Options, external: ExternalUsage
) -> Problem:
    """Return the problem of `graph`, the step of `captured`, on top of `external` usage."""
    is_training = captured.backward is not None
    accumulates = is_training and executor.gradients.stay
    ranks = executor.ranks
    peers, axis = executor.peers, executor.tensor_axis
    cluster = cluster_of(machine(executor.device, options.hardware, options.host_memory), peers, options)
    cluster = cluster if axis is None else along_data(cluster, axis.num_ranks)
    joined = next((op for op in graph.ops if is_along_data(op, cluster)), None)
    if ranks is not None and joined is not None:
        ranks.note_own_collective(f"the collective {joined.id}, which sends {joined.ring}")
    own = param_names_of(captured, executor)
    slots = [executor.slots[name] for name in own]
    trained = [slot.param for slot in slots if is_training and slot.param.requires_grad]
    known = planned_states(trained)
    is_cpu = executor.device.type == "cpu"
    if is_cpu and options.device_memory is not None:
        _expect_plain_state(executor, slots, known)
    in_force = executor.buckets.in_force(for_training=is_training)
    plain_state = executor.plain_state.by_name()
    if plain_state:  # no plan places the state of these parameters
        in_force = tuple(
            (
                replace(bucket, state_nbytes=0, state_dtype=None) if set(bucket.params) <= set(plain_state) else bucket,
                home,
            )
            for bucket, home in in_force
        )
    held_bytes = bytes_beside(executor, own, options, external, is_training=is_training)
    params = _params_of(slots, ranks, known, plain_state, is_training=is_training, is_cpu=is_cpu)
    if ranks is None and options.frozen_files and options.host_memory is not None:
        params = _with_files(params, [slot for slot in slots if not params[StorageId(slot.name)].is_trained])
    memory = Memory(
        budget_bytes=device_budget_bytes(options, cluster, executor.device, device_bytes(executor), peers),
        base_bytes=held_bytes + library_bytes(executor.device),
        host_budget_bytes=host_budget_bytes(options, peers),
        # If the user names no host budget, it is the free memory, which excludes the bytes of other graphs already.
        host_base_bytes=0
        if options.host_memory is None
        else outside_host_bytes(in_force, own) + external.neighbour_host_bytes,
    )
    return build_problem(
        graph,
        cluster,
        options,
        params=params,
        hybrid=bool(trained) and place_state(trained),
        memory=memory,
        disk=executor.buckets.disk is not None,
        accumulates=accumulates,
        num_copies=1 if ranks is None else ranks.num_copies,
        shares=() if ranks is None else ranks.shares,
        rank=ranks.control.rank if ranks is not None and any(param.is_uneven for param in params.values()) else 0,
        params_stay=bool(executor.reducers),
        # Buckets of other graphs too: a new bucket must not get the name of any of them.
        in_force=in_force,
        calls=calls_of(executor, captured, stay=accumulates) if is_training else ONCE,
    )


def _expect_plain_state(executor: Executor, slots: Sequence[Slot], known: Mapping[int, Param]) -> None:
    """Let plans count the state of the parameters of `slots` that hybrid optimizers make beside them.

    It is memory of the device wherever the parameters are, because the device is a CPU. `known` has its bytes.
    """
    name_of = {id(slot.param): slot.name for slot in slots}
    for owner, own in owners_of([slot.param for slot in slots if id(slot.param) in known]).items():
        if not owner.places_state and isinstance(owner, Optimizer):
            executor.plain_state.expect(owner, {name_of[id(param)]: known[id(param)].state_nbytes for param in own})


def bytes_beside(
    executor: Executor, read: Collection[str], options: Options, external: ExternalUsage, *, is_training: bool
) -> int:
    """Return the device bytes outside of the graphs that read the parameters `read`, on top of `external` usage,
    without the workspaces of libraries."""
    nbytes = scalar_bytes(executor.slots.values(), executor.device) + external.neighbour_bytes + external.gap_bytes
    if options.device_memory is not None:  # else the budget is the free memory, which excludes them already
        nbytes += unplanned_bytes(executor)
    if not is_training:
        return nbytes + device_bytes(executor, leaving_out=read) + external.outstanding_bytes
    if executor.gradients.stay:
        nbytes += sum(param.nbytes for param in executor.gradients.unmanaged.values())
    return nbytes + outside_bytes(executor, read, external.outstanding_bytes) + external.reserved_bytes


def _params_of(
    slots: Sequence[Slot],
    ranks: Ranks | None,
    known: Mapping[int, Param],
    plain_state: Collection[str],
    *,
    is_training: bool,
    is_cpu: bool,
) -> Mapping[StorageId, Param]:
    """Return the facts about the parameters of `slots`; if `is_training`, those that need gradients are trained.

    `known` has the answers of optimizers, by the id of the parameter. A trained parameter without an optimizer gets
    group 0 and the state of HybridAdamW. The state of those named in `plain_state` counts elsewhere. If `is_cpu`, the
    device is a CPU.
    """
    found: dict[StorageId, Param] = {}
    for slot in slots:
        param = Param()
        if is_training and slot.param.requires_grad:
            param = known.get(id(slot.param)) or state_of_hybrid_adamw(slot.param)
            if slot.name in plain_state:
                param = replace(param, state_nbytes=0, narrower_nbytes=())
            dtype, reduced = slot.param.dtype, grad_dtype_of(slot, ranks)
            param = replace(
                param.works_as(is_cpu=is_cpu),
                numel=slot.numel,
                has_master=has_master(slot.param),
                grad_nbytes=reduced.itemsize * slot.numel,
                reduce_dtype=None if reduced == dtype else str(reduced).removeprefix("torch."),
            )
        if ranks is not None:
            numels, is_uneven = ranks.shard_numels_of(slot.param), rows_of(slot.param) is not None
            param = replace(param, shard_numels=numels, is_uneven=is_uneven)
        found[StorageId(slot.name)] = param
    return found


def _with_files(params: Mapping[StorageId, Param], frozen: Sequence[Slot]) -> Mapping[StorageId, Param]:
    """Return `params` with a note of those of the slots `frozen` whose memory maps a file."""
    ranges = file_ranges(slot.own for slot in frozen)
    mapped = [StorageId(slot.name) for slot, own in zip(frozen, ranges, strict=True) if own is not None]
    return {**params, **{name: replace(params[name], in_file=True) for name in mapped}}


def savings_of(options: Options) -> frozenset[Saving]:
    """Return the ways to save activations that the option `activations` allows."""
    return {
        "any": frozenset(Saving),
        "keep": frozenset({Saving.KEEP}),
        "recompute": frozenset({Saving.KEEP, Saving.RECOMPUTE}),
        "offload": frozenset({Saving.KEEP, Saving.OFFLOAD}),
    }[options.activations]


def may_move_back(problem: Problem, executor: Executor) -> bool:
    """Return whether buckets may move in either direction after the first step.

    Optimizer state follows a parameter only if the hybrid optimizer owns it, or if device and host are the same memory.
    """
    return problem.hybrid or not problem.trains or executor.device.type == "cpu"


def param_names_of(captured: Captured, executor: Executor) -> list[str]:
    """Return the names of the parameters that the step reads, and of all others in their buckets in force."""
    read = dict.fromkeys(captured.param_names.values())
    for bucket, _ in executor.buckets.in_force(for_training=captured.backward is not None):
        if not read.keys().isdisjoint(bucket.params):
            read.update(dict.fromkeys(bucket.params))
    return list(read)
