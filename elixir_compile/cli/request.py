"""Turn the arguments of `plan` and `verify` into options, a machine and a captured step."""

import gc
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from elixir_compile.api.plan import named_cluster
from elixir_compile.api.preview.capture import Capture
from elixir_compile.api.preview.few_layers import capture_model
from elixir_compile.api.preview.kept_captures import capture_key, keep_capture, kept_capture
from elixir_compile.api.preview.models import TextBatch, find_model
from elixir_compile.capture.tracing import collector_off
from elixir_compile.errors import InvalidOption
from elixir_compile.hardware import Cluster, preset_of_ranks
from elixir_compile.options import Options, parse_options
from elixir_compile.search.joint.loss import Chunks

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The arguments of a command line, as typed."""

    model: str
    batch: int
    seq: int
    dtype: str
    recompute: bool
    hardware: str | None
    ranks: int
    options: Mapping[str, object] = field(default_factory=dict)
    """Options of the backend by name; a value of None stands for the default."""

    def parsed_options(self) -> Options:
        """Return the parsed options. Raises InvalidOption."""
        return parse_options({name: value for name, value in self.options.items() if value is not None})

    def cluster(self) -> Cluster | None:
        """Return the machine to plan for, or None for this machine.

        Raises UnknownHardware, ProfileFileError, or InvalidOption if `ranks` contradicts the hardware.
        """
        if self.hardware is None or self.ranks == 1:
            if self.ranks != 1:
                raise InvalidOption("ranks", self.ranks, "1 without --hardware: this machine is planned for alone")
            return named_cluster(self.hardware)
        is_counted = self.hardware.lstrip()[:1].isdecimal()
        if Path(self.hardware).suffix != ".json" and not is_counted:
            return preset_of_ranks(self.hardware, self.ranks)
        cluster = named_cluster(self.hardware)
        if cluster is not None and cluster.num_ranks != self.ranks:
            raise InvalidOption("ranks", self.ranks, f"{cluster.num_ranks}, as {self.hardware} has devices")
        return cluster

    def capture(self, *, dynamic: bool = False, chunks: Chunks | None = None) -> Capture:
        """Return the captured step of the model; its batch is symbolic if `dynamic`.

        `chunks` splits the loss. Raises UnknownModel, UnsupportedModel, or InvalidOption for an unknown dtype.
        """
        if self.dtype not in DTYPES:
            raise InvalidOption("dtype", self.dtype, "one of " + ", ".join(DTYPES))
        # Torch never makes a dimension of size 1 symbolic.
        batch = max(self.batch, 2) if dynamic else self.batch
        text = TextBatch(batch=batch, seq=self.seq, dtype=DTYPES[self.dtype], recompute=self.recompute)
        options = self.parsed_options()
        with collector_off():  # imports of transformers and new models make many objects
            key = capture_key(self.model, text, options, dynamic=dynamic, chunks=chunks)
            capture = None if key is None else kept_capture(key)
            if capture is None:
                model, inputs = find_model(self.model, text)
                capture = capture_model(model, inputs, options=options, dynamic=dynamic, chunks=chunks, may_fork=True)
                if key is not None:
                    keep_capture(key, capture)
            gc.freeze()  # keeps the collector off torch's leftovers: 5 MB per layer, 1 s per collection
        return replace(capture, graph=replace(capture.graph, name=_title(self.model)))


def _title(model: str) -> str:
    """Return the name of `model` for a plan: the name of a shape, or the last part of a path without its suffix."""
    return Path(model.rpartition(":")[0] or model).stem or model
