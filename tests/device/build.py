"""Build `device.cpp` with the system's C++ compiler, once per source, version of torch and compiler.

torch's own `cpp_extension` takes three times as long, because it includes all of torch's headers and Python's.
"""

import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("device.cpp")
_FOLDER = Path(__file__).parents[2] / "build" / "tests"
# Without debug information and with few optimizations, because compiling takes longer than running here.
_FLAGS = ("-std=c++20", "-O1", "-g0", "-w", "-shared", "-fPIC", "-DNDEBUG")


def library() -> Path:
    """Return the path of the compiled library; compile it if it is not there. Raises RuntimeError if that fails."""
    torch_folder = Path(torch.__file__).parent
    command = [
        os.environ.get("CXX", "c++"),
        *_FLAGS,
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-I{torch_folder / 'include'}",
        f"-I{torch_folder / 'include' / 'torch' / 'csrc' / 'api' / 'include'}",
        str(SOURCE),
        f"-L{torch_folder / 'lib'}",
        "-lc10",
        "-ltorch_cpu",
        f"-Wl,-rpath,{torch_folder / 'lib'}",
    ]
    key = hashlib.sha256(repr((SOURCE.read_bytes(), command, torch.__version__)).encode()).hexdigest()[:16]
    path = _FOLDER / f"device-{key}.so"
    if not path.exists():
        _FOLDER.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_FOLDER) as folder:  # two processes may build at the same time
            made = Path(folder) / path.name
            done = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"{SOURCE} does not compile:\n{done.stderr[-4000:]}")
            os.replace(made, path)
    return path
