"""Machines: those with a name, profiles as JSON, and rough ones of a device that nobody measured."""

import dataclasses
import itertools
import json
import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elixir_compile.base.errors import InvalidOption, InvalidPlan, InvalidProfile, ProfileFileError, UnknownHardware
from elixir_compile.base.units import GIB
from elixir_compile.ir.hardware import (
    Cluster,
    DeviceProfile,
    FormPrice,
    HostProfile,
    Link,
    Node,
    cluster_from_json,
    cluster_to_json,
    hardware_fingerprint,
    is_name_of,
    parse_hardware,
    preset,
    preset_names,
    preset_of_ranks,
    profile_for,
    with_devices,
)
from elixir_compile.ir.hardware.presets import MAX_DEVICES_PER_NODE
from elixir_compile.ir.hardware.table import MACHINES, PeakShare

# ----------------------------------------------------------------------------------------------------------------------
# `ir.hardware.presets` and its table: machines by name, with relations that their numbers must keep.


COUNTS = range(1, MAX_DEVICES_PER_NODE + 1)
ADAM_BYTES_PER_ELEMENT = 28

WITHOUT_BFLOAT16 = {"p100-16g", "p40-24g", "t4-16g", "v100-16g", "v100-32g"}
"""Chips before Ampere."""


def test_common_machines_have_presets() -> None:
    assert preset_names() == (
        "a100-40g",
        "a100-80g",
        "a10g-24g",
        "a6000-48g",
        "b200-180g",
        "gh200",
        "h100-80g",
        "h100nvl-94g",
        "h100pcie-80g",
        "h200-141g",
        "l4-24g",
        "l40s-48g",
        "mi300x-192g",
        "p100-16g",
        "p40-24g",
        "rtx3090-24g",
        "rtx4090-24g",
        "rtx4090d-24g",
        "rtx5090-32g",
        "rtxpro6000-96g",
        "t4-16g",
        "v100-16g",
        "v100-32g",
    )


def test_every_number_has_a_source() -> None:
    for name in preset_names():
        machine = MACHINES[name]
        rows = [machine.chip, machine.board, machine.lane, machine.peer, machine.network]
        assert all(len(row.source) > 10 for row in rows)
        cluster = preset(name, 2, 2)
        node = cluster.nodes[0]
        built = [node.device, node.host, node.h2d, node.d2h, node.peer, cluster.network]
        for part, row in zip(built, [rows[0], rows[1], None, None, rows[3], rows[4]], strict=True):
            assert part is not None
            assert row is None or row.source in part.source


def test_counts_name_and_links() -> None:
    for name in preset_names():
        for num_devices in COUNTS:
            cluster = preset(name, num_devices)
            assert cluster.name == f"{num_devices} x {name}"
            assert (cluster.num_ranks, cluster.num_local_ranks) == (num_devices, num_devices)
            assert (cluster.collective is None) == (num_devices == 1)
            two = preset(name, num_devices, 2)
            assert (two.num_ranks, two.num_local_ranks) == (2 * num_devices, num_devices)
            assert two.nodes == cluster.nodes * 2
            assert two.collective is two.network is not None


def test_ranks_are_whole_nodes_of_eight_or_fewer_on_one() -> None:
    assert [preset_of_ranks("a100-40g", count).name for count in (1, 5, 8, 16, 1024)] == [
        "1 x a100-40g", "5 x a100-40g", "8 x a100-40g", "2 x 8 x a100-40g", "128 x 8 x a100-40g"
    ]  # fmt: skip
    assert preset_of_ranks("a100-40g", 1024).num_ranks == 1024
    for count, near in ((12, "8 or 16"), (1023, "1016 or 1024"), (9, "8 or 16")):
        with pytest.raises(InvalidOption, match=f"ranks: got {count}, .* whole nodes of 8: {near}"):
            preset_of_ranks("a100-40g", count)
    with pytest.raises(InvalidOption, match="num_devices"):
        preset_of_ranks("a100-40g", 0)


def test_the_name_says_the_memory() -> None:
    """Within 7 %: a driver counts in GiB what is left of the GB or GiB of the name."""
    for name in set(preset_names()) - {"gh200"}:
        said_bytes = int(name.split("-")[1].removesuffix("g")) * GIB
        assert 0.93 * said_bytes <= preset(name).device.memory_bytes <= said_bytes


