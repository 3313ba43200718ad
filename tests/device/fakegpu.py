"""The device type `fakegpu`: `device.cpp`, built once, and two devices on host memory, whose copies run late."""

import ctypes
import functools
import hashlib
import os
import subprocess
import tempfile
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from elixir_compile.compat.platforms.platform import AcceleratorPlatform

# ----------------------------------------------------------------------------------------------------------------------
# Build `device.cpp` with the system's C++ compiler, once per source, version of torch and compiler.
#
# torch's own `cpp_extension` takes three times as long, because it includes all of torch's headers and Python's.


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


# ----------------------------------------------------------------------------------------------------------------------
# Add the device type `fakegpu` to this process: two devices on host memory, whose copies run late.
#
# `start` changes torch for the whole process (it has an accelerator from then on), so tests run it in a process of its
# own: `on_device.py` has the command.


NAME = "fakegpu"
NUM_DEVICES = 2
MEMORY_BYTES = 8 << 30
EARLY, LATE, RANDOM = range(3)
"""When asynchronous copies run: at once, when a wait forces them, or at random moments between."""


@functools.cache
def start() -> ctypes.CDLL:
    """Register the device type with torch, once, and return its library."""
    lib = ctypes.CDLL(str(library()))
    for name, arguments, result in (
        ("device_set_policy", [ctypes.c_int, ctypes.c_uint64], None),
        ("device_pin", [ctypes.c_void_p, ctypes.c_size_t], None),
        ("device_unpin", [ctypes.c_void_p], None),
        ("device_set_capacity", [ctypes.c_int, ctypes.c_size_t], None),
        ("device_num_pending", [], ctypes.c_int64),
        ("device_num_async_copies", [], ctypes.c_int64),
        ("device_keep_history", [ctypes.c_int], None),
        ("device_history", [ctypes.c_void_p, ctypes.c_int64], ctypes.c_int64),
        ("device_blocks", [ctypes.c_void_p, ctypes.c_int64], ctypes.c_int64),
    ):
        getattr(lib, name).argtypes, getattr(lib, name).restype = arguments, result
    lib.device_start()
    for device in range(NUM_DEVICES):
        lib.device_set_capacity(device, MEMORY_BYTES)
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module())
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    AcceleratorPlatform.pin = _pin
    return lib


def _pin(platform: AcceleratorPlatform, address: int, nbytes: int) -> Callable[[int], object]:
    """Page-lock slabs, as the platform of CUDA does, so that their copies are late."""
    start().device_pin(address, nbytes)
    return start().device_unpin


@contextmanager
def policy(kind: int, seed: int = 0) -> Iterator[None]:
    """Run asynchronous copies by `kind` in the block, and at once after it."""
    start().device_set_policy(kind, seed)
    try:
        yield
    finally:
        start().device_set_policy(EARLY, 0)


@contextmanager
def capacity(nbytes: int, device: int = 0) -> Iterator[None]:
    """Let the device have `nbytes` of memory in the block."""
    start().device_set_capacity(device, nbytes)
    try:
        yield
    finally:
        start().device_set_capacity(device, MEMORY_BYTES)


ordered = nullcontext
"""The second device type does not look for races."""


def num_pending() -> int:
    """Return how many copies, waits and events wait in queues."""
    return start().device_num_pending()


def num_async_copies() -> int:
    """Return how many copies between host and device were asynchronous so far."""
    return start().device_num_async_copies()


def _record_memory_history(enabled: str | None = "all", **_: object) -> None:
    """Begin a history of blocks, or end it for None, as the function of `torch.cuda.memory` does."""
    start().device_keep_history(int(enabled is not None))


def _rows(write: Callable[[object, int], int], width: int, most: int) -> list[list[int]]:
    """Return what `write` writes of a table of `width` columns and at most `most` rows."""
    room = (ctypes.c_int64 * (width * most))()
    count = write(room, most)
    assert count <= most, f"{count} rows, room for {most}"
    return [list(room[place : place + width]) for place in range(0, width * count, width)]


_MOST_BLOCKS = 1 << 16


def _snapshot(device: object = None) -> dict[str, list[Any]]:
    """Return blocks and their history in the form of `torch.cuda.memory._snapshot`."""
    blocks = _rows(start().device_blocks, 3, _MOST_BLOCKS)
    traces: list[list[dict[str, object]]] = [[] for _ in range(NUM_DEVICES)]
    for action, index, address, nbytes, time_us in _rows(
        start().device_history, 5, start().device_history(None, 0) + _MOST_BLOCKS
    ):
        for name in (("alloc",), ("free_requested", "free_completed"), ("snapshot",))[action]:
            traces[index].append({"action": name, "addr": address, "size": nbytes, "time_us": time_us})
    return {
        "segments": [
            {
                "device": index,
                "blocks": [{"address": address, "requested_size": nbytes, "state": "active_allocated"}],
            }
            for index, address, nbytes in blocks
        ],
        "device_traces": traces,
    }


def _module() -> types.ModuleType:
    """Return what torch looks for at `torch.fakegpu`. Ops draw random numbers from the CPU's generator."""
    module = types.ModuleType(f"torch.{NAME}")
    for name, value in {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": lambda: None,
        "device_count": lambda: NUM_DEVICES,
        "current_device": torch.accelerator.current_device_index,
        "set_device": torch.accelerator.set_device_index,
        "current_stream": torch.accelerator.current_stream,
        "synchronize": torch.accelerator.synchronize,
        "Stream": torch.Stream,
        "Event": torch.Event,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "get_rng_state_all": lambda: [torch.get_rng_state()] * NUM_DEVICES,
        "set_rng_state": lambda state, device=None: None,
        "get_device_name": lambda device=None: NAME,
        "get_device_properties": lambda device=None: types.SimpleNamespace(total_memory=MEMORY_BYTES),
        "mem_get_info": torch.accelerator.get_memory_info,
        "memory_allocated": torch.accelerator.memory_allocated,
        "memory_reserved": torch.accelerator.memory_reserved,
        "memory_stats": torch.accelerator.memory_stats,
        "max_memory_allocated": torch.accelerator.max_memory_allocated,
        "reset_peak_memory_stats": torch.accelerator.reset_peak_memory_stats,
        "empty_cache": torch.accelerator.empty_cache,
        "memory": types.SimpleNamespace(_record_memory_history=_record_memory_history, _snapshot=_snapshot),
    }.items():
        setattr(module, name, value)
    return module
