"""The pictures of README and docs show what the stored plan says today; `make pictures` draws them again."""

import re
from functools import cache
from pathlib import Path

import pytest

from elixir_compile.session.saved import load_answered
from elixir_compile.tools.report import figures as charts
from elixir_compile.tools.report.page import PlanSheet, drawn_memory, plan_sheet

ROOT = Path(__file__).parents[3]
PICTURES = ROOT / "docs" / "img"
MOST_BYTES = 120_000


@cache
def sheet() -> PlanSheet:
    made, asked = load_answered(PICTURES / "gpt2-124m.json")
    assert asked is not None
    problem = asked.problem
    return plan_sheet(made, problem.graph, problem.cluster, problem.measured)


def marks_and_words(svg: str) -> tuple[list[str], list[str]]:
    """Return the paths of a picture with their colours, and its text; places of text depend on the fonts at hand."""
    return re.findall(r'<path d="[^"]*" fill="[^"]*"', svg), re.findall(r"<text[^>]*>([^<]*)", svg)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_pictures_show_the_stored_plan(theme: str) -> None:
    pytest.importorskip("altair")
    pytest.importorskip("vl_convert")
    rows, _ = drawn_memory(sheet())
    specs = {
        "memory": charts.memory_chart(rows, sheet().plan.budget_bytes),
        "lanes": charts.lanes_chart(sheet().drawn_bars),
    }
    for figure, spec in specs.items():
        stored = (PICTURES / f"{figure}-{theme}.svg").read_text(encoding="utf-8")
        drawn = charts.picture(spec, is_dark=theme == "dark")
        assert marks_and_words(drawn) == marks_and_words(stored), "run `make pictures`"
        assert marks_and_words(drawn)[0]


def test_pictures_are_small_and_have_both_themes() -> None:
    found = sorted(path.name for path in PICTURES.glob("*.svg"))
    assert found == [
        f"{figure}-{theme}.svg"
        for figure in ("curve", "lanes", "memory", "state-precision")
        for theme in ("dark", "light")
    ]
    for path in PICTURES.glob("*.svg"):
        text = path.read_text(encoding="utf-8")
        assert len(text) < MOST_BYTES
        assert "var(" not in text  # a viewer of pictures has no style sheet


def test_every_picture_of_a_page_is_there() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    named = {(page, name) for page in pages for name in re.findall(r'"([^"]*\.svg)"', page.read_text(encoding="utf-8"))}
    assert len(named) >= 6
    assert all((page.parent / name).is_file() for page, name in named)