def test_rates_are_possible() -> None:
    for name in preset_names():
        for num_devices in COUNTS:
            cluster = preset(name, num_devices)
            device, host = cluster.device, cluster.host
            # The paper's Adam on an A100 40GB is 90 % of the memory rate; nothing can be above the rate itself.
            assert device.update_elements_per_s * ADAM_BYTES_PER_ELEMENT <= 1.001 * device.memory_bytes_per_s
            assert host.update_elements_per_s * ADAM_BYTES_PER_ELEMENT <= host.memory_bytes_per_s
            for link in (cluster.h2d, cluster.d2h):
                assert num_devices * link.bytes_per_s <= 1.001 * host.memory_bytes_per_s
                assert link.bytes_per_s <= MACHINES[name].lane.bytes_per_s
                assert link.overlaps_compute
            assert host.pinned_bytes + host.reserve_bytes <= host.memory_bytes
            rates = device.flops_per_s
            assert rates["float64"] < rates["float32"]
            if name in WITHOUT_BFLOAT16:
                assert "bfloat16" not in rates
            else:
                assert rates["bfloat16"] == rates["float16"] > rates["float32"]


def sums(cluster: Cluster) -> list[float]:
    """What the machine does in all."""
    n, node = cluster.num_ranks, cluster.nodes[0]
    peer_bytes_per_s = n * node.peer.bytes_per_s if node.peer else 0.0
    return [
        n * node.h2d.bytes_per_s,
        n * node.d2h.bytes_per_s,
        n * node.device.flops_per_s["float16"],
        peer_bytes_per_s,
        node.host.update_elements_per_s,
        node.host.memory_bytes_per_s,
        node.host.memory_bytes,
    ]


def test_more_devices_never_make_a_slower_node() -> None:
    for name in preset_names():
        for fewer, more in itertools.pairwise(sums(preset(name, count)) for count in COUNTS):
            assert all(1.000001 * b >= a for a, b in zip(fewer, more, strict=True))


def test_a_network_is_no_faster_than_the_peer_links() -> None:
    for name in preset_names():
        for num_devices in COUNTS:
            cluster = preset(name, num_devices, 2)
            peer = cluster.nodes[0].peer
            assert cluster.network is not None
            if peer is not None:
                assert cluster.network.bytes_per_s <= peer.bytes_per_s


@pytest.mark.parametrize(
    ("slower", "faster"),
    [
        ("a100-40g", "h100-80g"),
        ("rtx3090-24g", "rtx4090-24g"),
        ("rtx4090-24g", "rtx5090-32g"),
        ("l4-24g", "a100-40g"),
        ("h100-80g", "b200-180g"),
        ("l4-24g", "l40s-48g"),
    ],
)
def test_a_later_device_is_faster(slower: str, faster: str) -> None:
    one, other = preset(slower), preset(faster)
    assert one.device.flops_per_s["bfloat16"] < other.device.flops_per_s["bfloat16"]
    assert one.device.memory_bytes_per_s < other.device.memory_bytes_per_s


def test_larger_memories_come_with_their_rates() -> None:
    a40, a80, h80, h141, grace = map(preset, ("a100-40g", "a100-80g", "h100-80g", "h200-141g", "gh200"))
    assert a40.device.memory_bytes_per_s < a80.device.memory_bytes_per_s < h80.device.memory_bytes_per_s
    assert h80.device.flops_per_s == h141.device.flops_per_s
    assert h80.device.memory_bytes_per_s < h141.device.memory_bytes_per_s
    assert grace.h2d.bytes_per_s > 5 * h80.h2d.bytes_per_s


@pytest.mark.parametrize("name", ["a100-40g", "a100-80g"])
@pytest.mark.parametrize(
    ("n", "c2g", "g2c", "v_cpu"), [(1, 25.0, 18.1, 5.15), (4, 73.9, 65.5, 7.4513), (8, 139.1, 128.7, 8.6019)]
)
def test_the_paper_s_machine_has_the_paper_s_rates(name: str, n: int, c2g: float, g2c: float, v_cpu: float) -> None:
    """c2g = 16.3 n + 8.7 and g2c = 15.8 n + 2.3 GB/s, v_gpu = 50 n and v_cpu = 1.66 ln n + 5.15 G elements/s."""
    cluster = preset(name, n)
    assert n * cluster.h2d.bytes_per_s == pytest.approx(c2g * 1e9)
    assert n * cluster.d2h.bytes_per_s == pytest.approx(g2c * 1e9)
    assert cluster.device.update_elements_per_s == 50e9
    assert cluster.host.update_elements_per_s == pytest.approx(v_cpu * 1e9, rel=1e-4)


