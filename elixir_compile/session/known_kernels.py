"""Keep what was seen of kernels on this machine: each op is run once for each set of shapes, and later runs read it.

```text
  op, shapes, strides, dtypes and numbers --> its bytes, of this process, or of an earlier one, or of a run of the op
  <cache folder>/kernels/<machine>.json       {"<op>": [workspace, result, result, ...]}
```

The machine is that of `machine_path`: device, cores, threads and version of torch. Ranks on equal machines see equal
bytes. A plan without a device (`elixir.plan`, `elixir-compile plan`) runs no op, and has the bytes that tracing stated,
so it is the same wherever it is made.
"""

import functools
import hashlib
import json
import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from elixir_compile.base.folders import cache_dir, write_cached
from elixir_compile.graph.capture.kernel_bytes import KernelBytes, KernelCall
from elixir_compile.graph.rewrite.own_memory import in_own_memory
from elixir_compile.runtime.measure.kernel_bytes import measured_bytes
from elixir_compile.session.machine import machine_path

log = logging.getLogger("elixir_compile")

_MOST_KERNELS = 1 << 15
"""Kernels of a file, 2 MB; the oldest are dropped."""
_MOST_BYTES = 1 << 48
"""A file with more bytes for a tensor is wrong."""


class KnownKernels:
    """The bytes of the kernels on one device: the `Kernels` of a capture that will run there."""

    def __init__(self, device: torch.device) -> None:
        self._file = _file_at(cache_dir() / "kernels" / machine_path(device).name)

    def __call__(self, call: KernelCall) -> KernelBytes | None:
        """Return the bytes of the kernel of `call`, which is run if no equal op was run before; see `Kernels`."""
        own = "in own memory " if in_own_memory(call.node.target) is not call.node.target else ""
        return self._file.bytes_of(f"{_ways()} {own}{call.words()}", lambda: measured_bytes(call))

    def keep(self) -> None:
        """Write what was seen to the cache folder, for later processes."""
        self._file.write()


def _ways() -> str:
    """Return the switches of torch by which it chooses kernels."""
    return " ".join(
        str(part)
        for part in (
            torch.get_num_threads(),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(),
            torch.backends.mkldnn.enabled,
            torch.backends.cudnn.enabled,
            torch.backends.cudnn.benchmark,
            torch.backends.cudnn.deterministic,
            torch.backends.cudnn.allow_tf32,
        )
    )


class _File:
    """The kernels of one machine, in the file at `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._known: dict[str, KernelBytes | None] = dict(_read(path))
        self._new: set[str] = set()

    def bytes_of(self, words: str, measure: Callable[[], KernelBytes | None]) -> KernelBytes | None:
        """Return what was seen of the op that `words` describe, by `measure` if it is new."""
        key = hashlib.sha256(words.encode()).hexdigest()[:24]
        with self._lock:  # of two threads that plan, one runs an op
            if key not in self._known:
                self._known[key] = measure()
                self._new.add(key)
            return self._known[key]

    def write(self) -> None:
        with self._lock:
            if not self._new:
                return
            self._new.clear()
            # Another process may have seen other kernels meanwhile. What could not be run here is not kept.
            seen = {**_read(self._path), **{key: own for key, own in self._known.items() if own is not None}}
            rows = {key: [own.workspace_bytes, *own.results_bytes] for key, own in seen.items()}
            rows = dict(islice(rows.items(), max(0, len(rows) - _MOST_KERNELS), None))
            with suppress(OSError):  # the folder is read-only: the next start runs the ops again
                write_cached(self._path, json.dumps(rows))


@functools.cache
def _file_at(path: Path) -> _File:
    return _File(path)


def _read(path: Path) -> Mapping[str, KernelBytes]:
    """Return the kernels in the file `path`; none if there is no file or it is not valid."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        log.warning("kernels are run again, as %s cannot be read: %s", path, error)
        return {}
    if isinstance(rows, dict) and all(map(_is_row, rows.values())):
        return {key: KernelBytes(workspace_bytes=row[0], results_bytes=tuple(row[1:])) for key, row in rows.items()}
    log.warning("kernels are run again, as %s does not hold what they allocate", path)
    return {}


def _is_row(row: Any) -> bool:
    is_list = isinstance(row, list) and bool(row) and row[0] is not None
    return is_list and all(own is None or (type(own) is int and 0 <= own < _MOST_BYTES) for own in row)
