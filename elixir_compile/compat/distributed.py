"""Call into torch.distributed: collectives, local tensors of DTensors, checkpoint records, DistributedDataParallel, and
the schedules of pipelines.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement


# ----------------------------------------------------------------------------------------------------------------------
# Collectives, the local tensors of DTensors, and the records of distributed checkpoints.


def flat_collectives() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return all-gather and reduce-scatter of one tensor, each called with (output, input, group=...).

    `all_gather_single` and `reduce_scatter_single` on torch 2.13, `all_gather_into_tensor` and `reduce_scatter_tensor`
    on torch 2.11 and 2.12: torch 2.13 deprecates the earlier names. Gone: AttributeError when collectives are measured.
    """
    if hasattr(torch.distributed, "all_gather_single"):
        return torch.distributed.all_gather_single, torch.distributed.reduce_scatter_single
    return torch.distributed.all_gather_into_tensor, torch.distributed.reduce_scatter_tensor


def scaled_sum(factor: float) -> Any:
    """Return the NCCL reduction that multiplies each rank's tensor by the `factor` of the rank before the sum.

    `torch.distributed._make_nccl_premul_sum`: torch 2.11 to 2.13. Gone: AttributeError when ranks weigh gradients.
    """
    return torch.distributed._make_nccl_premul_sum(factor)  # pyright: ignore[reportPrivateImportUsage]


def refuses_redistribution() -> AbstractContextManager[object]:
    """Return a context in which an op of DTensors raises RuntimeError if it would send shards between ranks.

    `torch.distributed.tensor._utils.ExplicitRedistributionContext`: torch 2.11 to 2.13. Gone: ImportError at the first
    op of a tensor in shards of unequal sizes.
    """
    from torch.distributed.tensor._utils import ExplicitRedistributionContext

    return ExplicitRedistributionContext()


def set_local_tensor(sharded: torch.Tensor, local: torch.Tensor) -> None:
    """Replace the local tensor of the DTensor `sharded` by `local`; its version counter stays.

    `local` must have the shape, dtype and values of the local tensor before.

    The member descriptor `_local_tensor`, which FSDP2 sets too: torch 2.11 to 2.13. Gone: KeyError when a parameter is
    moved.
    """
    from torch._C import _autograd

    _autograd._unsafe_set_version_counter((local,), (local_tensor(sharded)._version,))
    _local_tensor_descriptor().__set__(sharded, local)


def local_tensor(sharded: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of the DTensor `sharded` itself; `to_local()` would return a view of it.

    The member descriptor `_local_tensor`: torch 2.11 to 2.13. Gone: KeyError when a model is prepared for several
    ranks.
    """
    # By the descriptor: in a subclass with `awaited_local_tensor`, `sharded._local_tensor` waits for an update.
    return _local_tensor_descriptor().__get__(sharded)


def dtensor_like(local: torch.Tensor, like: "DTensor") -> "DTensor":
    """Return a DTensor with `local` as its local tensor and the layout of the DTensor `like`; a row of `local` may have
    another shape than a row of `like` if no axis cuts the rows.

    `DTensor.from_local` is not used because it copies to the device of the mesh.

    `_spec`, as in FSDP2: torch 2.11 to 2.13. Gone: AttributeError in `prepare` on several ranks.
    """
    from torch.distributed.tensor import DTensor

    spec = like._spec
    if spec.tensor_meta is None:
        raise TypeError("a DTensor without shape and dtype has no layout to take over")
    form = spec.tensor_meta._replace(dtype=local.dtype)
    if local.shape[1:] != local_tensor(like).shape[1:]:
        row = torch.empty((form.shape[0], *local.shape[1:]), device="meta")
        form = form._replace(shape=row.shape, stride=row.stride())
    return DTensor(local, type(spec)(spec.mesh, spec.placements, tensor_meta=form), requires_grad=False)


def dtensor_of(
    local: torch.Tensor,
    mesh: "DeviceMesh",
    placements: "Sequence[Placement]",
    shape: Sequence[int],
    stride: Sequence[int],
) -> "DTensor":
    """Return the DTensor of the full `shape` and `stride` with `local`, on whatever device, as its local tensor.

    `torch.distributed.tensor._dtensor_spec`, as in FSDP2: torch 2.11 to 2.13. Gone: ImportError in `prepare` of a
    tensor-parallel model.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    form = TensorMeta(torch.Size(shape), tuple(stride), local.dtype)
    return DTensor(local, DTensorSpec(mesh, tuple(placements), tensor_meta=form), requires_grad=False)


def joined_mesh(outer: "DeviceMesh", inner: "DeviceMesh") -> "DeviceMesh":
    """Return the mesh with the axes of `outer` followed by the axes of `inner`; both meshes are slices of one mesh.

    `DeviceMesh._concatenate`, as in FSDP2: checked on torch 2.11 and 2.13. Gone: AttributeError in `prepare` of a
    tensor-parallel model over a data axis.
    """
    return type(outer)._concatenate([outer, inner])


def strided_shard(dim: int, num_shards: int) -> "Placement":
    """Return the placement that cuts each of `num_shards` shards along `dim`, which an inner axis of the mesh makes.

    `torch.distributed.tensor.placement_types._StridedShard`, as in FSDP2: torch 2.11 to 2.13. Gone: ImportError in
    `prepare` of a tensor-parallel model over a data axis.
    """
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=num_shards)


