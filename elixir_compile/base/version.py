"""The version of this package, and a digest of its source for caches."""

import functools
import hashlib
from pathlib import Path

__version__ = "0.1.0"


@functools.cache
def source_digest(*patterns: str) -> str:
    """Return the SHA-256, in hex digits, of the names and contents of the source files of this package that match one
    of `patterns`, such as `search/**/*.py`.

    Caches have it in their keys, because the version stays the same during development.
    """
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted({path for pattern in patterns for path in root.glob(pattern)}):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
