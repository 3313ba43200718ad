"""Lines that are linear in the number of layers are written, and others are not taken for such."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elixir_compile.tools.preview.few_layers import Law, Record, names_of, proved, record, sized


@dataclass(frozen=True)
class Part:
    """Records of a model: once, or once for each layer but `missing` of them."""

    kinds: tuple[str, ...]
    per_repeat: tuple[int, ...] = ()
    """What each repeat adds to the number of each record; empty for records that come once."""
    per_layer: tuple[int, ...] = ()
    """What each layer of the model adds to the number of each record."""
    missing: int = 0

    def line(self, layers: int, number: int) -> list[Record]:
        if not self.per_repeat:
            slopes = self.per_layer or (0,) * len(self.kinds)
            return [record(("once", number), f"{k}_{s * layers}") for k, s in zip(self.kinds, slopes, strict=True)]
        return [
            record(("each", number), f"{kind}_{1000 + repeat * grown + layers * slope}")
            for repeat in range(layers - self.missing)
            for kind, grown, slope in zip(self.kinds, self.per_repeat, self.per_layer, strict=True)
        ]


def line_at(parts: list[Part], layers: int) -> list[Record]:
    return [entry for number, part in enumerate(parts) for entry in part.line(layers, number)]


@st.composite
def parts_of_models(draw: st.DrawFn) -> Part:
    kinds = draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=5).map(tuple))
    numbers = st.tuples(*(st.integers(0, 9) for _ in kinds))
    if draw(st.booleans()):
        return Part(kinds, per_layer=draw(numbers))
    return Part(kinds, draw(numbers), draw(numbers), missing=draw(st.integers(0, 2)))


MODELS = st.lists(parts_of_models(), min_size=1, max_size=6)


@given(MODELS, st.integers(5, 12))
def test_the_line_of_many_layers_follows_from_2_3_and_4_layers(parts: list[Part], layers: int) -> None:
    law = proved(*(line_at(parts, few) for few in (2, 3, 4)))
    assert law is not None
    assert law.at(layers - 4) == line_at(parts, layers)


GPT2 = [
    Part(("embed",)),
    Part(("mul", "add", "mul"), per_repeat=(2, 1, 2), per_layer=(0, 0, 0)),
    Part(("div",), per_repeat=(1,), per_layer=(3,)),
    Part(("loss",), per_layer=(4,)),
    Part(("mul", "mm"), per_repeat=(2, 5), per_layer=(4, 7), missing=1),
]


@pytest.mark.parametrize("kind", ["mul", "div", "loss", "mm"])
@pytest.mark.parametrize("layers", [2, 3, 4])
def test_a_line_with_another_number_follows_no_law(kind: str, layers: int) -> None:
    lines = {few: line_at(GPT2, few) for few in (2, 3, 4)}
    assert proved(*lines.values()) is not None
    at = next(i for i, entry in enumerate(lines[layers]) if names_of(entry)[0].startswith(kind))
    entry = lines[layers][at]
    lines[layers][at] = Record(entry.fixed, entry.text, (entry.numbers[0] + 1,))
    assert proved(*lines.values()) is None


def test_quadratic_growth_follows_no_law() -> None:
    lines = [[*line_at(GPT2, few), record(("once",), f"cat_{few * few}")] for few in (2, 3, 4)]
    assert proved(*lines) is None


def test_layers_that_alternate_follow_no_law() -> None:
    lines = [[record(("each",), "ab"[layer % 2]) for layer in range(few)] for few in (2, 3, 4)]
    assert proved(*lines) is None


def test_a_size_may_grow_with_the_layers_in_a_unique_record() -> None:
    def line(layers: int, *, of_each: bool = False) -> list[Record]:
        seeds = sized(record(("storage",), "seeds"), 8 * layers)
        others = [sized(record(("storage",), f"mul_{i}"), 8 * layers if of_each else 64) for i in range(layers)]
        return [seeds, *others]

    law = proved(*(line(few) for few in (2, 3, 4)))
    assert law is not None
    assert law.at(6) == line(10)
    assert proved(*(line(few, of_each=True) for few in (2, 3, 4))) is None


BREAKS = {
    "a repeat gets the number of the next one": lambda self, block, number, more: WRITE(self, block, number + 1, more),
    "a repeat forgets how many layers there are": lambda self, block, number, more: WRITE(self, block, number, 0),
    "a repeat loses its last record": lambda self, block, number, more: WRITE(self, block, number, more)[:-1],
}
WRITE = Law._repeated


@pytest.mark.parametrize("broken", BREAKS.values(), ids=BREAKS)
def test_proved_rejects_a_broken_law(broken: object, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [line_at(GPT2, few) for few in (2, 3, 4)]
    monkeypatch.setattr(Law, "_repeated", broken)
    assert proved(*lines) is None
