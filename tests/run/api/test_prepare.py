"""A prepared model is the user's model: it saves, loads, copies, evaluates and generates as before."""

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import elixir_compile as elixir
from elixir_compile.graph.capture.modules import executor_of
from elixir_compile.ir import Tier
from elixir_compile.session.saved import load_answered, load_question
from elixir_compile.step import plan_timeline, verify
from tests.run.models import WIDTH, Stack, Tied, hf_batches, seeded, small_gpt2, vectors
from tests.run.training import (
    assert_offloads,
    assert_same,
    assert_same_tensors,
    by_elixir,
    by_elixir_unprepared,
    by_torch,
    fused_adamw,
    least_bytes,
    loss_of,
    on_host,
    plain_step,
    planned_peak_bytes,
    tight_bytes,
)


def test_prepare_changes_no_state_dict_key_and_no_value() -> None:
    model = seeded(Tied)
    before = copy.deepcopy(model.state_dict())
    params = list(model.parameters())
    assert elixir.prepare(model) is model
    assert_same_tensors(before, model.state_dict())
    assert all(ours is theirs for ours, theirs in zip(params, model.parameters(), strict=True))
    assert isinstance(model.embed, nn.Embedding)


def test_prepare_twice_changes_nothing() -> None:
    model = elixir.prepare(seeded(Stack), device="cpu")
    executor, kind = executor_of(model), type(model.head)
    assert elixir.prepare(model) is model
    assert executor_of(model) is executor
    assert type(model.head) is kind
    with pytest.raises(elixir.UnsupportedModel, match="prepared for cpu"):
        elixir.prepare(model, device="meta")


def test_a_model_on_meta_is_created_on_the_host() -> None:
    with torch.device("meta"):
        model = Stack()
    with pytest.raises(elixir.NotPrepared, match="device"):
        elixir.prepare(model)
    elixir.prepare(model, device="cpu")
    assert all(param.device.type == "cpu" for param in model.parameters())
    weights = model.state_dict()
    assert weights["head.weight"].std() > 0.01
    assert torch.equal(weights["blocks.0.norm.weight"], torch.ones(WIDTH))
    batches = vectors()
    got = by_elixir(model, device_memory=tight_bytes(model, batches[0]))
    expected = by_torch(Stack())
    expected.model.load_state_dict(weights)
    assert_same(expected.train(batches), got.train(batches))


def test_tied_weights_of_a_model_on_meta_stay_tied() -> None:
    with torch.device("meta"):
        model = Tied()
    elixir.prepare(model, device="cpu")
    assert model._modules["head"]._parameters["weight"] is model._modules["embed"]._parameters["weight"]


def test_a_prepared_model_trains_uncompiled() -> None:
    model, batches = seeded(Stack), vectors()
    expected, own = copy.deepcopy(model), elixir.prepare(copy.deepcopy(model))
    losses = []
    for module in (expected, own):
        optimizer = fused_adamw(module.parameters())
        losses.append([plain_step(module, optimizer, batch).item() for batch in batches])
    assert losses[0] == losses[1]
    assert_same_tensors(expected.state_dict(), own.state_dict())


class PartlyUsed(nn.Module):
    """The loss uses `used`; the graph reads the others for results that lead nowhere, or to another output."""

    def __init__(self) -> None:
        super().__init__()
        names = ("used", "dropped", "detached", "unread", "other")
        self.layers = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in names})

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.layers["used"](x)
        self.layers["dropped"](hidden)
        return hidden.square().mean() + self.layers["detached"](hidden).detach().mean(), self.layers["other"](x)


@pytest.mark.parametrize("ends", [(0,), (1,), (0, 1)])
def test_another_backend_gives_no_gradient_where_torch_gives_none(ends: tuple[int, ...]) -> None:
    """A gradient of zeros would let an optimizer decay the weight, or move it by its momentum."""
    x, found = torch.randn(4, WIDTH), []
    for model in (seeded(PartlyUsed), elixir.prepare(seeded(PartlyUsed))):
        torch._dynamo.reset()
        outputs = torch.compile(model, backend="aot_eager")(x)
        for end in ends:
            outputs[end].sum().backward(retain_graph=True)
        found.append({name: param.grad for name, param in model.named_parameters()})
    theirs, ours = found
    assert [name for name, grad in ours.items() if grad is None] == [n for n, grad in theirs.items() if grad is None]
    assert_same_tensors(*({name: grad for name, grad in each.items() if grad is not None} for each in found))


