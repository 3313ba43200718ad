"""The labels and bytes of a measured step on a second device, where updates by the host copy what they read."""

import pytest
import torch

import elixir_compile as elixir
from elixir_compile.graph.capture.modules import model_of
from elixir_compile.ir import Lane, Tally, Update, tallies
from elixir_compile.step.seconds import simulate
from tests.device import emulated
from tests.run.training import plain_step
from tests.run.updating import hybrid_run, ladder, rows

DEVICE = torch.device(emulated.NAME, 0)


@pytest.mark.parametrize(
    ("home", "update", "share"),
    [
        ("split", Update.ACROSS_STEPS, 0.0),
        pytest.param("split", Update.AFTER_BACKWARD, 0.5, marks=pytest.mark.slow),
        pytest.param("split", Update.IN_BACKWARD, 0.0, marks=pytest.mark.slow),
        pytest.param("host", Update.ACROSS_STEPS, 0.5, marks=pytest.mark.slow),
        pytest.param("device", Update.AFTER_BACKWARD, 0.0, marks=pytest.mark.slow),
    ],
)
def test_a_measured_step_has_the_labels_and_the_bytes_of_its_plan(home: str, update: Update, share: float) -> None:
    model, batches = ladder().to(DEVICE), [batch.to(DEVICE) for batch in rows(4)]
    with hybrid_run(model, batches[0], home=home, update=update, share=share) as run:
        run.train(batches[:3])
        measured = elixir.measure_step(lambda: plain_step(run.compiled, run.optimizer, batches[3]))
        active = model_of(run.model).graphs[-1].active
    found, wanted = tallies(measured.spans), tallies(simulate(active.graph, active.plan, active.problem.cluster).spans)
    assert dict(found) == dict(wanted)
    if (home, share) == ("split", 0.0):
        bucket = active.plan.buckets[0]
        both = Tally(1, bucket.nbytes)
        assert found[Lane.D2H, f"offload {bucket.id}"] == found[Lane.D2H, f"offload {bucket.id}.grad"] == both
        assert found[Lane.H2D, f"gather {bucket.id}"] == both
    assert {span.lane for span in measured.spans if span.issued_s is not None} >= {Lane.COMPUTE}
