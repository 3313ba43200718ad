"""On which streams the gather of a sharded bucket begins."""

from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from elixir_compile.ir import BucketId
from elixir_compile.runtime.distributed.sharded import ShardGather


@pytest.mark.parametrize("is_on_host", [False, True])
def test_only_a_shard_on_the_host_takes_the_lane_of_copies(is_on_host: bool) -> None:
    """If a gather of a shard on the device made h2d wait for compute, the host, which waits for h2d at the end of the
    backward, would begin its updates when compute is through and not when the gradients have come."""
    lanes, bucket = MagicMock(device=torch.device("cpu")), MagicMock(is_on_host=is_on_host, own=torch.zeros(2))
    bucket.spec.id = BucketId("b0")
    ledger: Any = MagicMock()
    ledger.started.side_effect = lambda lane, name, nbytes, start: start()
    ShardGather(bucket, lanes, ledger)
    bucket.ranks.all_gather.assert_called_once()
    calls = [
        name for name, _, _ in lanes.h2d.mock_calls if not name.startswith(("behind_compute()", "beside_compute()"))
    ]
    assert calls == (["behind_compute", "copy", "mark", "beside_compute"] if is_on_host else [])
