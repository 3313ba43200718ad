"""The layers of docs/layout.md: imports, names of accelerators in the platforms alone, and listed module-level
state."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# ----------------------------------------------------------------------------------------------------------------------
# The layers of docs/layout.md, and that the planning half loads no torch.


ROOT = Path(__file__).parents[2]


def test_import_contracts_hold() -> None:
    lint = Path(sys.executable).parent / "lint-imports"
    done = subprocess.run([lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("package", ["base.options", "ir", "step", "search", "tools.report"])
def test_the_planning_half_loads_no_torch(package: str) -> None:
    """import-linter reads what is written; this sees what is loaded, through the lazy names of the root too."""
    code = f"import sys, elixir_compile.{package}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


# ----------------------------------------------------------------------------------------------------------------------
# Only the platforms name an accelerator's module of torch, so that the runtime is the same on every device.


PACKAGE = ROOT / "elixir_compile"
ALLOWED = ("compat",)
SOURCES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.relative_to(PACKAGE).parts[0] not in ALLOWED]
MODULES = {"cuda", "xpu", "mps", "hip"}
PLATFORM_NAMES = {"accelerator"}
"""`torch.accelerator` has streams and events, which `runtime.lanes` serves."""


def modules_named(tree: ast.AST) -> list[str]:
    """Return the modules of torch for one device type that the code uses: `torch.cuda`, or `accelerator`."""
    found: list[str] = []
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="torch"), attr=name) if name in MODULES | PLATFORM_NAMES:
                found.append(name)
            case ast.ImportFrom(module=str(module)) if module.startswith("torch"):
                imported = {*module.split(".")[1:2], *(alias.name for alias in node.names if module == "torch")}
                found += imported & (MODULES | PLATFORM_NAMES)
            case ast.Import(names=names):
                parts = [alias.name.split(".") for alias in names]
                found += [part[1] for part in parts if part[0] == "torch" and part[1:2] and part[1] in MODULES]
    return found


def test_no_file_but_the_platforms_names_the_module_of_a_device_type() -> None:
    found = {path.relative_to(PACKAGE): modules_named(ast.parse(path.read_text(encoding="utf-8"))) for path in SOURCES}
    streams = Path("runtime/lanes.py")
    assert set(found.pop(streams)) == PLATFORM_NAMES
    assert {str(path): names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "code",
    [
        "torch.cuda.synchronize()",
        "x: torch.cuda.Event",
        "from torch import cuda",
        "from torch.cuda import Event",
        "import torch.cuda",
        "torch.accelerator.synchronize()",
        "getattr(torch.cuda, 'Event')",
    ],
)
def test_a_named_module_is_found(code: str) -> None:
    assert modules_named(ast.parse(code))


# ----------------------------------------------------------------------------------------------------------------------
# Everything that a module keeps between calls is listed in docs/layout.md, with its lock and who clears it.


ALL_SOURCES = sorted((ROOT / "elixir_compile").rglob("*.py"))
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
    for path in ALL_SOURCES:
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
