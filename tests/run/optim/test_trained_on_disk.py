"""Trained parameters on disk, beside their state: bitwise what they are in memory, and what goes wrong is told."""

import copy
import errno
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import RMSprop

import elixir_compile as elixir
from elixir_compile.base.errors import DiskFailed, DiskFull, InvalidOption
from elixir_compile.ir import Lane, Tier, Update
from elixir_compile.runtime.disk_file import DISK_PAGE_BYTES, DiskFile
from elixir_compile.runtime.disk_params import file_ranges
from elixir_compile.session.plan_files import save_plan
from tests.pure.problems import disk_staging
from tests.run import updating
from tests.run.optim.test_hybrid_classes import both
from tests.run.optim.test_mixed_precision import BF16, FP16, mixed_run, recorded
from tests.run.optim.test_state_on_disk import (
    assert_same_training,
    batches_of,
    delay_disk,
    fail_calls,
    in_memory,
    kill_in_a_step,
    train_and_wait,
)
from tests.run.processes import apart
from tests.run.runtime.test_params_on_disk import anonymous_bytes
from tests.run.training import Run, assert_same_tensors, by_elixir, loss_of, plain_step, tight_bytes
from tests.run.updating import (
    accumulate,
    assert_equal,
    assert_resumes,
    buckets_of,
    controlled_worker,
    eager_run,
    hybrid_run,
    ladder,
    move_state,
    nan_staging,
    random_delay,
    rows,
    small_buckets,
    small_pieces,
    weights_of,
)


@pytest.fixture(autouse=True)
def pieces() -> Iterator[None]:
    """Two or three pieces per bucket, the last one short, for gathers and for updates."""
    with small_pieces():
        yield


def disk_run(tmp_path: Path, update: Update = Update.ACROSS_STEPS, **options: Any) -> Any:
    """Return the context of a run with all parameters and their state on disk."""
    return hybrid_run(ladder(), rows(1)[0], home="disk", update=update, disk_path=tmp_path, **options)


MODES = [pytest.param(mode, marks=[pytest.mark.slow] * (mode is not Update.ACROSS_STEPS)) for mode in Update]


@pytest.mark.parametrize("update", MODES)
def test_bitwise_equal_to_torch_after_twelve_steps(update: Update, tmp_path: Path) -> None:
    model, batches = ladder(), rows(12)
    expected = eager_run(model).train(batches)
    with nan_staging(), disk_run(tmp_path, update, disk_check=update is Update.ACROSS_STEPS) as run:
        run.train(batches)
        assert [bucket.placement.param for bucket in buckets_of(run)] == [Tier.DISK] * 4
        assert [bucket.update for bucket in buckets_of(run)] == [update] * 4
        assert_equal(expected, run)


