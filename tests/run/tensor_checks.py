"""What tests ask of real ranks whose models torch cuts along a tensor axis."""

import gc
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

import elixir_compile as elixir
from elixir_compile.graph.capture.modules import executor_of
from elixir_compile.graph.ops.shards import own_shard, shard_like
from elixir_compile.ir import Plan
from elixir_compile.optim.precision import MomentForm, with_form
from elixir_compile.optim.state import decoded_entry
from elixir_compile.runtime.measure import Resident
from tests.run.ranks_training import adamw, compiled_with, full, hybrid

# ----------------------------------------------------------------------------------------------------------------------
# Models that torch cuts along a tensor axis, and their plans for `parallelize_module`.


NUM_WORDS, WIDTH, LENGTH = 96, 96, 8


class Attention(nn.Module):
    """Causal attention with heads of 8 columns, as many as the projections have."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, 8)).transpose(1, 2) for each in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A layer of a transformer; `first` and `second` are its norms."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.first(x))
        return x + self.down(functional.gelu(self.up(self.second(x))))


class Decoder(nn.Module):
    """A tiny transformer that returns the loss of the next word."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(NUM_WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(num_layers))
        self.last = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, NUM_WORDS, bias=False)
        self.register_buffer("order", torch.arange(LENGTH))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.places(self.order)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.last(x))
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def decoder(dtype: torch.dtype = torch.float64, *, seed: int = 0, num_layers: int = 1) -> Decoder:
    """Return a decoder, whose weights depend on the seed alone."""
    torch.manual_seed(seed)
    return Decoder(num_layers).to(dtype)


def linear_plan() -> dict[str, ParallelStyle]:
    """Return the plan that cuts the linear layers of each block, and leaves everything else whole and plain."""
    return {
        **{f"layers.*.attention.{name}": ColwiseParallel() for name in ("q", "k", "v")},
        "layers.*.attention.out": RowwiseParallel(),
        "layers.*.up": ColwiseParallel(),
        "layers.*.down": RowwiseParallel(),
    }


def vocabulary_plan() -> dict[str, ParallelStyle]:
    """Return `linear_plan` with the words and the head cut too."""
    return {
        **linear_plan(),
        "words": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }


def sequence_plan() -> dict[str, ParallelStyle]:
    """Return the plan in which activations between the linear layers are cut along the sequence."""
    return {
        "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "places": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
        "layers.*.first": SequenceParallel(),
        "layers.*.attention": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        **{f"layers.*.attention.{name}": ColwiseParallel() for name in ("q", "k", "v")},
        "layers.*.attention.out": RowwiseParallel(output_layouts=Shard(1)),
        "layers.*.second": SequenceParallel(),
        "layers.*.up": ColwiseParallel(input_layouts=Shard(1)),
        "layers.*.down": RowwiseParallel(output_layouts=Shard(1)),
        "last": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }


PLANS = {"none": dict, "linear": linear_plan, "vocabulary": vocabulary_plan, "sequence": sequence_plan}


def parallel(model: nn.Module, mesh: DeviceMesh, plan: str = "linear") -> nn.Module:
    """Return `model` cut along the axis `mesh` by the plan called `plan`."""
    return parallelize_module(model, mesh, PLANS[plan]())


def batch(number: int = 0, rows: int = 8) -> torch.Tensor:
    """Return rows of random words."""
    return torch.randint(0, NUM_WORDS, (rows, LENGTH), generator=torch.Generator().manual_seed(number))


# ----------------------------------------------------------------------------------------------------------------------
# What `test_wrappers` asks of real ranks; each function runs on all of them at once, in `processes.spawn`.


CLIP = 0.5


def axes(world_size: int, shape: list[int] | None) -> tuple[DeviceMesh, DeviceMesh | None]:
    """Return the tensor axis and the data axis of a mesh of `shape`; only the first, of all ranks, without a shape."""
    if shape is None:
        return init_device_mesh("cpu", (world_size,), mesh_dim_names=("tensor",)), None
    mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=("data", "tensor"))
    return mesh["tensor"], mesh["data"]


def prepared(world_size: int, shape: list[int] | None, plan: str, num_layers: int = 1) -> Any:
    """Return a decoder, parallel by `plan` and prepared on a mesh of `shape`; each rank makes other weights first."""
    tensor, data = axes(world_size, shape)
    model = parallel(decoder(seed=distributed.get_rank(), num_layers=num_layers), tensor, plan)
    return elixir.prepare(model, mesh=data)


