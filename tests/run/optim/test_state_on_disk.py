"""Optimizer state on disk: bitwise what it is in memory, and what goes wrong is told."""

import copy
import errno
import gc
import os
import pickle
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import elixir_compile as elixir
from elixir_compile.base.errors import DiskFailed, DiskFull, GradientsChanged, InvalidOption
from elixir_compile.ir import Tier, Update
from elixir_compile.optim.disk import DiskState
from elixir_compile.session.saved import save_plan
from tests.covering import covering
from tests.pure.problems import disk_staging
from tests.run import updating
from tests.run.processes import start_program
from tests.run.training import Run, assert_same_tensors, by_elixir, fused_adamw, loss_of, tight_bytes
from tests.run.updating import (
    assert_equal,
    buckets_of,
    controlled_worker,
    eager_run,
    flat_state,
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
    """Three pieces per bucket, the last one short."""
    with small_pieces():
        yield


def fail_calls(patch: pytest.MonkeyPatch, name: str, is_bad: Callable[[int], bool]) -> None:
    """Let the n-th call from now on of `os.preadv` or `os.pwritev` fail where `is_bad(n)`."""
    real, counts = getattr(os, name), iter(range(10**9))

    def call(*args: Any) -> int:
        if is_bad(next(counts)):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*args)

    patch.setattr(os, name, call)


@pytest.mark.parametrize(("home", "update"), covering(["split disk", "host disk"], list(Update)))
def test_bitwise_equal_to_torch_after_twenty_steps(home: str, update: Update, tmp_path: Path) -> None:
    model, batches = ladder(), rows(20)
    expected = eager_run(model).train(batches)
    options = {"disk_path": tmp_path, "disk_check": update is Update.ACROSS_STEPS}
    with nan_staging(), hybrid_run(model, batches[0], home=home, update=update, **options) as run:
        run.train(batches)
        assert [bucket.placement.optim for bucket in buckets_of(run)] == [Tier.DISK] * 4
        assert [bucket.update for bucket in buckets_of(run)] == [update] * 4
        assert_equal(expected, run)


@pytest.mark.parametrize("update", list(Update))
def test_delays_of_the_disk_and_of_the_worker_change_nothing(
    update: Update, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(11)
    for name in ("preadv", "pwritev"):
        real = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda *args, real=real: (time.sleep(chance.choice((0, 0, 1e-3, 3e-3))), real(*args))[1]
        )
    model, batches = ladder(), rows(20)
    expected = eager_run(model).train(batches)
    with (
        controlled_worker() as worker,
        nan_staging(),
        hybrid_run(model, batches[0], home="host disk", update=update, disk_path=tmp_path) as run,
    ):
        worker.delay_s = random_delay(3)
        assert_equal(expected, run.train(batches))


@pytest.mark.parametrize("amsgrad", [False, True])
def test_schedulers_accumulation_frozen_parameters_and_amsgrad(amsgrad: bool, tmp_path: Path) -> None:
    model, batches = ladder(), rows(8)
    model.steps[1].requires_grad_(False)

    def train(run: Run) -> Run:
        scheduler = torch.optim.lr_scheduler.OneCycleLR(run.optimizer, max_lr=0.1, total_steps=9)
        for first, second in zip(batches[::2], batches[1::2], strict=True):
            loss_of(run.compiled, first).backward()
            run.train([second])
            scheduler.step()
        return run

    expected = train(eager_run(model, amsgrad=amsgrad))
    options = {"optimizer": lambda params: elixir.HybridAdamW(params, lr=1e-2, amsgrad=amsgrad)}
    with nan_staging():
        update = Update.ACROSS_STEPS
        with hybrid_run(model, batches[0], home="host disk", update=update, disk_path=tmp_path, **options) as run:
            assert_equal(expected, train(run))


def test_the_planner_sends_state_to_disk_if_the_host_is_full(tmp_path: Path) -> None:
    model, batches = ladder(), rows(6)
    expected = eager_run(model).train(batches)
    with small_buckets(lambda plan: plan), disk_staging(0):  # which is larger than the model
        budget = tight_bytes(model, batches[0])
        parameters = sum(param.nbytes for param in model.parameters())
        options = {"device_memory": budget, "host_memory": int(3 * parameters), "replan": False}
        with pytest.raises(elixir.NoFeasiblePlan):
            by_elixir(model, **options).train(batches[:1])
        run = by_elixir(model, disk_path=str(tmp_path), **options).train(batches)
    tiers = [bucket.placement.optim for bucket in buckets_of(run)]
    assert tiers[-1] is Tier.DISK
    assert Tier.HOST in tiers
    assert_equal(expected, run)
    plan = elixir.compilations(run.model)[0].plan
    assert plan.prediction.host_peak_bytes <= 3 * parameters
    save_plan(plan, tmp_path / "plan.json")
    with disk_staging(0), pytest.raises(InvalidOption, match=r"disk_path.* keeps the optimizer state of b\d"):
        by_elixir(model, plan=tmp_path / "plan.json").train(batches[:1])