@pytest.mark.slow
@pytest.mark.parametrize("update", list(Update))
def test_delays_of_the_disk_and_of_the_worker_change_nothing(
    update: Update, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    delay_disk(monkeypatch)
    batches = rows(20)
    expected = eager_run(ladder()).train(batches)
    with controlled_worker() as worker, nan_staging(), disk_run(tmp_path, update) as run:
        worker.delay_s = random_delay(3)
        assert_equal(expected, run.train(batches))


@pytest.mark.slow
@pytest.mark.parametrize("update", list(Update))
def test_a_step_moves_the_bytes_that_the_plan_says(update: Update, tmp_path: Path) -> None:
    """Each byte is read once for a gather, and read and written once by the update."""
    with disk_run(tmp_path, update) as run:
        run.train(rows(6))
        (batch,) = rows(1)
        record = elixir.measure_step(lambda: plain_step(run.compiled, run.optimizer, batch))
        run.optimizer.wait()
    num_gathers = record.counts["gather"] // len(buckets_of(run))
    found: dict[tuple[str, bool], int] = {}
    for span in record.spans:
        if span.lane is Lane.DISK:
            verb, of = span.label.split()
            found[verb, of.endswith(".state")] = found.get((verb, of.endswith(".state")), 0) + span.nbytes
    nbytes = sum(param.nbytes for param in run.model.parameters())
    assert found.pop(("read", True)) == found.pop(("write", True)) == 3 * nbytes
    read_bytes = found.pop(("read", False))
    assert num_gathers * nbytes <= read_bytes <= num_gathers * (nbytes + 2 * 4 * DISK_PAGE_BYTES)  # in whole pages
    assert not found


@pytest.mark.slow
def test_masters_of_both_dtypes(tmp_path: Path) -> None:
    for dtype in (BF16, FP16):
        options = {"update": Update.ACROSS_STEPS, "dtype": dtype, "disk_path": tmp_path, "disk_check": True}
        with mixed_run(ladder(), batches_of(dtype)[0], home="disk", **options) as run:
            found = recorded(run, batches_of(dtype))
            assert {bucket.placement.param for bucket in buckets_of(run)} == {Tier.DISK}
        assert_same_training(in_memory(dtype), found)


@pytest.mark.slow
def test_accumulation_of_a_class(tmp_path: Path) -> None:
    plain, hybrid = both(RMSprop, lr=1e-3)
    expected = accumulate(eager_run(ladder(), plain), rows(6), 3)
    with disk_run(tmp_path, Update.IN_BACKWARD, optimizer=hybrid) as run:
        assert_equal(expected, accumulate(run, rows(6), 3))


# ----------------------------------------------------------------------------------------------------------------------
# What users read and write between two steps.


def negated(run: Run) -> None:
    with torch.no_grad():
        for param in run.model.parameters():
            param.neg_()


def with_new_data(run: Run) -> None:
    for param in run.model.parameters():
        param.data = param.data.clone() * 2


def loaded(run: Run) -> None:
    run.model.load_state_dict({name: 3 * value for name, value in run.model.state_dict().items()})


def with_one_written(run: Run) -> None:
    with torch.no_grad():
        next(iter(run.model.parameters())).zero_()


@pytest.mark.slow
@pytest.mark.parametrize("update", [Update.AFTER_BACKWARD, Update.ACROSS_STEPS])
@pytest.mark.parametrize("change", [negated, with_new_data, loaded, with_one_written])
@pytest.mark.parametrize("is_behind_backward", [False, True])
def test_what_users_write_is_trained_on(
    change: Callable[[Run], None], update: Update, is_behind_backward: bool, tmp_path: Path
) -> None:
    """Between two steps, or between the backward and `step()`."""
    batches = rows(6)

    def train(run: Run) -> Run:
        for number, batch in enumerate(batches):
            if number % 2 and not is_behind_backward:
                change(run)
            loss = loss_of(run.compiled, batch)
            loss.backward()
            run.losses.append(loss.detach().clone())
            if number % 2 and is_behind_backward:
                change(run)
            run.optimizer.step()
            run.optimizer.zero_grad()
        return run

    expected = train(eager_run(ladder()))
    with disk_run(tmp_path, update, disk_check=True) as run:
        assert_equal(expected, train(run))


@pytest.mark.slow
def test_parameters_move_between_the_tiers(tmp_path: Path) -> None:
    batches = rows(9)
    expected, homes = eager_run(ladder()).train(batches), [Tier.DISK, Tier.HOST, Tier.DISK]
    with disk_run(tmp_path) as run:
        for number, home in enumerate(homes):
            run.train(batches[3 * number : 3 * number + 2])
            move_state(run, home, home)
            run.train(batches[3 * number + 2 : 3 * number + 3])
            files = [name for folder in tmp_path.iterdir() if folder.is_dir() for name in os.listdir(folder)]
            assert len(files) == (12 if home is Tier.DISK else 0)
        assert_equal(expected, run)


# ----------------------------------------------------------------------------------------------------------------------
# What goes wrong.


@pytest.mark.parametrize("update", MODES)
@pytest.mark.filterwarnings("ignore:.* move to the host, and other tensors hold")  # the exceptions hold them
def test_half_new_weights_are_never_gathered(update: Update, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = rows(8)
    with disk_run(tmp_path, update) as run:
        run.train(batches[:2])
        run.optimizer.wait()
        saved = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict()))
        with monkeypatch.context() as patch:
            fail_calls(patch, "pwritev", lambda number: number == 4)
            with pytest.raises(DiskFailed) as caught:
                train_and_wait(run, batches[2:4])
        assert any("Checkpoints are not affected" in note for note in getattr(caught.value, "__notes__", ()))
        run.optimizer.zero_grad()
        for _ in range(2):
            with pytest.raises(DiskFailed, match=r"the parameters of b\d are partly old and partly new"):
                loss_of(run.compiled, batches[4])
        assert_resumes(run, saved, batches[:2], batches[5:])


