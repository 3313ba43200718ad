"""What a checkpoint is and which files it has, `manifest.json`: written last, read first.

```text
  manifest.json     this
  state.json        what is no tensor: param groups, scheduler, random states, `extra`; see `values`
  tensors/          every tensor, by torch.distributed.checkpoint
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
from typing import Any

from elixir_compile.checkpoint.dcp import Reader
from elixir_compile.checkpoint.errors import CheckpointCorrupted
from elixir_compile.checkpoint.folder import MANIFEST_FILE, OpenFolder, open_checkpoint
from elixir_compile.checkpoint.sums import FileRecord, SummedFileSystem, first_damage
from elixir_compile.checkpoint.values import tensor_keys
from elixir_compile.codec import Form, from_json, to_json
from elixir_compile.errors import ElixirError

STATE_FILE = "state.json"
TENSORS_FOLDER = "tensors"
_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A checkpoint in short."""

    step: int
    num_ranks: int
    """Processes that wrote it."""
    versions: Mapping[str, str]
    """Of Python, torch and this package, when it was written."""
    files: Mapping[str, FileRecord]
    """By name, relative to the folder."""
    crc32: int = 0
    """Of this file, were this number 0."""


def write_text(path: Path, text: str) -> FileRecord:
    """Write a new file, synced to the disk, and return its record."""
    summed = SummedFileSystem()
    with summed.create_stream(path, "wb") as stream:
        stream.write(text.encode())
        stream.flush()
        os.fsync(stream.fileno())
    return summed.records[path.name]


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `manifest` to its file."""
    form = _form(folder)
    crc32 = zlib.crc32(to_json(form, replace(manifest, crc32=0)).encode())
    write_text(folder / MANIFEST_FILE, to_json(form, replace(manifest, crc32=crc32)))


def read_manifest(folder: OpenFolder) -> Manifest:
    """Return the manifest of `folder`; CheckpointCorrupted if it is damaged or of another format."""
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
    """A checkpoint of which every byte is as it was written."""

    folder: OpenFolder
    """Must stay open while `reader` reads."""
    manifest: Manifest
    reader: Reader
    plain: Any
    """What is no tensor."""


def open_verified(
    path: Path, held: ExitStack, *, rank: int = 0, num_ranks: int = 1, is_last_try: bool = False
) -> Verified | None:
    """Return the checkpoint at `path`, once every byte of every file is as it was written; `held` keeps it open.

    Of several ranks each compares its share of the files with tensors. Raises NotACheckpoint, and CheckpointCorrupted,
    which names the file and the first value that is lost. Returns None in place of CheckpointCorrupted if another
    checkpoint has taken its place meanwhile, except for `is_last_try`: locks may not reach who removed its files.
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
    """Return a reader of the tensors and what `state.json` holds."""
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
        because = f"is not what a manifest holds: {field}: expected {expected}, got {got!r}"
        return CheckpointCorrupted(str(folder), MANIFEST_FILE, "", because)

    return Form(what="checkpoint", version=_FORMAT, error=error)
