"""Answer one question about Elixir on one GPU; `run.sh` asks them in order. Each fact is written when it is known.

    python benchmarks/gpu/steps.py trains --out /tmp/gpu   # JSON lines in /tmp/gpu/trains.jsonl
    python benchmarks/gpu/steps.py train --budget-of torch --share 0.5 --name half --out /tmp/gpu
    python benchmarks/gpu/steps.py trains --device cpu --tiny       # checks the question itself: no figure counts

A question is a process of its own with a limit of time; what it has found stays if it is stopped.
"""

import argparse
import fcntl
import gc
import json
import os
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

BEGAN_S = time.perf_counter()
MIB, GIB = 2**20, 2**30
LLAMA_SIZES = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 20, "num_attention_heads": 16}
TINY_LLAMA_SIZES = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 6, "num_attention_heads": 4}
CODED_SIZES = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 24, "num_attention_heads": 32}


def parsed() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", choices=["facts", "pinning", "trains", "late", "sanitizer", "measure", "train"])
    parser.add_argument("--out", type=Path, default=Path("/tmp/gpu"), help="the folder of the facts")
    parser.add_argument("--name", default="", help="the name of the file of the facts, instead of the question's")
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--tiny", action="store_true", help="models of some kilobytes, op by op: for devices whose figures mean nothing"
    )
    parser.add_argument("--inner", default="aot_eager", help="trains: what compiles the regions")
    parser.add_argument("--backend", default="elixir", choices=["elixir", "torch", "fsdp2"])
    parser.add_argument("--model", default="llama", choices=["llama", "coded"], help="train: coded is in NF4 with LoRA")
    parser.add_argument("--optimizer", default="adamw", choices=["adamw", "muon"], help="train: muon is for matrices")
    parser.add_argument("--budget-of", default="", help="train: the question whose measured peak is the budget")
    parser.add_argument("--share", type=float, default=1.0, help="train: the share of that peak")
    parser.add_argument("--dtype", default="", help="train: the parameters' dtype, with fp32 masters")
    parser.add_argument("--expandable", action="store_true", help="let segments of the allocator expand")
    parser.add_argument("--trace", action="store_true", help="train: a profiler's trace of a step")
    parser.add_argument("--turns", action="store_true", help="train: beside others; steps but the first are alone")
    parser.add_argument("--steps", type=int, default=14)
    chosen = parser.parse_args()
    if chosen.tiny:
        chosen.inner = "aot_eager"
    return chosen


ARGUMENTS = parsed()
NAME = ARGUMENTS.name or ARGUMENTS.question
ARGUMENTS.out.mkdir(parents=True, exist_ok=True)
FACTS = (ARGUMENTS.out / f"{NAME}.jsonl").open("a", encoding="utf-8")
TURN = (ARGUMENTS.out / "turn").open("w")
"""A lock that a question holds from its turn on to the end of its process."""
FAILED: list[str] = []
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in what it starts with `&`


def note(**facts: object) -> None:
    """Write facts, with the seconds since the start of the process."""
    line = json.dumps({"at_s": round(time.perf_counter() - BEGAN_S, 2), **facts}, default=str)
    FACTS.write(line + "\n")
    FACTS.flush()
    print(f"[{NAME}] {line[:400]}", flush=True)


@contextmanager
def case(name: str) -> Iterator[None]:
    """Note the seconds of a case, or its traceback; the next case runs in any event."""
    began_s = time.perf_counter()
    try:
        yield
        note(case=name, ok=True, took_s=round(time.perf_counter() - began_s, 2))
    except BaseException as error:
        text = traceback.format_exc()
        note(case=name, ok=False, error=f"{type(error).__name__}: {error}"[:1500], traceback=text[-6000:])
        FAILED.append(name)
        if isinstance(error, KeyboardInterrupt):
            raise


if ARGUMENTS.tiny:  # beside kilobytes, the usual workspaces of matrix products, 32 MiB, would be all of the memory
    os.environ.update(CUBLAS_WORKSPACE_CONFIG=":16:8", CUBLASLT_WORKSPACE_SIZE="0")
if ARGUMENTS.expandable:
    os.environ["PYTORCH_ALLOC_CONF"] = os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
with case("import"):
    import torch

    note(torch=torch.__version__)
DEVICE = torch.device(ARGUMENTS.device, 0) if ARGUMENTS.device == "cuda" else torch.device(ARGUMENTS.device)
IS_CUDA = DEVICE.type == "cuda"
TOKENS = (2, 64) if ARGUMENTS.tiny else (4, 256)


