"""Follow the values of each parameter through every op of an optimizer's step, and find the op that joins two of them.

    mul(p0, p0.grad)     {0}        what was computed from parameter 0, its gradient or its state has the owner 0
    stack([n0, n1])      {0}{1}     owners are known by range of elements: rows keep theirs through ops element by
    unbind(...)          {0},{1}    element, and views have those of their range
    add(n0, n1)          {0, 1}     two owners of one element: the step joins two parameters, whatever the value is

Owners belong to storages. A storage that has owners is held until nobody else does, so that none takes its place in
memory and passes for it.
"""

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from elixir_compile import compat

_Owners = frozenset[int]
_NOBODY: _Owners = frozenset()
_Run = tuple[int, _Owners]
"""A number of elements that follow each other in memory, and their owners."""

_READS_NO_VALUE = frozenset(
    {"empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros", "new_ones", "new_full"}
    | {"new_empty_strided", "is_same_size"}
)
_WRITES_ALL = frozenset({"copy_", "zero_", "fill_"})
"""Ops whose first argument loses all of its values."""
_ELEMENT_BY_ELEMENT = frozenset({"copy_", "_to_copy"})
"""Those that torch does not tag as pointwise."""
_ALL_BYTES = sys.maxsize
"""Where the range ends that is a whole storage."""
_MASKS = (torch.bool, torch.uint8)
_NO_TENSORS = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout})
_SWEPT_BYTES = 1 << 20
"""After a result of more bytes, storages that only `Owners` holds are let go of at once."""
_MOST_BENT = 1000
"""The most reads of a run that are bent: a loop that waits for a small error would not end."""


_JOINS = "joins two parameters"


class NotAloneError(Exception):
    """A step does what no class does that treats each tensor alone; the text names an op and says what."""


