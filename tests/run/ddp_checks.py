"""What `test_wrappers` asks of two ranks in DistributedDataParallel; each function runs on both."""

import gc
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._dynamo_utils import _annotate_modules_for_dynamo
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel import distributed as distributed_module

import elixir_compile as elixir
from elixir_compile import compat
from elixir_compile.graph.capture.modules import executor_of
from elixir_compile.ir import Tier

OPTIONS: Mapping[str, Any] = {"inner": "aot_eager", "report": False, "replan": False, "plan_cache": False}


class Net(nn.Module):
    """Two layers and a head; `branch` names one of two layers that not every batch needs."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.branches = nn.ModuleDict({name: nn.Linear(width, width) for name in ("left", "right")})
        self.last = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor, branch: str = "both") -> torch.Tensor:
        x = torch.relu(self.first(x))
        for name, layer in self.branches.items():
            if branch in (name, "both"):
                x = torch.relu(layer(x))
        return self.last(x)


class Broken(Net):
    """A graph break in the middle, so that a step has two graphs, which share the last layer's parameters."""

    def forward(self, x: torch.Tensor, branch: str = "both") -> torch.Tensor:
        x = self.branches["right"](torch.relu(self.first(x)))
        torch._dynamo.graph_break()
        return self.last(torch.relu(self.branches["left"](x)))


def wrapped(model: nn.Module, backend: str, where: str, options: Mapping[str, Any], **ddp: Any) -> nn.Module:
    """Return `model` inside DistributedDataParallel and compiled by `backend`, in one of three orders."""
    how: dict[str, Any] = {"backend": backend}
    if backend == "elixir":
        how["options"] = {**OPTIONS, **options}
    if where == "around":
        return torch.compile(DistributedDataParallel(model, **ddp), **how)
    if where == "inside":
        return DistributedDataParallel(torch.compile(model, **how), **ddp)
    model.compile(**how)
    return DistributedDataParallel(model, **ddp)


def doubled(state: object, bucket: distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Return twice the sum of the gradients of both ranks: a communication hook of a user."""
    work = distributed.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0].mul_(2.0))


HOOKS: Mapping[str, Callable[[DistributedDataParallel], None]] = {
    "fp16": lambda ddp: ddp.register_comm_hook(None, default_hooks.fp16_compress_hook),
    "user": lambda ddp: ddp.register_comm_hook(None, doubled),
    "powerSGD": lambda ddp: ddp.register_comm_hook(
        powerSGD_hook.PowerSGDState(process_group=None, start_powerSGD_iter=2, min_compression_rate=0.5),
        powerSGD_hook.powerSGD_hook,
    ),
}


def trained(backend: str, how: Mapping[str, Any], rank: int) -> dict[str, torch.Tensor]:
    """Return the weights after three steps of a model that `how` describes, whose gradients both ranks share."""
    torch.compiler.reset()
    torch.manual_seed(3)
    model = (Broken if how.get("breaks") else Net)(how.get("width", 16))
    ddp = how.get("ddp", {})
    own = wrapped(model, backend, how.get("where", "around"), how.get("options", {}), **ddp)
    inside = own if isinstance(own, DistributedDataParallel) else own._orig_mod
    if "hook" in how:
        HOOKS[how["hook"]](inside)
    is_hybrid = backend == "elixir" and how.get("hybrid")
    lr = how.get("lr", 0.05)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr, momentum=0.9)
    if how.get("hybrid"):
        optimizer = elixir.HybridAdamW(model.parameters(), lr) if is_hybrid else _adamw(model, lr)
    generator = torch.Generator().manual_seed(rank)
    num_calls = how.get("num_calls", 1)
    for _ in range(3):
        for call in range(num_calls):
            with inside.no_sync() if call + 1 < num_calls else nullcontext():
                x = torch.randn(4, how.get("width", 16), generator=generator)
                branch = ("left", "right")[rank] if how.get("branches") else "both"
                own(x, branch).square().mean().backward()
        if how.get("clips"):
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad(set_to_none=not how.get("zeroes"))
    if backend == "elixir":
        assert len(elixir.compilations(model)) == how.get("num_graphs", 1)
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def _adamw(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr, fused=True)


def trains_as_eager(rank: int, world_size: int, cases: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return for each case what differs from `aot_eager` under DistributedDataParallel, and between the ranks."""
    found: dict[str, Any] = {}
    for name, how in cases.items():
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"The \.grad attribute")  # Dynamo's own, at a graph break
            expected, got = (trained(backend, how, rank) for backend in ("aot_eager", "elixir"))
        apart = max((got[key].double() - expected[key].double()).abs().max().item() for key in expected)
        total = torch.stack([value.double().sum() for value in got.values()])
        everyone = [torch.zeros_like(total) for _ in range(world_size)]
        distributed.all_gather(everyone, total)
        found[name] = {"apart": apart, "ranks_differ": not torch.equal(*everyone)}
    return found


