"""What tests ask of real ranks about updates: across steps, in the backward, on disk, and of 16-bit gradients."""

import copy
import errno
import gc
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import elixir_compile as elixir
from elixir_compile.base.errors import DiskFull
from elixir_compile.base.options import Options
from elixir_compile.graph.capture.modules import executor_of
from elixir_compile.graph.ops.optimizers import has_master
from elixir_compile.graph.ops.shards import is_sharded, own_grad, own_shard
from elixir_compile.ir import Lane, Plan, Tier, Verb
from elixir_compile.optim.hybrid import Hybrid
from elixir_compile.runtime.measure import Resident
from elixir_compile.search import Problem
from elixir_compile.search.space.buckets import moved_to_disk
from elixir_compile.session.cache import plan_for
from tests.pure.mixes import collectives
from tests.run.optimizers import Lion
from tests.run.ranks_training import Pair, batches, compiled_with, full, homes, least_bytes, mesh_of, own_rows, pair_of
from tests.run.updating import controlled_worker

# ----------------------------------------------------------------------------------------------------------------------
# What `test_ranks` asks of real ranks: updates across steps and in the backward, and state on disk.


CLOSE = 1e-6
"""How far fp32 of two ranks may be from one process: sums are added in another order."""


def local_values(pair: Pair) -> dict[str, torch.Tensor]:
    """Return copies of what this rank has of the weights and the optimizer state."""
    found = {name: own(param) for name, param in pair.model.named_parameters()}
    for index, entry in pair.optimizer.state_dict()["state"].items():
        found |= {f"{index}.{name}": own(torch.as_tensor(value)) for name, value in entry.items()}
    return {name: value.detach().clone() for name, value in found.items()}


def own(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank has of `tensor`."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def train(pair: Pair, steps: list[torch.Tensor], *, clips: bool = False) -> list[float]:
    """Train this rank alone, and return the losses of all ranks and the clip norms."""
    found: list[float] = []
    for batch in steps:
        found.append(pair.own_backward(batch))
        if clips:
            found.append(float(pair.optimizer.clip_grad_norm_(0.5)))
        pair.optimizer.step()
        pair.optimizer.zero_grad()
    return found


def train_double(pair: Pair, steps: list[torch.Tensor]) -> None:
    """Train the double of `pair` on the whole batches."""
    for batch in steps:
        pair.double_backward(batch)
        pair.double_optimizer.step()
        pair.double_optimizer.zero_grad()


def in_another_order(rank: int) -> Callable[[], float]:
    """Return a source of delays of up to 4 ms, others on each rank, so that updates end in another order."""
    chance = random.Random(rank)
    return lambda: chance.choice((0.0, 0.0, 0.001, 0.004))


def host_budget(name: str, batch: torch.Tensor, world_size: int) -> int:
    """Return a device budget under which buckets of the model called `name` live on the host."""
    return int(1.1 * least_bytes(name, batch, [world_size], dtype=torch.float32, planner="greedy"))


def updates_when_asked(rank: int, world_size: int, name: str) -> dict[str, Any]:
    """Train four steps under each moment of the update, and compare the bits that this rank has."""
    steps = batches(4)
    budget = host_budget(name, steps[0], world_size)
    expected: dict[bool, tuple[list[float], dict[str, torch.Tensor]]] = {}
    found: dict[str, Any] = {}
    with controlled_worker() as worker:
        worker.delay_s = in_another_order(rank)
        for update, clips in (
            ("after_backward", False),
            ("in_backward", False),
            ("after_backward", True),
            ("auto", True),
        ):
            pair = pair_of(
                name, [world_size], dtype=torch.float32, device_memory=budget, update=update, planner="greedy"
            )
            losses, num_before = train(pair, steps, clips=clips), worker.num_updates
            got = losses, local_values(pair)
            plan = elixir.compilations(pair.model)[-1].plan
            if update == "after_backward":
                assert worker.num_updates == num_before
                expected[clips] = got
                if not clips:
                    train_double(pair, steps)
                    found["apart"] = pair.apart()
            assert got[0] == expected[clips][0], update
            assert_same(expected[clips][1], got[1])
            found[f"{update}, {clips}"] = {"update": plan.update, "says": "update" in str(plan), **homes(pair.model)}
        found["queued"] = worker.num_updates
    return found


def refuses_changed_gradients(rank: int, world_size: int) -> None:
    """Change gradients that a backward has updated with, and clip them."""
    steps = batches(2)
    budget = host_budget("odd", steps[0], world_size)
    options = {"device_memory": budget, "planner": "greedy"}
    pair = pair_of("odd", [world_size], dtype=torch.float32, update="in_backward", **options)
    with landings(pair) as seen:
        train(pair, steps)
    assert {"device", "host"} == {home for home, _ in seen}
    assert all(is_inside for _, is_inside in seen)
    changes: list[Callable[[], object]] = [
        lambda: nn.utils.clip_grad_norm_(pair.model.parameters(), 1e-3),
        lambda: dict(pair.model.named_parameters())["up.weight"].grad.to_local().mul_(2.0),
        lambda: dict(pair.model.named_parameters())["up.weight"].grad.mul_(2.0),
    ]
    for change in changes:
        train(pair, steps[:1])
        pair.own_backward(steps[1])
        change()
        with pytest.raises(elixir.GradientsChanged, match="its gradient was changed"):
            pair.optimizer.step()
        grad = dict(pair.model.named_parameters())["up.weight"].grad
        copied = copy.deepcopy(grad)
        assert type(copied) is DTensor
        assert torch.equal(copied.to_local(), grad.to_local())
        pair.optimizer.zero_grad()
    kept_gradients_are_watched(steps, options, world_size)


@contextmanager
def landings(pair: Pair) -> Iterator[list[tuple[str, bool]]]:
    """Yield where parameters of cut buckets live, and whether their update begins before the end of the backward."""
    executor: Any = executor_of(pair.model)
    usual, seen = Hybrid.update_in_backward, list[tuple[str, bool]]()

    def update_in_backward(optimizer: Hybrid, params: Any, arrived: Any) -> None:
        bucket = executor.buckets.of(executor.slot_for(params[0]))
        if bucket.spec.is_sharded:
            seen.append((bucket.placement.param.value, executor.gradients.is_in_backward))
        usual(optimizer, params, arrived)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Hybrid, "update_in_backward", update_in_backward)
        yield seen


