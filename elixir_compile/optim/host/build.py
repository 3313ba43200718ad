"""Compile C sources with the system's C compiler at first use, keep the libraries in the cache, and load them.

    $CC | cc | gcc | clang  +  C files  ->  <cache>/host/<hash of source, command, compiler version, CPU>.so

The CPU is in the name because clusters are mixed and share home folders (DeepSpeed #5677: built on one node type, run
on another). Compiling took 1.1 s. Libraries in the cache are executed, so a file is used only if no other user could
have written it.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

from elixir_compile.base.errors import ElixirWarning
from elixir_compile.base.folders import OwnFolder, WrittenByOthersError, cache_dir, own_folder, private_folder

SOURCES = tuple(Path(__file__).with_name(name) for name in ("kernel.c", "moments.c", "lanes.c", "reduced.c"))
"""The files of the host kernel: each uses what those before it define, and all are compiled as one."""
_FLAGS = (
    "-std=gnu99",
    "-O3",
    "-fno-math-errno",
    "-fno-trapping-math",
    # The kernel writes out each fused multiply-add itself.
    "-ffp-contract=off",
    "-shared",
    "-fPIC",
)
_AT_MOST_S = 120.0
_HASH_BYTES = 32


class BuildError(Exception):
    """There is no compiled library; the text says why. Callers warn and use a fallback."""


def loaded_kernel() -> ctypes.CDLL:
    """Return the host kernel, compiled now if the cache has no library for this compiler and CPU.

    Raises BuildError if there is no working compiler, or if the cache cannot be written.
    """
    return loaded(kernel_source())


def kernel_source() -> str:
    """Return the C text of the host kernel."""
    return "".join(path.read_text(encoding="utf-8") for path in SOURCES)


def loaded(source: str) -> ctypes.CDLL:
    """Return the library compiled from the C text `source`, with the flags and the cache of the host kernel.

    If other users than this user and root could have written the cache, the library is compiled for this process alone,
    with a warning. Raises BuildError as `loaded_kernel` does.
    """
    command = build_command()
    name = f"{_key(command, source)}.so"
    path = cache_dir() / "host"
    try:
        with own_folder(path) as folder:
            if not _holds(folder, name):
                folder.write(name, _compiled(command, source))
            return _loaded(folder, name)
    except WrittenByOthersError as error:
        _warn_once(f"{error}. The host kernel is not loaded from there but compiled anew by each process")
    except OSError as error:
        raise BuildError(f"the cache cannot be written ({error}); set ELIXIR_CACHE_DIR to a folder that can") from None
    content = _compiled(command, source)
    with private_folder() as folder:
        folder.write(name, content)
        return _loaded(folder, name)


def build_command() -> list[str]:
    """Return the compiler command with the kernel's flags, without `-o`, the output and the sources.

    Raises BuildError if no compiler is installed.
    """
    asked = shlex.split(os.environ.get("CC", ""))  # it may hold flags
    # Clang on Arm took no -march=native before version 16.
    native = "-march=native" if platform.machine() in ("x86_64", "AMD64", "i686") else "-mcpu=native"
    for command in [asked] if asked else [["cc"], ["gcc"], ["clang"]]:
        if shutil.which(command[0]):
            return [*command, *_FLAGS, native]
    wanted = f"CC={shlex.join(asked)}" if asked else "cc, gcc or clang"
    raise BuildError(f"no C compiler: {wanted} is not installed")


def _key(command: Sequence[str], source: str) -> str:
    facts = (source.encode(), shlex.join(command).encode(), _run([command[0], "--version"]).encode(), _cpu())
    return hashlib.sha256(b"\0".join(hashlib.sha256(fact).digest() for fact in facts)).hexdigest()[:32]


def _cpu() -> bytes:
    """Return a text that differs between processors that need different machine code."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = ("vendor_id", "cpu family", "model\t", "flags", "Features", "CPU part")
    # The cores of a machine may differ only in the order of these lines.
    found = sorted({line for line in lines if line.startswith(names)})
    return "\n".join([platform.machine(), platform.processor(), *found]).encode()


def _holds(folder: OwnFolder, name: str) -> bool:
    """Return whether the file `name` exists and ends in the hash of its other bytes.

    The hash is needed because loading a library that a full disk has truncated kills the process.
    """
    try:
        held = folder.read(name)
    except WrittenByOthersError as error:
        _warn_once(f"{error}. It is not loaded but compiled and written again")
        return False
    return held is not None and hashlib.sha256(held[:-_HASH_BYTES]).digest() == held[-_HASH_BYTES:]


def _loaded(folder: OwnFolder, name: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(folder.path_of(name))
    except OSError as error:
        raise BuildError(f"the library that the C compiler made does not load: {error}") from None


@functools.cache
def _warn_once(said: str) -> None:
    fix = "Let nobody else write there (`chmod go-w`), or set ELIXIR_CACHE_DIR to a folder of your own."
    warnings.warn(f"{said}. {fix}", ElixirWarning, stacklevel=6)


def _compiled(command: Sequence[str], source: str) -> bytes:
    """Return the bytes of the library followed by their hash; compiled in a folder that no other user can enter."""
    try:
        with tempfile.TemporaryDirectory(prefix="elixir-") as folder:
            path = Path(folder) / "library.so"
            _run([*command, "-o", str(path), "-x", "c", "-", "-lm"], source)
            library = path.read_bytes()
    except OSError as error:
        raise BuildError(f"there is no folder for temporary files: {error}") from None
    # The loader ignores bytes behind the last section of a library.
    return library + hashlib.sha256(library).digest()


def _run(command: Sequence[str], given: str = "") -> str:
    try:
        done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=_AT_MOST_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"the C compiler does not run: {error}") from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise BuildError(f"`{shlex.join(command)}` failed: {said[0] if said else f'exit code {done.returncode}'}")
    return done.stdout
