"""Forwards that wait for their backward, and gradients that stay between micro-batches, keep the budget."""

import functools
import gc
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import elixir_compile as elixir
from elixir_compile.base.errors import NoFeasiblePlan
from elixir_compile.graph.capture.modules import executor_of, model_of
from elixir_compile.ir import Plan, Tier
from elixir_compile.runtime.bucket import live_slab_bytes
from elixir_compile.runtime.saved import SavedActivations
from elixir_compile.search.joint.replan import Correction
from elixir_compile.session import together, trial
from elixir_compile.session.causes import NextPlans
from elixir_compile.session.planning import ExternalUsage
from elixir_compile.step.bucket_bytes import bucket_host_bytes
from elixir_compile.step.timeline import host_bytes
from tests.run import random_runs
from tests.run.models import CASES, blocks, broken, routed, seeded
from tests.run.processes import apart, spawn
from tests.run.random_runs import SLACK_BYTES, Draw, Outcome, Stack, apart_from_saved, outcomes
from tests.run.runtime.test_activations import two_forwards
from tests.run.training import Run, Step, assert_same, by_elixir, by_torch, hybrid_adamw, plain_step, planned_peak_bytes

# ----------------------------------------------------------------------------------------------------------------------
# Gradients that stay through the next forward are in the plan: the budget holds between micro-batches too.
#
# Each run whose peak is measured has a process of its own, or subtracts the tensors that were there before.


ROWS, WIDTH = 256, 128
LIMITS: dict[str, Any] = {"inner": "aot_eager", "search_timeout": 1}


def stack() -> nn.Module:
    return seeded(Stack, WIDTH, 3)


def rows() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))


def planned(**options: Any) -> Plan:
    """Return the plan of the model's step before any training."""
    return elixir.plan(stack(), (rows(),), options={**LIMITS, "plan_cache": False, **options})


def compiled_with(**options: Any) -> tuple[nn.Module, Any, torch.optim.Optimizer]:
    torch._dynamo.reset()
    model = elixir.prepare(stack())
    compiled = torch.compile(model, backend="elixir", options={**LIMITS, **options})
    return model, compiled, hybrid_adamw(model.parameters())


def plan_of(compiled: Any) -> Plan:
    plan = elixir.compilations(compiled)[-1].plan
    assert plan is not None
    return plan


# Random runs.


def wrong_of(seeds: Iterable[int], draw: Callable[[int], Draw] = Draw.of) -> list[str]:
    """Return the runs with faults, and those whose budget, plan or peak is another than when they were saved."""
    found = outcomes(seeds, draw)
    return [str(outcome) for outcome in found if outcome.faults] + apart_from_saved(found)


QUICK_SEEDS = (0, 5, 8)
"""Both models and planners, prepared or not, two or three micro-batches, clipped or not, all moments of the update."""


@pytest.mark.parametrize(
    "seeds",
    [QUICK_SEEDS, pytest.param([seed for seed in range(20) if seed not in QUICK_SEEDS], marks=pytest.mark.slow)],
    ids=["quick", "others"],
)
def test_random_runs_keep_their_budget_and_their_prediction(seeds: Sequence[int]) -> None:
    """20 runs in all; `make fuzz` draws 200 others. `python -m tests.run.random_runs --save` keeps other figures."""
    assert apart(wrong_of, seeds) == []


@pytest.mark.parametrize(
    "seeds", [(105, 107), pytest.param((101, 106, 109, 110, 111), marks=pytest.mark.slow)], ids=["quick", "others"]
)
def test_random_runs_of_kernels_that_take_more_keep_their_budget(seeds: Sequence[int]) -> None:
    """Convolutions, RNNs captured whole, branches, and graph breaks, with losses of all kinds."""
    assert apart(wrong_of, seeds, Draw.of_others) == []


def test_random_runs_find_faults() -> None:
    draw = Draw.of(0)
    good = Outcome(draw=draw, budget_bytes=10**6, planned_bytes=10**6, peak_bytes=10**6, is_same=True, seconds=1.0)
    assert good.faults == []
    for wrong in ({"is_same": False}, {"peak_bytes": 10**6 + 2 * SLACK_BYTES}, {"planned_bytes": 10**6 - 30_000}):
        assert len(Outcome(**{**{name: getattr(good, name) for name in Outcome.__slots__}, **wrong}).faults) == 1