def kept_gradients_are_watched(steps: list[torch.Tensor], options: dict[str, Any], world_size: int) -> None:
    """Change gradients that somebody kept while the updates that read them are queued."""
    with controlled_worker() as worker:
        pair = pair_of("odd", [world_size], dtype=torch.float32, update="across_steps", **options)
        pair.own_backward(steps[0])
        kept = [param.grad for param in pair.model.parameters() if param.grad is not None]
        worker.gate.clear()
        pair.optimizer.step()
        torch._foreach_zero_(kept)
        worker.gate.set()
        with pytest.raises(elixir.GradientsChanged, match="before its queued update had read it"):
            pair.optimizer.wait()


def assert_same(expected: dict[str, torch.Tensor], got: dict[str, torch.Tensor]) -> None:
    """Fail unless all are the same bits."""
    assert expected.keys() == got.keys()
    different = [name for name, value in expected.items() if not torch.equal(value, got[name])]
    assert not different


READS: dict[str, Callable[[Pair, nn.Parameter], torch.Tensor]] = {
    "to_local": lambda pair, p: p.to_local(),
    "to_local without gradients": lambda pair, p: p.detach().to_local(),
    "full_tensor": lambda pair, p: p.full_tensor(),
    "state_dict": lambda pair, p: pair.model.state_dict()["up.weight"].to_local(),
    "eager": lambda pair, p: pair.model.up.weight.sum(),
    "op": lambda pair, p: (p + 1.0).to_local(),
    "deepcopy": lambda pair, p: copy.deepcopy(p).to_local(),
    "flatten": lambda pair, p: p._local_tensor,
    "state": lambda pair, p: pair.optimizer.state[p]["exp_avg"],
}


def reads_wait(rank: int, world_size: int) -> None:
    """Read a parameter in each way while its update is queued."""
    steps = batches(2)
    budget = host_budget("odd", steps[0], world_size)
    with controlled_worker() as worker:
        pair = pair_of(
            "odd", [world_size], dtype=torch.float32, device_memory=budget, update="across_steps", planner="greedy"
        )
        train(pair, steps[:1])
        pair.optimizer.wait()
        param = dict(pair.model.named_parameters())["up.weight"]
        for name, read in READS.items():
            worker.gate.clear()
            train(pair, steps[1:])
            assert type(param) is not DTensor, name
            assert isinstance(param, nn.Parameter), name
            assert param.shape == (401, 100)
            assert param.requires_grad
            assert type(param) is not DTensor, name
            before = executor_of(pair.model).slots["up.weight"].own.clone()
            threading.Timer(0.02, worker.gate.set).start()
            got = read(pair, param).detach().clone()
            assert (type(param) is DTensor) == (name != "state"), name  # which waits for all, and reads no parameter
            assert torch.equal(got, read(pair, param).detach()), name
            assert not torch.equal(before, param.to_local()), name
            pair.optimizer.wait()


