"""The folder of a checkpoint: written under another name, renamed when complete, held open while it is read.

Each block of `BLOCK_BYTES` of a file has its own CRC-32, computed while the file is written, so an error can name the
damaged block and the tensor in it.
"""

import fcntl
import io
import os
import secrets
import shutil
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from torch.distributed.checkpoint.filesystem import FileSystem

from elixir_compile.checkpoint.errors import NotACheckpoint

MANIFEST_FILE = "manifest.json"


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder beside `path`, and rename it to `path` at the end of the block.

    If the block raises, the folder is removed and `path` is unchanged. Raises NotACheckpoint if `path` exists and is
    neither a checkpoint nor an empty folder.
    """
    path = resolved(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _only_save_in(path.parent):
        _require_replaceable(path)
    remove_left_over(path)
    while True:
        folder = _beside(path, "saving")
        folder.mkdir()
        # Until this folder is locked, another save may remove it as left over; then try again.
        try:
            lock = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:
            continue
        fcntl.flock(lock, fcntl.LOCK_SH)
        if folder.exists():
            break
        os.close(lock)
    try:
        try:
            yield folder
            sync_folder(folder)
            with _only_save_in(path.parent):
                _require_replaceable(path)
                previous = previous_of(path)
                if path.exists():
                    if previous.exists():  # left by a save that was killed during the replacement
                        os.rename(previous, _beside(path, "old"))
                    os.rename(path, previous)
                os.rename(folder, path)
                sync_folder(path.parent)
                if previous.exists():
                    os.rename(previous, _beside(path, "old"))
        finally:
            # After the rename there is no folder of this name.
            shutil.rmtree(folder, ignore_errors=True)
            # Unlocked before `remove_left_over`: another save may have replaced this checkpoint by now, and its
            # removal skips locked folders.
            unlock(lock)
        remove_left_over(path)
    finally:
        os.close(lock)


def sync_folder(folder: Path) -> None:
    """Sync the directory entries of `folder` to the disk."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def resolved(path: Path) -> Path:
    """Return `path` with symbolic links resolved, so that a save replaces the target of a link and keeps the link."""
    return Path(os.path.realpath(path))


def previous_of(path: Path) -> Path:
    """Return the path to which a save moves the old checkpoint of `path` (resolved) for the moment of replacement."""
    return path.with_name(f".{path.name}.previous")


def remove_left_over(path: Path) -> None:
    """Remove the replaced and the unfinished checkpoints of `path` (resolved) that no process has locked."""
    for entry in list(os.scandir(path.parent)):
        if not entry.name.startswith((_prefix(path, "saving"), _prefix(path, "old"))):
            continue
        try:
            lock = os.open(entry.path, os.O_RDONLY)
        except FileNotFoundError:
            continue  # another process removed it first
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(entry.path, ignore_errors=True)
        except BlockingIOError:
            pass  # a process writes it, reads it or removes it
        finally:
            unlock(lock)
            os.close(lock)


def unlock(lock: int) -> None:
    """Release the lock of the open file `lock`, if it has one."""
    # Closing the file is not enough: a process that was forked since has the file open too, and the lock with it.
    fcntl.flock(lock, fcntl.LOCK_UN)


def _prefix(path: Path, what: str) -> str:
    return f".{path.name}.{what}."


def _beside(path: Path, what: str) -> Path:
    return path.with_name(_prefix(path, what) + secrets.token_hex(4))