def test_devices_without_peer_access_share_the_host_s_memory() -> None:
    """204.8 GB/s of DRAM at 80 %, each byte there and back, over 8 devices: 10.24 GB/s."""
    peer = preset("rtx4090-24g", 8).nodes[0].peer
    assert peer is not None
    assert peer.bytes_per_s == pytest.approx(10.24e9)
    assert "no peer access" in peer.source


def test_links_have_the_share_of_their_generation() -> None:
    """The rates that nvbandwidth's guide has for PCI Express 5, and BaM and Elixir for PCI Express 4."""
    assert preset("h100-80g").h2d.bytes_per_s == pytest.approx(55.6e9, rel=0.01)
    assert preset("rtx4090-24g").h2d.bytes_per_s == pytest.approx(25e9, rel=0.01)
    assert "88% of PCI Express 5.0" in preset("h100-80g").h2d.source


@pytest.mark.parametrize(
    ("text", "host_gib", "memory_gib", "dram_bytes_per_s"),
    [
        ("rtx4090-24g", None, 256, 204.8e9),
        ("rtx4090-24g", 200, 256, 204.8e9),
        ("rtx4090-24g", 192, 64, 51.2e9),
        ("rtx5090-32g", 64, 64, 83.2e9),
        ("2 x rtx4090-24g", 96, 64, 51.2e9),
        ("2 x rtx4090-24g", 128, 256, 204.8e9),
        ("rtx4090-24g@desktop", None, 64, 51.2e9),
        ("2 x RTX4090-24g@desktop", 256, 64, 51.2e9),
        ("h100-80g", 64, 2048, 614.4e9),
    ],
)
def test_a_geforce_chip_with_little_host_memory_is_in_a_desktop(
    text: str, host_gib: int | None, memory_gib: int, dram_bytes_per_s: float
) -> None:
    found = parse_hardware(text, None if host_gib is None else host_gib * GIB)
    assert found.host.memory_bytes == memory_gib * GIB
    assert found.host.memory_bytes_per_s == pytest.approx(0.8 * dram_bytes_per_s)
    assert found.name == parse_hardware(text.removesuffix("@desktop")).name


@pytest.mark.parametrize("text", ["h100-80g@desktop", "rtx4090-24g@", "rtx4090-24g@laptop"])
def test_no_other_chip_and_no_other_board_is_named(text: str) -> None:
    with pytest.raises(UnknownHardware):
        parse_hardware(text)


def test_a_share_of_the_peak_is_within_its_range() -> None:
    share = PeakShare(share=0.75, low=0.65, high=0.85, source="a run")
    assert str(share) == "75% of the data sheet (65-85)"
    for wrong in ({"share": 0.6}, {"high": 0.7}, {"low": 0.0}, {"share": math.nan}, {"high": 2.0}):
        with pytest.raises(InvalidProfile, match="rising numbers between 0 and 2"):
            replace(share, **wrong)


def test_rates_of_a_preset_are_its_shares_of_the_data_sheet() -> None:
    for name in preset_names():
        device, chip = preset(name).device, MACHINES[name].chip
        assert device.shares is not None
        for dtype, peak in chip.flops_per_s.items():
            assert device.flops_per_s[dtype] == pytest.approx(device.shares[dtype].share * peak)


def test_a_profile_with_measured_rates_has_no_shares() -> None:
    measured = replace(CLUSTER.nodes[0], device=replace(CLUSTER.device, shares=None))
    text = cluster_to_json(Cluster(nodes=(measured,)))
    assert '"shares"' not in text
    assert cluster_from_json(text).device.shares is None


