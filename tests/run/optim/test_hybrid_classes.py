"""`hybrid(cls)` against `cls`: the same bits, what dry steps find out, and one host pass in place of a step."""

import copy
import logging
import math
import pickle
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, NAdam, Optimizer, RAdam, RMSprop, Rprop
from torch.optim.optimizer import register_optimizer_step_post_hook

import elixir_compile as elixir
from elixir_compile.ir import Tier, Update
from elixir_compile.optim.generic import code
from elixir_compile.optim.generic.code import Form, TapeError
from elixir_compile.optim.generic.dry_step import ClassStep
from elixir_compile.optim.host import HostThreads
from elixir_compile.optim.host.kernel import GRAIN
from elixir_compile.optim.hybrid import Hybrid
from tests.run import optimizers as users
from tests.run.models import Stack, seeded, vectors
from tests.run.training import assert_same, assert_same_tensors, by_elixir, by_torch
from tests.run.updating import (
    accumulate,
    assert_equal,
    buckets_of,
    closure_step,
    eager_run,
    flat_state,
    hybrid_run,
    in_flight,
    ladder,
    nan_staging,
    pass_through_torch,
    rows,
)

# ----------------------------------------------------------------------------------------------------------------------
# `hybrid(cls)` against `cls` itself with the same flags, bitwise: losses, weights and state.


Make = Callable[[Any], Optimizer]


def both(cls: type[Optimizer], **options: Any) -> tuple[Make, Make]:
    """Return what makes the optimizer of torch and its hybrid."""
    return lambda params: cls(params, **options), lambda params: elixir.hybrid(cls)(params, **options)


QUICK = [
    (SGD, {"lr": 0.1}, "host", "in_backward", 0.0),
    (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}, "host", "across_steps", 0.0),
    (SGD, {"lr": 0.1, "momentum": 0.9, "fused": True, "maximize": True}, "host", "after_backward", 0.5),
    (Adam, {"foreach": False}, "split", "across_steps", 0.5),
    (Adam, {"amsgrad": True, "lr": torch.tensor(0.01)}, "host", "in_backward", 0.0),
    (Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.1}, "host", "across_steps", 0.25),
    (RMSprop, {"centered": True, "momentum": 0.5}, "split", "in_backward", 0.0),
    (NAdam, {}, "device", "across_steps", 0.0),
    (Rprop, {}, "host", "after_backward", 1.0),
    (users.Lion, {}, "host", "across_steps", 0.5),
    (users.Lion, {}, "device", "in_backward", 0.0),
]
TRAINED = [
    *QUICK,
    *(
        pytest.param(cls, options, home, update.value, share, marks=pytest.mark.slow)
        for cls, options in ((SGD, {"lr": 0.1, "momentum": 0.9}), (users.Lion, {}), (RMSprop, {}), (Adagrad, {}))
        for home, share in (("device", 0.0), ("split", 0.0), ("split", 0.5), ("host", 0.0), ("host", 0.5))
        for update in Update
        if not (share and update is Update.IN_BACKWARD)
    ),
]


@pytest.mark.parametrize(("cls", "options", "home", "update", "share"), TRAINED)
def test_bitwise_equal_to_the_class(
    cls: type[Optimizer], options: dict[str, Any], home: str, update: str, share: float
) -> None:
    model, batches = ladder(), rows(6)
    plain, hybrid = both(cls, **options)
    expected = eager_run(model, plain).train(batches)
    plan = {"home": home, "update": Update(update), "share": share}
    with nan_staging(), hybrid_run(model, batches[0], optimizer=hybrid, **plan) as run:
        run.train(batches)
        if home != "device" and share == 0:
            assert all(bucket.placement.update is Tier.HOST for bucket in buckets_of(run))
            assert in_flight(run) == (0 if update == "after_backward" else 4)
        assert_equal(expected, run)