def own_rows(rows: torch.Tensor, data: DeviceMesh | None) -> torch.Tensor:
    """Return the rows of this rank: ranks of one tensor axis have the same."""
    return rows if data is None else rows.chunk(data.size())[data.get_local_rank()]


def trains(rank: int, world_size: int, how: dict[str, Any]) -> dict[str, Any]:
    """Train on the mesh `shape` by `plan`, and the same by one process; return how far they are apart.

    `how` may also name `num_layers`, `options`, `tightness`, and who clips: `clip`, "torch" or "elixir".
    """
    shape, plan, num_layers = how.get("shape"), how.get("plan", "linear"), how.get("num_layers", 2)
    options = dict(how.get("options", {}))
    if "tightness" in how:
        options["device_memory"] = int(how["tightness"] * _least_bytes(world_size, shape, plan, num_layers, options))
    steps = [batch(number % 3) for number in range(16)]
    torch._dynamo.reset()
    gc.collect()
    with Resident() as resident:
        before_bytes = resident.nbytes
    model = prepared(world_size, shape, plan, num_layers)
    own, mesh = compiled_with(model, **options), axes(world_size, shape)[1]
    optimizer = hybrid(model.parameters())
    losses, norms = [], []
    executed: dict[str, int] = {}

    def step(number: int, watch: Any = None) -> None:
        with watch or nullcontext():
            loss = own(own_rows(steps[number], mesh))
            loss.backward()
        losses.append(float(elixir.mean_loss(model, loss)))
        norms.append(float(full(_clip(model, optimizer, how.get("clip", "elixir")))))
        optimizer.step()
        optimizer.zero_grad()

    step(0)
    profiler = profile(activities=[ProfilerActivity.CPU], acc_events=True)
    step(1, profiler)
    for event in profiler.key_averages():
        name = event.key.removeprefix("_c10d_functional::").removesuffix("_")
        if event.key.startswith("_c10d_functional::") and name != "wait_tensor":
            executed[name] = executed.get(name, 0) + event.count
    # A thread of gloo may hold the tensor of a collective for a moment after its wait, longer than an op of this size
    # takes, so the least of some steps counts: on two cores, half of the steps of four ranks hold more than 1 % so.
    made, least_bytes = elixir.compilations(own)[-1].plan, sys.maxsize
    for number in range(2, len(steps)):
        peak_bytes = _peak_bytes(model, lambda number=number: step(number))
        least_bytes = min(least_bytes, peak_bytes - before_bytes)
        if number > 2 and _on_all(holds_as_planned(least_bytes, made)):
            break
    double = decoder(num_layers=num_layers)
    expected = _trained_alone(double, steps[: len(losses)], 1 if mesh is None else mesh.size())
    state, other = model.state_dict(), double.state_dict()
    assert list(state) == list(other)
    return {
        "loss": max(abs(here - there) for here, there in zip(losses, expected["losses"], strict=True)),
        "norm": max(abs(here - there) for here, there in zip(norms, expected["norms"], strict=True)),
        "weights": max((full(value) - other[name]).abs().max().item() for name, value in state.items()),
        "moved": expected["moved"],
        "executed": executed,
        "collectives": 0 if made.tensor is None else made.tensor.num_collectives,
        "measured": least_bytes,
        "holds": holds_as_planned(least_bytes, made),
        "planned": made.prediction.device_peak_bytes,
        "budget": made.budget_bytes,
        "optim": sorted({placement.optim.value for placement in made.placements}),
        "at": made.prediction.device_peak_at, "saving": sorted({group.saving.value for group in made.activations}),
    }  # fmt: skip


def holds_as_planned(measured_bytes: int, made: Plan) -> bool:
    """Return whether a step holds at most its budget, and what was planned within 1 %."""
    loop_bytes = 2048  # the loop keeps a few numbers for clipping, 1.3 KB
    planned_bytes = made.prediction.device_peak_bytes
    return measured_bytes <= made.budget_bytes + loop_bytes and planned_bytes == pytest.approx(measured_bytes, rel=0.01)


