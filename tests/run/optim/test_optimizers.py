"""Habits of a training loop around `optimizer.step()`: against torch's fused AdamW, with param groups and a
scaler."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import elixir_compile as elixir
from elixir_compile.base.errors import GradientsChanged
from elixir_compile.graph.capture.modules import executor_of
from elixir_compile.ir import Tier, Update
from tests.run.models import Stack, seeded, vectors
from tests.run.training import (
    Run,
    assert_offloads,
    assert_same,
    assert_same_tensors,
    by_elixir,
    by_torch,
    fused_adamw,
    loss_of,
    planned_peak_bytes,
    tight_bytes,
)
from tests.run.updating import (
    WIDTH,
    Several,
    buckets_of,
    closure_step,
    eager_run,
    flat_state,
    hybrid_run,
    in_flight,
    ladder,
    nan_staging,
    rows,
    weights_of,
)

# ----------------------------------------------------------------------------------------------------------------------
# Every habit of a training loop around `optimizer.step()`, against torch's own fused AdamW in the same run.


Compiled = Callable[..., torch.Tensor]


def pair(model: torch.nn.Module, batch: Any, **options: Any) -> tuple[Run, Run]:
    """Return a run by torch and one by Elixir under a tight budget."""
    return by_torch(model), by_elixir(model, device_memory=tight_bytes(model, batch), **options)


def test_state_equals_torchs_and_lives_where_the_plan_says() -> None:
    model, batches = seeded(Stack), vectors()
    expected, got = pair(model, batches[0])
    expected.train(batches)
    got.train(batches)
    assert_offloads(got)
    assert_same_tensors(flat_state(expected.optimizer), flat_state(got.optimizer))
    executor = executor_of(got.model)
    placed = executor.buckets.in_force(for_training=True)
    assert all(placement.optim is Tier.HOST for _, placement in placed)
    assert executor.ledger.counts["update"] == len(placed) * len(batches)


def test_state_stays_on_the_host_while_parameters_stay_on_the_device() -> None:
    model, batches = seeded(Stack), vectors()
    expected = by_torch(model).train(batches)
    full = planned_peak_bytes(by_elixir(model).train(batches[:1]))
    got = by_elixir(model, device_memory=int(0.8 * full)).train(batches)
    placements = elixir.compilations(got.model)[0].plan.placements
    assert any(placement.param is Tier.DEVICE and placement.optim is Tier.HOST for placement in placements)
    assert_same(expected, got)


def test_a_state_dict_continues_in_torch_and_back() -> None:
    model, batches = seeded(Stack), vectors(6)
    expected, got = pair(model, batches[0])
    expected.train(batches)
    got.train(batches[:2])
    plain = by_torch(seeded(Stack))
    plain.model.load_state_dict(got.model.state_dict())
    plain.optimizer.load_state_dict(got.optimizer.state_dict())
    plain.train(batches[2:4])
    back = by_elixir(seeded(Stack), device_memory=tight_bytes(model, batches[0]))
    back.train(batches[4:5])
    back.model.load_state_dict(plain.model.state_dict())
    back.optimizer.load_state_dict(copy.deepcopy(plain.optimizer.state_dict()))
    back.train(batches[4:])
    assert_offloads(back)
    assert_same_tensors(expected.weights, back.weights)
    assert_same_tensors(flat_state(expected.optimizer), flat_state(back.optimizer))


@pytest.mark.parametrize(
    "options", [{"amsgrad": True}, {"maximize": True}, {"weight_decay": 0.3, "betas": (0.5, 0.9), "eps": 1e-3}]
)
def test_every_option_of_adamw(options: dict[str, Any]) -> None:
    model, batches = seeded(Stack), vectors()
    expected = by_torch(model, optimizer=lambda params: fused_adamw(params, **options)).train(batches)

    def hybrid(params: Any) -> torch.optim.Optimizer:
        return elixir.HybridAdamW(params, lr=1e-2, **options)

    got = by_elixir(model, optimizer=hybrid, device_memory=tight_bytes(model, batches[0])).train(batches)
    assert_offloads(got)
    assert_same(expected, got)


def test_groups_with_their_own_learning_rate() -> None:
    def groups(params: Any) -> list[dict[str, Any]]:
        params = list(params)
        return [{"params": params[:7], "lr": 1e-3}, {"params": params[7:], "weight_decay": 0.0}]

    model, batches = seeded(Stack), vectors()
    expected = by_torch(model, optimizer=lambda params: fused_adamw(groups(params))).train(batches)

    def hybrid(params: Any) -> torch.optim.Optimizer:
        return elixir.HybridAdamW(groups(params), lr=1e-2)

    got = by_elixir(model, optimizer=hybrid, device_memory=tight_bytes(model, batches[0])).train(batches)
    assert_offloads(got)
    assert_same(expected, got)


def test_a_learning_rate_scheduler() -> None:
    model, batches = seeded(Stack), vectors(4)
    runs = pair(model, batches[0])
    for run in runs:
        scheduler = torch.optim.lr_scheduler.OneCycleLR(run.optimizer, max_lr=0.1, total_steps=5)
        for batch in batches:
            run.train([batch])
            scheduler.step()
    assert_offloads(runs[1])
    assert_same(*runs)
    assert runs[0].optimizer.param_groups[0]["lr"] == runs[1].optimizer.param_groups[0]["lr"]


def test_closures_and_optimizer_hooks() -> None:
    model, batches = seeded(Stack), vectors()
    runs = pair(model, batches[0])
    told: dict[int, list[str]] = {}

    for run in runs:
        said = told.setdefault(id(run), [])
        run.optimizer.register_step_pre_hook(lambda *_, said=said: said.append("pre"))
        run.optimizer.register_step_post_hook(lambda *_, said=said: said.append("post"))
        run.train(batches, closure_step)
        assert said == ["pre", "post"] * len(batches)
    assert_offloads(runs[1])
    assert_same(*runs)


def autocast_step(dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    def step(compiled: Compiled, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=dtype):
            loss = loss_of(compiled, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def test_bfloat16_autocast() -> None:
    model, batches = seeded(Stack), vectors()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        # The weights' casts are saved for the backward, so the least budget is a larger one.
        expected, got = pair(model, batches[0])
    step = autocast_step(torch.bfloat16)
    expected.train(batches, step)
    got.train(batches, step)
    assert_offloads(got)
    assert_same(expected, got)
    assert not torch.equal(by_torch(model).train(batches).losses[-1], got.losses[-1])


def test_a_bfloat16_model() -> None:
    model, batches = seeded(Stack).bfloat16(), [batch.bfloat16() for batch in vectors()]
    expected, got = pair(model, batches[0])
    expected.train(batches)
    got.train(batches)
    assert_offloads(got)
    assert_same(expected, got)


def test_float16_scaler_skips_an_overflow_completely() -> None:
    model, batches = seeded(Stack), vectors(4)
    with torch.autocast("cpu", dtype=torch.float16):
        runs = pair(model, batches[0])
    for run in runs:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)

        def step(
            compiled: Compiled, optimizer: torch.optim.Optimizer, batch: torch.Tensor, scaler: Any = scaler
        ) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.float16):
                loss = loss_of(compiled, batch)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            return loss

        run.train(batches[:2], step)
        before = {**run.weights, **{name: value.clone() for name, value in flat_state(run.optimizer).items()}}
        run.train([batches[2] * float("inf")], step)
        after = {**run.weights, **flat_state(run.optimizer)}
        assert_same_tensors(before, after)
        assert scaler.get_scale() == 2.0**9
        run.losses.pop()
        run.train(batches[3:], step)
    assert_offloads(runs[1])
    assert_same(*runs)
    assert_same_tensors(flat_state(runs[0].optimizer), flat_state(runs[1].optimizer))


@pytest.mark.parametrize("make", ["SGD", pytest.param("AdamW", marks=pytest.mark.slow), "AdamW fused", "Adafactor"])
def test_a_plain_torch_optimizer_trains_a_prepared_model(make: str) -> None:
    optimizers: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2),
        "AdamW fused": fused_adamw,
        "Adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-2),
    }
    model, batches = seeded(Stack), vectors()
    expected = by_torch(model, optimizer=optimizers[make]).train(batches)
    held = [value for entry in expected.optimizer.state.values() for value in entry.values()]
    state_bytes = sum(value.nbytes for value in held if isinstance(value, torch.Tensor))
    # No plan moves the state: on a CPU it stays beside the parameters, and counts.
    budget = tight_bytes(model, batches[0], optimizer=optimizers[make]) + int(1.05 * state_bytes)
    got = by_elixir(model, optimizer=optimizers[make], device_memory=budget).train(batches)
    assert_offloads(got)
    assert_same(expected, got)


def test_a_pickled_optimizer_continues() -> None:
    model, batches = seeded(Stack), vectors(4)
    expected, got = pair(model, batches[0])
    expected.train(batches)
    got.train(batches[:2])
    restored = copy.deepcopy(got.optimizer)
    assert isinstance(restored, elixir.HybridAdamW)
    assert_same_tensors(flat_state(got.optimizer), flat_state(restored))
    got.train(batches[2:])
    assert_same(expected, got)


# ----------------------------------------------------------------------------------------------------------------------
# Buckets end where param groups do; what they cannot follow is updated by parts.


Groups = Callable[[Any], list[dict[str, Any]]]


def decayed_and_not(params: Any) -> list[dict[str, Any]]:
    """Matrices in one group, biases in another, as people do."""
    params = list(params)
    return [
        {"params": [param for param in params if param.ndim > 1], "lr": 0.02},
        {"params": [param for param in params if param.ndim == 1], "weight_decay": 0.0},
    ]


def eager(model: torch.nn.Module, groups: Groups) -> Run:
    return eager_run(model, lambda params: fused_adamw(groups(params)))


def hybrid(groups: Groups, **options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda params: elixir.HybridAdamW(groups(params), lr=1e-2, **options)


def names_by_group(run: Run) -> list[set[str]]:
    names = {id(param): name for name, param in run.model.named_parameters()}
    return [{names[id(param)] for param in group["params"]} for group in run.optimizer.param_groups]


@pytest.mark.parametrize("update", list(Update))
def test_buckets_end_at_groups(update: Update) -> None:
    model, batches = ladder(), rows(6)
    expected = eager(model, decayed_and_not).train(batches)
    with (
        nan_staging(),
        hybrid_run(model, batches[0], home="host", update=update, optimizer=hybrid(decayed_and_not)) as run,
    ):
        run.train(batches)
        matrices, biases = names_by_group(run)
        found = {bucket.spec.group: set(bucket.spec.params) for bucket in buckets_of(run)}
        assert all(set(bucket.spec.params) <= (matrices, biases)[bucket.spec.group] for bucket in buckets_of(run))
        assert found.keys() == {0, 1}
        plan = elixir.compilations(run.model)[0].plan
        assert "trainable  group 1  param" in str(plan)
        assert_same_tensors(weights_of(expected), weights_of(run))


def test_a_group_added_after_planning_is_updated() -> None:
    model, batches = ladder(), rows(8)

    def first_half(params: Any) -> list[dict[str, Any]]:
        return [{"params": list(params)[::2]}]

    def train(run: Run) -> Run:
        run.train(batches[:4])
        rest = list(run.model.parameters())[1::2]
        run.optimizer.zero_grad()
        for param in rest:
            param.grad = None
        run.optimizer.add_param_group({"params": rest, "lr": 0.05})
        return run.train(batches[4:])

    expected = train(eager(model, first_half))
    for update in (Update.ACROSS_STEPS, Update.IN_BACKWARD):
        with nan_staging(), hybrid_run(model, batches[0], home="device", update=update) as run:
            run.optimizer = elixir.HybridAdamW(first_half(run.model.parameters()), lr=1e-2)
            train(run)
            assert_same_tensors(weights_of(expected), weights_of(run))


def test_an_optimizer_that_is_made_after_the_first_forward() -> None:
    model, batches = ladder(), rows(5)
    expected = eager(model, decayed_and_not).train(batches)
    with nan_staging(), hybrid_run(model, batches[0], home="host", update=Update.IN_BACKWARD) as run:
        loss_of(run.compiled, batches[0])
        assert {bucket.spec.group for bucket in buckets_of(run)} == {0}
        run.optimizer = elixir.HybridAdamW(decayed_and_not(run.model.parameters()), lr=1e-2)
        run.train(batches)
        assert_same_tensors(weights_of(expected), weights_of(run))


def test_two_optimizers_have_groups_of_their_own() -> None:
    model, batches = ladder(), rows(4)

    def halves(make: Callable[[Any], torch.optim.Optimizer], params: Any) -> Several:
        params = list(params)
        return Several([make(params[:3]), make(params[3:])])

    def plain(params: Any) -> Several:
        return halves(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5), params)

    def make(params: Any) -> Several:
        return halves(lambda p: elixir.hybrid(torch.optim.SGD)(p, lr=0.1, momentum=0.5), params)

    expected = eager_run(model, plain).train(batches)
    with hybrid_run(model, batches[0], home="host", update=Update.ACROSS_STEPS, optimizer=make) as run:
        run.train(batches)
        assert [bucket.spec.group for bucket in buckets_of(run)] == [0, 0, 1, 1, 1]
        assert_same_tensors(weights_of(expected), weights_of(run))


@pytest.mark.parametrize(
    ("make", "copies"),
    [
        (lambda params: elixir.HybridAdamW(params, amsgrad=True), 3),
        (lambda params: elixir.HybridAdamW(params), 2),
        (lambda params: elixir.hybrid(torch.optim.SGD)(params, momentum=0.9), 1),
        (lambda params: elixir.hybrid(torch.optim.SGD)(params), 0),
    ],
)
def test_the_plan_counts_the_state_that_the_optimizer_keeps(make: Any, copies: int) -> None:
    model, (batch,) = ladder(), rows(1)
    with hybrid_run(model, batch, home="device", update=Update.AFTER_BACKWARD, optimizer=make) as run:
        run.train([batch])
        assert sum(bucket.spec.numel for bucket in buckets_of(run)) == 4 * WIDTH**2 + 3 * WIDTH
        assert all(bucket.spec.state_nbytes == copies * bucket.spec.nbytes for bucket in buckets_of(run))
        state = run.optimizer.state_dict()["state"].values()
        kept = [value for entry in state for value in entry.values() if value.ndim]
        assert sum(value.nbytes for value in kept) == sum(bucket.spec.state_nbytes for bucket in buckets_of(run))


# ----------------------------------------------------------------------------------------------------------------------
# Loss scaling of an fp32 model: an overflow leaves everything as it was, and no update in the backward is lost on a
# scaled gradient.


SCALE = 2.0**10


def scaled_step(scaler: torch.amp.GradScaler, *, unscales: bool = False) -> Callable[..., torch.Tensor]:
    def step(compiled: Callable[..., Any], optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
        loss = loss_of(compiled, batch)
        scaler.scale(loss).backward()
        if unscales:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1e-3)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss

    return step


def everything(run: Run) -> dict[str, torch.Tensor]:
    """Return copies of weights and state, the step count with it."""
    state = run.optimizer.state_dict()["state"]
    flat = {f"{index}.{name}": value.clone() for index, entry in state.items() for name, value in entry.items()}
    return dict(sorted({**weights_of(run), **flat}.items()))


@pytest.mark.parametrize(("update", "unscales"), [(Update.AFTER_BACKWARD, False), (Update.ACROSS_STEPS, True)])
def test_an_overflow_leaves_weights_and_state_bitwise_untouched(update: Update, unscales: bool) -> None:
    model, batches = ladder(), rows(5)

    def train(run: Run) -> Run:
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=100)
        step = scaled_step(scaler, unscales=unscales)
        run.train(batches[:2], step)
        before = everything(run)
        run.train([batches[2] * float("inf")], step)
        assert_same_tensors(before, everything(run))
        assert scaler.get_scale() == SCALE / 2
        return run.train(batches[3:], step)

    expected = train(eager_run(model))
    with nan_staging(), hybrid_run(model, batches[0], home="host", update=update) as run:
        train(run)
        assert in_flight(run) == (4 if update is Update.ACROSS_STEPS else 0)
        assert_same_tensors(everything(expected), everything(run))


def test_a_scaler_with_updates_in_the_backward_is_refused_first() -> None:
    model, batches = ladder(), rows(2)
    with hybrid_run(model, batches[0], home="host", update=Update.IN_BACKWARD) as run:
        before = weights_of(run)
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        with pytest.raises(GradientsChanged, match=r"steps\.\d.* GradScaler .* update=\"after_backward\""):
            run.train(batches, scaled_step(scaler, unscales=True))
        assert_same_tensors(before, weights_of(run))
        assert run.optimizer.state_dict()["state"] == {}
        run.optimizer.zero_grad()
        expected = eager_run(model).train(batches)
        run.train(batches)
        assert_same_tensors(weights_of(expected), weights_of(run))


def test_a_scaler_added_later_is_refused_at_its_first_step() -> None:
    model, batches = ladder(), rows(2)
    with hybrid_run(model, batches[0], home="split", update=Update.IN_BACKWARD) as run:
        run.train(batches)
        with pytest.raises(GradientsChanged, match="GradScaler"):
            run.train(batches, scaled_step(torch.amp.GradScaler("cpu", init_scale=SCALE)))


def test_a_disabled_scaler_works_with_updates_in_the_backward() -> None:
    model, batches = ladder(), rows(3)
    expected = eager_run(model).train(batches)
    with hybrid_run(model, batches[0], home="host", update=Update.IN_BACKWARD) as run:
        run.train(batches, scaled_step(torch.amp.GradScaler("cpu", enabled=False)))
        assert_same_tensors(weights_of(expected), weights_of(run))