def test_figures_other_than_the_saved_ones_are_found_where_those_were_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random_runs, "SAVED", tmp_path / "saved.json")
    figures = {"budget_bytes": 10**6, "planned_bytes": 10**6, "peak_bytes": 10**6, "is_same": True, "seconds": 1.0}
    first, second = (Outcome(draw=Draw.of(seed), **figures) for seed in (0, 1))
    random_runs.save([first])
    random_runs.save([second])
    other = Outcome(draw=Draw.of(1), **{**figures, "peak_bytes": 10**6 + 257})
    assert apart_from_saved([first, second]) == []
    assert len(apart_from_saved([first, other])) == len(apart_from_saved([Outcome(draw=Draw.of(2), **figures)])) == 1
    monkeypatch.setattr(random_runs, "here", lambda: {"torch": "another"})
    assert apart_from_saved([other]) == []


# Noticed before the second forward.


def first_step(budget_bytes: int, folder: str, is_cached: bool) -> tuple[list[bool], list[int], list[str]]:
    """Train a step of three micro-batches: for each, whether the plan counts kept gradients, and the measured peak;
    and the lines of the log."""
    os.environ["ELIXIR_CACHE_DIR"] = folder
    lines: list[str] = []
    logger = logging.getLogger("elixir_compile")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler := logging.Handler())
    handler.emit = lambda record: lines.append(record.getMessage())
    _, compiled, optimizer = compiled_with(device_memory=budget_bytes, plan_cache=is_cached)
    counts, peaks, batch = [], [], rows()
    for number in range(3):
        record = elixir.measure_step(lambda: compiled(batch).backward(), device="cpu")
        counts.append(plan_of(compiled).counts_staying_gradients)
        peaks.append(record.device_peak_bytes)
        if number == 2:
            optimizer.step()
    return counts, peaks, [line for line in lines if line.startswith("accumulates")]


def test_the_budget_holds_from_the_second_micro_batch_of_the_first_step(tmp_path: Path) -> None:
    budget_bytes = int(0.7 * planned(planner="keep_all").prediction.device_peak_bytes)
    counts, peaks, lines = apart(first_step, budget_bytes, str(tmp_path), False)
    assert counts == [False, True, True]
    assert max(peaks[1:]) <= budget_bytes + SLACK_BYTES
    (line,) = lines
    assert "of gradients of earlier backward passes stay" in line
    assert "zero_grad()" in line


def test_a_second_process_plans_staying_gradients_at_once(tmp_path: Path) -> None:
    budget_bytes = int(0.7 * planned(planner="keep_all").prediction.device_peak_bytes)
    counts = [apart(first_step, budget_bytes, str(tmp_path), True)[0] for _ in range(2)]
    assert counts == [[False, True, True], [True, True, True]]


def test_an_accumulation_that_ended_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELIXIR_CACHE_DIR", str(tmp_path))
    budget_bytes = int(0.7 * planned(planner="keep_all").prediction.device_peak_bytes)
    found = []
    for accumulates in (True, False, False):
        _, compiled, optimizer = compiled_with(device_memory=budget_bytes, report=False)
        for number in range(10):
            compiled(rows()).backward()
            if number == 0:
                found.append(plan_of(compiled).counts_staying_gradients)
            if not accumulates or number % 2:
                optimizer.step()
                optimizer.zero_grad()
    assert found == [False, True, False]


@pytest.mark.parametrize("reason", ["zeros", "second backward", "before the backward"])
def test_other_gradients_that_stay_are_counted(reason: str) -> None:
    _, compiled, optimizer = compiled_with(plan_cache=False, report=False)
    for _ in range(2):
        loss = compiled(rows())
        if reason == "before the backward":
            optimizer.zero_grad()
        if reason == "second backward":
            loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        if reason != "before the backward":
            optimizer.zero_grad(set_to_none=reason != "zeros")
    assert plan_of(compiled).counts_staying_gradients


