"""A model is captured once, without needless work, beside running updates, and work beside the process agrees with
it."""

import copy
import gc
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import funcname_cache, symbolic_convert
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch.optim import Adam, Adamax, NAdam, Optimizer, RAdam

import elixir_compile as elixir
from elixir_compile import compat
from elixir_compile.base import process as control_groups
from elixir_compile.base.options import Options
from elixir_compile.compat.dynamo import templates_when_used
from elixir_compile.graph.capture.modules import is_swapped, model_of
from elixir_compile.ir import Update
from elixir_compile.runtime.updates import finish_updates
from elixir_compile.tools.preview import few_layers
from elixir_compile.tools.preview.capture import capture_step
from elixir_compile.tools.preview.few_layers import beside
from tests.run.models import WIDTH, Stack, Tied, seeded, vectors
from tests.run.training import (
    Run,
    assert_offloads,
    assert_same,
    by_elixir_unprepared,
    by_torch,
    hybrid_adamw,
    loss_of,
    tight_bytes,
)
from tests.run.updating import assert_equal, eager_run, hybrid_run, in_flight, ladder, rows

# ----------------------------------------------------------------------------------------------------------------------
# A plain model is captured once: its first call prepares it, and what Dynamo checks from then on stays true.


@pytest.fixture
def _no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", elixir.ElixirWarning)
        yield


def captures_of(model: nn.Module) -> int:
    """Return how many graphs of `model` were captured, of training and of evaluation."""
    return len(model_of(model).compilations)


def runs_of(model: nn.Module, batch: torch.Tensor, *, is_tight: bool) -> tuple[Run, Run]:
    """Return a run by torch and one by Elixir, of a plain model, under a tight budget or without one."""
    budget = {"device_memory": tight_bytes(copy.deepcopy(model).requires_grad_(True), batch)} if is_tight else {}
    return by_torch(model), by_elixir_unprepared(model, **budget)


@pytest.mark.usefixtures("_no_warning")
@pytest.mark.parametrize("is_tight", [False, True])
def test_four_steps_are_one_capture(is_tight: bool) -> None:
    model, batches = seeded(Stack, num_blocks=2), vectors(4)
    expected, got = runs_of(model, batches[0], is_tight=is_tight)
    assert_same(expected.train(batches), got.train(batches))
    assert captures_of(got.model) == 1
    if is_tight:
        assert_offloads(got)


@pytest.mark.usefixtures("_no_warning")
def test_no_guard_of_dynamo_checks_the_device_of_a_parameter() -> None:
    batch = torch.randint(0, 128, (2, 8))
    torch._dynamo.reset()
    model = seeded(Tied)
    torch.compile(model, backend="elixir", options={"inner": "aot_eager", "report": False})(batch).backward()
    (entry,) = _debug_get_cache_entry_list(Tied.forward.__code__)
    checks = [line for line in str(entry.guard_manager).splitlines() if "._parameters['" in line]
    assert any("ID_MATCH" in line for line in checks)
    assert not any("TENSOR_MATCH" in line for line in checks)


@pytest.mark.usefixtures("_no_warning")
def test_freezing_needs_no_capture_and_thawing_needs_one() -> None:
    model, batches = seeded(Stack, num_blocks=2), vectors(8)
    model.blocks[0].requires_grad_(False)
    runs = runs_of(model, batches[0], is_tight=True)
    captures: list[int] = []
    for run in runs:
        run.train(batches[:2])
        captures += [captures_of(run.model)] if run is runs[1] else []
        for param in run.model._modules["head"]._parameters.values():
            param.requires_grad_(False)
        run.train(batches[2:4])
        captures += [captures_of(run.model)] if run is runs[1] else []
        for param in run.model.parameters():
            param.requires_grad_(True)
        if run is runs[0]:
            torch._dynamo.reset()  # torch 2.11 alone goes on with the frozen graph: its weights are not those of eager
        run.train(batches[4:])
    assert_offloads(runs[1])
    assert_same(*runs)
    assert [*captures, captures_of(runs[1].model)] == [1, 1, 2]


@pytest.mark.usefixtures("_no_warning")
def test_evaluation_is_captured_apart_and_training_keeps_its_capture() -> None:
    model, batches = seeded(Stack, num_blocks=2), vectors(4)
    runs = runs_of(model, batches[0], is_tight=True)
    seen: list[float] = []
    for run in runs:
        run.train(batches[:2])
        with torch.no_grad():
            seen.append(loss_of(run.compiled, batches[2]).item())
        run.train(batches[2:])
    assert seen[0] == seen[1]
    assert_same(*runs)
    assert [record.is_inference for record in model_of(runs[1].model).compilations] == [False, True]


@pytest.mark.usefixtures("_no_warning")
def test_a_model_that_is_evaluated_first_trains_as_torch_does() -> None:
    model, batches = seeded(Stack, num_blocks=2), vectors(3)
    model.head.requires_grad_(False)
    runs = runs_of(model, batches[0], is_tight=False)
    for run in runs:
        with torch.no_grad():
            loss_of(run.compiled, batches[0])
        run.model._modules["head"].requires_grad_(True)
        run.train(batches)
    assert_same(*runs)
    assert [record.is_inference for record in model_of(runs[1].model).compilations] == [True, False]


