"""Train a small GPT in stages on several ranks, by a schedule of torch.distributed.pipelining."""

import argparse
import os

import torch
from torch import distributed, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)

import elixir_compile as elixir
from elixir_compile.ir.plan import plan_line

SINGLE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
LOOPED = {"interleaved-1f1b": ScheduleInterleaved1F1B, "looped-bfs": ScheduleLoopedBFS}
VOCABULARY = 512


class Block(nn.Module):
    """A layer of the GPT."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 64)
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the layer for `x` of shape (rows, length, width)."""
        heads = [part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, -1)]
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(nn.functional.gelu(self.up(self.norm_2(x))))


def stage_module(index: int, num_stages: int, args: argparse.Namespace) -> nn.Module:
    """Return the layers of a stage; the first embeds tokens, the last makes logits."""
    layers: list[nn.Module] = [Block(args.width) for _ in range(args.layers // num_stages)]
    if index == 0:
        layers.insert(0, nn.Embedding(VOCABULARY, args.width))
    if index == num_stages - 1:
        layers += [nn.LayerNorm(args.width), nn.Linear(args.width, VOCABULARY)]
    return nn.Sequential(*layers)


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of the next tokens of a micro-batch."""
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


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
    """Return the size of the model, the schedule, and the budget of a rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedule", default="gpipe", choices=[*SINGLE, *LOOPED])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=16, help="rows of all micro-batches")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--device-memory", help='budget of each rank, as "60MiB"; default: free memory')
    parser.add_argument("--inner", default="inductor", choices=["inductor", "aot_eager"])
    return parser.parse_args()


def train(args: argparse.Namespace, device: torch.device) -> None:
    """Train; print the plan of each stage and the losses."""
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    num_stages = world_size * (2 if args.schedule in LOOPED else 1)
    options = {"device_memory": args.device_memory, "inner": args.inner, "report": False}
    modules, stages = [], []
    for index in range(rank, num_stages, world_size):
        torch.manual_seed(index)
        module = elixir.prepare(stage_module(index, num_stages, args), device)
        compiled = torch.compile(module, backend="elixir", options=options)
        modules.append(module)
        stages.append(PipelineStage(compiled, index, num_stages, device))
    if args.schedule in LOOPED:
        schedule = LOOPED[args.schedule](stages, args.micro_batches, loss_fn=loss_of)
    else:
        schedule = SINGLE[args.schedule](stages[0], args.micro_batches, loss_fn=loss_of)
    for module in modules:
        elixir.prepare(module, outstanding=schedule)  # the plan counts the forwards that wait in this schedule
    optimizers = [elixir.HybridAdamW(module.parameters(), lr=3e-4) for module in modules]

    generator = torch.Generator().manual_seed(0)  # the first rank feeds the tokens, the last compares with them
    tokens = torch.randint(0, VOCABULARY, (args.batch, args.length), generator=generator).to(device)
    for step in range(args.steps):
        losses: list[torch.Tensor] = []
        fed = [tokens] if rank == 0 else []
        schedule.step(*fed, **({"target": tokens, "losses": losses} if rank == world_size - 1 else {}))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step == 0:
            for stage, module in zip(stages, modules, strict=True):
                plan = elixir.compilations(module)[-1].plan
                print(f"stage {stage.stage_index} on rank {rank}   {plan_line(plan)}", flush=True)
        if losses:
            print(f"step {step + 1:3d}   loss {torch.stack(losses).mean().item():.6f}", flush=True)


if __name__ == "__main__":
    main()
