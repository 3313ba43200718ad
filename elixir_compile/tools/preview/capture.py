"""Capture the training step of a model from example inputs without allocating its weights, make problems of it, and
refuse samples too long for the model.
"""

import copy
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import fx, nn
from torch.optim import Optimizer

from elixir_compile import compat
from elixir_compile.base.errors import InvalidOption, UnsupportedModel
from elixir_compile.base.options import Options
from elixir_compile.compat.platforms import accelerator
from elixir_compile.graph.capture.captured import Captured
from elixir_compile.graph.capture.loss import chunk_loss, find_loss
from elixir_compile.graph.capture.node_facts import key_of, parameter, source_of, value_of
from elixir_compile.graph.capture.tracing import trace_step
from elixir_compile.graph.ops.optimizers import add_master, has_master
from elixir_compile.graph.ops.registry import slot_of
from elixir_compile.graph.ops.shards import DTensor, parts_of
from elixir_compile.ir import Kind, Param, StepGraph, StorageId
from elixir_compile.ir.graph import graph_at
from elixir_compile.ir.hardware import Cluster
from elixir_compile.optim.adamw import HybridAdamW
from elixir_compile.optim.generic.class_rule import ClassRule
from elixir_compile.runtime.executor import Executor
from elixir_compile.search import Problem
from elixir_compile.search.joint.variants import Chunks, possible_chunks
from elixir_compile.session.backend import trace_unmanaged, with_compiler
from elixir_compile.session.cast_and_shard import gets_master, scales_of, torch_dtype
from elixir_compile.session.machine import library_bytes, scalar_bytes
from elixir_compile.session.model import ManagedModel
from elixir_compile.session.neighbours import state_of_hybrid_adamw, unmanaged_state_bytes
from elixir_compile.session.planning import Memory, build_problem, graph_of

# ----------------------------------------------------------------------------------------------------------------------
# Refuse samples with more tokens than a model has positions for.
#
# On `meta` and under tracing a table of positions is never read, so a batch that is too long would get a plan, and the
# first real step would fail. Two rules find such batches. Computed positions, such as rotary ones, have no limit:
#
#     configuration   a sample of `input_ids` is longer than the number of positions in the configuration of a Hugging
#                     Face model, and the model has a table with a row for each (some tables have two rows more)
#     graph           a table is read at the positions 0, 1, ..., n - 1, and has fewer than n rows


_FIELDS = ("max_position_embeddings", "n_positions")
"""Fields of Hugging Face configurations with the number of positions."""
_EXTRA_ROWS = (0, 2)
"""Rows of a table beyond the number of positions; the tables of OPT and BART begin with two unused rows."""
_ATEN = torch.ops.aten
_SAME_VALUES = frozenset(
    {
        _ATEN.unsqueeze.default,
        _ATEN.expand.default,
        _ATEN.view.default,
        _ATEN.reshape.default,
        _ATEN.repeat.default,
        _ATEN.clone.default,
        _ATEN.alias.default,
        torch.ops.prims.convert_element_type.default,
    }
)
"""Ops whose result has the values of their first argument."""


def require_positions_of_config(model: nn.Module, inputs: Mapping[str, Any]) -> None:
    """Raise InvalidOption if `input_ids` in `inputs` is longer than the table of positions of a Hugging Face model."""
    config, tokens = getattr(model, "config", None), inputs.get("input_ids")
    limits = [limit for name in _FIELDS if type(limit := getattr(config, name, None)) is int]
    if not limits or not isinstance(tokens, torch.Tensor) or tokens.dim() < 2 or tokens.shape[1] <= limits[0]:
        return
    get_words = getattr(model, "get_input_embeddings", None)
    words = get_words() if callable(get_words) else None
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding) or module is words:
            continue
        if module.num_embeddings - limits[0] in _EXTRA_ROWS:
            raise _too_long(tokens.shape[1], limits[0], f"{name}.weight")


def require_positions_of_graph(captured: Captured) -> None:
    """Raise InvalidOption if the forward of `captured` reads a table at positions that it does not have."""
    for node in captured.forward.graph.nodes:
        if node.target is _ATEN.embedding.default:
            _require_rows(captured, source_of(node), node.args[1], 0)
        elif node.target is _ATEN.index.Tensor:
            for dim, index in enumerate(cast("Sequence[object]", node.args[1])):
                _require_rows(captured, source_of(node), index, dim)


