"""Work beside this process gives what it gives here, also if the child fails, hangs, or cannot be."""

import os
import time

import pytest

from elixir_compile.api.preview import few_layers
from elixir_compile.api.preview.few_layers import beside

can_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot be forked here")


@pytest.fixture
def may_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of this process may have left threads, and the machine may have one core."""
    monkeypatch.setattr(few_layers, "_may_fork", lambda: True)


@can_fork
def test_beside_runs_the_function_in_a_child_process(may_fork: None) -> None:
    with beside(os.getpid) as result:
        assert result() != os.getpid()


@can_fork
@pytest.mark.parametrize("is_hanging", [False, True], ids=["fails", "hangs"])
def test_if_the_child_fails_or_hangs_the_parent_does_the_work(
    is_hanging: bool, may_fork: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(few_layers, "_PATIENCE_S", 0.2)
    here = os.getpid()

    def work() -> str:
        if os.getpid() != here:
            time.sleep(60.0 if is_hanging else 0.0)
            raise ValueError("the child fails")
        return "done here"

    began_s = time.monotonic()
    with beside(work) as result:
        assert result() == "done here"
    assert time.monotonic() - began_s < 30.0


@can_fork
def test_an_exception_in_the_parent_ends_the_child(may_fork: None, monkeypatch: pytest.MonkeyPatch) -> None:
    children: list[int] = []
    fork = os.fork
    monkeypatch.setattr(os, "fork", lambda: children.append(fork()) or children[-1])

    def fail_beside() -> None:
        with beside(lambda: time.sleep(60.0)):
            raise KeyError

    with pytest.raises(KeyError):
        fail_beside()
    with pytest.raises(ChildProcessError):
        os.waitpid(children[0], 0)


def test_without_a_second_core_there_is_no_child_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_layers, "_may_fork", lambda: False)
    with beside(os.getpid) as result:
        assert result() == os.getpid()
