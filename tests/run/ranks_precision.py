"""What `test_ranks_precision` asks of real ranks: gradients reduced in fp32, and float16 under a GradScaler."""

import copy
import gc
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh

import elixir_compile as elixir
from elixir_compile.graph.capture.modules import executor_of
from elixir_compile.graph.ops.optimizers import has_master
from elixir_compile.graph.ops.shards import is_sharded, own_grad, own_part
from elixir_compile.ir import Lane, Plan, Verb
from elixir_compile.runtime.measure import Resident
from tests.pure.collectives import collectives
from tests.run.ranks_training import full, own_rows

WIDTH = 101
"""Weights of 82 kB in 16 bits are cut, unevenly; what has 101 or 405 elements is not."""
SCALE = 2.0**10


class Small(nn.Module):
    """A parameter that each rank has whole in front of two that are cut; returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.up = nn.Linear(WIDTH, 4 * WIDTH + 1)
        self.down = nn.Linear(4 * WIDTH + 1, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        return (x + self.down(torch.tanh(self.up(x)))).float().square().mean()


def rows(num_batches: int, num_rows: int = 24) -> list[torch.Tensor]:
    """Return batches of different numbers."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(num_rows, WIDTH, generator=generator) for _ in range(num_batches)]


def prepared(shape: list[int], param_dtype: str | None) -> nn.Module:
    """Return the model over a mesh of `shape`."""
    return elixir.prepare(Small(), mesh=init_device_mesh("cpu", tuple(shape)), param_dtype=param_dtype)


def compiled_with(model: nn.Module, **options: object) -> Callable[..., Any]:
    """Return `model` compiled op by op."""
    torch._dynamo.reset()
    options = {"inner": "aot_eager", "planner": "greedy", "report": False, "plan_cache": False, **options}
    return torch.compile(model, backend="elixir", options=options)


def budget_of(shape: list[int], param_dtype: str | None, x: torch.Tensor, **options: object) -> int:
    """Return a budget just above the least: parameters live on the host."""
    model = prepared(shape, param_dtype)
    elixir.HybridAdamW(model.parameters())
    with pytest.raises(elixir.NoFeasiblePlan) as raised:
        compiled_with(model, device_memory=1, micro_batches=1, **options)(x)
    return int(1.02 * raised.value.needed_bytes)


def plan_of(model: nn.Module) -> Plan:
    """Return the plan of the last graph."""
    return elixir.compilations(model)[-1].plan


