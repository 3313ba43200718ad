"""Moments and statistics in fewer bytes: the same bits wherever they are updated, and in state dicts."""

import copy
import functools
import gc
import io
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, RMSprop

import elixir_compile as elixir
from elixir_compile.base.errors import UnsupportedModel
from elixir_compile.graph.ops.optimizers import REST_NAMES
from elixir_compile.ir import Tier, Update
from elixir_compile.ir.plan import plan_line
from elixir_compile.optim.generic import class_rule
from elixir_compile.optim.generic.class_rule import ClassRule
from elixir_compile.optim.precision import BLOCK, MomentForm, form_of
from elixir_compile.optim.state import has_whole_rows
from elixir_compile.runtime.bucket import live_slab_bytes
from tests.run import optimizers as users
from tests.run.optim.test_mixed_precision import ADAM, BF16, FP16, Recorded, mixed_run, recorded
from tests.run.training import Run, assert_same_tensors, by_elixir
from tests.run.updating import accumulate, buckets_of, eager_run, hybrid_run, nan_staging, small_pieces

pytestmark = pytest.mark.filterwarnings("ignore::elixir_compile.base.errors.NoGraphCaptured")


# ----------------------------------------------------------------------------------------------------------------------
# HybridAdamW with moments in fewer bytes: the same bits wherever and whenever it updates, and in state dicts.


NARROW = ("bfloat16", "int8")
WIDTH = 53


class Steps(nn.Module):
    """Odd layers, and one whose rows are whole blocks; returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * BLOCK, bias=False)
        self.down = nn.Linear(2 * BLOCK, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.down(torch.tanh(self.up(x))))).square().mean()


def steps() -> Steps:
    torch.manual_seed(7)
    return Steps()


def rows(number: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(5, WIDTH, generator=generator).to(dtype) for _ in range(number)]


def narrow_adamw(params: Any, state_dtype: str = "int8", **arguments: Any) -> elixir.HybridAdamW:
    return elixir.HybridAdamW(params, lr=1e-2, state_dtype=state_dtype, **arguments)


@functools.cache
def in_place(state_dtype: str) -> Run:
    """Train 6 steps without a plan: the update then runs on whole tensors, one after another."""
    return eager_run(steps(), functools.partial(narrow_adamw, state_dtype=state_dtype)).train(rows(6))


def assert_same_run(expected: Run, found: Run) -> None:
    assert [loss.item() for loss in expected.losses] == [loss.item() for loss in found.losses]
    assert_same_tensors(expected.weights, found.weights)
    entries = [list(run.optimizer.state_dict()["state"].values()) for run in (expected, found)]
    for own, other in zip(*entries, strict=True):
        assert_same_tensors(as_tensors(own), as_tensors(other))


def as_tensors(entry: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the state of a parameter by name, numbers as tensors."""
    return {name: torch.as_tensor(entry[name]) for name in sorted(entry)}


PLACES = [
    ("device", Update.AFTER_BACKWARD, 0.0),
    ("split", Update.IN_BACKWARD, 0.0),
    ("host", Update.ACROSS_STEPS, 0.0),
    ("host", Update.ACROSS_STEPS, 0.5),
    ("split", Update.AFTER_BACKWARD, 1.0),
    ("host disk", Update.ACROSS_STEPS, 0.0),
]


@pytest.fixture
def pieces() -> Iterator[None]:
    """State on disk and streamed state come in several pieces, the last one short."""
    with small_pieces():
        yield


@pytest.mark.parametrize(
    ("state_dtype", "home", "update", "share"),
    [
        *(("int8", *place) for place in PLACES),
        *(pytest.param("bfloat16", *place, marks=pytest.mark.slow) for place in PLACES[:3]),
        *(("bfloat16", *place) for place in PLACES[3::2]),
    ],
)
@pytest.mark.usefixtures("pieces")
def test_the_place_and_the_time_of_an_update_change_no_bit(
    state_dtype: str, home: str, update: Update, share: float, tmp_path: Path
) -> None:
    optimizer = functools.partial(narrow_adamw, state_dtype=state_dtype)
    disk = {"disk_path": tmp_path} if home.endswith("disk") else {}
    with (
        nan_staging(),
        hybrid_run(steps(), rows(1)[0], home=home, update=update, share=share, optimizer=optimizer, **disk) as run,
    ):
        run.train(rows(6))
        assert {bucket.spec.state_dtype for bucket in buckets_of(run)} == {state_dtype}
        if home != "device":
            wanted = Tier.DISK if home.endswith("disk") else Tier.HOST
            assert wanted in {bucket.placement.optim for bucket in buckets_of(run)}
        assert_same_run(in_place(state_dtype), run)


