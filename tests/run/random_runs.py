"""Random training runs under random budgets: each is compared with torch's `aot_eager`, and its peak with its plan.

    python -m tests.run.random_runs --runs 200          prints a line for each run, and fails if any run is wrong
    python -m tests.run.random_runs --runs 200 --others the same with convolutions, Fourier transforms, RNNs captured
                                                        whole, losses of all kinds, `torch.cond`, and graph breaks
    python -m tests.run.random_runs --device cuda       on an accelerator
    python -m tests.run.random_runs --first 0 --runs 20 --save      keeps the figures of the runs, which tests compare

A run is drawn from its seed alone: model, budget, micro-batches per step, clipping, update mode, treatments of
activations. If the budget is below the smallest possible one, the run trains under the smallest, which the error names.
"""

import argparse
import gc
import json
import random
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_map

import elixir_compile as elixir
from elixir_compile.compat.platforms import platform_of
from elixir_compile.runtime.measure import Resident
from elixir_compile.session import machine
from elixir_compile.session.over_budget import TOLERATED_BYTES
from tests.run.models import seeded
from tests.run.training import different, fused_adamw, hybrid_adamw, loss_of, same_losses

SLACK_BYTES = 4096
"""Step counters of the optimizer, tickets and losses: beside a GPU most of them are host tensors."""
_MOST_ERRORS = 3
"""Attempts of a run: a budget may be too small for one micro-batch, then for the gradients of several."""
NUM_STEPS, NUM_STEPS_BROKEN = 2, 9
"""Steps of a run, and of one with code between graphs: its bytes are known once a step was measured, and steps are
planned again with room for them. The last step is measured."""


