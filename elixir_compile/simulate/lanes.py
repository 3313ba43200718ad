"""When each lane is free and each transfer under way ends, while the actions of a step are carried out.

An update that the host runs beside the step is waited for by whoever reads its bucket: the copy of a gather, and
compute only where it waits for that; a region where the parameters are on the device. Such copies, and updated
parameters that travel back to the device, take their link in the order in which they arrive there, between the other
copies of the step.
"""

from bisect import insort
from dataclasses import dataclass, field
from typing import NamedTuple

from elixir_compile.ir.bucket import Placement
from elixir_compile.ir.kinds import Lane, Tier
from elixir_compile.ir.record import Span
from elixir_compile.simulate.prices import Prices


class Arrival(NamedTuple):
    """Updated parameters that wait for their link to the device; in the order of time."""

    since_s: float
    bucket: str
    is_gathered: bool
    """Whether compute waits for a gather of them; else whoever reads them does."""


@dataclass(slots=True, kw_only=True)
class Lanes:
    """Seconds count from where the step began."""

    price: Prices
    spans: list[Span] | None
    free_s: dict[Lane, float] = field(default_factory=lambda: dict.fromkeys(Lane, 0.0))
    ready_s: dict[str, float] = field(default_factory=dict)
    updating_s: dict[str, float] = field(default_factory=dict)
    """When each bucket may be read again whose update runs beside the step."""
    arriving: list[Arrival] = field(default_factory=list)
    """First come first."""
    memory_s: float = 0.0
    """Seconds in which host memory carries all that was copied and updated by the host, at its full rate."""
    stalled_s: float = 0.0
    """Seconds that compute waited for updates."""

    def occupy(self, lane: Lane, label: str, after_s: float, seconds: float) -> float:
        """Take the lane for `seconds`, not before `after_s`; return when it ends."""
        resource = self.price.lane_of[lane]
        start_s = max(self.free_s[resource], after_s)
        end_s = start_s + seconds
        self.free_s[resource] = end_s
        if self.spans is not None:
            self.spans.append(Span(lane=lane, label=label, start_s=start_s, end_s=end_s))
        return end_s

    def gather(self, bucket: str, placement: Placement) -> None:
        """From the host where it lives there, behind its update, then from the other ranks where there are any."""
        is_copied = placement.param is not Tier.DEVICE
        if is_copied and self.updating_s.get(bucket, 0.0) > self.free_s[Lane.COMPUTE] and self._may_be_late(bucket):
            insort(self.arriving, Arrival(self.updating_s.pop(bucket), bucket, True))
            return
        if self.updating_s or self.arriving:
            self.await_update(bucket)
        ready_s = self.free_s[Lane.COMPUTE]
        if is_copied:
            self._copy(bucket)
            ready_s = self._to_device(f"gather {bucket}", ready_s, self.price.h2d_s[bucket])
        if self.price.gather_s[bucket]:
            ready_s = self.occupy(Lane.GATHER, f"gather {bucket}", ready_s, self.price.gather_s[bucket])
        self.ready_s[bucket] = ready_s

    def reduce(self, bucket: str) -> None:
        """Over the parts, then over their copies; nothing to do on one rank. Of what each rank has whole, compute waits
        for it."""
        price, ends_s = self.price, self.free_s[Lane.COMPUTE]
        if price.reduce_s[bucket]:
            ends_s = self.occupy(Lane.REDUCE, f"reduce {bucket}", ends_s, price.reduce_s[bucket])
        if price.average_s.get(bucket):
            ends_s = self.occupy(Lane.REDUCE, f"average {bucket}", ends_s, price.average_s[bucket])
        if price.gather_s[bucket]:
            self.ready_s[f"{bucket}.grad"] = ends_s
        else:
            self._hold_compute(ends_s)

    def offload(self, what: str) -> None:
        """A gradient goes once it is shared out, activations at once."""
        after_s = max(self.free_s[Lane.COMPUTE], self.ready_s.get(what, 0.0))
        owner = what if what in self.price.d2h_s else what.removesuffix(".grad")
        self._copy(owner)
        self.ready_s[what] = self.occupy(Lane.D2H, f"offload {what}", after_s, self.price.d2h_s[owner])

    def prefetch(self, group: str) -> None:
        """Activations come back from where their offload has put them."""
        after_s = max(self.free_s[Lane.COMPUTE], self.ready_s.get(group, 0.0))
        self._copy(group)
        self.ready_s[group] = self._to_device(f"prefetch {group}", after_s, self.price.h2d_s[group])

    def wait(self, what: str) -> None:
        if self.arriving:
            self._stall(self._land_up_to(what))
        self._hold_compute(self.ready_s.pop(what, 0.0))

    # Updates.

    def update_on_device(self, bucket: str) -> None:
        """Where its state lives there."""
        self.occupy(Lane.COMPUTE, f"update {bucket}", 0.0, self.price.device_update_s[bucket])

    def stream(self, bucket: str, placement: Placement) -> None:
        """State travels to the device, and what else is not there; after the update it travels back, and only then goes
        compute on."""
        there_s, back_s = self.price.stream_s[bucket, placement.param]
        self.memory_s += self.price.memory.stream_s.get((bucket, placement.param), 0.0)
        ends_s = self.occupy(Lane.H2D, f"gather {bucket}.state", self.free_s[Lane.COMPUTE], there_s)
        ends_s = self.occupy(Lane.COMPUTE, f"update {bucket}", ends_s, self.price.device_update_s[bucket])
        self._hold_compute(self.occupy(Lane.D2H, f"offload {bucket}.state", ends_s, back_s))

    def update_on_host(self, bucket: str, placement: Placement, after_s: float) -> None:
        """Let the host update it from `after_s` on; of parameters on the device the gradient goes there first."""
        if self.is_staged(placement):
            self._copy(bucket)
            after_s = self.occupy(Lane.D2H, f"offload {bucket}.grad", after_s, self.price.d2h_s[bucket])
        update_s = self.price.off_device_update_s(bucket, placement.optim)
        self.memory_s += self.price.memory.update_s.get(bucket, 0.0)
        ends_s = self.occupy(Lane.HOST, f"update {bucket}", after_s, update_s)
        if self.is_staged(placement):
            insort(self.arriving, Arrival(ends_s, bucket, False))
        else:
            self.updating_s[bucket] = ends_s

    def is_staged(self, placement: Placement) -> bool:
        """Whether an update on the host takes copies of gradient and parameter there and back."""
        return placement.param is Tier.DEVICE and not self.price.is_one_memory

    def await_update(self, bucket: str) -> None:
        """Let compute, and all that is issued from now on, wait for the update of `bucket`."""
        self._land_up_to(bucket)
        self._stall(self.updating_s.pop(bucket, 0.0))

    def await_all_updates(self) -> None:
        """Let compute wait for every update."""
        while self.arriving:
            self._land()
        for bucket in tuple(self.updating_s):
            self.await_update(bucket)

    def begin_again(self) -> float:
        """Let the seconds count from where compute is now, and return how many those were."""
        passed_s = self.free_s[Lane.COMPUTE]
        self.memory_s = 0.0
        self.free_s = {lane: max(free_s - passed_s, 0.0) for lane, free_s in self.free_s.items()}
        self.ready_s.clear()
        self.updating_s = {name: end_s - passed_s for name, end_s in self.updating_s.items() if end_s > passed_s}
        self.arriving = [arrival._replace(since_s=arrival.since_s - passed_s) for arrival in self.arriving]
        return passed_s

    def _copy(self, what: str) -> None:
        """Let host memory carry one copy."""
        self.memory_s += self.price.memory.copy_s.get(what, 0.0)

    def _hold_compute(self, until_s: float) -> None:
        self.free_s[Lane.COMPUTE] = max(self.free_s[Lane.COMPUTE], until_s)

    def _stall(self, until_s: float) -> None:
        """Let compute wait for an update."""
        self.stalled_s += max(0.0, until_s - self.free_s[Lane.COMPUTE])
        self._hold_compute(until_s)

    def _to_device(self, label: str, after_s: float, seconds: float) -> float:
        while self.arriving and self.arriving[0].since_s <= after_s:
            self._land()
        return self.occupy(Lane.H2D, label, after_s, seconds)

    def _land_up_to(self, bucket: str) -> float:
        """Let what arrives up to `bucket` travel; return when `bucket` was updated, 0 where it does not arrive."""
        since_s = 0.0
        while any(arrival.bucket == bucket for arrival in self.arriving):
            since_s = self._land()
        return since_s

    def _land(self) -> float:
        since_s, bucket, is_gathered = self.arriving.pop(0)
        self._copy(bucket)
        ends_s = self.occupy(Lane.H2D, f"gather {bucket}", since_s, self.price.h2d_s[bucket])
        (self.ready_s if is_gathered else self.updating_s)[bucket] = ends_s
        return since_s

    def _may_be_late(self, bucket: str) -> bool:
        """Whether compute goes on where a gather is issued: not where its copy is work for compute, nor on several
        ranks, which share buckets in one order."""
        return self.price.lane_of[Lane.H2D] is not Lane.COMPUTE and not self.price.gather_s[bucket]
