"""16-bit parameters with fp32 masters: exact for every placement and moment of the update, and whose masters are
whose."""

import copy
import functools
import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import elixir_compile as elixir
from elixir_compile import HybridAdamW
from elixir_compile.base.errors import GradientsChanged
from elixir_compile.graph.ops.optimizers import has_master
from elixir_compile.ir import Update
from elixir_compile.optim import adamw_rule
from elixir_compile.optim.adamw_rule import AdamWRule
from elixir_compile.optim.host import flat_step, mixed_adamw
from elixir_compile.optim.hybrid import Hybrid
from elixir_compile.optim.rule import GRAD_SCALE, ParamUpdate
from elixir_compile.runtime.bucket import live_slab_bytes
from tests.covering import covering
from tests.run import training
from tests.run.models import hf_batches, seeded, small_gpt2
from tests.run.optimizers import Noisy
from tests.run.training import Run, assert_same_tensors, loss_of
from tests.run.updating import WIDTH, Ladder, buckets_of, in_flight, ladder, nan_staging, placed, rows, small_buckets

# ----------------------------------------------------------------------------------------------------------------------
# 16-bit parameters with fp32 masters: exact for every placement and moment of the update.


STEPS = 20
ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
BF16, FP16 = torch.bfloat16, torch.float16
NAMES = {BF16: "bfloat16", FP16: "float16"}


class Attention(nn.Module):
    """One block of attention over odd sizes, between an embedding and the same, tied; returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 14)
        self.norm = nn.LayerNorm(14)
        self.mix = nn.Linear(14, 42)
        self.out = nn.Linear(14, 14, bias=False)
        self.up = nn.Linear(14, 15)
        self.down = nn.Linear(15, 14)
        for name, param in self.named_parameters():
            if name != "norm.weight":
                nn.init.normal_(param, std=0.02)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        q, k, v = self.mix(self.norm(x)).unflatten(-1, (3, 2, 7)).permute(2, 0, 3, 1, 4)
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        x = x + self.down(functional.gelu(self.up(x)))
        logits = functional.linear(x, self.embed.weight)
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def attention() -> Attention:
    torch.manual_seed(5)
    return Attention()


def sentences(num_batches: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 17, (3, 9), generator=generator) for _ in range(num_batches)]


def mixed_of(model: nn.Module, dtype: torch.dtype = BF16, adam: Mapping[str, Any] = ADAM, **options: Any) -> Run:
    """Return a run of a copy of `model` that was prepared for `dtype`."""
    own = elixir.prepare(copy.deepcopy(model), param_dtype=NAMES[dtype])
    options = {"inner": "aot_eager", "replan": False, "param_dtype": NAMES[dtype], **options}
    return training._elixir_run(own, lambda params: HybridAdamW(params, **adam), options)


@contextmanager
def mixed_run(
    model: nn.Module,
    batch: Any,
    *,
    home: str = "device",
    update: Update = Update.AFTER_BACKWARD,
    share: float = 0.0,
    dtype: torch.dtype = BF16,
    adam: Mapping[str, Any] = ADAM,
    **options: Any,
) -> Iterator[Run]:
    """Yield such a run under a plan with this placement and moment of the update."""
    budget = None
    if home in ("host", "host disk", "disk"):
        with small_buckets(lambda plan: plan), pytest.raises(elixir.NoFeasiblePlan) as raised:
            loss_of(mixed_of(model, dtype, adam, device_memory=1, micro_batches=1).compiled, batch)
        budget = int(1.05 * raised.value.needed_bytes)
    with nan_staging(), small_buckets(lambda plan: placed(plan, home, share, update)):
        yield mixed_of(model, dtype, adam, device_memory=budget, **options)


@dataclass(kw_only=True)
class Recorded:
    """What training left: losses, gradients of each step, weights and state by name."""

    losses: list[float] = field(default_factory=list)
    grads: list[dict[str, torch.Tensor]] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    state: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)


def recorded(run: Run, batches: list[Any]) -> Recorded:
    """Train `run` on `batches`."""
    found = Recorded()
    for batch in batches:
        loss = loss_of(run.compiled, batch)
        loss.backward()
        found.grads.append({name: param.grad.clone() for name, param in run.model.named_parameters()})
        run.optimizer.step()
        run.optimizer.zero_grad()
        found.losses.append(loss.item())
    found.state = state_of(run)
    found.weights = {name: param.detach().clone() for name, param in run.model.named_parameters()}
    return found


def state_of(run: Run) -> dict[str, dict[str, torch.Tensor]]:
    names = [name for name, _ in run.model.named_parameters()]
    state = run.optimizer.state_dict()["state"]
    return {names[key]: {kind: entry[kind].clone() for kind in sorted(entry)} for key, entry in state.items()}


@functools.cache
def on_device() -> Recorded:
    """Train by the plainest plan."""
    with mixed_run(attention(), sentences(1)[0]) as run:
        return recorded(run, sentences(STEPS))


COMBINATIONS = [
    *covering(("device", "split", "host"), list(Update), (0.0,)),
    ("split", Update.ACROSS_STEPS, 0.5),
    pytest.param("host", Update.ACROSS_STEPS, 0.5, marks=pytest.mark.slow),
    pytest.param("host", Update.AFTER_BACKWARD, 1.0, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("home", "update", "share"), COMBINATIONS)
def test_placements_and_moments_change_no_bit(home: str, update: Update, share: float) -> None:
    expected, batches = on_device(), sentences(STEPS)
    with mixed_run(attention(), batches[0], home=home, update=update, share=share) as run:
        found = recorded(run, batches)
        assert {bucket.update for bucket in buckets_of(run)} == {update}
    assert found.losses == expected.losses
    assert_same_tensors(expected.weights, found.weights)
    for name, entry in expected.state.items():
        assert_same_tensors(entry, found.state[name])


def replayed(found: Recorded, master: torch.Tensor, name: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return what the host kernel makes of an fp32 master and the recorded gradients."""
    master, exp_avg, exp_avg_sq = master.clone(), torch.zeros_like(master), torch.zeros_like(master)
    param = torch.empty_like(master, dtype=dtype)
    for step, grads in enumerate(found.grads, start=1):
        scalars = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
        mixed_adamw(master, exp_avg, exp_avg_sq, grads[name], param, step, **scalars)
    return {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "master": master, "param": param}


