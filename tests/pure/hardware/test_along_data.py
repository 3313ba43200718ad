"""`along_data`: the slice of a machine that trains one part of a tensor-parallel model."""

from dataclasses import replace

import pytest

from elixir_compile.base.errors import InvalidPlan
from elixir_compile.ir.hardware import Cluster, along_data, cluster_from_json, cluster_to_json, preset

NODE = preset("a100-40g", 4).nodes[0]
NETWORK = replace(NODE.d2h, bytes_per_s=1e10)
TWO = Cluster(nodes=(NODE,) * 2, network=NETWORK)
"""2 nodes of 4 devices."""


def test_an_axis_within_a_node_uses_its_peer_link() -> None:
    found = along_data(TWO, 2)
    assert (found.num_ranks, found.num_local_ranks) == (4, 2)
    assert found.tensor is not None
    assert (found.tensor.num_ranks, found.tensor.link) == (2, NODE.peer)
    assert found.network is not None
    assert found.network.bytes_per_s == NETWORK.bytes_per_s / 2  # two slices gather at once
    assert found.host.memory_bytes == TWO.host.memory_bytes // 2
    assert found.host.update_elements_per_s == TWO.host.update_elements_per_s / 2
    assert (found.device, found.h2d) == (TWO.device, TWO.h2d)
    assert found.name.endswith("each x 2 along the tensor axis")
    assert cluster_from_json(cluster_to_json(found)) == found


def test_an_axis_of_a_whole_node_or_of_two_leaves_one_device_of_each() -> None:
    node, nodes = along_data(TWO, 4), along_data(TWO, 8)
    assert (node.num_ranks, node.num_local_ranks, len(node.nodes)) == (2, 1, 2)
    assert (nodes.num_ranks, nodes.network, nodes.nodes[0].peer) == (1, None, None)
    assert nodes.tensor is not None
    assert nodes.tensor.link == NETWORK


def test_an_axis_of_one_rank_changes_nothing() -> None:
    assert along_data(TWO, 1) == TWO


def test_ranks_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(InvalidPlan, match="no tensor axis of 3 ranks"):
        along_data(TWO, 3)
