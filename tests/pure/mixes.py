"""Random plans: treatments of activations, modes of layers, and collectives of several ranks."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from hypothesis import strategies as st

from elixir_compile.base.errors import InvalidPlan
from elixir_compile.ir import (
    Activations,
    Bucket,
    BucketRef,
    GroupId,
    Kernel,
    Kind,
    Lane,
    Op,
    OpId,
    Phase,
    Plan,
    Saving,
    StepGraph,
    Storage,
    StorageId,
    Verb,
)
from elixir_compile.ir.graph import UPDATE_OP
from elixir_compile.step import Depth, activation_groups, as_run

# ----------------------------------------------------------------------------------------------------------------------
# Random small training steps with every kind of op, and random choices for what their forward saves.
#
# ```text
#   fwd   each op reads a few of: input, parameters, a buffer, earlier values; writes one new value or two
#   bwd   each op reads a few of: tangent, forward values, parameters, earlier temporaries; writes one, or a gradient
# ```
#
# Some ops fuse, some must run once, some overwrite what they read, some have a workspace. What the backward reads of
# the forward is saved.


SIZES = st.sampled_from([4, 40, 400])


@dataclass
class Mix:
    """A step graph under construction."""

    draw: st.DrawFn
    ops: list[Op] = field(default_factory=list)
    storages: dict[StorageId, Storage] = field(default_factory=dict)

    def storage(self, name: str, kind: Kind, of: StorageId | None = None) -> StorageId:
        nbytes = self.draw(SIZES) if of is None else self.storages[of].nbytes
        made = Storage(id=StorageId(name), nbytes=nbytes, kind=kind, dtype="float32", of=of)
        return self.storages.setdefault(made.id, made).id

    def op(self, phase: Phase, layer: int, reads: Sequence[StorageId], writes: Sequence[StorageId]) -> None:
        """Append an op of a random kernel; one that writes what it reads runs once, as a capture says."""
        draw, number = self.draw, len(self.ops)
        kernel = draw(st.sampled_from(list(Kernel)))
        name = (
            f"{draw(st.sampled_from(['mm', 'mm', 'attention']))}{number}" if kernel is Kernel.OPAQUE else f"f{number}"
        )
        if kernel is Kernel.OPAQUE and draw(st.integers(0, 3)) == 0:
            writes = [*writes, self.storage(f"{name}.workspace", Kind.WORKSPACE)]
        self.ops.append(
            Op(
                id=OpId(f"{'fwd' if phase is Phase.FORWARD else 'bwd'}.{name}"),
                target=f"aten.{name}.default",
                phase=phase,
                reads=tuple(dict.fromkeys(reads)),
                writes=tuple(writes),
                flops=draw(st.sampled_from([0, 100])) if kernel is Kernel.OPAQUE else 0,
                moved_bytes=sum(self.storages[name].nbytes for name in (*reads, *writes)),
                module=f"h.{layer}.mlp",
                kernel=kernel,
                once=not {*reads}.isdisjoint(writes) or draw(st.integers(0, 7)) == 0,
            )
        )

    def some(self, pool: Sequence[StorageId]) -> list[StorageId]:
        """One to three of `pool`, rather the latest."""
        return [pool[-1 - self.draw(st.integers(0, len(pool) - 1))] for _ in range(self.draw(st.integers(1, 3)))]

    def overwritten(self, reads: Sequence[StorageId], values: Sequence[StorageId]) -> list[StorageId]:
        """Rarely, a value or the buffer among `reads`."""
        found = [name for name in reads if name in values]
        return found[:1] if found and self.draw(st.integers(0, 9)) == 0 else []


@st.composite
def mixed_graphs(draw: st.DrawFn) -> StepGraph:
    """Random training steps of one to three layers."""
    mix = Mix(draw)
    num_layers = draw(st.integers(1, 3))
    given = [mix.storage("x", Kind.INPUT), mix.storage("buffer", Kind.BUFFER)]
    given += (params := [mix.storage(f"w{layer}", Kind.PARAM) for layer in range(num_layers)])
    values: list[StorageId] = []
    for layer in range(num_layers):
        for _ in range(draw(st.integers(1, 4))):
            reads = mix.some([*given, *values])
            new = [mix.storage(f"s{len(mix.storages)}", Kind.TEMP) for _ in range(draw(st.sampled_from([1, 1, 2])))]
            mix.op(Phase.FORWARD, layer, reads, [*mix.overwritten(reads, [*values, given[1]]), *new])
            values += new
    outputs = tuple(dict.fromkeys([values[-1], draw(st.sampled_from(values))]))
    _backward(mix, [*given, *values], params, [name for name in values if name not in outputs])
    read = {name for op in mix.ops if op.phase is Phase.BACKWARD for name in op.reads}
    saved = [name for name in values if name in read]
    storages = {**mix.storages, **{name: replace(mix.storages[name], kind=Kind.SAVED) for name in saved}}
    if draw(st.integers(0, 3)) == 0:  # a loss with the storage of its inputs
        storages[outputs[0]] = replace(storages[outputs[0]], traced="4")
    return StepGraph(name="mix", ops=tuple(mix.ops), storages=tuple(storages.values()), outputs=outputs)


def _backward(mix: Mix, forward: list[StorageId], params: list[StorageId], changeable: list[StorageId]) -> None:
    tangent = mix.storage("tangent", Kind.TEMP)
    pool = [*forward, tangent]
    trained: dict[StorageId, StorageId] = {}
    num_ops = mix.draw(st.integers(2, 8))
    for number in range(num_ops):
        layer = len(params) - 1 - number * len(params) // num_ops
        reads, writes = mix.some(pool), [] if number else [tangent]
        if mix.draw(st.booleans()):
            grad = mix.storage(f"{params[layer]}.grad", Kind.GRAD, of=params[layer])
            reads = [*reads, grad] if params[layer] in trained else reads
            trained[params[layer]] = grad
            writes += [grad]
        else:
            writes += [*mix.overwritten(reads, changeable), mix.storage(f"d{number}", Kind.TEMP)]
            pool.append(writes[-1])
        mix.op(Phase.BACKWARD, layer, [name for name in reads if number or name != tangent], writes)
    _read_the_rest(mix, params[0], trained)
    update = Op(id=UPDATE_OP, target="update", phase=Phase.UPDATE, reads=(*trained, *trained.values()), writes=())
    mix.ops.append(update)


def _read_the_rest(mix: Mix, param: StorageId, trained: dict[StorageId, StorageId]) -> None:
    """A last op that reads what no other did: a capture holds nothing that is made for nothing."""
    read = {name for op in mix.ops for name in op.reads}
    made = [name for op in mix.ops if op.phase is Phase.BACKWARD for name in op.writes]
    rest = [name for name in made if name not in read and mix.storages[name].kind is Kind.TEMP]
    grad = mix.storage(f"{param}.grad", Kind.GRAD, of=param)
    mix.op(Phase.BACKWARD, 0, [*rest, grad] if param in trained else rest, [grad])
    trained[param] = grad


def group(graph: StepGraph, name: str, saving: Saving, *storages: str) -> Activations:
    """Return the group of `storages` with the bytes that they have."""
    nbytes = sum(storage.nbytes for storage in graph.storages if storage.id in storages)
    return Activations(id=GroupId(name), storages=tuple(map(StorageId, storages)), nbytes=nbytes, saving=saving)


@st.composite
def activations_of(draw: st.DrawFn, graph: StepGraph) -> tuple[Activations, ...]:
    """Random groups of what `graph` saves, and of what it could; recomputed only where that is possible."""
    made = {name for op in graph.ops if op.phase is Phase.FORWARD for name in op.writes}
    kept = (Kind.BUFFER, Kind.WORKSPACE)
    free = [s for s in graph.storages if s.id in made and s.id not in graph.outputs and s.kind not in kept]
    found: tuple[Activations, ...] = ()
    while free:
        size = draw(st.integers(1, 2))
        names = [storage.id for storage in free[:size]]
        saving = draw(st.sampled_from([Saving.RECOMPUTE, Saving.OFFLOAD, Saving.KEEP, Saving.RECOMPUTE, None]))
        is_saved = all(storage.kind is Kind.SAVED for storage in free[:size])
        free = free[size:]
        if saving is not None and (is_saved or saving is not Saving.RECOMPUTE):
            tried = (*found, group(graph, f"g{len(found)}", saving, *names))
            found = tried if is_possible(graph, tried) else found
    return found


def is_possible(graph: StepGraph, activations: tuple[Activations, ...]) -> bool:
    """Return whether nothing has to be made again that cannot be."""
    try:
        as_run(graph, activations)
    except InvalidPlan:
        return False
    return True


@st.composite
def layers_of(draw: st.DrawFn, graph: StepGraph) -> tuple[Activations, ...]:
    """The groups of `graph`, each layer recomputed to a random depth, the rest kept or offloaded."""
    depths: dict[str, Depth] = {}
    found: list[Activations] = []
    for one in activation_groups(graph):
        depth = depths.setdefault(one.layer, draw(st.sampled_from(list(Depth))))
        if one.is_input and depth is not Depth.FIXED:
            continue
        is_again = Depth.KEPT < one.depth <= depth
        saving = Saving.RECOMPUTE if is_again else draw(st.sampled_from([Saving.KEEP, Saving.OFFLOAD]))
        found.append(Activations(id=one.id, storages=one.storages, nbytes=one.nbytes, saving=saving))
    return tuple(found)


# ----------------------------------------------------------------------------------------------------------------------
# Count the collectives of a plan's step and their bytes, under the labels of a ledger, to compare with a run.
#
# ```text
#   gather b1        fill the flat buffer with the shards of all ranks
#   reduce b1        reduce-scatter the gradients in the flat buffer
#   reduce b0        sum gradients of an unsharded bucket over the ranks of a copy
#   average b1       average the reduced gradients over the copies
# ```
#
# The bytes of a collective are the bytes of its whole buffer.


class Traffic(NamedTuple):
    """The number of runs of a collective in a step, and their total bytes."""

    times: int
    nbytes: int


def collectives(graph: StepGraph, plan: Plan, rank: int = 0) -> Mapping[tuple[Lane, str], Traffic]:
    """Return the collectives of `rank` of each copy in a step of `plan`, by lane and label.

    There are none if there is a single rank.
    """
    buckets = {bucket.id: bucket for bucket in plan.buckets}
    schedule = next((schedule for schedule in plan.schedules if schedule.rank == rank), plan.schedules[0])
    times, nbytes = Counter[tuple[Lane, str]](), Counter[tuple[Lane, str]]()
    for action in schedule.actions:
        if action.verb in (Verb.GATHER, Verb.REDUCE) and isinstance(action.target, BucketRef):
            for lane, label, own_bytes in _of(graph, plan, buckets[action.target.bucket], action.verb):
                times[lane, label] += 1
                nbytes[lane, label] += own_bytes
    return {work: Traffic(count, nbytes[work]) for work, count in sorted(times.items())}


def _of(graph: StepGraph, plan: Plan, bucket: Bucket, verb: Verb) -> Iterator[tuple[Lane, str, int]]:
    """Yield the lane, the label and the bytes of each collective of the action `verb` on `bucket`."""
    if verb is Verb.GATHER:
        if bucket.is_sharded:
            yield Lane.GATHER, f"gather {bucket.id}", bucket.flat_nbytes
        return
    own_bytes = bucket.reduced_nbytes if bucket.is_sharded else bucket.grad_ratio * _trained_bytes(graph, bucket)
    if bucket.is_sharded:
        yield Lane.REDUCE, f"reduce {bucket.id}", bucket.flat_grad_nbytes
    elif plan.num_ranks > 1:
        yield Lane.REDUCE, f"reduce {bucket.id}", own_bytes
    if plan.num_copies > 1:
        yield Lane.REDUCE, f"average {bucket.id}", own_bytes


def _trained_bytes(graph: StepGraph, bucket: Bucket) -> int:
    """Return the bytes of the parameters of `bucket` for which `graph` has gradients."""
    trained = {storage.of for storage in graph.storages if storage.kind is Kind.GRAD}
    return sum(storage.nbytes for storage in graph.storages if storage.id in trained.intersection(bucket.params))