def gathers_in_one_order(rank: int, world_size: int) -> None:
    """Let one rank be late with its first update and the other with its last one."""
    steps = batches(3)
    budget = host_budget("odd", steps[0], world_size)
    with controlled_worker() as worker:
        pair = pair_of(
            "odd", [world_size], dtype=torch.float32, device_memory=budget, update="across_steps", planner="greedy"
        )
        train(pair, steps[:1])
        pair.optimizer.wait()
        num_updates = worker.num_updates
        assert num_updates > 2
        late = 0 if rank else num_updates - 1

        def delay_s() -> float:
            return 0.1 if worker.num_updates % num_updates == late else 0.0

        worker.delay_s = delay_s
        train(pair, steps[1:])
        train_double(pair, steps)
        assert pair.apart() < CLOSE


def fails_on_one(rank: int, world_size: int, when: str) -> list[str]:
    """Let an update of the last rank fail, known `when` the next forward begins or only in it."""
    steps = batches(3)
    budget = host_budget("odd", steps[0], world_size)
    with controlled_worker() as worker:
        pair = pair_of(
            "odd", [world_size], dtype=torch.float32, device_memory=budget, update="across_steps", planner="greedy"
        )
        train(pair, steps[:1])
        pair.optimizer.wait()
        is_last = rank == world_size - 1
        worker.fail_at = worker.num_updates if is_last else -1
        if when == "in it":
            worker.delay_s = lambda: 0.5 if is_last else 0.0
        train(pair, steps[1:2])
        if when == "before":
            distributed.barrier()
            time.sleep(0.2)
        began_s = time.monotonic()
        try:
            pair.compiled(own_rows(steps[2]))
        except (ArithmeticError, elixir.PeerFailed) as error:
            assert time.monotonic() - began_s < 30
            return [type(error).__name__, str(error)]
    return ["nothing", ""]


@contextmanager
def on_disk(*, with_params: bool = False) -> Iterator[None]:
    """Inside, plans have all state that leaves the device on disk, and all parameters that do if `with_params`."""

    def decided(problem: Problem, options: Options) -> Plan:
        found = plan_for(problem, replace(options, plan_cache=False))
        if not problem.disk:
            return found
        moved = [
            moved_to_disk(bucket, home, with_params=with_params) if bucket.trainable or with_params else home
            for bucket, home in zip(found.buckets, found.placements, strict=True)
        ]
        return replace(found, placements=tuple(moved))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("elixir_compile.session.graph_planner.plan_for", decided)
        yield


def folders_of(path: Path) -> list[str]:
    """Return which ranks have a folder in `path`, with files in it."""
    return sorted({found.parent.name.split("-")[2] for found in path.glob("elixir-disk-*/*")})


