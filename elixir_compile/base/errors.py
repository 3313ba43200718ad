"""Every error and warning of the package.

```text
Exception
└── ElixirError
    ├── _UnknownName       (ValueError)     an unknown name
    │   ├── UnknownOption                   an unknown option
    │   ├── UnknownHardware                 a machine without a built-in profile
    │   ├── UnknownModel                    neither a named shape nor a function nor a configuration
    │   └── UnknownSchedule                 a pipeline schedule that torch or a compiled stage does not have
    ├── _FileError         (ValueError)     text of another form than its file should have
    │   ├── PlanFileError                   a file without a valid plan
    │   │   └── QuestionFileError           a file beside a plan without the question that the plan answers
    │   ├── ProfileFileError                a file without a valid hardware profile
    │   └── TraceFileError                  a file of an observed run without valid figures
    ├── InvalidOption      (ValueError)     a known option with an unusable value
    ├── ContradictingFractions (ValueError) fractions of placement_policy="static" that exclude each other
    ├── StateNotApart      (ValueError)     optimizer state to be offloaded without its parameters, which cannot be
    ├── InvalidPlan        (ValueError)     a plan, graph, bucket or profile that contradicts itself
    │   ├── IllegalSchedule                 actions in an order that would compute wrong results
    │   └── InvalidProfile                  a number that no machine can have in a hardware profile
    ├── PlanMismatch       (ValueError)     a plan for another model, machine or number of ranks
    ├── UnknownSubject     (ValueError)     a name unknown in the plan
    ├── NoFeasiblePlan     (MemoryError)    no schedule fits the budget
    │   ├── NoFeasibleShares                no rows and shards of the state fit the ranks of a fleet
    │   └── NoFeasibleStages                no stages of a pipeline fit its ranks
    ├── OutOfDeviceMemory  (MemoryError)    the device is full although the plan fits the budget
    ├── NotPrepared        (RuntimeError)   the model must be prepared first
    │   ├── OptimizerTooEarly               an optimizer of parameters replaced by `prepare(model, mesh=...)`
    │   └── WrongDtype                      parameters in another dtype than the option `param_dtype`
    ├── MasterIgnored      (RuntimeError)   an optimizer without fp32 masters, on parameters with masters
    ├── StaleParameters    (RuntimeError)   a parameter changed between its forward and its backward
    ├── ParameterReplaced  (RuntimeError)   a parameter was replaced after the step was captured
    ├── UnsupportedBackward (RuntimeError)  gradients of gradients, or of many outputs at once
    ├── TooManyForwards    (RuntimeError)   more forwards wait for their backward than `prepare` was told
    ├── IncompleteStep     (RuntimeError)   an optimizer's step before the last backward of a step of several calls
    ├── GradientsChanged   (RuntimeError)   a gradient changed after the update that read it
    ├── ActivationsGone    (RuntimeError)   offloaded activations, freed on the host before their backward
    ├── UnsupportedModel   (ValueError)     a model without trainable parameters, or with unsupported ones
    │   └── UnsupportedWrapper              a model that a wrapper of another library trains on several devices
    ├── UnsupportedDevice  (RuntimeError)   a device for which torch has no streams, or no figures of its memory
    ├── FrozenChanged      (RuntimeError)   a frozen parameter on disk, written during a step
    ├── _DiskError         (OSError)        a failed write or read of what is on disk
    │   ├── DiskFull                        too little free space; nothing was written
    │   ├── DiskFailed                      an operation refused by the system
    │   ├── FrozenFileChanged               somebody wrote to the file that frozen parameters are read from
    │   └── DiskCorrupted                   bytes read differ from the bytes written
    ├── UnforeseenState    (RuntimeError)   an update made optimizer state without space on disk
    ├── OptimizerNotTensorWise (RuntimeError)  a step joins two parameters, which no dry step did
    └── NestedMeasurement  (RuntimeError)   a step measured, or a model observed, that is already

UserWarning
└── ElixirWarning
    ├── NoGraphCaptured                     the model runs, but not compiled
    └── RanksApart                          several ranks train, and nothing averages their gradients
```

Each error keeps its facts as fields and as `args`, so it survives pickling between processes. Its text is made of them.
"""

# ruff: noqa: N818 - classes are named for the event; their base class says `Error`

import copy
import difflib
import errno
import inspect
import os
from collections.abc import Mapping, Sequence
from typing import ClassVar, Self, dataclass_transform, get_origin

from elixir_compile.base.units import format_bytes

