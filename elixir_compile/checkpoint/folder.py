"""The folder of a checkpoint: it appears whole or not at all, and is held open while it is read."""

import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

from elixir_compile.checkpoint.errors import NotACheckpoint

MANIFEST_FILE = "manifest.json"


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder, which takes the place of `path` at the end; on an error `path` stays what it was.

    Raises NotACheckpoint if `path` is something else, which is left alone.
    """
    path = resolved(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _only_save_in(path.parent):
        _require_replaceable(path)
    remove_left_over(path)
    folder, lock = _locked_folder(path)
    try:
        try:
            yield folder
            sync_folder(folder)
            with _only_save_in(path.parent):
                _require_replaceable(path)
                _replace(path, folder)
        finally:
            # Gone already if it was renamed.
            shutil.rmtree(folder, ignore_errors=True)
            # Before what is left over is removed: a save that has replaced this one in the meantime removes it.
            unlock(lock)
        remove_left_over(path)
    finally:
        os.close(lock)


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` last."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def resolved(path: Path) -> Path:
    """Return `path` without links: a link to a checkpoint stays, and what it points to is replaced."""
    return Path(os.path.realpath(path))


def previous_of(path: Path) -> Path:
    """Return where the checkpoint at `path`, which is resolved, is while it is being replaced."""
    return path.with_name(f".{path.name}.previous")


def remove_left_over(path: Path) -> None:
    """Remove the folders beside `path`, which is resolved, that were replaced or never finished and nobody has open."""
    for entry in list(os.scandir(path.parent)):
        if not entry.name.startswith((_prefix(path, "saving"), _prefix(path, "old"))):
            continue
        try:
            lock = os.open(entry.path, os.O_RDONLY)
        except FileNotFoundError:
            continue  # another process was first
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(entry.path, ignore_errors=True)
        except BlockingIOError:
            pass  # a process writes it, reads it or removes it
        finally:
            unlock(lock)
            os.close(lock)


def unlock(lock: int) -> None:
    """Let go of the lock that the open file `lock` may have."""
    # A process that was forked in the meantime has the file open too, so closing it here would not do.
    fcntl.flock(lock, fcntl.LOCK_UN)


def _prefix(path: Path, what: str) -> str:
    return f".{path.name}.{what}."


def _beside(path: Path, what: str) -> Path:
    return path.with_name(_prefix(path, what) + secrets.token_hex(4))


@contextmanager
def _only_save_in(parent: Path) -> Iterator[None]:
    """Wait until no other process replaces a checkpoint in `parent`, and let none begin in the block."""
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
        raise NotACheckpoint(str(path), "it is something else, and is not overwritten")


def _locked_folder(path: Path) -> tuple[Path, int]:
    while True:
        folder = _beside(path, "saving")
        folder.mkdir()
        # Before it is locked, another save may take it for one that was left over.
        try:
            lock = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:
            continue
        fcntl.flock(lock, fcntl.LOCK_SH)
        if folder.exists():
            return folder, lock
        os.close(lock)


def _replace(path: Path, folder: Path) -> None:
    previous = previous_of(path)
    if path.exists():
        if previous.exists():  # a save was killed before it could move it away
            os.rename(previous, _beside(path, "old"))
        os.rename(path, previous)
    os.rename(folder, path)
    sync_folder(path.parent)
    if previous.exists():
        os.rename(previous, _beside(path, "old"))


_NUM_TRIES = 25
_PAUSE_S = 0.002


class OpenFolder:
    """The folder that `path` led to when it was opened; it stays open until `close`."""

    def __init__(self, path: Path, base: Path) -> None:
        """`base` is the path of the checkpoint, which is `path` unless a save is replacing it or was killed.

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
        """Keep the folder from being removed; return False if it is being removed right now."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            pass  # a file system without locks
        return True

    def open(self, name: str) -> BinaryIO:
        """Open the file `name` of the folder; OSError if that fails."""
        return open(name, "rb", opener=partial(os.open, dir_fd=self._file))

    def has(self, name: str) -> bool:
        """Whether the folder has a file `name`."""
        try:
            os.stat(name, dir_fd=self._file)
        except OSError:
            return False
        return True

    def is_there(self) -> bool:
        """Whether `path` still leads to this folder: no save has taken its place."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._file))
        except OSError:
            return False

    def close(self) -> None:
        """Let go of the folder; it is removed if a save has taken its place and nobody else reads it."""
        with suppress(OSError):  # a file system without locks
            unlock(self._file)
        # A save from now on removes the folder itself.
        is_replaced = not self.is_there()
        os.close(self._file)
        if is_replaced:
            with suppress(OSError):  # this process may not write there: the next save removes it
                remove_left_over(self._base)


def open_checkpoint(path: Path) -> OpenFolder:
    """Open the checkpoint at `path`; NotACheckpoint if there is none.

    Takes at most 0.1 s, whatever other processes save to `path` in the meantime.
    """
    base = resolved(path)
    for num_left in reversed(range(_NUM_TRIES)):
        found = _opened(base, base) or _opened(previous_of(base), base)
        if found is not None:
            # The last time even without a lock: a process that is stopped may hold it forever.
            is_locked = found.lock() or not num_left
            if is_locked and found.has(MANIFEST_FILE):
                return found
            is_other = is_locked and found.path == base and found.is_there()
            found.close()
            if is_other:
                raise NotACheckpoint(str(base), f"it has no {MANIFEST_FILE}")
        # Between looking for one and looking for the other a save may have ended: then there is one now.
        time.sleep(_PAUSE_S)
        base = resolved(path)
    raise NotACheckpoint(str(base), "there is nothing")


def _opened(path: Path, base: Path) -> OpenFolder | None:
    try:
        return OpenFolder(path, base)
    except FileNotFoundError:
        return None
    except OSError as error:
        because = "it is no folder" if path.is_file() else f"it cannot be opened ({error.strerror})"
        raise NotACheckpoint(str(path), because) from error
