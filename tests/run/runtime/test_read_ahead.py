"""Pieces through a ring of staging buffers: aligned and reused, read ahead in order, nothing lost and nothing
stuck."""

import errno
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from elixir_compile.base.errors import DiskFailed
from elixir_compile.runtime import disk_file, disk_store
from elixir_compile.runtime.disk_file import DiskTransfer
from elixir_compile.runtime.disk_store import DiskRegion, DiskStore, Piece, ReadAhead, staging_buffers

# ----------------------------------------------------------------------------------------------------------------------
# Staging buffers: aligned, and apart in memory.


PAGE = 4096
HUGE_PAGE = 2 << 20


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    """Nothing here compiles, and resetting the compiler before each test would take most of the time."""


@pytest.mark.parametrize(
    ("nbytes", "multiple"), [(1, PAGE), (PAGE + 1, PAGE), (HUGE_PAGE, HUGE_PAGE), (5 << 20, HUGE_PAGE)]
)
def test_buffers_are_aligned_and_share_nothing(nbytes: int, multiple: int) -> None:
    tensors = staging_buffers(3, nbytes)
    assert [tensor.data_ptr() % multiple for tensor in tensors] == [0, 0, 0]
    for value, tensor in enumerate(tensors):
        tensor.fill_(value)
    assert [(len(tensor), tensor.unique().tolist()) for tensor in tensors] == [(nbytes, [value]) for value in range(3)]


@pytest.mark.parametrize(("num_buffers", "nbytes"), [(0, 1), (1, -1)])
def test_no_buffers_and_negative_sizes_are_refused(num_buffers: int, nbytes: int) -> None:
    with pytest.raises(ValueError, match="needs at least 1 buffer"):
        staging_buffers(num_buffers, nbytes)


# ----------------------------------------------------------------------------------------------------------------------
# Pieces through a ring of buffers: read ahead in order, right in any other order, nothing lost and nothing stuck.


NUM_PIECES = 9


