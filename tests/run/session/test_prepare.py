"""A prepared model is the user's model, on any default device, and its compilation and sampler say where they are."""

import copy
import gc
import io
import logging
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch import nn

import elixir_compile as elixir
from elixir_compile.graph.capture.modules import executor_of
from elixir_compile.ir import Phase, Tier, Update
from elixir_compile.ir.share import Share
from elixir_compile.session import step_profiler
from elixir_compile.session.plan_files import load_answered, load_question
from elixir_compile.session.step_profiler import Progress
from elixir_compile.step import plan_timeline, verify
from elixir_compile.tools.cli import demo
from tests.run.models import WIDTH, Stack, Tied, hf_batches, seeded, small_gpt2, vectors
from tests.run.training import (
    assert_offloads,
    assert_same,
    assert_same_tensors,
    by_elixir,
    by_elixir_unprepared,
    by_torch,
    fused_adamw,
    hybrid_adamw,
    least_bytes,
    loss_of,
    on_host,
    plain_step,
    planned_peak_bytes,
    tight_bytes,
)
from tests.run.updating import assert_equal, hybrid_run, ladder, rows

# ----------------------------------------------------------------------------------------------------------------------
# A prepared model is the user's model: it saves, loads, copies, evaluates and generates as before.


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
    model, batches = small_gpt2(num_layers=2), hf_batches(4)
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


# ----------------------------------------------------------------------------------------------------------------------
# Training under `torch.set_default_device` and `with torch.device(...)` is what it is without them.
#
# `meta` shows each tensor that Elixir makes for itself without a device: it has no values there.


EAGER = {"inner": "aot_eager", "plan_cache": False}


@contextmanager
def default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize(
    "how",
    ["tight", "micro-batches", *(pytest.param(how, marks=pytest.mark.slow) for how in ("free", "offload", "sgd"))],
)
def test_training_under_another_default_device_is_bitwise_the_same(how: str) -> None:
    model, batches = seeded(Stack), vectors(3)
    options: dict[str, object] = {"planner": "greedy", "plan_cache": False}
    options |= {"offload": {"activations": "offload"}, "micro-batches": {"micro_batches": 2}}.get(how, {})
    optimizer = momentum if how == "sgd" else hybrid_adamw
    if how in ("tight", "offload"):
        options["device_memory"] = tight_bytes(model, batches[0], **options)
    expected = by_elixir(model, optimizer=optimizer, **options).train(batches)
    again = by_elixir(model, optimizer=optimizer, **options)
    with default_device("meta"):
        again.train(batches)
    assert_same(expected, again)


def test_state_on_disk_under_another_default_device(tmp_path: Path) -> None:
    model, batches = ladder(), rows(3)
    runs = []
    for name in ("cpu", "meta"):
        options = {"disk_path": tmp_path}
        with (
            hybrid_run(model, batches[0], home="host disk", update=Update.ACROSS_STEPS, **options) as run,
            default_device(name),
        ):
            runs.append(run.train(batches))
    assert_equal(*runs)


def test_masters_and_saved_weights_under_another_default_device() -> None:
    states, batches = [], vectors(3)
    for name in ("cpu", "meta"):
        torch._dynamo.reset()
        model = elixir.prepare(seeded(Stack), param_dtype="bfloat16")
        optimizer = hybrid_adamw(model.parameters())
        compiled = torch.compile(model, backend="elixir", options={"inner": "aot_eager"})
        with default_device(name):
            for batch in batches:
                compiled(batch.bfloat16()).float().square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            states.append(elixir.full_state_dict(model))
    assert all(torch.equal(states[0][name], value) for name, value in states[1].items())


def momentum(params: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return elixir.hybrid(torch.optim.SGD)(params, lr=1e-2, momentum=0.9)


def test_a_first_call_prepares_and_clips_under_another_default_device() -> None:
    model, batches = seeded(Stack), vectors(2)
    runs = [by_elixir_unprepared(model, plan_cache=False) for _ in range(2)]
    norms = []
    for run, name in zip(runs, ("cpu", "meta"), strict=True):
        with default_device(name):
            for batch in batches:
                run.compiled(batch).square().mean().backward()
                norms.append(run.optimizer.clip_grad_norm_(0.1))
                run.optimizer.step()
                run.optimizer.zero_grad()
    assert torch.equal(torch.stack(norms[:2]), torch.stack(norms[2:]))
    state = copy.deepcopy(runs[0].model.state_dict())
    assert all(torch.equal(state[name], value) for name, value in runs[1].model.state_dict().items())


def test_the_demo_under_another_default_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "SHAPE", demo.Shape(num_layers=2, width=32, num_heads=2, context=16))
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *model, options, **more: real(*model, options=options | EAGER, **more))
    runs = []
    for name in ("cpu", "meta"):
        torch._dynamo.reset()
        with default_device(name):
            text = bytes(range(256))
            runs.append(demo._train(text, num_steps=2, device="cpu", budget_bytes=None, console=Console(quiet=True)))
    assert runs[0].losses == runs[1].losses


# ----------------------------------------------------------------------------------------------------------------------
# A long compilation says how far it is, to a person who is looking.


class Clock:
    """A clock that is set."""

    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return the clock of progress lines, which go to a terminal."""
    made = Clock()
    monkeypatch.setattr(step_profiler, "time", made)
    monkeypatch.setattr(step_profiler.sys.stderr, "isatty", lambda: True, raising=False)
    return made


def lines_at(shown: Progress, clock: Clock, seconds: list[float], caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what is said where region n of many is compiled at the n-th of `seconds`."""
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="elixir_compile"):
        for number, now_s in enumerate(seconds, start=1):
            clock.now_s = now_s
            shown.compiling(Phase.FORWARD, number, 40)
    return caplog.messages


