"""Gradients of chosen tensors, where several ranks share the parameters."""

from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import elixir_compile as elixir
from tests.run.habits.both import Net, batches, gradients
from tests.run.models import seeded
from tests.run.processes import spawn


def asks_for_chosen_tensors(rank: int, world_size: int) -> bool:
    """Ask for gradients in several ways; every rank has the same batch, so the mean is what one alone has."""
    alone, model = seeded(Net), elixir.prepare(seeded(Net), mesh=init_device_mesh("cpu", (world_size,)))
    options = {"inner": "aot_eager", "report": False, "planner": "zero3_offload"}
    compiled = torch.compile(model, backend="elixir", options=options)
    x = batches(1)[0].requires_grad_()

    expected = torch.autograd.grad(alone(x).square().mean(), [x, *alone.parameters()])
    found = torch.autograd.grad(compiled(x).square().mean(), [x, *model.parameters()])
    assert all(isinstance(grad, DTensor) for grad in found[1:])
    wholes = [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in found]
    for theirs, ours in zip(expected, wholes, strict=True):
        assert torch.equal(theirs, ours)
    assert gradients(model) == [None] * len(found[1:])

    compiled(x).square().mean().backward(inputs=[x])
    assert torch.equal(x.grad, expected[0])
    assert gradients(model) == [None] * len(found[1:])

    head = [param for name, param in model.named_parameters() if name.startswith("head")]
    hook = head[0].register_hook(lambda grad: 2 * grad)
    compiled(x).square().mean().backward(inputs=head)
    hook.remove()
    for name, param in model.named_parameters():
        assert (param.grad is not None) == name.startswith("head")
    assert torch.equal(head[0].grad.full_tensor(), 2 * expected[-2])
    assert torch.equal(head[1].grad.full_tensor(), expected[-1])
    return True


def test_gradients_of_chosen_tensors_on_two_ranks(tmp_path: Path) -> None:
    assert spawn(asks_for_chosen_tensors, 2, folder=tmp_path) == [True, True]
