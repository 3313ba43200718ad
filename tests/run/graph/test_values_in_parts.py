"""Values that stay in parts between laps, slices of activations, and micro-batches that are refused or not needed."""

import gc
import logging
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import elixir_compile as elixir
from elixir_compile.base.errors import ActivationsGone, IllegalSchedule, InvalidOption
from elixir_compile.compat import MemoryView
from elixir_compile.graph.capture.modules import executor_of
from elixir_compile.graph.rewrite.regions import Layout
from elixir_compile.ir import Lane, Plan, Saving, fingerprint
from elixir_compile.runtime import micro_batches as runtime
from elixir_compile.runtime.bucket import live_slab_bytes
from elixir_compile.runtime.executor import Executor
from elixir_compile.runtime.lanes import lanes_for
from elixir_compile.runtime.recording import ledger_for
from elixir_compile.runtime.saved import InParts, SavedActivations, kept_part, viewed
from elixir_compile.step import verify
from elixir_compile.tools.testing import MemorySchedules
from tests.fx.handmade import Choice, from_host, offload, planned
from tests.run.training import OPTIONS, WIDTH, Rows, batch_of, compiled, divided_regions, gradients, loop

# ----------------------------------------------------------------------------------------------------------------------
# Offloaded activations that leave and come back in slices: the same gradients, fewer bytes on the device.


NUM, ROWS, BLOCKS = 8, 64, 3


def executor(model: Rows) -> Executor:
    found = executor_of(model)
    assert found is not None
    return found


def stepped_in_slices(choose: Choice, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Rows, Any, Plan]:
    """Return a model after one step under a plan by hand, with its compiled form and the plan."""
    with planned(monkeypatch, choose, **options) as plans:
        model = Rows(num_blocks=BLOCKS)
        step = compiled(model, NUM)
        step(*batch_of(64)).backward()
    model.zero_grad()
    return model, step, plans[-1]


@pytest.mark.parametrize(
    ("choose", "waits_late"), [(offload, False), (offload, True), (from_host, False)], ids=["all", "late", "inputs"]
)
def test_gradients_and_counts_are_those_of_wholes_and_the_peak_is_the_planned(
    choose: Choice, waits_late: bool, monkeypatch: pytest.MonkeyPatch
):
    model, step, plan = stepped_in_slices(choose, monkeypatch, waits_late=waits_late)
    batch, ledger = batch_of(64), executor(model).ledger
    times, nbytes = Counter(ledger.times), Counter(ledger.bytes)
    record = elixir.measure_step(lambda: step(*batch).backward())
    times, nbytes = Counter(ledger.times) - times, Counter(ledger.bytes) - nbytes
    away = [group for group in plan.activations if group.saving is Saving.OFFLOAD]
    for lane, verb in ((Lane.D2H, "offload"), (Lane.H2D, "prefetch")):
        assert {f"{verb} {group.id}": 1 for group in away} == {k: n for k, n in times.items() if k.startswith(verb)}
        assert all(nbytes[lane, f"{verb} {group.id}"] == group.nbytes for group in away)
    # The plan counts the state of an optimizer, which this step does not have.
    planned_bytes = plan.prediction.device_peak_bytes - plan.buckets[0].state_nbytes
    assert record.device_peak_bytes == pytest.approx(planned_bytes, rel=1e-3)
    found = gradients(model)
    twin = Rows(num_blocks=BLOCKS)
    twin.load_state_dict(model.state_dict())
    wanted = loop(twin, NUM, *batch)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_second_backward_of_one_forward_reads_the_slices_again(monkeypatch: pytest.MonkeyPatch):
    model, step, _ = stepped_in_slices(offload, monkeypatch)
    loss = step(*batch_of(64))
    loss.backward(retain_graph=True)
    once = gradients(model)
    model.zero_grad()
    loss.backward()
    twice = gradients(model)
    assert all(torch.equal(twice[name], once[name]) for name in once)


