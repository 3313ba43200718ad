"""The version is that of the source, also where the package runs from its folder and was never installed."""

import importlib.metadata
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from elixir_compile.checkpoint import saving
from elixir_compile.cli.main import app
from elixir_compile.version import __version__


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
