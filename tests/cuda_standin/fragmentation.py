"""What torch's allocator holds beyond the bytes that tensors ask for, on the CUDA stand-in: a table.

    .venv-2.11.0/bin/python -m tests.cuda_standin.build -m tests.cuda_standin.fragmentation [--steps 200] [models]
    python -m tests.cuda_standin.fragmentation [--steps 200] [models]    # on a GPU

Each row is a process of its own. The allocator is that of torch; the driver's calls below it are the stand-in's.
"""

import argparse
import gc
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

MIB = 1 << 20
_BATCHES, _TOKENS, WORDS = 16, 128, 2048
_ROWS, _WIDTHS = 1 << 15, (24, 96, 40, 64, 32, 88, 48, 72, 28, 80, 56, 92)
_TIGHT = 0.6
"""The share of what training without a budget takes beside the workspaces of libraries, as the tight budget."""
_ONLY_ALLOCATOR = {"segments": "", "expandable": "expandable_segments:True"}
_FIRST_STEPS = 12
"""Compilation, new plans and what they leave with the allocator are over after so many steps."""


def _gpt2() -> Any:
    from tests.gpu.accelerator import gpt2

    return gpt2(3, 128, WORDS)


def llama(num_layers: int, width: int) -> Any:
    """Return a Llama of 8 heads."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": width, "intermediate_size": width // 3 * 8, "num_hidden_layers": num_layers}
    config = LlamaConfig(vocab_size=WORDS, max_position_embeddings=512, use_cache=False, num_attention_heads=8, **sizes)
    return LlamaForCausalLM(config).train()


def layers_of_many_widths() -> Any:
    """Return layers of many widths: their tensors have 3 to 12 MiB in 2**15 rows."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    pairs = itertools.pairwise((*_WIDTHS, _WIDTHS[0]))
    return nn.Sequential(*itertools.chain.from_iterable((nn.Linear(a, b), nn.GELU()) for a, b in pairs))


MODELS: Mapping[str, Callable[[], Any]] = {
    "GPT-2": _gpt2,
    "Llama": lambda: llama(3, 128),
    "mixed": layers_of_many_widths,
    "lengths": _gpt2,
}


def _batches(name: str) -> Iterator[Any]:
    """Yield batches for ever; for "lengths", of 32 to 256 tokens, the longest first."""
    import torch

    generator = torch.Generator().manual_seed(0)
    length = 2 * _TOKENS if name == "lengths" else _TOKENS
    while True:
        if name == "mixed":
            yield {"input": torch.randn(_ROWS, _WIDTHS[0], generator=generator).cuda()}
        else:
            ids = torch.randint(0, WORDS, (_BATCHES, length), generator=generator).cuda()
            yield {"input_ids": ids, "labels": ids}
        if name == "lengths":
            length = 8 * int(torch.randint(4, 33, (1,), generator=generator))


def _loss(result: Any) -> Any:
    return result.loss if hasattr(result, "loss") else result.square().mean()


