"""The memory of one training step, as a test asks about it, and goldens: small files with which it is compared."""

import functools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NoReturn

from elixir_compile.base.errors import ElixirError, InvalidOption, UnknownSubject
from elixir_compile.base.folders import write_whole
from elixir_compile.base.units import format_bytes, parse_bytes
from elixir_compile.ir import Kind, OpId, Placement, Plan, Record, Saving, StepGraph, Tier
from elixir_compile.ir.plan import SAID, measured_line, plan_line
from elixir_compile.step.timeline import MemoryTimeline, Peak
from elixir_compile.tools.report.diff import TOLERANCE, RunDiff, diff_text, run_diff
from elixir_compile.tools.report.tables import LayerRow, Survey, layer_bytes, layer_rows, table_text, timeline_text

# ----------------------------------------------------------------------------------------------------------------------
# Goldens: the memory of a training step as a small text file, and the changes since it was written.
#
# # Memory of a training step in bytes. `pytest --elixir-update` writes this file.
# machine 1 x a100-40g
# peak at bwd.blocks.2.up.addmm
#
# step
#   peak bytes 1583104
#   host bytes 0
# at the peak
#   blocks.0 param 66816
#   blocks.0 saved 16384
# activations
#   blocks.0 recomputed 32768
#
# Lines with two spaces are figures: a layer or an action, a key without spaces, a number. The op at the peak is for
# readers and is not compared, because the numbers in names of ops change with versions of torch.


_HEADER = "# Memory of a training step in bytes. `pytest --elixir-update` writes this file."
_SECTIONS = ("step", "actions", "at the peak", "homes", "activations")
_MOST_ROWS = 30
"""Figures that a message lists, the largest changes first."""
_NAME = re.compile(r"[\w.\-\[\]=]+")

Key = tuple[str, str, str]
"""Section, name of a layer or an action, and what is counted: `("at the peak", "blocks.0", "saved")`."""


class GoldenFileError(ElixirError, ValueError):
    """The golden in the file `path` cannot be read; `because` says why."""

    path: Path
    because: str
    _text = "{path} is no golden of a training step: {because}. Write it anew with `--elixir-update`."


@dataclass(frozen=True, slots=True, kw_only=True)
class Golden:
    """The figures of a training step that a test compares."""

    machine: str
    peak_at: str = field(compare=False)
    """The op at the peak."""
    figures: Mapping[Key, int]

    def __str__(self) -> str:
        lines = [_HEADER, f"machine {self.machine}", f"peak at {self.peak_at}", ""]
        for section in _SECTIONS:
            own = [f"  {key[1]} {key[2]} {value}" for key, value in self.figures.items() if key[0] == section]
            lines += [section, *own] if own else []
        return "\n".join(lines) + "\n"


def golden_path(test_file: Path, name: str) -> Path:
    """Return the file of the golden `name` of a test in `test_file`: `goldens/test_memory.name.txt` beside it.

    Raises InvalidOption if `name` cannot be part of the name of a file.
    """
    if not _NAME.fullmatch(name):
        raise InvalidOption("name of a golden", name, "letters, digits and any of . _ - = [ ]")
    return test_file.parent / "goldens" / f"{test_file.stem}.{name}.txt"


def check_golden(path: Path, found: Golden, *, writes: bool = False, tolerance: float = 0.0) -> None:
    """Raise AssertionError with all differences if `found` is not the golden in the file `path`; if `writes`, write it.

    Bytes may differ by the share `tolerance` of those in the file. Raises GoldenFileError if the file cannot be read.
    """
    __tracebackhide__ = True
    if writes:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, str(found).encode())
        return
    if not path.exists():
        raise AssertionError(f"there is no golden {path}. Write it with `pytest --elixir-update`:\n\n{found}")
    said = difference(read_golden(path), found, tolerance)
    if said:
        hint = "If the change is meant, `pytest --elixir-update` writes the new golden."
        raise AssertionError(f"the memory of the step is not that of {path}:\n{said}\n{hint}")


