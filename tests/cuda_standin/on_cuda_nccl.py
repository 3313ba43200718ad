"""Processes over the stand-in's NCCL: each collective in each dtype, what never comes, FSDP2, and ranks of Elixir."""

import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import elixir_compile as elixir
from elixir_compile.graph.capture.modules import executor_of
from elixir_compile.graph.ops.shards import own_shard
from elixir_compile.ir import Bucket, Placement, StorageId, Tier
from elixir_compile.runtime.distributed.sharded import ShardedBucket
from elixir_compile.runtime.executor import Executor
from tests.cuda_standin import device as standin
from tests.run.models import Stack, seeded, vectors
from tests.run.processes import spawn
from tests.run.races.home import B0, in_backward, write_behind
from tests.run.training import Run, by_torch, hybrid_adamw, plain_step, scaled_bytes

WIDTH = 32
WIDE = 256
"""Of matrices that are worth sharding."""
WHOLE, FLOATS = ("int32", "int64", "uint8"), ("float16", "bfloat16", "float32", "float64")
POLICIES = {"early": standin.EARLY, "late": standin.LATE, "random": standin.RANDOM}


@contextmanager
def ranks(rank: int, policy: str = "late", *, is_ordered: bool = True) -> Iterator[DeviceMesh]:
    """Give all ranks a mesh over NCCL, and their copies and collectives moments by `policy`; no race may happen."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    group = distributed.new_group(backend="cpu:gloo,cuda:nccl", timeout=timedelta(seconds=60))
    with standin.policy(POLICIES[policy], seed=rank), standin.ordered() if is_ordered else nullcontext():
        yield DeviceMesh.from_group(group, "cuda")


def rows_of(rank: int, dtype: torch.dtype, num: int = 6) -> torch.Tensor:
    """Return what `rank` has before a collective: numbers whose sums round in half precision."""
    return (torch.arange(1, num + 1) * (7 * rank + 3) / (8 if dtype.is_floating_point else 1)).to(dtype)


def every_collective(rank: int, world_size: int, policy: str) -> None:
    with ranks(rank, policy) as mesh:
        for name in (*WHOLE, *FLOATS):
            for check in (reductions, gathers, messages):
                check(mesh.get_group(), rank, [rows_of(each, getattr(torch, name)) for each in range(world_size)])


def reductions(group: distributed.ProcessGroup, rank: int, given: list[torch.Tensor]) -> None:
    dtype, num_ranks = given[0].dtype, len(given)
    ops: dict[object, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        distributed.ReduceOp.SUM: torch.add,
        distributed.ReduceOp.PRODUCT: torch.mul,
        distributed.ReduceOp.MAX: torch.maximum,
        distributed.ReduceOp.MIN: torch.minimum,
    }
    for op, adds in ops.items():
        expected = given[0]
        for each in given[1:]:
            expected = adds(expected, each)
        own = given[rank].cuda()
        distributed.all_reduce(own, op=op, group=group)
        assert torch.equal(own.cpu(), expected), (op, dtype)
    total = sum(given[1:], given[0])
    to_one = given[rank].cuda()
    distributed.reduce(to_one, dst=1, group=group)
    assert torch.equal(to_one.cpu(), total if rank == 1 else given[rank])
    part = torch.empty(2, dtype=dtype, device="cuda")
    distributed.reduce_scatter_tensor(part, given[rank][: 2 * num_ranks].cuda(), group=group)
    assert torch.equal(part.cpu(), total[2 * rank : 2 * rank + 2])
    if not dtype.is_floating_point:
        return
    factors = {distributed.ReduceOp.AVG: 1 / num_ranks}
    if dtype != torch.bfloat16:  # torch hands a float to NCCL, which reads two bytes of it
        factors[distributed._make_nccl_premul_sum(0.5)] = 0.5
    for op, factor in factors.items():
        own = given[rank].cuda()
        distributed.all_reduce(own, op=op, group=group)
        torch.testing.assert_close(own.cpu(), sum(each.double() * factor for each in given).to(dtype))


def gathers(group: distributed.ProcessGroup, rank: int, given: list[torch.Tensor]) -> None:
    dtype, num_ranks, own = given[0].dtype, len(given), given[rank].cuda()
    whole = torch.empty(6 * num_ranks, dtype=dtype, device="cuda")
    distributed.all_gather_into_tensor(whole, own, group=group)
    assert torch.equal(whole.cpu(), torch.cat(given))
    uneven = [torch.empty(each + 1, dtype=dtype, device="cuda") for each in range(num_ranks)]
    distributed.all_gather(uneven, own[: rank + 1].clone(), group=group)
    for each, tensor in enumerate(uneven):
        assert torch.equal(tensor.cpu(), given[each][: each + 1])
    copied = own.clone()
    distributed.broadcast(copied, src=1, group=group)
    assert torch.equal(copied.cpu(), given[1])
    parts = torch.empty(2 * num_ranks, dtype=dtype, device="cuda")
    distributed.all_to_all_single(parts, own[: 2 * num_ranks].clone(), group=group)
    assert torch.equal(parts.cpu(), torch.cat([each[2 * rank : 2 * rank + 2] for each in given]))


def messages(group: distributed.ProcessGroup, rank: int, given: list[torch.Tensor]) -> None:
    num_ranks, own = len(given), given[rank].cuda()
    following, before = (rank + 1) % num_ranks, (rank - 1) % num_ranks
    got = torch.empty_like(own)
    both = [
        distributed.P2POp(distributed.isend, own, following, group),
        distributed.P2POp(distributed.irecv, got, before, group),
    ]
    for work in distributed.batch_isend_irecv(both):
        work.wait()
    assert torch.equal(got.cpu(), given[before])
    if rank == 0:
        distributed.send(own, 1, group=group)
    elif rank == 1:
        distributed.recv(got, 0, group=group)
        assert torch.equal(got.cpu(), given[0])


@pytest.mark.parametrize(("policy", "num_ranks"), [("early", 2), ("late", 3), ("random", 2)])
def test_each_collective_gives_the_same_as_the_cpu_in_each_dtype(policy: str, num_ranks: int, tmp_path: Path) -> None:
    spawn(every_collective, num_ranks, policy, folder=tmp_path, limit_s=200.0)


def races_without_a_wait(rank: int, world_size: int, policy: str) -> list[int]:
    with ranks(rank, policy) as mesh:
        group = mesh.get_group()
    found = []
    with standin.policy(POLICIES[policy]):
        for waits in (True, False):
            before = standin.count("races")
            whole = torch.zeros(8 * world_size, device="cuda")
            work = distributed.all_gather_into_tensor(whole, torch.ones(8, device="cuda"), group=group, async_op=True)
            if waits:
                work.wait()
            whole.sum()
            work.wait()
            torch.cuda.synchronize()
            found.append(standin.count("races") - before)
    return found


@pytest.mark.parametrize("policy", POLICIES)
def test_a_result_that_is_read_before_the_wait_is_a_race(policy: str, tmp_path: Path) -> None:
    for with_wait, without in spawn(races_without_a_wait, 2, policy, folder=tmp_path):
        assert with_wait == 0
        assert without > 0


def of_two(rank: int, is_blocking: bool) -> distributed.ProcessGroup:
    """Return a group of NCCL whose collectives may take two seconds, and whose waits raise errors if they block."""
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = str(int(is_blocking))
    torch.cuda.set_device(rank)
    group = distributed.new_group(backend="nccl", timeout=timedelta(seconds=2))
    distributed.all_reduce(torch.ones(4, device="cuda"), group=group)
    torch.cuda.synchronize()
    return group


def error_of(group: distributed.ProcessGroup, num: int) -> str:
    """Return the error of a sum of `num` elements, an empty text if it has none."""
    try:
        distributed.all_reduce(torch.ones(num, device="cuda"), group=group, async_op=True).wait()
    except distributed.DistBackendError as error:
        return str(error)
    return ""


def alone(rank: int, world_size: int) -> str:
    group = of_two(rank, is_blocking=True)
    return error_of(group, 4) if rank == 0 else ""


def test_a_collective_that_a_rank_never_calls_ends_in_the_timeout_of_torch(tmp_path: Path) -> None:
    said, _ = spawn(alone, 2, folder=tmp_path)
    assert "timed out" in said.lower() or "timeout" in said.lower()


def seen_by_the_watchdog(rank: int, world_size: int) -> None:
    """Rank 0 waits for what never comes, and rank 1 until rank 0 has said so; the watchdog takes a minute to end it."""
    group = of_two(rank, is_blocking=False)
    processes: list[int] = [0, 0]
    distributed.all_gather_object(processes, os.getpid())
    if rank == 0:
        distributed.all_reduce(torch.ones(4, device="cuda"), group=group)
        torch.cuda.synchronize()
    output = Path(f"/proc/{processes[0]}/fd/2")
    while "Watchdog caught collective operation timeout" not in output.read_text(encoding="utf-8"):
        time.sleep(0.1)


def test_the_watchdog_of_torch_sees_such_a_collective_while_the_host_waits_for_it(tmp_path: Path) -> None:
    spawn(seen_by_the_watchdog, 2, folder=tmp_path, lost=[0])


def differing(rank: int, world_size: int) -> str:
    return error_of(of_two(rank, is_blocking=True), 4 + rank)


def test_operations_that_differ_are_an_error_on_both_ranks(tmp_path: Path) -> None:
    for said in spawn(differing, 2, folder=tmp_path):
        assert "elements meanwhile, this rank has" in said


def sharded_by_fsdp2(rank: int, world_size: int, half: bool) -> None:
    """Two ranks with the same batches are one: each mean of two equal gradients is exact.

    FSDP2 frees gradients on the stream of its reduces while the optimizer reads them on another: what takes that memory
    next waits for the optimizer, but the clocks look at the end of the gradient.
    """
    with ranks(rank, is_ordered=False) as mesh:
        batches = [batch.cuda() for batch in vectors(3, width=WIDTH)]
        model = seeded(Stack, WIDTH).cuda()
        if not half:
            expected = by_torch(model).train(batches)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        own = fully_shard(model, mesh=mesh, **({"mp_policy": policy} if half else {}))
        optimizer = torch.optim.AdamW(own.parameters(), lr=1e-2, fused=False, foreach=False)
        losses = [plain_step(own, optimizer, batch) for batch in batches]
        assert losses[-1] < losses[0]
        if not half:
            torch.testing.assert_close(torch.stack(losses), torch.stack(expected.losses), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("half", [False, True])
def test_two_ranks_of_fsdp2_train_as_one(half: bool, tmp_path: Path) -> None:
    spawn(sharded_by_fsdp2, 2, half, folder=tmp_path, limit_s=120.0)


def by_ranks(rank: int, world_size: int, policy: str, dtype: str, update: str, share: float) -> None:
    """Train on the same batches on all ranks: gathers and means are exact then, so the bits are those of one rank."""
    param_dtype = None if dtype == "float32" else dtype

    def trained(mesh: DeviceMesh | None, budget: int | None) -> Run:
        torch._dynamo.reset()
        batches = [batch.to("cuda", getattr(torch, dtype)) for batch in vectors(4, width=WIDE)]
        options = {"inner": "aot_eager", "report": False, "update": update, "device_memory": budget}
        model = elixir.prepare(seeded(Stack, WIDE).cuda(), mesh=mesh, param_dtype=param_dtype)
        compiled = torch.compile(model, backend="elixir", options=options)
        return Run(model=model, compiled=compiled, optimizer=hybrid_adamw(model.parameters())).train(batches)

    with ranks(rank, policy) as mesh:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", elixir.RanksApart)
            expected = trained(None, None)
        budget = scaled_bytes(expected.model, torch.cuda.max_memory_allocated(), share) if share < 1 else None
        got = trained(mesh, budget)
        got.optimizer.wait()
        assert executor_of(got.model).ledger.counts["gather"] > 0
        assert torch.equal(torch.stack(got.losses), torch.stack(expected.losses))
        for (name, ours), theirs in zip(got.model.named_parameters(), expected.model.parameters(), strict=True):
            assert torch.equal(ours.full_tensor().cpu(), theirs.cpu()), name


@pytest.mark.parametrize(
    ("policy", "dtype", "update", "share"),
    [
        ("late", "float32", "across_steps", 1.0),
        ("early", "bfloat16", "after_backward", 1.0),
        ("random", "bfloat16", "in_backward", 1.0),
        ("late", "float32", "in_backward", 0.7),
    ],
)
def test_two_ranks_of_elixir_train_as_one(policy: str, dtype: str, update: str, share: float, tmp_path: Path) -> None:
    spawn(by_ranks, 2, policy, dtype, update, share, folder=tmp_path, limit_s=200.0)


def sharded(mesh: DeviceMesh) -> tuple[Executor, ShardedBucket]:
    """Return an executor with one matrix in shards whose home is the host."""
    executor = executor_of(elixir.prepare(torch.nn.Linear(WIDE, WIDE, bias=False).cuda(), mesh=mesh))
    assert isinstance(executor, Executor)
    assert executor.ranks is not None
    (slot,) = executor.slots.values()
    spec = Bucket(
        id=B0, params=(StorageId(slot.name),), numel=slot.numel, nbytes=4 * slot.numel, state_nbytes=0, dtype="float32",
        trainable=True, shard_numels=executor.ranks.shard_numels_of(slot.param),
    )  # fmt: skip
    placement = Placement(bucket=B0, param=Tier.HOST, optim=Tier.HOST, resident=False)
    executor.buckets.adopt([spec], [placement], for_training=True)
    bucket = executor.buckets[B0]
    assert isinstance(bucket, ShardedBucket)
    return executor, bucket


def gathers_shards(rank: int, world_size: int, policy: str) -> None:
    """Gather shards from the host twice, so that the copies of the second gather use memory of the first."""
    with ranks(rank, policy) as mesh:
        executor, bucket = sharded(mesh)
        read: list[torch.Tensor] = []  # the host waits for it at the end only: it would know that memory is free
        for _ in range(2):
            read.append(executor.wait(executor.gather(B0))[0].sum())
            executor.release(B0)
        transfer = executor.gather(B0)
        write_behind(executor, bucket)
        read.append(executor.wait(transfer)[0].sum())
        assert torch.stack(read).isfinite().all()
        executor.abandon()


def reduces_to_the_host(rank: int, world_size: int, policy: str) -> None:
    """Let gradients go to the host behind a reduce that compute does not wait for."""
    with ranks(rank, policy) as mesh:
        executor, bucket = sharded(mesh)

        def run() -> None:
            executor.reduce(B0, [0], [torch.full((WIDE, WIDE), rank + 1.0, device="cuda")])
            executor.wait(executor.offload(B0))

        in_backward(executor, run)
        grad = bucket.slots[0].param.grad
        assert grad is not None
        assert own_shard(grad).unique().tolist() == [1.5]


def records_collectives(rank: int, world_size: int, policy: str) -> None:
    """Time collectives by a stream that waits for them: from this wait on, torch does not keep what they read."""
    with ranks(rank, policy) as mesh:
        executor, _ = sharded(mesh)
        recording = executor.ledger.start_recording()
        executor.wait(executor.gather(B0))

        def run() -> None:
            executor.wait(executor.reduce(B0, [0], [torch.ones(WIDE, WIDE, device="cuda")]))
            executor.wait(executor.offload(B0))

        in_backward(executor, run)
        found = {span.label for span in recording.stop()}
        assert {"gather b0", "reduce b0"} <= found


@pytest.mark.parametrize("does", [gathers_shards, reduces_to_the_host, records_collectives])
def test_each_access_to_shards_has_an_order(does: Callable[..., None], tmp_path: Path) -> None:
    spawn(does, 2, "late", folder=tmp_path, limit_s=120.0)
