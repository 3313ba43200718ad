"""The clocks see each missing wait of the lanes, and no race where none is missing, at every moment of the copies."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from elixir_compile.ir import Update
from elixir_compile.runtime.lanes import Accelerator, StreamLane
from tests.cuda_standin import device as standin
from tests.run.models import Stack, seeded, vectors
from tests.run.training import assert_offloads, assert_same, by_elixir, by_torch, tight_bytes
from tests.run.updating import hybrid_run, ladder, rows

DEVICE = torch.device("cuda", 0)
_beside = StreamLane.beside_compute

REMOVED: dict[str, tuple[type, str, Callable[..., Any]]] = {
    "compute for an event": (Accelerator, "compute_waits", lambda lanes, event: None),
    "a copy for compute": (StreamLane, "behind_compute", lambda lane, after=None: lane.beside_compute(after)),
    "a copy for an event": (StreamLane, "beside_compute", lambda lane, after=None: _beside(lane)),
    "the host for an event": (Accelerator, "host_waits", lambda lanes, event: None),
}


@pytest.mark.parametrize("kind", [standin.LATE, standin.EARLY])
@pytest.mark.parametrize("removed", REMOVED)
def test_a_wait_that_is_missing_is_a_race(removed: str, kind: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given = [batch.to(DEVICE) for batch in rows(6)]
    with (
        standin.policy(kind),
        hybrid_run(ladder().to(DEVICE), given[0], home="host", update=Update.IN_BACKWARD) as run,
    ):
        with standin.ordered():
            run.train(given[:3])
        before = standin.count("races")
        with monkeypatch.context() as patch:
            patch.setattr(*REMOVED[removed])
            run.train(given[3:])
        assert standin.count("races") > before


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_no_moment_of_the_copies_changes_a_bit(seed: int) -> None:
    model, given = seeded(Stack).to(DEVICE), [batch.to(DEVICE) for batch in vectors(4)]
    expected = by_torch(model).train(given)
    budget = tight_bytes(model, given[0])
    with standin.policy(standin.RANDOM, seed), standin.ordered():
        got = by_elixir(model, device_memory=budget).train(given)
        assert_offloads(got)
        assert_same(expected, got)
