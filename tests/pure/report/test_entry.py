"""`entry`: fields are aligned, and those without lines are left out."""

from elixir_compile.tools.report.tables import entry_text


def test_an_entry_is_aligned() -> None:
    fields = [("size", ["3 B"]), ("why", []), ("rejected", ["one", "two"])]
    assert entry_text("b0", fields) == "b0\n  size      3 B\n  rejected  one\n            two"


def test_an_entry_may_have_a_title_only() -> None:
    assert entry_text("b0", [("why", [])]) == "b0"