def settle() -> None:
    """Wait for the device."""
    if IS_CUDA:
        torch.cuda.synchronize()


def allocator() -> dict[str, int]:
    """Return the peaks of the allocator since they were reset, its retries, and the free bytes of the device."""
    if not IS_CUDA:
        return {}
    stats = torch.cuda.memory_stats()
    peaks = {name: stats[f"{name}.all.peak"] for name in ("requested_bytes", "allocated_bytes", "reserved_bytes")}
    return {**peaks, "retries": stats["num_alloc_retries"], "free_bytes": torch.cuda.mem_get_info()[0]}


def facts() -> None:
    """Note what the machine has."""
    commands = (
        "nvidia-smi",
        "nvidia-smi topo -m",
        "nvidia-smi -q -d PCI,CLOCK",
        "lscpu",
        "free -g",
        "df -h /tmp /dev/shm",
        "ulimit -l; cat /sys/fs/cgroup/memory.max; ls /proc/self/numa_maps",
        "which git gcc g++ nvcc; gcc --version; uname -a",
        f"{sys.executable} -m pip list",
        f"{sys.executable} -m elixir_compile doctor",
    )
    for command in commands:
        with case(command):
            done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, check=False)
            note(command=command, said=(done.stdout + done.stderr)[-12000:])
    if IS_CUDA:
        with case("device"):
            note(cudnn=torch.backends.cudnn.version(), device=str(torch.cuda.get_device_properties(0)))


def pinning() -> None:
    """Note the seconds to pin slabs, the workspaces of matrix products, and which attention kernel torch chooses."""
    from elixir_compile.runtime.bucket import Slab
    from elixir_compile.session.machine import library_bytes

    for num, nbytes in ((1, 2**20),) if ARGUMENTS.tiny else ((1, GIB), (1, 4 * GIB), (64, 28 * 2**20)):
        with case(f"pin {num} x {nbytes >> 20} MiB"):
            began_s = time.perf_counter()
            slabs = [Slab(nbytes, pin=IS_CUDA) for _ in range(num)]
            note(pinned_bytes=num * nbytes, took_s=time.perf_counter() - began_s, is_pinned=slabs[-1].is_pinned)
            if IS_CUDA:
                target = torch.empty(nbytes, dtype=torch.uint8, device=DEVICE)
                source = slabs[0].tensor(torch.uint8, (nbytes,), 0)
                for name, to, given in (("h2d", target, source), ("d2h", source, target)):
                    to.copy_(given, non_blocking=True)
                    settle()
                    began_s = time.perf_counter()
                    to.copy_(given, non_blocking=True)
                    settle()
                    note(copy=name, nbytes=nbytes, bytes_per_s=nbytes / (time.perf_counter() - began_s))
            del slabs
    with case("workspaces"):
        note(library_bytes=library_bytes(DEVICE))
        one = torch.ones(16, 16, device=DEVICE)
        for dtype in (torch.float32, torch.bfloat16) if IS_CUDA else ():
            before_bytes = torch.cuda.memory_allocated()
            torch.addmm(one[0].to(dtype), one.to(dtype), one.to(dtype))
            note(after=f"addmm {dtype}", more_bytes=torch.cuda.memory_allocated() - before_bytes)
    with case("attention kernels"):
        for dtype in (torch.float32, torch.bfloat16):
            query = torch.randn(2, 4, 128, 64, device=DEVICE, dtype=dtype, requires_grad=True)
            result = torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
            note(attention=str(dtype), node=type(result.grad_fn).__name__)


