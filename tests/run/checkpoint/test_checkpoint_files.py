"""What is on the disk is a whole checkpoint or none; what is damaged is refused, and nothing is loaded of it."""

import errno
import os
import pickle
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint import load as dcp_load

import elixir_compile as elixir
from elixir_compile.checkpoint import folder as folders
from elixir_compile.checkpoint.dcp import Manifest, finish, read_manifest, write, write_manifest, write_text
from elixir_compile.checkpoint.folder import BLOCK_BYTES, BlockSums, open_checkpoint
from elixir_compile.checkpoint.run_state import Deferred
from tests.run.checkpointing import Training, eager, everything, other
from tests.run.processes import program
from tests.run.training import assert_same_tensors
from tests.run.updating import ladder, rows

FILES = ["manifest.json", "state.json", "tensors/.metadata", "tensors/__0_0.distcp"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "run"
    eager(ladder()).train(rows(2)).save(path, step=2)
    return path


@pytest.fixture(scope="module")
def target() -> Training:
    """What a checkpoint must not change."""
    return eager(other(ladder())).train(rows(1))


@pytest.fixture
def copied(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "run"))


def assert_refused(path: Path, target: Training, file: str) -> str:
    """Fail unless loading raises CheckpointCorrupted for `file` and changes nothing; return the text."""
    before, generator = everything(target), torch.get_rng_state()
    with pytest.raises(elixir.CheckpointCorrupted) as raised:
        target.load(path)
    assert raised.value.file == file
    assert_same_tensors(before, everything(target))
    assert torch.equal(generator, torch.get_rng_state())
    return str(raised.value)


def test_the_folder_holds_the_files_of_the_manifest(checkpoint: Path) -> None:
    manifest = manifest_of(checkpoint)
    assert manifest.step == 2
    assert sorted(["manifest.json", *manifest.files]) == FILES
    assert sorted(str(file.relative_to(checkpoint)) for file in checkpoint.rglob("*") if file.is_file()) == FILES
    assert [entry.name for entry in checkpoint.parent.iterdir()] == ["run"]


def test_any_version_of_dcp_reads_the_tensors(checkpoint: Path) -> None:
    state = {"model.steps.0.weight": torch.zeros(13, 13)}
    with pytest.warns(UserWarning, match=r"torch\.distributed"):
        dcp_load(state, storage_reader=FileSystemReader(checkpoint / "tensors"))
    model = other(ladder())
    elixir.load(checkpoint, model)
    assert torch.equal(state["model.steps.0.weight"], model.steps[0].weight)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_changed_byte_in_any_file_is_found(copied: Path, target: Training, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(FILES))
    whole = (copied / name).read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    (copied / name).write_bytes(whole[:at] + bytes([whole[at] ^ 0x80]) + whole[at + 1 :])
    assert_refused(copied, target, name)
    (copied / name).write_bytes(whole)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_file_cut_off_anywhere_is_found(copied: Path, target: Training, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(FILES))
    whole = (copied / name).read_bytes()
    (copied / name).write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    assert_refused(copied, target, name)
    (copied / name).write_bytes(whole)


def test_the_error_names_the_lost_value(copied: Path, target: Training) -> None:
    file = copied / "tensors" / "__0_0.distcp"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    said = assert_refused(copied, target, "tensors/__0_0.distcp")
    assert f"has {len(whole) // 2} bytes of {len(whole)}" in said
    assert "so model." in said or "so optimizer.states." in said
    file.unlink()
    assert "No such file" in assert_refused(copied, target, "tensors/__0_0.distcp")


def test_a_key_that_is_missing_is_named(copied: Path, target: Training) -> None:
    text = (copied / "state.json").read_text().replace("model.steps.1.bias", "model.steps.1.gone")
    rewritten(copied, "state.json", text.encode())
    assert "model.steps.1.gone" in assert_refused(copied, target, "tensors/.metadata")


def test_a_pickle_that_would_run_code_is_refused(copied: Path, target: Training, tmp_path: Path) -> None:
    class Attack:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "attacked"),)

    rewritten(copied, "tensors/.metadata", pickle.dumps(Attack()))
    said = assert_refused(copied, target, "tensors/.metadata")
    assert "which no checkpoint contains" in said
    assert not (tmp_path / "attacked").exists()


def manifest_of(path: Path) -> Manifest:
    with open_checkpoint(path) as folder:
        return read_manifest(folder)


def damage_of(path: Path, record: folders.FileRecord) -> tuple[int, str] | None:
    with path.open("rb") as file:
        return folders.first_damage(file, record)


def rewritten(path: Path, name: str, content: bytes) -> None:
    """Put `content` into a file of a checkpoint, as somebody would who also mends the manifest."""
    (path / name).write_bytes(content)
    summed = BlockSums()
    summed.add(memoryview(content))
    manifest = manifest_of(path)
    manifest.files[name] = summed.record()
    write_manifest(path, manifest)


@given(pieces=st.lists(st.binary(max_size=9), max_size=12))
def test_checksums_do_not_depend_on_the_pieces(pieces: list[bytes]) -> None:
    whole = b"".join(pieces)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folders, "BLOCK_BYTES", 4)
        summed = BlockSums()
        for piece in pieces:
            summed.add(memoryview(piece))
        record = summed.record()
    assert record.nbytes == len(whole)
    assert record.crc32s == tuple(zlib.crc32(whole[start : start + 4]) for start in range(0, len(whole), 4))


