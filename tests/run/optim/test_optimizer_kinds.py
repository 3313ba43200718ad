"""Which optimizer classes treat each parameter alone: what dry steps find out, the op that they name, and the watch."""

import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adafactor, Adam, AdamW, Muon, Optimizer

import elixir_compile as elixir
from elixir_compile import compat
from elixir_compile.base.errors import OptimizerNotTensorWise
from elixir_compile.optim.generic import dry_step as dry_steps
from elixir_compile.optim.generic.dry_step import (
    ClassStep,
    StateSchema,
    UpdateKind,
    Watch,
    attributes_of,
    cut,
    dry_step,
)
from elixir_compile.optim.generic.owners import NotAloneError, Owners
from elixir_compile.optim.generic.tensor_step import joined_at_shapes
from elixir_compile.optim.rule import ParamUpdate
from tests.run import optimizers as users
from tests.run.optim import tensor_wise_classes as classes

SHAPES = ((20, 10), (10, 20), (12, 12))


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes or SHAPES]


def schema_of(optimizer: Optimizer, cls: type[Optimizer] | None = None) -> StateSchema:
    group = optimizer.param_groups[0]
    return dry_step(cls or type(optimizer), attributes_of(optimizer), group, group["params"][0].dtype)


def step_of(optimizer: Optimizer) -> ClassStep:
    group = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    return ClassStep(cls=type(optimizer), attributes=attributes_of(optimizer), group=group)


# ----------------------------------------------------------------------------------------------------------------------
# Kinds.


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (Muon, {}),
        (Muon, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw"}),
        (Adafactor, {}),
        (Adafactor, {"foreach": True}),
        (Adafactor, {"foreach": False}),
        *((cls, {}) for cls in classes.TENSOR_WISE),
        (classes.SharedScratch, {}),
        (classes.Flattened, {}),
        (classes.NormsInPlace, {}),
        (classes.ReadsItsNorm, {}),
        (classes.Scripted, {}),
        (classes.CountsSteps, {}),
        (users.Factored, {}),
        (users.SlowGiants, {}),
    ],
)
def test_classes_that_treat_each_tensor_alone(cls: type[Optimizer], options: dict[str, Any]) -> None:
    schema = schema_of(cls(tensors(), **options))
    assert (schema.kind, schema.per_param) == (UpdateKind.TENSOR, ())
    assert schema.because  # not element-wise


@pytest.mark.parametrize("cls", [Muon, Adafactor, classes.Lamb])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_kinds_in_other_dtypes(cls: type[Optimizer], dtype: torch.dtype) -> None:
    assert schema_of(cls(tensors(dtype=dtype))).kind is UpdateKind.TENSOR