class Stack(nn.Module):
    """Residual blocks of one width, with a loss over 64 classes."""

    def __init__(self, width: int, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(num_blocks)
        )
        self.head = nn.Linear(width, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return functional.cross_entropy(self.head(x), torch.zeros(len(x), dtype=torch.int64, device=x.device))


class Images(nn.Module):
    """Convolutions of the kinds drawn, each with a norm or without, at two resolutions."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        width = chance.choice((8, 16))
        makers: list[Callable[[], nn.Module]] = [
            lambda: nn.Conv2d(width, width, 3, padding=1),
            lambda: nn.Conv2d(width, width, 1),
            lambda: nn.Conv2d(width, width, 3, padding=1, groups=chance.choice((2, width))),
            lambda: nn.ConvTranspose2d(width, width, 3, padding=1),
        ]
        norms: list[Callable[[], nn.Module]] = [
            nn.Identity,
            lambda: nn.BatchNorm2d(width),
            lambda: nn.GroupNorm(2, width),
        ]
        self.start = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(chance.choice(makers)(), chance.choice(norms)(), nn.SiLU()) for _ in range(4)
        )
        self.head = nn.Conv2d(width, 3, 1)
        self.loss = chance.choice(LOSSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.start(x)
        for number, block in enumerate(self.blocks):
            y = y + block(y)
            if number == 1:
                y = functional.avg_pool2d(y, 2)
        return self.loss(self.head(functional.interpolate(y, scale_factor=2.0)), x)


class Filter(nn.Module):
    """A filter in the frequencies of the last dimension but one, and a projection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft(x, dim=1)
        return x + self.out(torch.fft.irfft(spectrum * self.scale, n=x.shape[1], dim=1))


class Branching(nn.Module):
    """A block that takes one of two ways by its input, which hold other activations; a way may branch again."""

    def __init__(self, width: int, *, is_nested: bool) -> None:
        super().__init__()
        self.out = nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.inner = Branching(width, is_nested=False) if is_nested else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def long(value: torch.Tensor) -> torch.Tensor:
            found = self.narrow(functional.gelu(self.wide(value)))
            return found if self.inner is None else found + self.inner(found)

        return x + torch.cond(x.mean() > x[0].mean(), long, lambda value: torch.tanh(self.out(value)), (x,))


class Sequences(nn.Module):
    """Blocks on sequences, of one kind: filters in frequencies, layers behind a graph break, captured whole RNNs, or
    blocks that branch by their input."""

    def __init__(self, chance: random.Random, kind: str) -> None:
        super().__init__()
        width = chance.choice((32, 64))
        self.kind = kind
        self.rnn = chance.choice((nn.GRU, nn.RNN))(width, width, batch_first=True) if kind == "recurrent" else None
        makers: dict[str, Callable[[int], nn.Module]] = {
            "frequencies": Filter,
            "recurrent": lambda width: nn.Linear(width, width),
            "broken": Filter,
            "branching": lambda width: Branching(width, is_nested=chance.random() < 0.3),
        }
        self.blocks = nn.ModuleList(makers[kind](width) for _ in range(3))
        self.loss = chance.choice(LOSSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for number, block in enumerate(self.blocks):
            y = torch.tanh(block(y))
            if self.kind == "broken" and number == 1:
                torch._dynamo.graph_break()
        if self.rnn is not None:
            y = self.rnn(y)[0]
        return self.loss(y, x)


LOSSES: list[Callable[..., torch.Tensor]] = [
    functional.mse_loss,
    functional.smooth_l1_loss,
    functional.soft_margin_loss,
    functional.huber_loss,
    functional.l1_loss,
    lambda y, x: functional.mse_loss(y, x, reduction="sum") / 1000,
    lambda y, x: functional.binary_cross_entropy_with_logits(y, x.sigmoid()),
    lambda y, x: functional.kl_div(y.log_softmax(-1), x.softmax(-1), reduction="batchmean"),
    lambda y, x: functional.cosine_similarity(y, x, dim=-1).mean(),
]


def _images(chance: random.Random) -> tuple[nn.Module, Callable[[torch.Generator], Any]]:
    rows, side = chance.choice((2, 8)), chance.choice((16, 24))
    return seeded(Images, chance), lambda generator: torch.randn(rows, 3, side, side, generator=generator)


def _sequences(kind: str) -> Callable[[random.Random], tuple[nn.Module, Callable[[torch.Generator], Any]]]:
    def make(chance: random.Random) -> tuple[nn.Module, Callable[[torch.Generator], Any]]:
        model = seeded(Sequences, chance, kind)
        rows, width = chance.choice((4, 16)), model.blocks[0].out.in_features if kind != "recurrent" else 0
        width = width or model.blocks[0].in_features
        length = 8 if kind == "recurrent" else 64
        return model, lambda generator: torch.randn(rows, length, width, generator=generator)

    return make


def _gpt2(chance: random.Random) -> tuple[nn.Module, Callable[[torch.Generator], Any]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=2, n_embd=96, n_head=4, vocab_size=512, n_positions=64, use_cache=False,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    num_rows = chance.choice((2, 8, 16))

    def batch(generator: torch.Generator) -> Any:
        ids = torch.randint(0, 512, (num_rows, 64), generator=generator)
        return {"input_ids": ids, "labels": ids}

    return seeded(GPT2LMHeadModel, config).train(), batch


def _stack(chance: random.Random) -> tuple[nn.Module, Callable[[torch.Generator], Any]]:
    width, num_rows = chance.choice((128, 192, 256)), chance.choice((16, 256, 1024))
    return (
        seeded(Stack, width, chance.randint(2, 4)),
        lambda generator: torch.randn(num_rows, width, generator=generator),
    )


_MODELS: dict[str, Callable[[random.Random], tuple[nn.Module, Callable[[torch.Generator], Any]]]] = {
    "gpt2": _gpt2,
    "stack": _stack,
    "images": _images,
    "frequencies": _sequences("frequencies"),
    "recurrent": _sequences("recurrent"),
    "broken": _sequences("broken"),
    "branching": _sequences("branching"),
}
_EXACT = ("gpt2", "stack")
"""Models of one graph whose plans say the peak within 1 %. Others may have results that their kernels do not make."""
_OTHERS = tuple(name for name in _MODELS if name not in _EXACT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """The choices of one run."""

    seed: int
    model: str
    share: float
    """The budget as a share of the peak of a step by torch."""
    num_micro_batches: int
    clips: bool
    update: str
    activations: str
    planner: str
    is_prepared: bool
    keeps_zeros: bool
    """Whether `zero_grad(set_to_none=False)` leaves zeros for the next step."""
    accumulate: bool
    """The option `accumulate`."""
    num_steps: int = NUM_STEPS
    """The number of steps."""

    @classmethod
    def of(cls, seed: int) -> "Draw":
        """Return the run of `seed`."""
        chance = random.Random(seed)
        clips, num_micro_batches = chance.random() < 0.5, chance.choice((1, 2, 2, 3, 4))
        modes = ("auto", "after_backward", "across_steps") if clips else ("auto", "across_steps", "in_backward")
        return cls(
            seed=seed,
            model=chance.choice(("gpt2", "stack", "stack", "stack", "stack")),
            share=chance.uniform(0.15, 1.0),
            num_micro_batches=num_micro_batches,
            clips=clips,
            update=chance.choice(modes),
            activations=chance.choice(("any", "any", "keep", "recompute", "offload")),
            planner=chance.choice(("milp", "greedy")),
            is_prepared=chance.random() < 0.8,
            keeps_zeros=chance.random() < 0.15,
            accumulate=num_micro_batches > 1 and chance.random() < 0.3,
        )

    @classmethod
    def of_others(cls, seed: int) -> "Draw":
        """Return the run of `seed` with a model whose kernels, or whose graphs, are not those of `of`."""
        model = random.Random(f"model {seed}").choice(_OTHERS)
        return replace(cls.of(seed), model=model, num_steps=NUM_STEPS_BROKEN if model == "broken" else NUM_STEPS)

    def made(self, device: torch.device) -> tuple[nn.Module, list[Any]]:
        """Return the model on `device`, and a batch for each micro-batch of all steps on the host."""
        model, batch = _MODELS[self.model](random.Random(self.seed))
        generator = torch.Generator().manual_seed(self.seed)
        batches = [batch(generator) for _ in range(self.num_steps * self.num_micro_batches)]
        return model.to(device), batches

    def there(self, batches: list[Any], device: torch.device) -> list[Any]:
        """Return those of all `batches` that are on `device` during the last step."""
        return batches[-self.num_micro_batches :] if platform_of(device).has_own_memory else batches


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of one run."""

    draw: Draw
    budget_bytes: int
    planned_bytes: int
    peak_bytes: int
    """Peak of the last step, as the events of the allocator say."""
    unused_bytes: int = 0
    """Bytes of workspaces that the plan counts: 1 MiB in each of two threads, if a product adds a bias there."""
    reserved_bytes: int = 0
    """What the allocator of the device holds after the last step beyond what it held before the run."""
    is_same: bool
    """Whether losses and weights are bitwise those of `aot_eager`; on a GPU, close to them."""
    seconds: float

    @property
    def figures(self) -> list[int]:
        """The budget, the planned peak and the measured peak, in bytes."""
        return [self.budget_bytes, self.planned_bytes, self.peak_bytes]

    @property
    def faults(self) -> list[str]:
        """Return in words what is wrong with the run."""
        found = [] if self.is_same else ["other losses or weights than aot_eager"]
        # Code between graphs is measured, and planned around if it exceeds the budget by more than this.
        slack_bytes = TOLERATED_BYTES if self.draw.model == "broken" else SLACK_BYTES
        if self.peak_bytes > self.budget_bytes + slack_bytes:
            found.append(f"{self.peak_bytes / self.budget_bytes - 1:.1%} over the budget")
        if self.draw.model == "broken":  # code between graphs is in no plan
            return found
        more_bytes = self.planned_bytes - self.peak_bytes
        if more_bytes > 0:
            more_bytes = max(0, more_bytes - self.unused_bytes)
        # A backward that updates adds each gradient to its sum as soon as it is complete: the plan is an upper limit.
        may_be_less = self.draw.update == "in_backward" and self.draw.num_micro_batches > 1
        may_be_less = may_be_less or self.draw.model not in _EXACT
        if (-more_bytes if may_be_less else abs(more_bytes)) > 0.01 * self.planned_bytes + SLACK_BYTES:
            found.append(f"planned {more_bytes / self.planned_bytes:+.1%} off the peak")
        return found

    def __str__(self) -> str:
        kib = f"budget {self.budget_bytes >> 10} planned {self.planned_bytes >> 10} peak {self.peak_bytes >> 10} KiB"
        return f"{self.draw}: {kib}, {self.seconds:.1f} s" + "".join(f"; {fault}" for fault in self.faults)


def train(draw: Draw, compiled: Any, model: nn.Module, optimizer: Any, batches: Iterable[Any]) -> list[torch.Tensor]:
    """Train one step, and return the losses of its micro-batches."""
    losses = []
    *others, last = batches
    for batch in (*others, last):
        waits = batch is not last and isinstance(optimizer, elixir.HybridAdamW)
        with optimizer.accumulating() if waits else nullcontext():
            loss = loss_of(compiled, batch) / draw.num_micro_batches
            loss.backward()
        losses.append(loss.detach().clone())
        del loss
    if draw.clips:
        _clip(list(model.parameters()))
    optimizer.step()
    optimizer.zero_grad(set_to_none=not draw.keeps_zeros)
    return losses


def _clip(params: Sequence[nn.Parameter]) -> None:
    """Clip as `torch.nn.utils.clip_grad_norm_` does if all gradients are on one device.

    If they are on two, it adds up the norms of each device apart, so the sum is rounded otherwise.
    """
    norm = torch.nn.utils.get_total_norm([param.grad.cpu() for param in params if param.grad is not None])
    torch.nn.utils.clip_grads_with_norm_(params, 0.1, norm)


def expected_of(draw: Draw, device: torch.device) -> tuple[int, list[float], dict[str, torch.Tensor]]:
    """Return the peak of the last step, the losses and the weights of the run by torch's `aot_eager`."""
    foreign_bytes = _resident_bytes(device)
    model, batches = draw.made(device)
    torch._dynamo.reset()
    compiled, optimizer = torch.compile(model, backend="aot_eager"), fused_adamw(model.parameters())
    step = _step_of(draw, compiled, model, optimizer, batches, device)
    found = _early_losses(draw, step)
    record = elixir.measure_step(lambda: found.extend(step()), device=device.type)
    weights = {name: tensor.detach().clone().cpu() for name, tensor in model.state_dict().items()}
    return record.device_peak_bytes - foreign_bytes - _waiting_bytes(draw.there(batches, device)), found, weights


def outcome_of(draw: Draw, device: torch.device | None = None, budget_bytes: int = 0) -> Outcome:
    """Carry out the run of `draw` on `device`; None means torch's default device. The budget is that of the draw, at
    least `budget_bytes`."""
    with torch._dynamo.config.patch(allow_rnn=True):
        return _outcome_of(draw, device or torch.get_default_device(), budget_bytes)


def _outcome_of(draw: Draw, device: torch.device, least_bytes: int) -> Outcome:
    began_s = time.perf_counter()
    peak_bytes, losses, weights = expected_of(draw, device)
    fixed_bytes = machine.library_bytes(device)
    budget_bytes = max(least_bytes, fixed_bytes + int(draw.share * (peak_bytes - fixed_bytes)))
    for _ in range(_MOST_ERRORS):
        try:
            return _trained(draw, budget_bytes, losses, weights, began_s, device)
        except elixir.NoFeasiblePlan as error:
            budget_bytes = error.needed_bytes
    raise AssertionError(f"{draw}: no plan under the budgets that the errors named, the last of them {budget_bytes}")


def _step_of(
    draw: Draw, compiled: Any, model: nn.Module, optimizer: Any, batches: Sequence[Any], device: torch.device
) -> Callable[[], list[float]]:
    """Return what trains the next step at each call, from `batches` on the host, and returns its losses."""
    starts = iter(range(0, len(batches), draw.num_micro_batches))

    def step() -> list[float]:
        on_host = batches[next(starts) :][: draw.num_micro_batches]
        own = tree_map(lambda tensor: tensor.to(device), on_host)
        return [loss.item() for loss in train(draw, compiled, model, optimizer, own)]

    return step


def _early_losses(draw: Draw, step: Callable[[], list[float]]) -> list[float]:
    """Train all steps but the last, which is measured; return their losses."""
    return [loss for _ in range(draw.num_steps - 1) for loss in step()]


def _waiting_bytes(batches: list[Any]) -> int:
    """Return the bytes of all `batches` but one: a data loader holds none of them during a step."""
    nbytes = [sum({tensor.data_ptr(): tensor.nbytes for tensor in _tensors(batch)}.values()) for batch in batches]
    return sum(nbytes) - nbytes[0]


def _trained(
    draw: Draw,
    budget_bytes: int,
    losses: list[float],
    weights: dict[str, torch.Tensor],
    began_s: float,
    device: torch.device,
) -> Outcome:
    torch._dynamo.reset()
    gc.collect()
    foreign_bytes = _resident_bytes(device)
    platform_of(device).empty_cache()
    held_bytes = platform_of(device).reserved_bytes(device)
    model, batches = draw.made(device)
    if draw.is_prepared:
        model = elixir.prepare(model)
    options: dict[str, Any] = {
        "inner": "aot_eager",
        "device_memory": budget_bytes,
        "update": draw.update,
        "activations": draw.activations,
        "planner": draw.planner,
        "plan_cache": False,
        "report": False,
        "search_timeout": 1,
        "micro_batches": 1,  # in more, the bits are not those of torch
    }
    if draw.accumulate:
        options["accumulate"] = True
    compiled, optimizer = torch.compile(model, backend="elixir", options=options), hybrid_adamw(model.parameters())
    step = _step_of(draw, compiled, model, optimizer, batches, device)
    found = _early_losses(draw, step)
    planned = [_planned_bytes(compiled)]
    record = elixir.measure_step(lambda: found.extend(step()), device=device.type)
    planned.append(_planned_bytes(compiled))  # the measured step may begin with a new plan, or end with one
    waiting_bytes = _waiting_bytes(draw.there(batches, device))
    peak_bytes = record.device_peak_bytes - foreign_bytes - waiting_bytes
    same = same_losses(losses, found) and not different(weights, model.state_dict())
    return Outcome(
        draw=draw,
        budget_bytes=budget_bytes,
        planned_bytes=min(planned, key=lambda nbytes: abs(nbytes - peak_bytes)),
        peak_bytes=peak_bytes,
        reserved_bytes=max(0, platform_of(device).reserved_bytes(device) - held_bytes - waiting_bytes),
        unused_bytes=min(2 << 20, machine.library_bytes(device)),
        is_same=same,
        seconds=time.perf_counter() - began_s,
    )


def _planned_bytes(compiled: Any) -> int:
    """Return the largest peak of the plans in force."""
    plans = [record.plan for record in elixir.compilations(compiled) if not record.is_superseded]
    return max(plan.prediction.device_peak_bytes for plan in plans if plan is not None)


def _tensors(batch: Any) -> list[torch.Tensor]:
    return list(batch.values()) if isinstance(batch, dict) else [batch]


def _resident_bytes(device: torch.device) -> int:
    """Return the bytes on `device` that are there before a run. Workspaces of libraries belong to a run."""
    platform = platform_of(device)
    if platform.has_own_memory:
        platform.drop_workspaces()
        return platform.tensor_bytes(device)
    with Resident() as resident:
        return resident.nbytes


def outcomes(
    seeds: Iterable[int], draw: Callable[[int], Draw] = Draw.of, device: torch.device | None = None
) -> list[Outcome]:
    """Return the outcome of each run of `draw` on `device`, one after another in this process."""
    return [outcome_of(draw(seed), device) for seed in seeds]


SAVED = Path(__file__).with_suffix(".json")
"""The figures of runs by model and seed, and where they were measured: see `here`."""


def here() -> dict[str, object]:
    """Return on what the figures of a run depend beside this repository: another torch captures other ops, and its
    kernels have workspaces for each thread, of sizes that depend on the instructions of the processor."""
    version, instructions = torch.__version__.partition("+")[0], torch.backends.cpu.get_cpu_capability()
    return {"torch": version, "threads": torch.get_num_threads(), "instructions": instructions}


_OBJECTS_BYTES = 256
"""What torch allocates beside tensors differs from run to run: one budget of 26 by 27 bytes."""


def apart_from_saved(found: Iterable[Outcome]) -> list[str]:
    """Return the outcomes whose figures differ from the saved ones by more than `_OBJECTS_BYTES`, in words; none where
    these were not measured.

    Runs with code between graphs are left out."""
    saved = json.loads(SAVED.read_text(encoding="utf-8"))
    if saved["here"] != here():
        return []
    runs = saved["runs"]
    # What a step measures between graphs goes into its next plans, and a step is not measured while somebody profiles.
    exact = [outcome for outcome in found if outcome.draw.model != "broken"]
    names = {f"{outcome.draw.model} {outcome.draw.seed}": outcome.figures for outcome in exact}
    return [
        f"{name}: {own}, saved {runs.get(name)}"
        for name, own in names.items()
        if any(
            abs(one - other) > _OBJECTS_BYTES for one, other in zip(own, runs.get(name, [0] * len(own)), strict=True)
        )
    ]


def save(found: Iterable[Outcome]) -> None:
    """Keep the figures of the outcomes `found`, beside those of other runs that were measured here."""
    saved = json.loads(SAVED.read_text(encoding="utf-8")) if SAVED.is_file() else {}
    runs = saved["runs"] if saved.get("here") == here() else {}
    runs |= {f"{outcome.draw.model} {outcome.draw.seed}": outcome.figures for outcome in found}
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(figures)}" for name, figures in sorted(runs.items()))
    SAVED.write_text(f'{{"here": {json.dumps(here())}, "runs": {{\n{lines}\n}}}}\n', encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=200, help="number of runs")
    parser.add_argument(
        "--others", action="store_true", help="convolutions, Fourier transforms, RNNs, cond, graph breaks"
    )
    parser.add_argument("--first", type=int, default=None, help="first seed; drawn anew by default")
    parser.add_argument("--device", default="cpu", help="the device of the models")
    parser.add_argument("--save", action="store_true", help="keep the figures of the runs, which tests compare")
    asked = parser.parse_args()
    first = random.SystemRandom().randrange(1 << 30) if asked.first is None else asked.first
    num_wrong = 0
    found: list[Outcome] = []
    draw = Draw.of_others if asked.others else Draw.of
    for seed in range(first, first + asked.runs):
        try:
            outcome = outcome_of(draw(seed), torch.device(asked.device))
        except Exception as error:
            print(f"{draw(seed)}: {type(error).__name__}: {error}", flush=True)
            num_wrong += 1
            continue
        print(outcome, flush=True)
        found.append(outcome)
        num_wrong += bool(outcome.faults)
    print(f"{asked.runs} runs from seed {first}, {num_wrong} wrong")
    if asked.save:
        save(found)
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
