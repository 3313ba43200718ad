"""`ir.hardware.presets` and its table: machines by name, with relations that their numbers must keep."""

import itertools

import pytest

from elixir_compile.base.errors import InvalidOption, UnknownHardware
from elixir_compile.base.units import GIB
from elixir_compile.ir.hardware import Cluster, parse_hardware, preset, preset_names, preset_of_ranks
from elixir_compile.ir.hardware.presets import MAX_DEVICES_PER_NODE
from elixir_compile.ir.hardware.table import MACHINES

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
        "gh200",
        "h100-80g",
        "h200-141g",
        "l4-24g",
        "p100-16g",
        "p40-24g",
        "rtx3090-24g",
        "rtx4090-24g",
        "rtx5090-32g",
        "t4-16g",
        "v100-16g",
        "v100-32g",
    )


@pytest.mark.parametrize("name", preset_names())
def test_every_number_has_a_source(name: str) -> None:
    machine = MACHINES[name]
    rows = [machine.chip, machine.board, machine.lane, machine.peer, machine.network]
    assert all(len(row.source) > 10 for row in rows)
    cluster = preset(name, 2, 2)
    node = cluster.nodes[0]
    built = [node.device, node.host, node.h2d, node.d2h, node.peer, cluster.network]
    for part, row in zip(built, [rows[0], rows[1], None, None, rows[3], rows[4]], strict=True):
        assert part is not None
        assert row is None or row.source in part.source


@pytest.mark.parametrize("name", preset_names())
def test_counts_name_and_links(name: str) -> None:
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


@pytest.mark.parametrize("name", [name for name in preset_names() if name != "gh200"])
def test_the_name_says_the_memory(name: str) -> None:
    """Within 7 %: a driver counts in GiB what is left of the GB or GiB of the name."""
    said_bytes = int(name.split("-")[1].removesuffix("g")) * GIB
    assert 0.93 * said_bytes <= preset(name).device.memory_bytes <= said_bytes


@pytest.mark.parametrize("name", preset_names())
def test_rates_are_possible(name: str) -> None:
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


@pytest.mark.parametrize("name", preset_names())
def test_more_devices_never_make_a_slower_node(name: str) -> None:
    for fewer, more in itertools.pairwise(sums(preset(name, count)) for count in COUNTS):
        assert all(1.000001 * b >= a for a, b in zip(fewer, more, strict=True))


@pytest.mark.parametrize("name", preset_names())
def test_a_network_is_no_faster_than_the_peer_links(name: str) -> None:
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
    ],
)
def test_text_says_how_many(text: str, num_devices: int, num_nodes: int) -> None:
    assert parse_hardware(text) == preset("a100-40g", num_devices, num_nodes)


@pytest.mark.parametrize("name", preset_names())
def test_the_name_of_a_node_reads_back(name: str) -> None:
    assert parse_hardware(preset(name, 4).name) == preset(name, 4)


@pytest.mark.parametrize("text", ["0 x a100-40g", "9 x a100-40g", "0 x 2 x a100-40g"])
def test_counts_out_of_range_are_refused(text: str) -> None:
    with pytest.raises(InvalidOption, match="num_"):
        parse_hardware(text)
    with pytest.raises(InvalidOption, match="2 x 8 x a100-40g"):
        preset("a100-40g", 16)
