"""Values that stay in parts between the laps of a step: nothing is copied, and the parts are freed as the plan says."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import elixir_compile as elixir
from elixir_compile.base.errors import ActivationsGone
from elixir_compile.compat import MemoryView
from elixir_compile.graph.capture.modules import executor_of
from elixir_compile.graph.rewrite.regions import Layout
from elixir_compile.runtime import lowering as runtime
from elixir_compile.runtime.lanes import lanes_for
from elixir_compile.runtime.recording import ledger_for
from elixir_compile.runtime.saved import InParts, SavedActivations, kept_part, viewed
from tests.run.training import WIDTH, Rows, batch_of, compiled, gradients, loop

NUM, ROWS, BLOCKS = 8, 64, 3


def saved(model: torch.nn.Module) -> SavedActivations:
    found = executor_of(model)
    assert found is not None
    return found.saved


Stepped = tuple[Rows, Any, dict[str, torch.Tensor]]


MEASURES_ITS_FIXTURE = True
"""The tensors of `stepped` count in a measured peak, so none is frozen (see `tests/run/conftest.py`)."""


@pytest.fixture(scope="module")
def stepped() -> Stepped:
    """Return a model after one step, with its compiled form and the gradients of a loop over the same micro-batches."""
    model = Rows(num_blocks=BLOCKS)
    wanted = loop(model, NUM, *batch_of(ROWS))
    step = compiled(model, NUM)
    step(*batch_of(ROWS)).backward()
    found = gradients(model)
    model.zero_grad()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    return model, step, wanted


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref]:
    """Weak references to the memory of all parts that were made."""
    seen: list[weakref.ref] = []

    def watched(part: torch.Tensor, layout: Layout, of_memory: torch.Tensor | None) -> torch.Tensor:
        kept = kept_part(part, layout, of_memory)
        assert kept is part, "copied"
        seen.append(weakref.ref(kept.untyped_storage()))
        return kept

    monkeypatch.setattr(runtime, "kept_part", watched)
    return seen


def alive_bytes(parts: list[weakref.ref]) -> int:
    """Return the bytes of the memory of `parts` that is still allocated."""
    gc.collect()
    alive = [storage for reference in parts if (storage := reference()) is not None]
    return sum({storage._cdata: storage.nbytes() for storage in alive}.values())


def test_no_value_is_copied_and_the_peak_is_the_planned_byte_for_byte(
    stepped: Stepped, parts: list[weakref.ref], monkeypatch: pytest.MonkeyPatch
):
    def fill(*_: object) -> None:
        raise AssertionError("a whole tensor is filled")

    monkeypatch.setattr(runtime._Results, "_fill", fill)
    _, step, wanted = stepped
    batch = batch_of(ROWS)
    record = elixir.measure_step(lambda: step(*batch).backward())
    stepped[0].zero_grad()
    plan = elixir.compilations(step)[-1].plan
    # The plan counts the state of an optimizer, which this step does not have, and no ticket.
    planned_bytes = plan.prediction.device_peak_bytes - sum(bucket.state_nbytes for bucket in plan.buckets)
    foreign_bytes = sum(grad.nbytes for grad in wanted.values())
    assert record.device_peak_bytes - foreign_bytes == pytest.approx(planned_bytes, abs=512)
    assert len(parts) >= 2 * NUM * 4 * BLOCKS


def test_parts_live_from_the_forward_until_the_backward_or_until_the_graph_is_dropped(
    stepped: Stepped, parts: list[weakref.ref]
):
    model, step, _ = stepped
    assert alive_bytes(parts) == 0
    loss = step(*batch_of(ROWS))
    assert 0 < alive_bytes(parts) == saved(model).device_bytes()
    loss.backward()
    model.zero_grad()
    assert alive_bytes(parts) == 0
    loss = step(*batch_of(ROWS))
    del loss
    assert alive_bytes(parts) == 0
    with torch.no_grad():
        step(*batch_of(ROWS))
    assert (alive_bytes(parts), saved(model).num_outstanding) == (0, 0)


def test_a_second_backward_of_one_forward_reads_the_parts_again(stepped: Stepped, parts: list[weakref.ref]):
    model, step, wanted = stepped
    loss = step(*batch_of(ROWS))
    for retain_graph in (True, False):
        assert alive_bytes(parts) == saved(model).device_bytes()
        loss.backward(retain_graph=retain_graph)
        found = gradients(model)
        model.zero_grad()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert alive_bytes(parts) == 0
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("first", [0, 1])
def test_two_outstanding_forwards_leave_the_device_and_come_back(
    first: int, stepped: Stepped, parts: list[weakref.ref]
):
    model, step, wanted = stepped
    losses = [step(*batch_of(ROWS)) for _ in range(2)]
    assert alive_bytes(parts) == saved(model).device_bytes()
    assert saved(model).offload_outstanding()
    assert alive_bytes(parts) == saved(model).device_bytes() == 0
    for at in (first, 1 - first):
        losses[at].backward()
        found = gradients(model)
        model.zero_grad()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert (alive_bytes(parts), saved(model).num_outstanding) == (0, 0)


@pytest.mark.parametrize("in_backward", [False, True], ids=["forward", "backward"])
def test_an_exception_in_the_third_micro_batch_leaves_no_part_behind(
    in_backward: bool, stepped: Stepped, parts: list[weakref.ref], monkeypatch: pytest.MonkeyPatch
):
    model, step, wanted = stepped
    own = runtime.slice_of

    def failing(value: object, read: runtime.Read, number: int, cut: runtime.Cut) -> object:
        if number == 2:
            raise RuntimeError("no more memory")
        return own(value, read, number, cut)

    def fails(run: Callable[[], object]) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(runtime, "slice_of", failing)
            with pytest.raises(RuntimeError, match="no more memory"):
                run()

    if in_backward:
        loss = step(*batch_of(ROWS))
        fails(loss.backward)
        del loss
    else:
        fails(lambda: step(*batch_of(ROWS)))
    assert alive_bytes(parts) == 0
    model.zero_grad()
    step(*batch_of(ROWS)).backward()
    found = gradients(model)
    model.zero_grad()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_hooks_for_saved_tensors_pack_whole_values(stepped: Stepped, parts: list[weakref.ref]):
    model, step, wanted = stepped
    with torch.autograd.graph.save_on_cpu():
        loss = step(*batch_of(ROWS))
    assert alive_bytes(parts) == 0
    loss.backward()
    found = gradients(model)
    model.zero_grad()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_parts_whose_graph_was_freed_are_gone(stepped: Stepped, monkeypatch: pytest.MonkeyPatch):
    _, step, _ = stepped
    own = SavedActivations.keep_parts

    def packed(self: SavedActivations, values: Any) -> Any:
        return [tensor.clone() for tensor in own(self, values)]

    monkeypatch.setattr(SavedActivations, "keep_parts", packed)
    with pytest.raises(ActivationsGone, match="freed"):
        step(*batch_of(ROWS)).backward()


def test_a_part_of_another_dtype_than_captured_keeps_its_bits():
    """As torch 2.11 captures the logarithms of sums of attention in fp64: as fp32."""
    part = torch.linspace(0, 1, 6, dtype=torch.float64).view(2, 3)
    view = MemoryView(dtype=torch.float32, shape=(2, 3), stride=(3, 1), offset=0)
    layout = Layout(memory=0, dim=0, view=view, nbytes=24)
    assert torch.equal(kept_part(part, layout, None), part)


class Attention(torch.nn.Module):
    """Residual attention layers whose saved queries, keys and values are transposed views of one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            heads = layer(x).view(*x.shape[:2], 12, WIDTH // 4).transpose(1, 2)
            x = x + scaled_dot_product_attention(*heads.chunk(3, 1)).transpose(1, 2).reshape(x.shape)
        return (x - y).square().sum()


Hooks = Callable[[], Any]


@pytest.mark.parametrize(
    "hooks",
    [
        torch.autograd.graph.save_on_cpu,
        lambda: torch.autograd.graph.saved_tensors_hooks(torch.Tensor.contiguous, lambda packed: packed),
        lambda: torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda packed: packed),
    ],
    ids=["save_on_cpu", "contiguous", "clone"],
)
def test_values_that_hooks_packed_come_back_in_the_layout_of_the_capture(hooks: Hooks, monkeypatch: pytest.MonkeyPatch):
    own, seen = SavedActivations.kept_parts, []

    def watched(self: SavedActivations, ticket: torch.Tensor, saved: Any, *layouts: Any) -> Any:
        seen.append((saved, own(self, ticket, saved, *layouts)))
        return seen[-1][1]

    monkeypatch.setattr(SavedActivations, "kept_parts", watched)
    torch.manual_seed(0)
    model = Attention()
    step, batch = compiled(model, 4), batch_of(ROWS)
    step(*batch).backward()
    wanted = gradients(model)
    model.zero_grad()
    with hooks():
        loss = step(*batch)
    loss.backward()
    assert all(torch.equal(found, wanted[name]) for name, found in gradients(model).items())
    (_, in_parts), (packed, whole) = seen
    assert any(not part.is_contiguous() for value in in_parts for part in value.tensors)
    for value, tensor in zip(in_parts, whole, strict=True):
        first = value.tensors[0]
        assert (tensor.stride(), tensor.storage_offset()) == (first.stride(), first.storage_offset())
        assert tensor.untyped_storage().nbytes() == 4 * first.untyped_storage().nbytes()
    assert len({value.tensors[0].untyped_storage().data_ptr() for value in in_parts}) == len(
        {tensor.untyped_storage().data_ptr() for tensor in whole}
    )
    if hooks is torch.autograd.graph.save_on_cpu:
        assert all(tensor is given for tensor, given in zip(whole, packed, strict=True)), "copied"