def in_fp64(found: Recorded, master: torch.Tensor, name: str) -> torch.Tensor:
    """Return what AdamW in fp64 makes of the same."""
    own = nn.Parameter(master.double())
    optimizer = torch.optim.AdamW([own], foreach=False, **ADAM)
    for grads in found.grads:
        own.grad = grads[name].double()
        optimizer.step()
    return own.detach()


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_masters_match_the_kernel_and_fp64(dtype: torch.dtype) -> None:
    model = attention()
    if dtype == BF16:
        found = on_device()
    else:
        with mixed_run(model, sentences(1)[0], home="host", update=Update.ACROSS_STEPS, dtype=dtype) as run:
            found = recorded(run, sentences(STEPS))
    for name, param in model.named_parameters():
        expected = replayed(found, param.detach(), name, dtype)
        master = found.state[name]["master"]
        for kind in ("master", "exp_avg", "exp_avg_sq"):
            assert found.state[name][kind].dtype == torch.float32
            assert torch.equal(found.state[name][kind], expected[kind])
        # A split master rounds ties away from zero, the kernel with a whole one to even.
        is_tie = (master.view(torch.int32) & 0xFFFF) == 0x8000 if dtype == BF16 else torch.zeros_like(master).bool()
        assert torch.equal(found.weights[name][~is_tie], expected["param"][~is_tie])
        assert found.weights[name].dtype == dtype
        # Between 1 and 2 neighbours in fp32 are 1.2e-7 apart.
        error = (master - in_fp64(found, param.detach(), name)).abs().max()
        assert error < (1e-7 if name != "norm.weight" else 5e-7)


def test_prepare_keeps_every_bit_of_fp32_weights() -> None:
    model, batches = ladder(), [batch.to(BF16) for batch in rows(1)]
    run = mixed_of(model, adam={**ADAM, "lr": 0.0})
    run.train(batches)
    masters = {name: entry["master"] for name, entry in state_of(run).items()}
    assert_same_tensors({name: param.detach() for name, param in model.named_parameters()}, masters)


