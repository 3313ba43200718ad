"""Train stages of a pipeline on real ranks by torch's schedules, and compare with one process on the whole batch."""

import collections
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, schedules

import elixir_compile as elixir
from elixir_compile.graph.capture.modules import executor_of
from elixir_compile.ir import Verb
from elixir_compile.step.plan_rows import num_full_calls
from tests.run.updating import pairs_by_hand, small_buckets

WIDTH, ROWS, NUM_MICRO_BATCHES, NUM_STEPS = 32, 64, 8, 2
DEFAULTS: Mapping[str, Any] = {"inner": "aot_eager", "report": False, "plan_cache": False, "search_timeout": 0.5}
ALL_ON_THE_HOST: Mapping[str, Any] = {
    "placement_policy": "static",
    "shard_param_frac": 1.0,
    "offload_optim_frac": 1.0,
    "offload_param_frac": 1.0,
}
LOOPED = ("ScheduleInterleaved1F1B", "ScheduleLoopedBFS")


class Block(nn.Module):
    """A layer with a skip connection."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the layer."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Stage(nn.Module):
    """Some layers of the model."""

    def __init__(self, num_layers: int, width: int = WIDTH) -> None:
        super().__init__()
        self.h = nn.ModuleList(Block(width) for _ in range(num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the last layer."""
        for block in self.h:
            x = block(x)
        return x


