"""What an installation has, where the package runs from its folder and was never installed: the version, the name of
the backend, the command line."""

import importlib.metadata
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.backends import registry
from typer.testing import CliRunner

import elixir_compile as elixir
from elixir_compile.base.version import __version__
from elixir_compile.checkpoint import saving
from elixir_compile.tools.cli.main import app


@pytest.fixture
def not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def from_name(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata.Distribution, "from_name", from_name)


@pytest.mark.usefixtures("not_installed")
def test_the_version_is_known_without_an_installation() -> None:
    assert CliRunner().invoke(app, ["--version"]).output == f"elixir-compile {__version__}\n"
    assert saving._versions()["elixir_compile"] == __version__


def test_the_version_of_the_package_is_that_of_the_source() -> None:
    pyproject = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8"))
    assert pyproject["project"]["version"] == __version__


@pytest.mark.parametrize("looks_first", [False, True])
def test_the_backend_has_its_name_without_an_installation(looks_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether or not Dynamo has looked for the backends of packages before."""
    for names in (registry._BACKENDS, registry._COMPILER_FNS):
        monkeypatch.delitem(names, "elixir", raising=False)  # type: ignore[arg-type]
    monkeypatch.setattr(registry, "_discover_entrypoint_backends", lambda: None)
    if looks_first:
        with pytest.raises(torch._dynamo.exc.InvalidBackend):
            registry.lookup_backend("elixir")
    model = elixir.prepare(nn.Linear(4, 4), "cpu")
    compiled = torch.compile(model, backend="elixir", options={"inner": "aot_eager"})
    compiled(torch.ones(2, 4)).sum().backward()
    assert [each.plan is not None for each in elixir.compilations(model)] == [True]


def test_the_command_line_runs_without_a_script() -> None:
    command = [sys.executable, "-m", "elixir_compile", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"elixir-compile {__version__}\n"), done.stderr
