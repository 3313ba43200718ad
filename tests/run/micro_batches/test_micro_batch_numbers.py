"""The numbers of a step in micro-batches are those of a user's loop over the same micro-batches."""

from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional

import elixir_compile as elixir
from elixir_compile.base.errors import NoFeasiblePlan
from elixir_compile.runtime import micro_batches as runtime
from tests.run.micro_batches.stepping import (
    WIDTH,
    Rows,
    batch_of,
    compiled,
    divided_regions,
    gradients,
    loop,
)

SIZES = {"vocab_size": 256, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


def language_model(kind: str) -> nn.Module:
    if kind == "gpt2":
        config = transformers.GPT2Config(
            n_layer=2, n_embd=64, n_head=4, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **SIZES
        )
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(
            num_hidden_layers=2,
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


@pytest.mark.parametrize(("kind", "tied"), [("llama", None), ("gpt2", "transformer.wte.weight")])
def test_a_language_model_has_the_gradients_of_a_loop_with_the_exact_mean_over_tokens(kind: str, tied: str | None):
    model = language_model(kind)
    ids = torch.randint(0, 256, (8, 32))
    labels = ids.clone()
    labels[0, :9], labels[5, :12] = -100, -100  # micro-batches have different numbers of targets
    wanted = loop_over_tokens(model, 4, ids, labels)
    whole = model(input_ids=ids, labels=labels).loss
    step = compiled(model, 4)
    loss = step(input_ids=ids, labels=labels).loss
    loss.backward()
    found = gradients(model)
    # Only the loss itself, a mean over the tokens of the batch, runs on the whole batch.
    assert sorted(divided_regions(step)) == [1] + [4] * (len(divided_regions(step)) - 1)
    assert torch.equal(loss, whole)
    assert {name for name in wanted if not torch.equal(found[name], wanted[name])} <= {tied}
    if tied is not None:
        torch.testing.assert_close(found[tied], wanted[tied], rtol=1e-5, atol=1e-7)


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
