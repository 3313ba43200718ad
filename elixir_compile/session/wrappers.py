"""Wrappers of torch and of other libraries that train a model on several devices: followed, or refused by name.

DistributedDataParallel              followed: its reducer takes the gradients (see `runtime.distributed.reducers`)
DataParallel on several devices      refused: each forward runs copies, without parameters, in threads
fully_shard, FullyShardedDataParallel, the engine of DeepSpeed
                                     refused: they place parameters and gradients themselves
none, several ranks                  a warning: nothing averages the gradients
"""

import warnings
from collections.abc import Iterable, Sequence

from torch import distributed, fx, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from elixir_compile import compat
from elixir_compile.base.errors import InvalidOption, RanksApart, UnsupportedWrapper
from elixir_compile.base.options import Options
from elixir_compile.graph.capture.modules import executor_of
from elixir_compile.runtime.executor import Executor


def refuse_wrappers(gm: fx.GraphModule, roots: Sequence[nn.Module]) -> None:
    """Raise UnsupportedWrapper if another library places the parameters of the captured graph `gm`, which it reads from
    the modules `roots` and those in them."""
    if compat.is_in_data_parallel():
        because = "on several devices each forward runs copies of it, which have no parameters, in threads"
        raise UnsupportedWrapper(_name(roots), "DataParallel", because, _ONE_PROCESS_EACH)
    modules = [module for root in roots for module in root.modules()]
    if compat.reads_fully_sharded(gm) or any(map(compat.is_fully_sharded, modules)):
        because = "both would place its parameters and reduce its gradients"
        raise UnsupportedWrapper(_name(roots), "FSDP (fully_shard or FullyShardedDataParallel)", because)
    if any(map(_is_of_deepspeed, modules)):
        because = "both would place its parameters, gradients and optimizer state"
        raise UnsupportedWrapper(_name(roots), "the engine of DeepSpeed", because)


_ONE_PROCESS_EACH = (
    "Start one process for each device, as `torchrun --nproc-per-node <devices>` does; then DistributedDataParallel, "
    "which Trainer, Accelerate and Lightning use by themselves, can take its place"
)


def follow_ddp(executor: Executor) -> None:
    """If a DistributedDataParallel runs this forward, have it take the gradients of its parameters in `executor`.

    Raises UnsupportedWrapper if the ranks share the model already, or the wrapper casts parameters.
    """
    ddp = compat.active_ddp()
    if ddp is None or ddp in executor.reducers:
        return
    _refuse_sharing_twice(executor)
    if ddp.mixed_precision is not None:
        because = f"{ddp.mixed_precision} replaces parameters in each forward"
        instead = "Leave `mixed_precision` out, and use `torch.autocast` or the option `param_dtype`"
        raise UnsupportedWrapper(_name([ddp.module]), "DistributedDataParallel", because, instead)
    executor.reducers.add(ddp, executor.slots.values())


def _refuse_wrapping(module: nn.Module, name: str, child: nn.Module | None) -> None:
    """Raise UnsupportedWrapper if `module` is a DistributedDataParallel that gets a shared model as its `child`.

    Called when a module gets a child: the wrapper would fail later, at a broadcast of DTensors.
    """
    if isinstance(module, DistributedDataParallel) and child is not None:
        executor = executor_of(child)
        if executor is not None:
            _refuse_sharing_twice(executor)


register_module_module_registration_hook(_refuse_wrapping)


def _refuse_sharing_twice(executor: Executor) -> None:
    if executor.peers is not None:
        because = "`prepare(model, mesh=...)` has the ranks share it already, and average its gradients"
        raise UnsupportedWrapper(executor.name, "DistributedDataParallel", because, _LEAVE_OUT_ONE)


_LEAVE_OUT_ONE = (
    "Leave the wrapper out: for Accelerate, `accelerator.prepare_model(model, evaluation_mode=True)`. Or leave out "
    "`prepare`, as for the Trainer and Lightning, which wrap each model: then each rank holds all of it"
)


def check_for_ddp(executor: Executor, options: Options) -> None:
    """Raise InvalidOption if an option does not go with the DistributedDataParallel that reduces gradients."""
    if not executor.reducers:
        return
    for name, value in (("update", "in_backward"), ("reduce_dtype", "float32")):
        if getattr(options, name) == value:
            because = (
                "a DistributedDataParallel reduces gradients when the backward ends, in the dtype of the parameter"
            )
            raise InvalidOption(
                name, value, f"another value, as {because}; or `prepare(model, mesh=...)` instead of it"
            )


def warn_if_apart(executor: Executor) -> None:
    """Warn if several ranks run, and nothing shares the model of `executor` among them, nor makes it a stage of a
    pipeline, another one on each rank."""
    is_shared = executor.peers is not None or bool(executor.reducers) or compat.is_in_pipeline()
    if is_shared or not (distributed.is_available() and distributed.is_initialized()):
        return
    if distributed.get_world_size() > 1:
        warnings.warn(RanksApart(executor.name, distributed.get_world_size()), stacklevel=2)


def _name(roots: Iterable[nn.Module]) -> str:
    return next((type(root).__name__ for root in roots), "the model")


def _is_of_deepspeed(module: nn.Module) -> bool:
    """Return whether `module` is an engine of DeepSpeed, which need not be installed."""
    return any(kind.__module__.startswith("deepspeed.") for kind in type(module).__mro__)
