"""A measured CUDA machine: copies run beside compute, and every rate is one that a device has."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from elixir_compile.compat.platforms import memory_sizes_bytes
from elixir_compile.ir.hardware import cluster_from_json, cluster_to_json
from elixir_compile.session.machine import library_bytes
from elixir_compile.tools.measure.machine import measure_machine

pytestmark = [pytest.mark.gpu, pytest.mark.cuda]


def test_a_measured_device_is_one_that_could_be() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    cluster = measure_machine(device, seconds=4.0)
    assert cluster_from_json(cluster_to_json(cluster)) == cluster
    assert (cluster.device.memory_bytes, cluster.host.memory_bytes) == memory_sizes_bytes(device)
    assert cluster.device.name == torch.cuda.get_device_name(device)
    for link in (cluster.h2d, cluster.d2h):
        assert link.overlaps_compute
        assert 5e8 < link.bytes_per_s < 1e12
        assert 1e-7 < link.latency_s < 1e-3
    assert cluster.device.flops_per_s["float16"] > cluster.device.flops_per_s["float64"]
    assert cluster.device.memory_bytes_per_s > cluster.h2d.bytes_per_s
    # States on the device are updated faster than on its host: that the planner may choose is the point.
    assert cluster.device.update_elements_per_s > cluster.host.update_elements_per_s
    assert cluster.host.pinned_bytes <= cluster.host.memory_bytes


def test_workspaces_are_the_same_inside_a_capture() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    outside_bytes = library_bytes.__wrapped__(device)
    with FakeTensorMode():
        assert library_bytes.__wrapped__(device) == outside_bytes > 0
