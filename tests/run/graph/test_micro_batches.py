"""Steps in micro-batches: the numbers of a user's loop, dynamic sizes, ops that hold the number of rows, and
transfers."""

import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional

import elixir_compile as elixir
from elixir_compile.base.errors import ElixirWarning, NoFeasiblePlan
from elixir_compile.ir import Phase, graph_at, sizes
from elixir_compile.runtime import lowering as runtime
from elixir_compile.step import plan_at, verify
from elixir_compile.step.as_run import as_run
from tests.run.training import TOKENS, WIDTH, Rows, batch_of, compiled, divided_regions, gradients, loop

# ----------------------------------------------------------------------------------------------------------------------
# The numbers of a step in micro-batches are those of a user's loop over the same micro-batches.


SIZES = {"vocab_size": 256, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


def language_model(kind: str) -> nn.Module:
    if kind == "gpt2":
        config = transformers.GPT2Config(
            n_layer=1, n_embd=64, n_head=4, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **SIZES
        )
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(
            num_hidden_layers=1,
            hidden_size=64,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=128,
            max_position_embeddings=32,
            **SIZES,
        )
        model = transformers.LlamaForCausalLM(config)
    model.config.use_cache = False
    return model


def loop_over_tokens(model: nn.Module, parts: int, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the gradients of a loop whose loss is the sum over the tokens of a micro-batch, over all tokens."""
    num_targets = (labels[:, 1:] != -100).sum()
    for part, own in zip(ids.chunk(parts), labels.chunk(parts), strict=True):
        logits = model(input_ids=part).logits.float().view(-1, SIZES["vocab_size"])
        targets = functional.pad(own, (0, 1), value=-100)[..., 1:].reshape(-1)
        loss = functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum") / num_targets
        loss.backward()
    found = gradients(model)
    model.zero_grad()
    return found


@pytest.mark.parametrize("parts", [1, 3, 4, 12])
def test_a_batch_of_12_runs_in_each_number_that_divides_it(parts: int):
    model, batch = Rows(), batch_of(12)
    wanted = loop(model, parts, *batch)
    step = compiled(model, parts)
    step(*batch).backward()
    assert set(divided_regions(step)) == {parts}
    found = gradients(model)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_layers_made_again_or_moved_to_the_host_have_the_same_gradients_and_as_many_transfers():
    model, batch = Rows(num_blocks=4), batch_of(64)
    counts = {}
    for parts in (1, 8):
        torch._dynamo.reset()
        step = compiled(model, parts, device_memory="1.25MiB")
        step(*batch).backward()
        model.zero_grad()
        record = elixir.measure_step(lambda step=step: step(*batch).backward())
        plan = elixir.compilations(step)[-1].plan
        assert set(divided_regions(step)) == {parts}
        assert any(group.saving != "keep" for group in plan.activations)
        assert record.device_peak_bytes <= 1.002 * plan.prediction.device_peak_bytes
        counts[parts] = {verb: record.counts.get(verb, 0) for verb in ("gather", "release", "reduce", "offload")}
    model.zero_grad()
    step(*batch).backward()
    found = gradients(model)
    twin = Rows(num_blocks=4)  # not before: its weights would count in the measured peak
    twin.load_state_dict(model.state_dict())
    wanted = loop(twin, 8, *batch)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert counts[1]["reduce"] == counts[8]["reduce"]


class Counted(Rows):
    """`Rows` with a loss as of a language model: a sum over the tokens with a target, over their number."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        has_target = y[..., :1] > 0
        return torch.where(has_target, (self.head(x) - y).square(), 0.0).sum() / has_target.sum()


def test_a_number_of_targets_is_kept_where_the_loss_is_recomputed():
    """Recomputed in the lap of the loss, it would be the number of one micro-batch."""
    batch = batch_of(16)
    with pytest.raises(NoFeasiblePlan) as caught:
        compiled(Counted(), 4, device_memory=1)(*batch)
    budget_bytes = caught.value.needed_bytes
    del caught
    torch._dynamo.reset()
    model, twin = Counted(), Counted()
    twin.load_state_dict(model.state_dict())
    step = compiled(model, 4, device_memory=budget_bytes)
    step(*batch).backward()
    assert 4 in divided_regions(step)
    assert any(group.saving == "recompute" for group in elixir.compilations(step)[-1].plan.activations)
    twin(*batch).backward()
    found, wanted = gradients(model), gradients(twin)
    for name, grad in wanted.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-6)


class Normed(nn.Module):
    """Convolutions around a norm over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.after = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.norm(self.before(x)).relu()).square().sum()


def test_batch_norm_has_the_statistics_of_the_whole_batch():
    model, x = Normed(), torch.randn(8, 2, 6, 6)
    reference = Normed()
    reference.load_state_dict(model.state_dict())
    reference(x).backward()
    step = compiled(model, 4)
    step(x).backward()
    assert {1, 4} == set(divided_regions(step))
    torch.testing.assert_close(model.norm.running_mean, reference.norm.running_mean)
    torch.testing.assert_close(model.norm.running_var, reference.norm.running_var)
    for own, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-4, atol=1e-4)


class Dropped(nn.Module):
    """A dropout whose mask can be read off the result: the weight is the identity."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16, bias=False)])
        nn.init.eye_(self.layers[0].weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](functional.dropout(x, 0.5))


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_micro_batches_draw_masks_of_their_own_and_the_backward_uses_the_same(inner: str):
    model, x = Dropped(), torch.ones(8, 16)
    step = compiled(model, 4, inner=inner)
    y = step(x)
    y.sum().backward()
    assert 4 in divided_regions(step)
    masks = y.detach().unflatten(0, (4, 2))
    assert all(not torch.equal(masks[i], masks[j]) for i in range(4) for j in range(i))
    torch.testing.assert_close(model.layers[0].weight.grad, y.detach().sum(0).expand(16, 16))


def test_sums_of_16_bits_are_closer_to_the_truth_than_those_of_a_loop():
    model, batch = Rows().bfloat16(), tuple(tensor.bfloat16() for tensor in batch_of(32))
    exact = Rows().double()
    exact.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
    exact(*(tensor.double() for tensor in batch)).backward()
    of_loop = loop(model, 16, *batch)
    compiled(model, 16)(*batch).backward()
    found = gradients(model)

    def error(of: dict[str, torch.Tensor]) -> float:
        apart = [(of[name] - param.grad).norm() / param.grad.norm() for name, param in exact.named_parameters()]
        return float(sum(apart))

    assert found["head.weight"].dtype is torch.bfloat16
    assert error(found) < 0.9 * error(of_loop)


def test_an_exception_in_the_second_micro_batch_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch):
    model, batch = Rows(), batch_of(8)
    wanted = loop(model, 4, *batch)
    step = compiled(model, 4)
    step(*batch).backward()
    model.zero_grad()
    own = runtime.slice_of

    def failing(value: object, read: runtime.Read, number: int, num: int) -> object:
        if number == 1:
            raise RuntimeError("no more memory")
        return own(value, read, number, num)

    for in_backward in (False, True):
        run = step(*batch).backward if in_backward else partial(step, *batch)
        monkeypatch.setattr(runtime, "slice_of", failing)
        with pytest.raises(RuntimeError, match="no more memory"):
            run()
        monkeypatch.setattr(runtime, "slice_of", own)
        model.zero_grad()
        step(*batch).backward()
        found = gradients(model)
        model.zero_grad()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_clipping_and_scaled_losses_work_as_in_a_loop():
    model, batch = Rows(), batch_of(8)
    wanted = loop(model, 4, *batch)
    norm = torch.linalg.vector_norm(torch.stack([grad.norm() for grad in wanted.values()]))
    step = compiled(model, 4)
    optimizer = elixir.HybridAdamW(model.parameters(), lr=1e-3)
    (step(*batch) * 1024.0).backward()
    for param in model.parameters():
        param.grad.div_(1024.0)
    assert all(torch.equal(param.grad, wanted[name]) for name, param in model.named_parameters())
    torch.testing.assert_close(optimizer.clip_grad_norm_(1e9), norm, rtol=1e-5, atol=0.0)