@pytest.mark.parametrize(
    ("cls", "options"), [(AdamW, {}), (AdamW, {"foreach": True}), (SGD, {"momentum": 0.9}), (users.Lion, {})]
)
def test_element_wise_classes_are_asked_nothing_else(
    cls: type[Optimizer], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(dry_steps, "_why_global")
    schema = schema_of(cls(tensors(), **options))
    assert (schema.kind, schema.because) == (UpdateKind.ELEMENT, "")


NORM = r"aten\.linalg_vector_norm joins two parameters"
ALONE = r"is updated otherwise beside others than alone"
READS = r"a number that the step reads of a parameter changes another one"
GRADIENT = r"the gradient of a parameter changes another one"
ELSEWHERE = r"the optimizer keeps more of a parameter from step to step than its state"


@pytest.mark.parametrize(
    ("cls", "options", "because"),
    [
        (torch.optim.LBFGS, {}, "TypeError: .*closure"),
        (classes.Lamb, {"global_norm": True}, NORM),
        (classes.GlobalNormTensor, {}, NORM),
        (classes.RareGlobal, {}, NORM),
        (classes.Swallows, {}, r"aten\.max joins two"),
        (classes.Prodigy, {}, r"aten\.add joins two"),
        (classes.SharedState, {}, r"aten\.\w+ joins two"),
        (classes.Relay, {}, r"aten\.where joins two"),
        (classes.GlobalNormItem, {}, ALONE),
        (classes.ByIndex, {}, ALONE),
        (classes.ByCount, {}, ALONE),
        (classes.RareGlobalItem, {}, GRADIENT),
        (classes.RareGlobalByNumpy, {}, GRADIENT),
        (classes.RareGlobalFlag, {}, READS),
        (classes.KeepsMostInGroup, {}, ALONE),
        (classes.Draws, {}, r"aten\.randn_like draws random numbers"),
        (users.Noisy, {}, r"aten\.randn_like draws random numbers"),
        (classes.MaskedSize, {}, r"aten\.index makes a size out of values"),
        (classes.CountsInDict, {}, "a step changes facts of the optimizer"),
        (classes.KeepsElsewhere, {}, ELSEWHERE),
        (classes.KeepsElsewhereById, {}, "a"),  # an id may be that of a tensor that is gone: any reason
        (classes.KeepsElementsElsewhere, {}, ELSEWHERE),
        (users.CountsInGroup, {}, ALONE),
        (users.CountsInItself, {}, "a step changes count of the optimizer"),
    ],
)
def test_global_classes_and_what_makes_them_so(cls: type[Optimizer], options: dict[str, Any], because: str) -> None:
    optimizer = elixir.hybrid(cls)(tensors(), **options)
    schema = schema_of(optimizer, cls)
    assert schema.kind is UpdateKind.GLOBAL
    with pytest.warns(elixir.ElixirWarning, match=f"is not element-wise: .*{because}"):
        assert not optimizer.places_state  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("cls", "kind"),
    [
        (classes.Soap, UpdateKind.TENSOR),
        (classes.ReadsItsNorm, UpdateKind.TENSOR),
        *((cls, UpdateKind.GLOBAL) for cls in (classes.Relay, classes.RareGlobalItem, classes.RareGlobalFlag)),
    ],
)
def test_kinds_of_classes_with_so_many_ops_that_they_take_few_steps(
    cls: type[Optimizer], kind: UpdateKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    take, num_steps = dry_steps._take_small, [0, 0]

    def counted(*given: Any) -> None:
        num_steps[-1] += 1
        take(*given)

    monkeypatch.setattr(dry_steps, "_take_small", counted)
    assert schema_of(cls(tensors())).kind is kind
    num_steps.reverse()
    monkeypatch.setattr(dry_steps, "_MOST_OPS", 1)
    assert schema_of(cls(tensors())).kind is kind
    usual, few = num_steps
    assert few < 0.6 * usual


def test_dimensions_of_the_parameters_must_be_seen_to_train() -> None:
    schema = schema_of(classes.Soap(tensors((8, 8), (3,))))
    assert schema.kind is UpdateKind.GLOBAL
    assert "ValueError: a tensor of 1 dimensions" in schema.because


def test_lists_with_an_entry_for_each_parameter_are_cut() -> None:
    rates = [0.1, 0.2, 0.3]
    optimizer = classes.PerParam([{"params": list(zip("abc", tensors(), strict=True)), "rates": rates}])
    schema = schema_of(optimizer)
    assert (schema.kind, set(schema.per_param)) == (UpdateKind.TENSOR, {"rates", "param_names"})
    group = cut(step_of(optimizer).group, schema.per_param, [2, 0])
    assert (group["rates"], group["param_names"], group["lr"]) == ([0.3, 0.1], ["c", "a"], 0.01)
    assert rates == [0.1, 0.2, 0.3]


class Rated(users.Lion):
    """Element-wise, but for a rate for each parameter."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param, rate in zip(group["params"], group["rates"], strict=False):
                param.data.sub_(param.grad, alpha=rate)


def test_an_element_wise_class_with_a_rate_for_each_parameter_does_not_run_by_bucket() -> None:
    optimizer = Rated([{"params": tensors(), "rates": [0.1, 0.2, 0.3]}])
    schema = schema_of(optimizer)
    assert (schema.kind, schema.per_param) == (UpdateKind.TENSOR, ("rates",))
    assert "rates by parameter" in schema.because


@pytest.mark.parametrize(("cls", "kind"), [(Adam, UpdateKind.ELEMENT), (classes.Lamb, UpdateKind.TENSOR)])
def test_betas_in_a_list_as_long_as_the_parameters_are_not_cut(cls: type[Optimizer], kind: UpdateKind) -> None:
    schema = schema_of(cls([{"params": tensors((4, 4), (4, 4)), "betas": [0.9, 0.95]}]))
    assert (schema.kind, schema.per_param) == (kind, ())


def test_dry_steps_leave_the_optimizer_as_it_was() -> None:
    optimizer = classes.SharedScratch(tensors())
    optimizer.generator = torch.Generator().manual_seed(3)  # pyright: ignore[reportAttributeAccessIssue]
    before, state = optimizer.generator.get_state(), torch.random.get_rng_state()
    schema_of(optimizer)
    assert not optimizer.scratch
    assert torch.equal(optimizer.generator.get_state(), before)
    assert torch.equal(torch.random.get_rng_state(), state)


class OwnNoise(classes.Plain):
    """Noise of a generator with the same seed in every step."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.generator = torch.Generator()

    def update_one(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        noise = torch.randn(param.shape, generator=self.generator.manual_seed(param.numel()))
        param.sub_(param.grad / param.grad.norm() + noise, alpha=group["lr"])


def test_random_numbers_of_an_own_generator_that_no_order_changes() -> None:
    assert schema_of(OwnNoise(tensors())).kind is UpdateKind.TENSOR


# ----------------------------------------------------------------------------------------------------------------------
# Compiled parts of a step, and captures around dry steps.


def test_compiled_parts_of_a_step_are_seen_and_compile_later() -> None:
    compiled = []

    def backend(graph: Any, example: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    @torch.compile(backend=backend)
    def joined(norms: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(norms).norm()

    class Compiled(classes.Plain):
        def update(self, params: Any, group: dict[str, Any]) -> None:
            norms = [param.grad.norm() for param in params]
            factor = torch.where(joined(norms) > 1e20, 0.0, 1.0) if len(params) > 1 else 1.0
            for param in params:
                param.sub_(param.grad / param.grad.norm() * factor, alpha=group["lr"])

    params = tensors()
    optimizer = Compiled(params)
    for is_compiled in (False, True):  # once before the function was ever compiled, once after
        before = len(compiled)
        schema = schema_of(optimizer)
        assert schema.kind is UpdateKind.GLOBAL
        assert "aten.linalg_vector_norm joins" in schema.because
        assert len(compiled) == before
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        assert len(compiled) == 1, is_compiled


def test_kinds_are_found_during_a_capture() -> None:
    found = []
    optimizers = [cls(tensors()) for cls in (Muon, classes.RareGlobal, AdamW)]

    def ask() -> None:
        found.extend(schema_of(optimizer).kind for optimizer in optimizers)

    def backend(graph: Any, example: Any) -> Any:
        ask()
        other = threading.Thread(target=ask)
        other.start()
        other.join()
        return graph.forward

    torch.compile(lambda x: x * 2, backend=backend)(torch.ones(3))
    assert found == [UpdateKind.TENSOR, UpdateKind.GLOBAL, UpdateKind.ELEMENT] * 2


# ----------------------------------------------------------------------------------------------------------------------
# The owners of tensors, op by op.


@pytest.fixture
def two() -> Iterator[tuple[Owners, torch.Tensor, torch.Tensor]]:
    """Two tensors, owned by 0 and 1, whose ops are followed."""
    owners, first, second = Owners(), torch.randn(4, 4), torch.randn(4, 4)
    owners.own([first], 0)
    owners.own({"nested": [second]}.items(), 1)
    with compat.ops_seen_by(owners.see), torch.no_grad():
        yield owners, first, second


def test_owners_of_lists_go_by_index(two: Any) -> None:
    owners, first, second = two
    sums = torch._foreach_add([first, second], [first, second])
    torch._foreach_mul_(sums, 2.0)
    norms = torch._foreach_norm(sums)
    assert [owners.of(each) for each in (*sums, *norms)] == [{0}, {1}] * 2
    scratch = [torch.zeros(4, 4), torch.zeros(4, 4)]
    torch._foreach_copy_(scratch, [first, second])
    torch._foreach_copy_(scratch, [second, first])
    assert [owners.of(each) for each in scratch] == [{1}, {0}]
    with pytest.raises(NotAloneError, match=r"aten\._foreach_mul joins"):
        torch._foreach_mul([first, second], norms[0])
    with pytest.raises(NotAloneError, match=r"aten\._foreach_add_ joins"):
        torch._foreach_add_([first], [second])


def test_owners_of_rows(two: Any) -> None:
    owners, first, second = two
    norms = torch.stack([first.norm(), second.norm(), torch.ones(())])
    clamped = (norms.clamp(min=1e-3) * 2).to(torch.float64)
    clamped.add_(norms)
    masked = torch.where(clamped > 1, clamped, torch.full_like(clamped, 2))
    assert [owners.of(row) for row in masked.unbind()] == [{0}, {1}, frozenset()]
    assert [owners.of(masked[index]) for index in (0, 1, -1)] == [{0}, {1}, frozenset()]
    assert owners.of(masked[:1]) == {0}
    flat = torch.cat([first.flatten(), second.flatten()]).mul_(2)
    assert [owners.of(part.view(4, 4).T) for part in flat.split([16, 16])] == [{0}, {1}]
    assert owners.of(flat[8:24]) == {0, 1}
    for join in (lambda: norms.sum(), lambda: masked[:2].flip(0), lambda: flat[8:24] @ flat[8:24]):
        with pytest.raises(NotAloneError):
            join()


def test_owners_of_writes(two: Any) -> None:
    owners, first, second = two
    scratch = torch.empty(2, 4, 4)
    scratch[0].copy_(first)
    torch.mul(second, 2, out=scratch[1])
    assert [owners.of(row) for row in scratch] == [{0}, {1}]
    scratch[0].copy_(second)
    assert owners.of(scratch) == {1}
    torch.mul(first, 2, out=scratch[1])
    scratch[0].zero_()
    assert [owners.of(row) for row in scratch] == [frozenset(), {0}]
    scratch[0].T.add_(second)
    assert owners.of(scratch[0]) == {1}
    with pytest.raises(NotAloneError, match=r"aten\.add_ joins"):
        scratch[0, :, 1].add_(first[0])
    with pytest.raises(NotAloneError, match=r"aten\.equal joins"):
        torch.equal(first, second)


def test_no_tensor_inherits_the_owner_of_memory_that_was_freed(two: Any) -> None:
    owners, first, _ = two
    for _ in range(50):
        del_soon = first * 2
        del del_soon
        assert owners.of(torch.empty(4, 4)) == frozenset()
    assert len(owners._held) > 50  # held until the end of the step
    owners.forget()
    assert len(owners._held) == 2


def test_large_results_are_let_go_of_at_once() -> None:
    owners, large = Owners(), torch.ones(1 << 19)
    owners.own([large], 0)
    with compat.ops_seen_by(owners.see):
        for _ in range(20):
            large * 2
    assert len(owners._held) <= 2


def test_shapes_and_constants_of_another_parameter_are_not_its_values(two: Any) -> None:
    owners, first, second = two
    ones = torch.ones_like(first)
    second.mul_(ones).add_(first.new_zeros(4))
    assert owners.of(second) == {1}


# ----------------------------------------------------------------------------------------------------------------------
# The watch beside training, and the first step of large tensors.


def train(optimizer: Optimizer, watch: Watch, numbers: range) -> None:
    """Check and take steps; the gradients are new in each."""
    params = optimizer.param_groups[0]["params"]
    for number in numbers:
        watch.check(step_of(optimizer), params, optimizer.state, number)
        for param in params:
            param.grad = torch.randn_like(param)
        optimizer.step()


@pytest.mark.parametrize("start", [1, 41, 100])
def test_a_step_that_joins_parameters_later_raises_before_it(start: int) -> None:
    params = tensors()
    optimizer = classes.EveryHundred(params)
    watch = Watch(schema_of(optimizer))
    if start > 1:  # a checkpoint was loaded
        for param in params:
            optimizer.state[param]["k"] = start - 1
    if start < 100:
        train(optimizer, watch, range(start, 100))
    before = [param.detach().clone() for param in params]
    with pytest.raises(OptimizerNotTensorWise, match=r"step 100 of EveryHundred, aten\.add joins two") as caught:
        train(optimizer, watch, range(100, 101))
    assert (caught.value.step, caught.value.op) == (100, "aten.add joins two parameters")
    assert "load this optimizer's state_dict()" in str(caught.value)
    assert all(map(torch.equal, params, before))
    assert optimizer.state[params[0]]["k"] == 99


def test_counters_of_queued_updates_do_not_hold_the_watch_back() -> None:
    params = tensors()
    optimizer = classes.EveryHundred(params)
    watch = Watch(schema_of(optimizer))
    for number in range(1, 100):
        for param in params:
            optimizer.state[param]["k"] = max(0, number - 3)  # two updates have not run yet
        watch.check(step_of(optimizer), params, optimizer.state, number)
    with pytest.raises(OptimizerNotTensorWise):
        watch.check(step_of(optimizer), params, optimizer.state, 100)


class JoinsIf(classes.Plain):
    """Joins all gradients once a number of the param group, or of the optimizer, is small."""

    scale = 1.0

    def update(self, params: Any, group: dict[str, Any]) -> None:
        factor = sum(param.grad.mean() for param in params) if min(group["lr"], self.scale) < 1e-3 else 1.0
        for param in params:
            param.sub_(param.grad / param.grad.norm() * factor, alpha=group["lr"])


@pytest.mark.parametrize("place", ["group", "optimizer"])
def test_the_watch_has_the_present_numbers(place: str) -> None:
    optimizer = JoinsIf(tensors())
    optimizer.scale = 1.0
    watch = Watch(schema_of(optimizer))
    train(optimizer, watch, range(1, 5))
    if place == "group":
        optimizer.param_groups[0]["lr"] = 1e-4
    else:
        optimizer.scale = 1e-4
    with pytest.raises(OptimizerNotTensorWise, match=r"step 5 of JoinsIf, aten\.add joins"):
        train(optimizer, watch, range(5, 6))


def test_the_watch_draws_nothing() -> None:
    optimizer = classes.Draws(tensors(), every=20)
    watch = Watch(schema_of(optimizer))
    train(optimizer, watch, range(1, 20))
    before = torch.random.get_rng_state()
    with pytest.raises(OptimizerNotTensorWise, match="randn_like draws random numbers"):
        watch.check(step_of(optimizer), optimizer.param_groups[0]["params"], optimizer.state, 20)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(
    ("cls", "options"), [(Muon, {}), (Adafactor, {}), (Adafactor, {"foreach": True}), (classes.Soap, {})]
)
def test_the_watch_costs_a_few_ops_and_no_memory(cls: type[Optimizer], options: dict[str, Any]) -> None:
    optimizer = cls(tensors(), **options)
    watch = Watch(schema_of(optimizer))
    train(optimizer, watch, range(1, 4))
    num_ops, held = watch.owners.num_ops, len(watch.owners._held)
    train(optimizer, watch, range(4, 24))
    assert watch.owners.num_ops - num_ops <= 20 * 200
    assert len(watch.owners._held) == held


def test_the_watch_has_tensors_of_the_dimensions_and_dtypes_of_the_group() -> None:
    params = [*tensors((6,), (30, 20)), *tensors((3, 3), (2, 2, 2, 2), dtype=torch.bfloat16)]
    optimizer = Adafactor(params)
    watch = Watch(schema_of(optimizer))
    train(optimizer, watch, range(1, 3))
    small = [(start.dim(), start.dtype) for start, _ in watch._samples]
    assert set(small) == {(param.dim(), param.dtype) for param in params}


class FailsOnce(classes.Plain):
    """Its state has no inverse after 30 steps from the start, of small tensors as of others."""

    def update_one(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        state["sum"] = state.get("sum", torch.zeros(())) + 1
        if state["sum"] > group.get("most", 30):
            raise ArithmeticError("singular")
        param.sub_(param.grad / param.grad.norm(), alpha=group["lr"])


def test_a_watch_whose_state_fails_begins_again_and_a_class_that_fails_raises() -> None:
    optimizer = FailsOnce(tensors())
    watch = Watch(schema_of(optimizer))
    params = optimizer.param_groups[0]["params"]
    for number in range(1, 50):
        watch.check(step_of(optimizer), params, {}, number)
    optimizer.param_groups[0]["most"] = 0
    with pytest.raises(OptimizerNotTensorWise, match="fails for small tensors with ArithmeticError: singular"):
        watch.check(step_of(optimizer), params, {}, 50)


def updates_of(*shapes: tuple[int, ...]) -> list[ParamUpdate]:
    return [ParamUpdate(torch.ones(shape), torch.ones(shape), {}) for shape in shapes]


def test_code_for_large_tensors_is_run_without_them() -> None:
    optimizer = classes.BySum(tensors())
    assert schema_of(optimizer).kind is UpdateKind.TENSOR
    step = step_of(optimizer)
    assert joined_at_shapes(step, updates_of((400, 10), (400, 400)), 1) == ""
    updates = updates_of((400, 300), (20, 10), (400, 400))
    with pytest.raises(OptimizerNotTensorWise, match=r"step 7 of BySum, aten\.add joins"):
        joined_at_shapes(step, updates, 7)
    assert all(bool((one.weight == 1).all()) and not one.state for one in updates)


@pytest.mark.parametrize("cls", [Muon, Adafactor, *classes.TENSOR_WISE, classes.SharedScratch, classes.ReadsItsNorm])
def test_classes_take_a_step_at_any_shape_without_memory(cls: type[Optimizer]) -> None:
    optimizer = cls(tensors())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert joined_at_shapes(step_of(optimizer), updates_of((60, 40), (40, 60), (60, 40)), 1) == ""
    assert not getattr(optimizer, "scratch", None)


def test_the_state_of_a_resumed_run_is_followed_too() -> None:
    optimizer = classes.EveryHundred(tensors())
    updates = [one._replace(state={"k": 98}) for one in updates_of((6, 4), (4, 6))]
    with pytest.raises(OptimizerNotTensorWise):
        joined_at_shapes(step_of(optimizer), updates, 99)
    assert updates[0].state == {"k": 98}


def test_a_class_that_needs_values_says_so() -> None:
    step = step_of(classes.RareGlobalByNumpy(tensors()))
    assert "numpy" in joined_at_shapes(step, updates_of((4, 4), (4, 4)), 1)


# ----------------------------------------------------------------------------------------------------------------------
# Classes of pytorch_optimizer, if it is installed.


KINDS = {
    **dict.fromkeys(["SOAP", "Shampoo", "CAME", "LARS", "Lamb", "AdaFactor", "SM3", "Lion"], UpdateKind.TENSOR),
    "Prodigy": UpdateKind.GLOBAL,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_classes_of_pytorch_optimizer(name: str) -> None:
    """They count steps in their param group."""
    library = pytest.importorskip("pytorch_optimizer", reason="needs `pip install elixir-compile[clients]`")
    assert schema_of(getattr(library, name)(tensors(), lr=1e-2)).kind is KINDS[name]
