"""Captures of earlier commands: the step of one model and batch is captured once, and read from disk after that.

    key = SHA-256 of the model's name or configuration, its batch, the options that a capture reads, the versions of
          torch and transformers, the processor, and this package's source
    <cache folder>/captures/<key>.json

A capture does not depend on the machine that is planned for nor on its budget, so one file serves them all. Only the
command line uses these files: in its process nobody has changed what torch does. Any of them may be deleted.
"""

import hashlib
import importlib.metadata
import importlib.util
import logging
import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from elixir_compile.api.backend import with_compiler
from elixir_compile.api.preview.capture import Capture
from elixir_compile.api.preview.models import TextBatch, description_of
from elixir_compile.codec import Form, from_json, to_json
from elixir_compile.errors import InvalidPlan
from elixir_compile.folders import cache_dir, drop_oldest, write_cached
from elixir_compile.ir import StepGraph, StorageId
from elixir_compile.options import Options
from elixir_compile.problem.loss import Chunks
from elixir_compile.version import __version__

log = logging.getLogger("elixir_compile")

MOST_CAPTURES = 20
"""Files kept; that of a Llama of 32 layers has 2 MB."""
_READ_BY_A_CAPTURE = ("activations", "inner", "param_dtype")
"""The options of the backend that a capture reads."""
_READ_BY_TORCH = ("TORCH", "PYTORCH", "TRANSFORMERS")
"""How the names of variables of the environment begin that change what torch and transformers do."""
_FORM = Form(
    what="capture",
    version=1,
    error=lambda field, expected, got: InvalidPlan(f"{field}: expected {expected}, got {got!r:.80}"),
)
Pairs = tuple[tuple[StorageId, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """A `Capture` of fields that JSON can hold. Mappings are pairs, which keep their order."""

    graph: StepGraph
    device: str
    numels: Pairs
    state_bytes: Pairs
    masters: Pairs
    held_bytes: int
    base_bytes: int
    chunks: Chunks | None
    loss_chunks: int
    batch_symbol: str | None


def capture_key(model: str, text: TextBatch, options: Options, *, dynamic: bool, chunks: Chunks | None) -> str | None:
    """Return 32 hex digits that differ wherever the capture of the named `model` could.

    Returns None for a model whose capture is not kept: one that a function of the user makes, which may do anything.
    On a machine with a GPU none is kept either: asking which one it is would initialise CUDA, and then no process that
    captures could be forked.
    """
    description = description_of(model)
    if description is None or not options.plan_cache or torch.cuda.is_available():
        return None
    options = with_compiler(options)
    parts = [
        ("model", description, text, dynamic, chunks),
        ("options", [(name, getattr(options, name)) for name in _READ_BY_A_CAPTURE]),
        ("source", __version__, _source_digest()),
        ("torch", torch.__version__),  # a public name, underscores and all
        ("libraries", platform.python_version(), _transformers()),
        ("processor", torch.backends.cpu.get_cpu_capability()),
        ("environment", sorted(item for item in os.environ.items() if item[0].startswith(_READ_BY_TORCH))),
    ]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def kept_capture(key: str) -> Capture | None:
    """Return the capture of an earlier command. Return None if there is none, or none that can be read, which is
    removed with a line in the log."""
    path = _path(key)
    try:
        kept = from_json(_FORM, _Kept, path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:  # InvalidPlan and UnicodeDecodeError are ValueErrors
        log.info("the kept capture %s cannot be read and is removed: %s", path, error)
        with suppress(OSError):  # it stays if the folder may only be read
            path.unlink(missing_ok=True)
        return None
    with suppress(OSError):  # a folder that may only be read: its files do not age
        os.utime(path)
    values = {field.name: getattr(kept, field.name) for field in fields(kept)}
    maps = {name: dict(values[name]) for name in ("numels", "state_bytes", "masters")}
    return Capture(**(values | maps | {"device": torch.device(kept.device)}))


def keep_capture(key: str, capture: Capture) -> None:
    """Keep `capture` for later commands, and drop the oldest of too many; a folder that is closed gets a line in the
    log."""
    values = {field.name: getattr(capture, field.name) for field in fields(capture)}
    maps = {name: tuple(value.items()) for name, value in values.items() if isinstance(value, Mapping)}
    kept = _Kept(**(values | maps | {"device": str(capture.device)}))
    path = _path(key)
    try:
        write_cached(path, to_json(_FORM, kept, indent=None))
        drop_oldest(path.parent, MOST_CAPTURES)
    except OSError as error:
        log.info("captures cannot be kept in %s: %s", path.parent, error.strerror)


def _path(key: str) -> Path:
    return cache_dir() / "captures" / f"{key}.json"


def _transformers() -> tuple[str, str | None] | None:
    """Return the version of transformers and where it is, without importing it, which takes 0.7 s."""
    found = importlib.util.find_spec("transformers")
    return None if found is None else (importlib.metadata.version("transformers"), found.origin)


def _source_digest() -> str:
    """Return the digest of all source of this package: its version stays the same while it is worked on."""
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
