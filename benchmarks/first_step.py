"""Measure the CPU seconds of the first two steps against torch.compile with the same inner compiler, from empty caches.

    python benchmarks/first_step.py                     every case
    python benchmarks/first_step.py "200 layers"        a single case

Each run is a process of its own on one thread, with empty caches of Inductor and of this package; the two runs of a
case follow each other. Seconds of child processes (g++, and Inductor's probes of the instruction set) are counted
separately. Results go to benchmarks/results/first_step_cpu.{json,md}; cases that are not run keep their rows.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import quiet  # noqa: F401  before torch
from machine import RESULTS, save

WORDS = 4096
PROFILE = "## Where the seconds go"
"""Heading of the section behind the table, which is written by hand and kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, compiled by torch and by Elixir with the same inner compiler."""

    model: str
    inner: str
    device_memory: str | None = None
    at_most: float
    """The goal: the largest ratio of Elixir's CPU seconds to torch's."""


CASES = {
    "200 layers": Case(model="mlp", inner="aot_eager", at_most=1.5),
    "llama": Case(model="llama", inner="inductor", at_most=0.7),
    "llama, 60 MB": Case(model="llama", inner="inductor", device_memory="60MB", at_most=0.8),
    "gpt2": Case(model="gpt2", inner="inductor", at_most=0.75),
    "gpt2, 1000 MB": Case(model="gpt2", inner="inductor", device_memory="1000MB", at_most=0.75),
}


def main() -> None:
    """Run the cases from the command line, and save each row as soon as it is there."""
    if sys.argv[1:2] == ["--run"]:
        print(json.dumps(first_steps(sys.argv[2], json.loads(sys.argv[3]))))
        return
    path = RESULTS / "first_step_cpu.json"
    rows = json.loads(path.read_text())["cases"] if path.exists() else {}
    for name in sys.argv[1:] or CASES:
        case = CASES[name]
        options = {"inner": case.inner, "report": False}
        options |= {"device_memory": case.device_memory} if case.device_memory else {}
        expected, got = in_process(case.model, {"backend": case.inner}), in_process(case.model, {"options": options})
        ratio = sum(map(sum, got["cpu_s"])) / sum(map(sum, expected["cpu_s"]))
        measured = {"torch": expected, "elixir": got, "ratio": round(ratio, 3), "load": os.getloadavg()[0]}
        rows[name] = {**asdict(case), **measured}
        print(row_of(name, rows[name]), flush=True)
        note = save(path.stem, {"cases": rows}).with_suffix(".md")
        _, heading, profile = note.read_text().partition(PROFILE) if note.exists() else ("", "", "")
        note.write_text(table_of(rows) + (f"\n{heading}{profile}" if heading else ""))


def in_process(model: str, how: Mapping[str, object]) -> dict[str, Any]:
    """Return the result of `first_steps` in a new process with empty caches."""
    with tempfile.TemporaryDirectory() as folder:
        caches = {name: f"{folder}/{name}" for name in ("TORCHINDUCTOR_CACHE_DIR", "ELIXIR_CACHE_DIR")}
        command = [sys.executable, __file__, "--run", model, json.dumps(how)]
        env = {**os.environ, **caches, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def first_steps(model_name: str, how: Mapping[str, Any]) -> dict[str, Any]:
    """Take two steps; return the CPU seconds of each, of this process and of its children, and the losses."""
    import torch

    import elixir_compile as elixir

    torch.manual_seed(0)
    model, loss_of = MODELS[model_name]()
    compiled = torch.compile(model, **{"backend": "elixir", **how})
    make = elixir.HybridAdamW if "options" in how else torch.optim.AdamW
    optimizer = make(model.parameters())
    cpu_s, losses = [], []
    for _ in range(2):
        began = used_s()
        loss = loss_of(compiled)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        cpu_s.append([round(now - then, 2) for now, then in zip(used_s(), began, strict=True)])
        losses.append(loss.item())
    return {"cpu_s": cpu_s, "losses": losses}


def used_s() -> tuple[float, float]:
    """Return the CPU seconds of this process and of its children so far."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    own, children = (each.ru_utime + each.ru_stime for each in used)
    return own, children


def mlp() -> tuple[Any, Callable[[Any], Any]]:
    """Return 200 residual blocks of width 64, and a function from the compiled model to its loss."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

    x = torch.randn(32, 64)
    return nn.Sequential(*(Block() for _ in range(200))), lambda compiled: compiled(x).square().mean()


def llama() -> tuple[Any, Callable[[Any], Any]]:
    """Return a Llama of 16 layers of width 256, and a function from the compiled model to its loss."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=256, intermediate_size=688, num_hidden_layers=16, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=WORDS,
    )  # fmt: skip
    return LlamaForCausalLM(config).train(), of_tokens(2, 128)


def gpt2() -> tuple[Any, Callable[[Any], Any]]:
    """Return GPT-2 124M without dropout, and a function from the compiled model to its loss."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return GPT2LMHeadModel(config).train(), of_tokens(2, 256)


def of_tokens(batch: int, length: int) -> Callable[[Any], Any]:
    """Return a function from a compiled language model to its loss on random tokens."""
    import torch

    tokens = torch.randint(0, WORDS, (batch, length))
    return lambda compiled: compiled(input_ids=tokens, labels=tokens).loss


MODELS = {"mlp": mlp, "llama": llama, "gpt2": gpt2}


def table_of(rows: Mapping[str, Any]) -> str:
    """Return the results as a table in Markdown."""
    head = "| case | torch: steps 1, 2 (own + children) | elixir: steps 1, 2 | ratio | goal | load |\n"
    head += "|---|---|---|---|---|---|\n"
    lines = "".join(f"{row_of(name, row)}\n" for name, row in rows.items())
    note = "The load is the number of processes that wanted one of two cores: seconds compare within a row only."
    return f"# CPU seconds of the first two steps, empty caches\n\n{head}{lines}\n{note}\n"


def row_of(name: str, row: Mapping[str, Any]) -> str:
    """Return a case as a line of the table in Markdown."""
    sides = [", ".join(f"{own} + {children}" for own, children in row[side]["cpu_s"]) for side in ("torch", "elixir")]
    return (
        f"| {name} ({row['inner']}) | {sides[0]} | {sides[1]} | {row['ratio']} | {row['at_most']} | {row['load']:.0f} |"
    )


if __name__ == "__main__":
    main()
