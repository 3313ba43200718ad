"""The folder of a checkpoint, held open while it is read, so that a save to the same path cannot change what is read.

A save replaces the folder and never writes into it. Files are opened relative to the open folder, so they are all of
one checkpoint whatever has taken its name, and a shared lock keeps the folder from being removed (see `folder`). If the
file system has no locks, or they do not reach the machine that saves, a file may be gone: `is_there` tells that from
damage.
"""

import fcntl
import os
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

from elixir_compile.checkpoint.errors import NotACheckpoint
from elixir_compile.checkpoint.folder import MANIFEST_FILE, previous_of, remove_left_over, resolved, unlock

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