@pytest.mark.usefixtures("_no_warning")
def test_a_second_model_of_a_class_has_a_capture_of_its_own() -> None:
    first, second = seeded(Stack, num_blocks=2), Stack(num_blocks=2)
    batches = vectors()
    runs = by_torch(first), by_elixir_unprepared(first)
    twins = by_torch(second), copy.deepcopy(second)
    own = Run(
        model=twins[1],
        compiled=torch.compile(twins[1], backend="elixir", options={"inner": "aot_eager", "report": False}),
        optimizer=hybrid_adamw(twins[1].parameters()),
    )
    for batch in batches:
        for run in (*runs, twins[0], own):
            run.train([batch])
    assert_same(*runs)
    assert_same(twins[0], own)
    assert captures_of(runs[1].model) == captures_of(own.model) == 1


class Broken(nn.Module):
    """Two graphs in one forward, with a layer that both read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.shared(self.first(x)))
        torch._dynamo.graph_break()
        return self.last(self.shared(x)).square().mean()


@pytest.mark.usefixtures("_no_warning")
def test_a_model_with_a_graph_break_is_captured_once_per_graph() -> None:
    model, batches = seeded(Broken), vectors(4)
    expected, got = by_torch(model), by_elixir_unprepared(model)
    assert_same(expected.train(batches), got.train(batches))
    assert captures_of(got.model) == 2


@pytest.mark.usefixtures("_no_warning")
def test_buffers_on_meta_stay_on_meta() -> None:
    model, batches = seeded(Stack, num_blocks=2), vectors()
    model.register_buffer("elsewhere", torch.ones(3, device="meta"), persistent=False)
    expected, got = by_torch(model), by_elixir_unprepared(model)
    assert_same(expected.train(batches), got.train(batches))
    assert got.model._buffers["elsewhere"].device.type == "meta"
    assert captures_of(got.model) == 1


@pytest.mark.usefixtures("_no_warning")
def test_a_function_of_a_parameter_is_captured_for_each_parameter() -> None:
    layers = [nn.Linear(4, 4), nn.Linear(4, 6)]
    x = torch.randn(2, 4)

    def loss(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, weight).square().mean()

    torch._dynamo.reset()
    compiled = torch.compile(loss, backend="elixir", options={"inner": "aot_eager", "report": False}, dynamic=False)
    for layer in layers * 2:
        weight = layer._parameters["weight"]
        (expected,) = torch.autograd.grad(loss(x, weight), weight)
        weight.grad = None
        compiled(x, weight).backward()
        assert torch.equal(weight.grad, expected)


@pytest.mark.usefixtures("_no_warning")
def test_a_model_that_was_cast_after_its_capture_is_refused() -> None:
    model, batches = seeded(Stack, num_blocks=2), vectors()
    got = by_elixir_unprepared(model)
    got.train(batches[:1])
    got.model.half()
    with pytest.raises(elixir.UnsupportedModel, match=r"torch.float16 of shape .* now"):
        loss_of(got.compiled, batches[0])


@pytest.mark.usefixtures("_no_warning")
def test_a_model_that_does_not_fit_stays_plain_and_fits_later() -> None:
    model, batches = seeded(Stack, num_blocks=2), vectors()
    torch._dynamo.reset()
    options = {"inner": "aot_eager", "report": False}
    with pytest.raises(elixir.NoFeasiblePlan):
        torch.compile(model, backend="elixir", options={**options, "device_memory": 1})(batches[0])
    assert not any(is_swapped(module) for module in model.modules())
    gc.collect()
    expected = by_torch(model)
    got = Run(
        model=model,
        compiled=torch.compile(model, backend="elixir", options=options),
        optimizer=hybrid_adamw(model.parameters()),
    )
    assert_same(expected.train(batches), got.train(batches))
    assert captures_of(model) == 1


# ----------------------------------------------------------------------------------------------------------------------
# A capture leaves out work of torch that no capture needs, and torch does that work when something else needs it.


@pytest.fixture
def names_of_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Dynamo look up the function of each line, as it does outside of these tests."""
    monkeypatch.setattr(funcname_cache, "cache", {})
    monkeypatch.setattr(symbolic_convert, "get_funcname", funcname_cache.get_funcname)


def captured() -> None:
    with torch.device("meta"):
        model, inputs = nn.Linear(4, 4), (torch.empty(2, 4),)
    capture_step(model, inputs, options=Options(inner="aot_eager"))


@pytest.mark.usefixtures("names_of_lines")
def test_a_capture_reads_no_file_for_the_names_in_a_log() -> None:
    captured()
    assert funcname_cache.cache == {}
    assert symbolic_convert.get_funcname is funcname_cache.get_funcname


