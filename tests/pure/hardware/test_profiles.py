"""`ir.hardware`: devices, links, nodes and clusters: a profile that exists is valid."""

import math
from dataclasses import replace
from typing import Any

import pytest

from elixir_compile.base.errors import InvalidPlan, InvalidProfile
from elixir_compile.base.units import GIB
from elixir_compile.ir.hardware import Cluster, preset, profile_for

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
