"""Problems whose answer moves buckets, whatever planner is asked."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from elixir_compile.search import Problem, evaluator, plan
from elixir_compile.search import planner as host_memory
from elixir_compile.step import timeline
from tests.pure import memory_walk
from tests.pure.search.test_planner import chain_of, problem_of


def tight_problem(share: float = 0.45) -> Problem:
    """Return a chain of six layers under `share` of the bytes that it takes with everything on the device."""
    problem = problem_of(chain_of(6))
    kept = plan(problem, "keep_all")
    return replace(problem, budget_bytes=int(share * kept.prediction.device_peak_bytes))


@contextmanager
def disk_staging(nbytes: int) -> Iterator[None]:
    """Inside, the buffers through which state on disk passes take `nbytes`: those that there are are larger than all
    of these problems."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (timeline, host_memory, evaluator, memory_walk):
            patch.setattr(module, "disk_staging_bytes", lambda buckets: nbytes if list(buckets) else 0)
        yield
