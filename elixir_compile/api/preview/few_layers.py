"""The step of a model of many equal layers, written from those of 2, 3 and 4 layers instead of captured."""

import contextlib
import logging
import os
import pickle
import select
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from torch import nn

from elixir_compile.analysis.graph_lines import graph_of_line, line_of
from elixir_compile.analysis.linear import Line, Record, names_of, proved, record
from elixir_compile.api.preview.capture import Capture, Inputs, capture_step
from elixir_compile.api.preview.models import Configured
from elixir_compile.api.preview.same_layers import hide_unlike
from elixir_compile.capture.tracing import collector_off
from elixir_compile.errors import InvalidPlan, UnsupportedModel
from elixir_compile.ir import StorageId
from elixir_compile.options import Options
from elixir_compile.problem.loss import Chunks

Value = TypeVar("Value")

_PATIENCE_S = 60.0
"""A child that has not answered so long after this process asked for its result is not waited for. The capture that it
makes takes seconds, as those do that this process makes meanwhile."""


@contextlib.contextmanager
def beside(work: Callable[[], Value]) -> Iterator[Callable[[], Value]]:
    """Do `work` in a forked process meanwhile; yield a function that waits for its result and returns it.

    The result is pickled. If no process can be forked, or if it fails, that function does `work` here, and raises what
    it raises. What the child prints is dropped, and it ends with the context.
    """
    if not _may_fork():
        yield work
        return
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that libraries have threads, which they stop for a fork
        child = os.fork()
    if child == 0:
        _answer(work, writing)
    os.close(writing)

    def result() -> Value:
        answer = _read(reading)
        return pickle.loads(answer) if answer else work()

    try:
        yield result
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)  # it has ended if it was waited for
        os.waitpid(child, 0)


def _may_fork() -> bool:
    """Whether the process has one thread, as far as Python knows, no CUDA context, and a core that nobody else uses; on
    Linux, as the libraries of other systems do not expect forks.

    Both processes import and initialise Inductor. On two cores that others use too, two processes took 24 s for what
    one does in 16 s.
    """
    is_alone = threading.active_count() == 1 and not torch.cuda.is_initialized()
    if sys.platform != "linux" or not is_alone:
        return False
    return os.getloadavg()[0] <= len(os.sched_getaffinity(0)) / 2


def _answer(work: Callable[[], object], writing: int) -> None:
    """Do `work` in the child, write its pickled result and end the child, whatever happens."""
    try:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
        torch.set_num_threads(1)  # the threads of the parent are not here
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(pickle.dumps(work()))
    finally:
        os._exit(0)


def _read(reading: int) -> bytes:
    """Return what the child wrote, nothing if it failed or did not come to an end."""
    ends_s = time.monotonic() + _PATIENCE_S
    pieces: list[bytes] = []
    while select.select([reading], [], [], max(0.0, ends_s - time.monotonic()))[0]:
        piece = os.read(reading, 1 << 20)
        if not piece:
            return b"".join(pieces)
        pieces.append(piece)
    return b""


log = logging.getLogger("elixir_compile")

SIZES = (2, 3, 4)
"""Layers of the models that are captured: 4 is the least at which Llama has two layers between its first and last two,
which save other values than the rest."""
LEAST_LAYERS = 16
"""A model of fewer layers is captured whole: three captures of 9 layers take as long."""
_MAPS = ("numels", "state_bytes", "masters")


