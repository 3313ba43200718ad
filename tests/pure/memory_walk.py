"""Count the bytes of steps by carrying out each action and each call, without code of the package's own counts."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from elixir_compile.ir import BackwardOrder, Calls, Kind, Phase, Plan, StepGraph, Update, Verb
from elixir_compile.ir.bucket import Activations, Bucket, Placement
from elixir_compile.ir.cost import disk_staging_bytes, gather_staging_bytes
from elixir_compile.ir.kinds import Saving, Tier
from elixir_compile.ir.schedule import BucketRef, GradientRef, GroupRef, RegionRef, Target
from elixir_compile.step.as_run import as_run
from elixir_compile.step.bucket_bytes import resting
from elixir_compile.step.divide import laps_of
from elixir_compile.step.timeline import device_lives

# ----------------------------------------------------------------------------------------------------------------------
# Count the device bytes of one step by carrying the step out: allocate, free, and add up the allocations at each op.
#
# `step.plan_timeline` counts the same bytes as sums of intervals. This count keeps the set of current allocations
# while it walks through actions and ops. The two share no arithmetic, so tests compare them: this count does not read
# the table `step.bucket_bytes`. They share the list of the ops that run (`step.as_run.as_run`), the sizes of a bucket
# (`ir.Bucket`) and the sizes of the buffers of a disk (`ir.cost`).


_PASSING = (Kind.TEMP, Kind.WORKSPACE, Kind.SAVED, Kind.GRAD)
"""Kinds that are allocated during the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryWalk:
    """Live bytes at every op, in order, and what the host of rank 0 holds."""

    live_bytes: tuple[int, ...]
    host_bytes: int

    @property
    def peak_bytes(self) -> int:
        return max(self.live_bytes)


def walk_memory(graph: StepGraph, plan: Plan) -> MemoryWalk:
    """Return the live bytes of rank 0 at every op that `plan`, a plan of `graph`, runs."""
    step = as_run(graph, plan.activations, laps_of(plan))
    walk = _Walk(step, plan)
    regions = {region.id: region for region in plan.regions}
    index = {op.id: i for i, op in enumerate(step.ops)}
    for action in plan.schedules[0].actions:
        if isinstance(action.target, RegionRef):
            region = regions[action.target.region]
            for i in range(index[region.first], index[region.last] + 1):
                walk.run(i)
        else:
            walk.act(action.verb, action.target)
    walk.add_to_sums()
    walk.update()
    for i, op in enumerate(step.ops):
        if op.phase is Phase.UPDATE:
            walk.run(i)
    return MemoryWalk(live_bytes=tuple(walk.seen), host_bytes=walk.host_bytes())


