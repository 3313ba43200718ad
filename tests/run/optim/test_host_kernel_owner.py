"""What others could have written is not loaded: the host kernel is compiled anew, and it is said once why."""

import os
import stat
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from elixir_compile.base.errors import ElixirWarning
from elixir_compile.base.folders import OwnFolder, own_folder
from elixir_compile.optim.host import build
from elixir_compile.optim.host.build import BuildError, loaded

STRANGER = 54321


@dataclass(frozen=True)
class Cache:
    """A folder of libraries in which one answers wrongly, under the name of the right one."""

    folder: Path
    source: str
    """Of the right one."""

    @property
    def file(self) -> Path:
        """The library."""
        (file,) = self.folder.iterdir()
        return file

    def answer(self) -> int:
        """What the library says that is loaded: 42, or 666 if it is the planted one."""
        return loaded(self.source).answer()


@pytest.fixture(scope="module")
def planted() -> bytes:
    return build._compiled(build.build_command(), "int answer(void) { return 666; }")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, planted: bytes, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cache]:
    # Another source for each test: a library of the same name is loaded once per process.
    cache = Cache(tmp_path / "cache" / "host", f"/* {tmp_path} */ int answer(void) {{ return 42; }}")
    monkeypatch.setenv("ELIXIR_CACHE_DIR", str(tmp_path / "cache"))
    build._warn_once.cache_clear()
    with own_folder(cache.folder) as folder:
        folder.write(f"{build._key(build.build_command(), cache.source)}.so", planted)
    yield cache
    build._warn_once.cache_clear()


def let_group_write_the_folder(cache: Cache) -> None:
    cache.folder.chmod(0o770)


def let_all_write_the_folder(cache: Cache) -> None:
    cache.folder.chmod(0o1777)  # the sticky bit of /tmp keeps no stranger from planting a file first


def let_group_write_the_file(cache: Cache) -> None:
    cache.file.chmod(0o660)


def let_all_write_the_file(cache: Cache) -> None:
    cache.file.chmod(0o606)


def give_away_the_folder(cache: Cache) -> None:
    os.chown(cache.folder, STRANGER, -1)


def give_away_the_file(cache: Cache) -> None:
    os.chown(cache.file, STRANGER, -1)


def link_the_folder(cache: Cache) -> None:
    cache.folder.rename(cache.folder.with_name("elsewhere"))
    cache.folder.symlink_to(cache.folder.with_name("elsewhere"))


def link_the_file(cache: Cache) -> None:
    file = cache.file
    moved = file.rename(cache.folder.parent / "elsewhere.so")
    file.symlink_to(moved)


def put_a_pipe_there(cache: Cache) -> None:
    file = cache.file
    file.unlink()
    os.mkfifo(file, 0o600)


def test_a_file_of_the_same_user_is_loaded(cache: Cache) -> None:
    """The checks below find what they should only if this planted file would have been loaded."""
    before = cache.file.stat().st_mtime_ns
    assert cache.answer() == 666
    assert cache.file.stat().st_mtime_ns == before


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (let_group_write_the_folder, "host can be written by others (its mode is 0770)"),
        (let_all_write_the_folder, "host can be written by others (its mode is 1777)"),
        (let_group_write_the_file, ".so can be written by others (its mode is 0660)"),
        (let_all_write_the_file, ".so can be written by others (its mode is 0606)"),
        pytest.param(give_away_the_folder, f"host belongs to user {STRANGER}", marks=needs_root),
        pytest.param(give_away_the_file, f".so belongs to user {STRANGER}", marks=needs_root),
        (link_the_folder, "host is a symbolic link"),
        (link_the_file, ".so is a symbolic link"),
        (put_a_pipe_there, ".so is no file"),
    ],
)
def test_a_file_that_others_could_have_written_is_not_loaded(
    cache: Cache, spoil: Callable[[Cache], None], says: str
) -> None:
    spoil(cache)
    with pytest.warns(ElixirWarning) as said:
        assert cache.answer() == 42
    (warning,) = said
    assert says in str(warning.message)
    assert "ELIXIR_CACHE_DIR" in str(warning.message)


def test_a_file_of_another_user_is_not_loaded(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:
        for path in (cache.folder, cache.file):
            os.chown(path, STRANGER, -1)
    monkeypatch.setattr(os, "geteuid", lambda: STRANGER + 1)
    with pytest.warns(ElixirWarning, match="belongs to user"):
        assert cache.answer() == 42


def test_a_file_that_was_not_loaded_is_replaced(cache: Cache) -> None:
    let_all_write_the_file(cache)
    with pytest.warns(ElixirWarning, match="It is not loaded but compiled and written again"):
        cache.answer()
    assert stat.S_IMODE(cache.file.stat().st_mode) == 0o600
    assert cache.answer() == 42


def test_the_warning_about_the_cache_comes_once(cache: Cache) -> None:
    let_all_write_the_folder(cache)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert [cache.answer(), cache.answer()] == [42, 42]
    assert len(said) == 1


def test_nothing_is_written_where_others_can_write(cache: Cache) -> None:
    let_all_write_the_folder(cache)
    before = {path: path.stat().st_mtime_ns for path in cache.folder.iterdir()}
    with pytest.warns(ElixirWarning, match="compiled anew by each process"):
        cache.answer()
    assert {path: path.stat().st_mtime_ns for path in cache.folder.iterdir()} == before


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux")
def test_a_folder_replaced_after_the_check_is_not_used(
    cache: Cache, planted: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody who may rename the folder above waits for the check, then plants a folder of his own."""
    cache.file.unlink()
    usual = OwnFolder.path_of

    def swapped(opened: OwnFolder, name: str) -> str:
        cache.folder.rename(cache.folder.with_name("checked"))
        cache.folder.mkdir()
        (cache.folder / name).write_bytes(planted)
        return usual(opened, name)

    monkeypatch.setattr(OwnFolder, "path_of", swapped)
    assert cache.answer() == 42


def test_a_broken_compiler_is_named_as_before(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    let_all_write_the_folder(cache)
    monkeypatch.setenv("CC", "cc --no-such-flag")
    with pytest.warns(ElixirWarning), pytest.raises(BuildError, match="failed: "):
        cache.answer()
