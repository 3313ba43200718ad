"""A search counts the seconds that its own thread computes, and a quarter of the wall's."""

import subprocess
import sys
import time

import pytest

from elixir_compile.search import plan
from elixir_compile.search.evaluator import Clock, deadline_in
from tests.pure.search.test_best import instances


class Seconds:
    """Seconds of a thread and of the wall, as a test sets them."""

    own_s = wall_s = 100.0

    def thread_time(self) -> float:
        return self.own_s

    def monotonic(self) -> float:
        return self.wall_s


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> Seconds:
    made = Seconds()
    monkeypatch.setattr(time, "thread_time", made.thread_time)
    monkeypatch.setattr(time, "monotonic", made.monotonic)
    return made


def test_a_busy_machine_ends_no_search_early_and_no_search_runs_for_more_than_four_times_its_seconds(
    seconds: Seconds,
) -> None:
    end = deadline_in(10.0)
    seconds.own_s, seconds.wall_s = 109.0, 130.0
    assert not end.is_over
    seconds.wall_s = 141.0
    assert end.is_over
    seconds.own_s, seconds.wall_s = 111.0, 111.0
    assert end.is_over


def test_the_time_limit_of_a_solver_is_wall_time(seconds: Seconds) -> None:
    end = Clock().until(10.0)
    seconds.own_s, seconds.wall_s = 104.0, 104.0
    assert end.wall_s == pytest.approx(6.0)
    seconds.wall_s = 112.0
    assert end.wall_s == pytest.approx(6.0 * 3.0)
    seconds.own_s = 115.0
    assert end.wall_s == 0.0


def test_a_busy_process_beside_the_search_does_not_change_its_plan() -> None:
    _, problem = next(instances(1, num_layers=6))
    alone = plan(problem)
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            beside = plan(problem)
        finally:
            busy.kill()
    assert beside == alone
