"""Write tensors by key to a folder and read them back, each rank its own shards, with a manifest of all files and their
checksums.
"""

import io
import json
import os
import pickle
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from elixir_compile import compat
from elixir_compile.base.codec import Form, from_json, to_json
from elixir_compile.base.errors import ElixirError
from elixir_compile.checkpoint.errors import CheckpointCorrupted
from elixir_compile.checkpoint.folder import (
    MANIFEST_FILE,
    FileRecord,
    OpenFolder,
    SummedFileSystem,
    first_damage,
    open_checkpoint,
)
from elixir_compile.checkpoint.run_state import Deferred, Sources, tensor_keys
from elixir_compile.graph.ops.shards import own_shard

# ----------------------------------------------------------------------------------------------------------------------
# Write tensors by key to a folder and read them back, each rank its own shards.
#
# The format is that of torch.distributed.checkpoint (DCP). Each file says which rows of the full tensors it has, so any
# number of ranks may load what another number saved:
#
#   saved by 2 ranks     rows 0 to 2 | rows 3 to 5              `keep_own`: each rank writes its shard with its `Place`
#   loaded by 3 ranks    rows 0, 1 | rows 2, 3 | rows 4, 5      `Reader.read_into`: the second rank reads of both files
#
# Which rows a rank has, its parameters say: they are sharded before anything is loaded (`graph.ops.shards`). The
# optimizer's tensors to be filled get the rows of their parameters (`run_state.optimizer_targets`). Torch's planner
# finds the pieces of the files that each of these tensors covers.


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The position of a shard in the full tensor."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    """Shape of the full tensor."""


def keep_own(sources: Sources, *, is_first: bool) -> Mapping[str, Place]:
    """Remove from `sources` the tensors of other ranks, and return the places of the remaining shards.

    DTensors in `sources` become plain tensors: this rank's shard. The first rank writes all tensors
    without a mesh. Every rank must pass the same keys in the same order.
    """
    places: dict[str, Place] = {}
    num_shared = 0
    for key, source in list(sources.items()):
        like = source.like if isinstance(source, Deferred) else source
        if not isinstance(like, DTensor):
            if not is_first:
                del sources[key]
            continue
        # Ranks that have copies of the same shard take turns.
        mesh = like.device_mesh
        coordinate = mesh.get_coordinate()
        is_writer = False
        if coordinate is not None and not like.numel():
            is_writer = not any(coordinate)
        elif coordinate is not None:  # else this rank is not in the mesh
            axes = zip(like.placements, coordinate, mesh.shape, strict=True)
            is_turn = all(place == num_shared % size for placement, place, size in axes if placement.is_replicate())
            is_writer = is_turn and own_shard(like).numel() > 0
        if is_writer:
            (chunk,) = like.__create_chunk_list__()
            places[key] = Place(offsets=tuple(chunk.offsets), shape=tuple(like.shape))
            own = own_shard(like)
            sources[key] = Deferred(like=own, read=source.read) if isinstance(source, Deferred) else own
        else:
            del sources[key]
        num_shared += 1
    return places


_METADATA_FILE = ".metadata"
_DCP = "torch.distributed.checkpoint."
_KNOWN = {
    *(
        (f"{_DCP}metadata", name)
        for name in (
            *("Metadata", "MetadataIndex", "StorageMeta", "BytesStorageMetadata", "ChunkStorageMetadata"),
            *("TensorStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"),
        )
    ),
    (f"{_DCP}filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
}
"""The classes and functions that a `.metadata` file may name, besides the dtypes of torch."""


class _MetadataUnpickler(pickle.Unpickler):
    """An unpickler that loads the names in `_KNOWN` and the dtypes of torch, and refuses every other name."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) not in _KNOWN and not is_dtype:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint contains")
        return super().find_class(module, name)


class _Writer(FileSystemWriter):
    """DCP's writer with checksums, and without the path of the folder in its metadata: the folder is renamed later."""

    def __init__(self, folder: Path) -> None:
        # No copies ahead of the write: the planner copies one tensor at a time to the host.
        super().__init__(folder, per_thread_copy_ahead=0)
        self.summed = SummedFileSystem()
        self.fs = self.summed

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)


