"""Random small training steps: chains of layers as a capture would hand them over.

```text
  fwd   x --embed--> s0 --layer 0--> s1 --layer 1--> s2 ... --head--> out
  bwd   out' --head--> d_n ... --layer 0--> d_0 --embed--> the last gradients
```

Each layer is a matmul with its parameters and an elementwise op whose result its backward reads. Parameters may be tied
(embed and head), frozen, used by several layers, or unused.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from hypothesis import settings
from hypothesis import strategies as st

from elixir_compile.ir import Kind, Op, OpId, Param, Phase, Shards, StepGraph, Storage, StorageId, sizes

ITEM_BYTES = {"float32": 4, "bfloat16": 2}


def examples(count: int) -> settings:
    """Return settings for `count` examples in `make test`, the same in each run, and four times as many in
    `make fuzz`."""
    return settings(max_examples=count if settings.default.derandomize else 4 * count)


@dataclass
class DraftPlan:
    """A step graph under construction."""

    dtype: str
    ops: list[Op] = field(default_factory=list)
    storages: dict[str, Storage] = field(default_factory=dict)

    def storage(self, name: str, kind: Kind, numel: int, of: str | None = None) -> StorageId:
        """Return the storage `name`, made on the first call."""
        if name not in self.storages:
            self.storages[name] = Storage(
                id=StorageId(name),
                nbytes=numel * ITEM_BYTES[self.dtype],
                kind=kind,
                dtype=self.dtype,
                of=None if of is None else StorageId(of),
            )
        return self.storages[name].id

    def op(self, phase: Phase, target: str, reads: list[StorageId], writes: list[StorageId], module: str) -> None:
        """Append one op; its moved bytes are those of its storages."""
        nbytes = sum(self.storages[name].nbytes for name in (*reads, *writes))
        prefix = {Phase.FORWARD: "fwd", Phase.BACKWARD: "bwd"}[phase]
        self.ops.append(
            Op(
                id=OpId(f"{prefix}.{target}_{len(self.ops)}"),
                target=f"aten.{target}.default",
                phase=phase,
                reads=tuple(reads),
                writes=tuple(writes),
                flops=nbytes * 8,
                moved_bytes=nbytes,
                module=module,
                source=f"model.py:{len(self.ops) + 10}",
            )
        )


@dataclass(frozen=True)
class Layer:
    """One layer of a chain: its parameters by name with their sizes, and which of them are frozen."""

    module: str
    params: tuple[tuple[str, int], ...]
    frozen: bool
    act_numel: int


def chain(layers: list[Layer], dtype: str = "float32", training: bool = True, unused_numel: int = 0) -> StepGraph:
    """Return the step graph of `layers` applied one after another."""
    draft = DraftPlan(dtype=dtype)
    x = draft.storage("x", Kind.INPUT, layers[0].act_numel)
    acts = [x]
    for number, layer in enumerate(layers):
        params = [draft.storage(name, Kind.PARAM, numel) for name, numel in layer.params]
        temp = draft.storage(f"t{number}", Kind.TEMP, layer.act_numel)
        is_last = number == len(layers) - 1
        kind = Kind.SAVED if training and not is_last else Kind.TEMP
        act = draft.storage("out" if is_last else f"s{number}", kind, layer.act_numel)
        draft.op(Phase.FORWARD, "mm", [acts[-1], *params], [temp], layer.module)
        draft.op(Phase.FORWARD, "relu", [temp], [act], layer.module)
        acts.append(act)
    if unused_numel:
        draft.storage("unused", Kind.PARAM, unused_numel)
    if training:
        _backward(draft, layers, acts)
    return StepGraph(
        name="chain",
        ops=tuple(draft.ops),
        storages=tuple(draft.storages.values()),
        outputs=(acts[-1],),
        aliases=(("x_view", x),),
    )


def _backward(draft: DraftPlan, layers: list[Layer], acts: list[StorageId]) -> None:
    flowing = draft.storage("tangent", Kind.INPUT, layers[-1].act_numel)
    trained: list[StorageId] = []
    for number in reversed(range(len(layers))):
        layer = layers[number]
        if not layer.frozen:
            for name, numel in layer.params:
                # A tied parameter adds into the gradient that its later use wrote.
                grad = draft.storage(f"{name}.grad", Kind.GRAD, numel, of=name)
                again = [grad] if grad in trained else []
                trained += [] if again else [StorageId(name), grad]
                draft.op(Phase.BACKWARD, "mm", [acts[number], flowing, *again], [grad], layer.module)
        passed = draft.storage(f"d{number}", Kind.TEMP, layer.act_numel)
        params = [StorageId(name) for name, _ in layer.params]
        draft.op(Phase.BACKWARD, "mm", [flowing, *params], [passed], layer.module)
        flowing = passed
    draft.ops.append(Op(id=OpId("update"), target="update", phase=Phase.UPDATE, reads=tuple(trained), writes=()))


FACTS = frozenset(field.name for field in fields(Param))


def with_facts(params: Mapping[StorageId, Param], **facts: Mapping[StorageId, object]) -> dict[StorageId, Param]:
    """`params` with `facts`: for each field, its values by the name of the parameter. Those with state are trained."""
    found = dict(params)
    for name, values in facts.items():
        for param, value in values.items():
            is_trained = name == "state_nbytes" or found.get(param, Param()).is_trained
            fact = Shards.of(value) if name == "shard_numels" else value
            found[param] = replace(found.get(param, Param()), **{name: fact, "is_trained": is_trained})
    return found


@st.composite
def step_graphs(draw: st.DrawFn, training: bool | None = None) -> StepGraph:
    """Random chains of one to six layers; `training` fixes whether they have a backward."""
    num_layers = draw(st.integers(1, 6))
    tied = num_layers > 2 and draw(st.booleans())
    layers: list[Layer] = []
    for number in range(num_layers):
        sizes = draw(st.lists(st.sampled_from([1, 16, 100, 640, 1000]), min_size=0, max_size=3))
        params = [(f"p{number}_{index}", numel) for index, numel in enumerate(sizes)]
        frozen = draw(st.integers(0, 3)) == 0
        if tied and number in (0, num_layers - 1):
            params = [("embed", 800)]
            frozen = False
        elif number and layers[-1].params and draw(st.integers(0, 4)) == 0 and not tied:
            # The layer before it, used twice.
            params, frozen = list(layers[-1].params), layers[-1].frozen
        act_numel = draw(st.sampled_from([1, 50, 500]))
        layers.append(Layer(module=f"layers.{number}", params=tuple(params), frozen=frozen, act_numel=act_numel))
    return chain(
        layers,
        dtype=draw(st.sampled_from(sorted(ITEM_BYTES))),
        training=draw(st.booleans()) if training is None else training,
        unused_numel=draw(st.sampled_from([0, 0, 7])),
    )


def symbolic(
    graph: StepGraph, pattern: str = "{numel}*s0", values: tuple[tuple[str, int], ...] = (("s0", 3),)
) -> StepGraph:
    """Return `graph` as captured dynamic: activations of `pattern` elements, where `{numel}` is what they had."""
    storages = tuple(_grown(storage, pattern, dict(values)) for storage in graph.storages)
    return replace(graph, storages=storages, symbols=values)


def _grown(storage: Storage, pattern: str, values: dict[str, int]) -> Storage:
    if storage.kind in (Kind.PARAM, Kind.GRAD):
        return storage
    item_bytes = ITEM_BYTES[storage.dtype]
    size = sizes.canonical(f"{item_bytes}*({pattern.format(numel=storage.nbytes // item_bytes)})")
    return replace(storage, size=size, nbytes=sizes.evaluate(size, values))


PATTERNS = (
    "{numel}*s0",
    "{numel}*s0*s1",
    "{numel}*s0*s1 - s0",
    "{numel}*s0*s1**2 + 7",
    "({numel} + s0)*(s1 + 2)",
    "{numel}*((s0 + 7)//8)",
    "Max({numel}, s0)*s1",
)


@st.composite
def symbolic_graphs(draw: st.DrawFn, training: bool | None = None) -> StepGraph:
    """Random chains whose activations have sizes of the symbols s0 and s1, each by one of several patterns."""
    graph = draw(step_graphs(training=training))
    values = (("s0", draw(st.integers(1, 9))), ("s1", draw(st.integers(1, 9))))
    storages = tuple(_grown(storage, draw(st.sampled_from(PATTERNS)), dict(values)) for storage in graph.storages)
    return replace(graph, storages=storages, symbols=values)
