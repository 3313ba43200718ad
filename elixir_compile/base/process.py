"""Find the cores and the memory that this process may use, pause Python's garbage collector, and keep weakly held
objects: sets of them for several threads, and one that compiled code calls.
"""

import gc
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

from elixir_compile.base.errors import NotPrepared

# ----------------------------------------------------------------------------------------------------------------------
# Find the cores and the memory that the affinity and the control groups of this process allow.
#
# Control groups nest, and the smallest limit of a group and its parents holds. Both versions are read: in version 1
# each controller has a tree of groups, in version 2 all share one tree. Containers limit their processes by such
# groups.


MEMBERSHIPS = Path("/proc/self/cgroup")
GROUPS = Path("/sys/fs/cgroup")


def group_folders(memberships: Path, groups: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """Yield the folder of each group that limits this process by `controller`, such as "cpu", and its version, 1 or 2.

    A group comes before its parents, whose limits hold too. `memberships` is a file such as `/proc/self/cgroup`,
    `groups` a folder such as `/sys/fs/cgroup`.
    """
    try:
        lines = memberships.read_text(encoding="utf-8").splitlines()
    except OSError:  # a system without control groups
        return
    for line in lines:
        _, controllers, own = line.split(":", 2)
        if controllers == "":
            yield from ((folder, 2) for folder in _upwards(groups, own))
        elif controller in controllers.split(","):
            root = groups / controllers  # such as "cpu,cpuacct"; on most systems "cpu" is a link to it
            yield from ((folder, 1) for folder in _upwards(root if root.exists() else groups / controller, own))


def _upwards(root: Path, own: str) -> Iterator[Path]:
    # Inside a container the path may be a path of the host. Then only the root has files.
    folder = root / own.lstrip("/")
    yield from (place for place in (folder, *folder.parents) if place.is_relative_to(root))


def text_of(file: Path) -> str:
    """Return the text of a file of a group, empty if the file cannot be read."""
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def numbers_in(listed: str) -> frozenset[int]:
    """Return the numbers in a list of cores or memory nodes as the kernel writes it: `0-3,8`.

    Raises ValueError if the text is no such list.
    """
    spans = [span.partition("-") for span in listed.split(",") if span]
    return frozenset(number for first, _, last in spans for number in range(int(first), int(last or first) + 1))


def allowed_cores() -> frozenset[int]:
    """Return the cores allowed by the affinity of this process."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(os.getpid()))
    return frozenset(range(os.cpu_count() or 1))


def num_usable_cores() -> int:
    """Return the number of cores that this process can keep busy, by its affinity and its CPU quota."""
    allowed = len(allowed_cores())
    quota = quota_cores(MEMBERSHIPS, GROUPS)
    # With more threads than the quota, all threads stop for the rest of each period.
    return allowed if quota is None else max(min(allowed, int(quota)), 1)


def quota_cores(memberships: Path, groups: Path) -> float | None:
    """Return the smallest CPU quota of this process's control groups, in cores; None if no group has a quota.

    See `group_folders` for the arguments. Docker's `--cpus=2.5` and Kubernetes' CPU limits are such quotas.
    """
    quotas: list[float] = []
    for folder, version in group_folders(memberships, groups, "cpu"):
        if version == 2:
            time_us, _, period_us = text_of(folder / "cpu.max").partition(" ")
        else:
            time_us, period_us = text_of(folder / "cpu.cfs_quota_us"), text_of(folder / "cpu.cfs_period_us")
        # Without a quota the time is "max" or -1, or the file is missing.
        if time_us.isdecimal() and period_us.isdecimal() and int(period_us):
            quotas.append(int(time_us) / int(period_us))
    return min(quotas, default=None)


def group_limit_bytes(memberships: Path, groups: Path) -> int | None:
    """Return the smallest memory limit of this process's control groups and their parents, None without a limit.

    See `group_folders` for the arguments.
    """
    names = {1: "memory.limit_in_bytes", 2: "memory.max"}
    found = group_folders(memberships, groups, "memory")
    texts = [text_of(folder / names[version]) for folder, version in found]
    return min((int(text) for text in texts if text.isdecimal()), default=None)


# ----------------------------------------------------------------------------------------------------------------------
# Pause Python's garbage collector while many objects are made that stay.


@contextmanager
def collector_off() -> Iterator[None]:
    """Pause the garbage collector of the process inside, and restore its state, also after an exception.

    A capture makes about a million objects, which all stay, and each collection visits them again: without collections
    the plan of 32 layers of Llama takes 21.7 s instead of 24.3 s. They also take 0.8 of the 4 CPU seconds in which a
    command imports its modules, and 0.6 of the 2 CPU seconds after which a search for Llama 13B has its first good
    candidate. Inside another pause, on this thread or another, the context changes nothing.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


# ----------------------------------------------------------------------------------------------------------------------
# Sets of objects that they do not keep alive, for several threads.


T = TypeVar("T")


class Living(Generic[T]):
    """The objects added to it that are alive, in the order in which they were added.

    Threads may add and discard objects while others iterate, which get the objects of the moment when they began. A
    `weakref.WeakSet` raises RuntimeError then: "Set changed size during iteration". Objects are told apart by identity.
    """

    def __init__(self) -> None:
        self._by_id: weakref.WeakValueDictionary[int, T] = weakref.WeakValueDictionary()

    def add(self, thing: T) -> None:
        """Add `thing`, unless it is there."""
        self._by_id.setdefault(id(thing), thing)

    def discard(self, thing: T) -> None:
        """Remove `thing` if it is there."""
        self._by_id.pop(id(thing), None)

    def __contains__(self, thing: object) -> bool:
        return self._by_id.get(id(thing)) is thing

    def __iter__(self) -> Iterator[T]:
        # `valuerefs` copies the references in one operation of a dictionary; other iterators go through the dictionary.
        living = [thing for reference in self._by_id.valuerefs() if (thing := reference()) is not None]
        return iter(living)

    def __len__(self) -> int:
        return sum(1 for _ in self)


# ----------------------------------------------------------------------------------------------------------------------
# Functions that compiled code calls: they do not keep the model alive that they serve.


def for_compiled_code(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls the bound method `method` without keeping its object alive.

    Compiled code outlives its model, as Dynamo keeps it, so it must hold no reference to the model. The function raises
    NotPrepared once the object is gone.
    """
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        alive = reference()
        if alive is None:
            raise NotPrepared("the model of this graph no longer exists; compile the model again")
        return alive(*args)

    return call