def test_an_offloaded_model_runs_uncompiled() -> None:
    model, batches = seeded(Stack), vectors(4)
    expected = by_torch(model).train(batches[:2])
    got = by_elixir(model, device_memory=tight_bytes(model, batches[0])).train(batches[:2])
    assert_offloads(got)
    for run in (expected, got):
        plain_step(run.model, run.optimizer, batches[2])
        run.train(batches[3:])
    assert_same_tensors(expected.weights, got.weights)


def test_evaluation_between_steps_changes_nothing() -> None:
    model, batches = seeded(Stack), vectors(4)
    runs = by_torch(model), by_elixir(model, device_memory=tight_bytes(model, batches[0]))
    seen: list[list[float]] = []
    for run in runs:
        values = []
        for batch in batches[:3]:
            run.train([batch])
            run.model.eval()
            with torch.no_grad():
                values.append(run.compiled(batches[3]).item())
                values.append(run.model(batches[3]).item())
            run.model.train()
        seen.append(values)
    assert_offloads(runs[1])
    assert_same(*runs)
    assert seen[0] == seen[1]
    assert len(elixir.compilations(runs[1].model)) == 1
    assert any(record.is_inference for record in elixir.compilations(runs[1].model, inference=True))


@pytest.mark.slow
def test_generation_between_steps_equals_torch() -> None:
    model, batches = small_gpt2(), hf_batches()
    expected = by_torch(model).train(batches[:2])
    got = by_elixir(model, device_memory=tight_bytes(model, batches[0])).train(batches[:2])
    prompt = batches[2]["input_ids"][:, :4]
    generated = [
        run.model.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0, use_cache=True)
        for run in (expected, got)
    ]
    assert torch.equal(*generated)
    assert_offloads(got)
    assert_same(expected.train(batches[2:]), got.train(batches[2:]))


def test_save_pretrained_and_from_pretrained_keep_the_weights(tmp_path: Path) -> None:
    model, batches = small_gpt2(), hf_batches(4)
    expected = by_torch(model).train(batches[:3])
    got = by_elixir(model, device_memory=tight_bytes(model, batches[0])).train(batches[:3])
    assert_offloads(got)
    got.model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert_same_tensors(expected.weights, loaded.state_dict())
    assert type(loaded.transformer.wte) is nn.Embedding


@pytest.mark.parametrize("start", [by_elixir, by_elixir_unprepared])
def test_a_state_dict_loads_before_and_after_the_first_step(start: Callable) -> None:
    model, batches = seeded(Stack), vectors(4)
    torch.manual_seed(5)
    other, third = Stack().state_dict(), Stack().state_dict()
    runs = by_torch(model), start(model, device_memory=tight_bytes(model, batches[0]))
    for run in runs:
        run.model.load_state_dict(other)
        run.train(batches[:2])
        run.model.load_state_dict(third)
        run.train(batches[2:])
    assert_offloads(runs[1])
    assert_same(*runs)


def test_a_state_dict_is_saved_and_loaded_by_tensor() -> None:
    model, batches = seeded(Stack), vectors()
    got = by_elixir(model, device_memory=tight_bytes(model, batches[0])).train(batches)
    file = io.BytesIO()
    torch.save({"head.weight": got.model.state_dict()["head.weight"]}, file)
    assert len(file.getvalue()) < 2 * 4 * WIDTH * WIDTH
    file.seek(0)
    assert torch.equal(torch.load(file)["head.weight"], got.weights["head.weight"])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_prepared_model_is_a_plain_working_model(copied: Callable[[nn.Module], nn.Module]) -> None:
    model, batches = seeded(Stack), vectors(4)
    expected = by_torch(model).train(batches[:2])
    got = by_elixir(model, device_memory=tight_bytes(model, batches[0])).train(batches[:2])
    assert_offloads(got)
    twin = copied(got.model)
    assert executor_of(twin) is None
    assert type(twin.head) is nn.Linear
    assert_same_tensors(got.weights, twin.state_dict())
    optimizer = fused_adamw(twin.parameters())
    plain_step(twin, optimizer, batches[2])
    assert not torch.equal(twin.state_dict()["head.weight"], got.weights["head.weight"])
    assert_same_tensors(expected.weights, got.weights)
    expected.train(batches[2:])
    assert_same_tensors(expected.weights, got.train(batches[2:]).weights)


def test_a_parameter_frozen_later_no_longer_changes_and_trains_again_when_thawed() -> None:
    model, batches = seeded(Stack), vectors(6)
    runs = by_torch(model), by_elixir(model, device_memory=tight_bytes(model, batches[0]))
    for run in runs:
        frozen = run.model._modules["blocks"][1]._modules["up"]._parameters["weight"]
        run.train(batches[:2])
        frozen.requires_grad_(False)
        held = frozen.detach().clone()
        run.train(batches[2:4])
        assert torch.equal(frozen, held)
        frozen.requires_grad_(True)
        run.train(batches[4:])
        assert not torch.equal(frozen, held)
    assert_offloads(runs[1])
    assert_same(*runs)


