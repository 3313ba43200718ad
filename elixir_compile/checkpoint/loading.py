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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from elixir_compile import compat
from elixir_compile.checkpoint.errors import CheckpointMismatch
from elixir_compile.checkpoint.folder import find
from elixir_compile.checkpoint.manifest import read_manifest, verified
from elixir_compile.checkpoint.model_state import fill_rest, model_differences, model_state, model_targets
from elixir_compile.checkpoint.optimizer_state import OPTIMIZER_KEY, fill_optimizer, optimizer_differences
from elixir_compile.checkpoint.random_state import set_random_state
from elixir_compile.checkpoint.values import from_plain
from elixir_compile.errors import NotPrepared


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
    changed then.
    """
    folder = find(Path(path))
    model = compat.undo_compile(model)
    manifest = read_manifest(folder)
    reader, plain = verified(folder, manifest)
    state = _readable_state(model)
    _require_same(folder, "model", model_differences(state, plain["model"], reader.forms))
    if optimizer is not None:
        _require_same(folder, "optimizer", optimizer_differences(model, optimizer, plain["optimizer"]))
    if scheduler is not None:
        _require_same(folder, "scheduler", _scheduler_differences(scheduler, plain["scheduler"]))
    if torch.cuda.is_initialized():  # copies of the last step may still read the parameters on the host
        torch.cuda.synchronize()

    targets = model_targets(model, state, plain["model"])
    others = (key for key in reader.forms if key not in targets.in_place)
    tensors = reader.fresh(key for key in others if optimizer is not None or not key.startswith(OPTIMIZER_KEY))
    reader.read_into(targets.in_place)
    fill_rest(model, targets, tensors)
    if optimizer is not None:
        fill_optimizer(model, optimizer, plain["optimizer"], tensors)
    if scheduler is not None:
        scheduler.load_state_dict(from_plain(plain["scheduler"]["state"], tensors))
    set_random_state(from_plain(plain["random"]["0"], tensors))
    return Checkpoint(step=manifest.step, extra=from_plain(plain["extra"], tensors), versions=manifest.versions)


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
