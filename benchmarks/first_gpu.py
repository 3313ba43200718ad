"""Answer, a step a process, the questions that only an accelerator can answer; `first_gpu.sh` runs the steps in order.

    python benchmarks/first_gpu.py --list                      # the steps, each with its limit in seconds
    python benchmarks/first_gpu.py budgets --out budgets.json  # a single step
    python benchmarks/first_gpu.py budgets --device cpu        # on a CPU, to check the step itself: no figure counts

Each step prints its figures as JSON with the machine, the versions and the commit, and writes them to `--out`. No step
claims anything: the figures are for a reader. A step needs CUDA unless `--device cpu` is given.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import quiet  # noqa: F401  before torch
import torch
from machine import machine
from torch import nn

import elixir_compile as elixir

Figures = dict[str, object]
GIB = 2**30
MODES = ("after_backward", "across_steps", "in_backward")
SHARES = (1.0, 0.7, 0.5)
SMALL_PIN_BYTES, PIN_BYTES = GIB // 16, 8 * GIB
INNER = ""
"""The compiler of regions; if empty, the default. Tests on a device for which Inductor has no code set it."""


@dataclass(frozen=True, slots=True)
class Step:
    """A question, and the most seconds that its answer may take."""

    answer: Callable[[torch.device], Figures]
    limit_s: int


def gpt2(device: torch.device, *, num_layers: int = 12, **options: object) -> nn.Module:
    """Return GPT-2 on the host: 124M parameters for CUDA, a small one for a check of the steps elsewhere.

    `options` go into its configuration. There is no dropout unless they say so.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_layer": num_layers}
    if device.type != "cuda":
        sizes = {"n_layer": min(num_layers, 4), "n_embd": 128, "n_head": 4, "vocab_size": 512}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**{**dropout, **sizes, **options})).train()


class Training:
    """A training of a model by Elixir or by torch, on batches of random tokens."""

    def __init__(
        self, model: nn.Module, device: torch.device, *, backend: str = "elixir", lr: float = 3e-4, **options: object
    ) -> None:
        self._device = device
        self._num_words = model.config.vocab_size
        self._num_steps = 0
        if backend == "elixir":
            elixir.prepare(model, device=device, param_dtype=options.get("param_dtype"))
            options = {"report": False, "plan_cache": False, **({"inner": INNER} if INNER else {}), **options}
            self.compiled = torch.compile(model, backend=backend, options=options)
            self.optimizer: torch.optim.Optimizer = elixir.HybridAdamW(model.parameters(), lr=lr)
        else:
            self.compiled = torch.compile(model.to(device), backend=backend)
            self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
        self.model = model

    def step(self) -> torch.Tensor:
        """Train on the next batch and return its loss, on the device."""
        generator = torch.Generator().manual_seed(self._num_steps)
        self._num_steps += 1
        shape = (4, 512) if self._device.type == "cuda" else (2, 64)
        tokens = torch.randint(0, self._num_words, shape, generator=generator).to(self._device)
        loss = self.compiled(input_ids=tokens, labels=tokens).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def losses(self, num_steps: int) -> list[float]:
        """Train on `num_steps` batches and return their losses."""
        return [float(self.step()) for _ in range(num_steps)]

    def weights(self) -> list[torch.Tensor]:
        """Return copies of the parameters on the host."""
        return [param.detach().cpu().clone() for param in self.model.parameters()]

    def planned_bytes(self) -> int:
        """Return the peak on the device that the plan predicts."""
        return elixir.compilations(self.compiled)[-1].plan.prediction.device_peak_bytes


def settle(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def output_of(*command: str) -> str:
    """Return what `command` prints, or why it could not run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return done.stdout.strip() or done.stderr.strip()


def in_process(device: torch.device, step: str, case: Sequence[str], environment: Mapping[str, str]) -> Figures:
    """Answer `step` for `case` in a new process with more variables in its environment; an error is its figure."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "figures.json")
        command = [sys.executable, __file__, step, "--device", str(device), "--out", str(path), "--case", *case]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})
        if done.returncode:
            return {"error": done.stderr.strip().splitlines()[-12:]}
        return json.loads(path.read_text(encoding="utf-8"))["figures"]


