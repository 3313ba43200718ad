"""Where files live that only save time: machine and region profiles, plans, the host kernel. All may be deleted."""

import os
import tempfile
from pathlib import Path


def cache_dir() -> Path:
    """Return the folder of everything that is cached; it need not exist yet.

    `ELIXIR_CACHE_DIR` if it is set, else `elixir_compile` in `XDG_CACHE_HOME`, else in `~/.cache`.
    """
    own = os.environ.get("ELIXIR_CACHE_DIR")
    if own:
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "elixir_compile"


def write_cached(path: Path, text: str) -> None:
    """Write `text` to `path` as a whole or not at all, so that another process never reads half of it.

    Raises OSError where the folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, part = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(part, path)
    except BaseException:
        os.unlink(part)
        raise