@pytest.mark.parametrize("in_backward", [False, True], ids=["forward", "backward"])
def test_an_exception_in_the_second_micro_batch_leaves_no_slice_behind(
    in_backward: bool, monkeypatch: pytest.MonkeyPatch
):
    model, step, _ = stepped_in_slices(offload, monkeypatch)
    batch, own = batch_of(64), runtime.slice_of
    step(*batch).backward()
    wanted, slab_bytes = gradients(model), live_slab_bytes()
    model.zero_grad()

    def failing(value: object, read: runtime.Read, number: int, num: int) -> object:
        if number == 1:
            raise RuntimeError("no more memory")
        return own(value, read, number, num)

    for _ in range(3):
        loss = step(*batch) if in_backward else None
        with monkeypatch.context() as patch:
            patch.setattr(runtime, "slice_of", failing)
            with pytest.raises(RuntimeError, match="no more memory"):
                step(*batch) if loss is None else loss.backward()
        del loss
        model.zero_grad()
    assert executor(model).saved.num_outstanding == 0
    step(*batch).backward()
    found = gradients(model)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert live_slab_bytes() == slab_bytes


# ----------------------------------------------------------------------------------------------------------------------
# Micro-batches that cannot be: refused, or run on the whole batch with a warning that says why.


@pytest.mark.parametrize("value", [0, -2, True, 2.5, "8"])
def test_a_value_that_is_no_number_of_micro_batches_is_refused(value: object):
    with pytest.raises(InvalidOption, match=r'option micro_batches: got .*, expected "fit", "auto" or a number'):
        compiled(Rows(), value)(*batch_of(4))


def test_a_number_that_does_not_divide_the_batch_is_refused_with_its_divisors():
    with pytest.raises(InvalidOption, match="expected a divisor of the batch of 16: 1, 2, 4, 8, 16"):
        compiled(Rows(), 6)(*batch_of(16))


def test_evaluation_gives_the_loss_of_the_whole_batch_and_warns_of_nothing():
    model = Rows()
    step = compiled(model, 2)
    step(*batch_of(8)).backward()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        loss = step(*batch_of(8))
        torch.testing.assert_close(loss, model(*batch_of(8)))


def test_a_plan_that_divides_what_mixes_the_batch_is_illegal():
    model, batch = Rows(), batch_of(8)
    step = compiled(model, 2)
    step(*batch).backward()
    compilation = elixir.compilations(step)[-1]
    plan, graph = compilation.plan, compilation.graph
    verify(graph, plan)
    odd = replace(plan, regions=tuple(replace(region, micro_batches=3) for region in plan.regions))
    with pytest.raises(IllegalSchedule, match=r"fwd\.0 runs in 3 micro-batches, but the batch of 8 rows is not"):
        verify(graph, odd)
    first = plan.regions[0].first
    ops = tuple(replace(op, mixes="a test says so", source="x.py:1") if op.id == first else op for op in graph.ops)
    mixing = replace(graph, ops=ops)
    with pytest.raises(IllegalSchedule, match=r"fwd\.0 runs in 2 micro-batches, but .* mixes them: a test says so"):
        verify(mixing, replace(plan, graph=fingerprint(mixing)))


# ----------------------------------------------------------------------------------------------------------------------
# By default a batch runs whole if any plan for it fits the budget, else in as many micro-batches as are planned.


BATCH = batch_of(64)


def by_default(model: torch.nn.Module, budget_bytes: int, **options: object) -> object:
    torch._dynamo.reset()
    return torch.compile(model, backend="elixir", options={**OPTIONS, "device_memory": budget_bytes, **options})


@pytest.fixture(scope="module")
def whole_bytes() -> int:
    """The smallest budget for the whole batch."""
    with pytest.raises(elixir.NoFeasiblePlan) as caught:
        by_default(Rows(), 1, micro_batches=1)(*BATCH)
    assert "micro-batches" not in str(caught.value)
    return caught.value.needed_bytes


