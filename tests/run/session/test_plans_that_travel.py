"""A saved plan trains its model on another machine, and where attention runs in other ops."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import elixir_compile as elixir
from elixir_compile.base.units import MIB
from elixir_compile.ir import Placement, Plan
from elixir_compile.tools.cli.main import app
from tests.run.models import hf_batches, small_gpt2, small_llama
from tests.run.training import Run, assert_offloads, assert_same, by_elixir, by_torch


def made_of(run: Run) -> Plan:
    (found,) = elixir.compilations(run.model)
    assert found.plan is not None
    return found.plan


def said(made: Plan) -> str:
    """Return the decision of `made` about the plan that was given, in words; empty if it has none."""
    return next((f"{own.choice}: {own.because}" for own in made.decisions if own.subject == "plan"), "")


def homes(made: Plan) -> dict[str, Placement]:
    pairs = zip(made.buckets, made.placements, strict=True)
    return {name: home for bucket, home in pairs for name in bucket.params}


@pytest.fixture(scope="module")
def made_for_an_h100(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path of a plan that the command line made of the configuration of `small_gpt2` for an H100."""
    folder = tmp_path_factory.mktemp("travels")
    small_gpt2().config.save_pretrained(folder / "gpt2")
    path = folder / "plan.json"
    sizes = ["--batch", "2", "--seq", "16", "--dtype", "float32", "--device-memory", str(MIB)]
    words = ["plan", str(folder / "gpt2"), "--hardware", "h100-80g", *sizes, "-o", str(path)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    made = elixir.load_plan(path)
    assert made.cluster == "1 x h100-80g"
    assert any(home.param != "device" for home in made.placements)
    return path


@pytest.mark.parametrize("use", ["start", "follow"])
@pytest.mark.parametrize("attention", ["sdpa", pytest.param("eager", marks=pytest.mark.slow)])
def test_a_plan_of_the_command_line_trains_here(
    made_for_an_h100: Path, use: str, attention: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, batches = small_gpt2(attn_implementation=attention), hf_batches()
    planned = elixir.load_plan(made_for_an_h100)
    expected = by_torch(model).train(batches)
    with caplog.at_level(logging.INFO, "elixir_compile"):
        got = by_elixir(model, plan=made_for_an_h100, plan_use=use, device_memory=2 * MIB).train(batches)
    assert_same(expected, got)
    made = made_of(got)
    assert f"plan.json was made for 1 x h100-80g, here is {made.cluster}" in caplog.text
    assert said(made).startswith(f"{use}s from plan.json" if use == "start" else "follows plan.json")
    assert made.prediction.device_peak_bytes <= 2 * MIB
    if use == "follow":
        assert {name: home.param for name, home in homes(made).items()} == {
            name: home.param for name, home in homes(planned).items()
        }
        assert_offloads(got)


@pytest.mark.parametrize("use", [pytest.param("start", marks=pytest.mark.slow), "follow"])
@pytest.mark.parametrize(
    "make", [small_gpt2, pytest.param(lambda **more: small_llama(tied=False, **more), marks=pytest.mark.slow)]
)
def test_another_attention_follows_the_same_homes(
    make: Callable[..., Any], use: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Both ways: from the fused attention to that in single ops, and back."""
    batches, budget = hf_batches(), {"device_memory": int(1.5 * MIB), "micro_batches": 1}
    for planned, here in (("sdpa", "eager"), ("eager", "sdpa")):
        path = tmp_path / f"{planned}.json"
        made = elixir.plan(make(attn_implementation=planned), batches[0], options=budget, save=path)
        model = make(attn_implementation=here)
        got = by_elixir(model, plan=path, plan_use=use, **budget)
        with caplog.at_level(logging.INFO, "elixir_compile"):
            got.train(batches)
        assert_same(by_torch(model).train(batches), got)
        found = made_of(got)
        assert found.graph != made.graph
        assert f"{planned}.json was made for another graph of this model" in caplog.text
        assert found.prediction.device_peak_bytes <= budget["device_memory"]
        if use == "follow":
            assert "5 of 5 buckets as in it" in said(found) or "moved further so that it fits" in said(found)
            assert homes(found).keys() == homes(made).keys()
