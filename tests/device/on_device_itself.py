"""The device of these tests behaves as a GPU does: late copies, events, freed memory, threads, autograd, capture."""

import pytest
import torch
from torch import nn

from tests.device import fakegpu

DEVICE = torch.device(fakegpu.NAME, 0)
OTHER = torch.device(fakegpu.NAME, 1)


def test_ops_and_views_give_what_the_cpu_gives() -> None:
    values = torch.randn(6, 4)
    there = values.to(DEVICE)
    assert torch.equal((there @ there.t()).cpu(), values @ values.t())
    there[1:3].add_(1)
    values[1:3].add_(1)
    assert torch.equal(there.cpu(), values)
    assert there.unfold(0, 2, 2).untyped_storage().data_ptr() == there.untyped_storage().data_ptr()
    assert (there.sum().item(), there.device) == (values.sum().item(), DEVICE)
    out = torch.empty(0, device=DEVICE)
    assert torch.equal(torch.add(there, 1, out=out).cpu(), values + 1)
    assert torch.arange(3, device=OTHER).device == OTHER


@pytest.mark.parametrize("kind", [fakegpu.LATE, fakegpu.EARLY])
def test_a_copy_from_pinned_memory_is_late_and_an_event_orders_it(kind: int) -> None:
    source = torch.ones(64).pin_memory()
    target = torch.zeros(64, device=DEVICE)
    stream = torch.Stream(DEVICE)
    with fakegpu.policy(kind):
        with stream:
            target.copy_(source, non_blocking=True)
        assert target.sum().item() == (0 if kind == fakegpu.LATE else 64)
        done = stream.record_event()
        torch.accelerator.current_stream(DEVICE).wait_event(done)
        assert (target.sum().item(), fakegpu.num_pending()) == (64, 0)


def test_a_copy_from_pageable_memory_is_not_late() -> None:
    target = torch.zeros(64, device=DEVICE)
    with fakegpu.policy(fakegpu.LATE):
        target.copy_(torch.ones(64), non_blocking=True)
        assert fakegpu.num_pending() == 0


def test_a_late_copy_reads_and_writes_what_is_there_when_it_runs() -> None:
    source, stream = torch.ones(4096, device=DEVICE), torch.Stream(DEVICE)
    target = torch.zeros(4096).pin_memory()
    with fakegpu.policy(fakegpu.LATE):
        with stream:
            target.copy_(source, non_blocking=True)
        del source  # without `record_stream`: the memory is free for the stream that allocated it
        stream.synchronize()
    assert target.isnan().all()


def test_record_stream_keeps_memory_until_the_stream_is_through() -> None:
    source, stream = torch.ones(4096, device=DEVICE), torch.Stream(DEVICE)
    target = torch.zeros(4096).pin_memory()
    with fakegpu.policy(fakegpu.LATE):
        with stream:
            target.copy_(source, non_blocking=True)
        source.record_stream(stream)
        del source
        stream.synchronize()
    assert target.eq(1).all()


def test_fresh_memory_is_poison_and_memory_runs_out() -> None:
    assert torch.empty(100, device=DEVICE).isnan().all()
    held = torch.accelerator.memory_allocated(DEVICE)
    with fakegpu.capacity(held + 1024), pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        torch.empty(2048, device=DEVICE)
    torch.accelerator.reset_peak_memory_stats(DEVICE)
    values = torch.empty(1 << 20, device=DEVICE)
    del values
    assert torch.accelerator.max_memory_allocated(DEVICE) == held + (4 << 20)
    assert torch.accelerator.memory_allocated(DEVICE) == held


def test_an_event_of_one_device_is_not_recorded_on_another() -> None:
    event = torch.Event(DEVICE)
    event.record(torch.Stream(DEVICE))
    with pytest.raises(RuntimeError, match="event of another device"):
        event.record(torch.Stream(OTHER))


def test_a_storage_is_emptied_and_filled_again() -> None:
    tensor = torch.ones(1000, device=DEVICE)
    tensor.untyped_storage().resize_(0)
    tensor.untyped_storage().resize_(4000)
    assert tensor.isnan().all()


@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_trains_with_dropout_and_attention(compiled: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    head = nn.Linear(16, 3)
    losses = []
    for device in (torch.device("cpu"), DEVICE):
        torch.manual_seed(0)
        model = nn.Sequential(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True), nn.Linear(16, 3))
        model[0].load_state_dict(layer.state_dict())
        model[1].load_state_dict(head.state_dict())
        model = model.to(device)
        run = torch.compile(model, backend="aot_eager") if compiled else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        batch = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1)).to(device)
        torch.manual_seed(3)
        for _ in range(3):
            loss = run(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach().cpu())  # a tensor, because the tolerance of a Python number is that of fp64
    torch.testing.assert_close(losses[0], losses[1])
    torch._dynamo.reset()