def test_a_parameter_that_was_frozen_before_preparing_trains_when_thawed() -> None:
    model, batches = seeded(Stack), vectors(4)
    model.head.weight.requires_grad_(False)
    expected, got = by_torch(model), by_elixir(model, device_memory=int(1.5 * tight_bytes(model, batches[0])))
    for run in (expected, got):
        run.train(batches[:2])
        run.model._modules["head"]._parameters["weight"].requires_grad_(True)
    with torch.no_grad():
        loss_of(got.compiled, batches[2])
    expected.train(batches[2:])
    got.train(batches[2:])
    assert_offloads(got)
    assert_same(expected, got)


def test_a_thawed_parameter_trains_at_once_uncompiled() -> None:
    model, batch = seeded(Stack), vectors(1)[0]
    weight = model.head.weight.requires_grad_(False)
    elixir.prepare(model)
    weight.requires_grad_(True)
    model(batch).backward()
    assert weight.grad is not None


def test_compiled_code_does_not_keep_the_first_batch() -> None:
    model = seeded(Stack)
    compiled = torch.compile(model, backend="elixir", options={"inner": "aot_eager", "plan_cache": False})
    batch = vectors()[0].clone()
    gone = weakref.ref(batch)
    loss_of(compiled, batch).backward()
    del batch
    gc.collect()
    assert gone() is None


def test_a_larger_batch_is_planned_before_it_runs() -> None:
    model = seeded(Stack)
    small, large = vectors(2, rows=8), vectors(2, rows=64)
    budget = tight_bytes(model, large[0])
    runs = by_torch(model), by_elixir(model, device_memory=budget)
    for run in runs:
        run.train([*small, *large, *small])
    assert_offloads(runs[1])
    assert_same(*runs)
    assert planned_peak_bytes(runs[1]) <= budget


def test_a_batch_too_large_for_the_budget_is_refused_before_it_runs() -> None:
    model = seeded(Stack)
    small, large = vectors(3, rows=8), vectors(3, rows=2048)
    middle = vectors(1, rows=16)
    budget = tight_bytes(model, middle[0])
    expected = by_torch(model).train([*small[:2], *middle, *small[2:]])
    got = by_elixir(model, device_memory=budget).train([*small[:2], *middle])
    with pytest.raises(elixir.NoFeasiblePlan) as raised:
        loss_of(got.compiled, large[0])
    assert raised.value.needed_bytes > budget
    got.train(small[2:])
    assert_offloads(got)
    assert_same(expected, got)


def test_parameters_moved_by_the_user_return_to_their_home() -> None:
    model, batches = seeded(Stack), vectors(4)
    runs = by_torch(model), by_elixir(model, device_memory=tight_bytes(model, batches[0]))
    for run in runs:
        run.train(batches[:2])
        for param in run.model.parameters():
            param.data = param.data * 2
        run.train(batches[2:])
    assert_offloads(runs[1])
    assert_same(*runs)


def test_a_saved_plan_is_followed(tmp_path: Path) -> None:
    model, batches = seeded(Stack), vectors()
    first = by_elixir(model, device_memory=tight_bytes(model, batches[0])).train(batches)
    compilation = elixir.compilations(first.model)[0]
    plan = compilation.plan
    elixir.save_plan(compilation, tmp_path / "plan.json")
    assert elixir.load_plan(tmp_path / "plan.json") == plan
    asked = load_question(tmp_path / "plan.json", plan)
    assert asked == compilation.question
    assert asked is not None
    verify(asked.problem.graph, plan)
    assert plan_timeline(asked.problem.graph, plan) == compilation.timeline
    got = by_elixir(model, plan=str(tmp_path / "plan.json")).train(batches)
    again = elixir.compilations(got.model)[0]
    assert again.plan == plan
    assert again.active.problem.budget_bytes > plan.budget_bytes  # nobody named a budget here
    elixir.save_plan(again, tmp_path / "again.json")
    assert load_answered(tmp_path / "again.json") == (plan, again.question)
    assert any(placement.param is Tier.HOST for placement in plan.placements)
    assert on_host(got) == on_host(first)
    assert_same(first, got)


def test_training_under_the_smallest_feasible_budget_equals_eager_training() -> None:
    model, batches = seeded(Stack), vectors()
    got = by_elixir(model, device_memory=least_bytes(model, batches[0])).train(batches)
    assert_offloads(got)
    assert_same(by_torch(model).train(batches), got)
