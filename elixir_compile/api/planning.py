"""What the planner is asked about one capture, on top of what an executor has in force."""

from collections.abc import Mapping, Sequence

import torch

from elixir_compile.api.budget import device_budget_bytes, host_budget_bytes, library_bytes, machine
from elixir_compile.capture.convert import Captured, step_graph
from elixir_compile.errors import InvalidOption
from elixir_compile.ir import Saving, StepGraph, Update
from elixir_compile.ops.masters import REST_DTYPES, has_master
from elixir_compile.ops.registry import ParamState, Slot, planned_states
from elixir_compile.options import Options
from elixir_compile.runtime.executor import Executor
from elixir_compile.search import Problem


def state_bytes_per_element(param: torch.Tensor) -> int:
    """Return the bytes of state that HybridAdamW keeps for each element of `param`; other optimizers keep less.

    Two moments in the dtype of the parameter, 8 for fp32; of one with a master in fp32, and what of the master is not
    the parameter: 10 for bfloat16, 12 for float16.
    """
    if has_master(param):
        return 2 * torch.float32.itemsize + REST_DTYPES[param.dtype].itemsize
    return 2 * param.dtype.itemsize


def graph_of(captured: Captured, executor: Executor, sizes: Mapping[str, int]) -> StepGraph:
    """Return the step with the symbols of dynamic shapes at `sizes`.

    Parameters that share a bucket in force with one of the step's are in it too: they travel along.
    """
    read = set(captured.param_names.values())
    siblings = [executor.slots[name] for name in _named(captured, executor) if name not in read]
    return step_graph(captured, sizes, siblings)


def problem_of(
    captured: Captured, graph: StepGraph, executor: Executor, options: Options, beside_bytes: int
) -> Problem:
    """Return the question; `beside_bytes` are device bytes that earlier forwards hold until their backward."""
    is_training = captured.backward is not None
    cluster = machine(executor.device, options.hardware)
    if options.hardware is not None and cluster.num_ranks > 1:
        expected = "a machine with one device: several can be planned for (elixir_compile.plan), not trained on yet"
        raise InvalidOption("hardware", options.hardware, expected)
    # A profile that was measured under torchrun knows several.
    cluster = cluster.alone()
    named = _named(captured, executor)
    slots = [executor.slots[name] for name in named]
    trained = [slot for slot in slots if is_training and slot.param.requires_grad]
    in_force = executor.buckets_in_force(for_training=is_training)
    known = planned_states([slot.param for slot in trained])
    states = states_by_name(trained, known)
    return Problem(
        name=captured.name,
        graph=graph,
        cluster=cluster,
        budget_bytes=device_budget_bytes(options, cluster, executor.device, executor.device_bytes()),
        host_budget_bytes=host_budget_bytes(options),
        state_nbytes={name: state.nbytes for name, state in states.items()},
        groups={name: state.group for name, state in states.items()},
        savings=savings_of(options),
        hybrid=bool(trained) and all(id(slot.param) in known for slot in trained),
        disk=executor.disk is not None,
        update=update_of(options),
        base_bytes=executor.device_bytes(leaving_out=named) + beside_bytes + library_bytes(executor.device),
        # All of them: a new bucket must not take the name of one that another graph uses.
        buckets=tuple(bucket for bucket, _ in in_force),
        placements=tuple(placement for _, placement in in_force),
    )


def states_by_name(trained: Sequence[Slot], known: Mapping[int, ParamState]) -> Mapping[str, ParamState]:
    """Return the param group and the bytes of optimizer state of each parameter, by its name: what its optimizer says,
    which is `known` by the parameter's id, else one group and what HybridAdamW would keep."""
    return {
        slot.name: known.get(id(slot.param)) or ParamState(0, state_bytes_per_element(slot.param) * slot.param.numel())
        for slot in trained
    }


def savings_of(options: Options) -> frozenset[Saving]:
    """Return what may happen to saved activations under the option `activations`."""
    return {
        "any": frozenset(Saving),
        "keep": frozenset({Saving.KEEP}),
        "recompute": frozenset({Saving.KEEP, Saving.RECOMPUTE}),
        "offload": frozenset({Saving.KEEP, Saving.OFFLOAD}),
    }[options.activations]


def update_of(options: Options) -> Update | None:
    """Return when HybridAdamW has to update under the option `update`; None for `auto`."""
    return None if options.update == "auto" else Update(options.update)


def may_move_back(problem: Problem, executor: Executor) -> bool:
    """Whether buckets may move in either direction once steps were taken.

    Optimizer state follows a parameter only where the hybrid optimizer owns it, or where both sides are one memory.
    """
    return problem.hybrid or not problem.state_nbytes or executor.device.type == "cpu"


def _named(captured: Captured, executor: Executor) -> list[str]:
    """Return the parameters that the step reads, and those that share a bucket in force with them."""
    read = dict.fromkeys(captured.param_names.values())
    for bucket, _ in executor.buckets_in_force(for_training=captured.backward is not None):
        if not read.keys().isdisjoint(bucket.params):
            read.update(dict.fromkeys(bucket.params))
    return list(read)
