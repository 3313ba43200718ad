"""Cache on disk what later runs need again: the plan of each problem, and the bytes that kernels allocate on this
machine.
"""

import functools
import hashlib
import json
import logging
import math
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from elixir_compile.base.errors import ElixirError, ElixirWarning, NoFeasiblePlan
from elixir_compile.base.folders import cache_dir, drop_oldest, read_cached, write_cached
from elixir_compile.base.options import Options
from elixir_compile.base.units import format_bytes, format_s
from elixir_compile.base.version import __version__, source_digest
from elixir_compile.graph.capture.captured import KernelBytes, KernelCall
from elixir_compile.ir import PLAN_FORMAT, Op, Plan, Tier, plan_from_json, plan_to_json
from elixir_compile.ir.hardware import hardware_fingerprint
from elixir_compile.runtime.lowering import in_own_memory
from elixir_compile.runtime.measure import measured_bytes
from elixir_compile.search import Problem
from elixir_compile.search.evaluator import deadline_in
from elixir_compile.search.greedy import RULES
from elixir_compile.search.joint.variants import plan_as_asked
from elixir_compile.search.outer import GAIN, decision
from elixir_compile.search.reasons import predicted
from elixir_compile.session.machine import machine_path
from elixir_compile.step import verify
from elixir_compile.step.divide import micro_batches_of

# ----------------------------------------------------------------------------------------------------------------------
# Cache plans on disk: each problem is searched once, and later runs read its plan.
#
#   key = <step>-<rates>-<asked>
#   step = SHA-256 of graph, ranks, planner, all else in the `Problem` that decides which plans are legal and how long
#          they take, and the planner's own source
#   rates = SHA-256 of the machine and what was measured on it
#   asked = SHA-256 of budgets and seconds of search
#   <cache folder>/plans/<key>.json
#   <cache folder>/accumulation/<key>.json    empty: the step of this problem accumulates gradients
#
# A budget from free memory is another number in every run, so it is not in the key. A plan found under such a budget is
# used if it fits the memory that is free now, unless so much more is free that a better plan is likely.
#
# No search tries everything, so one with more memory or a faster link may find a longer step. A plan for the same step
# that was asked for with other memory or rates is an incumbent: it is taken if it fits, and its step is the shorter
# one, simulated with the present rates. So no plan is slower than an earlier one with less memory or slower links.
# Without a cache, a search that may have missed much is compared with that for a budget of 3 % less at most.


log = logging.getLogger("elixir_compile")

MOST_PLANS = 200
"""The most files in the folder; a plan of GPT-2 124M has 0.1 MB."""
_MORE_MEMORY = 1.1
"""A plan is searched again if the budget is larger than its own budget by this factor."""
_HOST_SHARE = 0.8
"""Share of the free host memory above which the host may have shaped the plan; such a plan is not cached."""
_PLANNING = tuple(f"{name}/**/*.py" for name in ("base", "ir", "step", "search"))
"""The source on which plans depend, as patterns."""


def plan_for(problem: Problem, options: Options) -> Plan:
    """Return the plan of an earlier run if it is usable here; else search for a plan and cache it for later runs.

    If an earlier plan for the same step, under other budgets or on a machine with other rates, is faster here, it is
    taken instead. Raises the errors of `search.plan`; nothing is cached then.
    """
    found = cached_plan(problem, options)
    if found is not None:
        log.info("plan from cache   %s", found.name)
    made = plan_as_asked(problem, options) if found is None else found
    best = _with_incumbents(made, problem, options)
    if found is None or best is not found:
        store_plan(best, problem, options)
    return best


def cached_plan(problem: Problem, options: Options) -> Plan | None:
    """Return the plan cached for `problem`, verified; None if there is no plan or it is not usable any more.

    If the file holds no legal plan for the graph, it is removed with an `ElixirWarning`.
    """
    if not options.plan_cache:
        return None
    path = _path(problem, options)

    def usable(text: str) -> Plan | None:
        cached = plan_from_json(text)
        if not _holds(cached, problem, options):
            return None
        found = replace(cached, name=problem.name, budget_bytes=problem.budget_bytes)
        if problem.budget_bytes > cached.budget_bytes and not _has_all_on_device(cached):
            found = replace(found, bound_s=None, binding=(), gib_bound_s=None)  # the bound was proved for less memory
        verify(problem.graph, found)
        return found

    def drop(path: Path, error: Exception) -> None:
        warnings.warn(f"a cached plan was not usable and is removed: {path}: {error}", ElixirWarning, stacklevel=4)
        with suppress(OSError):  # it stays if the folder is read-only
            path.unlink(missing_ok=True)

    found = read_cached(path, usable, drop)
    if found is not None:
        with suppress(OSError):  # in a read-only folder plans do not age
            os.utime(path)
    return found