class _SavePlanner(DefaultSavePlanner):
    """DCP's planner, changed to copy each tensor to the host alone and to free the copy before the next tensor.

    If `is_spent`, each source is removed from `sources` and freed after it is written.
    """

    def __init__(self, sources: Sources, *, is_spent: bool) -> None:
        super().__init__(flatten_state_dict=False)
        self._sources = sources
        self._is_spent = is_spent
        self._copy: torch.Tensor | None = None

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        # The writer keeps every tensor of a file until the file is done (`tensor_dict` in torch 2.13). The previous
        # tensor is written by now, so its storage can be emptied.
        if self._copy is not None:
            self._copy.untyped_storage().resize_(0)
        source = self._sources.pop(index.fqn) if self._is_spent else self._sources[index.fqn]
        given = source.read() if isinstance(source, Deferred) else source.detach()
        tensor = compat.settled(given.cpu().contiguous())
        if tensor.untyped_storage().nbytes() != tensor.nbytes:  # the writer would clone it, and keep the clone
            tensor = tensor.clone()
        is_own = self._is_spent or isinstance(source, Deferred) or tensor.data_ptr() != given.data_ptr()
        self._copy = tensor if is_own else None
        return tensor


class _OpenFiles(FileSystem):
    """DCP's file system over an open folder: files by names relative to the folder, for reading only."""

    def __init__(self, folder: OpenFolder) -> None:
        super().__init__()
        self._folder = folder

    @contextmanager
    def create_stream(self, path: "str | os.PathLike[str]", mode: str) -> Iterator[io.IOBase]:
        """Open a file for reading; `mode` is "rb"."""
        with self._folder.open(os.fspath(path)) as stream:
            yield stream