def test_two_groups_of_one_bucket_have_their_own_statistics(tmp_path: Path) -> None:
    """The weights have a third statistic, the biases do not."""

    def groups(params: Any) -> list[dict[str, Any]]:
        params = list(params)
        kinds = ((2, True), (1, False))
        return [{"params": [p for p in params if p.dim() == dims], "amsgrad": amsgrad} for dims, amsgrad in kinds]

    model, batches = ladder(), rows(5)
    expected = eager_run(model, lambda params: fused_adamw(groups(params))).train(batches)
    with disk_run(tmp_path, optimizer=lambda params: elixir.HybridAdamW(groups(params), lr=1e-2)) as run:
        assert_equal(expected, run.train(batches))


def disk_run(tmp_path: Path, update: Update = Update.ACROSS_STEPS, **options: Any) -> Any:
    """Return the context of a run with all state on disk."""
    return hybrid_run(ladder(), rows(1)[0], home="host disk", update=update, disk_path=tmp_path, **options)


def test_statistics_are_read_on_access_and_written_on_assignment(tmp_path: Path) -> None:
    batches = rows(4)
    expected = eager_run(ladder()).train(batches[:2])
    with disk_run(tmp_path) as run:
        run.train(batches[:2])
        for own, other in zip(run.model.parameters(), expected.model.parameters(), strict=True):
            entry, plain = run.optimizer.state[own], expected.optimizer.state[other]
            assert isinstance(entry, DiskState)
            assert sorted(entry) == sorted(plain)
            assert all(torch.equal(entry[name], plain[name]) for name in plain)
            assert all(entry[name].stride() == plain[name].stride() for name in plain)
            entry["exp_avg"].zero_()
            assert torch.equal(entry["exp_avg"], plain["exp_avg"])  # that was a copy
            entry["exp_avg"] = 3 * plain["exp_avg"]
            plain["exp_avg"].mul_(3)
            with pytest.raises(TypeError, match="on disk"):
                del entry["exp_avg"]
            assert "on disk" in repr(entry)
        assert_equal(expected.train(batches[2:]), run.train(batches[2:]))


def test_copies_are_in_memory_and_hold_no_file(tmp_path: Path) -> None:
    with disk_run(tmp_path) as run:
        run.train(rows(2))
        names = [name for name, _ in run.model.named_parameters()]
        for copied in (copy.deepcopy(run.optimizer), pickle.loads(pickle.dumps(run.optimizer))):
            states = list(copied.state.values())
            assert [type(entry) for entry in states] == [dict] * len(names)
            for number, entry in enumerate(states):
                for name, value in entry.items():
                    assert torch.equal(value, flat_state(run.optimizer)[f"{number}.{name}"])


def test_state_dicts_load_both_ways_during_queued_updates(tmp_path: Path) -> None:
    batches = rows(9)
    expected = eager_run(ladder()).train(batches)
    with disk_run(tmp_path) as run:
        run.train(batches[:3])
        saved = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict()))
        by_torch = eager_run(ladder())
        by_torch.model.load_state_dict(saved[0])
        by_torch.optimizer.load_state_dict(saved[1])
        by_torch.train(batches[3:6])
        run.train(batches[6:])  # somewhere else
        run.model.load_state_dict(by_torch.model.state_dict())
        run.optimizer.load_state_dict(by_torch.optimizer.state_dict())
        assert all(isinstance(entry, DiskState) for entry in run.optimizer.state.values())
        run.losses.clear()
        del expected.losses[:6]
        assert_equal(expected, run.train(batches[6:]))


def test_state_moves_between_the_tiers(tmp_path: Path) -> None:
    batches = rows(12)
    expected = eager_run(ladder()).train(batches)
    with disk_run(tmp_path) as run:
        for number, optim in enumerate([Tier.DISK, Tier.HOST, Tier.DISK, Tier.HOST]):
            run.train(batches[3 * number : 3 * number + 2])
            move_state(run, optim)
            assert {isinstance(entry, DiskState) for entry in run.optimizer.state.values()} == {optim is Tier.DISK}
            run.train(batches[3 * number + 2 : 3 * number + 3])
            files = [name for folder in tmp_path.iterdir() if folder.is_dir() for name in os.listdir(folder)]
            assert len(files) == (8 if optim is Tier.DISK else 0)
        assert_equal(expected, run)


def train_and_wait(run: Run, batches: list[torch.Tensor]) -> None:
    run.train(batches)
    run.optimizer.wait()


def test_a_full_disk_is_refused_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    batches = rows(3)
    with disk_run(tmp_path) as run:
        before = weights_of(run)
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", full)
            with pytest.raises(DiskFull, match=r"exp_avg needs .* Nothing was written"):
                loss_of(run.compiled, batches[0])
        assert_same_tensors(before, weights_of(run))
        assert not run.optimizer.state
        assert_equal(eager_run(ladder()).train(batches), run.train(batches))


