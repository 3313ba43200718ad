"""The host kernel, compiled by the system's C compiler on first use and kept in the cache; other sources likewise.

    $CC | cc | gcc | clang  +  kernel.c  ->  <cache>/host/<hash of source, command, compiler version, CPU>.so

The CPU is in the name because clusters are mixed and share home folders (DeepSpeed #5677: built on one node type, run
on another). Compiling took 0.3 s. What is in the cache is run, so it counts only if nobody else could have written it.
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

from elixir_compile.errors import ElixirWarning
from elixir_compile.folders import OwnFolder, WrittenByOthersError, cache_dir, own_folder, private_folder

SOURCE = Path(__file__).with_name("kernel.c")
_FLAGS = (
    "-std=gnu99",
    "-O3",
    "-fno-math-errno",
    "-fno-trapping-math",
    # The kernel says itself where it multiplies and adds at once.
    "-ffp-contract=off",
    "-shared",
    "-fPIC",
)
_AT_MOST_S = 120.0
_HASH_BYTES = 32


class BuildError(Exception):
    """Why there is no compiled kernel; whoever asks for one warns and goes on without."""


def loaded_kernel() -> ctypes.CDLL:
    """Return the host kernel, compiled now if the cache has none for this compiler and CPU.

    Raises BuildError without a working compiler or a cache that can be written.
    """
    return loaded(SOURCE.read_text(encoding="utf-8"))


def loaded(source: str) -> ctypes.CDLL:
    """Return the library that the C text `source` compiles to, with the same flags and from the same cache.

    If others than this user and root could have written the cache, it is compiled for this process alone, with a
    warning. Raises BuildError as above.
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
    """Return the compiler with the kernel's flags; `-o`, an output and sources complete it.

    Raises BuildError where no compiler is installed.
    """
    return [*_compiler(), *_FLAGS, _native_flag()]


def _compiler() -> Sequence[str]:
    """Return the command that runs the compiler: `CC`, which may hold flags, or the first that is installed."""
    asked = shlex.split(os.environ.get("CC", ""))
    for command in [asked] if asked else [["cc"], ["gcc"], ["clang"]]:
        if shutil.which(command[0]):
            return command
    wanted = f"CC={shlex.join(asked)}" if asked else "cc, gcc or clang"
    raise BuildError(f"no C compiler: {wanted} is not installed")


def _native_flag() -> str:
    # Clang on Arm took no -march=native before version 16.
    return "-march=native" if platform.machine() in ("x86_64", "AMD64", "i686") else "-mcpu=native"


def _key(command: Sequence[str], source: str) -> str:
    facts = (source.encode(), shlex.join(command).encode(), _run([command[0], "--version"]).encode(), _cpu())
    return hashlib.sha256(b"\0".join(hashlib.sha256(fact).digest() for fact in facts)).hexdigest()[:32]


def _cpu() -> bytes:
    """Return what tells processors apart that need other machine code."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = ("vendor_id", "cpu family", "model\t", "flags", "Features", "CPU part")
    # Cores of one machine may differ in their order only.
    found = sorted({line for line in lines if line.startswith(names)})
    return "\n".join([platform.machine(), platform.processor(), *found]).encode()


def _holds(folder: OwnFolder, name: str) -> bool:
    """Return whether the file `name` is there and ends in the hash of what is before.

    Loading a library that a full disk cut short is no exception, it kills the process.
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
        raise BuildError(f"what the C compiler makes does not load: {error}") from None


@functools.cache
def _warn_once(said: str) -> None:
    fix = "Let nobody else write there (`chmod go-w`), or set ELIXIR_CACHE_DIR to a folder of your own."
    warnings.warn(f"{said}. {fix}", ElixirWarning, stacklevel=6)


def _compiled(command: Sequence[str], source: str) -> bytes:
    """Return the library and its hash, compiled in a folder that nobody else can enter."""
    try:
        with tempfile.TemporaryDirectory(prefix="elixir-") as folder:
            path = Path(folder) / "library.so"
            _run([*command, "-o", str(path), "-x", "c", "-", "-lm"], source)
            library = path.read_bytes()
    except OSError as error:
        raise BuildError(f"there is no folder for temporary files: {error}") from None
    # What follows the last section of a library is never loaded.
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
