"""The seconds of a step and the room for state of each rank, for any number of rows in any way to run them.

```text
  step    sum_k max(AG_k, F_k, offloads_k) + sum_k max(AG_k + RS_k, B_k, prefetches_k) + update
  room    device - activations - gathered parameters + host

          F_k, B_k     seconds of lap k of the forward and of the backward
          AG_k, RS_k   seconds of the collectives of its parameters and gradients
```

The maximum over ranks of these sums is a lower bound of the step in which ranks wait for each other lap by lap. A plan
treats some layers in one way and others in another: between two ways, seconds and bytes are interpolated.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from elixir_compile.ir.cost import collective_s
from elixir_compile.ir.hardware import Cluster
from elixir_compile.search.shares.assign import Offers
from elixir_compile.search.shares.costs import LEAST_ROWS, Way

_Numbers = npt.NDArray[np.float64]
_SHARES = tuple(Fraction(eighths, 8) for eighths in range(1, 9))
"""The shares of layers whose activations are not kept that are offered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The memory of one rank for the step."""

    device_bytes: int
    """Bytes of the device, less what is used outside of the step."""
    host_bytes: int
    """Bytes of the host that this rank may use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The training state of all ranks together."""

    num_elements: int
    """Elements of the trained parameters."""
    nbytes: int
    """Bytes of parameters, gradients and optimizer state."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MixedWay:
    """A way to run the step in which the activations of a share of the layers are not kept."""

    kept: Way
    treated: Way
    """The way that treats all layers, in as many micro-batches; `kept` itself if the share is 0."""
    share: Fraction = Fraction(0)

    @property
    def micro_batches(self) -> int:
        return self.kept.micro_batches

    @property
    def text(self) -> str:
        """The treatment of activations in words, such as `recomputed in 3/8`."""
        text = self.treated.treatment.text
        return text if self.share in (0, 1) else f"{text} in {self.share}"

    @property
    def in_flight_bytes(self) -> float:
        """Bytes of gathered parameters and of gradients on the device beside activations and state."""
        return max(self.kept.in_flight_bytes, self.treated.in_flight_bytes)

    @property
    def away_each(self) -> float:
        """Bytes of one row that are on the host between forward and backward."""
        return float(self.share) * self.treated.away_each

    def peak_bytes(self, rows: Sequence[int]) -> _Numbers:
        """Return the most live bytes of inputs and activations with each number of `rows`: never too few, as the peaks
        of both ways may be at other ops."""
        return self.mixed(self.kept.peak_bytes(rows), self.treated.peak_bytes(rows))

    def mixed(self, kept: _Numbers, treated: _Numbers) -> _Numbers:
        """Return the figures of this way between those of both ways."""
        return (1 - float(self.share)) * kept + float(self.share) * treated


def mixed_ways(ways: Sequence[Way]) -> tuple[MixedWay, ...]:
    """Return `ways`, first those that keep all activations, and mixed ways between them: each treatment of some layers,
    beside layers whose activations are kept."""
    kept = {way.micro_batches: way for way in ways if not way.treatment.activations}
    found: list[MixedWay] = []
    for way in ways:
        base = kept[way.micro_batches]
        if way is base:
            found.append(MixedWay(kept=base, treated=base))
        else:
            found += [MixedWay(kept=base, treated=way, share=share) for share in _SHARES]
    return tuple(found)


def offers_of(
    ways: Sequence[MixedWay], rows: Sequence[int], cluster: Cluster, budget: Budget, state: State, num_ranks: int
) -> Offers:
    """Return the offers of a rank that sees `cluster`, for each number of `rows` in each of `ways`.

    The update is priced for an equal part of the state: the part on the device as far as there is room, the rest on
    the host.
    """
    counts = [count or LEAST_ROWS for count in rows]
    shape = (len(rows), len(ways))
    step_s, busy_s = np.full(shape, np.inf), np.full(shape, np.inf)
    room_bytes = np.full(shape, -1, dtype=np.int64)
    pure = {id(way): way for mixed in ways for way in (mixed.kept, mixed.treated)}
    figures = {name: _figures(way, counts, cluster) for name, way in pure.items()}
    for column, way in enumerate(ways):
        kept, treated = figures[id(way.kept)], figures[id(way.treated)]
        lap_s, laps_s, peak_bytes = (way.mixed(*pair) for pair in zip(kept, treated, strict=True))
        on_device = budget.device_bytes - way.in_flight_bytes - peak_bytes
        on_host = budget.host_bytes - np.asarray(counts, dtype=float) * way.away_each
        update = _update_s(on_device, cluster, state, num_ranks)
        is_offered = np.array([count % way.micro_batches == 0 and count >= LEAST_ROWS for count in counts])
        fits = (on_device >= 0) & (on_host >= 0)
        room = np.where(fits, on_device + on_host, np.minimum(on_device, on_host).clip(max=-1))
        step_s[:, column] = np.where(is_offered, laps_s + update, np.inf)
        busy_s[:, column] = np.where(is_offered, lap_s + update, np.inf)
        room_bytes[:, column] = np.where(is_offered, room, -1).astype(np.int64)
    return Offers(step_s=step_s, busy_s=busy_s, room_bytes=room_bytes)


def _figures(way: Way, counts: Sequence[int], cluster: Cluster) -> tuple[_Numbers, _Numbers, _Numbers]:
    """Return for each number of rows the seconds of compute of all laps, the same with the transfers that a lap waits
    for, and the most bytes of activations."""
    lap_s = way.lap_s(counts, cluster)
    gather_s = np.array([collective_s(int(nbytes), cluster) for nbytes in way.gathered_bytes])
    reduce_s = np.array([collective_s(int(nbytes), cluster) for nbytes in way.reduced_bytes])
    moves = np.asarray(counts, dtype=float)[:, None] * way.moves_each
    link_s = moves / np.where(way.is_backward, cluster.h2d.bytes_per_s, cluster.d2h.bytes_per_s)
    others_s = np.maximum(np.where(way.is_backward, gather_s + reduce_s, gather_s), link_s)
    return lap_s.sum(axis=1), np.maximum(lap_s, others_s).sum(axis=1), way.peak_bytes(counts)


def _update_s(on_device: _Numbers, cluster: Cluster, state: State, num_ranks: int) -> _Numbers:
    """Return the seconds of the update of an equal part of the state, if `on_device` bytes of it fit the device."""
    part_bytes = state.nbytes / num_ranks
    share = np.clip(on_device / part_bytes, 0.0, 1.0) if part_bytes else np.ones_like(on_device)
    elements = state.num_elements / num_ranks
    host_per_s = cluster.host.update_elements_per_s / cluster.num_local_ranks
    return elements * (share / cluster.device.update_elements_per_s + (1 - share) / host_per_s)
