"""Models that several ranks share by a wrapper of torch, which the user or a library puts around them.

Slow: each test starts two ranks. `tests/run/distributed/test_wrappers.py` has the quick cases of both.
"""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

import elixir_compile as elixir
from elixir_compile.session.over_budget import TOLERATED_BYTES
from tests.run import ddp_checks
from tests.run.clients import ddp_clients
from tests.run.distributed.test_wrappers import LIMIT_S, SLOW, assert_trained
from tests.run.habits.habit import habit
from tests.run.processes import spawn

pytestmark = pytest.mark.slow


@habit(
    "`DistributedDataParallel` around or inside of `torch.compile`, with `no_sync()`, `static_graph`, views, unused "
    "parameters, communication hooks",
    area="Training loops",
    note="to the bit of `aot_eager` in the wrapper; parameters stay on their device",
)
@pytest.mark.parametrize("name", SLOW)
def test_distributed_data_parallel(name: str, tmp_path: Path) -> None:
    case = {name: SLOW[name]}
    assert_trained(spawn(ddp_checks.trains_as_eager, 2, case, folder=tmp_path, limit_s=LIMIT_S), case)


LIBRARIES = {"Trainer": "transformers", "Accelerate": "accelerate", "Lightning": "lightning"}


@habit(
    "The Trainer of transformers, Accelerate and Lightning on several ranks, in their `DistributedDataParallel`",
    area="Training loops",
    note="to the bit of `aot_eager` there, within the budget of each rank",
)
@pytest.mark.parametrize("client", ddp_clients.CLIENTS)
def test_libraries_in_distributed_data_parallel(client: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(LIBRARIES[client]) is None:
        pytest.skip(f"needs {client}: `pip install elixir-compile[clients]`")
    for found in spawn(ddp_clients.trains, 2, client, str(tmp_path), folder=tmp_path, limit_s=180.0):
        assert found["apart"] == []
        assert not found["ranks_differ"]
        assert found["peak_bytes"] <= found["budget_bytes"] + TOLERATED_BYTES < found["eager_bytes"]


REFUSED = ("fully_shard", "fully_shard of layers", "FullyShardedDataParallel", "its flat parameters", "DeepSpeed")


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return spawn(ddp_checks.reports, 2, folder=tmp_path_factory.mktemp("reports"))


@habit(
    "A model of `fully_shard`, `FullyShardedDataParallel` or DeepSpeed's engine",
    area="Training loops",
    refused=elixir.UnsupportedWrapper,
    says="prepare(model, mesh=mesh)",
)
@pytest.mark.parametrize("name", REFUSED)
def test_other_wrappers(name: str, reports: list[dict[str, Any]]) -> None:
    raise_as_reported(name, reports)


def raise_as_reported(name: str, reports: list[dict[str, Any]]) -> None:
    """Raise the error that all ranks reported of `name`."""
    found, other = (report["refuses"][name] for report in reports)
    assert found == other
    kind, _, text = found.partition(": ")
    raise getattr(elixir, kind)("", "", "", text)


@habit(
    "`nn.DataParallel` around a compiled model, which runs it in a thread for each device",
    area="Training loops",
    refused=elixir.UnsupportedWrapper,
    says="torchrun --nproc-per-node",
)
def test_a_thread_for_each_device(reports: list[dict[str, Any]]) -> None:
    raise_as_reported("DataParallel", reports)


@habit(
    "Several ranks, each with a model of its own, in neither `DistributedDataParallel` nor `prepare(model, mesh=...)`",
    area="Training loops",
    note="each rank trains alone, and the warning `RanksApart` names both ways to share",
)
def test_ranks_that_share_nothing(reports: list[dict[str, Any]]) -> None:
    for found in reports:
        (text,), inside, infers = found["warns_of_ranks_apart"]
        assert "prepare(model, mesh=mesh)" in text
        assert inside == infers == []
