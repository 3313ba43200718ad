"""Tensors of one slab are one run; whatever is not known to lie side by side is left alone."""

import pytest
import torch

from elixir_compile.optim.host.passes import coalesce
from elixir_compile.runtime.bucket import Slab, aligned_bytes, flat

SHAPES = [(3, 5), (129,), (1,), (16, 16)]
KINDS = (torch.bfloat16, torch.bfloat16, torch.int16, torch.float32, torch.float32)


def rows_of(shapes: list[tuple[int, ...]] = SHAPES) -> list[list[torch.Tensor]]:
    """Return tensors of each kind, cut from a slab per kind as buckets and rooms do, filled with their own number."""
    numels = [torch.Size(shape).numel() for shape in shapes]
    starts = [sum(aligned_bytes(2 * numel) for numel in numels[:index]) for index in range(len(numels) + 1)]
    columns = []
    for dtype in KINDS:
        ratio = dtype.itemsize // 2
        slab = Slab(ratio * starts[-1], pin=False)
        columns.append([slab.tensor(dtype, shape, ratio * s) for shape, s in zip(shapes, starts, strict=False)])
    rows = [list(row) for row in zip(*columns, strict=True)]
    for index, row in enumerate(rows):
        for tensor in row:
            tensor.fill_(index + 1)
    return rows


def test_a_bucket_is_joined_over_the_memory_of_its_tensors() -> None:
    rows = rows_of()
    ((members, joined),) = coalesce(rows, [4] * len(rows))
    assert members == [0, 1, 2, 3]
    for kind, tensor in enumerate(joined):
        assert tensor.dtype == KINDS[kind]
        assert len(tensor) == 128 + 256 + 128 + 256
        assert set(tensor.unique().tolist()) == {0, 1, 2, 3, 4}
        tensor.add_(1)
        assert all(bool((row[kind] == index + 2).all()) for index, row in enumerate(rows))


def test_the_order_of_the_rows_does_not_matter() -> None:
    rows = rows_of()
    ((members, _),) = coalesce([rows[index] for index in (2, 0, 3, 1)], [1] * 4)
    assert members == [1, 3, 0, 2]


def test_another_step_or_a_gap_separates_tensors() -> None:
    rows = rows_of()
    assert [members for members, _ in coalesce(rows, [4, 4, 5, 5])] == [[0, 1], [2, 3]]
    assert [members for members, _ in coalesce([rows[0], rows[2], rows[3]], [1] * 3)] == [[0], [1, 2]]


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_a_tensor_in_other_memory_is_not_joined(kind: int) -> None:
    rows = rows_of()
    rows[1][kind] = rows[1][kind].clone()
    assert [members for members, _ in coalesce(rows, [1] * 4)] in (
        [[0], [1], [2, 3]],
        [[1], [0], [2, 3]],
        [[0], [2, 3], [1]],
    )


def test_memory_outside_slabs_is_never_joined() -> None:
    """The same offsets in memory that torch allocated, where anything may lie between."""
    rows = rows_of()
    (_, joined), *_ = coalesce(rows, [1] * 4)
    copies = [tensor.clone() for tensor in joined]
    views = [
        [copies[kind][start : start + numel] for kind in range(len(KINDS))]
        for start, numel in ((0, 15), (128, 129), (384, 1), (512, 256))
    ]
    assert len(list(coalesce(views, [1] * 4))) == 4


def test_a_single_row_keeps_its_tensors() -> None:
    transposed = torch.arange(6.0).view(2, 3).t()
    ((_, joined),) = coalesce([[transposed]], [1])
    assert joined[0].data_ptr() == transposed.data_ptr()
    assert flat(transposed).tolist() == [0, 1, 2, 3, 4, 5]
