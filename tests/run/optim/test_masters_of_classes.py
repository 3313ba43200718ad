"""Any class on 16-bit parameters with fp32 masters: the bits of the class on fp32 parameters, at any homes, time and
budget."""

import copy
import functools
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adafactor, Muon, Optimizer, RMSprop

import elixir_compile as elixir
from elixir_compile.ir import Update
from elixir_compile.optim.disk import DiskState
from elixir_compile.optim.host import flat_step
from tests.covering import some_slow
from tests.run import training
from tests.run.models import seeded
from tests.run.optim.tensor_wise_classes import Came, Lars, Shampoo, Soap
from tests.run.optim.test_tensor_step import Wide
from tests.run.optim.test_whole_updates import (
    BUDGETS,
    CLASSES,
    LARGE_WIDTHS,
    PLACED,
    STATIC,
    batches,
    each_time,
    leaves,
    model_for,
)
from tests.run.optimizers import Lion
from tests.run.training import Run, loss_of, planned_peak_bytes
from tests.run.updating import placed, small_buckets, small_pieces

BF16, FP16 = torch.bfloat16, torch.float16
NAMES = {BF16: "bfloat16", FP16: "float16"}
NUM_STEPS = 6
ELEMENTS: Mapping[type[Optimizer], dict[str, Any]] = {
    SGD: {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1},
    Lion: {"lr": 1e-3},
    RMSprop: {"lr": 1e-3},
}
"""Element-wise classes: one replaces its statistic, one counts in tensors, one has neither."""


def options_of(cls: type[Optimizer]) -> dict[str, Any]:
    return dict(ELEMENTS.get(cls, {}))


def mixed_run(model: nn.Module, cls: type[Optimizer], dtype: torch.dtype = BF16, **options: Any) -> Run:
    """Return a run of a copy of `model` in `dtype`, with masters that the hybrid optimizer of `cls` keeps."""
    own = elixir.prepare(copy.deepcopy(model), param_dtype=NAMES[dtype])
    options = {"inner": "aot_eager", "replan": False, "param_dtype": NAMES[dtype], **options}
    return training._elixir_run(own, lambda params: elixir.hybrid(cls)(params, **options_of(cls)), options)


class Reference:
    """The class itself on fp32 parameters, which begin as those of `model` and get the gradients of a run."""

    def __init__(self, model: nn.Module, cls: type[Optimizer], optimizer: Optimizer | None = None) -> None:
        self.params = [nn.Parameter(param.detach().clone()) for param in model.parameters()]
        self.optimizer = optimizer or cls(self.params, **options_of(cls))

    def step(self, grads: list[torch.Tensor]) -> None:
        for param, grad in zip(self.params, grads, strict=True):
            param.grad = grad.float()
        self.optimizer.step()


def train_beside(run: Run, reference: Reference, inputs: list[torch.Tensor], step: training.Step | None = None) -> None:
    """Train both on the gradients of `run`."""
    for batch in inputs:
        loss_of(run.compiled, batch.to(next(run.model.parameters()).dtype)).backward()
        grads = [param.grad.clone() for param in run.model.parameters()]
        run.optimizer.step()
        run.optimizer.zero_grad()
        reference.step(grads)


def assert_same(run: Run, reference: Reference) -> None:
    """Fail unless masters and state are those of the class, bit by bit, and weights are the nearest to masters."""
    entries = copy.deepcopy(run.optimizer.state_dict()["state"])
    for index, (param, own) in enumerate(zip(run.model.parameters(), reference.params, strict=True)):
        assert torch.equal(entries[index].pop("master"), own.detach())
        high = own.detach().to(param.dtype)
        if param.dtype == BF16:
            flat_step.split(own.detach(), high, torch.empty_like(high, dtype=torch.int16))
        assert torch.equal(param.detach(), high)
    known = dict(leaves(reference.optimizer.state_dict()["state"]))
    found = dict(leaves({index: entry for index, entry in entries.items() if entry}))
    assert known.keys() == found.keys()
    for path, value in known.items():
        value, own = torch.as_tensor(value), torch.as_tensor(found[path])
        assert value.dtype == own.dtype, path
        assert torch.equal(value, own), path