def measured(name: str, *, tight: bool, num_steps: int, plans_gaps: bool = True) -> Mapping[str, Any]:
    """Return the figures of a run of `num_steps` in MiB: the peaks of the first steps, and of all later ones.

    Gaps are not planned for unless the run `plans_gaps`.
    """
    import torch

    import elixir_compile as elixir
    from elixir_compile.session.allocator_gaps import SEGMENT_BYTES, AllocatorGaps
    from elixir_compile.session.machine import library_bytes
    from tests.cuda_standin import device as standin

    if standin.is_here():
        standin.start()
    if not plans_gaps:
        AllocatorGaps.is_watching = False  # type: ignore[assignment,method-assign]
    options: dict[str, Any] = {"inner": "aot_eager", "report": False, "plan_cache": False}
    budget = None
    if tight:
        compiled = torch.compile(elixir.prepare(MODELS[name](), device="cuda"), backend="elixir", options=options)
        _loss(compiled(**next(_batches(name)))).backward()
        full_bytes = elixir.compilations(compiled)[-1].plan.prediction.device_peak_bytes
        outside_bytes = library_bytes(torch.device("cuda", 0))
        budget = outside_bytes + int(_TIGHT * (full_bytes - outside_bytes))
        del compiled
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()
    model = elixir.prepare(MODELS[name](), device="cuda")
    options["device_memory"] = budget
    compiled = torch.compile(model, backend="elixir", options=options, dynamic=True if name == "lengths" else None)
    optimizer = elixir.HybridAdamW(model.parameters(), lr=1e-3)
    figures = dict.fromkeys(("requested", "allocated", "reserved"), 0)
    first: dict[str, int] = {}
    num_over = retries = 0
    for number, batch in enumerate(itertools.islice(_batches(name), num_steps)):
        torch.cuda.reset_peak_memory_stats()
        _loss(compiled(**batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
        stats = torch.cuda.memory_stats()
        peaks = {key: stats[f"{key}_bytes.all.peak"] for key in figures}
        if number + 1 == _FIRST_STEPS:
            first, figures, retries = figures, dict.fromkeys(figures, 0), stats["num_alloc_retries"]
        elif number >= _FIRST_STEPS:
            num_over += budget is not None and peaks["reserved"] > budget + SEGMENT_BYTES
        figures = {key: max(nbytes, peaks[key]) for key, nbytes in figures.items()}
    return {
        "budget": budget,
        "first": first,
        "later": figures,
        "steps over": num_over,
        "retries": torch.cuda.memory_stats()["num_alloc_retries"] - retries,
        "plan": elixir.compilations(model)[-1].plan.prediction.device_peak_bytes,
    }


def _row(name: str, allocator: str, found: Mapping[str, Any]) -> str:
    """Return the row of the table for a run."""

    def shown(key: str) -> str:
        return " / ".join(f"{found[when][key] / MIB:.1f}" for when in ("first", "later"))

    later, budget = found["later"], found["budget"]
    cells = (
        name,
        "none" if budget is None else f"{budget / MIB:.1f}",
        allocator,
        shown("requested"),
        f"{(later['allocated'] - later['requested']) / MIB:.1f}",
        shown("reserved"),
        f"{(later['reserved'] - later['requested']) / MIB:.1f}",
        "" if budget is None else str(found["steps over"]),
        str(found["retries"]),
    )
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Print the table, a row as soon as it is there; or the figures of one run as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", choices=[[], *MODELS])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--budget", choices=("none", "tight"))
    parser.add_argument("--allocator", choices=tuple(_ONLY_ALLOCATOR))
    parser.add_argument("--no-gaps", action="store_true", help="plan as if the allocator left no gaps")
    parser.add_argument("--json", action="store_true", help="run the one model that is named in this process")
    asked = parser.parse_args()
    if asked.json:
        is_tight, (name,) = asked.budget == "tight", asked.models
        found = measured(name, tight=is_tight, num_steps=asked.steps, plans_gaps=not asked.no_gaps)
        print(json.dumps(found), flush=True)
        os._exit(0)  # the figures are known; threads of autograd may outlive the stand-in's library
    print("| model | budget, MiB | allocator | requested, first / later | rounding | reserved, first / later "
          "| beyond requested | steps over the budget and its tolerance | retries |")  # fmt: skip
    print("|" + "---|" * 9, flush=True)
    for name in asked.models or MODELS:
        for budget in [asked.budget] if asked.budget else ["none", "tight"]:
            for allocator in [asked.allocator] if asked.allocator else _ONLY_ALLOCATOR:
                command = [sys.executable, "-m", "tests.cuda_standin.fragmentation", name, "--json"]
                command += ["--budget", budget, "--steps", str(asked.steps), *["--no-gaps"] * asked.no_gaps]
                variables = {**os.environ, "PYTORCH_ALLOC_CONF": _ONLY_ALLOCATOR[allocator]}
                done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, check=False)
                if done.returncode:
                    print(f"| {name} | {budget} | {allocator} | failed |", flush=True)
                else:
                    print(_row(name, allocator, json.loads(done.stdout.splitlines()[-1])), flush=True)


if __name__ == "__main__":
    main()
