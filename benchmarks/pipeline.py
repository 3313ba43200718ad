"""Two gloo ranks run torch's pipeline schedules over an **emulated** link; step and bubbles beside the simulated ones.

    python benchmarks/pipeline.py [--rounds 9] [-o pipeline_cpu]

A message takes its latency and its bytes / rate on a link of its own for each direction, while its sender goes on: a
thread sleeps, and then gloo sends the tensor. `torch.distributed.pipelining` runs the stages, unchanged. The simulation
gets the seconds of each stage in a step, mean over micro-batches, and predicts the next one that is timed. The ratios
are those of medians over rounds. On a machine with other work steps differ: `fastest_step_ratio` is that of the fastest
step, simulated with the stages of the second, and `core_share` says how far stages that compute had a core.

`sleep`: a stage sleeps in place of compute, so that other processes on the cores change nothing.
`eager`: a stage multiplies matrices, one thread per rank. `elixir`: the same stage, compiled by this backend.
"""

import argparse
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn import functional

import elixir_compile as elixir
from elixir_compile.ir.hardware import Link
from elixir_compile.ir.pipeline import TorchSchedule, pipeline_order
from elixir_compile.step.stages import PipelinePlayed, StageSeconds, play_pipeline

RANKS, MICRO_BATCHES, ROWS, WIDTH, HIDDEN = 2, 8, 128, 256, 2048
MESSAGE_BYTES = ROWS * WIDTH * 4
KINDS = ("sleep", "eager", "elixir")
FORWARD_S, BACKWARD_S = 0.06, 0.12
"""Of all layers of a rank on a micro-batch, if they sleep."""
LINK = Link(bytes_per_s=MESSAGE_BYTES / 0.045, latency_s=0.005, overlaps_compute=True, source="emulated")
SCHEDULES: dict[TorchSchedule, Any] = {
    TorchSchedule.GPIPE: schedules.ScheduleGPipe,
    TorchSchedule.ONE_F_ONE_B: schedules.Schedule1F1B,
    TorchSchedule.INTERLEAVED: schedules.ScheduleInterleaved1F1B,
    TorchSchedule.LOOPED_BFS: schedules.ScheduleLoopedBFS,
}


class Sent:
    """A message on the emulated link, as torch's schedules wait for it."""

    def __init__(self, op: distributed.P2POp) -> None:
        self.op, self.issued_s = op, time.perf_counter()
        self._is_out = threading.Event()
        self._work: Any = None

    def send(self) -> None:
        """Give the tensor to gloo: the link has delivered it."""
        op = self.op
        self._work = distributed.isend(op.tensor, group=op.group, tag=op.tag, group_dst=op.group_peer)
        self._is_out.set()

    def wait(self) -> None:
        """Wait until the link has delivered the message."""
        self._is_out.wait()
        self._work.wait()


class EmulatedLink:
    """The link from this rank to the other, which sends one message at a time."""

    def __init__(self, link: Link) -> None:
        self._link, self._queue = link, queue.SimpleQueue[Sent | None]()
        self._thread = threading.Thread(target=self._deliver, daemon=True)
        self._thread.start()

    def _deliver(self) -> None:
        free_s = 0.0
        while (sent := self._queue.get()) is not None:
            nbytes = sent.op.tensor.numel() * sent.op.tensor.element_size()
            free_s = max(free_s, sent.issued_s) + self._link.latency_s + nbytes / self._link.bytes_per_s
            time.sleep(max(0.0, free_s - time.perf_counter()))
            sent.send()

    def batch(self, ops: Sequence[distributed.P2POp], desc: str | None = None) -> list[Any]:
        """Begin the sends and receives `ops`, as the function of torch's schedules whose place it takes."""
        works: list[Any] = []
        for op in ops:
            if op.op is distributed.isend:
                works.append(Sent(op))
                self._queue.put(works[-1])
            else:
                works.append(op.op(op.tensor, group=op.group, tag=op.tag, group_src=op.group_peer))
        return works

    def close(self) -> None:
        """End the thread."""
        self._queue.put(None)
        self._thread.join()


@contextmanager
def emulated(link: Link) -> Iterator[None]:
    """During the block, let the messages of torch's schedules pass an emulated `link`."""
    batch, made = schedules._batch_p2p, EmulatedLink(link)
    schedules._batch_p2p = made.batch  # pyright: ignore[reportAttributeAccessIssue]  emulated, until the block ends
    try:
        yield
    finally:
        schedules._batch_p2p = batch
        made.close()


