"""`ir.cost`: the buffers of the disk, and sums of gradients."""

from dataclasses import replace

import pytest

from elixir_compile.base.units import MIB
from elixir_compile.ir import Bucket, BucketId, Placement, StorageId, Tier
from elixir_compile.ir.cost import disk_staging_bytes
from elixir_compile.step.bucket_bytes import bucket_host_bytes, sum_host_bytes

BUCKET = Bucket(
    id=BucketId("b0"),
    params=(StorageId("w"),),
    numel=1000,
    nbytes=4000,
    state_nbytes=8000,
    dtype="float32",
    trainable=True,
    shard_numels=(1000,),
)


@pytest.mark.parametrize(("width", "buffer_mib"), [(8, 16), (12, 16), (10, 20), (14, 28), (4, 16)])
def test_three_buffers_and_a_page(width: int, buffer_mib: int) -> None:
    """Adam in fp32; with a float16 parameter's master; with a bfloat16 parameter's low half; AMSGrad of it; SGD."""
    bucket = replace(BUCKET, state_nbytes=width * 1000)
    assert disk_staging_bytes([bucket, BUCKET]) == (3 * buffer_mib + 2) * MIB


@pytest.mark.parametrize(
    ("param", "optim", "wanted_bytes"),
    [(Tier.DEVICE, Tier.DEVICE, 0), (Tier.DEVICE, Tier.HOST, 4000), (Tier.HOST, Tier.HOST, 6000)],
)
def test_sums_of_gradients(param: Tier, optim: Tier, wanted_bytes: int) -> None:
    """1000 elements of 2 bytes: sums on their way to the update; sums where they are, and a second gradient."""
    bucket = replace(BUCKET, dtype="bfloat16", nbytes=2000, sum_nbytes=4000)
    home = Placement(bucket=bucket.id, param=param, optim=optim, resident=True)
    assert sum_host_bytes(bucket, param, optim) == wanted_bytes
    without = replace(bucket, sum_nbytes=0)
    assert bucket_host_bytes(bucket, home) - bucket_host_bytes(without, home) == wanted_bytes
    assert sum_host_bytes(without, param, optim) == 0


@pytest.mark.parametrize(
    ("param", "optim", "wanted_bytes"),
    [(Tier.DEVICE, Tier.DEVICE, 0), (Tier.DEVICE, Tier.HOST, 0), (Tier.HOST, Tier.HOST, 4000)],
)
def test_sums_in_the_dtype_of_gradients(param: Tier, optim: Tier, wanted_bytes: int) -> None:
    """The buffer of the gradients holds the sums; a second buffer holds those that arrive."""
    assert sum_host_bytes(replace(BUCKET, sum_nbytes=4000), param, optim) == wanted_bytes
    shared = replace(BUCKET, sum_nbytes=4000, shard_numels=(600, 400))
    assert sum_host_bytes(shared, param, optim) == wanted_bytes * 600 // 1000


def test_nothing_without_state() -> None:
    assert disk_staging_bytes([]) == 0
    assert disk_staging_bytes([replace(BUCKET, state_nbytes=0, trainable=False)]) == 0