def test_host_state_is_in_slabs_and_loads_in_both_directions() -> None:
    model, batches = ladder(), rows(6)
    plain, hybrid = both(SGD, lr=0.1, momentum=0.9)
    expected = eager_run(model, plain).train(batches)
    with hybrid_run(model, batches[0], home="host", update=Update.ACROSS_STEPS, optimizer=hybrid) as run:
        run.train(batches[:2])
        buffers = run.optimizer._updater.placer.buffers
        for bucket in buckets_of(run):
            for slot in bucket.slots:
                buffer = run.optimizer.state[slot.param]["momentum_buffer"]
                assert buffer.data_ptr() == buffers.buffer(bucket, "momentum_buffer", slot.param).data_ptr()
        pass_through_torch(run, plain, batches)
        run.losses = expected.losses[:4]
        assert_equal(expected, run.train(batches[4:]))


def test_copies_and_pickles_continue() -> None:
    model, batches = seeded(Stack), vectors(4)
    plain, hybrid = both(Adam, lr=0.01)
    expected = by_torch(model, optimizer=plain).train(batches)
    run = by_elixir(model, optimizer=hybrid).train(batches[:2])
    copied, pickled = copy.deepcopy(run.optimizer), pickle.loads(pickle.dumps(run.optimizer))
    for other in (copied, pickled):
        assert type(other) is elixir.hybrid(Adam)
        assert_same_tensors(flat_state(run.optimizer), flat_state(other))
    copied.wait()
    assert_same(expected, run.train(batches[2:]))


class Named(elixir.hybrid(SGD)):
    """A subclass that a user wrote."""


def test_a_subclass_of_a_hybrid_class_pickles() -> None:
    optimizer = Named([torch.nn.Parameter(torch.ones(2))], lr=0.5)
    assert type(pickle.loads(pickle.dumps(optimizer))) is Named


def test_accumulation_of_a_class() -> None:
    model, batches = ladder(), rows(16)
    plain, hybrid = both(SGD, lr=0.1, momentum=0.9)
    expected = accumulate(eager_run(model, plain), batches, 8)
    with hybrid_run(model, batches[0], home="host", update=Update.IN_BACKWARD, optimizer=hybrid) as run:
        assert_equal(expected, accumulate(run, batches, 8))


def test_a_class_that_is_not_elementwise_keeps_state_beside_params() -> None:
    model, batches = seeded(Stack), vectors(3)
    plain, hybrid = both(torch.optim.LBFGS, lr=0.1, max_iter=3)

    expected = by_torch(model, optimizer=plain).train(batches, closure_step)
    with pytest.warns(elixir.ElixirWarning, match="HybridLBFGS is not element-wise: .*closure"):
        run = by_elixir(model, optimizer=hybrid).train(batches, closure_step)
    assert_same(expected, run)
    for plan in (record.plan for record in elixir.compilations(run.model)):
        assert all(placement.optim is placement.param for placement in plan.placements)


# ----------------------------------------------------------------------------------------------------------------------
# What dry steps find out about an optimizer class.


def made(cls: type[torch.optim.Optimizer], **options: Any) -> Hybrid:
    optimizer = elixir.hybrid(cls)([torch.nn.Parameter(torch.ones(5, 3))], **options)
    assert isinstance(optimizer, Hybrid)
    return optimizer


@pytest.mark.parametrize(
    ("cls", "options", "statistics"),
    [
        (torch.optim.SGD, {}, []),
        (torch.optim.SGD, {"momentum": 0.9}, ["momentum_buffer"]),
        (torch.optim.SGD, {"momentum": 0.9, "fused": True}, ["momentum_buffer"]),
        (torch.optim.Adam, {}, ["exp_avg", "exp_avg_sq"]),
        (torch.optim.Adam, {"amsgrad": True, "foreach": True}, ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]),
        (torch.optim.Adam, {"lr": torch.tensor(0.1), "capturable": True}, ["exp_avg", "exp_avg_sq"]),
        (torch.optim.AdamW, {"amsgrad": True}, ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]),
        (torch.optim.RMSprop, {"centered": True}, ["square_avg", "grad_avg"]),
        (torch.optim.Adagrad, {"initial_accumulator_value": 0.5}, ["sum"]),
        (torch.optim.ASGD, {}, ["ax"]),
        (torch.optim.Rprop, {}, ["prev", "step_size"]),
        (users.Lion, {}, ["average"]),
    ],
)
def test_statistics_and_their_bytes(
    cls: type[torch.optim.Optimizer], options: dict[str, Any], statistics: list[str]
) -> None:
    optimizer = made(cls, **options)
    assert optimizer.places_state
    group = optimizer.param_groups[0]
    assert list(optimizer._updater.rule.statistics(group)) == statistics
    states = optimizer.states_of(group["params"])
    assert [(state.group, state.state_nbytes) for state in states] == [(0, 15 * 4 * len(statistics))]


