"""The host kernel is built once for each machine, by many ranks at once, and its absence is said once."""

import os
import stat
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from elixir_compile.base.errors import ElixirWarning
from elixir_compile.optim.host import build, sum_of_squares
from elixir_compile.optim.host.build import loaded_kernel
from elixir_compile.optim.host.passes import _kernel, kernel


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("ELIXIR_CACHE_DIR", str(tmp_path))
    _kernel.cache_clear()
    build._warn_once.cache_clear()
    yield tmp_path
    _kernel.cache_clear()


def libraries(cache: Path) -> list[Path]:
    """What is in the folder of compiled libraries."""
    return sorted((cache / "host").iterdir())


def test_the_kernel_is_built_once(monkeypatch: pytest.MonkeyPatch, empty_cache: Path) -> None:
    first = loaded_kernel()
    assert kernel() is kernel()
    (file,) = libraries(empty_cache)
    monkeypatch.setattr(build, "_compiled", lambda command, source: pytest.fail("built again"))
    assert loaded_kernel()._handle == first._handle
    assert libraries(empty_cache) == [file]
    assert (stat.S_IMODE(file.stat().st_mode), stat.S_IMODE(file.parent.stat().st_mode)) == (0o600, 0o700)


def test_each_input_of_the_build_changes_the_file_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Built without optimization: the names follow from the same inputs, in a fifth of the seconds."""
    monkeypatch.setattr(build, "_FLAGS", tuple(flag for flag in build._FLAGS if flag != "-O3"))
    loaded_kernel()
    with monkeypatch.context() as patch:
        patch.setenv("CC", "cc -g1")
        loaded_kernel()
    with monkeypatch.context() as patch:
        patch.setattr(build, "_cpu", lambda: b"another")
        loaded_kernel()
    for index, path in enumerate(build.SOURCES):
        edited = tmp_path / path.name
        edited.write_text(path.read_text(encoding="utf-8") + "\n" * (index + 1), encoding="utf-8")
        with monkeypatch.context() as patch:
            patch.setattr(build, "SOURCES", tuple(edited if each == path else each for each in build.SOURCES))
            loaded_kernel()
    assert len(libraries(tmp_path)) == 3 + len(build.SOURCES)


def test_many_processes_build_at_once(empty_cache: Path) -> None:
    """Each loads and calls what it got; none leaves a part of a file. `build.py` alone, for its package loads torch."""
    code = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('build', {build.__file__!r})\n"
        "build = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(build)\n"
        "sys.stdin.readline()\n"
        "assert 'torch' not in sys.modules and build.loaded_kernel().mixed_adamw\n"
    )
    command = [sys.executable, "-W", "error", "-c", code]
    ranks = [subprocess.Popen(command, stdin=subprocess.PIPE, cwd=Path(__file__).parents[3]) for _ in range(4)]
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write(b"go\n")
        rank.stdin.close()
    assert [rank.wait(60) for rank in ranks] == [0, 0, 0, 0]
    assert [path.suffix for path in (empty_cache / "host").iterdir()] == [".so"]


def warned() -> str:
    """What is said when the kernel is asked for twice and a pass runs."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert kernel() is None
        assert kernel() is None
        assert sum_of_squares(torch.ones(3).bfloat16()) == 3.0
    assert [warning.category for warning in said] == [ElixirWarning]
    return str(said[0].message)


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    assert "no C compiler: cc, gcc or clang is not installed" in warned()


def test_the_compiler_named_by_cc_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler -O2")
    assert "no C compiler: CC=no-such-compiler -O2 is not installed" in warned()


def test_a_broken_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", "cc --no-such-flag")
    assert "failed: " in warned()
    assert list((tmp_path / "host").iterdir()) == []


def test_a_compiled_library_that_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "cc -c")  # an object file, no library
    assert "does not load" in warned()


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ELIXIR_CACHE_DIR", str(tmp_path / "file" / "below"))
    assert "the cache cannot be written" in warned()


def test_a_damaged_file_is_built_again(empty_cache: Path) -> None:
    loaded_kernel()
    (path,) = libraries(empty_cache)
    whole = path.stat().st_size
    for size in (1000, 0):
        damaged = path.with_suffix(".damaged")
        damaged.write_bytes(path.read_bytes()[:size])
        damaged.replace(path)  # and not in place, where the library is loaded
        loaded_kernel()
        assert libraries(empty_cache) == [path]
        assert path.stat().st_size == whole
    assert kernel() is not None


def test_the_loops_are_vectorised(tmp_path: Path) -> None:
    """The square roots of the update are of vectors; single ones are for the last few elements of a tile."""
    command = [*build.build_command(), "-S", "-o", str(tmp_path / "k.s")]
    given = {"input": build.kernel_source(), "text": True, "env": {**os.environ, "LC_ALL": "C"}}
    subprocess.run([*command, "-x", "c", "-"], check=True, **given)
    text = (tmp_path / "k.s").read_text(encoding="utf-8")
    assert any(name in text for name in ("sqrtps", "fsqrt\tv", "fsqrt v", "fsqrt\tz"))
