"""A process that trains under a plan, and `Worker`, by which another process starts it and lets it take steps.

    worker = Worker("llama", "elixir", budget_bytes)     starts it; `first` has figures of its plan and its first steps
    worker.steps(1)                                      takes its next step; returns the seconds
    in_turn({"milp": worker, "elixir": other}, 5)        five steps of each, in turn

The process prints its figures as lines of JSON.
"""

import hashlib
import json
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping

import quiet  # noqa: F401  before torch
import torch

import elixir_compile as elixir
from elixir_compile.search import Problem
from elixir_compile.search import plan as search_plan
from elixir_compile.search.greedy import RULES

BATCH, LENGTH = 2, 256
NUM_STEPS = 5
NUM_WATCHED = 7  # steps before the plan is corrected: two skipped, five timed
LIMIT_S = 300.0


def build(name: str) -> torch.nn.Module:
    """Return GPT-2 124M or a small Llama, with random weights from seed 0."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if name == "gpt2":
        return GPT2LMHeadModel(GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)).train()
    config = LlamaConfig(
        hidden_size=512, intermediate_size=1376, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=8,
        vocab_size=16000, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).train()


def tokens_for(model: torch.nn.Module, batch: int = BATCH, length: int = LENGTH) -> torch.Tensor:
    """Return random tokens from seed 0."""
    return torch.randint(0, model.config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(0))


def stepper(compiled: Callable, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> Callable[[], None]:
    """Return a function that takes a training step: forward, backward, update, zero_grad."""

    def step() -> None:
        compiled(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def timed(step: Callable[[], None], times: int) -> dict[str, list[float]]:
    """Take `times` steps; return the wall seconds and the CPU seconds of this process for each."""
    wall_s, own_s = [], []
    for _ in range(times):
        began_s, began_own_s = time.perf_counter(), time.process_time()
        step()
        wall_s.append(time.perf_counter() - began_s)
        own_s.append(time.process_time() - began_own_s)
    return {"wall_s": wall_s, "own_s": own_s}


def digest(plan: elixir.Plan) -> str:
    """Return a text that is equal for plans with equal buckets, placements, regions and schedules."""
    does = repr((plan.buckets, plan.placements, plan.regions, plan.schedules))
    return hashlib.sha256(does.encode()).hexdigest()[:16]


def rule_digests(problem: Problem) -> dict[str, str | None]:
    """Return the digest of each rule's plan for `problem`; None if the rule does not fit."""
    found: dict[str, str | None] = {}
    for rule in RULES:
        try:
            found[rule] = digest(search_plan(problem, rule))
        except elixir.NoFeasiblePlan:
            found[rule] = None
    return found


def plan_figures(plan: elixir.Plan) -> dict[str, object]:
    """Return a plan's predictions, its bound, and its digest."""
    return {
        "step_s": plan.prediction.step_s,
        "peak_bytes": plan.prediction.device_peak_bytes,
        "host_peak_bytes": plan.prediction.host_peak_bytes,
        "bound_s": plan.bound_s,
        "does": digest(plan),
    }


def work(name: str, planner: str, budget_bytes: int | None) -> None:
    """Print the figures of the plan and the first steps, then take as many steps as each line of standard input says.

    The default planner corrects its plan after the first steps, so its figures come from before and after the
    correction. A rule keeps its plan.
    """
    is_default = planner == "milp"
    options = {
        "planner": planner, "device_memory": budget_bytes, "profile_regions": True, "plan_cache": False,
        "replan": is_default, "report": False, "micro_batches": 1,
    }  # fmt: skip
    model = elixir.prepare(build(name))
    compiled = torch.compile(model, backend="elixir", options=options)
    step = stepper(compiled, elixir.HybridAdamW(model.parameters(), lr=3e-4), tokens_for(model))
    try:
        step()
    except elixir.NoFeasiblePlan as error:
        print(json.dumps({"shortfall": str(error)}), flush=True)
        return
    (compilation,) = elixir.compilations(compiled)
    # The compilation's problem has no public name, and making it anew would need a second capture.
    rules = rule_digests(compilation.active.problem) if is_default else {}
    # The plan's correction skips the second step, so its memory is measured here: state is there, nothing compiles.
    phases = [{"plan": plan_figures(compilation.plan), "peak_bytes": elixir.measure_step(step).device_peak_bytes}]
    if is_default:
        phases[0]["steps"] = timed(step, NUM_WATCHED - 2)
        step()  # corrects the plan
        step()
        phases.append({"plan": plan_figures(compilation.plan), "steps": timed(step, NUM_STEPS)})
        phases[1]["peak_bytes"] = elixir.measure_step(step).device_peak_bytes
    else:
        step()
    print(json.dumps({"phases": phases, "rules": rules, "num_threads": torch.get_num_threads()}), flush=True)
    for line in sys.stdin:
        print(json.dumps(timed(step, int(line))), flush=True)


class Worker:
    """A process that trains under a plan."""

    def __init__(self, *arguments: str | int | None, script: str = __file__, limit_s: float = LIMIT_S) -> None:
        """Start `script` with `arguments`: for this file a model, a planner and a budget in bytes.

        Waits at most `limit_s` seconds for each line of figures.
        """
        self._limit_s = limit_s
        self._process = subprocess.Popen(
            [sys.executable, script, *(str(argument or 0) for argument in arguments)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
        )  # fmt: skip
        self.first = self._answer()

    def steps(self, times: int) -> dict[str, list[float]]:
        """Take `times` steps; return the wall seconds and the CPU seconds of each."""
        self._process.stdin.write(f"{times}\n".encode())
        return self._answer()

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def _answer(self) -> dict:
        """Return the next line of figures; raises RuntimeError if the process ends, TimeoutError if it is late."""
        deadline_s = time.monotonic() + self._limit_s
        while select.select([self._process.stdout], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
            line = self._process.stdout.readline()
            if line.startswith(b"{"):
                return json.loads(line)
            if not line:
                raise RuntimeError(f"a worker ended with exit code {self._process.wait()}")
        self.stop()
        raise TimeoutError(f"a worker did not answer within {self._limit_s:.0f} s")


def in_turn(workers: Mapping[str, Worker], num_rounds: int) -> dict[str, dict[str, list[float]]]:
    """Let all workers take a step in each round, in order and then in reverse order; return their seconds by name."""
    seconds: dict[str, dict[str, list[float]]] = {name: {"wall_s": [], "own_s": []} for name in workers}
    for index in range(num_rounds):
        for name in list(workers) if index % 2 == 0 else reversed(workers):
            for clock, values in workers[name].steps(1).items():
                seconds[name][clock] += values
    return seconds


if __name__ == "__main__":
    own_model, own_planner, own_budget = sys.argv[1:]
    work(own_model, own_planner, int(own_budget) or None)
