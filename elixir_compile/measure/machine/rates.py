"""Measure all rates of a machine, each as the median of several rounds.

Other programs load the machine in bursts of seconds, longer than a measurement, so all repeats of a measurement may be
wrong. Rounds spread the repeats of each measurement over the full time.
"""

import statistics
from collections.abc import Callable

import torch
from torch import distributed

from elixir_compile.measure.machine.copies import measure_copies
from elixir_compile.measure.machine.kernels import measure_kernels, measure_products
from elixir_compile.measure.machine.updates import measure_updates

Progress = Callable[[str, float], None]
"""Called with the name of the present measurement, and the share of the time that is over, 0 to 1."""

_STAGES = (
    ("copies", 0.4, measure_copies),
    ("updates", 0.25, measure_updates),
    ("matrix products", 0.25, measure_products),
    ("kernels", 0.1, measure_kernels),
)
"""Name, share of the time, measurement. Copies have the largest share: they vary most."""
_ROUND_S = 5.0
"""Seconds of a round. A round takes at least 3 s, with one repeat of each measurement."""
_MAX_ROUNDS = 5


def measure_rates(device: torch.device, seconds: float, progress: Progress) -> dict[str, float]:
    """Return the rates of all stages by name, each the median of an odd number of rounds."""
    num_rounds = min(max(int(seconds / _ROUND_S), 1), _MAX_ROUNDS)
    num_rounds -= 1 - num_rounds % 2
    rounds: list[dict[str, float]] = []
    for number in range(num_rounds):
        found: dict[str, float] = {}
        over = 0.0
        for name, share, measure in _STAGES:
            progress(name, (number + over) / num_rounds)
            if distributed.is_available() and distributed.is_initialized():
                # All ranks measure the same rate at the same time, so that they share links and memory as in training.
                distributed.barrier()
            found.update(measure(device, share * seconds / num_rounds))
            over += share
        rounds.append(found)
    return {name: statistics.median(rates[name] for rates in rounds) for name in rounds[0]}
