"""Tensor subclasses that torch takes apart, jagged nested tensors among them."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nested import nested_tensor_from_jagged, to_padded_tensor
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map

import elixir_compile as elixir
from elixir_compile.ir import fingerprint
from elixir_compile.runtime.measure import Resident
from elixir_compile.step.divide import laps_of
from tests.run.habits.habit import habit
from tests.run.models import seeded
from tests.run.processes import spawn
from tests.run.random_runs import SLACK_BYTES
from tests.run.training import assert_same, by_elixir_unprepared, by_torch, planned_peak_bytes

# ----------------------------------------------------------------------------------------------------------------------
# Tensor subclasses that torch takes apart: as inputs, weights, buffers and within a forward.


WIDTH = 16
aten: Any = torch.ops.aten
OFFLOAD: dict[str, Any] = {"plan_cache": False, "planner": "zero3_offload"}


class Measured(torch.Tensor):
    """Two tensors, values and a scale of each row, that stand for their product."""

    values: torch.Tensor
    scale: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, values: torch.Tensor, scale: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype, device=values.device)

    def __init__(self, values: torch.Tensor, scale: torch.Tensor) -> None:
        self.values, self.scale = values, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: None, size: Any, stride: Any) -> "Measured":
        return Measured(inner["values"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op in (aten.detach.default, aten.clone.default, aten.alias.default):
            return Measured(op(args[0].values), op(args[0].scale))
        plain = [tree_map(lambda leaf: leaf.values * leaf.scale if isinstance(leaf, Measured) else leaf, own)
                 for own in (args, kwargs or {})]  # fmt: skip
        return op(*plain[0], **plain[1])


def measured(*shape: int) -> Measured:
    return Measured(torch.randn(shape), torch.rand(shape[0], 1))


class Net(nn.Module):
    """Two layers; `forward` is that of the kind called `name`, which also says what is a subclass."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.register_buffer("turn", measured(WIDTH, WIDTH) if name == "buffer" else torch.eye(WIDTH))
        if name in ("weight", "frozen weight"):
            self.wide.weight = nn.Parameter(measured(4 * WIDTH, WIDTH), requires_grad=name == "weight")
        self.forward_of = name

    def layers(self, x: torch.Tensor) -> torch.Tensor:
        return self.narrow(functional.gelu(self.wide(x))).square().mean()

    def forward(self, *given: torch.Tensor) -> Any:
        return FORWARDS.get(self.forward_of, Net.layers)(self, *given)


def made_inside(model: Net, x: torch.Tensor) -> torch.Tensor:
    hidden = Measured(model.wide(x), torch.full_like(x[:, :1], 0.5))
    return model.narrow(hidden.sin()).square().mean()


def attention(model: Net, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    heads = model.wide(x).view(1, 4, -1, WIDTH)
    mixed = functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask)
    return model.narrow(mixed.reshape(-1, 4 * WIDTH)).square().mean()


FORWARDS: dict[str, Callable[..., Any]] = {
    "input returned": lambda model, x: (model.layers(x), x.detach()),
    "buffer": lambda model, x: model.layers(x @ model.turn),
    "inside": made_inside,
    "causal bias": attention,
}


def batch_of(name: str, rows: int) -> tuple[Any, ...]:
    if name == "causal bias":
        return torch.randn(rows, WIDTH), causal_lower_right(rows, rows)
    is_input = name in ("input", "input returned", "input that needs a gradient")
    x = measured(rows, WIDTH) if is_input else torch.randn(rows, WIDTH)
    return (x.requires_grad_(name == "input that needs a gradient"),)


