"""Read a checkpoint into a model, an optimizer and a scheduler, and give a model as plain tensors or as one safetensors
file.
"""

import json
import os
import zlib
from collections.abc import Hashable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from elixir_compile import compat
from elixir_compile.base.errors import DiskFailed, NotPrepared
from elixir_compile.checkpoint.dcp import Manifest, Reader, Verified, open_verified
from elixir_compile.checkpoint.errors import CheckpointMismatch, NotSavable
from elixir_compile.checkpoint.folder import sync_folder
from elixir_compile.checkpoint.run_state import (
    fill_optimizer,
    fill_rest,
    from_plain,
    key_of,
    memory_of,
    model_differences,
    model_state,
    model_targets,
    optimizer_differences,
    optimizer_targets,
    set_random_state,
    tensor_keys,
)
from elixir_compile.checkpoint.saving import RankGroup, checkpoint_lock, rank_group_of
from elixir_compile.graph.ops.shards import full_tensor, is_dtensor
from elixir_compile.runtime.executor import synchronize_executors

# ----------------------------------------------------------------------------------------------------------------------
# A model as plain tensors: `full_state_dict`, and a checkpoint as one safetensors file with Hugging Face's keys.
#
# A safetensors file (https://huggingface.co/docs/safetensors) has three parts: the length of the header in 8 bytes; the
# header, JSON with the dtype, shape and byte range of each tensor; the bytes of the tensors. This module writes the
# file itself with one tensor in memory at a time, because the library's `save_file` needs all tensors at once.


_FORMAT_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
"""The name of each dtype in the safetensors format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """Facts about a safetensors file written by `export`."""

    num_tensors: int
    nbytes: int
    """Size of the file, header included."""
    tied: Mapping[str, str]
    """By name left out of the file, the name in the file of the same, tied tensor. `save_pretrained` does the same."""


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of `model` as full tensors on the CPU, by the keys of `model.state_dict()`.

    A tensor whose home is the host is not copied, so it changes when training goes on. Tied tensors stay tied. If
    several ranks share the model, all of them call this at once; the first rank gets the tensors, the others get an
    empty dict.

    Example:
        weights = elixir.full_state_dict(compiled)
        assert weights.keys() == model.state_dict().keys()
    """
    model = compat.undo_compile(model)
    is_first = rank_group_of(model, "gathers the full state dict").is_first
    copies: dict[object, torch.Tensor] = {}
    state: dict[str, torch.Tensor] = {}
    tensors = {compat.uncompiled_name(name): value for name, value in model.state_dict().items()}
    for name, value in tensors.items():
        if not isinstance(value, torch.Tensor):
            continue
        memory = memory_of(value)
        found = copies[memory] if memory in copies else _on_host(value)
        if is_first:
            state[name] = copies[memory] = found
        else:
            copies[memory] = torch.empty(0, device="cpu")
    return state


def export(source: "nn.Module | str | os.PathLike[str]", out: "str | os.PathLike[str]") -> Export:
    """Write the weights of `source`, a model or the path of a checkpoint, to the safetensors file `out`.

    The file is written under a temporary name and renamed, so `out` is never incomplete. At most one tensor is copied
    at a time. If several ranks share the model, all of them call this at once and the first rank writes. One process
    exports a checkpoint, whichever number of ranks saved it.

    Raises NotACheckpoint, CheckpointCorrupted, NotSavable for a dtype that the format does not have, and DiskFailed.

    Example:
        elixir.export(model, "model.safetensors")  # the weights of the model as they are now
        elixir.save("run/latest", model)
        written = elixir.export("run/latest", "saved.safetensors")  # the weights of a checkpoint
        assert written.num_tensors == len(model.state_dict())
    """
    out = Path(out)
    if isinstance(source, nn.Module):
        return _export_model(compat.undo_compile(source), out)
    checkpoint = Path(source)
    with ExitStack() as held:
        found = open_verified(checkpoint, held) or open_verified(checkpoint, held, is_last_try=True)
        reader = found.reader
        untied, tied = _untied({name: key_of(value) for name, value in found.plain["model"].items()})
        header, order = _header(out, {name: reader.forms[key] for name, key in untied.items()})
        nbytes = _write(out, header, (reader.fresh([untied[name]])[untied[name]] for name in order))
    return Export(num_tensors=len(order), nbytes=nbytes, tied=tied)


