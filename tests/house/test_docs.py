"""Every Python block of the README and the docs runs, and every link inside the repository leads somewhere."""

import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import elixir_compile as elixir

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")


def blocks(page: Path) -> list[str]:
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def names_in_scope() -> dict[str, Any]:
    """What every page may assume: `model`, a small GPT-2 with random weights, and `loader`, three batches for it."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=96, n_positions=64)
    tokens = [torch.randint(0, 96, (2, 16)) for _ in range(3)]
    model = transformers.GPT2LMHeadModel(config)
    return {"model": model, "loader": [{"input_ids": batch, "labels": batch} for batch in tokens]}


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


def pages_with_code() -> Iterator[Any]:
    """Yield each page with blocks; pages of many seconds are marked slow."""
    for page in PAGES:
        if blocks(page):
            yield pytest.param(page, id=page.name, marks=[pytest.mark.slow] if page.name in SLOW else [])


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("page", list(pages_with_code()))
def test_the_python_blocks_of_a_page_run_in_order(page: Path) -> None:
    scope = {"__name__": "__main__", **names_in_scope()}
    for number, block in enumerate(blocks(page), start=1):
        exec(compile(block, f"{page.name} block {number}", "exec"), scope)


def test_the_readme_shows_code() -> None:
    assert blocks(ROOT / "README.md")


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
