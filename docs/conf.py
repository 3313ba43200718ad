"""Settings of Sphinx for the pages of this folder: `make docs` writes the site to `build/docs`.

Docstrings are plain text with names in single backticks and examples below a line `Example:`; a hook turns them into
the markup that Sphinx reads. At each build, the page of the commands is made from their own help texts, and another
page from the README.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

from elixir_compile.base.version import __version__

ROOT = Path(__file__).parents[1]

project = "elixir-compile"
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "furo"
html_title = f"elixir-compile {__version__}"
html_show_copyright = html_show_sphinx = False
html_static_path = ["img"]
myst_heading_anchors = 4
smartquotes = False
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"

_BACKTICKS = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_LINK_OUT = re.compile(r"\[([^\]]*)\]\((?!https?:|#|[a-z-]+\.md)[^)]*\)")
"""A link to a file that is no page of the site, as a table of `benchmarks`."""
_COMMAND = re.compile(r"^\* `([a-z]+)`: .*$", re.MULTILINE)


def as_markup(lines: list[str]) -> Iterator[str]:
    """Yield the lines of a docstring as reStructuredText: names as code, and the lines below `Example:` as Python."""
    is_example = False
    for line in lines:
        if line == "Example:":
            is_example = True
            yield from ("", ".. code-block:: python", "")
        else:
            yield line if is_example else _BACKTICKS.sub(r"``\1``", line)


def commands_page() -> str:
    """Return the page of the commands, in Markdown, with the whole first line of each command in their list."""
    writer = [
        sys.executable,
        "-m",
        "typer",
        "elixir_compile.tools.cli.main",
        "utils",
        "docs",
        "--name",
        "elixir-compile",
    ]
    page = subprocess.run(writer, check=True, capture_output=True, text=True, cwd=ROOT).stdout

    def with_whole_text(match: re.Match[str]) -> str:
        section = page.split(f"## `elixir-compile {match[1]}`\n\n", 1)[1]
        return f"* `{match[1]}`: {section.splitlines()[0]}"

    return _COMMAND.sub(with_whole_text, page).replace("# `elixir-compile`", "# Commands", 1)


def _use_markup(_app: Sphinx, _what: str, _name: str, _documented: object, _options: Any, lines: list[str]) -> None:
    lines[:] = list(as_markup(lines))


def _change_source(_app: Sphinx, page: str, source: list[str]) -> None:
    """Fill the pages that are made, keep only the text of links to files that are no pages, and find pictures."""
    if page == "commands":
        source[0] = commands_page()
    elif page == "readme":
        source[0] = (ROOT / "README.md").read_text(encoding="utf-8").replace("](docs/", "](")
    source[0] = re.sub(r'"(?:docs/)?img/', '"_static/', source[0])
    source[0] = _LINK_OUT.sub(r"\1", source[0].replace("](../README.md", "](readme.md"))


def setup(app: Sphinx) -> None:
    """Connect the hooks of this file."""
    app.connect("autodoc-process-docstring", _use_markup)
    app.connect("source-read", _change_source)