def _on_all(is_so: bool) -> bool:
    """Return whether `is_so` holds on all ranks."""
    flag = torch.tensor(int(is_so))
    distributed.all_reduce(flag, distributed.ReduceOp.MIN)
    return bool(flag)


def _peak_bytes(model: nn.Module, step: Callable[[], None]) -> int:
    """Return the peak of `step`, without the texts that ranks exchanged before."""
    control = executor_of(model).peers.control
    for _ in range(16):  # the last texts stay for as many exchanges, the plan among them
        control.exchange("", "nothing")
    texts_bytes = sum(text.nbytes for text in control._held)
    return elixir.measure_step(step, device="cpu").device_peak_bytes - texts_bytes


def _least_bytes(world_size: int, shape: list[int] | None, plan: str, num_layers: int, options: dict[str, Any]) -> int:
    model = prepared(world_size, shape, plan, num_layers)
    compiled = compiled_with(model, **{"micro_batches": 1, **options, "device_memory": 1})
    with pytest.raises(elixir.NoFeasiblePlan) as caught:
        compiled(own_rows(batch(), axes(world_size, shape)[1]))
    return caught.value.needed_bytes


def _clip(model: nn.Module, optimizer: Any, who: str) -> torch.Tensor:
    if who == "torch":
        return nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    return optimizer.clip_grad_norm_(CLIP)


def _trained_alone(model: nn.Module, steps: list[torch.Tensor], num_parts: int) -> dict[str, Any]:
    """Train `model` alone on the whole batches; the loss is the mean of `num_parts` parts of the rows."""
    optimizer, losses, norms = adamw(model.parameters()), [], []
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for rows in steps:
        loss = torch.stack([model(part) for part in rows.chunk(num_parts)]).mean()
        loss.backward()
        losses.append(loss.item())
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
    moved = max((value - before[name]).abs().max().item() for name, value in model.state_dict().items())
    return {"losses": losses, "norms": norms, "moved": moved}


def equals_torch(rank: int, world_size: int, plan: str) -> dict[str, bool]:
    """Compare loss and gradients in fp32 with those of torch's own eager model on the same ranks, bit by bit."""
    tensor, _ = axes(world_size, None)
    eager = parallel(decoder(torch.float32), tensor, plan)
    model = elixir.prepare(parallel(decoder(torch.float32), tensor, plan))
    before = list(map(id, model.parameters()))
    loss, expected = compiled_with(model)(batch()), eager(batch())
    loss.backward()
    expected.backward()
    pairs = zip(model.parameters(), eager.parameters(), strict=True)
    read = model.layers[0].up.weight
    return {
        "loss": torch.equal(loss, expected),
        "gradients": all(torch.equal(full(own.grad), full(other.grad)) for own, other in pairs),
        "eager read": torch.equal(full(read), full(eager.layers[0].up.weight)) and read.shape == (384, 96),
        "evaluates": torch.equal(model(batch()), expected),
        "same parameters": before == list(map(id, model.parameters())),
    }


def saves(rank: int, world_size: int, shape: list[int] | None, plan: str, folder: str) -> dict[str, Any]:
    """Save after two steps and load into other ranks' model; return whether it goes on as if nothing had happened."""
    tensor, data = axes(world_size, shape)

    def train(model: nn.Module, optimizer: Any, compiled: Callable[..., Any], number: int) -> float:
        loss = compiled(own_rows(batch(number), data))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    model = prepared(world_size, shape, plan)
    compiled, optimizer = compiled_with(model), hybrid(model.parameters())
    for number in range(2):
        train(model, optimizer, compiled, number)
    path = Path(folder) / f"{plan}-{world_size}"
    elixir.save(path, model, optimizer)
    weights = {name: value.clone() for name, value in elixir.full_state_dict(model).items()}
    last = train(model, optimizer, compiled, 2)

    other = parallel(decoder(seed=7), tensor, plan)
    elixir.prepare(other, mesh=data)
    other_optimizer = hybrid(other.parameters())
    elixir.load(path, other, other_optimizer)
    there = {name: full(value).clone() for name, value in other.state_dict().items()}
    again = train(other, other_optimizer, compiled_with(other), 2)
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    alone = decoder(seed=9)
    elixir.load(path, alone) if rank == 0 else None
    return {
        "full": rank > 0 or all(torch.equal(weights[name], value) for name, value in there.items()),
        "loss": again == last,
        "weights": all(torch.equal(full(one), full(two)) for one, two in pairs),
        "alone": rank > 0 or all(torch.equal(weights[name], value) for name, value in alone.state_dict().items()),
    }