def test_every_grace_hopper_brings_its_host() -> None:
    one, four = preset("gh200"), preset("gh200", 4)
    assert four.host.memory_bytes == 4 * one.host.memory_bytes
    assert four.host.update_elements_per_s == pytest.approx(4 * one.host.update_elements_per_s)
    assert four.h2d.bytes_per_s == pytest.approx(one.h2d.bytes_per_s)


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("a100-40gb", "a100-40g"),
        ("A100-80GB", "a100-80g"),
        ("h200", "h200-141g"),
        ("h100", "h100-80g"),
        ("rtx 4090", "rtx4090-24g"),
        ("4090", "rtx4090-24g"),
        ("4 x h100-80gb", "h100-80g"),
        ("moon", None),
        ("", None),
        ("2 x 2 x 2 x a100-40g", "a100-40g"),
        ("some4 x a100-40g", "a100-40g"),
    ],
)
def test_an_unknown_name_suggests_the_nearest(text: str, nearest: str | None) -> None:
    with pytest.raises(UnknownHardware) as caught:
        parse_hardware(text)
    assert caught.value.nearest == nearest
    assert caught.value.known == preset_names()
    assert "gh200, h100-80g" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "num_devices", "num_nodes"),
    [
        ("a100-40g", 1, 1),
        ("4 x a100-40g", 4, 1),
        (" 4xA100-40G ", 4, 1),
        ("2 x 8 x a100-40g", 8, 2),
        ("2x8xA100-40G", 8, 2),
    ],
)
def test_text_says_how_many(text: str, num_devices: int, num_nodes: int) -> None:
    assert parse_hardware(text) == preset("a100-40g", num_devices, num_nodes)


def test_the_name_of_a_node_reads_back() -> None:
    for name in preset_names():
        assert parse_hardware(preset(name, 4).name) == preset(name, 4)


@pytest.mark.parametrize("text", ["0 x a100-40g", "9 x a100-40g", "0 x 2 x a100-40g"])
def test_counts_out_of_range_are_refused(text: str) -> None:
    with pytest.raises(InvalidOption, match="num_"):
        parse_hardware(text)
    with pytest.raises(InvalidOption, match="2 x 8 x a100-40g"):
        preset("a100-40g", 16)


# ----------------------------------------------------------------------------------------------------------------------
# `ir.hardware`: machines as JSON, errors that name the field, and fingerprints.


CLUSTER = preset("a100-40g", num_devices=2)
RATES = st.floats(1e-9, 1e30)
SECONDS = st.floats(0, 1e9)
SIZES = st.integers(2, 2**60)

LINKS = st.builds(
    Link,
    bytes_per_s=RATES,
    latency_s=SECONDS,
    overlaps_compute=st.booleans(),
    source=st.text(),
    busy_bytes_per_s=st.none() | RATES,
)
DEVICES = st.builds(
    DeviceProfile,
    name=st.text(),
    memory_bytes=SIZES,
    reserve_bytes=st.integers(0, 1),
    flops_per_s=st.dictionaries(st.text(), RATES).map(lambda rates: {"float32": 1.5} | rates),
    memory_bytes_per_s=RATES,
    launch_s=SECONDS,
    update_elements_per_s=RATES,
    source=st.text(),
    shares=st.none()
    | st.dictionaries(
        st.text(),
        st.builds(
            PeakShare,
            share=st.floats(0.5, 0.6),
            low=st.floats(0.1, 0.5),
            high=st.floats(0.6, 1.9),
            source=st.text(),
        ),
    ),
)
HOSTS = st.builds(
    HostProfile,
    memory_bytes=SIZES,
    pinned_bytes=st.integers(0, 2**60),
    reserve_bytes=st.integers(0, 1),
    cores=st.integers(1, 1000),
    memory_bytes_per_s=RATES,
    update_elements_per_s=RATES,
    source=st.text(),
    busy_update_elements_per_s=st.none() | RATES,
    update_forms=st.lists(
        st.builds(FormPrice, dtype=st.text(), state_dtype=st.text(), over_fp32=RATES), max_size=3
    ).map(tuple),
    flops_per_s=st.none() | st.dictionaries(st.text(), RATES).map(lambda rates: {"float32": 1.5} | rates),
)
NODES = st.builds(Node, device=DEVICES, host=HOSTS, h2d=LINKS, d2h=LINKS, peer=LINKS, num_devices=st.integers(1, 9))
CLUSTERS = st.builds(
    lambda node, num_nodes, network: Cluster(nodes=(node,) * num_nodes, network=network),
    NODES,
    st.integers(1, 3),
    LINKS,
)


