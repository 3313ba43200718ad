"""Optimizer state on disk, of any dtype: bitwise what it is in memory, and what goes wrong is told."""

import copy
import errno
import functools
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
from torch import nn
from torch.optim import SGD, Adagrad, Adam, Optimizer, RMSprop

import elixir_compile as elixir
from elixir_compile.base.errors import DiskFailed, DiskFull, GradientsChanged, InvalidOption, UnforeseenState
from elixir_compile.ir import Tier, Update
from elixir_compile.optim.disk import DiskHome, DiskState
from elixir_compile.optim.rule import StatisticLayout
from elixir_compile.runtime.disk_store import DiskStore
from elixir_compile.session.plan_files import save_plan
from tests.covering import covering
from tests.pure.problems import disk_staging
from tests.run import optimizers as users
from tests.run import updating
from tests.run.optim.test_hybrid_classes import both
from tests.run.optim.test_mixed_precision import (
    ADAM,
    BF16,
    FP16,
    Recorded,
    mixed_of,
    mixed_run,
    recorded,
    scaled_step,
    state_of,
)
from tests.run.processes import start_program
from tests.run.training import Run, assert_same_tensors, by_elixir, fused_adamw, loss_of, tight_bytes
from tests.run.updating import (
    accumulate,
    assert_equal,
    assert_resumes,
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

# ----------------------------------------------------------------------------------------------------------------------
# Optimizer state on disk: bitwise what it is in memory, and what goes wrong is told.


@pytest.fixture(autouse=True)
def pieces() -> Iterator[None]:
    """Two or three pieces per bucket, the last one short."""
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


def delay_disk(patch: pytest.MonkeyPatch) -> None:
    """Let each read and write of a file take up to 3 ms more, as chance has it."""
    chance = random.Random(11)
    for name in ("preadv", "pwritev"):
        real = getattr(os, name)
        patch.setattr(
            os, name, lambda *args, real=real: (time.sleep(chance.choice((0, 0, 1e-3, 3e-3))), real(*args))[1]
        )


def kill_in_a_step(program: str, folder: Path) -> None:
    """Run `program` in `folder`, and kill it as soon as it has printed 5: its writes are under way, and the updates
    behind them."""
    said = folder / "said.txt"
    killed = start_program(program, folder, output=said)
    while killed.is_alive() and "5\n" not in said.read_text(encoding="utf-8"):
        time.sleep(0.005)
    killed.kill()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL, said.read_text(encoding="utf-8")


COMBINATIONS = covering(["split disk", "host disk"], list(Update))


@pytest.mark.parametrize(("home", "update"), COMBINATIONS)
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
    delay_disk(monkeypatch)
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
        assert_resumes(run, saved, batches[:2], batches[5:])


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
    kill_in_a_step(CHILD, tmp_path)
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


# ----------------------------------------------------------------------------------------------------------------------
# State on disk whose statistics have dtypes of their own: masters of 16-bit parameters, and what classes make.


KEPT = {
    BF16: {"exp_avg": torch.float32, "exp_avg_sq": torch.float32, "master_low": torch.int16},
    FP16: {"exp_avg": torch.float32, "exp_avg_sq": torch.float32, "master": torch.float32},
}
AMSGRAD = {**ADAM, "amsgrad": True}


class Narrow(users.Lion):
    """Keeps its statistic in half the bytes."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        average = torch.lerp(param.grad, state.get("average", torch.zeros_like(param)).float(), group["beta"])
        param.sub_(average, alpha=group["lr"])
        state["average"] = average.bfloat16()


class Late(users.Lion):
    """Makes a statistic after more steps than a dry run has."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        super().update(param, group)
        if self.state[param]["count"] == 5:
            self.state[param]["late"] = torch.zeros_like(param)


def batches_of(dtype: torch.dtype, num_batches: int = 6) -> list[torch.Tensor]:
    return [batch.to(dtype) for batch in rows(num_batches)]


def assert_same_training(expected: Recorded, found: Recorded) -> None:
    assert found.losses == expected.losses
    assert_same_tensors(expected.weights, found.weights)
    assert list(expected.state) == list(found.state)
    for name, entry in expected.state.items():
        assert_same_tensors(entry, found.state[name])


@functools.cache
def in_memory(dtype: torch.dtype, amsgrad: bool = False) -> Recorded:
    adam = AMSGRAD if amsgrad else ADAM
    with mixed_run(ladder(), batches_of(dtype)[0], home="split", dtype=dtype, adam=adam) as run:
        return recorded(run, batches_of(dtype))


@pytest.mark.parametrize(("dtype", "update"), covering([BF16, FP16], list(Update)))
def test_masters_on_disk_are_bitwise_those_in_memory(dtype: torch.dtype, update: Update, tmp_path: Path) -> None:
    home = "split disk" if update is Update.AFTER_BACKWARD else "host disk"
    batches = batches_of(dtype)
    with mixed_run(ladder(), batches[0], home=home, update=update, dtype=dtype, disk_path=tmp_path) as run:
        found = recorded(run, batches)
        assert {bucket.placement.optim for bucket in buckets_of(run)} == {Tier.DISK}
        for entry in run.optimizer.state.values():
            assert isinstance(entry, DiskState)
            assert {name: entry[name].dtype for name in entry.names} == KEPT[dtype]
    assert_same_training(in_memory(dtype), found)


def test_amsgrad_with_checksums(tmp_path: Path) -> None:
    options = {"adam": AMSGRAD, "disk_path": tmp_path, "disk_check": True}
    with mixed_run(ladder(), batches_of(BF16)[0], home="host disk", **options) as run:
        assert_same_training(in_memory(BF16, amsgrad=True), recorded(run, batches_of(BF16)))


def test_a_statistic_may_have_another_dtype_per_parameter(tmp_path: Path) -> None:
    params = [nn.Parameter(torch.zeros(3, 50)), nn.Parameter(torch.zeros(7)), nn.Parameter(torch.zeros(0))]
    store = DiskStore(tmp_path)
    home = DiskHome(store, "b0", params)
    dtypes = [torch.float32, BF16, torch.int16]
    states = []
    for number, (param, dtype) in enumerate(zip(params, dtypes, strict=True)):
        home.require({id(param): {"average": StatisticLayout(dtype)}})
        states.append(DiskState(home, param, {"average": StatisticLayout(dtype)}, {}))
        assert len(states[-1]) == 0
        states[-1]["average"] = torch.full_like(param, number + 1, dtype=dtype)
    assert len(os.listdir(store.path)) == len(dtypes)
    for number, (param, dtype) in enumerate(zip(params, dtypes, strict=True)):
        assert torch.equal(states[number]["average"], torch.full_like(param, number + 1, dtype=dtype))
        states[number].begin("average")
        assert torch.equal(states[number]["average"], torch.zeros_like(param, dtype=dtype))


def test_disk_space_is_freed_after_the_last_parameter(tmp_path: Path) -> None:
    """The third parameter is frozen and never comes; the first leaves and comes again."""
    params, store = [nn.Parameter(torch.ones(50)) for _ in range(3)], DiskStore(tmp_path)
    home = DiskHome(store, "b0", params)
    home.require({id(params[0]): {"average": StatisticLayout(torch.float32)}})
    states = [DiskState(home, param, {"average": StatisticLayout(torch.float32)}, {}) for param in params[:2]]
    home.leave(id(params[0]))
    states[0] = DiskState(home, params[0], {"average": StatisticLayout(torch.float32)}, {})
    home.leave(id(params[1]))
    states[0]["average"] = params[0].detach()
    assert torch.equal(states[0]["average"], torch.ones(50))
    home.leave(id(params[0]))
    assert home.is_free
    assert not os.listdir(store.path)


@pytest.mark.parametrize("dtype", [BF16, pytest.param(FP16, marks=pytest.mark.slow)])
def test_state_dicts_hold_fp32_masters_and_load_both_ways(dtype: torch.dtype, tmp_path: Path) -> None:
    """From disk to memory and back, in mid-flight. Loading writes the parameters too, as the nearest to their
    masters."""
    batches = batches_of(dtype)
    host = {"home": "host", "update": Update.ACROSS_STEPS, "dtype": dtype}
    disk = {**host, "home": "host disk", "disk_path": tmp_path}
    with mixed_run(ladder(), batches[0], **disk) as run:
        saved = copy.deepcopy(run.train(batches[:2]).optimizer.state_dict())
        for number, param in enumerate(run.model.parameters()):
            master = saved["state"][number]["master"]
            assert master.dtype == torch.float32
            assert torch.equal(master.to(dtype), param)
    with mixed_run(ladder(), batches[0], **host) as run:
        run.train(batches[4:])  # somewhere else
        run.optimizer.load_state_dict(saved)
        saved = copy.deepcopy(run.train(batches[2:4]).optimizer.state_dict())
    with mixed_run(ladder(), batches[0], **disk) as run:
        run.train(batches[:1])
        run.optimizer.load_state_dict(copy.deepcopy(saved))
        assert all(isinstance(entry, DiskState) for entry in run.optimizer.state.values())
        found = recorded(run, batches[4:])
        found.losses[:0] = in_memory(dtype).losses[:4]
        assert_same_training(in_memory(dtype), found)
        # A state dict of torch's own has no master: it is the parameter.
        for entry in saved["state"].values():
            del entry["master"]
        run.optimizer.load_state_dict(saved)
        for name, param in run.model.named_parameters():
            assert torch.equal(state_of(run)[name]["master"], param.float())


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_a_checkpoint_keeps_every_bit_of_masters_on_disk(dtype: torch.dtype, tmp_path: Path) -> None:
    batches = batches_of(dtype)
    with mixed_run(ladder(), batches[0], home="split disk", dtype=dtype, disk_path=tmp_path) as run:
        recorded(run, batches[:3])
        elixir.save(tmp_path / "run", run.model, run.optimizer)
        expected = recorded(run, batches[3:])
    with mixed_run(ladder(), batches[0], home="split", dtype=dtype) as run:
        elixir.load(tmp_path / "run", run.model, run.optimizer)
        assert_same_training(expected, recorded(run, batches[3:]))


def test_masters_move_between_the_tiers(tmp_path: Path) -> None:
    """Before the first update, which makes them, and after it."""
    batches = batches_of(BF16)
    with mixed_run(ladder(), batches[0], home="host disk", update=Update.ACROSS_STEPS, disk_path=tmp_path) as run:
        loss_of(run.compiled, batches[0]).backward()
        move_state(run, Tier.HOST)
        run.optimizer.zero_grad()
        run.train(batches[:2])
        for number, optim in enumerate([Tier.DISK, Tier.HOST, Tier.DISK, Tier.DISK], start=2):
            move_state(run, optim)
            assert {isinstance(entry, DiskState) for entry in run.optimizer.state.values()} == {optim is Tier.DISK}
            run.train(batches[number : number + 1])
        assert_same_tensors(in_memory(BF16).weights, dict(run.model.named_parameters()))
        for name, entry in in_memory(BF16).state.items():
            assert_same_tensors(entry, state_of(run)[name])


def test_an_overflow_leaves_masters_on_disk_as_they_are(tmp_path: Path) -> None:
    batches = batches_of(FP16, 3)
    with mixed_run(ladder(), batches[0], home="host disk", dtype=FP16, disk_path=tmp_path) as run:
        step = scaled_step(torch.amp.GradScaler("cpu", init_scale=4.0))
        before = state_of(run.train(batches[:2], step))
        run.train([torch.full_like(batches[2], float("inf"))], step)
        for name, entry in before.items():
            assert_same_tensors(entry, state_of(run)[name])
        run.train(batches[2:], step)
        assert state_of(run)["steps.0.weight"]["step"] == 3


def test_a_failed_write_of_a_master_raises_until_state_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of a master, which is written before the first update, too."""
    batches, real = batches_of(BF16), os.pwritev

    def bad(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with mixed_run(ladder(), batches[0], home="host disk", disk_path=tmp_path) as run:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", bad)
            with pytest.raises(DiskFailed, match="write failed"):
                run.train(batches[:1])
        assert os.pwritev is real
        with pytest.raises(DiskFailed, match="partly old and partly new"):
            run.train(batches[:1])
        run.optimizer.zero_grad()
        run.model.load_state_dict(in_memory(BF16).weights)
        found = copy.deepcopy(dict(enumerate(in_memory(BF16).state.values())))
        run.optimizer.load_state_dict({**run.optimizer.state_dict(), "state": found})
        assert_same_tensors(in_memory(BF16).state["steps.0.weight"], state_of(run)["steps.0.weight"])
        run.train(batches[:1])


def test_the_planner_sends_masters_to_disk(tmp_path: Path) -> None:
    batches = batches_of(BF16)
    with small_buckets(lambda plan: plan), disk_staging(0):  # which is larger than the model
        with pytest.raises(elixir.NoFeasiblePlan) as raised:
            loss_of(mixed_of(ladder(), device_memory=1, micro_batches=1).compiled, batches[0])
        numel = sum(param.numel() for param in ladder().parameters())
        options = {"device_memory": int(1.05 * raised.value.needed_bytes), "host_memory": 7 * numel}
        with pytest.raises(elixir.NoFeasiblePlan):
            mixed_of(ladder(), **options).train(batches[:1])
        run = mixed_of(ladder(), disk_path=tmp_path, **options)
        found = recorded(run, batches)
    assert Tier.DISK in [bucket.placement.optim for bucket in buckets_of(run)]
    assert_same_training(in_memory(BF16), found)


def class_run(tmp_path: Path, hybrid: Any, update: Update = Update.ACROSS_STEPS) -> Any:
    """Return the context of a run with all state on disk."""
    return hybrid_run(ladder(), rows(1)[0], home="host disk", update=update, optimizer=hybrid, disk_path=tmp_path)


CLASSES = [
    (Adam, {"foreach": False}, "in_backward", {"exp_avg", "exp_avg_sq"}),
    (RMSprop, {"centered": True, "momentum": 0.5}, "across_steps", {"square_avg", "grad_avg", "momentum_buffer"}),
    (SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}, "after_backward", {"momentum_buffer"}),
    (SGD, {"lr": 0.1}, "across_steps", set()),
    (Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.1}, "across_steps", {"sum"}),
    (users.Lion, {}, "across_steps", {"average"}),
    (Narrow, {}, "across_steps", {"average"}),
]


@pytest.mark.parametrize(("cls", "options", "update", "kept"), CLASSES)
def test_classes_with_state_on_disk_are_bitwise_equal_to_torch(
    cls: type[Optimizer], options: dict[str, Any], update: str, kept: set[str], tmp_path: Path
) -> None:
    batches = rows(6)
    plain, hybrid = both(cls, **options)
    expected = eager_run(ladder(), plain).train(batches)
    with nan_staging(), class_run(tmp_path, hybrid, Update(update)) as run:
        run.train(batches[:1])
        assert {bucket.placement.optim for bucket in buckets_of(run)} == {Tier.DISK}
        entries = [run.optimizer.state[param] for param in run.model.parameters() if run.optimizer.state.get(param)]
        assert len(entries) == (0 if cls is SGD and not kept else 7)
        assert all(isinstance(entry, DiskState) and set(entry.names) == kept for entry in entries)
        assert_equal(expected, run.train(batches[1:]))


def test_state_dicts_of_a_class_load_in_both_directions(tmp_path: Path) -> None:
    batches = rows(8)
    plain, hybrid = both(SGD, lr=0.1, momentum=0.9)
    expected, middle = eager_run(ladder(), plain).train(batches), eager_run(ladder(), plain)
    with class_run(tmp_path, hybrid) as run:
        run.train(batches[:3])
        middle.model.load_state_dict(run.model.state_dict())
        middle.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
        middle.train(batches[3:5])
        run.train(batches[7:])  # to be overwritten
        run.model.load_state_dict(middle.model.state_dict())
        run.optimizer.load_state_dict(copy.deepcopy(middle.optimizer.state_dict()))
        assert all(isinstance(entry, DiskState) for entry in run.optimizer.state.values())
        run.losses = expected.losses[:5]
        assert_equal(expected, run.train(batches[5:]))


def test_state_of_a_class_moves_between_the_tiers(tmp_path: Path) -> None:
    """Before its first update, which makes it, too."""
    batches = rows(5)
    plain, hybrid = both(users.Lion)
    expected = eager_run(ladder(), plain).train(batches)
    with class_run(tmp_path, hybrid) as run:
        loss_of(run.compiled, batches[0]).backward()
        run.optimizer.zero_grad()
        for number, optim in enumerate([Tier.HOST, Tier.DISK, Tier.HOST, Tier.DISK, Tier.DISK]):
            move_state(run, optim)
            run.train(batches[number : number + 1])
            assert {isinstance(entry, DiskState) for entry in run.optimizer.state.values()} == {optim is Tier.DISK}
        assert_equal(expected, run)


def test_a_statistic_created_by_a_new_hyperparameter_gets_a_file(tmp_path: Path) -> None:
    """Momentum is turned on at the fourth step."""
    batches = rows(6)
    plain, hybrid = both(SGD, lr=0.1)
    expected = eager_run(ladder(), plain)
    with class_run(tmp_path, hybrid) as run:
        for own in (expected, run):
            own.train(batches[:3])
            own.optimizer.param_groups[0]["momentum"] = 0.9
            own.train(batches[3:])
        assert_equal(expected, run)
        assert {entry.names for entry in run.optimizer.state.values()} == {("momentum_buffer",)}


def test_a_statistic_that_the_dry_step_missed_raises(tmp_path: Path) -> None:
    with class_run(tmp_path, both(Late)[1]) as run:
        run.train(rows(4))
        with pytest.raises(UnforeseenState, match=r"b\d made late \(torch.float32\).*three dry steps"):
            run.train(rows(2))
        with pytest.raises(DiskFailed, match="partly old and partly new"):
            run.optimizer.state_dict()


def test_accumulation_of_a_class_on_disk(tmp_path: Path) -> None:
    plain, hybrid = both(RMSprop, lr=1e-3)
    expected = accumulate(eager_run(ladder(), plain), rows(6), 3)
    with class_run(tmp_path, hybrid, Update.IN_BACKWARD) as run:
        assert_equal(expected, accumulate(run, rows(6), 3))


def test_the_planner_sends_state_of_a_class_to_disk(tmp_path: Path) -> None:
    batches = rows(4)
    plain, hybrid = both(Adam, lr=0.01)
    expected = eager_run(ladder(), plain).train(batches)
    with small_buckets(lambda plan: plan), disk_staging(0):
        with pytest.raises(elixir.NoFeasiblePlan) as raised:
            loss_of(by_elixir(ladder(), optimizer=hybrid, device_memory=1, micro_batches=1).compiled, batches[0])
        options = {"device_memory": int(1.05 * raised.value.needed_bytes), "replan": False}
        options["host_memory"] = 3 * sum(param.nbytes for param in ladder().parameters())
        run = by_elixir(ladder(), optimizer=hybrid, disk_path=tmp_path, **options).train(batches)
    assert Tier.DISK in [bucket.placement.optim for bucket in buckets_of(run)]
    assert_equal(expected, run)
