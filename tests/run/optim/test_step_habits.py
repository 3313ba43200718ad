"""What a training loop does between a backward and a step, or beside one: clipping, kept gradients, several graphs."""

import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import elixir_compile as elixir
from elixir_compile.base.errors import GradientsChanged
from elixir_compile.compat.platforms import host as update_threads
from elixir_compile.ir import Update
from elixir_compile.optim import adamw_rule
from elixir_compile.optim.host import kernel as threads
from tests.run.training import Run, assert_same_tensors, loss_of
from tests.run.updating import (
    WIDTH,
    buckets_of,
    controlled_worker,
    eager_run,
    hybrid_run,
    ladder,
    nan_staging,
    rows,
    weights_of,
)


def test_the_norm_that_clipping_returns_is_that_of_eager() -> None:
    model, batches = ladder(), rows(4)

    def train(run: Run) -> list[float]:
        norms: list[float] = []

        def step(compiled: Callable[..., Any], optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
            loss = loss_of(compiled, batch)
            loss.backward()
            norms.append(float(nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1e-3)))
            optimizer.step()
            optimizer.zero_grad()
            return loss

        run.train(batches, step)
        return norms

    expected = train(eager_run(model))
    with nan_staging(), hybrid_run(model, batches[0], home="host", update=Update.ACROSS_STEPS) as run:
        assert train(run) == expected


def test_clipping_with_updates_in_the_backward_is_refused_first() -> None:
    model, batches = ladder(), rows(1)
    with hybrid_run(model, batches[0], home="host", update=Update.IN_BACKWARD) as run:
        before = weights_of(run)
        loss_of(run.compiled, batches[0]).backward()
        nn.utils.clip_grad_norm_(run.optimizer.param_groups[0]["params"], 1e-3)
        with pytest.raises(GradientsChanged, match="its gradient was changed"):
            run.optimizer.step()
        assert_same_tensors(before, weights_of(run))


def test_clipping_by_the_optimizer_is_named_in_the_refusal() -> None:
    own, batch = elixir.prepare(ladder(), param_dtype="bfloat16"), rows(1)[0].bfloat16()
    optimizer = elixir.HybridAdamW(own.parameters())
    options = {"inner": "aot_eager", "update": "in_backward", "report": False}
    torch.compile(own, backend="elixir", options=options)(batch).backward()
    optimizer.clip_grad_norm_(1e-3)
    with pytest.raises(GradientsChanged, match="`clip_grad_norm_` scaled its gradient"):
        optimizer.step()


@pytest.mark.parametrize("update", list(Update))
def test_state_loaded_between_a_backward_and_its_step(update: Update) -> None:
    model, batches = ladder(), rows(4)
    expected = eager_run(model).train(batches[:2])
    with hybrid_run(model, batches[0], home="host", update=update) as run:
        run.train(batches[:2])
        for each in (expected, run):
            saved = copy.deepcopy(each.optimizer.state_dict())
            each.train(batches[2:3])
            loss_of(each.compiled, batches[3]).backward()
            each.optimizer.load_state_dict(saved)
        expected.optimizer.step()
        if update is Update.IN_BACKWARD:
            with pytest.raises(GradientsChanged, match="a state dict was loaded before"):
                run.optimizer.step()
            run.optimizer.zero_grad()
            run.train(batches[:2])
        else:
            run.optimizer.step()
            assert_same_tensors(weights_of(expected), weights_of(run))


def test_a_backward_without_its_step_raises_once() -> None:
    model, batches = ladder(), rows(3)
    with hybrid_run(model, batches[0], home="host", update=Update.IN_BACKWARD) as run:
        run.train(batches[:1])
        loss_of(run.compiled, batches[1]).backward()
        run.optimizer.zero_grad()
        with pytest.raises(GradientsChanged, match=r"dropped without a `step\(\)`"):
            loss_of(run.compiled, batches[2]).backward()
        run.optimizer.zero_grad()
        before = weights_of(run)
        run.train(batches[2:])
        assert not torch.equal(before["steps.0.weight"], weights_of(run)["steps.0.weight"])


