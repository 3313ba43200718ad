"""Checkpoints of several processes: ranks that change in number, fail and die, and saves and loads at one path."""

import fcntl
import math
import os
import random
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional
from typer.testing import CliRunner

import elixir_compile as elixir
from elixir_compile.base.options import ParamDtype
from elixir_compile.checkpoint import dcp
from elixir_compile.checkpoint import folder as folders
from elixir_compile.checkpoint.folder import open_checkpoint
from elixir_compile.graph.ops.shards import full, is_dtensor, is_sharded, own_shard
from elixir_compile.tools.cli.main import app
from tests.run.checkpointing import Elsewhere
from tests.run.processes import program, spawn
from tests.run.training import assert_same_tensors, on_host

# ----------------------------------------------------------------------------------------------------------------------
# Checkpoints of several ranks, in real processes: other numbers of ranks, other plans, ranks that fail and die.


safetensors = pytest.importorskip("safetensors.torch")


class Tied(nn.Module):
    """An embedding that is the head too, layers whose rows do not divide evenly, small tensors, a buffer."""

    def __init__(self, width: int = 97) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embedding = nn.Embedding(211, width)
        self.steps = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.short = nn.Linear(8192, 2)
        self.head = nn.Linear(width, 211, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for step in self.steps:
            x = functional.dropout(torch.tanh(step(x)), 0.2, self.training) * self.scale
        short = self.short(tokens.to(x.dtype).repeat(1, 1024)).square().mean()
        return functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten()) + 1e-6 * short