def layout(tensor: torch.Tensor, memory: int = 0) -> Layout:
    return Layout(
        memory=memory,
        dim=0,
        view=MemoryView.of(tensor),
        nbytes=tensor.untyped_storage().nbytes(),
    )


def test_a_result_is_kept_as_it_is_if_its_memory_is_that_of_the_capture():
    whole, wide = torch.randn(4, 6), torch.randn(4, 6).t()
    assert kept_part(whole, layout(whole), None) is whole
    left, right = whole[:, :2], whole[:, 2:]
    assert kept_part(left, layout(left), None) is left
    assert kept_part(right, layout(right), left) is right
    for part, like in ((torch.randn(8, 6)[:4], whole), (wide.contiguous(), wide), (right.contiguous(), right)):
        kept = kept_part(part, layout(like), None)
        assert torch.equal(kept, part)
        assert (kept.stride(), kept.untyped_storage().nbytes()) == (like.stride(), like.untyped_storage().nbytes())


def test_views_of_one_memory_share_it_even_if_the_kernel_made_them_apart():
    whole = torch.randn(4, 6)
    left, right = whole[:, :2], whole[:, 2:]
    kept_left = kept_part(left.clone(), layout(left), None)
    kept_right = kept_part(right.clone(), layout(right), kept_left)
    assert kept_left.untyped_storage().data_ptr() == kept_right.untyped_storage().data_ptr()
    assert torch.equal(kept_left, left)
    assert torch.equal(kept_right, right)
    expanded = torch.randn(4, 1).expand(4, 3)
    kept = kept_part(expanded.contiguous(), layout(expanded), None)
    assert torch.equal(kept, expanded)
    assert kept.stride() == expanded.stride()


