"""Forwards that wait for their backward at the same time keep one budget: graphs of one step, or one graph twice."""

import functools
import gc
from collections.abc import Mapping
from typing import Any

import pytest
import torch

import elixir_compile as elixir
from elixir_compile.base.errors import NoFeasiblePlan
from elixir_compile.graph.capture.modules import executor_of, model_of
from elixir_compile.runtime.bucket import live_slab_bytes
from elixir_compile.runtime.saved import SavedActivations
from elixir_compile.search.joint.replan import Correction
from elixir_compile.session import outstanding
from elixir_compile.session.planning import ExternalUsage
from elixir_compile.step.bucket_bytes import bucket_host_bytes
from tests.run.activation_models import CASES, blocks, broken, routed
from tests.run.processes import apart
from tests.run.runtime.test_activations import two_forwards
from tests.run.training import Run, Step, assert_same, by_elixir, by_torch, hybrid_adamw, plain_step, planned_peak_bytes

OPTIONS: Mapping[str, Any] = {"plan_cache": False, "search_timeout": 0.5, "report": False}
CROWDED: Mapping[str, Step] = {"broken": plain_step, "blocks": two_forwards}
"""Steps in which several forwards wait, by the name of their model."""
UNPLANNED_BYTES = 4096
"""Step counters, tickets and losses."""


