"""Kernels of Inductor: compiled together, with fewer trials, region by region, timed in free memory, and kept for a
backward."""

import contextlib
import copy
import functools
import gc
import json
import logging
import threading
import uuid
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import async_compile, config, cpp_builder, cpu_vec_isa
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.exc import CppCompileError
from torch._inductor.runtime import benchmarking

import elixir_compile as elixir
from elixir_compile import compat
from elixir_compile.compat import compilers, trace_past_logging
from elixir_compile.compat.compilers import Kernel, Kernels, best_instructions_only
from elixir_compile.graph.capture.modules import model_of
from elixir_compile.ir import Plan, Saving
from elixir_compile.runtime.lowering import CompiledRegion, RegionCompiler
from elixir_compile.session.programs import Programs
from elixir_compile.step import Depth, Group
from tests.fx.handmade import keep, planned, to_depth
from tests.run.models import Stack, seeded, vectors
from tests.run.training import Run, assert_offloads, assert_same, assert_same_tensors, by_elixir, by_torch, tight_bytes

# ----------------------------------------------------------------------------------------------------------------------
# C++ kernels of several regions share g++ runs, equal ones are compiled once, and all compute what they do alone.


HEADER = "#include <torch/csrc/inductor/cpp_prefix.h>\n"


def source_that_adds(amount: int, *, more: str = "") -> str:
    """Return a kernel that adds `amount` to one float, by a helper; no cache has it."""
    text = f"{HEADER}{more}\n// {uuid.uuid4()}\ninline float amount() {{ return {amount}; }}\n"
    return f'{text}extern "C" void kernel(float* value) {{ *value += amount(); }}\n'


def scope_of(owner: Kernels, **sources: str) -> dict[str, Kernel]:
    """Return the globals of a module that Inductor generates for the kernels `sources`."""
    with owner.gathered():
        compiler = AsyncCompile()
        scope = {name: compiler.cpp_pybinding(["float*"], source) for name, source in sources.items()}
        compiler.wait(scope)
    return scope


