"""Parameters that the forward itself writes: clipped weights, momentum encoders, codebooks, renormalized embeddings."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import elixir_compile as elixir
from elixir_compile.graph.capture.modules import model_of
from elixir_compile.tools.testing import MemorySchedules
from tests.run.habits.habit import habit
from tests.run.habits.stories import BUDGETS, compiled, eager
from tests.run.models import seeded, vectors
from tests.run.training import Run, assert_same, on_host

WIDTH = 16
NUM_WORDS = 10

budgets = pytest.mark.parametrize("budget", BUDGETS)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([param for param in params if param.requires_grad], lr=0.1)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([param for param in params if param.requires_grad], lr=1e-2, fused=True)


def hybrid(params: Any) -> torch.optim.Optimizer:
    return elixir.HybridAdamW([param for param in params if param.requires_grad], lr=1e-2)


def step(run: Run, batch: Any) -> torch.Tensor:
    loss = run.compiled(batch)
    loss.backward()
    run.optimizer.step()
    run.optimizer.zero_grad()
    return loss


def assert_trains(expected: Run, got: Run, step: Callable[[Run, Any], torch.Tensor] = step) -> None:
    """Fail unless four steps of both runs give the same losses and weights."""
    for run in (expected, got):
        for batch in vectors(4, rows=4, width=WIDTH):
            run.losses.append(step(run, batch).detach().clone())
    assert_same(expected, got)


def assert_whole(run: Run, *written: str) -> None:
    """Fail unless only the parameters `written` stay whole, and the others are where the budget of `run` wants them."""
    assert set(model_of(run.model).unmanaged_because) == set(written)
    assert not set(on_host(run)) & set(written)


def assert_writes_as_eager(
    make: Callable[[], nn.Module], budget: str, *written: str, step: Callable[[Run, Any], torch.Tensor] = step
) -> None:
    """Fail unless the model trains as in eager PyTorch and only `written` stays whole; a plain one with everything on
    the device, a prepared one with all else on the host."""
    model = seeded(make)
    got = compiled(model, BUDGETS[budget], sgd)
    if budget == "offload":
        elixir.prepare(got.model)
    assert_trains(eager(model, sgd), got, step)
    assert_whole(got, *written)
    if budget == "offload":
        assert on_host(got)


class Layers(nn.Module):
    """Two linear layers in a row, and a third beside the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.beside = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)

    def write(self) -> None:
        """Write a parameter, in subclasses."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.write()
        return (self.head(self.first(x)) + self.beside(x)).square().mean()


class Clamped(Layers):
    @torch.no_grad()
    def write(self) -> None:
        self.first.weight.clamp_(-0.1, 0.1)


class DataClamped(Layers):
    def write(self) -> None:
        self.first.weight.data.clamp_(-0.1, 0.1)


class WrittenInManyWays(Layers):
    @torch.no_grad()
    def write(self) -> None:
        self.first.weight.t().chunk(2)[1].mul_(0.5)
        self.first.bias[0] = 0.0
        torch.mul(self.beside.weight, 0.9, out=self.beside.weight)
        torch._foreach_mul_([self.beside.bias], 0.9)  # one of torch's own operators
        functional.relu(self.head.bias, inplace=True)


class Normalized(Layers):
    @torch.no_grad()
    def write(self) -> None:
        weight, other = self.first.weight, self.beside.weight
        weight /= weight.norm(dim=1, keepdim=True)
        other.copy_((other - other.mean(1, keepdim=True)) / (other.std(1, keepdim=True) + 1e-5))


@habit("`weight.clamp_()` under `no_grad` in the forward", area="Parameters")
@budgets
def test_a_weight_clipped_in_the_forward_is_clipped(budget: str) -> None:
    assert_writes_as_eager(Clamped, budget, "first.weight")


@habit("`weight.data.clamp_()` in the forward", area="Parameters")
@budgets
def test_data_clipped_in_the_forward_is_clipped(budget: str) -> None:
    assert_writes_as_eager(DataClamped, budget, "first.weight")


@habit(
    "A view or an item of a weight, `out=weight`, `torch._foreach_*_([weight])` written in the forward",
    area="Parameters",
)
@budgets
def test_every_way_to_write_a_weight_lands(budget: str) -> None:
    names = ("first.weight", "first.bias", "beside.weight", "beside.bias", "head.bias")
    assert_writes_as_eager(WrittenInManyWays, budget, *names)


@habit("Weights normalised to the unit sphere, or standardised, in place in the forward", area="Parameters")
@budgets
def test_weights_normalised_in_place_stay_normalised(budget: str) -> None:
    assert_writes_as_eager(Normalized, budget, "first.weight", "beside.weight")


class Renormalized(nn.Module):
    """Embeddings whose rows are shortened as they are read; that of the words is the output layer too."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(NUM_WORDS, WIDTH, max_norm=0.5)
        self.bags = nn.EmbeddingBag(NUM_WORDS, WIDTH, max_norm=0.5)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, NUM_WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = x.abs().mul(4).long().clamp(max=NUM_WORDS - 1)
        hidden = self.middle(self.words(ids[:, 0]) + self.bags(ids[:, 1:4]))
        return functional.cross_entropy(self.head(hidden), ids[:, 4])