class _Walk:
    """The allocations after the actions so far."""

    def __init__(self, graph: StepGraph, plan: Plan) -> None:
        self.graph = graph
        self.plan = plan
        self.held: dict[tuple[str, str], int] = {}
        """Bytes of each allocation, by its purpose and name."""
        self.total_bytes = 0
        self.seen: list[int] = []
        self.uses_left: Counter[str] = Counter()
        self.buckets: dict[str, Bucket] = {bucket.id: bucket for bucket in self.plan.buckets}
        self.homes = {placement.bucket: placement for placement in self.plan.placements}
        self.owner = {param: bucket for bucket in self.plan.buckets for param in bucket.params}
        self.storages = {storage.id: storage for storage in self.graph.storages}
        self.offloaded: dict[str, Activations] = {
            group.id: group for group in plan.activations if group.saving is Saving.OFFLOAD
        }
        self.leaving = {out for group in self.offloaded.values() for out, _ in self.on_device(group)}
        """Offloaded storages, which stay on the device until the wait for their offload."""
        self.opening: dict[str, int] = {}
        """Bytes that each bucket needs only until the next op."""
        self.num_forward = sum(op.phase is Phase.FORWARD for op in self.graph.ops)
        self.num_run = sum(op.phase is not Phase.UPDATE for op in self.graph.ops)
        for op in self.graph.ops:
            self.uses_left.update({*op.reads, *op.writes})
        self.take("base", "", self.plan.base_bytes)
        for storage in self.graph.storages:
            if storage.kind not in _PASSING and storage.id not in self.owner:
                self.take("storage", storage.id, storage.nbytes)
        for bucket in self.plan.buckets:
            if self.homes[bucket.id].param is Tier.DEVICE:
                self.take("param", bucket.id, own_param_bytes(bucket))
                self.take("sums", bucket.id, self.held_sums(bucket))
            if self.homes[bucket.id].optim is Tier.DEVICE:
                self.take("state", bucket.id, bucket.shard_state_nbytes())

    def held_sums(self, bucket: Bucket) -> int:
        """Return the bytes of a rank's part of the sums, padded to the part of the rank with the most elements."""
        return bucket.sum_nbytes * row_numel(bucket) // max(bucket.numel, 1)

    def take(self, what: str, name: str, nbytes: int) -> None:
        if (what, name) not in self.held:
            self.held[what, name] = nbytes
            self.total_bytes += nbytes

    def drop(self, what: str, name: str) -> None:
        self.total_bytes -= self.held.pop((what, name), 0)

    def run(self, i: int) -> None:
        """Run op `i`: allocate its writes, and free storages after their last use."""
        op = self.graph.ops[i]
        touched = {*op.reads, *op.writes}
        for name in touched:
            storage = self.storages[name]
            # A gradient that left for the host or was shared out does not come back.
            has_left = storage.kind is Kind.GRAD and ("left", name) in self.held
            if storage.kind in _PASSING and not has_left:
                self.take("storage", name, storage.nbytes)
        self.seen.append(self.total_bytes + sum(self.opening.values()))
        self.opening.clear()
        self.uses_left.subtract(touched)
        done = touched if i + 1 not in (self.num_forward, self.num_run) else {*touched, *self.graph.outputs}
        for name in done:
            # The caller of `backward` holds a loss to which the kernel gave more than its own bytes.
            held_until = self.num_run if self.storages[name].traced else self.num_forward
            is_kept = i + 1 < held_until and name in self.graph.outputs
            is_kept = is_kept or name in self.leaving
            passes = self.storages[name].kind in (Kind.TEMP, Kind.WORKSPACE, Kind.SAVED)
            if self.uses_left[name] == 0 and passes and not is_kept:
                self.drop("storage", name)

    def note(self, more_bytes: int = 0) -> None:
        """Count what is there between the last op and the next, and `more_bytes`, at the last op if that is more."""
        self.seen[-1] = max(self.seen[-1], self.total_bytes + more_bytes)

    def act(self, verb: Verb, target: Target) -> None:
        if verb is Verb.REDUCE and isinstance(target, BucketRef):
            self.work_in_backward(self.buckets[target.bucket])
        match verb, target:
            case Verb.GATHER, BucketRef(bucket):
                self.gather(self.buckets[bucket])
            case Verb.WAIT, BucketRef(bucket):
                self.unpack(self.buckets[bucket])
            case Verb.RELEASE, BucketRef(bucket):
                self.drop("copy", bucket)
            case Verb.REDUCE, BucketRef(bucket) if self.buckets[bucket].is_sharded:
                self.reduce(self.buckets[bucket])
            case Verb.REDUCE, BucketRef(bucket) if self.buckets[bucket].reduce_dtype is not None:
                self.widen(self.buckets[bucket])
            case Verb.REDUCE, BucketRef(bucket) if len(self.buckets[bucket].shard_numels) * self.plan.num_copies > 1:
                self.note(self.unreduced_bytes(self.buckets[bucket]))  # the means are new tensors
            case _, GroupRef(group) if group in self.offloaded:
                self.carry(verb, group)
            case Verb.WAIT, GradientRef(bucket):
                self.end(self.buckets[bucket])

    def end(self, bucket: Bucket) -> None:
        """Free the unreduced gradients of `bucket` at the wait for its reduce or its offload."""
        self.drop_unreduced(bucket)
        self.drop("flat", bucket.id)
        if self.homes[bucket.id].param is Tier.HOST:
            self.drop("shard", bucket.id)

    def gather(self, bucket: Bucket) -> None:
        """Allocate the flat buffer, and the shard if it is copied from the host."""
        self.take("copy", bucket.id, bucket.flat_nbytes)
        if bucket.is_sharded and self.homes[bucket.id].param is Tier.HOST:
            self.take("sent", bucket.id, bucket.flat_shard_nbytes)

    def unpack(self, bucket: Bucket) -> None:
        """Free the shard from the host. Parameters copied out of the flat buffer need its bytes a second time; only a
        single parameter is used in place, unless padding lies between its elements."""
        sent_bytes = self.held.get(("sent", bucket.id), 0)
        self.drop("sent", bucket.id)
        is_copied = bucket.is_sharded and (len(bucket.params) > 1 or has_padding_inside(bucket))
        self.opening[bucket.id] = bucket.flat_nbytes if is_copied else sent_bytes

    def reduce(self, bucket: Bucket) -> None:
        """Allocate the reduced shard. Gradients are packed into a flat buffer and freed, unless a single one is used in
        place."""
        even = len(bucket.params) == 1 and bucket.flat_grad_nbytes == bucket.nbytes
        if not even:
            self.take("flat", bucket.id, bucket.flat_grad_nbytes)
            self.note()
            self.drop_unreduced(bucket)
        self.take("shard", bucket.id, bucket.reduced_nbytes)
        self.note()

    def widen(self, bucket: Bucket) -> None:
        """Copy gradients that are not sharded into a buffer of a wider dtype, and free them."""
        self.take("shard", bucket.id, bucket.reduced_nbytes)
        self.note()
        self.drop_unreduced(bucket)

    def unreduced_bytes(self, bucket: Bucket) -> int:
        """Return the bytes of the unreduced gradients of `bucket`."""
        names = [storage.id for storage in self.graph.storages if storage.of in bucket.params]
        return sum(self.held.get(("storage", name), 0) for name in names)

    def drop_unreduced(self, bucket: Bucket) -> None:
        """Free the unreduced gradients of `bucket` for the rest of the step."""
        for storage in self.graph.storages:
            if storage.of in bucket.params:
                self.drop("storage", storage.id)
                self.take("left", storage.id, 0)

    def carry(self, verb: Verb, what: str) -> None:
        """Free a group at the first wait, and allocate its storages with later uses at the prefetch."""
        names = self.on_device(self.offloaded[what])
        if verb is Verb.PREFETCH:
            for _, back in names:
                if self.uses_left[back]:
                    self.take("storage", back, self.storages[back].nbytes)
        elif verb is Verb.WAIT and not self.leaving.isdisjoint(out for out, _ in names):
            for out, _ in names:
                self.leaving.discard(out)
                self.drop("storage", out)

    def on_device(self, group: Activations) -> list[tuple[str, str]]:
        """Return the names of the storages of `group` on the device, in the forward and in the backward: those of one
        slice if they move slice by slice."""

        def named(name: str, suffix: str) -> str:
            return f"{name}{suffix}" if f"{name}{suffix}" in self.storages else name

        return [(named(name, ".leaving"), named(name, ".arrived")) for name in group.storages]

    def add_to_sums(self) -> None:
        """Free the gradients of the step, if they were added to sums of gradients at the end of the backward."""
        for bucket in self.plan.buckets:
            if bucket.sum_nbytes:
                self.drop_unreduced(bucket)
                self.drop("shard", bucket.id)

    def update(self) -> None:
        """Allocate what updates take, one after another: the work space of those on the device, then the rooms of the
        largest streamed bucket (its state, and parameters and gradients if they are on the host) beside work space."""
        is_cpu = any(map(self.is_cpu, self.plan.buckets))
        on_device, streamed, rooms = [0], [0], [0]
        for bucket in filter(lambda own: own.trainable, self.plan.buckets):
            home = self.homes[bucket.id]
            if is_cpu or home.optim is Tier.DEVICE:
                on_device.append(self.work(bucket))
            if is_cpu or home.streamed:
                streamed.append(self.work(bucket))
            if home.streamed:
                rooms.append(self.room(bucket))
        self.drop("work", "")
        self.take("updates", "", max(*on_device, max(rooms) + max(streamed) if max(rooms) else 0))

    def work(self, bucket: Bucket) -> int:
        """Return the work space of the largest parameter of `bucket` on the rank."""
        own = bucket.owned_updates[bucket.rank] if bucket.owned_updates else bucket.whole_update or bucket.block_update
        return 0 if own is None else own.work_nbytes

    def room(self, bucket: Bucket) -> int:
        """Return the bytes in which a streamed bucket passes: all at once, or two parameters that are updated whole."""
        home, param_bytes, state_bytes = self.homes[bucket.id], bucket.shard_nbytes(), bucket.shard_state_nbytes()
        if bucket.whole_update is not None:
            own = bucket.owned_updates[bucket.rank] if bucket.owned_updates else bucket.whole_update
            param_bytes, state_bytes = 2 * own.most_nbytes, 2 * own.most_state_nbytes
        if home.param is Tier.DEVICE:
            return state_bytes
        grad_bytes = self.held_sums(bucket) or bucket.shard_grad_nbytes()
        return state_bytes + param_bytes + grad_bytes * param_bytes // max(bucket.shard_nbytes(), 1)

    def work_in_backward(self, bucket: Bucket) -> None:
        """Allocate the largest work space of all updates on the device when the first gradient of theirs is reduced."""
        working = [
            own
            for own in self.plan.buckets
            if own.trainable and self.work(own) and (self.homes[own.id].optim is Tier.DEVICE or self.is_cpu(own))
        ]
        if self.plan.update is Update.IN_BACKWARD and bucket in working:
            self.take("work", "", max(map(self.work, working)))

    @staticmethod
    def is_cpu(bucket: Bucket) -> bool:
        """Return whether the work space of `bucket` is on the device wherever its update runs."""
        return any(own is not None and own.works_on_device for own in (bucket.whole_update, bucket.block_update))

    def host_bytes(self) -> int:
        total_bytes = sum(group.nbytes for group in self.offloaded.values())
        on_disk = [bucket for bucket in self.plan.buckets if self.homes[bucket.id].optim is Tier.DISK]
        gathered = [bucket for bucket in on_disk if self.homes[bucket.id].param is Tier.DISK]
        updated = (bucket for bucket in on_disk if bucket.trainable)
        total_bytes += disk_staging_bytes(updated, [bucket.id for bucket in gathered]) + gather_staging_bytes(gathered)
        by_host = [b for b in self.plan.buckets if self.homes[b.id].update is Tier.HOST and b.trainable]
        total_bytes += max((self.work(bucket) for bucket in by_host if not self.is_cpu(bucket)), default=0)
        for bucket in self.plan.buckets:
            home = self.homes[bucket.id]
            if home.optim is not Tier.DEVICE:
                # Parameters or their staging; gradients or theirs; state that is not on disk.
                total_bytes += own_param_bytes(bucket) if home.param is not Tier.DISK else 0
                total_bytes += bucket.shard_grad_nbytes() if bucket.trainable else 0
                total_bytes += _sum_host_bytes(bucket, home)
                total_bytes += bucket.shard_state_nbytes() if home.optim is Tier.HOST else 0
        return total_bytes


