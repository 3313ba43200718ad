"""What tests ask of real ranks that train, and that are observed; each function runs on all of them at once."""

import copy
import gc
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import elixir_compile as elixir
from elixir_compile.graph.capture.modules import executor_of
from elixir_compile.graph.ops.shards import is_sharded, own_grad
from elixir_compile.ir import Bucket, Lane, Tier, verb_of
from elixir_compile.optim import hybrid as clipping
from elixir_compile.runtime.bucket import live_slab_bytes, peak_slab_bytes, reset_peak_slab_bytes
from elixir_compile.runtime.distributed.ranks import Collective
from elixir_compile.runtime.measure import Resident
from tests.pure.mixes import collectives
from tests.run.ranks_training import (
    Pair,
    adamw,
    batches,
    compiled_with,
    full,
    homes,
    hybrid,
    least_bytes,
    mesh_of,
    odd,
    own_rows,
    pair_of,
)

# ----------------------------------------------------------------------------------------------------------------------
# What `test_ranks` asks of real ranks; each function runs on all of them at once, in `processes.spawn`.


CLOSE = 1e-12
"""How far fp64 may be apart: sums are added in another order."""


def trains(rank: int, world_size: int, name: str, how: dict[str, Any]) -> dict[str, Any]:
    """Train three steps; `how` may name `shape`, `dtype`, `optimizer`, `tightness` and `num_micro_batches`."""
    shape, dtype = how.get("shape", [world_size]), getattr(torch, how.get("dtype", "float64"))
    num_micro_batches = how.get("num_micro_batches", 1)
    steps = batches()
    options = {}
    if "tightness" in how:
        least = least_bytes(name, steps[0].chunk(num_micro_batches)[0], shape, dtype=dtype)
        options["device_memory"] = int(how["tightness"] * least)
    make = {"hybrid": hybrid, "adamw": adamw}[how.get("optimizer", "hybrid")]
    pair = pair_of(name, shape, dtype=dtype, make=make, **options)
    before = {key: value.clone() for key, value in pair.double.state_dict().items()}
    found = [pair.step(batch, num_micro_batches=num_micro_batches) for batch in steps]
    moved = max((value - before[key]).abs().max().item() for key, value in pair.double.state_dict().items())
    figures = {key: max(step[key] for step in found) for key in ("loss", "norm")}
    return {**figures, "weights": pair.apart(), "moved": moved, **homes(pair.model)}


