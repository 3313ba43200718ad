"""`base.units.parse_count`: numbers with units as users write them."""

import pytest

from elixir_compile.base.units import parse_count


@pytest.mark.parametrize(
    ("text", "number"),
    [("524288", 524288), ("500k", 500_000), ("0.5M", 500_000), ("1.1k", 1100), (" 2 g ", 2_000_000_000), ("1.5", 1)],
)
def test_a_number_with_a_unit_of_thousands_is_read(text: str, number: int) -> None:
    assert parse_count(text) == number


@pytest.mark.parametrize("text", ["", "k", "-5k", "0", "0.2", "5 rows", "500kB", "nan", "1e400"])
def test_other_texts_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="524288, 500k or"):
        parse_count(text)
