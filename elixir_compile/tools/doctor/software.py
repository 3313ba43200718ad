"""Checks D01 to D05: Python, torch, the driver, the backend, compilers."""

import importlib.util
import re
import shlex
import shutil
from collections.abc import Iterator

from elixir_compile.base.control_groups import text_of
from elixir_compile.tools.doctor.values import Finding, System, Torch, bad, note, ok, unknown

OLDEST_PYTHON = (3, 11)
TORCH_VERSIONS = ((2, 11), (2, 13))
"""The oldest and the newest torch that the tests ran with."""
BACKEND = "elixir_compile.session.backend:elixir"

_OLDEST_DRIVERS = {11: 450, 12: 525, 13: 580}
"""By major version of CUDA, the oldest driver: NVIDIA's "CUDA Compatibility", minor version compatibility."""
_NVIDIA_VENDOR = "0x10de"
_DISPLAY_CLASS = "0x03"


def check_versions(system: System) -> Iterator[Finding]:
    """D01: Python and torch are in the tested range."""
    python = ".".join(map(str, system.python))
    if system.python < OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        yield bad(f"Python {python} is older than {oldest}", f"apt install python{oldest} python{oldest}-venv")
    else:
        yield ok(f"Python {python}")
    oldest, newest = (".".join(map(str, version)) for version in TORCH_VERSIONS)
    install = f'pip install "torch>={oldest},<{TORCH_VERSIONS[1][0]}.{TORCH_VERSIONS[1][1] + 1}"'
    if system.torch is None:
        yield bad(f"torch cannot be imported: {system.torch_error}", install)
        return
    version = system.torch.version
    numbers = _first_numbers(version)
    if numbers is None:
        yield unknown(f"torch {version} has an unknown version; tested are {oldest} to {newest}")
    elif numbers < TORCH_VERSIONS[0]:
        yield bad(f"torch {version} is older than {oldest}", install)
    elif numbers > TORCH_VERSIONS[1]:
        yield note(f"torch {version} is newer than {newest}, the newest that was tested", install)
    else:
        yield ok(f"torch {version}")


def _first_numbers(version: str) -> tuple[int, int] | None:
    found = re.match(r"(\d+)\.(\d+)", version)
    return None if found is None else (int(found[1]), int(found[2]))


def check_build(system: System) -> Iterator[Finding]:
    """D02: torch uses the GPU of this machine."""
    installed = system.torch
    if installed is None:
        return
    driver = driver_version(system)
    if installed.accelerator is not None:
        yield ok(f"torch sees {installed.num_accelerators} x {installed.accelerator}")
    elif (system.root / "dev/nvidiactl").exists():
        yield _unseen_gpu(system, installed, f"the machine has a GPU with driver {driver or 'of unknown version'}")
    elif driver is not None:
        found = f"the driver {driver} of NVIDIA is loaded, but this process has no device file of a GPU"
        yield note(found, "docker run --gpus all" if system.is_container else "nvidia-modprobe -u -c 0")
    elif _is_gpu_on_bus(system):
        yield note("there is a GPU of NVIDIA on the PCI bus, but no driver is loaded", "apt install nvidia-driver-580")
    else:
        yield ok("no GPU of NVIDIA: training runs on the CPU")


def install_for_cuda(installed: Torch) -> str:
    """Return the line that installs the same version of torch built for CUDA, as it is on PyPI for Linux."""
    version = installed.version.partition("+")[0]
    return f"pip install --force-reinstall --index-url https://pypi.org/simple torch=={version}"


def _unseen_gpu(system: System, installed: Torch, gpu: str) -> Finding:
    if installed.cuda is None and installed.rocm is None:
        return bad(f"torch is a build for CPUs, but {gpu}", install_for_cuda(installed))
    if system.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return note(f"CUDA_VISIBLE_DEVICES hides every GPU, but {gpu}", "unset CUDA_VISIBLE_DEVICES")
    return bad(f"torch sees no GPU, but {gpu}", 'python -c "import torch; torch.cuda.init()"')


def _is_gpu_on_bus(system: System) -> bool:
    return any(
        text_of(device / "vendor") == _NVIDIA_VENDOR and text_of(device / "class").startswith(_DISPLAY_CLASS)
        for device in (system.root / "sys/bus/pci/devices").glob("*")
    )


def driver_version(system: System) -> str | None:
    """Return the version of NVIDIA's kernel driver, such as `580.95.05`; None if no driver is loaded."""
    found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", system.text("proc/driver/nvidia/version"))
    return None if found is None else found[0]


def check_driver(system: System) -> Iterator[Finding]:
    """D03: the driver is new enough for the CUDA that torch was built for."""
    installed = system.torch
    if installed is None or installed.cuda is None:
        return
    driver = driver_version(system)
    if driver is None:
        if installed.accelerator is not None:
            yield unknown(
                f"torch is built for CUDA {installed.cuda}; the system does not tell the version of the driver"
            )
        return
    cuda = int(installed.cuda.partition(".")[0])
    oldest = _OLDEST_DRIVERS.get(cuda)
    if oldest is None:
        yield unknown(
            f"driver {driver}, torch built for CUDA {installed.cuda}: which driver it needs is not known here"
        )
    elif int(driver.partition(".")[0]) < oldest:
        found = f"driver {driver} is older than {oldest}, which torch built for CUDA {installed.cuda} needs"
        yield bad(found, f"apt install nvidia-driver-{oldest}")
    else:
        yield ok(f"driver {driver}, torch built for CUDA {installed.cuda}")


def check_backend(system: System) -> Iterator[Finding]:
    """D04: `torch.compile(backend="elixir")` finds this package.

    Torch lists the same entry points in `torch.compiler.list_backends()`, but takes a second to import its compilers.
    """
    reinstall = "pip install --force-reinstall --no-deps elixir-compile"
    if not system.backend:
        yield bad('no installed package registers the backend "elixir"', reinstall)
    elif system.backend != BACKEND:
        yield bad(f'the backend "elixir" is {system.backend}, not {BACKEND}', reinstall)
    else:
        yield ok('the backend "elixir" is registered')


def check_compilers(system: System) -> Iterator[Finding]:
    """D05: the compilers and headers that Inductor, Triton and host passes need are installed."""
    cxx = shlex.split(system.environ.get("CXX", "")) or ["g++"]
    cc = shlex.split(system.environ.get("CC", ""))
    header = system.include / "Python.h"
    if _program(system, cxx[0]) is None:
        yield bad(f"no C++ compiler, which Inductor needs: {cxx[0]} is not installed", "apt install g++ python3-dev")
    else:
        yield ok(f"C++ compiler {cxx[0]}")
    if not any(_program(system, name) for name in ([cc[0]] if cc else ["cc", "gcc", "clang"])):
        missing = cc[0] if cc else "cc, gcc or clang"
        yield note(
            f"no C compiler, so host updates run on torch's slower ops: {missing} is not installed", "apt install gcc"
        )
    if not header.is_file():
        version = ".".join(map(str, system.python))
        yield bad(f"no {header}, which Inductor compiles with", f"apt install python{version}-dev")
    installed = system.torch
    is_on_cuda = installed is not None and installed.cuda is not None and installed.accelerator is not None
    if is_on_cuda and importlib.util.find_spec("triton") is None:
        yield bad("triton, with which Inductor compiles for the GPU, is not installed", "pip install triton")


def _program(system: System, name: str) -> str | None:
    return shutil.which(name, path=system.environ.get("PATH"))
