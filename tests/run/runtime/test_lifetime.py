"""A model that nobody holds is freed with all that Elixir made for it; under every budget the bits are those of
torch."""

import copy
import functools
import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

import elixir_compile as elixir
from elixir_compile.graph.capture.modules import executor_of, model_of
from elixir_compile.graph.ops.gather import GATHER
from elixir_compile.ir import Update
from elixir_compile.runtime.bucket import live_slab_bytes
from tests.run.habits.stories import eager
from tests.run.models import Stack, hf_batches, seeded, small_gpt2, small_llama, vectors
from tests.run.training import (
    Run,
    assert_offloads,
    assert_same,
    by_elixir,
    by_elixir_unprepared,
    by_torch,
    fused_adamw,
    hybrid_adamw,
    least_bytes,
    loss_of,
    on_host,
    plain_step,
    planned_peak_bytes,
    state_on_host,
)
from tests.run.updating import Ladder, hybrid_run, ladder, rows

# ----------------------------------------------------------------------------------------------------------------------
# A model that nobody holds is freed, with all that Elixir made for it, as soon as torch's own backend would free it.
#
# Each test does the same by `aot_eager`, whose compiled code holds nothing of the model, and looks at the same weak
# references; beside them at what only Elixir has: executors, records, slabs, threads and files.


FREE = {"inner": "aot_eager", "report": False}
OFFLOAD = {**FREE, "planner": "zero3_offload"}
THREADS = ("elixir updates", "elixir-disk")
EARLIER: set[threading.Thread] = set()
"""Elixir's threads that ran before the test began."""


class Broken(Ladder):
    """The ladder in two graphs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.steps[0](x))
        torch._dynamo.graph_break()
        return torch.tanh(self.steps[1](x)).square().mean()


def a_run(model: nn.Module, options: Mapping[str, object] | None, *, optimizer: Any, prepares: bool = False) -> Run:
    """Return a run of `model` itself under Elixir's `options`, or by `aot_eager` without them."""
    if options is None:
        return Run(
            model=model, compiled=torch.compile(model, backend="aot_eager"), optimizer=optimizer(model.parameters())
        )
    model = elixir.prepare(model) if prepares else model
    compiled = torch.compile(model, backend="elixir", options=dict(options))
    return Run(model=model, compiled=compiled, optimizer=optimizer(model.parameters()))


def references(run: Run) -> dict[str, weakref.ref[Any]]:
    """Return weak references to everything that the run holds, by name."""
    named = {f"module {name}": module for name, module in run.model.named_modules()}
    for name, param in run.model.named_parameters():
        named |= {name: param, f"memory of {name}": param.untyped_storage()}
        named |= {} if param.grad is None else {f"gradient of {name}": param.grad.untyped_storage()}
    for param, state in run.optimizer.state.items():
        named |= {f"{kind} of {id(param)}": value for kind, value in state.items() if isinstance(value, torch.Tensor)}
    named |= {"optimizer": run.optimizer, "compiled": run.compiled}
    executor = executor_of(run.model)
    if executor is not None:
        named |= {"executor": executor, "ledger": executor.ledger, "saved": executor.saved}
        named |= {f"record {number}": record for number, record in enumerate(model_of(run.model).compilations)}
        named |= {"managed model": model_of(run.model)}
        named |= {f"graph {number}": graph for number, graph in enumerate(model_of(run.model).graphs)}
        named |= {f"slot {name}": slot for name, slot in executor.slots.items()}
    return {name: weakref.ref(value) for name, value in named.items()}


def alive(found: Mapping[str, "weakref.ref[Any]"]) -> list[str]:
    """Return the names of what is not freed by the collector."""
    gc.collect()
    return [name for name, reference in found.items() if reference() is not None]


def elixir_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith(THREADS)}


def own_threads(limit_s: float = 5.0) -> list[str]:
    """Return the names of Elixir's threads that began in this test and have not ended in `limit_s`."""
    end_s = time.monotonic() + limit_s
    while names := [thread.name for thread in elixir_threads() - EARLIER]:
        if time.monotonic() > end_s:
            return names
        time.sleep(0.002)
    return []


@pytest.fixture
def before() -> None:
    """Begin without what earlier tests left, and note threads whose optimizers other test files keep alive."""
    torch._dynamo.reset()
    gc.collect()
    EARLIER.clear()
    EARLIER.update(elixir_threads())


def steps(run: Run, num_steps: int) -> None:
    run.train(rows(num_steps))
    run.losses.clear()


def one_step(run: Run) -> None:
    steps(run, 1)


def three_steps(run: Run) -> None:
    steps(run, 3)


def evaluates(run: Run) -> None:
    run.model.eval()
    with torch.no_grad():
        run.compiled(rows(1)[0])
    run.model.train()
    steps(run, 1)
    with torch.no_grad():
        run.compiled(rows(1)[0])
        run.model(rows(1)[0])