def test_hyperparameters_that_change_the_statistics() -> None:
    optimizer = made(torch.optim.SGD)
    (param,) = optimizer.param_groups[0]["params"]
    assert optimizer.states_of([param])[0].state_nbytes == 0
    optimizer.param_groups[0]["momentum"] = 0.5
    assert optimizer.states_of([param])[0].state_nbytes == 60


@pytest.mark.parametrize(
    ("cls", "because"),
    [
        (torch.optim.LBFGS, "closure"),
        (users.Noisy, "draws random numbers"),
        (users.CountsInGroup, "is updated otherwise beside others than alone"),
        (users.CountsInItself, "a step changes count"),
    ],
)
def test_classes_whose_state_no_plan_places_warn_once_with_reason(
    cls: type[torch.optim.Optimizer], because: str
) -> None:
    optimizer = made(cls)
    with pytest.warns(elixir.ElixirWarning, match=f"Hybrid{cls.__name__} is not element-wise: .*{because}"):
        assert not optimizer.places_state
    assert not optimizer.places_state


@pytest.mark.parametrize(
    ("cls", "because"),
    [
        (torch.optim.Adafactor, "parts"),
        (torch.optim.Muon, "2D"),
        (users.Scaled, "other weights"),
        (users.RowScaled, "other weights"),
        (users.Clipped, "other weights"),
        (users.Factored, r"keeps rows of shape \(16,\)"),
        (users.Centered, r"shape \(4, 4, 4, 2\) get other weights"),
        (users.FastNumbers, r"shape \(\) get other weights"),
        (users.SlowGiants, r"shape \(127, 256\) get other weights"),
    ],
)
def test_classes_that_plans_place_by_whole_tensors(cls: type[torch.optim.Optimizer], because: str) -> None:
    """Without a warning, and each for a reason."""
    optimizer = made(cls)
    assert optimizer.places_state
    (group,) = optimizer.param_groups
    assert re.search(because, optimizer._updater.rule.known.schema(group, torch.float32).because)
    assert all(state.whole_update is not None for state in optimizer.states_of(group["params"]))


@pytest.mark.parametrize(
    ("cls", "options", "counts"),
    [
        (torch.optim.Adam, {"fused": True}, True),
        (torch.optim.Adam, {}, False),  # its counter stays on the host
        (torch.optim.SGD, {"fused": True}, False),
        (users.Lion, {}, False),
    ],
)
def test_classes_whose_steps_the_host_counts(
    cls: type[torch.optim.Optimizer], options: dict[str, Any], counts: bool
) -> None:
    optimizer = made(cls, **options)
    assert optimizer._updater.rule.counts_steps(optimizer.param_groups[0]) is counts


def test_an_entry_called_step_need_not_be_a_counter() -> None:
    optimizer = made(users.StepsByTwo)
    optimizer.param_groups[0]["fused"] = True  # so that all of its state is beside the weight
    assert not optimizer._updater.rule.counts_steps(optimizer.param_groups[0])


def test_dry_steps_leave_the_random_state_unchanged() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    optimizer = made(users.Noisy)
    with pytest.warns(elixir.ElixirWarning):
        assert not optimizer.places_state
    assert torch.equal(torch.rand(3), expected)


