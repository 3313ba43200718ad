"""One pass over host memory in place of a class's own step, which takes one for each op: the same bits, or not at all.

    the step on tensors without values  ->  a tape  ->  C, compiled once per form  ->  weights, gradients, statistics

Each form is compared with the class on small tensors before its first use. What cannot be recorded, has no formula or
gives other bits keeps the class's own step, and the log says why, once. What a step computes in plain numbers it
computes in each step again: a new learning rate or step count is an input of the same pass.
"""

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from elixir_compile import compat
from elixir_compile.optim.generic.code import Pass, compiled
from elixir_compile.optim.generic.formula import is_same, samples
from elixir_compile.optim.generic.state_schema import StateSchema
from elixir_compile.optim.generic.tape import Form, Recorder, TapeError
from elixir_compile.optim.generic.transient import ClassStep, Row
from elixir_compile.optim.host import HostThreads, host_threads_for
from elixir_compile.optim.host.coalesce import coalesce
from elixir_compile.optim.master_adamw import like

log = logging.getLogger("elixir_compile")

_COMPARED = 4099
"""Elements on which a pass is compared with its class: some left over for every vector width."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """One step of one parameter."""

    form: Form
    numbers: tuple[float, ...]
    counts: Mapping[str, Any]
    """What the state holds after it besides statistics."""


class ClassPasses:
    """The passes of one optimizer."""

    def __init__(self) -> None:
        self.threads: HostThreads | None = None
        """Whose threads run the passes; None for those beside no device."""
        self._lock = threading.Lock()
        self._passes: dict[Form, Pass | None] = {}
        """None where a form has none."""
        self._said: set[str] = set()

    def update(self, step: ClassStep, rows: Sequence[Row], schema: StateSchema) -> list[Row]:
        """Update those of `rows` that a pass can; return the others, untouched."""
        names = tuple(schema.dtypes)
        found: dict[object, Recorded | None] = {}
        ready: dict[tuple[Form, tuple[float, ...]], list[tuple[Row, Recorded]]] = {}
        left: list[Row] = []
        for row in rows:
            is_begun = bool(row.state) or schema.is_stateless  # else the class makes the state now
            key = _key_of(row, names) if is_begun else None
            if key is not None and key not in found:
                found[key] = self._recorded(step, row, names)
            recorded = None if key is None else found[key]
            if recorded is None:
                left.append(row)
            else:
                ready.setdefault((recorded.form, recorded.numbers), []).append((row, recorded))
        for (form, numbers), members in ready.items():
            run = self._passes[form]
            assert run is not None
            tensors = [_tensors_of(row, names) for row, _ in members]
            _take(run, form, numbers, tensors, self.threads or host_threads_for())
            for (row, recorded), (_, grad, *_) in zip(members, tensors, strict=True):
                if grad is not row.grad and any(place == 1 for place, _ in form.outputs):
                    row.grad.data.copy_(grad)
                _count(row, recorded.counts)
        return left

    def _recorded(self, step: ClassStep, row: Row, names: Sequence[str]) -> Recorded | None:
        try:
            recorded = _record(step, row, names)
            with self._lock:  # a step without a plan may run beside the worker
                if recorded.form not in self._passes:
                    self._passes[recorded.form] = None
                    run = compiled(recorded.form)
                    _compare(run, recorded.form, step, row, names)
                    self._passes[recorded.form] = run
                return recorded if self._passes[recorded.form] is not None else None
        except TapeError as error:
            because = str(error)
            if because not in self._said:
                self._said.add(because)
                log.warning(
                    "%s updates on the host by its own step, in a pass over memory for each of its ops: %s",
                    step.cls.__name__,
                    because,
                )
            return None


def _key_of(row: Row, names: Sequence[str]) -> object:
    """Return what rows have in common that one recorded step stands for; None for what has no pass."""
    tensors = [row.weight, *(row.state.get(name) for name in names)]
    shape = row.weight.shape
    is_plain = bool(shape) and all(
        isinstance(one, torch.Tensor)
        and (one.dtype, one.device.type, one.shape) == (torch.float32, "cpu", shape)
        and one.is_contiguous()
        for one in tensors
    )
    is_dense = row.grad.dtype == torch.float32 and row.grad.layout == torch.strided
    if not (is_plain and is_dense and row.weight.numel()):
        return None
    if len({one.data_ptr() for one in (row.grad, *tensors)}) <= len(tensors):  # what is one tensor twice
        return None
    counts = tuple((name, _known(value)) for name, value in row.state.items() if name not in names)
    return None if any(value is None for _, value in counts) else (shape, counts)


def _known(value: object) -> object:
    """Return a plain number or one in a tensor as what can be compared, None for anything else."""
    if isinstance(value, torch.Tensor):
        return (value.dtype, value.item()) if not value.dim() and value.device.type == "cpu" else None
    return (type(value), value) if isinstance(value, int | float | bool | str) else None


def _record(step: ClassStep, row: Row, names: Sequence[str]) -> Recorded:
    """Return what `step` computes for `row`, which stays as it is."""
    empty = [torch.empty(row.weight.shape, dtype=torch.float32, device="meta") for _ in range(2 + len(names))]
    recorder = Recorder(empty)
    state = {name: _own(value) for name, value in row.state.items() if name not in names}
    state.update(zip(names, empty[2:], strict=True))
    dry = Row(weight=empty[0], grad=empty[1], state=state)
    try:
        with torch.no_grad(), compat.ops_seen_by(recorder.see):
            weight, after = step.take_dry(dry)
    except TapeError:
        raise
    except Exception as error:  # whatever a user's class raises for tensors without values
        raise TapeError(f"it fails on tensors without values: {type(error).__name__}: {error}") from None
    if after.keys() != state.keys() or any(recorder.holds(after[name]) != (name in names) for name in after):
        raise TapeError("a step changes what its state holds")
    counts = {name: value for name, value in after.items() if name not in names}
    form = recorder.form([weight, empty[1], *(after[name] for name in names)])
    return Recorded(form=form, numbers=tuple(recorder.numbers), counts=counts)


def _compare(run: Pass, form: Form, step: ClassStep, row: Row, names: Sequence[str]) -> None:
    """Raise TapeError unless `run` does to small tensors, bit by bit, what the class does to them."""
    weight, grad, *statistics = samples(2 + len(names), _COMPARED)
    statistics = [one.abs() for one in statistics]  # of which some have a root taken

    def small() -> Row:
        state = {name: _own(value) for name, value in row.state.items() if name not in names}
        own = {name: one.clone() for name, one in zip(names, statistics, strict=True)}
        return Row(weight=weight.clone(), grad=grad.clone(), state={name: {**own, **state}[name] for name in row.state})

    wanted, made = small(), small()
    step.take([wanted])
    tensors = _tensors_of(made, names)
    recorded = _record(step, made, names)  # its numbers may depend on the shape
    if recorded.form != form:
        raise TapeError(f"its ops depend on the shape of a parameter, such as {tuple(row.weight.shape)}")
    run([tensor.data_ptr() for tensor in tensors], recorded.numbers, _COMPARED)
    if not all(map(is_same, tensors, _tensors_of(wanted, names))):
        raise TapeError("one pass would round otherwise")


def _tensors_of(row: Row, names: Sequence[str]) -> list[torch.Tensor]:
    return [row.weight, like(row.grad, row.weight), *(row.state[name] for name in names)]


def _take(
    run: Pass, form: Form, numbers: Sequence[float], rows: Sequence[Sequence[torch.Tensor]], threads: HostThreads
) -> None:
    """Run over `rows`, over neighbours in memory at once."""
    for members, tensors in coalesce(rows, [0] * len(rows)):

        def part(start: int, stop: int, tensors: Sequence[torch.Tensor] = tensors) -> None:
            run([one.data_ptr() + start * one.element_size() for one in tensors], numbers, stop - start)

        threads.run(tensors[0].numel(), part)
        # Autograd must see what changed; of gradients the class's own step shows nothing either.
        written = [rows[index][place] for index in members for place, _ in form.outputs if place != 1]
        torch.autograd.graph.increment_version(written)


def _count(row: Row, counts: Mapping[str, Any]) -> None:
    for name, value in counts.items():
        schema = row.state[name]
        if isinstance(value, torch.Tensor) and isinstance(schema, torch.Tensor) and schema.dtype == value.dtype:
            schema.copy_(value)
        else:
            row.state[name] = _own(value)


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
