"""Train under plans whose updates a test decides, and plans with full and lean calls, made by hand."""

import copy
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from elixir_compile.base.options import Options
from elixir_compile.graph.capture.modules import executor_of, model_of
from elixir_compile.ir import Placement, Plan, Tier, Update
from elixir_compile.optim import adamw_rule
from elixir_compile.optim import disk as disk_updates
from elixir_compile.optim.hybrid import Hybrid
from elixir_compile.runtime import disk_file, disk_params, disk_store, gathers
from elixir_compile.runtime.bucket import RunningBucket
from elixir_compile.runtime.disk_store import ReadAhead
from elixir_compile.search import Problem
from elixir_compile.search.space.facts import gather_facts
from elixir_compile.search.space.layers import Layer, deepest
from elixir_compile.session import graph_planner
from elixir_compile.session.cache import plan_for
from elixir_compile.step import Depth
from tests.pure.problems import pair_of
from tests.run.training import Run, assert_same_tensors, by_elixir, fused_adamw, loss_of, same_losses, tight_bytes

# ----------------------------------------------------------------------------------------------------------------------
# Train under plans whose updates a test decides: where each bucket lives, where and when it is updated.


WIDTH = 13  # odd, so that kernels have tails


class Ladder(nn.Module):
    """Four odd linear layers, one of them without a bias; returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=number != 2) for number in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for step in self.steps:
            x = torch.tanh(step(x))
        return x.square().mean()


def ladder() -> Ladder:
    """Return the model with the weights that it always has."""
    torch.manual_seed(7)
    return Ladder()


def rows(num_batches: int) -> list[torch.Tensor]:
    """Return as many different batches."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(5, WIDTH, generator=generator) for _ in range(num_batches)]


HOMES = {
    "device": {"param": Tier.DEVICE, "optim": Tier.DEVICE},
    "split": {"param": Tier.DEVICE, "optim": Tier.HOST},
    "host": {"param": Tier.HOST, "optim": Tier.HOST},
    "split disk": {"param": Tier.DEVICE, "optim": Tier.DISK},
    "host disk": {"param": Tier.HOST, "optim": Tier.DISK},
    "disk": {"param": Tier.DISK, "optim": Tier.DISK},
}


@contextmanager
def small_buckets(decide: Callable[[Plan], Plan]) -> Iterator[None]:
    """Inside, buckets have at most one layer, and `decide` changes each training plan that is found."""

    def decided(problem: Problem, options: Options) -> Plan:
        small = replace(problem, bucket_min_bytes=1, bucket_max_bytes=4 * WIDTH * (WIDTH + 1))
        found = plan_for(small, replace(options, plan_cache=False))
        return decide(found) if problem.hybrid else found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("elixir_compile.session.graph_planner.plan_for", decided)
        yield


def placed(plan: Plan, home: str, share: float, update: Update) -> Plan:
    """Return `plan`, made under a budget that fits `home`, with a `share` of its host updates streamed."""
    wanted = HOMES[home]
    placements: list[Placement] = []
    for number, placement in enumerate(plan.placements):
        optim = wanted["optim"] if home.startswith("split") else placement.optim
        optim = Tier.DISK if home.endswith("disk") else optim
        streamed = optim is Tier.HOST and number < round(share * len(plan.placements))
        param = Tier.DISK if home == "disk" and placement.param is Tier.HOST else placement.param
        placements.append(replace(placement, param=param, optim=optim, streamed=streamed))
    if not any(placement.param is wanted["param"] for placement in placements):
        raise AssertionError(f"nothing lives where {home} wants it")
    return replace(plan, placements=tuple(placements), update=update)


@contextmanager
def hybrid_run(
    model: nn.Module, batch: Any, *, home: str, update: Update, share: float = 0.0, **options: Any
) -> Iterator[Run]:
    """Yield a run of a copy of `model` under such a plan."""
    with small_buckets(lambda plan: plan):
        optimizer = {"optimizer": options["optimizer"]} if "optimizer" in options else {}
        named = ("small buckets", WIDTH)
        is_away = HOMES[home]["param"] is not Tier.DEVICE
        budget = tight_bytes(model, batch, planned_by=named, **optimizer) if is_away else None
    with small_buckets(lambda plan: placed(plan, home, share, update)):
        yield by_elixir(model, device_memory=budget, replan=False, **options)


