"""The values of a diagnosis: facts about the system for the checks, findings, and verdicts."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from elixir_compile.base.control_groups import quota_cores, text_of


class Verdict(StrEnum):
    """The meaning of a finding for training."""

    OK = "ok"
    NOTE = "note"
    """Training works; it may be slower, or another setting may be meant."""
    BAD = "bad"
    """Training fails or is much slower."""
    UNKNOWN = "unknown"
    """The system does not tell, or torch is missing."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A fact found by a check, and a line for the shell that repairs or explains it; the line may be empty."""

    verdict: Verdict
    found: str
    fix: str = ""


def ok(found: str) -> Finding:
    """Return a finding with nothing to repair."""
    return Finding(Verdict.OK, found)


def note(found: str, fix: str = "") -> Finding:
    """Return a finding about a fact that training survives."""
    return Finding(Verdict.NOTE, found, fix)


def bad(found: str, fix: str) -> Finding:
    """Return a finding about a fault, with the line that repairs or explains it."""
    return Finding(Verdict.BAD, found, fix)


def unknown(found: str, fix: str = "") -> Finding:
    """Return a finding about a fact that the system does not tell."""
    return Finding(Verdict.UNKNOWN, found, fix)


@dataclass(frozen=True, slots=True, kw_only=True)
class Torch:
    """The imported torch, with the devices and libraries that it can use here."""

    version: str
    cuda: str | None
    """The version of CUDA that torch was built for; None for a build for CPUs or for ROCm."""
    rocm: str | None
    accelerator: str | None
    """The type of the accelerators with memory of their own, such as `cuda`; None if torch sees no such device."""
    num_accelerators: int
    num_threads: int
    """Threads of one op on the CPU."""
    has_gloo: bool
    has_nccl: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinning:
    """The result of page-locking host memory for the accelerator."""

    pinned_bytes: int
    """The most bytes that were locked at once."""
    refused_bytes: int | None
    """The bytes that the driver refused to lock; None if it refused none."""
    lock_limit_bytes: int | None
    """`RLIMIT_MEMLOCK` of this process; None without a limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuState:
    """The state of a GPU by NVML while a copy to it runs. None stands for a figure that the GPU does not support."""

    link: tuple[int, int] | None
    """Generation and number of lanes of the PCIe link."""
    most_link: tuple[int, int] | None
    """The highest generation and number of lanes that the GPU and its slot support."""
    slowed_by: tuple[str, ...]
    """Reasons for lower clocks that come from heat or from the power supply."""
    capped_by: tuple[str, ...]
    """Reasons for lower clocks that somebody has set."""
    is_mig: bool
    others_bytes: int | None
    """Bytes that other processes hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyRates:
    """The rates of copies of 64 MiB."""

    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    pageable_bytes_per_s: float
    """From the host to the device, out of memory that is not page-locked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """The current accelerator of this process."""

    name: str
    address: str | None
    """The address on the PCI bus, `0000:17:00.0`; None if torch tells of none."""
    pinning: Pinning | None
    """None if no copy is faster from page-locked memory."""
    state: GpuState | str
    """A text says why NVML tells nothing."""
    copies: CopyRates


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The profile by `elixir-compile measure` that plans on this machine use."""

    path: Path
    """The file for this device, these cores, this torch and its number of threads."""
    is_measured: bool
    """Whether the file exists and can be read."""
    num_others: int
    """Measured profiles for another device, torch, or number of cores or threads."""
    h2d_bytes_per_s: float | None
    d2h_bytes_per_s: float | None
    has_disk: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskTrial:
    """The result of writing a file to a disk and reading it."""

    path: Path
    error: str
    """Why the files could not be written or read; empty if they were."""
    fix: str = ""
    """A line for the shell after an error."""
    is_direct: bool = False
    """Whether the filesystem accepts O_DIRECT."""
    free_bytes: int = 0
    write_bytes_per_s: float = 0.0
    read_bytes_per_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """Facts for the checks: files below `root`, the environment, this process, its torch and its accelerator."""

    root: Path
    """`/`, or a folder with made-up `proc`, `sys` and `dev`."""
    environ: Mapping[str, str]
    python: tuple[int, int]
    include: Path
    """The folder in which the compiler looks for `Python.h`."""
    cores: frozenset[int]
    """The cores allowed by the affinity of this process."""
    shm_bytes: int | None
    """The size of `/dev/shm`; None if there is none."""
    caches: Mapping[str, Path]
    """Folders of caches, which need not exist, by the variables that name others."""
    backend: str
    """The entry point that is registered as the backend `elixir`; empty if there is none."""
    torch: Torch | None
    torch_error: str
    """Why torch cannot be imported; empty if `torch` is set."""
    accelerator: Accelerator | None
    profile: Profile | None
    disk: DiskTrial | None
    """None if no folder was named."""

    def text(self, path: str) -> str:
        """Return the text of the file `path` below the root, without a space at its ends; empty if it is unreadable."""
        return text_of(self.root / path)

    def number(self, variable: str) -> int | None:
        """Return the number in a variable of the environment; None if it is not set, or no number."""
        text = self.environ.get(variable, "").strip()
        return int(text) if text.isdecimal() else None

    @property
    def group_paths(self) -> tuple[Path, Path]:
        """The file of this process's control groups and the folder of all groups, as `group_folders` takes them."""
        return self.root / "proc/self/cgroup", self.root / "sys/fs/cgroup"

    @property
    def num_usable_cores(self) -> int:
        """The number of cores that this process can keep busy, by its affinity and its CPU quota."""
        quota = quota_cores(*self.group_paths)
        return len(self.cores) if quota is None else max(min(len(self.cores), int(quota)), 1)

    @property
    def is_container(self) -> bool:
        """Whether this process runs in a container of Docker, Podman or Kubernetes."""
        marks = (self.root / ".dockerenv", self.root / "run/.containerenv")
        return "KUBERNETES_SERVICE_HOST" in self.environ or any(mark.exists() for mark in marks)

    @property
    def is_wsl(self) -> bool:
        """Whether this is the Windows Subsystem for Linux."""
        return "microsoft" in self.text("proc/sys/kernel/osrelease").lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A check by its code; `run` yields nothing if the check does not apply to this machine."""

    code: str
    title: str
    run: Callable[[System], Iterable[Finding]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """A finding with the code and the title of its check."""

    code: str
    title: str
    verdict: Verdict
    found: str
    fix: str
