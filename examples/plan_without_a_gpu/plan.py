"""Plan a GPT-2 for machines by name, and compare the best plan with the rule of the Elixir paper."""

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import elixir_compile as elixir
from elixir_compile.ir.plan import plan_line


def main() -> None:
    """Print two plans per machine with the bound of the best plan, and explain the best plan of the last machine."""
    args = arguments()
    for machine in args.machines:
        best, paper = (plan_for(args, machine, planner) for planner in ("milp", "elixir"))
        print(f"{machine}\n  best   {plan_line(best)}\n  paper  {plan_line(paper)}")
        if best.gap is not None:
            print(f"  no plan is more than {best.gap:.2%} faster; binding: {'; '.join(best.binding)}")
    print(elixir.explain(best))


def arguments() -> argparse.Namespace:
    """Return the model, the batch, the budget and the machines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--budget", default="4GiB")
    parser.add_argument("--machines", nargs="+", default=["a100-40g", "rtx4090-24g"])
    return parser.parse_args()


def plan_for(args: argparse.Namespace, machine: str, planner: str) -> elixir.Plan:
    """Return the plan of `planner` for `machine`, with fp32 master weights and moments."""
    tokens = torch.empty(args.batch, args.length, dtype=torch.int64, device="meta")
    return elixir.plan(
        lambda: gpt2(args),
        {"input_ids": tokens, "labels": tokens},
        hardware=machine,
        options={"device_memory": args.budget, "planner": planner},
        state_bytes_per_element=12,
    )


def gpt2(args: argparse.Namespace) -> GPT2LMHeadModel:
    """Return the model in bfloat16, without weights."""
    config = GPT2Config(n_layer=args.layers, n_embd=args.width, n_head=args.width // 64)
    config.n_positions = max(config.n_positions, args.length)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    with torch.device("meta"):
        return GPT2LMHeadModel(config).to(torch.bfloat16)


if __name__ == "__main__":
    main()