def means_alone(double: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Return the mean in fp32, over ranks, of the gradients that `double` has of each rank's rows."""
    double.zero_grad()
    double(x).backward()
    means = [param.grad.float() for param in double.parameters()]
    for mean in means:
        distributed.all_reduce(mean)
        mean.div_(distributed.get_world_size())
    return means


def holds_what_is_planned(rank: int, world_size: int, shape: list[int], is_tight: bool) -> dict[str, Any]:
    """Measure a step that reduces in fp32, and return its peak, and that of the plan.

    The texts that ranks exchanged do not count, nor what a product of matrices in 16 bits allocates for itself.
    """
    scratch_bytes = max(map(_scratch_bytes, _products()))
    x = own_rows(rows(1)[0]).bfloat16()
    options: dict[str, object] = {"reduce_dtype": "float32"}
    if is_tight:
        options["device_memory"] = budget_of(shape, "bfloat16", x, **options)
    torch._dynamo.reset()
    gc.collect()
    model = prepared(shape, "bfloat16")
    compiled, optimizer = compiled_with(model, **options), elixir.HybridAdamW(model.parameters(), lr=1e-2)

    def step() -> None:
        compiled(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    texts_bytes = sum(text.nbytes for text in executor_of(model).ranks.control._held)
    record, plan = elixir.measure_step(step), plan_of(model)
    return {
        "measured": record.device_peak_bytes - texts_bytes,
        "planned": plan.prediction.device_peak_bytes, "scratch": scratch_bytes,
        "param": sorted({placement.param.value for placement in plan.placements}),
    }  # fmt: skip


def _products() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the factors of the products in a step of `Small` in 16 bits, with the rows of one rank."""
    model, x = Small().bfloat16(), own_rows(rows(1)[0]).bfloat16()
    up, down, wide = model.up.weight.detach(), model.down.weight.detach(), x.new_ones(len(x), model.up.out_features)
    return [(x, up.t()), (wide, down.t()), (x, down), (x.t(), wide), (wide, up), (wide.t(), x)]


def _scratch_bytes(factors: tuple[torch.Tensor, torch.Tensor]) -> int:
    """Return the bytes that the product of `factors` allocates beside its result."""
    one, other = factors
    with Resident() as resident:
        before_bytes = resident.nbytes
    peak_bytes = elixir.measure_step(lambda: one @ other, device="cpu").device_peak_bytes
    return peak_bytes - before_bytes - len(one) * other.shape[1] * one.element_size()


def reduces_in_fp32(rank: int, world_size: int, shape: list[int], is_tight: bool) -> dict[str, Any]:
    """Train two steps of three micro-batches, and compare gradients and collectives with what they should be."""
    batches = [own_rows(batch).bfloat16() for batch in rows(6)]
    options: dict[str, object] = {"reduce_dtype": "float32"}
    if is_tight:
        options["device_memory"] = budget_of(shape, "bfloat16", batches[0], **options)
    model = prepared(shape, "bfloat16")
    compiled, optimizer = compiled_with(model, **options), elixir.HybridAdamW(model.parameters(), lr=1e-2)
    double = torch.compile(Small().bfloat16(), backend="aot_eager")
    ledger = executor_of(model).ledger
    for first in (0, 3):
        with torch.no_grad():
            for own, other in zip(model.parameters(), double.parameters(), strict=True):
                other.copy_(full(own))
        totals = None
        for x in batches[first : first + 3]:
            times, nbytes = Counter(ledger.times), Counter(ledger.bytes)
            compiled(x).backward()
            times, nbytes = Counter(ledger.times) - times, Counter(ledger.bytes) - nbytes
            means = means_alone(double, x)
            totals = means if totals is None else [one + other for one, other in zip(totals, means, strict=True)]
            for param, total in zip(model.parameters(), totals, strict=True):
                assert param.grad.dtype == own_grad(param).dtype == torch.float32
                assert param.grad.placements == param.placements
                torch.testing.assert_close(full(param.grad), total, rtol=0, atol=2e-7)
        optimizer.step()
        optimizer.zero_grad()
    record = elixir.compilations(compiled)[-1]
    plan = record.plan
    has_planned_collectives(plan, times, nbytes)
    shared = {work: own for work, own in nbytes.items() if work[0] in (Lane.GATHER, Lane.REDUCE)}
    assert shared == {work: traffic.nbytes for work, traffic in collectives(record.graph, plan).items()}
    return {
        "param": sorted({placement.param.value for placement in plan.placements}),
        "is_cut": sorted({bucket.is_sharded for bucket in plan.buckets}),
    }


def sums_calls_in_fp32(rank: int, world_size: int, order: str) -> dict[str, float]:
    """Run two steps of the calls `order`, and compare the gradient of each with the sum in fp32 of the means of each
    call. Returns how far they are apart, and how far the sums in 16 bits would be."""
    batches = [own_rows(batch).bfloat16() for batch in rows(order.count("F"))]
    model = prepared([world_size], "bfloat16")
    outstanding = max(order[:end].count("F") - order[:end].count("B") for end in range(len(order)))
    elixir.prepare(model, outstanding=outstanding, calls=len(batches))
    compiled, double = compiled_with(model, reduce_dtype="float32"), Small().bfloat16()
    exact = torch.compile(double, backend="aot_eager")
    apart = narrow = 0.0
    for _ in range(2):
        forwards, waiting = iter(batches), []
        for letter in order:
            waiting.append(compiled(next(forwards))) if letter == "F" else waiting.pop(0).backward()
        sums: list[torch.Tensor] | None = None
        for x in batches:
            means = means_alone(exact, x)
            sums = means if sums is None else [total + mean for total, mean in zip(sums, means, strict=True)]
        assert sums is not None
        for param, total in zip(model.parameters(), sums, strict=True):
            assert own_grad(param).dtype == torch.float32
            apart = max(apart, (full(param.grad) - total).abs().max().item())
            narrow = max(narrow, (total.bfloat16().float() - total).abs().max().item())
            param.grad = None
    return {"apart": apart, "narrow": narrow}


def refuses_other_plans(rank: int, world_size: int, folder: str) -> None:
    """Follow a plan that reduces in fp32, with the option and without it."""
    x, path = own_rows(rows(1)[0]).bfloat16(), f"{folder}/plan.json"
    model = prepared([world_size], "bfloat16")
    compiled_with(model, reduce_dtype="float32")(x)
    if rank == 0:
        elixir.save_plan(plan_of(model), path)
    distributed.barrier()
    other = prepared([world_size], "bfloat16")
    with pytest.raises(elixir.PlanMismatch, match="reduce dtype: it was made for float32, here is bfloat16"):
        compiled_with(other, plan=path)(x)
    compiled_with(other, plan=path, reduce_dtype="float32")(x).backward()
    assert {param.grad.dtype for param in other.parameters()} == {torch.float32}


def has_planned_collectives(plan: Plan, times: Counter[str], nbytes: Counter[tuple[Lane, str]]) -> None:
    """Fail unless `times` and `nbytes` of a step are those of `plan`, with gradients of 4 bytes an element."""
    assert {bucket.reduce_dtype for bucket in plan.buckets} == {"float32"}
    cut = {bucket.id: bucket for bucket in plan.buckets if bucket.is_sharded}
    lanes = {Verb.GATHER: (Lane.GATHER, 2), Verb.REDUCE: (Lane.REDUCE, 4)}
    expected_times, expected_bytes = Counter[str](), Counter[tuple[Lane, str]]()
    for action in plan.schedules[0].actions:
        if action.verb in lanes and str(action.target) in cut:
            lane, item_bytes = lanes[action.verb]
            numels = cut[str(action.target)].shard_numels
            expected_times[f"{action.verb} {action.target}"] += 1
            expected_bytes[lane, f"{action.verb} {action.target}"] += item_bytes * len(numels) * max(numels)
    assert {label: times[label] for label in expected_times} == expected_times
    assert {work: nbytes[work] for work in expected_bytes} == expected_bytes


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return copies of all that this rank has of weights and state."""
    state = optimizer.state_dict()["state"]
    kept = [entry[name] for key, entry in sorted(state.items()) for name in sorted(entry)]
    tensors = [*model.parameters(), *(value for value in kept if isinstance(value, torch.Tensor))]
    return [own_part(tensor).detach().clone() for tensor in tensors]


def scaled_step(
    compiled: Callable[..., Any],
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    x: torch.Tensor,
    *,
    spoiled: torch.Tensor | None = None,
    value: float = torch.inf,
    unscales: bool = False,
) -> None:
    """Take one step; what this rank has of the gradient of `spoiled` has `value` in it."""
    scaler.scale(compiled(x)).backward()
    if spoiled is not None:
        own_grad(spoiled).view(-1)[-1] = value
    if isinstance(optimizer, elixir.HybridAdamW) and not unscales:
        optimizer.clip_grad_norm_(1.0, grad_scale=scaler.get_scale())
    if unscales:
        scaler.unscale_(optimizer)
    try:
        scaler.step(optimizer)
    finally:
        scaler.update()
        optimizer.zero_grad()


def skips_together(rank: int, world_size: int, reduce_dtype: str | None, is_tight: bool) -> dict[str, Any]:
    """Train in float16; in one step the gradient of rank 1 alone overflows. One process trains on the whole batch."""
    batches = rows(5)
    options: dict[str, object] = {"reduce_dtype": reduce_dtype}
    if is_tight:
        options["device_memory"] = budget_of([world_size], "float16", own_rows(batches[0]).half(), **options)
    model = prepared([world_size], "float16")
    compiled, optimizer = compiled_with(model, **options), elixir.HybridAdamW(model.parameters(), lr=1e-2, eps=1e-2)
    assert not is_sharded(model._parameters["scale"])
    assert has_master(model._parameters["scale"])
    double = Small()
    double_optimizer = torch.optim.AdamW(double.parameters(), lr=1e-2, eps=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=100)
    before = copy.deepcopy(double.state_dict())
    for number, batch in enumerate(batches):
        if number != 2:
            scaled_step(compiled, optimizer, scaler, own_rows(batch).half())
            double(batch).backward()
            nn.utils.clip_grad_norm_(double.parameters(), 1.0)
            double_optimizer.step()
            double_optimizer.zero_grad()
            continue
        held = state_of(model, optimizer)
        spoiled = dict(model.named_parameters())["down.weight"] if rank == 1 else None
        scaled_step(compiled, optimizer, scaler, own_rows(batch).half(), spoiled=spoiled)
        for tensor, other in zip(held, state_of(model, optimizer), strict=True):
            assert torch.equal(tensor, other)
        assert scaler.get_scale() == SCALE / 2
    state = optimizer.state_dict()["state"]
    masters = [full(state[index]["master"]) for index in range(len(state))]
    apart = [(a - b).abs().max().item() for a, b in zip(masters, double.parameters(), strict=True)]
    moved = [(value - before[name]).abs().max().item() for name, value in double.state_dict().items()]
    return {
        "steps": sorted({int(entry["step"]) for entry in state.values()}), "scale": scaler.get_scale(),
        "apart": max(apart), "moved": min(moved),
        "param": sorted({placement.param.value for placement in plan_of(model).placements}),
    }  # fmt: skip


def skips_in_fp32(rank: int, world_size: int) -> None:
    """Scale the loss of an fp32 model: every optimizer of ours skips on all ranks, and who unscales first is told."""
    makes = [
        lambda params: elixir.HybridAdamW(params, lr=1e-2),
        lambda params: elixir.hybrid(torch.optim.SGD)(params, lr=1e-2),
    ]
    for make in makes:
        model, batches = prepared([world_size], None), [own_rows(batch) for batch in rows(3)]
        compiled, optimizer = compiled_with(model), make(model.parameters())
        weight = dict(model.named_parameters())["down.weight"]
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        scaled_step(compiled, optimizer, scaler, batches[0])
        held = state_of(model, optimizer)
        scaled_step(compiled, optimizer, scaler, batches[1], spoiled=weight if rank == 1 else None, value=torch.nan)
        assert scaler.get_scale() == SCALE / 2
        told = {"spoiled": weight if rank == 1 else None, "unscales": True}
        if rank == 1:
            scaled_step(compiled, optimizer, scaler, batches[1], **told)
        else:
            with pytest.raises(elixir.OverflowUnseen, match="rank 0 would take the step"):
                scaled_step(compiled, optimizer, scaler, batches[1], **told)
        for tensor, other in zip(held, state_of(model, optimizer), strict=True):
            assert torch.equal(tensor, other)
        scaled_step(compiled, optimizer, scaler, batches[2], unscales=True)
        assert not torch.equal(held[0], state_of(model, optimizer)[0])


def all_of(rank: int, world_size: int, checks: list[list[Any]]) -> list[Any]:
    """Return what each of `checks`, a name and arguments, returns, one after another in the same processes."""
    found = []
    for name, *arguments in checks:
        print(f"{name} {arguments}", flush=True)
        found.append(globals()[name](rank, world_size, *arguments))
    return found
