"""Write the state of a training run to a folder, before `save` returns or in a thread beside the training, on all ranks
at once.
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
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from elixir_compile import compat
from elixir_compile.base.errors import DiskFailed, DiskFull, ElixirError
from elixir_compile.base.version import __version__
from elixir_compile.checkpoint import dcp
from elixir_compile.checkpoint.dcp import (
    STATE_FILE,
    TENSORS_FOLDER,
    Manifest,
    Place,
    keep_own,
    write_manifest,
    write_text,
)
from elixir_compile.checkpoint.errors import CheckpointCorrupted, CheckpointMismatch, NotACheckpoint, NotSavable
from elixir_compile.checkpoint.folder import FileRecord, new_folder, sync_folder
from elixir_compile.checkpoint.run_state import (
    Deferred,
    Sources,
    UnsupportedValue,
    model_plain,
    model_state,
    optimizer_plain,
    random_state,
    to_plain,
)
from elixir_compile.graph.capture.modules import executor_of
from elixir_compile.runtime.distributed.control import Carried, ControlChannel
from elixir_compile.runtime.distributed.errors import RanksDiffer, ranks_text
from elixir_compile.runtime.executor import synchronize_executors

# ----------------------------------------------------------------------------------------------------------------------
# Run the parts of a save or load on all ranks at once; an error on one rank is raised on all ranks.
#
#   rank 0   make the folder ----+   write own shards ---+   metadata, manifest, rename ----+   done
#   rank 1   -                   |   write own shards    |   -                              |   done
#                             exchange                exchange                           exchange
#
# If a rank dies or is silent, the other ranks raise PeerFailed within the timeout of the process group. A single
# process runs the same code and sends nothing.


_Made = TypeVar("_Made")

checkpoint_lock = threading.Lock()
"""Held during a load or export, and from a snapshot until it is written, so all ranks exchange in the same order."""

_CARRIED: Carried = {
    NotACheckpoint: attrgetter("path", "because"),
    CheckpointCorrupted: attrgetter("path", "file", "key", "because"),
    CheckpointMismatch: attrgetter("path", "what", "differences"),
    NotSavable: attrgetter("path", "key", "kind"),
    DiskFull: attrgetter("path", "label", "needed_bytes", "free_bytes", "because"),
    DiskFailed: attrgetter("path", "operation", "because"),
}
"""The errors that every rank raises with the same class and text, and the facts to build each from."""


class RankGroup:
    """The ranks with shards of one model, which save and load together; this process alone without a mesh."""

    def __init__(self, control: ControlChannel) -> None:
        self._control = control
        self.rank = control.rank
        self.num_ranks = len(control.ranks)

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank, which writes the files that a checkpoint has once."""
        return self.rank == 0

    def run_on_all(
        self, what: str, act: Callable[[], _Made], text_of: Callable[[_Made], str] = lambda made: ""
    ) -> tuple[_Made, tuple[str, ...]]:
        """Call `act` on every rank; return its result, and `text_of` the result from every rank.

        `what` names the work in errors. If `act` raises on any rank, all ranks raise: an error about the checkpoint
        with its class, any other error as PeerFailed on the ranks that did not fail.
        """
        return self._control.run_on_all_ranks(what, act, text_of, _CARRIED)

    def run_on_first(self, what: str, act: Callable[[], str]) -> str:
        """Call `act` on the first rank only, and return its result on all ranks."""
        _, texts = self.run_on_all(what, act if self.is_first else str, str)
        return texts[0]

    def require_same(self, facts: Sequence[dict[str, object]]) -> None:
        """Raise RanksDiffer unless the `facts` of all ranks are equal."""
        ranks, usual = self._control.ranks, facts[0]
        odd = [place for place, own in enumerate(facts) if own != usual]
        if not odd:
            return
        differences = [
            f"{name}: {value} on {ranks_text(ranks[:1])}, {facts[place].get(name)} on {ranks_text([ranks[place]])}"
            for place in odd
            for name, value in usual.items()
            if facts[place].get(name) != value
        ]
        raise RanksDiffer([ranks[place] for place in odd], differences)


def rank_group_of(model: nn.Module, doing: str) -> RankGroup:
    """Return the group of ranks with shards of `model`; several ranks all call this at once.

    In the main thread, ranks first exchange what each is `doing`. Raises RanksDiffer if a rank trains instead.
    """
    executor = executor_of(model)
    peers = None if executor is None else executor.peers
    if peers is not None and threading.current_thread() is threading.main_thread():
        peers.control.exchange("", "a save, load or export", doing)
    return RankGroup(ControlChannel(None, (0,), 0) if peers is None else peers.checkpoint_control)


