"""A long compilation says how far it is, to a person who is looking."""

import logging

import pytest

from elixir_compile.ir import Phase
from elixir_compile.session import step_profiler
from elixir_compile.session.step_profiler import Progress


class Clock:
    """A clock that is set."""

    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return the clock of progress lines, which go to a terminal."""
    made = Clock()
    monkeypatch.setattr(step_profiler, "time", made)
    monkeypatch.setattr(step_profiler.sys.stderr, "isatty", lambda: True, raising=False)
    return made


def lines_at(shown: Progress, clock: Clock, seconds: list[float], caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what is said where region n of many is compiled at the n-th of `seconds`."""
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="elixir_compile"):
        for number, now_s in enumerate(seconds, start=1):
            clock.now_s = now_s
            shown.compiling(Phase.FORWARD, number, 40)
    return caplog.messages


def test_progress_comes_after_ten_seconds_and_then_every_five(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    found = lines_at(Progress(is_on=True), clock, [101, 109, 111, 113, 117], caplog)
    assert [line.split("of 40")[0].strip() for line in found] == ["compiling   region 3", "compiling   region 5"]
    assert "11 s" in found[0]


def test_seconds_of_a_later_compilation_count_from_its_own_beginning(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    shown = Progress(is_on=True)
    assert lines_at(shown, clock, [101], caplog) == []
    shown.compiled()
    assert lines_at(shown, clock, [5000, 5009], caplog) == []
    assert len(lines_at(shown, clock, [5011], caplog)) == 1


@pytest.mark.parametrize(("is_on", "is_terminal"), [(False, True), (True, False)])
def test_progress_is_not_logged_if_off_or_without_a_terminal(
    clock: Clock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, is_on: bool, is_terminal: bool
) -> None:
    monkeypatch.setattr(step_profiler.sys.stderr, "isatty", lambda: is_terminal, raising=False)
    assert lines_at(Progress(is_on=is_on), clock, [200], caplog) == []
