"""Build the stand-in for NVIDIA's libraries with the system's C++ compiler, once per source and version of torch.

The CUDA build of torch, with NVIDIA's own libraries beside it, is loaded as on any machine. The loader finds the
functions of `libstandin.so` before theirs, because `LD_PRELOAD` names it. What torch calls and the stand-in lacks is
refused by name: `nm` lists the names.
"""

import hashlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
_FOLDER = ROOT / "build" / "cuda_standin"
# Without debug information and with few optimizations, because compiling takes longer than running here.
_FLAGS = ("-std=c++20", "-O1", "-g0", "-w", "-shared", "-fPIC", "-DNDEBUG")
_MACHINE = ("machine.cpp", "memory.cpp", "runtime.cpp", "clock.cpp", "nccl.cpp")
_ARITHMETIC = ("arithmetic.cpp", "attention.cpp")
_REFUSALS = {
    r"cudnn\w+": 3000, r"cublas\w+": 15, r"nccl\w+": 3, r"cufft\w+": 16, r"curand\w+": 203, r"cusolver\w+": 9,
    r"cusparse\w+": 10, r"cupti\w+": 999, r"cu(da)?[A-Z]\w+": 801,
}  # fmt: skip
"""What the functions of a library return that are not supported there; the first pattern that fits counts."""

_LOAD = """\
import os
from pathlib import Path


def load():
    import torch

    torch.ops.load_library(str(Path(__file__).with_name("libarithmetic.so")))
    # NVML, which torch asks where the runtime would make forks of this process useless, is not there.
    torch.cuda._raw_device_count_nvml = lambda: int(os.environ.get("CUDA_STANDIN_DEVICES", "2"))
"""


def _torch() -> Path:
    """Return the folder of torch, without importing it: that would load NVIDIA's libraries."""
    import importlib.util

    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise RuntimeError("there is no torch in this environment")
    return Path(found.origin).parent


def missing() -> str:
    """Return why this environment has no CUDA build of torch to stand in for; empty if it has."""
    torch = _torch()
    if not (torch / "lib" / "libtorch_cuda.so").exists():
        return f"{torch} is not a CUDA build of torch"
    needed = (
        _headers(torch) / "cuda_runtime_api.h",
        _crt_headers(torch) / "crt" / "host_defines.h",
        _nccl_headers(torch) / "nccl.h",
    )
    return "".join(f"there is no {path}" for path in needed if not path.exists())


def _headers(torch: Path) -> Path:
    return torch.parent / "nvidia" / "cu13" / "include"


def _crt_headers(torch: Path) -> Path:
    """Return where `crt/host_defines.h` is, which NVIDIA's packages for running programs lack."""
    return torch.parent / "triton" / "backends" / "nvidia" / "include"


def _nccl_headers(torch: Path) -> Path:
    return torch.parent / "nvidia" / "nccl" / "include"


def _refused(torch: Path, defined: str) -> str:
    """Return the source of a function for each name of NVIDIA's that torch calls and `defined` does not define."""
    libraries = map(str, sorted((torch / "lib").glob("*.so")))
    listed = subprocess.run(["nm", "-D", "--undefined-only", *libraries], capture_output=True, text=True, check=True)
    names = sorted(set(re.findall(r" U (\w+)", listed.stdout)))
    lines = ['extern "C" int standin_refuse(const char*, int);']
    for name in names:
        error = next((error for pattern, error in _REFUSALS.items() if re.fullmatch(pattern, name)), None)
        if error is None or re.search(rf"\b{name}\(", defined):
            continue
        if name.endswith(("ErrorString", "StatusString", "LastError")):
            lines.append(f'extern "C" const char* {name}(...) {{ return "an error of the CUDA stand-in"; }}')
        else:
            lines.append(f'extern "C" int {name}(...) {{ return standin_refuse("{name}", {error}); }}')
    return "\n".join(lines) + "\n"


def _compile(command: Sequence[str], path: Path) -> None:
    done = subprocess.run(
        [os.environ.get("CXX", "c++"), *command, "-o", str(path)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{path.name} does not compile:\n{done.stderr[-4000:]}")


def _build(torch: Path, folder: Path) -> None:
    """Write the libraries, and what makes `import torch` load the arithmetic, to `folder`."""
    headers = [
        f"-I{folder}" for folder in (_headers(torch), _crt_headers(torch), _nccl_headers(torch), torch / "include")
    ]
    sources = [HERE / name for name in _MACHINE]
    refused = folder / "refused.cpp"
    refused.write_text(_refused(torch, "".join(source.read_text() for source in sources)))
    _compile(
        [*_FLAGS, *headers, *map(str, sources), str(refused), "-ldl", "-Wl,-soname,libstandin.so"],
        folder / "libstandin.so",
    )
    # The driver is looked for by the name of its library.
    empty = folder / "driver.cpp"
    empty.write_text("")
    driver = ["-shared", "-fPIC", str(empty), f"-L{folder}", "-Wl,--no-as-needed", "-lstandin", "-Wl,-rpath,$ORIGIN"]
    _compile([*driver, "-Wl,-soname,libcuda.so.1"], folder / "libcuda.so.1")
    includes = [f"-I{torch / 'include' / 'torch' / 'csrc' / 'api' / 'include'}", *headers]
    linked = [f"-L{torch / 'lib'}", "-lc10", "-lc10_cuda", "-ltorch_cpu", "-ltorch_cuda", f"-Wl,-rpath,{torch / 'lib'}"]
    arithmetic = [str(HERE / name) for name in _ARITHMETIC]
    _compile([*_FLAGS, *includes, *arithmetic, *linked, "-Wl,--allow-shlib-undefined"], folder / "libarithmetic.so")
    # torch loads what is registered as a backend at the end of its import, in every process.
    installed = folder / "cuda_standin.egg-info"
    installed.mkdir()
    (installed / "entry_points.txt").write_text("[torch.backends]\ncuda_standin = cuda_standin_arithmetic:load\n")
    (installed / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: cuda-standin\nVersion: 0\n")
    (folder / "cuda_standin_arithmetic.py").write_text(_LOAD)


def library() -> Path:
    """Return the folder of the stand-in; build it if it is not there. Raises RuntimeError if that fails."""
    torch = _torch()
    sources = sorted(HERE.glob("*.cpp")) + sorted(HERE.glob("*.h")) + [Path(__file__)]
    key = hashlib.sha256(repr((str(torch), (torch / "version.py").read_bytes())).encode())
    for source in sources:
        key.update(source.read_bytes())
    path = _FOLDER / key.hexdigest()[:16]
    if not path.exists():
        _FOLDER.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_FOLDER) as parent:  # two processes may build at the same time
            made = Path(parent) / "made"
            made.mkdir()
            _build(torch, made)
            try:
                made.rename(path)
            except OSError:
                if not path.exists():
                    raise
    return path


def environment(folder: Path) -> Mapping[str, str]:
    """Return the variables of a process, and of all that it starts, in which torch has the devices of the stand-in."""
    paths = [str(folder), str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        **os.environ,
        "LD_PRELOAD": f"{folder / 'libstandin.so'}:{folder / 'libcuda.so.1'}",
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
    }


def main(arguments: Sequence[str]) -> None:
    """Run Python with `arguments` in this process, on the stand-in."""
    why = missing()
    if why:
        sys.exit(f"no CUDA stand-in: {why}. `make venv TORCH=2.11.0` has one.")
    os.execve(sys.executable, [sys.executable, *arguments], dict(environment(library())))


if __name__ == "__main__":
    main(sys.argv[1:])
