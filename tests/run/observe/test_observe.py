"""`elixir.observe`: steps end where the next forward begins, phases add up to the period, nothing is left behind."""

import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

import elixir_compile as elixir
from elixir_compile.runtime import recording as phases
from elixir_compile.tools.measure import observation
from elixir_compile.tools.observe import Study
from tests.run.models import Stack, seeded, vectors

NAP_S = 0.02
SMALL = {"inner": "aot_eager", "report": False, "replan": False, "planner": "keep_all"}


class Trained:
    """A small compiled model, its optimizer, and a batch."""

    def __init__(self, **options: object) -> None:
        self.model = seeded(Stack, 8, 1)
        self.compiled = torch.compile(self.model, backend="elixir", options={**SMALL, **options})
        self.optimizer: torch.optim.Optimizer = elixir.HybridAdamW(self.model.parameters(), lr=1e-3)
        self.batch = vectors(1, width=8)[0]

    def backward(self) -> torch.Tensor:
        loss = self.compiled(self.batch)
        loss.backward()
        return loss

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self) -> torch.Tensor:
        loss = self.backward()
        self.update()
        return loss


def assert_adds_up(study: Study, num_steps: int) -> None:
    """Fail unless there are `num_steps` summaries in order, and the seconds of each step's phases are its period."""
    assert [each.step for each in study.summaries] == list(range(num_steps))
    for each in study.summaries:
        assert sum(each.seconds_s.values()) == pytest.approx(each.period_s, abs=1e-9)


def hooks() -> tuple[int, int, int]:
    return len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks), len(phases._observers)


def test_each_step_has_its_phases_and_they_add_up_to_the_period() -> None:
    trained = Trained()
    trained.step()
    with elixir.observe(trained.compiled) as study:
        began_s = time.perf_counter()
        for _ in range(4):
            trained.step()
            time.sleep(NAP_S)
        took_s = time.perf_counter() - began_s
    assert_adds_up(study, 4)
    for each in study.summaries:
        assert {"forward", "backward", "update"} <= each.seconds_s.keys()
        assert len(each.plans) == 1
        assert each.rss_bytes is not None
        assert each.rss_bytes > 1 << 20
    assert all(each.seconds_s["caller"] >= NAP_S for each in study.summaries[:-1])
    assert study.summaries[-1].seconds_s["caller"] < NAP_S, "the time after the last update belongs to no step"
    total_s = sum(each.period_s for each in study.summaries)
    assert took_s - 2 * NAP_S < total_s < took_s


def test_accumulated_gradients_are_one_step() -> None:
    trained = Trained()
    with elixir.observe(trained.model) as study:
        for _ in range(3):
            trained.backward()
            trained.backward()
            trained.update()
    assert_adds_up(study, 3)


def test_a_closure_is_one_step_and_its_forward_is_no_update() -> None:
    trained = Trained()
    plain = torch.optim.SGD(trained.model.parameters(), lr=1e-3)

    def closure() -> torch.Tensor:
        plain.zero_grad()
        time.sleep(NAP_S)
        return trained.backward()

    trained.step()
    with elixir.observe(trained.model) as study:
        for _ in range(3):
            plain.step(closure)
    assert_adds_up(study, 3)
    # The nap of the closure is within `step()`, before the first forward of the step, so it ends the step before.
    assert all(each.seconds_s["update"] >= NAP_S for each in study.summaries[:-1])
    assert all(each.seconds_s["forward"] > 0 and each.seconds_s["backward"] > 0 for each in study.summaries)


@pytest.mark.slow  # a compilation: 1 s
def test_two_optimizers_after_one_backward_are_one_step() -> None:
    trained = Trained()
    halves = [list(trained.model.blocks.parameters()), list(trained.model.head.parameters())]
    optimizers = [torch.optim.SGD(half, lr=1e-3) for half in halves]
    with elixir.observe(trained.model) as study:
        for _ in range(3):
            trained.backward()
            for optimizer in optimizers:
                optimizer.step()
    assert_adds_up(study, 3)


