"""A process that trains GPT-2 with its activations treated by Elixir or by torch, and prints figures of its steps.

    Worker(case_json, script=activations_worker.__file__)      `first` has the plan's figures, the peak, the gradients

The process compares its gradients with gradients of the same weights from torch's own backend.
"""

import gc
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import quiet  # noqa: F401  before torch
import torch
import torch._functorch.config  # the only place of torch's `activation_memory_budget`
from worker import build, plan_figures, stepper, timed, tokens_for

import elixir_compile as elixir
from elixir_compile.ir import Plan, Saving, StepGraph, Tier
from elixir_compile.session import cache, graph_planner
from elixir_compile.step.liveness import activation_groups

BATCH, LENGTH = 4, 512
QUICK_LAYERS, QUICK_LENGTH = 2, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, a backend and a budget."""

    model: str = "gpt2"
    """`gpt2`, or `logits`: two narrow layers under a vocabulary of 131072. The caller gets the loss only."""
    by: str = "elixir"
    """`elixir`, `inductor` for torch's own backend, or `floor` to find the smallest sufficient budget."""
    inner: str = "inductor"
    activations: str = "any"
    budget_bytes: int | None = None
    torch_share: float = 1.0
    """Torch's `activation_memory_budget`."""
    compares: bool = False
    """Whether gradients are compared."""
    quick: bool = False


@dataclass(frozen=True, slots=True)
class Output:
    """The result of `OnlyLoss`: without logits, so that the loss may be computed in chunks."""

    loss: torch.Tensor


class OnlyLoss(torch.nn.Module):
    """A Hugging Face model that returns its loss and not its logits."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        self.config = model.config

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Output:
        return Output(self.model(input_ids=input_ids, labels=labels).loss)


def model_of(case: Case) -> torch.nn.Module:
    """Return the model of `case`, with random weights from seed 0."""
    if case.model == "logits":
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=131072, n_embd=256, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        return OnlyLoss(GPT2LMHeadModel(config).train())
    model = build("gpt2")
    if case.quick:
        model.transformer.h = model.transformer.h[:QUICK_LAYERS]
        model.config.n_layer = QUICK_LAYERS
    return OnlyLoss(model)


def gradients_of(compiled: Callable, model: torch.nn.Module, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the loss and the gradients of a forward and backward, by name, and clear the gradients."""
    loss = compiled(input_ids=tokens, labels=tokens).loss
    loss.backward()
    found = {"loss": loss.detach().clone()}
    found |= {name: param.grad.detach().clone() for name, param in model.named_parameters()}
    for param in model.parameters():
        param.grad = None
    return found


