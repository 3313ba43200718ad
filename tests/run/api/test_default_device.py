"""Training under `torch.set_default_device` and `with torch.device(...)` is what it is without them.

`meta` shows each tensor that Elixir makes for itself without a device: it has no values there.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

import elixir_compile as elixir
from elixir_compile.ir import Update
from elixir_compile.tools.cli import demo
from tests.run.models import Stack, seeded, vectors
from tests.run.training import assert_same, by_elixir, by_elixir_unprepared, hybrid_adamw, tight_bytes
from tests.run.updating import assert_equal, hybrid_run, ladder, rows

EAGER = {"inner": "aot_eager", "plan_cache": False}


@contextmanager
def default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize(
    "how",
    ["tight", "micro-batches", *(pytest.param(how, marks=pytest.mark.slow) for how in ("free", "offload", "sgd"))],
)
def test_training_under_another_default_device_is_bitwise_the_same(how: str) -> None:
    model, batches = seeded(Stack), vectors(3)
    options: dict[str, object] = {"planner": "greedy", "plan_cache": False}
    options |= {"offload": {"activations": "offload"}, "micro-batches": {"micro_batches": 2}}.get(how, {})
    optimizer = momentum if how == "sgd" else hybrid_adamw
    if how in ("tight", "offload"):
        options["device_memory"] = tight_bytes(model, batches[0], **options)
    expected = by_elixir(model, optimizer=optimizer, **options).train(batches)
    again = by_elixir(model, optimizer=optimizer, **options)
    with default_device("meta"):
        again.train(batches)
    assert_same(expected, again)


def test_state_on_disk_under_another_default_device(tmp_path: Path) -> None:
    model, batches = ladder(), rows(3)
    runs = []
    for name in ("cpu", "meta"):
        options = {"disk_path": tmp_path}
        with (
            hybrid_run(model, batches[0], home="host disk", update=Update.ACROSS_STEPS, **options) as run,
            default_device(name),
        ):
            runs.append(run.train(batches))
    assert_equal(*runs)


def test_masters_and_saved_weights_under_another_default_device() -> None:
    states, batches = [], vectors(3)
    for name in ("cpu", "meta"):
        torch._dynamo.reset()
        model = elixir.prepare(seeded(Stack), param_dtype="bfloat16")
        optimizer = hybrid_adamw(model.parameters())
        compiled = torch.compile(model, backend="elixir", options={"inner": "aot_eager"})
        with default_device(name):
            for batch in batches:
                compiled(batch.bfloat16()).float().square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            states.append(elixir.full_state_dict(model))
    assert all(torch.equal(states[0][name], value) for name, value in states[1].items())


def momentum(params: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return elixir.hybrid(torch.optim.SGD)(params, lr=1e-2, momentum=0.9)


def test_a_first_call_prepares_and_clips_under_another_default_device() -> None:
    model, batches = seeded(Stack), vectors(2)
    runs = [by_elixir_unprepared(model, plan_cache=False) for _ in range(2)]
    norms = []
    for run, name in zip(runs, ("cpu", "meta"), strict=True):
        with default_device(name):
            for batch in batches:
                run.compiled(batch).square().mean().backward()
                norms.append(run.optimizer.clip_grad_norm_(0.1))
                run.optimizer.step()
                run.optimizer.zero_grad()
    assert torch.equal(torch.stack(norms[:2]), torch.stack(norms[2:]))
    state = copy.deepcopy(runs[0].model.state_dict())
    assert all(torch.equal(state[name], value) for name, value in runs[1].model.state_dict().items())


def test_the_demo_under_another_default_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "SHAPE", demo.Shape(num_layers=2, width=32, num_heads=2, context=16))
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *model, options, **more: real(*model, options=options | EAGER, **more))
    runs = []
    for name in ("cpu", "meta"):
        torch._dynamo.reset()
        with default_device(name):
            text = bytes(range(256))
            runs.append(demo._train(text, num_steps=2, device="cpu", budget_bytes=None, console=Console(quiet=True)))
    assert runs[0].losses == runs[1].losses