def loads_blocks(rank: int, world_size: int, shape: list[int] | None, folder: str) -> dict[str, Any]:
    """Load moments in int8, which one process saved with the scales of blocks of whole rows, save them and load again.

    Returns which of the moments of this rank are those of the part that it has of the decoded ones, stored anew.
    """
    alone = elixir.prepare(decoder(torch.float32))
    optimizer = elixir.HybridAdamW(alone.parameters(), state_dtype="int8")
    alone(batch()).backward()
    optimizer.step()
    state = optimizer.state_dict()["state"]
    expected = [decoded_entry(state[number], param) for number, param in enumerate(alone.parameters())]
    if rank == 0:
        elixir.save(Path(folder) / "alone", alone, optimizer)
    distributed.barrier()
    tensor, data = axes(world_size, shape)
    same = {}
    for path in ("alone", "cut"):
        model = elixir.prepare(parallel(decoder(torch.float32, seed=3), tensor, "linear"), mesh=data)
        optimizer = elixir.HybridAdamW(model.parameters(), state_dtype="int8")
        elixir.load(Path(folder) / path, model, optimizer)
        for whole, (name, param) in zip(expected, model.named_parameters(), strict=True):
            part = {key: shard_like(whole[key], param) for key in ("exp_avg", "exp_avg_sq")}
            stored = with_form(part, MomentForm.INT8, own_shard(param))
            own = optimizer.state[param]
            same[f"{path} {name}"] = all(torch.equal(stored[key], own[key]) for key in stored)
        if path == "alone":
            elixir.save(Path(folder) / "cut", model, optimizer)
    return same


def from_meta(rank: int, world_size: int, shape: list[int] | None) -> dict[str, Any]:
    """Prepare a model on `meta`, in 16 bits; return how much of it this rank has, and whether it trains."""
    tensor, data = axes(world_size, shape)
    with torch.device("meta"):
        model = decoder(torch.float32)
    model.order = torch.arange(LENGTH)
    model = elixir.prepare(parallel(model, tensor, "vocabulary"), "cpu", mesh=data, param_dtype="bfloat16")
    whole = sum(param.numel() for param in model.parameters())
    own = sum((param.to_local() if hasattr(param, "to_local") else param).numel() for param in model.parameters())
    same = [full(param).float().sum().item() for param in model.parameters()]
    said = [None] * world_size
    distributed.all_gather_object(said, same)
    optimizer, compiled = hybrid(model.parameters()), compiled_with(model)
    losses = []
    for _ in range(3):
        loss = compiled(own_rows(batch(), data))
        loss.backward()
        optimizer.clip_grad_norm_(CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"share": own / whole, "same": said == [same] * world_size, "falls": losses[2] < losses[1] < losses[0]}


def refuses(rank: int, world_size: int) -> dict[str, str]:
    """Return the text of the error of each misuse."""
    tensor, _ = axes(world_size, None)
    unnamed = init_device_mesh("cpu", (1, world_size))
    named = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("data", "tensor"))
    other = init_device_mesh("cpu", (world_size,), mesh_dim_names=("expert",))
    uneven = nn.ModuleDict({"up": nn.Linear(4, 5), "down": nn.Linear(5, 4)})
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    tries: dict[str, Callable[[], Any]] = {
        "whole mesh": lambda: elixir.prepare(parallel(decoder(), named["tensor"]), mesh=named),
        "no names": lambda: elixir.prepare(parallel(decoder(), tensor), mesh=unnamed),
        "wrong name": lambda: elixir.prepare(parallel(decoder(), named["tensor"]), mesh=named["date"]),
        "uneven": lambda: elixir.prepare(parallelize_module(uneven, tensor, {"up": ColwiseParallel()})),
        "twice": lambda: elixir.prepare(
            parallel(parallelize_module(decoder(), other, {"head": ColwiseParallel()}), tensor)
        ),
        "not prepared": lambda: compiled_with(parallel(decoder(), tensor))(batch()),
    }
    said = {}
    for name, attempt in tries.items():
        try:
            attempt()
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said
