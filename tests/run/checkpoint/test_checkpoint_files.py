"""The files of a checkpoint: whole or refused, exported as safetensors, with moments in fewer bytes."""

import errno
import functools
import json
import os
import pickle
import shutil
import warnings
import weakref
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint import load as dcp_load
from torch.distributed.device_mesh import DeviceMesh
from typer.testing import CliRunner, Result

import elixir_compile as elixir
from elixir_compile.checkpoint import folder as folders
from elixir_compile.checkpoint.dcp import Manifest, Reader, finish, read_manifest, write, write_manifest, write_text
from elixir_compile.checkpoint.folder import BLOCK_BYTES, BlockSums, open_checkpoint
from elixir_compile.checkpoint.run_state import Deferred
from elixir_compile.graph.ops.shards import full, own_shard
from elixir_compile.ir import Update
from elixir_compile.optim.disk import DiskState
from elixir_compile.optim.precision import MomentForm, form_of
from elixir_compile.tools.cli.main import app
from tests.run.checkpointing import Training, eager, everything, other
from tests.run.models import small_gpt2
from tests.run.optim.test_narrow_state import narrow_adamw, steps
from tests.run.optim.test_narrow_state import rows as narrow_rows
from tests.run.processes import program, spawn
from tests.run.training import Run, assert_same_tensors
from tests.run.updating import eager_run, hybrid_run, ladder, rows, small_pieces

# ----------------------------------------------------------------------------------------------------------------------
# What is on the disk is a whole checkpoint or none; what is damaged is refused, and nothing is loaded of it.


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


# ----------------------------------------------------------------------------------------------------------------------
# A checkpoint as one safetensors file, written a tensor at a time, and read by the libraries that others use.


safetensors = pytest.importorskip("safetensors.torch")


