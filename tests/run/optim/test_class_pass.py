"""One host pass in place of a class's own step: the same bits, compiled once per form, refused where it cannot be."""

import logging
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, NAdam, Optimizer, RAdam, RMSprop

import elixir_compile as elixir
from elixir_compile.base.errors import ElixirWarning
from elixir_compile.ir import Update
from elixir_compile.optim.generic import class_rule, code
from elixir_compile.optim.generic.code import Form, TapeError
from elixir_compile.optim.generic.dry_step import ClassStep
from elixir_compile.optim.host import HostThreads
from elixir_compile.optim.host.kernel import GRAIN
from tests.run import optimizers as users
from tests.run.updating import buckets_of, hybrid_run, ladder, rows

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
    compiled, take = class_rule.compiled, ClassStep.take

    def count_passes(form: Any) -> Any:
        counts["passes"] += 1
        return compiled(form)

    def count_own(self: ClassStep, rows: Any) -> None:
        counts["own"] += sum(row.weight.shape in SHAPES for row in rows)
        take(self, rows)

    monkeypatch.setattr(class_rule, "compiled", count_passes)
    monkeypatch.setattr(ClassStep, "take", count_own)
    return counts


@pytest.fixture(autouse=True)
def unplanned(monkeypatch: pytest.MonkeyPatch) -> None:
    """These parameters belong to no model, which is not what is tested."""
    monkeypatch.setattr("elixir_compile.optim.hybrid.warn_if_unplanned", lambda optimizer: None)


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


def test_a_class_that_treats_large_tensors_otherwise_keeps_its_own_step(counted: dict[str, int]) -> None:
    pair = Pair(BySize)
    with pytest.warns(ElixirWarning, match=r"the flat parts of a tensor of shape \(127, 256\) get other weights"):
        pair.train()
    pair.assert_same()
    assert counted["passes"] == 0


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


def test_an_op_without_a_bitwise_formula_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    expressions = {name: expression for name, expression in code._torch_expressions().items() if name != "add"}
    code.compiled.cache_clear()
    monkeypatch.setattr(code, "_torch_expressions", lambda: expressions)
    form = Form(num_inputs=2, ops=(("add", (("v", 0), ("v", 1), ("s", 0))),), outputs=((0, 2),))
    with pytest.raises(TapeError, match="no formula reproduces torch's add on this processor"):
        code.compiled(form)


def test_a_host_bucket_is_updated_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, gradients and statistics of its parameters follow one another in slabs."""
    model, batches = ladder(), rows(3)
    sizes: list[int] = []

    def counted_runs(found: Any, steps: Any) -> Any:
        for members, tensors in coalesce(found, steps):
            sizes.append(len(members))
            yield members, tensors

    coalesce = class_rule.coalesce
    monkeypatch.setattr(class_rule, "coalesce", counted_runs)

    def make(params: Any) -> Optimizer:
        return elixir.hybrid(SGD)(params, lr=0.1, momentum=0.9)

    with hybrid_run(model, batches[0], home="host", update=Update.ACROSS_STEPS, optimizer=make) as run:
        run.train(batches)
        run.optimizer.wait()
        num_buckets, num_params = len(buckets_of(run)), sum(len(bucket.slots) for bucket in buckets_of(run))
    assert sum(sizes) == 2 * num_params  # in the second and the third step
    assert len(sizes) == 2 * num_buckets < sum(sizes)


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
