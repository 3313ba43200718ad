"""Models with frozen weights in few bits, and what a test asks of ranks that share one; see `processes.spawn`."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import elixir_compile as elixir
from elixir_compile.ir import Bucket, Lane
from elixir_compile.ir.schedule import Record, Span
from elixir_compile.session.model import managed_model
from tests.run.ranks_training import compiled_with, full, mesh_of

WIDTH, RANK, LAYERS, ROWS = 128, 4, 4, 8
LARGE_WIDTH = 256
"""Of a layer whose codes are 64 KiB: a smaller buffer is not planned, and a smaller parameter not sharded."""
CODE_BYTES = WIDTH * WIDTH
aten = torch.ops.aten


@torch.library.custom_op("elixir_tests::of_codes", mutates_args=())
def of_codes(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return codes.float() * scale


@of_codes.register_fake
def _(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return codes.new_empty(codes.shape, dtype=torch.float32)


class Adapted(nn.Module):
    """A frozen matrix in 8 bits with a scale for each row, and a trained adapter of low rank beside it."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        weight = torch.randn(width, width) / width**0.5
        scale = weight.abs().amax(1, keepdim=True) / 127
        self.codes = nn.Parameter((weight / scale).round().to(torch.int8), requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.down = nn.Parameter(torch.randn(RANK, width) / width**0.5)
        self.up = nn.Parameter(torch.randn(width, RANK) / 10)

    def weight(self) -> torch.Tensor:
        return self.codes.to(torch.float32) * self.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + functional.gelu(x @ self.weight().t()) + (x @ self.down.t()) @ self.up.t()


class ByOp(Adapted):
    """The same by an op of the user."""

    def weight(self) -> torch.Tensor:
        return of_codes(self.codes, self.scale)


class InHalves(Adapted):
    """Codes of 4 bits, two in a byte, that are places in a table of 16 values, a buffer: NF4 without its kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randint(0, 256, (CODE_BYTES // 2,), dtype=torch.uint8), requires_grad=False)
        self.scale = nn.Parameter(torch.rand(CODE_BYTES // 64, 1) / 8, requires_grad=False)
        self.register_buffer("table", torch.linspace(-1, 1, 16))

    def weight(self) -> torch.Tensor:
        places = torch.stack([self.codes & 15, self.codes >> 4], -1).view(-1, 64).int()
        return (self.table[places] * self.scale).view(WIDTH, WIDTH)


class NF4(torch.Tensor):
    """A matrix of 4-bit codes that are places in a table, with a scale for each 64: a class of tensors like those of
    torchao, which torch takes apart by `__tensor_flatten__`. Every op but those that keep it frozen reads its values.
    """

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scales: torch.Tensor, table: torch.Tensor, shape: tuple[int, ...]) -> "NF4":
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=scales.dtype, device=codes.device)  # pyright: ignore[reportAttributeAccessIssue]  (stubs)

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor, table: torch.Tensor, shape: tuple[int, ...]) -> None:
        self.codes, self.scales, self.table = codes, scales, table

    def __tensor_flatten__(self) -> tuple[list[str], tuple[int, ...]]:
        return ["codes", "scales", "table"], tuple(self.shape)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], shape: tuple[int, ...], *_: object) -> "NF4":
        return NF4(inner["codes"], inner["scales"], inner["table"], shape)

    def values(self) -> torch.Tensor:
        places = torch.stack([self.codes & 15, self.codes >> 4], -1).view(-1, 64).int()
        return (self.table[places] * self.scales).view(self.shape)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        own, given = args[0], dict(kwargs or {})
        if func is aten.copy_.default and all(isinstance(each, NF4) for each in args[:2]):
            for name in own.__tensor_flatten__()[0]:
                getattr(own, name).copy_(getattr(args[1], name))
            return own
        if func in (aten.detach.default, aten.clone.default, aten.alias.default, aten._to_copy.default):
            given.pop("dtype", None)  # as `.cpu()` gives it: codes stay codes
            return NF4(*(func(part, **given) for part in (own.codes, own.scales, own.table)), tuple(own.shape))
        return func(*(each.values() if isinstance(each, NF4) else each for each in args), **given)


def nf4(width: int = WIDTH) -> NF4:
    codes = torch.randint(0, 256, (width * width // 2,), dtype=torch.uint8)
    return NF4(codes, torch.rand(width * width // 64, 1) / 8, torch.linspace(-1, 1, 16), (width, width))


class InNF4(nn.Module):
    """QLoRA: a linear layer whose weight is an NF4, and a trained adapter of low rank beside it."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.base = nn.Linear(width, width, bias=False)
        self.base.weight = nn.Parameter(nf4(width), requires_grad=False)
        self.down = nn.Parameter(torch.randn(RANK, width) / width**0.5)
        self.up = nn.Parameter(torch.randn(width, RANK) / 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + functional.gelu(self.base(x)) + (x @ self.down.t()) @ self.up.t()


class InBuffers(nn.Module):
    """Codes and scales that are buffers, as GPTQ and AWQ have them; a buffer of at least 64 KiB is planned."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randint(-127, 128, (LARGE_WIDTH, LARGE_WIDTH), dtype=torch.int8))
        self.register_buffer("scale", torch.full((LARGE_WIDTH, 1), 1e-3), persistent=False)
        self.length = nn.Parameter(torch.ones(LARGE_WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + functional.gelu(x @ (self.codes.float() * self.scale).t()) * self.length


class Moving(InBuffers):
    """The forward writes its codes in place, as a codebook with moving averages is written."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.codes.neg_()
        return super().forward(x)


class Normed(Adapted):
    """DoRA: rows of the sum have trained lengths, so the norm of the matrix is trained too."""

    def __init__(self) -> None:
        super().__init__()
        self.length = nn.Parameter(torch.ones(WIDTH, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = self.weight() + self.up @ self.down
        return x + functional.gelu(x @ (self.length * whole / whole.norm(dim=1, keepdim=True)).t())


class Trained(Adapted):
    """Only the codes are frozen: the matrix depends on trained scales, as in quantisation-aware training."""

    def __init__(self) -> None:
        super().__init__()
        self.scale.requires_grad_()


class Checkpointed(Adapted):
    """Layers that the user computes again in the backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # pyright: ignore[reportReturnType]


class CheckpointedNF4(InNF4):
    """Layers of QLoRA that the user computes again in the backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # pyright: ignore[reportReturnType]


class Dropped(Adapted):
    """Random elements of the matrix are left out in each forward."""

    def weight(self) -> torch.Tensor:
        return functional.dropout(super().weight(), 0.25)


def stack(kind: type[nn.Module], *arguments: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(kind(*arguments) for _ in range(LAYERS)))


def squares(compiled: Callable[..., Any], optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
    loss = compiled(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def batches(num: int = 3, width: int = WIDTH) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(ROWS, width, generator=generator) for _ in range(num)]


def frozen_spans(record: Record, buckets: Iterable[Bucket]) -> list[Span]:
    """Return the spans of `record` that name a frozen bucket."""
    frozen = {bucket.id for bucket in buckets if not bucket.trainable}
    return [span for span in record.spans if frozen.intersection(span.label.split())]


def losses_beside_nf4(rank: int, world_size: int) -> tuple[list[float], list[str]]:
    """Train on the same batches on each rank beside NF4s of the first rank's values; return losses, and the reasons
    why no plan moves them."""
    torch.manual_seed(rank)
    model = nn.Sequential(*(InNF4() for _ in range(LAYERS)))
    model = elixir.prepare(model, mesh=mesh_of([world_size]) if world_size > 1 else None)
    compiled = compiled_with(model, plan_cache=False, planner="zero3_offload")
    optimizer = elixir.HybridAdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
    losses = [squares(compiled, optimizer, batch).item() for batch in batches()]
    managed = managed_model(model)
    assert managed is not None
    return losses, sorted(set(managed.unmanaged_because.values()))


def losses_and_codes(rank: int, world_size: int) -> tuple[list[float], list[int], list[str]]:
    """Train on the same batches on each rank; return losses, the bytes of each shard of codes, and what was copied
    back of frozen weights."""
    model = elixir.prepare(stack(Adapted, LARGE_WIDTH), mesh=mesh_of([world_size]) if world_size > 1 else None)
    compiled = compiled_with(model, plan_cache=False, planner="zero3_offload")
    optimizer = elixir.HybridAdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
    losses = [squares(compiled, optimizer, batch).item() for batch in batches(width=LARGE_WIDTH)]
    record = elixir.measure_step(lambda: squares(compiled, optimizer, batches(1, LARGE_WIDTH)[0]))
    plan = elixir.compilations(compiled)[-1].plan
    assert plan is not None
    back = [span.label for span in frozen_spans(record, plan.buckets) if span.lane is Lane.D2H]
    codes = [param for name, param in model.named_parameters() if name.endswith("codes")]
    assert all(
        torch.equal(full(param), own.codes) for param, own in zip(codes, stack(Adapted, LARGE_WIDTH), strict=True)
    )
    return losses, [bucket.shard_nbytes() for bucket in plan.buckets if bucket.dtype == "int8"], back
