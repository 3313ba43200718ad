"""The control groups of this process: the files in which Linux keeps what a container may use, of version 1 and 2."""

from collections.abc import Iterator
from pathlib import Path

MEMBERSHIPS = Path("/proc/self/cgroup")
GROUPS = Path("/sys/fs/cgroup")


def group_folders(memberships: Path, groups: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """Yield the folder of each group that limits this process by `controller`, such as "cpu", and the version, 1 or 2.

    A group is limited by those around it too, which follow it. `memberships` has the form of `/proc/self/cgroup`,
    `groups` of `/sys/fs/cgroup`.
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
            root = groups / controllers  # "cpu,cpuacct", to which "cpu" is a link on most systems
            yield from ((folder, 1) for folder in _upwards(root if root.exists() else groups / controller, own))


def _upwards(root: Path, own: str) -> Iterator[Path]:
    # Inside a container the path may be the host's; then only the root has files.
    folder = root / own.lstrip("/")
    yield from (place for place in (folder, *folder.parents) if place.is_relative_to(root))


def text_of(file: Path) -> str:
    """Return what a file of a group says; nothing if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