def gpt2(num_layers: int, **options: object) -> torch.nn.Module:
    """Return a GPT-2 on the host, without dropout unless `options` say so."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    tiny = {"n_embd": 64, "n_head": 4, "vocab_size": 256, "n_positions": TOKENS[1]}
    sizes = tiny if ARGUMENTS.tiny else {"vocab_size": 8192}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(n_layer=num_layers, **{**dropout, **sizes, **options})).train()


def trained_params(model: torch.nn.Module) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    """Return the trained parameters that Muon updates, if it was asked for, and the other ones."""
    trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    by_muon = {
        name for name, param in trained if ARGUMENTS.optimizer == "muon" and ".layers." in name and param.ndim == 2
    }
    return [p for name, p in trained if name in by_muon], [p for name, p in trained if name not in by_muon]


class Training:
    """A training of a language model on random tokens, by Elixir or by another backend of torch."""

    def __init__(self, model: torch.nn.Module, backend: str, *, param_dtype: str | None = None, **options: Any) -> None:
        import elixir_compile as elixir

        torch._dynamo.reset()
        self.model, self.num_steps = model, 0
        if backend == "elixir":
            elixir.prepare(model, device=DEVICE, param_dtype=param_dtype)
            # The host of a virtual machine may grow, so its free memory of this moment says little.
            host = {"host_memory": "100GiB"} if IS_CUDA else {}
            options = {"report": True, "plan_cache": False, **host, **options}
            self.compiled = torch.compile(model, backend="elixir", options=options)
        elif backend == "fsdp2":
            self.compiled = sharded_by_fsdp2(model)
        else:
            self.compiled = torch.compile(model.to(DEVICE), backend=backend)
        matrices, others = trained_params(model)
        self.optimizers: list[Any] = []
        if backend == "elixir":
            self.optimizers += [elixir.hybrid(torch.optim.Muon)(matrices, lr=1e-3)] if matrices else []
            self.optimizers += [elixir.HybridAdamW(others, lr=3e-4)]
        else:
            self.optimizers += [torch.optim.Muon(matrices, lr=1e-3)] if matrices else []
            self.optimizers += [torch.optim.AdamW(others, lr=3e-4, fused=True)]

    def loss(self, shape: Sequence[int] = TOKENS, *, autocast: bool = False) -> torch.Tensor:
        """Run the forward on the next tokens."""
        generator = torch.Generator().manual_seed(self.num_steps)
        self.num_steps += 1
        tokens = torch.randint(0, self.model.config.vocab_size, shape, generator=generator).to(DEVICE)
        with torch.autocast(DEVICE.type, torch.bfloat16) if autocast else nullcontext():
            return self.compiled(input_ids=tokens, labels=tokens).loss

    def step(self, shape: Sequence[int] = TOKENS, *, autocast: bool = False) -> torch.Tensor:
        """Train on the next tokens and return their loss, on the device."""
        loss = self.loss(shape, autocast=autocast)
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    def losses(self, num: int) -> list[float]:
        """Train `num` steps and return their losses."""
        return [float(self.step()) for _ in range(num)]

    def grads(self) -> dict[str, torch.Tensor]:
        """Return the gradients of the next tokens, on the host, and forget them."""
        self.loss().backward()
        found = {name: p.grad.detach().cpu() for name, p in self.model.named_parameters() if p.grad is not None}
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        return found


def trains() -> None:
    """Compare ten steps, past a new plan, with those of torch: kept, and in 60 and 40 % of the peak."""
    import elixir_compile as elixir

    inner, free_bytes = ARGUMENTS.inner, 0
    grads: dict[str, torch.Tensor] = {}
    theirs: list[float] = []
    with case(f"torch {inner}"):
        reference = Training(gpt2(4, attn_implementation="eager"), inner)
        grads, theirs = reference.grads(), reference.losses(10)
        note(losses=theirs)
        del reference
    for share, options in ((1.0, {}), (0.6, {}), (0.4, {}), (0.4, {"activations": "offload"})):
        name = f"{inner} {share:.0%} {options.get('activations', '')}".rstrip()
        with case(name):
            gc.collect()
            if share < 1 and not free_bytes:
                raise RuntimeError("without a budget no step was measured, so there is no peak to take a share of")
            budget = int(share * free_bytes) if share < 1 else None
            own = Training(gpt2(4, attn_implementation="eager"), "elixir", inner=inner, device_memory=budget, **options)
            mine = own.grads()
            apart = {n: float((mine[n] - g).abs().max()) for n, g in grads.items() if not torch.equal(mine[n], g)}
            note(case=name, gradients_differ=len(apart), of=len(grads), most=max(apart.values(), default=0.0))
            del mine  # on a CPU, these are bytes of the device
            losses = own.losses(10)
            record = elixir.measure_step(own.step, device=DEVICE.type)
            plan = elixir.compilations(own.compiled)[-1].plan
            free_bytes = free_bytes or record.device_peak_bytes
            note(
                case=name,
                budget_bytes=budget,
                planned_bytes=plan.prediction.device_peak_bytes,
                measured_bytes=record.device_peak_bytes,
                held=budget is None or record.device_peak_bytes <= budget,
                counts=dict(record.counts),
                losses=losses,
                losses_apart=max((abs(a - b) for a, b in zip(losses, theirs, strict=False)), default=None),
                **allocator(),
            )
            del own


def late() -> None:
    """Compare the weights of each update mode under late compute with those of a run that waits after every copy.

    Both follow one plan: host and device round an update otherwise.
    """
    import elixir_compile as elixir
    from elixir_compile.runtime.executor import Executor

    free = Training(gpt2(4), "elixir", inner="aot_eager")
    free.losses(1)
    budget = int(0.6 * elixir.measure_step(free.step, device=DEVICE.type).device_peak_bytes)
    del free
    usual = Executor.gather

    def weights(mode: str, dtype: str | None, around: Callable[[], None], plan: Path) -> list[torch.Tensor]:
        def gather(self: Executor, bucket_id: Any) -> Any:
            around()
            transfer = usual(self, bucket_id)
            around()
            return transfer

        Executor.gather = gather  # type: ignore[method-assign]
        try:
            own = Training(
                gpt2(4),
                "elixir",
                update=mode,
                planner="greedy",
                inner="aot_eager",
                device_memory=budget,
                param_dtype=dtype,
                replan=False,
                plan=str(plan) if plan.exists() else None,
            )
            own.losses(3)
            own.optimizers[0].wait()
            elixir.save_plan(elixir.compilations(own.compiled)[-1], plan)
            return [param.detach().cpu().clone() for param in own.model.parameters()]
        finally:
            Executor.gather = usual  # type: ignore[method-assign]

    def sleep() -> None:
        if IS_CUDA:
            torch.cuda._sleep(5_000_000)

    for mode in ("across_steps", "in_backward", "after_backward"):
        for dtype in (None, "bfloat16"):
            with case(f"{mode} {dtype or 'float32'}"):
                plan = ARGUMENTS.out / f"late.{mode}.{dtype}.plan.json"
                same = all(map(torch.equal, weights(mode, dtype, settle, plan), weights(mode, dtype, sleep, plan)))
                note(mode=mode, dtype=dtype or "float32", same=same)


def sanitizer() -> None:
    """Train three steps with everything on the host; `run.sh` sets TORCH_CUDA_SANITIZER=1."""
    with case("three steps"):
        own = Training(gpt2(2), "elixir", inner="aot_eager", planner="zero3_offload")
        note(losses=own.losses(3))


def measure() -> None:
    """Note the measured profile of the machine, and the built-in one of the same device."""
    from elixir_compile.compat.platforms import memory_sizes_bytes, platform_of
    from elixir_compile.ir.hardware import cluster_to_json, profile_for
    from elixir_compile.tools.measure.machine import measure_machine

    with case("measured"):
        found = measure_machine(DEVICE, seconds=1.0 if ARGUMENTS.tiny else 12.0)
        note(measured=json.loads(cluster_to_json(found)))
        (ARGUMENTS.out / "machine.json").write_text(cluster_to_json(found), encoding="utf-8")
    with case("built in"):
        built_in = profile_for(DEVICE.type, *memory_sizes_bytes(DEVICE), platform_of(DEVICE).name(DEVICE))
        note(built_in=json.loads(cluster_to_json(built_in)))


def llama(**sizes: int) -> torch.nn.Module:
    """Return a Llama of 1.1 B fp32 parameters on the host, or of other sizes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    own = TINY_LLAMA_SIZES if ARGUMENTS.tiny else {**LLAMA_SIZES, **sizes}
    words = 256 if ARGUMENTS.tiny else 32000
    options = {"vocab_size": words, "max_position_embeddings": 2048, "use_cache": False, "tie_word_embeddings": False}
    return LlamaForCausalLM(LlamaConfig(**own, **options, attn_implementation="sdpa")).train()