def _require_rows(captured: Captured, table: fx.Node, index: object, dim: int) -> None:
    value, found = value_of(table), _positions(index)
    if found is None or not isinstance(value, torch.Tensor):
        return
    num_tokens, highest = found
    num_missing = highest + 1 - int(value.shape[dim])
    if num_missing > 0:
        name = captured.param_names[key_of(table)] if table.target is parameter else "a table"
        raise _too_long(num_tokens, num_tokens - num_missing, name)


def _positions(index: object) -> tuple[int, int] | None:
    """Return the number of positions in `index` and the highest; None if it is not made of 0, 1, ..., n - 1."""
    if not isinstance(index, fx.Node):
        return None
    if index.target is torch.ops.prims.iota.default:
        length, start = index.args[0], index.kwargs["start"]
        if isinstance(length, int) and isinstance(start, int) and index.kwargs["step"] == 1:
            return length, start + length - 1
        return None
    if index.target in _SAME_VALUES:
        return _positions(index.args[0])
    if index.target is _ATEN.add.Tensor and isinstance(index.args[1], int):
        found = _positions(index.args[0])
        return None if found is None else (found[0], found[1] + index.args[1])
    return None


def _too_long(num_tokens: int, limit: int, table: str) -> InvalidOption:
    expected = f"at most {limit} tokens in a sample, as {table} has no more positions: pass `--seq {limit}`"
    return InvalidOption("seq", num_tokens, f"{expected}, or shorter example inputs")


# ----------------------------------------------------------------------------------------------------------------------
# From a model and example inputs to the training step of the model, and to problems about this step.
#
# No weights are allocated, nothing is compiled or run, and the model stays as it is. A capture takes seconds and a
# problem much less, so a capture serves many machines and budgets.
#
# A stand-in of the model is traced: its modules and the shapes of its parameters, but not its weights. Every
# parameter of the stand-in is a view of one allocation, as large as the largest parameter. Nobody reads or writes this
# memory, so the operating system gives it addresses and no pages.


Inputs = Sequence[Any] | Mapping[str, Any]


