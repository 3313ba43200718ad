"""Run the actions of a schedule: each prepared model has one executor.

A program (see `graph.rewrite`) calls the verbs of `Executor` in schedule order. `gather` and `offload` start a copy and
return a `Transfer`; `wait` takes the transfer. The executor's `PlacedBuckets` own every gathered copy, and its
`GradientAccumulator` owns every gradient from its op to `param.grad`. No other object holds them, so `abandon` can
clean up after a program that raised an exception.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from elixir_compile import compat
from elixir_compile.base.errors import IncompleteStep, StaleParameters, UnsupportedBackward
from elixir_compile.graph.capture.modules import EagerReads, Sites
from elixir_compile.graph.ops.optimizers import PlainState
from elixir_compile.graph.ops.registry import Slot, forget, new_slot, slot_of
from elixir_compile.graph.ops.shards import TensorAxis, parts_of
from elixir_compile.graph.rewrite.regions import Layout
from elixir_compile.ir import BucketId, BucketRef, Kept, Lane, Verb, label
from elixir_compile.runtime.distributed.control import Peers
from elixir_compile.runtime.distributed.ranks import Ranks
from elixir_compile.runtime.distributed.sharded import ShardReduce
from elixir_compile.runtime.gathers import Gathers, StepCalls
from elixir_compile.runtime.gradients import GradientAccumulator, Reducers
from elixir_compile.runtime.lanes import Transfer, lanes_for
from elixir_compile.runtime.placed import PlacedBuckets
from elixir_compile.runtime.published import refuse_hooks
from elixir_compile.runtime.recording import Phases, ledger_for
from elixir_compile.runtime.saved import InParts, LeavingView, SavedActivations, Slicing, number_of

Program = Callable[[list[Any]], Any]
"""A program of a graph: it empties the list of its inputs."""


class Executor:
    """The parameters of a model, their homes, and the verbs of its programs, on `device`.

    It knows no graphs and no plans but the buckets in force: `session.model.ManagedModel` owns it and them. It has
    more than 20 methods, because programs call their verbs on one object.
    """

    def __init__(
        self,
        device: torch.device,
        name: str,
        ranks: Ranks | None = None,
        *,
        tensor_axis: TensorAxis | None = None,
        peers: Peers | None = None,
    ) -> None:
        """`name` is the name of the model in messages; `ranks` share its parameters, None if no others do.

        `tensor_axis` is that along which parameters were cut before. `peers` are those of an executor before this one,
        if there was one; otherwise all ranks make this at the same point.
        """
        self.device = device
        self.name = name
        self.ranks = ranks
        self.tensor_axis = tensor_axis
        if ranks is None and peers is None and tensor_axis is not None:
            peers = Peers(tensor_axis.ranks)
        self.peers = peers if ranks is None else ranks.peers
        """All ranks of the model, which must run the same collectives; None if this process runs it alone."""
        self.reducers = Reducers()
        """The DistributedDataParallel modules that reduce gradients of the parameters."""
        self.lanes = lanes_for(device)
        self.ledger = ledger_for(self.lanes)
        self.slots: dict[str, Slot] = {}
        """The slots of the parameters that a plan may move, by name in the model."""
        self.sites = Sites()
        """The modules and attribute names at which graphs find the parameters."""
        self.eager_reads = EagerReads()
        """Copies of parameters that eager code has read."""
        self.phases = Phases(self.slots, self.lanes, self.ledger)
        self._gathers = Gathers(self.lanes, self.ledger)
        self._departing: list[torch.Tensor] = []
        self.plain_state = PlainState()
        """The optimizer state on the device that no plan places: see `session.neighbours`."""
        self.calls = StepCalls(name)
        """Which call of a step runs, if a step calls the model several times."""
        self.saved = SavedActivations(self.lanes, self.ledger)
        """The activations of outstanding forwards."""
        self.buckets = PlacedBuckets(self.lanes, ranks, self.slots, self.sites, self.saved, self.ledger)
        self.gradients = GradientAccumulator(
            name,
            self.lanes,
            ledger=self.ledger,
            saved=self.saved,
            buckets=self.buckets,
            calls=self.calls,
            ranks=ranks,
        )
        self.nothing = torch.empty(0, device=device)
        """The placeholder that a forward saves for autograd instead of a value that the plan keeps off the device."""

    def slot_for(self, param: torch.Tensor) -> Slot | None:
        """Return the slot of `param` in this executor, or None."""
        slot = slot_of(param)
        return slot if slot is not None and slot.sink is self else None

    def slots_for(self, tensor: torch.Tensor) -> list[Slot]:
        """Return the slots of the tensors inside of `tensor`, or of itself; empty unless all are in this executor."""
        found = [self.slot_for(part) for part in parts_of(tensor).values()]
        slots = [slot for slot in found if slot is not None]
        return slots if len(slots) == len(found) else []

    def add_slot(self, name: str, param: torch.Tensor) -> Slot:
        """Return the slot of `param`, called `name` in the model; make the slot on the first call for `param`."""
        slot = self.slot_for(param)
        if slot is None:
            slot = self.slots[name] = new_slot(name, param, self.device, self)
        return slot

    def forget_parameters(self) -> None:
        """Forget the parameters and their homes, because another executor takes them over; no graph runs here again."""
        for slot in self.slots.values():
            forget(slot)
        self.slots.clear()
        self.sites.clear()
        self.buckets.forget()

    def run_forward(self, graph: object | None, name: str, program: Program, args: list[Any]) -> Any:
        """Return the result of `program`, the forward of `graph` with that name; the graph is None for inference.

        The calls of a step are counted for each `graph`. It is this executor if each call runs one of several graphs,
        as for micro-batches of other sizes.

        Raises TooManyForwards if more forwards of `graph` wait for their backward than `prepare` was told.
        """
        is_call = graph is not None and self.calls.spec.num > 1
        with self.calls.forward(graph, self.saved.numbers) if is_call else nullcontext():
            results = self.ledger.run(name, program, args)
            self.end()
        return results

    def run_backward(self, graph: object, ticket: torch.Tensor, name: str, program: Program, args: list[Any]) -> Any:
        """Return the result of `program`, the backward of `graph` with that name for the forward of `ticket`.

        Raises UnsupportedBackward if a step has several calls, whose gradients are summed, and the backward asks for
        the gradients of chosen parameters, or is the second one of its forward, or autograd would call a hook on a
        gradient in each of its backward passes.
        """
        backward, calls = self.gradients.begin_backward(), self.calls
        with backward.in_order(self.lanes):
            if calls.spec.num == 1:
                return self.ledger.run(name, program, args)
            number, trains = number_of(ticket), backward.asks_for_any(self.slots.values())
            if trains and not backward.asks_for_all:
                asked = f"a backward for chosen parameters in a step of {calls.spec}"
                instead = "Schedules with a split backward (zero bubble, DualPipe) ask so: use one without"
                raise UnsupportedBackward(self.name, asked, instead)
            if trains and not calls.waits(graph, number):
                asked = (
                    "a second backward of a forward, or one after an exception or under saved-tensor hooks that copy,"
                )
                instead = "Run one backward for each forward, and begin a new step with new forwards after an exception"
                raise UnsupportedBackward(self.name, f"{asked} in a step of {calls.spec}", instead)
            refuse_hooks(self.name, self.slots.values() if trains else (), calls.spec)
            with calls.backward(graph, number, trains=trains):
                if not calls.is_last:
                    backward.suspend_hooks(self.slots.values())
                results = self.ledger.run(name, program, args)
                # The last call may have no gradient of some buckets, as a graph for other inputs: reduce their sums.
                for bucket in self.buckets if calls.is_last and trains and graph is self else ():
                    if self.gradients.sums.holds_any_of(bucket):
                        self.wait(self.reduce(bucket.spec.id, (), []))
                        if bucket.is_away:
                            self.offload(bucket.spec.id)  # the end of the backward waits for it
            return results

    def require_whole_step(self) -> None:
        """Raise IncompleteStep if a step of several calls has begun, and its last backward is not done.

        The next forward begins a new step then: the calls may be left from a step that an exception ended elsewhere.
        """
        if self.calls.spec.num == 1:
            return
        try:
            self.calls.require_whole_step(self.saved.numbers)
        except IncompleteStep:
            self.abandon()
            raise

    def check_same_op(self, slot: Slot) -> None:
        """Wait until every rank is about to gather this parameter. Raises RanksDiffer if a rank does something else."""
        assert self.peers is not None, "only a parameter that several ranks share is gathered by all of them"
        self.peers.control.check_same_op(slot.name, "a parameter")

    def keep_until_gone(self, tensors: Iterable[torch.Tensor]) -> None:
        """Keep `tensors`, which copies on `lanes.d2h` read, alive until the next forward; it waits for the copies."""
        self._departing += tensors

    @torch.no_grad()
    def begin(self) -> None:
        """Clean up after a failed backward, and return parameters to their home if user code moved them.

        Runs before each forward.
        """
        if self.gradients.is_in_backward and compat.backward_pass_id() == -1:
            # An autograd function of other code raised an exception, so the end of the backward never ran.
            self.abandon()
        if self._departing:
            self.lanes.d2h.synchronize()
            self._departing.clear()
        if self.ranks is not None:
            self.ranks.unfinished.raise_if_failed()
            self.ranks.unfinished.clear()  # their outputs are gradients, which the user may have freed
        self.saved.begin()
        self.eager_reads.check()
        # The block reads addresses and flags, not values that a queued update writes.
        with torch.DisableTorchFunctionSubclass():
            for slot in self.slots.values():
                slot.follow_thaw()
            self.buckets.check_updates()
            self.buckets.return_drifted()

    def end(self) -> None:
        """Wait until no copy reads parameters on the host, because user code may write them after the program returns.

        This costs no overlap: the compute after the last gather is queued already. Copies of shards are behind the
        gathers before them. Raises PeerFailed if a rank does not take part in these within the timeout.
        """
        if self.ranks is not None:
            self.ranks.unfinished.wait_for(self.lanes.h2d.mark(), "parameters of a forward")
        with self.ledger.waits(label(Verb.WAIT, Kept.PARAMETERS)):
            self.lanes.h2d.synchronize()

    # The verbs of a program.

    @torch.no_grad()
    def gather(self, bucket_id: BucketId) -> Transfer:
        """Start copying the parameters of a host bucket to the device, after its queued updates."""
        return self._gathers.begin(self.buckets[bucket_id])

    def wait(self, transfer: Transfer | None) -> tuple[torch.Tensor, ...]:
        """Make compute issued from now on wait for `transfer`, and return its tensors: none if it is None.

        Raises the exception of an update before the transfer if the update failed.
        """
        if transfer is None:
            return ()
        self.lanes.compute_waits(transfer.ensure_issued())
        transfer.sources = ()
        if isinstance(transfer, ShardReduce):
            self.gradients.close(transfer.bucket, Verb.REDUCE)
        return transfer.values

    def whole(self, bucket_id: BucketId) -> tuple[torch.Tensor, ...]:
        """Return the parameters of a bucket whose home is the device, or which is resident there."""
        bucket = self.buckets[bucket_id]
        bucket.queued.wait()
        copy = bucket.current_copy()
        # A resident bucket has no copy if an exception or another backward released it.
        return self.wait(self.gather(bucket_id)) if copy is None else copy

    def release(self, bucket_id: BucketId) -> None:
        """Drop the gathered copy of a host bucket; its memory is free after the last region with a view of it.

        If later calls of the step need the copy, it stays.
        """
        if not self.calls.is_last:
            return
        with self.ledger.span(Lane.COMPUTE, label(Verb.RELEASE, BucketRef(bucket_id))):
            self.buckets[bucket_id].release()
        self.gradients.close(self.buckets[bucket_id], Verb.RELEASE)

    def reduce(self, bucket_id: BucketId, params: Sequence[int], grads: list[torch.Tensor]) -> Transfer | None:
        """Add gradients of a bucket, average them over ranks; see `GradientAccumulator.reduce`."""
        return self.gradients.reduce(self.buckets[bucket_id], params, grads)

    def offload(self, bucket_id: BucketId) -> Transfer | None:
        """Start copying the gradients of a host bucket to the host; return None before the last call of the step."""
        return self.gradients.offload(self.buckets[bucket_id])

    @torch.no_grad()
    def offload_saved(self, group: str, values: Sequence[torch.Tensor | LeavingView]) -> Transfer:
        """Start copying `values`, activations of the running forward, to the host as the group `group`."""
        return self.saved.offload(group, values)

    def keep_parts(self, values: Sequence[InParts | torch.Tensor]) -> Sequence[torch.Tensor]:
        """Keep activations of the running forward that are in parts; see `SavedActivations.keep_parts`."""
        return self.saved.keep_parts(values)

    def kept_parts(
        self, ticket: torch.Tensor, saved: Sequence[torch.Tensor], layouts: Sequence[Layout]
    ) -> Sequence[InParts | torch.Tensor]:
        """Return the activations in parts of the forward of `ticket`; see `SavedActivations.kept_parts`."""
        return self.saved.kept_parts(ticket, saved, layouts)

    def leaving(self, ticket: torch.Tensor, group: str) -> Transfer:
        """Return the offload of `group` that the forward of `ticket` started."""
        return self.saved.leaving(ticket, group)

    @torch.no_grad()
    def prefetch(self, ticket: torch.Tensor, group: str, slices: Slicing = ()) -> Transfer:
        """Start copying `group`, activations of the forward of `ticket`, to the device; see
        `SavedActivations.prefetch`."""
        return self.saved.prefetch(ticket, group, slices)

    def ticket(self, names: Sequence[str]) -> torch.Tensor:
        """End a forward and return its ticket: its number and the versions of the parameters `names`, for `check`."""
        return self.saved.ticket(self._versions(names))

    def check(self, ticket: torch.Tensor, names: Sequence[str]) -> None:
        """Begin the backward of the forward of `ticket`, which reads the parameters `names`.

        Raises StaleParameters if any of them changed since the forward.
        """
        versions = ticket[1:].tolist()
        self.sites.check_forward(number_of(ticket))
        for name, before, now in zip(names, versions, self._versions(names), strict=True):
            if before != now:
                raise StaleParameters(name)
        self.gradients.begin_backward()
        self.phases.begin_backward()

    def abandon(self) -> None:
        """Drop gathered copies, unpublished gradients and transfers in flight; called after an exception."""
        self._gathers.call_off()
        if self.ranks is not None:
            self.ranks.drain()
        # Memory must not be used again while a copy still reads or writes it.
        self.lanes.h2d.synchronize()
        self.lanes.d2h.synchronize()
        self.saved.begin()
        self.calls.abandon()
        self.gradients.abandon()
        self.phases.abandon()
        for bucket in self.buckets:
            bucket.release()

    def _versions(self, names: Sequence[str]) -> list[int]:
        return [self.slots[name].version for name in names]


def synchronize_executors(model: torch.nn.Module) -> None:
    """Wait until all work is done that the executors of the parameters of `model` have issued, copies included."""
    slots = (slot_of(part) for param in model.parameters() for part in parts_of(param).values())
    for executor in {executor_of_slot(slot) for slot in slots if slot is not None}:
        executor.lanes.synchronize()


def executor_of_slot(slot: Slot) -> Executor:
    """Return the executor that owns `slot`; `graph.ops` knows it only as a `SlotOwner`."""
    assert isinstance(slot.sink, Executor)
    return slot.sink
