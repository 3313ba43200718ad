"""The memory of gradients: it is free once a gradient has other memory."""

from elixir_compile.runtime.measure import Resident
from tests.run.micro_batches.stepping import Rows, batch_of, compiled


def resident_bytes() -> int:
    with Resident() as resident:
        return resident.nbytes


def test_a_gradient_that_gets_other_memory_leaves_none_behind():
    """So do gradients that stay, as zeros or as sums, if their bucket moves to the host."""
    model, batch = Rows(), batch_of(4)
    compiled(model, 1)(*batch).backward()
    params = list(model.parameters())
    grads_bytes = sum(param.grad.nbytes for param in params)
    before_bytes = resident_bytes()
    for param in params:
        param.grad.data = param.data  # memory that is there in any case
    assert before_bytes - resident_bytes() == grads_bytes