def fails_in_the_forward(run: Run) -> None:
    steps(run, 1)
    logging.disable()  # pytest keeps what Dynamo logs, tracebacks included
    try:
        with pytest.raises(RuntimeError, match="reduction dim"):
            run.compiled(torch.randn(5, 7))
    finally:
        logging.disable(logging.NOTSET)
    steps(run, 1)


def fails_in_the_backward(run: Run) -> None:
    def fail(grad: torch.Tensor) -> None:
        raise KeyError("of the user")

    x = rows(1)[0].requires_grad_()
    x.register_hook(fail)
    with pytest.raises(KeyError, match="of the user"):
        run.compiled(x).backward()
    torch.zeros((), requires_grad=True).backward()  # torch keeps the graph of a backward that failed until the next one


def grows(run: Run) -> None:
    for num_rows in (1, 2):
        plain_step(run.compiled, run.optimizer, rows(1)[0].repeat(num_rows, 1))


def drops_a_forward(run: Run) -> None:
    """A loss that nobody differentiates, beside a step."""
    kept = run.compiled(rows(1)[0])
    steps(run, 1)
    assert kept.requires_grad


ACTS: dict[str, Callable[[Run], None]] = {
    "nothing": lambda run: None,
    "one step": one_step,
    "evaluation": evaluates,
    "a forward that fails": fails_in_the_forward,
    "a backward that fails": fails_in_the_backward,
    "other sizes": grows,
    "a forward without a backward": drops_a_forward,
}


def left_after(
    act: Callable[[Run], None],
    make: Callable[[], nn.Module],
    options: Mapping[str, object] | None,
    *,
    optimizer: Any,
    prepares: bool = False,
) -> list[str]:
    """Return what is alive once a run of the model that `make` returns did `act` and was deleted."""
    run = a_run(make(), options, optimizer=optimizer, prepares=prepares)
    act(run)
    found = references(run)
    del run
    return alive(found)


@pytest.mark.usefixtures("before")
@pytest.mark.parametrize("act", ACTS)
def test_a_deleted_model_is_freed(act: str) -> None:
    slab_bytes = live_slab_bytes()
    assert left_after(ACTS[act], ladder, None, optimizer=fused_adamw) == []
    assert left_after(ACTS[act], ladder, OFFLOAD, optimizer=hybrid_adamw) == []
    assert left_after(ACTS[act], ladder, OFFLOAD, optimizer=hybrid_adamw, prepares=True) == []
    assert live_slab_bytes() == slab_bytes
    assert own_threads() == []


@pytest.mark.usefixtures("before")
@pytest.mark.parametrize("optimizer", [fused_adamw, hybrid_adamw])
def test_a_deleted_model_that_was_on_the_device_is_freed(optimizer: Any) -> None:
    assert left_after(three_steps, ladder, FREE, optimizer=optimizer) == []
    assert left_after(three_steps, ladder, FREE, optimizer=optimizer, prepares=True) == []
    assert own_threads() == []


@pytest.mark.usefixtures("before")
def test_a_deleted_model_behind_a_graph_break_is_freed() -> None:
    num_hooks = len(torch_optimizer._global_optimizer_post_hooks)
    assert left_after(three_steps, Broken, None, optimizer=fused_adamw) == []
    assert left_after(three_steps, Broken, OFFLOAD, optimizer=hybrid_adamw) == []
    assert left_after(three_steps, Broken, OFFLOAD, optimizer=hybrid_adamw, prepares=True) == []
    assert len(torch_optimizer._global_optimizer_post_hooks) == num_hooks


