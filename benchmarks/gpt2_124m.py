"""Train GPT-2 124M within 60 % of its keep-everything peak; compare bytes, losses and weights with torch's backends.

    python benchmarks/gpt2_124m.py            # minutes on two CPU cores

If CUDA is there, the case with a budget runs under `torch.cuda.set_per_process_memory_fraction`. Each case runs in a
process of its own, so that only its own training is on the device. Exit code 1 if a claim does not hold.
"""

import argparse
import hashlib
import json
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass

import quiet  # noqa: F401  before torch
import torch
from machine import save

import elixir_compile as elixir

SHARE = 0.6
BATCH, LENGTH = 2, 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One training run."""

    model: str
    """`gpt2`, `llama-tied` or `llama-untied`."""
    backend: str
    inner: str
    """Compiler of regions; used by the backend `elixir` only."""
    steps: int
    budget_bytes: int | None


def build(name: str, device: str) -> torch.nn.Module:
    """Return GPT-2 124M, or a small Llama with tied or untied embeddings, with random weights from seed 0."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if name == "gpt2":
        return GPT2LMHeadModel(GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)).to(device).train()
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=4096,
        tie_word_embeddings=name == "llama-tied",
    )
    return LlamaForCausalLM(config).to(device).train()


def run(case: Case) -> dict[str, object]:
    """Train `case.steps` steps, then measure another; return losses, bytes, and a digest of the trained weights."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and case.budget_bytes is not None:
        total_bytes = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, case.budget_bytes * 1.1 / total_bytes))
    host = case.backend == "elixir" and device == "cuda"
    model = build(case.model, "cpu" if host else device)
    if host:
        elixir.prepare(model, device="cuda")
    options = {"inner": case.inner, "device_memory": case.budget_bytes} if case.backend == "elixir" else None
    compiled = torch.compile(model, backend=case.backend, options=options)
    if case.backend == "elixir":
        optimizer: torch.optim.Optimizer = elixir.HybridAdamW(model.parameters(), lr=3e-4)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    vocabulary = model.config.vocab_size
    losses: list[float] = []

    def step() -> None:
        tokens = torch.randint(0, vocabulary, (BATCH, LENGTH), generator=torch.Generator().manual_seed(len(losses)))
        loss = compiled(input_ids=tokens.to(device), labels=tokens.to(device)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))

    for _ in range(case.steps):
        step()
    digest = hashlib.sha256()
    for param in model.parameters():
        digest.update(param.detach().cpu().numpy().tobytes())
    record = elixir.measure_step(step)
    figures: dict[str, object] = {
        "losses": losses[: case.steps],
        "weights": digest.hexdigest(),
        "measured_peak_bytes": record.device_peak_bytes,
        "measured_host_bytes": record.host_peak_bytes,
        "measured_step_s": record.step_s,
        "counts": dict(record.counts),
    }
    if case.backend == "elixir":
        (compilation,) = elixir.compilations(compiled)
        actions = Counter(action.verb.value for action in compilation.plan.schedules[0].actions)
        figures["planned_counts"] = {verb: actions[verb] for verb in record.counts}
        figures["planned_peak_bytes"] = compilation.plan.prediction.device_peak_bytes
        figures["budget_bytes"] = case.budget_bytes
    return figures


def run_apart(case: Case) -> dict[str, object]:
    """Run `case` in a new process."""
    arguments = [case.model, case.backend, case.inner, str(case.steps), str(case.budget_bytes or 0)]
    result = subprocess.run(
        [sys.executable, __file__, "--case", *arguments], stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(result.stdout.splitlines()[-1])


def claims_of_the_budget(free: dict, budgeted: dict, reference: dict) -> dict[str, bool]:
    """Return the claims on the 60 % run, and whether each holds."""
    predicted, measured = budgeted["planned_peak_bytes"], budgeted["measured_peak_bytes"]
    return {
        "measured peak <= budget": measured <= budgeted["budget_bytes"],
        "losses within 1e-5 of inductor": max(
            abs(a - b) for a, b in zip(budgeted["losses"], reference["losses"], strict=True)
        )
        <= 1e-5,
        "executed counts == planned counts": budgeted["counts"] == budgeted["planned_counts"],
        "predicted peak within 10 % of measured": abs(predicted / measured - 1) <= 0.10,
        "predicted peak not more than 3 % below": predicted >= 0.97 * measured,
        "no budget: nothing moves": free["counts"].get("gather", 0) == 0,
    }


def main() -> int:
    """Run every case, print the claims, save the figures; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", nargs=5, metavar=("MODEL", "BACKEND", "INNER", "STEPS", "BUDGET"))
    arguments = parser.parse_args()
    if arguments.case:
        model, backend, inner, steps, budget = arguments.case
        case = Case(model=model, backend=backend, inner=inner, steps=int(steps), budget_bytes=int(budget) or None)
        print(json.dumps(run(case)))
        return 0
    device = "cuda" if torch.cuda.is_available() else "cpu"
    free = run_apart(Case(model="gpt2", backend="elixir", inner="inductor", steps=5, budget_bytes=None))
    budget_bytes = int(SHARE * free["measured_peak_bytes"])
    budgeted = run_apart(Case(model="gpt2", backend="elixir", inner="inductor", steps=5, budget_bytes=budget_bytes))
    reference = run_apart(Case(model="gpt2", backend="inductor", inner="inductor", steps=5, budget_bytes=None))
    claims = claims_of_the_budget(free, budgeted, reference)
    figures: dict[str, object] = {"keep_everything": free, "budget_60": budgeted, "inductor": reference}
    for model in ("gpt2", "llama-tied", "llama-untied"):
        theirs = run_apart(Case(model=model, backend="aot_eager", inner="aot_eager", steps=3, budget_bytes=None))
        limit_bytes = int(SHARE * theirs["measured_peak_bytes"])
        ours = run_apart(Case(model=model, backend="elixir", inner="aot_eager", steps=3, budget_bytes=limit_bytes))
        claims[f"{model}: weights bitwise equal to aot_eager"] = ours["weights"] == theirs["weights"]
        claims[f"{model}: measured peak <= budget, op by op"] = ours["measured_peak_bytes"] <= limit_bytes
        figures[f"{model}_aot_eager"] = {"ours": ours, "theirs": theirs}
    for claim, holds in claims.items():
        print(f"{'holds' if holds else 'FAILS'}  {claim}")
    print(f"saved {save(f'gpt2_124m_{device}', {'claims': claims, **figures})}")
    return int(not all(claims.values()))


if __name__ == "__main__":
    raise SystemExit(main())
