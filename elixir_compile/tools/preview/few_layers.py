"""Derive the step of a model with many equal layers from the captures of models with 2, 3 and 4 of these layers."""

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

from elixir_compile.base.collector import collector_off
from elixir_compile.base.control_groups import num_usable_cores
from elixir_compile.base.errors import InvalidPlan, UnsupportedModel
from elixir_compile.base.options import Options
from elixir_compile.compat.platforms import is_accelerator_in_use
from elixir_compile.ir import StorageId
from elixir_compile.search.joint.loss import Chunks
from elixir_compile.tools.preview.capture import Capture, Inputs, capture_step
from elixir_compile.tools.preview.graph_lines import graph_of_line, line_of
from elixir_compile.tools.preview.linear import Line, Record, names_of, proved, record
from elixir_compile.tools.preview.models import Configured
from elixir_compile.tools.preview.same_layers import hide_unlike

Value = TypeVar("Value")

_PATIENCE_S = 60.0
"""Seconds to wait for the result of a child, after this process has done its own work. The captures of both processes
take seconds."""


@contextlib.contextmanager
def beside(work: Callable[[], Value]) -> Iterator[Callable[[], Value]]:
    """Do `work` in a forked process during the context; yield a function that waits for the result and returns it.

    The result is pickled. If no process can be forked, or if it fails, the yielded function does `work` in this
    process. The output of the child is dropped, and the child ends with the context.
    """
    if not _may_fork():
        yield work
        return
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # libraries with threads stop them for a fork
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
    """Return whether a fork is safe and makes captures faster.

    It is safe on Linux if Python knows of a single thread and the process has used no accelerator; libraries of other
    systems do not expect forks. It is faster if half of the cores are idle, as both processes import and initialise
    Inductor: on two busy cores, two processes took 24 s and a single process 16 s.
    """
    is_alone = threading.active_count() == 1 and not is_accelerator_in_use()
    if sys.platform != "linux" or not is_alone:
        return False
    return os.getloadavg()[0] <= num_usable_cores() / 2


def _answer(work: Callable[[], object], writing: int) -> None:
    """In the child: do `work`, write its pickled result to the pipe `writing`, and always end the process."""
    try:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
        torch.set_num_threads(1)  # a fork does not copy the threads of the parent
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(pickle.dumps(work()))
    finally:
        os._exit(0)


def _read(reading: int) -> bytes:
    """Return the bytes that the child wrote to the pipe `reading`; empty if it failed or did not end in time."""
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
"""Numbers of layers of the captured models. The first and the last layer of Llama save other values than the rest; a
model of 4 layers is the smallest with two layers between them."""
LEAST_LAYERS = 16
"""A model of fewer layers is captured with all of them: three captures, of 9 layers in all, take as long."""
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
    """Return the capture of `model`, which may be a configuration; see `capture_step` for the other arguments.

    A configured model with at least `least_layers` equal layers is captured with few of them, which is faster. If the
    process `may_fork`, this uses two cores.
    """

    def capture(model: nn.Module | Callable[[], nn.Module]) -> Capture:
        return capture_step(model, example_inputs, options=options, dynamic=dynamic, chunks=chunks)

    if not isinstance(model, Configured):
        return capture(model)
    if model.num_layers is not None and model.num_layers >= max(least_layers, SIZES[-1] + 1):
        try:
            with collector_off():
                return _derived(model, model.num_layers, capture, may_fork=may_fork)
        except (InvalidPlan, UnsupportedModel) as error:
            log.info("%s is captured with all its layers: %s", model.name, error)
    return capture(model.model())


def _derived(model: Configured, num_layers: int, capture: Callable[[nn.Module], Capture], *, may_fork: bool) -> Capture:
    """Return the capture of `model` with `num_layers` layers, derived from captures with the layers of `SIZES`.

    Raises UnsupportedModel or InvalidPlan if it cannot be derived.
    """
    full = model.model()
    few = {count: model.model(count) for count in SIZES}
    for count, module in few.items():
        hide_unlike(module, full, few_layers=count, layers=num_layers)
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
    _require_parameters(made, full)
    return made


def _require_parameters(made: Capture, full: nn.Module) -> None:
    """Raise UnsupportedModel unless each trained parameter of `made` has a trained namesake of its size in `full`."""
    params = dict(full.named_parameters())
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
    """Return the capture with the values of `line`; values that do not depend on the number of layers come from `like`.

    Raises InvalidPlan if the graph is not legal.
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