@contextmanager
def _only_save_in(parent: Path) -> Iterator[None]:
    """Hold a lock during the block, so that no other process replaces a checkpoint in the folder `parent`."""
    lock = os.open(parent, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            unlock(lock)
    finally:
        os.close(lock)


def _require_replaceable(path: Path) -> None:
    if path.exists() and not (path.is_dir() and ((path / MANIFEST_FILE).is_file() or not any(path.iterdir()))):
        raise NotACheckpoint(str(path), "it holds something else, which is not overwritten")


_NUM_TRIES = 25
_PAUSE_S = 0.002


class OpenFolder:
    """A folder that is open: its files can be read until `close`, even if another folder takes its path."""

    def __init__(self, path: Path, base: Path) -> None:
        """`base` is the path of the checkpoint; `path` is `base`, or `previous_of(base)` during a replacement.

        Raises OSError if there is no folder at `path`.
        """
        self.path = path
        self._base = base
        self._file = os.open(path, os.O_RDONLY | os.O_DIRECTORY)

    def __enter__(self) -> "OpenFolder":
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def __str__(self) -> str:
        return str(self.path)

    def lock(self) -> bool:
        """Lock the folder against removal; return False if another process is removing it."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            pass  # a file system without locks
        return True

    def open(self, name: str) -> io.BufferedReader:
        """Open the file `name` of the folder for reading. Raises OSError."""
        return open(name, "rb", opener=partial(os.open, dir_fd=self._file))

    def has(self, name: str) -> bool:
        """Return whether the folder has a file `name`."""
        try:
            os.stat(name, dir_fd=self._file)
        except OSError:
            return False
        return True

    def is_there(self) -> bool:
        """Return whether this folder is still at `path`: no save has replaced it."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._file))
        except OSError:
            return False

    def close(self) -> None:
        """Close the folder, and remove it if a save has replaced it and no other process reads it."""
        with suppress(OSError):  # a file system without locks
            unlock(self._file)
        # A save that replaces this folder from now on finds it unlocked and removes it.
        is_replaced = not self.is_there()
        os.close(self._file)
        if is_replaced:
            with suppress(OSError):  # no permission to write there: the next save removes the folder
                remove_left_over(self._base)


def open_checkpoint(path: Path) -> OpenFolder:
    """Open the checkpoint at `path`. Raises NotACheckpoint if there is none.

    Takes at most about 0.1 s, even if other processes keep saving to `path`.
    """
    base = resolved(path)
    for num_left in reversed(range(_NUM_TRIES)):
        found = _opened(base, base) or _opened(previous_of(base), base)
        if found is not None:
            # The last try does without the lock: a stopped process may hold the lock forever.
            is_locked = found.lock() or not num_left
            if is_locked and found.has(MANIFEST_FILE):
                return found
            is_other = is_locked and found.path == base and found.is_there()
            found.close()
            if is_other:
                raise NotACheckpoint(str(base), f"it has no {MANIFEST_FILE}")
        # A save may have ended between the look at `base` and the look at `previous_of(base)`: look again.
        time.sleep(_PAUSE_S)
        base = resolved(path)
    raise NotACheckpoint(str(base), "there is nothing")


def _opened(path: Path, base: Path) -> OpenFolder | None:
    try:
        return OpenFolder(path, base)
    except FileNotFoundError:
        return None
    except OSError as error:
        because = "it is a file" if path.is_file() else f"it cannot be opened ({error.strerror})"
        raise NotACheckpoint(str(path), because) from error


BLOCK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """The length of a file in bytes and the CRC-32 of each block; the last block may be shorter."""

    nbytes: int
    crc32s: tuple[int, ...]


class BlockSums:
    """Computes the record of a file from its bytes, piece by piece."""

    def __init__(self) -> None:
        self._nbytes = 0
        self._done: list[int] = []
        self._crc32 = 0

    def add(self, data: memoryview) -> None:
        """Add `data` behind the bytes so far."""
        while data:
            left_bytes = BLOCK_BYTES - self._nbytes % BLOCK_BYTES
            self._crc32 = zlib.crc32(data[:left_bytes], self._crc32)
            self._nbytes += min(left_bytes, len(data))
            data = data[left_bytes:]
            if self._nbytes % BLOCK_BYTES == 0:
                self._done.append(self._crc32)
                self._crc32 = 0

    def record(self) -> FileRecord:
        """Return the record of the bytes so far."""
        last = (self._crc32,) if self._nbytes % BLOCK_BYTES else ()
        return FileRecord(nbytes=self._nbytes, crc32s=(*self._done, *last))


class _SummedFile(io.FileIO):
    """A new file that passes each write on to a BlockSums."""

    def __init__(self, path: "str | os.PathLike[str]", sums: BlockSums) -> None:
        super().__init__(path, "wb")
        self._sums = sums

    def write(self, data: Any, /) -> int:
        written = super().write(data)
        self._sums.add(memoryview(data).cast("B")[:written])
        return written


class SummedFileSystem(FileSystem):
    """DCP's file system, which collects in `records` the record of each written file by file name.

    Files are only written from beginning to end, never in place.
    """

    def __init__(self) -> None:
        super().__init__()
        self.records: dict[str, FileRecord] = {}

    @contextmanager
    def create_stream(self, path: "str | os.PathLike[str]", mode: str) -> Iterator[io.IOBase]:
        """Open a new file for writing with checksums; `mode` is "wb"."""
        sums = BlockSums()
        with io.BufferedWriter(_SummedFile(path, sums)) as stream:
            yield stream
        self.records[Path(path).name] = sums.record()

    def rename(self, path: "str | os.PathLike[str]", new_path: "str | os.PathLike[str]") -> None:
        """Rename a written file, and its record."""
        super().rename(path, new_path)
        self.records[Path(new_path).name] = self.records.pop(Path(path).name)


def first_damage(file: BinaryIO, record: FileRecord) -> tuple[int, str] | None:
    """Return (offset in bytes, text) of the first damage in `file` against `record`; None if there is no damage.

    Raises OSError if the file cannot be read.
    """
    nbytes = os.fstat(file.fileno()).st_size
    if nbytes != record.nbytes:
        return min(nbytes, record.nbytes), f"has {nbytes} bytes of {record.nbytes}"
    for block, crc32 in enumerate(record.crc32s):
        if zlib.crc32(file.read(BLOCK_BYTES)) != crc32:
            return block * BLOCK_BYTES, f"is damaged between bytes {block * BLOCK_BYTES} and {file.tell()}"
    return None
