"""A model as plain tensors: `full_state_dict`, and a checkpoint as one safetensors file with Hugging Face's keys.

A safetensors file (https://huggingface.co/docs/safetensors) has three parts: the length of the header in 8 bytes; the
header, JSON with the dtype, shape and byte range of each tensor; the bytes of the tensors. This module writes the file
itself with one tensor in memory at a time, because the library's `save_file` needs all tensors at once.
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
from elixir_compile.base.errors import DiskFailed
from elixir_compile.checkpoint.errors import NotSavable
from elixir_compile.checkpoint.folder import sync_folder
from elixir_compile.checkpoint.manifest import open_verified
from elixir_compile.checkpoint.rank_group import checkpoint_lock, rank_group_of
from elixir_compile.checkpoint.run_state import memory_of, model_state
from elixir_compile.checkpoint.values import key_of
from elixir_compile.graph.ops.shards import full_tensor

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
    for name, value in _tensors(model).items():
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
    if isinstance(source, nn.Module):
        return _export_model(compat.undo_compile(source), Path(out))
    return _export_checkpoint(Path(source), Path(out))


def _export_checkpoint(checkpoint: Path, out: Path) -> Export:
    with ExitStack() as held:
        found = open_verified(checkpoint, held) or open_verified(checkpoint, held, is_last_try=True)
        reader = found.reader
        untied, tied = _untied({name: key_of(value) for name, value in found.plain["model"].items()})
        header, order = _header(out, {name: reader.forms[key] for name, key in untied.items()})
        nbytes = _write(out, header, (reader.fresh([untied[name]])[untied[name]] for name in order))
    return Export(num_tensors=len(order), nbytes=nbytes, tied=tied)


def _export_model(model: nn.Module, out: Path) -> Export:
    state = _tensors(model)
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


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value for name, value in model_state(model).items() if isinstance(value, torch.Tensor)}


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