def test_optimizer_hooks_see_each_step_once_and_no_dry_step() -> None:
    seen: list[str] = []
    optimizer = made(torch.optim.SGD, lr=1.0)
    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])  # from now on torch has wrapped the step of SGD
    optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
    handle = register_optimizer_step_post_hook(lambda *_: seen.append("post"))
    (param,) = optimizer.param_groups[0]["params"]
    param.grad = torch.ones_like(param)
    with pytest.warns(elixir.NoGraphCaptured, match="this HybridSGD"):
        optimizer.step()
    handle.remove()
    assert seen == ["pre", "post"]
    assert torch.equal(param, torch.zeros(5, 3))


def test_hybrid_returns_the_same_subclass_each_time() -> None:
    cls = elixir.hybrid(torch.optim.SGD)
    assert issubclass(cls, torch.optim.SGD)
    assert cls is not torch.optim.SGD
    assert elixir.hybrid(torch.optim.SGD) is cls
    assert elixir.hybrid(cls) is cls
    assert elixir.hybrid(torch.optim.AdamW) is elixir.HybridAdamW
    with pytest.raises(ValueError, match="learning rate"):
        cls([torch.nn.Parameter(torch.ones(1))], lr=-1.0)


@pytest.mark.parametrize("wrong", [torch.nn.Linear, torch.optim.Optimizer, "SGD", math.pi])
def test_hybrid_refuses_classes_that_are_not_optimizers(wrong: Any) -> None:
    with pytest.raises(TypeError, match="subclass of torch"):
        elixir.hybrid(wrong)


# ----------------------------------------------------------------------------------------------------------------------
# One host pass in place of a class's own step: the same bits, compiled once per form, refused where it cannot be.


SHAPES = ((300, 7), (64, 64), (1, 1), (1025,), (3, 5, 2))
NUM_STEPS = 7


class Cautious(users.Lion):
    """Masks, bounds, powers, a mutated gradient, two statistics that change places."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state["old"], state["new"] = torch.zeros_like(param), torch.ones_like(param)
        param.grad.clamp_(-2, 2).add_(param, alpha=group["weight_decay"])
        state["old"], state["new"] = state["new"], state["old"]
        state["new"].mul_(group["beta"]).addcmul_(param.grad, param.grad)
        agree = (state["old"] * param.grad > 0).logical_not_()
        size = torch.where(agree, state["new"].square() + 1, state["old"].abs() ** 0.5).reciprocal_()
        kept = size.masked_fill(param.grad.eq(0) & agree, 0.5).to(torch.float32)
        param.sub_(torch.minimum(kept, torch.full_like(kept, 3)) * agree, alpha=group["lr"])
        param.div_(1 + group["lr"]).add_(1 - param.grad / (torch.maximum(kept, size).sqrt_() + 1e-3), alpha=1e-3)


class ReadsElements(users.Lion):
    """Branches on the elements in a expression that its dry step cannot see."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        if float(param.detach().flatten()[0]) < 1e6:
            param.sub_(param.grad, alpha=group["lr"])


class Exponential(users.Lion):
    """An op without a formula."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        param.sub_(param.grad.exp(), alpha=group["lr"])


class Rounded(users.Lion):
    """Numbers that are below 1/2, or not 1, in fp64 only, from the third step on."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state["old"], state["count"] = torch.zeros_like(param), 0
        state["count"] += 1
        near = 0.1 if state["count"] < 3 else 1e-9
        state["old"].lerp_(param.grad, 0.5 - near).addcmul_(param.grad, param, value=1 - near)
        param.sub_(state["old"], alpha=group["lr"])


class KeepsGradient(users.Lion):
    """Keeps the gradient of the step before, without a copy."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        before = state.get("before", param.grad)
        state["before"] = param.grad
        param.sub_(param.grad + before, alpha=group["lr"])


class KeepsTwice(users.Lion):
    """Keeps one tensor under two names."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state["one"] = state["other"] = torch.zeros_like(param)
        state["one"].add_(param.grad)
        param.sub_(state["other"], alpha=group["lr"])