def test_a_plain_loop_is_planned_once() -> None:
    model, compiled, optimizer = compiled_with(plan_cache=False, report=False)
    for _ in range(3):
        compiled(rows()).backward()
        optimizer.step()
        with torch.no_grad():
            compiled(rows())  # the gradients of training are still there
        optimizer.zero_grad()
    assert not any(bucket.spec.sum_nbytes for bucket in executor_of(model).buckets)


# Said beforehand.


def test_the_option_counts_staying_gradients_in_the_first_plan() -> None:
    _, compiled, _ = compiled_with(accumulate=True, plan_cache=False, report=False)
    generations = []
    for _ in range(3):
        compiled(rows()).backward()
        generations.append(plan_of(compiled))
    assert generations[0].counts_staying_gradients
    assert generations[0] is generations[1] is generations[2]


def test_the_plan_says_what_gradients_stay() -> None:
    without, counted = planned(), planned(accumulate=True)
    param_bytes = sum(param.nbytes for param in stack().parameters())
    assert counted.staying_gradient_bytes(Tier.DEVICE) == param_bytes
    assert counted.prediction.device_peak_bytes - without.prediction.device_peak_bytes == param_bytes
    assert "gradients of earlier backward passes stay" in elixir.explain(counted)
    assert "accumulates" not in elixir.explain(without)


def test_gradients_that_add_up_on_the_host_are_in_the_plan() -> None:
    options = {"device_memory": int(0.4 * planned(planner="keep_all").prediction.device_peak_bytes)}
    counted = planned(**options, accumulate=True)
    without = replace(counted, buckets=tuple(replace(bucket, sum_nbytes=0) for bucket in counted.buckets))
    staying_bytes = counted.staying_gradient_bytes(Tier.HOST)
    assert counted.prediction.host_peak_bytes == host_bytes(without) + staying_bytes > host_bytes(without)


def test_too_little_memory_for_staying_gradients_is_an_error_that_names_them() -> None:
    options = {"device_memory": int(0.4 * planned(planner="keep_all").prediction.device_peak_bytes)}
    host_bytes = planned(**options).prediction.host_peak_bytes
    _, compiled, optimizer = compiled_with(**options, host_memory=host_bytes, plan_cache=False, report=False)
    compiled(rows()).backward()
    with pytest.raises(elixir.NoFeasiblePlan, match="gradients of earlier backward passes take") as raised:
        compiled(rows())
    assert raised.value.staying_bytes > 0
    assert "zero_grad()" in str(raised.value)
    optimizer.zero_grad()


# Several ranks.


def sharded_steps(rank: int, world_size: int, accumulate: bool | None) -> list[Any]:
    from torch.distributed.device_mesh import init_device_mesh

    model = elixir.prepare(seeded(Stack, WIDTH, 2), mesh=init_device_mesh("cpu", (world_size,)))
    options = {**LIMITS, "accumulate": accumulate, "plan_cache": False, "report": False}
    compiled, optimizer = torch.compile(model, backend="elixir", options=options), hybrid_adamw(model.parameters())
    losses, counted = [], []
    for _ in range(2):
        for part in rows().chunk(2):
            loss = compiled(part)
            loss.backward()
            losses.append(loss.item())
            counted.append(plan_of(compiled).counts_staying_gradients)
        optimizer.step()
        optimizer.zero_grad()
    return [losses, counted]


def test_several_ranks_plan_staying_gradients_together(tmp_path: Path) -> None:
    noticed = spawn(sharded_steps, 2, None, folder=tmp_path)
    said = spawn(sharded_steps, 2, True, folder=tmp_path)
    assert [counted for _, counted in noticed] == [[False, True, True, True]] * 2
    assert [counted for _, counted in said] == [[True] * 4] * 2
    assert [losses for losses, _ in noticed] == [losses for losses, _ in said]


# Hugging Face.