def capture_model(
    model: nn.Module | Callable[[], nn.Module] | Configured,
    example_inputs: Inputs,
    *,
    options: Options | None = None,
    dynamic: bool = False,
    chunks: Chunks | None = None,
    least_layers: int = LEAST_LAYERS,
    may_fork: bool = False,
) -> Capture:
    """Return what `capture_step` returns for `model`, or for the model that a configuration describes: faster if it
    has `least_layers` layers or more that are alike. A process that `may_fork` uses two cores for that."""

    def capture(model: nn.Module | Callable[[], nn.Module]) -> Capture:
        return capture_step(model, example_inputs, options=options, dynamic=dynamic, chunks=chunks)

    if not isinstance(model, Configured):
        return capture(model)
    if model.num_layers is not None and model.num_layers >= max(least_layers, SIZES[-1] + 1):
        try:
            with collector_off():
                return _written(model, model.num_layers, capture, may_fork=may_fork)
        except (InvalidPlan, UnsupportedModel) as error:
            log.info("%s is captured whole: %s", model.name, error)
    return capture(model.model())


def _written(model: Configured, num_layers: int, capture: Callable[[nn.Module], Capture], *, may_fork: bool) -> Capture:
    """Return the capture of `num_layers` layers of `model`, of which few are captured.

    Raises UnsupportedModel or InvalidPlan if it does not follow from them.
    """
    whole = model.model()
    few = {count: model.model(count) for count in SIZES}
    for count, module in few.items():
        hide_unlike(module, whole, few_layers=count, layers=num_layers)
    *smaller, largest = few.values()
    work = partial(capture, largest)
    with beside(work) if may_fork else nullcontext(work) as largest_captured:
        captures = [*map(capture, smaller), largest_captured()]
    like = captures[-1]
    lines = [_line_of(each) for each in captures]
    if _capture_of(lines[-1], like) != like:
        raise UnsupportedModel(model.name, "names in its step cannot be told apart from their numbers")
    law = proved(*lines)
    if law is None:
        raise UnsupportedModel(model.name, "its step is not linear in the number of its layers")
    line = law.at(num_layers - SIZES[-1])
    if any(number < 0 for entry in line for number in entry.numbers):
        raise UnsupportedModel(model.name, "a number in its step falls with the layers")
    made = _capture_of(line, like)
    _require_parameters(made, whole)
    return made


def _require_parameters(made: Capture, whole: nn.Module) -> None:
    """Raise UnsupportedModel if `made` trains parameters that `whole` does not have so."""
    params = dict(whole.named_parameters())
    for name, numel in made.numels.items():
        param = params.get(name)
        if param is None or param.numel() != numel or not param.requires_grad:
            raise UnsupportedModel(made.graph.name, f"it has no parameter {name} of {numel} elements")


def _line_of(capture: Capture) -> list[Record]:
    """Return `capture` as a line of records."""
    line = [*line_of(capture.graph), record(("base_bytes",), str(capture.base_bytes))]
    for field in _MAPS:
        line += [record((field, value), name) for name, value in getattr(capture, field).items()]
    chunks = capture.chunks
    if chunks is not None:
        region = chunks.region
        numbers = (chunks.num_chunks, region.num_tokens, region.num_classes, region.logits_bytes, region.source)
        line.append(record(("loss", *numbers), region.name, *region.nodes))
    others = (capture.device, capture.held_bytes, capture.loss_chunks, capture.batch_symbol)
    return [*line, record(("others", *others))]


def _capture_of(line: Line, like: Capture) -> Capture:
    """Return the capture that `line` says; what does not depend on the number of layers is that of `like`.

    Raises InvalidPlan for a graph that cannot be.
    """
    kinds: dict[object, list[Record]] = {}
    for entry in line:
        kinds.setdefault(entry.fixed[0], []).append(entry)
    maps = {field: {StorageId(names_of(entry)[0]): entry.fixed[1] for entry in kinds.get(field, [])} for field in _MAPS}
    chunks = like.chunks
    if chunks is not None:
        name, *nodes = names_of(kinds["loss"][0])
        chunks = replace(chunks, region=replace(chunks.region, name=name, nodes=tuple(nodes)))
    return replace(
        like,
        graph=graph_of_line(line),
        base_bytes=int(names_of(kinds["base_bytes"][0])[0]),
        chunks=chunks,
        **maps,
    )