class PlannedClass:
    """The state that the optimizer class `cls` will keep, before there is an optimizer of the user.

    Dry runs find it, see `optim.generic`. AdamW keeps the state of HybridAdamW. So does a parameter that the
    constructor refuses: Muon takes matrices alone.
    """

    def __init__(self, cls: type[Optimizer]) -> None:
        self._cls = cls
        self._made: dict[int, tuple[Optimizer, ClassRule] | None] = {}
        """By number of dimensions an optimizer of a small parameter, and its rule; None if it refuses one."""

    @classmethod
    def of_name(cls, name: str) -> "PlannedClass":
        """Return the class called `name`: a class of `torch.optim`, such as `muon`, or the dotted name of another.

        Raises InvalidOption if there is none.
        """
        known = {own.lower(): found for own, found in vars(torch.optim).items() if isinstance(found, type)}
        module, _, own = name.rpartition(".")
        try:
            found = getattr(importlib.import_module(module), own, None) if module else known.get(name.lower())
        except ImportError as error:
            raise InvalidOption("optimizer", name, f"a class that can be imported: {error}") from None
        if not (isinstance(found, type) and issubclass(found, Optimizer)):
            raise InvalidOption("optimizer", name, "a class of torch.optim, as muon, or the dotted name of another")
        return cls(found)

    def state_of(self, param: torch.Tensor) -> Param:
        """Return the state of `param`. Raises InvalidOption if no plan may place it, or if the class needs arguments
        beside parameters."""
        if self._cls is torch.optim.AdamW or issubclass(self._cls, HybridAdamW):
            return state_of_hybrid_adamw(param)
        if param.dim() not in self._made:
            small = nn.Parameter(torch.zeros((2,) * param.dim(), device="cpu"))
            try:
                optimizer = cast("Callable[[list[nn.Parameter]], Optimizer]", self._cls)([small])
                self._made[param.dim()] = optimizer, ClassRule(self._cls, optimizer)
            except ValueError:  # as torch's optimizers refuse a parameter
                self._made[param.dim()] = None
            except TypeError as error:
                because = f"a class that is made of parameters alone: {error}"
                raise InvalidOption("optimizer", self._cls.__name__, because) from None
        made = self._made[param.dim()]
        if made is None:
            return state_of_hybrid_adamw(param)
        group = {**made[0].param_groups[0], "params": [param]}
        if because := made[1].why_not_placed([group]):
            raise InvalidOption("optimizer", self._cls.__name__, f"a class whose state plans place: {because}")
        return made[1].param_state(param, group)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """One captured training step, and the facts about its parameters on which a plan depends."""

    graph: StepGraph
    device: torch.device
    """The device of the capture; kernels, such as those of attention, differ between devices."""
    params: Mapping[StorageId, Param]
    """The trained parameters, with the state that HybridAdamW keeps, or the optimizer class of the capture."""
    held_bytes: int
    """Bytes of parameters on the device now; 0 for a model on `meta`."""
    base_bytes: int
    """Device bytes outside of any plan: parameters that the step does not read, workspaces of matrix products, and a
    few bytes for each parameter."""
    chunks: Chunks | None = None
    """How the loss could be chunked; None if it could not be chunked, or is chunked already."""
    loss_chunks: int = 1
    """The number of chunks in which the graph computes its loss."""
    batch_symbol: str | None = None
    """The symbol of the first dimension of the inputs; None unless the step was captured as dynamic."""

    def at_batch(self, batch: int) -> "Capture":
        """Return the step for batches of `batch` samples.

        Raises UnsupportedModel if the graph fixes the batch.
        """
        if self.batch_symbol is None:
            because = "its graph fixes the batch, so it cannot be planned for another one without a new capture"
            raise UnsupportedModel(self.graph.name, because)
        return replace(self, graph=graph_at(self.graph, {self.batch_symbol: batch}))

    def trained(self, options: Options, state_bytes_per_element: int | None = None) -> Mapping[StorageId, Param]:
        """Return the trained parameters, with the bytes of their gradients on one rank or after the reduce of several.

        Their state is that of the optimizer of the capture, by default HybridAdamW. `state_bytes_per_element` replaces
        it; 12 are fp32 master weights and moments.
        """
        param_bytes = {storage.id: storage.nbytes for storage in self.graph.storages if storage.kind is Kind.PARAM}
        found: dict[StorageId, Param] = {}
        for name, param in self.params.items():
            is_wide = options.reduce_dtype is not None and param.has_master
            grad_nbytes = torch.float32.itemsize * param.numel if is_wide else param_bytes.get(name, 0)
            param = replace(param, grad_nbytes=grad_nbytes, reduce_dtype=options.reduce_dtype if is_wide else None)
            if state_bytes_per_element is not None:
                param = replace(param, state_nbytes=param.numel * state_bytes_per_element, narrower_nbytes=())
            found[name] = param
        return found

    def problem(self, cluster: Cluster, options: Options, *, state_bytes_per_element: int | None = None) -> Problem:
        """Return the problem of one rank of `cluster`, with the optimizer of the capture, under `budgets_bytes`.

        Raises InvalidOption for several ranks if the optimizer updates whole tensors.
        """
        device_bytes, host_bytes = budgets_bytes(cluster, options)
        if cluster.num_ranks > 1 and any(param.whole_update is not None for param in self.params.values()):
            expected = (
                "1 beside an optimizer that updates whole tensors: `prepare(..., whole=...)` chooses their owners"
            )
            raise InvalidOption("ranks", cluster.num_ranks, expected)
        trained = self.trained(options, state_bytes_per_element)
        params = {name: param.works_as(is_cpu=not cluster.copies_overlap) for name, param in trained.items()}
        memory = Memory(budget_bytes=device_bytes, base_bytes=self.base_bytes, host_budget_bytes=host_bytes)
        disk = options.disk_path is not None
        return build_problem(
            self.graph,
            cluster,
            options,
            params=params,
            hybrid=bool(self.params),
            memory=memory,
            disk=disk,
            accumulates=bool(options.accumulate),
            moves_what_fits=True,
        )


def budgets_bytes(cluster: Cluster, options: Options) -> tuple[int, int]:
    """Return the device budget and the host budget of one rank of `cluster`.

    A budget missing in `options` is the memory of the profile less its reserve. The ranks of a node share the host
    memory equally.
    """
    device_bytes, host_bytes = options.device_memory, options.host_memory
    if device_bytes is None:
        device_bytes = cluster.device.memory_bytes - cluster.device.reserve_bytes
    if host_bytes is None:
        host_bytes = (cluster.host.memory_bytes - cluster.host.reserve_bytes) // cluster.num_local_ranks
    return device_bytes, host_bytes


