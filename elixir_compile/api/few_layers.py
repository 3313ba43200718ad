"""The step of a model of many equal layers, written from those of 2, 3 and 4 layers instead of captured.

    configuration --> 2, 3 and 4 layers, captured --> one law for all three --> the step of all layers

It is the step that a capture of all layers gives, op for op. Each condition that fails leads to that capture:

  modules    layers are modules alike, and what they differ in, as their number, is read by no trace (`same_layers`)
  steps      one law gives the step of 4 layers from that of 3, and those of 2 and 3 from that of 4
             (`analysis.linear`)
  result     its parameters are those of the model of all layers, and it is a graph whose names fit together
"""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

from torch import nn

from elixir_compile.analysis.graph_lines import graph_of_line, line_of
from elixir_compile.analysis.linear import Line, Record, names_of, proved, record
from elixir_compile.api.capture import Capture, Inputs, capture_step
from elixir_compile.api.child import beside
from elixir_compile.api.configured import Configured
from elixir_compile.api.loss import Chunks
from elixir_compile.api.same_layers import hide_unlike
from elixir_compile.capture.collector import collector_off
from elixir_compile.errors import InvalidPlan, UnsupportedModel
from elixir_compile.ir import StorageId
from elixir_compile.options import Options

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
