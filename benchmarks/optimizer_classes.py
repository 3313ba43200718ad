"""Measure host updates of optimizer classes: the class's own step, a single pass with the same bits, Inductor's.

`optimizer.py` runs it.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

import quiet  # noqa: F401  before torch
import torch
from neighbours import QUIET_CORES, Neighbours
from optimizer_pass import MOST_WAIT_S, Times, kept_rate, quartiles, quiet_values_of, ratio_of
from torch.optim import SGD, Optimizer, RMSprop

from elixir_compile.optim.generic.class_rule import ClassRule
from elixir_compile.optim.generic.dry_step import ClassStep, attributes_of
from elixir_compile.optim.rule import ParamUpdate

NUM_TENSORS = 12
INDUCTOR = {"cpp_wrapper": True, "cpp.simdlen": 256, "cpp.threads": 1}


class Lion(Optimizer):
    """The Lion optimizer as its authors wrote it."""

    def __init__(self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update every parameter."""
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["exp_avg"] = torch.zeros_like(param)
                exp_avg, (beta1, beta2) = state["exp_avg"], group["betas"]
                param.mul_(1 - group["lr"] * group["weight_decay"])
                update = exp_avg.clone().mul_(beta1).add(param.grad, alpha=1 - beta1).sign_()
                param.add_(update, alpha=-group["lr"])
                exp_avg.mul_(beta2).add_(param.grad, alpha=1 - beta2)


CLASSES: Mapping[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "SGD with momentum": (SGD, {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.01}),
    "Lion": (Lion, {}),
    "RMSprop": (RMSprop, {"lr": 1e-4, "momentum": 0.9}),
}

WANTED = {"SGD with momentum: own step": 1.5, "Lion: own step": 1.5, "RMSprop: own step": 0.95}
"""The smallest allowed ratio of the rate of a single pass to the rate of the class's own step. RMSprop takes square
roots by MKL; they cost as much as the saved passes."""