def capture_step(
    model: "nn.Module | Callable[[], nn.Module]",
    example_inputs: Inputs,
    *,
    device: "torch.device | str | None" = None,
    options: Options | None = None,
    dynamic: bool = False,
    chunks: Chunks | None = None,
    optimizer: PlannedClass | None = None,
) -> Capture:
    """Return the training step of `model` on `example_inputs`, positional or by name; only their shapes count.

    `device` is by default the device of the first parameter that is not on `meta`, else `cuda` if it is available, else
    `cpu`. If `dynamic`, the first dimension of every input is symbolic. The loss is computed in `chunks`, found by an
    earlier capture, if they are given. `optimizer` will train the model, by default HybridAdamW. Raises
    UnsupportedModel if the model cannot be traced as one graph or trains nothing, and InvalidOption if samples have
    more tokens than the model has positions, or if plans do not place the state of `optimizer`.
    """
    model = _built(model)
    held = (param.device for param in model.parameters() if param.device.type != "meta")
    target = torch.device(device) if device is not None else next(held, None) or accelerator() or torch.device("cpu")
    param_dtype = None if options is None else options.param_dtype
    own, memory = _stand_in(model, target, None if param_dtype is None else torch_dtype(param_dtype))
    managed = ManagedModel([own], target, originals=[model])
    managed.swap_modules()
    managed.move_rest()
    args, kwargs = _like(example_inputs, target, dynamic=dynamic)
    require_positions_of_config(model, kwargs)
    options = with_compiler(options or Options())
    possible: list[Chunks | None] = []

    def edit(gm: fx.GraphModule, inputs: Sequence[Any]) -> Sequence[Any]:
        inputs = trace_unmanaged(gm, inputs, managed)
        possible.append(possible_chunks(find_loss(gm), options) if chunks is None else None)
        if chunks is not None:
            # The loss is looked for again: `chunks` may be of a model with fewer layers, and nodes have other names.
            chunk_loss(gm, find_loss(gm) or chunks.region, chunks.num_chunks)
        return inputs

    captured = trace_step(own, args, kwargs, name=managed.executor.name, inner=options.inner, edit=edit)
    require_positions_of_graph(captured)
    # Graphs are reference cycles: without this, the parameters would count for the device until the collector runs.
    memory.resize_(0)
    tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor) and value.dim())
    batch = next((value.shape[0] for value in tensors), None) if dynamic else None
    parts = (part for param in model.parameters() for part in parts_of(param).values())
    on_device = {id(part): part for part in parts if part.device == target}
    held_bytes = sum(part.numel() * part.element_size() for part in on_device.values())
    made = _capture(
        captured,
        managed.executor,
        held_bytes,
        batch,
        state_of_hybrid_adamw if optimizer is None else optimizer.state_of,
    )
    return replace(made, chunks=possible[0], loss_chunks=1 if chunks is None else chunks.num_chunks)


def _capture(
    captured: Captured,
    executor: Executor,
    held_bytes: int,
    batch: int | None,
    state_of: Callable[[torch.Tensor], Param],
) -> Capture:
    read = set(captured.param_names.values())
    unread_bytes = sum(slot.nbytes for slot in executor.slots.values() if slot.name not in read)
    slots = [executor.slots[name] for name in captured.param_names.values()]
    trained = {StorageId(slot.name): slot.param for slot in slots if slot.param.requires_grad}
    graph = graph_of(captured, executor, {})
    batches = [symbol for symbol, value in graph.symbols if value == batch]
    return Capture(
        graph=graph,
        device=executor.device,
        params={
            name: replace(state_of(param), numel=param.numel(), has_master=has_master(param))
            for name, param in trained.items()
        },
        held_bytes=held_bytes,
        base_bytes=unread_bytes
        + unmanaged_state_bytes(executor)
        + library_bytes(executor.device)
        + scalar_bytes(executor.slots.values(), executor.device),
        batch_symbol=batches[0] if len(batches) == 1 else None,
    )


def _like(inputs: Inputs, device: torch.device, *, dynamic: bool) -> tuple[list[Any], dict[str, Any]]:
    """Return positional and keyword arguments with the shapes of `inputs` on `device`; repeated tensors stay equal."""
    if isinstance(inputs, torch.Tensor):
        inputs = (inputs,)
    made: dict[int, torch.Tensor] = {}
    if isinstance(inputs, Mapping):
        return [], {name: _empty(value, device, made, dynamic) for name, value in inputs.items()}
    if isinstance(inputs, Sequence) and not isinstance(inputs, str):
        return [_empty(value, device, made, dynamic) for value in inputs], {}
    raise InvalidOption("example_inputs", inputs, "a tuple of tensors, or a dict of keyword arguments")


