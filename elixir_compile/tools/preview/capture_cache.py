"""Cache captures on disk: the step of a model and batch is captured once, and later commands read it.

    key = SHA-256 of the model's name or configuration, its batch, the options that a capture reads, the versions of
          torch and transformers, the processor, and this package's source
    <cache folder>/captures/<key>.json

A capture depends on neither the machine nor the budget of a plan, so a file serves all machines and budgets. Only the
command line uses these files, because in its process no user code has changed the behaviour of torch. The files may be
deleted at any time.
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
from typing import Any

import torch

from elixir_compile.base.codec import Form, from_json, to_json
from elixir_compile.base.errors import InvalidPlan
from elixir_compile.base.folders import cache_dir, drop_oldest, read_cached, write_cached
from elixir_compile.base.options import Options
from elixir_compile.base.version import __version__, source_digest
from elixir_compile.compat.platforms import accelerator_type
from elixir_compile.ir import StepGraph, StorageId
from elixir_compile.search.joint.loss import Chunks
from elixir_compile.session.backend import with_compiler
from elixir_compile.tools.preview.capture import Capture
from elixir_compile.tools.preview.models import TextBatch, description_of

log = logging.getLogger("elixir_compile")

MOST_CAPTURES = 20
"""The most files in the folder; a capture of a Llama with 32 layers has 2 MB."""
_READ_BY_A_CAPTURE = ("activations", "inner", "param_dtype")
"""The options of the backend that a capture reads."""
_READ_BY_TORCH = ("TORCH", "PYTORCH", "TRANSFORMERS")
"""Prefixes of the environment variables that change the behaviour of torch and transformers."""
_FORM = Form(
    what="capture",
    version=1,
    error=lambda field, expected, got: InvalidPlan(f"{field}: expected {expected}, got {got!r:.80}"),
)
Pairs = tuple[tuple[StorageId, int], ...]
NarrowerPairs = tuple[tuple[StorageId, tuple[tuple[str, int], ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _CaptureFile:
    """A `Capture` with fields for JSON. Mappings are tuples of pairs, which keep their order."""

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
    narrower_bytes: NarrowerPairs


def capture_key(model: str, text: TextBatch, options: Options, *, dynamic: bool, chunks: Chunks | None) -> str | None:
    """Return 32 hex digits that differ if anything differs on which the capture of the named `model` depends.

    Returns None if the capture is not cached. A model made by a function of the user is not, as the function may do
    anything. On a machine with a GPU no capture is cached: the name of the GPU would be part of the key, and to ask for
    it initialises CUDA, after which no process can be forked.
    """
    description = description_of(model)
    if description is None or not options.plan_cache or accelerator_type() is not None:
        return None
    options = with_compiler(options)
    parts = [
        ("model", description, text, dynamic, chunks),
        ("options", [(name, getattr(options, name)) for name in _READ_BY_A_CAPTURE]),
        ("source", __version__, source_digest("**/*.py")),
        ("torch", torch.__version__),  # a public name
        ("libraries", platform.python_version(), _transformers()),
        ("processor", torch.backends.cpu.get_cpu_capability()),
        ("environment", sorted(item for item in os.environ.items() if item[0].startswith(_READ_BY_TORCH))),
    ]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def cached_capture(key: str) -> Capture | None:
    """Return the capture that an earlier command stored as `key`; None if there is no readable file.

    A file that cannot be read is removed, with a line in the log.
    """
    path = _path(key)
    cached = read_cached(path, lambda text: from_json(_FORM, _CaptureFile, text), _drop)
    if cached is None:
        return None
    with suppress(OSError):  # in a read-only folder files do not age
        os.utime(path)
    values: dict[str, Any] = {field.name: getattr(cached, field.name) for field in fields(cached)}
    values |= {name: dict(values[name]) for name in ("numels", "state_bytes", "masters")}
    values["narrower_bytes"] = {name: dict(sizes) for name, sizes in cached.narrower_bytes}
    values["device"] = torch.device(cached.device)
    return Capture(**values)


def store_capture(key: str, capture: Capture) -> None:
    """Store `capture` as `key` for later commands, and drop the oldest captures if there are too many.

    If the folder cannot be written, the log gets a line.
    """
    values: dict[str, Any] = {field.name: _as_pairs(getattr(capture, field.name)) for field in fields(capture)}
    values["device"] = str(capture.device)
    cached = _CaptureFile(**values)
    path = _path(key)
    try:
        write_cached(path, to_json(_FORM, cached, indent=None))
        drop_oldest(path.parent, MOST_CAPTURES)
    except OSError as error:
        log.info("captures cannot be cached in %s: %s", path.parent, error.strerror)


def _as_pairs(value: object) -> object:
    """Return a mapping as a tuple of its pairs, and so the mappings that are its values; any other value as it is."""
    return tuple((key, _as_pairs(each)) for key, each in value.items()) if isinstance(value, Mapping) else value


def _drop(path: Path, error: Exception) -> None:
    log.info("the cached capture %s cannot be read and is removed: %s", path, error)
    with suppress(OSError):  # it stays if the folder is read-only
        path.unlink(missing_ok=True)


def _path(key: str) -> Path:
    return cache_dir() / "captures" / f"{key}.json"


def _transformers() -> tuple[str, str | None] | None:
    """Return the version and the path of transformers, without the import, which takes 0.7 s."""
    found = importlib.util.find_spec("transformers")
    return None if found is None else (importlib.metadata.version("transformers"), found.origin)