class Small(nn.Module):
    """What Inductor compiles soon."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(13))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).mean()


@pytest.mark.usefixtures("before")
def test_a_deleted_model_whose_regions_inductor_compiled_is_freed() -> None:
    options = {**OFFLOAD, "inner": "inductor"}
    assert left_after(one_step, Small, options, optimizer=hybrid_adamw) == []


@pytest.mark.usefixtures("before")
@pytest.mark.parametrize("home", ["split", "split disk", "host disk"])
def test_deleting_a_model_frees_queued_updates_and_disk_files(home: str, tmp_path: Path) -> None:
    slab_bytes = live_slab_bytes()
    disk = {"disk_path": tmp_path} if home.endswith("disk") else {}

    def trained() -> dict[str, weakref.ref[Any]]:
        with hybrid_run(ladder(), rows(1)[0], home=home, update=Update.ACROSS_STEPS, **disk) as run:
            steps(run, 3)  # the last one's updates are queued
            assert any(thread.name == "elixir updates" for thread in threading.enumerate())
            assert bool(list(tmp_path.iterdir())) == bool(disk)
            return references(run)

    found = trained()
    assert own_threads() == []
    assert alive(found) == []
    assert own_threads() == []
    assert list(tmp_path.iterdir()) == []
    assert live_slab_bytes() == slab_bytes


@pytest.mark.usefixtures("before")
def test_another_model_of_the_class_goes_on_when_one_is_deleted() -> None:
    other = copy.deepcopy(ladder())
    with torch.no_grad():
        for param in other.parameters():
            param.mul_(0.5)
    expected = eager(other).train(rows(4))
    first = a_run(ladder(), OFFLOAD, optimizer=fused_adamw).train(rows(2))
    second = a_run(other, OFFLOAD, optimizer=fused_adamw).train(rows(4)[:2])
    first.losses.clear()
    found = references(first)
    del first
    assert alive(found) == []
    assert_same(expected, second.train(rows(4)[2:]))
    assert on_host(second)


@pytest.mark.usefixtures("before")
@pytest.mark.parametrize("prepares", [False, True], ids=["plain", "prepared"])
def test_a_backward_after_the_model_was_deleted_gives_its_gradients(prepares: bool) -> None:
    """As eager: autograd keeps what it needs, and lets go of it behind the backward."""
    plain = ladder()
    plain(rows(1)[0]).backward()
    expected = [param.grad for param in plain.parameters()]
    run = a_run(ladder(), OFFLOAD, optimizer=fused_adamw, prepares=prepares)
    loss = run.compiled(rows(1)[0])
    assert on_host(run)
    found, params = references(run), list(run.model.parameters())
    del run
    gc.collect()
    loss.backward()
    for own, param in zip(expected, params, strict=True):
        assert torch.equal(own, param.grad)
    del loss, params, param
    assert alive(found) == []


@pytest.mark.usefixtures("before")
def test_eager_gathers_have_a_backward_after_model_deletion() -> None:
    model = elixir.prepare(nn.Linear(3, 2, bias=False))
    slot = executor_of(model).slots["weight"]
    found, param = references(Run(model=model, compiled=model, optimizer=fused_adamw([slot.param]))), model.weight
    gathered = GATHER(slot.handle(), [2, 3], [3, 1], slot.key)
    del model, slot
    gc.collect()
    (2 * gathered).sum().backward()
    assert torch.equal(param.grad, torch.full((2, 3), 2.0))
    del gathered, param
    assert alive(found) == []


@pytest.mark.usefixtures("before")
def test_models_made_in_a_loop_take_no_more_memory() -> None:
    """Without `torch._dynamo.reset()` between them, as in a search for hyperparameters."""
    left = []
    for number in range(3):
        left += left_after(one_step, ladder, OFFLOAD, optimizer=hybrid_adamw, prepares=number % 2 == 0)
        left.append(live_slab_bytes())
    assert left == [left[0]] * 3


# ----------------------------------------------------------------------------------------------------------------------
# Under every budget, training is bitwise that of `torch.compile(backend="aot_eager")` with torch's fused AdamW.


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], list[Any]]]] = {
    "gpt2": (lambda: small_gpt2(num_layers=2), hf_batches),
    "llama-tied": (lambda: small_llama(tied=True, num_layers=2), hf_batches),
    "llama-untied": (lambda: small_llama(tied=False), hf_batches),
    "stack": (lambda: seeded(Stack), vectors),
}
NAMES = [*(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "llama-tied", "llama-untied")), "stack"]
SHARES = {"gpt2": [0.7], "llama-tied": [0.5], "llama-untied": [0.7, 0.5], "stack": [0.7, 0.5]}
"""Of what a step takes without a budget: between that and the least. With layers enough, a model goes through both."""


@functools.cache
def least_of(name: str) -> int:
    """Return the smallest budget of a model, which takes a capture to know."""
    make, batches_of = MODELS[name]
    return least_bytes(make(), batches_of()[0])


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_bitwise_equal_under_every_budget(name: str) -> None:
    make, batches_of = MODELS[name]
    model, batches = make(), batches_of()
    expected = by_torch(model).train(batches)
    unbudgeted = by_elixir(model).train(batches)
    assert not on_host(unbudgeted)
    assert_same(expected, unbudgeted)
    full, least = planned_peak_bytes(unbudgeted), least_of(name)
    assert least < full / 2
    for share in SHARES[name]:
        got = by_elixir(model, device_memory=int(share * full)).train(batches)
        assert state_on_host(got)  # with room enough, optimizer state alone leaves the device
        assert_same(expected, got)
    got = by_elixir_unprepared(model, device_memory=least).train(batches)
    assert_offloads(got)
    assert_same(expected, got)


@pytest.mark.parametrize("name", NAMES)
def test_clipping_gives_the_same_norms_and_weights(name: str) -> None:
    make, batches_of = MODELS[name]
    model, batches = make(), batches_of()
    norms: dict[int, list[float]] = {}

    def step(compiled: Any, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
        loss = loss_of(compiled, batch)
        loss.backward()
        params = optimizer.param_groups[0]["params"]
        norms.setdefault(id(optimizer), []).append(torch.nn.utils.clip_grad_norm_(params, 0.01).item())
        optimizer.step()
        optimizer.zero_grad()
        return loss

    expected = by_torch(model).train(batches, step)
    got = by_elixir(model, device_memory=int(1.05 * least_of(name))).train(batches, step)
    assert_offloads(got)
    assert norms[id(expected.optimizer)] == norms[id(got.optimizer)]
    assert_same(expected, got)
