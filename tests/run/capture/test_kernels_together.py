"""C++ kernels of several regions share g++ runs, equal ones are compiled once, and all compute what they do alone."""

import contextlib
import threading
import uuid

import pytest
import torch
from torch._inductor import async_compile, cpp_builder
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.exc import CppCompileError

import elixir_compile as elixir
from elixir_compile.compat import compilers as kernels
from elixir_compile.compat import compilers as libraries
from elixir_compile.compat.compilers import Kernel, Kernels
from tests.run.models import Stack, seeded, vectors
from tests.run.training import assert_same_tensors

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
    began, may_go_on, usual = threading.Event(), threading.Event(), kernels.command_line

    def command_line() -> str:
        began.set()
        may_go_on.wait(60)
        return usual()

    monkeypatch.setattr(kernels, "command_line", command_line)
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
    monkeypatch.setattr(kernels, "_Unit", lambda unit, submit: sizes.append(len(unit)))
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
    key = libraries.source_key(["float*"], source, libraries.command_line())
    place = libraries.known_place(key)
    assert place is not None
    libraries.note_place(key, place._replace(path="/nowhere.so"))
    assert libraries.known_place(key) is None
    # A file that is there, and is no library.
    libraries.note_place(key, place._replace(path=__file__, key="none"))
    assert added(scope_of(Kernels(), a=source)) == {"a": 1}
    assert libraries.known_place(key) == place


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