@functools.cache
def plainest(dtype: torch.dtype, state_dtype: str, master_dtype: str = "float32") -> Recorded:
    adam = {**ADAM, "state_dtype": state_dtype, "master_dtype": master_dtype}
    with mixed_run(steps(), rows(1, dtype)[0], dtype=dtype, adam=adam) as run:
        return recorded(run, rows(5, dtype))


@pytest.mark.parametrize(
    ("dtype", "state_dtype", "master_dtype"),
    [
        (BF16, "bfloat16", "float32"),
        (BF16, "int8", "float32"),
        (FP16, "int8", "float32"),
        (BF16, "int8", "bfloat16"),
        (BF16, "float32", "bfloat16"),
    ],
)
@pytest.mark.parametrize("home", [pytest.param("host", marks=pytest.mark.slow), "host disk"])
@pytest.mark.usefixtures("pieces")
def test_masters_beside_narrow_moments(
    dtype: torch.dtype, state_dtype: str, master_dtype: str, home: str, tmp_path: Path
) -> None:
    adam = {**ADAM, "state_dtype": state_dtype, "master_dtype": master_dtype}
    options: dict[str, Any] = {"disk_path": tmp_path} if home.endswith("disk") else {}
    update = Update.ACROSS_STEPS
    with mixed_run(steps(), rows(1, dtype)[0], home=home, update=update, dtype=dtype, adam=adam, **options) as run:
        found = recorded(run, rows(5, dtype))
        has_rest = any("master" in entry for entry in found.state.values())
        assert has_rest == (master_dtype == "float32")
    expected = plainest(dtype, state_dtype, master_dtype)
    assert found.losses == expected.losses
    assert_same_tensors(expected.weights, found.weights)
    for name, entry in expected.state.items():
        assert_same_tensors(entry, found.state[name])


def test_accumulation_and_clipping() -> None:
    expected = accumulate(eager_run(steps(), narrow_adamw), rows(6), 2)
    with hybrid_run(steps(), rows(1)[0], home="host", update=Update.ACROSS_STEPS, optimizer=narrow_adamw) as run:
        assert_same_run(expected, accumulate(run, rows(6), 2))

    def clipped(run: Run) -> Run:
        for batch in rows(4):
            run.compiled(batch).backward()
            run.optimizer.clip_grad_norm_(1e-3)  # pyright: ignore[reportAttributeAccessIssue]
            run.optimizer.step()
            run.optimizer.zero_grad()
        return run

    expected = clipped(eager_run(steps(), narrow_adamw))
    with hybrid_run(steps(), rows(1)[0], home="host", update=Update.ACROSS_STEPS, optimizer=narrow_adamw) as run:
        assert_same_run(expected, clipped(run))
        with hybrid_run(steps(), rows(1)[0], home="host", update=Update.ACROSS_STEPS, optimizer=narrow_adamw) as other:
            other.train(rows(4))
            assert not torch.equal(other.weights["last.weight"], run.weights["last.weight"])


def test_a_factor_of_a_clipped_master_is_in_the_update() -> None:
    adam = {**ADAM, "state_dtype": "bfloat16"}

    def trained(max_norm: float, home: str) -> dict[str, torch.Tensor]:
        with mixed_run(steps(), rows(1, BF16)[0], home=home, update=Update.ACROSS_STEPS, adam=adam) as run:
            for batch in rows(3, BF16):
                run.compiled(batch).backward()
                run.optimizer.clip_grad_norm_(max_norm)  # pyright: ignore[reportAttributeAccessIssue]
                run.optimizer.step()
                run.optimizer.zero_grad()
            return {name: value.clone() for name, value in run.optimizer.state_dict()["state"][0].items()}

    assert_same_tensors(trained(1e-3, "device"), trained(1e-3, "host"))
    assert not torch.equal(trained(1e-3, "host")["exp_avg"], trained(1e3, "host")["exp_avg"])


