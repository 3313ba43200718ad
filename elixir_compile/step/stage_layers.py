"""The layers of a captured step at which it can be cut into the stages of a pipeline, and the step of one stage.

```text
  module   wte wpe | h.0 | h.1 | h.2 | ln_f lm_head      `|` a stage may begin here
  cut 2            sends the tensors that h.0 or an earlier layer makes and h.1 or a later one reads
```

The modules before the first numbered layer are a layer too, and so are those after the last; a model without numbered
layers may be cut before each of its modules. A layer without parameters belongs to the layer before it, because no
stage may be without parameters. An op belongs to the layer of its module, wherever it is; an op of a module that
contains layers belongs to the layer of the op before it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from elixir_compile.ir import Kind, Phase, StepGraph, StorageId
from elixir_compile.ir.graph import is_numbered, layer_of


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLayer:
    """Modules that stay together in one stage."""

    modules: tuple[str, ...]
    """Their paths, in the order of their first op: `transformer.wte`, `transformer.wpe`."""

    @property
    def name(self) -> str:
        """The path at which a stage that begins with this layer begins."""
        return self.modules[0]


@dataclass(frozen=True, kw_only=True, eq=False)
class LayeredStep:
    """A captured step, its layers, and the layer of each op."""

    graph: StepGraph
    layers: tuple[StageLayer, ...]
    numbers: Mapping[str, int]
    """The index of the layer of each op of the forward and the backward, by the name of the op."""

    @cached_property
    def crossings(self) -> tuple[tuple[StorageId, ...], ...]:
        """The tensors that cross each cut, by the index of the layer behind it: earlier layers make them of parameters,
        and later layers read them in the forward. Tensors that depend on no parameter, such as positions and masks, are
        not sent: each stage makes them of its own inputs. Nothing crosses the cut before the first layer."""
        made: dict[StorageId, int] = {}
        learned = {storage.id for storage in self.graph.storages if storage.kind is Kind.PARAM}
        last_read: dict[StorageId, int] = {}
        for op in self.graph.ops:
            if op.phase is not Phase.FORWARD:
                continue
            at = self.numbers[op.id]
            for name in op.reads:
                last_read[name] = max(at, last_read.get(name, 0))
            if not learned.isdisjoint(op.reads):
                learned.update(op.writes)
            for name in op.writes:
                made[name] = min(at, made.get(name, at))
        params = {storage.id for storage in self.graph.storages if storage.kind in (Kind.PARAM, Kind.BUFFER)}
        return tuple(
            tuple(
                name
                for name, at in made.items()
                if name in learned and name not in params and at < cut <= last_read.get(name, -1)
            )
            for cut in range(len(self.layers))
        )

    @cached_property
    def nbytes(self) -> Mapping[StorageId, int]:
        return {storage.id: storage.nbytes for storage in self.graph.storages}

    @cached_property
    def crossing_bytes(self) -> tuple[int, ...]:
        """The bytes that cross each cut in the forward; as many gradients come back."""
        return tuple(sum(self.nbytes[name] for name in names) for names in self.crossings)

    def run_as(self, step: StepGraph) -> "LayeredStep":
        """Return the layers of `step`, which is this step with fused or repeated ops."""
        return LayeredStep(graph=step, layers=self.layers, numbers=_numbers(step, self.layers))

    def stage_graph(self, first: int, end: int) -> StepGraph:
        """Return the step of a stage of the layers from `first` up to, not including, `end`.

        Tensors that other stages make are its inputs. It has no update.
        """
        ops = tuple(op for op in self.graph.ops if first <= self.numbers.get(op.id, -1) < end)
        own = {name for op in ops for name in (*op.reads, *op.writes)}
        writes: set[StorageId] = set().union(*(op.writes for op in ops))
        storages = tuple(
            replace(storage, kind=Kind.INPUT)
            if storage.id not in writes and storage.kind in (Kind.SAVED, Kind.TEMP)
            else replace(storage, of=storage.of if storage.of in own else None)
            for storage in self.graph.storages
            if storage.id in own
        )
        sent = self.crossings[end] if end < len(self.layers) else self.graph.outputs
        aliases = tuple((value, name) for value, name in self.graph.aliases if name in own)
        return replace(
            self.graph,
            name=f"{self.graph.name} {self.layers[first].name}",
            ops=ops,
            storages=storages,
            outputs=tuple(name for name in sent if name in own),
            aliases=aliases,
        )


def layered(graph: StepGraph) -> LayeredStep:
    """Return `graph` with its layers."""
    labels = dict.fromkeys(layer_of(op.module) for op in graph.ops if op.phase is Phase.FORWARD)
    prefixes = {label[:dot] for label in labels for dot in (0, *(i for i, c in enumerate(label) if c == "."))}
    modules = [label for label in labels if label not in prefixes] or list(labels)
    groups = _grouped(modules, _with_parameters(graph, modules))
    layers = tuple(StageLayer(modules=tuple(group)) for group in groups)
    return LayeredStep(graph=graph, layers=layers, numbers=_numbers(graph, layers))


def _numbers(graph: StepGraph, layers: Sequence[StageLayer]) -> Mapping[str, int]:
    of_module = {module: at for at, layer in enumerate(layers) for module in layer.modules}
    numbers: dict[str, int] = {}
    at, phase = 0, Phase.FORWARD
    for op in graph.ops:
        if op.phase is Phase.UPDATE:
            continue
        if op.phase is not phase:
            at, phase = len(layers) - 1, op.phase
        at = of_module.get(layer_of(op.module), at)
        numbers[op.id] = at
    return numbers


def _with_parameters(graph: StepGraph, modules: Sequence[str]) -> frozenset[str]:
    params = {storage.id for storage in graph.storages if storage.kind is Kind.PARAM}
    reading = {layer_of(op.module) for op in graph.ops if op.phase is Phase.FORWARD and not params.isdisjoint(op.reads)}
    return frozenset(modules) & reading


def _grouped(modules: Sequence[str], with_parameters: frozenset[str]) -> list[list[str]]:
    """Return `modules` in groups that may be stages: each has parameters; modules without a number stay together
    beside numbered layers."""
    has_numbers = any(is_numbered(module) and module in with_parameters for module in modules)
    groups: list[list[str]] = []
    for before, module in zip([None, *modules], modules, strict=False):
        joins = has_numbers and before is not None and not is_numbered(module) and not is_numbered(before)
        if groups and (joins or module not in with_parameters or with_parameters.isdisjoint(groups[-1])):
            groups[-1].append(module)
        else:
            groups.append([module])
    return groups