@pytest.fixture
def blocks_of_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here compiles; blocks are of one page."""
    for module in (disk_store, disk_file):
        monkeypatch.setattr(module, "DISK_BLOCK_BYTES", PAGE)


@pytest.fixture
def pieces(tmp_path: Path) -> Iterator[list[Piece]]:
    """Nine pieces of two regions each; piece n of region r holds 10 * r + n."""
    store = DiskStore(tmp_path)
    regions = [store.allocate(f"r{number}", NUM_PIECES * PAGE) for number in range(2)]
    columns = [(region, 1, 1) for region in regions]
    made = [Piece(columns, number * PAGE, (number + 1) * PAGE, PAGE) for number in range(NUM_PIECES)]
    reads = ReadAhead(1, 2 * PAGE)
    for number, piece in enumerate(made):
        for region, view in enumerate(reads.take(piece)):
            view.fill_(10 * region + number)
        reads.write(piece, lambda error: None)
    reads.wait_for_writes()
    yield made
    store.close()


def values(views: list[torch.Tensor]) -> list[int]:
    assert all(bool((view == view[0]).all()) and len(view) == PAGE for view in views)
    return [int(view[0]) for view in views]


@pytest.mark.usefixtures("blocks_of_a_page")
def test_the_next_piece_is_read_while_the_first_is_used(pieces: list[Piece], monkeypatch: pytest.MonkeyPatch) -> None:
    reads = ReadAhead(3, 2 * PAGE)
    reads.announce(pieces[3:])
    reads.stop()
    assert not any(piece.buffer for piece in pieces)
    reads.announce(pieces)
    assert values(reads.take(pieces[0])) == [0, 10]
    assert [piece.buffer is not None for piece in pieces] == [True] * 3 + [False] * (NUM_PIECES - 3)
    for transfer in (*pieces[1].reads, *pieces[2].reads):
        transfer.wait()
    monkeypatch.setattr(os, "preadv", lambda *_: pytest.fail("it was read already"))
    assert values(reads.take(pieces[1])) == [1, 11]


@pytest.mark.usefixtures("blocks_of_a_page")
@pytest.mark.parametrize("num_buffers", [1, 2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_pieces_taken_in_any_order_hold_the_last_write(pieces: list[Piece], seed: int, num_buffers: int) -> None:
    chance, reads = random.Random(seed), ReadAhead(num_buffers, 2 * PAGE)
    expected = [[number, 10 + number] for number in range(NUM_PIECES)]
    for _ in range(12):
        reads.announce(chance.sample(pieces, chance.randint(0, 4)))
        number = chance.randrange(NUM_PIECES)
        views = reads.take(pieces[number])
        assert values(views) == expected[number]
        if chance.random() < 0.7:
            expected[number] = [chance.randrange(256), chance.randrange(256)]
            for view, value in zip(views, expected[number], strict=True):
                view.fill_(value)
            reads.write(pieces[number], lambda error: None)
        else:
            reads.give_back(pieces[number])
    reads.wait_for_writes()


@pytest.mark.usefixtures("blocks_of_a_page")
def test_a_piece_announced_again_is_not_read_between_the_writes_of_its_regions(
    pieces: list[Piece], monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, write_from = ReadAhead(2, 2 * PAGE), DiskRegion.write_from
    reads.announce([pieces[0]])
    for view, value in zip(reads.take(pieces[0]), (100, 110), strict=True):
        view.fill_(value)
    held = reads.take(pieces[1])  # no buffer is free, so the piece announced again is not read yet
    reads.announce([pieces[0]])
    threads: list[threading.Thread] = []

    def write_slowly(region: DiskRegion, view: torch.Tensor, start_bytes: int) -> DiskTransfer:
        if not threads:
            found = write_from(region, view, start_bytes)
            threads.append(threading.Thread(target=reads.give_back, args=(pieces[1],)))
            threads[0].start()  # frees a buffer, as a worker does, and reads the next announced piece
            threads[0].join(0.2)
            return found
        return write_from(region, view, start_bytes)

    monkeypatch.setattr(DiskRegion, "write_from", write_slowly)
    reads.write(pieces[0], lambda error: None)
    threads[0].join()
    assert len(held) == 2
    assert values(reads.take(pieces[0])) == [100, 110]


@pytest.mark.usefixtures("blocks_of_a_page")
def test_regions_of_two_element_sizes_have_the_same_pieces(tmp_path: Path) -> None:
    """Elements of 2 bytes and of 4; the last piece has 1000 of them."""
    store, numel = DiskStore(tmp_path), 3 * PAGE + 1000
    columns = [(store.allocate(f"size {size}", numel * size), size, 1) for size in (2, 4)]
    made = [Piece(columns, start, min(start + PAGE, numel), PAGE) for start in range(0, numel, PAGE)]
    values = torch.arange(numel, dtype=torch.int32)
    reads = ReadAhead(2, 6 * PAGE)
    for piece in made:
        for view, dtype in zip(reads.take(piece), (torch.int16, torch.int32), strict=True):
            view.view(dtype).copy_(values[piece.start : piece.end])
        reads.write(piece, lambda error: None)
    reads.announce(made)
    for piece in made:
        narrow, wide = reads.take(piece)
        assert torch.equal(narrow.view(torch.int16), values[piece.start : piece.end].to(torch.int16))
        assert torch.equal(wide.view(torch.int32), values[piece.start : piece.end])
        reads.give_back(piece)
    store.close()


@pytest.mark.usefixtures("blocks_of_a_page")
def test_two_threads_share_one_buffer(pieces: list[Piece]) -> None:
    reads = ReadAhead(1, 2 * PAGE)

    def add_one(own: list[Piece]) -> None:
        reads.announce(own)
        for piece in own:
            for view in reads.take(piece):
                view.add_(1)
            reads.write(piece, lambda error: None)

    threads = [threading.Thread(target=add_one, args=(pieces[first::2],)) for first in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert not any(thread.is_alive() for thread in threads)
    assert [values(reads.take(piece)) for piece in pieces[:1]] == [[1, 11]]


@pytest.mark.usefixtures("blocks_of_a_page")
def test_read_errors_are_raised_and_free_their_buffers(pieces: list[Piece], monkeypatch: pytest.MonkeyPatch) -> None:
    reads = ReadAhead(1, 2 * PAGE)
    failed: list[BaseException | None] = []

    def bad(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", bad)
        with pytest.raises(DiskFailed, match="read failed"):
            reads.take(pieces[0])
    assert values(reads.take(pieces[0])) == [0, 10]
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", bad)
        reads.write(pieces[0], failed.append)
        reads.wait_for_writes()
    assert isinstance(failed[0], DiskFailed)
    with pytest.raises(DiskFailed, match="an earlier write failed"):
        reads.take(pieces[1])
    with pytest.raises(ValueError, match="not taken"):
        reads.write(pieces[1], failed.append)


@pytest.mark.usefixtures("blocks_of_a_page")
def test_space_is_given_back(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    first, second = store.allocate("a", PAGE), store.allocate("a", PAGE)
    store.free(first.file)
    store.free(first.file)
    third = store.allocate("a", PAGE)
    assert sorted(os.listdir(store.path)) == sorted(os.path.basename(region.path) for region in (second, third))
    store.close()