# -- state dicts ------------------------------------------------------------------------------------------------------


def trained(state_dtype: str, num_steps: int = 3, **arguments: Any) -> Run:
    optimizer = functools.partial(narrow_adamw, state_dtype=state_dtype, **arguments)
    return eager_run(steps(), optimizer).train(rows(num_steps))


@pytest.mark.parametrize("state_dtype", NARROW)
def test_a_state_dict_resumes_bit_for_bit(state_dtype: str) -> None:
    first = trained(state_dtype)
    saved = copy.deepcopy({"model": first.model.state_dict(), "optimizer": first.optimizer.state_dict()})
    other = trained(state_dtype, num_steps=1)
    other.model.load_state_dict(saved["model"])
    other.optimizer.load_state_dict(saved["optimizer"])
    for run in (first, other):
        run.losses.clear()
        run.train(rows(6)[3:])
    assert_same_run(first, other)


@pytest.mark.parametrize("state_dtype", NARROW)
def test_copies_and_pickles_keep_the_precision(state_dtype: str) -> None:
    first = trained(state_dtype, state_seed=5)
    file = io.BytesIO()
    torch.save(first.optimizer, file)
    file.seek(0)
    for other in (copy.deepcopy(first.optimizer), torch.load(file, weights_only=False)):
        assert other.precision == first.optimizer.precision  # pyright: ignore[reportAttributeAccessIssue]
        assert {form_of(state) for state in other.state.values()} == {MomentForm(state_dtype)}


def test_codes_of_odd_rows_are_saved_as_moments() -> None:
    run = trained("int8")
    state = run.optimizer.state_dict()["state"]
    for index, param in enumerate(run.model.parameters()):
        names = set(state[index]) - {"step"}
        if has_whole_rows(param):
            assert names == {"exp_avg_codes", "exp_avg_scale", "exp_avg_sq_codes", "exp_avg_sq_scale"}
            assert state[index]["exp_avg_scale"].shape == (param.shape[0], param.shape[1] // BLOCK)
        else:
            assert names == {"exp_avg", "exp_avg_sq"}
            assert state[index]["exp_avg"].dtype == torch.float32
    assert len({has_whole_rows(param) for param in run.model.parameters()}) == 2


@pytest.mark.parametrize("saved_in", ["float32", *NARROW])
@pytest.mark.parametrize("state_dtype", ["float32", *NARROW])
def test_one_form_loads_another(saved_in: str, state_dtype: str) -> None:
    first, other = trained(saved_in), trained(state_dtype, num_steps=1)
    exact = trained("float32")
    other.optimizer.load_state_dict(first.optimizer.state_dict())
    assert {form_of(state) for state in other.optimizer.state.values()} == {MomentForm(state_dtype)}
    back = trained("float32", num_steps=1)
    back.optimizer.load_state_dict(other.optimizer.state_dict())
    for own, wanted in zip(back.optimizer.state.values(), exact.optimizer.state.values(), strict=True):
        assert own["step"] == 3
        for name in ("exp_avg", "exp_avg_sq"):
            largest = wanted[name].abs().max()
            assert (own[name] - wanted[name]).abs().max() <= 0.2 * largest
            assert own[name].abs().max() > 0


def test_state_of_torch_loads_and_goes_back() -> None:
    exact = eager_run(steps()).train(rows(3))  # torch.optim.AdamW
    narrow = trained("bfloat16", num_steps=1)
    narrow.optimizer.load_state_dict(exact.optimizer.state_dict())
    for state, wanted in zip(narrow.optimizer.state.values(), exact.optimizer.state.values(), strict=True):
        assert torch.equal(state["exp_avg"], wanted["exp_avg"].bfloat16())
    wide = trained("int8").optimizer.state_dict(as_float32=True)  # pyright: ignore[reportCallIssue]
    exact.optimizer.load_state_dict(wide)
    exact.train(rows(1))
    assert {value.dtype for entry in wide["state"].values() for value in entry.values()} == {torch.float32}


def test_torch_refuses_codes_instead_of_taking_them_for_moments() -> None:
    exact = eager_run(steps()).train(rows(1))
    exact.optimizer.load_state_dict(trained("int8").optimizer.state_dict())
    with pytest.raises(KeyError, match="exp_avg"):
        exact.train(rows(1))


# -- what cannot be ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"state_dtype": "float16"}, "state_dtype='float16': expected one of 'float32', 'bfloat16', 'int8'"),
        ({"master_dtype": "int8"}, "master_dtype='int8': expected"),
        ({"state_dtype": "int8", "amsgrad": True}, "amsgrad=True with moments in int8"),
    ],
)
def test_errors_of_words(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        elixir.HybridAdamW(steps().parameters(), **arguments)


@pytest.mark.parametrize("codes", [torch.float8_e4m3fn, torch.int16])
def test_codes_of_no_form_are_refused_before_anything_changes(codes: torch.dtype) -> None:
    run, saved = trained("int8"), trained("int8", num_steps=1).optimizer.state_dict()
    before = copy.deepcopy(run.optimizer.state_dict())
    entry = next(entry for entry in saved["state"].values() if "exp_avg_codes" in entry)
    entry.update({name: entry[name].to(codes) for name in ("exp_avg_codes", "exp_avg_sq_codes")})
    with pytest.raises(
        ValueError, match=r"moments in (float8_e4m3fn|int16), .* has float32, bfloat16, int8\. .*as_float32"
    ):
        run.optimizer.load_state_dict(saved)
    torch.testing.assert_close(run.optimizer.state_dict(), before, rtol=0, atol=0)


def test_another_rounding_is_refused() -> None:
    with pytest.raises(TypeError, match="state_rounding"):
        elixir.HybridAdamW(steps().parameters(), state_rounding="nearest")  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match="positional"):
        elixir.hybrid(torch.optim.SGD, "bfloat16", "nearest")  # pyright: ignore[reportCallIssue]


