"""The layers of docs/layout.md, and that the planning half loads no torch."""

import subprocess
import sys
from pathlib import Path

import pytest

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
