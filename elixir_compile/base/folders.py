"""The folder of caches, and folders of compiled code, which are used only if no other user can have written to them."""

import contextlib
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from elixir_compile.base.errors import ElixirError

Value = TypeVar("Value")


def cache_dir() -> Path:
    """Return the folder of all caches, which may not exist yet.

    `ELIXIR_CACHE_DIR` if it is set, else `elixir_compile` in `XDG_CACHE_HOME`, else in `~/.cache`.
    """
    chosen = os.environ.get("ELIXIR_CACHE_DIR")
    if chosen:
        return Path(chosen)
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "elixir_compile"


def write_cached(path: Path, text: str) -> None:
    """Write `text` to `path` as a whole or not at all, so that another process never reads half of it.

    Raises OSError if the folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text.encode(), mode=0o600)


def write_whole(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Write `content` to `path` as a whole or not at all; a link at `path` is replaced and not followed.

    `mode` are the permissions of the file, less those that the process withholds from new files. Raises OSError if the
    folder cannot be written.
    """
    part = path.with_name(f"{os.getpid()}.{os.urandom(8).hex()}.part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.replace(part, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(part)
        raise


def read_cached(path: Path, parse: Callable[[str], Value], refuse: Callable[[Path, Exception], None]) -> Value | None:
    """Return `parse` of the text of the file `path`; None if there is no such file.

    If the file cannot be read, or `parse` raises an ElixirError, `refuse` is called with the error, and the result is
    None too.
    """
    try:
        return parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, ElixirError) as error:
        refuse(path, error)
        return None


def drop_oldest(folder: Path, most: int) -> None:
    """Delete the JSON files of `folder` except for the `most` files used last.

    Another process may delete files of `folder` at the same time. Raises OSError if the folder cannot be written.
    """
    aged: list[tuple[float, str]] = []
    for path in folder.glob("*.json"):
        with suppress(FileNotFoundError):
            aged.append((path.stat().st_mtime, path.name))
    for _, name in sorted(aged)[:-most]:
        (folder / name).unlink(missing_ok=True)


_OPENED_FILES = Path("/proc/self/fd")
"""The folder in which Linux lists the open files of a process by descriptor."""


class WrittenByOthersError(Exception):
    """The file or folder `path` may have been written by another user than this one and root; `because` says why."""

    def __init__(self, path: Path, because: str) -> None:
        super().__init__(f"{path} {because}")


class OwnFolder:
    """An open folder of this user or root, to which no other user can write."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor

    def path_of(self, name: str) -> str:
        """Return a path of the file `name`, valid while the folder is open."""
        opened = _OPENED_FILES / str(self._descriptor)
        # On other systems than Linux the path is resolved again: it is only as safe as its parent folders.
        return str((opened if opened.exists() else self._path) / name)

    def read(self, name: str) -> bytes | None:
        """Return the content of the file `name`, or None if there is no such file.

        Raises WrittenByOthersError if the file is a symbolic link, belongs to another user or can be written by others.
        """
        path = self._path / name
        try:
            # O_NONBLOCK: if `name` is a pipe, opening it must not wait for a writer.
            descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=self._descriptor)
        except FileNotFoundError:
            return None
        except OSError:
            _refuse_link(name, path, self._descriptor)
            raise
        with os.fdopen(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise WrittenByOthersError(path, "is no file")
            _require_own(path, found)
            return file.read()

    def write(self, name: str, content: bytes) -> None:
        """Write `content` to the file `name` as a whole or not at all; only this user can read or write it."""
        part = f"{name}.{os.getpid()}.{os.urandom(8).hex()}.part"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        descriptor = os.open(part, flags, 0o600, dir_fd=self._descriptor)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
            os.rename(part, name, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(part, dir_fd=self._descriptor)
            raise


@contextmanager
def own_folder(path: Path) -> Iterator[OwnFolder]:
    """Open the folder at `path`, after making it if needed, and close it at the end.

    Raises WrittenByOthersError if it is a symbolic link, belongs to another user or can be written by others, and
    OSError if it cannot be made or opened.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        _refuse_link(path, path)
        raise
    try:
        _require_own(path, os.fstat(descriptor))
        yield OwnFolder(path, descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def private_folder() -> Iterator[OwnFolder]:
    """Open a new folder for temporary files that only this user can enter, and remove it at the end."""
    with tempfile.TemporaryDirectory(prefix="elixir-") as path, own_folder(Path(path)) as folder:
        yield folder


def _refuse_link(name: "str | Path", path: Path, folder: int | None = None) -> None:
    if stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
        raise WrittenByOthersError(path, "is a symbolic link") from None


def _require_own(path: Path, found: os.stat_result) -> None:
    if found.st_uid not in (0, os.geteuid()):
        raise WrittenByOthersError(path, f"belongs to user {found.st_uid}, not to user {os.geteuid()} or root")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise WrittenByOthersError(path, f"can be written by others (its mode is {stat.S_IMODE(found.st_mode):04o})")