@habit("`nn.Embedding(max_norm=...)` and `nn.EmbeddingBag(max_norm=...)`, tied or not", area="Modules")
@budgets
def test_an_embedding_that_renormalizes_its_rows(budget: str) -> None:
    assert_writes_as_eager(Renormalized, budget, "words.weight", "bags.weight")


class Momentum(nn.Module):
    """A student and a teacher that follows it, each of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        with torch.no_grad():
            for param in self.teacher.parameters():
                param.mul_(0.5)

    @torch.no_grad()
    def follow(self) -> None:
        for own, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            own.mul_(0.9).add_(other * 0.1)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = self.teacher(x)
        return functional.mse_loss(self.student(x), wanted)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.follow()
        return self.loss(x)


class MomentumByName(Momentum):
    def follow(self) -> None:
        own, other = self.teacher[0], self.student[0]
        own.weight.data = own.weight.data * 0.9 + other.weight.data * 0.1
        own.bias.data = own.bias.data * 0.9 + other.bias.data * 0.1
        own, other = self.teacher[2], self.student[2]
        with torch.no_grad():
            own.weight.lerp_(other.weight, 0.1)
            own.bias.copy_(own.bias * 0.9 + other.bias * 0.1)


class MomentumBehind(Momentum):
    """The teacher follows when the loss is known: it is read, then written."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.loss(x)
        self.follow()
        return loss


class OnlyLoss(Momentum):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.loss(x)


TEACHER = ("teacher.0.weight", "teacher.0.bias", "teacher.2.weight", "teacher.2.bias")


@habit(
    "A momentum encoder (MoCo, BYOL) updated in the forward by `mul_().add_()`, `lerp_`, `copy_`, `.data =`",
    area="Training loops",
)
@pytest.mark.parametrize("make", [Momentum, MomentumByName, MomentumBehind])
@budgets
def test_a_teacher_that_the_forward_updates(make: type[nn.Module], budget: str) -> None:
    assert_writes_as_eager(make, budget, *TEACHER)


@habit("A momentum encoder updated in the loop after the step", area="Training loops")
def test_a_teacher_that_the_loop_updates() -> None:
    def step_and_follow(run: Run, batch: Any) -> torch.Tensor:
        loss = step(run, batch)
        run.model.follow()
        return loss

    assert_writes_as_eager(OnlyLoss, "offload", step=step_and_follow)


@habit("A momentum encoder updated by a separate compiled function", area="Training loops")
def test_a_teacher_that_a_compiled_function_updates() -> None:
    def step_and_follow(run: Run, batch: Any) -> torch.Tensor:
        loss = step(run, batch)
        follow = run.model.follow
        if run.compiled is not run.model:
            follow = torch.compile(follow, backend="elixir", options={"inner": "aot_eager", "report": False})
        follow()
        return loss

    assert_writes_as_eager(OnlyLoss, "offload", step=step_and_follow)


@habit("Weight clipping after the step (WGAN)", area="Training loops")
def test_weights_clipped_behind_the_step() -> None:
    def step_and_clip(run: Run, batch: Any) -> torch.Tensor:
        loss = step(run, batch)
        for param in run.model.parameters():
            param.data.clamp_(-0.1, 0.1)
        return loss

    assert_writes_as_eager(Layers, "offload", step=step_and_clip)


class Codebook(nn.Module):
    """Vectors rounded to those of a codebook, a parameter that follows averages in buffers, behind a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
        self.codes = nn.Parameter(torch.randn(6, WIDTH), requires_grad=False)
        self.register_buffer("counts", torch.ones(6))
        self.register_buffer("sums", self.codes.detach().clone())
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.encoder(x)
        nearest = torch.cdist(hidden, self.codes).argmin(1)
        code = self.codes[nearest]
        if self.training:
            with torch.no_grad():
                hits = functional.one_hot(nearest, 6).float()
                self.counts.mul_(0.9).add_(hits.sum(0) * 0.1)
                self.sums.mul_(0.9).add_(hits.t() @ hidden * 0.1)
                self.codes.copy_(self.sums / self.counts.unsqueeze(1))
        loss = self.head(hidden + (code - hidden).detach()).square().mean()
        return loss + functional.mse_loss(hidden, code)


@habit("A codebook with moving averages (VQ-VAE), in a frozen parameter and in buffers; batch norm", area="Modules")
def test_a_codebook_follows_its_averages() -> None:
    assert_writes_as_eager(Codebook, "offload", "codes")


class PowerIteration(Layers):
    """A layer divided by its largest singular value, whose vector is a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.randn(WIDTH), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.first.weight
        with torch.no_grad():
            right = functional.normalize(weight.t() @ self.vector, dim=0)
            self.vector.copy_(functional.normalize(weight @ right, dim=0))
        largest = self.vector.clone() @ (weight @ right)
        return self.head(functional.linear(x, weight / largest)).square().mean()


