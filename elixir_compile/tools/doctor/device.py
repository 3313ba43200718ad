"""Checks D10 to D12: the link to the GPU, the rates of copies, the allocators."""

from collections.abc import Iterator

from elixir_compile.base.errors import EXPANDABLE_SEGMENTS, MEASURED_OF_THEM, has_expandable_segments
from elixir_compile.base.units import GIB, format_bytes
from elixir_compile.tools.doctor.values import Finding, GpuState, System, bad, note, ok, unknown

MOST_OTHERS_BYTES = GIB
"""More bytes of other processes than this are worth a note: a desktop takes some hundred MiB."""
LEAST_RATE = 0.7
"""Share of the measured profile's rate below which a copy counts as slow."""
LEAST_MAPS = 65530
"""The default of Linux for the mappings of a process."""
_MEASURE = "elixir-compile measure"


def check_gpu(system: System) -> Iterator[Finding]:
    """D10: the PCIe link and the clocks run at full speed, and the GPU is free."""
    if system.accelerator is None:
        return
    state = system.accelerator.state
    if isinstance(state, str):
        yield unknown(f"{system.accelerator.name}: {state}")
        return
    yield _link_finding(state)
    if state.slowed_by:
        yield bad(
            f"the clocks are lowered by {' and '.join(state.slowed_by)}", "nvidia-smi -q -d PERFORMANCE,TEMPERATURE"
        )
    if state.capped_by:
        yield note(f"the clocks are limited by {' and '.join(state.capped_by)}", "nvidia-smi -q -d PERFORMANCE,POWER")
    if state.is_mig:
        yield note("MIG is on: the device is a part of the GPU, and copies share the link with the other parts")
    if state.others_bytes is not None and state.others_bytes > MOST_OTHERS_BYTES:
        found = f"other processes hold {format_bytes(state.others_bytes)} of the GPU"
        yield note(found, "nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv")


def _link_finding(state: GpuState) -> Finding:
    if state.link is None:
        return unknown("the GPU does not tell its PCIe link")
    said = "PCIe generation {} x{}".format(*state.link)
    if state.most_link is None:
        return ok(f"{said} while a copy ran")
    if any(now < most for now, most in zip(state.link, state.most_link, strict=True)):
        # No command repairs a slot, but plans can count on the rate that it has.
        return note(f"{said} while a copy ran, of generation {state.most_link[0]} x{state.most_link[1]}", _MEASURE)
    return ok(f"{said} while a copy ran, the most that GPU and slot support")


def check_copies(system: System) -> Iterator[Finding]:
    """D11: copies of pinned memory run as fast as the measured profile says."""
    if system.accelerator is None:
        return
    copies, profile = system.accelerator.copies, system.profile
    said = (
        f"{copies.h2d_bytes_per_s / 1e9:.3g} GB/s to the device, {copies.d2h_bytes_per_s / 1e9:.3g} GB/s back, "
        f"{copies.pageable_bytes_per_s / 1e9:.3g} GB/s from pageable memory"
    )
    if profile is None or profile.h2d_bytes_per_s is None or profile.d2h_bytes_per_s is None:
        yield unknown(f"{said}; there is no measured profile to compare with", _MEASURE)
        return
    pairs = ((copies.h2d_bytes_per_s, profile.h2d_bytes_per_s), (copies.d2h_bytes_per_s, profile.d2h_bytes_per_s))
    share = min(rate / measured for rate, measured in pairs)
    if share < LEAST_RATE:
        yield bad(f"{said}: {share:.0%} of the rate in the measured profile", _MEASURE)
    else:
        yield ok(said)


def check_allocators(system: System) -> Iterator[Finding]:
    """D12: how the allocator of the device takes memory, and whether the kernel allows enough mappings."""
    installed = system.torch
    if installed is not None and installed.accelerator == "cuda":
        if has_expandable_segments(system.environ):
            yield ok("the allocator of the device has expandable segments")
        else:
            found = "the allocator of the device has no expandable segments"
            yield note(f"{found}, {MEASURED_OF_THEM}", f"export {EXPANDABLE_SEGMENTS}")
    maps = system.text("proc/sys/vm/max_map_count")
    if not maps.isdecimal():
        yield unknown("the system does not tell how many mappings a process may have")
    elif int(maps) < LEAST_MAPS:
        yield bad(
            f"a process may have {maps} mappings, fewer than Linux allows by default",
            f"sysctl -w vm.max_map_count={LEAST_MAPS}",
        )
    else:
        yield ok(f"a process may have {maps} mappings")