class BySize(users.Lion):
    """Large tensors otherwise than small ones."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        param.mul_(1 - group["lr"] * group["weight_decay"] if param.numel() > 4000 else 1).sub_(
            param.grad, alpha=group["lr"]
        )


class Pair:
    """One optimizer of a class and one of its hybrid, over the same parameters."""

    def __init__(self, cls: type[Optimizer], **options: Any) -> None:
        generator = torch.Generator().manual_seed(3)
        self.generator = generator
        self.params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
        self.own_params = [torch.nn.Parameter(param.detach().clone()) for param in self.params]
        self.plain, self.own = cls(self.params, **options), elixir.hybrid(cls)(self.own_params, **options)

    def train(self, num_steps: int = NUM_STEPS) -> None:
        """Change the learning rate in every step."""
        for _ in range(num_steps):
            for param, own in zip(self.params, self.own_params, strict=True):
                param.grad = torch.randn(param.shape, generator=self.generator)
                own.grad = param.grad.clone()
            for optimizer in (self.plain, self.own):
                for group in optimizer.param_groups:
                    group["lr"] = group["lr"] * 0.9
                optimizer.step()

    def assert_same(self) -> None:
        for param, own in zip(self.params, self.own_params, strict=True):
            assert torch.equal(param, own)
            assert torch.equal(param.grad, own.grad)
            state, found = self.plain.state[param], self.own.state[own]
            assert state.keys() == found.keys()
            for name, value in state.items():
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(found[name]))


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many passes were asked for, and how many tensors the class's own step updated."""
    counts = {"passes": 0, "own": 0}
    compiled, take = code.compiled, ClassStep.take

    def count_passes(form: Any) -> Any:
        counts["passes"] += 1
        return compiled(form)

    def count_own(self: ClassStep, rows: Any) -> None:
        counts["own"] += sum(row.weight.shape in SHAPES for row in rows)
        take(self, rows)

    monkeypatch.setattr(code, "compiled", count_passes)
    monkeypatch.setattr(ClassStep, "take", count_own)
    return counts


@pytest.fixture
def unplanned(monkeypatch: pytest.MonkeyPatch) -> None:
    """These parameters belong to no model, which is not what is tested."""
    monkeypatch.setattr("elixir_compile.optim.hybrid.warn_if_unplanned", lambda optimizer: None)


@pytest.mark.usefixtures("unplanned")
@pytest.mark.parametrize(
    ("cls", "options", "num_forms"),
    [
        (SGD, {"lr": 0.1}, 1),
        (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "maximize": True}, 1),
        (SGD, {"lr": 0.1, "momentum": 0.9, "foreach": True}, 1),
        (Adam, {"amsgrad": True, "weight_decay": 0.1}, 1),
        (Adam, {"lr": torch.tensor(0.01)}, 1),
        (Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.1}, 1),
        (RMSprop, {"centered": True, "momentum": 0.5}, 1),
        (Adadelta, {}, 1),
        (Adamax, {}, 1),
        (NAdam, {}, 1),
        (ASGD, {"t0": 3.0}, 2),
        (RAdam, {}, 2),
        (users.Lion, {}, 1),
        (Cautious, {}, 1),
        (Rounded, {}, 2),
    ],
)
def test_a_pass_gives_the_bits_of_the_class_at_any_learning_rate(
    cls: type[Optimizer], options: dict[str, Any], num_forms: int, counted: dict[str, int]
) -> None:
    pair = Pair(cls, **options)
    pair.train()
    pair.assert_same()
    assert counted["passes"] == num_forms
    makes_state_itself = any(pair.plain.state[param] for param in pair.params) and cls is not Adagrad
    assert counted["own"] == (len(SHAPES) if makes_state_itself else 0)  # in the first step


@pytest.mark.usefixtures("unplanned")
def test_a_class_that_treats_large_tensors_otherwise_keeps_its_own_step(counted: dict[str, int]) -> None:
    pair = Pair(BySize)
    pair.train()
    pair.assert_same()
    assert counted["passes"] == 0


