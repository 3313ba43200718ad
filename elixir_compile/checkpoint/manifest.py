"""`manifest.json`, the list of the files of a checkpoint with their checksums: written last, read first.

```text
  manifest.json     step, versions, and the length and checksums of every other file
  state.json        param groups, scheduler, random states, `extra`: everything but tensors; see `values`
  tensors/          every tensor, in the format of torch.distributed.checkpoint
```
"""

import json
import os
import pickle
import zlib
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, overload

from elixir_compile.base.codec import Form, from_json, to_json
from elixir_compile.base.errors import ElixirError
from elixir_compile.checkpoint.dcp import Reader
from elixir_compile.checkpoint.errors import CheckpointCorrupted
from elixir_compile.checkpoint.folder import (
    MANIFEST_FILE,
    FileRecord,
    OpenFolder,
    SummedFileSystem,
    first_damage,
    open_checkpoint,
)
from elixir_compile.checkpoint.values import tensor_keys

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
        _verify(folder, name, manifest.files[name], reader)
        if name == STATE_FILE:
            state = json.loads(_content(folder, name))
    if state is None:
        raise CheckpointCorrupted(str(folder), MANIFEST_FILE, "", f"does not list {STATE_FILE}")
    reader = reader or _reader(folder)
    stored = reader.forms.keys()
    for key in tensor_keys(state):
        if key not in stored:
            raise CheckpointCorrupted(str(folder), f"{TENSORS_FOLDER}/.metadata", key, "does not list it")
    return reader, state


def _verify(folder: OpenFolder, name: str, record: FileRecord, reader: Reader | None) -> None:
    try:
        with folder.open(name) as file:
            damage = first_damage(file, record)
    except OSError as error:
        damage = 0, f"cannot be read ({error.strerror})"
    if damage is not None:
        byte, because = damage
        key = "" if reader is None else reader.key_at(Path(name).name, byte)
        raise CheckpointCorrupted(str(folder), name, key, because)


def _content(folder: OpenFolder, name: str) -> bytes:
    try:
        with folder.open(name) as file:
            return file.read()
    except OSError as error:
        raise CheckpointCorrupted(str(folder), name, "", f"cannot be read ({error.strerror})") from error


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
