"""No function keeps the traceback of an error in a variable: it holds the frames of all callers, with their tensors.

The traceback of an error has the frame that raised it. If a variable of that frame holds the error, the two keep each
other alive, and the frame keeps those of its callers, until the next garbage collection.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

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
    found = [
        f"{path.relative_to(PACKAGE)}:{fault}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for fault in _faults(ast.parse(path.read_text()))
    ]
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