def store_plan(made: Plan, problem: Problem, options: Options) -> None:
    """Cache the plan `made` for `problem`, and drop the oldest plans if there are too many.

    Warns ElixirWarning if the folder cannot be written.
    """
    if not options.plan_cache:
        return
    if options.host_memory is None:
        # Under another host budget there would likely be another plan: state is on disk, or memory is nearly full.
        is_full = made.prediction.host_peak_bytes > _HOST_SHARE * problem.host_budget_bytes
        if is_full or any(placement.optim is Tier.DISK for placement in made.placements):
            return
    path = _path(problem, options)
    try:
        write_cached(path, plan_to_json(made))
        drop_oldest(path.parent, MOST_PLANS)
    except OSError as error:
        warnings.warn(
            f"plans cannot be cached in {path.parent}: {error.strerror}. Set ELIXIR_CACHE_DIR to a folder that can be "
            f"written, or the option plan_cache=False.",
            ElixirWarning,
            stacklevel=2,
        )


_MOST_INCUMBENTS = 64
"""The most earlier plans for a step that are compared, those used last."""
_ROUNDING = 1e-9
"""A step that is shorter by less than this share is the same step, added up in another order."""
_RUNG, _OPEN_GAP = 1.03, 0.02
"""Without a cache, a plan with a larger gap than `_OPEN_GAP` is compared with that of a power of `_RUNG` as budget."""
_SEARCH = "search"
"""The subject of the decision that an incumbent is taken."""


def _with_incumbents(made: Plan, problem: Problem, options: Options) -> Plan:
    """Return the fastest of `made`, the plan for `problem`, and earlier plans for its step that fit here.

    The bounds of `made` hold for all of them. A fixed rule is there for comparison, so its plan stays, and so does one
    that follows a plan of the user. As in a search, a plan that keeps everything on the device gives way to a step that
    is shorter by more than `outer.GAIN` alone.
    """
    if options.planner in RULES or problem.follows_start:
        return made
    best = made
    limit_s = made.prediction.step_s * (1 - (GAIN if _has_all_on_device(made) else _ROUNDING))
    asked = {name: getattr(made, name) for name in ("name", "cluster", "budget_bytes")}
    proved = {name: getattr(made, name) for name in ("bound_s", "binding", "gib_bound_s")}
    for earlier, has_rates in _incumbents(made, problem, options):
        again = replace(earlier, **asked, **proved)
        with suppress(ElixirError):
            if not has_rates:
                again = replace(again, prediction=predicted(problem, again)[0])
            if again.prediction.step_s < limit_s:
                verify(problem.graph, again)
                best, limit_s = again, again.prediction.step_s * (1 - _ROUNDING)
    if best is made:
        return made
    longer_s = made.prediction.step_s - best.prediction.step_s
    because = f"a search with {format_bytes(made.budget_bytes)} found a step that is {format_s(longer_s)} longer"
    others = tuple(own for own in best.decisions if own.subject != _SEARCH)
    return replace(best, decisions=(*others, decision(_SEARCH, "the plan of another search", because)))


def _incumbents(made: Plan, problem: Problem, options: Options) -> Iterator[tuple[Plan, bool]]:
    """Yield plans for the step of `problem` that fit its memory, each with whether its prediction holds here.

    Those for other rates, which are simulated again, end after the time that a search has. Without a cache there is the
    plan of a smaller budget, if `made` leaves enough to gain.
    """
    if not options.plan_cache:
        rung_bytes = int(_RUNG ** math.floor(math.log(max(problem.budget_bytes, 2) - 1, _RUNG)))
        with suppress(NoFeasiblePlan):
            if made.gap is not None and made.gap > _OPEN_GAP:
                yield plan_as_asked(replace(problem, budget_bytes=rung_bytes), options), True
        return
    path = _path(problem, options)
    step, rates, _ = path.stem.split("-")
    aged: list[tuple[float, Path]] = []
    for other in path.parent.glob(f"{step}-*.json"):
        with suppress(OSError):
            aged.append((-other.stat().st_mtime, other))
    fastest: dict[bool, list[tuple[float, Path]]] = {True: [], False: []}
    for _, other in sorted(aged)[:_MOST_INCUMBENTS]:
        # A broken file is removed when it is asked for.
        with suppress(OSError, ValueError, LookupError, TypeError):
            found = json.loads(other.read_text())["prediction"]
            if (
                found["device_peak_bytes"] <= problem.budget_bytes
                and found["host_peak_bytes"] <= problem.host_budget_bytes
            ):
                fastest[other.stem.split("-")[1] == rates].append((found["step_s"], other))
    deadline = deadline_in(options.search_timeout)
    for has_rates, files in fastest.items():
        for _, other in sorted(files)[: 1 if has_rates else None]:
            earlier = None if deadline.is_over else read_cached(other, plan_from_json, lambda *_: None)
            if earlier is not None:
                yield earlier, has_rates


