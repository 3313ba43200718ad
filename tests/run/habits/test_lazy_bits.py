"""Tensors with the conjugate or the negative bit, which torch applies when it reads them: wherever their bytes go,
their values stay those of eager code."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import softplus

import elixir_compile as elixir
from elixir_compile import compat
from elixir_compile.graph.rewrite.regions import Layout
from elixir_compile.runtime.saved import InParts, kept_part
from tests.fx.handmade import Choice, keep, offload, planned
from tests.run.habits.habit import habit
from tests.run.processes import spawn
from tests.run.training import assert_same_tensors, compiled, gradients, loop

WIDTH, TOKENS, ROWS = 8, 8, 8
FFT = torch.fft


class Layer(nn.Module):
    """Two linear layers, whose results a subclass mixes."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mixed(self.q(x), self.k(x))

    def mixed(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Autocorrelation(Layer):
    def mixed(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        product = FFT.rfft(q, dim=1) * FFT.rfft(k, dim=1).conj()
        return FFT.irfft(product, n=TOKENS, dim=1)


class Adjoint(Layer):
    """Multiplies by the adjoint, a view with the conjugate bit of a tensor that is saved too."""

    def mixed(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        z = torch.complex(q, k)
        return (z @ z.mH @ z).real / WIDTH


class Einsum(Layer):
    def mixed(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        z = torch.complex(q, k)
        return torch.einsum("btd,bsd->bts", z.conj(), z * 2).abs() @ q


class Phase(Layer):
    def mixed(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        phase = torch.polar(torch.ones_like(q), q)
        return (torch.complex(k, q) * phase.conj() * phase).imag


class Both(Layer):
    """Saves a tensor and the view with its conjugate bit side by side."""

    def mixed(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        z = torch.complex(q.sin(), k.sin())
        late = z.conj()
        return (late.sin() * late * z).real


class Negative(Layer):
    """Saves a real tensor with the negative bit."""

    def mixed(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        imaginary = FFT.fft(q, dim=-1).conj().imag
        return softplus(imaginary) + imaginary * k


class NegativeOfConjugate(Layer):
    """Saves a complex tensor with both bits."""

    def mixed(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        both = torch._neg_view(torch.complex(q.sin(), k.sin()).conj())
        return (both * torch.complex(k, q)).real


LAYERS = [Autocorrelation, Adjoint, Einsum, Phase, Both, Negative, NegativeOfConjugate]


class Net(nn.Module):
    def __init__(self, layer: Callable[[], nn.Module], num_layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(num_layers))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x - y).square().sum() / 64


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, TOKENS, WIDTH, generator=generator), torch.zeros(ROWS, TOKENS, WIDTH)


@habit("Complex activations with lazy bits, such as `z.conj()`, `z.mH`, `z.conj().imag`", area="Modules")
@pytest.mark.parametrize(
    ("choose", "micro_batches"),
    [(offload, 1), (offload, 2), (keep, 2)],
    ids=["offloaded", "offloaded in slices", "in parts"],
)
@pytest.mark.parametrize("layer", LAYERS)
def test_saved_activations_keep_their_bits(
    layer: Callable[[], nn.Module], choose: Choice, micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = Net(layer)
    wanted = loop(model, micro_batches, *batch())
    with planned(monkeypatch, choose, micro_batches=micro_batches):
        step = compiled(model, micro_batches)
        step(*batch()).backward()
    found = gradients(model)
    for name, value in found.items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-4, atol=1e-6, msg=name)
    if micro_batches == 1:
        assert [name for name, value in found.items() if not torch.equal(value, wanted[name])] == []


# Parameters, gradients and state.


class Filter(nn.Module):
    """Multiplies twice: by a complex parameter made by `make`, and by a real one with the negative bit."""

    def __init__(self, make: Callable[[torch.Tensor], torch.Tensor], width: int = WIDTH) -> None:
        super().__init__()
        for number in range(2):
            weight = make(torch.randn(width, width, dtype=torch.cfloat) / width**0.5)
            self.register_parameter(f"w{number}", nn.Parameter(weight))
            self.register_parameter(f"v{number}", nn.Parameter(torch._neg_view(torch.randn(width))))
        self.register_buffer("phase", torch.randn(width, dtype=torch.cfloat).conj())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in range(2):
            product = torch.complex(x, x.sin()) @ getattr(self, f"w{number}") + self.phase
            x = product.abs() * getattr(self, f"v{number}")
        return x.square().mean()


MAKES = {
    "conjugate": torch.conj,
    "adjoint": lambda w: w.mH,
    "negative": torch._neg_view,
    "both": lambda w: torch._neg_view(w.conj()),
}


def trained(model: nn.Module, step: Any, *, turns_at: int = 3, optimizer: Any = torch.optim.SGD) -> list[torch.Tensor]:
    """Return the losses of three steps; before step `turns_at` every complex parameter becomes its conjugate."""
    optimizer = optimizer(model.parameters(), lr=1e-2)
    losses = []
    for number in range(3):
        if number == turns_at:
            for param in model.parameters():
                param.data = param.data.conj()
        loss = step(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def lazily(planner: str | None) -> dict[str, Any]:
    own = {} if planner is None else {"planner": planner}
    return {"inner": "aot_eager", "report": False, "plan_cache": False, **own}


@habit(
    "Parameters with lazy bits, such as `nn.Parameter(w.conj())`; `param.data = param.data.conj()`", area="Parameters"
)
@pytest.mark.parametrize("planner", [None, "zero_offload", "zero3_offload"])
@pytest.mark.parametrize("make", MAKES)
def test_parameters_with_a_bit_train_as_in_eager_code(make: str, planner: str | None) -> None:
    """Before the third step, complex parameters become their conjugates where they are, and keep their addresses."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Filter(MAKES[make])
    twin = copy.deepcopy(model)
    wanted = trained(twin, twin, turns_at=2)
    found = trained(model, torch.compile(model, backend="elixir", options=lazily(planner)), turns_at=2)
    assert found == wanted
    assert all(torch.equal(own, other) for own, other in zip(model.parameters(), twin.parameters(), strict=True))


VIEWS = {
    "conjugate": torch.conj,
    "adjoint": lambda z: z.mH,
    "rows": lambda z: z.conj()[1:, ::2],
    "imaginary": lambda z: z.conj().imag,
    "negative": torch._neg_view,
    "negative real": lambda z: torch._neg_view(torch.view_as_real(z))[2:],
    "both": lambda z: torch._neg_view(z.conj().t()),
}


class Real(nn.Module):
    """A linear layer whose gradients a hook returns with the negative bit."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        for param in self.parameters():
            param.register_hook(lambda grad: torch._neg_view(grad * 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square().mean()


OPTIMIZERS = {
    "AdamW": (elixir.HybridAdamW, torch.optim.AdamW),
    "Adam": (elixir.hybrid(torch.optim.Adam), torch.optim.Adam),
    "SGD": (elixir.hybrid(torch.optim.SGD), torch.optim.SGD),
}


@habit("A hook that returns a gradient with a lazy bit", area="Gradients")
@pytest.mark.parametrize("planner", ["zero_offload", "zero3_offload"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_updates_read_the_values_of_gradients_with_a_bit(optimizer: str, planner: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    hybrid, plain = OPTIMIZERS[optimizer]
    model = Real()
    twin = Real()
    twin.load_state_dict(model.state_dict())
    trained(twin, twin, optimizer=plain)
    trained(model, torch.compile(model, backend="elixir", options=lazily(planner)), optimizer=hybrid)
    for own, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(own, other)


class Tied(nn.Module):
    """A parameter and its conjugate, in one memory, and buffers with the bits."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.first = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.cfloat) / 4)
        self.second = nn.Parameter(self.first.detach().conj())
        self.register_buffer("phase", torch.randn(WIDTH, dtype=torch.cfloat).conj())
        self.register_buffer("sign", torch._neg_view(torch.randn(WIDTH)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = torch.complex(self.layer(x), self.sign * x) @ self.first
        return (z @ self.second * self.phase).abs().mean()


@habit("A parameter and its conjugate in one memory", area="Parameters")
def test_a_parameter_and_its_conjugate_stay_in_one_memory() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Tied()
    torch.manual_seed(0)
    twin = Tied()
    wanted = trained(twin, twin)
    assert trained(model, torch.compile(model, backend="elixir", options=lazily("zero3_offload"))) == wanted
    assert torch.equal(model.first.detach(), model.second.detach().conj())
    assert all(torch.equal(own, other) for own, other in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_of_copied_bytes_has_the_bits_and_the_values(view: str) -> None:
    tensor = VIEWS[view](torch.randn(6, 4, dtype=torch.cfloat))
    there = compat.bytes_of(tensor.untyped_storage()).clone()
    again = compat.MemoryView.of(tensor).over(there.untyped_storage())
    assert torch.equal(again, tensor)
    assert compat.lazy_bits(again) == compat.lazy_bits(tensor) != compat.LazyBits()
    assert compat.lazy_bits(compat.settled(tensor)) == compat.LazyBits()
    assert torch.equal(compat.settled(tensor), tensor)
    # As a result that stays in parts: kept where it is, or copied into the layout of the capture.
    layout = Layout(memory=0, dim=0, view=compat.MemoryView.of(tensor), nbytes=tensor.untyped_storage().nbytes())
    assert kept_part(tensor, layout, None) is tensor
    kept = kept_part(compat.settled(tensor), layout, None)
    assert torch.equal(kept, tensor)
    assert layout.view.is_like(kept)
    rows = max(range(tensor.dim()), key=tensor.stride)
    if tensor.shape[rows] * tensor.stride(rows) * tensor.element_size() == layout.nbytes:  # parts follow each other
        assert torch.equal(InParts([tensor, kept], rows).joined(), torch.cat([tensor, tensor], rows))


@habit("Checkpoints and exports of tensors with lazy bits", area="Checkpoints")
def test_checkpoints_and_exports_hold_the_values(tmp_path: Path) -> None:
    torch.manual_seed(0)
    models = [elixir.prepare(Tied()), elixir.prepare(Filter(torch.conj))]
    for number, model in enumerate(models):
        elixir.save(tmp_path / str(number), model)
        elixir.export(tmp_path / str(number), tmp_path / f"{number}.pt")
        wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        assert_same_tensors(dict(sorted(wanted.items())), dict(sorted(load_file(tmp_path / f"{number}.pt").items())))
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.zero_()
        elixir.load(tmp_path / str(number), model)
        assert_same_tensors(wanted, model.state_dict())
        assert_same_tensors(wanted, elixir.full_state_dict(model))


def trains_on_ranks(rank: int, world_size: int, make: str, planner: str) -> float:
    """Return how far the weights are from those of one process that has the batches of all ranks."""
    mesh = init_device_mesh("cpu", (world_size,))
    torch.manual_seed(0)
    twin = Filter(MAKES[make], 64)
    torch.manual_seed(rank)  # the first rank has the values
    model = elixir.prepare(Filter(MAKES[make], 64), mesh=mesh)
    step = torch.compile(model, backend="elixir", options=lazily(planner))
    optimizers = [torch.optim.SGD(each.parameters(), lr=1e-2) for each in (model, twin)]
    for number in range(3):
        batch = torch.randn(2 * world_size, 64, generator=torch.Generator().manual_seed(number))
        step(batch.chunk(world_size)[rank]).backward()
        twin(batch).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found = elixir.full_state_dict(model)
    wanted = twin.state_dict() if rank == 0 else {}
    return max([0.0, *((found[name] - value).abs().max().item() for name, value in wanted.items())])


@pytest.mark.parametrize(
    ("make", "planner"), [("both", "zero3_offload"), pytest.param("adjoint", "keep_all", marks=pytest.mark.slow)]
)
def test_ranks_share_parameters_with_a_bit(make: str, planner: str, tmp_path: Path) -> None:
    assert spawn(trains_on_ranks, 2, make, planner, folder=tmp_path)[0] < 1e-6
