"""`units`: text with units at the edge."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elixir_compile.base.units import GIB, MIB, format_bytes, format_s, parse_bytes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("20GiB", 20 * GIB),
        ("512 MB", 512_000_000),
        ("1.5e9", 1_500_000_000),
        ("0.5 MiB", MIB // 2),
        (" 7kib ", 7 * 1024),
        ("3 tb", 3 * 10**12),
        ("9007199254740993", 9007199254740993),
        (123, 123),
        (1.5e9, 1_500_000_000),
        (1.9, 1),
    ],
)
def test_parse_bytes(text: str | float, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    "text",
    ["", "GiB", "-1GiB", "0", 0, -5, 0.5, math.nan, math.inf, "nan", "inf", "1e999", "3 parsecs", "1 2", "1,5 GB"],
)
def test_parse_bytes_rejects_invalid_sizes(text: str | float) -> None:
    with pytest.raises(ValueError, match="20GiB") as caught:
        parse_bytes(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("value", [True, False, None, [1]])
def test_parse_bytes_rejects_other_types(value: object) -> None:
    with pytest.raises(ValueError, match="20GiB"):
        parse_bytes(value)  # type: ignore[arg-type]


@given(st.integers(1, 2**70))
def test_whole_numbers_stay_exact(nbytes: int) -> None:
    assert parse_bytes(str(nbytes)) == nbytes
    assert parse_bytes(f"{nbytes} KiB") == nbytes * 1024


@given(st.integers(1, 2**60))
def test_format_bytes_reads_back_within_its_digits(nbytes: int) -> None:
    assert parse_bytes(format_bytes(nbytes)) == pytest.approx(nbytes, rel=0.06)


def test_format_bytes() -> None:
    assert format_bytes(0) == "0 B"
    assert format_bytes(1023) == "1023 B"
    assert format_bytes(18 * GIB - 100 * MIB) == "17.9 GiB"
    assert format_bytes(-2 * MIB) == "-2.0 MiB"


def test_format_s() -> None:
    assert [format_s(seconds) for seconds in (0, 2.5, 0.212, 4.1e-6, 3e-9)] == [
        "0 s",
        "2.5 s",
        "212 ms",
        "4.1 us",
        "3 ns",
    ]
    # Three digits alone would be 1e+03 and 1.67e+03.
    assert [format_s(seconds) for seconds in (0.9996, 0.9994, 1674.2, -1674.2, 999.9e-9, 2e-10)] == [
        "1000 ms",
        "999 ms",
        "1674 s",
        "-1674 s",
        "1000 ns",
        "0.2 ns",
    ]
