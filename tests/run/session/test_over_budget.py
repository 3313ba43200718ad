"""A step that takes more than its budget, or whose optimizer keeps more than its plan knows, is planned again."""

import gc
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.weak import TensorWeakRef

import elixir_compile as elixir
from elixir_compile import compat
from elixir_compile.runtime.measure import Resident, drop_running_step_bytes, start_step_bytes
from elixir_compile.session.over_budget import TOLERATED_BYTES
from tests.run.models import ShortStack, Stack, seeded, vectors
from tests.run.processes import apart
from tests.run.training import Run, assert_same, by_elixir, by_torch, least_bytes, loss_of, tight_bytes
from tests.run.updating import Several

# ----------------------------------------------------------------------------------------------------------------------
# A step that takes more than its budget is planned again with what was measured, or refused with the bytes that are
# enough.


WIDTH, NUM_STEPS = 64, 5
OPTIONS: Mapping[str, Any] = {"inner": "aot_eager", "plan_cache": False, "report": False, "search_timeout": 1}


class Block(nn.Module):
    """A residual block of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.nn.functional.gelu(self.first(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


class Disabled(Block):
    """A block whose work Dynamo leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.left_out: Any = torch.compiler.disable(self.inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.left_out(x)


class Branching(Block):
    """A block that branches on its values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        for _ in range(2):
            if float(hidden.detach().abs().max()) > -1:
                hidden = torch.nn.functional.gelu(hidden)
        return x + self.second(hidden)


class Routed(Block):
    """Two blocks of which each takes the rows that a list of Python chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.other = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, WIDTH)
        chosen = (rows.sum(1) > 0).long()
        result = torch.zeros_like(rows)
        for number, count in enumerate(torch.bincount(chosen, minlength=2).tolist()):
            if count:
                (own,) = torch.where(chosen == number)
                result.index_add_(0, own, (self.other if number else self.inner)(rows[own]))
        return x + result.view_as(x)


class Recurrent(nn.Module):
    """Recurrent layers, whose parameters no plan moves."""

    def __init__(self, kind: type[nn.GRU | nn.LSTM] = nn.GRU) -> None:
        super().__init__()
        self.layers = kind(WIDTH, WIDTH, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)[0]


