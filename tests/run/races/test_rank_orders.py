"""Steps of two ranks have no race. The process group is none: the values mean nothing, the order is that of a run."""

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import elixir_compile as elixir
from elixir_compile.graph.capture.modules import executor_of
from elixir_compile.ir import Tier, Update
from elixir_compile.runtime.distributed.control import OwnThread
from elixir_compile.runtime.distributed.ranks import Collective, Ranks, _MeanOfCopies
from elixir_compile.runtime.distributed.sharded import ShardedBucket
from elixir_compile.runtime.lanes import Plain
from tests.races.checked import Checked
from tests.run.races.home import write_behind
from tests.run.races.simulated import Simulated
from tests.run.training import hybrid_adamw, plain_step
from tests.run.updating import placed, small_buckets

WIDTH = 101


@pytest.fixture(autouse=True)
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make this process the first of two ranks, and check accesses."""
    monkeypatch.setenv("ELIXIR_CHECK_RACES", "tests.races.checked")
    monkeypatch.setattr("tests.run.updating.WIDTH", WIDTH)
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    distributed.destroy_process_group()


class Noted:
    """A collective that notes its begin and its waits in `said`."""

    def __init__(self, said: list[str], name: str) -> None:
        self.said, self.name = said, name
        said.append(f"begin {name}")

    def wait(self) -> None:
        self.said.append(f"wait {self.name}")


def ranks_of_two() -> Ranks:
    return Ranks(init_device_mesh("cpu", (2,)))


def test_a_collective_is_waited_for_and_an_exception_waits_for_all() -> None:
    said, ranks = list[str](), ranks_of_two()
    Collective(Noted(said, "first"), "a tensor", ranks).wait()
    assert said == ["begin first", "wait first"]
    Collective(Noted(said, "second"), "a tensor", ranks)
    ranks.drain()
    assert said[2:] == ["begin second", "wait second"]


class NotedWork(distributed.Work):
    """A collective of torch that counts its waits, each of which makes the current stream wait."""

    def __init__(self) -> None:
        super().__init__()
        self.num_waits = 0

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        self.num_waits += 1
        return True


def test_a_stream_that_is_held_for_a_collective_does_not_end_its_wait() -> None:
    work, ranks = NotedWork(), ranks_of_two()
    collective = Collective(work, "a tensor", ranks)
    collective.hold_stream()
    assert work.num_waits == 1
    ranks.drain()
    assert work.num_waits == 2


@pytest.mark.parametrize("is_late", [True, False])
def test_the_mean_over_copies_is_behind_the_sum_over_shards(is_late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[str]()
    monkeypatch.setattr(distributed, "all_reduce", lambda *args, **options: Noted(said, "mean"))
    lane = Simulated(torch.device("cpu"), "late").collectives if is_late else Plain(torch.device("cpu")).collectives
    own, group = torch.ones(2), distributed.group.WORLD
    mean = _MeanOfCopies(Noted(said, "sum"), own, group, lane, OwnThread())
    mean.wait()
    assert said == ["begin sum", "wait sum", "begin mean", *(["wait mean"] if is_late else [])]


class Layers(nn.Module):
    """Three linear layers whose weights are cut, and whose biases every rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for step in self.steps:
            x = torch.tanh(step(x))
        return x.square().mean()


def trained(home: str, update: Update, num_steps: int = 3, **options: object) -> nn.Module:
    """Return the model after steps under a plan with this placement and moment of the update."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = elixir.prepare(Layers(), mesh=init_device_mesh("cpu", (2,)))
    known = {"inner": "aot_eager", "report": False, "plan_cache": False, "replan": False, "planner": "greedy"}
    compiled = torch.compile(model, backend="elixir", options={**known, **options})
    optimizer = hybrid_adamw(model.parameters())
    with small_buckets(lambda plan: placed(plan, home, 0.0, update)):
        for _ in range(num_steps):
            plain_step(compiled, optimizer, torch.randn(5, WIDTH))
    optimizer.wait()
    return model


def tight_bytes() -> int:
    with small_buckets(lambda plan: plan), pytest.raises(elixir.NoFeasiblePlan) as raised:
        trained("device", Update.AFTER_BACKWARD, device_memory=1, micro_batches=1)
    return int(1.05 * raised.value.needed_bytes)


@pytest.mark.parametrize(
    ("home", "update"),
    [
        ("host", Update.ACROSS_STEPS),
        ("split", Update.ACROSS_STEPS),
        pytest.param("host", Update.IN_BACKWARD, marks=pytest.mark.slow),
    ],
)
def test_steps_of_ranks_have_no_race(home: str, update: Update) -> None:
    options = {"device_memory": tight_bytes()} if home == "host" else {}
    model = trained(home, update, **options)
    executor = executor_of(model)
    assert isinstance(executor.lanes, Checked)
    cut = [bucket for bucket in executor.buckets if isinstance(bucket, ShardedBucket)]
    assert cut
    assert home != "host" or any(bucket.placement.param is Tier.HOST for bucket in cut)
    assert executor.ranks is not None
    cut[0].release()
    transfer = executor.gather(cut[0].spec.id)
    if home == "host":
        write_behind(executor, cut[0])
    assert executor.ranks.under_way
    executor.abandon()
    assert not executor.ranks.under_way, "later collectives would get the messages of this one"
    del transfer


class Rare(nn.Module):
    """Two linear layers, of which batches of one or two rows do not use the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 2:
            x = torch.tanh(self.first(x))
        return self.second(x).square().mean()


@pytest.mark.parametrize("offloaded", [0.0, 1.0])
def test_gradients_that_the_last_call_of_a_step_lacks_are_reduced_without_a_race(offloaded: float) -> None:
    torch._dynamo.reset()
    model = elixir.prepare(Rare(), mesh=init_device_mesh("cpu", (2,)), outstanding=2)
    fractions = {"offload_optim_frac": offloaded, "offload_param_frac": offloaded, "placement_policy": "static"}
    options = {"inner": "aot_eager", "report": False, "plan_cache": False, "planner": "greedy", **fractions}
    compiled = torch.compile(model, backend="elixir", options=options)
    optimizer = hybrid_adamw(model.parameters())
    for _ in range(2):
        for loss in [compiled(torch.randn(size, WIDTH)) for size in (5, 2)]:
            loss.backward()
        assert all(param.grad is not None for param in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    cut = [bucket for bucket in executor_of(model).buckets if isinstance(bucket, ShardedBucket)]
    assert {bucket.placement.param is Tier.HOST for bucket in cut} == {offloaded == 1.0}