OF_ELEMENTS = each_time(ELEMENTS)
QUICK_PLACED = {
    (Muon, "split", 1.0, "across_steps"),
    (Lars, "host", 0.0, "in_backward"),
    (Lion, "host", 0.5, "across_steps"),
    (SGD, "host disk", 0.0, "after_backward"),
}


@pytest.mark.parametrize(
    ("cls", "home", "share", "update"), some_slow(PLACED + OF_ELEMENTS, lambda *each: each in QUICK_PLACED)
)
def test_the_bits_of_the_class_in_fp32_wherever_and_whenever(
    cls: type[Optimizer], home: str, share: float, update: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"update": update}
    if home.startswith("host"):
        options |= STATIC
    if home.endswith("disk"):
        options |= {"disk_path": tmp_path, "disk_check": True}
    model = model_for(cls)
    reference = Reference(model, cls)
    with small_pieces(), small_buckets(lambda plan: placed(plan, home, share, Update(update))):
        run = mixed_run(model, cls, **options)
        train_beside(run, reference, batches())
        assert_same(run, reference)
    (plan,) = {record.plan for record in elixir.compilations(run.model)}
    assert any(placement.streamed for placement in plan.placements) is (share > 0)
    assert all((bucket.whole_update is not None) == (cls in CLASSES) for bucket in plan.buckets)
    assert all((bucket.block_update is not None) == (cls not in CLASSES) for bucket in plan.buckets)
    assert {isinstance(state, DiskState) for state in run.optimizer.state.values()} == {home.endswith("disk")}


@functools.cache
def keep_all_bytes(cls: type[Optimizer]) -> int:
    """Return the bytes of a step of `cls` without a budget, as planned."""
    run = mixed_run(model_for(cls, LARGE_WIDTHS), cls)
    loss_of(run.compiled, batches(1, LARGE_WIDTHS[0])[0].to(BF16)).backward()
    return planned_peak_bytes(run)


BELOW_FLOOR = {(Adafactor, 25, "in_backward"), (Came, 25, "in_backward")}
"""Budgets below the smallest for eight small matrices: from the first complete gradient on, the work space of an update
of the largest in fp32 is beside what the backward holds."""


@pytest.mark.slow
@pytest.mark.parametrize(("cls", "percent", "update"), BUDGETS)
def test_the_bits_of_the_class_in_fp32_under_budgets(cls: type[Optimizer], percent: int, update: str) -> None:
    """If a budget is below the smallest one, the error names that, and it is enough."""
    budget_bytes = math.ceil(keep_all_bytes(cls) * percent / 100)
    model, each = model_for(cls, LARGE_WIDTHS), batches(width=LARGE_WIDTHS[0])
    if (cls, percent, update) in BELOW_FLOOR:
        with pytest.raises(elixir.NoFeasiblePlan) as refused:
            train_beside(mixed_run(model, cls, device_memory=budget_bytes, update=update), Reference(model, cls), each)
        budget_bytes = int(re.findall(r"device_memory=(\d+)", str(refused.value))[0])
        assert budget_bytes < 1.2 * keep_all_bytes(cls) * percent / 100
    run, reference = mixed_run(model, cls, device_memory=budget_bytes, update=update), Reference(model, cls)
    train_beside(run, reference, each)
    assert planned_peak_bytes(run) <= budget_bytes
    assert_same(run, reference)


