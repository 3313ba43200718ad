"""`options`: a flat dict, checked."""

from pathlib import Path

import pytest

from elixir_compile.errors import InvalidOption, UnknownOption
from elixir_compile.options import Options, parse_options, plans_alike


@pytest.mark.parametrize("options", [None, {}])
def test_no_option_is_required(options: dict[str, object] | None) -> None:
    assert parse_options(options) == Options()


def test_every_option_is_parsed() -> None:
    options = {
        "device_memory": "20GiB",
        "host_memory": 5 * 10**9,
        "disk_path": ".",
        "disk_check": True,
        "planner": "exhaustive",
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
        planner="exhaustive",
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
        ("planner", "best"),
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
