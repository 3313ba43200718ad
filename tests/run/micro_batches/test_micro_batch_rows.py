"""Ops whose arguments hold the number of rows, and random integers, are divided: each micro-batch has its own rows."""

import torch
from torch import nn

from tests.run.micro_batches.stepping import compiled, divided_regions, gradients, loop


class Grouped(nn.Module):
    """Convolutions around a norm over groups of channels, whose statistics are those of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Conv1d(2, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.after = nn.Conv1d(4, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.norm(self.before(x)).relu()).square().sum()


def test_a_norm_over_groups_is_divided_and_has_the_gradients_of_a_loop():
    model, x = Grouped(), torch.randn(8, 2, 6)
    wanted = loop(model, 4, x)
    step = compiled(model, 4)
    step(x).backward()
    found = gradients(model)
    assert set(divided_regions(step)) == {4}
    assert {name for name in wanted if not torch.equal(found[name], wanted[name])} == set()


def test_a_norm_over_groups_is_divided_if_the_number_of_rows_is_dynamic():
    model = Grouped().double()
    step = compiled(model, 3)
    for rows in (6, 8):
        x = torch.randn(rows, 2, 5, dtype=torch.float64)
        model(x).backward()
        wanted = gradients(model)
        model.zero_grad()
        step(x).backward()
        for name, grad in gradients(model).items():
            torch.testing.assert_close(grad, wanted[name], rtol=1e-12, atol=1e-12)
        model.zero_grad()
    assert set(divided_regions(step)) == {3}


class Masked(nn.Module):
    """Weights with random integers, which can be read off the result: the weight is the identity."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16, bias=False)])
        nn.init.eye_(self.layers[0].weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x * torch.randint(0, 100, x.shape, device=x.device))


def test_micro_batches_draw_random_integers_of_their_own_and_the_backward_uses_the_same():
    model, x = Masked(), torch.ones(8, 16)
    step = compiled(model, 4, inner="inductor")
    y = step(x)
    y.sum().backward()
    assert set(divided_regions(step)) == {4}
    drawn = y.detach().unflatten(0, (4, 2))
    assert drawn.unique().numel() > 16
    assert drawn.min() >= 0
    assert drawn.max() < 100
    assert all(not torch.equal(drawn[i], drawn[j]) for i in range(4) for j in range(i))
    torch.testing.assert_close(model.layers[0].weight.grad, y.detach().sum(0).expand(16, 16))