@pytest.mark.slow
@pytest.mark.parametrize("update", list(Update))
@pytest.mark.parametrize("bad", range(0, 24, 5))
def test_a_failed_read_raises_and_nothing_hangs(
    bad: int, update: Update, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a gather, or of an update. What is trained afterwards has the right bits, or there is an error."""
    batches = rows(5)
    with disk_run(tmp_path, update) as run:
        run.train(batches[:2])
        run.optimizer.wait()
        with monkeypatch.context() as patch:
            fail_calls(patch, "preadv", lambda number: number == bad)
            with pytest.raises(DiskFailed, match="read failed"):
                train_and_wait(run, batches[2:4])
        run.optimizer.zero_grad()
        again = loss_of(run.compiled, batches[3]) if not any_half_new(run) else None
        if again is not None:
            with torch.no_grad():
                copied = copy.deepcopy(ladder())
                copied.load_state_dict(run.model.state_dict())
            assert torch.equal(again, loss_of(copied, batches[3]))
        else:
            with pytest.raises(DiskFailed, match="partly old and partly new"):
                loss_of(run.compiled, batches[3])


def any_half_new(run: Run) -> bool:
    files: list[Any] = [bucket for bucket in buckets_of(run) if bucket.placement.param is Tier.DISK]
    return any(bucket.file.failure is not None for bucket in files)


@pytest.mark.slow
def test_an_update_that_fails_midway_is_never_gathered(tmp_path: Path) -> None:
    batches = rows(4)
    with controlled_worker() as worker, disk_run(tmp_path) as run:
        run.train(batches[:2])
        worker.fail_at = worker.num_updates + 1
        with pytest.raises(ArithmeticError, match="fell over"):
            run.train(batches[2:])
        with pytest.raises(DiskFailed, match=r"partly old .* fell over.* load one"):
            loss_of(run.compiled, batches[0])


@pytest.mark.slow
def test_a_full_disk_is_refused_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = rows(3)
    with disk_run(tmp_path) as run:
        before = weights_of(run)
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", no_space)
            with pytest.raises(DiskFull, match=r"b\d.param needs .* Nothing was written"):
                loss_of(run.compiled, batches[0])
        assert_same_tensors(before, weights_of(run))
        assert_equal(eager_run(ladder()).train(batches), run.train(batches))


FAULTS = {
    "truncated weights": ("param", lambda path: os.truncate(path, DISK_PAGE_BYTES), DiskFailed),
    "truncated state": ("exp_avg", lambda path: os.truncate(path, DISK_PAGE_BYTES), DiskFailed),
    "overwritten weights": ("param", lambda path: write_over(path), elixir.DiskCorrupted),
    "overwritten state": ("exp_avg_sq", lambda path: write_over(path), elixir.DiskCorrupted),
    "unlinked": ("param", os.unlink, None),
    "replaced": ("param", lambda path: replace_by_another(path), None),
}
"""What somebody else does to a file of a bucket, by its column, and the error that follows; None if it is read on."""


def write_over(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(DISK_PAGE_BYTES)
        file.write(b"\xff" * 64)


def replace_by_another(path: Path) -> None:
    path.with_name("other").write_bytes(b"another model")
    path.with_name("other").replace(path)


@pytest.mark.parametrize("is_behind_backward", [False, True])
@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=[pytest.mark.slow] * (name != "truncated weights")) for name in FAULTS]
)
@pytest.mark.filterwarnings("ignore:.* move to the host, and other tensors hold")  # the exceptions hold them
def test_what_others_do_to_a_file_is_told_or_changes_nothing(
    fault: str, is_behind_backward: bool, tmp_path: Path
) -> None:
    """Between two steps, or between the backward and `step()`; no weights of before the fault and behind it mix."""
    batches, (column, change, error) = rows(6), FAULTS[fault]
    with disk_run(tmp_path, disk_check=True) as run:
        run.train(batches[:2])
        run.optimizer.wait()
        saved = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict()))
        path = sorted(tmp_path.glob(f"*/*.{column}"))[1]
        assert path.stat().st_size > 2 * DISK_PAGE_BYTES
        before = path.stat().st_size

        def train() -> None:
            loss = loss_of(run.compiled, batches[2])
            loss.backward()
            if is_behind_backward:
                change(path)
            run.optimizer.step()
            run.optimizer.zero_grad()
            train_and_wait(run, batches[3:4])

        if not is_behind_backward:
            change(path)
        if error is None:
            train()
            expected = eager_run(ladder()).train(batches[:4])
            assert_same_tensors(weights_of(expected), weights_of(run))
            move_state(run, Tier.HOST, Tier.HOST)
            run.train(batches[4:])
            assert_same_tensors(weights_of(expected.train(batches[4:])), weights_of(run))
            return
        for _ in range(2):
            with pytest.raises((error, DiskFailed), match=r"ends at byte|was damaged|partly old"):
                train()
            run.optimizer.zero_grad()
        if path.stat().st_size < before:  # whose mapping may not be written
            return
        assert_resumes(run, saved, batches[:2], batches[4:])


@pytest.mark.slow
def test_a_write_of_the_user_to_a_truncated_file_is_told(tmp_path: Path) -> None:
    """Without a check the process would end: the rest of the bucket is read through the mapping of the file."""
    batches = rows(3)
    with disk_run(tmp_path) as run:
        run.train(batches[:2])
        run.optimizer.wait()
        for param in run.model.parameters():
            (found,) = file_ranges([param.data])
            if found is not None and found.start_bytes == 0 and found.nbytes > DISK_PAGE_BYTES:
                os.truncate(found.path, DISK_PAGE_BYTES)
                with torch.no_grad():
                    param.view(-1)[:4].zero_()
        with pytest.raises(DiskFailed, match=r"read failed .* truncated it"):
            train_and_wait(run, batches[2:])


def no_space(*_: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


CHILD = """
import os, sys, time, torch
from pathlib import Path
from elixir_compile.ir import Update
from tests.run.updating import hybrid_run, ladder, rows

real, folder, batches = os.pwritev, Path(sys.argv[1]), rows(8)
os.pwritev = lambda *args: (time.sleep(0.02), real(*args))[1]
with hybrid_run(ladder(), batches[0], home="disk", update=Update.ACROSS_STEPS, disk_path=folder / "disk") as run:
    for number, batch in enumerate(batches):
        run.train([batch])
        if number == 3:
            torch.save((run.model.state_dict(), run.optimizer.state_dict()), folder / "checkpoint")
        print(number, flush=True)
"""


@pytest.mark.slow
def test_a_killed_process_resumes_bitwise_from_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updating, "WIDTH", 13)
    (tmp_path / "disk").mkdir()
    kill_in_a_step(CHILD, tmp_path)
    batches = rows(8)
    expected = eager_run(ladder()).train(batches)
    del expected.losses[:4]
    with disk_run(tmp_path / "disk") as run:
        weights, state = torch.load(tmp_path / "checkpoint")
        run.model.load_state_dict(weights)
        run.optimizer.load_state_dict(state)
        assert_equal(expected, run.train(batches[4:]))
        assert len(list((tmp_path / "disk").glob("*.lock"))) == 1  # what the killed process left is gone


# ----------------------------------------------------------------------------------------------------------------------
# The planner.


@pytest.mark.slow
def test_the_planner_sends_parameters_to_disk_if_the_host_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batches = ladder(), rows(6)
    expected = eager_run(model).train(batches)
    for module in ("ir.cost", "search.evaluator"):
        monkeypatch.setattr(f"elixir_compile.{module}.gather_staging_bytes", lambda buckets: 0)
    with small_buckets(lambda plan: plan), disk_staging(0):  # which is larger than the model
        budget = tight_bytes(model, batches[0])
        parameters = sum(param.nbytes for param in model.parameters())
        options = {"device_memory": budget, "host_memory": int(1.5 * parameters), "replan": False}
        with pytest.raises(elixir.NoFeasiblePlan, match="disk_path"):
            by_elixir(model, **options).train(batches[:1])
        run = by_elixir(model, disk_path=str(tmp_path), **options).train(batches)
    homes = [bucket.placement.param for bucket in buckets_of(run)]
    assert Tier.DISK in homes
    assert Tier.HOST in homes
    assert_equal(expected, run)
    plan = elixir.compilations(run.model)[0].plan
    assert plan is not None
    assert plan.prediction.host_peak_bytes <= 1.5 * parameters
    save_plan(plan, tmp_path / "plan.json")
    with disk_staging(0), pytest.raises(InvalidOption, match=r"disk_path.* keeps the optimizer state of b\d"):
        by_elixir(model, plan=tmp_path / "plan.json").train(batches[:1])


# ----------------------------------------------------------------------------------------------------------------------
# 24 matrices of 16 MiB with AMSGrad, whose 1.5 GiB of weights and state are three times a `host_memory` of 512 MiB.


class Multiplied(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight)


ADAM = {"lr": 1e-3, "amsgrad": True}


def trained(num_layers: int, width: int, num_steps: int, options: dict[str, Any] | None) -> Run:
    """Return a run of so many matrices after `num_steps`; by torch if there are no `options`."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Multiplied(width) for _ in range(num_layers)))
    if options is None:
        optimizer: Any = torch.optim.AdamW(model.parameters(), fused=True, **ADAM)
        run = Run(model=model, compiled=torch.compile(model, backend="aot_eager"), optimizer=optimizer)
    else:
        more = {"inner": "aot_eager", "plan_cache": False, "replan": False, "report": False, **options}
        compiled = torch.compile(elixir.prepare(model), backend="elixir", options=more)
        run = Run(model=model, compiled=compiled, optimizer=elixir.HybridAdamW(model.parameters(), **ADAM))
    generator = torch.Generator().manual_seed(1)
    return run.train((torch.randn(4, width, generator=generator) for _ in range(num_steps)), mean_step)


def mean_step(compiled: Callable[..., Any], optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
    return plain_step(lambda x: compiled(x).square().mean(), optimizer, batch)


def bits_of(run: Run) -> list[str]:
    digest = hashlib.sha256(b"".join(param.detach().numpy().tobytes() for param in run.model.parameters()))
    return [*(loss.item().hex() for loss in run.losses), digest.hexdigest()]


def large_by_torch() -> list[str]:
    return bits_of(trained(24, 2048, 3, None))


def large_on_disk(folder: str) -> tuple[list[str], int, int, list[str]]:
    """Return the bits of a run, its anonymous bytes, those that are planned, and where the parameters are."""
    options = {"disk_path": folder, "device_memory": "128MiB", "host_memory": "512MiB"}
    trained(2, 8, 2, {**options, "device_memory": "1MiB"})  # what torch and Dynamo load
    before_bytes = anonymous_bytes()
    run = trained(24, 2048, 3, options)
    used_bytes = anonymous_bytes() - before_bytes
    plan = elixir.compilations(run.model)[-1].plan
    assert plan is not None
    planned_bytes = plan.prediction.host_peak_bytes + plan.prediction.device_peak_bytes
    return bits_of(run), used_bytes, planned_bytes, [str(home.param) for home in plan.placements]


@pytest.mark.slow
def test_weights_and_state_of_three_times_the_host_memory(tmp_path: Path) -> None:
    found, used_bytes, planned_bytes, homes = apart(large_on_disk, str(tmp_path))
    assert found == apart(large_by_torch)
    assert homes.count("disk") > 20
    assert used_bytes <= 1.02 * planned_bytes


def seconds_on_a_slow_disk(folder: str, bytes_per_s: float) -> list[tuple[float, float]]:
    """Return for each of a few steps its seconds, and those in which the disk moves its bytes."""
    move, lock, moved_bytes = DiskFile._move_parts, threading.Lock(), [0]

    def slow(file: DiskFile, operation: str, parts: list[memoryview], *where: int) -> None:
        nbytes = sum(map(len, parts))
        with lock:
            moved_bytes[0] += nbytes
            begin_s = time.perf_counter()
            move(file, operation, parts, *where)
            time.sleep(max(nbytes / bytes_per_s - (time.perf_counter() - begin_s), 0.0))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DiskFile, "_move_parts", slow)
        run = trained(8, 2048, 2, {"disk_path": folder, "device_memory": "128MiB", "host_memory": "256MiB"})
        found: list[tuple[float, float]] = []
        for _ in range(3):
            before, begin_s = moved_bytes[0], time.perf_counter()
            run.train([torch.ones(4, 2048)], mean_step)
            found.append((time.perf_counter() - begin_s, (moved_bytes[0] - before) / bytes_per_s))
    return found


@pytest.mark.slow
def test_a_step_takes_the_seconds_of_the_disk(tmp_path: Path) -> None:
    found = apart(seconds_on_a_slow_disk, str(tmp_path), 1e8)
    assert all(disk_s > 10 for _, disk_s in found)
    assert sum(step_s for step_s, _ in found) <= 1.10 * sum(disk_s for _, disk_s in found), found
