"""Fleets of ranks that differ, and the ranks of a mesh along which data is divided."""

import dataclasses
from dataclasses import replace

import pytest

from elixir_compile.base.errors import InvalidOption, InvalidPlan, InvalidProfile, ProfileFileError, UnknownHardware
from elixir_compile.ir.cost import collective_s
from elixir_compile.ir.hardware import (
    Cluster,
    Fleet,
    Node,
    along_data,
    cluster_from_json,
    cluster_to_json,
    fleet_from_json,
    fleet_of,
    fleet_of_nodes,
    fleet_to_json,
    is_fleet,
    parse_fleet,
    parse_hardware,
    preset,
    with_like_seats,
)

# ----------------------------------------------------------------------------------------------------------------------
# `ir.hardware.fleet` and `ir.hardware.fleet`: ranks whose machines differ, by name and as JSON.


MIXED = "2 x l4-24g + 1 x a6000-48g + 1 x p40-24g"
OVER_HOSTS = "2 x l4-24g + 1 x a6000-48g | 3 x p40-24g + 2 x p100-16g"


@pytest.mark.parametrize("text", [MIXED, OVER_HOSTS, "1 x l4-24g", "2 x 8 x v100-16g | 2 x 8 x t4-16g"])
def test_names_and_json_read_back(text: str) -> None:
    fleet = parse_fleet(text)
    assert fleet.name == text
    assert parse_fleet(fleet.name) == fleet
    assert fleet_from_json(fleet_to_json(fleet)) == fleet
    assert '"elixir": "fleet",\n "format": 1' in fleet_to_json(fleet)


@pytest.mark.parametrize("text", ["4 x l4-24g", "2 x 8 x h100-80g", "a100-40g", "4 x gh200"])
def test_a_fleet_of_one_kind_is_its_machine(text: str) -> None:
    assert not is_fleet(text)
    fleet = parse_fleet(text)
    assert fleet.as_cluster() == parse_hardware(text)
    assert fleet_of(parse_hardware(text)) == fleet
    assert len(fleet.classes()) == 1
    assert parse_fleet(MIXED).as_cluster() is None
    # Equal devices on hosts with unequal numbers of them.
    assert parse_fleet("2 x t4-16g | 1 x t4-16g").as_cluster() is None


def test_ranks_are_numbered_in_the_order_of_the_text() -> None:
    fleet = parse_fleet(OVER_HOSTS)
    assert [seat.cluster.device.name for seat in fleet.seats] == (
        ["l4-24g"] * 2 + ["a6000-48g"] + ["p40-24g"] * 3 + ["p100-16g"] * 2
    )
    assert [seat.host for seat in fleet.seats] == [0] * 3 + [1] * 5
    assert fleet.classes() == ((0, 1), (2,), (3, 4, 5), (6, 7))
    assert fleet.classes("aabbbbbc") == ((0, 1), (2,), (3, 4, 5), (6,), (7,))
    with pytest.raises(ValueError, match="shorter"):
        fleet.classes("ab")


def test_a_rank_sees_ranks_as_it_is_behind_the_slowest_link() -> None:
    one_host, two_hosts = parse_fleet(MIXED), parse_fleet(OVER_HOSTS)
    seen = one_host.seen_by(3)
    assert (seen.device.name, seen.num_ranks, seen.num_local_ranks) == ("p40-24g", 4, 4)
    assert seen.collective == one_host.collective
    seen = two_hosts.seen_by(0)
    assert (seen.device.name, seen.num_ranks, seen.num_local_ranks) == ("l4-24g", 8, 3)
    assert seen.collective == two_hosts.collective
    assert seen.name == "3 x l4-24g and 5 elsewhere"
    assert seen.is_over_nodes
    # All ranks wait for the same collectives: each sees the same seconds.
    assert len({collective_s(10**9, two_hosts.seen_by(rank)) for rank in range(8)}) == 1
    assert collective_s(10**9, seen) == pytest.approx(7 * (40e-6 + 1e9 / 8 / 10e9))


def test_devices_of_one_host_share_its_memory() -> None:
    """The Xeon of the P40, with 153.6 GB/s at 80 %, over four devices, and through memory twice: 15.4 GB/s."""
    fleet = parse_fleet(MIXED)
    hosts = {seat.cluster.host.source for seat in fleet.seats}
    assert hosts == {preset("p40-24g", 4).host.source}
    assert fleet.collective is not None
    assert fleet.collective.bytes_per_s == min(153.6e9 * 0.8 / 8, 0.8 * 15.75e9)
    assert [seat.cluster.h2d.bytes_per_s / 1e9 for seat in fleet.seats] == pytest.approx([24.885, 24.885, 24.885, 12.6])