def awaited_local_tensor(wait: Callable[[torch.Tensor], None]) -> dict[str, property]:
    """Return the members of a subclass of DTensor in which `wait` runs before torch reads the local tensor.

    A property is needed because `to_local()`, `full_tensor()` and checkpoints read the local tensor without a call of
    `__torch_function__`.

    `_local_tensor`: torch 2.11 to 2.13. Gone: a local tensor is read while the host updates it, and tests fail.
    """

    def read(sharded: torch.Tensor) -> torch.Tensor:
        wait(sharded)
        return local_tensor(sharded)

    return {"_local_tensor": property(read)}


@functools.cache
def _local_tensor_descriptor() -> Any:
    from torch.distributed.tensor import DTensor

    return vars(DTensor)["_local_tensor"]


def group_size(group: Any) -> int:
    """Return the number of ranks of the process group that a collective in a graph names.

    `torch.distributed.distributed_c10d._resolve_process_group`, which finds a group by its name: torch 2.11 to 2.13.
    Gone: KeyError at the first capture of a tensor-parallel model.
    """
    import torch.distributed.distributed_c10d as found

    named: Any = vars(found)["_resolve_process_group"]
    return (named(group) if isinstance(group, str) else group).size()


def default_timeout() -> timedelta:
    """Return the timeout of the default process group.

    `ProcessGroup._get_backend`, `._device_types`, `.options._timeout`: torch 2.11 to 2.13. Gone: AttributeError when
    the control channel opens.
    """
    world = torch.distributed.group.WORLD
    if world is None:
        raise RuntimeError("torch.distributed is not initialised")
    return world._get_backend(world._device_types[0]).options._timeout


def storage_info(file: str, offset_bytes: int, stored_bytes: int) -> Any:
    """Return the record of a distributed checkpoint that a tensor is `stored_bytes` at `offset_bytes` of `file`.

    `torch.distributed.checkpoint.filesystem._StorageInfo`, which `.metadata` files contain: torch 2.11 to 2.13. Gone:
    ImportError when a checkpoint is saved.
    """
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(file, offset_bytes, stored_bytes)


# ----------------------------------------------------------------------------------------------------------------------
# DistributedDataParallel and other wrappers of torch around a model that is compiled.


def active_ddp() -> DistributedDataParallel | None:
    """Return the DistributedDataParallel whose forward runs now, None if none does.

    `DistributedDataParallel._active_ddp_module`, which Dynamo reads too: torch 2.11 to 2.13. Gone: AttributeError at
    the first forward. It is not set under `torch._dynamo.config.optimize_ddp = "python_reducer"`, whose hooks are
    Python's.
    """
    return DistributedDataParallel._active_ddp_module


