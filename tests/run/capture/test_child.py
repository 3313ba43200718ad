"""Work beside this process gives what it gives here, also if the child fails, hangs, or cannot be."""

import os
import threading
import time

import pytest

from elixir_compile.base import process as control_groups
from elixir_compile.tools.preview import few_layers
from elixir_compile.tools.preview.few_layers import beside

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


@can_fork
def test_a_cpu_quota_counts_as_cores_when_a_child_is_considered(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 3 processes running, half of 8 cores are idle, but not half of a quota of 2."""
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    monkeypatch.setattr(os, "getloadavg", lambda: (3.0, 3.0, 3.0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.setattr(control_groups, "quota_cores", lambda memberships, groups: None)
    assert few_layers._may_fork()
    monkeypatch.setattr(control_groups, "quota_cores", lambda memberships, groups: 2.0)
    assert not few_layers._may_fork()


def test_without_a_second_core_there_is_no_child_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_layers, "_may_fork", lambda: False)
    with beside(os.getpid) as result:
        assert result() == os.getpid()