def test_a_machine_with_ranks_elsewhere() -> None:
    node = preset("l4-24g", 2).nodes[0]
    with pytest.raises(InvalidProfile, match="network: expected a link, as there are 3 ranks elsewhere"):
        Cluster(nodes=(node,), num_elsewhere=3)
    with pytest.raises(InvalidProfile, match="num_elsewhere: expected 0 beside 2 nodes"):
        Cluster(nodes=(node,) * 2, network=node.peer, num_elsewhere=3)
    cluster = Cluster(nodes=(node,), network=node.peer, num_elsewhere=3)
    assert cluster_from_json(cluster_to_json(cluster)) == cluster
    # A machine without ranks elsewhere has the text that it had before there were any.
    assert "num_elsewhere" not in cluster_to_json(preset("l4-24g", 2))
    with pytest.raises(InvalidProfile, match="all of its ranks"):
        fleet_of(cluster)


@pytest.mark.parametrize(
    ("text", "nearest"),
    [("2 x l4-24g + ", "l4-24g"), ("2 x l5", "l4-24g"), ("2 x l4-24g + 2 x t5", "t4-16g"), ("| l4-24g", "l4-24g")],
)
def test_an_unknown_term_is_named_with_the_nearest(text: str, nearest: str) -> None:
    with pytest.raises(UnknownHardware) as caught:
        parse_fleet(text)
    assert caught.value.nearest == nearest
    assert caught.value.name in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gh200 + l4-24g", "gh200 on hosts of its own"),
        ("5 x l4-24g + 4 x t4-16g", "1 to 8 devices on a host"),
        ("2 x l4-24g + 2 x 2 x t4-16g", r"the hosts of '2 x 2 x t4-16g' with `\|`"),
    ],
)
def test_devices_that_cannot_share_a_host_are_refused(text: str, expected: str) -> None:
    with pytest.raises(InvalidOption, match=expected):
        parse_fleet(text)


def test_seats_that_contradict_each_other_are_refused() -> None:
    fleet = parse_fleet(MIXED)
    with pytest.raises(InvalidProfile, match=r"seats\[0\].cluster: expected 3 devices on its host and 0 elsewhere"):
        Fleet(seats=fleet.seats[:3], collective=fleet.collective)
    with pytest.raises(InvalidProfile, match="collective: expected a link, as there are 4 ranks"):
        Fleet(seats=fleet.seats)
    with pytest.raises(InvalidProfile, match="1 to"):
        Fleet(seats=())
    with pytest.raises(InvalidProfile, match="host: expected 0 or more"):
        dataclasses.replace(fleet.seats[0], host=-1)
    with pytest.raises(InvalidProfile, match="a single node"):
        dataclasses.replace(fleet.seats[0], cluster=preset("l4-24g", 2, 2))
    text = fleet_to_json(fleet).replace('"host": 0', '"host": "x"', 1)
    with pytest.raises(ProfileFileError, match=r"seats\[0\].host: expected a whole number"):
        fleet_from_json(text)


def test_the_noise_of_a_measurement_makes_no_classes() -> None:
    """Of four measured ranks, three differ by at most 5 %, and one has half of the flops."""
    node = preset("l4-24g", 4).nodes[0]

    def with_flops(times: float) -> Node:
        flops_per_s = {dtype: times * rate for dtype, rate in node.device.flops_per_s.items()}
        return dataclasses.replace(node, device=dataclasses.replace(node.device, flops_per_s=flops_per_s))

    nodes = [with_flops(times) for times in (1.0, 0.97, 1.04, 0.5)]
    noisy = fleet_of_nodes(nodes, [0] * 4, node.peer)
    assert len(noisy.classes()) == 4
    assert with_like_seats(noisy).classes() == ((0, 1, 2), (3,))
    assert with_like_seats(noisy).seats[2].cluster == noisy.seats[0].cluster
    equal = with_like_seats(fleet_of_nodes(nodes[:3], [0] * 3, node.peer))
    assert equal.as_cluster() is not None


# ----------------------------------------------------------------------------------------------------------------------
# `along_data`: the slice of a machine that trains one part of a tensor-parallel model.


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
