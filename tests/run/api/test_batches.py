"""`tools.preview.models`: captures of many batches from three of them."""

from dataclasses import replace

import torch
from torch import nn

from elixir_compile.base.options import Options
from elixir_compile.tools.preview.capture import Capture, capture_step
from elixir_compile.tools.preview.models import BatchCaptures

OPTIONS = Options(inner="aot_eager")


class Head(nn.Module):
    """A layer, and a projection to so many classes that the loss of each batch can be chunked."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(8, 8), nn.Linear(8, 1 << 16)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.up(x).relu()).flatten(0, 1), labels.flatten())


def captured(rows: int) -> Capture:
    inputs = torch.empty(rows, 64, 8, device="meta"), torch.empty(rows, 64, dtype=torch.int64, device="meta")
    return capture_step(Head, inputs, device="cpu", options=OPTIONS)


class Counted:
    """A capture function that remembers for which rows it was called."""

    def __init__(self, offset_at: int = 0) -> None:
        self.rows: list[int] = []
        self.offset_at = offset_at

    def __call__(self, rows: int) -> Capture:
        self.rows.append(rows)
        made = captured(rows)
        return replace(made, base_bytes=made.base_bytes + 1) if rows == self.offset_at else made


def test_a_derived_capture_equals_the_capture_of_its_batch() -> None:
    capture = Counted()
    captures = BatchCaptures(capture=capture, rows=(1, 2, 4, 8, 16), options=OPTIONS)
    derived = {rows: captures.at(rows) for rows in (1, 2, 4, 8, 16)}
    assert sorted(capture.rows) == [1, 2, 8, 16]
    assert derived[4].graph.batch == 4
    assert derived[4].chunks is not None
    assert derived[4] == captured(4)
    assert captures.is_as_derived(4)
    assert captures.is_as_derived(16)


def test_if_a_number_is_on_no_straight_line_each_batch_is_captured() -> None:
    capture = Counted(offset_at=8)
    captures = BatchCaptures(capture=capture, rows=(2, 4, 8, 16), options=OPTIONS)
    assert [captures.at(rows).graph.batch for rows in (2, 4, 8, 16)] == [2, 4, 8, 16]
    assert sorted(capture.rows) == [2, 4, 8, 16]


def test_a_capture_that_is_not_as_derived_drops_all_that_are_derived() -> None:
    capture = Counted(offset_at=4)
    captures = BatchCaptures(capture=capture, rows=(2, 4, 8, 16), options=OPTIONS)
    before = captures.at(4)
    assert 4 not in capture.rows
    assert not captures.is_as_derived(4)
    assert captures.at(4).base_bytes == before.base_bytes + 1
    assert captures.is_as_derived(4)