class Reader(FileSystemReader):
    """DCP's reader for the sub-folder `name` of the open `folder`; it reads the metadata once.

    `folder` must stay open while tensors are read. Raises pickle.UnpicklingError if the file holds no metadata.
    """

    def __init__(self, folder: OpenFolder, name: str) -> None:
        super().__init__(name)
        self.fs = _OpenFiles(folder)
        with folder.open(f"{name}/{_METADATA_FILE}") as file:
            found = _MetadataUnpickler(file).load()
        if not isinstance(found, Metadata):
            raise pickle.UnpicklingError(f"it holds {type(found).__name__}")
        self.metadata = found

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata, which was read when this reader was made."""
        return self.metadata

    @property
    def forms(self) -> Mapping[str, torch.Tensor]:
        """By key, a tensor on `meta` with the stored shape and dtype."""
        return {
            key: torch.empty(stored.size, dtype=stored.properties.dtype, device="meta")
            for key, stored in self.metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }

    def key_at(self, file: str, byte: int) -> str:
        """Return the key of the tensor at `byte` of `file`, or of the next tensor, or '' behind the last tensor."""
        ends = [
            (place.offset + place.length, index.fqn)
            for index, place in self.metadata.storage_data.items()
            if place.relative_path == file and place.offset + place.length > byte
        ]
        return min(ends)[1] if ends else ""

    def new(self, keys: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return uninitialised tensors in host memory, by key, with the stored full shapes and dtypes."""
        forms = self.forms
        return {key: torch.empty(forms[key].shape, dtype=forms[key].dtype, device="cpu") for key in keys}

    def fresh(self, keys: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return the stored tensors under `keys`, in new host memory."""
        tensors = self.new(keys)
        self.read_into(tensors)
        return tensors

    def read_into(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Read the stored tensors into `targets` in place, on any device; of a DTensor, this rank's shard.

        The ranks that wrote it may have had other shards.
        """
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        planner.set_up_planner(dict(targets), self.metadata, is_coordinator=True)
        self.set_up_storage_reader(self.metadata, is_coordinator=True)
        local = self.prepare_local_plan(planner.create_local_plan())
        (plan,) = self.prepare_global_plan(planner.create_global_plan([local]))
        self.read_data(planner.finish_plan(plan), planner).wait()


def write(
    folder: Path, sources: Sources, *, is_spent: bool, places: Mapping[str, Place] | None = None, rank: int = 0
) -> tuple[str, Mapping[str, FileRecord]]:
    """Write `sources` to the file of `rank` in `folder` and sync it to the disk.

    Returns a text for `finish`, which needs the text of every rank, and the records of the files by name. A source
    whose key is in `places` is a shard of a tensor. A tensor that is not in host memory is copied there, one at a time.
    If `is_spent`, each source is removed and its memory freed after it is written. Raises OSError if a write fails.
    """
    writer, planner = _Writer(folder), _SavePlanner(sources, is_spent=is_spent)
    likes = {key: source.like if isinstance(source, Deferred) else source for key, source in sources.items()}
    items: dict[str, WriteItem] = {}
    for key, like in likes.items():
        place = (places or {}).get(key) or Place(offsets=(0,) * like.ndim, shape=tuple(like.shape))
        items[key] = _write_item(key, like.dtype, place, like.shape)
    writer.set_up_storage_writer(is_coordinator=True)
    local = writer.prepare_local_plan(SavePlan(list(items.values())))
    # DCP names a file by the index of its plan in this list, so `rank` empty plans come first.
    plan = writer.prepare_global_plan([*[SavePlan([])] * rank, local])[-1]
    results = writer.write_data(planner.finish_plan(plan), planner).wait()
    return json.dumps([_as_values(items[found.index.fqn], found) for found in results]), writer.summed.records


def finish(folder: Path, written: Iterable[str]) -> Mapping[str, FileRecord]:
    """Write the metadata file for the tensors of all ranks and sync it to the disk; return its record by name.

    `written` holds the text that `write` returned on each rank. Raises ValueError if the shards of a tensor do not
    cover it.
    """
    plans: list[SavePlan] = []
    results: list[list[WriteResult]] = []
    for text in written:
        pairs = [_from_values(values) for values in json.loads(text)]
        plans.append(SavePlan([item for item, _ in pairs]))
        results.append([result for _, result in pairs])
    _, metadata = DefaultSavePlanner(flatten_state_dict=False).create_global_plan(plans)
    writer = _Writer(folder)
    writer.set_up_storage_writer(is_coordinator=True)
    writer.finish(metadata, results)
    return writer.summed.records


def _write_item(key: str, dtype: torch.dtype, place: Place, sizes: Sequence[int]) -> WriteItem:
    offsets, shape = torch.Size(place.offsets), torch.Size(place.shape)
    chunk = ChunkStorageMetadata(offsets=offsets, sizes=torch.Size(sizes))
    data = TensorWriteData(chunk=chunk, properties=TensorProperties(dtype=dtype), size=shape)
    return WriteItem(index=MetadataIndex(key, offsets), type=WriteItemType.SHARD, tensor_data=data)


def _as_values(item: WriteItem, result: WriteResult) -> list[object]:
    """Return `item` and `result` as values that JSON can hold; `_from_values` is the inverse."""
    data, stored = item.tensor_data, result.storage_data
    assert data is not None  # set by `_write_item`
    where = [stored.relative_path, stored.offset, stored.length, result.size_in_bytes]
    dtype = str(data.properties.dtype).removeprefix("torch.")
    return [item.index.fqn, dtype, *map(list, (data.chunk.offsets, data.chunk.sizes, data.size)), *where]


def _from_values(values: Sequence[Any]) -> tuple[WriteItem, WriteResult]:
    key, dtype, offsets, sizes, shape, file, offset_bytes, stored_bytes, nbytes = values
    item = _write_item(key, getattr(torch, dtype), Place(offsets=offsets, shape=shape), sizes)
    stored = compat.storage_info(file, offset_bytes, stored_bytes)
    return item, WriteResult(index=item.index, size_in_bytes=nbytes, storage_data=stored)


# ----------------------------------------------------------------------------------------------------------------------
# `manifest.json`, the list of the files of a checkpoint with their checksums: written last, read first.
#
#   manifest.json     step, versions, and the length and checksums of every other file
#   state.json        param groups, scheduler, random states, `extra`: everything but tensors; see `run_state`
#   tensors/          every tensor, in the format of torch.distributed.checkpoint


STATE_FILE = "state.json"
TENSORS_FOLDER = "tensors"
_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of `manifest.json`."""

    step: int
    num_ranks: int
    """The number of processes that wrote the checkpoint."""
    versions: Mapping[str, str]
    """The versions of `python`, `torch` and `elixir_compile` that wrote the checkpoint."""
    files: Mapping[str, FileRecord]
    """By path relative to the folder of the checkpoint."""
    crc32: int = 0
    """Checksum of this file with 0 in place of this number."""


def write_text(path: Path, text: str) -> FileRecord:
    """Write `text` to the new file `path`, sync it to the disk, and return its record."""
    summed = SummedFileSystem()
    with summed.create_stream(path, "wb") as stream:
        stream.write(text.encode())
        stream.flush()
        os.fsync(stream.fileno())
    return summed.records[path.name]


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `manifest` with its checksum to the folder `folder`."""
    form = _form(folder)
    crc32 = zlib.crc32(to_json(form, replace(manifest, crc32=0)).encode())
    write_text(folder / MANIFEST_FILE, to_json(form, replace(manifest, crc32=crc32)))


def read_manifest(folder: OpenFolder) -> Manifest:
    """Return the manifest of `folder`. Raises CheckpointCorrupted if it is damaged or has another format."""
    form = _form(folder.path)
    try:
        with folder.open(MANIFEST_FILE) as file:
            manifest = from_json(form, Manifest, file.read().decode())
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointCorrupted(str(folder), MANIFEST_FILE, "", f"cannot be read ({error})") from error
    if zlib.crc32(to_json(form, replace(manifest, crc32=0)).encode()) != manifest.crc32:
        raise CheckpointCorrupted(str(folder), MANIFEST_FILE, "", "is damaged: its checksum differs")
    return manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """An open checkpoint whose bytes all agree with their checksums."""

    folder: OpenFolder
    """Must stay open while `reader` reads."""
    manifest: Manifest
    reader: Reader
    plain: Any
    """The content of `state.json`."""


@overload
def open_verified(path: Path, held: ExitStack, *, is_last_try: Literal[True]) -> Verified: ...


@overload
def open_verified(
    path: Path, held: ExitStack, *, rank: int = 0, num_ranks: int = 1, is_last_try: bool = False
) -> Verified | None: ...


def open_verified(
    path: Path, held: ExitStack, *, rank: int = 0, num_ranks: int = 1, is_last_try: bool = False
) -> Verified | None:
    """Open the checkpoint at `path` and compare its files with their checksums; `held` keeps the folder open.

    Each of several ranks compares its share of the files with tensors. Raises NotACheckpoint, and CheckpointCorrupted
    with the file and the first lost value. If another save replaced the checkpoint meanwhile, damage may be due to
    files removed by a machine that locks do not reach: then this returns None, unless `is_last_try`.
    """
    held.close()
    folder = held.enter_context(open_checkpoint(path))
    try:
        manifest = read_manifest(folder)
        reader, plain = _verified(folder, manifest, rank, num_ranks)
    except CheckpointCorrupted:
        if is_last_try or folder.is_there():
            raise
        return None
    return Verified(folder=folder, manifest=manifest, reader=reader, plain=plain)


def _verified(folder: OpenFolder, manifest: Manifest, rank: int, num_ranks: int) -> tuple[Reader, Any]:
    """Compare the files of `folder` with `manifest`; return a reader of the tensors and the content of `state.json`."""
    large = sorted(name for name in manifest.files if name.endswith(".distcp"))
    last = [*(manifest.files.keys() - set(large)), *large[rank::num_ranks]]
    reader = state = None
    for name in last:
        if name.endswith(".distcp") and reader is None:
            reader = _reader(folder)
        try:
            with folder.open(name) as file:
                damage = first_damage(file, manifest.files[name])
                if damage is None and name == STATE_FILE:
                    file.seek(0)
                    state = json.loads(file.read())
        except OSError as error:
            damage = 0, f"cannot be read ({error.strerror})"
        if damage is not None:
            byte, because = damage
            key = "" if reader is None else reader.key_at(Path(name).name, byte)
            raise CheckpointCorrupted(str(folder), name, key, because)
    if state is None:
        raise CheckpointCorrupted(str(folder), MANIFEST_FILE, "", f"does not list {STATE_FILE}")
    reader = reader or _reader(folder)
    stored = reader.forms.keys()
    for key in tensor_keys(state):
        if key not in stored:
            raise CheckpointCorrupted(str(folder), f"{TENSORS_FOLDER}/.metadata", key, "does not list it")
    return reader, state


def _reader(folder: OpenFolder) -> Reader:
    try:
        return Reader(folder, TENSORS_FOLDER)
    except (OSError, pickle.UnpicklingError, EOFError, AttributeError, ValueError, TypeError) as error:
        because = f"cannot be read ({error})"
        raise CheckpointCorrupted(str(folder), f"{TENSORS_FOLDER}/.metadata", "", because) from error


def _form(folder: Path) -> Form:
    def error(field: str, expected: str, got: object) -> ElixirError:
        because = f"is not a valid manifest: {field}: expected {expected}, got {got!r}"
        return CheckpointCorrupted(str(folder), MANIFEST_FILE, "", because)

    return Form(what="checkpoint", version=_FORMAT, error=error)
