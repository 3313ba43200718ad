"""Derive the step of a model with many equal layers from captures with 2, 3 and 4 of these layers, and check that its
layers are equal.
"""

import contextlib
import functools
import logging
import os
import pickle
import re
import select
import signal
import sys
import threading
import time
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeGuard, TypeVar

import torch
from torch import nn

from elixir_compile.base.errors import InvalidPlan, UnsupportedModel
from elixir_compile.base.options import Options
from elixir_compile.base.process import collector_off, num_usable_cores
from elixir_compile.compat.platforms import is_accelerator_in_use
from elixir_compile.ir import Op, OpId, StepGraph, Storage, StorageId
from elixir_compile.search.joint.variants import Chunks
from elixir_compile.tools.preview.capture import Capture, Inputs, PlannedClass, capture_step
from elixir_compile.tools.preview.models import Configured

# ----------------------------------------------------------------------------------------------------------------------
# Learn how a sequence grows with the number of layers of a model, and write it for any number of layers.
#
# A line is a sequence of records. Lines of `n` and of `n + 1` layers are equal except for blocks repeated by the added
# layer, and for numbers in the records, as the 37 of `fwd.mul_37`, which are `a + b * repeat + c * layers`:
#
#     2 layers    embed  A B  norm  loss  norm'  C D
#     3 layers    embed  A B  A B  norm  loss  norm'  C D  C D          blocks A B and C D, repeated for each layer
#
# A block may begin in the middle of a layer and end in the middle of the next one, and a layer may add several blocks:
# at the end of its forward, GPT-2 divides by the saved deviations of all its norms.
#
# `learned` finds a law from two lines. `proved` checks the law on three lines.


_DIGITS = re.compile(r"(\d+)")
_MOST_TRIES = 10_000
"""The most block lengths to try before a line counts as not linear; GPT-2 needs about ten."""


@dataclass(frozen=True, slots=True)
class Record:
    """An entry of a line: fixed values, and names with numbers in them."""

    fixed: tuple[Any, ...]
    """Values independent of the number of layers."""
    text: tuple[str, ...] = ()
    """The pieces of text around `numbers`, from before the first to after the last."""
    numbers: tuple[int, ...] = ()
    """Numbers depending, perhaps, on the number of layers."""
    is_sized: bool = False
    """If True, the last of `numbers` is a size. Records with different sizes are different, so a size may grow with the
    layers only if no other record of the line is equal but for its numbers."""


Line = Sequence[Record]


def record(fixed: Sequence[object], *names: str) -> Record:
    """Return the record of `fixed` and `names`, with the numbers in the names split off."""
    pieces = _DIGITS.split("\0".join(names))
    return Record(tuple(fixed), tuple(pieces[::2]), tuple(int(digits) for digits in pieces[1::2]))


def sized(entry: Record, size: int) -> Record:
    """Return `entry` with `size` as its last number."""
    return Record(entry.fixed, (*entry.text, ""), (*entry.numbers, size), is_sized=True)


def names_of(entry: Record) -> list[str]:
    """Return the names of `entry`. Numbers lose their leading zeros, and a size is appended to the last name."""
    pieces = [entry.text[0]]
    for number, text in zip(entry.numbers, entry.text[1:], strict=True):
        pieces += (str(number), text)
    return "".join(pieces).split("\0")