def plan_key(problem: Problem, options: Options) -> str:
    """Return three times 16 hex digits, which differ if the step differs that is planned, if the rates of the machine
    do, and if anything else differs on which the plan depends."""
    # All of the graph but its name and the source lines of the user's code. Its fingerprint is not enough: it lacks the
    # costs, on which plans depend, and the ids of ops, named by regions.
    op_fields = [field.name for field in fields(Op) if field.name != "source"]
    digest, graph = hashlib.sha256(), problem.graph
    for op in graph.ops:
        digest.update(repr([getattr(op, name) for name in op_fields]).encode())
    for field in fields(graph):
        if field.name not in ("name", "ops"):
            digest.update(repr((field.name, _canonical(getattr(graph, field.name)))).encode())
    asked = [
        (field.name, _canonical(getattr(problem, field.name)))
        for field in fields(problem)
        if field.name not in ("name", "graph", "cluster", "budget_bytes", "host_budget_bytes", "measured")
    ]
    # How the search chooses the number of micro-batches; the problem has a number that is given.
    choice = options.micro_batches if isinstance(options.micro_batches, str) else ""
    cluster = problem.cluster
    step = [
        ("version", __version__, PLAN_FORMAT, source_digest(*_PLANNING)),
        ("graph", digest.hexdigest()),
        ("ranks", cluster.num_ranks, cluster.num_local_ranks, cluster.copies_overlap),
        ("options", options.planner, choice),
        *asked,
    ]
    rates = [("machine", hardware_fingerprint(cluster), problem.measured)]
    memory = [
        ("device", "free" if options.device_memory is None else problem.budget_bytes),
        ("host", "free" if options.host_memory is None else problem.host_budget_bytes),
        ("search", options.search_timeout),
    ]
    return "-".join(hashlib.sha256(repr(parts).encode()).hexdigest()[:16] for parts in (step, rates, memory))


def remember_accumulation(problem: Problem, options: Options) -> None:
    """Keep for later runs that the step of `problem` accumulates gradients over several backward passes."""
    if options.plan_cache:
        path = _accumulation_path(problem, options)
        with suppress(OSError):  # the folder may be read-only: later runs find out by themselves
            write_cached(path, "")
            drop_oldest(path.parent, MOST_PLANS)


def remembers_accumulation(problem: Problem, options: Options) -> bool:
    """Return whether an earlier run kept that the step of `problem` accumulates gradients."""
    # Without the folder nothing is kept, and the digest of a large graph takes some milliseconds.
    return options.plan_cache and _accumulation_folder().exists() and _accumulation_path(problem, options).exists()


def forget_accumulation(problem: Problem, options: Options) -> None:
    """Undo `remember_accumulation`: the step of `problem` does not accumulate any more."""
    with suppress(OSError):
        _accumulation_path(problem, options).unlink(missing_ok=True)


def _accumulation_folder() -> Path:
    return cache_dir() / "accumulation"


def _accumulation_path(problem: Problem, options: Options) -> Path:
    return _accumulation_folder() / f"{plan_key(problem, options)}.json"


def _path(problem: Problem, options: Options) -> Path:
    return cache_dir() / "plans" / f"{plan_key(problem, options)}.json"


def _canonical(value: object) -> object:
    """Return `value` with the entries of a mapping or a set sorted."""
    if isinstance(value, frozenset):
        return sorted(value)
    return sorted(value.items()) if isinstance(value, dict) else value


def _holds(cached: Plan, problem: Problem, options: Options) -> bool:
    """Return whether the plan `cached`, found under other free memory, fits and is likely still the best."""
    expected = cached.prediction
    if options.host_memory is None and expected.host_peak_bytes > problem.host_budget_bytes:
        return False
    if options.device_memory is not None:
        return True
    is_as_it_is = _has_all_on_device(cached) and micro_batches_of(cached) == problem.micro_batches
    is_better_likely = not is_as_it_is and problem.budget_bytes > _MORE_MEMORY * cached.budget_bytes
    return expected.device_peak_bytes <= problem.budget_bytes and not is_better_likely