@given(CLUSTERS)
def test_clusters_read_back(cluster: Cluster) -> None:
    text = cluster_to_json(cluster)
    assert cluster_from_json(text) == cluster
    assert cluster_to_json(cluster_from_json(text)) == text


def test_presets_read_back() -> None:
    for name in preset_names():
        assert cluster_from_json(cluster_to_json(preset(name, 2, 2))) == preset(name, 2, 2)


def test_the_file_states_its_kind_and_format() -> None:
    data = json.loads(cluster_to_json(CLUSTER))
    assert (data["elixir"], data["format"]) == ("machine", 1)
    assert data["nodes"][0]["h2d"]["bytes_per_s"] == pytest.approx(20.65e9)


def test_a_profile_without_later_figures_of_the_host_is_as_it_was_before_they_were_measured() -> None:
    host = json.loads(cluster_to_json(CLUSTER))["nodes"][0]["host"]
    assert not {"update_forms", "flops_per_s"} & host.keys()
    assert cluster_from_json(cluster_to_json(CLUSTER)).host.update_forms == ()
    assert cluster_from_json(cluster_to_json(CLUSTER)).host.flops_per_s is None
    with pytest.raises(ProfileFileError, match="flops_per_s: expected an entry for float32"):
        cluster_from_json(changed([*HOST, "flops_per_s"], {"bfloat16": 1e12}))
    with pytest.raises(ProfileFileError, match=r"host\.flops_per_s\.float32: expected a positive finite number"):
        cluster_from_json(changed([*HOST, "flops_per_s"], {"float32": 0}))
    bad = [{"dtype": "float32", "state_dtype": "int8", "over_fp32": 0}]
    with pytest.raises(
        ProfileFileError, match=r"host\.update_forms\[0\]\.over_fp32: expected a positive finite number"
    ):
        cluster_from_json(changed([*HOST, "update_forms"], bad))


def changed(path: list[str | int], value: Any) -> str:
    """Return the cluster's JSON with the field at `path` set to `value`, or removed where `value` is `...`."""
    data = json.loads(cluster_to_json(CLUSTER))
    inner = data
    for step in path[:-1]:
        inner = inner[step]
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return json.dumps(data)


