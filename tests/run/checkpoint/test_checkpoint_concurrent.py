"""Processes that save and load at one path at the same time: each load sees one checkpoint, whole.

In every checkpoint of these tests all parameters, and what is in `extra`, are the number of the step.
"""

import fcntl
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import elixir_compile as elixir
from elixir_compile.checkpoint import dcp as manifests
from elixir_compile.checkpoint import folder as folders
from tests.run.processes import program, spawn


def made(step: int = 0) -> nn.Module:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(step)
    return model


def assert_loads_whole(path: Path, model: nn.Module) -> int:
    """Fail unless what is loaded is of one step; return that."""
    found = elixir.load(path, model)
    assert found.extra == {"value": found.step}
    assert {value for param in model.parameters() for value in param.unique().tolist()} == {found.step}
    return found.step


def save(path: Path, step: int) -> None:
    elixir.save(path, made(step), step=step, extra={"value": step})


def one_loads_the_others_save(rank: int, world_size: int, folder: str, num_loads: int, num_saves: int) -> list[int]:
    """Load on rank 0, at least `num_loads` times, while the others save `num_saves` steps each; return the steps."""
    path, steps, model = Path(folder) / "run", [], made()
    done = [Path(folder + f".done.{other}") for other in range(1, world_size)]
    if rank:
        for number in range(num_saves):
            save(path, 1000 * rank + number)
            if Path(folder + ".stop").exists():
                break
        done[rank - 1].touch()
    while rank == 0 and (len(steps) < num_loads or (num_saves < 1000 and not all(file.exists() for file in done))):
        steps.append(assert_loads_whole(path, model))
    if rank == 0:
        Path(folder + ".stop").touch()
    return steps


def together(tmp_path: Path, world_size: int, num_loads: int, num_saves: int) -> tuple[Path, list[int]]:
    """Return the folder in which a checkpoint was saved and loaded at once, and the steps that were loaded."""
    folder = tmp_path / "disk"
    save(folder / "run", 0)
    results = spawn(
        one_loads_the_others_save, world_size, str(folder), num_loads, num_saves, folder=tmp_path, limit_s=240
    )
    return folder, results[0]


def test_loads_beside_a_save_without_pause_see_one_checkpoint_each(tmp_path: Path) -> None:
    folder, steps = together(tmp_path, 2, 50, 10**6)
    assert steps == sorted(steps)
    assert len(set(steps)) > 5
    assert os.listdir(folder) == ["run"]


def test_two_saves_at_once_leave_a_complete_checkpoint(tmp_path: Path) -> None:
    folder, steps = together(tmp_path, 3, 1, 30)
    assert {step // 1000 for step in steps} >= {1, 2}
    assert assert_loads_whole(folder / "run", made()) in (1029, 2029)
    assert os.listdir(folder) == ["run"]


INTERLEAVED = """
import errno, fcntl, os, sys, time
from pathlib import Path
import torch
from torch import nn
import elixir_compile as elixir
from elixir_compile.checkpoint.saving import checkpoint_lock

path, model, other = Path(sys.argv[1]) / "run", nn.Linear(4, 4), nn.Linear(4, 4)
POINTS = [(os, "open"), (os, "stat"), (os, "rename"), (os, "fsync"), (os, "rmdir"), (os, "mkdir"), (fcntl, "flock")]
USUAL = {name: getattr(of, name) for of, name in POINTS}

def use(functions):
    for of, name in POINTS:
        setattr(of, name, functions[name])

def save(step, of=model):
    with torch.no_grad():
        for param in of.parameters():
            param.fill_(step)
    elixir.save(path, of, step=step, extra={"value": step})

def load():
    found = elixir.load(path, model)
    values = {value for param in model.parameters() for value in param.unique().tolist()}
    assert values == {found.step} == {found.extra["value"]}, (values, found)
    return found.step

def interrupted(at, act, step, has_locks):
    # Runs `act`; before its at-th call another process saves `step`. Returns whether there are that many calls.
    calls, children = iter(range(10**6)), []

    def begin():
        child = os.fork()
        if child == 0:
            use(USUAL)
            if checkpoint_lock.locked():
                checkpoint_lock.release()
            save(step, other)
            os._exit(0)
        children.append(child)
        end_s = time.monotonic() + 0.05  # it may wait for what this process has locked
        while time.monotonic() < end_s and not is_done(os.WNOHANG):
            time.sleep(0.0005)

    def is_done(how):
        if children:
            done, status = os.waitpid(children[0], how)
            if done:
                assert status == 0, status
                children.clear()
        return not children

    def patched(name):
        def call(*args, **kwargs):
            if next(calls) == at:
                begin()
            if name == "flock" and not has_locks:
                raise OSError(errno.ENOSYS, "Function not implemented")
            return USUAL[name](*args, **kwargs)
        return call

    use({name: patched(name) for name in USUAL})
    try:
        act()
    finally:
        use(USUAL)
        is_done(0)
    return next(calls) > at

def report(which, has_locks):
    at, seen, num_failed, more = 0, set(), 0, True
    while more:
        first = 10 * at
        save(first)

        def act():
            nonlocal num_failed
            if which == "save":
                return save(first + 1)
            try:
                seen.add(load() - first)
            except elixir.DiskFailed:
                assert not has_locks
                num_failed += 1

        more = interrupted(at, act, first + 2, has_locks)
        if which == "save":
            seen.add(load() - first)
        if has_locks:
            assert os.listdir(sys.argv[1]) == ["run"], (at, os.listdir(sys.argv[1]))
        at += 1
    print(at, sorted(seen), num_failed, sep=";")

report("load", True)
report("load", False)
report("save", True)
"""


@pytest.fixture(scope="module")
def interleaved(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, str, int]]:
    """For a load, a load without locks and a save: at how many of its calls another process saved, the steps that were
    seen, and how many failed."""
    saved, output = (tmp_path_factory.mktemp(name) for name in ("interleaved", "output"))
    lines = [line.split(";") for line in program(INTERLEAVED, saved, folder=output).splitlines()]
    return [(int(num_points), seen, int(num_failed)) for num_points, seen, num_failed in lines]


