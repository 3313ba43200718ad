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
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from elixir_compile import compat
from elixir_compile.checkpoint import dcp
from elixir_compile.checkpoint.dcp import Place, keep_own
from elixir_compile.checkpoint.errors import NotSavable
from elixir_compile.checkpoint.folder import new_folder, sync_folder
from elixir_compile.checkpoint.manifest import STATE_FILE, TENSORS_FOLDER, Manifest, write_manifest, write_text
from elixir_compile.checkpoint.model_state import model_plain, model_state
from elixir_compile.checkpoint.optimizer_state import optimizer_plain
from elixir_compile.checkpoint.random_state import random_state
from elixir_compile.checkpoint.rank_group import RankGroup, rank_group_of, turn
from elixir_compile.checkpoint.sums import FileRecord
from elixir_compile.checkpoint.values import Deferred, Sources, Unfit, to_plain
from elixir_compile.errors import DiskFailed, DiskFull, ElixirError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """What this rank saves, in memory."""

    target: Path
    step: int
    plain: Mapping[str, Any]
    """What the first rank writes of what is no tensor, without the random states, which each rank has."""
    random: Mapping[str, Any]
    sources: Sources
    """What this rank writes."""
    places: Mapping[str, Place]
    crc32: int
    """Of what must be equal on all ranks: names, shapes, dtypes and hyperparameters."""

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
                turn.release()

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

    Where several ranks have the model, all of them call this at once. Each writes its parts; the scheduler, `extra` and
    what else is no part are the first rank's.

    Raises NotACheckpoint where `path` is something else, NotSavable, and DiskFull and DiskFailed; `path` is then what
    it was. What fails on one rank is raised on all; a rank that died or does other things is a PeerFailed or a
    RanksDiffer on the others.
    """
    target = Path(path)
    model = compat.undo_compile(model)
    turn.acquire()
    is_handed_over = False
    try:
        group = rank_group_of(model, "saves a checkpoint")

        def state() -> _State:
            return _state_of(target, (model, optimizer, scheduler), step, extra, group)

        own, texts = group.step("what is saved", state, lambda made: _facts_text(made, asynchronous))
        facts = [json.loads(text) for text in texts]
        group.require_same([fact["same"] for fact in facts])
        group.first("room on the disk", lambda: _require_room(target, sum(fact["nbytes"] for fact in facts)))
        handle = SaveHandle(str(target), own.nbytes if asynchronous else 0)
        randoms = [fact["random"] for fact in facts]
        if asynchronous:
            group.step("snapshots", lambda: _copy_to_host(own.sources))
            handle._begin(lambda: _write(own, randoms, group, is_spent=True))
            is_handed_over = True
        else:
            _write(own, randoms, group, is_spent=False)
    finally:
        if not is_handed_over:
            turn.release()
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
    if torch.cuda.is_initialized():  # copies of the last step may still be on their way to the host
        torch.cuda.synchronize()
    try:
        plain = {
            "optimizer": None if optimizer is None else optimizer_plain(model, optimizer, shared),
            "model": model_plain(model_state(model), shared),
            "scheduler": None if scheduler is None else _scheduler_plain(scheduler, rest),
            "extra": to_plain(dict(extra or {}), "extra", rest),
        }
        random = to_plain(random_state(), f"random.{group.rank}", own)
    except Unfit as unfit:
        raise NotSavable(str(target), unfit.key, unfit.kind) from None
    crc32 = zlib.crc32(repr((plain["model"], plain["optimizer"], _forms(shared))).encode())
    places = keep_own(shared, is_first=group.is_first)
    sources = {**shared, **(rest if group.is_first else {}), **own}
    return _State(target=target, step=step, plain=plain, random=random, sources=sources, places=places, crc32=crc32)


def _forms(sources: Sources) -> list[object]:
    likes = ((key, source.like if isinstance(source, Deferred) else source) for key, source in sources.items())
    return [(key, str(like.dtype), tuple(like.shape)) for key, like in likes]


def _facts_text(state: _State, asynchronous: bool) -> str:
    """Return what the other ranks must know of `state`."""
    same = {"path": str(state.target), "step": state.step, "asynchronous": asynchronous}
    same["names, shapes and hyperparameters, by their checksum"] = state.crc32
    return json.dumps({"same": same, "nbytes": state.nbytes, "random": state.random})


def _scheduler_plain(scheduler: Any, sources: Sources) -> dict[str, Any]:
    state = to_plain(scheduler.state_dict(), "scheduler", sources)
    return {"kind": type(scheduler).__qualname__, "state": state}


def _copy_to_host(sources: Sources) -> None:
    for key, source in sources.items():
        tensor = source.read() if isinstance(source, Deferred) else source.detach()
        # Contiguous, as it is written: a copy of a copy would be memory that `snapshot_bytes` does not count.
        sources[key] = tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)


def _require_room(target: Path, needed_bytes: int) -> str:
    folder = next(parent for parent in target.absolute().parents if parent.exists())
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise DiskFull(str(folder), f"checkpoint {target}", needed_bytes, free_bytes, "its tensors alone do not fit")
    return ""


def _write(state: _State, randoms: Sequence[Any], group: RankGroup, *, is_spent: bool) -> None:
    """Write the checkpoint, with the other ranks: it is in its place when this returns, and not when it raises."""
    with ExitStack() as stack:

        def begin() -> str:
            with _disk_failures(state.target):
                return str(stack.enter_context(new_folder(state.target)))

        folder = Path(group.first("the folder", begin))

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

        _, written = group.step("tensors written", write, _written_text)

        def finish() -> str:
            with _disk_failures(state.target):
                _finish(folder, state, randoms, [json.loads(text) for text in written])
                stack.close()
            return ""

        group.first("the manifest", finish)


def _written_text(written: tuple[str, Mapping[str, FileRecord]]) -> str:
    tensors, records = written
    return json.dumps({"tensors": tensors, "files": {name: asdict(record) for name, record in records.items()}})


def _require_seen(folder: Path, target: Path) -> None:
    if not folder.is_dir():
        because = f"the first rank made {folder}, and this rank does not see it. All ranks need one file system"
        raise DiskFailed(str(target), "save", because)


def _finish(folder: Path, state: _State, randoms: Sequence[Any], written: Sequence[Any]) -> None:
    """Write what is there once in a checkpoint; the manifest is the last."""
    tensors = folder / TENSORS_FOLDER
    records = {
        name: FileRecord(nbytes=record["nbytes"], crc32s=tuple(record["crc32s"]))
        for own in written
        for name, record in own["files"].items()
    } | dict(dcp.finish(tensors, [own["tensors"] for own in written]))
    sync_folder(tensors)
    files = {f"{TENSORS_FOLDER}/{name}": record for name, record in records.items()}
    # By rank: each has its own.
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
        "torch": str(torch.__version__),  # a public name, underscores and all
        "elixir_compile": version("elixir-compile"),
    }