EXPANDABLE_SEGMENTS = "PYTORCH_ALLOC_CONF=expandable_segments:True"
"""The setting with which torch's allocator has two segments that grow, in the place of many."""
MEASURED_OF_THEM = "with which torch's allocator held 16% less to 7% more in the models that were measured"
"""What is known of the bytes that the allocator holds with that setting, before the same budget is planned again."""


def has_expandable_segments(environ: Mapping[str, str]) -> bool:
    """Return whether the variables `environ` of a process give it expandable segments."""
    settings = (environ.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    return "expandable_segments:True" in ",".join(settings)


def other_segments(joined_by: str) -> str:
    """Return, behind `joined_by`, the setting that changes the gaps of the allocator, and what was measured of it;
    empty if this process has it."""
    if has_expandable_segments(os.environ):
        return ""
    return f"{joined_by}{EXPANDABLE_SEGMENTS}, set before the process starts, {MEASURED_OF_THEM}"


@dataclass_transform(eq_default=False)
class ElixirError(Exception):
    """The base class of all errors of the package.

    A class names its facts as a dataclass does, by annotations, behind those of its base class; a `Sequence` is kept as
    a tuple. Its text is the template `_text` with its facts, or comes from `__str__`.
    """

    _facts: ClassVar[Mapping[str, object]] = {}
    """The names of the facts in order, each with its default, or `...` if it has none."""
    _sequences: ClassVar[frozenset[str]] = frozenset()
    """The names of those that are sequences."""
    _text = ""

    def __init_subclass__(cls) -> None:
        # Without `dataclasses`, which would take 12 ms of each import to write the constructors of these classes.
        own = {name: hint for name, hint in inspect.get_annotations(cls).items() if not name.startswith("_")}
        cls._facts = {**cls._facts, **{name: vars(cls).get(name, ...) for name in own}}
        cls._sequences |= {name for name, hint in own.items() if get_origin(hint) is Sequence}

    def __init__(self, *args: object, **named: object) -> None:
        for name, value in {**self._facts, **dict(zip(self._facts, args, strict=False)), **named}.items():
            setattr(self, name, tuple(value) if name in self._sequences else value)  # pyright: ignore[reportArgumentType]
        self.args = tuple(getattr(self, name) for name in self._facts)

    def __str__(self) -> str:
        return self._text.format_map(vars(self))

    def renewed(self) -> Self:
        """Return a copy without the traceback and the cause, for code that keeps or raises the error of a variable.

        The traceback of an error, or of the one that was handled when it was raised, holds frames, and those their
        variables. An error among them would keep the frames of all callers alive until the next garbage collection,
        with their tensors.
        """
        return copy.copy(self)


class _UnknownName(ElixirError, ValueError):
    """`name` is not in `known`; `nearest` is the most similar known name, or None."""

    name: str
    known: Sequence[str]

    @property
    def nearest(self) -> str | None:
        return next(iter(self._near()), None)

    def _near(self) -> Sequence[str]:
        """Return the known names similar to `name`, the most similar first."""
        return difflib.get_close_matches(str(self.name), self.known, n=1)

    def _hint(self) -> str:
        return f"Did you mean {self.nearest!r}? " if self.nearest else ""


class UnknownOption(_UnknownName):
    """The option `name` does not exist; `nearest` is the most similar option, or None."""

    def __str__(self) -> str:
        return f"unknown option {self.name!r}. {self._hint()}The options are: {', '.join(self.known)}."


class InvalidOption(ElixirError, ValueError):
    """The value `got` of the option `name` cannot be used; `expected` describes valid values."""

    name: str
    got: object
    expected: str
    _text = "option {name}: got {got!r}, expected {expected}."


class ContradictingFractions(ElixirError, ValueError):
    """Fractions of `placement_policy="static"` that exclude each other, by Gemini's rule: parameters are offloaded only
    if all of them are sharded and all optimizer state is offloaded."""

    shard_param: float
    offload_optim: float
    offload_param: float
    _text = (
        "offload_param_frac={offload_param} is useful only if shard_param_frac is 1.0 and offload_optim_frac "
        "is 1.0, got shard_param_frac={shard_param} and offload_optim_frac={offload_optim}. Set both to "
        "1.0, or offload_param_frac=0.0."
    )


class StateNotApart(ElixirError, ValueError):
    """The fraction `offload_optim` of optimizer state is to be on the host without its parameters, but no HybridAdamW
    owns the `num_elements` trained elements of `graph`, and other optimizers keep state beside the parameter."""

    graph: str
    offload_optim: float
    num_elements: int
    _text = (
        "{graph}: offload_optim_frac={offload_optim} moves optimizer state without its parameters, which only "
        "HybridAdamW can do, but it does not own all of the {num_elements} trained elements. Create "
        "HybridAdamW(model.parameters()) before the first forward, or set offload_optim_frac=0.0."
    )


class InvalidPlan(ElixirError, ValueError):
    """A plan, graph, bucket or hardware profile that contradicts itself; `sentence` says how."""

    sentence: str
    _text = "{sentence}"


class IllegalSchedule(InvalidPlan):
    """Actions in an order that would compute wrong results; `excerpt` marks the wrong action with `<-- here`."""

    excerpt: str = ""

    def __str__(self) -> str:
        return f"{self.sentence}\n{self.excerpt}" if self.excerpt else self.sentence


class InvalidProfile(InvalidPlan):
    """A hardware profile holds a number that no machine can have: `field` of `what` should be `expected`."""

    def __init__(self, what: str, field: str, expected: str, got: object) -> None:
        super().__init__(f"{what}: {field}: expected {expected}, got {got!r}.")
        self.args = (what, field, expected, got)
        self.what = what
        self.field = field
        self.expected = expected
        self.got = got


_SHOWN_LENGTH = 1000


class _FileError(ElixirError, ValueError):
    """A file with a wrong `field`: `expected` describes valid content, `got` is the content."""

    _FILE: ClassVar[str]
    """The kind of file, as the error text names it."""

    field: str
    expected: str
    got: object

    def __str__(self) -> str:
        field, got = _shown(self.field), _shown(repr(self.got))
        return f"{self._FILE}, {field}: expected {_shown(self.expected)}, got {got}."


def _shown(text: str) -> str:
    """Return `text`, shortened in the middle to about 1,000 characters: a broken file may hold millions."""
    return text if len(text) <= _SHOWN_LENGTH else f"{text[: _SHOWN_LENGTH // 2]} ... {text[-_SHOWN_LENGTH // 2 :]}"


class PlanFileError(_FileError):
    """A file does not hold a plan; `field` is the path of the wrong field, or the line."""

    _FILE = "plan file"


class QuestionFileError(PlanFileError):
    """The file beside a plan does not hold the question that the plan answers; `field` is as in PlanFileError."""

    _FILE = "question file"


class ProfileFileError(_FileError):
    """A file does not hold a hardware profile; `field` is the path of the wrong field, `nodes[0].h2d.bytes_per_s`."""

    _FILE = "hardware profile"


class TraceFileError(_FileError):
    """A file in the folder of an observed run has no valid figures; `field` is the path of the wrong field."""

    _FILE = "trace file"


class UnknownHardware(_UnknownName):
    """A machine without a built-in profile; `nearest` is the most similar name, or None."""

    def _near(self) -> Sequence[str]:
        start = str(self.name).lower()
        # By letters alone "h200" would be nearer to "gh200" than to "h200-141g".
        near = [other for other in self.known if start and other.startswith(start)]
        # 0.5 and not the usual 0.6, so that "4090" finds "rtx4090-24g": 2 * 4 of 4 + 11 letters are 0.53.
        near = near or difflib.get_close_matches(start, self.known, n=1, cutoff=0.5)
        # "l5" is as short as the chip that it means: of "l4-24g" it has one letter of six, of "l4" one of two.
        chips = {name.split("-")[0]: name for name in self.known}
        return near or [chips[chip] for chip in difflib.get_close_matches(start, chips, n=1, cutoff=0.5)]

    def __str__(self) -> str:
        return (
            f"unknown hardware {self.name!r}. {self._hint()}The names are: {', '.join(self.known)}. Any other machine: "
            f"run `elixir-compile measure -o machine.json` on it and pass that file."
        )


class UnknownModel(_UnknownName):
    """No model is found under `name`: it is not a named shape, and `because` says why it is not a file or folder."""

    because: str = ""

    def _near(self) -> Sequence[str]:
        return difflib.get_close_matches(str(self.name).lower(), self.known, n=1)

    def __str__(self) -> str:
        why = f" ({self.because})" if self.because else ""
        return (
            f"unknown model {self.name!r}{why}. {self._hint()}The named shapes are: {', '.join(self.known)}. Any other "
            f"model: `path.py:function` for a function that returns it, or a Hugging Face config file or folder."
        )


class UnknownSchedule(_UnknownName):
    """No schedule of pipelines that compiled stages can run has the name `name`; `nearest` is the most similar name.

    `splits_backward` is True for a schedule of torch that runs the gradients of inputs and of weights apart.
    """

    splits_backward: bool = False

    def _near(self) -> Sequence[str]:
        return difflib.get_close_matches(str(self.name).lower(), self.known, n=1, cutoff=0.4)

    def __str__(self) -> str:
        known = ", ".join(self.known)
        if self.splits_backward:
            because = "computes the gradients of inputs and of weights apart, which compiled stages cannot"
            return f"schedule {self.name!r} {because}. Use one of {known}."
        return f"torch has no schedule {self.name!r}. {self._hint()}The schedules are: {known}."


class PlanMismatch(ElixirError, ValueError):
    """A plan was made for `expected`, and is to be used for `got`.

    `what` names the difference: `graph`, `machine`, `number of ranks`, `number of copies`, `number of calls in a step`,
    `order of backward passes` or `reduce dtype`. For a graph, both are fingerprints, `expected_model` and `got_model`
    say the models in words, and `difference` is a sentence with the first difference between them.
    """

    what: str
    expected: str
    got: str
    expected_model: str = ""
    got_model: str = ""
    difference: str = ""

    def __str__(self) -> str:
        remedy = "Leave out the option `plan` to search a new plan."
        if self.what == "graph":
            remedy = (
                "Use the model, batch shape, dtypes and checkpointing (`--recompute`) that it was made for, or leave "
                "out the option `plan` to search a new plan."
            )
        made_for = f"{self.expected} ({self.expected_model})" if self.expected_model else self.expected
        here = f"{self.got} ({self.got_model})" if self.got_model else self.got
        difference = f"{self.difference}. " if self.difference else ""
        return f"this plan is for another {self.what}: it was made for {made_for}, here is {here}. {difference}{remedy}"


class UnknownSubject(ElixirError, ValueError):
    """The plan has no bucket, region, parameter, module or activations `subject`; `nearest` lists similar names."""

    subject: str
    known: Sequence[str]

    @property
    def nearest(self) -> tuple[str, ...]:
        # 0.5 and not the usual 0.6, so that "b9" finds "b3".
        return tuple(difflib.get_close_matches(self.subject, self.known, n=3, cutoff=0.5))

    def __str__(self) -> str:
        names = ", ".join(repr(name) for name in self.nearest or self.known[:3])
        hint = f" Did you mean {names}?" if self.nearest else f" It has names such as {names}." if names else ""
        return f"the plan has no bucket, region, parameter, module or activations {self.subject!r}.{hint}"


class NoFeasiblePlan(ElixirError, MemoryError):
    """No schedule fits the budget of `memory` (`device` or `host`); `needed_bytes` is the smallest sufficient budget.

    `op` is the op at the peak, `source` the user's line or module that it came from, and `by_kind` the live bytes there
    by kind. `returned` names an output of the model that is among the largest tensors there, with its bytes.
    `disk_bytes` are the optimizer state and the parameters on the host that could be on disk. `beyond` is a
    clause with a way for models that no budget suits. `because` says why nothing was searched, as for ranks whose
    graphs differ: if they were equal, less than `needed_bytes` may be enough. `staying_bytes` are gradients that stay
    from earlier backward passes. `micro_batches` is the number of micro-batches that needs `needed_bytes`. `is_static`
    says that the user fixed fractions of the placement. `uncounted` names what the step needs beside `needed_bytes`, if
    that is not known.
    """

    op: str
    source: str
    budget_bytes: int
    needed_bytes: int
    by_kind: Mapping[str, int]
    memory: str = "device"
    disk_bytes: int = 0
    because: str = ""
    returned: str = ""
    staying_bytes: int = 0
    micro_batches: int = 1
    is_static: bool = False
    uncounted: str = ""
    beyond: str = ""

    def __str__(self) -> str:
        where = f" at {self.op}" + (f" ({self.source})" if self.source else "") if self.op else ""
        largest = sorted(self.by_kind.items(), key=lambda item: (-item[1], item[0]))
        live = ", ".join(f"{kind} {format_bytes(nbytes)}" for kind, nbytes in largest if nbytes)
        other = "a smaller batch" if self.memory == "device" else "a larger device_memory"
        if self.disk_bytes and self.needed_bytes - self.disk_bytes <= self.budget_bytes:
            other = f"disk_path=<folder>: {format_bytes(self.disk_bytes)} of it is optimizer state or parameters"
        if self.staying_bytes:
            other = "one backward pass per step, with `optimizer.zero_grad()` before the next forward"
        if self.is_static:
            other = f'other fractions or placement_policy="auto", or {other}'
        if self.beyond:
            other += f"; {self.beyond}"
        short = (
            f"needs {format_bytes(self.needed_bytes)} of {self.memory} memory{where}"
            + (f" in {self.micro_batches} micro-batches" if self.micro_batches > 1 else "")
            + f", budget {format_bytes(self.budget_bytes)}"
            + f", short by {format_bytes(self.needed_bytes - self.budget_bytes)}"
            + (f"; live: {live}" if live else "")
            + (f"; {self.returned}, is returned to the caller: return the loss alone" if self.returned else "")
            + (
                f"; gradients of earlier backward passes take {format_bytes(self.staying_bytes)}"
                if self.staying_bytes
                else ""
            )
        )
        if self.because:
            return f"{short}: {self.because}. Try {self.memory}_memory={self.needed_bytes}, {other}, or equal graphs."
        if self.uncounted:
            return f"{short}. Try {self.memory}_memory={self.needed_bytes} and more for {self.uncounted}, or {other}."
        return f"{short}. Try {self.memory}_memory={self.needed_bytes}, the smallest budget that is enough, or {other}."

    def without(self, uncounted: str) -> "NoFeasiblePlan":
        """Return the error with `uncounted`, what the step needs beside its `needed_bytes`."""
        return NoFeasiblePlan(*self.args[:-2], uncounted=uncounted, beyond=self.beyond)


class NoFeasibleShares(NoFeasiblePlan):
    """No rows and shards of the training state fit the ranks of a fleet.

    `needed_bytes` is the state of all ranks, `budget_bytes` the room that all ranks have beside the rows that leave the
    most, 0 if no rows fit. `rooms` has that of the ranks of each class, in words.
    """

    def __init__(self, batch: int, state_bytes: int, room_bytes: int, rooms: str) -> None:
        super().__init__("", "", room_bytes, state_bytes, {}, memory="fleet")
        self.args = (batch, state_bytes, room_bytes, rooms)
        self.batch = batch
        self.rooms = rooms

    def __str__(self) -> str:
        state = format_bytes(self.needed_bytes)
        if not self.rooms:
            found = f"no shares of {self.batch} rows fit the ranks, beside a state of {state}"
        else:
            found = f"state {state}, room {format_bytes(self.budget_bytes)} beside {self.batch} rows: {self.rooms}"
        return f"{found}. Try a smaller batch, a larger host_memory, or more devices."


class NoFeasibleStages(NoFeasiblePlan):
    """No stages of a pipeline fit the memory of its ranks.

    In the leanest cut, the stage of `layers` leaves its rank the least room: the rank needs `needed_bytes`, and has
    `budget_bytes`. `outstanding` is the number of forwards of the stage that wait for their backward.
    """

    def __init__(
        self, schedule: str, layers: str, needed_bytes: int, budget_bytes: int, memory: str, outstanding: int
    ) -> None:
        super().__init__("", "", budget_bytes, needed_bytes, {}, memory=memory)
        self.args = (schedule, layers, needed_bytes, budget_bytes, memory, outstanding)
        self.schedule = schedule
        self.layers = layers
        self.outstanding = outstanding

    def __str__(self) -> str:
        need = f"{format_bytes(self.needed_bytes)} of {self.memory} memory"
        short = format_bytes(self.needed_bytes - self.budget_bytes)
        fewer = ", a schedule with fewer outstanding forwards such as 1f1b" if self.schedule != "1f1b" else ""
        waiting = f"{self.outstanding} outstanding forward{'s' if self.outstanding > 1 else ''}"
        return (
            f"no stages fit under {self.schedule}: the rank with the stage of {self.layers} needs {need} with "
            f"{waiting}, budget {format_bytes(self.budget_bytes)}, short by {short}. Try "
            f"{self.memory}_memory={self.needed_bytes}, fewer rows per micro-batch, or more ranks{fewer}."
        )


class OutOfDeviceMemory(ElixirError, MemoryError):
    """The device ran out of memory in an early step of `graph`, and no plan with less memory helped.

    The plan needs `planned_bytes` of `budget_bytes`; torch held `reserved_bytes`, of which `allocated_bytes` were in
    tensors. `largest` has the bytes of the largest tensors at the peak of the plan, by name.
    """

    graph: str
    budget_bytes: int
    planned_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    largest: Mapping[str, int]

    def __str__(self) -> str:
        largest = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in self.largest.items())
        held = f"{format_bytes(self.reserved_bytes)} held by torch, {format_bytes(self.allocated_bytes)} in tensors"
        return (
            f"{self.graph} ran out of device memory ({format_bytes(self.planned_bytes)} of "
            f"{format_bytes(self.budget_bytes)} planned, {held}), and no plan with less memory helped. Largest tensors "
            f"at the planned peak: {largest}. Lower device_memory{other_segments(', or try ')}."
        )


