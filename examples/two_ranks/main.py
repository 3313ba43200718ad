"""Train a small GPT on several ranks: with gloo on CPUs, with NCCL if each rank has a GPU."""

import argparse
import os

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from transformers import GPT2Config, GPT2LMHeadModel

import elixir_compile as elixir
from elixir_compile.base.units import format_bytes
from elixir_compile.ir.plan import plan_line


def main() -> None:
    """Train for `--steps` steps on all ranks that torchrun started."""
    args = arguments()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        train(args, device)
    finally:
        distributed.destroy_process_group()


def arguments() -> argparse.Namespace:
    """Return the size of the model, of a rank's batch and of a rank's budget."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4, help="rows per rank")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--device-memory", help='budget of each rank, as "200MiB"; default: free memory')
    parser.add_argument("--inner", default="inductor", choices=["inductor", "aot_eager"])
    return parser.parse_args()


def train(args: argparse.Namespace, device: torch.device) -> None:
    """Train; print the plan, the bytes of parameters on each rank, and the losses."""
    mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
    heads = max(1, args.width // 64)
    config = GPT2Config(n_layer=args.layers, n_embd=args.width, n_head=heads, vocab_size=4096)
    config.bos_token_id = config.eos_token_id = 0
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    with torch.device("meta"):
        model = GPT2LMHeadModel(config)
    elixir.prepare(model, device, mesh=mesh)  # each rank creates one module at a time and keeps its part
    options = {"device_memory": args.device_memory, "inner": args.inner, "report": False}
    compiled = torch.compile(model, backend="elixir", options=options)
    optimizer = elixir.HybridAdamW(model.parameters(), lr=3e-4)

    generator = torch.Generator().manual_seed(distributed.get_rank())  # each rank has its own rows
    tokens = torch.randint(0, config.vocab_size, (args.batch, args.length), generator=generator).to(device)
    for step in range(args.steps):
        loss = compiled(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            show_plan(model, compiled)
        mean = loss.detach().clone()
        distributed.all_reduce(mean, op=distributed.ReduceOp.AVG)
        say(f"step {step + 1:3d}   loss {mean.item():.6f}")


def show_plan(model: torch.nn.Module, compiled: torch.nn.Module) -> None:
    """Print the plan, which is the same on all ranks, and the bytes of parameters on each rank."""
    say(plan_line(elixir.compilations(compiled)[-1].plan))
    own_bytes = sum(param.to_local().nbytes for param in model.parameters())
    held: list[int] = [0] * distributed.get_world_size()
    distributed.all_gather_object(held, own_bytes)
    full_bytes = sum(param.numel() * param.element_size() for param in model.parameters())
    say(f"parameters  {format_bytes(full_bytes)}, of these on")
    for rank, nbytes in enumerate(held):
        say(f"  rank {rank}    {format_bytes(nbytes)}")


def say(text: str) -> None:
    """Print `text` on the first rank only."""
    if distributed.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