def reduced_by(ddp: DistributedDataParallel) -> Sequence[nn.Parameter]:
    """Return the parameters whose gradients `ddp` reduces.

    `DistributedDataParallel._module_parameters`, `_delay_all_reduce_params`: torch 2.11 to 2.13. Gone: AttributeError
    at the first forward inside `ddp`.
    """
    params = [*ddp._module_parameters, *ddp._delay_all_reduce_params]
    return [param for param in params if isinstance(param, nn.Parameter) and param.requires_grad]


def is_cut_by_ddp(gm: fx.GraphModule) -> bool:
    """Return whether `gm` is one of several parts into which Dynamo has cut its graph, a part for each bucket of the
    DistributedDataParallel whose forward runs. Its inputs are fake tensors, parameters too.

    `gm.compile_subgraph_reason` as `torch._dynamo.backends.distributed.DDPOptimizer` sets it: torch 2.11 to 2.13. Gone:
    such a part is taken for a graph without parameters, which an ElixirWarning says.
    """
    reason = getattr(gm, "compile_subgraph_reason", None)
    stack = [] if reason is None else reason.user_stack
    return bool(stack) and stack[-1].name == "DDPOptimizer"


def is_fully_sharded(module: nn.Module) -> bool:
    """Return whether FSDP has charge of the parameters of `module`: `fully_shard`, or `FullyShardedDataParallel`.

    `_is_fsdp_managed_module`, which both set for Dynamo: torch 2.11 to 2.13. Gone: a model of `fully_shard` is refused
    as one of DTensors.
    """
    return getattr(module, "_is_fsdp_managed_module", False) is True


def reads_fully_sharded(gm: fx.GraphModule) -> bool:
    """Return whether Dynamo's graph `gm` reads a tensor of a module that FSDP has charge of.

    `node._dynamo_source`, `Source.guard_source`, `GuardSource.LOCAL_FSDP_MODULE`: torch 2.11 to 2.13. Gone: only
    `is_fully_sharded` tells, which needs a parameter of the module.
    """
    sources = (getattr(node, "_dynamo_source", None) for node in gm.graph.find_nodes(op="placeholder"))
    kinds = (getattr(source, "guard_source", None) for source in sources)
    return any("FSDP" in getattr(kind, "name", "") for kind in kinds)


def is_in_data_parallel() -> bool:
    """Return whether this thread runs the forward of a copy that `nn.DataParallel` made, one of several.

    The module `torch.nn.parallel.parallel_apply`, in which these threads begin: torch 2.11 to 2.13. Renamed: False.
    """
    return _is_called_from("torch.nn.parallel.parallel_apply")


def is_in_pipeline() -> bool:
    """Return whether this thread runs a stage of a pipeline.

    The package `torch.distributed.pipelining`, which calls stages: torch 2.11 to 2.13. Renamed: False.
    """
    return _is_called_from("torch.distributed.pipelining.")


def _is_called_from(module: str) -> bool:
    """Return whether a function of a module of torch whose name begins with `module` waits on this thread."""
    frame = sys._getframe()
    while frame is not None and not str(frame.f_globals.get("__name__")).startswith(module):
        frame = frame.f_back
    return frame is not None


def has_communication_hook(ddp: DistributedDataParallel) -> bool:
    """Return whether the user registered a hook of `ddp` that communicates its buckets.

    `DistributedDataParallel._comm_hooks`: torch 2.11 to 2.13. Gone: AttributeError when a budget is given.
    """
    return bool(ddp._comm_hooks)


# ----------------------------------------------------------------------------------------------------------------------
# The schedules of torch.distributed.pipelining: their stages, and the order in which they run.


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledStage:
    """A stage on this rank, as its schedule runs it."""

    module: torch.nn.Module
    index: int
    is_first: bool
    is_last: bool
    num_micro_batches: int
    order: str
    """A letter for each forward (`F`), backward (`B`) or half of a backward (`S`) of the stage, in order."""
    micro_batches: Sequence[int]
    """The micro-batch of each letter of `order`."""
    num_sent: int
    """How many outputs, and gradients of inputs, the schedule holds after it has sent them: all, if it keeps the
    handles of its sends until the step ends."""
    scales: bool
    """Whether the schedule divides the gradients by the number of micro-batches after the last backward."""