H2D, DEVICE, HOST = ["nodes", 0, "h2d"], ["nodes", 0, "device"], ["nodes", 0, "host"]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["elixir"], "plan", "elixir: expected 'machine', got 'plan'"),
        (["format"], 2, "format: expected 1 (a later elixir_compile wrote the machine; that version reads it), got 2"),
        ([*H2D, "bytes_per_s"], ..., "nodes[0].h2d.bytes_per_s: expected a value, got 'nothing"),
        ([*H2D, "bytes_per_s"], -1, "nodes[0].h2d.bytes_per_s: expected a positive finite number, got -1.0"),
        ([*H2D, "bytes_per_s"], 0, "nodes[0].h2d.bytes_per_s: expected a positive finite number, got 0.0"),
        ([*H2D, "bytes_per_s"], float("nan"), "nodes[0].h2d.bytes_per_s: expected a finite number, got nan"),
        ([*H2D, "bytes_per_s"], float("inf"), "nodes[0].h2d.bytes_per_s: expected a finite number, got inf"),
        ([*H2D, "bytes_per_s"], "25 GB/s", "nodes[0].h2d.bytes_per_s: expected a finite number, got '25 GB/s'"),
        ([*H2D, "bytes_per_s"], None, "nodes[0].h2d.bytes_per_s: expected a finite number, got None"),
        ([*H2D, "busy_bytes_per_s"], -1, "nodes[0].h2d.busy_bytes_per_s: expected a positive finite number"),
        ([*H2D, "latency_s"], -1e-6, "nodes[0].h2d.latency_s: expected a finite number of 0 or more, got -1e-06"),
        ([*H2D, "overlaps_compute"], 1, "nodes[0].h2d.overlaps_compute: expected true or false, got 1"),
        ([*H2D, "colour"], "red", "nodes[0].h2d.colour: expected no such field; the fields are bytes_per_s"),
        ([*DEVICE, "flops_per_s"], {}, "nodes[0].device.flops_per_s: expected an entry for float32, got {}"),
        ([*DEVICE, "flops_per_s", "float16"], -1, "nodes[0].device.flops_per_s.float16: expected a positive"),
        ([*DEVICE, "memory_bytes"], 1.5, "nodes[0].device.memory_bytes: expected a whole number, got 1.5"),
        ([*DEVICE, "memory_bytes"], float("nan"), "nodes[0].device.memory_bytes: expected a whole number, got nan"),
        ([*DEVICE, "reserve_bytes"], 1 << 50, "nodes[0].device.reserve_bytes: expected 0 or more and less than"),
        ([*HOST, "update_elements_per_s"], -3, "nodes[0].host.update_elements_per_s: expected a positive"),
        ([*HOST, "cores"], 0, "nodes[0].host.cores: expected a positive finite number, got 0"),
        (["nodes", 0, "peer"], None, "nodes[0].peer: expected a link, as there are 2 devices, got None"),
        (["nodes", 0, "num_devices"], 0, "nodes[0].num_devices: expected a positive finite number, got 0"),
        ([*H2D, "bytes_per_s"], 1e-300, "nodes[0].h2d.bytes_per_s: expected a number from 1e-09 to 1e+30, got 1e-300"),
        ([*H2D, "bytes_per_s"], 10**400, "nodes[0].h2d.bytes_per_s: expected a finite number, got 1000000"),
        ([*H2D, "latency_s"], 1e300, "nodes[0].h2d.latency_s: expected at most 1000000000.0 seconds, got 1e+300"),
        ([*DEVICE, "memory_bytes"], 10**400, "nodes[0].device.memory_bytes: expected a whole number of at most 9223"),
        ([*DEVICE, "memory_bytes"], True, "nodes[0].device.memory_bytes: expected a whole number, got True"),
        ([*DEVICE, "name"], ["x"] * 10**5, "nodes[0].device.name: expected a text, got ['x', 'x'"),
        (["nodes", 0, "num_devices"], 1 << 40, "expected values that agree, got 'a cluster has 1099511627776 devices"),
        (["nodes"], [], "the whole text: expected values that agree, got 'a cluster needs"),
        (["nodes"], {}, "nodes: expected a list, got {}"),
    ],
)
def test_errors_name_the_field(path: list[str | int], value: Any, message: str) -> None:
    with pytest.raises(ProfileFileError) as caught:
        cluster_from_json(changed(path, value))
    assert str(caught.value).startswith("hardware profile, ")
    assert message in str(caught.value)
    assert len(str(caught.value)) < 4000


@given(st.data())
def test_truncated_text_is_refused(data: st.DataObject) -> None:
    text = cluster_to_json(CLUSTER)
    with pytest.raises(ProfileFileError, match=r"hardware profile, line \d+ column \d+: expected JSON"):
        cluster_from_json(text[: data.draw(st.integers(0, len(text) - 1))])


@given(DEVICES, st.randoms(use_true_random=False))
def test_equal_clusters_have_equal_fingerprints(device: DeviceProfile, random: Any) -> None:
    """The order in which a table was filled is no part of a machine."""
    rates = list(device.flops_per_s.items())
    random.shuffle(rates)
    one, other = (
        dataclasses.replace(CLUSTER.nodes[0], device=dataclasses.replace(device, flops_per_s=table))
        for table in (device.flops_per_s, dict(rates))
    )
    assert one == other
    assert hardware_fingerprint(Cluster(nodes=(one,))) == hardware_fingerprint(Cluster(nodes=(other,)))


def test_different_clusters_have_different_fingerprints() -> None:
    clusters = [preset(name, n, nodes) for name in preset_names() for n in (1, 2, 8) for nodes in (1, 2)]
    clusters.append(profile_for("cpu", 1 << 30, 1 << 30, "cpu"))
    assert len({hardware_fingerprint(cluster) for cluster in clusters}) == len(clusters)


def test_a_fingerprint_is_the_same_in_another_process() -> None:
    code = "from elixir_compile.ir.hardware import *; print(hardware_fingerprint(preset('a100-40g', 2)))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert other == hardware_fingerprint(CLUSTER)
    assert len(bytes.fromhex(other)) == 6