@dataclass(frozen=True, slots=True)
class _Block:
    """Records added by each further layer."""

    at: int
    """Index after the last block of its kind in the line of the law."""
    grown: tuple[tuple[int, ...], ...]
    """For each record, the difference of its numbers to those in the block before."""

    @property
    def length(self) -> int:
        return len(self.grown)


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """The growth of a line with the number of layers."""

    line: tuple[Record, ...]
    """The line for the number of layers from which others are counted."""
    slopes: tuple[tuple[int, ...], ...]
    """For each record, the increase of its numbers by a further layer."""
    blocks: tuple[_Block, ...]

    def at(self, more: int) -> list[Record]:
        """Return the line for `more` layers than `line` has; a negative number removes as many of each block."""
        written: list[Record] = []
        done = 0
        for block in self.blocks:
            written += self._moved(done, block.at + min(more, 0) * block.length, more)
            for number in range(1, more + 1):
                written += self._repeated(block, number, more)
            done = block.at
        return written + self._moved(done, len(self.line), more)

    def on(self, line: Line, fewer: int) -> "Law | None":
        """Return this law for `line`, which has `fewer` layers less; None if `line` lacks one of the blocks."""
        slopes: list[tuple[int, ...]] = []
        blocks: list[_Block] = []
        kinds, others = _kinds(self.line, line)
        done = 0
        for block in self.blocks:
            slopes += self.slopes[done : block.at - fewer * block.length]
            done = block.at
            blocks.append(replace(block, at=len(slopes)))
            begin = len(slopes) - block.length
            if begin < 0 or others[begin : len(slopes)] != kinds[done - block.length : done]:
                return None
        slopes += self.slopes[done:]
        return Law(line=tuple(line), slopes=tuple(slopes), blocks=tuple(blocks)) if len(slopes) == len(line) else None

    def is_steady(self) -> bool:
        """Return whether the numbers also grow by the law between the blocks within `line`."""
        (kinds,) = _kinds(self.line)
        for block in self.blocks:
            length, begin = block.length, block.at - block.length
            while begin >= length and kinds[begin - length : begin] == kinds[begin : begin + length]:
                own = (_minus(self.line[at], self.line[at - length]) for at in range(begin, begin + length))
                if block.grown != tuple(own):
                    return False
                begin -= length
        return True

    def _moved(self, begin: int, end: int, more: int) -> list[Record]:
        pairs = zip(self.line[begin:end], self.slopes[begin:end], strict=True)
        return [_plus(entry, slopes, more) for entry, slopes in pairs]

    def _repeated(self, block: _Block, number: int, more: int) -> list[Record]:
        """Return the records of `block`, `number` blocks later, in the line for `more` layers."""
        moved = self._moved(block.at - block.length, block.at, more)
        return [_plus(entry, grown, number) for entry, grown in zip(moved, block.grown, strict=True)]


def proved(fewest: Line, fewer: Line, more: Line) -> Law | None:
    """Return the law of three lines with `n`, `n + 1` and `n + 2` layers, based on the last; None if there is no law.

    `fewest` may lack a block: if the first and the last layer differ from the layers between, two layers have no block.
    """
    law = learned(fewer, more)
    if law is None or not law.is_steady() or law.at(-1) != list(fewer) or law.at(-2) != list(fewest):
        return None
    below, lowest = law.on(fewer, 1), law.on(fewest, 2)
    if below is None or below.at(1) != list(more):
        return None
    if lowest is not None and (lowest.at(1), lowest.at(2)) != (list(fewer), list(more)):
        return None
    return law


def _plus(entry: Record, slopes: Sequence[int], times: int) -> Record:
    if not any(slopes):
        return entry
    numbers = zip(entry.numbers, slopes, strict=True)
    grown = tuple(number + times * slope for number, slope in numbers)
    return Record(entry.fixed, entry.text, grown, entry.is_sized)


def learned(fewer: Line, more: Line) -> Law | None:
    """Return the law by which the line `more` follows from `fewer`, which has a layer less.

    None if `more` is not `fewer` with blocks repeated. The law holds for these lines and is a guess for others; see
    `proved`.
    """
    spans = _spans(fewer, more)
    if spans is None:
        return None
    slopes: list[tuple[int, ...]] = []
    blocks: list[_Block] = []
    removed = 0
    for begin, end in spans:
        slopes += [_minus(more[index], fewer[index - removed]) for index in range(len(slopes), begin)]
        length = end - begin
        slopes += slopes[-length:]
        blocks.append(_Block(end, tuple(_minus(more[i], more[i - length]) for i in range(begin, end))))
        removed += length
    slopes += [_minus(more[index], fewer[index - removed]) for index in range(len(slopes), len(more))]
    return Law(line=tuple(more), slopes=tuple(slopes), blocks=tuple(blocks))


