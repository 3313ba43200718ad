"""Write a page of the results of `run.sh`, and the facts on it as JSON.

    python benchmarks/gpu/page.py /tmp/gpu/results benchmarks/results/gpu/h200 --commit 765bee9

Reads the lines of each question and the results of the tests; writes README.md and facts.json in the second folder.
Tracebacks, logs and paths of the machine are left out.
"""

import argparse
import json
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

MIB = 2**20
Fact = dict[str, Any]


def facts_of(path: Path) -> list[Fact]:
    """Return the facts of a question, in the order in which they became known; empty if it was not asked."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def failures(facts: Sequence[Fact]) -> list[str]:
    """Return the cases that ended with an exception, each with its text."""
    return [f"{fact['case']}: {fact['error'].splitlines()[0]}" for fact in facts if fact.get("ok") is False]


def mib(nbytes: float | None) -> str:
    """Return bytes in MiB; a dash if there are none."""
    return "-" if nbytes is None else f"{nbytes / MIB:,.1f}"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterator[str]:
    """Yield a table of Markdown, with an empty line behind it; nothing without rows."""
    if rows:
        yield f"| {' | '.join(head)} |"
        yield "|" + "---|" * len(head)
        yield from (f"| {' | '.join(map(str, row))} |" for row in rows)
        yield ""


def exactness(folder: Path) -> Iterator[str]:
    """Yield the comparison of ten steps with those of torch, by compiler and budget."""
    rows = []
    for name in ("trains", "compiles"):
        differ: dict[str, Fact] = {}
        for fact in facts_of(folder / f"{name}.jsonl"):
            if "gradients_differ" in fact:
                differ[fact["case"]] = fact
            elif "measured_bytes" in fact:
                grads = differ[fact["case"]]
                rows.append(
                    (
                        fact["case"],
                        mib(fact["budget_bytes"]),
                        mib(fact["planned_bytes"]),
                        mib(fact["measured_bytes"]),
                        "yes" if fact["held"] else "**no**",
                        f"{grads['gradients_differ']} of {grads['of']}, {grads['most']:.1e}",
                        "-" if fact["losses_apart"] is None else f"{fact['losses_apart']:.1e}",
                    )
                )
    if rows:
        yield from ("## Ten steps of a GPT-2 of four layers, beside torch with the same compiler", "")
    head = ("compiler, budget", "budget MiB", "planned", "measured", "held", "gradients that differ", "losses apart")
    yield from table(head, rows)


def late_compute(folder: Path) -> Iterator[str]:
    """Yield whether late compute changed a weight, by update mode."""
    rows = [(f["mode"], f["dtype"], f["same"]) for f in facts_of(folder / "late.jsonl") if "same" in f]
    if rows:
        yield from ("## Weights under late compute are those of a run that waits after every copy", "")
    yield from table(("update", "parameters", "same bits"), rows)


def machine(folder: Path) -> Iterator[str]:
    """Yield what the machine is, pins and copies."""
    for fact in facts_of(folder / "facts.jsonl"):
        if "device" in fact:
            yield from (f"- device: `{fact['device'].partition(', uuid')[0]})`, cuDNN {fact['cudnn']}",)
    for fact in facts_of(folder / "pinning.jsonl"):
        if "is_pinned" in fact:
            yield f"- pinning {mib(fact['pinned_bytes'])} MiB takes {fact['took_s']:.2f} s"
        elif "bytes_per_s" in fact and fact["nbytes"] > 2**31:
            yield f"- {fact['copy']} of {mib(fact['nbytes'])} MiB: {fact['bytes_per_s'] / 1e9:.1f} GB/s"
        elif "library_bytes" in fact:
            yield f"- workspaces of matrix products: {mib(fact['library_bytes'])} MiB"
        elif "more_bytes" in fact:
            yield f"- {fact['after']} allocates {fact['more_bytes']} B more"
        elif "attention" in fact:
            yield f"- attention in {fact['attention']}: {fact['node']}"
    for fact in facts_of(folder / "measure.jsonl"):
        if "measured" in fact:
            node = fact["measured"]["nodes"][0]
            rates = {name: f"{rate / 1e12:.1f}" for name, rate in node["device"]["flops_per_s"].items()}
            yield f"- measured TFLOP/s: {rates}; memory {node['device']['memory_bytes_per_s'] / 1e12:.2f} TB/s"
            host = node["host"]
            rates_g = [
                f"{(host[key] or 0) / 1e9:.1f}" for key in ("update_elements_per_s", "busy_update_elements_per_s")
            ]
            yield f"- AdamW on {host['cores']} cores: {rates_g[0]} G elements per second, {rates_g[1]} beside copies"
    for fact in facts_of(folder / "sanitizer.jsonl"):
        if fact.get("case") == "three steps":
            yield f"- torch's sanitizer of streams over three steps: {'nothing found' if fact['ok'] else fact['error']}"
    yield ""


MODELS = {
    "llama": "A Llama of 1.1 B parameters, 8 sequences of 1024 tokens",
    "coded": "A Llama of 5.5 B parameters in NF4 with adapters of rank 16, 4 sequences of 1024 tokens",
}


def figures(folder: Path) -> Iterator[str]:
    """Yield seconds and bytes of the Llama, a row for each training; one that was cut off has its last steps there."""
    rows: dict[str, list[tuple[object, ...]]] = {}
    for path in sorted(folder.glob("*.jsonl"), key=lambda path: path.stat().st_mtime):
        facts = facts_of(path)
        steps = [fact for fact in facts if "step_s" in fact]
        if not steps:
            continue
        built = next(fact for fact in facts if "params" in fact)
        plan: Mapping[str, Any] = ([fact for fact in facts if "planned_s" in fact] or [{}])[-1]
        planned_s = plan.get("planned_s")
        paired = [fact for fact in facts if "without_waits_s" in fact]
        waits = f"{paired[0]['without_waits_s'] / paired[0]['waiting_s']:.3f}" if paired else "-"
        rows.setdefault(built.get("model", "llama"), []).append(
            (
                path.stem,
                mib(built["budget_bytes"]),
                mib(plan.get("planned_bytes")),
                mib(steps[-1].get("requested_bytes")),
                mib(steps[-1].get("reserved_bytes")),
                f"{statistics.median(step['step_s'] for step in (steps[1:] or steps)[-4:]) * 1e3:.1f}",
                "-" if planned_s is None else f"{planned_s * 1e3:.1f}",
                waits,
                f"{steps[0]['step_s']:.0f}",
                len(steps),
                f"{steps[-1]['loss']:.4f}",
            )
        )
    for model, found in rows.items():
        yield from (f"## {MODELS[model]}", "")
        head = ("training", "budget MiB", "planned", "requested", "reserved", "step ms", "planned ms")
        yield from table((*head, "without waits", "first step s", "steps", "last loss"), found)
    if rows:
        yield from (
            "'Without waits' is the seconds of steps whose host waits for no copy, as a share of those that wait.",
            "",
        )


TESTS = {
    "tests": "Tests of `tests/gpu`",
    "newer": "Tests of `tests/run` of frozen weights, classes that update whole tensors, and files on disk",
    "runs": "Tests of `tests/run`, on the GPU by default",
}


def tests(folder: Path) -> Iterator[str]:
    """Yield the counts of the tests and the names of those that failed."""
    for name, title in TESTS.items():
        path = folder / f"{name}.xml"
        if not path.exists():
            continue
        cases = list(ElementTree.parse(path).getroot().iter("testcase"))
        failed = [case.get("name") for case in cases if {"failure", "error"} & {part.tag for part in case}]
        skipped = sum(case.find("skipped") is not None for case in cases)
        yield from (f"## {title}", "")
        yield f"{len(cases) - len(failed) - skipped} passed, {len(failed)} failed, {skipped} skipped."
        yield ""
        yield from (f"- failed: `{name}`" for name in failed)
        yield ""


def random_runs(folder: Path) -> Iterator[str]:
    """Yield how many random runs there were, and those that were wrong or exceeded their budgets."""
    lines = [
        line
        for path in sorted(folder.glob("random_*.log"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.startswith("Draw(")
    ]
    if lines:
        bad = [line for line in lines if not re.search(r"KiB, [\d.]+ s$", line)]  # what is wrong comes behind it
        yield from ("## Random runs, bit by bit beside torch's, under a budget each", "")
        yield f"{len(lines) - len(bad)} of {len(lines)} have torch's losses and weights, and peaks within the budget."
        yield ""
        yield from (f"- {line}" for line in bad)
        yield ""


def held(folder: Path) -> Iterator[str]:
    """Yield what the allocator held, by model."""
    found = [path.read_text(encoding="utf-8").splitlines() for path in sorted(folder.glob("held_*.log"))]
    tables = [[line for line in lines if line.startswith("|")] for lines in found]
    tables = [lines for lines in tables if lines]
    if tables:
        yield from ("## What torch's allocator holds, in MiB", "")
        yield from tables[0][:2]
        yield from (line for lines in tables for line in lines[2:])
        yield ""


def page_of(folder: Path, commit: str) -> str:
    """Return the page of the results in `folder` as Markdown."""
    imported = next((f for path in folder.glob("*.jsonl") for f in facts_of(path) if "torch" in f), {"torch": "?"})
    broken = [f"- {path.stem}: {line}" for path in sorted(folder.glob("*.jsonl")) for line in failures(facts_of(path))]
    lines = [
        "# Elixir on a GPU",
        "",
        f"Written by `benchmarks/gpu/page.py` from a run of `benchmarks/gpu/run.sh` at commit {commit}, "
        f"torch {imported['torch']}.",
        "",
        *machine(folder),
        *exactness(folder),
        *late_compute(folder),
        *figures(folder),
        *tests(folder),
        *random_runs(folder),
        *held(folder),
    ]
    if broken:
        lines += ["## Cases that ended with an exception", "", *broken, ""]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    """Write the page and the facts of the folders of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--commit", default="unknown")
    arguments = parser.parse_args()
    arguments.target.mkdir(parents=True, exist_ok=True)
    (arguments.target / "README.md").write_text(page_of(arguments.results, arguments.commit), encoding="utf-8")
    kept = {
        path.stem: [{k: v for k, v in fact.items() if k != "traceback"} for fact in facts_of(path)]
        for path in sorted(arguments.results.glob("*.jsonl"))
        if path.stem != "facts"
    }
    text = ",\n".join(
        f"{json.dumps(name)}: [\n " + ",\n ".join(map(json.dumps, facts)) + "\n]" for name, facts in kept.items()
    )
    (arguments.target / "facts.json").write_text("{\n" + text + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
