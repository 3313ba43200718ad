"""The version of this package, a digest of its source for caches, and the names of its modules in earlier versions."""

import functools
import hashlib
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

__version__ = "0.1.0"


@functools.cache
def source_digest(*patterns: str) -> str:
    """Return the SHA-256, in hex digits, of the names and contents of the source files of this package that match one
    of `patterns`, such as `search/**/*.py`.

    Caches have it in their keys, because the version stays the same during development.
    """
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted({path for pattern in patterns for path in root.glob(pattern)}):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


# ----------------------------------------------------------------------------------------------------------------------
# Import modules by the names under which the documentation of earlier versions had them.


_FORMER = {"hardware": "ir.hardware", "integrations": "tools.integrations", "testing": "tools.testing"}
"""By former name below the package, the name now. Names below a folder follow it; a module is one object under both."""
_PACKAGE = __name__.partition(".")[0]


class _FormerNames(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        name = _name_now(fullname)
        return None if name is None else ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(str(_name_now(spec.name)))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own spec back: the import system has set the one of the former name."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


def _name_now(fullname: str) -> str | None:
    package, _, name = fullname.partition(".")
    if package != _PACKAGE:
        return None
    for former, now in _FORMER.items():
        if name == former or name.startswith(f"{former}."):
            return f"{_PACKAGE}.{now}{name.removeprefix(former)}"
    return None


def know_former_names() -> None:
    """From now on, import modules by their former names too."""
    # First: the path of a folder that is known by its former name would find its modules a second time.
    sys.meta_path.insert(0, _FormerNames())
