"""Gather the facts about this process, its torch, its accelerator and its disk for the checks."""

import importlib
import os
import sys
import sysconfig
import tempfile
from importlib.metadata import entry_points
from pathlib import Path

from elixir_compile.base.control_groups import allowed_cores
from elixir_compile.base.folders import cache_dir
from elixir_compile.tools.doctor.values import System, Torch


def this_system(disk_path: Path | None = None, root: Path = Path("/")) -> System:
    """Return the facts about this machine; `disk_path` is a folder whose disk is tried, or None.

    Imports torch if it is installed. On a machine with an accelerator, pins host memory and copies 64 MiB for about a
    second. Files of the system are read below `root`.
    """
    torch, torch_error = _torch_here()
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
        shm_bytes=_size_bytes(root / "dev/shm"),
        caches={
            "ELIXIR_CACHE_DIR": cache_dir(),
            "TORCHINDUCTOR_CACHE_DIR": Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or tempfile.gettempdir()),
        },
        backend=_registered_backend(),
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


def _registered_backend() -> str:
    found = [entry.value for entry in entry_points(group="torch_dynamo_backends") if entry.name == "elixir"]
    return found[0] if found else ""


def _size_bytes(folder: Path) -> int | None:
    """Return the bytes of the filesystem of `folder`, free or not; None if there is no such folder."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_frsize * found.f_blocks
