"""Train a small GPT on ranks that differ: each gets the rows that it can train while the others train theirs."""

import argparse
import os

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

import elixir_compile as elixir


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
    """Return the size of the model and of the batch of all ranks, and the fleet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=16, help="rows of all ranks together")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--hardware", help='a fleet of as many devices as ranks, as "2 x l4-24g + 1 x a6000-48g"')
    parser.add_argument("--inner", default="inductor", choices=["inductor", "aot_eager"])
    return parser.parse_args()


def train(args: argparse.Namespace, device: torch.device) -> None:
    """Find the shares, train by them, and print shares and losses."""
    mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
    heads = max(1, args.width // 64)
    config = GPT2Config(n_layer=args.layers, n_embd=args.width, n_head=heads, vocab_size=4096)
    config.bos_token_id = config.eos_token_id = 0
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config).to(device)
    generator = torch.Generator().manual_seed(0)  # all ranks have the same data, and each takes its rows
    tokens = torch.randint(0, config.vocab_size, (args.steps * args.batch, args.length), generator=generator)

    sample = {"input_ids": tokens[: args.batch], "labels": tokens[: args.batch]}
    shares = elixir.shares(model, sample, batch=args.batch, mesh=mesh, hardware=args.hardware)
    for share in shares:
        say(f"rank {share.rank}   {share.num_rows} rows in {share.micro_batches}, {share.state:.0%} of the state")
    elixir.prepare(model, device, mesh=mesh, shares=shares)
    compiled = torch.compile(model, backend="elixir", options={"inner": args.inner, "report": False})
    optimizer = elixir.HybridAdamW(model.parameters(), lr=3e-4)
    loader = DataLoader(tokens, batch_sampler=elixir.ShareSampler(len(tokens), shares, shuffle=False))
    for step, own in enumerate(loader):
        rows = own.to(device)
        loss = compiled(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = elixir.mean_loss(model, loss).item()  # every rank takes part
        say(f"step {step + 1:3d}   loss {mean:.6f}")


def say(text: str) -> None:
    """Print `text` on the first rank only."""
    if distributed.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
