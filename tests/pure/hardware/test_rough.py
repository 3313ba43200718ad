"""`hardware.rough`: the two machines for a device nobody has named or measured."""

import pytest

from elixir_compile.errors import InvalidOption
from elixir_compile.hardware import profile_for
from elixir_compile.units import GIB


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


def test_an_unknown_device_type_is_refused() -> None:
    with pytest.raises(InvalidOption, match="'cpu' or 'cuda'"):
        profile_for("tpu", GIB, GIB, "tpu")
