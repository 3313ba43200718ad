"""Options and the text with units that users write: a flat dict, checked, and numbers of bytes, seconds and rows."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elixir_compile.base.errors import ContradictingFractions, InvalidOption, UnknownOption
from elixir_compile.base.options import Fractions, Options, parse_options, plans_alike
from elixir_compile.base.units import GIB, MIB, format_bytes, format_s, parse_bytes, parse_count

# ----------------------------------------------------------------------------------------------------------------------
# `options`: a flat dict, checked.


@pytest.mark.parametrize("options", [None, {}])
def test_no_option_is_required(options: dict[str, object] | None) -> None:
    assert parse_options(options) == Options()


def test_every_option_is_parsed() -> None:
    options = {
        "device_memory": "20GiB",
        "host_memory": 5 * 10**9,
        "disk_path": ".",
        "disk_check": True,
        "frozen_files": False,
        "planner": "greedy",
        "accumulate": True,
        "update": "in_backward",
        "search_timeout": 3,
        "hardware": "a100-40g",
        "plan": "plan.json",
        "plan_cache": False,
        "profile_regions": True,
        "replan": False,
        "inner": "aot_eager",
        "compile_by": "layer",
        "trace": "run/trace",
        "report": False,
    }
    assert parse_options(options) == Options(
        device_memory=20 * 2**30,
        host_memory=5 * 10**9,
        disk_path=Path.cwd(),
        disk_check=True,
        frozen_files=False,
        planner="greedy",
        accumulate=True,
        update="in_backward",
        search_timeout=3.0,
        hardware="a100-40g",
        plan=Path("plan.json"),
        plan_cache=False,
        profile_regions=True,
        replan=False,
        inner="aot_eager",
        compile_by="layer",
        trace=Path("run/trace"),
        report=False,
    )


def test_unknown_option_names_the_nearest() -> None:
    with pytest.raises(UnknownOption, match="Did you mean 'host_memory'"):
        parse_options({"host_memmory": 1})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("device_memory", "-3GiB"),
        ("device_memory", "lots"),
        ("device_memory", True),
        ("host_memory", 0),
        ("host_memory", [1]),
        ("disk_path", 3),
        ("disk_path", ""),
        ("disk_path", "not/mounted"),
        ("disk_path", __file__),
        ("disk_check", 1),
        ("frozen_files", 1),
        ("planner", "best"),
        ("planner", "exhaustive"),
        ("planner", "gemini"),
        ("planner", None),
        ("accumulate", 4),
        ("accumulate", "yes"),
        ("update", "soon"),
        ("plan", 3),
        ("search_timeout", float("nan")),
        ("search_timeout", "soon"),
        ("search_timeout", True),
        ("hardware", ""),
        ("hardware", 4),
        ("replan", 1),
        ("plan", ""),
        ("inner", "eager"),
        ("placement_policy", "cuda"),
        ("shard_param_frac", 1.5),
        ("offload_optim_frac", float("nan")),
        ("offload_param_frac", True),
        ("offload_param_frac", "half"),
        ("report", 1),
        ("trace", ""),
        ("trace", True),
    ],
)
def test_a_wrong_value_is_named_with_its_option(name: str, value: object) -> None:
    with pytest.raises(InvalidOption) as caught:
        parse_options({name: value})
    assert (caught.value.name, caught.value.got) == (name, value)
    assert f"option {name}: got {value!r}, expected" in str(caught.value)


def test_the_environment_names_a_trace_folder_where_the_options_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELIXIR_TRACE", "from/environment")
    assert parse_options({}).trace == parse_options({"trace": None}).trace == Path("from/environment")
    assert parse_options({"trace": "own"}).trace == Path("own")
    monkeypatch.setenv("ELIXIR_TRACE", "")
    assert parse_options({}).trace is None


def test_a_trace_changes_no_plan() -> None:
    assert plans_alike(parse_options({"trace": "run"}), parse_options({}))
    assert not plans_alike(parse_options({"planner": "greedy"}), parse_options({}))


def test_the_defaults_of_static_are_those_of_gemini() -> None:
    assert parse_options({"placement_policy": "static"}).fractions == Fractions(
        shard_param=1.0, offload_optim=0.0, offload_param=0.0
    )
    assert parse_options({}).fractions is None
    given = {"placement_policy": "static", "shard_param_frac": 1, "offload_optim_frac": 1.0, "offload_param_frac": 0.25}
    assert str(parse_options(given).fractions) == (
        "shard_param_frac 1.0, offload_optim_frac 1.0, offload_param_frac 0.25"
    )
    assert not plans_alike(parse_options(given), parse_options({"placement_policy": "static"}))


@pytest.mark.parametrize(
    ("options", "name", "fix"),
    [
        ({"offload_optim_frac": 0.5}, "offload_optim_frac", 'placement_policy="static"'),
        ({"placement_policy": "auto", "shard_param_frac": 1.0}, "shard_param_frac", 'placement_policy="static"'),
        ({"placement_policy": "static", "planner": "elixir"}, "planner", 'placement_policy="auto"'),
        ({"placement_policy": "static", "plan": "plan.json"}, "plan", 'placement_policy="auto"'),
    ],
)
def test_what_does_not_go_with_the_placement_policy_is_named_with_a_fix(
    options: dict[str, object], name: str, fix: str
) -> None:
    with pytest.raises(InvalidOption) as caught:
        parse_options(options)
    assert caught.value.name == name
    assert fix in str(caught.value)


def test_fractions_that_contradict_name_the_fix() -> None:
    with pytest.raises(ContradictingFractions, match=r"Set both to 1\.0, or offload_param_frac=0\.0"):
        parse_options({"placement_policy": "static", "offload_param_frac": 0.5})


# ----------------------------------------------------------------------------------------------------------------------
# `units`: text with units at the edge.


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


# ----------------------------------------------------------------------------------------------------------------------
# `base.units.parse_count`: numbers with units as users write them.


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
