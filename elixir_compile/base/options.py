"""The options of `torch.compile(model, backend="elixir", options={...})`: a flat dict, as YAML holds it.

{"device_memory": "20GiB", "planner": "greedy"}  ->  Options(device_memory=21474836480, planner="greedy", ...)
"""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, get_args

from elixir_compile.base.errors import ContradictingFractions, InvalidOption, UnknownOption
from elixir_compile.base.units import BYTES_EXAMPLE, parse_bytes

Planner = Literal[
    "milp",
    "greedy",
    "elixir",
    "zero3_offload",
    "zero_offload",
    "fsdp_offload",
    "keep_all",
]
PlacementPolicy = Literal["auto", "static"]
Inner = Literal["inductor", "aot_eager"]
Activations = Literal["any", "keep", "recompute", "offload"]
ParamDtype = Literal["bfloat16", "float16"]
StateDtype = Literal["auto:bfloat16", "auto:int8"]
ReduceDtype = Literal["float32"]
CompileBy = Literal["auto", "layer", "plan"]
MicroBatches = Literal["fit", "auto"] | int
PlanUse = Literal["start", "follow", "exact"]
GuardMode = Literal["auto", "off", "always"]
UpdateTime = Literal["auto", "in_backward", "after_backward", "across_steps"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fractions:
    """What `placement_policy="static"` fixes: fractions from 0.0 to 1.0, with the meaning and the defaults of those in
    Colossal-AI's Gemini."""

    shard_param: float = 1.0
    """Of the elements of sharded parameters: those that ranks release after each use, as ZeRO-3 does. The others stay
    gathered from the forward to the backward, as in ZeRO-2."""
    offload_optim: float = 0.0
    """Of the elements with optimizer state: those with their state on the host."""
    offload_param: float = 0.0
    """Of all elements: those with parameter and gradient on the host. Above 0.0 only if the other fractions are 1.0."""

    def __post_init__(self) -> None:
        if self.offload_param > 0.0 and min(self.shard_param, self.offload_optim) < 1.0:
            raise ContradictingFractions(self.shard_param, self.offload_optim, self.offload_param)

    def __str__(self) -> str:
        return (
            f"shard_param_frac {self.shard_param}, offload_optim_frac {self.offload_optim}, "
            f"offload_param_frac {self.offload_param}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Every option, checked and parsed. Each has a default.

    It has more than 15 fields, because every option of a user is one.
    """

    device_memory: int | None = None
    """Bytes on the device that this model and all others of the process with such a budget may use at once while this
    one runs, as `"20GiB"` or a number. None: free memory less the reserve."""
    host_memory: int | None = None
    """Bytes of host memory for parameters, gradients, optimizer state and activations. None: the free memory of the
    host, shared by its ranks."""
    disk_path: Path | None = None
    """An existing folder on a local drive, for frozen parameters and optimizer state beyond `host_memory`. Its files
    are removed when the process ends. None: nothing is written to a disk."""
    disk_check: bool = False
    """Verify a checksum of each block read from `disk_path`."""
    frozen_files: bool = True
    """Read frozen parameters beyond `host_memory` from the files that they were loaded from, if their memory maps these
    files. False for files on a network drive, or if somebody may write to them."""
    planner: Planner = "milp"
    """`milp` proves a bound on every plan, `greedy` is faster. The others are fixed rules for comparison: `elixir` (of
    the paper), `zero3_offload`, `zero_offload`, `fsdp_offload`, `keep_all`."""
    placement_policy: PlacementPolicy = "auto"
    """`auto`: the planner chooses every placement. `static`: it keeps to the three fractions below, in whole buckets,
    and chooses all else: which buckets, when they move, and what becomes of activations."""
    shard_param_frac: float | None = None
    """Under `static`, the fraction of the elements of sharded parameters that ranks release after each use. None: 1.0.
    """
    offload_optim_frac: float | None = None
    """Under `static`, the fraction of the elements with optimizer state whose state is on the host. None: 0.0."""
    offload_param_frac: float | None = None
    """Under `static`, the fraction of the elements of all parameters on the host; above 0.0 only if the two other
    fractions are 1.0. None: 0.0."""
    activations: Activations = "any"
    """How activations may be kept off the device: `recompute`, `offload`, `any` of the two, or not at all (`keep`)."""
    accumulate: bool | None = None
    """True: gradients stay through the next forward (gradient accumulation), so the plan counts them from the first
    step on. None: the plan counts them once a forward finds gradients of an earlier backward, and later runs of the
    same step count them from the first step on. False: like None, but nothing is kept for later runs or taken from
    earlier ones."""
    update: UpdateTime = "auto"
    """When HybridAdamW updates. `after_backward`: within `optimizer.step()`. `across_steps`: `step()` queues the
    updates of the host, and the next forward waits for each bucket before its first use. `in_backward`: as soon as the
    gradient of a bucket is complete, for training without clipping and loss scaling. `auto`: `across_steps` if the host
    updates any bucket, else `after_backward`."""
    param_dtype: ParamDtype | None = None
    """The dtype to which `prepare(model, param_dtype=...)` casts fp32 parameters; hybrid optimizers keep their fp32
    masters. Compiling only checks it, because graphs are captured after the cast. None: no cast."""
    reduce_dtype: ReduceDtype | None = None
    """`float32`: gradients of parameters with a master are summed in fp32 over micro-batches and ranks. None: in the
    dtype of the parameter."""
    state_dtype: StateDtype | None = None
    """`auto:bfloat16` or `auto:int8`: if no plan fits the budgets, the moments of HybridAdamW take this
    dtype for as few parameters as needed; the plan names them. None: moments are as exact as the optimizer was asked
    to keep them, see `HybridAdamW(state_dtype=...)`."""
    search_timeout: float = 10.0
    """CPU seconds of the searching thread after which `milp` returns the best plan so far, with the gap proved so far.
    On a busy machine these are at most four times as many seconds of wall time."""
    hardware: str | None = None
    """The machine to plan for: a name such as `"4 x a100-40g"`, or the path of a profile that `elixir-compile measure`
    wrote. None: this machine, by its measured profile if there is one, else by a rough built-in one."""
    plan: Path | None = None
    """The path of a saved plan. For this graph it is used as it is, without a search, on another machine too if it
    fits there. It is refused for another model or number of ranks."""
    plan_use: PlanUse = "start"
    """What to do with a `plan` for another graph of this model, or one that does not fit here. `start`: search, from
    its homes and activations; no slower plan is taken. `follow`: take these, with as few changes as make them fit,
    without a search. `exact`: refuse it, and also a plan for another machine."""
    plan_cache: bool = True
    """Reuse the plan found by an earlier run for the same graph, machine and options."""
    micro_batches: MicroBatches = "fit"
    """In how many micro-batches each layer of a training step runs, one after another, before the next layer begins. It
    must divide the rows of the batch. The loss is that of the whole batch. `fit`: the whole batch at once if any plan
    for it fits, else a number that the planner chooses; fixed rules of `planner` choose none. `auto`: the planner
    chooses the number if the whole batch does not fit as it is. 1: the whole batch at once."""
    profile_regions: bool = False
    """Time every distinct region once before planning. The times are kept per machine for later runs."""
    replan: bool = True
    """Plan again, once, if the first steps take more than 10 % longer or shorter than planned."""
    guard: GuardMode = "auto"
    """Whether the plan is measured once against the fastest simple rule, after the first steps, and the faster of both
    stays. `auto`: if steps take 10 % longer than planned, and once that takes at most 1 % of the run."""
    inner: Inner = "inductor"
    """The compiler of regions: `inductor`, or `aot_eager` for the kernels and the bits of eager PyTorch."""
    compile_by: CompileBy = "auto"
    """At which ops regions begin, besides the ops at which the plan moves something. `layer`: at each of four or more
    equal layers, so there are few different regions to compile. `plan`: at no others. `auto`: `layer` under
    `inductor`, `plan` under `aot_eager`."""
    trace: Path | None = None
    """A folder for the figures of each training step, as `elixir_compile.observe(model, folder)` writes them. It is
    made if it is missing, and files of an earlier run in it are replaced. None: the folder in the environment variable
    `ELIXIR_TRACE`, or if it is not set, nothing is observed."""
    report: bool = True
    """Log a line with the plan at the first step, and a line with measured figures after some steps. On a terminal,
    also show the progress of a compilation that takes more than ten seconds."""

    def __post_init__(self) -> None:
        given = {
            name: getattr(self, name)
            for name in ("shard_param_frac", "offload_optim_frac", "offload_param_frac")
            if getattr(self, name) is not None
        }
        if self.fractions is None:
            for name, value in given.items():
                raise InvalidOption(name, value, 'placement_policy="static" beside it, or no fraction')
            return
        if self.planner not in _KEEPS_FRACTIONS:
            names = ", ".join(repr(name) for name in _KEEPS_FRACTIONS)
            raise InvalidOption("planner", self.planner, f'one of {names}, or placement_policy="auto"')
        if self.plan is not None:
            raise InvalidOption("plan", str(self.plan), 'None, or placement_policy="auto": a saved plan is placed')

    @property
    def fractions(self) -> Fractions | None:
        """The fractions that the planner keeps to; None under `placement_policy="auto"`.

        Raises ContradictingFractions.
        """
        if self.placement_policy == "auto":
            return None
        shard, optim, param = self.shard_param_frac, self.offload_optim_frac, self.offload_param_frac
        return Fractions(
            shard_param=1.0 if shard is None else shard,
            offload_optim=0.0 if optim is None else optim,
            offload_param=0.0 if param is None else param,
        )


_KEEPS_FRACTIONS = ("milp", "greedy")
"""The planners that search; rules place every bucket by themselves."""


def parse_options(options: Mapping[str, object] | None) -> Options:
    """Return `options`, checked and parsed; None or an empty mapping gives the defaults.

    Raises UnknownOption with the nearest name, InvalidOption if a value has the wrong type or range or does not go with
    another option, and ContradictingFractions.
    """
    known = tuple(field.name for field in fields(Options))
    parsed: dict[str, object] = {}
    for name, value in (options or {}).items():
        if name not in known:
            raise UnknownOption(name, known)
        parsed[name] = _PARSERS[name](name, value)
    if parsed.get("trace") is None and os.environ.get("ELIXIR_TRACE"):
        parsed["trace"] = Path(os.environ["ELIXIR_TRACE"])
    return Options(**parsed)  # pyright: ignore[reportArgumentType]  the parsers below give each field its type


_UNPLANNED = frozenset({"report", "replan", "guard", "plan_cache", "trace"})
"""The options on which the first plan of a step does not depend."""


def plans_alike(first: Options, second: Options) -> bool:
    """Return whether the same step gets the same plan under both options."""
    names = [field.name for field in fields(Options) if field.name not in _UNPLANNED]
    return all(getattr(first, name) == getattr(second, name) for name in names)


def _memory(name: str, value: object) -> int | None:
    if value is None:
        return None
    try:
        return parse_bytes(value)  # pyright: ignore[reportArgumentType]  a dict may hold any type: parse_bytes checks it
    except ValueError as error:
        raise InvalidOption(name, value, f"{BYTES_EXAMPLE}, or None") from error


def _one_of(*names: str, or_none: bool = False) -> Callable[[str, object], str | None]:
    def parse(name: str, value: object) -> str | None:
        if value is None and or_none:
            return None
        if not isinstance(value, str) or value not in names:
            raise InvalidOption(name, value, f"one of {', '.join(map(repr, names))}{', or None' if or_none else ''}")
        return value

    return parse


def _path(expected: str) -> Callable[[str, object], Path | None]:
    def parse(name: str, value: object) -> Path | None:
        if value is None:
            return None
        if not isinstance(value, str | Path) or str(value) == "":
            raise InvalidOption(name, value, expected)
        return Path(value)

    return parse


_any_folder = _path('a folder such as "/mnt/nvme", or None')


def _folder(name: str, value: object) -> Path | None:
    path = _any_folder(name, value)
    if path is None:
        return None
    # The folder must exist: making it would use another disk if the intended one is not mounted.
    if not path.is_dir():
        raise InvalidOption(name, value, "a folder that exists")
    if not os.access(path, os.W_OK | os.X_OK):
        raise InvalidOption(name, value, "a folder that you may write to")
    return path.absolute()


def _seconds(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
        raise InvalidOption(name, value, "a positive number of seconds such as 10.0")
    return float(value)


def _micro_batches(name: str, value: object) -> MicroBatches:
    if value == "fit":
        return "fit"
    if value == "auto":
        return "auto"
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidOption(name, value, '"fit", "auto" or a number of 1 or more')
    return value


def _fraction(name: str, value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise InvalidOption(name, value, "a number from 0.0 to 1.0")
    return float(value)


def _text(name: str, value: object) -> str | None:
    if value is not None and (not isinstance(value, str) or value == ""):
        raise InvalidOption(name, value, 'a text such as "a100-40g", or None')
    return value


def _bool(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidOption(name, value, "True or False")
    return value


def _bool_or_none(name: str, value: object) -> bool | None:
    if value is not None and not isinstance(value, bool):
        raise InvalidOption(name, value, "True, False or None")
    return value


_PARSERS: Mapping[str, Callable[[str, object], object]] = {
    "device_memory": _memory,
    "host_memory": _memory,
    "disk_path": _folder,
    "disk_check": _bool,
    "frozen_files": _bool,
    "planner": _one_of(*get_args(Planner)),
    "placement_policy": _one_of(*get_args(PlacementPolicy)),
    "shard_param_frac": _fraction,
    "offload_optim_frac": _fraction,
    "offload_param_frac": _fraction,
    "activations": _one_of(*get_args(Activations)),
    "accumulate": _bool_or_none,
    "update": _one_of(*get_args(UpdateTime)),
    "param_dtype": _one_of(*get_args(ParamDtype), or_none=True),
    "reduce_dtype": _one_of(*get_args(ReduceDtype), or_none=True),
    "state_dtype": _one_of(*get_args(StateDtype), or_none=True),
    "search_timeout": _seconds,
    "hardware": _text,
    "plan": _path('the path of a saved plan such as "plan.json"'),
    "plan_use": _one_of(*get_args(PlanUse)),
    "plan_cache": _bool,
    "micro_batches": _micro_batches,
    "profile_regions": _bool,
    "replan": _bool,
    "guard": _one_of(*get_args(GuardMode)),
    "inner": _one_of(*get_args(Inner)),
    "compile_by": _one_of(*get_args(CompileBy)),
    "trace": _path('a folder such as "run/trace", or None'),
    "report": _bool,
}