def difference(got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> dict[str, object]:
    """Return the differences of two results of `gradients_of`, relative to the largest element of each tensor.

    `gradient_off` is the largest difference of any gradient, at the parameter `gradient_off_at`.
    """
    if list(got) != list(expected):
        raise ValueError("two runs gave gradients of different parameters")
    off = {name: float((got[name] - value).abs().max() / value.abs().max()) for name, value in expected.items()}
    loss_off = off.pop("loss")
    worst = max(off, key=off.__getitem__)
    is_bitwise = all(torch.equal(got[name], value) for name, value in expected.items())
    return {"loss_off": loss_off, "gradient_off": off[worst], "gradient_off_at": worst, "is_bitwise": is_bitwise}


@contextmanager
def searches() -> Iterator[list[float]]:
    """Yield a list of the seconds of each search in the `with` block: of the step, and of its chunked loss."""
    seconds: list[float] = []

    def plan_for(*args: object) -> Plan:
        began_s = time.perf_counter()
        try:
            return cache.plan_for(*args)
        finally:
            seconds.append(time.perf_counter() - began_s)

    with mock.patch.object(graph_planner, "plan_for", plan_for):
        yield seconds


def treated(graph: StepGraph, plan: Plan) -> dict[str, int]:
    """Return the bytes of activations that the plan keeps, recomputes and offloads."""
    chosen = {group.id: group.saving for group in plan.activations}
    found = {saving.value: 0 for saving in Saving}
    for group in activation_groups(graph):
        if group.id in chosen or not group.is_input:
            found[chosen.get(group.id, Saving.KEEP).value] += group.nbytes
    return found


def choices(graph: StepGraph, plan: Plan) -> dict[str, object]:
    """Return a plan's predictions, and the bytes that it recomputes, offloads or places on the host."""
    homes = list(zip(plan.buckets, plan.placements, strict=True))
    return {
        **plan_figures(plan),
        "gap": plan.gap,
        "activations_bytes": treated(graph, plan),
        "params_on_host_bytes": sum(bucket.nbytes for bucket, home in homes if home.param is not Tier.DEVICE),
        "state_on_host_bytes": sum(bucket.state_nbytes for bucket, home in homes if home.optim is not Tier.DEVICE),
        "num_regions": len(plan.regions),
        "loss_chunks": plan.loss_chunks,
    }


def options_of(case: Case, budget_bytes: int | None) -> dict[str, object]:
    """Return the backend's options for `case`, under the budget `budget_bytes`."""
    return {
        "device_memory": budget_bytes, "activations": case.activations, "inner": case.inner, "profile_regions": True,
        "plan_cache": False, "replan": False, "report": False, "micro_batches": 1,
    }  # fmt: skip


def train(case: Case, model: torch.nn.Module, tokens: torch.Tensor) -> tuple[dict[str, object], Callable[[], None]]:
    """Compile, take a step and measure another; return the figures, and a function that takes further steps."""
    if case.by == "inductor":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
        compiled = torch.compile(model, backend="inductor")
    else:
        model = elixir.prepare(model)
        optimizer = elixir.HybridAdamW(model.parameters(), lr=3e-4)
        compiled = torch.compile(model, backend="elixir", options=options_of(case, case.budget_bytes))
    step = stepper(compiled, optimizer, tokens)
    with searches() as search_s:
        step()
    gc.collect()
    record = elixir.measure_step(step)
    figures = {"peak_bytes": record.device_peak_bytes, "host_peak_bytes": record.host_peak_bytes, "search_s": search_s}
    if case.by == "elixir":
        made = elixir.compilations(compiled)[-1]
        figures["plan"] = choices(made.graph, made.plan)
    if case.compares:  # after the measurement, which counts all that the process holds
        reference = model_of(case)
        reference.load_state_dict(model.state_dict())
        expected = gradients_of(torch.compile(reference, backend=case.inner), reference, tokens)
        figures["off"] = difference(gradients_of(compiled, model, tokens), expected)
        del reference, expected
        gc.collect()
    return figures, step


def needed_bytes(plans: Callable[[int], object], budget_bytes: int) -> int | None:
    """Return the bytes that NoFeasiblePlan names if `plans` refuses `budget_bytes`; None if it finds a plan."""
    try:
        plans(budget_bytes)
    except elixir.NoFeasiblePlan as error:
        return error.needed_bytes
    return None


def floor(case: Case, model: torch.nn.Module, tokens: torch.Tensor) -> dict[str, object]:
    """Return the smallest budget and the bytes named for a byte less, by `elixir.plan` and by a compiled call."""

    def planned(budget_bytes: int) -> object:
        inputs = {"input_ids": tokens, "labels": tokens}
        return elixir.plan(model, inputs, options=options_of(case, budget_bytes))

    def compiled(budget_bytes: int) -> object:
        torch.compiler.reset()
        run = torch.compile(elixir.prepare(model), backend="elixir", options=options_of(case, budget_bytes))
        return run(input_ids=tokens, labels=tokens).loss

    found: dict[str, object] = {}
    for name, plans in (("plan", planned), ("compile", compiled)):
        min_bytes = needed_bytes(plans, 1)
        assert min_bytes is not None
        found[name] = {
            "needed_bytes": min_bytes,
            "one_byte_less_needs": needed_bytes(plans, min_bytes - 1),
            "is_planned": needed_bytes(plans, min_bytes) is None,
        }
    return found


def work(case: Case) -> None:
    """Print the figures of the first steps, then take as many steps as each line of standard input says."""
    torch._functorch.config.activation_memory_budget = case.torch_share
    model = model_of(case)
    tokens = tokens_for(model, BATCH, QUICK_LENGTH if case.quick else LENGTH)
    if case.by == "floor":
        print(json.dumps(floor(case, model, tokens)), flush=True)
        return
    try:
        figures, step = train(case, model, tokens)
    except elixir.NoFeasiblePlan as error:
        print(json.dumps({"shortfall": str(error), "needed_bytes": error.needed_bytes}), flush=True)
        return
    print(json.dumps({**figures, "num_threads": torch.get_num_threads()}), flush=True)
    for line in sys.stdin:
        print(json.dumps(timed(step, int(line))), flush=True)


if __name__ == "__main__":
    work(Case(**json.loads(sys.argv[1])))
