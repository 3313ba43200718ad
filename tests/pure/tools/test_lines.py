"""Text of steps: lines that are linear in the number of layers, and goldens of memory."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elixir_compile.base.errors import InvalidOption
from elixir_compile.tools.preview.few_layers import Law, Record, names_of, proved, record, sized
from elixir_compile.tools.testing.step_memory import (
    Golden,
    GoldenFileError,
    check_golden,
    difference,
    golden_path,
    read_golden,
)

# ----------------------------------------------------------------------------------------------------------------------
# Lines that are linear in the number of layers are written, and others are not taken for such.


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


# ----------------------------------------------------------------------------------------------------------------------
# Goldens: text that reads back, and what a failing test says about changes.


KIB = 1024
MADE = Golden(
    machine="1 x a100-40g",
    peak_at="bwd.mm_3",
    figures={
        ("step", "peak", "bytes"): 100 * KIB,
        ("step", "host", "bytes"): 0,
        ("actions", "gather", "times"): 4,
        ("at the peak", "layers.0", "saved"): 16 * KIB,
        ("at the peak", "layers.2", "saved"): 32 * KIB,
        ("at the peak", "layers.2", "param"): 52 * KIB,
        ("homes", "other ops", "param/host"): 64 * KIB,
        ("activations", "layers.0", "recomputed"): 8 * KIB,
    },
)


def changed(**changes: int) -> Golden:
    """Return `MADE` with other figures: `layers_2_saved=4` for the bytes of `layers.2 saved` at the peak."""
    figures = dict(MADE.figures)
    for name, value in changes.items():
        layer, _, kind = name.rpartition("_")
        section = "actions" if kind == "times" else "step" if layer in ("peak", "host") else "at the peak"
        figures[section, layer.replace("_", "."), kind] = value
    return replace(MADE, figures=figures)


def test_a_golden_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "goldens" / "a.txt"
    check_golden(path, MADE, writes=True)
    assert read_golden(path) == MADE
    assert "  other ops param/host 65536\n" in path.read_text(encoding="utf-8")
    check_golden(path, MADE)


def test_the_op_at_the_peak_is_not_compared() -> None:
    assert difference(MADE, replace(MADE, peak_at="bwd.mm_4")) == ""


def test_the_message_says_which_layer_grew_by_how_much() -> None:
    said = difference(
        MADE, changed(layers_2_saved=160 * KIB, layers_0_saved=8 * KIB, peak_bytes=220 * KIB)
    ).splitlines()
    assert said[:2] == [
        "layers.2 grew by 128.0 KiB at the peak (saved +128.0 KiB)",
        "layers.0 shrank by 8.0 KiB at the peak (saved -8.0 KiB)",
    ]
    rows = [" ".join(line.split()) for line in said[5:]]
    assert rows == [
        "peak bytes 100.0 KiB 220.0 KiB +120.0 KiB (+120%)",
        "layers.2 saved at the peak 32.0 KiB 160.0 KiB +128.0 KiB (+400%)",
        "layers.0 saved at the peak 16.0 KiB 8.0 KiB -8.0 KiB (-50%)",
    ]


def test_kinds_of_a_layer_that_grow_and_shrink_are_added_up() -> None:
    said = difference(MADE, changed(layers_2_saved=0, layers_2_param=84 * KIB))
    assert said.startswith("layers.2 changed by 0 B at the peak (saved -32.0 KiB, param +32.0 KiB)")


def test_a_new_layer_and_another_count_of_actions_are_listed() -> None:
    said = difference(MADE, changed(layers_7_saved=KIB, gather_times=6))
    assert "layers.7 grew by 1.0 KiB at the peak (saved +1.0 KiB)" in said
    assert "gather 4 6 +2 (+50%)" in " ".join(said.split())
    assert "(new)" in said


def test_bytes_may_differ_by_the_tolerance_and_counts_may_not() -> None:
    grown = changed(layers_2_saved=33 * KIB, peak_bytes=101 * KIB)
    assert difference(MADE, grown, tolerance=0.05) == ""
    assert "layers.2 saved" in difference(MADE, grown, tolerance=0.03)
    assert "gather" in difference(MADE, changed(gather_times=5), tolerance=1.0)


def test_many_changes_are_cut_to_the_largest() -> None:
    many = changed(**{f"layers_{at}_temp": at * KIB for at in range(3, 100)})
    assert difference(MADE, many).endswith("and 67 more")


def test_another_machine_is_named() -> None:
    assert "planned for 1 x a100-40g, and now for 1 x h200-141g" in difference(
        MADE, replace(MADE, machine="1 x h200-141g")
    )


def test_a_missing_golden_is_shown_with_the_way_to_write_it(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"--elixir-update`:\n\n# Memory of a training step"):
        check_golden(tmp_path / "none.txt", MADE)


@pytest.mark.parametrize(
    ("text", "because"),
    [
        ("machine a\nstep\n  peak bytes many\n", "line 3"),
        ("machine a\n  peak bytes 3\n", "line 2"),
        ("machine a\nstep\n  peak\n", "line 3"),
        ("step\n  peak bytes 3\n", "no line `machine ...`"),
        ("\udcff", "decode"),
    ],
)
def test_a_file_that_is_no_golden_is_refused(tmp_path: Path, text: str, because: str) -> None:
    path = tmp_path / "golden.txt"
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(GoldenFileError, match=because):
        read_golden(path)


def test_goldens_are_beside_the_test_file_under_its_name() -> None:
    path = golden_path(Path("tests/test_memory.py"), "tiny-[fp32]")
    assert path == Path("tests/goldens/test_memory.tiny-[fp32].txt")
    for name in ("", "../x", "a/b", "a b"):
        with pytest.raises(InvalidOption, match="name of a golden"):
            golden_path(Path("tests/test_memory.py"), name)