def keeps_state_on_disk(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Train with state on disk and in memory, and compare the bits that this rank has."""
    path, steps = Path(folder), batches(3)
    budget = host_budget("odd", steps[0], world_size)
    options: dict[str, Any] = {
        "dtype": torch.float32,
        "device_memory": budget,
        "update": "across_steps",
        "planner": "greedy",
    }
    pair = pair_of("odd", [world_size], **options)
    losses = train(pair, steps, clips=True)
    expected = local_values(pair)
    with on_disk():
        pair = pair_of("odd", [world_size], disk_path=path, **options)
        assert train(pair, steps, clips=True) == losses
    plan = elixir.compilations(pair.model)[-1].plan
    # Elements past the last row are padding, which the plan counts and the disk need not hold.
    state_bytes = sum(
        bucket.shard_state_nbytes()
        for bucket, home in zip(plan.buckets, plan.placements, strict=True)
        if home.optim is Tier.DISK
    )
    distributed.barrier()
    found = {"homes": homes(pair.model)["optim"], "folders": folders_of(path), "planned": state_bytes}
    (mine,) = path.glob(f"elixir-disk-rank{rank}-*/")
    found["held"] = sum(file.stat().st_size for file in mine.iterdir())
    found["files"] = len(list(mine.iterdir()))
    assert_same(expected, local_values(pair))
    saved = copy.deepcopy(pair.optimizer.state_dict())
    pair.optimizer.load_state_dict(saved)
    assert_same(expected, local_values(pair))
    distributed.barrier()
    del pair
    torch._dynamo.reset()
    gc.collect()
    distributed.barrier()
    return {**found, "left": [file.name for file in path.iterdir()]}


def perceptron() -> nn.Module:
    """Return a model without buffers, so that it runs in 16 bits throughout."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(160, 321), nn.GELU(), nn.Linear(321, 320), nn.GELU(), nn.Linear(320, 8))


def keeps_masters(rank: int, world_size: int, folder: str, name: str, with_params: bool) -> list[list[str]]:
    """Train 16-bit parameters with masters by AdamW or Lion, and clip them, after the backward, and across steps with
    state on disk, and parameters there too if `with_params`; return the homes of what is on disk."""
    steps = torch.randn(3, 8, 160, generator=torch.Generator().manual_seed(rank)).bfloat16()
    found: list[list[str]] = []
    expected: dict[str, torch.Tensor] = {}
    budget = 1
    for update, disk_path in (("after_backward", None), ("across_steps", folder)):
        model = elixir.prepare(perceptron(), mesh=mesh_of([world_size]), param_dtype="bfloat16")
        optimizer: Any = elixir.hybrid({"AdamW": torch.optim.AdamW, "Lion": Lion}[name])(model.parameters(), lr=1e-3)
        options = {"planner": "greedy", "update": update, "disk_path": disk_path}
        if not found:
            with pytest.raises(elixir.NoFeasiblePlan) as raised:
                compiled_with(model, device_memory=1, micro_batches=1, **options)(steps[0])
            budget = int(1.1 * raised.value.needed_bytes)
        with on_disk(with_params=with_params):
            compiled = compiled_with(model, device_memory=budget, **options)
            for batch in steps:
                compiled(batch).square().mean().backward()
                optimizer.clip_grad_norm_(0.5)
                optimizer.step()
                optimizer.zero_grad()
        pair = Pair(model=model, compiled=compiled, optimizer=optimizer, double=model, double_optimizer=optimizer)
        got = local_values(pair)
        expected = expected or got
        assert_same(expected, got)
        found.append(homes(model)["param" if with_params else "optim"])
    return found


def has_no_room(rank: int, world_size: int, folder: str) -> list[str]:
    """Let the disk of the last rank be full, and return what the first forward raises."""
    steps = batches(1)
    budget = host_budget("odd", steps[0], world_size)

    def full_disk(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with on_disk(), pytest.MonkeyPatch.context() as patch:
        if rank == world_size - 1:
            patch.setattr(os, "posix_fallocate", full_disk)
        pair = pair_of(
            "odd", [world_size], dtype=torch.float32, device_memory=budget, planner="greedy", disk_path=Path(folder)
        )
        try:
            pair.compiled(own_rows(steps[0]))
        except (DiskFull, elixir.PeerFailed) as error:
            return [type(error).__name__, str(error)]
    return ["nothing", ""]


# ----------------------------------------------------------------------------------------------------------------------
# What `test_rank_memory` asks of real ranks: gradients reduced in fp32, and float16 under a GradScaler.


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


def compiled_op_by_op(model: nn.Module, **options: object) -> Callable[..., Any]:
    """Return `model` compiled op by op."""
    torch._dynamo.reset()
    options = {"inner": "aot_eager", "planner": "greedy", "report": False, "plan_cache": False, **options}
    return torch.compile(model, backend="elixir", options=options)


def budget_of(shape: list[int], param_dtype: str | None, x: torch.Tensor, **options: object) -> int:
    """Return a budget just above the least: parameters live on the host."""
    model = prepared(shape, param_dtype)
    elixir.HybridAdamW(model.parameters())
    with pytest.raises(elixir.NoFeasiblePlan) as raised:
        compiled_op_by_op(model, device_memory=1, micro_batches=1, **options)(x)
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
    compiled, optimizer = compiled_op_by_op(model, **options), elixir.HybridAdamW(model.parameters(), lr=1e-2)

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
    compiled, optimizer = compiled_op_by_op(model, **options), elixir.HybridAdamW(model.parameters(), lr=1e-2)
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
    compiled, double = compiled_op_by_op(model, reduce_dtype="float32"), Small().bfloat16()
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
    compiled_op_by_op(model, reduce_dtype="float32")(x)
    if rank == 0:
        elixir.save_plan(plan_of(model), path)
    distributed.barrier()
    other = prepared([world_size], "bfloat16")
    with pytest.raises(elixir.PlanMismatch, match="reduce dtype: it was made for float32, here is bfloat16"):
        compiled_op_by_op(other, plan=path)(x)
    compiled_op_by_op(other, plan=path, reduce_dtype="float32")(x).backward()
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
    return [own_shard(tensor).detach().clone() for tensor in tensors]


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
    compiled, optimizer = compiled_op_by_op(model, **options), elixir.HybridAdamW(model.parameters(), lr=1e-2, eps=1e-2)
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
        compiled, optimizer = compiled_op_by_op(model), make(model.parameters())
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