def test_the_smallest_budget_for_the_whole_batch_keeps_its_plan_and_its_bits(whole_bytes: int):
    model, found = Rows(), []
    for options in ({}, {"micro_batches": 1}):
        step = by_default(model, whole_bytes, **options)
        step(*BATCH).backward()
        found.append((elixir.compilations(step)[-1].plan, gradients(model)))
        model.zero_grad()
    (plan, own), (other_plan, other) = found
    assert set(divided_regions(step)) == {1}
    assert (plan.regions, plan.schedules, plan.activations) == (
        other_plan.regions,
        other_plan.schedules,
        other_plan.activations,
    )
    assert all(torch.equal(own[name], other[name]) for name in other)


def test_a_batch_that_does_not_fit_whole_trains_in_micro_batches_and_the_log_says_so_once(
    whole_bytes: int, caplog: pytest.LogCaptureFixture
):
    budget_bytes, model = int(0.8 * whole_bytes), Rows()
    step = by_default(model, budget_bytes, report=False)
    with caplog.at_level(logging.INFO, "elixir_compile"):
        for _ in range(2):
            model.zero_grad()
            step(*BATCH).backward()
    found = gradients(model)
    (number,) = set(divided_regions(step)) - {1}
    (record,) = caplog.records
    line = record.getMessage()
    assert record.levelno == logging.WARNING
    assert "dropout draws other numbers" in line
    assert line.startswith(f"in micro-batches: {number} of {64 // number} rows, as the whole batch at once needs ")
    assert line.endswith("; micro_batches=1 forbids it")
    twin = Rows()
    twin.load_state_dict(model.state_dict())
    wanted = loop(twin, number, *BATCH)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    del twin, wanted, found
    model.zero_grad()
    record = elixir.measure_step(lambda: step(*BATCH).backward())
    plan = elixir.compilations(step)[-1].plan
    assert record.device_peak_bytes <= 1.002 * plan.prediction.device_peak_bytes <= 1.002 * budget_bytes
    with pytest.raises(elixir.NoFeasiblePlan):
        by_default(Rows(), budget_bytes, micro_batches=1)(*BATCH)


def test_the_error_names_the_number_that_needs_the_fewest_bytes_and_so_many_are_enough(whole_bytes: int):
    with pytest.raises(elixir.NoFeasiblePlan) as caught:
        by_default(Rows(), 1)(*BATCH)
    needed_bytes, number = caught.value.needed_bytes, caught.value.micro_batches
    assert needed_bytes < whole_bytes
    assert f" in {number} micro-batches, budget 1 B" in str(caught.value)
    step = by_default(Rows(), needed_bytes)
    step(*BATCH).backward()
    assert max(divided_regions(step)) == number


def test_a_plan_made_without_training_is_divided_alike(whole_bytes: int, memory_schedule: MemorySchedules):
    options = {**OPTIONS, "device_memory": int(0.8 * whole_bytes)}
    found = memory_schedule(Rows(), BATCH, **options)
    assert max(region.micro_batches for region in found.plan.regions) > 1
    found.assert_peak_below(options["device_memory"])
    with pytest.raises(elixir.NoFeasiblePlan):
        memory_schedule(Rows(), BATCH, **{**options, "micro_batches": 1})


def test_activations_of_outstanding_forwards_leave_before_the_batch_is_divided(whole_bytes: int):
    """Two forwards are outstanding at once. Both fit whole, as the activations of the first are offloaded."""
    model = Rows()
    step = by_default(model, int(1.3 * whole_bytes))
    (step(*BATCH) + step(*BATCH)).backward()
    assert set(divided_regions(step)) == {1}


# ----------------------------------------------------------------------------------------------------------------------
# Values that stay in parts between the laps of a step: nothing is copied, and the parts are freed as the plan says.


def saved(model: torch.nn.Module) -> SavedActivations:
    found = executor_of(model)
    assert found is not None
    return found.saved


Stepped = tuple[Rows, Any, dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def stepped() -> Stepped:
    """Return a model after one step, with its compiled form and the gradients of a loop over the same micro-batches.

    It lives until the file ends, where a measured step would count it: tests that measure stand above."""
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
