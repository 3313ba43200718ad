"""Cache plans on disk: each problem is searched once, and later runs read its plan.

```text
  key = SHA-256 of graph, machine, budgets, options, all else in the `Problem`, and the planner's own source
  <cache folder>/plans/<key>.json
  <cache folder>/accumulation/<key>.json    empty: the step of this problem accumulates gradients
```

A budget from free memory is another number in every run, so it is not in the key. A plan found under such a budget is
used if it fits the memory that is free now, unless so much more is free that a better plan is likely.
"""

import hashlib
import logging
import os
import warnings
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path

from elixir_compile.base.errors import ElixirWarning
from elixir_compile.base.folders import cache_dir, drop_oldest, read_cached, write_cached
from elixir_compile.base.options import Options
from elixir_compile.base.version import __version__, source_digest
from elixir_compile.ir import PLAN_FORMAT, Op, Plan, StepGraph, Tier, plan_from_json, plan_to_json
from elixir_compile.ir.hardware import hardware_fingerprint
from elixir_compile.search import Problem
from elixir_compile.search.joint.micro_batches import plan_as_asked
from elixir_compile.step import verify
from elixir_compile.step.laps import micro_batches_of

log = logging.getLogger("elixir_compile")

MOST_PLANS = 200
"""The most files in the folder; a plan of GPT-2 124M has 0.1 MB."""
_MORE_MEMORY = 1.1
"""A plan is searched again if the budget is larger than its own budget by this factor."""
_HOST_SHARE = 0.8
"""Share of the free host memory above which the host may have shaped the plan; such a plan is not cached."""
_PLANNING = ("*.py", *(f"{name}/**/*.py" for name in ("analysis", "cost", "hardware", "ir", "search", "simulate")))
"""The source on which plans depend, as patterns."""


def plan_for(problem: Problem, options: Options) -> Plan:
    """Return the plan of an earlier run if it is usable here; else search for a plan and cache it for later runs.

    Raises the errors of `search.plan`; nothing is cached then.
    """
    found = cached_plan(problem, options)
    if found is not None:
        log.info("plan from cache   %s", found.name)
        return found
    made = plan_as_asked(problem, options)
    store_plan(made, problem, options)
    return made


def cached_plan(problem: Problem, options: Options) -> Plan | None:
    """Return the plan cached for `problem`, verified; None if there is no plan or it is not usable any more.

    If the file holds no legal plan for the graph, it is removed with an `ElixirWarning`.
    """
    if not options.plan_cache:
        return None
    path = _path(problem, options)
    found = read_cached(path, lambda text: _usable(plan_from_json(text), problem, options), _drop)
    if found is not None:
        with suppress(OSError):  # in a read-only folder plans do not age
            os.utime(path)
    return found


def _usable(cached: Plan, problem: Problem, options: Options) -> Plan | None:
    """Return the plan `cached` for `problem`, verified; None if it does not fit, or is likely not the best any more.

    Raises an ElixirError if it is no legal plan for the graph.
    """
    if not _holds(cached, problem, options):
        return None
    found = replace(cached, name=problem.name, budget_bytes=problem.budget_bytes)
    if problem.budget_bytes > cached.budget_bytes and not _has_all_on_device(cached):
        found = replace(found, bound_s=None, binding=(), gib_bound_s=None)  # the bound was proved for less memory
    verify(problem.graph, found)
    return found


def store_plan(made: Plan, problem: Problem, options: Options) -> None:
    """Cache the plan `made` for `problem`, and drop the oldest plans if there are too many.

    Warns ElixirWarning if the folder cannot be written.
    """
    if not options.plan_cache or (options.host_memory is None and _is_shaped_by_host(made, problem)):
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


def _is_shaped_by_host(made: Plan, problem: Problem) -> bool:
    """Return whether another host budget would likely give another plan: state is on disk, or memory is nearly full."""
    is_full = made.prediction.host_peak_bytes > _HOST_SHARE * problem.host_budget_bytes
    return is_full or any(placement.optim is Tier.DISK for placement in made.placements)


def plan_key(problem: Problem, options: Options) -> str:
    """Return 32 hex digits that differ if anything differs on which the plan depends."""
    asked = [
        (field.name, _canonical(getattr(problem, field.name)))
        for field in fields(problem)
        if field.name not in ("name", "graph", "cluster", "budget_bytes", "host_budget_bytes")
    ]
    parts = [
        ("version", __version__, PLAN_FORMAT, source_digest(*_PLANNING)),
        ("graph", _graph_digest(problem.graph)),
        ("machine", hardware_fingerprint(problem.cluster)),
        ("device", "free" if options.device_memory is None else problem.budget_bytes),
        ("host", "free" if options.host_memory is None else problem.host_budget_bytes),
        ("options", options.planner, options.search_timeout, _choice_of_micro_batches(options)),
        *asked,
    ]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _choice_of_micro_batches(options: Options) -> str:
    """Return how the search chooses the number of micro-batches; empty if the problem has the number."""
    return options.micro_batches if isinstance(options.micro_batches, str) else ""


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


def _graph_digest(graph: StepGraph) -> str:
    """Return the digest of all of `graph` except its name and the source lines of the user's code.

    The fingerprint is not enough: it leaves out the costs, on which plans depend, and the ids of ops, named by regions.
    """
    op_fields = [field.name for field in fields(Op) if field.name != "source"]
    digest = hashlib.sha256()
    for op in graph.ops:
        digest.update(repr([getattr(op, name) for name in op_fields]).encode())
    for field in fields(graph):
        if field.name not in ("name", "ops"):
            digest.update(repr((field.name, _canonical(getattr(graph, field.name)))).encode())
    return digest.hexdigest()


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


def _drop(path: Path, error: Exception) -> None:
    warnings.warn(f"a cached plan was not usable and is removed: {path}: {error}", ElixirWarning, stacklevel=4)
    with suppress(OSError):  # it stays if the folder is read-only
        path.unlink(missing_ok=True)
