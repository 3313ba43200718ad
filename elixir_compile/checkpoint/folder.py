"""A folder that appears at its path whole or not at all, also beside other processes that save to the same path.

```text
  .name.saving.1f0c   written here and synced; locked (shared) by the process that writes it
  name                the checkpoint; locked (shared) by every process that reads it
  .name.previous      what was at `name`, between the two renames that replace it
  .name.old.77ab      what was at `name` before; removed by the save that replaced it, or by the last process that reads
                      it, or by the next save
```

- A folder is removed only under an exclusive lock of it, and only under the names `saving` and `old`: so nobody removes
  what another process writes or reads, and what a killed process left is removed by the next save. Locks are those of
  `flock`: they end with the process.
- The renames that replace `name` are made under an exclusive lock of the folder that it is in, so two saves replace it
  one after the other. Readers do not take that lock: at every moment `name` or `.name.previous` is a whole checkpoint.
- A process that is killed between the two renames leaves no `name`: the previous one is then found and loaded.
"""

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