def _sum_host_bytes(bucket: Bucket, home: Placement) -> int:
    """Return the bytes on the host of sums of gradients and of gradients that arrive meanwhile, beside the buffer of
    the gradients of one pass. That buffer holds the sums if they are no wider than the gradients."""
    is_there = home.param is not Tier.DEVICE
    if bucket.reduce_dtype is not None:
        return bucket.shard_grad_nbytes() if is_there else 0
    if bucket.sum_nbytes > bucket.nbytes:
        return bucket.sum_nbytes + (bucket.nbytes if is_there else 0)
    return bucket.sum_nbytes * row_numel(bucket) // max(bucket.numel, 1) if is_there else 0


def has_padding_inside(bucket: Bucket) -> bool:
    """Whether a rank before the last one with elements has a shorter part than another, so that padding follows it."""
    longest = bucket.shard_numels.most
    last = max((rank for rank, numel in enumerate(bucket.shard_numels) if numel), default=0)
    return not bucket.is_ragged and any(numel < longest for numel in bucket.shard_numels[:last])


def row_numel(bucket: Bucket) -> int:
    """The elements that the rank of `bucket` has in the flat buffer."""
    return bucket.shard_numels[bucket.rank] if bucket.is_ragged else bucket.shard_numels.most


def own_param_bytes(bucket: Bucket) -> int:
    """The bytes of the parameters in their home on the rank of `bucket`."""
    return bucket.nbytes * row_numel(bucket) // max(bucket.numel, 1) if bucket.is_sharded else bucket.nbytes