class Case:
    """An optimizer class with parameters and state in as many tensors as a bucket may have."""

    def __init__(self, cls: type[Optimizer], options: dict[str, Any], numel: int) -> None:
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(numel // NUM_TENSORS).mul_(0.05)) for _ in range(NUM_TENSORS)]
        for param in params:
            param.grad = torch.randn_like(param).mul_(0.01)
        self.optimizer = cls(params, **options)
        self.optimizer.step()
        self.rule = ClassRule(cls, self.optimizer).snapshot()
        self.group = {name: value for name, value in self.optimizer.param_groups[0].items() if name != "params"}
        self.rows = [ParamUpdate(param.detach(), param.grad, self.optimizer.state[param]) for param in params]

    def one_pass(self) -> None:
        """Update all parameters in a single pass over memory."""
        self.rule.update(self.rows, self.group)

    def own(self) -> None:
        """Update all parameters by the class's own step."""
        ClassStep(cls=type(self.optimizer), attributes=attributes_of(self.optimizer), group=self.group).take(self.rows)


def sgd(param: torch.Tensor, grad: torch.Tensor, buffer: torch.Tensor, lr: torch.Tensor) -> None:
    """Update like `torch.optim.SGD` with momentum, as a single graph."""
    buffer.mul_(0.9).add_(grad.add(param, alpha=0.01))
    param.sub_(buffer * lr)


def by_inductor(case: Case) -> tuple[Callable[[], None], dict[str, float]]:
    """Return SGD's update compiled by Inductor, its compile seconds, and the share of weights with other bits."""
    compiled = torch.compile(sgd, options=INDUCTOR, dynamic=True)
    lr = torch.tensor(0.01)
    rows = [(row.weight, row.grad, row.state["momentum_buffer"], lr) for row in case.rows]
    began_s = time.perf_counter()
    compiled(*(tensor[:4096].clone() if tensor.dim() else tensor for tensor in rows[0]))
    compile_s = time.perf_counter() - began_s
    theirs, own = ([tensor.clone() for tensor in rows[0]] for _ in range(2))
    compiled(*theirs)
    param, grad, buffer, _ = own
    buffer.mul_(0.9).add_(grad.add(param, alpha=0.01))
    param.add_(buffer, alpha=-0.01)
    share = float((theirs[0] != param).double().mean())

    def run() -> None:
        for row in rows:
            compiled(*row)

    return run, {"compile_s": compile_s, "share_of_weights_with_other_bits": share}


def measured(numel: int, num_rounds: int) -> dict[str, Any]:
    """Return the seconds of each class and way, in turn on one thread, and ratios of rates within a round."""
    torch.set_num_threads(1)
    neighbours = Neighbours()
    figures: dict[str, Any] = {"numel": numel, "num_rounds": num_rounds, "seconds": {}, "ratios": [], "kept_rate": {}}
    for title, (cls, options) in CLASSES.items():
        case = Case(cls, options, numel)
        began_s = time.perf_counter()
        case.one_pass()
        first_s = time.perf_counter() - began_s
        calls = {f"{title}: own step": case.own, f"{title}: one pass": case.one_pass}
        if cls is SGD:
            calls["SGD with momentum: Inductor"], figures["inductor"] = by_inductor(case)
        times: dict[str, Times] = {name: [] for name in calls}
        for index in range(num_rounds + 1):
            for name in list(calls)[:: 1 if index % 2 else -1]:
                neighbours.wait(MOST_WAIT_S)
                began_s = time.perf_counter()
                calls[name]()
                seconds = time.perf_counter() - began_s
                if index:  # the first round warms up
                    times[name].append((seconds, neighbours.busy_cores() < QUIET_CORES))
        figures["seconds"] |= {name: quartiles(quiet_values_of(values)) for name, values in times.items()}
        pairs = [(f"{title}: one pass", other) for other in calls if other != f"{title}: one pass"]
        figures["ratios"] += [ratio_of(name, other, times) for name, other in pairs]
        figures["kept_rate"] |= {name: kept_rate(call) for name, call in calls.items()}
        figures.setdefault("first_call_s", {})[title] = first_s
    return figures


def missed(figures: dict[str, Any]) -> list[str]:
    """Return a sentence for each missed target."""
    slow = [ratio for ratio in figures["ratios"] if ratio["of"] in WANTED and ratio["median"] < WANTED[ratio["of"]]]
    late = [name for name, share in figures["kept_rate"].items() if "one pass" in name and share["median"] < 0.5]
    return [
        f"{ratio['pass']} at {ratio['median']:.2f} of the rate of {ratio['of']}, wanted {WANTED[ratio['of']]}"
        for ratio in slow
    ] + [f"the main thread keeps less than half its rate beside {name}" for name in late]


def table(figures: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    lines = [
        f"One fp32 update of {figures['numel'] / 1e6:.0f} M parameters in {NUM_TENSORS} tensors on one thread of the "
        f"host: median [quartiles] of {figures['num_rounds']} rounds, ways in turn; a ratio is of rates of one round. "
        "`kept` is the rate of small torch ops that the main thread keeps beside it. One pass has the bits of the "
        "class's own step.",
        "",
        "| class and way | ms | rate of one pass by its rate | kept |",
        "|---|---|---|---|",
    ]
    ratios = {ratio["of"]: ratio for ratio in figures["ratios"]}
    for name, seconds in figures["seconds"].items():
        ratio = f"{_cell(ratios[name])}" if name in ratios else ""
        lines.append(f"| {name} | {_cell(seconds, 1e3, 1)} | {ratio} | {_cell(figures['kept_rate'][name])} |")
    first = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in figures["first_call_s"].items())
    inductor = figures["inductor"]
    lines += [
        "",
        f"The first call, which compiles and compares: {first}. Inductor compiled SGD's in "
        f"{inductor['compile_s']:.1f} s; {inductor['share_of_weights_with_other_bits']:.1%} of the weights have other "
        "bits than torch's after its step.",
    ]
    return "\n".join(lines) + "\n"


def _cell(figures: Mapping[str, float], scale: float = 1.0, digits: int = 2) -> str:
    low, middle, high = (f"{figures[name] * scale:.{digits}f}" for name in ("q25", "median", "q75"))
    return f"{middle} [{low}-{high}]"
