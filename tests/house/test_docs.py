"""Every Python block and every command of the README and the docs runs, and links inside the repository lead
somewhere."""

import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import elixir_compile as elixir
from tests.house.console_blocks import blocks_of, is_shown, run_page, scope_of_pages

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A page may write files, and must not leave compiled code to the next."""
    monkeypatch.chdir(tmp_path)
    yield
    torch.compiler.reset()


SLOW = {
    "quickstart.md": 19,
    "optimizer.md": 12,
    "mixed-precision.md": 10,
    "how-the-planner-chooses.md": 9,
    "reading-a-plan.md": 8,
}
"""Seconds of the pages that run with the slow tests: the README makes the calls of the first, and tests of plans, of
optimizers, of masters and of `explain` those of the others."""
SLOW_COMMANDS = {"README.md": 17, "quickstart.md": 60, "tuning.md": 250}
"""Seconds of the commands of the pages whose commands run with the slow tests alone."""


def pages_with_code() -> Iterator[Any]:
    """Yield each page with blocks, and whether its commands run too; pages of many seconds are marked slow."""
    for page in PAGES:
        kinds = {kind for kind, _ in blocks_of(page)}
        has_commands = bool(kinds - {"python"})
        is_apart = page.name in SLOW_COMMANDS
        if "python" in kinds or (has_commands and not is_apart):
            marks = [pytest.mark.slow] if page.name in SLOW else []
            yield pytest.param(page, has_commands and not is_apart, id=page.name, marks=marks)
        if has_commands and is_apart:
            yield pytest.param(page, True, id=f"{page.name}-commands", marks=[pytest.mark.slow])


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(("page", "with_commands"), list(pages_with_code()))
def test_the_blocks_of_a_page_run_in_order_and_commands_print_what_it_shows(page: Path, with_commands: bool) -> None:
    """`make docs-blocks` writes what the commands print."""
    pytest.importorskip("transformers")
    run_page(page, scope_of_pages(), with_commands=with_commands)


def test_the_readme_shows_code_and_every_console_block_has_a_command() -> None:
    assert "python" in dict(blocks_of(ROOT / "README.md"))
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert len(re.findall(r"^```console", text, re.MULTILINE)) == sum(
            kind != "python" and body.startswith("$ ") for kind, body in blocks_of(page)
        ), page.name


@pytest.mark.parametrize(
    ("shown", "is_right"),
    [
        (["one", "two", "three"], True),
        (["one", "...", "three"], True),
        (["...", "three"], True),
        (["one", "..."], True),
        (["one", "two"], False),
        (["one", "...", "two", "four"], False),
        (["...", "1"], False),
    ],
)
def test_three_dots_stand_for_any_lines(shown: list[str], is_right: bool) -> None:
    assert is_shown(shown, ["one", "two", "three"]) is is_right


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = LINK.findall(page.read_text(encoding="utf-8"))
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_the_page_of_python_names_has_each_public_name_once() -> None:
    documented = re.findall(r"auto\w+:: elixir_compile\.(\w+)", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"))
    assert sorted(documented) == sorted(elixir.__all__)


def test_the_page_of_benchmarks_is_made_from_the_saved_results() -> None:
    """`python benchmarks/page.py` writes it."""
    page = runpy.run_path(str(ROOT / "benchmarks" / "page.py"))["page"]
    assert page() == (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
