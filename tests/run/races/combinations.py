"""Combinations of what a step can do, and the bits of each under every schedule of a simulated device.

```text
  plain lanes        steps 1, 2   steps 3, 4   steps 5, 6   ...      after each pair: losses, weights and state
  simulated lanes    early        late         random 0     ...      the same bits, whatever the policy of the pair
```

One compilation serves all schedules, so fifty of them take seconds. The backward of every second pair runs in a thread
of its own.
"""

import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import elixir_compile as elixir
from elixir_compile.graph.capture.modules import executor_of
from elixir_compile.ir import Saving, Update
from elixir_compile.runtime import executor
from tests.run.races.simulated import Simulated
from tests.run.training import Run, hybrid_adamw, loss_of, on_host, scaled_bytes
from tests.run.updating import WIDTH, accumulate, flat_state, placed, small_buckets, weights_of

NUM_SEEDS = int(os.environ.get("ELIXIR_RACE_SEEDS", "1"))
POLICIES = ("early", "late", *(f"random {seed}" for seed in range(NUM_SEEDS)))
ROWS = 48
"""Rows of a batch: enough for activations that weigh more than the parameters that make them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """What a step does."""

    update: Update
    home: str = "host"
    """See `tests.run.updating.HOMES`."""
    share: float = 0.0
    """The share of host updates that are streamed."""
    is_mixed: bool = False
    """Whether parameters are bfloat16 with fp32 masters."""
    num_backwards: int = 1
    activations: str = "keep"
    """The option of this name: `keep`, `recompute` or `offload`."""
    micro_batches: int = 1
    has_hooks: bool = False
    """Whether the first weight has a hook, so that autograd takes its gradient."""

    def __str__(self) -> str:
        named = (
            self.home.replace(" ", "_"), self.update.value, self.activations, "bf16" if self.is_mixed else "fp32",
            f"share{self.share}" if self.share else "", f"x{self.num_backwards}" if self.num_backwards > 1 else "",
            f"in{self.micro_batches}" if self.micro_batches > 1 else "", "hooks" if self.has_hooks else "",
        )  # fmt: skip
        return "-".join(filter(None, named))


MODES = (
    (Update.AFTER_BACKWARD, 0.0), (Update.IN_BACKWARD, 0.0), (Update.IN_BACKWARD, 0.5), (Update.ACROSS_STEPS, 0.0),
    (Update.ACROSS_STEPS, 0.5),
)  # fmt: skip
SHORT = (
    Combination(update=Update.ACROSS_STEPS, activations="offload"),
    Combination(update=Update.IN_BACKWARD, activations="recompute", is_mixed=True),
    Combination(update=Update.AFTER_BACKWARD, share=0.5, is_mixed=True, num_backwards=3),
    Combination(update=Update.IN_BACKWARD, activations="offload", micro_batches=4, num_backwards=2),
    Combination(update=Update.IN_BACKWARD, home="split disk", has_hooks=True),
)
ALL = tuple(
    dict.fromkeys(
        (
            *SHORT,
            *(
                Combination(update=update, share=share, is_mixed=mixed, num_backwards=num, activations=activations)
                for (update, share), mixed, num, activations in product(
                    MODES, (False, True), (1, 3), ("keep", "recompute", "offload")
                )
            ),
            *(
                Combination(update=update, activations="offload", micro_batches=4, is_mixed=mixed)
                for update, mixed in product(Update, (False, True))
            ),
            *(
                Combination(update=update, home=home, is_mixed=mixed, has_hooks=True)
                for update, home, mixed in product(Update, ("split", "split disk", "host disk"), (False, True))
            ),
        )
    )
)


class Wide(nn.Module):
    """Four odd linear layers with two activations each, which weigh more than their weights; returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=number != 2) for number in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for step in self.steps:
            x = torch.tanh(torch.nn.functional.gelu(step(x)))
        return x.square().mean()


