"""A file reads in one sitting, a function on one screen."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "elixir_compile").rglob("*.py"))
MAX_FILE_LINES = 400
MAX_LIST_LINES = 600
LISTS = {Path("elixir_compile/errors.py")}
"""Lists of small functions or classes that share nothing."""
MAX_FUNCTION_LINES = 60
"""Targets are 300 and 40; these are the fences."""
VAGUE_NAMES = {"utils", "helpers", "common", "manager", "misc"}


def test_files_are_short() -> None:
    lengths = {path.relative_to(ROOT): len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    limits = {path: MAX_LIST_LINES if path in LISTS else MAX_FILE_LINES for path in lengths}
    assert limits.keys() >= LISTS
    assert {str(path): length for path, length in lengths.items() if length > limits[path]} == {}


def test_functions_are_short() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name} {node.end_lineno - node.lineno + 1} lines"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES
    ]
    assert found == []


def test_no_file_is_named_utils_helpers_or_common() -> None:
    assert [str(path.relative_to(ROOT)) for path in SOURCES if path.stem in VAGUE_NAMES] == []


def test_every_module_says_what_it_does() -> None:
    bare = [path for path in SOURCES if path.read_text(encoding="utf-8").strip() and not docstring(path)]
    assert [str(path.relative_to(ROOT)) for path in bare] == []


def docstring(path: Path) -> str | None:
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
