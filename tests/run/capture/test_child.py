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
def test_the_work_is_done_by_another_process(may_fork: None) -> None:
    with beside(os.getpid) as result:
        assert result() != os.getpid()


@can_fork
@pytest.mark.parametrize("is_hanging", [False, True], ids=["fails", "hangs"])
def test_what_the_child_cannot_do_is_done_here(
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
def test_the_child_ends_with_an_error_here(may_fork: None, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_without_a_second_core_it_is_done_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_layers, "_may_fork", lambda: False)
    with beside(os.getpid) as result:
        assert result() == os.getpid()