@pytest.mark.usefixtures("unplanned")
@pytest.mark.parametrize(
    ("cls", "because"),
    [
        (ReadsElements, "uses a tensor of shape"),
        (Exponential, "it calls exp, which has no formula"),
    ],
)
def test_an_unrecordable_class_runs_its_own_step_and_warns_once(
    cls: type[Optimizer], because: str, caplog: pytest.LogCaptureFixture, counted: dict[str, int]
) -> None:
    pair = Pair(cls)
    with caplog.at_level(logging.WARNING, logger="elixir_compile"):
        pair.train()
    pair.assert_same()
    said = [record.getMessage() for record in caplog.records if because in record.getMessage()]
    assert len(said) == len(set(said)) > 0
    assert counted == {"passes": 0, "own": NUM_STEPS * len(SHAPES)}


@pytest.mark.usefixtures("unplanned")
def test_a_pass_with_other_rounding_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Here a product is rounded before it is added, as in Inductor's code."""
    expressions = {**code._torch_expressions(), "add": "{0} + {2} * {1}"}
    code.compiled.cache_clear()
    monkeypatch.setattr(code, "_torch_expressions", lambda: expressions)
    pair = Pair(SGD, lr=0.1, momentum=0.9)
    pair.train()
    code.compiled.cache_clear()
    pair.assert_same()
    assert [
        record.getMessage()
        for record in caplog.records
        if "its compiled pass rounds differently" in record.getMessage()
    ]


@pytest.mark.usefixtures("unplanned")
def test_without_a_compiler_the_class_runs_its_own_step(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    for name, value in (("CC", str(tmp_path / "cc")), ("ELIXIR_CACHE_DIR", str(tmp_path))):
        monkeypatch.setenv(name, value)
    code.compiled.cache_clear()
    code._torch_expressions.cache_clear()
    pair = Pair(SGD, lr=0.1, momentum=0.9)
    pair.train()
    pair.assert_same()
    said = [record.getMessage() for record in caplog.records if "no C compiler" in record.getMessage()]
    assert len(said) == 1


@pytest.mark.usefixtures("unplanned")
def test_gradients_with_other_strides() -> None:
    pair = Pair(Cautious)
    pair.train(2)
    for param, own in zip(pair.params[:2], pair.own_params[:2], strict=True):
        param.grad = torch.randn(param.shape[::-1]).t()
        own.grad = param.grad.clone(memory_format=torch.preserve_format)
        assert own.grad.stride() == param.grad.stride() != param.stride()
    pair.plain.step()
    pair.own.step()
    pair.assert_same()


@pytest.mark.usefixtures("unplanned")
def test_autograd_sees_the_tensors_that_a_pass_writes() -> None:
    """Autograd refuses to use what was changed since."""
    pair = Pair(SGD, lr=0.1)
    own = pair.own_params[0]
    pair.train(1)
    loss = (own * own).sum()
    with torch.no_grad():
        pair.own.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.usefixtures("unplanned")
def test_other_threads_run_python_during_a_pass() -> None:
    """With the GIL held the main thread would run before and behind the pass only."""
    form = Form(num_inputs=1, ops=(("sqrt", (("v", 0),)), ("div", (("v", 1), ("v", 0)))), outputs=((0, 2),))
    run = code.compiled(form)
    values = torch.rand(1 << 24)

    def longest_gap() -> float:
        """The longest time in which this thread did nothing, as a share of the pass."""
        seconds: list[float] = []

        def update() -> None:
            began_s = time.perf_counter()
            run([values.data_ptr()], [], len(values))
            seconds.append(time.perf_counter() - began_s)

        worker, gap_s, last_s = threading.Thread(target=update), 0.0, time.perf_counter()
        worker.start()
        is_over = False
        while not is_over:
            is_over = not worker.is_alive()
            now_s = time.perf_counter()
            gap_s, last_s = max(gap_s, now_s - last_s), now_s
        worker.join()
        return gap_s / seconds[0]

    # On a machine that others use too, this thread may have to wait for a core once.
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)  # so that the worker does not wait before its pass
    try:
        shares = [longest_gap() for _ in range(5)]
    finally:
        sys.setswitchinterval(usual_s)
    assert min(shares) < 0.5, shares


