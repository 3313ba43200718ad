"""A model as plain tensors: `full_state_dict`, and a checkpoint as one safetensors file with Hugging Face's keys.

A safetensors file is 8 bytes that say how long the header is, the header, JSON that says of each tensor its dtype,
shape and place, and the bytes of the tensors (https://huggingface.co/docs/safetensors). It is written here, one tensor
in memory at a time: the library's own `save_file` takes all of them at once.
"""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from elixir_compile import compat
from elixir_compile.checkpoint.errors import NotSavable
from elixir_compile.checkpoint.folder import find, sync_folder
from elixir_compile.checkpoint.manifest import read_manifest, verified
from elixir_compile.checkpoint.model_state import model_state
from elixir_compile.checkpoint.values import key_of
from elixir_compile.errors import DiskFailed

_NAMES = {
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
"""What the format calls them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """What a safetensors file holds."""

    num_tensors: int
    nbytes: int
    """Of the file."""
    tied: Mapping[str, str]
    """Names that are not in the file, and the one in it that has their tensor, as `save_pretrained` leaves them out."""


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers by the keys of `model.state_dict()`, whole and on the CPU.

    What lives in host memory is not copied: it changes when training goes on. What is tied stays tied.
    """
    copies: dict[object, torch.Tensor] = {}
    state: dict[str, torch.Tensor] = {}
    for name, value in model_state(compat.undo_compile(model)).items():
        if isinstance(value, torch.Tensor):
            memory = value.device, value.data_ptr(), value.dtype, value.shape, value.stride()
            if memory not in copies:
                copies[memory] = value.cpu()
            state[name] = copies[memory]
    return state


def export_safetensors(checkpoint: Path, out: Path) -> Export:
    """Write the model of `checkpoint` to the file `out`, which appears whole or not at all.

    Raises NotACheckpoint, CheckpointCorrupted, NotSavable for a dtype that the format does not have, and DiskFailed.
    """
    folder = find(checkpoint)
    reader, plain = verified(folder, read_manifest(folder))
    kept, tied = _kept(plain["model"])
    forms = {name: reader.forms[key] for name, key in kept.items()}
    # By falling alignment, so that each tensor begins at a multiple of the size of its elements.
    order = sorted(forms, key=lambda name: (-forms[name].element_size(), name))
    header = _header(out, {name: forms[name] for name in order})
    tensors = (reader.fresh([kept[name]])[kept[name]] for name in order)
    try:
        nbytes = _write(out, header, tensors)
    except OSError as error:
        raise DiskFailed(str(out), "export", error.strerror or str(error), error.errno or 0) from error
    return Export(num_tensors=len(order), nbytes=nbytes, tied=tied)


def _write(out: Path, header: bytes, tensors: Iterable[torch.Tensor]) -> int:
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(header)
            for tensor in tensors:
                file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())
            nbytes = file.tell()
        temporary.replace(out)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(out.absolute().parent)
    return nbytes


def _kept(plain: Mapping[str, object]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the key of each name that is kept, and of the tied names the one that is kept for them."""
    first: dict[str, str] = {}
    tied: dict[str, str] = {}
    for name, value in plain.items():
        key = key_of(value)
        if key is not None and first.setdefault(key, name) != name:
            tied[name] = first[key]
    return {name: key for key, name in first.items()}, tied


def _header(out: Path, forms: Mapping[str, torch.Tensor]) -> bytes:
    # Hugging Face's loaders refuse a file that does not say which library its tensors are of.
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end_bytes = 0
    for name, form in forms.items():
        if form.dtype not in _NAMES:
            raise NotSavable(str(out), name, f"a tensor of {form.dtype}, which safetensors files do not have")
        start_bytes, end_bytes = end_bytes, end_bytes + form.nbytes
        dtype, shape = _NAMES[form.dtype], list(form.shape)
        fields[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start_bytes, end_bytes]}
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
