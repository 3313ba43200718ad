"""Count the device bytes of a step of several calls by carrying out all of its calls, one after another, on one rank.

`analysis.plan_timeline` counts the same bytes from three kinds of calls. This count keeps the set of allocations of all
calls. They share the ops that run and the stretches in which a call's own storages are on the device
(`analysis.timeline.device_lives`), which other tests count a second time.
"""

from collections.abc import Iterable

from elixir_compile.analysis.bucket_bytes import resting
from elixir_compile.analysis.laps import laps_of
from elixir_compile.analysis.recompute import as_run
from elixir_compile.analysis.timeline import device_lives
from elixir_compile.ir import Kind, Phase, Plan, StepGraph, Verb
from elixir_compile.ir.schedule import BucketRef, GradientRef, RegionRef


def order_of(num: int, outstanding: int) -> str:
    """Return forwards and backward passes in the order of 1F1B, or all forwards first if all are outstanding."""
    return "F" * outstanding + "BF" * (num - outstanding) + "B" * outstanding


def peak_of_calls(graph: StepGraph, plan: Plan) -> int:
    """Return the most bytes at any op of any call of a step under `plan`, in the order of `order_of`."""
    walk = _Calls(graph, plan)
    started = ended = 0
    for letter in order_of(plan.calls.num, plan.calls.outstanding):
        if letter == "F":
            walk.half(started, Phase.FORWARD)
            started += 1
        else:
            walk.half(ended, Phase.BACKWARD)
            ended += 1
    walk.update()
    return walk.most


class _Calls:
    """The allocations after the calls so far."""

    def __init__(self, graph: StepGraph, plan: Plan) -> None:
        self.plan, self.step = plan, as_run(graph, plan.activations, laps_of(plan))
        self.lives = device_lives(graph, plan)
        self.index = {op.id: i for i, op in enumerate(self.step.ops)}
        self.storages = {storage.id: storage for storage in self.step.storages}
        owned = {name for bucket in plan.buckets for name in bucket.params}
        self.own = [s for s in self.step.storages if s.id in self.lives and s.kind in (Kind.SAVED, Kind.TEMP)]
        self.fixed = plan.base_bytes + sum(
            s.nbytes * (plan.calls.num if s.kind is Kind.INPUT else 1)
            for s in self.step.storages
            if s.kind in (Kind.INPUT, Kind.BUFFER) or (s.kind is Kind.PARAM and s.id not in owned)
        )
        homes = zip(plan.buckets, plan.placements, strict=True)
        self.fixed += sum(nbytes for bucket, home in homes for _, nbytes in resting(bucket, home))
        self.copies: dict[str, int] = {}
        self.grads: dict[tuple[str, int], int] = {}
        self.waiting: set[int] = set()
        self.done: set[int] = set()
        self.most = 0

    def half(self, call: int, phase: Phase) -> None:
        """Run the forward or the backward of `call`."""
        regions = {region.id: region for region in self.plan.regions}
        self.waiting.discard(call)
        last = self.plan.calls.num - 1
        for action in self._actions(phase):
            match action.verb, action.target:
                case Verb.RUN, RegionRef(name):
                    for i in range(self.index[regions[name].first], self.index[regions[name].last] + 1):
                        self._run(call, i)
                case Verb.GATHER, BucketRef(name):
                    self.copies[name] = next(b.nbytes for b in self.plan.buckets if b.id == name)
                case Verb.RELEASE, BucketRef(name) if call == last:
                    self.copies.pop(name, None)
                case Verb.REDUCE, BucketRef(name):
                    self._add(name, call)
                case Verb.WAIT, GradientRef(name) if call == last:
                    for key in [key for key in self.grads if key[0] in self._params(name)]:
                        del self.grads[key]
        if phase is Phase.FORWARD:
            self.waiting.add(call)
        else:
            self.done.add(call)

    def update(self) -> None:
        self._note(self.fixed + sum(self.grads.values()))

    def _actions(self, phase: Phase) -> Iterable:
        actions = self.plan.schedules[0].actions
        names = {RegionRef(r.id) for r in self.plan.regions if r.phase is Phase.FORWARD}
        end = max(i for i, action in enumerate(actions) if action.target in names) + 1
        while end < len(actions) and actions[end].verb in (Verb.RELEASE, Verb.OFFLOAD, Verb.WAIT):
            end += 1
        return actions[:end] if phase is Phase.FORWARD else actions[end:]

    def _params(self, bucket: str) -> tuple[str, ...]:
        return next(own.params for own in self.plan.buckets if own.id == bucket)

    def _add(self, bucket: str, call: int) -> None:
        """Add the gradients of `call` to the sums, call -1."""
        for key in [key for key in self.grads if key[0] in self._params(bucket) and key[1] == call]:
            nbytes = self.grads.pop(key)
            self.grads[key[0], -1] = nbytes

    def _run(self, call: int, op: int) -> None:
        for name in self.step.ops[op].writes:
            if self.storages[name].kind is Kind.GRAD:
                self.grads[self.storages[name].of or name, call] = self.storages[name].nbytes
        is_backward = self.step.ops[op].phase is Phase.BACKWARD
        own = sum(s.nbytes for s in self.own if any(life.first <= op <= life.last for life in self.lives[s.id]))
        if is_backward:
            own += sum(s.nbytes for s in self.own if s.id in self.step.outputs and not self._crosses(s.id))
        held = sum(s.nbytes for s in self.own if self._crosses(s.id) or s.id in self.step.outputs)
        copies = sum(self.copies.values())
        grads = sum(self.grads.values())
        self._note(self.fixed + own + len(self.waiting) * held + copies + grads)

    def _crosses(self, name: str) -> bool:
        num_forward = sum(op.phase is Phase.FORWARD for op in self.step.ops)
        return any(life.first < num_forward <= life.last for life in self.lives[name])

    def _note(self, nbytes: int) -> None:
        self.most = max(self.most, nbytes)
