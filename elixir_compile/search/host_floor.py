"""A bound from below for the host bytes of every placement, so that depths at which none fits are not searched.

Placements that fit the device at one op are more than those that fit it everywhere, and with a price `p` for each
device byte beyond the budget there they are chosen bucket by bucket (Lagrangian relaxation, Geoffrion 1974):

    floor = max over ops and p of   away + sum over buckets of min over levels (host + p * device)  - p * free
"""

import numpy as np

from elixir_compile.search.judge import Evaluator

_PRICES = np.concatenate([[0.0], np.geomspace(1 / 16, 16, 33)])
"""Host bytes per device byte. A bucket gives 1 to about 4 device bytes for each of its bytes on the host."""


def host_floor_bytes(evaluator: Evaluator) -> int:
    """Return host bytes below which no placement at the evaluator's modes fits the device."""
    facts, own_bytes = evaluator.facts, evaluator.memory.own_bytes()
    host = np.full(own_bytes.shape[:2], np.inf)  # what is no choice is never the least
    for bucket, levels in enumerate(facts.choices):
        for level in levels:
            host[bucket, level] = evaluator.host_bytes_of(bucket, level)
    start = sum(own_bytes[bucket, level] for bucket, level in enumerate(facts.start_levels))
    least = sum(own_bytes[bucket, level] for bucket, level in enumerate(evaluator.min_memory_levels))
    rest_bytes = evaluator.memory.rest_bytes
    segments = {int((rest_bytes + own).argmax()) for own in (start, least)}
    floor = 0.0
    for segment in segments:
        free_bytes = facts.problem.budget_bytes - int(rest_bytes[segment])
        # prices x buckets x levels
        priced = host + _PRICES[:, None, None] * own_bytes[None, :, :, segment]
        floor = max(floor, float((priced.min(axis=2).sum(axis=1) - _PRICES * free_bytes).max()))
    return evaluator.away_bytes + int(floor)
