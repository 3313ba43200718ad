"""Every knob of `torch.compile(model, backend="elixir", options={...})`: a flat dict that survives YAML.

{"device_memory": "20GiB", "planner": "greedy"}  ->  Options(device_memory=21474836480, planner="greedy", ...)
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, get_args

from elixir_compile.errors import InvalidOption, UnknownOption
from elixir_compile.units import BYTES_EXAMPLE, parse_bytes

Planner = Literal["greedy", "exhaustive", "keep_all"]
Inner = Literal["inductor", "aot_eager"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Every option, parsed; each has a default that works."""

    device_memory: int | None = None
    """Bytes that training may hold on the device at once, `"20GiB"` or a number. None: free memory less the reserve."""
    host_memory: int | None = None
    """Bytes of host memory for parameters, gradients and optimizer state. None: what the host has free."""
    planner: Planner = "greedy"
    """`greedy` offloads only the excess, `exhaustive` tries each placement of a few buckets, `keep_all` moves none."""
    plan: Path | None = None
    """A saved plan to use in place of searching; refused when it is for another graph or machine."""
    inner: Inner = "inductor"
    """What lowers each region: `inductor`, or `aot_eager` for results bitwise equal to eager kernels."""
    report: bool = True
    """Log the planned line at the first step and the measured line after some steps."""


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


def _path(name: str, value: object) -> Path | None:
    if value is None:
        return None
    if not isinstance(value, str | Path) or str(value) == "":
        raise InvalidOption(name, value, 'the path of a saved plan such as "plan.json"')
    return Path(value)


def _bool(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidOption(name, value, "True or False")
    return value


_PARSERS: Mapping[str, Callable[[str, object], object]] = {
    "device_memory": _memory,
    "host_memory": _memory,
    "planner": _one_of(*get_args(Planner)),
    "plan": _path,
    "inner": _one_of(*get_args(Inner)),
    "report": _bool,
}
