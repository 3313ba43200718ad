"""DistributedDataParallel and other wrappers of torch around a model that is compiled."""

import sys
from collections.abc import Sequence

from torch import fx, nn
from torch.nn.parallel import DistributedDataParallel


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