def _minus(entry: Record, other: Record) -> tuple[int, ...]:
    return tuple(a - b for a, b in zip(entry.numbers, other.numbers, strict=True))


def _kinds(*lines: Line) -> list[list[tuple[Any, ...]]]:
    """Return for each record of `lines` a key, equal for records with the same text and other numbers."""
    counts: Counter[tuple[Any, ...]] = Counter()
    for line in lines:
        counts |= Counter((entry.fixed, entry.text) for entry in line if entry.is_sized)

    def kind(entry: Record) -> tuple[Any, ...]:
        is_alone = counts[entry.fixed, entry.text] < 2
        return (entry.fixed, entry.text) if is_alone else (entry.fixed, entry.text, entry.numbers[-1])

    return [[kind(entry) for entry in line] for line in lines]


def _spans(fewer: Line, more: Line) -> list[tuple[int, int]] | None:
    """Return the spans of `more` that repeat the records before them and whose removal gives `fewer`; None if there are
    none."""
    known: dict[tuple[Any, ...], int] = {}
    few, many = ([known.setdefault(kind, len(known)) for kind in kinds] for kinds in _kinds(fewer, more))
    found: list[tuple[int, int, int]] = []  # begin and end of a span, and the records of `fewer` read before it
    at, done, shortest = 0, 0, 1  # records read of `fewer`; of `more`; the first length to try
    for _ in range(_MOST_TRIES):
        if shortest == 1:
            while at < len(few) and done < len(many) and few[at] == many[done]:
                at, done = at + 1, done + 1
            if at == len(few) and done == len(many):
                return [(begin, end) for begin, end, _ in found]
        # The smallest length of a span that repeats the records before it, and behind which `many` goes on as `few`.
        longest = min(done, (len(many) - done) - (len(few) - at))
        length = next(
            (
                length
                for length in range(shortest, longest + 1)
                if many[done + length : done + length + 1] == few[at : at + 1]
                and many[done : done + length] == many[done - length : done]
            ),
            None,
        )
        if length is not None:
            found.append((done, done + length, at))
            done, shortest = done + length, 1
        elif found:
            done, end, at = found.pop()
            shortest = end - done + 1
        else:
            return None
    return None


# ----------------------------------------------------------------------------------------------------------------------
# Turn a graph into such a line of records, and back.
#
# A name without a number is number 0 of its kind, as fx counts: `mm`, `mm_1`, `mm_2`.


_NODE = re.compile(r"((?:fwd|bwd)\.[^.]*)(.*)")
_NUMBER = re.compile(r"_\d+$")
_FIRST = "_0"


def line_of(graph: StepGraph) -> list[Record]:
    """Return `graph` as a line: each storage, op, read, write, output and alias is a record.

    The record of a storage also names the module of the op writing it. So layers of an encoder differ from layers
    of a decoder, and the last layer differs from the ops after it.
    """
    modules = {name: op.module for op in reversed(graph.ops) for name in op.writes}
    nbytes = {storage.id: storage.nbytes for storage in graph.storages}
    line = [record(("graph", graph.name, graph.symbols, graph.batch, graph.batch_size, graph.undivided))]
    for storage in graph.storages:
        slices = (storage.batched, storage.consecutive)
        fixed = ("storage", storage.kind, storage.dtype, storage.size, storage.of is None, *slices)
        names = (_counted(storage.id), storage.of or "", modules.get(storage.id, ""))
        line.append(sized(record(fixed, *names), storage.nbytes))
    for op in graph.ops:
        touched_bytes = sum(nbytes[name] for name in (*op.reads, *op.writes))
        moved_bytes = None if op.moved_bytes == touched_bytes else op.moved_bytes  # the update op moves no bytes
        costs = (op.flops, moved_bytes, op.flops_size, op.kernel, op.once, op.mixes, op.ring, op.launches)
        line.append(record(("op", op.target, op.phase, op.source, *costs), _counted(op.id), op.module))
        line += [record(("read",), _counted(name)) for name in op.reads]
        line += [record(("write",), _counted(name)) for name in op.writes]
    line += [record(("output",), _counted(name)) for name in graph.outputs]
    line += [
        record(("alias",), _counted(value), _counted(name), modules.get(name, "")) for value, name in graph.aliases
    ]
    return line