def keeps_what_the_formula_says(rank: int, world_size: int) -> dict[str, int]:
    """Measure what is left of a step: parts, their state, whole small tensors with theirs, buffers."""
    steps = batches(2)
    options = {"activations": "keep"}  # their host memory is kept for the next step
    options["device_memory"] = int(1.15 * least_bytes("odd", steps[0], [world_size], **options))
    torch._dynamo.reset()
    gc.collect()
    with Resident() as resident:
        before_bytes = resident.nbytes
    slabs_before_bytes = live_slab_bytes()
    model = elixir.prepare(odd().double(), mesh=mesh_of([world_size]))
    compiled, optimizer = compiled_with(model, **options), hybrid(model.parameters())
    for batch in steps:
        compiled(own_rows(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for bucket in executor_of(model).buckets:
        bucket.queued.wait()  # an update that still runs holds its gradients
    torch._dynamo.reset()
    gc.collect()
    with Resident() as resident:
        # The last texts that ranks exchanged, the plan among them, stay for a few forwards more.
        texts_bytes = sum(text.nbytes for text in executor_of(model).ranks.control._held)
        held_bytes = resident.nbytes - before_bytes - texts_bytes
    device_bytes = sum(buffer.nbytes for buffer in model.buffers())
    host_bytes = 0
    for bucket, placement in executor_of(model).buckets.in_force(for_training=True):
        part_bytes = own_bytes(bucket)
        grad_bytes = part_bytes if bucket.trainable and placement.param is Tier.HOST else 0
        state_bytes = 2 * part_bytes if bucket.trainable else 0
        device_bytes += part_bytes if placement.param is Tier.DEVICE else 0
        device_bytes += state_bytes if placement.optim is Tier.DEVICE else 0
        host_bytes += grad_bytes + (part_bytes if placement.param is Tier.HOST else 0)
        host_bytes += state_bytes if placement.optim is Tier.HOST else 0
    return {
        "device": held_bytes, "expected_device": device_bytes,
        "host": live_slab_bytes() - slabs_before_bytes, "expected_host": host_bytes,
        "slabs": 4 * len(executor_of(model).buckets.in_force(for_training=True)),
        "whole": sum(p.numel() * p.element_size() for p in model.parameters()),
    }  # fmt: skip


def own_bytes(bucket: Bucket) -> int:
    """Return the bytes of one flat shard of `bucket`; of all of it where each rank has it whole."""
    return bucket.shard_numels.most * torch.empty(0, dtype=getattr(torch, bucket.dtype)).itemsize


def runs_the_collectives_of_the_plan(rank: int, world_size: int, *shape: int) -> dict[str, Any]:
    """Count the collectives of two steps and their bytes on a mesh of `shape`, and compare what they train; on one
    axis, go on with `evaluates_and_generates`."""
    steps = batches(3, rows=24 * world_size)
    # The axes of a mesh are the same for every layer. 6.2 MB would do, and all of it takes 8.2 MB.
    pair = pair_of("gpt2 of one layer", shape, device_memory=7_400_000)
    found = [pair.step(steps[0])]
    ledger = executor_of(pair.model).ledger
    times, nbytes = Counter(ledger.times), Counter(ledger.bytes)
    found += [pair.step(batch) for batch in steps[1:]]
    times, nbytes = Counter(ledger.times) - times, Counter(ledger.bytes) - nbytes
    record = elixir.compilations(pair.model)[-1]
    expected = collectives(record.graph, record.plan)
    nbytes = Counter({work: own for work, own in nbytes.items() if work[0] in (Lane.GATHER, Lane.REDUCE)})
    own = {work: times[work[1]] for work in nbytes}
    assert own == {work: len(steps[1:]) * traffic.times for work, traffic in expected.items()}
    assert nbytes == {work: len(steps[1:]) * traffic.nbytes for work, traffic in expected.items()}
    whole = sum(own_bytes(bucket) * shape[-1] for bucket in record.plan.buckets if bucket.is_sharded)
    cut = {f"reduce {bucket.id}" for bucket in record.plan.buckets if bucket.is_sharded}
    assert sum(traffic.nbytes for (_, name), traffic in expected.items() if name in cut) == whole
    assert max(max(step.values()) for step in found) < CLOSE
    assert pair.apart() < CLOSE
    verbs = sorted({verb_of(name) for _, name in own})
    if len(shape) == 1:
        evaluates_and_generates(pair, steps)
    return {"times": sum(own.values()), "verbs": verbs, "copies": record.plan.num_copies, **homes(pair.model)}


def evaluates_and_generates(pair: Pair, steps: Sequence[torch.Tensor]) -> None:
    """Read a trained GPT-2 eagerly and compiled without gradients, between steps."""
    with torch.no_grad():
        own = own_rows(steps[1])  # as many as in training: sizes of a second kind would be captured as dynamic ones
        expected = pair.double(own)
        torch.testing.assert_close(pair.model(own), expected, rtol=0, atol=CLOSE)
        torch.testing.assert_close(pair.compiled(own), expected, rtol=0, atol=CLOSE)
        told = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        prompt = steps[2][:1, :5]
        words = pair.model.inner.generate(prompt, **told)
        assert torch.equal(words, pair.double.inner.generate(prompt, **told))
    pair.step(steps[1])
    assert pair.apart() < CLOSE
    eager_step(pair, steps[2])


def eager_step(pair: Pair, batch: torch.Tensor) -> None:
    """Train a step without the compiler: gradients are averaged there too."""
    pair.model(own_rows(batch)).backward()
    pair.double_backward(batch)
    grads_are_equal(pair)
    pair.optimizer.step()
    pair.double_optimizer.step()
    assert pair.apart() < CLOSE


def grads_are_equal(pair: Pair) -> None:
    """Fail unless gradients are laid out as their parameters, and equal those of the double."""
    for own, other in zip(pair.model.parameters(), pair.double.parameters(), strict=True):
        assert (own.grad is None) == (other.grad is None)
        if own.grad is not None:
            assert own.grad.placements == own.placements
            torch.testing.assert_close(full(own.grad), other.grad, rtol=0, atol=CLOSE)


def recovers(rank: int, world_size: int, tightness: float) -> None:
    """Raise between a forward and its backward, in a backward, and in an update, on all ranks; then train on."""
    steps = batches(5)
    options = (
        {} if tightness is None else {"device_memory": int(tightness * least_bytes("odd", steps[0], [world_size]))}
    )
    pair = pair_of("odd", [world_size], **options)
    pair.step(steps[0])
    with pytest.raises(KeyError, match="between"):
        fails(pair.compiled(own_rows(steps[1])), "between")
    pair.step(steps[1])
    assert pair.apart() < CLOSE

    loss = FailsInBackward.apply(pair.compiled(own_rows(steps[2])))
    with pytest.raises(KeyError, match="backward"):
        loss.backward()
    few = dict(pair.model.named_parameters())["few"]
    handle = few.register_hook(lambda grad: fails(grad, "hook"))
    with pytest.raises(KeyError, match="hook"):
        pair.compiled(own_rows(steps[2])).backward()
    handle.remove()
    pair.optimizer.zero_grad()
    pair.step(steps[2])
    assert pair.apart() < CLOSE

    handle = pair.optimizer.register_step_pre_hook(lambda *_: fails(None, "step"))
    with pytest.raises(KeyError, match="step"):
        pair.own_step(steps[3])
    handle.remove()
    pair.optimizer.zero_grad()
    pair.step(steps[3])
    loss = pair.compiled(own_rows(steps[4]))
    with torch.no_grad():
        dict(pair.model.named_parameters())["down.weight"].to_local().mul_(1.0)
    with pytest.raises(elixir.StaleParameters, match=r"down\.weight"):
        loss.backward()
    ranks = executor_of(pair.model).ranks
    rows = torch.zeros(world_size, 4)
    ranks.all_gather(rows, torch.ones(4), "what nobody waits for")
    executor_of(pair.model).abandon()
    assert rows.eq(1.0).all()
    Collective(Lost(), "what is lost", ranks)
    executor_of(pair.model).abandon()
    assert not ranks.under_way
    pair.step(steps[4])
    assert pair.apart() < CLOSE


class Lost:
    """What waits for a rank that died."""

    def wait(self) -> None:
        raise RuntimeError("Connection closed by peer")


def fails(value: object, where: str) -> None:
    raise KeyError(where)


class FailsInBackward(torch.autograd.Function):
    """Passes a value on, and has no gradient for it."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise KeyError("backward")


def has_states(rank: int, world_size: int) -> None:
    """Look at the state dicts, and carry the optimizer's to torch's AdamW and back."""
    steps = batches(4)
    pair = pair_of("odd", [world_size])
    pair.step(steps[0])
    assert list(pair.model.state_dict()) == list(pair.double.state_dict())
    layouts = {name: value.placements for name, value in pair.model.state_dict().items() if isinstance(value, DTensor)}
    assert set(layouts) == set(pair.double.state_dict()) - {"offset"}
    assert layouts["scale"] == layouts["up.bias"] == (Replicate(),)
    assert layouts["few"] == layouts["words.weight"] == layouts["head.weight"] == (Shard(0),)
    state = pair.optimizer.state_dict()["state"]
    trained = [(index, param) for index, param in enumerate(pair.model.parameters()) if param.requires_grad]
    assert sorted(state) == [index for index, _ in trained]
    for index, param in trained:
        assert state[index]["exp_avg"].placements == param.placements
        assert state[index]["exp_avg"].shape == param.shape

    for make in (adamw, hybrid):
        saved = copy.deepcopy(pair.optimizer.state_dict())
        pair.optimizer = make(pair.model.parameters())
        pair.optimizer.load_state_dict(saved)
        pair.step(steps[1])
        assert pair.apart() < CLOSE
    whole = copy.deepcopy(pair.double_optimizer.state_dict())
    pair.optimizer.load_state_dict(whole)
    pair.step(steps[2])
    weights = {name: value.clone() for name, value in pair.model.state_dict().items()}
    with torch.no_grad():
        for param in pair.model.parameters():
            param.zero_()
    pair.model.load_state_dict(weights)
    pair.step(steps[3])
    assert pair.apart() < CLOSE


def keeps_habits(rank: int, world_size: int) -> None:
    """Use a scheduler, gradients that stay, and hooks."""
    steps = batches(4)
    pair = pair_of("odd", [world_size])
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        for optimizer in (pair.optimizer, pair.double_optimizer)
    ]
    seen: dict[str, list[torch.Tensor]] = {"own": [], "double": []}
    for name, model in (("own", pair.model), ("double", pair.double)):
        params = dict(model.named_parameters())  # `model.few` reads a whole copy where each rank has a part
        params["few"].register_hook(lambda grad: grad * 0.5)
        params["up.weight"].register_post_accumulate_grad_hook(
            lambda param, name=name: seen[name].append(full(param.grad).clone())
        )
    few = dict(pair.model.named_parameters())["few"]
    kept = None
    for batch in steps:
        pair.own_backward(batch)
        pair.double_backward(batch)
        grads_are_equal(pair)
        assert kept is None or few.grad is kept
        kept = few.grad
        for optimizer in (pair.optimizer, pair.double_optimizer):
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        for scheduler in schedulers:
            scheduler.step()
        assert full(kept).abs().max() == 0
        assert pair.apart() < CLOSE
    assert len(seen["own"]) == len(steps)
    # A rank of the double adds its gradients one after another, so its hook sees the sum last.
    torch.testing.assert_close(seen["own"][-1], seen["double"][-1], rtol=0, atol=CLOSE)


def weighs_uneven_batches(rank: int, world_size: int) -> None:
    """Give each rank another number of rows."""
    pair = pair_of("gpt2 of one layer", [world_size])
    sizes = [2 + other for other in range(world_size)]
    for batch in batches(3):
        rows = batch[: sum(sizes)]
        own = rows.split(sizes)[rank]
        elixir.weigh(pair.model, len(own))
        pair.compiled(own).backward()
        pair.double(rows).backward()
        grads_are_equal(pair)
        for optimizer in (pair.optimizer, pair.double_optimizer):
            optimizer.step()
            optimizer.zero_grad()
        assert pair.apart() < CLOSE
    rows = batches(1)[0][: 2 * world_size]
    own = own_rows(rows)
    elixir.weigh(pair.model, len(own) if rank else 0)
    (pair.compiled(own) * (1.0 if rank else float("nan"))).backward()
    pair.double(rows[2:]).backward()
    grads_are_equal(pair)


class Reads(nn.Module):
    """A recurrent layer, which reads its parameters itself, so that each rank keeps them whole, and a linear one."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(6, 6, batch_first=True)
        self.out = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.recurrent(x)[0]).square().mean()


def averages_what_is_whole(rank: int, world_size: int) -> None:
    """Train parameters that no rank can have a part of."""
    torch.manual_seed(0)
    double = Reads().double()
    torch.manual_seed(rank)
    model = elixir.prepare(Reads().double(), mesh=mesh_of([world_size]))
    assert not isinstance(model.recurrent.weight_ih_l0, DTensor)
    pair = Pair(
        model=model,
        compiled=compiled_with(model),
        optimizer=hybrid(model.parameters()),
        double=double,
        double_optimizer=adamw(double.parameters()),
    )
    x = torch.randn(4 * world_size, 3, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for _ in range(2):
        pair.own_backward(x, num_micro_batches=2)
        pair.double_backward(x, num_micro_batches=2)
        norm = pair.optimizer.clip_grad_norm_(1e-3)
        expected = nn.utils.clip_grad_norm_(double.parameters(), 1e-3)
        torch.testing.assert_close(norm, expected, rtol=0, atol=CLOSE)
        for optimizer in (pair.optimizer, pair.double_optimizer):
            optimizer.step()
            optimizer.zero_grad()
        assert pair.apart() < CLOSE


def clips_what_has_arrived(rank: int, world_size: int) -> None:
    """Clip parts on the host and on the device, and what each rank has whole, which the backward has read."""
    steps = batches(3)
    least = least_bytes("odd", steps[0], [world_size])
    pair = pair_of("odd", [world_size], device_memory=int(1.15 * least))
    num_known: list[int] = []
    usual = clipping.known_squares

    def known(*args: Any) -> Any:
        found = usual(*args)
        num_known.append(len(found))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clipping, "known_squares", known)
        for batch in steps:
            pair.own_backward(batch)
            pair.double_backward(batch)
            norm = pair.optimizer.clip_grad_norm_(1e-3)
            expected = nn.utils.clip_grad_norm_(pair.double.parameters(), 1e-3)
            torch.testing.assert_close(full(norm), expected, rtol=0, atol=CLOSE)
            for optimizer in (pair.optimizer, pair.double_optimizer):
                optimizer.step()
                optimizer.zero_grad()
        pair.own_backward(steps[0])
        pair.double_backward(steps[0])
        for param in pair.model.parameters():
            if param.grad is not None:
                param.grad.mul_(2.0)
        norm = pair.optimizer.clip_grad_norm_(1e-3)
        expected = 2.0 * nn.utils.clip_grad_norm_(pair.double.parameters(), 1e-3)
        torch.testing.assert_close(full(norm), expected, rtol=0, atol=CLOSE)
        num_trained = sum(param.grad is not None for param in pair.model.parameters())
        assert num_known == [0, num_trained, num_trained, 0]
        # What one rank knows and another does not may not decide which collectives they run.
        pair.optimizer.zero_grad()
        pair.own_backward(steps[0])
        if rank == world_size - 1:
            for param in pair.model.parameters():
                if param.grad is not None and is_sharded(param):
                    own_grad(param).fill_(torch.nan)
        assert pair.optimizer.clip_grad_norm_(1e-3).isnan()
        assert min(num_known) == 0 < num_known[-1] or rank == world_size - 1
        assert "host" in homes(pair.model)["param"]


def hands_out_new_means(rank: int, world_size: int) -> None:
    """Average a gradient that a backward goes on with."""
    model = elixir.prepare(odd(), mesh=mesh_of([world_size]))
    grad = torch.full((3,), float(rank))
    (mean,) = executor_of(model).ranks.means([grad], torch.float64)
    assert grad.eq(rank).all()
    assert mean.eq((world_size - 1) / 2).all()
    assert mean.dtype == torch.float64


def read_and_reduce_apart(rank: int, world_size: int) -> None:
    """Read another parameter on each rank, and reduce the gradient of another."""
    model = elixir.prepare(odd(), mesh=mesh_of([world_size]))
    name = ("up.weight", "down.weight")[rank % 2]
    with pytest.raises(elixir.RanksDiffer, match=r"rank 1 exchanges a parameter, down\.weight"):
        model.get_submodule(name.split(".")[0]).weight.sum()
    param = dict(model.named_parameters())[name]
    with pytest.raises(elixir.RanksDiffer, match=r"rank 1 exchanges a gradient, down\.weight"):
        executor_of(model).ranks.mean_shard(torch.ones(param.shape), param, name)
    assert model.up.weight.shape == model.down.weight.shape[::-1]


def prepares(rank: int, world_size: int) -> dict[str, int]:
    """Prepare twice, on wrong meshes, and from `meta`."""
    mesh = mesh_of([world_size])
    model = elixir.prepare(odd(), mesh=mesh)
    before = [id(param) for param in model.parameters()]
    assert elixir.prepare(model, mesh=mesh) is model
    assert [id(param) for param in model.parameters()] == before
    with pytest.raises(elixir.UnsupportedModel, match="cannot become bfloat16"):
        elixir.prepare(model, mesh=mesh, param_dtype="bfloat16")
    one = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("others", "own"))["own"]
    alone = elixir.prepare(nn.Linear(3, 3, device="meta"), mesh=one)
    assert {param.device.type for param in alone.parameters()} == {"cpu"}
    keeps_what_is_tied(mesh)
    with pytest.raises(elixir.UnsupportedModel, match="3 axes"):
        elixir.prepare(odd(), mesh=init_device_mesh("cpu", (1, 1, world_size)))

    # Each rank draws other numbers: the values must be those of the first.
    torch.manual_seed(rank)
    with torch.device("meta"):
        deep = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(64)))
    gc.collect()
    with Resident() as resident:
        before_bytes = resident.nbytes
    reset_peak_slab_bytes()
    slabs_before_bytes, most_before_bytes = live_slab_bytes(), most_resident_bytes(afresh=True)
    elixir.prepare(deep, "cpu", mesh=mesh)
    most_bytes = most_resident_bytes() - most_before_bytes
    with Resident() as resident:
        held_bytes = resident.nbytes - before_bytes
    sums = torch.stack([full(param).double().sum() for param in deep.parameters()])
    first = sums.clone()
    distributed.broadcast(first, 0)
    assert torch.equal(sums, first)
    assert sums.abs().min() > 0
    return {
        "most": most_bytes, "held": held_bytes, "most_slabs": peak_slab_bytes() - slabs_before_bytes,
        "slabs": live_slab_bytes() - slabs_before_bytes, "module": 512 * 512 * 4, "whole": 64 * 512 * 512 * 4,
    }  # fmt: skip