@contextmanager
def small_pieces() -> Iterator[None]:
    """Inside, a bucket with state on disk has several pieces, the last one short, and staging holds NaN before it is
    read into."""
    usual = ReadAhead._acquire

    def spoiled(ring: ReadAhead) -> torch.Tensor | None:
        buffer = usual(ring)
        return None if buffer is None else buffer.fill_(255)

    with pytest.MonkeyPatch.context() as patch:
        for module in (disk_store, disk_file):
            patch.setattr(module, "DISK_BLOCK_BYTES", disk_file.DISK_PAGE_BYTES)
        for module in (disk_params, gathers):
            patch.setattr(module, "GATHER_STAGING_BYTES", 2 * disk_file.DISK_PAGE_BYTES)
        patch.setattr(disk_updates, "_STAGING_BYTES", 2 * disk_file.DISK_PAGE_BYTES)
        patch.setattr("tests.run.updating.WIDTH", 53)
        patch.setattr(ReadAhead, "_acquire", spoiled)
        yield


def eager_run(model: nn.Module, optimizer: Callable[..., Any] = fused_adamw, **options: Any) -> Run:
    """Return a run of a copy of `model` by torch, op by op, with torch's own fused AdamW or another `optimizer`."""
    own = copy.deepcopy(model)
    return Run(model=own, compiled=own, optimizer=optimizer(own.parameters(), **options))


def pass_through_torch(run: Run, optimizer: Callable[..., Any], batches: list[torch.Tensor]) -> None:
    """Train `run`, which has had two of `batches`, on the next two by torch with its own `optimizer`, and load weights
    and state back, over what another batch has made of them."""
    middle = eager_run(run.model, optimizer)
    middle.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    middle.train(batches[2:4])
    run.train(batches[5:])  # to be overwritten
    run.model.load_state_dict(middle.model.state_dict())
    run.optimizer.load_state_dict(copy.deepcopy(middle.optimizer.state_dict()))


class Several:
    """Several optimizers that step as one. Users who step in the backward have one for each parameter."""

    def __init__(self, each: Iterable[torch.optim.Optimizer]) -> None:
        self.each = tuple(each)

    def step(self) -> None:
        for optimizer in self.each:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.each:
            optimizer.zero_grad()

    @property
    def state(self) -> dict[torch.Tensor, Any]:
        return {param: entry for optimizer in self.each for param, entry in optimizer.state.items()}


