"""A step in micro-batches moves as much as a step on the whole batch. A loop moves as much in each micro-batch."""

from typing import Any

import torch

import elixir_compile as elixir
from tests.run.micro_batches.stepping import Rows, batch_of, compiled, divided_regions

VERBS = ("gather", "release", "reduce", "offload")


def counts_of(step: Any, parts: int) -> dict[str, int]:
    """Return how often each verb runs in a step that passes a batch to `step` in `parts` slices of rows."""

    def run() -> None:
        for slices in zip(*(tensor.chunk(parts) for tensor in batch_of(16)), strict=True):
            step(*slices).backward()

    run()
    record = elixir.measure_step(run)
    return {verb: record.counts.get(verb, 0) for verb in VERBS}


def test_transfers_are_as_many_for_each_number_of_micro_batches_and_a_loop_has_as_many_for_each():
    counts = {}
    for number in (1, 2, 8):
        torch._dynamo.reset()
        model = Rows()
        step = compiled(model, number, planner="zero3_offload")
        counts[number] = counts_of(step, 1)
        assert set(divided_regions(step)) == {number}
    assert all(counts[1].values())
    assert counts[1] == counts[2] == counts[8]
    torch._dynamo.reset()
    model = Rows()
    of_loop = counts_of(compiled(model, 1, planner="zero3_offload", accumulate=True), 8)
    assert of_loop == {verb: 8 * times for verb, times in counts[8].items()}
