"""The table of all checks, and the diagnosis of a machine."""

from collections.abc import Iterator

from elixir_compile.tools.doctor.device import check_allocators, check_copies, check_gpu
from elixir_compile.tools.doctor.host import check_control_groups, check_huge_pages, check_memory_nodes, check_pinning
from elixir_compile.tools.doctor.software import (
    check_backend,
    check_build,
    check_compilers,
    check_driver,
    check_versions,
)
from elixir_compile.tools.doctor.training import check_caches, check_disk, check_ranks
from elixir_compile.tools.doctor.values import Check, Diagnosis, System, unknown

CHECKS = (
    Check(code="D01", title="versions", run=check_versions),
    Check(code="D02", title="build of torch", run=check_build),
    Check(code="D03", title="driver", run=check_driver),
    Check(code="D04", title="backend", run=check_backend),
    Check(code="D05", title="compilers", run=check_compilers),
    Check(code="D06", title="pinned memory", run=check_pinning),
    Check(code="D07", title="limits", run=check_control_groups),
    Check(code="D08", title="memory nodes", run=check_memory_nodes),
    Check(code="D09", title="huge pages", run=check_huge_pages),
    Check(code="D10", title="GPU", run=check_gpu),
    Check(code="D11", title="copies", run=check_copies),
    Check(code="D12", title="allocators", run=check_allocators),
    Check(code="D13", title="disk", run=check_disk),
    Check(code="D14", title="caches", run=check_caches),
    Check(code="D15", title="ranks", run=check_ranks),
)


def diagnose(system: System) -> tuple[Diagnosis, ...]:
    """Return the findings of all checks that apply to `system`, in the order of their codes."""
    return tuple(found for check in CHECKS for found in _diagnoses(check, system))


def _diagnoses(check: Check, system: System) -> Iterator[Diagnosis]:
    try:
        findings = list(check.run(system))
    except (OSError, ValueError) as error:  # files of the system in an unknown form
        findings = [unknown(f"the check failed: {type(error).__name__}: {error}")]
    for found in findings:
        yield Diagnosis(code=check.code, title=check.title, verdict=found.verdict, found=found.found, fix=found.fix)
