"""State on disk: what is written is read back, in order, and what goes wrong is told and never hangs."""

import contextlib
import errno
import fcntl
import gc
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elixir_compile.base.errors import DiskCorrupted, DiskFailed, DiskFull
from elixir_compile.runtime import disk_file, disk_store
from elixir_compile.runtime.bucket import Slab, live_slab_bytes
from elixir_compile.runtime.disk_store import DiskRegion, DiskStore
from tests.run.processes import program, start_program

PAGE = 4096
BLOCK = 2 * PAGE
"""Blocks of two pages in most tests, so that a few pages are many blocks."""


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    """Nothing here compiles, and resetting the compiler before each test would take most of the time."""
    torch.manual_seed(0)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (disk_store, disk_file):
        monkeypatch.setattr(module, "DISK_BLOCK_BYTES", BLOCK)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    with_closing = DiskStore(tmp_path)
    yield with_closing
    with_closing.close()


def buffer(nbytes: int, fill: int | None = None) -> torch.Tensor:
    """Aligned memory, of random bytes or of one value."""
    tensor = Slab(nbytes, pin=False).tensor(torch.uint8, (nbytes,), 0)
    return tensor.random_(0, 256) if fill is None else tensor.fill_(fill)


def contents(region: DiskRegion) -> torch.Tensor:
    found = buffer(region.nbytes, fill=0xAA)
    region.read_into(found).wait()
    return found


def fail_calls(
    monkeypatch: pytest.MonkeyPatch, name: str, code: int, is_bad: Callable[[int], bool] = lambda _: True
) -> None:
    """Let `os.preadv` or `os.pwritev` fail at the offsets that `is_bad` picks."""
    real = getattr(os, name)

    def call(fd: int, parts: list[memoryview], offset: int) -> int:
        if is_bad(offset):
            raise OSError(code, os.strerror(code))
        return real(fd, parts, offset)

    monkeypatch.setattr(os, name, call)


START = """
import os, signal, sys, threading, time
from elixir_compile.base.errors import DiskFailed, DiskFull
from elixir_compile.runtime.disk_store import DiskStore, staging_buffers
folder = sys.argv[1]
buffer = staging_buffers(1, 1 << 20)[0].fill_(7)
"""
"""The beginning of each program below, whose argument is the folder of its store."""


