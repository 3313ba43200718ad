"""The host kernel: built once for each machine, never loaded from others, and its threads."""

import gc
import logging
import os
import stat
import statistics
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elixir_compile.base import process as control_groups
from elixir_compile.base.errors import ElixirWarning
from elixir_compile.base.folders import OwnFolder, own_folder
from elixir_compile.base.process import allowed_cores, num_usable_cores
from elixir_compile.compat.platforms.host import cores_of_node, num_host_threads
from elixir_compile.ir import Update
from elixir_compile.optim import update as updates
from elixir_compile.optim.adamw_rule import AdamWRule
from elixir_compile.optim.host import HostThreads, build, host_threads_for, mixed_adamw, sum_of_squares
from elixir_compile.optim.host.build import BuildError, loaded, loaded_kernel
from elixir_compile.optim.host.kernel import GRAIN, parts
from elixir_compile.optim.host.passes import _kernel, kernel
from elixir_compile.runtime.updates import UpdateLine
from tests.run.updating import hybrid_run, ladder, rows

# ----------------------------------------------------------------------------------------------------------------------
# The host kernel is built once for each machine, by many ranks at once, and its absence is said once.


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("ELIXIR_CACHE_DIR", str(tmp_path))
    _kernel.cache_clear()
    build._warn_once.cache_clear()
    yield tmp_path
    _kernel.cache_clear()


@pytest.fixture
def unoptimized(monkeypatch: pytest.MonkeyPatch) -> None:
    """Build without optimization, in a fifth of the seconds, where no test asks what is built to be fast."""
    monkeypatch.setattr(build, "_FLAGS", tuple(flag for flag in build._FLAGS if flag != "-O3"))


def libraries(cache: Path) -> list[Path]:
    """What is in the folder of compiled libraries."""
    return sorted((cache / "host").iterdir())


@pytest.mark.usefixtures("empty_cache", "unoptimized")
def test_the_kernel_is_built_once(monkeypatch: pytest.MonkeyPatch, empty_cache: Path) -> None:
    first = loaded_kernel()
    assert kernel() is kernel()
    (file,) = libraries(empty_cache)
    monkeypatch.setattr(build, "_compiled", lambda command, source: pytest.fail("built again"))
    assert loaded_kernel()._handle == first._handle
    assert libraries(empty_cache) == [file]
    assert (stat.S_IMODE(file.stat().st_mode), stat.S_IMODE(file.parent.stat().st_mode)) == (0o600, 0o700)


@pytest.mark.usefixtures("empty_cache", "unoptimized")
def test_each_input_of_the_build_changes_the_file_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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


@pytest.mark.usefixtures("empty_cache")
def test_many_processes_build_at_once(empty_cache: Path) -> None:
    """Each loads and calls what it got; none leaves a part of a file. `build.py` alone, for its package loads torch."""
    code = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('build', {build.__file__!r})\n"
        "build = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(build)\n"
        "build._FLAGS = tuple(flag for flag in build._FLAGS if flag != '-O3')\n"  # as `unoptimized`
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


@pytest.mark.usefixtures("empty_cache")
def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    assert "no C compiler: cc, gcc or clang is not installed" in warned()


@pytest.mark.usefixtures("empty_cache")
def test_the_compiler_named_by_cc_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler -O2")
    assert "no C compiler: CC=no-such-compiler -O2 is not installed" in warned()


@pytest.mark.usefixtures("empty_cache")
def test_a_broken_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", "cc --no-such-flag")
    assert "failed: " in warned()
    assert list((tmp_path / "host").iterdir()) == []


@pytest.mark.usefixtures("empty_cache")
def test_a_compiled_library_that_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "cc -c")  # an object file, no library
    assert "does not load" in warned()


@pytest.mark.usefixtures("empty_cache")
def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ELIXIR_CACHE_DIR", str(tmp_path / "file" / "below"))
    assert "the cache cannot be written" in warned()


@pytest.mark.usefixtures("empty_cache", "unoptimized")
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