class NotPrepared(ElixirError, RuntimeError):
    """The model must go through `elixir_compile.prepare(model)` first; `because` says why."""

    because: str
    _text = "{because} Call `model = elixir_compile.prepare(model)` before compiling it."


class OptimizerTooEarly(NotPrepared):
    """An optimizer of the class `optimizer` was made before `prepare(model, mesh=...)` replaced its parameters."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(f"{optimizer} holds parameters that `prepare(model, mesh=...)` has replaced since.")
        self.args = (optimizer,)
        self.optimizer = optimizer

    _text = "{because} It would train nothing. Make the optimizer after `prepare`."


class WrongDtype(NotPrepared):
    """`parameter` is `dtype` or has no fp32 master, but the option `param_dtype` asks for another dtype."""

    def __init__(self, parameter: str, dtype: str, param_dtype: str) -> None:
        super().__init__(f"parameter {parameter} is {dtype} without a master, and the option is {param_dtype!r}.")
        self.args = (parameter, dtype, param_dtype)
        self.parameter = parameter
        self.dtype = dtype
        self.param_dtype = param_dtype

    _text = (
        "{because} Compiling is too late for a cast, because the graph was captured in {dtype}. Call "
        "`model = elixir_compile.prepare(model, param_dtype={param_dtype!r})` before compiling it."
    )


class MasterIgnored(ElixirError, RuntimeError):
    """`optimizer` would update `parameter`, of `dtype`, without its fp32 master.

    If `is_kept_by_another`, an optimizer made later keeps the master; else `optimizer` keeps no masters, `because` of
    how its class updates parameters if it is a hybrid one.
    """

    parameter: str
    dtype: str
    optimizer: str
    is_kept_by_another: bool = False
    because: str = ""

    def __str__(self) -> str:
        if self.is_kept_by_another:
            return (
                f"parameter {self.parameter} is {self.dtype} with an fp32 master, which another optimizer keeps, made "
                f"after this {self.optimizer}. Call `step()` of the later optimizer, or delete it."
            )
        return (
            f"parameter {self.parameter} is {self.dtype} with an fp32 master, which {self.optimizer} does not update"
            f"{self.because and f': {self.because}'}. Use `elixir_compile.HybridAdamW` or `elixir_compile.hybrid` of a "
            "class that updates each parameter alone, or `prepare` the model without `param_dtype` and cast it "
            "yourself."
        )


class StaleParameters(ElixirError, RuntimeError):
    """A parameter changed between the forward and the backward that needs it."""

    parameter: str
    _text = (
        "parameter {parameter} changed after the forward that saved it, so its backward would be wrong. "
        "Call `loss.backward()` before `optimizer.step()`, or run the forward again."
    )


class ParameterReplaced(ElixirError, RuntimeError):
    """`parameter` was replaced after the step was captured; `because` says what is in its place before the forward.

    If `is_temporary`, a plain tensor is in its place, as inside `torch.func.functional_call`.
    """

    parameter: str
    because: str
    is_temporary: bool = False

    def __str__(self) -> str:
        found = f"parameter {self.parameter} was replaced after the step was captured: {self.because}. "
        if self.is_temporary:
            return (
                f"{found}The compiled step would read the old parameter, so nothing was computed. Call "
                "`torch.func.functional_call` on the model itself, outside of compiled code."
            )
        return f"{found}Nothing was computed. Call the model again: the step is then captured with its new parameters."


class UnsupportedBackward(ElixirError, RuntimeError):
    """A backward through `model` with the argument `asked`, which compiled code does not support.

    `instead` is a sentence with an alternative.
    """

    model: str
    asked: str
    instead: str
    _text = (
        "{asked}: neither compiled code nor gathered parameters support it, so {model} does not. "
        "{instead}, or compute it with a copy of the model that is neither compiled nor prepared."
    )


class TooManyForwards(ElixirError, RuntimeError):
    """A forward of `model` while `num_waiting` earlier ones wait for their backward and `num_done` have had it, in a
    step of `num_calls` with `num_outstanding` outstanding forwards."""

    model: str
    num_waiting: int
    num_done: int
    num_calls: int
    num_outstanding: int

    def __str__(self) -> str:
        return (
            f"{self.model} was prepared for steps of {self.num_calls} calls with at most {self.num_outstanding} "
            f"outstanding forwards, but a forward began while {self.num_waiting} waited for their backward and "
            f"{self.num_done} backward passes of the step were done. Give the schedule itself, "
            f"`elixir_compile.prepare(module, outstanding=schedule)`, or larger numbers: `outstanding="
            f"{self.num_waiting + 1}, calls={max(self.num_calls, self.num_waiting + self.num_done + 1)}`. A forward "
            "without a backward, as of an evaluation, runs under `torch.no_grad()`. The next forward begins a step."
        )


class IncompleteStep(ElixirError, RuntimeError):
    """A step of an optimizer after `num_done` of the `num_calls` calls of `model`, whose gradients are incomplete."""

    model: str
    num_done: int
    num_waiting: int
    num_calls: int
    _text = (
        "an optimizer began to update {model} after {num_done} of {num_calls} backward passes of "
        "the step, with {num_waiting} forwards still waiting for theirs. The gradients are complete after "
        "the last one. They are dropped, and the next forward begins a new step: call `optimizer.zero_grad()` "
        "before it. Run all {num_calls} calls before `optimizer.step()`, or prepare the module with the "
        "number of calls that a step has: `elixir_compile.prepare(module, outstanding=..., calls=...)`."
    )


class GradientsChanged(ElixirError, RuntimeError):
    """The gradient or hyperparameters of `parameter` changed around its update; `because` says when and how."""

    parameter: str
    because: str
    _text = (
        'parameter {parameter} {because}. Use the option update="after_backward", or `with optimizer.accumulating():` '
        "around all backward passes but the last."
    )


class ActivationsGone(ElixirError, RuntimeError):
    """A backward needs the activations `group`, which were offloaded or stayed in parts, and have been freed."""

    group: str
    _text = (
        "the activations {group} of this forward were freed, because its graph was freed, or "
        "saved-tensor hooks packed its saved tensors. Run the forward again before the backward, and outside of "
        "`torch.autograd.graph.saved_tensors_hooks`."
    )


class UnsupportedModel(ElixirError, ValueError):
    """A model that cannot be managed; `what` names the module or parameter, `because` says why."""

    what: str
    because: str
    _text = "{what} is not supported: {because}"


_SHARE = """
    mesh = init_device_mesh(device_type, (world_size,))  # of torch.distributed.device_mesh
    model = elixir_compile.prepare(model, mesh=mesh)     # before the optimizer is made
    model = torch.compile(model, backend="elixir")"""
_SHARE_INSTEAD = "Leave the wrapper out, and share the model among the ranks:" + _SHARE


class UnsupportedWrapper(UnsupportedModel):
    """The model `what` inside a `wrapper` that trains it on several devices in a way that is not supported.

    `because` says why, and `instead` what to do.
    """

    def __init__(self, what: str, wrapper: str, because: str, instead: str = _SHARE_INSTEAD) -> None:
        super().__init__(what, because)
        self.args = (what, wrapper, because, instead)
        self.wrapper = wrapper
        self.instead = instead

    _text = "{what} inside {wrapper} is not supported: {because}. {instead}"


class UnsupportedDevice(ElixirError, RuntimeError):
    """A device of type `device_type`, for which torch has nothing under the names `missing`."""

    device_type: str
    missing: Sequence[str]

    def __str__(self) -> str:
        return (
            f"no model can train on {self.device_type}: for this type of device, this torch lacks "
            f"{', '.join(self.missing)}. Elixir orders copies beside compute by streams and events, and plans by the "
            f"memory that is in use. Update torch or the package that adds {self.device_type}, or train on the CPU."
        )


class _DiskError(ElixirError, OSError):
    """An error of the files for optimizer state on disk; `path` is the file, or the folder for a file not yet made."""

    path: str


class DiskFull(_DiskError):
    """The disk at `path` has too little space for the `needed_bytes` of `label`; `because` is the system's reason."""

    label: str
    needed_bytes: int
    free_bytes: int
    because: str
    errno = errno.ENOSPC

    def __str__(self) -> str:
        return (
            f"{self.label} needs {format_bytes(self.needed_bytes)} on disk, and {self.path} has "
            f"{format_bytes(self.free_bytes)} free: {self.because}. Nothing was written. Free space or raise "
            f"the quota there, or use a folder on a larger disk."
        )


