"""A process that trains a small Llama in micro-batches, and prints figures of its steps.

    Worker(case_json, script=micro_batches_worker.__file__)      `first` has the peak, bytes moved, counts and the loss

The batch of a step goes in whole (`divided`), or as micro-batches in a loop of backward passes (`loop`, `checkpoint`).
"""

import gc
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass

import quiet  # noqa: F401  before torch
import torch
from activations_worker import OnlyLoss
from emulated_link import Lane, emulate_host_link
from worker import build, plan_figures, timed, tokens_for

import elixir_compile as elixir
from elixir_compile.step.divide import micro_batches_of

ROWS, LENGTH = 16, 128
QUICK_ROWS, QUICK_LENGTH = 8, 16
NUM_FIRST = 2
"""Steps before any is measured: the first compiles, the second makes the optimizer's state."""
VERBS = ("gather", "release", "reduce", "offload", "prefetch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A training: how a batch is divided, and the memory that it may use."""

    by: str = "divided"
    """`divided`: the whole batch goes in, and the plan divides it. `loop`: the micro-batches go in one after another,
    each with its own backward, under a plan that counts gradients that stay. `checkpoint`: such a loop in which every
    layer is a `torch.utils.checkpoint`, compiled by torch's own backend. `floor`: nothing is trained; the smallest
    budgets of `divided` and `loop`."""
    micro_batches: int = 8
    budget_bytes: int | None = None
    link_bytes_per_s: float | None = None
    """The rate of an emulated link between host and device, in each direction; None: the copies of this machine."""
    hardware: str | None = None
    """The path of the profile of the machine with this link."""
    quick: bool = False


def model_of(case: Case) -> torch.nn.Module:
    """Return the model of `case`, with random weights from seed 0; its forward returns the loss alone."""
    if not case.quick:
        model = build("llama")
    else:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=256,
            use_cache=False,
        )  # fmt: skip
        model = LlamaForCausalLM(config).train()
    if case.by == "checkpoint":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return OnlyLoss(model)


def tokens_of(case: Case, model: torch.nn.Module) -> torch.Tensor:
    """Return the batch of a step."""
    return tokens_for(model, *((QUICK_ROWS, QUICK_LENGTH) if case.quick else (ROWS, LENGTH)))


def options_of(case: Case, by: str) -> dict[str, object]:
    """Return the backend's options for `case`, trained `by` the whole batch or by a loop."""
    return {
        "device_memory": case.budget_bytes, "hardware": case.hardware, "report": False, "plan_cache": False,
        "replan": False, "profile_regions": case.link_bytes_per_s is None and not case.quick,
        "micro_batches": case.micro_batches if by == "divided" else 1, "accumulate": by == "loop",
    }  # fmt: skip


def floor(case: Case, model: torch.nn.Module, tokens: torch.Tensor) -> dict[str, int]:
    """Return the smallest budget of a step that is divided, and of a loop over its micro-batches."""
    found: dict[str, int] = {}
    for by, rows in (("divided", tokens), ("loop", tokens[: len(tokens) // case.micro_batches])):
        try:
            elixir.plan(
                model, {"input_ids": rows, "labels": rows}, options={**options_of(case, by), "device_memory": 1}
            )
        except elixir.NoFeasiblePlan as error:
            found[by] = error.needed_bytes
    return found


def stepper(case: Case, compiled: Callable, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> Callable:
    """Return a function that takes a training step and returns its loss."""
    parts = tokens.chunk(1 if case.by == "divided" else case.micro_batches)

    def step() -> torch.Tensor:
        total = torch.zeros(())
        for part in parts:
            loss = compiled(input_ids=part, labels=part).loss / len(parts)
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def train(
    case: Case, model: torch.nn.Module, tokens: torch.Tensor, lanes: tuple[Lane, Lane]
) -> tuple[dict[str, object], Callable]:
    """Take the first steps and measure another; return the figures, and a function that takes further steps."""
    if case.by == "checkpoint":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
        compiled = torch.compile(model, backend="inductor")
    else:
        model = elixir.prepare(model)
        optimizer = elixir.HybridAdamW(model.parameters(), lr=3e-4)
        compiled = torch.compile(model, backend="elixir", options=options_of(case, case.by))
    step = stepper(case, compiled, optimizer, tokens)
    losses = [float(step()) for _ in range(NUM_FIRST)]
    gc.collect()
    before = [lane.nbytes for lane in lanes]
    record = elixir.measure_step(step)
    figures: dict[str, object] = {
        "peak_bytes": record.device_peak_bytes,
        "host_peak_bytes": record.host_peak_bytes,
        "moved_bytes": [lane.nbytes - earlier for lane, earlier in zip(lanes, before, strict=True)],
        "counts": {verb: record.counts.get(verb, 0) for verb in VERBS},
        "losses": losses,
        "param_bytes": sum(param.nbytes for param in model.parameters()),
        "num_tokens": tokens.numel(),
    }
    if case.by != "checkpoint":
        plan = elixir.compilations(compiled)[-1].plan
        figures["plan"] = plan_figures(plan)
        figures["regions"] = len(plan.regions)
        figures["ran_micro_batches"] = micro_batches_of(plan)
    return figures, step


def work(case: Case) -> None:
    """Print the figures of the first steps, then take as many steps as each line of standard input says."""
    lanes = emulate_host_link(case.link_bytes_per_s)
    model = model_of(case)
    tokens = tokens_of(case, model)
    if case.by == "floor":
        print(json.dumps(floor(case, model, tokens)), flush=True)
        return
    try:
        figures, step = train(case, model, tokens, lanes)
    except elixir.NoFeasiblePlan as error:
        print(json.dumps({"shortfall": str(error), "needed_bytes": error.needed_bytes}), flush=True)
        return
    print(json.dumps({**figures, "num_threads": torch.get_num_threads()}), flush=True)
    for line in sys.stdin:
        print(json.dumps(timed(step, int(line))), flush=True)


if __name__ == "__main__":
    work(Case(**json.loads(sys.argv[1])))
