"""`ir.hardware.presets`: the two machines for a device nobody has named or measured."""

import pytest

from elixir_compile.base.errors import InvalidOption
from elixir_compile.base.units import GIB
from elixir_compile.ir.hardware import is_name_of, preset, profile_for, with_devices


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
        ("NVIDIA H200", 140, "h200-141g"),
        ("NVIDIA A100-SXM4-40GB", 40, "a100-40g"),
        ("NVIDIA A100 80GB PCIe", 80, "a100-80g"),
        ("NVIDIA GH200 480GB", 95, "gh200"),
        ("NVIDIA GeForce RTX 4090", 24, "rtx4090-24g"),
        ("NVIDIA L4", 22, "l4-24g"),
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
    "name", ["NVIDIA L40S", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "Intel GPU"]
)
def test_any_other_accelerator_has_the_rates_of_the_paper(name: str) -> None:
    assert profile_for("xpu", GIB, GIB, name) == profile_for("cuda", GIB, GIB, name)
    assert profile_for("cuda", GIB, GIB, name).h2d == profile_for("cuda", GIB, GIB, "box").h2d


def test_a_device_without_memory_of_its_own_is_refused() -> None:
    with pytest.raises(InvalidOption, match="memory of its own"):
        profile_for("mps", GIB, GIB, "mps")
