"""The machine and the versions behind a figure, and the folder of results."""

import json
import platform
import subprocess
from pathlib import Path

import psutil
import torch

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, object]:
    """Return the facts that a reader needs to compare figures: processor, cores, memory, versions, commit."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "processor": torch.cuda.get_device_name() if torch.cuda.is_available() else _cpu_name(),
        "cores": psutil.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit.stdout.strip() or "unknown",
    }


def save(name: str, figures: dict[str, object]) -> Path:
    """Write `figures` with the machine to `results/<name>.json` and return the path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": machine(), **figures}, indent=2) + "\n", encoding="utf-8")
    return path


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