def test_weights_loaded_after_prepare_become_their_masters() -> None:
    run, batches = mixed_of(ladder(), adam={**ADAM, "lr": 0.0}), [batch.to(BF16) for batch in rows(1)]
    torch.manual_seed(1)
    run.model.load_state_dict(Ladder().state_dict())
    run.train(batches)
    for name, param in run.model.named_parameters():
        assert torch.equal(state_of(run)[name]["master"], param.float())


def test_host_bytes_are_fourteen_a_parameter() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 512, bias=False) for _ in range(2)), nn.Flatten(0))
    model[1] = nn.Linear(512, 256, bias=False)
    before = live_slab_bytes()
    run = mixed_of(model, device_memory=None)
    numel = sum(param.numel() for param in model.parameters())
    assert live_slab_bytes() - before == 2 * numel  # the low halves
    with small_buckets(lambda plan: plan), pytest.raises(elixir.NoFeasiblePlan) as raised:
        mixed_of(model, device_memory=1).compiled(torch.ones(1, 256, dtype=BF16)).sum().backward()
    del run
    before = live_slab_bytes()
    with small_buckets(lambda plan: plan):
        run = mixed_of(model, device_memory=raised.value.needed_bytes)
        for _ in range(2):
            run.compiled(torch.ones(1, 256, dtype=BF16)).sum().backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
    plan = elixir.compilations(run.model)[0].plan
    assert {bucket.param.value for bucket in plan.placements} == {"host"}
    assert sum(bucket.state_nbytes for bucket in plan.buckets) == 10 * numel
    assert live_slab_bytes() - before == 14 * numel


@pytest.mark.parametrize("options", [{"amsgrad": True}, {"maximize": True, "weight_decay": 0.1}, {"lr": "tensor"}])
def test_options_of_adamw(options: dict[str, Any]) -> None:
    """Masters begin as fp32 weights of torch's own AdamW, which gets the same gradients."""
    model, batches = ladder(), [batch.to(BF16) for batch in rows(6)]
    if "lr" in options:
        options = {"lr": torch.tensor(1e-3)}
    with mixed_run(model, batches[0], home="split", update=Update.ACROSS_STEPS, adam={**ADAM, **options}) as run:
        found = recorded(run, batches)
    optimizer = torch.optim.AdamW(model.parameters(), **{**ADAM, **options})
    for grads in found.grads:
        for name, param in model.named_parameters():
            param.grad = grads[name].float()
        optimizer.step()
    for (name, param), entry in zip(model.named_parameters(), optimizer.state.values(), strict=True):
        torch.testing.assert_close(found.state[name]["master"], param.detach(), rtol=0, atol=2e-7)
        assert found.state[name].keys() == {*entry, "master"}


def test_groups_and_parameters_without_a_master() -> None:
    """Groups have hyperparameters of their own; fp64 has no master and is updated as ever."""
    model, batches = ladder(), [batch.to(BF16) for batch in rows(5)]
    with mixed_run(model, batches[0], home="host", update=Update.ACROSS_STEPS) as run:
        params = list(run.model.parameters())
        loose = nn.Parameter(torch.ones(7, dtype=torch.float64))
        groups = [{"params": params[::2], "lr": 0.0}, {"params": params[1::2]}, {"params": [loose]}]
        run.optimizer = HybridAdamW(groups, **ADAM)
        for batch in batches:
            loss_of(run.compiled, batch).backward()
            loose.grad = torch.ones_like(loose)
            run.optimizer.step()
            run.optimizer.zero_grad()
        for index, (param, before) in enumerate(zip(params, model.parameters(), strict=True)):
            assert torch.equal(param, before.to(BF16)) == (index % 2 == 0)
    twin = nn.Parameter(torch.ones(7, dtype=torch.float64))
    expected = torch.optim.AdamW([twin], fused=True, **ADAM)
    for _ in batches:
        twin.grad = torch.ones_like(twin)
        expected.step()
    assert torch.equal(loose, twin)
    assert "master" not in run.optimizer.state_dict()["state"][len(params)]


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_state_loads_in_both_directions(dtype: torch.dtype) -> None:
    """Across steps, and saved while updates are on their way."""
    model, batches = ladder(), [batch.to(dtype) for batch in rows(8)]
    arguments = {"home": "host", "update": Update.ACROSS_STEPS, "dtype": dtype}
    with mixed_run(model, batches[0], **arguments) as run, mixed_run(model, batches[0], **arguments) as other:
        run.train(batches[:4])
        saved = copy.deepcopy(run.optimizer.state_dict())
        weights = {name: value.clone() for name, value in run.model.state_dict().items()}
        other.train(batches[:1])
        assert in_flight(other) > 0
        other.optimizer.load_state_dict(saved)  # writes the parameters too, as halves of their masters
        assert_same_tensors(weights, other.model.state_dict())
        run.train(batches[4:])
        other.train(batches[4:])
        assert_same_tensors(run.weights, other.weights)
        for name, entry in state_of(run).items():
            assert_same_tensors(entry, state_of(other)[name])
        into_torch = torch.optim.AdamW(copy.deepcopy(model).parameters())
        into_torch.load_state_dict(saved)
        step = into_torch.state_dict()
        for param in into_torch.param_groups[0]["params"]:
            param.grad = torch.ones_like(param)
        into_torch.step()
        entries = {key: {k: v for k, v in e.items() if k != "master"} for key, e in saved["state"].items()}
        other.optimizer.load_state_dict({**step, "state": entries})
        for name, param in other.model.named_parameters():
            assert torch.equal(state_of(other)[name]["master"], param.float())
        other.train(batches[:1])


