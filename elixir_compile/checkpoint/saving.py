"""`save`: write the state of a training run to a folder, before it returns or in a thread beside the training.

```text
  asynchronous=False   each tensor is written from its own memory; at most one tensor is copied at a time
  asynchronous=True    all tensors are copied to host memory (the snapshot, as large as the checkpoint) and `save`
                       returns; a thread writes the snapshot and frees each tensor after it is written
```
"""

import json
import logging
import os
import platform
import shutil
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from elixir_compile import compat
from elixir_compile.base.errors import DiskFailed, DiskFull, ElixirError
from elixir_compile.base.version import __version__
from elixir_compile.checkpoint import dcp
from elixir_compile.checkpoint.dcp import Place, keep_own
from elixir_compile.checkpoint.errors import NotSavable
from elixir_compile.checkpoint.folder import FileRecord, new_folder, sync_folder
from elixir_compile.checkpoint.manifest import STATE_FILE, TENSORS_FOLDER, Manifest, write_manifest, write_text
from elixir_compile.checkpoint.rank_group import RankGroup, checkpoint_lock, rank_group_of
from elixir_compile.checkpoint.run_state import model_plain, model_state, optimizer_plain, random_state
from elixir_compile.checkpoint.values import Deferred, Sources, UnsupportedValue, to_plain
from elixir_compile.runtime.executor import synchronize_executors

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """The state that this rank saves."""

    target: Path
    step: int
    plain: Mapping[str, Any]
    """All values but tensors and random states, as JSON can hold them; the first rank writes them."""
    random: Mapping[str, Any]
    """The states of the random number generators of this rank, as JSON can hold them."""
    sources: Sources
    """The tensors that this rank writes."""
    places: Mapping[str, Place]
    """By key, the position in the full tensor of each source that is a part of a tensor."""
    crc32: int
    """Checksum of the values that must be equal on all ranks: names, shapes, dtypes and hyperparameters."""

    @property
    def nbytes(self) -> int:
        """Total bytes of `sources`."""
        tensors = (source.like if isinstance(source, Deferred) else source for source in self.sources.values())
        return sum(tensor.nbytes for tensor in tensors)


class SaveHandle:
    """A running or finished save."""

    def __init__(self, path: str, snapshot_bytes: int) -> None:
        self.path = path
        self.snapshot_bytes = snapshot_bytes
        """Bytes of host memory that the snapshot took; 0 if `save` made no snapshot."""
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    @property
    def is_done(self) -> bool:
        """Whether the save has ended, with a checkpoint or with an error."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the checkpoint is in its place; raise the error of the save if it failed."""
        if self._thread is not None:
            self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _start(self, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                self._failure = error
                _log.error("the checkpoint %s was not saved: %s", self.path, error)
            finally:
                checkpoint_lock.release()

        # Not a daemon: a process that ends waits for its last checkpoint.
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
    """Save a training run to the folder `path`.

    A checkpoint holds the parameters and buffers of `model`, the optimizer, the scheduler, `step`, the states of the
    random number generators, and `extra`: tensors, numbers, texts, and lists, tuples and dicts of them. Call `save`
    between steps. A checkpoint at `path` is replaced after the new checkpoint is complete and synced to the disk.

    If `asynchronous`, `save` returns after it copied all state to host memory, and `wait()` on the returned handle
    returns after the checkpoint is written. A save waits for an earlier save that is still being written.

    If several ranks share the model, all of them call `save` at once. Each rank writes its parts; the first rank writes
    the scheduler, `extra` and all other values without parts.

    Raises NotACheckpoint if `path` is something else than a checkpoint, NotSavable for a value of an unsupported type,
    DiskFull or DiskFailed. `path` is then unchanged. An error on one rank is raised on all ranks. If a rank dies, the
    others raise PeerFailed; if a rank does something else, they raise RanksDiffer.

    Example:
        compiled(batch).backward()
        optimizer.step()
        elixir.save("run/latest", model, optimizer, step=1, extra={"epoch": 0})
        handle = elixir.save("run/beside", model, optimizer, step=1, asynchronous=True)
        handle.wait()  # training may go on before this line
    """
    target = Path(path)
    model = compat.undo_compile(model)
    checkpoint_lock.acquire()
    is_handed_over = False
    try:
        group = rank_group_of(model, "saves a checkpoint")

        def collect() -> _State:
            return _state_of(target, (model, optimizer, scheduler), step, extra, group)

        state, texts = group.run_on_all("the state to save", collect, lambda state: _facts_text(state, asynchronous))
        facts = [json.loads(text) for text in texts]
        group.require_same([fact["same"] for fact in facts])
        group.run_on_first("the free disk space", lambda: _require_room(target, sum(fact["nbytes"] for fact in facts)))
        handle = SaveHandle(str(target), state.nbytes if asynchronous else 0)
        randoms = [fact["random"] for fact in facts]
        if asynchronous:
            group.run_on_all("snapshots", lambda: _copy_to_host(state.sources))
            handle._start(lambda: _write(state, randoms, group, is_spent=True))
            is_handed_over = True
        else:
            _write(state, randoms, group, is_spent=False)
    finally:
        if not is_handed_over:
            checkpoint_lock.release()
    return handle


def _state_of(
    target: Path,
    parts: tuple[nn.Module, torch.optim.Optimizer | None, Any],
    step: int,
    extra: Mapping[str, Any] | None,
    group: RankGroup,
) -> _State:
    model, optimizer, scheduler = parts
    shared: Sources = {}
    own: Sources = {}
    rest: Sources = {}
    synchronize_executors(model)  # copies of the last step to the host may still be running
    try:
        plain = {
            "optimizer": None if optimizer is None else optimizer_plain(model, optimizer, shared),
            "model": model_plain(model_state(model), shared),
            "scheduler": None if scheduler is None else _scheduler_plain(scheduler, rest),
            "extra": to_plain(dict(extra or {}), "extra", rest),
        }
        random = to_plain(random_state(), f"random.{group.rank}", own)
    except UnsupportedValue as error:
        raise NotSavable(str(target), error.key, error.kind) from None
    crc32 = zlib.crc32(repr((plain["model"], plain["optimizer"], _forms(shared))).encode())
    places = keep_own(shared, is_first=group.is_first)
    sources = {**shared, **(rest if group.is_first else {}), **own}
    return _State(target=target, step=step, plain=plain, random=random, sources=sources, places=places, crc32=crc32)


def _forms(sources: Sources) -> list[object]:
    likes = ((key, source.like if isinstance(source, Deferred) else source) for key, source in sources.items())
    return [(key, str(like.dtype), tuple(like.shape)) for key, like in likes]


def _facts_text(state: _State, asynchronous: bool) -> str:
    """Return the facts about `state` that all ranks exchange, as JSON: what must be equal, bytes, random states."""
    same = {"path": str(state.target), "step": state.step, "asynchronous": asynchronous}
    same["names, shapes and hyperparameters, by their checksum"] = state.crc32
    return json.dumps({"same": same, "nbytes": state.nbytes, "random": state.random})


def _scheduler_plain(scheduler: Any, sources: Sources) -> dict[str, Any]:
    state = to_plain(scheduler.state_dict(), "scheduler", sources)
    return {"kind": type(scheduler).__qualname__, "state": state}


def _copy_to_host(sources: Sources) -> None:
    for key, source in sources.items():
        tensor = source.read() if isinstance(source, Deferred) else source.detach()
        # The writer makes a copy of a tensor that is not contiguous, and `snapshot_bytes` would not count this copy.
        sources[key] = tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)


