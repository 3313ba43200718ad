"""Remove the waits of the runtime one at a time, and see whether the tests of races notice: `make mutants`.

A mutant is a copy of the tree in which one call that orders work is gone: a wait, an event, a place in the order of
compute, a reference that keeps memory alive. The script finds them in the syntax of the runtime, runs the tests of
races on each until one fails, and prints a table; the last line is `N of N caught`.

```text
  runtime/gathers.py:68    after an event         3 s  test_steps_have_no_race_and_the_same_bits[host-in_backward-0.0]
```

The tests run in forks of a process that has loaded torch, the cheapest and most telling ones first (`STAGES`). Each
test that catches a mutant passes on the unchanged copy.

With `--cuda` the mutants that concern streams, events and memory run on torch's CUDA build over its stand-in, whose
clocks judge them: `.venv-2.11.0/bin/python -m tests.mutants --cuda`. Those of threads that wait for threads are left
out, because all threads of a host have one clock there.
"""

import argparse
import ast
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.cuda_standin import build
from tests.cuda_standin import device as standin
from tests.forked import Stage, Tree

ROOT = Path(__file__).parents[1]
FILES = ("optim/update.py", "runtime/*.py", "runtime/distributed/sharded.py", "runtime/distributed/ranks.py")
"""Files of the package with code that orders work on memory."""
OTHER_SUBJECTS = {"lanes.py", "disk_file.py", "disk_store.py", "measure.py", "Exchange", "Reduction"}
"""Files and classes with other subjects, each with tests of its own: the lanes themselves, the queues of files, the
clocks of a step, and the messages between ranks."""
CALLS = {
    *("compute_waits", "host_waits", "synchronize", "keep_until_gone", "wait", "wait_for"),
    *("await_update", "call_off", "_wait_for_copies", "_let_compute_wait", "let_compute_wait", "_go_on", "drain"),
}
"""Methods whose calls order work, or, in one thread, make the device current before it."""
KEPT = {"sources", "arriving", "leaving", "_departing"}
"""Names of lists and fields that keep memory alive until a wait."""
EVENTS = {"home_read", "let_compute_wait"}
"""Names of fields that keep an event for another thread."""
OF_STREAMS = r"compute_waits|host_waits|synchronize|keep|event|behind compute|_wait_for_copies|let_compute_wait"
"""Which mutants the clocks of the CUDA stand-in can see, as a search in their names."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one file: the bytes of `span` become `replacement`."""

    path: Path
    line: int
    place: str
    """The name of the innermost function, and the line."""
    what: str
    span: tuple[int, int]
    replacement: str

    @property
    def name(self) -> str:
        """What `--only` looks at, and the table says."""
        return f"{self.path.relative_to('elixir_compile')}:{self.line} {self.what}"

    def applied(self, text: bytes) -> bytes:
        """Return `text`, the source of the file, with the change."""
        start, end = self.span
        return text[:start] + self.replacement.encode() + text[end:]


