"""Train a model twice in one run, by torch alone and under a budget or in micro-batches, and compare."""

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, Protocol

import pytest
import torch
from torch import nn

import elixir_compile as elixir
from elixir_compile.graph.capture.modules import executor_of
from elixir_compile.ir import Tier
from elixir_compile.session import graph_planner, machine
from tests.cuda_standin import device as standin
from tests.run.models import Block

# ----------------------------------------------------------------------------------------------------------------------
# Train a model twice in one run, by torch alone and under a budget, and compare.


Step = Callable[[nn.Module, torch.optim.Optimizer, Any], torch.Tensor]


@dataclass(kw_only=True)
class Run:
    """A model, its compiled form and what training it gave."""

    model: nn.Module
    compiled: Callable[..., Any]
    optimizer: torch.optim.Optimizer
    losses: list[torch.Tensor] = field(default_factory=list)

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    def train(self, batches: Iterable[Any], step: Step | None = None) -> "Run":
        for batch in batches:
            self.losses.append((step or plain_step)(self.compiled, self.optimizer, batch).detach().clone())
        return self


def loss_of(compiled: Callable[..., Any], batch: Any) -> torch.Tensor:
    """Return the loss of `batch`, keyword arguments of a Hugging Face model or one tensor."""
    return compiled(**batch).loss if isinstance(batch, Mapping) else compiled(batch)


