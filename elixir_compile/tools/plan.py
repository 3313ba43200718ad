"""`elixir_compile.plan(model, example_inputs)`: the plan of a training step, without training."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from elixir_compile.base.errors import InvalidOption
from elixir_compile.base.options import Options, parse_options
from elixir_compile.ir import Plan
from elixir_compile.ir.hardware import Cluster
from elixir_compile.search import Problem
from elixir_compile.search.joint.variants import Chunks, LossAttempt, with_chosen_loss
from elixir_compile.search.question import question_of
from elixir_compile.session.cache import plan_for
from elixir_compile.session.machine import device_budget_bytes, host_budget_bytes, machine
from elixir_compile.session.saved import save_plan
from elixir_compile.tools.preview.capture import Capture, Inputs
from elixir_compile.tools.preview.few_layers import capture_model
from elixir_compile.tools.preview.models import find_described

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
    save: "str | Path | None" = None,
) -> Plan:
    """Return the plan for training `model` with HybridAdamW on batches like `example_inputs`.

    No weights are allocated, no GPU is needed, nothing is compiled or run, and `model` stays as it is.

    `model` may be a module, with weights or on `meta`, or a function that returns a module; a configuration of Hugging
    Face, trained in its dtype; or a model of the command line (`"llama-7b"`, a config file or folder), trained in
    bfloat16. For a configuration or a name, equal layers are captured only a few times. `example_inputs` are positional
    or by name, on any device; only their shapes and dtypes count. The backward starts from every output that requires a
    gradient, as in training.

    `hardware` is a `Cluster`, a name such as `"4 x a100-40g"`, or the path of a profile; None is this machine with its
    free memory. The step is always captured on the device of the model; if the model has none, on the GPU if there is
    one, else on `cpu`. So a plan for another machine counts the kernels of this machine.

    `state_bytes_per_element` are the bytes of optimizer state for each element of a trained parameter, by default of
    HybridAdamW; 12 stands for fp32 master weights and moments. If `dynamic`, the batch, the first dimension of every
    input, is symbolic. `save` is a file for the plan, to be written with its question beside it, see `save_plan`.

    Raises NoFeasiblePlan with the missing bytes, UnsupportedModel, UnknownModel, and UnknownHardware.

    Example:
        plan = elixir.plan(model, [batch], hardware="a100-40g", options={"device_memory": "1GiB"})
        print(plan.prediction.step_s, plan.prediction.device_peak_bytes, plan.bound_s)
    """
    chosen = options if isinstance(options, Options) else parse_options(options)
    made, problem = plan_and_problem(
        model,
        example_inputs,
        hardware=hardware,
        options=chosen,
        state_bytes_per_element=state_bytes_per_element,
        dynamic=dynamic,
    )
    if save is not None:
        save_plan(made, save, question_of(problem, chosen))
    return made


def plan_and_problem(
    model: "nn.Module | Callable[[], nn.Module] | PreTrainedConfig | str",
    example_inputs: Inputs,
    *,
    options: Options,
    hardware: "Cluster | str | None" = None,
    state_bytes_per_element: int | None = None,
    dynamic: bool = False,
) -> tuple[Plan, Problem]:
    """Return what `plan` returns for the same arguments, and the problem that it solves.

    Raises the errors of `plan`.
    """
    if options.plan is not None:
        raise InvalidOption("plan", str(options.plan), "None: a new plan is made here")
    cluster = named_cluster(hardware or options.hardware)  # before the capture, which takes seconds
    described = find_described(model, example_inputs)

    def ask(capture: Capture, options: Options) -> tuple[Problem, Options]:
        return question(capture, options, cluster, state_bytes_per_element=state_bytes_per_element)

    def capture_with(chunks: Chunks | None) -> Capture:
        return capture_model(described, example_inputs, options=options, dynamic=dynamic, chunks=chunks)

    return plan_with_loss(capture_with, ask, plan_for, options)


def plan_with_loss(
    capture_with: Callable[[Chunks | None], Capture],
    ask: Callable[[Capture, Options], tuple[Problem, Options]],
    search: Callable[[Problem, Options], Plan],
    options: Options,
) -> tuple[Plan, Problem]:
    """Return the plan of the captured step, or of the step with its loss in chunks if its plan is better; and its
    problem.

    `ask` makes the arguments of `search` from a capture. Raises NoFeasiblePlan if neither step fits.
    """
    capture = capture_with(None)
    problems: dict[str, Problem] = {}

    def plan_of(capture: Capture, options: Options) -> Plan:
        problem, own = ask(capture, options)
        made = search(problem, own)
        problems[made.graph] = problem
        return made

    whole = functools.cache(lambda options: plan_of(capture, options))

    def plan_attempt(attempt: LossAttempt) -> Plan:
        own = attempt.options_of(options)
        found = whole(own) if attempt.cut is None else plan_of(capture_with(attempt.cut), own)
        return found if attempt.review is None else attempt.review(found)

    made = with_chosen_loss(capture.chunks, plan_attempt, is_whole_first=options.micro_batches == "fit")
    return made, problems[made.graph]


def named_cluster(hardware: "Cluster | str | None") -> Cluster | None:
    """Return the machine called `hardware`, or None for this machine. Raises the errors of `machine`."""
    return machine(torch.device("cpu"), hardware) if isinstance(hardware, str) else hardware


def question(
    capture: Capture, options: Options, cluster: Cluster | None, *, state_bytes_per_element: int | None = None
) -> tuple[Problem, Options]:
    """Return the arguments of `plan_for`: the problem of `capture` and the options for it.

    The problem is on `cluster`, or if it is None, on this machine with its free memory.
    """
    here = machine(capture.device) if cluster is None else cluster
    problem = capture.problem(here, options, state_bytes_per_element=state_bytes_per_element)
    if cluster is not None:
        # The memory of a profile does not change from run to run, so it counts as a budget given by the user.
        return problem, replace(
            options, device_memory=problem.budget_bytes, host_memory=problem.host_budget_bytes, hardware=None
        )
    budget_bytes = device_budget_bytes(options, here, capture.device, capture.held_bytes)
    host_bytes = host_budget_bytes(options)
    problem = replace(problem, budget_bytes=budget_bytes, host_budget_bytes=host_bytes, moves_what_fits=False)
    return problem, options