@pytest.mark.usefixtures("empty_cache")
def test_the_loops_are_vectorised(tmp_path: Path) -> None:
    """The square roots of the update are of vectors; single ones are for the last few elements of a tile."""
    command = [*build.build_command(), "-S", "-o", str(tmp_path / "k.s")]
    given = {"input": build.kernel_source(), "text": True, "env": {**os.environ, "LC_ALL": "C"}}
    subprocess.run([*command, "-x", "c", "-"], check=True, **given)
    text = (tmp_path / "k.s").read_text(encoding="utf-8")
    assert any(name in text for name in ("sqrtps", "fsqrt\tv", "fsqrt v", "fsqrt\tz"))


# ----------------------------------------------------------------------------------------------------------------------
# What others could have written is not loaded: the host kernel is compiled anew, and it is said once why.


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


@pytest.fixture
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


@pytest.mark.usefixtures("cache")
def test_a_file_of_the_same_user_is_loaded(cache: Cache) -> None:
    """The checks below find what they should only if this planted file would have been loaded."""
    before = cache.file.stat().st_mtime_ns
    assert cache.answer() == 666
    assert cache.file.stat().st_mtime_ns == before


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


@pytest.mark.usefixtures("cache")
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


@pytest.mark.usefixtures("cache")
def test_a_file_of_another_user_is_not_loaded(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:
        for path in (cache.folder, cache.file):
            os.chown(path, STRANGER, -1)
    monkeypatch.setattr(os, "geteuid", lambda: STRANGER + 1)
    with pytest.warns(ElixirWarning, match="belongs to user"):
        assert cache.answer() == 42


@pytest.mark.usefixtures("cache")
def test_a_file_that_was_not_loaded_is_replaced(cache: Cache) -> None:
    let_all_write_the_file(cache)
    with pytest.warns(ElixirWarning, match="It is not loaded but compiled and written again"):
        cache.answer()
    assert stat.S_IMODE(cache.file.stat().st_mode) == 0o600
    assert cache.answer() == 42


@pytest.mark.usefixtures("cache")
def test_the_warning_about_the_cache_comes_once(cache: Cache) -> None:
    let_all_write_the_folder(cache)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert [cache.answer(), cache.answer()] == [42, 42]
    assert len(said) == 1


@pytest.mark.usefixtures("cache")
def test_nothing_is_written_where_others_can_write(cache: Cache) -> None:
    let_all_write_the_folder(cache)
    before = {path: path.stat().st_mtime_ns for path in cache.folder.iterdir()}
    with pytest.warns(ElixirWarning, match="compiled anew by each process"):
        cache.answer()
    assert {path: path.stat().st_mtime_ns for path in cache.folder.iterdir()} == before


@pytest.mark.usefixtures("cache")
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


@pytest.mark.usefixtures("cache")
def test_a_broken_compiler_is_named_as_before(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    let_all_write_the_folder(cache)
    monkeypatch.setenv("CC", "cc --no-such-flag")
    with pytest.warns(ElixirWarning), pytest.raises(BuildError, match="failed: "):
        cache.answer()


# ----------------------------------------------------------------------------------------------------------------------
# The threads of a host pass: how many, where, and that the thread that launches goes on beside them.


SCALARS = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}


@given(st.integers(0, 20 * GRAIN), st.integers(1, 9))
def test_parts_cover_all_in_order_and_evenly(numel: int, num_threads: int) -> None:
    spans = parts(numel, num_threads)
    assert len(spans) <= num_threads
    assert [start for start, _ in spans] == ([0] + [stop for _, stop in spans[:-1]] if numel else [])
    assert numel == (spans[-1][1] if spans else 0)
    assert all(start < stop and start % GRAIN == 0 for start, stop in spans)
    lengths = [stop - start for start, stop in spans]
    assert not lengths or max(lengths) - min(lengths) <= 2 * GRAIN


@pytest.mark.parametrize(
    ("num_cores", "num_ranks", "most", "wanted"),
    [(1, 1, 1, 1), (2, 1, 2, 1), (16, 1, 16, 15), (64, 4, 64, 15), (128, 1, 64, 64), (4, 8, 4, 1)],
)
def test_one_core_is_left_for_the_launcher(num_cores: int, num_ranks: int, most: int, wanted: int) -> None:
    assert num_host_threads(num_cores, num_ranks, most) == wanted


def test_the_cores_beside_a_device(tmp_path: Path) -> None:
    device = tmp_path / "bus/pci/devices/0000:c1:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    node = tmp_path / "devices/system/node/node1"
    node.mkdir(parents=True)
    (node / "cpulist").write_text("4-6,12,14-15\n")
    assert cores_of_node("0000:c1:00.0", tmp_path) == {4, 5, 6, 12, 14, 15}
    (device / "numa_node").write_text("-1\n")
    assert cores_of_node("0000:c1:00.0", tmp_path) == set()
    assert cores_of_node("0000:c2:00.0", tmp_path) == set()


def test_the_number_of_threads_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    host_threads_for.cache_clear()
    num_cores = num_usable_cores()
    with caplog.at_level(logging.INFO, "elixir_compile"):
        threads = host_threads_for()
        assert host_threads_for() is threads
    assert threads.num_threads == max(num_cores - 1, 1)
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"{threads.num_threads} threads of {num_cores} cores for 1 local ranks" in line
    host_threads_for.cache_clear()


def test_host_threads_respect_the_cpu_quota(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    memberships = tmp_path / "cgroup"
    memberships.write_text("0::/\n")
    (tmp_path / "cpu.max").write_text("450000 100000\n")
    monkeypatch.setattr(control_groups, "MEMBERSHIPS", memberships)
    monkeypatch.setattr(control_groups, "GROUPS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)))
    host_threads_for.cache_clear()
    with caplog.at_level(logging.INFO, "elixir_compile"):
        assert host_threads_for().num_threads == 3
    assert "3 threads of 4 cores (a CPU quota: there are 64) for 1 local ranks" in caplog.text
    host_threads_for.cache_clear()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_only_host_threads_are_bound_to_cores() -> None:
    before = os.sched_getaffinity(0)
    core = min(before)
    threads = HostThreads(2, [core])
    found = threads.run(2 * GRAIN, lambda start, stop: (threading.get_ident(), os.sched_getaffinity(0)))
    assert [cores for _, cores in found] == [{core}, {core}]
    assert threading.get_ident() not in [thread for thread, _ in found]
    assert os.sched_getaffinity(0) == before


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_the_update_thread_is_bound_to_the_same_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    before, main = os.sched_getaffinity(0), threading.get_ident()
    core = max(before)
    found: list[tuple[bool, set[int], set[int]]] = []
    update = AdamWRule.update

    def watched(*args: Any) -> None:
        started: list[set[int]] = []
        thread = threading.Thread(target=lambda: started.append(os.sched_getaffinity(0)))
        thread.start()
        thread.join()
        found.append((threading.get_ident() == main, os.sched_getaffinity(0), *started))
        update(*args)

    monkeypatch.setattr(AdamWRule, "update", watched)
    monkeypatch.setattr(updates, "host_threads_for", lambda device: HostThreads(1, [core]))
    batches = rows(2)
    try:
        with hybrid_run(ladder(), batches[0], home="host", update=Update.ACROSS_STEPS) as run:
            run.train(batches)
            run.optimizer.wait()
    finally:  # there is one worker for all tests
        UpdateLine().queue(lambda: os.sched_setaffinity(0, before), "unbind").wait()
    assert found
    assert all(one == (False, {core}, {core}) for one in found)
    assert os.sched_getaffinity(0) == before


def test_all_parts_end_before_one_raises() -> None:
    ended = []

    def part(start: int, stop: int) -> int:
        if start == 0:
            raise RuntimeError("the first part")
        time.sleep(0.02)
        ended.append(start)
        return start

    threads = HostThreads(3)
    with pytest.raises(RuntimeError, match="the first part"):
        threads.run(3 * GRAIN, part)
    assert sorted(ended) == [GRAIN, 2 * GRAIN]
    assert threads.run(3 * GRAIN, lambda start, stop: stop) == [GRAIN, 2 * GRAIN, 3 * GRAIN]


def test_two_passes_at_once_share_the_host_threads() -> None:
    threads = HostThreads(2)
    found: list[list[int]] = []
    callers = [
        threading.Thread(target=lambda: found.append(threads.run(2 * GRAIN, lambda start, stop: stop)))
        for _ in range(8)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert found == [[GRAIN, 2 * GRAIN]] * 8


def test_threads_end_when_host_threads_are_collected() -> None:
    before = set(threading.enumerate())
    threads = HostThreads(3)
    threads.run(3 * GRAIN, lambda start, stop: None)
    own = set(threading.enumerate()) - before  # others of the process may end meanwhile
    assert len(own) == 3
    del threads
    gc.collect()
    for thread in own:
        thread.join(2.0)
    assert not any(thread.is_alive() for thread in own)


def test_fork_and_exit_with_host_threads() -> None:
    code = (
        "import atexit, os\n"
        "from elixir_compile.optim.host import HostThreads\n"
        "from elixir_compile.optim.host.kernel import GRAIN\n"
        "threads = HostThreads(2)\n"
        "go = lambda: threads.run(2 * GRAIN, lambda start, stop: stop)\n"
        "atexit.register(go)\n"
        "assert go() == [GRAIN, 2 * GRAIN]\n"
        "child = os.fork()\n"
        "assert go() == [GRAIN, 2 * GRAIN]\n"
        "if child:\n"
        "    assert os.waitpid(child, 0)[1] == 0\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3], timeout=60, check=False)
    assert done.returncode == 0


def _large(numel: int) -> list[torch.Tensor]:
    flat = [torch.zeros(numel) for _ in range(3)]
    return [*flat, torch.ones(numel, dtype=torch.bfloat16), torch.zeros(numel, dtype=torch.bfloat16)]


def test_the_caller_goes_on_while_a_pass_runs() -> None:
    """With the GIL held for the pass, nothing at all would run between its begin and its end."""
    tensors = _large(8 << 20)
    mixed_adamw(*tensors, 1, **SCALARS)
    spans: list[tuple[float, float]] = []

    def passes() -> None:
        for step in range(2, 6):
            began_s = time.perf_counter()
            mixed_adamw(*tensors, step, threads=HostThreads(1), **SCALARS)
            spans.append((began_s, time.perf_counter()))

    worker = threading.Thread(target=passes)
    worker.start()
    ticks = []
    small = torch.zeros(64)
    while worker.is_alive():
        small.add_(1.0)
        ticks.append(time.perf_counter())
    worker.join()
    inside = [sum(began < tick < ended for tick in ticks) for began, ended in spans]
    assert statistics.median(inside) > 100


def _waited_for_a_core_s() -> float:
    """Return for how long this thread could run and had no core, as other processes had them; 0 where Linux does not
    say."""
    said = Path("/proc/thread-self/schedstat")
    return int(said.read_text().split()[1]) / 1e9 if said.exists() else 0.0


@pytest.mark.slow
@pytest.mark.skipif(len(allowed_cores()) < 2, reason="needs two cores")
def test_the_caller_keeps_half_of_its_rate() -> None:
    """The pass has one thread and the caller the other core, unless another process has it: the rate is that of the
    seconds in which the caller ran or waited for the pass. Windows with and without a pass come in turn, so that both
    see the same neighbours in caches and memory."""
    tensors = _large(32 << 20)
    small = torch.zeros(64)
    stop, go = threading.Event(), threading.Event()

    def passes() -> None:
        step = 1
        while not stop.is_set():
            if go.wait(0.01):
                mixed_adamw(*tensors, step, threads=HostThreads(1), **SCALARS)
                step += 1

    def rate_per_s() -> float:
        began_s, waited_s, num = time.perf_counter(), _waited_for_a_core_s(), 0
        while time.perf_counter() - began_s < 0.15:
            small.add_(1.0)
            num += 1
        return num / (time.perf_counter() - began_s - (_waited_for_a_core_s() - waited_s))

    worker = threading.Thread(target=passes)
    worker.start()
    ratios = []
    for _ in range(9):
        go.clear()
        time.sleep(0.1)
        alone = rate_per_s()
        go.set()
        time.sleep(0.02)
        ratios.append(rate_per_s() / alone)
    stop.set()
    go.set()
    worker.join()
    assert statistics.median(ratios) >= 0.5
