"""Tapes as C: each element of each tensor is read from memory once and written once.

    void update(float *const *at, const float *numbers, size_t count, Root root)
        for each 512 elements, which stay in the cache:
            for each of them: the ops before a square root;   root(all of them);   for each: the ops behind it

The second level of loops is there only where torch takes square roots from MKL.
"""

from collections.abc import Iterator, Mapping

from elixir_compile.optim.host.formula import BY_MKL, FORMULAS
from elixir_compile.optim.host.tape import Form

BLOCK = 512

HEAD = f"""#include <math.h>
#include <stddef.h>
typedef void (*Root)(int, const float *, float *, long long);
enum {{ BLOCK = {BLOCK} }};
"""
_MODE = 0x140102
"""Of MKL, as torch calls it: VML_HA, VML_FTZDAZ_OFF, VML_ERRMODE_IGNORE."""


def function_text(name: str, form: Form, ways: Mapping[str, str]) -> str:
    """Return a C function that updates the inputs of `form` in place; `ways` are the expressions of its ops."""
    stages = _Stages(form, ways)
    lines = [f"void {name}(float *const *at, const float *numbers, size_t count, Root root) {{"]
    lines += [f"    float *restrict const t{index} = at[{index}];" for index in range(form.num_inputs)]
    lines += [f"    const float s{index} = numbers[{index}];" for index in range(form.num_numbers)]
    lines += [f"    {stages.kind(value)} b{value}[BLOCK];" for value in sorted(stages.kept)]
    lines.append("    for (size_t from = 0; from < count; from += BLOCK) {")
    lines.append("        const int num = count - from < BLOCK ? (int)(count - from) : BLOCK;")
    for stage in range(stages.num_stages):
        lines.append("        for (int i = 0; i < num; i++) {")
        lines += [f"            {line}" for line in stages.body(stage)]
        lines += ["        }", *(f"        {call}" for call in stages.calls(stage))]
    return "\n".join([*lines, "    }", "}", ""])


class _Stages:
    """Which ops are before which square root, and what is kept from one loop to the next."""

    def __init__(self, form: Form, ways: Mapping[str, str]) -> None:
        self._form, self._ways = form, ways
        self._ops = dict(enumerate(form.ops, start=form.num_inputs))
        self._stage = dict.fromkeys(range(form.num_inputs), 0)
        """By value, the loop that computes it; of a root the first that has it."""
        for value, (formula, _) in self._ops.items():
            before = max((self._stage[one] for one in self._read(value)), default=0)
            self._stage[value] = before + 1 if ways[formula] == BY_MKL else before
        self._writes = {index: self._written_in(index, value) for index, value in form.outputs}
        self.num_stages = 1 + max((*self._stage.values(), *self._writes.values()))
        reads = [(one, self._stage[value]) for value in self._ops for one in self._read(value)]
        reads += [(value, self._writes[index]) for index, value in form.outputs]
        later = {one for one, stage in reads if one in self._ops and stage > self._stage[one]}
        self.kept = later | {value for value in self._ops if self._is_root(value)}
        """Values in arrays."""

    def kind(self, value: int) -> str:
        """Return the C type of a value."""
        return "int" if value in self._ops and FORMULAS[self._ops[value][0]].is_mask else "float"

    def body(self, stage: int) -> Iterator[str]:
        """Yield what one loop does for element `i`."""
        own = [value for value in self._ops if self._stage[value] == stage and not self._is_root(value)]
        writes = [(index, value) for index, value in self._form.outputs if self._writes[index] == stage]
        wanted = {one for value in own for one in self._read(value)} | {value for _, value in writes}
        for value in sorted(wanted - set(own)):
            place = f"b{value}[i]" if value in self._ops else f"t{value}[from + i]"
            yield f"const {self.kind(value)} v{value} = {place};"
        for value in own:
            formula, operands = self._ops[value]
            expression = self._ways[formula].format(*(f"{letter}{index}" for letter, index in operands))
            yield f"const {self.kind(value)} v{value} = {expression};"
            if value in self.kept:
                yield f"b{value}[i] = v{value};"
        for index, value in writes:
            yield f"t{index}[from + i] = v{value};"

    def calls(self, stage: int) -> Iterator[str]:
        """Yield what follows one loop."""
        for value in self._ops:
            if self._is_root(value) and self._stage[value] == stage + 1:
                (of,) = self._read(value)
                yield f"root(num, {f'b{of}' if of in self._ops else f't{of} + from'}, b{value}, {_MODE:#x});"

    def _read(self, value: int) -> list[int]:
        return [index for letter, index in self._ops[value][1] if letter == "v"]

    def _is_root(self, value: int) -> bool:
        return self._ways[self._ops[value][0]] == BY_MKL

    def _written_in(self, index: int, value: int) -> int:
        """Return the loop that writes an input: none before everybody has read it."""
        readers = [other for other in self._ops if index in self._read(other)]
        return max(self._stage[one] for one in (value, *readers))