def scaled_step(scaler: torch.amp.GradScaler, max_norm: float | None = None) -> training.Step:
    def step(compiled: Any, optimizer: Any, batch: Any) -> torch.Tensor:
        loss = loss_of(compiled, batch)
        scaler.scale(loss).backward()
        if max_norm is not None:
            optimizer.clip_grad_norm_(max_norm, grad_scale=scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss

    return step


@pytest.mark.parametrize("home", ["device", "host"])
def test_float16_with_a_scaler_skips_an_overflow_completely(home: str) -> None:
    """A loss scale that is a power of two changes no bit where nothing is subnormal without it."""
    model, batches = ladder(), [batch.to(FP16) for batch in rows(5)]
    adam = {**ADAM, "eps": 1e-6}
    arguments = {"home": home, "update": Update.ACROSS_STEPS, "dtype": FP16, "adam": adam}
    with mixed_run(model, batches[0], **arguments) as run:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
        run.train(batches[:3], scaled_step(scaler))
        before, kept = run.weights, state_of(run)
        run.train([torch.full_like(batches[3], float("inf"))], scaled_step(scaler))
        assert_same_tensors(before, run.weights)
        for name, entry in kept.items():
            assert_same_tensors(entry, state_of(run)[name])
        assert scaler.get_scale() == 2.0**9
        run.train(batches[3:], scaled_step(scaler))
        assert state_of(run)["steps.0.weight"]["step"] == 5
    with mixed_run(model, batches[0], **arguments) as plain:
        plain.train(batches)
    for name, entry in state_of(plain).items():
        torch.testing.assert_close(state_of(run)[name]["master"], entry["master"], rtol=0, atol=1e-4)


def test_a_scaler_in_the_backward_is_refused() -> None:
    model, batches = ladder(), [batch.to(FP16) for batch in rows(1)]
    with mixed_run(model, batches[0], home="host", update=Update.IN_BACKWARD, dtype=FP16) as run:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        with pytest.raises(GradientsChanged, match="after_backward"):
            run.train(batches, scaled_step(scaler))


@pytest.mark.parametrize("home", ["device", "host"])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_clipping_multiplies_in_the_update(home: str, dtype: torch.dtype) -> None:
    model, batches = ladder(), [batch.to(dtype) for batch in rows(4)]
    norms, masters = [], {name: param.detach().clone() for name, param in model.named_parameters()}
    reference = torch.optim.AdamW([nn.Parameter(master) for master in masters.values()], **ADAM)
    with mixed_run(model, batches[0], home=home, update=Update.ACROSS_STEPS, dtype=dtype) as run:
        for batch in batches:
            loss_of(run.compiled, batch).backward()
            grads = [param.grad.clone() for param in run.model.parameters()]
            eager = torch.nn.utils.get_total_norm([grad.float() for grad in grads])
            norms.append(run.optimizer.clip_grad_norm_(1e-3))
            torch.testing.assert_close(norms[-1], eager, rtol=1e-6, atol=0)
            torch.testing.assert_close(run.optimizer.clip_grad_norm_(1.0), torch.tensor(1e-3), rtol=1e-2, atol=0)
            assert_same_tensors(dict(enumerate(grads)), dict(enumerate(p.grad for p in run.model.parameters())))
            run.optimizer.step()
            run.optimizer.zero_grad()
            for param, grad in zip(reference.param_groups[0]["params"], grads, strict=True):
                param.grad = grad.float() * min(1e-3 / (float(eager) + 1e-6), 1.0)
            reference.step()
        assert min(norms) > 1e-3
        found = state_of(run)
    for name, param in zip(masters, reference.param_groups[0]["params"], strict=True):
        torch.testing.assert_close(found[name]["master"], param.detach(), rtol=0, atol=1e-6)


def test_a_clip_is_forgotten_with_its_gradients() -> None:
    model, batches = ladder(), [batch.to(BF16) for batch in rows(2)]
    with mixed_run(model, batches[0]) as run, mixed_run(model, batches[0]) as other:
        loss_of(run.compiled, batches[0]).backward()
        run.optimizer.clip_grad_norm_(1e-6)
        run.optimizer.zero_grad()
        assert_same_tensors(recorded(other, batches).weights, recorded(run, batches).weights)


def test_fp32_clips_as_torch_does() -> None:
    params = [nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(4))]
    twins = copy.deepcopy(params)
    optimizer = HybridAdamW(params)
    for own in (params, twins):
        for param in own:
            param.grad = torch.full_like(param, 0.5)
    assert torch.equal(optimizer.clip_grad_norm_(0.1), torch.nn.utils.clip_grad_norm_(twins, 0.1))
    for param, twin in zip(params, twins, strict=True):
        assert torch.equal(param.grad, twin.grad)