def step(compiled: Callable[..., Any], optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
    result = compiled(*batch)
    loss = result[0] if isinstance(result, tuple) else result
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return sum((given.grad.sum() for given in batch if given.requires_grad), loss.detach())


IS_OLD = torch.__version__ < (2, 13)
OPAQUE = pytest.mark.filterwarnings("ignore:the captured graph reads no parameter of a module") if IS_OLD else ()
"""Of a subclass that is no input, Dynamo of torch 2.11 leaves the constructor out of graphs."""
KINDS = [
    "input",
    pytest.param("input returned", marks=pytest.mark.skipif(IS_OLD, reason="Dynamo of torch 2.11 cannot trace it")),
    "input that needs a gradient",
    pytest.param("buffer", marks=OPAQUE),
    pytest.param("frozen weight", marks=OPAQUE),
    "inside",
]


@habit("Tensor subclasses with `__tensor_flatten__`: inputs, frozen weights, buffers, attention biases", area="Modules")
@pytest.mark.parametrize("name", [*KINDS, pytest.param("causal bias", marks=pytest.mark.slow)])
def test_a_tensor_subclass_trains_as_by_torch(name: str) -> None:
    model = seeded(Net, name)
    runs = [by_torch(model, backend="aot_eager"), by_elixir_unprepared(model, **OFFLOAD)]
    for run in runs:
        torch._dynamo.reset()
        torch.manual_seed(0)
        run.train([batch_of(name, rows) for rows in (8, 8, 12)], step)
    assert_same(*runs)


@habit(
    "Tensor subclasses for which torch makes the gradient of a weight a subclass too",
    area="Modules",
    refused=elixir.UnsupportedModel,
    says="its gradient is a tensor subclass",
)
def test_a_gradient_that_is_a_subclass() -> None:
    run = by_elixir_unprepared(seeded(Net, "plain"), **OFFLOAD)
    run.compiled(TwoTensor(torch.ones(4, WIDTH), torch.ones(4, WIDTH)))


class Sharded(Net):
    """A layer between two, or the loss, on a DTensor."""

    def forward(self, *given: torch.Tensor) -> Any:
        mesh, hidden = given[0].device_mesh, self.wide(given[0].to_local() * 2)
        between = DTensor.from_local(functional.gelu(hidden), mesh, [Replicate()]).sin().to_local()
        return DTensor.from_local(self.narrow(between), mesh, [Shard(0)]).square().mean().full_tensor()


def losses_on_a_dtensor(rank: int, world_size: int) -> list[list[float]]:
    mesh = init_device_mesh("cpu", (world_size,))
    model = seeded(Sharded, "plain")
    runs = [by_torch(model, backend="aot_eager"), by_elixir_unprepared(model, **OFFLOAD)]
    for run in runs:
        torch._dynamo.reset()
        torch.manual_seed(0)
        run.train([(DTensor.from_local(torch.randn(rows, WIDTH), mesh, [Shard(0)]),) for rows in (8, 8, 12)], step)
    assert_same(*runs)
    return [[loss.item() for loss in run.losses] for run in runs]


@pytest.mark.slow
def test_dtensors_as_activations_train_as_by_torch(tmp_path: Path) -> None:
    ((expected, got),) = spawn(losses_on_a_dtensor, 1, folder=tmp_path)
    assert expected == got


# ----------------------------------------------------------------------------------------------------------------------
# Jagged nested tensors, whose sequences differ in length: torch takes them apart into values and offsets.


WORD_WIDTH, WORDS = 16, 32
LENGTHS = ((3, 5, 2), (4, 4, 6), (1, 2, 2), (7, 6, 8))
OFFLOAD_ALL: dict[str, Any] = {"plan_cache": False, "planner": "zero3_offload", "activations": "offload"}
RECOMPUTE: dict[str, Any] = {**OFFLOAD_ALL, "activations": "recompute"}


class Words(nn.Module):
    """An embedding, two blocks with a norm, and a head; `forward` is that of the kind called `name`."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WORD_WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WORD_WIDTH) for _ in range(2))
        self.wide = nn.ModuleList(nn.Linear(WORD_WIDTH, 4 * WORD_WIDTH) for _ in range(2))
        self.narrow = nn.ModuleList(nn.Linear(4 * WORD_WIDTH, WORD_WIDTH) for _ in range(2))
        self.head = nn.Linear(WORD_WIDTH, WORDS)
        self.forward_of = name

    def blocks(self, x: torch.Tensor) -> torch.Tensor:
        for norm, wide, narrow in zip(self.norms, self.wide, self.narrow, strict=True):
            x = x + narrow(functional.gelu(wide(norm(x))))
        return x

    def forward(self, *given: torch.Tensor) -> Any:
        return JAGGED_FORWARDS[self.forward_of](self, *given)


def jagged_inside(model: Words, values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    # torch cannot guard an addition or a norm of tensors that are made here.
    return model.head(functional.gelu(nested_tensor_from_jagged(model.blocks(model.embed(values)), offsets)))


JAGGED_FORWARDS: dict[str, Callable[..., Any]] = {
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
    "made inside": jagged_inside,
}


QUICK = ("loss of the values", "padded", "input that needs a gradient", "input returned")


def jagged(values: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
    return nested_tensor_from_jagged(values, torch.tensor([0, *lengths]).cumsum(0))


def jagged_batch_of(name: str, lengths: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    """Return the arguments of the kind `name` for sequences of `lengths`."""
    total = sum(lengths)
    words = jagged(torch.arange(total) * 7 % WORDS, lengths)
    if name == "beside a padded tensor":
        return words, torch.ones(len(lengths), 5, WORD_WIDTH)
    if name == "two of the same lengths":
        left = jagged(torch.ones(total, WORD_WIDTH), lengths)
        return left, nested_tensor_from_jagged(torch.rand(total, WORD_WIDTH), left.offsets())
    if name == "input that needs a gradient":
        return (jagged(torch.rand(total, WORD_WIDTH), lengths).requires_grad_(),)
    return (words.values(), words.offsets()) if name == "made inside" else (words,)


def jagged_step(compiled: Callable[..., Any], optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
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
        run.train([jagged_batch_of(name, own) for own in lengths], jagged_step)
    assert_same(*runs)


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype stage")
@habit("Jagged nested tensors as inputs, as outputs, and made in the forward of values and offsets", area="Modules")
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in JAGGED_FORWARDS]
)
def test_jagged_tensors_train_as_by_torch(name: str) -> None:
    assert_trains_as_torch(name, RECOMPUTE)


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype stage")
@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, OFFLOAD_ALL], ids=["free", "offload"])
@pytest.mark.parametrize("name", JAGGED_FORWARDS)
def test_jagged_tensors_of_a_changing_number_train_as_by_torch(name: str, options: dict[str, Any]) -> None:
    assert_trains_as_torch(name, {"plan_cache": False, **options}, ((3, 5, 2), (4, 4, 6), (2, 9), (1, 2, 3, 4)))


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype stage")
def test_rows_of_sequences_divide_into_micro_batches() -> None:
    """The rows of a layer do not know their sequence, so a micro-batch may end within one."""
    model = seeded(Words, "loss of the values")
    runs = [by_torch(model), by_elixir_unprepared(model, plan_cache=False, micro_batches=2)]
    for run in runs:
        run.train([jagged_batch_of("loss of the values", own) for own in LENGTHS], jagged_step)
    torch.testing.assert_close(runs[1].losses, runs[0].losses)
    torch.testing.assert_close(runs[1].weights, runs[0].weights, rtol=1e-4, atol=1e-4)
    (compilation,) = elixir.compilations(runs[1].model)
    assert compilation.graph.batch == sum(LENGTHS[-1])
    assert laps_of(compilation.plan)


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype stage")
@pytest.mark.parametrize("name", ["out", "two of the same lengths"])
def test_a_plan_without_a_run_counts_what_a_run_counts(name: str) -> None:
    model, batch = seeded(Words, name), jagged_batch_of(name, LENGTHS[0])
    run = by_elixir_unprepared(model, plan_cache=False).train([batch], jagged_step)
    (compilation,) = elixir.compilations(run.model)
    assert elixir.plan(model, batch, options={"inner": "aot_eager"}).graph == fingerprint(compilation.graph)


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype stage")
def test_plans_count_the_rows_of_all_sequences() -> None:
    """No input of the graph is the number of rows: it is a size of the values inside of the nested tensor alone."""
    run = by_elixir_unprepared(seeded(Words, "loss of the values"), plan_cache=False)
    peaks_bytes: list[int] = []
    for lengths in ((50, 50, 200), (300, 100, 200), (200, 400, 300)):
        run.train([jagged_batch_of("loss of the values", lengths)], jagged_step)
        peaks_bytes.append(planned_peak_bytes(run))
        (compilation,) = elixir.compilations(run.model)
        assert [value for _, value in compilation.graph.symbols] == [sum(lengths)]
    assert peaks_bytes[2] - peaks_bytes[1] == pytest.approx(peaks_bytes[1] - peaks_bytes[0], rel=0.01)


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype stage")
def test_the_measured_peak_keeps_the_budget_while_sequences_grow() -> None:
    model, lengths = seeded(Words, "loss of the values"), (300, 200, 100)
    free = by_elixir_unprepared(model, plan_cache=False).train(
        [jagged_batch_of("loss of the values", lengths)], jagged_step
    )
    budget_bytes = int(0.7 * planned_peak_bytes(free))
    gc.collect()
    with Resident() as resident:
        foreign_bytes = resident.nbytes
    run = by_elixir_unprepared(model, plan_cache=False, device_memory=budget_bytes)
    run.train([jagged_batch_of("loss of the values", own) for own in ((30, 20, 10), lengths, lengths)], jagged_step)
    batch = jagged_batch_of("loss of the values", (250, 150, 200))
    record = elixir.measure_step(lambda: jagged_step(run.compiled, run.optimizer, batch), device="cpu")
    assert 0.9 * budget_bytes < record.device_peak_bytes - foreign_bytes <= budget_bytes + SLACK_BYTES


def step_with_loss_outside(compiled: Callable[..., Any], optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
    result = compiled(*batch)
    loss = (result.values() if result.is_nested else result).square().mean()
    del result
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype stage")
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
        run.train([jagged_batch_of(name, own)], step_with_loss_outside)
    batch = jagged_batch_of(name, (250, 150, 200))
    record = elixir.measure_step(lambda: step_with_loss_outside(run.compiled, run.optimizer, batch), device="cpu")
    assert "in code that runs op by op" in caplog.text
    assert record.device_peak_bytes - foreign_bytes <= budget_bytes + SLACK_BYTES
