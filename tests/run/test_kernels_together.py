"""C++ kernels of one region share a g++ run, and compute what they compute alone."""

import contextlib
import uuid
from collections.abc import Iterator

import pytest
import torch
from torch._inductor import codecache

import elixir_compile as elixir
from elixir_compile.compat import compilers, kernels
from tests.run.models import Stack, seeded, vectors
from tests.run.training import assert_same_tensors

HEADER = "#include <torch/csrc/inductor/cpp_prefix.h>\n"


def kernel_that_adds(amount: int, *, more: str = "", helper: str = "amount") -> kernels._Kernel:
    """Return a kernel that adds `amount` to one float, by a helper; no cache has it."""
    text = f"{HEADER}{more}\n// {uuid.uuid4()}\ninline float {helper}() {{ return {amount}; }}\n"
    return kernels._Kernel(["float*"], f'{text}extern "C" void kernel(float* value) {{ *value += {helper}(); }}\n')


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Yield the C++ sources that are compiled, or taken from the cache, one after the other."""
    seen: list[str] = []
    usual = codecache.CppPythonBindingsCodeCache.load_async.__func__

    def load(cls: type, text: str, *args: object, **kwargs: object) -> object:
        seen.append(text)
        return usual(cls, text, *args, **kwargs)

    monkeypatch.setattr(codecache.CppPythonBindingsCodeCache, "load_async", classmethod(load))
    return seen


def added(found: dict[str, object]) -> dict[str, float]:
    """Return what each kernel adds."""
    results: dict[str, float] = {}
    for name, kernel in found.items():
        value = torch.zeros(1)
        kernel(value)
        results[name] = value.item()
    return results


def test_kernels_share_a_unit_and_helpers_of_one_name_stay_apart(runs: list[str]) -> None:
    waiting = {f"k{amount}": kernel_that_adds(amount) for amount in (1, 2, 3)}
    assert added(kernels._compiled(waiting, 1, None)) == {"k1": 1, "k2": 2, "k3": 3}
    assert len(runs) == 1


def test_many_kernels_take_a_unit_per_core() -> None:
    sizes: list[int] = []

    def note(unit: list[object], submit: object) -> object:
        sizes.append(len(unit))
        return lambda: None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_begin", note)
        patch.setattr(kernels, "_loaded", lambda unit, load: [id(kernel) for kernel in unit])
        waiting = {f"k{amount}": kernel_that_adds(amount) for amount in range(9)}
        found = kernels._compiled(waiting, 2, None)
        assert found == {name: id(kernel) for name, kernel in waiting.items()}
        assert sizes == [5, 4]
        sizes.clear()
        kernels._compiled(waiting, 64, None)
        assert sizes == [3, 3, 3]


def test_a_kernel_that_includes_more_has_a_unit_of_its_own(runs: list[str]) -> None:
    waiting = {"plain": kernel_that_adds(1), "more": kernel_that_adds(2, more="#include <vector>")}
    assert added(kernels._compiled(waiting, 1, None)) == {"plain": 1, "more": 2}
    assert len(runs) == 2


def test_kernels_that_do_not_compile_together_are_compiled_alone(runs: list[str]) -> None:
    # A template of `std` cannot be specialised inside of another namespace.
    special = "struct Odd {};\ntemplate <> struct std::hash<Odd> { int own; };\n"
    odd = kernel_that_adds(2)
    odd.source = odd.source.replace(HEADER, HEADER + special)
    assert added(kernels._compiled({"plain": kernel_that_adds(1), "odd": odd}, 1, None)) == {"plain": 1, "odd": 2}
    assert len(runs) == 3


def test_a_step_is_the_same_with_kernels_together_and_alone(runs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    ends, counts = [], []
    for is_together in (True, False):
        torch._dynamo.reset()
        runs.clear()
        if not is_together:
            monkeypatch.setattr(compilers, "kernels_together", contextlib.nullcontext)
        model = seeded(Stack, num_blocks=1)
        optimizer = elixir.HybridAdamW(model.parameters(), lr=1e-2)
        compiled = torch.compile(model, backend="elixir", options={"report": False})
        for batch in vectors(2):
            compiled(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        counts.append(len(runs))
        ends.append(model.state_dict())
    assert_same_tensors(*ends)
    assert counts[0] < counts[1]