def test_torchs_own_clipping_still_works() -> None:
    model, batches = ladder(), [batch.to(BF16) for batch in rows(2)]
    with mixed_run(model, batches[0], home="host", update=Update.ACROSS_STEPS) as run:
        loss_of(run.compiled, batches[0]).backward()
        grads = [param.grad.clone() for param in run.model.parameters()]
        expected = torch.nn.utils.get_total_norm(grads)
        assert torch.equal(torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1e-3), expected)
        run.optimizer.step()


def test_device_and_host_kernels_agree_up_to_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks, the last one short, for each master, with every option."""
    monkeypatch.setattr(adamw_rule, "BLOCK", 64)
    rule = adamw_rule.AdamWRule()
    for dtype in (BF16, FP16):
        torch.manual_seed(2)
        master = torch.randn(11, 13) * 0.05
        made = []
        for _ in range(2):
            weight = torch.empty_like(master, dtype=dtype)
            state = {name: torch.zeros_like(master) for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")}
            if dtype == BF16:
                state["master_low"] = torch.empty_like(master, dtype=torch.int16)
                flat_step.split(master, weight, state["master_low"])
            else:
                weight.copy_(master)
                state["master"] = master.clone()
            made.append((weight, {**state, "step": torch.zeros(())}))
        group = {**ADAM, "amsgrad": True, "maximize": True, GRAD_SCALE: 0.25}
        for step in range(10):
            grad = torch.randn(11, 13, generator=torch.Generator().manual_seed(step)).to(dtype)
            rule.update([ParamUpdate(made[0][0], grad, made[0][1])], group)
            rule._on_device([ParamUpdate(made[1][0], grad.t().contiguous().t(), made[1][1])], group)
        (weight, state), (other, found) = made
        assert float(found["step"]) == float(state["step"]) == 10
        for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
            torch.testing.assert_close(found[name], state[name], rtol=1e-5, atol=1e-7)
        masters = [
            flat_step.joined(weight, entry["master_low"]) if dtype == BF16 else entry["master"]
            for weight, entry in ((weight, state), (other, found))
        ]
        torch.testing.assert_close(*masters, rtol=0, atol=1e-7)
        torch.testing.assert_close(other, weight, rtol=1e-2, atol=0)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_parameters_in_one_batch_get_the_bits_and_fewer_kernels_than_alone(dtype: torch.dtype) -> None:
    rule = adamw_rule.AdamWRule()

    def made() -> list[ParamUpdate]:
        generator = torch.Generator().manual_seed(5)
        found = []
        for numel in (1, 7, 64, 129, 0):
            master = torch.randn(numel, generator=generator)
            weight, grad = torch.empty(numel, dtype=dtype), torch.randn(numel, generator=generator).to(dtype)
            state = {"exp_avg": torch.zeros(numel), "exp_avg_sq": torch.zeros(numel), "step": torch.ones(())}
            if dtype == BF16:
                state["master_low"] = torch.empty(numel, dtype=torch.int16)
                flat_step.split(master, weight, state["master_low"])
            else:
                weight.copy_(master)
                state["master"] = master
            found.append(ParamUpdate(weight, grad, state))
        return found

    group = {**ADAM, "amsgrad": False, "maximize": False, GRAD_SCALE: 0.5}
    alone, together = made(), made()
    with CountedOps() as counted:
        for each in alone:
            rule._on_device([each], group)
    num_alone, counted.num_ops = counted.num_ops, 0
    with counted:
        rule._on_device(together, group)
    assert counted.num_ops < 0.8 * num_alone
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one.weight, other.weight)
        assert all(torch.equal(value, other.state[name]) for name, value in one.state.items())


class CountedOps(TorchDispatchMode):
    """Counts ops that compute something."""

    num_ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_ops += not func.is_view
        return func(*args, **(kwargs or {}))


def test_optimizers_without_masters_raise_master_ignored() -> None:
    run, batches = mixed_of(ladder()), [batch.to(BF16) for batch in rows(1)]
    loss_of(run.compiled, batches[0]).backward()
    before = run.weights
    for optimizer in (torch.optim.SGD(run.model.parameters(), lr=0.1), torch.optim.AdamW(run.model.parameters())):
        with pytest.raises(elixir.MasterIgnored, match=rf"steps\.0.*bfloat16.*{type(optimizer).__name__}.*HybridAdamW"):
            optimizer.step()
    assert_same_tensors(before, run.weights)


def test_a_cast_comes_before_the_compilation() -> None:
    batch = rows(1)[0]
    for model in (ladder(), elixir.prepare(ladder()), ladder().bfloat16()):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="elixir", options={"param_dtype": "bfloat16", "report": False})
        with pytest.raises(elixir.WrongDtype, match=r"prepare\(model, param_dtype='bfloat16'\)") as raised:
            compiled(batch.to(next(model.parameters()).dtype))
        assert raised.value.parameter == "steps.0.weight"


def test_preparing_again_changes_nothing_or_raises_why() -> None:
    model = elixir.prepare(ladder(), param_dtype="bfloat16")
    before = model.state_dict()
    assert elixir.prepare(model, param_dtype="bfloat16") is model
    assert_same_tensors(before, model.state_dict())
    with pytest.raises(elixir.UnsupportedModel, match=r"steps\.0.*torch\.float32.*first call"):
        elixir.prepare(elixir.prepare(ladder()), param_dtype="float16")
    with pytest.raises(elixir.InvalidOption, match=r"'bfloat16', 'float16', or None"):
        elixir.prepare(ladder(), param_dtype="float8")


def test_which_parameters_prepare_casts() -> None:
    """Frozen parameters keep no rest; buffers, integers and fp64 stay; gradients come along; meta is created first."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3, dtype=torch.float64), nn.LSTM(3, 3))
    model[0].bias.requires_grad_(False)
    model[0].weight.grad = torch.ones(3, 3)
    before = live_slab_bytes()
    elixir.prepare(model, param_dtype="bfloat16")
    kept = [name for name, param in model.named_parameters() if param.dtype == BF16 and has_master(param)]
    assert [name for name, _ in model.named_parameters() if not name.startswith("2.")] == kept
    assert model[0]._parameters["weight"].grad.dtype == BF16
    assert model[1].running_mean.dtype == torch.float32
    assert live_slab_bytes() - before == 4096 * sum(p.requires_grad for p in model.parameters() if p.dtype == BF16)
    with torch.device("meta"):
        large = nn.Linear(5, 5)
    elixir.prepare(large, "cpu", param_dtype="float16")
    assert large._parameters["weight"].dtype == FP16
    assert large._parameters["weight"].abs().max() > 0


