"""Public names exist and are documented, private names of torch stay in compat/, no file names a local path."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import elixir_compile

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "elixir_compile").rglob("*.py"))
TEXTS = sorted(
    path
    for folder in ("elixir_compile", "tests", "docs", "examples", "benchmarks", ".ci")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in {".py", ".md", ".txt", ".json"} or path.parent.name == ".ci"
)
# A path that only one machine has. Put together here, so that this file does not find itself.
LOCAL_PATH = re.compile(r"/(?:" + "|".join(("home", "root", "work", "Users")) + r")/\w")


@pytest.mark.parametrize("name", elixir_compile.__all__)
def test_a_public_name_has_a_docstring(name: str) -> None:
    thing = getattr(elixir_compile, name)
    assert thing.__doc__ is not None
    assert len(thing.__doc__.splitlines()[0]) > 10


@pytest.mark.parametrize("name", [name for name in elixir_compile.__all__ if not name[0].isupper()])
def test_a_public_function_is_in_the_docs(name: str) -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    assert any(re.search(rf"\b{name}\b", page.read_text(encoding="utf-8")) for page in pages)


def private_torch_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and re.match(r"torch(\.\w+)*\._", node.module):
            yield node.lineno, node.module
        if isinstance(node, ast.Import):
            yield from ((node.lineno, one.name) for one in node.names if re.match(r"torch(\.\w+)*\._", one.name))
        # `torch._foreach_mul_` and `torch._fused_adamw_` are ATen's own operators, always underscored.
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "torch"
            and re.match(r"_(?!foreach_|fused_)", node.attr)
        ):
            yield node.lineno, f"torch.{node.attr}"


def has_reason(path: Path, line: int) -> bool:
    """A comment on the line, or on a line of its own above it."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return "  # " in lines[line - 1] or lines[line - 2].lstrip().startswith("# ")


def test_private_names_of_torch_are_in_compat_only_or_have_a_reason_beside() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in SOURCES
        if path.parent.name != "compat"
        for line, name in private_torch_names(ast.parse(path.read_text(encoding="utf-8")))
        if not has_reason(path, line)
    ]
    assert found == []


@pytest.mark.parametrize(
    "code",
    ["import torch._dynamo", "from torch._inductor import x", "from torch.fx._utils import y", "torch._C.z()"],
)
def test_a_private_name_would_be_found(code: str) -> None:
    assert list(private_torch_names(ast.parse(code)))


def test_no_file_names_a_path_of_one_machine() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in TEXTS
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if LOCAL_PATH.search(line)
    ]
    assert found == []
    assert LOCAL_PATH.search("/" + "home/someone")