class Training:
    """A run of `Tied` on the ranks of `mesh`, or on one."""

    def __init__(self, mesh: DeviceMesh | None, *, param_dtype: ParamDtype | None = None, **options: object) -> None:
        self.mesh = mesh
        self.model = elixir.prepare(Tied(), mesh=mesh, param_dtype=param_dtype)
        self.use(elixir.HybridAdamW(self.model.parameters(), lr=1e-2))
        options = {"inner": "aot_eager", "report": False, **options}
        self.compiled = torch.compile(self.model, backend="elixir", options=options)

    def use(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    def train(self, batches: Sequence[torch.Tensor], *, compiled: bool = True) -> list[float]:
        """Return the losses of this rank, of its part of each batch."""
        ranks = [0] if self.mesh is None else self.mesh.mesh.flatten().tolist()
        rank = 0 if self.mesh is None else ranks.index(torch.distributed.get_rank())
        losses = []
        for batch in batches:
            loss = (self.compiled if compiled else self.model)(batch.chunk(len(ranks))[rank])
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def save(self, path: "Path | str", **options: Any) -> elixir.SaveHandle:
        return elixir.save(path, self.model, self.optimizer, scheduler=self.scheduler, **options)

    def load(self, path: "Path | str") -> elixir.Checkpoint:
        return elixir.load(path, self.model, self.optimizer, self.scheduler)

    def everything(self) -> dict[str, torch.Tensor]:
        """Return copies of what this rank has of the weights and the optimizer's state, by name."""
        state = self.optimizer.state_dict()["state"]
        kept = {f"{index}.{kind}": value for index, own in state.items() for kind, value in own.items()}
        kept |= {"rate": torch.tensor(self.scheduler.get_last_lr()), **self.model.state_dict()}
        return {name: own_shard(value).clone() for name, value in kept.items()}


def batches_of(number: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return [torch.randint(0, 211, (12, 8), generator=generator) for _ in range(4)]


def mesh_of(num_ranks: int) -> DeviceMesh:
    return DeviceMesh("cpu", list(range(num_ranks)))


def after(training: Training, path: str) -> list[float]:
    """Return the losses of steps from the checkpoint on that every number of ranks takes alike: without dropout."""
    training.model.load_state_dict(
        {name: torch.zeros_like(value) for name, value in training.model.state_dict().items()}
    )
    assert training.load(path).step == 2
    training.model.eval()
    return training.train(batches_of(2)[2:], compiled=False)


# Two ranks save; they go on themselves, and so do others.


def saves_and_goes_on(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    path, batches = f"{folder}/run", batches_of(1)
    torch.manual_seed(100 + rank)
    first = Training(mesh_of(world_size))
    first.train(batches[:2])
    first.save(path, step=2, extra={"rank": rank})
    drawn = torch.rand(2).tolist(), random.random(), np.random.rand()
    first.load(path)
    assert drawn == (torch.rand(2).tolist(), random.random(), np.random.rand())
    first.load(path)
    expected = first.train(batches[2:]), first.everything()

    with pytest.raises(elixir.NoFeasiblePlan) as raised:
        Training(first.mesh, device_memory=1, micro_batches=1).train(batches[:1])
    second = Training(first.mesh, device_memory=int(1.02 * raised.value.needed_bytes))
    for when in ("before the first forward", "after it"):
        torch.manual_seed(7)
        found = second.load(path)
        assert (found.step, found.extra) == (2, {"rank": 0})
        assert second.train(batches[2:]) == expected[0], when
        assert_same_tensors(expected[1], second.everything())
    assert on_host(second)
    assert not on_host(first)

    handle = second.save(f"{folder}/beside", step=4, asynchronous=True)
    second.train(batches[:1])
    handle.wait()
    second.load(f"{folder}/beside")
    assert_same_tensors(expected[1], second.everything())
    checks_plain_forms(second.model, f"{folder}/model.safetensors", rank)
    return {"losses": after(first, path), "bytes": handle.snapshot_bytes}


def checks_plain_forms(model: nn.Module, out: str, rank: int) -> None:
    state = model.state_dict()
    assert {name for name, value in state.items() if not is_dtensor(value)} == {"scale"}
    assert is_sharded(state["head.weight"])
    assert not is_sharded(state["steps.0.bias"])
    whole = {name: full(value) for name, value in state.items()}
    found = elixir.full_state_dict(model)
    made = elixir.export(model, out)
    assert made.tied == {"head.weight": "embedding.weight"}
    if rank:
        assert found == {}
        return
    assert_same_tensors(whole, found)
    assert found["head.weight"] is found["embedding.weight"]
    assert all(type(value) is torch.Tensor for value in found.values())
    written = safetensors.load_file(out)
    assert_same_tensors(dict(sorted(written.items())), {name: whole[name] for name in sorted(written)})
    assert written.keys() == whole.keys() - {"head.weight"}


def goes_on_from_two(rank: int, world_size: int, path: str, folder: str) -> dict[str, list[float]]:
    """Two of four ranks have no row of the shortest parameter."""
    losses: dict[str, list[float]] = {}
    for name, mesh in (("four", mesh_of(world_size)), ("square", init_device_mesh("cpu", (2, 2)))):
        training = Training(mesh)
        losses[name] = after(training, path)
        training.load(path)
        assert_holds_parts(training)
        training.save(f"{folder}/{name}", step=2)
    plain = Training(mesh_of(world_size))
    plain.use(torch.optim.AdamW(plain.model.parameters()))
    losses["four, torch's own AdamW"] = after(plain, path)
    if rank < 3:
        three = Training(mesh_of(3))
        losses["three from two"] = after(three, path)
        for name in ("four", "square"):
            losses[f"three from {name}"] = after(three, f"{folder}/{name}")
    return losses


def assert_holds_parts(training: Training) -> None:
    """Fail unless the loaded state is memory of its own, no more than this rank's parts."""
    for param, state in training.optimizer.state.items():
        for name in ("exp_avg", "exp_avg_sq"):
            assert state[name].shape == own_shard(param).shape
            assert state[name].untyped_storage().nbytes() == state[name].nbytes


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A folder with what two ranks saved, and what they found."""
    folder = tmp_path_factory.mktemp("two")
    return folder, spawn(saves_and_goes_on, 2, str(folder), folder=folder, limit_s=240)


def test_the_same_number_of_ranks_resumes_bitwise_and_another_number_up_to_rounding(
    saved: tuple[Path, list[Any]], tmp_path: Path
) -> None:
    folder, found = saved
    expected = np.mean([own["losses"] for own in found], axis=0)
    alone = Training(None)
    np.testing.assert_allclose(after(alone, str(folder / "run")), expected, rtol=1e-6)
    more = spawn(goes_on_from_two, 4, str(folder / "run"), str(tmp_path), folder=tmp_path, limit_s=240)
    for ranks in more[0]:
        losses = [own[ranks] for own in more if ranks in own]
        np.testing.assert_allclose(np.mean(losses, axis=0), expected, rtol=1e-6, err_msg=ranks)
    for name in ("four", "square"):
        metadata = metadata_of(tmp_path / name)
        assert_written_once(metadata)
        # Copies share the work.
        assert all(any(index.fqn.startswith("optimizer") for index in of_rank(metadata, rank)) for rank in range(4))


def test_each_rank_writes_its_parts_once(saved: tuple[Path, list[Any]]) -> None:
    folder, found = saved
    metadata = metadata_of(folder / "run")
    assert_written_once(metadata)
    tensors = metadata.state_dict_metadata
    assert [len(tensors[f"model.{name}"].chunks) for name in ("embedding.weight", "steps.0.bias", "scale")] == [2, 1, 1]
    first, second = (sum(place.length for place in of_rank(metadata, rank).values()) for rank in (0, 1))
    assert 0.8 < first / second < 1.25
    model_bytes = sum(param.nbytes for param in Tied().parameters())
    # Parameters and two moments, once, and random states.
    assert 3 * model_bytes < sum(own["bytes"] for own in found) < 3 * model_bytes + 20_000


def metadata_of(path: Path) -> Metadata:
    with open_checkpoint(path) as folder:
        return dcp.Reader(folder, "tensors").metadata


def assert_written_once(metadata: Metadata) -> None:
    tensors = metadata.state_dict_metadata.values()
    parts = [math.prod(chunk.sizes) for stored in tensors for chunk in stored.chunks]
    assert sum(parts) == sum(math.prod(stored.size) for stored in tensors)
    assert len(parts) == len(metadata.storage_data)
    assert all(parts)


def of_rank(metadata: Metadata, rank: int) -> dict[Any, Any]:
    """Return what a rank wrote, and where."""
    places = metadata.storage_data.items()
    return {index: place for index, place in places if place.relative_path.startswith(f"__{rank}_")}


def test_one_process_exports_a_checkpoint_of_two_ranks(saved: tuple[Path, list[Any]], tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"
    done = CliRunner().invoke(app, ["export", str(saved[0] / "beside"), str(out)])
    assert done.exit_code == 0, done.output
    # The ranks exported the model that they had just loaded from there.
    assert_same_tensors(safetensors.load_file(saved[0] / "model.safetensors"), safetensors.load_file(out))


# 16-bit parameters with fp32 masters.


def saves_masters(rank: int, world_size: int, folder: str) -> list[float]:
    training = Training(mesh_of(world_size), param_dtype="bfloat16")
    training.train(batches_of(5), compiled=False)
    training.save(f"{folder}/run", step=2)
    before = training.everything()
    other = Training(training.mesh, param_dtype="bfloat16")
    other.load(f"{folder}/run")
    assert {value.dtype for name, value in before.items() if "master" in name} == {torch.float32}
    assert_same_tensors(before, other.everything())

    states = training.optimizer.state
    for param in list(states):
        states[param] = Elsewhere(dict(states[param]))
    training.save(f"{folder}/run", step=2)
    other.train(batches_of(6), compiled=False)
    other.load(f"{folder}/run")
    assert_same_tensors(before, other.everything())
    return after(other, f"{folder}/run")


def test_masters_and_lazy_state_are_saved_in_parts(tmp_path: Path) -> None:
    losses = spawn(saves_masters, 2, str(tmp_path), folder=tmp_path, limit_s=120)
    alone = Training(None, param_dtype="bfloat16")
    # Losses of bfloat16 have 8 bits.
    np.testing.assert_allclose(after(alone, str(tmp_path / "run")), np.mean(losses, axis=0), rtol=4e-3)
    assert alone.everything()["0.master"].shape == alone.model.embedding.weight.shape


# What is wrong on one rank is raised on all, and nothing was changed.


def refuses(rank: int, world_size: int, folder: str) -> list[str]:
    training = Training(mesh_of(world_size))
    training.save(f"{folder}/run", step=1)
    training.save(f"{folder}/other", step=1)
    narrow = elixir.prepare(Tied(96), mesh=training.mesh)
    before, generator = training.everything(), torch.get_rng_state()
    said = []
    for file, change in (
        ("__1_0.distcp", damage),
        ("__0_0.distcp", cut),
        (".metadata", damage),
        ("__1_0.distcp", None),
    ):
        path = Path(f"{folder}/{len(said)}")
        if rank == 0:
            shutil.copytree(f"{folder}/run", path)
            (path / "tensors" / file).unlink() if change is None else change(path / "tensors" / file)
        torch.distributed.barrier()
        with pytest.raises(elixir.CheckpointCorrupted) as raised:
            training.load(path)
        assert raised.value.file == f"tensors/{file}"
        said.append(str(raised.value))
    with pytest.raises(elixir.CheckpointMismatch, match=r"steps\.0\.weight: float32 of \(97, 97\) in the checkpoint"):
        elixir.load(f"{folder}/run", narrow)
    with pytest.raises(elixir.NotSavable, match=r"extra\.bad"):
        training.save(f"{folder}/run", step=2, extra={"bad": object()} if rank == 1 else {})
    with pytest.raises(elixir.RanksDiffer, match=r"path: .*on rank 0, .* on rank 1"):
        training.save(f"{folder}/run{rank}", step=2)
    with pytest.raises(elixir.RanksDiffer, match="names, shapes and hyperparameters"):
        elixir.save(f"{folder}/run", training.model, training.optimizer if rank else None, step=2)
    with pytest.raises(elixir.RanksDiffer, match="by its checksum"):
        training.load(f"{folder}/{'other' if rank else 'run'}")
    fails_to_write(training, f"{folder}/run", rank)
    assert_same_tensors(before, training.everything())
    assert torch.equal(generator, torch.get_rng_state())
    assert training.load(f"{folder}/run").step == 1
    return said


def damage(file: Path) -> None:
    whole = file.read_bytes()
    middle = len(whole) // 2
    file.write_bytes(whole[:middle] + bytes([whole[middle] ^ 0x80]) + whole[middle + 1 :])


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def fails_to_write(training: Training, path: str, rank: int) -> None:
    """Saves beside the training and not, where one rank cannot write."""
    usual = dcp.write

    def failing(*args: Any, **kwargs: Any) -> Any:
        if rank == 1:
            raise OSError(5, "Input/output error")
        return usual(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dcp, "write", failing)
        for asynchronous in (False, True):
            with pytest.raises(elixir.DiskFailed, match="Input/output error"):
                training.save(path, step=2, asynchronous=asynchronous).wait()


def test_an_error_on_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    first, second = spawn(refuses, 2, str(tmp_path), folder=tmp_path, limit_s=240)
    assert first == second
    assert "so optimizer.states." in first[1] or "so model." in first[1]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["0", "1", "2", "3", "other", "ranks-0", "run"]


# A rank is killed in the middle of a save.


def dies(rank: int, world_size: int, folder: str, lost: int) -> str:
    training = Training(mesh_of(world_size))
    training.train(batches_of(3)[:1], compiled=False)
    training.save(f"{folder}/run", step=1)
    usual = dcp.write

    def deadly(*args: Any, **kwargs: Any) -> Any:
        written = usual(*args, **kwargs)
        if rank == lost:
            os.kill(os.getpid(), signal.SIGKILL)
        return written

    dcp.write = deadly
    with pytest.raises(elixir.PeerFailed) as raised:
        training.save(f"{folder}/run", step=2)
    return str(raised.value)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_killed_rank_leaves_the_previous_checkpoint(tmp_path: Path, lost: int) -> None:
    said = spawn(dies, 2, str(tmp_path), lost, folder=tmp_path, timeout_s=20, lost=[lost])
    assert f"no answer from rank {lost}" in said[1 - lost]
    assert "tensors written" in said[1 - lost]
    alone = Training(None)
    broken = [entry for entry in tmp_path.iterdir() if entry.name.startswith(".run.saving.")]
    # The first rank makes the folder and removes it, unless it is the one that was killed.
    assert len(broken) == (lost == 0)
    for folder in broken:
        with pytest.raises(elixir.NotACheckpoint, match=r"no manifest\.json"):
            alone.load(folder)
    assert alone.load(tmp_path / "run").step == 1
    alone.save(tmp_path / "run", step=3)
    assert [entry.name for entry in tmp_path.iterdir() if entry.name != "ranks-0"] == ["run"]


# ----------------------------------------------------------------------------------------------------------------------
# Processes that save and load at one path at the same time: each load sees one checkpoint, whole.
#
# In every checkpoint of these tests all parameters, and what is in `extra`, are the number of the step.


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

    dcp.open_checkpoint = open_other
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