def mutants() -> list[Mutant]:
    """Return every mutant of the package."""
    package = ROOT / "elixir_compile"
    files = sorted(path for files in FILES for path in package.glob(files) if path.name not in OTHER_SUBJECTS)
    return [mutant for path in files for mutant in mutants_of(path)]


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Yield the mutants of one file in the order of their lines."""
    text = path.read_bytes()
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def mutant(node: ast.stmt | ast.expr, what: str, replacement: str) -> Mutant:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        span = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        *_, function = (each.name for each in functions if each.lineno <= node.lineno <= (each.end_lineno or 0))
        place = f"{path.name} {function}: {text.splitlines()[node.lineno - 1].decode().strip()}"
        return Mutant(path.relative_to(ROOT), node.lineno, place, what, span, replacement)

    nodes = sorted(ast.walk(ast.parse(text)), key=lambda node: getattr(node, "lineno", 0))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    polls = {part for node in nodes if _is_poll(node) for part in ast.walk(node)}
    others = [node for node in nodes if isinstance(node, ast.ClassDef) and node.name in OTHER_SUBJECTS]
    left_out = {part for node in others for part in ast.walk(node)}
    for node in nodes:
        if node in left_out:
            continue
        match node:
            case ast.Expr(value=ast.Call(func=function)) if _name(function) in CALLS and node not in polls:
                yield mutant(node, _name(function), "pass")
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=owner, attr="append"))) if _name(owner) in KEPT:
                yield mutant(node, f"keeps {_name(owner)}", "pass")
            case ast.AugAssign(target=target) if _name(target) in KEPT:
                yield mutant(node, f"keeps {_name(target)}", "pass")
            case ast.Assign(targets=[ast.Attribute(attr=name)]) if name in EVENTS:
                yield mutant(node, f"event {name}", "pass")
            case ast.Call(func=ast.Name("Transfer"), args=[_, _, _, kept]):
                yield mutant(kept, "keeps sources", "()")
            case ast.keyword(arg="sources", value=kept):
                yield mutant(kept, "keeps sources", "()")
            case ast.Call(func=ast.Attribute(value=owner, attr="behind_compute"), args=args):
                given = ", ".join(map(ast.unparse, args))
                yield mutant(node, "behind compute", f"{ast.unparse(owner)}.beside_compute({given})")
                if args:
                    yield mutant(node, "after an event", f"{ast.unparse(owner)}.behind_compute()")
            case ast.Call(func=ast.Attribute(value=owner, attr="beside_compute"), args=[_]):
                yield mutant(node, "after an event", f"{ast.unparse(owner)}.beside_compute()")
            case ast.Call(func=ast.Attribute(attr="mark" | "mark_compute"), args=[]) if node not in polls:
                yield mutant(node, "event", "None")


def _is_poll(node: ast.AST) -> bool:
    """Whether `node` looks at collectives for errors of peers while it waits: the next line waits for the same."""
    match node:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Attribute(attr="unfinished"), attr="wait_for"))):
            return True
    return False


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


UNITS = Stage(("tests/run/races/test_waits.py",))
"""Each wait without a model: it finds most of them, within seconds."""
ORDERS = Stage(("tests/run/races/test_mended.py", "tests/run/races/test_races.py"))
"""One order of each kind of step, judged by the check of races."""
BITS = Stage(("tests/run/races/test_simulated.py",))
"""Bits under late copies."""
DEVICE = Stage(("tests/device/on_device_races.py",), has_slow=True, is_on_device=True)
"""Both, on a device with memory of its own."""


def _checked(*paths: str) -> Stage:
    return Stage(tuple(f"tests/run/{path}.py" for path in paths), checks=True)


AWAITED = _checked("runtime/test_awaited", "optim/test_step_habits")
SHARDS = Stage(("tests/run/races/test_rank_orders.py",), has_slow=True)
RANKS = _checked("distributed/test_ranks", "distributed/test_control")
STAGES = {
    "awaited.py": (UNITS, ORDERS, AWAITED, BITS, DEVICE),
    "executor.py": (UNITS, SHARDS, ORDERS, DEVICE, _checked("runtime/test_backwards"), BITS, AWAITED, RANKS),
    "gathers.py": (UNITS, ORDERS, SHARDS, AWAITED, BITS, DEVICE),
    "gradients.py": (UNITS, DEVICE, SHARDS, ORDERS, BITS),
    "recording.py": (_checked("runtime/test_ledger"), DEVICE),
    "placed.py": (UNITS, ORDERS, AWAITED, _checked("runtime/test_backwards", "habits/test_parameters"), BITS, DEVICE),
    "ranks.py": (SHARDS, RANKS),
    "saved.py": (
        UNITS,
        ORDERS,
        BITS,
        _checked("runtime/test_activations", "graph/test_values_in_parts", "graph/test_slices"),
        DEVICE,
    ),
    "sharded.py": (SHARDS, RANKS),
    "update.py": (UNITS, DEVICE, ORDERS, BITS, AWAITED),
    "updates.py": (UNITS, _checked("optim/test_updates", "races/test_simulated"), ORDERS, AWAITED, BITS, DEVICE),
}
"""By the name of the mutated file, the tests that run one after another; `OTHERS` for other files."""
OTHERS = (UNITS, ORDERS, BITS, DEVICE)


def _over_cuda(*paths: str, plugins: tuple[str, ...] = ("tests.device.on_default",)) -> Stage:
    return Stage(paths, has_slow=True, is_on_device=True, plugins=plugins)


CUDA_RANKS = _over_cuda(
    *(
        f"tests/cuda_standin/on_cuda_nccl.py::test_{name}"
        for name in ("each_access_to_shards_has_an_order", "two_ranks_of_elixir_train_as_one")
    ),
    plugins=(),
)
CUDA_OTHERS = (
    _over_cuda("tests/cuda_standin/on_cuda_orders.py"),
    _over_cuda("tests/device/on_device_races.py", plugins=()),
)
CUDA_STAGES = {
    "sharded.py": (CUDA_RANKS,),
    "ranks.py": (CUDA_RANKS,),
    "gradients.py": (*CUDA_OTHERS, CUDA_RANKS),
}
"""The same on the CUDA stand-in."""


UNSEEN = {
    "awaited.py wait: self._let_compute_wait()": "for a thread that waits while another thread ends the wait",
    "gradients.py _add: self._lanes.host_waits(self._lanes.d2h.mark())": "for a device that is a CPU",
    "placed.py adopt: self._lanes.h2d.synchronize()": "the driver waits before pinned memory is no longer pinned",
    "placed.py adopt: self._lanes.d2h.synchronize()": "the same",
    "saved.py _drop: self._lanes.h2d.synchronize()": "the same",
    "saved.py _drop: self._lanes.d2h.synchronize()": "the same",
}
"""Lines whose mutants the clocks of the CUDA stand-in cannot see, and why; the engines of a CPU see them."""


def caught_by(mutant: Mutant, tree: Tree, most_stages: int) -> str:
    """Return the test that fails with `mutant` and passes without it, or an empty text if no test of its stages does.

    Raises RuntimeError if the test fails without the mutant too.
    """
    stages, others = (CUDA_STAGES, CUDA_OTHERS) if standin.is_here() else (STAGES, OTHERS)
    for stage in stages.get(mutant.path.name, others)[:most_stages]:
        with tree.changed(mutant.path, mutant.applied):
            failed = tree.run(stage)
        if failed:
            if not tree.passes(stage, failed):
                raise RuntimeError(f"{failed} fails without any change:\n{tree.output()}")
            return failed
    return ""


def main() -> int:
    """Run the mutants that the command names, or all; return 1 if any was not caught."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="list the mutants and run none")
    parser.add_argument("--only", default="", help="run only mutants whose `path:line what` matches this expression")
    parser.add_argument("--limit-s", type=float, default=300.0, help="seconds of a stage of tests that count as caught")
    parser.add_argument("--most-stages", type=int, default=99, help="run at most so many stages on each mutant")
    parser.add_argument("--cuda", action="store_true", help="on torch's CUDA build over its stand-in")
    options = parser.parse_args()
    if options.cuda and not standin.is_here():
        build.main(["-m", "tests.mutants", *sys.argv[1:]])  # starts this process again
    chosen = [each for each in mutants() if re.search(options.only, each.name)]
    if options.cuda:
        seen = [each for each in chosen if each.place not in UNSEEN]
        chosen = [each for each in seen if re.search(OF_STREAMS, each.what)]
    if options.list:
        print(*(each.name for each in chosen), f"{len(chosen)} mutants", sep="\n")
        return 0
    num_caught = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Tree(ROOT, Path(folder), options.limit_s)
        for mutant in chosen:
            began_s = time.monotonic()
            caught = caught_by(mutant, tree, options.most_stages)
            num_caught += bool(caught)
            verdict = caught.rpartition("::")[2] or "NOT CAUGHT"
            print(f"{mutant.name:58} {time.monotonic() - began_s:5.0f} s  {verdict}", flush=True)
    print(f"{num_caught} of {len(chosen)} caught")
    return int(num_caught < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