@pytest.fixture
def rooms(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What went to the host because a later forward needed the room: one entry each time."""
    made: list[bool] = []
    offload_outstanding = SavedActivations.offload_outstanding

    def noted(saved: SavedActivations) -> bool:
        found = offload_outstanding(saved)
        made.extend([found] * found)
        return found

    monkeypatch.setattr(SavedActivations, "offload_outstanding", noted)
    return made


@functools.cache
def half_bytes(name: str) -> int:
    """Return half of what the step of a case needs where everything is kept."""
    model, batches = CASES[name]()
    return planned_peak_bytes(by_elixir(model, **OPTIONS).train(batches[:1], CROWDED.get(name))) // 2


@pytest.mark.parametrize("name", CROWDED)
def test_outstanding_forwards_fit_half_the_budget_after_one_step(name: str, rooms: list[bool]) -> None:
    model, batches = CASES[name]()
    step, budget_bytes = CROWDED[name], half_bytes(name)
    expected = by_torch(model).train(batches, step)
    got = by_elixir(model, device_memory=budget_bytes, **OPTIONS).train(batches[:1], step)
    assert rooms
    rooms.clear()
    got.train(batches[1:], step)
    assert not rooms
    assert_same(expected, got)
    assert planned_peak_bytes(got) <= budget_bytes


@pytest.mark.slow
def test_experts_that_break_the_graph_share_half_the_budget(rooms: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each expert is a graph of its own, for as many tokens as the batch gives it."""
    model, batches = routed(breaks=True)
    with torch._dynamo.config.patch(recompile_limit=32):
        expected = by_torch(model).train(batches)
        free = by_elixir(model, **OPTIONS).train(batches[:1])
        budget_bytes = planned_peak_bytes(free) // 2
        got = by_elixir(model, device_memory=budget_bytes, **OPTIONS).train(batches)
    assert_same(expected, got)
    records = elixir.compilations(got.model)
    assert len(records) > 8
    assert planned_peak_bytes(got) <= budget_bytes
    assert len(rooms) < len(records)


def test_without_joint_plans_activations_are_offloaded_in_every_step(
    rooms: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise NoFeasiblePlan("", "", 1, 2, {})

    monkeypatch.setattr(outstanding, "plan_jointly", refuse)
    monkeypatch.setattr(outstanding.OutstandingForwards, "may_be_lean", lambda *_: False)  # would need no room at first
    model, batches = broken()
    budget_bytes = half_bytes("broken")
    expected = by_torch(model).train(batches)
    got = by_elixir(model, device_memory=budget_bytes, **OPTIONS)
    for batch in batches:
        rooms.clear()
        got.train([batch])
        assert rooms
    assert_same(expected, got)
    assert planned_peak_bytes(got) <= budget_bytes


@pytest.mark.parametrize("has_plans", [True, False])
def test_first_steps_without_lean_plans_keep_the_budget(has_plans: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise NoFeasiblePlan("", "", 1, 2, {})

    monkeypatch.setattr(outstanding, "plan_leanest", refuse)
    if not has_plans:
        monkeypatch.setattr(outstanding, "plan_jointly", refuse)
    model, batches = broken()
    budget_bytes = half_bytes("broken")
    expected = by_torch(model).train(batches)
    got = by_elixir(model, device_memory=budget_bytes, **OPTIONS)
    assert_same(expected, got.train(batches))
    assert planned_peak_bytes(got) <= budget_bytes


def test_slabs_of_offloaded_outstanding_forwards_are_freed() -> None:
    before = live_slab_bytes()
    model, (batch, *_) = blocks()
    run = by_elixir(model, **OPTIONS)
    losses = [run.compiled(batch), run.compiled(batch)]
    saved = executor_of(run.model).saved
    held_bytes = saved.device_bytes()
    assert saved.offload_outstanding()
    assert not saved.offload_outstanding()
    assert saved.device_bytes() == 0 < live_slab_bytes() - before <= 1.1 * held_bytes
    losses[0].backward()
    assert [len(saved.outstanding_owners()), saved.device_bytes()] == [1, 0]
    del losses
    saved.drop_free_slabs()
    assert live_slab_bytes() == before


def test_measured_peaks_keep_the_budget_after_joint_planning() -> None:
    for name in CROWDED:
        budget_bytes = half_bytes(name)
        planned_bytes, record = apart(measured, name, budget_bytes)
        assert record.device_peak_bytes <= budget_bytes + UNPLANNED_BYTES
        # Planned is a batch that both forwards read twice.
        assert 0.9 * planned_bytes <= record.device_peak_bytes <= planned_bytes + UNPLANNED_BYTES


def measured(name: str, budget_bytes: int) -> tuple[int, elixir.Record]:
    """Return the planned peak and the record of a settled step; run in a process of its own."""
    model, batches = CASES[name]()
    batch = batches[0]
    del batches  # as all else that is alive, they would count
    gc.collect()
    options = {**OPTIONS, "inner": "aot_eager", "device_memory": budget_bytes}
    run = Run(
        model=model,
        compiled=torch.compile(model, backend="elixir", options=options),
        optimizer=hybrid_adamw(model.parameters()),
    )
    for _ in range(3):
        CROWDED[name](run.compiled, run.optimizer, batch)
    record = elixir.measure_step(lambda: CROWDED[name](run.compiled, run.optimizer, batch))
    return planned_peak_bytes(run), record


def test_host_bytes_of_other_graphs_are_external_usage_of_a_joint_problem() -> None:
    """Later graphs are planned beside earlier ones, which have their buckets on the host by then."""
    host_bytes = 1 << 28
    model, (batch, *_) = broken()
    run = by_elixir(model, device_memory=half_bytes("broken"), host_memory=host_bytes, **OPTIONS).train([batch])
    executor = executor_of(run.model)
    in_force = dict(executor.buckets.in_force(for_training=True))
    total_bytes = sum(bucket_host_bytes(bucket, home) for bucket, home in in_force.items())
    assert total_bytes > 0
    for graph in model_of(run.model).graphs:
        asked = graph.joint_problem(1000, ExternalUsage())
        own = [bucket for bucket in in_force if not set(bucket.params).isdisjoint(graph.param_names)]
        own_bytes = sum(bucket_host_bytes(bucket, in_force[bucket]) for bucket in own)
        assert asked.host_base_bytes == total_bytes - own_bytes
        assert asked.host_budget_bytes + asked.host_base_bytes == host_bytes
        graph.planner.correction = Correction(cluster=asked.cluster, measured=asked.measured, excess_bytes=7)
        assert graph.joint_problem(1000, ExternalUsage()).base_bytes == 1007
