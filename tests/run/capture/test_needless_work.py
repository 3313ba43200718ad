"""A capture leaves out work of torch that no capture needs, and torch does that work when something else needs it."""

import sys

import pytest
import torch
from torch import nn
from torch._dynamo import funcname_cache, symbolic_convert

from elixir_compile.base.options import Options
from elixir_compile.compat.dynamo import templates_when_used
from elixir_compile.tools.preview.capture import capture_step


def captured() -> None:
    with torch.device("meta"):
        model, inputs = nn.Linear(4, 4), (torch.empty(2, 4),)
    capture_step(model, inputs, options=Options(inner="aot_eager"))


def test_a_capture_reads_no_file_for_the_names_in_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = symbolic_convert.get_funcname
    monkeypatch.setattr(funcname_cache, "cache", {})
    captured()
    assert funcname_cache.cache == {}
    assert symbolic_convert.get_funcname is usual


def test_the_log_of_calls_has_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(funcname_cache, "cache", {})
    state = torch._logging._internal.log_state
    monkeypatch.setattr(state, "artifact_names", {*state.artifact_names, "trace_call"})
    captured()
    assert funcname_cache.cache


def test_a_template_of_a_kernel_is_compiled_when_it_is_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jinja2")
    from torch._inductor.codegen import common

    compiled: list[str] = []
    usual = common.KernelTemplate._template_from_string

    def compile_source(source: str) -> object:
        compiled.append(source)
        return usual(source)

    monkeypatch.setattr(common.KernelTemplate, "_template_from_string", staticmethod(compile_source))
    monkeypatch.delitem(sys.modules, "torch._inductor.compile_fx", raising=False)
    with templates_when_used():
        template = common.KernelTemplate._template_from_string("{{ name }} of {{ other }}")
    assert compiled == []
    assert template.render(name="a", other="b") == template.render(name="a", other="b") == "a of b"
    assert compiled == ["{{ name }} of {{ other }}"]
    assert common.KernelTemplate._template_from_string is compile_source