def versions(device: torch.device) -> Figures:
    """Return versions and topology, and what pinning memory costs: seconds, pages per NUMA node, a fork afterwards."""
    from elixir_compile.runtime.slab import Slab

    fork_before_s = seconds_of_fork()
    nbytes = PIN_BYTES if device.type == "cuda" else SMALL_PIN_BYTES
    began_s = time.perf_counter()
    slab = Slab(nbytes, pin=device.type == "cuda")
    pin_s = time.perf_counter() - began_s
    address = slab.tensor(torch.uint8, (1,), 0).data_ptr()
    return {
        "nvidia_smi": output_of("nvidia-smi"),
        "topology": output_of("nvidia-smi", "topo", "-m"),
        "cpu": output_of("lscpu"),
        "limits": output_of("sh", "-c", "ulimit -l; cat /sys/fs/cgroup/memory.max"),
        "pinned_bytes": nbytes,
        "is_pinned": slab.is_pinned,
        "pin_s": pin_s,
        "pages_per_node": pages_per_node(address),
        "fork_before_s": fork_before_s,
        "fork_s": seconds_of_fork(),
    }


def seconds_of_fork() -> float:
    """Return the seconds of a fork whose child ends at once."""
    began_s = time.perf_counter()
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return time.perf_counter() - began_s


def pages_per_node(address: int) -> dict[str, int]:
    """Return the pages of the mapping at `address` by NUMA node; empty if the kernel does not say."""
    maps = Path("/proc/self/numa_maps")
    if not maps.exists():
        return {}
    for line in maps.read_text(encoding="utf-8").splitlines():
        if int(line.split()[0], 16) == address:
            return {node: int(pages) for node, pages in re.findall(r"N(\d+)=(\d+)", line)}
    return {}


def workspaces(device: torch.device) -> Figures:
    """Return the bytes of the workspaces of matrix products, asked outside and inside of a capture."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from elixir_compile.problem.machine import library_bytes

    outside_bytes = library_bytes(device)
    library_bytes.cache_clear()
    with FakeTensorMode():
        inside_bytes = library_bytes(device)
    return {"outside_bytes": outside_bytes, "inside_bytes": inside_bytes}


def gpu_tests(device: torch.device) -> Figures:
    """Run the tests that need a GPU and return their results."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/gpu", "-rfEs", "--tb=short"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    return {"closing_line": lines[-1] if lines else "", "exit_code": done.returncode, "output": lines[-150:]}


def gpt2_at_60_percent(device: torch.device) -> Figures:
    """Train GPT-2 at 60 % of its peak beside torch.compile; count the waits for the device in the tenth step."""
    free = Training(gpt2(device), device)
    free.losses(3)
    free_bytes = elixir.measure_step(free.step, device=device.type).device_peak_bytes
    reference = Training(gpt2(device), device, backend="inductor")
    expected = reference.losses(12)
    step_s = {"torch": seconds_of(reference.step, device), "no budget": seconds_of(free.step, device)}
    del free, reference
    own = Training(gpt2(device), device, device_memory=int(0.6 * free_bytes))
    losses = own.losses(9)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        losses.append(float(own.step()))
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    losses += own.losses(2)
    step_s["60 %"] = seconds_of(own.step, device)
    return {
        "losses": losses,
        "expected": expected,
        "most_difference": max(abs(a - b) for a, b in zip(losses, expected, strict=True)),
        "free_bytes": free_bytes,
        "budget_bytes": int(0.6 * free_bytes),
        "measured_bytes": elixir.measure_step(own.step, device=device.type).device_peak_bytes,
        "step_s": step_s,
        "waits": dict(Counter(f"{Path(w.filename).name}:{w.lineno}" for w in caught if "synchron" in str(w.message))),
    }