class Coded(torch.nn.Module):
    """A linear layer whose frozen weight is in NF4, by plain ops, beside a trained adapter of rank 16."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.shape = (num_out, num_in)
        codes = torch.randint(0, 256, (num_in * num_out // 64, 32), dtype=torch.uint8)
        self.codes = torch.nn.Parameter(codes, requires_grad=False)
        self.scales = torch.nn.Parameter(torch.rand(len(codes), 1) / num_in**0.5, requires_grad=False)
        self.register_buffer("table", torch.linspace(-1, 1, 16))
        self.down = torch.nn.Parameter(torch.randn(16, num_in) / num_in**0.5)
        self.up = torch.nn.Parameter(torch.zeros(num_out, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product of `x` and the sum of both."""
        places = torch.stack([self.codes & 15, self.codes >> 4], -1).view(-1, 64).int()
        weight = (self.table[places] * self.scales).view(self.shape)
        linear = torch.nn.functional.linear
        return linear(x, weight) + linear(linear(x, self.down), self.up)


def coded() -> torch.nn.Module:
    """Return a Llama of 5.5 B parameters in bfloat16, whose layers have frozen weights in NF4 and trained adapters."""
    model = llama(**CODED_SIZES, num_key_value_heads=8).requires_grad_(requires_grad=False)
    for layer in model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, child in list(part.named_children()):
                if isinstance(child, torch.nn.Linear):
                    setattr(part, name, Coded(child.in_features, child.out_features))
    return model.to(torch.bfloat16)