class Shared(nn.Module):
    """One layer in two graphs, so that two graphs of a backward add to its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.shared(torch.tanh(self.first(x))))
        torch._dynamo.graph_break()
        return self.last(torch.tanh(self.shared(x))).square().mean()


def wide() -> Wide:
    torch.manual_seed(7)
    return Wide()


def batches_of(case: Combination, num: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    dtype = torch.bfloat16 if case.is_mixed else torch.float32
    return [torch.randn(ROWS, WIDTH, generator=generator).to(dtype) for _ in range(num)]


def _made(case: Combination, **options: Any) -> Run:
    own = elixir.prepare(wide(), param_dtype="bfloat16" if case.is_mixed else None)
    if case.has_hooks:
        own.steps[0].weight.register_hook(lambda grad: 2 * grad)
    torch._dynamo.reset()
    # Without accumulation, it is ruled out: a combination with accumulation has the same problem, and the plan cache
    # would remember that its gradients stayed.
    accumulate = None if case.num_backwards > 1 else False
    dtype = {"param_dtype": "bfloat16"} if case.is_mixed else {}
    known = {
        "inner": "aot_eager", "report": False, "replan": False, "planner": "greedy", "activations": case.activations,
        "micro_batches": case.micro_batches, "accumulate": accumulate, **dtype,
    }  # fmt: skip
    compiled = torch.compile(own, backend="elixir", options={**known, **options})
    return Run(model=own, compiled=compiled, optimizer=hybrid_adamw(own.parameters()))


@contextmanager
def run_of(case: Combination, folder: Path) -> Iterator[Run]:
    """Yield a new run of `case`, whose state on disk is in `folder`."""
    options = {"disk_path": folder} if "disk" in case.home else {}
    if case.home.startswith("host"):
        starved = _made(case, device_memory=1)
        with small_buckets(lambda plan: plan), pytest.raises(elixir.NoFeasiblePlan) as raised:
            loss_of(starved.compiled, batches_of(case, 1)[0])
        options["device_memory"] = scaled_bytes(starved.model, raised.value.needed_bytes, 1.05)
    with small_buckets(lambda plan: placed(plan, case.home, case.share, case.update)):
        yield _made(case, **options)


def simulate(monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    """Let executors made from now on have simulated lanes."""
    kind, _, seed = policy.partition(" ")
    monkeypatch.setattr(executor, "lanes_for", lambda device: Simulated(device, kind, int(seed or 0)))


def in_another_thread(compiled: Callable[..., Any], optimizer: Any, batch: Any) -> torch.Tensor:
    """Train on one batch, with the backward in a thread of its own."""
    loss = loss_of(compiled, batch)
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return a text that is the same for the same names and bits."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(name.encode())
        found.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def bits_of(run: Run, case: Combination, policies: Sequence[str], begin: Callable[[str], None]) -> list[str]:
    """Train two steps under each of `policies`, which `begin` puts in force; return the bits after each."""
    found: list[str] = []
    each = 2 * case.num_backwards
    batches = batches_of(case, each * len(policies))
    for number, (first, last) in enumerate(pairwise(range(0, len(batches) + 1, each))):
        begin(policies[number])
        if case.num_backwards > 1:
            accumulate(run, batches[first:last], case.num_backwards)
        else:
            run.train(batches[first:last], in_another_thread if number % 2 else None)
        losses = {f"loss {place}": loss for place, loss in enumerate(run.losses)}
        found.append(
            f"{policies[number]}: {digest(losses)} {digest(weights_of(run))} {digest(flat_state(run.optimizer))}"
        )
    return found


def assert_bits_are_those_of_plain_lanes(
    case: Combination, folder: Path, monkeypatch: pytest.MonkeyPatch, policies: Sequence[str] = POLICIES
) -> None:
    """Fail unless a run on simulated lanes has the bits of a run on plain ones, under each of `policies`."""
    with run_of(case, folder) as plain:
        expected = bits_of(plain, case, policies, lambda policy: None)
        assert_does(plain, case)
    with monkeypatch.context() as patch:
        simulate(patch, "late")
        with run_of(case, folder) as run:
            lanes = executor_of(run.model).lanes
            assert isinstance(lanes, Simulated)
            assert bits_of(run, case, policies, lanes.world.follow) == expected
            assert lanes.num_hidden
            assert lanes.h2d.queue.num_done or not on_host(run)


def assert_does(run: Run, case: Combination) -> None:
    """Fail unless the plan of `run` does what `case` says."""
    plan = elixir.compilations(run.model)[-1].plan
    assert plan is not None
    savings = {group.saving for group in plan.activations}
    wanted = {"offload": Saving.OFFLOAD, "recompute": Saving.RECOMPUTE}.get(case.activations)
    assert wanted is None or wanted in savings, f"no activation is {wanted}"
    assert plan.update is case.update
    assert max(region.micro_batches for region in plan.regions) == case.micro_batches
