"""Count the device bytes of a step of several calls by carrying out all of its calls, one after another, on one rank.

`step.plan_timeline` counts the same bytes from kinds of calls. This count keeps the set of allocations of all
calls. They share the ops that run and the stretches in which a call's own storages are on the device
(`step.timeline.device_lives`), which other tests count a second time.
"""

from collections.abc import Iterable, Sequence

from elixir_compile.ir import BackwardOrder, Calls, Kind, Phase, Plan, StepGraph, Verb
from elixir_compile.ir.schedule import BucketRef, GradientRef, RegionRef
from elixir_compile.step.as_run import as_run
from elixir_compile.step.bucket_bytes import resting
from elixir_compile.step.divide import laps_of
from elixir_compile.step.timeline import device_lives


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