def keeps_what_is_tied(mesh: DeviceMesh) -> None:
    """Create on `meta` a layer whose weight is there already, and belongs to a layer before it."""
    first, second = nn.Linear(200, 200), nn.Linear(200, 200, device="meta")
    second.weight = first.weight
    expected = first.weight.detach().clone()
    distributed.broadcast(expected, 0)
    model = elixir.prepare(nn.Sequential(first, second), "cpu", mesh=mesh)
    params = dict(model.named_parameters())
    assert list(params) == ["0.weight", "0.bias", "1.bias"]
    assert torch.equal(full(params["0.weight"]), expected)
    assert isinstance(params["0.weight"], DTensor)
    assert model[1]._parameters["weight"] is params["0.weight"]


def most_resident_bytes(*, afresh: bool = False) -> int:
    """Return the most memory that this process had, since this was called `afresh`, which forgets what was before."""
    if afresh:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    (line,) = [line for line in Path("/proc/self/status").read_text("ascii").splitlines() if line.startswith("VmHWM:")]
    return 1024 * int(line.split()[1])


# ----------------------------------------------------------------------------------------------------------------------
# What `test_observed_processes` asks of real ranks that are observed; each function runs on all of them at once.


def observes(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Train as many steps as there are batches, observed and not; return the losses of both and what was seen."""
    plain, seen = (pair_of("odd", [world_size], planner="zero3_offload", update="after_backward") for _ in "ab")
    expected = [plain.own_step(batch)[0] for batch in batches()]
    with elixir.observe(seen.compiled, folder, full=(1,), counters_hz=0) as study:
        found = [seen.own_step(batch)[0] for batch in batches()]
    (full,) = study.full_steps
    return {
        "losses": [expected, found],
        "apart_s": max(abs(sum(each.seconds_s.values()) - each.period_s) for each in study.summaries),
        "ranks": [each.rank for each in study.summaries],
        "spans": {lane: sum(span.nbytes for span in full.record.spans if span.lane == lane) for lane in _LANES},
        "bytes": {lane: full.summary.lane_bytes(lane) for lane in _LANES},
    }


_LANES = ("gather", "reduce", "h2d", "d2h")
