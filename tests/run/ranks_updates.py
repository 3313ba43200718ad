"""What `test_rank_updates` asks of real ranks: updates across steps and in the backward, and state on disk."""

import copy
import errno
import gc
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor

import elixir_compile as elixir
from elixir_compile.base.errors import DiskFull
from elixir_compile.base.options import Options
from elixir_compile.graph.capture.modules import executor_of
from elixir_compile.ir import Plan, Tier
from elixir_compile.optim.hybrid import Hybrid
from elixir_compile.search import Problem
from elixir_compile.session.cache import plan_for
from tests.run.ranks_models import batches
from tests.run.ranks_training import Pair, compiled_with, homes, least_bytes, mesh_of, own_rows, pair_of
from tests.run.updating import controlled_worker

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
    usual, seen = Hybrid.landed, list[tuple[str, bool]]()

    def landed(optimizer: Hybrid, params: Any, arrived: Any) -> None:
        bucket = executor.buckets.of(executor.slot_for(params[0]))
        if bucket.spec.is_sharded:
            seen.append((bucket.placement.param.value, executor.gradients.is_in_backward))
        usual(optimizer, params, arrived)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Hybrid, "landed", landed)
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
def state_on_disk() -> Iterator[None]:
    """Inside, plans have all state that leaves the device on disk."""

    def decided(problem: Problem, options: Options) -> Plan:
        found = plan_for(problem, replace(options, plan_cache=False))
        if not problem.disk:
            return found
        moved = [
            replace(home, optim=Tier.DISK, streamed=False) if home.optim is Tier.HOST and bucket.trainable else home
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
    with state_on_disk():
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


def keeps_masters(rank: int, world_size: int, folder: str) -> list[list[str]]:
    """Train 16-bit parameters with masters, and clip them, after the backward, and across steps with state on disk."""
    steps = torch.randn(3, 8, 160, generator=torch.Generator().manual_seed(rank)).bfloat16()
    found: list[list[str]] = []
    expected: dict[str, torch.Tensor] = {}
    budget = 1
    for update, disk_path in (("after_backward", None), ("across_steps", folder)):
        model = elixir.prepare(perceptron(), mesh=mesh_of([world_size]), param_dtype="bfloat16")
        optimizer = elixir.HybridAdamW(model.parameters(), lr=1e-3)
        options = {"planner": "greedy", "update": update, "disk_path": disk_path}
        if not found:
            with pytest.raises(elixir.NoFeasiblePlan) as raised:
                compiled_with(model, device_memory=1, micro_batches=1, **options)(steps[0])
            budget = int(1.1 * raised.value.needed_bytes)
        with state_on_disk():
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
        found.append(homes(model)["optim"])
    return found


def has_no_room(rank: int, world_size: int, folder: str) -> list[str]:
    """Let the disk of the last rank be full, and return what the first forward raises."""
    steps = batches(1)
    budget = host_budget("odd", steps[0], world_size)

    def full_disk(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with state_on_disk(), pytest.MonkeyPatch.context() as patch:
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


def all_of(rank: int, world_size: int, checks: list[list[Any]]) -> list[Any]:
    """Return what each of `checks`, a name and arguments, returns, one after another in the same processes."""
    return [globals()[name](rank, world_size, *arguments) for name, *arguments in checks]
