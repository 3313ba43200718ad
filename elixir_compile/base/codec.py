"""Turn dataclasses into JSON and back by their type hints.

```text
  {"elixir": "plan", "format": 1, "name": ..., "placements": [{"bucket": "b0", "param": "host", ...}], ...}
```

Reading is strict: another format, a missing or unknown field, a value of the wrong type and NaN or infinity each
raise the error of the `Form`, with the path of the field (`placements[3].param`). Equal values have equal text.
Supported are dataclasses, tuples, `Mapping[str, ...]`, `... | None`, StrEnum, NewType, int, float, str and bool,
frozensets of them, written as sorted lists, and unions of dataclasses that each have a class variable `kind`, a text
that is written before their fields.

A field with the metadata `LEFT_OUT` is written only if its value is not the default, so a new field of that kind
changes no text and no format version.
"""

import dataclasses
import functools
import json
import math
import types
import typing
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, NewType, TypeVar

from elixir_compile.base.errors import ElixirError, InvalidPlan, InvalidProfile

_Value = TypeVar("_Value")
_MAX_INTEGER = (1 << 63) - 1
"""The largest whole number in a file: bytes, elements and counts are added up in 64 bits."""
_MAX_LENGTH = 1 << 28
"""The most characters of a file. A plan of 200 layers has 2 million; the parsed values take about ten times the
memory."""
_MISSING = object()
LEFT_OUT = {"left out of JSON if it has its default": True}
"""The metadata of a field of a dataclass that is written only if its value is not the default."""
_UNIONS = (types.UnionType, typing.Union)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The kind and version that a file must state, and the error to raise if it is faulty."""

    what: str
    version: int
    error: Callable[[str, str, object], ElixirError]
    upgrades: Mapping[int, Callable[[Any], None]] = dataclasses.field(default_factory=dict)
    """By earlier version that is read too: a function that turns the parsed JSON into that of the next version."""


class _Wrong(Exception):  # noqa: N818 - never leaves this module
    """A faulty field, its expected and its actual content. `from_json` turns it into the error of the form."""

    def __init__(self, field: str, expected: str, got: object) -> None:
        super().__init__(field, expected, got)
        self.field = field
        self.expected = expected
        self.got = got


def to_json(form: Form, value: Any, *, indent: int | None = 1) -> str:
    """Return the dataclass `value` as JSON, on a single line if `indent` is None.

    Raises ValueError if it holds NaN or infinity.
    """
    fields = {"elixir": form.what, "format": form.version} | _encoder(type(value))(value)
    return json.dumps(fields, indent=indent, allow_nan=False)


def from_json(form: Form, cls: type[_Value], text: str) -> _Value:
    """Return the value of class `cls` in `text`. Raises `form.error`, which names the wrong field, if there is one."""
    try:
        data = _parse(text)
        if not isinstance(data, dict):
            raise _Wrong("the whole text", f"an object that holds a {form.what}", data)
        found = data.pop("elixir", _MISSING)
        if found != form.what:
            raise _Wrong("elixir", f"'{form.what}'", "nothing" if found is _MISSING else found)
        version = data.get("format", _MISSING)
        if type(version) is not int or (version != form.version and version not in form.upgrades):
            is_later = type(version) is int and version > form.version
            earlier = "".join(f" or {version}" for version in sorted(form.upgrades, reverse=True))
            hint = f" (a later elixir_compile wrote the {form.what}; that version reads it)" if is_later else ""
            raise _Wrong("format", f"{form.version}{earlier}{hint}", "nothing" if version is _MISSING else version)
        for earlier_version in range(version, form.version):
            form.upgrades[earlier_version](data)
        data["format"] = form.version
        if "format" not in _fields(cls):
            del data["format"]
        return _decode(cls, data, "")
    except _Wrong as wrong:
        raise form.error(wrong.field, wrong.expected, wrong.got) from wrong.__cause__


def _parse(text: str) -> Any:
    if len(text) > _MAX_LENGTH:
        raise _Wrong("the whole text", f"at most {_MAX_LENGTH} characters", f"{len(text)}")
    try:
        return json.loads(text, object_pairs_hook=_without_repeats)
    except json.JSONDecodeError as error:
        raise _Wrong(
            f"line {error.lineno} column {error.colno}", f"JSON ({error.msg})", text[error.pos :][:20]
        ) from error
    except RecursionError as error:
        raise _Wrong("the whole text", "JSON of a few levels", "deeper nesting") from error
    except ValueError as error:  # Python parses whole numbers of at most 4300 digits
        raise _Wrong("a number", "a number of fewer digits", str(error)) from error


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise _Wrong(name, "each field once", "the field again")
        found[name] = value
    return found


@functools.cache
def _fields(cls: type) -> dict[str, Any]:
    """Return the type of each field of a dataclass, in order."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


@functools.cache
def _defaults(cls: type) -> dict[str, Any]:
    """Return the default of each field of a dataclass that is left out of JSON if it has that value."""
    return {field.name: field.default for field in dataclasses.fields(cls) if field.metadata == LEFT_OUT}


def _fields_encoder(cls: type) -> Callable[[Any], dict[str, Any]]:
    """Return a function from values of the dataclass `cls` to objects of JSON."""
    defaults = _defaults(cls)
    encoders = [(name, _encoder(kind), defaults.get(name, _MISSING)) for name, kind in _fields(cls).items()]

    def encode(value: Any) -> dict[str, Any]:
        found = ((name, encode, getattr(value, name), default) for name, encode, default in encoders)
        return {name: encode(item) for name, encode, item, default in found if item != default}

    return encode