def run(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def test_hugging_face_loads_an_exported_file(tmp_path: Path) -> None:
    model = small_gpt2()
    elixir.save(tmp_path / "run", model, torch.optim.AdamW(model.parameters()))
    done = run("export", tmp_path / "run", tmp_path / "hf" / "model.safetensors")
    assert done.exit_code == 1, "there is no folder"
    (tmp_path / "hf").mkdir()
    done = run("export", tmp_path / "run", tmp_path / "hf" / "model.safetensors")
    assert done.exit_code == 0, done.output
    assert "lm_head.weight is tied to transformer.wte.weight" in done.stdout

    state = safetensors.load_file(tmp_path / "hf" / "model.safetensors")
    assert_same_tensors({name: model.state_dict()[name] for name in state}, state)
    loaded = other(model)
    assert loaded.load_state_dict(state, strict=False) == (["lm_head.weight"], [])
    assert_same_tensors(model.state_dict(), loaded.state_dict())
    model.config.save_pretrained(tmp_path / "hf")
    assert_same_tensors(model.state_dict(), type(model).from_pretrained(tmp_path / "hf").state_dict())
    assert [file.name for file in (tmp_path / "hf").iterdir() if file.name.startswith(".")] == []


def every_dtype() -> nn.Module:
    module = nn.Module()
    torch.manual_seed(3)
    for number, dtype in enumerate(
        (*(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64), *(torch.int8, torch.bool))
    ):
        values = (torch.randn(3, 5) * 4).to(dtype)
        module.register_buffer(f"b{number}", values if number % 2 else values.t())
    module.register_buffer("scalar", torch.tensor(3.0))
    module.register_buffer("nothing", torch.empty(0, 2))
    return module


def test_every_dtype_is_exported_one_tensor_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, alive, most = every_dtype(), [], []
    elixir.save(tmp_path / "run", module)
    usual = Reader.fresh

    def fresh(reader: Reader, keys: Iterable[str]) -> dict[str, torch.Tensor]:
        found = usual(reader, keys)
        alive.extend(weakref.ref(tensor) for tensor in found.values())
        most.append(sum(tensor() is not None for tensor in alive))
        return found

    monkeypatch.setattr(Reader, "fresh", fresh)
    done = run("export", tmp_path / "run", tmp_path / "out.safetensors", "--json")
    assert json.loads(done.stdout)["num_tensors"] == len(module.state_dict())
    # The one that was just written is let go when the next has been read.
    assert max(most) <= 2
    state = safetensors.load_file(tmp_path / "out.safetensors")
    assert_same_tensors(dict(sorted(module.state_dict().items())), dict(sorted(state.items())))


def test_an_unknown_dtype_and_a_missing_checkpoint_are_not_exported(tmp_path: Path) -> None:
    module = nn.Module()
    module.register_buffer("phase", torch.ones(2, dtype=torch.complex128))
    elixir.save(tmp_path / "run", module)
    for checkpoint, said in (("run", "phase cannot be saved"), ("nowhere", "there is nothing")):
        done = run("export", tmp_path / checkpoint, tmp_path / "out.safetensors")
        assert done.exit_code == 1
        assert said in done.stderr
    assert not (tmp_path / "out.safetensors").exists()


def test_full_state_dict_is_the_state_dict(tmp_path: Path) -> None:
    model = elixir.prepare(small_gpt2())
    state = elixir.full_state_dict(torch.compile(model, backend="elixir"))
    assert_same_tensors(small_gpt2().state_dict(), state)
    assert state["lm_head.weight"] is state["transformer.wte.weight"]
    assert all(tensor.device.type == "cpu" and type(tensor) is torch.Tensor for tensor in state.values())
    fresh = other(small_gpt2())
    fresh.load_state_dict(state)
    assert_same_tensors(state, fresh.state_dict())


# ----------------------------------------------------------------------------------------------------------------------
# Checkpoints of moments in fewer bytes: bit for bit in the same form, converted to others, on any number of ranks.


def state_of(run: Run) -> list[dict[str, torch.Tensor]]:
    return [{name: own_shard(value) for name, value in own.items()} for own in states(run.optimizer)]


def states(optimizer: torch.optim.Optimizer, **how: Any) -> list[dict[str, torch.Tensor]]:
    return list(optimizer.state_dict(**how)["state"].values())  # pyright: ignore[reportCallIssue]


@pytest.mark.filterwarnings("ignore::elixir_compile.base.errors.NoGraphCaptured")
@pytest.mark.parametrize("home", ["host disk", pytest.param("host", marks=pytest.mark.slow)])
@pytest.mark.parametrize("state_dtype", ["int8", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_run_goes_on_bit_for_bit(state_dtype: str, home: str, tmp_path: Path) -> None:
    optimizer = functools.partial(narrow_adamw, state_dtype=state_dtype)
    disk = {"disk_path": tmp_path} if home.endswith("disk") else {}
    plan = {"home": home, "update": Update.ACROSS_STEPS, "optimizer": optimizer, **disk}
    with small_pieces(), hybrid_run(steps(), narrow_rows(1)[0], **plan) as run:
        run.train(narrow_rows(2))
        elixir.save(tmp_path / "run", run.model, run.optimizer, step=2)
        run.train(narrow_rows(4)[2:])
        with hybrid_run(
            steps(), narrow_rows(1)[0], home="device", update=Update.AFTER_BACKWARD, optimizer=optimizer
        ) as other:
            other.train(narrow_rows(1))
            assert elixir.load(tmp_path / "run", other.model, other.optimizer).step == 2
            other.train(narrow_rows(4)[2:])
            assert_same_tensors(run.weights, other.weights)
            for own, there in zip(state_of(run), state_of(other), strict=True):
                assert_same_tensors(own, there)
        if home.endswith("disk"):
            assert all(isinstance(state, DiskState) for state in run.optimizer.state.values())
    said = json.loads((tmp_path / "run" / "state.json").read_text())["optimizer"]["moments"]
    assert said == {state_dtype: len(list(run.model.parameters()))}


@pytest.mark.filterwarnings("ignore::elixir_compile.base.errors.NoGraphCaptured")
@pytest.mark.parametrize(
    ("dtype", "optimizer", "moments"),
    [
        (torch.bfloat16, elixir.HybridAdamW, {}),
        (torch.float32, elixir.hybrid(torch.optim.SGD, "bfloat16"), {"bfloat16": 5}),
        (torch.float32, torch.optim.AdamW, {}),
    ],
    ids=["bf16 parameters without masters", "a class", "torch"],
)
def test_a_checkpoint_names_narrower_moments_alone(
    dtype: torch.dtype, optimizer: Any, moments: dict[str, int], tmp_path: Path
) -> None:
    own = eager_run(steps().to(dtype), optimizer, lr=1e-2, **({"momentum": 0.9} if moments else {}))
    own.train(narrow_rows(1, dtype))
    elixir.save(tmp_path / "run", own.model, own.optimizer)
    assert json.loads((tmp_path / "run" / "state.json").read_text())["optimizer"]["moments"] == moments


@pytest.mark.filterwarnings("ignore::elixir_compile.base.errors.NoGraphCaptured")
def test_other_forms_load_a_checkpoint(tmp_path: Path) -> None:
    def trained(state_dtype: str) -> Run:
        optimizer = functools.partial(narrow_adamw, state_dtype=state_dtype)
        with hybrid_run(
            steps(), narrow_rows(1)[0], home="device", update=Update.AFTER_BACKWARD, optimizer=optimizer
        ) as run:
            return run.train(narrow_rows(2))

    narrow, exact = trained("int8"), trained("float32")
    elixir.save(tmp_path / "run", narrow.model, narrow.optimizer)
    elixir.load(tmp_path / "run", exact.model, exact.optimizer)
    assert {form_of(state) for state in exact.optimizer.state.values()} == {MomentForm.FLOAT32}
    for own, wanted in zip(states(exact.optimizer), states(narrow.optimizer, as_float32=True), strict=True):
        assert_same_tensors(wanted, own)
    elixir.save(tmp_path / "exact", exact.model, exact.optimizer)
    elixir.load(tmp_path / "exact", narrow.model, narrow.optimizer)
    assert {form_of(state) for state in narrow.optimizer.state.values()} == {MomentForm.INT8}
    for own, wanted in zip(states(narrow.optimizer, as_float32=True), states(exact.optimizer), strict=True):
        assert_same_tensors(wanted, own)  # to encode what was decoded loses nothing


@pytest.mark.filterwarnings("ignore::elixir_compile.base.errors.NoGraphCaptured")
def test_a_checkpoint_with_moments_of_no_form_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = eager_run(steps(), functools.partial(narrow_adamw, state_dtype="int8")).train(narrow_rows(1))
    monkeypatch.setattr("elixir_compile.checkpoint.run_state._moments", lambda optimizer: {"float8": 5})
    elixir.save(tmp_path / "run", own.model, own.optimizer)
    with pytest.raises(
        elixir.ElixirError, match="moments in float8 in the checkpoint, which this version does not have"
    ):
        elixir.load(tmp_path / "run", own.model, own.optimizer)


class Wide(nn.Module):
    """Rows of whole blocks, and a weight with odd rows; large enough that both are sharded."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.up = nn.Linear(256, 211, bias=False)
        self.down = nn.Linear(211, 257)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x))).square().mean()


def batches_of(number: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return [torch.randn(8, 256, generator=generator) for _ in range(4)]


def training_of(mesh: DeviceMesh | None, state_dtype: str) -> Run:
    model = elixir.prepare(Wide(), mesh=mesh)
    optimizer = elixir.HybridAdamW(model.parameters(), lr=1e-2, state_dtype=state_dtype)
    options = {"inner": "aot_eager", "report": False}
    return Run(model=model, compiled=torch.compile(model, backend="elixir", options=options), optimizer=optimizer)


def saves_and_loads(rank: int, world_size: int, folder: str, state_dtype: str) -> dict[str, Any]:
    mesh = DeviceMesh("cpu", list(range(world_size)))

    def own(batches: list[torch.Tensor]) -> list[torch.Tensor]:
        return [batch.chunk(world_size)[rank] for batch in batches]

    first = training_of(mesh, state_dtype).train(own(batches_of(1)[:2]))
    assert {form_of(state) for state in first.optimizer.state.values()} == {MomentForm(state_dtype)}
    elixir.save(f"{folder}/run", first.model, first.optimizer)
    whole = [{name: full(value) for name, value in state.items()} for state in states(first.optimizer, as_float32=True)]
    first.train(own(batches_of(1)[2:]))
    second = training_of(mesh, state_dtype)
    elixir.load(f"{folder}/run", second.model, second.optimizer)
    second.train(own(batches_of(1)[2:]))
    for mine, theirs in zip(states(first.optimizer), states(second.optimizer), strict=True):
        assert_same_tensors(
            {name: own_shard(value) for name, value in mine.items()},
            {name: own_shard(value) for name, value in theirs.items()},
        )
    if rank == 0:
        alone = training_of(None, state_dtype)
        elixir.load(f"{folder}/run", alone.model, alone.optimizer)
        names = [name for name, _ in alone.model.named_parameters()]
        for name, mine, theirs in zip(names, whole, states(alone.optimizer, as_float32=True), strict=True):
            for moment in ("exp_avg", "exp_avg_sq"):
                apart = (mine[moment] - theirs[moment]).abs().max() / mine[moment].abs().max()
                assert apart <= (0.0 if name == "up.weight" else 0.02), (name, moment)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", elixir.RanksApart)  # this model is meant for one rank
            alone.train(batches_of(1)[2:])
    return {"weight": float(full(dict(first.model.named_parameters())["up.weight"].detach()).sum())}


@pytest.mark.filterwarnings("ignore::elixir_compile.base.errors.NoGraphCaptured")
def test_two_ranks_save_and_one_loads(tmp_path: Path) -> None:
    first, second = spawn(saves_and_loads, 2, str(tmp_path), "int8", folder=tmp_path, limit_s=120.0)
    assert first == second