@habit("Power iteration (spectral norm) on a frozen parameter in the forward", area="Modules")
def test_power_iteration_goes_on() -> None:
    assert_writes_as_eager(PowerIteration, "offload", "vector")


class WritesInTraining(Layers):
    """Writes a weight in one mode."""

    writes_in_training = True

    @torch.no_grad()
    def write(self) -> None:
        if self.training is self.writes_in_training:
            self.first.weight.mul_(0.9)


class WritesInEvaluation(WritesInTraining):
    writes_in_training = False


def step_and_evaluate(run: Run, batch: Any) -> torch.Tensor:
    """Evaluate before a step."""
    run.model.eval()
    with torch.no_grad():
        run.losses.append(run.compiled(batch).clone())
    run.model.train()
    return step(run, batch)


@habit("A weight written only in training, or only in evaluation; either may be captured first", area="Parameters")
@pytest.mark.parametrize("make", [WritesInTraining, WritesInEvaluation])
@pytest.mark.parametrize("evaluates_first", [True, False])
def test_a_weight_that_one_mode_writes(make: type[nn.Module], evaluates_first: bool) -> None:
    model = seeded(make)
    runs = eager(model, adamw), compiled(model, BUDGETS["offload"], hybrid)
    if not evaluates_first:
        for run in runs:
            step(run, vectors(1, rows=4, width=WIDTH)[0])
    assert_trains(*runs, step_and_evaluate)
    assert_whole(runs[1], "first.weight")


class BetweenGraphs(Layers):
    """Eager code between two graphs writes a weight: one that was read before the break, and one by its name."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.first.weight
        hidden = self.beside(x)
        torch._dynamo.graph_break()
        self.break_and_write(weight)
        return self.head(self.first(hidden)).square().mean()

    @torch.compiler.disable
    def break_and_write(self, weight: torch.Tensor) -> None:
        weight.data = weight.data * 0.9
        with torch.no_grad():
            self.first.bias.mul_(0.9)


@habit("A weight written by eager code after a graph break", area="Parameters")
@budgets
def test_a_weight_written_between_graphs(budget: str) -> None:
    model = seeded(BetweenGraphs)
    got = compiled(model, BUDGETS[budget], sgd)
    elixir.prepare(got.model)
    assert_trains(eager(model, sgd), got)


@habit(
    "A weight that requires a gradient, written in place while gradients are on",
    area="Parameters",
    refused=elixir.UnsupportedModel,
    says="while gradients are on, which PyTorch refuses for a leaf that requires one",
)
def test_a_leaf_written_with_gradients_on_is_refused() -> None:
    class Leaf(Layers):
        def write(self) -> None:
            self.first.weight.clamp_(-0.1, 0.1)

    model, batch = seeded(Leaf), vectors(1, width=WIDTH)[0]
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        model(batch)
    own = elixir.prepare(model)
    torch._dynamo.reset()
    run = torch.compile(own, backend="elixir", options={"inner": "aot_eager", "report": False})
    run(batch)


@habit("A weight read, written and read again while gradients are on", area="Parameters", refused=RuntimeError,
       says="has been modified by an inplace operation")  # fmt: skip
def test_a_weight_written_between_two_reads_is_refused_as_by_eager() -> None:
    class Between(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.first(self.beside(x))
            self.write()
            return self.head(self.first(hidden)).square().mean()

        @torch.no_grad()
        def write(self) -> None:
            self.first.weight.mul_(0.5)

    model, batch = seeded(Between), vectors(1, width=WIDTH)[0]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(batch).backward()
    run = compiled(model, {}, sgd)
    step(run, batch)


@habit("A model inside a `checkpoint` region, with a weight written outside of the region", area="Modules")
def test_a_weight_read_in_a_checkpoint_and_written_outside() -> None:
    class Checkpointed(Layers):
        def inside(self, x: torch.Tensor) -> torch.Tensor:
            return (self.head(self.first(x)) + self.beside(x)).square().mean()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.first.weight.clamp_(-0.1, 0.1)
            return checkpoint(self.inside, x, use_reentrant=False)

    assert_writes_as_eager(Checkpointed, "offload", "first.weight")
    assert_writes_as_eager(Checkpointed, "free", "first.weight")


def test_a_plan_made_without_training_leaves_out_what_the_forward_writes(memory_schedule: MemorySchedules) -> None:
    batch = vectors(1, rows=4, width=WIDTH)[0]
    options = {"inner": "aot_eager", "planner": "zero3_offload"}
    found = memory_schedule(seeded(Momentum), batch, hardware="a100-40g", **options)
    assert found.placements.keys() == {f"student.{index}.{kind}" for index in (0, 2) for kind in ("weight", "bias")}
