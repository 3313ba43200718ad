"""Activations of outstanding forwards on a second device: storages that are on the host already stay there."""

import torch

from elixir_compile.ir import Lane
from elixir_compile.runtime.executor import Executor
from tests.device import emulated

DEVICE = torch.device(emulated.NAME, 0)


def test_a_tensor_that_the_forward_made_on_the_host_comes_back_as_it_was() -> None:
    """As attention with dropout does: its meta kernel says that the seed is on the device."""
    executor = Executor(DEVICE, "model")
    seed, values = torch.tensor(17), torch.arange(8.0, device=DEVICE)
    executor.wait(executor.offload_saved("h", [values, seed, values[2:4], torch.tensor(3)]))
    ticket = executor.ticket([])
    there, same_seed, part, offset = executor.wait(executor.prefetch(ticket, "h"))
    assert (there.device, part.device) == (DEVICE, DEVICE)
    assert (same_seed.device.type, offset.device.type) == ("cpu", "cpu")
    assert (int(same_seed), int(offset)) == (17, 3)
    assert same_seed.data_ptr() == seed.data_ptr()
    assert torch.equal(there.cpu(), torch.arange(8.0))
    assert part.untyped_storage().data_ptr() == there.untyped_storage().data_ptr()


def test_offloading_an_outstanding_forward_leaves_its_tensors_on_the_host_alone() -> None:
    executor = Executor(DEVICE, "model")
    seed, values = torch.tensor(17), torch.arange(8.0, device=DEVICE)
    ticket = executor.ticket([])
    executor.saved.note(ticket, "owner", 32, 0, [values, seed])
    recording = executor.ledger.start_recording()
    assert executor.saved.offload_outstanding()
    assert (values.untyped_storage().nbytes(), int(seed)) == (0, 17)
    executor.saved.restore(ticket)
    assert torch.equal(values.cpu(), torch.arange(8.0))
    found = [(span.lane, span.label, span.nbytes) for span in recording.stop()]
    assert found == [(Lane.D2H, "offload outstanding", 32), (Lane.H2D, "prefetch outstanding", 32)]
    assert [block.label for block in recording.taken] == ["prefetch outstanding"]
