"""Classes that update whole tensors, placed by plans: the bits of the class alone at any homes, time and budget."""

import copy
import functools
import math
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.optim import Adafactor, Muon, Optimizer

import elixir_compile as elixir
from elixir_compile.base.errors import NoGraphCaptured
from elixir_compile.ir import Tier, Update
from elixir_compile.optim.disk import DiskHome, DiskState
from tests.covering import some_slow
from tests.pure.problems import disk_staging
from tests.run.models import seeded
from tests.run.optim.tensor_wise_classes import (
    ByColumns,
    BySum,
    Came,
    CountsSteps,
    EveryHundred,
    Lamb,
    Lars,
    Shampoo,
    Soap,
)
from tests.run.training import (
    Run,
    assert_same_tensors,
    by_elixir,
    by_torch,
    planned_peak_bytes,
    same_losses,
)
from tests.run.updating import buckets_of, move_state, pass_through_torch, placed, small_buckets, small_pieces

NUM_STEPS = 6
WIDTHS = (48, 37)  # odd, so that kernels have tails
LARGE_WIDTHS = (192, 171)
"""On a CPU the small tensors of a watch and the scratch of products in bf16 take up to 150 KiB that no plan counts."""
UPDATES = ("after_backward", "across_steps", "in_backward")
MATRICES_ALONE = (Muon, Soap, Came)
CLASSES: tuple[type[Optimizer], ...] = (Muon, Adafactor, Soap, Shampoo, Came, Lars, Lamb)