def test_a_view_that_takes_the_rows_apart_is_taken_of_the_whole_batch():
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            # [T, B, width] to [T * B, width] interleaves the rows of micro-batches.
            flat = x.transpose(0, 1).reshape(-1, WIDTH)
            return (self.head(flat) * y.transpose(0, 1).reshape(-1, WIDTH)).sum()

    model, batch = Turned(), batch_of(8)
    reference = Turned()
    reference.load_state_dict(model.state_dict())
    reference(*batch).backward()
    compiled(model, 4)(*batch).backward()
    torch.testing.assert_close(model.head.weight.grad, reference.head.weight.grad, rtol=1e-4, atol=1e-4)


def test_auto_keeps_a_batch_whole_that_fits():
    model, batch = Rows(), batch_of(8)
    step = compiled(model, "auto", device_memory="64MiB")
    step(*batch).backward()
    assert set(divided_regions(step)) == {1}


def test_auto_trains_a_batch_that_does_not_fit_whole_within_the_budget():
    batch = batch_of(64)
    with pytest.raises(NoFeasiblePlan) as caught:
        compiled(Rows(), 1, device_memory=1)(*batch)
    budget_bytes = int(0.8 * caught.value.needed_bytes)
    del caught
    torch._dynamo.reset()
    model = Rows()
    step = compiled(model, "auto", device_memory=budget_bytes)
    step(*batch).backward()
    (number,) = set(divided_regions(step)) - {1}
    model.zero_grad()
    record = elixir.measure_step(lambda: step(*batch).backward())
    plan = elixir.compilations(step)[-1].plan
    assert record.device_peak_bytes <= 1.002 * plan.prediction.device_peak_bytes <= 1.002 * budget_bytes
    (decision,) = (decision for decision in plan.decisions if decision.subject == "micro_batches")
    assert decision.choice == f"{number} of {64 // number} rows"
    assert decision.because.startswith("the whole batch at once needs")


