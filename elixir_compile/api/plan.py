"""`elixir_compile.plan(model, example_inputs)`: the plan that training would get, without training."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from elixir_compile.api.preview.capture import Capture, Inputs
from elixir_compile.api.preview.few_layers import capture_model
from elixir_compile.api.preview.models import find_described
from elixir_compile.errors import InvalidOption, NoFeasiblePlan
from elixir_compile.hardware import Cluster
from elixir_compile.ir import Plan
from elixir_compile.options import Options, parse_options
from elixir_compile.problem.cache import plan_for
from elixir_compile.problem.loss import Chunks, Whole, better, is_pressed, least_short
from elixir_compile.problem.machine import device_budget_bytes, host_budget_bytes, machine
from elixir_compile.search import Problem

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def plan(
    model: "nn.Module | Callable[[], nn.Module] | PreTrainedConfig | str",
    example_inputs: Inputs,
    *,
    hardware: "Cluster | str | None" = None,
    options: "Mapping[str, object] | Options | None" = None,
    state_bytes_per_element: int | None = None,
    dynamic: bool = False,
) -> Plan:
    """Return the plan for training `model` with HybridAdamW on batches like `example_inputs`.

    No weights are allocated, no GPU is needed, nothing is compiled or run, and `model` stays as it is: it may be real,
    on `meta`, or a function that makes it; a configuration of Hugging Face, in whose dtype it is trained; or what the
    command line calls a model (`"llama-7b"`, a config file or folder), trained in bfloat16. With one of the last two,
    layers that are alike are not each captured. `example_inputs` are positional or by name, on any device; only their
    shapes and dtypes count. What the model returns decides nothing: the backward starts from every output that carries
    a gradient, as in training.

    `hardware` is a `Cluster`, a name such as `"4 x a100-40g"`, or the path of a profile; None is this machine with the
    memory that is free now. The step is captured on the device of the model, `cpu` where it has none and there is no
    GPU, whatever `hardware` is: the kernels that a plan for another machine counts are those of this one.
    `state_bytes_per_element` are bytes of optimizer state, by default what HybridAdamW keeps; 12 stands for fp32 master
    weights and moments. `dynamic` leaves the batch, the first dimension of every input, open.

    Raises NoFeasiblePlan with the shortfall, UnsupportedModel, UnknownModel, and UnknownHardware.
    """
    chosen = options if isinstance(options, Options) else parse_options(options)
    if chosen.plan is not None:
        raise InvalidOption("plan", str(chosen.plan), "None: a new plan is made here")
    cluster = named_cluster(hardware or chosen.hardware)  # before the capture, which takes seconds
    described = find_described(model, example_inputs)

    def plan_of(capture: Capture) -> Plan:
        return plan_for(*question(capture, chosen, cluster, state_bytes_per_element=state_bytes_per_element))

    def capture_with(chunks: Chunks | None) -> Capture:
        return capture_model(described, example_inputs, options=chosen, dynamic=dynamic, chunks=chunks)

    return plan_with_loss(capture_with, plan_of)


def plan_with_loss(capture_with: Callable[[Chunks | None], Capture], plan_of: Callable[[Capture], Plan]) -> Plan:
    """Return the plan of the step as it is, or of the step with its loss in chunks where that one is better.

    Raises NoFeasiblePlan where neither fits.
    """
    capture = capture_with(None)
    try:
        whole: Whole = plan_of(capture)
    except NoFeasiblePlan as error:
        whole = error
    if capture.chunks is not None and (isinstance(whole, NoFeasiblePlan) or is_pressed(whole)):
        try:
            found = better(capture.chunks, plan_of(capture_with(capture.chunks)), whole)
            if found is not None:
                return found
        except NoFeasiblePlan as error:
            least_short(whole, error)
    if isinstance(whole, NoFeasiblePlan):
        raise whole
    return whole


def named_cluster(hardware: "Cluster | str | None") -> Cluster | None:
    """Return the machine that `hardware` names, None for this one; raises what `machine` raises."""
    return machine(torch.device("cpu"), hardware) if isinstance(hardware, str) else hardware


def question(
    capture: Capture, options: Options, cluster: Cluster | None, *, state_bytes_per_element: int | None = None
) -> tuple[Problem, Options]:
    """Return what `plan_for` is asked: the problem on `cluster`, or on this machine with the memory that is free, and
    the options that go with it."""
    here = machine(capture.device) if cluster is None else cluster
    problem = capture.problem(here, options, state_bytes_per_element=state_bytes_per_element)
    if cluster is not None:
        # The memory of a profile is as good as a budget that the user gave: it does not change from run to run.
        return problem, replace(
            options, device_memory=problem.budget_bytes, host_memory=problem.host_budget_bytes, hardware=None
        )
    budget_bytes = device_budget_bytes(options, here, capture.device, capture.held_bytes)
    host_bytes = host_budget_bytes(options)
    problem = replace(problem, budget_bytes=budget_bytes, host_budget_bytes=host_bytes, moves_what_fits=False)
    return problem, options