class Tower(nn.Module):
    """Wide and narrow layers in turn, so that neighbours differ in shape; returns the loss."""

    def __init__(self, widths: tuple[int, int] = WIDTHS, *, bias: bool = False) -> None:
        super().__init__()
        sizes = [widths[number % 2] for number in range(9)]
        self.layers = nn.ModuleList(nn.Linear(size, after, bias=bias) for size, after in pairwise(sizes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def batches(num: int = NUM_STEPS, width: int = WIDTHS[0]) -> list[torch.Tensor]:
    """Return as many different batches."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(4, width, generator=generator) for _ in range(num)]


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield what is not nested in `value`, with its path."""
    if isinstance(value, Mapping | list | tuple):
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, entry in pairs:
            yield from leaves(entry, f"{path}.{key}")
    else:
        yield path, value


def state_of(optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """Return the entries of the state dict by path, numbers as tensors."""
    return {path: torch.as_tensor(value) for path, value in sorted(leaves(optimizer.state_dict()["state"]))}


def assert_same_run(expected: Run, got: Run, *, by_device: bool = False) -> None:
    """Fail unless losses, weights and state dicts are equal, bit by bit; beside a GPU, close, unless all updates are
    `by_device`."""
    theirs, ours = ([loss.item() for loss in run.losses] for run in (expected, got))
    assert same_losses(theirs, ours), (theirs, ours)
    assert_same_tensors(expected.weights, got.weights, by_device=by_device)
    assert_same_tensors(state_of(expected.optimizer), state_of(got.optimizer), by_device=by_device)


def model_for(cls: type[Optimizer], widths: tuple[int, int] = WIDTHS) -> nn.Module:
    """Return a tower with the parameters that `cls` takes."""
    return seeded(Tower, widths, bias=cls not in MATRICES_ALONE)


def hybrid_of(cls: type[Optimizer]) -> Callable[[Any], Optimizer]:
    """Return what makes the optimizer, in the warning filter of the suite: a warning fails the test."""
    return lambda params: elixir.hybrid(cls)(params)


@functools.cache
def expected_of(cls: type[Optimizer], widths: tuple[int, int] = WIDTHS) -> Run:
    """Return a run of the class itself, trained eagerly."""
    return by_torch(model_for(cls, widths), optimizer=cls).train(batches(width=widths[0]))


PLACES = (
    *(("device", 0.0), ("split", 0.0), ("split", 1.0), ("host", 0.0), ("host", 0.5)),
    *(("split disk", 0.0), ("host disk", 0.0)),
)


def each_time(classes: Iterable[Any], places: Iterable[tuple[str, float]] = PLACES) -> list[tuple[Any, ...]]:
    """Return each of `classes` at each of `places`, homes with shares of streamed updates, at each time of updates.

    No update is streamed in the backward."""
    found = product(classes, places, UPDATES)
    return [(cls, *place, update) for cls, place, update in found if not (place[1] and update == "in_backward")]


PLACED = each_time(CLASSES)
QUICK_PLACED = {
    (Muon, "split", 1.0, "across_steps"),
    (Muon, "host", 0.5, "after_backward"),
    (Shampoo, "split", 0.0, "in_backward"),
    (Lamb, "split", 1.0, "after_backward"),
    (Soap, "split disk", 0.0, "across_steps"),
    (Adafactor, "host disk", 0.0, "in_backward"),
}
STATIC = {"placement_policy": "static", "offload_param_frac": 1.0, "offload_optim_frac": 1.0}
"""Options under which parameters and state are on the host."""


@pytest.mark.parametrize(("cls", "home", "share", "update"), some_slow(PLACED, lambda *each: each in QUICK_PLACED))
def test_the_bits_of_the_class_wherever_and_whenever_tensors_are_updated(
    cls: type[Optimizer], home: str, share: float, update: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"update": update, "replan": False}
    if home.startswith("host"):
        options |= STATIC
    if home.endswith("disk"):
        options |= {"disk_path": tmp_path, "disk_check": True}
    with small_pieces(), small_buckets(lambda plan: placed(plan, home, share, Update(update))):
        run = by_elixir(model_for(cls), optimizer=hybrid_of(cls), **options).train(batches())
        assert_same_run(expected_of(cls), run, by_device=home == "device" or share == 1.0)
    (plan,) = {record.plan for record in elixir.compilations(run.model)}
    assert all(bucket.whole_update is not None for bucket in plan.buckets)
    assert any(placement.streamed for placement in plan.placements) is (share > 0)
    are_on_disk = {isinstance(state, DiskState) for state in run.optimizer.state.values()}
    assert are_on_disk == {home.endswith("disk")}


BUDGETS = [(cls, percent, update) for cls in CLASSES for percent in (60, 40, 25) for update in UPDATES]
QUICK_BUDGETS = {(Adafactor, 25, "after_backward")}


@functools.cache
def keep_all_bytes(cls: type[Optimizer]) -> int:
    """Return the bytes of a step of `cls` without a budget, as planned."""
    run = by_elixir(model_for(cls, LARGE_WIDTHS), optimizer=hybrid_of(cls))
    return planned_peak_bytes(run.train(batches(1, LARGE_WIDTHS[0])))


@pytest.mark.parametrize(("cls", "percent", "update"), some_slow(BUDGETS, lambda *each: each in QUICK_BUDGETS))
def test_the_bits_of_the_class_under_budgets(cls: type[Optimizer], percent: int, update: str) -> None:
    budget_bytes = math.ceil(keep_all_bytes(cls) * percent / 100)
    options: dict[str, Any] = {"device_memory": budget_bytes, "update": update}
    run = by_elixir(model_for(cls, LARGE_WIDTHS), optimizer=hybrid_of(cls), **options)
    run.train(batches(width=LARGE_WIDTHS[0]))
    assert planned_peak_bytes(run) <= budget_bytes
    assert_same_run(expected_of(cls, LARGE_WIDTHS), run)


@pytest.mark.parametrize("cls", [Muon, pytest.param(Soap, marks=pytest.mark.slow)])
def test_state_loads_in_both_directions(cls: type[Optimizer]) -> None:
    """From the hybrid optimizer into the class itself, and back, at other homes."""
    expected, each = expected_of(cls), batches()
    run = by_elixir(model_for(cls), optimizer=hybrid_of(cls), **STATIC).train(each[:2])
    pass_through_torch(run, cls, each)
    run.losses = expected.losses[:4]
    assert_same_run(expected, run.train(each[4:]))


KEPT = each_time((ByColumns, CountsSteps), (("device", 0.0), ("split", 0.0), ("split", 1.0), ("split disk", 0.0)))
QUICK_KEPT = {
    (ByColumns, "split", 1.0, "across_steps"),
    (ByColumns, "split disk", 0.0, "after_backward"),
    (CountsSteps, "split", 0.0, "in_backward"),
}


@pytest.mark.parametrize(("cls", "home", "share", "update"), some_slow(KEPT, lambda *each: each in QUICK_KEPT))
def test_what_a_class_keeps_in_its_own_order_or_in_its_group(
    cls: type[Optimizer], home: str, share: float, update: str, tmp_path: Path
) -> None:
    """State by columns in memory, on disk, in the rooms of a streamed update, and after a load of what was saved by
    rows; numbers of the group, under rates that change."""

    def train(run: Run, batches: list[torch.Tensor]) -> Run:
        for batch in batches:
            run.optimizer.param_groups[0]["lr"] *= 0.7
            run.train([batch])
        return run

    each = batches()
    expected = train(by_torch(model_for(Muon), optimizer=cls), each)
    options: dict[str, Any] = {"disk_path": tmp_path} if home.endswith("disk") else {}
    with small_buckets(lambda plan: placed(plan, home, share, Update(update))):
        run = by_elixir(model_for(Muon), optimizer=hybrid_of(cls), replan=False, update=update, **options)
        saved = train(run, each[:3]).optimizer.state_dict()
        states = {
            index: {name: value.contiguous() for name, value in entry.items()}
            for index, entry in saved["state"].items()
        }
        run.optimizer.load_state_dict({**saved, "state": states})
        assert_same_run(expected, train(run, each[3:]))
    groups = [{**own.optimizer.param_groups[0], "params": []} for own in (expected, run)]
    assert groups[0] == groups[1]
    assert all(bucket.whole_update for record in elixir.compilations(run.model) for bucket in record.plan.buckets)


@contextmanager
def run_on_disk(cls: type[Optimizer], folder: Path) -> Iterator[Run]:
    """Yield a run with all state on disk, in several pieces."""
    with small_pieces(), small_buckets(lambda plan: placed(plan, "split disk", 0.0, Update.ACROSS_STEPS)):
        options: dict[str, Any] = {"disk_path": folder, "replan": False}
        yield by_elixir(model_for(cls), optimizer=hybrid_of(cls), **options)


@pytest.mark.parametrize("cls", [Soap, pytest.param(Adafactor, marks=pytest.mark.slow)])
def test_state_of_whole_tensors_moves_between_disk_and_host(cls: type[Optimizer], tmp_path: Path) -> None:
    expected, each = expected_of(cls), batches()
    with run_on_disk(cls, tmp_path) as run:
        for number, optim in enumerate([Tier.HOST, Tier.DISK, Tier.HOST]):
            run.train(each[2 * number : 2 * number + 1])
            move_state(run, optim)
            assert {isinstance(state, DiskState) for state in run.optimizer.state.values()} == {optim is Tier.DISK}
            files = [name for folder in tmp_path.iterdir() if folder.is_dir() for name in os.listdir(folder)]
            assert len(files) == (len(buckets_of(run)) if optim is Tier.DISK else 0)
            run.train(each[2 * number + 1 : 2 * number + 2])
        assert_same_run(expected, run)


def test_copies_and_pickles_of_an_optimizer_with_state_on_disk_continue(tmp_path: Path) -> None:
    expected, each, model = expected_of(Soap), batches(), model_for(Soap)

    def continued(optimizer: Optimizer) -> dict[str, torch.Tensor]:
        names = [name for name, _ in model.named_parameters()]
        own = dict(zip(names, optimizer.param_groups[0]["params"], strict=True))
        for batch in each[3:]:
            functional_call(model, own, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        return own

    with run_on_disk(Soap, tmp_path) as run:
        run.train(each[:3])
        copies = copy.deepcopy(run.optimizer), pickle.loads(pickle.dumps(run.optimizer))
    for optimizer in copies:
        with pytest.warns(NoGraphCaptured):
            weights = continued(optimizer)
        assert_same_tensors(expected.weights, weights)


def test_a_plan_keeps_state_of_whole_tensors_on_disk_if_the_host_is_too_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps read it in pieces alone, not to see whether they join two parameters."""
    reads: list[object] = []
    read = DiskHome.read
    monkeypatch.setattr(DiskHome, "read", lambda *given: (reads.append(given), read(*given))[1])
    model, optimizer = model_for(Muon), hybrid_of(Muon)
    with small_buckets(lambda plan: plan), disk_staging(0):  # which is larger than the model
        param_bytes = sum(param.nbytes for param in model.parameters())
        options = {"device_memory": int(0.6 * param_bytes), "host_memory": int(2.1 * param_bytes), "replan": False}
        with pytest.raises(elixir.NoFeasiblePlan, match="disk_path"):
            by_elixir(model, optimizer=optimizer, **options).train(batches(1))
        run = by_elixir(model, optimizer=optimizer, disk_path=tmp_path, **options).train(batches())
    (plan,) = {record.plan for record in elixir.compilations(run.model)}
    assert any(placement.optim is Tier.DISK for placement in plan.placements)
    assert not reads
    assert_same_run(expected_of(Muon), run)
    assert reads


@pytest.mark.parametrize("update", UPDATES)
def test_a_step_that_joins_two_parameters_is_refused_before_it_changes_any(update: str) -> None:
    """In its 15th step, which no dry run reaches; then the class itself trains on."""
    expected = by_torch(seeded(Tower), optimizer=lambda params: EveryHundred(params, every=15)).train(batches(16))

    def hybrid(params: Any) -> Optimizer:
        return elixir.hybrid(EveryHundred)(params, every=15)

    run = by_elixir(seeded(Tower), optimizer=hybrid, update=update, replan=False).train(batches(14))
    weights = run.weights
    with pytest.raises(elixir.OptimizerNotTensorWise, match=r"step 15.*aten\.add"):
        run.train(batches(15)[14:])
    assert_same_tensors(weights, run.weights)
    plain = EveryHundred(run.model.parameters(), every=15)
    plain.load_state_dict(run.optimizer.state_dict())
    run.optimizer.zero_grad()
    run.optimizer = plain
    run.train(batches(16)[14:])
    assert_same_tensors(expected.weights, run.weights)


def test_code_for_large_tensors_that_joins_two_parameters_is_refused_in_the_first_step() -> None:
    run = by_elixir(seeded(Tower, (400, 300)), optimizer=hybrid_of(BySum))
    weights = run.weights
    with pytest.raises(elixir.OptimizerNotTensorWise, match=r"step 1 "):
        run.train(batches(1, 400))
    assert_same_tensors(weights, run.weights)
