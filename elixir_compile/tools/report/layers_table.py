"""Tell for each layer of a model where its training state is, what its activations become, and why.

A layer is the part of the model under one number in its module path; a module outside of all layers has a row of its
own. Bytes of optimizer state are those of a bucket, shared out to its parameters by their bytes.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from elixir_compile.ir.graph import is_numbered, layer_of
from elixir_compile.ir.kinds import Kind, Saving, StorageId, Tier, Verb
from elixir_compile.ir.plan import Decision
from elixir_compile.ir.schedule import BucketRef
from elixir_compile.session.line import layer_of_group
from elixir_compile.tools.report.held import Survey

OTHER = "other ops"
"""The row of ops that are of no layer and of no module with parameters, as a loss."""


@dataclass(slots=True, kw_only=True)
class LayerRow:
    """One layer, or a module outside of all layers."""

    layer: str
    param_bytes: Counter[Tier] = field(default_factory=Counter)
    """Bytes of parameters by their home."""
    state_bytes: Counter[Tier] = field(default_factory=Counter)
    """Bytes of optimizer state by its home."""
    saved_bytes: Counter[Saving] = field(default_factory=Counter)
    """Bytes of saved activations by treatment."""
    num_gathers: int = 0
    """Gathers in a step of the buckets that hold parameters of the layer."""
    compute_s: float = 0.0
    """Seconds of the ops of the layer: forward, backward and what runs again."""
    decisions: tuple[Decision, ...] = ()
    """The decisions about the layer and about its buckets."""

    @property
    def cost_s(self) -> float:
        """Seconds by which the step is longer than without the decisions."""
        return sum(decision.cost_s for decision in self.decisions)

    @property
    def saves_bytes(self) -> int:
        """Bytes by which the decisions lower the peak."""
        return sum(decision.saves_bytes for decision in self.decisions)


def layer_of_param(name: str) -> str:
    """Return the layer of a parameter: `h.3` for `h.3.mlp.weight`, and `head` for `head.weight` outside of layers."""
    layer = layer_of(name)
    return layer if is_numbered(layer) else name.rpartition(".")[0] or name


def layer_rows(survey: Survey, op_seconds: Sequence[float]) -> tuple[LayerRow, ...]:
    """Return a row for each layer in the order of the forward.

    `op_seconds` are the seconds of the ops that the plan runs. Raises ValueError if `survey` is without a graph.
    """
    held = survey.held
    if held is None:
        raise ValueError("the layers of a plan are those of its graph")
    step = held.rows.step
    rows: dict[str, LayerRow] = {}

    def row(layer: str) -> LayerRow:
        return rows.setdefault(layer, LayerRow(layer=layer))

    homes = _homes(survey)
    nbytes = {storage.id: storage.nbytes for storage in step.storages if storage.kind is Kind.PARAM}
    for op in step.ops:
        for name in op.reads:
            if name in homes:
                row(layer_of_param(name))
    for op, seconds in zip(step.ops, op_seconds, strict=True):
        layer = layer_of(op.module)
        own = layer if is_numbered(layer) else op.module if op.module in rows else OTHER
        if seconds:
            row(own).compute_s += seconds
    for name, home in homes.items():
        own = row(layer_of_param(name))
        own.param_bytes[home.param] += nbytes.get(name, 0)
        own.state_bytes[home.optim] += int(nbytes.get(name, 0) * home.state_per_byte)
    for group in survey.plan.activations:
        row(layer_of_group(group.id)).saved_bytes[group.saving] += group.nbytes
    _add_buckets(survey, rows)
    return tuple(rows.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Home:
    """The homes of a parameter and of its state, and the bytes of state for each of its bytes."""

    param: Tier
    optim: Tier
    state_per_byte: float


def _homes(survey: Survey) -> Mapping[StorageId, _Home]:
    plan = survey.plan
    return {
        name: _Home(
            param=placement.param,
            optim=placement.optim,
            state_per_byte=bucket.state_nbytes / bucket.nbytes if bucket.nbytes else 0.0,
        )
        for bucket, placement in zip(plan.buckets, plan.placements, strict=True)
        for name in bucket.params
    }


def _add_buckets(survey: Survey, rows: Mapping[str, LayerRow]) -> None:
    """Add gathers and decisions of the buckets to the rows of their parameters, and decisions about layers."""
    by_subject: dict[str, list[Decision]] = {}
    for decision in survey.plan.decisions:
        by_subject.setdefault(decision.subject, []).append(decision)
    for layer, own in rows.items():
        own.decisions += tuple(by_subject.get(layer, ()))
    for bucket in survey.plan.buckets:
        num_gathers = sum(move.verb is Verb.GATHER for move in survey.moves.of(BucketRef(bucket.id)))
        for layer in dict.fromkeys(layer_of_param(name) for name in bucket.params):
            rows[layer].num_gathers += num_gathers
            rows[layer].decisions += tuple(by_subject.get(bucket.id, ()))