def added(scope: dict[str, Kernel]) -> dict[str, float]:
    """Return what each kernel adds."""
    results: dict[str, float] = {}
    for name in list(scope):
        value = torch.zeros(1)
        scope[name](value)
        results[name] = value.item()
    return results


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that grows by the command of each g++ run that compiles kernels."""
    seen: list[str] = []
    usual = cpp_builder.run_compile_cmd

    def run(command: str, cwd: str) -> None:
        if ".main.cpp" in command:
            seen.append(command)
        usual(command, cwd)

    monkeypatch.setattr(cpp_builder, "run_compile_cmd", run)
    return seen


def test_helpers_of_the_same_name_can_share_a_unit(runs: list[str]) -> None:
    scope = scope_of(Kernels(), k1=source_that_adds(1), k2=source_that_adds(2), k3=source_that_adds(3))
    assert added(scope) == {"k1": 1, "k2": 2, "k3": 3}
    assert len(runs) == 1
    assert not any(isinstance(kernel, Kernel) for kernel in scope.values()), "a call goes to the function itself"


def test_equal_kernels_of_two_regions_are_compiled_once(runs: list[str]) -> None:
    owner, both = Kernels(), source_that_adds(2)
    first, second = scope_of(owner, a=source_that_adds(1), b=both), scope_of(owner, c=both, d=source_that_adds(3))
    owner.start()
    assert added(first) == {"a": 1, "b": 2}
    assert added(second) == {"c": 2, "d": 3}
    assert first["b"] is second["c"]
    assert len(runs) == 1


def test_a_kernel_called_while_another_thread_starts_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = Kernels()
    scope = scope_of(owner, k=source_that_adds(1))
    began, may_go_on, usual = threading.Event(), threading.Event(), compilers.command_line

    def command_line() -> str:
        began.set()
        may_go_on.wait(60)
        return usual()

    monkeypatch.setattr(compilers, "command_line", command_line)
    starter = threading.Thread(target=owner.start)
    starter.start()
    assert began.wait(60)
    threading.Timer(0.3, may_go_on.set).start()
    assert added(scope) == {"k": 1}
    starter.join()


def test_each_call_of_a_broken_kernel_raises_the_compilers_error() -> None:
    scope = scope_of(Kernels(), broken=f"{HEADER}\n// {uuid.uuid4()}\nthis is no C++\n")
    for _ in range(2):
        with pytest.raises(CppCompileError):
            scope["broken"](torch.zeros(1))


def test_many_kernels_take_a_unit_per_core(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(compilers, "_Unit", lambda unit, submit: sizes.append(len(unit)))
    for num_cores, expected in ((2, [5, 4]), (64, [3, 3, 3])):
        monkeypatch.setattr(async_compile, "get_compile_threads", lambda num_cores=num_cores: num_cores)
        owner = Kernels()
        scope_of(owner, **{f"k{amount}": source_that_adds(amount) for amount in range(9)})
        sizes.clear()
        owner.start()
        assert sizes == expected


def test_a_kernel_that_includes_more_has_a_unit_of_its_own(runs: list[str]) -> None:
    scope = scope_of(Kernels(), plain=source_that_adds(1), more=source_that_adds(2, more="#include <vector>"))
    assert added(scope) == {"plain": 1, "more": 2}
    assert len(runs) == 2


def test_kernels_that_do_not_compile_together_are_compiled_alone(runs: list[str]) -> None:
    # A template of `std` cannot be specialised inside of another namespace.
    special = "struct Odd {};\ntemplate <> struct std::hash<Odd> { int own; };\n"
    scope = scope_of(Kernels(), plain=source_that_adds(1), odd=source_that_adds(2, more=special))
    assert added(scope) == {"plain": 1, "odd": 2}
    assert len(runs) == 3


def test_a_later_process_finds_each_kernel_of_a_shared_library(runs: list[str]) -> None:
    one, two, three = (source_that_adds(amount) for amount in (1, 2, 3))
    assert added(scope_of(Kernels(), a=one, b=two)) == {"a": 1, "b": 2}
    runs.clear()
    assert added(scope_of(Kernels(), b=two)) == {"b": 2}
    assert not runs
    assert added(scope_of(Kernels(), b=two, c=three)) == {"b": 2, "c": 3}
    assert len(runs) == 1


def test_a_kernel_whose_library_is_gone_is_compiled_again(runs: list[str]) -> None:
    source = source_that_adds(1)
    assert added(scope_of(Kernels(), a=source)) == {"a": 1}
    key = compilers.source_key(["float*"], source, compilers.command_line())
    place = compilers.known_place(key)
    assert place is not None
    compilers.note_place(key, place._replace(path="/nowhere.so"))
    assert compilers.known_place(key) is None
    # A file that is there, and is no library.
    compilers.note_place(key, place._replace(path=__file__, key="none"))
    assert added(scope_of(Kernels(), a=source)) == {"a": 1}
    assert compilers.known_place(key) == place


def test_start_does_not_wait_for_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    may_go_on, usual = threading.Event(), cpp_builder.run_compile_cmd

    def run(command: str, cwd: str) -> None:
        assert may_go_on.wait(60)
        usual(command, cwd)

    monkeypatch.setattr(cpp_builder, "run_compile_cmd", run)
    monkeypatch.setattr(async_compile, "get_compile_threads", lambda: 2)
    owner = Kernels()
    scope = scope_of(owner, k1=source_that_adds(1))
    owner.start()  # a g++ run that was waited for would never end
    may_go_on.set()
    assert added(scope) == {"k1": 1}


def test_a_step_is_the_same_with_kernels_together_and_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[dict[str, torch.Tensor]] = []
    settled: list[Kernel] = []
    usual = Kernel.install

    def install(kernel: Kernel, function: object) -> None:
        settled.append(kernel)
        usual(kernel, function)

    monkeypatch.setattr(Kernel, "install", install)
    for is_together in (True, False):
        torch._dynamo.reset()
        if not is_together:
            assert settled
            settled.clear()
            monkeypatch.setattr(Kernels, "gathered", contextlib.nullcontext)
        model = seeded(Stack, num_blocks=1)
        optimizer = elixir.HybridAdamW(model.parameters(), lr=1e-2)
        compiled = torch.compile(model, backend="elixir", options={"report": False})
        for batch in vectors(2):
            compiled(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append(model.state_dict())
    assert not settled
    assert_same_tensors(*ends)


# ----------------------------------------------------------------------------------------------------------------------
# Inductor chooses the instructions that it always does, with fewer trials.


class Isa:
    """An instruction set that notes when it is tried."""

    def __init__(self, flags: str, *, works: bool, tried: list[str]) -> None:
        self.flags, self.works, self.tried = flags, works, tried

    def __str__(self) -> str:
        return self.flags

    def __bool__(self) -> bool:
        self.tried.append(self.flags)
        return self.works

    def bit_width(self) -> int:
        return 256 if self.flags == "avx2" else 512


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that grows by each set that is tried: a processor that knows three of four, of which one works
    with the compiler only in theory."""
    seen: list[str] = []
    sets = {"amx_tile": True, "avx512 avx512_vnni": False, "avx512": True, "avx2": True}
    isas = [Isa(flags, works=works, tried=seen) for flags, works in sets.items()]
    monkeypatch.setattr(cpu_vec_isa, "supported_vec_isa_list", isas)
    monkeypatch.setattr(cpu_vec_isa, "x86_isa_checker", lambda: ["avx2", "avx512", "avx512_vnni"])
    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", cpu_vec_isa.valid_vec_isa_list.__wrapped__)
    monkeypatch.setattr(compilers.sys, "platform", "linux")
    monkeypatch.setattr(compilers.platform, "machine", lambda: "x86_64")
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    return seen


