"""`options`: a flat dict, checked."""

from pathlib import Path

import pytest

from elixir_compile.base.errors import ContradictingFractions, InvalidOption, UnknownOption
from elixir_compile.base.options import Fractions, Options, parse_options, plans_alike


@pytest.mark.parametrize("options", [None, {}])
def test_no_option_is_required(options: dict[str, object] | None) -> None:
    assert parse_options(options) == Options()


def test_every_option_is_parsed() -> None:
    options = {
        "device_memory": "20GiB",
        "host_memory": 5 * 10**9,
        "disk_path": ".",
        "disk_check": True,
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
