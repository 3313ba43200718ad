"""A folder that belongs to one process, and the removal of those whose process died.

    disk_path/elixir-disk-<pid>-<random>.lock     locked for as long as the process lives: made first, removed last
    disk_path/elixir-disk-<pid>-<random>/         the files; of one of several ranks elixir-disk-rank<number>-<pid>-...

The kernel drops the lock however the process ends, `kill -9` included. A process id would not do: it is used again,
and the same number lives in many containers.
"""

import contextlib
import fcntl
import os
import re
import secrets
import shutil

from elixir_compile.errors import DiskFailed

_LOCK = ".lock"
_LOCK_NAME = re.compile(r"elixir-disk-(rank\d+-)?\d+-[0-9a-f]{8}\.lock")


class PrivateFolder:
    """A new, empty folder inside `parent`; folders that dead processes left there are removed first.

    Raises DiskFailed when `parent` is no folder that can be written. It is not made here: a disk that is not mounted
    would silently be another disk.
    """

    def __init__(self, parent: str, rank: int | None = None) -> None:
        """`rank` is the number of this process where several train one model."""
        self._pid = os.getpid()
        parent = os.path.abspath(parent)  # the process may change its directory before the folder is removed
        try:
            _remove_stale(parent)
            self._lock_fd, self._lock_path = _make_lock(parent, "" if rank is None else f"rank{rank}-")
            self.path = self._lock_path.removesuffix(_LOCK)
            os.mkdir(self.path, 0o700)
        except OSError as error:
            because = os.strerror(error.errno or 0)
            raise DiskFailed(parent, "new folder", because, error.errno or 0) from error

    def remove(self) -> None:
        """Remove the folder and what is in it. Does nothing the second time, and in a forked child."""
        if self._lock_fd < 0 or os.getpid() != self._pid:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):  # the user cleaned up by hand
            os.unlink(self._lock_path)
        os.close(self._lock_fd)
        self._lock_fd = -1


def _make_lock(parent: str, prefix: str) -> tuple[int, str]:
    while True:
        path = os.path.join(parent, f"elixir-disk-{prefix}{os.getpid()}-{secrets.token_hex(4)}{_LOCK}")
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_ours = os.fstat(fd).st_nlink > 0
        except BlockingIOError:
            is_ours = False
        except OSError:  # a filesystem without locks (Lustre can be one): nobody can take the folder for stale either
            is_ours = True
        if is_ours:
            return fd, path
        os.close(fd)  # another process that starts now took this lock for stale before we had it: try again


def _remove_stale(parent: str) -> None:
    for name in filter(_LOCK_NAME.fullmatch, os.listdir(parent)):
        path = os.path.join(parent, name)
        with contextlib.suppress(OSError), open(path, "r+b") as lock:  # gone, another user's, or in use: leave it
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path.removesuffix(_LOCK), ignore_errors=True)
            os.unlink(path)
