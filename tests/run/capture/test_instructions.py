"""Inductor chooses the instructions that it always does, with fewer trials."""

import pytest
from torch._inductor import config, cpu_vec_isa

from elixir_compile.compat import compilers as libraries
from elixir_compile.compat.compilers import best_instructions_only


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
    monkeypatch.setattr(libraries.sys, "platform", "linux")
    monkeypatch.setattr(libraries.platform, "machine", lambda: "x86_64")
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
