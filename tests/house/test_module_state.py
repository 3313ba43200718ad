"""Everything that a module keeps between calls is listed in docs/layout.md, with its lock and who clears it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "elixir_compile").rglob("*.py"))
STATEFUL = {
    "Condition", "ContextVar", "Counter", "Event", "Lock", "RLock", "Semaphore", "WeakKeyDictionary", "WeakSet",
    "WeakTensorKeyDictionary", "WeakValueDictionary", "count", "defaultdict", "deque", "dict", "list", "local", "set",
}  # fmt: skip
MEMOS = {"cache", "lru_cache"}
CHANGES = {
    "add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "popleft", "remove",
    "setdefault", "update",
}  # fmt: skip


def last_name(node: ast.expr) -> str:
    """Return the last part of a dotted name, without calls and subscripts: `weakref.WeakSet[T]()` gives `WeakSet`."""
    while isinstance(node, ast.Subscript | ast.Call):
        node = node.value if isinstance(node, ast.Subscript) else node.func
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def plain_classes(tree: ast.Module) -> set[str]:
    """Return the classes of a module whose instances can change: no dataclasses, enums or named tuples."""
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return {node.name for node in classes if not node.decorator_list and "Tuple" not in map(last_name, node.bases)}


def changed_names(tree: ast.Module) -> set[str]:
    """Return the names that code of a module rebinds by `global`, or changes in place inside a function."""
    changed: set[str] = set()
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Global):
                changed |= set(node.names)
            elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
                changed |= {last_name(node.value)} if isinstance(node.value, ast.Name) else set()
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
                changed |= {node.func.value.id} if isinstance(node.func.value, ast.Name) else set()
    return changed


def state_of(tree: ast.Module) -> Iterator[str]:
    """Yield the names of a module's state: globals that change, and functions that remember their results."""
    classes, changed = plain_classes(tree), changed_names(tree)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and MEMOS & set(map(last_name, node.decorator_list)):
            yield node.name
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        for target in targets:
            if not isinstance(target, ast.Name):
                continue
            is_stateful = isinstance(node.value, ast.Call) and last_name(node.value) in STATEFUL | classes
            if is_stateful or target.id in changed:
                yield target.id


def found_state() -> set[str]:
    """Return the state of the package as `folder.module.name`."""
    found: set[str] = set()
    for path in SOURCES:
        module = ".".join(path.relative_to(ROOT / "elixir_compile").with_suffix("").parts)
        found |= {f"{module}.{name}" for name in state_of(ast.parse(path.read_text(encoding="utf-8")))}
    return found


def listed_state() -> set[str]:
    """Return the names in the table of docs/layout.md."""
    page = (ROOT / "docs" / "layout.md").read_text(encoding="utf-8").partition("## Module-level state")[2]
    return set(re.findall(r"^\| `([\w.]+)` \|", page.partition("\n## ")[0], re.MULTILINE))


def test_all_module_level_state_is_listed() -> None:
    assert sorted(found_state() - listed_state()) == []


def test_no_listed_state_is_gone() -> None:
    assert sorted(listed_state() - found_state()) == []


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("_LOCK = threading.Lock()", "_LOCK"),
        ("_SEEN: set[int] = set()", "_SEEN"),
        ("_BY_KEY = {}\ndef put(key):\n    _BY_KEY[key] = 1", "_BY_KEY"),
        ("_ALL = []\ndef put(key):\n    _ALL.append(key)", "_ALL"),
        ("_n = 0\ndef up():\n    global _n\n    _n += 1", "_n"),
        ("@functools.cache\ndef made():\n    return 1", "made"),
        ("@lru_cache(maxsize=8)\ndef made():\n    return 1", "made"),
        ("class _Book:\n    pass\n_book = _Book()", "_book"),
    ],
)
def test_state_of_each_kind_is_found(code: str, name: str) -> None:
    assert list(state_of(ast.parse(code))) == [name]
    assert list(state_of(ast.parse("NAMES = {'a': 1}\nPATTERN = re.compile('x')"))) == []
