"""A rank that trains GPT-2 by `fully_shard` (FSDP2) or by Elixir, and `Group`, which runs all ranks of a case.

group = Group(Case(by="fsdp"))     starts the ranks; `first` has the figures of their first steps
group.steps(1)                     takes the next step; its seconds are those of the slowest rank
"""

import ctypes
import gc
import json
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta

import quiet  # noqa: F401  before torch
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from worker import Worker, plan_figures, stepper, timed

import elixir_compile as elixir
from elixir_compile.compat import AllocatorProfile
from elixir_compile.runtime.measure import Resident, peak_bytes

NUM_RANKS = 2
BATCH, LENGTH, QUICK_LENGTH = 2, 256, 64
QUICK_LAYERS, QUICK_WIDTH, QUICK_VOCABULARY = 3, 256, 4096
NUM_FIRST = 3
"""Steps before any is measured: the first compiles, the second makes the optimizer's state."""
LIMIT_S = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A training on two ranks: its backend, and the memory that it may use."""

    by: str = "elixir"
    """`elixir`, or `fsdp`: `fully_shard` on each block and on the model."""
    compiles: bool = True
    """Whether `fsdp` compiles its blocks and its loss."""
    offloads: bool = False
    """Whether `fsdp` keeps parameters, gradients and state on the host."""
    budget_bytes: int | None = None
    """The device budget of `elixir`."""
    host_bytes: int | None = None
    """The host budget of `elixir`; None for its default."""
    quick: bool = False


def model_of(case: Case) -> torch.nn.Module:
    """Return GPT-2 124M, or a small GPT-2 if `case` is quick, with random weights from seed 0."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
    if case.quick:
        config.update({"n_layer": QUICK_LAYERS, "n_embd": QUICK_WIDTH, "n_head": 4, "vocab_size": QUICK_VOCABULARY})
    return GPT2LMHeadModel(config).train()


def tokens_of(model: torch.nn.Module, case: Case, rank: int) -> torch.Tensor:
    """Return random tokens with `rank` as their seed."""
    shape = (BATCH, QUICK_LENGTH if case.quick else LENGTH)
    return torch.randint(0, model.config.vocab_size, shape, generator=torch.Generator().manual_seed(rank))


def fsdp(case: Case, model: torch.nn.Module) -> tuple[Callable, torch.optim.Optimizer]:
    """Return `model` under `fully_shard`, each block on its own, and torch's fused AdamW."""
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    policy = CPUOffloadPolicy(pin_memory=False) if case.offloads else OffloadPolicy()
    for block in model.transformer.h:
        if case.compiles:
            block.compile()
        fully_shard(block, mesh=mesh, offload_policy=policy)
    if case.compiles:
        model.loss_function = torch.compile(model.loss_function)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)


def ours(case: Case, model: torch.nn.Module, **more: object) -> tuple[Callable, torch.optim.Optimizer]:
    """Return `model` compiled by Elixir under the budgets of `case` and the options `more`, and `HybridAdamW`."""
    elixir.prepare(model, mesh=init_device_mesh("cpu", (NUM_RANKS,)))
    options = {
        "device_memory": case.budget_bytes, "host_memory": case.host_bytes, "plan_cache": False, "replan": False,
        "report": False, **more,
    }  # fmt: skip
    return torch.compile(model, backend="elixir", options=options), elixir.HybridAdamW(model.parameters(), lr=3e-4)


def loss_of(compiled: Callable, tokens: torch.Tensor) -> float:
    """Return the mean loss of all ranks."""
    with torch.no_grad():
        loss = compiled(input_ids=tokens, labels=tokens).loss.detach().clone()
    distributed.all_reduce(loss)
    return float(loss) / NUM_RANKS


