"""`load`: a checkpoint into a model, an optimizer and a scheduler.

```text
  1  every byte of every file is compared with its checksum
  2  the model, the optimizer and the scheduler are compared with what was saved
  3  state is read into new host memory, parameters and buffers into themselves, where they are
```

What is wrong raises in 1 or 2, when nothing was changed yet.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from elixir_compile import compat
from elixir_compile.checkpoint.dcp import Reader
from elixir_compile.checkpoint.errors import CheckpointMismatch
from elixir_compile.checkpoint.manifest import Manifest, Verified, open_verified
from elixir_compile.checkpoint.model_state import fill_rest, model_differences, model_state, model_targets
from elixir_compile.checkpoint.optimizer_state import fill_optimizer, optimizer_differences, optimizer_targets
from elixir_compile.checkpoint.random_state import set_random_state
from elixir_compile.checkpoint.rank_group import RankGroup, rank_group_of, turn
from elixir_compile.checkpoint.values import from_plain, tensor_keys
from elixir_compile.errors import DiskFailed, NotPrepared

_NUM_TRIES = 8
"""How often several ranks look until all of them have found the same checkpoint while others are saved."""

_Parts = tuple[nn.Module, torch.optim.Optimizer | None, Any]
"""A model, an optimizer and a scheduler, or None for one that is not loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What a checkpoint says of itself."""

    step: int
    extra: Mapping[str, Any]
    """What `save` was given."""
    versions: Mapping[str, str]
    """Of Python, torch and this package, when it was saved."""


def load(
    path: "str | os.PathLike[str]",
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
) -> Checkpoint:
    """Load the checkpoint at `path` in place, the states of the random number generators too; return its step and
    `extra`.

    Before or after the first forward of a compiled model, under any plan. Without `optimizer` or `scheduler`, what was
    saved of them is left where it is. Raises NotACheckpoint, CheckpointCorrupted and CheckpointMismatch; nothing was
    changed then. While another process saves to `path`, the checkpoint that was there at the beginning is loaded.
    Raises DiskFailed if the disk fails, or a machine that locks do not reach removes the files, between the
    comparison and the reading; then a part may be loaded.

    Where several ranks have the model, all of them call this at once, as many as saved it or not; each reads its parts.
    What is wrong on one rank is raised on all. A rank that did not save keeps its random numbers.
    """
    model = compat.undo_compile(model)
    with turn, ExitStack() as held:
        group = rank_group_of(model, "loads a checkpoint")
        found = _look_on_all_ranks(Path(path), (model, optimizer, scheduler), group, held)
        if torch.cuda.is_initialized():  # copies of the last step may still read the parameters on the host
            torch.cuda.synchronize()
        tensors, _ = group.step("tensors read", lambda: _fill(found, (model, optimizer, scheduler), group))
    extra = from_plain(found.plain["extra"], tensors)
    return Checkpoint(step=found.manifest.step, extra=extra, versions=found.manifest.versions)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """A checkpoint that is whole, and is one of the model and the optimizer at hand."""

    folder: Path
    manifest: Manifest
    reader: Reader
    plain: Any
    """What is no tensor."""
    state: Mapping[str, Any]
    """Of the model."""


def _look_on_all_ranks(path: Path, parts: _Parts, group: RankGroup, held: ExitStack) -> _Found:
    """Return what is at `path`, the same checkpoint on all ranks; `held` keeps it open.

    RanksDiffer if the ranks find different ones again and again, as at paths on different disks.
    """
    for num_left in reversed(range(_NUM_TRIES)):

        def look(is_last_try: bool = num_left == 0) -> _Found | None:
            verified = open_verified(path, held, rank=group.rank, num_ranks=group.num_ranks, is_last_try=is_last_try)
            return None if verified is None else _compared(verified, parts)

        found, crc32s = group.step("what is loaded", look, _crc32_text)
        # A save may have replaced the checkpoint between the moments in which two ranks opened it.
        if found is not None and len(set(crc32s)) == 1:
            return found
    group.require_same([{"the checkpoint, by its checksum": crc32} for crc32 in crc32s])
    raise AssertionError("the last try found a checkpoint, or raised")


def _crc32_text(found: _Found | None) -> str:
    return "replaced" if found is None else str(found.manifest.crc32)


def _compared(verified: Verified, parts: _Parts) -> _Found:
    """Return `verified`; CheckpointMismatch if it is of another model, optimizer or scheduler than `parts`."""
    model, optimizer, scheduler = parts
    folder, plain = verified.folder.path, verified.plain
    state = _readable_state(model)
    _require_same(folder, "model", model_differences(state, plain["model"], verified.reader.forms))
    if optimizer is not None:
        _require_same(folder, "optimizer", optimizer_differences(model, optimizer, plain["optimizer"]))
    if scheduler is not None:
        _require_same(folder, "scheduler", _scheduler_differences(scheduler, plain["scheduler"]))
    return _Found(folder=folder, manifest=verified.manifest, reader=verified.reader, plain=plain, state=state)


def _fill(found: _Found, parts: _Parts, group: RankGroup) -> Mapping[str, torch.Tensor]:
    """Read the checkpoint into `parts` and the random number generators; return what was read into new memory."""
    model, optimizer, scheduler = parts
    plain, reader, rank = found.plain, found.reader, str(group.rank)
    targets = model_targets(model, found.state, plain["model"])
    random = plain["random"].get(rank)
    tensors = reader.new(
        [key for of in (targets.rest, plain["scheduler"], plain["extra"], random) for key in tensor_keys(of)]
    )
    if optimizer is not None:
        tensors |= optimizer_targets(model, optimizer, plain["optimizer"], reader.forms)
    try:
        reader.read_into(tensors)
        reader.read_into(targets.in_place)
    except OSError as error:  # the disk, or another machine that removed the files, which locks may not reach
        because = f"{error.strerror or error}, after every byte had been read once; the model may hold a part of it"
        raise DiskFailed(str(found.folder), "load", because, error.errno or 0) from error
    fill_rest(model, targets, tensors)
    if optimizer is not None:
        fill_optimizer(model, optimizer, plain["optimizer"], tensors)
    if scheduler is not None:
        scheduler.load_state_dict(from_plain(plain["scheduler"]["state"], tensors))
    if random is not None:
        set_random_state(from_plain(random, tensors))
    return tensors


def _readable_state(model: nn.Module) -> Mapping[str, Any]:
    state = model_state(model)
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.is_meta:
            raise NotPrepared(f"{name} is on `meta`, so there is nothing to load into.")
    return state


def _scheduler_differences(scheduler: Any, plain: Mapping[str, Any] | None) -> Iterator[str]:
    if plain is None:
        yield "the checkpoint holds no scheduler; leave `scheduler` out"
    elif plain["kind"] != type(scheduler).__qualname__:
        yield f"{plain['kind']} in the checkpoint, {type(scheduler).__qualname__} here"


def _require_same(folder: Path, what: str, differences: Iterator[str]) -> None:
    found = sorted(differences)
    if found:
        raise CheckpointMismatch(str(folder), what, found)