@functools.cache
def _encoder(hint: Any) -> Callable[[Any], Any]:
    """Return a function from values of type `hint` to lists, objects and scalars of JSON."""
    hint = _plain(hint)
    if dataclasses.is_dataclass(hint):
        return _fields_encoder(typing.cast(type, hint))
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple and args[-1] is Ellipsis:
        encode_item = _encoder(args[0])
        return lambda value: [encode_item(item) for item in value]
    if origin is tuple:
        item_encoders = [_encoder(kind) for kind in args]
        return lambda value: [encode(item) for encode, item in zip(item_encoders, value, strict=True)]
    if origin is frozenset:
        encode_member = _encoder(args[0])
        return lambda value: sorted(encode_member(item) for item in value)
    if origin is Mapping:
        encode_value = _encoder(args[1])
        return lambda value: {str(key): encode_value(item) for key, item in sorted(value.items())}
    if origin in _UNIONS and types.NoneType in args:
        encode_some = _encoder(args[0])
        return lambda value: None if value is None else encode_some(value)
    if origin in _UNIONS:
        encode_fields = {cls: _encoder(cls) for cls in args}
        return lambda value: {"kind": value.kind} | encode_fields[type(value)](value)
    # numpy's numbers become Python's.
    return hint if hint in (int, float) else lambda value: value


def _decode(hint: Any, data: Any, path: str) -> Any:
    """Return the value of type `hint` in the JSON `data`; `path` is the place of `data` in the file, for errors."""
    hint = _plain(hint)
    if dataclasses.is_dataclass(hint):
        return _decode_fields(typing.cast(type, hint), data, path)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        return _decode_items(args, data, path)
    if origin is frozenset:
        members = _decode_items((args[0], Ellipsis), data, path)
        _expect(len(set(members)) == len(members), path, "a list with each item once", data)
        return frozenset(members)
    if origin is Mapping:
        _expect(isinstance(data, dict), path, "an object", data)
        return {key: _decode(args[1], item, f"{path}.{key}") for key, item in data.items()}
    if origin in _UNIONS and types.NoneType in args:
        return None if data is None else _decode(args[0], data, path)
    if origin in _UNIONS:  # of classes, by the kind that the object states
        by_kind = {cls.kind: cls for cls in args}
        _expect(isinstance(data, dict), path, "an object with a kind", data)
        _expect("kind" in data, _join(path, "kind"), "a value", "nothing: the field is missing")
        kind = data["kind"]
        is_known = isinstance(kind, str) and kind in by_kind
        _expect(is_known, _join(path, "kind"), "one of " + ", ".join(by_kind), kind)
        return _decode_fields(by_kind[kind], {name: item for name, item in data.items() if name != "kind"}, path)
    return _decode_scalar(hint, data, path)


def _decode_fields(cls: type, data: Any, path: str) -> Any:
    _expect(isinstance(data, dict), path, f"an object with the fields of {cls.__name__}", data)
    hints = _fields(cls)
    for name in data:
        _expect(name in hints, _join(path, name), "no such field; the fields are " + ", ".join(hints), data[name])
    for name in hints:
        _expect(name in data or name in _defaults(cls), _join(path, name), "a value", "nothing: the field is missing")
    values = {name: _decode(hint, data[name], _join(path, name)) for name, hint in hints.items() if name in data}
    try:
        return cls(**values)
    except InvalidProfile as error:
        raise _Wrong(_join(path, error.field), error.expected, error.got) from error
    except InvalidPlan as error:
        raise _Wrong(path or "the whole text", "values that agree", str(error)) from error


def _decode_items(args: tuple[Any, ...], data: Any, path: str) -> tuple[Any, ...]:
    _expect(isinstance(data, list), path, "a list", data)
    hints = (args[0],) * len(data) if args[-1] is Ellipsis else args
    _expect(len(hints) == len(data), path, f"a list of {len(hints)}", data)
    return tuple(
        _decode(hint, item, f"{path}[{index}]") for index, (hint, item) in enumerate(zip(hints, data, strict=True))
    )


def _decode_scalar(hint: Any, data: Any, path: str) -> Any:
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        _expect(isinstance(data, str) and data in list(hint), path, "one of " + ", ".join(hint), data)
        return hint(data)
    if hint is float:
        # A whole number is a valid number of seconds, but True is not.
        try:
            is_finite = type(data) in (int, float) and math.isfinite(data)
        except OverflowError:  # a whole number beyond 1.8e308
            is_finite = False
        _expect(is_finite, path, "a finite number", data)
        return float(data)
    names = {int: "a whole number", str: "a text", bool: "true or false"}
    _expect(type(data) is hint, path, names[hint], data)
    if hint is int:
        _expect(abs(data) <= _MAX_INTEGER, path, f"a whole number of at most {_MAX_INTEGER}", data)
    return data


def _plain(hint: Any) -> Any:
    """Return the type under a NewType, and any other hint unchanged."""
    return hint.__supertype__ if isinstance(hint, NewType) else hint


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _expect(is_right: bool, path: str, expected: str, got: Any) -> None:
    if not is_right:
        raise _Wrong(path, expected, got)