@pytest.mark.usefixtures("unplanned")
def test_parts_on_several_threads_give_the_same_bits() -> None:
    """Where one part ends and the next begins, a block of the loop is short."""
    form = Form(num_inputs=2, ops=(("sqrt", (("v", 1),)), ("add", (("v", 0), ("v", 2), ("s", 0)))), outputs=((0, 3),))
    run = code.compiled(form)
    weight, statistic = torch.randn(GRAIN * 2 + 77), torch.rand(GRAIN * 2 + 77)
    wanted = weight.add(statistic.sqrt(), alpha=-0.1)
    tensors = (weight, statistic)
    HostThreads(3).run(
        len(weight),
        lambda start, stop: run([one.data_ptr() + 4 * start for one in tensors], [-0.1], stop - start),
    )
    assert torch.equal(weight, wanted)


@pytest.mark.usefixtures("unplanned")
def test_an_op_without_a_bitwise_formula_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    expressions = {name: expression for name, expression in code._torch_expressions().items() if name != "add"}
    code.compiled.cache_clear()
    monkeypatch.setattr(code, "_torch_expressions", lambda: expressions)
    form = Form(num_inputs=2, ops=(("add", (("v", 0), ("v", 1), ("s", 0))),), outputs=((0, 2),))
    with pytest.raises(TapeError, match="no formula reproduces torch's add on this processor"):
        code.compiled(form)


@pytest.mark.usefixtures("unplanned")
def test_a_host_bucket_is_updated_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, gradients and statistics of its parameters follow one another in slabs."""
    model, batches = ladder(), rows(3)
    sizes: list[int] = []

    def counted_runs(found: Any, steps: Any) -> Any:
        for members, tensors in coalesce(found, steps):
            sizes.append(len(members))
            yield members, tensors

    coalesce = code.coalesce
    monkeypatch.setattr(code, "coalesce", counted_runs)

    def make(params: Any) -> Optimizer:
        return elixir.hybrid(SGD)(params, lr=0.1, momentum=0.9)

    with hybrid_run(model, batches[0], home="host", update=Update.ACROSS_STEPS, optimizer=make) as run:
        run.train(batches)
        run.optimizer.wait()
        num_buckets, num_params = len(buckets_of(run)), sum(len(bucket.slots) for bucket in buckets_of(run))
    assert sum(sizes) == 2 * num_params  # in the second and the third step
    assert len(sizes) == 2 * num_buckets < sum(sizes)


@pytest.mark.usefixtures("unplanned")
@pytest.mark.parametrize("cls", [KeepsGradient, KeepsTwice])
def test_state_that_shares_memory_is_left_to_the_class(cls: type[Optimizer]) -> None:
    pair = Pair(cls, lr=0.1)
    first = None
    for _ in range(NUM_STEPS):
        pair.train(1)
        if first is None:
            first = [own.grad for own in pair.own_params]
            kept = [grad.clone() for grad in first]
    assert all(map(torch.equal, first, kept))
    for param, own in zip(pair.params, pair.own_params, strict=True):
        assert torch.equal(param, own)


@pytest.mark.usefixtures("unplanned")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_gradients_use_the_step_of_the_class() -> None:
    torch.manual_seed(0)
    plain = torch.nn.Embedding(50, 16, sparse=True)
    own = torch.nn.Embedding(50, 16, sparse=True)
    own.load_state_dict(plain.state_dict())
    for table, cls in ((plain, Adagrad), (own, elixir.hybrid(Adagrad))):
        optimizer = cls(table.parameters(), lr=0.1)
        for start in range(3):
            table(torch.arange(start, start + 9)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(plain.weight, own.weight)