def closure_step(compiled: Callable[..., Any], optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
    """Train on one batch by a closure."""

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(compiled, batch)
        loss.backward()
        return loss

    return optimizer.step(closure)


def accumulate(run: Run, batches: list[torch.Tensor], num_backwards: int) -> Run:
    """Train with one update per `num_backwards` batches."""
    for first in range(0, len(batches), num_backwards):
        *others, last = batches[first : first + num_backwards]
        if others and isinstance(run.optimizer, Hybrid):
            with run.optimizer.accumulating():
                for batch in others:
                    loss_of(run.compiled, batch).backward()
        else:
            for batch in others:
                loss_of(run.compiled, batch).backward()
        run.train([last])
    return run


def weights_of(run: Run) -> dict[str, torch.Tensor]:
    """Return copies of the parameters by name."""
    return {name: param.detach().clone() for name, param in run.model.named_parameters()}


def flat_state(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return all that the optimizer keeps, plain numbers too, by `index.name`."""
    state = optimizer.state_dict()["state"]
    return {
        f"{index}.{name}": torch.as_tensor(value)
        for index, entry in sorted(state.items())
        for name, value in sorted(entry.items())
    }


def assert_equal(expected: Run, got: Run) -> None:
    """Fail unless losses, weights and optimizer state are bitwise equal; on a GPU, unless they are close."""
    theirs, ours = ([loss.item() for loss in run.losses] for run in (expected, got))
    assert same_losses(theirs, ours), (theirs, ours)
    assert_same_tensors(weights_of(expected), weights_of(got))
    assert_same_tensors(flat_state(expected.optimizer), flat_state(got.optimizer))


def assert_resumes(run: Run, saved: tuple[Any, Any], before: list[torch.Tensor], after: list[torch.Tensor]) -> None:
    """Load the weights and state in `saved`, of a `ladder` that was trained on `before`, and fail unless `run` goes on
    with `after` as a run by torch that nothing has happened to."""
    run.model.load_state_dict(saved[0])
    run.optimizer.load_state_dict(saved[1])
    run.losses.clear()
    expected = eager_run(ladder()).train(before)
    expected.losses.clear()
    assert_equal(expected.train(after), run.train(after))


def buckets_of(run: Run) -> list[RunningBucket]:
    """Return the buckets in force."""
    executor: Any = executor_of(run.model)
    return list(executor.buckets)


def move_state(run: Run, optim: Tier, param: Tier | None = None) -> None:
    """Let a plan that has all optimizer state in `optim` be in force from now on, and all parameters that are not on
    the device in `param`, if it is given."""
    executor: Any = executor_of(run.model)
    in_force = executor.buckets.in_force(for_training=True)
    params = [home.param if param is None or home.param is Tier.DEVICE else param for _, home in in_force]
    homes = [replace(home, optim=optim, param=own) for (_, home), own in zip(in_force, params, strict=True)]
    graph: Any = model_of(run.model).graphs[0]
    plan = replace(graph.active.plan, placements=tuple(homes))
    graph._active = replace(graph.active, plan=plan)
    executor.buckets.move([bucket for bucket, _ in in_force], homes)


def in_flight(run: Run) -> int:
    """Return how many buckets have a queued update that nobody waited for."""
    return sum(not bucket.queued.is_empty for bucket in buckets_of(run))


@contextmanager
def nan_staging() -> Iterator[None]:
    """Fill memory that gradients and copies are about to take with NaN."""
    usual = RunningBucket.gradient_buffers

    def spoiled(bucket: RunningBucket) -> tuple[torch.Tensor, ...]:
        room = usual(bucket)
        for tensor in room:
            tensor.fill_(float("nan"))
        return room

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunningBucket, "gradient_buffers", spoiled)
        torch.use_deterministic_algorithms(True)  # which fills what `torch.empty` returns with NaN
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)


class Worker:
    """What tests do to the worker: hold it, slow it, or let it fail."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.delay_s: Callable[[], float] = lambda: 0.0
        self.fail_at = -1
        self.num_updates = 0

    def before(self) -> None:
        """Run before each kernel of the worker."""
        self.gate.wait(timeout=30)
        time.sleep(self.delay_s())
        self.num_updates += 1
        if self.num_updates - 1 == self.fail_at:
            raise ArithmeticError("the kernel fell over")


@contextmanager
def controlled_worker() -> Iterator[Worker]:
    """Yield what holds or slows the kernels that the worker runs, and no other."""
    usual, worker = adamw_rule.adamw, Worker()

    def kernel(*args: Any, **kwargs: Any) -> None:
        if threading.current_thread().name == "elixir updates":
            worker.before()
        usual(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adamw_rule, "adamw", kernel)
        try:
            yield worker
        finally:
            worker.gate.set()


def random_delay(seed: int) -> Callable[[], float]:
    """Return a source of delays of up to 2 ms, most of them none."""
    chance = random.Random(seed)
    return lambda: chance.choice((0.0, 0.0, 0.0005, 0.002))


# ----------------------------------------------------------------------------------------------------------------------
# Plans with full and lean calls, made by hand in place of a search.


def most(layer: Layer, lean: str) -> int:
    """Return the mode of `layer` that recomputes or offloads the most."""
    return deepest(layer, Depth.FIXED if lean == "recompute" else Depth.KEPT, leaves=lean == "offload")


@contextmanager
def pairs_by_hand(lean: str, num_full: int) -> Iterator[list[Plan]]:
    """Inside, plans keep activations in full calls, of which `num_full` wait at most, and save less in lean ones."""
    made: list[Plan] = []

    def by_hand(problem: Problem, options: Options) -> Plan:
        if problem.calls.num == 1:  # a graph that does not train
            return plan_for(problem, options)
        layers = gather_facts(problem).layers
        kept, saved = [0] * len(layers), [most(layer, lean) for layer in layers]
        made.append(pair_of(problem, kept, saved, num_full))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph_planner, "plan_for", by_hand)
        yield made
