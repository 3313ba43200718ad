"""What tests ask of real ranks whose parameters are on disk, each rank's shards in files of its own."""

import errno
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

import elixir_compile as elixir
from elixir_compile.base.errors import DiskFailed
from elixir_compile.graph.capture.modules import executor_of
from elixir_compile.graph.ops.shards import own_shard
from elixir_compile.ir import Lane, Tier, Update
from elixir_compile.runtime.disk_file import DISK_PAGE_BYTES
from elixir_compile.tools.report.explain import explain
from tests.pure.problems import disk_staging
from tests.run import frozen_checks
from tests.run.frozen_checks import LARGE_WIDTH, Adapted, frozen_spans, squares, stack
from tests.run.optim.test_state_on_disk import fail_calls
from tests.run.ranks_training import MODELS, Pair, batches, compiled_with, full, hybrid, mesh_of
from tests.run.ranks_updates import assert_same, host_budget, local_values, on_disk, own, own_rows, train
from tests.run.updating import small_pieces

Parts = Sequence[float]
"""The part of each parameter that each rank owns; empty if these are equal."""


def odd_over(world_size: int, parts: Parts = (), **options: Any) -> Pair:
    """Return an `odd` model over ranks, in place of its double too."""
    shares = [elixir.Share(rank=rank, num_rows=48 // world_size, state=part) for rank, part in enumerate(parts)]
    model = elixir.prepare(MODELS["odd"](), mesh=mesh_of([world_size]) if world_size > 1 else None, shares=shares)
    optimizer = hybrid(model.parameters())
    compiled = compiled_with(model, planner="greedy", **options)
    return Pair(model=model, compiled=compiled, optimizer=optimizer, double=model, double_optimizer=optimizer)


def on_disk_options(folder: str, update: str = "across_steps") -> dict[str, Any]:
    """Return the options of a run on disk."""
    return {"disk_path": Path(folder), "disk_check": True, "update": update}


def budget_of(world_size: int) -> dict[str, Any]:
    """Return the device budget under which large parameters live on the host, as an option."""
    return {"device_memory": host_budget("odd", batches(1)[0], world_size)}


def kinds_on_disk(pair: Pair) -> dict[str, int]:
    """Return how many buckets have their parameters on disk, by what they are."""
    counts: dict[str, int] = {}
    for bucket in executor_of(pair.model).buckets:
        if bucket.placement.param is Tier.DISK:
            counts[type(bucket).__name__] = counts.get(type(bucket).__name__, 0) + 1
    return counts


def has_the_bits_of_memory(
    rank: int, world_size: int, folder: str, updates: Sequence[str], parts: Parts
) -> list[dict[str, int]]:
    """Train with all that leaves the device on disk, and in memory, and compare the bits that this rank has; return
    `kinds_on_disk` for each of `updates`."""
    steps, budget, found = batches(3), budget_of(world_size), list[dict[str, int]]()
    expected: dict[bool, Any] = {}
    for update in updates:
        clips = update != "in_backward"
        if clips not in expected:
            pair = odd_over(world_size, parts, update="after_backward", **budget)
            expected[clips] = train(pair, steps, clips=clips), local_values(pair)
        with small_pieces(), on_disk(with_params=True):
            pair = odd_over(world_size, parts, **budget, **on_disk_options(folder, update))
            assert train(pair, steps, clips=clips) == expected[clips][0], update
            assert_same(expected[clips][1], local_values(pair))
            found.append(kinds_on_disk(pair))
    return found


def moves_the_planned_bytes(rank: int, world_size: int, folder: str) -> None:
    """Each byte of this rank's shards is read once for a gather, and read and written once by the update."""
    with small_pieces(), on_disk(with_params=True):
        pair = odd_over(world_size, **budget_of(world_size), **on_disk_options(folder))
        train(pair, batches(2))
        record = elixir.measure_step(lambda: train(pair, batches(1)))
        pair.optimizer.wait()
        for bucket in executor_of(pair.model).buckets:
            if bucket.placement.param is not Tier.DISK:
                continue
            own_bytes = sum(slot.own_nbytes for slot in bucket.slots)
            gathers = [span for span in record.spans if span.label == f"gather {bucket.spec.id}"]
            num_gathers = sum(span.lane is Lane.GATHER for span in gathers)
            found = {verb: [0, 0] for verb in ("read", "write")}
            for span in record.spans:
                verb, _, of = span.label.partition(" ")
                if span.lane is Lane.DISK and of.partition(".")[0] == bucket.spec.id:
                    found[verb][of.endswith(".state")] += span.nbytes
            assert found["write"] == [0, 3 * own_bytes]
            assert found["read"][1] == 3 * own_bytes
            pages_bytes = num_gathers * DISK_PAGE_BYTES * (1 + len(bucket.slots))
            assert num_gathers * own_bytes <= found["read"][0] <= num_gathers * own_bytes + pages_bytes
            assert sum(span.nbytes for span in gathers if span.lane is Lane.H2D) == num_gathers * (
                bucket.spec.flat_shard_nbytes
            )
        plan = elixir.compilations(pair.model)[-1].plan
        assert plan is not None
        assert "parameters and optimizer state on the disk, gradients on the host" in explain(plan, "up.weight")


CHANGES: dict[str, Callable[[Pair], object]] = {
    "in place": lambda pair: [param.neg_() for param in pair.model.parameters()],
    "this rank's shard": lambda pair: [own(param).mul_(0.5) for param in pair.model.parameters()],
    "loaded": lambda pair: pair.model.load_state_dict({k: 2 * value for k, value in pair.model.state_dict().items()}),
}


def follows_the_user(rank: int, world_size: int, folder: str) -> None:
    """Change parameters between steps, and between the backward and the update."""
    budget, steps = budget_of(world_size), batches(4)

    def trained(pair: Pair, change: Callable[[Pair], object]) -> tuple[list[float], dict[str, torch.Tensor]]:
        losses: list[float] = []
        for number, batch in enumerate(steps):
            losses.append(pair.own_backward(batch))
            if number == 1:
                with torch.no_grad():
                    change(pair)
            pair.optimizer.step()
            pair.optimizer.zero_grad()
            if number == 2:
                with torch.no_grad():
                    change(pair)
        return losses, local_values(pair)

    for change in CHANGES.values():
        losses, values = trained(odd_over(world_size, update="across_steps", **budget), change)
        with small_pieces(), on_disk(with_params=True):
            found, got = trained(odd_over(world_size, **budget, **on_disk_options(folder)), change)
            assert found == losses
            assert_same(values, got)


def fails_on_the_last(rank: int, world_size: int, folder: str, call: str, number: int) -> list[str]:
    """Let a read or a write of the last rank fail, and return what this rank raises, and what it raises when all begin
    another step."""
    steps, said = batches(3), list[str]()
    with small_pieces(), on_disk(with_params=True):
        pair = odd_over(world_size, **budget_of(world_size), **on_disk_options(folder))
        train(pair, steps[:2])
        pair.optimizer.wait()
        distributed.barrier()
        with pytest.MonkeyPatch.context() as patch:
            if rank == world_size - 1:
                fail_calls(patch, call, lambda at: at == number)
            for _ in range(2):
                try:
                    train(pair, steps[2:])
                    pair.compiled(own_rows(steps[2]))
                except (DiskFailed, elixir.PeerFailed) as error:
                    said += [type(error).__name__, str(error)]
                else:
                    said += ["nothing", ""]
    return said


def has_no_room_for_parameters(rank: int, world_size: int, folder: str) -> list[str]:
    """Let the disk of the last rank be full, and return what the first forward raises."""

    def full_disk(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with on_disk(with_params=True), pytest.MonkeyPatch.context() as patch:
        if rank == world_size - 1:
            patch.setattr(os, "posix_fallocate", full_disk)
        pair = odd_over(world_size, **budget_of(world_size), **on_disk_options(folder))
        try:
            pair.compiled(own_rows(batches(1)[0]))
        except elixir.ElixirError as error:
            return [type(error).__name__, str(error)]
    return ["nothing", ""]


# ----------------------------------------------------------------------------------------------------------------------
# Checkpoints: saved from the disks of some ranks, loaded to those of others.


def saves(rank: int, world_size: int, folder: str) -> None:
    """Train from the disk and save, also the whole weights as one file."""
    with small_pieces(), on_disk(with_params=True):
        pair = odd_over(world_size, **budget_of(world_size), **on_disk_options(folder))
        train(pair, batches(2))
        elixir.save(f"{folder}/saved", pair.model, pair.optimizer, step=2)
        whole = {name: full(value) for name, value in pair.model.state_dict().items()}
        if rank == 0:
            torch.save(whole, f"{folder}/whole.pt")
        again = odd_over(world_size, **budget_of(world_size), **on_disk_options(folder))
        train(again, batches(1))
        elixir.load(f"{folder}/saved", again.model, again.optimizer)
        assert train(again, batches(3)[2:]) == train(pair, batches(3)[2:])
        assert_same(local_values(pair), local_values(again))


def loads(rank: int, world_size: int, folder: str) -> dict[str, int]:
    """Load to the disk and to memory, before and after the first forward, and go on alike."""
    expected: Any = None
    counts: dict[str, int] = {}
    for is_there, is_before in ((False, True), (True, True), (True, False)):
        with small_pieces() if is_there else nullcontext(), on_disk(with_params=is_there):
            options: dict[str, Any] = on_disk_options(folder) if is_there else {"update": "across_steps"}
            pair = odd_over(world_size, **budget_of(world_size), **options)
            if not is_before:
                train(pair, batches(1))
            assert elixir.load(f"{folder}/saved", pair.model, pair.optimizer).step == 2
            for name, value in torch.load(f"{folder}/whole.pt").items():
                assert torch.equal(full(pair.model.state_dict()[name]), value), name
            found = train(pair, batches(4)[2:]), local_values(pair)
            expected = expected or found
            assert found[0] == expected[0]
            assert_same(expected[1], found[1])
            counts = kinds_on_disk(pair)
    return counts


# ----------------------------------------------------------------------------------------------------------------------
# Frozen codes in 8 bits, and the planner's own choice.


def reads_frozen_codes(rank: int, world_size: int, folder: str) -> None:
    """Train adapters beside frozen codes in the files of each rank: the losses of those in memory, and nothing of the
    codes goes back."""
    found: list[list[float]] = []
    for options in ({}, on_disk_options(folder)):
        model = elixir.prepare(stack(Adapted, LARGE_WIDTH), mesh=mesh_of([world_size]))
        with small_pieces(), on_disk(with_params=True):
            compiled = compiled_with(model, planner="zero3_offload", **options)
            optimizer = elixir.HybridAdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
            steps = frozen_checks.batches(width=LARGE_WIDTH)
            found.append([squares(compiled, optimizer, batch).item() for batch in steps])
            record = elixir.measure_step(partial(squares, compiled, optimizer, steps[0]))
    assert found[0] == found[1]
    plan = elixir.compilations(compiled)[-1].plan
    assert plan is not None
    codes = [bucket for bucket in plan.buckets if bucket.dtype == "int8"]
    assert codes
    assert all(plan.placement(bucket.id).param is Tier.DISK and bucket.is_sharded for bucket in codes)
    spans = frozen_spans(record, plan.buckets)
    assert not [span for span in spans if span.lane is Lane.D2H]
    read_bytes, copied_bytes = (sum(s.nbytes for s in spans if s.lane is lane) for lane in (Lane.DISK, Lane.H2D))
    assert copied_bytes <= read_bytes


def is_planned(rank: int, world_size: int, folder: str) -> list[str]:
    """Let the planner send what the host cannot hold to disk, and return the homes of parameters."""
    steps, budget = batches(2), budget_of(world_size)
    expected = odd_over(world_size, update="across_steps", **budget)
    losses = train(expected, steps)
    with pytest.MonkeyPatch.context() as patch, disk_staging(0):
        for module in ("ir.cost", "search.evaluator"):
            patch.setattr(f"elixir_compile.{module}.gather_staging_bytes", lambda buckets: 0)
        own_bytes = sum(own_shard(param).nbytes for param in expected.model.parameters())
        options = {**budget, "host_memory": int(1.5 * own_bytes)}
        with pytest.raises(elixir.NoFeasiblePlan, match="disk_path"):
            train(odd_over(world_size, update="across_steps", **options), steps)
        pair = odd_over(world_size, **options, **on_disk_options(folder))
        assert train(pair, steps) == losses
        assert_same(local_values(expected), local_values(pair))
    plan = elixir.compilations(pair.model)[-1].plan
    assert plan is not None
    assert plan.prediction.host_peak_bytes <= options["host_memory"]
    assert plan.update is Update.ACROSS_STEPS
    return sorted({str(home.param) for home in plan.placements})