# ----------------------------------------------------------------------------------------------------------------------
# Count the device bytes of a step of several calls by carrying out all of its calls, one after another, on one rank.
#
# `step.plan_timeline` counts the same bytes from kinds of calls. This count keeps the set of allocations of all
# calls. They share the ops that run and the stretches in which a call's own storages are on the device
# (`step.timeline.device_lives`), which other tests count a second time.


def order_of(num: int, outstanding: int) -> str:
    """Return forwards and backward passes in the order of 1F1B, or all forwards first if all are outstanding."""
    return "F" * outstanding + "BF" * (num - outstanding) + "B" * outstanding


def turns_of(calls: Calls) -> list[int | None]:
    """Return None for each forward, and for each backward the place of its forward among those that wait."""
    place = -1 if calls.backward_order is BackwardOrder.LAST_FIRST else 0
    return [None if letter == "F" else place for letter in order_of(calls.num, calls.outstanding)]


def peak_of_calls(graph: StepGraph, plan: Plan, turns: Sequence[int | None] = ()) -> int:
    """Return the most bytes at any op of any call of a step under `plan`, in the order of `turns`, or of `turns_of`."""
    walk = _Calls(graph, plan)
    started = 0
    waiting: list[int] = []
    for place in turns or turns_of(plan.calls):
        if place is None:
            walk.half(started, Phase.FORWARD)
            waiting.append(started)
            started += 1
        else:
            walk.half(waiting.pop(place), Phase.BACKWARD)
    walk.update()
    return walk.most