def _has_all_on_device(cached: Plan) -> bool:
    return all(
        placement.resident and placement.param is Tier.DEVICE and placement.optim is Tier.DEVICE
        for placement in cached.placements
    )


# ----------------------------------------------------------------------------------------------------------------------
# Keep what was seen of kernels on this machine: each op is run once for each set of shapes, and later runs read it.
#
#   op, shapes, strides, dtypes and numbers --> its bytes, of this process, or of an earlier one, or of a run of the op
#   <cache folder>/kernels/<machine>.json       {"<op>": [workspace, result, result, ...]}
#
# The machine is that of `machine_path`: device, cores, threads and version of torch. Ranks on equal machines see equal
# bytes. A plan without a device (`elixir.plan`, `elixir-compile plan`) runs no op, and has the bytes that tracing
# stated, so it is the same wherever it is made.


_MOST_KERNELS = 1 << 15
"""Kernels of a file, 2 MB; the oldest are dropped."""
_MOST_BYTES = 1 << 48
"""A file with more bytes for a tensor is wrong."""


class KnownKernels:
    """The bytes of the kernels on one device: the `Kernels` of a capture that will run there."""

    def __init__(self, device: torch.device) -> None:
        self._file = _file_at(cache_dir() / "kernels" / machine_path(device).name)

    def __call__(self, call: KernelCall) -> KernelBytes | None:
        """Return the bytes of the kernel of `call`, which is run if no equal op was run before; see `Kernels`."""
        own = "in own memory " if in_own_memory(call.node.target) is not call.node.target else ""
        return self._file.bytes_of(f"{_ways()} {own}{call.words()}", lambda: measured_bytes(call))

    def keep(self) -> None:
        """Write what was seen to the cache folder, for later processes."""
        self._file.write()


def _ways() -> str:
    """Return the switches of torch by which it chooses kernels."""
    return " ".join(
        str(part)
        for part in (
            torch.get_num_threads(),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(),
            torch.backends.mkldnn.enabled,
            torch.backends.cudnn.enabled,
            torch.backends.cudnn.benchmark,
            torch.backends.cudnn.deterministic,
            torch.backends.cudnn.allow_tf32,
        )
    )


class _File:
    """The kernels of one machine, in the file at `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._known: dict[str, KernelBytes | None] = dict(_read(path))
        self._new: set[str] = set()

    def bytes_of(self, words: str, measure: Callable[[], KernelBytes | None]) -> KernelBytes | None:
        """Return what was seen of the op that `words` describe, by `measure` if it is new."""
        key = hashlib.sha256(words.encode()).hexdigest()[:24]
        with self._lock:  # of two threads that plan, one runs an op
            if key not in self._known:
                self._known[key] = measure()
                self._new.add(key)
            return self._known[key]

    def write(self) -> None:
        with self._lock:
            if not self._new:
                return
            self._new.clear()
            # Another process may have seen other kernels meanwhile. What could not be run here is not kept.
            seen = {**_read(self._path), **{key: own for key, own in self._known.items() if own is not None}}
            rows = {key: [own.workspace_bytes, *own.results_bytes] for key, own in seen.items()}
            rows = dict(islice(rows.items(), max(0, len(rows) - _MOST_KERNELS), None))
            with suppress(OSError):  # the folder is read-only: the next start runs the ops again
                write_cached(self._path, json.dumps(rows))


@functools.cache
def _file_at(path: Path) -> _File:
    return _File(path)


def _read(path: Path) -> Mapping[str, KernelBytes]:
    """Return the kernels in the file `path`; none if there is no file or it is not valid."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        log.warning("kernels are run again, as %s cannot be read: %s", path, error)
        return {}

    def is_row(row: Any) -> bool:
        is_list = isinstance(row, list) and bool(row) and row[0] is not None
        return is_list and all(own is None or (type(own) is int and 0 <= own < _MOST_BYTES) for own in row)

    if isinstance(rows, dict) and all(map(is_row, rows.values())):
        return {key: KernelBytes(workspace_bytes=row[0], results_bytes=tuple(row[1:])) for key, row in rows.items()}
    log.warning("kernels are run again, as %s does not hold what they allocate", path)
    return {}
