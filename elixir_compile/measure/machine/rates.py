"""Every rate of one machine, as the median of several rounds.

What else runs on the machine comes in bursts of seconds, longer than one measurement: within one burst the median of
its repeats is as wrong as each of them. Rounds spread the repeats of everything over the whole time.
"""

import statistics
from collections.abc import Callable

import torch
from torch import distributed

from elixir_compile.measure.machine.copies import measure_copies
from elixir_compile.measure.machine.kernels import measure_kernels, measure_products
from elixir_compile.measure.machine.updates import measure_updates

Progress = Callable[[str, float], None]
"""Called with what is measured now, and the share of the time that is over, 0 to 1."""

_STAGES = (
    ("copies", 0.4, measure_copies),
    ("updates", 0.25, measure_updates),
    ("matrix products", 0.25, measure_products),
    ("kernels", 0.1, measure_kernels),
)
"""Name, share of the time, measurement. Copies have the largest share: they vary most."""
_ROUND_S = 5.0
"""A round costs 3 s, however little time it gets: in less than this it would be one repeat of each thing."""
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
                # Ranks measure the same thing at the same time, so that what they share is shared as in training.
                distributed.barrier()
            found.update(measure(device, share * seconds / num_rounds))
            over += share
        rounds.append(found)
    return {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
