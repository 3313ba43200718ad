"""The folder of an observed run: names of its files, and their content as values.

```text
  meta.json                  the observation
  steps-r0.jsonl             a summary on each line, in order of the steps of rank 0
  record-r0-8.json.gz        all that was recorded of step 8 of rank 0
  plan-<key>.json            the plan that summaries name, and beside it plan-<key>.question.json.gz
```

Each rank writes its own files. A line is on disk when its step is known, so a process that is killed leaves whole
lines, and at most a part of one behind them.
"""

import gzip
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from elixir_compile.base.codec import Form, from_json, to_json
from elixir_compile.base.errors import TraceFileError
from elixir_compile.base.folders import write_whole
from elixir_compile.tools.study.observed import (
    FullStep,
    StepSummary,
    full_step_from_json,
    full_step_to_json,
    summaries_from_lines,
)

TRACE_FORMAT = 1
Value = TypeVar("Value")
_META = Form(what="trace", version=TRACE_FORMAT, error=TraceFileError)
_STEPS, _RECORD = re.compile(r"steps-r(\d+)\.jsonl"), re.compile(r"record-r(\d+)-(\d+)\.json\.gz")
_MOST_BYTES = 1 << 28
"""The most bytes that are read of one file, unpacked: 256 MiB, a summary of a million steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceMeta:
    """The facts about an observation as a whole, with the versions."""

    model: str
    """The class of the model."""
    num_ranks: int
    device: str
    """The type of the device: `cpu`, `cuda`."""
    versions: Mapping[str, str]
    """By library: `torch`, `elixir_compile`, `python`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The figures in a folder: summaries by rank, and the paths of the full records by rank and step."""

    meta: TraceMeta
    steps: Mapping[int, tuple[StepSummary, ...]]
    records: Mapping[tuple[int, int], Path]


def meta_path(folder: Path) -> Path:
    """Return the path of the file with the `TraceMeta`."""
    return folder / "meta.json"


def steps_path(folder: Path, rank: int) -> Path:
    """Return the path of the summaries of `rank`."""
    return folder / f"steps-r{rank}.jsonl"


def record_path(folder: Path, rank: int, step: int) -> Path:
    """Return the path of the full record of `step` of `rank`."""
    return folder / f"record-r{rank}-{step}.json.gz"


def plan_path(folder: Path, key: str) -> Path:
    """Return the path of the plan with `key`."""
    return folder / f"plan-{key}.json"


def own_files(folder: Path, rank: int) -> Iterator[Path]:
    """Yield the files in `folder` that an observation on `rank` has written: summaries and records."""
    for path in folder.iterdir():
        found = _STEPS.fullmatch(path.name) or _RECORD.fullmatch(path.name)
        if found is not None and int(found.group(1)) == rank:
            yield path


def write_meta(folder: Path, meta: TraceMeta) -> None:
    """Write `meta` to `folder`."""
    write_whole(meta_path(folder), to_json(_META, meta).encode())


def write_full_step(folder: Path, full: FullStep) -> None:
    """Write the full record of a step to `folder`, as a whole or not at all."""
    content = gzip.compress(full_step_to_json(full).encode(), compresslevel=1, mtime=0)
    write_whole(record_path(folder, full.summary.rank, full.summary.step), content)


def read_trace(folder: "str | Path") -> Trace:
    """Return the figures in `folder`.

    Raises TraceFileError with the file and the wrong field if a file is damaged, and if the folder holds no meta.json.
    """
    place = Path(folder)
    meta = parsed(meta_path(place), lambda text: from_json(_META, TraceMeta, text))
    steps: dict[int, tuple[StepSummary, ...]] = {}
    records: dict[tuple[int, int], Path] = {}
    for path in sorted(place.iterdir()):
        if found := _STEPS.fullmatch(path.name):
            steps[int(found.group(1))] = tuple(parsed(path, summaries_from_lines))
        elif found := _RECORD.fullmatch(path.name):
            records[int(found.group(1)), int(found.group(2))] = path
    return Trace(meta=meta, steps=dict(sorted(steps.items())), records=dict(sorted(records.items())))


def read_full_step(path: "str | Path") -> FullStep:
    """Return the full record of a step in the file at `path`. Raises TraceFileError if there is none."""
    return parsed(Path(path), full_step_from_json)


def parsed(path: Path, parse: Callable[[str], Value]) -> Value:
    """Return `parse` of the text in the file at `path`, unpacked if its name ends in `.gz`.

    Raises TraceFileError with the name of the file if it cannot be read, or if `parse` raises it.
    """
    try:
        return parse(_text(path))
    except TraceFileError as error:
        raise TraceFileError(f"{path}, {error.field}", error.expected, error.got) from error.__cause__


def _text(path: Path) -> str:
    try:
        with path.open("rb") as packed:
            file = gzip.GzipFile(fileobj=packed) if path.suffix == ".gz" else packed
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise TraceFileError("the whole file", f"at most {_MOST_BYTES} bytes", "more")
        return content.decode()
    except UnicodeDecodeError as error:
        raise TraceFileError("the whole file", "text in UTF-8", f"byte {error.start} that is no UTF-8") from error
    except (EOFError, zlib.error) as error:
        raise TraceFileError("the whole file", "a whole gzip file", str(error)) from error
    except OSError as error:
        raise TraceFileError("the whole file", "a file that can be read", error.strerror or str(error)) from error
