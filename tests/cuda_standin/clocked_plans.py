"""Plans whose steps are clocked on the CUDA stand-in beside their simulation, and a table of them for the docs.

python -m tests.cuda_standin.build -m tests.cuda_standin.clocked_plans
"""

import functools
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from elixir_compile.graph.capture.modules import model_of
from elixir_compile.ir import Plan
from elixir_compile.ir.hardware import Cluster, cluster_to_json, preset
from tests.cuda_standin.clock import Clock, clocked
from tests.run.models import Stack, seeded, small_gpt2, small_llama, tokens, vectors
from tests.run.training import Run, by_elixir, least_bytes, loss_of, plain_step, scaled_bytes

DEVICE = torch.device("cuda", 0)
_SCALE = 1000.0
"""By how much the machines are slower than those whose names they have: small models take the seconds of large ones,
beside which latencies are as small as there."""


def _words() -> Mapping[str, torch.Tensor]:
    ids = tokens(1, rows=8, length=64)[0].to(DEVICE)
    return {"input_ids": ids, "labels": ids}


MODELS: Mapping[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "GPT-2": (functools.partial(small_gpt2, num_layers=4), _words),
    "Llama": (functools.partial(small_llama, tied=False, num_layers=4), _words),
    "MLP": (functools.partial(seeded, Stack, num_blocks=6), lambda: vectors(1, rows=256)[0].to(DEVICE)),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A step to plan and to clock."""

    machine: str
    model: str
    factor: float | None
    """The budget, in units of the least; None: no budget."""
    update: str
    options: Mapping[str, object] = field(default_factory=dict)
    gradients_stay: bool = False
    """Whether no step ever sets a gradient to None, so that each adds to it."""

    def __str__(self) -> str:
        budget = "no budget" if self.factor is None else f"{self.factor} x least"
        more = [f"{name} {value}" for name, value in self.options.items()]
        return ", ".join([self.machine, self.model, budget, self.update, *more])


def _case(
    machine: str, model: str, factor: float | None, update: str, *, stay: bool = False, **options: object
) -> Case:
    if stay:
        options["accumulate"] = True
    return Case(machine=machine, model=model, factor=factor, update=update, options=options, gradients_stay=stay)


A100, H100, RTX4090 = "a100-40g", "h100-80g", "rtx4090-24g"
CASES: Sequence[Case] = (
    _case(H100, "MLP", 1.05, "across_steps"),
    _case(RTX4090, "MLP", 1.3, "in_backward"),
    _case(A100, "MLP", 1.1, "after_backward", micro_batches=4, activations="offload"),
    _case(A100, "GPT-2", None, "after_backward"),
    _case(A100, "GPT-2", 1.05, "after_backward"),
    _case(A100, "GPT-2", 1.05, "across_steps"),
    _case(A100, "GPT-2", 1.05, "in_backward"),
    _case(A100, "GPT-2", 1.5, "auto", activations="offload"),
    _case(A100, "GPT-2", 1.3, "auto", activations="recompute"),
    _case(H100, "GPT-2", 1.05, "across_steps"),
    _case(H100, "Llama", 1.05, "after_backward"),
    _case(H100, "Llama", 1.2, "across_steps"),
    _case(H100, "Llama", 1.2, "in_backward"),
    _case(H100, "Llama", 1.1, "auto", micro_batches=4),
    _case(RTX4090, "MLP", 1.05, "after_backward"),
    _case(RTX4090, "MLP", 1.3, "after_backward", micro_batches=4, activations="offload"),
    _case(RTX4090, "GPT-2", 1.2, "across_steps", micro_batches=2, activations="offload"),
    _case(A100, "Llama", 1.2, "in_backward"),
    _case(RTX4090, "Llama", 1.5, "in_backward"),
    _case(RTX4090, "Llama", 1.05, "after_backward", activations="keep"),
    _case(RTX4090, "GPT-2", 1.4, "after_backward"),
    _case(H100, "Llama", 1.3, "auto", stay=True),
    _case(RTX4090, "GPT-2", 1.2, "after_backward", stay=True),
)
"""The first three are quick. In the last three the host adds to sums and updates while compute ends the backward."""


@dataclass(kw_only=True)
class Clocked:
    """A step of a case under the clock."""

    clock: Clock
    run: Run
    plan: Plan
    step: Callable[[], object]
    step_s: float


@contextmanager
def clocked_step(case: Case) -> Iterator[Clocked]:
    """Plan the step of `case`, clock it, and yield both while the clock runs."""
    cluster = scaled(preset(case.machine), _SCALE)
    make, batch_of = MODELS[case.model]
    model, batch = make().to(DEVICE), batch_of()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "machine.json"
        path.write_text(cluster_to_json(cluster))
        options: dict[str, object] = {"hardware": str(path), "update": case.update, "plan_cache": False, **case.options}
        whole = {name: value for name, value in options.items() if name != "micro_batches"}
        budget = None
        if case.factor is not None:
            budget = scaled_bytes(model, least_bytes(model, batch, **whole), case.factor)
        with clocked(cluster) as clock:
            run = by_elixir(model, device_memory=budget, replan=False, **options)
            step = functools.partial(_step, run, batch, case.gradients_stay)
            for _ in range(3):  # the first two find out what gradients do
                step()
            clock.follow(run)
            step_s = clock.period_s(step, warm_up=4)
            graph: Any = model_of(run.model).graphs[0]
            yield Clocked(clock=clock, run=run, plan=graph.active.plan, step=step, step_s=step_s)


def _step(run: Run, batch: Any, gradients_stay: bool) -> None:
    if gradients_stay:
        loss_of(run.compiled, batch).backward()
        run.optimizer.step()
    else:
        plain_step(run.compiled, run.optimizer, batch)


def scaled(cluster: Cluster, factor: float) -> Cluster:
    """Return `cluster` with all rates divided by `factor`."""
    node = cluster.nodes[0]
    device, host = node.device, node.host
    device = replace(
        device,
        flops_per_s={name: rate / factor for name, rate in device.flops_per_s.items()},
        memory_bytes_per_s=device.memory_bytes_per_s / factor,
        update_elements_per_s=device.update_elements_per_s / factor,
    )
    host = replace(
        host,
        memory_bytes_per_s=host.memory_bytes_per_s / factor,
        update_elements_per_s=host.update_elements_per_s / factor,
    )
    h2d, d2h = (replace(link, bytes_per_s=link.bytes_per_s / factor) for link in (node.h2d, node.d2h))
    return replace(cluster, nodes=(replace(node, device=device, host=host, h2d=h2d, d2h=d2h),))


def main() -> int:
    """Print the table of the docs: a row for each case, and what compute and the host waited for in a step."""
    from tests.device import emulated

    emulated.start()
    print("| plan | simulated, ms | clocked, ms | difference | idle for the host, ms | idle for copies, ms |")
    print("|---|---|---|---|---|---|", flush=True)
    for case in CASES:
        with clocked_step(case) as found:
            simulated_s, idle = found.plan.prediction.step_s, found.clock.idle
            by_host, by_copies = (
                1e3 * sum(each.seconds for each in idle if each.is_host is is_host) / 3 for is_host in (True, False)
            )
            print(
                f"| {case} | {1e3 * simulated_s:.2f} | {1e3 * found.step_s:.2f} | "
                f"{found.step_s / simulated_s - 1:+.2%} | {by_host:.2f} | {by_copies:.2f} |",
                flush=True,
            )
            worst = sorted(idle, reverse=True)[:1] + sorted(each for each in idle if each.is_host)[-1:]
            print(worst, sorted(found.clock.waits, reverse=True)[:1], file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
