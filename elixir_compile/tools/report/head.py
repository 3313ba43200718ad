"""Write the begin of a page: the policy that forbids it to fetch anything, and its style."""

from pathlib import Path

from elixir_compile.tools.report import charts

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def head(title: str) -> list[str]:
    """Return the begin of a page up to its body; `title` is HTML."""
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    return [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}</title>",
        f"<style>\n{style}{charts.dark_style()}</style></head><body>",
    ]
