"""Train GPT-2 twice: without a budget, then in a share of the memory of the first run."""

import argparse
import gc

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import elixir_compile as elixir
from elixir_compile.ir import Record
from elixir_compile.ir.plan import measured_line, plan_line


def main() -> None:
    """Train without a budget, then in `--share` of the measured peak."""
    args = arguments()
    free = train(args, budget_bytes=None)
    torch.compiler.reset()
    gc.collect()
    train(args, budget_bytes=int(free.device_peak_bytes * args.share))


def arguments() -> argparse.Namespace:
    """Return the size of the model, of the batch and of the budget."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--share", type=float, default=0.6)
    return parser.parse_args()


def train(args: argparse.Namespace, *, budget_bytes: int | None) -> Record:
    """Train for `--steps` steps; print the plan, the losses and the record of the last step, and return the record."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = GPT2Config(n_layer=args.layers, n_embd=args.width, n_head=args.width // 64)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    model = GPT2LMHeadModel(config).to(device)
    tokens = torch.randint(0, config.vocab_size, (args.batch, args.length), device=device)
    options = {} if budget_bytes is None else {"device_memory": budget_bytes}
    compiled = torch.compile(model, backend="elixir", options=options)
    optimizer = elixir.HybridAdamW(model.parameters(), lr=1e-4)
    losses: list[float] = []

    def step() -> None:
        loss = compiled(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    for _ in range(args.steps - 1):
        step()
    record = elixir.measure_step(step)
    plan = elixir.compilations(compiled)[-1].plan
    print(plan_line(plan))
    print(measured_line(record, plan))
    print("losses   ", "  ".join(f"{loss:.6f}" for loss in losses), end="\n\n")
    return record


if __name__ == "__main__":
    main()