class Scored(nn.Module):
    """Returns a loss, and the scores that it is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(16, 32), nn.Linear(32, 2048)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.head(torch.tanh(self.first(x)))
        return scores.logsumexp(-1).mean(), scores


@pytest.mark.parametrize("parts", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_the_gradient_of_an_output_that_nobody_reads_is_planned_whole(parts: int):
    """Autograd makes zeros of all rows. Inductor computes the first op of the backward inside of a later one."""
    model, x = Scored(), torch.randn(64, 16)
    step = compiled(model, parts, inner="inductor")

    def once() -> None:
        loss, scores = step(x)
        del scores  # a plan holds an output until its last read in the step
        loss.backward()

    once()
    model.zero_grad()
    record = elixir.measure_step(once)
    compilation = elixir.compilations(step)[-1]
    assert max(divided_regions(step)) == parts
    first = next(op for op in as_run(compilation.graph).ops if op.phase is Phase.BACKWARD)
    assert not first.reads
    assert len(first.writes) == 2  # the gradients of both outputs, and no result
    plan = compilation.plan
    planned_bytes = plan.prediction.device_peak_bytes - sum(bucket.state_nbytes for bucket in plan.buckets)
    assert record.device_peak_bytes == pytest.approx(planned_bytes, abs=512)


def test_a_saved_plan_in_micro_batches_runs_in_them(tmp_path: Path):
    model, twin, batch = Rows(), Rows(), batch_of(8)
    twin.load_state_dict(model.state_dict())
    step = compiled(model, 4)
    step(*batch).backward()
    elixir.save_plan(elixir.compilations(step)[-1].plan, tmp_path / "plan.json")
    torch._dynamo.reset()
    again = compiled(twin, 1, plan=str(tmp_path / "plan.json"))
    again(*batch).backward()
    assert set(divided_regions(again)) == {4}
    found, wanted = gradients(twin), gradients(model)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


# ----------------------------------------------------------------------------------------------------------------------
# Steps with dynamic sizes in micro-batches: the short last batch of an epoch, and sequences of varying length.


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


# The lengths of a Llama vary in the test below, which compares the same bits.
@pytest.mark.parametrize(
    ("kind", "tied"), [pytest.param("llama", None, marks=pytest.mark.slow), ("gpt2", "transformer.wte.weight")]
)
def test_an_epoch_with_a_short_last_batch_has_the_exact_mean_over_tokens(kind: str, tied: str | None):
    model = language_model(kind)
    step = compiled(model, 4)
    for rows in (8, 8, 6):
        ids = torch.randint(0, 256, (rows, 32))
        labels = ids.clone()
        labels[0, :9], labels[5, :12] = -100, -100  # micro-batches have different numbers of targets
        wanted = loop_over_tokens(model, 4, ids, labels)
        whole = model(input_ids=ids, labels=labels).loss
        loss = step(input_ids=ids, labels=labels).loss
        loss.backward()
        found = gradients(model)
        model.zero_grad()
        # Only the loss itself, a mean over the tokens of the batch, runs on the whole batch.
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


class NormedTokens(nn.Module):
    """Linear layers around a norm over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.norm, self.after = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(TOKENS), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.norm(self.before(x)).relu()).square().sum()


def test_a_norm_over_a_batch_of_dynamic_size_has_the_statistics_of_the_whole_batch():
    model, reference = NormedTokens().double(), NormedTokens().double()
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


# ----------------------------------------------------------------------------------------------------------------------
# Ops whose arguments hold the number of rows, and random integers, are divided: each micro-batch has its own rows.


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


# ----------------------------------------------------------------------------------------------------------------------
# A step in micro-batches moves as much as a step on the whole batch. A loop moves as much in each micro-batch.


VERBS = ("gather", "release", "reduce", "offload")


def counts_of(step: Any, parts: int) -> dict[str, int]:
    """Return how often each verb runs in a step that passes a batch to `step` in `parts` slices of rows."""

    def run() -> None:
        for slices in zip(*(tensor.chunk(parts) for tensor in batch_of(16)), strict=True):
            step(*slices).backward()

    run()
    record = elixir.measure_step(run)
    return {verb: record.counts.get(verb, 0) for verb in VERBS}


def test_transfers_are_as_many_for_each_number_of_micro_batches_and_a_loop_has_as_many_for_each():
    counts = {}
    for number in (1, 8):
        torch._dynamo.reset()
        model = Rows()
        step = compiled(model, number, planner="zero3_offload")
        counts[number] = counts_of(step, 1)
        assert set(divided_regions(step)) == {number}
    assert all(counts[1].values())
    assert counts[1] == counts[8]
    torch._dynamo.reset()
    model = Rows()
    of_loop = counts_of(compiled(model, 1, planner="zero3_offload", accumulate=True), 8)
    assert of_loop == {verb: 8 * times for verb, times in counts[8].items()}