def test_a_value_in_parts_is_viewed_and_joined():
    whole = torch.randn(4, 6)
    value = InParts(list(whole.clone().chunk(2)), 0)
    value = InParts([part.clone() for part in value.tensors], 0)
    assert torch.equal(value.joined(), whole)
    right = value.viewed(layout(torch.empty(2, 6)[:, 2:]))
    assert torch.equal(right.joined(), whole[:, 2:])
    assert right.tensors[1].data_ptr() != value.tensors[1].data_ptr()
    assert right.tensors[1].untyped_storage().data_ptr() == value.tensors[1].untyped_storage().data_ptr()


def test_a_joined_value_has_the_strides_and_the_memory_of_its_parts():
    parts = [torch.randn(1, 5, 12, 2).transpose(1, 2) for _ in range(3)]
    left, right = (InParts([part.chunk(2, 1)[place] for part in parts], 0) for place in range(2))
    memories: dict[int, torch.Tensor] = {}
    joined = [value.joined(memories) for value in (left, right)]
    assert len(memories) == 1
    for value, whole in zip((left, right), joined, strict=True):
        assert torch.equal(whole, torch.cat(value.tensors))
        assert whole.stride() == value.tensors[0].stride()
        assert whole.storage_offset() == value.tensors[0].storage_offset()
    expanded = InParts([torch.randn(2, 1).expand(2, 3) for _ in range(2)], 0)
    assert torch.equal(expanded.joined(), torch.cat(expanded.tensors))
    assert expanded.joined().stride() == (1, 0)


def test_a_view_of_a_value_is_the_same_whether_hooks_joined_it_or_not():
    parts = [torch.randn(2, 6) for _ in range(3)]
    value = InParts(parts, 0)
    own = layout(parts[0][:, 2:])
    in_parts, whole = viewed(value, own, 3), viewed(value.joined(), own, 3)
    assert isinstance(in_parts, InParts)
    assert isinstance(whole, torch.Tensor)
    assert torch.equal(whole, in_parts.joined())
    assert whole.stride() == (6, 1)


@pytest.mark.parametrize("shape", [(4, 0), (4, 6)])
def test_packed_values_are_told_from_freed_parts_by_their_shape(shape: tuple[int, ...]):
    device = torch.device("cpu")
    lanes = lanes_for(device)
    saved = SavedActivations(lanes, ledger_for(lanes))
    whole, given = torch.randn(shape), InParts(list(torch.randn(shape).chunk(2)), 0)
    saved.begin()
    stands_in = saved.keep_parts([given])
    ticket = saved.ticket([])
    assert saved.kept_parts(ticket, stands_in, [layout(whole)]) == (given,)
    saved.begin()
    ticket = saved.ticket([])
    assert saved.kept_parts(ticket, [whole], [layout(whole)]) == [whole]
    with pytest.raises(ActivationsGone):
        saved.kept_parts(ticket, [torch.empty(0)], [layout(whole)])