def trainer_peaks(budget_bytes: int, folder: str) -> tuple[list[int], bool]:
    """Train two steps of four micro-batches by the Trainer; return the peak of each micro-batch."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    peaks: list[int] = []

    class Measured(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            found: list[torch.Tensor] = []
            step = super().training_step
            record = elixir.measure_step(lambda: found.append(step(*args, **kwargs)), device="cpu")
            peaks.append(record.device_peak_bytes)
            return found[0]

    torch._dynamo.reset()
    config = GPT2Config(
        n_layer=3, n_embd=96, n_head=4, vocab_size=512, n_positions=64, use_cache=False,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = elixir.prepare(seeded(GPT2LMHeadModel, config))
    ids = torch.randint(0, 512, (32, 64), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in ids]
    options = {**LIMITS, "device_memory": budget_bytes, "plan_cache": False, "report": False}
    compiled: Any = torch.compile(model, backend="elixir", options=options)
    arguments = TrainingArguments(
        output_dir=folder, per_device_train_batch_size=4, gradient_accumulation_steps=4, max_steps=2, report_to=[],
        use_cpu=True, save_strategy="no", logging_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
        remove_unused_columns=False,
    )  # fmt: skip
    trainer = Measured(
        model=compiled, args=arguments, train_dataset=data, optimizers=(hybrid_adamw(model.parameters()), None)
    )
    trainer.train()
    return peaks, plan_of(compiled).counts_staying_gradients


@pytest.mark.slow
def test_the_trainer_of_hugging_face_keeps_its_budget_from_the_second_micro_batch(tmp_path: Path) -> None:
    budget_bytes = 8 << 20
    peaks, counts = apart(trainer_peaks, budget_bytes, str(tmp_path))
    assert len(peaks) == 8
    assert counts
    # The data set is 32 KiB, and torch's data loader holds a batch more.
    assert max(peaks[1:]) <= budget_bytes + 64 * 1024


# ----------------------------------------------------------------------------------------------------------------------
# Forwards that wait for their backward at the same time keep one budget: graphs of one step, or one graph twice.


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
    """Each expert is a graph of its own, for as many tokens as the batch gives it: only a forward that gets a new plan,
    as one of more tokens does, makes room, and none does once the first steps are measured and all sizes were there."""
    num_plans, plan_next = 0, NextPlans.plan

    def counted(plans: NextPlans, *args: Any) -> Any:
        nonlocal num_plans
        num_plans += 1
        return plan_next(plans, *args)

    model, batches = routed(breaks=True)
    with torch._dynamo.config.patch(recompile_limit=32):
        expected = by_torch(model).train([*batches] * 3)
        free = by_elixir(model, **OPTIONS).train(batches[:1])
        budget_bytes = planned_peak_bytes(free) // 2
        monkeypatch.setattr(NextPlans, "plan", counted)
        got = by_elixir(model, device_memory=budget_bytes, **OPTIONS).train([*batches] * 2)
        assert 0 < len(rooms) <= num_plans
        rooms.clear()
        got.train(batches)
    assert not rooms
    assert_same(expected, got)
    assert len(elixir.compilations(got.model)) > 8
    assert planned_peak_bytes(got) <= budget_bytes


def test_without_joint_plans_activations_are_offloaded_in_every_step(
    rooms: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise NoFeasiblePlan("", "", 1, 2, {})

    monkeypatch.setattr(together, "plan_jointly", refuse)
    monkeypatch.setattr(trial.FirstSteps, "may_be_lean", lambda *_: False)  # would need no room at first
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

    monkeypatch.setattr(trial, "plan_leanest", refuse)
    if not has_plans:
        monkeypatch.setattr(trial, "plan_jointly", refuse)
        monkeypatch.setattr(together, "plan_jointly", refuse)
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
        asked = graph.planner.joint_problem(graph.active, 1000, ExternalUsage())
        own = [bucket for bucket in in_force if not set(bucket.params).isdisjoint(graph.param_names)]
        own_bytes = sum(bucket_host_bytes(bucket, in_force[bucket]) for bucket in own)
        assert asked.host_base_bytes == total_bytes - own_bytes
        assert asked.host_budget_bytes + asked.host_base_bytes == host_bytes
        graph.planner.correction = Correction(cluster=asked.cluster, measured=asked.measured, excess_bytes=7)
        assert graph.planner.joint_problem(graph.active, 1000, ExternalUsage()).base_bytes == 1007