def graph_of_line(line: Line) -> StepGraph:
    """Return the graph in `line`; records of other kinds are ignored.

    If the names `mm` and `mm_0` both occur, which `line_of` cannot tell apart, the result is another graph than before.
    Raises InvalidPlan if the graph contradicts itself.
    """
    kinds: dict[object, list[Record]] = {}
    ops: list[tuple[Record, list[Record], list[Record]]] = []
    for entry in line:
        kind = entry.fixed[0]
        if kind == "op":
            ops.append((entry, [], []))
        elif kind == "read":
            ops[-1][1].append(entry)
        elif kind == "write":
            ops[-1][2].append(entry)
        else:
            kinds.setdefault(kind, []).append(entry)
    _, name, symbols, batch, batch_size, undivided = kinds["graph"][0].fixed
    storages: list[Storage] = []
    for entry in kinds.get("storage", []):
        _, kind, dtype, size, is_of_none, batched, consecutive = entry.fixed
        storage, of, _ = names_of(entry)
        storages.append(
            Storage(
                id=StorageId(_uncounted(storage)), nbytes=entry.numbers[-1], kind=kind, dtype=dtype,
                of=None if is_of_none else StorageId(of), size=size, batched=batched, consecutive=consecutive,
            )
        )  # fmt: skip
    nbytes = {storage.id: storage.nbytes for storage in storages}
    aliases = (names_of(entry) for entry in kinds.get("alias", []))
    return StepGraph(
        name=name,
        ops=tuple(_op(*parts, nbytes) for parts in ops),
        storages=tuple(storages),
        outputs=tuple(_storage_id(entry) for entry in kinds.get("output", [])),
        aliases=tuple((_uncounted(value), StorageId(_uncounted(of))) for value, of, _ in aliases),
        symbols=symbols,
        batch=batch,
        batch_size=batch_size,
        undivided=undivided,
    )


def _op(entry: Record, reads: Iterable[Record], writes: Iterable[Record], nbytes: Mapping[StorageId, int]) -> Op:
    _, target, phase, source, flops, moved_bytes, flops_size, kernel, once, mixes, ring, launches = entry.fixed
    name, module = names_of(entry)
    touched = [[_storage_id(other) for other in others] for others in (reads, writes)]
    if moved_bytes is None:
        moved_bytes = sum(nbytes.get(other, 0) for others in touched for other in others)
    return Op(
        id=OpId(_uncounted(name)), target=target, phase=phase, reads=tuple(touched[0]), writes=tuple(touched[1]),
        flops=flops, moved_bytes=moved_bytes, module=module, source=source, flops_size=flops_size, kernel=kernel,
        once=once, mixes=mixes, ring=ring, launches=launches,
    )  # fmt: skip


def _storage_id(entry: Record) -> StorageId:
    return StorageId(_uncounted(names_of(entry)[0]))


def _counted(name: str) -> str:
    """Return the name of a node or of its result, with `_0` added for the first of its kind."""
    if (node := _NODE.match(name)) is None or _NUMBER.search(node[1]):
        return name
    return node[1] + _FIRST + node[2]


def _uncounted(name: str) -> str:
    node = _NODE.match(name)
    return name if node is None else node[1].removesuffix(_FIRST) + node[2]


# ----------------------------------------------------------------------------------------------------------------------
# Check that all layers of a model equal the layers of a smaller model, so that a trace of few layers stands for all.
#
# A trace of few layers cannot show that a later layer differs in its class, in the shapes of its parameters or in a
# flag. So the modules of both models are compared, attribute by attribute. Attributes that differ, such as the number
# of a layer, are deleted from the smaller model. A trace that reads a deleted attribute then fails.


_OWN = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_backward_hooks"})
"""Attributes of every module whose contents are compared apart, or that do not matter to a forward."""