@pytest.mark.parametrize(("dtype", "per_element"), [(None, 8), ("bfloat16", 10), ("float16", 12)])
def test_a_plan_counts_the_state(dtype: str | None, per_element: int) -> None:
    model, batch = attention(), sentences(1)[0]
    plan = elixir.plan(model, (batch,), hardware="a100-40g", options={"param_dtype": dtype, "inner": "aot_eager"})
    numel = sum(param.numel() for param in model.parameters())
    assert sum(bucket.state_nbytes for bucket in plan.buckets) == per_element * numel
    assert sum(bucket.nbytes for bucket in plan.buckets) == (4 if dtype is None else 2) * numel
    assert next(model.parameters()).dtype == torch.float32
    own = elixir.prepare(copy.deepcopy(model), param_dtype=dtype)
    again = elixir.plan(own, (batch,), hardware="a100-40g", options={"inner": "aot_eager"})
    assert again.buckets == plan.buckets


def test_a_gpt2_trains() -> None:
    model = seeded(small_gpt2, num_layers=1)
    batches = hf_batches(1) * 8
    run = mixed_of(model, adam={**ADAM, "lr": 3e-3}).train(batches)
    losses = [loss.item() for loss in run.losses]
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize(("home", "update"), [("split", Update.AFTER_BACKWARD), *(("host", each) for each in Update)])
def test_micro_batches_add_up_in_fp32(home: str, update: Update) -> None:
    """The sum is that of the gradients that each alone would give; the next step uses the same memory."""
    model, batches = ladder(), [batch.to(BF16) for batch in rows(9)]
    with mixed_run(model, batches[0], home=home, update=update, reduce_dtype="float32") as run:
        params, held_bytes = list(run.model.parameters()), []
        for first in range(0, 9, 3):
            alone = []
            with run.optimizer.accumulating():
                for batch in batches[first : first + 3]:
                    loss_of(run.compiled, batch).backward()
                    assert {param.grad.dtype for param in params} == {BF16}
                    alone.append([param.grad.clone() for param in params])
                    run.optimizer.zero_grad()
                for batch in batches[first : first + 2]:
                    loss_of(run.compiled, batch).backward()
            loss_of(run.compiled, batches[first + 2]).backward()
            for param, one, two, three in zip(params, *alone, strict=True):
                assert torch.equal(param.grad, one.float() + two + three)
            held_bytes.append(live_slab_bytes())
            run.optimizer.step()
            run.optimizer.zero_grad()
        assert held_bytes[1] == held_bytes[2]
        run.optimizer.wait()
        step = state_of(run)["steps.0.weight"]["step"]
    assert step == 3


