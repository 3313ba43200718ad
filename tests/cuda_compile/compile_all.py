"""Compile steps of four models for two GPUs without having one: torch's CUDA build over a device that does nothing.

python -m tests.cuda_compile.compile_all       # by the Python of a CUDA build of torch; `make cuda-compile`
python -m tests.cuda_compile.compile_all gpt2 llama --capability 90

For each model and GPU one process trains three steps without a budget and three by torch's own Inductor, and another
three in a tight budget. What is checked:

    no error                    of Inductor, Triton, ptxas, the wrappers or this package
    machine code                every kernel was compiled down to the GPU asked for
    the same kernels            a step that moves nothing has as many kernels as torch's
    budgets                     what the allocator was asked for, in every step, the first included, which times kernels
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parent
MODELS = ("gpt2", "llama", "qwen3", "vit")
CAPABILITIES = ("90", "89")
AT_MOST_S = 900
E_FLAGS = 48
"""Where the header of an ELF file has its flags; the second byte of those of a cubin is the capability."""
MOST_BELOW_BYTES = 4 << 20
"""Of a plan above what is asked for: torch writes a gradient over a temporary, and a plan counts both."""
ACTS = {"gather", "release", "offload", "prefetch"}


def build(folder: Path) -> Path:
    """Build the device in `folder` under the driver's name, which Triton links with; return its path."""
    path = folder / "libcuda.so.1"
    flags = ("-std=c++17", "-O1", "-fPIC", "-shared", "-Wall", "-Wl,-soname,libcuda.so.1")
    compiler = os.environ.get("CXX", "c++")
    subprocess.run([compiler, *flags, "-o", path, FOLDER / "idle_device.cpp"], check=True)
    (folder / "libcuda.so").symlink_to(path.name)
    return path


def compiled(model: str, capability: str, device: Path) -> dict[str, Any]:
    """Return what was compiled for `model`, or its error, and the seconds that it took.

    The step in a tight budget is compiled in a process and with caches of its own: else timings of kernels that the
    step without a budget made would serve it, and the bytes that they take.
    """
    began_s = time.perf_counter()
    row: dict[str, Any] = {"model": model, "capability": capability, "code": Counter()}
    with tempfile.TemporaryDirectory() as name:
        for budget in ("", "tight_bytes"):
            folder = Path(name, budget or "free")
            command = [
                sys.executable,
                "-m",
                "tests.cuda_compile.compiled",
                model,
                *([str(row[budget])] if budget else []),
            ]
            done = subprocess.run(
                command,
                env={**os.environ, **set_for(capability, device, folder)},
                capture_output=True,
                text=True,
                timeout=AT_MOST_S,
                check=False,
            )
            lines = done.stdout.splitlines()
            row |= json.loads(lines[-1]) if done.returncode == 0 and lines else {"error": done.stderr[-6000:]}
            if "error" in row:
                break
            row["code"].update(machine_code(folder))
    return {**row, "took_s": round(time.perf_counter() - began_s)}


def set_for(capability: str, device: Path, folder: Path) -> Mapping[str, str]:
    """Return the environment of a process that compiles for `capability` over the library `device`, with new caches in
    `folder`."""
    return {
        "LD_PRELOAD": str(device),
        "TRITON_LIBCUDA_PATH": str(device.parent),
        "IDLE_DEVICE_CAPABILITY": capability,
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "ELIXIR_CACHE_DIR": str(folder / "elixir"),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def machine_code(folder: Path) -> dict[str, int]:
    """Return the number of files of machine code under `folder`, by what they are for, and of those that use a stack:
    for values without a register, or for sines of any angle."""
    import triton.backends.nvidia

    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    counts: Counter[str] = Counter()
    for path in folder.rglob("*.cubin"):
        said = subprocess.run([tool, "--dump-resource-usage", path], capture_output=True, text=True, check=True).stdout
        counts[f"sm_{path.read_bytes()[E_FLAGS + 1]}"] += 1
        counts["stack"] += " LOCAL:0 " not in said or " STACK:0 " not in said
    return counts


def faults(row: Mapping[str, Any]) -> Sequence[str]:
    """Return what is wrong with the compilation of `row`."""
    if "error" in row:
        return [row["error"]]
    found = []
    others = set(row["code"]) - {f"sm_{row['capability']}", "stack"}
    if others or not row["code"]:
        found.append(f"machine code for {row['code']}")
    free, tight, torchs = row["free"], row["tight"], row["torch"]
    if free["kernels"] != torchs["kernels"]:
        found.append(f"{free['kernels']} kernels, where torch has {torchs['kernels']}")
    if not ACTS & set(tight["verbs"]) or tight["regions"] <= free["regions"]:
        found.append(f"the tight plan moves nothing: {tight['verbs']}")
    for name, own in (("free", free), ("tight", tight)):
        over = [number for number, nbytes in enumerate(own["step_bytes"]) if nbytes > own["budget_bytes"]]
        if over:
            found.append(f"{name}: steps {over} of {own['step_bytes']} exceed {own['budget_bytes']} bytes")
        apart_bytes = own["planned_bytes"] - own["step_bytes"][-1]
        if not 0 <= apart_bytes <= MOST_BELOW_BYTES:
            found.append(
                f"{name}: planned {own['planned_bytes']} bytes, {apart_bytes} more than the last step asked for"
            )
    return found


def line(row: Mapping[str, Any]) -> str:
    """Return the line of the table for `row`."""
    head = f"{row['model']:7} sm_{row['capability']}  {row['took_s']:4} s"
    if "error" in row:
        return head + "  " + row["error"].strip().splitlines()[-1][:160]
    free, tight, torchs, code = (row[name] for name in ("free", "tight", "torch", "code"))
    mib = [own / 2**20 for own in (tight["budget_bytes"], tight["planned_bytes"], *tight["step_bytes"])]
    return (
        f"{head}  kernels {torchs['kernels']:3} {free['kernels']:3} {tight['kernels']:3}  regions {tight['regions']:2}"
        f"  files {sum(code.values()) - code['stack']:3}, with a stack {code['stack']:2}"
        f"  MiB {' '.join(f'{each:6.1f}' for each in mib)}"
    )


def main() -> int:
    """Compile all, print a table, and return the number of compilations with a fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--capability", action="append", choices=CAPABILITIES)
    parser.add_argument("--workers", type=int, default=2)
    asked = parser.parse_args()
    if torch.version.cuda is None or shutil.which(os.environ.get("CXX", "c++")) is None:
        print(f"skipped: torch {torch.__version__} was not built for CUDA, or there is no C++ compiler")
        return 0
    print("kernels: of torch, without a budget, in a tight one; MiB of that: budget, plan, each step")
    pairs = [(model, capability) for capability in asked.capability or CAPABILITIES for model in asked.models]
    num_faulty = 0
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(asked.workers) as threads:
        device = build(Path(name))
        for row in threads.map(lambda pair: compiled(*pair, device), pairs):
            found = faults(row)
            num_faulty += bool(found)
            print(line(row), *(f"\n    {fault}" for fault in found), flush=True)
    return num_faulty


if __name__ == "__main__":
    sys.exit(main())