def run_script(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `script` in an interpreter of its own, which ends with its exit handlers, as no fork does."""
    command = [sys.executable, "-c", START + textwrap.dedent(script), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.usefixtures("small_blocks")
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(nbytes=st.integers(0, 6 * BLOCK) | st.sampled_from([1, PAGE - 1, PAGE, PAGE + 1, BLOCK, 3 * BLOCK]))
def test_written_bytes_are_read_back(store: DiskStore, nbytes: int) -> None:
    region = store.allocate("b0.exp_avg", nbytes)
    assert not contents(region).any()
    written = buffer(nbytes)
    region.write_from(written).wait()
    assert torch.equal(contents(region), written)
    assert os.path.getsize(region.path) == -(-nbytes // PAGE) * PAGE


def test_blocks_of_the_real_size_are_read_back(store: DiskStore) -> None:
    nbytes = 2 * disk_file.DISK_BLOCK_BYTES + PAGE + 5
    region = store.allocate("b0", nbytes)
    written = buffer(nbytes)
    region.write_from(written).wait()
    assert torch.equal(contents(region), written)


def test_a_read_ends_where_its_buffer_ends(store: DiskStore) -> None:
    region = store.allocate("b0", PAGE + 3)
    region.write_from(buffer(PAGE + 3, fill=1)).wait()
    larger = buffer(2 * PAGE, fill=9)
    region.read_into(larger[: PAGE + 3]).wait()
    assert larger[: PAGE + 3].eq(1).all()
    assert larger[PAGE + 3 :].eq(9).all()


@pytest.mark.usefixtures("small_blocks")
def test_pieces_of_a_region_are_independent(store: DiskStore) -> None:
    region = store.allocate("b0", 3 * BLOCK + 10)
    whole = buffer(3 * BLOCK + 10)
    for start, end in ((2 * BLOCK, 3 * BLOCK + 10), (0, 2 * BLOCK)):
        piece = buffer(end - start)
        piece.copy_(whole[start:end])
        region.write_from(piece, start).wait()
    found = buffer(BLOCK)
    region.read_into(found, BLOCK).wait()
    assert torch.equal(found, whole[BLOCK : 2 * BLOCK])
    assert torch.equal(contents(region), whole)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("seed", range(12))
def test_a_read_sees_earlier_writes_only(store: DiskStore, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Calls that take a random time and move a random number of pages change nothing."""
    chance = random.Random(seed)
    for name in ("preadv", "pwritev"):
        monkeypatch.setattr(os, name, late_and_short(getattr(os, name), chance))
    sizes = (5 * BLOCK + 100, 3 * BLOCK)
    regions = [store.allocate(f"b{index}", nbytes) for index, nbytes in enumerate(sizes)]
    expected = [torch.zeros(nbytes, dtype=torch.uint8) for nbytes in sizes]
    reads, writes = [], []
    for _ in range(40):
        which = chance.randrange(2)
        start = chance.randrange(0, sizes[which], BLOCK)
        end = min(start + chance.randint(1, 3) * BLOCK, sizes[which])
        piece = buffer(end - start)
        if chance.random() < 0.5:
            expected[which][start:end] = piece
            writes.append(regions[which].write_from(piece, start))
        else:
            reads.append((regions[which].read_into(piece, start), piece, expected[which][start:end].clone()))
    for transfer, piece, wanted in reads:
        transfer.wait()
        assert torch.equal(piece, wanted)
    for transfer in writes:
        transfer.wait()
    assert [torch.equal(contents(region), wanted) for region, wanted in zip(regions, expected, strict=True)] == [
        True
    ] * 2


def late_and_short(real: Callable[..., int], chance: random.Random) -> Callable[..., int]:
    def call(fd: int, parts: list[memoryview], offset: int) -> int:
        time.sleep(chance.random() * 2e-3)
        return real(fd, [parts[0][: chance.choice((PAGE, 2 * PAGE))]], offset)

    return call


def test_short_transfers_inside_a_page_are_completed(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("preadv", "pwritev"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda fd, parts, offset, real=real: real(fd, [parts[0][:1000]], offset))
    region = store.allocate("b0", PAGE + 700)
    written = buffer(PAGE + 700)
    region.write_from(written).wait()
    assert torch.equal(contents(region), written)


def test_a_file_that_lost_its_end_is_told(store: DiskStore) -> None:
    region = store.allocate("b0", 3 * PAGE)
    os.truncate(region.path, PAGE)
    with pytest.raises(DiskFailed, match=f"ends at byte {PAGE}, expected {3 * PAGE}"):
        contents(region)
    with pytest.raises(DiskFailed, match=f"write failed .* ends at byte {PAGE}, .* truncated it"):
        region.write_from(buffer(3 * PAGE)).wait()
    assert os.path.getsize(region.path) == PAGE


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_refused_and_leaves_nothing(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def full(*_: int) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(DiskFull) as caught:
            store.allocate("b7.exp_avg_sq", 3 * PAGE)
    assert (caught.value.label, caught.value.needed_bytes) == ("b7.exp_avg_sq", 3 * PAGE)
    assert caught.value.because == os.strerror(code)
    assert os.listdir(store.path) == []
    assert not contents(store.allocate("b7.exp_avg_sq", 3 * PAGE)).any()


def test_too_large_a_region_is_refused_before_allocation(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: pytest.fail("space was taken"))
    with pytest.raises(DiskFull, match=r"needs 1024\.0 TiB on disk") as caught:
        store.allocate("b0", 1 << 50)
    assert 0 < caught.value.free_bytes < 1 << 50
    assert caught.value.errno == errno.ENOSPC


def test_a_limit_of_the_process_is_a_full_disk(tmp_path: Path) -> None:
    script = """
        import resource
        store = DiskStore(folder)
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
        store.allocate("small", 65536).write_from(buffer[:65536]).wait()
        try:
            store.allocate("large", 65537)
        except DiskFull as error:
            print(error.because, len(os.listdir(store.path)))
        """
    said = program(START + textwrap.dedent(script), tmp_path, folder=tmp_path)
    assert said == f"{os.strerror(errno.EFBIG)} 1\n"


@pytest.mark.usefixtures("small_blocks")
def test_a_write_error_surfaces_and_the_region_stays_unusable(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    region, other = store.allocate("b0", 4 * BLOCK), store.allocate("b1", BLOCK)
    gate = threading.Event()

    def is_bad(offset: int) -> bool:
        gate.wait(30)
        return offset == 2 * BLOCK

    with monkeypatch.context() as patch:
        fail_calls(patch, "pwritev", errno.EIO, is_bad)
        written = buffer(4 * BLOCK, fill=5)
        failing = region.write_from(written)
        behind = [region.read_into(buffer(4 * BLOCK)), region.write_from(buffer(4 * BLOCK))]
        gate.set()
        for _ in range(2):
            with pytest.raises(DiskFailed, match=r"write failed at .*Input/output error") as caught:
                failing.wait()
        for transfer in behind:
            with pytest.raises(DiskFailed, match="an earlier write failed: Input/output error"):
                transfer.wait()
    assert (caught.value.path, caught.value.operation, caught.value.errno) == (region.path, "write", errno.EIO)
    assert written.eq(5).all()
    for begin in (region.read_into, region.write_from):
        with pytest.raises(DiskFailed, match="an earlier write failed: Input/output error"):
            begin(buffer(4 * BLOCK))
    assert not contents(other).any()


def test_a_read_error_surfaces_and_can_be_tried_again(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    region = store.allocate("b0", PAGE)
    with monkeypatch.context() as patch:
        fail_calls(patch, "preadv", errno.EIO)
        with pytest.raises(DiskFailed, match="read failed"):
            contents(region)
    assert not contents(region).any()


def test_an_error_other_than_oserror_is_raised_too(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    region = store.allocate("b0", PAGE)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", lambda *_: 1 // 0)
        transfer = region.write_from(buffer(PAGE))
        with pytest.raises(ZeroDivisionError):
            transfer.wait()
    with pytest.raises(DiskFailed, match="ZeroDivisionError"):
        contents(region)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("at", [0, BLOCK, 3 * BLOCK + 4])
def test_a_flipped_byte_is_found(tmp_path: Path, at: int) -> None:
    store = DiskStore(tmp_path, check=True)
    region = store.allocate("b0", 3 * BLOCK + 5)
    assert not contents(region).any()
    written = buffer(3 * BLOCK + 5)
    region.write_from(written).wait()
    assert torch.equal(contents(region), written)
    with open(region.path, "r+b") as file:
        file.seek(at)
        file.write(bytes([int(written[at]) ^ 1]))
    with pytest.raises(DiskCorrupted) as caught:
        contents(region)
    assert (caught.value.path, caught.value.block) == (region.path, at // BLOCK)
    region.write_from(written).wait()
    assert torch.equal(contents(region), written)
    store.close()


def test_without_o_direct_the_page_cache_is_used(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    real = fcntl.fcntl

    def refuse(fd: int, command: int, flags: int = 0) -> int:
        if command == fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, command, flags)

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    region = store.allocate("b0", PAGE + 1)
    assert not region.is_direct
    written = buffer(PAGE + 1)
    region.write_from(written).wait()
    assert torch.equal(contents(region), written)


@pytest.mark.usefixtures("small_blocks")
def test_o_direct_refused_later_falls_back_to_the_page_cache(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """All four workers are refused at the same moment, and each tries again."""
    region = store.allocate("b0", 4 * BLOCK)
    if not region.is_direct:
        pytest.skip("the filesystem of the temporary folder has no O_DIRECT")
    real, together = os.pwritev, threading.Barrier(4, timeout=30)

    def refuse(fd: int, parts: list[memoryview], offset: int) -> int:
        if region.is_direct:
            together.wait()
            raise OSError(errno.EINVAL, "Invalid argument")
        assert not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT
        return real(fd, parts, offset)

    monkeypatch.setattr(os, "pwritev", refuse)
    written = buffer(4 * BLOCK)
    region.write_from(written).wait()
    assert not region.is_direct
    assert torch.equal(contents(region), written)


def test_einval_without_o_direct_is_an_error(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_calls(monkeypatch, "pwritev", errno.EINVAL)
    with pytest.raises(DiskFailed, match="Invalid argument"):
        store.allocate("b0", PAGE).write_from(buffer(PAGE)).wait()


def test_resident_memory_is_that_of_the_pieces(store: DiskStore) -> None:
    piece_bytes, num_pieces = 8 << 20, 25
    region = store.allocate("b0", num_pieces * piece_bytes)
    piece = buffer(piece_bytes)
    before_bytes = resident_bytes()
    for index in range(num_pieces):
        region.write_from(piece.fill_(index), index * piece_bytes).wait()
    for index in range(num_pieces):
        region.read_into(piece, index * piece_bytes).wait()
        assert piece[0] == piece[-1] == index
    assert resident_bytes() - before_bytes < 2 * piece_bytes


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_a_buffer_is_free_when_its_transfer_is_done(store: DiskStore) -> None:
    gc.collect()
    before_bytes = live_slab_bytes()
    transfer = store.allocate("b0", PAGE).write_from(buffer(PAGE))
    transfer.wait()
    deadline_s = time.monotonic() + 5  # the worker lets go of its block a moment after it woke us
    while live_slab_bytes() != before_bytes and time.monotonic() < deadline_s:
        time.sleep(1e-3)
    assert live_slab_bytes() == before_bytes


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("start", "end", "offset", "sentence"),
    [
        (1, 1 + PAGE, 0, f"multiple of {PAGE}"),
        (0, PAGE, 0, "not whole blocks"),
        (0, BLOCK, PAGE, "not whole blocks"),
        (0, BLOCK, 2 * BLOCK, "not whole blocks"),
        (0, BLOCK, -BLOCK, "not whole blocks"),
    ],
)
def test_misaligned_buffers_and_offsets_are_refused(
    store: DiskStore, start: int, end: int, offset: int, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        store.allocate("b0", 2 * BLOCK).read_into(buffer(2 * BLOCK)[start:end], offset)


@pytest.mark.parametrize("tensor", [torch.zeros(PAGE // 4), torch.zeros(2 * PAGE, dtype=torch.uint8)[::2]])
def test_a_buffer_that_is_not_contiguous_bytes_is_refused(store: DiskStore, tensor: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="contiguous uint8"):
        store.allocate("b0", PAGE).write_from(tensor)


def test_a_negative_size_is_refused(store: DiskStore) -> None:
    with pytest.raises(ValueError, match="0 or more"):
        store.allocate("b0", -1)


def test_a_label_is_no_path(store: DiskStore) -> None:
    first, second = store.allocate("../../b 0/é", PAGE), store.allocate("../../b 0/é", PAGE)
    assert {os.path.dirname(region.path) for region in (first, second)} == {store.path}
    assert first.path != second.path


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DiskFailed, match=r"new folder failed at .*No such file"):
        DiskStore(tmp_path / "not-mounted")


def test_nothing_is_left_after_closing_twice(tmp_path: Path) -> None:
    before = (threading.active_count(), sorted(os.listdir("/proc/self/fd")))
    store = DiskStore(tmp_path)
    region = store.allocate("b0", PAGE)
    region.write_from(buffer(PAGE)).wait()
    store.close()
    store.close()
    assert (threading.active_count(), sorted(os.listdir("/proc/self/fd"))) == before
    assert os.listdir(tmp_path) == []
    for late in (lambda: region.read_into(buffer(PAGE)), lambda: store.allocate("b1", PAGE)):
        with pytest.raises(DiskFailed, match="the store was closed"):
            late()


def test_a_store_that_nobody_holds_is_closed(tmp_path: Path) -> None:
    num_threads = threading.active_count()
    region = DiskStore(tmp_path).allocate("b0", PAGE)
    gc.collect()
    assert not contents(region).any()  # a region holds its store
    del region
    gc.collect()
    assert os.listdir(tmp_path) == []
    assert threading.active_count() == num_threads


def test_a_transfer_in_flight_holds_its_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, real = threading.Event(), os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda *args: real(*args) if gate.wait(30) else 0)
    transfer = DiskStore(tmp_path).allocate("b0", PAGE).write_from(buffer(PAGE))
    gc.collect()
    gate.set()
    transfer.wait()
    deadline_s = time.monotonic() + 10  # a thread of its own closes it
    while os.listdir(tmp_path) and time.monotonic() < deadline_s:
        time.sleep(1e-3)
    assert os.listdir(tmp_path) == []


@pytest.mark.usefixtures("small_blocks")
def test_closing_fails_what_is_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DiskStore(tmp_path)
    region = store.allocate("b0", 64 * BLOCK)
    written: list[int] = []

    def is_slow(offset: int) -> bool:
        written.append(offset)
        time.sleep(0.02)
        return False

    fail_calls(monkeypatch, "pwritev", errno.EIO, is_slow)
    transfers = [region.write_from(buffer(64 * BLOCK)), region.read_into(buffer(64 * BLOCK))]
    store.close()
    assert len(written) < 64 / 4  # the blocks that are left are not written
    for transfer in transfers:
        with pytest.raises(DiskFailed, match="the store was closed"):
            transfer.wait()


def test_closing_does_not_wait_for_a_stuck_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_file, "_JOIN_S", 0.05)
    store = DiskStore(tmp_path)
    region = store.allocate("b0", PAGE)
    is_stuck, gate = threading.Event(), threading.Event()
    fail_calls(monkeypatch, "pwritev", errno.EIO, lambda _: is_stuck.set() or gate.wait(30))
    transfer = region.write_from(buffer(PAGE))
    assert is_stuck.wait(30)
    store.close()
    with pytest.raises(DiskFailed, match="the store was closed"):
        transfer.wait()
    assert os.listdir(tmp_path) == []
    # The file stays open: the worker may still write to its number, which must not become another file's.
    assert f"{region.path} (deleted)" in open_files()
    gate.set()


def open_files() -> list[str]:
    links = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that listed the folder
            links.append(os.readlink(f"/proc/self/fd/{number}"))
    return links


def test_files_of_a_killed_process_are_removed_by_the_next(tmp_path: Path) -> None:
    mine = DiskStore(tmp_path)
    for name in ("elixir-disk-notes", "elixir-disk-1-0123abcd"):
        (tmp_path / name).mkdir()  # no lock beside it: not made by a store
    (tmp_path / "elixir-disk-notes.lock").touch()
    said = tmp_path / "said.txt"
    said.touch()
    kept = set(os.listdir(tmp_path))
    script = """
        store = DiskStore(folder)  # a store that nobody holds removes its files
        store.allocate("b0", 1 << 20).write_from(buffer).wait()
        os.kill(os.getpid(), signal.SIGKILL)
        """
    process = start_program(START + textwrap.dedent(script), tmp_path, output=said)
    process.join(60)
    assert process.exitcode == -signal.SIGKILL, said.read_text(encoding="utf-8")
    assert len(set(os.listdir(tmp_path)) - kept) == 2
    DiskStore(tmp_path).close()
    assert set(os.listdir(tmp_path)) == kept
    assert os.path.isdir(mine.path)
    mine.close()


def test_a_forked_child_may_not_use_or_remove_the_store_and_exit_with_transfers_in_flight_does_not_hang(
    tmp_path: Path,
) -> None:
    """In one interpreter, which takes seconds to load torch."""
    done = run_script(
        """
        store = DiskStore(folder)
        region = store.allocate("b0", 1 << 20)
        region.write_from(buffer).wait()
        child = os.fork()
        if not child:
            memory = staging_buffers(1, 1 << 20)[0]
            try:
                region.read_into(memory)
            except DiskFailed as error:
                print(error.because, flush=True)
            store.close()
            sys.exit(0)
        os.waitpid(child, 0)
        region.read_into(buffer.zero_()).wait()
        print(buffer.eq(7).all().item(), os.path.isdir(store.path), flush=True)

        real = os.pwritev
        os.pwritev = lambda *args: time.sleep(0.1) or real(*args)
        region = DiskStore(folder).allocate("b0", 1 << 20)
        transfers = [region.write_from(buffer) for _ in range(1000)]
        threading.Thread(target=transfers[-1].wait, daemon=True).start()
        """,
        tmp_path,
    )
    assert done.stdout == "the store belongs to the parent process\nTrue True\n", done.stderr
    assert done.returncode == 0, done.stderr
    assert os.listdir(tmp_path) == []