def hide_unlike(few: nn.Module, full: nn.Module, *, few_layers: int, layers: int) -> None:
    """Delete attributes from the modules of `few` that differ from the attributes of `full`.

    `few` is a model of `few_layers` layers, `full` the same model with `layers` layers. Raises UnsupportedModel if they
    differ in more than attributes, or if a layer shares a parameter with another module.
    """
    comparison = _Comparison(few_layers, layers)
    comparison.compare(few, full, "")
    if not comparison.num_stacks:
        raise UnsupportedModel(type(full).__name__, f"it has no stack of {layers} layers")
    owners: dict[int, str] = {}
    stacks = [path for path, module in full.named_modules() if _is_stack(module, layers)]
    for path, module in full.named_modules(remove_duplicate=False):
        for name, param in module._parameters.items():
            here = f"{path}.{name}"
            known = here if param is None else owners.setdefault(id(param), here)
            if known != here and any(at.startswith(f"{stack}.") for stack in stacks for at in (known, here)):
                raise UnsupportedModel(here, f"it is the parameter {known} too")
    for module, name in comparison.unlike.values():
        delattr(module, name)


def _is_stack(module: nn.Module, layers: int) -> TypeGuard[nn.ModuleList | nn.Sequential]:
    return isinstance(module, nn.ModuleList | nn.Sequential) and len(module) == layers


class _Comparison:
    """The comparison of the modules of two models."""

    def __init__(self, few_layers: int, layers: int) -> None:
        self._few_layers = few_layers
        self._layers = layers
        self.unlike: dict[tuple[int, str], tuple[nn.Module, str]] = {}
        """Attributes of the model of few layers that differ, by the id of their module and their name."""
        self.num_stacks = 0
        self._configs: dict[tuple[int, int], bool] = {}

    def compare(self, few: nn.Module, full: nn.Module, path: str) -> None:
        """Record the attributes in which `few` and `full`, both at `path`, differ.

        Raises UnsupportedModel if they differ in classes, children or tensors.
        """
        if _is_stack(few, self._few_layers) and _is_stack(full, self._layers):
            self.num_stacks += 1
            last = self._few_layers - 1
            for number, layer in enumerate(full):
                # The first layer stands for the first, the last for the last, and the layers between take turns.
                alike = 0 if number == 0 else last
                if 0 < number < self._layers - 1 and last >= 2:
                    alike = 1 + (number - 1) % (last - 1)
                self.compare(few[alike], layer, f"{path}.{number}")
            return
        tensors = (_forms(few._parameters), _forms(few._buffers)) == (_forms(full._parameters), _forms(full._buffers))
        if type(few) is not type(full) or list(few._modules) != list(full._modules) or not tensors:
            raise UnsupportedModel(path, "this layer is another module than those beside it")
        for name, child in few._modules.items():
            other = full._modules[name]
            if child is not None and other is not None:
                self.compare(child, other, f"{path}.{name}")
            elif child is not other:
                raise UnsupportedModel(path, f"only some layers have {name}")
        mine, others = vars(few), vars(full)
        for name in mine.keys() | others.keys():
            if name in _OWN:
                continue
            if name not in mine:
                raise UnsupportedModel(path, f"only some layers have {name}")
            try:
                is_same = name in others and self._is_same(_plain(name, mine[name]), _plain(name, others[name]))
            except (RuntimeError, TypeError, ValueError):  # for example, arrays compare element by element
                is_same = False
            if not is_same:
                self.unlike[id(few), name] = few, name

    def _is_same(self, mine: Any, other: Any) -> bool:
        if mine is other:
            return True
        if type(mine) is not type(other):
            return False
        if isinstance(mine, torch.Tensor):
            return _form(mine) == _form(other)
        if isinstance(mine, Mapping):
            return list(mine) == list(other) and all(self._is_same(mine[key], other[key]) for key in mine)
        if isinstance(mine, list | tuple):
            if len(mine) == self._few_layers and len(other) == self._layers:
                return all(self._is_same(mine[0], entry) for entry in (*mine, *other))
            return len(mine) == len(other) and all(map(self._is_same, mine, other))
        if isinstance(mine, functools.partial):
            parts = ("func", "args", "keywords")
            return all(self._is_same(getattr(mine, part), getattr(other, part)) for part in parts)
        if isinstance(mine, types.FunctionType):
            values = [[cell.cell_contents for cell in function.__closure__ or ()] for function in (mine, other)]
            return mine.__code__ is other.__code__ and self._is_same(*values)
        if hasattr(mine, "to_dict"):
            key = id(mine), id(other)
            if key not in self._configs:
                self._configs[key] = True  # during the comparison: configurations may refer to each other
                self._configs[key] = self._is_same(vars(mine), vars(other))
            return self._configs[key]
        return bool(mine == other) or (mine, other) == (self._few_layers, self._layers)