class _Op:
    """What `Owners` asks about `op`, an op of torch."""

    def __init__(self, op: Any) -> None:
        self.name = str(op).rpartition(".")[0] or str(op)
        base, schema, tags = self.name.rpartition(".")[2], compat.schema_of(op), getattr(op, "tags", ())
        loses = base.removeprefix("_foreach_") in _WRITES_ALL
        self.written = [
            (index, argument.name, argument.is_out or loses)
            for index, argument in enumerate(schema.arguments if schema is not None else ())
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        """Of each argument that it writes the index, the name, and whether its former values are lost unread."""
        self.is_by_index = base.startswith(("_foreach_", "_fused_"))
        """Whether it runs on lists of tensors, on those of each index alone."""
        self.is_element_by_element = torch.Tag.pointwise in tags or base in _ELEMENT_BY_ELEMENT
        self.puts_behind = base in ("stack", "cat")
        """Whether its result has the tensors of a list behind each other."""
        self.reads_no_value = base in _READS_NO_VALUE
        self.draws = torch.Tag.nondeterministic_seeded in tags
        self.makes_sizes = torch.Tag.dynamic_output_shape in tags
        self.reads_on_host = torch.Tag.data_dependent_output in tags
        self.is_plain = (
            schema is not None
            and not (self.is_by_index or self.puts_behind or self.reads_no_value or self.draws or self.makes_sizes)
            and not (self.reads_on_host or any(argument.is_out for argument in schema.arguments))
        )
        """Whether its results, and what it writes, have the owners of all that it is given."""
        self.makes_new = not any(each.alias_info is not None for each in (schema.returns if schema is not None else ()))
        """Whether its results are in new memory."""


class Owners:
    """The owners of tensors while steps run, by `compat.ops_seen_by(owners.see)`; owners are numbers of parameters.

    Values that are read on the host are multiplied by one of `factors` if their owner is among `bent`, by the next one
    in each step. If `pretends`, they are 1 instead: tensors without memory have no values.
    """

    def __init__(
        self, bent: Collection[int] = (), factors: Sequence[float] = (1.0,), *, pretends: bool = False
    ) -> None:
        self._bent, self._factors, self._pretends = bent, factors, pretends
        self._num_steps = 0
        self._known: dict[Any, _Op] = {}
        self._spans: dict[int, list[tuple[int, int, _Owners]]] = {}
        """By storage key, ranges of bytes in order with their owners."""
        self._held: dict[int, torch.UntypedStorage] = {}
        self.num_ops = self.num_reads = 0
        self.readers: set[int] = set()
        """The owners of values that were read on the host."""
        self.refused = ""
        """What the step did first that it may not, as an op and a verb; it may have caught the exception."""

    def own(self, values: Iterable[Any], owner: int) -> None:
        """Make the tensors in `values` those of `owner`, whose they are besides."""
        for tensor in (tensor for value in values for tensor in tensors_in(value)):
            owners = self.of(tensor) | {owner}
            self._put(tensor, [(tensor.numel(), owners)] if tensor.numel() else [])

    def of(self, tensor: torch.Tensor) -> _Owners:
        """Return the owners of any element of `tensor`."""
        spans = self._spans.get(compat.storage_key(tensor))
        if not spans:
            return _NOBODY
        if spans[0][1] == _ALL_BYTES:
            return spans[0][2]
        start, stop = _extent(tensor)
        return _NOBODY.union(*(owners for first, last, owners in spans if first < stop and start < last))

    def forget(self) -> None:
        """Forget the owners of storages that nobody else holds, after a step."""
        self._num_steps += 1
        self._sweep()

    def _sweep(self) -> None:
        for key in [key for key, storage in self._held.items() if not compat.num_holders(storage)]:
            del self._held[key], self._spans[key]

    def see(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run `op` and find the owners of its results.

        Raises NotAloneError if it joins two parameters, draws from a random generator that parameters share, or makes a
        size out of values.
        """
        known = self._known.get(op)
        if known is None:
            known = self._known[op] = _Op(op)
        self.num_ops += 1
        if known.is_plain and (owners := self._only_owners(args, kwargs)) is not None:
            result = op(*args, **kwargs)
            if not known.makes_new:
                return result
            storage = result.untyped_storage() if type(result) is torch.Tensor else None
            if storage is None or not 0 < storage.nbytes() <= _SWEPT_BYTES:
                self._label(known, args, owners, [], result)
                return result
            key = compat.storage_key(result)
            self._spans[key], self._held[key] = [(0, _ALL_BYTES, owners)], storage
            return result
        given = [*args, *kwargs.values()]
        written = [(args[at] if at < len(args) else kwargs.get(name), lost) for at, name, lost in known.written]
        lost = [value for value, is_lost in written if is_lost]
        read = [] if known.reads_no_value else [value for value in given if all(value is not one for one in lost)]
        owners = self._of_all(read)
        if known.draws and not any(isinstance(value, torch.Generator) for value in given):
            raise self._refuse(known, "draws random numbers that depend on the order of the parameters")
        if (
            known.makes_sizes
            and owners
            and (known.name != "aten.index" or any(each.dtype in _MASKS for each in tensors_in(args[1])))
        ):
            raise self._refuse(known, "makes a size out of values of a parameter")
        if known.reads_on_host:
            return self._read(known, op, args, kwargs, owners)
        result = op(*args, **kwargs)
        if not owners and not written:
            return result
        if known.is_by_index:
            self._label_by_index(known, read, [value for value, _ in written], result)
        else:
            self._label(known, read, owners, [value for value, _ in written], result)
        return result

    def _only_owners(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Owners | None:
        """Return the owners of all tensors in `args` if these are the only ones and own whole storages; None if some
        differ, or if that is not plain to see. Most ops of a step are on tensors of one parameter."""
        found: _Owners | None = None
        for value in args:
            kind = type(value)
            if kind is torch.Tensor or kind is nn.Parameter:
                spans = self._spans.get(compat.storage_key(value))
                if not spans or spans[0][1] != _ALL_BYTES or (found is not None and found != spans[0][2]):
                    return None
                found = spans[0][2]
            elif kind not in _NO_TENSORS and not (kind is list and all(type(each) in _NO_TENSORS for each in value)):
                return None
        return found if all(type(value) in _NO_TENSORS for value in kwargs.values()) else None

    def _of_all(self, values: Iterable[Any]) -> _Owners:
        found = _NOBODY
        for value in values:
            if isinstance(value, torch.Tensor):
                found |= self.of(value)
            elif isinstance(value, list | tuple):
                found |= self._of_all(value)
        return found

    def _refuse(self, known: _Op, does: str) -> NotAloneError:
        text = f"{known.name} {does}"
        self.refused = self.refused or text
        return NotAloneError(text)

    def _read(self, known: _Op, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], owners: _Owners) -> Any:
        if len(owners) > 1:
            raise self._refuse(known, _JOINS)
        self.readers |= owners
        self.num_reads += 1
        if self._pretends and owners:
            is_number = known.name == "aten._local_scalar_dense" and args[0].dtype != torch.bool
            return (1.0 if args[0].dtype.is_floating_point else 1) if is_number else True
        value = op(*args, **kwargs)
        if not owners or not owners.issubset(self._bent) or self.num_reads > _MOST_BENT:
            return value
        factor = self._factors[self._num_steps % len(self._factors)]
        return not value if isinstance(value, bool) else type(value)(value * factor if value else factor)

    def _label(self, known: _Op, read: Sequence[Any], owners: _Owners, written: Sequence[Any], result: Any) -> None:
        for target in (*tensors_in(written), *tensors_in(result)):
            if compat.storage_key(target) in self._spans and not any(target is one for one in tensors_in(written)):
                continue  # a view
            runs = [(target.numel(), owners)]
            if len(owners) > 1:
                runs = self._runs_of_result(known, read, target) or runs
            if any(len(each) > 1 for _, each in runs):
                raise self._refuse(known, _JOINS)
            self._put(target, runs)

    def _label_by_index(self, known: _Op, read: Sequence[Any], written: Sequence[Any], result: Any) -> None:
        lists = [value for value in read if isinstance(value, list | tuple)]
        shared = self._of_all(value for value in read if isinstance(value, torch.Tensor))
        targets = [value for value in (*written, result) if isinstance(value, list | tuple)]
        for index in range(max(map(len, targets), default=0)):
            owners = shared | self._of_all(each[index] for each in lists if index < len(each))
            if len(owners) > 1:
                raise self._refuse(known, _JOINS)
            for target in targets:
                if index < len(target) and isinstance(target[index], torch.Tensor):
                    self._put(target[index], [(target[index].numel(), owners)])
        self._label(known, read, self._of_all(read), [each for each in written if isinstance(each, torch.Tensor)], ())

    def _runs_of_result(self, known: _Op, read: Sequence[Any], target: torch.Tensor) -> list[_Run]:
        """Return the owners by range of `target`, a result of an op on tensors with several; empty if not known so."""
        tensors = [tensor for value in read for tensor in tensors_in(value)]
        if not target.is_contiguous():
            return []
        if known.puts_behind:
            dim = next((value for value in read if isinstance(value, int)), 0)
            return [] if dim else [run for tensor in tensors for run in self._runs_of(tensor)]
        if not known.is_element_by_element:
            return []
        alike = [tensor for tensor in tensors if tensor.shape == target.shape]
        shared = self._of_all(tensor for tensor in tensors if tensor.shape != target.shape)
        left, found = [[(target.numel(), shared)], *(self._runs_of(tensor)[::-1] for tensor in alike)], []
        while all(left):
            count = min(runs[-1][0] for runs in left)
            found.append((count, _NOBODY.union(*(runs[-1][1] for runs in left))))
            for runs in left:
                rest, owners = runs.pop()
                if rest > count:
                    runs.append((rest - count, owners))
        return found

    def _runs_of(self, tensor: torch.Tensor) -> list[_Run]:
        """Return the owners by range of the elements of `tensor`, in order."""
        start, stop = _extent(tensor)
        size, spans = tensor.element_size(), self._spans.get(compat.storage_key(tensor), [])
        cuts = [(max(first, start), min(last, stop)) for first, last, _ in spans if first < stop and start < last]
        edges = sorted({start, stop, *(edge for each in cuts for edge in each)})
        if not tensor.is_contiguous() or any((edge - start) % size for edge in edges):
            return [(tensor.numel(), self.of(tensor))]
        return [
            (
                (after - before) // size,
                _NOBODY.union(*(owners for first, last, owners in spans if first < after and before < last)),
            )
            for before, after in pairwise(edges)
        ]

    def _put(self, target: torch.Tensor, runs: Sequence[_Run]) -> None:
        """Make `runs` the owners of the elements of `target`; if it has gaps, what is in them keeps its owners too."""
        key = compat.storage_key(target)
        before = self._spans.get(key, [])
        if len(runs) == 1 and before and before[0][1] == _ALL_BYTES and before[0][2] == runs[0][1]:
            return
        start, stop = _extent(target)
        if start == stop:
            return
        storage = target.untyped_storage()
        is_gapless = stop - start == target.numel() * target.element_size()
        if not is_gapless:
            runs = [(1, self.of(target).union(*(owners for _, owners in runs)))]
        if len(runs) == 1 and start == 0 and stop == storage.nbytes():
            before, stop = [], _ALL_BYTES
        at, spans = start, [(first, min(last, start), owners) for first, last, owners in before if first < start]
        for count, owners in runs:
            after = at + count * target.element_size() if is_gapless and stop < _ALL_BYTES else stop
            spans += [(at, after, owners)] if owners else []
            at = after
        spans += [(max(first, stop), last, owners) for first, last, owners in before if last > stop]
        if spans:
            self._spans[key], self._held[key] = spans, storage
        elif key in self._spans:
            del self._spans[key], self._held[key]
        if storage.nbytes() > _SWEPT_BYTES:
            self._sweep()


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the bytes of the storage from the first to behind the last element of `tensor`."""
    size = tensor.element_size()
    start = int(tensor.storage_offset()) * size
    if not tensor.numel():
        return start, start
    last = sum((int(count) - 1) * int(stride) for count, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * size


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested lists, tuples and dictionaries `value`; of a sparse one its indices and values."""
    if isinstance(value, torch.Tensor):
        yield from compat.dense_parts(value)
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)