def test_an_evaluation_between_steps_is_the_callers() -> None:
    trained = Trained()
    with elixir.observe(trained.model) as study:
        for _ in range(3):
            trained.step()
            with torch.no_grad():
                trained.compiled(trained.batch)
                time.sleep(NAP_S)
    assert_adds_up(study, 3)
    assert study.summaries[1].seconds_s["caller"] >= NAP_S


def test_another_models_optimizer_ends_no_step() -> None:
    trained, other = Trained(), nn.Linear(2, 2)
    foreign = torch.optim.SGD(other.parameters(), lr=1e-3)
    with elixir.observe(trained.model) as study:
        for _ in range(2):
            trained.backward()
            other(torch.ones(1, 2)).sum().backward()
            foreign.step()
            trained.backward()
            trained.update()
    assert_adds_up(study, 2)


def fails_in_forward(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("elixir_compile.runtime.executor.Executor.ticket", _fail)
        with pytest.raises(KeyError):
            trained.compiled(trained.batch)


def fails_in_backward(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    loss = trained.compiled(trained.batch * 2)
    with monkeypatch.context() as patch:
        patch.setattr("elixir_compile.runtime.executor.Executor.reduce", _fail)
        with pytest.raises(KeyError):
            loss.backward()


def fails_in_eager_backward(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = trained.batch.clone().requires_grad_()
    batch.register_hook(_fail)
    with pytest.raises(KeyError):
        trained.compiled(batch * 1).backward()


def fails_in_update(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("elixir_compile.optim.update.Updater.update", _fail)
        with pytest.raises(KeyError):
            trained.optimizer.step()


def _fail(*_: object) -> Any:
    raise KeyError("mine")


@pytest.mark.parametrize(
    "fail",
    [
        fails_in_forward,
        pytest.param(fails_in_backward, marks=pytest.mark.slow),  # each 1 s
        fails_in_eager_backward,
        fails_in_update,
    ],
)
def test_a_phase_that_an_exception_ends_is_closed(
    fail: Callable[[Trained, pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = Trained()
    with elixir.observe(trained.model) as study:
        for _ in range(2):
            trained.step()
        fail(trained, monkeypatch)
        trained.optimizer.zero_grad()
        trained.backward()
        time.sleep(NAP_S)
        trained.update()
        trained.step()
    assert_adds_up(study, 4)
    assert study.summaries[2].seconds_s["caller"] >= NAP_S, "the nap was counted in a phase that was never closed"


def test_without_an_optimizer_the_loop_says_where_a_step_ends() -> None:
    trained = Trained()
    with elixir.observe(trained.model) as study:
        for _ in range(3):
            trained.backward()
            with torch.no_grad():
                for param in trained.model.parameters():
                    param -= 1e-3 * param.grad
                    param.grad = None
            study.step()
    assert_adds_up(study, 3)
    assert all("update" not in each.seconds_s for each in study.summaries)


def test_a_model_may_be_compiled_later_and_in_place() -> None:
    model = seeded(Stack, 8, 1)
    optimizer = elixir.HybridAdamW(model.parameters(), lr=1e-3)
    with elixir.observe(model) as study:
        assert study.latest is None
        assert study.scalars() == {}
        assert "no step" in str(study)
        model.compile(backend="elixir", options=SMALL)
        for batch in vectors(2, width=8):
            model(batch).backward()
            optimizer.step()
    assert_adds_up(study, 2)


def test_scalars_are_finite_floats_and_notes_belong_to_their_step() -> None:
    trained = Trained()
    with elixir.observe(trained.model) as study:
        study.note(lr=0.5)
        for number in range(3):
            trained.step()
            study.note(number=number, loss=float("nan"))
    assert [dict(each.notes) for each in study.summaries] == [
        {"lr": 0.5, "number": 0.0},
        {"number": 1.0},
        {"number": 2.0},
    ]
    assert study.latest is not None
    scalars = study.latest.scalars()
    assert scalars == study.scalars()
    assert scalars["elixir/of_step"] == 2
    assert scalars["elixir/period_s"] == study.latest.period_s
    assert all(type(value) is float and value == value for value in scalars.values())
    assert "device_peak_bytes" not in " ".join(scalars), "a CPU has no peak of its own to tell"
    assert "forward" in str(study)


def test_bytes_are_those_that_the_ledger_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = Trained(planner="zero3_offload")
    trained.step()
    ledger = elixir.compilations(trained.model)[0]._planned._executor.ledger
    with elixir.observe(trained.model) as study:
        trained.step()
        before = ledger.bytes
        trained.step()
        moved = {key: nbytes - before[key] for key, nbytes in ledger.bytes.items() if nbytes > before[key]}
    assert study.latest is not None
    assert study.latest.moved_bytes.get("h2d", {}).keys() <= {"forward", "backward", "update"}
    for lane in study.latest.moved_bytes:
        assert study.latest.lane_bytes(lane) == sum(nbytes for (own, _), nbytes in moved.items() if own == lane)
    assert study.latest.lane_bytes("h2d") > 0


def test_a_second_observation_of_a_model_is_refused_until_the_first_stops() -> None:
    trained = Trained()
    with elixir.observe(trained.model), pytest.raises(elixir.NestedMeasurement, match="Stack is observed already"):
        elixir.observe(trained.compiled)
    elixir.observe(trained.model).stop()


def test_nothing_is_left_behind() -> None:
    trained = Trained()
    trained.step()
    before, threads = hooks(), threading.active_count()
    study = elixir.observe(trained.model)
    trained.step()
    assert hooks() == tuple(count + 1 for count in before)
    study.stop()
    study.stop()
    assert hooks() == before
    assert threading.active_count() == threads
    assert len(study.summaries) == 1
    trained.step()
    assert len(study.summaries) == 1


@pytest.mark.slow  # two compilations: 2 s
def test_the_bits_of_the_losses_are_those_without_observation() -> None:
    losses = [trained.step().item() for trained in [Trained()] for _ in range(3)]
    watched = Trained()
    with elixir.observe(watched.model):
        assert [watched.step().item() for _ in range(3)] == losses


def test_an_observation_does_not_keep_its_model() -> None:
    trained = Trained()
    trained.step()
    with elixir.observe(trained.model):
        trained.step()
        alive = []
        torch.utils.weak.weakref.finalize(trained.model, alive.append, "gone")
        del trained
        torch._dynamo.reset()
        gc.collect()
        assert alive == ["gone"]


class Event:
    """An event of a device: past once the test says so."""

    def __init__(self, at_s: float) -> None:
        self.at_s = at_s
        self.is_past = False

    def query(self) -> bool:
        return self.is_past

    def elapsed_time(self, other: "Event") -> float:
        assert self.is_past, "a moment was read before it was past"
        assert other.is_past, "a moment was read before it was past"
        return (other.at_s - self.at_s) * 1e3


def test_events_of_a_device_are_read_when_they_are_past_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = Trained()
    trained.step()
    made: list[Event] = []

    def moment(lanes: object) -> observation.Moment:
        made.append(Event(float(len(made))))
        return observation.Moment(0.0, made[-1])

    monkeypatch.setattr(observation, "moment_now", moment)
    study = elixir.observe(trained.model)
    for _ in range(3):
        trained.step()
    assert study.latest is None
    for event in made:
        event.is_past = True
    trained.step()
    assert [each.step for each in study.summaries] == [0, 1], "the end of step 2 is not past yet"
    for event in made:
        event.is_past = True
    study.stop()
    assert_adds_up(study, 4)
    assert all(each.period_s == round(each.period_s) > 0 for each in study.summaries)