def _plain(name: str, value: Any) -> Any:
    """Return the `value` of the attribute `name`; for hooks, without their numbers, which count over the process."""
    return list(value.values()) if name.endswith("_hooks") and isinstance(value, Mapping) else value


def _forms(tensors: Mapping[str, torch.Tensor | None]) -> Mapping[str, Any]:
    return {name: None if tensor is None else _form(tensor) for name, tensor in tensors.items()}


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


# ----------------------------------------------------------------------------------------------------------------------
# Derive the step of a model with many equal layers from the captures of models with 2, 3 and 4 of these layers.


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
        try:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, 1)
            os.dup2(nothing, 2)
            torch.set_num_threads(1)  # a fork does not copy the threads of the parent
            with os.fdopen(writing, "wb") as pipe:
                pipe.write(pickle.dumps(work()))
        finally:
            os._exit(0)
    os.close(writing)

    def result() -> Value:
        ends_s = time.monotonic() + _PATIENCE_S
        pieces: list[bytes] = []
        while select.select([reading], [], [], max(0.0, ends_s - time.monotonic()))[0]:
            piece = os.read(reading, 1 << 20)
            if not piece:
                return pickle.loads(b"".join(pieces)) if pieces else work()
            pieces.append(piece)
        return work()  # the child did not end in time

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


log = logging.getLogger("elixir_compile")

SIZES = (2, 3, 4)
"""Numbers of layers of the captured models. The first and the last layer of Llama save other values than the rest; a
model of 4 layers is the smallest with two layers between them."""
LEAST_LAYERS = 16
"""A model of fewer layers is captured with all of them: three captures, of 9 layers in all, take as long."""


def capture_model(
    model: nn.Module | Callable[[], nn.Module] | Configured,
    example_inputs: Inputs,
    *,
    options: Options | None = None,
    dynamic: bool = False,
    chunks: Chunks | None = None,
    optimizer: PlannedClass | None = None,
    least_layers: int = LEAST_LAYERS,
    may_fork: bool = False,
) -> Capture:
    """Return the capture of `model`, which may be a configuration; see `capture_step` for the other arguments.

    A configured model with at least `least_layers` equal layers is captured with few of them, which is faster. If the
    process `may_fork`, this uses two cores.
    """

    def capture(model: nn.Module | Callable[[], nn.Module]) -> Capture:
        return capture_step(model, example_inputs, options=options, dynamic=dynamic, chunks=chunks, optimizer=optimizer)

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
    params = dict(full.named_parameters())
    for name, captured in made.params.items():
        param = params.get(name)
        if param is None or param.numel() != captured.numel or not param.requires_grad:
            raise UnsupportedModel(made.graph.name, f"it has no parameter {name} of {captured.numel} elements")
    return made


def _line_of(capture: Capture) -> list[Record]:
    """Return `capture` as a line of records."""
    line = [*line_of(capture.graph), record(("base_bytes",), str(capture.base_bytes))]
    line += [record(("params", param), name) for name, param in capture.params.items()]
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
    chunks = like.chunks
    if chunks is not None:
        name, *nodes = names_of(kinds["loss"][0])
        chunks = replace(chunks, region=replace(chunks.region, name=name, nodes=tuple(nodes)))
    return replace(
        like,
        graph=graph_of_line(line),
        base_bytes=int(names_of(kinds["base_bytes"][0])[0]),
        chunks=chunks,
        params={StorageId(names_of(entry)[0]): entry.fixed[1] for entry in kinds.get("params", [])},
    )