# ----------------------------------------------------------------------------------------------------------------------
# `ir.hardware`: devices, links, nodes and clusters: a profile that exists is valid.


NODE = preset("a100-40g", num_devices=2).nodes[0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize(
    ("part", "field"),
    [
        ("device", "memory_bytes"),
        ("device", "reserve_bytes"),
        ("device", "memory_bytes_per_s"),
        ("device", "launch_s"),
        ("device", "update_elements_per_s"),
        ("host", "memory_bytes"),
        ("host", "pinned_bytes"),
        ("host", "reserve_bytes"),
        ("host", "cores"),
        ("host", "memory_bytes_per_s"),
        ("host", "update_elements_per_s"),
        ("host", "busy_update_elements_per_s"),
        ("h2d", "bytes_per_s"),
        ("h2d", "busy_bytes_per_s"),
        ("h2d", "latency_s"),
    ],
)
def test_no_number_is_negative_or_not_finite(part: str, field: str, bad: float) -> None:
    with pytest.raises(InvalidProfile) as caught:
        replace(getattr(NODE, part), **{field: bad})
    assert caught.value.field == field
    assert caught.value.got is bad


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"flops_per_s": {}}, "flops_per_s"),
        ({"flops_per_s": {"float32": 0.0}}, "flops_per_s.float32"),
        ({"flops_per_s": {"float32": 1.0, "bfloat16": math.nan}}, "flops_per_s.bfloat16"),
        ({"memory_bytes": 0}, "memory_bytes"),
        ({"reserve_bytes": 20 * GIB}, "reserve_bytes"),
    ],
)
def test_a_device_that_could_not_exist_is_refused(changes: dict[str, Any], field: str) -> None:
    device = profile_for("cpu", 20 * GIB, GIB, "cpu").device
    with pytest.raises(InvalidProfile, match=f"device cpu: {field}: expected") as caught:
        replace(device, **changes)
    assert caught.value.field == field


def test_zero_rates_are_refused_and_zero_latencies_allowed() -> None:
    with pytest.raises(InvalidProfile, match=r"link: bytes_per_s: expected a positive finite number, got 0\."):
        replace(NODE.h2d, bytes_per_s=0)
    assert replace(NODE.h2d, latency_s=0.0).latency_s == 0


def test_several_devices_need_a_peer_link_and_several_nodes_a_network() -> None:
    with pytest.raises(InvalidProfile, match="peer: expected a link, as there are 2 devices"):
        replace(NODE, peer=None)
    with pytest.raises(InvalidProfile, match="num_devices"):
        replace(NODE, num_devices=0)
    with pytest.raises(InvalidProfile, match="network: expected a link, as there are 2 nodes"):
        Cluster(nodes=(NODE, NODE))


def test_unequal_nodes_and_no_nodes_are_refused() -> None:
    with pytest.raises(InvalidPlan, match="must be equal"):
        Cluster(nodes=(NODE, replace(NODE, num_devices=4)), network=NODE.peer)
    with pytest.raises(InvalidPlan, match="at least one node"):
        Cluster(nodes=())


def test_a_ring_over_several_nodes_is_bound_by_the_network() -> None:
    assert Cluster(nodes=(NODE,)).collective == NODE.peer
    assert Cluster(nodes=(NODE, NODE), network=NODE.h2d).collective == NODE.h2d
    assert Cluster(nodes=(replace(NODE, num_devices=1, peer=None),)).collective is None


# ----------------------------------------------------------------------------------------------------------------------
# `ir.hardware.presets`: the two machines for a device nobody has named or measured.


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_a_rough_profile_has_the_given_name_and_sizes_and_its_sources(device_type: str) -> None:
    cluster = profile_for(device_type, 20 * GIB, 50 * GIB, "box")
    assert cluster.name == "1 x box"
    assert (cluster.device.memory_bytes, cluster.host.memory_bytes) == (20 * GIB, 50 * GIB)
    assert all([cluster.device.source, cluster.host.source, cluster.h2d.source, cluster.d2h.source])


def test_only_cuda_copies_while_it_computes() -> None:
    cpu, cuda = (profile_for(device_type, GIB, GIB, device_type) for device_type in ("cpu", "cuda"))
    assert (cpu.h2d.overlaps_compute, cpu.d2h.overlaps_compute) == (False, False)
    assert (cuda.h2d.overlaps_compute, cuda.d2h.overlaps_compute) == (True, True)