@pytest.mark.usefixtures("names_of_lines")
def test_the_log_of_calls_has_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
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


# ----------------------------------------------------------------------------------------------------------------------
# Updates that the worker runs while the thread that trains captures a graph: bitwise those without a capture.


def captured_by_dynamo(inside: Callable[[], None]) -> None:
    """Call `inside` while torch.compile captures a function of nobody's."""

    def backend(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        inside()
        return gm

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(3))


def captured_by_export(inside: Callable[[], None]) -> None:
    """Call `inside` while torch.export traces a module."""

    class Module(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inside()
            return x + 1

    torch.export.export(Module(), (torch.ones(3),), strict=False)


@pytest.mark.parametrize("cls", [Adam, Adamax, NAdam, RAdam])
def test_an_update_inside_of_a_capture_gives_the_bits_of_the_class(cls: type[Optimizer]) -> None:
    model, batches = ladder(), rows(4)

    def plain(params: Any) -> Optimizer:
        return cls(params, lr=0.01)

    def hybrid(params: Any) -> Optimizer:
        return elixir.hybrid(cls)(params, lr=0.01)

    expected = eager_run(model, plain).train(batches)
    with hybrid_run(model, batches[0], home="split", update=Update.ACROSS_STEPS, optimizer=hybrid) as run:
        run.train(batches[:1])  # makes the state, for which it waits
        for batch, capture in zip(batches[1:], cycle([captured_by_dynamo, captured_by_export]), strict=False):
            gate = threading.Event()
            line: Any = run.optimizer._updater.line
            line.queue(lambda gate=gate: gate.wait(10) and None, "held")  # what the step queues comes behind it
            run.train([batch])
            assert in_flight(run) == 4

            def inside(gate: threading.Event = gate) -> None:
                gate.set()
                finish_updates()  # waits in the capture, as one does that reads a parameter

            capture(inside)
        assert_equal(expected, run)


def scripted(x: torch.Tensor) -> torch.Tensor:
    return x + 1 if torch.compiler.is_compiling() else x - 1


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_captures_and_torchscript_still_see_the_capture_flag() -> None:
    with compat.outside_captures():
        assert not torch.compiler.is_compiling()
    seen: list[bool] = []
    captured_by_dynamo(lambda: seen.append(torch.compiler.is_compiling()))
    captured_by_export(lambda: seen.append(torch.compiler.is_compiling()))
    assert seen[1]
    assert seen[0] or torch.__version__ < "2.13"  # Dynamo sets the flag since
    assert torch.compile(lambda: torch.compiler.is_compiling(), backend="eager", fullgraph=True)()
    assert not torch.jit.script(scripted)(torch.ones(1)).item()


# ----------------------------------------------------------------------------------------------------------------------
# Work beside this process gives what it gives here, also if the child fails, hangs, or cannot be.


can_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot be forked here")


@pytest.fixture
def may_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of this process may have left threads, and the machine may have one core."""
    monkeypatch.setattr(few_layers, "_may_fork", lambda: True)


@can_fork
def test_beside_runs_the_function_in_a_child_process(may_fork: None) -> None:
    with beside(os.getpid) as result:
        assert result() != os.getpid()


@can_fork
@pytest.mark.parametrize("is_hanging", [False, True], ids=["fails", "hangs"])
def test_if_the_child_fails_or_hangs_the_parent_does_the_work(
    is_hanging: bool, may_fork: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(few_layers, "_PATIENCE_S", 0.2)
    here = os.getpid()

    def work() -> str:
        if os.getpid() != here:
            time.sleep(60.0 if is_hanging else 0.0)
            raise ValueError("the child fails")
        return "done here"

    began_s = time.monotonic()
    with beside(work) as result:
        assert result() == "done here"
    assert time.monotonic() - began_s < 30.0


@can_fork
def test_an_exception_in_the_parent_ends_the_child(may_fork: None, monkeypatch: pytest.MonkeyPatch) -> None:
    children: list[int] = []
    fork = os.fork
    monkeypatch.setattr(os, "fork", lambda: children.append(fork()) or children[-1])

    def fail_beside() -> None:
        with beside(lambda: time.sleep(60.0)):
            raise KeyError

    with pytest.raises(KeyError):
        fail_beside()
    with pytest.raises(ChildProcessError):
        os.waitpid(children[0], 0)


@can_fork
def test_a_cpu_quota_counts_as_cores_when_a_child_is_considered(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 3 processes running, half of 8 cores are idle, but not half of a quota of 2."""
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    monkeypatch.setattr(os, "getloadavg", lambda: (3.0, 3.0, 3.0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.setattr(control_groups, "quota_cores", lambda memberships, groups: None)
    assert few_layers._may_fork()
    monkeypatch.setattr(control_groups, "quota_cores", lambda memberships, groups: 2.0)
    assert not few_layers._may_fork()


def test_without_a_second_core_there_is_no_child_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_layers, "_may_fork", lambda: False)
    with beside(os.getpid) as result:
        assert result() == os.getpid()