class _Program:
    """What the full or the lean calls of a plan run."""

    def __init__(self, graph: StepGraph, plan: Plan) -> None:
        self.plan, self.step = plan, as_run(graph, plan.activations, laps_of(plan))
        self.lives = device_lives(graph, plan)
        self.index = {op.id: i for i, op in enumerate(self.step.ops)}
        self.storages = {storage.id: storage for storage in self.step.storages}
        self.own = [s for s in self.step.storages if s.id in self.lives and s.kind in (Kind.SAVED, Kind.TEMP)]
        self.held = sum(s.nbytes for s in self.own if self.crosses(s.id) or s.id in self.step.outputs)

    def actions(self, phase: Phase) -> Iterable:
        """Return the actions of one half."""
        actions = self.plan.schedules[0].actions
        names = {RegionRef(r.id) for r in self.plan.regions if r.phase is Phase.FORWARD}
        end = max(i for i, action in enumerate(actions) if action.target in names) + 1
        while end < len(actions) and actions[end].verb in (Verb.RELEASE, Verb.OFFLOAD, Verb.WAIT):
            end += 1
        return actions[:end] if phase is Phase.FORWARD else actions[end:]

    def crosses(self, name: str) -> bool:
        """Return whether a storage is there between the halves."""
        num_forward = sum(op.phase is Phase.FORWARD for op in self.step.ops)
        return any(life.first < num_forward <= life.last for life in self.lives[name])


