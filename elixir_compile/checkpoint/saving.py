"""`save`: the state of a training run to a folder, now or beside the training.

```text
  asynchronous=False   every tensor goes from where it is to its file; one copy of one tensor at most
  asynchronous=True    a snapshot on the host, as large as the checkpoint, then the training goes on; a thread writes,
                       and frees each tensor once it is written
```
"""

import json
import logging
import os
import platform
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from elixir_compile import compat
from elixir_compile.checkpoint import dcp
from elixir_compile.checkpoint.errors import NotSavable
from elixir_compile.checkpoint.folder import new_folder
from elixir_compile.checkpoint.manifest import STATE_FILE, TENSORS_FOLDER, Manifest, write_manifest, write_text
from elixir_compile.checkpoint.model_state import model_plain, model_state
from elixir_compile.checkpoint.optimizer_state import optimizer_plain
from elixir_compile.checkpoint.random_state import random_state
from elixir_compile.checkpoint.values import Deferred, Sources, Unfit, to_plain
from elixir_compile.errors import DiskFailed, DiskFull, ElixirError

_log = logging.getLogger(__name__)

_turn = threading.Lock()
"""Held from a snapshot until it is written: a second save waits, so there is never a second snapshot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """What a checkpoint holds, in memory."""

    step: int
    plain: Mapping[str, Any]
    sources: Sources

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        tensors = (source.like if isinstance(source, Deferred) else source for source in self.sources.values())
        return sum(tensor.nbytes for tensor in tensors)


class SaveHandle:
    """A save that is under way or done."""

    def __init__(self, path: str, snapshot_bytes: int) -> None:
        self.path = path
        self.snapshot_bytes = snapshot_bytes
        """Host memory that the snapshot took; 0 without one."""
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    @property
    def is_done(self) -> bool:
        """Whether the checkpoint is there, or failed."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Return once the checkpoint is there; raises what failed."""
        if self._thread is not None:
            self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _begin(self, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                self._failure = error
                _log.error("the checkpoint %s was not saved: %s", self.path, error)
            finally:
                _turn.release()

        # Not a daemon: a program that ends waits for its last checkpoint.
        self._thread = threading.Thread(target=run, name="elixir-save")
        self._thread.start()


def save(
    path: "str | os.PathLike[str]",
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    scheduler: Any = None,
    step: int = 0,
    asynchronous: bool = False,
    extra: Mapping[str, Any] | None = None,
) -> SaveHandle:
    """Save a training run to the folder `path`, which is replaced when the new one is whole and on the disk.

    Saved are parameters and buffers, the optimizer, the scheduler, `step`, the states of the random number generators
    and `extra`: tensors, numbers, texts, and lists, tuples and dicts of them. Call it between steps. With
    `asynchronous` it returns once all is copied to host memory, and `wait()` on the handle returns when all is written.
    A save that is called while another is being written waits for it.

    Raises NotACheckpoint where `path` is something else, NotSavable, and DiskFull and DiskFailed; `path` is then what
    it was.
    """
    target = Path(path)
    model = compat.undo_compile(model)
    _turn.acquire()
    is_handed_over = False
    try:
        state = _state_of(target, model, optimizer, scheduler, step, extra)
        _require_room(target, state.nbytes)
        handle = SaveHandle(str(target), state.nbytes if asynchronous else 0)
        if asynchronous:
            _copy_to_host(state.sources)
            handle._begin(lambda: _write(target, state, is_spent=True))
            is_handed_over = True
        else:
            _write(target, state, is_spent=False)
    finally:
        if not is_handed_over:
            _turn.release()
    return handle


def _state_of(
    target: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    scheduler: Any,
    step: int,
    extra: Mapping[str, Any] | None,
) -> _State:
    sources: Sources = {}
    if torch.cuda.is_initialized():  # copies of the last step may still be on their way to the host
        torch.cuda.synchronize()
    try:
        plain = {
            "optimizer": None if optimizer is None else optimizer_plain(model, optimizer, sources),
            "model": model_plain(model_state(model), sources),
            "scheduler": None if scheduler is None else _scheduler_plain(scheduler, sources),
            # By rank: each has its own.
            "random": {"0": to_plain(random_state(), "random.0", sources)},
            "extra": to_plain(dict(extra or {}), "extra", sources),
        }
    except Unfit as unfit:
        raise NotSavable(str(target), unfit.key, unfit.kind) from None
    return _State(step=step, plain=plain, sources=sources)


def _scheduler_plain(scheduler: Any, sources: Sources) -> dict[str, Any]:
    state = to_plain(scheduler.state_dict(), "scheduler", sources)
    return {"kind": type(scheduler).__qualname__, "state": state}


def _copy_to_host(sources: Sources) -> None:
    for key, source in sources.items():
        tensor = source.read() if isinstance(source, Deferred) else source.detach()
        # Contiguous, as it is written: a copy of a copy would be memory that `snapshot_bytes` does not count.
        sources[key] = tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)


def _require_room(target: Path, needed_bytes: int) -> None:
    folder = next(parent for parent in target.absolute().parents if parent.exists())
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise DiskFull(str(folder), f"checkpoint {target}", needed_bytes, free_bytes, "its tensors alone do not fit")


def _write(target: Path, state: _State, *, is_spent: bool) -> None:
    try:
        with new_folder(target) as folder:
            records = dcp.write(folder / TENSORS_FOLDER, state.sources, is_spent=is_spent)
            files = {f"{TENSORS_FOLDER}/{name}": record for name, record in records.items()}
            files[STATE_FILE] = write_text(folder / STATE_FILE, json.dumps(state.plain, allow_nan=False))
            write_manifest(folder, Manifest(step=state.step, num_ranks=1, versions=_versions(), files=files))
    except ElixirError:
        raise
    except OSError as error:
        raise DiskFailed(str(target), "save", error.strerror or str(error), error.errno or 0) from error


def _versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),  # a public name, underscores and all
        "elixir_compile": version("elixir-compile"),
    }