def _empty(value: Any, device: torch.device, made: dict[int, torch.Tensor], dynamic: bool) -> Any:
    if isinstance(value, Mapping):
        return {name: _empty(item, device, made, dynamic) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_empty(item, device, made, dynamic) for item in value)
    if not isinstance(value, torch.Tensor):
        return value
    wrapping = compat.Wrapping.of(value)
    if id(value) not in made and wrapping is not None:
        inside = (_empty(inner, device, made, dynamic=False) for inner in compat.plain_inside(value).values())
        made[id(value)] = wrapping.around(inside).requires_grad_(value.requires_grad)
    if id(value) not in made:
        empty = compat.like_in_strides(value, value.stride(), device)
        if dynamic and empty.dim():
            compat.mark_dynamic(empty, 0)
        made[id(value)] = empty.requires_grad_(value.requires_grad)
    return made[id(value)]


def _built(model: "nn.Module | Callable[[], nn.Module]") -> nn.Module:
    """Return `model`; if it is a function, the module that it builds on the `meta` device, where parameters take no
    memory.

    Raises InvalidOption if `model` is neither a module nor a function that returns one.
    """
    if isinstance(model, nn.Module):
        return compat.undo_compile(model)
    if not callable(model):
        raise InvalidOption("model", model, "a torch.nn.Module, or a function that returns one")
    with torch.device("meta"):
        made = model()
    if not isinstance(made, nn.Module):
        raise InvalidOption("model", made, "a function that returns a torch.nn.Module")
    return compat.undo_compile(made)


def _stand_in(
    model: nn.Module, device: torch.device, dtype: torch.dtype | None = None
) -> tuple[nn.Module, torch.UntypedStorage]:
    """Return a copy of `model` without its weights, and the allocation shared by the parameters of the copy.

    The buffers of the copy are on `device`. If `dtype` is given, its parameters are as after a cast to `dtype`, with
    masters. `model` stays as it is.

    Raises UnsupportedModel if the model has no parameters, a parameter has no shape yet or is cut along a tensor axis,
    or the model cannot be copied.
    """
    params = list(model.parameters())
    if not params:
        raise UnsupportedModel(type(model).__name__, "it has no parameters, so there is nothing to place")
    memo: dict[int, Any] = {}
    scales = scales_of(model.modules())
    shaped = [param for param in params if not isinstance(param, nn.parameter.UninitializedParameter)]
    memory = torch.UntypedStorage(max((param.numel() * param.element_size() for param in shaped), default=0))
    for name, param in model.named_parameters():
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise UnsupportedModel(name, "it has no shape yet: run the model once on a batch")
        _require_no_tensor_axis(name, param)
        is_cast = dtype is not None and id(param) not in scales and gets_master(param, dtype)
        cast_to = dtype if is_cast and dtype is not None else param.dtype
        if type(param.data) is torch.Tensor and torch.ops.aten.is_non_overlapping_and_dense(param.data):
            empty = torch.empty(0, dtype=cast_to, device=memory.device)
            value = empty.set_(memory, 0, param.shape, param.stride())
        else:  # with gaps in memory, or of a tensor subclass, it keeps its values: no plan moves it
            value = param.detach().to(cast_to)
        own = nn.Parameter(value, requires_grad=param.requires_grad)
        if is_cast or has_master(param):
            add_master(own, None)
        memo[id(param)] = own
    for module in model.modules():
        # Tensors that a module keeps as plain attributes are constants of its graph.
        for value in (*module._buffers.values(), *vars(module).values()):
            if isinstance(value, torch.Tensor) and id(value) not in memo:
                is_there = value.device == device
                memo[id(value)] = value.detach() if is_there else torch.zeros_like(value, device=device)
    try:
        return copy.deepcopy(model, memo), memory
    except Exception as error:
        reason = f"it cannot be copied ({error}). Pass a function that makes it instead"
        raise UnsupportedModel(type(model).__name__, reason) from error


def _require_no_tensor_axis(name: str, param: nn.Parameter) -> None:
    """Raise UnsupportedModel if `param` is a DTensor, unless `prepare` cut it along data axes alone."""
    slot = slot_of(param)
    if isinstance(param, DTensor) and (slot is None or slot.shard is not None):
        axes = " x ".join(map(str, param.device_mesh.shape))
        because = (
            f"it is cut over a mesh of {axes} ranks, and a plan without a run is for one rank with plain parameters. "
            "Prepare and compile the model itself, under `init_process_group('fake', rank=0, world_size=...)` if the "
            "ranks are not there, and read `compilations(model)[-1].plan` after a forward"
        )
        raise UnsupportedModel(name, because)
