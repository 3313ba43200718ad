"""`search.formulation.solver`: what C prints during a solve is dropped, and nothing else."""

import ctypes
import os
import threading
from typing import Any

import pytest
import scipy.optimize

from elixir_compile.search import plan
from elixir_compile.search.formulation import solver
from elixir_compile.search.formulation import solver as counted
from elixir_compile.search.formulation.solver import without_notes
from tests.pure.problems import tight_problem

C = ctypes.CDLL(None)


def printed_in_c(text: str) -> None:
    C.puts(text.encode())
    C.fflush(None)


@pytest.fixture(autouse=True)
def _glibc() -> None:
    if "glibc" not in (os.confstr("CS_GNU_LIBC_VERSION") or ""):
        pytest.skip("only of glibc can the stream be set")


def test_what_c_prints_in_a_solve_is_dropped_and_what_python_prints_appears(capfd: pytest.CaptureFixture[str]) -> None:
    printed_in_c("before")
    with without_notes():
        printed_in_c("a note of HiGHS")
        print("of this thread", flush=True)
        other = threading.Thread(target=print, args=("of another thread",), kwargs={"flush": True})
        other.start()
        other.join()
        os.write(1, b"of a file descriptor\n")
    printed_in_c("after")
    assert sorted(capfd.readouterr().out.splitlines()) == [
        "after",
        "before",
        "of a file descriptor",
        "of another thread",
        "of this thread",
    ]


def test_the_last_of_several_solves_gives_the_stream_back(capfd: pytest.CaptureFixture[str]) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def solve() -> None:
        with without_notes():
            begun.set()
            may_end.wait()

    other = threading.Thread(target=solve)
    other.start()
    assert begun.wait(60)
    with pytest.raises(ZeroDivisionError), without_notes():
        raise ZeroDivisionError
    printed_in_c("while another solves")
    may_end.set()
    other.join()
    printed_in_c("after both")
    assert capfd.readouterr().out == "after both\n"


def test_every_solver_of_a_search_is_quiet(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    solved: list[str] = []

    def noisy(name: str) -> Any:
        def solve(*args: Any, **kwargs: Any) -> Any:
            solved.append(name)
            printed_in_c(f"a note of {name}")
            return getattr(scipy.optimize, name)(*args, **kwargs)

        return solve

    monkeypatch.setattr(solver, "solve_milp", noisy("milp"))
    monkeypatch.setattr(solver, "linprog", noisy("linprog"))
    monkeypatch.setattr(counted, "linprog", noisy("linprog"))
    plan(tight_problem())
    assert set(solved) == {"milp", "linprog"}
    assert capfd.readouterr().out == ""