def test_parameters_without_fp32_moments_are_refused() -> None:
    for dtype in (torch.bfloat16, torch.float64):
        with pytest.raises(UnsupportedModel, match="without an fp32 master"):
            elixir.HybridAdamW(steps().to(dtype).parameters(), state_dtype="int8")
    model = elixir.prepare(steps(), param_dtype="float16")
    with pytest.raises(UnsupportedModel, match="for bf16 parameters"):
        elixir.HybridAdamW(model.parameters(), master_dtype="bfloat16")


# -- what the planner chooses -----------------------------------------------------------------------------------------


def test_the_plan_takes_narrower_moments_only_if_the_budget_asks() -> None:
    def run_under(host_memory: int | None) -> Run:
        options = {"state_dtype": "auto:bfloat16", "replan": False, "host_memory": host_memory}
        return by_elixir(steps(), device_memory=budget, **options)

    with pytest.raises(elixir.NoFeasiblePlan) as raised:
        by_elixir(steps(), device_memory=1).train(rows(1))
    budget = int(1.1 * raised.value.needed_bytes)
    exact = run_under(None).train(rows(3))
    (plan,) = [found.plan for found in elixir.compilations(exact.model)]
    assert plan is not None
    assert {bucket.state_dtype for bucket in plan.buckets} == {None}
    host_bytes = plan.prediction.host_peak_bytes
    narrow = run_under(host_bytes - 4 * 2 * BLOCK * WIDTH).train(rows(3))
    (plan,) = [found.plan for found in elixir.compilations(narrow.model)]
    assert plan is not None
    chosen = [bucket for bucket in plan.buckets if bucket.state_dtype is not None]
    assert {bucket.state_dtype for bucket in chosen} == {"bfloat16"}
    assert 0 < len(chosen) < len(plan.buckets)
    for bucket in chosen:
        (why,) = [each for each in plan.decisions if each.subject == bucket.id and each.choice == "moments bfloat16"]
        assert "with exact moments the step needs" in why.because
    slots = {slot.name: slot.param for bucket in buckets_of(narrow) for slot in bucket.slots}
    for bucket in plan.buckets:
        for name in bucket.params:
            wanted = MomentForm(bucket.state_dtype or "float32")
            assert form_of(narrow.optimizer.state[slots[name]]) is wanted
    assert re.search(r"moments of \d+% in bfloat16", plan_line(plan))
    assert re.search(r"optimizer state with moments in bfloat16", elixir.explain(plan, chosen[0].id))