def test_a_plan_counts_the_master_and_the_fp32_copies() -> None:
    """Of each tensor its master and its gradient in fp32, beside the work space of the class in fp32."""
    model = model_for(Lars)

    def hybrid_in(dtype: str | None) -> Any:
        return elixir.hybrid(Lars)(elixir.prepare(copy.deepcopy(model), param_dtype=dtype).parameters())

    wide = hybrid_in(None)
    for dtype, scratch_bytes, rest_bytes in (("bfloat16", 8, 2), ("float16", 4, 4)):
        narrow = hybrid_in(dtype)
        states = [each.states_of(each.param_groups[0]["params"]) for each in (wide, narrow)]
        for param, one, other in zip(model.parameters(), *states, strict=True):
            assert other.state_nbytes == one.state_nbytes + rest_bytes * param.numel()
            work_bytes = one.whole_update.work_nbytes + scratch_bytes * param.numel()
            assert other.whole_update.work_nbytes == work_bytes


@pytest.mark.parametrize("cls", [Lion, pytest.param(Muon, marks=pytest.mark.slow)])
def test_clipping_and_loss_scaling_multiply_fp32_gradients(cls: type[Optimizer]) -> None:
    """In float16, as the update reads them; a step that overflows changes nothing."""
    model, scaler = model_for(cls), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    run, reference = mixed_run(model, cls, FP16, update="after_backward"), Reference(model, cls)
    for number, batch in enumerate(batches()):
        loss = loss_of(run.compiled, batch.to(FP16))
        scaler.scale(loss * (float("inf") if number == 2 else 1.0)).backward()
        grads, scale = [param.grad.clone() for param in run.model.parameters()], scaler.get_scale()
        norm = run.optimizer.clip_grad_norm_(1e-3, grad_scale=scale)
        scaler.step(run.optimizer)
        scaler.update()
        run.optimizer.zero_grad()
        if number == 2:
            assert not torch.isfinite(norm)
            continue
        factor = float(torch.clamp(1e-3 / (norm + 1e-6), max=1.0)) * (1.0 / scale)
        reference.step([grad.float().mul_(factor) for grad in grads])
    assert_same(run, reference)


def test_micro_batches_add_up_in_fp32_for_the_class() -> None:
    """The class gets the fp32 sum; state is streamed."""
    model, inputs = model_for(Lars), [batch.to(BF16) for batch in batches(4)]
    reference = Reference(model, Lars)
    with small_buckets(lambda plan: placed(plan, "split", 1.0, Update.ACROSS_STEPS)):
        run = mixed_run(model, Lars, reduce_dtype="float32", accumulate=True)
        for first in (0, 2):
            for batch in inputs[first : first + 2]:
                loss_of(run.compiled, batch).backward()
            grads = [param.grad.clone() for param in run.model.parameters()]
            assert {grad.dtype for grad in grads} == {torch.float32}
            run.optimizer.step()
            run.optimizer.zero_grad()
            reference.step(grads)
        assert_same(run, reference)


@pytest.mark.parametrize("cls", [SGD, pytest.param(Soap, marks=pytest.mark.slow)])
def test_a_checkpoint_resumes_bit_by_bit_under_another_plan(cls: type[Optimizer], tmp_path: Path) -> None:
    model, inputs = model_for(cls), batches()
    reference, run = Reference(model, cls), mixed_run(model, cls, update="across_steps", **STATIC)
    train_beside(run, reference, inputs[:3])
    elixir.save(tmp_path / "saved", run.model, run.optimizer, step=3)
    again = mixed_run(model, cls)
    train_beside(again, Reference(model, cls), inputs[4:])  # to be overwritten
    elixir.load(tmp_path / "saved", again.model, again.optimizer)
    train_beside(again, reference, inputs[3:])
    assert_same(again, reference)


def test_a_state_dict_is_that_of_the_class_with_masters_beside() -> None:
    """Into the class on fp32 parameters and back; without masters, these begin as the parameters."""
    model, inputs = model_for(Lars), batches()
    run, into = mixed_run(model, Lars, **STATIC), Reference(model, Lars)
    train_beside(run, Reference(model, Lars), inputs[:2])
    saved = copy.deepcopy(run.optimizer.state_dict())
    into.optimizer.load_state_dict(saved)
    for param, entry in zip(into.params, into.optimizer.state.values(), strict=True):
        param.data.copy_(entry.pop("master"))
    train_beside(run, into, inputs[2:4])
    back = copy.deepcopy(into.optimizer.state_dict())
    without_masters = copy.deepcopy(back)
    for param, entry in zip(into.params, back["state"].values(), strict=True):
        entry["master"] = param.detach().clone()
    other = mixed_run(model, Lars)
    other.optimizer.load_state_dict(back)
    train_beside(other, into, inputs[4:])
    assert_same(other, into)
    other.optimizer.load_state_dict(without_masters)
    for param, entry in zip(other.model.parameters(), other.optimizer.state_dict()["state"].values(), strict=True):
        assert torch.equal(entry["master"], param.float())