class Around(nn.Module):
    """Blocks around two other layers."""

    def __init__(self, middle: Callable[[], nn.Module], *, is_first: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = [Block(), Block()]
        self.layers = nn.ModuleList([*([] if is_first else blocks), middle(), middle(), Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


LINE_OF_CALL = Around.forward.__code__.co_firstlineno + 2
"""Where `Around` calls a layer: Dynamo runs the loop op by op if a layer in it breaks the graph."""
MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "disabled": lambda: Around(Disabled),
    "disabled layers first": lambda: Around(Disabled, is_first=True),
    "branches on values": lambda: Around(Branching),
    "experts of a list": lambda: Around(Routed),
    "GRU": lambda: Around(Recurrent),
    "LSTM": lambda: Around(lambda: Recurrent(nn.LSTM)),
}
SHARES: Mapping[str, float] = {"GRU": 0.62, "LSTM": 0.68, "disabled layers first": 0.65}
"""The budget as a share of the peak where everything stays; half for the others."""


def trained(make: Callable[[], nn.Module], num_steps: int, **options: Any) -> tuple[elixir.Record, int]:
    """Return the record of a step after `num_steps` others, and how many of these, without the first, which compiles,
    left tensors to the garbage collector."""
    torch._dynamo.reset()
    model = make()
    compiled = torch.compile(model, backend="elixir", options={**OPTIONS, **options})
    optimizer = elixir.HybridAdamW(model.parameters(), lr=1e-3)

    def step() -> TensorWeakRef:
        batch = torch.randn(4, 16, WIDTH)
        compiled(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        return TensorWeakRef(batch)

    torch.manual_seed(1)
    step()
    gc.collect()
    gc.disable()
    num_left = sum(step()() is not None for _ in range(num_steps - 1))
    gc.enable()
    return elixir.measure_step(step), num_left


class Lines(logging.Handler):
    """What the package logs."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []
        logging.getLogger("elixir_compile").addHandler(self)
        logging.getLogger("elixir_compile").setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


Measured = Mapping[str, tuple[int, int, list[str], int]]
"""The peak of a settled step, its budget, what was logged, and how many steps left tensors, by model."""


def measured(names: Sequence[str]) -> Measured:
    """Return the figures of models; run in a process of its own."""
    warnings.simplefilter("ignore")
    found = {}
    for name in names:
        free, _ = trained(MODELS[name], 2)
        gc.collect()
        budget_bytes = int(SHARES.get(name, 0.5) * free.device_peak_bytes)
        lines = Lines()
        record, num_left = trained(MODELS[name], NUM_STEPS, device_memory=budget_bytes)
        logging.getLogger("elixir_compile").removeHandler(lines)
        found[name] = record.device_peak_bytes, budget_bytes, lines.lines, num_left
    return found


QUICK = ("branches on values", "GRU")


@pytest.fixture(scope="module")
def settled() -> Measured:
    return apart(measured, QUICK)


@pytest.mark.parametrize("name", QUICK)
def test_code_between_graphs_is_in_the_budget(name: str, settled: Measured) -> None:
    peak_bytes, budget_bytes, lines, num_left = settled[name]
    assert num_left == 0, "the frames of a search without a plan held the tensors of a step that was planned again"
    assert peak_bytes <= budget_bytes + TOLERATED_BYTES
    [line] = [line for line in lines if "a step of Around took" in line]
    assert f"in code that runs op by op after {__file__}:{LINE_OF_CALL}" in line
    assert "Its graphs are planned for the budget beside that" in line


@pytest.mark.slow
def test_all_kinds_of_code_between_graphs_are_in_the_budget() -> None:
    for name, (peak_bytes, budget_bytes, *_) in apart(measured, [*MODELS.keys() - QUICK]).items():
        assert peak_bytes <= budget_bytes + TOLERATED_BYTES, name


@pytest.mark.parametrize("grad", [False, True])
def test_an_evaluation_is_not_measured(grad: bool) -> None:
    """A measurement holds torch.profiler, which would record every op of a whole evaluation."""
    torch._dynamo.reset()
    drop_running_step_bytes()  # of a model of another test
    model = nn.Sequential(Block(), nn.Linear(WIDTH, 1))
    compiled = torch.compile(elixir.prepare(model), backend="elixir", options={**OPTIONS, "device_memory": "1GiB"})
    optimizer = elixir.HybridAdamW(model.parameters(), lr=1e-3)
    batch = torch.ones(4, WIDTH)
    compiled(batch).sum().backward()
    optimizer.step()
    with torch.set_grad_enabled(grad):
        for _ in range(3):
            compiled(batch).sum()
    assert not compat.is_profiling()


@pytest.mark.parametrize("is_by_hand", [False, True])
def test_a_measured_step_begins_behind_an_update(is_by_hand: bool) -> None:
    """Not at a later micro-batch: what its step has held before would be missing. Updates by hand are not seen, so at
    last each backward pass ends a step."""
    torch._dynamo.reset()
    drop_running_step_bytes()  # of a model of another test
    model = nn.Sequential(Block(), nn.Linear(WIDTH, 1))
    compiled = torch.compile(elixir.prepare(model), backend="elixir", options={**OPTIONS, "device_memory": "1GiB"})
    optimizer = None if is_by_hand else elixir.HybridAdamW(model.parameters(), lr=1e-3)
    found = []
    for _ in range(4):
        for _ in range(2):
            compiled(torch.ones(4, WIDTH)).sum().backward()
            found.append(compat.is_profiling())
        if optimizer is None:
            model.zero_grad()
        else:
            optimizer.step()
            optimizer.zero_grad()
    assert not compat.is_profiling()
    assert [number for number, is_measured in enumerate(found) if is_measured] == ([5] if is_by_hand else [2, 3])


def test_a_measurement_without_a_result_reads_no_events(monkeypatch: pytest.MonkeyPatch) -> None:
    drop_running_step_bytes()  # of a model of another test
    measured = start_step_bytes(torch.device("cpu"), (), 0)
    assert measured is not None
    monkeypatch.setattr(compat.AllocatorProfile, "events", lambda profile: pytest.fail("its events were read"))
    measured.drop()
    assert not compat.is_profiling()
    assert measured.stop() == {}


def test_tensors_kept_for_a_backward_are_found_and_no_hook_is_called() -> None:
    source = torch.randn(4, WIDTH, requires_grad=True)
    kept = source.exp()
    result = torch.nn.functional.gelu(kept.sin())
    found = {tensor.data_ptr() for tensor in compat.saved_behind([result, torch.ones(1)])}
    assert kept.data_ptr() in found
    assert len(found) == 2, "`exp` keeps its result, which is the input that `sin` keeps"

    def unpack(packed: object) -> torch.Tensor:
        pytest.fail("a hook was called")

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: "packed", unpack):
        packed = source.exp()
    assert compat.saved_behind([packed]) == []
    result.sum().backward()
    assert compat.saved_behind([result]) == []


# ----------------------------------------------------------------------------------------------------------------------
# State that torch's own optimizers keep beside host parameters on a CPU: plans count it from the second step on.


Make = Callable[[Any], Optimizer]
UNPLANNED_BYTES = 4096
"""Step counters, tickets and losses."""


def each(params: Any) -> Any:
    """Return one optimizer for each parameter."""
    return Several(AdamW([param]) for param in params)


def momentum(params: Any) -> Optimizer:
    return SGD(params, lr=0.1, momentum=0.9)


def plain(params: Any) -> Optimizer:
    return SGD(params, lr=0.1)


def state_bytes(run: Run) -> int:
    entries = run.optimizer.state.values()
    return sum(value.nbytes for entry in entries for value in entry.values() if isinstance(value, torch.Tensor))


def told(run: Run, caplog: pytest.LogCaptureFixture, steps: int = 2) -> list[str]:
    """Return what is said of state while `run` trains."""
    with caplog.at_level(logging.WARNING, "elixir_compile"):
        run.train(vectors(steps))
    return [record.getMessage() for record in caplog.records if "keeps its state for parameters" in record.getMessage()]


def peak_bytes(run: Run) -> int:
    """Return the most bytes that are on the device in a step, without what else is in this process."""
    batch = vectors(1)[0]

    def step() -> None:
        loss_of(run.compiled, batch).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()

    return elixir.measure_step(step, device="cpu").device_peak_bytes


@pytest.mark.parametrize("make", [AdamW, pytest.param(momentum, marks=pytest.mark.slow), each])
def test_plans_count_the_state_of_plain_optimizers(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """The budget has room for the whole state and for the step of a model whose parameters are on the host."""
    model, batches = seeded(ShortStack), vectors(4)
    trained = by_torch(model, optimizer=make).train(batches[:1])
    budget_bytes = int(1.05 * (least_bytes(model, batches[0], optimizer=make) + state_bytes(trained)))
    expected = by_torch(model, optimizer=make).train(batches)
    other_bytes = Resident().nbytes
    run = by_elixir(model, optimizer=make, device_memory=budget_bytes, search_timeout=1)
    assert len(told(run, caplog)) == 1
    run.train(vectors(4)[2:])
    assert_same(expected, run)
    assert peak_bytes(run) - other_bytes <= budget_bytes + UNPLANNED_BYTES


@pytest.mark.parametrize("make", [AdamW, each])
def test_a_budget_without_room_for_the_state_is_an_error_of_the_second_step(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    model, (batch, *_) = seeded(Stack), vectors(1)
    run = by_elixir(model, optimizer=make, device_memory=tight_bytes(model, batch, optimizer=make))
    (said,) = told(run, caplog, steps=1)
    assert said.startswith("AdamW keeps its state for parameters of Stack")
    assert "elixir_compile.HybridAdamW" in said
    with pytest.raises(elixir.NoFeasiblePlan) as caught:
        run.train([batch])
    assert caught.value.needed_bytes >= state_bytes(run)


@pytest.mark.parametrize("make", [pytest.param(elixir.HybridAdamW, marks=pytest.mark.slow), elixir.hybrid(SGD), plain])
def test_nothing_changes_if_the_plan_is_kept(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    model, (batch, *_) = seeded(ShortStack), vectors(1)
    run = by_elixir(model, optimizer=make, device_memory=tight_bytes(model, batch, optimizer=make))
    assert told(run, caplog) == []


def test_nothing_changes_if_the_budget_suffices(caplog: pytest.LogCaptureFixture) -> None:
    assert told(by_elixir(seeded(ShortStack), optimizer=AdamW, planner="zero3_offload"), caplog) == []


def test_state_from_before_the_compilation_counts(caplog: pytest.LogCaptureFixture) -> None:
    model, batches = seeded(ShortStack), vectors(2)
    optimizer = AdamW(model.parameters())
    model(batches[0]).backward()
    optimizer.step()
    optimizer.zero_grad()
    run = by_elixir(model, optimizer=AdamW, device_memory=tight_bytes(model, batches[0], optimizer=AdamW))
    run.optimizer.load_state_dict(optimizer.state_dict())
    assert len(told(run, caplog, steps=1)) == 1