def test_damage_behind_the_first_block_is_found(tmp_path: Path) -> None:
    content = "a" * (BLOCK_BYTES + 5)
    record = write_text(tmp_path / "file", content)
    assert len(record.crc32s) == 2
    assert damage_of(tmp_path / "file", record) is None
    (tmp_path / "file").write_text(content[:-1] + "b")
    assert damage_of(tmp_path / "file", record) == (
        BLOCK_BYTES, f"is damaged between bytes {BLOCK_BYTES} and {BLOCK_BYTES + 5}",
    )  # fmt: skip


def test_nothing_but_a_checkpoint_is_overwritten_or_loaded(tmp_path: Path) -> None:
    with pytest.raises(elixir.NotACheckpoint, match="there is nothing"):
        elixir.load(tmp_path / "run", ladder())
    (tmp_path / "run").mkdir()
    elixir.save(tmp_path / "run", ladder())
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("keep")
    for name in ("notes", "notes/mine.txt"):
        with pytest.raises(elixir.NotACheckpoint, match="is not overwritten"):
            elixir.save(tmp_path / name, ladder())
    with pytest.raises(elixir.NotACheckpoint, match=r"no manifest\.json"):
        elixir.load(tmp_path / "notes", ladder())
    assert [file.name for file in (tmp_path / "notes").iterdir()] == ["mine.txt"]


def test_a_symbolic_link_to_a_checkpoint_stays_a_link(tmp_path: Path) -> None:
    elixir.save(tmp_path / "run", ladder(), step=1)
    (tmp_path / "latest").symlink_to("run")
    elixir.save(tmp_path / "latest", ladder(), step=2)
    assert (tmp_path / "latest").is_symlink()
    assert elixir.load(tmp_path / "run", ladder()).step == 2


def test_a_folder_that_another_process_writes_is_not_removed(tmp_path: Path) -> None:
    with folders.new_folder(tmp_path / "run") as first:
        elixir.save(tmp_path / "run", ladder(), step=1)
        assert first.is_dir()
        (first / "manifest.json").write_text("")
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("call", [0, 3])
def test_a_full_disk_leaves_the_previous_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    elixir.save(tmp_path / "run", ladder(), step=1)
    calls = iter(range(100))

    def full(*args: Any) -> int:
        if next(calls) >= call:
            raise OSError(errno.ENOSPC, "No space left on device")
        return usual(*args)

    usual = folders._SummedFile.write
    monkeypatch.setattr(folders._SummedFile, "write", full)
    with pytest.raises(elixir.DiskFailed, match="No space left on device"):
        elixir.save(tmp_path / "run", ladder(), step=2)
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]
    assert elixir.load(tmp_path / "run", ladder()).step == 1


def test_a_disk_without_room_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type(shutil.disk_usage(tmp_path))(total=10**9, used=10**9 - 100, free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(elixir.DiskFull) as raised:
        elixir.save(tmp_path / "new" / "run", ladder())
    assert raised.value.needed_bytes > 2 * 13 * 13 * 4
    assert list(tmp_path.iterdir()) == []


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from torch import nn
import elixir_compile as elixir
from elixir_compile.checkpoint import folder

path = Path(sys.argv[1]) / "run"
model = nn.Linear(4, 4)
elixir.save(path, model, step=1)

def is_killed(at):  # saves step 2 in a child that is killed at the at-th change of the disk
    child = os.fork()
    if child == 0:
        calls = iter(range(1000))
        def deadly(usual):
            def call(*args, **kwargs):
                if next(calls) == at:
                    os.kill(os.getpid(), signal.SIGKILL)
                return usual(*args, **kwargs)
            return call
        for name in ("fsync", "rename", "rmdir", "unlink", "mkdir"):
            setattr(os, name, deadly(getattr(os, name)))
        elixir.save(path, model, step=2)
        os._exit(0)
    return os.waitpid(child, 0)[1] != 0

steps, num_left = [], []
while is_killed(len(steps)):
    steps.append(elixir.load(path, model).step)
    num_left.append(len(os.listdir(sys.argv[1])))
    elixir.save(path, model, step=1)
    assert os.listdir(sys.argv[1]) == ["run"], os.listdir(sys.argv[1])
assert elixir.load(path, model).step == 2
print(steps, max(num_left))
"""


def test_a_kill_at_any_moment_leaves_a_complete_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    steps, num_left = program(KILLED, tmp_path / "saved", folder=tmp_path).rsplit("]", 1)
    found = [int(step) for step in steps.strip("[").split(",")]
    assert found == sorted(found)
    assert set(found) == {1, 2}
    assert len(found) > 10
    assert int(num_left) > 1  # there was something left to clean


def test_one_tensor_at_a_time_is_copied(tmp_path: Path) -> None:
    """What is read when it is written is gone when the next is read, though the writer keeps every tensor."""
    read: list[torch.Tensor] = []

    def reads() -> Iterator[Deferred]:
        for number in range(4):

            def one(number: int = number) -> torch.Tensor:
                assert all(earlier.untyped_storage().nbytes() == 0 for earlier in read)
                read.append(torch.full((7,), float(number)))
                return read[-1]

            yield Deferred(like=torch.empty(7, device="meta"), read=one)

    sources = {f"{number}": deferred for number, deferred in enumerate(reads())}
    written, _ = write(tmp_path / "tensors", sources, is_spent=False)
    finish(tmp_path / "tensors", [written])
    assert len(read) == 4
    state = {f"{number}": torch.zeros(7) for number in range(4)}
    with pytest.warns(UserWarning, match=r"torch\.distributed"):
        dcp_load(state, storage_reader=FileSystemReader(tmp_path / "tensors"))
    assert [state[str(number)][6].item() for number in range(4)] == [0.0, 1.0, 2.0, 3.0]
