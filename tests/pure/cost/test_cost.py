"""`cost`: closed forms and limits."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elixir_compile.base.errors import InvalidPlan
from elixir_compile.base.units import GIB
from elixir_compile.ir import Bucket, BucketId, Op, OpId, Phase, Ring, StorageId, Tier
from elixir_compile.ir.cost import Stretch, average_s, collective_s, copy_s, corrected_s, op_s, ring_s, update_s
from elixir_compile.ir.hardware import Cluster, TensorRing, profile_for

CUDA = profile_for("cuda", 8 * GIB, 8 * GIB, "cuda")
FOUR = Cluster(nodes=(replace(CUDA.nodes[0], num_devices=4, peer=CUDA.h2d),))
SIZES = st.integers(0, 2**40)


def op(flops: int, moved_bytes: int) -> Op:
    return Op(
        id=OpId("fwd.mm"), target="mm", phase=Phase.FORWARD, reads=(), writes=(), flops=flops, moved_bytes=moved_bytes
    )


def bucket(nbytes: int, trainable: bool = True) -> Bucket:
    return Bucket(
        id=BucketId("b0"),
        params=(StorageId("p"),),
        numel=nbytes // 4,
        nbytes=nbytes,
        state_nbytes=2 * nbytes if trainable else 0,
        dtype="float32",
        trainable=trainable,
        shard_numels=(nbytes // 4,),
    )


def test_op_s_is_the_roofline() -> None:
    device = replace(
        CUDA.device, flops_per_s={"float32": 100.0, "bfloat16": 400.0}, memory_bytes_per_s=10.0, launch_s=1.0
    )
    assert op_s(op(1000, 50), device) == 1 + 10
    assert op_s(op(1000, 500), device) == 1 + 50
    assert op_s(op(1000, 0), device, "bfloat16") == 1 + 2.5
    assert op_s(op(1000, 0), device, "int8") == 1 + 10
    assert op_s(op(0, 0), device) == 0


def test_a_collective_in_the_graph_takes_its_messages_round_the_tensor_axis() -> None:
    link = replace(CUDA.h2d, latency_s=1.0, bytes_per_s=10.0)
    tensor = TensorRing(num_ranks=4, link=link)
    summed = replace(op(0, 800), ring=Ring(num_ranks=4, nbytes=400, passes=2))
    assert ring_s(summed, tensor) == 2 * 3 * (1 + 100 / 10)
    assert ring_s(replace(summed, times=5), tensor) == 2 * 3 * (5 + 100 / 10)  # the bytes are those of all times
    assert op_s(summed, CUDA.device, tensor=tensor) == op_s(op(0, 800), CUDA.device) + ring_s(summed, tensor)
    assert ring_s(summed, None) == ring_s(op(0, 800), tensor) == 0


def test_transfers_are_latency_plus_bytes_over_rate() -> None:
    link = replace(CUDA.h2d, bytes_per_s=10.0, latency_s=2.0)
    assert copy_s(40, link) == 2 + 4
    assert copy_s(40, link, num_copies=3) == 3 * 2 + 4
    assert copy_s(0, link, num_copies=0) == 0


def test_a_collective_goes_round_the_ring() -> None:
    """Three hops of 2 s; each rank receives 30 of 40 bytes, at 10 bytes per second."""
    link = replace(CUDA.h2d, bytes_per_s=10.0, latency_s=2.0)
    cluster = Cluster(nodes=(replace(CUDA.nodes[0], num_devices=4, peer=link),))
    assert collective_s(40, cluster) == 6 + 3
    assert collective_s(40, CUDA) == 0


def test_copies_of_parts_are_averaged_over_their_own_ring() -> None:
    """Of 2 copies on 4 ranks each ring has 2: a hop of 2 s and half of 40 bytes at 10 bytes per second, twice where
    copies are averaged. Between nodes of 2 the rings of both parts share the network, at 5 bytes per second."""
    link = replace(CUDA.h2d, bytes_per_s=10.0, latency_s=2.0)
    one = Cluster(nodes=(replace(CUDA.nodes[0], num_devices=4, peer=link),))
    assert collective_s(40, one, num_copies=2) == 2 + 2
    assert average_s(40, one, num_copies=2) == 2 * (2 + 2)
    assert average_s(40, one, num_copies=1) == 0
    network = replace(link, bytes_per_s=5.0, latency_s=3.0)
    two = Cluster(nodes=(replace(CUDA.nodes[0], num_devices=2, peer=link),) * 2, network=network)
    assert collective_s(40, two, num_copies=2) == 2 + 2
    assert average_s(40, two, num_copies=2) == 2 * (3 + 2 * 4)
    # One part, four copies: nothing is gathered. One copy in four parts: its ring takes the network.
    assert (collective_s(40, two, num_copies=4), average_s(40, two, num_copies=4)) == (0, 2 * 3 * (3 + 2))
    assert collective_s(40, two) == 3 * (3 + 2)


def test_ranks_of_a_node_share_the_host_and_update_their_shards() -> None:
    shared = replace(bucket(4000), shard_numels=(250,) * 4)
    assert copy_s(shared.shard_nbytes(), replace(CUDA.h2d, bytes_per_s=10.0, latency_s=2.0)) == 2 + 100
    assert update_s(shared, Tier.HOST, FOUR) == 1000 / CUDA.host.update_elements_per_s


def test_measured_seconds_are_divided_in_proportion_to_the_roofline() -> None:
    index = {OpId(f"op{i}"): i for i in range(5)}
    stretches = [
        Stretch(first=OpId("op1"), last=OpId("op2"), run_s=8.0),
        Stretch(first=OpId("op4"), last=OpId("op4"), run_s=1.0),
    ]
    assert corrected_s([1.0, 1.0, 3.0, 5.0, 0.0], index, stretches) == [1.0, 2.0, 6.0, 5.0, 1.0]
    with pytest.raises(InvalidPlan, match="ops op1 to elsewhere"):
        corrected_s([1.0] * 5, index, [Stretch(first=OpId("op1"), last=OpId("elsewhere"), run_s=1.0)])
    with pytest.raises(InvalidPlan, match="took -1"):
        Stretch(first=OpId("op1"), last=OpId("op2"), run_s=-1.0)


def test_update_s_is_elements_over_rate() -> None:
    assert update_s(bucket(4000), Tier.HOST, CUDA) == 1000 / CUDA.host.update_elements_per_s
    assert update_s(bucket(4000), Tier.DEVICE, CUDA) == pytest.approx(
        CUDA.device.launch_s + 1000 / CUDA.device.update_elements_per_s
    )
    assert update_s(bucket(4000, trainable=False), Tier.HOST, CUDA) == 0
    with pytest.raises(InvalidPlan, match="nothing can be updated on disk"):
        update_s(bucket(4000), Tier.DISK, CUDA)


@given(SIZES, SIZES, SIZES, SIZES)
def test_more_work_is_never_faster(flops: int, moved: int, more_flops: int, more_moved: int) -> None:
    assert op_s(op(flops, moved), CUDA.device) <= op_s(op(flops + more_flops, moved + more_moved), CUDA.device)
    assert copy_s(moved, CUDA.h2d) <= copy_s(moved + more_moved, CUDA.h2d)
    assert copy_s(moved, CUDA.h2d, 1) <= copy_s(moved, CUDA.h2d, 2)
    assert collective_s(moved, FOUR) <= collective_s(moved + more_moved, FOUR)
    for tier in (Tier.DEVICE, Tier.HOST):
        assert update_s(bucket(moved), tier, CUDA) <= update_s(bucket(moved + more_moved), tier, CUDA)