def test_the_best_instruction_set_is_found_without_trying_the_rest(tried: list[str]) -> None:
    usual = cpu_vec_isa.pick_vec_isa()
    assert tried == ["avx512 avx512_vnni", "avx512", "avx2"]
    tried.clear()
    with best_instructions_only():
        assert cpu_vec_isa.pick_vec_isa() is usual
    assert tried == ["avx512 avx512_vnni", "avx512"]


def test_an_instruction_set_named_by_the_user_is_picked(tried: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with config.patch({"cpp.simdlen": 256}), best_instructions_only():
        assert str(cpu_vec_isa.pick_vec_isa()) == "avx2"
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    with best_instructions_only():
        assert str(cpu_vec_isa.pick_vec_isa()) == "avx2"


def test_if_no_instruction_set_works_none_is_picked(tried: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_vec_isa, "supported_vec_isa_list", [])
    with best_instructions_only():
        assert cpu_vec_isa.pick_vec_isa() is cpu_vec_isa.invalid_vec_isa


# ----------------------------------------------------------------------------------------------------------------------
# A library that adds methods to loggers after the backend was loaded, as transformers does when it is imported.


log = logging.getLogger("tests.late")


class Warns(nn.Module):
    """A layer that warns, by a method that loggers get late."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        log.warning_once("once")
        return self.layer(x).sum()


@pytest.mark.parametrize("is_reset", [False, True])
def test_a_logger_gets_its_method_after_the_backend_was_loaded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_reset: bool
) -> None:
    """Dynamo writes a copy of its settings as JSON after each compilation: torch 2.11 logs an error if that fails."""
    trace_past_logging()

    @functools.lru_cache(None)
    def warning_once(logger: logging.Logger, message: str) -> None:
        logger.warning(message)

    torch._dynamo.reset()
    monkeypatch.setattr(logging.Logger, "warning_once", warning_once, raising=False)
    if is_reset:
        torch._dynamo.reset()
    model = Warns()
    run = torch.compile(model, backend="elixir", fullgraph=True, options={"inner": "aot_eager", "report": False})
    run(torch.randn(2, 4)).backward()
    assert len(elixir.compilations(model)) == 1
    assert json.dumps(sorted(copy.deepcopy(torch._dynamo.config.ignore_logging_functions))) == "[]"
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


# ----------------------------------------------------------------------------------------------------------------------
# A step whose regions begin with layers computes what a step of two regions computes, and compiles few of them.


def plan_of(run: Run) -> Plan:
    return model_of(run.model).compilations[0].plan


def num_compiled(run: Run) -> int:
    """Return how many different regions were compiled for `run`."""
    regions = model_of(run.model)._regions.values()
    return sum(len(compiler._compiled) for compiler in regions)


def test_compiling_by_layer_keeps_bits_and_compiles_equal_layers_once() -> None:
    model, batches = seeded(Stack, num_blocks=6), vectors(3)
    expected = by_torch(model).train(batches)
    whole = by_elixir(model).train(batches)
    assert_same(expected, whole)
    assert len(plan_of(whole).regions) == 2
    apart = by_elixir(model, compile_by="layer").train(batches)
    assert_same(expected, apart)
    assert len(plan_of(apart).regions) == 14
    assert num_compiled(apart) <= 7


def test_compiling_by_layer_under_a_budget_keeps_bits() -> None:
    model, batches = seeded(Stack, num_blocks=6), vectors(3)
    options = {"activations": "keep", "compile_by": "layer"}
    expected = by_torch(model).train(batches)
    got = by_elixir(model, device_memory=tight_bytes(model, batches[0], **options), **options).train(batches)
    assert_same(expected, got)
    assert_offloads(got)
    by_plan = by_elixir(model, device_memory=tight_bytes(model, batches[0], **options), activations="keep")
    assert num_compiled(got) < num_compiled(by_plan.train(batches[:1]))


@pytest.fixture
def regions(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Return a list that grows by the id of each region that Inductor compiles."""
    seen: list[str] = []
    usual = RegionCompiler._compile

    def compile_it(self: RegionCompiler, region: object, *args: object) -> object:
        seen.append(region.id)
        return usual(self, region, *args)

    monkeypatch.setattr(RegionCompiler, "_compile", compile_it)
    return seen


@pytest.mark.slow
def test_inductor_compiles_no_more_regions_for_more_layers(regions: list[str]) -> None:
    counts = []
    batches = vectors(2)
    for num_blocks in (6, 8):
        regions.clear()
        model = seeded(Stack, num_blocks=num_blocks)
        apart = by_elixir(model, inner="inductor").train(batches)
        counts.append(len(regions))
        assert len(plan_of(apart).regions) > num_blocks
    # The sums between blocks are written every few layers, so that the ends of six and of eight differ by one.
    assert max(counts) <= 10
    whole = by_elixir(model, inner="inductor", compile_by="plan").train(batches)
    for one, other in zip(apart.losses, whole.losses, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    for name, weight in whole.weights.items():
        torch.testing.assert_close(apart.weights[name], weight, rtol=1e-4, atol=1e-5, msg=name)


class Convolved(nn.Module):
    """Five residual blocks of convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(*(nn.Conv2d(4, 4, 3, padding=1) for _ in range(2))) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x).relu()
        return x.square().mean()


def test_convolutions_are_compiled_as_a_whole() -> None:
    run = by_elixir(seeded(Convolved), compile_by="layer").train([torch.randn(2, 4, 8, 8)])
    assert len(plan_of(run).regions) == 2


# ----------------------------------------------------------------------------------------------------------------------
# Kernels that Inductor times at their first run are timed in the memory that the plan leaves free.
#
# Inductor writes a buffer as large as the device's cache between two runs of a kernel: with an H100's 50 MiB, the
# first step of a GPT-2 took 159 MiB in a budget of 112.


CACHE_BYTES = 50 << 20


@pytest.fixture
def benchmarker(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Inductor's benchmarker of a GPU, as far as its cache goes."""
    made = SimpleNamespace(L2_cache_size=CACHE_BYTES)
    monkeypatch.setattr(benchmarking, "benchmarker", made)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return made


@pytest.mark.parametrize(("room_bytes", "expected_bytes"), [(0, 0), (1 << 20, 1 << 20), (1 << 30, CACHE_BYTES)])
def test_the_cache_is_emptied_by_a_buffer_in_the_room(
    room_bytes: int, expected_bytes: int, benchmarker: SimpleNamespace
) -> None:
    def fail_within() -> None:
        with compat.timed_within(room_bytes):
            with compat.timed_within(CACHE_BYTES * 2):
                assert benchmarker.L2_cache_size == expected_bytes
            assert benchmarker.L2_cache_size == expected_bytes
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fail_within()
    assert benchmarker.L2_cache_size == CACHE_BYTES


def test_a_benchmarker_without_a_buffer_is_left_alone(benchmarker: SimpleNamespace) -> None:
    del benchmarker.L2_cache_size
    with compat.timed_within(0):
        assert not vars(benchmarker)


def test_a_region_is_timed_in_its_first_run_that_succeeds(benchmarker: SimpleNamespace) -> None:
    seen: list[int] = []

    def run(box: list[Any]) -> int:
        seen.append(benchmarker.L2_cache_size)
        return box.pop()

    region = CompiledRegion(run, 1, (), ())
    region.room_bytes = 7
    with pytest.raises(IndexError):
        region.run([])
    assert [region.run([1]), region.run([2])] == [1, 2]
    assert seen == [7, 7, CACHE_BYTES]


def test_a_capture_times_kernels_without_a_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor times padded products then, and no plan has left room."""
    limits: list[int] = []
    seen: list[tuple[int, ...]] = []

    @contextmanager
    def noted(nbytes: int) -> Iterator[None]:
        limits.append(nbytes)
        yield
        limits.pop()

    def lower(graph: torch.fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
        seen.append(tuple(limits))
        return graph

    monkeypatch.setattr(compilers, "timed_within", noted)
    compat.compile_with_inductor(torch.fx.symbolic_trace(torch.nn.ReLU()), [torch.ones(2)], lower, lower)
    assert (seen, limits) == ([(0,)], [])


def test_the_room_is_what_the_plan_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    rooms: set[int | None] = set()
    lower = RegionCompiler.lower

    def noted(self: RegionCompiler, *args: Any, room_bytes: int | None = None, **options: Any) -> CompiledRegion:
        rooms.add(room_bytes)
        return lower(self, *args, room_bytes=room_bytes, **options)

    monkeypatch.setattr(RegionCompiler, "lower", noted)
    budget = tight_bytes(seeded(Stack), vectors(1)[0])
    run = by_elixir(seeded(Stack), device_memory=budget, replan=False).train(vectors(1))
    plan = elixir.compilations(run.model)[0].plan
    assert plan is not None
    assert rooms == {budget - plan.prediction.device_peak_bytes}


# ----------------------------------------------------------------------------------------------------------------------
# `session.programs`: programs stay for as long as a forward of theirs may have a backward.


NUM_FORWARDS = 4


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Programs]]:
    """Every `Programs` that is made."""
    found: list[weakref.ref[Programs]] = []
    original = Programs.__init__

    def init(self: Programs, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        found.append(weakref.ref(self))

    monkeypatch.setattr(Programs, "__init__", init)
    return found


def num_alive(made: list[weakref.ref[Programs]]) -> int:
    gc.collect()
    return sum(programs() is not None for programs in made)


def test_programs_are_freed_with_the_last_forward_that_needs_them(
    made: list[weakref.ref[Programs]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every forward beside more of them is planned anew."""
    model, (batch, *_) = seeded(Stack), vectors()

    def choose(group: Group) -> Saving | None:
        return (keep if len(plans) % 2 else to_depth(Depth.POINTWISE))(group)

    with planned(monkeypatch, choose) as plans:
        run = by_elixir(model).train([batch])
        losses = [run.compiled(batch) for _ in range(NUM_FORWARDS)]
        num_held = num_alive(made)
        assert num_held >= NUM_FORWARDS
        while losses:
            losses.pop(0).backward()
        run.compiled(batch).backward()
        assert num_alive(made) == 1