def test_gradient_hooks_see_micro_batches_that_add_in_fp32() -> None:
    batches, seen = [batch.to(BF16) for batch in rows(2)], []
    run = mixed_of(ladder(), reduce_dtype="float32")
    param = run.model.steps[0]._parameters["weight"]
    param.register_hook(lambda grad: seen.append(grad.clone()))
    for batch in batches:
        loss_of(run.compiled, batch).backward()
    assert [grad.dtype for grad in seen] == [BF16, BF16]
    assert torch.equal(param.grad, seen[0].float() + seen[1])


# ----------------------------------------------------------------------------------------------------------------------
# Whose masters are whose: what happens to them when optimizers, dtypes and gradients come and go.


class Wide(nn.Module):
    """One linear layer, which Elixir prepares and nobody compiles."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)).square().mean()


def wide(dtype: str | None = "bfloat16") -> nn.Module:
    torch.manual_seed(2)
    return elixir.prepare(Wide(), param_dtype=dtype)


def backward(model: nn.Module, scale: float = 1.0) -> None:
    """Give every parameter a gradient."""
    (scale * model(rows(1)[0].to(next(model.parameters()).dtype))).backward()


def copies(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def masters(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {str(key): entry["master"] for key, entry in optimizer.state_dict()["state"].items()}


def test_the_clip_of_a_skipped_step_does_not_reach_the_next() -> None:
    found = []
    for skips in (False, True):
        model = wide()
        optimizer = HybridAdamW(model.parameters(), lr=1e-2)
        if skips:
            backward(model, float("inf"))
            assert not torch.isfinite(optimizer.clip_grad_norm_(1e-3))
            model.zero_grad()  # the loop drops the gradients, and the optimizer is not told
        backward(model)
        norm = optimizer.clip_grad_norm_(1e-3)
        optimizer.step()
        found.append(copies(model) | masters(optimizer) | {"norm": norm})
    assert_same_tensors(*found)


def test_two_clips_of_one_gradient_both_count() -> None:
    model = wide()
    optimizer = HybridAdamW(model.parameters(), lr=1e-2)
    backward(model)
    first, second = optimizer.clip_grad_norm_(1e-2), optimizer.clip_grad_norm_(1e-3)
    assert first > 1e-2
    assert float(second) == pytest.approx(1e-2, rel=1e-4)
    optimizer.step()
    assert not torch.equal(masters(optimizer)["0"], wide().linear.weight.detach().float())


@pytest.mark.filterwarnings("ignore:HybridNoisy is not element-wise")
@pytest.mark.parametrize("update", list(Update))
def test_a_class_that_updates_all_parameters_at_once_is_refused_each_time(update: Update) -> None:
    model = elixir.prepare(ladder(), param_dtype="bfloat16")
    before, batch = copies(model), rows(1)[0].bfloat16()
    optimizer = elixir.hybrid(Noisy)(model.parameters(), lr=0.1)
    with small_buckets(lambda plan: placed(plan, "split", 0.0, update)):
        compiled = torch.compile(model, backend="elixir", options={"inner": "aot_eager", "report": False})
        for _ in range(2):
            compiled(batch).backward()
            with pytest.raises(
                elixir.MasterIgnored, match=r"steps\.0.* HybridNoisy does not update: .*draws random numbers"
            ):
                optimizer.step()
            optimizer.zero_grad()
    assert_same_tensors(before, copies(model))
    assert isinstance(optimizer, Hybrid)
    assert not optimizer.state


def test_the_newest_living_optimizer_keeps_the_masters() -> None:
    model = wide()
    first = HybridAdamW(model.parameters())
    last = HybridAdamW(model.parameters())
    before = copies(model)
    backward(model)
    with pytest.raises(elixir.MasterIgnored, match="which another optimizer keeps, made after this HybridAdamW"):
        first.step()
    assert_same_tensors(before, copies(model))
    del last
    gc.collect()
    first.step()
    assert not torch.equal(before["linear.weight"], model.linear.weight)


def test_a_parameter_that_is_cast_back_has_no_master() -> None:
    model, plain = wide(), wide(None)
    optimizer = HybridAdamW(model.parameters())
    model.float()
    plain.load_state_dict(model.state_dict())
    assert not any(map(has_master, model.parameters()))
    expected = torch.optim.AdamW(plain.parameters(), lr=1e-3, fused=True)
    for each, own in ((model, optimizer), (plain, expected)):
        backward(each)
        own.step()
    assert_same_tensors(copies(plain), copies(model))


def test_state_made_before_the_cast_gets_the_master() -> None:
    model = Wide()
    optimizer = HybridAdamW(model.parameters())
    backward(model)
    with pytest.warns(elixir.NoGraphCaptured):
        optimizer.step()
    optimizer.zero_grad()
    weights = copies(model)
    elixir.prepare(model, param_dtype="bfloat16")
    optimizer.param_groups[0]["lr"] = 0.0
    backward(model)
    optimizer.step()
    assert_same_tensors(weights, dict(zip(weights, masters(optimizer).values(), strict=True)))
    assert [entry["step"].item() for entry in optimizer.state.values()] == [2, 2]


def test_a_rank_with_an_empty_shard_counts_steps() -> None:
    empty = torch.empty(0, 4, dtype=torch.bfloat16)
    state = {"step": torch.tensor(0.0), "exp_avg": empty.float(), "exp_avg_sq": empty.float()}
    state["master_low"] = torch.empty(0, 4, dtype=torch.int16)
    group = HybridAdamW([nn.Parameter(torch.ones(1))]).param_groups[0]
    AdamWRule().update([ParamUpdate(empty, empty.clone(), state)], group)
    assert state["step"] == 1.0
