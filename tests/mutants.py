"""Remove the waits of the runtime one at a time, and see whether the tests of races notice: `make mutants`.

A mutant is a copy of the tree in which one call that orders work is gone: a wait, an event, a place in the order of
compute, a reference that keeps memory alive. The script finds them in the syntax of the runtime, runs the tests of
races on each, and prints a table; the last line is `N of N caught`.
"""

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("runtime", "optim")
"""Folders of the package with code that orders work. The lanes themselves are the subject of tests of their own."""
WAITS = {"compute_waits", "host_waits", "synchronize", "synchronize_compute", "keep_until_gone"}
KEPT = {"sources", "arriving", "leaving", "_departing"}
"""Names of lists and fields that keep memory alive until a wait."""
TESTS = {
    "saved.py": ("tests/run/races", "tests/run/runtime/test_activations.py"),
    "slices.py": ("tests/run/races", "tests/run/micro_batches/test_slices.py"),
    "sharded.py": ("tests/run/races", "tests/run/distributed/test_rank_updates.py"),
    "ranks.py": ("tests/run/races", "tests/run/distributed/test_ranks.py"),
}
"""Tests by the name of the mutated file; the tests of races alone for others."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one file: the characters of `span` become `replacement`."""

    path: Path
    line: int
    what: str
    span: tuple[int, int]
    replacement: str

    def applied(self, text: str) -> str:
        """Return `text`, the source of the file, with the change."""
        start, end = self.span
        return text[:start] + self.replacement + text[end:]


def mutants() -> list[Mutant]:
    """Return every mutant of the package."""
    package = ROOT / "elixir_compile"
    files = sorted(path for folder in FOLDERS for path in (package / folder).rglob("*.py"))
    return [mutant for path in files if path.parent.name != "lanes" for mutant in mutants_of(path)]


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Yield the mutants of one file in the order of their lines."""
    text = path.read_text(encoding="utf-8")
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def mutant(node: ast.stmt | ast.expr, what: str, replacement: str) -> Mutant:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        span = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        return Mutant(path.relative_to(ROOT), node.lineno, what, span, replacement)

    for node in sorted(ast.walk(ast.parse(text)), key=lambda node: getattr(node, "lineno", 0)):
        match node:
            case ast.Expr(value=ast.Call(func=ast.Attribute(attr=name))) if name in WAITS:
                yield mutant(node, name, "pass")
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=owner, attr="append"))) if _name(owner) in KEPT:
                yield mutant(node, f"keeps {_name(owner)}", "pass")
            case ast.AugAssign(target=target) if _name(target) in KEPT:
                yield mutant(node, f"keeps {_name(target)}", "pass")
            case ast.Call(func=ast.Attribute(value=owner, attr="behind_compute"), args=args):
                given = ", ".join(map(ast.unparse, args))
                yield mutant(node, "behind compute", f"{ast.unparse(owner)}.beside_compute({given})")
                if args:
                    yield mutant(node, "after an event", f"{ast.unparse(owner)}.behind_compute()")
            case ast.Call(func=ast.Attribute(value=owner, attr="beside_compute"), args=[_]):
                yield mutant(node, "after an event", f"{ast.unparse(owner)}.beside_compute()")
            case ast.Call(func=ast.Attribute(attr="mark" | "mark_compute"), args=[]):
                yield mutant(node, "event", "None")
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Attribute(attr="queued"), attr="wait"))):
                yield mutant(node, "wait for an update", "pass")


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def is_caught(mutant: Mutant, limit_s: float) -> str:
    """Run the tests on the tree with `mutant`; return how they failed, or an empty text if they passed."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for part in ("elixir_compile", "tests", "docs", "benchmarks"):
            shutil.copytree(ROOT / part, tree / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", tree)
        target = tree / mutant.path
        target.write_text(mutant.applied(target.read_text(encoding="utf-8")), encoding="utf-8")
        env = os.environ | {"PYTHONPATH": folder, "OMP_NUM_THREADS": "1", "ELIXIR_CACHE_DIR": str(tree / "cache")}
        for tests in TESTS.get(mutant.path.name, ("tests/run/races",)):
            checks = {} if tests == "tests/run/races" else {"ELIXIR_CHECK_RACES": "1"}
            command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", tests]
            try:
                done = subprocess.run(
                    command, cwd=tree, env=env | checks, capture_output=True, text=True, timeout=limit_s, check=False
                )
            except subprocess.TimeoutExpired:
                return "no end"
            if done.returncode == 1:
                names = [line.split(" - ")[0] for line in done.stdout.splitlines() if line.startswith("FAILED")]
                return names[0].rpartition("::")[2] if names else "failed"
            if done.returncode:
                raise RuntimeError(f"the tests of {mutant.path}:{mutant.line} did not run:\n{done.stdout[-2000:]}")
    return ""


def main() -> int:
    """Run the mutants that the command names, or all; return 1 if any was not caught."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="list the mutants and run none")
    parser.add_argument("--only", default="", help="run only mutants whose `path:line what` contains this text")
    parser.add_argument("--limit-s", type=float, default=600.0, help="seconds of a test run that count as caught")
    options = parser.parse_args()
    chosen = [each for each in mutants() if options.only in f"{each.path}:{each.line} {each.what}"]
    num_caught = 0
    for mutant in chosen:
        began_s = time.monotonic()
        caught = "" if options.list else is_caught(mutant, options.limit_s)
        num_caught += bool(caught)
        verdict = "" if options.list else caught or "NOT CAUGHT"
        print(
            f"{mutant.path}:{mutant.line:<5} {mutant.what:24} {time.monotonic() - began_s:5.0f} s  {verdict}",
            flush=True,
        )
    if not options.list:
        print(f"{num_caught} of {len(chosen)} caught")
    return int(not options.list and num_caught < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