def keeps_to_its_budget(rank: int, world_size: int, ddp: Mapping[str, Any]) -> dict[str, int]:
    """Train with the smallest budget; return it with the bytes that the allocator counted in a step and in the wrapper.

    torch does not tell of the wrapper's buckets later: no tensor of Python has their memory.
    """

    def made(budget_bytes: int) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer, int]:
        torch.compiler.reset()
        torch.manual_seed(3)
        model = Net(128)
        with compat.AllocatorProfile() as seen:
            # What it would send between ranks first is freed later, by a thread of gloo.
            inside = DistributedDataParallel(model, init_sync=False, **ddp)
        added_bytes = sum(nbytes for _, _, nbytes in seen.allocations())
        options = {**OPTIONS, "device_memory": budget_bytes}
        optimizer = elixir.HybridAdamW(model.parameters(), 0.01)
        return model, torch.compile(inside, backend="elixir", options=options), optimizer, added_bytes

    def least_bytes() -> int:
        refusing = made(1)  # with its optimizer, which may keep its state on the host
        with pytest.raises(elixir.NoFeasiblePlan, match=r"prepare\(model, mesh=...\) instead of it") as refused:
            refusing[1](x)
        return refused.value.needed_bytes  # its traceback would keep the model

    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(rank))
    budget_bytes = least_bytes()
    model, own, optimizer, added_bytes = made(budget_bytes)

    def step() -> None:
        own(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()  # the reducer makes its buckets anew before the second forward
    gc.collect()
    peak_bytes = elixir.measure_step(step, device="cpu").device_peak_bytes
    held = executor_of(model)
    plan = elixir.compilations(model)[-1].plan
    assert all(placement.param is Tier.DEVICE for placement in plan.placements)
    return {
        "budget": budget_bytes,
        "peak": peak_bytes,
        "buckets": added_bytes,
        "counted": held.reducers.bucket_bytes(held.device),
        "params": sum(param.nbytes for param in model.parameters()),
    }


def follows_a_late_wrapper(rank: int, world_size: int) -> float:
    """Train a compiled model alone with parameters on the host, then inside the wrapper: return how far it is from
    eager training."""
    weights = []
    warnings.simplefilter("ignore", elixir.RanksApart)
    for backend in ("aot_eager", "elixir"):
        torch.compiler.reset()
        torch.manual_seed(3)
        model = Net()
        options = {**OPTIONS, "planner": "zero3_offload"} if backend == "elixir" else None
        model.compile(backend=backend, options=options)
        optimizer: Any = torch.optim.SGD(model.parameters(), 0.05)
        own: nn.Module = model
        for number in range(4):
            if number == 1:
                own = DistributedDataParallel(model)
            own(torch.randn(4, 16, generator=torch.Generator().manual_seed(number + rank))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append([param.detach().clone() for param in model.parameters()])
    return max((one - other).abs().max().item() for one, other in zip(*weights, strict=True))


class _Engine(nn.Module):
    """As DeepSpeed's engine looks from outside."""

    __module__ = "deepspeed.runtime.engine"

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


class _Outer(_Engine):
    """A module of the user around another."""

    __module__ = "outer"


def _in_parallel_apply(call: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return `call` as a thread of `nn.DataParallel` runs it for one of several devices."""
    namespace: dict[str, Any] = {"__name__": "torch.nn.parallel.parallel_apply", "call": call}
    exec("def worker(x):\n    return call(x)", namespace)
    return namespace["worker"]


def _compiled(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend="elixir", options={**OPTIONS, **options})


def _shared() -> nn.Module:
    return elixir.prepare(Net(), mesh=init_device_mesh("cpu", (distributed.get_world_size(),)))


def _mixed_precision() -> DistributedDataParallel:
    """Return a model in a wrapper that has a precision of its own, as it would on an accelerator."""
    made = DistributedDataParallel(Net())
    made.mixed_precision = distributed_module._MixedPrecision()
    return made


def _as_fsdp(model: nn.Module) -> nn.Module:
    """Return `model` marked as FullyShardedDataParallel marks its module for Dynamo; it needs an accelerator to run."""
    _annotate_modules_for_dynamo(model, set(), use_orig_params=True)
    return model


def _with_flat_parameters(model: Net) -> Net:
    """Return `model` with views of one flat parameter in place of its parameters."""
    flat = nn.Parameter(torch.zeros(sum(param.numel() for param in model.parameters())))
    at = 0
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            delattr(module, name)
            setattr(module, name, flat[at : at + param.numel()].view(param.shape))
            at += param.numel()
    return model


WRONG: Mapping[str, Callable[[torch.Tensor], object]] = {
    "fully_shard": lambda x: _compiled(fully_shard(Net()))(x),
    "fully_shard of layers": lambda x: _compiled(_with_sharded_layers(Broken()))(x),
    "FullyShardedDataParallel": lambda x: _compiled(_as_fsdp(Net()))(x),
    "its flat parameters": lambda x: _compiled(_as_fsdp(_with_flat_parameters(Net())))(x),
    "DeepSpeed": lambda x: _compiled(_Engine(Net()))(x),
    "DeepSpeed around": lambda x: _Engine(_compiled(Net()))(x),
    "DataParallel": lambda x: _in_parallel_apply(_compiled(Net()))(x),
    "shared": lambda x: DistributedDataParallel(_shared()),
    "shared inside": lambda x: DistributedDataParallel(_Outer(_shared())),
    "update": lambda x: _compiled(DistributedDataParallel(Net()), update="in_backward")(x),
    "reduce_dtype": lambda x: _compiled(DistributedDataParallel(Net()), reduce_dtype="float32")(x),
    "mixed_precision": lambda x: _compiled(_mixed_precision())(x),
}
"""What has to be refused before the first step, by name."""


def _with_sharded_layers(model: Net) -> Net:
    fully_shard(model.branches["left"])
    return model


def refuses(rank: int, world_size: int) -> dict[str, str]:
    """Return the class and the text of the error of each of `WRONG`."""
    found = {}
    for name, run in WRONG.items():
        torch.compiler.reset()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                run(torch.randn(2, 16))
            found[name] = "nothing was raised"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def warns_of_ranks_apart(rank: int, world_size: int) -> list[list[str]]:
    """Return the warnings of the first steps of a model that nothing shares, of one that a wrapper shares, and of one
    that only infers."""
    found = []
    alone, inside, infers = Net(), DistributedDataParallel(Net()), Net()
    for model in (alone, inside, infers):
        torch.compiler.reset()
        own = _compiled(model)
        with warnings.catch_warnings(record=True) as seen, torch.set_grad_enabled(model is not infers):
            warnings.simplefilter("always")
            for rows in (2, 2):
                own(torch.randn(rows, 16))
        found.append([str(one.message) for one in seen if isinstance(one.message, elixir.RanksApart)])
    return found


def wraps_sequential(rank: int, world_size: int) -> dict[str, list[int]]:
    """Return how often a model of torch's modules alone was captured, and warned of, by the order of wrappers."""
    found = {}
    for where in ("around", "inside", "in place"):
        torch.compiler.reset()
        model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
        own = wrapped(model, "elixir", where, {})
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            own(torch.randn(2, 16)).sum().backward()
            optimizer.step()
            captured = elixir.compilations(model)
        found[where] = [len(captured), sum("this SGD" in str(one.message) for one in seen)]
    return found


def outlives_a_wrapper(rank: int, world_size: int) -> list[tuple[bool, float]]:
    """Train a compiled model inside the wrapper, then without it once the wrapper is freed: return for both whether a
    wrapper reduces its gradients, and how far they are from those of eager training."""
    found = []
    model, eager = Net(), Net()
    eager.load_state_dict(model.state_dict())
    torch.compiler.reset()
    model.compile(backend="elixir", options=OPTIONS)
    warnings.simplefilter("ignore", elixir.RanksApart)
    for is_inside in (True, False):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(rank))
        own = [DistributedDataParallel(each) if is_inside else each for each in (model, eager)]
        for each in own:
            each(x).square().mean().backward()
        slots = executor_of(model).slots.values()
        pairs = zip(model.parameters(), eager.parameters(), strict=True)
        apart = max((one.grad - other.grad).abs().max().item() for one, other in pairs)  # type: ignore[operator]
        found.append((any(slot.is_reduced for slot in slots), apart))
        for param in (*model.parameters(), *eager.parameters()):
            param.grad = None
        del own, each
        gc.collect()
    return found


def moves_nothing(rank: int, world_size: int) -> bool:
    """Return whether `model.to(device)` leaves the shards of a model whose optimizer is made."""
    model = _shared()
    optimizer = elixir.HybridAdamW(model.parameters(), 0.01)
    before = list(model.parameters())
    model.to("cpu")
    _compiled(model)(torch.randn(2, 16)).sum().backward()
    optimizer.step()
    return all(one is other for one, other in zip(before, model.parameters(), strict=True))


def reports(rank: int, world_size: int) -> dict[str, Any]:
    """Return what several of these functions return, by name."""
    return {
        one.__name__: one(rank, world_size)
        for one in (refuses, warns_of_ranks_apart, wraps_sequential, outlives_a_wrapper, moves_nothing)
    }