class Square(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for step in self.steps:
            x = torch.tanh(step(x))
        return x.square().mean()


@pytest.mark.parametrize(("state_dtype", "bytes_each"), [("float32", 12.0), ("bfloat16", 8.0), ("int8", 6.0625)])
def test_bytes_of_a_parameter_with_its_state_are_the_planned_ones(state_dtype: str, bytes_each: float) -> None:
    """A bf16 parameter, the low half of its master and both moments, in host memory as it is mapped."""
    batch = torch.ones(4, 512, dtype=BF16)
    torch.manual_seed(0)
    adam = {**ADAM, "state_dtype": state_dtype}
    gc.collect()  # the slabs of earlier runs
    before = live_slab_bytes()
    with mixed_run(Square(), batch, home="split", adam=adam) as run:
        recorded(run, [batch, batch])
        numel = sum(param.numel() for param in run.model.parameters())
        planned_bytes = sum(bucket.spec.state_nbytes for bucket in buckets_of(run))
        assert planned_bytes + 2 * numel == bytes_each * numel
        assert sum(state_bytes(own) for own in run.optimizer.state.values()) == planned_bytes
        assert live_slab_bytes() - before == pytest.approx(planned_bytes, rel=0.01)


def state_bytes(state: Any) -> int:
    """Return the bytes of the statistics of a parameter."""
    return sum(value.nbytes for name, value in state.items() if name != "step")


# ----------------------------------------------------------------------------------------------------------------------
# `hybrid(cls, state_dtype="bfloat16")`: statistics of any class in bf16, wherever and whenever it updates.


CLASSES = {
    "SGD": (SGD, {"lr": 0.1, "momentum": 0.9}),
    "Adam": (Adam, {"lr": 1e-2}),
    "RMSprop": (RMSprop, {"lr": 1e-2, "centered": True}),
    "Lion": (users.Lion, {}),
}


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A parameter has several blocks, and state on disk and streamed state come in several pieces."""
    monkeypatch.setattr(class_rule, "_BLOCK", 1024)
    with small_pieces():
        yield


def narrow(params: Any, name: str = "SGD", **how: Any) -> torch.optim.Optimizer:
    cls, arguments = CLASSES[name]
    return elixir.hybrid(cls, "bfloat16", **how)(params, **arguments)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("home", "update", "share"),
    [("host", Update.ACROSS_STEPS, 0.5), ("host disk", Update.AFTER_BACKWARD, 0.0)],
)
@pytest.mark.parametrize(
    "name", ["SGD", "Adam", *(pytest.param(n, marks=pytest.mark.slow) for n in ("RMSprop", "Lion"))]
)
def test_the_place_of_an_update_changes_no_bit(
    name: str, home: str, update: Update, share: float, tmp_path: Path
) -> None:
    optimizer = functools.partial(narrow, name=name)
    expected = eager_run(steps(), optimizer).train(rows(5))
    entries = [value for state in expected.optimizer.state.values() for value in state.values()]
    kept = {value.dtype for value in entries if isinstance(value, torch.Tensor) and value.dim()}
    assert kept == {torch.bfloat16}
    disk = {"disk_path": tmp_path} if home.endswith("disk") else {}
    with (
        nan_staging(),
        hybrid_run(steps(), rows(1)[0], home=home, update=update, share=share, optimizer=optimizer, **disk) as run,
    ):
        run.train(rows(5))
        assert {bucket.spec.state_dtype for bucket in buckets_of(run)} == {"bfloat16"}
        assert_same_run(expected, run)


def apart_from_exact(run: Run, name: str) -> float:
    """Return how far `run` is from the exact class, over how far the class went."""
    cls, arguments = CLASSES[name]
    exact = eager_run(steps(), functools.partial(elixir.hybrid(cls), **arguments)).train(rows(20))
    start = steps().state_dict()
    moved = sum(float((exact.weights[key] - start[key]).abs().sum()) for key in start)
    return sum(float((exact.weights[key] - run.weights[key]).abs().sum()) for key in start) / moved


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_training_stays_near_the_exact_class(name: str) -> None:
    run = eager_run(steps(), functools.partial(narrow, name=name)).train(rows(20))
    assert 0 < apart_from_exact(run, name) < 0.05


@pytest.mark.usefixtures("small_blocks")
def test_state_dicts_copies_and_files_resume_bit_for_bit() -> None:
    first = eager_run(steps(), narrow).train(rows(3))
    file = io.BytesIO()
    torch.save(first.optimizer, file)
    file.seek(0)
    assert type(torch.load(file, weights_only=False)) is type(first.optimizer)
    other = eager_run(steps(), narrow).train(rows(1))
    other.model.load_state_dict(copy.deepcopy(first.model.state_dict()))
    other.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
    for run in (first, other):
        run.losses.clear()
        run.train(rows(5)[3:])
    assert_same_run(first, other)


@pytest.mark.usefixtures("small_blocks")
def test_what_has_no_such_form_is_refused() -> None:
    with pytest.raises(ValueError, match="HybridAdamW has them"):
        elixir.hybrid(SGD, "int8")
    with pytest.raises(ValueError, match=r"use HybridAdamW\(..., state_dtype='bfloat16'\)"):
        elixir.hybrid(torch.optim.AdamW, "bfloat16")
    with pytest.raises(ValueError, match="state_dtype='half'"):
        elixir.hybrid(SGD, "half")
    assert elixir.hybrid(SGD) is elixir.hybrid(SGD)


# ----------------------------------------------------------------------------------------------------------------------
# State dicts of HybridAdamW with moments in fewer bytes, and of optimizers with masters beside them: what is loaded
# goes on bit for bit, is converted, or is refused before anything has changed.


def adamw(params: Any, **arguments: Any) -> elixir.HybridAdamW:
    return elixir.HybridAdamW(params, lr=1e-2, **arguments)


def with_masters(num_steps: int, **arguments: Any) -> Run:
    """Train a model with bf16 parameters, which have masters."""
    model = elixir.prepare(steps(), param_dtype="bfloat16")
    own = Run(model=model, compiled=model, optimizer=adamw(model.parameters(), **arguments))
    return own.train(rows(num_steps, BF16))


def go_on(run: Run, of: Run) -> Run:
    """Load the model and the optimizer of `of` into `run`, and train both two steps more."""
    run.model.load_state_dict(copy.deepcopy(of.model.state_dict()))
    run.optimizer.load_state_dict(copy.deepcopy(of.optimizer.state_dict()))
    for each in (run, of):
        each.losses.clear()
        each.train(rows(5, BF16)[3:])
    return run


@pytest.mark.parametrize("master_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("state_dtype", ["float32", *NARROW])
def test_a_state_dict_with_masters_resumes_bit_for_bit(state_dtype: str, master_dtype: str) -> None:
    how = {"state_dtype": state_dtype, "master_dtype": master_dtype}
    first = with_masters(3, **how)
    other = go_on(with_masters(1, **how), first)
    assert_same_run(first, other)
    for state in other.optimizer.state.values():
        assert form_of(state) is MomentForm(state_dtype)
        assert (REST_NAMES[BF16] in state) == (master_dtype == "float32")


def test_a_master_that_is_loaded_by_an_optimizer_without_masters_is_rounded_to_its_parameter() -> None:
    exact = with_masters(3)
    own = with_masters(1, master_dtype="bfloat16")
    own.optimizer.load_state_dict(copy.deepcopy(exact.optimizer.state_dict()))
    assert not any(set(REST_NAMES.values()) & state.keys() for state in own.optimizer.state.values())
    masters = [entry["master"] for entry in exact.optimizer.state_dict()["state"].values()]
    for param, master in zip(own.model.parameters(), masters, strict=True):
        assert torch.equal(param.detach(), master.to(BF16))


@pytest.mark.parametrize("how", [{"state_dtype": "int8"}, {"master_dtype": "bfloat16"}])
def test_amsgrad_is_refused_before_a_state_dict_changes_anything(how: dict[str, str]) -> None:
    saved = eager_run(steps(), functools.partial(torch.optim.AdamW, amsgrad=True)).train(rows(2))
    own = eager_run(steps(), adamw, state_dtype="int8") if "state_dtype" in how else with_masters(0, **how)
    own.train(rows(1, next(own.model.parameters()).dtype))
    before = copy.deepcopy(own.optimizer.state_dict())
    with pytest.raises(ValueError, match=r"amsgrad=True with moments in \w+: .* stored in fp32 only"):
        own.optimizer.load_state_dict(saved.optimizer.state_dict())
    torch.testing.assert_close(own.optimizer.state_dict(), before, rtol=0, atol=0)


def test_amsgrad_that_is_set_in_a_group_is_refused_by_the_next_update() -> None:
    own = eager_run(steps(), adamw, state_dtype="int8").train(rows(1))
    weights = own.weights
    own.optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(ValueError, match="amsgrad=True with moments in int8"):
        own.train(rows(1))
    assert all(torch.equal(own.weights[name], weights[name]) for name in weights)


def test_amsgrad_has_exact_moments_whatever_the_plan_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan may be older than its optimizer, and is made for AdamW without AMSGrad then."""
    own = eager_run(steps(), adamw, amsgrad=True)
    rule = own.optimizer._updater.rule  # pyright: ignore[reportAttributeAccessIssue]
    param, group = next(own.model.parameters()), own.optimizer.param_groups[0]
    planned = type("Planned", (), {"state_dtype": "int8"})()
    monkeypatch.setattr("elixir_compile.optim.adamw_rule.planned_spec", lambda param: planned)
    assert rule.form(param, group) is MomentForm.FLOAT32
    assert rule.form(param, {**group, "amsgrad": False}) is MomentForm.INT8
    own.train(rows(2))
    assert {value.dtype for state in own.optimizer.state.values() for value in state.values()} == {torch.float32}


def test_the_first_update_finds_its_kernel_built_and_its_threads_chosen() -> None:
    """Else the thread of updates would wait for the compiler in the middle of a step."""
    own = eager_run(steps(), adamw, state_dtype="int8")
    rule = own.optimizer._updater.rule  # pyright: ignore[reportAttributeAccessIssue]
    assert rule._threads is None
    own.train(rows(1))
    assert rule._threads is not None


# -- classes ----------------------------------------------------------------------------------------------------------


def test_a_class_without_statistics_has_no_moments_to_narrow() -> None:
    narrow = elixir.hybrid(SGD, "bfloat16")
    own = eager_run(steps(), narrow, lr=0.1).train(rows(3))
    exact = eager_run(steps(), elixir.hybrid(SGD), lr=0.1).train(rows(3))
    assert all(torch.equal(own.weights[name], exact.weights[name]) for name in own.weights)
    params = list(own.model.parameters())
    assert {found.state_dtype for found in own.optimizer.states_of(params)} == {None}  # pyright: ignore


def test_the_noise_of_a_class_that_counts_no_steps_is_another_in_each_update() -> None:
    """A momentum that decays by 1/1000 in each step: with the same noise each time it would stay where it rounds to."""
    param = torch.nn.Parameter(torch.zeros(4096))
    optimizer = elixir.hybrid(SGD, "bfloat16")([param], lr=0.0, momentum=0.999)
    param.grad = begin = torch.linspace(1.0, 2.0, 4096)  # equal values would get equal noise
    optimizer.step()
    param.grad = torch.zeros(4096)
    for _ in range(100):
        optimizer.step()
    left = optimizer.state[param]["momentum_buffer"].float().mean() / begin.mean()
    assert float(left) == pytest.approx(0.999**100, abs=0.002)
    assert optimizer.state[param]["num_updates"] == 101


def test_a_rule_of_a_class_needs_fp32_statistics_to_narrow_them() -> None:
    param = torch.nn.Parameter(torch.zeros(8, dtype=torch.float64))
    optimizer = elixir.hybrid(SGD, "bfloat16")([param], lr=0.1, momentum=0.9)
    rule = ClassRule(SGD, optimizer, optimizer.precision)  # pyright: ignore[reportAttributeAccessIssue]
    assert rule.param_state(param, optimizer.param_groups[0]).state_dtype is None
