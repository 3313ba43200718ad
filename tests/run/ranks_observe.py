"""What `test_surroundings` asks of real ranks that are observed; each function runs on all of them at once."""

from typing import Any

import elixir_compile as elixir
from tests.run.ranks_models import batches
from tests.run.ranks_training import pair_of


def observes(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Train as many steps as there are batches, observed and not; return the losses of both and what was seen."""
    plain, seen = (pair_of("odd", [world_size], planner="zero3_offload", update="after_backward") for _ in "ab")
    expected = [plain.own_step(batch)[0] for batch in batches()]
    with elixir.observe(seen.compiled, folder, full=(1,), counters_hz=0) as study:
        found = [seen.own_step(batch)[0] for batch in batches()]
    (full,) = study.full_steps
    return {
        "losses": [expected, found],
        "apart_s": max(abs(sum(each.seconds_s.values()) - each.period_s) for each in study.summaries),
        "ranks": [each.rank for each in study.summaries],
        "spans": {lane: sum(span.nbytes for span in full.record.spans if span.lane == lane) for lane in _LANES},
        "bytes": {lane: full.summary.lane_bytes(lane) for lane in _LANES},
    }


_LANES = ("gather", "reduce", "h2d", "d2h")