class DiskFailed(_DiskError):
    """`operation` on the file or folder `path` failed; `because` is the system's reason."""

    operation: str
    because: str
    errno: int | None = 0

    _text = "{operation} failed at {path}: {because}. Check the disk, or use a folder on another one."


class FrozenFileChanged(_DiskError):
    """Somebody wrote to the file `path`, from which frozen parameters are read."""

    errno = errno.EIO

    _text = (
        "{path} was written to, and frozen parameters are read from it. Their values are those of before, or a mix: "
        "load the model again. Write new checkpoints to other files, or set `frozen_files=False`."
    )


class FrozenChanged(ElixirError, RuntimeError):
    """The frozen parameter `parameter` was written in place during a step that reads it from the file `path`."""

    parameter: str
    path: str

    _text = (
        "{parameter} was written in place during a step, but its values are read from {path}. Write frozen parameters "
        "between two steps: the next forward takes their new values."
    )


class DiskCorrupted(_DiskError):
    """Block `block` of the file `path`, of `block_bytes` bytes, was damaged after it was written."""

    block: int
    block_bytes: int
    errno = errno.EIO

    def __str__(self) -> str:
        return (
            f"block {self.block} of {self.path} ({format_bytes(self.block_bytes)} from byte "
            f"{self.block * self.block_bytes}) was damaged after it was written: its checksum differs. Resume "
            f"from the last checkpoint, and test the disk and the memory."
        )