def made() -> torch.nn.Module:
    """Return the model of the question, on the host: random numbers for 1.1 B parameters take 20 s there."""
    with DEVICE:
        model = llama() if ARGUMENTS.model == "llama" else coded()
    model = model.to("cpu")
    if IS_CUDA:
        torch.cuda.empty_cache()
    return model


def sharded_by_fsdp2(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model under torch's FSDP2 on one rank, with its state on the host and each layer compiled."""
    from torch import distributed
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", RANK="0", WORLD_SIZE="1")
    distributed.init_process_group("cpu:gloo,cuda:nccl" if IS_CUDA else "gloo")
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        layer.compile(backend="aot_eager" if ARGUMENTS.tiny else "inductor")
        fully_shard(layer, mp_policy=precision, offload_policy=CPUOffloadPolicy())
    fully_shard(model, mp_policy=precision, offload_policy=CPUOffloadPolicy())
    for buffer in model.buffers():
        buffer.data = buffer.data.to(DEVICE)
    return model


def train() -> None:
    """Train the Llama by `--backend`: seconds, bytes and losses of each step; by Elixir also the plan and a record."""
    budget = None
    if ARGUMENTS.budget_of:
        peak = ARGUMENTS.out / f"{ARGUMENTS.budget_of}.peak"
        # Without the peak of the other run, the figures of this one still count.
        budget = int(ARGUMENTS.share * (int(peak.read_text()) if peak.exists() else 36 * GIB))
    shape = (2, 64) if ARGUMENTS.tiny else (8 if ARGUMENTS.model == "llama" else 4, 1024)
    autocast = ARGUMENTS.backend != "fsdp2" and not ARGUMENTS.dtype and ARGUMENTS.model == "llama"
    options: dict[str, Any] = {"param_dtype": ARGUMENTS.dtype or None, "device_memory": budget}
    options |= {"inner": "aot_eager"} if ARGUMENTS.tiny else {}
    if (ARGUMENTS.out / "machine.json").exists():
        options["hardware"] = str(ARGUMENTS.out / "machine.json")
    model = made()
    num_params = sum(param.numel() for param in model.parameters())
    note(params=num_params, model=ARGUMENTS.model, optimizer=ARGUMENTS.optimizer, budget_bytes=budget)
    backend = {"torch": "aot_eager" if ARGUMENTS.tiny else "inductor"}.get(ARGUMENTS.backend, ARGUMENTS.backend)
    own = Training(model, backend, **(options if backend == "elixir" else {}))
    seconds: list[float] = []
    for number in range(ARGUMENTS.steps):
        if number == 1 and ARGUMENTS.turns:
            wait_for_turn()
        if number == ARGUMENTS.steps - 4 and IS_CUDA:
            torch.cuda.reset_peak_memory_stats()
        settle()
        began_s = time.perf_counter()
        # The step that the plan is compared with: Elixir too keeps a history of its blocks.
        with blocks_at_peak() if backend == "elixir" and number == 1 else nullcontext():
            loss = own.step(shape, autocast=autocast)
            settle()
        seconds.append(time.perf_counter() - began_s)
        note(step=number, step_s=round(seconds[-1], 4), loss=float(loss), **allocator())
        if backend == "elixir" and number in (0, 8):  # 8: after a new plan
            note_plan(own)
    note(backend=ARGUMENTS.backend, budget_bytes=budget, median_s=statistics.median(seconds[-4:]), **allocator())
    if IS_CUDA:
        (ARGUMENTS.out / f"{NAME}.peak").write_text(str(allocator()["requested_bytes"]))
    if backend == "elixir":
        note_record(lambda: own.step(shape, autocast=autocast))
        note_waits(lambda: own.step(shape, autocast=autocast))
    if ARGUMENTS.trace:
        note_trace(lambda: own.step(shape, autocast=autocast))


def wait_for_turn() -> None:
    """Wait until `run.sh` lets the questions go on that it has asked beside each other, one of them at a time."""
    (ARGUMENTS.out / f"{NAME}.ready").touch()
    while not (ARGUMENTS.out / "go").exists():
        time.sleep(0.1)
    fcntl.flock(TURN, fcntl.LOCK_EX)


@contextmanager
def blocks_at_peak() -> Iterator[None]:
    """Note the blocks of the allocator at the peak of the `with` block: how many of which bytes, and which came last.

    The sizes tell which tensors they are: beside the saved plan and its question, what no plan counted.
    """
    from elixir_compile.compat.platforms import platform_of

    record = platform_of(DEVICE).record_blocks(DEVICE) if IS_CUDA else None
    yield
    events = None if record is None else record.stop()
    if record is None or events is None:
        return
    there, live = dict(record.nbytes_at), sum(record.nbytes_at.values())
    peak, at = live, 0
    for number, (_, _, nbytes) in enumerate(events, start=1):
        live += nbytes
        peak, at = (live, number) if live > peak else (peak, at)
    for _, address, nbytes in events[:at]:
        there.pop(address, None)
        if nbytes > 0:
            there[address] = nbytes
    note(
        peak_blocks_bytes=peak,
        peak_blocks=sorted(Counter(there.values()).items(), reverse=True)[:64],
        peak_came=[nbytes for _, _, nbytes in events[max(0, at - 200) : at + 20] if abs(nbytes) >= MIB],
    )


def note_plan(own: Training) -> None:
    """Note the plans in force of a training by Elixir."""
    import elixir_compile as elixir

    for number, made in enumerate(elixir.compilations(own.compiled)):
        elixir.save_plan(made, ARGUMENTS.out / f"{NAME}.{number}.plan.json")
        predicted = made.plan.prediction
        note(planned_bytes=predicted.device_peak_bytes, planned_s=predicted.step_s, bound_s=made.plan.bound_s)
        explained = str(elixir.explain(made.plan))
        (ARGUMENTS.out / f"{NAME}.{number}.explain.txt").write_text(explained, encoding="utf-8")


def note_record(step: Callable[[], object]) -> None:
    """Note the record of a measured step: its seconds by lane, its peaks and its actions."""
    import elixir_compile as elixir

    with case("record"):
        record = elixir.measure_step(step, device=DEVICE.type)
        lanes_s: dict[str, float] = {}
        for span in record.spans:
            lanes_s[span.lane.value] = lanes_s.get(span.lane.value, 0.0) + span.end_s - span.start_s
        note(
            record_s=record.step_s,
            peak_bytes=record.device_peak_bytes,
            host_bytes=record.host_peak_bytes,
            lanes_s=lanes_s,
            counts=dict(record.counts),
        )


def note_waits(step: Callable[[], object]) -> None:
    """Note what the host's waits at the ends of forwards and backwards cost: seconds of steps with them and without.

    Without them nothing orders what this thread does next with the copies, so the weights mean nothing from then on.
    """
    from elixir_compile.runtime.lanes import StreamLane

    usual = StreamLane.synchronize

    def passes(lane: StreamLane) -> None:
        """Let the host go on."""

    def steps_s(waits: bool) -> float:
        StreamLane.synchronize = usual if waits else passes  # type: ignore[method-assign]
        began_s = time.perf_counter()
        for _ in range(3):
            step()
        settle()
        return (time.perf_counter() - began_s) / 3

    with case("waits"):
        try:
            pairs = [(steps_s(True), steps_s(False)) for _ in range(4)]
        finally:
            StreamLane.synchronize = usual  # type: ignore[method-assign]
        waiting_s, free_s = (statistics.median(column) for column in zip(*pairs, strict=True))
        note(waiting_s=waiting_s, without_waits_s=free_s)


def note_trace(step: Callable[[], object]) -> None:
    """Write the trace of a step by torch's profiler, and its table of kernels."""
    from torch.profiler import ProfilerActivity, profile

    with case("trace"):
        with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if IS_CUDA else [])]) as profiled:
            step()
            settle()
        profiled.export_chrome_trace(str(ARGUMENTS.out / f"{NAME}.trace.json.gz"))
        table = profiled.key_averages().table(row_limit=40)
        (ARGUMENTS.out / f"{NAME}.table.txt").write_text(table, encoding="utf-8")


if __name__ == "__main__":
    with case(ARGUMENTS.question):
        globals()[ARGUMENTS.question]()
    note(done=True)
    os._exit(bool(FAILED))  # a teardown of a device may hang