@pytest.fixture
def waiting() -> Iterator[tuple[Run, list[torch.Tensor], dict[str, torch.Tensor], Any]]:
    """Yield a run whose second step is queued behind a closed gate, with the gradients that somebody kept and the
    weights before."""
    model, batches = ladder(), rows(2)
    with (
        controlled_worker() as worker,
        hybrid_run(model, batches[0], home="host", update=Update.ACROSS_STEPS) as run,
    ):
        run.train(batches[:1])
        before = weights_of(run)
        loss_of(run.compiled, batches[1]).backward()
        kept = [param.grad for param in run.optimizer.param_groups[0]["params"]]
        worker.gate.clear()
        run.optimizer.step()
        yield run, kept, before, worker


def test_changing_a_kept_gradient_of_a_queued_update_raises(waiting: Any) -> None:
    run, kept, before, worker = waiting
    for grad in kept:
        grad.zero_()
    worker.gate.set()
    with pytest.raises(GradientsChanged, match="had its gradient changed before its queued update"):
        run.optimizer.wait()
    # The worker was inside the first bucket; those behind it were dropped with their weights as they were.
    after = weights_of(run)
    first = buckets_of(run)[0].spec.params
    assert_same_tensors(*({name: w[name] for name in before if name not in first} for w in (before, after)))


def test_an_unchanged_kept_gradient_raises_nothing(waiting: Any) -> None:
    run, kept, before, worker = waiting
    values = [grad.clone() for grad in kept]
    run.optimizer.zero_grad()
    worker.gate.set()
    run.optimizer.wait()
    assert all(torch.equal(grad, value) for grad, value in zip(kept, values, strict=True))
    assert not torch.equal(weights_of(run)["steps.0.weight"], before["steps.0.weight"])


class Partition(nn.Module):
    """Two graphs, one behind the other, and one layer that both use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.shared(self.first(x)))
        torch._dynamo.graph_break()
        return self.last(self.shared(x)).square().mean()


@pytest.mark.parametrize("update", list(Update))
def test_two_graphs_in_one_step(update: Update) -> None:
    torch.manual_seed(0)
    model, batches = Partition(), rows(5)
    expected = eager_run(model).train(batches)
    with nan_staging(), hybrid_run(model, batches[0], home="device", update=update) as run:
        run.train(batches)
        assert len(elixir.compilations(run.model)) == 2
        assert_same_tensors(weights_of(expected), weights_of(run))


def test_optimizer_hooks_run_each_step_and_copies_continue() -> None:
    model, batches = ladder(), rows(4)
    expected = eager_run(model).train(batches)
    said: list[str] = []
    with hybrid_run(model, batches[0], home="host", update=Update.IN_BACKWARD) as run:
        run.optimizer.register_step_pre_hook(lambda *_: said.append("pre"))
        run.optimizer.register_step_post_hook(lambda *_: said.append("post"))
        run.train(batches[:2])
        copied = copy.deepcopy(run.optimizer)
        kept = [state["exp_avg"].clone() for state in run.optimizer.state.values()]
        run.train(batches[2:])
        assert said == ["pre", "post"] * 4
        assert all(torch.equal(entry["exp_avg"], old) for entry, old in zip(copied.state.values(), kept, strict=True))
        assert_same_tensors(weights_of(expected), weights_of(run))


def test_host_updates_use_host_threads_and_log_it_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(threads, "allowed_cores", lambda: frozenset(range(8)))
    for module in (threads, update_threads):
        monkeypatch.setattr(module, "num_usable_cores", lambda: 8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    threads.host_threads_for.cache_clear()
    usual = torch.get_num_threads()
    model, batches, seen = ladder(), rows(3), []
    try:
        with controlled_worker(), caplog.at_level(logging.INFO, "elixir_compile"):
            torch.set_num_threads(1)
            fused = adamw_rule.adamw
            monkeypatch.setattr(
                adamw_rule,
                "adamw",
                lambda *args, **rest: (seen.append(torch.get_num_threads()), fused(*args, **rest)),
            )
            with hybrid_run(model, batches[0], home="host", update=Update.ACROSS_STEPS) as run:
                run.train(batches)
                run.optimizer.wait()
        lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("host updates")]
        assert lines == ["host updates: 3 threads of 8 cores for 2 local ranks, whatever OMP_NUM_THREADS says"]
        assert set(seen) == {3}
        assert torch.get_num_threads() == 1
        with threads.at_least_threads(3):
            assert torch.get_num_threads() == 3
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(usual)
        threads.host_threads_for.cache_clear()
