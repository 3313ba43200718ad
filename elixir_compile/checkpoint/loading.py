"""`load`: read a checkpoint into a model, an optimizer and a scheduler.

```text
  1  compare every byte of every file with its checksum
  2  compare the model, the optimizer and the scheduler with the saved ones
  3  read optimizer state into new host memory, and parameters and buffers in place
```

A damaged or unfit checkpoint raises in 1 or 2, before anything is changed.
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
from elixir_compile.base.errors import DiskFailed, NotPrepared
from elixir_compile.checkpoint.dcp import Reader
from elixir_compile.checkpoint.errors import CheckpointMismatch
from elixir_compile.checkpoint.manifest import Manifest, Verified, open_verified
from elixir_compile.checkpoint.rank_group import RankGroup, checkpoint_lock, rank_group_of
from elixir_compile.checkpoint.run_state import (
    fill_optimizer,
    fill_rest,
    model_differences,
    model_state,
    model_targets,
    optimizer_differences,
    optimizer_targets,
    set_random_state,
)
from elixir_compile.checkpoint.values import from_plain, tensor_keys
from elixir_compile.runtime.executor import synchronize_executors

_NUM_TRIES = 8
"""How often ranks open the path until all of them have the same checkpoint, while another process saves there."""

_Parts = tuple[nn.Module, torch.optim.Optimizer | None, Any]
"""A model, an optimizer and a scheduler; None for an optimizer or scheduler that is not loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The step, the extra values and the versions that a checkpoint holds."""

    step: int
    extra: Mapping[str, Any]
    """The argument `extra` of `save`."""
    versions: Mapping[str, str]
    """The versions of `python`, `torch` and `elixir_compile` that saved the checkpoint."""


def load(
    path: "str | os.PathLike[str]",
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
) -> Checkpoint:
    """Load the checkpoint at `path` into `model`, `optimizer` and `scheduler` in place; return its step and `extra`.

    The states of the random number generators are loaded too. `load` works before or after the first forward of a
    compiled model, under any plan. If `optimizer` or `scheduler` is None, its saved state is not read. If another
    process saves to `path` meanwhile, the checkpoint that was there at the beginning is loaded.

    Raises NotACheckpoint, CheckpointCorrupted or CheckpointMismatch before anything is changed. Raises DiskFailed if a
    read fails after all bytes were compared, for example because another machine, which file locks do not reach,
    removed the files; then a part of the model may be loaded.

    If several ranks share the model, all of them call `load` at once, and each reads its parts. Their number may differ
    from the number of ranks that saved. An error on one rank is raised on all. A rank whose number did not save keeps
    its random number generators.

    Example:
        elixir.save("run/latest", model, optimizer, step=3, extra={"epoch": 1})
        checkpoint = elixir.load("run/latest", model, optimizer)
        assert (checkpoint.step, checkpoint.extra["epoch"]) == (3, 1)
    """
    model = compat.undo_compile(model)
    with checkpoint_lock, ExitStack() as held:
        group = rank_group_of(model, "loads a checkpoint")
        found = _open_on_all_ranks(Path(path), (model, optimizer, scheduler), group, held)
        synchronize_executors(model)  # copies of the last step from the host may still be running
        tensors, _ = group.run_on_all("tensors read", lambda: _fill(found, (model, optimizer, scheduler), group))
    extra = from_plain(found.plain["extra"], tensors)
    return Checkpoint(step=found.manifest.step, extra=extra, versions=found.manifest.versions)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """An open checkpoint whose bytes are verified and that fits the model, the optimizer and the scheduler."""

    folder: Path
    manifest: Manifest
    reader: Reader
    plain: Any
    """The content of `state.json`: everything but tensors."""
    state: Mapping[str, Any]
    """The state dict of the model to fill."""


def _open_on_all_ranks(path: Path, parts: _Parts, group: RankGroup, held: ExitStack) -> _Found:
    """Open and check the checkpoint at `path`, the same checkpoint on all ranks; `held` keeps its folder open.

    Raises RanksDiffer if the ranks open different checkpoints in every try, as with a path on different disks.
    """
    crc32s: tuple[str, ...] = ()
    for num_left in reversed(range(_NUM_TRIES)):

        def open_and_compare(is_last_try: bool = num_left == 0) -> _Found | None:
            verified = open_verified(path, held, rank=group.rank, num_ranks=group.num_ranks, is_last_try=is_last_try)
            return None if verified is None else _compared(verified, parts)

        found, crc32s = group.run_on_all("the checkpoint to load", open_and_compare, _crc32_text)
        # A save may have replaced the checkpoint after one rank opened it and before another did: try again.
        if found is not None and len(set(crc32s)) == 1:
            return found
    group.require_same([{"the checkpoint, by its checksum": crc32} for crc32 in crc32s])
    raise AssertionError("the last try found a checkpoint, or raised")


def _crc32_text(found: _Found | None) -> str:
    return "replaced" if found is None else str(found.manifest.crc32)


def _compared(verified: Verified, parts: _Parts) -> _Found:
    """Compare `verified` with `parts`. Raises CheckpointMismatch if it was saved from other parts."""
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
    """Read `found` into `parts` and the random number generators; return the tensors in new host memory, by key."""
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
    except OSError as error:  # the disk failed, or another machine, which locks may not reach, removed the files
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