def options_of(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return `options` with the budget of a rank, if they have that of one stage in KiB: two stages share it under a
    looped schedule."""
    asked = {**DEFAULTS, **options}
    if name in LOOPED and "device_memory" in asked:
        asked["device_memory"] = f"{2 * int(asked['device_memory'].removesuffix('KiB'))}KiB"
    return asked


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of a micro-batch."""
    return (output - target).square().mean()


def train_pipeline(
    rank: int, world_size: int, name: str, options: Mapping[str, Any], dtype: str = "float64", num_layers: int = 1
) -> dict[str, Any]:
    """Train by the schedule `name` and by one process; return how far weights are apart, and what was counted."""
    torch._dynamo.reset()
    own_dtype = getattr(torch, dtype)
    num_stages = world_size * (2 if name in LOOPED else 1)
    own = list(range(rank, num_stages, world_size))
    torch.manual_seed(0)
    whole = [Stage(num_layers).to(own_dtype) for _ in range(num_stages)]
    torch.manual_seed(0)
    modules = [Stage(num_layers).to(own_dtype) for _ in range(num_stages)]
    x, y = torch.randn(ROWS, WIDTH, dtype=own_dtype), torch.randn(ROWS, WIDTH, dtype=own_dtype)
    compiled = [
        torch.compile(elixir.prepare(modules[i]), backend="elixir", options=options_of(name, options)) for i in own
    ]
    stages = [
        PipelineStage(module, i, num_stages, torch.device("cpu")) for i, module in zip(own, compiled, strict=True)
    ]
    made = getattr(pipelining, name)
    schedule = made(stages if name in LOOPED else stages[0], NUM_MICRO_BATCHES, loss_fn=loss_of)
    for i in own:
        elixir.prepare(modules[i], outstanding=schedule)
    optimizers = [elixir.HybridAdamW(modules[i].parameters(), lr=1e-3) for i in own]
    double = torch.optim.AdamW([p for module in whole for p in module.parameters()], lr=1e-3)
    # Torch's compiler computes some gradients in another order than eager code does.
    exact = torch.compile(nn.Sequential(*whole), backend="aot_eager")
    reference = [exact] if dtype == "float32" else whole
    reverses = name == "ScheduleLoopedBFS"
    messages: collections.Counter[str] = collections.Counter()
    grads_apart: list[float] = []
    for _ in range(NUM_STEPS):
        losses: list[torch.Tensor] = []
        targets = {"target": y, "losses": losses} if num_stages - 1 in own else {}
        messages.clear()
        with counted_messages(messages):
            schedule.step(*([x] if rank == 0 else []), **targets)
        backward_of_whole(reference, x, y, reverses=reverses)
        grads_apart.append(max(map(apart_in_grads, [modules[i] for i in own], [whole[i] for i in own])))
        for optimizer in (*optimizers, double):
            optimizer.step()
            optimizer.zero_grad()
    plans = [plan_of(modules[i]) for i in own]
    return {
        "apart": apart([modules[i] for i in own], [whole[i] for i in own]),
        "grads_apart": grads_apart[0],
        "messages": dict(messages),
        "plans": [str(plan.calls) for plan in plans],
        "planned": [counted(plan) for plan in plans],
        "in_all_calls": [counted_in_all_calls(plan) for plan in plans],
        "executed": [dict(executor_of(modules[i]).ledger.counts) for i in own],
        "saved": [savings(plan) for plan in plans],
        "num_full": [None if plan.lean is None else plan.lean.num_full for plan in plans],
        "peaks": [
            (elixir.compilations(modules[i])[-1].rank_peak_bytes, plan.budget_bytes)
            for i, plan in zip(own, plans, strict=True)
        ],
        "homes": [sorted({(home.param.value, home.streamed) for home in plan.placements}) for plan in plans],
    }


def train_streamed(rank: int, world_size: int, names: Sequence[str]) -> dict[str, Any]:
    """Return the result of `train_pipeline` for each schedule of `names`, with all of each stage on the host, and the
    update of every second bucket streamed to the device."""

    def streamed(plan: elixir.Plan) -> elixir.Plan:
        homes = [replace(home, streamed=number % 2 == 0) for number, home in enumerate(plan.placements)]
        return replace(plan, placements=tuple(homes))

    with small_buckets(streamed):
        return {name: train_pipeline(rank, world_size, name, ALL_ON_THE_HOST) for name in names}


def train_sharded_with_lean_calls(rank: int, world_size: int, order: str, lean: str) -> dict[str, Any]:
    """Return the result of `train_sharded` under a plan by hand with two full forwards at most, and lean calls."""
    with pairs_by_hand(lean, 2) as plans:
        return {**train_sharded(rank, world_size, order, {}), "num_made": len(plans)}


def train_sharded(
    rank: int, world_size: int, order: str, options: Mapping[str, Any], dtype: str = "float64", width: int = 64
) -> dict[str, Any]:
    """Train one stage, sharded over all ranks, whose forwards and backward passes come in `order`, and one process.

    Returns how far weights are apart, and what was counted in each step after the first.
    """
    torch._dynamo.reset()
    own_dtype, number = getattr(torch, dtype), order.count("F")
    torch.manual_seed(0)
    double = Stage(2, width).to(own_dtype)
    torch.manual_seed(0)
    module = Stage(2, width).to(own_dtype)
    most = max(order[:end].count("F") - order[:end].count("B") for end in range(1, len(order)))
    mesh = init_device_mesh("cpu", (world_size,))
    elixir.prepare(module, mesh=mesh, outstanding=most, calls=number)
    compiled = torch.compile(module, backend="elixir", options={**DEFAULTS, **options})
    optimizer = elixir.HybridAdamW(module.parameters(), lr=1e-3)
    double_optimizer = torch.optim.AdamW(double.parameters(), lr=1e-3)
    x, y = torch.randn(ROWS, width, dtype=own_dtype), torch.randn(ROWS, width, dtype=own_dtype)
    per_step, losses, counts = ROWS // number, [], {}
    for _ in range(NUM_STEPS):
        before = dict(executor_of(module).ledger.counts)
        waiting = collections.deque()
        rows = iter(zip(x.split(per_step), y.split(per_step), strict=True))
        for letter in order:
            if letter == "F":
                xs, ys = (part.chunk(world_size)[rank] for part in next(rows))
                waiting.append(loss_of(compiled(xs), ys) / number)
            else:
                loss = waiting.popleft()
                loss.backward()
                losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        after = executor_of(module).ledger.counts
        counts = {verb: after[verb] - before.get(verb, 0) for verb in after}
        for xs, ys in zip(x.split(per_step), y.split(per_step), strict=True):
            (loss_of(double(xs), ys) / number).backward()
        double_optimizer.step()
        double_optimizer.zero_grad()
    plan = plan_of(module)
    off = max(
        (p.full_tensor() - q).abs().max().item() for p, q in zip(module.parameters(), double.parameters(), strict=True)
    )
    return {
        "apart": off,
        "calls": str(plan.calls),
        "planned": counted(plan),
        "executed": counts,
        "num_sharded": sum(bucket.is_sharded for bucket in plan.buckets),
        "num_full": None if plan.lean is None else plan.lean.num_full,
    }


def train_grid(rank: int, world_size: int, name: str, options: Mapping[str, Any], width: int = 64) -> dict[str, Any]:
    """Train stages, each sharded over half of the ranks, by the schedule `name`, and one process; return how far
    weights are apart, what was counted in the last step, and the planned peak of the rank."""
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("pp", "dp"))
    index, part = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    num_stages = 4 if name in LOOPED else 2
    own = range(index, num_stages, 2)
    torch.manual_seed(0)
    whole = [Stage(2, width).double() for _ in range(num_stages)]
    torch.manual_seed(0)
    every = [Stage(2, width).double() for _ in range(num_stages)]
    modules = [elixir.prepare(every[i], mesh=mesh["dp"]) for i in own]
    x, y = torch.randn(ROWS, width).double(), torch.randn(ROWS, width).double()
    compiled = [torch.compile(module, backend="elixir", options=options_of(name, options)) for module in modules]
    group, cpu = mesh.get_group("pp"), torch.device("cpu")
    stages = [PipelineStage(made, i, num_stages, cpu, group=group) for i, made in zip(own, compiled, strict=True)]
    schedule = getattr(pipelining, name)(stages if name in LOOPED else stages[0], NUM_MICRO_BATCHES, loss_fn=loss_of)
    for module in modules:
        elixir.prepare(module, outstanding=schedule)
    optimizers = [elixir.HybridAdamW(module.parameters(), lr=1e-3) for module in modules]
    double = torch.optim.AdamW([p for other in whole for p in other.parameters()], lr=1e-3)
    rows = [batch.chunk(world_size // 2)[part] for batch in (x, y)]
    before: list[Mapping[str, int]] = []
    for _ in range(NUM_STEPS):
        before = [dict(executor_of(module).ledger.counts) for module in modules]
        schedule.step(rows[0]) if index == 0 else schedule.step(target=rows[1])
        backward_of_whole(whole, x, y, reverses=name == "ScheduleLoopedBFS")
        for optimizer in (*optimizers, double):
            optimizer.step()
            optimizer.zero_grad()
    after, plans = [executor_of(module).ledger.counts for module in modules], [plan_of(module) for module in modules]
    pairs = [
        zip(module.parameters(), whole[i].parameters(), strict=True) for i, module in zip(own, modules, strict=True)
    ]
    return {
        "apart": max((p.full_tensor() - q).abs().max().item() for pair in pairs for p, q in pair),
        "planned": [counted(plan) for plan in plans],
        "gathered": [now["gather"] - then.get("gather", 0) for now, then in zip(after, before, strict=True)],
        "reduced": [now["reduce"] - then.get("reduce", 0) for now, then in zip(after, before, strict=True)],
        "num_buckets": [sum(bucket.is_sharded for bucket in plan.buckets) for plan in plans],
        "peak": elixir.compilations(modules[0])[-1].rank_peak_bytes,
        "budget": max(plan.budget_bytes for plan in plans),
    }


def measure_pipeline(
    rank: int, world_size: int, name: str, options: Mapping[str, Any], rows: int = 256, width: int = 64
) -> dict[str, Any]:
    """Train stages on each rank by the schedule `name`; return the planned peak of the rank, and the measured peak of a
    step."""
    torch._dynamo.reset()
    num_stages = world_size * (2 if name in LOOPED else 1)
    own = range(rank, num_stages, world_size)
    modules = [Stage(3, width) for _ in own]
    compiled: list[Any] = [
        torch.compile(elixir.prepare(module), backend="elixir", options=options_of(name, options)) for module in modules
    ]
    cpu = torch.device("cpu")
    stages = [PipelineStage(module, i, num_stages, cpu) for i, module in zip(own, compiled, strict=True)]
    schedule = getattr(pipelining, name)(stages if name in LOOPED else stages[0], NUM_MICRO_BATCHES, loss_fn=loss_of)
    for module in modules:
        elixir.prepare(module, outstanding=schedule)
    optimizers = [elixir.HybridAdamW(module.parameters(), lr=1e-3) for module in modules]
    x = [torch.randn(rows, width)] if rank == 0 else []
    targets = {"target": torch.randn(rows, width)} if rank == world_size - 1 else {}

    def step() -> None:
        schedule.step(*x, **targets)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    step()
    step()
    before = [dict(executor_of(module).ledger.counts) for module in modules]
    record = elixir.measure_step(step, device="cpu")
    after = [executor_of(module).ledger.counts for module in modules]
    plans = [plan_of(module) for module in modules]
    (planned_bytes,) = {elixir.compilations(module)[-1].rank_peak_bytes for module in modules}
    return {
        "planned": planned_bytes,
        "alone": [plan.prediction.device_peak_bytes for plan in plans],
        # No plan counts the targets, which the caller holds.
        "measured": record.device_peak_bytes - sum(target.nbytes for target in targets.values()),
        "budget": min(plan.budget_bytes for plan in plans),
        "homes": [sorted({placement.optim.value for placement in plan.placements}) for plan in plans],
        "reduces": [counted(plan)["reduce"] for plan in plans],
        "reduced": [now["reduce"] - then["reduce"] for now, then in zip(after, before, strict=True)],
        "saved": [savings(plan) for plan in plans],
        "num_full": [None if plan.lean is None else plan.lean.num_full for plan in plans],
    }


@contextmanager
def counted_messages(counts: collections.Counter[str]) -> Iterator[None]:
    """Count in `counts` the sends and receives that the schedules of torch start in the context."""
    start = schedules._batch_p2p

    def counting(ops: list[distributed.P2POp], desc: str | None = None) -> list[Any]:
        counts.update("send" if op.op is distributed.isend else "recv" for op in ops)
        return start(ops, desc)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedules, "_batch_p2p", counting)
        yield


def backward_of_whole(whole: Sequence[Any], x: torch.Tensor, y: torch.Tensor, *, reverses: bool) -> None:
    """Make gradients in this process, the micro-batches in the order in which the schedule runs their backward."""
    rows = list(zip(x.chunk(NUM_MICRO_BATCHES), y.chunk(NUM_MICRO_BATCHES), strict=True))
    for xs, ys in reversed(rows) if reverses else rows:
        for stage in whole:
            xs = stage(xs)
        loss_of(xs, ys).backward()
    for module in whole:
        for param in module.parameters():
            param.grad.div_(NUM_MICRO_BATCHES)


def apart_in_grads(module: nn.Module, other: nn.Module) -> float:
    """Return the largest difference of two gradients."""
    pairs = zip(module.parameters(), other.parameters(), strict=True)
    return max((p.grad - q.grad).abs().max().item() for p, q in pairs)


def plan_of(module: nn.Module) -> elixir.Plan:
    """Return the plan of the last captured graph of `module`."""
    plan = elixir.compilations(module)[-1].plan
    assert plan is not None
    return plan


def counted(plan: elixir.Plan) -> dict[str, int]:
    """Return the gathers and reduces of the schedule of `plan` by verb."""
    return dict(
        collections.Counter(action.verb.value for action in plan.schedules[0].actions if action.verb is not Verb.RUN)
    )


def counted_in_all_calls(plan: elixir.Plan) -> collections.Counter[str]:
    """Return the actions of all calls of a step by verb, if each call did all actions of its schedule."""
    num_full = plan.calls.num if plan.lean is None else num_full_calls(plan.calls, plan.lean.num_full)
    found = collections.Counter({verb: num_full * count for verb, count in counted(plan).items()})
    if plan.lean is not None:
        lean = counted(plan.of_lean_calls())
        found += collections.Counter({verb: (plan.calls.num - num_full) * count for verb, count in lean.items()})
    return found


def savings(plan: elixir.Plan) -> list[str]:
    """Return the treatments of activations in any call."""
    lean = () if plan.lean is None else plan.lean.activations
    return sorted({group.saving.value for group in (*plan.activations, *lean)})


@torch.no_grad()
def apart(modules: Sequence[nn.Module], others: Sequence[nn.Module]) -> float:
    """Return the largest difference of two weights."""
    return max(
        (p - q).abs().max().item()
        for module, other in zip(modules, others, strict=True)
        for p, q in zip(module.state_dict().values(), other.state_dict().values(), strict=True)
    )


def each_schedule(rank: int, world_size: int, names: Sequence[str], options: Mapping[str, Any], dtype: str) -> dict:
    """Return the result of `train_pipeline` for each schedule of `names`."""
    return {name: train_pipeline(rank, world_size, name, options, dtype) for name in names}
