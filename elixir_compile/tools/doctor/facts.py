"""The values of a diagnosis, and the facts about this process, its torch, its GPU and its disk that the checks read."""

import importlib
import os
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from elixir_compile.base.folders import cache_dir
from elixir_compile.base.process import allowed_cores, quota_cores, text_of

# ----------------------------------------------------------------------------------------------------------------------
# The values of a diagnosis: facts about the system for the checks, findings, and verdicts.


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


# ----------------------------------------------------------------------------------------------------------------------
# Ask NVML, by the module `pynvml`, for the state of a GPU.


_SLOWED_BY = {
    "nvmlClocksEventReasonSwThermalSlowdown": "heat",
    "nvmlClocksEventReasonHwThermalSlowdown": "heat",
    "nvmlClocksEventReasonHwPowerBrakeSlowdown": "the power supply",
}
_CAPPED_BY = {
    "nvmlClocksEventReasonApplicationsClocksSetting": "application clocks",
    "nvmlClocksEventReasonSwPowerCap": "the power limit",
}


class Gpu:
    """A GPU as NVML knows it. NVML stays initialised until `close`."""

    def __init__(self, nvml: Any, address: str) -> None:
        """Initialise `nvml`, the module `pynvml`; raises its `NVMLError` if it knows no GPU at the PCI `address`."""
        self._nvml = nvml
        nvml.nvmlInit()
        self._handle = nvml.nvmlDeviceGetHandleByPciBusId(address)

    def close(self) -> None:
        """End the use of NVML."""
        self._nvml.nvmlShutdown()

    def used_bytes(self) -> int | None:
        """Return the bytes that processes hold on the GPU; None if it does not tell."""
        # The first version of the call also counts the bytes that the driver reserves for itself.
        found = self._ask("nvmlDeviceGetMemoryInfo", version=self._nvml.nvmlMemory_v2)
        return None if found is None else int(found.used)

    def state(self, others_bytes: int | None) -> GpuState:
        """Return the state now, called while a copy runs, because idle links and idle clocks are slow.

        `others_bytes` are the bytes that other processes hold.
        """
        reasons = int(self._ask("nvmlDeviceGetCurrentClocksEventReasons") or 0)
        mig = self._ask("nvmlDeviceGetMigMode")
        return GpuState(
            link=self._link("Curr"),
            most_link=self._link("Max"),
            slowed_by=self._texts(reasons, _SLOWED_BY),
            capped_by=self._texts(reasons, _CAPPED_BY),
            is_mig=mig is not None and bool(mig[0]),
            others_bytes=others_bytes,
        )

    def _link(self, which: str) -> tuple[int, int] | None:
        """Return generation and lanes of the PCIe link; `which` is `Curr` or `Max`, as in the names of NVML."""
        generation, width = (self._ask(f"nvmlDeviceGet{which}PcieLink{figure}") for figure in ("Generation", "Width"))
        return None if generation is None or width is None else (int(generation), int(width))

    def _texts(self, reasons: int, texts: Mapping[str, str]) -> tuple[str, ...]:
        """Return the text of each reason whose bit is set in `reasons`, each text once."""
        found = (text for name, text in texts.items() if reasons & getattr(self._nvml, name))
        return tuple(dict.fromkeys(found))

    def _ask(self, function: str, **arguments: Any) -> Any:
        """Return the result of a call of NVML; None if the GPU or its driver does not support the question."""
        try:
            return getattr(self._nvml, function)(self._handle, **arguments)
        except self._nvml.NVMLError:
            return None


def gpu_at(address: str) -> Gpu | str:
    """Return the GPU at the PCI `address`, or the reason why NVML does not tell about it."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError as error:
        return f"NVML cannot be asked: {error}"
    try:
        return Gpu(nvml, address)
    except nvml.NVMLError as error:
        return f"NVML does not answer: {error}"


# ----------------------------------------------------------------------------------------------------------------------
# Gather the facts about this process, its torch, its accelerator and its disk for the checks.


def this_system(disk_path: Path | None = None, root: Path = Path("/")) -> System:
    """Return the facts about this machine; `disk_path` is a folder whose disk is tried, or None.

    Imports torch if it is installed. On a machine with an accelerator, pins host memory and copies 64 MiB for about a
    second. Files of the system are read below `root`.
    """
    torch, torch_error = _torch_here()
    try:
        shm = os.statvfs(root / "dev/shm")
    except OSError:
        shm = None
    backends = entry_points(group="torch_dynamo_backends")
    accelerator = profile = disk = None
    if torch is not None:
        trials = importlib.import_module("elixir_compile.tools.doctor.trials")  # it imports torch
        accelerator, profile = trials.try_accelerator(), trials.find_profile()
        disk = None if disk_path is None else trials.try_disk(disk_path.absolute())
    return System(
        root=root,
        environ=dict(os.environ),
        python=sys.version_info[:2],
        include=Path(sysconfig.get_path("include")),
        cores=allowed_cores(),
        shm_bytes=None if shm is None else shm.f_frsize * shm.f_blocks,
        caches={
            "ELIXIR_CACHE_DIR": cache_dir(),
            "TORCHINDUCTOR_CACHE_DIR": Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or tempfile.gettempdir()),
        },
        backend=next((entry.value for entry in backends if entry.name == "elixir"), ""),
        torch=torch,
        torch_error=torch_error,
        accelerator=accelerator,
        profile=profile,
        disk=disk,
    )


def _torch_here() -> tuple[Torch | None, str]:
    """Return the facts about torch and an empty text, or None and the reason why torch cannot be imported."""
    try:
        import torch
        from torch import distributed
    except (ImportError, OSError) as error:  # OSError: a library of CUDA is missing or broken
        return None, str(error)
    from elixir_compile.compat.platforms import accelerator_type, platform_of

    kind = accelerator_type()
    is_distributed = distributed.is_available()
    facts = Torch(
        version=torch.__version__,
        cuda=torch.version.cuda,
        rocm=torch.version.hip,
        accelerator=kind,
        num_accelerators=0 if kind is None else platform_of(torch.device(kind)).num_devices,
        num_threads=torch.get_num_threads(),
        has_gloo=is_distributed and distributed.is_gloo_available(),
        has_nccl=is_distributed and distributed.is_nccl_available(),
    )
    return facts, ""
