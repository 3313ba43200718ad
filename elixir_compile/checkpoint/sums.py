"""Checksums of files, computed while the files are written.

Each block of `BLOCK_BYTES` has its own CRC-32, so an error can name the damaged block and the tensor in it.
"""

import io
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from torch.distributed.checkpoint.filesystem import FileSystem

BLOCK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """The length of a file in bytes and the CRC-32 of each block; the last block may be shorter."""

    nbytes: int
    crc32s: tuple[int, ...]


class BlockSums:
    """Computes the record of a file from its bytes, piece by piece."""

    def __init__(self) -> None:
        self._nbytes = 0
        self._done: list[int] = []
        self._crc32 = 0

    def add(self, data: memoryview) -> None:
        """Add `data` behind the bytes so far."""
        while data:
            left_bytes = BLOCK_BYTES - self._nbytes % BLOCK_BYTES
            self._crc32 = zlib.crc32(data[:left_bytes], self._crc32)
            self._nbytes += min(left_bytes, len(data))
            data = data[left_bytes:]
            if self._nbytes % BLOCK_BYTES == 0:
                self._done.append(self._crc32)
                self._crc32 = 0

    def record(self) -> FileRecord:
        """Return the record of the bytes so far."""
        last = (self._crc32,) if self._nbytes % BLOCK_BYTES else ()
        return FileRecord(nbytes=self._nbytes, crc32s=(*self._done, *last))


class _SummedFile(io.FileIO):
    """A new file that passes each write on to a BlockSums."""

    def __init__(self, path: "str | os.PathLike[str]", sums: BlockSums) -> None:
        super().__init__(path, "wb")
        self._sums = sums

    def write(self, data: Any, /) -> int:
        written = super().write(data)
        self._sums.add(memoryview(data).cast("B")[:written])
        return written


class SummedFileSystem(FileSystem):
    """DCP's file system, which collects in `records` the record of each written file by file name.

    Files are only written from beginning to end, never in place.
    """

    def __init__(self) -> None:
        super().__init__()
        self.records: dict[str, FileRecord] = {}

    @contextmanager
    def create_stream(self, path: "str | os.PathLike[str]", mode: str) -> Iterator[io.IOBase]:
        """Open a new file for writing with checksums; `mode` is "wb"."""
        sums = BlockSums()
        with io.BufferedWriter(_SummedFile(path, sums)) as stream:
            yield stream
        self.records[Path(path).name] = sums.record()

    def rename(self, path: "str | os.PathLike[str]", new_path: "str | os.PathLike[str]") -> None:
        """Rename a written file, and its record."""
        super().rename(path, new_path)
        self.records[Path(new_path).name] = self.records.pop(Path(path).name)


def first_damage(file: BinaryIO, record: FileRecord) -> tuple[int, str] | None:
    """Return (offset in bytes, text) of the first damage in `file` against `record`; None if there is no damage.

    Raises OSError if the file cannot be read.
    """
    nbytes = os.fstat(file.fileno()).st_size
    if nbytes != record.nbytes:
        return min(nbytes, record.nbytes), f"has {nbytes} bytes of {record.nbytes}"
    for block, crc32 in enumerate(record.crc32s):
        if zlib.crc32(file.read(BLOCK_BYTES)) != crc32:
            return block * BLOCK_BYTES, f"is damaged between bytes {block * BLOCK_BYTES} and {file.tell()}"
    return None
