"""Only the platforms name an accelerator's module of torch, so that the runtime is the same on every device."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
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