def plain_step(compiled: Callable[..., Any], optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
    loss = loss_of(compiled, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def by_torch(model: nn.Module, *, backend: str | None = None, optimizer: Any = None) -> Run:
    """Return a run of a copy of `model` with torch's own fused AdamW, compiled by torch's `backend` if one is named.

    Without one nothing is compiled, which saves a capture of half a second to two seconds and claims more: the bits of
    eager training."""
    own = copy.deepcopy(model)
    optimizer = (optimizer or fused_adamw)(own.parameters())
    return Run(model=own, compiled=torch.compile(own, backend=backend) if backend else own, optimizer=optimizer)


def by_elixir(
    model: nn.Module, *, optimizer: Any = None, inner: str = "aot_eager", dynamic: bool | None = None, **options: object
) -> Run:
    """Return a run of a copy of `model` through Elixir, with HybridAdamW, prepared before it is compiled; `dynamic` is
    that of `torch.compile`."""
    own = elixir.prepare(copy.deepcopy(model))
    return _elixir_run(own, optimizer, {"inner": inner, **options}, dynamic=dynamic)


def by_elixir_unprepared(model: nn.Module, **options: object) -> Run:
    """Return a run of a copy of `model` through Elixir that its first call prepares."""
    return _elixir_run(copy.deepcopy(model), None, {"inner": "aot_eager", **options})


def _elixir_run(own: nn.Module, optimizer: Any, options: Mapping[str, object], *, dynamic: bool | None = None) -> Run:
    # Dynamo keeps at most eight compiled forms per function, of all models together.
    torch._dynamo.reset()
    optimizer = (optimizer or hybrid_adamw)(own.parameters())
    options = {"report": False, **options}
    compiled = torch.compile(own, backend="elixir", options=options, dynamic=dynamic)
    return Run(model=own, compiled=compiled, optimizer=optimizer)


def fused_adamw(params: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, **{"lr": 1e-2, "fused": True, **options})


def hybrid_adamw(params: Any, **options: Any) -> torch.optim.Optimizer:
    return elixir.HybridAdamW(params, lr=1e-2, **options)


def planned_peak_bytes(run: Run) -> int:
    """Return the device bytes that a step of `run` needs, as planned."""
    return max(record.plan.prediction.device_peak_bytes for record in elixir.compilations(run.model))


_least_bytes: dict[object, int] = {}
"""What `least_bytes` found for equal models, batches and options: each takes a capture to know."""
_free_bytes: dict[object, int] = {}
"""What `free_bytes` found."""


def least_bytes(model: nn.Module, batch: Any, *, planned_by: object = None, **options: object) -> int:
    """Return the smallest budget under which a step of `model` trains its whole batch, as the error names it.

    Found once in each process for models that differ in their values alone. A test that changes how plans are made
    names the change by `planned_by`; if it does not, nothing is found for its function before."""
    key = planned_by or graph_planner.plan_for, _plan_key(model, batch, options)
    if key not in _least_bytes:
        _least_bytes[key] = _captured_least_bytes(model, batch, options)
    return _least_bytes[key]


def free_bytes(model: nn.Module, batch: Any, **options: object) -> int:
    """Return the device bytes that the first step of `model` needs without a budget, as planned; found once in each
    process, as `least_bytes`."""
    key = graph_planner.plan_for, _plan_key(model, batch, options)
    if key not in _free_bytes:
        _free_bytes[key] = planned_peak_bytes(by_elixir(model, **options).train([batch]))
    return _free_bytes[key]


def _plan_key(model: nn.Module, batch: Any, options: Mapping[str, object]) -> object:
    """Return all that the plan of a step depends on: everything but the values of tensors."""
    params = [param for _, param in model.named_parameters(remove_duplicate=False)]
    first = {id(param): number for number, param in reversed(list(enumerate(params)))}  # tied parameters have one
    kinds = sorted({"cpu", *(param.device.type for param in params)})
    return (
        tuple((type(module), *map(_spec, sorted(vars(module).items()))) for module in model.modules()),
        tuple((first[id(param)], _spec(("", param))) for param in params),
        tuple(map(_spec, batch.items())) if isinstance(batch, Mapping) else _spec(("", batch)),
        tuple(map(_spec, sorted(options.items()))),
        tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds),
        (torch.get_default_dtype(), torch.get_default_device()),
    )


def _spec(item: tuple[str, object]) -> object:
    """Return what tells the value of an attribute or an option from another.

    Functions differ if they are not the same object; of the hooks and the modules that a module holds, the number
    counts; a tensor may be marked, as dynamic for example."""
    name, value = item
    if isinstance(value, torch.Tensor):
        return name, tuple(value.shape), value.dtype, value.device, value.requires_grad, *sorted(vars(value))
    if isinstance(value, dict):
        return name, len(value)
    return name, value if isinstance(value, type | FunctionType) else repr(value)


def _captured_least_bytes(model: nn.Module, batch: Any, options: Mapping[str, object]) -> int:
    # `replan=False` refuses the first graph at once; else the first steps of several graphs show what all of them need.
    asked = {**options, "device_memory": 1, "micro_batches": 1, "replan": False}
    with pytest.raises(elixir.NoFeasiblePlan) as raised:
        loss_of(by_elixir(model, **asked).compiled, batch)
    return raised.value.needed_bytes


def tight_bytes(model: nn.Module, batch: Any, **options: object) -> int:
    """Return a budget close to the least: every run under it offloads."""
    return scaled_bytes(model, least_bytes(model, batch, **options), 1.05)


def scaled_bytes(model: nn.Module, nbytes: int, factor: float) -> int:
    """Return `factor` times `nbytes`, in which workspaces of libraries count once.

    5 % of those on a GPU may be more than a small model can offload, and half of them is too little for any step."""
    device = next((param.device for param in model.parameters()), torch.device("cpu"))
    library_bytes = machine.library_bytes(device)
    return library_bytes + int(factor * (nbytes - library_bytes))


def on_host(run: Run) -> list[str]:
    """Return the parameters that the plans in force keep on the host."""
    executor = executor_of(run.model)
    placed = executor.buckets.in_force(for_training=False)
    return [name for bucket, placement in placed if placement.param is Tier.HOST for name in bucket.params]


def state_on_host(run: Run) -> list[str]:
    """Return the parameters whose optimizer state the plans in force keep on the host."""
    placed = executor_of(run.model).buckets.in_force(for_training=True)
    return [name for bucket, placement in placed if placement.optim is Tier.HOST for name in bucket.params]


def assert_offloads(run: Run) -> None:
    """Fail unless parameters live on the host and were gathered from there."""
    assert on_host(run)
    assert executor_of(run.model).ledger.counts["gather"] > 0


class Trained(Protocol):
    """What training gave."""

    @property
    def losses(self) -> list[torch.Tensor]: ...
    @property
    def weights(self) -> Mapping[str, torch.Tensor]: ...


def assert_same(expected: Trained, got: Trained) -> None:
    """Fail unless losses and weights are bitwise equal; on a GPU, unless they are close."""
    theirs, ours = ([loss.item() for loss in run.losses] for run in (expected, got))
    assert same_losses(theirs, ours), (theirs, ours)
    assert_same_tensors(expected.weights, got.weights)


def same_losses(expected: Iterable[float], got: Iterable[float]) -> bool:
    """Return whether the losses are equal; on a GPU, whether each is close."""
    ours = [*got]
    return [*expected] == (pytest.approx(ours, rel=1e-3, nan_ok=True) if _rounds_otherwise() else ours)


def assert_same_tensors(
    expected: Mapping[str, torch.Tensor], got: Mapping[str, torch.Tensor], *, by_device: bool = False
) -> None:
    """Fail unless both hold bitwise equal tensors under the same names, on whatever device; beside a GPU, close ones,
    unless all updates are `by_device`."""
    assert list(expected) == list(got)
    assert not different(expected, got, by_device=by_device)


def different(
    expected: Mapping[str, torch.Tensor], got: Mapping[str, torch.Tensor], *, by_device: bool = False
) -> list[str]:
    """Return the names whose tensors are not bitwise equal; beside a GPU, none if all tensors together are close and
    not all updates are `by_device`."""
    names = [name for name in expected if not torch.equal(expected[name].cpu(), got[name].cpu())]
    if names and _rounds_otherwise() and not by_device:
        apart = [(got[name].cpu() - expected[name].cpu()).abs().double().norm() for name in names]
        norms = [tensor.cpu().abs().double().norm() for tensor in expected.values()]
        return names if torch.stack(apart).norm() > 0.02 * torch.stack(norms).norm() else []
    return names


def _rounds_otherwise() -> bool:
    """Return whether updates on the host and on the device give other bits, as beside a GPU.

    AdamW divides by the root of the second moment: where a gradient is nothing but rounding, as of a bias in front of a
    normalization, two roundings part by as much as a step. So all tensors are compared together there.
    """
    return standin.is_gpu()


# ----------------------------------------------------------------------------------------------------------------------
# A small model whose loss is a sum over rows, its steps in micro-batches, and the same steps by a user's loop.


WIDTH, TOKENS = 32, 8
OPTIONS = {"inner": "aot_eager", "report": False, "plan_cache": False, "replan": False}


class Rows(nn.Module):
    """Two blocks between two linear layers. Returns half the squared distance to `y`, over a constant."""

    def __init__(self, num_blocks: int = 2) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return (self.head(x) - y).square().sum() / 64


def batch_of(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (rows, TOKENS, WIDTH)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def compiled(model: nn.Module, micro_batches: object, **options: object) -> Any:
    return torch.compile(model, backend="elixir", options={**OPTIONS, "micro_batches": micro_batches, **options})


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}


def loop(model: nn.Module, parts: int, *batch: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the gradients of a user's loop over `parts` micro-batches of `batch`, and leave none behind."""
    for slices in zip(*(tensor.chunk(parts) for tensor in batch), strict=True):
        model(*slices).backward()
    found = gradients(model)
    model.zero_grad()
    return found


def divided_regions(step: Any) -> list[int]:
    """Return the micro-batches of each region of the last compiled graph of `step`."""
    return [region.micro_batches for region in elixir.compilations(step)[-1].plan.regions]
