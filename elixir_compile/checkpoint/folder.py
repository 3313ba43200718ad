"""A folder that appears at its path whole or not at all.

```text
  .name.saving.1f0c   written here, synced, then renamed to `name`; locked by who writes, so a lock that is free is
                      of a writer that died, and the next save removes the folder
  .name.previous      what was at `name`, between the two renames that replace it, and until it is removed
  name                the checkpoint
```

A process that is killed between the two renames leaves no `name`: the previous one is then found and loaded.
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


def find(path: Path) -> Path:
    """Return the folder of the checkpoint at `path`; NotACheckpoint where there is none."""
    path = _resolved(path)
    previous = _previous(path)
    if not path.exists() and (previous / MANIFEST_FILE).is_file():
        return previous
    if not path.exists():
        raise NotACheckpoint(str(path), "there is nothing")
    if not (path / MANIFEST_FILE).is_file():
        raise NotACheckpoint(str(path), f"it has no {MANIFEST_FILE}")
    return path


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder, which takes the place of `path` at the end; on an error `path` stays what it was.

    Raises NotACheckpoint where `path` is something else, which is left alone.
    """
    path = _resolved(path)
    if path.exists() and not (path.is_dir() and ((path / MANIFEST_FILE).is_file() or not any(path.iterdir()))):
        raise NotACheckpoint(str(path), "it is something else, and is not overwritten")
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_stale(path)
    folder, lock = _locked_folder(path)
    try:
        yield folder
        sync_folder(folder)
        _replace(path, folder)
    finally:
        # Gone already where it was renamed.
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` last."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _resolved(path: Path) -> Path:
    # A link to a checkpoint stays: what it points to is replaced.
    return Path(os.path.realpath(path))


def _previous(path: Path) -> Path:
    return path.with_name(f".{path.name}.previous")


def _prefix(path: Path) -> str:
    return f".{path.name}.saving."


def _locked_folder(path: Path) -> tuple[Path, int]:
    while True:
        folder = path.with_name(_prefix(path) + secrets.token_hex(4))
        folder.mkdir()
        lock = os.open(folder, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():
            return folder, lock
        os.close(lock)  # another process took it for a stale one before it was locked


def _remove_stale(path: Path) -> None:
    for entry in list(os.scandir(path.parent)):
        if not entry.name.startswith(_prefix(path)):
            continue
        try:
            lock = os.open(entry.path, os.O_RDONLY)
        except FileNotFoundError:
            continue  # another save was first
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(entry.path, ignore_errors=True)
        except BlockingIOError:
            pass  # somebody is writing it
        finally:
            os.close(lock)


def _replace(path: Path, folder: Path) -> None:
    previous = _previous(path)
    if path.exists():
        shutil.rmtree(previous, ignore_errors=True)
        os.rename(path, previous)
    os.rename(folder, path)
    sync_folder(path.parent)
    shutil.rmtree(previous, ignore_errors=True)