def scheduled_stages(schedule: object) -> Sequence[ScheduledStage] | None:
    """Return the stages of this rank in `schedule`; None if it is no schedule of torch.distributed.pipelining.

    `PipelineScheduleSingle` and `PipelineScheduleMulti` with `_stage`, `_stages`, `_n_microbatches`, `scale_grads` and
    `pipeline_order`, whose actions have `stage_index`, `microbatch_index`, `computation_type` and `sub_actions`, of
    which the types "F", "B", "I", "W" and "OVERLAP_F_B" are read; `submod`, `stage_index`, `num_stages`, `is_first` and
    `is_last` of a stage: torch 2.11 and 2.13. Gone: AttributeError when a module is prepared for a schedule.
    """
    from torch.distributed.pipelining import schedules

    if isinstance(schedule, schedules.PipelineScheduleSingle):
        stage, number = schedule._stage, schedule._n_microbatches
        warm_up = min(number, stage.num_stages - stage.stage_index)
        is_1f1b = isinstance(schedule, schedules.Schedule1F1B)
        order = "F" * warm_up + "BF" * (number - warm_up) + "B" * warm_up if is_1f1b else "F" * number + "B" * number
        turns = [(letter, order[:at].count(letter)) for at, letter in enumerate(order)]
        return [_stage(schedule, stage, turns, number, num_sent=1 if is_1f1b else number)]
    if not isinstance(schedule, schedules.PipelineScheduleMulti):
        return None
    number = schedule._n_microbatches
    actions = [action for action in schedule.pipeline_order[schedule.rank] if action is not None]
    return [
        _stage(schedule, own, _turns(actions, own.stage_index), number, num_sent=number) for own in schedule._stages
    ]


def scheduled_runs(schedule: object) -> Sequence[tuple[int, str, int]]:
    """Return the forwards (`F`) and backward passes (`B`) of this rank in a step of `schedule`, in order: the place of
    the stage among `scheduled_stages`, the letter, and the micro-batch.

    For a schedule of which `scheduled_stages` returns the stages, and not None.
    """
    stages = scheduled_stages(schedule)
    assert stages is not None, "it is no schedule of torch"
    if len(stages) == 1:
        return [(0, *turn) for turn in zip(stages[0].order, stages[0].micro_batches, strict=True)]
    rank_order: Any = schedule
    actions = [action for action in rank_order.pipeline_order[rank_order.rank] if action is not None]
    found: list[tuple[int, str, int]] = []
    for action in actions:
        for place, own in enumerate(stages):
            found += [(place, *turn) for turn in _turns([action], own.index)]
    return found


def _stage(
    schedule: Any, stage: Any, turns: Sequence[tuple[str, int]], number: int, *, num_sent: int
) -> ScheduledStage:
    return ScheduledStage(
        module=stage.submod,
        index=stage.stage_index,
        is_first=stage.is_first,
        is_last=stage.is_last,
        num_micro_batches=number,
        order="".join(letter for letter, _ in turns),
        micro_batches=tuple(micro_batch for _, micro_batch in turns),
        num_sent=num_sent,
        scales=schedule.scale_grads,
    )


def _turns(actions: Sequence[Any], index: int) -> Sequence[tuple[str, int]]:
    """Return the letter and the micro-batch of each of `actions` on the stage `index`."""
    letters = {"F": "F", "B": "B", "I": "S", "W": "S"}
    parts = (part for action in actions for part in action.sub_actions or (action,) if part.stage_index == index)
    found = ((letters.get(part.computation_type.value, ""), part.microbatch_index) for part in parts)
    return [(letter, micro_batch) for letter, micro_batch in found if letter]