@pytest.mark.slow
def test_a_save_between_any_two_system_calls_of_a_load_does_not_mix_checkpoints(
    interleaved: list[tuple[int, str, int]],
) -> None:
    num_points, seen, num_failed = interleaved[0]
    assert num_points > 10
    assert seen == "[0, 2]"
    assert num_failed == 0


def test_without_locks_a_load_is_complete_or_raises_disk_failed_and_reports_no_damage(
    interleaved: list[tuple[int, str, int]],
) -> None:
    """As for a load on one machine of a network file system while another machine saves."""
    num_points, seen, num_failed = interleaved[1]
    assert num_points > 10
    assert seen == "[0, 2]"
    assert 0 < num_failed < 6  # the files went after they had been compared, before they were read


def test_a_save_between_any_two_system_calls_of_another_save_leaves_a_complete_checkpoint(
    interleaved: list[tuple[int, str, int]],
) -> None:
    num_points, seen, _ = interleaved[2]
    assert num_points > 30
    assert seen == "[1, 2]"


def load_opens_another_folder_first(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Load on ranks whose first look finds different checkpoints, as if a save had come between."""
    model = elixir.prepare(made(7), mesh=DeviceMesh("cpu", list(range(world_size))))
    looks: list[Path] = []

    def open_other(path: Path) -> folders.OpenFolder:
        looks.append(path)
        is_first = rank == 0 and (len(looks) == 1 or path.name == "never")
        return folders.open_checkpoint(path.with_name("old") if is_first else path.with_name("run"))

    manifests.open_checkpoint = open_other
    step = elixir.load(f"{folder}/run", model).step
    values = [param.to_local().unique().tolist() for param in model.parameters()]
    num_looks = len(looks)
    with pytest.raises(elixir.RanksDiffer, match="the checkpoint, by its checksum"):
        elixir.load(f"{folder}/never", model)
    return {"step": step, "values": values, "num_looks": num_looks}


def test_ranks_load_the_same_checkpoint_if_a_save_ends_between_their_opens(tmp_path: Path) -> None:
    for name, step in (("old", 1), ("run", 2)):
        elixir.save(tmp_path / name, made(step), step=step)
    for found in spawn(load_opens_another_folder_first, 2, str(tmp_path), folder=tmp_path):
        assert (found["step"], found["num_looks"]) == (2, 2)
        assert all(values in ([2.0], []) for values in found["values"])


def test_a_replaced_checkpoint_is_removed_by_its_last_reader(tmp_path: Path) -> None:
    path = tmp_path / "run"
    elixir.save(path, made(1), step=1)
    with folders.open_checkpoint(path) as first:
        with folders.open_checkpoint(path) as second:
            elixir.save(path, made(2), step=2)
            elixir.save(path, made(3), step=3)  # removes what nobody has open, and that alone
            assert len(os.listdir(tmp_path)) == 2
            assert not second.is_there()
        assert first.has("manifest.json")
        assert first.has("tensors/.metadata")
    assert os.listdir(tmp_path) == ["run"]
    assert elixir.load(path, made()).step == 3


def test_a_reader_does_not_wait_for_a_lock_that_another_process_keeps(tmp_path: Path) -> None:
    path = tmp_path / "run"
    elixir.save(path, made(1), step=1)
    lock = os.open(path, os.O_RDONLY)
    parent = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        fcntl.flock(parent, fcntl.LOCK_EX)
        began_s = time.monotonic()
        assert elixir.load(path, made()).step == 1
        assert time.monotonic() - began_s < 5
    finally:
        os.close(lock)
        os.close(parent)


def test_a_checkpoint_that_may_only_be_read_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a medium that is mounted read-only: whatever changes the disk fails."""
    path = tmp_path / "run"
    elixir.save(path, made(1), step=1)

    def refused(*args: Any, **kwargs: Any) -> None:
        raise OSError(30, "Read-only file system")

    for name in ("rename", "mkdir", "rmdir", "unlink", "fsync"):
        monkeypatch.setattr(os, name, refused)
    assert elixir.load(path, made()).step == 1


def test_an_old_checkpoint_between_its_two_renames_is_loaded_and_then_replaced(tmp_path: Path) -> None:
    """As a save that was killed left it, before locks and after."""
    path = tmp_path / "run"
    elixir.save(path, made(1), step=1)
    os.rename(path, folders.previous_of(path))
    assert elixir.load(path, made()).step == 1
    elixir.save(path, made(2), step=2)
    assert os.listdir(tmp_path) == ["run"]
    assert elixir.load(path, made()).step == 2
