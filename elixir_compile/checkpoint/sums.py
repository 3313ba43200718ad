"""Checksums of files, taken while they are written.

Every `BLOCK_BYTES` of a file have a CRC-32 of their own, so a damaged place is found, and with it what lies there.
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
    """How long a file is and the CRC-32 of each of its blocks, the last of which may be shorter."""

    nbytes: int
    crc32s: tuple[int, ...]


class BlockSums:
    """The checksums of bytes that arrive in pieces."""

    def __init__(self) -> None:
        self._nbytes = 0
        self._done: list[int] = []
        self._crc32 = 0

    def add(self, data: memoryview) -> None:
        """Go on with `data`."""
        while data:
            room = BLOCK_BYTES - self._nbytes % BLOCK_BYTES
            self._crc32 = zlib.crc32(data[:room], self._crc32)
            self._nbytes += min(room, len(data))
            data = data[room:]
            if self._nbytes % BLOCK_BYTES == 0:
                self._done.append(self._crc32)
                self._crc32 = 0

    def record(self) -> FileRecord:
        """Return what was added so far."""
        last = (self._crc32,) if self._nbytes % BLOCK_BYTES else ()
        return FileRecord(nbytes=self._nbytes, crc32s=(*self._done, *last))


class _SummedFile(io.FileIO):
    """A new file that sums what reaches it."""

    def __init__(self, path: "str | os.PathLike[str]", sums: BlockSums) -> None:
        super().__init__(path, "wb")
        self._sums = sums

    def write(self, data: Any, /) -> int:
        written = super().write(data)
        self._sums.add(memoryview(data).cast("B")[:written])
        return written


class SummedFileSystem(FileSystem):
    """Files of one folder; `records` holds those that were written, by name. Nothing is written but from the start."""

    def __init__(self) -> None:
        super().__init__()
        self.records: dict[str, FileRecord] = {}

    @contextmanager
    def create_stream(self, path: "str | os.PathLike[str]", mode: str) -> Iterator[io.IOBase]:
        """Open a file to write, `mode` "wb", with checksums."""
        sums = BlockSums()
        with io.BufferedWriter(_SummedFile(path, sums)) as stream:
            yield stream
        self.records[Path(path).name] = sums.record()

    def rename(self, path: "str | os.PathLike[str]", new_path: "str | os.PathLike[str]") -> None:
        """Give a file that was written another name."""
        super().rename(path, new_path)
        self.records[Path(new_path).name] = self.records.pop(Path(path).name)


def first_damage(file: BinaryIO, record: FileRecord) -> tuple[int, str] | None:
    """Return the first byte of `file` that is not what was written, and what is wrong; None for a whole file.

    A file that cannot be read raises OSError.
    """
    nbytes = os.fstat(file.fileno()).st_size
    if nbytes != record.nbytes:
        return min(nbytes, record.nbytes), f"has {nbytes} bytes of {record.nbytes}"
    for block, crc32 in enumerate(record.crc32s):
        if zlib.crc32(file.read(BLOCK_BYTES)) != crc32:
            return block * BLOCK_BYTES, f"is damaged between bytes {block * BLOCK_BYTES} and {file.tell()}"
    return None
