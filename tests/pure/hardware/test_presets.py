"""`hardware`: profiles that are valid or do not exist, and the two built-in ones."""

from dataclasses import replace

import pytest

from elixir_compile.errors import InvalidOption, InvalidPlan
from elixir_compile.hardware import profile_for
from elixir_compile.units import GIB


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_a_preset_has_the_sizes_and_the_name_given_and_says_its_sources(device_type: str) -> None:
    cluster = profile_for(device_type, 20 * GIB, 50 * GIB, "box")
    assert cluster.name == "1 x box"
    assert (cluster.device.memory_bytes, cluster.host.memory_bytes) == (20 * GIB, 50 * GIB)
    assert all([cluster.device.source, cluster.host.source, cluster.h2d.source, cluster.d2h.source])


def test_only_cuda_copies_while_it_computes() -> None:
    cpu, cuda = (profile_for(device_type, GIB, GIB, device_type) for device_type in ("cpu", "cuda"))
    assert (cpu.h2d.overlaps_compute, cpu.d2h.overlaps_compute) == (False, False)
    assert (cuda.h2d.overlaps_compute, cuda.d2h.overlaps_compute) == (True, True)


def test_an_unknown_device_type_is_refused() -> None:
    with pytest.raises(InvalidOption, match="'cpu' or 'cuda'"):
        profile_for("tpu", GIB, GIB, "tpu")


@pytest.mark.parametrize(
    "changes",
    [
        {"flops_per_s": {}},
        {"flops_per_s": {"float32": 0.0}},
        {"memory_bytes": 0},
        {"launch_s": -1.0},
        {"reserve_bytes": GIB},
    ],
)
def test_a_device_that_could_not_exist_is_refused(changes: dict[str, object]) -> None:
    device = profile_for("cpu", GIB, GIB, "cpu").device
    with pytest.raises(InvalidPlan, match="device cpu"):
        replace(device, **changes)


def test_a_link_or_host_that_could_not_exist_is_refused() -> None:
    cluster = profile_for("cpu", GIB, GIB, "cpu")
    with pytest.raises(InvalidPlan, match="bytes_per_s must be positive"):
        replace(cluster.h2d, bytes_per_s=0)
    with pytest.raises(InvalidPlan, match="latency_s"):
        replace(cluster.h2d, latency_s=-1.0)
    with pytest.raises(InvalidPlan, match="update_elements_per_s"):
        replace(cluster.host, update_elements_per_s=0)