@pytest.mark.parametrize(
    ("name", "memory_gib", "machine"),
    [
        ("NVIDIA H100 80GB HBM3", 80, "h100-80g"),
        ("NVIDIA H100 PCIe", 80, "h100pcie-80g"),
        ("NVIDIA H100 NVL", 94, "h100nvl-94g"),
        ("NVIDIA H200", 140, "h200-141g"),
        ("NVIDIA A100-SXM4-40GB", 40, "a100-40g"),
        ("NVIDIA A100 80GB PCIe", 80, "a100-80g"),
        ("NVIDIA GH200 480GB", 95, "gh200"),
        ("NVIDIA GeForce RTX 4090", 24, "rtx4090-24g"),
        ("NVIDIA GeForce RTX 4090 D", 24, "rtx4090d-24g"),
        ("NVIDIA L4", 22, "l4-24g"),
        ("NVIDIA L40S", 45, "l40s-48g"),
        ("NVIDIA B200", 179, "b200-180g"),
        ("AMD Instinct MI300X", 192, "mi300x-192g"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 95, "rtxpro6000-96g"),
    ],
)
def test_an_unmeasured_gpu_of_a_common_machine_has_its_rates(name: str, memory_gib: int, machine: str) -> None:
    found, known = profile_for("cuda", memory_gib * GIB, 50 * GIB, name), preset(machine)
    assert found.device.flops_per_s == known.device.flops_per_s
    assert (found.h2d, found.d2h) == (known.h2d, known.d2h)
    assert (found.device.name, found.device.memory_bytes) == (name, memory_gib * GIB)
    assert (found.host.memory_bytes, found.host.pinned_bytes) == (50 * GIB, 50 * GIB)


@pytest.mark.parametrize(
    ("planned", "here", "memory_gib", "is_same"),
    [
        ("h100-80g", "NVIDIA H100 80GB HBM3", 80, True),
        ("NVIDIA H100 80GB HBM3", "h100-80g", 80, True),
        ("h100-80g", "h100-80g", 80, True),
        ("NVIDIA A100-SXM4-40GB", "a100-40g", 40, True),
        ("NVIDIA GeForce RTX 4090", "rtx4090-24g", 24, True),
        ("NVIDIA A100-SXM4-40GB", "a100-80g", 80, False),
        ("a100-80g", "NVIDIA A100-SXM4-40GB", 40, False),
        ("h100-80g", "NVIDIA H200", 141, False),
        ("NVIDIA H100 PCIe", "NVIDIA H100 80GB HBM3", 80, False),
        ("h100-80g", "NVIDIA H100 PCIe", 80, False),
        ("h100pcie-80g", "NVIDIA H100 PCIe", 80, True),
        ("rtx4090-24g", "NVIDIA GeForce RTX 4090 D", 24, False),
        ("h100-80g", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", 10, False),
        ("box", "other box", 10, False),
        ("rtx4090-24g", "NVIDIA GeForce RTX 4090 Laptop GPU", 16, False),
    ],
)
@pytest.mark.parametrize("num_devices", [1, 4])
def test_a_common_machine_and_the_device_that_its_driver_names_are_one(
    planned: str, here: str, memory_gib: int, is_same: bool, num_devices: int
) -> None:
    cluster = with_devices(profile_for("cuda", memory_gib * GIB, 50 * GIB, here), num_devices)
    assert is_name_of(f"{num_devices} x {planned}", cluster) == is_same
    assert not is_name_of(f"2 x {num_devices} x {planned}", cluster)


@pytest.mark.parametrize(
    "name", ["NVIDIA L40", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "Intel GPU"]
)
def test_any_other_accelerator_has_the_rates_of_the_paper(name: str) -> None:
    assert profile_for("xpu", GIB, GIB, name) == profile_for("cuda", GIB, GIB, name)
    assert profile_for("cuda", GIB, GIB, name).h2d == profile_for("cuda", GIB, GIB, "box").h2d


def test_a_device_without_memory_of_its_own_is_refused() -> None:
    with pytest.raises(InvalidOption, match="memory of its own"):
        profile_for("mps", GIB, GIB, "mps")
