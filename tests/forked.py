"""Tests of a copy of the tree, each run in a fork of this process, which has loaded torch and no part of the package.

A fresh process takes 8 s to load torch, Inductor and transformers; a fork takes none.
"""

import importlib
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from tests.run.processes import let_forks_use_cuda

_LOADED = (
    "torch",
    "torch.distributed.tensor",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "scipy.optimize",
    "transformers.models.gpt2.modeling_gpt2",
    "pytest",
    "hypothesis",
)
"""Nothing of it may start threads, which a fork does not have."""
_HANGS_S = 30.0
"""A process that computes nothing for so long waits for what never comes."""
_PARTS = ("elixir_compile", "tests", "docs", "benchmarks")


@dataclass(frozen=True, slots=True)
class Stage:
    """Tests that run in one process until the first fails."""

    paths: tuple[str, ...]
    checks: bool = False
    """Whether all of them run with checked accesses; without it each test says so itself."""
    has_slow: bool = False
    """Whether tests marked `slow` run too."""
    is_on_device: bool = False
    """Whether the process has a device made of host memory: CUDA where this process has its stand-in, else the second
    device type of `tests/device`."""
    plugins: tuple[str, ...] = ()
    """Modules that pytest loads before the tests."""


class Tree:
    """A copy of the tree at `root` in `folder`, and the tests of the copy."""

    def __init__(self, root: Path, folder: Path, limit_s: float) -> None:
        self._folder = folder
        self._limit_s = limit_s
        for part in _PARTS:
            shutil.copytree(root / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(root / "pyproject.toml", folder)
        self._known: set[str] = set()
        """Tests that pass on the unchanged tree."""

    @contextmanager
    def changed(self, path: Path, change: Callable[[bytes], bytes]) -> Iterator[None]:
        """Inside, the file at `path` in the tree is what `change` makes of it."""
        target = self._folder / path
        before = target.read_bytes()
        self._write(target, change(before))
        try:
            yield
        finally:
            self._write(target, before)

    def _write(self, target: Path, text: bytes) -> None:
        target.write_bytes(text)
        # Python compares a file with its compiled form by size and by the second of its change.
        for compiled in (target.parent / "__pycache__").glob(f"{target.stem}.*"):
            compiled.unlink()

    def passes(self, stage: Stage, test: str) -> bool:
        """Return whether `test`, which `run` returned for `stage`, passes now; True if it says how a process ended."""
        if "::" in test and test not in self._known:
            if self.run(replace(stage, paths=(test,))):
                return False
            self._known.add(test)
        return True

    def run(self, stage: Stage) -> str:
        """Run the tests of `stage`; return the test that failed or how they ended, or an empty text if all passed.

        Raises RuntimeError with the output if the tests could not run.
        """
        self._load()
        child = os.fork()
        if child == 0:
            self._tests(stage)
        status = _status(child, self._limit_s)
        if status is None:
            return "no end"
        code = os.waitstatus_to_exitcode(status)
        if code < 0:
            return f"signal {-code}"
        if code > 1:
            raise RuntimeError(f"{' '.join(stage.paths)} did not run:\n{self.output()}")
        failed = [line for line in self.output().splitlines() if line.startswith(("FAILED", "ERROR"))]
        return failed[0].split(" - ")[0].partition(" ")[2] if failed else "failed" if code else ""

    def output(self) -> str:
        """Return the end of what the last tests said."""
        return self._log.read_text(encoding="utf-8", errors="replace")[-8000:]

    @property
    def _log(self) -> Path:
        return self._folder / "output.txt"

    def _load(self) -> None:
        """Import what all tests need, in the first call only, so that the processes of the tests have it."""
        let_forks_use_cuda()
        for name in _LOADED:
            importlib.import_module(name)

    def _tests(self, stage: Stage) -> None:
        """Run the tests in this process, a new one, and end it."""
        code = 3
        try:
            os.setpgid(0, 0)
            output = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.chdir(self._folder)
            here = str(self._folder)
            others = [
                path
                for path in os.environ.get("PYTHONPATH", "").split(os.pathsep)
                if path and Path(path).resolve() != Path(__file__).parents[1]
            ]
            os.environ.update({"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([here, *others])})
            if stage.checks:
                os.environ["ELIXIR_CHECK_RACES"] = "tests.races.checked"
            sys.path[:] = [
                here,
                *(path for path in sys.path if Path(path or ".").resolve() != Path(__file__).parents[1]),
            ]
            for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "elixir_compile")]:
                del sys.modules[name]
            code = _pytest(stage)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)  # exit handlers would wait for threads that hang


def _status(child: int, limit_s: float) -> int | None:
    """Return how the process `child` ended; kill it, and return None, if it lasts `limit_s` or hangs."""
    process, began_s = psutil.Process(child), time.monotonic()
    busy_s, since_s = 0.0, began_s
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return status
        now_s, used_s = time.monotonic(), _cpu_s(process)
        if used_s != busy_s:  # less, if a process that it started has ended
            busy_s, since_s = used_s, now_s
        if now_s - began_s > limit_s or now_s - since_s > _HANGS_S:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
        time.sleep(0.05)


def _cpu_s(process: psutil.Process) -> float:
    """Return the seconds that `process` and the processes it started have computed."""
    total_s = 0.0
    for each in (process, *process.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            total_s += sum(each.cpu_times()[:2])
    return total_s


def _pytest(stage: Stage) -> int:
    import pytest
    import torch

    torch.set_num_threads(1)
    if stage.is_on_device:
        importlib.import_module("tests.device.emulated").start()
    package = importlib.import_module("elixir_compile")
    assert Path(str(package.__file__)).is_relative_to(Path.cwd()), "the package of the copy"
    slow = ("-m", "slow or not slow") if stage.has_slow else ()
    plugins = (part for name in ("no:cacheprovider", "no:xdist", *stage.plugins) for part in ("-p", name))
    return int(pytest.main(["-x", "-q", "--assert=plain", *plugins, *slow, *stage.paths]))