class OwnMasters(Lion):
    """Keeps fp32 masters itself, under the name that hybrid optimizers have for those of float16 parameters."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        master = self.state[param].setdefault("master", param.float())
        param.copy_(master.sub_(param.grad, alpha=group["lr"]))


def test_a_class_with_masters_of_its_own_keeps_its_step() -> None:
    model = nn.Linear(3, 3).half()
    optimizer = elixir.hybrid(OwnMasters)(model.parameters())
    with pytest.warns(elixir.ElixirWarning, match="its state has 'master'"):
        assert not optimizer.places_state


def test_parameters_outside_of_every_plan_are_updated_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a few elements, empty parameters, and statistics in bf16 beside masters."""
    monkeypatch.setattr("elixir_compile.optim.generic.class_rule._BLOCK", 64)
    wide = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in ((17, 11), (3,), (), (0, 4), (2, 3, 5)))
    for state_dtype in ("float32", "bfloat16"):
        own = elixir.prepare(copy.deepcopy(wide), param_dtype="bfloat16")
        optimizer, reference = elixir.hybrid(RMSprop, state_dtype)(own.parameters(), lr=1e-3), Reference(wide, RMSprop)
        if state_dtype == "bfloat16":
            reference.optimizer = elixir.hybrid(RMSprop, state_dtype)(reference.params, lr=1e-3)
        for number in range(4):
            generator = torch.Generator().manual_seed(number)
            grads = [torch.randn(param.shape, generator=generator).to(BF16) for param in wide]
            for param, grad in zip(own.parameters(), grads, strict=True):
                param.grad = grad.clone()
            with pytest.warns(elixir.NoGraphCaptured) if number == 0 else torch.no_grad():
                optimizer.step()
                reference.step(grads)
        assert_same(Run(model=own, compiled=own, optimizer=optimizer), reference)


class OneRound(Muon):
    """Muon with a fifth of its products in bf16, which take seconds on many a CPU."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, ns_steps=1)


PEAKS = [(cls, percent) for cls in (OneRound, Adafactor, Shampoo, Lion) for percent in (100, 60)]


@pytest.mark.parametrize(("cls", "percent"), some_slow(PEAKS, lambda *each: each == (Lion, 60)))
def test_the_planned_peak_is_measured(cls: type[Optimizer], percent: int) -> None:
    """Of updates on the training thread: a measurement does not see what the thread that updates beside it allocates.
    It counts all tensors of the process, so no model in fp32 may be alive beside the run. The plan has the scratch
    tensors of masters. The first step makes state in its place; a large tensor that is updated by elements takes it
    block by block, because each op of the class takes memory then."""
    kernel_bytes = 132_200 if cls is OneRound else 0  # in which oneDNN packs a product of bfloat16
    batch, options = torch.randn(64, 512).to(BF16), {"update": "after_backward"}
    whole = planned_peak_bytes(mixed_run(seeded(Wide), cls, **options).train([batch]))
    run = mixed_run(seeded(Wide), cls, device_memory=math.ceil(whole * percent / 100), **options)
    peaks = [elixir.measure_step(lambda: run.train([batch])).device_peak_bytes for _ in range(3)]
    planned_bytes = planned_peak_bytes(run)
    assert planned_bytes <= whole * percent / 100
    assert 0.99 * planned_bytes <= max(peaks) <= 1.01 * planned_bytes + kernel_bytes, (peaks, planned_bytes)
