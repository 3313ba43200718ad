"""Calls inside `with_deep_calls` find room for their frames, however deep they are."""

import resource
import sys

import pytest

from elixir_compile.graph.capture.tracing import with_deep_calls

NUM_CALLS = 1000


def leaf(first: int = 1, second: int = 2, third: int = 3) -> int:
    return first + second + third


def faults_of_calls_at(depth: int) -> int:
    """Return the page faults of a thousand calls of `leaf` below so many others."""
    if depth:
        return faults_of_calls_at(depth - 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(NUM_CALLS):
        leaf()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def most_faults() -> int:
    """Return the page faults at the depth that has most: of so many, some are at the end of a chunk of frames."""
    return max(faults_of_calls_at(depth) for depth in range(200))


@pytest.mark.skipif(sys.version_info >= (3, 14) or sys.platform != "linux", reason="seen in CPython 3.11 to 3.13")
def test_calls_across_the_end_of_a_frame_chunk_map_no_memory() -> None:
    assert most_faults() >= NUM_CALLS  # what is to be avoided does happen
    assert with_deep_calls(most_faults) < NUM_CALLS / 10


def test_deep_calls_pass_results_and_exceptions_through() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    assert with_deep_calls(lambda: "result") == "result"
    with pytest.raises(ZeroDivisionError):
        with_deep_calls(fail)
