"""`ir.hardware`: machines as JSON, errors that name the field, and fingerprints."""

import dataclasses
import json
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elixir_compile.base.errors import ProfileFileError
from elixir_compile.ir.hardware import (
    Cluster,
    DeviceProfile,
    HostProfile,
    Link,
    Node,
    cluster_from_json,
    cluster_to_json,
    hardware_fingerprint,
    preset,
    preset_names,
    profile_for,
)

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


@pytest.mark.parametrize("name", preset_names())
def test_presets_read_back(name: str) -> None:
    assert cluster_from_json(cluster_to_json(preset(name, 2, 2))) == preset(name, 2, 2)


def test_the_file_states_its_kind_and_format() -> None:
    data = json.loads(cluster_to_json(CLUSTER))
    assert (data["elixir"], data["format"]) == ("machine", 1)
    assert data["nodes"][0]["h2d"]["bytes_per_s"] == pytest.approx(20.65e9)


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
