"""What a training step is: its graph, its buckets, its schedule, its plan and its record, as plain values."""

from elixir_compile.ir.bucket import Activations, Bucket, Placement, averaged_bytes
from elixir_compile.ir.codec import (
    fingerprint,
    graph_from_json,
    graph_to_json,
    plan_from_json,
    plan_to_json,
    record_from_json,
    record_to_json,
)
from elixir_compile.ir.graph import Op, StepGraph, Storage, graph_at
from elixir_compile.ir.kinds import (
    ITEM_BYTES,
    BucketId,
    GroupId,
    Kernel,
    Kind,
    Lane,
    OpId,
    Phase,
    RegionId,
    Saving,
    StorageId,
    Tier,
    Update,
    Verb,
)
from elixir_compile.ir.plan import PLAN_FORMAT, Decision, Plan, Prediction
from elixir_compile.ir.record import Origin, Record, Span
from elixir_compile.ir.schedule import Action, Region, Schedule, grad_of
from elixir_compile.ir.text import parse_graph, parse_plan

__all__ = [
    "ITEM_BYTES",
    "PLAN_FORMAT",
    "Action",
    "Activations",
    "Bucket",
    "BucketId",
    "Decision",
    "GroupId",
    "Kernel",
    "Kind",
    "Lane",
    "Op",
    "OpId",
    "Origin",
    "Phase",
    "Placement",
    "Plan",
    "Prediction",
    "Record",
    "Region",
    "RegionId",
    "Saving",
    "Schedule",
    "Span",
    "StepGraph",
    "Storage",
    "StorageId",
    "Tier",
    "Update",
    "Verb",
    "averaged_bytes",
    "fingerprint",
    "grad_of",
    "graph_at",
    "graph_from_json",
    "graph_to_json",
    "parse_graph",
    "parse_plan",
    "plan_from_json",
    "plan_to_json",
    "record_from_json",
    "record_to_json",
]
