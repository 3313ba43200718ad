"""Steps with dynamic sizes in micro-batches: the short last batch of an epoch, and sequences of varying length."""

import warnings
from collections.abc import Sequence

import pytest
import torch
from torch import nn

import elixir_compile as elixir
from elixir_compile.base.errors import ElixirWarning, NoFeasiblePlan
from elixir_compile.ir import graph_at, sizes
from elixir_compile.step import plan_at, verify
from tests.run.micro_batches.stepping import TOKENS, WIDTH, Rows, batch_of, compiled, divided_regions, gradients
from tests.run.micro_batches.test_micro_batch_numbers import language_model, loop_over_tokens


def loop_in_parts(model: nn.Module, rows: Sequence[int], *batch: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the gradients of a user's loop over micro-batches of `rows`, and leave none behind."""
    for slices in zip(*(tensor.split(list(rows)) for tensor in batch), strict=True):
        model(*slices).backward()
    found = gradients(model)
    model.zero_grad()
    return found


def farthest(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of an element, relative to the largest element of its gradient."""
    assert found.keys() == wanted.keys()
    return max(float((found[name] - wanted[name]).abs().max() / wanted[name].abs().max()) for name in wanted)


def test_short_and_odd_batches_have_the_gradients_of_a_loop_over_the_same_micro_batches():
    model = Rows()
    step = compiled(model, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ElixirWarning)
        for rows, parts in ((16, [4] * 4), (6, [2, 2, 2]), (7, [3, 2, 2]), (3, [3]), (18, [5, 5, 4, 4])):
            batch = batch_of(rows)
            wanted = loop_in_parts(model, parts, *batch)
            step(*batch).backward()
            found = gradients(model)
            model.zero_grad()
            assert set(divided_regions(step)) == {4}
            assert all(torch.equal(found[name], wanted[name]) for name in wanted), rows
    assert len(elixir.compilations(step)) == 2
    assert elixir.compilations(step)[-1].graph.batch_size


def test_a_divided_step_of_any_number_of_rows_holds_at_most_the_planned_bytes():
    model = Rows()
    step = compiled(model, 4)
    step(*batch_of(4)).backward()
    for rows in (64, 63, 7, 5):
        batch = batch_of(rows)
        for _ in range(2):
            model.zero_grad()
            step(*batch).backward()
        model.zero_grad()
        record = elixir.measure_step(lambda batch=batch: step(*batch).backward())
        compilation = elixir.compilations(step)[-1]
        plan, graph = compilation.plan, compilation.graph
        assert graph.batch == 64  # the largest so far
        here = plan_at(graph_at(graph, {graph.batch_size: rows}), plan)
        verify(graph_at(graph, {graph.batch_size: rows}), here)
        predicted_bytes = sizes.evaluate(plan.formula, {graph.batch_size: rows})
        assert predicted_bytes == here.prediction.device_peak_bytes
        assert record.device_peak_bytes <= 1.002 * predicted_bytes
    torch._dynamo.reset()
    constant = compiled(Rows(), 4)
    constant(*batch_of(64)).backward()
    wanted = elixir.compilations(constant)[-1].plan.prediction
    assert plan.prediction.device_peak_at == wanted.device_peak_at == "bwd.gelu_backward"
    # Before the gradient of the block's input is made, its parts are those of all micro-batches but the last. A dynamic
    # number of rows has it as a whole tensor.
    part_bytes = 64 // 4 * TOKENS * WIDTH * 4
    assert plan.prediction.device_peak_bytes == wanted.device_peak_bytes + part_bytes


class Mean(Rows):
    """Divides by the number of all elements, and scales by a number of the rows that is no size."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x) / x.shape[0] ** 0.5
        for block in self.blocks:
            hidden = block(hidden)
        return (self.head(hidden) - y * x.numel()).square().mean()


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_number_of_the_whole_batch_counts_all_rows_in_each_micro_batch(inner: str):
    model = Mean(num_blocks=1).double()
    step = compiled(model, 4, inner=inner)
    for rows in (8, 6, 7):
        batch = tuple(tensor.double() for tensor in batch_of(rows))
        whole = model(*batch)
        whole.backward()
        wanted = gradients(model)
        model.zero_grad()
        loss = step(*batch)
        loss.backward()
        torch.testing.assert_close(loss, whole, rtol=1e-12, atol=0.0)
        assert farthest(gradients(model), wanted) < 1e-12
        model.zero_grad()
    assert 4 in divided_regions(step)
    assert elixir.compilations(step)[-1].graph.batch_size


@pytest.mark.parametrize(
    ("kind", "tied"), [pytest.param("llama", None, marks=pytest.mark.slow), ("gpt2", "transformer.wte.weight")]
)
def test_an_epoch_with_a_short_last_batch_has_the_exact_mean_over_tokens(kind: str, tied: str | None):
    model = language_model(kind)
    step = compiled(model, 4)
    for rows in (8, 8, 6):
        ids = torch.randint(0, 256, (rows, 32))
        labels = ids.clone()
        labels[0, :9], labels[5, :12] = -100, -100
        wanted = loop_over_tokens(model, 4, ids, labels)
        whole = model(input_ids=ids, labels=labels).loss
        loss = step(input_ids=ids, labels=labels).loss
        loss.backward()
        found = gradients(model)
        model.zero_grad()
        assert sorted(divided_regions(step)) == [1] + [4] * (len(divided_regions(step)) - 1)
        assert torch.equal(loss, whole)
        assert {name for name in wanted if not torch.equal(found[name], wanted[name])} <= {tied}
        if tied is not None:
            torch.testing.assert_close(found[tied], wanted[tied], rtol=1e-5, atol=1e-7)


def test_sequences_of_varying_length_are_divided_by_a_batch_of_constant_size():
    model = language_model("llama")
    step = compiled(model, 4)
    for length in (32, 20, 17):
        ids = torch.randint(0, 256, (8, length))
        torch._dynamo.mark_dynamic(ids, 1)  # one capture; the test above lets Dynamo find out
        wanted = loop_over_tokens(model, 4, ids, ids)
        step(input_ids=ids, labels=ids).loss.backward()
        found = gradients(model)
        model.zero_grad()
        assert sorted(divided_regions(step)) == [1] + [4] * (len(divided_regions(step)) - 1)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    graph = elixir.compilations(step)[-1].graph
    assert (graph.batch, graph.batch_size, len(graph.symbols)) == (8, "", 1)


class Scaled(nn.Module):
    """A layer that scales the sine of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin() * self.weight


class Turned(nn.Module):
    """The rows of the batch are dimension 1 behind the first layer, so strides depend on their number."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), Scaled(), Scaled()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x).transpose(0, 1).contiguous()
        return self.layers[2](self.layers[1](x)).square().sum()


def test_rows_along_a_later_dimension_are_divided():
    model = Turned().double()
    step = compiled(model, 3)
    for rows in (6, 8):
        x = batch_of(rows)[0].double()
        model(x).backward()
        wanted = gradients(model)
        model.zero_grad()
        step(x).backward()
        assert farthest(gradients(model), wanted) < 1e-12
        model.zero_grad()
    assert set(divided_regions(step)) == {3}


class Chosen(Rows):
    """Adds a term only to batches of more than four rows."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = super().forward(x, y)
        return loss + self.head(x).sum() if x.shape[0] > 4 else loss


def test_a_model_with_a_condition_on_the_number_of_rows_runs_whole_with_a_warning():
    model = Chosen()
    step = compiled(model, 4)
    step(*batch_of(8)).backward()
    model.zero_grad()
    batch = batch_of(6)
    with pytest.warns(
        ElixirWarning, match="whole batch instead of in 4 micro-batches: the model reads conditions from"
    ):
        step(*batch).backward()
    assert set(divided_regions(step)) == {1}
    found = gradients(model)
    model.zero_grad()
    model(*batch).backward()
    assert farthest(found, gradients(model)) < 1e-6


class Normed(nn.Module):
    """Linear layers around a norm over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.norm, self.after = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(TOKENS), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.norm(self.before(x)).relu()).square().sum()


def test_a_norm_over_a_batch_of_dynamic_size_has_the_statistics_of_the_whole_batch():
    model, reference = Normed().double(), Normed().double()
    reference.load_state_dict(model.state_dict())
    step = compiled(model, 4)
    for rows in (8, 6):
        x = batch_of(rows)[0].double()
        step(x).backward()
        reference(x).backward()
    assert {1, 4} == set(divided_regions(step))
    torch.testing.assert_close(model.norm.running_var, reference.norm.running_var)
    assert farthest(gradients(model), gradients(reference)) < 1e-12


def test_auto_divides_a_batch_of_dynamic_size_that_does_not_fit_whole():
    with pytest.raises(NoFeasiblePlan) as caught:
        compiled(Rows(), 1, device_memory=1)(*batch_of(64))
    budget_bytes = int(0.8 * caught.value.needed_bytes)
    del caught
    torch._dynamo.reset()
    model = Rows()
    step = compiled(model, "auto", device_memory=budget_bytes)
    for rows in (64, 6, 64):
        step(*batch_of(rows)).backward()
        model.zero_grad()
    batch = batch_of(64)
    record = elixir.measure_step(lambda: step(*batch).backward())
    plan = elixir.compilations(step)[-1].plan
    (decision,) = (decision for decision in plan.decisions if decision.subject == "micro_batches")
    assert decision.choice == f"at most {max(divided_regions(step))} for 64 rows"
    assert record.device_peak_bytes <= 1.002 * plan.prediction.device_peak_bytes <= 1.002 * plan.budget_bytes