@pytest.mark.parametrize("update", list(Update))
def test_a_failed_write_raises_next_and_invalidates_the_state(
    update: Update, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = rows(8)
    with disk_run(tmp_path, update) as run:
        run.train(batches[:2])
        saved = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict()))
        with monkeypatch.context() as patch:
            fail_calls(patch, "pwritev", lambda number: number == 4)
            with pytest.raises(DiskFailed) as caught:
                train_and_wait(run, batches[2:4])
        assert any("Checkpoints are not affected" in note for note in caught.value.__notes__)
        with pytest.raises(DiskFailed, match=r"an earlier write failed|partly old and partly new"):
            run.optimizer.state_dict()
        # The write may have failed in the middle of a backward, whose updates have no step then.
        with pytest.raises((DiskFailed, GradientsChanged) if update is Update.IN_BACKWARD else DiskFailed):
            train_and_wait(run, batches[4:5])
        run.optimizer.zero_grad()
        run.model.load_state_dict(saved[0])
        run.optimizer.load_state_dict(saved[1])
        run.losses.clear()
        expected = eager_run(ladder()).train(batches[:2])
        expected.losses.clear()
        assert_equal(expected.train(batches[5:]), run.train(batches[5:]))


@pytest.mark.parametrize("bad", [0, 3])
def test_a_failed_read_raises_and_nothing_hangs(bad: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that fails before anything of its bucket is updated can be tried again."""
    batches = rows(4)
    with disk_run(tmp_path, Update.AFTER_BACKWARD) as run:
        run.train(batches[:2])
        with monkeypatch.context() as patch:
            fail_calls(patch, "preadv", lambda number: number == bad)
            with pytest.raises(DiskFailed, match="read failed"):
                run.train(batches[2:3])
        if bad == 0:
            run.optimizer.step()
            expected = eager_run(ladder()).train(batches[:3])
            assert_same_tensors(weights_of(expected), weights_of(run))
            assert_same_tensors(flat_state(expected.optimizer), flat_state(run.optimizer))
        else:
            with pytest.raises(DiskFailed, match="partly old and partly new"):
                run.optimizer.step()


def test_an_update_that_fails_midway_invalidates_the_state(tmp_path: Path) -> None:
    batches = rows(4)
    with controlled_worker() as worker, disk_run(tmp_path) as run:
        run.train(batches[:2])
        worker.fail_at = worker.num_updates + 1
        with pytest.raises(ArithmeticError, match="fell over"):
            run.train(batches[2:])
        with pytest.raises(DiskFailed, match=r"partly old .* fell over.* load one"):
            run.optimizer.state_dict()


def test_files_are_deleted_with_the_optimizer(tmp_path: Path) -> None:
    with disk_run(tmp_path) as run:
        run.train(rows(2))
        run.optimizer.wait()
        assert any(tmp_path.iterdir())
        run.optimizer = None
    del run
    gc.collect()
    deadline_s = time.monotonic() + 10  # a thread of its own may have to close it
    while any(tmp_path.iterdir()) and time.monotonic() < deadline_s:
        time.sleep(1e-3)
    assert not any(tmp_path.iterdir())


CHILD = """
import os, sys, time, torch
from pathlib import Path
from elixir_compile.ir import Update
from tests.run import updating
from tests.run.updating import hybrid_run, ladder, rows

real, folder, batches = os.pwritev, Path(sys.argv[1]), rows(8)
os.pwritev = lambda *args: (time.sleep(0.05), real(*args))[1]
with hybrid_run(ladder(), batches[0], home="host disk", update=Update.ACROSS_STEPS, disk_path=folder / "disk") as run:
    for number, batch in enumerate(batches):
        run.train([batch])
        if number == 3:
            torch.save((run.model.state_dict(), run.optimizer.state_dict()), folder / "checkpoint")
        print(number, flush=True)
"""


def test_a_killed_process_resumes_bitwise_from_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updating, "WIDTH", 13)
    (tmp_path / "disk").mkdir()
    said = tmp_path / "said.txt"
    killed = start_program(CHILD, tmp_path, output=said)
    while killed.is_alive() and "5\n" not in said.read_text(encoding="utf-8"):
        time.sleep(0.005)
    killed.kill()  # its writes are under way, and the updates behind them
    killed.join()
    assert killed.exitcode == -signal.SIGKILL, said.read_text(encoding="utf-8")
    assert any((tmp_path / "disk").iterdir())
    batches = rows(8)
    expected = eager_run(ladder()).train(batches)
    del expected.losses[:4]
    with disk_run(tmp_path / "disk") as run:
        weights, state = torch.load(tmp_path / "checkpoint")
        run.model.load_state_dict(weights)
        run.optimizer.load_state_dict(state)
        assert_equal(expected, run.train(batches[4:]))
        assert len(list((tmp_path / "disk").glob("*.lock"))) == 1  # what the killed process left is gone