class _Calls:
    """The allocations after the calls so far."""

    def __init__(self, graph: StepGraph, plan: Plan) -> None:
        self.plan = plan
        self.full = _Program(graph, plan)
        self.lean = self.full if plan.lean is None else _Program(graph, plan.of_lean_calls())
        owned = {name for bucket in plan.buckets for name in bucket.params}
        self.fixed = plan.base_bytes + sum(
            s.nbytes * (plan.calls.num if s.kind is Kind.INPUT else 1)
            for s in self.full.step.storages
            if s.kind in (Kind.INPUT, Kind.BUFFER) or (s.kind is Kind.PARAM and s.id not in owned)
        )
        homes = zip(plan.buckets, plan.placements, strict=True)
        self.fixed += sum(nbytes for bucket, home in homes for _, nbytes in resting(bucket, home))
        self.copies: dict[str, int] = {}
        self.grads: dict[tuple[str, int], int] = {}
        self.waiting: dict[int, _Program] = {}
        self.num_done = self.num_full_calls = self.most = 0

    def half(self, call: int, phase: Phase) -> None:
        """Run the forward or the backward of `call`."""
        if phase is Phase.FORWARD:
            limit = self.plan.calls.num if self.plan.lean is None else self.plan.lean.num_full
            is_full = sum(other is self.full for other in self.waiting.values()) < limit
            program = self.full if is_full else self.lean
            self.num_full_calls += is_full
            is_last = call == self.plan.calls.num - 1
        else:
            program = self.waiting.pop(call)
            is_last = self.num_done == self.plan.calls.num - 1
        regions = {region.id: region for region in program.plan.regions}
        for action in program.actions(phase):
            match action.verb, action.target:
                case Verb.RUN, RegionRef(name):
                    for i in range(program.index[regions[name].first], program.index[regions[name].last] + 1):
                        self._run(program, call, i)
                case Verb.GATHER, BucketRef(name):
                    self.copies[name] = next(b.nbytes for b in self.plan.buckets if b.id == name)
                case Verb.RELEASE, BucketRef(name) if is_last:
                    self.copies.pop(name, None)
                case Verb.REDUCE, BucketRef(name):
                    self._add(name, call)
                case Verb.WAIT, GradientRef(name) if is_last:
                    for key in [key for key in self.grads if key[0] in self._params(name)]:
                        del self.grads[key]
        if phase is Phase.FORWARD:
            self.waiting[call] = program
        else:
            self.num_done += 1

    def update(self) -> None:
        self._note(self.fixed + sum(self.grads.values()))

    def _params(self, bucket: str) -> tuple[str, ...]:
        return next(own.params for own in self.plan.buckets if own.id == bucket)

    def _add(self, bucket: str, call: int) -> None:
        """Add the gradients of `call` to the sums, call -1."""
        for key in [key for key in self.grads if key[0] in self._params(bucket) and key[1] == call]:
            nbytes = self.grads.pop(key)
            self.grads[key[0], -1] = nbytes

    def _run(self, program: _Program, call: int, op: int) -> None:
        for name in program.step.ops[op].writes:
            if program.storages[name].kind is Kind.GRAD:
                self.grads[program.storages[name].of or name, call] = program.storages[name].nbytes
        is_backward = program.step.ops[op].phase is Phase.BACKWARD
        lives = program.lives
        own = sum(s.nbytes for s in program.own if any(life.first <= op <= life.last for life in lives[s.id]))
        if is_backward:
            outputs = program.step.outputs
            own += sum(s.nbytes for s in program.own if s.id in outputs and not program.crosses(s.id))
        held = sum(other.held for other in self.waiting.values())
        copies, grads = sum(self.copies.values()), sum(self.grads.values())
        self._note(self.fixed + own + held + copies + grads)

    def _note(self, nbytes: int) -> None:
        self.most = max(self.most, nbytes)
