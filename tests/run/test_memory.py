"""What a step was measured to hold and to do, against what its plan says."""

from collections import Counter

import pytest
import torch

import elixir_compile as elixir
from elixir_compile.measure import measure_step
from tests.run.models import Stack, seeded, vectors
from tests.run.training import assert_offloads, by_elixir, by_torch, planned_peak_bytes

WIDTH = 512


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_the_measured_peak_is_the_planned_one_and_within_the_budget(inner: str) -> None:
    """Six blocks of 512: 52 MB of parameters, 159 MB more of gradients and moments."""
    # One batch for all steps: others, waiting, would be measured too.
    model, batches = seeded(Stack, WIDTH, 6), vectors(1, rows=256, width=WIDTH) * 4
    assert sum(param.numel() * param.element_size() for param in model.parameters()) > 50e6
    expected = by_torch(model).train(batches)
    unbudgeted = by_elixir(model, inner=inner).train(batches[:1])
    budget = int(0.6 * planned_peak_bytes(unbudgeted))
    del unbudgeted
    losses = torch.stack(expected.losses)
    del expected
    got = by_elixir(model, inner=inner, device_memory=budget)
    del model
    got.train(batches[:3])
    record = measure_step(lambda: got.train(batches[3:]), device="cpu")
    assert_offloads(got)
    plan = elixir.compilations(got.model)[0].plan
    predicted = plan.prediction.device_peak_bytes
    assert predicted <= budget
    assert record.device_peak_bytes <= budget
    assert 0.97 * record.device_peak_bytes <= predicted <= 1.1 * record.device_peak_bytes
    planned = Counter(action.verb.value for action in plan.schedules[0].actions)
    for verb in ("gather", "release", "reduce", "offload", "update"):
        assert record.counts.get(verb, 0) == planned[verb], verb
    if inner == "aot_eager":
        assert torch.equal(torch.stack(got.losses), losses)
    else:
        # Kernels round differently, and Adam divides by the root of small second moments: it grows step by step.
        torch.testing.assert_close(torch.stack(got.losses), losses, rtol=1e-2, atol=0)
        torch.testing.assert_close(got.losses[0], losses[0], rtol=1e-5, atol=0)