# ----------------------------------------------------------------------------------------------------------------------
# `save`: write the state of a training run to a folder, before it returns or in a thread beside the training.
#
#   asynchronous=False   each tensor is written from its own memory; at most one tensor is copied at a time
#   asynchronous=True    all tensors are copied to host memory (the snapshot, as large as the checkpoint) and `save`
#                        returns; a thread writes the snapshot and frees each tensor after it is written


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
    owned: Mapping[str, Any]
    """By the name of the parameter the states of the optimizer that only this rank has, as JSON can hold them."""
    sources: Sources
    """The tensors that this rank writes."""
    places: Mapping[str, Place]
    """By key, the position in the full tensor of each source that is a shard of a tensor."""
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

    If several ranks share the model, all of them call `save` at once. Each rank writes its shards; the first rank
    writes the scheduler, `extra` and all other values without shards.

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
        if asynchronous:
            group.run_on_all("snapshots", lambda: _copy_to_host(state.sources))
            handle._start(lambda: _write(state, facts, group, is_spent=True))
            is_handed_over = True
        else:
            _write(state, facts, group, is_spent=False)
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
        saved, owned = (None, {}) if optimizer is None else optimizer_plain(model, optimizer, shared, own)
        plain = {
            "optimizer": saved,
            "model": model_plain(model_state(model), shared),
            "scheduler": None
            if scheduler is None
            else {
                "kind": type(scheduler).__qualname__,
                "state": to_plain(scheduler.state_dict(), "scheduler", rest),
            },
            "extra": to_plain(dict(extra or {}), "extra", rest),
        }
        random = to_plain(random_state(), f"random.{group.rank}", own)
    except UnsupportedValue as error:
        raise NotSavable(str(target), error.key, error.kind) from None
    likes = ((key, source.like if isinstance(source, Deferred) else source) for key, source in shared.items())
    forms = [(key, str(like.dtype), tuple(like.shape)) for key, like in likes]
    crc32 = zlib.crc32(repr((plain["model"], plain["optimizer"], forms)).encode())
    places = keep_own(shared, is_first=group.is_first)
    sources = {**shared, **(rest if group.is_first else {}), **own}
    return _State(
        target=target,
        step=step,
        plain=plain,
        random=random,
        owned=owned,
        sources=sources,
        places=places,
        crc32=crc32,
    )


def _facts_text(state: _State, asynchronous: bool) -> str:
    """Return the facts about `state` that all ranks exchange, as JSON: what must be equal, bytes, random states,
    and the states of the optimizer that this rank alone has."""
    same = {"path": str(state.target), "step": state.step, "asynchronous": asynchronous}
    same["names, shapes and hyperparameters, by their checksum"] = state.crc32
    return json.dumps({"same": same, "nbytes": state.nbytes, "random": state.random, "owned": state.owned})


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


def _write(state: _State, facts: Sequence[Any], group: RankGroup, *, is_spent: bool) -> None:
    """Write the checkpoint together with the other ranks.

    The checkpoint is in its place if this returns, and is not if it raises. If `is_spent`, memory is freed tensor by
    tensor. `facts` holds those of all ranks, in order: see `_facts_text`.
    """
    with ExitStack() as stack:

        def begin() -> str:
            with _disk_failures(state.target):
                return str(stack.enter_context(new_folder(state.target)))

        folder = Path(group.run_on_first("the folder", begin))

        def write() -> tuple[str, Mapping[str, FileRecord]]:
            with _disk_failures(state.target):
                if not folder.is_dir():
                    first = f"the first rank made {folder}, and this rank does not see it"
                    raise DiskFailed(str(state.target), "save", f"{first}. All ranks need one file system")
                return dcp.write(
                    folder / TENSORS_FOLDER,
                    state.sources,
                    is_spent=is_spent,
                    places=state.places,
                    rank=group.rank,
                )

        def text_of(written: tuple[str, Mapping[str, FileRecord]]) -> str:
            tensors, records = written
            return json.dumps({"tensors": tensors, "files": {name: asdict(own) for name, own in records.items()}})

        _, written = group.run_on_all("tensors written", write, text_of)

        def finish() -> str:
            with _disk_failures(state.target):
                _finish(folder, state, facts, [json.loads(text) for text in written])
                stack.close()
            return ""

        group.run_on_first("the manifest", finish)


def _finish(folder: Path, state: _State, facts: Sequence[Any], written: Sequence[Any]) -> None:
    """Write the files that a checkpoint has once: the index of the tensors, `state.json` and, last, the manifest.

    `written` holds the result of each rank's `text_of` in `_write`, in order.
    """
    tensors = folder / TENSORS_FOLDER
    records = {
        name: FileRecord(nbytes=record["nbytes"], crc32s=tuple(record["crc32s"]))
        for rank_result in written
        for name, record in rank_result["files"].items()
    } | dict(dcp.finish(tensors, [rank_result["tensors"] for rank_result in written]))
    sync_folder(tensors)
    files = {f"{TENSORS_FOLDER}/{name}": record for name, record in records.items()}
    plain = {**state.plain, "random": {str(rank): fact["random"] for rank, fact in enumerate(facts)}}
    if state.plain["optimizer"] is not None:
        for fact in facts:
            state.plain["optimizer"]["states"] |= fact["owned"]
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