def test_progress_comes_after_ten_seconds_and_then_every_five(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    found = lines_at(Progress(is_on=True), clock, [101, 109, 111, 113, 117], caplog)
    assert [line.split("of 40")[0].strip() for line in found] == ["compiling   region 3", "compiling   region 5"]
    assert "11 s" in found[0]


def test_seconds_of_a_later_compilation_count_from_its_own_beginning(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    shown = Progress(is_on=True)
    assert lines_at(shown, clock, [101], caplog) == []
    shown.compiled()
    assert lines_at(shown, clock, [5000, 5009], caplog) == []
    assert len(lines_at(shown, clock, [5011], caplog)) == 1


@pytest.mark.parametrize(("is_on", "is_terminal"), [(False, True), (True, False)])
def test_progress_is_not_logged_if_off_or_without_a_terminal(
    clock: Clock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, is_on: bool, is_terminal: bool
) -> None:
    monkeypatch.setattr(step_profiler.sys.stderr, "isatty", lambda: is_terminal, raising=False)
    assert lines_at(Progress(is_on=is_on), clock, [200], caplog) == []


# ----------------------------------------------------------------------------------------------------------------------
# `ShareSampler`: the rows of all ranks are the batch of one process, whatever the shares are.


def shares_of(rows: list[int]) -> list[Share]:
    return [Share(rank=rank, num_rows=count, state=1 / len(rows)) for rank, count in enumerate(rows)]


def samplers_of(num_samples: int, rows: list[int], **more: int | bool) -> list[elixir.ShareSampler]:
    shares = shares_of(rows)
    return [elixir.ShareSampler(num_samples, shares, rank=rank, **more) for rank in range(len(rows))]


def whole_batches(num_samples: int, batch: int, **more: int | bool) -> list[list[int]]:
    (alone,) = samplers_of(num_samples, [batch], **more)
    return list(alone)


ROWS = st.lists(st.integers(1, 6), min_size=1, max_size=4)


@given(ROWS, st.integers(0, 60), st.booleans(), st.booleans())
def test_the_rows_of_all_ranks_are_the_batch_of_one_process(
    rows: list[int], num_samples: int, shuffle: bool, drop_last: bool
) -> None:
    batch = sum(rows)
    how = {"seed": 3, "shuffle": shuffle, "drop_last": drop_last}
    expected = whole_batches(num_samples, batch, **how)
    samplers = samplers_of(num_samples, rows, **how)
    of_ranks = [list(sampler) for sampler in samplers]
    for number, whole in enumerate(expected):
        counts = samplers[0].rows_of_batch(number)
        own = [of_ranks[rank][number] for rank in range(len(rows))]
        assert [index for count, mine in zip(counts, own, strict=True) for index in mine[:count]] == whole
        assert [len(mine) for mine in own] == [count or min(2, len(whole)) for count in counts]
        if len(whole) == batch:
            assert list(counts) == rows
        assert all(abs(count - len(whole) * share / batch) < 1 for count, share in zip(counts, rows, strict=True))
    assert {len(batches) for batches in of_ranks} == {len(expected)} == {len(samplers[0])}
    if not drop_last:
        assert sorted(index for whole in expected for index in whole) == list(range(num_samples))


def test_a_run_goes_on_under_other_shares_in_the_middle_of_an_epoch() -> None:
    expected = whole_batches(40, 8, seed=5)
    first = samplers_of(40, [5, 2, 1], seed=5)
    iterators = [iter(sampler) for sampler in first]
    done = [[next(iterator) for iterator in iterators] for _ in range(2)]
    state = first[0].state_dict()
    assert state == {"epoch": 0, "next_batch": 2}
    rest = samplers_of(40, [3, 5], seed=5)
    for sampler in rest:
        sampler.load_state_dict(state)
    later = list(zip(*rest, strict=True))
    assert [list(chain(*own)) for own in [*done, *later]] == expected
    # A new epoch begins with its first batch.
    assert len(list(rest[0])) == 5


def test_epochs_differ_and_ranks_agree_on_them() -> None:
    samplers = samplers_of(24, [3, 1], seed=0)
    epochs: list[list[int]] = []
    for epoch in range(3):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        epochs.append([index for own in zip(*samplers, strict=True) for mine in own for index in mine])
    assert all(sorted(epoch) == list(range(24)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_other_shares_are_taken_from_the_next_batch_on() -> None:
    expected = whole_batches(24, 8, shuffle=False)
    samplers = samplers_of(24, [4, 4], shuffle=False)
    iterators = [iter(sampler) for sampler in samplers]
    first = list(chain(*map(next, iterators)))
    for sampler in samplers:
        sampler.take(shares_of([7, 1]))
    second = [next(iterator) for iterator in iterators]
    assert [first, list(chain(*second))] == expected[:2]
    assert [len(own) for own in second] == [7, 1]
    with pytest.raises(elixir.InvalidOption, match="rows of the batch of 8 in all"):
        samplers[0].take(shares_of([7, 2]))


def test_shares_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(elixir.InvalidOption, match="option shares"):
        elixir.ShareSampler(10, shares_of([1, 2])[:1], rank=1)
    with pytest.raises(elixir.InvalidOption, match="sums to 1"):
        elixir.ShareSampler(10, [Share(rank=0, num_rows=1, state=0.5)], rank=0)
