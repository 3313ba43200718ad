"""A plan says that memory is unused while transfers are exposed, if its search ended with a gap."""

from dataclasses import replace

from elixir_compile.search import plan
from elixir_compile.search.reasons import unused_memory
from tests.pure.problems import tight_problem


def test_memory_unused_while_transfers_are_exposed_is_reported_with_the_gap() -> None:
    made = plan(tight_problem(), "zero3_offload")
    free = max(bucket.flat_nbytes for bucket in made.buckets)
    exposed = replace(made.prediction, exposed_s=0.2 * made.prediction.step_s)
    short = replace(made, budget_bytes=exposed.device_peak_bytes + free, bound_s=0.9 * exposed.step_s)
    (told,) = unused_memory(short, exposed)
    assert told.subject == "memory"
    assert "are unused while" in told.choice
    assert "a gap of 10.0%" in told.because
    assert not unused_memory(short, replace(exposed, exposed_s=0.0))
    assert not unused_memory(replace(short, bound_s=0.995 * exposed.step_s), exposed)
    assert not unused_memory(replace(short, budget_bytes=short.budget_bytes - 1), exposed)
    assert not unused_memory(replace(short, bound_s=None), exposed)