def _export_model(model: nn.Module, out: Path) -> Export:
    state = {name: value for name, value in model_state(model).items() if isinstance(value, torch.Tensor)}
    untied, tied = _untied({name: memory_of(value) if value.numel() else name for name, value in state.items()})
    with checkpoint_lock:
        group = rank_group_of(model, "exports the model")
        (header, order), headers = group.run_on_all(
            "the header of the file",
            lambda: _header(out, {name: state[name] for name in untied}),
            lambda made: str(made[0]),
        )
        group.require_same([{"the names, dtypes and shapes of tensors": zlib.crc32(text.encode())} for text in headers])
        tensors = (_on_host(state[name]) for name in order)

        def write() -> int:
            try:
                return _write(out, header, tensors) if group.is_first else 0
            finally:
                for _ in tensors:  # every rank must take part in the gathers of the remaining tensors
                    pass

        _, sizes = group.run_on_all("the file", write, str)
    return Export(num_tensors=len(order), nbytes=int(sizes[0]), tied=tied)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor of `tensor` on the CPU; all ranks call this at once if `tensor` is a DTensor."""
    if not isinstance(tensor, DTensor):
        return tensor.cpu()
    return full_tensor(tensor, torch.device(tensor.device_mesh.device_type)).cpu()


def _write(out: Path, header: bytes, tensors: Iterable[torch.Tensor]) -> int:
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(header)
            for tensor in tensors:
                file.write(compat.settled(tensor.reshape(-1)).view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())
            nbytes = file.tell()
        temporary.replace(out)
        sync_folder(out.absolute().parent)
    except OSError as error:
        raise DiskFailed(str(out), "export", error.strerror or str(error), error.errno or 0) from error
    finally:
        temporary.unlink(missing_ok=True)
    return nbytes


def _untied(owners: Mapping[str, Hashable]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return (owner by untied name, untied name by tied name) for the owners of all names.

    Names with equal owners are tied; the first of them counts as untied. A name with the owner None names no tensor and
    is dropped.
    """
    first: dict[Hashable, str] = {}
    tied: dict[str, str] = {}
    for name, owner in owners.items():
        if owner is not None and first.setdefault(owner, name) != name:
            tied[name] = first[owner]
    return {name: owner for owner, name in first.items()}, tied


def _header(out: Path, forms: Mapping[str, torch.Tensor]) -> tuple[bytes, list[str]]:
    """Return the length and header of the file as bytes, and the names of its tensors in the order of their bytes.

    Raises NotSavable for a dtype that the format does not have.
    """
    # Largest elements first, so that each tensor begins at a multiple of its element size.
    order = sorted(forms, key=lambda name: (-forms[name].element_size(), name))
    # Hugging Face's loaders refuse a file whose metadata does not name the library of its tensors.
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end_bytes = 0
    for name in order:
        form = forms[name]
        if form.dtype not in _FORMAT_NAMES:
            raise NotSavable(str(out), name, f"a tensor of {form.dtype}, which safetensors files do not have")
        start_bytes, end_bytes = end_bytes, end_bytes + form.nbytes
        dtype, shape = _FORMAT_NAMES[form.dtype], list(form.shape)
        fields[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start_bytes, end_bytes]}
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, order


# ----------------------------------------------------------------------------------------------------------------------
# `load`: read a checkpoint into a model, an optimizer and a scheduler.
#
#   1  compare every byte of every file with its checksum
#   2  compare the model, the optimizer and the scheduler with the saved ones
#   3  read optimizer state into new host memory, and parameters and buffers in place
#
# A damaged or unfit checkpoint raises in 1 or 2, before anything is changed.


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

    If several ranks share the model, all of them call `load` at once, and each reads its shards. Their number may
    differ from the number of ranks that saved. An error on one rank is raised on all. A rank whose number did not save
    keeps its random number generators.

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

        found, crc32s = group.run_on_all(
            "the checkpoint to load",
            open_and_compare,
            lambda opened: "replaced" if opened is None else str(opened.manifest.crc32),
        )
        # A save may have replaced the checkpoint after one rank opened it and before another did: try again.
        if found is not None and len(set(crc32s)) == 1:
            return found
    group.require_same([{"the checkpoint, by its checksum": crc32} for crc32 in crc32s])
    raise AssertionError("the last try found a checkpoint, or raised")


def _compared(verified: Verified, parts: _Parts) -> _Found:
    """Compare `verified` with `parts`. Raises CheckpointMismatch if it was saved from other parts."""
    model, optimizer, scheduler = parts
    folder, plain = verified.folder.path, verified.plain
    state = model_state(model)
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.is_meta:
            raise NotPrepared(f"{name} is on `meta`, so there is nothing to load into.")
    _require_same(folder, "model", model_differences(state, plain["model"], verified.reader.forms))
    if optimizer is not None:
        _require_same(folder, "optimizer", optimizer_differences(model, optimizer, plain["optimizer"]))
    if scheduler is not None:
        saved, here = plain["scheduler"], type(scheduler).__qualname__
        if saved is None:
            _require_same(folder, "scheduler", ["the checkpoint holds no scheduler; leave `scheduler` out"])
        elif saved["kind"] != here:
            _require_same(folder, "scheduler", [f"{saved['kind']} in the checkpoint, {here} here"])
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
    finally:
        # DTensors of a state dict share memory with the parameters, and versions not (torch 2.11 to 2.13).
        torch.autograd.graph.increment_version([param for param in model.parameters() if is_dtensor(param)])
    fill_rest(model, targets, tensors)
    if optimizer is not None:
        fill_optimizer(model, optimizer, plain["optimizer"], tensors)
    if scheduler is not None:
        scheduler.load_state_dict(from_plain(plain["scheduler"]["state"], tensors))
    if random is not None:
        set_random_state(from_plain(random, tensors))
    return tensors


def _require_same(folder: Path, what: str, differences: Iterable[str]) -> None:
    found = sorted(differences)
    if found:
        raise CheckpointMismatch(str(folder), what, found)