def read_golden(path: Path) -> Golden:
    """Return the golden in the file `path`. Raises GoldenFileError if it is none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise GoldenFileError(path, str(error)) from error
    heads, figures, section = dict[str, str](), dict[Key, int](), ""
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith("#"):
            continue
        if line.startswith("  "):
            name, what, value = (["", "", "", *line.strip().rsplit(" ", 2)])[-3:]
            if not (section and name and value.isdecimal()):
                raise GoldenFileError(path, f"line {number} is {line!r}, expected a name, a key and a number")
            figures[section, name, what] = int(value)
        elif line in _SECTIONS:
            section = line
        else:
            head, _, rest = line.partition(" ")
            heads[head] = rest
    if "machine" not in heads:
        raise GoldenFileError(path, "it has no line `machine ...`")
    return Golden(machine=heads["machine"], peak_at=heads.get("peak", "").removeprefix("at "), figures=figures)


def difference(expected: Golden, found: Golden, tolerance: float = 0.0) -> str:
    """Return the changes from `expected` to `found` as text, the layers that grew or shrank first; empty if none.

    Bytes that differ by at most the share `tolerance` are no change.
    """
    lines = []
    if expected.machine != found.machine:
        lines.append(f"it was planned for {expected.machine}, and now for {found.machine}")
    keys = dict.fromkeys((*expected.figures, *found.figures))
    pairs = {key: (expected.figures.get(key, 0), found.figures.get(key, 0)) for key in keys}
    changed = {
        key: (before, now)
        for key, (before, now) in pairs.items()
        if abs(now - before) > (0.0 if key[0] == "actions" else tolerance * before)
    }
    by_layer: dict[str, Counter[str]] = {}
    for (section, layer, kind), pair in changed.items():
        if section == "at the peak":
            by_layer.setdefault(layer, Counter())[kind] += _by(pair)
    for layer, kinds in sorted(by_layer.items(), key=lambda item: -abs(item[1].total())):
        total = kinds.total()
        parts = ", ".join(f"{kind} {_signed(nbytes)}" for kind, nbytes in kinds.items())
        verb = "grew" if total > 0 else "shrank" if total < 0 else "changed"
        lines.append(f"{layer} {verb} by {format_bytes(abs(total))} at the peak ({parts})")
    if changed:
        by_size = sorted(changed.items(), key=lambda item: (_SECTIONS.index(item[0][0]), -abs(_by(item[1]))))
        lines += ["", table_text(("", "golden", "now", "change"), [_row(*item) for item in by_size[:_MOST_ROWS]])]
        lines += [f"and {len(changed) - _MOST_ROWS} more"] if len(changed) > _MOST_ROWS else []
    return "\n".join(lines)


def _by(pair: tuple[int, int]) -> int:
    return pair[1] - pair[0]


def _row(key: Key, pair: tuple[int, int]) -> tuple[str, str, str, str]:
    section, name, what = key
    before, now = pair
    share = f" ({_by(pair) / before:+.0%})" if before else " (new)" if now else ""
    if section == "actions":
        return f"{name}", str(before), str(now), f"{_by(pair):+d}{share}"
    label = f"{name} {what}" + (" at the peak" if section == "at the peak" else "")
    return label, format_bytes(before), format_bytes(now), f"{_signed(_by(pair))}{share}"


def _signed(nbytes: int) -> str:
    return f"{'+' if nbytes >= 0 else '-'}{format_bytes(abs(nbytes))}"


# ----------------------------------------------------------------------------------------------------------------------
# The memory of one training step, as a test asks about it: peak by kind, timeline, placements, and assertions.
#
# Everything is read from the plan and its graph, by the same functions that make reports. Where the step was also run,
# an assertion about a peak holds for the measured step too.


_MOST_LAYERS = 10
"""Layers and kinds that a message about a peak lists."""
_MOST_REASONS = 5
"""Reasons of the planner that a message lists."""


@dataclass(frozen=True, kw_only=True, repr=False)
class MemorySchedule:
    """The plan of one training step, with its figures of memory.

    Assertions raise AssertionError with the bytes, and with the layers that are not as expected. Where they take a
    `pattern`, it names consecutive parts of a dotted module path, each with the wildcards of `fnmatch`: `layers.*`
    matches the layer `model.layers.3`, and `layers.[01]` the first two. A pattern that matches no layer raises
    UnknownSubject.

    It has more than 20 methods, because each figure that a test reads, and each assertion, is one.
    """

    plan: Plan
    graph: StepGraph
    simulated: Record
    """The spans, counts and seconds of the step as planned."""
    measured: Record | None = None
    """The record of the step that was run, with the peaks of the model alone; None if none was run."""
    test_file: Path
    writes_goldens: bool = False
    is_named_machine: bool = True
    """Whether the machine was named, so that the plan is the same on every machine."""

    @functools.cached_property
    def _survey(self) -> Survey:
        return Survey(self.plan, self.graph)

    @property
    def timeline(self) -> MemoryTimeline:
        """The planned live bytes at each op, by kind."""
        assert self._survey.held is not None
        return self._survey.held.timeline

    @property
    def peak(self) -> Peak:
        """The planned peak on the device: its op, its bytes, and its bytes by kind."""
        return self.timeline.peak

    @property
    def peak_bytes(self) -> int:
        """The planned peak on the device."""
        return self.peak.nbytes

    @property
    def peak_by_kind(self) -> Mapping[Kind, int]:
        """The bytes at the planned peak by kind, which is also a string: `peak_by_kind["saved"]`. Without zeros."""
        return self.peak.by_kind

    @property
    def host_peak_bytes(self) -> int:
        """The planned bytes on the host."""
        return self.timeline.host_bytes

    @property
    def counts(self) -> Mapping[str, int]:
        """Number of planned actions by verb, as `gather` and `offload`. Verbs without actions are left out."""
        return self.simulated.counts

    @property
    def placements(self) -> Mapping[str, Placement]:
        """The homes of each parameter and of its optimizer state, by the name of the parameter."""
        placed = zip(self.plan.buckets, self.plan.placements, strict=True)
        return {str(name): placement for bucket, placement in placed for name in bucket.params}

    @functools.cached_property
    def layers(self) -> Mapping[str, LayerRow]:
        """By layer, or by module outside of all layers: the homes of its state, and its activations by treatment."""
        rows = layer_rows(self._survey, [0.0] * len(self.timeline.ops))
        return {row.layer: row for row in rows}

    def layer_bytes(self, op: OpId | None = None) -> Mapping[str, Mapping[Kind, int]]:
        """Return the live bytes at `op`, by default at the peak, by layer and kind. They add up to the live bytes."""
        assert self._survey.held is not None
        return layer_bytes(self._survey.held, self.peak.op if op is None else op)

    def assert_peak_below(self, limit: "str | int") -> None:
        """Fail unless the peak on the device is at most `limit`, such as `"2GiB"`: as planned, and as measured if a
        step was run."""
        __tracebackhide__ = True
        limit_bytes = _limit_bytes(limit)
        if self.peak_bytes > limit_bytes:
            held = [(nbytes, layer, kind) for layer, own in self.layer_bytes().items() for kind, nbytes in own.items()]
            held.sort(key=lambda one: -one[0])
            rows = [(layer, str(kind), format_bytes(nbytes)) for nbytes, layer, kind in held[:_MOST_LAYERS]]
            largest = f"the largest at {self.peak.op}:\n{table_text(('', 'kind', 'bytes'), rows)}"
            raise AssertionError(f"{_above('planned', self.peak_bytes, limit_bytes)}\n{largest}")
        if self.measured is not None and self.measured.device_peak_bytes > limit_bytes:
            said = _above("measured", self.measured.device_peak_bytes, limit_bytes)
            raise AssertionError(f"{said}; planned were {format_bytes(self.peak_bytes)}")

    def assert_host_peak_below(self, limit: "str | int") -> None:
        """Fail unless the bytes on the host are at most `limit`: as planned, and as measured if a step was run."""
        __tracebackhide__ = True
        limit_bytes = _limit_bytes(limit)
        measured = [] if self.measured is None else [("measured", self.measured.host_peak_bytes)]
        for origin, nbytes in (("planned", self.host_peak_bytes), *measured):
            if nbytes > limit_bytes:
                raise AssertionError(_above(origin, nbytes, limit_bytes, where="on the host"))

    def assert_recomputed(self, pattern: str, *, at_least: int | None = None) -> None:
        """Fail unless activations of every layer that `pattern` names, or of `at_least` of them, are recomputed."""
        __tracebackhide__ = True
        self._assert_treated(pattern, Saving.RECOMPUTE, at_least)

    def assert_offloaded(self, pattern: str, *, at_least: int | None = None) -> None:
        """Fail unless activations of every layer that `pattern` names, or of `at_least` of them, are offloaded."""
        __tracebackhide__ = True
        self._assert_treated(pattern, Saving.OFFLOAD, at_least)

    def assert_kept(self, pattern: str) -> None:
        """Fail unless all activations of the layers that `pattern` names stay on the device."""
        __tracebackhide__ = True
        moved = [row for row in self._named(pattern) if any(row.saved_bytes[s] for s in Saving if s is not Saving.KEEP)]
        if moved:
            _refuse(moved, f"activations of {pattern!r} to be kept")

    def assert_placed(self, pattern: str, *, param: str | None = None, optim: str | None = None) -> None:
        """Fail unless the parameters of the layers that `pattern` names live in the memory `param`, and their optimizer
        state in the memory `optim`: `device`, `host` or `disk`; None for any."""
        __tracebackhide__ = True
        for what, name in (("param", param), ("optim", optim)):
            if name is None:
                continue
            if name not in list(Tier):
                raise InvalidOption(what, name, "one of " + ", ".join(repr(tier.value) for tier in Tier))
            rows = self._named(pattern)
            held = [(row, row.param_bytes if what == "param" else row.state_bytes) for row in rows]
            elsewhere = [row for row, nbytes in held if any(nbytes[tier] for tier in Tier if tier != name)]
            noun = "parameters" if what == "param" else "optimizer state"
            if elsewhere:
                _refuse(elsewhere, f"the {noun} of {pattern!r} on {name}")

    def assert_runs_as_planned(self, tolerance: float = TOLERANCE) -> None:
        """Fail unless the measured step did as many actions as planned, and its peak on the device is within the share
        `tolerance` of the planned one.

        Raises InvalidOption if no step was run.
        """
        __tracebackhide__ = True
        if self.measured is None:
            raise InvalidOption("run", False, "True: without a measured step there is nothing to compare")
        found = run_diff(self.plan, self.measured)
        counts = [one for one in found.comparisons if not one.what.endswith(("_s", "_bytes"))]
        is_far = abs(self.measured.device_peak_bytes - self.peak_bytes) > tolerance * self.peak_bytes
        if is_far or any(one.is_off for one in counts):
            shown = tuple(one for one in found.comparisons if one.what != "step_s")
            raise AssertionError(diff_text(RunDiff(origin=found.origin, comparisons=shown)))

    def assert_matches_golden(self, name: str, *, tolerance: float = 0.0) -> None:
        """Fail unless the memory of the step is that of the golden `name`, a text file in the folder `goldens` beside
        the test file; the message says which layer grew by how much.

        Bytes may differ by the share `tolerance`. With the option `--elixir-update` of pytest, the file is written
        instead. Raises InvalidOption for a plan on this machine: elsewhere it would be another one.
        """
        __tracebackhide__ = True
        if not self.is_named_machine:
            raise InvalidOption(
                "hardware", None, 'a machine by name, such as "a100-40g": a golden is for every machine'
            )
        path = golden_path(self.test_file, name)
        check_golden(path, self.golden(), writes=self.writes_goldens, tolerance=tolerance)

    def golden(self) -> Golden:
        """Return the figures that a golden holds: peaks, counts, bytes at the peak by layer and kind, homes, and
        activations by treatment."""
        figures: dict[tuple[str, str, str], int] = {
            ("step", "peak", "bytes"): self.peak_bytes,
            ("step", "host", "bytes"): self.host_peak_bytes,
        }
        figures |= {("actions", verb, "times"): times for verb, times in self.counts.items()}
        for layer, own in self.layer_bytes().items():
            figures |= {("at the peak", layer, str(kind)): nbytes for kind, nbytes in own.items()}
        for layer, row in self.layers.items():
            figures |= {("homes", layer, f"param/{tier}"): row.param_bytes[tier] for tier in Tier}
            figures |= {("homes", layer, f"state/{tier}"): row.state_bytes[tier] for tier in Tier}
            figures |= {("activations", layer, SAID[saving]): row.saved_bytes[saving] for saving in Saving}
        shown = {key: value for key, value in figures.items() if value or key[0] == "step"}
        return Golden(machine=self.plan.cluster, peak_at=str(self.peak.op), figures=shown)

    def __repr__(self) -> str:
        return f"<MemorySchedule of {self.plan.name}: {plan_line(self.plan)}>"

    def __str__(self) -> str:
        lines = [plan_line(self.plan)]
        lines += [] if self.measured is None else [measured_line(self.measured, self.plan)]
        return "\n".join([*lines, "", timeline_text(self.timeline), "", _layers_text(self.layers.values())])

    def _named(self, pattern: str) -> list[LayerRow]:
        """Return the rows that `pattern` names. Raises UnknownSubject if there are none."""
        found = [row for layer, row in self.layers.items() if is_named(layer, pattern)]
        if not found:
            raise UnknownSubject(pattern, list(self.layers))
        return found

    def _assert_treated(self, pattern: str, saving: Saving, at_least: int | None) -> None:
        __tracebackhide__ = True
        rows = self._named(pattern)
        others = [row for row in rows if not row.saved_bytes[saving]]
        num_needed = len(rows) if at_least is None else at_least
        if len(rows) - len(others) < num_needed:
            _refuse(others, f"activations of {num_needed} of {len(rows)} layers {pattern!r} to be {SAID[saving]}")


def is_named(path: str, pattern: str) -> bool:
    """Return whether the parts of `pattern` match as many consecutive parts of the dotted `path`."""
    parts, wanted = path.split("."), pattern.split(".")
    starts = range(len(parts) - len(wanted) + 1)
    return any(all(map(fnmatchcase, parts[at : at + len(wanted)], wanted)) for at in starts)


def _refuse(rows: Sequence[LayerRow], expected: str) -> NoReturn:
    """Raise AssertionError with the text `expected`, the table of `rows`, and the planner's reasons."""
    __tracebackhide__ = True
    because = dict.fromkeys(f"\n{one.subject}: {one.because}" for row in rows for one in row.decisions if one.because)
    whys = "".join(list(because)[:_MOST_REASONS])
    raise AssertionError(f"expected {expected}; these layers are not so:\n{_layers_text(rows)}{whys}")


def _limit_bytes(limit: "str | int") -> int:
    try:
        return parse_bytes(limit)
    except ValueError as error:
        raise InvalidOption("limit", limit, 'a number of bytes such as "2GiB"') from error


def _above(origin: str, nbytes: int, limit_bytes: int, where: str = "on the device") -> str:
    over = format_bytes(nbytes - limit_bytes)
    return f"{origin} peak {where} {format_bytes(nbytes)} ({nbytes} B) is {over} above {format_bytes(limit_bytes)}"


def _layers_text(rows: Iterable[LayerRow]) -> str:
    """Return a table of the homes and the activations of layers."""
    cells = [
        (
            row.layer,
            _said(row.param_bytes),
            _said(row.state_bytes),
            _said({SAID[s]: n for s, n in row.saved_bytes.items()}),
        )
        for row in rows
    ]
    return table_text(("layer", "parameters", "optimizer state", "activations"), cells)


def _said(nbytes: "Mapping[Tier, int] | Mapping[str, int]") -> str:
    return ", ".join(f"{name} {format_bytes(count)}" for name, count in nbytes.items() if count) or "-"
