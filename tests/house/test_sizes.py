"""A file reads in one sitting, a function on one screen, and none keeps the traceback of an error."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

# ----------------------------------------------------------------------------------------------------------------------
# A file reads in one sitting, a function on one screen.


ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "elixir_compile").rglob("*.py"))
MAX_FILE_LINES = 800
"""A file is cut where a reader would cut it; a lower limit cut concepts to fit."""
MAX_LIST_LINES = 20
"""For each class of a list, on average."""
LISTS = {Path("elixir_compile/base/errors.py")}
"""Lists of small classes that share nothing."""
MAX_FUNCTION_LINES = 60
MAX_METHODS, MAX_ATTRIBUTES = 20, 15
REASON = re.compile(rf"more than ({MAX_METHODS}|{MAX_ATTRIBUTES}) (methods|attributes|fields)")
"""Begins the sentence in which a class says why it is larger."""
VAGUE_NAMES = {"utils", "helpers", "common", "manager", "misc"}


@functools.cache
def trees() -> dict[Path, ast.Module]:
    """Return the syntax tree of each source file: not at import, as every process of tests imports this file."""
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}


def test_files_are_short() -> None:
    files = [*SOURCES, *sorted((ROOT / "tests").rglob("*.py"))]
    lengths = {path.relative_to(ROOT): len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    limits = {path.relative_to(ROOT): limit_of(path) for path in files}
    assert limits.keys() >= LISTS
    assert {str(path): length for path, length in lengths.items() if length > limits[path]} == {}


def limit_of(path: Path) -> int:
    """Return the most lines that the file may have."""
    if path.relative_to(ROOT) not in LISTS:
        return MAX_FILE_LINES
    return MAX_LIST_LINES * sum(isinstance(node, ast.ClassDef) for node in trees()[path].body)


def test_functions_are_short() -> None:
    lengths = {
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}": node.end_lineno - node.lineno + 1
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None
    }
    assert {name: length for name, length in lengths.items() if length > MAX_FUNCTION_LINES} == {}


def test_a_class_with_many_methods_or_attributes_says_why() -> None:
    silent: list[str] = []
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.ClassDef) or REASON.search(ast.get_docstring(node) or ""):
                continue
            num_methods = sum(isinstance(child, ast.FunctionDef) for child in node.body)
            num_attributes = len(attributes_of(node))
            if num_methods > MAX_METHODS or num_attributes > MAX_ATTRIBUTES:
                silent.append(
                    f"{path.relative_to(ROOT)} {node.name}: {num_methods} methods, {num_attributes} attributes"
                )
    assert silent == []


def attributes_of(node: ast.ClassDef) -> set[str]:
    """Return the names of the fields of a dataclass, and of the attributes that `__init__` sets."""
    fields = {
        child.target.id
        for child in node.body
        if isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name)
    }
    starts = [child for child in node.body if isinstance(child, ast.FunctionDef) and child.name == "__init__"]
    return fields | {
        target.attr
        for start in starts
        for target in ast.walk(start)
        if isinstance(target, ast.Attribute)
        and isinstance(target.ctx, ast.Store)
        and isinstance(target.value, ast.Name)
        and target.value.id == "self"
    }


def test_no_file_is_named_utils_helpers_or_common() -> None:
    assert [str(path.relative_to(ROOT)) for path in SOURCES if path.stem in VAGUE_NAMES] == []


def test_every_module_says_what_it_does() -> None:
    bare = [
        path for path in SOURCES if path.read_text(encoding="utf-8").strip() and not ast.get_docstring(trees()[path])
    ]
    assert [str(path.relative_to(ROOT)) for path in bare] == []


# ----------------------------------------------------------------------------------------------------------------------
# No function keeps the traceback of an error in a variable: it holds the frames of all callers, with their tensors.
#
# The traceback of an error has the frame that raised it. If a variable of that frame holds the error, the two keep
# each other alive, and the frame keeps those of its callers, until the next garbage collection.


ACROSS_THREADS = (
    "checkpoint/saving.py:",
    "runtime/measure.py:",
    "compat/platforms/host.py:",
    "runtime/disk_file.py:",
    "runtime/disk_store.py:",
)
"""Files whose threads keep an error for another thread, with the frames of their own alone."""
PACKAGE = Path(__file__).parents[2] / "elixir_compile"


def _faults(tree: ast.AST, handled: frozenset[str] = frozenset(), freed: frozenset[str] = frozenset()) -> Iterator[str]:
    """Yield each place of `tree` that raises a variable, or stores an error that it handles with its traceback.

    `handled` are the names of the errors of the handlers around, which Python deletes; `freed` those that a `finally`
    deletes.
    """
    for node in ast.iter_child_nodes(tree):
        inner, own_freed = handled, freed
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            inner, own_freed = frozenset(), frozenset()
        elif isinstance(node, ast.ExceptHandler) and node.name:
            inner = handled | {node.name}
        elif isinstance(node, ast.Try):
            own_freed = freed | {
                name.id for last in node.finalbody for name in ast.walk(last) if isinstance(name, ast.Name)
            }
        stored = _stored(node)
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Name):
            name = node.exc.id
            if name.islower() and name not in handled | freed:
                yield f"{node.lineno}: raises the variable {name}"
        elif isinstance(stored, ast.Name) and stored.id in handled:
            yield f"{getattr(node, 'lineno', 0)}: stores {stored.id} with its traceback"
        yield from _faults(node, inner, own_freed)


def _stored(node: ast.AST) -> ast.expr | None:
    """Return what `node` returns, assigns, or puts into a list."""
    if isinstance(node, (ast.Return, ast.Assign, ast.AnnAssign)):
        return node.value
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "append":
        return node.args[0]
    return None


def test_no_variable_keeps_a_traceback() -> None:
    found = [f"{path.relative_to(PACKAGE)}:{fault}" for path, tree in trees().items() for fault in _faults(tree)]
    assert [fault for fault in found if not fault.startswith(ACROSS_THREADS)] == []


@pytest.mark.parametrize(
    "text",
    [
        "def f(error):\n    raise error",
        "def f():\n    for failure in failures:\n        raise failure",
        "try:\n    f()\nexcept E as error:\n    found = error",
        "try:\n    f()\nexcept E as error:\n    return error",
        "try:\n    f()\nexcept E as error:\n    errors.append(error)",
        "try:\n    f()\nexcept E as error:\n    def g():\n        raise error",
    ],
)
def test_each_way_to_keep_a_traceback_is_found(text: str) -> None:
    assert len(list(_faults(ast.parse(text)))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "def f(error):\n    raise error.renewed()",
        "try:\n    f()\nexcept E as error:\n    raise error",
        "try:\n    f()\nexcept E as error:\n    found = error.renewed()",
        "try:\n    raise failure\nfinally:\n    del failure",
    ],
)
def test_errors_without_tracebacks_are_none(text: str) -> None:
    assert list(_faults(ast.parse(text))) == []