def host_addresses(optimizer: torch.optim.Optimizer) -> set[int]:
    """Return the addresses of storages that `fully_shard` keeps on the host: parameters, gradients and state."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    kept = [*params, *(param.grad for param in params if param.grad is not None)]
    kept += [value for param in params for value in optimizer.state[param].values()]
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in kept]
    return {tensor.untyped_storage().data_ptr() for tensor in local}


def peaks(work: Callable[[], None], optimizer: torch.optim.Optimizer, case: Case) -> dict[str, int]:
    """Take a step; return the peak bytes on the device and on the host.

    On a CPU, device bytes are all bytes from torch's allocator, less host bytes. Elixir's host bytes are its slabs.
    Host bytes of `fully_shard` are the shards it offloads, which it keeps in plain memory; 0 if it does not offload.
    """
    if case.by == "elixir":
        record = elixir.measure_step(work)
        return {"peak_bytes": record.device_peak_bytes, "host_bytes": record.host_peak_bytes}
    with Resident() as resident:
        with AllocatorProfile() as blocks:
            work()
        events = blocks.allocations()
    total_bytes = peak_bytes(resident.nbytes_at, resident.freed, events)
    if not case.offloads:
        return {"peak_bytes": total_bytes, "host_bytes": 0}
    away = host_addresses(optimizer)
    # Blocks reuse addresses: the last block at an address is still allocated.
    last = {address: index for index, (_, address, nbytes) in enumerate(events) if nbytes > 0 and address in away}
    on_device = {address: nbytes for address, nbytes in resident.nbytes_at.items() if address not in away}
    rest = [event for index, event in enumerate(events) if last.get(event[1]) != index]
    host_bytes = sum(events[index][2] for index in last.values())
    host_bytes += sum(
        nbytes for address, nbytes in resident.nbytes_at.items() if address in away and address not in last
    )
    return {"peak_bytes": peak_bytes(on_device, resident.freed, rest), "host_bytes": host_bytes}


def worst(figures: dict[str, int]) -> dict[str, int]:
    """Return the largest of each figure over the ranks."""
    values = torch.tensor(list(figures.values()))
    distributed.all_reduce(values, op=distributed.ReduceOp.MAX)
    return dict(zip(figures, values.tolist(), strict=True))


def timed_apart(step: Callable[[], None], times: int) -> dict[str, list[float]]:
    """Take `times` steps after a barrier of all ranks; return the seconds of each."""
    distributed.barrier()
    return timed(step, times)


def work(case: Case, rank: int, port: int) -> None:
    """Print the figures of the first steps, then take as many steps as each line of standard input says."""
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=NUM_RANKS, timeout=timedelta(minutes=10)
    )
    model = model_of(case)
    tokens = tokens_of(model, case, rank)
    compiled, optimizer = (fsdp if case.by == "fsdp" else ours)(case, model)
    del model
    step = stepper(compiled, optimizer, tokens)
    losses = []

    def keep_grads() -> None:
        compiled(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()

    for _ in range(NUM_FIRST):
        step()
    gc.collect()
    figures: dict[str, object] = dict(worst(peaks(keep_grads, optimizer, case)))
    optimizer.zero_grad()
    losses.append(loss_of(compiled, tokens))
    if case.by == "elixir":
        (made, *_) = elixir.compilations(compiled)
        figures["plan"] = plan_figures(made.plan)
    ctypes.CDLL(None).malloc_trim(0)  # several cases share the memory of the machine
    print(json.dumps({**figures, "losses": losses}), flush=True)
    for line in sys.stdin:
        print(json.dumps(timed_apart(step, int(line))), flush=True)


class Group:
    """The processes of a case, one per rank."""

    def __init__(self, case: Case, script: str = __file__) -> None:
        """Start `script` for each rank, with `case`, the rank and a free port as its arguments."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        self._pool = ThreadPoolExecutor(NUM_RANKS)
        self._workers = list(self._pool.map(lambda rank: _worker(script, case, rank, port), range(NUM_RANKS)))
        self.first = self._workers[0].first

    def steps(self, times: int) -> dict[str, list[float]]:
        """Take `times` steps; return the wall seconds of the slowest rank and the CPU seconds of all ranks for each."""
        found = list(self._pool.map(lambda worker: worker.steps(times), self._workers))
        wall_s, own_s = (zip(*(answer[clock] for answer in found), strict=True) for clock in ("wall_s", "own_s"))
        return {"wall_s": [max(each) for each in wall_s], "own_s": [sum(each) for each in own_s]}

    def stop(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.stop()
        self._pool.shutdown()


def _worker(script: str, case: Case, rank: int, port: int) -> Worker:
    return Worker(json.dumps(asdict(case)), rank, port, script=script, limit_s=LIMIT_S)


if __name__ == "__main__":
    own_case, own_rank, own_port = sys.argv[1:]
    work(Case(**json.loads(own_case)), int(own_rank), int(own_port))
