"""Real text that every machine has: the sources of Python's standard library."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch

from elixir_compile.errors import InvalidOption


def read_text(path: Path | None) -> bytes:
    """Return the bytes of `path`, a file or a folder of `*.py` files, or of the standard library.

    Raises InvalidOption when there are none.
    """
    place = Path(sysconfig.get_path("stdlib")) if path is None else path
    files = [place] if place.is_file() else sorted(place.glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)
    if not text:
        raise InvalidOption("text", str(place), "a file that is not empty, or a folder with Python files")
    return text


def batches(
    text: bytes, *, size: int, context: int, seed: int, device: str
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield endless (bytes, bytes that follow), each int64[size, context], from random places.

    Raises InvalidOption for a text that is too short. The text stays Python's: as a tensor on a CPU it would count as
    device memory.
    """
    if len(text) <= context + 1:
        raise InvalidOption("text", f"{len(text)} bytes", f"more than {context + 1} bytes")
    random = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - context - 1, (size,), generator=random).tolist()
        window = b"".join(text[start : start + context + 1] for start in starts)
        both = torch.frombuffer(bytearray(window), dtype=torch.uint8).view(size, context + 1).long()
        yield both[:, :-1].contiguous().to(device), both[:, 1:].contiguous().to(device)
