"""docs/compatibility.md says what the tests of habits prove."""

from tests.run.habits.table import PAGE, page_text


def test_the_compatibility_page_is_generated_from_the_habits() -> None:
    assert PAGE.read_text(encoding="utf-8") == page_text(), "run `python -m tests.run.habits.table`"