class Sleep(torch.autograd.Function):
    """Returns its input after some seconds, and its gradient after others."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        """Sleep `forward_s` seconds."""
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Sleep the other seconds."""
        time.sleep(ctx.backward_s)
        return grad, None, None


class Sleeping(nn.Module):
    """A stage with one parameter that sleeps in place of compute."""

    def __init__(self, loops: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self._seconds = FORWARD_S / loops, BACKWARD_S / loops

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Sleep.apply(x * self.scale, *self._seconds)  # pyright: ignore[reportReturnType]


class Multiplying(nn.Module):
    """A stage of two wide layers, four times for a single stage per rank."""

    def __init__(self, loops: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.ModuleList(nn.Linear(WIDTH, HIDDEN) for _ in range(4 // loops))
        self.down = nn.ModuleList(nn.Linear(HIDDEN, WIDTH) for _ in range(4 // loops))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(functional.gelu(up(x)))
        return x


class TimedStage(PipelineStage):
    """A stage that notes the seconds of its forwards and backwards."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.spans: dict[str, list[float]] = {"forward": [], "backward": []}
        self.cpu_s = 0.0
        """CPU seconds of this thread in all of them."""

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of torch's stage."""
        began_s, began_cpu_s = time.perf_counter(), time.thread_time()
        out = super().forward_one_chunk(*args, **kwargs)
        self.spans["forward"].append(time.perf_counter() - began_s)
        self.cpu_s += time.thread_time() - began_cpu_s
        return out

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Run the backward of torch's stage."""
        began_s, began_cpu_s = time.perf_counter(), time.thread_time()
        out = super().backward_one_chunk(*args, **kwargs)
        self.spans["backward"].append(time.perf_counter() - began_s)
        self.cpu_s += time.thread_time() - began_cpu_s
        return out


def stage_module(kind: str, loops: int) -> nn.Module:
    """Return the module of a stage, compiled if `kind` is `elixir`."""
    if kind == "sleep":
        return Sleeping(loops)
    module = Multiplying(loops)
    if kind == "eager":
        return module
    options = {"inner": "aot_eager", "report": False, "plan_cache": False, "replan": False, "device_memory": "4GiB"}
    return torch.compile(elixir.prepare(module), backend="elixir", options=options)  # pyright: ignore[reportReturnType]


class Run:
    """A pipeline of this rank under one schedule."""

    def __init__(self, modules: list[nn.Module], schedule: TorchSchedule) -> None:
        self.rank, self.num_stages, self.modules = distributed.get_rank(), RANKS * len(modules), modules
        numbers = range(self.rank, self.num_stages, RANKS)
        cpu = torch.device("cpu")
        self.stages = [
            TimedStage(module, number, self.num_stages, cpu)
            for number, module in zip(numbers, self.modules, strict=True)
        ]
        own = self.stages if schedule.is_looped else self.stages[0]
        self.runner = SCHEDULES[schedule](own, MICRO_BATCHES, loss_fn=functional.mse_loss)
        self.order = pipeline_order(schedule, self.num_stages, RANKS, MICRO_BATCHES)
        self.x, self.y = torch.randn(MICRO_BATCHES * ROWS, WIDTH), torch.randn(MICRO_BATCHES * ROWS, WIDTH)

    def step(self) -> "Step":
        """Run a step, together with the other rank."""
        for stage in self.stages:
            stage.spans, stage.cpu_s = {"forward": [], "backward": []}, 0.0
            stage.submod.zero_grad(set_to_none=True)
        distributed.barrier()
        began_s = time.perf_counter()
        self.runner.step(*([self.x] if self.rank == 0 else []), **({"target": self.y} if self.rank else {}))
        step_s, cpu_s = time.perf_counter() - began_s, sum(stage.cpu_s for stage in self.stages)
        every: list[Any] = [None] * RANKS
        distributed.all_gather_object(every, (step_s, cpu_s, [stage.spans for stage in self.stages]))
        cpu_s = sum(own_s for _, own_s, _ in every)
        return Step(max(own_s for own_s, _, _ in every), cpu_s, [spans for _, _, spans in every])


class Step:
    """A step of both ranks, as it was measured."""

    def __init__(self, step_s: float, cpu_s: float, spans: list[list[dict[str, list[float]]]]) -> None:
        self.step_s = step_s
        busy_s = [sum(sum(own) for stage in stages for own in stage.values()) for stages in spans]
        self.bubble = statistics.mean(1 - own / step_s for own in busy_s)
        self.core_share = cpu_s / sum(busy_s)
        """CPU seconds of stages over their seconds: near 1 if each rank that computes has a core."""
        num_stages = RANKS * len(spans[0])
        of_stage = [spans[stage % RANKS][stage // RANKS] for stage in range(num_stages)]
        self.stages = [
            StageSeconds(
                forward_s=statistics.mean(own["forward"]),
                backward_s=statistics.mean(own["backward"]),
                sent_bytes=0 if stage == num_stages - 1 else MESSAGE_BYTES,
            )
            for stage, own in enumerate(of_stage)
        ]


def compared(kind: str, rounds: int) -> dict[str, Any]:
    """Return, by schedule, measured and simulated seconds and bubbles of `rounds` steps. All ranks call this."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    with emulated(LINK):
        modules = {loops: [stage_module(kind, loops) for _ in range(loops)] for loops in (1, 2)}
        runs = {schedule: Run(modules[2 if schedule.is_looped else 1], schedule) for schedule in TorchSchedule}
        for schedule, run in runs.items():
            run.step()  # asks for shapes, and compiles
            found[str(schedule)] = {"step_s": [], "simulated_s": [], "bubble": [], "simulated_bubble": []}
        steps = {schedule: [run.step()] for schedule, run in runs.items()}
        for _ in range(rounds):
            for schedule, run in runs.items():
                played = simulated(run, steps[schedule][-1])
                step = run.step()
                steps[schedule].append(step)
                own = found[str(schedule)]
                own["step_s"].append(step.step_s)
                own["simulated_s"].append(played.step_s)
                own["bubble"].append(step.bubble)
                own["simulated_bubble"].append(mean_bubble(played))
    for schedule, run in runs.items():
        own = found[str(schedule)]
        for what, expected in (("step_s", "simulated_s"), ("bubble", "simulated_bubble")):
            own[f"{what.removesuffix('_s')}_ratio"] = statistics.median(own[expected]) / statistics.median(own[what])
        fastest, second = sorted(steps[schedule], key=lambda step: step.step_s)[:2]
        own["fastest_step_ratio"] = simulated(run, second).step_s / fastest.step_s
        own["fastest_bubble_ratio"] = mean_bubble(simulated(run, second)) / fastest.bubble
        own["core_share"] = statistics.median(step.core_share for step in steps[schedule])
    return found


def mean_bubble(played: PipelinePlayed) -> float:
    """Return the share of the step in which a rank does nothing, on average over ranks."""
    return statistics.mean(played.bubble(rank) for rank in range(len(played.ranks)))


def simulated(run: Run, step: Step) -> PipelinePlayed:
    """Return the step of `run` with the seconds of stages in `step`."""
    return play_pipeline(run.order, step.stages, lambda one, other: LINK)


def main() -> None:
    """Start the ranks of this script, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("-o", "--output", default="pipeline_cpu")
    parser.add_argument("--figures", type=Path, help="the file for the figures of the first rank, set for each rank")
    args = parser.parse_args()
    if args.figures is None:
        start(args.rounds, args.output)
        return
    distributed.init_process_group("gloo")
    try:
        found = {kind: compared(kind, args.rounds) for kind in KINDS}
        if distributed.get_rank() == 0:
            args.figures.write_text(json.dumps(found), encoding="utf-8")
    finally:
        distributed.destroy_process_group()


def start(rounds: int, output: str) -> None:
    """Run the ranks, and save their figures."""
    from machine import save

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        threads = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        asked = [__file__, "--rounds", str(rounds), "--figures", str(file)]
        subprocess.run([*command, *asked], check=True, env=threads)
        kinds = json.loads(file.read_text(encoding="utf-8"))
    for kind, found in kinds.items():
        for schedule, own in found.items():
            step_s = statistics.median(own["step_s"])
            ratios = f"simulated / measured: step {own['step_ratio']:.3f}, bubble {own['bubble_ratio']:.3f}"
            print(f"{kind:8} {schedule:18} {step_s * 1e3:6.0f} ms  {ratios}")
    link = {"bytes_per_s": LINK.bytes_per_s, "latency_s": LINK.latency_s, "message_bytes": MESSAGE_BYTES}
    figures = {"emulated": "the link between both ranks", "link": link, "micro_batches": MICRO_BATCHES, "kinds": kinds}
    print(f"wrote {save(output, figures)}")


if __name__ == "__main__":
    main()