def seconds_of(step: Callable[[], object], device: torch.device, num: int = 5) -> float:
    """Return the median seconds of `num` calls of `step`."""
    seconds = []
    for _ in range(num):
        settle(device)
        began_s = time.perf_counter()
        step()
        settle(device)
        seconds.append(time.perf_counter() - began_s)
    return sorted(seconds)[num // 2]


def slow_compute(device: torch.device) -> Figures:
    """Train in each update mode, fp32 and with bf16 masters, with compute that is late; weights have to stay the same.

    Before each gather the compute stream sleeps for some milliseconds, so that a copy that waits for too little reads
    memory too early. The weights are compared with those of a run that waits for the device after every copy.
    """
    from elixir_compile.runtime.executor import Executor

    def trained(mode: str, dtype: str | None, hook: Callable[[], None]) -> list[torch.Tensor]:
        torch._dynamo.reset()
        original = Executor.gather

        def gather(self: Executor, bucket_id: object) -> object:
            hook()
            transfer = original(self, bucket_id)
            hook()
            return transfer

        Executor.gather = gather  # type: ignore[method-assign, assignment]
        try:
            model = gpt2(device, num_layers=4)
            own = Training(
                model, device, update=mode, inner="aot_eager", device_memory=tight_bytes(device), param_dtype=dtype
            )
            own.losses(4)
            return own.weights()
        finally:
            Executor.gather = original  # type: ignore[method-assign]

    def sleep() -> None:
        if device.type == "cuda":
            torch.cuda._sleep(5_000_000)

    same: dict[str, bool] = {}
    for mode in MODES:
        for dtype in (None, "bfloat16"):
            late, waited = trained(mode, dtype, sleep), trained(mode, dtype, lambda: settle(device))
            same[f"{mode}, {dtype or 'float32'}"] = all(map(torch.equal, late, waited))
    return {"same_weights": same}


def tight_bytes(device: torch.device) -> int:
    """Return 60 % of what four layers of GPT-2 take without a budget."""
    torch._dynamo.reset()
    free = Training(gpt2(device, num_layers=4), device, inner="aot_eager")
    free.losses(1)
    return int(0.6 * elixir.measure_step(free.step, device=device.type).device_peak_bytes)


def attention_dropout(device: torch.device) -> Figures:
    """Train in fp32 with dropout in the attention, whose seed may be a host tensor: offloaded; with timed regions."""
    figures: Figures = {}
    for name, options in {"offload": {"activations": "offload"}, "profile_regions": {"profile_regions": True}}.items():
        torch._dynamo.reset()
        model = gpt2(device, num_layers=4, attn_pdrop=0.1, attn_implementation="sdpa")
        own = Training(model, device, device_memory=tight_bytes(device), **options)
        figures[name] = own.losses(4)
    return figures


def budgets(device: torch.device, case: Sequence[str] = ()) -> Figures:
    """Compare planned, requested, allocated and reserved bytes by budget, with segments that expand and without."""
    if case:
        share, free_bytes = float(case[0]), int(case[1])
        budget = int(share * free_bytes) if free_bytes else None
        own = Training(gpt2(device), device, device_memory=budget)
        own.losses(3)
        settle(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        own.losses(2)
        found: Figures = {"budget_bytes": budget, "planned_bytes": own.planned_bytes()}
        if device.type == "cuda":
            stats = torch.cuda.memory_stats(device)
            for name in ("requested_bytes", "allocated_bytes", "reserved_bytes"):
                found[name] = stats[f"{name}.all.peak"]
        found["step_s"] = seconds_of(own.step, device)
        return found
    free = in_process(device, "budgets", ["1.0", "0"], {})
    figures: Figures = {"without a budget": free}
    free_bytes = free.get("allocated_bytes") or free.get("planned_bytes")
    for expands in ("False", "True"):
        setting = {"PYTORCH_ALLOC_CONF": f"expandable_segments:{expands}"}
        setting["PYTORCH_CUDA_ALLOC_CONF"] = setting["PYTORCH_ALLOC_CONF"]
        for share in SHARES:
            name = f"{share:.0%}, expandable segments {expands}"
            figures[name] = in_process(device, "budgets", [str(share), str(free_bytes)], setting)
    return figures


def trace(device: torch.device) -> Figures:
    """Profile a step at 60 %: the busy seconds of compute and copies, and the seconds in which both run."""
    from torch.profiler import ProfilerActivity, profile

    free = Training(gpt2(device), device)
    free.losses(3)
    budget = int(0.6 * elixir.measure_step(free.step, device=device.type).device_peak_bytes)
    del free
    own = Training(gpt2(device), device, device_memory=budget)
    own.losses(8)
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=activities) as profiled:
        own.step()
        settle(device)
    copies, kernels = [], []
    for event in profiled.events():
        if str(event.device_type).endswith("CUDA"):
            span = (event.time_range.start / 1e6, event.time_range.end / 1e6)
            (copies if event.name.startswith("Memcpy") and "DtoD" not in event.name else kernels).append(span)
    return {
        "copy_s": length(union(copies)),
        "compute_s": length(union(kernels)),
        "either_s": length(union(copies + kernels)),
        "step_s": seconds_of(own.step, device),
        "longest": profiled.key_averages().table(row_limit=25).splitlines(),
    }


Spans = list[tuple[float, float]]


def union(spans: Spans) -> Spans:
    """Return the union of `spans` as spans that do not overlap."""
    merged: Spans = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def length(spans: Spans) -> float:
    """Return the seconds in `spans`."""
    return sum(end - start for start, end in spans)


def sanitizer(device: torch.device, case: Sequence[str] = ()) -> Figures:
    """Train three steps under torch's sanitizer of streams, which knows device tensors only."""
    if case:
        own = Training(gpt2(device, num_layers=4), device, inner="aot_eager", device_memory=int(case[0]))
        return {"losses": own.losses(3)}
    return in_process(device, "sanitizer", [str(tight_bytes(device))], {"TORCH_CUDA_SANITIZER": "1"})


def measured_machine(device: torch.device) -> Figures:
    """Return the profile that `elixir-compile measure` makes of this machine; later plans of the user do not see it."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            ["elixir-compile", "measure", "--json"],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "ELIXIR_CACHE_DIR": folder},
        )
    return {"profile": json.loads(done.stdout)}


def second_device(device: torch.device) -> Figures:
    """Train nine steps on the second device while the first is current; the first may hold no tensor of it."""
    if torch.cuda.device_count() < 2:
        return {"skipped": "one device"}
    other = torch.device("cuda", 1)
    own = Training(gpt2(other, num_layers=4), other)
    losses = own.losses(9)
    return {"losses": losses, "allocated_bytes_of_first": torch.cuda.memory_allocated(0)}


def two_ranks(device: torch.device) -> Figures:
    """Train on two ranks with NCCL and list which processes hold memory on the first device."""
    if torch.cuda.device_count() < 2:
        return {"skipped": "one device"}
    example = Path(__file__).parents[1] / "examples" / "two_ranks" / "main.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", str(example)]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    time.sleep(60)
    query = ("nvidia-smi", "--query-compute-apps=gpu_uuid,pid,used_memory", "--format=csv")
    apps = output_of(*query)
    output, _ = running.communicate()
    return {"processes": apps.splitlines(), "exit_code": running.returncode, "output": output.splitlines()[-40:]}


STEPS = {
    "second_device": Step(second_device, 240),
    "two_ranks": Step(two_ranks, 300),
    "versions": Step(versions, 120),
    "workspaces": Step(workspaces, 60),
    "gpt2_at_60_percent": Step(gpt2_at_60_percent, 300),
    "slow_compute": Step(slow_compute, 300),
    "attention_dropout": Step(attention_dropout, 240),
    "gpu_tests": Step(gpu_tests, 540),
    "budgets": Step(budgets, 540),
    "trace": Step(trace, 240),
    "sanitizer": Step(sanitizer, 240),
    "measured_machine": Step(measured_machine, 120),
}


def main() -> int:
    """Answer the step of the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", nargs="?", choices=STEPS)
    parser.add_argument("--list", action="store_true", help="print the steps in order, each with its limit in seconds")
    parser.add_argument("--device", default="cuda", type=torch.device)
    parser.add_argument("--out", type=Path, help="the file of the figures")
    parser.add_argument("--case", nargs="+", default=[], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(f"{name} {step.limit_s}" for name, step in STEPS.items()))
        return 0
    if arguments.step is None:
        parser.error("name a step, or --list")
    if arguments.device.type == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device; `--device cpu` checks the step itself")
    answer = STEPS[arguments.step].answer
    figures = answer(arguments.device, arguments.case) if arguments.case else answer(arguments.device)
    text = json.dumps({"step": arguments.step, "machine": machine(), "figures": figures}, indent=2)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