class UnforeseenState(ElixirError, RuntimeError):
    """An update of `bucket` made the statistic `name`, of `dtype` and `shape`, which no dry step had made."""

    bucket: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    _text = (
        "the update of {bucket} made {name} ({dtype}) for a parameter of shape {shape}, which "
        "three dry steps of the optimizer did not make, so it has no space on disk. Raise host_memory and leave "
        "out disk_path, or let the optimizer make it in its first steps."
    )


class OptimizerNotTensorWise(ElixirError, RuntimeError):
    """In step number `step`, the optimizer class `optimizer` updates no parameter alone any more, though its dry steps
    did; `op` says which op joins two parameters."""

    step: int
    op: str
    optimizer: str
    _text = (
        "in step {step} of {optimizer}, {op}, which no dry step did. hybrid({optimizer}) updates each parameter alone, "
        "with other results from this step on, so the step has changed no weight and no state. Train on with "
        "{optimizer} itself, and load this optimizer's state_dict() into it."
    )


class NestedMeasurement(ElixirError, RuntimeError):
    """`measure_step` was called while it measures another step, or `observe` for a model that is observed.

    `observed` is the class of that model; empty for a measured step. `is_of_other_thread` says whether a step that
    another thread trains under a budget has torch.profiler, of which there is one in a process.
    """

    observed: str = ""
    is_of_other_thread: bool = False

    def __str__(self) -> str:
        if self.observed:
            return f"this {self.observed} is observed already. Call `stop()` of the study of the first observation."
        if self.is_of_other_thread:
            return (
                "another thread trains a model under a budget, and torch.profiler measures its step. Call measure_step "
                "again after a few steps of that thread: only the first steps under a plan are measured."
            )
        return (
            "measure_step is already measuring a step. Measure one step at a time: the allocator's peak belongs to "
            "one step only."
        )


class ElixirWarning(UserWarning):
    """The base class of all warnings of the package."""


class NoGraphCaptured(ElixirWarning):
    """The model ran, but no graph of it was captured, so nothing is compiled or planned."""


class RanksApart(ElixirWarning):
    """Several ranks train `model`, and as far as Elixir can see, nothing averages their gradients."""

    def __init__(self, model: str, num_ranks: int) -> None:
        super().__init__(model, num_ranks)
        self.model = model
        self.num_ranks = num_ranks

    def __str__(self) -> str:
        return (
            f"{self.num_ranks} ranks run, but {self.model} is neither prepared with a mesh nor inside "
            "DistributedDataParallel: unless your code averages gradients or weights, each rank trains a model of its "
            f"own. Share the model among the ranks:{_SHARE}\nor train whole copies of it:\n"
            '    model.compile(backend="elixir")\n'
            "    model = torch.nn.parallel.DistributedDataParallel(model)"
        )
