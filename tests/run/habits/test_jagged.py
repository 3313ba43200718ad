"""Jagged nested tensors, whose sequences differ in length: torch takes them apart into values and offsets."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nested import nested_tensor_from_jagged, to_padded_tensor
from torch.nn import functional

import elixir_compile as elixir
from elixir_compile.ir import fingerprint
from elixir_compile.runtime.measure import Resident
from elixir_compile.step.divide import laps_of
from tests.run.habits.habit import habit
from tests.run.models import seeded
from tests.run.random_runs import SLACK_BYTES
from tests.run.training import assert_same, by_elixir_unprepared, by_torch, planned_peak_bytes

pytestmark = pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype stage")

WIDTH, WORDS = 16, 32
LENGTHS = ((3, 5, 2), (4, 4, 6), (1, 2, 2), (7, 6, 8))
OFFLOAD: dict[str, Any] = {"plan_cache": False, "planner": "zero3_offload", "activations": "offload"}
RECOMPUTE: dict[str, Any] = {**OFFLOAD, "activations": "recompute"}


class Words(nn.Module):
    """An embedding, two blocks with a norm, and a head; `forward` is that of the kind called `name`."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.wide = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH) for _ in range(2))
        self.narrow = nn.ModuleList(nn.Linear(4 * WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)
        self.forward_of = name

    def blocks(self, x: torch.Tensor) -> torch.Tensor:
        for norm, wide, narrow in zip(self.norms, self.wide, self.narrow, strict=True):
            x = x + narrow(functional.gelu(wide(norm(x))))
        return x

    def forward(self, *given: torch.Tensor) -> Any:
        return FORWARDS[self.forward_of](self, *given)


def made_inside(model: Words, values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    # torch cannot guard an addition or a norm of tensors that are made here.
    return model.head(functional.gelu(nested_tensor_from_jagged(model.blocks(model.embed(values)), offsets)))


FORWARDS: dict[str, Callable[..., Any]] = {
    "out": lambda model, words: model.head(model.blocks(model.embed(words))),
    "loss of the values": lambda model, words: functional.cross_entropy(
        model.head(model.blocks(model.embed(words))).values(), words.values()
    ),
    "padded": lambda model, words: model.head(to_padded_tensor(model.blocks(model.embed(words)), 0.0)),
    "beside a padded tensor": lambda model, words, padded: (
        model.head(model.blocks(model.embed(words))).values().sum(0) + model.head(padded).sum((0, 1))
    ),
    "two of the same lengths": lambda model, left, right: model.head(model.blocks(left * 2 + right)),
    "input that needs a gradient": lambda model, x: model.head(model.blocks(x)),
    "input returned": lambda model, words: (model.head(model.blocks(model.embed(words))), words, words.offsets()),
    "number of sequences": lambda model, words: (
        model.head(model.blocks(model.embed(words))).values().square().sum() / words.size(0)
    ),
    "made inside": made_inside,
}


QUICK = ("loss of the values", "padded", "input that needs a gradient", "input returned")


def jagged(values: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
    return nested_tensor_from_jagged(values, torch.tensor([0, *lengths]).cumsum(0))


def batch_of(name: str, lengths: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    """Return the arguments of the kind `name` for sequences of `lengths`."""
    total = sum(lengths)
    words = jagged(torch.arange(total) * 7 % WORDS, lengths)
    if name == "beside a padded tensor":
        return words, torch.ones(len(lengths), 5, WIDTH)
    if name == "two of the same lengths":
        left = jagged(torch.ones(total, WIDTH), lengths)
        return left, nested_tensor_from_jagged(torch.rand(total, WIDTH), left.offsets())
    if name == "input that needs a gradient":
        return (jagged(torch.rand(total, WIDTH), lengths).requires_grad_(),)
    return (words.values(), words.offsets()) if name == "made inside" else (words,)


def step(compiled: Callable[..., Any], optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
    """Train on `batch`; return the loss, plus the sum of the gradients of the inputs."""
    result = compiled(*batch)
    result = result[0] if isinstance(result, tuple) else result
    loss = (result.values() if result.is_nested else result).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return sum((given.grad.values().sum() for given in batch if given.grad is not None), loss.detach())


def assert_trains_as_torch(name: str, options: dict[str, Any], lengths: Any = LENGTHS) -> None:
    """Fail unless the kind `name` trains under `options` bitwise as eager PyTorch on sequences of each of `lengths`."""
    model = seeded(Words, name)
    runs = [by_torch(model), by_elixir_unprepared(model, **options)]
    for run in runs:
        torch.manual_seed(0)
        run.train([batch_of(name, own) for own in lengths], step)
    assert_same(*runs)


@habit("Jagged nested tensors as inputs, as outputs, and made in the forward of values and offsets", area="Modules")
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FORWARDS]
)
def test_jagged_tensors_train_as_by_torch(name: str) -> None:
    assert_trains_as_torch(name, RECOMPUTE)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, OFFLOAD], ids=["free", "offload"])
@pytest.mark.parametrize("name", FORWARDS)
def test_jagged_tensors_of_a_changing_number_train_as_by_torch(name: str, options: dict[str, Any]) -> None:
    assert_trains_as_torch(name, {"plan_cache": False, **options}, ((3, 5, 2), (4, 4, 6), (2, 9), (1, 2, 3, 4)))


def test_rows_of_sequences_divide_into_micro_batches() -> None:
    """The rows of a layer do not know their sequence, so a micro-batch may end within one."""
    model = seeded(Words, "loss of the values")
    runs = [by_torch(model), by_elixir_unprepared(model, plan_cache=False, micro_batches=2)]
    for run in runs:
        run.train([batch_of("loss of the values", own) for own in LENGTHS], step)
    torch.testing.assert_close(runs[1].losses, runs[0].losses)
    torch.testing.assert_close(runs[1].weights, runs[0].weights, rtol=1e-4, atol=1e-4)
    (compilation,) = elixir.compilations(runs[1].model)
    assert compilation.graph.batch == sum(LENGTHS[-1])
    assert laps_of(compilation.plan)


@pytest.mark.parametrize("name", ["out", "two of the same lengths"])
def test_a_plan_without_a_run_counts_what_a_run_counts(name: str) -> None:
    model, batch = seeded(Words, name), batch_of(name, LENGTHS[0])
    run = by_elixir_unprepared(model, plan_cache=False).train([batch], step)
    (compilation,) = elixir.compilations(run.model)
    assert elixir.plan(model, batch, options={"inner": "aot_eager"}).graph == fingerprint(compilation.graph)


def test_plans_count_the_rows_of_all_sequences() -> None:
    """No input of the graph is the number of rows: it is a size of the values inside of the nested tensor alone."""
    run = by_elixir_unprepared(seeded(Words, "loss of the values"), plan_cache=False)
    peaks_bytes: list[int] = []
    for lengths in ((50, 50, 200), (300, 100, 200), (200, 400, 300)):
        run.train([batch_of("loss of the values", lengths)], step)
        peaks_bytes.append(planned_peak_bytes(run))
        (compilation,) = elixir.compilations(run.model)
        assert [value for _, value in compilation.graph.symbols] == [sum(lengths)]
    assert peaks_bytes[2] - peaks_bytes[1] == pytest.approx(peaks_bytes[1] - peaks_bytes[0], rel=0.01)


def test_the_measured_peak_keeps_the_budget_while_sequences_grow() -> None:
    model, lengths = seeded(Words, "loss of the values"), (300, 200, 100)
    free = by_elixir_unprepared(model, plan_cache=False).train([batch_of("loss of the values", lengths)], step)
    budget_bytes = int(0.7 * planned_peak_bytes(free))
    gc.collect()
    with Resident() as resident:
        foreign_bytes = resident.nbytes
    run = by_elixir_unprepared(model, plan_cache=False, device_memory=budget_bytes)
    run.train([batch_of("loss of the values", own) for own in ((30, 20, 10), lengths, lengths)], step)
    batch = batch_of("loss of the values", (250, 150, 200))
    record = elixir.measure_step(lambda: step(run.compiled, run.optimizer, batch), device="cpu")
    assert 0.9 * budget_bytes < record.device_peak_bytes - foreign_bytes <= budget_bytes + SLACK_BYTES


def step_with_loss_outside(compiled: Callable[..., Any], optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
    result = compiled(*batch)
    loss = (result.values() if result.is_nested else result).square().mean()
    del result
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@pytest.mark.parametrize(
    ("name", "free_bytes"), [("out", 1_269_632), pytest.param("padded", 2_114_432, marks=pytest.mark.slow)]
)
def test_a_loss_outside_of_the_model_is_planned_around_at_once(
    name: str, free_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    """It is measured in one step and in the next there is room for it, although plans have headroom for longer
    sequences by then. A step without a budget takes `free_bytes`."""
    lengths, budget_bytes = (300, 200, 100), int(0.7 * free_bytes)
    model = seeded(Words, name)
    gc.collect()
    with Resident() as resident:
        foreign_bytes = resident.nbytes
    run = by_elixir_unprepared(model, plan_cache=False, device_memory=budget_bytes)
    for own in ((30, 20, 10), (40, 40, 40), lengths):
        run.train([batch_of(name, own)], step_with_loss_outside)
    batch = batch_of(name, (250, 150, 200))
    record = elixir.measure_step(lambda: step_with_loss_outside(run.compiled, run.optimizer, batch), device="cpu")
    assert "in code that runs op by op" in caplog.text
    assert record.device_peak_bytes - foreign_bytes <= budget_bytes + SLACK_BYTES