def _require_room(target: Path, needed_bytes: int) -> str:
    folder = next(parent for parent in target.absolute().parents if parent.exists())
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise DiskFull(str(folder), f"checkpoint {target}", needed_bytes, free_bytes, "its tensors alone do not fit")
    return ""


def _write(state: _State, randoms: Sequence[Any], group: RankGroup, *, is_spent: bool) -> None:
    """Write the checkpoint together with the other ranks.

    The checkpoint is in its place if this returns, and is not if it raises. If `is_spent`, memory is freed tensor by
    tensor. `randoms` holds the random states of all ranks, in order.
    """
    with ExitStack() as stack:

        def begin() -> str:
            with _disk_failures(state.target):
                return str(stack.enter_context(new_folder(state.target)))

        folder = Path(group.run_on_first("the folder", begin))

        def write() -> tuple[str, Mapping[str, FileRecord]]:
            with _disk_failures(state.target):
                _require_seen(folder, state.target)
                return dcp.write(
                    folder / TENSORS_FOLDER,
                    state.sources,
                    is_spent=is_spent,
                    places=state.places,
                    rank=group.rank,
                )

        _, written = group.run_on_all("tensors written", write, _written_text)

        def finish() -> str:
            with _disk_failures(state.target):
                _finish(folder, state, randoms, [json.loads(text) for text in written])
                stack.close()
            return ""

        group.run_on_first("the manifest", finish)


def _written_text(written: tuple[str, Mapping[str, FileRecord]]) -> str:
    tensors, records = written
    return json.dumps({"tensors": tensors, "files": {name: asdict(record) for name, record in records.items()}})


def _require_seen(folder: Path, target: Path) -> None:
    if not folder.is_dir():
        because = f"the first rank made {folder}, and this rank does not see it. All ranks need one file system"
        raise DiskFailed(str(target), "save", because)


def _finish(folder: Path, state: _State, randoms: Sequence[Any], written: Sequence[Any]) -> None:
    """Write the files that a checkpoint has once: the index of the tensors, `state.json` and, last, the manifest.

    `written` holds the result of each rank's `_written_text`, in order.
    """
    tensors = folder / TENSORS_FOLDER
    records = {
        name: FileRecord(nbytes=record["nbytes"], crc32s=tuple(record["crc32s"]))
        for rank_result in written
        for name, record in rank_result["files"].items()
    } | dict(dcp.finish(tensors, [rank_result["tensors"] for rank_result in written]))
    sync_folder(tensors)
    files = {f"{TENSORS_FOLDER}/{name}": record for name, record in records.items()}
    plain = {**state.plain, "random": {str(rank): random for rank, random in enumerate(randoms)}}
    files[STATE_FILE] = write_text(folder / STATE_FILE, json.dumps(plain, allow_nan=False))
    write_manifest(folder, Manifest(step=state.step, num_ranks=len(written), versions=_versions(), files=files))


@contextmanager
def _disk_failures(target: Path) -> Iterator[None]:
    try:
        yield
    except ElixirError:
        raise
    except OSError as error:
        raise DiskFailed(str(target), "save", error.strerror or str(error), error.errno or 0) from error


def _versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),  # public, despite the underscores
        "elixir_compile": __version__,
    }
