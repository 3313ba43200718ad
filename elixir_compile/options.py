"""Every knob of `torch.compile(model, backend="elixir", options={...})`: a flat dict that survives YAML.

{"device_memory": "20GiB", "planner": "greedy"}  ->  Options(device_memory=21474836480, planner="greedy", ...)
"""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, get_args

from elixir_compile.errors import InvalidOption, UnknownOption
from elixir_compile.units import BYTES_EXAMPLE, parse_bytes

Planner = Literal["milp", "greedy", "exhaustive", "elixir", "zero3_offload", "zero_offload", "fsdp_offload", "keep_all"]
Inner = Literal["inductor", "aot_eager"]
Activations = Literal["any", "keep", "recompute", "offload"]
ParamDtype = Literal["bfloat16", "float16"]
ReduceDtype = Literal["float32"]
CompileBy = Literal["auto", "layer", "plan"]
UpdateTime = Literal["auto", "in_backward", "after_backward", "across_steps"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Every option, parsed; each has a default that works."""

    device_memory: int | None = None
    """Bytes that training may hold on the device at once, `"20GiB"` or a number. None: free memory less the reserve."""
    host_memory: int | None = None
    """Bytes of host memory for parameters, gradients and optimizer state. None: what the host has free."""
    disk_path: Path | None = None
    """A folder for optimizer state that the host has no room for; files in it belong to this process and go with it.
    None: no state is kept on disk."""
    disk_check: bool = False
    """Compare what is read from `disk_path` with a checksum of what was written."""
    planner: Planner = "milp"
    """`milp` proves how good its plan is, `greedy` is quicker, `exhaustive` tries each placement of a few buckets. The
    others are rules to compare with: `elixir` (the paper's), `zero3_offload`, `zero_offload`, `fsdp_offload`,
    `keep_all`."""
    activations: Activations = "any"
    """What may happen to saved activations besides staying: `recompute`, `offload`, `any` of both, or nothing (`keep`).
    """
    update: UpdateTime = "auto"
    """When HybridAdamW updates: `after_backward`, within `optimizer.step()`; `across_steps`, where `step()` queues what
    the host updates and the next forward waits bucket by bucket; `in_backward`, as soon as the gradient of a bucket has
    landed, for training without clipping and loss scaling. `auto`: across steps where the host updates anything."""
    param_dtype: ParamDtype | None = None
    """What `prepare(model, param_dtype=...)` casts fp32 parameters to, with an fp32 master for HybridAdamW. Compiling
    only checks it, because graphs are captured after the cast. None: parameters stay as they are."""
    reduce_dtype: ReduceDtype | None = None
    """`float32`: gradients of several micro-batches, and of several ranks, add up in fp32, of parameters that have a
    master. None: in the dtype of the parameter."""
    search_timeout: float = 10.0
    """Seconds after which `milp` returns the best plan so far, with the gap it has proved."""
    hardware: str | None = None
    """The machine to plan for: a name such as `"4 x a100-40g"` or the path of a profile that `elixir-compile measure`
    wrote. None: this machine, as measured before, else a rough built-in profile."""
    plan: Path | None = None
    """A saved plan to use in place of searching; refused when it is for another graph or machine."""
    plan_cache: bool = True
    """Use the plan that an earlier run found for the same graph, machine and options."""
    profile_regions: bool = False
    """Time every distinct region once before planning; remembered per machine."""
    replan: bool = True
    """Plan again, once, where the first steps take more than 10 % longer or shorter than planned."""
    inner: Inner = "inductor"
    """What lowers each region: `inductor`, or `aot_eager` for results bitwise equal to eager kernels."""
    compile_by: CompileBy = "auto"
    """Where regions begin besides where the plan moves something: `layer`: at each of four or more equal layers,
    so that the compiler gets few different regions; `plan`: nowhere else. `auto`: by layer where regions are compiled,
    by plan where they run op by op."""
    report: bool = True
    """Log the planned line at the first step and the measured line after some steps; on a terminal, also how far a
    compilation of more than ten seconds is."""


def parse_options(options: Mapping[str, object] | None) -> Options:
    """Return `options` checked and parsed; None or an empty mapping gives the defaults.

    Raises `UnknownOption` with the nearest name, and `InvalidOption` for a value of the wrong type or range.
    """
    known = tuple(field.name for field in fields(Options))
    parsed: dict[str, object] = {}
    for name, value in (options or {}).items():
        if name not in known:
            raise UnknownOption(name, known)
        parsed[name] = _PARSERS[name](name, value)
    return Options(**parsed)  # pyright: ignore[reportArgumentType]  the parsers below give each field its type


def _memory(name: str, value: object) -> int | None:
    if value is None:
        return None
    try:
        return parse_bytes(value)  # pyright: ignore[reportArgumentType]  whatever a dict holds: checked there
    except ValueError as error:
        raise InvalidOption(name, value, f"{BYTES_EXAMPLE}, or None") from error


def _one_of(*names: str) -> Callable[[str, object], str]:
    def parse(name: str, value: object) -> str:
        if not isinstance(value, str) or value not in names:
            raise InvalidOption(name, value, "one of " + ", ".join(repr(choice) for choice in names))
        return value

    return parse


def _one_of_or_none(*names: str) -> Callable[[str, object], str | None]:
    def parse(name: str, value: object) -> str | None:
        if value is not None and (not isinstance(value, str) or value not in names):
            raise InvalidOption(name, value, "one of " + ", ".join(repr(choice) for choice in names) + ", or None")
        return value

    return parse


def _path(name: str, value: object) -> Path | None:
    if value is None:
        return None
    if not isinstance(value, str | Path) or str(value) == "":
        raise InvalidOption(name, value, 'the path of a saved plan such as "plan.json"')
    return Path(value)


def _folder(name: str, value: object) -> Path | None:
    if value is None:
        return None
    if not isinstance(value, str | Path) or str(value) == "":
        raise InvalidOption(name, value, 'a folder such as "/mnt/nvme", or None')
    # Not made here: a disk that is not mounted would silently be another disk.
    if not os.path.isdir(value):
        raise InvalidOption(name, value, "a folder that exists")
    if not os.access(value, os.W_OK | os.X_OK):
        raise InvalidOption(name, value, "a folder that may be written")
    return Path(value).absolute()


def _seconds(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
        raise InvalidOption(name, value, "a positive number of seconds such as 10.0")
    return float(value)


def _text(name: str, value: object) -> str | None:
    if value is not None and (not isinstance(value, str) or value == ""):
        raise InvalidOption(name, value, 'a text such as "a100-40g", or None')
    return value


def _bool(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidOption(name, value, "True or False")
    return value


_PARSERS: Mapping[str, Callable[[str, object], object]] = {
    "device_memory": _memory,
    "host_memory": _memory,
    "disk_path": _folder,
    "disk_check": _bool,
    "planner": _one_of(*get_args(Planner)),
    "activations": _one_of(*get_args(Activations)),
    "update": _one_of(*get_args(UpdateTime)),
    "param_dtype": _one_of_or_none(*get_args(ParamDtype)),
    "reduce_dtype": _one_of_or_none(*get_args(ReduceDtype)),
    "search_timeout": _seconds,
    "hardware": _text,
    "plan": _path,
    "plan_cache": _bool,
    "profile_regions": _bool,
    "replan": _bool,
    "inner": _one_of(*get_args(Inner)),
    "compile_by": _one_of(*get_args(CompileBy)),
    "report": _bool,
}
