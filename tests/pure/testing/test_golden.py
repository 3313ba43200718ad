"""Goldens: text that reads back, and what a failing test says about changes."""

from dataclasses import replace
from pathlib import Path

import pytest

from elixir_compile.base.errors import InvalidOption
from elixir_compile.tools.testing.step_memory import (
    Golden,
    GoldenFileError,
    check_golden,
    difference,
    golden_path,
    read_golden,
)

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
